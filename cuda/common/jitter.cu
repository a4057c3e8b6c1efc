/* The first kernel draws the changes of each image. If contrast may change, the second adds up the gray of
 * each frame. The last one reads each pixel once, applies all changes in registers, and writes it once. With
 * blur, a block computes a tile: it also reads the pixels around the tile, blurs columns from shared memory
 * to shared memory, then rows. */
#include "common/jitter.cuh"

#include "common/check.cuh"

#define BLOCK       256
#define LANES       32
#define TILE_WIDTH  64
#define TILE_HEIGHT 32
#define RUN         8  /* adjacent outputs of a thread: each value that it loads is used for all of them */
#define SUM_WORDS   16 /* vectors of pixels that a thread adds up */
static_assert(TILE_WIDTH / RUN * TILE_HEIGHT == BLOCK, "one thread for each run of a tile");

/* `N` adjacent bytes in one access to memory. */
template <int N> struct alignas(N) bytes_of {
    uint8_t at[N];
};

/* ---- Random numbers ---- */

/* One block per image. */
static __global__ void draw_kernel(const __grid_constant__ struct jitter_batch batch, uint32_t epoch,
                                   const uint32_t *numbers)
{
    __shared__ struct jitter_image image;
    __shared__ double gauss[JITTER_RADIUS_MAX + 1];
    const uint32_t radius = batch.jitter.kernel / 2, t = threadIdx.x, depth = batch.shape.depth;
    if (t == 0)
        image.drawn = jitter_draw(&batch.jitter, batch.seed, epoch, numbers[blockIdx.x]);
    for (uint32_t frame = t; frame < depth; frame += blockDim.x)
        batch.sums[static_cast<size_t>(blockIdx.x) * depth + frame] = 0;
    __syncthreads();
    if (image.drawn.blurs && t <= radius)
        gauss[t] = jitter_gauss(image.drawn.sigma, t);
    __syncthreads();
    if (t != 0)
        return;
    if (image.drawn.blurs)
        jitter_round_weights(gauss, radius, image.weights);
    batch.images[blockIdx.x] = image;
}

/* ---- Colours ---- */

/* Applies the steps before `end` to `N` pixels. */
template <int C, int N>
static __device__ __forceinline__ void change_steps(const struct jitter_drawn &drawn, uint32_t end,
                                                    float mean, struct jitter_pixel *pixels)
{
    for (uint32_t i = 0; i < end; i++) {
        const enum jitter_step step = static_cast<enum jitter_step>(drawn.order[i]);
        const float factor = drawn.factors[step];
#pragma unroll
        for (int n = 0; n < N; n++)
            jitter_change(step, factor, C, mean, &pixels[n]);
    }
}

/* Applies the changes of colour to `N` pixels. */
template <int C, int N>
static __device__ __forceinline__ void change_all(const struct jitter_drawn &drawn, float mean,
                                                  struct jitter_pixel *pixels)
{
    change_steps<C, N>(drawn, drawn.steps, mean, pixels);
    if constexpr (C > 1)
        for (int n = 0; drawn.gray && n < N; n++) {
            const float gray = jitter_gray(&pixels[n], C);
            for (int c = 0; c < C; c++)
                pixels[n].of[c] = gray;
        }
}

/* Loads `N` adjacent pixels. `plane`: values between two channels. */
template <int C, int N>
static __device__ __forceinline__ void load_pixels(const uint8_t *from, size_t plane,
                                                   struct jitter_pixel *pixels)
{
#pragma unroll
    for (int c = 0; c < C; c++) {
        const bytes_of<N> values = *reinterpret_cast<const bytes_of<N> *>(from + c * plane);
#pragma unroll
        for (int n = 0; n < N; n++)
            pixels[n].of[c] = augment_float(values.at[n]);
    }
}

/* Where the pixels of a frame are in the output: the index of channel 0 of its first pixel, and the distance
 * of two channels and of two pixels. */
struct target {
    size_t begin, channel, pixel;
};

