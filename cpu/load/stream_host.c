/* The variant `stream`: batches in host memory, as the trainer gets them with --feed load. */
#include <stdlib.h>

#include "load/stream_run.h"
#include "reader.h"

struct host {
    struct stream_run run; /* must be the first member */
    struct copier copier;
    uint8_t **buffers; /* for copies: one per thread, allocated at the first copy */
};

static size_t buffer_bytes(const struct host *host)
{
    return host->copier.stride * host->copier.load->given->batch;
}

static enum status host_open(struct stream_run *run)
{
    return set_stream_open(&run->request, &run->stream);
}

static enum status host_setup(const struct resources *resources, const void *input, void **state)
{
    static const struct stream_run_type type = {.open = host_open};
    const struct load *load = input;
    struct host *host = *state = calloc(1, sizeof *host);
    TRY(ALLOCATED(host, "out of memory"));
    host->copier =
        (struct copier){.load = load, .threads = resources->threads, .stride = reader_stride(load)};
    host->run.type = &type;
    return stream_run_open(&host->run, load, resources->threads);
}

static void host_teardown(void *state)
{
    struct host *host = state;
    stream_run_close(&host->run);
    copier_forget(&host->copier);
    for (int w = 0; host->buffers && w < host->copier.threads; w++)
        buffer_close(host->buffers[w], buffer_bytes(host));
    free(host->buffers);
    free(host);
}

static enum status host_ready(void *state, uint64_t number)
{
    struct host *host = state;
    if (host->copier.load->given->cache == LOAD_COLD)
        copier_forget(&host->copier); /* mapped pages cannot be evicted */
    return stream_run_ready(state, number);
}

/* Implements traits->copy(). The buffers are as large as those of the other variants. */
static enum status host_copy(void *state, double *bytes_per_s)
{
    struct host *host = state;
    if (!host->buffers) {
        host->buffers = calloc((size_t)host->copier.threads, sizeof *host->buffers);
        TRY(ALLOCATED(host->buffers, "out of memory"));
    }
    for (int w = 0; w < host->copier.threads; w++) {
        if (!host->buffers[w])
            host->buffers[w] = buffer_open(buffer_bytes(host));
        TRY(ALLOCATED(host->buffers[w], "out of memory for buffers of %zu bytes; lower --batch",
                      buffer_bytes(host)));
    }
    return copier_measure(&host->copier, host->buffers, bytes_per_s);
}

static const struct load_traits traits = {.shards = true,
                                          .files = true,
                                          .streams = true,
                                          .accepts = stream_run_accepts,
                                          .timed = "order+open+read+copy",
                                          .copy = host_copy,
                                          .verify_slots = stream_run_verify};

const struct variant variant_stream = {
    .platform = "cpu",
    .threaded = true,
    .traits = &traits,
    .setup = host_setup,
    .ready = host_ready,
    .run = stream_run_run,
    .fetch = stream_run_fetch,
    .teardown = host_teardown,
};
