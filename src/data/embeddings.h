/* Sets of embeddings: rows of values from files of tensors, which are mapped into memory. */
#ifndef FDSL_DATA_EMBEDDINGS_H
#define FDSL_DATA_EMBEDDINGS_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

#define EMBEDDINGS_COLUMNS_MAX 65536

/* Columns of samples.csv in a prepared set: the first row and the number of rows of each file. */
extern const char *const embeddings_sample_columns[];

/* Consecutive rows that are stored as one tensor of a file. */
struct embeddings_part {
    const char *file;      /* path; owned by the set */
    const char *tensor;    /* name inside the file; "" if the format has no names; owned by the set */
    const uint8_t *values; /* rows x columns in C order, little-endian, read-only; may be unaligned */
    uint64_t first, rows;  /* number of the first row within the set; number of rows, which may be 0 */
};

struct embeddings_file;

struct embeddings {
    enum dtype dtype; /* DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    uint32_t columns; /* 1 to EMBEDDINGS_COLUMNS_MAX */
    uint64_t rows;    /* may be 0 */
    struct embeddings_part *parts;
    size_t part_count;
    struct embeddings_file *files;
    size_t file_count;
};

FDSL_C_BEGIN

/* Opens a file (.npy, .safetensors, .pt, .pth, .pth.tar), a folder with such files (with its subfolders,
 * sorted by path), or several of these separated by ','. Names may be patterns of the shell. A tensor with
 * two axes has one row per index of its first axis; a tensor with one axis is one row.
 *
 * `tensor` selects tensors by their names or a pattern of the shell. If it is "", each file contributes its
 * floating-point tensors with two axes. A file without such tensors contributes its floating-point tensors
 * with one axis. All tensors must have the same type and number of columns.
 *
 * Files with more than 64 KiB of values are mapped. If a mapped file shrinks later, access to the lost rows
 * raises SIGBUS: read values in guard_run() or guard_copy() (machine/guard.h), and call
 * embeddings_check_files() if these return false.
 *
 * STATUS_USAGE if a path does not exist or no file is found. STATUS_FAILED with the file, the reason and a
 * remedy if a file is refused. STATUS_UNAVAILABLE in builds without jansson, for .safetensors. The caller
 * closes the set; after a failure it is NULL. */
enum status embeddings_open(const char *path, const char *tensor, struct embeddings **set);
void embeddings_close(struct embeddings *set);

/* Checks that no file has changed since it was opened: compares their identities (core/file.h). If one has
 * changed, STATUS_FAILED with the name of the first such file. */
enum status embeddings_check_files(const struct embeddings *set);

FDSL_C_END

#endif
