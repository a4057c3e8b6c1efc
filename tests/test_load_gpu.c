/* Tests, on the CPU, the functions that the GPU variants of load use: hashes, conversions, labels, arrays,
 * and orders that are defined by sorting random keys. Also tests which combinations of options are refused
 * before a device is used. */
#include "load_support.h"

#include <math.h>

#include "data/dataset.h"
#include "data/members.h"
#include "data/npy.h"
#include "load/arrays.h"
#include "load/convert.h"
#include "load/checksum.cuh"
#include "machine/host.h"
#include "data/checksum.h"
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

TestSuite(load_gpu, .timeout = 60);

/* ---- Hashes ---- */

static uint8_t *some_bytes(size_t size)
{
    uint8_t *bytes = malloc(size);
    uint32_t state = 12345;
    cr_assert_not_null(bytes);
    for (size_t i = 0; i < size; i++) {
        state = state * 1664525 + 1013904223;
        bytes[i] = (uint8_t)(state >> 24);
    }
    return bytes;
}

#ifdef HAVE_XXHASH
Test(load_gpu, xxh3_matches_libxxhash_for_every_length_and_seed)
{
    static const size_t large[] = {65535, 65536, 65537, 262144 + 63, 1000003};
    uint8_t *bytes = some_bytes(1 << 20);
    for (size_t size = 0; size <= 4096; size++) {
        const uint64_t seeds[] = {0, size, UINT64_C(0x9E3779B97F4A7C15) * (size + 1)};
        for (size_t s = 0; s < COUNT_OF(seeds); s++)
            cr_assert_eq(xxh3_64(bytes + size % 9, size, seeds[s]),
                         XXH3_64bits_withSeed(bytes + size % 9, size, seeds[s]), "%zu bytes, seed %zu", size,
                         s);
    }
    for (size_t i = 0; i < COUNT_OF(large); i++)
        cr_assert_eq(xxh3_64(bytes + i, large[i], i), XXH3_64bits_withSeed(bytes + i, large[i], i),
                     "%zu bytes", large[i]);
    free(bytes);
}

Test(load_gpu, device_checksums_match_host)
{
    uint8_t *bytes = some_bytes(5000);
    for (size_t size = 0; size < 1000; size++) {
        uint64_t members[] = {checksum_edges(bytes + 3, size), checksum_whole(bytes, size)};
        cr_assert_eq(device_checksum_edges(bytes + 3, size), members[0], "%zu bytes", size);
        cr_assert_eq(device_checksum_whole(bytes, size), members[1], "%zu bytes", size);
        for (uint32_t count = 1; count <= 2; count++)
            cr_assert_eq(device_checksum_sample(size, members, count), checksum_sample(size, members, count));
    }
    free(bytes);
}
#endif

/* ---- Conversion ---- */

Test(load_gpu, half_precision_numbers_convert_to_themselves)
{
    for (uint32_t bits = 0; bits < 1 << 16; bits++) {
        float value = half_to_float((uint16_t)bits);
        bool number = (bits & 0x7FFF) <= 0x7C00;
        cr_assert_eq(half_from_float(value), number ? bits : 0x7FFF, "%04x", bits);
        cr_assert_eq(isnan(value) == 0, number);
    }
}

static uint32_t converted(struct convert convert, const void *value)
{
    uint8_t slot[4] = {0};
    uint32_t word = 0;
    convert_one(&convert, value, 0, slot);
    memcpy(&word, slot, convert_value_bytes(&convert));
    return word;
}

Test(load_gpu, conversion_matches_definition)
{
    const uint8_t byte = 51;
    const uint16_t half = 0xC000; /* -2 */
    const float third = 1.0f / 3, zero = -0.0f;
    const uint32_t nan = 0xFFC12345;
    float value = fmaf(51, (float)(1 / 255.0 / 0.25), -2);
    cr_expect_eq(converted(convert_make(DTYPE_U8, DTYPE_F32, 0.5, 0.25), &byte), float_bits(value));
    cr_expect_eq(converted(convert_make(DTYPE_U8, DTYPE_STORED, 0.5, 0.25), &byte), 51);
    cr_expect_eq(converted(convert_make(DTYPE_F16, DTYPE_F16, 0, 1), &half), half);
    cr_expect_eq(converted(convert_make(DTYPE_F16, DTYPE_BF16, -2, 0.5), &half), 0, "(-2 + 2) * 2");
    cr_expect_eq(converted(convert_make(DTYPE_F32, DTYPE_F32, 0, 1), &third), float_bits(third));
    cr_expect_eq(converted(convert_make(DTYPE_F32, DTYPE_F32, 0, 1), &zero), 0x80000000u,
                 "-0 must keep its sign");
    cr_expect_eq(converted(convert_make(DTYPE_F32, DTYPE_F32, 0, 1), &nan), 0x7FFFFFFFu,
                 "every NaN becomes 0x7FFFFFFF");
    cr_expect_eq(converted(convert_make(DTYPE_F32, DTYPE_F16, 0, 1), &nan), 0x7FFF);
    cr_expect_eq(converted(convert_make(DTYPE_F32, DTYPE_STORED, 0, 1), &nan), nan,
                 "raw values must keep their bits");
}

