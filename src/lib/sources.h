/* Sources of streams: data sets, mixtures and generated images (sources.c), and rows of embeddings (rows.c).
 */
#ifndef FDSL_LIB_SOURCES_H
#define FDSL_LIB_SOURCES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "data/dataset.h"
#include "data/device_batches.h"
#include "data/image.h"
#include "data/mixture.h"
#include "data/random_draws.h"
#include "data/remote.h"
#include "lib/call.h"
#include "synth/input.h"

/* ---- Generated images ---- */

struct images {
    struct synth synth;
    int generator; /* index of lib_find_generator() */
    uint32_t count;
    uint64_t fresh; /* increment of image numbers per epoch */
    uint64_t hash;  /* of everything that determines the pixels, but not of the output format */
};

/* Returns the largest label plus 1. */
static inline uint32_t images_classes(const struct images *images)
{
    const struct synth *synth = &images->synth;
    uint32_t classes = 0;
    for (uint32_t c = 0; c < synth->class_count; c++)
        classes = synth->rows[c].id >= classes ? synth->rows[c].id + 1 : classes;
    return classes;
}

/* Sets the type and the layout of `output`, and `*transform` to the hash of the output format. */
void images_get_format(const struct images *images, struct image_output *output, uint64_t *transform);

/* Opens what a mixture needs of generated images on config->device: the generator, for `batch` images. */
enum status images_mixed_source(const struct images *images, const struct fdsl_stream_config *config,
                                uint32_t batch, struct device_mixed_source *source);

/* A source of generated images. */
struct images_plan {
    struct stream_plan plan;
    struct device_order order; /* lists the same samples as `plan`; `fresh`, `host_numbers` and `captures` are
                                  not set */
    uint64_t (*number)(const void *context, uint64_t epoch, uint32_t number); /* as in struct
                                  generated_stream_request; NULL: none */
    bool even; /* all steps have the same number of samples on this rank */
};

/* Opens a stream in host memory (`*stream`) or on config->device (`*batches`; `*stream` is its stream). The
 * images must outlive the stream. */
enum status images_stream_open(const struct images *images, const struct fdsl_stream_config *config,
                               const struct images_plan *plan, struct stream **stream,
                               struct device_batches **batches);

/* ---- Rows of embeddings ---- */

/* Some rows of a set of embeddings. Which ones does not change; threads may share them. */
struct rows;

/* Open the rows of fdsl_rows_open() and fdsl_rows_select(). Both check the fields of `config`. `*rows` is
 * NULL after an error. When another thread sets `*cancel`, rows_select() fails soon. */
enum status rows_open(const struct fdsl_rows_config *config, struct rows **rows);
enum status rows_select(struct rows *from, const struct fdsl_select_config *config, const atomic_bool *cancel,
                        struct rows **rows);

/* Frees rows; NULL is allowed. What other rows share with them stays. */
void rows_free(struct rows *rows);

uint32_t rows_count(const struct rows *rows); /* at least 1 */
bool rows_labelled(const struct rows *rows);
uint64_t rows_hash(const struct rows *rows); /* struct fdsl_source_info.hash */

/* Sets the fields of `info` that describe rows, and `samples`, `bytes` and `files`. */
void rows_describe(const struct rows *rows, struct fdsl_source_info *info);

/* The samples of a stream of rows. */
struct rows_format {
    enum dtype type;
    uint32_t width;     /* values per row, with the padding */
    uint64_t transform; /* hash of both */
};

/* Checks `dtype`, and describes what the stream delivers. */
enum status rows_check_format(const struct rows *rows, const struct fdsl_stream_config *config,
                              struct rows_format *format);

/* Lists the numbers of rows in host memory, if only a device has them. To be called before rows_order().
 * Thread safe. STATUS_EXHAUSTED if memory runs out, or the failure of the copy. */
enum status rows_list(struct rows *rows);

/* The order of epoch `epoch`: which row of the files is at a position. Without `shuffle`, the order of
 * `rows`. */
struct rows_order {
    const struct rows *rows;
    bool shuffle;
    struct draw_order order;
};
struct rows_order rows_order(const struct rows *rows, bool shuffle, uint64_t seed, uint64_t epoch);
uint32_t rows_order_at(const struct rows_order *order, uint32_t position);

