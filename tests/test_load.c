/* Tests the workload `load`: orders, checksums, latencies, and the results of all CPU variants. */
#include "../cpu/load/reader.h"
#include "load_support.h"

#include <math.h>
#include <sys/resource.h>

#include "data/npy.h"

TestSuite(load, .timeout = 60);

/* ---- Orders ---- */

static const uint32_t shard_first[] = {0, 7, 7, 20, 21, 64};

static struct order_plan plan_of(uint32_t shards, uint32_t window, uint32_t workers)
{
    struct order_plan plan = {.seed = 5,
                              .samples = 64,
                              .shards = shards,
                              .shard_first = shards ? shard_first : NULL,
                              .shuffle_buffer = window,
                              .workers = workers};
    return plan;
}

Test(load, every_sample_once_per_epoch_for_any_worker_count)
{
    for (uint32_t shards = 0; shards <= 5; shards += 5)
        for (uint32_t window = 0; window <= 100; window += 9)
            for (uint32_t workers = 1; workers <= 9; workers++) {
                struct order_plan plan = plan_of(shards, window, workers);
                struct order order;
                uint8_t seen[64] = {0};
                cr_assert_eq(order_open(&plan, &order), STATUS_OK);
                for (uint32_t w = 0; w < workers; w++) {
                    order_make(&plan, 3, w, &order);
                    cr_assert_leq(order.count, 64 / workers + 1);
                    cr_assert_geq(order.count, 64 / workers);
                    for (uint32_t i = 0; i < order.count; i++)
                        seen[order.samples[i]]++;
                }
                for (int i = 0; i < 64; i++)
                    cr_assert_eq(seen[i], 1, "sample %d, window %u, %u workers", i, window, workers);
                order_close(&order);
            }
}

Test(load, an_order_is_a_function_of_seed_and_epoch)
{
    struct order_plan plan = plan_of(5, 16, 2);
    struct order a, b;
    cr_assert(order_open(&plan, &a) == STATUS_OK && order_open(&plan, &b) == STATUS_OK);
    order_make(&plan, 1, 0, &a);
    order_make(&plan, 9, 1, &b);
    order_make(&plan, 1, 0, &b);
    cr_assert_arr_eq(a.samples, b.samples, a.count * sizeof *a.samples);
    order_make(&plan, 2, 0, &b);
    cr_assert_neq(memcmp(a.samples, b.samples, a.count * sizeof *a.samples), 0);
    plan.seed = 6;
    order_make(&plan, 1, 0, &b);
    cr_assert_neq(memcmp(a.samples, b.samples, a.count * sizeof *a.samples), 0);
    order_close(&a);
    order_close(&b);
}

Test(load, shuffle_buffer_bounds_displacement)
{
    struct order_plan plan = plan_of(5, 10, 1);
    struct order order;
    cr_assert_eq(order_open(&plan, &order), STATUS_OK);
    order_make(&plan, 0, 0, &order);
    for (uint32_t i = 0; i < order.count; i++)
        cr_assert_eq(order.indices[i] / 10, i / 10);
    order_close(&order);
}

Test(load, known_orders_have_the_expected_quality)
{
    struct order_plan plan = plan_of(5, 1, 1);
    uint32_t samples[64];
    struct order order = {.count = 64, .samples = samples};
    struct order_quality quality;
    for (uint32_t i = 0; i < 64; i++)
        samples[i] = i;
    cr_assert_eq(order_measure(&plan, &order, 32, &quality), STATUS_OK);
    cr_assert_float_eq(quality.displacement, 0, 1e-12);
    cr_assert_float_eq(quality.shards, (4 + 1) / 2.0, 1e-12);
    for (uint32_t i = 0; i < 64; i++)
        samples[i] = 63 - i;
    cr_assert_eq(order_measure(&plan, &order, 32, &quality), STATUS_OK);
    cr_assert_float_eq(quality.displacement, 0.5, 1e-12);
}

