/* Declarations shared by data.c, which chooses the source and normalises samples, and data_fill.c, which
 * decodes samples into a set. No other file includes this header. */
#ifndef FDSL_TRAIN_DATA_PARTS_H
#define FDSL_TRAIN_DATA_PARTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "data/source.h"
#include "train/data.h"

#define DATA_SAMPLES_MAX ((UINT64_C(1) << 31) - 1) /* maximum samples per set */

/* The option that sets the size of each part. */
extern const char *const data_size_options[DATA_PARTS];

/* The samples of a source that a set takes. */
struct data_range {
    uint64_t first, count;
    int held; /* 1: only samples that the source holds out; 0: only the others; -1: all */
};

/* Returns STATUS_TOO_LARGE if `samples` samples do not fit into memory; the message suggests lowering
 * `option`. Without this check, a system that overcommits memory may kill the program when it first writes to
 * the memory. */
enum status data_check_memory(uint64_t samples, size_t sample_bytes, const char *option);

/* Appends the samples in `range` of an open source to set `part`, at most `limit` of them. range.count = 0
 * means all samples of the source. For class folders, chooses `limit` samples by taking the classes in turn,
 * and adds them in the order of the source. The first sample of `data` sets the shape and the type. `threads`
 * threads decode. STATUS_FAILED, with the sample's location, if a sample is broken. If the reader skips
 * broken samples, it leaves them out, and `skipped` of the set counts them. STATUS_USAGE if a sample differs
 * from the first, or if the set does not fit into memory. */
enum status data_fill(struct source_reader *reader, struct data_range range, uint64_t limit, int threads,
                      struct data *data, enum data_part part);

/* Prefixes an error with --data, unless the message begins with it or with the path of the data. */
enum status data_named(const struct data_request *request, enum status status);

/* Opens a source with the option values in `parameters`, calls data_fill(), and closes the source. */
enum status data_read(const struct data_request *request, const char *source, const void *parameters,
                      struct data_range range, uint64_t limit, struct data *data, enum data_part part);

#endif
