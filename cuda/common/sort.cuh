/* The radix sort of CUB. Its only instantiation is in sort.cu, because it takes eight seconds to compile. */
#ifndef FDSL_CUDA_COMMON_SORT_CUH
#define FDSL_CUDA_COMMON_SORT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* Sorts `count` values by the lowest `bits` bits of their keys. Values with equal keys stay in order. If
 * `scratch` is NULL, only sets *scratch_bytes to the bytes that the sort needs. */
cudaError_t sort_pairs(void *scratch, size_t *scratch_bytes, const uint64_t *keys, uint64_t *sorted_keys,
                       const uint32_t *values, uint32_t *sorted_values, int64_t count, int bits,
                       cudaStream_t stream);

#endif
