/* A directory as a list of samples. A sample consists of members, such as an image and its label; the list
 * has the position of every member. The list is built before any timing: from our index (the index of
 * --prepare) if there is one, otherwise from shard headers or file names. If only a wids index exists, only
 * the shards that it names are read. After the list is built, the plain reader (data/plain_reader.h) reads
 * the first and last bytes of every member; dataset_hash() reads all bytes. The reader's checksums are the
 * reference for the output of the variants. */
#ifndef FDSL_DATA_DATASET_H
#define FDSL_DATA_DATASET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "core/file.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/image.h"
#include "data/index.h"
#include "data/members.h"

#define DATASET_MEMBERS_MAX 64 /* largest number of members per sample */

/* A shard, or a file that holds one member. */
struct dataset_file {
    const char *name; /* relative to the directory */
    uint64_t bytes;
    struct file_identity identity; /* set when the file is opened for the first time */
    bool known;                    /* the file was opened to list its members; dataset_check() compares it */
    bool dangling;                 /* a symbolic link whose target does not exist: its samples are broken */
    const char *digest;            /* of the shard as it is stored, for digest_check_file(), or NULL */
    bool packed;   /* the shard is compressed: its unpacked copy, in the cache or in memory, is read in its
                      place (remote_cache.h). `bytes` is the size of the copy, and 0 until it is known;
                      `identity` is that of the shard */
    bool unpacked; /* the file was compressed, and its contents are in memory until the set is closed */
    int memory;    /* `unpacked` only: descriptor of the contents; owned */
    bool global;   /* the shard may contain a global pax header, which applies to all following members */
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
    int32_t class_folder;  /* number of the class folder, with dataset->labelled the label; LABEL_NONE if
                            * there is none */
    const struct member_rule *rule; /* how to read the label; NULL if there is no label */
};

/* Must not be moved while it is open. */
struct dataset {
    char *path;
    const char *option;             /* the option that names the data set, for messages */
    int directory;                  /* open file descriptor; -1 if `remote` is set */
    struct remote *remote;          /* the source of the files if `path` is a URL, otherwise NULL */
    struct remote_options *options; /* a copy of those of dataset_find(); owned */
    const char *url;                /* path or URL of dataset_find(), which alone uses it */
    const char *shard;              /* the only file to read, if `path` named a tar file or a wids index */
    bool shards;                    /* true: samples are stored in tar shards; false: in single files */
    struct image raw; /* members have no header, but are images of this shape; with 0 channels: they have */
    bool records;     /* the files have records, and `class_folder` of the samples is their label */
    struct mds
        *columns; /* the shards have columns (data/mds.h) instead of tar headers; owned; otherwise NULL */
    bool indexed; /* the list was read from our index */
    bool warns;   /* a warning about the folder was printed for this data set */
    bool hashed;  /* `whole` is set for all samples */
    bool compare; /* compare the digest of each shard with its index */
    bool skip;    /* skip unreadable samples with a warning */
    double test_share; /* share of each class that dataset_check() holds out for testing; 0: none */
    bool only_held;    /* dataset_check() keeps only the samples that are held out */
    bool (*wanted)(uint64_t number); /* which samples dataset_check() keeps, by their numbers; NULL: all */
    uint8_t *held;  /* owned; by a sample's number, also if it was skipped: 1 if it is held out; NULL: no
                       sample is */
    bool chosen;    /* the samples have only their image and label; other members are not read */
    bool masks;     /* samples have masks instead of labels: the member MASK_MEMBER is `label` of a sample.
                       dataset_find() sets it if a sample has this member, unless labels were chosen */
    bool multi_hot; /* samples have multi-hot labels instead of classes: MULTI_HOT_MEMBER is `label` of a
                       sample. dataset_find() sets it if the first sample has this member, unless labels were
                       chosen, or there are masks */
    uint32_t multi_hot_classes; /* number of classes of these labels; set by dataset_check() */
    struct members choice;
    bool named; /* each sample is a file, whose name was compared with a pattern: member 0 is its image */
    bool needs_labels; /* dataset_check() finds out whether labels are words (data/label_names.h) */
    bool labelled;     /* `class_folder` of the samples has the labels: their words were numbered, or a table
                          has them. Samples whose label could not be read keep their member */
    bool worded;       /* the labels are words, whose sorted list is `class_names` */
    const char **classes; /* sorted names of the class folders; NULL if the labels are not in folders */
    uint32_t class_count;
    const char *empty_class;  /* the first class folder without a sample */
    uint32_t empty_classes;   /* number of class folders of images without a sample */
    bool allow_empty;         /* class folders may be empty */
    bool incomplete;          /* samples without an image or a label, or with a dangling link, are kept */
    bool streamed;            /* messages about such samples advise --on-error mask */
    const char **class_names; /* from classes.txt beside an index or shards, or the words of `worded`; NULL if
                                 there is none */
    uint32_t class_name_count;
    struct dataset_file *files;
    struct dataset_member *members;
    struct dataset_sample *samples; /* samples of one shard are contiguous, in shard order */
    uint32_t file_count, member_count, sample_count;
    uint32_t listed;       /* number of samples of the data set, with the skipped ones */
    uint32_t *shard_first; /* index of each shard's first sample, plus one end entry; NULL without shards */
    uint64_t bytes, sample_bytes_max;
    uint64_t skipped;    /* number of skipped samples */
    bool uncounted;      /* an unknown number of samples was skipped in addition to `skipped`, because neither
                            our index nor a wids index gives a count */
    uint64_t faults;     /* number of faults in samples; with `skip`, the first few are reported; without
                            it, 1 if a fault ended dataset_open() */
    struct index index;  /* owns the keys, extensions and shard names if `indexed` */
    uint64_t kept_bytes; /* of compressed shards whose contents stay in memory */
    char **names;        /* owns all other names */
    size_t name_count;
};

