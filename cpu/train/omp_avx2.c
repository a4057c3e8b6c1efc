/* The kernel of `train-omp` for AVX2 and FMA: vectors of 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define LANES      8
#define PANEL_MAX  2 /* takes 15 of 16 registers: 6 x 2 sums, 2 vectors of b, 1 factor */
#define SPREAD_MAX 6 /* takes 13 registers: 6 sums, 6 weights, 1 factor */
typedef __m256 vreal;
typedef __m256i vint;

#define v_load(p)      _mm256_loadu_ps(p)
#define v_store(p, a)  _mm256_storeu_ps(p, a)
#define v_set(x)       _mm256_set1_ps(x)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
/* _mm256_max_ps() returns its second operand if either operand is NaN, so v_relu() keeps NaN. */
#define v_relu(a)           _mm256_max_ps(_mm256_setzero_ps(), a)
#define v_whole(n)          _mm256_set1_epi32(n)
#define v_store_whole(p, a) _mm256_storeu_si256((__m256i *)(p), a)
#define v_greater(a, b) \
    _mm256_castps_si256(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), _mm256_cmp_ps(a, a, _CMP_UNORD_Q)))
#define v_choose(mask, a, b) _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))

#include "omp_simd.h"

NET_KERNEL(net_kernel_avx2);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
