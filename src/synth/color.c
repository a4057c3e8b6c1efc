/* Draws the colour images of color.h on the host, and defines the formulas `colorfractal` and
 * `multifractal`: fractals in colour over clouds, one or several per image, as the images of Anderson and
 * Farrell (WACV 2022) (docs/formulas.md). */
#include "synth/color.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/portable.h"
#include "machine/host.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"
#include "synth/input.h"

/* ---- Classes ---- */

/* Returns the largest singular value of a map. */
static double stretch(const double map[6])
{
    const double squares = map[0] * map[0] + map[1] * map[1] + map[2] * map[2] + map[3] * map[3];
    const double determinant = map[0] * map[3] - map[1] * map[2];
    const double root = squares * squares - 4 * determinant * determinant;
    return sqrt((squares + sqrt(root > 0 ? root : 0)) / 2);
}

void color_system(const struct class_row *row, struct color_system *system)
{
    double sum = 0;
    *system = (struct color_system){.id = row->id, .maps = (uint32_t)row->value[0]};
    for (uint32_t m = 0; m < COLOR_MAPS_MAX; m++) {
        const double *map = row->value + 1 + 7 * m;
        system->below[m] = 65536;
        if (m >= system->maps)
            continue;
        sum += map[6];
        if (m + 1 < system->maps && sum < 1)
            system->below[m] = (uint32_t)(65536 * sum + 0.5);
        for (int i = 0; i < 6; i++)
            system->map[m][i] = (float)map[i];
        const double most = 1 / stretch(map); /* infinity for a map to a point */
        system->factor_most[m] = most < 1.1 ? (float)most : 1.1f;
    }
}

/* Implements check() of a struct formula. */
static enum status color_check(const struct formula *formula, const struct class_row *row)
{
    const uint32_t maps = (uint32_t)row->value[0];
    for (uint32_t m = 0; m < maps; m++) {
        const double most = stretch(row->value + 1 + 7 * m);
        if (most > 1 + 1e-5)
            return status_set(STATUS_USAGE,
                              "map %u stretches by %.9g; the largest singular value of a%u, b%u, c%u, d%u "
                              "must be at most 1",
                              m + 1, most, m + 1, m + 1, m + 1, m + 1);
    }
    return ifs_check(formula, row);
}

/* ---- An object ---- */

#define SIDE_MAX   COLOR_SIDE_ONE
#define CELLS_MAX  ((size_t)SIDE_MAX * SIDE_MAX)
#define GRADES_MAX (COLOR_OBJECTS_MAX * (size_t)COLOR_SIDE_MANY * COLOR_SIDE_MANY) /* more than CELLS_MAX */

/* The memory of color_draw(). */
struct scratch {
    float x[COLOR_POINTS], y[COLOR_POINTS]; /* point `i` of walker `w` is number i * COLOR_WALKERS + w */
    uint16_t counts[CELLS_MAX], sums[CELLS_MAX];
    int16_t heights[COLOR_SKY * COLOR_SKY];
    uint8_t grades[GRADES_MAX], sky[COLOR_SKY * COLOR_SKY];
    uint32_t palettes[(1 + COLOR_OBJECTS_MAX) * COLOR_PALETTE];
    uint32_t rows[]; /* RING rows of the canvas: as drawn, and three blurred along x */
};

enum { RING = 4 };

size_t color_scratch_bytes(const struct color_rules *rules)
{
    return (sizeof(struct scratch) + RING * sizeof(uint32_t) * (size_t)rules->res + 63) / 64 * 64;
}

/* The input of the walkers of an object. */
struct walk {
    struct philox_key key;
    uint32_t slot;
    uint32_t below[COLOR_MAPS_MAX];
    float map[COLOR_MAPS_MAX][6];
    struct color_point start;
};

static void begin_walk(const struct color_rules *rules, const struct color_system *system,
                       struct philox_key key, uint32_t slot, struct walk *walk)
{
    const struct color_jitter jitter = color_jitter(rules, system, key, slot);
    walk->key = key;
    walk->slot = slot;
    memcpy(walk->below, system->below, sizeof walk->below);
    for (uint32_t m = 0; m < COLOR_MAPS_MAX; m++)
        for (uint32_t i = 0; i < 6; i++)
            walk->map[m][i] = color_value(system, jitter, m, i);
    walk->start = color_start(walk->map[0]);
}

