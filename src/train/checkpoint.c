#include "train/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/bytes.h"
#include "core/env.h"
#include "core/file.h"

#define MAGIC        "FDSLCKPT"
#define SCHEMA       1
#define ARENAS       3 /* parameters and the optimizer's two */
#define IDENTITY_MAX 65536

/* What a file begins with; little-endian. Behind it: the identity, then the arenas. */
struct header {
    char magic[8];
    uint32_t schema, header_bytes;
    uint64_t digest; /* XXH3-64 of the whole file with this field zero */
    char model[MODEL_NAME_MAX];
    struct shape input;
    uint32_t classes, epochs;
    double trained_s, to_98_s, to_99_s;
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX];
    uint64_t arena_values, identity_bytes;
    char revision[64]; /* of the program that wrote it */
};

void checkpoint_free(struct checkpoint *checkpoint)
{
    free(checkpoint->identity);
    free(checkpoint->state.parameters);
    free(checkpoint->state.first);
    free(checkpoint->state.second);
    *checkpoint = (struct checkpoint){0};
}

#ifdef HAVE_XXHASH

/* ---- Names ---- */

static bool path_of(const char *folder, uint32_t epochs, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/epoch-%06" PRIu32 ".ckpt", folder, epochs) < PATH_MAX;
}

/* "epoch-000012.ckpt" is 12; -1: another file. */
static int64_t epochs_of(const char *name)
{
    uint32_t epochs;
    int used = 0;
    char again[64];
    if (sscanf(name, "epoch-%" SCNu32 ".ckpt%n", &epochs, &used) != 1 || used == 0)
        return -1;
    snprintf(again, sizeof again, "epoch-%06" PRIu32 ".ckpt", epochs);
    return strcmp(name, again) == 0 ? (int64_t)epochs : -1;
}

/* The highest number below `below` among the folder's checkpoints; -1: none. */
static int64_t highest(const char *folder, int64_t below)
{
    int64_t found = -1;
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        int64_t epochs = epochs_of(entry->d_name);
        if (epochs < below && epochs > found)
            found = epochs;
    }
    if (directory)
        closedir(directory);
    return found;
}

bool checkpoint_exists(const char *folder)
{
    return highest(folder, INT64_MAX) >= 0;
}

enum status checkpoint_check_folder(const char *folder)
{
    char path[PATH_MAX];
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--checkpoint %s cannot be made: %s", folder, strerror(errno));
    if (!path_of(folder, 0, path))
        return status_set(STATUS_USAGE, "--checkpoint %s: the name is too long", folder);
    enum status status = file_check_new(path);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--checkpoint");
}

/* ---- Writing ---- */

static void fill_header(const struct checkpoint *checkpoint, struct header *header)
{
    struct env env;
    env_capture(&env);
    memset(header, 0, sizeof *header); /* the gaps too: they are hashed */
    memcpy(header->magic, MAGIC, sizeof header->magic);
    header->schema = SCHEMA;
    header->header_bytes = sizeof *header;
    memcpy(header->model, checkpoint->model, sizeof header->model);
    header->input = checkpoint->input;
    header->classes = checkpoint->classes;
    header->epochs = checkpoint->history.epochs;
    header->trained_s = checkpoint->history.trained_s;
    header->to_98_s = checkpoint->history.to_98_s;
    header->to_99_s = checkpoint->history.to_99_s;
    memcpy(header->scale, checkpoint->scale, sizeof header->scale);
    memcpy(header->offset, checkpoint->offset, sizeof header->offset);
    header->arena_values = checkpoint->arena_values;
    header->identity_bytes = strlen(checkpoint->identity);
    snprintf(header->revision, sizeof header->revision, "%s", env.revision);
}

/* A part of a file. */
struct part {
    const void *bytes;
    size_t size;
};

static uint64_t hash(const struct part *parts, size_t count)
{
    XXH3_state_t *state = XXH3_createState();
    uint64_t digest = 0;
    if (!state)
        return 0;
    XXH3_64bits_reset(state);
    for (size_t i = 0; i < count; i++)
        XXH3_64bits_update(state, parts[i].bytes, parts[i].size);
    digest = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return digest;
}

static enum status write_parts(const char *path, const struct part *parts, size_t count)
{
    struct file_writer writer;
    TRY(file_begin(&writer, path));
    for (size_t i = 0; i < count; i++)
        TRY(file_add(&writer, parts[i].bytes, parts[i].size));
    return file_end(&writer);
}

enum status checkpoint_write(const char *folder, uint32_t keep, const struct checkpoint *checkpoint)
{
    struct header header;
    char path[PATH_MAX];
    size_t bytes = checkpoint->arena_values * sizeof(float);
    fill_header(checkpoint, &header);
    const struct part parts[] = {{&header, sizeof header},
                                 {checkpoint->identity, header.identity_bytes},
                                 {checkpoint->state.parameters, bytes},
                                 {checkpoint->state.first, bytes},
                                 {checkpoint->state.second, bytes}};
    header.digest = hash(parts, COUNT_OF(parts));
    if (!path_of(folder, header.epochs, path))
        return status_set(STATUS_FAILED, "--checkpoint %s: the name is too long", folder);
    enum status status = write_parts(path, parts, COUNT_OF(parts));
    if (status != STATUS_OK)
        return status_prefix(status, "--checkpoint");
    int64_t oldest = header.epochs;
    for (uint32_t i = 1; i < keep && oldest >= 0; i++)
        oldest = highest(folder, oldest);
    while (oldest >= 0 && (oldest = highest(folder, oldest)) >= 0)
        if (path_of(folder, (uint32_t)oldest, path))
            unlink(path); /* what stays is only in the way */
    return STATUS_OK;
}

