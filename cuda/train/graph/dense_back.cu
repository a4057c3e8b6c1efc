/* train-graph, backward through fc1. A block takes one slice of fc1's inputs for the whole batch, so its sums
 * are complete. Half of the warps compute the gradient of these inputs, the other half the gradient of their
 * weights. The block then updates these weights or, with several ranks, stores their gradients. fc1's weights
 * are 98 to 99 % of all parameters. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/graph/kernels.cuh"

#define ROWS        128 /* samples per stage; the next stage is loaded concurrently */
#define WARPS       16
#define HALF        (WARPS / 2)
#define THREADS     (32 * WARPS)

#define DELTA_PITCH (HIDDEN * 2 + 16) /* bytes; eight consecutive rows are in different banks */

/* Shared memory offsets in bytes. */
template <class NET> struct layout {
    static constexpr int columns = NET::slice; /* inputs per block: an odd multiple of eight */
    static constexpr int pitch =
        columns * 2; /* bytes; an odd multiple of 16: eight consecutive rows are in different banks */
    static constexpr int weight = 0;                      /* (HIDDEN, columns) */
    static constexpr int delta = weight + HIDDEN * pitch; /* (ROWS, HIDDEN): gradients of the hidden values */
    static constexpr int input = delta + ROWS * DELTA_PITCH; /* (ROWS, columns) */
    static constexpr int stage =
        ROWS * (DELTA_PITCH + pitch); /* bytes of `delta` and `input` together; there are two stages */
    static constexpr int bytes = delta + 2 * stage;
    static constexpr int gradient = delta; /* at the end: (HIDDEN, columns) floats */
    static_assert(pitch / 16 % 2 == 1 && HIDDEN * columns * 4 <= stage, "fits");
};

/* Starts copying a matrix with `rows` rows of `pieces` * 16 bytes to shared memory. */
static __device__ __forceinline__ void take(const void *from, size_t from_pitch, int rows, int pieces,
                                            uint8_t *to, int to_pitch)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * pieces; i += THREADS) {
        int row = i / pieces, at = i % pieces * 16;
        copy_async16(to + row * to_pitch + at, static_cast<const uint8_t *>(from) + row * from_pitch + at);
    }
}

/* take_inputs() and take_deltas() start copying samples `row` to `row` + ROWS - 1 into their stage.
 * take_inputs() copies fc1's inputs, take_deltas() the gradients of fc1's outputs. */
template <class NET>
static __device__ __forceinline__ void take_inputs(const struct graph_plan &plan, uint32_t row,
                                                   uint32_t column, uint8_t *shared)
{
    typedef layout<NET> at;
    take(plan.pooled + (size_t)row * NET::features + column, NET::features * 2, ROWS, at::columns / 8,
         shared + row / ROWS % 2 * at::stage + at::input, at::pitch);
}

template <class NET>
static __device__ __forceinline__ void take_deltas(const struct graph_plan &plan, uint32_t row,
                                                   uint8_t *shared)
{
    typedef layout<NET> at;
    take(plan.hidden_delta + (size_t)row * HIDDEN, HIDDEN * 2, ROWS, HIDDEN / 8,
         shared + row / ROWS % 2 * at::stage + at::delta, DELTA_PITCH);
}

/* Computes c += a b. b is a matrix of 16 rows in shared memory, and the sum runs over its rows. `from` is the
 * address of the lane's row of b. */
template <class NET>
static __device__ __forceinline__ void multiply_row(float c[][4], const uint32_t a[4], uint32_t from)
{
    constexpr int tiles = layout<NET>::columns / 8;
#pragma unroll
    for (int n = 0; n < tiles / 2; n++) {
        uint32_t b[4];
        mma_load4_transposed(b, from + n * 32);
        multiply(c[2 * n], a, b[0], b[1]);
        multiply(c[2 * n + 1], a, b[2], b[3]);
    }
    uint32_t b[2];
    mma_load2_transposed(b, from + tiles / 2 * 32);
    multiply(c[tiles - 1], a, b[0], b[1]);
}

