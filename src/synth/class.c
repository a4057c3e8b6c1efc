/* The table of formulas, and their classes: drawn from ranges, or read from a list. */
#include "synth/class.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_INIH
#include <ini.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/options.h"
#include "core/philox.h"
#include "core/text.h"
#include "synth/formula.h"
#include "synth/ifs_classes.h"

/* ---- Formulas ---- */

#define FORMULA(symbol, name, ...) extern const struct formula formula_##name;
#include "synth/formulas.def"
#undef FORMULA

const struct formula *const formulas[FORMULA_COUNT] = {
#define FORMULA(symbol, name, ...) [FORMULA_##symbol] = &formula_##name,
#include "synth/formulas.def"
#undef FORMULA
};

const char *const formula_names[FORMULA_COUNT + 1] = {
#define FORMULA(symbol, name, ...) [FORMULA_##symbol] = #name,
#include "synth/formulas.def"
#undef FORMULA
};

static size_t find_parameter(const struct formula *formula, const char *name)
{
    size_t i = 0;
    while (i < formula->parameter_count && strcmp(formula->parameters[i].name, name) != 0)
        i++;
    return i;
}

double formula_value(const struct formula *formula, const struct class_row *row, const char *name)
{
    size_t i = find_parameter(formula, name);
    return i < formula->parameter_count ? row->value[i] : 0;
}

bool formula_set(const struct formula *formula, struct class_row *row, const char *name, double value)
{
    size_t i = find_parameter(formula, name);
    if (i == formula->parameter_count)
        return false;
    row->value[i] = value;
    return true;
}

const struct formula_preset *formula_preset(const struct formula *formula, const char *name)
{
    for (const struct formula_preset *preset = formula->presets; preset && preset->name; preset++)
        if (strcmp(preset->name, name) == 0)
            return preset;
    return NULL;
}

const struct formula *formula_of_preset(const char *name)
{
    for (size_t i = 0; i < FORMULA_COUNT; i++)
        if (strcmp(formulas[i]->name, name) == 0 || formula_preset(formulas[i], name))
            return formulas[i];
    return NULL;
}

uint32_t formula_preset_classes(const struct formula_preset *preset)
{
    return !preset ? 0 : preset->set ? preset->set->classes : preset->classes;
}

/* ---- One class ---- */

/* Parses a value of a parameter, which must be within the limits. STATUS_USAGE contains `name`. */
static enum status parse_value(const struct formula_parameter *parameter, const char *name, const char *text,
                               double least, double *value)
{
    uint64_t count = 0;
    if (parameter->type != PARAMETER_INTEGER)
        return parse_real(name, text, least, parameter->most, value);
    TRY(parse_count(name, text, least, parameter->most, &count));
    *value = (double)count;
    return STATUS_OK;
}

/* Checks a class like class_check(), but the message does not contain the class's number. */
static enum status class_check_limits(const struct formula *formula, const struct class_row *row)
{
    for (size_t i = 0; i < formula->parameter_count; i++) {
        const struct formula_parameter *parameter = &formula->parameters[i];
        double value = row->value[i];
        if (!(value >= parameter->least && value <= parameter->most)) /* also rejects NaN */
            return status_set(STATUS_USAGE, "%s %.9g is not in %.9g .. %.9g", parameter->name, value,
                              parameter->least, parameter->most);
        if (parameter->type == PARAMETER_INTEGER && value != floor(value))
            return status_set(STATUS_USAGE, "%s %.9g is not an integer", parameter->name, value);
    }
    return formula->check(formula, row);
}

enum status class_check(const struct formula *formula, const struct class_row *row)
{
    if (row->id < formula->id_least || row->id > formula->id_most)
        return status_set(STATUS_USAGE, "class %u: the class numbers of formula %s are %u to %u",
                          (unsigned)row->id, formula->name, (unsigned)formula->id_least,
                          (unsigned)formula->id_most);
    return status_prefix(class_check_limits(formula, row), "class %u", (unsigned)row->id);
}

