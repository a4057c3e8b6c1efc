/* Arrays that grow by one element at a time. */
#ifndef FDSL_CORE_ARRAY_H
#define FDSL_CORE_ARRAY_H

#include <stdbool.h>
#include <stddef.h>

/* Makes room for one more element in an array of `count` elements of `size` bytes. `array` is the address of
 * the pointer to the first element, which is NULL if the array is empty. The capacity is a function of
 * `count`, so only this function may allocate the array. Returns false if memory runs out; the array is then
 * unchanged. The caller frees the array. */
bool array_grow(void *array, size_t count, size_t size);

#endif
