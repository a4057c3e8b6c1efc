/* The functions of CUB that variants use. Only cub.cu includes CUB, because its headers take eight seconds to
 * compile. If `scratch` is NULL, a function only sets *scratch_bytes to the bytes that it needs. */
#ifndef FDSL_CUDA_COMMON_CUB_CUH
#define FDSL_CUDA_COMMON_CUB_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* Lists the numbers i < count with flags[i] = 1, in order. Stores how many there are in *listed. */
cudaError_t list_flagged(void *scratch, size_t *scratch_bytes, uint8_t *flags, uint32_t *numbers,
                         uint64_t *listed, int64_t count, cudaStream_t stream);

/* Sorts `count` values by the lowest `bits` bits of their keys. Values with equal keys stay in order. */
cudaError_t sort_pairs(void *scratch, size_t *scratch_bytes, const uint64_t *keys, uint64_t *sorted_keys,
                       const uint32_t *values, uint32_t *sorted_values, int64_t count, int bits,
                       cudaStream_t stream);

#endif
