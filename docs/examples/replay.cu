/* Captures the generation of a batch into a CUDA graph. Each replay generates the images that follow those of
 * the previous replay.
 *
 *     nvcc replay.cu $(pkg-config --cflags --libs fdsl) -o replay && ./replay
 */
#include <cstdio>
#include <cstdlib>
#include <fdsl.h>

static void check(int status, const char *text)
{
    if (status != 0)
        exit((fprintf(stderr, "replay: %s\n", text), 1));
}

static void check(cudaError_t status)
{
    check(status, cudaGetErrorString(status));
}
static void check(fdsl_status status)
{
    check(status, fdsl_error());
}

int main()
{
    fdsl_config config;
    fdsl_generator *generator;
    check(fdsl_config_init(&config, sizeof config));
    config.device = 0;
    config.out_res = 224;
    check(fdsl_open(&config, &generator));

    uint8_t *images;
    int64_t *labels, label;
    uint64_t *next; /* number of the next image, advanced by every replay */
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaMalloc(&images, config.batch * 224 * 224));
    check(cudaMalloc(&labels, config.batch * sizeof *labels));
    check(cudaMalloc(&next, sizeof *next));
    check(cudaMemset(next, 0, sizeof *next));
    check(cudaStreamCreate(&stream));

    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    check(fdsl_generate_next(generator, next, config.batch, config.batch, images, labels, stream));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    for (int step = 0; step < 4; step++) {
        check(cudaGraphLaunch(replay, stream)); /* a training step would follow on this stream */
        check(cudaMemcpyAsync(&label, labels, sizeof label, cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        printf("step %d begins with class %lld\n", step, (long long)label);
    }
    fdsl_close(generator); /* only after the last replay; the end of the process frees the rest */
}
