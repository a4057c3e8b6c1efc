/* The input of `synth`: classes, batches in host memory, and generators of images. */
#include "synth/input.h"

#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/generator.h"
#include "core/parallel.h"
#include "core/variant.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"
#include "synth/lines.h"

void synth_set_formula(struct synth *synth, enum formula_id formula)
{
    synth->formula = formula;
    synth->rules = line_rules_of(formula);
    if (formulas[formula]->ifs)
        synth->ifs = *formulas[formula]->ifs;
}

/* Selects the published stream of a set. It draws whole sets, so the classes and the canvas must be those of
 * the set. */
static enum status choose_published(struct synth *synth, const struct published_set *set,
                                    const struct synth_wish *wish)
{
    const struct formula *formula = formulas[synth->formula];
    if (wish->listed || wish->preset_file)
        return status_set(STATUS_USAGE, "%s published draws the classes of a published set; drop %s",
                          OPTION_OR_FIELD("--random", "random:"),
                          wish->listed ? OPTION_OR_FIELD("--class", "the list of classes")
                                       : OPTION_OR_FIELD("--preset-file", "preset_file"));
    if (formula->family != FAMILY_IFS && !formula->published)
        return status_set(STATUS_USAGE,
                          "%s published is not supported for the formula %s: %s; set %s to a published "
                          "set, such as rcdb-1k",
                          OPTION_OR_FIELD("--random", "random:"), formula->name, formula->unpublished,
                          OPTION_OR_FIELD("--preset", "preset"));
    if (!set)
        return status_set(STATUS_USAGE,
                          "%s published draws a set whose script seeds its random numbers; set %s to the "
                          "name of one, such as rcdb-1k or fractaldb-1k",
                          OPTION_OR_FIELD("--random", "random:"), OPTION_OR_FIELD("--preset", "preset"));
    if (formula->family == FAMILY_IFS && !synth->points)
        return status_set(STATUS_USAGE, "%s published draws only the points of fractals: %s; %s",
                          OPTION_OR_FIELD("--random", "random:"), formula->unpublished,
                          OPTION_OR_FIELD("add --draw points", "set draw to points"));
    if (wish->classes != set->classes || wish->res != set->res)
        return status_set(
            STATUS_USAGE, "%s: the published set has %u classes and %u pixels per side; %s",
            wish->res != set->res ? OPTION_OR_FIELD("--res", "res") : OPTION_OR_FIELD("--classes", "classes"),
            set->classes, set->res,
            wish->res != set->res ? OPTION_OR_FIELD("drop --res; --out-res resizes the images",
                                                    "leave res at its default; out_res resizes the images")
                                  : OPTION_OR_FIELD("drop --classes", "leave classes at its default"));
    synth->set = set;
    return STATUS_OK;
}

