/* --prepare DIR: writes the samples of a source as a dataset of shards or single files. */
#ifndef FDSL_DATA_PREPARE_H
#define FDSL_DATA_PREPARE_H

#include <stdbool.h>
#include <stdio.h>

#include "core/options.h"
#include "core/status.h"

/* Executes a command line that has --prepare. With several ranks, each writes a part of the units; the bytes
 * do not depend on the number of ranks. Finished units (shards, or folders of files) are kept, so the same
 * command continues a run that failed or was killed. After a failure, status_text() is a one-line message.
 *
 * `is_option` returns whether the program has an option of that name outside --prepare. Error messages use
 * it. */
enum status prepare_run(const struct config *config, bool (*is_option)(const char *name));

/* Returns whether --prepare or one of its sample sources has an option of that name. A workload's options do
 * not count, even if a source also accepts them. */
bool prepare_has_option(const char *name);

/* Prints the options of --prepare and of every sample source. */
void prepare_help(FILE *stream);

/* ---- --verify-set DIR: checks a prepared set of embeddings against its hashes ---- */

/* Reads all files of a set that --prepare --from embeddings wrote, and compares them with the hashes in its
 * index. Compares samples.csv with the index, and finds files of tensors that the index does not name. Prints
 * one line per bad file, with the rows that differ from their hashes, and a summary. STATUS_WRONG if a file
 * is missing, differs or does not belong to the set; STATUS_USAGE if the folder has no such set;
 * STATUS_FAILED if its index was changed; STATUS_UNAVAILABLE in builds without xxHash. */
enum status verify_set_run(const char *folder);

#endif
