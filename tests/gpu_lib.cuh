/* Shared by the programs that test streams of libfdsl.so in device memory: results of cases, streams, and the
 * host time of fdsl_stream_fill(). A failed call ends the program with status 1. */
#ifndef FDSL_TESTS_GPU_LIB_CUH
#define FDSL_TESTS_GPU_LIB_CUH

#include "gpu_learner.cuh"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "lib/fdsl.h"

static int failures;

static void tell(bool well, const std::string &what)
{
    printf("%s  %s\n", well ? "ok    " : "FAILED", what.c_str());
    failures += !well;
}

static void good(enum fdsl_status status)
{
    if (status != FDSL_OK) {
        printf("FAILED  %s (status %d)\n", fdsl_error(), status);
        exit(1);
    }
}

static double now_us(void)
{
    return 1e-3 * (double)std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now().time_since_epoch())
                      .count();
}

static struct fdsl_stream *open_stream(struct fdsl_source *source, const struct fdsl_stream_config &config)
{
    struct fdsl_stream *stream;
    good(fdsl_stream_open(source, &config, &stream));
    return stream;
}

static struct fdsl_state saved(const struct fdsl_stream *stream)
{
    struct fdsl_state state = {};
    state.size = sizeof state;
    good(fdsl_stream_save(stream, &state));
    return state;
}

static inline bool same_states(const struct fdsl_stream *one, const struct fdsl_stream *other)
{
    const struct fdsl_state states[2] = {saved(one), saved(other)};
    return memcmp(&states[0], &states[1], sizeof states[0]) == 0;
}

/* Times fdsl_stream_fill() of batches that are complete, which must take at most `limit_us` in the median. */
static void time_fill(const std::string &name, struct fdsl_stream *stream, void *images, int64_t *labels,
                      cudaStream_t on, double limit_us)
{
    std::vector<double> times;
    uint32_t count;
    for (int calls = 0; calls < 400;) {
        while (fdsl_stream_wait(stream, 1) == FDSL_PENDING)
            ;
        for (const double until_us = now_us() + 2000; now_us() < until_us;)
            ; /* the threads of the stream go to sleep; this one stays awake, as in a training loop */
        const double begin_us = now_us();
        const enum fdsl_status status = fdsl_stream_fill(stream, images, labels, &count, on);
        const double end_us = now_us();
        if (status == FDSL_END)
            continue;
        good(status);
        if (calls++ >= 50)
            times.push_back(end_us - begin_us);
        must(cudaStreamSynchronize(on));
    }
    std::sort(times.begin(), times.end());
    char text[256];
    snprintf(text, sizeof text, "host time of fill, %s: median %.2f us, 90 %% below %.2f us (limit %.0f us)",
             name.c_str(), times[times.size() / 2], times[times.size() * 9 / 10], limit_us);
    tell(times[times.size() / 2] <= limit_us, text);
}

#endif
