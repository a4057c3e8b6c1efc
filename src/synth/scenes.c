/* The source `scenes`: rooms with fractals in space, for the pre-training of detectors in point clouds, in
 * the manner of PC-FractalDB (Yamada et al., CVPR 2022; docs/formulas.md). Published are the number of
 * objects, their scales and aspects, and the side of the room; all else is our own definition. A sample is a
 * pure function of (seed, number), with the same bits on every machine: float32, without functions of libm.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/philox.h"
#include "data/npy.h"
#include "data/source.h"
#include "synth/formula.h"
#include "synth/ifs3d.h"

enum {
    SCENE_POINTS = 40000,
    OBJECTS_LEAST = 15,
    OBJECTS_MAX = 64,
    PLACES = 16,    /* that are tried for an object */
    BOX_VALUES = 9, /* centre x, y, z; size along its own x, y, z; cosine and sine of its heading; class */
    STREAM = 0x5343454E
};
#define ROOM         15.0f
#define EXP_OF_5     0.006737946999085467 /* e^-5, for a Poisson distribution of mean 5 */
#define BOXES_MEMBER "boxes.npy"

struct scenes {
    struct scenes_values parameters;
    struct ifs_rules rules;
    struct ifs3d_system *systems; /* owned; parameters.classes of them */
};

/* ---- Random numbers: block `part` of an object, or with object OBJECTS_MAX of the scene ---- */

static struct philox_block block_of(const struct scenes *scenes, uint64_t number, uint32_t object,
                                    uint32_t part)
{
    return philox(philox_key(scenes->parameters.seed), object << 8 | part, (uint32_t)number,
                  (uint32_t)(number >> 32), STREAM);
}

static float between(uint32_t word, float least, float most)
{
    return fmaf(philox_unit(word), most - least, least);
}

/* Returns 15 plus a number of the Poisson distribution of mean 5, by Knuth's method. */
static uint32_t count_objects(const struct scenes *scenes, uint64_t number)
{
    double product = 1;
    uint32_t count = 0;
    for (; count < OBJECTS_MAX - OBJECTS_LEAST; count++) {
        const struct philox_block block = block_of(scenes, number, OBJECTS_MAX, count / 4);
        product *= ((double)philox_word(block, count % 4) + 0.5) * 0x1p-32;
        if (product <= EXP_OF_5)
            break;
    }
    return OBJECTS_LEAST + count;
}

/* ---- Objects ---- */

/* An object: its points in its own frame, with z up and the lowest one at 0, and its place. */
struct object {
    float size[3], cosine, sine, x, y;
    uint32_t class_index, points;
};

/* Returns half the side of the object's bounding square along an axis of the room. */
static float half_along(const struct object *object, int axis)
{
    const float own = fabsf(object->cosine), other = fabsf(object->sine);
    return 0.5f * fmaf(own, object->size[axis], other * object->size[1 - axis]);
}

/* Draws a heading: the direction of twice the angle of a point of the unit disc. */
static void draw_heading(const struct scenes *scenes, uint64_t number, uint32_t o, struct object *object)
{
    float a = 0, b = 0, square = 0;
    for (uint32_t attempt = 0; !(square > 0 && square < 1); attempt++) {
        const struct philox_block block = block_of(scenes, number, o, 32 + attempt / 2);
        a = ifs3d_signed(philox_word(block, attempt % 2 * 2));
        b = ifs3d_signed(philox_word(block, attempt % 2 * 2 + 1));
        square = fmaf(a, a, b * b);
    }
    object->cosine = fmaf(a, a, -(b * b)) / square;
    object->sine = 2 * a * b / square;
}

/* Returns the area that the bounding squares of two objects share. */
static float shared_area(const struct object *a, const struct object *b)
{
    float sides[2];
    for (int axis = 0; axis < 2; axis++) {
        const float apart = fabsf(axis ? a->y - b->y : a->x - b->x);
        const float side = half_along(a, axis) + half_along(b, axis) - apart;
        sides[axis] = side > 0 ? side : 0;
    }
    return sides[0] * sides[1];
}

