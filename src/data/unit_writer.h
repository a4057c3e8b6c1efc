/* Writes one unit of a dataset: a shard, or a folder of files. */
#ifndef FDSL_DATA_UNIT_WRITER_H
#define FDSL_DATA_UNIT_WRITER_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "core/file.h"
#include "core/status.h"
#include "data/index.h"
#include "data/source.h"

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

/* Removes temporary files of killed runs from a folder. */
void unit_sweep(const char *folder);

/* Builds "folder/name". STATUS_USAGE if the path is too long. */
enum status unit_path(char path[PATH_MAX], const char *folder, const char *name);

#endif
