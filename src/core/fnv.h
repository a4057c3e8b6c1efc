/* 64-bit FNV-1a: a hash for small data that needs no library. */
#ifndef FDSL_CORE_FNV_H
#define FDSL_CORE_FNV_H

#include <stddef.h>
#include <stdint.h>

#define FNV_BEGIN UINT64_C(0xcbf29ce484222325)

/* Returns `hash` updated with `bytes` bytes of `data`. A new hash starts from FNV_BEGIN. */
static inline uint64_t fnv_add(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#endif
