#include "core/record.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"

#define CELL_SHOWN  40 /* bytes of a cell shown in a message */
#define REAL_DIGITS 9  /* significant digits of a real whose column has no other number of digits */

/* ---- Rows ---- */

void row_open(struct row *row, const struct column *columns)
{
    *row = (struct row){.columns = columns};
    while (columns[row->count].name)
        row->count++;
    row->values = calloc(row->count, sizeof *row->values);
    row->failed = !row->values;
}

void row_free(struct row *row)
{
    for (size_t i = 0; row->own && i < row->count; i++)
        free((char *)row->own[i].name);
    free(row->own);
    free(row->values);
    free(row->words);
    *row = (struct row){0};
}

enum status row_check(const struct row *row)
{
    return row->failed ? status_set(STATUS_EXHAUSTED, "out of memory for a row of results") : STATUS_OK;
}

size_t row_find(const struct row *row, const char *column)
{
    size_t i = 0;
    while (i < row->count && strcmp(row->columns[i].name, column) != 0)
        i++;
    return i;
}

/* Appends a column to a row without a table. */
static void append(struct row *row, const char *name, enum value_type type)
{
    struct column *column =
        array_grow(&row->own, row->count, sizeof *row->own) ? &row->own[row->count] : NULL;
    row->failed |= !column || !array_grow(&row->values, row->count, sizeof *row->values);
    if (row->failed)
        return;
    *column = (struct column){
        .name = strdup(name), .type = type, .combine = COMBINE_FIRST, .unit = "", .about = ""};
    row->failed |= !column->name;
    row->values[row->count] = (struct value){VALUE_ABSENT};
    row->columns = row->own;
    row->count += !row->failed;
}

/* Stores a value in a column. */
static void put(struct row *row, const char *column, enum value_type type, struct value value)
{
    size_t at = row_find(row, column);
    if (row->failed)
        return;
    if (at == row->count && row->columns != row->own) {
        fprintf(stderr, "fdsl-bench: internal error: no column is named '%s'\n", column);
        abort();
    }
    if (at == row->count)
        append(row, column, type);
    if (row->failed)
        return;
    value.digits = (signed char)row->columns[at].digits;
    row->values[at] = value;
}

/* Copies a text into the row. Returns an absent value for an empty text. */
static struct value word(struct row *row, const char *text)
{
    struct value value = {VALUE_ABSENT};
    size_t bytes = text ? strlen(text) + 1 : 0;
    if (bytes < 2)
        return value;
    char *words = realloc(row->words, row->word_bytes + bytes);
    row->failed |= !words;
    if (!words)
        return value;
    memcpy(words + row->word_bytes, text, bytes);
    value = (struct value){.type = VALUE_WORD, .word = row->word_bytes};
    row->words = words;
    row->word_bytes += bytes;
    return value;
}

void row_text(struct row *row, const char *column, const char *text)
{
    put(row, column, VALUE_WORD, word(row, text));
}

void row_number(struct row *row, const char *column, const char *text)
{
    put(row, column, VALUE_REAL, word(row, text));
}

void row_count(struct row *row, const char *column, unsigned long long value)
{
    put(row, column, VALUE_INTEGER, (struct value){.type = VALUE_INTEGER, .integer = value});
}

void row_real(struct row *row, const char *column, double value)
{
    put(row, column, VALUE_REAL,
        (struct value){.type = isfinite(value) ? VALUE_REAL : VALUE_ABSENT, .real = value});
}

void row_positive(struct row *row, const char *column, double value)
{
    row_real(row, column, value > 0 ? value : NAN);
}

void row_flag(struct row *row, const char *column, bool value)
{
    put(row, column, VALUE_FLAG, (struct value){.type = VALUE_FLAG, .flag = value});
}

void row_hash(struct row *row, const char *column, uint64_t value)
{
    put(row, column, VALUE_HASH, (struct value){.type = VALUE_HASH, .integer = value});
}

void row_memory(struct row *row, double useful, double allocated)
{
    row_count(row, "peak_memory_bytes", (unsigned long long)allocated);
    row_real(row, "memory_efficiency", useful / allocated);
}

