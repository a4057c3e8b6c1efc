/* Philox4x32-10: a counter-based random number generator, bit-identical on every host and device.
 *
 * Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block of four 32-bit words is a
 * pure function of a 128-bit counter and a 64-bit key. tests/test_philox.c checks the published known
 * answers. */
#ifndef FDSL_CORE_PHILOX_H
#define FDSL_CORE_PHILOX_H

#include <stdint.h>

#include "core/portable.h"

#define PHILOX_ROUNDS 10
#define PHILOX_M0     0xD2511F53u
#define PHILOX_M1     0xCD9E8D57u
#define PHILOX_W0     0x9E3779B9u /* golden ratio: the increment of key word 0 */
#define PHILOX_W1     0xBB67AE85u /* sqrt(3) - 1: the increment of key word 1 */

struct philox_block {
    uint32_t word[4];
};

struct philox_key {
    uint32_t word[2];
};

FDSL_HD struct philox_key philox_key(uint64_t seed)
{
    struct philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    return key;
}

/* Computes the high and low words of a * b. On a GPU, one instruction computes the product. The code uses
 * inline PTX, because the compiler does not always generate this instruction. */
FDSL_HD void philox_multiply(uint32_t a, uint32_t b, uint32_t *high, uint32_t *low)
{
#ifdef __CUDA_ARCH__
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    asm("mov.b64 {%0, %1}, %2;" : "=r"(*low), "=r"(*high) : "l"(product));
#else
    uint64_t product = (uint64_t)a * b;
    *high = (uint32_t)(product >> 32);
    *low = (uint32_t)product;
#endif
}

/* Returns the counter after one round with the round key `key`. */
FDSL_HD struct philox_block philox_round(struct philox_block counter, struct philox_key key)
{
    uint32_t high0, low0, high1, low1;
    philox_multiply(PHILOX_M0, counter.word[0], &high0, &low0);
    philox_multiply(PHILOX_M1, counter.word[2], &high1, &low1);
    struct philox_block next = {
        {high1 ^ counter.word[1] ^ key.word[0], low1, high0 ^ counter.word[3] ^ key.word[1], low0}};
    return next;
}

/* Returns the key of round `round`, counted from 0. */
FDSL_HD struct philox_key philox_round_key(struct philox_key key, uint32_t round)
{
    struct philox_key next = {{key.word[0] + round * PHILOX_W0, key.word[1] + round * PHILOX_W1}};
    return next;
}

/* Returns the block of counter (c0, c1, c2, c3) with `key`. */
FDSL_HD struct philox_block philox(struct philox_key key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3)
{
    struct philox_block block = {{c0, c1, c2, c3}};
    for (uint32_t round = 0; round < PHILOX_ROUNDS; round++)
        block = philox_round(block, philox_round_key(key, round));
    return block;
}

/* Returns word i mod 4 of a block. Selects instead of indexing, so that a GPU keeps the block in
 * registers. */
FDSL_HD uint32_t philox_word(struct philox_block block, uint32_t i)
{
    return i & 2 ? (i & 1 ? block.word[3] : block.word[2]) : (i & 1 ? block.word[1] : block.word[0]);
}

/* Maps a random word to 0 .. count-1, count >= 1, in integer arithmetic: floor(word * count / 2^32). */
FDSL_HD uint32_t philox_below(uint32_t word, uint32_t count)
{
    return (uint32_t)(((uint64_t)word * count) >> 32);
}

/* Maps a random word to [0, 1), a multiple of 2^-24. */
FDSL_HD float philox_unit(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24f;
}

/* ---- Permutations ---- */

/* Random permutations with random access. permutation_at() returns element i of a permutation of n elements
 * without computing the other elements. It needs constant memory, and its results are bit-identical on host
 * and device.
 *
 * A Feistel network permutes the numbers of 2h bits, where h is the smallest number with h >= 4 and 2^(2h) >=
 * n. Smaller h are not used, because networks of 4 bits (h = 2) are biased for any number of rounds. Numbers
 * that are not below n are permuted again until the result is below n ("cycle walking": Black and Rogaway,
 * "Ciphers with arbitrary finite domains", CT-RSA 2002). If n > 64, this takes fewer than four permutations
 * on average. Mitchell et al., "Bandwidth-optimal random shuffling for GPUs", ACM TOPC 2022, use such
 * networks with rounds of Philox to shuffle on GPUs. The number of rounds was chosen by the statistical tests
 * of tests/test_permutation.c (docs/notes/ops.md). */

#ifndef PERMUTATION_ROUNDS /* tests set other numbers */
#define PERMUTATION_ROUNDS 8
#endif

struct permutation {
    uint64_t count;
    uint32_t half; /* bits of one half of a number */
    uint32_t keys[PERMUTATION_ROUNDS][2];
};

/* Computes the key of a round for permutation_begin(). Rounds may be computed in any order, also in parallel.
 */
FDSL_HD void permutation_key(uint64_t seed, uint64_t count, uint32_t round, uint32_t key[2])
{
    struct philox_block block =
        philox(philox_key(seed), round, (uint32_t)count, (uint32_t)(count >> 32), 0x7065726du);
    key[0] = block.word[0];
    key[1] = block.word[1];
}

/* Returns the permutation of 0 .. count - 1 that `seed` selects. */
FDSL_HD struct permutation permutation_begin(uint64_t seed, uint64_t count)
{
    struct permutation permutation;
    permutation.count = count;
    permutation.half = 4;
    while (permutation.half < 32 && count > UINT64_C(1) << 2 * permutation.half)
        permutation.half++;
    for (uint32_t round = 0; round < PERMUTATION_ROUNDS; round++)
        permutation_key(seed, count, round, permutation.keys[round]);
    return permutation;
}

/* The round function: two steps that multiply as Philox does and combine both words of the product. */
FDSL_HD uint32_t permutation_mix(uint32_t value, const uint32_t key[2])
{
    uint32_t high, low;
    philox_multiply(PHILOX_M0, value ^ key[0], &high, &low);
    philox_multiply(PHILOX_M1, high ^ low ^ key[1], &high, &low);
    return high ^ low;
}

/* Returns element i of the permutation, i < count. */
FDSL_HD uint64_t permutation_at(const struct permutation *permutation, uint64_t i)
{
    uint32_t half = permutation->half, mask = 0xFFFFFFFFu >> (32 - half);
    do {
        uint32_t left = (uint32_t)(i >> half) & mask, right = (uint32_t)i & mask;
        for (int round = 0; round < PERMUTATION_ROUNDS; round++) {
            uint32_t next = left ^ (permutation_mix(right, permutation->keys[round]) & mask);
            left = right;
            right = next;
        }
        i = (uint64_t)left << half | right;
    } while (i >= permutation->count);
    return i;
}

/* Returns the i for which permutation_at() returns `element`, element < count. */
FDSL_HD uint64_t permutation_inverse(const struct permutation *permutation, uint64_t element)
{
    uint32_t half = permutation->half, mask = 0xFFFFFFFFu >> (32 - half);
    do {
        uint32_t left = (uint32_t)(element >> half) & mask, right = (uint32_t)element & mask;
        for (int round = PERMUTATION_ROUNDS - 1; round >= 0; round--) {
            uint32_t before = right ^ (permutation_mix(left, permutation->keys[round]) & mask);
            right = left;
            left = before;
        }
        element = (uint64_t)left << half | right;
    } while (element >= permutation->count);
    return element;
}

#endif
