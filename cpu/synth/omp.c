/* The variant `omp`: OpenMP over images, SIMD over vertices and pixels; bit-identical to `naive`.
 * docs/notes/synth.md shows where the time goes.
 *
 * If there are at least two threads per image of the batch, each image is split into parts. Vertices are
 * independent of each other, so a polygon can be cut into ranges of consecutive vertices ("arcs"). A part is
 * two opposite arcs, which balances the work: one side of an off-centre polygon may be mostly outside the
 * image. Each part paints the numbers of polygons, counted over all shapes of the image, on its own canvas.
 * The highest number that any part has at a pixel determines the pixel's gray and class.
 *
 * If the formula defines masks, a pixel of the canvas is a value of 16 bits, the class number * 256 + the
 * gray, so image and mask are drawn together.
 *
 * The rows of a canvas are an odd number of cache lines apart, so that vertically adjacent pixels map to
 * different sets of the L1 cache. This saves 5 % of the run time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/phase.h"
#include "core/timer.h"
#include "core/variant.h"
#include "machine/host.h"
#include "omp_kernel.h"
#include "synth/ifs.h"
#include "synth/input.h"

/* ---- Fractals (synth/ifs.h), and fractals in space (ifs3d.h) ---- */

/* The rows of the drawing are computed from row 0 on. A row of pixels shows the masks of the three rows of
 * cells before it, so a ring of three rows of masks is enough. Rows of cells and parts of rows that no pixel
 * needs are left out: many fractals leave most of the canvas black. */

/* ---- The scalar kernel ---- */

/* Implement masks() and patches() on any machine. */
static void omp_scalar_masks(const struct philox_key keys[PHILOX_ROUNDS], uint32_t first, uint32_t count,
                             uint8_t *low, uint8_t *high)
{
    for (uint32_t b = 0; b < count; b++) {
        const struct philox_block block = ifs_mask_block(keys[0], first + b);
        for (uint32_t cell = 0; cell < 8; cell++) {
            const uint32_t mask = ifs_mask_of(block, cell);
            *low++ = (uint8_t)mask;
            *high++ = (uint8_t)(mask >> 8);
        }
    }
}

static void omp_scalar_patches(const struct omp_patch_row *row, uint32_t begin, uint32_t end)
{
    for (uint32_t x = begin; x < end; x++) {
        const uint32_t owner = row->owners[x / 2] >> x % 2 * 4 & 15;
        const ptrdiff_t cell = (ptrdiff_t)x - 1 - (ptrdiff_t)((8 - owner) % 3);
        const bool lit = owner == IFS_NO_OWNER ? false
                         : owner == 8          ? row->high[cell]
                                               : row->low[(8 - owner) / 3][cell] >> owner & 1;
        row->pixels[x] = lit ? IFS_GRAY : 0;
    }
}

/* ---- Rows ---- */

/* Space before a row, so that its cells -3 to -1 can be read, and after it for whole vectors. */
enum { BEFORE = 64, AFTER = OMP_MASK_BLOCKS * 8 + OMP_ROW_PIXELS };

static size_t row_bytes(uint32_t res)
{
    return (BEFORE + res + AFTER + 63) / 64 * 64;
}

enum { RING = 3 }; /* rows of masks; then come as many rows of bits 8, and one row of pixels */

static size_t omp_ifs_room_bytes(uint32_t res)
{
    return (2 * RING + 1) * row_bytes(res);
}

/* The pixels begin .. end - 1 of a row that have an owner; end = 0: none. Rounded outwards. */
struct extent {
    uint32_t begin, end;
};

static struct extent extent_of(const uint8_t *owners, size_t pitch)
{
    const uint64_t none = UINT64_MAX;
    size_t begin = 0, end = pitch;
    while (begin < end && memcmp(owners + begin, &none, sizeof none) == 0)
        begin += sizeof none;
    while (begin < end && memcmp(owners + end - sizeof none, &none, sizeof none) == 0)
        end -= sizeof none;
    return begin < end ? (struct extent){(uint32_t)(2 * begin), (uint32_t)(2 * end)} : (struct extent){0, 0};
}

