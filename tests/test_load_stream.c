/* Tests the variant `stream` of the workload `load`: the trainer's stream, pulled by a benchmark. */
#include "load_support.h"

#include <inttypes.h>
#include <strings.h>
#include <sys/resource.h>

#include "load/stream_run.h"
#include "train/feed.h"

TestSuite(load_stream, .init = make_folder, .fini = remove_folder, .timeout = 120);

#if defined HAVE_XXHASH && defined HAVE_PNG && defined _OPENMP

#define SAMPLES 60

/* Writes 60 digits as class folders (f) and as 1 and 3 shards (m1, m3), all in the same order. */
static void make_digits(void)
{
    cr_assert(command("cd $D && P=$(cd $OLDPWD && realpath $P) && { $P --prepare all --from digits --samples "
                      "60 --store imagefolder && mkdir f && cp -r all/*/ f && "
                      "$P --prepare m1 --from dataset --source f --shards 1 --name s && "
                      "$P --prepare m3 --from dataset --source f --shards 3 --name s; } >/dev/null 2>&1"));
}

static void open_in(struct job *job, const char *data, const char *line, struct partition partition)
{
    char text[4 * PATH_MAX];
    snprintf(text, sizeof text, "--data %s%s%s --cache any %s", strstr(data, "://") ? "" : folder,
             strstr(data, "://") ? "" : "/", data, line);
    partition.strong = true;
    const enum status status = open_workload(job, "load", text, partition);
    if (status == STATUS_UNAVAILABLE)
        cr_skip_test("%s", status_text());
    cr_assert_eq(status, STATUS_OK, "%s: %s", text, status_text());
}

static void start_with(struct job *job, int threads)
{
    const struct variant *variant = variant_find("stream")->variant;
    must(job->workload->accepts(job->input, variant));
    must(variant->setup(&(const struct resources){.threads = threads}, job->input, &job->state));
    job->variant = variant;
    job->name = "stream";
}

/* What a consumer was given: the samples of all batches. */
struct taken {
    struct consumer consumer;
    const struct stream_run *run;
    uint8_t *values;
    int32_t *labels;
    uint32_t *numbers, count, batches;
    size_t stride;
};

static enum status take_host(struct consumer *consumer, const void *values, size_t bytes)
{
    struct taken *taken = (struct taken *)consumer;
    const struct batch *batch = &taken->run->batch.samples;
    cr_assert(values == batch->values && bytes == batch->bytes);
    const uint32_t count = taken->count + batch->count;
    taken->stride = batch->stride;
    taken->values = realloc(taken->values, count * batch->stride);
    taken->labels = realloc(taken->labels, count * sizeof *taken->labels);
    taken->numbers = realloc(taken->numbers, count * sizeof *taken->numbers);
    memcpy(taken->values + taken->count * batch->stride, batch->values, batch->count * batch->stride);
    memcpy(taken->labels + taken->count, batch->labels, batch->count * sizeof *batch->labels);
    memcpy(taken->numbers + taken->count, taken->run->batch.numbers, batch->count * sizeof *taken->numbers);
    taken->count = count;
    taken->batches++;
    return STATUS_OK;
}

static const struct consumer_type taking = {.take_host = take_host};

static void free_taken(struct taken *taken)
{
    free(taken->values);
    free(taken->labels);
    free(taken->numbers);
    *taken = (struct taken){0};
}

/* Performs run `number`, and keeps what it delivers in `taken`. */
static void run_taking(const struct job *job, uint64_t number, struct taken *taken)
{
    free_taken(taken);
    taken->consumer.type = &taking;
    taken->run = job->state;
    job->workload->batches.set_consumer(job->input, &taken->consumer);
    run_well(job, number);
    job->workload->batches.set_consumer(job->input, NULL);
}

static void expect_same(const struct taken *found, const struct taken *wanted, const char *what)
{
    cr_assert(found->count == wanted->count && found->stride == wanted->stride, "%s: %u samples", what,
              found->count);
    cr_expect_arr_eq(found->numbers, wanted->numbers, found->count * sizeof *found->numbers, "%s", what);
    cr_expect_arr_eq(found->labels, wanted->labels, found->count * sizeof *found->labels, "%s", what);
    cr_expect_arr_eq(found->values, wanted->values, found->count * found->stride, "%s", what);
}

#define CROPS                                                                                          \
    "--out-res 20 --channels 1 --fit random-resized-crop --epochs 2 --batch 7 --lanes 4 --shuffle 20 " \
    "--prefetch 3 --seed 9"

