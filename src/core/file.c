#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/portable.h"
#include "core/text.h"
#include "core/timer.h"

#define TEMPORARY_NAMES 100

/* ---- Checking ---- */

/* Returns the folder of `path`. The result is either "." or `folder`, a buffer of PATH_MAX bytes that
 * receives the folder's path. */
static const char *folder_of(const char *path, char *folder)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return ".";
    int bytes = slash == path ? 1 : (int)(slash - path);
    snprintf(folder, PATH_MAX, "%.*s", bytes, path);
    return folder;
}

enum status file_check_new(const char *path)
{
    struct stat info;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!*name)
        return status_set(STATUS_USAGE, "'%s' names no file; add a name such as results.csv", path);
    /* If the path exists and is not a link, another process has just created the file. This is not an
     * error. */
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode))
        return status_set(STATUS_USAGE, "%s is a link to a file that does not exist; delete the link", path);

    char buffer[PATH_MAX];
    const char *folder = folder_of(path, buffer);
    if (access(folder, W_OK | X_OK) == 0)
        return STATUS_OK;
    if (errno == ENOENT)
        return status_set(STATUS_USAGE, "%s: its folder does not exist; create it with: mkdir -p '%s'", path,
                          folder);
    /* access() also fails for root on a read-only file system. */
    return status_set(STATUS_USAGE, "%s: its folder '%s' cannot be written (%s); choose another", path,
                      folder, strerror(errno));
}

enum status file_check_new_folder(const char *path)
{
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s", path);
    for (size_t end = strlen(name); end > 1 && name[end - 1] == '/';)
        name[--end] = '\0';
    return file_check_new(name);
}

bool file_same(const char *a, const char *b)
{
    struct stat info_a, info_b;
    if (stat(a, &info_a) == 0 && stat(b, &info_b) == 0)
        return info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino;
    char folder_a[PATH_MAX], folder_b[PATH_MAX];
    const char *name_a = strrchr(a, '/'), *name_b = strrchr(b, '/');
    return stat(folder_of(a, folder_a), &info_a) == 0 && stat(folder_of(b, folder_b), &info_b) == 0 &&
           info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino &&
           strcmp(name_a ? name_a + 1 : a, name_b ? name_b + 1 : b) == 0;
}

/* Returns the resolved path of the deepest part of `path` that exists. For "a/b/c" where only "a" exists,
 * resolves "a". The caller frees it; NULL if memory runs out. */
static char *real_part(const char *path)
{
    char part[PATH_MAX], *real = NULL;
    snprintf(part, sizeof part, "%s", path);
    while (*part && !(real = realpath(part, NULL))) {
        char *slash = strrchr(part, '/');
        if (!slash)
            return realpath(".", NULL);
        *slash = '\0';
    }
    return real ? real : realpath("/", NULL);
}

bool file_is_inside(const char *path, const char *folder)
{
    FREED char *inner = real_part(path), *outer = realpath(folder, NULL);
    size_t length = outer ? strlen(outer) : 0;
    if (length == 1)
        length = 0; /* "/" contains all paths */
    return inner && outer && strncmp(inner, outer, length) == 0 &&
           (inner[length] == '/' || inner[length] == '\0');
}

static enum status check(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return errno == ENOENT ? file_check_new(path)
                               : status_set(STATUS_USAGE, "%s cannot be used: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return status_set(STATUS_USAGE, "%s is not a regular file; choose another file", path);
    char real[PATH_MAX], buffer[PATH_MAX];
    /* For a link, check the folder of its target: writing replaces the target, not the link. */
    const char *folder = folder_of(realpath(path, real) ? real : path, buffer);
    if (access(folder, W_OK | X_OK) != 0)
        return status_set(STATUS_USAGE, "%s: its folder '%s' cannot be written (%s); choose another", path,
                          folder, strerror(errno));
    return STATUS_OK;
}

/* ---- Writing ---- */

enum status file_check_kind(const char *path, const struct file_kind *kind)
{
    char bytes[512], first;
    TRY(check(path));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) /* a missing file is fine; an unreadable one is not overwritten */
        return errno == ENOENT ? STATUS_OK
                               : status_set(STATUS_USAGE, "%s cannot be read: %s", path, strerror(errno));
    ssize_t any = pread(fd, &first, 1, 0);
    ssize_t count =
        pread(fd, bytes, kind->count < sizeof bytes ? kind->count : sizeof bytes, (off_t)kind->offset);
    int cause = errno;
    close(fd);
    if (any < 0 || count < 0)
        return status_set(STATUS_USAGE, "%s cannot be read: %s", path, strerror(cause));
    return any == 0 || ((size_t)count == kind->count && memcmp(bytes, kind->bytes, kind->count) == 0)
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s exists and is not a %s; choose another file, or remove it",
                            path, kind->name);
}

