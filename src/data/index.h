/* The index of a prepared dataset: where every member lies, how long it is, and its hash.
 *
 * NAME.index, beside the shards or the folders of files. It is text: lines of fields between tabs, the first
 * of which says what the line is; docs/formats.md shows one. The last line counts and hashes all before it,
 * so that an index that was cut or changed is refused. Also here: the indexes of DALI and of wids. */
#ifndef FDSL_DATA_INDEX_H
#define FDSL_DATA_INDEX_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/portable.h"
#include "core/status.h"

enum index_layout {
    INDEX_FILES, /* a file a member: FOLDER/KEY.EXTENSION, from its first byte on */
    INDEX_SHARDS /* tar files */
};

/* A shard, or a folder of files. */
struct index_unit {
    const char *name;      /* relative to the index's own folder */
    uint64_t bytes;        /* of the shard; of all files of the folder */
    const char *md5;       /* of the shard in hex; "" for folders, and in builds without libcrypto */
    uint64_t first, count; /* its samples */
};

struct index_member {
    const char *extension;
    uint64_t offset, size; /* of the data, in bytes */
    uint64_t hash;         /* XXH3-64 of the data */
};

struct index_sample {
    const char *key;
    uint64_t unit, first, count; /* `count` members from `first` on */
};

struct index {
    enum index_layout layout;
    const char *made; /* the options that it was made with, in one line */
    struct index_unit *units;
    struct index_sample *samples;
    struct index_member *members;
    uint64_t unit_count, sample_count, member_count;
    char *text; /* all strings point into it */
};

FDSL_C_BEGIN

/* Reads an index. The caller frees it, also after a failure. STATUS_FAILED with file, line and reason;
 * STATUS_UNAVAILABLE where the build has no xxHash. */
enum status index_read(const char *path, struct index *index);

/* The same from memory: takes `text`, of `size` bytes and one more that is zero, which must come from malloc.
 * Messages begin with the line. */
enum status index_parse(char *text, size_t size, struct index *index);
void index_free(struct index *index);

/* Whether an index of ours and one of DALI can hold this extension or key: both are lines of fields, and know
 * no quotes. STATUS_FAILED where it is empty, or has a blank or a control character in it. */
enum status index_check_name(const char *name);

/* The extensions that members of a data set have, each once, in the order in which they come first. */
#define INDEX_EXTENSIONS_MAX 64
struct index_extensions {
    const char *names[INDEX_EXTENSIONS_MAX]; /* the caller's */
    size_t count;
};

/* Adds an extension unless it is there. STATUS_FAILED where index_check_name() refuses it, or it is one too
 * many. */
enum status index_extensions_add(struct index_extensions *extensions, const char *extension);

/* The text of an index as it is written: begin, add lines, end, free. */
struct index_text {
    FILE *stream; /* in memory */
    char *text;
    size_t size;
};

enum status index_text_begin(struct index_text *text, enum index_layout layout, const char *made);
void index_text_add_unit(struct index_text *text, const struct index_unit *unit); /* before its samples */
enum status index_text_add_sample(FILE *stream, const char *key, const struct index_member *members,
                                  size_t count);
enum status index_text_add_all(struct index_text *text, const struct index *index,
                               uint64_t unit); /* and its samples */

/* Adds the last line and closes the stream: `text->text`, which comes from malloc, is the whole index.
 * STATUS_UNAVAILABLE without xxHash. */
enum status index_text_end(struct index_text *text);
void index_text_free(struct index_text *text);

/* Writes an index of `count` units of another, from `first` on, atomically. */
enum status index_save(const char *path, const struct index *index, uint64_t first, uint64_t count);

/* ---- DALI ---- */

/* The text of a shard's index, NAME.idx: a head that counts its samples, and one line for each. STATUS_FAILED
 * for a name that a line cannot hold. The caller frees `*text`, also after a failure. */
#define DALI_HEAD "v1.2 %" PRIu64 "\n"
enum status dali_add_sample(FILE *stream, const char *key, const struct index_member *members, size_t count);
enum status dali_format(const struct index *index, uint64_t unit, char **text, size_t *size);

/* ---- wids ---- */

struct wids_shard {
    char *url;    /* as in the file: relative to the index's own folder, or absolute */
    char md5[33]; /* in hex, or "" */
    uint64_t samples;
    uint64_t bytes; /* 0: the index does not say */
};

struct wids {
    char *name; /* "" where the file has none */
    struct wids_shard *shards;
    size_t count;
};

/* Reads the list of shards, in the order of the file. The caller frees it, also after a failure.
 * STATUS_FAILED with the reason; STATUS_UNAVAILABLE where the build has no jansson. */
enum status wids_parse(const char *text, size_t size, struct wids *wids);
enum status wids_read(const char *path, struct wids *wids);
void wids_free(struct wids *wids);

/* The text of an index, which the caller frees. */
enum status wids_format(const char *name, const struct index *index, char **text);

FDSL_C_END

#endif
