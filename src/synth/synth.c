/* The workload `synth`: options, input, verification, columns and output files. */
#include "synth/input.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/array.h"
#include "core/text.h"
#include "core/workload.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"
#include "synth/lines.h"
#include "synth/synth.h"

struct synth_parameters {
    uint64_t batch, res, vertices, orbits, seed, instance, classes, freq1, freq2, radius;
    double noise, line_width, oval_x, oval_y, min_lit;
    uint64_t channels, out_res;
    int formula, draw, random, dtype, layout, fit;
    const char *preset, *preset_file, *class_file, *cache_dir, *mean, *std;
    struct compute compute;
    struct deliver_files files;
    bool describe;
};

static const char *const draws[] = {IFS_DRAW_NAMES, NULL};
static const char *const randoms[] = {"philox", "published", NULL};
static const char *const layouts[] = {"nchw", "nhwc", NULL}; /* in the order of enum output_layout */
static const char *const class_formats[] = {"csv", "published", NULL}; /* in the order of enum class_format */
static const char *const fits[] = {"resize", "crop",
                                   NULL}; /* in the order of enum output_fit, without OUTPUT_WHOLE */

#define AT(field) offsetof(struct synth_parameters, field)
static const struct option_spec options[] = {
    {"batch", "N", OPTION_COUNT, AT(batch), .fallback = "32", .minimum = 1, .maximum = 1 << 24,
     .choices = option_max, .column = COLUMN, .help = "images per run"},
    {"res", "PIXELS", OPTION_COUNT, AT(res), .fallback = "512", .minimum = 1, .maximum = SYNTH_RES_MAX,
     .column = COLUMN, .help = "side length of the square canvas on which an image is drawn"},
    {"vertices", "N", OPTION_COUNT, AT(vertices), .fallback = "1000", .minimum = 1,
     .maximum = LINES_VERTICES_MAX, .column = COLUMN,
     .help = "vertices per orbit of the benchmark class, the single class that is drawn without --classes "
             "and --class"},
    {"orbits", "N", OPTION_COUNT, AT(orbits), .fallback = "200", .minimum = 1, .maximum = LINES_ORBITS_MAX,
     .column = COLUMN, .help = "orbits of the benchmark class"},
    {"formula", "NAME", OPTION_CHOICE, AT(formula), .fallback = "uji", .choices = formula_names,
     .column = COLUMN,
     .help = "how an image is drawn; docs/formulas.md describes the formulas. --preset can imply another "
             "default. NAME is one of"},
    {"draw", "WHAT", OPTION_CHOICE, AT(draw), .fallback = "patches", .choices = draws, .column = COLUMN,
     .help = "what an image of a fractal shows. patches: 3 x 3 random bits for each point; points: the "
             "points, which are not random. Other formulas have no choice. WHAT is one of"},
    {"min-lit", "SHARE", OPTION_REAL, AT(min_lit), .fallback = "0", .maximum = 0.5, .column = COLUMN,
     .help =
         "replace the weights of fractal classes whose images of patches are expected to have a smaller "
         "share of set pixels than SHARE, by the class itself; 0.01 replaces nearly black images, 0 none"},
    {"cache-dir", "DIR", OPTION_TEXT, AT(cache_dir),
     .help = "folder that keeps all orbits of fractal classes for omp, in a file that the processes of a "
             "machine share; without it, every run computes the orbits that it needs"},
    {"random", "STREAM", OPTION_CHOICE, AT(random), .fallback = "philox", .choices = randoms,
     .column = COLUMN,
     .help =
         "random numbers of the images. philox: an image depends only on --seed, its class and its instance; "
         "published: the images of a published set (--preset), pixel for pixel. STREAM is one of"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of all images"},
    {"instance", "N", OPTION_COUNT, AT(instance), .fallback = "0", .maximum = 4611686018427387904.0,
     .column = COLUMN,
     .help =
         "number of the first image; --verify, --png, --sheet and --npy begin with this image. With N "
         "classes, image number g shows class g mod N and is instance g / N, rounded down, of this class"},
    {"classes", "N", OPTION_COUNT, AT(classes), .fallback = "0", .maximum = CLASS_COUNT_MAX, .column = COLUMN,
     .help =
         "generate a mixed batch of N classes, which --preset chooses; image number g shows class g mod N. 0 "
         "means a single class, the benchmark class, which --vertices, --orbits and similar options define"},
    {"preset", "NAME", OPTION_TEXT, AT(preset), .column = COLUMN,
     .help =
         "source of the classes of --classes. The presets rcdb*, segrcdb*, visualatom-script-1k, fractaldb*, "
         "ofdb*, 1p-frac, ifs3d, mv-fractaldb-1k, exfractaldb-1k, 3d-ofdb-1k, pc-fractaldb-1k, "
         "fractal-color-1k and multifractal-1k imply the formula; the others are drawn with uji, unless "
         "--formula visualatom is given. uji, visualatom, lowercompute, rcdb, segrcdb-ranges and the "
         "sections of --preset-file are ranges, from which classes are sampled at random; paper-1000, "
         "lowercompute-1000, paper and paper-lowercompute are lists, and rcdb-1k, rcdb-21k, segrcdb, "
         "visualatom-script-1k, fractaldb-1k, fractaldb-10k, ofdb-1k and ofdb-21k are published sets: their "
         "first N classes are used. fractaldb, fractaldb-search, 1p-frac, those of ifs3d, fractal-color-1k "
         "and multifractal-1k have as many classes as --classes says (default: the name of --formula)"},
    {"preset-file", "FILE", OPTION_TEXT, AT(preset_file), .column = COLUMN,
     .help = "INI file with ranges for --preset, instead of the built-in configs/classes.cfg"},
    {"class", "FILE|DIR", OPTION_TEXT, AT(class_file), .column = COLUMN,
     .help = "generate a mixed batch of the classes in this CSV file, or in the class files of a published "
             "script (a folder, or one file of it). The columns must be those of --formula; published "
             "scripts exist for visualatom, rcdb, segrcdb, fractaldb and ifs3d. --preset 1p-frac, ofdb-1k or "
             "exfractaldb-1k, for example, then says how fractals are drawn from them"},
    {"noise", "P", OPTION_REAL, AT(noise), .fallback = "2", .maximum = 1e6, .column = COLUMN,
     .help = "noise coefficient of the benchmark class"},
    {"line-width", "PIXELS", OPTION_REAL, AT(line_width), .fallback = "0.002", .maximum = 1e6,
     .column = COLUMN,
     .help = "constant that every orbit of the benchmark class adds to the radius; lines are always one "
             "pixel wide"},
    {"radius", "PIXELS", OPTION_COUNT, AT(radius), .fallback = "25", .maximum = 1e6, .column = COLUMN,
     .help = "radius of the circle on which the vertices of the benchmark class start"},
    {"oval-x", "X", OPTION_REAL, AT(oval_x), .fallback = "1.2", .maximum = 1e6, .column = COLUMN,
     .help = "factor that stretches the circle of --radius along x"},
    {"oval-y", "Y", OPTION_REAL, AT(oval_y), .fallback = "1.8", .maximum = 1e6, .column = COLUMN,
     .help = "factor that stretches the circle of --radius along y"},
    {"freq1", "N", OPTION_COUNT, AT(freq1), .fallback = "5", .maximum = 1e6, .column = COLUMN,
     .help = "first frequency of the benchmark class, in periods per turn"},
    {"freq2", "N", OPTION_COUNT, AT(freq2), .fallback = "8", .maximum = 1e6, .column = COLUMN,
     .help = "second frequency of the benchmark class, in periods per turn"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(dtype), .fallback = "u8", .choices = dtype_names, .column = COLUMN,
     .help = "element type of the output. u8 stores grays from 0 to 255; the other types store floats that "
             "are normalised with --mean and --std. TYPE is one of"},
    {"channels", "1|3", OPTION_COUNT, AT(channels), .fallback = "1", .maximum = UINT32_MAX, .column = COLUMN,
     .help = "channels of the output; 3 channels all have the same gray, unless the formula draws colours, "
             "which always have 3"},
    {"layout", "ORDER", OPTION_CHOICE, AT(layout), .fallback = "nchw", .choices = layouts, .column = COLUMN,
     .help = "memory layout of the output"},
    {"out-res", "PIXELS", OPTION_COUNT, AT(out_res), .minimum = 1, .maximum = SYNTH_RES_MAX, .column = COLUMN,
     .help = "side length of the output (default: --res)"},
    {"fit", "HOW", OPTION_CHOICE, AT(fit), .fallback = "resize", .choices = fits, .column = COLUMN,
     .help = "how the canvas becomes an output of another size. resize averages areas; crop cuts out a part "
             "at a random position. HOW is one of"},
    {"mean", "M[,M,M]", OPTION_TEXT, AT(mean), .fallback = "0", .minimum = -1e6, .maximum = 1e6,
     .column = COLUMN,
     .help =
         "mean that is subtracted from float grays, which range from 0 to 1; one value, or one per channel"},
    {"std", "S[,S,S]", OPTION_TEXT, AT(std), .fallback = "1", .minimum = 1e-6, .maximum = 1e6,
     .column = COLUMN,
     .help = "standard deviation by which float grays are divided after --mean is subtracted; one value, or "
             "one per channel"},
    COMPUTE_OPTION(AT(compute)),
    {"write-classes", "FILE|DIR", OPTION_OUTPUT, AT(files.write_classes),
     .help = "write the classes of the batch to a CSV file, which --class can read; without --variant, only "
             "this"},
    {"describe", NULL, OPTION_FLAG, AT(describe),
     .help = "without --variant: report on the orbits of fractal classes: fill rate, overflow, nearly black "
             "images; with --min-lit, after weights were replaced"},
    {"class-format", "FORMAT", OPTION_CHOICE, AT(files.class_format), .fallback = "csv",
     .choices = class_formats,
     .help = "format of --write-classes. csv: one file; published: a folder DIR with one file per class, "
             "with the names and the bytes that the published script writes. FORMAT is one of"},
    {"png", "DIR", OPTION_OUTPUT, AT(files.png),
     .help = "write the images of the batch into the folder DIR as PNG files, with a list of them in "
             "index.tsv; the mask of NAME.png is NAME.mask.png; needs --dtype u8, and --channels 1 unless "
             "the formula draws colours"},
    {"sheet", "FILE", OPTION_OUTPUT, AT(files.sheet),
     .help = "write a contact sheet of the batch as one PNG file, and index.tsv into the same folder; needs "
             "what --png needs"},
    {"npy", "FILE", OPTION_OUTPUT, AT(files.npy),
     .help = "write the batch as a NumPy array; if FILE is x.npy, write the labels to x.labels.npy, masks to "
             "x.masks.npy, and multi-hot labels to x.multihot.npy"},
};

static const struct option_section sections[] = {
    {"images", "batch"},          {"benchmark class", "vertices"}, {"images", "formula"},
    {"classes", "classes"},       {"benchmark class", "noise"},    {"batch format", "dtype"},
    {"training step", "compute"}, {"output", "write-classes"},     {NULL, NULL},
};

static const char *const benchmark_options[] = {"vertices", "orbits", "noise", "line-width", "radius",
                                                "oval-x",   "oval-y", "freq1", "freq2",      NULL};

static const struct column columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"noise_s", VALUE_REAL, COMBINE_MAX, "s", .about = "time to draw random numbers, in one extra run"},
    {"vertices_s", VALUE_REAL, COMBINE_MAX, "s", .about = "time to compute vertices, in one extra run"},
    {"painting_s", VALUE_REAL, COMBINE_MAX, "s", .about = "time to paint the canvas, in one extra run"},
    {"bank_bytes", VALUE_INTEGER, COMBINE_SUM, "bytes",
     .about = "memory of the orbits from which fractals are drawn"},
    {"bank_s", VALUE_REAL, COMBINE_MAX, "s",
     .about = "time of computing these orbits, which the time of a run does not include"},
    {"digest", VALUE_HASH, COMBINE_SUM, "",
     .about = "sum of the hashes of the images of run 0; empty if repeated runs give different images"},
    COMPUTE_COLUMNS,
    {.name = NULL},
};

