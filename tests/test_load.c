/* The workload `load`: orders, tallies, latencies, and what every variant makes of whole and of broken data.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <criterion/criterion.h>

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/npy.h"
#include "core/options.h"
#include "core/png_image.h"
#include "core/workload.h"
#include "load/augment.h"
#include "load/cache.h"
#include "load/load.h"
#include "load/tar.h"

TestSuite(load, .timeout = 60);

/* ---- Orders ---- */

static const uint32_t shard_first[] = {0, 7, 7, 20, 21, 64};

static struct order_plan plan_of(uint32_t shards, uint32_t window, uint32_t workers)
{
    struct order_plan plan = {.seed = 5,
                              .samples = 64,
                              .shards = shards,
                              .shard_first = shards ? shard_first : NULL,
                              .window = window,
                              .workers = workers};
    return plan;
}

Test(load, every_sample_comes_once_an_epoch_for_any_number_of_workers)
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

Test(load, a_window_moves_no_sample_farther_than_its_size)
{
    struct order_plan plan = plan_of(5, 10, 1);
    struct order order;
    cr_assert_eq(order_open(&plan, &order), STATUS_OK);
    order_make(&plan, 0, 0, &order);
    for (uint32_t i = 0; i < order.count; i++)
        cr_assert_eq(order.places[i] / 10, i / 10);
    order_close(&order);
}

Test(load, quality_of_known_orders)
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

/* ---- Tallies and latencies ---- */

Test(load, a_tally_tells_what_is_missing_doubled_or_swapped)
{
    const uint8_t a[300] = {1}, b[300] = {2};
    uint64_t hash_a = tally_edges(a, sizeof a), hash_b = tally_edges(b, sizeof b);
    uint64_t one = tally_key("one", 3), two = tally_key("two", 3);
    uint64_t right = tally_sample(one, &hash_a, 1) + tally_sample(two, &hash_b, 1);
    cr_assert_neq(right, tally_sample(one, &hash_b, 1) + tally_sample(two, &hash_a, 1));
    cr_assert_neq(right, tally_sample(one, &hash_a, 1));
    cr_assert_neq(right, 2 * tally_sample(one, &hash_a, 1));
    cr_assert_neq(tally_edges(a, 299), hash_a);
    uint8_t middle[300] = {1};
    middle[150] = 1;
    cr_assert_eq(tally_edges(middle, 300), hash_a);
    cr_assert_neq(tally_whole(middle, 300), tally_whole(a, 300));
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

Test(load, augmentation_is_what_its_definition_says)
{
    uint8_t pixels[2 * 4 * 5];
    float values[2 * 4 * 5];
    struct image image = {.channels = 2, .height = 4, .width = 5, .interleaved = true, .pixels = pixels};
    struct augment augment = {.shift = 3, .flip = true, .mean = 0.5f, .scale = 2, .seed = 1};
    int flips = 0, moves = 0;
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
                    }
                    explained |= same;
                }
        cr_assert(explained, "sample %u", sample);
    }
    cr_assert(flips > 60 && flips < 140, "%d flips of 200", flips);
    cr_assert_gt(moves, 150);
}

#ifdef HAVE_PNG
Test(load, a_png_decodes_to_its_pixels)
{
    const uint8_t pixels[2 * 3 * 3] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 250, 251, 252, 253, 254, 255, 0, 10, 20};
    const struct png_shape shape = {.width = 3, .height = 2, .channels = 3};
    void *bytes;
    size_t size, room_bytes = 0;
    uint8_t *room = NULL;
    struct image image;
    bool is_image;
    cr_assert_eq(png_encode(pixels, &shape, &bytes, &size), STATUS_OK, "%s", status_text());
    cr_assert_eq(image_decode("PNG", bytes, size, &room, &room_bytes, &image, &is_image), STATUS_OK);
    cr_assert(is_image && image.interleaved && image.type == IMAGE_U8);
    cr_assert(image.channels == 3 && image.height == 2 && image.width == 3);
    cr_assert_arr_eq(image.pixels, pixels, sizeof pixels);
    cr_assert_eq(image_decode("png", bytes, size / 2, &room, &room_bytes, &image, &is_image), STATUS_FAILED);
    cr_assert_eq(image_decode("cls", bytes, size, &room, &room_bytes, &image, &is_image), STATUS_OK);
    cr_assert_not(is_image);
    free(bytes);
    free(room);
}
#endif

Test(load, halves_are_augmented_as_their_values)
{
    char file[NPY_HEADER_MAX + 8];
    size_t header = npy_header(file, "<f2", "1, 1, 4"), room_bytes = 0;
    const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff}; /* 1, -2, 2^-24, 65504 */
    float values[4];
    uint8_t *room = NULL;
    struct image image;
    struct augment augment = {.scale = 1};
    bool is_image;
    memcpy(file + header, halves, sizeof halves);
    cr_assert_eq(
        image_decode("npy", (const uint8_t *)file, header + 8, &room, &room_bytes, &image, &is_image),
        STATUS_OK, "%s", status_text());
    cr_assert(is_image && image.channels == 1 && image.height == 1 && image.width == 4);
    image_augment(&augment, &image, 0, 0, values);
    cr_assert(values[0] == 1 && values[1] == -2 && values[2] == 0x1p-24f && values[3] == 65504);
}

/* ---- Data sets on disk ---- */

static char folder[PATH_MAX];

static void make_folder(void)
{
    snprintf(folder, sizeof folder, "/tmp/fdsl-load-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    char command[PATH_MAX + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}

static const char *in_folder(const char *name)
{
    static char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* A byte of a sample. */
static uint8_t content(uint32_t sample, uint32_t member, uint32_t i)
{
    return (uint8_t)(sample * 7 + member * 31 + i * 13 + i / 251);
}

/* Sizes that cross blocks, pages and edges. */
static uint32_t size_of(uint32_t sample, uint32_t member)
{
    return member ? sample % 3 : (sample * 997) % 9000;
}

static void put_member(FILE *stream, uint32_t sample, uint32_t member)
{
    char name[64];
    uint8_t header[TAR_BLOCK_BYTES];
    uint32_t size = size_of(sample, member);
    snprintf(name, sizeof name, "%06u.%s", sample, member ? "cls" : "bin");
    cr_assert_eq(tar_header(header, name, size), STATUS_OK);
    fwrite(header, 1, sizeof header, stream);
    for (uint32_t i = 0; i < size; i++)
        putc(content(sample, member, i), stream);
    for (uint32_t i = 0; i < tar_padding(size); i++)
        putc(0, stream);
}

/* Shards of different sizes, with an odd number of samples in all. */
static void make_shards(uint32_t samples)
{
    static const uint8_t zeros[TAR_END_BYTES];
    uint32_t sample = 0;
    for (int shard = 0; shard < 3; shard++) {
        char name[64];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        FILE *stream = fopen(in_folder(name), "w");
        cr_assert_not_null(stream);
        for (uint32_t end = shard == 2 ? samples : (shard + 1) * samples / 4; sample < end; sample++)
            for (uint32_t member = 0; member < 2; member++)
                put_member(stream, sample, member);
        fwrite(zeros, 1, sizeof zeros, stream);
        fclose(stream);
    }
}

static void make_files(uint32_t samples)
{
    for (uint32_t sample = 0; sample < samples; sample++)
        for (uint32_t member = 0; member < 2; member++) {
            char name[64];
            snprintf(name, sizeof name, "%03u", sample / 100);
            mkdir(in_folder(name), 0777);
            snprintf(name, sizeof name, "%03u/%06u.%s", sample / 100, sample, member ? "cls" : "bin");
            FILE *stream = fopen(in_folder(name), "w");
            cr_assert_not_null(stream);
            for (uint32_t i = 0; i < size_of(sample, member); i++)
                putc(content(sample, member, i), stream);
            fclose(stream);
        }
}

/* The workload's input for a command line. */
struct job {
    const struct workload *workload;
    struct options options;
    void *parameters, *input;
    char *line;
};

static enum status open_job(struct job *job, const char *line)
{
    char *argv[32] = {(char *)"test", (char *)"--data", folder};
    int argc = 3;
    *job = (struct job){.workload = workload_find("load"), .line = strdup(line)};
    for (char *rest = job->line, *word; (word = strsep(&rest, " "));)
        if (*word)
            argv[argc++] = word;
    job->parameters = calloc(1, job->workload->parameters_bytes);
    job->options = (struct options){
        .tables = {{job->workload->options, job->workload->option_count, job->parameters}}, .table_count = 1};
    cr_assert_eq(options_parse(&job->options, argc, argv), STATUS_OK, "%s", status_text());
    return job->workload->open(&job->options, job->parameters, &(const struct place){.ranks = 1},
                               &job->input);
}

static void close_job(struct job *job)
{
    if (job->input)
        job->workload->close(job->input);
    options_free(&job->options);
    free(job->parameters);
    free(job->line);
}

/* Sets a variant up, NULL where it cannot run here. */
static const struct variant *start(struct job *job, const char *name, void **state)
{
    const struct variant_entry *entry = variant_find(name);
    const struct resources resources = {.threads = 3};
    if (variant_available(entry, &resources) != STATUS_OK)
        return NULL;
    cr_assert_eq(job->workload->accepts(job->input, entry->variant), STATUS_OK, "%s", status_text());
    cr_assert_eq(entry->variant->setup(&resources, job->input, state), STATUS_OK, "%s", status_text());
    return entry->variant;
}

static const char *const shard_variants[] = {"shards", "shards-mmap", "shards-omp", "shards-uring"};
static const char *const file_variants[] = {"files", "files-omp", "files-uring"};

static void expect_exactly_once(const char *name, const char *line)
{
    struct job job;
    void *state;
    uint64_t wrong = 1;
    cr_assert_eq(open_job(&job, line), STATUS_OK, "%s", status_text());
    const struct variant *variant = start(&job, name, &state);
    if (variant) {
        struct run_time unused;
        struct load_result result;
        for (uint64_t number = 0; number < 3; number++)
            cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s %s: %s", name, line,
                         status_text());
        cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
        cr_assert_eq(result.tally.count % 101, 0, "%s %s", name, line);
        cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong), STATUS_OK, "%s", status_text());
        cr_assert_eq(wrong, 0, "%s %s", name, line);
        variant->teardown(state);
    }
    close_job(&job);
}

