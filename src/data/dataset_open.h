/* Finds the samples under a directory: in our index (the index of --prepare), by scanning shards, or as
 * single files. If our index is missing and there is a wids index, scans only the shards that the wids index
 * names. */
#ifndef FDSL_DATA_DATASET_OPEN_H
#define FDSL_DATA_DATASET_OPEN_H

#include <stdbool.h>

#include "core/status.h"
#include "data/dataset.h"
#include "data/remote.h"

FDSL_C_BEGIN

/* Opens a directory, or a URL (data/remote.h), and lists its samples. `choice` selects the members of each
 * sample; NULL selects all. `options` are for URLs; NULL selects their defaults.
 *
 * If `skip` is false, returns STATUS_FAILED at the first broken sample or shard, with a message that names
 * the shard and the offset. If `skip` is true, skips broken samples and shards with a warning, and counts
 * them in dataset->skipped. If the directory has our index, `skip` also makes this function compare every
 * byte and every shard header with the index.
 *
 * STATUS_USAGE if the directory cannot be opened, is incomplete, contains no samples or contains two indexes.
 * STATUS_FAILED, even if `skip` is true, if a wids index at a URL names a shard on another server or outside
 * its folder. The caller closes the dataset, even after a failure. */
enum status dataset_open(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset);

/* The two halves of dataset_open(): the first lists the samples, the second reads and checks them.
 * `url` is the path or the URL. If `compare` is set, the first also compares the md5 of each shard with the
 * wids index. If they differ, it returns STATUS_FAILED, even if `skip` is true. */
enum status dataset_find(const char *path, bool skip, bool compare, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset);
enum status dataset_check(const char *url, struct dataset *dataset);

/* Compares the names of the classes of two data sets (dataset_class_names()), after dataset_find().
 * STATUS_USAGE if equal labels mean different classes. Two sets of class folders must have the same folders;
 * otherwise, one list of names may be longer than the other. */
enum status dataset_same_classes(struct dataset *train, struct dataset *test);

/* Returns the names of the classes after dataset_check(): those of classes.txt beside the index or the
 * shards, or of the class folders. Sets `*count`. NULL and 0 if the classes have no names, or if labels are
 * read from a member other than "cls". */
const char *const *dataset_class_names(const struct dataset *dataset, uint32_t *count);

/* Reads every byte with the plain reader and fills `whole` of all samples and members. Does nothing if
 * dataset->hashed is set. A sample is broken if a hash differs from our index, or if a shard header names
 * another member than our index. If dataset->skip is set, skips broken samples; otherwise returns
 * STATUS_FAILED with the shard and the offset. In builds with libcrypto, also compares each shard's md5 with
 * the wids index; returns STATUS_FAILED if they differ, even if dataset->skip is set. */
enum status dataset_hash(struct dataset *dataset);

FDSL_C_END

#endif