Test(load_stream, threads_and_storage_do_not_change_a_bit)
{
    static const char *const names[] = {"f", "m1", "m3"}, *const lines[] = {CROPS, "--decode --batch 32"};
    static const char *const kept[] = {"", " --resident-bytes 9K", " --resident-bytes all"};
    make_digits();
    for (size_t l = 0; l < COUNT_OF(lines); l++) {
        struct taken wanted = {0}, found = {0};
        for (size_t n = 0; n < COUNT_OF(names); n++)
            for (int threads = 1; threads <= 3; threads++) {
                struct job job;
                char line[256];
                snprintf(line, sizeof line, "%s%s", lines[l], kept[threads - 1]);
                open_in(&job, names[n], line, (struct partition){.ranks = 1});
                start_with(&job, threads);
                run_well(&job, 1); /* reads the files that stay in memory */
                run_taking(&job, 2, wanted.count ? &found : &wanted);
                if (found.count)
                    expect_same(&found, &wanted, names[n]);
                close_job(&job);
            }
        cr_expect_eq(wanted.count, l == 0 ? 2 * SAMPLES : SAMPLES);
        free_taken(&wanted);
        free_taken(&found);
    }
}

/* A run depends on its number only, also after other runs, and its last batch stays for the verification. */
Test(load_stream, runs_in_any_order_deliver_their_epochs)
{
    static const uint64_t numbers[] = {0, 1, 5, 1, 1, 0};
    struct job job;
    struct taken first[6] = {{.count = 0}}, found = {0};
    make_digits();
    open_in(&job, "m3", CROPS, (struct partition){.ranks = 1});
    start_with(&job, 2);
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        struct taken *wanted = &first[numbers[i]];
        uint64_t wrong;
        run_taking(&job, numbers[i], wanted->count ? &found : wanted);
        if (found.count)
            expect_same(&found, wanted, "run");
        must(job.workload->verify(job.input, job.variant, job.state, numbers[i], &wrong));
        cr_expect_eq(wrong, 0);
        cr_expect_eq(result_of(&job).checksum.count, 2 * SAMPLES);
    }
    cr_expect(memcmp(first[0].numbers, first[1].numbers, SAMPLES * sizeof *first[0].numbers) != 0);
    for (size_t i = 0; i < COUNT_OF(first); i++)
        free_taken(&first[i]);
    free_taken(&found);
    close_job(&job);
}

/* ---- The trainer ---- */

/* Compares the batches of a run with those that a rank of the trainer gets. */
static void expect_batches_of_trainer(const struct data *data, uint32_t batch_size, uint32_t rank,
                                      uint32_t ranks)
{
    const struct model model = {.classes = 10};
    const struct train train = {
        .model = &model, .data = data, .seed = 9, .batch = batch_size, .rank = rank, .ranks = ranks};
    struct feed_stream feed;
    struct taken taken = {0};
    struct job job;
    char line[256];
    uint32_t at = 0;
    snprintf(line, sizeof line,
             "--out-res 20 --channels 1 --fit random-resized-crop --epochs 2 --lanes 4 --shuffle 20 --seed 9 "
             "--batch %u",
             batch_size);
    open_in(&job, "f", line, (struct partition){.rank = rank, .ranks = ranks});
    start_with(&job, 3);
    run_taking(&job, 1, &taken); /* epochs 2 and 3 */
    must(feed_stream_open(&train, 2, 1, DECODER_CPU, NULL, NULL, &feed));
    for (uint32_t epoch = 2; epoch < 4; epoch++)
        for (uint32_t step = 0; step < train_steps(&train); step++) {
            const struct draw_order order = train_order(&train, epoch);
            uint32_t numbers[SAMPLES];
            struct stream_batch batch;
            const uint32_t count = train_batch(&train, &order, step, numbers);
            must(feed_stream_next(&feed, epoch, step, numbers, count, &batch));
            cr_assert_leq(at + count, taken.count);
            cr_expect_arr_eq(taken.numbers + at, numbers, count * sizeof *numbers, "epoch %u, step %u", epoch,
                             step);
            cr_expect(count == 0 || (batch.samples.stride == taken.stride &&
                                     memcmp(batch.samples.values, taken.values + at * taken.stride,
                                            count * taken.stride) == 0 &&
                                     memcmp(batch.samples.labels, taken.labels + at, 4 * count) == 0),
                      "epoch %u, step %u: other values", epoch, step);
            must(stream_release(feed.stream, &batch, NULL));
            at += count;
        }
    cr_expect_eq(at, taken.count);
    feed_stream_close(&feed);
    free_taken(&taken);
    close_job(&job);
}

Test(load_stream, batches_are_those_of_the_trainer)
{
    char train[PATH_MAX + 16], test[PATH_MAX + 16];
    struct data data;
    make_digits();
    cr_assert(command("cp -r $D/f $D/test"));
    snprintf(train, sizeof train, "%s/f", folder);
    snprintf(test, sizeof test, "%s/test", folder);
    const struct data_request request = {.name = train,
                                         .test_name = test,
                                         .batch = 10,
                                         .feed = DATA_LOAD,
                                         .fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = 20, .channels = 1},
                                         .lanes = 4,
                                         .shuffle = 20,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    must(data_open(&request, &data));
    expect_batches_of_trainer(&data, 60, 0, 1);
    for (uint32_t ranks = 1; ranks <= 3; ranks++)
        for (uint32_t rank = 0; rank < ranks; rank++)
            expect_batches_of_trainer(&data, 7, rank, ranks);
    data_close(&data);
}