Test(load, batches_of_all_workers_are_added)
{
    struct order_plan plan = plan_of(0, 1, 5); /* shares of 12, 13, 13, 13 and 13 samples */
    cr_expect_eq(order_batch_samples(&plan, 0, 5, 1), 5);
    cr_expect_eq(order_batch_samples(&plan, 0, 5, 12), 60);
    cr_expect_eq(order_batch_samples(&plan, 0, 5, 13), 64);
    cr_expect_eq(order_batch_samples(&plan, 0, 2, UINT32_MAX), 25);
    cr_expect_eq(order_batch_samples(&plan, 3, 2, 100), 26);
}

/* ---- Checksums and latencies ---- */

Test(load, checksum_detects_missing_duplicate_and_swapped_samples)
{
    const uint8_t a[300] = {1}, b[300] = {2};
    uint64_t hash_a = checksum_edges(a, sizeof a), hash_b = checksum_edges(b, sizeof b);
    uint64_t one = checksum_key("one", 3), two = checksum_key("two", 3);
    uint64_t right = checksum_sample(one, &hash_a, 1) + checksum_sample(two, &hash_b, 1);
    cr_assert_neq(right, checksum_sample(one, &hash_b, 1) + checksum_sample(two, &hash_a, 1));
    cr_assert_neq(right, checksum_sample(one, &hash_a, 1));
    cr_assert_neq(right, 2 * checksum_sample(one, &hash_a, 1));
    cr_assert_neq(checksum_edges(a, 299), hash_a);
    uint8_t middle[300] = {1};
    middle[150] = 1;
    cr_assert_eq(checksum_edges(middle, 300), hash_a);
    cr_assert_neq(checksum_whole(middle, 300), checksum_whole(a, 300));
}

Test(load, latency_quantiles_are_within_three_percent)
{
    static struct latency latency;
    for (uint64_t ns = 1; ns <= 100000; ns++)
        latency_add(&latency, ns);
    cr_assert_float_eq(latency_quantile_s(&latency, 0.5), 50e-6, 1.6e-6);
    cr_assert_float_eq(latency_quantile_s(&latency, 0.999), 99.9e-6, 3.2e-6);
    static struct latency none;
    cr_assert_eq(latency_quantile_s(&none, 0.5), 0);
    latency_add(&none, UINT64_MAX);
    cr_assert_gt(latency_quantile_s(&none, 0.5), 1e10);
}

/* ---- Augmentation ---- */

Test(load, augmentation_matches_definition)
{
    uint8_t pixels[2 * 4 * 5];
    float values[2 * 4 * 5];
    struct image image = {
        .channels = 2, .depth = 1, .height = 4, .width = 5, .interleaved = true, .pixels = pixels};
    struct augmentation augment = {
        .move = {.shift = 3, .flip = true}, .mean = {0.5f}, .scale = {2}, .seed = 1};
    int flips = 0, moves = 0, below = 0, right_of = 0, flips_below = 0, flips_right_of = 0;
    for (uint32_t i = 0; i < sizeof pixels; i++)
        pixels[i] = (uint8_t)(i + 1);
    for (uint32_t sample = 0; sample < 200; sample++) {
        bool explained = false;
        image_augment(&augment, &image, 7, sample, values);
        for (int down = -3; down <= 3; down++)
            for (int right = -3; right <= 3; right++)
                for (int flip = 0; flip <= 1; flip++) {
                    bool same = true;
                    for (int c = 0; c < 2; c++)
                        for (int y = 0; y < 4; y++)
                            for (int x = 0; x < 5; x++) {
                                int fx = (flip ? 4 - x : x) + right, fy = y + down;
                                bool in = fx >= 0 && fx < 5 && fy >= 0 && fy < 4;
                                float gray = in ? (float)pixels[(fy * 5 + fx) * 2 + c] * (1.0f / 255) : 0;
                                same &= values[(c * 4 + y) * 5 + x] == (gray - 0.5f) * 2;
                            }
                    if (same && !explained) {
                        flips += flip;
                        moves += down != 0 || right != 0;
                        below += down > 0;
                        right_of += right > 0;
                        flips_below += flip && down > 0;
                        flips_right_of += flip && right > 0;
                    }
                    explained |= same;
                }
        cr_assert(explained, "sample %u", sample);
    }
    cr_assert(flips > 60 && flips < 140, "%d flips of 200", flips);
    cr_assert_gt(moves, 150);
    cr_assert(4 * flips_below > below && 4 * flips_below < 3 * below,
              "%d of %d images that are shifted up are flipped, not about half", flips_below, below);
    cr_assert(4 * flips_right_of > right_of && 4 * flips_right_of < 3 * right_of, "%d of %d", flips_right_of,
              right_of);
}