/* Returns whether a cache folder is of use for the data set. */
static inline bool dataset_uses_cache(const struct dataset *dataset)
{
    return dataset->remote || (dataset->file_count > 0 && dataset->files[0].packed);
}

/* Returns whether an open file is a copy of the shard, so that its identity is not that of the shard. */
static inline bool dataset_copied(const struct dataset *dataset, uint32_t file)
{
    return dataset->remote || dataset->files[file].unpacked || dataset->files[file].packed;
}

/* Records what identifies an open file. */
static inline void dataset_know_file(struct dataset_file *file, const struct stat *info)
{
    file->bytes = (uint64_t)info->st_size;
    if (!file->packed)
        file->identity = file_identify(info);
    file->known = true;
}

FDSL_C_BEGIN

/* Returns whether each shard that is opened is read or unpacked into memory, as a whole: those of a URL, and
 * those that are compressed, without a cache folder. */
bool dataset_in_memory(const struct dataset *dataset);

/* What happens to a broken sample: --on-error. ON_ERROR_SKIP sets dataset->skip; ON_ERROR_MASK is for
 * streams. */
enum on_error { ON_ERROR_FAIL, ON_ERROR_SKIP, ON_ERROR_MASK };

/* Values of --on-error, in enum order, NULL-terminated: all of them, and those without "mask". */
extern const char *const on_error_names[];
extern const char *const dataset_on_error[];

/* Adds the advice of --on-error skip to the message of a fault that it omits. Returns `status`. */
enum status dataset_advise_skip(enum status status);

/* Refuses --on-error skip for a stream, which `stream` names, with STATUS_USAGE. */
enum status dataset_refuse_skip(const char *stream);

/* Appends to the message of `status` that --on-error mask gives such samples weight 0. Returns `status`. */
enum status dataset_advise_mask(enum status status);

/* Returns STATUS_FAILED if dataset->options->cancel is set. Loops over files and samples call this function.
 */
enum status dataset_check_cancelled(const struct dataset *dataset);

