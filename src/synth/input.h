/* The input of the workload `synth` (batches of VisualAtom images), as variants see it. */
#ifndef FDSL_SYNTH_INPUT_H
#define FDSL_SYNTH_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/portable.h"
#include "core/status.h"
#include "machine/memory.h"
#include "synth/atom.h"
#include "synth/noise.h"
#include "synth/output.h"

#define SYNTH_RES_MAX OUTPUT_RES_MAX /* pixels per side */

struct generator;
struct generator_request;

/* A call of a generator: the images to generate, at most one batch, and where to write them. */
struct synth_call {
    const uint64_t *numbers; /* image numbers, relative to synth->first; NULL: consecutive numbers */
    uint64_t first;          /* the first of consecutive image numbers, relative to synth->first */
    uint64_t count;
    uint8_t *images; /* synth_output_bytes() per image */
    int64_t *labels; /* one class number per image */
};

/* The input of the workload, which all runs share. Image j of run n has number g = first + n * stride + j.
 * Its class is classes[g % class_count], and its instance is g / class_count (integer division). Each rank
 * generates a contiguous part of one global batch of `stride` images, so the images of a global batch do not
 * depend on the number of ranks. */
struct synth {
    enum formula formula;
    uint32_t res;   /* side of the canvas in pixels */
    uint64_t batch; /* images per run on this rank */
    uint64_t seed, first, stride;
    uint64_t position;          /* index of this rank's first image in the global batch */
    struct synth_output output; /* how a canvas becomes the output image */

    /* If `call` is not NULL, a run ignores its run number and generates the images that `*call` names when
     * the run starts. Only `naive` and `omp` support this. */
    const struct synth_call *call;

    uint32_t class_count;
    struct atom_class *classes;
    size_t *spoke_offset; /* index of each class's first vertex in spoke_tables; class_count + 1 entries */
    float *spoke_tables;  /* cosines, then sines, then advances, spoke_offset[class_count] floats each */
    float gradients[NOISE_TABLE_COUNT];

    uint32_t vertices_max, orbits_max; /* maxima over the classes */
    uint64_t segments_max;             /* largest product vertices * orbits of any class */
};

/* The identity of an image. Together with a struct synth, it determines every bit of the image. */
struct synth_image {
    uint32_t class_index; /* index into `classes`; the class number is classes[class_index].id */
    uint64_t instance;
};

/* Returns the identity of image j of run number `run`. */
FDSL_HD struct synth_image synth_image_at(uint64_t first, uint64_t stride, uint32_t class_count, uint64_t run,
                                          uint64_t j)
{
    uint64_t number = first + run * stride + j;
    struct synth_image image = {0, number};
    if (class_count > 1) { /* 64-bit division is slow on a GPU */
        image.class_index = (uint32_t)(number % class_count);
        image.instance = number / class_count;
    }
    return image;
}

/* Returns the number of images in a run. */
static inline uint64_t synth_run_count(const struct synth *synth)
{
    return synth->call ? synth->call->count : synth->batch;
}

/* Returns the identity of image j of run number `run`. If synth->call is set, ignores `run` and returns the
 * identity of image j of the call. */
static inline struct synth_image synth_run_image(const struct synth *synth, uint64_t run, uint64_t j)
{
    const struct synth_call *call = synth->call;
    if (!call)
        return synth_image_at(synth->first, synth->stride, synth->class_count, run, j);
    return synth_image_at(synth->first, 1, synth->class_count,
                          call->numbers ? call->numbers[j] : call->first + j, 0);
}

FDSL_C_BEGIN

/* Sets synth->classes to `count` classes of a preset. If `preset_file` is NULL and the preset is a built-in
 * list, takes the first `count` classes of the list. Otherwise draws them from the ranges in section `preset`
 * of `preset_file`, or of the built-in file if `preset_file` is NULL. Free the classes with synth_free(),
 * even after an error. STATUS_USAGE for an unknown preset, an invalid file or too many classes;
 * STATUS_UNAVAILABLE if ranges must be read and this build has no inih; STATUS_EXHAUSTED if memory runs out.
 */
enum status synth_draw_classes(struct synth *synth, const char *preset_file, const char *preset,
                               uint32_t count);

/* Computes the tables of synth->classes, and the maxima over the classes. Free the tables with synth_free(),
 * even after an error. STATUS_USAGE if the available memory is too small; STATUS_EXHAUSTED if an allocation
 * fails. */
enum status synth_fill_tables(struct synth *synth);