static const char *const baselines[] = {"naive", NULL};

/* The input, with state that only this file needs. */
struct synth_job {
    struct synth synth;                 /* must be the first member: variants cast the input to it */
    struct synth_parameters parameters; /* as given, plus the defaults that depend on other options */
    bool leads;                         /* rank 0 */
};

/* ---- Opening the input ---- */

static bool mixed(const struct synth_parameters *parameters)
{
    return parameters->classes > 0 || parameters->class_file;
}

/* Chooses the formula, and the defaults of the options that depend on it. */
static enum status choose_formula(const struct options *given, struct synth_parameters *parameters,
                                  struct synth *synth)
{
    struct synth_wish wish = {
        .formula = options_given(given, "formula") ? parameters->formula : -1,
        .draw = options_given(given, "draw") ? parameters->draw : -1,
        .preset = parameters->preset,
        .preset_file = parameters->preset_file,
        .class_file = parameters->class_file,
        .listed = parameters->class_file != NULL,
        .published = parameters->random != 0,
        .classes = (uint32_t)parameters->classes,
        .res = options_given(given, "res") ? (uint32_t)parameters->res : 0,
        .min_lit = parameters->min_lit,
        .cache_dir = parameters->cache_dir,
    };
    TRY(synth_choose(synth, &wish));
    const struct formula *named = wish.preset && !wish.preset_file ? formula_of_preset(wish.preset) : NULL;
    if (named && wish.classes > 0 && (int)named->id != wish.formula && !options_given(given, "formula"))
        status_warn(
            "--preset %s: its classes are drawn with the formula %s; add --formula %s for images of %s",
            wish.preset, formula_names[wish.formula], named->name, named->name);
    parameters->formula = wish.formula;
    parameters->draw = wish.draw;
    parameters->classes = wish.classes;
    parameters->res = wish.res;
    return STATUS_OK;
}

