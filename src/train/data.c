#include "train/data.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/env.h"
#include "core/npy_header.h"
#include "core/options.h"
#include "core/origin.h"
#include "core/png_image.h"
#include "core/status.h"
#include "core/timer.h"

#define CHUNK         256                   /* samples that are made at a time, at most */
#define CHUNK_BYTES   (UINT64_C(256) << 20) /* and what they may take, unless one alone takes more */
#define PROGRESS_S    0.25
#define GIB           0x1p30
#define SAMPLES_MAX   ((UINT64_C(1) << 31) - 1)
#define CLASSES_MAX   (1 << 24)
#define HELD_OUT      10 /* one in so many */
#define CIFAR_BATCHES 5
#define DIGITS        10 /* classes */
#define CLIPS         8

/* An origin that stays open to generate samples, and the words that it was opened with. */
struct data_origin {
    struct origin_reader reader;
    char classes[24], res[24];
    const char *words[7];
};

static void close_origin(struct data *data)
{
    if (data->origin)
        origin_close(&data->origin->reader);
    free(data->origin);
    data->origin = NULL;
}

void data_close(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(data->sets[part].values);
        free(data->sets[part].labels);
    }
    close_origin(data);
    *data = (struct data){0};
}

/* ---- On the way into the network ---- */

const void *data_sample(const struct data *data, enum data_part part, uint32_t sample)
{
    return (const uint8_t *)data->sets[part].values + (size_t)sample * data->sample_bytes;
}

/* Mean and variance of a channel over what is measured of the training set: of bytes exact sums, of halves in
 * double. */
static void moments(const struct data *data, uint32_t channel, double *mean, double *variance)
{
    size_t plane = data->sample_values / data->shape.channels;
    uint32_t samples = data_measured(data, DATA_TRAIN);
    double sum = 0, squares = 0, count = (double)plane * samples;
    for (uint32_t n = 0; n < samples; n++) {
        const void *sample = data_sample(data, DATA_TRAIN, n);
        for (size_t i = 0; i < plane; i++) {
            double value = data_value(data->type, sample, channel * plane + i);
            sum += value;
            squares += value * value;
        }
    }
    *mean = sum / count;
    *variance = squares / count - *mean * *mean;
}

void data_normalise(struct data *data, bool on)
{
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        double mean = 0, variance = data->type == DATA_U8 ? 255.0 * 255.0 : 1;
        if (on)
            moments(data, c, &mean, &variance);
        double deviation = variance > 0 ? sqrt(variance) : 1; /* all alike: only shifted */
        data->scale[c] = (float)(1 / deviation);
        data->offset[c] = (float)(-mean / deviation);
    }
}

FDSL_FMA_CLONES
void data_gather(const struct data *data, const void *stored, struct draw_move move, float *values)
{
    const struct shape *shape = &data->shape;
    size_t plane = (size_t)shape->height * shape->width;
    for (uint32_t c = 0; c < shape->channels; c++)
        for (uint32_t t = 0; t < shape->depth; t++) {
            size_t first = ((size_t)c * shape->depth + t) * plane;
            for (uint32_t y = 0; y < shape->height; y++)
                for (uint32_t x = 0; x < shape->width; x++) {
                    int32_t from = draw_moved(&move, shape->height, shape->width, y, x);
                    float value = from < 0 ? 0 : data_value(data->type, stored, first + (size_t)from);
                    *values++ = fmaf(value, data->scale[c], data->offset[c]);
                }
        }
}

/* ---- Samples as origins give them ---- */

/* A picture or a volume in memory. */
struct stored {
    struct shape shape;
    enum data_type type;
    const void *values; /* in C order, unless `pixels` */
    uint8_t *pixels;    /* decoded, pixel by pixel; owned */
};

