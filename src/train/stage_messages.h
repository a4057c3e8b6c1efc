/* The messages between the stages of a pipeline: activations to the next stage, their gradients to the
 * previous one. A message has values and, after activations, labels. If all ranks run on one machine and
 * their engine can share device memory, the values stay in device memory: the receiver reads them from the
 * memory of the sender's device. Otherwise, messages are in host memory (comm_channels_open()). Not thread
 * safe. */
#ifndef FDSL_TRAIN_STAGE_MESSAGES_H
#define FDSL_TRAIN_STAGE_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "machine/comm.h"
#include "train/engine.h"

/* The directions: from and to the previous stage, from and to the next one. */
enum stage_link { INPUTS, IN_DELTAS, DELTAS, OUTPUTS, STAGE_LINKS };

struct stage_message {
    void *values; /* in host or device memory */
    void *labels; /* in host memory */
};

/* A zeroed struct is closed. */
struct stage_messages {
    const struct stage_functions *functions;
    size_t value_bytes[STAGE_LINKS], label_bytes[STAGE_LINKS]; /* maximum per message; 0: no such messages */
    uint32_t buffers; /* messages that a sender may be ahead of the receiver */
    struct comm_channel *channels[STAGE_LINKS];
    bool pinned[STAGE_LINKS]; /* the engine has pinned the channel's memory */
    bool on_device;           /* the values are in device memory: */
    char *memory[STAGE_LINKS];
    uint64_t next[STAGE_LINKS]; /* number of the next message */
};

/* Collective: opens the links of this rank's stage, whose neighbours are the ranks before and after it. The
 * caller has set the members up to `buffers`, and closes the messages, even after a failure. Closing is
 * collective after stage_messages_open() was called. */
enum status stage_messages_open(struct stage_messages *messages);
void stage_messages_close(struct stage_messages *messages);

/* Sender: stage_room() waits for a free message, and stage_send() sends it. Without this link, stage_room()
 * sets the members of the message to NULL. */
enum status stage_room(struct stage_messages *messages, enum stage_link link, struct stage_message *message);
enum status stage_send(struct stage_messages *messages, enum stage_link link);

/* Receiver: waits for the next message, which is valid until the next call. Without this link, sets the
 * members of the message to NULL. */
enum status stage_receive(struct stage_messages *messages, enum stage_link link,
                          struct stage_message *message);

/* Returns the memory of the messages that this rank has allocated. */
uint64_t stage_messages_bytes(const struct stage_messages *messages);

#endif
