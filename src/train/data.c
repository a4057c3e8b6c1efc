#include "train/data_parts.h"

#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/options.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/random_boxes.h"
#include "data/remote.h"

#define CIFAR_BATCHES 5
#define DIGITS        10 /* number of classes */
#define CLIPS         8

/* A source that stays open to generate samples during training. */
struct data_source {
    struct source_reader reader;
};

static void close_source(struct data *data)
{
    if (data->source)
        source_close(&data->source->reader);
    free(data->source);
    data->source = NULL;
}

void data_close(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(data->sets[part].values);
        free(data->sets[part].labels);
    }
    close_source(data);
    *data = (struct data){0};
}

/* ---- From storage to the network's input ---- */

const void *data_sample(const struct data *data, enum data_part part, uint32_t sample)
{
    return (const uint8_t *)data->sets[part].values + (size_t)sample * data_stored_bytes(data, part);
}

#define BLOCK 65536 /* the sum of the squares of this many bytes fits into 32 bits */

/* Adds up bytes and their squares, exactly. The compiler vectorises the sums of 32 bits. */
FDSL_FMA_CLONES
static void add_bytes(const uint8_t *bytes, size_t count, uint64_t *sum, uint64_t *squares)
{
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t end = begin + BLOCK < count ? begin + BLOCK : count;
        uint32_t part = 0, square = 0;
        for (size_t i = begin; i < end; i++) {
            part += bytes[i];
            square += (uint32_t)bytes[i] * bytes[i];
        }
        *sum += part;
        *squares += square;
    }
}

/* Computes mean and variance of a channel over the first data_measured() stored training samples. The sums
 * of halves are in double. A canvas of one channel counts for all channels. */
static void moments(const struct data *data, uint32_t channel, double *mean, double *variance)
{
    const struct shape *stored = data->canvas_bytes ? &data->canvas : &data->shape;
    size_t plane = shape_values(stored) / stored->channels;
    if (channel >= stored->channels)
        channel = 0;
    uint32_t samples = data_measured(data, DATA_TRAIN);
    uint64_t byte_sum = 0, byte_squares = 0;
    double sum = 0, squares = 0, count = (double)plane * samples;
    for (uint32_t n = 0; n < samples; n++) {
        const void *sample = data_sample(data, DATA_TRAIN, n);
        if (data->type == DTYPE_U8)
            add_bytes((const uint8_t *)sample + channel * plane, plane, &byte_sum, &byte_squares);
        for (size_t i = 0; data->type != DTYPE_U8 && i < plane; i++) {
            double value = data_value(data->type, sample, channel * plane + i);
            sum += value;
            squares += value * value;
        }
    }
    sum += (double)byte_sum;
    squares += (double)byte_squares;
    *mean = sum / count;
    *variance = squares / count - *mean * *mean;
}

void data_normalise(struct data *data, bool on)
{
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        double mean = 0, variance = data->type == DTYPE_U8 ? 255.0 * 255.0 : 1;
        if (on)
            moments(data, c, &mean, &variance);
        double deviation = variance > 0 ? sqrt(variance) : 1; /* constant channel: shift only */
        data->scale[c] = (float)(1 / deviation);
        data->offset[c] = (float)(-mean / deviation);
    }
}

void data_normalise_by(struct data *data, const double mean[DATA_CHANNELS_MAX],
                       const double deviation[DATA_CHANNELS_MAX])
{
    const double unit = data->type == DTYPE_U8 ? 255 : 1;
    for (uint32_t c = 0; c < data->shape.channels; c++) {
        data->scale[c] = (float)(1 / (unit * deviation[c]));
        data->offset[c] = (float)(-mean[c] / deviation[c]);
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
                    value = fmaf(value, data->scale[c], data->offset[c]);
                    *values++ = box_erased(&move.erase, y, x,
                                           (uint32_t)(first + (size_t)y * shape->width + x), value);
                }
        }
}

/* ---- Finding the sets ---- */

static bool file_there(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && access(path, F_OK) == 0;
}

