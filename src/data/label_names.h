/* Labels that are known once a data set is open: the numbers of words, and the labels of a table.
 *
 * Words: if the labels of a data set (the members or JSON fields that --label names) are words instead of
 * integers, the label of a sample is the number of its word in the sorted list of all words. classes.txt
 * beside the shards, if there is one, is this list instead. The list is sorted as class folders are.
 *
 * A table (--labels FILE) is a CSV file. Its first line names the columns, of which `name` and `label` are
 * read. A name is the key of a sample or its file, in shards also SHARD/KEY. If a label is a word, all of
 * them are, and the words of the whole file are numbered. */
#ifndef FDSL_DATA_LABEL_NAMES_H
#define FDSL_DATA_LABEL_NAMES_H

#include "data/dataset.h"
#include "data/plain_reader.h"

FDSL_C_BEGIN

/* A reader that continues where another loop over the samples stopped, so that a shard at a URL is requested
 * only once. The caller sets `plain` as it says, zeroes `next`, and calls plain_close(). */
struct label_reading {
    struct plain plain;
    uint32_t next; /* as for dataset_ask_sample() */
};

/* Reads the table dataset->choice.labels_file, if it is set. Otherwise, if dataset->needs_labels is set,
 * reads the first label; if it is a word, reads all labels. Sets dataset->labelled, `worded`, the names of
 * the classes and the labels of all samples. Does nothing for other data sets. Labels that cannot be read are
 * left to the reader of the sample. STATUS_FAILED, with the samples or the line, if words and integers are
 * mixed, if a word is not in classes.txt, or if the table is broken, has a name twice or has one name for
 * several samples. */
enum status label_names_find(struct dataset *dataset, struct label_reading *reading);

/* Chooses the label of a sample, whose number of members is `count`, if label_names_find() found it. */
void label_names_apply(const struct dataset *dataset, struct dataset_sample *sample, uint32_t count);

/* Gives the labels of `test` the numbers of the words of `train`, so that a test set may lack classes. Both
 * are open, and `test` has not been read. STATUS_USAGE if `test` has words that `train` lacks, or if only one
 * of them has words. Does nothing if neither has words. */
enum status label_names_follow(struct dataset *test, const struct dataset *train);

FDSL_C_END

#endif
