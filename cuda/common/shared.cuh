/* Sums over the threads of a warp or of a block, and access to shared memory through 32-bit byte addresses.
 *
 * If dynamic shared memory is accessed through a pointer, the compiler recomputes its address at every use,
 * from special registers that are slow to read. In inner loops, an address that stays in a register costs a
 * third as much as a recomputed one. An access of 2, 4, 8 or 16 bytes must be aligned to its size. */
#ifndef FDSL_CUDA_COMMON_SHARED_CUH
#define FDSL_CUDA_COMMON_SHARED_CUH

#include <stdint.h>

/* ---- Access through addresses ---- */

/* Returns `value` and hides from the compiler how it was computed. The compiler therefore keeps it in a
 * register instead of recomputing it. */
static __device__ __forceinline__ uint32_t keep(uint32_t value)
{
    asm volatile("" : "+r"(value));
    return value;
}

template <class T> static __device__ __forceinline__ T *keep(T *pointer)
{
    asm volatile("" : "+l"(pointer));
    return pointer;
}

/* Returns the 32-bit address of the shared memory that `pointer` points to. */
static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return keep((uint32_t)__cvta_generic_to_shared(pointer));
}

static __device__ __forceinline__ void shared_store(uint32_t address, uint32_t value)
{
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

static __device__ __forceinline__ void shared_store(uint32_t address, uint2 value)
{
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" : : "r"(address), "r"(value.x), "r"(value.y) : "memory");
}

static __device__ __forceinline__ void shared_store(uint32_t address, uint4 value)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

static __device__ __forceinline__ uint32_t shared_load(uint32_t address)
{
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

/* Loads 16 bits. The upper half of the result is 0. */
static __device__ __forceinline__ uint32_t shared_load16(uint32_t address)
{
    uint32_t value;
    asm volatile("{.reg .u16 half; ld.shared.u16 half, [%1]; cvt.u32.u16 %0, half;}"
                 : "=r"(value)
                 : "r"(address)
                 : "memory");
    return value;
}

static __device__ __forceinline__ uint2 shared_load2(uint32_t address)
{
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
    return value;
}

static __device__ __forceinline__ uint4 shared_load4(uint32_t address)
{
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

/* Atomic addition; returns the old value. Unlike with atomicAdd(), the compiler does not add up the values of
 * the warp first. */
static __device__ __forceinline__ uint32_t shared_add(uint32_t address, uint32_t value)
{
    uint32_t old;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(value) : "memory");
    return old;
}

/* Atomic maximum that does not return the old value. */
static __device__ __forceinline__ void shared_max(uint32_t address, uint32_t value)
{
    asm volatile("red.shared.max.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

/* The same as shared_store(), in those threads where `here` is set. The compiler makes it one instruction
 * instead of a branch. */
static __device__ __forceinline__ void shared_store_if(bool here, uint32_t address, uint4 value)
{
    asm volatile("{.reg .pred here; setp.ne.u32 here, %5, 0; @here st.shared.v4.u32 [%0], {%1, %2, %3, %4};}"
                 :
                 : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"((uint32_t)here)
                 : "memory");
}

/* ---- Sums ---- */

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