/* ---- Drawing a class from ranges ---- */

/* The random words of a class: Philox with key philox_key(seed) and counter (block, 0, CLASS_STREAM, id) for
 * block 0, 1, ..., four words per block. The key of an image is computed from the counter (instance, class
 * number, 0), in which the 64-bit instance fills two words. The third word of this counter is the class
 * number, which is below 2^20 for drawn classes. In the counters of classes, the third word is CLASS_STREAM.
 * Classes and images with the same seed therefore use different counters. Do not change this layout or the
 * order of draws in the formulas: golden hashes depend on both. */
#define CLASS_STREAM 0x434C4153u

struct class_words {
    struct philox_key key;
    uint32_t id, used;
    struct philox_block block;
};

static uint32_t next_word(struct class_words *words)
{
    uint32_t lane = words->used % 4;
    if (lane == 0)
        words->block = philox(words->key, words->used / 4, 0, CLASS_STREAM, words->id);
    words->used++;
    return words->block.word[lane];
}

/* Returns low + U (high - low) in float32, where U in [0, 1) is a multiple of 2^-24. Rounds both ends and
 * their difference to float, then rounds once more in fmaf. The result never exceeds the upper end: U is at
 * most 1 - 2^-24, and this margin is larger than the rounding error of the difference. */
static double draw_real(struct class_words *words, double low, double high)
{
    float begin = (float)low, span = (float)high - begin;
    return fmaf(philox_unit(next_word(words)), span, begin);
}

/* Returns an integer of the range: an exponential number of the given mean, rounded down, on condition that
 * it is in the range. Inverts the distribution, so one word is enough. */
static double draw_exponential(struct class_words *words, double mean, double low, double high)
{
    double below = exp(-low / mean), above = exp(-(high + 1) / mean);
    double value = floor(-mean * log(below - (double)philox_unit(next_word(words)) * (below - above)));
    return fmin(fmax(value, low), high);
}

/* Draws one value of a parameter from one random word. */
static double draw_value(struct class_words *words, const struct class_ranges *ranges, size_t i)
{
    const struct formula_parameter *parameter = &ranges->formula->parameters[i];
    double low = ranges->low[i], high = ranges->high[i];
    if (parameter->law == LAW_EXPONENTIAL)
        return draw_exponential(words, ranges->mean, low, high);
    if (parameter->type != PARAMETER_INTEGER)
        return draw_real(words, low, high);
    return low + philox_below(next_word(words), (uint32_t)(high - low) + 1);
}

/* Draws a parameter. Two equal frequencies give a single sine, which LAW_DIFFERENT avoids. */
static void draw_parameter(struct class_words *words, const struct class_ranges *ranges, size_t i,
                           struct class_row *row)
{
    const struct formula_parameter *parameter = &ranges->formula->parameters[i];
    row->value[i] = ranges->low[i];
    if (!parameter->low_key && !parameter->high_key)
        return; /* the same for all classes */
    do
        row->value[i] = draw_value(words, ranges, i);
    while (parameter->law == LAW_DIFFERENT && row->value[i] == row->value[i - 1] && row->value[i] != 0 &&
           ranges->low[i] != ranges->high[i]);
}

void class_draw(const struct class_ranges *ranges, uint32_t id, struct class_row *row)
{
    struct class_words words = {.key = philox_key(ranges->seed), .id = id};
    const size_t count = ranges->formula->parameter_count;
    *row = (struct class_row){.id = id};
    for (size_t turn = 0; turn < count; turn++)
        for (size_t i = 0; i < count; i++)
            if (ranges->formula->parameters[i].turn == turn)
                draw_parameter(&words, ranges, i, row);
}

/* ---- Lists of classes as CSV ---- */

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

/* Returns the name of column i: first the class number, then the parameters. */
static const char *column_name(const struct formula *formula, size_t i)
{
    return i == 0 ? "class" : formula->parameters[i - 1].name;
}