/* Returns the size of a part of a generated set. */
static uint64_t generated_size(const struct data_request *request, int part)
{
    if (part == DATA_TRAIN)
        return request->train_size ? request->train_size : DATA_TRAIN_SIZE;
    return request->test_size ? request->test_size : DATA_TEST_SIZE;
}

/* Returns how many samples of a part are generated. */
static uint64_t generated_count(const struct data_request *request, int part)
{
    return request->describe ? 1 : generated_size(request, part);
}

/* Generates both sets. Test samples have numbers above all possible training numbers, so the test set does
 * not depend on the size of the training set. */
static enum status generate(const struct data_request *request, const char *source, struct data *data)
{
    static const struct generated_values values = {.encoding = SOURCE_NPY};
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    if (!request->test_only)
        TRY(data_read(request, source, &values, (struct data_range){0, train, -1}, train, data, DATA_TRAIN));
    return data_read(request, source, &values, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test,
                     data, DATA_TEST);
}

/* Returns the first part that is read. */
static int first_part(const struct data_request *request)
{
    return request->test_only ? DATA_TEST : DATA_TRAIN;
}

/* ---- Generated during training ---- */

/* Generates the labels of all training samples, also of those that are not in memory. */
static enum status label_all(const struct source_reader *reader, uint64_t count, struct data_set *set)
{
    if (count > set->count)
        TRY(data_check_memory(count - set->count, sizeof *set->labels, "--train-size"));
    uint32_t *labels = realloc(set->labels, count * sizeof *labels);
    TRY(ALLOCATED(labels, "out of memory for %" PRIu64 " labels; lower --train-size", count));
    set->labels = labels;
    for (uint64_t n = set->count; n < count; n++)
        labels[n] = (uint32_t)reader->source->label(reader->state, n);
    set->count = (uint32_t)count;
    return STATUS_OK;
}

/* Returns the increment of sample numbers per epoch. It is at least 2^32, so numbers of later epochs are
 * above those of the test set. It is a multiple of the number of classes, so each sample keeps its label. */
static uint64_t fresh_step(uint32_t classes)
{
    return ((UINT64_C(1) << 32) + classes - 1) / classes * classes;
}

/* Fills both sets from the source `synth`, which the caller has opened. */
static enum status fill_synth(const struct data_request *request, struct source_reader *reader,
                              struct data *data)
{
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    uint64_t measured = train < DATA_MEASURED ? train : DATA_MEASURED, held = train;
    if (data->feed == DATA_LIVE)
        held = measured;
    if (data->feed == DATA_CONSTANT) {
        held = request->batch > measured ? request->batch : measured;
        held = held < train ? held : train;
    }
    int threads = request->resources.threads;
    if (!request->test_only) {
        TRY(data_fill(reader, (struct data_range){0, held, -1}, held, threads, data, DATA_TRAIN));
        TRY(label_all(reader, train, &data->sets[DATA_TRAIN]));
        data->held = (uint32_t)held;
        data->measured = (uint32_t)measured;
    }
    return data_fill(reader, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test, threads, data,
                     DATA_TEST);
}

static enum status open_synth(const struct data_request *request, struct data *data)
{
    struct data_source *source = data->source = calloc(1, sizeof *source);
    TRY(ALLOCATED(source, "out of memory"));
    const struct image_fit *fit = &request->fit;
    const bool fits = fit->res && fit->how != FIT_RANDOM_RESIZED_CROP;
    const struct synth_values values = {.encoding = SOURCE_NPY,
                                        .preset = request->preset,
                                        .classes = data->classes,
                                        .res = (uint32_t)request->res,
                                        .out_res = fits ? fit->res : 0,
                                        .crop = fit->how == FIT_CROP,
                                        .channels = !fits || fit->channels == 1 ? 1 : 3};
    if (fit->how != FIT_RANDOM_RESIZED_CROP)
        data->fit = (struct image_fit){0}; /* the source delivers images of this size */
    data->gray = true;
    data->feed = request->feed < 0 ? DATA_LIVE : (enum data_feed)request->feed;
    data->fresh = request->fresh ? fresh_step(data->classes) : 0;
    enum status status =
        source_open("synth", &(struct source_request){.parameters = &values, .resources = request->resources},
                    &source->reader);
    if (status == STATUS_OK)
        status = fill_synth(request, &source->reader, data);
    if (data->feed != DATA_LIVE)
        close_source(data);
    return status == STATUS_OK ? status : status_prefix(status, "--data %s", request->name);
}

enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator)
{
    const struct source_reader *reader = &data->source->reader;
    return reader->source->generate(reader->state, request, generator);
}

/* ---- Folders ---- */

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
    for (int part = first_part(request); part < DATA_PARTS; part++) {
        char path[PATH_MAX];
        if (!file_there(request->name, names[part][0], path) &&
            !file_there(request->name, names[part][1], path))
            return status_set(
                STATUS_USAGE,
                "--data %s: there is no %s, plain or gzipped; add it, because MNIST has four files",
                request->name, names[part][0]);
        const struct labelled_values values = {.source = path, .encoding = SOURCE_NPY};
        TRY(data_read(request, "idx", &values, (struct data_range){0, 0, -1}, limit_of(request, part), data,
                      (enum data_part)part));
    }
    return STATUS_OK;
}

/* Returns whether the folder has CIFAR-10 batch `number`. Writes the batch's path to `path`. */
static bool cifar_batch(const char *folder, int number, char path[PATH_MAX])
{
    char name[32];
    snprintf(name, sizeof name, "data_batch_%d.bin", number);
    return file_there(folder, name, path);
}

static bool any_cifar(const char *folder)
{
    char path[PATH_MAX];
    for (int i = 1; i <= CIFAR_BATCHES; i++)
        if (cifar_batch(folder, i, path))
            return true;
    return file_there(folder, "test_batch.bin", path);
}

/* Reads the CIFAR-10 batches of a folder; data_batch_1.bin to data_batch_5.bin form one training set. */
static enum status open_cifar(const struct data_request *request, struct data *data)
{
    char paths[CIFAR_BATCHES][PATH_MAX], path[PATH_MAX];
    const char *learn[CIFAR_BATCHES + 1] = {NULL}, *const test[] = {path, NULL};
    size_t count = 0;
    for (int i = 1; i <= CIFAR_BATCHES; i++)
        if (cifar_batch(request->name, i, paths[count])) {
            learn[count] = paths[count];
            count++;
        }
    if (count == 0)
        return status_set(STATUS_USAGE,
                          "--data %s: the folder has none of the files data_batch_1.bin to data_batch_%d.bin",
                          request->name, CIFAR_BATCHES);
    if (!file_there(request->name, "test_batch.bin", path))
        return status_set(STATUS_USAGE,
                          "--data %s: there is no test_batch.bin; add this file, which has the test samples",
                          request->name);
    const struct labelled_values trained = {.files = learn, .encoding = SOURCE_NPY},
                                 tested = {.files = test, .encoding = SOURCE_NPY};
    if (!request->test_only)
        TRY(data_read(request, "cifar", &trained, (struct data_range){0, 0, -1},
                      limit_of(request, DATA_TRAIN), data, DATA_TRAIN));
    return data_read(request, "cifar", &tested, (struct data_range){0, 0, -1}, limit_of(request, DATA_TEST),
                     data, DATA_TEST);
}

static double share_of(const struct data_request *request)
{
    return request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
}

/* Opens the data sets of a training set and a test set, or one data set for both. `paths` has NULL for a data
 * set that does not exist. The test set is opened first, because it is usually smaller. A training set that
 * is not read is opened too, to compare its class folders. */
