/* A member's name as webdataset reads it: which sample it belongs to, and what it holds. */
#ifndef FDSL_DATA_KEY_H
#define FDSL_DATA_KEY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"

FDSL_C_BEGIN

/* Splits a name at the first dot of its last path component: "a.b/c.left.jpg" is key "a.b/c" (its first
 * `*key_length` bytes) and extension "left.jpg" (`*extension` points into the name; compare it without regard
 * to case). False for what belongs to no sample: names without a dot, dot-files, an empty extension, and
 * names whose first component begins and ends with two underscores. */
bool key_split(const char *name, size_t *key_length, const char **extension);

FDSL_C_END

#endif
