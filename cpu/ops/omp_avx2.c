/* The kernel of `ops-omp` for AVX2, FMA and F16C: vectors of 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANES 8
typedef __m256 vreal;

#define v_load(p)      _mm256_loadu_ps((const float *)(p))
#define v_store(p, a)  _mm256_storeu_ps(p, a)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_load_half(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define v_load_bf16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))

/* Converts to f16; NaN becomes 0x7FFF. */
static inline void v_store_half(void *p, __m256 a)
{
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    __m128i nans = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    __m128i bits = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)p, _mm_blendv_epi8(bits, _mm_set1_epi16(0x7FFF), nans));
}

#include "omp_simd.h"

OPS_KERNEL(ops_kernel_avx2);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