/* Stores `N` adjacent pixels. `to` points to channel 0 of the first one. */
template <int C, int N>
static __device__ __forceinline__ void store_pixels(const struct jitter_pixel *pixels,
                                                    const struct target &target, uint8_t *to)
{
    if (C > 1 && target.pixel == C) {
        bytes_of<N> words[C];
#pragma unroll
        for (int i = 0; i < C * N; i++)
            words[i / N].at[i % N] = static_cast<uint8_t>(augment_nearest(pixels[i / C].of[i % C]));
#pragma unroll
        for (int i = 0; i < C; i++)
            reinterpret_cast<bytes_of<N> *>(to)[i] = words[i];
        return;
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        bytes_of<N> values;
#pragma unroll
        for (int n = 0; n < N; n++)
            values.at[n] = static_cast<uint8_t>(augment_nearest(pixels[n].of[c]));
        *reinterpret_cast<bytes_of<N> *>(to + c * target.channel) = values;
    }
}

/* Changes `N` adjacent pixels. */
template <int C, int N>
static __device__ __forceinline__ void change_pixels(const struct jitter_drawn &drawn, float mean,
                                                     const uint8_t *from, size_t plane,
                                                     const struct target &target, uint8_t *to)
{
    struct jitter_pixel pixels[N];
    load_pixels<C, N>(from, plane, pixels);
    change_all<C, N>(drawn, mean, pixels);
    store_pixels<C, N>(pixels, target, to);
}

/* Returns the index of the first value of a frame in the input. */
static __device__ __forceinline__ size_t frame_begin(const struct shape &shape, uint32_t frame)
{
    const uint32_t image = frame / shape.depth;
    return (static_cast<size_t>(image) * shape.channels * shape.depth + (frame - image * shape.depth)) *
           shape.height * shape.width;
}

static __device__ __forceinline__ struct target target_of(const struct jitter_batch &batch, uint32_t frame)
{
    const struct shape &shape = batch.shape;
    const size_t pixels = static_cast<size_t>(shape.height) * shape.width;
    if (batch.order == JITTER_PLANES)
        return {frame_begin(shape, frame), shape.depth * pixels, 1};
    const size_t begin = frame * shape.channels * pixels;
    return batch.order == JITTER_FRAMES ? target{begin, pixels, 1} : target{begin, 1, shape.channels};
}

/* Values that all threads of a block read. */
struct block_changes {
    struct jitter_drawn drawn;
    float mean; /* the mean gray of the frame, if its contrast changes */
};

/* One thread reads the changes of a frame, and divides the sum. All threads of the block call this. */
static __device__ __forceinline__ void read_changes(const struct jitter_batch &batch, uint32_t frame,
                                                    struct block_changes *changes)
{
    if (threadIdx.x == 0) {
        changes->drawn = batch.images[frame / batch.shape.depth].drawn;
        changes->mean = jitter_mean(batch.sums[frame], batch.shape.height * batch.shape.width);
    }
    __syncthreads();
}

/* The block index is (part of a frame, frame). */
template <int C, int N>
static __global__ void __launch_bounds__(BLOCK)
    sum_kernel(const __grid_constant__ struct jitter_batch batch, const uint8_t *from)
{
    __shared__ struct jitter_drawn drawn;
    const uint32_t frame = blockIdx.y, pixels = batch.shape.height * batch.shape.width;
    const size_t plane = static_cast<size_t>(batch.shape.depth) * pixels;
    if (threadIdx.x == 0)
        drawn = batch.images[frame / batch.shape.depth].drawn;
    __syncthreads();
    if (drawn.contrast == drawn.steps)
        return;
    uint32_t sum = 0;
    from += frame_begin(batch.shape, frame);
    for (uint32_t k = 0; k < SUM_WORDS; k++) {
        const uint32_t at = ((blockIdx.x * SUM_WORDS + k) * BLOCK + threadIdx.x) * N;
        if (at >= pixels)
            break;
        struct jitter_pixel values[N];
        load_pixels<C, N>(from + at, plane, values);
        change_steps<C, N>(drawn, drawn.contrast, 0, values);
#pragma unroll
        for (int n = 0; n < N; n++)
            sum += static_cast<uint32_t>(augment_nearest(jitter_gray(&values[n], C)));
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % LANES == 0 && sum > 0)
        atomicAdd(&batch.sums[frame], static_cast<unsigned long long>(sum));
}

