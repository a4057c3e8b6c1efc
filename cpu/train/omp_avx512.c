/* The kernel of `train-omp` for AVX-512 F, BW, DQ and VL: vectors of 16 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define LANES      16
#define PANEL_MAX  4 /* takes 29 of 32 registers: 6 x 4 sums, 4 vectors of b, 1 factor */
#define SPREAD_MAX 9 /* takes 19 registers: 9 sums, 9 weights, 1 factor */
typedef __m512 vreal;
typedef __m512i vint;

#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, a)  _mm512_storeu_ps(p, a)
#define v_set(x)       _mm512_set1_ps(x)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
/* _mm512_max_ps() returns its second operand if either operand is NaN, so v_relu() keeps NaN. */
#define v_relu(a)           _mm512_max_ps(_mm512_setzero_ps(), a)
#define v_whole(n)          _mm512_set1_epi32(n)
#define v_store_whole(p, a) _mm512_storeu_si512(p, a)
#define v_greater(a, b) \
    _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q))
#define v_choose(mask, a, b) _mm512_mask_blend_ps(_mm512_movepi32_mask(mask), b, a)

#include "omp_simd.h"

NET_KERNEL(net_kernel_avx512);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