/* Rejects options that contradict each other, so that no option is silently ignored. */
static enum status check_combination(const struct options *given, const struct synth_parameters *parameters,
                                     const struct synth *synth)
{
    if (parameters->classes > 0 && parameters->class_file)
        return status_option(STATUS_USAGE, "classes",
                             " and --class both choose the classes; give one of the two");
    const char *source = parameters->class_file ? "--class" : "--classes";
    for (size_t i = 0; mixed(parameters) && benchmark_options[i]; i++)
        if (options_given(given, benchmark_options[i]))
            return status_option(STATUS_USAGE, benchmark_options[i],
                                 " describes the benchmark class, which %s replaces; drop one of them",
                                 source);
    if (options_given(given, "class-format") && !parameters->files.write_classes)
        return status_option(STATUS_USAGE, "class-format",
                             " has an effect only with --write-classes; add --write-classes DIR");
    const struct formula *formula = formulas[parameters->formula];
    if (parameters->describe && formula->family == FAMILY_LINES)
        return status_option(STATUS_USAGE, "describe",
                             ": the formula %s draws no fractals; drop it, or choose fractals, such as with "
                             "--preset fractaldb-1k",
                             formula->name);
    if (parameters->cache_dir && !options_given(given, "variant") &&
        (parameters->describe || parameters->files.write_classes))
        return status_option(STATUS_USAGE, "cache-dir", " has no effect without --variant; drop it");
    if (parameters->describe && options_given(given, "variant"))
        return status_option(STATUS_USAGE, "describe", " prints a report without images; drop --variant");
    if (parameters->random && options_given(given, "seed"))
        return status_option(
            STATUS_USAGE, "seed",
            " has no effect on published images, whose seeds are those of the published script; drop it");
    const bool rules =
        formula_is_system(formula) && parameters->class_file && !parameters->preset_file; /* of the preset's
                                                                                             orbits */
    if (parameters->classes > 0 || (!parameters->preset && !parameters->preset_file) || rules)
        return STATUS_OK;
    if (parameters->preset)
        TRY(synth_check_preset(synth, parameters->preset_file, parameters->preset));
    if (parameters->class_file)
        return status_option(STATUS_USAGE, parameters->preset ? "preset" : "preset-file",
                             " and --class both choose the classes; give one of the two, and the formula of "
                             "a list with --formula");
    return status_option(STATUS_USAGE, parameters->preset ? "preset" : "preset-file",
                         " has an effect only with --classes; add --classes N");
}