Test(load, every_variant_delivers_every_sample_once, .init = make_folder, .fini = remove_folder)
{
    static const char *const lines[] = {"--cache any", "--cache any --shuffle 0 --batch 1",
                                        "--cache any --shuffle 10 --batch 7 --block 4 --depth 3",
                                        "--cache warm --shuffle 1000 --batch 200 --epochs 2",
                                        "--cache any --depth 1 --block 4 --prefetch 0 --seed 9"};
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (size_t l = 0; l < COUNT_OF(lines); l++)
            expect_exactly_once(shard_variants[v], lines[l]);
    remove_folder();
    make_folder();
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (size_t l = 0; l < COUNT_OF(lines); l++)
            expect_exactly_once(file_variants[v], lines[l]);
}

/* ---- Consumed batches ---- */

/* A consumer that adds up what it is given, by any thread. */
struct counting {
    struct consumer consumer;
    uint64_t steps, bytes, sum, fails_at;
};

static enum status count_batch(struct consumer *consumer, const void *batch, size_t bytes)
{
    struct counting *self = (struct counting *)consumer;
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++)
        sum += ((const uint8_t *)batch)[i];
    __atomic_fetch_add(&self->bytes, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&self->sum, sum, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&self->steps, 1, __ATOMIC_RELAXED) == self->fails_at)
        return status_set(STATUS_FAILED, "the device caught fire");
    return STATUS_OK;
}

static const struct consumer_type counting_type = {.take_host = count_batch};

/* Runs an epoch of the variant with that consumer; false where it cannot run here. */
static bool consume_epoch(const char *name, const char *line, enum status expected, struct counting *counting)
{
    struct job job;
    void *state;
    counting->consumer.type = &counting_type;
    cr_assert_eq(open_job(&job, line), STATUS_OK, "%s", status_text());
    const struct variant *variant = start(&job, name, &state);
    if (variant) {
        struct run_time unused;
        job.workload->set_consumer(job.input, &counting->consumer);
        cr_assert_eq(variant_run(variant, state, 0, &unused), expected, "%s %s: %s", name, line,
                     status_text());
        variant->teardown(state);
    }
    close_job(&job);
    return variant;
}

Test(load, every_variant_has_its_whole_batches_consumed, .init = make_folder, .fini = remove_folder)
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
        remove_folder();
        make_folder();
    }
}

Test(load, what_is_consumed_is_what_training_gets, .init = make_folder, .fini = remove_folder)
{
    char command[2 * PATH_MAX];
    const char *program = getenv("FDSL_BENCH");
    snprintf(command, sizeof command,
             "%s --prepare '%s' --layout files --samples 40 --sample-shape 3,4,4 --dtype u8 >/dev/null 2>&1",
             program ? program : "./fdsl-bench", folder);
    cr_assert_eq(system(command), 0);
    struct counting decoded = {0}, augmented = {0}, same = {0};
    cr_assert(consume_epoch("files", "--cache any --batch 16 --decode", STATUS_OK, &decoded));
    cr_assert(consume_epoch("files", "--cache any --batch 16 --augment --shift 0", STATUS_OK, &augmented));
    cr_assert(consume_epoch("files", "--cache any --batch 16 --decode --seed 9", STATUS_OK, &same));
    cr_expect(decoded.steps == 3 && decoded.bytes == 40 * 48, "%d bytes", (int)decoded.bytes);
    cr_expect(augmented.steps == 3 && augmented.bytes == 40 * 48 * 4, "%d bytes", (int)augmented.bytes);
    cr_expect(decoded.sum == same.sum && decoded.sum > 0, "the same pixels in any order");
}

#ifdef HAVE_PNG
static void make_pictures(bool shard);

/* Notes which pictures of make_pictures() came: each is 45 equal bytes, three times its number. */
struct viewing {
    struct consumer consumer;
    int seen[20], steps, spoilt;
};

static enum status view_batch(struct consumer *consumer, const void *batch, size_t bytes)
{
    struct viewing *self = (struct viewing *)consumer;
    const uint8_t *pixels = batch;
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
    void *state;
    struct run_time unused;
    cr_assert_eq(open_job(&job, "--cache any --decode --on-error skip --batch 3"), STATUS_OK, "%s",
                 status_text());
    const struct variant *variant = start(&job, name, &state);
    if (variant) {
        job.workload->set_consumer(job.input, &viewing.consumer);
        cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK, "%s: %s", name, status_text());
        cr_expect_eq(viewing.spoilt, 0, "%s", name);
        cr_expect_geq(viewing.steps, 7, "%s", name);
        for (int i = 0; i < 20; i++)
            cr_expect_eq(viewing.seen[i], i != 7, "%s: picture %d came %d times", name, i, viewing.seen[i]);
        variant->teardown(state);
    }
    close_job(&job);
}

/* Whole batches of decoded images, without the one that does not decode. */
Test(load, decoded_batches_hold_every_picture_once, .init = make_folder, .fini = remove_folder)
{
    make_pictures(true);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_pictures_in_batches(shard_variants[v]);
    remove_folder();
    make_folder();
    make_pictures(false);
    /* An array that decodes, in the sample whose picture does not: it must not stay in the batch. */
    char array[NPY_HEADER_MAX + 45];
    size_t header = npy_header(array, "|u1", "5, 9");
    memset(array + header, 21, 45);
    FILE *stream = fopen(in_folder("000007.npy"), "w");
    cr_assert(stream && fwrite(array, 1, header + 45, stream) == header + 45 && fclose(stream) == 0);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        expect_pictures_in_batches(file_variants[v]);
}
#endif

/* A data set with an index. */
static void prepare(const char *layout)
{
    char command[3 * PATH_MAX];
    const char *program = getenv("FDSL_BENCH");
    snprintf(command, sizeof command,
             "%s --prepare '%s' --layout %s --samples 40 --sample-shape 3,8 --dtype f16 "
             ">/dev/null 2>&1",
             program ? program : "./fdsl-bench", folder,
             strcmp(layout, "shards") == 0 ? "shards --shards 3" : layout);
    cr_assert_eq(system(command), 0, "%s", command);
}

/* Memory that may not be locked is read into all the same. */
Test(load, shards_uring_needs_little_locked_memory, .init = make_folder, .fini = remove_folder)
{
    const struct rlimit little = {1 << 20, 1 << 20}; /* enough for the ring itself */
    make_shards(101);
    cr_assert_eq(setrlimit(RLIMIT_MEMLOCK, &little), 0);
    bool root = geteuid() == 0;
    if (root) /* it may lock what it likes */
        cr_assert(chmod(folder, 0755) == 0 && seteuid(65534) == 0);
    expect_exactly_once("shards-uring", "--cache any --depth 8 --block 1024");
    if (root)
        cr_assert_eq(seteuid(0), 0);
}

/* ---- Faults ---- */

static size_t column_of(const struct workload *workload, const char *column)
{
    size_t place = 0;
    while (workload->measures[place].column && strcmp(workload->measures[place].column, column) != 0)
        place++;
    cr_assert_not_null(workload->measures[place].column, "%s", column);
    return place;
}

