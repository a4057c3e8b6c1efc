/* Rows of a set of embeddings as samples: their labels, a generator that delivers them by number, and a hash
 * that identifies them. */
#ifndef FDSL_DATA_EMBEDDING_ROWS_H
#define FDSL_DATA_EMBEDDING_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/generator.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/embeddings.h"

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
