#include "core/status.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "core/timer.h"

#define MESSAGE_BYTES  1024
#define LINE_BYTES     (MESSAGE_BYTES + 640) /* a message, its context and the codes of a terminal */
#define GAP            " ... "               /* replaces the middle of a message that is too long */

#define WARNING_COLOUR "\033[33m"

static _Thread_local char message[MESSAGE_BYTES];
static _Thread_local char subject[sizeof((struct failure *)NULL)->subject];
static _Thread_local int option_end; /* struct failure explains both */
static _Thread_local bool states_value;
_Static_assert(sizeof((struct failure *)NULL)->text == MESSAGE_BYTES, "a saved message has the same size");

/* The warnings of this thread, in the library. */
static _Thread_local char kept_warnings[1536]; /* thread-local memory takes part of small stacks */

/* Set by status_launched() and status_joined(), only while no other thread reads these variables. */
static bool launched, joined;
static int own_rank, rank_count = 1;

static char context[256]; /* "" or ends with ": " */

/* Warnings that are kept until status_release(). The signal handler reads them, so `held_bytes` grows only
 * after the text is complete. */
static atomic_flag held_locked = ATOMIC_FLAG_INIT;
static bool holding;
static char held[1 << 16];
static atomic_size_t held_bytes;
/* The warning about unreliable rows that a signal handler prints: one of two texts, or none (-1). */
static char summary[2][LINE_BYTES];
static atomic_int summary_at = -1;

/* Texts of warnings that were given with a context, each between line ends. Also protected by the lock. */
static char repeatable[1 << 14] = "\n";

/* The reasons that status_caveat() counted. */
#define CAVEATS_MAX 16
static struct caveat {
    const char *what, *remedy;
    size_t rows;
} caveats[CAVEATS_MAX];
static size_t caveat_count;
static bool caveats_shown;

int status_severity(enum status code)
{
    switch (code) {
    case STATUS_OK:
        return 0;
    case STATUS_WRONG:
        return 1;
    case STATUS_FAILED:
        return 2;
    case STATUS_EXHAUSTED:
        return 3;
    case STATUS_TOO_LARGE:
        return 4;
    case STATUS_USAGE:
        return 5;
    case STATUS_UNAVAILABLE:
        return 6;
    }
    return 7; /* not a valid status */
}

int status_exit(enum status code)
{
    return code == STATUS_EXHAUSTED ? STATUS_FAILED : code == STATUS_TOO_LARGE ? STATUS_USAGE : (int)code;
}

enum status status_of_errno(int cause)
{
    return cause == ENOMEM || cause == ENOSPC || cause == EDQUOT || cause == EMFILE || cause == ENFILE
               ? STATUS_EXHAUSTED
               : STATUS_FAILED;
}

/* Copies `text`, escaped for terminals, into `out`, a buffer of MESSAGE_BYTES. Cuts the middle out of a text
 * that is too long, because most messages begin with names and end with the remedy. */
static void fit(const char *text, char *out)
{
    char *whole = malloc(4 * strlen(text) + 1); /* escaping turns one byte into at most four */
    if (!whole) {
        text_printable(text, out, MESSAGE_BYTES);
        return;
    }
    text_printable(text, whole, 4 * strlen(text) + 1);
    size_t length = strlen(whole), head = length;
    const char *tail = whole + length;
    if (length >= MESSAGE_BYTES) {
        head = MESSAGE_BYTES / 2;
        tail -= MESSAGE_BYTES - 1 - strlen(GAP) - head;
        while ((whole[head] & 0xC0) == 0x80) /* do not split a UTF-8 character */
            head--;
        while ((*tail & 0xC0) == 0x80)
            tail++;
    }
    snprintf(out, MESSAGE_BYTES, "%.*s%s%s", (int)head, whole, *tail ? GAP : "", tail);
    free(whole);
}

/* Formats text of any length and copies it with fit() into `out`. If `end` is not NULL, appends ": " and
 * `end`. */
