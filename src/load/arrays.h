/* Layout of samples as arrays, which the device needs to parse raw bytes. Every sample is one .npy of bytes,
 * halves or floats, with equal type and shape for all samples, and optionally a label in .cls. */
#ifndef FDSL_LOAD_ARRAYS_H
#define FDSL_LOAD_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

#define ARRAY_MEMBERS_MAX 2

/* One sample. Offsets count from its first byte. 64 bytes, two sectors of device memory. */
struct array_sample {
    uint64_t key_hash;
    uint64_t at[ARRAY_MEMBERS_MAX],
        size[ARRAY_MEMBERS_MAX]; /* offset and size of each member, in member order */
    uint64_t bytes;              /* total over all members */
    uint64_t values;             /* offset of the values */
    uint32_t members;
    uint32_t label; /* which member is the label; equal to `members` if there is none */
};

/* The bytes of a sample. */
struct array_extent {
    uint64_t begin; /* offset of its first byte in the shard; 0 if samples are packed */
    uint64_t bytes; /* length up to its last byte */
};

struct arrays {
    enum dtype type;
    uint64_t values;              /* per sample */
    struct array_sample *samples; /* by sample number, like `extents` */
    struct array_extent *extents;
    uint64_t bytes_max; /* largest extent */
};

FDSL_C_BEGIN

/* Reads the headers and labels of all samples. With `packed`, offsets assume that members are stored
 * consecutively, each aligned to ARRAY_ALIGNMENT, as a reader of members stores them. Otherwise offsets are
 * those in the shard. STATUS_USAGE if a sample is not such an array; the message names the sample, the
 * problem and a remedy. STATUS_FAILED if a sample cannot be read or memory runs out. The caller closes
 * `arrays`, also after a failure. */
#define ARRAY_ALIGNMENT 32
enum status arrays_open(const struct dataset *dataset, bool packed, struct arrays *arrays);
void arrays_close(struct arrays *arrays);

static inline uint64_t array_align(uint64_t bytes)
{
    return (bytes + ARRAY_ALIGNMENT - 1) / ARRAY_ALIGNMENT * ARRAY_ALIGNMENT;
}

FDSL_C_END

#endif
