#include "data/file_list.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/portable.h"
#include "core/text.h"

static enum status add_name(struct paths *paths, const char *name)
{
    char *copy = NULL;
    TRY(ALLOCATED(array_grow(&paths->names, paths->count, sizeof *paths->names) && (copy = strdup(name)),
                  "out of memory for the list of files"));
    paths->names[paths->count++] = copy;
    return STATUS_OK;
}

static enum status add_entry(FTS *walk, FTSENT *entry, bool (*wanted)(const char *path), struct paths *paths)
{
    if (entry->fts_level > 0 && strcmp(entry->fts_name, ".prepare") == 0)
        return status_set(
            STATUS_USAGE,
            "%.*s is incomplete: its --prepare was interrupted; repeat that command to continue",
            (int)(entry->fts_pathlen - strlen("/.prepare")), entry->fts_path);
    if (entry->fts_level > 0 && entry->fts_name[0] == '.') {
        (void)fts_set(walk, entry, FTS_SKIP);
        return STATUS_OK;
    }
    switch (entry->fts_info) {
    case FTS_F:
        return wanted(entry->fts_path) ? add_name(paths, entry->fts_path) : STATUS_OK;
    case FTS_DC:
        return status_set(STATUS_USAGE, "%s links back to one of its parent folders; remove that link",
                          entry->fts_path);
    case FTS_DNR:
    case FTS_ERR:
    case FTS_NS:
        return status_set(STATUS_FAILED, "%s: %s", entry->fts_path, strerror(entry->fts_errno));
    default: /* folders, other kinds of files, and links without a target */
        return STATUS_OK;
    }
}

static enum status add_folder(const char *path, bool (*wanted)(const char *path), struct paths *paths)
{
    char *roots[] = {(char *)path, NULL};
    size_t first = paths->count;
    FTS *walk = fts_open(roots, FTS_LOGICAL | FTS_NOCHDIR, NULL);
    if (!walk)
        return status_set(STATUS_FAILED, "%s: %s", path, strerror(errno));
    enum status status = STATUS_OK;
    FTSENT *entry = NULL;
    while (status == STATUS_OK && (errno = 0, entry = fts_read(walk)))
        status = add_entry(walk, entry, wanted, paths);
    if (status == STATUS_OK && errno != 0)
        status = status_set(STATUS_FAILED, "%s: %s", path, strerror(errno));
    fts_close(walk);
    if (paths->count > first)
        qsort(paths->names + first, paths->count - first, sizeof *paths->names, text_compare);
    return status;
}

static enum status add_path(const char *path, bool (*wanted)(const char *path), struct paths *paths)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return status_set(STATUS_USAGE, "%s: %s", path, strerror(errno));
    return S_ISDIR(info.st_mode) ? add_folder(path, wanted, paths) : add_name(paths, path);
}

static enum status add_pattern(const char *pattern, bool (*wanted)(const char *path), struct paths *paths)
{
    glob_t found;
    if (access(pattern, F_OK) == 0 || !strpbrk(pattern, "*?["))
        return add_path(pattern, wanted, paths);
    int result = glob(pattern, GLOB_ERR, NULL, &found);
    enum status status = STATUS_OK;
    if (result == GLOB_NOMATCH)
        status = status_set(STATUS_USAGE, "no file matches '%s'", pattern);
    else if (result != 0)
        status = status_set(STATUS_FAILED, "'%s': cannot list the files: %s", pattern,
                            result == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    for (size_t i = 0; status == STATUS_OK && i < found.gl_pathc; i++)
        status = add_path(found.gl_pathv[i], wanted, paths);
    if (result == 0)
        globfree(&found);
    return status;
}

/* ---- Files that are named twice ---- */

/* A file and its identity. Some file systems give several files the same number, so size and times count,
 * too. */
struct named {
    const char *name;
    bool exists;
    struct file_identity identity;
};

/* Files that do not exist are compared by their names. */
static int compare_files(const void *a, const void *b)
{
    const struct named *one = a, *two = b;
    if (one->exists != two->exists)
        return one->exists ? 1 : -1;
    return one->exists ? file_compare(&one->identity, &two->identity) : strcmp(one->name, two->name);
}

enum status paths_refuse_twice(const char *one, const char *two)
{
    static const char remedy[] = "name each file once, or copy the file to read it twice";
    const int order = strcmp(one, two);
    return order == 0 ? status_set(STATUS_USAGE, "'%.200s' is named twice; %s", one, remedy)
                      : status_set(STATUS_USAGE, "'%.200s' and '%.200s' are the same file; %s",
                                   order < 0 ? one : two, order < 0 ? two : one, remedy);
}

enum status paths_check_distinct(int directory, const char *const names[], size_t count)
{
    FREED struct named *files = calloc(count + 1, sizeof *files);
    struct stat info;
    TRY(ALLOCATED(files, "out of memory for the list of files"));
    for (size_t i = 0; i < count; i++)
        files[i] = fstatat(directory, names[i], &info, 0) == 0
                       ? (struct named){names[i], true, file_identify(&info)}
                       : (struct named){.name = names[i]};
    qsort(files, count, sizeof *files, compare_files);
    for (size_t i = 1; i < count; i++)
        if (compare_files(&files[i - 1], &files[i]) == 0)
            return paths_refuse_twice(files[i - 1].name, files[i].name);
    return STATUS_OK;
}

enum status paths_find(const char *text, bool (*wanted)(const char *path), struct paths *paths)
{
    *paths = (struct paths){0};
    if (access(text, F_OK) == 0)
        return add_path(text, wanted, paths);
    FREED char *copy = strdup(text);
    char *rest = copy, *name;
    TRY(ALLOCATED(copy, "out of memory"));
    while ((name = strsep(&rest, ",")))
        TRY(*name ? add_pattern(name, wanted, paths)
                  : status_set(STATUS_USAGE, "'%s' has an empty name between commas", text));
    return STATUS_OK;
}

void paths_free(struct paths *paths)
{
    for (size_t i = 0; i < paths->count; i++)
        free(paths->names[i]);
    free(paths->names);
    *paths = (struct paths){0};
}
