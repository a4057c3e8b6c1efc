#include "data/checksum.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
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

/* ---- Digests of files ---- */

#define HEX_MAX 129 /* of 64 bytes, with the terminating zero */

/* An algorithm, and its state. */
struct digest {
    enum status (*add)(void *state, const void *bytes, size_t count);
    void (*end)(void *state, char hex[HEX_MAX]);
    void *state;
};

#ifdef HAVE_XXHASH
static enum status add_xxh64(void *state, const void *bytes, size_t count)
{
    XXH64_update(state, bytes, count);
    return STATUS_OK;
}

static void end_xxh64(void *state, char hex[HEX_MAX])
{
    snprintf(hex, HEX_MAX, "%016" PRIx64, (uint64_t)XXH64_digest(state));
    XXH64_freeState(state);
}

static enum status add_xxh3(void *state, const void *bytes, size_t count)
{
    XXH3_64bits_update(state, bytes, count);
    return STATUS_OK;
}

static void end_xxh3(void *state, char hex[HEX_MAX])
{
    snprintf(hex, HEX_MAX, "%016" PRIx64, (uint64_t)XXH3_64bits_digest(state));
    XXH3_freeState(state);
}
#endif

#ifdef HAVE_CRYPTO
static void end_evp(void *state, char hex[HEX_MAX])
{
    unsigned char bytes[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    const bool whole = EVP_DigestFinal_ex(state, bytes, &length);
    for (unsigned i = 0; whole && i < length; i++)
        snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
    EVP_MD_CTX_free(state);
}
#endif

/* Finds an algorithm by its name in hashlib or xxhash of Python, and begins a digest. `state` is NULL if this
 * build cannot compute it. */
static struct digest begin_digest(const char *algorithm, size_t length)
{
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)length, algorithm);
#ifdef HAVE_XXHASH
    if (strcmp(name, "xxh64") == 0) {
        XXH64_state_t *state = XXH64_createState();
        if (state)
            XXH64_reset(state, 0);
        return (struct digest){add_xxh64, end_xxh64, state};
    }
    if (strcmp(name, "xxh3_64") == 0) {
        XXH3_state_t *state = XXH3_createState();
        if (state)
            XXH3_64bits_reset(state);
        return (struct digest){add_xxh3, end_xxh3, state};
    }
#endif
#ifdef HAVE_CRYPTO
    for (char *c = name; *c; c++)
        *c = *c == '_' ? '-' : *c;
    const EVP_MD *evp = EVP_get_digestbyname(strcmp(name, "blake2b") == 0   ? "blake2b512"
                                             : strcmp(name, "blake2s") == 0 ? "blake2s256"
                                                                            : name);
    EVP_MD_CTX *context = evp ? EVP_MD_CTX_new() : NULL;
    if (context && EVP_DigestInit_ex(context, evp, NULL))
        return (struct digest){md5_add, end_evp, context};
    EVP_MD_CTX_free(context);
#endif
    return (struct digest){.state = NULL};
}

bool digest_is_known(const char *algorithm)
{
    char hex[HEX_MAX];
    const struct digest digest = begin_digest(algorithm, strlen(algorithm));
    if (digest.state)
        digest.end(digest.state, hex);
    return digest.state;
}

enum status digest_check_file(int fd, const char *digest)
{
    const size_t length = strcspn(digest, ":");
    const char *expected = digest + length + 1;
    char hex[HEX_MAX] = "";
    FREED uint8_t *buffer = malloc(READ_BYTES);
    TRY(ALLOCATED(buffer, "out of memory to compute a digest"));
    const struct digest self = begin_digest(digest, length);
    if (!self.state)
        return STATUS_OK;
    ssize_t count = 0;
    off_t at = 0; /* the descriptor's own position may be anywhere: memory is reused for several shards */
    enum status status = STATUS_OK;
    for (; status == STATUS_OK && (count = pread(fd, buffer, READ_BYTES, at)) > 0; at += count)
        status = self.add(self.state, buffer, (size_t)count);
    if (status == STATUS_OK && count < 0)
        status = status_set(STATUS_FAILED, "cannot read: %s", strerror(errno));
    self.end(self.state, hex);
    TRY(status);
    if (strcasecmp(hex, expected) == 0)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "the shard's %.*s is %s, but its index says %s: the shard may be damaged, or be "
                      "another one",
                      (int)length, digest, hex, expected);
}
