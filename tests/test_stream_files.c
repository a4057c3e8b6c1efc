/* Tests of the files that a stream hands on undecoded (data/set_stream.h). The consumer of these tests plays
 * the role of a device: it decodes whole files with libjpeg alone, cuts out and resizes their parts, and
 * writes them into the batch. */
#include "stream_support.h"

#include "image_support.h"

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

TestSuite(stream_files, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- The share ---- */

/* Counts are within 4.5 standard deviations, over all numbers and within blocks of 256. */
Test(stream_files, the_share_is_met)
{
    enum { COUNT = 1 << 16, BLOCK = 256 };
    static const double shares[] = {0, 0.001, 0.25, 0.5, 0.7, 0.999, 1};
    for (size_t s = 0; s < COUNT_OF(shares); s++) {
        const double share = shares[s], deviation = sqrt(share * (1 - share));
        uint32_t all = 0, block = 0, odd = 0;
        for (uint32_t n = 0; n < COUNT; n++) {
            const bool is = set_stream_on_device(n, share);
            all += is;
            block += is;
            odd += is && n % 2;
            cr_expect(!is || set_stream_on_device(n, share + 0.01),
                      "a larger share has all of a smaller one");
            if (n % BLOCK < BLOCK - 1)
                continue;
            cr_expect_leq(fabs(block - share * BLOCK), 2 + 4.5 * deviation * sqrt(BLOCK), "%g: %u", share,
                          block);
            block = 0;
        }
        cr_expect_leq(fabs(all - share * COUNT), 4.5 * deviation * sqrt(COUNT), "%g: %u", share, all);
        cr_expect_leq(fabs(odd - share * COUNT / 2), 4.5 * deviation * sqrt(COUNT / 2), "%g: %u", share, odd);
    }
    cr_expect(set_stream_on_device(UINT32_MAX, 1) && !set_stream_on_device(UINT32_MAX, 0));
}

#ifdef HAVE_JPEG

/* ---- The files ---- */

#define RES 20

/* The files of a data set, by the number in their name; owned. */
static struct file {
    uint8_t *bytes;
    size_t size;
    bool suits, intact; /* whether a device may decode it; whether the CPU can */
} made[128];
static uint32_t made_count;

static struct opened opened;

/* Writes the next file into one of the two classes of j/. Takes over `bytes`. */
static void put_file(uint8_t *bytes, size_t size, const char *extension, bool suits, bool intact)
{
    char name[64];
    cr_assert_lt(made_count, COUNT_OF(made));
    snprintf(name, sizeof name, "j/%u/%03u.%s", made_count % 2, made_count, extension);
    put(name, bytes, size);
    made[made_count++] = (struct file){bytes, size, suits, intact};
}

static void put_kind(const char *name, uint32_t width, uint32_t height, uint32_t exif, bool suits)
{
    const struct kind *kind = kinds;
    size_t size;
    while (strcmp(kind->name, name) != 0)
        kind++;
    uint8_t *bytes = encode(kind, width, height, exif, &size);
    put_file(bytes, size, "jpg", suits, true);
}

/* Writes a file of 4:2:0 that is changed: its last `cut` bytes are missing, `zeros` zero bytes precede its
 * end, and `rest` bytes follow it. */
static void put_changed(size_t cut, size_t zeros, size_t rest, bool suits, bool intact)
{
    size_t size;
    uint8_t *bytes = encode(&kinds[3], 60, 44, 0, &size), *changed = calloc(1, size + zeros + rest);
    memcpy(changed, bytes, size - 2);
    memcpy(changed + size - 2 + zeros, bytes + size - 2, 2);
    memset(changed + size + zeros, 'x', rest);
    free(bytes);
    put_file(changed, size - cut + zeros + rest, "jpg", suits, intact);
}

#ifdef HAVE_PNG
static void put_png(const char *extension)
{
    static uint8_t pixels[3 * 24 * 24];
    void *bytes;
    size_t size;
    for (size_t i = 0; i < sizeof pixels; i++)
        pixels[i] = (uint8_t)(i * 7);
    must(png_encode(pixels, &(struct png_shape){24, 24, 3}, &bytes, &size));
    put_file(bytes, size, extension, false, true);
}
#endif

/* Fills j/: most files suit a device. */
static void make_files(void)
{
    size_t size;
    state = 3;
    made_count = 0;
    EXPECT(0, "mkdir -p j/0 j/1");
    for (uint32_t i = 0; i < 6; i++)
        for (size_t k = 0; k < COUNT_OF(kinds); k++)
            put_kind(kinds[k].name, 40 + 9 * i, 61 - 5 * i, 0, k < 4);
    for (uint32_t exif = 1; exif <= 8; exif++)
        put_kind("4:2:0", 57, 41, exif, true);
    put_kind("4:4:4", 7, 40, 0, false); /* limits of nvJPEG, and of the kernel that resizes */
    put_kind("4:4:4", 8, 40, 0, true);
    put_kind("4:2:0", 100 * RES, 21, 0, true);
    put_kind("4:2:0", 100 * RES + 1, 21, 0, false);
    put_kind("4:2:0", 21, 100 * RES + 1, 0, false);
    put_changed(0, 0, 0, true, true);
    put_changed(400, 0, 0, false, false);
    put_changed(2, 0, 0, false, false); /* no end */
    put_changed(1, 0, 0, false, false);
    put_changed(0, 3, 0, false, true); /* padding that libjpeg accepts */
    put_changed(0, 0, 100, true, true);
    put_file(calloc(1, 1), 0, "jpg", false, false);
    uint8_t *bytes = encode(&kinds[3], 50, 50, 0, &size);
    put_file(bytes, size, "png", true, true); /* the content decides */
#ifdef HAVE_PNG
    put_png("png");
    put_png("jpg");
#endif
}

static void forget_files(void)
{
    for (uint32_t i = 0; i < made_count; i++)
        free(made[i].bytes);
    made_count = 0;
}

/* Returns the file of a sample. Keys are "0/012". */
static const struct file *file_of(uint32_t number)
{
    return &made[atoi(opened.dataset.samples[number % opened.dataset.sample_count].key + 2)];
}

/* Opens j/ for random resized crops. Broken samples are masked. */
static void open_files(void)
{
    open_set(&opened, "j");
    cr_assert_eq(opened.dataset.sample_count, made_count);
    opened.request.fit.how = FIT_RANDOM_RESIZED_CROP;
    opened.request.on_error = SET_STREAM_MASK;
}

/* ---- The consumer ---- */

/* The samples that the consumer keeps, with request.device_bytes: pixels of images as RGBX, or values. */
static struct {
    uint8_t *bytes[COUNT_OF(made)]; /* by sample; NULL: not kept */
    uint32_t room, left;            /* samples that it keeps; samples that were left out of batches */
} keeper;

static uint32_t keep_most; /* samples that the consumer of the next stream keeps */

static void forget_kept(void)
{
    for (uint32_t i = 0; i < COUNT_OF(made); i++)
        free(keeper.bytes[i]);
    memset(&keeper, 0, sizeof keeper);
    keeper.room = keep_most;
}

/* Keeps a sample of a batch if it can. Takes over `bytes`. */
static void keep(const struct stream_batch *batch, uint32_t index, const struct set_stream_file *file,
                 uint8_t *bytes)
{
    const uint32_t sample = batch->numbers[index] % opened.dataset.sample_count;
    const uint64_t *places = set_stream_places(opened.stream, batch);
    if (!places || places[index] != SET_STREAM_LOADED || keeper.room == 0 || keeper.bytes[sample] ||
        batch->labels[index] == STREAM_MASKED) {
        free(bytes);
        return;
    }
    keeper.room--;
    keeper.bytes[sample] = bytes;
    set_stream_keep(opened.stream, batch, index, sample, file);
    if (keeper.room == 0)
        set_stream_keep_no_more(opened.stream);
}

/* Returns the pixels of a file, as RGBX; the caller frees them. */
static uint8_t *pixels_of(const struct stream_batch *batch, const struct set_stream_file *file)
{
    const size_t count = (size_t)file->shape.width * file->shape.height;
    uint32_t width, height;
    if (file->bytes) {
        uint8_t *pixels = decode_plainly(file->bytes, file->size, JCS_EXT_RGBX, 1, &width, &height);
        cr_assert(width == file->shape.width && height == file->shape.height);
        return pixels;
    }
    uint8_t *pixels = malloc(4 * count);
    if (!file->pixels)
        return memcpy(pixels, keeper.bytes[set_stream_places(opened.stream, batch)[file->index]], 4 * count);
    cr_assert_eq((uintptr_t)file->pixels % STREAM_ALIGN, 0);
    for (size_t i = 0; i < count; i++)
        memcpy(pixels + 4 * i, file->pixels + 3 * i, 3);
    return pixels;
}

/* Fits the pixels of a file as a device does, and writes its part, channels first, to `to`. */
static void fit(const struct set_stream_file *file, const uint8_t *pixels, uint32_t channels, uint8_t *to)
{
    struct resampler resampler = {.plain = true};
    const struct image_box part = file->part;
    const uint32_t width = file->shape.width, height = file->shape.height;
    uint8_t *resized = malloc(3 * RES * RES + RESAMPLE_SLACK_BYTES), *upright = malloc(3 * RES * RES);
    uint8_t *rows = malloc((size_t)part.width * part.height * 4 + RESAMPLE_SLACK_BYTES);
    cr_assert(part.left + part.width <= width && part.top + part.height <= height);
    for (uint32_t y = 0; y < part.height; y++)
        memcpy(rows + (size_t)y * part.width * 4, pixels + 4 * ((size_t)(part.top + y) * width + part.left),
               (size_t)part.width * 4);
    must(resample_begin(&resampler, part.width, part.height, RES, RES, false));
    resample_rows(&resampler, 0, rows, (size_t)part.width * 4, part.height);
    resample_end(&resampler, resized);
    orientation_turn(file->turn, resized, RES, RES, 3, upright);
    for (uint32_t i = 0; i < RES * RES; i++) {
        const uint8_t *from = upright + 3 * i;
        if (channels == 1)
            to[i] = (uint8_t)((19595 * from[0] + 38470 * from[1] + 7471 * from[2] + 32768) >> 16);
        for (uint32_t c = 0; channels == 3 && c < 3; c++)
            to[c * RES * RES + i] = from[c];
    }
    resampler_close(&resampler);
    free(resized);
    free(upright);
    free(rows);
}

/* Compares the files of a batch with those on the disk, and decodes them into the batch. Keeps samples. */
static void consume(const struct stream_batch *batch)
{
    uint32_t count, last = 0;
    const struct set_stream_file *files = set_stream_files(opened.stream, batch, &count);
    for (uint32_t i = 0; i < count; i++) {
        const struct set_stream_file *file = &files[i];
        const uint32_t number = batch->numbers[file->index];
        cr_assert(file->index < batch->samples.count && (i == 0 || file->index > last));
        cr_assert(!file->bytes || (file->size == file_of(number)->size &&
                                   memcmp(file->bytes, file_of(number)->bytes, file->size) == 0));
        cr_assert_eq((uintptr_t)file->bytes % 64, 0);
        last = file->index;
        uint8_t *pixels = pixels_of(batch, file);
        fit(file, pixels, opened.request.channels,
            (uint8_t *)batch->samples.values + file->index * batch->samples.stride);
        if (set_stream_crops(&opened.request.fit))
            keep(batch, file->index, file, pixels);
        else
            free(pixels);
    }
    const uint64_t *places = set_stream_places(opened.stream, batch);
    for (uint32_t i = 0; places && i < batch->samples.count; i++) {
        const size_t bytes = batch->samples.stride;
        uint8_t *values = (uint8_t *)batch->samples.values + i * bytes;
        keeper.left += places[i] != SET_STREAM_LOADED;
        if (set_stream_crops(&opened.request.fit))
            continue;
        if (places[i] != SET_STREAM_LOADED)
            memcpy(values, keeper.bytes[places[i]], bytes);
        else
            keep(batch, i, NULL, memcpy(malloc(bytes), values, bytes));
    }
}

/* Expects that the files of a batch are those of the device's share that suit it. */
static void expect_files(const struct stream_batch *batch)
{
    uint32_t count, next = 0;
    const struct set_stream_file *files = set_stream_files(opened.stream, batch, &count);
    for (uint32_t i = 0; i < batch->samples.count; i++) {
        const uint32_t number = batch->numbers[i];
        const bool is = next < count && files[next].index == i,
                   wanted = set_stream_on_device(number, opened.request.device_share) &&
                            file_of(number)->suits && batch->samples.labels[i] != STREAM_MASKED;
        cr_assert_eq(is, wanted, "share %g, sample %u, file %td", opened.request.device_share, number,
                     file_of(number) - made);
        next += is;
    }
    cr_assert_eq(next, count);
}

/* ---- Files and other samples together are the samples of the CPU ---- */

/* The part of a step that a rank has: every sample whose index has this remainder. */
struct part {
    struct epochs epochs;
    uint32_t rank, ranks;
};

static struct part part;

static uint32_t list_part(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct part *of = context;
    const uint32_t count = list(&of->epochs, epoch, step, numbers);
    uint32_t own = 0;
    for (uint32_t i = of->rank; i < count; i += of->ranks)
        numbers[own++] = numbers[i];
    return own;
}

/* The samples of some epochs, by epoch and number. */
struct expected {
    uint8_t *values;
    int32_t *labels;
    uint8_t *seen;
    uint32_t count; /* numbers of an epoch */
};

/* Sets `expected` to what the CPU decodes; with `unscaled`, at full size. */
static void expect_of_cpu(uint32_t epochs, bool unscaled, struct expected *expected)
{
    opened.request.device_share = 0;
    opened.request.fit.unscaled = unscaled;
    start(&opened);
    struct record all = take(opened.stream, epochs * opened.request.plan.steps);
    const uint32_t count = opened.epochs.count;
    *expected = (struct expected){malloc(all.count * all.sample_bytes), malloc(all.count * sizeof(int32_t)),
                                  calloc(all.count, 1), count};
    for (uint32_t i = 0; i < all.count; i++) {
        const uint32_t at = i / count * count + all.numbers[i];
        memcpy(expected->values + at * all.sample_bytes, all.values + i * all.sample_bytes, all.sample_bytes);
        expected->labels[at] = all.labels[i];
    }
    forget(&all);
    stream_close(opened.stream);
    opened.request.fit.unscaled = false;
}

static void forget_expected(struct expected *expected)
{
    free(expected->values);
    free(expected->labels);
    free(expected->seen);
}

/* Takes the batches of some epochs on one rank, decodes their files, and compares all samples. */
static void compare_rank(uint32_t epochs, const struct expected *expected)
{
    for (uint64_t i = 0; i < epochs * opened.request.plan.steps; i++) {
        struct stream_batch batch;
        must(stream_next(opened.stream, &batch));
        if (opened.request.device_bytes == 0)
            expect_files(&batch);
        consume(&batch);
        for (uint32_t j = 0; j < batch.samples.count; j++) {
            const size_t at = batch.epoch * expected->count + batch.numbers[j], bytes = batch.samples.stride;
            cr_assert_eq(batch.samples.labels[j], expected->labels[at]);
            cr_assert(memcmp((const uint8_t *)batch.samples.values + j * bytes, expected->values + at * bytes,
                             bytes) == 0,
                      "epoch %llu, sample %u, file %td", (unsigned long long)batch.epoch, batch.numbers[j],
                      file_of(batch.numbers[j]) - made);
            expected->seen[at]++;
        }
        must(stream_release(opened.stream, &batch, NULL));
    }
}

/* Runs all ranks, consecutively. */
static void compare_ranks(uint32_t ranks, uint32_t epochs, const struct expected *expected)
{
    const size_t samples = (size_t)epochs * expected->count;
    memset(expected->seen, 0, samples);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        part = (struct part){opened.epochs, rank, ranks};
        opened.request.plan.list = list_part;
        opened.request.plan.context = &part;
        forget_kept();
        must(set_stream_open(&opened.request, &opened.stream));
        compare_rank(epochs, expected);
        stream_close(opened.stream);
    }
    for (size_t at = 0; at < samples; at++)
        cr_assert_eq(expected->seen[at], 1, "each sample is delivered once");
}