/* Computes the points, walker by walker. */
FDSL_FMA_CLONES static void walk_plain(const struct walk *walk, struct scratch *scratch)
{
    for (uint32_t w = 0; w < COLOR_WALKERS; w++) {
        struct color_point point = walk->start;
        for (uint32_t b = 0; b < COLOR_BLOCKS; b++) {
            const struct philox_block block = color_choices(walk->key, walk->slot, w, b);
            for (uint32_t i = 0; i < COLOR_EIGHT; i++) {
                const uint32_t step = COLOR_EIGHT * b + i;
                point = color_step(walk->map[color_choice(walk->below, block, i)], point);
                if (step >= COLOR_BURN) {
                    scratch->x[(step - COLOR_BURN) * COLOR_WALKERS + w] = point.x;
                    scratch->y[(step - COLOR_BURN) * COLOR_WALKERS + w] = point.y;
                }
            }
        }
    }
}

#define LANES 16u /* walkers at a time */

/* Computes the same points as walk_plain(), several walkers at a time. The compiler makes vectors of the
 * loops over lanes. */
static inline __attribute__((always_inline)) void walk_lanes(const struct walk *walk, struct scratch *scratch)
{
    const uint32_t below[3] = {walk->below[0], walk->below[1], walk->below[2]};
    float map[COLOR_MAPS_MAX][6];
    memcpy(map, walk->map, sizeof map);
    for (uint32_t first = 0; first < COLOR_WALKERS; first += LANES) {
        float x[LANES], y[LANES];
        uint32_t words[COLOR_EIGHT / 2][LANES];
        for (uint32_t l = 0; l < LANES; l++) {
            x[l] = walk->start.x;
            y[l] = walk->start.y;
        }
        for (uint32_t b = 0; b < COLOR_BLOCKS; b++) {
            for (uint32_t l = 0; l < LANES; l++) {
                const struct philox_block block = color_choices(walk->key, walk->slot, first + l, b);
                for (uint32_t i = 0; i < COLOR_EIGHT / 2; i++)
                    words[i][l] = block.word[i];
            }
            for (uint32_t i = 0; i < COLOR_EIGHT; i++) {
                const uint32_t step = COLOR_EIGHT * b + i;
                for (uint32_t l = 0; l < LANES; l++) {
                    const uint32_t half = words[i / 2][l] >> i % 2 * 16 & 0xffff;
                    const bool one = half >= below[0], two = half >= below[1], three = half >= below[2];
                    float value[6];
                    for (uint32_t k = 0; k < 6; k++)
                        value[k] = three ? map[3][k] : two ? map[2][k] : one ? map[1][k] : map[0][k];
                    const struct color_point next = color_step(value, (struct color_point){x[l], y[l]});
                    x[l] = next.x;
                    y[l] = next.y;
                }
                if (step >= COLOR_BURN) {
                    memcpy(scratch->x + (step - COLOR_BURN) * COLOR_WALKERS + first, x, sizeof x);
                    memcpy(scratch->y + (step - COLOR_BURN) * COLOR_WALKERS + first, y, sizeof y);
                }
            }
        }
    }
}

typedef void walk_function(const struct walk *walk, struct scratch *scratch);

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void walk_avx2(const struct walk *walk, struct scratch *scratch)
{
    walk_lanes(walk, scratch);
}

__attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw"))) static void
walk_avx512(const struct walk *walk, struct scratch *scratch)
{
    walk_lanes(walk, scratch);
}
#endif

/* The walks by enum isa. */
static walk_function *const walks[] = {
    [ISA_SCALAR] = walk_plain,
#if defined(__x86_64__)
    [ISA_AVX2] = walk_avx2,
    [ISA_AVX512] = walk_avx512,
#endif
};

/* Returns the axis of the points' coordinates. */
static struct color_axis axis_of(const float *values, uint32_t side)
{
    enum { PARTS = 16 }; /* independent extremes, so that the loop is vectorised */
    float least[PARTS], most[PARTS];
    for (uint32_t p = 0; p < PARTS; p++)
        least[p] = most[p] = values[p];
    for (uint32_t i = PARTS; i < COLOR_POINTS; i += PARTS)
        for (uint32_t p = 0; p < PARTS; p++) {
            least[p] = values[i + p] < least[p] ? values[i + p] : least[p];
            most[p] = values[i + p] > most[p] ? values[i + p] : most[p];
        }
    for (uint32_t p = 1; p < PARTS; p++) {
        least[0] = least[p] < least[0] ? least[p] : least[0];
        most[0] = most[p] > most[0] ? most[p] : most[0];
    }
    return color_axis(least[0], most[0], side);
}