/* ---- Ranks ---- */

/* Together, the ranks deliver each sample once per epoch. Rank by rank, their parts of a step are the step of
 * a single rank. */
Test(load_stream, ranks_share_each_batch)
{
    static const uint32_t batches[] = {1, 4, 7, 12, 60, 500};
    make_digits();
    for (size_t b = 0; b < COUNT_OF(batches); b++) {
        char line[256];
        struct taken parts[4] = {{.count = 0}};
        snprintf(line, sizeof line, "--decode --epochs 2 --lanes 4 --shuffle 20 --batch %u", batches[b]);
        for (uint32_t ranks = 1; ranks <= 3; ranks++) {
            struct checksum sum = {0};
            uint32_t at[3] = {0}, together = 0;
            for (uint32_t rank = 0; rank < ranks; rank++) {
                struct job job;
                open_in(&job, "m3", line, (struct partition){.rank = rank, .ranks = ranks});
                start_with(&job, 2);
                run_taking(&job, 1, &parts[ranks == 1 ? 3 : rank]);
                const struct load_result result = result_of(&job);
                checksum_merge(&sum, &result.checksum);
                cr_expect_eq((uint64_t)job.workload->work(job.input, job.variant).items,
                             result.checksum.count);
                expect_none_wrong(&job);
                close_job(&job);
            }
            cr_expect_eq(sum.count, 2 * SAMPLES);
            for (uint32_t epoch = 0; ranks > 1 && epoch < 2; epoch++)
                for (uint32_t first = 0; first < SAMPLES; first += batches[b]) {
                    const uint32_t left = SAMPLES - first, size = left < batches[b] ? left : batches[b];
                    for (uint32_t rank = 0; rank < ranks; rank++) {
                        const uint32_t share = size / ranks + (rank < size % ranks);
                        cr_assert_leq(at[rank] + share, parts[rank].count);
                        if (share > 0) /* a rank without samples has no array */
                            cr_expect_arr_eq(parts[rank].numbers + at[rank], parts[3].numbers + together,
                                             share * sizeof(uint32_t), "batch %u, rank %u of %u", batches[b],
                                             rank, ranks);
                        at[rank] += share;
                        together += share;
                    }
                }
        }
        for (size_t i = 0; i < COUNT_OF(parts); i++)
            free_taken(&parts[i]);
    }
}

/* ---- Planted faults ---- */

enum plant {
    PLANT_NOTHING,
    PLANT_HASH,
    PLANT_VALUE,
    PLANT_LABEL,
    PLANT_TWICE,
    PLANT_MASK,
    PLANT_UNCHANGED, /* in a set with masks */
    PLANT_PIXEL,
    PLANTS
};
static enum plant plant;

/* A stream that changes the second batch of another one. */
struct wrong_stream {
    struct stream stream;
    struct stream *inner;
    uint64_t read[8];
    uint32_t numbers[8];
};

static enum status wrong_next(struct stream *stream, struct stream_batch *batch)
{
    struct wrong_stream *self = (struct wrong_stream *)stream;
    TRY(stream_next(self->inner, batch));
    if (batch->step != 1)
        return STATUS_OK;
    memcpy(self->read, batch->read, batch->samples.count * sizeof *self->read);
    memcpy(self->numbers, batch->numbers, batch->samples.count * sizeof *self->numbers);
    self->read[2] ^= plant == PLANT_HASH;
    if (plant == PLANT_TWICE) {
        self->read[2] = self->read[3];
        self->numbers[2] = self->numbers[3];
    }
    batch->read = self->read;
    batch->numbers = self->numbers;
    ((uint8_t *)batch->samples.values)[2 * batch->samples.stride + 5] ^= plant == PLANT_VALUE;
    ((int32_t *)batch->samples.labels)[2] ^= plant == PLANT_LABEL;
    if (plant == PLANT_PIXEL)
        ((uint8_t *)batch->masks)[2 * batch->samples.stride + 5] ^= 1; /* masks are as large as gray images */
    if (plant == PLANT_MASK) {
        memset((uint8_t *)batch->samples.values + 2 * batch->samples.stride, 0, batch->samples.stride);
        ((int32_t *)batch->samples.labels)[2] = STREAM_MASKED;
    }
    return STATUS_OK;
}

static enum status wrong_release(struct stream *stream, const struct stream_batch *batch, void *event)
{
    return stream_release(((struct wrong_stream *)stream)->inner, batch, event);
}

static enum status wrong_seek(struct stream *stream, struct stream_position to)
{
    return stream_seek(((struct wrong_stream *)stream)->inner, to);
}

static void wrong_stats(struct stream *stream, struct stream_stats *stats)
{
    stream_stats(((struct wrong_stream *)stream)->inner, stats);
}

