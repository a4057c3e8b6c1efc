/* Tests rings of messages in memory that two processes share. */
#include <criterion/criterion.h>

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/portable.h"
#include "machine/comm.h"

TestSuite(shared_ring, .timeout = 60);

enum { BUFFERS = 3, VALUES = 1021, MESSAGES = 20000, BYTES = VALUES * sizeof(uint32_t) };

/* Reads all messages, and returns whether each has its values. */
static bool read_messages(const struct shared_ring_offer *offer)
{
    struct shared_ring *ring;
    bool right = shared_ring_attach(offer, BYTES, BUFFERS, &ring) == STATUS_OK;
    for (uint32_t i = 0; right && i < MESSAGES; i++) {
        const uint32_t *message;
        while (!(message = shared_ring_message(ring)))
            usleep(1);
        for (uint32_t j = 0; j < VALUES; j++)
            right = right && message[j] == i + j;
        shared_ring_free(ring);
    }
    shared_ring_close(right ? ring : NULL);
    return right;
}

Test(shared_ring, passes_messages_between_processes)
{
    struct shared_ring *ring;
    struct shared_ring_offer offer;
    int status;
    cr_assert_eq(shared_ring_create(BYTES, BUFFERS, &ring, &offer), STATUS_OK, "%s", status_text());
    pid_t reader = fork();
    if (reader == 0)
        _exit(!read_messages(&offer));
    for (uint32_t i = 0; i < MESSAGES; i++) {
        uint32_t *message;
        while (!(message = shared_ring_room(ring)))
            usleep(1);
        for (uint32_t j = 0; j < VALUES; j++)
            message[j] = i + j;
        shared_ring_send(ring);
    }
    cr_assert_eq(waitpid(reader, &status, 0), reader);
    cr_expect_eq(status, 0);
    shared_ring_close(ring);
}

Test(shared_ring, has_room_for_all_buffers)
{
    for (uint32_t buffers = 1; buffers <= 5; buffers++) {
        struct shared_ring *writer, *reader;
        struct shared_ring_offer offer;
        cr_assert_eq(shared_ring_create(1, buffers, &writer, &offer), STATUS_OK);
        cr_assert_eq(shared_ring_attach(&offer, 1, buffers, &reader), STATUS_OK, "%s", status_text());
        shared_ring_attached(writer);
        cr_expect_null(shared_ring_message(reader));
        for (uint32_t i = 0; i < buffers; i++) {
            char *room = shared_ring_room(writer);
            cr_assert_not_null(room, "%u of %u", i, buffers);
            *room = (char)('a' + i);
            shared_ring_send(writer);
        }
        cr_expect_null(shared_ring_room(writer), "%u buffers", buffers);
        for (uint32_t i = 0; i < buffers; i++) {
            const char *message = shared_ring_message(reader);
            cr_assert(message && *message == (char)('a' + i));
            cr_expect(i > 0 || !shared_ring_room(writer));
            shared_ring_free(reader);
            cr_expect_not_null(shared_ring_room(writer));
        }
        cr_expect_null(shared_ring_message(reader));
        shared_ring_close(reader);
        shared_ring_close(writer);
    }
}

Test(shared_ring, both_ends_have_the_same_memory)
{
    struct shared_ring *writer, *reader;
    struct shared_ring_offer offer;
    size_t bytes, read_bytes;
    cr_assert_eq(shared_ring_create(BYTES, BUFFERS, &writer, &offer), STATUS_OK);
    cr_assert_eq(shared_ring_attach(&offer, BYTES, BUFFERS, &reader), STATUS_OK);
    char *mine = shared_ring_memory(writer, &bytes), *theirs = shared_ring_memory(reader, &read_bytes);
    cr_expect(bytes == read_bytes && bytes >= BUFFERS * BYTES);
    mine[bytes - 1] = 'x';
    cr_expect_eq(theirs[bytes - 1], 'x');
    shared_ring_close(writer); /* the reader keeps its mapping */
    cr_expect_eq(theirs[bytes - 1], 'x');
    shared_ring_close(reader);
}

static void expect_refused(struct shared_ring_offer offer, size_t bytes, const char *words)
{
    struct shared_ring *ring;
    cr_expect_eq(shared_ring_attach(&offer, bytes, BUFFERS, &ring), STATUS_UNAVAILABLE, "%s", words);
    cr_expect_null(ring);
    cr_expect(strstr(status_text(), words), "%s: %s", words, status_text());
}

/* The process and file numbers in an offer from another container may belong to unrelated processes and files
 * of this container. */
Test(shared_ring, refuses_other_memory)
{
    struct shared_ring *ring;
    struct shared_ring_offer offer, other;
    int pipes[2];
    cr_assert_eq(shared_ring_create(BYTES, BUFFERS, &ring, &offer), STATUS_OK);
    other = offer, other.token++;
    expect_refused(other, BYTES, "is not the memory of the other rank");
    expect_refused(offer, 2 * BYTES, "is not the memory of the other rank");
    cr_assert_eq(pipe(pipes), 0);
    other = offer, other.file = pipes[0];
    expect_refused(other, BYTES, "is not the memory of the other rank");
    other = offer, other.process = INT32_MAX;
    expect_refused(other, BYTES, "No such file");
    shared_ring_attached(ring);
    expect_refused(offer, BYTES, "No such file");
    shared_ring_close(ring);
}