/* Rejects output options that contradict each other. */
static enum status check_output(const struct options *given, const struct synth_parameters *parameters,
                                const struct synth *synth)
{
    static const char *const float_options[] = {"mean", "std"};
    bool shows = parameters->files.png || parameters->files.sheet;
    const uint64_t shown_channels = synth_is_color(synth) ? COLOR_CHANNELS : 1;
    for (size_t i = 0; parameters->dtype == DTYPE_U8 && i < COUNT_OF(float_options); i++)
        if (options_given(given, float_options[i]))
            return status_option(STATUS_USAGE, float_options[i],
                                 " scales floats, but u8 stores grays unscaled: drop it, or add --dtype f32");
    if (parameters->channels != 1 && parameters->channels != 3)
        return status_option(STATUS_USAGE, "channels", ": '%llu' is neither 1 nor 3",
                             (unsigned long long)parameters->channels);
    if (synth_is_color(synth) && parameters->channels != COLOR_CHANNELS)
        return status_option(STATUS_USAGE, "channels",
                             " 1: the images of the formula %s have colours; drop it",
                             formula_names[synth->formula]);
    if (parameters->fit + 1 == OUTPUT_CROP && parameters->out_res > parameters->res)
        return status_value(
            STATUS_USAGE, "fit", "crop",
            ": --out-res %llu is larger than --res %llu; lower --out-res, or enlarge with --fit resize",
            (unsigned long long)parameters->out_res, (unsigned long long)parameters->res);
    if (shows && (parameters->dtype != DTYPE_U8 || parameters->channels != shown_channels))
        return status_option(STATUS_USAGE, parameters->files.png ? "png" : "sheet",
                             " writes u8 images of %s only; use --npy FILE for other images",
                             synth_is_color(synth) ? "three channels" : "one channel");
    return STATUS_OK;
}