/* Adds the counts of all cells, moved by each offset of the pattern. */
static void spread(uint32_t side, uint32_t pattern, const uint16_t *counts, uint16_t *sums)
{
    memset(sums, 0, (size_t)side * side * sizeof *sums);
    for (uint32_t bit = 0; bit < 9; bit++) {
        if (!(pattern >> bit & 1))
            continue;
        const int32_t down = (int32_t)(bit / 3) - 1, right = (int32_t)(bit % 3) - 1, last = (int32_t)side - 1;
        for (int32_t y = down < 0; y <= last - (down > 0); y++)
            for (int32_t x = right < 0; x <= last - (right > 0); x++)
                sums[(y + down) * (int32_t)side + x + right] =
                    (uint16_t)(sums[(y + down) * (int32_t)side + x + right] + counts[y * (int32_t)side + x]);
    }
}

/* Rasters the points, and grades the cells. */
static void raster(const struct color_rules *rules, uint32_t pattern, struct scratch *scratch,
                   uint8_t *grades)
{
    const uint32_t side = color_side(rules), cells = side * side;
    const struct color_axis x = axis_of(scratch->x, side), y = axis_of(scratch->y, side);
    uint16_t *counts = scratch->counts;
    uint32_t most = 0;
    memset(counts, 0, cells * sizeof *counts);
    for (uint32_t i = 0; i < COLOR_POINTS; i++)
        counts[color_cell(x, scratch->x[i]) * side + color_cell(y, scratch->y[i])]++;
    if (rules->patches) {
        spread(side, pattern, counts, scratch->sums);
        counts = scratch->sums;
    }
    for (uint32_t i = 0; i < cells; i++)
        most = counts[i] > most ? counts[i] : most;
    for (uint32_t i = 0; i < cells; i++)
        grades[i] = counts[i] ? (uint8_t)color_grade(counts[i], most) : 0;
}

/* ---- The image ---- */

static void draw_sky(struct philox_key key, struct scratch *scratch)
{
    const struct color_sky sky = color_sky(key);
    const uint32_t last = COLOR_SKY - 1, cells = COLOR_SKY * COLOR_SKY;
    int16_t *values = scratch->heights, least = INT16_MAX, most = INT16_MIN;
    for (uint32_t i = 0; i < 4; i++)
        values[(i / 2) * last * COLOR_SKY + (i % 2) * last] = (int16_t)sky.corner[i];
    for (uint32_t level = 1; level <= COLOR_SKY_LEVELS; level++)
        for (uint32_t phase = 0; phase < 2; phase++) {
            const int32_t amplitude = color_amplitude(sky, level);
            const uint32_t count = color_sky_count(level, phase);
            struct color_spot spot = color_spot(level, phase, 0);
            for (uint32_t first = 0; first < count; first += 8) {
                const struct philox_block block = color_noise_block(key, level, phase, first / 8);
                for (uint32_t i = 0; i < 8 && first + i < count; i++) {
                    color_sky_value(values, level, phase, spot, color_noise(block, i, amplitude));
                    spot = color_next_spot(level, phase, spot);
                }
            }
        }
    for (uint32_t i = 0; i < cells; i++) {
        least = values[i] < least ? values[i] : least;
        most = values[i] > most ? values[i] : most;
    }
    const struct color_shades shades = color_shades(least, most);
    for (uint32_t i = 0; i < cells; i++)
        scratch->sky[i] = (uint8_t)color_shade(shades, values[i]);
}

typedef void row_function(const struct color_view *view, uint32_t y, uint32_t *row);

/* Computes the colours of a row, pixel by pixel. */
static void row_plain(const struct color_view *view, uint32_t y, uint32_t *row)
{
    for (uint32_t x = 0; x < view->res; x++)
        row[x] = color_pixel(view, x, y);
}

