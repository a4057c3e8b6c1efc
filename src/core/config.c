#include "core/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_INIH
#include <ini.h>
#endif

#include "core/file.h"
#include "core/options.h"

static enum status add(struct config *config, char *argument)
{
    char **argv = argument ? realloc(config->argv, ((size_t)config->argc + 2) * sizeof *argv) : NULL;
    if (!argv) {
        free(argument);
        return status_set(STATUS_EXHAUSTED, "out of memory for the command line");
    }
    argv[config->argc++] = argument;
    argv[config->argc] = NULL;
    config->argv = argv;
    return STATUS_OK;
}

#ifdef HAVE_INIH
#define LINE_MAX_BYTES 190 /* inih's line buffer has 200 bytes */

/* The state of reading the file. inih calls take_line() for each option before it reads the next line. */
struct reading {
    struct config *config;
    const char *rest, *end; /* the unread text of the file, and its end */
    int line;               /* number of the latest line */
    enum status status;
};

/* Returns the next line for inih, like fgets(). A line that is too long or has a NUL byte ends the reading
 * with an error. */
static char *next_line(char *line, int size, void *context)
{
    struct reading *reading = context;
    size_t length = strcspn(reading->rest, "\n");
    (void)size;
    if (reading->rest == reading->end || reading->status != STATUS_OK)
        return NULL;
    reading->line++;
    if (length > LINE_MAX_BYTES) {
        reading->status = status_set(STATUS_USAGE, "--config %s: line %d has more than %d bytes; shorten it",
                                     reading->config->path, reading->line, LINE_MAX_BYTES);
        return NULL;
    }
    if (reading->rest[length] == '\0' && reading->rest + length < reading->end) {
        reading->status =
            status_set(STATUS_USAGE, "--config %s: line %d has a NUL byte; save it as UTF-8 text",
                       reading->config->path, reading->line);
        return NULL;
    }
    length += reading->rest[length] == '\n';
    memcpy(line, reading->rest, length);
    line[length] = '\0';
    reading->rest += length;
    return line;
}

static int take_line(void *context, const char *section, const char *name, const char *value)
{
    struct reading *reading = context;
    struct config *config = reading->config;
    size_t bytes = strlen(name) + strlen(value) + sizeof "--=";
    (void)section;
    if (strcmp(name, "config") == 0) {
        reading->status = status_set(
            STATUS_USAGE, "--config %s: line %d: a file cannot include another file; copy its lines instead",
            config->path, reading->line);
        return 0;
    }
    char *argument = malloc(bytes);
    int *lines = realloc(config->lines, ((size_t)config->argc + 1) * sizeof *lines);
    if (!argument || !lines) {
        free(argument);
        argument = NULL;
    } else {
        snprintf(argument, bytes, "--%s=%s", name, value);
        lines[config->argc] = reading->line;
    }
    if (lines)
        config->lines = lines;
    reading->status = add(config, argument);
    config->file_options++;
    return reading->status == STATUS_OK;
}

static enum status read_file(struct config *config)
{
    struct reading reading = {.config = config};
    char *text;
    size_t size;
    if (file_read(config->path, &text, &size) != STATUS_OK)
        return status_prefix(STATUS_USAGE, "--config");
    reading.rest = text;
    reading.end = text + size;
    int line = ini_parse_stream(next_line, &reading, take_line, &reading);
    free(text);
    if (reading.status != STATUS_OK || line == 0)
        return reading.status;
    return status_set(STATUS_USAGE, "--config %s: line %d is not an option; write \"name = value\"",
                      config->path, line);
}
#else
static enum status read_file(struct config *config)
{
    return status_set(STATUS_UNAVAILABLE,
                      "--config %s: not built, because inih was not found; install libinih-dev and rebuild",
                      config->path);
}
#endif

enum status config_read(int argc, char *argv[], struct config *config)
{
    /* Without specs, options_peek() accepts only the full name. */
    *config = (struct config){.path = options_peek(NULL, 0, argc, argv, "config")};
    TRY(add(config, strdup(argv[0])));
    if (config->path)
        TRY(read_file(config));
    for (int i = 1; i < argc && !config->command; i++)
        if (strcmp(argv[i], "--") == 0)
            config->command = argv + i + 1;
        else
            TRY(add(config, strdup(argv[i])));
    return STATUS_OK;
}

void config_free(struct config *config)
{
    for (int i = 0; i < config->argc; i++)
        free(config->argv[i]);
    free(config->argv);
    free(config->lines);
    *config = (struct config){0};
}