enum status synth_choose(struct synth *synth, struct synth_wish *wish)
{
    const struct formula *listed =
        wish->class_file && wish->formula < 0 ? class_formula_of(wish->class_file) : NULL;
    const struct formula *formula =
        listed ? listed : formulas[wish->formula < 0 ? FORMULA_UJI : wish->formula];
    const struct formula *implied =
        wish->preset && !wish->preset_file ? formula_of_preset(wish->preset) : NULL;
    const struct formula_preset *of_implied = implied ? formula_preset(implied, wish->preset) : NULL;
    const bool is_set = of_implied && of_implied->set && !formula_preset(formula, wish->preset);
    if (implied && (implied->parameters != formula->parameters || is_set)) { /* else the preset suits both */
        if (wish->formula >= 0)
            return status_set(STATUS_USAGE, "%s: %s is a preset of the formula %s, not of %s; %s",
                              OPTION_OR_FIELD("--preset", "preset"), wish->preset, implied->name,
                              formula->name, OPTION_OR_FIELD("drop --formula", "set formula to auto"));
        formula = implied;
    }
    const struct formula_preset *preset =
        wish->preset_file ? NULL : formula_preset(formula, wish->preset ? wish->preset : formula->name);
    const struct published_set *set = preset ? preset->set : NULL;
    if (wish->listed && wish->preset && !wish->preset_file && formula_is_system(formula) && !preset)
        return status_set(STATUS_USAGE,
                          "%s: '%.80s' is not a preset of %s; %s says how its classes are drawn",
                          OPTION_OR_FIELD("--preset", "preset"), wish->preset, formula->name,
                          formula->family == FAMILY_IFS ? "1p-frac, ofdb-1k or fractaldb-1k"
                                                        : "exfractaldb-1k, 3d-ofdb-1k or mv-fractaldb-1k");
    wish->formula = (int)formula->id;
    if (wish->classes == 0 && !wish->listed)
        wish->classes = set ? set->classes : formula->classes;
    synth_set_formula(synth, formula->id);
    if (preset && preset->ifs)
        synth->ifs = *preset->ifs;
    if (wish->res == 0)
        wish->res = set ? set->res : synth->ifs.res ? synth->ifs.res : formula->canvas;
    const bool fractal = formula->family == FAMILY_IFS || formula->family == FAMILY_COLOR;
    if (wish->draw >= 0 && !fractal)
        return status_set(
            STATUS_USAGE,
            "%s: the formula %s draws no fractals of the plane, so it has nothing to choose; %s",
            OPTION_OR_FIELD("--draw", "draw"), formula->name,
            OPTION_OR_FIELD("drop --draw", "set draw to auto"));
    wish->draw = wish->draw > 0 ? wish->draw : DRAW_PATCHES;
    synth->points = wish->draw == DRAW_POINTS;
    if (wish->min_lit > 0 && formula->family != FAMILY_IFS)
        return status_set(STATUS_USAGE, "%s: the formula %s draws no fractals of the plane with weights; %s",
                          OPTION_OR_FIELD("--min-lit", "min_lit"), formula->name,
                          OPTION_OR_FIELD("drop it", "leave it at 0"));
    if (wish->min_lit > 0 && wish->published)
        return status_set(STATUS_USAGE, "%s changes the images of a published set; %s",
                          OPTION_OR_FIELD("--min-lit", "min_lit:"),
                          OPTION_OR_FIELD("drop it", "leave it at 0"));
    if (wish->cache_dir && formula->family != FAMILY_IFS && !wish->cache_shared)
        return status_set(STATUS_USAGE,
                          "%s keeps the orbits of FractalDB's fractals, but the formula %s has none; %s",
                          OPTION_OR_FIELD("--cache-dir", "cache_dir:"), formula->name,
                          OPTION_OR_FIELD("drop it", "leave it out"));
    synth->min_lit = wish->min_lit;
    synth->cache_dir = formula->family == FAMILY_IFS ? wish->cache_dir : NULL;
    return wish->published ? choose_published(synth, set, wish) : STATUS_OK;
}

/* ---- Classes ---- */

static enum status allocate_rows(struct synth *synth, uint32_t count)
{
    synth->class_count = count;
    synth->rows = calloc(count, sizeof *synth->rows);
    return ALLOCATED(synth->rows, "out of memory for %u classes; lower %s", count,
                     OPTION_OR_FIELD("--classes", "classes"));
}

/* Takes the first `count` classes of a list or of a published set. */
static enum status take_preset(struct synth *synth, const struct formula *formula,
                               const struct formula_preset *preset, uint32_t count)
{
    size_t listed = preset->set ? preset->set->classes : CLASS_COUNT_MAX;
    if (preset->csv)
        TRY(class_read_text(preset->csv, preset->name, formula, &synth->rows, &listed));
    if (count > listed)
        return status_set(STATUS_USAGE, "%s: preset %s has %zu classes, fewer than %u; lower it",
                          OPTION_OR_FIELD("--classes", "classes"), preset->name, listed, count);
    synth->class_count = count;
    if (preset->csv)
        return STATUS_OK;
    TRY(allocate_rows(synth, count));
    return preset->rows(preset, count, synth->rows);
}

static enum status read_ranges(const struct synth *synth, const char *preset_file, const char *preset,
                               struct class_ranges *ranges)
{
    return status_prefix(class_ranges_read(preset_file, preset, formulas[synth->formula], ranges), "%s",
                         preset_file ? OPTION_OR_FIELD("--preset-file", "preset_file")
                                     : OPTION_OR_FIELD("--preset", "preset"));
}

enum status synth_check_preset(const struct synth *synth, const char *preset_file, const char *preset)
{
    struct class_ranges ranges;
    return !preset_file && formula_of_preset(preset) ? STATUS_OK
                                                     : read_ranges(synth, preset_file, preset, &ranges);
}

