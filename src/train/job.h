/* Shared by the workloads `train` and `infer`: the options that choose the data, and the functions that open
 * the data. */
#ifndef FDSL_TRAIN_JOB_H
#define FDSL_TRAIN_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "core/record.h"
#include "core/options.h"
#include "core/parallel.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/labelled_files.h"
#include "data/members.h"
#include "train/data_mixture.h"
#include "train/checkpoint.h"

struct checkpoint;

/* The parameters that both workloads share. They must be the first member of each workload's parameters. */
struct job_parameters {
    const char *data, *image, *label, *tensor, *labels, *test_labels, *formula, *preset, *preset_file,
        *class_file, *draw;
    uint64_t train_size, test_size, classes, res, out_res, channels, batch;
    double test_share, min_lit;  /* NaN: not given */
    int fit;                     /* enum fit_how */
    struct crop_parameters crop; /* set by the workload */
    int filter;                  /* enum resample_choice; set by the workload */
    /* The URLs with their secrets, if `data` and `test_data` show them without; set by job_hide_secrets() */
    const char *url, *test_url;
    const char *test_data; /* NULL: not given */
    int on_error;          /* enum on_error; negative: not given (`infer`) */
    int feed;              /* `feed` and `fresh` as in struct data_request */
    bool exact_resize;
    bool fresh, centre; /* centre: as in struct data_request */
    /* Only for --feed load, as in struct data_request: */
    uint64_t lanes, shuffle, ahead, resident_bytes, resident_device_bytes;
    struct data_mix_texts mix; /* only for --feed mixed; `mix.mix`: NULL if not given */
    const char *cache_dir;     /* as in struct data_request */
    uint64_t cache_bytes;
    bool test_only, describe; /* set by the workload: as in struct data_request */
    bool keys;                /* set by the workload: as in struct data_request */
    int labels_of;            /* index in cifar_label_names */
    struct given
        *given; /* set by the library: the caller hands over the samples; NULL: the options name them */
};

/* The rows of the option table for struct job_parameters. `parameters` is the workload's struct; its first
 * member is `job`. `use` says what --data is for. `data_` and `res_` are the defaults of --data and --res, or
 * NULL. `train_sizes`, `test_sizes`, `test_shares` and `class_counts` are strings that state the defaults;
 * `train_words` and `res_words` are added to the help of --train-size and --res. `preset_` and `out_res_` say
 * the defaults of these options; `fit_`, `channels_` and `on_error_` are defaults or NULL. */
