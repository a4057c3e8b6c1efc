/* What the parts of the opening of training data share: data.c (where sets come from, and what becomes of a
 * value on its way into the network) and data_fill.c (samples that become a set).
 * Nothing else includes this. */
#ifndef FDSL_TRAIN_DATA_PARTS_H
#define FDSL_TRAIN_DATA_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "data/source.h"
#include "train/data.h"

#define DATA_SAMPLES_MAX ((UINT64_C(1) << 31) - 1) /* of a set */

/* The options that set how many samples each part has. */
extern const char *const data_size_options[DATA_PARTS];

/* Which samples of a source a set takes. */
struct data_range {
    uint64_t first, count;
    int held; /* 1: only those held out, 0: only the others, -1: all */
};

/* STATUS_FAILED for what would not fit, with the `option` that takes fewer samples: a system may promise more
 * memory than there is, and end the program when it is used. */
enum status data_check_memory(uint64_t samples, size_t sample_bytes, const char *option);

/* Adds to set `part` the samples of an open source that are in `range`, `limit` of them at most.
 * The first sample of all decides shape and type. STATUS_FAILED, with the sample's
 * number, where one is broken, differs from the others or does not fit into memory. */
enum status data_fill(struct source_reader *reader, struct data_range range, uint64_t limit,
                      struct data *data, enum data_part part);

/* The same from a source that is opened with `words` for it and closed again; a range of no samples means
 * all. */
enum status data_read(const struct data_request *request, const char *source, const char *const words[],
                      struct data_range range, uint64_t limit, struct data *data, enum data_part part);

#endif
