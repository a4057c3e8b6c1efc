#include "train/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "machine/host.h"

/* ---- Options and their values ---- */

#define COUNT_MAX 1024 /* more values in a file are malformed; programs have far fewer options */

void option_values_free(struct option_values *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->of[i].word);
    free(list->of);
    *list = (struct option_values){0};
}

/* Appends a value whose word, if any, is `length` bytes at `word`. */
static enum status append(struct option_values *list, const struct option_value *value, const char *word,
                          size_t length)
{
    struct option_value *of = realloc(list->of, (list->count + 1) * sizeof *of);
    char *copy = word ? strndup(word, length) : NULL;
    if (of)
        list->of = of;
    if (!of || (word && !copy)) {
        free(copy);
        return status_set(STATUS_EXHAUSTED, "out of memory for the options");
    }
    of[list->count] = *value;
    of[list->count++].word = copy;
    return STATUS_OK;
}

enum status option_values_add(struct option_values *list, const struct option_spec *spec, const void *values)
{
    const void *at = (const char *)values + spec->offset;
    struct option_value value = {.kind = OPTION_VALUE_WORD};
    char text[256];
    const char *word = NULL;
    snprintf(value.name, sizeof value.name, "%s", spec->name);
    switch (spec->kind) {
    case OPTION_FLAG:
        value.kind = OPTION_VALUE_FLAG;
        value.whole = *(const bool *)at;
        return append(list, &value, NULL, 0);
    case OPTION_COUNT:
    case OPTION_BYTES:
        value.kind = OPTION_VALUE_WHOLE;
        value.whole = *(const uint64_t *)at;
        return spec->fallback || value.whole ? append(list, &value, NULL, 0) : STATUS_OK;
    case OPTION_REAL:
        value.kind = OPTION_VALUE_REAL;
        value.real = *(const double *)at;
        return isnan(value.real) ? STATUS_OK : append(list, &value, NULL, 0);
    case OPTION_CHOICE:
        word = *(const int *)at >= 0 ? spec->choices[*(const int *)at] : NULL;
        break;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        word = *(const char *const *)at;
        if (word && spec->maximum > spec->minimum) { /* a list of numbers: equal lists get equal texts */
            options_text(spec, values, text, sizeof text);
            word = text;
        }
        break;
    }
    return word ? append(list, &value, word, strlen(word)) : STATUS_OK;
}

enum status option_values_add_hash(struct option_values *list, const char *name, uint64_t hash)
{
    struct option_value value = {.kind = OPTION_VALUE_HASH, .whole = hash};
    snprintf(value.name, sizeof value.name, "%s", name);
    return append(list, &value, NULL, 0);
}

enum status option_values_copy(const struct option_values *list, struct option_values *copy)
{
    *copy = (struct option_values){0};
    for (size_t i = 0; i < list->count; i++) {
        const char *word = list->of[i].word;
        TRY(append(copy, &list->of[i], word, word ? strlen(word) : 0));
    }
    return STATUS_OK;
}

const struct option_value *option_values_find(const struct option_values *list, const char *name)
{
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->of[i].name, name) == 0)
            return &list->of[i];
    return NULL;
}

/* Returns whether a number and a word have the same text. Numbers of older checkpoints may be words today. */
static bool same_text(const struct option_value *a, const struct option_value *b)
{
    char texts[2][64];
    option_value_text(a, texts[0], sizeof texts[0]);
    option_value_text(b, texts[1], sizeof texts[1]);
    return (a->kind == OPTION_VALUE_WORD || b->kind == OPTION_VALUE_WORD) && strcmp(texts[0], texts[1]) == 0;
}

bool option_value_same(const struct option_value *a, const struct option_value *b)
{
    if (!a || !b)
        return a == b;
    /* Whole numbers of older checkpoints may be real ones today. */
    if (a->kind == OPTION_VALUE_WHOLE && b->kind == OPTION_VALUE_REAL)
        return (double)a->whole == b->real;
    if (a->kind == OPTION_VALUE_REAL && b->kind == OPTION_VALUE_WHOLE)
        return option_value_same(b, a);
    if (a->kind != b->kind)
        return same_text(a, b);
    return a->kind == OPTION_VALUE_WORD   ? strcmp(a->word, b->word) == 0
           : a->kind == OPTION_VALUE_REAL ? a->real == b->real
                                          : a->whole == b->whole;
}