static void overwrite(const char *name, long offset, const void *bytes, size_t count)
{
    int fd = open(in_folder(name), O_WRONLY);
    cr_assert(fd >= 0 && pwrite(fd, bytes, count, offset) == (ssize_t)count);
    close(fd);
}

static void expect_refused(const char *words)
{
    struct job job;
    enum status status = open_job(&job, "--cache any");
    cr_assert_neq(status, STATUS_OK, "%s", words);
    cr_assert_not_null(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
    close_job(&job);
}

/* With --on-error skip every variant reads the rest, `left` samples; `skipped` is what the column says. */
static void expect_skipped(uint32_t left, const char *skipped)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants) + COUNT_OF(file_variants); v++) {
        bool shards = v < COUNT_OF(shard_variants);
        const char *name = shards ? shard_variants[v] : file_variants[v - COUNT_OF(shard_variants)];
        struct job job;
        void *state;
        struct run_time unused;
        struct load_result result;
        char texts[64][64] = {{0}};
        cr_assert_eq(open_job(&job, "--cache any --on-error skip --shuffle 9 --batch 4"), STATUS_OK, "%s",
                     status_text());
        const struct load *load = job.input;
        const struct variant *variant = load->dataset->shards == shards ? start(&job, name, &state) : NULL;
        if (variant) {
            for (uint64_t number = 0; number < 2; number++)
                cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s: %s", name,
                             status_text());
            cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
            cr_assert_eq(result.tally.count, left, "%s: %d left", name, (int)result.tally.count);
            cr_assert_eq(job.workload->measure(job.input, variant, state, texts), STATUS_OK, "%s",
                         status_text());
            cr_assert_str_eq(texts[column_of(job.workload, "skipped")], skipped);
            variant->teardown(state);
        }
        close_job(&job);
    }
}

/* Samples from number `sample` on that are whole in a shard that ends at `bytes`, less the last, which the
 * cut might have shortened. */
static uint32_t whole_before(uint32_t sample, uint64_t bytes)
{
    uint32_t whole = 0;
    for (uint64_t end = 0;; whole++)
        for (uint32_t member = 0; member < 2; member++) {
            uint32_t size = size_of(sample + whole, member);
            end += TAR_BLOCK_BYTES + size + tar_padding(size);
            if (end > bytes) /* a sample of which the first member is there counts, and is the last */
                return whole - (member == 0);
        }
}

Test(load, a_truncated_shard_is_named_with_its_offset, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    cr_assert_eq(truncate(in_folder("x-000001.tar"), 20000), 0);
    expect_refused("x-000001.tar: offset ");
    expect_skipped(101 - 25 + whole_before(25, 20000), ""); /* how many were behind, nobody knows */
}

Test(load, a_flipped_bit_in_a_header_is_named, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    overwrite("x-000001.tar", 3, "z", 1);
    expect_refused("x-000001.tar: offset 0: ");
    expect_skipped(76, "");
}

Test(load, an_empty_shard_is_named, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), 0), 0);
    expect_refused("x-000002.tar");
    expect_skipped(50, "");
}

Test(load, a_folder_that_is_none_or_holds_nothing_is_refused, .init = make_folder, .fini = remove_folder)
{
    expect_refused("no samples there");
    fclose(fopen(in_folder("1.bin"), "w"));
    expect_refused("hold no bytes");
    cr_assert_eq(symlink(".", in_folder("again")), 0);
    expect_refused("again/ leads back to a folder that it is in");
    cr_assert_eq(mkdir(in_folder(".prepare"), 0777), 0);
    expect_refused("is not whole: what prepared it");
    remove_folder();
    expect_refused("No such file");
    make_folder();
}

/* After it was opened: each variant ends with one line, and with --on-error skip goes on, counts, and works
 * on less. A run that lost another number of samples than those before it is refused. */
static void expect_run_fault(const char *name, const char *broken, const char *words)
{
    for (int skip = 0; skip <= 2; skip++) { /* 2: between two runs */
        struct job job;
        void *state;
        struct run_time unused;
        struct load_result result;
        make_shards(101);
        cr_assert_eq(open_job(&job, skip ? "--cache any --on-error skip --batch 8" : "--cache any --batch 8"),
                     STATUS_OK);
        const struct variant *variant = start(&job, name, &state);
        if (!variant) {
            close_job(&job);
            return;
        }
        if (skip != 1)
            cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK, "%s", status_text());
        cr_assert_eq(job.workload->work(job.input, variant).items, 101);
        cr_assert_eq(variant->ready(state, 1), STATUS_OK);
        cr_assert_eq(truncate(in_folder(broken), 8192), 0);
        enum status status = variant->run(state, 1, &unused);
        if (skip == 2) {
            cr_assert_eq(status, STATUS_FAILED, "%s: %s", name, status_text());
            cr_assert_not_null(strstr(status_text(), "the data set changes"), "%s", status_text());
        } else if (skip) {
            cr_assert_eq(status, STATUS_OK, "%s: %s", name, status_text());
            cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
            cr_assert_gt(result.skipped, 0, "%s", name);
            cr_assert_eq(result.skipped + result.tally.count, 101, "%s", name);
            const struct work work = job.workload->work(job.input, variant);
            cr_assert_eq(work.items, (double)result.tally.count, "%s", name);
            cr_assert_eq(work.bytes, (double)result.tally.bytes, "%s", name);
        } else {
            cr_assert_eq(status, STATUS_FAILED, "%s: %s", name, status_text());
            cr_assert(strstr(status_text(), broken) && strstr(status_text(), words), "%s: %s", name,
                      status_text());
        }
        variant->teardown(state);
        close_job(&job);
    }
}

Test(load, a_shard_that_shrinks_while_it_is_read_is_an_error, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_run_fault(shard_variants[v], "x-000001.tar", "offset ");
}

Test(load, a_file_that_changes_or_goes_is_an_error, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (int skip = 0; skip <= 1; skip++) {
            struct job job;
            void *state;
            struct run_time unused;
            struct load_result result;
            char moved[2 * PATH_MAX];
            cr_assert_eq(open_job(&job, skip ? "--cache any --on-error skip" : "--cache any"), STATUS_OK);
            const struct variant *variant = start(&job, file_variants[v], &state);
            if (variant) {
                snprintf(moved, sizeof moved, "%s", in_folder("moved"));
                cr_assert_eq(rename(in_folder("000/000050.bin"), moved), 0);
                enum status status = variant_run(variant, state, 0, &unused);
                cr_assert_eq(status, skip ? STATUS_OK : STATUS_FAILED, "%s", file_variants[v]);
                cr_assert(skip || strstr(status_text(), "000050.bin"), "%s", status_text());
                cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
                cr_assert(!skip || result.skipped == 1);
                cr_assert_eq(rename(moved, in_folder("000/000050.bin")), 0);
                variant->teardown(state);
            }
            close_job(&job);
        }
}

Test(load, a_run_that_reads_nothing_is_an_error, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    void *state;
    struct run_time unused;
    char moved[2 * PATH_MAX];
    make_files(100);
    cr_assert_eq(open_job(&job, "--cache any --on-error skip"), STATUS_OK);
    const struct variant *variant = start(&job, "files", &state);
    snprintf(moved, sizeof moved, "%s", in_folder("moved"));
    cr_assert_eq(rename(in_folder("000"), moved), 0);
    cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_FAILED);
    cr_assert_not_null(strstr(status_text(), "none of its 100 samples"), "%s", status_text());
    variant->teardown(state);
    close_job(&job);
}

Test(load, a_file_that_grows_is_an_error, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++) {
        struct job job;
        void *state;
        struct run_time unused;
        const char *name = in_folder("000/000050.bin");
        cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK);
        const struct variant *variant = start(&job, file_variants[v], &state);
        struct stat before;
        cr_assert_eq(stat(name, &before), 0);
        cr_assert_eq(truncate(name, before.st_size + 5), 0);
        if (variant) {
            cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_FAILED, "%s", file_variants[v]);
            cr_assert_not_null(strstr(status_text(), "size has changed"), "%s", status_text());
            variant->teardown(state);
        }
        cr_assert_eq(truncate(in_folder("000/000050.bin"), before.st_size), 0);
        close_job(&job);
    }
}

Test(load, a_pipe_in_place_of_a_file_is_named, .init = make_folder, .fini = remove_folder)
{
    prepare("files");
    cr_assert_eq(unlink(in_folder("000/000020.npy")), 0);
    cr_assert_eq(mkfifo(in_folder("000/000020.npy"), 0600), 0);
    expect_refused("000020.npy: it is no regular file");
    remove_folder();
    make_folder();
    make_shards(101);
    struct job job;
    cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK, "%s", status_text());
    const struct load *load = job.input;
    cr_assert_eq(unlink(in_folder("x-000001.tar")), 0);
    cr_assert_eq(mkfifo(in_folder("x-000001.tar"), 0600), 0);
    cr_assert_lt(dataset_file_open(load->dataset, 1, 0), 0);
    cr_assert_not_null(strstr(status_text(), "no regular file"), "%s", status_text());
    close_job(&job);
}

