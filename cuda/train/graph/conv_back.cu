/* train-graph, backward through the convolutions. Block b computes samples b, b + parts, ... of the batch. It
 * recomputes conv1's output from the sample's bytes, and scatters the gradients of the pooled values to their
 * argmax pixels. Its GEMMs read this output and these gradients from shared memory.
 *
 * Half of the warps compute the gradient of conv2's weights, and keep the sums in registers over all samples.
 * The other half compute the gradient of conv2's input, and from it the gradient of conv1's weights. At the
 * end, each block writes its sums to global memory. update.cu adds the blocks' sums in a fixed order.
 *
 * A few extra blocks run the backward pass of fc2 and of fc1's bias concurrently, because this work is small
 * and independent of the convolutions. */
#include "train/graph/conv_back.cuh"

#define WARPS   16
#define HALF    (WARPS / 2)
#define THREADS (32 * WARPS)
#define TILES   3 /* tiles of 16 pixels and 32 channels that a warp processes at a time */

/* Shared memory offsets in bytes. The gradient of conv2's output is stored in rows of the same length as
 * those of conv1's output, so that every tap is a constant offset. Pixels outside conv2's output are zero.
 * Pixel (y, x) has index (y + 2) * columns1 + x + 2. */
template <class NET> struct layout {
    static constexpr int border = 2 * NET::columns1 + 2;
    static constexpr int delta_pixels = NET::pixels1 + border;
    static constexpr int delta = 0;
    static constexpr int conv1 = delta + delta_pixels * 128;
    static constexpr int weight = conv1 + NET::pixels1 * 64;
    static constexpr int images = weight + CONV2_BYTES;
    static constexpr int image_bytes = NET::values * 2; /* two images: this sample's and the next one's */
    static constexpr int bias1 = images + 2 * image_bytes;
    static constexpr int bias2 =
        bias1 + CONV1_CHANNELS * 4; /* gradient of conv2's bias: one sum per quarter of the windows */
    static constexpr int bytes = bias2 + 4 * CONV2_CHANNELS * 4;
    static constexpr int steps1 = NET::depth1 / 16;
    /* Registers per thread for sums. registers1 is for warps that compute the gradients of conv2's input and
     * conv1's weights, registers2 for warps that compute the gradient of conv2's weights. */
    static constexpr int registers1 = (steps1 + TILES) * 16, registers2 = 2 * CONV_TAPS * 4;
    static constexpr int registers = registers1 > registers2 ? registers1 : registers2;
    static constexpr int units = (NET::pixels1 + 16 * TILES - 1) / (16 * TILES); /* units of back_inputs() */
    /* Steps of back_weights(): 16 pixels each. */
    static constexpr int steps2 =
        NET::columns2 % 8 == 0 ? NET::rows2 * NET::columns2 / 16 : (NET::rows2 * NET::columns1 + 15) / 16;
    static_assert(HALF * NET::depth1 * CONV1_CHANNELS * 4 <= conv1,
                  "the warps' sums fit into the gradient's space");
    static_assert(bytes <= 227 * 1024, "limit per block since sm_90");
    static_assert(conv1 % 128 == 0 && weight % 16 == 0 && images % 16 == 0 && bias1 % 4 == 0, "aligned");
};

/* ---- Filling shared memory ---- */

/* Scatters the gradients of one sample. The first half of the warps runs this. A lane takes two adjacent
 * windows and eight channels at a time. For each of the eight pixels, it stores the gradients of those
 * channels, or zeros. Eight lanes at a time cover two adjacent pairs of windows and four groups of channels,
 * so that their stores have no bank conflicts. */
