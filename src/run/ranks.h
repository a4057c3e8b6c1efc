/* What the ranks of a run found out, brought together: every rank's row on rank 0, and the row of them all.
 * All ranks call these functions, in the same order; a failure is the same on all of them. */
#ifndef FDSL_RUN_RANKS_H
#define FDSL_RUN_RANKS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "core/workload.h"
#include "run/bench.h"
#include "run/record.h"

/* Per-rank values that are not in the rank's row, or not in full. */
struct rank_facts {
    double items, bytes;
    struct roofline roofline;
    int sharers;     /* ranks on its device, or 1 on a CPU, where each rank has cores of its own */
    double median_s; /* the time that it took */
    uint64_t throttle_reasons;
    double run_j;                      /* energy of a run; NaN where unknown */
    double cpu_share, preempted_per_s; /* see runner_cpu_use(); NaN where nothing follows from them */
};

/* Brings the rows and facts of all ranks to rank 0: `*rows` and `*facts`, comm_size() of each in the order of
 * ranks; NULL elsewhere. The caller frees, with ranks_free_rows(). Every rank's row has the same columns. */
enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts);
void ranks_free_rows(struct row *rows);

/* Brings the samples of all ranks to rank 0: `*samples`, comm_size() times bench->count, rank by rank; NULL
 * elsewhere. The caller frees. */
enum status ranks_gather_samples(const struct bench *bench, struct sample **samples);

/* The roofline of all `count` ranks, which run at the same time. Needs no other rank. */
struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count);

/* Writes into `total`, a row like the others, what adds up over the ranks' rows: threads, the batch, what is
 * wrong, and the measures as they say. Needs no other rank. */
void ranks_combine(const struct row *rows, int count, const struct measure *measures, struct row *total);

/* Parallel efficiency. `together_s` is the time of all ranks; `alone_s` is the time of rank 0 alone, for the
 * work of one rank (weak scaling) or of all ranks (strong scaling). 1 is ideal; 0 where `alone_s` is 0:
 * unknown. */
double ranks_efficiency(const struct partition *partition, double alone_s, double together_s);

#endif
