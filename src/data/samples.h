/* samples.csv, the list of a prepared dataset's samples. */
#ifndef FDSL_DATA_SAMPLES_H
#define FDSL_DATA_SAMPLES_H

#include <stdbool.h>

#include "core/status.h"
#include "data/index.h"
#include "data/source.h"

/* Writes FOLDER/samples.csv: a record for the columns and one for each sample of the index, which are samples
 * 0, 1, ... of the source that `state` belongs to. CSV as in RFC 4180. */
enum status samples_write(const char *folder, const struct source *source, const void *state,
                          const struct index *index);

/* Whether it is there, has a record for its columns and one for each sample, and ends with a line end. */
bool samples_are_whole(const char *folder, const struct index *index);

#endif
