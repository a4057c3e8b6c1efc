/* The header of a NumPy file (.npy), as we write it. */
#ifndef FDSL_CORE_NPY_H
#define FDSL_CORE_NPY_H

#include <stddef.h>

#include "core/portable.h"

#define NPY_HEADER_MAX 256
#define NPY_SHAPE_MAX  128 /* bytes of a shape's text, with its zero */

FDSL_C_BEGIN

/* Fills the header, version 1.0, of an array of this type ("<f2") and shape ("2, 3"; "5," for one axis) in C
 * order. Returns its length, a multiple of 64 and at most NPY_HEADER_MAX. */
size_t npy_header(char header[NPY_HEADER_MAX], const char *type, const char *shape);

FDSL_C_END

#endif
