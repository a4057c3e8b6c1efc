/* Finds the files that a list of paths, folders and patterns names. */
#ifndef FDSL_DATA_PATHS_H
#define FDSL_DATA_PATHS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"

struct paths {
    char **names; /* owned */
    size_t count, capacity;
};

/* Adds the files that `text` names: paths separated by ','. A path may be a pattern of the shell. Of a folder
 * and its subfolders, adds the files for which `wanted` returns true, sorted by path; names that begin with a
 * dot are skipped. A path that exists may contain ',' or the characters of patterns. The caller frees
 * `paths`, also after a failure. STATUS_USAGE if a path or pattern names no file; STATUS_FAILED if a folder
 * cannot be read. A folder that --prepare has begun and not completed is refused. */
enum status paths_find(const char *text, bool (*wanted)(const char *path), struct paths *paths);
void paths_free(struct paths *paths);

#endif