/* Rejects options that write image files if there are several ranks. A run on one rank can write the same
 * images, bit-identically. */
static enum status check_alone(const struct synth_parameters *parameters, const struct partition *partition)
{
    const char *option = parameters->files.png     ? "png"
                         : parameters->files.sheet ? "sheet"
                         : parameters->files.npy   ? "npy"
                                                   : NULL;
    if (!option || partition->ranks == 1)
        return STATUS_OK;
    return status_option(STATUS_USAGE, option,
                         " needs a single rank: run without mpirun, and set --batch to the number of images "
                         "of all ranks; the images are the same");
}

#define F16_INFINITE 65520.0 /* the smallest value that rounds to infinity in half precision */

/* Warns about values of --mean and --std that are valid but probably mistakes. */
static void warn_about_scale(const struct synth_output *output, const double *mean, const double *deviation)
{
    double mean_max = 0, deviation_max = 0, value_max = 0;
    for (uint32_t c = 0; c < output->channels; c++) {
        mean_max = fmax(mean_max, fabs(mean[c]));
        deviation_max = fmax(deviation_max, deviation[c]);
        value_max = fmax(value_max, fmax(fabs(mean[c]), fabs(1 - mean[c])) / deviation[c]);
    }
    if (output->type == DTYPE_U8)
        return;
    if (mean_max > 1 || deviation_max > 1)
        status_warn("--%s %g: grays are 0 to 1; divide means and deviations of 0-to-255 grays by 255",
                    mean_max > 1 ? "mean" : "std", mean_max > 1 ? mean_max : deviation_max);
    if (output->type == DTYPE_F16 && value_max >= F16_INFINITE)
        status_warn("--dtype f16 is limited to 65504, but values reach %g with this --mean and --std, and "
                    "become infinite; use bf16 or f32, or a larger --std",
                    value_max);
}

static enum status get_output(struct synth_parameters *parameters, struct synth *synth)
{
    double mean[OUTPUT_CHANNELS_MAX], deviation[OUTPUT_CHANNELS_MAX];
    uint32_t channels = (uint32_t)parameters->channels;
    if (parameters->out_res == 0)
        parameters->out_res = parameters->res;
    bool whole = parameters->out_res == parameters->res;
    synth->output =
        (struct synth_output){.type = (enum dtype)parameters->dtype,
                              .layout = (enum output_layout)parameters->layout,
                              .fit = whole ? OUTPUT_WHOLE : (enum output_fit)(parameters->fit + 1),
                              .res = (uint32_t)parameters->out_res,
                              .channels = channels,
                              .color = synth_is_color(synth)};
    TRY(parse_channels("--mean", parameters->mean, channels, -OUTPUT_MEAN_MAX, OUTPUT_MEAN_MAX, mean));
    TRY(parse_channels("--std", parameters->std, channels, OUTPUT_DEVIATION_MIN, OUTPUT_DEVIATION_MAX,
                       deviation));
    output_set_scale(&synth->output, synth->res, mean, deviation);
    warn_about_scale(&synth->output, mean, deviation);
    return STATUS_OK;
}