Test(load_gpu, labels_are_whole_numbers)
{
    static const char *const bad[] = {"", " ", "-", "1.5", "x", "1 2", "2147483648", "-2147483649", "+1"};
    static const struct {
        const char *text;
        int32_t label;
    } good[] = {{"0", 0}, {"7\n", 7}, {" -12 ", -12}, {"2147483647", INT32_MAX}, {"-2147483648", INT32_MIN}};
    int32_t label;
    for (size_t i = 0; i < COUNT_OF(bad); i++)
        cr_expect_not(label_parse((const uint8_t *)bad[i], strlen(bad[i]), &label), "'%s'", bad[i]);
    for (size_t i = 0; i < COUNT_OF(good); i++)
        cr_expect(label_parse((const uint8_t *)good[i].text, strlen(good[i].text), &label) &&
                      label == good[i].label,
                  "'%s'", good[i].text);
}

/* ---- Orders ---- */

Test(load_gpu, keyed_order_covers_every_sample_once_for_any_rank_count)
{
    for (uint32_t workers = 1; workers <= 7; workers++) {
        struct order_plan plan = {.seed = 3, .samples = 1001, .workers = workers, .keyed = true};
        uint8_t seen[1001] = {0};
        struct order order;
        cr_assert_eq(order_open(&plan, &order), STATUS_OK);
        for (uint32_t w = 0; w < workers; w++) {
            uint64_t before = 0;
            order_make(&plan, 5, w, &order);
            for (uint32_t i = 0; i < order.count; i++) {
                uint64_t key = order_key(3, 5, order.samples[i]);
                cr_assert_geq(key, before);
                before = key;
                seen[order.samples[i]]++;
            }
        }
        for (int i = 0; i < 1001; i++)
            cr_assert_eq(seen[i], 1);
        order_close(&order);
    }
}

/* ---- Arrays ---- */

/* Writes an array of `bytes` bytes of values. The file is `more` bytes longer than its header specifies. */
static void put_array(const char *name, const char *type, const char *shape, size_t bytes, size_t more)
{
    char header[NPY_HEADER_MAX], file[NPY_HEADER_MAX + 512] = {0};
    size_t length = npy_header_make(header, type, shape);
    memcpy(file, header, length);
    put_file(name, file, length + bytes + more);
}

#ifdef HAVE_XXHASH
Test(load_gpu, arrays_locate_values_and_labels, .init = make_folder, .fini = remove_folder)
{
    struct dataset dataset;
    struct arrays arrays;
    put_array("a.npy", "<f2", "3, 5", 30, 0);
    put_file("a.cls", "12", 2);
    put_array("b.npy", "<f2", "3, 5", 30, 0);
    must(dataset_open(folder, false, NULL, NULL, &dataset));
    must(arrays_open(&dataset, NULL, true, &arrays));
    cr_expect(arrays.type == DTYPE_F16 && arrays.value_count == 15);
    const struct array_sample *a = &arrays.samples[0], *b = &arrays.samples[1];
    uint64_t npy = dataset.members[2].size, array = dataset.samples[0].image;
    cr_expect_eq(a->members, 2);
    cr_expect_eq(a->size[1 - array], 2);
    cr_expect_eq(a->label, 12);
    cr_expect_eq(a->bytes, npy + 2);
    cr_expect_eq(a->values_offset, a->at[array] + npy - 30);
    cr_expect_eq(a->at[1] % ARRAY_ALIGNMENT, 0);
    cr_expect_eq(arrays.extents[0].bytes, a->at[1] + a->size[1]);
    cr_expect(b->members == 1 && b->label == LABEL_NONE && b->at[0] == 0 && b->values_offset == npy - 30);
    cr_expect_eq(arrays.bytes_max, arrays.extents[0].bytes);
    arrays_close(&arrays);
    dataset_close(&dataset);
}

