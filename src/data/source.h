/* Sample sources produce the samples of prepared datasets.
 *
 * A source can produce each sample alone, from the sample's number, and always with the same bytes. Therefore
 * ranks can share the work, and an interrupted run can continue. To add a source, define a `const struct
 * source` and add it to source_table in source.c. */
#ifndef FDSL_DATA_SOURCE_H
#define FDSL_DATA_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/generator.h"
#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/image_formats.h"

#define SOURCE_MEMBERS_MAX 4
#define SOURCE_COLUMNS_MAX 4
#define SOURCE_TEXT_MAX    4097       /* bytes of a column's text, with the terminating zero; any key fits */
#define SOURCE_ENDLESS     UINT64_MAX /* number of samples of an unlimited source */

struct source_member {
    const char *extension; /* valid while the source is open */
    void *bytes;           /* from malloc; owned by the sample */
    size_t size;
};

/* One sample. Its members are sorted by extension. */
struct source_sample {
    struct source_member members[SOURCE_MEMBERS_MAX];
    size_t count;
    const char *key; /* key of the sample in its original data set, or NULL; valid while the source is open */
    uint64_t class_folder; /* set by --prepare, for INDEX_IMAGEFOLDER */
    char name[48];         /* for INDEX_IMAGEFOLDER: name of the file without its extension; "": its number */
    const char *image;     /* only of `dataset`: extension of the member that is the image, or NULL */
    bool broken;           /* its image is broken, so it was copied unchanged instead of resized */
    bool in_folder; /* the label is the number of a class folder, of a word or of a table, which the source
                       added as the member "cls" */
};

/* Properties of an open source. */
struct source_facts {
    uint64_t samples;      /* number of samples, with those that open() left out; SOURCE_ENDLESS: unlimited */
    uint64_t sample_bytes; /* approximate size of a sample; determines the number of shards */
    uint64_t stored_bytes; /* approximate size of a sample that --prepare stores, if it is not sample_bytes;
                              or 0 */
    uint64_t rows;         /* only for source->whole_files: number of rows in all files */
    uint64_t identity;     /* hash of the inputs, such as files that the options name; `dataset` hashes
                              only the keys and the edges of its samples */
    int published_digits; /* digits of class folders, if files have the names of a published data set; or 0 */
    uint64_t period;      /* of generated samples: sample n + period equals sample n; 0: none does */
    bool masks;           /* samples have the member MASK_MEMBER, and their label is 0 */
    bool multi_hot; /* samples have the member MULTI_HOT_MEMBER, and their label is 0: see source.multi_hot()
                     */
    bool colors;    /* generated images have colours; otherwise all their channels are equal */
    bool class_folders; /* samples are in class folders, so the samples of a class are consecutive */
    const char *const *class_names; /* names of the classes, or NULL; valid while the source is open */
    uint32_t class_count;           /* number of names */
    uint32_t
        classes;    /* of generated images with labels 0 to N - 1, and of multi-hot labels: N; otherwise 0 */
    bool caches;    /* generating keeps files in synth_values.cache_dir */
    bool uncounted; /* open() left out an unknown number of samples that have no numbers */
    const uint8_t *held; /* by a sample's number: 1 if it is held out for testing; valid while the source is
                            open. NULL: no sample is */
};

/* ---- Values of the sources' options ----
 * --prepare parses its command line into these structs. Other callers of source_open() fill them.
 * Choices without a value are -1; other values that are 0 or NULL are not given. */

/* The values of `synth`. --prepare fills only the first two members, because the workload has the other
 * options. */
