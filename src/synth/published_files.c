
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/parallel.h"
#include "core/text.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"

/* ---- Keys ---- */

enum { KEYS_MAX = FORMULA_PARAMETERS_MAX + 2, NAME_BYTES = 32 };

/* A key of a file, and the value of a class that it sets. */
struct key {
    char name[NAME_BYTES], column[NAME_BYTES];
    bool whole;
    bool drawn; /* false: the formula does not draw with it */
    int index;  /* into the values of the row; -1: the number of the class */
};

struct keys {
    struct key key[KEYS_MAX];
    size_t count;
};

/* Sets the members of a key that follow from its column. `*extra` counts the columns that the formula lacks.
 */
static void place_key(const struct formula *formula, struct key *key, size_t *extra)
{
    key->drawn = true;
    key->whole = strcmp(key->column, "class") == 0;
    key->index = -1;
    for (size_t i = 0; i < formula->parameter_count; i++)
        if (strcmp(formula->parameters[i].name, key->column) == 0) {
            key->index = (int)i;
            key->whole = formula->parameters[i].type == PARAMETER_INTEGER;
        }
    if (key->index < 0 && !key->whole) {
        key->drawn = false;
        key->index = (int)(formula->parameter_count + (*extra)++);
    }
}

/* Parses formula->published_keys: "key=column,key=column". */
static void list_keys(const struct formula *formula, struct keys *keys)
{
    size_t extra = 0;
    keys->count = 0;
    for (const char *text = formula->published_keys; text && *text && keys->count < KEYS_MAX;) {
        struct key *key = &keys->key[keys->count++];
        int length = 0;
        sscanf(text, "%31[^=]=%31[^,]%n", key->name, key->column, &length);
        place_key(formula, key, &extra);
        text += length;
        text += *text == ',';
    }
}

bool published_set_column(const struct formula *formula, struct class_row *row, const char *column,
                          double value)
{
    struct keys keys;
    list_keys(formula, &keys);
    for (size_t i = 0; i < keys.count; i++)
        if (strcmp(keys.key[i].column, column) == 0 && keys.key[i].index >= 0) {
            row->value[keys.key[i].index] = value;
            return true;
        }
    return false;
}

static bool has_files(const struct formula *formula)
{
    return formula->published_keys || formula_is_system(formula);
}

static enum status check_formula(const struct formula *formula)
{
    char names[128] = "";
    if (has_files(formula))
        return STATUS_OK;
    for (size_t i = 0; i < FORMULA_COUNT; i++)
        if (has_files(formulas[i]))
            text_join(names, sizeof names, ", ", "%s", formulas[i]->name);
    return status_set(STATUS_USAGE,
                      "the formula %s has no published class files; choose one that has, with %s: %s",
                      formula->name, OPTION_OR_FIELD("--formula", "formula"), names);
}

/* ---- Numbers ---- */

/* Moves the digits of "d.ddde-XX" into place: Python uses an exponent only below 1e-4 and from 1e16 on. */
static void place_digits(const char *scientific, int precision, double value, char *text)
{
    int exponent = atoi(strchr(scientific, 'e') + 1);
    if (exponent < -4 || exponent >= 16)
        snprintf(text, PUBLISHED_REPR_BYTES, "%s", scientific);
    else
        snprintf(text, PUBLISHED_REPR_BYTES, "%.*f", precision > exponent + 1 ? precision - exponent : 1,
                 value);
}

const char *published_repr(double value, char text[PUBLISHED_REPR_BYTES])
{
    char scientific[PUBLISHED_REPR_BYTES];
    int precision = -1; /* digits after the first one */
    do
        snprintf(scientific, sizeof scientific, "%.*e", ++precision, value);
    while (precision < 16 && strtod(scientific, NULL) != value);
    place_digits(scientific, precision, value, text);
    return text;
}

