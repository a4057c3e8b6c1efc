/* The state of a stream: everything that determines the batches that follow. libfdsl (struct fdsl_state), the
 * Python package and the workload `train` share the state and its file, so a stream of one continues in
 * another. */
#ifndef FDSL_DATA_STREAM_STATE_H
#define FDSL_DATA_STREAM_STATE_H

#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"

/* The members have the meaning of those of struct fdsl_state (lib/fdsl.h). */
struct stream_state {
    uint64_t epoch, sample;         /* the position: samples of this epoch that all ranks have received */
    uint64_t samples, seed;         /* of the data set; of the order */
    uint64_t data;                  /* stream_state_hash() of the data set */
    uint64_t transform;             /* 0: whoever saved the state did not say how the images were changed */
    uint32_t global_batch;          /* samples in a step of all ranks */
    uint32_t lanes, shuffle_buffer; /* arguments of draw_lanes(); both 0: the order of the files */
    uint32_t drop_last;             /* 1 or 0 */
};

FDSL_C_BEGIN

/* Returns a hash of all samples of a data set, in their order, and of which of their members are the image
 * and the label. */
uint64_t stream_state_hash(const struct dataset *dataset);

/* Compares everything but the position with `own`, the state of the stream that shall continue: an epoch of
 * it has `steps` steps. Transforms are compared only if both are known; `fields` names what determines them.
 * STATUS_USAGE, with what differs and a remedy; the message begins with `name` and a colon. */
enum status stream_state_check(const char *name, const struct stream_state *state,
                               const struct stream_state *own, uint64_t steps, const char *fields);

/* Writes a state to a file, atomically, or reads it. The file is text: a line with the format and its
 * version, one line "name number" for each member, and a line with a checksum of the lines before it. Hashes
 * are hexadecimal. An existing file is replaced only if it is empty or a state. STATUS_USAGE or STATUS_FAILED
 * with the path and the reason. */
enum status stream_state_write(const char *path, const struct stream_state *state);
enum status stream_state_read(const char *path, struct stream_state *state);

/* Checks that stream_state_write() could write a file. */
enum status stream_state_writable(const char *path);

FDSL_C_END

#endif