/* Places an object: of up to PLACES places, at the first that is free, else at the one whose bounding square
 * shares the smallest area with those of earlier objects. The square is inside the room. */
static void place(const struct scenes *scenes, uint64_t number, uint32_t o, const struct object *earlier,
                  struct object *object)
{
    const float x = half_along(object, 0), y = half_along(object, 1);
    float least = INFINITY;
    struct object best = *object;
    for (uint32_t p = 0; p < PLACES && least > 0; p++) {
        const struct philox_block block = block_of(scenes, number, o, 2 + p / 2);
        struct object at = *object;
        float area = 0;
        at.x = between(philox_word(block, p % 2 * 2), x, ROOM - x);
        at.y = between(philox_word(block, p % 2 * 2 + 1), y, ROOM - y);
        for (uint32_t e = 0; e < o; e++)
            area += earlier[e].points ? shared_area(&at, &earlier[e]) : 0;
        if (area < least) {
            least = area;
            best = at;
        }
    }
    *object = best;
}

/* The memory of a sample. */
struct work {
    struct ifs3d_points drawn;
    float (*points)[3]; /* SCENE_POINTS points of the room */
    void *scratch;
};

/* Writes the points of object `o`, and moves them to its place. An orbit without points has none. */
static void make_object(const struct scenes *scenes, uint64_t number, uint32_t o, uint32_t wanted,
                        const struct object *earlier, struct work *work, float (*points)[3],
                        struct object *object)
{
    const struct philox_block first = block_of(scenes, number, o, 0), second = block_of(scenes, number, o, 1);
    const uint32_t classes = (uint32_t)scenes->parameters.classes;
    const uint64_t drawing = number * IFS3D_WEIGHTS + philox_below(first.word[1], IFS3D_WEIGHTS);
    const struct ifs_instance shown = ifs_instance(&scenes->rules, drawing * scenes->rules.flips);
    const float scale = between(first.word[2], 0.75f, 1.25f);
    float least[3] = {INFINITY, INFINITY, INFINITY}, most[3] = {-INFINITY, -INFINITY, -INFINITY};
    *object = (struct object){.class_index = philox_below(first.word[0], classes)};
    const struct ifs3d_system *system = &scenes->systems[object->class_index];
    ifs3d_walk_fast(system, ifs3d_row(&scenes->rules, shown),
                    ifs_mask_key(&scenes->rules, scenes->parameters.seed, system->id, shown.drawing),
                    work->scratch, &work->drawn);
    object->points = work->drawn.count ? wanted : 0;
    for (uint32_t i = 0; i < object->points; i++) {
        const float *at = work->drawn.at[(uint64_t)i * IFS3D_POINTS / wanted];
        const float turned[3] = {at[0], -at[2], at[1]}; /* the fractal's y is up */
        for (int axis = 0; axis < 3; axis++) {
            const float value =
                turned[axis] * (scale * between(philox_word(second, (uint32_t)axis), 0.9f, 1.1f));
            points[i][axis] = value;
            least[axis] = value < least[axis] ? value : least[axis];
            most[axis] = value > most[axis] ? value : most[axis];
        }
    }
    for (int axis = 0; axis < 3 && object->points; axis++)
        object->size[axis] = most[axis] - least[axis];
    draw_heading(scenes, number, o, object);
    if (object->points)
        place(scenes, number, o, earlier, object);
    for (uint32_t i = 0; i < object->points; i++) {
        const float x = points[i][0] - 0.5f * (least[0] + most[0]),
                    y = points[i][1] - 0.5f * (least[1] + most[1]);
        points[i][0] = fmaf(object->cosine, x, fmaf(-object->sine, y, object->x));
        points[i][1] = fmaf(object->sine, x, fmaf(object->cosine, y, object->y));
        points[i][2] -= least[2];
    }
}

/* ---- Samples ---- */

