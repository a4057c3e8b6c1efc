/* Finding the samples under a directory: by an index of ours, by a list of wids, by scanning shards, or as
 * files. */
#ifndef FDSL_DATA_DATASET_OPEN_H
#define FDSL_DATA_DATASET_OPEN_H

#include <stdbool.h>

#include "core/status.h"
#include "data/dataset.h"

FDSL_C_BEGIN

/* Opens a directory. `skip`: samples and shards that are broken are left out, with a warning and in
 * dataset->skipped; then every byte and every header is compared with the index, if there is one. Else the
 * first of them is STATUS_FAILED, with shard and offset. STATUS_USAGE where the directory holds no samples.
 * A list of wids that names a shard outside of the directory is STATUS_FAILED in either case. The caller
 * closes it, also after a failure. */
enum status dataset_open(const char *path, bool skip, struct dataset *dataset);

/* Reads every byte with the plain reader and fills `whole`. STATUS_FAILED, with shard and offset, where an
 * index has another hash, or the headers of a shard name another member than it does; and where a list of
 * wids has another md5 of a shard, in builds with libcrypto. */
enum status dataset_hash(struct dataset *dataset);

FDSL_C_END

#endif