bool file_write_all(int fd, const char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t written = write(fd, bytes, count);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            errno = written < 0 ? errno : EIO;
            return false;
        }
        bytes += written;
        count -= (size_t)written;
    }
    return true;
}

bool file_read_at(int fd, void *bytes, size_t count, uint64_t offset, size_t *done)
{
    ssize_t got = 1;
    for (*done = 0; *done < count && got != 0; *done += got > 0 ? (size_t)got : 0) {
        got = pread(fd, (char *)bytes + *done, count - *done, (off_t)(offset + *done));
        if (got < 0 && errno != EINTR)
            return false;
    }
    return true;
}

void file_sync_folder(const char *path)
{
    char buffer[PATH_MAX];
    int fd = open(folder_of(path, buffer), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
}

/* ---- Whole files ---- */

/* The list of all open writers; the signal handler removes their temporary files. A thread that holds the
 * lock blocks all signals, so the handler never waits for its own thread. */
static struct file_writer *open_writers;
static atomic_flag writers_locked = ATOMIC_FLAG_INIT;

static void lock_writers(sigset_t *mask)
{
    sigset_t every;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, mask);
    while (atomic_flag_test_and_set(&writers_locked))
        sched_yield();
}

static void unlock_writers(const sigset_t *mask)
{
    atomic_flag_clear(&writers_locked);
    pthread_sigmask(SIG_SETMASK, mask, NULL);
}

static atomic_bool holding;
static atomic_int held_signal; /* the deferred signal; 0: none */

/* Two buffers for the line that the signal handler prints. The main thread fills one buffer while the handler
 * may print the other. */
#define LAST_WORDS_MAX 1024
static char last_words[2][LAST_WORDS_MAX + 64];
static atomic_int last_words_at = -1; /* index of the buffer to print; -1: none */