static enum status add_arrays(const struct object *objects, uint32_t count, const struct work *work,
                              struct source_sample *sample)
{
    float boxes[OBJECTS_MAX][BOX_VALUES];
    char shape[NPY_SHAPE_MAX];
    uint32_t shown = 0, points = 0;
    for (uint32_t o = 0; o < count; o++) {
        const struct object *object = &objects[o];
        const float box[BOX_VALUES] = {object->x,       object->y,       0.5f * object->size[2],
                                       object->size[0], object->size[1], object->size[2],
                                       object->cosine,  object->sine,    (float)object->class_index};
        if (object->points)
            memcpy(boxes[shown++], box, sizeof box);
        points += object->points;
    }
    snprintf(shape, sizeof shape, "%u, %d", shown, BOX_VALUES);
    TRY(source_add_array(sample, "<f4", shape, boxes, shown * sizeof boxes[0], NULL));
    sample->members[sample->count - 1].extension = BOXES_MEMBER;
    snprintf(shape, sizeof shape, "%u, 3", points);
    return source_add_array(sample, "<f4", shape, work->points, points * sizeof work->points[0], NULL);
}

static enum status make_scene(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct scenes *scenes = state;
    const uint32_t count = count_objects(scenes, number);
    struct object objects[OBJECTS_MAX];
    FREED struct work *work = calloc(1, sizeof *work);
    FREED float(*points)[3] = malloc(SCENE_POINTS * sizeof *points);
    FREED void *scratch = aligned_alloc(64, (ifs3d_scratch_bytes() + 63) / 64 * 64);
    uint32_t at = 0;
    TRY(ALLOCATED(work && points && scratch, "out of memory for a scene"));
    work->points = points;
    work->scratch = scratch;
    for (uint32_t o = 0; o < count; o++) {
        const uint32_t wanted = SCENE_POINTS * (o + 1) / count - SCENE_POINTS * o / count;
        make_object(scenes, number, o, wanted, objects, work, points + at, &objects[o]);
        at += objects[o].points;
    }
    return add_arrays(objects, count, work, sample);
}

static void scenes_describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    snprintf(texts[0], SOURCE_TEXT_MAX, "%u", count_objects(state, number));
}

static void scenes_close(void *state)
{
    free(((struct scenes *)state)->systems);
    free(state);
}

static enum status scenes_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    const struct formula_preset *preset = formula_preset(formulas[FORMULA_IFS3D], "pc-fractaldb-1k");
    struct scenes *scenes = *state = calloc(1, sizeof *scenes);
    TRY(ALLOCATED(scenes, "out of memory"));
    scenes->parameters = *(const struct scenes_values *)request->parameters;
    scenes->rules = *preset->ifs;
    const uint32_t count = (uint32_t)scenes->parameters.classes;
    FREED struct class_row *rows = calloc(count, sizeof *rows);
    scenes->systems = calloc(count, sizeof *scenes->systems);
    TRY(ALLOCATED(rows && scenes->systems, "out of memory for classes"));
    TRY(preset->rows(preset, count, rows));
    facts->identity = FNV_BEGIN;
    for (uint32_t c = 0; c < count; c++) {
        ifs3d_system(&rows[c], &scenes->systems[c]);
        facts->identity = fnv_add(facts->identity, rows[c].value, sizeof rows[c].value);
    }
    facts->samples = SOURCE_ENDLESS;
    facts->sample_bytes = SCENE_POINTS * 3 * sizeof(float) + 2 * NPY_HEADER_MAX;
    return STATUS_OK;
}

static const struct option_spec options[] = {
    {"seed", "N", OPTION_COUNT, offsetof(struct scenes_values, seed), .fallback = "0",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "seed of the scenes"},
    {"classes", "N", OPTION_COUNT, offsetof(struct scenes_values, classes), .fallback = "1000", .minimum = 1,
     .maximum = 1000, .column = COLUMN,
     .help = "classes of pc-fractaldb-1k that the scenes show: the first N"},
};

static const char *const columns[] = {"objects", NULL};

const struct source source_scenes = {
    .name = "scenes",
    .summary = "rooms with fractals in space: point clouds, and a box and a class per object",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct scenes_values),
    .columns = columns,
    .open = scenes_open,
    .close = scenes_close,
    .make_one = make_scene,
    .describe = scenes_describe,
};
