/* Tests batches of libfdsl.so in device memory (docs/library.md), as a user's program. Batches that CPU
 * threads decode must have the bits of batches in host memory, for every type, layout and way to take them;
 * those that nvJPEG decodes may differ by its tolerance. Generated images must have the same bits on both
 * sides, and a replayed CUDA graph must deliver the batches that a program without a graph gets. States,
 * seeks, lifetimes, wrong arguments, memory and the host time of a call are tested, too. make check-gpu runs
 * this program.
 *
 * compute-sanitizer does not detect races between CUDA streams, so consumers take long, and overwrite what
 * they have read. Planted faults show that the test detects races, wrong samples and changed values.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_files.cuh"
#include "gpu_lib.cuh"

#include <functional>

#include <sys/wait.h>
#include <unistd.h>

#include "data/random_draws.h"
#include "data/set_stream.h"
#include "machine/device.h"

static double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/* ---- Streams ---- */

static struct fdsl_source *open_source(const std::string &path)
{
    struct fdsl_source_config config;
    struct fdsl_source *source;
    good(fdsl_source_config_init(&config, sizeof config));
    config.path = path.c_str();
    good(fdsl_source_open(&config, &source));
    return source;
}

static struct fdsl_stream_config stream_config(void)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 37;
    config.seed = 5;
    config.lanes = 7;
    config.shuffle_buffer = 100;
    config.out_res = 96;
    config.fit = "random-resized-crop";
    config.on_error = "mask";
    config.num_threads = 6;
    return config;
}

static struct fdsl_stream_info info_of(const struct fdsl_stream *stream)
{
    struct fdsl_stream_info info = {};
    info.size = sizeof info;
    good(fdsl_stream_describe(stream, &info));
    return info;
}

/* A batch that was copied to the host. */
struct taken {
    uint64_t epoch, step;
    std::vector<uint8_t> images;
    std::vector<int64_t> labels, numbers;
    std::vector<uint8_t> targets; /* the bytes of floats; empty: there are none */
    bool operator==(const struct taken &other) const
    {
        return images == other.images && labels == other.labels && targets == other.targets &&
               (numbers.empty() || other.numbers.empty() || numbers == other.numbers);
    }
};

/* How a consumer takes batches. The last two are planted faults. */
enum way { NEXT, FILL, FILL_AND_NEXT, RELEASED_EARLY, NOT_WAITED };

/* Room for the copies of batches, and the CUDA streams of a consumer. */
struct consumer {
    int device;
    bool slow; /* each step takes 5 ms; otherwise most take no time, others up to 2 ms */
    cudaStream_t steps, hasty;
    std::vector<uint8_t *> pinned; /* per batch: images, then labels */
    std::vector<struct taken> batches;
    std::vector<uint32_t> counts;
    struct fdsl_stream_info info;
    uint8_t *images; /* of fill() */
    int64_t *labels;
    float *targets; /* NULL: there are none */
};

/* Returns the size of the targets of `count` images. */
static size_t target_bytes(const struct consumer *self, uint32_t count)
{
    return (size_t)count * self->info.classes * sizeof(float);
}

static void open_consumer(struct consumer *self, const struct fdsl_stream *stream, int device)
{
    *self = {};
    self->device = device;
    self->info = info_of(stream);
    if (device < 0) {
        self->images = static_cast<uint8_t *>(malloc(self->info.capacity * self->info.image_bytes));
        self->labels = static_cast<int64_t *>(malloc(self->info.capacity * sizeof *self->labels));
        if (self->info.classes)
            self->targets = static_cast<float *>(malloc(target_bytes(self, self->info.capacity)));
        return;
    }
    must(cudaSetDevice(device));
    must(cudaStreamCreateWithFlags(&self->steps, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&self->hasty, cudaStreamNonBlocking));
    must(cudaMalloc(&self->images, self->info.capacity * self->info.image_bytes));
    must(cudaMalloc(&self->labels, self->info.capacity * sizeof *self->labels));
    if (self->info.classes)
        must(cudaMalloc(&self->targets, target_bytes(self, self->info.capacity)));
}

/* Returns the offset of the labels in the copy of a batch. */
static size_t labels_at(const struct consumer *self)
{
    return (self->info.capacity * self->info.image_bytes + 7) / 8 * 8;
}

/* Returns the offset of the targets in the copy of a batch. */
static size_t targets_at(const struct consumer *self)
{
    return labels_at(self) + self->info.capacity * sizeof *self->labels;
}

/* Waits for the consumer's work, and returns the batches. */
static std::vector<struct taken> close_consumer(struct consumer *self)
{
    if (self->device < 0) {
        free(self->images);
        free(self->labels);
        free(self->targets);
        return self->batches;
    }
    must(cudaSetDevice(self->device));
    must(cudaStreamSynchronize(self->steps));
    must(cudaStreamSynchronize(self->hasty));
    for (size_t i = 0; i < self->batches.size(); i++) {
        struct taken &batch = self->batches[i];
        const size_t bytes = self->counts[i] * self->info.image_bytes;
        const int64_t *labels = reinterpret_cast<int64_t *>(self->pinned[i] + labels_at(self));
        batch.images.assign(self->pinned[i], self->pinned[i] + bytes);
        batch.labels.assign(labels, labels + self->counts[i]);
        const uint8_t *targets = self->pinned[i] + targets_at(self);
        batch.targets.assign(targets, targets + target_bytes(self, self->counts[i]));
        must(cudaFreeHost(self->pinned[i]));
    }
    must(cudaFree(self->images));
    must(cudaFree(self->labels));
    must(cudaFree(self->targets));
    must(cudaStreamDestroy(self->steps));
    must(cudaStreamDestroy(self->hasty));
    return self->batches;
}

/* Enqueues a step: it takes a while, copies the batch to the host, and overwrites it. */
static void enqueue_step(struct consumer *self, void *images, int64_t *labels, float *targets, uint32_t count,
                         cudaStream_t on)
{
    const size_t room = labels_at(self), at = self->pinned.size();
    uint8_t *copy;
    must(cudaMallocHost(&copy, targets_at(self) + target_bytes(self, self->info.capacity)));
    self->pinned.push_back(copy);
    self->counts.push_back(count);
    self->batches.push_back({});
    spin_kernel<<<1, 1, 0, self->steps>>>(self->slow ? 5000000
                                          : drawn(4, (uint32_t)at, 0) % 3
                                              ? 0
                                              : drawn(4, (uint32_t)at, 1) % 2000000);
    must(cudaMemcpyAsync(copy, images, count * self->info.image_bytes, cudaMemcpyDeviceToHost, on));
    must(cudaMemcpyAsync(copy + room, labels, count * sizeof *labels, cudaMemcpyDeviceToHost, on));
    if (targets)
        must(cudaMemcpyAsync(copy + targets_at(self), targets, target_bytes(self, count),
                             cudaMemcpyDeviceToHost, on));
    must(cudaMemsetAsync(images, 0xaa, count * self->info.image_bytes, on));
    must(cudaMemsetAsync(labels, 0xaa, count * sizeof *labels, on));
    if (targets)
        must(cudaMemsetAsync(targets, 0xaa, target_bytes(self, count), on));
    must(cudaGetLastError());
}

static void keep_on_host(struct consumer *self, const void *images, const int64_t *labels,
                         const float *targets, uint32_t count)
{
    const uint8_t *bytes = static_cast<const uint8_t *>(images);
    const uint8_t *weights = reinterpret_cast<const uint8_t *>(targets);
    self->batches.push_back({});
    self->batches.back().images.assign(bytes, bytes + count * self->info.image_bytes);
    self->batches.back().labels.assign(labels, labels + count);
    self->batches.back().targets.assign(weights, weights + target_bytes(self, count));
}

