/* Computes the images of a batch from its stored samples, with at most three kernels. With crops, the first
 * computes the weights of each resize, and the second crops, resizes and flips. The last kernel has one block
 * per image, which applies the operations of RandAugment. Without crops, this last kernel is the only one: it
 * reads the stored samples, and also flips them. For gray images, the kernels compute only one channel. The
 * kernels of common/jitter.cu then change the colours. */
#include "common/check.cuh"
#include "train/augment.cuh"

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
        part.bicubic = augment_bicubic(&augment.plan, epoch, numbers[blockIdx.x]);
        augment.parts[blockIdx.x] = part;
    }
    __syncthreads();
    const struct resample_axis across = resample_axis_with(part.box.width, width, part.bicubic);
    const struct resample_axis down =
        resample_axis_with(part.box.height, augment.plan.shape.height, part.bicubic);
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

/* The block index is (entry, band, plane). `count`: samples of the batch, without their partners. */
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
    const uint32_t planes = canvas.channels * canvas.depth;
    const uint8_t *from = stored + (sample * planes + blockIdx.z % planes) * plane +
                          (size_t)(part.box.top + first) * canvas.width + part.box.left;
    uint32_t bits = resample_axis_with(part.box.width, width, part.bicubic).bits;
    const uint32_t groups = (rows + RESIZE_ROWS - 1) / RESIZE_ROWS;
    for (uint32_t i = threadIdx.x; i < groups * width; i += BLOCK) {
        const uint32_t group = i / width, x = i - group * width;
        resize_column(from + across[x].first, canvas.width, group * RESIZE_ROWS, rows,
                      across_weights + (size_t)x * augment.taps, across[x].count, bits, width, middle + x);
    }
    __syncthreads();
    bits = resample_axis_with(part.box.height, shape.height, part.bicubic).bits;
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

/* ---- RandAugment: the operations ---- */

/* The threads of a block apply an operation to an image, with the same bits as augment_apply() on the host.
 *
 * An operation accesses values in device memory as words: four adjacent values of a row at a time. It writes
 * each value once, and reads it once, or twice if it first counts or adds up the values of a channel.
 * Operations that read neighbours of a pixel first copy the plane to shared memory. The input and the output
 * may therefore be the same image.
 *
 * FITS: rows are whole words, and a plane fits into shared memory. The kernels of other images load and store
 * single values, and copy planes to device memory. Separate kernels are needed, because the compiler would
 * interleave both kinds of loads. */

#define CHANGE_BLOCK  512 /* threads per block */
#define CHANGE_BLOCKS 2   /* minimum number of blocks per multiprocessor: limits a thread to 64 registers */
#define CHANGE_AHEAD  4   /* loads that a thread issues before it uses the first */
#define LANES         32
#define TABLE_WARPS   (AUGMENT_LEVELS / LANES)

/* Shared memory of a block, in addition to the plane. */
struct change_shared {
    uint32_t sums[AUGMENT_CHANNELS_MAX]; /* per channel of the network's image: sum of its values */
    uint32_t counts[AUGMENT_LEVELS];     /* how often each value occurs in a channel */
    uint32_t inside[TABLE_WARPS];        /* sums of the counts of LANES adjacent values */
    uint32_t least, most;                /* smallest and largest value of a channel */
    uint8_t table[AUGMENT_LEVELS];
    enum augment_operation operation; /* that the block applies, and its numbers */
    struct augment_numbers numbers;
};

/* ---- Words ---- */

/* Returns word `i` of a plane, with the value of the leftmost pixel in its lowest byte. Values to the right
 * of the image are those of `outside`. With `flip`, the plane is mirrored. */