/* Makes a shard or a file go: its name leads elsewhere. */
static void take_away(const char *name, bool pipe_instead)
{
    char moved[2 * PATH_MAX];
    snprintf(moved, sizeof moved, "%s", in_folder("moved"));
    cr_assert_eq(rename(in_folder(name), moved), 0);
    cr_assert(!pipe_instead || mkfifo(in_folder(name), 0600) == 0);
}

static void bring_back(const char *name)
{
    char moved[2 * PATH_MAX];
    snprintf(moved, sizeof moved, "%s", in_folder("moved"));
    cr_assert_eq(rename(moved, in_folder(name)), 0); /* over a pipe too */
}

/* A shard that goes before a run: without skip an error, with it the loss of its samples, in every run, and
 * the row is measured. */
static void expect_loss_of_a_shard(const char *name, const char *cache, bool pipe_instead)
{
    for (int skip = 0; skip <= 1; skip++) {
        struct job job;
        void *state;
        struct run_time unused;
        struct load_result result;
        char line[128], texts[64][64] = {{0}};
        make_shards(101);
        snprintf(line, sizeof line, "--cache %s --block 4 --depth 3%s", cache,
                 skip ? " --on-error skip" : "");
        cr_assert_eq(open_job(&job, line), STATUS_OK, "%s", status_text());
        const struct variant *variant = start(&job, name, &state);
        if (variant && skip) {
            take_away("x-000001.tar", pipe_instead);
            for (uint64_t number = 0; number < 3; number++) {
                cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s: %s", name,
                             status_text());
                cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
                cr_assert(result.skipped == 25 && result.tally.count == 76, "%s", name);
            }
            cr_assert_eq(job.workload->measure(job.input, variant, state, texts), STATUS_OK, "%s: %s", name,
                         status_text());
            bring_back("x-000001.tar");
            cr_assert_eq(variant_run(variant, state, 3, &unused), STATUS_FAILED, "%s", name);
            cr_assert_not_null(strstr(status_text(), "the data set changes"), "%s", status_text());
        } else if (variant) {
            cr_assert_eq(variant->ready(state, 0), STATUS_OK, "%s", status_text());
            take_away("x-000001.tar", pipe_instead);
            cr_assert_eq(variant->run(state, 0, &unused), STATUS_FAILED, "%s", name);
            cr_assert_not_null(strstr(status_text(), "x-000001.tar"), "%s: %s", name, status_text());
            bring_back("x-000001.tar");
            cr_assert_eq(variant_run(variant, state, 1, &unused), STATUS_OK, "%s: %s", name, status_text());
        }
        if (variant)
            variant->teardown(state);
        close_job(&job);
    }
}

Test(load, a_shard_that_goes_is_an_error_or_its_samples_are_lost, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (int pipe_instead = 0; pipe_instead <= 1; pipe_instead++)
            expect_loss_of_a_shard(shard_variants[v], "any", pipe_instead);
    expect_loss_of_a_shard("shards-uring", "warm", true);
}

/* What has shrunk for good is not copied to learn the bandwidth of copies, which would be a SIGBUS. */
Test(load, a_shrunk_shard_is_measured_without_its_end, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        void *state;
        struct run_time unused;
        char texts[64][64] = {{0}};
        make_shards(101);
        cr_assert_eq(open_job(&job, "--cache any --on-error skip"), STATUS_OK, "%s", status_text());
        const struct variant *variant = start(&job, shard_variants[v], &state);
        if (variant) {
            cr_assert_eq(truncate(in_folder("x-000001.tar"), 20000), 0);
            cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK, "%s", status_text());
            cr_assert_eq(job.workload->measure(job.input, variant, state, texts), STATUS_OK, "%s",
                         status_text());
            variant->teardown(state);
        }
        close_job(&job);
    }
}

/* A pipe that some process holds for writing would be read without end. */
Test(load, a_pipe_in_place_of_a_file_does_not_hang, .init = make_folder, .fini = remove_folder)
{
    static const char *const names[] = {"000/000050.bin", "000/000051.cls"}; /* the second is empty */
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (int skip = 0; skip <= 1; skip++)
            for (int held = 0; held <= 1; held++)
                for (size_t n = 0; n < COUNT_OF(names); n++) {
                    struct job job;
                    void *state;
                    struct run_time unused;
                    struct load_result result;
                    cr_assert_eq(open_job(&job, skip ? "--cache any --on-error skip --depth 2"
                                                     : "--cache any --depth 2"),
                                 STATUS_OK, "%s", status_text());
                    const struct variant *variant = start(&job, file_variants[v], &state);
                    if (variant) {
                        cr_assert_eq(variant->ready(state, 0), STATUS_OK, "%s", status_text());
                        take_away(names[n], true);
                        int writer = held ? open(in_folder(names[n]), O_RDWR) : -1;
                        enum status status = variant->run(state, 0, &unused);
                        cr_assert_eq(status, skip ? STATUS_OK : STATUS_FAILED, "%s: %s", file_variants[v],
                                     status_text());
                        cr_assert(skip || strstr(status_text(), names[n]), "%s", status_text());
                        cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
                        cr_assert(!skip || (result.skipped == 1 && result.tally.count == 100));
                        if (held)
                            close(writer);
                        bring_back(names[n]);
                        variant->teardown(state);
                    }
                    close_job(&job);
                }
}

/* The last member of a shard is empty and its header alone in the last block: that block is to be taken too.
 */
Test(load, an_empty_member_at_the_end_takes_its_block, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES], data[4096 - 512] = {1, 2, 3};
    for (int shard = 0; shard < 4; shard++) {
        char name[64];
        uint8_t header[TAR_BLOCK_BYTES];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        FILE *stream = fopen(in_folder(name), "w");
        cr_assert_not_null(stream);
        for (int member = 0; member < 2; member++) {
            snprintf(name, sizeof name, "%d.%s", shard, member ? "cls" : "bin");
            cr_assert_eq(tar_header(header, name, member ? 0 : sizeof data), STATUS_OK);
            fwrite(header, 1, sizeof header, stream);
            fwrite(data, 1, member ? 0 : sizeof data, stream);
        }
        fwrite(zeros, 1, sizeof zeros, stream);
        fclose(stream);
    }
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        void *state;
        struct run_time unused;
        cr_assert_eq(open_job(&job, "--cache any --block 4 --depth 3 --shuffle 0"), STATUS_OK, "%s",
                     status_text());
        const struct variant *variant = start(&job, shard_variants[v], &state);
        for (uint64_t number = 0; variant && number < 4; number++)
            cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s: %s", shard_variants[v],
                         status_text());
        if (variant)
            variant->teardown(state);
        close_job(&job);
    }
}

#ifdef HAVE_PNG
/* 20 pictures, of which number 7 is none. */
static void make_pictures(bool shard)
{
    static const uint8_t zeros[TAR_END_BYTES];
    FILE *stream = shard ? fopen(in_folder("p.tar"), "w") : NULL;
    for (int i = 0; i < 20; i++) {
        const struct png_shape shape = {5, 3, 3};
        uint8_t pixels[45], header[TAR_BLOCK_BYTES];
        char name[64];
        void *bytes;
        size_t size;
        memset(pixels, i * 3, sizeof pixels);
        cr_assert_eq(png_encode(pixels, &shape, &bytes, &size), STATUS_OK);
        if (i == 7)
            memset((uint8_t *)bytes + 20, 0xee, 20);
        snprintf(name, sizeof name, "%06d.png", i);
        if (!shard)
            stream = fopen(in_folder(name), "w");
        cr_assert_eq(tar_header(header, name, size), STATUS_OK);
        fwrite(header, 1, shard ? sizeof header : 0, stream);
        fwrite(bytes, 1, size, stream);
        fwrite(zeros, 1, shard ? tar_padding(size) : 0, stream);
        if (!shard)
            fclose(stream);
        free(bytes);
    }
    if (shard)
        cr_assert(fwrite(zeros, 1, sizeof zeros, stream) == sizeof zeros && fclose(stream) == 0);
}

