#include "core/npy.h"

#include <stdio.h>
#include <string.h>

#define MAGIC       "\x93NUMPY\x01" /* of version 1.0; a zero byte follows */
#define MAGIC_BYTES 8
#define ALIGNMENT   64 /* of the values in the file */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "values are written as they are in memory, and called little-endian"
#endif

/* Blanks fill the header up. */
size_t npy_header(char header[NPY_HEADER_MAX], const char *type, const char *shape)
{
    char *text = header + MAGIC_BYTES + 2;
    memset(header, 0, NPY_HEADER_MAX);
    memcpy(header, MAGIC, sizeof MAGIC);
    int length = snprintf(text, NPY_HEADER_MAX - MAGIC_BYTES - 2,
                          "{'descr': '%.8s', 'fortran_order': False, 'shape': (%.*s), }", type,
                          NPY_SHAPE_MAX - 1, shape);
    size_t used = MAGIC_BYTES + 2 + (size_t)length + 1;
    size_t bytes = (used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, text_bytes = bytes - MAGIC_BYTES - 2;
    header[MAGIC_BYTES] = (char)(text_bytes & 0xFF);
    header[MAGIC_BYTES + 1] = (char)(text_bytes >> 8);
    memset(text + length, ' ', text_bytes - (size_t)length);
    header[bytes - 1] = '\n';
    return bytes;
}