static struct extent extent_union(struct extent a, struct extent b)
{
    if (a.end == 0 || b.end == 0)
        return a.end ? a : b;
    return (struct extent){a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

/* Writes a row of pixels, from right to left if `mirrored`: eight at a time, then those that remain. */
static void write_row(const uint8_t *pixels, uint32_t count, bool mirrored, uint8_t *row)
{
    uint32_t x = 0;
    if (!mirrored) {
        memcpy(row, pixels, count);
        return;
    }
    for (uint64_t eight; x + sizeof eight <= count; x += sizeof eight) {
        memcpy(&eight, pixels + count - x - sizeof eight, sizeof eight);
        eight = __builtin_bswap64(eight);
        memcpy(row + x, &eight, sizeof eight);
    }
    for (; x < count; x++)
        row[x] = pixels[count - 1 - x];
}

/* The inputs of drawing an image. */
struct drawing {
    const struct omp_kernel *kernel;
    struct philox_key keys[PHILOX_ROUNDS];
    uint32_t res;
    size_t pitch;
    const uint8_t *map;
    uint8_t *room;
    const uint8_t *low[RING], *high[RING]; /* of the rows of cells that were computed last, at cell 0 */
};

/* Computes the masks of the cells of row y that pixels of `needed` can show. */
static void compute_masks(struct drawing *drawing, uint32_t y, struct extent needed)
{
    const uint32_t res = drawing->res, begin = needed.begin > 3 ? needed.begin - 3 : 0;
    const uint32_t end = needed.end < res ? needed.end : res;
    const uint32_t first = (y * res + begin) / 8, count = (y * res + end - 1) / 8 - first + 1;
    uint8_t *low = drawing->room + y % RING * row_bytes(res) + BEFORE;
    uint8_t *high = low + RING * row_bytes(res);
    const ptrdiff_t at = (ptrdiff_t)begin - (ptrdiff_t)((y * res + begin) % 8); /* cell of the first mask */
    drawing->kernel->masks(drawing->keys, first, count, low + at, high + at);
    drawing->low[y % RING] = low;
    drawing->high[y % RING] = high;
}

/* Returns the owners of row y of the drawing. */
static const uint8_t *owners_of(const struct drawing *drawing, uint32_t y)
{
    return drawing->map + (drawing->res - 1 - y) * drawing->pitch;
}

static void draw_patches(struct drawing *drawing, uint32_t flip, uint8_t *canvas)
{
    const uint32_t res = drawing->res;
    const struct extent none = {0, 0};
    struct extent extents[4] = {none, none, none, none}; /* of the pixels of row y and of the next three */
    uint8_t *pixels = drawing->room + 2 * RING * row_bytes(res);
    for (uint32_t y = 0; y < 3; y++)
        extents[1 + y] = extent_of(owners_of(drawing, y), drawing->pitch);
    for (uint32_t y = 0; y < res; y++) {
        uint8_t *row = canvas + (size_t)(flip & 1 ? y : res - 1 - y) * res;
        memmove(extents, extents + 1, 3 * sizeof *extents);
        extents[3] = y + 3 < res ? extent_of(owners_of(drawing, y + 3), drawing->pitch) : none;
        if (extents[0].end) {
            const struct omp_patch_row patches = {.owners = owners_of(drawing, y),
                                                  .low = {drawing->low[(y + RING - 1) % RING],
                                                          drawing->low[(y + RING - 2) % RING],
                                                          drawing->low[y % RING]},
                                                  .high = drawing->high[(y + RING - 1) % RING],
                                                  .pixels = pixels};
            memset(pixels, 0, res);
            drawing->kernel->patches(&patches, extents[0].begin, extents[0].end);
            write_row(pixels, res, flip & 2, row);
        } else {
            memset(row, 0, res);
        }
        const struct extent needed = extent_union(extent_union(extents[1], extents[2]), extents[3]);
        if (needed.end)
            compute_masks(drawing, y, needed);
    }
}

/* Draws a bitmap, eight pixels at a time. */
static void draw_points(const struct drawing *drawing, uint32_t flip, uint8_t *canvas)
{
    uint8_t *pixels = drawing->room + 2 * RING * row_bytes(drawing->res);
    for (uint32_t y = 0; y < drawing->res; y++) {
        const uint8_t *bits = drawing->map + y * drawing->pitch;
        for (uint32_t x = 0; x < drawing->res; x += 8) {
            /* copies of the byte, of which each keeps another bit; adding 127 carries it to bit 7 */
            uint64_t eight = bits[x / 8] * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
            eight = (eight + UINT64_C(0x007f7f7f7f7f7f7f)) >> 7 & UINT64_C(0x0101010101010101);
            eight *= IFS_GRAY;
            memcpy(pixels + x, &eight, sizeof eight);
        }
        write_row(pixels, drawing->res, flip & 2,
                  canvas + (size_t)(flip & 1 ? drawing->res - 1 - y : y) * drawing->res);
    }
}

/* Draws an image of FAMILY_IFS, whose orbit the bank has, on a canvas of res * res pixels. `room` has
 * omp_ifs_room_bytes() bytes and belongs to the calling thread. */
static void omp_ifs_draw(const struct omp_kernel *kernel, const struct synth *synth, struct synth_image image,
                         void *room, uint8_t *canvas)
{
    const struct ifs_instance shown = ifs_instance(&synth->ifs, image.instance);
    struct philox_key key = ifs_mask_key(&synth->ifs, synth->seed, synth_label(synth, image), shown.drawing);
    struct drawing drawing = {.kernel = kernel,
                              .res = synth->res,
                              .pitch = ifs_map_pitch(synth->points, synth->res),
                              .map = ifs_bank_map(synth->bank, synth_orbit(synth, image)),
                              .room = room};
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        drawing.keys[round] = key;
        key.word[0] += PHILOX_W0;
        key.word[1] += PHILOX_W1;
    }
    for (int i = 0; i < RING; i++) {
        drawing.low[i] = drawing.room + i * row_bytes(synth->res) + BEFORE;
        drawing.high[i] = drawing.low[i] + RING * row_bytes(synth->res);
    }
    if (synth->points)
        draw_points(&drawing, shown.flip, canvas);
    else
        draw_patches(&drawing, shown.flip, canvas);
}

/* ---- Fractals in space ---- */

/* The points of the latest drawing, and memory for computing points. */
struct solid_room {
    bool valid;
    uint32_t class_index;
    uint64_t drawing;
    struct ifs3d_points points, other;
    uint8_t scratch[];
};

static size_t omp_solid_room_bytes(void)
{
    return (sizeof(struct solid_room) + ifs3d_scratch_bytes() + 64) / 64 * 64 + 64; /* whole cache lines */
}

/* Draws an image of FAMILY_IFS3D and, unless `cloud` is NULL, its point cloud. `room` has
 * omp_solid_room_bytes() bytes, which are 0 at first; it keeps the points of the latest drawing, which the
 * next image may also show. */
static void omp_solid_draw(const struct synth *synth, struct synth_image image, void *room_, uint8_t *canvas,
                           float *cloud)
{
    struct solid_room *room = room_;
    void *scratch = room->scratch + (64 - (uintptr_t)room->scratch % 64) % 64;
    const struct ifs_instance shown = ifs_instance(&synth->ifs, image.instance);
    const struct philox_key key = synth_solid_key(synth, image.class_index, shown);
    const uint32_t row = ifs3d_row(&synth->ifs, shown);
    if (!room->valid || room->class_index != image.class_index || room->drawing != shown.drawing) {
        ifs3d_walk_fast(&synth->solids[image.class_index], row, key, scratch, &room->points);
        room->class_index = image.class_index;
        room->drawing = shown.drawing;
        room->valid = true;
    }
    ifs3d_view(&synth->ifs, &room->points, key, shown.flip, synth->res, canvas);
    if (!cloud)
        return;
    const uint32_t other = ifs3d_partner(key, image.class_index, synth->class_count);
    ifs3d_walk_fast(&synth->solids[other], row, synth_solid_key(synth, other, shown), scratch, &room->other);
    ifs3d_cloud(&room->points, &room->other, cloud);
}

/* ---- Lines ---- */

#define ALIGNMENT 64 /* cache line */
#define ARCS_MAX  2

/* Buffers of one thread. */
struct worker {
    struct omp_arc arcs[ARCS_MAX]; /* arcs of the current part: one if it is a whole image, else ARCS_MAX */
    void *arrays, *room;           /* memory of the arcs' arrays; scratch memory of trace() */
    void *canvas;                  /* for whole images: a canvas, `pitch` pixels per row */
    uint16_t *values; /* for split images: values[n + 1] is what polygon n shows; values[0] is the
                       * background */
    uint8_t *planes;  /* for whole images with masks or of a published set: grays and classes. For fractals
                       * that are converted: a canvas */
    void *scratch;    /* of the published stream */
    double geometry_s, painting_s;
};

struct omp {
    const struct synth *synth;
    const struct omp_kernel *kernel;
    struct omp_tables tables;
    int threads;
    uint32_t parts;  /* parts per image; 1: images are not split */
    uint32_t pitch;  /* pixels from one canvas row to the next */
    bool timed;      /* time the stages separately */
    uint64_t latest; /* number of the latest run */
    struct synth_batch batch;
    uint8_t
        *merged; /* planes of merged images before conversion; NULL unless images are split and converted */
    uint16_t *canvases; /* polygon numbers plus one; batch * parts canvases if images are split, else NULL */
    uint32_t *heaviest; /* classes in order of decreasing work */
    uint64_t *order;    /* images of a batch in order of decreasing work */
    struct worker *workers;
    struct published *published; /* draws the images if synth->set is not NULL */
};

static const struct published_stream *stream_of(const struct omp *omp)
{
    return formulas[omp->synth->formula]->published;
}

/* ---- The scalar kernel ---- */

/* For any machine. Like the vector kernels, it uses each Philox block for two orbits. */

static void scalar_begin(struct omp_arc *arc)
{
    (void)arc;
}

static void scalar_advance(struct omp_arc *arc, uint32_t pair)
{
    const float *gradients = arc->tables->gradients;
    for (uint32_t i = 0; i <= arc->count; i++) {
        struct philox_block block = atom_noise_block(arc->keys[0], arc->slot, omp_vertex(arc, i), pair);
        struct atom_point point = {arc->x[i], arc->y[i]};
        for (int parity = 0; parity < 2; parity++) {
            struct atom_point noise = {noise_of_draw(gradients, block.word[2 * parity]),
                                       noise_of_draw(gradients, block.word[2 * parity + 1])};
            point = atom_advance(point, arc->p, arc->cosine[i], arc->sine[i], arc->advance[i], noise);
            arc->column[parity][i] = (int32_t)point.x;
            arc->row[parity][i] = (int32_t)point.y;
        }
        arc->x[i] = point.x;
        arc->y[i] = point.y;
    }
}

void omp_trace_line(const struct omp_arc *arc, struct line line, const struct omp_pen *pen)
{
    enum { LIST = 256 };
    int32_t pixels[LIST];
    size_t count = 0;
    const struct omp_span span = omp_clip(&line, (int32_t)arc->res);
    if (span.first >= span.end)
        return;
    if (span.first > 0) { /* moves to the first pixel inside */
        const int64_t s = span.first, major = line.major, minor = line.minor;
        const int64_t m = (2 * minor * s + major) / (2 * major);
        line.x += (int32_t)(s * line.major_x + m * line.minor_x);
        line.y += (int32_t)(s * line.major_y + m * line.minor_y);
        line.error = (int32_t)(2 * minor * (s + 1) + major - 2 * major * (m + 1));
    }
    for (line.left = (int32_t)(span.end - span.first); line.left > 0; line_step(&line)) {
        pixels[count++] = line.y * (int32_t)arc->pitch + line.x;
        if (count == LIST) {
            pen->paint(pen, pixels, count);
            count = 0;
        }
    }
    pen->paint(pen, pixels, count);
}

static void scalar_trace(const struct omp_arc *arc, int parity, const struct omp_pen *pen)
{
    const int32_t *x = arc->column[parity], *y = arc->row[parity];
    for (uint32_t i = 0; i < arc->count; i++)
        if (line_drawn(arc->rules, x[i], y[i], x[i + 1], y[i + 1], (int32_t)arc->res))
            omp_trace_line(arc, line_begin(arc->rules, x[i], y[i], x[i + 1], y[i + 1]), pen);
}

static const struct omp_kernel kernel_scalar = {
    .begin = scalar_begin,
    .advance = scalar_advance,
    .trace = scalar_trace,
    .masks = omp_scalar_masks,
    .patches = omp_scalar_patches,
};

/* ---- Kernels and their tables ---- */

/* Each kernel is CPU code for one instruction set. */
static const struct omp_kernel *const kernels[ISAS] = {
    [ISA_SCALAR] = &kernel_scalar,
#if defined(__x86_64__)
    [ISA_AVX2] = &omp_kernel_avx2,
    [ISA_AVX512] = &omp_kernel_avx512,
#endif
};

static void fill_gradients(const struct synth *synth, struct omp_tables *tables)
{
    memcpy(tables->gradients, synth->gradients, sizeof tables->gradients);
    for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++) {
        for (uint32_t side = 0; side < 2; side++) {
            uint32_t hash = noise_permutation[(cell + side) % NOISE_PERIOD] & 15;
            tables->hashes[side][cell % 32] |= hash << (4 * (cell / 32));
        }
        tables->hash_gradients[noise_permutation[cell] & 15] = 0x1p-24f * synth->gradients[cell];
    }
}