/* Each warp computes the gradient of fc1's inputs for 16 samples: a sum over the hidden values. */
template <class NET>
static __device__ __forceinline__ void back_inputs(const struct graph_plan &plan, uint32_t shared,
                                                   uint32_t stage, uint32_t row, uint32_t column)
{
    typedef layout<NET> at;
    constexpr int tiles = at::columns / 8;
    int lane = threadIdx.x % 32, m0 = threadIdx.x / 32 * 16;
    uint32_t from_a = shared + stage + at::delta + (m0 + lane % 16) * DELTA_PITCH + lane / 16 * 16;
    uint32_t from_b = shared + at::weight + lane % 16 * at::pitch + lane / 16 * 16;
    float c[tiles][4] = {};
#pragma unroll
    for (int s = 0; s < HIDDEN / 16; s++) {
        uint32_t a[4];
        mma_load4(a, from_a + s * 32);
        multiply_row<NET>(c, a, from_b + s * 16 * at::pitch);
    }
    __nv_bfloat16 *to =
        plan.pooled_delta + (size_t)(row + m0 + lane / 4) * NET::features + column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < tiles; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *reinterpret_cast<uint32_t *>(to + (size_t)(8 * h) * NET::features + 8 * n) =
                pack<bf16>(c[n][2 * h] * KEPT_SCALE, c[n][2 * h + 1] * KEPT_SCALE);
}

/* Each warp computes the gradient of the weights of 16 hidden values. `c` accumulates it over all samples. */
template <class NET>
static __device__ __forceinline__ void back_weights(uint32_t shared, uint32_t stage, float c[][4])
{
    typedef layout<NET> at;
    int lane = threadIdx.x % 32, m0 = (threadIdx.x / 32 - HALF) * 16;
    uint32_t from_a =
        shared + stage + at::delta + (lane % 8 + lane / 16 * 8) * DELTA_PITCH + m0 * 2 + lane / 8 % 2 * 16;
    uint32_t from_b = shared + stage + at::input + lane % 16 * at::pitch + lane / 16 * 16;
#pragma unroll
    for (int s = 0; s < ROWS / 16; s++) {
        uint32_t a[4];
        mma_load4_transposed(a, from_a + s * 16 * DELTA_PITCH);
        multiply_row<NET>(c, a, from_b + s * 16 * at::pitch);
    }
}

/* Writes a warp's weight gradients to shared memory, where all threads can read them. */
template <class NET>
static __device__ __forceinline__ void leave_gradients(const float c[][4], uint8_t *shared)
{
    typedef layout<NET> at;
    int lane = threadIdx.x % 32, row = (threadIdx.x / 32 - HALF) * 16 + lane / 4;
    float *to = reinterpret_cast<float *>(shared + at::gradient) + row * at::columns + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < at::columns / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *reinterpret_cast<float2 *>(to + 8 * h * at::columns + 8 * n) =
                make_float2(c[n][2 * h] * KEPT_SCALE, c[n][2 * h + 1] * KEPT_SCALE);
}

/* Updates four adjacent parameters. */
static __device__ __forceinline__ void step_four(const struct update &update, float4 gradient,
                                                 float4 *parameter, float4 *m, float4 *v)
{
    optimizer_step(&update, gradient.x, &parameter->x, &m->x, &v->x);
    optimizer_step(&update, gradient.y, &parameter->y, &m->y, &v->y);
    optimizer_step(&update, gradient.z, &parameter->z, &m->z, &v->z);
    optimizer_step(&update, gradient.w, &parameter->w, &m->w, &v->w);
}

/* Updates the weights of this slice. Each thread issues all its loads before it uses the first. */
template <class NET>
static __device__ __forceinline__ void step_weights(const struct graph_plan &plan, uint32_t column,
                                                    const uint8_t *shared)
{
    typedef layout<NET> at;
    constexpr int fours = at::columns / 4, all = HIDDEN * fours, share = (all + THREADS - 1) / THREADS;
    const struct update update = *plan.step->update;
    bool moments = optimizer_moments(update.kind) > 1;
    size_t begin = plan.tensors[FC1_W] + column;
    float4 parameter[share], m[share], v[share];
    size_t position[share];
#pragma unroll
    for (int k = 0; k < share; k++) {
        int i = threadIdx.x + k * THREADS;
        position[k] = (size_t)(i / fours) * NET::features + i % fours * 4;
        v[k] = make_float4(0, 0, 0, 0);
        if (i < all) {
            parameter[k] = *reinterpret_cast<const float4 *>(plan.state.parameters + begin + position[k]);
            m[k] = *reinterpret_cast<const float4 *>(plan.state.m + begin + position[k]);
            if (moments)
                v[k] = *reinterpret_cast<const float4 *>(plan.state.v + begin + position[k]);
        }
    }
    __syncthreads(); /* the gradients are in shared memory */
#pragma unroll
    for (int k = 0; k < share; k++) {
        int i = threadIdx.x + k * THREADS;
        if (i >= all)
            continue;
        float4 gradient = reinterpret_cast<const float4 *>(shared + at::gradient)[i];
        step_four(update, gradient, &parameter[k], &m[k], &v[k]);
        *reinterpret_cast<float4 *>(plan.state.parameters + begin + position[k]) = parameter[k];
        *reinterpret_cast<float4 *>(plan.state.m + begin + position[k]) = m[k];
        if (moments)
            *reinterpret_cast<float4 *>(plan.state.v + begin + position[k]) = v[k];
        *reinterpret_cast<uint2 *>(plan.fc1_weight + column + position[k]) = make_uint2(
            pack<bf16>(parameter[k].x, parameter[k].y), pack<bf16>(parameter[k].z, parameter[k].w));
        if (plan.keep_gradients)
            *reinterpret_cast<float4 *>(gradient_of(plan, begin + position[k])) = gradient;
    }
}

