/* `omp` for fractals (synth/ifs.h): draws images from the bank of orbits; and for fractals in space
 * (ifs3d.h).
 *
 * The rows of the drawing are computed from row 0 on. A row of pixels shows the masks of the three rows of
 * cells before it, so a ring of three rows of masks is enough. Rows of cells and parts of rows that no pixel
 * needs are left out: many fractals leave most of the canvas black. */
#include <string.h>

#include "omp_kernel.h"
#include "synth/ifs.h"
#include "synth/input.h"

/* ---- The scalar kernel ---- */

void omp_scalar_masks(const struct philox_key keys[PHILOX_ROUNDS], uint32_t first, uint32_t count,
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

void omp_scalar_patches(const struct omp_patch_row *row, uint32_t begin, uint32_t end)
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

size_t omp_ifs_room_bytes(uint32_t res)
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

void omp_ifs_draw(const struct omp_kernel *kernel, const struct synth *synth, struct synth_image image,
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

size_t omp_solid_room_bytes(void)
{
    return (sizeof(struct solid_room) + ifs3d_scratch_bytes() + 64) / 64 * 64 + 64; /* whole cache lines */
}

void omp_solid_draw(const struct synth *synth, struct synth_image image, void *room_, uint8_t *canvas,
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