void option_value_text(const struct option_value *value, char *text, size_t size)
{
    static const struct option_spec real = {.kind = OPTION_REAL}; /* of a struct that is one double */
    if (value->kind == OPTION_VALUE_WORD)
        snprintf(text, size, "%s", value->word);
    else if (value->kind == OPTION_VALUE_REAL)
        options_text(&real, &value->real, text, size);
    else
        snprintf(text, size, value->kind == OPTION_VALUE_HASH ? "%016" PRIx64 : "%" PRIu64, value->whole);
}

char *option_values_text(const struct option_values *list)
{
    char *all = NULL, text[4096];
    size_t size;
    FILE *stream = open_memstream(&all, &size);
    for (size_t i = 0; stream && i < list->count; i++) {
        option_value_text(&list->of[i], text, sizeof text);
        fprintf(stream, "%s%s=%s", i ? " " : "", list->of[i].name, text);
    }
    if (stream && text_close(stream))
        return all;
    free(all);
    return NULL;
}

/* Returns the index of a word in a list that ends with NULL; -1 if it is not there. */
static int choice_of(const char *word, const char *const *choices)
{
    for (int i = 0; choices[i]; i++)
        if (strcmp(word, choices[i]) == 0)
            return i;
    return -1;
}

enum status option_value_store(const struct option_value *value, const struct option_spec *spec, void *values)
{
    void *at = (char *)values + spec->offset;
    const bool word = value->kind == OPTION_VALUE_WORD;
    const double number = value->kind == OPTION_VALUE_REAL ? value->real : (double)value->whole;
    const bool inside = number >= spec->minimum && number <= spec->maximum;
    switch (spec->kind) {
    case OPTION_FLAG:
        if (value->kind != OPTION_VALUE_FLAG)
            break;
        *(bool *)at = value->whole;
        return STATUS_OK;
    case OPTION_COUNT:
    case OPTION_BYTES:
        if (value->kind != OPTION_VALUE_WHOLE || !inside)
            break;
        *(uint64_t *)at = value->whole;
        return STATUS_OK;
    case OPTION_REAL:
        if (value->kind != OPTION_VALUE_REAL || !inside)
            break;
        *(double *)at = value->real;
        return STATUS_OK;
    case OPTION_CHOICE:
        if (!word || choice_of(value->word, spec->choices) < 0)
            break;
        *(int *)at = choice_of(value->word, spec->choices);
        return STATUS_OK;
    case OPTION_TEXT:
    case OPTION_OUTPUT:
        if (!word || !*value->word)
            break;
        *(const char **)at = value->word;
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "it has a value of --%s that this program does not accept", spec->name);
}

/* ---- Bytes ---- */

static void put(FILE *stream, uint64_t number, int bytes)
{
    for (int i = 0; i < bytes; i++)
        fputc((int)(number >> 8 * i & 255), stream);
}

/* Encodes a list as in a checkpoint. Each value has one byte for its kind, one for the length of its name,
 * and the name. A word follows as its length in 4 bytes and its bytes; any other value as 8 bytes, which for
 * a real number are those of an IEEE double. All numbers are little-endian. `*bytes` is owned by the caller.
 */
static enum status option_values_encode(const struct option_values *list, unsigned char **bytes, size_t *size)
{
    char *all = NULL;
    FILE *stream = open_memstream(&all, size);
    for (size_t i = 0; stream && i < list->count; i++) {
        const struct option_value *value = &list->of[i];
        uint64_t number = value->whole;
        put(stream, value->kind, 1);
        put(stream, strlen(value->name), 1);
        fputs(value->name, stream);
        if (value->kind == OPTION_VALUE_WORD) {
            put(stream, strlen(value->word), 4);
            fputs(value->word, stream);
            continue;
        }
        if (value->kind == OPTION_VALUE_REAL)
            memcpy(&number, &value->real, sizeof number);
        put(stream, number, 8);
    }
    const bool whole = stream && text_close(stream);
    *bytes = (unsigned char *)all;
    return ALLOCATED(whole, "out of memory for the options");
}

