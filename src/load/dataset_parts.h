/* What the parts of a dataset's opening share: dataset.c (where the list of samples comes from) and
 * dataset_scan.c (shards that have no index of ours). Nothing else includes this. */
#ifndef FDSL_LOAD_DATASET_PARTS_H
#define FDSL_LOAD_DATASET_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "load/dataset.h"
#include "load/index.h"

#define DATASET_NOT_KNOWN UINT64_MAX /* how many samples were lost */

/* ---- dataset.c ---- */

/* STATUS_FAILED, with the message. */
enum status dataset_out_of_memory(void);

/* Copies a name, which lives as long as the dataset. */
enum status dataset_keep_name(struct dataset *dataset, const char *name, size_t length, const char **kept);

/* Append to the lists. A sample begins without members, at the member that is added next. */
enum status dataset_add_file(struct dataset *dataset, const char *name, uint64_t bytes);
enum status dataset_add_member(struct dataset *dataset, struct dataset_member member);
enum status dataset_add_sample(struct dataset *dataset, const char *key);

/* What was just recorded as a failure leaves `samples` samples out, which may be DATASET_NOT_KNOWN, or ends
 * everything. */
enum status dataset_leave_out(struct dataset *dataset, enum status status, uint64_t samples);

/* ---- dataset_scan.c ---- */

/* The samples of one shard, of which a list of wids may tell (else NULL). A broken one keeps what stands
 * before the break. */
enum status dataset_scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *told);

#endif
