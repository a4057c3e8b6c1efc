#include "train/option_values.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"

#define COUNT_MAX 1024 /* more values in a file are malformed; programs have far fewer options */

void option_values_free(struct option_values *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->of[i].word);
    free(list->of);
    *list = (struct option_values){0};
}

/* Appends a value whose word, if any, is `length` bytes at `word`. */
static enum status append(struct option_values *list, const struct option_value *value, const char *word,
                          size_t length)
{
    struct option_value *of = realloc(list->of, (list->count + 1) * sizeof *of);
    char *copy = word ? strndup(word, length) : NULL;
    if (of)
        list->of = of;
    if (!of || (word && !copy)) {
        free(copy);
        return status_set(STATUS_EXHAUSTED, "out of memory for the options");
    }
    of[list->count] = *value;
    of[list->count++].word = copy;
    return STATUS_OK;
}

enum status option_values_add(struct option_values *list, const struct option_spec *spec, const void *values)
{
    const void *at = (const char *)values + spec->offset;
    struct option_value value = {.kind = OPTION_VALUE_WORD};
    char text[256];
    const char *word = NULL;
    snprintf(value.name, sizeof value.name, "%s", spec->name);
    switch (spec->kind) {
    case OPTION_FLAG:
        value.kind = OPTION_VALUE_FLAG;
        value.whole = *(const bool *)at;
        return append(list, &value, NULL, 0);
    case OPTION_COUNT:
    case OPTION_BYTES:
        value.kind = OPTION_VALUE_WHOLE;
        value.whole = *(const uint64_t *)at;
        return spec->fallback || value.whole ? append(list, &value, NULL, 0) : STATUS_OK;
    case OPTION_REAL:
        value.kind = OPTION_VALUE_REAL;
        value.real = *(const double *)at;
        return isnan(value.real) ? STATUS_OK : append(list, &value, NULL, 0);
    case OPTION_CHOICE:
        word = *(const int *)at >= 0 ? spec->choices[*(const int *)at] : NULL;
        break;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        word = *(const char *const *)at;
        if (word && spec->maximum > spec->minimum) { /* a list of numbers: equal lists get equal texts */
            options_text(spec, values, text, sizeof text);
            word = text;
        }
        break;
    }
    return word ? append(list, &value, word, strlen(word)) : STATUS_OK;
}

enum status option_values_add_hash(struct option_values *list, const char *name, uint64_t hash)
{
    struct option_value value = {.kind = OPTION_VALUE_HASH, .whole = hash};
    snprintf(value.name, sizeof value.name, "%s", name);
    return append(list, &value, NULL, 0);
}

enum status option_values_copy(const struct option_values *list, struct option_values *copy)
{
    *copy = (struct option_values){0};
    for (size_t i = 0; i < list->count; i++) {
        const char *word = list->of[i].word;
        TRY(append(copy, &list->of[i], word, word ? strlen(word) : 0));
    }
    return STATUS_OK;
}

const struct option_value *option_values_find(const struct option_values *list, const char *name)
{
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->of[i].name, name) == 0)
            return &list->of[i];
    return NULL;
}

/* Returns whether a number and a word have the same text. Numbers of older checkpoints may be words today. */
static bool same_text(const struct option_value *a, const struct option_value *b)
{
    char texts[2][64];
    option_value_text(a, texts[0], sizeof texts[0]);
    option_value_text(b, texts[1], sizeof texts[1]);
    return (a->kind == OPTION_VALUE_WORD || b->kind == OPTION_VALUE_WORD) && strcmp(texts[0], texts[1]) == 0;
}

bool option_value_same(const struct option_value *a, const struct option_value *b)
{
    if (!a || !b)
        return a == b;
    /* Whole numbers of older checkpoints may be real ones today. */
    if (a->kind == OPTION_VALUE_WHOLE && b->kind == OPTION_VALUE_REAL)
        return (double)a->whole == b->real;
    if (a->kind == OPTION_VALUE_REAL && b->kind == OPTION_VALUE_WHOLE)
        return option_value_same(b, a);
    if (a->kind != b->kind)
        return same_text(a, b);
    return a->kind == OPTION_VALUE_WORD   ? strcmp(a->word, b->word) == 0
           : a->kind == OPTION_VALUE_REAL ? a->real == b->real
                                          : a->whole == b->whole;
}

void option_value_text(const struct option_value *value, char *text, size_t size)
{
    static const struct option_spec real = {.kind = OPTION_REAL}; /* of a struct that is one double */
    if (value->kind == OPTION_VALUE_WORD)
        snprintf(text, size, "%s", value->word);
    else if (value->kind == OPTION_VALUE_REAL)
        options_text(&real, &value->real, text, size);
    else
        snprintf(text, size, value->kind == OPTION_VALUE_HASH ? "%016" PRIx64 : "%" PRIu64, value->whole);
}

char *option_values_text(const struct option_values *list)
{
    char *all = NULL, text[4096];
    size_t size;
    FILE *stream = open_memstream(&all, &size);
    for (size_t i = 0; stream && i < list->count; i++) {
        option_value_text(&list->of[i], text, sizeof text);
        fprintf(stream, "%s%s=%s", i ? " " : "", list->of[i].name, text);
    }
    if (stream && text_close(stream))
        return all;
    free(all);
    return NULL;
}