static enum status decode_npy(const struct origin_member *member, struct stored *stored)
{
    struct npy_header header;
    TRY(npy_header_parse(member->bytes, member->size, &header));
    TRY(npy_header_check(&header, member->size));
    bool half = strcmp(header.type, "<f2") == 0;
    if (!half && strcmp(header.type, "|u1") != 0)
        return status_set(STATUS_FAILED, "values of type %s; |u1 and <f2 are read", header.type);
    if (header.fortran || header.axes < 2 || header.axes > 4 || header.values == 0 ||
        header.values > INT32_MAX)
        return status_set(STATUS_FAILED,
                          "no sample of (height, width), (channels, height, width) or (channels, "
                          "depth, height, width)");
    uint32_t axes[4] = {1, 1, 1, 1}; /* channels, depth, height, width */
    static const uint32_t places[5][4] = {[2] = {2, 3}, [3] = {0, 2, 3}, [4] = {0, 1, 2, 3}};
    for (uint32_t i = 0; i < header.axes; i++)
        axes[places[header.axes][i]] = (uint32_t)header.shape[i];
    stored->shape = (struct shape){axes[0], axes[1], axes[2], axes[3]};
    stored->type = half ? DATA_F16 : DATA_U8;
    stored->values = (const uint8_t *)member->bytes + header.data;
    return STATUS_OK;
}

static enum status decode_png(const struct origin_member *member, struct stored *stored)
{
    struct png_shape shape;
    TRY(png_shape(member->bytes, member->size, &shape));
    size_t bytes = (size_t)shape.width * shape.height * shape.channels;
    stored->pixels = malloc(bytes);
    if (!stored->pixels)
        return status_set(STATUS_FAILED, "out of memory for a picture");
    TRY(png_decode(member->bytes, member->size, stored->pixels, bytes, &shape));
    stored->shape = (struct shape){shape.channels, 1, shape.height, shape.width};
    stored->type = DATA_U8;
    return STATUS_OK;
}

static enum status decode(const struct origin_sample *sample, struct stored *stored)
{
    const struct origin_member *npy = origin_member(sample, "npy"), *png = origin_member(sample, "png");
    *stored = (struct stored){0};
    if (npy)
        return decode_npy(npy, stored);
    if (png)
        return decode_png(png, stored);
    return status_set(STATUS_FAILED, "no member npy or png; store pictures as one of them");
}

static enum status read_label(const struct origin_sample *sample, uint64_t classes, uint32_t *label)
{
    const struct origin_member *member = origin_member(sample, "cls");
    char text[24];
    uint64_t value;
    if (!member)
        return status_set(STATUS_FAILED, "no member cls, its class in digits");
    snprintf(text, sizeof text, "%.*s", (int)(member->size < 20 ? member->size : 20),
             (const char *)member->bytes);
    text[strcspn(text, "\r\n")] = '\0';
    TRY(parse_count("its label", text, 0, CLASSES_MAX - 1, &value));
    if (value >= classes)
        return status_set(STATUS_FAILED,
                          "its label %" PRIu64 " is out of range: there are %" PRIu64
                          " classes; give --classes N, at least %" PRIu64,
                          value, classes, value + 1);
    *label = (uint32_t)value;
    return STATUS_OK;
}

/* ---- Filling a set ---- */

/* The first sample decides what all are. */
static enum status fit(struct data *data, const struct stored *stored)
{
    if (data->sample_values == 0) {
        data->shape = stored->shape;
        data->type = stored->type;
        data->sample_values = shape_values(&stored->shape);
        data->sample_bytes = data->sample_values * (stored->type == DATA_F16 ? 2 : 1);
    }
    const struct shape *is = &stored->shape, *was = &data->shape;
    if (memcmp(is, was, sizeof *is) != 0 || stored->type != data->type)
        return status_set(
            STATUS_FAILED, "%s of %ux%ux%ux%u (channels, depth, height, width) among %s of %ux%ux%ux%u",
            stored->type == DATA_F16 ? "halves" : "bytes", is->channels, is->depth, is->height, is->width,
            data->type == DATA_F16 ? "halves" : "bytes", was->channels, was->depth, was->height, was->width);
    return is->channels <= DATA_CHANNELS_MAX ? STATUS_OK
                                             : status_set(STATUS_USAGE, "%u channels; at most %d are taken",
                                                          is->channels, DATA_CHANNELS_MAX);
}

/* A set that grows: how many samples and labels it has room for, how many it may come to, and whose size it
 * is. */
struct room {
    uint64_t now, most;
    const char *option;
};

/* Refuses what would not fit: a system may promise more memory than there is, and end the program when it is
 * used. */
static enum status check_memory(uint64_t samples, size_t sample_bytes, const char *option)
{
    double wanted = (double)samples * (double)sample_bytes, there = (double)env_memory_available_bytes();
    return there <= 0 || wanted <= there
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "%" PRIu64 " samples of %zu bytes are %.3g GiB, and %.3g GiB of memory are free; "
                            "take fewer with %s",
                            samples, sample_bytes, wanted / GIB, there / GIB, option);
}

