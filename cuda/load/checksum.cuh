/* The hashes of data/checksum.h for bytes on the device. The same source runs on the host for tests. A member
 * is one file of a sample. A member's edges are its first and last CHECKSUM_EDGE bytes. */
#ifndef FDSL_CUDA_LOAD_CHECKSUM_CUH
#define FDSL_CUDA_LOAD_CHECKSUM_CUH

#include "data/checksum.h"
#include "common/xxh3.cuh"

/* Returns one part of the hash of a member's edges. `part` is 0 to XXH3_PARTS - 1. The member must be larger
 * than 2 * CHECKSUM_EDGE bytes. xxh3_of_parts() computes the hash from the sum of all parts. */
FDSL_HD uint64_t device_checksum_part(const uint8_t *bytes, uint64_t size, uint32_t part)
{
    uint32_t at = xxh3_part_at(part);
    const uint8_t *words = at < CHECKSUM_EDGE ? bytes + at : bytes + size - 2 * CHECKSUM_EDGE + at;
    return xxh3_part(xxh3_read64(words), xxh3_read64(words + 8), part, size);
}

/* Returns the same hash as checksum_edges(): XXH3-64 of the edges, or of all bytes if `size` is at most 2 *
 * CHECKSUM_EDGE. The seed is `size`. */
FDSL_HD uint64_t device_checksum_edges(const uint8_t *bytes, uint64_t size)
{
    uint64_t sum = 0;
    if (size <= 2 * CHECKSUM_EDGE)
        return xxh3_64(bytes, size, size);
    for (uint32_t part = 0; part < XXH3_PARTS; part++)
        sum += device_checksum_part(bytes, size, part);
    return xxh3_of_parts(sum);
}

/* Returns the same hash as checksum_whole(): XXH3-64 of all bytes, without a seed. */
FDSL_HD uint64_t device_checksum_whole(const uint8_t *bytes, uint64_t size)
{
    return xxh3_64(bytes, size, 0);
}

/* Returns the same hash as checksum_sample(): XXH3-64 of the members' hashes, seeded with the key's hash. */
FDSL_HD uint64_t device_checksum_sample(uint64_t key, const uint64_t *members, uint32_t count)
{
    return xxh3_64((const uint8_t *)members, count * sizeof *members, key);
}

#endif
