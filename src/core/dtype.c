#include "core/dtype.h"

const char *const dtype_names[] = {"u8", "f16", "f32", "bf16", NULL};

static const char *const npy_types[] = {"|u1", "<f2", "<f4", "<u2"};

const char *dtype_npy(enum dtype type)
{
    return npy_types[type];
}

bool dtype_from_npy(const char *npy, enum dtype *type)
{
    for (int i = DTYPE_U8; i <= DTYPE_F32; i++)
        if (strcmp(npy, npy_types[i]) == 0) {
            *type = (enum dtype)i;
            return true;
        }
    return false;
}
