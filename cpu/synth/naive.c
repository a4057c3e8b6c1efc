/* The variant `naive`: one thread of scalar C draws the lines, or the points of a fractal, one at a time. It
 * is the default baseline of speed-ups, so do not optimise it. */
#include <stdlib.h>
#include <string.h>

#include "core/phase.h"
#include "core/variant.h"
#include "machine/host.h"
#include "synth/input.h"

struct naive {
    const struct synth *synth;
    struct synth_batch batch;
    uint8_t *canvas; /* canvas of the current image; NULL if images are drawn in place, without conversion */
    uint8_t *mask;   /* mask of the current image, of the size of the canvas; NULL if there are no masks */
    struct atom_point *points;   /* positions of the current shape's vertices */
    struct published *published; /* draws the images if synth->set is not NULL */
    void *scratch;               /* of `published`, or of fractals: the points of an orbit */
};

/* The stream that draws the images of a published set. */
static const struct published_stream *stream_of(const struct naive *naive)
{
    return formulas[naive->synth->formula]->published;
}

static void naive_teardown(void *state)
{
    struct naive *naive = state;
    synth_batch_free(naive->synth, &naive->batch);
    if (naive->published)
        stream_of(naive)->close(naive->published);
    free(naive->scratch);
    free(naive->canvas);
    free(naive->mask);
    free(naive->points);
    free(naive);
}

/* Returns 0 if images are drawn in place. */
static size_t image_canvas_bytes(const struct synth *synth)
{
    return output_is_canvas(&synth->output) ? 0 : synth_image_bytes(synth);
}

static size_t mask_canvas_bytes(const struct synth *synth)
{
    return synth->rules.masked ? synth_image_bytes(synth) : 0;
}

static size_t naive_canvas_bytes(const void *state)
{
    const struct synth *synth = ((const struct naive *)state)->synth;
    return image_canvas_bytes(synth) + mask_canvas_bytes(synth);
}

static enum status open_published(struct naive *naive)
{
    const struct published_stream *stream = stream_of(naive);
    TRY(stream->open(naive->synth, 1, &naive->published));
    naive->scratch = aligned_alloc(64, (stream->scratch_bytes(naive->published) / 64 + 1) * 64);
    return ALLOCATED(naive->scratch, "naive: out of memory");
}

static enum status naive_setup(const struct resources *resources, const void *input, void **state)
{
    (void)resources;
    const struct synth *synth = input;
    struct naive *naive = *state = calloc(1, sizeof *naive);
    TRY(ALLOCATED(naive, "naive: out of memory"));
    naive->synth = synth;
    const size_t canvas_bytes = image_canvas_bytes(synth), mask_bytes = mask_canvas_bytes(synth);
    TRY(synth_check_memory(synth, canvas_bytes + mask_bytes));
    bool made = synth_batch_make(synth, &naive->batch);
    naive->canvas = canvas_bytes ? malloc(canvas_bytes) : NULL;
    naive->mask = mask_bytes ? malloc(mask_bytes) : NULL;
    if (synth_is_ifs(synth))
        naive->scratch = malloc(synth->ifs.points * sizeof(struct ifs_point));
    else if (synth_is_ifs3d(synth))
        naive->scratch = malloc(synth_solid_scratch_bytes());
    else if (synth_is_color(synth))
        naive->scratch = aligned_alloc(64, color_scratch_bytes(&synth->color));
    else
        naive->points = malloc(synth->vertices_max * sizeof *naive->points);
    if (!made || (canvas_bytes && !naive->canvas) || (mask_bytes && !naive->mask) ||
        !(naive->points || naive->scratch))
        return status_set(STATUS_EXHAUSTED, "naive: out of memory for a batch of %llu images; lower %s",
                          (unsigned long long)synth->batch, OPTION_OR_FIELD("--batch", "batch"));
    return synth->set && !synth_is_ifs(synth) ? open_published(naive) : STATUS_OK;
}

/* The picture that is drawn: grays, and class numbers if there is a mask. */
struct picture {
    uint8_t *pixels, *mask;
    uint8_t gray, class_id; /* of the lines */
};

/* Inlined, so that each clone of the caller uses a single vector encoding. Intel CPUs pay a penalty for
 * mixing SSE and VEX instructions while the upper halves of registers are in use. */
