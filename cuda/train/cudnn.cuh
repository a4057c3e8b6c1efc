/* Convolutions by cuDNN, for the engines that serve as baselines. */
#ifndef FDSL_CUDA_TRAIN_CUDNN_CUH
#define FDSL_CUDA_TRAIN_CUDNN_CUH

#include "train/network.cuh"

/* Strict fp32; and TF32 on tensor cores where cuDNN chooses it. */
extern const struct layer_passes cudnn_conv_fp32, cudnn_conv_tf32;

/* STATUS_UNAVAILABLE with a remedy if cuDNN is missing. */
enum status cudnn_probe(void);

#endif
