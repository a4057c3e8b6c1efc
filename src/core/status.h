/* Errors: a code and one line of text, returned and relayed. Nothing but main() exits.
 *
 * A function that can fail returns `enum status`. Where the failure happens, status_set() records what
 * went wrong and what to do about it; on the way up, status_prefix() adds context. The codes are the exit
 * statuses of the program. Only libc and core/text.h.
 */
#ifndef FDSL_CORE_STATUS_H
#define FDSL_CORE_STATUS_H

#include <stdbool.h>

#include "core/portable.h"

FDSL_C_BEGIN

enum status {
    STATUS_OK = 0,
    STATUS_FAILED = 1,     /* a failure while running */
    STATUS_USAGE = 2,      /* the user asked for something that makes no sense */
    STATUS_WRONG = 3,      /* a result differs from its oracle */
    STATUS_UNAVAILABLE = 4 /* asked for something this build or machine lacks */
};

/* How bad, where one status must stand for several: from 0, STATUS_OK. Wrong results are the least of the
 * failures: those end the run, and wrong results are counted and the next variant comes. */
int status_severity(enum status code);

/* Records a one-line message for the calling thread and returns `code`, so that a failing function can end
 * in `return status_set(...)`. A text of more than 1 KiB loses its middle. It may hold names of files and
 * keys of samples as they are: here, in status_prefix() and in what prints, control characters and bytes that
 * are not UTF-8 are escaped (text_printable()). */
enum status status_set(enum status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts context in front of the recorded message ("context: message") and returns `code` unchanged. */
enum status status_prefix(enum status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The calling thread's latest message; never NULL, owned by the thread, overwritten by the next failure. */
const char *status_text(void);

/* Whether text to this file descriptor may have colours: a terminal, no launcher, neither NO_COLOR nor
 * TERM=dumb. */
bool status_coloured(int fd);

/* Says which of several ranks (0: how many was not told) this process is, where a launcher started it. From
 * then on rank 0 alone prints errors, warnings and notes, and as what ranks print goes through the launcher,
 * terminal or not, there are neither colours nor progress. */
void status_launched(int rank, int ranks);

/* Says the same once the ranks have joined, so that they agree on every failure. */
void status_joined(int rank, int ranks);

/* Whether progress may be shown on stderr: a terminal, and this process is the one to write there. */
bool status_shows_progress(void);

/* Prints a line to stderr: "fdsl-bench: warning: ...", yellow where it may have colours. Of several ranks
 * only rank 0 does, for all. */
void status_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for what concerns this rank alone, whichever it is: "fdsl-bench: warning: rank 2: ...". */
void status_warn_own(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for what is no warning, on a terminal alone: nobody is looking on elsewhere. */
void status_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for anybody, terminal or not: what a log should hold. */
void status_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the recorded message as an error line to stderr. Of ranks that have joined rank 0 does, for all;
 * before that each speaks for itself, as rank 0 cannot know of its failure. */
void status_print(void);

#define TRY(call)                         \
    do {                                  \
        enum status try_status_ = (call); \
        if (try_status_ != STATUS_OK)     \
            return try_status_;           \
    } while (0)

FDSL_C_END

#endif
