#include "synth/class.h"

#include <errno.h>
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

/* A named number in a struct: a column of the CSV list, or a key of the INI file. */
struct number {
    const char *name;
    enum { NUMBER_U32, NUMBER_U64, NUMBER_FLOAT, NUMBER_DOUBLE } kind;
    size_t offset;
    double minimum, maximum;
};

/* Parses `text` into the field of `values` that `number` describes. STATUS_USAGE names the number. */
static enum status number_parse(const struct number *number, const char *text, void *values)
{
    void *value = (char *)values + number->offset;
    bool whole = number->kind == NUMBER_U32 || number->kind == NUMBER_U64;
    uint64_t count = 0;
    double real = 0;
    TRY(whole ? parse_count(number->name, text, number->minimum, number->maximum, &count)
              : parse_real(number->name, text, number->minimum, number->maximum, &real));
    switch (number->kind) {
    case NUMBER_U32:
        *(uint32_t *)value = (uint32_t)count;
        break;
    case NUMBER_U64:
        *(uint64_t *)value = count;
        break;
    case NUMBER_FLOAT:
        *(float *)value = (float)real;
        break;
    case NUMBER_DOUBLE:
        *(double *)value = real;
        break;
    }
    return STATUS_OK;
}

/* ---- One class ---- */

/* The parameters of a class with their limits, in the column order of a CSV list. */
enum { CLASS_COLUMNS = 10 };
static const struct number class_columns[CLASS_COLUMNS] = {
    {"class", NUMBER_U32, offsetof(struct atom_class, id), 0, UINT32_MAX},
    {"vertices", NUMBER_U32, offsetof(struct atom_class, vertices), 1, CLASS_VERTICES_MAX},
    {"orbits", NUMBER_U32, offsetof(struct atom_class, orbits), 1, CLASS_ORBITS_MAX},
    {"oval_x", NUMBER_FLOAT, offsetof(struct atom_class, oval_x), 0, CLASS_REACH_MAX},
    {"oval_y", NUMBER_FLOAT, offsetof(struct atom_class, oval_y), 0, CLASS_REACH_MAX},
    {"freq1", NUMBER_U32, offsetof(struct atom_class, freq1), 0, CLASS_FREQ_MAX},
    {"freq2", NUMBER_U32, offsetof(struct atom_class, freq2), 0, CLASS_FREQ_MAX},
    {"noise", NUMBER_FLOAT, offsetof(struct atom_class, noise), -CLASS_REACH_MAX, CLASS_REACH_MAX},
    {"radius", NUMBER_U32, offsetof(struct atom_class, radius), 0, CLASS_REACH_MAX},
    {"line_width", NUMBER_FLOAT, offsetof(struct atom_class, line_width), -CLASS_REACH_MAX, CLASS_REACH_MAX},
};

static double class_column_value(const struct number *column, const struct atom_class *class_)
{
    const void *value = (const char *)class_ + column->offset;
    return column->kind == NUMBER_U32 ? *(const uint32_t *)value : (double)*(const float *)value;
}

static double start_reach(const struct atom_class *class_)
{
    return class_->radius * fmax(class_->oval_x, class_->oval_y);
}

/* Each orbit changes each coordinate of a vertex by at most |p| (1 + |noise|) + |line width| + 1. The last 1
 * bounds the wave. */
double class_reach(const struct atom_class *class_)
{
    double step =
        fabs((double)class_->noise) * (1 + (double)NOISE_LIMIT) + 1 + fabs((double)class_->line_width);
    return start_reach(class_) + class_->orbits * step;
}

/* Checks a class like class_check(), but the message does not contain the class's number. */
static enum status class_check_limits(const struct atom_class *class_)
{
    for (size_t i = 0; i < CLASS_COLUMNS; i++) {
        double value = class_column_value(&class_columns[i], class_);
        if (!(value >= class_columns[i].minimum && value <= class_columns[i].maximum)) /* also rejects NaN */
            return status_set(STATUS_USAGE, "%s %.9g is not in %.9g .. %.9g", class_columns[i].name, value,
                              class_columns[i].minimum, class_columns[i].maximum);
    }
    double reach = class_reach(class_);
    if (reach > CLASS_REACH_MAX)
        return status_set(
            STATUS_USAGE, "vertices can get %.9g pixels away from the centre; the limit is %.9g: lower %s",
            reach, CLASS_REACH_MAX,
            start_reach(class_) > reach / 2 ? "radius, oval_x or oval_y" : "orbits, noise or line_width");
    return STATUS_OK;
}

enum status class_check(const struct atom_class *class_)
{
    enum status status = class_check_limits(class_);
    return status == STATUS_OK ? status : status_prefix(status, "class %u", (unsigned)class_->id);
}

/* ---- Drawing a class from ranges ---- */

