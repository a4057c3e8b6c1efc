#include "data/checksum.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/types.h>
#include <unistd.h>
#ifdef HAVE_CRYPTO
#include <openssl/evp.h>
#endif
#ifdef HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#else /* load_open() and --prepare fail in builds without xxHash */
#define XXH3_64bits(data, size)                ((void)(data), (void)(size), UINT64_C(0))
#define XXH3_64bits_withSeed(data, size, seed) ((void)(data), (void)(size), (void)(seed), UINT64_C(0))
#endif

uint64_t checksum_key(const char *key, size_t length)
{
    return XXH3_64bits(key, length);
}

uint64_t checksum_whole(const uint8_t *data, size_t size)
{
#ifdef CHECKSUM_AVX2
    if (__builtin_cpu_supports("avx2"))
        return checksum_whole_avx2(data, size);
#endif
    return XXH3_64bits(data, size);
}

uint64_t checksum_split(const uint8_t *head, size_t head_size, const uint8_t *rest, size_t size)
{
#ifdef CHECKSUM_AVX2
    if (__builtin_cpu_supports("avx2"))
        return checksum_split_avx2(head, head_size, rest, size);
#endif
#ifdef HAVE_XXHASH
    XXH3_state_t state;
    if (head_size == 0)
        return XXH3_64bits(rest, size);
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, head, head_size);
    XXH3_64bits_update(&state, rest, size);
    return XXH3_64bits_digest(&state);
#else
    (void)head, (void)head_size, (void)rest, (void)size;
    return 0;
#endif
}

uint64_t checksum_seeded(const void *bytes, size_t size, uint64_t seed)
{
#ifdef CHECKSUM_AVX2
    if (__builtin_cpu_supports("avx2"))
        return checksum_seeded_avx2(bytes, size, seed);
#endif
    return XXH3_64bits_withSeed(bytes, size, seed);
}

size_t checksum_edge_bytes(size_t size)
{
    return size < 2 * CHECKSUM_EDGE ? size : 2 * CHECKSUM_EDGE;
}

uint64_t checksum_edges_only(const uint8_t *edges, size_t size)
{
    return XXH3_64bits_withSeed(edges, checksum_edge_bytes(size), size);
}

uint64_t checksum_edges(const uint8_t *data, size_t size)
{
    uint8_t edges[2 * CHECKSUM_EDGE];
    if (size <= sizeof edges)
        return checksum_edges_only(data, size);
    memcpy(edges, data, CHECKSUM_EDGE);
    memcpy(edges + CHECKSUM_EDGE, data + size - CHECKSUM_EDGE, CHECKSUM_EDGE);
    return checksum_edges_only(edges, size);
}

uint64_t checksum_sample(uint64_t key, const uint64_t *members, size_t count)
{
    return XXH3_64bits_withSeed(members, count * sizeof *members, key);
}

/* ---- md5 ---- */

#define READ_BYTES ((size_t)1 << 20)

#ifdef HAVE_CRYPTO

enum status md5_begin(void **md5)
{
    *md5 = EVP_MD_CTX_new();
    return *md5 && EVP_DigestInit_ex(*md5, EVP_md5(), NULL)
               ? STATUS_OK
               : status_set(STATUS_FAILED, "libcrypto has no md5 here (FIPS mode?); build with CRYPTO=0");
}

enum status md5_add(void *md5, const void *bytes, size_t count)
{
    return EVP_DigestUpdate(md5, bytes, count) ? STATUS_OK
                                               : status_set(STATUS_FAILED, "libcrypto: md5 failed");
}

enum status md5_end(void *md5, char hex[33])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    if (!EVP_DigestFinal_ex(md5, digest, &length) || length != 16)
        return status_set(STATUS_FAILED, "libcrypto: md5 failed");
    for (unsigned i = 0; i < length; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    return STATUS_OK;
}

void md5_free(void *md5)
{
    EVP_MD_CTX_free(md5);
}

#else

enum status md5_begin(void **md5)
{
    *md5 = NULL;
    return STATUS_OK;
}

enum status md5_add(void *md5, const void *bytes, size_t count)
{
    (void)md5, (void)bytes, (void)count;
    return STATUS_OK;
}

enum status md5_end(void *md5, char hex[33])
{
    (void)md5;
    hex[0] = '\0';
    return STATUS_OK;
}

void md5_free(void *md5)
{
    (void)md5;
}

#endif

/* Computes the md5 of an open file. */
static enum status md5_of(int fd, uint8_t *buffer, char hex[33])
{
    void *md5 = NULL;
    ssize_t count = 0;
    off_t at = 0; /* the descriptor's own position may be anywhere: memory is reused for several shards */
    enum status status = md5_begin(&md5);
    for (; status == STATUS_OK && (count = pread(fd, buffer, READ_BYTES, at)) > 0; at += count)
        status = md5_add(md5, buffer, (size_t)count);
    if (status == STATUS_OK && count < 0)
        status = status_set(STATUS_FAILED, "cannot read: %s", strerror(errno));
    if (status == STATUS_OK)
        status = md5_end(md5, hex);
    md5_free(md5);
    return status;
}

enum status md5_check_file(int fd, const char *expected)
{
    char hex[33] = "";
#ifdef HAVE_CRYPTO
    uint8_t *buffer = malloc(READ_BYTES);
    TRY(ALLOCATED(buffer, "out of memory to compute an md5"));
    enum status status = md5_of(fd, buffer, hex);
    free(buffer);
    TRY(status);
#else
    (void)fd, (void)md5_of;
#endif
    return !*hex || strcasecmp(hex, expected) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "the shard's md5 is %s, but its wids index says %s: the shard may be damaged, or "
                            "be another one",
                            hex, expected);
}
