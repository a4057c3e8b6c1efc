/* Channels (machine/comm.h): messages from one rank to another. Two ranks of one machine share the buffers if
 * they can share memory; messages are then not copied. Otherwise, MPI copies the messages. */
#include <stdlib.h>
#include <unistd.h>

#include "comm_parts.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/shared_ring.h"

bool comm_shares_memory = true;

struct comm_channel {
    struct comm_channel_spec spec;
    bool holds; /* the caller uses the message of the latest receive() */

    struct shared_ring *ring; /* NULL: MPI transfers the messages, with the members below */
    uint64_t next;            /* number of the next message; message n is in buffer n % buffers */
    MPI_Request *requests;    /* one per buffer */
    char *memory;
};

/* ---- Waiting ---- */

/* Sets `*ready` to true if `request` is complete. If `request` is NULL, checks the ring instead: the sender
 * is ready if the ring has room for a message, the receiver if the ring contains a message. */
static enum status is_ready(const struct comm_channel *channel, MPI_Request *request, bool *ready)
{
    int done;
    if (request)
        MPI_TRY(MPI_Test(request, &done, MPI_STATUS_IGNORE));
    else
        done = (channel->spec.sends ? shared_ring_room(channel->ring) : shared_ring_message(channel->ring)) !=
               NULL;
    *ready = done;
    return STATUS_OK;
}

static enum status wait_for(const struct comm_channel *channel, MPI_Request *request)
{
    const double begin_s = timer_now_s();
    double warn_s = WARN_S;
    useconds_t nap_us = 1;
    if (comm_is_broken())
        return STATUS_FAILED;
    for (;;) {
        bool ready;
        TRY(is_ready(channel, request, &ready));
        if (ready)
            return STATUS_OK;
        double waited_s = timer_now_s() - begin_s;
        TRY(comm_look_at(channel->spec.peer, waited_s, &warn_s));
        if (waited_s >= POLL_S) {
            usleep(nap_us);
            nap_us = 2 * nap_us < BRIEF_NAP_US ? 2 * nap_us : BRIEF_NAP_US;
        }
    }
}

/* ---- Opening ---- */

/* The data that the two ends of a channel exchange before the first message. */
struct handshake {
    struct shared_ring_offer offer; /* if `process` is 0, there is no shared memory */
    int attached;
    MPI_Request offered, answered;
};

/* Offers shared memory to the receiver, or none if the receiver runs on another machine or comm_shares_memory
 * is false. If shared memory cannot be created, warns and offers none; MPI then transfers the messages. */
static enum status make_offer(struct comm_channel *channel, struct handshake *handshake)
{
    const struct comm_channel_spec *spec = &channel->spec;
    bool near;
    TRY(comm_on_same_machine(spec->peer, &near));
    if (near && comm_shares_memory &&
        shared_ring_create(spec->bytes, spec->buffers + 1, &channel->ring, &handshake->offer) != STATUS_OK)
        status_warn_own("no shared memory for messages to rank %d, so MPI copies them: %s", spec->peer,
                        status_text());
    MPI_TRY(MPI_Isend(&handshake->offer, (int)sizeof handshake->offer, MPI_BYTE, spec->peer, OFFER_TAG,
                      MPI_COMM_WORLD, &handshake->offered));
    return STATUS_OK;
}

static enum status answer_offer(struct comm_channel *channel, struct handshake *handshake)
{
    const struct comm_channel_spec *spec = &channel->spec;
    MPI_TRY(MPI_Irecv(&handshake->offer, (int)sizeof handshake->offer, MPI_BYTE, spec->peer, OFFER_TAG,
                      MPI_COMM_WORLD, &handshake->offered));
    TRY(wait_for(channel, &handshake->offered));
    if (handshake->offer.process != 0 &&
        shared_ring_attach(&handshake->offer, spec->bytes, spec->buffers + 1, &channel->ring) != STATUS_OK)
        status_warn_own("cannot share memory with rank %d, so MPI copies its messages: %s", spec->peer,
                        status_text());
    handshake->attached = channel->ring != NULL;
    MPI_TRY(MPI_Isend(&handshake->attached, 1, MPI_INT, spec->peer, ANSWER_TAG, MPI_COMM_WORLD,
                      &handshake->answered));
    return STATUS_OK;
}

static enum status take_answer(struct comm_channel *channel, struct handshake *handshake)
{
    MPI_TRY(MPI_Irecv(&handshake->attached, 1, MPI_INT, channel->spec.peer, ANSWER_TAG, MPI_COMM_WORLD,
                      &handshake->answered));
    TRY(wait_for(channel, &handshake->answered));
    if (handshake->attached)
        shared_ring_attached(channel->ring);
    else {
        shared_ring_close(channel->ring);
        channel->ring = NULL;
    }
    return STATUS_OK;
}

/* Each rank sends all its offers before it waits for a message, so the ranks cannot deadlock. */
static enum status shake_hands(struct comm_channel **channels, size_t count)
{
    struct handshake handshakes[COMM_CHANNELS_MAX] = {{.attached = 0}};
    for (size_t i = 0; i < count; i++)
        if (channels[i] && channels[i]->spec.sends)
            TRY(make_offer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i] && !channels[i]->spec.sends)
            TRY(answer_offer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i] && channels[i]->spec.sends)
            TRY(take_answer(channels[i], &handshakes[i]));
    for (size_t i = 0; i < count; i++)
        if (channels[i])
            TRY(wait_for(channels[i],
                         channels[i]->spec.sends ? &handshakes[i].offered : &handshakes[i].answered));
    return STATUS_OK;
}

