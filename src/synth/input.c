#include "synth/input.h"

#include <stdlib.h>

#include "synth/class.h"

enum status synth_draw_classes(struct synth *synth, const char *preset_file, const char *preset,
                               uint32_t count)
{
    struct class_ranges ranges;
    size_t listed;
    if (!preset_file && class_preset_is_list(preset)) {
        TRY(class_read_preset(preset, &synth->classes, &listed));
        if (count > listed)
            return status_set(STATUS_USAGE, "%s: preset %s has %zu classes, fewer than %u; lower it",
                              OPTION_OR_FIELD("--classes", "classes"), preset, listed, count);
        synth->class_count = count;
        return STATUS_OK;
    }
    enum status status = class_ranges_read(preset_file, preset, &ranges);
    if (status != STATUS_OK)
        return status_prefix(status, "%s",
                             preset_file ? OPTION_OR_FIELD("--preset-file", "preset_file")
                                         : OPTION_OR_FIELD("--preset", "preset"));
    synth->class_count = count;
    synth->classes = calloc(count, sizeof *synth->classes);
    TRY(ALLOCATED(synth->classes, "out of memory for %u classes; lower %s", count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < count; c++) {
        class_draw(&ranges, c, &synth->classes[c]);
        TRY(class_check(&synth->classes[c]));
    }
    return STATUS_OK;
}

enum status synth_fill_tables(struct synth *synth)
{
    synth->spoke_offset = calloc((size_t)synth->class_count + 1, sizeof *synth->spoke_offset);
    TRY(ALLOCATED(synth->spoke_offset, "out of memory for %u classes; lower %s", synth->class_count,
                  OPTION_OR_FIELD("--classes", "classes")));
    for (uint32_t c = 0; c < synth->class_count; c++) {
        const struct atom_class *class_ = &synth->classes[c];
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
        atom_spokes_fill(&synth->classes[c], first, first + stride, first + 2 * stride);
    }
    noise_gradients(synth->formula, synth->gradients);
    return STATUS_OK;
}

void synth_free(struct synth *synth)
{
    free(synth->classes);
    free(synth->spoke_offset);
    free(synth->spoke_tables);
    synth->classes = NULL;
    synth->spoke_offset = NULL;
    synth->spoke_tables = NULL;
}