/* Makes room for one sample more than the set has. Where it is known how many come, for all of them. */
static enum status make_room(const struct data *data, struct data_set *set, bool known, struct room *room)
{
    if (set->count < room->now)
        return STATUS_OK;
    uint64_t wanted = known ? room->most : 2 * room->now + CHUNK;
    wanted = wanted < room->most ? wanted : room->most;
    TRY(check_memory(wanted - room->now, data->sample_bytes + sizeof *set->labels, room->option));
    void *values = realloc(set->values, wanted * data->sample_bytes);
    if (values)
        set->values = values;
    uint32_t *labels = values ? realloc(set->labels, wanted * sizeof *labels) : NULL;
    if (!labels)
        return status_set(STATUS_FAILED, "out of memory for %" PRIu64 " samples; take fewer with %s", wanted,
                          room->option);
    set->labels = labels;
    room->now = wanted;
    return STATUS_OK;
}

/* Adds a sample; pixels become channel by channel. */
static enum status add_sample(struct data *data, struct data_set *set, bool known, struct room *room,
                              const struct origin_sample *sample, uint64_t classes)
{
    struct stored stored;
    uint32_t label = 0;
    enum status status = decode(sample, &stored);
    if (status == STATUS_OK)
        status = fit(data, &stored);
    if (status == STATUS_OK)
        status = read_label(sample, classes, &label);
    if (status == STATUS_OK)
        status = make_room(data, set, known, room);
    if (status == STATUS_OK) {
        uint8_t *to = (uint8_t *)set->values + (size_t)set->count * data->sample_bytes;
        size_t channels = data->shape.channels, plane = data->sample_values / channels;
        if (stored.pixels)
            for (size_t i = 0; i < data->sample_values; i++)
                to[i % channels * plane + i / channels] = stored.pixels[i];
        else
            memcpy(to, stored.values, data->sample_bytes);
        set->labels[set->count++] = label;
    }
    free(stored.pixels);
    return status;
}

/* Which samples of an origin a set takes. */
struct range {
    uint64_t first, count;
    int held; /* 1: only those held out, 0: only the others, -1: all */
};

static bool is_held_out(uint64_t number)
{
    return philox(philox_key(0), (uint32_t)number, (uint32_t)(number >> 32), 0, DRAW_HOLD).word[0] %
               HELD_OUT ==
           0;
}

/* How many samples are made at a time: none of them may be large beside the set. */
static uint64_t chunk_of(const struct origin_reader *reader)
{
    uint64_t fit = CHUNK_BYTES / (reader->facts.sample_bytes + 1);
    return fit < 1 ? 1 : fit < CHUNK ? fit : CHUNK;
}

/* Where somebody is looking on. */
static void show_progress(uint64_t done, uint64_t most, double *shown_s)
{
    if (!status_shows_progress() || timer_now_s() - *shown_s < PROGRESS_S)
        return;
    *shown_s = timer_now_s();
    fprintf(stderr, "\r\033[Ksamples: %" PRIu64 " of %" PRIu64, done, most);
    fflush(stderr);
}

static void end_progress(void)
{
    if (status_shows_progress())
        fputs("\r\033[K", stderr);
}

static enum status fill_set(struct origin_reader *reader, struct range range, uint64_t limit,
                            uint64_t classes, struct data *data, enum data_part part)
{
    static const char *const options[DATA_PARTS] = {"--train-size", "--test-size"};
    struct data_set *set = &data->sets[part];
    struct origin_sample samples[CHUNK] = {0};
    struct room room = {0, limit < range.count ? limit : range.count, options[part]};
    uint64_t chunk = chunk_of(reader);
    double shown_s = timer_now_s();
    enum status status = STATUS_OK;
    for (uint64_t at = 0; status == STATUS_OK && at < range.count && set->count < limit; at += chunk) {
        uint64_t count = range.count - at < chunk ? range.count - at : chunk;
        status = reader->origin->make(reader->state, range.first + at, count, samples);
        for (uint64_t i = 0; i < count; i++) {
            bool wanted = range.held < 0 || is_held_out(range.first + at + i) == range.held;
            if (status == STATUS_OK && wanted && set->count < limit) {
                status = add_sample(data, set, range.held < 0, &room, &samples[i], classes);
                if (status != STATUS_OK)
                    status_prefix(status, "sample %" PRIu64, range.first + at + i);
            }
            origin_sample_free(&samples[i]);
        }
        show_progress(set->count, room.most, &shown_s);
    }
    end_progress();
    return status;
}

