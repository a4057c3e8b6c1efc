/* The variant `omp`: OpenMP over images, SIMD over vertices and pixels; bit-identical to `naive`. docs/omp.md
 * shows where the time goes.
 *
 * If there are at least two threads per image of the batch, each image is split into parts. Vertices are
 * independent of each other, so a polygon can be cut into ranges of consecutive vertices ("arcs"). A part is
 * two opposite arcs, which balances the work: one side of an off-centre polygon may be mostly outside the
 * image. Each part paints orbit numbers on its own canvas. The highest number that any part has at a pixel
 * determines the pixel's gray.
 *
 * The rows of a canvas are an odd number of cache lines apart, so that vertically adjacent pixels map to
 * different sets of the L1 cache. This saves 5 % of the run time. */
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "core/variant.h"
#include "machine/isa.h"
#include "omp_kernel.h"
#include "synth/input.h"

#define ALIGNMENT 64 /* cache line */
#define ARCS_MAX  2

/* Buffers of one thread. */
struct worker {
    struct omp_arc arcs[ARCS_MAX]; /* arcs of the current part: one if it is a whole image, else ARCS_MAX */
    void *arrays, *room;           /* memory of the arcs' arrays; scratch memory of trace() */
    uint8_t *canvas;               /* for whole images: a canvas of grays, `pitch` pixels per row */
    uint8_t *grays;                /* for split images: grays[k + 1] is the gray of orbit k; grays[0] is 0 */
    double geometry_s, painting_s;
};

struct omp {
    const struct synth *synth;
    const struct omp_kernel *kernel;
    struct omp_tables tables;
    int threads;
    uint32_t parts;     /* parts per image; 1: images are not split */
    uint32_t pitch;     /* pixels from one canvas row to the next */
    bool timed;         /* time the stages separately */
    uint64_t latest;    /* number of the latest run */
    uint8_t *images;    /* the batch, synth_output_bytes() per image; the caller's if synth->call is set */
    int64_t *labels;    /* one per image; the caller's if synth->call is set */
    uint8_t *merged;    /* merged images before conversion; NULL unless images are split and converted */
    uint16_t *canvases; /* orbit numbers plus one; batch * parts canvases if images are split, else NULL */
    uint32_t *heaviest; /* classes in order of decreasing work */
    uint64_t *order;    /* images of a batch in order of decreasing work */
    struct worker *workers;
};

/* ---- Kernels ---- */

/* Each kernel is CPU code for one instruction set. */
static const struct omp_kernel *const kernels[ISAS] = {
    [ISA_SCALAR] = &omp_kernel_scalar,
#if defined(__x86_64__)
    [ISA_AVX2] = &omp_kernel_avx2,
    [ISA_AVX512] = &omp_kernel_avx512,
#endif
};

/* ---- Set-up ---- */

static void omp_teardown(void *state)
{
    struct omp *omp = state;
    for (int i = 0; omp->workers && i < omp->threads; i++) {
        free(omp->workers[i].arrays);
        free(omp->workers[i].room);
        free(omp->workers[i].canvas);
        free(omp->workers[i].grays);
    }
    free(omp->workers);
    if (!omp->synth->call) {
        free(omp->images);
        free(omp->labels);
    }
    free(omp->merged);
    free(omp->canvases);
    free(omp->heaviest);
    free(omp->order);
    free(omp);
}

/* Returns the number of pixels of a canvas. The margin to the right of a row is also the margin to the left
 * of the next row. Rows therefore need a margin on one side only; the canvas as a whole needs one at both
 * ends. */
static size_t canvas_pixels(const struct omp *omp)
{
    return (size_t)(omp->synth->res + 2 * OMP_GUARD) * omp->pitch + 2 * OMP_GUARD;
}