/* Bytes that remain to be decoded. */
struct input {
    const unsigned char *at;
    size_t left;
};

/* Takes `count` bytes. Returns NULL if there are fewer. */
static const unsigned char *take(struct input *input, size_t count)
{
    const unsigned char *at = input->at;
    if (input->left < count)
        return NULL;
    input->at += count;
    input->left -= count;
    return at;
}

/* Takes a number of `bytes` bytes. */
static bool take_number(struct input *input, size_t bytes, uint64_t *number)
{
    const unsigned char *at = take(input, bytes);
    *number = 0;
    for (size_t i = 0; at && i < bytes; i++)
        *number |= (uint64_t)at[i] << 8 * i;
    return at;
}

/* Takes a text of `length` bytes without a zero byte. */
static const char *take_text(struct input *input, uint64_t length)
{
    const char *text = (const char *)take(input, length);
    return text && !memchr(text, 0, length) ? text : NULL;
}

/* Takes a value. `*word` and `*length` become its word; `*word` is NULL if it has none. */
static bool take_value(struct input *input, struct option_value *value, const char **word, uint64_t *length)
{
    uint64_t kind, name_length;
    *word = NULL;
    *length = 0;
    if (!take_number(input, 1, &kind) || !take_number(input, 1, &name_length) || name_length == 0 ||
        name_length >= OPTION_VALUE_NAME_MAX)
        return false;
    const char *name = take_text(input, name_length);
    if (!name || kind < OPTION_VALUE_FLAG || kind > OPTION_VALUE_HASH)
        return false;
    memcpy(value->name, name, name_length);
    value->kind = (enum option_value_kind)kind;
    if (value->kind == OPTION_VALUE_WORD)
        return take_number(input, 4, length) && (*word = take_text(input, *length));
    if (!take_number(input, 8, &value->whole))
        return false;
    if (value->kind == OPTION_VALUE_REAL) {
        memcpy(&value->real, &value->whole, sizeof value->real);
        value->whole = 0;
    }
    return isfinite(value->real) && (value->kind != OPTION_VALUE_FLAG || value->whole <= 1);
}

enum status option_values_decode(const unsigned char *bytes, size_t size, struct option_values *list)
{
    struct input input = {bytes, size};
    *list = (struct option_values){0};
    while (input.left > 0) {
        struct option_value value = {.real = 0};
        const char *word;
        uint64_t length;
        if (list->count == COUNT_MAX || !take_value(&input, &value, &word, &length))
            return status_set(STATUS_FAILED, "its options are malformed");
        TRY(append(list, &value, word, length));
    }
    return STATUS_OK;
}

/* ---- Checkpoints ---- */

#define MAGIC      "FDSLCKPT"
#define SCHEMA     8
#define ARENAS_MIN 3         /* parameters, m, v */
#define ARENAS_MAX 4         /* parameters, m, v, moving average of the parameters */
#define PART_MAX   (1 << 24) /* a row has about 1 KB, and there can be one per rank */
#define NAME_SIZE  64        /* bytes of a checkpoint's file name, with the terminating zero */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "structs and arenas are stored as they are in memory");

/* The parts between the header and the arenas. */
enum { PART_IDENTITY, PART_SAMPLES, PART_DATA, PART_ROW, PART_SHARES, PARTS };

/* The header of a checkpoint file, little-endian. The parts follow it, and then the arenas. */
struct header {
    char magic[8];
    uint32_t schema, header_bytes;
    uint64_t digest; /* XXH3-64 of the whole file, computed with this field zero */
    char model[MODEL_NAME_MAX];
    struct shape input;
    uint32_t classes, epochs;
    double trained_s, to_98_s, to_99_s;
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX];
    struct train_partial partial;
    uint64_t hashes[DATA_PARTS];
    uint64_t arenas, arena_values, part_bytes[PARTS];
    uint32_t balance, unused; /* of the shares */
    struct loss_scale loss_scale;
    char revision[64]; /* revision of the program that wrote the file */
};

void checkpoint_free(struct checkpoint *checkpoint)
{
    option_values_free(&checkpoint->identity);
    option_values_free(&checkpoint->samples);
    free(checkpoint->data);
    free(checkpoint->row);
    free(checkpoint->shares);
    free(checkpoint->state.parameters);
    free(checkpoint->state.m);
    free(checkpoint->state.v);
    free(checkpoint->state.ema);
    *checkpoint = (struct checkpoint){0};
}