static char *buffer_of(const struct comm_channel *channel, uint64_t message)
{
    return channel->memory + message % channel->spec.buffers * channel->spec.bytes;
}

static enum status expect(struct comm_channel *channel, uint64_t message)
{
    MPI_TRY(MPI_Irecv(buffer_of(channel, message), (int)channel->spec.bytes, MPI_BYTE, channel->spec.peer,
                      CHANNEL_TAG, MPI_COMM_WORLD, &channel->requests[message % channel->spec.buffers]));
    return STATUS_OK;
}

static enum status prepare_mpi(struct comm_channel *channel)
{
    struct comm_channel_spec *spec = &channel->spec;
    if (!spec->sends)
        spec->buffers = 2; /* a message can arrive in one buffer while the caller reads the other */
    TRY(comm_check_message(spec->bytes));
    channel->requests = malloc(spec->buffers * sizeof *channel->requests);
    channel->memory = calloc(spec->buffers, spec->bytes);
    TRY(ALLOCATED(channel->requests && channel->memory,
                  "out of memory for %u messages of %zu bytes to or from rank %d", spec->buffers, spec->bytes,
                  spec->peer));
    for (uint32_t i = 0; i < spec->buffers; i++)
        channel->requests[i] = MPI_REQUEST_NULL;
    for (uint32_t i = 0; !spec->sends && i < spec->buffers; i++)
        TRY(expect(channel, i));
    return STATUS_OK;
}

static enum status allocate(const struct comm_channel_spec *specs, size_t count,
                            struct comm_channel **channels)
{
    for (size_t i = 0; i < count; i++)
        channels[i] = NULL;
    for (size_t i = 0; i < count; i++) {
        if (specs[i].bytes == 0)
            continue;
        channels[i] = calloc(1, sizeof *channels[i]);
        TRY(ALLOCATED(channels[i], "out of memory for a channel to rank %d", specs[i].peer));
        channels[i]->spec = specs[i];
    }
    return STATUS_OK;
}

enum status comm_channels_open(const struct comm_channel_spec *specs, size_t count,
                               struct comm_channel **channels)
{
    TRY(comm_agree(allocate(specs, count, channels)));
    enum status status = shake_hands(channels, count);
    for (size_t i = 0; status == STATUS_OK && i < count; i++)
        if (channels[i] && !channels[i]->ring)
            status = prepare_mpi(channels[i]);
    return comm_agree(status);
}

void comm_channel_close(struct comm_channel *channel)
{
    if (!channel || comm_is_broken()) /* MPI may still use the memory; comm_close() ends the process */
        return;
    for (uint32_t i = 0; channel->requests && channel->memory && i < channel->spec.buffers; i++) {
        if (channel->requests[i] == MPI_REQUEST_NULL)
            continue;
        if (!channel->spec.sends)
            (void)MPI_Cancel(&channel->requests[i]);
        (void)MPI_Wait(&channel->requests[i], MPI_STATUS_IGNORE);
    }
    shared_ring_close(channel->ring);
    free(channel->requests);
    free(channel->memory);
    free(channel);
}

void *comm_channel_memory(const struct comm_channel *channel, size_t *bytes, size_t *own_bytes)
{
    *bytes = channel->spec.buffers * channel->spec.bytes;
    void *memory = channel->ring ? shared_ring_memory(channel->ring, bytes) : channel->memory;
    *own_bytes = channel->ring && !channel->spec.sends ? 0 : *bytes;
    return memory;
}

/* ---- Messages ---- */

static MPI_Request *request_of(const struct comm_channel *channel)
{
    return channel->ring ? NULL : &channel->requests[channel->next % channel->spec.buffers];
}

enum status comm_channel_room(struct comm_channel *channel, void **buffer)
{
    TRY(wait_for(channel, request_of(channel)));
    *buffer = channel->ring ? shared_ring_room(channel->ring) : buffer_of(channel, channel->next);
    return STATUS_OK;
}

enum status comm_channel_send(struct comm_channel *channel, size_t bytes)
{
    if (channel->ring)
        shared_ring_send(channel->ring);
    else
        MPI_TRY(MPI_Isend(buffer_of(channel, channel->next), (int)bytes, MPI_BYTE, channel->spec.peer,
                          CHANNEL_TAG, MPI_COMM_WORLD, request_of(channel)));
    channel->next++;
    return STATUS_OK;
}

static enum status release(struct comm_channel *channel)
{
    channel->holds = false;
    if (!channel->ring)
        return expect(channel, channel->next - 1 + channel->spec.buffers);
    shared_ring_free(channel->ring);
    return STATUS_OK;
}

enum status comm_channel_receive(struct comm_channel *channel, void **buffer)
{
    if (channel->holds)
        TRY(release(channel));
    TRY(wait_for(channel, request_of(channel)));
    *buffer = channel->ring ? shared_ring_message(channel->ring) : buffer_of(channel, channel->next);
    channel->next++;
    channel->holds = true;
    return STATUS_OK;
}