/* Returns the bytes of all canvases and, if images are split and converted, of the merged images. */
static size_t omp_canvas_bytes(const void *state)
{
    const struct omp *omp = state;
    const struct synth *synth = omp->synth;
    if (omp->parts == 1)
        return (size_t)omp->threads * canvas_pixels(omp);
    return synth->batch * (omp->parts * canvas_pixels(omp) * sizeof(uint16_t) +
                           (output_is_canvas(&synth->output) ? 0 : synth_image_bytes(synth)));
}

/* Returns the offset of row y of the image in a canvas. */
static size_t canvas_row(const struct omp *omp, size_t y)
{
    return (y + OMP_GUARD) * omp->pitch + OMP_GUARD;
}

static int arcs_of_part(const struct omp *omp)
{
    return omp->parts > 1 ? ARCS_MAX : 1;
}

/* Size of the arrays of an arc: number of 4-byte words per vertex. */
enum { ARC_WORDS = 15 };

static void arc_make(const struct omp *omp, size_t length, void *arrays, struct omp_arc *arc)
{
    float *real = arrays;
    int32_t *whole = arrays;
    uint64_t *wide = (uint64_t *)arrays + 9 * length / 2;
    *arc = (struct omp_arc){
        .tables = &omp->tables,
        .formula = omp->synth->formula,
        .res = omp->synth->res,
        .pitch = omp->pitch,
        .cosine = real,
        .sine = real + length,
        .advance = real + 2 * length,
        .x = real + 3 * length,
        .y = real + 4 * length,
        .column = {whole + 5 * length, whole + 6 * length},
        .row = {whole + 7 * length, whole + 8 * length},
        .stir = {wide, wide + length},
        .moved = (uint32_t *)arrays + 13 * length,
        .traced = (uint32_t *)arrays + 14 * length,
    };
}

/* Allocates space for every vertex, a copy of the first one, and padding to whole vectors. */
static bool worker_make(const struct omp *omp, struct worker *worker)
{
    const struct synth *synth = omp->synth;
    size_t length = ((size_t)synth->vertices_max + 1 + 2 * OMP_LANES_MAX) / OMP_LANES_MAX * OMP_LANES_MAX;
    size_t arc_bytes = ARC_WORDS * length * sizeof(float);
    worker->arrays = aligned_alloc(ALIGNMENT, (size_t)arcs_of_part(omp) * arc_bytes);
    worker->room = aligned_alloc(ALIGNMENT, (omp->kernel->room_bytes / ALIGNMENT + 1) * ALIGNMENT);
    worker->grays = malloc((size_t)synth->orbits_max + 1);
    worker->canvas = omp->parts > 1 ? NULL : aligned_alloc(ALIGNMENT, canvas_pixels(omp));
    if (!worker->arrays || !worker->room || !worker->grays || (omp->parts == 1 && !worker->canvas))
        return false;
    memset(worker->arrays, 0, (size_t)arcs_of_part(omp) * arc_bytes);
    for (int i = 0; i < arcs_of_part(omp); i++) {
        arc_make(omp, length, (char *)worker->arrays + (size_t)i * arc_bytes, &worker->arcs[i]);
        worker->arcs[i].room = worker->room;
    }
    return true;
}

static double class_weight(const struct atom_class *class_)
{
    return (double)class_->vertices * class_->orbits;
}

static int heavier(const void *a, const void *b, void *classes)
{
    double first = class_weight((struct atom_class *)classes + *(const uint32_t *)a);
    double second = class_weight((struct atom_class *)classes + *(const uint32_t *)b);
    return (first < second) - (first > second);
}

