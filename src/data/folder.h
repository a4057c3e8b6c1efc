/* The folder that a dataset is prepared in: whose it is, what of it is finished, and how it becomes whole.
 *
 * While a dataset is being made, FOLDER/.prepare/ holds `spec`, the options that it is made with, and a part
 * of the index for every unit that is finished. When all are, the parts become NAME.index and .prepare/
 * goes. So the index says that the dataset is whole, and a part that its unit is. */
#ifndef FDSL_DATA_FOLDER_H
#define FDSL_DATA_FOLDER_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "data/index.h"

struct folder {
    const char *path;
    const char *name; /* the dataset's */
    const char *made; /* its options, in one line */
    enum index_layout layout;
    uint64_t unit_count;
    int lock;            /* of rank 0, on the folder; -1 elsewhere */
    uint64_t part_count; /* of rank 0: units whose parts were there when it was claimed */
};

/* The name of a unit: "NAME-000003.tar", or "003". */
void folder_unit_name(const struct folder *folder, uint64_t unit, char name[PATH_MAX]);

/* For rank 0, before the others look: makes the folder, or checks that it is ours to go on in, and removes
 * what killed runs left under temporary names. Where files of a complete dataset are missing or have other
 * sizes, or a list of its samples or shards is not whole, it is reopened, so that what lacks is made again.
 * STATUS_USAGE where it holds something else, was begun with other options, or another run is
 * at work in it. */
enum status folder_claim(struct folder *folder);

/* For all ranks, after that: whether everything is there. */
bool folder_complete(const struct folder *folder);

/* Whether a unit is finished: its part is there, and its files have the sizes that it tells. */
bool folder_finished(const struct folder *folder, uint64_t unit);

/* The file of a unit's part. */
enum status folder_part_path(const struct folder *folder, uint64_t unit, char path[PATH_MAX]);

/* For rank 0, when all units are finished: reads the parts into the index of all, which the caller frees. */
enum status folder_gather(const struct folder *folder, struct index *index);

/* And last: writes NAME.wids.json for shards, NAME.index, and removes .prepare/. */
enum status folder_conclude(const struct folder *folder, const struct index *index);

/* Lets others in. */
void folder_release(struct folder *folder);

#endif
