/* The tables of workloads and of variants, and the option --compute, which workloads share. */
#include "core/variant.h"

#include <stdlib.h>
#include <string.h>

#include "core/compute.h"
#include "core/text.h"
#include "core/workload.h"

/* ---- --compute ---- */

/* Refuses train and train:MODEL: the trainer itself trains on what is read or generated. */
static enum status refuse_training(const char *text)
{
    const char *model = text[5] == ':' && text[6] ? text + 6 : "MODEL";
    return status_value(STATUS_USAGE, "compute", text,
                        ": give the time of a step in milliseconds. To train on batches while they are read "
                        "or generated, run --workload train --variant %s --model %.40s with --data DIR "
                        "--feed load or --data synth --feed live",
                        strncmp(model, "vit-", 4) == 0     ? "train-vit"
                        : strncmp(model, "resnet", 6) == 0 ? "train-resnet"
                                                           : "train-cuda",
                        model);
}

enum status compute_read(struct compute *compute)
{
    const char *text = compute->text;
    double step_ms;
    compute->step_s = 0;
    if (!text)
        return STATUS_OK;
    if (strncmp(text, "train", 5) == 0 && (text[5] == ':' || !text[5]))
        return refuse_training(text);
    TRY(parse_real("--compute", text, COMPUTE_MIN_MS, COMPUTE_MAX_MS, &step_ms));
    compute->step_s = 1e-3 * step_ms;
    return STATUS_OK;
}

/* ---- Workloads ---- */

extern const struct workload workload_synth, workload_load, workload_ops, workload_train, workload_infer,
    workload_exchange;

const struct workload *const workload_table[] = {
    &workload_synth, &workload_load,     &workload_ops, &workload_train,
    &workload_infer, &workload_exchange, NULL};

const struct workload *workload_find(const char *name)
{
    for (size_t i = 0; workload_table[i]; i++)
        if (strcmp(workload_table[i]->name, name) == 0)
            return workload_table[i];
    return NULL;
}

enum status workload_refuse_max(uint64_t batch)
{
    return batch != OPTION_MAX ? STATUS_OK
                               : status_set(STATUS_USAGE, "only the workloads train and infer can search for "
                                                          "the largest batch (--batch max); give a number");
}

/* ---- Variants ---- */

/* WITH_NEEDS(symbol) is the address of a variant if this build has what the variant needs, else NULL. */
#define WITH_NOTHING(symbol) &symbol
#if defined(_OPENMP)
#define WITH_OPENMP(symbol) &symbol
#else
#define WITH_OPENMP(symbol) NULL
#endif
#if defined(HAVE_XXHASH)
#define WITH_XXHASH(symbol) &symbol
#else
#define WITH_XXHASH(symbol) NULL
#endif
#if defined(HAVE_URING)
#define WITH_URING(symbol) &symbol
#else
#define WITH_URING(symbol) NULL
#endif
#if defined(HAVE_CUDA)
#define WITH_CUDA(symbol) &symbol
#else
#define WITH_CUDA(symbol) NULL
#endif
#if defined(HAVE_CUBLAS)
#define WITH_CUBLAS(symbol) &symbol
#else
#define WITH_CUBLAS(symbol) NULL
#endif
#if defined(HAVE_CUDNN)
#define WITH_CUDNN(symbol) &symbol
#else
#define WITH_CUDNN(symbol) NULL
#endif
#if defined(HAVE_CUFILE)
#define WITH_CUFILE(symbol) &symbol
#else
#define WITH_CUFILE(symbol) NULL
#endif
#if defined(HAVE_MPI)
#define WITH_MPI(symbol) &symbol
#else
#define WITH_MPI(symbol) NULL
#endif
#if defined(HAVE_XXHASH)
#define WITH_XXHASH_OPENMP(symbol) WITH_OPENMP(symbol)
#define WITH_XXHASH_URING(symbol)  WITH_URING(symbol)
#define WITH_XXHASH_CUDA(symbol)   WITH_CUDA(symbol)
#define WITH_XXHASH_CUFILE(symbol) WITH_CUFILE(symbol)
#else
#define WITH_XXHASH_OPENMP(symbol) NULL
#define WITH_XXHASH_URING(symbol)  NULL
#define WITH_XXHASH_CUDA(symbol)   NULL
#define WITH_XXHASH_CUFILE(symbol) NULL
#endif