/* Stores the gradients of the weights of this slice, for the exchange. */
template <class NET>
static __device__ __forceinline__ void store_gradients(const struct graph_plan &plan, uint32_t column,
                                                       const uint8_t *shared)
{
    typedef layout<NET> at;
    constexpr int fours = at::columns / 4;
    float *to = gradient_of(plan, plan.tensors[FC1_W] + column);
    __syncthreads(); /* the gradients are in shared memory */
    for (int i = threadIdx.x; i < HIDDEN * fours; i += THREADS)
        *reinterpret_cast<float4 *>(to + (size_t)(i / fours) * NET::features + i % fours * 4) =
            reinterpret_cast<const float4 *>(shared + at::gradient)[i];
}

/* Prefetches the slice's parameters and moments into the L2 cache while the GEMMs run. step_weights() loads
 * them later. */
template <class NET>
static __device__ __forceinline__ void prefetch_weights(const struct graph_plan &plan, uint32_t column)
{
    constexpr int eights = layout<NET>::columns / 8; /* 8 floats, one sector */
    size_t begin = plan.tensors[FC1_W] + column;
    for (int i = threadIdx.x; i < HIDDEN * eights; i += THREADS) {
        size_t at = begin + (size_t)(i / eights) * NET::features + i % eights * 8;
        for (const float *from : {plan.state.parameters, plan.state.m, plan.state.v})
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

template <class NET>
static __global__ void __launch_bounds__(THREADS, 1)
    dense_back_kernel(const __grid_constant__ struct graph_plan plan)
{
    typedef layout<NET> at;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t column = blockIdx.x * at::columns, count = plan.step->count, base = shared_address(shared);
    bool for_inputs = threadIdx.x < THREADS / 2;
    float c[at::columns / 8][4] = {};
    take(plan.fc1_weight + column, NET::features * 2, HIDDEN, at::columns / 8, shared + at::weight,
         at::pitch);
    take_inputs<NET>(plan, 0, column, shared);
    if (!plan.apart)
        prefetch_weights<NET>(plan, column);
    wait_for_previous();
    allow_next();
    take_deltas<NET>(plan, 0, shared);
    copy_commit();
    for (uint32_t row = 0; row < count; row += ROWS) { /* rows past `count` are zero */
        if (row + ROWS < count) {
            take_inputs<NET>(plan, row + ROWS, column, shared);
            take_deltas<NET>(plan, row + ROWS, shared);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        uint32_t stage = row / ROWS % 2 * at::stage;
        if (for_inputs)
            back_inputs<NET>(plan, base, stage, row, column);
        else
            back_weights<NET>(base, stage, c);
        __syncthreads();
    }
    if (count ==
        0) { /* a rank may have no samples in the last step; its copies must not overwrite the zeros */
        copy_wait<0>();
        __syncthreads();
    }
    if (!for_inputs)
        leave_gradients<NET>(c, shared);
    if (plan.apart)
        store_gradients<NET>(plan, column, shared);
    else
        step_weights<NET>(plan, column, shared);
}

template <class NET> static enum status launch(const struct graph_plan *plan, cudaStream_t stream)
{
    return launch_overlapped(dense_back_kernel<NET>, "dense_back_kernel", dim3(NET::features / NET::slice),
                             THREADS, layout<NET>::bytes, plan, stream);
}

enum status graph_dense_back(const struct graph_plan *plan, bool colour, cudaStream_t stream)
{
#ifdef HAVE_HOPPER
    if (plan->hopper)
        return graph_dense_back_hopper(plan, stream);
#endif
    return colour ? launch<graph_colour>(plan, stream) : launch<graph_gray>(plan, stream);
}