/* Releases everything that dataset_open() allocated. */
void dataset_close(struct dataset *dataset);

/* Opens dataset->files[file] read-only, with additional open(2) flags. If the data set is remote, reads the
 * whole file first; the flags then apply only to files of a cache. Sets `*fd` to the descriptor. On failure
 * sets `*fd` to -1, and errno: ESPIPE or EISDIR means that the file is not a regular file. STATUS_FAILED if
 * the file cannot be read; another status, such as STATUS_EXHAUSTED, if the file is not the cause. */
enum status dataset_file_open(const struct dataset *dataset, uint32_t file, int flags, int *fd);

/* Opens a file like dataset_file_open() without flags. If the data set is remote, `stopped` is for
 * remote_fd(). */
enum status dataset_file_await(const struct dataset *dataset, uint32_t file, const bool *stopped, int *fd);

/* Compares the digest of a shard, as it is stored, with `digest`, that of its index. `fd` is the open shard,
 * which may be unpacked. */
enum status dataset_check_digest(const struct dataset *dataset, uint32_t file, int fd, const char *digest);

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

/* If a name is a symbolic link whose target does not exist, sets the message that says so, and returns true.
 */
bool dataset_dangles(const struct dataset *dataset, const char *name);

/* Returns STATUS_FAILED, with the link, if a file of a sample is a dangling link. */
enum status dataset_check_links(const struct dataset *dataset, const struct dataset_sample *sample);

/* Returns the label of a sample. `bytes` holds the `size` bytes of the member that is the label, if there is
 * one. STATUS_FAILED if the sample has no label, or if the label is not a class from 0 to `classes` - 1. If
 * `classes` is 0, any integer is accepted. With masks or multi-hot labels, the label is 0, and the bytes are
 * not used. Thread safe. */
enum status dataset_label(const struct dataset *dataset, const struct dataset_sample *sample,
                          const uint8_t *bytes, uint64_t size, uint32_t classes, int32_t *label);

/* Names a sample in `text` of `size` bytes: the file, in shards the offset of the member, and the key. */
void dataset_name(const struct dataset *dataset, const struct dataset_sample *sample,
                  const struct dataset_member *member, char *text, size_t size);

/* Prepends dataset_name() to the message. Returns `status`. Does nothing for STATUS_OK. */
enum status dataset_at(const struct dataset *dataset, const struct dataset_sample *sample,
                       const struct dataset_member *member, enum status status);

/* Returns whether the members of a sample look like several samples; see members_look_split(). */
bool dataset_looks_split(const struct dataset *dataset, const struct dataset_sample *sample);

/* Sets the message that a sample lacks a member for an option; see members_lack(). With dataset->masks, the
 * message for the list of labels is about the mask. */
enum status dataset_lacks(const struct dataset *dataset, const struct dataset_sample *sample,
                          const struct member_list *list, const char *option);

/* ---- Opening ---- */

/* Opens a directory, or a URL (data/remote.h), and lists its samples. `choice` selects the members of each
 * sample; NULL selects all. `options` are for URLs; NULL selects their defaults.
 *
 * If `skip` is false, returns STATUS_FAILED at the first broken sample or shard, with a message that names
 * the shard and the offset. If `skip` is true, skips broken samples and shards with a warning, and counts
 * them in dataset->skipped. If the directory has our index, `skip` also makes this function compare every
 * byte and every shard header with the index.
 *
 * STATUS_USAGE if the directory cannot be opened, is incomplete, contains no samples or contains two indexes.
 * STATUS_FAILED, even if `skip` is true, if a wids index at a URL names a shard on another server or outside
 * its folder. The caller closes the dataset, even after a failure. */
enum status dataset_open(const char *path, bool skip, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset);

/* The two halves of dataset_open(): the first lists the samples, the second reads and checks them. `url` is
 * the path or the URL. If `compare` is set, the first also compares the md5 of each shard with the wids
 * index. If they differ, it returns STATUS_FAILED, even if `skip` is true. */