enum status checkpoint_find(const char *option, const char *path, struct checkpoint *checkpoint)
{
    struct stat info;
    bool found;
    *checkpoint = (struct checkpoint){0};
    if (stat(path, &info) != 0)
        return status_set(STATUS_USAGE, "%s %s: %s", option, path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return checkpoint_read(path, checkpoint);
    TRY(checkpoint_read_latest(path, true, checkpoint, &found));
    return found ? STATUS_OK
                 : status_set(
                       STATUS_USAGE,
                       "%s %s: the folder has no checkpoint; name a checkpoint, or a folder that has one",
                       option, path);
}

void checkpoint_describe(const struct model *model, struct checkpoint *checkpoint)
{
    snprintf(checkpoint->model, sizeof checkpoint->model, "%s", model->name);
    checkpoint->input = model->input;
    checkpoint->classes = model->classes;
    checkpoint->arena_values = model->arena_values;
}

enum status checkpoint_model(const struct checkpoint *checkpoint, struct model *model)
{
    const struct model_table *table = model_find(checkpoint->model);
    if (!table)
        return status_set(STATUS_FAILED, "this program does not know its model '%.15s'", checkpoint->model);
    TRY(model_build(table, checkpoint->input, checkpoint->classes, model));
    return model->arena_values == checkpoint->arena_values
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "its network %s has another number of parameters than %s in this program",
                            checkpoint->model, checkpoint->model);
}

/* ---- Checksums ---- */

/* A part of a file. */
struct part {
    const void *bytes;
    size_t size;
};

uint64_t checkpoint_hash(const struct checkpoint *checkpoint)
{
    return checksum_seeded(checkpoint_parameters(checkpoint), checkpoint->arena_values * sizeof(float), 0);
}

#ifdef HAVE_XXHASH
static enum status hash(const struct part *parts, size_t count, uint64_t *digest)
{
    XXH3_state_t *state = XXH3_createState();
    TRY(ALLOCATED(state, "out of memory for the checksum"));
    XXH3_64bits_reset(state);
    for (size_t i = 0; i < count; i++)
        XXH3_64bits_update(state, parts[i].bytes, parts[i].size);
    *digest = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return STATUS_OK;
}
#else
static enum status hash(const struct part *parts, size_t count, uint64_t *digest)
{
    (void)parts, (void)count, (void)digest;
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no checkpoints: install xxHash (libxxhash-dev) and build again");
}
#endif

/* ---- Names ---- */

/* Returns a point of training as one number: the completed epochs in the upper 32 bits, the steps after them
 * in the lower. Later points have larger numbers. */
static int64_t point_of(uint32_t epochs, uint32_t steps)
{
    return (int64_t)(((uint64_t)epochs << 32 | steps) & INT64_MAX);
}

/* Writes the name of the checkpoint at a point: "epoch-000012.ckpt", or "epoch-000012.step-0000000300.ckpt".
 */
static void name_of(int64_t point, char name[NAME_SIZE])
{
    const uint32_t epochs = (uint32_t)(point >> 32), steps = (uint32_t)point;
    if (steps > 0)
        snprintf(name, NAME_SIZE, "epoch-%06" PRIu32 ".step-%010" PRIu32 ".ckpt", epochs, steps);
    else
        snprintf(name, NAME_SIZE, "epoch-%06" PRIu32 ".ckpt", epochs);
}

static bool path_of(const char *folder, int64_t point, char path[PATH_MAX])
{
    char name[NAME_SIZE];
    name_of(point, name);
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX;
}

/* Returns the point in a checkpoint's name, which may have a suffix; -1 for any other name. `*suffix` becomes
 * the suffix. */
static int64_t point_in(const char *name, const char **suffix)
{
    uint32_t epochs, steps = 0;
    char again[NAME_SIZE];
    if (sscanf(name, "epoch-%" SCNu32 ".step-%" SCNu32, &epochs, &steps) < 1 || epochs > INT32_MAX)
        return -1;
    const int64_t point = point_of(epochs, steps);
    name_of(point, again);
    *suffix = name + strlen(again);
    return strncmp(name, again, strlen(again)) == 0 ? point : -1;
}

