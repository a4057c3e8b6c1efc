/* Tests the all-reduces in device memory (cuda/train/allreduce.cuh), on the ranks that mpirun starts:
 *
 *     mpirun -n N build/tests/gpu_allreduce            tests all methods that are available
 *     mpirun -n N build/tests/gpu_allreduce --time     prints the time per call instead
 *     mpirun -n N build/tests/gpu_allreduce --sweep    prints the time per call over the number of blocks
 *
 * Compares each value with the sum that the host computes in rank order: bit by bit for `peer`, within a
 * bound for NCCL, whose order is unknown. All ranks and repeated calls must give the same bits. Tests also
 * CUDA graphs, calls of different sizes without waiting in between, slow ranks, and a missing rank.
 *
 * Prints one line per case. Exit status 2 for invalid arguments, 3 if a case fails, 4 if no method is
 * available. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "common/check.cuh"
#include "core/half.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/device.h"
#include "train/allreduce.cuh"
#include "train/allreduce_peer.cuh"

#define GUARD_VALUES 16 /* after the array; must keep their value */
#define GUARD_BYTE   0xA5
#define BLOCK        256

static int failures, device;
static cudaStream_t stream;

static const struct allreduce_method *const methods[] = {&allreduce_peer, &allreduce_peer_one_shot,
                                                         &allreduce_peer_two_shot, &allreduce_nccl};
static const char *const type_names[] = {"f32", "bf16", "f32 as bf16"};
static const enum allreduce_type types[] = {ALLREDUCE_F32, ALLREDUCE_BF16, ALLREDUCE_F32_AS_BF16};

static bool leads(void)
{
    return comm_rank() == 0;
}

/* Ends the program; mpirun then ends the other ranks. */
static void must(enum status status)
{
    if (status == STATUS_OK)
        return;
    fprintf(stderr, "gpu_allreduce: rank %d: %s\n", comm_rank(), status_text());
    _exit(1);
}

#define MUST(call) must(cuda_status((call), #call, __FILE__, __LINE__))

/* Counts a failure if one of the ranks has one. Prints one line. */
static void report(const struct allreduce_method *method, enum allreduce_type type, const char *what,
                   uint64_t wrong)
{
    must(comm_sum(&wrong, 1));
    if (leads())
        printf("%s  %-13s  %-11s  %s%s\n", wrong ? "FAILED" : "ok    ", method->name, type_names[type], what,
               wrong ? ": wrong" : "");
    if (leads() && wrong)
        printf("        %llu wrong values or ranks\n", (unsigned long long)wrong);
    fflush(stdout);
    failures += wrong > 0;
}

/* ---- Values ---- */

/* A random number of either sign and different magnitudes, so that the order of a sum changes its bits. */
FDSL_HD float value_of(uint32_t round, uint32_t rank, uint64_t index)
{
    uint64_t mixed = index ^ (uint64_t)round << 40 ^ (uint64_t)(rank + 1) << 56;
    mixed = (mixed ^ mixed >> 33) * UINT64_C(0xff51afd7ed558ccd);
    mixed = (mixed ^ mixed >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    mixed ^= mixed >> 33;
    float scale = (float)(1u << (mixed & 7));
    return (float)(int32_t)(mixed >> 32) * 0x1p-31f * scale;
}

static __global__ void fill_kernel(enum allreduce_type type, const uint32_t *round, uint32_t more,
                                   uint32_t rank, size_t count, void *values)
{
    for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (size_t)gridDim.x * BLOCK) {
        float value = value_of(*round + more, rank, i);
        if (type == ALLREDUCE_BF16)
            static_cast<uint16_t *>(values)[i] = bf16_from_float(value);
        else
            static_cast<float *>(values)[i] = value;
    }
}

static __global__ void next_kernel(uint32_t *round)
{
    ++*round;
}

/* Keeps the stream busy, so that this rank is late. */
static __global__ void delay_kernel(uint64_t ns)
{
    for (uint64_t begin_ns = peer_clock_ns(); peer_clock_ns() - begin_ns < ns;)
        ;
}

