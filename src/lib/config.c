#include "lib/config.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "machine/device.h"
#include "machine/host.h"
#include "synth/class.h"

/* ---- Fields ---- */

static enum status check_count(const char *field, uint32_t value, uint32_t least, uint32_t most)
{
    if (value >= least && value <= most)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s: %u is out of range; it must be %u to %u", field, value, least, most);
}

/* Gets the index of `text` in `names`, a list that ends with NULL. */
static enum status find_name(const char *field, const char *text, const char *const *names, int *index)
{
    char all[256];
    size_t count = 0;
    if (!text)
        return status_set(STATUS_USAGE, "%s: it is NULL; call fdsl_config_init() first", field);
    for (; names[count]; count++)
        if (strcmp(text, names[count]) == 0) {
            *index = (int)count;
            return STATUS_OK;
        }
    list_words(all, sizeof all, names, count);
    const char *nearest = nearest_word(text, names, count);
    return status_set(STATUS_USAGE, "%s: '%.80s' is unknown; valid values: %s%s%s%s", field, text, all,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

/* ---- Classes ---- */

static const char *const formulas[] = {"uji", "visualatom", NULL}; /* in the order of enum formula */

static struct atom_class class_of(const struct fdsl_class *given)
{
    return (struct atom_class){.id = given->id,
                               .vertices = given->vertices,
                               .orbits = given->orbits,
                               .oval_x = given->oval_x,
                               .oval_y = given->oval_y,
                               .freq1 = given->freq1,
                               .freq2 = given->freq2,
                               .noise = given->noise,
                               .radius = given->radius,
                               .line_width = given->line_width};
}

static enum status copy_classes(const struct fdsl_config *config, struct synth *synth)
{
    TRY(check_count("class_count", config->class_count, 1, CLASS_COUNT_MAX));
    synth->class_count = config->class_count;
    synth->classes = calloc(config->class_count, sizeof *synth->classes);
    TRY(ALLOCATED(synth->classes, "out of memory for %u classes", config->class_count));
    for (uint32_t c = 0; c < config->class_count; c++) {
        synth->classes[c] = class_of(&config->class_list[c]);
        enum status status = class_check(&synth->classes[c]);
        if (status != STATUS_OK)
            return status_prefix(status, "class_list[%u]", c);
    }
    enum status status = class_check_unique(synth->classes, synth->class_count);
    return status == STATUS_OK ? status : status_prefix(status, "class_list");
}

static enum status get_classes(const struct fdsl_config *config, struct synth *synth)
{
    size_t count = 0;
    if (config->class_list && config->class_file)
        return status_set(STATUS_USAGE,
                          "class_file: class_list already gives the classes; set only one of them");
    if (config->class_list)
        return copy_classes(config, synth);
    if (config->class_count)
        return status_set(STATUS_USAGE, "class_count: it is %u, but class_list is NULL", config->class_count);
    if (config->class_file) {
        enum status status = class_read_csv(config->class_file, &synth->classes, &count);
        synth->class_count = (uint32_t)count;
        return status == STATUS_OK ? status : status_prefix(status, "class_file");
    }
    TRY(check_count("classes", config->classes, 1, CLASS_COUNT_MAX));
    return synth_draw_classes(synth, config->preset_file, config->preset ? config->preset : config->formula,
                              config->classes);
}

/* ---- Output ---- */

static enum status check_scale(const char *field, const double *values, uint32_t channels, double least,
                               double most)
{
    for (uint32_t c = 0; c < channels; c++)
        if (!(values[c] >= least && values[c] <= most)) /* rejects NaN, too */
            return status_set(STATUS_USAGE, "%s[%u]: %g is out of range; it must be %g to %g", field, c,
                              values[c], least, most);
    return STATUS_OK;
}

/* Refuses a `mean` or `std` other than the defaults: they apply only to floating-point types. */
static enum status check_no_scale(const struct fdsl_config *config)
{
    for (uint32_t c = 0; c < config->channels; c++)
        if (config->mean[c] != 0 || config->std[c] != 1)
            return status_set(STATUS_USAGE,
                              "%s[%u]: u8 images are not normalised; choose a floating-point dtype",
                              config->mean[c] != 0 ? "mean" : "std", c);
    return STATUS_OK;
}

static enum status get_output(const struct fdsl_config *config, struct synth *synth)
{
    static const char *const fits[] = {"resize", "crop", NULL};  /* enum output_fit, without OUTPUT_WHOLE */
    static const char *const layouts[] = {"nchw", "nhwc", NULL}; /* enum output_layout */
    uint32_t out_res = config->out_res ? config->out_res : config->res;
    int fit, layout, dtype;
    TRY(check_count("out_res", out_res, 1, OUTPUT_RES_MAX));
    TRY(find_name("fit", config->fit, fits, &fit));
    TRY(find_name("layout", config->layout, layouts, &layout));
    TRY(find_name("dtype", config->dtype, dtype_names, &dtype));
    if (config->channels != 1 && config->channels != 3)
        return status_set(STATUS_USAGE, "channels: %u is neither 1 nor 3", config->channels);
    if (fit + 1 == OUTPUT_CROP && out_res > config->res)
        return status_set(STATUS_USAGE, "out_res: %u is larger than res (%u), so it cannot be cropped",
                          out_res, config->res);
    TRY(check_scale("mean", config->mean, config->channels, -OUTPUT_MEAN_MAX, OUTPUT_MEAN_MAX));
    TRY(check_scale("std", config->std, config->channels, OUTPUT_DEVIATION_MIN, OUTPUT_DEVIATION_MAX));
    if (dtype == DTYPE_U8)
        TRY(check_no_scale(config));
    synth->output =
        (struct synth_output){.type = (enum dtype)dtype,
                              .layout = (enum output_layout)layout,
                              .fit = out_res == config->res ? OUTPUT_WHOLE : (enum output_fit)(fit + 1),
                              .res = out_res,
                              .channels = config->channels};
    double mean[OUTPUT_CHANNELS_MAX] = {0}, deviation[OUTPUT_CHANNELS_MAX] = {1, 1, 1};
    memcpy(mean, config->mean, config->channels * sizeof *mean);
    memcpy(deviation, config->std, config->channels * sizeof *deviation);
    output_set_scale(&synth->output, config->res, mean, deviation);
    return STATUS_OK;
}

enum status config_input(const struct fdsl_config *config, struct synth *synth)
{
    int formula;
    TRY(find_name("formula", config->formula, formulas, &formula));
    TRY(check_count("res", config->res, 1, SYNTH_RES_MAX));
    TRY(check_count("batch", config->batch, 1, 1u << 24));
    synth->formula = (enum formula)formula;
    synth->res = config->res;
    synth->seed = config->seed;
    synth->batch = synth->stride = config->batch;
    TRY(get_output(config, synth));
    TRY(get_classes(config, synth));
    return synth_fill_tables(synth);
}

/* ---- The variant and its resources ---- */

extern const struct variant variant_naive, variant_omp, variant_fused, variant_bat, variant_gbase;

#ifdef HAVE_CUDA
#define CUDA_VARIANT(variant) &variant
#else
#define CUDA_VARIANT(variant) NULL
#endif

/* All generators. "auto" selects the first entry for the kind of device in the configuration. */
static const struct {
    const char *name;
    bool on_device;
    const struct variant *variant; /* NULL: not in this build */
} generators[] = {
    {"omp", false, &variant_omp},
    {"naive", false, &variant_naive},
    {"fused", true, CUDA_VARIANT(variant_fused)},
    {"bat", true, CUDA_VARIANT(variant_bat)},
    {"gbase", true, CUDA_VARIANT(variant_gbase)},
};

enum status config_variant(const struct fdsl_config *config, const struct variant **variant)
{
    const char *names[COUNT_OF(generators) + 2] = {"auto"};
    bool on_device = config->device >= 0;
    int index = 0;
    for (size_t i = 0; i < COUNT_OF(generators); i++)
        names[i + 1] = generators[i].name;
    TRY(find_name("generator", config->generator, names, &index));
    size_t chosen = index == 0 ? 0 : (size_t)index - 1;
    while (index == 0 && generators[chosen].on_device != on_device)
        chosen++;
    if (generators[chosen].on_device != on_device)
        return on_device
                   ? status_set(STATUS_USAGE,
                                "generator: '%s' works on the CPU, but device is %d; set it to FDSL_CPU",
                                generators[chosen].name, config->device)
                   : status_set(STATUS_USAGE,
                                "generator: '%s' works on CUDA devices, but device is FDSL_CPU; set it to 0 "
                                "or another CUDA device",
                                generators[chosen].name);
    *variant = generators[chosen].variant;
    return *variant ? STATUS_OK : device_probe(config->device);
}

enum status config_threads(const struct fdsl_config *config, int *threads)
{
    cpu_set_t allowed;
    uint64_t requested = 0;
    if (config->threads < 0 || config->threads > THREADS_MAX)
        return status_set(STATUS_USAGE, "threads: %d is out of range; it must be 0 to %d", config->threads,
                          THREADS_MAX);
    *threads = config->threads;
    if (*threads == 0 && threads_requested(&requested))
        *threads = (int)requested;
    if (*threads == 0)
        *threads = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    return STATUS_OK;
}