template <bool FITS>
static __device__ __forceinline__ uint32_t load_word(const struct change_plan &plan, const uint8_t *plane,
                                                     bool flip, uint32_t i, uint32_t outside = 0)
{
    const uint32_t width = plan.shape.width, y = plan.across.quotient(i), x = 4 * (i - y * plan.across.by);
    const uint8_t *row = plane + y * width;
    if (FITS) {
        const uint32_t word = *reinterpret_cast<const uint32_t *>(row + (flip ? width - 4 - x : x));
        return flip ? __byte_perm(word, 0, 0x0123) : word;
    }
    uint32_t word = 0;
    for (uint32_t k = 0; k < 4; k++)
        word |= x + k < width ? (uint32_t)row[flip ? width - 1 - x - k : x + k] << 8 * k
                              : outside & 255u << 8 * k;
    return word;
}

template <bool FITS>
static __device__ __forceinline__ void store_word(const struct change_plan &plan, uint8_t *plane, uint32_t i,
                                                  uint32_t word)
{
    const uint32_t width = plan.shape.width, y = plan.across.quotient(i), x = 4 * (i - y * plan.across.by);
    uint8_t *row = plane + y * width;
    if (FITS)
        *reinterpret_cast<uint32_t *>(row + x) = word;
    else
        for (uint32_t k = 0; k < 4 && x + k < width; k++)
            row[x + k] = (uint8_t)(word >> 8 * k);
}

static __device__ __forceinline__ uint32_t byte_of(uint32_t word, uint32_t k)
{
    return word >> 8 * k & 255u;
}

