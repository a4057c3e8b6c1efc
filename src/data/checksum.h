/* A checksum of delivered samples: the sum of one hash per sample. Each hash covers the sample's key and
 * content. The sum does not depend on the order of the samples. It changes if a sample is missing,
 * incomplete, delivered twice, or delivered under the key of another sample.
 *
 * --verify hashes every byte. Timed runs hash only the size and the edges of each member: its first and
 * last 64 bytes. Hashing whole samples would take half of the run time. */
#ifndef FDSL_DATA_CHECKSUM_H
#define FDSL_DATA_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define CHECKSUM_EDGE 64 /* bytes at each end of a member */

struct checksum {
    uint64_t count, bytes; /* number of samples, and their total size */
    uint64_t sum;          /* sum of the hashes, modulo 2^64 */
};

FDSL_C_BEGIN

/* Returns XXH3-64 of a sample's key, which seeds the hash of the sample. */
uint64_t checksum_key(const char *key, size_t length);

/* Returns XXH3-64 of a member's data. */
uint64_t checksum_whole(const uint8_t *data, size_t size);

/* Returns checksum_whole() of data whose first `head_size` bytes are stored elsewhere, at `head`. */
uint64_t checksum_split(const uint8_t *head, size_t head_size, const uint8_t *rest, size_t size);

/* The same functions for processors with AVX2 (checksum_avx2.c): only checksum.c calls them. */
#if defined(HAVE_XXHASH) && defined(__x86_64__)
#define CHECKSUM_AVX2
uint64_t checksum_whole_avx2(const uint8_t *data, size_t size);
uint64_t checksum_seeded_avx2(const void *bytes, size_t size, uint64_t seed);
uint64_t checksum_split_avx2(const uint8_t *head, size_t head_size, const uint8_t *rest, size_t size);
#endif

/* Returns XXH3-64 of any bytes, with a seed, such as the hash of preceding bytes. With the seed 0, it is
 * equal to checksum_whole(). 0 in builds without xxHash. */
uint64_t checksum_seeded(const void *bytes, size_t size, uint64_t seed);

/* Returns XXH3-64 of a member's edges: its first and last CHECKSUM_EDGE bytes. If the member has at most 2 *
 * CHECKSUM_EDGE bytes, hashes all of them. The seed is the member's size. */
uint64_t checksum_edges(const uint8_t *data, size_t size);

/* Computes checksum_edges() if only the edges of a member are in memory. `size` is the size of the member.
 * `edges` holds its first and last bytes consecutively: checksum_edge_bytes(size) bytes in total. */
uint64_t checksum_edges_only(const uint8_t *edges, size_t size);
size_t checksum_edge_bytes(size_t size);

/* Returns the hash of a sample: combines checksum_key() of its key with the hashes of its members, in member
 * order. */
uint64_t checksum_sample(uint64_t key, const uint64_t *members, size_t count);

static inline void checksum_add(struct checksum *checksum, uint64_t hash, uint64_t bytes)
{
    checksum->count++;
    checksum->bytes += bytes;
    checksum->sum += hash;
}

static inline void checksum_merge(struct checksum *checksum, const struct checksum *other)
{
    checksum->count += other->count;
    checksum->bytes += other->bytes;
    checksum->sum += other->sum;
}

/* ---- md5 of the bytes of a shard ----
 * In builds without libcrypto, all functions succeed and compute or compare nothing. */

/* Starts a digest. The caller frees it with md5_free(), even after a failure. STATUS_FAILED if libcrypto has
 * no md5. */
enum status md5_begin(void **md5);
enum status md5_add(void *md5, const void *bytes, size_t count);

/* Finishes the digest and writes it in lower-case hex; "" in builds without libcrypto. */
enum status md5_end(void *md5, char hex[33]);
void md5_free(void *md5);

/* ---- Digests of files that others wrote ---- */

/* Returns whether this build can compute a digest: md5, sha1, sha256 and others of libcrypto, xxh64, xxh3_64.
 */
bool digest_is_known(const char *algorithm);

/* Compares the digest of an open file, from its beginning, with `digest`, ALGORITHM:HEX. Compares nothing in
 * builds that cannot compute it. STATUS_FAILED with a message that does not name the file. */
enum status digest_check_file(int fd, const char *digest);

FDSL_C_END

#endif