/* On `ranks` ranks the broken one comes to another in every epoch: all of them lose it together. */
static void expect_a_picture_lost(const char *name, uint64_t ranks)
{
    uint64_t skipped[4] = {0};
    for (uint64_t rank = 0; rank < ranks; rank++) {
        struct job job;
        void *state;
        uint64_t wrong;
        cr_assert_eq(open_job(&job, "--cache any --augment --on-error skip --batch 3 --shuffle 5"), STATUS_OK,
                     "%s", status_text());
        cr_assert_eq(job.workload->move(job.input, job.parameters,
                                        &(const struct place){.rank = rank, .ranks = ranks}),
                     STATUS_OK);
        const struct variant *variant = start(&job, name, &state);
        for (uint64_t number = 0; variant && number < 4; number++) {
            struct run_time unused;
            struct load_result result;
            cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s: %s", name,
                         status_text());
            cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
            cr_assert_eq(result.skipped + result.tally.count, 20 / ranks, "%s", name);
            cr_assert_eq(job.workload->work(job.input, variant).items, (double)result.tally.count, "%s",
                         name);
            skipped[number] += result.skipped;
        }
        if (variant) {
            cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong), STATUS_OK, "%s",
                         status_text());
            cr_assert_eq(wrong, 0);
            variant->teardown(state);
        }
        close_job(&job);
        if (!variant)
            return;
    }
    for (int number = 0; number < 4; number++)
        cr_assert_eq(skipped[number], 1, "%s: run %d lost %d", name, number, (int)skipped[number]);
}

static void expect_no_picture(const char *name, const char *file)
{
    struct job job;
    void *state;
    struct run_time unused;
    cr_assert_eq(open_job(&job, "--cache any --decode"), STATUS_OK, "%s", status_text());
    const struct variant *variant = start(&job, name, &state);
    if (variant) {
        cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_FAILED, "%s", name);
        cr_assert(strstr(status_text(), file) && strstr(status_text(), "sample '000007'"), "%s",
                  status_text());
        variant->teardown(state);
    }
    close_job(&job);
}

Test(load, an_image_that_does_not_decode_is_an_error_or_lost, .init = make_folder, .fini = remove_folder)
{
    for (int shard = 0; shard <= 1; shard++) {
        make_pictures(shard);
        for (size_t v = 0; v < (shard ? COUNT_OF(shard_variants) : COUNT_OF(file_variants)); v++) {
            const char *name = shard ? shard_variants[v] : file_variants[v];
            expect_no_picture(name, shard ? "p.tar: offset " : "000007.png: offset ");
            expect_a_picture_lost(name, 1);
            expect_a_picture_lost(name, 2);
        }
        remove_folder();
        make_folder();
    }
}
#endif

/* A variant that delivers wrong bytes is caught by the run itself. */
Test(load, a_run_that_delivers_other_bytes_is_wrong, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    void *state;
    struct run_time unused;
    make_shards(101);
    cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK);
    const struct variant *variant = start(&job, "shards-mmap", &state);
    const struct load *load = job.input;
    overwrite("x-000000.tar", (long)load->dataset->members[load->dataset->samples[1].member].offset,
              "\xff\xee", 2);
    cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_WRONG);
    cr_assert_not_null(strstr(status_text(), "delivered"));
    variant->teardown(state);
    close_job(&job);
}

/* ---- What rows say ---- */

/* The text of a column after one run. */
static void measured(const char *variant_name, const char *line, const char *column, char text[64])
{
    struct job job;
    void *state;
    struct run_time unused;
    char texts[64][64] = {{0}};
    cr_assert_eq(open_job(&job, line), STATUS_OK, "%s", status_text());
    const struct variant *variant = start(&job, variant_name, &state);
    cr_assert_eq(variant_run(variant, state, 1, &unused), STATUS_OK, "%s", status_text());
    cr_assert_eq(job.workload->measure(job.input, variant, state, texts), STATUS_OK, "%s", status_text());
    memcpy(text, texts[column_of(job.workload, column)], 64);
    variant->teardown(state);
    close_job(&job);
}

Test(load, rows_say_what_a_batch_is_from_and_what_was_timed, .init = make_folder, .fini = remove_folder)
{
    char text[64];
    make_shards(101);
    measured("shards-mmap", "--cache any --batch 8", "shards_a_batch", text);
    cr_expect_geq(strtod(text, NULL), 1, "'%s'", text);
    measured("shards-mmap", "--cache any", "timed", text);
    cr_expect_str_eq(text, "order+open+map+copy");
    measured("shards-mmap", "--cache any", "resident_before", text);
    cr_expect_neq(*text, '\0');
}

/* A number of a row, between bounds. */
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

Test(load, rows_hold_sane_measures, .init = make_folder, .fini = remove_folder)
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
        if (variant_available(variant_find(file_variants[v]), &(const struct resources){.threads = 1}) ==
            STATUS_OK)
            expect_between(file_variants[v], "--cache warm", "copy_share", 1e-5, 1.5);
    remove_folder();
    make_folder();
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        if (variant_available(variant_find(shard_variants[v]), &(const struct resources){.threads = 1}) ==
            STATUS_OK) {
            expect_between(shard_variants[v], "--cache warm", "copy_share", 1e-4, 1.5);
            expect_between(shard_variants[v], "--cache warm", "copy_bytes_per_s", 1e6, 1e13);
            expect_between(shard_variants[v], "--cache warm", "resident_before", 0.99, 1);
        }
}

/* The test's folder anew where it is not in memory: beside the program, as /tmp may be. */
static void make_folder_beside(const char *where)
{
    remove_folder();
    snprintf(folder, sizeof folder, "%s/fdsl-load-XXXXXX", where);
    cr_assert_not_null(mkdtemp(folder));
}

Test(load, a_cold_run_reads_from_the_device, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct cache_pages pages;
    make_folder_beside("build");
    make_shards(101);
    cr_assert_eq(open_job(&job, "--cache cold"), STATUS_OK, "%s", status_text());
    enum status settled = load_settle_cache(job.input, &pages);
    close_job(&job);
    if (settled != STATUS_OK)
        cr_skip_test("this file system keeps files in the page cache");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        const struct variant_entry *entry = variant_find(shard_variants[v]);
        char text[64], line[] = "--cache cold";
        if (variant_available(entry, &(const struct resources){.threads = 1}) != STATUS_OK)
            continue;
        expect_between(shard_variants[v], line, "resident_before", 0, 0.01);
        measured(shard_variants[v], line, "device_bytes", text);
        if (*text) /* the kernel tells */
            cr_expect_geq(strtod(text, NULL), 101 * 4000, "%s read %s bytes", shard_variants[v], text);
    }
}

Test(load, files_in_memory_are_never_cold, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct cache_pages pages;
    if (access("/dev/shm", W_OK) != 0)
        cr_skip_test("no /dev/shm");
    make_folder_beside("/dev/shm");
    make_shards(101);
    cr_assert_eq(open_job(&job, "--cache cold"), STATUS_OK, "%s", status_text());
    cr_assert_eq(load_settle_cache(job.input, &pages), STATUS_FAILED);
    cr_assert_not_null(strstr(status_text(), "--cache cold: 100.0 % of the data set stays"), "%s",
                       status_text());
    close_job(&job);
}

/* ---- With an index ---- */

Test(load, prepared_data_are_read_and_compared_with_their_index, .init = make_folder, .fini = remove_folder)
{
    uint64_t tallies[2];
    for (int shards = 0; shards <= 1; shards++) {
        struct job job;
        struct tally tally;
        prepare(shards ? "shards" : "files");
        for (size_t v = 0; v < (shards ? COUNT_OF(shard_variants) : COUNT_OF(file_variants)); v++) {
            void *state;
            uint64_t wrong;
            cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK, "%s", status_text());
            const struct load *load = job.input;
            cr_assert(load->dataset->indexed);
            const struct variant *variant =
                start(&job, shards ? shard_variants[v] : file_variants[v], &state);
            if (variant) {
                cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong), STATUS_OK, "%s",
                             status_text());
                cr_assert_eq(wrong, 0);
                variant->teardown(state);
            }
            const struct order_plan plan = load_plan(load, 1);
            cr_assert_eq(load_expect(load, &plan, 0, &tally), STATUS_OK);
            close_job(&job);
        }
        tallies[shards] = tally.sum;
        remove_folder();
        make_folder();
    }
    cr_assert_eq(tallies[0], tallies[1], "the same samples in either layout");
}

