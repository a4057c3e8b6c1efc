/* Transposes 8 x 8 floats in registers, with AVX, which both vector instruction sets include. */
#ifndef FDSL_CPU_TRAIN_OMP_TRANSPOSE_H
#define FDSL_CPU_TRAIN_OMP_TRANSPOSE_H

#define BLOCK 8

static inline void transpose_block(const float *from, size_t from_pitch, float *to, size_t to_pitch)
{
    __m256 row[BLOCK], pair[BLOCK], four[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        row[i] = _mm256_loadu_ps(from + (size_t)i * from_pitch);
    for (int i = 0; i < BLOCK; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < BLOCK; i += 4) {
        four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
        four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
    }
    for (int i = 0; i < BLOCK / 2; i++) {
        _mm256_storeu_ps(to + (size_t)i * to_pitch, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
        _mm256_storeu_ps(to + (size_t)(i + 4) * to_pitch, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
    }
}

#endif
