#include "core/text.h"

#include <ctype.h>
#include <stdarg.h>
#include <string.h>
#include <strings.h>

#include "core/status.h"

/* The constant of the program; src/lib/fdsl.c overrides it (core/status.h). It is not in status.c, because
 * the compiler would use its value there. */
__attribute__((weak)) const bool status_in_library = false;

#define ESCAPED_MAX 16 /* maximum number of bytes per character after escaping: four times \xNN */

void text_append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

void text_join(char *text, size_t size, const char *separator, const char *format, ...)
{
    if (*text)
        text_append(text, size, "%s", separator);
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

int text_compare(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

bool text_close(FILE *stream)
{
    bool whole = !ferror(stream);
    return fclose(stream) == 0 && whole;
}

bool text_ends_in(const char *text, const char *end)
{
    size_t length = strlen(text), end_length = strlen(end);
    return length > end_length && strcmp(text + length - end_length, end) == 0;
}

/* Decodes the first UTF-8 character of `text` into `*code`. Returns its number of bytes, or 0 if it is
 * invalid. Overlong forms, surrogates and code points above U+10FFFF are invalid. Does not read past the end
 * of the string. */
static size_t decode(const unsigned char *text, uint32_t *code)
{
    static const struct {
        unsigned char mask, lead;
        uint32_t least;
    } forms[] = {{0x80, 0x00, 0}, {0xE0, 0xC0, 0x80}, {0xF0, 0xE0, 0x800}, {0xF8, 0xF0, 0x10000}};
    for (size_t more = 0; more < COUNT_OF(forms); more++) {
        if ((text[0] & forms[more].mask) != forms[more].lead)
            continue;
        *code = text[0] & (unsigned char)~forms[more].mask;
        for (size_t i = 1; i <= more; i++) {
            if ((text[i] & 0xC0) != 0x80) /* includes the end of the string */
                return 0;
            *code = *code << 6 | (text[i] & 0x3Fu);
        }
        bool surrogate = *code >= 0xD800 && *code <= 0xDFFF;
        return *code >= forms[more].least && *code <= 0x10FFFF && !surrogate ? more + 1 : 0;
    }
    return 0;
}

/* Returns the next character of a non-empty text and advances `*text`. A byte that is not UTF-8 becomes a
 * surrogate, U+DC00 plus the byte. */
static uint32_t next_code(const unsigned char **text)
{
    uint32_t code;
    size_t length = decode(*text, &code);
    if (length == 0)
        code = 0xDC00u + **text;
    *text += length ? length : 1;
    return code;
}

int text_order(const char *a, const char *b)
{
    const unsigned char *left = (const unsigned char *)a, *right = (const unsigned char *)b;
    size_t same = 0;
    while (left[same] && left[same] == right[same])
        same++;
    if ((left[same] | right[same]) < 0x80) /* no character extends over the first difference */
        return (left[same] > right[same]) - (left[same] < right[same]);
    while (*left && *right) {
        uint32_t one = next_code(&left), other = next_code(&right);
        if (one != other)
            return one < other ? -1 : 1;
    }
    return (*left != 0) - (*right != 0);
}

/* Returns whether this character is safe on a terminal: not a control character, separator or bidirectional
 * mark. */
static bool is_shown(uint32_t code)
{
    bool control = code < 0x20 || (code >= 0x7F && code <= 0x9F);
    bool separator = code == 0x2028 || code == 0x2029;
    bool direction = code == 0x061C || code == 0x200E || code == 0x200F ||
                     (code >= 0x202A && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
    return !control && !separator && !direction;
}

/* Writes the next character of a non-empty text to `out`, escaped if necessary, and advances `*text`. Returns
 * the number of bytes written. */
static size_t next(const unsigned char **text, char out[ESCAPED_MAX + 1])
{
    uint32_t code = 0;
    size_t bytes = decode(*text, &code), used = 0;
    if (bytes > 0 && is_shown(code)) {
        memcpy(out, *text, bytes);
        out[bytes] = '\0';
        *text += bytes;
        return bytes;
    }
    for (size_t i = 0; i < (bytes ? bytes : 1); i++, ++*text) {
        const char *letter = **text ? strchr("\nn\rr\tt", **text) : NULL;
        used += (size_t)(letter ? snprintf(out + used, ESCAPED_MAX + 1 - used, "\\%c", letter[1])
                                : snprintf(out + used, ESCAPED_MAX + 1 - used, "\\x%02x", **text));
    }
    return used;
}

const char *text_printable(const char *text, char *out, size_t size)
{
    const unsigned char *at = (const unsigned char *)text;
    char character[ESCAPED_MAX + 1];
    size_t used = 0;
    while (*at) {
        size_t bytes = next(&at, character);
        if (used + bytes >= size)
            break;
        memcpy(out + used, character, bytes);
        used += bytes;
    }
    out[used] = '\0';
    return out;
}

void text_print(FILE *stream, const char *text)
{
    char character[ESCAPED_MAX + 1];
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        next(&at, character);
        fputs(character, stream);
    }
}

void text_print_wrapped(FILE *stream, const char *text, size_t indent, size_t width)
{
    size_t column = indent;
    while (*(text += strspn(text, " "))) {
        size_t length = strcspn(text, " ");
        if (column > indent && column + 1 + length > width) {
            fprintf(stream, "\n%*s", (int)indent, "");
            column = indent;
        }
        bool first = column == indent;
        fprintf(stream, "%s%.*s", first ? "" : " ", (int)length, text);
        column += length + !first;
        text += length;
    }
    fputc('\n', stream);
}

void text_print_word(FILE *stream, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%";
    if (*word && strspn(word, plain) == strlen(word)) {
        fprintf(stream, " %s", word);
        return;
    }
    fputs(" '", stream);
    for (; *word; word++)
        *word == '\'' ? (void)fputs("'\\''", stream) : (void)fputc(*word, stream);
    fputc('\'', stream);
}

void text_csv_field(FILE *stream, const char *text)
{
    if (!strpbrk(text, ",\"\r\n")) {
        fputs(text, stream);
        return;
    }
    fputc('"', stream);
    for (const char *c = text; *c; c++) {
        if (*c == '"')
            fputc('"', stream);
        fputc(*c, stream);
    }
    fputc('"', stream);
}

uint64_t text_csv_records(const char *text, size_t size, bool *whole)
{
    uint64_t records = 0;
    bool quoted = false;
    *whole = true;
    for (size_t i = 0; i < size; i++) {
        quoted ^= text[i] == '"'; /* a doubled quote toggles twice */
        *whole = text[i] == '\n' && !quoted;
        records += *whole;
    }
    return records;
}

static bool same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Restricted Damerau-Levenshtein distance: insertions, deletions, substitutions and transpositions of
 * neighbours, each letter edited at most once. Ignores case. */
static size_t edit_distance(const char *a, size_t n, const char *b, size_t m)
{
    size_t rows[3][WORD_MAX + 1];
    size_t *before = rows[0], *last = rows[1], *here = rows[2];
    for (size_t j = 0; j <= m; j++)
        last[j] = before[j] = j;
    for (size_t i = 1; i <= n; i++) {
        here[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t cost = last[j - 1] + !same_letter(a[i - 1], b[j - 1]);
            cost = smaller(cost, smaller(last[j], here[j - 1]) + 1);
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                cost = smaller(cost, before[j - 2] + 1);
            here[j] = cost;
        }
        size_t *spare = before;
        before = last;
        last = here;
        here = spare;
    }
    return last[m];
}

const char *nearest_word(const char *word, const char *const *candidates, size_t count)
{
    const char *nearest = NULL;
    size_t length = strlen(word), best = SIZE_MAX;
    if (length == 0 || length > WORD_MAX)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        size_t other = strlen(candidates[i]);
        if (other == 0 || other > WORD_MAX)
            continue;
        size_t distance = edit_distance(word, length, candidates[i], other), cost = distance;
        /* If `word` is a prefix of the candidate, the cost is at most 1; if the candidate is a prefix of
         * `word`, at most 2. */
        if (strncasecmp(word, candidates[i], smaller(length, other)) == 0)
            cost = smaller(distance, length < other ? 1 : 2);
        else if (distance > 1 + length / 3 || 2 * distance > length) /* half of the letters must be right */
            continue;
        size_t rank = cost * (WORD_MAX + 1) + distance; /* for equal costs, the smaller distance wins */
        if (rank < best) {
            best = rank;
            nearest = candidates[i];
        }
    }
    return nearest;
}

void list_words(char *text, size_t size, const char *const *words, size_t count)
{
    text[0] = '\0';
    for (size_t i = 0; i < count; i++)
        text_join(text, size, i + 1 == count ? " and " : ", ", "%s", words[i]);
}

bool is_one_of(const char *word, const char *const *words)
{
    while (*words && strcmp(word, *words) != 0)
        words++;
    return *words;
}

char *trim(char *text)
{
    text += strspn(text, " \t");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t", text[length - 1]))
        length--;
    text[length] = '\0';
    return text;
}
