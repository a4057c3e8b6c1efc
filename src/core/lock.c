#include "core/lock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "core/file.h"
#include "core/timer.h"

#define POLL_NS (20 * 1000 * 1000)
#define SAY_S   1 /* time until a message names the holder; locks are usually held for milliseconds */

static double timeout_s = LOCK_TIMEOUT_S;

double lock_set_timeout(double seconds)
{
    double before_s = timeout_s;
    timeout_s = seconds;
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

enum status lock_take(int fd, const char *path, int operation, bool *locked)
{
    const double begin_s = timer_now_s();
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
        if (waited_s >= timeout_s)
            return status_set(STATUS_FAILED,
                              "%s is still locked by %s after %g s; end that process, name another file, or "
                              "wait longer with --lock-timeout",
                              path, holder, timeout_s);
        if (!said && waited_s >= SAY_S) {
            status_say("%s: waiting for %s, which holds its lock, for up to %g s", path, holder, timeout_s);
            said = true;
        }
        nanosleep(&(struct timespec){0, POLL_NS}, NULL);
    }
}
