/* Shared by the streams of libfdsl that enqueue their work on CUDA streams of the caller: the order of calls
 * on different CUDA streams, and the position, which replays of a captured call move.
 *
 * A captured call reads the position from device memory and moves it on. The host then no longer knows it:
 * `moves` is set, and moving_locate() waits for the latest replay and reads it. cudaDeviceSynchronize() would
 * end captures of other threads, so the event `moved` follows all work that writes the position.
 *
 * The device is current in all functions. One thread at a time uses a struct. */
#ifndef FDSL_CUDA_COMMON_CALLS_CUH
#define FDSL_CUDA_COMMON_CALLS_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "core/stream.h"

/* STATUS_USAGE if `cuda_stream` is being captured: a CUDA graph would repeat the batch. `what` is refused. */
enum status calls_refuse_capture(void *cuda_stream, const char *what);

/* ---- Memory that all calls use, in turn ---- */

struct turn {
    cudaEvent_t used;        /* the latest work that uses the memory */
    unsigned long long user; /* number of the CUDA stream of this work; valid if `uses` is set */
    bool uses;               /* the latest call has not failed between turn_begin() and turn_end() */
};

/* Creates the event. The caller closes the turn, also after a failure; that waits for the latest work. */
enum status turn_open(struct turn *turn);
void turn_close(struct turn *turn);

/* Makes `stream` wait for the latest work, unless that is on the same stream. After turn_begin() has
 * succeeded and the work is enqueued, the caller calls turn_end(). */
enum status turn_begin(struct turn *turn, cudaStream_t stream);
enum status turn_end(struct turn *turn, cudaStream_t stream);

/* ---- The position ---- */

struct moving {
    struct stream_position *at; /* of the stream: the next batch, unless replays have moved the position */
    uint64_t steps;             /* per epoch */
    uint64_t *position;         /* device memory: the position of captured calls */
    cudaStream_t own;           /* copies `position`; belongs to the caller */
    cudaEvent_t moved;          /* the latest work that writes `position`, also in graphs */
    bool moves;                 /* a call was captured: replays move `position`, and other calls set it */
};

/* Allocates the memory, and loads the kernels, which CUDA must not do during a capture. The caller sets `at`,
 * `steps` and `own` before, and closes the position, also after a failure; that waits for `moved`. */
enum status moving_open(struct moving *moving, int device);
void moving_close(struct moving *moving);

/* A position counts steps over all epochs. */
static inline uint64_t moving_position(const struct moving *moving)
{
    return moving->at->epoch * moving->steps + moving->at->step;
}

static inline struct stream_position moving_at(const struct moving *moving, uint64_t position)
{
    return {position / moving->steps, position % moving->steps};
}

/* Sets `*at` to the position that replays have reached, for which it waits. */
enum status moving_locate(struct moving *moving);

/* Moves the position by one batch that was enqueued on `stream`, without a capture. */
enum status moving_on(struct moving *moving, cudaStream_t stream);

/* Before a captured call: lets replays begin at the position, after the latest work of `turn` (NULL:
 * none). */
enum status moving_begin(struct moving *moving, const struct turn *turn);

/* Captures that a replay moves the position by one batch. */
enum status moving_capture(const struct moving *moving, int device, cudaStream_t stream);

/* Makes `to` the position of later replays. The caller sets `*at`. */
enum status moving_seek(struct moving *moving, struct stream_position to);

#endif