/* The order of a stream. */
struct rows_plan {
    struct stream_plan plan; /* lists numbers of rows in the files (rows_order_at()) */
    uint64_t seed;
    bool shuffle;
    uint32_t global, rank, ranks; /* rows of a step of all ranks */
};

/* Opens a stream in host memory (`*stream`) or on config->device (`*batches`; `*stream` is its stream, and
 * batches have no list of numbers). `rows` must outlive the stream. */
enum status rows_stream_open(struct rows *rows, const struct fdsl_stream_config *config,
                             const struct rows_format *format, const struct rows_plan *plan,
                             struct stream **stream, struct device_batches **batches);

/* ---- Sources ---- */

/* Data sets and global batches must have fewer samples, because draw_lanes() cannot order more. */
#define LIB_SAMPLES_MAX (UINT32_C(1) << 31)

struct fdsl_source;

/* A mixture as a source of streams. */
struct source_mixture {
    struct mixture_request request; /* without what a stream's configuration decides: the orders, the seed and
                                       the batch */
    struct fdsl_source *sources[MIXTURE_SOURCES]; /* each is used by the mixture */
    uint32_t classes[MIXTURE_SOURCES];            /* of each source; 0: not known */
    uint32_t positions;                           /* samples of an epoch */
    const char **class_names;                     /* owned; NULL: those of a source, or none */
};

/* Sets the order of the sources from a stream's configuration. */
static inline struct mixture_request mix_request(const struct source_mixture *mix,
                                                 const struct fdsl_stream_config *config)
{
    struct mixture_request request = mix->request;
    request.seed = config->seed;
    request.batch = config->batch_size * config->world_size;
    request.drop_last = config->drop_last;
    for (uint32_t k = 0; k < request.count; k++)
        if (request.sources[k].samples) {
            request.sources[k].lanes = config->lanes;
            request.sources[k].shuffle = config->shuffle ? config->shuffle_buffer : 0;
        }
    return request;
}

struct fdsl_source {
    bool generates; /* the source is `images`; otherwise it is `rows` or `dataset` */
    struct images images;
    struct rows *rows;          /* NULL: none */
    struct source_mixture *mix; /* NULL: none */
    struct dataset dataset;
    struct remote_options remote;
    char *path, *cache_dir, *labels; /* copies; `dataset` refers to them */
    const char *const *class_names;
    uint32_t classes;
    uint64_t hash;
    atomic_uint users; /* the caller, and each stream */
    pid_t process;
    struct remote_cancel cancel;
    struct opening *opening; /* of fdsl_source_begin(); NULL when fdsl_source_wait() has returned FDSL_OK */
};

/* Work that a thread of the library does, so that the caller can handle signals. */
struct background {
    enum status (*work)(void *context);
    void *context;
    pthread_t thread;
    bool joined; /* there is no thread, or it has ended */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;              /* everything below is set; protected by `lock` */
    struct failure failure; /* STATUS_OK: the work succeeded */
    char warnings[4096];
};

/* Starts the work. If it fails, there is no thread. The caller calls lib_background_end() in any case, also
 * if `background` is zeroed and was never started; it waits for the thread. */
enum status lib_background_start(struct background *background, enum status (*work)(void *context),
                                 void *context);
void lib_background_end(struct background *background);

/* Waits for the work, at most this long. Returns whether it has ended; then sets `*status` to its result, and
 * repeats its message and its warnings in the calling thread. */
bool lib_background_wait(struct background *background, double seconds, enum status *status);

/* Replaces a text of a caller, unless it is NULL, by a copy, which is also stored in `*copy`. */
enum status lib_copy_text(const char **text, char **copy);

/* Checks that a handle belongs to this process, and was not opened before fork(). `name` is its argument. */
enum status lib_check_process(const char *name, pid_t process);

/* Checks a time that a caller waits. `name` is its argument. */
enum status lib_check_seconds(const char *name, double seconds);

/* Checks that a source is open. */
enum status lib_source_check(const struct fdsl_source *source);

uint32_t lib_source_samples(const struct fdsl_source *source);

/* Checks the arguments, and allocates a source that is not open. `size` is that of the configuration.
 * lib_source_end() returns the result of opening a source. If opening failed, it closes the source, if there
 * is one. */
enum status lib_source_new(const void *config, size_t size, struct fdsl_source **source);
enum fdsl_status lib_source_end(enum status status, struct fdsl_source **source);

/* Ends one use of a source. The last one frees it. */
void lib_source_release(struct fdsl_source *source);

#endif