/* The block index is (part of a frame, frame). */
template <int C, int N>
static __global__ void __launch_bounds__(BLOCK)
    change_colors_kernel(const __grid_constant__ struct jitter_batch batch, const uint8_t *from, uint8_t *to)
{
    __shared__ struct block_changes changes;
    const uint32_t frame = blockIdx.y, pixels = batch.shape.height * batch.shape.width;
    const uint32_t at = (blockIdx.x * BLOCK + threadIdx.x) * N;
    const struct target target = target_of(batch, frame);
    read_changes(batch, frame, &changes);
    if (at < pixels)
        change_pixels<C, N>(changes.drawn, changes.mean, from + frame_begin(batch.shape, frame) + at,
                            static_cast<size_t>(batch.shape.depth) * pixels, target,
                            to + target.begin + at * target.pixel);
}

/* ---- Blur ---- */

/* The shared memory of a block: the tile and the pixels around it as bytes, per channel; and rows of a
 * channel after the columns were blurred. */
struct blur_layout {
    uint32_t radius, width, height; /* with the pixels around the tile */
    uint32_t row; /* values from one row to the next: an odd number of words, so that threads
                     of a warp that read different rows access different banks */
};

static __host__ __device__ __forceinline__ struct blur_layout blur_layout_of(uint32_t radius)
{
    const uint32_t width = TILE_WIDTH + 2 * radius;
    return {radius, width, TILE_HEIGHT + 2 * radius, 2 * (width / 2 | 1)};
}

static __host__ __device__ __forceinline__ uint32_t blur_plane_bytes(const struct blur_layout &layout)
{
    return (layout.width * layout.height + 3) / 4 * 4;
}

/* Adds up the products of RUN adjacent windows of values, which are `step` values apart in memory, with the
 * weights. A value is loaded once. */
template <class T>
static __device__ __forceinline__ void add_products(const T *from, uint32_t step, const uint16_t *weights,
                                                    uint32_t radius, uint32_t *sums)
{
    uint32_t window[RUN];
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        window[j] = from[j * step];
        sums[j] = 0;
    }
#pragma unroll 8
    for (uint32_t t = 0; t <= 2 * radius; t++) {
        const uint32_t weight = weights[t < radius ? radius - t : t - radius];
#pragma unroll
        for (int j = 0; j < RUN; j++)
            sums[j] += weight * window[j];
#pragma unroll
        for (int j = 0; j + 1 < RUN; j++)
            window[j] = window[j + 1];
        if (t < 2 * radius)
            window[RUN - 1] = from[(t + RUN) * step];
    }
}

/* Loads the pixels of a tile and around it, and changes their colours. All threads of the block call this. */
template <int C>
static __device__ void load_tile(const struct shape &shape, const struct blur_layout &layout,
                                 const struct jitter_drawn &drawn, float mean, const uint8_t *from,
                                 size_t plane, uint32_t left, uint32_t top, uint8_t *tile)
{
    const uint32_t apart = blur_plane_bytes(layout);
    for (uint32_t i = threadIdx.x; i < layout.width * layout.height; i += BLOCK) {
        const uint32_t row = i / layout.width, column = i - row * layout.width;
        const int32_t radius = static_cast<int32_t>(layout.radius);
        const uint32_t y = jitter_reflected(static_cast<int32_t>(top + row) - radius, shape.height);
        const uint32_t x = jitter_reflected(static_cast<int32_t>(left + column) - radius, shape.width);
        struct jitter_pixel pixel;
        load_pixels<C, 1>(from + y * shape.width + x, plane, &pixel);
        change_all<C, 1>(drawn, mean, &pixel);
        store_pixels<C, 1>(&pixel, {0, apart, 1}, tile + i);
    }
    __syncthreads();
}

/* Blurs a channel of a tile in shared memory. The result, TILE_WIDTH bytes per row, takes the place of the
 * tile. All threads of the block call this. */
