/* Errors: a code, the option or file at fault, and one line of text for people, passed up to the caller.
 *
 * A function that can fail returns `enum status`. Where the failure happens, status_set() or status_option()
 * records what went wrong and what to do about it. Callers may add context with status_prefix(). Code decides
 * by the code and by status_subject(), never by the text. status_exit() gives the exit status of the program.
 */
#ifndef FDSL_CORE_STATUS_H
#define FDSL_CORE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "core/portable.h"

FDSL_C_BEGIN

enum status {
    STATUS_OK = 0,
    STATUS_FAILED = 1,      /* a failure while running */
    STATUS_USAGE = 2,       /* invalid options or input */
    STATUS_WRONG = 3,       /* a result differs from the reference; in compare, a row is slower */
    STATUS_UNAVAILABLE = 4, /* not supported by this build or machine */
    STATUS_EXHAUSTED = 5,   /* memory, disk space or file descriptors ran out while running; unlike
                               STATUS_FAILED, the data are not the cause, so --on-error skip does not apply */
    STATUS_TOO_LARGE = 6    /* the work that the options describe needs more memory than is free, or exceeds
                               a limit of the variant; less work would fit */
};

/* Returns the exit status of the program: STATUS_FAILED for STATUS_EXHAUSTED, STATUS_USAGE for
 * STATUS_TOO_LARGE, else the code itself. */
int status_exit(enum status code);

/* Returns the status for a failed system call. `cause` is the errno. */
enum status status_of_errno(int cause);

/* Returns the severity of a status, 0 for STATUS_OK, to choose one status for several ranks or variants.
 * STATUS_WRONG is the least severe failure, because other variants still run after it. */
int status_severity(enum status code);

/* Records a one-line message for the calling thread and returns `code`, so that a failing function can end
 * in `return status_set(...)`. Messages longer than 1 KiB lose their middle. Callers may insert file names
 * and sample keys as they are: all functions here escape control characters and invalid UTF-8
 * (text_printable()). */