enum status synth_draw_classes(struct synth *synth, const char *preset_file, const char *preset,
                               uint32_t count)
{
    const struct formula *formula = formulas[synth->formula];
    const struct formula_preset *known = preset_file ? NULL : formula_preset(formula, preset);
    struct class_ranges ranges;
    if (preset_file && formula->family == FAMILY_COLOR)
        return status_set(STATUS_USAGE,
                          "%s: the formula %s has no ranges, because it samples the singular values of its "
                          "maps; drop it",
                          OPTION_OR_FIELD("--preset-file", "preset_file"), formula->name);
    if (known && (known->csv || known->rows))
        return take_preset(synth, formula, known, count);
    TRY(read_ranges(synth, preset_file, preset, &ranges));
    TRY(allocate_rows(synth, count));
    if (formula->family == FAMILY_IFS3D)
        return ifs3d_search((uint32_t)ranges.seed, ranges.mean, count, synth->rows);
    if (formula->family == FAMILY_IFS)
        return ifs_search_rows((uint32_t)ranges.seed, ranges.mean, count, synth->rows);
    for (uint32_t c = 0; c < count; c++) {
        class_draw(&ranges, formula->id_least + c, &synth->rows[c]);
        TRY(class_check(formula, &synth->rows[c]));
    }
    return STATUS_OK;
}

