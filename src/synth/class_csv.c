/* Lists of classes as CSV. */
#include <errno.h>
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "synth/class_parts.h"

/* Splits `line` in place at commas and strips quotes. Returns the number of fields and stores the first
 * `limit` of them. */
static size_t split_fields(char *line, char *fields[], size_t limit)
{
    size_t count = 0;
    for (char *rest = line, *field; (field = strsep(&rest, ",")); count++) {
        size_t length = strlen(field);
        if (length >= 2 && field[0] == '"' && field[length - 1] == '"') {
            field[length - 1] = '\0';
            field++;
        }
        if (count < limit)
            fields[count] = field;
    }
    return count;
}

static enum status check_header(char *line)
{
    char *fields[CLASS_COLUMNS];
    size_t count = split_fields(line, fields, CLASS_COLUMNS);
    for (size_t i = 0; i < CLASS_COLUMNS && i < count; i++)
        if (strcmp(fields[i], class_columns[i].name) != 0)
            return status_set(STATUS_USAGE, "column %zu of the header is '%s': it must be '%s'", i + 1,
                              fields[i], class_columns[i].name);
    if (count < CLASS_COLUMNS)
        return status_set(STATUS_USAGE, "the header lacks column %zu, '%s'", count + 1,
                          class_columns[count].name);
    if (count > CLASS_COLUMNS)
        return status_set(STATUS_USAGE, "the header has %zu columns: '%s' must be the last", count,
                          class_columns[CLASS_COLUMNS - 1].name);
    return STATUS_OK;
}

static enum status read_class(char *line, struct atom_class *class_)
{
    char *fields[CLASS_COLUMNS];
    size_t count = split_fields(line, fields, CLASS_COLUMNS);
    if (count < CLASS_COLUMNS)
        return status_set(STATUS_USAGE, "%zu values, not %d: %s is missing", count, CLASS_COLUMNS,
                          class_columns[count].name);
    if (count > CLASS_COLUMNS)
        return status_set(STATUS_USAGE, "%zu values, not %d: nothing may follow %s", count, CLASS_COLUMNS,
                          class_columns[CLASS_COLUMNS - 1].name);
    for (size_t i = 0; i < CLASS_COLUMNS; i++)
        TRY(number_parse(&class_columns[i], fields[i], class_));
    return class_check(class_);
}

struct class_list {
    struct atom_class *classes;
    size_t count;
};

static enum status list_add(struct class_list *list, const struct atom_class *class_)
{
    TRY(ALLOCATED(array_grow(&list->classes, list->count, sizeof *list->classes),
                  "out of memory for %zu classes", list->count + 1));
    list->classes[list->count++] = *class_;
    return STATUS_OK;
}

/* Reads one line and strips "\n" or "\r\n". `*length` is -1 at the end of the file. */
static enum status read_line(FILE *stream, char **line, size_t *capacity, ssize_t *length)
{
    *length = getline(line, capacity, stream);
    if (*length < 0)
        return feof(stream) && !ferror(stream) ? STATUS_OK : status_set(STATUS_USAGE, "%s", strerror(errno));
    if (strlen(*line) != (size_t)*length)
        return status_set(STATUS_USAGE, "not a text file: it contains a zero byte");
    if (*length > 0 && (*line)[*length - 1] == '\n')
        (*line)[--*length] = '\0';
    if (*length > 0 && (*line)[*length - 1] == '\r')
        (*line)[--*length] = '\0';
    return STATUS_OK;
}

/* Reads the header and the classes. `*number` is the number of the latest line. The class with index n is on
 * line n + 2, because blank lines are allowed only at the end. */
static enum status read_list(FILE *stream, char **line, struct class_list *list, size_t *number)
{
    size_t capacity = 0, blank = 0;
    for (*number = 1;; ++*number) {
        ssize_t length;
        struct atom_class class_;
        TRY(read_line(stream, line, &capacity, &length));
        if (length < 0)
            break;
        if (length == 0 && *number > 1) {
            blank = blank ? blank : *number;
            continue;
        }
        if (blank)
            return status_set(STATUS_USAGE, "line %zu above is blank: remove it", blank);
        if (*number == 1) {
            TRY(check_header(*line));
            continue;
        }
        TRY(read_class(*line, &class_));
        TRY(list_add(list, &class_));
    }
    if (list->count == 0)
        return status_set(STATUS_USAGE, "%s", *number == 1 ? "the file is empty" : "the file has no classes");
    return STATUS_OK;
}

struct numbered_id {
    uint32_t id;
    size_t index;
};

static int compare_ids(const void *a, const void *b)
{
    const struct numbered_id *left = a, *right = b;
    if (left->id != right->id)
        return left->id < right->id ? -1 : 1;
    return (left->index > right->index) - (left->index < right->index);
}

/* Finds two classes with the same id and stores their indices in `pair`. Stores 0 twice if all ids are
 * unique. */
static enum status find_pair(const struct atom_class *classes, size_t count, size_t pair[2])
{
    FREED struct numbered_id *ids = malloc(count * sizeof *ids);
    TRY(ALLOCATED(ids, "out of memory for %zu classes", count));
    for (size_t i = 0; i < count; i++)
        ids[i] = (struct numbered_id){classes[i].id, i};
    qsort(ids, count, sizeof *ids, compare_ids);
    pair[0] = pair[1] = 0;
    for (size_t i = 1; i < count && pair[1] == 0; i++)
        if (ids[i].id == ids[i - 1].id) {
            pair[0] = ids[i - 1].index;
            pair[1] = ids[i].index;
        }
    return STATUS_OK;
}

