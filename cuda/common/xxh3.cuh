/* XXH3-64 for a single device thread. The same source runs on the host.
 *
 * Follows the xxHash specification (doc/xxhash_spec.md of Cyan4973/xxHash, "XXH3 algorithm overview") with
 * its default secret. A seed modifies the secret as specified. tests/test_load_gpu.c compares this
 * implementation with libxxhash. */
#ifndef FDSL_CUDA_COMMON_XXH3_CUH
#define FDSL_CUDA_COMMON_XXH3_CUH

#include <stdint.h>
#include <string.h>

#include "core/portable.h"

#define XXH3_PRIME32_1 0x9E3779B1u
#define XXH3_PRIME32_2 0x85EBCA77u
#define XXH3_PRIME32_3 0xC2B2AE3Du
#define XXH3_PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define XXH3_PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define XXH3_PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define XXH3_PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define XXH3_PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define XXH3_PRIME_MX1 UINT64_C(0x165667919E3779F9)
#define XXH3_PRIME_MX2 UINT64_C(0x9FB21C651E98DF25)
#define XXH3_LANES     8
#define XXH3_STRIPE    64                 /* bytes; the secret advances by 8 per stripe */
#define XXH3_SECRET    192                /* bytes */
#define XXH3_BLOCK     (16 * XXH3_STRIPE) /* bytes after which the secret is reused from its start */
#define XXH3_SHORT_MAX 240                /* bytes; longer inputs are hashed in stripes */
#define XXH3_LAST_KEY  (XXH3_SECRET - XXH3_STRIPE)

/* The secret as words of 8 bytes, lowest byte first. */
#define XXH3_WORDS                                                                                    \
    {                                                                                                 \
        UINT64_C(0xBE4BA423396CFEB8), UINT64_C(0x1CAD21F72C81017C), UINT64_C(0xDB979083E96DD4DE),     \
            UINT64_C(0x1F67B3B7A4A44072), UINT64_C(0x78E5C0CC4EE679CB), UINT64_C(0x2172FFCC7DD05A82), \
            UINT64_C(0x8E2443F7744608B8), UINT64_C(0x4C263A81E69035E0), UINT64_C(0xCB00C391BB52283C), \
            UINT64_C(0xA32E531B8B65D088), UINT64_C(0x4EF90DA297486471), UINT64_C(0xD8ACDEA946EF1938), \
            UINT64_C(0x3F349CE33F76FAA8), UINT64_C(0x1D4F0BC7C7BBDCF9), UINT64_C(0x3159B4CD4BE0518A), \
            UINT64_C(0x647378D9C97E9FC8), UINT64_C(0xC3EBD33483ACC5EA), UINT64_C(0xEB6313FAFFA081C5), \
            UINT64_C(0x49DAF0B751DD0D17), UINT64_C(0x9E68D429265516D3), UINT64_C(0xFCA1477D58BE162B), \
            UINT64_C(0xCE31D07AD1B8F88F), UINT64_C(0x280416958F3ACB45), UINT64_C(0x7E404BBBCAFBD7AF)  \
    }

static const uint64_t xxh3_secret[XXH3_SECRET / 8] = XXH3_WORDS;
#ifdef __CUDACC__
static __device__ __constant__ uint64_t xxh3_device_secret[XXH3_SECRET / 8] = XXH3_WORDS;
#endif

FDSL_HD uint64_t xxh3_secret_word(uint32_t word)
{
#ifdef __CUDA_ARCH__
    return xxh3_device_secret[word];
#else
    return xxh3_secret[word];
#endif
}

/* Returns eight bytes of the secret from byte `at` on, modified by the seed. */
FDSL_HD uint64_t xxh3_key(uint32_t at, uint64_t seed)
{
    uint32_t word = at / 8, bits = at % 8 * 8;
    uint64_t low = xxh3_secret_word(word) + (word % 2 ? 0 - seed : seed);
    if (bits == 0)
        return low;
    uint64_t high = xxh3_secret_word(word + 1) + (word % 2 ? seed : 0 - seed);
    return low >> bits | high << (64 - bits);
}

/* xxh3_read64() and xxh3_read32() read little-endian words at any address. On the device, xxh3_read64() reads
 * an aligned word with one load. */
