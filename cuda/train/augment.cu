/* Computes the images of a batch from its stored samples, with at most three kernels. With crops, the first
 * computes the weights of each resize, and the second crops, resizes and flips. The last kernel has one block
 * per image, which applies the operations of RandAugment. Without crops, this last kernel is the only one: it
 * reads the stored samples, and also flips them. For gray images, the kernels compute only one channel. */
#include "common/check.cuh"
#include "train/augment.cuh"
#include "train/augment_change.cuh"

#define RESIZE_ROWS   8  /* rows of the canvas that a thread resizes together */
#define RESIZE_BAND   16 /* rows of the image per block, if they fit into shared memory */
#define RESIZE_SHARED (48 << 10)

/* Returns the index of the stored sample of image `j` of a batch with `count` samples. */
static __device__ __forceinline__ size_t sample_of(const struct device_augment &augment,
                                                   const struct train_held &held, uint32_t count,
                                                   const uint32_t *numbers, uint32_t j)
{
    return held.alone ? train_held_at(&held, count, j) : numbers[j] % augment.plan.samples;
}

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

/* Computes one output column for RESIZE_ROWS adjacent rows of the canvas, from row `begin` on. Skips rows
 * from `end` on. `rows` points to the first input of this column in row 0. */
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

/* The block index is (entry, band, channel). `count`: samples of the batch, without their partners. */
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
    const size_t sample = sample_of(augment, held, count, numbers, j);
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
    const size_t area = (size_t)shape.height * width;
    uint8_t *to = augment.images + ((size_t)j * augment.change.shape.channels + blockIdx.z) * area;
    for (uint32_t i = threadIdx.x; i < (end - begin) * width; i += BLOCK) {
        const uint32_t y = begin + i / width, x = i % width;
        const int16_t *weights = down_weights + (size_t)y * augment.taps;
        const uint8_t *rows_of = middle + (down[y].first - first) * width + x;
        int32_t sum = 0;
        for (uint32_t t = 0; t < down[y].count; t++)
            sum += weights[t] * rows_of[t * width];
        to[y * width + (part.flip ? width - 1 - x : x)] = augment_shifted(sum, bits);
    }
}

/* ---- RandAugment ---- */

/* Returns the block's own memory for one plane. */
template <bool FITS> static __device__ __forceinline__ uint32_t *own_plane(const struct change_plan &plan)
{
    extern __shared__ uint32_t plane[];
    return FITS ? plane : reinterpret_cast<uint32_t *>(plan.planes + (size_t)blockIdx.x * plan.plane_bytes);
}

/* One block per image. Each operation reads and writes augment.images. Without crops, the first operation
 * reads the stored sample. */
template <bool FITS>
static __global__ void __launch_bounds__(CHANGE_BLOCK, CHANGE_BLOCKS)
    change_kernel(const __grid_constant__ struct device_augment augment, const uint8_t *stored,
                  const __grid_constant__ struct train_held held, uint32_t count, uint32_t epoch,
                  const uint32_t *numbers)
{
    __shared__ struct change_shared shared;
    const struct augment_plan &plan = augment.plan;
    const uint32_t j = blockIdx.x, number = numbers[j];
    const size_t plane = (size_t)plan.shape.height * plan.shape.width;
    uint8_t *const image = augment.images + j * augment.change.shape.channels * plane;
    const uint8_t *from = image;
    bool flip = false;
    if (!plan.crop) {
        from = stored + sample_of(augment, held, count, numbers, j) * plan.canvas.channels * plane;
        flip = augment_flips(&plan, epoch, number);
    }
    for (uint32_t i = 0; i < max(plan.operations, 1); i++) {
        const struct augment_numbers *chosen = &plan.numbers[AUGMENT_IDENTITY][0];
        const enum augment_operation operation =
            i < plan.operations ? augment_draw(&plan, epoch, number, i, &chosen) : AUGMENT_IDENTITY;
        change<FITS>(augment.change, operation, *chosen, from, flip, image, own_plane<FITS>(augment.change),
                     &shared);
        from = image;
        flip = false;
    }
}

template <bool FITS>
static __global__ void __launch_bounds__(CHANGE_BLOCK, CHANGE_BLOCKS)
    apply_kernel(const __grid_constant__ struct change_plan plan, enum augment_operation operation,
                 const __grid_constant__ struct augment_numbers numbers, const uint8_t *from, uint8_t *to)
{
    __shared__ struct change_shared shared;
    const size_t at = (size_t)blockIdx.x * plan.shape.channels * plan.shape.height * plan.shape.width;
    change<FITS>(plan, operation, numbers, from + at, false, to + at, own_plane<FITS>(plan), &shared);
}