#ifdef HAVE_PNG
Test(load, a_png_decodes_to_its_pixels)
{
    const uint8_t pixels[2 * 3 * 3] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 250, 251, 252, 253, 254, 255, 0, 10, 20};
    const struct png_shape shape = {.width = 3, .height = 2, .channels = 3};
    void *bytes;
    size_t size;
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    must(png_encode(pixels, &shape, &bytes, &size));
    cr_assert_eq(image_decode("PNG", bytes, size, &scratch, &image, &is_image), STATUS_OK);
    cr_assert(is_image && image.interleaved && image.type == DTYPE_U8);
    cr_assert(image.channels == 3 && image.height == 2 && image.width == 3);
    cr_assert_arr_eq(image.pixels, pixels, sizeof pixels);
    cr_assert_eq(image_decode("png", bytes, size / 2, &scratch, &image, &is_image), STATUS_FAILED);
    cr_assert_eq(image_decode("cls", bytes, size, &scratch, &image, &is_image), STATUS_OK);
    cr_assert_not(is_image);
    free(bytes);
    image_scratch_close(&scratch);
}
#endif

Test(load, half_precision_samples_are_augmented_exactly)
{
    char file[NPY_HEADER_MAX + 8];
    size_t header = npy_header_make(file, "<f2", "1, 1, 4");
    const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff}; /* 1, -2, 2^-24, 65504 */
    float values[4];
    struct image_scratch scratch = {0};
    struct image image;
    struct augmentation augment = {.scale = {1}};
    bool is_image;
    memcpy(file + header, halves, sizeof halves);
    must(image_decode("npy", (const uint8_t *)file, header + 8, &scratch, &image, &is_image));
    cr_assert(is_image && image.channels == 1 && image.height == 1 && image.width == 4);
    image_augment(&augment, &image, 0, 0, values);
    cr_assert(values[0] == 1 && values[1] == -2 && values[2] == 0x1p-24f && values[3] == 65504);
}

/* Threads that may help each other take at most half of what is left of a share, so that its end is divided.
 */
Test(load, the_end_of_a_share_is_divided_among_threads)
{
    static const uint32_t counts[] = {0, 1, 2, 3, 127, 255, 256, 257, 511, 512, 513, 10007};
    for (size_t c = 0; c < COUNT_OF(counts); c++)
        for (int threads = 1; threads <= 2; threads++)
            for (int consumed = 0; consumed <= 2; consumed++) { /* 2: lost samples are skipped */
                const struct load_parameters given = {
                    .batch = 256, .on_error = consumed == 2 ? ON_ERROR_SKIP : ON_ERROR_FAIL};
                struct consumer consumer = {0};
                struct load_control control = {.consumer = consumed == 1 ? &consumer : NULL};
                const struct load load = {.given = &given, .control = &control};
                struct reader reader = {.load = &load, .threads = threads};
                struct worker share = {.load = &load, .reader = &reader, .order.count = counts[c]};
                uint32_t first, count, taken = 0;
                while (worker_take(&share, &first, &count)) {
                    const uint32_t left = counts[c] - taken, half = (left + 1) / 2;
                    const uint32_t most = threads == 2 && !consumed ? half : left;
                    cr_assert_eq(first, taken);
                    cr_assert_eq(count, most < 256 ? most : 256, "%u of %u left, %d threads", count, left,
                                 threads);
                    taken += count;
                }
                cr_assert_eq(taken, counts[c]);
            }
}

/* ---- Whole data sets ---- */