Test(stream_files, files_and_samples_are_those_of_the_cpu)
{
    enum { EPOCHS = 2 };
    static const double shares[] = {0, 0.3, 0.7, 1};
    struct expected expected;
    make_files();
    for (int how = FIT_RESIZE; how <= FIT_RANDOM_RESIZED_CROP; how++) {
        open_files();
        opened.request.fit.how = (enum fit_how)how;
        expect_of_cpu(EPOCHS, true, &expected);
        for (size_t s = 0; s < COUNT_OF(shares); s++)
            for (int threads = 1; threads <= 3; threads++) {
                opened.request.device_share = shares[s];
                opened.request.threads = threads;
                opened.request.fit.unscaled = shares[s] == 0;
                opened.request.resident_bytes = 0;
                compare_ranks((uint32_t)threads, EPOCHS, &expected);
                opened.request.resident_bytes = UINT64_MAX; /* the files stay in memory */
                compare_ranks(4 - (uint32_t)threads, EPOCHS, &expected);
            }
        forget_expected(&expected);
        dataset_close(&opened.dataset);
    }
    forget_files();
}

/* Opens streams of j/ whose consumer keeps none, some or all samples that it can, and compares them. */
static void compare_kept(const struct expected *expected)
{
    static const uint32_t most[] = {0, 1, 30, COUNT_OF(made)};
    opened.request.device_bytes = UINT64_C(1) << 24;
    for (size_t i = 0; i < COUNT_OF(most); i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            keep_most = most[i];
            opened.request.threads = threads;
            compare_ranks(1, 3, expected);
            const uint32_t kept = keep_most - keeper.room, passes = 2 * opened.request.copies;
            const bool scaled = set_stream_crops(&opened.request.fit) && !opened.request.fit.unscaled;
            cr_expect(i < 2 ? kept == most[i]
                            : kept >= (scaled  ? 20U
                                       : i < 3 ? 30U
                                               : made_count / 2),
                      "%u of %u", kept, made_count);
            cr_expect(opened.request.device_share > 0 ||
                          (keeper.left + 64 >= passes * kept && keeper.left <= (passes + 2) * kept),
                      "%u of %u", keeper.left, kept);
        }
    forget_kept();
    opened.request.device_bytes = 0;
}

