/* Splits the name of a member into the key of its sample and the extension, as webdataset does, and compares
 * names that are spelled differently. */
#ifndef FDSL_DATA_KEY_H
#define FDSL_DATA_KEY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"

FDSL_C_BEGIN

/* Splits a name at the first dot of its last path component. "a.b/c.left.jpg" has the key "a.b/c" (the first
 * `*key_length` bytes) and the extension "left.jpg" (`*extension` points into the name; compare it
 * case-insensitively). Returns false for names that belong to no sample. These are names without a dot or
 * with an empty extension, names whose last component begins with a dot, and names whose first component
 * begins and ends with two underscores. */
bool key_split(const char *name, size_t *key_length, const char **extension);

/* Writes the normal form of a name: without a slash at its beginning or end, and without components that are
 * empty or ".". The names "./a//b", "/a/b" and "a/b" are the same file when an archive is extracted. `normal`
 * has room for `length` + 1 bytes. Returns the length of the normal form. */
size_t key_normal(const char *name, size_t length, char *normal);

/* Returns whether a key and the first `length` bytes of a name have the same normal form. */
bool key_same(const char *key, const char *name, size_t length);

FDSL_C_END

#endif