/* Reads a number without blanks. Returns whether the whole text is one that the key can have. */
static bool set_value(const struct key *key, const char *text, struct class_row *row)
{
    char *end;
    if (!text[0] || strspn(text, "0123456789.eE+-") != strlen(text))
        return false; /* strtod() would read hexadecimal numbers */
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        return false;
    if (key->whole && !(value >= 0 && value <= UINT32_MAX && value == floor(value)))
        return false; /* SegRCDB's script reads Center_rad as a float, so it may be 7.0 */
    if (key->index < 0)
        row->id = (uint32_t)value;
    else
        row->value[key->index] = value + 0.0; /* no negative zero, which would be written as -0.0 */
    return true;
}

void published_image_name(const struct published_set *set, const struct class_row *row, uint64_t instance,
                          char name[PUBLISHED_NAME_BYTES])
{
    const unsigned number = (unsigned)(instance % set->instances);
    if (set->law == PUBLISHED_RCDB)
        snprintf(name, PUBLISHED_NAME_BYTES, "%05u_%04u", (unsigned)row->id, number);
    else if (set->law == PUBLISHED_VISUALATOM)
        snprintf(name, PUBLISHED_NAME_BYTES, "vertex_%04u_instance_%04u", (unsigned)row->value[0], number);
    else
        snprintf(name, PUBLISHED_NAME_BYTES, "%06u", number);
}

/* ---- Reading ---- */

/* Reads a line without its end. Sets the bit of its key in `*seen`. */
static enum status read_line(char *line, const struct keys *keys, struct class_row *row, uint32_t *seen)
{
    char *comma = strchr(line, ',');
    if (!comma)
        return status_set(STATUS_USAGE, "'%.40s' is not a line key,value", line);
    *comma = '\0';
    for (size_t i = 0; i < keys->count; i++) {
        const struct key *key = &keys->key[i];
        uint32_t id = row->id;
        if (strcmp(key->name, line) != 0)
            continue;
        if (*seen >> i & 1)
            return status_set(STATUS_USAGE, "the key %s is repeated", line);
        *seen |= 1u << i;
        if (!set_value(key, comma + 1, row))
            return status_set(STATUS_USAGE, "%s: '%.40s' is not %s", line, comma + 1,
                              key->whole ? "a whole number" : "a number");
        if (key->index < 0 && id != row->id && id != UINT32_MAX)
            return status_set(STATUS_USAGE, "%s is %u, but this is class %u", line, (unsigned)row->id,
                              (unsigned)id);
        return STATUS_OK;
    }
    return status_set(STATUS_USAGE, "unknown key '%.40s'", line);
}

static enum status read_lines(const char *name, char *text, const struct keys *keys, struct class_row *row,
                              uint32_t *seen)
{
    uint32_t number = 1;
    for (char *line = text, *next; line && *line; line = next, number++) {
        size_t length = strcspn(line, "\n");
        next = line[length] ? line + length + 1 : NULL;
        line[length] = '\0';
        if (length > 0 && line[length - 1] == '\r')
            line[length - 1] = '\0';
        if (*line && read_line(line, keys, row, seen) != STATUS_OK)
            return status_about(status_prefix(STATUS_USAGE, "%s, line %u", name, number), name);
    }
    return STATUS_OK;
}

enum status published_text_read(const char *name, char *text, const struct formula *formula, uint32_t id,
                                struct class_row *row)
{
    struct keys keys;
    uint32_t seen = 0;
    TRY(check_formula(formula));
    *row = (struct class_row){.id = id};
    if (formula_is_system(formula))
        return ifs_text_read(name, text, ifs_values_of(formula), row);
    list_keys(formula, &keys);
    TRY(read_lines(name, text, &keys, row, &seen));
    for (size_t i = 0; i < keys.count; i++)
        if (keys.key[i].drawn && !(seen >> i & 1))
            return status_about(status_set(STATUS_USAGE, "%s: the key %s of a class file of %s is missing",
                                           name, keys.key[i].name, formula->name),
                                name);
    return STATUS_OK;
}

