#include "train/stage_messages.h"

#include <stdlib.h>

#define LEAST_BYTES \
    8 /* of a message in host memory: its values are on the device, and it may have no labels */

static bool sends(enum stage_link link)
{
    return link == IN_DELTAS || link == OUTPUTS;
}

/* ---- Device memory ---- */

/* The message of a rank to all others. */
struct card {
    struct stage_handle handles[STAGE_LINKS]; /* of the links on which it sends */
    bool failed;
};

/* The sender's ring has as many buffers as a channel in shared memory, so a buffer of the ring is free
 * whenever that of the channel is. */
static size_t ring_bytes(const struct stage_messages *messages, enum stage_link link)
{
    return (messages->buffers + 1) * messages->value_bytes[link];
}

static void release(struct stage_messages *messages, bool mapped)
{
    for (int i = 0; i < STAGE_LINKS; i++)
        if (messages->memory[i] && sends(i) != mapped) {
            messages->functions->release(messages->memory[i], mapped);
            messages->memory[i] = NULL;
        }
}

/* Collective: no rank frees memory that another rank has mapped. */
static void close_device(struct stage_messages *messages)
{
    release(messages, true);
    (void)comm_agree(STATUS_OK); /* a barrier; after a failure, the ranks end anyway */
    release(messages, false);
    messages->on_device = false;
}

static enum status share(struct stage_messages *messages, struct card *card)
{
    for (int i = 0; i < STAGE_LINKS; i++)
        if (sends(i) && messages->value_bytes[i] > 0)
            TRY(messages->functions->share(ring_bytes(messages, i), (void **)&messages->memory[i],
                                           &card->handles[i]));
    return STATUS_OK;
}

/* Maps the memory of the neighbours. `cards` has one card per rank. */
static enum status map(struct stage_messages *messages, const struct card *cards)
{
    const int rank = comm_rank();
    if (messages->value_bytes[INPUTS] > 0)
        TRY(messages->functions->map(&cards[rank - 1].handles[OUTPUTS], (void **)&messages->memory[INPUTS]));
    if (messages->value_bytes[DELTAS] > 0)
        TRY(messages->functions->map(&cards[rank + 1].handles[IN_DELTAS],
                                     (void **)&messages->memory[DELTAS]));
    return STATUS_OK;
}

/* Collective: sets messages->on_device if the values can be in device memory. */
static enum status open_device(struct stage_messages *messages)
{
    const size_t ranks = (size_t)comm_size();
    struct card own = {.failed = false};
    FREED struct card *cards = calloc(ranks, sizeof *cards);
    TRY(comm_agree(ALLOCATED(cards, "out of memory for the messages")));
    own.failed = share(messages, &own) != STATUS_OK;
    TRY(comm_gather(&own, sizeof own, cards));
    TRY(comm_spread(cards, ranks * sizeof *cards));
    double failed = 0;
    for (size_t i = 0; i < ranks; i++)
        failed += cards[i].failed;
    if (failed == 0)
        failed = map(messages, cards) != STATUS_OK;
    TRY(comm_max(&failed, 1));
    messages->on_device = failed == 0;
    if (failed > 0 && comm_rank() == 0)
        status_warn(
            "stages cannot read each other's GPU memory, so messages pass through host memory; let all "
            "ranks see all GPUs (CUDA_VISIBLE_DEVICES)");
    return STATUS_OK;
}

/* ---- Channels ---- */

static void close_channels(struct stage_messages *messages)
{
    for (int i = 0; i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes;
        if (messages->pinned[i])
            messages->functions->unpin(comm_channel_memory(messages->channels[i], &bytes, &own_bytes));
        messages->pinned[i] = false;
        comm_channel_close(messages->channels[i]);
        messages->channels[i] = NULL;
    }
}

static enum status open_channels(struct stage_messages *messages)
{
    const int rank = comm_rank();
    struct comm_channel_spec specs[STAGE_LINKS];
    for (int i = 0; i < STAGE_LINKS; i++) {
        const size_t bytes =
            (messages->on_device ? LEAST_BYTES : messages->value_bytes[i]) + messages->label_bytes[i];
        specs[i] = (struct comm_channel_spec){i == INPUTS || i == IN_DELTAS ? rank - 1 : rank + 1, sends(i),
                                              messages->value_bytes[i] > 0 ? bytes : 0, messages->buffers};
    }
    return comm_channels_open(specs, STAGE_LINKS, messages->channels);
}

static enum status pin_channels(struct stage_messages *messages)
{
    for (int i = 0; messages->functions->pin && !messages->on_device && i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes;
        if (!messages->channels[i])
            continue;
        void *memory = comm_channel_memory(messages->channels[i], &bytes, &own_bytes);
        TRY(messages->functions->pin(memory, bytes));
        messages->pinned[i] = true;
    }
    return STATUS_OK;
}

enum status stage_messages_open(struct stage_messages *messages)
{
    if (messages->functions->share && comm_local_size() == comm_size()) {
        TRY(open_device(messages));
        if (!messages->on_device)
            close_device(messages);
    }
    TRY(open_channels(messages));
    double copied = 0;
    for (int i = 0; messages->on_device && i < STAGE_LINKS; i++)
        copied += messages->channels[i] && !comm_channel_shares(messages->channels[i]);
    TRY(comm_max(&copied, 1));
    if (copied > 0) { /* a channel over MPI reuses a buffer before the receiver has read the ring */
        close_channels(messages);
        close_device(messages);
        TRY(open_channels(messages));
    }
    return comm_agree(pin_channels(messages));
}

void stage_messages_close(struct stage_messages *messages)
{
    close_channels(messages);
    if (messages->on_device)
        close_device(messages);
}

/* ---- Messages ---- */

/* Sets `*message` to the message in the buffer that `find` returns; empty if the stage has no such link. */
static enum status find_message(struct stage_messages *messages, enum stage_link link,
                                enum status (*find)(struct comm_channel *channel, void **buffer),
                                struct stage_message *message)
{
    void *buffer;
    *message = (struct stage_message){NULL, NULL};
    if (!messages->channels[link])
        return STATUS_OK;
    TRY(find(messages->channels[link], &buffer));
    const uint64_t number = messages->next[link]++;
    *message = (struct stage_message){buffer, (char *)buffer + messages->value_bytes[link]};
    if (messages->on_device) {
        message->values =
            messages->memory[link] + number % (messages->buffers + 1) * messages->value_bytes[link];
        message->labels = (char *)buffer + LEAST_BYTES;
    }
    return STATUS_OK;
}

enum status stage_room(struct stage_messages *messages, enum stage_link link, struct stage_message *message)
{
    return find_message(messages, link, comm_channel_room, message);
}

enum status stage_receive(struct stage_messages *messages, enum stage_link link,
                          struct stage_message *message)
{
    return find_message(messages, link, comm_channel_receive, message);
}

enum status stage_send(struct stage_messages *messages, enum stage_link link)
{
    const size_t values = messages->on_device ? LEAST_BYTES : messages->value_bytes[link];
    return comm_channel_send(messages->channels[link], values + messages->label_bytes[link]);
}

uint64_t stage_messages_bytes(const struct stage_messages *messages)
{
    uint64_t total = 0;
    for (int i = 0; i < STAGE_LINKS; i++) {
        size_t bytes, own_bytes = 0;
        if (messages->channels[i])
            (void)comm_channel_memory(messages->channels[i], &bytes, &own_bytes);
        total += own_bytes + (messages->on_device && sends(i) ? ring_bytes(messages, i) : 0);
    }
    return total;
}