static enum fdsl_status take_fill(struct consumer *self, struct fdsl_stream *stream)
{
    uint32_t count;
    const enum fdsl_status status =
        fdsl_stream_fill_targets(stream, self->images, self->labels, self->targets, &count, self->steps);
    if (status == FDSL_OK && self->device < 0)
        keep_on_host(self, self->images, self->labels, self->targets, count);
    else if (status == FDSL_OK)
        enqueue_step(self, self->images, self->labels, self->targets, count, self->steps);
    return status;
}

static enum fdsl_status take_next(struct consumer *self, struct fdsl_stream *stream, enum way way)
{
    struct fdsl_batch *batch;
    struct fdsl_batch_info info = {};
    struct fdsl_tensor images, labels, numbers, targets = {};
    const bool on_device = self->device >= 0;
    const cudaStream_t waits = way == NOT_WAITED ? self->hasty : self->steps;
    const enum fdsl_status status = fdsl_stream_next(stream, self->steps, &batch);
    if (status != FDSL_OK)
        return status;
    info.size = sizeof info;
    good(fdsl_batch_describe(batch, &info));
    good(fdsl_batch_tensor(batch, FDSL_IMAGES, &images));
    good(fdsl_batch_tensor(batch, FDSL_LABELS, &labels));
    good(fdsl_batch_tensor(batch, FDSL_NUMBERS, &numbers));
    if (self->info.classes)
        good(fdsl_batch_tensor(batch, FDSL_TARGETS, &targets));
    float *const weights = static_cast<float *>(targets.data);
    const bool right = images.device_type == (on_device ? 2 : 1) &&
                       labels.device_type == images.device_type &&
                       images.device_id == (on_device ? self->device : 0) && numbers.device_type == 1 &&
                       (uintptr_t)images.data % 256 == 0 && (uintptr_t)labels.data % 256 == 0 &&
                       images.shape[0] == info.count && labels.shape[0] == info.count;
    if (!right)
        tell(false, "the tensors of a batch are described");
    if (way == RELEASED_EARLY)
        good(fdsl_batch_release(batch, self->hasty));
    if (on_device)
        enqueue_step(self, images.data, static_cast<int64_t *>(labels.data), weights, info.count, waits);
    else
        keep_on_host(self, images.data, static_cast<int64_t *>(labels.data), weights, info.count);
    struct taken &taken = self->batches.back();
    const int64_t *listed = static_cast<int64_t *>(numbers.data);
    taken.epoch = info.epoch;
    taken.step = info.step;
    taken.numbers.assign(listed, listed + info.count);
    if (way != RELEASED_EARLY)
        good(fdsl_batch_release(batch, self->steps));
    return FDSL_OK;
}

/* Takes the batches of some epochs. */
static std::vector<struct taken> take_epochs(struct fdsl_stream *stream, int device, enum way way, int epochs)
{
    struct consumer consumer;
    open_consumer(&consumer, stream, device);
    consumer.slow = way == RELEASED_EARLY || way == NOT_WAITED;
    for (int epoch = 0; epoch < epochs;) {
        const bool fills = way == FILL || (way == FILL_AND_NEXT && consumer.batches.size() % 3 == 1);
        const enum fdsl_status status =
            fills ? take_fill(&consumer, stream) : take_next(&consumer, stream, way);
        if (status != FDSL_END)
            good(status);
        epoch += status == FDSL_END;
    }
    return close_consumer(&consumer);
}

static std::vector<struct taken> take_all(struct fdsl_source *source, struct fdsl_stream_config config,
                                          int device, enum way way, int epochs)
{
    config.device = device;
    if (device < 0) { /* the defaults */
        config.decoder = "auto";
        config.device_share = -1;
    }
    struct fdsl_stream *stream = open_stream(source, config);
    const std::vector<struct taken> batches = take_epochs(stream, device, way, epochs);
    fdsl_stream_close(stream);
    return batches;
}

/* ---- The same batches as in host memory ---- */

static const struct files some = {"some", 240, 64, 150, 20};

static const struct {
    const char *dtype, *layout, *fit;
    uint32_t res, channels;
    int flip;
    bool normalised;
} formats[] = {
    {"u8", "nchw", "random-resized-crop", 96, 3, 0, false},
    {"u8", "nhwc", "random-resized-crop", 96, 3, 0, false},
    {"u8", "nchw", "resize", 57, 3, 1, false},
    {"u8", "nhwc", "crop", 33, 1, 1, false},
    {"f16", "nchw", "random-resized-crop", 96, 3, 1, true},
    {"f16", "nhwc", "resize", 57, 3, 0, true},
    {"bf16", "nchw", "center-crop", 64, 3, 1, true},
    {"bf16", "nhwc", "random-resized-crop", 60, 3, 1, true},
    {"f32", "nchw", "random-resized-crop", 31, 3, 1, true},
    {"f32", "nhwc", "resize", 128, 3, 1, true},
    {"f32", "nchw", "resize", 96, 1, 0, true},
    {"f16", "nhwc", "resize", 64, 1, 1, false},
};

static struct fdsl_stream_config format_config(size_t i)
{
    struct fdsl_stream_config config = stream_config();
    config.dtype = formats[i].dtype;
    config.layout = formats[i].layout;
    config.fit = formats[i].fit;
    config.out_res = formats[i].res;
    config.channels = formats[i].channels;
    config.flip = formats[i].flip;
    for (uint32_t c = 0; formats[i].normalised && c < config.channels; c++) {
        config.mean[c] = 0.485 - 0.04 * c;
        config.std[c] = 0.229 - 0.002 * c;
    }
    return config;
}

static void compare_formats(struct fdsl_source *source)
{
    static const char *const ways[] = {"next", "fill", "next and fill"};
    for (size_t i = 0; i < COUNT_OF(formats); i++) {
        struct fdsl_stream_config config = format_config(i);
        config.decoder = "cpu";
        const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 3);
        std::string wrong;
        const bool crops = strstr(config.fit, "crop") && !strstr(config.fit, "center");
        bool masked = false;
        for (enum way way : {NEXT, FILL, FILL_AND_NEXT}) {
            /* none, all that fit, or some of the samples stay in device memory */
            config.resident_device_bytes = way == NEXT   ? 0
                                           : way != FILL ? 300000
                                           : crops       ? 64 << 20
                                                         : UINT64_MAX;
            if (!(take_all(source, config, 0, way, 3) == right))
                wrong += std::string(" ") + ways[way];
        }
        for (const struct taken &batch : right)
            masked |= std::count(batch.labels.begin(), batch.labels.end(), -1) > 0;
        tell(wrong.empty() && masked,
             std::string("batches are those in host memory: ") + formats[i].dtype + " " + formats[i].layout +
                 " " + formats[i].fit + " to " + std::to_string(formats[i].res) + ", " +
                 std::to_string(formats[i].channels) + " channels" + (formats[i].flip ? ", flip" : "") +
                 (masked ? "" : ", nothing is masked") + (wrong.empty() ? "" : "; not with" + wrong));
    }
}

/* ---- Erasing and mixtures ---- */

static const struct {
    size_t format;
    double rand_augment, erasing, mixup, cutmix;
    uint32_t ranks;
    bool colours;  /* brightness and contrast, of colour images also saturation, hue and grayscale */
    uint32_t blur; /* side of the kernel; 0: none */
} changes[] = {
    {4, -1, 0.6, 0, 0, 1},         {5, -1, 0.6, 0, 0, 2},        {8, 9, 0.6, 0, 0, 1},
    {0, -1, 0, 0.8, 0, 1},         {1, -1, 0, 0, 1, 2},          {2, -1, 0, 0.8, 1, 3},
    {3, -1, 0, 0.8, 1, 1},         {4, 9, 0.5, 0.8, 1, 2},       {6, -1, 0.5, 1, 0, 1},
    {7, -1, 0.5, 0, 1, 3},         {8, -1, 0.5, 0.8, 1, 2},      {9, -1, 0, 0.8, 0, 1},
    {10, -1, 0.5, 0.8, 1, 1},      {0, -1, 0, 0, 0, 1, true},    {1, -1, 0, 0, 0, 2, true, 5},
    {2, -1, 0, 0, 0, 1, false, 3}, {3, 9, 0, 0, 0, 1, true, 7},  {4, -1, 0.5, 0.8, 1, 3, true, 9},
    {5, -1, 0, 0, 0, 1, true},     {6, -1, 0, 0, 0, 1, true, 3}, {7, 9, 0, 0, 0, 2, true},
    {8, -1, 0, 0, 0, 1, true, 5},  {9, -1, 0, 0.8, 0, 2, true},  {10, -1, 0, 0, 0, 1, true, 3},
};

