/* Shared by the parts of gpu_allreduce: types of values, the reference, arrays in device memory, and the
 * counts of checks. A failed call ends the program with status 1. */
#ifndef FDSL_TESTS_GPU_ALLREDUCE_ARRAYS_CUH
#define FDSL_TESTS_GPU_ALLREDUCE_ARRAYS_CUH

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include <cuda_bf16.h>

#include "common/check.cuh"
#include "machine/comm.h"
#include "train/allreduce.cuh"

static const struct {
    const char *name;
    enum allreduce_type type;
    size_t bytes; /* per value */
} types[] = {
    {"f32", ALLREDUCE_F32, 4}, {"bf16", ALLREDUCE_BF16, 2}, {"f32 as bf16", ALLREDUCE_F32_AS_BF16, 4}};

static uint64_t failures, passes;
static int device;

static void must(enum status status)
{
    if (status == STATUS_OK)
        return;
    fprintf(stderr, "gpu_allreduce: rank %d: %s\n", comm_rank(), status_text());
    comm_close();
    exit(1);
}

#define MUST(call) must(cuda_status((call), #call, __FILE__, __LINE__))

static void report(bool ok, const char *text)
{
    bool all = comm_agree(ok ? STATUS_OK : status_set(STATUS_WRONG, "wrong")) == STATUS_OK;
    (all ? passes : failures)++;
    if (comm_rank() == 0 && !all)
        printf("FAILED  %s\n", text);
}

/* ---- The reference ---- */

static float rounded(float value)
{
    return __bfloat162float(__float2bfloat16_rn(value));
}

/* Returns value i of a rank. Values have both signs and are exact in bf16. Their magnitudes differ so much
 * that the order of additions changes a sum in f32. */
static float value_of(int rank, size_t i, uint32_t round)
{
    uint64_t hash =
        (i * 131 + (uint64_t)rank * 7919 + round * UINT64_C(1000003)) * UINT64_C(0x9e3779b97f4a7c15);
    hash ^= hash >> 29;
    hash = (hash * UINT64_C(0xbf58476d1ce4e5b9)) >> 20;
    return rounded(ldexpf((float)(int32_t)(hash & 0xff) - 127.5f, (int)(hash >> 8 & 31) - 16));
}

/* Returns the sum in rank order, rounded to the type. Sets `*size` to the sum of the magnitudes. */
static float sum_of(size_t i, uint32_t round, enum allreduce_type type, float *size)
{
    float sum = value_of(0, i, round);
    *size = fabsf(sum);
    for (int r = 1; r < comm_size(); r++) {
        sum += value_of(r, i, round);
        *size += fabsf(value_of(r, i, round));
    }
    return type == ALLREDUCE_F32 ? sum : rounded(sum);
}

/* ---- Arrays ---- */

struct array {
    enum allreduce_type type;
    size_t count;
    std::vector<float> floats;
    std::vector<__nv_bfloat16> halves;
    void *values; /* device memory; GUARD more values follow, which no call may change */
};

#define GUARD 16

static size_t bytes_of(const struct array *array)
{
    return (array->count + GUARD) * (array->type == ALLREDUCE_BF16 ? 2 : 4);
}

static void *host_of(struct array *array)
{
    return array->type == ALLREDUCE_BF16 ? static_cast<void *>(array->halves.data()) : array->floats.data();
}

static void fill(struct array *array, uint32_t round)
{
    for (size_t i = 0; i < array->count + GUARD; i++) {
        float value = i < array->count ? value_of(comm_rank(), i, round) : 77;
        if (array->type == ALLREDUCE_BF16)
            array->halves[i] = __float2bfloat16_rn(value);
        else
            array->floats[i] = value;
    }
    MUST(cudaMemcpy(array->values, host_of(array), bytes_of(array), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize()); /* a copy from pageable memory may return before it is complete */
}

static struct array make(enum allreduce_type type, size_t count)
{
    struct array array = {type, count, {}, {}, NULL};
    type == ALLREDUCE_BF16 ? array.halves.resize(count + GUARD) : array.floats.resize(count + GUARD);
    MUST(cudaMalloc(&array.values, bytes_of(&array)));
    return array;
}

static float at(struct array *array, size_t i)
{
    return array->type == ALLREDUCE_BF16 ? __bfloat162float(array->halves[i]) : array->floats[i];
}

/* Returns the number of values that differ from the reference. If `exact` is set, values must be equal.
 * Otherwise, the order of additions and the intermediate rounding may differ. A sum of N terms may then be
 * off by 2 N u Σ|terms|, where u is the type's rounding error. */
static uint64_t count_wrong(struct array *array, uint32_t round, bool exact)
{
    uint64_t wrong = 0;
    float u = array->type == ALLREDUCE_F32 ? 0x1p-24f : 0x1p-8f, size;
    MUST(cudaMemcpy(host_of(array), array->values, bytes_of(array), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < array->count; i++) {
        float sum = sum_of(i, round, array->type, &size);
        wrong +=
            exact ? at(array, i) != sum : !(fabsf(at(array, i) - sum) <= 2 * u * (float)comm_size() * size);
    }
    for (size_t i = array->count; i < array->count + GUARD; i++)
        wrong += at(array, i) != 77;
    return wrong;
}

static bool same_on_all_ranks(struct array *array)
{
    const uint8_t *bytes = static_cast<const uint8_t *>(host_of(array));
    uint64_t hash = 0;
    for (size_t i = 0; i < bytes_of(array); i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    uint64_t first = hash;
    must(comm_spread(&first, sizeof first));
    return first == hash;
}

/* ---- Methods ---- */

static bool is_exact(const struct allreduce_method *method)
{
    return method != &allreduce_nccl;
}

static bool open_for(const struct allreduce_method *method, enum allreduce_type type, size_t count,
                     void **state)
{
    const struct allreduce_request request = {device, count, type};
    *state = NULL;
    enum status status = comm_agree(method->probe(device));
    if (status == STATUS_OK)
        status = method->open(&request, state);
    if (status == STATUS_OK)
        return true;
    if (comm_rank() == 0)
        printf("skipped %s, type %d: %s\n", method->name, type, status_text());
    if (*state)
        method->close(*state);
    return false;
}

#endif