/* clang-format off */
#define JOB_OPTIONS(parameters, data_, use, train_words, train_sizes, test_sizes, test_shares, class_counts, res_, res_words, preset_, out_res_, fit_, channels_, on_error_)                                                                                \
    {"data", "DIR|NAME", OPTION_TEXT, offsetof(parameters, job.data), .fallback = data_, .column = COLUMN, .help = use ": a folder with MNIST (IDX), CIFAR-10 or CIFAR-100 (binary) files, class folders or a data set of --prepare; a folder with two sets of the last two kinds, in subfolders train and test (or val); a URL of tar shards; rows of embeddings, as files or a folder with .npy (with --labels), .safetensors or .pt files (for logreg and mlp); or the name of generated data: digits, clips (for cnn3d) or synth"},                                                        \
    MEMBER_IMAGE_LABEL(offsetof(parameters, job.image), offsetof(parameters, job.label), COLUMN), \
    {"tensor", "NAME", OPTION_TEXT, offsetof(parameters, job.tensor), .column = COLUMN, .help = "of rows of embeddings: the tensor of each file, or a pattern (default: as for the workload ops)"}, \
    {"labels", "FILE|TENSOR", OPTION_TEXT, offsetof(parameters, job.labels), .column = COLUMN, .help = "of images: a CSV file (.csv) with the columns name (key or file of a sample) and label (an integer, or in all lines a word), instead of --label. Of rows of embeddings: a file with one label per row, or the name of a tensor of integers in the files of the rows (default: the tensor labels)"}, \
    {"test-labels", "FILE|TENSOR", OPTION_TEXT, offsetof(parameters, job.test_labels), .column = COLUMN, .help = "the labels of --test-data, as --labels (default: --labels, if it is a CSV file or names a tensor)"}, \
    {"on-error", "WHAT", OPTION_CHOICE, offsetof(parameters, job.on_error), .fallback = on_error_, .choices = on_error_names, .column = COLUMN, .help = "what to do with a sample of files or shards that cannot be read or decoded. fail ends the run; skip omits the sample and counts it. With skip, all data are first compared with the index of --prepare, if there is one. mask is for --feed load: a training sample keeps its place in the step, with weight 0, and a test sample is omitted. WHAT is one of"}, \
    {"train-size", "N", OPTION_COUNT, offsetof(parameters, job.train_size), .minimum = 1, .maximum = 2147483647, .column = COLUMN, .help = "take the first N training samples; from class folders, the first of every class, then the second of every class, and so on" train_words " (default: " train_sizes ")"},                               \
    {"test-size", "N", OPTION_COUNT, offsetof(parameters, job.test_size), .minimum = 1, .maximum = 2147483647, .column = COLUMN, .help = "take the first N test samples; from class folders, in the order of --train-size (default: " test_sizes ")"},                            \
    {"test-share", "X", OPTION_REAL, offsetof(parameters, job.test_share), .minimum = 0.0001, .maximum = 0.9999, .help = "share of the samples that is held out for testing if --data is one data set. In a class with n samples, round(n X) are held out, but at least 1 and at most n - 1; a single sample is trained on (default: " test_shares ")"},   \
    {"test-data", "DIR|URL", OPTION_TEXT, offsetof(parameters, job.test_data), .column = COLUMN, .help = "test set: class folders, a data set of --prepare, or a URL of tar shards. All of --data is then trained on (default: the test set that --data contains, or a part of --data: --test-share)"}, \
    {"classes", "N", OPTION_COUNT, offsetof(parameters, job.classes), .minimum = 1, .maximum = 1 << 20, .column = COLUMN, .help = "number of classes; labels are 0 to N - 1 (default: " class_counts ")"},                       \
    {"formula", "NAME", OPTION_TEXT, offsetof(parameters, job.formula), .column = COLUMN, .help = "how an image of synth is drawn: uji, visualatom, rcdb or another formula of docs/formulas.md whose images have labels (default: that of --class, or that which --preset implies, else uji, also for the preset visualatom)"}, \
    {"preset", "NAME", OPTION_TEXT, offsetof(parameters, job.preset), .column = COLUMN, .help = "source of the classes of synth: uji, visualatom, lowercompute, paper-1000, lowercompute-1000, paper, paper-lowercompute, rcdb, rcdb-1k, rcdb-21k, visualatom-script-1k, fractaldb, fractaldb-1k, fractaldb-10k, fractaldb-search, ofdb-1k, ofdb-21k, 1p-frac, ifs3d, mv-fractaldb-1k, exfractaldb-1k, 3d-ofdb-1k or fractal-color-1k (default: that of --formula, or " preset_ ")"}, \
    {"preset-file", "FILE", OPTION_TEXT, offsetof(parameters, job.preset_file), .column = COLUMN, .help = "INI file with ranges for --preset, instead of the built-in configs/classes.cfg"}, \
    {"class", "FILE|DIR", OPTION_TEXT, offsetof(parameters, job.class_file), .column = COLUMN, .help = "take the classes of synth from this CSV file, or from the class files of a published script in a folder, instead of --preset. Their numbers are the labels, 0 to N - 1, and decide --classes. --preset 1p-frac, ofdb-1k or fractaldb-1k then says how fractals are drawn from them"}, \
    {"draw", "WHAT", OPTION_TEXT, offsetof(parameters, job.draw), .column = COLUMN, .help = "what an image of a fractal shows: patches or points, as in the workload synth (default: patches)"}, \
    {"min-lit", "SHARE", OPTION_REAL, offsetof(parameters, job.min_lit), .maximum = 0.5, .column = COLUMN, .help = "replace the weights of fractal classes whose images have a smaller expected share of set pixels than SHARE, as in the workload synth; 0.01 replaces nearly black images (default: none)"}, \
    {"res", "PIXELS", OPTION_COUNT, offsetof(parameters, job.res), .fallback = res_, .minimum = 1, .maximum = 4096, .column = COLUMN, .help = "width and height of the canvas of synth images" res_words},                                                            \
    {"out-res", "PIXELS", OPTION_COUNT, offsetof(parameters, job.out_res), .minimum = 1, .maximum = 4096, .column = COLUMN, .help = "give images this width and height, as --fit says; none: keep their size (default: " out_res_ ")"},      \
    {"fit", "HOW", OPTION_CHOICE, offsetof(parameters, job.fit), .fallback = fit_, .choices = fit_names, .column = COLUMN, .help = "how images get the size --out-res: resize changes width and height; crop cuts out a part at a random position, once per sample (with --feed load, in each epoch); random-resized-crop cuts out a random part of a training sample in each epoch and resizes it; test samples are only resized (with --feed load, until the shorter side has 256/224 of --out-res; then the centre is cut out). HOW is one of"},                                                                                         \
    {"exact-resize", NULL, OPTION_FLAG, offsetof(parameters, job.exact_resize), .column = COLUMN, .help = EXACT_RESIZE_HELP}, \
    {"channels", "1|3", OPTION_COUNT, offsetof(parameters, job.channels), .fallback = channels_, .minimum = 1, .maximum = 3, .column = COLUMN, .help = "number of channels of the images, if --out-res is given"}, \
    {"labels-of", "WHICH", OPTION_CHOICE, offsetof(parameters, job.labels_of), .fallback = "fine", .choices = cifar_label_names, .column = COLUMN, .help = CIFAR_LABELS_HELP}