/* The images that the consumer keeps, and those that it is handed decoded, become the samples of the CPU,
 * with any random crop; also if the CPU decodes the others at a smaller size. */
Test(stream_files, samples_that_the_consumer_keeps_are_those_of_the_cpu)
{
    struct expected expected;
    make_files();
    for (int how = FIT_RESIZE; how <= FIT_RANDOM_RESIZED_CROP; how++)
        for (int share = 0; share < 3; share++) { /* 0: also scaled images */
            open_files();
            opened.request.fit.how = (enum fit_how)how;
            opened.request.copies = 1 + (uint32_t)share % 2;
            opened.epochs.count *= opened.request.copies;
            expect_of_cpu(3, share > 0, &expected);
            opened.request.fit.unscaled = share > 0;
            opened.request.device_share = 0.5 * share;
            compare_kept(&expected);
            forget_expected(&expected);
            dataset_close(&opened.dataset);
        }
    forget_files();
}

/* One channel, and copies of the samples, which have their own numbers and crops. */
Test(stream_files, gray_images_and_copies_are_those_of_the_cpu)
{
    struct expected expected;
    make_files();
    open_files();
    opened.request.channels = opened.request.fit.channels = 1;
    opened.request.copies = 3;
    opened.epochs.count *= 3;
    expect_of_cpu(2, true, &expected);
    opened.request.device_share = 0.6;
    compare_ranks(2, 2, &expected);
    forget_expected(&expected);
    dataset_close(&opened.dataset);
    forget_files();
}