#define PREFERENCE(workload, names)
#define VARIANT(symbol, name, workload, needs, summary) extern const struct variant symbol;
#include "core/variants.def"
#undef VARIANT

/* libfdsl has only the variants of some workloads (src/lib/fdsl.c). */
#ifdef LINKS_WORKLOAD
#define LINKED(workload, variant) __builtin_choose_expr(LINKS_WORKLOAD(workload), variant, NULL)
#else
#define LINKED(workload, variant) variant
#endif
#define VARIANT(symbol, name, workload, needs, summary) \
    {name, workload, #needs, summary, LINKED(workload, WITH_##needs(symbol))},
const struct variant_entry variant_table[] = {
#include "core/variants.def"
};
#undef VARIANT
#undef PREFERENCE

#define VARIANT(symbol, name, workload, needs, summary)
#define PREFERENCE(workload, names) {workload, names},
static const struct {
    const char *workload, *names; /* names: the best first, separated by commas */
} preferences[] = {
#include "core/variants.def"
};
#undef VARIANT
#undef PREFERENCE

const size_t variant_count = COUNT_OF(variant_table);

#ifndef LINKS_WORKLOAD
enum status variant_table_check(void)
{
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        const struct variant *variant = entry->variant;
        if (!workload_find(entry->workload))
            return status_set(STATUS_FAILED, "variants.def: '%s' names the unknown workload '%s'",
                              entry->name, entry->workload);
        if (variant_find(entry->name) != entry)
            return status_set(STATUS_FAILED, "variants.def: '%s' appears twice", entry->name);
        if (strcmp(entry->name, "all") == 0 || strcmp(entry->name, "auto") == 0 || strchr(entry->name, ','))
            return status_set(STATUS_FAILED, "variants.def: '%s' cannot be the name of a variant",
                              entry->name);
        if (variant &&
            !(variant->platform && variant->setup && variant->run && variant->fetch && variant->teardown))
            return status_set(STATUS_FAILED, "variants.def: '%s' lacks a callback", entry->name);
    }
    return STATUS_OK;
}
#endif

const struct variant_entry *variant_find(const char *name)
{
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].name, name) == 0)
            return &variant_table[i];
    return NULL;
}

/* Returns whether `part` is one of the parts that `needs` joins with '_'. Parts whose names begin with CU
 * need CUDA as well. */
static bool needs_part(const char *needs, const char *part)
{
    for (size_t length; *needs; needs += length + (needs[length] == '_')) {
        length = strcspn(needs, "_");
        if ((strlen(part) == length && strncmp(needs, part, length) == 0) ||
            (strncmp(needs, "CU", 2) == 0 && strcmp(part, "CUDA") == 0))
            return true;
    }
    return false;
}

/* Sets the message that names the parts of `needs` that this build lacks. Applies WITH_...() to an arbitrary
 * symbol: the result is NULL if that part is not built. */
static enum status explain_not_built(const char *needs)
{
    static const struct {
        const char *part, *words;
        const void *built;
    } parts[] = {{"XXHASH", "xxHash", WITH_XXHASH(variant_count)},
                 {"OPENMP", "OpenMP", WITH_OPENMP(variant_count)},
                 {"URING", "liburing", WITH_URING(variant_count)},
                 {"MPI", "MPI", WITH_MPI(variant_count)},
                 {"CUDA", "CUDA", WITH_CUDA(variant_count)},
                 {"CUBLAS", "cublasLt.h", WITH_CUBLAS(variant_count)},
                 {"CUDNN", "cudnn.h", WITH_CUDNN(variant_count)},
                 {"CUFILE", "cufile.h", WITH_CUFILE(variant_count)}};
    char lacks[128] = "";
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        if (parts[i].built || !needs_part(needs, parts[i].part))
            continue;
        text_join(lacks, sizeof lacks, " and ", "no %s", parts[i].words);
        if (strcmp(parts[i].part, "CUDA") == 0) /* builds without CUDA never look for its libraries */
            break;
    }
    return status_set(STATUS_UNAVAILABLE, "not built: this build has %s", lacks);
}

