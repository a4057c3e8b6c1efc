/* The variant `naive`: one thread of scalar C draws the lines one at a time. It is the default baseline of
 * speed-ups, so do not optimise it. */
#include <stdlib.h>
#include <string.h>

#include "core/phase.h"
#include "core/variant.h"
#include "machine/isa.h"
#include "synth/input.h"
#include "synth/line.h"

struct naive {
    const struct synth *synth;
    uint8_t *images; /* the batch, synth_output_bytes() per image; the caller's if synth->call is set */
    int64_t *labels; /* one per image; the caller's if synth->call is set */
    uint8_t *canvas; /* canvas of the current image; NULL if images are drawn in place, without conversion */
    struct atom_point *points; /* positions of the current image's vertices */
};

static void naive_teardown(void *state)
{
    struct naive *naive = state;
    if (!naive->synth->call) {
        free(naive->images);
        free(naive->labels);
    }
    free(naive->canvas);
    free(naive->points);
    free(naive);
}

/* Returns 0 if images are drawn in place. */
static size_t naive_canvas_bytes(const void *state)
{
    const struct synth *synth = ((const struct naive *)state)->synth;
    return output_is_canvas(&synth->output) ? 0 : synth_image_bytes(synth);
}

static enum status naive_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct synth *synth = input;
    struct naive *naive = *state = calloc(1, sizeof *naive);
    TRY(ALLOCATED(naive, "naive: out of memory"));
    naive->synth = synth;
    size_t canvas_bytes = naive_canvas_bytes(naive);
    TRY(synth_check_memory(synth, canvas_bytes));
    if (!synth->call) {
        naive->images = malloc(synth->batch * synth_output_bytes(synth));
        naive->labels = malloc(synth->batch * sizeof *naive->labels);
    }
    naive->canvas = canvas_bytes ? malloc(canvas_bytes) : NULL;
    naive->points = malloc(synth->vertices_max * sizeof *naive->points);
    bool batch = synth->call || (naive->images && naive->labels);
    if (!batch || (canvas_bytes && !naive->canvas) || !naive->points)
        return status_set(STATUS_EXHAUSTED, "naive: out of memory for a batch of %llu images; lower %s",
                          (unsigned long long)synth->batch, OPTION_OR_FIELD("--batch", "batch"));
    return STATUS_OK;
}

/* Inlined, so that each clone of the caller uses a single vector encoding. Intel CPUs pay a penalty for
 * mixing SSE and VEX instructions while the upper halves of registers are in use. */
static inline __attribute__((always_inline)) void draw_line(const struct synth *synth, uint8_t *pixels,
                                                            uint8_t gray, struct atom_point from,
                                                            struct atom_point to)
{
    int32_t res = (int32_t)synth->res;
    int32_t x0 = (int32_t)from.x, y0 = (int32_t)from.y, x1 = (int32_t)to.x, y1 = (int32_t)to.y;
    if (!line_drawn(synth->formula, x0, y0, x1, y1, res))
        return;
    for (struct line line = line_begin(synth->formula, x0, y0, x1, y1); line.left > 0; line_step(&line))
        if (line_inside(line.x, line.y, res))
            pixels[(size_t)line.y * synth->res + (size_t)line.x] = gray;
}

FDSL_FMA_CLONES static void draw_image(const struct naive *naive, struct synth_image image, uint8_t *pixels)
{
    const struct synth *synth = naive->synth;
    const struct atom_class *class_ = &synth->classes[image.class_index];
    struct atom_spokes spokes = synth_spokes(synth, image.class_index);
    struct philox_key key = atom_image_key(synth->seed, class_->id, image.instance);
    struct atom_point centre = atom_centre(key, synth->formula, synth->res);
    struct atom_point *points = naive->points;

    memset(pixels, 0, synth_image_bytes(synth));
    for (uint32_t v = 0; v < class_->vertices; v++)
        points[v] = atom_start(class_, centre, spokes.cosine[v], spokes.sine[v]);
    for (uint32_t k = 0; k < class_->orbits; k++) {
        uint8_t gray = atom_gray(key, synth->formula, k);
        for (uint32_t v = 0; v < class_->vertices; v++)
            points[v] = atom_advance(points[v], class_->noise, spokes.cosine[v], spokes.sine[v],
                                     spokes.advance[v], atom_noise(key, synth->gradients, v, k));
        for (uint32_t v = 0; v < class_->vertices; v++)
            draw_line(synth, pixels, gray, points[v], points[v + 1 < class_->vertices ? v + 1 : 0]);
    }
}

static enum status naive_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct naive *naive = state;
    const struct synth *synth = naive->synth;
    if (synth->call) {
        naive->images = synth->call->images;
        naive->labels = synth->call->labels;
    }
    for (uint64_t j = 0; j < synth_run_count(synth); j++) {
        struct synth_image image = synth_run_image(synth, number, j);
        uint32_t class_id = synth->classes[image.class_index].id;
        uint8_t *finished = naive->images + j * synth_output_bytes(synth);
        RANGE(DRAW);
        naive->labels[j] = class_id;
        draw_image(naive, image, naive->canvas ? naive->canvas : finished);
        if (naive->canvas)
            output_convert(&synth->output, synth->res, atom_image_key(synth->seed, class_id, image.instance),
                           naive->canvas, synth->res, finished);
    }
    return STATUS_OK;
}

static enum status naive_fetch(void *state, void *result)
{
    const struct naive *naive = state;
    return synth_fetch_host(naive->synth, naive->images, naive->labels, result);
}

static const uint8_t *naive_images(const void *state)
{
    return ((const struct naive *)state)->images;
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .timed = "clear+draw",
                                           .images = naive_images,
                                           .canvas_bytes = naive_canvas_bytes};

const struct variant variant_naive = {
    .platform = "cpu",
    .instruction_set = isa_scalar_name,
    .traits = &traits,
    .setup = naive_setup,
    .run = naive_run,
    .fetch = naive_fetch,
    .teardown = naive_teardown,
};