/* Images that are erased, mixed and changed in colour on the device have the bits of those in host memory, on
 * all ranks. */
static void compare_changes(struct fdsl_source *source)
{
    for (const auto &change : changes) {
        struct fdsl_stream_config config = format_config(change.format);
        std::string wrong;
        config.decoder = "cpu";
        config.rand_augment = change.rand_augment;
        config.erasing = change.erasing;
        config.mixup = change.mixup;
        config.cutmix = change.cutmix;
        if (change.colours) {
            config.brightness[1] = config.contrast[1] = 1.8;
            config.contrast[0] = 0.3;
            config.color_jitter_p = 0.8;
        }
        if (change.colours && formats[change.format].channels == 3) {
            config.saturation[1] = 3;
            config.hue[0] = -0.3;
            config.grayscale_p = 0.2;
        }
        config.blur_p = change.blur ? 0.6 : 0;
        config.blur_kernel = change.blur ? change.blur : config.blur_kernel;
        config.classes = change.mixup + change.cutmix > 0 ? 64 : 0;
        config.world_size = change.ranks;
        config.batch_size = 37 / change.ranks;
        std::vector<struct taken> plain;
        for (config.rank = 0; config.rank < change.ranks; config.rank++) {
            const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 2);
            for (enum way way : {NEXT, FILL, FILL_AND_NEXT}) {
                struct fdsl_stream_config kept = config;
                kept.resident_device_bytes = config.rand_augment < 0 && way != NEXT ? 500000 : 0;
                if (!(take_all(source, kept, 0, way, 2) == right))
                    wrong += " way " + std::to_string(way) + " of rank " + std::to_string(config.rank);
            }
            struct fdsl_stream_config without = config;
            without.erasing = without.mixup = without.cutmix = without.grayscale_p = without.blur_p = 0;
            without.brightness[1] = without.contrast[0] = without.contrast[1] = without.saturation[1] = 1;
            without.hue[0] = 0;
            without.color_jitter_p = 1;
            without.classes = 0;
            plain = take_all(source, without, FDSL_CPU, NEXT, 2);
            bool differs = false; /* the changes must change something */
            for (size_t i = 0; i < plain.size(); i++)
                differs = differs || plain[i].images != right[i].images;
            if (!differs)
                wrong += " nothing changes";
        }
        tell(wrong.empty(),
             std::string("changes are those in host memory: ") + formats[change.format].dtype + " " +
                 formats[change.format].layout + ", erasing " + std::to_string(change.erasing) + ", mixup " +
                 std::to_string(change.mixup) + ", cutmix " + std::to_string(change.cutmix) +
                 (change.colours ? ", colours" : "") + ", blur " + std::to_string(change.blur) + ", " +
                 std::to_string(change.ranks) + " ranks" + (wrong.empty() ? "" : "; not" + wrong));
    }
}

/* Faults that comparisons must detect. */
static void plant_faults(struct fdsl_source *source)
{
    struct fdsl_stream_config config = format_config(0);
    config.decoder = "cpu";
    const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 2);
    std::vector<struct taken> other = right;
    other[3].images[77] ^= 1;
    const bool value = !(other == right);
    other = right;
    std::swap(other[1], other[2]);
    const bool order = !(other == right);
    bool early = false, unwaited = false;
    for (int i = 0; i < 4 && !(early && unwaited); i++) {
        early = early || !(take_all(source, config, 0, RELEASED_EARLY, 2) == right);
        unwaited = unwaited || !(take_all(source, config, 0, NOT_WAITED, 2) == right);
    }
    tell(value && order && early && unwaited,
         std::string("planted faults are detected:") + (value ? " value" : "") + (order ? " order" : "") +
             (early ? " released-early" : "") + (unwaited ? " not-waited" : ""));
}

/* nvJPEG's decoders, with the tolerance of bytes. The same decoder gives the same bits in every run. */
static void compare_decoders(struct fdsl_source *source)
{
    static const struct {
        const char *name;
        int tolerance;
    } decoders[] = {{"hardware", 1}, {"hybrid", 3}, {"auto", 3}};
    for (const auto &decoder : decoders)
        for (double share : {1.0, -1.0}) {
            struct fdsl_stream_config config = stream_config();
            config.flip = 1;
            const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 1);
            config.decoder = decoder.name;
            config.device_share = share;
            config.device = 0;
            struct fdsl_stream *stream;
            const enum fdsl_status status = fdsl_stream_open(source, &config, &stream);
            fdsl_stream_close(stream);
            if (status == FDSL_UNAVAILABLE) {
                printf("ok      %s is not available: %s\n", decoder.name, fdsl_error());
                break;
            }
            good(status);
            const std::vector<struct taken> found = take_all(source, config, 0, FILL, 1),
                                            again = take_all(source, config, 0, NEXT, 1);
            int largest = 0;
            uint64_t differ = 0, labels = found.size() != right.size();
            for (size_t i = 0; i < right.size() && labels == 0; i++) {
                labels += found[i].labels != right[i].labels;
                for (size_t j = 0; j < right[i].images.size(); j++) {
                    const int difference = abs(found[i].images[j] - right[i].images[j]);
                    largest = std::max(largest, difference);
                    differ += difference > 0;
                }
            }
            tell(largest <= decoder.tolerance && labels == 0 && found == again && differ > 0,
                 std::string("decoder ") + decoder.name + ", share " + std::to_string(share) +
                     ": largest difference " + std::to_string(largest) + ", " + std::to_string(differ) +
                     " bytes differ, " + std::to_string(labels) + " wrong labels");
        }
}

/* ---- Positions and lifetimes ---- */

/* A state moves between the host and the device, in both directions. */
static void move_states(struct fdsl_source *source)
{
    struct fdsl_stream_config config = format_config(4);
    config.decoder = "cpu";
    const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 2);
    bool well = true;
    for (int from : {FDSL_CPU, 0})
        for (size_t before : {size_t(0), size_t(3), right.size() / 2 - 1, right.size() / 2}) {
            struct fdsl_stream *streams[2];
            struct consumer consumers[2];
            for (int i = 0; i < 2; i++) {
                config.device = i == 0 ? from : from < 0 ? 0 : FDSL_CPU;
                streams[i] = open_stream(source, config);
                open_consumer(&consumers[i], streams[i], config.device);
            }
            for (size_t i = 0; i < before;)
                i += take_fill(&consumers[0], streams[0]) == FDSL_OK;
            const struct fdsl_state state = saved(streams[0]);
            good(fdsl_stream_load(streams[1], &state));
            for (size_t i = before; i < right.size();)
                i += take_fill(&consumers[1], streams[1]) == FDSL_OK;
            close_consumer(&consumers[0]);
            const std::vector<struct taken> found = close_consumer(&consumers[1]);
            well = well &&
                   std::equal(found.begin(), found.end(), right.begin() + (ptrdiff_t)before, right.end());
            fdsl_stream_close(streams[0]);
            fdsl_stream_close(streams[1]);
        }
    tell(well, "states move between the host and the device");
}

