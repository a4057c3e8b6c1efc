#include "data/checksum.h"

#include <string.h>
#ifdef HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#else /* never called: load_open() and --prepare fail in builds without xxHash */
#define XXH3_64bits(data, size)                ((void)(data), (void)(size), UINT64_C(0))
#define XXH3_64bits_withSeed(data, size, seed) ((void)(data), (void)(size), (void)(seed), UINT64_C(0))
#endif

uint64_t checksum_key(const char *key, size_t length)
{
    return XXH3_64bits(key, length);
}

uint64_t checksum_whole(const uint8_t *data, size_t size)
{
    return XXH3_64bits(data, size);
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
