/* Training data: a training set and a test set of labelled samples, all of the same shape. Samples in memory
 * have their stored type. They are normalised when they enter the network. */
#ifndef FDSL_TRAIN_DATA_H
#define FDSL_TRAIN_DATA_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"
#include "core/generator.h"
#include "core/portable.h"
#include "core/status.h"
#include "core/stream.h"
#include "core/variant.h"
#include "data/random_draws.h"
#include "data/image.h"
#include "data/members.h"
#include "data/mixing.h"
#include "data/stream_state.h"
#include "train/model.h"

struct given;

#define DATA_CHANNELS_MAX 16

enum data_part { DATA_TRAIN, DATA_TEST, DATA_PARTS };

/* The source of a step's training samples. */
enum data_feed {
    DATA_STORED,   /* host memory: all samples are generated or read when the data are opened */
    DATA_LIVE,     /* a generator: samples are generated batch by batch during training */
    DATA_CONSTANT, /* host memory: every step takes the first batch of the set, to measure the speed of
                      training without the cost of input. The network learns nothing useful */
    DATA_LOAD,     /* a stream (core/stream.h): samples are read and decoded batch by batch during training */
    DATA_MIXED     /* only in requests: a mixture of sources. The data then have the feed DATA_LOAD, and
                      data->mixture */
};

/* The label of a broken sample in the steps that cannot read it (DATA_LOAD with request->mask). Its weight in
 * the loss is 0. */
#define DATA_MASKED UINT32_MAX

/* Samples stored consecutively, each in C order (channels, depth, height, width), and one label per
 * sample. */
struct data_set {
    uint32_t count;
    uint32_t skipped; /* broken samples that were left out, also by the source when it was opened */
    void *values;     /* owned */
    uint32_t *labels; /* owned; each less than data->classes, or DATA_MASKED */
    /* Owned; NULL: each sample has one class. Otherwise samples have multi-hot labels (data/mixing.h), and
     * the label of sample n is the number of its row in this array: n, or DATA_MASKED. */
    uint32_t *multi_hot;
    /* If the samples were read from files: the largest label, and, if it is not 0, the number in the source
     * of the first sample that has it. */
    uint32_t largest;
    uint64_t largest_number;
    /* Owned; of the test set, if request->keys: the keys of its samples, or of rows of embeddings their
     * numbers. NULL: generated samples, whose keys are their indexes. */
    char **keys;
    uint32_t key_count;
};

struct data {
    struct shape shape; /* of the samples of the network */
    enum dtype type;
    uint32_t classes;
    bool multi_hot;         /* samples have multi-hot labels: see struct data_set */
    struct image_fit fit;   /* how images are resized; fit.res is 0 if they keep their size. With
                               FIT_RANDOM_RESIZED_CROP, training samples are stored whole, and cropped again in
                               every epoch (train/augment.h); test samples are resized. With DATA_LOAD, the
                               stream crops them */
    bool centre;            /* test samples are fitted by FIT_CENTRE if `fit` is FIT_RANDOM_RESIZED_CROP */
    struct shape canvas;    /* shape of the stored training samples, if it differs from `shape` */
    size_t canvas_bytes;    /* bytes of a stored training sample; 0 if it has the shape `shape` */
    struct members members; /* which members of a sample are its image and its label */
    size_t sample_values, sample_bytes;
    bool gray;                        /* each training sample has equal channels; false: not known */
    struct data_set sets[DATA_PARTS]; /* only the training set of request->test_only is empty */
    bool skips;                       /* the numbers of skipped samples in `sets` are complete */
    /* Owned; not NULL if the data are a mixture (train/data_mixture.h). The number of a training sample is
     * then its position in the epoch, and the streams set its label in each epoch. */
    struct data_mixture *mixture;
    struct data_rows *rows; /* owned; not NULL if the samples are rows of embeddings: their shape is (1, 1, 1,
                               width), and their type is DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    bool split; /* both sets are parts of one data set: request->test_share of each class is the test set */
    /* Normalisation: value v of channel c becomes fmaf(v, scale[c], offset[c]). After data_normalise(data,
     * true) this is (v - mean) / standard deviation. v is 0 to 255 for bytes, and the value itself for
     * halves. */
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX];
    /* The first `held` training samples are in memory. Scale, offset and hash are computed from the first
     * `measured` training samples (for synth, at most DATA_MEASURED). In both members, 0 means all. */
    uint32_t held, measured;
    uint64_t hashes[DATA_PARTS]; /* per set: hash of its measured samples and all its labels; with DATA_LOAD,
                                    of the training set: hash of the keys, the sizes, the first and last bytes
                                    and the labels of all samples */
    double opening_s;            /* duration of data_open() */

    /* The source of training samples. With DATA_LIVE, sample n of epoch e, counted from 0, is the generator's
     * sample number n + e * fresh. With fresh = 0, all epochs have the same samples. Otherwise each epoch has
     * new samples: with the same labels, or with new multi-hot labels, which the feed of an engine writes
     * over the rows of data_set.multi_hot. The test set contains none of these samples. */
    enum data_feed feed;
    uint64_t fresh;
    struct data_source *source; /* owned; DATA_LIVE and DATA_LOAD only: the source of data_generator() and
                                   data_stream() */
    uint32_t lanes, shuffle;    /* DATA_LOAD only: the arguments of draw_lanes() */

    /* DATA_LOAD only. No training sample is in memory: sets[DATA_TRAIN].values is NULL. */
    uint32_t ahead;                       /* batches that a stream prepares in advance */
    uint64_t shard_bytes, resident_bytes; /* as in struct set_stream_request */
    uint64_t resident_device_bytes;       /* for engines on a device: its `device_bytes` */
    bool caches; /* a set is at a URL or compressed, or has orbits: --cache-dir is of use */
    bool masks;  /* broken training samples become zeros with the label DATA_MASKED */
    struct data_sums {
        double values, squares; /* of the values and their squares */
    } sums[DATA_CHANNELS_MAX];  /* per channel, over the measured samples */
    bool keeps_keys;            /* as `keys` of the request */
    struct given *given;        /* not owned; not NULL if the caller of the library hands over the samples */
};

