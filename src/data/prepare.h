/* --prepare DIR: writes the samples of a source as a dataset of shards or single files. --verify-set DIR
 * checks such a set. */
#ifndef FDSL_DATA_PREPARE_H
#define FDSL_DATA_PREPARE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/file.h"
#include "core/options.h"
#include "core/status.h"
#include "data/index.h"
#include "data/source.h"

/* Executes a command line that has --prepare. With several ranks, each writes a part of the units; the bytes
 * do not depend on the number of ranks. Finished units (shards, or folders of files) are kept, so the same
 * command continues a run that failed or was killed. After a failure, status_text() is a one-line message.
 *
 * `is_option` returns whether the program has an option of that name outside --prepare. Error messages use
 * it. */
enum status prepare_run(const struct config *config, bool (*is_option)(const char *name));

/* Returns whether --prepare or one of its sample sources has an option of that name. A workload's options do
 * not count, even if a source also accepts them. */
bool prepare_has_option(const char *name);

/* Prints the options of --prepare and of every sample source. */
void prepare_help(FILE *stream);

/* ---- --verify-set DIR: checks a prepared set of embeddings against its hashes ---- */

/* Reads all files of a set that --prepare --from embeddings wrote, and compares them with the hashes in its
 * index. Compares samples.csv with the index, and finds files of tensors that the index does not name. Prints
 * one line per bad file, with the rows that differ from their hashes, and a summary. STATUS_WRONG if a file
 * is missing, differs or does not belong to the set; STATUS_USAGE if the folder has no such set;
 * STATUS_FAILED if its index was changed; STATUS_UNAVAILABLE in builds without xxHash. */
enum status verify_set_run(const char *folder);

/* ---- A prepared set (prepared_set.c): its units, samples.csv, and its folder while --prepare writes it ----
 */

/* ---- A unit: a shard, or a folder of files ---- */

struct unit_writer {
    enum index_layout layout;
    const char *folder, *name; /* folder of the dataset, name of the unit in it; owned by the caller */
    int key_digits;
    const char *const *class_folders; /* INDEX_IMAGEFOLDER: names of the class folders; owned by the caller */
    struct file_writer file;          /* the shard */
    uint8_t *buffer;                  /* data not yet written to the shard: `buffered` bytes */
    size_t buffered;
    uint64_t bytes, samples; /* written so far */
    void *md5;               /* of the shard's bytes, in builds with libcrypto */
    FILE *lines, *dali;      /* lines of the dataset's index and of the DALI index, in memory */
    char *lines_text, *dali_text;
    size_t lines_size, dali_size;
};

/* Starts a shard under a temporary name. For a folder of files, creates the folder and removes temporary
 * files of killed runs from it. The struct must not be moved. The caller must finally call unit_abandon(),
 * even after a failure. */
enum status unit_begin(struct unit_writer *writer, enum index_layout layout, const char *folder,
                       const char *name, int key_digits, const char *const *class_folders);

/* Adds `count` samples, numbered from `first` on. */
enum status unit_add(struct unit_writer *writer, uint64_t first, uint64_t count,
                     const struct source_sample *samples);

/* Finishes the unit. Writes the shard's DALI index, renames the shard to its final name, and then writes the
 * unit's part of the index to `part_path`. A unit whose part exists is therefore complete. */
enum status unit_end(struct unit_writer *writer, const char *provenance, const char *part_path);

/* Frees the writer in any state and removes an unfinished shard. */
void unit_abandon(struct unit_writer *writer);

/* Builds "folder/name". STATUS_USAGE if the path is too long. */
enum status unit_path(char path[PATH_MAX], const char *folder, const char *name);

/* ---- samples.csv: the list of the samples ---- */

/* Formats samples.csv: a header record, then one record per sample of the index. Sample i of the index is
 * sample i of the source. `state` is the state of the open source. The format is CSV as in RFC 4180. The
 * caller frees `*text`, even after a failure. */
enum status samples_format(const struct source *source, const void *state, const struct index *index,
                           char **text, size_t *size);

/* Writes FOLDER/samples.csv. */
enum status samples_write(const char *folder, const struct source *source, const void *state,
                          const struct index *index);

/* ---- The folder ----
 *
 * The folder of a dataset that is being prepared. These functions lock it, find the finished units and
 * complete the dataset. A unit is a shard, or a folder of files.
 *
 * During --prepare, FOLDER/.prepare/ holds the file `spec` with the options of the dataset. It also holds one
 * part of the index per finished unit. When all units are finished, the parts are merged into NAME.index and
 * .prepare/ is removed. Therefore, NAME.index exists only if the dataset is complete, and a part exists
 * only if its unit is complete. */

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

/* Formats the name of a unit: "NAME-000003.tar" for a shard, "not-imagefolder/003" for a folder of files. */
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
