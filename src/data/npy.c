#include "data/npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAGIC       "\x93NUMPY"
#define MAGIC_BYTES 6
#define PREFIX      10 /* bytes before the header text in version 1.0: magic, version, text length */
#define ALIGNMENT   64 /* alignment of the values in the file, in bytes */
#define VALUES_MAX  (UINT64_C(1) << 58)
#define BAD(reason) status_set(STATUS_FAILED, "not a supported .npy file: " reason)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this machine is not little-endian, but .npy files are written in memory order as little-endian"
#endif

/* ---- Writing ---- */

/* Pads the header text with blanks, so that the values are aligned. */
size_t npy_header_make(char header[NPY_HEADER_MAX], const char *type, const char *shape)
{
    char *text = header + PREFIX;
    memset(header, 0, NPY_HEADER_MAX);
    memcpy(header, MAGIC "\x01", MAGIC_BYTES + 1);
    int length = snprintf(text, NPY_HEADER_MAX - PREFIX,
                          "{'descr': '%.8s', 'fortran_order': False, 'shape': (%.*s), }", type,
                          NPY_SHAPE_MAX - 1, shape);
    size_t used = PREFIX + (size_t)length + 1, bytes = (used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    header[8] = (char)((bytes - PREFIX) & 0xFF);
    header[9] = (char)((bytes - PREFIX) >> 8);
    memset(text + length, ' ', bytes - PREFIX - (size_t)length);
    header[bytes - 1] = '\n';
    return bytes;
}

/* ---- Reading ---- */

/* Position in the header text, which is a Python dictionary. */
struct cursor {
    const char *at, *end;
    bool python2; /* the version may have been written by Python 2, whose long integers end in an L */
};

static void skip_blanks(struct cursor *cursor)
{
    while (cursor->at < cursor->end && (*cursor->at == ' ' || *cursor->at == '\n'))
        cursor->at++;
}

/* Skips blanks and then `text`. Returns false if `text` does not follow the blanks. */
static bool skip(struct cursor *cursor, const char *text)
{
    size_t length = strlen(text);
    skip_blanks(cursor);
    if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, text, length) != 0)
        return false;
    cursor->at += length;
    return true;
}

/* Parses a string in single or double quotes, without escapes. */
static bool quoted(struct cursor *cursor, char *text, size_t size)
{
    char quote = skip(cursor, "'") ? '\'' : skip(cursor, "\"") ? '"' : '\0';
    const char *close = quote ? memchr(cursor->at, quote, (size_t)(cursor->end - cursor->at)) : NULL;
    if (!close || (size_t)(close - cursor->at) >= size ||
        memchr(cursor->at, '\n', (size_t)(close - cursor->at)))
        return false;
    size_t length = (size_t)(close - cursor->at);
    memcpy(text, cursor->at, length);
    text[length] = '\0';
    cursor->at = close + 1;
    return strlen(text) == length;
}

static bool number(struct cursor *cursor, uint64_t *value)
{
    skip_blanks(cursor);
    const char *begin = cursor->at;
    *value = 0;
    for (; cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9'; cursor->at++) {
        if (*value > VALUES_MAX)
            return false;
        *value = *value * 10 + (uint64_t)(*cursor->at - '0');
    }
    if (cursor->at > begin + 1 && *begin == '0') /* Python refuses 07 */
        return false;
    if (cursor->at == begin)
        return false;
    if (cursor->python2 && cursor->at < cursor->end && *cursor->at == 'L')
        cursor->at++;
    return true;
}

/* Returns whether NumPy has a type of this kind with this many bytes, at most 16. */
static bool has_type(char kind, uint64_t bytes)
{
    unsigned sizes = kind == 'b' ? 1 : kind == 'f' ? 2 | 4 | 8 | 16 : kind == 'c' ? 8 | 16 : 1 | 2 | 4 | 8;
    return bytes > 0 && bytes <= 16 && (bytes & (bytes - 1)) == 0 && (sizes & bytes);
}

/* Parses a type such as "<f2": byte order, kind, bytes per value. */
static enum status read_type(struct cursor *cursor, struct npy_header *header)
{
    char *type = header->type;
    if (!quoted(cursor, type, sizeof header->type))
        return BAD("its 'descr' is not a plain type (records are not supported)");
    struct cursor rest = {type + 2, type + strlen(type), false};
    uint64_t bytes;
    if (strlen(type) < 3 || !strchr("<>|=", type[0]) || !strchr("biufc", type[1]) || !number(&rest, &bytes) ||
        rest.at != rest.end || !has_type(type[1], bytes))
        return status_set(STATUS_FAILED,
                          "values of type '%s' are not supported: only numbers and booleans of 1 to 16 "
                          "bytes; convert them with array.astype()",
                          type);
    header->value_bytes = (uint32_t)bytes;
    return STATUS_OK;
}

