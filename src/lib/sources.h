/* Sources of streams (sources.c): data sets, generated images and rows of embeddings. */
#ifndef FDSL_LIB_SOURCES_H
#define FDSL_LIB_SOURCES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "data/dataset.h"
#include "data/remote.h"
#include "lib/call.h"
#include "lib/images.h"
#include "lib/rows.h"

/* Data sets and global batches must have fewer samples, because draw_lanes() cannot order more. */
#define LIB_SAMPLES_MAX (UINT32_C(1) << 31)

struct fdsl_source {
    bool generates; /* the source is `images`; otherwise it is `rows` or `dataset` */
    struct images images;
    struct rows *rows; /* NULL: none */
    struct dataset dataset;
    struct remote_options remote;
    char *path, *cache_dir; /* copies; `dataset` refers to them */
    const char *const *class_names;
    uint32_t classes;
    uint64_t hash;
    atomic_uint users; /* the caller, and each stream */
    pid_t process;
    struct remote_cancel cancel;
    struct opening *opening; /* of fdsl_source_begin(); NULL when fdsl_source_wait() has returned FDSL_OK */
};

/* Checks that a handle belongs to this process, and was not opened before fork(). `name` is its argument. */
enum status lib_check_process(const char *name, pid_t process);

/* Checks a time that a caller waits. `name` is its argument. */
enum status lib_check_seconds(const char *name, double seconds);

/* Checks that a source is open. */
enum status lib_source_check(const struct fdsl_source *source);

uint32_t lib_source_samples(const struct fdsl_source *source);

/* Ends one use of a source. The last one frees it. */
void lib_source_release(struct fdsl_source *source);

#endif
