/* Sums over the threads of a warp or of a block. */
#ifndef FDSL_CUDA_COMMON_SUMS_CUH
#define FDSL_CUDA_COMMON_SUMS_CUH

#include <stdint.h>

/* Adds up one value per lane. All lanes of the warp call this function, and all of them get the sum. */
template <class T> static __device__ __forceinline__ T warp_sum(T value)
{
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
        value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

/* Adds up the values of each array. Each array is in shared memory and has one value per thread of a block of
 * THREADS threads; thread i has written value i. The sum replaces value 0, and only thread 0 may read it
 * without a barrier. */
template <uint32_t THREADS, class... T> static __device__ __forceinline__ void block_sums(T *...arrays)
{
    for (uint32_t half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            ((arrays[threadIdx.x] += arrays[threadIdx.x + half]), ...);
    }
}

#endif
