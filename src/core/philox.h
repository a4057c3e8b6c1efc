/* Philox4x32-10: a counter-based random stream, the same bits on every host and device.
 *
 * Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block of four 32-bit words is a
 * pure function of a 128-bit counter and a 64-bit key; tests/ holds the published known answers.
 */
#ifndef FDSL_CORE_PHILOX_H
#define FDSL_CORE_PHILOX_H

#include <stdint.h>

#include "core/portable.h"

#define PHILOX_ROUNDS 10
#define PHILOX_M0     0xD2511F53u
#define PHILOX_M1     0xCD9E8D57u
#define PHILOX_W0     0x9E3779B9u /* the golden ratio: the key's first increment */
#define PHILOX_W1     0xBB67AE85u /* the square root of three, less one: the second */

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

/* The block of counter (c0, c1, c2, c3) under `key`. */
FDSL_HD struct philox_block philox(struct philox_key key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3)
{
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)PHILOX_M0 * c0, product1 = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key.word[0];
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key.word[1];
        c3 = (uint32_t)product0;
        key.word[0] += PHILOX_W0;
        key.word[1] += PHILOX_W1;
    }
    struct philox_block block = {{c0, c1, c2, c3}};
    return block;
}

/* Word i mod 4 of a block. Selected, not indexed: a GPU keeps the block in registers. */
FDSL_HD uint32_t philox_word(struct philox_block block, uint32_t i)
{
    return i & 2 ? (i & 1 ? block.word[3] : block.word[2]) : (i & 1 ? block.word[1] : block.word[0]);
}

/* A draw from 0 .. count-1, count >= 1, by integer arithmetic: floor(word * count / 2^32). */
FDSL_HD uint32_t philox_below(uint32_t word, uint32_t count)
{
    return (uint32_t)(((uint64_t)word * count) >> 32);
}

/* A draw from [0, 1), a multiple of 2^-24. */
FDSL_HD float philox_unit(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24f;
}

#endif