static size_t value_bytes(enum allreduce_type type)
{
    return type == ALLREDUCE_BF16 ? 2 : 4;
}

static float bf16_to_float(uint16_t bits)
{
    return float_from_bits((uint32_t)bits << 16);
}

/* Returns the sum in rank order, rounded as `peer` rounds it. Sets `*magnitude` to the sum of magnitudes. */
static float sum_of(enum allreduce_type type, uint32_t round, uint64_t index, double *magnitude)
{
    float sum = 0;
    *magnitude = 0;
    for (int rank = 0; rank < comm_size(); rank++) {
        float term = value_of(round, (uint32_t)rank, index);
        if (type != ALLREDUCE_F32)
            term = bf16_to_float(bf16_from_float(term));
        sum = rank == 0 ? term : sum + term;
        *magnitude += fabs(term);
    }
    return type == ALLREDUCE_F32 ? sum : bf16_to_float(bf16_from_float(sum));
}

/* Each of the N - 1 additions of NCCL may round to the type, and each result is at most the sum of
 * magnitudes. To this, add the rounding of our sum. The factor 1.1 covers products of roundings. */
static double nccl_bound(enum allreduce_type type, double magnitude)
{
    double unit = type == ALLREDUCE_BF16 ? 0x1p-8 : 0x1p-24;
    return 1.1 * 2 * comm_size() * unit * magnitude;
}

/* An array in device memory, with a guard after it. */
struct array {
    enum allreduce_type type;
    size_t count;
    void *values;
};

static struct array new_array(enum allreduce_type type, size_t count)
{
    struct array array = {type, count};
    MUST(cudaMalloc(&array.values, (count + GUARD_VALUES) * value_bytes(type)));
    return array;
}

static void free_array(struct array *array)
{
    MUST(cudaFree(array->values));
}

static uint32_t *round_on_device; /* the round of all arrays; arrays add a number of their own */

static void set_round(uint32_t round)
{
    MUST(cudaMemcpyAsync(round_on_device, &round, sizeof round, cudaMemcpyHostToDevice, stream));
    MUST(cudaStreamSynchronize(stream));
}

/* Enqueues filling the first `count` values; the guard follows them. */
static void fill(const struct array *array, size_t count, uint32_t more)
{
    const size_t size = value_bytes(array->type);
    unsigned blocks = (unsigned)std::min<size_t>(1024, (count + BLOCK - 1) / BLOCK);
    if (count > 0)
        fill_kernel<<<blocks, BLOCK, 0, stream>>>(array->type, round_on_device, more, (uint32_t)comm_rank(),
                                                  count, array->values);
    MUST(cudaGetLastError());
    MUST(cudaMemsetAsync(static_cast<char *>(array->values) + count * size, GUARD_BYTE, GUARD_VALUES * size,
                         stream));
}

static std::vector<unsigned char> fetch(const struct array *array, size_t count)
{
    std::vector<unsigned char> bytes((count + GUARD_VALUES) * value_bytes(array->type));
    MUST(cudaMemcpyAsync(bytes.data(), array->values, bytes.size(), cudaMemcpyDeviceToHost, stream));
    MUST(cudaStreamSynchronize(stream));
    return bytes;
}

/* Returns the number of wrong values. */
static uint64_t count_wrong(const struct allreduce_method *method, const struct array *array, size_t count,
                            uint32_t round)
{
    const std::vector<unsigned char> bytes = fetch(array, count);
    const size_t size = value_bytes(array->type);
    const bool exact = method != &allreduce_nccl;
    uint64_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        double magnitude;
        float right = sum_of(array->type, round, i, &magnitude), got;
        uint16_t half;
        if (array->type == ALLREDUCE_BF16) {
            memcpy(&half, &bytes[i * size], size);
            got = bf16_to_float(half);
        } else {
            memcpy(&got, &bytes[i * size], size);
        }
        wrong += exact ? float_bits(got) != float_bits(right)
                       : !(fabs((double)got - right) <= nccl_bound(array->type, magnitude));
    }
    for (size_t i = count * size; i < bytes.size(); i++)
        wrong += bytes[i] != GUARD_BYTE;
    return wrong;
}

