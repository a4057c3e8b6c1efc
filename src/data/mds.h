/* Data sets of MosaicML's streaming library: index.json and MDS shards, version 2. They are only read.
 *
 * A shard has the number of its samples, then the offset of each sample and of the end of the last one, as
 * 32-bit little-endian integers, then JSON that repeats the index, then the samples. A sample has the sizes
 * of those columns that the index gives no size, as 32-bit integers, then the values of all columns. A column
 * becomes a member of each sample. Format: docs.mosaicml.com, "Dataset Format". */
#ifndef FDSL_DATA_MDS_H
#define FDSL_DATA_MDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/image.h"
#include "data/index.h"
#include "data/members.h"

#define MDS_INDEX   "index.json"
#define MDS_COLUMNS 64 /* as many as members of a sample */

/* A column. Its member is named COLUMN.FORMAT, where FORMAT tells readers how to read the value. */
struct mds_column {
    char *name, *member; /* owned */
    char *encoding;      /* owned; as in the index: "jpeg", "int", "ndarray:uint8:32,32,3" */
    uint32_t bytes;      /* of each value; 0: each sample has its own size */
};

struct mds {
    struct mds_column columns[MDS_COLUMNS];
    uint32_t count;
    struct wids list; /* the shards; their names are relative to the folder of the index */
    uint64_t *first;  /* owned; number of each shard's first sample, and one end entry */
    uint32_t image; /* number of the column that is read as the image, if it has arrays; otherwise `count` */
    struct image raw; /* the shape of these arrays; with 0 channels: that of the first one */
};

FDSL_C_BEGIN

/* Returns whether the name of a file is that of an MDS shard, compressed or not. */
bool mds_is_shard(const char *name);

/* Parses an index. Sets `*found` to false, and nothing else, if the JSON is that of another program.
 * `exists` tells which file of a shard is there: the index may name both a compressed one and its copy. The
 * caller frees `mds`, even after a failure. STATUS_FAILED with the reason; STATUS_USAGE for compressions that
 * are not read; STATUS_UNAVAILABLE in builds without jansson. */
enum status mds_parse(const char *text, size_t size, bool (*exists)(void *context, const char *name),
                      void *context, struct mds *mds, bool *found);
void mds_free(struct mds *mds);

/* Finds the columns that `choice` names by their names, and replaces these by the names of their members. If
 * the user named none, chooses the image: the only column of JPEG or PNG images or, if there is none, of
 * arrays; and the label: a column named label, cls, class, target or y, otherwise the only column of
 * integers. STATUS_USAGE, with the name, for a column whose encoding is not read. */
enum status mds_choose(struct mds *mds, struct members *choice);

/* The members of a sample, in the order of the columns. */
struct mds_sample {
    uint64_t number; /* among the samples of the set */
    uint64_t offsets[MDS_COLUMNS];
    uint32_t sizes[MDS_COLUMNS];
};

/* Lists the samples of a shard, of `bytes` bytes, which is open for reading. Hands each to add(), whose
 * failures it relays. Sets mds->raw from the first array. STATUS_FAILED, with the offset, if a table or a
 * size leads out of the shard; STATUS_USAGE if arrays that are images have different shapes. */
enum status mds_list(struct mds *mds, uint32_t shard, int fd, uint64_t bytes,
                     enum status (*add)(void *context, const struct mds_sample *sample), void *context);

FDSL_C_END

#endif
