/* Checks the all-reduce methods on device memory. A launcher runs this program with one or more ranks per
 * GPU:
 *
 *     mpirun -n 2 gpu_allreduce            checks every method, type and size
 *     mpirun -n 2 gpu_allreduce --updates  checks only updates of parameters, and rounding to bf16
 *     mpirun -n 2 gpu_allreduce --time     prints microseconds per call
 *     mpirun -n 2 gpu_allreduce --sweep    prints microseconds per call for several numbers of thread blocks
 *
 * Rank 0 prints one line per check. Exit status 1 if a check failed, 4 if no method works here. */
#include <algorithm>

#include "gpu_allreduce_checks.cuh"
#include "gpu_allreduce_updates.cuh"

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