/* Returns the point of a checkpoint with this name; -1 for any other name. */
static int64_t checkpoint_point(const char *name)
{
    const char *suffix;
    const int64_t point = point_in(name, &suffix);
    return point >= 0 && *suffix == '\0' ? point : -1;
}

/* Sets `*found` to the latest point before `below` among the folder's checkpoints; -1 if there is none, or no
 * folder. */
static enum status latest_before(const char *folder, int64_t below, int64_t *found)
{
    *found = -1;
    DIR *directory = opendir(folder);
    if (!directory && errno == ENOENT)
        return STATUS_OK;
    if (!directory)
        return status_set(STATUS_FAILED, "the folder of checkpoints %s cannot be read: %s", folder,
                          strerror(errno));
    errno = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        int64_t point = checkpoint_point(entry->d_name);
        if (point < below && point > *found)
            *found = point;
    }
    int cause = errno;
    closedir(directory);
    return cause == 0 ? STATUS_OK
                      : status_set(STATUS_FAILED, "the folder of checkpoints %s cannot be read: %s", folder,
                                   strerror(cause));
}

enum status checkpoint_exists(const char *folder, bool *exists)
{
    int64_t latest;
    TRY(latest_before(folder, INT64_MAX, &latest));
    *exists = latest >= 0;
    return STATUS_OK;
}

enum status checkpoint_refuse_later(const char *folder, uint32_t epochs, uint32_t steps)
{
    int64_t latest;
    TRY(latest_before(folder, INT64_MAX, &latest));
    return latest <= point_of(epochs, steps)
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "%s holds a checkpoint of a later step, which would be loaded in place of this one; "
                     "name another folder, or remove it",
                     folder);
}

/* Returns whether a file has the name of a checkpoint. Such a file is damaged if it is no checkpoint; any
 * other file may have been named by mistake. */
static bool has_ending(const char *path)
{
    return text_ends_in(path, ".ckpt");
}

/* ---- The folder ---- */

/* Returns whether `name` is a temporary name that file_begin() gave to an incomplete checkpoint, such as
 * "epoch-000012.ckpt.1234-0.tmp". */
static bool is_temporary(const char *name)
{
    const char *suffix;
    long process;
    int number, used = 0;
    return point_in(name, &suffix) >= 0 && sscanf(suffix, ".%ld-%d.tmp%n", &process, &number, &used) == 2 &&
           used > 0 && suffix[used] == '\0';
}

/* Removes temporary files of killed processes. The caller must hold the lock, so that no other process is
 * writing such files. */
static void remove_temporaries(const char *folder)
{
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (is_temporary(entry->d_name))
            (void)unlinkat(dirfd(directory), entry->d_name, 0); /* may fail: a leftover file does no harm */
    if (directory)
        closedir(directory);
}

enum status checkpoint_lock(const char *folder, bool change, int *lock)
{
    char path[PATH_MAX];
    int failed;
    *lock = -1;
    if (snprintf(path, sizeof path, "%s/.lock", folder) >= (int)sizeof path)
        return status_set(STATUS_USAGE, "--checkpoint %s: the name is too long; use a shorter path", folder);
    int fd = open(path, O_RDWR | (change ? O_CREAT : 0) | O_CLOEXEC,
                  0666); /* NFS grants an exclusive lock only on a file opened for writing */
    if (fd < 0 && errno == ENOENT && !change)
        return STATUS_OK;
    if (fd < 0)
        return status_set(STATUS_USAGE, "--checkpoint: %s cannot be opened: %s", path, strerror(errno));
    while ((failed = flock(fd, LOCK_EX | LOCK_NB)) != 0 && errno == EINTR)
        ;
    if (failed && errno == EWOULDBLOCK) {
        close(fd);
        return status_set(
            STATUS_USAGE,
            "--checkpoint %s: another training run is writing there; wait until it ends, or name "
            "another folder",
            folder);
    }
    *lock = fd;
    if (failed)
        status_warn(
            "--checkpoint %s cannot be locked (%s); make sure that no other training run writes there",
            folder, strerror(errno));
    else if (change)
        remove_temporaries(folder);
    return STATUS_OK;
}