static uint64_t hash_of(const struct array *array, size_t count)
{
    const std::vector<unsigned char> bytes = fetch(array, count);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, &bytes[i], std::min(sizeof word, bytes.size() - i));
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 32;
    }
    return hash;
}

/* Returns 1 if a rank has another hash than rank 0. */
static uint64_t differs(uint64_t hash)
{
    return comm_check_same(hash, "sums", "they must be the same") != STATUS_OK;
}

/* ---- Methods ---- */

/* Returns NULL if these ranks cannot use the method, and prints why. */
static void *open_method(const struct allreduce_method *method, enum allreduce_type type, size_t count_max)
{
    const struct allreduce_request request = {device, count_max, type};
    void *state = NULL;
    enum status status = comm_agree(method->probe(device));
    if (status == STATUS_OK)
        status = method->open(&request, &state);
    if (status == STATUS_OK)
        return state;
    if (leads())
        printf("%s  %-13s  %-11s  %s\n", status == STATUS_UNAVAILABLE ? "skipped" : "FAILED", method->name,
               type_names[type], status_text());
    fflush(stdout);
    failures += status != STATUS_UNAVAILABLE;
    if (state)
        method->close(state);
    return NULL;
}

static void reduce(const struct allreduce_method *method, void *state, const struct array *array,
                   size_t count)
{
    must(method->enqueue(state, array->values, count, stream));
}

static void finish(const struct allreduce_method *method, void *state)
{
    MUST(cudaStreamSynchronize(stream));
    must(method->check(state));
}

/* ---- Cases ---- */

/* Limits of the kernels of `peer`: a slot of one block, and the slots of all blocks. */
static std::vector<size_t> counts_of(enum allreduce_type type)
{
    std::vector<size_t> counts = {0, 1, 3, 7, 8, 127, 1000, 4099, (size_t)1 << 20, 12345677};
    const size_t ranks = (size_t)comm_size(), per_unit = type == ALLREDUCE_F32 ? 4 : 8;
    const size_t slot = PEER_HALF_UNITS / ranks / PEER_LINE_UNITS * PEER_LINE_UNITS * per_unit;
    for (size_t limit : {PEER_LINE_UNITS * per_unit, PEER_THREADS * per_unit, slot, ranks * slot,
                         PEER_CHANNELS_MAX * slot, PEER_CHANNELS_MAX * ranks * slot})
        for (size_t count : {limit - 1, limit, limit + 1})
            counts.push_back(count);
    return counts;
}

static size_t largest_of(const std::vector<size_t> &counts)
{
    return *std::max_element(counts.begin(), counts.end());
}

static void test_counts(const struct allreduce_method *method, void *state, enum allreduce_type type)
{
    const std::vector<size_t> counts = counts_of(type);
    struct array array = new_array(type, largest_of(counts));
    for (size_t count : counts) {
        char what[64];
        uint64_t hashes[2], wrong = 0;
        set_round((uint32_t)count);
        for (uint64_t &hash : hashes) {
            fill(&array, count, 0);
            reduce(method, state, &array, count);
            finish(method, state);
            hash = hash_of(&array, count);
        }
        wrong += count_wrong(method, &array, count, (uint32_t)count);
        wrong += differs(hashes[0]);
        wrong += hashes[0] != hashes[1];
        snprintf(what, sizeof what, "%zu values", count);
        report(method, type, what, wrong);
    }
    free_array(&array);
}

/* A graph of three calls of different sizes; every replay has other values. */
static void test_graph(const struct allreduce_method *method, void *state, enum allreduce_type type)
{
    const size_t counts[] = {1000, 300001, 4099};
    struct array arrays[3];
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    uint64_t wrong = 0;
    set_round(0);
    for (int i = 0; i < 3; i++)
        arrays[i] = new_array(type, counts[i]);
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    next_kernel<<<1, 1, 0, stream>>>(round_on_device);
    for (int i = 0; i < 3; i++) {
        fill(&arrays[i], counts[i], 0);
        reduce(method, state, &arrays[i], counts[i]);
    }
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    for (uint32_t round = 1; round <= 50; round++) {
        MUST(cudaGraphLaunch(executable, stream));
        finish(method, state);
        for (int i = 0; i < 3; i++)
            wrong += count_wrong(method, &arrays[i], counts[i], round);
    }
    report(method, type, "a graph of 3 calls, 50 times", wrong);
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
    for (struct array &array : arrays)
        free_array(&array);
}

