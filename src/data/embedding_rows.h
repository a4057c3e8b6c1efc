/* Rows of a set of embeddings as samples: their labels, a generator that delivers them by number, and a hash
 * that identifies them. */
#ifndef FDSL_DATA_EMBEDDING_ROWS_H
#define FDSL_DATA_EMBEDDING_ROWS_H

#include <stdint.h>

#include "core/generator.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/embeddings.h"

#define EMBEDDING_ALIGN_MAX 64 /* largest number of values to whose multiple rows are padded */

/* Returns the number of values of a row that is padded to a multiple of `align`, at least 1. */
static inline uint32_t embedding_width(uint32_t columns, uint32_t align)
{
    return (columns + align - 1) / align * align;
}

FDSL_C_BEGIN

/* Reads one label per row of the set. `name` is the path of files whose names end as those of the set, a
 * folder with such files, or a pattern: each file has one tensor of integers. Otherwise it is the name of a
 * tensor in each file of the set. Such tensors have one axis, or a second axis of length 1.
 *
 * `*labels` is an array of set->rows labels, which the caller frees; NULL after a failure. STATUS_USAGE if
 * nothing has this name, or the number of labels is not that of the rows. STATUS_FAILED if a file is broken,
 * or a label does not fit into 32 bits. STATUS_EXHAUSTED if memory runs out. */
enum status embedding_labels(const struct embeddings *set, const char *name, int32_t **labels);

/* Hashes the shapes of the tensors, their first and last rows, and all labels (NULL: none). The paths of the
 * files do not change the hash. STATUS_FAILED if a file cannot be read or has changed. */
enum status embedding_hash(const struct embeddings *set, const int32_t *labels, uint64_t *hash);

/* A generator on the host whose sample n is row n of the set. */
struct embedding_rows {
    const struct embeddings *set; /* must outlive the generator */
    const int32_t *labels; /* one per row of the set, or NULL: labels are 0; must outlive the generator */
    enum dtype to;         /* DTYPE_F32, DTYPE_F16 or DTYPE_BF16 */
    uint32_t width;        /* values per row that is delivered, at least set->columns; the rest is 0 */
    int threads;           /* at least 1 */

    /* Converts `columns` values; NULL: a plain loop. Must give the same bits. Thread safe. */
    void (*convert)(const void *row, enum dtype from, enum dtype to, uint32_t columns, void *out);
};

/* Opens the generator. Its calls take a list of numbers below set->rows. They round to nearest, ties to even;
 * NaN becomes 0x7FFFFFFF in f32 and 0x7FFF in f16 and bf16. Rows whose type does not change are copied byte
 * for byte. A call fails with the name of the file if a file cannot be read, has become shorter, or has
 * changed since the set was opened. STATUS_EXHAUSTED if memory runs out. */
enum status embedding_rows_open(const struct embedding_rows *rows, struct generator **generator);

FDSL_C_END

#endif
