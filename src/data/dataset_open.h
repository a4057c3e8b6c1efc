/* Finds the samples under a directory: in our index (the index of --prepare), by scanning shards, or as
 * single files. If our index is missing and there is a wids index, scans only the shards that the wids index
 * names. */
#ifndef FDSL_DATA_DATASET_OPEN_H
#define FDSL_DATA_DATASET_OPEN_H

#include <stdbool.h>

#include "core/status.h"
#include "data/dataset.h"

FDSL_C_BEGIN

/* Opens a directory and lists its samples.
 *
 * Without `skip`, returns STATUS_FAILED at the first broken sample or shard, with a message that names the
 * shard and the offset. With `skip`, broken samples and shards are skipped with a warning and counted in
 * dataset->skipped. If the directory has our index, `skip` also compares every byte and every shard header
 * with the index.
 *
 * STATUS_USAGE if the directory cannot be opened, is incomplete or holds no samples. STATUS_FAILED, also with
 * `skip`, if a wids index names a shard outside the directory. The caller closes the dataset, also after a
 * failure. */
enum status dataset_open(const char *path, bool skip, struct dataset *dataset);

/* Reads every byte with the plain reader and fills `whole` of all samples and members. Does nothing if
 * dataset->hashed is set. A sample is broken if a hash differs from our index, or if a shard header names
 * another member than our index: without dataset->skip, returns STATUS_FAILED with shard and offset; with it,
 * skips the sample. In builds with libcrypto, also compares each shard's md5 with the wids index; returns
 * STATUS_FAILED if they differ, also with dataset->skip. */
enum status dataset_hash(struct dataset *dataset);

FDSL_C_END

#endif
