/* Checks the all-reduce methods on device memory. A launcher runs this program with one or more ranks per
 * GPU:
 *
 *     mpirun -n 2 gpu_allreduce            checks every method, type and size
 *     mpirun -n 2 gpu_allreduce --updates  checks only updates of parameters, and rounding to bf16
 *     mpirun -n 2 gpu_allreduce --time     prints microseconds per call
 *     mpirun -n 2 gpu_allreduce --sweep    prints microseconds per call for several numbers of thread blocks
 *
 * Rank 0 prints one line per check. Exit status 1 if a check or a call failed, 4 if no method works here. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
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

/* ---- Checks of sums ---- */

static void check_counts(const struct allreduce_method *method, int t, void *state, cudaStream_t stream)
{
    static const size_t counts[] = {1,    3,     7,      8,      9,       127,     1000,    4099,
                                    8191, 65537, 262143, 262145, 1 << 20, 1234577, 1179648, 12345677};
    char text[160];
    for (uint32_t round = 0; round < 2; round++)
        for (size_t count : counts) {
            struct array array = make(types[t].type, count);
            fill(&array, round);
            if (comm_rank() == comm_size() - 1 && count == 1000)
                usleep(300000); /* the last rank is late */
            must(method->enqueue(state, array.values, count, stream));
            MUST(cudaStreamSynchronize(stream));
            must(method->check(state));
            uint64_t wrong = count_wrong(&array, round, is_exact(method));
            snprintf(text, sizeof text, "%s, %s, %zu values: %llu wrong", method->name, types[t].name, count,
                     (unsigned long long)wrong);
            report(wrong == 0 && same_on_all_ranks(&array), text);
            MUST(cudaFree(array.values));
        }
}

/* Replays a graph with calls of different sizes. The sums of one replay are the input of the next replay, so
 * each replay after the first multiplies every value by the number of ranks. */
static void check_graph(const struct allreduce_method *method, int t, void *state, cudaStream_t stream)
{
    static const size_t counts[] = {5, 300001, 70000};
    const int replays = 8;
    struct array arrays[3];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    char text[160];
    for (int i = 0; i < 3; i++) {
        arrays[i] = make(types[t].type, counts[i]);
        fill(&arrays[i], 9);
    }
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 3; i++)
        must(method->enqueue(state, arrays[i].values, counts[i], stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < replays; i++)
        MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaStreamSynchronize(stream));
    must(method->check(state));
    for (int i = 0; i < 3; i++) {
        uint64_t wrong = 0;
        float scale = powf((float)comm_size(), (float)(replays - 1)), size;
        float u = types[t].type == ALLREDUCE_F32 ? 0x1p-24f : 0x1p-8f;
        MUST(cudaMemcpy(host_of(&arrays[i]), arrays[i].values, bytes_of(&arrays[i]), cudaMemcpyDeviceToHost));
        for (size_t j = 0; j < counts[i]; j++) {
            float sum = sum_of(j, 9, types[t].type, &size);
            wrong += !(fabsf(at(&arrays[i], j) - scale * sum) <=
                       2 * (float)(replays * comm_size()) * u * scale * size);
        }
        snprintf(text, sizeof text, "%s, %s, %zu values in a graph: %llu wrong", method->name, types[t].name,
                 counts[i], (unsigned long long)wrong);
        report(wrong == 0 && same_on_all_ranks(&arrays[i]), text);
        MUST(cudaFree(arrays[i].values));
    }
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
}

