/* Barriers in shared memory, bulk copies, and counts in device memory that blocks publish to each other. */
#ifndef FDSL_CUDA_COMMON_BARRIER_CUH
#define FDSL_CUDA_COMMON_BARRIER_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_at(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- Barriers (mbarrier) ---- */

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(shared_at(barrier)), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}"
                 :
                 : "r"(shared_at(barrier))
                 : "memory");
}

/* Returns whether the phase with this parity is complete. The phase before the first one has parity 1. */
static __device__ __forceinline__ bool barrier_complete(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_at(barrier)), "r"(parity)
                 : "memory");
    return done;
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    uint32_t done;
    do /* try_wait may suspend the thread for a limited time */
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(shared_at(barrier)), "r"(parity)
                     : "memory");
    while (!done);
#else
    while (!barrier_complete(barrier, parity))
        continue;
#endif
}

/* ---- Copies ---- */

/* Makes this thread's earlier accesses to shared memory visible to bulk copies. */
static __device__ __forceinline__ void bulk_fence(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
#endif
}

/* Starts a copy from device to shared memory. The barrier's phase completes only after the copy. Addresses
 * and sizes of bulk copies must be multiples of 16 bytes. */
static __device__ __forceinline__ void bulk_load(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                                 uint64_t *barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_at(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_at(to)), "l"(from), "r"(bytes), "r"(shared_at(barrier))
                 : "memory");
#endif
}

/* Starts a copy from shared to device memory. */
static __device__ __forceinline__ void bulk_store(uint8_t *to, const uint8_t *from, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(to), "r"(shared_at(from)), "r"(bytes)
                 : "memory");
#endif
}

/* Waits until this thread's bulk_store() calls have read shared memory. */
static __device__ __forceinline__ void bulk_store_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
#endif
}

/* ---- Counts in device memory: one byte each, 1 + the value; 0 if it is not known yet ---- */

static __device__ __forceinline__ void count_publish(uint8_t *count, uint32_t value)
{
    asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" : : "l"(count), "r"(value + 1) : "memory");
}

/* Reads 16 counts. */
static __device__ __forceinline__ void words_poll(const uint8_t *counts, uint32_t (&words)[4])
{
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(counts)
                 : "memory");
}

#endif