void checkpoint_unlock(int lock)
{
    if (lock >= 0)
        close(lock);
}

enum status checkpoint_check_folder(const char *folder, bool change)
{
    char path[PATH_MAX];
    struct stat info;
    uint64_t unused;
    TRY(hash(NULL, 0, &unused)); /* STATUS_UNAVAILABLE without xxHash */
    if (change && mkdir(folder, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--checkpoint %s cannot be created: %s", folder, strerror(errno));
    const bool exists = stat(folder, &info) == 0;
    if (exists && !S_ISDIR(info.st_mode))
        return status_set(STATUS_USAGE,
                          "--checkpoint %s is not a folder; give a folder, and --resume to continue from its "
                          "latest checkpoint",
                          folder);
    if (!path_of(folder, 0, path))
        return status_set(STATUS_USAGE, "--checkpoint %s: the name is too long; use a shorter path", folder);
    return status_prefix(exists ? file_check_new(path) : file_check_new_folder(folder), "--checkpoint");
}

/* ---- Writing ---- */

static void fill_header(const struct checkpoint *checkpoint, const struct part parts[PARTS],
                        struct header *header)
{
    memset(header, 0, sizeof *header); /* also the padding, which is hashed */
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
    header->arenas = checkpoint->state.ema ? ARENAS_MAX : ARENAS_MIN;
    header->arena_values = checkpoint->arena_values;
    header->partial = checkpoint->partial;
    memcpy(header->hashes, checkpoint->hashes, sizeof header->hashes);
    header->loss_scale = checkpoint->state.scale;
    for (size_t i = 0; i < PARTS; i++)
        header->part_bytes[i] = parts[i].size;
    header->balance = checkpoint->balance;
    snprintf(header->revision, sizeof header->revision, "%s", env_revision());
}

static enum status write_parts(const char *path, const struct part *parts, size_t count)
{
    struct file_writer writer;
    TRY(file_begin(&writer, path));
    for (size_t i = 0; i < count; i++)
        TRY(file_add(&writer, parts[i].bytes, parts[i].size));
    return file_end(&writer);
}

/* Rejects parts that are longer than the reader accepts. */
static enum status check_parts(const char *folder, const struct part parts[PARTS])
{
    static const char *const names[PARTS] = {[PART_IDENTITY] = "options",
                                             [PART_SAMPLES] = "options of the samples",
                                             [PART_DATA] = "value of --data",
                                             [PART_ROW] = "rows of all ranks",
                                             [PART_SHARES] = "shares"};
    for (size_t i = 0; i < PARTS; i++)
        if (parts[i].size > PART_MAX)
            return status_set(
                STATUS_FAILED,
                "--checkpoint %s: the length of the %s is %zu bytes, but a checkpoint can hold only %d%s",
                folder, names[i], parts[i].size, PART_MAX,
                i >= PART_ROW ? "; start fewer ranks, or drop --checkpoint" : "");
    return STATUS_OK;
}

/* Writes the file of a checkpoint whose options are encoded in `identity` and `samples`. */
static enum status write_file(const char *folder, const struct checkpoint *checkpoint, struct part identity,
                              struct part samples)
{
    struct header header;
    char path[PATH_MAX];
    const size_t bytes = checkpoint->arena_values * sizeof(float);
    const struct part parts[] = {{&header, sizeof header},
                                 identity,
                                 samples,
                                 {checkpoint->data, strlen(checkpoint->data)},
                                 {checkpoint->row, strlen(checkpoint->row)},
                                 {checkpoint->shares, checkpoint->share_count * sizeof *checkpoint->shares},
                                 {checkpoint->state.parameters, bytes},
                                 {checkpoint->state.m, bytes},
                                 {checkpoint->state.v, bytes},
                                 {checkpoint->state.ema, bytes}};
    TRY(check_parts(folder, parts + 1));
    fill_header(checkpoint, parts + 1, &header);
    const size_t count = 1 + PARTS + header.arenas;
    uint64_t digest = 0; /* computed while header.digest is 0 */
    TRY(hash(parts, count, &digest));
    header.digest = digest;
    if (!path_of(folder, point_of(header.epochs, header.partial.steps), path))
        return status_set(STATUS_FAILED, "--checkpoint %s: the name is too long; use a shorter path", folder);
    return status_prefix(write_parts(path, parts, count), "--checkpoint");
}

enum status checkpoint_write(const char *folder, uint32_t keep, const struct checkpoint *checkpoint)
{
    FREED unsigned char *identity = NULL, *samples = NULL;
    size_t identity_bytes, samples_bytes;
    char path[PATH_MAX];
    TRY(option_values_encode(&checkpoint->identity, &identity, &identity_bytes));
    TRY(option_values_encode(&checkpoint->samples, &samples, &samples_bytes));
    TRY(write_file(folder, checkpoint, (struct part){identity, identity_bytes},
                   (struct part){samples, samples_bytes}));
    int64_t oldest = point_of(checkpoint->history.epochs, checkpoint->partial.steps);
    for (uint32_t i = 1; i < keep && oldest >= 0; i++)
        TRY(latest_before(folder, oldest, &oldest));
    while (oldest >= 0) {
        TRY(latest_before(folder, oldest, &oldest));
        if (oldest >= 0 && path_of(folder, oldest, path))
            unlink(path); /* may fail: a leftover file does no harm */
    }
    return STATUS_OK;
}

/* ---- Reading ---- */

/* Returns the error for a file that is not a complete checkpoint, for example after a power failure. */
static enum status damaged(bool *is_damaged, const char *reason)
{
    *is_damaged = true;
    return status_set(STATUS_FAILED, "%s", reason);
}

static bool fits(const struct header *header, size_t size)
{
    size_t whole = sizeof *header;
    for (size_t i = 0; i < PARTS; i++) {
        if (header->part_bytes[i] > PART_MAX)
            return false;
        whole += header->part_bytes[i];
    }
    return header->arenas >= ARENAS_MIN && header->arenas <= ARENAS_MAX &&
           header->arena_values <= size / sizeof(float) &&
           size == whole + header->arenas * header->arena_values * sizeof(float);
}

/* `named`: the file has the name of a checkpoint. */
static enum status check_header(struct header *header, const char *bytes, size_t size, bool named,
                                bool *is_damaged)
{
    const bool begins = size >= sizeof header->magic && memcmp(bytes, MAGIC, sizeof header->magic) == 0;
    if (!begins && named)
        return damaged(
            is_damaged,
            "this checkpoint is truncated or damaged: its first bytes are not those of a checkpoint");
    if (!begins)
        return damaged(is_damaged,
                       "this is not a checkpoint of fdsl-bench; the names of files of tensors must end in "
                       ".safetensors, .npz, .pt, .pth or .pth.tar");
    if (size < offsetof(struct header, digest))
        return damaged(is_damaged, "this checkpoint is truncated");
    memcpy(header, bytes, size < sizeof *header ? size : sizeof *header);
    if (header->schema != SCHEMA)
        return status_set(STATUS_FAILED,
                          "this checkpoint has schema %" PRIu32
                          "; this program reads %d: use the revision that wrote it",
                          header->schema, SCHEMA);
    if (size < sizeof *header || header->header_bytes != sizeof *header || !fits(header, size))
        return damaged(is_damaged,
                       "this checkpoint is truncated or damaged: its size does not match its header");
    return STATUS_OK;
}

/* Copies the parts and arenas that follow the header. */
static enum status copy_parts(const struct header *header, const char *at, struct checkpoint *checkpoint,
                              bool *is_damaged)
{
    const char *parts[PARTS];
    float **arenas[ARENAS_MAX] = {&checkpoint->state.parameters, &checkpoint->state.m, &checkpoint->state.v,
                                  &checkpoint->state.ema};
    const size_t bytes = header->arena_values * sizeof(float);
    for (size_t i = 0; i < PARTS; at += header->part_bytes[i++])
        parts[i] = at;
    struct option_values *const lists[] = {&checkpoint->identity, &checkpoint->samples};
    for (size_t i = 0; i < COUNT_OF(lists); i++) {
        enum status status =
            option_values_decode((const unsigned char *)parts[i], header->part_bytes[i], lists[i]);
        *is_damaged = status == STATUS_FAILED;
        TRY(status);
    }
    checkpoint->data = strndup(parts[PART_DATA], header->part_bytes[PART_DATA]);
    checkpoint->row = strndup(parts[PART_ROW], header->part_bytes[PART_ROW]);
    checkpoint->share_count = (uint32_t)(header->part_bytes[PART_SHARES] / sizeof *checkpoint->shares);
    checkpoint->shares = malloc(header->part_bytes[PART_SHARES] + 1);
    TRY(ALLOCATED(checkpoint->data && checkpoint->row && checkpoint->shares,
                  "out of memory for a checkpoint"));
    memcpy(checkpoint->shares, parts[PART_SHARES], header->part_bytes[PART_SHARES]);
    for (size_t i = 0; i < header->arenas; i++, at += bytes) {
        *arenas[i] = malloc(bytes + 1);
        TRY(ALLOCATED(*arenas[i], "out of memory for a checkpoint"));
        memcpy(*arenas[i], at, bytes);
    }
    return STATUS_OK;
}

static enum status parse(const char *bytes, size_t size, bool named, struct checkpoint *checkpoint,
                         bool *is_damaged)
{
    struct header header = {0};
    TRY(check_header(&header, bytes, size, named, is_damaged));
    uint64_t digest = header.digest, is = 0;
    header.digest = 0;
    const struct part parts[] = {{&header, sizeof header}, {bytes + sizeof header, size - sizeof header}};
    TRY(hash(parts, COUNT_OF(parts), &is));
    if (is != digest)
        return damaged(is_damaged, "this checkpoint is damaged: its checksum does not match");
    if (!memchr(header.model, '\0', sizeof header.model))
        return damaged(is_damaged, "this checkpoint is damaged: the name of its model is not terminated");
    memcpy(checkpoint->model, header.model, sizeof checkpoint->model);
    checkpoint->input = header.input;
    checkpoint->classes = header.classes;
    memcpy(checkpoint->scale, header.scale, sizeof checkpoint->scale);
    memcpy(checkpoint->offset, header.offset, sizeof checkpoint->offset);
    checkpoint->history =
        (struct train_history){header.epochs, header.trained_s, header.to_98_s, header.to_99_s};
    checkpoint->partial = header.partial;
    memcpy(checkpoint->hashes, header.hashes, sizeof checkpoint->hashes);
    checkpoint->arena_values = header.arena_values;
    checkpoint->state.scale = header.loss_scale;
    checkpoint->balance = header.balance;
    return copy_parts(&header, bytes + sizeof header, checkpoint, is_damaged);
}

/* Reads a checkpoint. Sets `*is_damaged` if the file could be read but is not a complete checkpoint. */
static enum status read_file(const char *path, struct checkpoint *checkpoint, bool *is_damaged)
{
    FREED char *bytes = NULL;
    size_t size;
    *checkpoint = (struct checkpoint){0};
    *is_damaged = false;
    TRY(file_read(path, &bytes, &size));
    return status_prefix(parse(bytes, size, has_ending(path), checkpoint, is_damaged), "%s", path);
}

enum status checkpoint_read(const char *path, struct checkpoint *checkpoint)
{
    bool is_damaged;
    enum status status = read_file(path, checkpoint, &is_damaged);
    return is_damaged && has_ending(path) ? status_append(status, "; name another checkpoint of its folder")
                                          : status;
}

enum status checkpoint_read_latest(const char *folder, bool warn, struct checkpoint *checkpoint, bool *found)
{
    char path[PATH_MAX];
    int64_t point;
    bool is_damaged = false;
    *checkpoint = (struct checkpoint){0};
    *found = false;
    TRY(latest_before(folder, INT64_MAX, &point));
    enum status status = STATUS_OK;
    while (!*found && point >= 0 && path_of(folder, point, path)) {
        status = read_file(path, checkpoint, &is_damaged);
        *found = status == STATUS_OK;
        if (*found)
            break;
        checkpoint_free(checkpoint);
        if (!is_damaged)
            return status;
        const struct failure failure = status_save(status);
        TRY(latest_before(folder, point, &point));
        if (point >= 0 && warn)
            status_warn("%s; using the previous checkpoint", failure.text);
        (void)status_restore(&failure);
        status_prefix(status,
                      "no checkpoint in %s can be used, because all are damaged; delete them to start from "
                      "the beginning, or name another folder. The oldest",
                      folder);
    }
    return status;
}