/* Images may have any size and format. The GPU decodes only baseline JPEG files that are not too small. */
Test(load_gpu, pictures_to_decode_are_examined, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t pixels[3 * 20 * 10];
    static const struct image_fit fit = {.how = FIT_RESIZE, .res = 5, .channels = 3};
    struct dataset dataset;
    struct arrays arrays;
    void *bytes;
    size_t size;
    must(png_encode(pixels, &(struct png_shape){20, 10, 3}, &bytes, &size));
    put_file("c.png", bytes, size);
    free(bytes);
    put_file("d.jpg", "no image", 8);
    if (jpeg_encode(pixels, &(struct jpeg_shape){.width = 20, .height = 10, .channels = 3}, 90, &bytes,
                    &size) != STATUS_OK)
        cr_skip_test("%s", status_text());
    put_file("a.jpg", bytes, size);
    put_file("a.cls", "7", 1);
    free(bytes);
    must(jpeg_encode(pixels, &(struct jpeg_shape){.width = 7, .height = 10, .channels = 3}, 90, &bytes,
                     &size));
    put_file("b.jpg", bytes, size);
    free(bytes);
    must(dataset_open(folder, false, NULL, NULL, &dataset));
    must(arrays_open(&dataset, &fit, false, &arrays));
    cr_expect(arrays.type == DTYPE_U8 && arrays.value_count == 75);
    const struct array_picture *pictures = arrays.pictures;
    cr_expect(pictures[0].on_device && pictures[0].shape.width == 20 && pictures[0].shape.height == 10);
    cr_expect(!pictures[1].on_device && !pictures[2].on_device && !pictures[3].on_device);
    cr_expect(arrays.samples[0].label == 7 && arrays.samples[1].label == LABEL_NONE);
    arrays_close(&arrays);
    dataset_close(&dataset);
}

static void expect_unfit(const char *words)
{
    struct dataset dataset;
    struct arrays arrays;
    must(dataset_open(folder, false, NULL, NULL, &dataset));
    cr_expect_eq(arrays_open(&dataset, NULL, true, &arrays), STATUS_USAGE, "%s", words);
    expect_words(words);
    expect_words("sample 'b");
    arrays_close(&arrays);
    dataset_close(&dataset);
    renew_folder();
    put_array("a.npy", "|u1", "3, 5", 15, 0);
}

Test(load_gpu, unsuitable_samples_are_refused_with_remedy, .init = make_folder, .fini = remove_folder)
{
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    put_array("b.npy", "|u1", "5, 3", 15, 0);
    expect_unfit("all samples need the same type and shape");
    put_array("b.npy", "<f2", "3, 5", 30, 0);
    expect_unfit("all samples need the same type and shape");
    put_array("b.npy", "|u1", "3, 5", 15, 1);
    expect_unfit("its .npy header requires");
    put_file("b.npy", "no array", 8);
    expect_unfit("not a supported .npy file");
    put_file("b.png", "x", 1);
    expect_unfit("shards-gpu or shards-omp with --decode --out-res PIXELS");
    put_file("b.json", "{}", 2);
    put_file("a.cls", "1", 1); /* without it, a.npy would be the only sample */
    expect_unfit("its members are: json;");
    put_file("b.cls", "1", 1);
    expect_unfit(
        "it has no member for --image jpg;jpeg;png;npy;ppm;bmp;pgm;tif;tiff;webp; its members are: cls;");
    put_array("b.npy", "|u1", "3, 5", 15, 0);
    put_file("b.cls", "cat", 3);
    expect_unfit("a label is a decimal integer of 32 bits");
    renew_folder();
    put_array("b.npy", "<i8", "2,", 16, 0);
    expect_unfit("values of type '<i8'");
}

/* ---- Options ---- */

/* Each line is accepted (`words` is NULL) or refused with a message that contains `words`, either when the
 * workload opens or by a variant with these traits. The data set has two samples. */