/* Frees the classes and the tables; accepts a zeroed input. */
void synth_free(struct synth *synth);

FDSL_C_END

/* Returns the size of one canvas in bytes; a canvas has one byte per pixel. */
static inline size_t synth_image_bytes(const struct synth *synth)
{
    return (size_t)synth->res * synth->res;
}

/* Returns the size of one image in the output format, in bytes. The images of a batch are contiguous. */
static inline size_t synth_output_bytes(const struct synth *synth)
{
    const struct synth_output *output = &synth->output;
    return (size_t)output->res * output->res * output->channels * dtype_bytes(output->type);
}

/* Returns pointers to the tables of a class, which `synth` owns. */
static inline struct atom_spokes synth_spokes(const struct synth *synth, uint32_t class_index)
{
    const float *first = synth->spoke_tables + synth->spoke_offset[class_index];
    size_t stride = synth->spoke_offset[synth->class_count];
    struct atom_spokes spokes = {first, first + stride, first + 2 * stride};
    return spokes;
}

/* The source of a variant's noise. The oracle (oracle.h), which verifies images, must use the same noise. */
enum synth_noise {
    SYNTH_NOISE_COUNTER,  /* atom_noise(), which all bit-exact variants use */
    SYNTH_NOISE_UNIFORM4, /* cuRAND's Philox, one state per orbit, four uniform floats per call */
    SYNTH_NOISE_XORWOW    /* cuRAND's XORWOW; the host cannot replay it, so the oracle fetches the noise */
};

/* The traits of a synth variant. */
struct synth_traits {
    enum synth_noise noise;
    bool half;         /* the variant rounds noise to half precision before use */
    bool racy;         /* paints orbits in any order: a pixel has the gray of one orbit that covers it */
    bool outputs;      /* supports every output format and labels; other variants produce canvases only */
    const char *timed; /* stages that a run's time includes, for the column `timed_stages` */

    /* Fetches the noise of image j of run number `run`, even if this run has not been executed. `noise`
     * receives (x, y) for each vertex of orbit 0, then of orbit 1, and so on. `fetch_noise` is NULL unless
     * the noise is SYNTH_NOISE_XORWOW. */
    enum status (*fetch_noise)(void *state, uint64_t run, uint64_t j, float *noise);

    /* Returns the images of the latest run in the output format. They are in device memory if the variant's
     * platform is "cuda", else in host memory. The variant owns them. */
    const uint8_t *(*images)(const void *state);

    /* Returns the bytes of the variant's canvases in host memory. NULL for variants on a device. */
    size_t (*canvas_bytes)(const void *state);

    /* Creates a generator (core/generator.h) on a device, with batches of at most request->batch images.
     * `generator_open` is NULL if the variant does not support this. */
    enum status (*generator_open)(const struct generator_request *request, const struct synth *synth,
                                  struct generator **generator);

    /* Repeats the latest run and times each stage in seconds. NULL if stages cannot be timed separately. */
    enum status (*stages)(void *state, double *noise_s, double *vertices_s, double *painting_s);
};

/* The argument of fetch() of every synth variant. Each call copies one image of the latest run, so callers
 * need no second copy of the batch. */
struct synth_fetch {
    uint64_t j;      /* index of the image in the batch */
    uint8_t *pixels; /* the caller's buffer of synth_output_bytes() */
    int64_t label;   /* class number; variants without labels leave it unchanged */
};

/* Implements fetch() of a variant whose images and labels are in host memory. */
static inline enum status synth_fetch_host(const struct synth *synth, const uint8_t *images,
                                           const int64_t *labels, struct synth_fetch *fetch)
{
    size_t bytes = synth_output_bytes(synth);
    memcpy(fetch->pixels, images + fetch->j * bytes, bytes);
    fetch->label = labels[fetch->j];
    return STATUS_OK;
}

/* Checks that `canvas_bytes` bytes of canvases and the output images of a batch fit in host memory. If
 * synth->call is set, the output images are in the caller's memory and do not count. */
static inline enum status synth_check_memory(const struct synth *synth, size_t canvas_bytes)
{
    if (synth->call)
        return memory_check(canvas_bytes, "the canvases", "lower threads or res");
    return memory_check(synth->batch * synth_output_bytes(synth) + canvas_bytes, "the batch",
                        synth->output.fit == OUTPUT_WHOLE
                            ? OPTION_OR_FIELD("lower --batch or --res", "lower batch or res")
                            : OPTION_OR_FIELD("lower --batch or --out-res", "lower batch or out_res"));
}

#endif