enum status status_set(enum status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Records the message "--option" followed by the formatted text, such as ": '%s' is not a number", and that
 * this option is at fault. `option` is a name without dashes. In a sweep, status_print() adds the value of
 * the combination: the option moves from the options that precede a message (status_set_context()) into it.
 */
enum status status_option(enum status code, const char *option, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Like status_option(), but the message begins with "--option value", in a sweep and outside. */
enum status status_value(enum status code, const char *option, const char *value, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
enum status status_number(enum status code, const char *option, double value, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Records which option (its name without dashes) or file (its path) is at fault in the recorded message, and
 * returns `code`. Does nothing for STATUS_OK. */
enum status status_about(enum status code, const char *subject);

/* Prepends context to the recorded message ("context: message") and returns `code`. The subject stays. Does
 * nothing for STATUS_OK. */
enum status status_prefix(enum status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends text to the recorded message and returns `code`. The subject stays. */
enum status status_append(enum status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Returns the calling thread's latest message, never NULL. The next failure on this thread overwrites it. */
const char *status_text(void);

/* Returns the option or file at fault in the calling thread's latest message: an option's name without
 * dashes, or a path. "" if none was recorded, never NULL. */
const char *status_subject(void);

/* A failure that is kept while other calls may fail, or that is passed to another thread. */
struct failure {
    enum status status;
    int option_end;    /* where the option at fault ends in the text; 0: the text may not name it */
    bool states_value; /* its value follows there: status_value() */
    char subject[256];
    char text[1024];
};

/* Copies the calling thread's latest message, which belongs to `status`. status_restore() records it again,
 * for the thread that calls it, and returns its status. */
struct failure status_save(enum status status);
enum status status_restore(const struct failure *failure);

/* Returns whether the calling thread's latest message, which belongs to `status`, repeats `before` exactly.
 */
bool status_repeats(enum status status, const struct failure *before);

/* Returns whether two kept failures are the same: code, subject and message. */
bool failure_same(const struct failure *a, const struct failure *b);

/* Whether this code runs in the library libfdsl: a constant of the program (false) and of the library (true).
 * In the library, nothing is printed. status_warn() keeps its text for the calling thread; the other
 * functions that print do nothing. */
extern const bool status_in_library;

/* Selects between the name of a command-line option and the name of the field of a configuration (fdsl.h),
 * for messages of code that the program and the library share. */
#define OPTION_OR_FIELD(option, field) (status_in_library ? (field) : (option))
#define OPTION_DASHES                  OPTION_OR_FIELD("--", "")

/* In the library: forgets the warnings of the calling thread, or returns them as lines without a line end at
 * the end. At most the first 4 KiB are kept. "" if there are none, never NULL. */
void status_forget_warnings(void);
const char *status_warnings(void);

/* Returns whether output to `fd` may use colours: `fd` is a terminal, no launcher started this process, and
 * neither NO_COLOR nor TERM=dumb is set. */
bool status_coloured(int fd);

/* Sets the rank of this process and the number of ranks (0: unknown) that a launcher started. From then on
 * status_warn() and status_say() print on rank 0 only. Colours and progress are off, because the output of
 * all ranks goes through the launcher. Call before starting threads. */
void status_launched(int rank, int ranks);

/* Sets the rank and the number of ranks after comm_open(). From then on all ranks agree on every failure, so
 * only rank 0 prints errors. */
void status_joined(int rank, int ranks);

/* Returns whether progress may be shown: stderr is a terminal and no launcher started this process. */
bool status_shows_progress(void);

/* Sets a prefix for all later messages on stderr ("" for none): options with values, such as "--res 16
 * --batch 4". An error of status_option() or status_value() about one of them prints it once. The text is
 * copied. Call while no other thread prints. */
void status_set_context(const char *text);

/* Prints "fdsl-bench: warning: ..." to stderr, on rank 0 only. Does not repeat a warning that was given with
 * another context (status_set_context()), for example in every combination of a sweep. While a table is
 * printed on the same terminal, the warning is kept until status_release(), so that it does not come between
 * the lines of the table. */
void status_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Warns like status_warn() about the value of an option: "--OPTION VALUE" and then the formatted text. The
 * context does not repeat the option. */
void status_warn_value(const char *option, const char *value, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Start and end to keep warnings. */
void status_hold(void);
void status_release(void);

/* Writes the warnings that are kept, and the one that counts unreliable rows. May be called from a signal
 * handler. */
void status_write_held(void);

/* Counts a reason why the current row is less reliable. `what` completes the sentence "3 of 12 rows ..." and
 * identifies the reason; `remedy` says what to do. Both texts must outlive the run. With
 * status_show_caveats(true), also warns with the details that the format describes. Only on rank 0. */
void status_caveat(const char *what, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void status_show_caveats(bool each);

/* Warns in one line about all reasons that status_caveat() counted in a run of `rows` rows, and forgets them.
 * Prints nothing if there are none. */
void status_summarise_caveats(size_t rows);

/* Prints "fdsl-bench: warning: rank 2: ..." to stderr, on any rank. For warnings about this rank only, such
 * as those about samples that no other rank reads. With one rank, does what status_warn() does. */
void status_warn_own(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints "fdsl-bench: ..." to stderr if progress may be shown (status_shows_progress()). */
void status_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints "fdsl-bench: ..." to stderr, on rank 0 only, even if stderr is a log file. */
void status_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the recorded message as an error to stderr. After status_joined() only rank 0 prints. Before that
 * every rank prints, because rank 0 does not know of failures on other ranks. */
void status_print(void);

/* Returns from the calling function if `call` does not return STATUS_OK. */
#define TRY(call)                         \
    do {                                  \
        enum status try_status_ = (call); \
        if (try_status_ != STATUS_OK)     \
            return try_status_;           \
    } while (0)

/* Returns STATUS_OK if `room`, the result of allocations, is not zero. Otherwise sets the message, whose
 * format and arguments follow, and returns STATUS_EXHAUSTED. */
#define ALLOCATED(room, ...) ((room) ? STATUS_OK : status_set(STATUS_EXHAUSTED, __VA_ARGS__))

/* Placed before the declaration of a variable. Calls close(&variable) at the end of the scope, even if a
 * TRY() leaves the scope. The variable is initialised, or the next statement initialises it even if it fails.
 */
#define CLOSED_BY(close) __attribute__((cleanup(close)))

/* Placed before the declaration of an initialised pointer. Frees its memory at the end of the scope, even if
 * a TRY() leaves the scope. */
#define FREED CLOSED_BY(status_free_)
static inline void status_free_(void *pointer)
{
    free(*(void **)pointer);
}

/* ---- Progress ---- */

/* Shows the progress of long work on stderr: on a terminal as one line that is overwritten, in a log as new
 * lines, by default every ten seconds. */

/* Not thread-safe. With all fields zero, nothing is shown. */
struct progress {
    bool shown, terminal;
    double period_s, shown_s; /* time between two updates; time of the latest update */
};

/* Begins to show progress. On a terminal (status_shows_progress()) updates are due every 0.1 s. In a log, if
 * `lines` is set, they are due every 10 s, or every FDSL_PROGRESS_S seconds if that environment variable is a
 * number of at least 0. Otherwise nothing is shown. */
void progress_begin(struct progress *progress, bool lines);

/* Returns whether the next update is due. */
bool progress_due(const struct progress *progress);

/* Shows a text without a line end. Call it when progress_due() returns true. */
void progress_show(struct progress *progress, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Clears the line on a terminal. */
void progress_clear(const struct progress *progress);

/* Writes a duration: "48 s", "3 min 20 s", "2 h 05 min". Returns `text`. */
const char *progress_duration(double seconds, char *text, size_t size);

FDSL_C_END

#endif
