#include "run/formats.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

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
    printer->failed |= row->failed;
    if (row->failed)
        return;
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
    const struct row worst = {.failed = printer->failed || (about && about->failed)};
    enum status printed = STATUS_OK;
#ifdef HAVE_JANSSON
    if (printer->format == FORMAT_JSON) {
        json_t *document = printer->json;
        if (about) {
            document = json_object();
            json_object_set_new(document, name, json_row(about));
            json_object_set_new(document, "rows", printer->json);
        }
        printed = print_json(document);
    }
#else
    (void)name;
#endif
    *printer = (struct row_printer){0};
    TRY(row_check(&worst));
    return printed;
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
