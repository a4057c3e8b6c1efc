/* Tests rows of embeddings of libfdsl.so in device memory, as a user's program. Batches on the device must
 * have the bits, the labels and the numbers of batches in host memory: for every type, with and without
 * padding, for rows that are resident, streamed, or on the device already, shuffled or not, on several ranks.
 * Selections on the device must keep the rows that the CPU keeps. A replayed CUDA graph must deliver the
 * batches that follow. Memory must be flat. make check-gpu runs this program.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_lib.cuh"

#include <unistd.h>

#include "data/npy.h"
#include "ops/ops.h"

enum { ROWS = 5003, COLUMNS = 37 };

static std::string folder;

/* ---- The files ---- */

static void put_npy(const std::string &path, const char *type, const std::string &shape, const void *values,
                    size_t bytes)
{
    char header[NPY_HEADER_MAX];
    const size_t length = npy_header_make(header, type, shape.c_str());
    FILE *file = fopen(path.c_str(), "wb");
    if (!file || fwrite(header, 1, length, file) != length || fwrite(values, 1, bytes, file) != bytes ||
        fclose(file) != 0) {
        printf("FAILED  cannot write %s\n", path.c_str());
        exit(1);
    }
}

/* Writes x.npy with bad rows and duplicates, and y.npy with labels. */
static void prepare(void)
{
    std::vector<float> rows(ROWS * COLUMNS);
    std::vector<int64_t> labels(ROWS);
    const struct generated_rows generated = generated_begin(5, COLUMNS, DTYPE_F32, 0.1, 0.2);
    for (uint64_t i = 0; i < ROWS; i++) {
        generated_fill(&generated, i, &rows[i * COLUMNS]);
        labels[i] = static_cast<int64_t>(i * 5 % 11) - 1;
    }
    put_npy(folder + "/x.npy", "<f4", std::to_string(ROWS) + ", " + std::to_string(COLUMNS), rows.data(),
            rows.size() * sizeof(float));
    put_npy(folder + "/y.npy", "<i8", std::to_string(ROWS) + ",", labels.data(),
            labels.size() * sizeof(int64_t));
}

static struct fdsl_source *open_rows(uint32_t align)
{
    struct fdsl_rows_config config;
    struct fdsl_source *source;
    const std::string path = folder + "/x.npy", labels = folder + "/y.npy";
    good(fdsl_rows_config_init(&config, sizeof config));
    config.path = path.c_str();
    config.labels = labels.c_str();
    config.align = align;
    good(fdsl_rows_open(&config, &source));
    return source;
}

static struct fdsl_select_config select_config(int device)
{
    struct fdsl_select_config config;
    good(fdsl_select_config_init(&config, sizeof config));
    config.device = device;
    return config;
}

static struct fdsl_source *select_rows(struct fdsl_source *from, const struct fdsl_select_config &config)
{
    struct fdsl_source *source;
    good(fdsl_rows_select(from, &config, &source));
    return source;
}

static struct fdsl_source_info info_of(const struct fdsl_source *source)
{
    struct fdsl_source_info info = {};
    info.size = sizeof info;
    good(fdsl_source_describe(source, &info));
    return info;
}

/* ---- Batches ---- */

static struct fdsl_stream_config stream_config(int device)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 131;
    config.seed = 5;
    config.device = device;
    config.num_threads = 4;
    return config;
}

struct taken {
    uint64_t epoch, step;
    std::vector<uint8_t> rows;
    std::vector<int64_t> labels, numbers;
    bool operator==(const struct taken &other) const
    {
        return epoch == other.epoch && step == other.step && rows == other.rows && labels == other.labels &&
               numbers == other.numbers;
    }
};

static std::vector<uint8_t> to_host(const void *memory, size_t bytes)
{
    std::vector<uint8_t> copy(bytes);
    must(cudaMemcpy(copy.data(), memory, bytes, cudaMemcpyDefault));
    return copy;
}

static std::vector<int64_t> words(const struct fdsl_tensor &tensor)
{
    const std::vector<uint8_t> bytes = to_host(tensor.data, (size_t)tensor.shape[0] * sizeof(int64_t));
    std::vector<int64_t> result(bytes.size() / sizeof(int64_t));
    if (!bytes.empty())
        memcpy(result.data(), bytes.data(), bytes.size());
    return result;
}

static struct fdsl_tensor tensor_of(struct fdsl_batch *batch, enum fdsl_field field)
{
    struct fdsl_tensor tensor;
    good(fdsl_batch_tensor(batch, field, &tensor));
    return tensor;
}