__attribute__((format(printf, 2, 0))) static void fit_formatted(char *out, const char *format,
                                                                va_list arguments, const char *end)
{
    char *begin = NULL, *text = NULL;
    if (vasprintf(&begin, format, arguments) < 0)
        begin = NULL;
    if (begin && end && asprintf(&text, "%s: %s", begin, end) < 0)
        text = NULL;
    if (begin && (text || !end))
        fit(text ? text : begin, out);
    else if (!end) /* out of memory: show the format string itself */
        fit(format, out);
    free(begin);
    free(text);
}

/* fit_formatted() with the arguments that follow the parameter `format` of the calling function. */
#define FIT(out, end)                               \
    do {                                            \
        va_list arguments;                          \
        va_start(arguments, format);                \
        fit_formatted(out, format, arguments, end); \
        va_end(arguments);                          \
    } while (0)

enum status status_set(enum status code, const char *format, ...)
{
    FIT(message, NULL);
    *subject = '\0';
    option_end = 0;
    states_value = false;
    return code;
}

/* Records "--option" and `rest`, the text that follows it. */
static enum status set_option(enum status code, const char *option, const char *rest)
{
    (void)status_about(status_set(code, "--%s%s", option, rest), option);
    option_end = (int)strlen(option) + 2;
    return code;
}

enum status status_option(enum status code, const char *option, const char *format, ...)
{
    char rest[MESSAGE_BYTES];
    FIT(rest, NULL);
    return set_option(code, option, rest);
}

enum status status_value(enum status code, const char *option, const char *value, const char *format, ...)
{
    char rest[MESSAGE_BYTES], whole[2 * MESSAGE_BYTES];
    FIT(rest, NULL);
    snprintf(whole, sizeof whole, " %.*s%s", MESSAGE_BYTES - 2, value, rest);
    (void)set_option(code, option, whole);
    states_value = true;
    return code;
}

enum status status_number(enum status code, const char *option, double value, const char *format, ...)
{
    char rest[MESSAGE_BYTES];
    char number[32];
    FIT(rest, NULL);
    snprintf(number, sizeof number, "%.15g", value);
    return status_value(code, option, number, "%s", rest);
}

enum status status_about(enum status code, const char *about)
{
    if (code != STATUS_OK) {
        snprintf(subject, sizeof subject, "%s", about);
        option_end = 0;
        states_value = false;
    }
    return code;
}

enum status status_prefix(enum status code, const char *format, ...)
{
    size_t length = strlen(message);
    if (code == STATUS_OK)
        return code;
    FIT(message, message);
    bool whole =
        strlen(message) < MESSAGE_BYTES - 1; /* else the option may be in the middle, which is lost */
    option_end = option_end && whole ? option_end + (int)(strlen(message) - length) : 0;
    return code;
}

enum status status_append(enum status code, const char *format, ...)
{
    char end[MESSAGE_BYTES], *whole = NULL;
    FIT(end, NULL);
    if (asprintf(&whole, "%s%s", message, end) >= 0) {
        option_end = strlen(whole) < MESSAGE_BYTES ? option_end : 0;
        fit(whole, message);
        free(whole);
    }
    return code;
}

const char *status_text(void)
{
    return message;
}

const char *status_subject(void)
{
    return subject;
}

struct failure status_save(enum status status)
{
    struct failure failure = {.status = status, .option_end = option_end, .states_value = states_value};
    memcpy(failure.subject, subject, sizeof subject);
    memcpy(failure.text, message, sizeof message);
    return failure;
}

enum status status_restore(const struct failure *failure)
{
    memcpy(subject, failure->subject, sizeof subject);
    memcpy(message, failure->text, sizeof message);
    option_end = failure->option_end;
    states_value = failure->states_value;
    return failure->status;
}

bool status_repeats(enum status status, const struct failure *before)
{
    const struct failure now = status_save(status);
    return failure_same(&now, before);
}