static uint32_t draw(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

/* Calls of random sizes without waiting in between. Ranks draw the same sizes and numbers of blocks, but
 * other delays. `peer` uses both of its kernels. */
static void test_mixed(const struct allreduce_method *method, void *state, enum allreduce_type type)
{
    enum { CALLS = 24, REPEATS = 20, COUNT_MAX = 400000 };
    const struct allreduce_peer_tuning before = allreduce_peer_tuning;
    uint32_t same = 7, own = 1000 + (uint32_t)comm_rank();
    struct array arrays[CALLS];
    size_t counts[CALLS];
    uint64_t wrong = 0;
    for (struct array &array : arrays)
        array = new_array(type, COUNT_MAX);
    allreduce_peer_tuning.one_shot_bytes_max = 50000;
    for (uint32_t repeat = 0; repeat < REPEATS; repeat++) {
        set_round(repeat * CALLS);
        for (uint32_t i = 0; i < CALLS; i++) {
            counts[i] = draw(&same) % (i % 3 == 0 ? COUNT_MAX : i % 3 == 1 ? 30000 : 100) + 1;
            fill(&arrays[i], counts[i], i);
        }
        for (uint32_t i = 0; i < CALLS; i++) {
            allreduce_peer_tuning.blocks = draw(&same) % 3 ? 0 : 1 + (int)(draw(&same) % PEER_CHANNELS_MAX);
            if (draw(&own) % 4 == 0)
                delay_kernel<<<1, 1, 0, stream>>>(draw(&own) % 100000);
            reduce(method, state, &arrays[i], counts[i]);
        }
        finish(method, state);
        for (uint32_t i = 0; i < CALLS; i++)
            wrong += count_wrong(method, &arrays[i], counts[i], repeat * CALLS + i);
    }
    allreduce_peer_tuning = before;
    report(method, type, "480 calls of random sizes and delays", wrong);
    for (struct array &array : arrays)
        free_array(&array);
}

/* One call with few blocks takes many steps, so each block runs ahead of others. */
static void test_few_blocks(const struct allreduce_method *method, void *state, enum allreduce_type type)
{
    const struct allreduce_peer_tuning before = allreduce_peer_tuning;
    const size_t count = 3000001;
    struct array array = new_array(type, count);
    uint64_t wrong = 0;
    for (int blocks : {1, 2, 7, 61}) {
        allreduce_peer_tuning.blocks = blocks;
        set_round((uint32_t)blocks);
        fill(&array, count, 0);
        reduce(method, state, &array, count);
        finish(method, state);
        wrong += count_wrong(method, &array, count, (uint32_t)blocks);
    }
    allreduce_peer_tuning = before;
    report(method, type, "1, 2, 7 and 61 blocks", wrong);
    free_array(&array);
}

static void test_late_rank(const struct allreduce_method *method, void *state, enum allreduce_type type)
{
    const size_t count = 100000;
    struct array array = new_array(type, count);
    set_round(1);
    fill(&array, count, 0);
    MUST(cudaStreamSynchronize(stream));
    must(comm_agree(STATUS_OK));
    if (comm_rank() == comm_size() - 1)
        usleep(300000);
    reduce(method, state, &array, count);
    finish(method, state);
    report(method, type, "the last rank is 0.3 s late", count_wrong(method, &array, count, 1));
    free_array(&array);
}

/* The last rank makes no call. All others must name it, and their later calls must not wait. */
static void test_missing_rank(const struct allreduce_method *method, enum allreduce_type type)
{
    const struct allreduce_peer_tuning before = allreduce_peer_tuning;
    const size_t count = 100000;
    const int missing = comm_size() - 1;
    char expected[64];
    uint64_t wrong = 0;
    snprintf(expected, sizeof expected, "rank %d did not answer within 1 s", missing);
    allreduce_peer_tuning.timeout_s = 1;
    void *state = open_method(method, type, count);
    allreduce_peer_tuning = before;
    if (!state)
        return;
    struct array array = new_array(type, count);
    set_round(1);
    fill(&array, count, 0);
    if (comm_rank() != missing) {
        reduce(method, state, &array, count);
        MUST(cudaStreamSynchronize(stream));
        wrong += method->check(state) != STATUS_FAILED || !strstr(status_text(), expected);
        if (wrong)
            printf("        rank %d: expected '%s', but got '%s'\n", comm_rank(), expected, status_text());
        double begin_s = timer_now_s();
        for (int i = 0; i < 10; i++)
            reduce(method, state, &array, count);
        MUST(cudaStreamSynchronize(stream));
        wrong += timer_now_s() - begin_s > 0.5;
        wrong += method->check(state) != STATUS_FAILED;
    } else {
        MUST(cudaStreamSynchronize(stream));
        wrong += method->check(state) != STATUS_OK;
    }
    report(method, type, "the last rank makes no call", wrong);
    method->close(state);
    free_array(&array);
}

/* Returns whether the method is available. */
static bool test_method(const struct allreduce_method *method, enum allreduce_type type)
{
    void *state = open_method(method, type, std::max<size_t>(largest_of(counts_of(type)), 3000001));
    if (!state)
        return false;
    test_counts(method, state, type);
    test_graph(method, state, type);
    test_mixed(method, state, type);
    if (method != &allreduce_nccl)
        test_few_blocks(method, state, type);
    test_late_rank(method, state, type);
    method->close(state);
    if (method != &allreduce_nccl && comm_size() > 1)
        test_missing_rank(method, type);
    return true;
}

/* ---- Times ---- */

#define TIMED_CALLS   20
#define TIMED_REPLAYS 11
#define WARMUPS       3

static const size_t timed_bytes[] = {1000,    16000,   64000,    256000,   1200000,
                                     2400000, 4900000, 24000000, 180000000};

/* Returns the median time per call in microseconds, over replays of a graph of dependent calls. The time of a
 * replay is that of the slowest rank. A short call before the first event lets the ranks begin together. */
static double time_call(const struct allreduce_method *method, void *state, const struct array *array,
                        size_t count)
{
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    double times_us[TIMED_REPLAYS];
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    MUST(cudaMemsetAsync(array->values, 0, array->count * value_bytes(array->type), stream));
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    reduce(method, state, array, std::min<size_t>(count, 8));
    MUST(cudaEventRecordWithFlags(begin, stream, cudaEventRecordExternal));
    for (int i = 0; i < TIMED_CALLS; i++)
        reduce(method, state, array, count);
    MUST(cudaEventRecordWithFlags(end, stream, cudaEventRecordExternal));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = -WARMUPS; i < TIMED_REPLAYS; i++) {
        float time_ms;
        double nothing = 0;
        must(comm_vote(STATUS_OK, &nothing, 1)); /* a barrier */
        MUST(cudaGraphLaunch(executable, stream));
        finish(method, state);
        MUST(cudaEventElapsedTime(&time_ms, begin, end));
        if (i >= 0)
            times_us[i] = 1e3 * time_ms / TIMED_CALLS;
    }
    must(comm_max(times_us, TIMED_REPLAYS));
    std::sort(times_us, times_us + TIMED_REPLAYS);
    MUST(cudaGraphExecDestroy(executable));
    MUST(cudaGraphDestroy(graph));
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    return times_us[TIMED_REPLAYS / 2];
}

