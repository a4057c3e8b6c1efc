/* train-graph, fc1 backward: a block a slice of 64 inputs, for the whole batch, so that its sums are complete. It
 * makes the gradient of those inputs and of their weights, and takes the optimizer's step with the latter right
 * there: 98 % of all parameters. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph.cuh"

#define COLUMNS 64  /* inputs a block */
#define ROWS    128 /* samples at a time */
#define THREADS 256

#define DELTA_PITCH  (HIDDEN * 2 + 16) /* bytes: neighbouring rows in different banks */
#define COLUMN_PITCH (COLUMNS * 2 + 16)

/* Shared memory, in bytes from its beginning. */
#define AT_DELTA  0                                 /* (ROWS, HIDDEN): gradients of the hidden values */
#define AT_INPUT  (AT_DELTA + ROWS * DELTA_PITCH)   /* (ROWS, COLUMNS) */
#define AT_WEIGHT (AT_INPUT + ROWS * COLUMN_PITCH)  /* (HIDDEN, COLUMNS) */
#define BYTES     (AT_WEIGHT + HIDDEN * COLUMN_PITCH)

/* What dropout multiplied its values by. */
#define KEPT_SCALE (256.0f / (256 - DROPOUT1_THRESHOLD))

/* A matrix of `rows` rows of `pieces` times 16 bytes on its way to shared memory. */
static __device__ __forceinline__ void take(const void *from, size_t from_pitch, int rows, int pieces, uint8_t *to,
                                            int to_pitch)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * pieces; i += THREADS) {
        int row = i / pieces, at = i % pieces * 16;
        copy_async16(to + row * to_pitch + at, static_cast<const uint8_t *>(from) + row * from_pitch + at);
    }
}

/* The gradient of the inputs: (32 samples, 32 inputs) a warp, summed over the hidden values. */
template <class NET>
static __device__ __forceinline__ void back_inputs(const struct graph_plan &plan, uint32_t shared, uint32_t row,
                                                   uint32_t column)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp % 4 * 32, n0 = warp / 4 * 32;
    uint32_t from_a = shared + AT_DELTA + (m0 + lane % 16) * DELTA_PITCH + lane / 16 * 16;
    uint32_t from_b = shared + AT_WEIGHT + lane % 16 * COLUMN_PITCH + n0 * 2 + lane / 16 * 16;
    float c[2][4][4] = {};
#pragma unroll
    for (int s = 0; s < HIDDEN / 16; s++) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            load4(a[m], from_a + m * 16 * DELTA_PITCH + s * 32);
#pragma unroll
        for (int n = 0; n < 2; n++)
            load4_transposed(b[n], from_b + s * 16 * COLUMN_PITCH + n * 32);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    __nv_bfloat16 *to =
        plan.pooled_delta + (size_t)(row + m0 + lane / 4) * NET::features + column + n0 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<uint32_t *>(to + (size_t)(16 * m + 8 * h) * NET::features + 8 * n) =
                    pack(c[m][n][2 * h] * KEPT_SCALE, c[m][n][2 * h + 1] * KEPT_SCALE);
}

/* The gradient of the weights: (32 hidden values, 32 inputs) a warp, and the sum goes on over all samples. */
static __device__ __forceinline__ void back_weights(uint32_t shared, float c[2][4][4])
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp % 4 * 32, n0 = warp / 4 * 32;
    uint32_t from_a =
        shared + AT_DELTA + (lane % 8 + lane / 16 * 8) * DELTA_PITCH + m0 * 2 + lane / 8 % 2 * 16;
    uint32_t from_b = shared + AT_INPUT + lane % 16 * COLUMN_PITCH + n0 * 2 + lane / 16 * 16;
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            load4_transposed(a[m], from_a + s * 16 * DELTA_PITCH + m * 32);
#pragma unroll
        for (int n = 0; n < 2; n++)
            load4_transposed(b[n], from_b + s * 16 * COLUMN_PITCH + n * 32);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

/* The optimizer's step with the weights of this slice. */
template <class NET>
static __device__ __forceinline__ void step_weights(const struct graph_plan &plan, uint32_t column,
                                                    const float c[2][4][4])
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp % 4 * 32, n0 = warp / 4 * 32;
    const struct update update = plan.moment->update;
    size_t begin = plan.tensors[FC1_W];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                size_t at = (size_t)(m0 + 16 * m + 8 * h + lane / 4) * NET::features + column + n0 + 8 * n +
                            lane % 4 * 2;
                float2 *parameter = reinterpret_cast<float2 *>(plan.state.parameters + begin + at);
                float2 *first = reinterpret_cast<float2 *>(plan.state.first + begin + at);
                float2 *second = reinterpret_cast<float2 *>(plan.state.second + begin + at);
                float2 p = *parameter, f = *first, v = make_float2(0, 0);
                float2 gradient = make_float2(c[m][n][2 * h] * KEPT_SCALE, c[m][n][2 * h + 1] * KEPT_SCALE);
                if (update.kind != OPTIMIZER_SGD)
                    v = *second;
                optimizer_step(&update, gradient.x, &p.x, &f.x, &v.x);
                optimizer_step(&update, gradient.y, &p.y, &f.y, &v.y);
                *parameter = p;
                *first = f;
                if (update.kind != OPTIMIZER_SGD)
                    *second = v;
                *reinterpret_cast<uint32_t *>(plan.fc1_weight + at) = pack(p.x, p.y);
                if (plan.keep_gradients)
                    *reinterpret_cast<float2 *>(plan.gradients + begin + at) = gradient;
            }
}

template <class NET>
static __global__ void __launch_bounds__(THREADS, 2)
    dense_back_kernel(const __grid_constant__ struct graph_plan plan)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t column = blockIdx.x * COLUMNS, count = plan.moment->count, base = shared_address(shared);
    float c[2][4][4] = {};
    take(plan.fc1_weight + column, NET::features * 2, HIDDEN, COLUMNS / 8, shared + AT_WEIGHT, COLUMN_PITCH);
    for (uint32_t row = 0; row < count; row += ROWS) { /* rows behind `count` are zeros */
        __syncthreads();
        take(plan.hidden_delta + (size_t)row * HIDDEN, HIDDEN * 2, ROWS, HIDDEN / 8, shared + AT_DELTA, DELTA_PITCH);
        take(plan.pooled + (size_t)row * NET::features + column, NET::features * 2, ROWS, COLUMNS / 8,
             shared + AT_INPUT, COLUMN_PITCH);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        back_inputs<NET>(plan, base, row, column);
        back_weights(base, c);
    }
    step_weights<NET>(plan, column, c);
}

template <class NET> static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    CUDA_TRY(cudaFuncSetAttribute(dense_back_kernel<NET>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    dense_back_kernel<NET><<<NET::features / COLUMNS, THREADS, BYTES, stream>>>(*plan);
    CUDA_TRY_LAUNCH("dense_back_kernel");
    return STATUS_OK;
}

enum status graph_dense_back(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
    return colour ? launch<graph_colour>(plan, stream) : launch<graph_gray>(plan, stream);
}
