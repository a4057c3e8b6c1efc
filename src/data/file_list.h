/* Finds the files that a list of paths, folders and patterns names. */
#ifndef FDSL_DATA_FILE_LIST_H
#define FDSL_DATA_FILE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"

struct paths {
    char **names; /* owned */
    size_t count;
};

/* Adds the files that `text` names: paths separated by ','. A path may be a pattern of the shell. If a path
 * is a folder, adds the files in it and in its subfolders for which `wanted` returns true, sorted by path.
 * Names that begin with a dot are skipped. A path that exists may contain ',' and pattern characters. The
 * caller frees `paths`, even after a failure. STATUS_USAGE if a path does not exist or a pattern matches
 * nothing; STATUS_FAILED if a folder cannot be read. A folder that --prepare has begun but not completed is
 * refused. */
enum status paths_find(const char *text, bool (*wanted)(const char *path), struct paths *paths);
void paths_free(struct paths *paths);

/* Refuses a list that names a file twice, also with other spellings or through links. Names are relative to
 * `directory`, an open folder or AT_FDCWD. Names of files that do not exist are compared as texts.
 * STATUS_USAGE with both names. */
enum status paths_check_distinct(int directory, const char *const names[], size_t count);

/* Returns STATUS_USAGE for two names of one file, which may be equal, with a remedy. */
enum status paths_refuse_twice(const char *one, const char *two);

#endif