static enum status draw_classes(struct synth_parameters *parameters, struct synth *synth)
{
    if (!parameters->preset)
        parameters->preset = formula_names[parameters->formula];
    return synth_draw_classes(synth, parameters->preset_file, parameters->preset,
                              (uint32_t)parameters->classes);
}

static enum status benchmark_class(const struct synth_parameters *parameters, struct synth *synth)
{
    const struct formula *formula = formulas[synth->formula];
    const struct {
        const char *name;
        double value;
    } values[] = {
        {"vertices", (double)parameters->vertices},    {"orbits", (double)parameters->orbits},
        {"oval_x", (float)parameters->oval_x},         {"oval_y", (float)parameters->oval_y},
        {"freq1", (double)parameters->freq1},          {"freq2", (double)parameters->freq2},
        {"noise", (float)parameters->noise},           {"radius", (double)parameters->radius},
        {"line_width", (float)parameters->line_width},
    };
    synth->class_count = 1;
    synth->rows = calloc(1, sizeof *synth->rows);
    TRY(ALLOCATED(synth->rows, "out of memory"));
    for (size_t i = 0; i < COUNT_OF(values); i++)
        (void)formula_set(formula, synth->rows, values[i].name, values[i].value);
    return class_check(formula, synth->rows);
}

static enum status get_classes(struct synth_parameters *parameters, struct synth *synth)
{
    if (parameters->class_file) {
        size_t count;
        TRY(class_read(parameters->class_file, formulas[synth->formula], &synth->rows, &count));
        synth->class_count = (uint32_t)count;
        return STATUS_OK;
    }
    return parameters->classes ? draw_classes(parameters, synth) : benchmark_class(parameters, synth);
}

static void synth_close(void *input)
{
    struct synth_job *job = input;
    synth_free(&job->synth);
    free(job);
}

/* Sets the input to this rank's share of the global batch. */
static enum status take_share(struct synth_job *job, const struct partition *partition)
{
    struct share share = partition_share(partition, job->parameters.batch);
    if (share.total < partition->ranks)
        return status_value(
            STATUS_USAGE, "scaling", "strong",
            ": more ranks (%llu) than images (--batch %llu); start fewer ranks or raise --batch",
            (unsigned long long)partition->ranks, (unsigned long long)job->parameters.batch);
    job->synth.batch = share.count;
    job->synth.stride = share.total;
    job->synth.position = share.first;
    job->synth.first = job->parameters.instance + share.first;
    job->leads = partition->rank == 0;
    return STATUS_OK;
}

static enum status fill_job(const struct options *given, const struct partition *partition,
                            struct synth_job *job)
{
    struct synth_parameters *parameters = &job->parameters;
    struct synth *synth = &job->synth;
    TRY(choose_formula(given, parameters, synth));
    TRY(check_combination(given, parameters, synth));
    TRY(compute_read(&parameters->compute));
    if (!options_given(given, "channels"))
        parameters->channels = synth_channels(synth, 0);
    TRY(check_output(given, parameters, synth));
    TRY(check_alone(parameters, partition));
    TRY(take_share(job, partition));
    synth->res = (uint32_t)parameters->res;
    synth->seed = parameters->seed;
    TRY(get_classes(parameters, synth));
    TRY(synth_fill_tables(synth));
    TRY(deliver_check(given, synth, &parameters->files));
    return get_output(parameters, synth); /* after the other checks, because it may print warnings */
}

/* Sets the parameters that rows show: those of the command line, but with this rank's batch. */
static void show_parameters(const struct synth_job *job, struct synth_parameters *shown)
{
    *shown = job->parameters;
    shown->batch = job->synth.batch;
}

static enum status synth_repartition(void *input, void *parameters, const struct partition *partition)
{
    TRY(take_share(input, partition));
    show_parameters(input, parameters);
    return STATUS_OK;
}

static enum status synth_open(const struct options *given, void *parameters,
                              const struct partition *partition, void **input)
{
    struct synth_job *job = *input = calloc(1, sizeof *job);
    TRY(ALLOCATED(job, "out of memory"));
    job->parameters = *(struct synth_parameters *)parameters;
    TRY(workload_refuse_max(job->parameters.batch));
    TRY(fill_job(given, partition, job));
    show_parameters(job, parameters); /* defaults that depend on other options are now known */
    return STATUS_OK;
}