static bool fill_state(struct omp *omp)
{
    const struct synth *synth = omp->synth;
    if (!synth->call) {
        omp->images = malloc(synth->batch * synth_output_bytes(synth));
        omp->labels = malloc(synth->batch * sizeof *omp->labels);
    }
    omp->heaviest = malloc(synth->class_count * sizeof *omp->heaviest);
    omp->order = malloc(synth->batch * sizeof *omp->order);
    omp->workers = calloc((size_t)omp->threads, sizeof *omp->workers);
    bool made = (synth->call || (omp->images && omp->labels)) && omp->heaviest && omp->order && omp->workers;
    if (omp->parts > 1) {
        omp->canvases =
            aligned_alloc(ALIGNMENT, synth->batch * omp->parts * canvas_pixels(omp) * sizeof(uint16_t));
        made = made && omp->canvases;
    }
    if (omp->parts > 1 && !output_is_canvas(&synth->output)) {
        omp->merged = malloc(synth->batch * synth_image_bytes(synth));
        made = made && omp->merged;
    }
    for (int i = 0; made && i < omp->threads; i++)
        made = worker_make(omp, &omp->workers[i]);
    if (!made)
        return false;
    for (uint32_t c = 0; c < synth->class_count; c++)
        omp->heaviest[c] = c;
    qsort_r(omp->heaviest, synth->class_count, sizeof *omp->heaviest, heavier, synth->classes);
    omp_fill_tables(synth, (int32_t)omp->pitch, &omp->tables);
    return true;
}

/* Sets the number of parts per image, and the pitch, which depends on it. */
static void set_parts(struct omp *omp, uint32_t parts)
{
    uint32_t line = ALIGNMENT / (parts > 1 ? sizeof(uint16_t) : 1);
    omp->parts = parts;
    omp->pitch = ((omp->synth->res + OMP_GUARD + line - 1) / line | 1) * line;
}

/* Splits each image into as many parts as there are threads per image, rounded down. Does not split images if
 * orbit numbers exceed the 16 bits of a canvas pixel, or if the canvases do not fit in memory. */
static void choose_parts(struct omp *omp)
{
    uint64_t parts = (uint64_t)omp->threads / omp->synth->batch;
    set_parts(omp, parts < 1 ? 1 : (uint32_t)parts);
    if (omp->synth->orbits_max >= UINT16_MAX || omp_canvas_bytes(omp) > memory_available_bytes())
        set_parts(omp, 1);
}

static enum status omp_setup(const struct resources *resources, const void *input, void **state)
{
    const struct synth *synth = input;
    struct omp *omp = *state =
        aligned_alloc(ALIGNMENT, sizeof *omp); /* its size is a multiple of ALIGNMENT */
    TRY(ALLOCATED(omp, "omp: out of memory"));
    *omp = (struct omp){0};
    omp->synth = synth;
    omp->kernel = kernels[isa_best()];
    omp->threads = resources->threads;
    choose_parts(omp);
    TRY(synth_check_memory(synth, omp_canvas_bytes(omp)));
    return ALLOCATED(fill_state(omp), "omp: out of memory for a batch of %llu images; lower %s",
                     (unsigned long long)synth->batch, OPTION_OR_FIELD("--batch", "batch"));
}

/* ---- Drawing ---- */

/* Pixel addresses come from a list, so only the stores limit the speed of this loop. */
static void paint_gray(const struct omp_pen *pen, const int32_t *pixels, size_t count)
{
    uint8_t *origin = pen->origin, gray = (uint8_t)pen->value;
#pragma GCC unroll 8
    for (size_t i = 0; i < count; i++)
        origin[pixels[i]] = gray;
}

static void paint_orbit(const struct omp_pen *pen, const int32_t *pixels, size_t count)
{
    uint16_t *origin = pen->origin, orbit = (uint16_t)pen->value;
#pragma GCC unroll 8
    for (size_t i = 0; i < count; i++)
        origin[pixels[i]] = orbit;
}