struct synth_values {
    const char *variant; /* NULL: omp, or naive if the build lacks omp */
    int encoding;        /* enum source_encoding */
    int names;           /* 1: names of the published data set */
    /* The classes. `class_file` has classes numbered 0 to N - 1, of which a `preset` of fractals says how
     * they are drawn. Otherwise a preset, of `preset_file` or built-in; NULL: that of the formula. `formula`
     * NULL: the one of the classes, else "uji". Images of the formula must have labels. */
    const char *formula, *preset, *preset_file, *class_file;
    uint32_t classes, res; /* classes 0: all of class_file or of the preset, or 10 if a preset has any
                              number */
    const char *draw;      /* what fractals show: patches or points; NULL: patches */
    double min_lit;        /* of fractals, as struct synth has it */
    const char *cache_dir; /* folder that keeps the orbits of fractals; NULL: none */
    bool cache_shared;     /* `cache_dir` is not refused if the formula has no orbits: others use it, too */
    uint32_t out_res,
        channels;   /* of the delivered u8 images; 0: `res`, and three channels of colours, else one */
    bool crop;      /* images of another size than `res` are cut out, not resized */
    uint64_t batch; /* images per run of the variant; 0: 32 */
};

/* The values of `counter`. */
struct counter_values {
    const char *shape; /* lengths of the axes: "3,8,64,64" */
    int type;          /* enum dtype: u8, f16 or f32 */
    uint64_t seed;
    uint64_t classes; /* sample n has the label n mod `classes`; 0: no labels */
};

/* The values of `scenes`. */
struct scenes_values {
    uint64_t seed, classes; /* classes: at least 1, at most 1000 */
};

/* The values of `digits` and `clips`. `clips` does not use `encoding`. */
struct generated_values {
    uint64_t seed;
    int encoding; /* enum source_encoding */
};

/* The values of `idx`, `cifar` and `cifar100`. */
struct labelled_values {
    const char *source; /* the file; for `cifar` and `cifar100`, several files separated by commas */
    const char *labels; /* only for `idx`: file of the labels; NULL: its name follows from `source` */
    int labels_of;      /* only for `cifar100`: index in cifar_label_names */
    int encoding;       /* enum source_encoding */
};

/* The values of `dataset`. */
struct dataset_values {
    const char *source;                  /* folder or URL */
    const struct record_format *records; /* if not NULL: of the folder, only files of this format are read */
    bool test_set;                       /* `records` only: the test set, not the training set */
    const char *option;    /* the option that names the data set, for messages; NULL: "source" or "data" */
    const char *cache_dir; /* folder that keeps the files of a URL and unpacked copies; NULL: none */
    uint64_t cache_bytes;  /* maximum size of `cache_dir`; 0: unlimited */
    const char *image, *label, *member;
    const char *labels; /* table of labels (data/label_names.h), or NULL */
    uint64_t permute;   /* seed of the order; 0: the order of the data set */
    uint64_t out_res, channels, quality;
    int fit, encoding; /* -1: not given */
};

/* Arguments for opening a source. */
struct source_request {
    const void *parameters;        /* the source's struct of option values; read by open(), but its texts are
                                      valid while the source is open */
    const struct options *options; /* the command line of --prepare, or NULL */
    void *workload_parameters;     /* if `options` is set: option values of source->workload, or NULL */
    struct resources resources;
    const char *target; /* folder that the samples will be written to, or NULL; it need not exist yet */
    bool skip;          /* only for `dataset`: leave out broken samples, with a warning */
    double test_share;  /* only for `dataset`: share of each class that is held out for testing; 0: none */
    bool only_held; /* only for `dataset`: only samples that are held out will be read; open() neither checks
                       the others nor reads more than their labels */
    bool allow_empty; /* only for `dataset`: class folders may be empty, as in a small test set; with
                         `target`, with a warning */
    bool incomplete;  /* only for `dataset`: keep samples without an image or a label */
    bool streamed;    /* only for `dataset`: a stream will read the samples, so messages do not advise
                         --on-error skip */
    const void *like; /* only for `dataset`: state of another open data set, or NULL. If the labels of both
                         are the numbers of class folders, both must have the same folders. If they are words,
                         those of `like` get the numbers that they have in this set */
};

/* Produces sample `number`. `sample` is zeroed by the caller, who frees it, even after a failure. */
typedef enum status source_make_one(const void *state, uint64_t number, struct source_sample *sample);