Test(load_gpu, combinations_of_options_are_accepted_or_refused, .init = make_folder, .fini = remove_folder)
{
    static const struct load_traits cpu = {.files = true}, device = {.files = true, .device = true},
                                    decodes = {.files = true, .device = true, .decodes = true},
                                    of_shards = {.shards = true};
    static const struct {
        const char *line;
        const struct load_traits *traits;
        const char *words;
        uint64_t ranks; /* 0: one rank */
    } cases[] = {
        {"--cache any --epochs 2", &cpu, NULL, 2},
        {"--cache cold --epochs 1", &cpu, NULL, 0},
        {"--cache cold --epochs 2", &cpu, "only the first epoch of a run would be cold; drop --epochs", 0},
        {"--cache cold", &cpu, "--cache cold needs a single rank", 2},
        {"--cache any", &cpu, "has 2 samples, too few for 3 ranks", 3},
        {"--cache any", &of_shards, "; use the variant files-omp, or copy them to shards: ", 0},
        {"--batch max", &cpu, "give a number", 0},
        {"--block 8 --chunk 12", &cpu, NULL, 0},
        {"--block 7", &cpu, "--block 7 is not a multiple of the page size", 0},
        {"--chunk 7", &cpu, "--chunk 7 is not a multiple of the page size", 0},
        {"--cache-dir copies", &cpu, "--cache-dir and --cache-bytes are for data at a URL", 0},
        {"--cache-bytes 1M", &cpu, "--cache-dir and --cache-bytes are for data at a URL", 0},
        {"--data http://host/x.tar --cache-bytes 1M", &cpu, "name its folder with --cache-dir DIR", 0},
        {"--data http://host/x.tar --cache warm", &cpu, "--cache warm needs files: add --cache-dir DIR", 0},
        {"--data http://host/x.tar --cache cold", &cpu, "--cache cold needs files: add --cache-dir DIR", 0},
        {"--out-res 8 --fit crop --channels 1", &cpu, NULL, 0},
        {"--fit crop", &cpu, "--fit requires --out-res PIXELS", 0},
        {"--channels 3", &cpu, "--channels requires --out-res PIXELS", 0},
        {"--out-res 8 --channels 2", &cpu, "'2' is neither 1 (gray) nor 3 (colour)", 0},
        {"--augment --shift 3", &cpu, NULL, 0},
        {"--decode --shift 3", &cpu, "--shift requires --augment", 0},
        {"--out-res 64 --blur-sigma 1", &cpu, "--blur-sigma requires --blur P", 0},
        {"--out-res 64 --color-jitter-p 0.5", &cpu, "--color-jitter-p requires --color-jitter B,C,S,H", 0},
        {"--dtype raw", &cpu, NULL, 0},
        {"--dtype raw --mean 1", &device, "--dtype raw keeps the values as stored; drop --mean and --std", 0},
        {"--dtype raw --std 2", &device, "--dtype raw keeps the values as stored; drop --mean and --std", 0},
        {"--dtype raw --mean 1 --augment", &cpu, NULL, 0},
        {"--mean 0.5", &device, NULL, 0},
        {"--mean 0.5", &cpu, "--mean and --std require --augment or a GPU variant", 0},
        {"--std 2 --decode", &cpu, "--mean and --std require --augment or a GPU variant", 0},
        {"--mean 0.5 --augment", &cpu, NULL, 0},
        {"--mean 0,1,2", &decodes, "only with --decode", 0},
        {"--compute train:logreg", &cpu, "--variant train-cuda --model logreg with --data DIR --feed load",
         0},
        {"--decode", &device, "cannot decode or augment", 0},
        {"--decode", &decodes, "decodes into batches of images of one size; add --out-res", 0},
        {"--out-res 8", &decodes, NULL, 0},
        {"--out-res 8 --augment --mean 0,1,2 --layout nhwc", &decodes, NULL, 0},
        {"--out-res 8 --augment --shift 2", &decodes, "does not shift images; drop --shift", 0},
    };
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    put_array("b.npy", "|u1", "3, 5", 15, 0);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct variant variant = {.traits = cases[i].traits};
        const struct partition partition = {.ranks = cases[i].ranks ? cases[i].ranks : 1};
        char line[PATH_MAX + 1024];
        struct job job;
        snprintf(line, sizeof line, "%s%s %s", strstr(cases[i].line, "--data") ? "" : "--data ",
                 strstr(cases[i].line, "--data") ? "" : folder, cases[i].line);
        enum status status = open_workload(&job, "load", line, partition);
        if (status == STATUS_OK)
            status = accepted(&job, &variant);
        cr_expect_eq(status, cases[i].words ? STATUS_USAGE : STATUS_OK, "%s: status %d: %s", cases[i].line,
                     (int)status, status_text());
        cr_expect(!cases[i].words || strstr(status_text(), cases[i].words), "%s: %s", cases[i].line,
                  status_text());
        close_job(&job);
    }
    struct job job;
    cr_expect_eq(open_workload(&job, "load", "", (struct partition){.ranks = 1}), STATUS_USAGE);
    expect_words("name the data to read with --data DIR");
    close_job(&job);
}

