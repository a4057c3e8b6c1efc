/* What all functions of the library share: errors, the caller's environment, and checks of arguments. fdsl.c
 * implements it, and late.c late_open(). */
#ifndef FDSL_LIB_CALL_H
#define FDSL_LIB_CALL_H

#include <fenv.h>
#include <locale.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "lib/fdsl.h"

/* Keeps the message of an error for fdsl_error(), and returns the error code of the library. */
enum fdsl_status lib_relay(enum status status);

/* Returns FDSL_INVALID with this message. */
enum fdsl_status lib_invalid(const char *text);

/* The state of the calling thread that a call must restore. */
struct environment {
    fenv_t floating_point;
    locale_t locale, c_locale;
    int device;
};

/* Sets the default floating-point environment (round to nearest, no flushing of subnormals), so that images
 * do not depend on the caller's environment. Sets the locale "C", because some locales cannot parse "0.5" in
 * files. The caller calls lib_leave(), even after an error. */
enum status lib_enter(struct environment *before);
void lib_leave(struct environment *before);

/* Checks arguments and fields. STATUS_USAGE with a message that begins with the name of the argument. */
enum status lib_check_count(const char *field, uint32_t value, uint32_t least, uint32_t most);
enum status lib_check_flag(const char *name, int value); /* 0 or 1 */

/* lib_check_given() refuses NULL. lib_check_struct() also checks the size of a caller's struct, which is its
 * first member. */
enum status lib_check_given(const char *name, const void *pointer);
enum status lib_check_struct(const char *name, const void *given, size_t own);

/* Sets a configuration to its defaults; `size` is what the caller takes for its size. */
enum fdsl_status lib_set_config(void *config, size_t size, const void *defaults, size_t own);

/* Gets the index of `text` in `names`, a list that ends with NULL. */
enum status lib_find_name(const char *field, const char *text, const char *const *names, int *index);

/* Checks `mean` and `std`: their range and, for images of bytes, that they have their defaults. */
enum status lib_check_scale(const double *mean, const double *std, uint32_t channels, bool bytes);

/* Gets the number of CPU threads: `given` if it is not 0, else OMP_NUM_THREADS if it is valid, else all that
 * the process may use. `field` is the name of `given`. */
enum status lib_threads(const char *field, int given, int *threads);

enum status lib_check_device(int device);

/* ---- Generators of streams (fdsl.c) ---- */

struct generator;
struct synth;

/* Checks the fields of `config` that describe images, and builds the input. The caller frees the input with
 * synth_free(), even after an error. */
enum status lib_images_input(const struct fdsl_config *config, struct synth *synth);

/* Gets the index of a generator by its name; "auto" has index 0. */
enum status lib_find_generator(const char *name, int *index);

/* Opens a generator by its index, on a device or with its own threads. Messages name the field `num_threads`.
 * The generator does not use or change the caller's floating-point environment. `synth` must outlive it. The
 * caller closes it with generator_close(). */
enum status lib_generator_open(const struct synth *synth, int index, int device, int threads, uint32_t batch,
                               struct generator **generator);

/* Returns whether a generator on a device needs the image numbers in host memory, too. */
bool lib_generator_needs_host(int index);

/* Gives a generator on the host its own threads. `*generator` is taken over, also after a failure: it is then
 * closed. */
enum status lib_pooled_open(int threads, struct generator **generator);

/* Calls `work(context)`, in which parallel_for() uses this many threads. Returns its status, or that of
 * starting the threads. */
enum status lib_on_threads(int threads, enum status (*work)(void *context), void *context);

/* ---- What trainers use of streams (stream.c) ---- */

struct lib_stream_facts {
    uint32_t shape[4]; /* channels, depth, height, width */
    int type;          /* enum dtype */
    uint32_t samples, batch, rank, ranks,
        classes; /* batch: samples per step of a rank; classes 0: not known */
    bool multi_hot, mixed, drop_last;
    int device;
    uint64_t identity; /* hash of what decides its samples and their order; equal on all ranks */
};

/* STATUS_USAGE if the stream is not open, or if its batches are not images with labels, channels first. */
enum status lib_stream_facts(const struct fdsl_stream *stream, struct lib_stream_facts *facts);

/* The parts of a batch, in the memory of its stream. */
struct lib_batch_parts {
    const void *images;
    const int64_t *labels;
    const uint8_t *rows; /* of multi-hot labels */
    uint32_t count;
    float share; /* weight of a sample in its mixture; 1: not mixed */
    uint64_t epoch, step;
};
void lib_batch_parts(const struct fdsl_batch *batch, struct lib_batch_parts *parts);

/* ---- The ranks of a trainer (ranks.c), which implements machine/comm.h ---- */

/* Joins the ranks of the configuration, and sets the number of this rank. Collective. */
enum status lib_ranks_open(const struct fdsl_trainer_config *config, uint32_t *rank, uint32_t *ranks);
void lib_ranks_close(void);

/* ---- */

/* Opens the libraries that a data set at this path or URL needs: remote_options.prepare of libfdsl.
 * STATUS_UNAVAILABLE with the name of the missing library and the reason. Thread safe. */
enum status late_open(const char *url);

#endif