/* The random words of a class: Philox with key philox_key(seed) and counter (block, 0, CLASS_STREAM, id) for
 * block 0, 1, ..., four words per block. The key of an image is computed from the counter (instance, class
 * number, 0), in which the 64-bit instance fills two words. The third word of this counter is the class
 * number, which is below 2^20 for drawn classes. In the counters of classes, the third word is CLASS_STREAM.
 * Classes and images with the same seed therefore use different counters. Do not change this layout or the
 * order of draws in class_draw(): golden hashes depend on both. */
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

static uint32_t draw_count(struct class_words *words, uint32_t minimum, uint32_t maximum)
{
    return minimum + philox_below(next_word(words), maximum - minimum + 1);
}

/* Returns min + U (max - min) in float32, where U in [0, 1) is a multiple of 2^-24. Rounds both ends and
 * their difference to float, then rounds once more in fmaf. The result never exceeds the upper end: U is at
 * most 1 - 2^-24, and this margin is larger than the rounding error of the difference. */
static float draw_real(struct class_words *words, double minimum, double maximum)
{
    float low = (float)minimum, span = (float)maximum - low;
    return fmaf(philox_unit(next_word(words)), span, low);
}

/* Draws each member from one random word, in the order of the assignments below. Draws freq2 again, from one
 * more word, while freq2 equals freq1, because two equal frequencies give a single sine. Equal frequencies
 * are kept if both are 0, which means no wave, or if the range has only one frequency. */
