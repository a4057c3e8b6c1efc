/* The fuzz target of streams: bytes become a request for a small data set, and a series of calls. All batches
 * must have the samples that the plan lists, whatever the request and the order of the calls. */
#ifndef FDSL_TESTS_FUZZ_STREAM_H
#define FDSL_TESTS_FUZZ_STREAM_H

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/dataset.h"
#include "data/set_stream.h"
#include "targets.h" /* fuzz_take() */

#define STREAM_SAMPLES 23 /* of 4 x 4 values, which are all the number of the sample; labels are 0 to 2 */
#define STREAM_BROKEN  5  /* this sample has no values */
#define STREAM_BYTES   16
#define STREAM_HELD    8

static inline uint32_t fuzz_draw(struct fuzz_bytes *bytes, uint32_t below)
{
    return fuzz_take(bytes) % below;
}

/* Writes a member as a file, or as a member of a shard. */
static inline void fuzz_write(const char *folder, FILE *shard, const char *name, const char *bytes,
                              size_t size)
{
    char path[PATH_MAX], header[512] = {0};
    unsigned sum = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = shard ? shard : fopen(path, "wb");
    if (!file)
        abort();
    if (shard) {
        snprintf(header, 100, "%s", name);
        memcpy(header + 100, "0000644\0000000000\0000000000", 23);
        snprintf(header + 124, 24, "%011zo", size);
        memcpy(header + 136, "00000000000", 12);
        memcpy(header + 148, "        0", 9);
        memcpy(header + 257, "ustar\00000", 8);
        for (size_t i = 0; i < sizeof header; i++)
            sum += (uint8_t)header[i];
        snprintf(header + 148, 8, "%06o", sum);
        fwrite(header, 1, sizeof header, file);
    }
    fwrite(bytes, 1, size, file);
    for (size_t i = size; shard && i % 512; i++)
        fputc(0, file);
    if (!shard)
        fclose(file);
}

static inline void fuzz_write_set(const char *folder, FILE *shard)
{
    for (int i = 0; i < STREAM_SAMPLES; i++) {
        char name[32], array[128 + STREAM_BYTES];
        memset(array, ' ', 128);
        memcpy(array, "\x93NUMPY\x01\x00\x76\x00{'descr': '|u1', 'fortran_order': False, 'shape': (4, 4), }",
               69);
        array[127] = '\n';
        memset(array + 128, i, STREAM_BYTES);
        snprintf(name, sizeof name, "%02d.npy", i);
        fuzz_write(folder, shard, name, array, i == STREAM_BROKEN ? 128 : sizeof array);
        snprintf(name, sizeof name, "%02d.cls", i);
        fuzz_write(folder, shard, name, &"012"[i % 3], 1);
    }
}

static char fuzz_folders[2][32];

static inline void fuzz_remove_sets(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s %s", fuzz_folders[0], fuzz_folders[1]);
    if (system(command) != 0)
        fprintf(stderr, "%s failed\n", command);
}

/* Returns the set as single files (0) or as a shard (1). */
static inline const struct dataset *fuzz_set(uint32_t which)
{
    static struct dataset sets[2];
    static bool opened;
    for (int s = 0; !opened && s < 2; s++) {
        char *folder = strcpy(fuzz_folders[s], "/tmp/fdsl-fuzz-XXXXXX"), path[PATH_MAX], zeros[1024] = {0};
        struct members choice;
        if (!mkdtemp(folder))
            abort();
        snprintf(path, sizeof path, "%s/s.tar", folder);
        FILE *shard = s ? fopen(path, "wb") : NULL;
        fuzz_write_set(folder, shard);
        if (shard && (fwrite(zeros, 1, sizeof zeros, shard) != sizeof zeros || fclose(shard) != 0))
            abort();
        if (members_parse(NULL, NULL, NULL, &choice) != STATUS_OK ||
            dataset_open(folder, false, &choice, NULL, &sets[s]) != STATUS_OK ||
            sets[s].sample_count != STREAM_SAMPLES)
            abort();
    }
    if (!opened && atexit(fuzz_remove_sets) != 0)
        abort();
    opened = true;
    return &sets[which];
}