/* Prepares changes of up to `images` images. */
static enum status change_open(const struct shape *shape, bool gray, size_t images,
                               struct allocations *allocations, struct change_plan *plan)
{
    const uint32_t words = (shape->width + 3) / 4;
    int device, most;
    *plan = {*shape, shape->channels, divider_of(words), ((shape->height + 2) * (words + 1) + 1) * 4,
             nullptr};
    plan->shape.channels = gray ? 1 : shape->channels;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (shape->width % 4 || plan->plane_bytes + sizeof(struct change_shared) > (size_t)most)
        return allocate(allocations, &plan->planes, images * plan->plane_bytes);
    for (const void *kernel : {(const void *)change_kernel<true>, (const void *)apply_kernel<true>})
        CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)plan->plane_bytes));
    return STATUS_OK;
}

enum status device_augment_apply(const struct shape *shape, bool gray, enum augment_operation operation,
                                 const struct augment_numbers *numbers, uint32_t count, const uint8_t *from,
                                 uint8_t *to, cudaStream_t stream)
{
    struct allocations allocations = {};
    struct change_plan plan;
    TRY(change_open(shape, gray, count, &allocations, &plan));
    auto *kernel = plan.planes ? apply_kernel<false> : apply_kernel<true>;
    kernel<<<count, CHANGE_BLOCK, plan.planes ? 0 : plan.plane_bytes, stream>>>(plan, operation, *numbers,
                                                                                from, to);
    CUDA_TRY_LAUNCH("apply_kernel");
    allocations_free(&allocations);
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

/* Allocates the memory of the crops and resizes of up to `images` images. */
static enum status resize_open(struct allocations *allocations, size_t images, struct device_augment *augment)
{
    const struct augment_plan *plan = &augment->plan;
    const size_t outputs = images * (plan->shape.width + plan->shape.height);
    const uint32_t across = resample_axis_with(plan->canvas.width, plan->shape.width, plan->bicubic).taps;
    const uint32_t down = resample_axis_with(plan->canvas.height, plan->shape.height, plan->bicubic).taps;
    augment->taps = across > down ? across : down;
    choose_band(augment);
    CUDA_TRY(cudaFuncSetAttribute(resize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)(augment->rows * plan->shape.width)));
    TRY(allocate(allocations, &augment->parts, images));
    TRY(allocate(allocations, &augment->inputs, outputs));
    return allocate(allocations, &augment->weights, outputs * augment->taps);
}

enum status device_augment_open(const struct train *train, struct allocations *allocations,
                                struct device_augment *augment)
{
    *augment = {};
    if (!augment_computes(&train->augment) || train->forward_only)
        return STATUS_OK;
    const size_t images = train_part_augmented(train, train_part_max(train));
    TRY(augment_plan(train, &augment->plan));
    augment->partners = train_part_augmented(train, 1) > 1;
    TRY(change_open(&augment->plan.shape, augment->plan.gray, images, allocations, &augment->change));
    if (augment->plan.crop)
        TRY(resize_open(allocations, images, augment));
    return allocate(allocations, &augment->images, images * shape_values(&augment->change.shape));
}

/* Enqueues the crops and resizes of `images` images. */
static enum status resize(const struct device_augment *augment, uint32_t epoch, const uint32_t *numbers,
                          uint32_t count, uint32_t images, const struct device_set *set, cudaStream_t stream)
{
    const struct shape *shape = &augment->plan.shape;
    weights_kernel<<<images, BLOCK, 0, stream>>>(*augment, epoch, numbers);
    CUDA_TRY_LAUNCH("weights_kernel");
    const dim3 blocks(images, (shape->height + augment->band - 1) / augment->band,
                      augment->change.shape.channels);
    resize_kernel<<<blocks, BLOCK, (size_t)augment->rows * shape->width, stream>>>(
        *augment, static_cast<const uint8_t *>(set->values), set->held, count, numbers);
    CUDA_TRY_LAUNCH("resize_kernel");
    return STATUS_OK;
}

enum status device_augment_run(const struct device_augment *augment, uint32_t epoch, const uint32_t *numbers,
                               uint32_t count, struct device_set *set, cudaStream_t stream)
{
    const struct change_plan *change = &augment->change;
    const uint32_t images = augment->partners ? 2 * count : count;
    if (!augment->images || count == 0)
        return STATUS_OK;
    if (augment->plan.crop)
        TRY(resize(augment, epoch, numbers, count, images, set, stream));
    if (augment->plan.operations > 0 || !augment->plan.crop) {
        auto *kernel = change->planes ? change_kernel<false> : change_kernel<true>;
        kernel<<<images, CHANGE_BLOCK, change->planes ? 0 : change->plane_bytes, stream>>>(
            *augment, static_cast<const uint8_t *>(set->values), set->held, count, epoch, numbers);
        CUDA_TRY_LAUNCH("change_kernel");
    }
    set->values = augment->images;
    set->held = {true, augment->partners, count, 0};
    set->gray = augment->plan.gray;
    return STATUS_OK;
}