/* Calls use(i, load(i)) for this thread's share of `words` words, with AHEAD loads in flight. */
template <uint32_t AHEAD = CHANGE_AHEAD, class Load, class Use>
static __device__ __forceinline__ void for_words(uint32_t words, Load load, Use use)
{
    for (uint32_t begin = threadIdx.x; begin < words; begin += AHEAD * CHANGE_BLOCK) {
        decltype(load(0u)) loaded[AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (begin + k * CHANGE_BLOCK < words)
                loaded[k] = load(begin + k * CHANGE_BLOCK);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (begin + k * CHANGE_BLOCK < words)
                use(begin + k * CHANGE_BLOCK, loaded[k]);
    }
}

/* ---- Tables ---- */

/* Adds up the values of each channel. All channels of a gray image have the same sum. */
template <bool FITS>
static __device__ void sum_values(const struct change_plan &plan, const uint8_t *image,
                                  struct change_shared *shared)
{
    const uint32_t plane = plan.shape.height * plan.shape.width, words = plan.shape.height * plan.across.by;
    if (threadIdx.x < AUGMENT_CHANNELS_MAX)
        shared->sums[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t c = 0; c < plan.shape.channels; c++) {
        uint32_t sum = 0;
        for_words(
            words, [=, &plan](uint32_t i) { return load_word<FITS>(plan, image + c * plane, false, i); },
            [&](uint32_t, uint32_t word) { sum = __dp4a(word, 0x01010101u, sum); });
        sum = __reduce_add_sync(0xffffffffu, sum);
        if (threadIdx.x % LANES == 0)
            for (uint32_t equal = c; equal < plan.channels; equal += plan.shape.channels)
                atomicAdd(&shared->sums[equal], sum);
    }
    __syncthreads();
}

/* Counts the values of a plane. A thread adds a run of equal values with one atomic operation, because many
 * images are mostly black. */
template <bool FITS>
static __device__ void count_values(const struct change_plan &plan, const uint8_t *plane,
                                    struct change_shared *shared)
{
    const uint32_t width = plan.shape.width;
    uint32_t last = 0, run = 0;
    if (threadIdx.x < AUGMENT_LEVELS)
        shared->counts[threadIdx.x] = 0;
    __syncthreads();
    for_words(
        plan.shape.height * plan.across.by,
        [=, &plan](uint32_t i) { return load_word<FITS>(plan, plane, false, i); },
        [&](uint32_t i, uint32_t word) {
            const uint32_t x = 4 * (i - plan.across.quotient(i) * plan.across.by);
            for (uint32_t k = 0; k < 4 && (FITS || x + k < width); k++) {
                const uint32_t value = byte_of(word, k);
                if (value != last && run > 0) {
                    atomicAdd(&shared->counts[last], run);
                    run = 0;
                }
                last = value;
                run++;
            }
        });
    if (run > 0)
        atomicAdd(&shared->counts[last], run);
    __syncthreads();
}

/* Computes the table of a channel. With augment_counts(), shared->counts has the counts of its values; for
 * contrast, shared->sums has the sums of all channels. */
static __device__ void make_table(const struct change_plan &plan, enum augment_operation operation,
                                  const struct augment_numbers &numbers, struct change_shared *shared)
{
    const uint32_t value = threadIdx.x, lane = value % LANES, pixels = plan.shape.height * plan.shape.width;
    struct augment_channel channel = {0, 0, 0, 0};
    uint32_t below = 0;
    if (value == 0) {
        shared->least = AUGMENT_LEVELS;
        shared->most = 0;
    }
    __syncthreads();
    if (operation == AUGMENT_CONTRAST)
        channel.mean = augment_mean(shared->sums, plan.channels, pixels);
    else if (augment_counts(operation)) {
        const uint32_t count = value < AUGMENT_LEVELS ? shared->counts[value] : 0;
        uint32_t inside = count; /* becomes the sum of the counts of the lanes up to this one */
        for (uint32_t distance = 1; distance < LANES; distance *= 2) {
            const uint32_t other = __shfl_up_sync(0xffffffffu, inside, distance);
            inside += lane >= distance ? other : 0;
        }
        if (value < AUGMENT_LEVELS && lane == LANES - 1)
            shared->inside[value / LANES] = inside;
        if (count > 0) {
            atomicMin(&shared->least, value);
            atomicMax(&shared->most, value);
        }
        __syncthreads();
        below = inside - count;
        for (uint32_t warp = 0; warp < value / LANES && warp < TABLE_WARPS; warp++)
            below += shared->inside[warp];
        channel.least = shared->least;
        channel.most = shared->most;
        channel.step = augment_equalize_step(pixels, shared->counts[channel.most]);
    }
    if (value < AUGMENT_LEVELS)
        shared->table[value] = augment_entry(operation, &numbers, &channel, value, below);
    __syncthreads();
}

/* Replaces the four values of a word by entries of the table. */
static __device__ __forceinline__ uint32_t mapped(const uint8_t *table, uint32_t word)
{
    uint32_t result = 0;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        result |= (uint32_t)table[byte_of(word, k)] << 8 * k;
    return result;
}

/* ---- Color ---- */

template <bool FITS>
static __device__ void change_color(const struct change_plan &plan, float factor, const uint8_t *from,
                                    bool flip, uint8_t *to)
{
    const uint32_t plane = plan.shape.height * plan.shape.width;
    for_words<1>(
        plan.shape.height * plan.across.by,
        [=, &plan](uint32_t i) {
            return make_uint3(load_word<FITS>(plan, from, flip, i),
                              load_word<FITS>(plan, from + plane, flip, i),
                              load_word<FITS>(plan, from + 2 * plane, flip, i));
        },
        [=, &plan](uint32_t i, uint3 words) {
            uint32_t red = 0, green = 0, blue = 0;
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                const float r = augment_float(byte_of(words.x, k)), g = augment_float(byte_of(words.y, k)),
                            b = augment_float(byte_of(words.z, k)), gray = augment_gray(r, g, b);
                red |= (uint32_t)augment_blend(factor, r, gray) << 8 * k;
                green |= (uint32_t)augment_blend(factor, g, gray) << 8 * k;
                blue |= (uint32_t)augment_blend(factor, b, gray) << 8 * k;
            }
            store_word<FITS>(plan, to, i, red);
            store_word<FITS>(plan, to + plane, i, green);
            store_word<FITS>(plan, to + 2 * plane, i, blue);
        });
}

/* ---- Neighbours ---- */

/* Copies a plane to shared memory, with a border of the value `fill`: a row above, a row below, and a word
 * before each row. This word is also the border to the right of the previous row. With pitch =
 * plan.across.by + 1, word i of the image, in row y, becomes word i + y + pitch + 1 of `staged`. */