void file_say_on_signal(const char *format, ...)
{
    static const char start[] = "fdsl-bench: interrupted: ";
    int at = atomic_load(&last_words_at) == 0;
    char text[LAST_WORDS_MAX], shown[LAST_WORDS_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    text_printable(text, shown, sizeof shown);
    /* On a terminal, overwrite "^C" and a line of progress. */
    snprintf(last_words[at], sizeof last_words[at], "%s%s%s\n", status_shows_progress() ? "\r\033[K" : "",
             start, shown);
    atomic_store(&last_words_at, *text ? at : -1);
}

/* The signal handler. Keeps the lock of the writers, so that no other thread creates a temporary file before
 * the program ends. The raised signal is blocked until this function returns; then it ends the program. */
static void remove_and_die(int signal_number)
{
    if (atomic_load(&holding)) {
        atomic_store(&held_signal, signal_number);
        return;
    }
    while (atomic_flag_test_and_set(&writers_locked))
        sched_yield();
    for (const struct file_writer *writer = open_writers; writer; writer = writer->next)
        unlink(writer->name);
    int at = atomic_load(&last_words_at);
    status_write_held();
    if (at >= 0)
        (void)file_write_all(STDERR_FILENO, last_words[at], strlen(last_words[at]));
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

void file_remove_on_signals(void)
{
    static const int signals[] = {SIGHUP, SIGINT, SIGTERM};
    struct sigaction before, action = {.sa_handler = remove_and_die, .sa_flags = SA_RESTART};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaddset(&action.sa_mask, signals[i]);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(signals[i], &action, NULL);
}

void file_hold_signals(void)
{
    atomic_store(&holding, true);
}

bool file_signal_held(void)
{
    return atomic_load(&held_signal) != 0;
}

void file_release_signals(void)
{
    atomic_store(&holding, false);
    int signal_number = atomic_exchange(&held_signal, 0);
    if (signal_number)
        raise(signal_number);
}

/* Creates the temporary file next to the target, with default permissions, and sets its name. */
static bool open_temporary(struct file_writer *writer)
{
    char name[PATH_MAX];
    for (int i = 0; i < TEMPORARY_NAMES; i++) {
        if (snprintf(name, PATH_MAX, "%s.%ld-%d.tmp", writer->target, (long)getpid(), i) >= PATH_MAX) {
            errno = ENAMETOOLONG;
            return false;
        }
        writer->fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->fd >= 0)
            break;
        if (errno != EEXIST)
            return false;
    }
    if (writer->fd < 0)
        return false;
    writer->name = strdup(name);
    if (!writer->name)
        unlink(name);
    return writer->name;
}

/* Frees the writer, and removes its temporary file unless it was renamed to the target (`in_place`). */
static void writer_free(struct file_writer *writer, bool in_place)
{
    sigset_t mask;
    if (writer->fd >= 0)
        close(writer->fd);
    if (writer->name) {
        lock_writers(&mask);
        if (!in_place)
            unlink(writer->name);
        struct file_writer **link = &open_writers;
        while (*link != writer)
            link = &(*link)->next;
        *link = writer->next;
        unlock_writers(&mask);
    }
    free(writer->target);
    free(writer->name);
    *writer = (struct file_writer){.fd = -1};
}

/* Frees a writer after a failed call. The message has the reason from errno. */
static enum status writer_failed(struct file_writer *writer)
{
    enum status status =
        status_set(STATUS_FAILED, "%s cannot be written: %s", writer->target, strerror(errno));
    writer_free(writer, false);
    return status;
}

enum status file_begin(struct file_writer *writer, const char *path)
{
    struct stat info;
    char *target = realpath(path, NULL); /* resolves links: replaces the file, not the link */
    *writer = (struct file_writer){.fd = -1, .target = target ? target : strdup(path)};
    TRY(ALLOCATED(writer->target, "%s cannot be written: out of memory", path));
    if (stat(writer->target, &info) == 0 && !S_ISREG(info.st_mode)) {
        enum status status =
            status_set(STATUS_FAILED, "%s is not a regular file; choose another file", writer->target);
        writer_free(writer, false);
        return status;
    }
    sigset_t mask;
    lock_writers(&mask);
    bool opened = open_temporary(writer);
    if (opened) {
        writer->next = open_writers;
        open_writers = writer;
    }
    unlock_writers(&mask);
    return opened ? STATUS_OK : writer_failed(writer);
}

enum status file_add(struct file_writer *writer, const void *bytes, size_t count)
{
    return file_write_all(writer->fd, bytes, count) ? STATUS_OK : writer_failed(writer);
}

enum status file_complete(struct file_writer *writer)
{
    if (fsync(writer->fd) != 0)
        return writer_failed(writer);
    int failed = close(writer->fd);
    writer->fd = -1;
    return failed ? writer_failed(writer) : STATUS_OK;
}

enum status file_end(struct file_writer *writer)
{
    if (writer->fd >= 0)
        TRY(file_complete(writer));
    if (rename(writer->name, writer->target) != 0)
        return writer_failed(writer);
    file_sync_folder(writer->target);
    writer_free(writer, true);
    return STATUS_OK;
}

void file_abandon(struct file_writer *writer)
{
    writer_free(writer, false);
}

enum status file_write_atomic(const char *path, const void *bytes, size_t count)
{
    struct file_writer writer;
    TRY(file_begin(&writer, path));
    TRY(file_add(&writer, bytes, count));
    return file_end(&writer);
}

enum status file_take_stdout(int *stdout_fd)
{
    *stdout_fd = -1;
    if (fflush(stdout) != 0 || (*stdout_fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)) < 0 ||
        dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
        return status_set(STATUS_FAILED, "stdout: %s", strerror(errno));
    return STATUS_OK;
}

enum status file_write_stdout(int stdout_fd, const char *bytes, size_t count)
{
    enum status status = STATUS_OK;
    for (size_t done = 0; status == STATUS_OK && done < count;) {
        const ssize_t written = write(stdout_fd, bytes + done, count - done);
        if (written < 0 && errno != EINTR)
            status = status_set(STATUS_FAILED, "stdout could not be written: %s", strerror(errno));
        done += written > 0 ? (size_t)written : 0;
    }
    if (close(stdout_fd) != 0 && status == STATUS_OK)
        status = status_set(STATUS_FAILED, "stdout could not be written: %s", strerror(errno));
    return status;
}

/* ---- Reading ---- */

enum status file_refuse_pointer(const void *bytes, size_t size)
{
    return size < FILE_POINTER_BYTES ||
                   memcmp(bytes, "version https://git-lfs.github.com/spec/", FILE_POINTER_BYTES) != 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "a Git LFS pointer, not the file itself: run `git lfs pull`");
}

static enum status read_open(int fd, char **bytes, size_t *size)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return status_set(STATUS_FAILED, "not a regular file; name a file, not a folder or a pipe");
    *size = (size_t)info.st_size;
    *bytes = malloc(*size + 1);
    TRY(ALLOCATED(*bytes, "out of memory for its %zu bytes", *size));
    size_t got; /* fewer bytes if the file has become shorter */
    enum status status = STATUS_OK;
    if (!file_read_at(fd, *bytes, *size, 0, &got))
        status = status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    else {
        (*bytes)[got] = '\0';
        *size = got;
        status = file_refuse_pointer(*bytes, *size);
    }
    if (status != STATUS_OK) {
        free(*bytes);
        *bytes = NULL;
    }
    return status;
}