static void wrong_cancel(struct stream *stream)
{
    stream_cancel(((struct wrong_stream *)stream)->inner);
}

static void wrong_close(struct stream *stream)
{
    stream_close(((struct wrong_stream *)stream)->inner);
    free(stream);
}

static enum status wrong_open(struct stream_run *run)
{
    static const struct stream_type type = {.next = wrong_next,
                                            .release = wrong_release,
                                            .seek = wrong_seek,
                                            .stats = wrong_stats,
                                            .cancel = wrong_cancel,
                                            .close = wrong_close};
    struct wrong_stream *self = calloc(1, sizeof *self);
    self->stream.type = &type;
    must(set_stream_open(&run->request, &self->inner));
    run->stream = &self->stream;
    return STATUS_OK;
}

/* Returns the status of a run through a stream with the planted fault. `*wrong` becomes the number of wrong
 * samples that the checks of all values find. */
static enum status run_planted(struct job *job, bool closely, uint64_t *wrong)
{
    static const struct stream_run_type opener = {.open = wrong_open};
    struct stream_run *run = calloc(1, sizeof *run);
    run->type = &opener;
    must(stream_run_open(run, job->input, 2));
    job->variant = variant_find("stream")->variant;
    job->state = run;
    struct run_time unused;
    must(job->workload->checks.closely(job->input, closely));
    enum status status = stream_run_ready(run, 3);
    status = status == STATUS_OK ? stream_run_run(run, 3, &unused) : status;
    if (status == STATUS_OK)
        must(job->workload->verify(job->input, job->variant, run, 3, wrong));
    must(job->workload->checks.closely(job->input, false));
    stream_run_close(run);
    free(run);
    job->variant = NULL;
    job->state = NULL;
    return status;
}

/* The checksum of each run finds samples that are missing, repeated or were read from other bytes. --verify
 * also finds wrong values and labels, and intact samples that were masked. */
Test(load_stream, planted_faults_are_found)
{
    make_digits();
    cr_assert(command("$P --prepare $D/masks --from synth --preset segrcdb --classes 9 --res 32 --samples 24 "
                      ">/dev/null 2>&1"));
    for (plant = PLANT_NOTHING; plant < PLANTS; plant++) {
        struct job job;
        uint64_t wrong = 0;
        const bool sums = plant == PLANT_HASH || plant == PLANT_TWICE;
        open_in(&job, plant < PLANT_UNCHANGED ? "m3" : "masks",
                plant == PLANT_MASK ? "--decode --batch 8 --on-error mask" : "--decode --batch 8",
                (struct partition){.ranks = 1});
        cr_expect_eq(run_planted(&job, false, &wrong), sums ? STATUS_WRONG : STATUS_OK, "fault %d: %s", plant,
                     status_text());
        wrong = 0;
        cr_expect_eq(run_planted(&job, true, &wrong), STATUS_OK, "fault %d: %s", plant, status_text());
        cr_expect(plant == PLANT_NOTHING || plant == PLANT_HASH || plant == PLANT_UNCHANGED ? wrong == 0
                                                                                            : wrong > 0,
                  "fault %d: %" PRIu64 " samples are wrong", plant, wrong);
        char text[256] = "n samples";
        job.workload->checks.verdict(job.input, NULL, text, sizeof text);
        cr_expect((wrong > 0) ==
                      (strstr(text, "n samples (the first: /tmp/") && strstr(text, "sample '0000")),
                  "fault %d: %s", plant, text);
        close_job(&job);
    }
}

/* Threads compare samples. If several cannot be read, the first one is reported, whichever thread had it. */
Test(load_stream, the_first_sample_that_cannot_be_compared_is_reported)
{
    struct job job;
    uint64_t wrong;
    struct rlimit files;
    make_digits();
    open_in(&job, "f", "--decode --batch 60", (struct partition){.ranks = 1});
    start_with(&job, 4);
    run_well(&job, 0);
    struct stream_run *run = job.state;
    const struct dataset *dataset = run->load->dataset;
    const struct dataset_sample *first = &dataset->samples[run->batch.numbers[0]];
    const char *name = dataset->files[dataset->members[first->member].file].name;
    cr_assert(getrlimit(RLIMIT_NOFILE, &files) == 0);
    for (int i = 0; i < 50; i++) {
        cr_assert(setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, files.rlim_max}) == 0);
        const enum status status = stream_run_verify(run, &wrong);
        cr_assert(setrlimit(RLIMIT_NOFILE, &files) == 0);
        cr_expect(status == STATUS_EXHAUSTED && strstr(status_text(), name), "%s: %s", name, status_text());
    }
    must(stream_run_verify(run, &wrong));
    cr_expect_eq(wrong, 0);
    close_job(&job);
}

/* ---- Batches that are not in host memory ---- */

/* A stream whose batches only stream_run_type.copy() can read, as if they were on a device. */
static struct {
    uint32_t share_numbers; /* 1: the planted difference is in a sample that the device decodes */
    int difference;         /* of a byte of each batch, from that of the other stream */
    const uint8_t *values;  /* of the latest batch */
    uint8_t *changed;       /* after changes of colour */
    uint32_t missed;
    uint32_t waits, events; /* calls of wait(), and releases with the consumer's event */
} device;