/* The plan: numbers are a hash of their place. */
struct fuzz_plan {
    uint32_t seed, range, capacity, more;
};

static inline uint32_t fuzz_plan_list(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct fuzz_plan *plan = context;
    const uint32_t count = plan->capacity - (uint32_t)(step % 2);
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = (uint32_t)((epoch * 31 + step * 7 + i + plan->seed) * 2654435761u >> 8) % plan->range;
    return plan->more ? plan->capacity + 1 : count;
}

/* What is true for the batches of a request. */
struct fuzz_stream {
    struct set_stream_request request;
    struct fuzz_plan plan;
    struct stream *stream;
    struct stream_batch held[STREAM_HELD];
    uint32_t held_count;
    bool kept[STREAM_SAMPLES]; /* with request.device_bytes: the consumer has the sample of this place */
};

/* Keeps every second sample of a batch, and fills in those that were left out. */
static inline void fuzz_keep(struct fuzz_stream *fuzz, const struct stream_batch *batch)
{
    const struct set_stream_request *request = set_stream_request_of(fuzz->stream);
    const uint64_t *places = set_stream_places(fuzz->stream, batch);
    for (uint32_t i = 0; places && i < batch->samples.count; i++) {
        const uint32_t n = batch->numbers[i] % request->count;
        if (places[i] != SET_STREAM_LOADED) {
            if (places[i] != n || !fuzz->kept[n])
                abort();
            memset((uint8_t *)batch->samples.values + i * batch->samples.stride,
                   (int)(request->samples ? request->samples[n] : n), batch->samples.stride);
        } else if (i % 2 && !fuzz->kept[n] && batch->labels[i] != STREAM_MASKED) {
            fuzz->kept[n] = true;
            set_stream_keep(fuzz->stream, batch, i, n, NULL);
        }
    }
}

static inline void fuzz_check(const struct fuzz_stream *fuzz, struct stream_position at,
                              const struct stream_batch *batch)
{
    const struct set_stream_request *request = &fuzz->request;
    const uint32_t sum = request->count ? request->count : STREAM_SAMPLES;
    uint32_t numbers[64], masked = 0;
    const uint32_t count = fuzz_plan_list(&fuzz->plan, at.epoch, at.step, numbers);
    if (batch->epoch != at.epoch || batch->step != at.step || batch->samples.count != count ||
        batch->last != (at.step + 1 == request->plan.steps) || count > fuzz->plan.capacity)
        abort();
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t n = numbers[i] % sum, sample = request->samples ? request->samples[n] : n;
        const bool broken = sample == STREAM_BROKEN || (request->labels && request->labels[n] == UINT32_MAX);
        const int32_t label = broken            ? STREAM_MASKED
                              : request->labels ? (int32_t)request->labels[n]
                                                : (int32_t)(sample % 3);
        const uint8_t *values = (const uint8_t *)batch->samples.values + i * batch->samples.stride;
        if (batch->numbers[i] != numbers[i] || batch->samples.labels[i] != label)
            abort();
        for (size_t v = 0; v < batch->samples.stride; v++)
            if (values[v] != (broken ? 0 : sample))
                abort();
        masked += broken;
    }
    if (batch->masked != masked || (masked && request->on_error == SET_STREAM_FAIL))
        abort();
}

static inline void fuzz_next(struct fuzz_stream *fuzz)
{
    const struct stream_position at = fuzz->stream->at;
    struct stream_batch *batch = &fuzz->held[fuzz->held_count];
    if (fuzz->held_count == STREAM_HELD || stream_next(fuzz->stream, batch) != STATUS_OK)
        return;
    fuzz_keep(fuzz, batch);
    fuzz_check(fuzz, at, batch);
    fuzz->held_count++;
}

static inline void fuzz_release(struct fuzz_stream *fuzz, uint32_t i)
{
    if (i >= fuzz->held_count)
        return;
    if (stream_release(fuzz->stream, &fuzz->held[i], NULL) != STATUS_OK)
        abort();
    fuzz->held[i] = fuzz->held[--fuzz->held_count];
}

