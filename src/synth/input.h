/* The input of the workload `synth` (batches of VisualAtom images), as variants see it. */
#ifndef FDSL_SYNTH_INPUT_H
#define FDSL_SYNTH_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "core/portable.h"
#include "core/status.h"
#include "machine/host.h"
#include "core/generator.h"
#include "synth/color.h"
#include "synth/formula.h"
#include "synth/output.h"

#define SYNTH_RES_MAX OUTPUT_RES_MAX /* pixels per side */

struct variant;

/* A call of a generator: the images to generate, at most one batch, and where to write them. */
struct synth_call {
    const uint64_t *numbers; /* image numbers, relative to synth->first; NULL: consecutive numbers */
    uint64_t first;          /* the first of consecutive image numbers, relative to synth->first */
    uint64_t count;
    uint8_t *images; /* synth_output_bytes() per image */
    struct generator_targets targets;
};

/* The input of the workload, which all runs share. Image j of run n has number g = first + n * stride + j.
 * Images take turns in `turns` classes: the class of image g is classes[g % turns], and its instance is g /
 * turns (integer division). If an image shows several classes, `turns` is 1, and the instance is g. Each rank
 * generates a contiguous part of one global batch of `stride` images, so the images of a global batch do not
 * depend on the number of ranks. */
struct synth {
    enum formula_id formula;
    struct line_rules rules; /* of the formula */
    uint32_t res;            /* side of the canvas in pixels */
    uint64_t batch;          /* images per run on this rank */
    uint64_t seed, first, stride;
    uint64_t position;          /* index of this rank's first image in the global batch */
    struct synth_output output; /* how a canvas becomes the output image */

    /* If `call` is not NULL, a run ignores its run number and generates the images that `*call` names when
     * the run starts. Only `naive` and `omp` support this. */
    const struct synth_call *call;

    uint32_t class_count;
    uint32_t turns;             /* class_count; 1 if an image shows several classes */
    struct class_row *rows;     /* the classes: all parameters of the formula */
    struct atom_class *classes; /* the same classes, as drawing needs them */
    size_t *spoke_offset; /* index of each class's first vertex in spoke_tables; class_count + 1 entries */
    float *spoke_tables;  /* cosines, then sines, then advances, spoke_offset[class_count] floats each */
    float gradients[NOISE_TABLE_COUNT];

    uint32_t vertices_max, orbits_max; /* maxima over the classes */
    uint64_t segments_max;             /* largest product vertices * orbits of any class */

    /* Only FAMILY_IFS. Then atom_class has no value but the number of the class. */
    struct ifs_rules ifs;       /* how orbits and instances are made */
    bool points;                /* DRAW_POINTS; also of FAMILY_COLOR */
    double min_lit;             /* argument `least` of ifs_replace_dark(); 0: nothing is replaced */
    struct ifs_system *systems; /* the classes, as drawing needs them, without weights */
    double *uniforms;           /* ifs_uniforms(): ifs.points - 1 numbers, of all steps */
    const char *cache_dir;      /* folder that keeps the bank; NULL: none */
    struct ifs_bank *bank;      /* orbits of the variants on the CPU */

    /* Only FAMILY_IFS3D, which also has `ifs`. */
    struct ifs3d_system *solids; /* the classes, as drawing needs them, without weights */

    /* Only FAMILY_COLOR. Then atom_class has no value but the number of the class. */
    struct color_rules color;
    struct color_system *colors; /* the classes, as drawing needs them */

    /* The data set whose published stream draws the images; NULL: Philox draws them. The points of FAMILY_IFS
     * are those of the published set anyway. */
    const struct published_set *set;
};

/* The identity of an image. Together with a struct synth, it determines every bit of the image. */
struct synth_image {
    uint32_t class_index; /* index into `classes`; the class number is classes[class_index].id */
    uint64_t instance;
};

