/* Reads rows of embeddings and their labels: both sets, or the test set and a generator for the training set.
 */
#include "train/data_fill.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "core/text.h"
#include "data/checksum.h"
#include "data/dataset.h"
#include "data/embeddings.h"
#include "data/image_formats.h"
#include "data/remote.h"
#include "data/tensor_file.h"

#define CLASSES_MAX (1 << 24)

struct data_rows {
    struct embeddings *sets[DATA_PARTS]; /* owned; both parts of a divided set have sets[DATA_TRAIN] */
    uint32_t *numbers[DATA_PARTS];       /* owned; of each sample, the number of its row in the set */
    uint64_t hash;                       /* data_rows_hash() */
};

/* ---- What the request names ---- */

/* Returns whether a folder has files of tensors and neither subfolders, shards nor other images: in a data
 * set of images, a file such as model.pt belongs to something else, and .npy files may be images. */
static bool has_only_tensors(const char *path)
{
    bool tensors = false, others = false;
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder && !others && (entry = readdir(folder));) {
        const char *name = entry->d_name, *dot = strrchr(name, '.');
        struct stat info;
        const bool npy = text_ends_in(name, ".npy"), known = *name != '.' && tensor_file_named(name);
        tensors |= known && !npy;
        others |= *name != '.' && fstatat(dirfd(folder), name, &info, 0) == 0 && S_ISDIR(info.st_mode);
        others |=
            dot && dot != name &&
            (text_ends_in(name, ".tar") ? !known : image_format(dot + 1, NULL, 0) != IMAGE_NONE && !npy);
    }
    if (folder)
        closedir(folder);
    return tensors && !others;
}

/* Returns whether these labels are a table of the labels of images. */
static bool is_table(const char *labels)
{
    return labels && text_ends_in(labels, ".csv");
}

bool rows_named(const struct data_request *request)
{
    if (data_is_generated(request->name))
        return false;
    return (request->labels && !is_table(request->labels)) ||
           (request->test_labels && !is_table(request->test_labels)) || request->tensor ||
           tensor_file_named(request->name) || has_only_tensors(request->name);
}

/* Rejects options that are for images. */
static enum status check_request(const struct data_request *request)
{
    const struct {
        bool given;
        const char *option;
    } others[] = {{request->image, "image"},
                  {request->label, "label"},
                  {request->fit.res > 0, "out-res"},
                  {request->skip || request->mask, "on-error"}};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (others[i].given)
            return status_option(STATUS_USAGE, others[i].option,
                                 " is for images, but --data %s has rows of embeddings; drop --%s%s",
                                 request->name, others[i].option, i == 1 ? ", or use --labels" : "");
    const char *const names[] = {request->name, request->test_name};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (names[i] && remote_is(names[i]))
            return status_option(
                STATUS_USAGE, i ? "test-data" : "data",
                " %s is a URL, but rows of embeddings are read from local files; download them", names[i]);
    return request->test_labels && !request->test_name
               ? status_set(STATUS_USAGE, "--test-labels needs --test-data, the rows that the labels are for")
               : STATUS_OK;
}

/* ---- Rows ---- */

/* Opens a generator whose samples are those of a part. */
static enum status open_reader(const struct data_rows *rows, enum data_part part,
                               const struct embeddings *set, int threads, struct generator **reader)
{
    const struct embedding_rows request = {.set = set,
                                           .numbers = rows->numbers[part],
                                           .finite = true,
                                           .to = set->dtype,
                                           .width = set->columns,
                                           .threads = threads > 1 ? threads : 1};
    return embedding_rows_open(&request, reader);
}

/* Reads samples of a part; `samples` NULL: samples 0 to count - 1. */
static enum status read_samples(const struct data_request *request, const struct data *data,
                                enum data_part part, const struct embeddings *set, const uint64_t *samples,
                                uint32_t count, void *to)
{
    struct generator *reader;
    TRY(open_reader(data->rows, part, set, request->resources.threads, &reader));
    const enum status status =
        generator_make(reader, &(struct generator_numbers){.list = samples}, count, to, NULL, NULL);
    generator_close(reader);
    return status;
}

/* ---- Choosing rows ---- */

/* Sets the samples of a part: the rows that are held out (`held` is 1), that are not (0), or all (-1), at
 * most `limit`. */