static enum status device_next(struct stream *stream, struct stream_batch *batch)
{
    TRY(stream_next(((struct wrong_stream *)stream)->inner, batch));
    uint8_t *values = (uint8_t *)batch->samples.values;
    for (uint32_t i = 0; i < batch->samples.count; i++)
        if (set_stream_on_device(batch->numbers[i], 0.5) == device.share_numbers && device.difference) {
            uint8_t *byte = &values[i * batch->samples.stride + 9];
            *byte = (uint8_t)(*byte + (*byte < 128 ? device.difference : -device.difference));
            break;
        }
    device.values = values;
    batch->samples.values = NULL;
    batch->labels = batch->samples.labels;
    batch->samples.labels = NULL;
    batch->ready = &device;
    return STATUS_OK;
}

static enum status device_release(struct stream *stream, const struct stream_batch *batch, void *event)
{
    device.events += event == &device.events;
    return stream_release(((struct wrong_stream *)stream)->inner, batch, NULL);
}

static enum status open_device(struct stream_run *run)
{
    static const struct stream_type type = {.next = device_next,
                                            .release = device_release,
                                            .seek = wrong_seek,
                                            .stats = wrong_stats,
                                            .cancel = wrong_cancel,
                                            .close = wrong_close};
    struct wrong_stream *self = calloc(1, sizeof *self);
    self->stream.type = &type;
    must(set_stream_open(&run->request, &self->inner));
    run->request.device_share = 0.5;
    run->stream = &self->stream;
    return STATUS_OK;
}

static enum status wait_for_device(struct stream_run *run)
{
    device.waits += run->batch.ready == &device;
    return STATUS_OK;
}

static enum status copy_from_device(struct stream_run *run, uint8_t *values, uint8_t *masks, uint8_t *decoded)
{
    (void)masks;
    memcpy(values, decoded ? device.changed : device.values, run->batch.samples.bytes);
    if (decoded)
        memcpy(decoded, device.values, run->batch.samples.bytes);
    return STATUS_OK;
}

/* Changes the samples of a batch as a device would, except for `device.missed` of them. */
static enum status change_on_device(struct stream_run *run)
{
    const struct set_stream_request *request = &run->request;
    struct image image = {.channels = request->channels,
                          .depth = request->depth,
                          .height = request->height,
                          .width = request->width,
                          .type = DTYPE_U8};
    FREED uint8_t *scratch = malloc(2 * run->sample_bytes);
    free(device.changed);
    device.changed = malloc(run->batch.samples.bytes);
    for (uint32_t i = 0; i < run->batch.samples.count; i++) {
        image.pixels = device.values + i * run->sample_bytes;
        image_output_store(&run->output, &image, (uint32_t)run->batch.epoch, run->batch.numbers[i], scratch,
                           device.changed + i * run->sample_bytes);
        if (i < device.missed)
            memcpy(device.changed + i * run->sample_bytes, image.pixels, run->sample_bytes);
    }
    return STATUS_OK;
}

static enum status take_device(struct consumer *consumer, void *ready, void **done)
{
    (void)consumer;
    *done = ready == &device ? &device.events : NULL;
    return STATUS_OK;
}

static uint64_t wrong_on_device(const char *line, uint32_t tolerance, struct consumer *consumer)
{
    static const struct stream_run_type type = {open_device, wait_for_device, copy_from_device,
                                                change_on_device};
    struct run_time unused;
    struct job job;
    uint64_t wrong;
    open_in(&job, "m3", line, (struct partition){.ranks = 1});
    struct stream_run *run = calloc(1, sizeof *run);
    run->type = &type;
    run->tolerance = tolerance;
    must(stream_run_open(run, job.input, 2));
    job.workload->batches.set_consumer(job.input, consumer);
    must(stream_run_ready(run, 1));
    must(stream_run_run(run, 1, &unused));
    must(stream_run_verify(run, &wrong));
    must(stream_run_ready(run, 2)); /* releases the last batch */
    job.workload->batches.set_consumer(job.input, NULL);
    stream_run_close(run);
    free(run);
    close_job(&job);
    return wrong;
}

Test(load_stream, batches_on_a_device_are_waited_for_and_compared)
{
    static const struct consumer_type type = {.take_device = take_device};
    struct consumer consumer = {.type = &type};
    static const char line[] = "--decode --batch 60";
    make_digits();
    cr_expect_eq(wrong_on_device(line, 0, NULL), 0);
    cr_expect(device.waits == 1 && device.events == 0);
    cr_expect_eq(wrong_on_device("--decode --batch 8 --epochs 2", 0, &consumer), 0);
    cr_expect(device.waits == 2 && device.events == 16, "%u releases", device.events);
    device.difference = 2;
    cr_expect_eq(wrong_on_device(line, 2, NULL), 1, "the host decodes this sample exactly");
    device.share_numbers = 1;
    cr_expect_eq(wrong_on_device(line, 2, NULL), 0);
    cr_expect_eq(wrong_on_device(line, 1, NULL), 1);
}

