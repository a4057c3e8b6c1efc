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

/* Applies the changes of colour to a pixel. */
template <int C>
static __device__ __forceinline__ void change_pixel(const struct jitter_drawn &drawn, float mean,
                                                    struct jitter_pixel *pixel)
{
    jitter_steps(&drawn, 0, drawn.steps, C, mean, pixel);
    if (C == 1 || !drawn.gray)
        return;
    const float gray = jitter_gray(pixel, C);
    for (int c = 0; c < C; c++)
        pixel->of[c] = gray;
}

/* Changes `N` adjacent pixels. `plane`: values between two channels. */
template <int C, int N>
static __device__ __forceinline__ void change_pixels(const struct jitter_drawn &drawn, float mean,
                                                     const uint8_t *from, size_t plane, uint8_t *to)
{
    bytes_of<N> values[C];
#pragma unroll
    for (int c = 0; c < C; c++)
        values[c] = *reinterpret_cast<const bytes_of<N> *>(from + c * plane);
#pragma unroll
    for (int i = 0; i < N; i++) {
        struct jitter_pixel pixel;
#pragma unroll
        for (int c = 0; c < C; c++)
            pixel.of[c] = augment_float(values[c].at[i]);
        change_pixel<C>(drawn, mean, &pixel);
#pragma unroll
        for (int c = 0; c < C; c++)
            values[c].at[i] = static_cast<uint8_t>(augment_nearest(pixel.of[c]));
    }
#pragma unroll
    for (int c = 0; c < C; c++)
        *reinterpret_cast<bytes_of<N> *>(to + c * plane) = values[c];
}

/* Returns the index of the first value of a frame. */
static __device__ __forceinline__ size_t frame_begin(const struct shape &shape, uint32_t frame)
{
    const uint32_t image = frame / shape.depth;
    return (static_cast<size_t>(image) * shape.channels * shape.depth + (frame - image * shape.depth)) *
           shape.height * shape.width;
}

/* Returns the mean gray of a frame, if its contrast changes. One thread divides. All threads of the block
 * call this. */
static __device__ __forceinline__ float mean_of(const struct jitter_batch &batch,
                                                const struct jitter_drawn &drawn, uint32_t frame)
{
    __shared__ float mean;
    if (drawn.contrast == drawn.steps)
        return 0;
    if (threadIdx.x == 0)
        mean = jitter_mean(batch.sums[frame], batch.shape.height * batch.shape.width);
    __syncthreads();
    return mean;
}

/* The block index is (part of a frame, frame). */
template <int C, int N>
static __global__ void __launch_bounds__(BLOCK)
    sum_kernel(const __grid_constant__ struct jitter_batch batch, const uint8_t *from)
{
    const uint32_t frame = blockIdx.y, pixels = batch.shape.height * batch.shape.width;
    const struct jitter_drawn drawn = batch.images[frame / batch.shape.depth].drawn;
    if (drawn.contrast == drawn.steps)
        return;
    const size_t plane = static_cast<size_t>(batch.shape.depth) * pixels;
    uint32_t sum = 0;
    from += frame_begin(batch.shape, frame);
    for (uint32_t k = 0; k < SUM_WORDS; k++) {
        const uint32_t at = ((blockIdx.x * SUM_WORDS + k) * BLOCK + threadIdx.x) * N;
        if (at >= pixels)
            break;
        bytes_of<N> values[C];
#pragma unroll
        for (int c = 0; c < C; c++)
            values[c] = *reinterpret_cast<const bytes_of<N> *>(from + c * plane + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            struct jitter_pixel pixel;
#pragma unroll
            for (int c = 0; c < C; c++)
                pixel.of[c] = augment_float(values[c].at[i]);
            jitter_steps(&drawn, 0, drawn.contrast, C, 0, &pixel);
            sum += static_cast<uint32_t>(augment_nearest(jitter_gray(&pixel, C)));
        }
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
    const uint32_t frame = blockIdx.y, pixels = batch.shape.height * batch.shape.width;
    const uint32_t at = (blockIdx.x * BLOCK + threadIdx.x) * N;
    const struct jitter_drawn drawn = batch.images[frame / batch.shape.depth].drawn;
    const size_t begin = frame_begin(batch.shape, frame) + at;
    const float mean = mean_of(batch, drawn, frame);
    if (at < pixels)
        change_pixels<C, N>(drawn, mean, from + begin, static_cast<size_t>(batch.shape.depth) * pixels,
                            to + begin);
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
#pragma unroll
        for (int c = 0; c < C; c++)
            pixel.of[c] = augment_float(from[c * plane + y * shape.width + x]);
        change_pixel<C>(drawn, mean, &pixel);
#pragma unroll
        for (int c = 0; c < C; c++)
            tile[c * apart + i] = static_cast<uint8_t>(augment_nearest(pixel.of[c]));
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
    const struct jitter_drawn drawn = image.drawn;
    const float mean = mean_of(batch, drawn, frame);
    const size_t plane = static_cast<size_t>(shape.depth) * shape.height * shape.width;
    const size_t begin = frame_begin(shape, frame);
    from += begin;
    to += begin;
    if (!drawn.blurs) {
        for (uint32_t i = threadIdx.x; i < TILE_WIDTH / N * TILE_HEIGHT; i += BLOCK) {
            const uint32_t y = top + i / (TILE_WIDTH / N), x = left + i % (TILE_WIDTH / N) * N;
            const size_t at = static_cast<size_t>(y) * shape.width + x;
            if (y < shape.height && x < shape.width)
                change_pixels<C, N>(drawn, mean, from + at, plane, to + at);
        }
        return;
    }
    __shared__ uint16_t weights[JITTER_RADIUS_MAX + 1];
    const struct blur_layout layout = blur_layout_of(batch.jitter.kernel / 2);
    uint8_t *tile = reinterpret_cast<uint8_t *>(memory);
    uint16_t *rows = reinterpret_cast<uint16_t *>(tile + C * blur_plane_bytes(layout));
    if (threadIdx.x <= layout.radius)
        weights[threadIdx.x] = image.weights[threadIdx.x];
    load_tile<C>(shape, layout, drawn, mean, from, plane, left, top, tile);
    for (int c = 0; c < C; c++, tile += blur_plane_bytes(layout)) {
        blur_tile(layout, weights, tile, rows);
        for (uint32_t i = threadIdx.x; i < TILE_WIDTH / N * TILE_HEIGHT; i += BLOCK) {
            const uint32_t row = i / (TILE_WIDTH / N), column = i % (TILE_WIDTH / N) * N;
            if (top + row < shape.height && left + column < shape.width)
                *reinterpret_cast<bytes_of<N> *>(
                    to + c * plane + static_cast<size_t>(top + row) * shape.width + left + column) =
                    *reinterpret_cast<const bytes_of<N> *>(tile + row * TILE_WIDTH + column);
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

enum status jitter_batch_open(const struct jitter *jitter, const struct shape *shape, uint64_t seed,
                              uint32_t count, void *memory, struct jitter_batch *batch)
{
    *batch = {*jitter, *shape, seed, static_cast<struct jitter_image *>(memory), nullptr};
    batch->sums = reinterpret_cast<unsigned long long *>(static_cast<uint8_t *>(memory) +
                                                         IMAGE_BYTES(static_cast<size_t>(count)));
    cudaFuncAttributes attributes; /* CUDA loads kernels at their first launch, not during a capture */
    CUDA_TRY(cudaFuncGetAttributes(&attributes, draw_kernel));
    return STATUS_OK;
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
