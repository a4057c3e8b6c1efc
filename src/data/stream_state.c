#include "data/stream_state.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"

#define TITLE     "fdsl stream state "
#define VERSION   "1"
#define CHECK     "check"
#define FILE_SIZE 1024 /* a file of this format has at most about 400 bytes */

uint64_t stream_state_hash(const struct dataset *dataset)
{
    uint64_t hash = dataset->sample_count;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const char *field = sample->rule ? sample->rule->field : "";
        const uint64_t words[] = {sample->key_hash,
                                  sample->edges,
                                  sample->bytes,
                                  (uint64_t)(int64_t)sample->class_folder,
                                  sample->image,
                                  sample->label,
                                  checksum_seeded(field, strlen(field), sample->rule != NULL)};
        hash = checksum_seeded(words, sizeof words, hash);
    }
    return hash;
}

/* ---- The members ---- */

/* A member of the state: its name in a file and, unless it is compared in another way, in messages, and the
 * option of the program that sets it. */
struct member {
    const char *name, *said, *option;
    size_t at;
    int base; /* of its number in a file */
    bool wide;
};

#define MEMBER(name, said, option, base)                                \
    {                                                                   \
#name, said, option, offsetof(struct stream_state, name), base, \
            sizeof((struct stream_state *)0)->name == sizeof(uint64_t)  \
    }
static const struct member members[] = {
    MEMBER(epoch, NULL, NULL, 10),
    MEMBER(sample, NULL, NULL, 10),
    MEMBER(samples, "number of samples", NULL, 10),
    MEMBER(seed, "seed", "--seed", 10),
    MEMBER(data, NULL, NULL, 16),
    MEMBER(transform, NULL, NULL, 16),
    MEMBER(global_batch, "global batch (batch_size * world_size)", NULL, 10),
    MEMBER(shuffle_buffer, "shuffle_buffer (0: no shuffle)", "--shuffle", 10),
    MEMBER(lanes, "lanes (0: no shuffle)", "--lanes", 10),
    MEMBER(drop_last, "drop_last", NULL, 10),
};

static uint64_t value_of(const struct stream_state *state, const struct member *member)
{
    const char *at = (const char *)state + member->at;
    return member->wide ? *(const uint64_t *)at : *(const uint32_t *)at;
}

static void set_value(struct stream_state *state, const struct member *member, uint64_t value)
{
    char *at = (char *)state + member->at;
    if (member->wide)
        *(uint64_t *)at = value;
    else
        *(uint32_t *)at = (uint32_t)value;
}

/* ---- Comparing ---- */

/* Adds what to do about a member that differs, for the program. */
static enum status advise(enum status status, const struct member *member, uint64_t value)
{
    if (status_in_library)
        return status;
    if (member->at == offsetof(struct stream_state, samples))
        return status_append(status, "; the stream must have all samples of its data set: name the test set "
                                     "with --test-data, and drop --train-size");
    if (member->at == offsetof(struct stream_state, global_batch))
        return status_append(
            status, "; choose --batch so that all ranks together use %" PRIu64 " samples per step", value);
    if (member->at == offsetof(struct stream_state, drop_last))
        return status_append(status, value ? "; add --drop-last" : "; drop --drop-last");
    return status_append(status, "; use %s %" PRIu64, member->option, value);
}

enum status stream_state_check(const char *name, const struct stream_state *state,
                               const struct stream_state *own, uint64_t steps, const char *fields)
{
    for (size_t i = 0; i < COUNT_OF(members); i++) {
        const struct member *member = &members[i];
        const uint64_t theirs = value_of(state, member), ours = value_of(own, member);
        if (member->said && theirs != ours)
            return advise(status_set(STATUS_USAGE,
                                     "%s: its %s is %" PRIu64 ", but that of the stream is %" PRIu64, name,
                                     member->said, theirs, ours),
                          member, theirs);
        if (member->at == offsetof(struct stream_state, data) && theirs != ours)
            return status_set(STATUS_USAGE, "%s: it belongs to another data set, or to another version of it",
                              name);
        if (member->at == offsetof(struct stream_state, transform) && theirs && ours && theirs != ours)
            return status_set(STATUS_USAGE, "%s: it belongs to another transform; %s must be the same", name,
                              fields);
    }
    return state->sample % own->global_batch == 0 && state->sample / own->global_batch < steps
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: no step of the stream begins at sample %" PRIu64, name,
                            state->sample);
}