/* Returns whether a sample with this label shows class `k`. `rows` are those of data_set.multi_hot. */
FDSL_HD bool target_has(const uint32_t *rows, uint32_t classes, uint32_t label, uint32_t k)
{
    return rows ? label != DATA_MASKED && multi_hot_has(rows, classes, label, k) : label == k;
}

/* Returns the multi-hot label of sample `sample` of a set: multi_hot_words() words. */
static inline uint32_t *data_multi_hot(const struct data *data, const struct data_set *set, uint64_t sample)
{
    return set->multi_hot + sample * multi_hot_words(data->classes);
}

/* Returns the number of samples of a set that are in memory (in `values`). */
static inline uint32_t data_held(const struct data *data, enum data_part part)
{
    if (part == DATA_TRAIN && data->feed == DATA_LOAD)
        return 0;
    return part == DATA_TRAIN && data->held ? data->held : data->sets[part].count;
}

/* Returns the bytes of a stored sample. */
static inline size_t data_stored_bytes(const struct data *data, enum data_part part)
{
    return part == DATA_TRAIN && data->canvas_bytes ? data->canvas_bytes : data->sample_bytes;
}

/* Returns the number of samples from which the hash of a set is computed. Scale and offset are computed
 * from these samples of the training set. */
static inline uint32_t data_measured(const struct data *data, enum data_part part)
{
    return part == DATA_TRAIN && data->measured ? data->measured : data->sets[part].count;
}

/* Returns the generator's number of a training sample in an epoch (DATA_LIVE). */
FDSL_HD uint64_t data_number(uint64_t fresh, uint32_t epoch, uint32_t sample)
{
    return sample + epoch * fresh;
}