/* Places the vertices of an arc on the oval around the centre. */
static void place_arc(const struct omp *omp, struct synth_image image, struct philox_key key, uint32_t first,
                      uint32_t count, struct omp_arc *arc)
{
    const struct synth *synth = omp->synth;
    const struct atom_class *class_ = &synth->classes[image.class_index];
    struct atom_spokes spokes = synth_spokes(synth, image.class_index);
    struct atom_point centre = atom_centre(key, synth->formula, synth->res);
    arc->vertices = class_->vertices;
    arc->orbits = class_->orbits;
    arc->p = class_->noise;
    arc->noise_bounds[0] = arc->p * omp->tables.noise_low;
    arc->noise_bounds[1] = arc->p * omp->tables.noise_high;
    arc->first = first;
    arc->count = count;
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        arc->keys[round] = key;
        key.word[0] += PHILOX_W0;
        key.word[1] += PHILOX_W1;
    }
    for (uint32_t i = 0; i <= count; i++) {
        uint32_t v = omp_vertex(arc, i);
        arc->cosine[i] = spokes.cosine[v];
        arc->sine[i] = spokes.sine[v];
        arc->advance[i] = spokes.advance[v];
        struct atom_point point = atom_start(class_, centre, spokes.cosine[v], spokes.sine[v]);
        arc->x[i] = point.x;
        arc->y[i] = point.y;
    }
    omp->kernel->begin(arc);
}

/* If stages are timed separately, begins a stage and returns its start time. Otherwise does nothing, so that
 * runs read no clock and open no NVTX ranges for stages. */
static double begin_stage(const struct omp *omp, const char *name)
{
    if (!omp->timed)
        return 0;
    range_push(name);
    return timer_now_s();
}

static void end_stage(const struct omp *omp, double begin_s, double *total_s)
{
    if (!omp->timed)
        return;
    *total_s += timer_now_s() - begin_s;
    range_pop();
}

/* Draws the orbits of the arcs that place_arc() has prepared, as grays or as orbit numbers plus one. */
static void draw_orbits(const struct omp *omp, uint32_t orbits, struct philox_key key, struct omp_pen *pen,
                        struct worker *worker)
{
    const struct omp_kernel *kernel = omp->kernel;
    for (uint32_t orbit = 0; orbit < orbits; orbit++) {
        double start_s = begin_stage(omp, RANGE_VERTICES);
        for (int i = 0; orbit % 2 == 0 && i < arcs_of_part(omp); i++)
            kernel->advance(&worker->arcs[i], orbit / 2);
        end_stage(omp, start_s, &worker->geometry_s);
        start_s = begin_stage(omp, RANGE_PAINTING);
        pen->value = omp->parts > 1 ? orbit + 1 : atom_gray(key, omp->synth->formula, orbit);
        for (int i = 0; i < arcs_of_part(omp); i++)
            kernel->trace(&worker->arcs[i], (int)(orbit % 2), pen);
        end_stage(omp, start_s, &worker->painting_s);
    }
}

static struct philox_key image_key(const struct synth *synth, struct synth_image image)
{
    return atom_image_key(synth->seed, synth->classes[image.class_index].id, image.instance);
}

/* Clears the canvas, then draws one part of an image on it. An image that is not split has a single part. */
static void draw_part(const struct omp *omp, struct synth_image image, uint32_t part, char *canvas,
                      struct worker *worker)
{
    const struct atom_class *class_ = &omp->synth->classes[image.class_index];
    struct philox_key key = image_key(omp->synth, image);
    size_t pixel_bytes = omp->parts > 1 ? sizeof(uint16_t) : 1;
    struct omp_pen pen = {.paint = omp->parts > 1 ? paint_orbit : paint_gray,
                          .origin = canvas + canvas_row(omp, 0) * pixel_bytes};
    RANGE(DRAW);
    double start_s = begin_stage(omp, RANGE_CLEAR);
    memset(canvas + (size_t)OMP_GUARD * omp->pitch * pixel_bytes, 0,
           omp->synth->res * omp->pitch * pixel_bytes);
    end_stage(omp, start_s, &worker->painting_s);
    uint64_t arcs = (uint64_t)omp->parts * (uint64_t)arcs_of_part(omp);
    for (int i = 0; i < arcs_of_part(omp); i++) {
        uint64_t arc = part + (uint64_t)i * omp->parts;
        uint32_t first = (uint32_t)(class_->vertices * arc / arcs);
        uint32_t end = (uint32_t)(class_->vertices * (arc + 1) / arcs);
        place_arc(omp, image, key, first, end - first, &worker->arcs[i]);
    }
    draw_orbits(omp, class_->orbits, key, &pen, worker);
}

