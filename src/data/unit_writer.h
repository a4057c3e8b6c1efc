/* Writes one place of a dataset: a shard, or a folder of files. */
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
    const char *folder, *name; /* the dataset's folder, and the unit in it; the caller's */
    int key_digits;
    struct file_writer file; /* the shard */
    uint8_t *buffer;         /* what it has not got yet */
    size_t buffered;
    uint64_t bytes, samples; /* so far */
    void *md5;               /* of the shard's bytes, where the build has libcrypto */
    FILE *lines, *dali;      /* of the index and of DALI's, in memory */
    char *lines_text, *dali_text;
    size_t lines_size, dali_size;
};

/* The key of a sample: its number in decimal digits, zeros before it. */
void unit_key(char key[32], int digits, uint64_t number);

/* Begins a shard under a temporary name, or makes the folder and removes what a killed run left in it. The
 * writer must stay where it is. After a failure of any of these, unit_abandon(). */
enum status unit_begin(struct unit_writer *writer, enum index_layout layout, const char *folder,
                       const char *name, int key_digits);

/* Adds samples number `first` and on. */
enum status unit_add(struct unit_writer *writer, uint64_t first, uint64_t count,
                     const struct source_sample *samples);

/* Puts the shard in place, its DALI index before it, and then the part of the index that tells of this unit,
 * an index of one unit, at `part_path`: where that is, the rest is whole. */
enum status unit_end(struct unit_writer *writer, const char *made, const char *part_path);

/* Frees what the writer holds, in any state, and removes an unfinished shard. */
void unit_abandon(struct unit_writer *writer);

/* Removes the temporary files of killed runs from a folder. */
void unit_sweep(const char *folder);

/* "folder/name", checked for length. */
enum status unit_path(char path[PATH_MAX], const char *folder, const char *name);

#endif
