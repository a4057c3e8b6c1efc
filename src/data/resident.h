/* A part of a data set that stays in memory: the files of its first samples, as they are stored. A stream
 * copies the bytes of a member here when it reads them first, and later takes them from here. */
#ifndef FDSL_DATA_RESIDENT_H
#define FDSL_DATA_RESIDENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

#define RESIDENT_ALL UINT64_MAX /* a limit that no data set reaches */

/* The members of a sample that are kept. */
enum resident_part { RESIDENT_IMAGE, RESIDENT_LABEL };

/* The samples of which a part is kept. */
struct resident_samples {
    const struct dataset *dataset;
    const uint32_t *samples; /* sample number n is sample samples[n] of the data set; NULL: sample n */
    uint32_t count;
    bool labels; /* the members that are labels are kept, too */
};

/* Zeroed: nothing is kept. */
struct resident {
    uint32_t count;           /* samples number 0 to count - 1 are kept */
    uint32_t parts;           /* per sample */
    uint64_t bytes;           /* of `memory` and `places` together */
    _Atomic uint64_t *places; /* per part of each sample: its offset in `memory`, and how far it is */
    uint8_t *memory;
};

FDSL_C_BEGIN

/* Returns how many samples are kept in at most `limit` bytes: as many of the first ones as fit. Sets `*bytes`
 * to the memory that they need, with 8 bytes for each member. Depends on nothing but the sizes of the
 * members. */
uint32_t resident_fit(const struct resident_samples *samples, uint64_t limit, uint64_t *bytes);

/* Allocates the memory for the samples that fit into `limit` bytes; the system provides it when it is used.
 * STATUS_TOO_LARGE if this process cannot have as much. The caller closes `resident`, even after a failure.
 */
enum status resident_open(const struct resident_samples *samples, uint64_t limit, struct resident *resident);
void resident_close(struct resident *resident);

/* Returns the bytes of a member if they are in memory; otherwise NULL. They do not change until
 * resident_close(). Thread safe. */
const uint8_t *resident_find(const struct resident *resident, uint32_t number, enum resident_part part);

/* Returns the place to which the caller alone may write the bytes of a member, aligned to RESIDENT_ALIGN
 * bytes. The caller must call resident_end() when it has done so, or has failed. Returns NULL if the sample
 * is not kept, or if the bytes are in memory or being written by another thread. Thread safe. */
#define RESIDENT_ALIGN 16
uint8_t *resident_begin(const struct resident *resident, uint32_t number, enum resident_part part);

/* Ends writing. With `complete`, other threads find the bytes from now on. Thread safe. */
void resident_end(const struct resident *resident, uint32_t number, enum resident_part part, bool complete);

FDSL_C_END

#endif