/* Batches stay as they are during seeks, and after their stream and source are closed. */
static void outlive(const std::string &path)
{
    for (const char *dtype : {"u8", "f32"}) {
        struct fdsl_source *source = open_source(path);
        struct fdsl_stream_config config = stream_config();
        config.decoder = "cpu";
        config.dtype = dtype;
        const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 1);
        config.device = 0;
        config.held = 2;
        struct fdsl_stream *stream = open_stream(source, config);
        const struct fdsl_stream_info info = info_of(stream);
        struct fdsl_batch *batches[4], *none;
        bool well = true;
        good(fdsl_stream_next(stream, NULL, &batches[0]));
        for (uint64_t step = 3; step > 0; step--) {
            good(fdsl_stream_seek(stream, 0, step));
            good(fdsl_stream_next(stream, NULL, &batches[step]));
        }
        well = well && fdsl_stream_next(stream, NULL, &none) == FDSL_INVALID && !none;
        good(fdsl_stream_seek(stream, 2, 1));
        fdsl_source_close(source);
        fdsl_stream_close(stream);
        for (int i = 3; i >= 0; i--) {
            struct fdsl_tensor images;
            std::vector<uint8_t> bytes(right[(size_t)i].images.size());
            good(fdsl_batch_tensor(batches[i], FDSL_IMAGES, &images));
            must(cudaMemcpy(bytes.data(), images.data, bytes.size(), cudaMemcpyDeviceToHost));
            well = well && bytes == right[(size_t)i].images && bytes.size() % info.image_bytes == 0;
            good(fdsl_batch_release(batches[i], NULL));
        }
        tell(well, std::string("batches outlive seeks and their stream, ") + dtype);
    }
}

static void use_several(struct fdsl_source *source)
{
    struct fdsl_stream_config config = format_config(4);
    const int devices = fdsl_cuda_devices();
    config.decoder = "cpu";
    const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 2);
    std::vector<std::thread> threads;
    std::vector<int> well(4);
    for (size_t i = 0; i < well.size(); i++)
        threads.emplace_back([&, i] {
            const std::vector<struct taken> found =
                take_all(source, config, (int)i % devices, i % 2 ? FILL : NEXT, 2);
            well[i] = found == right;
        });
    for (std::thread &thread : threads)
        thread.join();
    tell(std::count(well.begin(), well.end(), 1) == (ptrdiff_t)well.size(),
         "four streams in four threads, on " + std::to_string(std::min(devices, 4)) + " devices");
}

static void end_waits(struct fdsl_source *source)
{
    struct fdsl_stream_config config = stream_config();
    config.device = 0;
    struct fdsl_stream *stream = open_stream(source, config);
    struct consumer consumer;
    open_consumer(&consumer, stream, 0);
    std::thread canceller([stream] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        fdsl_stream_cancel(stream);
    });
    enum fdsl_status status = FDSL_OK;
    while (status == FDSL_OK || status == FDSL_END)
        status = take_fill(&consumer, stream);
    canceller.join();
    bool well = status == FDSL_FAILED && take_next(&consumer, stream, NEXT) == FDSL_FAILED;
    good(fdsl_stream_seek(stream, 1, 2));
    good(take_next(&consumer, stream, NEXT));
    well = well && consumer.batches.back().epoch == 1 && consumer.batches.back().step == 2;
    close_consumer(&consumer);
    fdsl_stream_close(stream);
    tell(well, "cancel ends a wait; a seek continues");
}

/* ---- Wrong arguments ---- */

static void refuse_arguments(struct fdsl_source *source)
{
    struct fdsl_stream_config config = stream_config();
    struct fdsl_stream *stream, *none;
    struct fdsl_batch *batch;
    uint32_t count;
    int wrong = 0;
    const auto refused = [&](enum fdsl_status status, enum fdsl_status expected, const char *name) {
        if (status == expected && strncmp(fdsl_error(), name, strlen(name)) == 0)
            return;
        printf("        status %d, '%s' instead of '%s'\n", status, fdsl_error(), name);
        wrong++;
    };
    config.device = fdsl_cuda_devices();
    refused(fdsl_stream_open(source, &config, &none), FDSL_UNAVAILABLE, "device: no CUDA device ");
    config.device = 0;
    config.decoder = "cpu";
    config.device_share = 0.5;
    refused(fdsl_stream_open(source, &config, &none), FDSL_INVALID, "device_share: ");
    config.decoder = "hardware";
    config.fit = "center-crop";
    refused(fdsl_stream_open(source, &config, &none), FDSL_INVALID, "decoder: ");
    config = stream_config();
    config.device = 0;
    config.resident_device_bytes = UINT64_MAX;
    config.fit = "random-resized-crop";
    refused(fdsl_stream_open(source, &config, &none), FDSL_INVALID, "resident_device_bytes: the sizes ");
    config.rand_augment = 9;
    refused(fdsl_stream_open(source, &config, &none), FDSL_INVALID, "resident_device_bytes: it keeps ");
    config.rand_augment = -1;
    config.resident_device_bytes = UINT64_C(1) << 50;
    refused(fdsl_stream_open(source, &config, &none), FDSL_INVALID, "the resident samples need ");
    config = stream_config();
    config.device = 0;
    stream = open_stream(source, config);
    struct consumer consumer;
    open_consumer(&consumer, stream, 0);
    int64_t *host = static_cast<int64_t *>(aligned_alloc(256, 1 << 20));
    refused(fdsl_stream_fill(stream, host, consumer.labels, &count, NULL), FDSL_INVALID, "images: ");
    refused(fdsl_stream_fill(stream, consumer.images + 8, NULL, &count, NULL), FDSL_INVALID, "images: ");
    refused(fdsl_stream_fill(stream, consumer.images, host, &count, NULL), FDSL_INVALID, "labels: ");
    refused(fdsl_stream_fill(stream, consumer.images, reinterpret_cast<int64_t *>(consumer.images + 4),
                             &count, NULL),
            FDSL_INVALID, "labels: ");
    refused(fdsl_stream_fill(stream, NULL, NULL, &count, NULL), FDSL_INVALID, "images: ");
    refused(fdsl_stream_fill(stream, consumer.images, NULL, NULL, NULL), FDSL_INVALID, "count: ");
    refused(fdsl_stream_next(stream, NULL, NULL), FDSL_INVALID, "batch: ");
    good(fdsl_stream_next(stream, consumer.steps, &batch));
    cudaGraph_t graph;
    must(cudaStreamBeginCapture(consumer.steps, cudaStreamCaptureModeGlobal));
    refused(fdsl_stream_fill(stream, consumer.images, NULL, &count, consumer.steps), FDSL_INVALID,
            "cuda_stream: ");
    struct fdsl_batch *other;
    refused(fdsl_stream_next(stream, consumer.steps, &other), FDSL_INVALID, "cuda_stream: ");
    refused(fdsl_batch_release(batch, consumer.steps), FDSL_INVALID, "cuda_stream: ");
    spin_kernel<<<1, 1, 0, consumer.steps>>>(0);
    must(cudaStreamEndCapture(consumer.steps, &graph));
    must(cudaGraphDestroy(graph));
    good(fdsl_batch_release(batch, consumer.steps));
    refused(fdsl_batch_release(batch, consumer.steps), FDSL_INVALID, "batch: ");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        int bad = fdsl_stream_next(stream, NULL, &batch) != FDSL_FAILED || !strstr(fdsl_error(), "fork");
        bad |= fdsl_stream_fill(stream, consumer.images, NULL, &count, NULL) != FDSL_FAILED ? 2 : 0;
        fdsl_stream_close(stream);
        _exit(bad);
    }
    int result;
    wrong += waitpid(child, &result, 0) != child || !WIFEXITED(result) || WEXITSTATUS(result) != 0;
    free(host);
    close_consumer(&consumer);
    fdsl_stream_close(stream);
    tell(wrong == 0, "wrong arguments are named, a child is refused: " + std::to_string(wrong) + " wrong");
}

/* Streams read, decode, open and close while another CUDA stream is being captured, and do not end the
 * capture. */