static enum status open_readers(const struct data_request *request, const char *const paths[DATA_PARTS],
                                struct source_reader readers[DATA_PARTS])
{
    for (int part = DATA_PARTS; part-- > 0;) {
        const struct dataset_values values = {.source = paths[part],
                                              .image = request->image ? request->image : MEMBERS_IMAGE,
                                              .label = request->label ? request->label : MEMBERS_LABEL,
                                              .fit = -1,
                                              .encoding = -1};
        const struct source_request with = {.parameters = &values,
                                            .resources = request->resources,
                                            .skip = request->skip,
                                            .test_share = paths[DATA_TEST] ? 0 : share_of(request),
                                            .only_held = part == DATA_TRAIN && request->test_only,
                                            .allow_empty = part == DATA_TEST,
                                            .like = part == DATA_TRAIN ? readers[DATA_TEST].state : NULL};
        if (paths[part])
            TRY(source_open("dataset", &with, &readers[part]));
    }
    return STATUS_OK;
}

/* Warns of the number of samples that are left out, because it changes the sets. */
static void tell_skipped(const struct data_request *request, const struct source_reader readers[DATA_PARTS],
                         struct data *data)
{
    bool uncounted = false;
    for (int part = first_part(request); part < DATA_PARTS; part++)
        uncounted = uncounted || readers[part].facts.uncounted;
    data->skips = !uncounted;
    const uint32_t train = data->sets[DATA_TRAIN].skipped, test = data->sets[DATA_TEST].skipped;
    if (train + test > 0 || uncounted)
        status_warn("--data %s: skipped %" PRIu32 " broken sample%s of the training set and %" PRIu32
                    " of the test set%s",
                    request->name, train, train == 1 ? "" : "s", test,
                    uncounted ? ", and an unknown number more" : "");
}

/* Reads both sets from two data sets, or divides one. */
static enum status read_datasets(const struct data_request *request, const char *const paths[DATA_PARTS],
                                 struct data *data)
{
    struct source_reader readers[DATA_PARTS] = {{0}};
    enum status status = open_readers(request, paths, readers);
    data->split = !paths[DATA_TEST];
    for (int part = first_part(request); status == STATUS_OK && part < DATA_PARTS; part++)
        status = data_fill(&readers[data->split ? DATA_TRAIN : part],
                           (struct data_range){0, 0, data->split ? part == DATA_TEST : -1},
                           limit_of(request, part), request->resources.threads, data, (enum data_part)part);
    if (status == STATUS_OK)
        tell_skipped(request, readers, data);
    for (int part = 0; part < DATA_PARTS; part++)
        source_close(&readers[part]);
    return data_named(request, status);
}

/* Finds the folder of a part of a data set. Its name may also begin with a capital or have only capitals. */
static bool part_there(const char *folder, const char *const spellings[3], char path[PATH_MAX])
{
    bool there = false;
    for (size_t i = 0; i < 3 && !there; i++)
        there = file_there(folder, spellings[i], path);
    return there;
}

/* Returns whether a folder has images, but no labels, shards or index: it is a class, or unlabelled. */
static bool has_only_images(const char *path)
{
    static const char *const images[] = {".jpg", ".jpeg", ".png", ".npy", ".webp", ".bmp"};
    static const char *const others[] = {".index", ".cls", ".json", ".txt", ".tar"};
    bool image = false, other = false;
    DIR *list = opendir(path);
    for (const struct dirent *entry; list && !other && (entry = readdir(list));) {
        const char *dot = strrchr(entry->d_name, '.');
        for (size_t i = 0; dot && i < COUNT_OF(images); i++)
            image |= strcasecmp(dot, images[i]) == 0;
        for (size_t i = 0; dot && i < COUNT_OF(others); i++)
            other |= strcasecmp(dot, others[i]) == 0;
    }
    if (list)
        closedir(list);
    return image && !other;
}

/* Returns whether the folder `part`, such as "train", is a class and not a part of the data set: it has only
 * images, and so has another folder beside it. */
static bool is_class(const char *folder, const char *part)
{
    char path[PATH_MAX];
    bool found = false;
    DIR *list = has_only_images(part) ? opendir(folder) : NULL;
    for (const struct dirent *entry; list && !found && (entry = readdir(list));)
        found = *entry->d_name != '.' && file_there(folder, entry->d_name, path) && strcmp(path, part) != 0 &&
                has_only_images(path);
    if (list)
        closedir(list);
    return found;
}