void class_draw(const struct class_ranges *ranges, uint32_t id, struct atom_class *class_)
{
    struct class_words words = {.key = philox_key(ranges->seed), .id = id};
    class_->id = id;
    class_->vertices = draw_count(&words, ranges->vertices_min, ranges->vertices_max);
    class_->orbits = draw_count(&words, ranges->orbits_min, ranges->orbits_max);
    class_->oval_x = draw_real(&words, 1, ranges->oval_max);
    class_->oval_y = draw_real(&words, 1, ranges->oval_max);
    class_->noise = draw_real(&words, ranges->noise_min, ranges->noise_max);
    class_->radius = draw_count(&words, ranges->radius_min, ranges->radius_max);
    class_->line_width = draw_real(&words, 0, ranges->line_width_max);
    class_->freq1 = draw_count(&words, ranges->freq_min, ranges->freq_max);
    do
        class_->freq2 = draw_count(&words, ranges->freq_min, ranges->freq_max);
    while (class_->freq2 == class_->freq1 && class_->freq1 != 0 && ranges->freq_min != ranges->freq_max);
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

enum status class_read_csv(const char *path, struct atom_class **classes, size_t *count)
{
    FILE *stream;
    TRY(class_open(path, &stream));
    return read_csv(stream, path, classes, count);
}

/* Files of configs/, embedded by classes_cfg.S */
extern const char paper_1000_csv[], lowercompute_1000_csv[];

/* A built-in preset that is a list of classes; `csv` is its text. */
static const struct class_list_preset {
    const char *name, *csv;
} class_list_presets[] = {
    {"paper-1000", paper_1000_csv},
    {"lowercompute-1000", lowercompute_1000_csv},
};

static const struct class_list_preset *find_preset(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(class_list_presets); i++)
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

/* ---- Ranges of a preset, from an INI file ---- */

#ifdef HAVE_INIH
#define NOISE_SPAN  4  /* maximum minus minimum of the noise coefficient */
#define RADIUS_SPAN 50 /* maximum minus minimum of the start radius */

extern const char classes_cfg[]; /* the text of configs/classes.cfg, embedded by classes_cfg.S */

static const struct number keys[] = {
    {"nvertex_min", NUMBER_U32, offsetof(struct class_ranges, vertices_min), 1, CLASS_VERTICES_MAX},
    {"nvertex_max", NUMBER_U32, offsetof(struct class_ranges, vertices_max), 1, CLASS_VERTICES_MAX},
    {"norbits_min", NUMBER_U32, offsetof(struct class_ranges, orbits_min), 1, CLASS_ORBITS_MAX},
    {"norbits_max", NUMBER_U32, offsetof(struct class_ranges, orbits_max), 1, CLASS_ORBITS_MAX},
    {"oval_max", NUMBER_DOUBLE, offsetof(struct class_ranges, oval_max), 1, CLASS_REACH_MAX},
    {"freq_min", NUMBER_U32, offsetof(struct class_ranges, freq_min), 0, CLASS_FREQ_MAX},
    {"freq_max", NUMBER_U32, offsetof(struct class_ranges, freq_max), 0, CLASS_FREQ_MAX},
    {"noisecoef_min", NUMBER_DOUBLE, offsetof(struct class_ranges, noise_min), 0, CLASS_REACH_MAX},
    {"startrad_min", NUMBER_U32, offsetof(struct class_ranges, radius_min), 0, CLASS_REACH_MAX},
    {"linewidth_max", NUMBER_DOUBLE, offsetof(struct class_ranges, line_width_max), 0, CLASS_REACH_MAX},
    {"seed", NUMBER_U64, offsetof(struct class_ranges, seed), 0, 0x1p64},
};
enum { KEY_COUNT = COUNT_OF(keys), SECTIONS_MAX = 64, SECTION_LENGTH_MAX = 64 };

/* The state of reading an INI file. */
struct ini_reading {
    FILE *stream;
    const char *preset;
    int line; /* latest line read; after an error, the faulty line */
    enum status status;
    char sections[SECTIONS_MAX][SECTION_LENGTH_MAX]; /* names of built-in lists and of sections read so far */
    size_t section_count;
    bool found, seen[KEY_COUNT];
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

static enum status read_key(struct ini_reading *reading, const char *name, const char *value)
{
    const char *names[KEY_COUNT];
    for (size_t i = 0; i < KEY_COUNT; i++) {
        names[i] = keys[i].name;
        if (strcmp(name, names[i]) != 0)
            continue;
        if (reading->seen[i])
            return status_set(STATUS_USAGE, "key '%s' is given twice: remove one", name);
        reading->seen[i] = true;
        return number_parse(&keys[i], value, &reading->ranges);
    }
    const char *nearest = nearest_word(name, names, KEY_COUNT);
    return status_set(STATUS_USAGE, "unknown key '%s'%s%s%s", name, nearest ? ": did you mean '" : "",
                      nearest ? nearest : "", nearest ? "'?" : "");
}

/* The handler that inih calls for each key; returns nonzero on success. Records the name of each section
 * with keys, but reads only the keys of the preset's section. */
static int handle_key(void *context, const char *section, const char *name, const char *value)
{
    struct ini_reading *reading = context;
    size_t last = reading->section_count;
    if (last < SECTIONS_MAX && (last == 0 || strcmp(reading->sections[last - 1], section) != 0))
        snprintf(reading->sections[reading->section_count++], SECTION_LENGTH_MAX, "%s", section);
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

static enum status check_order(const char *lower, double minimum, const char *upper, double maximum)
{
    if (minimum <= maximum)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "%s %.9g exceeds %s %.9g", lower, minimum, upper, maximum);
}

/* Checks that the section is complete and consistent, and computes the maxima that have no key. */
static enum status complete_ranges(struct ini_reading *reading)
{
    struct class_ranges *ranges = &reading->ranges;
    for (size_t i = 0; i < KEY_COUNT; i++)
        if (!reading->seen[i])
            return status_set(STATUS_USAGE, "key '%s' is missing", keys[i].name);
    TRY(check_order("nvertex_min", ranges->vertices_min, "nvertex_max", ranges->vertices_max));
    TRY(check_order("norbits_min", ranges->orbits_min, "norbits_max", ranges->orbits_max));
    TRY(check_order("freq_min", ranges->freq_min, "freq_max", ranges->freq_max));
    ranges->noise_max = ranges->noise_min + NOISE_SPAN;
    ranges->radius_max = ranges->radius_min + RADIUS_SPAN;
    struct atom_class largest = {.vertices = ranges->vertices_max,
                                 .orbits = ranges->orbits_max,
                                 .oval_x = (float)ranges->oval_max,
                                 .oval_y = (float)ranges->oval_max,
                                 .noise = (float)ranges->noise_max,
                                 .radius = ranges->radius_max,
                                 .line_width = (float)ranges->line_width_max};
    enum status status = class_check_limits(&largest);
    return status == STATUS_OK ? status : status_prefix(status, "the largest class");
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
    if (reading->status != STATUS_OK)
        return status_prefix(reading->status, "%s:%d", source, reading->line);
    if (!reading->found)
        return status_prefix(unknown_section(reading), "%s", source);
    enum status status = complete_ranges(reading);
    return status == STATUS_OK ? status : status_prefix(status, "%s: section [%s]", source, reading->preset);
}

enum status class_ranges_read(const char *path, const char *preset, struct class_ranges *ranges)
{
    const char *source = path ? path : "the built-in classes.cfg";
    struct ini_reading reading = {.preset = preset};
    for (size_t i = 0; !path && i < COUNT_OF(class_list_presets); i++) /* suggest built-in lists, too */
        strcpy(reading.sections[reading.section_count++], class_list_presets[i].name);
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

enum status class_ranges_read(const char *path, const char *preset, struct class_ranges *ranges)
{
    (void)path, (void)preset, (void)ranges;
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot read class ranges: install inih (libinih-dev) and "
                      "build again, or give the classes as a CSV list");
}

#endif
