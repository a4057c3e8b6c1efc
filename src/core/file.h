/* Files: reading a whole file, writing one atomically, checking a path before a file is written, and the
 * files that a list of paths, folders and patterns names. */
#ifndef FDSL_CORE_FILE_H
#define FDSL_CORE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#include "core/portable.h"
#include "core/status.h"

/* Checks that a new file can be created at `path`. STATUS_USAGE with the reason and a remedy if not. */
enum status file_check_new(const char *path);

/* Checks that a new folder can be created at `path`, which may end with slashes. */
enum status file_check_new_folder(const char *path);

/* Writes all `count` bytes, retrying short writes. Returns false with errno set on an error. */
bool file_write_all(int fd, const char *bytes, size_t count);

/* Reads `count` bytes at `offset`, retrying short reads. Sets `*done` to the number of bytes that were read,
 * which is smaller at the end of the file. Returns false with errno set on an error. */
bool file_read_at(int fd, void *bytes, size_t count, uint64_t offset, size_t *done);

/* Syncs the folder of `path`, so that the name of a new file survives a crash. Ignores errors: some file
 * systems cannot sync folders, and the file's contents are already safe. */
void file_sync_folder(const char *path);

/* A kind of file and its magic number: `count` bytes at `offset`. */
struct file_kind {
    const char *name; /* for messages; for example "NumPy file" */
    size_t offset;
    const char *bytes;
    size_t count;
};

/* Checks that file_write_atomic() could write `path`. Its folder must be writable. If `path` exists, it must
 * be a regular file that is empty or has the magic number of `kind`. Changes nothing. STATUS_USAGE with the
 * reason and a remedy if not. */
enum status file_check_kind(const char *path, const struct file_kind *kind);

/* What tells a file from others, and its content from earlier ones. Programs can set the time of the latest
 * modification back, but not the time of the latest change of the content, the permissions, the name or the
 * number of links. */
struct file_identity {
    uint64_t device, inode, bytes;
    int64_t modified_ns, changed_ns; /* since the epoch of the clock */
};

static inline struct file_identity file_identify(const struct stat *info)
{
    struct file_identity identity;
    identity.device = info->st_dev;
    identity.inode = info->st_ino;
    identity.bytes = (uint64_t)info->st_size;
    identity.modified_ns = info->st_mtim.tv_sec * INT64_C(1000000000) + info->st_mtim.tv_nsec;
    identity.changed_ns = info->st_ctim.tv_sec * INT64_C(1000000000) + info->st_ctim.tv_nsec;
    return identity;
}

/* Compares two identities as memcmp() does; 0: the same file with the same content. */
static inline int file_compare(const struct file_identity *a, const struct file_identity *b)
{
    return memcmp(a, b, sizeof *a); /* the struct has no padding */
}

/* Returns whether two paths name the same file, existing or not. */
bool file_same(const char *a, const char *b);

/* Returns whether `path` is `folder` or is inside it. Follows links; `path` need not exist. */
bool file_is_inside(const char *path, const char *folder);

/* Writes a file atomically: writes it under a temporary name in the same folder, then renames it. */
struct file_writer {
    int fd;
    char *target, *name;      /* owned; the final path with links resolved, and the temporary path */
    struct file_writer *next; /* next entry in the list of open writers; an open writer must therefore not
                               * move in memory */
};

/* file_begin() opens the temporary file, file_add() appends, and file_complete() syncs and closes the file.
 * file_end() renames it to `path`, and completes it first if necessary. Links are followed; only regular
 * files are replaced. After a failure or file_abandon() the temporary file is gone and an earlier file at
 * `path` is unchanged. To write several files that belong together, call file_complete() for all of them
 * before file_end() for the first. If the disk is full, file_add() or file_complete() then fails before any
 * file is replaced. Each thread may write its own files. */
enum status file_begin(struct file_writer *writer, const char *path);
enum status file_add(struct file_writer *writer, const void *bytes, size_t count);
enum status file_complete(struct file_writer *writer);
enum status file_end(struct file_writer *writer);
void file_abandon(struct file_writer *writer);

/* Writes a whole file atomically: calls file_begin(), file_add() and file_end(). STATUS_FAILED with the path
 * and the reason. */
enum status file_write_atomic(const char *path, const void *bytes, size_t count);

/* Reserves stdout for the content of a file: what the program prints to stdout from now on goes to stderr.
 * `*stdout_fd` becomes the former stdout, which file_write_stdout() writes to and closes. */
enum status file_take_stdout(int *stdout_fd);
enum status file_write_stdout(int stdout_fd, const char *bytes, size_t count);

/* Installs handlers so that SIGHUP, SIGINT and SIGTERM remove all temporary files before they end the
 * program. Signals that are ignored stay ignored. */
void file_remove_on_signals(void);

/* Sets the line that SIGHUP, SIGINT and SIGTERM print before they end the program. The line says what is kept
 * and how to continue; "fdsl-bench: interrupted: " is printed before it. Before the first call, and after a
 * call with an empty text, nothing is printed. Only the main thread may call this function. */
void file_say_on_signal(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* file_hold_signals() defers SIGHUP, SIGINT and SIGTERM until file_release_signals(), which raises the
 * deferred signal. The program calls these functions before and after it writes results that exist only in
 * memory. file_signal_held() returns whether a signal is deferred; loops that wait must then give up. */
void file_hold_signals(void);
bool file_signal_held(void);
void file_release_signals(void);

FDSL_C_BEGIN

/* Refuses the text that Git LFS stores in place of a file which it has not downloaded. `bytes` are the first
 * `size` bytes of a file; FILE_POINTER_BYTES are enough. STATUS_FAILED with the remedy. Readers of data files
 * call this function where they open a file, or where parsing it fails. */
#define FILE_POINTER_BYTES 40
enum status file_refuse_pointer(const void *bytes, size_t size);

/* Reads a whole regular file into `*bytes`, which the caller frees: `*size` bytes and a terminating zero.
 * STATUS_FAILED with the path and the reason, also for a pointer of Git LFS. */
enum status file_read(const char *path, char **bytes, size_t *size);

/* ---- Locks on files that several processes append to ---- */

#define LOCK_TIMEOUT_S 60 /* the time that lock_take() waits by default */

/* Sets how many seconds lock_take() waits for a lock, in all threads. */
void lock_set_timeout(double seconds);

/* Sets a lower limit of this time for the calling thread, or INFINITY. Returns the previous limit. */
double lock_set_limit(double seconds);

/* Locks an open file until it is closed; `operation` is LOCK_SH or LOCK_EX of flock(). Waits while another
 * process holds the lock, and after one second names that process on stderr. STATUS_FAILED after the timeout,
 * or when a signal is deferred (file_hold_signals()); the message names that process's id and command if
 * /proc/locks lists the lock. Some cluster file systems do not support locks. On these, `*locked` is false
 * and the status is STATUS_OK, because losing a row is worse than the small risk that two rows mix. */
enum status lock_take(int fd, const char *path, int operation, bool *locked);

/* Unlocks and closes a file. close() alone would leave the lock to a child that another thread forked while
 * the file was open. */
void lock_close(int fd);

FDSL_C_END

/* Returns STATUS_FAILED if this process may not write files of `bytes` bytes (RLIMIT_FSIZE). */
enum status file_check_limit(uint64_t bytes);

/* ---- Lists of paths ---- */

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