/* Stores the number in a name of digits and ".csv". Returns false for other names. */
static bool number_of_name(const char *name, uint32_t *number)
{
    size_t digits = strspn(name, "0123456789");
    if (digits == 0 || digits > 9 || strcmp(name + digits, ".csv") != 0)
        return false;
    *number = (uint32_t)strtoul(name, NULL, 10);
    return true;
}

static enum status read_file(const char *path, const struct formula *formula, struct class_row *row)
{
    const char *slash = strrchr(path, '/');
    FREED char *text = NULL;
    size_t size;
    uint32_t number;
    if (!number_of_name(slash ? slash + 1 : path, &number))
        number = formula->id_least == 0 ? 0 : UINT32_MAX; /* UINT32_MAX: the file has it */
    TRY(file_read(path, &text, &size));
    if (strlen(text) != size)
        return status_about(status_set(STATUS_USAGE, "%s is not a text", path), path);
    TRY(published_text_read(path, text, formula, number, row));
    return status_about(status_prefix(class_check(formula, row), "%s", path), path);
}

/* Lists the numbers and the names of class files in a folder. */
struct listed {
    uint32_t number;
    char name[16];
};

static int compare_listed(const void *a, const void *b)
{
    const struct listed *first = a, *second = b;
    return (first->number > second->number) - (first->number < second->number);
}

static enum status list_folder(const char *path, struct listed **list, size_t *count)
{
    CLOSED_BY(folder_close) DIR *folder = opendir(path);
    if (!folder)
        return status_about(status_set(STATUS_USAGE, "%s: %s", path, strerror(errno)), path);
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct listed item;
        if (!number_of_name(entry->d_name, &item.number) || strlen(entry->d_name) >= sizeof item.name)
            continue;
        TRY(ALLOCATED(array_grow(list, *count, sizeof item), "out of memory for the list of %s", path));
        memcpy(item.name, entry->d_name, strlen(entry->d_name) + 1);
        (*list)[(*count)++] = item;
    }
    if (*count > 0)
        qsort(*list, *count, sizeof **list, compare_listed);
    return STATUS_OK;
}

static enum status read_listed(const char *path, const struct listed *list, size_t count,
                               const struct formula *formula, struct class_row *rows)
{
    for (size_t i = 0; i < count; i++) {
        char name[PATH_MAX];
        if (i > 0 && list[i].number == list[i - 1].number)
            return status_about(status_set(STATUS_USAGE, "%s: %s and %s are the same class", path,
                                           list[i - 1].name, list[i].name),
                                path);
        if (snprintf(name, sizeof name, "%s/%s", path, list[i].name) >= (int)sizeof name)
            return status_set(STATUS_USAGE, "%s: the path is too long", path);
        TRY(read_file(name, formula, &rows[i]));
    }
    return STATUS_OK;
}

enum status published_files_read(const char *path, const struct formula *formula, struct class_row **rows,
                                 size_t *count)
{
    FREED struct listed *list = NULL;
    char inner[PATH_MAX];
    struct stat info;
    *rows = NULL;
    *count = 0;
    TRY(check_formula(formula));
    bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (is_folder)
        TRY(list_folder(path, &list, count));
    if (is_folder && *count == 0 && snprintf(inner, sizeof inner, "%s/param", path) < (int)sizeof inner &&
        stat(inner, &info) == 0 && S_ISDIR(info.st_mode)) {
        path = inner;
        TRY(list_folder(path, &list, count));
    }
    if (is_folder && *count == 0)
        return status_about(
            status_set(STATUS_USAGE, "%s: contains no class files, which have names such as 00042.csv", path),
            path);
    struct class_row *read = calloc(is_folder ? *count : 1, sizeof *read);
    TRY(ALLOCATED(read, "out of memory for the classes of %s", path));
    enum status status =
        is_folder ? read_listed(path, list, *count, formula, read) : read_file(path, formula, read);
    if (status != STATUS_OK) {
        free(read);
        return status;
    }
    *rows = read;
    *count = is_folder ? *count : 1;
    return STATUS_OK;
}