/* Returns the identity of image j of run number `run`. */
FDSL_HD struct synth_image synth_image_at(uint64_t first, uint64_t stride, uint32_t turns, uint64_t run,
                                          uint64_t j)
{
    uint64_t number = first + run * stride + j;
    struct synth_image image = {0, number};
    if (turns > 1) { /* 64-bit division is slow on a GPU */
        image.class_index = (uint32_t)(number % turns);
        image.instance = number / turns;
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
        return synth_image_at(synth->first, synth->stride, synth->turns, run, j);
    return synth_image_at(synth->first, 1, synth->turns, call->numbers ? call->numbers[j] : call->first + j,
                          0);
}

/* Returns the number of the class of an image; 0 if an image shows several classes. */
static inline uint32_t synth_label(const struct synth *synth, struct synth_image image)
{
    return synth->rules.shapes > 1 ? 0 : synth->classes[image.class_index].id;
}

/* Returns the Philox key of an image. */
static inline struct philox_key synth_image_key(const struct synth *synth, struct synth_image image)
{
    return atom_image_key(&synth->rules, synth->seed, synth_label(synth, image), image.instance);
}

/* Returns shape `slot` of an image with this key. */
static inline struct line_shape synth_shape(const struct synth *synth, struct synth_image image,
                                            struct philox_key key, uint32_t slot)
{
    return line_shape(&synth->rules, key, slot, synth->classes, image.class_index, synth->class_count,
                      synth->res);
}

FDSL_C_BEGIN

/* STATUS_USAGE if there is no such preset, or if the file or its ranges are wrong. */
enum status synth_check_preset(const struct synth *synth, const char *preset_file, const char *preset);

/* Sets synth->rows to `count` classes of a preset. If `preset_file` is NULL and the preset of the formula is
 * a list, takes the first `count` classes of the list. Otherwise draws them from the ranges in section
 * `preset` of `preset_file`, or of the built-in file if `preset_file` is NULL. Free the classes with
 * synth_free(), even after an error. STATUS_USAGE for an unknown preset, an invalid file or too many classes;
 * STATUS_UNAVAILABLE if ranges must be read and this build has no inih; STATUS_EXHAUSTED if memory runs out.
 */
enum status synth_draw_classes(struct synth *synth, const char *preset_file, const char *preset,
                               uint32_t count);

/* Sets the formula and its rules. */
void synth_set_formula(struct synth *synth, enum formula_id formula);

/* The options of a user, before defaults. */
struct synth_wish {
    int formula;                      /* enum formula_id; -1: that of the preset or of the columns of
                                         class_file, or else `uji` */
    int draw;                         /* enum ifs_draw_kind; -1: not given */
    const char *preset, *preset_file; /* NULL: not given */
    const char *class_file;           /* NULL: none; its columns can decide about the formula */
    bool listed;                      /* a file or a list gives the classes */
    bool published;                   /* the published random stream */
    uint32_t classes, res;            /* 0: the default of the formula or of the preset */
    double min_lit;                   /* of struct synth; 0: none */
    const char *cache_dir;            /* of struct synth; NULL: none */
    bool cache_shared;                /* other formulas than FAMILY_IFS ignore `cache_dir` */
};

/* Chooses the formula, what it draws and, if wish->published, the published set, and replaces the values of
 * `*wish` that are 0 or -1 with their defaults. wish->classes remains 0 if `listed` is set, or if the
 * formula's default is its benchmark class. STATUS_USAGE for a preset of another formula, if the stream does
 * not exist, or if the formula has no choice of what to draw or no weights to replace. */
enum status synth_choose(struct synth *synth, struct synth_wish *wish);

/* Computes synth->classes and their tables from synth->rows, and the maxima over the classes; of FAMILY_IFS,
 * the systems and an empty bank. Free the tables with synth_free(), even after an error. STATUS_USAGE if the
 * canvas or the available memory is too small; STATUS_EXHAUSTED if an allocation fails. */
enum status synth_fill_tables(struct synth *synth);

/* Returns whether a variant draws the formula of the input and the images of its published set. STATUS_USAGE
 * names the variants that do. */
enum status synth_check_formula(const struct synth *synth, const struct variant *variant);

/* Returns whether a variant uses the bank of the input, if this is kept in a folder. STATUS_USAGE if not. */
enum status synth_check_cache(const struct synth *synth, const struct variant *variant);

/* Creates a generator: `variant` generates images in the output format of `synth`. The variant's platform
 * must match request->on_device. Sample n of the generator is image number synth->first + n. The tables of
 * `synth` must outlive the generator. The caller closes the generator. STATUS_UNAVAILABLE if the machine
 * cannot run the variant. */
enum status synth_generator_open(const struct synth *synth, const struct variant *variant,
                                 const struct generator_request *request, struct generator **generator);

/* Draws an image of FAMILY_IFS3D by its definition, point by point: the reference. Writes res * res grays to
 * `canvas`, and the point cloud to `cloud` unless it is NULL. `scratch` has synth_solid_scratch_bytes()
 * bytes. */
void synth_draw_solid(const struct synth *synth, struct synth_image image, void *scratch, uint8_t *canvas,
                      float *cloud);
size_t synth_solid_scratch_bytes(void);

/* Prints the report of --describe on a set of FAMILY_IFS3D: overflow, and set pixels of view 0 of the first
 * drawing of each weight. STATUS_EXHAUSTED if memory runs out. */
enum status synth_describe_solids(const char *name, const struct synth *synth, FILE *stream);

struct ifs_report; /* ifs_classes.h */

/* Computes the report of --describe on a set of FAMILY_COLOR: on as many images as there are classes, the
 * first ones. STATUS_EXHAUSTED if memory runs out. */
enum status synth_describe_colors(const struct synth *synth, struct ifs_report *report);

/* Writes the numbers of the classes that an image shows, ascending: "3,17". `text` has room for
 * SYNTH_CLASSES_TEXT characters. */
#define SYNTH_CLASSES_TEXT (11 * COLOR_OBJECTS_MAX)
void synth_classes_text(const struct synth *synth, struct synth_image image, char *text);

/* Frees the classes and the tables; accepts a zeroed input. */
void synth_free(struct synth *synth);

FDSL_C_END

/* Returns whether the images are fractals: points or patches of the bank, without shapes. */
static inline bool synth_is_ifs(const struct synth *synth)
{
    return formulas[synth->formula]->family == FAMILY_IFS;
}

/* Returns whether the images are views of fractals in space. */
static inline bool synth_is_ifs3d(const struct synth *synth)
{
    return formulas[synth->formula]->family == FAMILY_IFS3D;
}

/* Returns whether the images have colours (color.h). */
static inline bool synth_is_color(const struct synth *synth)
{
    return formulas[synth->formula]->family == FAMILY_COLOR;
}

/* Returns whether images have multi-hot labels. They take the place of masks: see synth_mask_bytes(). */
static inline bool synth_multi_hot(const struct synth *synth)
{
    return formulas[synth->formula]->targets & TARGET_MULTI_HOT;
}

/* Returns the number of channels of the output, for a number that a user gave; 0: not given. */
static inline uint32_t synth_channels(const struct synth *synth, uint32_t given)
{
    return given ? given : synth_is_color(synth) ? COLOR_CHANNELS : 1;
}

/* Returns the parameters of all classes that decide their images, as `*bytes` bytes to be hashed. */
static inline const void *synth_class_table(const struct synth *synth, size_t *bytes)
{
    const bool ifs = synth_is_ifs(synth), solid = synth_is_ifs3d(synth), color = synth_is_color(synth);
    *bytes = synth->class_count * (ifs     ? sizeof *synth->systems
                                   : solid ? sizeof *synth->solids
                                   : color ? sizeof *synth->colors
                                           : sizeof *synth->classes);
    return ifs     ? (const void *)synth->systems
           : solid ? (const void *)synth->solids
           : color ? (const void *)synth->colors
                   : (const void *)synth->classes;
}

/* Returns the number of the orbit that an image of FAMILY_IFS shows, for ifs_bank_map(). */
static inline uint64_t synth_orbit(const struct synth *synth, struct synth_image image)
{
    return (uint64_t)image.class_index * ifs_orbits(&synth->ifs) +
           ifs_instance(&synth->ifs, image.instance).weight;
}

/* Returns the key of the drawing of a class of FAMILY_IFS3D that an instance shows. */
static inline struct philox_key synth_solid_key(const struct synth *synth, uint32_t class_index,
                                                struct ifs_instance shown)
{
    return ifs_mask_key(&synth->ifs, synth->seed, synth->solids[class_index].id, shown.drawing);
}

/* Returns the size of one canvas in bytes; a canvas has one byte per pixel, or three planes of them. */
static inline size_t synth_image_bytes(const struct synth *synth)
{
    return (size_t)synth->res * synth->res * (synth_is_color(synth) ? COLOR_CHANNELS : 1);
}

/* Returns the size of one mask in bytes: one byte per output pixel; or of one multi-hot label: one byte per
 * class. 0 if the formula defines neither. */
static inline size_t synth_mask_bytes(const struct synth *synth)
{
    return synth->rules.masked      ? (size_t)synth->output.res * synth->output.res
           : synth_multi_hot(synth) ? synth->class_count
                                    : 0;
}

/* Returns the size of the point cloud of one image in bytes; 0 if the images have none. */
static inline size_t synth_cloud_bytes(const struct synth *synth)
{
    return synth_is_ifs3d(synth) ? synth->ifs.cloud * 3 * sizeof(float) : 0;
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

/* The source of a variant's noise. The oracle (oracle.c), which verifies images, must use the same noise. */
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
    bool formulas;     /* draws all formulas and masks; other variants only formulas with `paper` */
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

    /* Returns what the bank of orbits has from which the variant draws FAMILY_IFS. NULL if there is none. */
    struct ifs_bank_facts (*bank)(const void *state);

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
    uint8_t *mask;   /* the caller's buffer of synth_mask_bytes(); NULL: not wanted */
    float *cloud;    /* the caller's buffer of synth_cloud_bytes(); NULL: not wanted */
    int64_t label;   /* class number; variants without labels leave it unchanged */
};

/* A batch in host memory. */
struct synth_batch {
    uint8_t *images;                  /* synth_output_bytes() per image */
    struct generator_targets targets; /* labels, and masks or point clouds if the images have them */
};

/* Allocates a batch, unless synth->call is set: then each call has its own memory. Free the batch with
 * synth_batch_free(), even after a failure. Returns false if memory runs out. */
bool synth_batch_make(const struct synth *synth, struct synth_batch *batch);
void synth_batch_free(const struct synth *synth, struct synth_batch *batch);

/* Begins a run: takes the memory of the call if synth->call is set, and stores the labels of the images, also
 * multi-hot ones. */
void synth_batch_begin(const struct synth *synth, uint64_t run, struct synth_batch *batch);

/* Returns where image j and its mask belong; the mask is NULL if it is not wanted. */
static inline uint8_t *synth_batch_image(const struct synth *synth, const struct synth_batch *batch,
                                         uint64_t j)
{
    return batch->images + j * synth_output_bytes(synth);
}

static inline uint8_t *synth_batch_mask(const struct synth *synth, const struct synth_batch *batch,
                                        uint64_t j)
{
    return batch->targets.masks ? batch->targets.masks + j * synth_mask_bytes(synth) : NULL;
}

static inline float *synth_batch_cloud(const struct synth *synth, const struct synth_batch *batch, uint64_t j)
{
    return batch->targets.points ? batch->targets.points + j * (synth_cloud_bytes(synth) / sizeof(float))
                                 : NULL;
}

/* Implements fetch() of a variant whose batch is in host memory. */
static inline enum status synth_fetch_host(const struct synth *synth, const struct synth_batch *batch,
                                           struct synth_fetch *fetch)
{
    size_t bytes = synth_output_bytes(synth), mask_bytes = synth_mask_bytes(synth);
    memcpy(fetch->pixels, batch->images + fetch->j * bytes, bytes);
    if (fetch->mask && mask_bytes)
        memcpy(fetch->mask, batch->targets.masks + fetch->j * mask_bytes, mask_bytes);
    if (fetch->cloud && synth_cloud_bytes(synth))
        memcpy(fetch->cloud, synth_batch_cloud(synth, batch, fetch->j), synth_cloud_bytes(synth));
    fetch->label = batch->targets.labels[fetch->j];
    return STATUS_OK;
}

/* Checks that `canvas_bytes` bytes of canvases and the output images of a batch fit in host memory. If
 * synth->call is set, the output images are in the caller's memory and do not count. */
static inline enum status synth_check_memory(const struct synth *synth, size_t canvas_bytes)
{
    if (synth->call)
        return memory_check(canvas_bytes, "the canvases", "lower threads or res");
    const size_t bytes = synth_output_bytes(synth) + synth_mask_bytes(synth) + synth_cloud_bytes(synth);
    return memory_check(synth->batch * bytes + canvas_bytes, "the batch",
                        synth->output.fit == OUTPUT_WHOLE
                            ? OPTION_OR_FIELD("lower --batch or --res", "lower batch or res")
                            : OPTION_OR_FIELD("lower --batch or --out-res", "lower batch or out_res"));
}

#endif
