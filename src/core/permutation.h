/* Random permutations with random access. permutation_at() returns element i of a permutation of n elements
 * without computing the other elements. It needs constant memory, and its results are bit-identical on host
 * and device.
 *
 * A Feistel network permutes the numbers of 2h bits, where h is the smallest number with h >= 4 and 2^(2h) >=
 * n. Smaller h are not used, because networks of 4 bits (h = 2) are biased for any number of rounds. Numbers
 * that are not below n are permuted again until the result is below n ("cycle walking": Black and Rogaway,
 * "Ciphers with arbitrary finite domains", CT-RSA 2002). If n > 64, this takes fewer than four permutations
 * on average. Mitchell et al., "Bandwidth-optimal random shuffling for GPUs", ACM TOPC 2022, use such
 * networks with rounds of Philox to shuffle on GPUs. docs/ops.md describes the statistical tests by which the
 * number of rounds was chosen. */
#ifndef FDSL_CORE_PERMUTATION_H
#define FDSL_CORE_PERMUTATION_H

#include <stdint.h>

#include "core/philox.h"

#ifndef PERMUTATION_ROUNDS /* tests set other numbers */
#define PERMUTATION_ROUNDS 8
#endif

struct permutation {
    uint64_t count;
    uint32_t half; /* bits of one half of a number */
    uint32_t keys[PERMUTATION_ROUNDS][2];
};

/* Returns the permutation of 0 .. count - 1 that `seed` selects. */
FDSL_HD struct permutation permutation_begin(uint64_t seed, uint64_t count)
{
    struct permutation permutation;
    permutation.count = count;
    permutation.half = 4;
    while (permutation.half < 32 && count > UINT64_C(1) << 2 * permutation.half)
        permutation.half++;
    for (uint32_t round = 0; round < PERMUTATION_ROUNDS; round++) {
        struct philox_block block =
            philox(philox_key(seed), round, (uint32_t)count, (uint32_t)(count >> 32), 0x7065726du);
        permutation.keys[round][0] = block.word[0];
        permutation.keys[round][1] = block.word[1];
    }
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