/* Without --channels, the CPU reports an image with other channels than the first. */
Test(stream_files, files_with_other_channels_are_left_to_the_cpu)
{
    struct stream_batch batch;
    enum status result = STATUS_OK;
    make_files();
    open_files();
    opened.request.fit.channels = 0;
    opened.request.device_share = 1;
    start(&opened);
    for (uint64_t step = 0; result == STATUS_OK && step < opened.request.plan.steps; step++) {
        result = stream_next(opened.stream, &batch);
        for (uint32_t i = 0, count; result == STATUS_OK && i < 1; i++) {
            const struct set_stream_file *files = set_stream_files(opened.stream, &batch, &count);
            for (uint32_t f = 0; f < count; f++)
                cr_expect_eq(files[f].shape.channels, 3);
            must(stream_release(opened.stream, &batch, NULL));
        }
    }
    cr_expect_eq(result, STATUS_USAGE);
    cr_expect(strstr(status_text(), "it is u8 of 1x1x"), "%s", status_text());
    close_set(&opened);
    forget_files();
}

/* ---- Positions ---- */

Test(stream_files, a_seek_leads_to_the_same_files)
{
    make_files();
    open_files();
    opened.request.device_share = 0.5;
    start(&opened);
    const uint64_t steps = opened.request.plan.steps;
    struct record all = {.count = 0}, some = {.count = 0};
    struct stream_batch batch;
    for (uint64_t at = 0; at < 2 * steps; at++) {
        must(stream_next(opened.stream, &batch));
        consume(&batch);
        add(&all, &batch);
        must(stream_release(opened.stream, &batch, NULL));
    }
    for (uint64_t at = 2 * steps; at-- > 0;) {
        if (at % 3 == 0)
            stream_cancel(opened.stream);
        must(stream_seek(opened.stream, (struct stream_position){at / steps, at % steps}));
        must(stream_next(opened.stream, &batch));
        expect_files(&batch);
        consume(&batch);
        some.count = 0;
        add(&some, &batch);
        const size_t first = at / steps * opened.epochs.count + at % steps * opened.epochs.batch;
        const struct record wanted = {.values = all.values + first * all.sample_bytes,
                                      .labels = all.labels + first,
                                      .numbers = all.numbers + first,
                                      .count = some.count,
                                      .sample_bytes = all.sample_bytes};
        cr_expect(same(&some, &wanted), "batch %llu", (unsigned long long)at);
        must(stream_release(opened.stream, &batch, NULL));
    }
    forget(&all);
    forget(&some);
    close_set(&opened);
    forget_files();
}