#define COLOURS                                                                                 \
    "--decode --batch 60 --out-res 24 --color-jitter 0.4,0.4,0.4,0.1 --grayscale 0.2 --blur 1 " \
    "--blur-kernel 5"

/* Pixels that a device has decoded may differ a little; their changes of colour must be exact. */
Test(load_stream, changes_on_a_device_are_compared_exactly)
{
    make_digits();
    cr_expect_eq(wrong_on_device(COLOURS, 0, NULL), 0);
    device.difference = 2;
    device.share_numbers = 1;
    cr_expect_eq(wrong_on_device(COLOURS, 2, NULL), 0);
    cr_expect_eq(wrong_on_device(COLOURS, 1, NULL), 1);
    device.difference = 0;
    device.missed = 3;
    cr_expect_eq(wrong_on_device(COLOURS, 0, NULL), 3);
    free(device.changed);
}

Test(load_stream, changes_of_colour_are_verified)
{
    make_digits();
    for (plant = PLANT_NOTHING; plant <= PLANT_VALUE; plant++) {
        struct job job;
        uint64_t wrong = 0;
        open_in(&job, "m3", "--decode --batch 8 --out-res 24 --color-jitter 0.4 --blur 0.5 --blur-kernel 5",
                (struct partition){.ranks = 1});
        cr_expect_eq(run_planted(&job, true, &wrong), STATUS_OK, "fault %d: %s", plant, status_text());
        cr_expect((wrong > 0) == (plant == PLANT_VALUE), "fault %d: %" PRIu64 " samples are wrong", plant,
                  wrong);
        close_job(&job);
    }
}

/* Writes 16 clips with 3 channels, 2 frames, 8 rows and 6 columns, and their labels. */
static void make_clips(void)
{
    static const char header[] = "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 2, 8, 6), }";
    cr_assert(command("mkdir $D/clips"));
    for (int n = 0; n < 16; n++) {
        char path[PATH_MAX + 32];
        snprintf(path, sizeof path, "%s/clips/%02d.npy", folder, n);
        FILE *file = fopen(path, "wb");
        cr_assert(file);
        fprintf(file, "%cNUMPY%c%c%c%c%-117s\n", 0x93, 1, 0, 118, 0, header);
        for (int i = 0; i < 3 * 2 * 8 * 6; i++)
            fputc((i * 37 + n * 11) % 256, file);
        cr_assert_eq(fclose(file), 0);
        snprintf(path, sizeof path, "%s/clips/%02d.cls", folder, n);
        file = fopen(path, "w");
        cr_assert(file && fputs("1", file) >= 0 && fclose(file) == 0);
    }
}

Test(load_stream, clips_are_delivered_in_each_order_of_axes)
{
    static const char *const lines[] = {
        "--axes tchw", "--axes thwc", "--axes thwc --color-jitter 0.4,0.4,0.4,0.1 --blur 0.5 --blur-kernel 3",
        "--axes tchw --out-res 5 --fit random-resized-crop"};
    make_clips();
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        struct job job;
        uint64_t wrong = 1;
        plant = PLANT_NOTHING;
        open_in(&job, "clips", lines[i], (struct partition){.ranks = 1});
        cr_expect_eq(run_planted(&job, true, &wrong), STATUS_OK, "%s: %s", lines[i], status_text());
        cr_expect_eq(wrong, 0, "%s: %" PRIu64 " samples are wrong", lines[i], wrong);
        close_job(&job);
    }
}

/* ---- Broken samples and changed files ---- */

Test(load_stream, broken_samples_end_the_run_or_are_masked)
{
    for (int shard = 0; shard < 2; shard++) {
        struct job job;
        make_pictures(shard);
        cr_assert(start_job(&job, "stream", "--cache any --decode --batch 4"));
        expect_failure(&job, 0, "000007");
        expect_failure(&job, 0, "000007"); /* another run begins again */
        close_job(&job);
        must(open_job(&job, "--cache any --decode --batch 4 --epochs 3 --on-error mask"));
        start_with(&job, 2);
        for (uint64_t number = 0; number < 3; number++)
            run_well(&job, number);
        struct row row = row_of(&job);
        cr_expect_str_eq(cell(&row, "skipped"), "1");
        cr_expect_eq(job.workload->work(job.input, job.variant).items, 3 * 19);
        row_free(&row);
        expect_none_wrong(&job);
        close_job(&job);
        renew_folder();
    }
}

