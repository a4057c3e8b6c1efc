/* Crops, resizes and flips the stored samples of a batch, then applies the operations of RandAugment. There
 * are three kernels per batch. The first computes the weights of each resize, and the second resizes. The
 * third has one block per image, which applies all operations of the image. */
#include "common/check.cuh"
#include "train/augment.cuh"

#define RESIZE_ROWS   8  /* rows of the canvas that a thread resizes together */
#define RESIZE_BAND   16 /* rows of the image per block, if they fit into shared memory */
#define RESIZE_SHARED (48 << 10)
#define CHANGE_BLOCK  512
#define LANES         32
#define LANE_LEVELS   (AUGMENT_LEVELS / LANES)

/* ---- Weights ---- */

/* A block computes the weights of one sample. */
static __global__ void weights_kernel(const __grid_constant__ struct device_augment augment, uint32_t epoch,
                                      const uint32_t *numbers)
{
    const uint32_t width = augment.plan.shape.width, outputs = width + augment.plan.shape.height;
    __shared__ struct augment_part part;
    if (threadIdx.x == 0) {
        part.box = augment_box(&augment.plan, epoch, numbers[blockIdx.x]);
        part.flip = augment_flips(&augment.plan, epoch, numbers[blockIdx.x]);
        augment.parts[blockIdx.x] = part;
    }
    __syncthreads();
    const struct resample_axis across = resample_axis_with(part.box.width, width, augment.plan.bicubic);
    const struct resample_axis down =
        resample_axis_with(part.box.height, augment.plan.shape.height, augment.plan.bicubic);
    for (uint32_t i = threadIdx.x; i < outputs; i += blockDim.x) {
        const size_t at = (size_t)blockIdx.x * outputs + i;
        struct augment_entry_inputs inputs;
        inputs.count = resample_weights(i < width ? &across : &down, i < width ? i : i - width, &inputs.first,
                                        augment.weights + at * augment.taps);
        augment.inputs[at] = inputs;
    }
}

/* ---- Resizing ---- */

/* Computes one output column of RESIZE_ROWS adjacent rows of the canvas: row `begin` and the rows after it,
 * but none from `end` on. `rows` points to the first input of this column in row 0. */
static __device__ __forceinline__ void resize_column(const uint8_t *rows, uint32_t pitch, uint32_t begin,
                                                     uint32_t end, const int16_t *weights, uint32_t count,
                                                     uint32_t bits, uint32_t width, uint8_t *out)
{
    int32_t sums[RESIZE_ROWS] = {};
    const uint8_t *from[RESIZE_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < RESIZE_ROWS; r++)
        from[r] = rows + (size_t)min(begin + r, end - 1) * pitch;
    for (uint32_t t = 0; t < count; t++) {
        const int32_t weight = weights[t];
#pragma unroll
        for (uint32_t r = 0; r < RESIZE_ROWS; r++)
            sums[r] += weight * from[r][t];
    }
#pragma unroll
    for (uint32_t r = 0; r < RESIZE_ROWS; r++)
        if (begin + r < end)
            out[(begin + r) * width] = augment_shifted(sums[r], bits);
}