/* ---- Files that the consumer cannot decode ---- */

/* Takes batches until one has at least `least` files. */
static const struct set_stream_file *take_files(struct stream_batch *batch, uint32_t least, uint32_t *count)
{
    for (;;) {
        must(stream_next(opened.stream, batch));
        const struct set_stream_file *files = set_stream_files(opened.stream, batch, count);
        if (*count >= least)
            return files;
        must(stream_release(opened.stream, batch, NULL));
    }
}

static enum status break_file(struct stream_batch *batch, uint32_t index, enum status why)
{
    return set_stream_break(opened.stream, batch, index, status_set(why, "the device says no"));
}

Test(stream_files, a_file_that_the_consumer_cannot_decode_is_masked)
{
    struct stream_batch batch, other;
    struct stream_stats before, after;
    uint32_t count;
    make_files();
    open_files();
    opened.request.device_share = 1;
    start(&opened);
    const struct set_stream_file *files = take_files(&batch, 3, &count);
    const uint32_t masked = batch.masked, one = files[0].index, two = files[2].index;
    stream_stats(opened.stream, &before);
    must(break_file(&batch, one, STATUS_FAILED));
    must(break_file(&batch, two, STATUS_FAILED));
    must(break_file(&batch, one, STATUS_FAILED)); /* counted once */
    stream_stats(opened.stream, &after);
    cr_expect(batch.masked == masked + 2 && after.masked == before.masked + 2);
    cr_expect(batch.samples.labels[one] == STREAM_MASKED && batch.samples.labels[two] == STREAM_MASKED);
    cr_expect_neq(batch.samples.labels[files[1].index], STREAM_MASKED);
    cr_expect_eq(break_file(&batch, files[1].index, STATUS_EXHAUSTED), STATUS_EXHAUSTED);
    cr_expect_neq(batch.samples.labels[files[1].index], STREAM_MASKED, "only a broken file is masked");
    cr_expect_eq(break_file(&batch, batch.samples.count, STATUS_FAILED), STATUS_USAGE);
    other = batch;
    must(stream_release(opened.stream, &batch, NULL));
    cr_expect_eq(break_file(&other, one, STATUS_FAILED), STATUS_USAGE);
    const struct stream_position at = {batch.epoch, batch.step};
    must(stream_seek(opened.stream, at));
    must(stream_next(opened.stream, &batch));
    cr_expect(batch.masked == masked && batch.samples.labels[one] != STREAM_MASKED);
    must(stream_release(opened.stream, &batch, NULL));
    close_set(&opened);
    forget_files();
}