enum status variant_available(const struct variant_entry *entry, const struct resources *resources)
{
    if (!entry->variant)
        return explain_not_built(entry->needs);
    return entry->variant->probe ? entry->variant->probe(resources) : STATUS_OK;
}

/* Implements variant_unknown(). Also suggests the first `count` words of `words`. */
static enum status unknown(const char *option, const char *name, const char *const words[], size_t count)
{
    const char **names = malloc((variant_count + count) * sizeof *names);
    const char *nearest = NULL;
    if (names) {
        for (size_t i = 0; i < variant_count; i++)
            names[i] = variant_table[i].name;
        for (size_t i = 0; i < count; i++)
            names[variant_count + i] = words[i];
        nearest = nearest_word(name, names, variant_count + count);
    }
    free(names);
    if (nearest)
        return status_set(STATUS_USAGE, "%sunknown variant '%s'; did you mean '%s'?", option, name, nearest);
    return status_set(STATUS_USAGE, "%sunknown variant '%s'; --list shows them all", option, name);
}

enum status variant_unknown(const char *option, const char *name)
{
    return unknown(option, name, NULL, 0);
}

static enum status choose(const char *name, const char **workload, const struct variant_entry **chosen,
                          size_t *count)
{
    static const char *const alone[] = {"all", "auto"};
    const struct variant_entry *entry = variant_find(name);
    for (size_t i = 0; i < COUNT_OF(alone); i++)
        if (strcmp(name, alone[i]) == 0)
            return status_option(STATUS_USAGE, "variant",
                                 ": '%s' cannot be combined with names; drop '%s' or the names", name, name);
    if (!entry)
        return unknown("", name, alone, COUNT_OF(alone));
    if (!*workload)
        *workload = entry->workload;
    if (strcmp(entry->workload, *workload) != 0)
        return status_set(STATUS_USAGE,
                          "variant '%s' belongs to the workload '%s', not '%s'; run one workload at a time",
                          name, entry->workload, *workload);
    for (size_t i = 0; i < *count; i++)
        if (chosen[i] == entry)
            return status_set(STATUS_USAGE, "variant '%s' is named twice", name);
    chosen[(*count)++] = entry;
    return STATUS_OK;
}

static void choose_all(const char *workload, const struct variant_entry **chosen, size_t *count)
{
    for (size_t i = 0; i < variant_count; i++)
        if (strcmp(variant_table[i].workload, workload) == 0)
            chosen[(*count)++] = &variant_table[i];
}

/* Returns the variants of a workload that --variant auto tries. */
static const char *preferred(const char *workload)
{
    for (size_t i = 0; i < COUNT_OF(preferences); i++)
        if (strcmp(preferences[i].workload, workload) == 0)
            return preferences[i].names;
    return "";
}

enum status variant_select(const char *list, const char *workload, const struct variant_entry ***chosen,
                           size_t *count)
{
    *count = 0;
    *chosen = calloc(variant_count, sizeof **chosen);
    if (variant_is_auto(list))
        list = preferred(workload ? workload : "synth");
    char *names = strdup(list), *last = names ? strrchr(names, ',') : NULL;
    enum status status = STATUS_OK;
    if (!*chosen || !names)
        status = status_set(STATUS_EXHAUSTED, "out of memory while selecting variants");
    else if (strcmp(list, "all") == 0)
        choose_all(workload ? workload : "synth", *chosen, count);
    else if (last && !*trim(last + 1))
        status =
            status_option(STATUS_USAGE, "variant", ": '%.80s': a name is missing after the last comma", list);
    else {
        char *rest = names, *name;
        while (status == STATUS_OK && (name = strsep(&rest, ",")))
            status = choose(trim(name), &workload, *chosen, count); /* a file may have blanks: "naive, omp" */
    }
    free(names);
    if (status != STATUS_OK) {
        free(*chosen);
        *chosen = NULL;
    }
    return status;
}