static void survive_captures(struct fdsl_source *source, const char *decoder)
{
    struct fdsl_stream_config config = format_config(4);
    config.device = 0;
    config.decoder = decoder;
    struct fdsl_stream *stream = open_stream(source, config);
    struct consumer consumer;
    cudaGraph_t graph = NULL;
    uint32_t count, taken = 0;
    open_consumer(&consumer, stream, 0);
    must(cudaStreamBeginCapture(consumer.steps, cudaStreamCaptureModeGlobal));
    while (taken < 12)
        taken += fdsl_stream_fill(stream, consumer.images, NULL, &count, consumer.hasty) == FDSL_OK;
    struct fdsl_stream *second = open_stream(source, config);
    good(fdsl_stream_fill(second, consumer.images, NULL, &count, consumer.hasty));
    fdsl_stream_close(second);
    const cudaError_t error = cudaStreamEndCapture(consumer.steps, &graph);
    if (graph)
        must(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    tell(error == cudaSuccess,
         std::string("captures survive streams with decoder ") + decoder +
             (error == cudaSuccess ? "" : std::string(": ") + cudaGetErrorString(error)));
    close_consumer(&consumer);
    fdsl_stream_close(stream);
}

/* ---- Generated images ---- */

enum { IMAGES = 500, CLASSES = 7 };

static struct fdsl_source *open_images(int fresh, const char *dtype, const char *layout, uint32_t channels)
{
    struct fdsl_config config;
    struct fdsl_source *source;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = CLASSES;
    config.res = 96;
    config.out_res = 64;
    config.channels = channels;
    config.dtype = dtype;
    config.layout = layout;
    good(fdsl_images_open(&config, IMAGES, fresh, &source));
    return source;
}

static struct fdsl_stream_config images_config(void)
{
    struct fdsl_stream_config config;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 32;
    config.seed = 11;
    config.num_threads = 4;
    return config;
}

static void compare_images(void)
{
    static const struct {
        int fresh, shuffle, drop_last;
        uint32_t ranks;
        const char *dtype, *layout;
    } trials[] = {{0, 1, 0, 1, "u8", "nchw"},  {1, 1, 1, 1, "u8", "nchw"},  {1, 0, 0, 3, "u8", "nhwc"},
                  {0, 1, 0, 2, "f16", "nhwc"}, {1, 1, 0, 1, "f32", "nchw"}, {0, 0, 1, 1, "bf16", "nchw"}};
    for (const auto &trial : trials) {
        struct fdsl_source *source = open_images(trial.fresh, trial.dtype, trial.layout, 3);
        struct fdsl_stream_config config = images_config();
        config.shuffle = trial.shuffle;
        config.drop_last = trial.drop_last;
        config.world_size = trial.ranks;
        bool well = true, order = true;
        for (config.rank = 0; config.rank < trial.ranks; config.rank++) {
            const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 3);
            for (enum way way : {NEXT, FILL, FILL_AND_NEXT})
                well = well && take_all(source, config, 0, way, 3) == right;
            for (const struct taken &batch : right)
                for (size_t j = 0; j < batch.numbers.size() && trial.ranks == 1; j++) {
                    const struct draw_order drawn = draw_order(config.seed, (uint32_t)batch.epoch, IMAGES);
                    const uint32_t at = (uint32_t)(batch.step * config.batch_size + j);
                    order = order && batch.numbers[j] == (trial.shuffle ? draw_order_at(&drawn, at) : at);
                }
        }
        tell(well && order, std::string("generated images have the bits of the CPU: ") + trial.dtype + " " +
                                trial.layout + (trial.fresh ? ", fresh" : "") + ", " +
                                std::to_string(trial.ranks) + " ranks" +
                                (order ? "" : "; the order is wrong"));
        fdsl_source_close(source);
    }
}

/* Opens images of the formula uji in any size. */
static struct fdsl_source *open_drawn(uint32_t res, const char *dtype)
{
    struct fdsl_config config;
    struct fdsl_source *source;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = 7;
    config.res = res;
    config.channels = 3;
    config.dtype = dtype;
    good(fdsl_images_open(&config, 1, 0, &source));
    return source;
}

/* Batches of a mixture on the device have the bits of those in host memory: on several ranks, with weights
 * that change, taken and filled, and after a state was loaded. A consumer that does not wait is noticed. */
static void compare_mixtures(struct fdsl_source *set)
{
    for (const char *dtype : {"u8", "f16"}) {
        struct fdsl_source *parts[] = {set, open_drawn(57, dtype), open_drawn(57, dtype)}, *mixed;
        const double weights[] = {0.5, 0.2, 0.3}, changed[] = {0.5, 0.4, 0.1};
        const uint32_t classes[] = {1000, 0, 0};
        const uint64_t step = 3;
        struct fdsl_mix_config config;
        good(fdsl_mix_config_init(&config, sizeof config));
        config.sources = parts;
        config.weights = weights;
        config.count = 3;
        config.labels = "offset";
        config.classes = classes;
        config.change_count = 1;
        config.change_steps = &step;
        config.change_weights = changed;
        good(fdsl_source_mix(&config, &mixed));
        struct fdsl_stream_config with = stream_config();
        with.out_res = 57;
        with.channels = 3;
        with.dtype = dtype;
        with.decoder = "cpu";
        with.fit = "random-resized-crop";
        with.on_error = "mask";
        bool well = true, noticed = false;
        for (with.world_size = 1; with.world_size <= 3; with.world_size += 2)
            for (with.rank = 0; with.rank < with.world_size; with.rank++) {
                const std::vector<struct taken> right = take_all(mixed, with, FDSL_CPU, NEXT, 2);
                for (enum way way : {NEXT, FILL, FILL_AND_NEXT})
                    well = well && take_all(mixed, with, 0, way, 2) == right;
                /* The samples are copied on the consumer's stream, so an early release does no harm. */
                noticed = noticed || !(take_all(mixed, with, 0, NOT_WAITED, 2) == right);
            }
        with.rank = 0;
        with.world_size = 1;
        struct fdsl_state state = {};
        state.size = sizeof state;
        struct fdsl_stream_config host = with, device = with;
        host.device = FDSL_CPU;
        device.device = 0;
        struct fdsl_stream *first = open_stream(mixed, device), *second = open_stream(mixed, host);
        struct consumer before, after, other;
        open_consumer(&before, first, 0);
        for (int i = 0; i < 3; i++)
            good(take_next(&before, first, NEXT));
        good(fdsl_stream_save(first, &state));
        good(fdsl_stream_load(second, &state));
        open_consumer(&after, first, 0);
        open_consumer(&other, second, FDSL_CPU);
        good(take_next(&after, first, NEXT));
        good(take_next(&other, second, NEXT));
        (void)close_consumer(&before);
        well = close_consumer(&after) == close_consumer(&other) && well;
        fdsl_stream_close(first);
        fdsl_stream_close(second);
        tell(well, std::string("mixtures have the bits of the CPU: ") + dtype);
        tell(noticed, std::string("mixtures: a consumer that does not wait is noticed: ") + dtype);
        for (int k = 1; k < 3; k++)
            fdsl_source_close(parts[k]);
        fdsl_source_close(mixed);
    }
}

/* The images and masks of a batch in host memory. */
struct masked_batch {
    std::vector<uint8_t> images, masks;
    bool operator==(const struct masked_batch &other) const
    {
        return images == other.images && masks == other.masks;
    }
};

/* Copies a batch from the device, or from the host if `on` is NULL. */
static struct masked_batch copied(const struct fdsl_stream_info &info, const void *images, const void *masks,
                                  uint32_t count, cudaStream_t on)
{
    struct masked_batch batch;
    batch.images.resize(count * info.image_bytes);
    batch.masks.resize(count * info.mask_bytes);
    if (on)
        must(cudaStreamSynchronize(on));
    must(cudaMemcpy(batch.images.data(), images, batch.images.size(), cudaMemcpyDefault));
    must(cudaMemcpy(batch.masks.data(), masks, batch.masks.size(), cudaMemcpyDefault));
    return batch;
}

