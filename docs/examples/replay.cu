/* Captures the generation of a batch into a CUDA graph. Each replay generates the following images.
 *
 *     nvcc replay.cu $(pkg-config --cflags --libs fdsl) -o replay && ./replay
 */
#include <cstdio>
#include <cstdlib>
#include <cuda_fp16.h>
#include <fdsl.h>

static void check(bool right, const char *text)
{
    if (!right) {
        fprintf(stderr, "replay: %s\n", text);
        exit(1);
    }
}
#define CUDA(call) check((call) == cudaSuccess, cudaGetErrorString(cudaGetLastError()))
#define FDSL(call) check((call) == FDSL_OK, fdsl_error())

int main()
{
    fdsl_config config;
    fdsl_generator *generator;
    FDSL(fdsl_config_init(&config, sizeof config));
    config.device = 0;
    config.out_res = 224;
    config.channels = 3;
    config.dtype = "f16";
    FDSL(fdsl_open(&config, &generator));

    const size_t values = size_t(config.batch) * 3 * 224 * 224;
    __half *images;
    int64_t *labels, label;
    uint64_t *next; /* number of the next image, advanced by every replay */
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA(cudaMalloc(&images, values * sizeof *images));
    CUDA(cudaMalloc(&labels, config.batch * sizeof *labels));
    CUDA(cudaMalloc(&next, sizeof *next));
    CUDA(cudaMemset(next, 0, sizeof *next));
    CUDA(cudaStreamCreate(&stream));

    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    FDSL(fdsl_generate_next(generator, next, config.batch, config.batch, images, labels, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int step = 0; step < 4; step++) {
        CUDA(cudaGraphLaunch(replay, stream)); /* a training step would follow on this stream */
        CUDA(cudaMemcpyAsync(&label, labels, sizeof label, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        printf("step %d begins with class %lld\n", step, (long long)label);
    }
    fdsl_close(generator);
}