/* Converts a worker's canvas to image j. */
static void finish_image(const struct omp *omp, struct synth_image image, uint64_t j, struct worker *worker)
{
    const struct synth *synth = omp->synth;
    uint8_t *finished = omp->images + j * synth_output_bytes(synth);
    double start_s = begin_stage(omp, RANGE_PAINTING);
    if (output_is_canvas(&synth->output))
        for (size_t y = 0; y < synth->res; y++)
            memcpy(finished + y * synth->res, worker->canvas + canvas_row(omp, y), synth->res);
    else
        output_convert(&synth->output, synth->res, image_key(synth, image),
                       (const uint8_t *)worker->canvas + canvas_row(omp, 0), omp->pitch, finished);
    end_stage(omp, start_s, &worker->painting_s);
}

/* Merges rows begin_y .. end_y - 1 of the canvases of all parts of image j. The first canvas receives the
 * highest orbit number of each pixel, and the merged image receives this orbit's gray. */
static void merge_rows(const struct omp *omp, const uint8_t *grays, uint64_t j, size_t begin_y, size_t end_y)
{
    size_t res = omp->synth->res, stride = canvas_pixels(omp);
    for (size_t y = begin_y; y < end_y; y++) {
        uint16_t *latest = omp->canvases + j * omp->parts * stride + canvas_row(omp, y);
        uint8_t *image =
            (omp->merged ? omp->merged : omp->images) + j * synth_image_bytes(omp->synth) + y * res;
        for (uint32_t part = 1; part < omp->parts; part++) {
            const uint16_t *other = latest + part * stride;
            for (size_t x = 0; x < res; x++)
                latest[x] = other[x] > latest[x] ? other[x] : latest[x];
        }
        for (size_t x = 0; x < res; x++)
            image[x] = grays[latest[x]];
    }
}

/* ---- Batches ---- */

/* Orders the images of the current run by decreasing work, so that threads draw the cheapest images last.
 * This balances the threads. Image j has class (first + j) mod class_count, where `first` is the number of
 * the run's first image. */
static void order_images(struct omp *omp)
{
    const struct synth *synth = omp->synth;
    uint64_t classes = synth->class_count, count = 0;
    if (synth->call && synth->call->numbers) { /* any mix of classes: keep the order */
        for (uint64_t j = 0; j < synth->call->count; j++)
            omp->order[j] = j;
        return;
    }
    uint64_t first = synth->first + (synth->call ? synth->call->first : omp->latest * synth->stride);
    for (uint32_t i = 0; i < synth->class_count; i++)
        for (uint64_t j = (omp->heaviest[i] + classes - first % classes) % classes;
             j < synth_run_count(synth); j += classes)
            omp->order[count++] = j;
}

static struct synth_image image_of(const struct omp *omp, uint64_t j)
{
    return synth_run_image(omp->synth, omp->latest, j);
}

static void draw_whole_image(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    uint64_t j = omp->order[task];
    struct synth_image image = image_of(omp, j);
    draw_part(omp, image, 0, (char *)worker->canvas, worker);
    finish_image(omp, image, j, worker);
}

static void draw_one_part(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    uint64_t j = omp->order[task / omp->parts], part = task % omp->parts;
    draw_part(omp, image_of(omp, j), (uint32_t)part,
              (char *)(omp->canvases + (j * omp->parts + part) * canvas_pixels(omp)), &omp->workers[thread]);
}