static inline __attribute__((always_inline)) void draw_line(const struct synth *synth,
                                                            const struct picture *picture,
                                                            struct atom_point from, struct atom_point to)
{
    int32_t res = (int32_t)synth->res;
    int32_t x0 = (int32_t)from.x, y0 = (int32_t)from.y, x1 = (int32_t)to.x, y1 = (int32_t)to.y;
    if (!line_drawn(&synth->rules, x0, y0, x1, y1, res))
        return;
    for (struct line line = line_begin(&synth->rules, x0, y0, x1, y1); line.left > 0; line_step(&line))
        if (line_inside(line.x, line.y, res)) {
            size_t pixel = (size_t)line.y * synth->res + (size_t)line.x;
            picture->pixels[pixel] = picture->gray;
            if (picture->mask)
                picture->mask[pixel] = picture->class_id;
        }
}

static inline __attribute__((always_inline)) void draw_shape(const struct naive *naive,
                                                             struct synth_image image, struct philox_key key,
                                                             uint32_t slot, struct picture *picture)
{
    const struct synth *synth = naive->synth;
    const struct line_shape shape = synth_shape(synth, image, key, slot);
    const struct atom_class *class_ = &synth->classes[shape.class_index];
    const struct atom_spokes spokes = synth_spokes(synth, shape.class_index);
    struct atom_point *points = naive->points;

    picture->class_id = (uint8_t)class_->id;
    for (uint32_t v = 0; v < class_->vertices; v++)
        points[v] = line_start(&shape, spokes.cosine[v], spokes.sine[v]);
    for (uint32_t k = 0; k < class_->orbits; k++) {
        picture->gray = atom_gray(&synth->rules, key, slot, k);
        for (uint32_t v = 0; v < class_->vertices; v++)
            points[v] = atom_advance(points[v], class_->noise, spokes.cosine[v], spokes.sine[v],
                                     spokes.advance[v], atom_noise(key, slot, synth->gradients, v, k));
        for (uint32_t v = 0; v < class_->vertices; v++)
            draw_line(synth, picture, points[v], points[v + 1 < class_->vertices ? v + 1 : 0]);
    }
}

FDSL_FMA_CLONES static void draw_image(const struct naive *naive, struct synth_image image,
                                       struct philox_key key, uint8_t *pixels)
{
    const struct synth *synth = naive->synth;
    struct picture picture = {.pixels = pixels, .mask = naive->mask};
    memset(pixels, (int)synth->rules.background, synth_image_bytes(synth));
    if (picture.mask)
        memset(picture.mask, 0, synth_image_bytes(synth));
    for (uint32_t slot = 0; slot < synth->rules.shapes; slot++)
        draw_shape(naive, image, key, slot, &picture);
}

static void draw_published(const struct naive *naive, struct synth_image image, uint8_t *pixels)
{
    const struct published_image published = {.class_index = image.class_index,
                                              .instance = image.instance % naive->synth->set->instances,
                                              .canvas = pixels,
                                              .mask = naive->mask,
                                              .pitch = naive->synth->res,
                                              .plain = true};
    stream_of(naive)->draw(naive->published, &published, naive->scratch);
}

static enum status naive_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct naive *naive = state;
    const struct synth *synth = naive->synth;
    synth_batch_begin(synth, number, &naive->batch);
    for (uint64_t j = 0; j < synth_run_count(synth); j++) {
        struct synth_image image = synth_run_image(synth, number, j);
        struct philox_key key = synth_image_key(synth, image);
        uint8_t *finished = synth_batch_image(synth, &naive->batch, j);
        uint8_t *mask = synth_batch_mask(synth, &naive->batch, j);
        uint8_t *pixels = naive->canvas ? naive->canvas : finished;
        RANGE(DRAW);
        if (synth_is_ifs(synth))
            ifs_draw(&synth->ifs, &synth->systems[image.class_index], synth->seed, image.instance,
                     synth->points, synth->res, synth->uniforms, naive->scratch, pixels);
        else if (synth_is_ifs3d(synth))
            synth_draw_solid(synth, image, naive->scratch, pixels,
                             synth_batch_cloud(synth, &naive->batch, j));
        else if (synth_is_color(synth))
            color_draw_plain(&synth->color, synth->colors, key, image.class_index, naive->scratch, pixels);
        else if (synth->set)
            draw_published(naive, image, pixels);
        else
            draw_image(naive, image, key, pixels);
        if (naive->canvas)
            output_convert(&synth->output, synth->res, key, naive->canvas, synth->res, finished);
        if (mask && synth->rules.masked)
            output_convert_mask(&synth->output, synth->res, key, naive->mask, synth->res,
                                (struct output_rows){0, synth->output.res}, mask);
    }
    return STATUS_OK;
}

static enum status naive_fetch(void *state, void *result)
{
    const struct naive *naive = state;
    return synth_fetch_host(naive->synth, &naive->batch, result);
}

static const uint8_t *naive_images(const void *state)
{
    return ((const struct naive *)state)->batch.images;
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .formulas = true,
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
