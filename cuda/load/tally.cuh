/* The hashes of load/tally.h, of bytes that have arrived on the device, or, by the same lines, on the host.
 */
#ifndef FDSL_CUDA_LOAD_TALLY_CUH
#define FDSL_CUDA_LOAD_TALLY_CUH

#include "load/tally.h"
#include "load/xxh3.cuh"

/* tally_edges(): XXH3-64, with the size as the seed, of all bytes up to 2 TALLY_EDGE, else of both edges. */
FDSL_HD uint64_t device_tally_edges(const uint8_t *bytes, uint64_t size)
{
    uint64_t words[16];
    if (size <= 2 * TALLY_EDGE)
        return xxh3_64(bytes, size, size);
    for (uint32_t i = 0; i < 8; i++) {
        words[i] = xxh3_read64(bytes + 8 * i);
        words[8 + i] = xxh3_read64(bytes + size - TALLY_EDGE + 8 * i);
    }
    return xxh3_of_128(words, size);
}

/* tally_whole() */
FDSL_HD uint64_t device_tally_whole(const uint8_t *bytes, uint64_t size)
{
    return xxh3_64(bytes, size, 0);
}

/* tally_sample() */
FDSL_HD uint64_t device_tally_sample(uint64_t key, const uint64_t *members, uint32_t count)
{
    return xxh3_64((const uint8_t *)members, count * sizeof *members, key);
}

#endif
