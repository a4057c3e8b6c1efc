/* Shared by the suites of the workload `ops`: opens it with options and runs its variants. */
#ifndef FDSL_TESTS_OPS_SUPPORT_H
#define FDSL_TESTS_OPS_SUPPORT_H

#include <criterion/criterion.h>

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/workload.h"
#include "ops/job.h"

struct job {
    const struct workload *workload;
    struct options options;
    void *parameters, *input;
    const struct ops *ops;
    char *line;
};

/* Opens the workload as rank `rank` of `ranks` ranks, with the options in `line`. */
static inline enum status open_rank(struct job *job, uint64_t rank, uint64_t ranks, const char *line)
{
    char *argv[32] = {(char *)"test"};
    int argc = 1;
    const struct partition partition = {.rank = rank, .ranks = ranks, .strong = true};
    *job = (struct job){.workload = workload_find("ops"), .line = strdup(line)};
    for (char *rest = job->line, *word; (word = strsep(&rest, " "));)
        if (*word)
            argv[argc++] = word;
    job->parameters = calloc(1, job->workload->parameters_bytes);
    job->options = (struct options){
        .tables = {{job->workload->options, job->workload->option_count, job->parameters}}, .table_count = 1};
    TRY(options_parse(&job->options, argc, argv));
    TRY(job->workload->open(&job->options, job->parameters, &partition, &job->input));
    job->ops = job->input;
    return STATUS_OK;
}

static inline void open_well(struct job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void open_well(struct job *job, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    enum status status = open_rank(job, 0, 1, line);
    if (status == STATUS_UNAVAILABLE)
        cr_skip_test("this build has no xxHash");
    cr_assert_eq(status, STATUS_OK, "%s: %s", line, status_text());
}

static inline void close_job(struct job *job)
{
    if (job->input)
        job->workload->close(job->input);
    options_free(&job->options);
    free(job->parameters);
    free(job->line);
}

/* Sets up a variant. Returns NULL if it cannot run here. */
static inline const struct variant *set_up(const struct job *job, const char *name, void **state)
{
    const struct variant_entry *entry = variant_find(name);
    const struct resources resources = {.threads = 3};
    *state = NULL;
    if (variant_available(entry, &resources) != STATUS_OK)
        return NULL;
    cr_assert_eq(entry->variant->setup(&resources, job->input, state), STATUS_OK, "%s", status_text());
    return entry->variant;
}

/* Performs run `number`, and verifies it as if it were run `claimed`. Returns the number of wrong rows. */
static inline uint64_t wrong_rows(const struct job *job, const struct variant *variant, void *state,
                                  uint64_t number, uint64_t claimed)
{
    struct run_time unused;
    uint64_t wrong = UINT64_MAX;
    cr_assert_eq(variant_run(variant, state, number, &unused), STATUS_OK, "%s", status_text());
    cr_assert_eq(job->workload->verify(job->input, variant, state, claimed, &wrong), STATUS_OK, "%s",
                 status_text());
    return wrong;
}

static inline struct ops_summary summary_of(const struct variant *variant, void *state)
{
    struct ops_fetch fetch = {0};
    cr_assert_eq(variant->fetch(state, &fetch), STATUS_OK);
    return fetch.summary;
}

/* Returns all elements of an array of the latest run. The caller frees them. */
static inline void *results_of(const struct job *job, const struct variant *variant, void *state,
                               enum ops_array array)
{
    uint64_t count = array == OPS_KEPT ? job->ops->count : summary_of(variant, state).outputs;
    void *to = calloc(count + 1, ops_array_bytes(job->ops, array) + 1);
    struct ops_fetch fetch = {array, 0, count, to, {0}};
    cr_assert(to && variant->fetch(state, &fetch) == STATUS_OK);
    return to;
}

#endif