Test(load, flipped_data_are_found_by_the_index, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct dataset dataset;
    prepare("shards");
    cr_assert_eq(dataset_open(folder, false, &dataset), STATUS_OK, "%s", status_text());
    const struct dataset_member *member = &dataset.members[dataset.samples[20].member];
    char shard[64];
    snprintf(shard, sizeof shard, "%s", dataset.files[member->file].name);
    overwrite(shard, (long)(member->offset + member->size / 2), "\xff", 1);
    cr_assert_eq(dataset_hash(&dataset), STATUS_FAILED);
    cr_assert(strstr(status_text(), shard) && strstr(status_text(), "offset "), "%s", status_text());
    dataset_close(&dataset);
    cr_assert_eq(open_job(&job, "--cache any --on-error skip"), STATUS_OK, "%s", status_text());
    cr_assert_eq(((struct load *)job.input)->dataset->skipped, 1);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        void *state;
        struct run_time unused;
        struct load_result result;
        const struct variant *variant = start(&job, shard_variants[v], &state);
        if (!variant)
            continue;
        cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK, "%s", status_text());
        cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
        cr_assert(result.skipped == 0 && result.tally.count == 39, "%s", shard_variants[v]);
        variant->teardown(state);
    }
    close_job(&job);
}

/* Another key in the header of the sample at `offset`, which is where its data begin. */
static void rename_member(const char *shard, uint64_t offset, const char *name)
{
    uint8_t before[TAR_BLOCK_BYTES], header[TAR_BLOCK_BYTES];
    char size[13] = "";
    int fd = open(in_folder(shard), O_RDWR);
    cr_assert(fd >= 0 && pread(fd, before, sizeof before, (off_t)(offset - sizeof before)) == sizeof before);
    memcpy(size, before + 124, 12);
    cr_assert_eq(tar_header(header, name, strtoull(size, NULL, 8)), STATUS_OK);
    cr_assert_eq(pwrite(fd, header, sizeof header, (off_t)(offset - sizeof header)), sizeof header);
    close(fd);
}

/* With --verify all variants fail alike, and with skip all leave the same samples out. */
static void expect_headers_compared(const char *words)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (int skip = 0; skip <= 1; skip++) {
            struct job job;
            void *state;
            struct run_time unused;
            struct load_result result;
            uint64_t wrong = 1;
            cr_assert_eq(open_job(&job, skip ? "--cache any --on-error skip" : "--cache any"), STATUS_OK,
                         "%s", status_text());
            cr_assert_eq(((const struct load *)job.input)->dataset->skipped, (uint64_t)skip);
            const struct variant *variant = start(&job, shard_variants[v], &state);
            if (variant) {
                cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong),
                             skip ? STATUS_OK : STATUS_FAILED, "%s", status_text());
                cr_assert(skip || strstr(status_text(), words), "%s: %s", shard_variants[v], status_text());
                cr_assert(!skip || wrong == 0);
            }
            if (variant && skip) {
                cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK, "%s", status_text());
                cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
                cr_assert(result.tally.count + result.skipped == 39, "%s", shard_variants[v]);
            }
            if (variant)
                variant->teardown(state);
            close_job(&job);
        }
}

Test(load, headers_that_name_others_than_the_index_are_found, .init = make_folder, .fini = remove_folder)
{
    struct dataset dataset;
    char words[256], shard[64];
    prepare("shards");
    cr_assert_eq(dataset_open(folder, false, &dataset), STATUS_OK, "%s", status_text());
    const struct dataset_member member = dataset.members[dataset.samples[20].member];
    snprintf(shard, sizeof shard, "%s", dataset.files[member.file].name);
    cr_assert_eq(dataset_hash(&dataset), STATUS_OK, "%s", status_text());
    dataset_close(&dataset);
    rename_member(shard, member.offset, "000099.npy");
    snprintf(words, sizeof words, "%s: offset %llu: the header names '000099.npy'", shard,
             (unsigned long long)member.offset - TAR_BLOCK_BYTES);
    expect_headers_compared(words);
    rename_member(shard, member.offset, "000020.png");
    expect_headers_compared("the header names '000020.png'");
    rename_member(shard, member.offset, "README"); /* of no sample */
    expect_headers_compared("the header names 'README'");
    rename_member(shard, member.offset, "000020.npy");
    overwrite(shard, (long)member.offset - TAR_BLOCK_BYTES, "9", 1);
    snprintf(words, sizeof words, "%s: offset %llu: the header's checksum is wrong", shard,
             (unsigned long long)member.offset - TAR_BLOCK_BYTES);
    expect_headers_compared(words);
}

Test(load, a_missing_shard_and_a_closed_folder_are_named, .init = make_folder, .fini = remove_folder)
{
    prepare("shards");
    cr_assert_eq(rename(in_folder("counter-000001.tar"), "/tmp/fdsl-load-moved.tar"), 0);
    expect_refused("counter-000001.tar: the shard is missing");
    expect_skipped(27, "13");
    struct dataset dataset;
    cr_assert_eq(dataset_open(folder, true, &dataset), STATUS_OK, "%s", status_text());
    cr_assert(dataset.faults == 1 && dataset.skipped == 13, "%d faults", (int)dataset.faults);
    dataset_close(&dataset);
    cr_assert_eq(unlink("/tmp/fdsl-load-moved.tar"), 0);
    cr_assert_eq(chmod(folder, 0), 0);
    if (geteuid() == 0)
        cr_assert_eq(seteuid(65534), 0);
    expect_refused("Permission denied");
    if (getuid() == 0)
        cr_assert_eq(seteuid(0), 0);
    cr_assert_eq(chmod(folder, 0700), 0);
}

/* Lines of samples that were swapped, and the index signed anew: it must be refused, as readers would go
 * back. */
Test(load, an_index_whose_offsets_fall_is_refused, .init = make_folder, .fini = remove_folder)
{
    struct index index;
    char command[3 * PATH_MAX], path[2 * PATH_MAX];
    const char *program = getenv("FDSL_BENCH");
    prepare("shards");
    snprintf(path, sizeof path, "%s", in_folder("counter.index"));
    cr_assert_eq(index_read(path, &index), STATUS_OK, "%s", status_text());
    struct index_sample third = index.samples[3];
    index.samples[3] = index.samples[4];
    index.samples[4] = third;
    cr_assert_eq(index_save(path, &index, 0, index.place_count), STATUS_OK, "%s", status_text());
    index_free(&index);
    expect_refused("counter.index: line 7: counter-000000.tar: offset ");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        snprintf(command, sizeof command,
                 "%s --variant %s --data '%s' --cache any --on-error skip --min-time 0 2>&1 | "
                 "grep -q 'leaves no room for a header'",
                 program ? program : "./fdsl-bench", shard_variants[v], folder);
        if (variant_available(variant_find(shard_variants[v]), &(const struct resources){.threads = 1}) ==
            STATUS_OK)
            cr_assert_eq(system(command), 0, "%s", command);
    }
}

#ifdef HAVE_JANSSON
/* A list of wids for the shards of make_shards(), each with a number of samples and a size. */
static void write_wids(const char *first, const char *more)
{
    FILE *stream = fopen(in_folder("x.wids.json"), "w");
    fprintf(stream,
            "{\"__kind__\": \"wids-shard-index-v1\", \"wids_version\": 1, \"shardlist\": [\n"
            "{\"url\": \"%s\", \"nsamples\": 25%s},\n"
            "{\"url\": \"x-000001.tar\", \"nsamples\": 25}, {\"url\": \"x-000002.tar\", \"nsamples\": 51}]}",
            first, more);
    cr_assert_eq(fclose(stream), 0);
}

Test(load, a_list_of_wids_tells_what_is_lost, .init = make_folder, .fini = remove_folder)
{
    char text[64];
    make_shards(101);
    write_wids("x-000000.tar", "");
    expect_skipped(101, "0");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_exactly_once(shard_variants[v], "--cache any --shuffle 10");

    uint32_t whole = whole_before(25, 20000);
    snprintf(text, sizeof text, "%u", 25 - whole);
    cr_assert_eq(truncate(in_folder("x-000001.tar"), 20000), 0);
    expect_refused("x-000001.tar: offset ");
    expect_skipped(76 + whole, text);
    cr_assert_eq(unlink(in_folder("x-000001.tar")), 0);
    expect_refused("x-000001.tar: cannot open");
    expect_skipped(76, "25");
}

Test(load, a_list_of_wids_is_held_to_what_it_tells, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    void *state;
    uint64_t wrong;
    make_shards(101);
    write_wids("x-000000.tar", ", \"filesize\": 1000");
    expect_refused("x-000000.tar: the shard has ");
    expect_skipped(101, "0"); /* all samples are there */
    write_wids("../x-000000.tar", "");
    expect_refused("x.wids.json: '../x-000000.tar' leads out of the folder");
    write_wids("https://example.org/x.tar", "");
    expect_refused("leads out of the folder");
    write_wids("x-000002.tar", "");
    expect_refused("x-000002.tar: the shard holds 51 samples and its wids index says 25");
    write_wids("x-000000.tar", ", \"md5sum\": \"00000000000000000000000000000000\"");
    cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK, "%s", status_text());
    const struct variant *variant = start(&job, "shards", &state);
    enum status status = job.workload->verify(job.input, variant, state, &wrong);