/* Takes the batches of two epochs with fdsl_stream_next(). */
static std::vector<struct masked_batch>
take_masks(struct fdsl_source *source, struct fdsl_stream_config config, int device, cudaStream_t on)
{
    config.device = device;
    struct fdsl_stream *stream = open_stream(source, config);
    const struct fdsl_stream_info info = info_of(stream);
    std::vector<struct masked_batch> batches;
    for (int epoch = 0; epoch < 2;) {
        struct fdsl_batch *batch;
        struct fdsl_tensor images, masks;
        const enum fdsl_status status = fdsl_stream_next(stream, on, &batch);
        epoch += status == FDSL_END;
        if (status == FDSL_END)
            continue;
        good(status);
        good(fdsl_batch_tensor(batch, FDSL_IMAGES, &images));
        good(fdsl_batch_tensor(batch, FDSL_MASKS, &masks));
        if (masks.device_type != (device < 0 ? 1 : 2) || masks.ndim != 3 || (uintptr_t)masks.data % 256 != 0)
            tell(false, "the masks of a batch are described");
        batches.push_back(copied(info, images.data, masks.data, (uint32_t)images.shape[0], on));
        good(fdsl_batch_release(batch, on));
    }
    fdsl_stream_close(stream);
    return batches;
}

/* Masks on the device have the bits of those in host memory: taken, filled, and of replays. */
static void compare_masks(void)
{
    struct fdsl_config config;
    struct fdsl_source *source;
    struct fdsl_stream_config how = images_config();
    cudaStream_t on;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    uint32_t count;
    uint8_t *images, *masks;
    good(fdsl_config_init(&config, sizeof config));
    config.formula = "segrcdb";
    config.classes = CLASSES;
    config.res = 96;
    config.out_res = 65;
    good(fdsl_images_open(&config, 100, 1, &source));
    must(cudaSetDevice(0));
    must(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    const std::vector<struct masked_batch> whole = take_masks(source, how, FDSL_CPU, nullptr);
    size_t shown = 0;
    for (const struct masked_batch &batch : whole)
        for (uint8_t value : batch.masks)
            shown += value != 0;
    tell(shown > 0 && take_masks(source, how, 0, on) == whole, "masks have the bits of the CPU");
    how.drop_last = 1;
    const std::vector<struct masked_batch> right = take_masks(source, how, FDSL_CPU, nullptr);
    how.device = 0;
    struct fdsl_stream *stream = open_stream(source, how);
    const struct fdsl_stream_info info = info_of(stream);
    must(cudaMalloc(&images, info.capacity * info.image_bytes));
    must(cudaMalloc(&masks, info.capacity * info.mask_bytes));
    good(fdsl_stream_fill_masks(stream, images, masks, &count, on));
    bool well = copied(info, images, masks, count, on) == right[0];
    must(cudaStreamBeginCapture(on, cudaStreamCaptureModeGlobal));
    good(fdsl_stream_fill_masks(stream, images, masks, &count, on));
    must(cudaStreamEndCapture(on, &graph));
    must(cudaGraphInstantiate(&executable, graph, 0));
    for (size_t i = 1; i < right.size(); i++) { /* the capture itself fills nothing */
        must(cudaMemsetAsync(masks, 0xaa, info.capacity * info.mask_bytes, on));
        must(cudaGraphLaunch(executable, on));
        well = well && copied(info, images, masks, count, on) == right[i];
    }
    tell(well, "filled masks, and those of replays, have the bits of the CPU");
    const bool refused =
        fdsl_stream_fill_masks(stream, images, masks + 1, &count, on) == FDSL_INVALID &&
        strncmp(fdsl_error(), "masks: ", 7) == 0 &&
        fdsl_stream_fill(stream, images, reinterpret_cast<int64_t *>(masks), &count, on) == FDSL_INVALID;
    tell(refused, "masks that are not aligned, and labels of images with masks, are refused");
    must(cudaGraphExecDestroy(executable));
    must(cudaGraphDestroy(graph));
    must(cudaFree(images));
    must(cudaFree(masks));
    must(cudaStreamDestroy(on));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

static void write_file(const std::string &name, const void *bytes, size_t size)
{
    FILE *file = static_cast<FILE *>(must_have(fopen(name.c_str(), "wb")));
    const bool written = fwrite(bytes, size, 1, file) == 1;
    must_have(fclose(file) == 0 && written ? file : NULL);
}

/* Writes the images of a data set again, each with a mask of its size and a label file, which makes files
 * with equal names the members of one sample. Returns the folder. */
static std::string write_masked(const std::string &from)
{
    const std::string path = folder + "/masked";
    struct image_scratch scratch = {};
    uint32_t n = 0;
    std::filesystem::create_directories(path);
    for (const auto &entry : std::filesystem::recursive_directory_iterator(from)) {
        if (!entry.is_regular_file())
            continue;
        const std::string name = path + "/" + std::to_string(1000 + n++), format = entry.path().extension();
        std::vector<uint8_t> bytes(entry.file_size());
        FILE *file = static_cast<FILE *>(must_have(fopen(entry.path().c_str(), "rb")));
        must_have(fread(bytes.data(), 1, bytes.size(), file) == bytes.size() ? file : NULL);
        fclose(file);
        struct image image = {};
        bool is_image;
        void *mask;
        size_t size;
        const bool whole = image_decode(format.c_str() + 1, bytes.data(), bytes.size(), &scratch, &image,
                                        &is_image) == STATUS_OK;
        const struct png_shape shape = {whole ? image.width : 8, whole ? image.height : 8, 1};
        std::vector<uint8_t> pixels(static_cast<size_t>(shape.width) * shape.height);
        for (size_t i = 0; i < pixels.size(); i++)
            pixels[i] = (uint8_t)((i % shape.width * 7 + i / shape.width * 13 + n) % 251);
        must(png_encode(pixels.data(), &shape, &mask, &size));
        write_file(name + format, bytes.data(), bytes.size());
        write_file(name + ".mask.png", mask, size);
        write_file(name + ".cls", "0", 1);
        free(mask);
    }
    image_scratch_close(&scratch);
    return path;
}

/* Masks of a data set on the device have the bits of those in host memory, and so have the images that the
 * CPU decodes. Broken samples have a mask of 255. */
static void compare_set_masks(const std::string &from)
{
    static const char *const decoders[] = {"cpu", "auto"};
    struct fdsl_source *source = open_source(write_masked(from));
    cudaStream_t on;
    must(cudaSetDevice(0));
    must(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    for (size_t f = 0; f < 2 * COUNT_OF(decoders); f++) {
        struct fdsl_stream_config how = format_config(f);
        how.decoder = "cpu";
        std::vector<struct masked_batch> right = take_masks(source, how, FDSL_CPU, nullptr);
        how.decoder = decoders[f % 2];
        std::vector<struct masked_batch> found = take_masks(source, how, 0, on), filled;
        how.device = 0;
        struct fdsl_stream *stream = open_stream(source, how);
        const struct fdsl_stream_info info = info_of(stream);
        uint8_t *images, *masks;
        uint32_t count;
        must(cudaMalloc(&images, info.capacity * info.image_bytes));
        must(cudaMalloc(&masks, info.capacity * info.mask_bytes));
        while (filled.size() < right.size())
            if (fdsl_stream_fill_masks(stream, images, masks, &count, on) == FDSL_OK)
                filled.push_back(copied(info, images, masks, count, on));
        size_t broken = 0;
        for (const struct masked_batch &batch : right)
            broken += std::count(batch.masks.begin(), batch.masks.end(), 255);
        for (size_t i = 0; i < right.size() && f % 2 == 1; i++) /* nvJPEG rounds differently */
            right[i].images = found[i].images = filled[i].images = {};
        bool well = found == right && filled == right;
        filled[1].masks[5] ^= 1;
        well = well && !(filled == right) && broken > 0 && broken % info.mask_bytes == 0;
        tell(well, std::string("masks of a data set have the bits of the CPU: ") + formats[f].fit +
                       ", decoder " + decoders[f % 2]);
        must(cudaFree(images));
        must(cudaFree(masks));
        fdsl_stream_close(stream);
    }
    must(cudaStreamDestroy(on));
    fdsl_source_close(source);
}

/* Replays deliver the batches that follow, over the ends of epochs. Then the stream continues without a
 * graph, with the graph again, and its state with another stream. */
static void replay(const char *dtype)
{
    struct fdsl_source *source = open_images(1, dtype, "nchw", 3);
    struct fdsl_stream_config config = images_config();
    config.drop_last = 1;
    const std::vector<struct taken> right = take_all(source, config, FDSL_CPU, NEXT, 4);
    config.device = 0;
    struct fdsl_stream *stream = open_stream(source, config);
    const size_t steps = info_of(stream).steps;
    struct consumer consumer;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    uint32_t count;
    open_consumer(&consumer, stream, 0);
    good(take_fill(&consumer, stream));
    good(take_next(&consumer, stream, NEXT));
    must(cudaStreamBeginCapture(consumer.steps, cudaStreamCaptureModeGlobal));
    good(fdsl_stream_fill(stream, consumer.images, consumer.labels, &count, consumer.steps));
    must(cudaStreamEndCapture(consumer.steps, &graph));
    must(cudaGraphInstantiate(&executable, graph, 0));
    const auto launch = [&](size_t times) {
        for (size_t i = 0; i < times; i++) {
            must(cudaGraphLaunch(executable, consumer.steps));
            enqueue_step(&consumer, consumer.images, consumer.labels, nullptr, count, consumer.steps);
        }
    };
    launch(steps + 3);
    const struct fdsl_state state = saved(stream);
    good(take_fill(&consumer, stream));
    good(take_next(&consumer, stream, NEXT));
    launch(2);
    good(take_next(&consumer, stream, NEXT));
    const size_t taken = consumer.batches.size();
    bool well = state.epoch == 1 && state.sample == 5 * config.batch_size && count == config.batch_size;
    const struct fdsl_state later = saved(stream);
    well = well && later.epoch * steps + later.sample / config.batch_size == taken;
    good(fdsl_stream_seek(stream, 3, 0));
    launch(1);
    good(take_fill(&consumer, stream));
    const std::vector<struct taken> found = close_consumer(&consumer);
    for (size_t i = 0; i < taken; i++)
        well = well && found[i] == right[i];
    well = well && found[taken] == right[3 * steps] && found[taken + 1] == right[3 * steps + 1];
    must(cudaGraphExecDestroy(executable));
    must(cudaGraphDestroy(graph));
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    tell(well, std::string("replays of a CUDA graph deliver the batches that follow, ") + dtype);
}

/* Steps with different numbers of images cannot be captured; the capture goes on. */
static void refuse_replay(void)
{
    struct fdsl_source *source = open_images(0, "u8", "nchw", 1);
    struct fdsl_stream_config config = images_config();
    config.device = 0;
    struct fdsl_stream *stream = open_stream(source, config);
    struct consumer consumer;
    cudaGraph_t graph;
    uint32_t count;
    open_consumer(&consumer, stream, 0);
    must(cudaStreamBeginCapture(consumer.steps, cudaStreamCaptureModeGlobal));
    const enum fdsl_status status = fdsl_stream_fill(stream, consumer.images, NULL, &count, consumer.steps);
    const bool named = strncmp(fdsl_error(), "cuda_stream: ", 13) == 0;
    spin_kernel<<<1, 1, 0, consumer.steps>>>(0);
    must(cudaStreamEndCapture(consumer.steps, &graph));
    must(cudaGraphDestroy(graph));
    good(take_fill(&consumer, stream));
    close_consumer(&consumer);
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    tell(status == FDSL_INVALID && named, "a step of varying size is not captured");
}

/* While one thread captures in global mode, another one replays a graph, and saves, moves, fills and closes
 * the stream. The capture must survive. */
static void survive_replays(void)
{
    struct fdsl_source *source = open_images(1, "u8", "nchw", 3);
    struct fdsl_stream_config config = images_config();
    config.drop_last = 1;
    config.device = 0;
    struct fdsl_stream *stream = open_stream(source, config);
    struct fdsl_state state = {};
    struct consumer consumer;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable;
    uint32_t count;
    open_consumer(&consumer, stream, 0);
    must(cudaStreamBeginCapture(consumer.steps, cudaStreamCaptureModeThreadLocal));
    good(fdsl_stream_fill(stream, consumer.images, consumer.labels, &count, consumer.steps));
    must(cudaStreamEndCapture(consumer.steps, &graph));
    must(cudaGraphInstantiate(&executable, graph, 0));
    must(cudaGraphDestroy(graph));
    graph = NULL;
    must(cudaStreamBeginCapture(consumer.hasty, cudaStreamCaptureModeGlobal));
    std::thread([&] {
        for (int i = 0; i < 3; i++)
            must(cudaGraphLaunch(executable, consumer.steps));
        state = saved(stream);
        good(fdsl_stream_seek(stream, 1, 2));
        good(fdsl_stream_fill(stream, consumer.images, consumer.labels, &count, consumer.steps));
        fdsl_stream_close(stream);
    }).join();
    const cudaError_t error = cudaStreamEndCapture(consumer.hasty, &graph);
    (void)cudaGetLastError();
    if (graph)
        must(cudaGraphDestroy(graph));
    must(cudaGraphExecDestroy(executable));
    close_consumer(&consumer);
    fdsl_source_close(source);
    tell(error == cudaSuccess && state.epoch == 0 && state.sample == 3 * config.batch_size,
         std::string("a capture survives replays of generated images: ") + cudaGetErrorString(error));
}

/* ---- Memory and time ---- */

static size_t free_bytes(void)
{
    size_t bytes, total;
    must(cudaDeviceSynchronize());
    must(cudaMemGetInfo(&bytes, &total));
    return bytes;
}

static size_t resident_bytes(void)
{
    size_t pages = 0, size = 0;
    FILE *file = static_cast<FILE *>(must_have(fopen("/proc/self/statm", "r")));
    if (fscanf(file, "%zu %zu", &size, &pages) != 2)
        pages = 0;
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t count_threads(void)
{
    size_t threads = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task"))
        threads += task.exists();
    return threads;
}

static void open_many(struct fdsl_source *source)
{
    struct fdsl_source *images = open_images(1, "u8", "nchw", 3);
    size_t device = 0, host = 0, threads = 0;
    const double begin_us = now_us();
    for (int i = 0; i < 200; i++) {
        struct fdsl_stream_config config = i % 4 == 3 ? images_config() : format_config((size_t)i % 4);
        config.device = 0;
        if (i % 4 != 3)
            config.decoder = i % 8 ? "cpu" : "auto";
        config.num_threads = 2;
        config.resident_device_bytes = i % 4 != 3 ? 1 << 20 : 0;
        struct fdsl_stream *stream = open_stream(i % 4 == 3 ? images : source, config);
        struct fdsl_batch *batch;
        if (i % 8 > 1)
            good(fdsl_stream_next(stream, NULL, &batch));
        fdsl_stream_close(stream);
        if (i % 8 > 1)
            good(fdsl_batch_release(batch, NULL));
        if (i != 79)
            continue;
        device = free_bytes();
        host = resident_bytes();
        threads = count_threads();
    }
    const double seconds = 1e-6 * (now_us() - begin_us);
    const int64_t lost = (int64_t)device - (int64_t)free_bytes(),
                  grown = (int64_t)resident_bytes() - (int64_t)host;
    fdsl_source_close(images);
    tell(lost <= 4 << 20 && grown <= (int64_t)(host / 100) && count_threads() == threads,
         "200 openings in " + std::to_string(seconds) + " s: " + std::to_string(lost) +
             " bytes of device memory lost, " + std::to_string(grown) + " of host memory of " +
             std::to_string(host));
}

/* Times fdsl_stream_fill() of a new stream. */
static void time_fill(const char *name, struct fdsl_source *source, const struct fdsl_stream_config &config,
                      double limit_us)
{
    struct fdsl_stream *stream = open_stream(source, config);
    struct consumer consumer;
    open_consumer(&consumer, stream, 0);
    time_fill(name, stream, consumer.images, consumer.labels, consumer.steps, limit_us);
    close_consumer(&consumer);
    fdsl_stream_close(stream);
}

/* Times the kernel that converts a batch of 256 x 3 x 224 x 224 bytes, with the wait of the caller's stream.
 */
static void time_conversion(struct fdsl_source *source, const char *dtype, const char *layout)
{
    struct fdsl_stream_config config = stream_config();
    config.device = 0;
    config.decoder = "cpu";
    config.batch_size = 240;
    config.out_res = 224;
    config.fit = "resize";
    config.dtype = dtype;
    config.layout = layout;
    config.num_threads = 0;
    struct fdsl_stream *stream = open_stream(source, config);
    struct consumer consumer;
    cudaEvent_t begin, end;
    std::vector<double> times;
    uint32_t count;
    open_consumer(&consumer, stream, 0);
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    while (times.size() < 8) {
        while (fdsl_stream_wait(stream, 1) == FDSL_PENDING)
            ;
        std::this_thread::sleep_for(std::chrono::milliseconds(10)); /* the copy to the device is complete */
        spin_kernel<<<1, 1, 0, consumer.steps>>>(100000);
        must(cudaEventRecord(begin, consumer.steps));
        const enum fdsl_status status =
            fdsl_stream_fill(stream, consumer.images, consumer.labels, &count, consumer.steps);
        must(cudaEventRecord(end, consumer.steps));
        must(cudaStreamSynchronize(consumer.steps));
        if (status == FDSL_END)
            continue;
        good(status);
        float ms;
        must(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(1e3 * ms);
    }
    const double bytes = count * (double)(consumer.info.image_bytes + 3.0 * 224 * 224);
    char text[256];
    snprintf(text, sizeof text, "storing %u images of 224 pixels as %s %s takes %.1f us: %.2f TB/s", count,
             dtype, layout, median(times), 1e-6 * bytes / median(times));
    tell(true, text);
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    close_consumer(&consumer);
    fdsl_stream_close(stream);
}

static void time_all(struct fdsl_source *source)
{
    struct fdsl_stream_config config = stream_config();
    config.device = 0;
    config.decoder = "cpu";
    config.batch_size = 24;
    config.out_res = 32;
    config.num_threads = 0;
    config.prefetch = 4;
    time_fill("u8", source, config, 10);
    config.dtype = "f16";
    config.flip = 1;
    time_fill("f16, flip", source, config, 10);
    struct fdsl_source *images = open_images(1, "u8", "nchw", 3);
    config = images_config();
    config.device = 0;
    time_fill("generated", images, config, 10);
    fdsl_source_close(images);
    time_conversion(source, "u8", "nchw");
    time_conversion(source, "f16", "nchw");
    time_conversion(source, "f32", "nhwc");
}

/* ---- Masks ---- */

static struct fdsl_generator *open_masks(int device)
{
    struct fdsl_config config;
    struct fdsl_generator *generator;
    good(fdsl_config_init(&config, sizeof config));
    config.formula = "segrcdb";
    config.res = 256;
    config.out_res = 100;
    config.fit = "crop";
    config.batch = 20;
    config.device = device;
    good(fdsl_open(&config, &generator));
    return generator;
}

/* Compares images and masks of segrcdb with those of the CPU. A mask at an odd address is refused. */
static void compare_generated_masks(void)
{
    const uint32_t count = 17;
    struct fdsl_generator *host = open_masks(FDSL_CPU), *device = open_masks(0);
    struct fdsl_layout layout = {};
    layout.size = sizeof layout;
    good(fdsl_describe(device, &layout));
    const size_t bytes = count * layout.image_bytes, mask_bytes = count * layout.mask_bytes;
    std::vector<uint8_t> right(bytes + mask_bytes), ours(bytes + mask_bytes);
    void *memory;
    good(fdsl_alloc(0, bytes + mask_bytes + 16, &memory));
    uint8_t *images = static_cast<uint8_t *>(memory), *masks = images + (bytes + 15) / 16 * 16;
    struct fdsl_targets targets = {sizeof targets, nullptr, right.data() + bytes};
    good(fdsl_generate_targets(host, nullptr, 1000, count, right.data(), &targets, nullptr));
    targets.masks = masks;
    good(fdsl_generate_targets(device, nullptr, 1000, count, images, &targets, nullptr));
    must(cudaMemcpy(ours.data(), images, bytes, cudaMemcpyDeviceToHost));
    must(cudaMemcpy(ours.data() + bytes, masks, mask_bytes, cudaMemcpyDeviceToHost));
    tell(ours == right, "masks of segrcdb have the bits of the CPU");
    targets.masks = masks + 1;
    tell(fdsl_generate_targets(device, nullptr, 1000, count, images, &targets, nullptr) == FDSL_INVALID,
         "masks in device memory that are not aligned are refused");
    fdsl_free(0, memory);
    fdsl_close(device);
    fdsl_close(host);
}

/* Compares images and point clouds with those of the CPU. */
static void compare_generated_clouds(void)
{
    const uint32_t count = 17;
    struct fdsl_generator *generators[2];
    struct fdsl_layout layout = {};
    std::vector<float> points[2];
    std::vector<uint8_t> images[2];
    layout.size = sizeof layout;
    for (int g = 0; g < 2; g++) {
        struct fdsl_config config;
        good(fdsl_config_init(&config, sizeof config));
        config.preset = "pc-fractaldb-1k";
        config.classes = 5;
        config.batch = 20;
        config.device = g ? 0 : FDSL_CPU;
        good(fdsl_open(&config, &generators[g]));
        good(fdsl_describe(generators[g], &layout));
        const size_t bytes = count * layout.image_bytes, values = count * (size_t)layout.points * 3;
        void *memory = nullptr;
        images[g].resize(bytes);
        points[g].resize(values);
        if (g)
            good(fdsl_alloc(0, (bytes + 15) / 16 * 16 + values * sizeof(float), &memory));
        uint8_t *to = g ? static_cast<uint8_t *>(memory) : images[g].data();
        float *cloud = g ? reinterpret_cast<float *>(to + (bytes + 15) / 16 * 16) : points[g].data();
        struct fdsl_targets targets = {sizeof targets, nullptr, nullptr, cloud};
        good(fdsl_generate_targets(generators[g], nullptr, 1000, count, to, &targets, nullptr));
        if (g) {
            must(cudaMemcpy(images[g].data(), to, bytes, cudaMemcpyDeviceToHost));
            must(cudaMemcpy(points[g].data(), cloud, values * sizeof(float), cudaMemcpyDeviceToHost));
            fdsl_free(0, memory);
        }
        fdsl_close(generators[g]);
    }
    tell(images[0] == images[1] && points[0] == points[1], "point clouds have the bits of the CPU");
}

int main(void)
{
    char made[] = "/tmp/gpu_lib-XXXXXX";
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_lib: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
    folder = static_cast<char *>(must_have(mkdtemp(made)));
    const std::string path = write_files(&some);
    struct fdsl_source *source = open_source(path);
    compare_formats(source);
    compare_changes(source);
    plant_faults(source);
    compare_decoders(source);
    move_states(source);
    outlive(path);
    use_several(source);
    end_waits(source);
    refuse_arguments(source);
    survive_captures(source, "cpu");
    survive_captures(source, "auto");
    compare_images();
    compare_mixtures(source);
    compare_masks();
    compare_set_masks(path);
    compare_generated_masks();
    compare_generated_clouds();
    replay("u8");
    replay("f16");
    refuse_replay();
    survive_replays();
    open_many(source);
    time_all(source);
    fdsl_source_close(source);
    std::filesystem::remove_all(folder);
    return failures ? 3 : 0;
}
