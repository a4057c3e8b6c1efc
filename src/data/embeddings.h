/* Sets of embeddings: rows of values from files of tensors, which are mapped into memory. Rows that are
 * stored as f32, f16 or bf16 are read in place; all others are decoded, one row at a time. */
#ifndef FDSL_DATA_EMBEDDINGS_H
#define FDSL_DATA_EMBEDDINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/generator.h"
#include "core/portable.h"
#include "core/status.h"

#define EMBEDDINGS_COLUMNS_MAX 65536
#define EMBEDDINGS_ALIGN_MAX   64 /* largest number of values to whose multiple rows are padded */

/* Columns of samples.csv in a prepared set: the first row and the number of rows of each file. */
extern const char *const embeddings_sample_columns[];

/* Types of stored values. docs/formats.md says to which type they are decoded. */
enum embeddings_type {
    EMBEDDINGS_F32,
    EMBEDDINGS_F16,
    EMBEDDINGS_BF16,
    EMBEDDINGS_F64,
    EMBEDDINGS_FP8,
    EMBEDDINGS_NVFP4,
    EMBEDDINGS_MXFP4
};

/* The names "f32" to "mxfp4", indexed by enum embeddings_type. */
extern const char *const embeddings_type_names[];

/* Consecutive rows that are stored as one tensor of a file. */
struct embeddings_part {
    const char *file;      /* path; owned by the set */
    const char *tensor;    /* name inside the file; "" if the format has no names; owned by the set */
    const uint8_t *values; /* rows x columns in C order, little-endian, read-only; may be unaligned. NULL if
                              rows must be decoded: see embeddings_decode() */
    const uint8_t *stored, *scales;  /* the rows as the file stores them */
    size_t value_bytes, scale_bytes; /* of a stored row */
    float tensor_scale;              /* NVFP4 */
    uint64_t first, rows; /* number of the first row within the set; number of rows, which may be 0 */
    size_t number;        /* of the file, for embeddings_check_file() */
};

struct embeddings_file;

struct embeddings {
    enum embeddings_type stored; /* type of the values in the files */
    enum dtype dtype;            /* type of the values of a row: DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    uint32_t columns;            /* values of a row, 1 to EMBEDDINGS_COLUMNS_MAX */
    uint32_t stored_columns;     /* values of a row in the files; the others are zeros for alignment */
    uint64_t rows;               /* may be 0 */
    struct embeddings_part *parts;
    size_t part_count;
    struct embeddings_file *files;
    size_t file_count;
    uint16_t halves[256]; /* FP8: the f16 value of each code */
};

FDSL_C_BEGIN

/* Opens a file (.npy, .npz, .safetensors, .pt, .pth, .pth.tar), a folder with such files (with its
 * subfolders, sorted by path), or several of these separated by ','. Names may be patterns of the shell. A
 * tensor with two axes has one row per index of its first axis; a tensor with one axis is one row.
 *
 * `tensor` selects tensors by their names or a pattern of the shell. If it is "", each file contributes its
 * floating-point tensors with two axes. A file without such tensors contributes its floating-point tensors
 * with one axis. Tensors with the scales of others are not rows. All tensors must have the same type and
 * number of columns.
 *
 * Files with more than 64 KiB of values are mapped; compressed arrays are unpacked into memory. If a mapped
 * file shrinks later, access to the lost rows raises SIGBUS: read values in guard_run() or guard_copy()
 * (machine/guard.h), and call embeddings_check_files() if these return false.
 *
 * STATUS_USAGE if a path does not exist or no file is found. STATUS_FAILED with the file, the reason and a
 * remedy if a file is refused. STATUS_UNAVAILABLE in builds without jansson, for .safetensors. The caller
 * closes the set; after a failure it is NULL. */
enum status embeddings_open(const char *path, const char *tensor, struct embeddings **set);
void embeddings_close(struct embeddings *set);

/* Returns the number of values of a row that is padded to a multiple of `multiple`, at least 1. */
static inline uint64_t embeddings_width(uint64_t columns, uint32_t multiple)
{
    return (columns + multiple - 1) / multiple * multiple;
}

/* Pads the rows with zeros, so that their number of values is a multiple of `multiple`, at least 1. Rows that
 * get padding must be decoded. Call it at most once, before rows are read. STATUS_USAGE if rows would have
 * more than EMBEDDINGS_COLUMNS_MAX values. */
enum status embeddings_align(struct embeddings *set, uint32_t multiple);

/* Returns whether the rows can be read in place: row i of a part is at part->values + i * row_bytes. */
bool embeddings_in_place(const struct embeddings *set);

/* Returns the bytes of a row: set->columns values of the type set->dtype. */
static inline size_t embeddings_row_bytes(const struct embeddings *set)
{
    return set->columns * dtype_bytes(set->dtype);
}

