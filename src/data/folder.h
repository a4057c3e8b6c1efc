/* The folder of a dataset that is being prepared. These functions lock it, find the finished units and
 * complete the dataset. A unit is a shard, or a folder of files.
 *
 * During --prepare, FOLDER/.prepare/ holds the file `spec` with the options of the dataset. It also holds one
 * part of the index per finished unit. When all units are finished, the parts are merged into NAME.index and
 * .prepare/ is removed. Therefore, NAME.index exists only if the dataset is complete, and a part exists
 * only if its unit is complete. */
#ifndef FDSL_DATA_FOLDER_H
#define FDSL_DATA_FOLDER_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "data/index.h"

struct folder {
    const char *path;
    const char *name;       /* name of the dataset, the prefix of its file names */
    const char *provenance; /* options that determine the dataset, in one line */
    const char *above;      /* INDEX_FILES: folder of the units with a final slash, or "" */
    enum index_layout layout;
    const char *const *class_folders; /* INDEX_IMAGEFOLDER: names of the class folders */
    uint64_t class_count;             /* INDEX_IMAGEFOLDER: number of class folders */
    const char *class_list;           /* content of classes.txt, or NULL if the classes have no names */
    uint64_t unit_count;
    int lock;            /* rank 0: descriptor that holds the lock on the folder; other ranks: -1 */
    uint64_t part_count; /* rank 0: number of parts in .prepare/ after folder_claim() */
};

/* Formats the name of a unit: "NAME-000003.tar" for a shard, "not-imagefolder/003" for a
 * folder of files. */
void folder_unit_name(const struct folder *folder, uint64_t unit, char name[PATH_MAX]);

/* Call on rank 0 only, before the other ranks read the folder. Creates the folder or checks that this
 * run may continue it, locks it, and removes temporary files of killed runs. If files of a complete dataset
 * are missing or have the wrong size, the dataset becomes unfinished again, and the units with these files
 * are prepared again. STATUS_USAGE if the folder holds other files, if its dataset was begun with other
 * options, or if another run uses it. */
enum status folder_claim(struct folder *folder);

/* Returns whether the dataset is complete. Any rank may call this after rank 0 has called folder_claim(). */
bool folder_complete(const struct folder *folder);

/* Returns whether a unit is finished: its part of the index exists, and its files have the sizes in that
 * part. If the unit is a shard, its DALI index must be complete, too. */
bool folder_finished(const struct folder *folder, uint64_t unit);

/* Builds the path of a unit's part of the index. */
enum status folder_part_path(const struct folder *folder, uint64_t unit, char path[PATH_MAX]);

/* Rank 0, after all units are finished: merges the parts into one index. The caller frees the index. */
enum status folder_gather(const struct folder *folder, struct index *index);

/* Rank 0, last step: writes classes.txt, NAME.wids.json (only for shards) and NAME.index, then removes
 * .prepare/. */
enum status folder_conclude(const struct folder *folder, const struct index *index);

/* Releases the lock. */
void folder_release(struct folder *folder);

#endif