static enum status check_header(const struct formula *formula, char *line)
{
    char *fields[FORMULA_PARAMETERS_MAX + 1];
    const size_t columns = formula->parameter_count + 1;
    size_t count = split_fields(line, fields, columns);
    for (size_t i = 0; i < columns && i < count; i++)
        if (strcmp(fields[i], column_name(formula, i)) != 0)
            return status_set(STATUS_USAGE, "column %zu of the header is '%s': it must be '%s'", i + 1,
                              fields[i], column_name(formula, i));
    if (count < columns)
        return status_set(STATUS_USAGE, "the header lacks column %zu, '%s'", count + 1,
                          column_name(formula, count));
    if (count > columns)
        return status_set(STATUS_USAGE, "the header has %zu columns: '%s' must be the last", count,
                          column_name(formula, columns - 1));
    return STATUS_OK;
}

static enum status read_class(const struct formula *formula, char *line, struct class_row *row)
{
    char *fields[FORMULA_PARAMETERS_MAX + 1];
    const size_t columns = formula->parameter_count + 1;
    size_t count = split_fields(line, fields, columns);
    if (count < columns)
        return status_set(STATUS_USAGE, "%zu values, not %zu: %s is missing", count, columns,
                          column_name(formula, count));
    if (count > columns)
        return status_set(STATUS_USAGE, "%zu values, not %zu: nothing may follow %s", count, columns,
                          column_name(formula, columns - 1));
    uint64_t id;
    TRY(parse_count("class", fields[0], 0, UINT32_MAX, &id));
    *row = (struct class_row){.id = (uint32_t)id};
    for (size_t i = 0; i < formula->parameter_count; i++) {
        const struct formula_parameter *parameter = &formula->parameters[i];
        TRY(parse_value(parameter, parameter->name, fields[i + 1], parameter->least, &row->value[i]));
        if (parameter->type == PARAMETER_FLOAT)
            row->value[i] = (float)row->value[i];
    }
    return class_check(formula, row);
}

struct class_list {
    const struct formula *formula;
    struct class_row *rows;
    size_t count;
};