void row_copy(struct row *row, size_t index, const struct row *from)
{
    struct value value = from->values[index];
    if (value.type == VALUE_WORD)
        value = word(row, from->words + value.word);
    if (!row->failed)
        row->values[index] = value;
}

const struct value *row_value(const struct row *row, const char *column)
{
    size_t at = row_find(row, column);
    return at < row->count && row->values[at].type != VALUE_ABSENT ? &row->values[at] : NULL;
}

double row_get_real(const struct row *row, const char *column)
{
    const struct value *value = row_value(row, column);
    return !value                         ? NAN
           : value->type == VALUE_REAL    ? value->real
           : value->type == VALUE_INTEGER ? (double)value->integer
                                          : NAN;
}

const char *row_get_word(const struct row *row, const char *column)
{
    const struct value *value = row_value(row, column);
    return value && value->type == VALUE_WORD ? row->words + value->word : "";
}

const char *row_cell(const struct row *row, size_t index, char buffer[VALUE_TEXT_MAX])
{
    const struct value *value = &row->values[index];
    int digits = value->digits;
    switch ((enum value_type)value->type) {
    case VALUE_INTEGER:
        snprintf(buffer, VALUE_TEXT_MAX, "%" PRIu64, value->integer);
        return buffer;
    case VALUE_REAL:
        snprintf(buffer, VALUE_TEXT_MAX, digits < 0 ? "%.*f" : "%.*g", abs(digits ? digits : REAL_DIGITS),
                 value->real);
        return buffer;
    case VALUE_HASH:
        snprintf(buffer, VALUE_TEXT_MAX, "%016" PRIx64, value->integer);
        return buffer;
    case VALUE_FLAG:
        if (row->columns[index].type == VALUE_SWITCH)
            return value->flag ? "1" : "0";
        return value->flag ? "yes" : "no";
    case VALUE_WORD:
        return row->words + value->word;
    default:
        return "";
    }
}

/* ---- CSV lines ---- */

static void write_line(FILE *stream, const struct row *row, bool header)
{
    char buffer[VALUE_TEXT_MAX];
    for (size_t i = 0; i < row->count; i++) {
        const char *text = header ? row->columns[i].name : row_cell(row, i, buffer);
        if (i > 0)
            fputc(',', stream);
        if (row->count == 1 && !*text)
            fputs("\"\"", stream); /* readers ignore empty lines */
        else
            text_csv_field(stream, text);
    }
    fputc('\n', stream);
}

void csv_write_header(FILE *stream, const struct row *row)
{
    write_line(stream, row, true);
}

void csv_write_row(FILE *stream, const struct row *row)
{
    write_line(stream, row, false);
}

/* The header and the rows as CSV text. */
struct csv_lines {
    char *text; /* owned */
    size_t header_bytes, bytes;
};

static enum status csv_format(const struct row *rows, size_t count, struct csv_lines *lines)
{
    for (size_t i = 0; i < count; i++)
        TRY(row_check(&rows[i]));
    *lines = (struct csv_lines){0};
    FILE *stream = open_memstream(&lines->text, &lines->bytes);
    if (stream) {
        csv_write_header(stream, rows);
        long header_bytes = ftell(stream);
        for (size_t i = 0; i < count; i++)
            csv_write_row(stream, &rows[i]);
        bool bad = header_bytes < 0 || ferror(stream);
        if (fclose(stream) == 0 && !bad) {
            lines->header_bytes = (size_t)header_bytes;
            return STATUS_OK;
        }
        free(lines->text);
    }
    return status_set(STATUS_EXHAUSTED, "out of memory for a row of results");
}

/* ---- Examining a file ---- */

/* A record: one line, or several if quoted fields contain line ends. */
struct csv_record {
    size_t bytes, fields, line_ends;
    bool whole; /* ends with a line end outside quotes */
};

static struct csv_record record_at(const char *at, const char *end)
{
    struct csv_record record = {.fields = 1};
    bool quoted = false;
    for (const char *c = at; c < end && !record.whole; c++) {
        quoted ^= *c == '"'; /* a doubled quote toggles twice */
        record.fields += *c == ',' && !quoted;
        record.line_ends += *c == '\n';
        record.whole = *c == '\n' && !quoted;
        record.bytes++;
    }
    return record;
}