static uint32_t draw(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

static __global__ void delay_kernel(uint64_t ns)
{
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}

/* Makes calls of random sizes without waiting between them. All ranks draw the same sizes and numbers of
 * thread blocks, but different delays. With these sizes, `peer` uses all of its kernels. */
static void check_mixed(const struct allreduce_method *method, int t, void *state, cudaStream_t stream)
{
    enum { CALLS = 24, ROUNDS = 20, COUNT_MAX = 400000 };
    const struct allreduce_peer_tuning before = allreduce_peer_tuning;
    uint32_t same = 7, own = 1000 + (uint32_t)comm_rank();
    uint64_t wrong = 0;
    bool agree = true;
    char text[160];
    allreduce_peer_tuning.one_shot_bytes = 50000;
    allreduce_peer_tuning.eager_bytes = 8000;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        std::vector<struct array> arrays;
        for (uint32_t i = 0; i < CALLS; i++) {
            uint32_t most = i % 3 == 0 ? COUNT_MAX : i % 3 == 1 ? 30000 : 100;
            arrays.push_back(make(types[t].type, draw(&same) % most + 1));
            fill(&arrays[i], round * CALLS + i);
        }
        for (struct array &array : arrays) {
            allreduce_peer_tuning.blocks = draw(&same) % 3 ? 0 : 1 + (int)(draw(&same) % 300);
            if (draw(&own) % 4 == 0)
                delay_kernel<<<1, 1, 0, stream>>>(draw(&own) % 100000);
            must(method->enqueue(state, array.values, array.count, stream));
        }
        MUST(cudaStreamSynchronize(stream));
        must(method->check(state));
        for (uint32_t i = 0; i < CALLS; i++) {
            wrong += count_wrong(&arrays[i], round * CALLS + i, is_exact(method));
            agree &= same_on_all_ranks(&arrays[i]);
            MUST(cudaFree(arrays[i].values));
        }
    }
    allreduce_peer_tuning = before;
    snprintf(text, sizeof text, "%s, %s, calls of random sizes and delays: %llu wrong", method->name,
             types[t].name, (unsigned long long)wrong);
    report(wrong == 0 && agree, text);
}

/* Sets all bits of the values, which makes them NaN. The eager kernel marks empty memory with these bits, but
 * must not mistake such values for empty memory and wait forever. */