/* Bounds the noise by its extremes at PLACES positions per cell, plus a margin for the positions in between.
 * The slope of the noise is at most 1 + 15/8 = 2.875 times the steepest gradient. The factor 6 is about twice
 * 2.875, so the margin also covers rounding. */
static void fill_noise_bounds(struct omp_tables *tables)
{
    enum { PLACES = 512 };
    const float margin = 6 * NOISE_LIMIT / (2 * PLACES); /* slope times half the distance between positions */
    for (uint32_t cell = 0; cell < NOISE_PERIOD; cell++)
        for (uint32_t place = 0; place < PLACES; place++) {
            float noise = noise_at(tables->gradients, cell, (float)place / PLACES);
            tables->noise_low = fminf(tables->noise_low, noise - margin);
            tables->noise_high = fmaxf(tables->noise_high, noise + margin);
        }
}

static void fill_patterns(struct omp_tables *tables)
{
    for (int32_t major = 0; major <= OMP_SHORT; major++)
        for (int32_t minor = 0; minor <= major; minor++)
            for (int32_t s = 0; s < OMP_SHORT; s++)
                tables->patterns[OMP_SHORT * major + minor][s] =
                    omp_pack_step(s, major ? (2 * minor * s + major) / (2 * major) : 0);
}

/* Fills `tables`, which must be zero, for canvases with `pitch` pixels from one row to the next. */
static void fill_tables(const struct synth *synth, int32_t pitch, struct omp_tables *tables)
{
    fill_gradients(synth, tables);
    fill_noise_bounds(tables);
    fill_patterns(tables);
    for (int octant = 0; octant < OCTANT_COUNT; octant++) {
        int32_t x = octant & OCTANT_LEFT ? -1 : 1, y = octant & OCTANT_UP ? -1 : 1;
        bool steep = octant & OCTANT_STEEP;
        tables->step_pixel[octant] = steep ? omp_pack_step(y * pitch, x) : omp_pack_step(x, y * pitch);
    }
    for (uint32_t mask = 0; mask < COUNT_OF(tables->compress); mask++)
        for (uint32_t lane = 0, set = 0; lane < 8; lane++)
            if (mask >> lane & 1)
                tables->compress[mask] |= (uint64_t)lane << (8 * set++);
}