static __device__ void blur_tile(const struct blur_layout &layout, const uint16_t *weights, uint8_t *tile,
                                 uint16_t *rows)
{
    uint32_t sums[RUN];
    for (uint32_t i = threadIdx.x; i < layout.width * (TILE_HEIGHT / RUN); i += BLOCK) {
        const uint32_t group = i / layout.width, x = i - group * layout.width;
        add_products(tile + group * RUN * layout.width + x, layout.width, weights, layout.radius, sums);
#pragma unroll
        for (int j = 0; j < RUN; j++)
            rows[(group * RUN + j) * layout.row + x] = jitter_column(sums[j]);
    }
    __syncthreads();
    const uint32_t y = threadIdx.x % TILE_HEIGHT, x = threadIdx.x / TILE_HEIGHT * RUN;
    add_products(rows + y * layout.row + x, 1, weights, layout.radius, sums);
#pragma unroll
    for (int j = 0; j < RUN; j++)
        tile[y * TILE_WIDTH + x + j] = jitter_row(sums[j]);
    __syncthreads();
}

/* The block index is (tile, frame). Images without blur are only changed in colour. */
template <int C, int N>
static __global__ void __launch_bounds__(BLOCK)
    blur_kernel(const __grid_constant__ struct jitter_batch batch, const uint8_t *from, uint8_t *to)
{
    extern __shared__ uint32_t memory[];
    const struct shape &shape = batch.shape;
    const uint32_t across = (shape.width + TILE_WIDTH - 1) / TILE_WIDTH, frame = blockIdx.y;
    const uint32_t top = blockIdx.x / across * TILE_HEIGHT, left = blockIdx.x % across * TILE_WIDTH;
    const struct jitter_image &image = batch.images[frame / shape.depth];
    __shared__ struct block_changes changes;
    const size_t plane = static_cast<size_t>(shape.depth) * shape.height * shape.width;
    const struct target target = target_of(batch, frame);
    from += frame_begin(shape, frame);
    to += target.begin;
    read_changes(batch, frame, &changes);
    if (!changes.drawn.blurs) {
        for (uint32_t i = threadIdx.x; i < TILE_WIDTH / N * TILE_HEIGHT; i += BLOCK) {
            const uint32_t y = top + i / (TILE_WIDTH / N), x = left + i % (TILE_WIDTH / N) * N;
            const size_t at = static_cast<size_t>(y) * shape.width + x;
            if (y < shape.height && x < shape.width)
                change_pixels<C, N>(changes.drawn, changes.mean, from + at, plane, target,
                                    to + at * target.pixel);
        }
        return;
    }
    __shared__ uint16_t weights[JITTER_RADIUS_MAX + 1];
    const struct blur_layout layout = blur_layout_of(batch.jitter.kernel / 2);
    uint8_t *tile = reinterpret_cast<uint8_t *>(memory);
    uint16_t *rows = reinterpret_cast<uint16_t *>(tile + C * blur_plane_bytes(layout));
    if (threadIdx.x <= layout.radius)
        weights[threadIdx.x] = image.weights[threadIdx.x];
    load_tile<C>(shape, layout, changes.drawn, changes.mean, from, plane, left, top, tile);
    for (int c = 0; c < C; c++, tile += blur_plane_bytes(layout)) {
        blur_tile(layout, weights, tile, rows);
        for (uint32_t i = threadIdx.x; i < TILE_WIDTH / N * TILE_HEIGHT; i += BLOCK) {
            const uint32_t row = i / (TILE_WIDTH / N), column = i % (TILE_WIDTH / N) * N;
            const size_t at = static_cast<size_t>(top + row) * shape.width + left + column;
            const uint8_t *blurred = tile + row * TILE_WIDTH + column;
            if (top + row >= shape.height || left + column >= shape.width)
                continue;
            if (target.pixel == 1)
                *reinterpret_cast<bytes_of<N> *>(to + c * target.channel + at) =
                    *reinterpret_cast<const bytes_of<N> *>(blurred);
            else
                for (int n = 0; n < N; n++)
                    to[(at + n) * target.pixel + c] = blurred[n];
        }
    }
}

/* ---- A batch ---- */

#define IMAGE_BYTES(count) (((count) * sizeof(struct jitter_image) + 15) / 16 * 16)

size_t jitter_batch_bytes(const struct shape *shape, uint32_t count)
{
    return IMAGE_BYTES(static_cast<size_t>(count)) +
           static_cast<size_t>(count) * shape->depth * sizeof(unsigned long long);
}

