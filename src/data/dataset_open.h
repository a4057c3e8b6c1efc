/* Finds the samples under a directory: from our index, from a wids index, by scanning shards, or as files. */
#ifndef FDSL_DATA_DATASET_OPEN_H
#define FDSL_DATA_DATASET_OPEN_H

#include <stdbool.h>

#include "core/status.h"
#include "data/dataset.h"

FDSL_C_BEGIN

/* Opens a directory and lists its samples.
 *
 * Without `skip`, the first broken sample or shard is STATUS_FAILED, with shard and offset. With `skip`,
 * broken samples and shards are skipped with a warning and counted in dataset->skipped; every byte and header
 * is then compared with the index, if there is one.
 *
 * STATUS_USAGE if the directory holds no samples. A wids index that names a shard outside the directory is
 * always STATUS_FAILED. The caller closes the dataset, also after a failure. */
enum status dataset_open(const char *path, bool skip, struct dataset *dataset);

/* Reads every byte with the plain reader and fills `whole`. STATUS_FAILED, with shard and offset, if a hash
 * differs from the index or a shard header names a different member than the index. In builds with libcrypto,
 * also if a shard's md5 differs from the wids index. */
enum status dataset_hash(struct dataset *dataset);

FDSL_C_END

#endif
