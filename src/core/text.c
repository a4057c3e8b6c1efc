#include "core/text.h"

#include <stdarg.h>
#include <string.h>

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