static size_t cell_bytes(const char *at, const char *end)
{
    size_t bytes = 0;
    while (at + bytes < end && !strchr(",\r\n", at[bytes]))
        bytes++;
    return bytes;
}

/* Sets the error message for a file whose first line, `theirs`, is not the expected header, `ours`. The
 * message names the first column that differs, or says that the file has more or fewer columns. */
static enum status refuse_columns(const char *path, const char *theirs, size_t theirs_bytes, const char *ours,
                                  size_t ours_bytes)
{
    const char *theirs_end = theirs + theirs_bytes, *ours_end = ours + ours_bytes;
    for (size_t column = 1;; column++) {
        size_t t = cell_bytes(theirs, theirs_end), o = cell_bytes(ours, ours_end);
        if (t != o || memcmp(theirs, ours, t) != 0)
            return status_set(STATUS_USAGE,
                              "%s has other columns (column %zu is '%.*s', not '%.*s'); name another file",
                              path, column, (int)(t < CELL_SHOWN ? t : CELL_SHOWN), theirs,
                              (int)(o < CELL_SHOWN ? o : CELL_SHOWN), ours);
        theirs += t;
        ours += o;
        if (theirs == theirs_end || ours == ours_end || *theirs != ',' || *ours != ',')
            return status_set(STATUS_USAGE, "%s has %s columns than these rows; name another file", path,
                              theirs < theirs_end && *theirs == ',' ? "more" : "fewer");
        theirs++;
        ours++;
    }
}

/* The part of a file that consists of complete rows. */
struct csv_extent {
    size_t whole_bytes;
    size_t torn_line; /* number of the incomplete line after these rows; 0: none */
};

/* Decides whether the last record of a file, which has no line end, can be cut off. Accepts only a record
 * that is certainly incomplete: a prefix of the expected header, or a single line with too few fields. */
static enum status judge_tail(const char *path, const struct csv_record *record, const char *at, size_t line,
                              const struct row *row, const struct csv_lines *lines, struct csv_extent *extent)
{
    extent->torn_line = line;
    if (extent->whole_bytes == 0) {
        if (record->bytes < lines->header_bytes && memcmp(at, lines->text, record->bytes) == 0)
            return STATUS_OK;
        return refuse_columns(path, at, record->bytes, lines->text, lines->header_bytes);
    }
    if (record->line_ends == 0 && record->fields < row->count)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "%s, line %zu: this last row has no line end and may be incomplete; complete or delete it", path,
        line);
}

static enum status csv_examine(const char *path, const char *text, size_t bytes, const struct row *row,
                               const struct csv_lines *lines, struct csv_extent *extent)
{
    *extent = (struct csv_extent){0};
    size_t line = 1;
    for (const char *at = text, *end = text + bytes; at < end;) {
        struct csv_record record = record_at(at, end);
        if (!record.whole)
            return judge_tail(path, &record, at, line, row, lines, extent);

        size_t content = record.bytes - 1; /* without the line end, "\n" or "\r\n" */
        content -= content > 0 && at[content - 1] == '\r';
        if (at == text) {
            if (content != lines->header_bytes - 1 || memcmp(at, lines->text, content) != 0)
                return refuse_columns(path, at, record.bytes, lines->text, lines->header_bytes);
        } else if (content > 0 && record.fields != row->count) {
            return status_set(STATUS_USAGE,
                              "%s, line %zu: %zu field%s, but the header has %zu; repair or delete this row",
                              path, line, record.fields, record.fields == 1 ? "" : "s", row->count);
        }
        line += record.line_ends;
        at += record.bytes;
        extent->whole_bytes += record.bytes;
    }
    return STATUS_OK;
}

/* Reads a whole file. The caller frees `*text`, even after a failure. */
static enum status read_all(int fd, const char *path, char **text, size_t *bytes)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return status_set(STATUS_FAILED, "%s: %s", path, strerror(errno));
    size_t capacity = (size_t)info.st_size;
    *text = malloc(capacity + 1);
    TRY(ALLOCATED(*text, "%s: out of memory for its %zu bytes", path, capacity));
    return file_read_at(fd, *text, capacity, 0, bytes)
               ? STATUS_OK
               : status_set(STATUS_FAILED, "%s cannot be read: %s", path, strerror(errno));
}