static enum status read_shape(struct cursor *cursor, struct npy_header *header)
{
    if (!skip(cursor, "("))
        return BAD("its 'shape' is not a tuple");
    header->values = 1;
    header->axes = 0;
    while (!skip(cursor, ")")) {
        uint64_t length;
        if (header->axes == NPY_AXES_MAX || !number(cursor, &length))
            return BAD("its 'shape' is not a list of at most 32 lengths");
        if (length > 0 && header->values > VALUES_MAX / length)
            return BAD("its 'shape' has more values than any file holds");
        header->shape[header->axes++] = length;
        header->values *= length;
        if (!skip(cursor, ",") && (header->axes == 1 || !(cursor->at < cursor->end && *cursor->at == ')')))
            return BAD("its 'shape' lacks a comma or a closing parenthesis"); /* (3) is a number in Python */
    }
    return STATUS_OK;
}

static enum status read_order(struct cursor *cursor, struct npy_header *header)
{
    header->fortran = skip(cursor, "True");
    return header->fortran || skip(cursor, "False") ? STATUS_OK
                                                    : BAD("its 'fortran_order' is neither True nor False");
}

/* Returns whether a line after the first begins with a blank. Python refuses such lines outside of brackets.
 */
static bool is_indented(const char *begin, const char *end)
{
    const char *line = memchr(begin, '\n', (size_t)(end - begin));
    return line && memchr(line, ' ', (size_t)(end - line));
}

/* Parses the three entries of the dictionary. They may be in any order, but each must occur exactly once. */
static enum status read_dictionary(struct cursor cursor, struct npy_header *header)
{
    static enum status (*const readers[])(struct cursor *, struct npy_header *) = {read_type, read_order,
                                                                                   read_shape};
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    const char *begin = cursor.at;
    unsigned seen = 0;
    if (!skip(&cursor, "{") || (is_indented(begin, cursor.at) && cursor.at[-2] == ' '))
        return BAD("its header is not a dictionary");
    while (!skip(&cursor, "}")) {
        char key[16];
        size_t i = 0;
        if (!quoted(&cursor, key, sizeof key) || !skip(&cursor, ":"))
            return BAD("its header is not a dictionary of three entries");
        while (i < COUNT_OF(keys) && strcmp(key, keys[i]) != 0)
            i++;
        if (i == COUNT_OF(keys) || seen & 1u << i)
            return BAD("its header has an unknown or duplicate entry");
        seen |= 1u << i;
        TRY(readers[i](&cursor, header));
        if (!skip(&cursor, ",") && !(cursor.at < cursor.end && *cursor.at == '}'))
            return BAD("its header lacks a comma or a closing brace");
    }
    if (!cursor.python2 && is_indented(cursor.at, cursor.end)) /* NumPy tolerates it in older versions */
        return BAD("a blank follows the line feed at the end of its header");
    skip_blanks(&cursor);
    return seen == 7 && cursor.at == cursor.end
               ? STATUS_OK
               : BAD("its header lacks an entry, or text follows the closing brace");
}

enum status npy_header_parse(const uint8_t *bytes, size_t size, struct npy_header *header)
{
    memset(header, 0, sizeof *header);
    if (size < MAGIC_BYTES + 6 || memcmp(bytes, MAGIC, MAGIC_BYTES) != 0)
        return BAD("wrong magic number; write it with numpy.save()");
    unsigned version = bytes[MAGIC_BYTES], minor = bytes[MAGIC_BYTES + 1];
    if (version < 1 || version > 3 || minor != 0)
        return status_set(STATUS_FAILED, ".npy version %u.%u is not supported; 1.0, 2.0 and 3.0 are", version,
                          minor);
    size_t begin = version == 1 ? MAGIC_BYTES + 4 : MAGIC_BYTES + 6;
    size_t length = bytes[8] | (size_t)bytes[9] << 8;
    if (version > 1)
        length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
    if (begin + length > NPY_HEADER_READ)
        return status_set(STATUS_FAILED,
                          "its .npy header has %zu bytes; at most %zu are allowed, and plain arrays need "
                          "about 100: write it with numpy.save()",
                          length, NPY_HEADER_READ - begin);
    if (length > size - begin)
        return status_set(STATUS_FAILED,
                          "its .npy header has %zu bytes, but only %zu bytes follow; write it again", length,
                          size - begin);
    header->data = begin + length;
    const char *text = (const char *)bytes + begin;
    return read_dictionary((struct cursor){text, text + length, version < 3}, header);
}

enum status npy_header_check(const struct npy_header *header, uint64_t size)
{
    uint64_t wanted = header->data + header->values * header->value_bytes; /* no overflow: below 2^63 */
    if (wanted == size)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its .npy header requires %" PRIu64 " bytes, but the file has %" PRIu64
                      "; write it again",
                      wanted, size);
}
