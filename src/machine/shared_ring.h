/* A ring of message buffers in memory that two processes of one machine share: one process writes the
 * messages, the other one reads them in place. The memory has no name in any file system, so it is freed when
 * both processes have ended, even if they are killed. No function blocks. Each end may be used by one thread
 * at a time. */
#ifndef FDSL_MACHINE_SHARED_RING_H
#define FDSL_MACHINE_SHARED_RING_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

struct shared_ring;

/* Identifies a ring to the reader's process. */
struct shared_ring_offer {
    int32_t process, file; /* process id of the writer, and its file descriptor */
    uint64_t token;        /* random; also at the beginning of the memory */
};

/* Writer: creates a ring of `buffers` messages of at most `bytes` bytes. The caller sends `*offer` to the
 * reader. After the reader's answer, the caller calls shared_ring_attached(), which closes the file
 * descriptor; no reader can attach afterwards. STATUS_FAILED with the reason. */
enum status shared_ring_create(size_t bytes, uint32_t buffers, struct shared_ring **ring,
                               struct shared_ring_offer *offer);
void shared_ring_attached(struct shared_ring *ring);

/* Reader: attaches to an offered ring of the same size. STATUS_UNAVAILABLE with the reason if this process
 * cannot open the memory, for example because the processes run in different containers. */
enum status shared_ring_attach(const struct shared_ring_offer *offer, size_t bytes, uint32_t buffers,
                               struct shared_ring **ring);

/* Unmaps the memory; the other end may still use it. Ignores NULL. */
void shared_ring_close(struct shared_ring *ring);

/* Returns the memory of all buffers, for example to pin it, and its size in `*size`. The memory is initially
 * zero. More than two processes can attach to a ring that passes no messages and serves only as shared
 * memory. */
void *shared_ring_memory(const struct shared_ring *ring, size_t *size);

/* Writer: returns the buffer of the next message; NULL while the reader has not freed it. */
void *shared_ring_room(const struct shared_ring *ring);

/* Writer: passes the buffer that shared_ring_room() returned to the reader. */
void shared_ring_send(struct shared_ring *ring);

/* Reader: returns the oldest message that it has not freed; NULL if there is none. */
void *shared_ring_message(const struct shared_ring *ring);

/* Reader: frees the buffer of the message that shared_ring_message() returned. */
void shared_ring_free(struct shared_ring *ring);

#endif