/* ---- The file ---- */

static const struct file_kind kind = {"state of a stream", 0, TITLE, sizeof TITLE - 1};

enum status stream_state_writable(const char *path)
{
    return file_check_kind(path, &kind);
}

enum status stream_state_write(const char *path, const struct stream_state *state)
{
    char text[FILE_SIZE] = TITLE VERSION "\n";
    TRY(stream_state_writable(path));
    for (size_t i = 0; i < COUNT_OF(members); i++) {
        const uint64_t value = value_of(state, &members[i]);
        text_append(text, sizeof text, "%s ", members[i].name);
        text_append(text, sizeof text, members[i].base == 16 ? "%016" PRIx64 "\n" : "%" PRIu64 "\n", value);
    }
    text_append(text, sizeof text, CHECK " %016" PRIx64 "\n", checksum_seeded(text, strlen(text), 0));
    return file_write_atomic(path, text, strlen(text));
}

/* Reads a line "name number" at `*text`, and moves `*text` behind it. Returns whether there is one, with a
 * number of at most 64 or 32 bits. */
static bool read_line(const char **text, const char *name, int base, bool wide, uint64_t *value)
{
    const size_t length = strlen(name);
    char *end;
    if (strncmp(*text, name, length) != 0 || (*text)[length] != ' ' ||
        !isxdigit((unsigned char)(*text)[length + 1]))
        return false;
    errno = 0;
    *value = strtoull(*text + length + 1, &end, base);
    *text = end + 1;
    return errno == 0 && *end == '\n' && (wide || *value <= UINT32_MAX);
}

static enum status damaged(const char *path, const char *what)
{
    return status_set(STATUS_FAILED, "%s: this state of a stream is damaged: %s; save it again", path, what);
}

/* Reads a state from a text of `size` bytes and a zero. */
static enum status parse(const char *path, const char *text, size_t size, struct stream_state *state)
{
    const char *at = text + sizeof TITLE - 1;
    char what[64];
    uint64_t value;
    if (strncmp(text, TITLE, sizeof TITLE - 1) != 0)
        return status_set(STATUS_USAGE,
                          "%s is no state of a stream; give a file that Loader.save_state() or "
                          "--export-state has written",
                          path);
    if (strncmp(at, VERSION "\n", sizeof VERSION) != 0) {
        const size_t digits = strspn(at, "0123456789");
        if (digits == 0 || digits > 9 || at[digits] != '\n')
            return damaged(path, "its version is missing or wrong");
        return status_set(
            STATUS_USAGE,
            "%s: this state of a stream has version %.*s, but this program reads version " VERSION
            "; update it",
            path, (int)digits, at);
    }
    at += sizeof VERSION;
    for (size_t i = 0; i < COUNT_OF(members); i++) {
        snprintf(what, sizeof what, "the line '%s' is missing or wrong", members[i].name);
        if (!read_line(&at, members[i].name, members[i].base, members[i].wide, &value))
            return damaged(path, what);
        set_value(state, &members[i], value);
    }
    const uint64_t check = checksum_seeded(text, (size_t)(at - text), 0);
    if (!read_line(&at, CHECK, 16, true, &value) || at != text + size)
        return damaged(path, "the line '" CHECK "' is missing or wrong");
    return value == check ? STATUS_OK : damaged(path, "its lines do not have its checksum");
}

enum status stream_state_read(const char *path, struct stream_state *state)
{
    char *text;
    size_t size;
    *state = (struct stream_state){0};
    TRY(file_read(path, &text, &size));
    const enum status status = parse(path, text, size, state);
    free(text);
    return status;
}
