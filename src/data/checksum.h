/* What was delivered, as a number: a sum over samples, so that it depends on no order, of a hash over a
 * sample's key and content. A sample left out, delivered twice, torn or under another's key changes it.
 *
 * There are two: over every byte, which --verify takes, and over the sizes and edges of the members, which
 * every timed run takes: hashing whole samples would be half of its time. */
#ifndef FDSL_DATA_CHECKSUM_H
#define FDSL_DATA_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"

#define CHECKSUM_EDGE 64 /* bytes at either end of a member */

struct checksum {
    uint64_t count, bytes, sum; /* the sum is modulo 2^64 */
};

FDSL_C_BEGIN

/* XXH3-64 of a key: the seed of its sample's hash. */
uint64_t checksum_key(const char *key, size_t length);

/* XXH3-64 of a member's data. */
uint64_t checksum_whole(const uint8_t *data, size_t size);

/* XXH3-64, with its size as the seed, of a member's data up to 2 CHECKSUM_EDGE bytes, else of its first and
 * its last CHECKSUM_EDGE bytes. */
uint64_t checksum_edges(const uint8_t *data, size_t size);

/* The same where only the edges are at hand: `edges` is what the hash is over, checksum_edge_bytes() of it.
 */
uint64_t checksum_edges_only(const uint8_t *edges, size_t size);
size_t checksum_edge_bytes(size_t size);

/* The hash of a sample from those of its members, in their order. */
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

FDSL_C_END

#endif
