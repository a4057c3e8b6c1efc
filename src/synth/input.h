/* The workload `synth`: batches of VisualAtom images. Its input, as every variant sees it. */
#ifndef FDSL_SYNTH_INPUT_H
#define FDSL_SYNTH_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "machine/env.h"
#include "synth/atom.h"
#include "synth/noise.h"
#include "synth/output.h"

#define SYNTH_RES_MAX OUTPUT_RES_MAX /* pixels a side */

struct generator;

/* Images of any numbers, for a run: at most a batch of them. */
struct synth_list {
    const uint64_t *numbers; /* counted from synth->first */
    uint64_t count;
};

/* The input: constant over all runs. Image j of run n has the number g = first + n * stride + j; it shows
 * class g mod class_count, of which it is instance g div class_count. Ranks make consecutive shares of one
 * large batch of `stride` images, so together they make what one rank would. */
struct synth {
    enum formula formula;
    uint32_t res;   /* side of an image's canvas in pixels */
    uint64_t batch; /* images a run of this rank */
    uint64_t seed, first, stride;
    uint64_t position;          /* place of this rank's first image in the batch of all ranks */
    struct synth_output output; /* what is made of a canvas */

    /* Where it is not NULL, every run makes the images that are listed there by then, and not those of its
     * number. `naive` and `omp` can. */
    const struct synth_list *list;

    uint32_t class_count;
    struct atom_class *classes;
    size_t *spoke_offset; /* where a class's vertices begin in the tables below; class_count + 1 entries */
    float *spoke_tables;  /* cosines, then sines, then advances, spoke_offset[class_count] floats each */
    float gradients[NOISE_TABLE_COUNT];

    uint32_t vertices_max, orbits_max; /* over the classes */
    uint64_t segments_max;             /* the largest vertices * orbits of a class */
};

/* Which image: the identity that, with the seed, determines every bit of it. */
struct synth_image {
    uint32_t class_index; /* into classes; the class number is classes[class_index].id */
    uint64_t instance;
};

FDSL_HD struct synth_image synth_image_at(uint64_t first, uint64_t stride, uint32_t class_count, uint64_t run,
                                          uint64_t j)
{
    uint64_t number = first + run * stride + j;
    struct synth_image image = {0, number};
    if (class_count > 1) { /* a division that a GPU feels */
        image.class_index = (uint32_t)(number % class_count);
        image.instance = number / class_count;
    }
    return image;
}

/* How many images a run makes, and which is image j of it. */
static inline uint64_t synth_run_count(const struct synth *synth)
{
    return synth->list ? synth->list->count : synth->batch;
}

static inline struct synth_image synth_run_image(const struct synth *synth, uint64_t run, uint64_t j)
{
    return synth->list ? synth_image_at(synth->first, 1, synth->class_count, synth->list->numbers[j], 0)
                       : synth_image_at(synth->first, synth->stride, synth->class_count, run, j);
}

/* Bytes of one image's canvas: a byte of gray a pixel. */
static inline size_t synth_image_bytes(const struct synth *synth)
{
    return (size_t)synth->res * synth->res;
}

/* Bytes of one finished image. The images of a batch follow each other without a gap. */
static inline size_t synth_output_bytes(const struct synth *synth)
{
    const struct synth_output *output = &synth->output;
    return (size_t)output->res * output->res * output->channels * dtype_bytes(output->type);
}

/* The spoke tables of a class (pointers into the input). */
static inline struct atom_spokes synth_spokes(const struct synth *synth, uint32_t class_index)
{
    const float *first = synth->spoke_tables + synth->spoke_offset[class_index];
    size_t stride = synth->spoke_offset[synth->class_count];
    struct atom_spokes spokes = {first, first + stride, first + 2 * stride};
    return spokes;
}

/* Where a variant's noise comes from, for the oracle. */
enum synth_noise {
    SYNTH_NOISE_COUNTER,  /* atom_noise(): the streams that all exact variants share */
    SYNTH_NOISE_UNIFORM4, /* cuRAND's Philox, a state an orbit, four uniform floats a call */
    SYNTH_NOISE_XORWOW    /* cuRAND's XORWOW: cannot be replayed, so it is fetched */
};

/* The traits of a synth variant. */
struct synth_traits {
    enum synth_noise noise;
    bool half;    /* noise is rounded to half precision before use */
    bool racy;    /* orbits are painted in no order: a pixel holds the gray of any orbit that covers it */
    bool outputs; /* makes any output, and the images' labels; others make canvases and no labels */
    const char *timed; /* what one run's time includes, for the column `timed` */

    /* The noise that image j of run number `run` is made from, whether or not that run has been made: (x, y)
     * per vertex, vertices per orbit, by orbits. NULL unless the noise is XORWOW. */
    enum status (*fetch_noise)(void *state, uint64_t run, uint64_t j, float *noise);

    /* The finished images of the latest run, the variant's: in host memory, or where its platform is "cuda"
     * on the device. */
    const uint8_t *(*images)(const void *state);

    /* Makes a generator (core/generator.h) of batches of at most `batch` on a device; NULL: there is none. */
    enum status (*generator_open)(int device, const struct synth *synth, uint32_t batch,
                                  struct generator **generator);

    /* One more run, timed stage by stage, in seconds; NULL where stages cannot be told apart. */
    enum status (*stages)(void *state, double *noise_s, double *vertices_s, double *painting_s);
};

/* fetch() of every synth variant takes the struct below: one image of the latest run, so that a batch never
 * needs to be in host memory twice. */
struct synth_fetch {
    uint64_t j;      /* which image of the batch */
    uint8_t *pixels; /* synth_output_bytes() of it, the caller's */
    int64_t label;   /* the number of its class; variants that make no labels leave it as it is */
};

/* Checks that a batch of finished images fits in host memory. */
static inline enum status synth_check_batch_memory(const struct synth *synth)
{
    return env_check_memory(synth->batch * synth_output_bytes(synth), "the batch",
                            synth->output.fit == OUTPUT_WHOLE ? "lower --batch or --res"
                                                              : "lower --batch or --out-res");
}

#endif