Test(load, every_variant_delivers_every_sample_once, .init = make_folder, .fini = remove_folder)
{
    static const char *const lines[] = {"--cache any", "--cache any --shuffle 0 --batch 1",
                                        "--cache any --shuffle 10 --batch 7 --block 4 --iodepth 3",
                                        "--cache warm --shuffle 1000 --batch 200 --epochs 2",
                                        "--cache any --iodepth 1 --block 4 --readahead 0 --seed 9"};
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (size_t l = 0; l < COUNT_OF(lines); l++)
            expect_exactly_once(shard_variants[v], lines[l]);
    renew_folder();
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (size_t l = 0; l < COUNT_OF(lines); l++)
            expect_exactly_once(file_variants[v], lines[l]);
}

/* ---- Consumed batches ---- */

/* A consumer that counts the batches and their bytes and sums the byte values. Callable from any thread. */
struct counting {
    struct consumer consumer;
    uint64_t steps, bytes, sum, fails_at;
};

static enum status count_batch(struct consumer *consumer, const void *values, size_t bytes)
{
    struct counting *self = (struct counting *)consumer;
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++)
        sum += ((const uint8_t *)values)[i];
    __atomic_fetch_add(&self->bytes, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&self->sum, sum, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&self->steps, 1, __ATOMIC_RELAXED) == self->fails_at)
        return status_set(STATUS_FAILED, "the device caught fire");
    return STATUS_OK;
}

static const struct consumer_type counting_type = {.take_host = count_batch};

/* Runs one epoch of the variant with the consumer `counting`, and expects the status `expected`. Returns
 * false if the variant cannot run here. */
static bool consume_epoch(const char *name, const char *line, enum status expected, struct counting *counting)
{
    struct job job;
    counting->consumer.type = &counting_type;
    must(open_job(&job, line));
    job.workload->batches.set_consumer(job.input, &counting->consumer);
    bool started = start(&job, name);
    if (started)
        cr_assert_eq(run(&job, 0), expected, "%s %s: %s", name, line, status_text());
    close_job(&job);
    return started;
}

Test(load, every_variant_passes_full_batches_to_consumer, .init = make_folder, .fini = remove_folder)
{
    for (int shards = 1; shards >= 0; shards--) {
        const char *const *variants = shards ? shard_variants : file_variants;
        size_t count = shards ? COUNT_OF(shard_variants) : COUNT_OF(file_variants);
        shards ? make_shards(101) : make_files(101);
        for (size_t v = 0; v < count; v++) {
            struct counting all = {0}, broken = {.fails_at = 3};
            if (!consume_epoch(variants[v], "--cache any --batch 7", STATUS_OK, &all))
                continue;
            cr_expect_eq(all.steps, 15, "%s: %d batches of 7 of 101", variants[v], (int)all.steps);
            cr_expect(all.bytes >= 101 * 9000 / 2 && all.bytes % (101 * 64) == 0, "%s: slots of %g bytes",
                      variants[v], (double)all.bytes / 101);
            consume_epoch(variants[v], "--cache any --batch 7", STATUS_FAILED, &broken);
            cr_expect(strstr(status_text(), "the device caught fire"), "%s: %s", variants[v], status_text());
        }
        renew_folder();
    }
}

Test(load, consumer_receives_training_batches, .init = make_folder, .fini = remove_folder)
{
    cr_assert(command(
        "$P --prepare $D --store files --samples 40 --sample-shape 3,4,4 --dtype u8 >/dev/null 2>&1"));
    struct counting decoded = {0}, augmented = {0}, same = {0};
    cr_assert(consume_epoch("files", "--cache any --batch 16 --decode", STATUS_OK, &decoded));
    cr_assert(consume_epoch("files", "--cache any --batch 16 --augment --shift 0", STATUS_OK, &augmented));
    cr_assert(consume_epoch("files", "--cache any --batch 16 --decode --seed 9", STATUS_OK, &same));
    cr_expect(decoded.steps == 3 && decoded.bytes == 40 * 48, "%d bytes", (int)decoded.bytes);
    cr_expect(augmented.steps == 3 && augmented.bytes == 40 * 48 * 4, "%d bytes", (int)augmented.bytes);
    cr_expect(decoded.sum == same.sum && decoded.sum > 0,
              "the pixels must not depend on the order of the samples");
}

#ifdef HAVE_PNG
/* A consumer that counts how often each image of make_pictures() is delivered. Image n has 45 bytes of the
 * value 3 n. */
