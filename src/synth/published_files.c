#include "synth/published_files.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/portable.h"

/* ---- Keys ---- */

/* A key of a file, and the member of struct published_class that it sets: a uint32_t or a double. */
struct key {
    const char *name;
    bool whole;
    size_t offset;
};

#define WHOLE(name, member)                                  \
    {                                                        \
        name, true, offsetof(struct published_class, member) \
    }
#define REAL(name, member)                                    \
    {                                                         \
        name, false, offsetof(struct published_class, member) \
    }

enum { KEYS_MAX = 11 };

/* The keys of each law, in the order of its files. */
static const struct key keys[][KEYS_MAX] = {
    [PUBLISHED_RCDB] = {WHOLE("Vertex", vertices), REAL("Perlin_noise", noise),
                        REAL("line_width", line_width), WHOLE("Center_rad", radius),
                        WHOLE("Line_num", orbits), REAL("Oval_rate_x", oval_x), REAL("Oval_rate_y", oval_y),
                        REAL("start_pos_h", start_h), REAL("start_pos_w", start_w)},
    [PUBLISHED_SEGRCDB] = {WHOLE("Category_num", number), WHOLE("Vertex", vertices),
                           REAL("Perlin_noise", noise), REAL("line_width", line_width),
                           WHOLE("Center_rad", radius), WHOLE("Line_num", orbits),
                           REAL("Oval_rate_x", oval_x), REAL("Oval_rate_y", oval_y),
                           WHOLE("Color_Gray", gray)},
    [PUBLISHED_VISUALATOM] = {WHOLE("Vertex", vertices), REAL("Perlin_noise", noise),
                              REAL("line_width", line_width), WHOLE("Center_rad", radius),
                              WHOLE("Line_num", orbits), REAL("Oval_rate_x", oval_x),
                              REAL("Oval_rate_y", oval_y), REAL("start_pos_h", start_h),
                              REAL("start_pos_w", start_w), WHOLE("nami1", wave1), WHOLE("nami2", wave2)},
};

static size_t key_count(enum published_law law)
{
    size_t count = 0;
    while (count < KEYS_MAX && keys[law][count].name)
        count++;
    return count;
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

/* Reads a number without blanks. Returns whether the whole text is one that the member can hold. */
static bool set_member(const struct key *key, const char *text, struct published_class *class_)
{
    char *end;
    void *member = (char *)class_ + key->offset;
    if (!strchr(key->whole ? "0123456789" : "0123456789.-", text[0]) || !text[0])
        return false;
    if (strspn(text, "0123456789.eE+-") != strlen(text))
        return false; /* strtod() would read hexadecimal numbers */
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        return false;
    if (!key->whole) {
        memcpy(member, &value, sizeof value);
        return true;
    }
    uint32_t whole = value <= UINT32_MAX ? (uint32_t)value : 0;
    memcpy(member, &whole, sizeof whole);
    return whole == value; /* Center_rad of SegRCDB may be written as 7.0 */
}

/* ---- Reading ---- */

static bool has_key(const char *text, const char *key)
{
    size_t length = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, length) == 0 && line[length] == ',')
            return true;
    }
    return false;
}

static enum published_law law_of_text(const char *text)
{
    return has_key(text, "Category_num") ? PUBLISHED_SEGRCDB
           : has_key(text, "nami1")      ? PUBLISHED_VISUALATOM
                                         : PUBLISHED_RCDB;
}

/* Reads a line without its end. Sets the bit of its key in `*seen`. */
static enum status read_line(char *line, enum published_law law, struct published_class *class_,
                             uint32_t *seen)
{
    char *comma = strchr(line, ',');
    if (!comma)
        return status_set(STATUS_USAGE, "'%.40s' is not a line key,value", line);
    *comma = '\0';
    for (size_t i = 0; i < key_count(law); i++) {
        if (strcmp(keys[law][i].name, line) != 0)
            continue;
        if (*seen >> i & 1)
            return status_set(STATUS_USAGE, "the key %s is repeated", line);
        *seen |= 1u << i;
        if (!set_member(&keys[law][i], comma + 1, class_))
            return status_set(STATUS_USAGE, "%s: '%.40s' is not %s", line, comma + 1,
                              keys[law][i].whole ? "a whole number" : "a number");
        return STATUS_OK;
    }
    return status_set(STATUS_USAGE, "unknown key '%.40s'", line);
}