/* ---- Writing ---- */

static double value_of(const struct key *key, const struct class_row *row)
{
    return key->index < 0 ? row->id : row->value[key->index];
}

size_t published_text_write(const struct formula *formula, const struct class_row *row,
                            char text[PUBLISHED_TEXT_BYTES])
{
    struct keys keys;
    size_t length = 0;
    bool extra = false;
    if (formula_is_system(formula))
        return ifs_text_write(row, ifs_values_of(formula), text, PUBLISHED_TEXT_BYTES);
    list_keys(formula, &keys);
    for (size_t i = 0; i < keys.count; i++)
        extra |= !keys.key[i].drawn && value_of(&keys.key[i], row) != 0;
    text[0] = '\0';
    for (size_t i = 0; i < keys.count; i++) {
        const struct key *key = &keys.key[i];
        char number[PUBLISHED_REPR_BYTES];
        if (!key->drawn && !extra)
            continue;
        if (key->whole)
            snprintf(number, sizeof number, "%.0f", value_of(key, row));
        else
            published_repr(value_of(key, row), number);
        length +=
            (size_t)snprintf(text + length, PUBLISHED_TEXT_BYTES - length, "%s,%s\r\n", key->name, number);
    }
    return length;
}

enum status published_files_check(const char *folder, const struct formula *formula)
{
    struct stat info;
    TRY(check_formula(formula));
    if (stat(folder, &info) != 0)
        return file_check_new_folder(folder);
    if (S_ISDIR(info.st_mode) && access(folder, W_OK | X_OK) == 0)
        return STATUS_OK;
    return status_about(status_set(STATUS_USAGE, "%s %s; name a folder for the class files", folder,
                                   S_ISDIR(info.st_mode) ? "cannot be written" : "is not a folder"),
                        folder);
}

/* Returns the number of digits to which the numbers in file names are padded. */
static int published_digits(const struct formula *formula)
{
    return formula->family == FAMILY_IFS3D ? 6 : 5;
}

/* The files to write, and the first failure. */
struct writing {
    const char *folder;
    const struct formula *formula;
    const struct class_row *rows;
    _Atomic bool failed;
    struct failure failure;
};

static enum status write_file(const struct writing *writing, const struct class_row *row)
{
    char path[PATH_MAX], text[PUBLISHED_TEXT_BYTES];
    if (snprintf(path, sizeof path, "%s/%0*u.csv", writing->folder, published_digits(writing->formula),
                 (unsigned)row->id) >= (int)sizeof path)
        return status_set(STATUS_USAGE, "%s: the path is too long", writing->folder);
    return file_write_atomic(path, text, published_text_write(writing->formula, row, text));
}

static void write_task(void *context, uint64_t task, int thread)
{
    struct writing *writing = context;
    (void)thread;
    if (writing->failed)
        return;
    enum status status = write_file(writing, &writing->rows[task]);
    if (status != STATUS_OK && !atomic_exchange(&writing->failed, true))
        writing->failure = status_save(status);
}

enum status published_files_write(const char *folder, const struct formula *formula,
                                  const struct class_row *rows, size_t count)
{
    enum { THREADS = 8 }; /* they wait for the disk */
    TRY(check_formula(formula));
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_about(status_set(status_of_errno(errno), "%s: %s", folder, strerror(errno)), folder);
    FREED struct writing *writing = calloc(1, sizeof *writing);
    TRY(ALLOCATED(writing, "out of memory for the classes in %s", folder));
    *writing = (struct writing){.folder = folder, .formula = formula, .rows = rows};
    parallel_for(THREADS, count, write_task, writing);
    return writing->failed ? status_restore(&writing->failure) : STATUS_OK;
}