template <bool FITS>
static __device__ void stage(const struct change_plan &plan, const uint8_t *plane, bool flip, uint32_t fill,
                             uint32_t *staged)
{
    const uint32_t height = plan.shape.height, pitch = plan.across.by + 1, outside = fill * 0x01010101u;
    for (uint32_t i = threadIdx.x; i < pitch; i += CHANGE_BLOCK)
        staged[i] = staged[(height + 1) * pitch + 1 + i] = outside;
    for (uint32_t y = threadIdx.x; y <= height; y += CHANGE_BLOCK)
        staged[(y + 1) * pitch] = outside;
    for_words(
        height * plan.across.by,
        [=, &plan](uint32_t i) { return load_word<FITS>(plan, plane, flip, i, outside); },
        [=, &plan](uint32_t i, uint32_t word) { staged[i + plan.across.quotient(i) + pitch + 1] = word; });
    __syncthreads();
}

/* Returns the four values at row y from column x on of a sheared, translated or rotated plane. Without
 * ACROSS, pixels do not move along x; without DOWN, they do not move along y. Values are interpolated only in
 * the directions in which pixels move. A pixel from outside gets the four values at the top left corner of
 * the border. */
template <bool ACROSS, bool DOWN>
static __device__ __forceinline__ uint32_t warped_word(const struct change_plan &plan, const uint8_t *staged,
                                                       const float *map, uint32_t y, uint32_t x)
{
    const uint32_t pitch = 4 * (plan.across.by + 1);
    const float width = augment_float(plan.shape.width), height = augment_float(plan.shape.height);
    const float row = augment_float(y), column = augment_float(x);
    const float row_x = fmaf(map[1], row, map[2]), row_y = fmaf(map[4], row, map[5]);
    uint32_t word = 0;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const float from_x = ACROSS ? fmaf(map[0], column + (float)k, row_x) : column + (float)k;
        const float from_y = DOWN ? fmaf(map[3], column + (float)k, row_y) : row;
        const float left = ACROSS ? augment_floor(from_x) : from_x,
                    top = DOWN ? augment_floor(from_y) : from_y;
        const bool inside = left >= -1 && left < width && top >= -1 && top < height;
        const uint8_t *at =
            staged +
            (inside ? (uint32_t)(augment_nearest(top) + 1) * pitch + 4 + (uint32_t)augment_nearest(left) : 0);
        float value = augment_float(at[0]);
        if (ACROSS)
            value = augment_between(value, augment_float(at[1]), from_x - left);
        if (DOWN) {
            float below = augment_float(at[pitch]);
            if (ACROSS)
                below = augment_between(below, augment_float(at[pitch + 1]), from_x - left);
            value = augment_between(value, below, from_y - top);
        }
        word |= (uint32_t)augment_nearest(value) << 8 * k;
    }
    return word;
}

/* Returns the four values at row y from column x on of a plane that is moved with another filter than
 * AUGMENT_BLEND. */
static __device__ __forceinline__ uint32_t sampled_word(const struct change_plan &plan, const uint8_t *staged,
                                                        const struct augment_numbers &numbers, uint32_t c,
                                                        uint32_t y, uint32_t x)
{
    const uint32_t pitch = 4 * (plan.across.by + 1);
    uint32_t word = 0;
    for (uint32_t k = 0; k < 4; k++)
        word |= (uint32_t)augment_warped(staged + pitch + 4, pitch, &plan.shape, c, y, x + k, &numbers)
                << 8 * k;
    return word;
}

/* Returns the four values at row y from column x on of a sharpened plane. */
static __device__ __forceinline__ uint32_t sharp_word(const struct change_plan &plan, const uint32_t *staged,
                                                      float factor, uint32_t y, uint32_t x)
{
    const uint32_t pitch = plan.across.by + 1, height = plan.shape.height, width = plan.shape.width;
    const uint32_t *at = staged + (y + 1) * pitch + 1 + x / 4;
    const uint32_t own = *at;
    uint32_t columns[6] = {}, result = own; /* sums of three values, from column x - 1 on */
    if (y == 0 || y + 1 >= height)
        return own;
#pragma unroll
    for (int r = -1; r <= 1; r++) {
        const uint32_t *row = at + r * (int32_t)pitch;
        columns[0] += byte_of(row[-1], 3);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            columns[k + 1] += byte_of(row[0], k);
        columns[5] += byte_of(row[1], 0);
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const uint32_t value = byte_of(own, k),
                       sum = columns[k] + columns[k + 1] + columns[k + 2] + 4 * value;
        if (x + k > 0 && x + k + 1 < width)
            result ^= (augment_sharpened(factor, value, sum) ^ value) << 8 * k;
    }
    return result;
}