enum status published_text_read(const char *name, char *text, enum published_law *law,
                                struct published_class *class_)
{
    uint32_t seen = 0, number = 1;
    *law = law_of_text(text);
    for (char *line = text, *next; line && *line; line = next, number++) {
        size_t length = strcspn(line, "\n");
        next = line[length] ? line + length + 1 : NULL;
        line[length] = '\0';
        if (length > 0 && line[length - 1] == '\r')
            line[length - 1] = '\0';
        if (*line && read_line(line, *law, class_, &seen) != STATUS_OK)
            return status_about(status_prefix(STATUS_USAGE, "%s, line %u", name, number), name);
    }
    for (size_t i = 0; i < key_count(*law); i++)
        if (!(seen >> i & 1))
            return status_about(status_set(STATUS_USAGE,
                                           "%s: the key %s of a published class file is missing", name,
                                           keys[*law][i].name),
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

static enum status read_file(const char *path, enum published_law *law, struct published_class *class_)
{
    const char *slash = strrchr(path, '/');
    FREED char *text = NULL;
    size_t size;
    uint32_t number;
    bool numbered = number_of_name(slash ? slash + 1 : path, &number);
    class_->number = numbered ? number : 0;
    TRY(file_read(path, &text, &size));
    if (strlen(text) != size)
        return status_about(status_set(STATUS_USAGE, "%s is not a text", path), path);
    TRY(published_text_read(path, text, law, class_));
    if (numbered && class_->number != number)
        return status_about(status_set(STATUS_USAGE,
                                       "%s: the name is that of class %u, but Category_num is %u", path,
                                       number, class_->number),
                            path);
    return STATUS_OK;
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

static void close_folder(DIR **folder)
{
    if (*folder)
        closedir(*folder);
}

static enum status list_folder(const char *path, struct listed **list, size_t *count)
{
    CLOSED_BY(close_folder) DIR *folder = opendir(path);
    size_t room = 0;
    if (!folder)
        return status_about(status_set(STATUS_USAGE, "%s: %s", path, strerror(errno)), path);
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct listed item;
        if (!number_of_name(entry->d_name, &item.number) || strlen(entry->d_name) >= sizeof item.name)
            continue;
        if (*count == room) {
            room = room ? 2 * room : 1024;
            struct listed *larger = realloc(*list, room * sizeof item);
            TRY(ALLOCATED(larger, "out of memory for the list of %s", path));
            *list = larger;
        }
        memcpy(item.name, entry->d_name, strlen(entry->d_name) + 1);
        (*list)[(*count)++] = item;
    }
    if (*count > 0)
        qsort(*list, *count, sizeof **list, compare_listed);
    return STATUS_OK;
}

static enum status read_listed(const char *path, const struct listed *list, size_t count,
                               enum published_law *law, struct published_class *classes)
{
    for (size_t i = 0; i < count; i++) {
        char name[PATH_MAX];
        enum published_law own;
        if (i > 0 && list[i].number == list[i - 1].number)
            return status_about(status_set(STATUS_USAGE, "%s: %s and %s are the same class", path,
                                           list[i - 1].name, list[i].name),
                                path);
        if (snprintf(name, sizeof name, "%s/%s", path, list[i].name) >= (int)sizeof name)
            return status_set(STATUS_USAGE, "%s: the path is too long", path);
        TRY(read_file(name, &own, &classes[i]));
        if (i > 0 && own != *law)
            return status_about(status_set(STATUS_USAGE,
                                           "%s: its keys are those of another formula than in %s", name,
                                           list[0].name),
                                name);
        *law = own;
    }
    return STATUS_OK;
}

enum status published_files_read(const char *path, enum published_law *law, struct published_class **classes,
                                 size_t *count)
{
    FREED struct listed *list = NULL;
    char inner[PATH_MAX];
    struct stat info;
    *classes = NULL;
    *count = 0;
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
    struct published_class *read = calloc(is_folder ? *count : 1, sizeof *read);
    TRY(ALLOCATED(read, "out of memory for the classes of %s", path));
    enum status status = is_folder ? read_listed(path, list, *count, law, read) : read_file(path, law, read);
    if (status != STATUS_OK) {
        free(read);
        return status;
    }
    *classes = read;
    *count = is_folder ? *count : 1;
    return STATUS_OK;
}

/* ---- Writing ---- */

/* Appends a line to `text`, which has room for it. */
static char *write_line(const struct key *key, const struct published_class *class_, char *text)
{
    const char *member = (const char *)class_ + key->offset;
    char number[PUBLISHED_REPR_BYTES];
    uint32_t whole;
    double value;
    if (key->whole) {
        memcpy(&whole, member, sizeof whole);
        snprintf(number, sizeof number, "%u", whole);
    } else {
        memcpy(&value, member, sizeof value);
        published_repr(value, number);
    }
    return text + sprintf(text, "%s,%s\r\n", key->name, number);
}

size_t published_text_write(enum published_law law, const struct published_class *class_,
                            char text[PUBLISHED_TEXT_BYTES])
{
    char *end = text;
    for (size_t k = 0; k < key_count(law); k++)
        end = write_line(&keys[law][k], class_, end);
    return (size_t)(end - text);
}

/* The files to write, and the first failure. */
struct writing {
    const char *folder;
    enum published_law law;
    const struct published_class *classes;
    _Atomic bool failed;
    struct failure failure;
};

static enum status write_file(const struct writing *writing, const struct published_class *class_)
{
    char path[PATH_MAX], text[PUBLISHED_TEXT_BYTES];
    if (snprintf(path, sizeof path, "%s/%05u.csv", writing->folder, class_->number) >= (int)sizeof path)
        return status_set(STATUS_USAGE, "%s: the path is too long", writing->folder);
    return file_write_atomic(path, text, published_text_write(writing->law, class_, text));
}

static void write_task(void *context, uint64_t task, int thread)
{
    struct writing *writing = context;
    (void)thread;
    if (writing->failed)
        return;
    enum status status = write_file(writing, &writing->classes[task]);
    if (status != STATUS_OK && !atomic_exchange(&writing->failed, true))
        writing->failure = status_save(status);
}

enum status published_files_write(const char *folder, enum published_law law,
                                  const struct published_class *classes, size_t count)
{
    enum { THREADS = 8 }; /* they wait for the disk */
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_about(status_set(status_of_errno(errno), "%s: %s", folder, strerror(errno)), folder);
    FREED struct writing *writing = calloc(1, sizeof *writing);
    TRY(ALLOCATED(writing, "out of memory for the classes in %s", folder));
    *writing = (struct writing){.folder = folder, .law = law, .classes = classes};
    parallel_for(THREADS, count, write_task, writing);
    return writing->failed ? status_restore(&writing->failure) : STATUS_OK;
}
