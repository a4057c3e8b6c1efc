/* What the parts of a dataset's opening share: dataset.c (the lists), dataset_open.c (where they
 * come from), dataset_list.c (the files under a directory) and dataset_scan.c (shards that have no index of
 * ours). Nothing else includes this. */
#ifndef FDSL_DATA_DATASET_PARTS_H
#define FDSL_DATA_DATASET_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "data/dataset.h"
#include "data/index.h"

#define DATASET_WARNINGS_MAX 8          /* about samples left out, one by one; then only a count */
#define DATASET_NOT_KNOWN    UINT64_MAX /* how many samples were lost */

/* ---- dataset.c ---- */

/* STATUS_FAILED, with the message. */
enum status dataset_out_of_memory(void);

/* Makes room for one more than `count` in an array of `size` bytes per element. */
enum status dataset_grow(void *array, uint32_t count, uint32_t *capacity, size_t size);

/* Copies a name, which lives as long as the dataset. */
enum status dataset_keep_name(struct dataset *dataset, const char *name, size_t length, const char **kept);

/* Append to the lists. A sample begins without members, at the member that is added next. */
enum status dataset_add_file(struct dataset *dataset, const char *name, uint64_t bytes);
enum status dataset_add_member(struct dataset *dataset, struct dataset_member member);
enum status dataset_add_sample(struct dataset *dataset, const char *key);

/* What was just recorded as a failure leaves `samples` samples out, which may be DATASET_NOT_KNOWN, or ends
 * everything. */
enum status dataset_leave_out(struct dataset *dataset, enum status status, uint64_t samples);

/* ---- dataset_list.c ---- */

struct dataset_names {
    const char **items; /* relative to the dataset's directory; they live as long as the dataset */
    uint32_t count, capacity;
};

/* Adds the regular files in the dataset's directory, `deep`: and in all folders under it, in any order. Names
 * that begin with a dot are left out. However deep folders are, one at a time is open. The caller frees
 * names->items, also after a failure. STATUS_USAGE where a link leads back to a folder above it. */
enum status dataset_list(struct dataset *dataset, bool deep, struct dataset_names *names);

/* ---- dataset_scan.c ---- */

/* The samples of one shard, of which a list of wids may tell (else NULL). A broken one keeps what stands
 * before the break. */
enum status dataset_scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *told);

#endif