/* Computes the same colours: the clouds, then the part of each object. */
static void row_fast(const struct color_view *view, uint32_t y, uint32_t *row)
{
    const uint32_t v = y * view->sky_step;
    const uint8_t *above = view->sky + (v >> 16) * COLOR_SKY;
    for (uint32_t x = 0, u = 0; x < view->res; x++, u += view->sky_step)
        row[x] =
            view->palettes[(color_mix(above, above + COLOR_SKY, u >> 16, (u >> 16) + 1, u, v) + 32768) >> 16];
    for (uint32_t slot = 0; slot < view->objects; slot++) {
        const struct color_place *place = &view->place[slot];
        const int32_t end = place->x + (int32_t)place->width;
        const uint32_t *palette = view->palettes + (1 + slot) * COLOR_PALETTE;
        if ((uint32_t)((int32_t)y - place->y) >= place->height || end <= 0)
            continue;
        for (uint32_t x = place->x > 0 ? (uint32_t)place->x : 0; x < view->res && x < (uint32_t)end; x++) {
            const uint32_t grade = color_grade_at(view, slot, x, y);
            row[x] = grade ? palette[grade] : row[x];
        }
    }
}

/* Fills the row of a ring: as drawn, or if `weight` is not 0, blurred along x. `drawn` has room for a row. */
static void draw_row(const struct color_view *view, row_function *fill, uint32_t weight, uint32_t y,
                     uint32_t *drawn, uint32_t *row)
{
    const uint32_t last = view->res - 1;
    fill(view, y, weight ? drawn : row);
    for (uint32_t x = 0; weight && x <= last; x++)
        row[x] = color_blurred(weight, drawn[x ? x - 1 : 0], drawn[x], drawn[x < last ? x + 1 : last]);
}

/* Puts the objects and the clouds together, row by row. */
static void compose(const struct color_view *view, row_function *fill, uint32_t weight, uint32_t *rows,
                    uint8_t *canvas)
{
    const uint32_t res = view->res, last = res - 1;
    const size_t plane = (size_t)res * res;
    uint32_t *ring = rows + res, done = 0; /* rows that the ring has had */
    for (uint32_t y = 0; y < res; y++) {
        for (; done <= (weight && y < last ? y + 1 : y); done++)
            draw_row(view, fill, weight, done, rows, ring + done % 3 * (size_t)res);
        const uint32_t *above = ring + (y ? y - 1 : 0) % 3 * (size_t)res, *own = ring + y % 3 * (size_t)res;
        const uint32_t *under = ring + (y < last ? y + 1 : last) % 3 * (size_t)res;
        for (uint32_t x = 0; x < res; x++) {
            const uint32_t color = weight ? color_blurred(weight, above[x], own[x], under[x]) : own[x];
            uint8_t *to = canvas + (size_t)y * res + x;
            to[0] = (uint8_t)color;
            to[plane] = (uint8_t)(color >> 8);
            to[2 * plane] = (uint8_t)(color >> 16);
        }
    }
}

/* Draws the rasters of the objects, without the clouds and the palettes. */
static struct color_view begin_view(const struct color_rules *rules, const struct color_system *systems,
                                    struct philox_key key, uint32_t class_index, walk_function *run,
                                    struct scratch *scratch)
{
    const uint32_t side = color_side(rules), pattern = color_pattern(rules, key);
    struct color_view view = {.objects = color_objects(rules, key),
                              .res = rules->res,
                              .side = side,
                              .sky_step = ((COLOR_SKY - 1) << 16) / rules->res,
                              .sky = scratch->sky,
                              .palettes = scratch->palettes};
    for (uint32_t slot = 0; slot < view.objects; slot++) {
        uint8_t *grades = scratch->grades + slot * (size_t)side * side;
        struct walk walk;
        begin_walk(rules, &systems[color_class(rules, key, slot, class_index)], key, slot, &walk);
        run(&walk, scratch);
        raster(rules, pattern, scratch, grades);
        view.place[slot] = color_place(rules, key, slot);
        view.grades[slot] = grades;
    }
    return view;
}

static void draw(const struct color_rules *rules, const struct color_system *systems, struct philox_key key,
                 uint32_t class_index, walk_function *run, row_function *fill, struct scratch *scratch,
                 uint8_t *canvas)
{
    const struct color_view view = begin_view(rules, systems, key, class_index, run, scratch);
    draw_sky(key, scratch);
    for (uint32_t slot = 0; slot <= view.objects; slot++)
        for (uint32_t i = 0; i < COLOR_PALETTE; i++)
            scratch->palettes[slot * COLOR_PALETTE + i] = color_of(color_tint(key, slot), slot, i);
    compose(&view, fill, color_blur(key), scratch->rows, canvas);
}

