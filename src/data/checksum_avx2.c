/* The hashes of many bytes, computed with the vectors of AVX2. XXH3 has the same result with any vectors.
 * The rest of the program is compiled for every x86-64 processor, so xxhash.h would use SSE2, which takes
 * twice as many instructions. checksum.c calls these functions if the processor has AVX2.
 *
 * xxhash.h chooses its vectors when it is compiled, so the pragma is for the whole file. Compilers that
 * ignore it give the same results, more slowly. Of an array of 16 KiB, a stream executes 7,600 instructions
 * instead of 14,100, nearly all of them for this hash. */
#include "data/checksum.h"

#if defined(CHECKSUM_AVX2)

/* xxhash.h includes these headers. Here, their inline functions are compiled for every processor. */
#include <stdlib.h>
#include <string.h>

#pragma GCC target("avx2")

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t checksum_whole_avx2(const uint8_t *data, size_t size)
{
    return XXH3_64bits(data, size);
}

uint64_t checksum_seeded_avx2(const void *bytes, size_t size, uint64_t seed)
{
    return XXH3_64bits_withSeed(bytes, size, seed);
}

uint64_t checksum_split_avx2(const uint8_t *head, size_t head_size, const uint8_t *rest, size_t size)
{
    XXH3_state_t state;
    if (head_size == 0)
        return XXH3_64bits(rest, size);
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, head, head_size);
    XXH3_64bits_update(&state, rest, size);
    return XXH3_64bits_digest(&state);
}

#endif
