/* Checks of gpu_allreduce that compare updates of parameters (allreduce_peer_update()) with the reference. */
#ifndef FDSL_TESTS_GPU_ALLREDUCE_UPDATES_CUH
#define FDSL_TESTS_GPU_ALLREDUCE_UPDATES_CUH

#include "gpu_allreduce_arrays.cuh"

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

#endif