/* clang-format on */

/* The rows for --mean and --std, two texts, with what their defaults are. */
/* clang-format off */
#define MEAN_OPTIONS(mean_, std_, column_, no_mean, no_std) \
    {"mean", "M[,M,M]", OPTION_TEXT, mean_, .minimum = -1e6, .maximum = 1e6, .column = column_, .help = "normalise samples with this mean and the standard deviation of --std: one value, or one per channel; for bytes, both refer to values scaled to 0 to 1 (default: " no_mean ")"}, \
    {"std", "S[,S,S]", OPTION_TEXT, std_, .minimum = 1e-6, .maximum = 1e6, .column = column_, .help = "normalise samples with this standard deviation and the mean of --mean: one value, or one per channel (default: " no_std ")"}
/* clang-format on */

/* Parses --mean and --std for samples of this many channels; 0: any number of them. STATUS_USAGE if a value
 * is no number or out of range, or if there are too few or too many. */
enum status job_read_mean(const char *mean, const char *std, uint32_t channels,
                          double means[DATA_CHANNELS_MAX], double deviations[DATA_CHANNELS_MAX]);

/* If an option of JOB_OPTIONS has no effect with these parameters, returns what it needs, such as "--data
 * synth". Otherwise returns NULL. */
const char *job_lacking(const struct job_parameters *parameters, const char *option);

/* Returns whether an option is about samples that the trainer opens, and not about those of job.given. */
bool job_opens_by(const char *option);

/* Returns whether samples are generated by synth, also as a part of a mixture. */
bool job_generates(const struct job_parameters *parameters);

/* Appends the values of all options of JOB_OPTIONS except --data, for a checkpoint. */
enum status job_samples(const struct job_parameters *parameters, struct option_values *samples);

/* Sets options of JOB_OPTIONS that were not given to their values in a checkpoint. If --data differs, sets
 * only the options that determine the shape of a sample, such as --res. Strings in `parameters` point into
 * the checkpoint. STATUS_FAILED if the checkpoint has a value that its option does not accept; STATUS_USAGE
 * if --data was not given, and the checkpoint has a URL without its secrets, or a folder that does not exist.
 */
enum status job_take_samples(const struct options *given, const struct checkpoint *checkpoint,
                             struct job_parameters *parameters);

/* Writes the options of JOB_OPTIONS whose values differ from those in the checkpoint to `words`:
 * "--preset uji in the checkpoint, visualatom now". `data` is --data now, and `samples` is from
 * job_samples(). Leaves out the option `besides` (NULL: none). Returns the number of these options. */
size_t job_differences(const struct checkpoint *checkpoint, const char *data,
                       const struct option_values *samples, const char *besides, char *words, size_t size);

/* Returns all threads that the run may use, and no device. */
struct resources job_all_threads(void);

/* If --data or --test-data is a URL, removes its secrets from the parameters, because rows, messages and
 * checkpoints contain this text. */
void job_hide_secrets(struct job_parameters *parameters);

/* Sets the measure `skipped`: the number of broken samples that were left out, if it is known and --on-error
 * has an effect. */
void job_put_skipped(const struct data *data, struct row *row);

/* Opens the data that these parameters choose. The caller closes the data, even after a failure. */
enum status job_open_data(const struct job_parameters *parameters, struct data *data);

/* Returns `batch`, but at most `most`, the number of samples that the set `part` has for a batch. If `says`
 * is set, a note says that the batch is smaller than `batch`, which is the default if `given` is false. */
uint64_t job_limit_batch(uint64_t batch, uint64_t most, enum data_part part, bool says, bool given);

/* Implements largest.given() of both workloads. */
uint64_t job_batch(const void *parameters);

/* Implements repartition() of `train`, `infer` and `exchange`: does nothing. Other workloads repartition to
 * time rank 0 alone; `infer` has only one rank, and the other two always run on all ranks. */
enum status job_stay(void *input, void *parameters, const struct partition *partition);

#endif