enum status dataset_find(const char *path, bool skip, bool compare, const struct members *choice,
                         const struct remote_options *options, struct dataset *dataset);
enum status dataset_check(const char *url, struct dataset *dataset);

/* ---- Files of records ----
 * A data set may consist of a few files with records of equal size. Each record is an image, whose values are
 * stored without a header (dataset->raw). Such a data set has `shards` set, since a file has many samples.
 * The labels are read when the files are opened; they are `class_folder` of the samples. */

#define RECORD_EXTENSION "raw" /* of the only member of a sample */

struct record_format {
    const char *name;           /* for messages */
    const char *source;         /* of --prepare, for messages */
    const char *const *sets[2]; /* names of the files of a training set and of a test set; NULL-terminated */
    /* Adds the files of a set, of which at least one exists, and their samples. Sets dataset->raw. */
    enum status (*add)(struct dataset *dataset, const struct record_format *format,
                       const char *const files[]);
    const char *lacks[2]; /* message if a training set or a test set has none of its files */
    uint32_t classes;
    int kind;                           /* for add() */
    const struct record_format *coarse; /* the same files with coarse labels; NULL: they have one label */
};

/* Returns the format of the files in a folder, or NULL if there are none of a known format. */
const struct record_format *record_format_find(const char *folder);

/* Does what dataset_find() does, for the training set or the test set in a folder with files of records.
 * STATUS_USAGE if there are none; STATUS_FAILED, with the name, if a file is broken. */
enum status dataset_find_records(const char *folder, const struct record_format *format, bool test_set,
                                 const struct members *choice, struct dataset *dataset);

/* Compares the names of the classes of two data sets (dataset_class_names()), after dataset_find().
 * STATUS_USAGE if equal labels mean different classes. Two sets of class folders must have the same folders;
 * otherwise, one list of names may be longer than the other. */
enum status dataset_same_classes(struct dataset *train, struct dataset *test);

/* Returns the names of the classes after dataset_check(): those of classes.txt beside the index or the
 * shards, the words that are labels, or the class folders. Sets `*count`. NULL and 0 if the classes have no
 * names, or if labels are read from a member other than "cls". */
const char *const *dataset_class_names(const struct dataset *dataset, uint32_t *count);

/* Reads every byte with the plain reader and fills `whole` of all samples and members. Does nothing if
 * dataset->hashed is set. A sample is broken if a hash differs from our index, or if a shard header names
 * another member than our index. If dataset->skip is set, skips broken samples; otherwise returns
 * STATUS_FAILED with the shard and the offset. In builds with libcrypto, also compares each shard's md5 with
 * the wids index; returns STATUS_FAILED if they differ, even if dataset->skip is set. */
enum status dataset_hash(struct dataset *dataset);

/* ---- Filling the list ----
 * Only for dataset.c, dataset_list.c (indexes and shards), dataset_files.c (single files) and
 * labelled_files.c. */

/* Finds the image and the label of a sample, and removes the members that are not chosen from the sample.
 * Calling it again changes nothing. STATUS_FAILED if the sample has an extension twice, has more than
 * DATASET_MEMBERS_MAX members, or lacks a chosen member (unless dataset->incomplete is set). */
enum status dataset_choose_members(struct dataset *dataset, struct dataset_sample *sample);

/* Requests the file of sample `i`, and those after it, if the data set is remote, and sample `i` is the first
 * of its shard. `*shard` and `*next` are at first 0. For loops over all samples. */
void dataset_ask_sample(const struct dataset *dataset, uint32_t i, uint32_t *shard, uint32_t *next);

/* Finds out what kind of data set the folder or URL is, and adds its samples. */
enum status dataset_list_samples(struct dataset *dataset);

#define DATASET_UNKNOWN UINT64_MAX       /* the number of lost samples is unknown */
#define DATASET_KEPT    (UINT64_MAX - 1) /* no sample is lost */

/* ALLOCATED() for the list of samples. */
#define DATASET_ALLOCATED(room) ALLOCATED(room, "out of memory for the list of samples")