template <class NET>
static __device__ __forceinline__ void spread(const struct graph_plan &plan, uint32_t row, uint8_t *shared)
{
    constexpr int pairs = NET::windows / 2,
                  share =
                      (pairs + 3) / 4; /* a warp takes a quarter of the windows and half of the channels */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = warp / 2;
    int piece = warp % 2 * 4 + lane / 2 % 4, own = lane % 2 + lane / 8 * 2;
    const uint8_t *deltas =
        reinterpret_cast<const uint8_t *>(plan.pooled_delta + (size_t)row * NET::features);
    const uint8_t *argmax = plan.argmax + (size_t)row * NET::features;
    float sums[8] = {};
    for (int pair = quarter * share + own; pair < min((quarter + 1) * share, pairs); pair += 8) {
        uint32_t delta[8], peak[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            int at = (8 * piece + c) * NET::windows + 2 * pair;
            delta[c] = *reinterpret_cast<const uint32_t *>(deltas + 2 * at);
            peak[c] = *reinterpret_cast<const uint16_t *>(argmax + at);
        }
        spread_pair<NET>(delta, peak, pair, sums, [&](uint32_t pixel, uint4 value) {
            *reinterpret_cast<uint4 *>(shared + layout<NET>::delta + delta_piece(pixel, piece)) = value;
        });
    }
    /* The gradient of conv2's bias: the sum over lanes with the same channels. No other warp adds to these
     * elements. */
    add_bias2(sums,
              reinterpret_cast<float *>(shared + layout<NET>::bias2) + quarter * CONV2_CHANNELS + 8 * piece);
}

/* Loads the image of sample `row` of the batch. COUNT threads take part; `thread` is the number of this
 * thread. The caller synchronises the block before it reads the image. A sample's image is loaded while the
 * gradients of the previous sample are computed. */
template <class NET, int COUNT>
static __device__ __forceinline__ void take_row(const struct graph_plan &plan, uint32_t row, int thread,
                                                uint8_t *image)
{
    asm volatile(""
                 : "+r"(thread)); /* keeps the compiler from holding values that depend only on `thread` in
                                   * registers over all samples */
    uint32_t number = plan.order[plan.step->first + row];
    struct draw_move move = draw_move(&plan.augment, plan.seed, plan.step->epoch, number);
    take_image<NET, COUNT>(training_sample<NET>(plan, plan.step->number, row, number), move, thread,
                           reinterpret_cast<uint16_t *>(image));
}

/* Recomputes conv1's output for an image. The second half of the warps runs this. */
template <class NET>
static __device__ __forceinline__ void recompute(const struct graph_plan &plan, const uint8_t *image,
                                                 uint8_t *shared)
{
    conv1_forward<NET, HALF>(plan, reinterpret_cast<const uint16_t *>(image),
                             reinterpret_cast<const float *>(shared + layout<NET>::bias1),
                             threadIdx.x / 32 - HALF, conv1_piece, shared + layout<NET>::conv1);
}

/* ---- Gradients of conv2's weights ---- */

/* The sums over conv2's output pixels run in groups of 8. Returns the index in conv1's output of pixel `i` of
 * group `group`. If the rows of conv2's output consist of whole groups, groups cover only these rows.
 * Otherwise groups run over whole rows of conv1's output; the gradients outside conv2's output are zero. */
template <class NET> static __device__ __forceinline__ uint32_t group_pixel(int group, int i)
{
    if (NET::columns2 % 8 == 0)
        return group / (NET::columns2 / 8) * NET::columns1 + group % (NET::columns2 / 8) * 8 + i;
    return 8 * group + i;
}

/* Each warp of the second half computes the gradients of the weights of 32 output channels, 9 taps and 8
 * input channels. It adds the sums over a sample's pixels to `c`. */
