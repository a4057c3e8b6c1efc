/* Shared by the suites of the workload `synth`: opens its input and runs its variants. */
#ifndef FDSL_TESTS_SUPPORT_H
#define FDSL_TESTS_SUPPORT_H

#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/variant.h"
#include "core/workload.h"
#include "synth/input.h"

/* The workload `synth` and its input, opened with the options of a command line. */
struct opened {
    const struct workload *workload;
    struct options options;
    void *parameters, *input;
    const struct synth *synth; /* the input, as variants see it */
    char *line;
};

/* Opens the workload with the options in `line`, which are separated by single spaces. */
static inline void open_synth(struct opened *opened, const char *line)
{
    char *argv[64] = {(char *)"test"};
    int argc = 1;
    *opened = (struct opened){.workload = workload_find("synth"), .line = strdup(line)};
    cr_assert(opened->workload && opened->line);
    for (char *rest = opened->line, *word; (word = strsep(&rest, " ")); argc++) {
        cr_assert_lt(argc, 63);
        argv[argc] = word;
    }
    opened->parameters = calloc(1, opened->workload->parameters_bytes);
    opened->options = (struct options){
        .tables = {{opened->workload->options, opened->workload->option_count, opened->parameters}},
        .table_count = 1};
    cr_assert_eq(options_parse(&opened->options, argc, argv), STATUS_OK, "%s: %s", line, status_text());
    const struct partition alone = {.ranks = 1};
    cr_assert_eq(opened->workload->open(&opened->options, opened->parameters, &alone, &opened->input),
                 STATUS_OK, "%s: %s", line, status_text());
    opened->synth = opened->input;
}

static inline void close_synth(struct opened *opened)
{
    opened->workload->close(opened->input);
    options_free(&opened->options);
    free(opened->parameters);
    free(opened->line);
}

/* Performs `count` runs of a variant; `numbers` has the run numbers. Returns the images of the last run,
 * stored contiguously. Also returns their labels unless `labels` is NULL. The caller frees both. */
static inline uint8_t *images_and_labels_of(const struct opened *opened, const char *name, int threads,
                                            const uint64_t *numbers, int count, int64_t **labels)
{
    const struct variant *variant = variant_find(name)->variant;
    const struct resources resources = {.threads = threads};
    size_t bytes = synth_output_bytes(opened->synth);
    uint8_t *images = malloc(opened->synth->batch * bytes);
    int64_t *numbered = malloc(opened->synth->batch * sizeof *numbered);
    void *state;
    cr_assert(images && numbered);
    cr_assert_eq(variant->setup(&resources, opened->input, &state), STATUS_OK, "%s", status_text());
    for (int i = 0; i < count; i++) {
        struct run_time time;
        cr_assert_eq(variant->run(state, numbers[i], &time), STATUS_OK, "%s", status_text());
    }
    for (uint64_t j = 0; j < opened->synth->batch; j++) {
        struct synth_fetch fetch = {.j = j, .pixels = images + j * bytes, .label = -1};
        cr_assert_eq(variant->fetch(state, &fetch), STATUS_OK, "%s", status_text());
        numbered[j] = fetch.label;
    }
    variant->teardown(state);
    if (labels)
        *labels = numbered;
    else
        free(numbered);
    return images;
}

static inline uint8_t *images_of(const struct opened *opened, const char *name, int threads,
                                 const uint64_t *numbers, int count)
{
    return images_and_labels_of(opened, name, threads, numbers, count, NULL);
}

#endif