/* Makes room for one more sample or file in an array, like array_grow(). */
enum status dataset_grow(void *array, uint32_t count, size_t size);

/* Copies a name. The copy lives as long as the dataset. */
enum status dataset_keep_name(struct dataset *dataset, const char *name, size_t length, const char **kept);

/* Append to the lists of the dataset. A new sample has no members. The members that are added next belong to
 * this sample, and the caller increments sample->members for each. */
enum status dataset_add_file(struct dataset *dataset, const char *name, uint64_t bytes);
enum status dataset_add_member(struct dataset *dataset, struct dataset_member member);
enum status dataset_add_sample(struct dataset *dataset, const char *key);

/* Handles a failure whose message is already set. `samples` is the number of samples that this failure
 * affects, DATASET_UNKNOWN or DATASET_KEPT. If dataset->skip is set and `status` is STATUS_FAILED, prints the
 * message as a warning (at most DATASET_WARNINGS_MAX times), counts these samples as skipped and returns
 * STATUS_OK. Otherwise returns `status`: a failure with any other status is not the fault of a sample. */
enum status dataset_skip(struct dataset *dataset, enum status status, uint64_t samples);

/* Returns whether warnings about the contents of the data set's folder are printed. A run with lists of
 * options opens one folder several times, but warns only the first time. */
bool dataset_warns(struct dataset *dataset);

struct dataset_names {
    const char **items; /* relative to the dataset's directory; they live as long as the dataset */
    uint32_t count;
    const char *folder; /* without `deep`: the first folder in the directory, or NULL */
    uint32_t hidden;    /* with `deep`: folders and images whose names begin with a dot */
    const char *first_hidden;
};

/* Adds the names of the regular files in the dataset's directory, in any order. If `deep` is set, includes
 * the files in all subfolders, adds the folders in the directory to dataset->classes, and also lists pipes
 * and devices whose names are those of images, so that opening them fails. Ignores names that begin with a
 * dot. Has only one folder open at a time, however deep the folders are. The caller frees names->items, even
 * after a failure. STATUS_USAGE if a link leads back to a parent folder. */
enum status dataset_list(struct dataset *dataset, bool deep, struct dataset_names *names);

/* A sample whose class is known, so that it can be held out. `key` is a hash of its key. */
struct dataset_candidate {
    int32_t label;
    uint32_t number;
    uint64_t key;
};

/* Holds out a share of the candidates of each class: sets held[number] to 1. Of n candidates, takes
 * round(n * share), but at least one and at most n - 1, and none if n is 1. Takes those whose keys have the
 * smallest hashes. The choice therefore depends neither on the order of the samples nor on other classes, and
 * a new sample replaces at most one of the held-out samples of its class. Sorts the candidates. */
void dataset_hold_out(struct dataset_candidate *candidates, uint32_t count, double share, uint8_t *held);

/* Returns the number of images in the folders that are directly in the dataset's directory, by their names.
 * Leaves out folders that cannot be read. */
uint64_t dataset_count_images(const struct dataset *dataset);

/* Adds the samples of single files, and finds class folders: dataset->classes remains only if the folders in
 * the dataset's directory are classes. See dataset_files.c for the definition of a sample. */
enum status dataset_open_files(struct dataset *dataset);

/* Adds the files of a training set or of a test set, and their samples. */
enum status dataset_add_records(struct dataset *dataset, const struct record_format *format, bool test_set);

/* Sets dataset->classes to the folders that the keys of all samples begin with, for INDEX_IMAGEFOLDER. */
enum status dataset_index_classes(struct dataset *dataset);

/* Returns the number of the class folder that a key begins with; LABEL_NONE if there are no class folders. */
int32_t dataset_class_of(const struct dataset *dataset, const char *key);

/* Returns whether the name of a file is that of an image: with --image or --member, of a file that they name.
 */
bool dataset_is_image(const struct dataset *dataset, const char *name);

FDSL_C_END

#endif
