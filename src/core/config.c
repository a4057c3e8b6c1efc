#include "core/config.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

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
        return status_set(STATUS_FAILED, "out of memory for the command line");
    }
    argv[config->argc++] = argument;
    argv[config->argc] = NULL;
    config->argv = argv;
    return STATUS_OK;
}

#ifdef HAVE_INIH
#define LINE_MAX_BYTES 190 /* inih has room for 200 */

/* The file while inih reads it. */
struct reading {
    struct config *config;
    enum status status;
};

static bool is_one_of(const char *word, const char *const *words)
{
    while (*words && strcasecmp(word, *words) != 0)
        words++;
    return *words;
}

static int take_line(void *context, const char *section, const char *name, const char *value)
{
    static const char *const on[] = {"true", "yes", "on", NULL}, *const off[] = {"false", "no", "off", NULL};
    struct reading *reading = context;
    size_t bytes = strlen(name) + strlen(value) + sizeof "--=";
    (void)section;
    if (strcmp(name, "config") == 0) {
        reading->status =
            status_set(STATUS_USAGE, "--config: a file cannot name another one; copy its lines");
        return 0;
    }
    if (is_one_of(value, off))
        return 1;
    char *argument = malloc(bytes);
    if (argument)
        snprintf(argument, bytes, is_one_of(value, on) ? "--%s" : "--%s=%s", name, value);
    reading->status = add(reading->config, argument);
    reading->config->file_options++;
    return reading->status == STATUS_OK;
}

/* Returns the number of the first line that is too long for inih, or 0. */
static int long_line(const char *text)
{
    for (int line = 1; *text; line++) {
        size_t length = strcspn(text, "\n");
        if (length > LINE_MAX_BYTES)
            return line;
        text += length + (text[length] == '\n');
    }
    return 0;
}

static enum status read_file(const char *path, struct config *config)
{
    struct reading reading = {.config = config};
    char *text;
    size_t size;
    if (file_read(path, &text, &size) != STATUS_OK)
        return status_prefix(STATUS_USAGE, "--config");
    int line = long_line(text);
    if (line > 0) {
        free(text);
        return status_set(STATUS_USAGE, "--config %s: line %d has more than %d bytes; shorten it", path, line,
                          LINE_MAX_BYTES);
    }
    line = ini_parse_string(text, take_line, &reading);
    free(text);
    if (reading.status != STATUS_OK || line == 0)
        return reading.status;
    return status_set(STATUS_USAGE, "--config %s: line %d is not an option; write \"name = value\"", path,
                      line);
}
#else
static enum status read_file(const char *path, struct config *config)
{
    (void)config;
    return status_set(STATUS_UNAVAILABLE,
                      "--config %s: not built, because inih was not found; install libinih-dev and rebuild",
                      path);
}
#endif

enum status config_read(int argc, char *argv[], struct config *config)
{
    *config = (struct config){0};
    const char *path = options_peek(NULL, 0, argc, argv, "config"); /* only the full name --config */
    TRY(add(config, strdup(argv[0])));
    if (path)
        TRY(read_file(path, config));
    for (int i = 1; i < argc; i++)
        TRY(add(config, strdup(argv[i])));
    return STATUS_OK;
}

void config_free(struct config *config)
{
    for (int i = 0; i < config->argc; i++)
        free(config->argv[i]);
    free(config->argv);
    *config = (struct config){0};
}
