#include "data/orientation.h"

#include <string.h>

void orientation_turn(struct orientation turn, const uint8_t *pixels, uint32_t width, uint32_t height,
                      uint32_t channels, uint8_t *out)
{
    uint32_t rows = turn.transpose ? width : height, columns = turn.transpose ? height : width;
    for (uint32_t y = 0; y < rows; y++)
        for (uint32_t x = 0; x < columns; x++) {
            const uint8_t *from = pixels + orientation_from(turn, width, height, x, y) * channels;
            for (uint32_t c = 0; c < channels; c++)
                *out++ = from[c];
        }
}

/* ---- EXIF data (TIFF 6.0, section 2; EXIF 2.32, section 4.5) ---- */

#define HEADER_BYTES    8  /* byte order, the number 42, and the offset of the first directory */
#define ENTRY_BYTES     12 /* tag, type, number of values, and the value or its offset */
#define TAG_ORIENTATION 0x112
#define TYPE_SHORT      3 /* 16 bits */
#define TYPE_LONG       4 /* 32 bits */

/* Returns the number in `count` bytes. */
static uint32_t number(const uint8_t *bytes, int count, bool big_endian)
{
    uint32_t value = 0;
    for (int i = 0; i < count; i++)
        value = value << 8 | bytes[big_endian ? i : count - 1 - i];
    return value;
}

/* Returns the value of an entry, or 0 if it is not a single number of a type that the standard or a common
 * program uses. A SHORT takes the first two bytes of the field, in either byte order. */
static uint32_t value_of(const uint8_t *entry, bool big_endian)
{
    uint32_t type = number(entry + 2, 2, big_endian);
    if ((type != TYPE_SHORT && type != TYPE_LONG) || number(entry + 4, 4, big_endian) != 1)
        return 0;
    return number(entry + 8, type == TYPE_SHORT ? 2 : 4, big_endian);
}

uint32_t orientation_in_exif(const uint8_t *tiff, size_t bytes)
{
    static const uint8_t little[4] = {'I', 'I', 42, 0}, big[4] = {'M', 'M', 0, 42};
    if (bytes < HEADER_BYTES || (memcmp(tiff, little, 4) != 0 && memcmp(tiff, big, 4) != 0))
        return 0;
    bool big_endian = tiff[0] == 'M';
    size_t at = number(tiff + 4, 4, big_endian);
    if (at > bytes || bytes - at < 2)
        return 0;
    uint32_t entries = number(tiff + at, 2, big_endian);
    for (at += 2; entries-- > 0 && bytes - at >= ENTRY_BYTES; at += ENTRY_BYTES)
        if (number(tiff + at, 2, big_endian) == TAG_ORIENTATION) {
            uint32_t value = value_of(tiff + at, big_endian);
            return value <= 8 ? value : 0;
        }
    return 0;
}