/* Makes one call of the stream. */
static inline void fuzz_act(struct fuzz_stream *fuzz, struct fuzz_bytes *bytes)
{
    struct stream_stats stats;
    struct stream_position to;
    enum status status;
    switch (fuzz_draw(bytes, 8)) {
    case 0:
        to = (struct stream_position){fuzz_draw(bytes, 4), fuzz_draw(bytes, 8)};
        status = stream_seek(fuzz->stream, to);
        if ((status == STATUS_OK) != (to.step < fuzz->request.plan.steps))
            abort();
        for (uint32_t i = 0; i < fuzz->held_count; i++) /* held batches stay as they are */
            fuzz_check(fuzz, (struct stream_position){fuzz->held[i].epoch, fuzz->held[i].step},
                       &fuzz->held[i]);
        break;
    case 1:
        stream_cancel(fuzz->stream);
        break;
    case 2:
        stream_stats(fuzz->stream, &stats);
        if (stats.masked > stats.samples)
            abort();
        break;
    case 3:
    case 4:
        fuzz_release(fuzz, fuzz_draw(bytes, STREAM_HELD));
        break;
    default:
        fuzz_next(fuzz);
    }
}

static inline void fuzz_stream(const uint8_t *data, size_t size)
{
    static const uint32_t reversed[] = {22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                        10, 9,  8,  7,  6,  5,  4,  3,  2,  1,  0};
    static const uint32_t labels[] = {7, 6, 5, UINT32_MAX, 3, 2, 1, 0, 1, 2, 3, 4,
                                      5, 6, 7, 8,          9, 8, 7, 6, 5, 4, 3};
    struct fuzz_bytes bytes = {data, data + size};
    struct fuzz_stream fuzz = {0};
    struct set_stream_request *request = &fuzz.request;
    request->dataset = fuzz_set(fuzz_draw(&bytes, 2));
    request->samples = fuzz_draw(&bytes, 2) ? reversed : NULL;
    request->labels = fuzz_draw(&bytes, 2) ? labels : NULL;
    request->count = fuzz_draw(&bytes, STREAM_SAMPLES + 1);
    request->copies = fuzz_draw(&bytes, 3);
    request->channels = request->depth = 1;
    request->height = request->width = 4;
    if (fuzz_draw(&bytes, 16) == 15) /* a shape that samples do not have, or none */
        request->height = fuzz_draw(&bytes, 6);
    request->lanes = fuzz_draw(&bytes, 5);
    request->shuffle = fuzz_draw(&bytes, 40);
    request->threads = 1 + (int)fuzz_draw(&bytes, 4);
    request->ahead = 1 + fuzz_draw(&bytes, 4);
    request->held = fuzz_draw(&bytes, 4);
    request->on_error = fuzz_draw(&bytes, 2) ? SET_STREAM_MASK : SET_STREAM_FAIL;
    request->shard_bytes = fuzz_draw(&bytes, 2);
    request->plan.steps = 1 + fuzz_draw(&bytes, 5);
    request->plan.by_epoch = fuzz_draw(&bytes, 2);
    request->begin = (struct stream_position){fuzz_draw(&bytes, 3), fuzz_draw(&bytes, 6)};
    fuzz.plan.capacity = 1 + fuzz_draw(&bytes, 20);
    fuzz.plan.seed = fuzz_draw(&bytes, 256);
    fuzz.plan.range =
        (request->count ? request->count : STREAM_SAMPLES) * (request->copies ? request->copies : 1);
    switch (fuzz_draw(&bytes, 32)) { /* a few requests and plans are wrong */
    case 28:
        fuzz.plan.range++;
        break;
    case 29:
        fuzz.plan.more = 1;
        break;
    case 30:
        request->threads = 0;
        break;
    case 31:
        request->ahead = 0;
        break;
    default:
        break;
    }
    const uint32_t memory = fuzz_draw(&bytes, 12);
    request->resident_bytes = memory % 4 * 300;
    request->device_bytes = memory / 4;
    request->plan.capacity = fuzz.plan.capacity;
    request->plan.list = fuzz_plan_list;
    request->plan.context = &fuzz.plan;
    if (set_stream_open(request, &fuzz.stream) != STATUS_OK) {
        if (fuzz.stream)
            abort();
        return;
    }
    while (bytes.at < bytes.end)
        fuzz_act(&fuzz, &bytes);
    stream_close(fuzz.stream);
}

#endif
