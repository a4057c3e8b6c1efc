/* Arrays that grow by one element at a time, the order of numbers, and a hash of bytes. */
#ifndef FDSL_CORE_ARRAY_H
#define FDSL_CORE_ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ARRAY_FIRST 16 /* elements of the first allocation; a power of two */

/* Makes room for one more element in an array of `count` elements of `size` bytes. `array` is the address of
 * the pointer to the first element, which is NULL if the array is empty. The capacity is the smallest power
 * of two that is at least ARRAY_FIRST and at least `count`, so only this function may allocate the array. An
 * array of at least ARRAY_FIRST elements is therefore full if `count` is a power of two. Returns false if
 * memory runs out; the array is then unchanged. The caller frees the array. */
static inline bool array_grow(void *array, size_t count, size_t size)
{
    void *now, *larger;
    if (count > 0 && (count < ARRAY_FIRST || (count & (count - 1)) != 0))
        return true;
    memcpy(&now, array, sizeof now); /* memcpy(), because the type of the pointer is unknown */
    larger = reallocarray(now, count > 0 ? 2 * count : ARRAY_FIRST, size);
    if (!larger)
        return false;
    memcpy(array, &larger, sizeof larger);
    return true; /* cppcheck-suppress memleak */
}

/* For qsort() and bsearch(): compare two numbers in ascending order. */
static inline int compare_u32(const void *a, const void *b)
{
    const uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

static inline int compare_u64(const void *a, const void *b)
{
    const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

static inline int compare_reals(const void *a, const void *b)
{
    const double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* 64-bit FNV-1a: a hash for small data that needs no library. */
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
