/* A directory as a list of samples. A sample consists of members, such as an image and its label; the list
 * has the position of every member. The list is built before any timing: from our index (the index of
 * --prepare) if there is one, otherwise from shard headers or file names. If only a wids index exists, only
 * the shards that it names are read. After the list is built, the plain reader (data/plain.h) reads the first
 * and last bytes of every member; dataset_hash() reads all bytes. The reader's checksums are the reference
 * for the output of the variants. */
#ifndef FDSL_DATA_DATASET_H
#define FDSL_DATA_DATASET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/index.h"
#include "data/members.h"

#define DATASET_MEMBERS_MAX 64 /* largest number of members per sample */

/* A shard, or a file that holds one member. */
struct dataset_file {
    const char *name; /* relative to the directory */
    uint64_t bytes;
    const char *md5; /* from a wids index, or NULL */
    bool global;     /* the shard may contain a global pax header, which applies to all following members */
};

struct dataset_member {
    const char *extension;
    uint64_t offset, size; /* position of the data in the file, in bytes */
    uint64_t headers;      /* with our index: offset where the member's headers begin in the shard;
                            * if `linked`: offset after them */
    uint64_t edges;        /* checksum_edges() of the data */
    uint64_t whole;        /* checksum_whole() of the data; set from the index or by dataset_hash() */
    uint32_t file;         /* index in dataset->files */
    bool linked; /* a hard link in a shard: `offset` is that of an earlier member, which has the data */
};

struct dataset_sample {
    const char *key;
    uint64_t key_hash;     /* checksum_key() */
    uint64_t edges, whole; /* checksum_sample() over the members' `edges`, and over their `whole` */
    uint64_t bytes;        /* total over the members */
    uint32_t member;       /* index of the first member in dataset->members */
    uint32_t members;      /* number of members, stored consecutively */
    uint32_t image, label; /* number of the member that is the image, or the label; `members` if there is
                            * none */
    uint32_t number;       /* among all samples of the data set, also those that were skipped */
    int32_t class_folder;  /* number of the class folder; LABEL_NONE if there are no class folders */
    const struct member_rule *rule; /* how to read the label; NULL if there is no label */
};

/* Must not be moved while it is open. */
struct dataset {
    char *path;
    int directory;                        /* open file descriptor; -1 if `remote` is set */
    struct remote *remote;                /* the source of the files if `path` is a URL, otherwise NULL */
    const struct remote_options *options; /* of dataset_find(), and its path or URL */
    const char *url;
    const char *shard; /* the only file to read, if `path` named a tar file or a wids index */
    bool shards;       /* true: samples are stored in tar shards; false: in single files */
    bool indexed;      /* the list was read from our index */
    bool warns;        /* a warning about the folder was printed for this data set */
    bool hashed;       /* `whole` is set for all samples */
    bool compare;      /* compare the md5 of each shard with the wids index */
    bool skip;         /* skip unreadable samples with a warning */
    double test_share; /* share of each class that dataset_check() holds out for testing; 0: none */
    bool only_held;    /* dataset_check() keeps only the samples that are held out */
    bool (*wanted)(uint64_t number); /* which samples dataset_check() keeps, by their numbers; NULL: all */
    uint8_t *held; /* owned; by a sample's number, also if it was skipped: 1 if it is held out; NULL: no
                      sample is */
    bool chosen;   /* the samples have only their image and label; other members are not read */
    struct members choice;
    const char **classes; /* sorted names of the class folders; NULL if the labels are not in folders */
    uint32_t class_count;
    const char *empty_class;  /* the first class folder without a sample */
    uint32_t empty_classes;   /* number of class folders of images without a sample */
    bool allow_empty;         /* class folders may be empty */
    const char **class_names; /* from classes.txt beside an index or shards; NULL if there is none */
    uint32_t class_name_count;
    struct dataset_file *files;
    struct dataset_member *members;
    struct dataset_sample *samples; /* samples of one shard are contiguous, in shard order */
    uint32_t file_count, member_count, sample_count;
    uint32_t listed;       /* number of samples of the data set, with the skipped ones */
    uint32_t *shard_first; /* index of each shard's first sample, plus one end entry; NULL without shards */
    uint64_t bytes, sample_bytes_max;
    uint64_t skipped;   /* number of skipped samples */
    bool uncounted;     /* an unknown number of samples was skipped in addition to `skipped`, because neither
                           our index nor a wids index gives a count */
    uint64_t faults;    /* number of faults in samples; with `skip`, the first few are reported; without
                           it, 1 if a fault ended dataset_open() */
    struct index index; /* owns the keys, extensions and shard names if `indexed` */
    char **names;       /* owns all other names */
    size_t name_count;
};