/* Fills the tables of FAMILY_IFS. */
static enum status fill_systems(struct synth *synth)
{
    const uint32_t count = synth->class_count, steps = synth->ifs.points - 1;
    if (synth->res < IFS_RES_MIN)
        return status_set(STATUS_USAGE,
                          "%s: %u pixels per side are too few for a fractal, which needs %d; raise it",
                          OPTION_OR_FIELD("--res", "res"), synth->res, IFS_RES_MIN);
    synth->systems = calloc(count, sizeof *synth->systems);
    synth->uniforms = malloc(steps * sizeof *synth->uniforms);
    TRY(ALLOCATED(synth->systems && synth->uniforms, "out of memory for %u classes; lower %s", count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < count; c++) {
        ifs_system(&synth->rows[c], &synth->systems[c]);
        synth->classes[c].id = synth->rows[c].id;
    }
    ifs_uniforms(steps, synth->uniforms);
    if (synth->min_lit > 0)
        TRY(ifs_replace_dark(&synth->ifs, synth->systems, count, synth->uniforms, synth->res,
                             synth->min_lit));
    if (synth->cache_dir)
        return ifs_bank_open_kept(synth->cache_dir, parallel_threads(), &synth->ifs, synth->systems, count,
                                  synth->uniforms, synth->res, synth->points, &synth->bank);
    return ifs_bank_open(&synth->ifs, synth->systems, count, synth->uniforms, synth->res, synth->points,
                         &synth->bank);
}

/* Fills the tables of FAMILY_IFS3D. */
static enum status fill_solids(struct synth *synth)
{
    const uint32_t count = synth->class_count;
    if (synth->ifs.cloud && count < 2)
        return status_set(STATUS_USAGE,
                          "a point cloud has points of two classes, but there is one class; raise %s",
                          OPTION_OR_FIELD("--classes", "classes"));
    synth->solids = calloc(count, sizeof *synth->solids);
    TRY(ALLOCATED(synth->solids, "out of memory for %u classes; lower %s", count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < count; c++) {
        ifs3d_system(&synth->rows[c], &synth->solids[c]);
        synth->classes[c].id = synth->rows[c].id;
    }
    return STATUS_OK;
}

/* Fills the tables of FAMILY_COLOR. */
static enum status fill_colors(struct synth *synth)
{
    synth->colors = calloc(synth->class_count, sizeof *synth->colors);
    TRY(ALLOCATED(synth->colors, "out of memory for %u classes; lower %s", synth->class_count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        color_system(&synth->rows[c], &synth->colors[c]);
        synth->classes[c].id = synth->rows[c].id;
    }
    synth->color = (struct color_rules){.several = synth->rules.shapes > 1,
                                        .patches = !synth->points,
                                        .res = synth->res,
                                        .class_count = synth->class_count};
    return STATUS_OK;
}

/* Fills the tables of FAMILY_LINES. */
static enum status fill_shapes(struct synth *synth)
{
    synth->spoke_offset = calloc((size_t)synth->class_count + 1, sizeof *synth->spoke_offset);
    TRY(ALLOCATED(synth->spoke_offset, "out of memory for %u classes; lower %s", synth->class_count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        struct atom_class *class_ = &synth->classes[c];
        lines_class(formulas[synth->formula], &synth->rows[c], class_);
        uint64_t segments = (uint64_t)class_->vertices * class_->orbits;
        synth->spoke_offset[c + 1] = synth->spoke_offset[c] + class_->vertices;
        if (class_->vertices > synth->vertices_max)
            synth->vertices_max = class_->vertices;
        if (class_->orbits > synth->orbits_max)
            synth->orbits_max = class_->orbits;
        if (segments > synth->segments_max)
            synth->segments_max = segments;
    }
    size_t stride = synth->spoke_offset[synth->class_count];
    TRY(memory_check(3 * sizeof(float) * (uint64_t)stride, "the classes' tables",
                     OPTION_OR_FIELD("lower --classes", "lower classes")));
    synth->spoke_tables = malloc(3 * stride * sizeof *synth->spoke_tables);
    TRY(ALLOCATED(synth->spoke_tables, "out of memory for the tables of %u classes; lower %s",
                  synth->class_count, OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        float *first = synth->spoke_tables + synth->spoke_offset[c];
        atom_spokes_fill(&synth->rules, &synth->classes[c], first, first + stride, first + 2 * stride);
    }
    noise_gradients(&synth->rules, synth->gradients);
    return STATUS_OK;
}

enum status synth_fill_tables(struct synth *synth)
{
    synth->turns = synth->rules.shapes > 1 ? 1 : synth->class_count;
    synth->classes = calloc(synth->class_count, sizeof *synth->classes);
    TRY(ALLOCATED(synth->classes, "out of memory for %u classes; lower %s", synth->class_count,
                  OPTION_OR_FIELD("--classes", "classes")));
    return synth_is_ifs(synth)     ? fill_systems(synth)
           : synth_is_ifs3d(synth) ? fill_solids(synth)
           : synth_is_color(synth) ? fill_colors(synth)
                                   : fill_shapes(synth);
}

void synth_classes_text(const struct synth *synth, struct synth_image image, char *text)
{
    const struct philox_key key = synth_image_key(synth, image);
    const uint32_t count = synth_multi_hot(synth) ? color_objects(&synth->color, key) : 1;
    uint32_t ids[COLOR_OBJECTS_MAX] = {synth_label(synth, image)};
    for (uint32_t slot = 0; synth_multi_hot(synth) && slot < count; slot++)
        ids[slot] = synth->classes[color_class(&synth->color, key, slot, 0)].id;
    qsort(ids, count, sizeof *ids, compare_u32);
    int length = 0;
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || ids[i] != ids[i - 1])
            length += snprintf(text + length, (size_t)(SYNTH_CLASSES_TEXT - length), "%s%u", i ? "," : "",
                               (unsigned)ids[i]);
}

void synth_free(struct synth *synth)
{
    ifs_bank_close(synth->bank);
    free(synth->systems);
    free(synth->solids);
    free(synth->colors);
    free(synth->uniforms);
    free(synth->rows);
    free(synth->classes);
    free(synth->spoke_offset);
    free(synth->spoke_tables);
    *synth = (struct synth){0};
}

/* ---- A batch in host memory ---- */

bool synth_batch_make(const struct synth *synth, struct synth_batch *batch)
{
    const size_t mask_bytes = synth_mask_bytes(synth), cloud_bytes = synth_cloud_bytes(synth);
    if (synth->call)
        return true;
    batch->images = malloc(synth->batch * synth_output_bytes(synth));
    batch->targets.labels = malloc(synth->batch * sizeof *batch->targets.labels);
    batch->targets.masks = mask_bytes ? malloc(synth->batch * mask_bytes) : NULL;
    batch->targets.points = cloud_bytes ? malloc(synth->batch * cloud_bytes) : NULL;
    return batch->images && batch->targets.labels && (batch->targets.masks || !mask_bytes) &&
           (batch->targets.points || !cloud_bytes);
}

void synth_batch_free(const struct synth *synth, struct synth_batch *batch)
{
    if (synth->call)
        return;
    free(batch->images);
    free(batch->targets.labels);
    free(batch->targets.masks);
    free(batch->targets.points);
}

void synth_batch_begin(const struct synth *synth, uint64_t run, struct synth_batch *batch)
{
    if (synth->call) {
        batch->images = synth->call->images;
        batch->targets = synth->call->targets;
        if (!synth_mask_bytes(synth))
            batch->targets.masks = NULL;
        if (!synth_cloud_bytes(synth))
            batch->targets.points = NULL;
    }
    for (uint64_t j = 0; batch->targets.labels && j < synth_run_count(synth); j++)
        batch->targets.labels[j] = synth_label(synth, synth_run_image(synth, run, j));
    for (uint64_t j = 0; batch->targets.masks && synth_multi_hot(synth) && j < synth_run_count(synth); j++)
        color_multi_hot(&synth->color, synth_image_key(synth, synth_run_image(synth, run, j)),
                        synth_batch_mask(synth, batch, j));
}

/* ---- Generators (core/generator.h) ---- */

/* A generator on the host: a variant, and `call`, which names the images that the variant's next run
 * generates. */
struct host_generator {
    struct generator generator; /* must be the first member */
    struct synth synth;
    struct synth_call call;
    const struct variant *variant;
    void *state;
};

static enum status host_make(struct generator *generator, const struct generator_numbers *numbers,
                             uint32_t count, void *samples, const struct generator_targets *targets,
                             void *stream)
{
    struct host_generator *self = (struct host_generator *)generator;
    struct run_time unused;
    (void)stream;
    self->call = (struct synth_call){
        .numbers = numbers->list, .first = numbers->first, .count = count, .images = samples};
    if (targets)
        self->call.targets = *targets;
    return variant_run(self->variant, self->state, 0, &unused);
}

/* Returns the bytes of the canvases. Omits the tables, which are small by comparison. */
static uint64_t host_memory_bytes(const struct generator *generator)
{
    const struct host_generator *self = (const struct host_generator *)generator;
    const struct synth_traits *traits = self->variant->traits;
    return traits->canvas_bytes(self->state);
}

static void host_close(struct generator *generator)
{
    struct host_generator *self = (struct host_generator *)generator;
    if (self->state)
        self->variant->teardown(self->state);
    free(self);
}

static const struct generator_type host_type = {host_make, host_memory_bytes, host_close};

static enum status host_open(const struct synth *synth, const struct variant *variant,
                             const struct generator_request *request, struct generator **generator)
{
    struct host_generator *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    self->generator.type = &host_type;
    self->synth = *synth;
    self->synth.batch = self->synth.stride = request->batch;
    self->synth.call = &self->call;
    self->variant = variant;
    enum status status = variant->setup(&request->resources, &self->synth, &self->state);
    if (status != STATUS_OK) {
        host_close(&self->generator);
        return status;
    }
    *generator = &self->generator;
    return STATUS_OK;
}

enum status synth_check_formula(const struct synth *synth, const struct variant *variant)
{
    const struct synth_traits *traits = variant->traits;
    const struct formula *formula = formulas[synth->formula];
    if (!traits->formulas && !formula->paper)
        return status_set(STATUS_USAGE,
                          "does not draw the formula %s, only uji and visualatom; use naive, omp or fused",
                          formula->name);
    if (synth->set && !synth_is_ifs(synth) && strcmp(variant->platform, "cpu") != 0)
        return status_set(STATUS_USAGE, "does not draw published random streams; use naive or omp");
    return STATUS_OK;
}

enum status synth_check_cache(const struct synth *synth, const struct variant *variant)
{
    const struct synth_traits *traits = variant->traits;
    if (!synth->cache_dir || (traits->bank && strcmp(variant->platform, "cpu") == 0))
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s keeps the orbits of omp; %s",
                      OPTION_OR_FIELD("--cache-dir", "cache_dir:"),
                      OPTION_OR_FIELD("this variant does not use them: drop --cache-dir",
                                      "this generator or device does not use them: leave it out"));
}

enum status synth_generator_open(const struct synth *synth, const struct variant *variant,
                                 const struct generator_request *request, struct generator **generator)
{
    const struct synth_traits *traits = variant->traits;
    TRY(synth_check_formula(synth, variant));
    if (variant->probe)
        TRY(variant->probe(&request->resources));
    if (!request->on_device)
        return host_open(synth, variant, request, generator);
    return traits->generator_open(request, synth, generator);
}
