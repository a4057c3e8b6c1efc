/* Sources of streams (sources.c): data sets, generated images and rows of embeddings. */
#ifndef FDSL_LIB_SOURCES_H
#define FDSL_LIB_SOURCES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "data/dataset.h"
#include "data/mixture.h"
#include "data/remote.h"
#include "lib/call.h"
#include "lib/images.h"
#include "lib/rows.h"

/* Data sets and global batches must have fewer samples, because draw_lanes() cannot order more. */
#define LIB_SAMPLES_MAX (UINT32_C(1) << 31)

struct fdsl_source;

/* A mixture as a source of streams (mix.c). */
struct source_mixture {
    struct mixture_request request; /* without what a stream's configuration decides: the orders, the seed and
                                       the batch */
    struct fdsl_source *sources[MIXTURE_SOURCES]; /* each is used by the mixture */
    uint32_t classes[MIXTURE_SOURCES];            /* of each source; 0: not known */
    uint32_t positions;                           /* samples of an epoch */
    const char **class_names;                     /* owned; NULL: those of a source, or none */
};

/* Ignores NULL. */
void mix_free(struct source_mixture *mix);

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