void color_draw(const struct color_rules *rules, const struct color_system *systems, struct philox_key key,
                uint32_t class_index, void *scratch, uint8_t *canvas)
{
    draw(rules, systems, key, class_index, walks[isa_best()], row_fast, scratch, canvas);
}

void color_draw_plain(const struct color_rules *rules, const struct color_system *systems,
                      struct philox_key key, uint32_t class_index, void *scratch, uint8_t *canvas)
{
    draw(rules, systems, key, class_index, walk_plain, row_plain, scratch, canvas);
}

struct color_look color_look(const struct color_rules *rules, const struct color_system *systems,
                             struct philox_key key, uint32_t class_index, void *scratch)
{
    const struct color_view view =
        begin_view(rules, systems, key, class_index, walks[isa_best()], (struct scratch *)scratch);
    const uint32_t cells = view.side * view.side;
    struct color_look look = {.objects = view.objects};
    uint32_t shown = 0;
    for (uint32_t slot = 0; slot < view.objects; slot++) {
        uint32_t set = 0;
        for (uint32_t i = 0; i < cells; i++)
            set += view.grades[slot][i] != 0;
        look.fill[slot] = (float)set / (float)cells;
    }
    for (uint32_t y = 0; y < view.res; y++)
        for (uint32_t x = 0; x < view.res; x++) {
            uint32_t grade = 0;
            for (uint32_t slot = 0; slot < view.objects && !grade; slot++)
                grade = color_grade_at(&view, slot, x, y);
            shown += grade != 0;
        }
    look.lit = (float)shown / ((float)view.res * (float)view.res);
    return look;
}

void color_multi_hot(const struct color_rules *rules, struct philox_key key, uint8_t *label)
{
    memset(label, 0, rules->class_count);
    for (uint32_t slot = 0; slot < color_objects(rules, key); slot++)
        label[color_class(rules, key, slot, 0)] = 1;
}

/* ---- The formulas ---- */