/* Hashes the classes, because a file of classes may differ between ranks. */
static uint64_t synth_identity(const void *input)
{
    size_t bytes;
    const void *table = synth_class_table(input, &bytes);
    return fnv_add(FNV_BEGIN, table, bytes);
}

/* Columns that do not apply stay empty: the parameters of the benchmark class if other classes are used,
 * `mean` and `std` for u8, `draw` and `min-lit` of other formulas than fractals, and `fit` if the output has
 * the size of the canvas. */
static bool synth_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    const struct synth_parameters *parameters = parameters_;
    const enum formula_family family = formulas[parameters->formula]->family;
    (void)variant;
    if (strcmp(option, "mean") == 0 || strcmp(option, "std") == 0)
        return parameters->dtype != DTYPE_U8;
    if (strcmp(option, "draw") == 0)
        return family == FAMILY_IFS || family == FAMILY_COLOR;
    if (strcmp(option, "min-lit") == 0)
        return family == FAMILY_IFS;
    if (strcmp(option, "fit") == 0)
        return parameters->out_res != parameters->res;
    return !mixed(parameters) || !is_one_of(option, benchmark_options);
}

/* Lists the variants in this build that support every output format. */
static void list_supporting_variants(char *names, size_t size)
{
    names[0] = '\0';
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        const struct synth_traits *traits = entry->variant ? entry->variant->traits : NULL;
        if (strcmp(entry->workload, "synth") == 0 && traits && traits->outputs)
            text_join(names, size, ", ", "%s", entry->name);
    }
}

static enum status synth_accepts(const void *input, const struct variant *variant)
{
    const struct synth *synth = input;
    const struct synth_traits *traits = variant->traits;
    char names[256];
    TRY(synth_check_formula(synth, variant));
    TRY(synth_check_cache(synth, variant));
    if (traits->outputs || output_is_canvas(&synth->output))
        return strcmp(variant->platform, "cpu") == 0 ? synth_check_memory(synth, 0) : STATUS_OK;
    list_supporting_variants(names, sizeof names);
    return status_set(
        STATUS_USAGE,
        "supports only u8 images of one channel at the size of the canvas; use %s for other images", names);
}

/* ---- Work, checks, columns ---- */

/* The roofline counts only the bytes of the images, masks and labels. It omits arithmetic on vertices,
 * because an implementation can avoid much of it. For example, if the noise coefficient is 0, all images of a
 * class have the same polygons up to their position. Vertices whose lines are hidden or outside the image can
 * be skipped. */
static struct work synth_work(const void *input, const struct variant *variant)
{
    const struct synth *synth = input;
    const struct synth_traits *traits = variant->traits;
    double images = (double)synth->batch;
    size_t image_bytes = synth_output_bytes(synth) + synth_mask_bytes(synth) + synth_cloud_bytes(synth) +
                         (traits->outputs ? sizeof(int64_t) : 0);
    double bytes = images * (double)image_bytes;
    return (struct work){.items = images, .bytes = bytes, .least.once_bytes = bytes};
}

static const struct compute *synth_compute(const void *parameters)
{
    return &((const struct synth_parameters *)parameters)->compute;
}

/* The run has ended, so the consumer needs no event to wait for. */
static enum status synth_hand_over(const void *input, const struct variant *variant, void *state,
                                   struct consumer *consumer, void **done_event)
{
    const struct synth *synth = input;
    const struct synth_traits *traits = variant->traits;
    return strcmp(variant->platform, "cuda") == 0
               ? consumer_take_device(consumer, NULL, done_event)
               : consumer_take_host(consumer, traits->images(state),
                                    synth->batch * synth_output_bytes(synth));
}

#ifdef HAVE_XXHASH
/* Computes the digest of run 0: the sum over all output images, masks and point clouds of their 64-bit XXH3
 * hashes. Each hash is seeded with the image's index in the global batch; that of a mask or of a point cloud
 * with the complement of the index. The digest of a global batch is the sum of the ranks' digests. Swapped
 * images change the digest, because of the seed. */