static enum status list_add(struct class_list *list, const struct class_row *row)
{
    TRY(ALLOCATED(array_grow(&list->rows, list->count, sizeof *list->rows), "out of memory for %zu classes",
                  list->count + 1));
    list->rows[list->count++] = *row;
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

/* Skips the byte order mark that some programs write at the beginning of a text file. */
static char *skip_mark(char *line)
{
    return line + (strncmp(line, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0);
}

/* Reads the header and the classes. `*number` is the number of the latest line. The class with index n is on
 * line n + 2, because blank lines are allowed only at the end. */
static enum status read_list(FILE *stream, char **line, struct class_list *list, size_t *number)
{
    size_t capacity = 0, blank = 0;
    for (*number = 1;; ++*number) {
        ssize_t length;
        struct class_row row;
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
            const enum status status = check_header(list->formula, skip_mark(*line));
            if (status != STATUS_OK)
                return status_append(status, " for the formula %s; %s names another one", list->formula->name,
                                     OPTION_OR_FIELD("--formula", "formula"));
            continue;
        }
        TRY(read_class(list->formula, *line, &row));
        TRY(list_add(list, &row));
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
static enum status find_pair(const struct class_row *rows, size_t count, size_t pair[2])
{
    FREED struct numbered_id *ids = malloc(count * sizeof *ids);
    TRY(ALLOCATED(ids, "out of memory for %zu classes", count));
    for (size_t i = 0; i < count; i++)
        ids[i] = (struct numbered_id){rows[i].id, i};
    qsort(ids, count, sizeof *ids, compare_ids);
    pair[0] = pair[1] = 0;
    for (size_t i = 1; i < count && pair[1] == 0; i++)
        if (ids[i].id == ids[i - 1].id) {
            pair[0] = ids[i - 1].index;
            pair[1] = ids[i].index;
        }
    return STATUS_OK;
}

enum status class_check_unique(const struct class_row *rows, size_t count)
{
    size_t pair[2];
    TRY(find_pair(rows, count, pair));
    if (pair[1] == 0)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "classes %zu and %zu, counted from 0, have the same id, %u", pair[0],
                      pair[1], (unsigned)rows[pair[1]].id);
}

/* Checks that all ids are unique. Otherwise `*number` receives the line of a class whose id is already taken.
 * The class with index n is on line n + 2. */
static enum status check_unique(const struct class_list *list, size_t *number)
{
    size_t pair[2];
    TRY(find_pair(list->rows, list->count, pair));
    if (pair[1] == 0)
        return STATUS_OK;
    *number = pair[1] + 2;
    return status_set(STATUS_USAGE, "class %u is already on line %zu", (unsigned)list->rows[pair[1]].id,
                      pair[0] + 2);
}

/* Reads a list from `stream` and closes it. Messages contain `name`. */
static enum status read_csv(FILE *stream, const char *name, const struct formula *formula,
                            struct class_row **rows, size_t *count)
{
    TRY(ALLOCATED(stream, "out of memory"));
    struct class_list list = {.formula = formula};
    char *line = NULL;
    size_t number;
    enum status status = read_list(stream, &line, &list, &number);
    if (status == STATUS_OK)
        status = check_unique(&list, &number);
    free(line);
    fclose(stream);
    if (status != STATUS_OK) {
        free(list.rows);
        return status_prefix(status, "%s:%zu", name, number);
    }
    *rows = list.rows;
    *count = list.count;
    return STATUS_OK;
}

/* Opens a text file, which the caller closes. Refuses character devices, because some, such as /dev/zero,
 * never end a line. */
static enum status class_open(const char *path, FILE **stream)
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

enum status class_read_csv(const char *path, const struct formula *formula, struct class_row **rows,
                           size_t *count)
{
    FILE *stream;
    TRY(class_open(path, &stream));
    return read_csv(stream, path, formula, rows, count);
}

const struct formula *class_formula_of(const char *path)
{
    const struct formula *found = NULL;
    FREED char *line = NULL;
    size_t capacity = 0;
    ssize_t length = 0;
    struct stat info;
    FILE *stream;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || class_open(path, &stream) != STATUS_OK)
        return NULL;
    const bool reads = read_line(stream, &line, &capacity, &length) == STATUS_OK && length >= 0;
    for (int f = 0; reads && !found && f < FORMULA_COUNT; f++) {
        FREED char *header = strdup(skip_mark(line)); /* check_header() changes it */
        if (header && check_header(formulas[f], header) == STATUS_OK)
            found = formulas[f];
    }
    fclose(stream);
    return found;
}

/* Returns whether the path is a folder, or a file that begins with a key of the formula's published files, or
 * with a number if the files of the formula have only numbers. */
static bool is_published(const char *path, const struct formula *formula)
{
    const char *keys = formula->published_keys;
    char begin[32] = "";
    struct stat info;
    const bool numbers = formula_is_system(formula);
    if (stat(path, &info) != 0 || S_ISDIR(info.st_mode) || !S_ISREG(info.st_mode) || !(keys || numbers))
        return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = fd < 0 ? 0 : read(fd, begin, sizeof begin - 1);
    if (fd >= 0)
        close(fd);
    begin[bytes > 0 ? bytes : 0] = '\0';
    if (numbers)
        return begin[0] && strchr("+-.0123456789", begin[0]);
    const size_t length = strcspn(begin, ",");
    for (const char *key = keys; begin[length] == ',' && key; key = strchr(key, ',')) {
        key += *key == ',';
        if (strncmp(key, begin, length) == 0 && key[length] == '=')
            return true;
    }
    return false;
}

enum status class_read(const char *path, const struct formula *formula, struct class_row **rows,
                       size_t *count)
{
    return (is_published(path, formula) ? published_files_read : class_read_csv)(path, formula, rows, count);
}

enum status class_read_text(const char *text, const char *name, const struct formula *formula,
                            struct class_row **rows, size_t *count)
{
    return read_csv(fmemopen((void *)text, strlen(text), "r"), name, formula, rows, count);
}

/* Writes the fewest digits that read back as the same number of the type. */
static void write_value(FILE *stream, const struct formula_parameter *parameter, double value)
{
    char text[64];
    for (int digits = parameter->type == PARAMETER_INTEGER ? DBL_DECIMAL_DIG : 1; digits <= DBL_DECIMAL_DIG;
         digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        double back = strtod(text, NULL);
        if ((parameter->type == PARAMETER_FLOAT ? (float)back : back) == value)
            break;
    }
    fputs(text, stream);
}

static void write_header(FILE *stream, const struct formula *formula)
{
    for (size_t i = 0; i <= formula->parameter_count; i++)
        fprintf(stream, "%s%s", i ? "," : "", column_name(formula, i));
    fputc('\n', stream);
}

enum status class_check_csv(const char *path, const struct formula *formula)
{
    char header[512] = "";
    FILE *stream = fmemopen(header, sizeof header, "w");
    TRY(ALLOCATED(stream, "%s: out of memory", path));
    write_header(stream, formula);
    fclose(stream);
    return file_check_kind(path, &(struct file_kind){"list of classes", 0, header, strlen(header)});
}

static void write_list(FILE *stream, const struct formula *formula, const struct class_row *rows,
                       size_t count)
{
    write_header(stream, formula);
    for (size_t c = 0; c < count; c++) {
        fprintf(stream, "%u", (unsigned)rows[c].id);
        for (size_t i = 0; i < formula->parameter_count; i++) {
            fputc(',', stream);
            write_value(stream, &formula->parameters[i], rows[c].value[i]);
        }
        fputc('\n', stream);
    }
}

enum status class_write_csv(const char *path, const struct formula *formula, const struct class_row *rows,
                            size_t count)
{
    FREED char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    TRY(ALLOCATED(stream, "%s: out of memory for %zu classes", path, count));
    write_list(stream, formula, rows, count);
    TRY(ALLOCATED(text_close(stream), "%s: out of memory for %zu classes", path, count));
    return file_write_atomic(path, text, length);
}

/* ---- Ranges of a preset, from an INI file ---- */

#ifdef HAVE_INIH
extern const char classes_cfg[]; /* the text of configs/classes.cfg, embedded by classes_cfg.S */

enum { KEYS_MAX = 2 * FORMULA_PARAMETERS_MAX + 2, SECTIONS_MAX = 64, SECTION_LENGTH_MAX = 64 };

/* The keys of a section: those of the formula's parameters, each once, then the mean and the seed. */
struct ini_keys {
    const char *names[KEYS_MAX];
    size_t count;
};

static void add_key(struct ini_keys *keys, const char *name)
{
    for (size_t i = 0; i < keys->count; i++)
        if (!name || strcmp(keys->names[i], name) == 0)
            return;
    if (name)
        keys->names[keys->count++] = name;
}

static void list_keys(const struct formula *formula, struct ini_keys *keys)
{
    for (size_t i = 0; i < formula->parameter_count; i++) {
        add_key(keys, formula->parameters[i].low_key);
        add_key(keys, formula->parameters[i].high_key);
    }
    add_key(keys, formula->mean_key);
    add_key(keys, "seed");
}

/* The state of reading an INI file. */
struct ini_reading {
    FILE *stream;
    const char *preset;
    int line; /* latest line read; after an error, the faulty line */
    enum status status;
    char sections[SECTIONS_MAX][SECTION_LENGTH_MAX]; /* names of built-in lists and of sections read so far */
    size_t section_count;
    struct ini_keys keys;
    bool found, seen[KEYS_MAX];
    struct class_ranges ranges;
};

/* Reads one line; inih calls this function instead of fgets(). Counts lines, because inih does not pass line
 * numbers to handlers. Returns NULL after the first error, so that inih stops. */
static char *read_ini_line(char *text, int size, void *context)
{
    struct ini_reading *reading = context;
    if (reading->status != STATUS_OK || !fgets(text, size, reading->stream))
        return NULL;
    reading->line++;
    if (strchr(text, '\n') || feof(reading->stream))
        return text;
    reading->status =
        status_set(STATUS_USAGE, "the line is not text, or has more than %d characters", size - 2);
    return NULL;
}

static bool same_key(const char *key, const char *name)
{
    return key && strcmp(key, name) == 0;
}

/* Stores the value of a key of the section in every range that it describes. */
static enum status read_value(struct ini_reading *reading, const char *name, const char *text)
{
    struct class_ranges *ranges = &reading->ranges;
    const struct formula *formula = ranges->formula;
    const bool search = formula_is_system(formula), solid = formula->family == FAMILY_IFS3D;
    if (strcmp(name, "seed") == 0)
        return parse_count(name, text, 0, search ? UINT32_MAX : 0x1p64, &ranges->seed);
    if (same_key(formula->mean_key, name))
        return solid    ? parse_real(name, text, IFS3D_THRESHOLD_MIN, IFS3D_THRESHOLD_MAX, &ranges->mean)
               : search ? parse_real(name, text, IFS_THRESHOLD_MIN, IFS_THRESHOLD_MAX, &ranges->mean)
                        : parse_real(name, text, 1, 1e6, &ranges->mean);
    for (size_t i = 0; i < formula->parameter_count; i++) {
        const struct formula_parameter *parameter = &formula->parameters[i];
        double least = fmax(parameter->least, parameter->low);
        if (same_key(parameter->low_key, name))
            TRY(parse_value(parameter, name, text, least, &ranges->low[i]));
        if (same_key(parameter->high_key, name))
            TRY(parse_value(parameter, name, text, least, &ranges->high[i]));
    }
    return STATUS_OK;
}

static enum status read_key(struct ini_reading *reading, const char *name, const char *value)
{
    const struct ini_keys *keys = &reading->keys;
    for (size_t i = 0; i < keys->count; i++) {
        if (strcmp(name, keys->names[i]) != 0)
            continue;
        if (reading->seen[i])
            return status_set(STATUS_USAGE, "key '%s' is given twice: remove one", name);
        reading->seen[i] = true;
        return read_value(reading, name, value);
    }
    const char *nearest = nearest_word(name, keys->names, keys->count);
    return status_set(STATUS_USAGE, "unknown key '%s'%s%s%s", name, nearest ? ": did you mean '" : "",
                      nearest ? nearest : "", nearest ? "'?" : "");
}

/* Adds a name to those that an unknown preset is compared with. */
static void add_section(struct ini_reading *reading, const char *name)
{
    for (size_t i = 0; i < reading->section_count; i++)
        if (strcmp(reading->sections[i], name) == 0)
            return;
    if (reading->section_count < SECTIONS_MAX)
        snprintf(reading->sections[reading->section_count++], SECTION_LENGTH_MAX, "%s", name);
}

/* The handler that inih calls for each key; returns nonzero on success. Records the name of each section
 * with keys, but reads only the keys of the preset's section. */
static int handle_key(void *context, const char *section, const char *name, const char *value)
{
    struct ini_reading *reading = context;
    add_section(reading, section);
    if (!*section)
        reading->status = status_set(STATUS_USAGE, "key '%s' appears before any [section]", name);
    else if (strcmp(section, reading->preset) == 0) {
        reading->found = true;
        reading->status = read_key(reading, name, value);
    }
    return reading->status == STATUS_OK;
}

static enum status unknown_section(const struct ini_reading *reading)
{
    const char *names[SECTIONS_MAX];
    char list[1024] = " none";
    size_t length = 0;
    for (size_t i = 0; i < reading->section_count; i++) {
        names[i] = reading->sections[i];
        if (length < sizeof list)
            length += (size_t)snprintf(list + length, sizeof list - length, " [%s]", names[i]);
    }
    const char *nearest = nearest_word(reading->preset, names, reading->section_count);
    if (nearest)
        return status_set(STATUS_USAGE, "no section [%s]: did you mean [%s]?", reading->preset, nearest);
    return status_set(STATUS_USAGE, "no section [%s]; there are:%s", reading->preset, list);
}

/* Completes the range of parameter i, and checks that it is not empty. */
static enum status complete_range(struct ini_reading *reading, size_t i)
{
    const struct formula_parameter *parameter = &reading->ranges.formula->parameters[i];
    double *low = &reading->ranges.low[i], *high = &reading->ranges.high[i];
    if (!parameter->low_key)
        *low = parameter->low;
    if (!parameter->high_key)
        *high = *low + parameter->span;
    if (*low <= *high)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s %.9g exceeds %s %.9g", parameter->low_key, *low, parameter->high_key,
                      *high);
}

