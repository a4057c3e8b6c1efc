/* Thin wrappers around PTX instructions for tensor cores (sm_80 and later). mma.m16n8k16 multiplies fp16 and
 * bf16; mma.m16n8k8 multiplies TF32. ldmatrix loads fragments from shared memory. cp.async copies from global
 * to shared memory, bypassing registers.
 *
 * D = A B + C, where A (16, k) is row-major, B (k, 8) is column-major, and C and D (16, 8) are fp32. With g =
 * l / 4 and t = l % 4, lane l of a warp holds (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "...
 * m16n8k8"):
 *
 *     C, D            c[0], c[1]: row g, columns 2t, 2t + 1;  c[2], c[3]: row g + 8, the same columns
 *     A of 16 bits    a[0]: row g, columns 2t, 2t + 1;  a[1]: row g + 8, the same columns
 *                     a[2]: row g, columns 2t + 8, 2t + 9;  a[3]: row g + 8, the same columns
 *     B of 16 bits    b[0]: rows 2t, 2t + 1 of column g;  b[1]: rows 2t + 8, 2t + 9
 *     A of TF32       a[0]: (g, t);  a[1]: (g + 8, t);  a[2]: (g, t + 4);  a[3]: (g + 8, t + 4)
 *     B of TF32       b[0]: (t, g);  b[1]: (t + 4, g)
 *
 * A word of A or B holds one TF32 value or two 16-bit values. The value with the lower row or column is in
 * the lower half. Sums are fp32. The hardware determines the order of additions, which is the same in every
 * run on a GPU. */
#ifndef FDSL_CUDA_TRAIN_MMA_CUH
#define FDSL_CUDA_TRAIN_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#include "train/stored.cuh"

/* ---- Words of two 16-bit values ---- */

static __device__ __forceinline__ float bf16_low(uint32_t word)
{
    return __uint_as_float(word << 16);
}

static __device__ __forceinline__ float bf16_high(uint32_t word)
{
    return __uint_as_float(word & 0xffff0000u);
}

/* The opposite of pack(). */
template <class T> static __device__ __forceinline__ float2 values_of(uint32_t word)
{
    static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "no 16-bit type");
    if constexpr (std::is_same<T, __nv_bfloat16>::value)
        return {bf16_low(word), bf16_high(word)};
    else
        return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}

/* ---- c += a b ---- */

static __device__ __forceinline__ void mma_16816(float c[4], const uint32_t a[4], const uint32_t b[2], __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma_16816(float c[4], const uint32_t a[4], const uint32_t b[2],
                                                 __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma_1688_tf32(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Rounds to the nearest TF32, ties away from zero; returns a word for mma_1688_tf32(). */
static __device__ __forceinline__ uint32_t mma_tf32(float value)
{
    uint32_t word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
    return word;
}

/* ---- Fragments from shared memory ---- */

/* mma_load4() and mma_load4_transposed() load four 8 x 8 matrices of 16-bit values. Lanes 8i to 8i + 7 pass
 * the row addresses of matrix i (16 bytes per row, 16-byte aligned). With g = l / 4 and t = l % 4,
 * mma_load4() puts row g, columns 2t and 2t + 1 of matrix i into word[i] of lane l. mma_load4_transposed()
 * puts column g, rows 2t and 2t + 1 into word[i]. `row` is a shared memory address or, in the overloads
 * below, a pointer. */
static __device__ __forceinline__ void mma_load4(uint32_t word[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row));
}

static __device__ __forceinline__ void mma_load4_transposed(uint32_t word[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row));
}

/* Loads two 8 x 8 matrices, transposed. Lanes 0 to 15 pass the row addresses. */
static __device__ __forceinline__ void mma_load2_transposed(uint32_t word[2], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(word[0]), "=r"(word[1])
                 : "r"(row));
}

/* Overloads for pointers. */
static __device__ __forceinline__ void mma_load4(uint32_t word[4], const void *row)
{
    mma_load4(word, (uint32_t)__cvta_generic_to_shared(row));
}

static __device__ __forceinline__ void mma_load4_transposed(uint32_t word[4], const void *row)
{
    mma_load4_transposed(word, (uint32_t)__cvta_generic_to_shared(row));
}

/* ---- Asynchronous copies from global to shared memory ---- */

/* Starts copying 16 bytes; both addresses are 16-byte aligned. If `inside` is false, writes zeros; `from`
 * must still be a valid address. */
static __device__ __forceinline__ void copy_async16(void *to, const void *from, bool inside = true)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from), "r"(inside ? 16 : 0));
}

/* Copies like copy_async16(), but through L1, for values that neighbouring threads or blocks read again. */
static __device__ __forceinline__ void copy_async16_cached(void *to, const void *from, bool inside)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from), "r"(inside ? 16 : 0));
}

/* Combines this thread's copies since the previous call into one group, for copy_wait(). */
static __device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;");
}

/* Waits for all of this thread's groups of copies, except the latest LEFT groups. To see the copies of other
 * threads, a barrier is needed too. */
template <int LEFT> static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

#endif