struct viewing {
    struct consumer consumer;
    int seen[20], steps, spoilt;
};

static enum status view_batch(struct consumer *consumer, const void *values, size_t bytes)
{
    struct viewing *self = (struct viewing *)consumer;
    const uint8_t *pixels = values;
    bool spoilt = bytes % 45 != 0 || bytes > 3 * 45;
    for (size_t at = 0; !spoilt && at < bytes; at += 45) {
        for (size_t i = 0; i < 45; i++)
            spoilt |= pixels[at + i] != pixels[at] || pixels[at] % 3 != 0 || pixels[at] >= 60;
        if (!spoilt)
            __atomic_fetch_add(&self->seen[pixels[at] / 3], 1, __ATOMIC_RELAXED);
    }
    __atomic_fetch_add(&self->steps, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&self->spoilt, spoilt, __ATOMIC_RELAXED);
    return STATUS_OK;
}

static const struct consumer_type viewing_type = {.take_host = view_batch};

static void expect_pictures_in_batches(const char *name)
{
    struct viewing viewing = {.consumer = {&viewing_type}};
    struct job job;
    must(open_job(&job, "--cache any --decode --on-error skip --batch 3"));
    job.workload->batches.set_consumer(job.input, &viewing.consumer);
    if (start(&job, name)) {
        run_well(&job, 0);
        cr_expect_eq(viewing.spoilt, 0, "%s", name);
        cr_expect_geq(viewing.steps, 7, "%s", name);
        for (int i = 0; i < 20; i++)
            cr_expect_eq(viewing.seen[i], i != 7, "%s: image %d was delivered %d times", name, i,
                         viewing.seen[i]);
    }
    close_job(&job);
}

/* Batches of decoded images omit the sample that cannot be decoded. */
Test(load, decoded_batches_hold_every_image_once, .init = make_folder, .fini = remove_folder)
{
    make_pictures(true);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_pictures_in_batches(shard_variants[v]);
    renew_folder();
    make_pictures(false);
    /* The sample with the broken image also has a valid array. The array must not remain in the batch. */
    char array[NPY_HEADER_MAX + 45];
    size_t header = npy_header_make(array, "|u1", "5, 9");
    memset(array + header, 21, 45);
    put_file("000007.npy", array, header + 45);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        expect_pictures_in_batches(file_variants[v]);
}
#endif

Test(load, shards_uring_works_with_little_locked_memory, .init = make_folder, .fini = remove_folder)
{
    const struct rlimit little = {1 << 20, 1 << 20}; /* enough for the ring, but not for its buffers */
    make_shards(101);
    cr_assert_eq(setrlimit(RLIMIT_MEMLOCK, &little), 0);
    bool root = geteuid() == 0;
    if (root) /* root has no limit on locked memory */
        cr_assert(chmod(folder, 0755) == 0 && seteuid(65534) == 0);
    expect_exactly_once("shards-uring", "--cache any --iodepth 8 --block 1024");
    if (root)
        cr_assert_eq(seteuid(0), 0);
}

/* ---- Columns ---- */

Test(load, rows_name_layout_and_timed_steps, .init = make_folder, .fini = remove_folder)
{
    char text[64];
    make_shards(101);
    measured("shards-mmap", "--cache any --batch 8", "shards_per_batch", text);
    cr_expect_geq(strtod(text, NULL), 1, "'%s'", text);
    measured("shards-mmap", "--cache any", "timed_stages", text);
    cr_expect_str_eq(text, "order+open+map+copy");
    measured("shards-mmap", "--cache any", "resident_share_before", text);
    cr_expect_neq(*text, '\0');
}

/* Checks that the number in a column is from `least` to `most`, and returns it. */
static double expect_between(const char *variant, const char *line, const char *column, double least,
                             double most)
{
    char text[64], *end;
    measured(variant, line, column, text);
    double value = strtod(text, &end);
    cr_expect(*text && !*end && value >= least && value <= most, "%s %s: %s is '%s', not %g to %g", variant,
              line, column, text, least, most);
    return value;
}