bool failure_same(const struct failure *a, const struct failure *b)
{
    return a->status == b->status && strcmp(a->subject, b->subject) == 0 && strcmp(a->text, b->text) == 0;
}

void status_launched(int rank, int ranks)
{
    launched = true;
    own_rank = rank;
    rank_count = ranks;
}

void status_joined(int rank, int ranks)
{
    status_launched(rank, ranks);
    joined = true;
}

bool status_shows_progress(void)
{
    if (status_in_library)
        return false;
    return !launched && isatty(STDERR_FILENO);
}

bool status_coloured(int fd)
{
    const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
    return !launched && isatty(fd) && !(no_color && *no_color) &&
           !(terminal && strcmp(terminal, "dumb") == 0);
}

void status_set_context(const char *text)
{
    snprintf(context, sizeof context, "%.240s%s", text, *text ? ": " : "");
}

/* Splits the context at the option `name`: copies the other options to `without` and returns the option's
 * value, whose length is then `*length`. Returns "" and copies everything if the context lacks the option. */
static const char *split_context(const char *name, char without[sizeof context], int *length)
{
    char option[sizeof subject + 4];
    int head = snprintf(option, sizeof option, "--%s ", name);
    const char *at = context;
    while ((at = strstr(at, option)) && at != context && at[-1] != ' ')
        at += head;
    snprintf(without, sizeof context, "%s", context);
    *length = 0;
    if (!at)
        return "";
    const char *value = at + head, *next = strstr(value, " --");
    *length = next ? (int)(next - value) : (int)strlen(value) - 2; /* the context ends with ": " */
    without += at - context;
    if (next)
        strcpy(without, next + 1);
    else if (at > context)
        strcpy(without - 1, ": ");
    else
        *without = '\0';
    return value;
}

/* Writes a line to `line`, for stderr. `before`: the context, or "". Returns the length. */
static size_t format_line(const char *colour, const char *kind, const char *before, const char *text,
                          char *line, size_t size)
{
    bool terminal = status_shows_progress(), coloured = *colour && status_coloured(STDERR_FILENO);
    /* On a terminal, overwrite a line of progress. */
    snprintf(line, size, "%s%sfdsl-bench: %s%s%s%s\n", terminal ? "\r\033[K" : "", coloured ? colour : "",
             kind, coloured ? "\033[0m" : "", before, text);
    return strlen(line);
}

static void print_with(const char *colour, const char *kind, const char *before, const char *text)
{
    if (status_in_library)
        return;
    char line[LINE_BYTES];
    format_line(colour, kind, before, text, line, sizeof line);
    fputs(line, stderr);
}

static void print_line(const char *colour, const char *kind, const char *text)
{
    print_with(colour, kind, context, text);
}

static void lock_held(void)
{
    while (atomic_flag_test_and_set(&held_locked))
        usleep(1);
}

/* Keeps a warning, with `before` in front of it, if warnings are held. Returns false if they are not, or if
 * there is no room. */
static bool keep_warning(const char *before, const char *text)
{
    char line[LINE_BYTES];
    size_t length = format_line(WARNING_COLOUR, "warning: ", before, text, line, sizeof line);
    lock_held();
    size_t used = atomic_load(&held_bytes);
    bool kept = holding && length <= sizeof held - used;
    if (kept) {
        memcpy(held + used, line, length);
        atomic_store(&held_bytes, used + length);
    }
    atomic_flag_clear(&held_locked);
    return kept;
}

void status_hold(void)
{
    lock_held();
    holding = true;
    atomic_flag_clear(&held_locked);
}

void status_release(void)
{
    lock_held();
    holding = false;
    fwrite(held, 1, atomic_load(&held_bytes), stderr);
    atomic_store(&held_bytes, 0);
    atomic_flag_clear(&held_locked);
}

static void write_now(const char *text, size_t bytes)
{
    ssize_t written = 1;
    for (size_t i = 0; i < bytes && written > 0; i += (size_t)written)
        written = write(STDERR_FILENO, text + i, bytes - i);
}