struct source {
    const char *name, *summary;

    /* Options of the source. If option_spec.column is set, the value of the option affects the samples. It is
     * not set for paths of inputs, because source_facts.identity covers the inputs. */
    const struct option_spec *options;
    size_t option_count;
    size_t parameters_bytes;

    /* Workload whose options the source also accepts, or NULL. `indifferent` is NULL or a NULL-terminated
     * list of the workload's options that do not affect the samples. */
    const char *workload;
    const char *const *indifferent;

    /* Each sample is a complete file of rows, with a file of their hashes. --prepare then writes all samples,
     * and always as single files (--store files). */
    bool whole_files;

    /* Columns that source_describe() fills for samples.csv. NULL-terminated, at most SOURCE_COLUMNS_MAX. */
    const char *const *columns;

    /* Checks the options, fills `facts` and creates the state. `*state` is NULL before the call. The caller
     * calls close(), even after a failure, unless `*state` or close() is NULL. */
    enum status (*open)(const struct source_request *request, struct source_facts *facts, void **state);
    void (*close)(void *state);

    /* Produce samples; see source_make(). A source sets either make() or make_one(). make_one() must be
     * thread safe. */
    enum status (*make)(void *state, uint64_t first, uint64_t count, struct source_sample *samples);
    source_make_one *make_one;

    /* Says that a sample will be made soon, or its label read, so that its file can be requested. Samples are
     * named in ascending order; a lower number begins another pass. Returns false if enough is requested; the
     * caller then names the sample again later. NULL if samples need no requests. */
    bool (*ask)(void *state, uint64_t number);

    /* Returns whether open() left out a broken sample. Such samples keep their numbers, so that other samples
     * have the same numbers as in the undamaged data set. make(), locate() and describe() must not be called
     * for them; label() returns UINT64_MAX. NULL: no sample is left out. */
    bool (*lost)(const void *state, uint64_t number);

    /* Creates a generator. It generates the values of the samples' "npy" members, without headers and labels.
     * The caller closes the generator before the state. NULL if the source has no generator. */
    enum status (*generate)(void *state, const struct generator_request *request,
                            struct generator **generator);

    /* Returns the label of a sample without producing the sample. UINT64_MAX, with a message, if the sample
     * has no valid label. Required if generate() is set or describe() is NULL. Only one thread may call
     * label(), make() and ask() of a state. */
    uint64_t (*label)(const void *state, uint64_t number);

    /* Writes the multi-hot label of a sample to `row`, multi_hot_words() words (data/mixing.h), without
     * producing the sample; facts->multi_hot is set. STATUS_FAILED, with the location of the sample, if it
     * has no valid label. Called as label(). NULL: the source has no such samples. */
    enum status (*multi_hot)(const void *state, uint64_t number, uint32_t *row);

    /* Prepends the location of a sample, such as its file and its key, to the message. Returns `status`. This
     * pointer is NULL for sources whose samples have only a number: generated samples, `idx`, `cifar` and
     * `cifar100`. */
    enum status (*locate)(const void *state, uint64_t number, enum status status);

    /* Writes the text of each column for a sample. NULL if the label is the only column. */
    void (*describe)(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX]);
};

/* `columns` of a source whose only column is the label. */
extern const char *const source_label_columns[];

/* All sources, NULL-terminated. */
extern const struct source *const source_table[];

/* Checks that the folder `target` (may be NULL) is not inside the folder `source`. STATUS_USAGE otherwise:
 * a run that continues an interrupted run would read the output of the interrupted run as input. */
enum status source_check_target(const char *source, const char *target);

/* Returns the source of this name, or NULL. */
const struct source *source_find(const char *name);

/* Produces samples first to first + count - 1 in `samples`, which is zeroed by the caller. The caller frees
 * each sample, even after a failure. */
enum status source_make(const struct source *source, void *state, uint64_t first, uint64_t count,
                        struct source_sample *samples);