FDSL_HD uint64_t xxh3_read64(const uint8_t *bytes)
{
#ifdef __CUDA_ARCH__
    if ((uintptr_t)bytes % 8 == 0)
        return *(const uint64_t *)bytes;
    uint64_t word = 0;
    for (uint32_t i = 0; i < 8; i++)
        word |= (uint64_t)bytes[i] << 8 * i;
    return word;
#else
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
#endif
}

FDSL_HD uint32_t xxh3_read32(const uint8_t *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* XORs the two halves of the 128-bit product. */
FDSL_HD uint64_t xxh3_fold(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
    return (a * b) ^ __umul64hi(a, b);
#else
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#endif
}

FDSL_HD uint32_t xxh3_swap32(uint32_t word)
{
    return word >> 24 | (word >> 8 & 0xFF00u) | (word << 8 & 0xFF0000u) | word << 24;
}

FDSL_HD uint64_t xxh3_swap64(uint64_t word)
{
    return (uint64_t)xxh3_swap32((uint32_t)word) << 32 | xxh3_swap32((uint32_t)(word >> 32));
}

FDSL_HD uint64_t xxh3_rotate(uint64_t word, uint32_t bits)
{
    return word << bits | word >> (64 - bits);
}

/* xxh3_avalanche() is the final mixing step of XXH3. xxh3_avalanche_short() is the final mixing step of
 * XXH64, which XXH3 uses for inputs of up to 3 bytes. */
FDSL_HD uint64_t xxh3_avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= XXH3_PRIME_MX1;
    return hash ^ hash >> 32;
}

FDSL_HD uint64_t xxh3_avalanche_short(uint64_t hash)
{
    hash ^= hash >> 33;
    hash *= XXH3_PRIME64_2;
    hash ^= hash >> 29;
    hash *= XXH3_PRIME64_3;
    return hash ^ hash >> 32;
}

FDSL_HD uint64_t xxh3_mix_words(uint64_t low, uint64_t high, uint32_t at, uint64_t seed)
{
    return xxh3_fold(low ^ (xxh3_key(at, 0) + seed), high ^ (xxh3_key(at + 8, 0) - seed));
}

FDSL_HD uint64_t xxh3_mix(const uint8_t *bytes, uint32_t at, uint64_t seed)
{
    return xxh3_mix_words(xxh3_read64(bytes), xxh3_read64(bytes + 8), at, seed);
}

/* ---- By length ---- */

FDSL_HD uint64_t xxh3_up_to_3(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    uint32_t word =
        (uint32_t)bytes[0] << 16 | (uint32_t)bytes[size / 2] << 24 | bytes[size - 1] | (uint32_t)size << 8;
    uint64_t key = (uint32_t)xxh3_key(0, 0) ^ (uint32_t)(xxh3_key(0, 0) >> 32);
    return xxh3_avalanche_short(word ^ (key + seed));
}

FDSL_HD uint64_t xxh3_up_to_8(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    seed ^= (uint64_t)xxh3_swap32((uint32_t)seed) << 32;
    uint64_t word = xxh3_read32(bytes + size - 4) + ((uint64_t)xxh3_read32(bytes) << 32);
    uint64_t hash = word ^ ((xxh3_key(8, 0) ^ xxh3_key(16, 0)) - seed);
    hash ^= xxh3_rotate(hash, 49) ^ xxh3_rotate(hash, 24);
    hash *= XXH3_PRIME_MX2;
    hash ^= (hash >> 35) + size;
    hash *= XXH3_PRIME_MX2;
    return hash ^ hash >> 28;
}

FDSL_HD uint64_t xxh3_up_to_16(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    uint64_t low = xxh3_read64(bytes) ^ ((xxh3_key(24, 0) ^ xxh3_key(32, 0)) + seed);
    uint64_t high = xxh3_read64(bytes + size - 8) ^ ((xxh3_key(40, 0) ^ xxh3_key(48, 0)) - seed);
    return xxh3_avalanche(size + xxh3_swap64(low) + high + xxh3_fold(low, high));
}

FDSL_HD uint64_t xxh3_up_to_128(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    uint64_t hash = size * XXH3_PRIME64_1;
    for (uint32_t i = (uint32_t)(size - 1) / 32 + 1; i-- > 0;) {
        hash += xxh3_mix(bytes + 16 * i, 32 * i, seed);
        hash += xxh3_mix(bytes + size - 16 * (i + 1), 32 * i + 16, seed);
    }
    return xxh3_avalanche(hash);
}