/* Returns the index of a word in a list that ends with NULL; -1 if it is not there. */
static int choice_of(const char *word, const char *const *choices)
{
    for (int i = 0; choices[i]; i++)
        if (strcmp(word, choices[i]) == 0)
            return i;
    return -1;
}

enum status option_value_store(const struct option_value *value, const struct option_spec *spec, void *values)
{
    void *at = (char *)values + spec->offset;
    const bool word = value->kind == OPTION_VALUE_WORD;
    const double number = value->kind == OPTION_VALUE_REAL ? value->real : (double)value->whole;
    const bool inside = number >= spec->minimum && number <= spec->maximum;
    switch (spec->kind) {
    case OPTION_FLAG:
        if (value->kind != OPTION_VALUE_FLAG)
            break;
        *(bool *)at = value->whole;
        return STATUS_OK;
    case OPTION_COUNT:
    case OPTION_BYTES:
        if (value->kind != OPTION_VALUE_WHOLE || !inside)
            break;
        *(uint64_t *)at = value->whole;
        return STATUS_OK;
    case OPTION_REAL:
        if (value->kind != OPTION_VALUE_REAL || !inside)
            break;
        *(double *)at = value->real;
        return STATUS_OK;
    case OPTION_CHOICE:
        if (!word || choice_of(value->word, spec->choices) < 0)
            break;
        *(int *)at = choice_of(value->word, spec->choices);
        return STATUS_OK;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        if (!word || !*value->word)
            break;
        *(const char **)at = value->word;
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "it has a value of --%s that this program does not accept", spec->name);
}

/* ---- Bytes ---- */

static void put(FILE *stream, uint64_t number, int bytes)
{
    for (int i = 0; i < bytes; i++)
        fputc((int)(number >> 8 * i & 255), stream);
}

enum status option_values_encode(const struct option_values *list, unsigned char **bytes, size_t *size)
{
    char *all = NULL;
    FILE *stream = open_memstream(&all, size);
    for (size_t i = 0; stream && i < list->count; i++) {
        const struct option_value *value = &list->of[i];
        uint64_t number = value->whole;
        put(stream, value->kind, 1);
        put(stream, strlen(value->name), 1);
        fputs(value->name, stream);
        if (value->kind == OPTION_VALUE_WORD) {
            put(stream, strlen(value->word), 4);
            fputs(value->word, stream);
            continue;
        }
        if (value->kind == OPTION_VALUE_REAL)
            memcpy(&number, &value->real, sizeof number);
        put(stream, number, 8);
    }
    const bool whole = stream && text_close(stream);
    *bytes = (unsigned char *)all;
    return ALLOCATED(whole, "out of memory for the options");
}

/* Bytes that remain to be decoded. */
struct input {
    const unsigned char *at;
    size_t left;
};

/* Takes `count` bytes. Returns NULL if there are fewer. */
static const unsigned char *take(struct input *input, size_t count)
{
    const unsigned char *at = input->at;
    if (input->left < count)
        return NULL;
    input->at += count;
    input->left -= count;
    return at;
}

/* Takes a number of `bytes` bytes. */
static bool take_number(struct input *input, size_t bytes, uint64_t *number)
{
    const unsigned char *at = take(input, bytes);
    *number = 0;
    for (size_t i = 0; at && i < bytes; i++)
        *number |= (uint64_t)at[i] << 8 * i;
    return at;
}

/* Takes a text of `length` bytes without a zero byte. */
static const char *take_text(struct input *input, uint64_t length)
{
    const char *text = (const char *)take(input, length);
    return text && !memchr(text, 0, length) ? text : NULL;
}

/* Takes a value. `*word` and `*length` become its word; `*word` is NULL if it has none. */
static bool take_value(struct input *input, struct option_value *value, const char **word, uint64_t *length)
{
    uint64_t kind, name_length;
    *word = NULL;
    *length = 0;
    if (!take_number(input, 1, &kind) || !take_number(input, 1, &name_length) || name_length == 0 ||
        name_length >= OPTION_VALUE_NAME_MAX)
        return false;
    const char *name = take_text(input, name_length);
    if (!name || kind < OPTION_VALUE_FLAG || kind > OPTION_VALUE_HASH)
        return false;
    memcpy(value->name, name, name_length);
    value->kind = (enum option_value_kind)kind;
    if (value->kind == OPTION_VALUE_WORD)
        return take_number(input, 4, length) && (*word = take_text(input, *length));
    if (!take_number(input, 8, &value->whole))
        return false;
    if (value->kind == OPTION_VALUE_REAL) {
        memcpy(&value->real, &value->whole, sizeof value->real);
        value->whole = 0;
    }
    return isfinite(value->real) && (value->kind != OPTION_VALUE_FLAG || value->whole <= 1);
}

enum status option_values_decode(const unsigned char *bytes, size_t size, struct option_values *list)
{
    struct input input = {bytes, size};
    *list = (struct option_values){0};
    while (input.left > 0) {
        struct option_value value = {.real = 0};
        const char *word;
        uint64_t length;
        if (list->count == COUNT_MAX || !take_value(&input, &value, &word, &length))
            return status_set(STATUS_FAILED, "its options are malformed");
        TRY(append(list, &value, word, length));
    }
    return STATUS_OK;
}