FDSL_C_BEGIN

/* Values of --on-error, NULL-terminated. The second one, "skip", sets dataset->skip. */
extern const char *const dataset_on_error[];

/* Adds the advice of --on-error skip to the message of a fault that it omits. Returns `status`. */
enum status dataset_advise_skip(enum status status);

/* Releases everything that dataset_open() allocated. */
void dataset_close(struct dataset *dataset);

/* Opens dataset->files[file] read-only, with additional open(2) flags. If the data set is remote, reads the
 * whole file first; the flags then apply only to files of a cache. Sets `*fd` to the descriptor. On failure
 * sets `*fd` to -1, and errno: ESPIPE or EISDIR means that the file is not a regular file. STATUS_FAILED if
 * the file cannot be read; another status, such as STATUS_EXHAUSTED, if the file is not the cause. */
enum status dataset_file_open(const struct dataset *dataset, uint32_t file, int flags, int *fd);

/* Closes a descriptor of dataset_file_open(). If the file is still mapped, use close() instead. */
void dataset_file_close(const struct dataset *dataset, int fd);

/* Sets the range of bytes in a shard that holds `count` consecutive samples. Linked members do not count; the
 * range is empty if there are no others. */
void dataset_range(const struct dataset *dataset, uint32_t first, uint32_t count, uint64_t *begin,
                   uint64_t *end);

/* Announces that dataset->files[file] will be opened soon. Asks Linux to read a local file into the page
 * cache. Starts to read a file at a URL, unless the data set has a cache folder. Does not wait, and reports
 * no error. */
void dataset_file_ask(const struct dataset *dataset, uint32_t file);

/* Requests shard `file` of a remote data set before it is opened, so that several shards are transferred at
 * the same time. Shards are requested and opened in ascending order. `reached` is the first shard that has
 * not been opened; `*next`, at first 0, is the first that has not been requested. Returns false if enough
 * shards are requested, or if the data set is not remote. Does not wait for a shard. */
bool dataset_ask_ahead(const struct dataset *dataset, uint32_t reached, uint32_t file, uint32_t *next);

/* Returns the label of a sample. `bytes` holds the `size` bytes of the member that is the label, if there is
 * one. STATUS_FAILED if the sample has no label, or if the label is not a class from 0 to `classes` - 1. If
 * `classes` is 0, any integer is accepted. Thread safe. */
enum status dataset_label(const struct dataset *dataset, const struct dataset_sample *sample,
                          const uint8_t *bytes, uint64_t size, uint32_t classes, int32_t *label);

/* Prepends the file, in shards the offset of the member, and the key of the sample to the message. Returns
 * `status`. */
enum status dataset_at(const struct dataset *dataset, const struct dataset_sample *sample,
                       const struct dataset_member *member, enum status status);

/* Returns whether the members of a sample look like several samples; see members_look_split(). */
bool dataset_looks_split(const struct dataset *dataset, const struct dataset_sample *sample);

/* Sets the message that a sample lacks a member for an option; see members_lack(). */
enum status dataset_lacks(const struct dataset *dataset, const struct dataset_sample *sample,
                          const struct member_list *list, const char *option);

FDSL_C_END

#endif