/* Applies a shear, translation, rotation or sharpness to the plane of channel `c` in `staged`. */
template <bool FITS>
static __device__ void change_neighbours(const struct change_plan &plan, enum augment_operation operation,
                                         const struct augment_numbers &numbers, uint32_t c,
                                         const uint32_t *staged, uint8_t *to)
{
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(staged);
    const auto store_words = [=, &plan](auto word_at) {
        for (uint32_t i = threadIdx.x; i < plan.shape.height * plan.across.by; i += CHANGE_BLOCK) {
            const uint32_t y = plan.across.quotient(i), x = 4 * (i - y * plan.across.by);
            store_word<FITS>(plan, to, i, word_at(y, x));
        }
    };
    if (operation == AUGMENT_SHARPNESS)
        store_words([&](uint32_t y, uint32_t x) { return sharp_word(plan, staged, numbers.factor, y, x); });
    else if (numbers.filter != AUGMENT_BLEND)
        store_words([&](uint32_t y, uint32_t x) { return sampled_word(plan, bytes, numbers, c, y, x); });
    else if (operation == AUGMENT_ROTATE)
        store_words(
            [&](uint32_t y, uint32_t x) { return warped_word<true, true>(plan, bytes, numbers.map, y, x); });
    else if (operation == AUGMENT_SHEAR_X || operation == AUGMENT_TRANSLATE_X)
        store_words(
            [&](uint32_t y, uint32_t x) { return warped_word<true, false>(plan, bytes, numbers.map, y, x); });
    else
        store_words(
            [&](uint32_t y, uint32_t x) { return warped_word<false, true>(plan, bytes, numbers.map, y, x); });
}

/* ---- An operation ---- */

/* Applies an operation to the image `from`. Mirrors the image first if `flip` is true. If `flip` is false,
 * `to` may be equal to `from`. All threads of the block must call the function. */
template <bool FITS>
static __device__ void change(const struct change_plan &plan, enum augment_operation operation,
                              const struct augment_numbers numbers, const uint8_t *from, bool flip,
                              uint8_t *to, uint32_t *staged, struct change_shared *shared)
{
    const uint32_t plane = plan.shape.height * plan.shape.width, words = plan.shape.height * plan.across.by;
    if (operation == AUGMENT_CONTRAST)
        sum_values<FITS>(plan, from, shared);
    if (operation == AUGMENT_COLOR && plan.shape.channels > 1)
        change_color<FITS>(plan, numbers.factor, from, flip, to);
    else
        for (uint32_t c = 0; c < plan.shape.channels; c++, from += plane, to += plane) {
            const auto load = [=, &plan](uint32_t i) { return load_word<FITS>(plan, from, flip, i); };
            if (augment_warps(operation) || operation == AUGMENT_SHARPNESS) {
                stage<FITS>(plan, from, flip, augment_fill(&numbers, c), staged);
                change_neighbours<FITS>(plan, operation, numbers, c, staged, to);
            } else if (augment_has_table(operation)) {
                if (augment_counts(operation) && operation != AUGMENT_CONTRAST)
                    count_values<FITS>(plan, from, shared);
                make_table(plan, operation, numbers, shared);
                for_words(words, load, [=, &plan](uint32_t i, uint32_t word) {
                    store_word<FITS>(plan, to, i, mapped(shared->table, word));
                });
            } else
                for_words(words, load,
                          [=, &plan](uint32_t i, uint32_t word) { store_word<FITS>(plan, to, i, word); });
            __syncthreads(); /* the next channel overwrites the plane or the table */
        }
    __syncthreads(); /* the next operation reads values that other threads have written */
}