/* Takes batches with next() for two epochs, in a stream whose consumer overwrites what it has read. */
static std::vector<struct taken> take(struct fdsl_stream *stream, int device)
{
    std::vector<struct taken> all;
    cudaStream_t on = NULL;
    if (device >= 0)
        must(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    for (int epochs = 0; epochs < 2;) {
        struct fdsl_batch *batch;
        struct fdsl_batch_info info = {};
        const enum fdsl_status status = fdsl_stream_next(stream, on, &batch);
        if (status == FDSL_END) {
            epochs++;
            continue;
        }
        good(status);
        info.size = sizeof info;
        good(fdsl_batch_describe(batch, &info));
        const struct fdsl_tensor rows = tensor_of(batch, FDSL_ROWS), labels = tensor_of(batch, FDSL_LABELS);
        const size_t bytes = (size_t)(rows.shape[0] * rows.shape[1]) * rows.bits / 8;
        if (rows.device_type != (device >= 0 ? 2 : 1) || labels.device_type != rows.device_type) {
            printf("FAILED  a batch is not where it should be\n");
            exit(1);
        }
        if (device >= 0)
            must(cudaStreamSynchronize(on));
        all.push_back({info.epoch, info.step, to_host(rows.data, bytes), words(labels),
                       words(tensor_of(batch, FDSL_NUMBERS))});
        if (device >= 0) {
            must(cudaMemsetAsync(rows.data, 0xEE, bytes, on));
            must(cudaMemsetAsync(labels.data, 0xEE, (size_t)labels.shape[0] * sizeof(int64_t), on));
        }
        good(fdsl_batch_release(batch, on));
    }
    if (device >= 0)
        must(cudaStreamDestroy(on));
    return all;
}

static void compare(struct fdsl_source *host_source, struct fdsl_source *source,
                    struct fdsl_stream_config config, const std::string &what)
{
    struct fdsl_stream *stream = open_stream(source, config);
    const bool warned = strstr(fdsl_warnings(), "tensor cores") != NULL;
    if (warned != (info_of(source).width % 8 != 0))
        tell(false, what + ": the warning about tensor cores");
    const std::vector<struct taken> given = take(stream, config.device);
    config.device = FDSL_CPU;
    config.resident = 0;
    struct fdsl_stream *host = open_stream(host_source, config);
    const std::vector<struct taken> wanted = take(host, FDSL_CPU);
    const bool same_state = same_states(stream, host);
    fdsl_stream_close(stream);
    fdsl_stream_close(host);
    tell(given == wanted && !given.empty() && same_state, what + (same_state ? "" : ": another state"));
}

static void compare_all(int device)
{
    static const char *const types[] = {"f32", "f16", "bf16"};
    for (uint32_t align = 1; align <= 16; align += 15) {
        struct fdsl_source *source = open_rows(align);
        struct fdsl_source *there = select_rows(source, select_config(device));
        for (int type = 0; type < 3; type++)
            for (int where = 0; where < 3; where++) /* streamed, resident, on the device already */
                for (int shuffle = 0; shuffle < 2; shuffle++) {
                    struct fdsl_stream_config config = stream_config(device);
                    config.dtype = types[type];
                    config.resident = where == 1;
                    config.shuffle = shuffle;
                    config.drop_last = type == 1;
                    config.world_size = type == 2 ? 3 : 1;
                    config.rank = type == 2 ? 1 : 0;
                    compare(source, where == 2 ? there : source, config,
                            std::string(types[type]) + ", align " + std::to_string(align) +
                                (where == 0   ? ", streamed"
                                 : where == 1 ? ", resident"
                                              : ", on the device") +
                                (shuffle ? ", shuffled" : ""));
                }
        fdsl_source_close(there);
        fdsl_source_close(source);
    }
}

/* ---- Selections ---- */

/* The rows that the device keeps are those of the CPU: the hash of a source depends on their numbers. */
static void compare_selections(int device)
{
    static const char *const names[] = {
        "validate", "dedup", "validate and dedup",  "validate, then dedup", "validate, and convert",
        "sample",   "keep",  "keep, then validate", "validate, then keep",  "validate, then sample"};
    std::vector<uint8_t> keep(ROWS);
    for (uint32_t i = 0; i < ROWS; i++)
        keep[i] = i % 3 != 0;
    struct fdsl_source *source = open_rows(8), *there = select_rows(source, select_config(device));
    for (int c = 0; c < 10; c++)
        for (int from = 0; from < 2; from++) {
            struct fdsl_source *chosen[2];
            for (int on_device = 0; on_device < 2; on_device++) {
                struct fdsl_select_config config = select_config(on_device ? device : FDSL_CPU);
                config.validate = c != 1 && c != 5 && c != 6 && c != 7;
                config.norm_min = config.validate ? 0.1 : 0;
                config.norm_max = config.validate ? 100 : config.norm_max;
                config.dedup = c == 1 || c == 2;
                config.dtype = c == 4 ? "f16" : "auto";
                config.sample = c == 5 ? 777 : 0;
                config.keep = c == 6 || c == 7 ? keep.data() : NULL;
                config.keep_count = config.keep ? ROWS : 0;
                struct fdsl_source *first = select_rows(on_device && from ? there : source, config);
                chosen[on_device] = first;
                if (c != 3 && c < 7)
                    continue;
                config = select_config(config.device);
                config.dedup = c == 3;
                config.validate = c == 7;
                config.norm_min = c == 7 ? 0.1 : 0;
                config.keep = c == 8 ? keep.data() : NULL;
                config.keep_count = c == 8 ? info_of(first).samples : 0;
                config.sample = c == 9 ? 777 : 0;
                chosen[on_device] = select_rows(first, config);
                fdsl_source_close(first);
            }
            const struct fdsl_source_info host = info_of(chosen[0]), own = info_of(chosen[1]);
            const bool same = host.hash == own.hash && host.samples == own.samples &&
                              host.invalid == own.invalid && host.duplicates == own.duplicates &&
                              host.filtered == own.filtered && host.unsampled == own.unsampled;
            const std::string what =
                std::string(names[c]) + (from ? ", from rows on the device" : ", from files");
            tell(same && own.samples < ROWS, what);
            struct fdsl_stream_config config = stream_config(device);
            compare(chosen[0], chosen[1], config, what + ": batches");
            fdsl_source_close(chosen[0]);
            fdsl_source_close(chosen[1]);
        }
    fdsl_source_close(there);
    fdsl_source_close(source);
}

/* ---- fill() and graphs ---- */

static void compare_fill(int device, int shuffle)
{
    struct fdsl_source *source = open_rows(8);
    struct fdsl_stream_config config = stream_config(device);
    config.shuffle = shuffle;
    config.resident = 1;
    config.drop_last = 1;
    struct fdsl_stream *stream = open_stream(source, config);
    config.device = FDSL_CPU;
    config.resident = 0;
    struct fdsl_stream *host = open_stream(source, config);
    const size_t bytes = 131 * 40 * sizeof(float);
    std::vector<uint8_t> wanted(bytes);
    std::vector<int64_t> labels(131);
    uint8_t *memory;
    int64_t *own_labels;
    cudaStream_t on;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    uint32_t count, own;
    bool same = true;
    must(cudaMalloc(&memory, bytes));
    must(cudaMalloc(&own_labels, 131 * sizeof *own_labels));
    must(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    for (int i = 0; i < 30; i++) { /* an epoch has 38 steps */
        good(fdsl_stream_fill(host, wanted.data(), labels.data(), &count, NULL));
        good(fdsl_stream_fill(stream, memory, i % 5 ? own_labels : NULL, &own, on));
        must(cudaStreamSynchronize(on));
        same &= own == count && to_host(memory, bytes) == wanted;
        same &= i % 5 == 0 || memcmp(to_host(own_labels, sizeof(int64_t) * 131).data(), labels.data(),
                                     sizeof(int64_t) * 131) == 0;
    }
    tell(same, "fill()");
    must(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    good(fdsl_stream_fill(stream, memory, own_labels, &own, on));
    must(cudaStreamEndCapture(on, &graph));
    must(cudaGraphInstantiate(&replay, graph, 0));
    same = own == 131;
    for (int i = 0; i < 60; i++) { /* over the end of an epoch */
        must(cudaGraphLaunch(replay, on));
        must(cudaStreamSynchronize(on));
        enum fdsl_status status = fdsl_stream_fill(host, wanted.data(), labels.data(), &count, NULL);
        if (status == FDSL_END)
            status = fdsl_stream_fill(host, wanted.data(), labels.data(), &count, NULL);
        good(status);
        same &= to_host(memory, bytes) == wanted;
        same &= memcmp(to_host(own_labels, sizeof(int64_t) * 131).data(), labels.data(),
                       sizeof(int64_t) * 131) == 0;
    }
    tell(same, "replays of a captured fill()");
    tell(same_states(stream, host), "the state after replays");
    good(fdsl_stream_seek(stream, 3, 7));
    good(fdsl_stream_seek(host, 3, 7));
    must(cudaGraphLaunch(replay, on));
    must(cudaStreamSynchronize(on));
    good(fdsl_stream_fill(host, wanted.data(), labels.data(), &count, NULL));
    tell(to_host(memory, bytes) == wanted, "a replay after a seek");
    must(cudaGraphExecDestroy(replay));
    must(cudaGraphDestroy(graph));
    fdsl_stream_close(stream);
    fdsl_stream_close(host);

    /* refused captures, and memory of the host */
    config = stream_config(device);
    config.resident = 1;
    stream = open_stream(source, config); /* without drop_last, the last step is smaller */
    must(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    const enum fdsl_status captured = fdsl_stream_fill(stream, memory, NULL, &own, on);
    struct fdsl_batch *batch;
    const enum fdsl_status next = fdsl_stream_next(stream, on, &batch);
    must(cudaStreamEndCapture(on, &graph));
    must(cudaGraphDestroy(graph));
    tell(captured == FDSL_INVALID && next == FDSL_INVALID, "captures that are refused");
    tell(fdsl_stream_fill(stream, wanted.data(), NULL, &own, on) == FDSL_INVALID &&
             strncmp(fdsl_error(), "images: ", 8) == 0,
         "memory of the host is refused");
    tell(fdsl_stream_fill(stream, memory + 4, NULL, &own, on) == FDSL_INVALID, "memory that is not aligned");

    time_fill("rows", stream, memory, NULL, on, 10);
    time_fill("rows and labels", stream, memory, own_labels, on, 10);
    fdsl_stream_close(stream);
    must(cudaStreamDestroy(on));
    must(cudaFree(memory));
    must(cudaFree(own_labels));
    fdsl_source_close(source);
}

/* While one thread captures in global mode, as PyTorch does, another one replays a graph, and opens, fills,
 * saves, moves and closes streams. The capture must survive. */
static void survive_captures(int device)
{
    struct fdsl_source *source = open_rows(8);
    struct fdsl_stream_config config = stream_config(device);
    config.drop_last = 1;
    struct fdsl_stream *stream = open_stream(source, config);
    uint8_t *memory;
    int64_t *labels;
    cudaStream_t on, captured;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replay;
    uint32_t count;
    must(cudaMalloc(&memory, 131 * 40 * sizeof(float)));
    must(cudaMalloc(&labels, 131 * sizeof *labels));
    must(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    must(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    good(fdsl_stream_fill(stream, memory, labels, &count, on));
    must(cudaStreamEndCapture(on, &graph));
    must(cudaGraphInstantiate(&replay, graph, 0));
    must(cudaGraphDestroy(graph));
    graph = NULL;
    struct fdsl_state state = {};
    must(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    std::thread([&] {
        for (int i = 0; i < 3; i++)
            must(cudaGraphLaunch(replay, on));
        state = saved(stream);
        good(fdsl_stream_seek(stream, 2, 1));
        good(fdsl_stream_fill(stream, memory, labels, &count, on));
        fdsl_stream_close(stream);
        struct fdsl_stream *other = open_stream(source, config);
        struct fdsl_batch *batch;
        good(fdsl_stream_next(other, on, &batch));
        good(fdsl_batch_release(batch, on));
        fdsl_stream_close(other);
    }).join();
    const cudaError_t error = cudaStreamEndCapture(captured, &graph);
    (void)cudaGetLastError();
    tell(error == cudaSuccess && state.sample == 3 * 131 && state.epoch == 0,
         std::string("a capture survives work of another thread: ") + cudaGetErrorString(error));
    if (graph)
        must(cudaGraphDestroy(graph));
    must(cudaGraphExecDestroy(replay));
    must(cudaStreamDestroy(on));
    must(cudaStreamDestroy(captured));
    must(cudaFree(memory));
    must(cudaFree(labels));
    fdsl_source_close(source);
}

/* ---- Lifetime ---- */

static void check_memory(int device)
{
    size_t before = 0, after = 0, total;
    for (int i = 0; i < 60; i++) {
        struct fdsl_source *source = open_rows(8);
        struct fdsl_select_config config = select_config(device);
        config.validate = 1;
        struct fdsl_source *chosen = select_rows(source, config);
        fdsl_source_close(source);
        struct fdsl_stream *stream = open_stream(chosen, stream_config(device));
        struct fdsl_batch *batch;
        good(fdsl_stream_next(stream, NULL, &batch));
        fdsl_source_close(chosen);
        fdsl_stream_close(stream); /* the batch stays valid */
        (void)to_host(tensor_of(batch, FDSL_ROWS).data, 131 * 40 * sizeof(float));
        good(fdsl_batch_release(batch, NULL));
        must(cudaMemGetInfo(i == 9 ? &before : &after, &total));
    }
    tell(after >= before, "memory of the device after 60 openings");
}

int main(void)
{
    char name[] = "/tmp/fdsl-gpu-rows-XXXXXX";
    if (fdsl_cuda_devices() == 0) {
        printf("no GPU: %s\n", fdsl_error());
        return 4;
    }
    if (!mkdtemp(name))
        return 3;
    folder = name;
    must(cudaSetDevice(0));
    prepare();
    compare_all(0);
    compare_selections(0);
    compare_fill(0, 0);
    compare_fill(0, 1);
    survive_captures(0);
    check_memory(0);
    (void)remove((folder + "/x.npy").c_str());
    (void)remove((folder + "/y.npy").c_str());
    (void)rmdir(name);
    printf("%d failures\n", failures);
    return failures ? 3 : 0;
}