#ifdef HAVE_CRYPTO
    cr_assert_eq(status, STATUS_FAILED);
    cr_assert_not_null(strstr(status_text(), "x-000000.tar: the shard's md5 is "), "%s", status_text());
#else
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
#endif
    variant->teardown(state);
    close_job(&job);
}
#endif

Test(load, extensions_that_differ_in_case_are_named, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    FILE *stream = fopen(in_folder("000/000004.CLS"), "w");
    cr_assert(stream && putc('7', stream) == '7' && fclose(stream) == 0);
    expect_refused("000/000004.cls: offset 0: sample '000/000004' has 'cls' twice");
    expect_skipped(100, "1");
}

/* Names that lead nowhere, and pipes among shards: skip goes on, and says that it does not know how many were
 * lost. */
Test(load, what_cannot_be_read_is_left_out, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    cr_assert_eq(symlink("nowhere", in_folder("dead.bin")), 0);
    expect_refused("dead.bin: No such file");
    expect_skipped(101, "");
    remove_folder();
    make_folder();
    make_shards(101);
    cr_assert_eq(mkfifo(in_folder("pipe.tar"), 0600), 0);
    expect_skipped(101, "0");
    for (int shard = 0; shard < 3; shard++) {
        char name[64];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        cr_assert_eq(truncate(in_folder(name), 0), 0);
    }
    struct job job;
    cr_assert_eq(open_job(&job, "--cache any --on-error skip"), STATUS_FAILED);
    cr_assert_not_null(strstr(status_text(), "all of its samples are broken"), "%s", status_text());
    close_job(&job);
}

Test(load, an_extension_twice_in_a_sample_is_named, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES];
    FILE *stream = fopen(in_folder("twice.tar"), "w");
    put_member(stream, 1, 0);
    put_member(stream, 1, 0);
    for (uint32_t sample = 2; sample < 10; sample++)
        put_member(stream, sample, 0);
    fwrite(zeros, 1, sizeof zeros, stream);
    fclose(stream);
    expect_refused("twice.tar: offset 2048: sample '000001' has 'bin' twice");
    expect_skipped(8, "1"); /* the rest can be read */
}

/* ---- io_uring forbidden, as in a container ---- */

#if defined(HAVE_URING) && defined(__x86_64__) && !defined(FDSL_SANITIZED)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void forbid(unsigned call, unsigned failure)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | failure),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {COUNT_OF(filter), filter};
    cr_assert_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    cr_assert_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static void expect_no_uring(unsigned failure)
{
    const struct resources resources = {.threads = 1};
    forbid(425 /* io_uring_setup */, failure);
    cr_assert_eq(variant_available(variant_find("shards-uring"), &resources), STATUS_UNAVAILABLE);
    cr_assert_not_null(strstr(status_text(), "seccomp"), "%s", status_text());
    cr_assert_eq(variant_available(variant_find("files-uring"), &resources), STATUS_UNAVAILABLE);
}

/* The filter holds for programs that this process starts. */
Test(load, forbidden_io_uring_exits_4, .init = make_folder, .fini = remove_folder)
{
    static const char *const names[] = {"shards-uring", "files-uring"};
    const char *program = getenv("FDSL_BENCH");
    forbid(425 /* io_uring_setup */, 1 /* EPERM */);
    for (int shards = 1; shards >= 0; shards--) {
        char command[4 * PATH_MAX];
        shards ? make_shards(101) : make_files(101);
        snprintf(command, sizeof command, "timeout 30 %s --variant %s --data '%s' >'%s' 2>&1",
                 program ? program : "./fdsl-bench", names[!shards], folder, in_folder("out.txt"));
        int status = system(command);
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 4, "%s: %x", command, (unsigned)status);
        snprintf(command, sizeof command, "grep -q 'no io_uring here.*seccomp' '%s'", in_folder("out.txt"));
        cr_assert_eq(system(command), 0);
        remove_folder();
        make_folder();
    }
}

Test(load, forbidden_io_uring_makes_variants_unavailable)
{
    expect_no_uring(1 /* EPERM */);
}

Test(load, missing_io_uring_makes_variants_unavailable)
{
    expect_no_uring(38 /* ENOSYS */);
}

/* ---- Files of others, of whose pages the kernel does not tell ---- */

Test(load, pages_of_files_of_others_are_not_guessed, .init = make_folder, .fini = remove_folder)
{
    struct cache_pages mine = {0}, theirs = {0};
    struct job job;
    make_shards(101);
    forbid(451 /* cachestat */, 1 /* EPERM */);
    int fd = open(in_folder("x-000000.tar"), O_RDONLY);
    cr_assert_eq(cache_count(fd, 20000, &mine), STATUS_OK, "%s", status_text());
    cr_assert(mine.all == 5 && !mine.hidden);
    close(fd);
    if (geteuid() != 0)
        return;
    cr_assert(chmod(folder, 0755) == 0 && seteuid(65534) == 0);
    fd = open(in_folder("x-000000.tar"), O_RDONLY);
    cr_assert_eq(cache_count(fd, 20000, &theirs), STATUS_OK, "%s", status_text());
    cr_assert(theirs.all == 5 && theirs.hidden);
    close(fd);
    for (int cold = 0; cold <= 1; cold++) {
        struct cache_pages pages;
        cr_assert_eq(open_job(&job, cold ? "--cache cold" : "--cache warm"), STATUS_OK, "%s", status_text());
        cr_assert_eq(load_settle_cache(job.input, &pages), STATUS_FAILED);
        cr_assert_not_null(strstr(status_text(), "use --cache any"), "%s", status_text());
        cr_assert_not_null(strstr(status_text(), "owns the files"), "%s", status_text());
        close_job(&job);
    }
    cr_assert_eq(seteuid(0), 0);
}
#endif

/* ---- The comparison with other loaders ---- */

/* What compare_loading.py expects of the folder; true where it refuses it with the words. */
static bool comparison_refuses(const char *words)
{
    char command[2 * PATH_MAX];
    snprintf(command, sizeof command,
             "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts python3 -c 'import sys, compare_loading as c\n"
             "d = sys.argv[1]\nc.check_count(d, c.expected(\"shards\", d)[0])' %s 2>&1 | grep -qF '%s'",
             folder, words);
    return system(command) == 0;
}

Test(load, the_comparison_refuses_shards_that_tarfile_cuts_short, .init = make_folder, .fini = remove_folder)
{
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    make_shards(101);
    cr_assert_not(comparison_refuses(""));
    FILE *stream = fopen(in_folder("samples.csv"), "w");
    fputs("key\n", stream);
    for (int i = 0; i < 102; i++)
        fprintf(stream, "%06d\n", i);
    fclose(stream);
    cr_assert(comparison_refuses("holds 101 samples and its samples.csv tells of 102"));
    cr_assert_eq(unlink(in_folder("samples.csv")), 0);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), 0), 0);
    make_shards(101);
    struct stat whole;
    cr_assert_eq(stat(in_folder("x-000002.tar"), &whole), 0);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), whole.st_size - TAR_END_BYTES), 0);
    cr_assert(comparison_refuses("x-000002.tar: offset "));
    make_shards(101);
    /* The second header: behind that of sample 0, which has no bytes, comes its label. */
    overwrite("x-000000.tar", 512, "z", 1);
    cr_assert(comparison_refuses("x-000000.tar: offset 512: a broken header"));
}

/* Its rows can stand in one table with ours. */
Test(load, the_comparison_has_the_columns_of_our_rows, .init = make_folder, .fini = remove_folder)
{
    char command[3 * PATH_MAX];
    const char *program = getenv("FDSL_BENCH");
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    make_shards(101);
    snprintf(
        command, sizeof command,
        "%s --variant shards-mmap --data '%s' --cache any --min-time 0 --format csv 2>/dev/null | "
        "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts python3 -c 'import sys, csv, compare_loading as c\n"
        "rows = list(csv.reader(sys.stdin))\n"
        "assert rows[0] == c.COLUMNS, set(rows[0]) ^ set(c.COLUMNS)\n"
        "assert rows[1][0] == c.columns_of(None)[1], rows[1][0]'",
        program ? program : "./fdsl-bench", folder);
    cr_assert_eq(system(command), 0);
}

/* Rows without workers and with one have both one thread. */
Test(load, the_comparison_tells_workers_apart)
{
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    cr_assert_eq(
        system("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts python3 -c 'import compare_loading as c\n"
               "names = [c.name_of(n, w) for n in (\"torch-files\", \"dali\") for w in (0, 1)]\n"
               "assert names == [\"torch-files-inline\", \"torch-files\", \"dali\", \"dali\"]\n"
               "assert c.hash_samples([b\"a\", b\"bc\"]) == c.hash_samples([b\"bc\", b\"a\"])\n"
               "assert c.hash_samples([b\"a\", b\"bc\"]) != c.hash_samples([b\"ab\", b\"c\"])'"),
        0);
}

