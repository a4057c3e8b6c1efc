/* The hidden values between the two linear layers of a block, and their gradients: matrix products and GELU.
 * On compute capability 9.0, one kernel computes a product and GELU if the sizes fit (hidden_hopper.cu). */
#include "train/vit/hidden.cuh"

#include "common/check.cuh"

enum status vit_hidden(struct vit_multiplier *multiplier, const struct vit_linear *linear, const bf16 *inputs,
                       const bf16 *weights, const bf16 *bias, bf16 *hidden, bf16 *active, cudaStream_t stream)
{
#if HAVE_HOPPER
    bool hopper;
    TRY(hidden_hopper_fits(linear->in, linear->out, &hopper));
    if (hopper)
        return hidden_hopper_forward(linear, inputs, weights, bias, hidden, active, stream);
#endif
    TRY(vit_linear_forward(multiplier, linear, false, inputs, weights, bias, hidden, stream));
    return vit_gelu(hidden, (size_t)linear->rows * linear->out, active, stream);
}

enum status vit_hidden_backward(struct vit_multiplier *multiplier, const struct vit_linear *linear,
                                const bf16 *out_deltas, const bf16 *weights, const bf16 *hidden, bf16 *deltas,
                                float *bias, struct vit_sums *sums, cudaStream_t stream)
{
#if HAVE_HOPPER
    bool hopper;
    TRY(hidden_hopper_fits(linear->out, linear->in, &hopper));
    if (hopper)
        return hidden_hopper_backward(linear, out_deltas, weights, hidden, deltas, bias, sums, stream);
#endif
    TRY(vit_linear_inputs(multiplier, linear, out_deltas, weights, deltas, stream));
    return vit_gelu_backward(hidden, linear->rows, linear->in, deltas, bias, sums, stream);
}