static enum status open_datasets(const struct data_request *request, struct data *data)
{
    static const char *const trains[] = {"train", "Train", "TRAIN"},
                             *const tested[] = {"test", "Test", "TEST"},
                             *const vals[] = {"val", "Val", "VAL"};
    char train[PATH_MAX], test[PATH_MAX];
    bool learn = part_there(request->name, trains, train);
    bool tests = part_there(request->name, tested, test) || (learn && part_there(request->name, vals, test));
    if (learn != tests && is_class(request->name, learn ? train : test))
        learn = tests = false;
    const char *found = learn != tests ? strrchr(learn ? train : test, '/') + 1 : NULL;
    if (learn != tests)
        return status_set(
            STATUS_USAGE,
            "--data %s: the folder contains a data set '%s' but no '%s'; add the missing one, or "
            "name the folder %s, of which a part is then held out for testing (--test-share); if '%s' is a "
            "class, read a "
            "copy by --prepare --from dataset, which takes all folders as classes",
            request->name, found, learn ? "test' or 'val" : "train", learn ? train : test, found);
    const char *const two[DATA_PARTS] = {train, test}, *const one[DATA_PARTS] = {
                                                           request->url ? request->url : request->name, NULL};
    return read_datasets(request, learn ? two : one, data);
}

static const char *const generated[] = {"digits", "clips", "synth"};

bool data_is_generated(const char *name)
{
    bool found = false;
    for (size_t i = 0; i < COUNT_OF(generated); i++)
        found |= strcmp(name, generated[i]) == 0;
    return found;
}

static enum status unknown(const char *name)
{
    const char *nearest = nearest_word(name, generated, COUNT_OF(generated));
    bool mnist = strcmp(name, "mnist") == 0;
    return status_set(STATUS_USAGE,
                      "--data %s: no such folder; digits, clips and synth need no folder%s%s%s%s", name,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "",
                      mnist ? "; scripts/setup/fetch_mnist.sh mnist downloads it" : "");
}

/* Checks --classes for the generated sets `digits` and `clips`, which have a fixed number of classes.
 * --classes may be larger than this number, but not smaller. */
static enum status check_classes(const struct data *data, const char *name, uint32_t classes)
{
    return data->classes >= classes ? STATUS_OK
                                    : status_set(STATUS_USAGE,
                                                 "--classes %" PRIu32 ": %s has %" PRIu32
                                                 " classes; give at least as many, or drop --classes",
                                                 data->classes, name, classes);
}

/* Opens both sets. Chooses their source by name, or by the contents of the folder. */
static enum status open_sets(const struct data_request *request, struct data *data)
{
    char path[PATH_MAX];
    bool idx = file_there(request->name, "train-images-idx3-ubyte", path) ||
               file_there(request->name, "train-images-idx3-ubyte.gz", path);
    bool cifar = any_cifar(request->name);
    bool digit = strcmp(request->name, "digits") == 0, synth = strcmp(request->name, "synth") == 0;
    bool clip = strcmp(request->name, "clips") == 0;
    if (request->feed == DATA_LIVE && !synth)
        return status_set(STATUS_USAGE, "--feed live works only with --data synth; use --feed stored");
    data->classes = (uint32_t)request->classes;
    if (data->classes == 0)
        data->classes = clip ? CLIPS : digit || synth || idx || cifar ? DIGITS : 0;
    if (digit || clip)
        TRY(check_classes(data, request->name, clip ? CLIPS : DIGITS));
    if (digit)
        return generate(request, "digits", data);
    if (clip)
        return generate(request, "clips", data);
    if (synth)
        return open_synth(request, data);
    if (!remote_is(request->name) && access(request->name, F_OK) != 0)
        return unknown(request->name);
    if (request->skip && (idx || cifar))
        return status_set(STATUS_USAGE,
                          "--data %s: --on-error skip is for single files and tar shards, but the folder has "
                          "files of %s; drop --on-error",
                          request->name, idx ? "MNIST" : "CIFAR-10");
    return idx ? open_idx(request, data) : cifar ? open_cifar(request, data) : open_datasets(request, data);
}

