/* A directory as samples: what it holds and where every member lies. Found out before any timing, from our
 * index where there is one, else from the headers of the shards or the names of the files; then a plain
 * reader looks at every sample once, so that what the variants deliver can be compared with it. */
#ifndef FDSL_DATA_DATASET_H
#define FDSL_DATA_DATASET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/index.h"

#define DATASET_MEMBERS_MAX 64 /* of a sample: more extensions than any data set has */

/* A shard, or a file of one member. */
struct dataset_file {
    const char *name; /* relative to the directory */
    uint64_t bytes;
    const char *md5; /* as a list of wids tells it; NULL: nobody does */
    bool global;     /* a pax header in it may hold for all that follows */
};

struct dataset_member {
    const char *extension;
    uint64_t offset, size; /* of its data in the file */
    uint64_t edges;        /* checksum_edges() of it */
    uint64_t whole;        /* checksum_whole() of it; from the index, and from dataset_hash() */
    uint32_t file;
};

struct dataset_sample {
    const char *key;
    uint64_t key_hash;     /* checksum_key() */
    uint64_t edges, whole; /* checksum_sample() of its members, likewise */
    uint64_t bytes;        /* of its members together */
    uint32_t member, members;
};

struct dataset {
    char *path;
    int directory; /* open */
    bool shards, indexed;
    bool hashed; /* `whole` is known of all samples */
    bool skip;   /* what cannot be read is left out with a warning */
    struct dataset_file *files;
    struct dataset_member *members;
    struct dataset_sample *samples; /* those of a shard stand together, in its order */
    uint32_t file_count, member_count, sample_count;
    uint32_t *shard_first; /* the first sample of each file, and behind the last; NULL without shards */
    uint64_t bytes, sample_bytes_max;
    uint64_t skipped;   /* samples left out */
    bool uncounted;     /* and more, behind a break that hides how many: no index and no list of wids tells */
    uint64_t faults;    /* reasons for that: the first few were warned about */
    struct index index; /* owns names where `indexed` */
    char **names;       /* owns them else */
    size_t name_count, name_capacity;
    uint32_t file_capacity, member_capacity, sample_capacity; /* while it grows */
};

FDSL_C_BEGIN

/* Releases what dataset_open() filled. */
void dataset_close(struct dataset *dataset);

/* Opens file number `file`, read only, with further open flags. Negative, with a message and errno, when it
 * cannot: ESPIPE and EISDIR where it is no regular file. */
int dataset_file_open(const struct dataset *dataset, uint32_t file, int flags);

FDSL_C_END

#endif
