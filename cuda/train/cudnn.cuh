/* Convolutions by cuDNN, for engines that are measured against ours. */
#ifndef FDSL_CUDA_TRAIN_CUDNN_CUH
#define FDSL_CUDA_TRAIN_CUDNN_CUH

#include "train/network.cuh"

/* In true fp32, and with TF32 on tensor cores where cuDNN likes to. */
extern const struct layer_passes cudnn_conv_fp32, cudnn_conv_tf32;

/* STATUS_UNAVAILABLE with a remedy where there is no cuDNN. */
enum status cudnn_probe(void);

#endif
