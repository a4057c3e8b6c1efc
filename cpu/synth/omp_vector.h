/* Vector operations whose intrinsics have the same name in AVX2 and AVX-512, apart from prefix and suffix.
 * The including file defines vint, V() and V_BITS(). */
#define v_load(p)             V_BITS(_loadu)((const vint *)(p))
#define v_store(p, a)         V_BITS(_storeu)((vint *)(p), a)
#define v_and(a, b)           V_BITS(_and)(a, b)
#define v_or(a, b)            V_BITS(_or)(a, b)
#define v_xor(a, b)           V_BITS(_xor)(a, b)
#define v_set(n)              V(set1_epi32)((int32_t)(n))
#define v_add(a, b)           V(add_epi32)(a, b)
#define v_sub(a, b)           V(sub_epi32)(a, b)
#define v_multiply(a, b)      V(mullo_epi32)(a, b)
#define v_multiply_wide(a, b) V(mul_epu32)(a, b)
#define v_multiply_add(a, b)  V(madd_epi16)(a, b)
#define v_left(a, n)          V(slli_epi32)(a, n)
#define v_right(a, n)         V(srli_epi32)(a, n)
#define v_abs(a)              V(abs_epi32)(a)
#define v_max(a, b)           V(max_epi32)(a, b)
#define v_min(a, b)           V(min_epi32)(a, b)
#define v_min_unsigned(a, b)  V(min_epu32)(a, b)

#define v_real_load(p)        V(loadu_ps)(p)
#define v_real_store(p, a)    V(storeu_ps)(p, a)
#define v_real_set(x)         V(set1_ps)(x)
#define v_real(a)             V(cvtepi32_ps)(a)
#define v_truncate(x)         V(cvttps_epi32)(x)
#define v_real_sub(x, y)      V(sub_ps)(x, y)
#define v_real_mul(x, y)      V(mul_ps)(x, y)
#define v_real_min(x, y)      V(min_ps)(x, y)
#define v_real_max(x, y)      V(max_ps)(x, y)
#define v_fma(x, y, z)        V(fmadd_ps)(x, y, z)  /* x y + z */
#define v_fms(x, y, z)        V(fmsub_ps)(x, y, z)  /* x y - z */
#define v_fnma(x, y, z)       V(fnmadd_ps)(x, y, z) /* -x y + z */

/* Operations on AVX2 vectors of eight integers. The AVX-512 kernel uses these operations, too. */
#define v8_load(p)            _mm256_loadu_si256((const __m256i *)(p))
#define v8_store(p, a)        _mm256_storeu_si256((__m256i *)(p), a)
#define v8_set(n)             _mm256_set1_epi32((int32_t)(n))
#define v8_add(a, b)          _mm256_add_epi32(a, b)
#define v8_multiply_add(a, b) _mm256_madd_epi16(a, b)