Test(load_gpu, columns_are_empty_if_an_option_does_not_apply, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        const char *option;
        bool cpu, device, ring, decodes, resident;
    } cases[] = {{"dtype", false, true, true, true, true},
                 {"ring", false, false, true, false, false},
                 {"chunk", false, false, false, false, false}, /* without --chunk, the row says its size */
                 {"block", true, false, false, false, false},
                 {"batch", true, true, true, true, true},
                 {"mean", false, true, true, true, true},
                 {"shift", false, false, false, false, false},
                 {"augment", true, false, false, true, false},
                 {"fit", true, false, false, true, false},
                 {"layout", false, false, false, true, false},
                 {"decoder", false, false, false, true, false},
                 {"resident-bytes", false, false, false, false, true},
                 {"resident-device-bytes", false, false, false, false, false}};
    const struct load_traits cpu = {.files = true}, device = {.device = true},
                             ring = {.device = true, .ring = true},
                             decodes = {.device = true, .decodes = true},
                             resident = {.device = true, .resident = true};
    const struct variant variants[] = {{.traits = &cpu},
                                       {.traits = &device},
                                       {.traits = &ring},
                                       {.traits = &decodes},
                                       {.traits = &resident}};
    struct job job;
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    must(open_job(&job, "--out-res 8"));
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const bool wanted[] = {cases[i].cpu, cases[i].device, cases[i].ring, cases[i].decodes,
                               cases[i].resident};
        for (size_t v = 0; v < COUNT_OF(variants); v++)
            cr_expect_eq(job.workload->applies(job.parameters, &variants[v], cases[i].option), wanted[v],
                         "%s, %zu", cases[i].option, v);
        cr_expect_eq(job.workload->applies(job.parameters, NULL, cases[i].option),
                     strcmp(cases[i].option, "shift") != 0, "%s: any variant", cases[i].option);
    }
    close_job(&job);
    must(open_job(&job, "--chunk 2048"));
    cr_expect(job.workload->applies(job.parameters, &variants[2], "chunk"));
    close_job(&job);
}

/* ---- Pinned shards ---- */

Test(load_gpu, shards_are_pinned_if_they_are_warm_and_leave_memory_to_others, .init = make_folder,
     .fini = remove_folder)
{
    static const struct {
        const char *options;
        bool pinned;
    } cases[] = {{"", true},
                 {"--chunk 64", true},
                 {"--cache any", false},
                 {"--cache cold", false},
                 {"--out-res 8", false}};
    struct job job;
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        must(open_job(&job, cases[i].options));
        cr_expect_eq(load_should_pin(job.input), cases[i].pinned, "%s", cases[i].options);
        close_job(&job);
    }
    must(open_job(&job, ""));
    struct load load = *(const struct load *)job.input;
    struct dataset dataset = *load.dataset;
    struct dataset_file file = dataset.files[0];
    load.dataset = &dataset;
    dataset.files = &file;
    file.bytes = memory_available_bytes() / 4;
    cr_expect(load_should_pin(&load));
    file.bytes *= 3;
    cr_expect_not(load_should_pin(&load), "more than half of the available memory");
    file.bytes = 1;
    file.packed = true;
    cr_expect_not(load_should_pin(&load), "compressed");
    close_job(&job);
}

