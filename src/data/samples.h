/* samples.csv: the list of the samples of a prepared dataset. */
#ifndef FDSL_DATA_SAMPLES_H
#define FDSL_DATA_SAMPLES_H

#include <stdbool.h>

#include "core/status.h"
#include "data/index.h"
#include "data/source.h"

#define SAMPLES_NAME "samples.csv"

/* Formats samples.csv: a header record, then one record per sample of the index. Sample i of the index is
 * sample i of the source. `state` is the state of the open source. The format is CSV as in RFC 4180. The
 * caller frees `*text`, even after a failure. */
enum status samples_format(const struct source *source, const void *state, const struct index *index,
                           char **text, size_t *size);

/* Writes FOLDER/samples.csv. */
enum status samples_write(const char *folder, const struct source *source, const void *state,
                          const struct index *index);

/* Returns whether samples.csv exists, has a header record and one record per sample, and ends with a newline.
 */
bool samples_are_whole(const char *folder, const struct index *index);

#endif