/* Checks that the section is complete and consistent, and computes the ends that have no key. */
static enum status complete_ranges(struct ini_reading *reading)
{
    struct class_ranges *ranges = &reading->ranges;
    const struct formula *formula = ranges->formula;
    struct class_row largest = {.id = formula->id_least};
    for (size_t i = 0; i < reading->keys.count; i++)
        if (!reading->seen[i])
            return status_set(STATUS_USAGE, "key '%s' is missing", reading->keys.names[i]);
    if (formula_is_system(formula))
        return STATUS_OK; /* classes are found by a search, not drawn from ranges */
    for (size_t i = 0; i < formula->parameter_count; i++)
        TRY(complete_range(reading, i));
    for (size_t i = 0; i < formula->parameter_count; i++)
        largest.value[i] =
            formula->parameters[i].type == PARAMETER_FLOAT ? (float)ranges->high[i] : ranges->high[i];
    return status_prefix(class_check_limits(formula, &largest), "the largest class");
}

static enum status read_ranges(struct ini_reading *reading, const char *source)
{
    int faulty = ini_parse_stream(read_ini_line, reading, handle_key, reading);
    if (ferror(reading->stream))
        return status_set(STATUS_USAGE, "cannot read '%s': %s", source, strerror(errno));
    if (faulty < 0)
        return status_set(STATUS_EXHAUSTED, "%s: out of memory", source);
    /* inih continues after a line that it cannot parse. The handler's error may therefore be on a later
     * line. */
    if (faulty > 0 && (reading->status == STATUS_OK || faulty < reading->line))
        return status_set(STATUS_USAGE, "%s:%d: neither a [section] nor key = value", source, faulty);
    TRY(status_prefix(reading->status, "%s:%d", source, reading->line));
    if (!reading->found)
        return status_prefix(unknown_section(reading), "%s", source);
    return status_prefix(complete_ranges(reading), "%s: section [%s]", source, reading->preset);
}