/* CUDA loads kernels at their first launch, and must not do so while another thread captures a stream. */
template <int C, int N> static enum status load_kernels(void)
{
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, draw_kernel));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, sum_kernel<C, N>));
    CUDA_TRY(cudaFuncGetAttributes(&attributes, change_colors_kernel<C, N>));
    return CUDA_STATUS(cudaFuncGetAttributes(&attributes, blur_kernel<C, N>));
}

enum status jitter_batch_open(const struct jitter *jitter, const struct shape *shape, uint64_t seed,
                              uint32_t count, void *memory, struct jitter_batch *batch)
{
    const bool gray = shape->channels == 1, words = shape->width % 4 == 0;
    *batch = {*jitter, *shape, seed, static_cast<struct jitter_image *>(memory), nullptr, JITTER_PLANES};
    batch->sums = reinterpret_cast<unsigned long long *>(static_cast<uint8_t *>(memory) +
                                                         IMAGE_BYTES(static_cast<size_t>(count)));
    return gray ? (words ? load_kernels<1, 4>() : load_kernels<1, 1>())
                : (words ? load_kernels<3, 4>() : load_kernels<3, 1>());
}

template <int C, int N>
static enum status run(const struct jitter_batch *batch, uint32_t frames, const uint8_t *from, uint8_t *to,
                       cudaStream_t stream)
{
    const struct shape *shape = &batch->shape;
    const uint32_t vectors = shape->height * shape->width / N;
    const auto blocks = [frames](uint32_t count, uint32_t each) {
        return dim3((count + each - 1) / each, frames);
    };
    if (jitter_step_on(&batch->jitter, JITTER_CONTRAST)) {
        sum_kernel<C, N><<<blocks(vectors, SUM_WORDS * BLOCK), BLOCK, 0, stream>>>(*batch, from);
        CUDA_TRY_LAUNCH("sum_kernel");
    }
    if (batch->jitter.blur <= 0) {
        change_colors_kernel<C, N><<<blocks(vectors, BLOCK), BLOCK, 0, stream>>>(*batch, from, to);
        return CUDA_LAUNCHED("change_colors_kernel");
    }
    const struct blur_layout layout = blur_layout_of(batch->jitter.kernel / 2);
    const size_t shared = C * blur_plane_bytes(layout) + TILE_HEIGHT * layout.row * sizeof(uint16_t);
    const uint32_t tiles =
        (shape->width + TILE_WIDTH - 1) / TILE_WIDTH * ((shape->height + TILE_HEIGHT - 1) / TILE_HEIGHT);
    blur_kernel<C, N><<<blocks(tiles, 1), BLOCK, shared, stream>>>(*batch, from, to);
    return CUDA_LAUNCHED("blur_kernel");
}

#define FRAMES_MAX 65535u /* the largest grid along y */

enum status jitter_batch_run(const struct jitter_batch *batch, uint32_t epoch, const uint32_t *numbers,
                             uint32_t count, const uint8_t *from, uint8_t *to, cudaStream_t stream)
{
    const struct shape *shape = &batch->shape;
    const bool words = shape->width % 4 == 0;
    const size_t values = shape_values(shape);
    if (count == 0)
        return STATUS_OK;
    if (shape->depth > FRAMES_MAX)
        return status_set(STATUS_USAGE, "clips of %u frames are too long to change their colours on a GPU",
                          shape->depth);
    auto *launch = shape->channels == 1 ? (words ? run<1, 4> : run<1, 1>) : (words ? run<3, 4> : run<3, 1>);
    draw_kernel<<<count, 2 * LANES, 0, stream>>>(*batch, epoch, numbers);
    CUDA_TRY_LAUNCH("draw_kernel");
    struct jitter_batch part = *batch;
    for (uint32_t most = FRAMES_MAX / shape->depth, begin = 0; begin < count; begin += most) {
        const uint32_t images = count - begin < most ? count - begin : most;
        part.images = batch->images + begin;
        part.sums = batch->sums + static_cast<size_t>(begin) * shape->depth;
        TRY(launch(&part, images * shape->depth, from + begin * values, to + begin * values, stream));
    }
    return STATUS_OK;
}
