/* Computes the md5 of the bytes of a shard. In builds without libcrypto, all functions succeed and compute or
 * compare nothing. */
#ifndef FDSL_DATA_MD5_H
#define FDSL_DATA_MD5_H

#include <stddef.h>

#include "core/status.h"

/* Starts a digest. The caller frees it with md5_free(), even after a failure. STATUS_FAILED if libcrypto has
 * no md5. */
enum status md5_begin(void **md5);
enum status md5_add(void *md5, const void *bytes, size_t count);

/* Finishes the digest and writes it in lower-case hex; "" in builds without libcrypto. */
enum status md5_end(void *md5, char hex[33]);
void md5_free(void *md5);

/* Compares the md5 of an open file, from its beginning, with the md5 in a wids index. STATUS_FAILED with a
 * message that does not name the file. */
enum status md5_check_file(int fd, const char *expected);

#endif