Test(load, measures_are_plausible, .init = make_folder, .fini = remove_folder)
{
    static const char *const calls[] = {"open", "read", "close"};
    make_files(101);
    for (int v = 0; v < 2; v++)
        for (size_t c = 0; c < COUNT_OF(calls); c++) {
            char p50[32], p99[32], p999[32];
            snprintf(p50, sizeof p50, "%s_p50_s", calls[c]);
            snprintf(p99, sizeof p99, "%s_p99_s", calls[c]);
            snprintf(p999, sizeof p999, "%s_p999_s", calls[c]);
            expect_between(file_variants[v], "--cache any", p50, 1e-8, 1);
            expect_between(file_variants[v], "--cache any", p99, 1e-8, 10);
            expect_between(file_variants[v], "--cache any", p999, 1e-8, 10);
        }
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        if (is_available(file_variants[v]))
            expect_between(file_variants[v], "--cache warm", "copy_share", 1e-5, 1.5);
    renew_folder();
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        if (is_available(shard_variants[v])) {
            expect_between(shard_variants[v], "--cache warm", "copy_share", 1e-4, 1.5);
            expect_between(shard_variants[v], "--cache warm", "copy_bytes_per_s", 1e6, 1e13);
            expect_between(shard_variants[v], "--cache warm", "resident_share_before", 0.99, 1);
        }
}

/* Rounds up to whole pages of 2 MiB. */
static double huge(double bytes)
{
    return ceil(bytes / (2 << 20)) * (2 << 20);
}

/* Expects that a variant uses `bytes` bytes of memory. The useful bytes among them are `samples` samples of
 * the mean size, and `images` bytes of decoded images. */
static void expect_memory(const char *name, const char *line, double bytes, double samples, double images)
{
    struct job job;
    if (!is_available(name))
        return;
    must(open_job(&job, line));
    const struct dataset *dataset = dataset_of(&job);
    double useful = samples * (double)dataset->bytes / dataset->sample_count + images;
    close_job(&job);
    expect_between(name, line, "peak_memory_bytes", bytes, bytes);
    expect_between(name, line, "memory_efficiency", useful / bytes * 0.999, useful / bytes * 1.001);
}

/* Slots of 9024 bytes have room for the largest sample of 8999 bytes and one byte more. Mapped files do not
 * count. */
Test(load, memory_is_that_of_all_buffers, .init = make_folder, .fini = remove_folder)
{
    const char *line = "--cache any --batch 16 --shuffle 700 --iodepth 40 --block 128";
    const double slot = 9024, slots = huge(slot * 16);
    make_files(1010);
    expect_memory("files", line, slots, 16, 0);
    expect_memory("files-omp", line, 3 * slots, 48, 0);
    expect_memory("files-omp", "--cache any --batch 500", 3 * huge(slot * 500), 1010, 0);
    expect_memory("files-uring", line, huge(slot * (40 / 16 + 2) * 16), 16, 0);
    renew_folder();
    make_shards(1010);
    const double shuffled = huge(slot * 720); /* 700 + 16 samples, in whole batches */
    expect_memory("shards", line, shuffled + huge(128 << 10), 16, 0);
    expect_memory("shards-mmap", line, slots, 16, 0);
    expect_memory("shards-omp", line, 3 * slots, 48, 0);
    expect_memory("shards-uring", line, shuffled + huge(40 * (128 << 10)), 16, 0);
}

#ifdef HAVE_PNG
/* One image of 45 values is decoded at a time, and the images of the largest batch are kept. */
Test(load, memory_includes_decoded_images, .init = make_folder, .fini = remove_folder)
{
    make_pictures(true);
    expect_memory("shards-mmap", "--cache any --on-error skip --batch 20 --decode", huge(1) + 45 + 19 * 45,
                  20, 19 * 45);
    expect_memory("shards-mmap", "--cache any --on-error skip --batch 20 --augment",
                  huge(1) + 45 + 4 * 19 * 45, 20, 4 * 19 * 45);
}
#endif