static enum status choose(struct data *data, enum data_part part, const struct embeddings *set,
                          const int32_t *labels, const uint8_t *flags, int held, uint64_t limit)
{
    struct data_set *into = &data->sets[part];
    uint32_t **numbers = &data->rows->numbers[part];
    char key[24];
    *numbers = malloc((set->rows + 1) * sizeof **numbers);
    into->labels = malloc((set->rows + 1) * sizeof *into->labels);
    TRY(ALLOCATED(*numbers && into->labels, "out of memory for the list of rows"));
    for (uint64_t row = 0; row < set->rows && into->count < limit; row++)
        if (held < 0 || flags[row] == held) {
            data_note_label(into, (uint32_t)labels[row], row);
            into->labels[into->count] = (uint32_t)labels[row];
            (*numbers)[into->count++] = (uint32_t)row;
            snprintf(key, sizeof key, "%" PRIu64, row);
            if (data->keeps_keys && part == DATA_TEST)
                TRY(data_keep_key(into, key));
        }
    return STATUS_OK;
}

/* Sets `*flags`: 1 for each row that is held out. The key of a row is its number. The caller frees it. */
static enum status hold_out(const struct embeddings *set, const int32_t *labels, double share,
                            uint8_t **flags)
{
    FREED struct dataset_candidate *candidates = malloc((set->rows + 1) * sizeof *candidates);
    *flags = calloc(set->rows + 1, 1);
    TRY(ALLOCATED(candidates && *flags, "out of memory to hold out rows"));
    for (uint64_t row = 0; row < set->rows; row++)
        candidates[row] = (struct dataset_candidate){labels[row], (uint32_t)row, stream_hash(row)};
    dataset_hold_out(candidates, (uint32_t)set->rows, share, *flags);
    return STATUS_OK;
}

/* Copies the values of a part into memory. */
static enum status store(const struct data_request *request, struct data *data, enum data_part part,
                         const struct embeddings *set)
{
    struct data_set *into = &data->sets[part];
    TRY(data_check_memory(into->count, data->sample_bytes, data_size_options[part]));
    into->values = malloc(into->count * data->sample_bytes + 1);
    TRY(ALLOCATED(into->values, "out of memory for %" PRIu32 " rows; lower %s", into->count,
                  data_size_options[part]));
    return read_samples(request, data, part, set, NULL, into->count, into->values);
}

/* Sets data->sums and the hash from rows that are evenly distributed over the training set. */
static enum status measure(const struct data_request *request, struct data *data,
                           const struct embeddings *set)
{
    const uint64_t count = data->sets[DATA_TRAIN].count, most = count < DATA_MEASURED ? count : DATA_MEASURED;
    FREED uint64_t *samples = malloc((most + 1) * sizeof *samples);
    FREED uint8_t *values = malloc(most * data->sample_bytes + 1);
    TRY(ALLOCATED(samples && values, "out of memory to measure rows"));
    for (uint64_t i = 0; i < most; i++)
        samples[i] = i * count / most;
    TRY(read_samples(request, data, DATA_TRAIN, set, samples, (uint32_t)most, values));
    for (uint64_t i = 0; i < most; i++)
        data_add_sums(data, values + i * data->sample_bytes, 0, &data->sums[0]);
    data->measured = (uint32_t)most;
    data->rows->hash = checksum_seeded(values, most * data->sample_bytes, count ^ set->rows << 32);
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Opens the files of a part, and reads its labels. */
static enum status open_part(const struct data_request *request, enum data_part part, struct embeddings **set,
                             int32_t **labels)
{
    const bool test = part == DATA_TEST;
    const char *path = test ? request->test_name : request->name, *option = test ? "--test-data" : "--data";
    /* A tensor has the same name in the files of both sets; a file of labels is for one of them. */
    const bool files = embedding_labels_are_files(request->labels);
    const char *from = !test || (!request->test_labels && !files) ? request->labels : request->test_labels;
    TRY(status_prefix(embeddings_open(path, request->tensor ? request->tensor : "", set), "%s", option));
    if ((*set)->rows > DATA_SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE, "%s %s has %" PRIu64 " rows; at most %" PRIu64 " are supported",
                          option, path, (*set)->rows, DATA_SAMPLES_MAX);
    if (test && !from && files)
        return status_set(STATUS_USAGE, "--test-data %s: name the labels of its rows with --test-labels",
                          path);
    return embedding_labels(*set, from, 0, CLASSES_MAX - 1, labels);
}

/* Sets the shape of the samples. Both sets have it, because one network sees both. */
static enum status take_shape(const struct embeddings *set, struct data *data)
{
    if (data->sample_values == 0) {
        data->shape = (struct shape){1, 1, 1, set->columns};
        data->type = set->dtype;
        data->sample_values = set->columns;
        data->sample_bytes = set->columns * dtype_bytes(set->dtype);
    }
    return data->type == set->dtype && data->sample_values == set->columns
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "the training set has rows of %zu values of %s, but the test set has rows of %" PRIu32
                     " values of %s; both need the same",
                     data->sample_values, dtype_names[data->type], set->columns, dtype_names[set->dtype]);
}