/* A set from one origin. */
static enum status read_set(const struct data_request *request, const char *origin, const char *const words[],
                            struct range range, uint64_t limit, struct data *data, enum data_part part)
{
    struct origin_reader reader;
    uint64_t classes = data->classes ? data->classes : CLASSES_MAX;
    enum status status = origin_open(origin, words, &request->resources, &reader);
    if (status == STATUS_OK && range.count == 0)
        range.count = reader.facts.samples;
    if (status == STATUS_OK && limit > SAMPLES_MAX)
        limit = SAMPLES_MAX;
    if (status == STATUS_OK)
        status = fill_set(&reader, range, limit, classes, data, part);
    origin_close(&reader);
    if (status == STATUS_OK || strncmp(status_text(), "--data ", 7) == 0) /* of the dataset itself */
        return status;
    return status_prefix(status, "--data %s", request->name);
}

/* ---- Where sets are ---- */

static bool file_there(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && access(path, F_OK) == 0;
}

/* Generated samples: those for tests have numbers that none to learn from can have, so that they are the same
 * however many those are. */
static enum status generate(const struct data_request *request, const char *origin, const char *const words[],
                            struct data *data)
{
    uint64_t train = request->train_size ? request->train_size : DATA_TRAIN_SIZE;
    uint64_t test = request->test_size ? request->test_size : DATA_TEST_SIZE;
    TRY(read_set(request, origin, words, (struct range){0, train, -1}, train, data, DATA_TRAIN));
    return read_set(request, origin, words, (struct range){SAMPLES_MAX + 1, test, -1}, test, data, DATA_TEST);
}

/* ---- Generated while training ---- */

/* The labels of all training samples, of which not all may be held. */
static enum status label_all(const struct origin_reader *reader, uint64_t count, struct data_set *set)
{
    if (count > set->count)
        TRY(check_memory(count - set->count, sizeof *set->labels, "--train-size"));
    uint32_t *labels = realloc(set->labels, count * sizeof *labels);
    if (!labels)
        return status_set(STATUS_FAILED, "out of memory for %" PRIu64 " labels; take fewer with --train-size",
                          count);
    set->labels = labels;
    for (uint64_t n = set->count; n < count; n++)
        labels[n] = (uint32_t)reader->origin->label(reader->state, n);
    set->count = (uint32_t)count;
    return STATUS_OK;
}

/* What numbers grow by from epoch to epoch: past those for tests, and by whole rounds of the classes, so that
 * a sample keeps its label. */
static uint64_t fresh_step(uint32_t classes)
{
    return ((UINT64_C(1) << 32) + classes - 1) / classes * classes;
}

/* Both sets of synth, from an origin that is open. */
static enum status fill_synth(const struct data_request *request, struct origin_reader *reader,
                              struct data *data)
{
    uint64_t train = request->train_size ? request->train_size : DATA_TRAIN_SIZE;
    uint64_t test = request->test_size ? request->test_size : DATA_TEST_SIZE;
    uint64_t measured = train < DATA_MEASURED ? train : DATA_MEASURED, held = train;
    if (data->feed == DATA_LIVE)
        held = measured;
    if (data->feed == DATA_CONSTANT) {
        held = request->batch > measured ? request->batch : measured;
        held = held < train ? held : train;
    }
    TRY(fill_set(reader, (struct range){0, held, -1}, held, data->classes, data, DATA_TRAIN));
    TRY(label_all(reader, train, &data->sets[DATA_TRAIN]));
    data->held = (uint32_t)held;
    data->measured = (uint32_t)measured;
    return fill_set(reader, (struct range){SAMPLES_MAX + 1, test, -1}, test, data->classes, data, DATA_TEST);
}

