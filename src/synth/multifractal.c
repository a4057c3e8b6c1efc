/* The formulas `colorfractal` and `multifractal`: fractals in colour over clouds, one or several per image,
 * as the images of Anderson and Farrell (WACV 2022) (docs/formulas.md). */
#include <stdatomic.h>
#include <stdlib.h>

#include "core/parallel.h"
#include "core/portable.h"
#include "synth/color.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"
#include "synth/input.h"

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
