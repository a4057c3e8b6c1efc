/* Splits the name of a member into the key of its sample and the extension, as webdataset does. */
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

FDSL_C_END

#endif
