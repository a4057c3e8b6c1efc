/* Reads the ranges of a preset from an INI file. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/text.h"
#include "synth/class_parts.h"

#ifdef HAVE_INIH
#include <ini.h>

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
    for (size_t i = 0; !path && i < CLASS_LIST_PRESETS; i++) /* suggest built-in lists, too */
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