/* ---- Checks and hashes ---- */

static enum status check_sets(const struct data_request *request, struct data *data)
{
    for (int part = first_part(request); part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t wanted = part == DATA_TRAIN ? request->train_size : request->test_size;
        if (set->count == 0 && set->skipped)
            return status_set(STATUS_FAILED,
                              "--data %s: all %" PRIu32 " samples to %s are broken; see the warnings above",
                              request->name, set->skipped, part == DATA_TRAIN ? "train on" : "test with");
        if (set->count == 0)
            return status_set(STATUS_FAILED,
                              "--data %s: there are no samples to %s; add samples, or use other data",
                              request->name, part == DATA_TRAIN ? "train on" : "test with");
        if (set->count + set->skipped < wanted)
            return status_set(
                STATUS_USAGE,
                "%s %" PRIu64 ": there are only %" PRIu32 " samples%s; give at most this number",
                data_size_options[part], wanted, set->count + set->skipped,
                data->split && part == DATA_TEST ? ", the part of the set that is held out (--test-share)"
                                                 : "");
    }
    return STATUS_OK;
}

/* If the number of classes is not known yet, sets it to the largest label plus one. Otherwise checks that all
 * labels are below the number of classes. */
static enum status count_classes(const struct data_request *request, struct data *data)
{
    uint32_t largest = 0;
    for (int part = 0; part < DATA_PARTS; part++)
        for (uint32_t i = 0; i < data->sets[part].count; i++)
            if (data->sets[part].labels[i] > largest)
                largest = data->sets[part].labels[i];
    if (data->classes == 0)
        data->classes = largest + 1;
    return largest < data->classes
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--data %s: its largest label is %" PRIu32 ", but there are only %" PRIu32
                            " classes; give --classes %" PRIu32 " or more",
                            request->name, largest, data->classes, largest + 1);
}

static void identify(struct data *data)
{
#ifdef HAVE_XXHASH
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t values = XXH3_64bits(set->values, data_measured(data, (enum data_part)part) *
                                                       data_stored_bytes(data, (enum data_part)part));
        data->hashes[part] = XXH3_64bits_withSeed(set->labels, set->count * sizeof *set->labels, values);
    }
#else
    (void)data; /* without xxHash, there are no checkpoints, and ranks do not compare their data */
#endif
}

/* After request->describe: sets the numbers of samples of both generated sets, and checks that they fit into
 * memory. */
static enum status claim_all(const struct data_request *request, struct data *data)
{
    data->held = data->measured = 1;
    for (int part = 0; part < DATA_PARTS; part++) {
        const uint64_t count = generated_size(request, part);
        const bool stored = part == DATA_TEST || data->feed == DATA_STORED;
        TRY(data_check_memory(count,
                              stored ? data_stored_bytes(data, (enum data_part)part) : sizeof(uint32_t),
                              data_size_options[part]));
        data->sets[part].count = (uint32_t)count;
    }
    return STATUS_OK;
}

enum status data_open(const struct data_request *request, struct data *data)
{
    double begin_s = timer_now_s();
    *data = (struct data){.feed = request->feed == DATA_CONSTANT ? DATA_CONSTANT : DATA_STORED};
    data->fit = request->fit;
    TRY(members_parse(request->image, request->label, NULL, &data->members));
    TRY(open_sets(request, data));
    const bool described = request->describe && data_is_generated(request->name);
    if (request->test_share > 0 && !data->split)
        return status_set(STATUS_USAGE,
                          "--test-share: --data %s has a test set of its own, so nothing is held out; drop "
                          "--test-share",
                          request->name);
    if (!described)
        TRY(check_sets(request, data));
    TRY(count_classes(request, data));
    identify(data);
    if (described)
        TRY(claim_all(request, data));
    data->opening_s = timer_now_s() - begin_s;
    return STATUS_OK;
}