/* Merges one range of rows of an image's canvases. Each image has `parts` ranges. */
static void merge_share(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    const struct synth *synth = omp->synth;
    uint64_t j = task / omp->parts, part = task % omp->parts;
    struct synth_image image = image_of(omp, j);
    struct philox_key key = image_key(synth, image);
    double start_s = begin_stage(omp, RANGE_PAINTING);
    worker->grays[0] = 0;
    for (uint32_t orbit = 0; orbit < synth->classes[image.class_index].orbits; orbit++)
        worker->grays[orbit + 1] = atom_gray(key, synth->formula, orbit);
    merge_rows(omp, worker->grays, j, (size_t)synth->res * part / omp->parts,
               (size_t)synth->res * (part + 1) / omp->parts);
    end_stage(omp, start_s, &worker->painting_s);
}

/* Converts one range of output rows of an image whose canvases are merged. Each image has `parts` ranges. */
static void finish_share(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    const struct synth *synth = omp->synth;
    uint64_t res = synth->output.res, j = task / omp->parts, part = task % omp->parts;
    struct output_rows rows = {(uint32_t)(res * part / omp->parts),
                               (uint32_t)(res * (part + 1) / omp->parts)};
    double start_s = begin_stage(omp, RANGE_PAINTING);
    output_convert_rows(&synth->output, synth->res, image_key(synth, image_of(omp, j)),
                        omp->merged + j * synth_image_bytes(synth), synth->res, rows,
                        omp->images + j * synth_output_bytes(synth));
    end_stage(omp, start_s, &worker->painting_s);
}

static enum status omp_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct omp *omp = state;
    const struct synth *synth = omp->synth;
    uint64_t count = synth_run_count(synth);
    omp->latest = number;
    if (synth->call) {
        omp->images = synth->call->images;
        omp->labels = synth->call->labels;
    }
    order_images(omp);
    for (uint64_t j = 0; j < count; j++)
        omp->labels[j] = synth->classes[image_of(omp, j).class_index].id;
    if (omp->parts == 1) {
        parallel_for(omp->threads, count, draw_whole_image, omp);
        return STATUS_OK;
    }
    parallel_for(omp->threads, count * omp->parts, draw_one_part, omp);
    parallel_for(omp->threads, count * omp->parts, merge_share, omp);
    if (omp->merged)
        parallel_for(omp->threads, count * omp->parts, finish_share, omp);
    return STATUS_OK;
}

static enum status omp_fetch(void *state, void *result)
{
    const struct omp *omp = state;
    return synth_fetch_host(omp->synth, omp->images, omp->labels, result);
}

/* Repeats the latest run. One loop computes both noise and vertices, so `*noise_s` is the time of this loop
 * and `*vertices_s` is 0. Times are averages over the threads. */
static enum status omp_stages(void *state, double *noise_s, double *vertices_s, double *painting_s)
{
    struct omp *omp = state;
    struct run_time unused;
    for (int i = 0; i < omp->threads; i++)
        omp->workers[i].geometry_s = omp->workers[i].painting_s = 0;
    omp->timed = true;
    enum status status = omp_run(omp, omp->latest, &unused);
    omp->timed = false;
    *noise_s = *vertices_s = *painting_s = 0;
    for (int i = 0; i < omp->threads; i++) {
        *noise_s += omp->workers[i].geometry_s / omp->threads;
        *painting_s += omp->workers[i].painting_s / omp->threads;
    }
    return status;
}

static const uint8_t *omp_images(const void *state)
{
    return ((const struct omp *)state)->images;
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .timed = "clear+draw",
                                           .images = omp_images,
                                           .canvas_bytes = omp_canvas_bytes,
                                           .stages = omp_stages};

const struct variant variant_omp = {
    .platform = "cpu",
    .threaded = true,
    .instruction_set = isa_best_name,
    .traits = &traits,
    .setup = omp_setup,
    .run = omp_run,
    .fetch = omp_fetch,
    .teardown = omp_teardown,
};