/* Returns element `i` of a sample as a float. */
FDSL_HD float data_value(enum dtype type, const void *sample, size_t i)
{
    if (type == DTYPE_U8)
        return (float)((const uint8_t *)sample)[i];
    if (type == DTYPE_F32)
        return ((const float *)sample)[i];
    const uint16_t bits = ((const uint16_t *)sample)[i];
    return type == DTYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

FDSL_C_BEGIN

/* The source of the training set and of the test set. "digits", "clips" and "synth" are generated. Rows of
 * embeddings are named as for embeddings_open(). Any other name is a URL of tar shards, or a folder: MNIST's
 * four IDX files, binary files of CIFAR-10 or CIFAR-100, two data sets (train, test), or one data set. A
 * single data set is divided: a share of the samples of each class becomes the test set (hold_out() in
 * data/dataset.c), unless `test_name` names the test set. */
struct data_request {
    const char *name;
    const char *url;                  /* of the data set, if `name` shows it without its secrets; or NULL */
    const char *test_name, *test_url; /* data set of the test set, as `name` and `url`; NULL: see above */
    const char *cache_dir;     /* folder that keeps the shards of a URL, or the orbits of synth; or NULL */
    uint64_t cache_bytes;      /* maximum size of `cache_dir`; 0: unlimited */
    const char *image, *label; /* members of a sample (data/members.h); NULL: the defaults */
    const char *tensor;        /* of rows of embeddings: the tensor of each file; NULL: the default */
    const char *labels, *test_labels; /* of images: a table of labels (data/label_names.h), whose name ends in
                                         .csv; NULL: none. Of rows of embeddings: a file of labels, or the
                                         name of a tensor in the files of the rows; NULL: "labels".
                                         test_labels NULL: as `labels` */
    uint64_t train_size, test_size;   /* number of samples to use: the first ones (from class folders, the
                                         first of every class); 0: all, or, for generated data,
                                         DATA_TRAIN_SIZE and DATA_TEST_SIZE */
    double test_share;   /* share of a single data set that is held out for testing, above 0 and below 1;
                            0: DATA_TEST_SHARE. STATUS_USAGE if the data have a test set of their own */
    uint64_t classes;    /* number of classes; 0: 8 (clips), largest label + 1 (data sets), all of
                            class_file or of a preset that is a list or a published set, or 10 (others) */
    const char *preset;  /* preset of the classes, synth only; NULL: the default */
    const char *formula; /* synth only; NULL: that of the classes */
    const char *preset_file, *class_file; /* synth only: where the classes are from; NULL: built-in presets */
    const char *draw;                     /* synth only: what fractals show; NULL: patches */
    double min_lit;                       /* synth only: least share of set pixels of fractals; 0: any */
    uint64_t res;                         /* image width and height in pixels, synth only */
    struct image_fit fit;                 /* how images are resized; random crops are those of epoch 0 */
    uint64_t batch;                       /* samples per step */
    int feed;                             /* enum data_feed; negative: live for synth, otherwise stored */
    bool fresh;                           /* live samples differ between epochs */
    bool skip;                            /* leave out broken samples of data sets, with a warning */
    bool mask;   /* DATA_LOAD only: mask broken training samples, and leave out broken test samples */
    bool centre; /* fit test images by FIT_CENTRE if `fit` is FIT_RANDOM_RESIZED_CROP; implied by
                    DATA_LOAD */
    uint32_t lanes, shuffle, ahead; /* DATA_LOAD only: as in struct data */
    uint64_t shard_bytes; /* DATA_LOAD only: limit of the memory for shards of a URL without `cache_dir`; 0:
                             SET_STREAM_SHARD_BYTES, or more if the shuffle windows need it. STATUS_USAGE if
                             the shards have more bytes than this and cannot be read in blocks, or if they
                             have more than a `cache_bytes` above 0 */
    /* DATA_LOAD only, not for rows of embeddings: as in struct set_stream_request, the second one as
     * `device_bytes`. */
    uint64_t resident_bytes, resident_device_bytes;
    const struct data_mix_texts *mix; /* DATA_MIXED only */
    bool test_only;                   /* read only the test set; the training set stays empty */
    bool mixed;                       /* a source of a mixture: --cache-dir may be for another source */
    bool train_only;     /* read only the training set: the test set stays empty, and nothing is held out */
    bool coarse;         /* of records with fine and coarse labels: the coarse ones */
    bool keys;           /* keep the keys of the test samples */
    struct given *given; /* the caller hands over all samples (train/given.h); NULL: none of them */
    bool describe;       /* generate only the first sample of each generated set; data_open() then sets the
                            numbers of samples as if all were there */
    struct resources resources;
};

#define DATA_MEASURED   1000
#define DATA_TRAIN_SIZE 10000
#define DATA_TEST_SHARE 0.1
#define DATA_TEST_SIZE  2000

/* Opens or generates both sets. The caller closes `data`, even after a failure. STATUS_USAGE if the folder
 * does not exist or holds no data, or if the feed does not suit the data. STATUS_FAILED with the file, the
 * key and the reason if a sample is broken (without `skip`), or if a set has no samples. */
enum status data_open(const struct data_request *request, struct data *data);

/* Refuses --cache-dir, for data of which no copies are kept. */
enum status data_refuse_cache(const struct data_request *request);
void data_close(struct data *data);

/* Returns whether a value of --data names generated data. */
bool data_is_generated(const char *name);

/* Warns if a network cannot learn all classes that the test set has. If `whole` is true, the sets are
 * complete and the labels set the number of classes; then also warns of classes without a sample. `name` is
 * the name of the data set in the request. Does not check generated data. */
void data_warn_of_classes(const struct data *data, const char *name, bool whole);

/* Warns once if the test set is so small that one sample changes the accuracy by more than 1 %. `option` and
 * `name` are the option that names the test set, and its value. For generated data there is no warning. */
void data_warn_of_few(const struct data *data, const char *option, const char *name);

/* Adds the values of channel `channel` of a sample in memory, and their squares, to `sums`. Sums of bytes are
 * exact, up to 2^53. */
void data_add_sums(const struct data *data, const void *sample, uint32_t channel, struct data_sums *sums);

/* Computes scale and offset from the training set. If `on` is false, sets both so that bytes are scaled to 0
 * .. 1 and halves are unchanged. data_open() does not call this function. */
void data_normalise(struct data *data, bool on);

/* Sets scale and offset for a given mean and standard deviation > 0 of each channel. If samples are bytes,
 * mean and standard deviation are those of the values scaled to 0 .. 1. */
void data_normalise_by(struct data *data, const double mean[DATA_CHANNELS_MAX],
                       const double deviation[DATA_CHANNELS_MAX]);

/* Returns the address of a sample that is in memory, as it is stored. */
const void *data_sample(const struct data *data, enum data_part part, uint32_t sample);

/* Writes one sample as the network sees it, shifted, flipped, normalised and erased, to `values`
 * (data->sample_values floats). `stored` has data->sample_bytes bytes: the stored sample, or the image that
 * augment_image() computed from it. Pass (struct draw_move){0} for test samples, which are not augmented.
 * Pure and thread-safe. */
void data_gather(const struct data *data, const void *stored, struct draw_move move, float *values);

/* Fills the rectangle of random erasing with noise, in the values of a sample in C order. */
void data_erase(const struct shape *shape, const struct draw_erase *erase, float *values);

struct data_stream_request {
    struct stream_plan plan; /* its numbers are those of training samples, or of their copies */
    uint64_t seed;           /* of the random crops; DATA_LOAD only */
    uint32_t copies;         /* copies of each sample, at least 1: copy c of sample n has the number
                                n + c * (samples of the set), and its own crop */
    int threads;             /* that read and decode, or generate, at least 1 */
    uint32_t held;           /* number of batches that the consumer holds at a time */
    double device_share;     /* as in struct set_stream_request */
    uint64_t device_bytes;   /* as in struct set_stream_request */
    bool unscaled;           /* decode each JPEG at its full size */
    /* As in struct set_stream_request; NULL: host memory. */
    enum status (*allocate)(size_t bytes, void **memory);
    void (*deallocate)(void *memory);
};

/* Opens a stream of training samples as they are stored, in the order of the plan. data->feed must not be
 * DATA_STORED. With DATA_CONSTANT, the plan must list samples that are in memory. `data` must outlive the
 * stream, which the caller closes. Several streams of the same data may be open. */
enum status data_stream(const struct data *data, const struct data_stream_request *request,
                        struct stream **stream);

/* Returns whether the image of a training sample is named as a JPEG. data->feed must be DATA_LOAD. */
bool data_stream_has_jpeg(const struct data *data);

/* Returns stream_batch.read of a training sample, or of a copy, as its number says it must be. Of a mixture:
 * 0 if another source than the one that ends an epoch delivers the sample. */
uint64_t data_read_hash(const struct data *data, uint32_t epoch, uint32_t number);

/* Returns the sum of these hashes over an epoch that has all samples. */
uint64_t data_epoch_hash(const struct data *data);

/* Returns whether data_read_hash() covers a sample. */
bool data_read_covers(const struct data *data, uint32_t epoch, uint32_t number);

/* Sets what the data decide of the state of a stream of training samples: `samples`, `data`, `lanes` and
 * `shuffle_buffer`. data->feed must be DATA_LOAD. STATUS_USAGE if the training set is not all samples of its
 * data set in their order, because states are about all of them. STATUS_FAILED if rows cannot be read. */
enum status data_stream_state(const struct data *data, struct stream_state *state);

/* Sets the labels of the samples in a batch of a stream to their values, or to DATA_MASKED if the samples are
 * masked. Of live samples, sets the multi-hot labels. Returns the number of masked samples among the first
 * `count` of the batch. */
uint32_t data_take_labels(const struct data *data, const struct stream_batch *batch, uint32_t count);

/* Creates a generator of the training samples. data->feed must be DATA_LIVE. `data` must outlive the
 * generator, which the caller closes. */
enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator);

FDSL_C_END

#endif
