/* Element types of images, tensors and batches. */
#ifndef FDSL_CORE_DTYPE_H
#define FDSL_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"

/* The first three are those of images and arrays in files. */
enum dtype {
    DTYPE_U8,
    DTYPE_F16,
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_STORED /* a request: whatever type the file has, byte for byte */
};

/* Bytes of one element; `type` is not DTYPE_STORED. */
FDSL_HD size_t dtype_bytes(enum dtype type)
{
    return type == DTYPE_U8 ? 1 : type == DTYPE_F32 ? 4 : 2;
}

FDSL_C_BEGIN

/* "u8", "f16", "f32", "bf16", in the order of the enum; NULL-terminated, as options list their choices. */
extern const char *const dtype_names[];

/* The type in a NumPy header, "<f2". NumPy has no bf16: its bits are stored as "<u2". */
const char *dtype_npy(enum dtype type);

/* Finds the type of images and arrays that NumPy calls so: "|u1", "<f2" or "<f4". False for all others. */
bool dtype_from_npy(const char *npy, enum dtype *type);

FDSL_C_END

#endif
