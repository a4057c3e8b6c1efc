/* The layers of residual networks that use no GEMM: addition, and the mean of each channel. */
#include "common/check.cuh"
#include "common/shared.cuh"
#include "train/network.cuh"

/* ---- Addition ---- */

/* Adds two tensors, and applies a ReLU if `relu` is true. The ReLU passes NaN through. */
static __global__ void add_kernel(const float *in, const float *added, uint32_t count, bool relu, float *out)
{
    uint32_t i = own_element();
    if (i >= count)
        return;
    float value = in[i] + added[i];
    out[i] = relu && value <= 0 ? 0 : value;
}

enum status add_forward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    add_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(layer->in, layer->added->out, count,
                                                              layer->relu, layer->out);
    CUDA_TRY_LAUNCH("add_kernel");
    return STATUS_OK;
}

/* Copies the gradient, because the gradients of the two inputs cannot share a buffer. A dropout before the
 * addition changes in_delta in place, but added_backward() needs the unchanged gradient for the other
 * input. */
enum status add_backward(const struct device_layer *layer, const struct pass *pass)
{
    size_t bytes = pass->count * layer->layer->out_values * sizeof *layer->in_delta;
    if (layer->in_delta)
        CUDA_TRY(cudaMemcpyAsync(layer->in_delta, layer->out_delta, bytes, cudaMemcpyDeviceToDevice,
                                 pass->stream));
    return STATUS_OK;
}

static __global__ void added_kernel(const float *from, size_t count, float *to)
{
    size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < count)
        to[i] += from[i];
}

enum status values_add(const float *from, size_t count, float *to, cudaStream_t stream)
{
    added_kernel<<<blocks_for(count), BLOCK, 0, stream>>>(from, count, to);
    CUDA_TRY_LAUNCH("added_kernel");
    return STATUS_OK;
}

enum status added_backward(const struct device_layer *layer, const struct device_layer *end,
                           const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    for (const struct device_layer *add = layer + 1; add < end; add++)
        if (add->added == layer)
            TRY(values_add(add->out_delta, count, layer->out_delta, pass->stream));
    return STATUS_OK;
}

/* ---- The mean of each channel ---- */

/* Warp i averages channel i of the batch. Lane j sums positions j, j + 32, ...; a tree reduction adds these
 * sums. */
static __global__ void mean_kernel(const float *in, uint32_t positions, uint32_t count, float *out)
{
    uint32_t i = own_element() / 32, lane = threadIdx.x % 32;
    if (i >= count)
        return;
    float sum = 0;
    for (uint32_t position = lane; position < positions; position += 32)
        sum += in[(size_t)i * positions + position];
    sum = warp_sum(sum);
    if (lane == 0)
        out[i] = sum / (float)positions;
}

enum status mean_forward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->out_values;
    uint32_t positions = (uint32_t)(layer->layer->in_values / layer->layer->out_values);
    mean_kernel<<<blocks_for((size_t)count * 32), BLOCK, 0, pass->stream>>>(layer->in, positions, count,
                                                                            layer->out);
    CUDA_TRY_LAUNCH("mean_kernel");
    return STATUS_OK;
}

static __global__ void mean_back_kernel(const float *out_deltas, const struct divider positions,
                                        uint32_t count, float *in_deltas)
{
    uint32_t i = own_element();
    if (i < count)
        in_deltas[i] = out_deltas[positions.quotient(i)] / (float)positions.by;
}

enum status mean_backward(const struct device_layer *layer, const struct pass *pass)
{
    uint32_t count = pass->count * (uint32_t)layer->layer->in_values;
    uint32_t positions = (uint32_t)(layer->layer->in_values / layer->layer->out_values);
    if (!layer->in_delta)
        return STATUS_OK;
    mean_back_kernel<<<blocks_for(count), BLOCK, 0, pass->stream>>>(layer->out_delta, divider_of(positions),
                                                                    count, layer->in_delta);
    CUDA_TRY_LAUNCH("mean_back_kernel");
    return STATUS_OK;
}