/* Block (entry, band, channel of the canvas). `count`: samples of the batch, without their partners. */
static __global__ void __launch_bounds__(BLOCK)
    resize_kernel(const __grid_constant__ struct device_augment augment, const uint8_t *stored,
                  const __grid_constant__ struct train_held held, uint32_t count, const uint32_t *numbers)
{
    extern __shared__ uint8_t middle[]; /* rows of the canvas, resized along x */
    const struct shape &canvas = augment.plan.canvas, &shape = augment.plan.shape;
    const uint32_t j = blockIdx.x, width = shape.width, begin = blockIdx.y * augment.band;
    const uint32_t end = min(begin + augment.band, shape.height);
    const struct augment_part part = augment.parts[j];
    const size_t entry = (size_t)j * (width + shape.height);
    const struct augment_entry_inputs *across = augment.inputs + entry, *down = across + width;
    const int16_t *across_weights = augment.weights + entry * augment.taps;
    const int16_t *down_weights = across_weights + (size_t)width * augment.taps;
    const uint32_t first = down[begin].first, rows = down[end - 1].first + down[end - 1].count - first;
    const size_t sample = held.alone ? train_held_at(&held, count, j) : numbers[j] % augment.plan.samples;
    const size_t plane = (size_t)canvas.height * canvas.width;
    const uint8_t *from = stored + (sample * canvas.channels + blockIdx.z) * plane +
                          (size_t)(part.box.top + first) * canvas.width + part.box.left;
    uint32_t bits = resample_axis_with(part.box.width, width, augment.plan.bicubic).bits;
    const uint32_t groups = (rows + RESIZE_ROWS - 1) / RESIZE_ROWS;
    for (uint32_t i = threadIdx.x; i < groups * width; i += BLOCK) {
        const uint32_t group = i / width, x = i - group * width;
        resize_column(from + across[x].first, canvas.width, group * RESIZE_ROWS, rows,
                      across_weights + (size_t)x * augment.taps, across[x].count, bits, width, middle + x);
    }
    __syncthreads();
    bits = resample_axis_with(part.box.height, shape.height, augment.plan.bicubic).bits;
    const uint32_t copies = canvas.channels == shape.channels ? 1 : shape.channels;
    const size_t area = (size_t)shape.height * width;
    uint8_t *to = augment.images + ((size_t)j * shape.channels + blockIdx.z) * area;
    for (uint32_t i = threadIdx.x; i < (end - begin) * width; i += BLOCK) {
        const uint32_t y = begin + i / width, x = i % width;
        const int16_t *weights = down_weights + (size_t)y * augment.taps;
        const uint8_t *rows_of = middle + (down[y].first - first) * width + x;
        int32_t sum = 0;
        for (uint32_t t = 0; t < down[y].count; t++)
            sum += weights[t] * rows_of[t * width];
        const uint8_t value = augment_shifted(sum, bits);
        for (uint32_t c = 0; c < copies; c++)
            to[c * area + (size_t)y * width + (part.flip ? width - 1 - x : x)] = value;
    }
}

/* ---- RandAugment ---- */

/* Shared memory of a block. */
struct change_shared {
    uint32_t counts[AUGMENT_CHANNELS_MAX][AUGMENT_LEVELS];
    uint32_t sums[AUGMENT_CHANNELS_MAX];
    uint8_t table[AUGMENT_CHANNELS_MAX][AUGMENT_LEVELS];
};

/* Counts the values of each channel. Equal consecutive values of a thread are added at once, because many
 * images are mostly black. */
static __device__ void count_values(const struct shape &shape, const uint8_t *image,
                                    struct change_shared *shared)
{
    const uint32_t pixels = shape.height * shape.width;
    for (uint32_t i = threadIdx.x; i < shape.channels * AUGMENT_LEVELS; i += blockDim.x)
        (&shared->counts[0][0])[i] = 0;
    __syncthreads();
    for (uint32_t c = 0; c < shape.channels; c++) {
        uint32_t last = 0, run = 0;
        for (uint32_t i = threadIdx.x; i < pixels; i += blockDim.x) {
            const uint32_t value = image[(size_t)c * pixels + i];
            if (value != last && run > 0) {
                atomicAdd(&shared->counts[c][last], run);
                run = 0;
            }
            last = value;
            run++;
        }
        if (run > 0)
            atomicAdd(&shared->counts[c][last], run);
    }
    __syncthreads();
}

/* Computes the tables, with one warp per channel and LANE_LEVELS entries per lane. */
static __device__ void make_tables(const struct shape &shape, enum augment_operation operation,
                                   const struct augment_numbers *numbers, struct change_shared *shared)
{
    const uint32_t c = threadIdx.x / LANES, lane = threadIdx.x % LANES, begin = lane * LANE_LEVELS;
    const uint32_t pixels = shape.height * shape.width, all = 0xffffffffu;
    const bool own = c < shape.channels; /* the same for all lanes of a warp */
    struct augment_channel channel = {AUGMENT_LEVELS, 0, 0, 0};
    uint32_t below = 0, sum = 0;
    if (own && augment_counts(operation)) {
        uint32_t inside = 0;
        for (uint32_t v = begin; v < begin + LANE_LEVELS; v++) {
            const uint32_t count = shared->counts[c][v];
            inside += count;
            sum += v * count;
            channel.least = count ? min(channel.least, v) : channel.least;
            channel.most = count ? v : channel.most;
        }
        below = inside; /* becomes the number of values of the lanes before this one */
        for (uint32_t distance = 1; distance < LANES; distance *= 2) {
            const uint32_t other = __shfl_up_sync(all, below, distance);
            below += lane >= distance ? other : 0;
        }
        below -= inside;
        channel.least = __reduce_min_sync(all, channel.least);
        channel.most = __reduce_max_sync(all, channel.most);
        channel.step = augment_equalize_step(pixels, shared->counts[c][channel.most]);
        sum = __reduce_add_sync(all, sum);
        if (lane == 0)
            shared->sums[c] = sum;
    }
    __syncthreads();
    if (own && operation == AUGMENT_CONTRAST)
        channel.mean = augment_mean(shared->sums, shape.channels, pixels);
    for (uint32_t v = begin; own && v < begin + LANE_LEVELS; v++) {
        shared->table[c][v] = augment_entry(operation, numbers, &channel, v, below);
        below += augment_counts(operation) ? shared->counts[c][v] : 0;
    }
    __syncthreads();
}