/* Chooses the samples of a part and reads their values, or with DATA_LOAD measures the training set. */
static enum status fill_part(const struct data_request *request, enum data_part part,
                             const struct embeddings *set, const int32_t *labels, const uint8_t *flags,
                             struct data *data)
{
    const bool train = part == DATA_TRAIN;
    const uint64_t size = train ? request->train_size : request->test_size;
    TRY(take_shape(set, data));
    TRY(choose(data, part, set, labels, flags, !data->split ? -1 : !train, size ? size : UINT64_MAX));
    return train && data->feed == DATA_LOAD ? measure(request, data, set) : store(request, data, part, set);
}

/* Opens and fills both parts from one set, or each from its own. */
static enum status open_parts(const struct data_request *request, struct data *data,
                              int32_t *labels[DATA_PARTS], uint8_t **flags)
{
    struct embeddings **sets = data->rows->sets;
    const double share = request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
    data->split = !request->test_name;
    if (!request->test_only || data->split)
        TRY(open_part(request, DATA_TRAIN, &sets[DATA_TRAIN], &labels[DATA_TRAIN]));
    if (data->split)
        TRY(hold_out(sets[DATA_TRAIN], labels[DATA_TRAIN], share, flags));
    else
        TRY(open_part(request, DATA_TEST, &sets[DATA_TEST], &labels[DATA_TEST]));
    if (!request->test_only)
        TRY(fill_part(request, DATA_TRAIN, sets[DATA_TRAIN], labels[DATA_TRAIN], *flags, data));
    const int from = data->split ? DATA_TRAIN : DATA_TEST;
    return fill_part(request, DATA_TEST, sets[from], labels[from], *flags, data);
}

/* Counts the classes. A failure names the row. */
static enum status count_classes(struct data *data)
{
    const struct data_set *set = data_largest(data);
    const enum status status = data_count_classes(data);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct embeddings *rows = data->rows->sets[data->split ? DATA_TRAIN : set - data->sets];
    const struct embeddings_part *part = embeddings_part_of(rows, set->largest_number);
    return status_prefix(status, "%s: row %" PRIu64, part->file, set->largest_number - part->first);
}

enum status data_rows_open(const struct data_request *request, struct data *data)
{
    int32_t *labels[DATA_PARTS] = {NULL};
    uint8_t *flags = NULL;
    TRY(check_request(request));
    data->rows = calloc(1, sizeof *data->rows);
    TRY(ALLOCATED(data->rows, "out of memory"));
    enum status status = open_parts(request, data, labels, &flags);
    if (status == STATUS_OK)
        status = count_classes(data);
    for (int part = 0; part < DATA_PARTS; part++) {
        free(labels[part]);
        if (part == DATA_TRAIN && data->feed == DATA_LOAD)
            continue; /* the streams read from it */
        embeddings_close(data->rows->sets[part]);
        data->rows->sets[part] = NULL;
    }
    free(flags);
    return status;
}

void rows_close(struct data *data)
{
    for (int part = 0; data->rows && part < DATA_PARTS; part++) {
        embeddings_close(data->rows->sets[part]);
        free(data->rows->numbers[part]);
    }
    free(data->rows);
    data->rows = NULL;
}

uint64_t data_rows_hash(const struct data *data)
{
    return data->rows->hash;
}

bool rows_are_whole(const struct data *data)
{
    /* choose() lists rows in their order */
    return data->sets[DATA_TRAIN].count == data->rows->sets[DATA_TRAIN]->rows;
}

enum status rows_state_hash(const struct data *data, uint64_t *hash)
{
    return embedding_hash(data->rows->sets[DATA_TRAIN], (const int32_t *)data->sets[DATA_TRAIN].labels, hash);
}

enum status rows_generator(const struct data *data, int threads, struct generator **generator)
{
    return open_reader(data->rows, DATA_TRAIN, data->rows->sets[DATA_TRAIN], threads, generator);
}
