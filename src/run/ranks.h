/* Gathers the results of all ranks on rank 0 and combines them into the row with rank=all. Functions whose
 * comment begins with "Collective" must be called by all ranks in the same order; they fail on all ranks or
 * on none. */
#ifndef FDSL_RUN_RANKS_H
#define FDSL_RUN_RANKS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "core/workload.h"
#include "run/bench.h"
#include "core/record.h"

/* Values of one rank that the combined row needs and that the row of the rank does not have. */
struct rank_facts {
    double bytes; /* struct work */
    struct roofline roofline;
    int sharers; /* number of ranks that share its device; 1 on a CPU, where each rank has its own cores */
    uint64_t throttle_reasons;
    double run_j;                      /* energy per run in joules; NaN if unknown */
    double cpu_share, preempted_per_s; /* from runner_cpu_use(), which says when they are NaN */
};

/* Collective: gathers the rows and facts of all ranks. On rank 0, `*rows` and `*facts` become arrays of
 * comm_size() elements in rank order, and `*rows` has room for one more row; on other ranks, they become
 * NULL. All rows must have the same columns. The caller frees `*rows` with ranks_free_rows() and `*facts`
 * with free(). */
enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts);
void ranks_free_rows(struct row *rows);

/* Collective: gathers the samples of all ranks. On rank 0, `*samples` becomes an array of comm_size() *
 * bench->count elements in rank order; on other ranks, it becomes NULL. The caller frees `*samples`. */
enum status ranks_gather_samples(const struct bench *bench, struct sample **samples);

/* Returns the combined roofline of `count` ranks that run concurrently. */
struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count);

/* Sets the columns of `total`, an open row over the same table, from the rows of `count` ranks as the table
 * says. Real numbers are combined as the rows show them, with the digits of their columns. */
void ranks_combine(const struct row *rows, int count, struct row *total);

/* Returns the parallel efficiency; 1 is ideal. `together_s` is the time of all ranks; `alone_s` is the time
 * of rank 0 alone, for the work of one rank (weak scaling) or of all ranks (strong scaling). Returns 0
 * (unknown) if `alone_s` is 0. */
double ranks_efficiency(const struct partition *partition, double alone_s, double together_s);

#endif