/* ---- RandAugment: the kernels ---- */

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
        from = stored +
               sample_of(augment, held, count, numbers, j) * plan.canvas.channels * plan.canvas.depth * plane;
        flip = augment_flips(&plan, epoch, number);
    }
    for (uint32_t i = 0; i < max(plan.rand.operations, 1); i++) {
        if (threadIdx.x == 0)
            shared.operation = i < plan.rand.operations
                                   ? augment_draw(&plan, epoch, number, i, &shared.numbers)
                                   : AUGMENT_IDENTITY;
        __syncthreads();
        change<FITS>(augment.change, shared.operation, shared.numbers, from, flip, image,
                     own_plane<FITS>(augment.change), &shared);
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
    plan->shape.channels = (gray ? 1 : shape->channels) * shape->depth;
    plan->shape.depth = 1;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (shape->width % 4 || plan->plane_bytes + sizeof(struct change_shared) > (size_t)most)
        return allocate(allocations, &plan->planes, images * plan->plane_bytes);
    for (const void *kernel : {(const void *)change_kernel<true>, (const void *)apply_kernel<true>})
        TRY(allow_shared(kernel, plan->plane_bytes));
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
    TRY(allow_shared(resize_kernel, (size_t)augment->rows * plan->shape.width));
    TRY(allocate(allocations, &augment->parts, images));
    TRY(allocate(allocations, &augment->inputs, outputs));
    return allocate(allocations, &augment->weights, outputs * augment->taps);
}

/* Allocates the memory of the changes of colour. Without blur, they are made in place. */
static enum status jitter_open(struct allocations *allocations, size_t images, size_t bytes,
                               struct device_augment *augment)
{
    const struct augment_plan *plan = &augment->plan;
    struct shape shape = plan->shape;
    uint8_t *memory;
    if (!jitter_on(&plan->color))
        return STATUS_OK;
    shape.channels = plan->gray ? 1 : shape.channels;
    augment->colored = augment->images;
    if (plan->color.blur > 0)
        TRY(allocate(allocations, &augment->colored, bytes));
    TRY(allocate(allocations, &memory, jitter_batch_bytes(&shape, (uint32_t)images)));
    return jitter_batch_open(&plan->color, &shape, plan->seed, (uint32_t)images, memory, &augment->color);
}

enum status device_augment_open(const struct train *train, struct allocations *allocations,
                                struct device_augment *augment)
{
    *augment = {};
    if (!augment_computes(&train->augment) || train->forward_only || (train->stage && !train->stage->first))
        return STATUS_OK;
    const size_t images = train_part_augmented(train, train_part_max(train));
    TRY(augment_plan(train, &augment->plan));
    augment->partners = train_part_augmented(train, 1) > 1;
    TRY(change_open(&augment->plan.shape, augment->plan.gray, images, allocations, &augment->change));
    if (augment->plan.crop)
        TRY(resize_open(allocations, images, augment));
    const size_t bytes = images * shape_values(&augment->change.shape);
    TRY(allocate(allocations, &augment->images, bytes));
    return jitter_open(allocations, images, bytes, augment);
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
    return CUDA_LAUNCHED("resize_kernel");
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
    if (augment->plan.rand.operations > 0 || !augment->plan.crop) {
        auto *kernel = change->planes ? change_kernel<false> : change_kernel<true>;
        kernel<<<images, CHANGE_BLOCK, change->planes ? 0 : change->plane_bytes, stream>>>(
            *augment, static_cast<const uint8_t *>(set->values), set->held, count, epoch, numbers);
        CUDA_TRY_LAUNCH("change_kernel");
    }
    set->values = augment->images;
    if (augment->colored) {
        TRY(jitter_batch_run(&augment->color, epoch, numbers, images, augment->images, augment->colored,
                             stream));
        set->values = augment->colored;
    }
    set->held = {true, augment->partners, count, 0};
    set->gray = augment->plan.gray;
    return STATUS_OK;
}
