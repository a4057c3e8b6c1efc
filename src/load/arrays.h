/* Samples as arrays: what a device must know of a data set before it can take its bytes apart. Every sample
 * is one .npy of bytes, halves or floats, all of one shape and type, and maybe a label in .cls. */
#ifndef FDSL_LOAD_ARRAYS_H
#define FDSL_LOAD_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

#define ARRAY_MEMBERS_MAX 2

/* One sample; offsets count from its first byte. 64 bytes, two sectors of a device's memory. */
struct array_sample {
    uint64_t key_hash;
    uint64_t at[ARRAY_MEMBERS_MAX], size[ARRAY_MEMBERS_MAX]; /* its members, in their order */
    uint64_t bytes;                                          /* of all members */
    uint64_t values;                                         /* where the values begin */
    uint32_t members;
    uint32_t label; /* which of the members is the label; `members`: none */
};

/* Where a sample lies. */
struct array_extent {
    uint64_t begin; /* its first byte in its shard; 0 where samples are packed */
    uint64_t bytes; /* from there to its last one */
};

struct arrays {
    enum dtype type;
    uint64_t values;              /* of a sample */
    struct array_sample *samples; /* by number, like `extents` */
    struct array_extent *extents;
    uint64_t bytes_max; /* of an extent */
};

FDSL_C_BEGIN

/* Reads the headers and labels of all samples. `packed`: members will stand one behind the other, each on a
 * multiple of ARRAY_ALIGNMENT, as a reader of members puts them; else as they lie in their shard.
 * STATUS_USAGE where a sample is not such an array, with the sample, what is wrong with it and what to do;
 * STATUS_FAILED where it cannot be read or memory runs out. The caller closes it, also after a failure. */
#define ARRAY_ALIGNMENT 32
enum status arrays_open(const struct dataset *dataset, bool packed, struct arrays *arrays);
void arrays_close(struct arrays *arrays);

static inline uint64_t array_align(uint64_t bytes)
{
    return (bytes + ARRAY_ALIGNMENT - 1) / ARRAY_ALIGNMENT * ARRAY_ALIGNMENT;
}

FDSL_C_END

#endif