/* With --gpu it is held against what delivers the same bytes on the GPU, with as many threads as workers. */
Test(load, the_comparison_takes_ours_of_the_same_kind, .init = make_folder, .fini = remove_folder)
{
    char command[3 * PATH_MAX];
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    FILE *stream = fopen(in_folder("bench"), "w");
    fputs("#!/bin/sh\necho said\necho \"$*\"\n", stream);
    fclose(stream);
    cr_assert_eq(chmod(in_folder("bench"), 0755), 0);
    snprintf(
        command, sizeof command,
        "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts python3 -c 'import sys, argparse, compare_loading as "
        "c\n"
        "def said(gpu): return [row[\"said\"] for row in c.run_ours(argparse.Namespace(gpu=gpu, files=\"F\", "
        "shards=\"S\", workers=16, batch=4, time=1, bench=sys.argv[1]))]\n"
        "cpu, gpu = said(False), said(True)\n"
        "assert [line.split()[1] for line in cpu] == [\"files-omp\", \"shards-omp\", \"shards-omp\"], cpu\n"
        "assert [line.split()[1] for line in gpu] == [\"files-gpu\", \"shards-gpu\", \"shards-gpu\"], gpu\n"
        "assert all(\"--threads 16\" in line and \"--tensor raw\" in line for line in gpu), gpu\n"
        "assert \"--shuffle 1000\" in gpu[1] and \"--shuffle 0\" in gpu[2], gpu' '%s/bench'",
        folder);
    cr_assert_eq(system(command), 0);
}

/* ---- Tars that others wrote ---- */

/* A pax header that holds for all that follow is known to shares that begin behind it. */
Test(load, a_global_pax_header_holds_in_every_share, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES];
    static const char record[] = "12 size=700\n";
    uint8_t header[TAR_BLOCK_BYTES];
    FILE *stream = fopen(in_folder("g.tar"), "w");
    cr_assert_not_null(stream);
    cr_assert_eq(tar_header(header, "global", sizeof record - 1), STATUS_OK);
    header[156] = 'g';
    memcpy(header + 148, "        ", 8);
    unsigned sum = 0;
    for (size_t i = 0; i < sizeof header; i++)
        sum += header[i];
    snprintf((char *)header + 148, 8, "%06o", sum);
    fwrite(header, 1, sizeof header, stream);
    fwrite(record, 1, sizeof record - 1, stream);
    fwrite(zeros, 1, tar_padding(sizeof record - 1), stream);
    for (uint32_t i = 0; i < 101; i++) { /* headers that tell another size */
        char name[64];
        snprintf(name, sizeof name, "%06u.bin", i);
        cr_assert_eq(tar_header(header, name, 3), STATUS_OK);
        fwrite(header, 1, sizeof header, stream);
        for (uint32_t byte = 0; byte < 1024; byte++)
            putc(byte < 700 ? content(i, 0, byte) : 0, stream);
    }
    fwrite(zeros, 1, sizeof zeros, stream);
    fclose(stream);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (uint64_t rank = 0; rank < 2; rank++) {
            struct job job;
            void *state;
            uint64_t wrong;
            cr_assert_eq(open_job(&job, "--cache any --shuffle 0 --batch 7"), STATUS_OK, "%s", status_text());
            cr_assert_eq(((const struct load *)job.input)->dataset->sample_bytes_max, 700);
            cr_assert_eq(job.workload->move(job.input, job.parameters,
                                            &(const struct place){.rank = rank, .ranks = 2}),
                         STATUS_OK);
            const struct variant *variant = start(&job, shard_variants[v], &state);
            if (variant) {
                struct run_time unused;
                cr_assert_eq(variant_run(variant, state, 1, &unused), STATUS_OK, "%s, rank %d: %s",
                             shard_variants[v], (int)rank, status_text());
                cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong), STATUS_OK, "%s",
                             status_text());
                cr_assert_eq(wrong, 0);
                variant->teardown(state);
            }
            close_job(&job);
        }
}

/* All variants read the shards in the folder, whole. */
static void expect_read(uint32_t samples)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        void *state;
        uint64_t wrong;
        cr_assert_eq(open_job(&job, "--cache any --shuffle 7 --batch 5"), STATUS_OK, "%s", status_text());
        cr_assert_eq(((struct load *)job.input)->dataset->sample_count, samples);
        const struct variant *variant = start(&job, shard_variants[v], &state);
        if (variant) {
            cr_assert_eq(job.workload->verify(job.input, variant, state, &wrong), STATUS_OK, "%s",
                         status_text());
            cr_assert_eq(wrong, 0);
            variant->teardown(state);
        }
        close_job(&job);
    }
}

Test(load, pax_and_gnu_tars_of_python_are_read, .init = make_folder, .fini = remove_folder)
{
    static const char script[] =
        "import tarfile,io,sys\n"
        "for s,f in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):\n"
        "  t=tarfile.open('%s/y-%06d.tar'%(sys.argv[1],s),'w',format=f)\n"
        "  d=tarfile.TarInfo('folder'); d.type=tarfile.DIRTYPE; t.addfile(d)\n"
        "  for i in range(20):\n"
        "    for e in ('bin','cls'):\n"
        "      m=tarfile.TarInfo('folder/'+'k'*150*(i%2)+'%d-%d.%s'%(s,i,e)); b=b'%d'%i*(i*300+1)\n"
        "      m.size=len(b); m.mtime=0.5+i; t.addfile(m,io.BytesIO(b))\n"
        "  t.addfile(tarfile.TarInfo('README'))\n"
        "  t.close()\n";
    char command[sizeof script + PATH_MAX + 64];
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    snprintf(command, sizeof command, "python3 -c \"%s\" %s", script, folder);
    cr_assert_eq(system(command), 0);
    expect_read(40);
}

/* As webdataset's TarWriter calls tarfile: a stream ("w|"), members of a sample in the order of their
 * extensions, the key's before the others, its owner and mode, the time as a float. */
Test(load, tars_as_webdataset_writes_them_are_read, .init = make_folder, .fini = remove_folder)
{
    static const char script[] =
        "import tarfile,io,sys,time\n"
        "for s,f in enumerate((tarfile.USTAR_FORMAT, tarfile.DEFAULT_FORMAT)):\n"
        "  with open('%s/w-%06d.tar'%(sys.argv[1],s),'wb') as stream:\n"
        "    t=tarfile.open(fileobj=stream,mode='w|',format=f)\n"
        "    for i in range(30):\n"
        "      "
        "sample={'__key__':'train/%d-%06d'%(s,i),'jpg':b'%d'%i*(i*200+1),'cls':b'%d'%i,'meta.json':b'{}'}\n"
        "      for k in sorted(sample):\n"
        "        if k=='__key__': continue\n"
        "        m=tarfile.TarInfo(sample['__key__']+'.'+k); m.size=len(sample[k]); m.mtime=time.time()\n"
        "        m.mode=0o444; m.uname=m.gname='bigdata'; t.addfile(m,io.BytesIO(sample[k]))\n"
        "    t.close()\n";
    char command[sizeof script + PATH_MAX + 64];
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    snprintf(command, sizeof command, "python3 -c \"%s\" %s", script, folder);
    cr_assert_eq(system(command), 0);
    expect_read(60);
}

/* All formats of GNU tar, with names as long as each can hold; folders are members too. */
Test(load, every_format_of_gnu_tar_is_read, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        const char *name;
        int half; /* of a name */
    } formats[] = {{"v7", 40}, {"ustar", 90}, {"oldgnu", 200}, {"gnu", 200}, {"pax", 200}};
    char command[2 * PATH_MAX];
    if (system("tar --version 2>/dev/null | grep -q GNU") != 0)
        cr_skip_test("no GNU tar");
    for (size_t f = 0; f < COUNT_OF(formats); f++) {
        snprintf(command, sizeof command,
                 "cd '%s' && f=%s && long=$(printf '%%%ds' '' | tr ' ' k) && mkdir -p t/$f/$long && cd t && "
                 "for i in 1 2 3 4 5 6 7 8 9; do printf $i >$f/$i.cls; seq ${i}000 >$f/$i.bin; done && "
                 "seq 99 >$f/$long/$long.bin && tar --format=$f --sort=name -cf ../$f.tar ./$f && "
                 "cd .. && rm -r t",
                 folder, formats[f].name, formats[f].half);
        cr_assert_eq(system(command), 0, "%s", command);
    }
    expect_read(50);
}