enum status file_read(const char *path, char **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* do not wait for the writer of a pipe */
    if (fd < 0)
        return status_set(STATUS_FAILED, "%s: cannot be read: %s", path, strerror(errno));
    enum status status = read_open(fd, bytes, size);
    close(fd);
    return status_prefix(status, "%s", path);
}

/* ---- Locks ---- */

#define POLL_NS (20 * 1000 * 1000)
#define SAY_S   1 /* time until a message names the holder; locks are usually held for milliseconds */

static double timeout_s = LOCK_TIMEOUT_S;
static _Thread_local double limit_s; /* 0: none. Not INFINITY: an initial value costs each thread a page,
                                       since the CUDA runtime aligns its own data to pages */

void lock_set_timeout(double seconds)
{
    timeout_s = seconds;
}

double lock_set_limit(double seconds)
{
    double before_s = limit_s > 0 ? limit_s : INFINITY;
    limit_s = isinf(seconds) ? 0 : seconds;
    return before_s;
}

/* Returns the id of the process that holds a lock on an open file, or 0. */
static long holder_of(int fd)
{
    struct stat info;
    char line[256];
    long found = 0;
    FILE *locks = fstat(fd, &info) == 0 ? fopen("/proc/locks", "re") : NULL;
    while (locks && !found && fgets(line, sizeof line, locks)) {
        /* A lock is listed as "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF". The line of a waiting
         * process has "->" after the first number. */
        long pid;
        unsigned major_number, minor_number;
        unsigned long long inode;
        if (sscanf(line, "%*d: %*[A-Z] %*s %*s %ld %x:%x:%llu", &pid, &major_number, &minor_number, &inode) ==
                4 &&
            pid > 0 && inode == info.st_ino && major_number == major(info.st_dev) &&
            minor_number == minor(info.st_dev))
            found = pid;
    }
    if (locks)
        fclose(locks);
    return found;
}

/* Describes the process that holds the lock: "process 1234 (fdsl-bench)" in `text`, or "another process". */
static const char *describe_holder(int fd, char *text, size_t bytes)
{
    char path[64], command[32] = "";
    long pid = holder_of(fd);
    if (pid == 0)
        return "another process";
    snprintf(path, sizeof path, "/proc/%ld/comm", pid);
    FILE *file = fopen(path, "re");
    if (file) {
        command[fread(command, 1, sizeof command - 1, file)] = '\0';
        fclose(file);
    }
    command[strcspn(command, "\n")] = '\0';
    for (char *c = command; *c; c++) /* a process can set any name */
        if (*c < ' ' || *c > '~')
            *c = '?';
    snprintf(text, bytes, *command ? "process %ld (%s)" : "process %ld", pid, command);
    return text;
}

void lock_close(int fd)
{
    (void)flock(fd, LOCK_UN);
    close(fd);
}

enum status lock_take(int fd, const char *path, int operation, bool *locked)
{
    const double begin_s = timer_now_s(), most_s = limit_s > 0 ? fmin(timeout_s, limit_s) : timeout_s;
    for (bool said = false;;) {
        char text[96];
        *locked = flock(fd, operation | LOCK_NB) == 0;
        if (*locked || errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK)
            return STATUS_OK;
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return status_set(STATUS_FAILED, "%s cannot be locked: %s", path, strerror(errno));
        const char *holder = describe_holder(fd, text, sizeof text);
        double waited_s = timer_now_s() - begin_s;
        if (file_signal_held())
            return status_set(STATUS_FAILED, "%s: interrupted while waiting for %s, which holds its lock",
                              path, holder);
        if (waited_s >= most_s)
            return status_set(STATUS_FAILED,
                              "%s is still locked by %s after %g s; end that process, or name another file%s",
                              path, holder, most_s,
                              OPTION_OR_FIELD(", or wait longer with --lock-timeout", ""));
        if (!said && waited_s >= SAY_S) {
            status_say("%s: waiting for %s, which holds its lock, for up to %g s", path, holder, most_s);
            said = true;
        }
        nanosleep(&(struct timespec){0, POLL_NS}, NULL);
    }
}

/* ---- Lists of paths ---- */

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

enum status file_check_limit(uint64_t bytes)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= bytes
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "files may have at most %" PRIu64 " bytes here, but %" PRIu64
                            " may be needed; raise the limit with ulimit -f",
                            (uint64_t)limit.rlim_cur, bytes);
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
