/* Checks of the sums of gpu_allreduce: sizes, graphs, random calls, NaN, rounding to bf16, and a rank that
 * does not take part. */
#ifndef FDSL_TESTS_GPU_ALLREDUCE_CHECKS_CUH
#define FDSL_TESTS_GPU_ALLREDUCE_CHECKS_CUH

#include <unistd.h>

#include "gpu_allreduce_arrays.cuh"

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

#endif
