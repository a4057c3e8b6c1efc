#include "run/table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/lock.h"

/* The state of the parser. */
struct parse {
    struct table *table;
    char *at, *end;
    size_t line; /* the number of the line at `at` */
    size_t cells;
    char separator;
    bool by_hand; /* as for table_read_by_hand() */
};

static enum status refuse(const struct parse *parse, const char *what)
{
    return status_set(parse->by_hand ? STATUS_USAGE : STATUS_FAILED,
                      "%s, line %zu: %s; repair or delete this line", parse->table->path, parse->line, what);
}

static enum status out_of_memory(const char *path)
{
    return status_set(STATUS_EXHAUSTED, "%s: out of memory for its rows", path);
}

static enum status add_cell(struct parse *parse, const char *text)
{
    if (!array_grow(&parse->table->cells, parse->cells, sizeof *parse->table->cells))
        return out_of_memory(parse->table->path);
    parse->table->cells[parse->cells++] = text;
    return STATUS_OK;
}

static enum status add_line(struct parse *parse, size_t line)
{
    struct table *table = parse->table;
    if (!array_grow(&table->lines, table->rows, sizeof *table->lines))
        return out_of_memory(table->path);
    table->lines[table->rows++] = line;
    return STATUS_OK;
}

/* Decodes a cell in quotes and terminates it. Leaves `at` after the closing quote. */
static enum status quoted_cell(struct parse *parse, const char **cell)
{
    char *from = parse->at + 1, *to = from;
    size_t first_line = parse->line;
    *cell = to;
    for (; from < parse->end && (*from != '"' || from[1] == '"'); from++) {
        from += *from == '"'; /* two quotes mean one */
        parse->line += *from == '\n';
        *to++ = *from;
    }
    if (from >= parse->end) {
        parse->line = first_line;
        return refuse(parse, "a quote is not closed");
    }
    parse->at = from + 1;
    *to = '\0';
    return STATUS_OK;
}

/* Decodes the next cell. Leaves `at` after the comma or the line end. `*last` becomes true at a line end. */
static enum status next_cell(struct parse *parse, bool *last)
{
    const char *cell = parse->at, stops[] = {parse->separator, '\r', '\n', '\0'};
    if (*parse->at == '"' && parse->separator == ',')
        TRY(quoted_cell(parse, &cell));
    else
        parse->at += strcspn(parse->at, stops);
    char *stop = parse->at;
    if (*stop == '\r' && (stop[1] == '\n' || stop + 1 == parse->end))
        parse->at++;
    if (parse->at == parse->end && !parse->by_hand)
        return refuse(parse, "this last line has no line end and may be incomplete");
    *last = parse->at == parse->end || *parse->at == '\n';
    if (!*last && *parse->at != parse->separator)
        return refuse(parse, parse->separator == ',' ? "neither a comma nor a line end follows a cell"
                                                     : "neither a tab nor a line end follows a cell");
    parse->at += parse->at < parse->end;
    *stop = '\0';
    return add_cell(parse, cell);
}

/* Decodes a line, or several if cells in quotes contain line ends. */
static enum status next_row(struct parse *parse)
{
    struct table *table = parse->table;
    size_t before = parse->cells, line = parse->line;
    const char *text = parse->at + strspn(parse->at, parse->by_hand ? " \t\r" : "\r");
    if (*text == '\n' || (parse->by_hand && (*text == '#' || text == parse->end))) {
        parse->at += strcspn(parse->at, "\n");
        parse->at += parse->at < parse->end;
        parse->line++;
        return STATUS_OK;
    }
    if (before == 0 && parse->by_hand && strcspn(parse->at, "\t") < strcspn(parse->at, "\n"))
        parse->separator = '\t';
    for (bool last = false; !last;)
        TRY(next_cell(parse, &last));
    size_t cells = parse->cells - before;
    if (before == 0) {
        table->columns = cells;
        table->header_line = line;
    } else if (cells != table->columns)
        return status_set(parse->by_hand ? STATUS_USAGE : STATUS_FAILED,
                          "%s, line %zu: %zu cell%s, but the header has %zu; repair or delete this line",
                          table->path, line, cells, cells == 1 ? "" : "s", table->columns);
    else
        TRY(add_line(parse, line));
    parse->line++;
    return STATUS_OK;
}

static enum status parse_text(const char *path, char *text, size_t bytes, bool by_hand, struct table *table)
{
    *table = (struct table){.path = path, .text = text};
    struct parse parse = {
        .table = table, .at = text, .end = text + bytes, .line = 1, .separator = ',', .by_hand = by_hand};
    const char *zero = memchr(text, '\0', bytes);
    if (zero) {
        for (const char *c = text; c < zero; c++)
            parse.line += *c == '\n';
        return refuse(&parse, "a NUL byte");
    }
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) /* a byte order mark, from a spreadsheet */
        parse.at += 3;
    while (parse.at < parse.end)
        TRY(next_row(&parse));
    return STATUS_OK;
}

enum status table_parse(const char *path, char *text, size_t bytes, struct table *table)
{
    return parse_text(path, text, bytes, false, table);
}

enum status table_read_by_hand(const char *path, struct table *table)
{
    char *text;
    size_t bytes;
    *table = (struct table){.path = path};
    enum status status = file_read(path, &text, &bytes);
    return status == STATUS_OK ? parse_text(path, text, bytes, true, table) : STATUS_USAGE;
}

enum status table_read(const char *path, struct table *table)
{
    char *text;
    size_t bytes;
    bool locked;
    *table = (struct table){.path = path};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return status_set(STATUS_FAILED, "%s cannot be read: %s", path, strerror(errno));
    enum status status = lock_take(fd, path, LOCK_SH, &locked);
    if (status == STATUS_OK)
        status = file_read(path, &text, &bytes);
    close(fd);
    return status == STATUS_OK ? table_parse(path, text, bytes, table) : status;
}

void table_free(struct table *table)
{
    free(table->text);
    free(table->cells);
    free(table->lines);
    *table = (struct table){0};
}

size_t table_column(const struct table *table, const char *name)
{
    for (size_t i = 0; i < table->columns; i++)
        if (strcmp(table->cells[i], name) == 0)
            return i;
    return TABLE_NONE;
}

const char *table_cell(const struct table *table, size_t row, size_t column)
{
    return column == TABLE_NONE ? "" : table->cells[(row + 1) * table->columns + column];
}
