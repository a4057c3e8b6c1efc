/* Convolutions on tensor cores, with mma: see conv.cuh. On GPUs that have it, wgmma is faster
 * (conv_hopper.cu). */
#include "train/resnet/conv.cuh"
#ifdef HAVE_HOPPER
#include "train/vit/hopper.cuh"
#endif

/* A warp multiplies 32 columns, and the rows that 8 warps leave. */
template <class T, int COLUMNS> struct conv_mma {
    static constexpr int WARP_ROWS = ROWS * COLUMNS / 32 / (THREADS / 32), ROW_MMAS = WARP_ROWS / 16;
    static constexpr int ACROSS = COLUMNS / 32;
    float sums[ROW_MMAS][4][4];

    static __device__ __forceinline__ void publish(void)
    {
    }

    __device__ __forceinline__ void start(const uint4 *stage)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int row = warp / ACROSS * WARP_ROWS, column = warp % ACROSS * 32;
        const uint4 *weights = stage + ROWS * UNITS;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[ROW_MMAS][4], b[2][4];
#pragma unroll
            for (int m = 0; m < ROW_MMAS; m++)
                mma_load4(a[m], stage + unit_at(row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < 2; n++)
                mma_load4(b[n], weights + unit_at(column + 16 * n + lane / 16 * 8 + lane % 8,
                                                  2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < ROW_MMAS; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma_16816(sums[m][n], a[m], &b[n / 2][n % 2 * 2], T());
        }
    }

    __device__ __forceinline__ void end(void)
    {
    }

    __device__ __forceinline__ void store(uint32_t *words, int pitch)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int row = warp / ACROSS * WARP_ROWS + lane / 4, column = warp % ACROSS * 32 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < ROW_MMAS; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *of = sums[m][n];
                words[((row + 16 * m) * pitch + column + 8 * n) / 2] = pack<T>(of[0], of[1]);
                words[((row + 16 * m + 8) * pitch + column + 8 * n) / 2] = pack<T>(of[2], of[3]);
            }
    }
};

/* ---- Launches ---- */

template <class T>
static enum status launch(enum ending ending, struct conv_plan<T> *plan, cudaStream_t stream)
{
#ifdef HAVE_HOPPER
    bool hopper;
    TRY(on_hopper(&hopper));
    if (hopper)
        return conv_hopper_launch<T>(ending, plan, stream);
#endif
    return conv_launch_any<T, conv_mma>(ending, plan, stream);
}

template <class T>
static conv_plan<T> plan_of(const struct conv_pass *pass, uint32_t samples, const T *source, const T *weights,
                            T *result)
{
    struct conv_plan<T> plan = {
    };
    plan.pass = *pass;
    plan.rows = samples * pass->lines * pass->across;
    plan.depth = pass_depth(pass);
    plan.source = source;
    plan.weights = weights;
    plan.result = result;
    if (plan.rows > 0) {
        plan.sample = divider_of(pass->lines * pass->across);
        plan.line = divider_of(pass->across);
    }
    return plan;
}

template <class T>
enum status resnet_forward(const struct conv_shape *shape, uint32_t samples, const T *inputs,
                           const T *weights, T *outputs, float *partial, cudaStream_t stream)
{
    const struct conv_pass pass = conv_forward_pass(shape);
    struct conv_plan<T> plan = plan_of<T>(&pass, samples, inputs, weights, outputs);
    plan.partial = partial;
    return launch<T>(partial ? ENDING_SQUARES : ENDING_PLAIN, &plan, stream);
}

uint32_t resnet_input_parts(const struct conv_shape *shape, uint32_t samples)
{
    uint32_t parts = 0;
    for (uint32_t y = 0; y < shape->stride; y++)
        for (uint32_t x = 0; x < shape->stride; x++) {
            const struct conv_pass pass = conv_input_pass(shape, y, x);
            parts += resnet_parts((size_t)samples * pass.lines * pass.across);
        }
    return parts;
}

template <class T>
enum status resnet_inputs(const struct conv_shape *shape, uint32_t samples, const T *deltas,
                          const T *opposite, const struct resnet_after<T> *after, T *in_deltas,
                          uint32_t *parts, cudaStream_t stream)
{
    *parts = 0;
    for (uint32_t y = 0; y < shape->stride; y++)
        for (uint32_t x = 0; x < shape->stride; x++) {
            const struct conv_pass pass = conv_input_pass(shape, y, x);
            struct conv_plan<T> plan = plan_of<T>(&pass, samples, deltas, opposite, in_deltas);
            if (plan.rows == 0)
                continue;
            plan.first_part = *parts;
            plan.added = after->added;
            plan.relu = after->relu;
            for (int s = 0; s < 2; s++)
                if (after->summed[s].norm) {
                    plan.inputs[s] = after->summed[s].inputs;
                    plan.sums[s] = after->summed[s].norm->partial;
                }
            const bool plain = !plan.added && !plan.relu && !plan.sums[0] && !plan.sums[1];
            TRY(launch<T>(plain ? ENDING_PLAIN : ENDING_BACK, &plan, stream));
            *parts += resnet_parts(plan.rows);
        }
    return STATUS_OK;
}

EACH_HALF(resnet_forward)
EACH_HALF(resnet_inputs)
