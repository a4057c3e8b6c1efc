/* The input of the workload `exchange`: one array per rank. The variants compute the sums of these arrays
 * over all ranks, in place. One run is ALLREDUCE_CALLS calls; each call adds up the sums of the previous
 * call, so a variant that skips a call gets a wrong result.
 *
 * Before the first call, each value is ALLREDUCE_UNIT times an integer from 1 to allreduce_term_max(). The
 * integer is a function of the run, the rank and the index.
 *
 * Some variants also update parameters with Adam in each call, like a training step. Their arrays are
 * gradients: the integers times ALLREDUCE_GRADIENT_UNIT. Parameters and moments are 0 before a run. */
#ifndef FDSL_TRAIN_ALLREDUCE_H
#define FDSL_TRAIN_ALLREDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/variant.h"
#include "train/optimizer.h"

#define ALLREDUCE_CALLS         20
#define ALLREDUCE_GRADIENT_UNIT 0x1p-8f
#define ALLREDUCE_UNIT          0x1p-64f /* small, because each call multiplies the sums by the number of ranks */

struct allreduce_job {
    size_t bytes, count; /* of the array of one rank */
    bool bf16;           /* values are bf16, otherwise float */
    uint32_t rank, ranks;
};

/* Variants of `exchange` have these traits. */
struct allreduce_traits {
    bool bf16;    /* supports bf16 */
    bool updates; /* also updates parameters; fetch() then returns these instead of the sums */
    bool grows;   /* if `updates`: replaces the gradients by their sums, so they grow with each call */
    uint64_t (*memory_bytes)(const void *state); /* device memory besides the array */
    const char *(*nccl_version)(void);           /* NULL: does not use NCCL */
};

/* Output of fetch(). */
struct allreduce_result {
    void *values; /* owned by the caller; room for one array */
    uint64_t
        number; /* number of the latest run, which produced the values; UINT64_MAX before the first run */
};

/* Returns the largest integer that a value may have before the first call, in units of ALLREDUCE_UNIT. With
 * 1, 2, 4 or 8 ranks, ranks * ranks * allreduce_term_max(ranks) is at most 2^8, so all sums are exact even in
 * bf16, which has 8 significant bits (allreduce_tolerance()). */
FDSL_HD uint32_t allreduce_term_max(uint32_t ranks)
{
    return ranks <= 2 ? 64 : ranks <= 8 ? 256 / (ranks * ranks) : 4;
}

/* Returns the integer at `index` on `rank` before the first call of run `number`. The hash is the finaliser
 * of murmur3. */
FDSL_HD uint32_t allreduce_term(const struct allreduce_job *job, uint64_t number, uint32_t rank,
                                uint64_t index)
{
    uint64_t mixed = index ^ number << 40 ^ (uint64_t)rank << 56;
    mixed = (mixed ^ mixed >> 33) * UINT64_C(0xff51afd7ed558ccd);
    mixed = (mixed ^ mixed >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return 1 + (uint32_t)(mixed >> 32) % allreduce_term_max(job->ranks);
}

/* Stores the value at `index` of this rank before the first call of run `number`. */
FDSL_HD void allreduce_fill(const struct allreduce_job *job, uint64_t number, uint64_t index, void *values)
{
    float value = (float)allreduce_term(job, number, job->rank, index) * ALLREDUCE_UNIT;
    if (job->bf16)
        ((uint16_t *)values)[index] = bf16_from_float(value);
    else
        ((float *)values)[index] = value;
}

/* Returns the gradient at `index` of a rank before run `number`. */
FDSL_HD float allreduce_gradient(const struct allreduce_job *job, uint64_t number, uint32_t rank,
                                 uint64_t index)
{
    return (float)allreduce_term(job, number, rank, index) * ALLREDUCE_GRADIENT_UNIT;
}

FDSL_C_BEGIN

/* Returns the update of call `call`, counted from 0. Epsilon is about as large as the gradients. With a small
 * epsilon, Adam would cancel a wrong factor common to all gradients, and verification would miss it. */
struct update allreduce_update(int call);

/* Returns the number of parameters after run `number` that are not bit-identical to the correct parameters:
 * those that optimizer_step() computes from gradients summed in rank order. `parameters` has job->count
 * values; `grows` is that of the variant's traits. */
uint64_t allreduce_count_wrong_parameters(const struct allreduce_job *job, uint64_t number, bool grows,
                                          const float *parameters);

/* Returns the largest relative error of a correct result: 0 if all sums are exact. */
double allreduce_tolerance(const struct allreduce_job *job);

/* Returns the number of values after run `number` that are not within the tolerance. */
uint64_t allreduce_count_wrong(const struct allreduce_job *job, uint64_t number, const void *values);

FDSL_C_END

#endif