#define VALUE IFS_PARAMETER
#define MAP(m)                                                                                           \
    VALUE("a" #m, 1.1), VALUE("b" #m, 1.1), VALUE("c" #m, 1.1), VALUE("d" #m, 1.1), VALUE("e" #m, 1000), \
        VALUE("f" #m, 1000), IFS_PROBABILITY(m)
/* In the order of the values of struct color_system. */
#define PARAMETERS                                                         \
    {                                                                      \
        IFS_MAPS_PARAMETER(COLOR_MAPS_MAX), MAP(1), MAP(2), MAP(3), MAP(4) \
    }

/* Formulas with different lists of parameters do not share presets. */
static const struct formula_parameter one_parameters[] = PARAMETERS, many_parameters[] = PARAMETERS;
_Static_assert(COUNT_OF(one_parameters) == COLOR_PARAMETERS, "one parameter per value of a system");

static const struct formula_preset one_presets[] = {
    {.name = "colorfractal", .rows = ifs_sampled_rows},
    {.name = "fractal-color-1k", .rows = ifs_sampled_rows, .classes = 1000},
    {.name = NULL},
};

static const struct formula_preset many_presets[] = {
    {.name = "multifractal", .rows = ifs_sampled_rows},
    {.name = "multifractal-1k", .rows = ifs_sampled_rows, .classes = 1000},
    {.name = NULL},
};

#define UNPUBLISHED "the script draws its images with unseeded generators"

const struct formula formula_colorfractal = {
    .name = "colorfractal",
    .summary = "draws one fractal in colour per image, in the manner of Anderson and Farrell (WACV 2022)",
    .id = FORMULA_COLORFRACTAL,
    .family = FAMILY_COLOR,
    .targets = TARGET_LABEL,
    .parameters = one_parameters,
    .parameter_count = COUNT_OF(one_parameters),
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = one_presets,
    .check = color_check,
    .canvas = 224,
    .unpublished = UNPUBLISHED,
};

const struct formula formula_multifractal = {
    .name = "multifractal",
    .summary = "draws one to five fractals in colour per image; a multi-hot label tells their classes",
    .id = FORMULA_MULTIFRACTAL,
    .family = FAMILY_COLOR,
    .targets = TARGET_MULTI_HOT,
    .parameters = many_parameters,
    .parameter_count = COUNT_OF(many_parameters),
    .id_most = UINT32_MAX,
    .classes = 1000,
    .presets = many_presets,
    .check = color_check,
    .canvas = 224,
    .unpublished = UNPUBLISHED,
};

/* ---- The report of --describe ---- */

_Static_assert(IFS_OBJECTS_MAX == COLOR_OBJECTS_MAX, "the report counts all objects");

/* The first images of a set, of which a task examines one. */
struct looking {
    const struct synth *synth;
    struct color_look *looks;
    struct progress progress;
    _Atomic bool failed;
};

/* Returns image `n` of the set. */
static struct synth_image image_at(const struct synth *synth, uint64_t n)
{
    return synth_image_at(0, 1, synth->turns, 0, n);
}

static void look_at_image(void *context, uint64_t n, int thread)
{
    struct looking *looking = context;
    const struct synth *synth = looking->synth;
    const struct synth_image image = image_at(synth, n);
    void *scratch = aligned_alloc(64, color_scratch_bytes(&synth->color));
    if (scratch)
        looking->looks[n] = color_look(&synth->color, synth->colors, synth_image_key(synth, image),
                                       image.class_index, scratch);
    else
        looking->failed = true;
    free(scratch);
    if (thread == 0 && progress_due(&looking->progress))
        progress_show(&looking->progress, "examining images: %u of %u", (unsigned)n,
                      (unsigned)synth->class_count);
}

/* Sets the parts of the report that follow from the images. `shown` has a zero per class; `shares` has room
 * for those of all objects. */
static void count_looks(const struct synth *synth, const struct color_look *looks, uint32_t *shown,
                        float *shares, struct ifs_report *report)
{
    size_t objects = 0, sum = 0;
    for (uint32_t n = 0; n < report->images; n++)
        shares[n] = looks[n].lit;
    report->lit = ifs_distribute(shares, report->images);
    for (uint32_t n = 0; n < report->images; n++) {
        const struct synth_image image = image_at(synth, n);
        const struct philox_key key = synth_image_key(synth, image);
        report->objects[looks[n].objects - 1]++;
        for (uint32_t slot = 0; slot < looks[n].objects; slot++) {
            const uint32_t c = color_class(&synth->color, key, slot, image.class_index);
            bool again = false;
            for (uint32_t before = 0; before < slot; before++)
                again |= color_class(&synth->color, key, before, image.class_index) == c;
            shown[c] += !again;
            shares[objects++] = looks[n].fill[slot];
        }
    }
    report->fill = ifs_distribute(shares, objects);
    report->shown_least = UINT32_MAX;
    for (uint32_t c = 0; c < report->classes; c++) {
        sum += shown[c];
        report->shown_least = shown[c] < report->shown_least ? shown[c] : report->shown_least;
        report->shown_most = shown[c] > report->shown_most ? shown[c] : report->shown_most;
    }
    report->shown_mean = (double)sum / report->classes;
}

enum status synth_describe_colors(const struct synth *synth, struct ifs_report *report)
{
    const uint32_t count = synth->class_count;
    struct looking looking = {.synth = synth};
    double maps = 0;
    FREED struct color_look *looks = looking.looks = malloc(count * sizeof *looks);
    FREED uint32_t *shown = calloc(count, sizeof *shown);
    FREED float *shares = malloc((size_t)count * COLOR_OBJECTS_MAX * sizeof *shares);
    TRY(ALLOCATED(looks && shown && shares, "out of memory for %u images", (unsigned)count));
    progress_begin(&looking.progress, true);
    parallel_for(parallel_threads(), count, look_at_image, &looking);
    progress_clear(&looking.progress);
    TRY(ALLOCATED(!looking.failed, "out of memory for images; lower --threads or --res"));
    for (uint32_t c = 0; c < count; c++)
        maps += synth->rows[c].value[0];
    *report = (struct ifs_report){.classes = count, .images = count, .res = synth->res, .maps = maps / count};
    count_looks(synth, looks, shown, shares, report);
    return STATUS_OK;
}