/* Returns the part that has a row; row < set->rows. The parts after it are next in set->parts. Thread safe.
 */
const struct embeddings_part *embeddings_part_of(const struct embeddings *set, uint64_t row);

/* Reads row `row` from the mapped file, and writes its embeddings_row_bytes() bytes to `to`, which is aligned
 * to values of set->dtype. Thread safe. */
void embeddings_decode(const struct embeddings *set, uint64_t row, void *to);

/* Reads row `row` from the mapped file, and writes its values as set->columns floats. Thread safe. */
void embeddings_row(const struct embeddings *set, uint64_t row, float *to);

/* Writes the rows first .. first + count - 1 to `to`, which is aligned to values of set->dtype. Reads the
 * files instead of their mappings, so it needs no guard: if a file shrinks, the result is STATUS_FAILED with
 * its name. Other changes of the files are not noticed; call embeddings_check_file() afterwards.
 * STATUS_EXHAUSTED if memory runs out. Thread safe. */
enum status embeddings_read(const struct embeddings *set, uint64_t first, uint64_t count, void *to);

/* Warns if matrix products of rows with `columns` values would leave tensor cores of a GPU partly idle,
 * because `columns` is not a multiple of 8. Call it only where tensor cores would be used. `remedy` says how
 * to pad the rows. */
void embeddings_warn_idle(uint64_t columns, const char *remedy);

/* Checks that no file has changed since it was opened: compares their identities (core/file.h). If one has
 * changed, STATUS_FAILED with the name of the first such file. */
enum status embeddings_check_files(const struct embeddings *set);

/* Checks a single file. Thread safe. */
enum status embeddings_check_file(const struct embeddings *set, size_t number);

FDSL_C_END

/* ---- Rows as samples (embedding_rows.c) ---- */

/* Their labels, a generator that delivers them by number, and a hash that identifies them. */

FDSL_C_BEGIN

#define EMBEDDING_LABELS "labels" /* default name of the tensor with the labels */

/* Returns whether labels with this name come from files, not from a tensor in the files of the rows: its end
 * is that of a file of tensors, or has a slash. NULL: false. */
bool embedding_labels_are_files(const char *name);

/* Reads one label per row of the set, from integers of any type. `name` is one of:
 * - the path of a file of labels, a folder with such files, or a pattern. A file has the tensor "labels", a
 *   single tensor, or a single tensor of integers. Their labels follow one another;
 * - the name of a tensor in each file of the set, or NULL: "labels". Each file has as many labels as rows.
 * The tensors have one axis, or two axes of which one has length 1; they may be compressed.
 *
 * `*labels` is an array of set->rows labels from `least` to `most`, which the caller frees; NULL after a
 * failure. STATUS_USAGE if nothing has this name, the values are not integers, or their number is not that of
 * the rows. STATUS_FAILED with the file if it is broken or a label is out of range. STATUS_EXHAUSTED if
 * memory runs out. */
enum status embedding_labels(const struct embeddings *set, const char *name, int32_t least, int32_t most,
                             int32_t **labels);

/* Hashes the shapes of the tensors, their first and last rows, and all labels (NULL: none). The paths of the
 * files do not change the hash. STATUS_FAILED if a file cannot be read or has changed. */
enum status embedding_hash(const struct embeddings *set, const int32_t *labels, uint64_t *hash);

/* A generator on the host whose samples are rows of a set. `set`, `numbers` and `labels` must outlive it. */
struct embedding_rows {
    const struct embeddings *set;
    const uint32_t *numbers; /* of each sample: the number of its row; NULL: sample n is row n */
    const int32_t *labels;   /* one per row of the set; NULL: labels are 0 */
    bool finite;             /* refuse rows with values that are infinite or NaN */
    enum dtype to;           /* DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    uint32_t width;          /* values per row that is delivered, at least set->columns; the rest is 0 */
    int threads;             /* at least 1 */

    /* Converts `columns` values; NULL: a plain loop. Must give the same bits. Thread safe. */
    void (*convert)(const void *row, enum dtype from, enum dtype to, uint32_t columns, void *out);
};

/* Opens the generator. Its calls take the numbers of samples that exist. They round to nearest, ties to even;
 * NaN becomes 0x7FFFFFFF in f32 and 0x7FFF in f16 and bf16. Rows whose type does not change are copied byte
 * for byte. A call fails with the name of the file if a file cannot be read, has become shorter, or has
 * changed since the set was opened. With `finite`, it fails with the file and the first row of the batch that
 * is refused. STATUS_EXHAUSTED if memory runs out. */
enum status embedding_rows_open(const struct embedding_rows *rows, struct generator **generator);

FDSL_C_END

#endif
