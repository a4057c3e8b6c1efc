/* Shared by data.c, data_fill.c (reads samples of a source, or rows of embeddings with labels, into a set),
 * data_mixture.c and feed.c. No other file includes this header. */
#ifndef FDSL_TRAIN_DATA_FILL_H
#define FDSL_TRAIN_DATA_FILL_H

#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "data/source.h"
#include "train/data.h"

#define DATA_SAMPLES_MAX ((UINT64_C(1) << 31) - 1) /* maximum samples per set */

/* The option that sets the size of each part. */
extern const char *const data_size_options[DATA_PARTS];

/* The samples of a source that a set takes. `count` is 0 for all samples of the source. */
struct data_range {
    uint64_t first, count;
    int held; /* 1: only samples that the source holds out; 0: only the others; -1: all */
};

/* Samples of a source, by their numbers, and their labels. */
struct data_list {
    uint64_t *numbers;   /* owned */
    uint32_t *labels;    /* owned; DATA_MASKED if a label is broken */
    uint32_t *multi_hot; /* owned; as in struct data_set */
    uint32_t count, masked;
};

/* Returns STATUS_TOO_LARGE if `samples` samples do not fit into memory; the message suggests lowering
 * `option`. Without this check, a system that overcommits memory may kill the program when it first writes to
 * the memory. */
enum status data_check_memory(uint64_t samples, size_t sample_bytes, const char *option);

/* Returns the bytes of a sample's label, with its multi-hot label. */
static inline size_t data_label_bytes(const struct data *data)
{
    return sizeof(uint32_t) * (1 + (data->multi_hot ? multi_hot_words(data->classes) : 0));
}

/* Makes room for the labels of `count` samples in a set, and keeps those that it has. STATUS_EXHAUSTED if
 * memory runs out; the message suggests lowering `option`. */
enum status data_room_for_labels(const struct data *data, uint64_t count, const char *option,
                                 struct data_set *set);

/* Notes the label of sample `number` of the source, if it is the largest of the set so far. */
static inline void data_note_label(struct data_set *set, uint32_t label, uint64_t number)
{
    if (label == DATA_MASKED || set->multi_hot || label <= set->largest)
        return;
    set->largest = label;
    set->largest_number = number;
}

/* Appends the key of a sample to those of a set. STATUS_EXHAUSTED if memory runs out. */
static inline enum status data_keep_key(struct data_set *set, const char *key)
{
    char *copy = strdup(key);
    const bool kept = copy && array_grow(&set->keys, set->key_count, sizeof *set->keys);
    if (kept)
        set->keys[set->key_count++] = copy;
    else
        free(copy);
    return ALLOCATED(kept, "out of memory for the keys of samples");
}

/* Returns the set that has the largest label. */
static inline const struct data_set *data_largest(const struct data *data)
{
    const bool test = data->sets[DATA_TEST].largest > data->sets[DATA_TRAIN].largest;
    return &data->sets[test ? DATA_TEST : DATA_TRAIN];
}

/* Sets the number of classes to the largest label plus one, unless it is known. STATUS_USAGE if the largest
 * label is not below the number of classes; the caller puts the location of sample
 * data_largest()->largest_number before the message. Both sets are complete, with data_note_label(). */
enum status data_count_classes(struct data *data);

/* Appends the samples in `range` of an open source to set `part`, at most `limit` of them. For class folders,
 * chooses `limit` samples by taking the classes in turn, and adds them in the order of the source. The first
 * sample of `data` sets the shape and the type. `threads` threads decode. STATUS_FAILED, with the sample's
 * location, if a sample is broken. If the reader skips broken samples, it leaves them out, and `skipped` of
 * the set counts them. STATUS_USAGE if a sample differs from the first, or if the set does not fit into
 * memory. */
enum status data_fill(struct source_reader *reader, struct data_range range, uint64_t limit, int threads,
                      struct data *data, enum data_part part);

/* Lists the samples that data_fill() would take, and reads their labels, but not the samples. The caller
 * frees both arrays of the list, even after a failure. STATUS_FAILED, with the sample's location, if a label
 * is broken. If data->masks is set, such a sample gets the label DATA_MASKED, with a warning. */
enum status data_list_samples(struct source_reader *reader, struct data_range range, uint64_t limit,
                              const struct data *data, struct data_list *list);

/* Decodes at most DATA_MEASURED training samples, evenly distributed over the list. They set the shape and
 * the type, if these are not known yet, and data->sums. No sample is kept. A sample that is broken is an
 * error; if data->masks is set, it does not count. */
enum status data_measure(struct source_reader *reader, const struct data_list *list, int threads,
                         struct data *data);

/* ---- Rows of embeddings ---- */

/* Returns whether the request names rows of embeddings: by --labels, --test-labels or --tensor, by a name
 * that ends like a file of tensors, or by a folder with .safetensors, .pt, .pth or .pth.tar files that has
 * neither subfolders, shards nor images. */
bool rows_named(const struct data_request *request);

/* Opens both sets: sets data->rows, shape, type, labels and values. With DATA_LOAD, the files of the training
 * set stay open, its values are not read, and data->sums is set from at most DATA_MEASURED of its rows.
 * STATUS_USAGE if an option of the request is for other samples, or if a file does not exist; STATUS_FAILED
 * with the file and the reason if rows or labels cannot be read, or if a value is not finite. The caller
 * calls rows_close(), even after a failure. */
enum status data_rows_open(const struct data_request *request, struct data *data);
void rows_close(struct data *data);

/* For DATA_LOAD: returns a hash of the measured rows, without reading them again. */
uint64_t data_rows_hash(const struct data *data);

/* For DATA_LOAD: returns whether the training set is all rows of the files; and the hash of these rows and
 * their labels in the state of a stream. STATUS_FAILED if a file cannot be read or has changed. */
bool rows_are_whole(const struct data *data);
enum status rows_state_hash(const struct data *data, uint64_t *hash);

/* For DATA_LOAD: opens a generator that reads training samples from the files, with up to `threads` threads.
 * The caller closes it before the data. STATUS_FAILED with the file if it was changed, or if a value is not
 * finite. */
enum status rows_generator(const struct data *data, int threads, struct generator **generator);

#endif
