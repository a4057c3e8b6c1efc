/* FNV-1a, 64 bits: hashes that need no library, of small data. */
#ifndef FDSL_CORE_FNV_H
#define FDSL_CORE_FNV_H

#include <stddef.h>
#include <stdint.h>

#define FNV_BEGIN UINT64_C(0xcbf29ce484222325)

/* Continues a hash, which begins with FNV_BEGIN, with more bytes. */
static inline uint64_t fnv_add(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#endif