static enum status lock_and_examine(int fd, const char *path, int operation, const struct row *row,
                                    const struct csv_lines *lines, struct csv_extent *extent, bool *locked)
{
    FREED char *text = NULL;
    size_t bytes = 0;
    TRY(lock_take(fd, path, operation, locked));
    TRY(read_all(fd, path, &text, &bytes));
    return csv_examine(path, text, bytes, row, lines, extent);
}

/* ---- Checking ---- */

static enum status check_old_file(const char *path, const struct row *row)
{
    if (access(path, R_OK | W_OK) != 0)
        return status_set(STATUS_USAGE, "%s cannot be read and written (%s); name another file", path,
                          strerror(errno));
    struct csv_lines lines;
    TRY(csv_format(row, 1, &lines));
    enum status status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        status = status_set(STATUS_USAGE, "%s cannot be opened: %s", path, strerror(errno));
    } else {
        /* Take a shared lock: without it, a row that another process is writing could look incomplete. */
        struct csv_extent extent;
        bool locked;
        status = lock_and_examine(fd, path, LOCK_SH, row, &lines, &extent, &locked);
        lock_close(fd);
    }
    free(lines.text);
    return status;
}

/* Sets the error message for a folder, device or pipe. Devices and pipes are refused because their contents
 * cannot be read back and checked. */
static enum status refuse_irregular(const char *path, bool folder)
{
    return status_set(STATUS_USAGE, "%s is %s; name a regular file", path,
                      folder ? "a folder" : "a device or pipe");
}

enum status csv_check(const char *path, const struct row *row)
{
    struct stat info;
    TRY(row_check(row));
    if (stat(path, &info) == 0) {
        if (!S_ISREG(info.st_mode))
            return refuse_irregular(path, S_ISDIR(info.st_mode));
        return check_old_file(path, row);
    }
    if (errno == ENOENT)
        return file_check_new(path);
    return status_set(STATUS_USAGE, "%s cannot be used: %s", path, strerror(errno));
}

/* ---- Writing ---- */

/* Cuts off an incomplete last line. Fails without a lock, because another process may be writing that
 * line. */
static enum status cut_torn_line(int fd, const char *path, const struct csv_extent *extent, bool locked)
{
    if (!locked)
        return status_set(STATUS_FAILED, "%s, line %zu: this last row is incomplete; delete it", path,
                          extent->torn_line);
    if (ftruncate(fd, (off_t)extent->whole_bytes) != 0)
        return status_set(STATUS_FAILED,
                          "%s, line %zu: this last row is incomplete and cannot be cut off: %s", path,
                          extent->torn_line, strerror(errno));
    status_warn("%s, line %zu: cut off an incomplete line that a killed run had left", path,
                extent->torn_line);
    return STATUS_OK;
}

/* Restores the file after a failed write, and removes it if it was empty or new. Other processes that wait
 * for the lock detect the removal with is_gone(). */
static enum status take_back(int fd, const char *path, const struct csv_extent *extent, bool locked,
                             int cause)
{
    if (!locked || ftruncate(fd, (off_t)extent->whole_bytes) != 0)
        return status_set(
            STATUS_FAILED,
            "%s: a row could not be written (%s) and may be incomplete; delete the last line of the file",
            path, strerror(cause));
    struct stat info;
    if (extent->whole_bytes == 0 && lstat(path, &info) == 0 && S_ISREG(info.st_mode))
        (void)unlink(path);
    return status_set(STATUS_FAILED, "%s: a row could not be written (%s)%s", path, strerror(cause),
                      extent->whole_bytes ? "; the rows before it are complete" : "");
}

/* Returns whether the open file no longer has this name. */
static bool is_gone(int fd, const char *path)
{
    struct stat open_one, named;
    return fstat(fd, &open_one) == 0 &&
           (stat(path, &named) != 0 || open_one.st_ino != named.st_ino || open_one.st_dev != named.st_dev);
}

/* Appends to the open file. If another process removed the file before this process got the lock, does
 * nothing and sets `*gone`. */
