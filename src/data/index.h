/* The index of a prepared dataset. A sample consists of members, such as an image and its label. The index
 * has the offset, size and hash of every member.
 *
 * The index is the text file NAME.index next to the shards or folders. The fields of a line are separated by
 * tabs; the first field is the kind of line. docs/formats.md has an example. The last line holds counts and a
 * hash of all lines before it, so that an index that was truncated or changed is refused. This header also
 * declares the functions for the indexes of DALI and wids. */
#ifndef FDSL_DATA_INDEX_H
#define FDSL_DATA_INDEX_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/portable.h"
#include "core/status.h"

enum index_layout {
    INDEX_FILES,      /* one file per member: FOLDER/KEY.EXTENSION */
    INDEX_SHARDS,     /* tar files */
    INDEX_IMAGEFOLDER /* one file per sample, its image: CLASS/NUMBER.EXTENSION. The key is CLASS/NUMBER.
                         Units are ranges of samples; the name of each is INDEX_HERE. Images with masks have
                         the class folder INDEX_IMAGES, and the member "mask.EXTENSION" of
                         INDEX_IMAGES/NUMBER is INDEX_MASKS/NUMBER.EXTENSION */
};

#define INDEX_IMAGES "image"
#define INDEX_MASKS  "mask"

#define CLASSES_NAME "classes.txt" /* in a prepared set: the names of the classes, one per line */
#define SAMPLES_NAME "samples.csv" /* in a prepared set: the list of its samples */
#define DRAWN_NAME   "index.tsv"   /* beside drawn images: the table of --png */
#define INDEX_HERE   "."           /* the folder of the index */

/* A unit of a dataset: one shard, or one folder of files. */
struct index_unit {
    const char *name;      /* relative to the folder of the index */
    uint64_t bytes;        /* size of the shard, or of all files of the folder */
    const char *md5;       /* md5 of the shard in hex; "" for folders and in builds without libcrypto */
    uint64_t first, count; /* range of its samples in index->samples */
};

struct index_member {
    const char *extension;
    uint64_t offset, size; /* position of the data in its file, in bytes */
    uint64_t hash;         /* XXH3-64 of the data */
};

struct index_sample {
    const char *key;
    uint64_t unit;         /* number of its unit */
    uint64_t first, count; /* range of its members in index->members */
};

struct index {
    enum index_layout layout;
    const char *provenance; /* options that determine the dataset, in one line */
    struct index_unit *units;
    struct index_sample *samples;
    struct index_member *members;
    uint64_t unit_count, sample_count, member_count;
    char *text; /* the file's text; all strings point into it */
};

FDSL_C_BEGIN

/* Reads an index file. The caller frees the index, even after a failure. STATUS_FAILED with the file, the
 * reason and, for a fault in one line, the line number. STATUS_UNAVAILABLE in builds without xxHash. */
enum status index_read(const char *path, struct index *index);

/* Parses an index in memory, with the same errors as index_read(). Takes ownership of `text` (from malloc),
 * which has `size` bytes and a terminating zero. Messages about one line begin with its number. */
enum status index_parse(char *text, size_t size, struct index *index);
void index_free(struct index *index);

/* Checks that our index and DALI's index can store this extension or key. Neither format can quote names.
 * STATUS_FAILED if the name is empty or contains a blank or a control character. */
enum status index_check_name(const char *name);

/* The distinct extensions of a data set's members, in order of first appearance. */
#define INDEX_EXTENSIONS_MAX 64
struct index_extensions {
    const char *names[INDEX_EXTENSIONS_MAX]; /* owned by the caller */
    size_t count;
};

/* Adds an extension unless it is already listed. STATUS_FAILED if index_check_name() refuses it, if it
 * contains a slash, or if the list is full. */
enum status index_extensions_add(struct index_extensions *extensions, const char *extension);

/* Text of an index that is being written. Call order: begin, add units and samples, end, free. */
struct index_text {
    FILE *stream; /* memory stream */
    char *text;
    size_t size;
};

/* The functions with a status return STATUS_EXHAUSTED if memory runs out, STATUS_FAILED if index_check_name()
 * refuses a name. */
enum status index_text_begin(struct index_text *text, enum index_layout layout, const char *provenance);
void index_text_add_unit(struct index_text *text, const struct index_unit *unit); /* its samples follow */
/* Formats the path of a member's file, relative to the folder of its unit. Not for INDEX_SHARDS. Returns its
 * length, as snprintf() does. */
int index_member_path(enum index_layout layout, const char *key, const char *extension, char *path,
                      size_t size);

enum status index_text_add_sample(FILE *stream, const char *key, const struct index_member *members,
                                  size_t count); /* `stream` is text->stream or another stream */
enum status index_text_add_all(struct index_text *text, const struct index *index,
                               uint64_t unit); /* adds a unit and its samples */

/* Adds the last line and closes the stream. `text->text` (from malloc) is then the complete index.
 * STATUS_UNAVAILABLE in builds without xxHash. */
enum status index_text_end(struct index_text *text);
void index_text_free(struct index_text *text);

/* Writes an index file with `count` units of `index`, starting with unit `first`. The file is replaced
 * atomically. */
enum status index_save(const char *path, const struct index *index, uint64_t first, uint64_t count);

/* ---- DALI ---- */

/* DALI's index of a shard, SHARD.idx: a header with the number of samples, then one line per sample.
 * STATUS_FAILED if index_check_name() refuses a name. The caller frees `*text`, even after a failure. */
#define DALI_HEAD "v1.2 %" PRIu64 "\n"
enum status dali_add_sample(FILE *stream, const char *key, const struct index_member *members, size_t count);
enum status dali_format(const struct index *index, uint64_t unit, char **text, size_t *size);

/* ---- wids ---- */

struct wids_shard {
    char *url;    /* unchanged from the file: relative to the folder of the index, or absolute */
    char *digest; /* for digest_check_file(), or NULL */
    uint64_t samples;
    uint64_t bytes;          /* 0 if the index has no size */
    uint64_t unpacked_bytes; /* size of the unpacked copy of a compressed shard; 0: unknown */
};

struct wids {
    char *name; /* "" if the file has none */
    struct wids_shard *shards;
    size_t count;
};

/* Reads a wids index from memory; shards keep the order of the file. The caller frees `wids`,
 * even after a failure. STATUS_FAILED with the reason; STATUS_UNAVAILABLE in builds without jansson. */
enum status wids_parse(const char *text, size_t size, struct wids *wids);
void wids_free(struct wids *wids);

/* Formats a wids index of the data set `name`. The caller frees `*text`. STATUS_FAILED if a name is not UTF-8
 * or memory runs out, which jansson does not distinguish; STATUS_UNAVAILABLE in builds without jansson. */
enum status wids_format(const char *name, const struct index *index, char **text);

FDSL_C_END

#endif
