/* Element types of images, tensors and batches. */
#ifndef FDSL_CORE_DTYPE_H
#define FDSL_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/portable.h"

/* Images and arrays in .npy files have one of the first three types. Embeddings (data/embeddings.h) and
 * output may also have the type DTYPE_BF16. */
enum dtype {
    DTYPE_U8,
    DTYPE_F16,
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_STORED /* a request to keep the type of the file, byte for byte */
};

/* Returns the bytes per element; `type` must not be DTYPE_STORED. */
FDSL_HD size_t dtype_bytes(enum dtype type)
{
    return type == DTYPE_U8 ? 1 : type == DTYPE_F32 ? 4 : 2;
}

FDSL_C_BEGIN

/* The names "u8", "f16", "f32" and "bf16", indexed by enum dtype; NULL-terminated, for option_spec.choices.
 */
extern const char *const dtype_names[];

/* Returns the type string of a NumPy header, such as "<f2". NumPy has no bf16, so its bits are stored as
 * "<u2". */
const char *dtype_npy(enum dtype type);

/* Converts the NumPy type string "|u1", "<f2" or "<f4". Returns false for all others. */
bool dtype_from_npy(const char *npy, enum dtype *type);

FDSL_C_END

#endif
