/* Files: read as a whole, written whole or not at all, and checks of names before a file is written. */
#ifndef FDSL_CORE_FILE_H
#define FDSL_CORE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"
#include "core/status.h"

/* The folder of `path`: ".", or a copy in `folder`, a buffer of PATH_MAX. */
const char *file_folder(const char *path, char *folder);

/* Checks that a file can be made at `path`, where none is. STATUS_USAGE with the reason and a remedy. */
enum status file_check_new(const char *path);

/* Writes all bytes; false, with errno, where not all could be. */
bool file_write_all(int fd, const char *bytes, size_t count);

/* Makes a new name last. Some file systems cannot sync folders, and the file itself is safe: no error. */
void file_sync_folder(const char *path);

/* Checks that file_write_atomic() could write `path`: the folder can be written, and what exists there is a
 * regular file. Touches nothing. STATUS_USAGE with the reason and a remedy. */
enum status file_check(const char *path);

/* How files of a kind begin: with `count` bytes, `offset` bytes after their first. */
struct file_kind {
    const char *name; /* for messages, "NumPy file" */
    size_t offset;
    const char *bytes;
    size_t count;
};

/* Checks like file_check(), and that nothing is lost that somebody may miss: what exists at `path` must be
 * empty or begin as files of this kind. STATUS_USAGE with the reason and a remedy. */
enum status file_check_kind(const char *path, const struct file_kind *kind);

/* Whether two paths name the same file, or would once it is made. */
bool file_same(const char *a, const char *b);

/* Whether `path`, which need not exist, is the folder `folder` or would be in it. Links are followed. */
bool file_is_inside(const char *path, const char *folder);

/* A file that appears whole or not at all: it grows under a temporary name in its folder. */
struct file_writer {
    int fd;
    char *target, *name;      /* owned; the file's name, through links, and the temporary one */
    struct file_writer *next; /* among those that are open, so the writer must stay where it is */
};

/* Begins a file, adds to it, and puts it in place, synced. Follows links, and refuses to replace what is not
 * a regular file. After STATUS_FAILED, or file_abandon() instead of an end, nothing is left of it and what
 * was there before stays. Several files that belong together are all completed, which is where a full disk
 * shows at the latest, before the first is ended. Several threads may write files. */
enum status file_begin(struct file_writer *writer, const char *path);
enum status file_add(struct file_writer *writer, const void *bytes, size_t count);
enum status file_complete(struct file_writer *writer);
enum status file_end(struct file_writer *writer);
void file_abandon(struct file_writer *writer);

/* All of it at once. */
enum status file_write_atomic(const char *path, const void *bytes, size_t count);

/* From here on SIGHUP, SIGINT and SIGTERM, where they are not ignored, remove what is open under temporary
 * names before they end the program as they always do. */
void file_remove_on_signals(void);

/* After file_hold_signals() these signals are kept until file_release_signals(), which lets the one that came
 * end the program. Between the two, results that exist only in memory reach a file.
 * file_signal_held() tells whether one has come, so that no wait goes on after it. */
void file_hold_signals(void);
bool file_signal_held(void);
void file_release_signals(void);

FDSL_C_BEGIN

/* Reads a regular file. `*bytes`, which the caller frees, holds `*size` bytes and then one that is zero.
 * STATUS_FAILED with the path and the reason. */
enum status file_read(const char *path, char **bytes, size_t *size);

FDSL_C_END

#endif