/* Calls value(channel, y, x) for all values of an image, and stores the results. A thread stores up to four
 * adjacent values at once. */
template <class Value>
static __device__ __forceinline__ void store_values(const struct shape &shape, uint8_t *to, Value value)
{
    if (shape.width % 4 == 0) {
        const uint32_t words = shape.width / 4;
        for (uint32_t i = threadIdx.x; i < shape.height * words; i += blockDim.x) {
            const uint32_t y = i / words, x = (i - y * words) * 4;
            for (uint32_t c = 0; c < shape.channels; c++) {
                const uchar4 four = {value(c, y, x), value(c, y, x + 1), value(c, y, x + 2),
                                     value(c, y, x + 3)};
                reinterpret_cast<uchar4 *>(to)[(size_t)c * shape.height * words + i] = four;
            }
        }
        return;
    }
    for (uint32_t i = threadIdx.x; i < shape.height * shape.width; i += blockDim.x) {
        const uint32_t y = i / shape.width, x = i - y * shape.width;
        for (uint32_t c = 0; c < shape.channels; c++)
            to[(size_t)c * shape.height * shape.width + i] = value(c, y, x);
    }
}

/* Applies an operation to an image. All threads of the block must call it. */
static __device__ void change(const struct shape &shape, enum augment_operation operation,
                              const struct augment_numbers *numbers, const uint8_t *from, uint8_t *to,
                              struct change_shared *shared)
{
    const uint32_t height = shape.height, width = shape.width, plane = height * width;
    if (augment_has_table(operation)) {
        if (augment_counts(operation))
            count_values(shape, from, shared);
        make_tables(shape, operation, numbers, shared);
        store_values(shape, to, [=](uint32_t c, uint32_t y, uint32_t x) {
            return shared->table[c][from[(size_t)c * plane + y * width + x]];
        });
    } else if (augment_warps(operation))
        store_values(shape, to, [=](uint32_t c, uint32_t y, uint32_t x) {
            return augment_warped(from + (size_t)c * plane, height, width, y, x, numbers->map);
        });
    else if (operation == AUGMENT_COLOR)
        store_values(shape, to, [=, &shape](uint32_t c, uint32_t y, uint32_t x) {
            return augment_color(from, &shape, c, y * width + x, numbers->factor);
        });
    else if (operation == AUGMENT_SHARPNESS)
        store_values(shape, to, [=](uint32_t c, uint32_t y, uint32_t x) {
            return augment_sharp(from + (size_t)c * plane, height, width, y, x, numbers->factor);
        });
    else
        store_values(shape, to, [=](uint32_t c, uint32_t y, uint32_t x) {
            return from[(size_t)c * plane + y * width + x];
        });
    __syncthreads();
}

/* One block per image. The images are in augment.images before the first operation. Each operation writes its
 * result to the other of the two buffers. */
static __global__ void __launch_bounds__(CHANGE_BLOCK)
    change_kernel(const __grid_constant__ struct device_augment augment, uint32_t epoch,
                  const uint32_t *numbers)
{
    __shared__ struct change_shared shared;
    const struct shape &shape = augment.plan.shape;
    const size_t at = (size_t)blockIdx.x * shape.channels * shape.height * shape.width;
    uint8_t *from = augment.images + at, *to = augment.other + at;
    for (uint32_t i = 0; i < augment.plan.operations; i++) {
        const struct augment_numbers *chosen;
        const enum augment_operation operation =
            augment_draw(&augment.plan, epoch, numbers[blockIdx.x], i, &chosen);
        change(shape, operation, chosen, from, to, &shared);
        uint8_t *const swapped = from;
        from = to;
        to = swapped;
    }
}