enum status class_ranges_read(const char *path, const char *preset, const struct formula *formula,
                              struct class_ranges *ranges)
{
    const char *source = path ? path : "the built-in classes.cfg";
    struct ini_reading reading = {.preset = preset, .ranges.formula = formula};
    list_keys(formula, &reading.keys);
    for (size_t i = 0; !path && i < FORMULA_COUNT; i++) /* suggest lists and published sets, too */
        for (const struct formula_preset *listed = formulas[i]->presets; listed && listed->name; listed++)
            add_section(&reading, listed->name);
    if (path)
        TRY(class_open(path, &reading.stream));
    else if (!(reading.stream = fmemopen((void *)classes_cfg, strlen(classes_cfg), "r")))
        return status_set(STATUS_EXHAUSTED, "out of memory");
    enum status status = read_ranges(&reading, source);
    fclose(reading.stream);
    if (status == STATUS_OK)
        *ranges = reading.ranges;
    return status;
}

#else

enum status class_ranges_read(const char *path, const char *preset, const struct formula *formula,
                              struct class_ranges *ranges)
{
    (void)path, (void)preset, (void)formula, (void)ranges;
    return status_set(STATUS_UNAVAILABLE, "this build cannot read class ranges: install inih (libinih-dev) "
                                          "and build again, or give the classes as a CSV list");
}

#endif