static enum status open_synth(const struct data_request *request, struct data *data)
{
    struct data_origin *origin = data->origin = calloc(1, sizeof *origin);
    if (!origin)
        return status_set(STATUS_FAILED, "out of memory");
    snprintf(origin->classes, sizeof origin->classes, "%" PRIu32, data->classes);
    snprintf(origin->res, sizeof origin->res, "%" PRIu64, request->res);
    const char *const words[] = {"--encode", "npy", "--classes", origin->classes, "--res", origin->res, NULL};
    memcpy(origin->words, words, sizeof words);
    data->feed = request->feed < 0 ? DATA_LIVE : (enum data_feed)request->feed;
    data->fresh = request->fresh ? fresh_step(data->classes) : 0;
    enum status status = origin_open("synth", origin->words, &request->resources, &origin->reader);
    if (status == STATUS_OK)
        status = fill_synth(request, &origin->reader, data);
    if (data->feed != DATA_LIVE)
        close_origin(data);
    return status == STATUS_OK ? status : status_prefix(status, "--data %s", request->name);
}

enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator)
{
    const struct origin_reader *reader = &data->origin->reader;
    return reader->origin->generate(reader->state, request, generator);
}

/* ---- Of folders ---- */

static uint64_t limit_of(const struct data_request *request, int part)
{
    uint64_t limit = part == DATA_TRAIN ? request->train_size : request->test_size;
    return limit ? limit : UINT64_MAX;
}

static enum status open_idx(const struct data_request *request, struct data *data)
{
    static const char *const names[DATA_PARTS][2] = {
        {"train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"},
        {"t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"}};
    for (int part = 0; part < DATA_PARTS; part++) {
        char path[PATH_MAX];
        if (!file_there(request->name, names[part][0], path) &&
            !file_there(request->name, names[part][1], path))
            return status_set(STATUS_USAGE, "--data %s: there is no %s, plain or gzipped", request->name,
                              names[part][0]);
        const char *const words[] = {"--encode", "npy", "--source", path, NULL};
        TRY(read_set(request, "idx", words, (struct range){0, 0, -1}, limit_of(request, part), data,
                     (enum data_part)part));
    }
    return STATUS_OK;
}

/* The batches of CIFAR-10 that a folder has, with commas between them. */
static void cifar_batches(const char *folder, char paths[CIFAR_BATCHES * PATH_MAX])
{
    char path[PATH_MAX], name[32];
    size_t used = 0;
    *paths = '\0';
    for (int i = 1; i <= CIFAR_BATCHES; i++) {
        snprintf(name, sizeof name, "data_batch_%d.bin", i);
        if (file_there(folder, name, path))
            used += (size_t)snprintf(paths + used, CIFAR_BATCHES * PATH_MAX - used, "%s%s", used ? "," : "",
                                     path);
    }
}

static bool any_cifar(const char *folder)
{
    char paths[CIFAR_BATCHES * PATH_MAX], path[PATH_MAX];
    cifar_batches(folder, paths);
    return *paths || file_there(folder, "test_batch.bin", path);
}

/* data_batch_1.bin and so on are one set. */
static enum status open_cifar(const struct data_request *request, struct data *data)
{
    char train[CIFAR_BATCHES * PATH_MAX], path[PATH_MAX];
    cifar_batches(request->name, train);
    if (!*train)
        return status_set(STATUS_USAGE, "--data %s: there is none of data_batch_1.bin to data_batch_%d.bin",
                          request->name, CIFAR_BATCHES);
    if (!file_there(request->name, "test_batch.bin", path))
        return status_set(STATUS_USAGE, "--data %s: there is no test_batch.bin", request->name);
    const char *const learn[] = {"--encode", "npy", "--source", train, NULL};
    const char *const test[] = {"--encode", "npy", "--source", path, NULL};
    TRY(read_set(request, "cifar", learn, (struct range){0, 0, -1}, limit_of(request, DATA_TRAIN), data,
                 DATA_TRAIN));
    return read_set(request, "cifar", test, (struct range){0, 0, -1}, limit_of(request, DATA_TEST), data,
                    DATA_TEST);
}

static enum status open_datasets(const struct data_request *request, struct data *data)
{
    char train[PATH_MAX], test[PATH_MAX];
    bool learn = file_there(request->name, "train", train), tests = file_there(request->name, "test", test);
    bool two = learn && tests;
    if (learn != tests)
        return status_set(STATUS_USAGE, "--data %s: there is a dataset %s in it and no %s; --prepare one",
                          request->name, learn ? "train" : "test", learn ? "test" : "train");
    for (int part = 0; part < DATA_PARTS; part++) {
        const char *path = !two ? request->name : part == DATA_TRAIN ? train : test;
        const char *const words[] = {"--source", path, NULL};
        TRY(read_set(request, "dataset", words, (struct range){0, 0, two ? -1 : part == DATA_TEST},
                     limit_of(request, part), data, (enum data_part)part));
    }
    return STATUS_OK;
}