static enum status digest(const struct synth *synth, const struct variant *variant, void *state,
                          struct row *row)
{
    size_t bytes = synth_output_bytes(synth), mask_bytes = synth_mask_bytes(synth);
    const size_t cloud_bytes = synth_cloud_bytes(synth);
    FREED uint8_t *pixels = malloc(bytes + mask_bytes);
    FREED float *cloud = cloud_bytes ? malloc(cloud_bytes) : NULL;
    unsigned long long sum = 0;
    TRY(ALLOCATED(pixels && (cloud || !cloud_bytes), "out of memory for the digest of the images"));
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_fetch fetch = {
            .j = j, .pixels = pixels, .mask = mask_bytes ? pixels + bytes : NULL, .cloud = cloud};
        TRY(variant->fetch(state, &fetch));
        if (cloud_bytes)
            sum += XXH3_64bits_withSeed(cloud, cloud_bytes, ~(synth->position + j));
        sum += XXH3_64bits_withSeed(pixels, bytes, synth->position + j);
        if (mask_bytes)
            sum += XXH3_64bits_withSeed(fetch.mask, mask_bytes, ~(synth->position + j));
    }
    row_hash(row, "digest", sum);
    return STATUS_OK;
}
#else
static enum status digest(const struct synth *synth, const struct variant *variant, void *state,
                          struct row *row)
{
    (void)synth, (void)variant, (void)state, (void)row;
    return STATUS_OK;
}
#endif

static enum status synth_measure(const void *input, const struct variant *variant, void *state,
                                 struct row *row)
{
    const struct synth *synth = input;
    const struct synth_traits *traits = variant->traits;
    char stages[64];
    snprintf(stages, sizeof stages, "%s%s", traits->timed, output_is_canvas(&synth->output) ? "" : "+output");
    row_text(row, "timed_stages", stages);
    if (traits->stages) {
        double noise_s, vertices_s, painting_s;
        TRY(traits->stages(state, &noise_s, &vertices_s, &painting_s));
        row_real(row, "noise_s", noise_s);
        row_real(row, "vertices_s", vertices_s);
        row_real(row, "painting_s", painting_s);
    }
    if (traits->bank && synth_is_ifs(synth)) {
        const struct ifs_bank_facts facts = traits->bank(state);
        row_count(row, "bank_bytes", facts.bytes);
        row_real(row, "bank_s", facts.seconds);
    }
    if (traits->racy) /* a repeated run may give different images, so a digest is meaningless */
        return STATUS_OK;
    struct run_time unused;
    TRY(variant->run(state, 0, &unused));
    return digest(synth, variant, state, row);
}

static enum status synth_deliver(const void *input, const char *name, const struct variant *variant,
                                 void *state)
{
    const struct synth_job *job = input;
    const struct deliver_files *files = &job->parameters.files;
    if (files->write_classes && job->leads)
        TRY(deliver_classes(&job->synth, files));
    return deliver_write(&job->synth, files, name, variant, state);
}

static enum status synth_write_classes(const void *input)
{
    const struct synth_job *job = input;
    return deliver_classes(&job->synth, &job->parameters.files);
}

static enum status synth_describe(const void *input)
{
    const struct synth_job *job = input;
    const struct synth *synth = &job->synth;
    const struct synth_parameters *parameters = &job->parameters;
    if (synth_is_ifs3d(synth))
        return synth_describe_solids(parameters->class_file ? parameters->class_file : parameters->preset,
                                     synth, stdout);
    struct ifs_report report;
    TRY(synth_is_color(synth) ? synth_describe_colors(synth, &report)
                              : ifs_describe(&synth->ifs, synth->systems, synth->class_count, synth->uniforms,
                                             synth->res, &report));
    ifs_report_print(parameters->class_file ? parameters->class_file : parameters->preset, &report, stdout);
    return STATUS_OK;
}

const struct workload workload_synth = {
    .name = "synth",
    .schema = "synth/8",
    .summary = "images of formulas such as VisualAtom, for training: generated instead of read",
    .item = "images",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct synth_parameters),
    .columns = columns,
    .baselines = baselines,
    .open = synth_open,
    .close = synth_close,
    .repartition = synth_repartition,
    .ranks.identity = synth_identity,
    .applies = synth_applies,
    .accepts = synth_accepts,
    .batches.step = synth_compute,
    .batches.hand_over = synth_hand_over,
    .work = synth_work,
    .verify = oracle_verify,
    .measure = synth_measure,
    .deliver = synth_deliver,
    .alone = {{"write-classes", synth_write_classes}, {"describe", synth_describe}},
};
