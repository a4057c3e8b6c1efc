/* The kernel of `ops-omp` for AVX-512: vectors of 16 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,prefer-vector-width=512")
#endif

#define LANES 16
typedef __m512 vreal;

#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, a)  _mm512_storeu_ps(p, a)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_load_half(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define v_load_bf16(p)   \
    _mm512_castsi512_ps( \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))

/* Converts to f16; NaN becomes 0x7FFF. */
static inline void v_store_half(void *p, __m512 a)
{
    __m256i bits = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i *)p, _mm256_mask_mov_epi16(bits, nan, _mm256_set1_epi16(0x7FFF)));
}

#include "omp_simd.h"

OPS_KERNEL(ops_kernel_avx512);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