void status_write_held(void)
{
    int at = atomic_load(&summary_at);
    write_now(held, atomic_load(&held_bytes));
    if (at >= 0)
        write_now(summary[at], strlen(summary[at]));
}

/* Returns whether the same warning was given with another context. Remembers it, if there is room. */
static bool is_repeated(const char *text)
{
    char line[MESSAGE_BYTES + 2];
    if (!*context)
        return false;
    snprintf(line, sizeof line, "\n%s\n", text);
    lock_held();
    bool repeated = strstr(repeatable, line);
    if (!repeated && strlen(repeatable) + strlen(line) < sizeof repeatable)
        strcat(repeatable, line + 1);
    atomic_flag_clear(&held_locked);
    return repeated;
}

void status_forget_warnings(void)
{
    *kept_warnings = '\0';
}

const char *status_warnings(void)
{
    return kept_warnings;
}

/* Appends a warning to those of the thread, if there is room. */
static void keep_for_caller(const char *before, const char *text)
{
    const size_t used = strlen(kept_warnings);
    if (used + strlen(before) + strlen(text) + 2 <= sizeof kept_warnings)
        snprintf(kept_warnings + used, sizeof kept_warnings - used, "%s%s%s", used ? "\n" : "", before, text);
}

static void warn(const char *before, const char *text)
{
    if (status_in_library)
        keep_for_caller(before, text);
    else if (!keep_warning(before, text))
        print_with(WARNING_COLOUR, "warning: ", before, text);
}

void status_warn(const char *format, ...)
{
    char text[MESSAGE_BYTES];
    if (own_rank != 0)
        return;
    FIT(text, NULL);
    if (!is_repeated(text))
        warn(context, text);
}

void status_warn_value(const char *option, const char *value, const char *format, ...)
{
    char rest[MESSAGE_BYTES], whole[3 * MESSAGE_BYTES], text[MESSAGE_BYTES], before[sizeof context];
    int length;
    if (own_rank != 0)
        return;
    FIT(rest, NULL);
    snprintf(whole, sizeof whole, "--%s %s%s", option, value, rest);
    fit(whole, text);
    (void)split_context(option, before, &length);
    if (!is_repeated(text))
        warn(before, text);
}

static struct caveat *find_caveat(const char *what)
{
    for (size_t i = 0; i < caveat_count; i++)
        if (strcmp(caveats[i].what, what) == 0)
            return &caveats[i];
    return caveat_count < CAVEATS_MAX ? &caveats[caveat_count++] : NULL;
}

/* Writes the warning that counts the caveats. `rows`: the number of all rows, or 0 if it is not known yet. */
static void describe_caveats(size_t rows, char text[MESSAGE_BYTES])
{
    char who[64] = "the row";
    *text = '\0';
    for (size_t i = 0; i < caveat_count; i++) {
        if (rows > 1)
            snprintf(who, sizeof who, "%zu of %zu rows", caveats[i].rows, rows);
        else if (rows == 0)
            snprintf(who, sizeof who, "%zu row%s", caveats[i].rows, caveats[i].rows == 1 ? "" : "s");
        text_join(text, MESSAGE_BYTES, "; ", "%s %s: %s", who, caveats[i].what, caveats[i].remedy);
    }
    if (!caveats_shown)
        text_join(text, MESSAGE_BYTES, " ", "(details: --verbose)");
}

/* Prepares the warning for the case that a signal ends the run before the table ends. */
static void prepare_summary(void)
{
    char text[MESSAGE_BYTES];
    int at = atomic_load(&summary_at) == 0;
    describe_caveats(0, text);
    format_line(WARNING_COLOUR, "warning: ", "", text, summary[at], sizeof summary[at]);
    atomic_store(&summary_at, at);
}

