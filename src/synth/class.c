#include "synth/class.h"

#include <math.h>

#include "core/options.h"
#include "core/philox.h"
#include "synth/class_parts.h"

enum status number_parse(const struct number *number, const char *text, void *values)
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

const struct number class_columns[CLASS_COLUMNS] = {
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

double class_column_value(const struct number *column, const struct atom_class *class_)
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

enum status class_check_limits(const struct atom_class *class_)
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