enum status class_check_unique(const struct atom_class *classes, size_t count)
{
    size_t pair[2];
    TRY(find_pair(classes, count, pair));
    if (pair[1] == 0)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "classes %zu and %zu, counted from 0, have the same id, %u", pair[0],
                      pair[1], (unsigned)classes[pair[1]].id);
}

/* Checks that all ids are unique. Otherwise `*number` receives the line of a class whose id is already taken.
 * The class with index n is on line n + 2. */
static enum status check_unique(const struct class_list *list, size_t *number)
{
    size_t pair[2];
    TRY(find_pair(list->classes, list->count, pair));
    if (pair[1] == 0)
        return STATUS_OK;
    *number = pair[1] + 2;
    return status_set(STATUS_USAGE, "class %u is already on line %zu", (unsigned)list->classes[pair[1]].id,
                      pair[0] + 2);
}

/* Reads a list from `stream` and closes it. Messages contain `name`. */
static enum status read_csv(FILE *stream, const char *name, struct atom_class **classes, size_t *count)
{
    TRY(ALLOCATED(stream, "out of memory"));
    struct class_list list = {0};
    char *line = NULL;
    size_t number;
    enum status status = read_list(stream, &line, &list, &number);
    if (status == STATUS_OK)
        status = check_unique(&list, &number);
    free(line);
    fclose(stream);
    if (status != STATUS_OK) {
        free(list.classes);
        return status_prefix(status, "%s:%zu", name, number);
    }
    *classes = list.classes;
    *count = list.count;
    return STATUS_OK;
}

enum status class_open(const char *path, FILE **stream)
{
    struct stat info;
    *stream = fopen(path, "r");
    if (!*stream)
        return status_set(STATUS_USAGE, "cannot open '%s': %s", path, strerror(errno));
    char begin[FILE_POINTER_BYTES];
    enum status status = STATUS_OK;
    if (fstat(fileno(*stream), &info) != 0 || S_ISCHR(info.st_mode))
        status = status_set(STATUS_USAGE, "'%s' is a device; name a text file", path);
    else if (S_ISREG(info.st_mode) && pread(fileno(*stream), begin, sizeof begin, 0) == sizeof begin &&
             file_refuse_pointer(begin, sizeof begin) != STATUS_OK)
        status = status_prefix(STATUS_USAGE, "%s", path);
    if (status != STATUS_OK)
        fclose(*stream);
    return status;
}

enum status class_read_csv(const char *path, struct atom_class **classes, size_t *count)
{
    FILE *stream;
    TRY(class_open(path, &stream));
    return read_csv(stream, path, classes, count);
}

/* Files of configs/, embedded by classes_cfg.S */
extern const char paper_1000_csv[], lowercompute_1000_csv[];

const struct class_list_preset class_list_presets[CLASS_LIST_PRESETS] = {
    {"paper-1000", paper_1000_csv},
    {"lowercompute-1000", lowercompute_1000_csv},
};

static const struct class_list_preset *find_preset(const char *name)
{
    for (size_t i = 0; i < CLASS_LIST_PRESETS; i++)
        if (strcmp(class_list_presets[i].name, name) == 0)
            return &class_list_presets[i];
    return NULL;
}

bool class_preset_is_list(const char *preset)
{
    return find_preset(preset) != NULL;
}

enum status class_read_preset(const char *preset, struct atom_class **classes, size_t *count)
{
    const char *text = find_preset(preset)->csv;
    return read_csv(fmemopen((void *)text, strlen(text), "r"), preset, classes, count);
}

static void write_real(FILE *stream, float value)
{
    char text[32];
    for (int digits = 1; digits <= FLT_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if ((float)strtod(text, NULL) == value)
            break;
    }
    fputs(text, stream);
}

static void write_header(FILE *stream)
{
    for (size_t i = 0; i < CLASS_COLUMNS; i++)
        fprintf(stream, "%s%s", i ? "," : "", class_columns[i].name);
    fputc('\n', stream);
}

enum status class_check_csv(const char *path)
{
    char header[256] = "";
    FILE *stream = fmemopen(header, sizeof header, "w");
    TRY(ALLOCATED(stream, "%s: out of memory", path));
    write_header(stream);
    fclose(stream);
    return file_check_kind(path, &(struct file_kind){"list of classes", 0, header, strlen(header)});
}

static void write_list(FILE *stream, const struct atom_class *classes, size_t count)
{
    write_header(stream);
    for (size_t c = 0; c < count; c++) {
        for (size_t i = 0; i < CLASS_COLUMNS; i++) {
            double value = class_column_value(&class_columns[i], &classes[c]);
            if (i)
                fputc(',', stream);
            if (class_columns[i].kind == NUMBER_FLOAT)
                write_real(stream, (float)value);
            else
                fprintf(stream, "%.0f", value);
        }
        fputc('\n', stream);
    }
}

enum status class_write_csv(const char *path, const struct atom_class *classes, size_t count)
{
    FREED char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    TRY(ALLOCATED(stream, "%s: out of memory for %zu classes", path, count));
    write_list(stream, classes, count);
    TRY(ALLOCATED(text_close(stream), "%s: out of memory for %zu classes", path, count));
    return file_write_atomic(path, text, length);
}
