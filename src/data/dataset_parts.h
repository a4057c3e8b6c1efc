/* Internal interface of the files that open a dataset: dataset.c (the lists), dataset_open.c (fills the
 * lists), dataset_list.c (files under a directory), dataset_files.c (single files and class folders),
 * dataset_scan.c (shards without an index of --prepare) and dataset_choose.c (members). No other file
 * includes this header. */
#ifndef FDSL_DATA_DATASET_PARTS_H
#define FDSL_DATA_DATASET_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "data/dataset.h"
#include "data/index.h"

#define DATASET_WARNINGS_MAX 8                /* number of reported faults; further faults are only counted */
#define DATASET_UNKNOWN      UINT64_MAX       /* the number of lost samples is unknown */
#define DATASET_KEPT         (UINT64_MAX - 1) /* no sample is lost */

/* ---- dataset.c ---- */

/* Sets a message about the list of samples and returns STATUS_EXHAUSTED. */
enum status dataset_out_of_memory(void);

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

/* ---- dataset_list.c ---- */

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

/* Returns the number of images in the folders that are directly in the dataset's directory, by their names.
 * Leaves out folders that cannot be read. */
uint64_t dataset_count_images(const struct dataset *dataset);

/* ---- dataset_scan.c ---- */

/* Adds the samples of one shard. `listed` is the shard's entry in a wids index, or NULL. If the shard is
 * broken and dataset->skip is set, keeps the samples before the broken part. */
enum status dataset_scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *listed);

/* ---- dataset_files.c ---- */

/* Adds the samples of single files, and finds class folders: dataset->classes remains only if the folders in
 * the dataset's directory are classes. See dataset_files.c for the definition of a sample. */
enum status dataset_open_files(struct dataset *dataset);

/* Sets dataset->classes to the folders that the keys of all samples begin with, for INDEX_IMAGEFOLDER. */
enum status dataset_index_classes(struct dataset *dataset);

/* Returns the number of the class folder that a key begins with; LABEL_NONE if there are no class folders. */
int32_t dataset_class_of(const struct dataset *dataset, const char *key);

/* Returns whether the name of a file is that of an image: with --image or --member, of a file that they name.
 */
bool dataset_is_image(const struct dataset *dataset, const char *name);

/* ---- dataset_choose.c ---- */

/* Decides whether samples are reduced to their image and label, and sets dataset->chosen. They are reduced if
 * --image or --label was given, or if the first sample has an image, but never with --member. */
void dataset_decide(struct dataset *dataset);

/* Finds the image and the label of a sample, and removes the members that are not chosen from the sample.
 * Calling it again changes nothing. STATUS_FAILED if the sample has an extension twice, has more than
 * DATASET_MEMBERS_MAX members, or lacks a chosen member. */
enum status dataset_choose(struct dataset *dataset, struct dataset_sample *sample);

/* Removes from the list of files those that hold no chosen member. Only for samples in single files. */
void dataset_drop_files(struct dataset *dataset);

/* A sample whose class is known, so that it can be held out. `key` is a hash of its key. */
struct dataset_candidate {
    int32_t label;
    uint32_t number;
    uint64_t key;
};

/* Holds out dataset->test_share of the candidates of each class: allocates and sets dataset->held. Of n
 * candidates, takes round(n * test_share), but at least one and at most n - 1, and none if n is 1. Takes
 * those whose keys have the smallest hashes. The choice therefore depends neither on the order of the samples
 * nor on other classes, and a new sample replaces at most one of the held-out samples of its class. Sorts the
 * candidates. */
enum status dataset_hold_out(struct dataset *dataset, struct dataset_candidate *candidates, uint32_t count);

#endif