static enum status unknown(const char *name)
{
    static const char *const names[] = {"digits", "clips", "synth"};
    const char *nearest = nearest_word(name, names, COUNT_OF(names));
    bool mnist = strcmp(name, "mnist") == 0;
    return status_set(STATUS_USAGE, "--data %s: no such folder; digits, clips and synth need none%s%s%s%s",
                      name, nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "",
                      mnist ? "; scripts/fetch_mnist.sh mnist makes it" : "");
}

/* Labels of what is generated are what they are. */
static enum status check_classes(const struct data *data, const char *name, uint32_t classes)
{
    return data->classes >= classes
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--classes %" PRIu32 ": %s has %" PRIu32 "; give at least so many, or none",
                            data->classes, name, classes);
}

/* Chooses by name, or by what the folder holds. */
static enum status open_sets(const struct data_request *request, struct data *data)
{
    char path[PATH_MAX];
    static const char *const words[] = {"--encode", "npy", NULL};
    bool idx = file_there(request->name, "train-images-idx3-ubyte", path) ||
               file_there(request->name, "train-images-idx3-ubyte.gz", path);
    bool cifar = any_cifar(request->name);
    bool digit = strcmp(request->name, "digits") == 0, synth = strcmp(request->name, "synth") == 0;
    bool clip = strcmp(request->name, "clips") == 0;
    if (request->feed == DATA_LIVE && !synth)
        return status_set(
            STATUS_USAGE,
            "--feed live: samples are made while training of --data synth alone; take --feed stored");
    data->classes = (uint32_t)request->classes;
    if (data->classes == 0)
        data->classes = clip ? CLIPS : digit || synth || idx || cifar ? DIGITS : 0;
    if (digit || clip)
        TRY(check_classes(data, request->name, clip ? CLIPS : DIGITS));
    if (digit)
        return generate(request, "digits", words, data);
    if (clip)
        return generate(request, "clips", words + 2, data);
    if (synth)
        return open_synth(request, data);
    if (access(request->name, F_OK) != 0)
        return unknown(request->name);
    return idx ? open_idx(request, data) : cifar ? open_cifar(request, data) : open_datasets(request, data);
}

/* ---- What was opened ---- */

static enum status check_sets(const struct data_request *request, struct data *data)
{
    static const char *const options[DATA_PARTS] = {"--train-size", "--test-size"};
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t wanted = part == DATA_TRAIN ? request->train_size : request->test_size;
        if (set->count == 0)
            return status_set(STATUS_FAILED, "--data %s: there are no samples to %s", request->name,
                              part == DATA_TRAIN ? "learn from" : "test with");
        if (set->count < wanted)
            return status_set(STATUS_USAGE, "%s %" PRIu64 ": there are %" PRIu32, options[part], wanted,
                              set->count);
    }
    return STATUS_OK;
}

/* Of datasets there are as many classes as the largest label says. */
static void count_classes(struct data *data)
{
    if (data->classes > 0)
        return;
    for (int part = 0; part < DATA_PARTS; part++)
        for (uint32_t i = 0; i < data->sets[part].count; i++)
            if (data->sets[part].labels[i] >= data->classes)
                data->classes = data->sets[part].labels[i] + 1;
}

static void identify(struct data *data)
{
#ifdef HAVE_XXHASH
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t values =
            XXH3_64bits(set->values, data_measured(data, (enum data_part)part) * data->sample_bytes);
        data->hashes[part] = XXH3_64bits_withSeed(set->labels, set->count * sizeof *set->labels, values);
    }
#else
    (void)data; /* only checkpoints ask, and without xxHash there are none */
#endif
}

enum status data_open(const struct data_request *request, struct data *data)
{
    double begin_s = timer_now_s();
    *data = (struct data){.feed = request->feed == DATA_CONSTANT ? DATA_CONSTANT : DATA_STORED};
    TRY(open_sets(request, data));
    TRY(check_sets(request, data));
    count_classes(data);
    identify(data);
    data->opening_s = timer_now_s() - begin_s;
    return STATUS_OK;
}
