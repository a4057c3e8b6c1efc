#include "run/formats.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"

const char *const format_names[] = {"table", "csv", "json", NULL};

enum status format_check(int format)
{
#ifndef HAVE_JANSSON
    if (format == FORMAT_JSON)
        return status_option(STATUS_UNAVAILABLE, "format",
                             " json: not built, because jansson was not found; use --format csv");
#endif
    (void)format;
    return STATUS_OK;
}

enum status format_flush(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return STATUS_OK;
    return status_set(STATUS_FAILED, "stdout could not be written: %s", strerror(errno));
}

/* ---- JSON ---- */

#ifdef HAVE_JANSSON
/* Converts a text to JSON. A text that is not valid UTF-8, such as some file names, is escaped, because JSON
 * must be UTF-8. */
static json_t *json_text(const char *text)
{
    char printable[4096];
    json_t *string = json_string(text);
    return string ? string : json_string(text_printable(text, printable, sizeof printable));
}

/* Converts the value of column `index` to JSON. Numbers have the digits that CSV shows. A word in a column of
 * numbers may be a number too. */
static json_t *json_value(const struct row *row, size_t index)
{
    const struct value *value = &row->values[index];
    const enum value_type type = row->columns[index].type;
    char buffer[VALUE_TEXT_MAX], *end;
    const char *text = row_cell(row, index, buffer);
    if (value->type == VALUE_ABSENT)
        return json_null();
    if (value->type == VALUE_FLAG)
        return json_boolean(value->flag);
    if (type == VALUE_WORD || type == VALUE_HASH)
        return json_text(text);
    errno = 0;
    long long whole = strtoll(text, &end, 10);
    if (*end == '\0') /* integers that need more than 63 bits become strings, to stay exact */
        return errno == 0 ? json_integer(whole) : json_string(text);
    double real = strtod(text, &end);
    return *end == '\0' && isfinite(real) ? json_real(real) : json_string(text);
}

static enum status print_json(json_t *document)
{
    int printed = json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(document);
    putchar('\n');
    return printed == 0 ? STATUS_OK
                        : status_set(STATUS_FAILED, "the JSON document could not be written to stdout");
}

static json_t *json_row(const struct row *row)
{
    json_t *object = json_object();
    for (size_t i = 0; i < row->count; i++)
        json_object_set_new(object, row->columns[i].name, json_value(row, i));
    return object;
}
#endif

/* ---- Rows ---- */

enum status format_row(const struct row *row, int format)
{
    TRY(format_check(format));
#ifdef HAVE_JANSSON
    if (format == FORMAT_JSON)
        return print_json(json_row(row));
#endif
    csv_write_header(stdout, row);
    csv_write_row(stdout, row);
    return STATUS_OK;
}

void rows_begin(struct row_printer *printer, int format)
{
    *printer = (struct row_printer){.format = format};
#ifdef HAVE_JANSSON
    if (format == FORMAT_JSON)
        printer->json = json_array();
#endif
}

void rows_add(struct row_printer *printer, const struct row *row)
{
    if (printer->format == FORMAT_CSV) {
        if (printer->count == 0)
            csv_write_header(stdout, row);
        csv_write_row(stdout, row);
    }
#ifdef HAVE_JANSSON
    if (printer->format == FORMAT_JSON)
        json_array_append_new(printer->json, json_row(row));
#endif
    printer->count++;
}

enum status rows_end(struct row_printer *printer, const char *name, const struct row *about)
{
    enum status status = STATUS_OK;
#ifdef HAVE_JANSSON
    if (printer->format == FORMAT_JSON) {
        json_t *document = printer->json;
        if (about) {
            document = json_object();
            json_object_set_new(document, name, json_row(about));
            json_object_set_new(document, "rows", printer->json);
        }
        status = print_json(document);
    }
#else
    (void)name;
    (void)about;
#endif
    *printer = (struct row_printer){0};
    return status;
}

/* ---- Values ---- */

const char *format_time(double time_s, char *text, size_t size)
{
    static const struct {
        double scale;
        const char *unit;
    } units[] = {{1, "s"}, {1e3, "ms"}, {1e6, "us"}, {1e9, "ns"}};
    size_t i = 0;
    while (i + 1 < COUNT_OF(units) && time_s * units[i].scale < 1)
        i++;
    double value = time_s * units[i].scale;
    snprintf(text, size, "%.*f %s", value < 10 ? 3 : value < 100 ? 2 : 1, value, units[i].unit);
    return text;
}

/* ---- CSV files ---- */

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