/* The size of a file that is not read, here of labels, stays unknown without an index. */
Test(load_stream, masks_beside_labels_are_verified_without_an_index)
{
    static const char *const changes[] = {"true", "truncate -s 60 $D/k/*/*/000003.mask.png",
                                          "rm $D/k/*/*/000003.mask.png"};
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        struct job job;
        cr_assert(
            command("rm -rf $D/k && $P --prepare $D/k --from synth --preset segrcdb --classes 9 --res 32 "
                    "--samples 12 --store files && rm $D/k/synth.index $D/k/samples.csv && ls "
                    "$D/k/*/*/*.cls >/dev/null && %s",
                    changes[i]));
        open_in(&job, "k", "--decode --batch 4 --on-error mask", (struct partition){.ranks = 1});
        start_with(&job, 2);
        run_well(&job, 0);
        expect_none_wrong(&job);
        struct row row = row_of(&job);
        cr_expect_str_eq(cell(&row, "skipped"), i > 0 ? "1" : "0");
        row_free(&row);
        close_job(&job);
    }
}

#ifdef HAVE_JPEG
/* The end of a JPEG is missing. Many random crops do not need it, but whether a sample is broken does not
 * depend on its crop. */
Test(load_stream, a_jpeg_that_ends_early_is_masked_with_every_crop)
{
    struct job job;
    cr_assert(
        command("$P --prepare $D/j --from synth --classes 2 --samples 20 --res 96 --encode jpeg --store "
                "files >/dev/null 2>&1 && rm $D/j/*.index && f=$(find $D/j -name '*.jpg' | head -n 1) && "
                "truncate -s $(($(wc -c <$f) * 8 / 10)) $f"));
    open_in(&job, "j", "--out-res 24 --fit random-resized-crop --batch 5 --epochs 3 --on-error mask",
            (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_well(&job, 0);
    cr_expect_eq(result_of(&job).skipped, 3);
    for (uint64_t number = 0; number < 20; number++) {
        uint64_t wrong = 1;
        must(run_closely(&job, number, &wrong));
        cr_expect_eq(wrong, 0, "epoch %d: %d samples are wrong", (int)number, (int)wrong);
    }
    close_job(&job);
}
#endif

/* Samples that become broken, or intact, between runs would give times for different work. */
Test(load_stream, runs_mask_the_same_samples)
{
    struct job job;
    make_pictures(false);
    must(open_job(&job, "--cache any --decode --batch 4 --on-error mask"));
    start_with(&job, 2);
    run_well(&job, 0);
    struct stream_run *state = job.state;
    state->verifier.outcomes[3]++; /* sample 3 was read, so it is now recorded as lost */
    expect_failure(&job, 1, "not the same samples as earlier runs");
    close_job(&job);
}

Test(load_stream, changed_files_end_the_run)
{
    for (int shard = 0; shard < 2; shard++) {
        struct job job;
        make_digits();
        open_in(&job, shard ? "m3" : "f", "--decode --batch 4 --on-error mask",
                (struct partition){.ranks = 1});
        start_with(&job, 2);
        run_well(&job, 0);
        cr_assert(command("cd $D && for file in %s; do touch -d yesterday $file; done",
                          shard ? "m3/s-000001.tar" : "f/*/*"));
        expect_failure(&job, 1, "the file changed after the data set was opened");
        close_job(&job);
        renew_folder();
    }
}

/* ---- URLs ---- */

Test(load_stream, shards_at_a_url_give_the_same_batches)
{
    char line[2 * PATH_MAX], url[PATH_MAX], script[PATH_MAX];
    int port = 0;
    struct job job;
    struct taken wanted = {0}, found = {0};
    make_digits();
    open_in(&job, "m3", CROPS, (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_taking(&job, 1, &wanted);
    close_job(&job);
    cr_assert_not_null(realpath("tests/remote_server.py", script));
    cr_assert(command("mkfifo $D/gate"));
    const int gate = open(in_folder("gate"), O_RDWR | O_CLOEXEC); /* the server ends when it is closed */
    cr_assert(gate >= 0 && command("cd $D; (python3 %s . >port 2>/dev/null <gate &)", script));
    cr_assert(command("while [ ! -s $D/port ]; do sleep 0.05; done"));
    FILE *ports = fopen(in_folder("port"), "r");
    cr_assert(ports && fscanf(ports, "%d", &port) == 1 && fclose(ports) == 0);
    setenv("no_proxy", "127.0.0.1", 1);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/faulty/m3/s.index", port);
    for (int cached = 0; cached < 2; cached++) {
        snprintf(line, sizeof line, CROPS "%s%s", cached ? " --cache-dir " : "", cached ? folder : "");
        if (cached)
            strcat(line, "/cache");
        open_in(&job, url, line, (struct partition){.ranks = 1});
        start_with(&job, 3);
        for (int i = 0; i < 2; i++) { /* without a cache folder, each run reads the shards again */
            struct stream_stats stats;
            run_taking(&job, 1, &found);
            expect_same(&found, &wanted, line);
            stream_stats(((struct stream_run *)job.state)->stream, &stats);
            cr_expect_eq(stats.samples, (cached ? i + 1 : 1) * 2 * SAMPLES);
        }
        expect_none_wrong(&job);
        close_job(&job);
    }
    close(gate);
    free_taken(&wanted);
    free_taken(&found);
}

/* ---- Inputs ---- */

static void expect_no_stream(const char *line, const char *words)
{
    struct job job;
    must(open_job(&job, line));
    cr_expect_eq(accepted(&job, variant_find("stream")->variant), STATUS_USAGE, "%s", line);
    expect_words(words);
    close_job(&job);
}

Test(load_stream, inputs_that_are_no_images_are_refused)
{
    struct job job;
    make_shards(20);
    expect_no_stream("--cache any --decode", "delivers images and arrays, but the samples have none");
    renew_folder();
    make_pictures(true);
    expect_no_stream("--cache any", "is stored as .png; add --decode");
    expect_no_stream("--cache any --augment", "drop --augment");
    expect_no_stream("--cache any --decode --on-error skip",
                     "--on-error skip would change the batches of a stream; use --on-error mask");
    must(open_job(&job, "--cache any --decode --on-error mask"));
    cr_expect_eq(accepted(&job, variant_find("shards-mmap")->variant), STATUS_USAGE);
    expect_words("--on-error mask is for variants that stream");
    close_job(&job);
    renew_folder();
    make_pictures(false);
    cr_assert(command("cd $D && for f in *.png; do echo {} >${f%%png}json; echo 1 >${f%%png}cls; done"));
    expect_no_stream("--cache any --decode --member all", "has 3 members; choose them");
}

/* Arrays need no --decode. Their checksum and their number of bytes are those of the other variants. */
Test(load_stream, arrays_have_the_checksum_of_other_variants)
{
    static const char *const layouts[] = {"shards", "files"}, *const others[] = {"shards-omp", "files-omp"};
    for (size_t i = 0; i < COUNT_OF(layouts); i++) {
        char sums[2][64];
        prepare(layouts[i]);
        measured("stream", "--cache any --batch 8", "checksum", sums[0]);
        measured(others[i], "--cache any --batch 8", "checksum", sums[1]);
        cr_expect_str_eq(sums[0], sums[1]);
        struct job job;
        must(open_job(&job, "--cache any --batch 8 --epochs 2"));
        start_with(&job, 3);
        run_well(&job, 1);
        cr_expect_eq(result_of(&job).checksum.bytes, 2 * dataset_of(&job)->bytes);
        expect_none_wrong(&job);
        close_job(&job);
        renew_folder();
    }
}

Test(load_stream, columns_describe_the_run)
{
    static const char *const filled[] = {"copy_bytes_per_s", "copy_share",        "cpu_cores",
                                         "displacement",     "shards_per_batch",  "decode_s",
                                         "first_batch_s",    "peak_memory_bytes", "memory_efficiency",
                                         "jpeg_warnings",    "checksum",          "cpu_clock_hz"};
    static const char *const empty[] = {"augment_s", "open_p50_s", "steps", "decoded_by"};
    struct job job;
    make_digits();
    open_in(&job, "m3", "--decode --batch 8 --lanes 4 --shuffle 20 --prefetch 3",
            (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_well(&job, 1);
    struct row row = row_of(&job);
    for (size_t i = 0; i < COUNT_OF(filled); i++)
        cr_expect(*cell(&row, filled[i]), "%s is empty", filled[i]);
    for (size_t i = 0; i < COUNT_OF(empty); i++)
        cr_expect_str_empty(cell(&row, empty[i]), "%s", empty[i]);
    cr_expect_str_eq(cell(&row, "timed_stages"), "order+open+read+copy+decode");
    cr_expect_geq(atof(cell(&row, "peak_memory_bytes")), 4 * 8 * 28 * 28); /* 3 batches ahead, and one held */
    cr_expect_gt(atof(cell(&row, "first_batch_s")), 0);
    cr_expect_str_eq(cell(&row, "resident_samples"), "0");
    row_free(&row);
    close_job(&job);
    open_in(&job, "m3", "--decode --batch 8 --resident-bytes all", (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_well(&job, 1);
    row = row_of(&job);
    cr_expect_eq(atof(cell(&row, "resident_samples")), SAMPLES);
    row_free(&row);
    close_job(&job);
    /* Without shuffle, the samples have the order of the files. */
    open_in(&job, "m3", "--decode --batch 8 --shuffle 0", (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_well(&job, 1);
    row = row_of(&job);
    cr_expect_eq(atof(cell(&row, "displacement")), 0);
    row_free(&row);
    close_job(&job);
    /* The default is that of train. Rows say the size that was used. */
    open_in(&job, "m3", "--decode --batch 8", (struct partition){.ranks = 1});
    start_with(&job, 2);
    run_well(&job, 1);
    row = row_of(&job);
    cr_expect_str_eq(cell(&row, "shuffle"), "16384");
    cr_expect_gt(atof(cell(&row, "displacement")), 0.2);
    row_free(&row);
    close_job(&job);
}

#endif