/* XXH3-64 of exactly 128 bytes, computed from the sum of XXH3_PARTS parts. Separate threads can compute the
 * parts. Part i covers two words of 8 bytes, from byte xxh3_part_at(i) on. */
#define XXH3_PARTS 8

FDSL_HD uint32_t xxh3_part_at(uint32_t part)
{
    return part < 4 ? 16 * part : 16 * (11 - part);
}

FDSL_HD uint64_t xxh3_part(uint64_t low, uint64_t high, uint32_t part, uint64_t seed)
{
    return xxh3_mix_words(low, high, part < 4 ? 32 * part : 32 * (part - 4) + 16, seed);
}

FDSL_HD uint64_t xxh3_of_parts(uint64_t sum)
{
    return xxh3_avalanche(128 * XXH3_PRIME64_1 + sum);
}

FDSL_HD uint64_t xxh3_up_to_240(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    uint64_t hash = size * XXH3_PRIME64_1;
    for (uint32_t i = 0; i < 8; i++)
        hash += xxh3_mix(bytes + 16 * i, 16 * i, seed);
    hash = xxh3_avalanche(hash);
    for (uint32_t i = 8; i < (uint32_t)size / 16; i++)
        hash += xxh3_mix(bytes + 16 * i, 16 * (i - 8) + 3, seed);
    hash += xxh3_mix(bytes + size - 16, 136 - 17, seed);
    return xxh3_avalanche(hash);
}

/* Adds a stripe to the lanes, mixed with the secret from byte `at` on. */
FDSL_HD void xxh3_stripe(uint64_t lanes[XXH3_LANES], const uint8_t *bytes, uint32_t at, uint64_t seed)
{
    for (uint32_t i = 0; i < XXH3_LANES; i++) {
        uint64_t word = xxh3_read64(bytes + 8 * i), keyed = word ^ xxh3_key(at + 8 * i, seed);
        lanes[i ^ 1] += word;
        lanes[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

FDSL_HD uint64_t xxh3_long(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    uint64_t lanes[XXH3_LANES] = {XXH3_PRIME32_3, XXH3_PRIME64_1, XXH3_PRIME64_2, XXH3_PRIME64_3,
                                  XXH3_PRIME64_4, XXH3_PRIME32_2, XXH3_PRIME64_5, XXH3_PRIME32_1};
    uint64_t stripes = (size - 1) / XXH3_STRIPE, hash = size * XXH3_PRIME64_1;
    for (uint64_t s = 0; s < stripes; s++) {
        xxh3_stripe(lanes, bytes + s * XXH3_STRIPE, (uint32_t)(s % 16) * 8, seed);
        if ((s + 1) * XXH3_STRIPE % XXH3_BLOCK == 0)
            for (uint32_t i = 0; i < XXH3_LANES; i++)
                lanes[i] =
                    (lanes[i] ^ lanes[i] >> 47 ^ xxh3_key(XXH3_LAST_KEY + 8 * i, seed)) * XXH3_PRIME32_1;
    }
    xxh3_stripe(lanes, bytes + size - XXH3_STRIPE, XXH3_LAST_KEY - 7, seed);
    for (uint32_t i = 0; i < XXH3_LANES; i += 2)
        hash += xxh3_fold(lanes[i] ^ xxh3_key(11 + 8 * i, seed), lanes[i + 1] ^ xxh3_key(19 + 8 * i, seed));
    return xxh3_avalanche(hash);
}

/* Returns XXH3-64 of `size` bytes at any address. */
FDSL_HD uint64_t xxh3_64(const uint8_t *bytes, uint64_t size, uint64_t seed)
{
    if (size > XXH3_SHORT_MAX)
        return xxh3_long(bytes, size, seed);
    if (size > 128)
        return xxh3_up_to_240(bytes, size, seed);
    if (size > 16)
        return xxh3_up_to_128(bytes, size, seed);
    if (size > 8)
        return xxh3_up_to_16(bytes, size, seed);
    if (size > 3)
        return xxh3_up_to_8(bytes, size, seed);
    if (size > 0)
        return xxh3_up_to_3(bytes, size, seed);
    return xxh3_avalanche_short(seed ^ xxh3_key(56, 0) ^ xxh3_key(64, 0));
}

#endif