static size_t timed_count(enum allreduce_type type, size_t bytes)
{
    return bytes / value_bytes(type);
}

static size_t timed_count_max(enum allreduce_type type)
{
    return timed_count(type, timed_bytes[COUNT_OF(timed_bytes) - 1]);
}

/* Prints the time per call of each method. Returns whether a method is available. */
static bool print_times(void)
{
    bool available = false;
    for (enum allreduce_type type : types) {
        double times_us[COUNT_OF(methods)][COUNT_OF(timed_bytes)];
        struct array array = new_array(type, timed_count_max(type));
        for (size_t m = 0; m < COUNT_OF(methods); m++) {
            void *state = open_method(methods[m], type, array.count);
            available |= state != NULL;
            for (size_t i = 0; i < COUNT_OF(timed_bytes); i++)
                times_us[m][i] =
                    state ? time_call(methods[m], state, &array, timed_count(type, timed_bytes[i])) : NAN;
            if (state)
                methods[m]->close(state);
        }
        free_array(&array);
        if (!leads())
            continue;
        printf("us per call, %s, %d ranks, NCCL %s\n%12s", type_names[type], comm_size(),
               allreduce_nccl_version(), "bytes");
        for (const struct allreduce_method *method : methods)
            printf("  %13s", method->name);
        for (size_t i = 0; i < COUNT_OF(timed_bytes); i++) {
            printf("\n%12zu", timed_bytes[i]);
            for (size_t m = 0; m < COUNT_OF(methods); m++)
                printf("  %13.2f", times_us[m][i]);
        }
        printf("\n\n");
        fflush(stdout);
    }
    return available;
}