/* Announces that the samples from `*next` to `end` - 1 will be made soon: see source.ask(). Advances `*next`
 * to the first sample that was not accepted. */
void source_ask(const struct source *source, void *state, uint64_t *next, uint64_t end);

/* Produces the samples whose numbers are in `numbers`. `samples` is as for source_make(). */
enum status source_make_listed(const struct source *source, void *state, const uint64_t *numbers,
                               uint64_t count, struct source_sample *samples);

/* Writes the text of each column for a sample. */
void source_describe(const struct source *source, const void *state, uint64_t number,
                     char texts[][SOURCE_TEXT_MAX]);

/* ---- Reading samples without a folder ---- */

/* An open source. */
struct source_reader {
    const struct source *source;
    void *state;
    bool skip; /* as in the request */
    struct source_facts facts;
};

/* Opens the source `name`, which must exist, with the values in request->parameters. The caller closes
 * `reader`, even after a failure. */
enum status source_open(const char *name, const struct source_request *request, struct source_reader *reader);
void source_close(struct source_reader *reader);

struct dataset;
struct dataset_sample;

/* For the source `dataset` only: return its data set, and the sample with this number (NULL if open() left it
 * out). Both are valid while the source is open. */
const struct dataset *source_dataset_set(const struct source_reader *reader);
const struct dataset_sample *source_dataset_sample(const struct source_reader *reader, uint64_t number);

/* Returns the member with this extension, or NULL. */
const struct source_member *source_member(const struct source_sample *sample, const char *extension);

/* ---- Producing samples ---- */

FDSL_C_BEGIN

/* Fills `values` with the `count` values of sample `number`. They are uniformly distributed: bytes from 0 to
 * 255, float16 in [1, 2), float32 in [0, 1). The values are computed from consecutive Philox blocks. A byte
 * uses one byte of a block, a float16 uses two bytes, and a float32 uses four. The Philox key is the seed.
 * The counter is (block, low word of `number`, high word of `number`, 0x4C4F4144). */
void counter_fill(uint64_t seed, uint64_t number, enum dtype type, size_t count, void *values);

FDSL_C_END

/* File formats of an image in a sample. */
#define SOURCE_JPEG_QUALITY 90
enum source_encoding { SOURCE_PNG, SOURCE_NPY, SOURCE_JPEG };
extern const char *const source_encodings[];  /* option values, in enum order */
extern const char *const source_extensions[]; /* extensions of the members, in enum order */

/* Encodes an image as a PNG file, or with SOURCE_JPEG as a JPEG file. The caller frees `*bytes`. */
enum status source_encode(int encoding, int quality, const uint8_t *pixels, const struct png_shape *shape,
                          void **bytes, size_t *size);

/* Adds a member and takes ownership of `bytes`. Does not check SOURCE_MEMBERS_MAX. */
void source_add(struct source_sample *sample, const char *extension, void *bytes, size_t size);

/* Adds the encoded image as the member "png", or with SOURCE_JPEG as the member "jpg" of quality
 * SOURCE_JPEG_QUALITY. */
enum status source_add_image(struct source_sample *sample, int encoding, const uint8_t *pixels,
                             const struct png_shape *shape);

/* Adds the member "cls": the label in decimal digits. */
enum status source_add_label(struct source_sample *sample, uint64_t label);

/* Adds the member "npy" with this type and shape (see npy_header_make()) and a copy of the `bytes` bytes of
 * `values`. If `values` is NULL, the values are zero. If `room` is not NULL, sets `*room` to the
 * address of the member's values, which the caller then fills. */
enum status source_add_array(struct source_sample *sample, const char *type, const char *shape,
                             const void *values, size_t bytes, void **room);

/* Frees the sample's members and leaves it empty. */
void source_sample_free(struct source_sample *sample);

/* Implements source_make() by calling `make` for each sample, in parallel if built with OpenMP. */
enum status source_make_all(source_make_one *make, const void *state, uint64_t first, uint64_t count,
                            struct source_sample *samples);

#endif
