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
    const char *folder, *name; /* the dataset's folder, and the unit's name in it; owned by the caller */
    int key_digits;
    struct file_writer file; /* the shard */
    uint8_t *buffer;         /* data not yet written to the shard */
    size_t buffered;
    uint64_t bytes, samples; /* written so far */
    void *md5;               /* of the shard's bytes, in builds with libcrypto */
    FILE *lines, *dali;      /* lines of our index and of DALI's, in memory */
    char *lines_text, *dali_text;
    size_t lines_size, dali_size;
};

/* Formats the key of a sample: its number in decimal with leading zeros. */
void unit_key(char key[32], int digits, uint64_t number);

/* Starts a shard under a temporary name, or creates the folder and removes leftovers of a killed run. The
 * writer must not be moved. After a failure of this or the next functions, call unit_abandon(). */
enum status unit_begin(struct unit_writer *writer, enum index_layout layout, const char *folder,
                       const char *name, int key_digits);

/* Adds `count` samples; the first has number `first`. */
enum status unit_add(struct unit_writer *writer, uint64_t first, uint64_t count,
                     const struct source_sample *samples);

/* Finishes the unit. Renames the shard to its final name, after its DALI index, then writes the unit's part
 * of the index to `part_path`. If the part exists, the unit is complete. */
enum status unit_end(struct unit_writer *writer, const char *provenance, const char *part_path);

/* Frees the writer in any state and removes an unfinished shard. */
void unit_abandon(struct unit_writer *writer);

/* Removes temporary files of killed runs from a folder. */
void unit_sweep(const char *folder);

/* Builds "folder/name". STATUS_USAGE if it is too long. */
enum status unit_path(char path[PATH_MAX], const char *folder, const char *name);

#endif