/* Prints the time per call over the number of blocks. Returns whether a method is available. */
static bool print_sweep(void)
{
    static const int blocks[] = {4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256};
    const struct allreduce_peer_tuning before = allreduce_peer_tuning;
    const enum allreduce_type type = ALLREDUCE_BF16;
    struct array array = new_array(type, timed_count_max(type));
    bool available = false;
    for (const struct allreduce_method *method : {&allreduce_peer_one_shot, &allreduce_peer_two_shot}) {
        void *state = open_method(method, type, array.count);
        if (!state)
            continue;
        available = true;
        if (leads())
            printf("us per call over blocks, %s, %s, %d ranks\n%12s", method->name, type_names[type],
                   comm_size(), "bytes");
        for (int count : blocks)
            if (leads())
                printf("  %7d", count);
        for (size_t bytes : timed_bytes) {
            if (leads())
                printf("\n%12zu", bytes);
            for (int count : blocks) {
                allreduce_peer_tuning.blocks = count;
                double time_us = time_call(method, state, &array, timed_count(type, bytes));
                if (leads())
                    printf("  %7.2f", time_us);
            }
            fflush(stdout);
        }
        if (leads())
            printf("\n\n");
        allreduce_peer_tuning = before;
        method->close(state);
    }
    free_array(&array);
    return available;
}

/* ---- Main ---- */

static bool test_all(void)
{
    bool available = false;
    for (const struct allreduce_method *method : methods)
        for (enum allreduce_type type : types)
            available |= test_method(method, type);
    return available;
}

static int run(const char *mode)
{
    int lowest, highest;
    device = comm_local_rank() % std::max(1, device_count());
    if (comm_agree(device_probe(device)) != STATUS_OK) {
        status_print();
        return 4;
    }
    MUST(cudaSetDevice(device));
    MUST(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    MUST(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    MUST(cudaMalloc(&round_on_device, sizeof *round_on_device));
    bool available = strcmp(mode, "--time") == 0    ? print_times()
                     : strcmp(mode, "--sweep") == 0 ? print_sweep()
                                                    : test_all();
    MUST(cudaFree(round_on_device));
    MUST(cudaStreamDestroy(stream));
    return failures ? 3 : available ? 0 : 4;
}

int main(int argc, char *argv[])
{
    const char *mode = argc == 2 ? argv[1] : "";
    if (argc > 2 || (argc == 2 && strcmp(mode, "--time") != 0 && strcmp(mode, "--sweep") != 0)) {
        fprintf(stderr, "usage: gpu_allreduce [--time | --sweep]\n");
        return 2;
    }
    comm_set_timeout(120); /* a rank that fails must not block the others */
    if (comm_open() != STATUS_OK) {
        status_print();
        return 4;
    }
    int result = run(mode);
    comm_close();
    return result;
}