template <class NET>
static __device__ __forceinline__ void back_weights(uint32_t shared, float c[2][CONV_TAPS][4])
{
    typedef layout<NET> at;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - HALF, outputs = warp / 4 * 4, inputs = warp % 4;
    int row_a = lane % 8, group_a = lane / 16, piece_a = outputs + lane / 8 % 2, group_b = lane / 8 % 2;
    uint32_t taps[5]; /* one ldmatrix loads four matrices: two groups of pixels for two taps */
#pragma unroll
    for (int i = 0; i < 5; i++) {
        int tap = min(2 * i + lane / 16, CONV_TAPS - 1);
        taps[i] = tap / 3 * NET::columns1 + tap % 3;
    }
    for (int s = 0; s < at::steps2; s++) {
        uint32_t pixel_a = group_pixel<NET>(2 * s + group_a, row_a) + at::border;
        uint32_t pixel_b = group_pixel<NET>(2 * s + group_b, row_a);
        uint32_t a[2][4], b[5][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            mma_load4_transposed(a[m], shared + at::delta + delta_piece(pixel_a, piece_a + 2 * m));
#pragma unroll
        for (int i = 0; i < 5; i++) {
            uint32_t pixel = pixel_b + taps[i];
            if (NET::columns2 % 8 != 0)
                pixel = min(pixel, (uint32_t)NET::pixels1 - 1); /* pixels past the end are multiplied by 0 */
            uint32_t from = shared + at::conv1 + conv1_piece(pixel, inputs);
            if (i < 4)
                mma_load4_transposed(b[i], from);
            else
                mma_load2_transposed(b[i], from);
        }
#pragma unroll
        for (int tap = 0; tap < CONV_TAPS; tap++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                multiply(c[m][tap], a[m], b[tap / 2][tap % 2 * 2], b[tap / 2][tap % 2 * 2 + 1]);
    }
}

/* ---- Gradients of conv2's input, and of conv1's weights ---- */

/* Computes the gradient of conv2's input for the 48 pixels of tiles 3 * unit to 3 * unit + 2, and for 32
 * channels. Each value is a sum over 9 taps and 64 outputs. */
template <class NET>
static __device__ __forceinline__ void back_inputs(uint32_t shared, int unit, float c[TILES][4][4])
{
    typedef layout<NET> at;
    int lane = threadIdx.x % 32;
    uint32_t pixels[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        pixels[m] = at::border + min(16 * (TILES * unit + m) + lane % 16, NET::pixels1 - 1);
#pragma unroll
        for (int n = 0; n < 4; n++)
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
    }
    uint32_t weight = shared + at::weight + lane % 16 * CONV2_PITCH + lane / 16 * 16;
#pragma unroll
    for (int tap = 0; tap < CONV_TAPS; tap++) {
        uint32_t from[TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            from[m] =
                shared + at::delta + delta_piece(pixels[m] - (tap / 3 * NET::columns1 + tap % 3), lane / 16);
#pragma unroll
        for (int s = 0; s < CONV2_CHANNELS / 16; s++) {
            uint32_t a[TILES][4], b[2][4];
#pragma unroll
            for (int m = 0; m < TILES; m++)
                mma_load4(a[m], from[m] ^ s * 32);
#pragma unroll
            for (int n = 0; n < 2; n++)
                mma_load4_transposed(b[n], weight + s * 16 * CONV2_PITCH + tap * 64 + n * 32);
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int m = 0; m < TILES; m++)
                    multiply(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

/* ---- Writing the block's sums to global memory ---- */

/* Writes the gradient of conv2's weights in the order of the weights in shared memory: outputs, taps,
 * inputs. */
static __device__ __forceinline__ void store_weights(const float c[2][CONV_TAPS][4], float *sums)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - HALF;
    sums += (warp / 4 * 32 + lane / 4) * CONV2_DEPTH + warp % 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int tap = 0; tap < CONV_TAPS; tap++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<float2 *>(sums + (16 * m + 8 * h) * CONV2_DEPTH + tap * CONV1_CHANNELS) =
                    make_float2(c[m][tap][2 * h], c[m][tap][2 * h + 1]);
}

template <class NET>
static __global__ void __launch_bounds__(THREADS, 1)
    conv_back_kernel(const __grid_constant__ struct graph_plan plan)
{
    typedef layout<NET> at;
    extern __shared__ __align__(1024) uint8_t shared[];
    if (blockIdx.x >= plan.parts) {
        head_back<THREADS>(plan, blockIdx.x - plan.parts, shared);
        return;
    }
    uint8_t *images = shared + at::images;
    float *bias2 = reinterpret_cast<float *>(shared + at::bias2);
    float *sums = plan.conv_sums + (size_t)blockIdx.x * NET::conv_parameters;
    uint32_t count = plan.step->count, base = shared_address(shared);
    bool for_inputs = threadIdx.x < THREADS / 2;
    take_conv2_weight<THREADS>(plan, threadIdx.x, shared + at::weight);
    copy_commit();
    for (int i = threadIdx.x; i < at::delta_pixels * 8; i += THREADS)
        reinterpret_cast<uint4 *>(shared + at::delta)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < 4 * CONV2_CHANNELS)
        bias2[threadIdx.x] = 0;
    if (threadIdx.x < CONV1_CHANNELS)
        reinterpret_cast<float *>(shared + at::bias1)[threadIdx.x] = conv1_bias<NET>(plan, threadIdx.x);
    if (blockIdx.x < count)
        take_row<NET, THREADS>(plan, blockIdx.x, threadIdx.x, images);
    copy_wait<0>();
    __syncthreads();
    /* Both halves of the block use `own`. The first half stores the gradient sums of conv1's weights and the
     * tiles of a unit in it. The second half stores the gradient sums of conv2's weights in it. With separate
     * variables, each thread would keep registers for all of them across the barriers. */
    float own[at::registers] = {};
    float(&of_conv1)[at::steps1][4][4] = reinterpret_cast<float(&)[at::steps1][4][4]>(own);
    float(&products)[TILES][4][4] = reinterpret_cast<float(&)[TILES][4][4]>(own[at::steps1 * 16]);
    float(&of_conv2)[2][CONV_TAPS][4] = reinterpret_cast<float(&)[2][CONV_TAPS][4]>(own);
    if (for_inputs) {
        wait_for_previous(); /* the previous kernel writes pooled_delta; earlier kernels write the other
                                inputs */
        allow_next();
    }
    for (uint32_t row = blockIdx.x, turn = 0; row < count; row += plan.parts, turn ^= 1) {
        if (for_inputs)
            spread<NET>(plan, row, shared);
        else
            recompute<NET>(plan, images + turn * at::image_bytes, shared);
        __syncthreads();
        if (for_inputs) {
            for (int unit = threadIdx.x / 32; unit < at::units; unit += HALF) {
                back_inputs<NET>(base, unit, products);
                back_conv1<NET, TILES>(shared + at::conv1, conv1_piece, images + turn * at::image_bytes,
                                       16 * TILES * unit, products, of_conv1);
            }
        } else {
            if (row + plan.parts < count)
                take_row<NET, THREADS / 2>(plan, row + plan.parts, threadIdx.x - THREADS / 2,
                                           images + (turn ^ 1) * at::image_bytes);
            back_weights<NET>(base, of_conv2);
        }
        __syncthreads(); /* all threads have read the buffers before the next sample overwrites them */
    }
    if (for_inputs)
        leave_conv1<NET>(of_conv1, threadIdx.x / 32, reinterpret_cast<float *>(shared + at::delta));
    else
        store_weights(of_conv2, sums + CONV1_CHANNELS * (NET::taps1 + 1));
    __syncthreads();
    store_conv1<NET, HALF, THREADS>(plan, reinterpret_cast<const float *>(shared + at::delta), sums);
    if (threadIdx.x < CONV2_CHANNELS)
        sums[NET::conv_parameters - CONV2_CHANNELS + threadIdx.x] =
            (bias2[threadIdx.x] + bias2[CONV2_CHANNELS + threadIdx.x]) +
            (bias2[2 * CONV2_CHANNELS + threadIdx.x] + bias2[3 * CONV2_CHANNELS + threadIdx.x]);
}

template <class NET> static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    return launch_overlapped(conv_back_kernel<NET>, "conv_back_kernel", dim3(plan->parts + HEAD_BLOCKS),
                             THREADS, layout<NET>::bytes, plan, stream);
}

enum status graph_conv_back(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
#ifdef HAVE_HOPPER
    if (plan->hopper)
        return graph_conv_back_hopper(plan, stream);
#endif
    return colour ? launch<graph_colour>(plan, stream) : launch<graph_gray>(plan, stream);
}

int graph_shared_bytes(bool colour)
{
    return colour ? layout<graph_colour>::bytes : layout<graph_gray>::bytes;
}
