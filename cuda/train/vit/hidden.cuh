/* Shared by hidden.cu and hidden_hopper.cu: matrix products fused with GELU. */
#ifndef FDSL_CUDA_TRAIN_VIT_HIDDEN_CUH
#define FDSL_CUDA_TRAIN_VIT_HIDDEN_CUH

#include "train/vit/kernels.cuh"

/* Sets `*fits` to whether the functions below work on the current device, for sums of `inner` products and
 * `columns` hidden values. */
enum status hidden_hopper_fits(uint32_t inner, uint32_t columns, bool *fits);
/* These functions compute what vit_hidden() and vit_hidden_backward() compute. */
enum status hidden_hopper_forward(const struct vit_linear *linear, const bf16 *inputs, const bf16 *weights,
                                  const bf16 *bias, bf16 *hidden, bf16 *active, cudaStream_t stream);
enum status hidden_hopper_backward(const struct vit_linear *linear, const bf16 *out_deltas,
                                   const bf16 *weights, const bf16 *hidden, bf16 *deltas, float *bias,
                                   struct vit_sums *sums, cudaStream_t stream);

#endif
