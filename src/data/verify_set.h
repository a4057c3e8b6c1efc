/* --verify-set DIR: checks a prepared set of embeddings against its hashes. */
#ifndef FDSL_DATA_VERIFY_SET_H
#define FDSL_DATA_VERIFY_SET_H

#include "core/status.h"

/* Reads all files of a set that --prepare --from embeddings wrote, and compares them with the hashes in its
 * index. Compares samples.csv with the index, and finds files of tensors that the index does not name. Prints
 * one line per bad file, with the rows that differ from their hashes, and a summary. STATUS_WRONG if a file
 * is missing, differs or does not belong to the set; STATUS_USAGE if the folder has no such set;
 * STATUS_FAILED if its index was changed; STATUS_UNAVAILABLE in builds without xxHash. */
enum status verify_set_run(const char *folder);

#endif
