/* Rows of embeddings with labels as training data, for data.c. No other file includes this header. */
#ifndef FDSL_TRAIN_DATA_ROWS_H
#define FDSL_TRAIN_DATA_ROWS_H

#include "train/data.h"

FDSL_C_BEGIN

/* Returns whether the request names rows of embeddings: by --labels, --test-labels or --tensor, by a name
 * that ends like a file of tensors, or by a folder with .safetensors, .pt, .pth or .pth.tar files that has
 * neither subfolders, shards nor images. */
bool rows_named(const struct data_request *request);

/* Opens both sets: sets data->rows, shape, type, labels and values. With DATA_LOAD, the files of the training
 * set stay open, its values are not read, and data->sums is set from at most DATA_MEASURED of its rows.
 * STATUS_USAGE if an option of the request is for other samples, or if a file does not exist; STATUS_FAILED
 * with the file and the reason if rows or labels cannot be read, or if a value is not finite. The caller
 * calls rows_close(), even after a failure. */
enum status rows_open(const struct data_request *request, struct data *data);
void rows_close(struct data *data);

/* For DATA_LOAD: returns a hash of the measured rows, without reading them again. */
uint64_t rows_hash(const struct data *data);

/* For DATA_LOAD: returns whether the training set is all rows of the files; and the hash of these rows and
 * their labels in the state of a stream. STATUS_FAILED if a file cannot be read or has changed. */
bool rows_are_whole(const struct data *data);
enum status rows_state_hash(const struct data *data, uint64_t *hash);

/* For DATA_LOAD: opens a generator that reads training samples from the files, with up to `threads` threads.
 * The caller closes it before the data. STATUS_FAILED with the file if it was changed, or if a value is not
 * finite. */
enum status rows_generator(const struct data *data, int threads, struct generator **generator);

FDSL_C_END

#endif