/* The warning of a batch names its first broken sample, whoever found it. */
Test(stream_files, masked_files_are_reported)
{
    static const char *const words[] = {"/j/", "1 broken sample of epoch ", " masked: ", "the device says no",
                                        NULL};
    char path[PATH_MAX];
    uint32_t count, told = 0;
    struct stream_batch batch;
    make_files();
    open_files();
    opened.request.device_share = 1;
    start(&opened);
    snprintf(path, sizeof path, "%s/warnings", folder);
    cr_assert(freopen(path, "w", stderr));
    for (uint64_t i = 0; i < 20 * opened.request.plan.steps; i++) {
        must(stream_next(opened.stream, &batch));
        const struct set_stream_file *files = set_stream_files(opened.stream, &batch, &count);
        for (uint32_t f = 0; f < count; f++)
            must(break_file(&batch, files[f].index, STATUS_FAILED));
        must(stream_release(opened.stream, &batch, NULL));
    }
    fflush(stderr);
    char *text, *line;
    size_t size;
    must(file_read(path, &text, &size));
    line = text = realloc(text, size + 1);
    text[size] = '\0';
    for (; line && *line; told++, line = strchr(line, '\n') + 1)
        if (strstr(line, words[3]) && strstr(line, words[3]) < strchr(line, '\n'))
            for (size_t w = 0; words[w]; w++)
                cr_expect(strstr(line, words[w]), "%s", line);
    cr_expect_eq(told, 8, "%s", text);
    cr_expect(strstr(text, words[3]));
    free(text);
    close_set(&opened);
    forget_files();
}

Test(stream_files, a_file_that_the_consumer_cannot_decode_is_a_failure)
{
    struct stream_batch batch;
    uint32_t count;
    make_files();
    open_files();
    opened.request.device_share = 1;
    opened.request.on_error = SET_STREAM_FAIL;
    opened.epochs.batch = 1; /* some step has only a file */
    start(&opened);
    const struct dataset *dataset = &opened.dataset;
    const struct set_stream_file *files = NULL;
    for (uint64_t at = 0; !files; at++) {
        must(stream_seek(opened.stream, (struct stream_position){0, at}));
        count = 0;
        if (stream_next(opened.stream, &batch) != STATUS_OK)
            continue;
        files = set_stream_files(opened.stream, &batch, &count);
        files = count ? files : NULL;
        if (!files)
            must(stream_release(opened.stream, &batch, NULL));
    }
    const struct dataset_sample *sample = &dataset->samples[batch.numbers[files[0].index]];
    cr_expect_eq(break_file(&batch, files[0].index, STATUS_FAILED), STATUS_FAILED);
    cr_expect(strstr(status_text(), sample->key) && strstr(status_text(), "/j/") &&
                  strstr(status_text(), "the device says no"),
              "%s", status_text());
    cr_expect(batch.masked == 0 && batch.samples.labels[files[0].index] != STREAM_MASKED);
    must(stream_release(opened.stream, &batch, NULL));
    must(stream_seek(opened.stream, (struct stream_position){batch.epoch, batch.step}));
    must(stream_next(opened.stream, &batch)); /* the stream remains usable */
    must(stream_release(opened.stream, &batch, NULL));
    close_set(&opened);
    forget_files();
}

/* ---- Files that changed, requests that are refused ---- */

