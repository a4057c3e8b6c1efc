#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Thread_local char message[1024];

/* Set before any thread begins. */
static bool launched, joined;
static int own_rank, rank_count = 1;

int status_severity(enum status code)
{
    switch (code) {
    case STATUS_OK:
        return 0;
    case STATUS_WRONG:
        return 1;
    case STATUS_FAILED:
        return 2;
    case STATUS_USAGE:
        return 3;
    case STATUS_UNAVAILABLE:
        return 4;
    }
    return 5; /* no status at all */
}

enum status status_set(enum status code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return code;
}

enum status status_prefix(enum status code, const char *format, ...)
{
    char text[sizeof message];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof text - 2)
        length = 0;
    size_t room = sizeof text - (size_t)length;
    int written = snprintf(text + length, room, "%s%s", length ? ": " : "", message);
    if (written < 0) /* then the message alone must do */
        return code;
    memcpy(message, text, sizeof message);
    return code;
}

const char *status_text(void)
{
    return message;
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
    return !launched && isatty(STDERR_FILENO);
}

bool status_coloured(int fd)
{
    const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
    return !launched && isatty(fd) && !(no_color && *no_color) &&
           !(terminal && strcmp(terminal, "dumb") == 0);
}

static void print_line(const char *colour, const char *kind, const char *text)
{
    bool terminal = status_shows_progress(), coloured = *colour && status_coloured(STDERR_FILENO);
    /* On a terminal, over the progress that may stand there. */
    fprintf(stderr, "%s%sfdsl-bench: %s%s%s\n", terminal ? "\r\033[K" : "", coloured ? colour : "", kind,
            coloured ? "\033[0m" : "", text);
}

static void print_formatted(const char *colour, const char *kind, const char *format, va_list arguments)
{
    char text[sizeof message];
    vsnprintf(text, sizeof text, format, arguments);
    print_line(colour, kind, text);
}

void status_warn(const char *format, ...)
{
    if (own_rank != 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    print_formatted("\033[33m", "warning: ", format, arguments);
    va_end(arguments);
}

void status_warn_own(const char *format, ...)
{
    char kind[32] = "warning: ";
    if (rank_count != 1)
        snprintf(kind, sizeof kind, "warning: rank %d: ", own_rank);
    va_list arguments;
    va_start(arguments, format);
    print_formatted("\033[33m", kind, format, arguments);
    va_end(arguments);
}

void status_note(const char *format, ...)
{
    if (!status_shows_progress())
        return;
    va_list arguments;
    va_start(arguments, format);
    print_formatted("", "", format, arguments);
    va_end(arguments);
}

void status_say(const char *format, ...)
{
    if (own_rank != 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    print_formatted("", "", format, arguments);
    va_end(arguments);
}

void status_print(void)
{
    if (joined && own_rank != 0)
        return;
    char kind[32] = "";
    if (own_rank != 0)
        snprintf(kind, sizeof kind, "rank %d: ", own_rank);
    print_line("\033[31m", kind, message);
}
