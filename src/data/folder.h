/* The folder of a dataset that is being prepared: who may write it, which units are finished, and how it is
 * completed.
 *
 * During --prepare, FOLDER/.prepare/ holds `spec`, the options of the dataset, and one part of the index per
 * finished unit. When all units are finished, the parts are merged into NAME.index and .prepare/ is removed.
 * So NAME.index exists only for a complete dataset, and a part only for a complete unit. */
#ifndef FDSL_DATA_FOLDER_H
#define FDSL_DATA_FOLDER_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "data/index.h"

struct folder {
    const char *path;
    const char *name;       /* of the dataset */
    const char *provenance; /* options that determine the dataset, in one line */
    enum index_layout layout;
    uint64_t unit_count;
    int lock;            /* lock on the folder, held by rank 0; -1 on other ranks */
    uint64_t part_count; /* rank 0: units that were finished when it claimed the folder */
};

/* Formats the name of a unit: "NAME-000003.tar", or "003". */
void folder_unit_name(const struct folder *folder, uint64_t unit, char name[PATH_MAX]);

/* Rank 0 only, before the other ranks look at the folder. Creates and locks the folder, or checks that this
 * run may continue it, and removes temporary files of killed runs. If a complete dataset lost files, has
 * files of the wrong size or an incomplete list, it is reopened so that the missing parts are prepared again.
 * STATUS_USAGE if the folder holds something else, was started with other options, or is in use by another
 * run. */
enum status folder_claim(struct folder *folder);

/* Returns whether the dataset is complete. Every rank may call it, after folder_claim(). */
bool folder_complete(const struct folder *folder);

/* Whether a unit is finished: its part exists, and its files have the sizes given there. */
bool folder_finished(const struct folder *folder, uint64_t unit);

/* Builds the path of a unit's part of the index. */
enum status folder_part_path(const struct folder *folder, uint64_t unit, char path[PATH_MAX]);

/* Rank 0, after all units are finished: merges the parts into one index. The caller frees it. */
enum status folder_gather(const struct folder *folder, struct index *index);

/* Rank 0, last step: writes NAME.wids.json for shards and NAME.index, then removes .prepare/. */
enum status folder_conclude(const struct folder *folder, const struct index *index);

/* Releases the lock. */
void folder_release(struct folder *folder);

#endif