Test(load, a_cold_run_reads_from_the_device, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct cache_pages pages;
    make_folder_in("build");
    make_shards(101);
    must(open_job(&job, "--cache cold"));
    enum status settled = load_settle_cache(job.input, &pages);
    close_job(&job);
    if (settled != STATUS_OK)
        cr_skip_test("this file system keeps files in the page cache");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        char text[64], line[] = "--cache cold";
        if (!is_available(shard_variants[v]))
            continue;
        expect_between(shard_variants[v], line, "resident_share_before", 0, 0.01);
        measured(shard_variants[v], line, "storage_read_bytes", text);
        if (*text) /* empty if Linux does not report how many bytes came from the device */
            cr_expect_geq(strtod(text, NULL), 101 * 4000, "%s read %s bytes", shard_variants[v], text);
    }
}

/* Returns the number of bytes that this process has read, also those from the page cache. */
static unsigned long long bytes_read(void)
{
    unsigned long long bytes = 0;
    FILE *file = fopen("/proc/self/io", "r");
    cr_assert(file && fscanf(file, "rchar: %llu", &bytes) == 1);
    fclose(file);
    return bytes;
}

/* A large set would otherwise be read three times before its first run. */
Test(load, a_warm_run_reads_the_set_once_before, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct cache_pages pages;
    make_shards(101);
    must(open_job(&job, "--cache warm"));
    const struct load *load = job.input;
    unsigned long long before = bytes_read(), bytes = 0;
    must(load_settle_cache(load, &pages));
    unsigned long long read = bytes_read() - before;
    for (uint32_t i = 0; i < load->dataset->file_count; i++)
        bytes += load->dataset->files[i].bytes;
    cr_expect(!pages.hidden && bytes > 100000 && read >= bytes && read < bytes + bytes / 2,
              "%llu of %llu bytes", read, bytes);
    close_job(&job);
}

Test(load, tmpfs_refuses_cold, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct cache_pages pages;
    if (access("/dev/shm", W_OK) != 0)
        cr_skip_test("no /dev/shm");
    make_folder_in("/dev/shm");
    make_shards(101);
    must(open_job(&job, "--cache cold"));
    cr_assert_eq(load_settle_cache(job.input, &pages), STATUS_FAILED);
    expect_words("--cache cold: 100.0 % of the data set stays");
    close_job(&job);
}

/* Verification compares the samples in the buffers byte by byte, because the checksum of timed runs covers
 * only the first and last bytes of each file. */
Test(load, changed_byte_in_buffer_is_detected, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        uint64_t wrong = 0;
        if (start_job(&job, shard_variants[v], "--shuffle 9 --batch 4")) {
            const struct reader *reader = job.state;
            expect_none_wrong(&job);
            run_well(&job, 6);
            const struct dataset_sample *samples = reader->load->dataset->samples;
            uint32_t first = UINT32_MAX, torn = 0;
            for (uint32_t i = 0; i < (uint32_t)reader->threads * reader->slots && torn < 2; i++) {
                const struct worker *worker = &reader->workers[i / reader->slots];
                const uint32_t slot = i % reader->slots, number = worker->held[slot];
                if (number == READER_LOST)
                    continue;
                worker->slots[slot * reader->stride + samples[number].bytes / 2] ^= 1;
                first = number < first ? number : first;
                torn++;
            }
            cr_assert_eq(torn, 2);
            must(job.workload->verify(job.input, job.variant, job.state, 6, &wrong));
            cr_expect_eq(wrong, 2, "%s: %d", shard_variants[v], (int)wrong);
            char text[256] = "2 of 101 samples", name[64];
            snprintf(name, sizeof name, ": sample '%s')", samples[first].key);
            job.workload->checks.verdict(job.input, job.state, text, sizeof text);
            cr_expect(
                strstr(text,
                       "2 of 101 samples (only those still in the buffers were compared; the first: /tmp/") &&
                    strstr(text, ".tar: offset ") && strstr(text, name),
                "%s", text);
            must(job.workload->verify(job.input, job.variant, job.state, 7, &wrong));
            cr_expect_eq(wrong, 101, "%s: the buffers have the samples of another run: %d wrong",
                         shard_variants[v], (int)wrong);
            strcpy(text, "1 of 1");
            job.workload->checks.verdict(job.input, job.state, text, sizeof text);
            cr_expect_str_eq(text, "1 of 1"); /* no sample is the cause */
        }
        close_job(&job);
    }
}
