/* md5 of a stream, as indexes of wids tell it of shards. Builds without libcrypto make none. */
#ifndef FDSL_DATA_MD5_H
#define FDSL_DATA_MD5_H

#include <stddef.h>

#include "core/status.h"

/* Begins a sum, which md5_free() frees in any state. STATUS_FAILED where libcrypto has no md5. */
enum status md5_begin(void **md5);
enum status md5_add(void *md5, const void *bytes, size_t count);

/* The sum in hex digits, small letters; "" in builds without libcrypto. */
enum status md5_end(void *md5, char hex[33]);
void md5_free(void *md5);

#endif