#ifdef HAVE_XXHASH
/* The index of --prepare has a hash of each member. The damage leaves the markers of the file intact. */
Test(stream_files, damaged_files_are_found_by_the_hash_of_the_index)
{
    struct stream_batch batch;
    EXPECT(0, "$P --prepare m --from synth --samples 30 --classes 3 --res 64 --encode jpeg --store shards "
              "--shards 2 --name m");
    open_set(&opened, "m");
    const struct dataset_sample *sample = &opened.dataset.samples[20];
    const struct dataset_member *member = &opened.dataset.members[sample->member + sample->image];
    EXPECT(0, "printf X | dd of=m/%s bs=1 seek=%llu conv=notrunc 2>/dev/null",
           opened.dataset.files[member->file].name, (unsigned long long)(member->offset + member->size - 40));
    dataset_close(&opened.dataset);
    open_set(&opened, "m");
    opened.epochs = (struct epochs){30, 30, 1, 0};
    opened.request.on_error = SET_STREAM_MASK;
    opened.request.device_share = 1;
    start(&opened);
    uint32_t count;
    const struct set_stream_file *files = take_files(&batch, 1, &count);
    cr_expect(batch.masked == 1 && batch.samples.labels[20] == STREAM_MASKED && count == 29);
    for (uint32_t f = 0; f < count; f++)
        cr_expect_eq(files[f].index, f < 20 ? f : f + 1);
    must(stream_release(opened.stream, &batch, NULL));
    EXPECT(0, "touch m/*.tar");
    must(stream_seek(opened.stream, (struct stream_position){7, 0}));
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
    cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s", status_text());
    close_set(&opened);
}
#endif

Test(stream_files, requests_that_no_device_can_meet_are_refused)
{
    static const double shares[] = {-0.1, 1.1, NAN};
    make_files();
    open_files();
    start(&opened);
    stream_close(opened.stream);
    for (size_t s = 0; s < COUNT_OF(shares); s++) {
        opened.request.device_share = shares[s];
        cr_expect_eq(set_stream_open(&opened.request, &opened.stream), STATUS_USAGE);
    }
    opened.request.device_share = 0.5;
    static const enum fit_how hows[] = {FIT_CENTRE, FIT_LONGEST, FIT_SHORTEST};
    for (size_t h = 0; h < COUNT_OF(hows); h++) {
        opened.request.fit.how = hows[h];
        cr_expect_eq(set_stream_open(&opened.request, &opened.stream), STATUS_USAGE);
    }
    opened.request.fit = (struct image_fit){.res = 0};
    cr_expect_eq(set_stream_open(&opened.request, &opened.stream), STATUS_USAGE);
    cr_expect_null(opened.stream);
    dataset_close(&opened.dataset);
    forget_files();
}

/* ---- Memory ---- */

static _Atomic uint32_t allocations, blocks; /* calls of allocate(); blocks that are allocated */
static _Atomic uint32_t allowed;             /* calls that succeed */
static _Atomic size_t block_bytes;           /* of all blocks */

static enum status allocate(size_t bytes, void **memory)
{
    const bool fails = atomic_fetch_add(&allocations, 1) >= allowed;
    *memory = fails ? NULL : aligned_alloc(STREAM_ALIGN, stream_aligned(bytes));
    blocks += !fails;
    block_bytes += malloc_usable_size(*memory);
    return fails ? status_set(STATUS_EXHAUSTED, "no memory for %zu bytes", bytes) : STATUS_OK;
}

static void deallocate(void *memory)
{
    blocks--;
    block_bytes -= malloc_usable_size(memory);
    free(memory);
}

