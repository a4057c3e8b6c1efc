/* Convolutions by cuDNN, for the engines that serve as baselines. */
#ifndef FDSL_CUDA_TRAIN_CUDNN_CUH
#define FDSL_CUDA_TRAIN_CUDNN_CUH

#include "train/network.cuh"

/* cudnn_conv_fp32 computes in strict fp32. cudnn_conv_tf32 lets cuDNN use TF32 on tensor cores. */
extern const struct layer_passes cudnn_conv_fp32, cudnn_conv_tf32;

/* Loads cuDNN. Returns STATUS_UNAVAILABLE, with a remedy in the message, if it is missing. */
enum status cudnn_probe(void);

#endif