Test(load_gpu, large_chunks_follow_from_the_share_of_a_thread, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        uint64_t bytes;
        uint32_t ranks;
        int threads;
        uint64_t most_kib, kib;
    } cases[] = {{1, 1, 1, 8192, 2048},
                 {UINT64_C(8) << 20, 1, 1, 8192, 2048},
                 {(UINT64_C(12) << 20) + 4097, 1, 1, 8192, 3072},
                 {UINT64_C(64) << 20, 1, 7, 8192, 2340},
                 {UINT64_C(600000000), 1, 16, 8192, 8192},
                 {UINT64_C(600000000), 1, 16, 16384, 9152},
                 {UINT64_C(600000000), 2, 16, 8192, 4576},
                 {UINT64_C(600000000), 2, 2, 13924, 13924},
                 {UINT64_C(1) << 40, 3, 128, 1000, 2048}};
    struct job job;
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int given = 0; given < 2; given++) {
            must(open_job(&job, given ? "--chunk 100" : ""));
            struct load load = *(const struct load *)job.input;
            struct dataset dataset = *load.dataset;
            load.dataset = &dataset;
            load.ranks = cases[i].ranks;
            dataset.bytes = cases[i].bytes;
            cr_expect_eq(load_large_chunk(&load, cases[i].threads, cases[i].most_kib << 10) >> 10,
                         given ? 100 : cases[i].kib, "case %zu", i);
            close_job(&job);
        }
}

/* An option that no variant of the run reads must not be ignored silently. */
Test(load_gpu, options_without_effect_on_the_variants_are_warned_about, .init = make_folder,
     .fini = remove_folder)
{
    static const char *const unread[] = {"--dtype f32",
                                         "--ring 4",
                                         "--chunk 64",
                                         "--layout nhwc",
                                         "--decoder cpu",
                                         "--resident-bytes 1M",
                                         "--resident-device-bytes 1M"};
    static const char *const read[] = {"--iodepth 4", "--shuffle 3", "--seed 1",
                                       "--decode --augment --shift 1"};
#define RUN \
    "$P --variant files --data $D --loops 1 --warmups 0 --warmup-time 0 --format csv %s 2>&1 | grep -q "
    put_array("a.npy", "|u1", "3, 5", 15, 0);
    for (size_t i = 0; i < COUNT_OF(unread); i++)
        cr_expect(command(RUN
                          "'warning: %.*s has no effect with --variant files and these options; drop it, or "
                          "choose the variant or the options that it needs (--help)'",
                          unread[i], (int)strcspn(unread[i], " "), unread[i]),
                  "%s", unread[i]);
    for (size_t i = 0; i < COUNT_OF(read); i++)
        cr_expect(!command(RUN "'no effect'", read[i]), "%s", read[i]);
}

/* Returns the work of 3 epochs of 100 samples; 2 of the 300 samples could not be read. */
static struct work loading(const struct load_traits *traits, double resident_share)
{
    const struct dataset dataset = {.sample_count = 100, .bytes = 5000};
    struct load_control control = {.resident_share = resident_share};
    control.lost.count = 2;
    control.lost.bytes = 60;
    const struct load_parameters given = {.batch = 10};
    struct load load = {.dataset = &dataset, .control = &control, .given = &given, .epochs = 3, .ranks = 1};
    const struct variant variant = {.platform = traits->device ? "cuda" : "cpu", .traits = traits};
    return workload_find("load")->work(&load, &variant);
}

Test(load_gpu, work_counts_bus_or_memory_bytes)
{
    const struct load_traits keeps = {.device = true, .resident = true};
    const struct work host = loading(&(const struct load_traits){.files = true}, 1),
                      bus = loading(&(const struct load_traits){.device = true}, 1),
                      resident = loading(&keeps, 1), half = loading(&keeps, 0.5);
    const struct load_traits streams = {.device = true, .streams = true};
    const struct work read = loading(&streams, 0), kept = loading(&streams, 0.5);
    cr_expect(read.least.bus_bytes == 14940 && read.least.round_bytes == 0);
    cr_expect(kept.least.bus_bytes == 7470 && kept.least.round_bytes == 2490);
    cr_expect(half.least.bus_bytes == 7470 && half.least.round_bytes == 2490 && half.least.rounds == 3);
    cr_expect(host.items == 298 && host.bytes == 14940);
    cr_expect(bus.items == 298 && bus.bytes == 14940 && resident.bytes == 14940);
    cr_expect(host.least.bus_bytes == 0 && host.least.once_bytes == 0 && host.least.round_bytes == 0);
    cr_expect(bus.least.bus_bytes == 14940 && bus.least.round_bytes == 0);
    cr_expect(resident.least.round_bytes == 4980 && resident.least.rounds == 3);
    cr_expect_eq(resident.least.bus_bytes, 0);
}
#endif