static void check_nan(const struct allreduce_method *method, int t, void *state, cudaStream_t stream)
{
    struct array array = make(types[t].type, 10007);
    uint64_t wrong = 0;
    char text[160];
    MUST(cudaMemset(array.values, 0xff, bytes_of(&array)));
    MUST(cudaDeviceSynchronize());
    must(method->enqueue(state, array.values, array.count, stream));
    MUST(cudaStreamSynchronize(stream));
    must(method->check(state));
    MUST(cudaMemcpy(host_of(&array), array.values, bytes_of(&array), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < array.count; i++)
        wrong += !isnan(at(&array, i));
    snprintf(text, sizeof text, "%s, %s, NaN: %llu wrong", method->name, types[t].name,
             (unsigned long long)wrong);
    report(wrong == 0 && (!is_exact(method) || same_on_all_ranks(&array)), text);
    MUST(cudaFree(array.values));
}

/* ---- Rounding ---- */

/* Sends floats that are not exact in bf16. All sums must have the bits of the sums of the rounded values, and
 * be within the bound of docs/distributed.md. */
static void check_rounding(const struct allreduce_method *method, void *state, cudaStream_t stream)
{
    struct array array = make(ALLREDUCE_F32_AS_BF16, 1000003);
    auto term = [](int rank, size_t i) { return 1.0071f * value_of(rank, i, 3); };
    uint64_t wrong = 0, beyond = 0;
    char text[160];
    for (size_t i = 0; i < array.count + GUARD; i++)
        array.floats[i] = i < array.count ? term(comm_rank(), i) : 77;
    MUST(cudaMemcpy(array.values, host_of(&array), bytes_of(&array), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
    must(method->enqueue(state, array.values, array.count, stream));
    MUST(cudaStreamSynchronize(stream));
    must(method->check(state));
    MUST(cudaMemcpy(host_of(&array), array.values, bytes_of(&array), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < array.count; i++) {
        float sum = rounded(term(0, i));
        double exact = term(0, i), size = fabs(exact);
        for (int r = 1; r < comm_size(); r++) {
            sum += rounded(term(r, i));
            exact += term(r, i);
            size += fabs(term(r, i));
        }
        wrong += at(&array, i) != rounded(sum);
        beyond += !(fabs(at(&array, i) - exact) <= 1.01 * (0x1p-7 + (comm_size() - 1) * 0x1p-24) * size);
    }
    snprintf(text, sizeof text, "%s, rounding to bf16: %llu wrong, %llu beyond the bound", method->name,
             (unsigned long long)wrong, (unsigned long long)beyond);
    report(wrong + beyond == 0 && same_on_all_ranks(&array), text);
    MUST(cudaFree(array.values));
}

static void check_roundings(cudaStream_t stream)
{
    for (const struct allreduce_method *method : {&allreduce_peer_one_shot, &allreduce_peer_two_shot}) {
        void *state;
        if (comm_size() == 1 || !open_for(method, ALLREDUCE_F32_AS_BF16, 1000003, &state))
            continue;
        check_rounding(method, state, stream);
        must(comm_agree(STATUS_OK));
        method->close(state);
    }
}

/* ---- A rank that does not take part ---- */

static void check_missing(const struct allreduce_method *method, cudaStream_t stream)
{
    void *state, *values;
    const uint64_t before = allreduce_peer_tuning.timeout_ns;
    allreduce_peer_tuning.timeout_ns = 1000000000;
    if (comm_size() > 1 && open_for(method, ALLREDUCE_F32, 1000, &state)) {
        char wanted[32], text[96];
        int missing = comm_size() - 1;
        MUST(cudaMalloc(&values, 4096));
        snprintf(wanted, sizeof wanted, "rank %d did not answer", missing);
        if (comm_rank() != missing)
            must(method->enqueue(state, values, 1000, stream));
        MUST(cudaStreamSynchronize(stream));
        bool named = comm_rank() == missing ||
                     (method->check(state) == STATUS_FAILED && strstr(status_text(), wanted));
        snprintf(text, sizeof text, "%s names a missing rank", method->name);
        report(named, text);
        method->close(state);
        MUST(cudaFree(values));
    }
    allreduce_peer_tuning.timeout_ns = before;
}

/* ---- Checks of updates of parameters ---- */

/* The device arrays of allreduce_peer_update(), and the reference results in host memory. */
struct training {
    size_t count;
    struct optimizer optimizer;
    std::vector<float> parameters, m, v; /* the reference: whole arenas */
    std::vector<struct tensor_update> groups;
    struct exchange_update arrays;
    __nv_bfloat16 *rounded;
};

template <class T> static T *make_copy(const std::vector<T> &values)
{
    T *copy;
    MUST(cudaMalloc(&copy, values.size() * sizeof(T)));
    MUST(cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
    return copy;
}

template <class T> static std::vector<T> copy_back(const T *values, size_t count)
{
    std::vector<T> copy(count);
    MUST(cudaMemcpy(copy.data(), values, count * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
}

static struct training begin_training(size_t count, enum optimizer_kind kind)
{
    struct training made = {};
    const size_t room = exchange_share_room(count, (uint32_t)comm_size());
    std::vector<float> parameters(count + GUARD, 77);
    made.count = count;
    made.optimizer = {kind, 0.9, 0.9, 0.99, 1e-3, 0.125};
    made.m.resize(count);
    made.v.resize(count);
    for (size_t i = 0; i < count; i++)
        parameters[i] = value_of(0, i, 77);
    made.parameters.assign(parameters.begin(), parameters.begin() + (ptrdiff_t)count);
    for (size_t i = 0; i <= count / EXCHANGE_GROUP_VALUES; i++)
        made.groups.push_back({i % 2 ? 0.75f : 1, i % 3 != 0});
    made.rounded = count % 4 ? NULL : make_copy(std::vector<__nv_bfloat16>(count));
    made.arrays = {
        make_copy(std::vector<float>(count)),    make_copy(parameters), make_copy(std::vector<float>(room)),
        make_copy(std::vector<float>(room)),     made.rounded,          make_copy(made.groups),
        make_copy(std::vector<struct update>(1))};
    return made;
}

static void end_training(struct training *training)
{
    const struct exchange_update *arrays = &training->arrays;
    for (const void *memory :
         {(const void *)arrays->gradients, (const void *)arrays->parameters, (const void *)arrays->m,
          (const void *)arrays->v, (const void *)arrays->rounded, (const void *)arrays->groups,
          (const void *)arrays->update})
        MUST(cudaFree(const_cast<void *>(memory)));
}

/* Sets the gradients of this rank and the update of a step, and computes the step in the reference. */
static void prepare_step(struct training *training, uint32_t step)
{
    const struct schedule schedule = {SCHEDULE_CONSTANT, 0.5, 0, 0, 0, 0};
    const struct update update = optimizer_at(&training->optimizer, &schedule, step);
    std::vector<float> gradients(training->count);
    float size;
    for (size_t i = 0; i < training->count; i++) {
        const struct update of = optimizer_of(&update, training->groups[i / EXCHANGE_GROUP_VALUES]);
        gradients[i] = value_of(comm_rank(), i, step);
        optimizer_step(&of, sum_of(i, step, ALLREDUCE_F32, &size), &training->parameters[i], &training->m[i],
                       &training->v[i]);
    }
    MUST(cudaMemcpy(training->arrays.gradients, gradients.data(), gradients.size() * sizeof(float),
                    cudaMemcpyHostToDevice));
    MUST(cudaMemcpy(const_cast<struct update *>(training->arrays.update), &update, sizeof update,
                    cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
}

/* Enqueues a step in up to three parts, the last part of the arena first, as engines do. */
static void enqueue_step(const struct training *training, void *state, cudaStream_t stream)
{
    const size_t third = training->count / 3 / 32 * 32;
    const size_t ends[] = {training->count, 2 * third, third, 0};
    for (int i = 0; i < 3; i++)
        must(allreduce_peer_update(state, &training->arrays, ends[i + 1], ends[i] - ends[i + 1], stream));
}

static uint64_t count_wrong_update(const struct training *training)
{
    const uint32_t rank = (uint32_t)comm_rank(), ranks = (uint32_t)comm_size();
    const size_t count = training->count, own = exchange_share_before(count, rank, ranks);
    const std::vector<float> parameters = copy_back(training->arrays.parameters, count + GUARD),
                             m = copy_back(training->arrays.m, own), v = copy_back(training->arrays.v, own);
    uint64_t wrong = 0;
    for (size_t i = 0; i < count + GUARD; i++)
        wrong += parameters[i] != (i < count ? training->parameters[i] : 77);
    for (size_t i = 0; i < own; i++) {
        const size_t at = exchange_share_at(i, rank, ranks);
        wrong += m[i] != training->m[at];
        wrong += v[i] != training->v[at];
    }
    if (!training->rounded)
        return wrong;
    const std::vector<__nv_bfloat16> halves = copy_back(training->rounded, count);
    for (size_t i = 0; i < count; i++)
        wrong += __bfloat162float(halves[i]) != rounded(training->parameters[i]);
    return wrong;
}

/* Three steps must have the bits of the reference on all ranks. With `captured`, one graph is replayed. */
static void check_update(void *state, size_t count, enum optimizer_kind kind, bool captured,
                         cudaStream_t stream)
{
    struct training training = begin_training(count, kind);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    char text[160];
    if (captured) {
        MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        enqueue_step(&training, state, stream);
        MUST(cudaStreamEndCapture(stream, &graph));
        MUST(cudaGraphInstantiate(&exec, graph, 0));
    }
    for (uint32_t step = 0; step < 3; step++) {
        prepare_step(&training, step);
        if (captured)
            MUST(cudaGraphLaunch(exec, stream));
        else
            enqueue_step(&training, state, stream);
        MUST(cudaStreamSynchronize(stream));
        must(allreduce_peer.check(state));
    }
    uint64_t wrong = count_wrong_update(&training);
    snprintf(text, sizeof text, "update of %zu parameters, optimizer %d%s: %llu wrong", count, kind,
             captured ? ", in a graph" : "", (unsigned long long)wrong);
    report(wrong == 0, text);
    if (exec)
        MUST(cudaGraphExecDestroy(exec));
    if (graph)
        MUST(cudaGraphDestroy(graph));
    end_training(&training);
}

/* Few blocks make each block process many pieces. */
static void check_updates(cudaStream_t stream)
{
    static const size_t counts[] = {1, 3, 4, 127, 128, 129, 131, 1021, 4100, 65537, 262147, 1234580, 5000000};
    void *state;
    if (!open_for(&allreduce_peer, ALLREDUCE_F32, 5000000, &state))
        return;
    for (size_t count : counts)
        for (int blocks : {0, 3})
            for (int captured = 0; captured < 2; captured++) {
                allreduce_peer_tuning.blocks = blocks;
                check_update(state, count, (enum optimizer_kind)(count % 3), captured, stream);
            }
    allreduce_peer_tuning.blocks = 0;
    must(comm_agree(STATUS_OK));
    allreduce_peer.close(state);
}

/* ---- The methods to check ---- */

#define DEPTH 20 /* dependent calls per timed graph */

static const struct allreduce_method *const methods[] = {&allreduce_peer_one_shot, &allreduce_peer_two_shot,
                                                         &allreduce_peer, &allreduce_nccl};

/* ---- Times ---- */

static double time_us(const struct allreduce_method *method, void *state, void *values, size_t count,
                      cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> all;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < DEPTH; i++)
        must(method->enqueue(state, values, count, stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = 0; i < 13; i++) {
        float ms;
        MUST(cudaMemsetAsync(values, 0, 16, stream));
        MUST(cudaEventRecord(begin, stream));
        MUST(cudaGraphLaunch(exec, stream));
        MUST(cudaEventRecord(end, stream));
        MUST(cudaStreamSynchronize(stream));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        must(method->check(state));
        if (i >= 2)
            all.push_back(ms);
    }
    std::sort(all.begin(), all.end());
    double us = 1e3 * all[all.size() / 2] / DEPTH;
    must(comm_max(&us, 1));
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    return us;
}

static const size_t sizes[] = {1000,    16000,   81000,   262144,   524288,    1200000,
                               2400000, 4719000, 4900000, 24000000, 180000000, 256000000};

static void print_times(const struct allreduce_method *method, int t, const char *label, cudaStream_t stream)
{
    void *state, *values;
    if (!open_for(method, types[t].type, sizes[11] / 2, &state))
        return;
    MUST(cudaMalloc(&values, 2 * sizes[11] + 64));
    MUST(cudaMemset(values, 0, 2 * sizes[11] + 64));
    if (comm_rank() == 0)
        printf("%-14s %-11s %-8s", method->name, types[t].name, label);
    for (size_t bytes : sizes) { /* bytes that are sent per array */
        double us = time_us(method, state, values, bytes / (types[t].type == ALLREDUCE_F32 ? 4 : 2), stream);
        if (comm_rank() == 0)
            printf(" %8.1f", us);
    }
    if (comm_rank() == 0)
        printf("\n");
    fflush(stdout);
    must(comm_agree(STATUS_OK));
    method->close(state);
    MUST(cudaFree(values));
}

static void print_header(void)
{
    if (comm_rank() != 0)
        return;
    printf("%-35s", "microseconds per call; kB:");
    for (size_t bytes : sizes)
        printf(" %8.0f", 1e-3 * (double)bytes);
    printf("\n");
}

static void sweep(cudaStream_t stream)
{
    for (const struct allreduce_method *method : {&allreduce_peer_one_shot, &allreduce_peer_two_shot})
        for (int blocks : {8, 16, 32, 64, 96, 132, 198, 264}) {
            char label[16];
            snprintf(label, sizeof label, "%d", blocks);
            allreduce_peer_tuning.blocks = blocks;
            for (int t : {0, 1})
                print_times(method, t, label, stream);
        }
}

/* ---- The program ---- */

static void check_method(const struct allreduce_method *method, int t, cudaStream_t stream)
{
    void *state;
    if (!open_for(method, types[t].type, 12345677, &state))
        return;
    check_counts(method, t, state, stream);
    check_graph(method, t, state, stream);
    check_mixed(method, t, state, stream);
    check_nan(method, t, state, stream);
    if (method == &allreduce_peer_one_shot) {
        allreduce_peer_tuning.eager_bytes = 1; /* selects the kernel with flags */
        check_counts(method, t, state, stream);
        allreduce_peer_tuning.eager_bytes = 0;
    }
    must(comm_agree(STATUS_OK));
    method->close(state);
}

int main(int argc, char *argv[])
{
    cudaStream_t stream;
    int devices;
    must(comm_open());
    MUST(cudaGetDeviceCount(&devices));
    device = comm_local_rank() % devices;
    MUST(cudaSetDevice(device));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const char *what = argc > 1 ? argv[1] : "";
    const bool updates = strcmp(what, "--updates") == 0, all = !*what;
    if (!all && !updates)
        print_header();
    if (strcmp(what, "--sweep") == 0)
        sweep(stream);
    for (const struct allreduce_method *method : methods)
        for (int t = 0; t < 3; t++) {
            if (strcmp(what, "--time") == 0)
                print_times(method, t, "", stream);
            if (all)
                check_method(method, t, stream);
        }
    if (all || updates) {
        check_updates(stream);
        check_roundings(stream);
    }
    if (all)
        for (const struct allreduce_method *method : {&allreduce_peer_one_shot, &allreduce_peer_two_shot})
            check_missing(method, stream);
    if ((all || updates) && comm_rank() == 0)
        printf("%llu passed, %llu failed\n", (unsigned long long)passes, (unsigned long long)failures);
    comm_close();
    return failures ? 1 : (all || updates) && passes == 0 ? 4 : 0;
}