void status_caveat(const char *what, const char *remedy, const char *format, ...)
{
    struct caveat *caveat = own_rank == 0 ? find_caveat(what) : NULL;
    if (caveat) {
        *caveat = (struct caveat){what, remedy, caveat->rows + 1};
        prepare_summary();
    }
    if (own_rank != 0 || (caveat && !caveats_shown))
        return;
    char text[MESSAGE_BYTES];
    FIT(text, NULL);
    warn(context, text);
}

void status_show_caveats(bool each)
{
    caveats_shown = each;
}

void status_summarise_caveats(size_t rows)
{
    char text[MESSAGE_BYTES];
    describe_caveats(rows, text);
    atomic_store(&summary_at, -1);
    if (caveat_count > 0)
        status_warn("%s", text);
    memset(caveats, 0, sizeof caveats);
    caveat_count = 0;
}

void status_warn_own(const char *format, ...)
{
    char kind[32], text[MESSAGE_BYTES];
    snprintf(kind, sizeof kind, "warning: rank %d: ", own_rank);
    FIT(text, NULL);
    if (is_repeated(text))
        return;
    if (rank_count == 1)
        warn(context, text);
    else
        print_line(WARNING_COLOUR, kind, text);
}

void status_note(const char *format, ...)
{
    char text[MESSAGE_BYTES];
    if (!status_shows_progress())
        return;
    FIT(text, NULL);
    print_line("", "", text);
}

void status_say(const char *format, ...)
{
    char text[MESSAGE_BYTES];
    if (own_rank != 0)
        return;
    FIT(text, NULL);
    print_line("", "", text);
}

void status_print(void)
{
    if (joined && own_rank != 0)
        return;
    char kind[32] = "", before[sizeof context], text[MESSAGE_BYTES + sizeof context];
    if (own_rank != 0)
        snprintf(kind, sizeof kind, "rank %d: ", own_rank);
    int length;
    const char *value = split_context(option_end ? subject : "", before, &length);
    if (states_value)
        length = 0;
    snprintf(text, sizeof text, "%.*s%s%.*s%s", option_end, message, length ? " " : "", length, value,
             message + option_end);
    print_with("\033[31m", kind, before, text);
}

/* ---- Progress ---- */

#define TERMINAL_S 0.1
#define LINES_S    10

/* Returns the time between two lines in a log, in seconds. */
static double lines_s(void)
{
    const char *text = getenv("FDSL_PROGRESS_S");
    char *end;
    double seconds = text && *text ? strtod(text, &end) : LINES_S;
    return text && *text && (*end || !(seconds >= 0)) ? LINES_S : seconds;
}

void progress_begin(struct progress *progress, bool lines)
{
    bool terminal = status_shows_progress();
    if (status_in_library) { /* shows nothing */
        *progress = (struct progress){.shown = false};
        return;
    }
    *progress = (struct progress){.shown = terminal || lines,
                                  .terminal = terminal,
                                  .period_s = terminal ? TERMINAL_S : lines_s(),
                                  .shown_s = terminal ? -HUGE_VAL : timer_now_s()};
}

bool progress_due(const struct progress *progress)
{
    return progress->shown && timer_now_s() - progress->shown_s >= progress->period_s;
}

void progress_show(struct progress *progress, const char *format, ...)
{
    va_list arguments;
    char text[512];
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    progress->shown_s = timer_now_s();
    if (progress->terminal)
        fprintf(stderr, "\r\033[K%s", text);
    else
        fprintf(stderr, "fdsl-bench: %s\n", text);
    fflush(stderr);
}

void progress_clear(const struct progress *progress)
{
    if (progress->terminal)
        fputs("\r\033[K", stderr);
}

const char *progress_duration(double seconds, char *text, size_t size)
{
    double whole = round(seconds), minutes = floor(whole / 60);
    if (whole < 60)
        snprintf(text, size, "%.0f s", whole);
    else if (minutes < 60)
        snprintf(text, size, "%.0f min %02.0f s", minutes, whole - 60 * minutes);
    else
        snprintf(text, size, "%.0f h %02.0f min", floor(minutes / 60), fmod(minutes, 60));
    return text;
}