static enum status append_lines(int fd, const char *path, const struct row *row,
                                const struct csv_lines *lines, bool *gone)
{
    static bool warned;
    struct csv_extent extent;
    bool locked;
    TRY(lock_and_examine(fd, path, LOCK_EX, row, lines, &extent, &locked));
    *gone = locked && is_gone(fd, path);
    if (*gone)
        return STATUS_OK;
    if (!locked && !warned) {
        warned = true;
        status_warn("%s: this file system has no locks; give each process its own file", path);
    }
    if (extent.torn_line)
        TRY(cut_torn_line(fd, path, &extent, locked));

    size_t skipped = extent.whole_bytes > 0 ? lines->header_bytes : 0;
    /* A full disk or an exceeded quota may be reported only by fsync(). */
    if (file_write_all(fd, lines->text + skipped, lines->bytes - skipped) && fsync(fd) == 0) {
        if (!skipped)
            file_sync_folder(path);
        return STATUS_OK;
    }
    return take_back(fd, path, &extent, locked, errno);
}

static enum status open_and_append(const char *path, const struct row *row, const struct csv_lines *lines,
                                   bool *gone)
{
    struct stat info;
    enum status status;
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    *gone = false;
    if (fd < 0)
        return status_set(STATUS_FAILED, "%s cannot be opened: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0)
        status = status_set(STATUS_FAILED, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        status = refuse_irregular(path, false);
    else
        status = append_lines(fd, path, row, lines, gone);
    lock_close(fd); /* fsync() has already reported any error */
    return status;
}

/* Appends to the file. Opens it again if another process removes it before this process gets the lock. */
static enum status append_at_last(const char *path, const struct row *row, const struct csv_lines *lines)
{
    bool gone = true;
    enum status status = STATUS_OK;
    while (status == STATUS_OK && gone)
        status = open_and_append(path, row, lines, &gone);
    return status;
}

enum status csv_append(const char *path, const struct row *rows, size_t count)
{
    struct csv_lines lines;
    TRY(csv_format(rows, count, &lines));
    enum status status = append_at_last(path, rows, &lines);
    free(lines.text);
    return status;
}

/* ---- Completing a file ---- */

enum status csv_text(const struct row *rows, size_t count, char **text)
{
    struct csv_lines lines;
    TRY(csv_format(rows, count, &lines));
    *text = lines.text;
    return STATUS_OK;
}

/* Returns whether `record` occurs in `bytes` at the beginning of a line. `record` ends with a line end. */
static bool holds(const char *bytes, size_t size, const char *record, size_t length)
{
    const char *at = bytes, *end = bytes + size;
    while ((at = memmem(at, (size_t)(end - at), record, length)) && at > bytes && at[-1] != '\n')
        at++;
    return at != NULL;
}

/* Copies to `missing` those records of `text` that the file does not contain, and counts them. */
static enum status find_missing(const char *path, const char *text, char *missing, size_t *count)
{
    FREED char *bytes = NULL;
    size_t size = 0;
    if (access(path, F_OK) == 0)
        TRY(file_read(path, &bytes, &size));
    for (const char *end = text + strlen(text); text < end;) {
        struct csv_record record = record_at(text, end);
        if (!bytes || !holds(bytes, size, text, record.bytes)) {
            missing = mempcpy(missing, text, record.bytes);
            ++*count;
        }
        text += record.bytes;
    }
    *missing = '\0';
    return STATUS_OK;
}

enum status csv_complete(const char *path, const struct row *like, const char *text, size_t *added)
{
    struct csv_lines lines;
    *added = 0;
    TRY(csv_format(like, 1, &lines));
    size_t header_bytes = lines.header_bytes;
    bool same = strncmp(lines.text, text, header_bytes) == 0;
    free(lines.text);
    if (!same)
        return status_set(STATUS_USAGE,
                          "the rows saved with the checkpoint have other columns than the rows of this "
                          "program");
    FREED char *copy = strdup(text);
    TRY(ALLOCATED(copy, "out of memory for the rows"));
    size_t missing = 0;
    TRY(find_missing(path, text + header_bytes, copy + header_bytes, &missing));
    lines.text = copy;
    lines.bytes = strlen(copy);
    if (missing > 0)
        TRY(append_at_last(path, like, &lines));
    *added = missing;
    return STATUS_OK;
}

/* ---- CSV files in memory ---- */

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
    lock_close(fd);
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