static size_t allocated(void)
{
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

/* Adds a file that is much larger than the others. */
static void make_files_and_a_large_one(void)
{
    make_files();
    put_kind("4:4:4", 1900, 1500, 0, true);
}

/* The last samples of the set, which have the large file, in every step. */
static uint32_t list_last(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct epochs *epochs = context;
    (void)epoch, (void)step;
    for (uint32_t i = 0; i < epochs->batch; i++)
        numbers[i] = epochs->count - 1 - i;
    return epochs->batch;
}

/* Takes all batches that the stream has memory for, so that all memory is used, and releases them. */
static void take_all(uint32_t slots)
{
    struct stream_batch batches[8];
    for (uint32_t i = 0; i < slots; i++)
        must(stream_next(opened.stream, &batches[i]));
    for (uint32_t i = 0; i < slots; i++)
        must(stream_release(opened.stream, &batches[i], NULL));
}

/* The memory of files belongs to a batch: it grows once, and is counted. */
Test(stream_files, memory_grows_with_the_largest_batch_only)
{
    struct stream_stats stats;
    make_files_and_a_large_one();
    open_files();
    opened.request.fit.how = FIT_RESIZE;
    opened.request.device_share = 1;
    opened.request.threads = 1;
    opened.request.allocate = allocate;
    opened.request.deallocate = deallocate;
    allowed = UINT32_MAX;
    const uint32_t slots = opened.request.ahead + 1;
    opened.request.plan =
        (struct stream_plan){.steps = 5, .capacity = 16, .list = list_last, .context = &opened.epochs};
    must(set_stream_open(&opened.request, &opened.stream));
    stream_stats(opened.stream, &stats);
    const uint64_t first_memory = stats.memory_bytes, first_blocks = block_bytes;
    cr_expect_eq(allocations, 2 * slots);
    take_all(slots);
    take_all(slots);
    stream_stats(opened.stream, &stats);
    const uint64_t memory = stats.memory_bytes, grown = block_bytes - first_blocks;
    const size_t before = allocated(), large = file_of(opened.epochs.count - 1)->size;
    cr_expect_eq(large, made[made_count - 1].size);
    cr_expect_eq(allocations, 3 * slots);
    cr_expect(grown > slots * large / 2 && grown < slots * 2 * large);
    cr_expect_geq(memory - first_memory + grown / 100, grown);
    for (int i = 0; i < 100; i++)
        take_all(slots);
    stream_stats(opened.stream, &stats);
    cr_expect_eq(stats.memory_bytes, memory);
    cr_expect_eq(allocations, 3 * slots);
    cr_expect_leq(allocated(), before + before / 100, "%zu, then %zu bytes", before, allocated());
    cr_expect_eq(blocks, 2 * slots);
    close_set(&opened);
    cr_expect_eq(blocks, 0);
    forget_files();
}

/* A batch has memory for the decoded images that it can have, until the consumer keeps no more of them. */
Test(stream_files, memory_of_decoded_images_is_freed)
{
    static const uint32_t most[] = {1, COUNT_OF(made)};
    const size_t largest =
        stream_aligned(3 * 85 * 61); /* the kinds with the largest sizes, of 40 + 9 i columns */
    for (size_t k = 0; k < COUNT_OF(most); k++) {
        make_files();
        while (made_count > 30) /* those that any consumer can keep */
            free(made[--made_count].bytes);
        EXPECT(0, "ls j/*/* | awk -F'[/.]' '$3 >= 30' | xargs rm");
        open_files();
        opened.request.device_bytes = UINT64_C(1) << 30;
        opened.request.fit.unscaled = true;
        opened.request.allocate = allocate;
        opened.request.deallocate = deallocate;
        allowed = UINT32_MAX;
        allocations = blocks = 0;
        block_bytes = 0;
        keep_most = most[k];
        forget_kept();
        start(&opened);
        const uint32_t slots = opened.request.ahead + 1;
        struct stream_stats before, after;
        stream_stats(opened.stream, &before);
        const size_t room = block_bytes / slots - opened.request.plan.capacity * (3 * RES * RES + 16);
        cr_expect(blocks == 2 * slots && room > largest / 4 * opened.request.plan.capacity &&
                      room < 2 * largest * opened.request.plan.capacity,
                  "%zu bytes", room);
        for (uint32_t i = 0; i < 4 * opened.request.plan.steps + 2 * slots; i++) {
            struct stream_batch batch;
            must(stream_next(opened.stream, &batch));
            consume(&batch);
            must(stream_release(opened.stream, &batch, NULL));
        }
        cr_expect_eq(keep_most - keeper.room, most[k] < made_count ? most[k] : made_count);
        stream_stats(opened.stream, &after);
        cr_expect_eq(blocks, slots);
        cr_expect_lt(after.memory_bytes + slots * room / 2, before.memory_bytes);
        close_set(&opened);
        cr_expect_eq(blocks, 0);
        forget_files();
        EXPECT(0, "rm -r j");
    }
    forget_kept();
}

/* A failure at its step, after all earlier batches; nothing is left allocated. */
Test(stream_files, too_little_memory_for_a_file_is_a_failure)
{
    struct stream_batch batch;
    make_files_and_a_large_one();
    open_files();
    opened.request.device_share = 1;
    opened.request.allocate = allocate;
    opened.request.deallocate = deallocate;
    for (allowed = 0; allowed < 2 * (opened.request.ahead + 1); allowed++) {
        allocations = 0;
        opened.request.plan =
            (struct stream_plan){.steps = 1, .capacity = 16, .list = list, .context = &opened.epochs};
        cr_expect_eq(set_stream_open(&opened.request, &opened.stream), STATUS_EXHAUSTED);
        cr_expect(!opened.stream && blocks == 0);
    }
    allocations = 0;
    start(&opened);
    enum status result = STATUS_OK;
    while (result == STATUS_OK) {
        result = stream_next(opened.stream, &batch);
        if (result == STATUS_OK)
            must(stream_release(opened.stream, &batch, NULL));
    }
    cr_expect_eq(result, STATUS_EXHAUSTED);
    cr_expect(strstr(status_text(), "no memory for "), "%s", status_text());
    const struct stream_position at = opened.stream->at;
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_EXHAUSTED);
    allowed = UINT32_MAX;
    must(stream_seek(opened.stream, at));
    must(stream_next(opened.stream, &batch));
    expect_files(&batch);
    consume(&batch);
    must(stream_release(opened.stream, &batch, NULL));
    close_set(&opened);
    cr_expect_eq(blocks, 0);
    forget_files();
}

#endif