/* ---- Set-up ---- */

static void omp_teardown(void *state)
{
    struct omp *omp = state;
    for (int i = 0; omp->workers && i < omp->threads; i++) {
        free(omp->workers[i].arrays);
        free(omp->workers[i].room);
        free(omp->workers[i].canvas);
        free(omp->workers[i].values);
        free(omp->workers[i].planes);
        free(omp->workers[i].scratch);
    }
    free(omp->workers);
    synth_batch_free(omp->synth, &omp->batch);
    if (omp->published)
        stream_of(omp)->close(omp->published);
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

/* Returns the bytes of a pixel of a canvas. */
static size_t pixel_bytes(const struct omp *omp)
{
    return omp->parts > 1 || omp->synth->rules.masked ? sizeof(uint16_t) : 1;
}

/* Returns the bytes of the planes of an image: its grays and, if there are masks, its class numbers. */
static size_t planes_bytes(const struct synth *synth)
{
    return (synth->rules.masked ? 2 : 1) * synth_image_bytes(synth);
}

static bool needs_planes(const struct synth *synth)
{
    return synth->set || synth->rules.masked;
}

/* Returns whether images are fractals, each of which one thread draws. */
static bool draws_fractals(const struct synth *synth)
{
    return formulas[synth->formula]->family != FAMILY_LINES;
}

/* Returns the bytes that a thread needs to draw fractals, beside the canvas. */
static size_t fractal_room_bytes(const struct synth *synth)
{
    return synth_is_color(synth)   ? color_scratch_bytes(&synth->color)
           : synth_is_ifs3d(synth) ? omp_solid_room_bytes()
                                   : omp_ifs_room_bytes(synth->res);
}

/* Returns the bytes of the canvas of a fractal, which is drawn in place unless it is converted. */
static size_t fractal_canvas_bytes(const struct synth *synth)
{
    return output_is_canvas(&synth->output) ? 0 : synth_image_bytes(synth);
}

/* Returns the bytes of the bank and of all canvases and, if images are split and converted, of the merged
 * images. */
static size_t omp_canvas_bytes(const void *state)
{
    const struct omp *omp = state;
    const struct synth *synth = omp->synth;
    if (draws_fractals(synth))
        return (size_t)omp->threads * (fractal_room_bytes(synth) + fractal_canvas_bytes(synth)) +
               (synth->bank ? ifs_bank_facts(synth->bank).bytes : 0);
    if (omp->parts == 1)
        return (size_t)omp->threads *
               (pixel_bytes(omp) * canvas_pixels(omp) + (needs_planes(synth) ? planes_bytes(synth) : 0));
    return synth->batch * (omp->parts * canvas_pixels(omp) * sizeof(uint16_t) +
                           (output_is_canvas(&synth->output) ? 0 : planes_bytes(synth)));
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
        .rules = &omp->synth->rules,
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

/* Returns an upper bound on the number of polygons of an image. */
static size_t polygons_max(const struct synth *synth)
{
    return (size_t)synth->rules.shapes * synth->orbits_max;
}

/* Allocates space for every vertex, a copy of the first one, and padding to whole vectors. Fractals have no
 * vertices. */
static bool worker_make(const struct omp *omp, struct worker *worker)
{
    const struct synth *synth = omp->synth;
    if (draws_fractals(synth)) {
        const size_t bytes = fractal_canvas_bytes(synth);
        worker->room = aligned_alloc(ALIGNMENT, fractal_room_bytes(synth));
        if (worker->room && synth_is_ifs3d(synth))
            memset(worker->room, 0, fractal_room_bytes(synth)); /* it holds no drawing */
        worker->planes = bytes ? malloc(bytes) : NULL;
        return worker->room && (worker->planes || !bytes);
    }
    size_t length = ((size_t)synth->vertices_max + 1 + 2 * OMP_LANES_MAX) / OMP_LANES_MAX * OMP_LANES_MAX;
    size_t arc_bytes = ARC_WORDS * length * sizeof(float);
    worker->arrays = aligned_alloc(ALIGNMENT, (size_t)arcs_of_part(omp) * arc_bytes);
    worker->room = aligned_alloc(ALIGNMENT, (omp->kernel->room_bytes / ALIGNMENT + 1) * ALIGNMENT);
    bool whole = omp->parts == 1, planes = whole && needs_planes(synth);
    worker->values = whole ? NULL : malloc((polygons_max(synth) + 1) * sizeof *worker->values);
    worker->canvas = whole ? aligned_alloc(ALIGNMENT, pixel_bytes(omp) * canvas_pixels(omp)) : NULL;
    worker->planes = planes ? malloc(planes_bytes(synth)) : NULL;
    if (!worker->arrays || !worker->room || !(whole ? worker->canvas : worker->values) ||
        (planes && !worker->planes))
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
    bool made = synth_batch_make(synth, &omp->batch);
    omp->heaviest = malloc(synth->class_count * sizeof *omp->heaviest);
    omp->order = malloc(synth->batch * sizeof *omp->order);
    omp->workers = calloc((size_t)omp->threads, sizeof *omp->workers);
    made = made && omp->heaviest && omp->order && omp->workers;
    if (omp->parts > 1) {
        omp->canvases =
            aligned_alloc(ALIGNMENT, synth->batch * omp->parts * canvas_pixels(omp) * sizeof(uint16_t));
        made = made && omp->canvases;
    }
    if (omp->parts > 1 && !output_is_canvas(&synth->output)) {
        omp->merged = malloc(synth->batch * planes_bytes(synth));
        made = made && omp->merged;
    }
    for (int i = 0; made && i < omp->threads; i++)
        made = worker_make(omp, &omp->workers[i]);
    if (!made)
        return false;
    for (uint32_t c = 0; c < synth->class_count; c++)
        omp->heaviest[c] = c;
    qsort_r(omp->heaviest, synth->class_count, sizeof *omp->heaviest, heavier, synth->classes);
    if (!draws_fractals(synth))
        fill_tables(synth, (int32_t)omp->pitch, &omp->tables);
    return true;
}

/* Sets the number of parts per image, and the pitch, which depends on it. */
static void set_parts(struct omp *omp, uint32_t parts)
{
    omp->parts = parts;
    const uint32_t line = (uint32_t)(ALIGNMENT / pixel_bytes(omp));
    omp->pitch = ((omp->synth->res + OMP_GUARD + line - 1) / line | 1) * line;
}

/* Splits each image into as many parts as there are threads per image, rounded down. Does not split images if
 * polygon numbers exceed the 16 bits of a canvas pixel, if the canvases do not fit in memory, if a
 * published stream draws them, or if they are fractals. */
static void choose_parts(struct omp *omp)
{
    uint64_t parts = (uint64_t)omp->threads / omp->synth->batch;
    set_parts(omp, parts < 1 ? 1 : (uint32_t)parts);
    if (polygons_max(omp->synth) >= UINT16_MAX || omp->synth->set || draws_fractals(omp->synth) ||
        omp_canvas_bytes(omp) > memory_available_bytes())
        set_parts(omp, 1);
}

static enum status open_published(struct omp *omp)
{
    const struct published_stream *stream = stream_of(omp);
    TRY(stream->open(omp->synth, omp->threads, &omp->published));
    const size_t bytes = (stream->scratch_bytes(omp->published) / ALIGNMENT + 1) * ALIGNMENT;
    for (int i = 0; i < omp->threads; i++) {
        omp->workers[i].scratch = aligned_alloc(ALIGNMENT, bytes);
        TRY(ALLOCATED(omp->workers[i].scratch, "omp: out of memory"));
    }
    return STATUS_OK;
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
    TRY(ALLOCATED(fill_state(omp), "omp: out of memory for a batch of %llu images; lower %s",
                  (unsigned long long)synth->batch, OPTION_OR_FIELD("--batch", "batch")));
    return synth->set && !synth_is_ifs(synth) ? open_published(omp) : STATUS_OK;
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

static void paint_value(const struct omp_pen *pen, const int32_t *pixels, size_t count)
{
    uint16_t *origin = pen->origin, value = (uint16_t)pen->value;
#pragma GCC unroll 8
    for (size_t i = 0; i < count; i++)
        origin[pixels[i]] = value;
}

/* Places the vertices of an arc on the ellipse around the centre of its shape. */
static void place_arc(const struct omp *omp, const struct line_shape *shape, struct philox_key key,
                      uint32_t slot, uint32_t first, uint32_t count, struct omp_arc *arc)
{
    const struct synth *synth = omp->synth;
    const struct atom_class *class_ = &synth->classes[shape->class_index];
    struct atom_spokes spokes = synth_spokes(synth, shape->class_index);
    arc->slot = slot;
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
        struct atom_point point = line_start(shape, spokes.cosine[v], spokes.sine[v]);
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

/* Returns what an orbit of a shape shows: its gray and, if there are masks, its class number. */
static uint16_t orbit_value(const struct synth *synth, struct philox_key key, uint32_t slot,
                            const struct atom_class *class_, uint32_t orbit)
{
    uint8_t gray = atom_gray(&synth->rules, key, slot, orbit);
    return (uint16_t)(synth->rules.masked ? class_->id << 8 | gray : gray);
}

/* Draws the orbits of the arcs that place_arc() has prepared, as values or as polygon numbers plus one.
 * `*number` is the number of the next polygon. */
static void draw_orbits(const struct omp *omp, const struct atom_class *class_, struct philox_key key,
                        uint32_t slot, uint32_t *number, struct omp_pen *pen, struct worker *worker)
{
    const struct omp_kernel *kernel = omp->kernel;
    for (uint32_t orbit = 0; orbit < class_->orbits; orbit++) {
        double start_s = begin_stage(omp, RANGE_VERTICES);
        for (int i = 0; orbit % 2 == 0 && i < arcs_of_part(omp); i++)
            kernel->advance(&worker->arcs[i], orbit / 2);
        end_stage(omp, start_s, &worker->geometry_s);
        start_s = begin_stage(omp, RANGE_PAINTING);
        ++*number;
        pen->value = omp->parts > 1 ? *number : orbit_value(omp->synth, key, slot, class_, orbit);
        for (int i = 0; i < arcs_of_part(omp); i++)
            kernel->trace(&worker->arcs[i], (int)(orbit % 2), pen);
        end_stage(omp, start_s, &worker->painting_s);
    }
}

/* Draws one part of a shape. */
static void draw_shape(const struct omp *omp, struct synth_image image, struct philox_key key, uint32_t slot,
                       uint32_t part, uint32_t *number, struct omp_pen *pen, struct worker *worker)
{
    const struct line_shape shape = synth_shape(omp->synth, image, key, slot);
    const struct atom_class *class_ = &omp->synth->classes[shape.class_index];
    uint64_t arcs = (uint64_t)omp->parts * (uint64_t)arcs_of_part(omp);
    for (int i = 0; i < arcs_of_part(omp); i++) {
        uint64_t arc = part + (uint64_t)i * omp->parts;
        uint32_t first = (uint32_t)(class_->vertices * arc / arcs);
        uint32_t end = (uint32_t)(class_->vertices * (arc + 1) / arcs);
        place_arc(omp, &shape, key, slot, first, end - first, &worker->arcs[i]);
    }
    draw_orbits(omp, class_, key, slot, number, pen, worker);
}

/* Fills the rows of a canvas with a value. */
static void clear(const struct omp *omp, void *canvas, uint16_t value)
{
    const size_t first = (size_t)OMP_GUARD * omp->pitch, count = (size_t)omp->synth->res * omp->pitch;
    if (pixel_bytes(omp) == 1) {
        memset((uint8_t *)canvas + first, value, count);
        return;
    }
    uint16_t *pixels = (uint16_t *)canvas + first;
    for (size_t i = 0; i < count; i++)
        pixels[i] = value;
}

/* Clears the canvas, then draws one part of an image on it. An image that is not split has a single part. */
static void draw_part(const struct omp *omp, struct synth_image image, uint32_t part, void *canvas,
                      struct worker *worker)
{
    const struct line_rules *rules = &omp->synth->rules;
    const struct philox_key key = synth_image_key(omp->synth, image);
    struct omp_pen pen = {.paint = pixel_bytes(omp) > 1 ? paint_value : paint_gray,
                          .origin = (uint8_t *)canvas + canvas_row(omp, 0) * pixel_bytes(omp)};
    uint32_t number = 0;
    RANGE(DRAW);
    double start_s = begin_stage(omp, RANGE_CLEAR);
    clear(omp, canvas, omp->parts > 1 ? 0 : (uint16_t)rules->background);
    end_stage(omp, start_s, &worker->painting_s);
    for (uint32_t slot = 0; slot < rules->shapes; slot++)
        draw_shape(omp, image, key, slot, part, &number, &pen, worker);
}

/* Separates `count` values into grays and class numbers. */
static void separate(const uint16_t *values, size_t count, uint8_t *grays, uint8_t *classes)
{
    for (size_t i = 0; i < count; i++) {
        grays[i] = (uint8_t)values[i];
        classes[i] = (uint8_t)(values[i] >> 8);
    }
}

/* Converts rows of an image and of its mask, which have the size of the canvas, to the output of image j. */
static void convert(const struct omp *omp, struct synth_image image, uint64_t j, const uint8_t *grays,
                    size_t pitch, const uint8_t *classes, struct output_rows rows)
{
    const struct synth *synth = omp->synth;
    const struct philox_key key = synth_image_key(synth, image);
    uint8_t *finished = synth_batch_image(synth, &omp->batch, j),
            *mask = synth_batch_mask(synth, &omp->batch, j);
    if (!output_is_canvas(&synth->output))
        output_convert_rows(&synth->output, synth->res, key, grays, pitch, rows, finished);
    else
        for (size_t y = rows.begin; y < rows.end; y++)
            memcpy(finished + y * synth->res, grays + y * pitch, synth->res);
    if (mask)
        output_convert_mask(&synth->output, synth->res, key, classes, synth->res, rows, mask);
}

/* Converts a worker's canvas or planes to image j. */
static void finish_image(const struct omp *omp, struct synth_image image, uint64_t j, struct worker *worker)
{
    const struct synth *synth = omp->synth;
    const struct output_rows rows = {0, synth->output.res};
    double start_s = begin_stage(omp, RANGE_PAINTING);
    if (!needs_planes(synth)) {
        convert(omp, image, j, (const uint8_t *)worker->canvas + canvas_row(omp, 0), omp->pitch, NULL, rows);
    } else {
        uint8_t *mask = synth_batch_mask(synth, &omp->batch, j);
        const bool direct = !synth->set && mask && output_is_canvas(&synth->output);
        uint8_t *grays = direct ? synth_batch_image(synth, &omp->batch, j) : worker->planes;
        uint8_t *classes = direct ? mask : worker->planes + synth_image_bytes(synth);
        for (size_t y = 0; !synth->set && y < synth->res; y++)
            separate((const uint16_t *)worker->canvas + canvas_row(omp, y), synth->res,
                     grays + y * synth->res, classes + y * synth->res);
        if (!direct)
            convert(omp, image, j, grays, synth->res, classes, rows);
    }
    end_stage(omp, start_s, &worker->painting_s);
}

/* Draws an image of a published set on the planes of the worker. */
static void draw_published(const struct omp *omp, struct synth_image image, struct worker *worker)
{
    const struct synth *synth = omp->synth;
    const struct published_image published = {
        .class_index = image.class_index,
        .instance = image.instance % synth->set->instances,
        .canvas = worker->planes,
        .mask = synth->rules.masked ? worker->planes + synth_image_bytes(synth) : NULL,
        .pitch = synth->res};
    RANGE(DRAW);
    stream_of(omp)->draw(omp->published, &published, worker->scratch);
}

/* Merges rows begin_y .. end_y - 1 of the canvases of all parts of image j. The first canvas receives the
 * highest polygon number of each pixel, and the merged image and mask receive what this polygon shows. */
static void merge_rows(const struct omp *omp, const uint16_t *values, uint64_t j, size_t begin_y,
                       size_t end_y)
{
    const struct synth *synth = omp->synth;
    size_t res = synth->res, stride = canvas_pixels(omp);
    uint8_t *planes = omp->merged + j * planes_bytes(synth);
    uint8_t *image = omp->merged ? planes : synth_batch_image(synth, &omp->batch, j);
    uint8_t *mask = !omp->merged          ? synth_batch_mask(synth, &omp->batch, j)
                    : synth->rules.masked ? planes + synth_image_bytes(synth)
                                          : NULL;
    for (size_t y = begin_y; y < end_y; y++) {
        uint16_t *latest = omp->canvases + j * omp->parts * stride + canvas_row(omp, y);
        for (uint32_t part = 1; part < omp->parts; part++) {
            const uint16_t *other = latest + part * stride;
            for (size_t x = 0; x < res; x++)
                latest[x] = other[x] > latest[x] ? other[x] : latest[x];
        }
        for (size_t x = 0; x < res; x++)
            image[y * res + x] = (uint8_t)values[latest[x]];
        for (size_t x = 0; mask && x < res; x++)
            mask[y * res + x] = (uint8_t)(values[latest[x]] >> 8);
    }
}

/* ---- Batches ---- */

/* Orders the images of the current run by decreasing work, so that threads draw the cheapest images last.
 * This balances the threads. Image j has class (first + j) mod `turns`, where `first` is the number of the
 * run's first image. */
static void order_images(struct omp *omp)
{
    const struct synth *synth = omp->synth;
    uint64_t classes = synth->turns, count = 0;
    if (classes == 1 || (synth->call && synth->call->numbers)) { /* keep the order */
        for (uint64_t j = 0; j < synth_run_count(synth); j++)
            omp->order[j] = j;
        return;
    }
    uint64_t first = synth->first + (synth->call ? synth->call->first : omp->latest * synth->stride);
    for (uint32_t i = 0; i < synth->turns; i++)
        for (uint64_t j = (omp->heaviest[i] + classes - first % classes) % classes;
             j < synth_run_count(synth); j += classes)
            omp->order[count++] = j;
}

static struct synth_image image_of(const struct omp *omp, uint64_t j)
{
    return synth_run_image(omp->synth, omp->latest, j);
}

/* Draws a fractal, and converts it. */
static void draw_fractal(void *state, uint64_t j, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    const struct synth *synth = omp->synth;
    const struct synth_image image = image_of(omp, j);
    uint8_t *finished = synth_batch_image(synth, &omp->batch, j);
    RANGE(DRAW);
    const double start_s = begin_stage(omp, RANGE_PAINTING);
    uint8_t *canvas = worker->planes ? worker->planes : finished;
    if (synth_is_color(synth))
        color_draw(&synth->color, synth->colors, synth_image_key(synth, image), image.class_index,
                   worker->room, canvas);
    else if (synth_is_ifs3d(synth))
        omp_solid_draw(synth, image, worker->room, canvas, synth_batch_cloud(synth, &omp->batch, j));
    else
        omp_ifs_draw(omp->kernel, synth, image, worker->room, canvas);
    if (worker->planes)
        output_convert(&synth->output, synth->res, synth_image_key(synth, image), worker->planes, synth->res,
                       finished);
    end_stage(omp, start_s, &worker->painting_s);
}

/* Views of a drawing are in the batch at distances of `turns` images. They are drawn one after another, so
 * that its points are computed once. */
static int compare_drawings(const void *a, const void *b, void *state)
{
    const struct omp *omp = state;
    const struct ifs_rules *rules = &omp->synth->ifs;
    const struct synth_image first = image_of(omp, *(const uint64_t *)a);
    const struct synth_image second = image_of(omp, *(const uint64_t *)b);
    const uint64_t drawing = first.instance / rules->flips, other = second.instance / rules->flips;
    return first.class_index != second.class_index ? (first.class_index > second.class_index) * 2 - 1
                                                   : (drawing > other) - (drawing < other);
}

enum { SHARES = 16 }; /* per thread, of the ordered images of a batch */

static void draw_solids(void *state, uint64_t share, int thread)
{
    struct omp *omp = state;
    const uint64_t count = synth_run_count(omp->synth), shares = SHARES * (uint64_t)omp->threads;
    for (uint64_t i = count * share / shares; i < count * (share + 1) / shares; i++)
        draw_fractal(omp, omp->order[i], thread);
}

static void draw_whole_image(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    uint64_t j = omp->order[task];
    struct synth_image image = image_of(omp, j);
    if (omp->published)
        draw_published(omp, image, worker);
    else
        draw_part(omp, image, 0, worker->canvas, worker);
    finish_image(omp, image, j, worker);
}

static void draw_one_part(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    uint64_t j = omp->order[task / omp->parts], part = task % omp->parts;
    draw_part(omp, image_of(omp, j), (uint32_t)part,
              omp->canvases + (j * omp->parts + part) * canvas_pixels(omp), &omp->workers[thread]);
}

/* Stores what each polygon of an image shows, after the background. */
static void list_values(const struct synth *synth, struct synth_image image, uint16_t *values)
{
    const struct philox_key key = synth_image_key(synth, image);
    *values++ = (uint16_t)synth->rules.background;
    for (uint32_t slot = 0; slot < synth->rules.shapes; slot++) {
        const struct line_shape shape = synth_shape(synth, image, key, slot);
        const struct atom_class *class_ = &synth->classes[shape.class_index];
        for (uint32_t orbit = 0; orbit < class_->orbits; orbit++)
            *values++ = orbit_value(synth, key, slot, class_, orbit);
    }
}

/* Merges one range of rows of an image's canvases. Each image has `parts` ranges. */
static void merge_share(void *state, uint64_t task, int thread)
{
    struct omp *omp = state;
    struct worker *worker = &omp->workers[thread];
    const struct synth *synth = omp->synth;
    uint64_t j = task / omp->parts, part = task % omp->parts;
    const struct synth_image image = image_of(omp, j);
    double start_s = begin_stage(omp, RANGE_PAINTING);
    list_values(synth, image, worker->values);
    merge_rows(omp, worker->values, j, (size_t)synth->res * part / omp->parts,
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
    const uint8_t *planes = omp->merged + j * planes_bytes(synth);
    double start_s = begin_stage(omp, RANGE_PAINTING);
    convert(omp, image_of(omp, j), j, planes, synth->res, planes + synth_image_bytes(synth), rows);
    end_stage(omp, start_s, &worker->painting_s);
}

/* Computes the orbits of a run's images that the bank does not have yet. */
static enum status omp_ready(void *state, uint64_t number)
{
    struct omp *omp = state;
    const struct synth *synth = omp->synth;
    const uint64_t count = synth_run_count(synth);
    if (!synth_is_ifs(synth))
        return STATUS_OK;
    omp->latest = number;
    for (uint64_t j = 0; j < count; j++)
        omp->order[j] = synth_orbit(synth, image_of(omp, j));
    return ifs_bank_need(synth->bank, omp->order, count, omp->threads);
}

static enum status omp_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct omp *omp = state;
    const struct synth *synth = omp->synth;
    uint64_t count = synth_run_count(synth);
    omp->latest = number;
    TRY(omp_ready(omp, number));
    synth_batch_begin(synth, number, &omp->batch);
    if (synth_is_ifs3d(synth)) {
        for (uint64_t j = 0; j < count; j++)
            omp->order[j] = j;
        qsort_r(omp->order, count, sizeof *omp->order, compare_drawings, omp);
        parallel_for(omp->threads, SHARES * (uint64_t)omp->threads, draw_solids, omp);
        return STATUS_OK;
    }
    if (draws_fractals(synth)) {
        parallel_for(omp->threads, count, draw_fractal, omp);
        return synth->bank ? ifs_bank_check(synth->bank) : STATUS_OK;
    }
    order_images(omp);
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
    return synth_fetch_host(omp->synth, &omp->batch, result);
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
    return ((const struct omp *)state)->batch.images;
}

static struct ifs_bank_facts omp_bank(const void *state)
{
    return ifs_bank_facts(((const struct omp *)state)->synth->bank);
}

static const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER,
                                           .outputs = true,
                                           .formulas = true,
                                           .timed = "clear+draw",
                                           .images = omp_images,
                                           .canvas_bytes = omp_canvas_bytes,
                                           .bank = omp_bank,
                                           .stages = omp_stages};

const struct variant variant_omp = {
    .platform = "cpu",
    .threaded = true,
    .instruction_set = isa_best_name,
    .traits = &traits,
    .setup = omp_setup,
    .ready = omp_ready,
    .run = omp_run,
    .fetch = omp_fetch,
    .teardown = omp_teardown,
};