static __global__ void __launch_bounds__(CHANGE_BLOCK)
    apply_kernel(const __grid_constant__ struct shape shape, enum augment_operation operation,
                 const __grid_constant__ struct augment_numbers numbers, const uint8_t *from, uint8_t *to)
{
    __shared__ struct change_shared shared;
    const size_t at = (size_t)blockIdx.x * shape.channels * shape.height * shape.width;
    change(shape, operation, &numbers, from + at, to + at, &shared);
}

enum status device_augment_apply(const struct shape *shape, enum augment_operation operation,
                                 const struct augment_numbers *numbers, uint32_t count, const uint8_t *from,
                                 uint8_t *to, cudaStream_t stream)
{
    apply_kernel<<<count, CHANGE_BLOCK, 0, stream>>>(*shape, operation, *numbers, from, to);
    CUDA_TRY_LAUNCH("apply_kernel");
    return STATUS_OK;
}

/* ---- A batch ---- */

/* Chooses the rows per block, so that their canvas rows fit into shared memory where possible. */
static void choose_band(struct device_augment *augment)
{
    const struct shape *canvas = &augment->plan.canvas, *shape = &augment->plan.shape;
    const uint32_t taps = resample_axis_with(canvas->height, shape->height, augment->plan.bicubic).taps;
    for (augment->band = RESIZE_BAND;; augment->band /= 2) {
        const uint64_t apart = (uint64_t)(augment->band - 1) * canvas->height / shape->height + 2;
        augment->rows = (uint32_t)min(apart + taps, (uint64_t)canvas->height);
        if (augment->band == 1 || (size_t)augment->rows * shape->width <= RESIZE_SHARED)
            return;
    }
}

enum status device_augment_open(const struct train *train, struct allocations *allocations,
                                struct device_augment *augment)
{
    *augment = {};
    if (!augment_computes(&train->augment) || train->forward_only)
        return STATUS_OK;
    struct augment_plan *plan = &augment->plan;
    TRY(augment_plan(train, plan));
    augment->partners = train_part_augmented(train, 1) > 1;
    const size_t batch = train_part_augmented(train, train_part_max(train)),
                 outputs = (size_t)plan->shape.width + plan->shape.height;
    const uint32_t across = resample_axis_with(plan->canvas.width, plan->shape.width, plan->bicubic).taps;
    const uint32_t down = resample_axis_with(plan->canvas.height, plan->shape.height, plan->bicubic).taps;
    augment->taps = across > down ? across : down;
    choose_band(augment);
    CUDA_TRY(cudaFuncSetAttribute(resize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)(augment->rows * plan->shape.width)));
    TRY(allocate(allocations, &augment->images, batch * train->data->sample_bytes));
    if (plan->operations > 0)
        TRY(allocate(allocations, &augment->other, batch * train->data->sample_bytes));
    TRY(allocate(allocations, &augment->parts, batch));
    TRY(allocate(allocations, &augment->inputs, batch * outputs));
    return allocate(allocations, &augment->weights, batch * outputs * augment->taps);
}

enum status device_augment_run(const struct device_augment *augment, uint32_t epoch, const uint32_t *numbers,
                               uint32_t count, struct device_set *set, cudaStream_t stream)
{
    const struct shape *shape = &augment->plan.shape;
    const uint32_t images = augment->partners ? 2 * count : count;
    if (!augment->images || count == 0)
        return STATUS_OK;
    weights_kernel<<<images, BLOCK, 0, stream>>>(*augment, epoch, numbers);
    CUDA_TRY_LAUNCH("weights_kernel");
    const dim3 blocks(images, (shape->height + augment->band - 1) / augment->band,
                      augment->plan.canvas.channels);
    resize_kernel<<<blocks, BLOCK, (size_t)augment->rows * shape->width, stream>>>(
        *augment, static_cast<const uint8_t *>(set->values), set->held, count, numbers);
    CUDA_TRY_LAUNCH("resize_kernel");
    if (augment->plan.operations > 0) {
        change_kernel<<<images, CHANGE_BLOCK, 0, stream>>>(*augment, epoch, numbers);
        CUDA_TRY_LAUNCH("change_kernel");
    }
    set->values = augment->plan.operations % 2 ? augment->other : augment->images;
    set->held = {true, augment->partners, count, 0};
    return STATUS_OK;
}