/* ---- Reading ---- */

static enum status check_header(struct header *header, const char *bytes, size_t size)
{
    if (size < sizeof header->magic || memcmp(bytes, MAGIC, sizeof header->magic) != 0)
        return status_set(STATUS_FAILED, "this is no checkpoint of fdsl-bench");
    if (size < offsetof(struct header, digest))
        return status_set(STATUS_FAILED, "this checkpoint is cut: %zu bytes", size);
    memcpy(header, bytes, size < sizeof *header ? size : sizeof *header);
    if (header->schema > SCHEMA)
        return status_set(STATUS_FAILED,
                          "a checkpoint of schema %" PRIu32
                          "; this program knows %d: use the revision that wrote it",
                          header->schema, SCHEMA);
    if (size < sizeof *header || header->header_bytes != sizeof *header)
        return status_set(STATUS_FAILED, "this checkpoint is cut or damaged");
    if (header->arena_values > size / sizeof(float) || header->identity_bytes > IDENTITY_MAX ||
        size != sizeof *header + header->identity_bytes + ARENAS * header->arena_values * sizeof(float))
        return status_set(STATUS_FAILED, "this checkpoint is cut or damaged: %zu bytes are not what it says",
                          size);
    return STATUS_OK;
}

/* Copies of what stands behind the header. */
static enum status copy_parts(const struct header *header, const char *at, struct checkpoint *checkpoint)
{
    float **arenas[ARENAS] = {&checkpoint->state.parameters, &checkpoint->state.first,
                              &checkpoint->state.second};
    size_t bytes = header->arena_values * sizeof(float);
    checkpoint->identity = strndup(at, header->identity_bytes);
    at += header->identity_bytes;
    for (size_t i = 0; i < ARENAS; i++, at += bytes) {
        *arenas[i] = malloc(bytes + 1);
        if (!*arenas[i] || !checkpoint->identity)
            return status_set(STATUS_FAILED, "out of memory for a checkpoint");
        memcpy(*arenas[i], at, bytes);
    }
    return STATUS_OK;
}

static enum status parse(const char *bytes, size_t size, struct checkpoint *checkpoint)
{
    struct header header = {0};
    TRY(check_header(&header, bytes, size));
    uint64_t digest = header.digest;
    header.digest = 0;
    const struct part parts[] = {{&header, sizeof header}, {bytes + sizeof header, size - sizeof header}};
    if (hash(parts, COUNT_OF(parts)) != digest)
        return status_set(STATUS_FAILED, "this checkpoint is damaged: its checksum is not that of its bytes");
    memcpy(checkpoint->model, header.model, sizeof checkpoint->model);
    checkpoint->input = header.input;
    checkpoint->classes = header.classes;
    memcpy(checkpoint->scale, header.scale, sizeof checkpoint->scale);
    memcpy(checkpoint->offset, header.offset, sizeof checkpoint->offset);
    checkpoint->history =
        (struct train_history){header.epochs, header.trained_s, header.to_98_s, header.to_99_s};
    checkpoint->arena_values = header.arena_values;
    return copy_parts(&header, bytes + sizeof header, checkpoint);
}

enum status checkpoint_read(const char *path, struct checkpoint *checkpoint)
{
    char *bytes;
    size_t size;
    *checkpoint = (struct checkpoint){0};
    TRY(bytes_read(path, &bytes, &size));
    enum status status = parse(bytes, size, checkpoint);
    free(bytes);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}

enum status checkpoint_read_latest(const char *folder, struct checkpoint *checkpoint, bool *found)
{
    char path[PATH_MAX];
    int64_t epochs = INT64_MAX;
    enum status status = STATUS_OK;
    *checkpoint = (struct checkpoint){0};
    *found = false;
    while (!*found && (epochs = highest(folder, epochs)) >= 0 && path_of(folder, (uint32_t)epochs, path)) {
        if (status != STATUS_OK)
            status_warn("%s; the one before it is taken", status_text());
        status = checkpoint_read(path, checkpoint);
        *found = status == STATUS_OK;
        if (!*found)
            checkpoint_free(checkpoint);
    }
    return status;
}

#else

static enum status unavailable(void)
{
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no checkpoints: install xxHash (libxxhash-dev) and build again");
}

bool checkpoint_exists(const char *folder)
{
    (void)folder;
    return false;
}

enum status checkpoint_check_folder(const char *folder)
{
    (void)folder;
    return unavailable();
}

enum status checkpoint_write(const char *folder, uint32_t keep, const struct checkpoint *checkpoint)
{
    (void)folder, (void)keep, (void)checkpoint;
    return unavailable();
}

enum status checkpoint_read(const char *path, struct checkpoint *checkpoint)
{
    (void)path;
    *checkpoint = (struct checkpoint){0};
    return unavailable();
}

enum status checkpoint_read_latest(const char *folder, struct checkpoint *checkpoint, bool *found)
{
    (void)folder;
    *found = false;
    *checkpoint = (struct checkpoint){0};
    return unavailable();
}

#endif
