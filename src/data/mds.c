#include "data/mds.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "core/file.h"
#include "core/array.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/remote_cache.h"

#define AXES_MAX    63                          /* of an array */
#define NAME_MAX_   (MEMBER_EXTENSION_MAX - 16) /* of a column: its member has a longer name */
#define SAMPLES_MAX (UINT32_MAX / 2)

/* ---- Encodings ---- */

enum kind { KIND_IMAGE, KIND_INTEGER, KIND_TEXT, KIND_JSON, KIND_BYTES, KIND_ARRAY, KIND_OTHER };

/* How values are encoded, by the name up to a colon. */
static const struct encoding {
    const char *name, *format; /* in the index, and of members */
    enum kind kind;
    uint32_t bytes; /* 0: any */
    bool is_signed;
    const char *refused; /* why the values are not read, with a remedy */
} encodings[] = {
#define AS_FILES "write the set with the encoding png or jpeg"
    {"jpeg", "jpg", KIND_IMAGE, 0, false, NULL},
    {"png", "png", KIND_IMAGE, 0, false, NULL},
    {"bytes", "bin", KIND_BYTES, 0, false, NULL},
    {"str", "txt", KIND_TEXT, 0, false, NULL},
    {"str_int", "txt", KIND_TEXT, 0, false, NULL},
    {"str_float", "txt", KIND_TEXT, 0, false, NULL},
    {"str_decimal", "txt", KIND_TEXT, 0, false, NULL},
    {"json", "json", KIND_JSON, 0, false, NULL},
    {"int", "int64", KIND_INTEGER, 8, true, NULL},
    {"int8", "int8", KIND_INTEGER, 1, true, NULL},
    {"int16", "int16", KIND_INTEGER, 2, true, NULL},
    {"int32", "int32", KIND_INTEGER, 4, true, NULL},
    {"int64", "int64", KIND_INTEGER, 8, true, NULL},
    {"uint8", "uint8", KIND_INTEGER, 1, false, NULL},
    {"uint16", "uint16", KIND_INTEGER, 2, false, NULL},
    {"uint32", "uint32", KIND_INTEGER, 4, false, NULL},
    {"uint64", "uint64", KIND_INTEGER, 8, false, NULL},
    {"float16", "float16", KIND_OTHER, 2, false, NULL},
    {"float32", "float32", KIND_OTHER, 4, false, NULL},
    {"float64", "float64", KIND_OTHER, 8, false, NULL},
    {"ndarray", "ndarray", KIND_ARRAY, 0, false, NULL},
    {"pil", "pil", KIND_OTHER, 0, false, "which stores raw pixels of Pillow; " AS_FILES},
    {"pkl", "pkl", KIND_OTHER, 0, false,
     "which runs code of the set when it is read, and is never read; write the set with another encoding"},
    {"jpeg_array", "jpegs", KIND_OTHER, 0, false, "which has several images per sample; " AS_FILES},
    {"jpegarray", "jpegs", KIND_OTHER, 0, false, "which has several images per sample; " AS_FILES},
    {"list[jpeg]", "jpegs", KIND_OTHER, 0, false, "which has several images per sample; " AS_FILES},
    {"list[png]", "pngs", KIND_OTHER, 0, false, "which has several images per sample; " AS_FILES},
    {"list[pil]", "pils", KIND_OTHER, 0, false, "which has several images per sample; " AS_FILES},
};

/* Returns the encoding, or NULL. */
static const struct encoding *encoding_of(const char *text)
{
    const size_t length = strcspn(text, ":");
    for (size_t i = 0; i < COUNT_OF(encodings); i++)
        if (strlen(encodings[i].name) == length && strncmp(encodings[i].name, text, length) == 0)
            return &encodings[i];
    return NULL;
}

/* The types of arrays, by their numbers in the file. */
static const struct array_type {
    uint8_t number;
    const char *name;
    uint32_t bytes;
    bool is_read;
    enum dtype type;
} array_types[] = {
    {8, "uint8", 1, true, DTYPE_U8},     {9, "int8", 1, false, 0},
    {16, "uint16", 2, false, 0},         {17, "int16", 2, false, 0},
    {18, "float16", 2, true, DTYPE_F16}, {32, "uint32", 4, false, 0},
    {33, "int32", 4, false, 0},          {34, "float32", 4, true, DTYPE_F32},
    {64, "uint64", 8, false, 0},         {65, "int64", 8, false, 0},
    {66, "float64", 8, false, 0},
};

/* Returns the type with this name or, if that is NULL, with this number; NULL if there is none. */
static const struct array_type *type_of(const char *name, size_t length, uint8_t number)
{
    for (size_t i = 0; i < COUNT_OF(array_types); i++) {
        const struct array_type *type = &array_types[i];
        if (name ? strlen(type->name) == length && strncmp(type->name, name, length) == 0
                 : type->number == number)
            return type;
    }
    return NULL;
}

/* The shape of an array. */
struct array_shape {
    const struct array_type *type; /* NULL: each array has its own */
    uint32_t axes;                 /* 0: each array has its own */
    uint64_t sizes[AXES_MAX];
};

/* Parses the type and the shape in "ndarray[:TYPE[:SIZE,...]]". Returns false if they are wrong. */
static bool read_shape(const char *encoding, struct array_shape *shape)
{
    *shape = (struct array_shape){.type = NULL};
    const char *at = encoding + strlen("ndarray");
    if (!*at)
        return true;
    const size_t length = strcspn(++at, ":");
    if (length && !(shape->type = type_of(at, length, 0)))
        return false;
    for (at += length; *at; shape->axes++) {
        char *end;
        if (shape->axes == AXES_MAX || at[1] < '1' || at[1] > '9')
            return false;
        shape->sizes[shape->axes] = strtoull(at + 1, &end, 10);
        if (shape->sizes[shape->axes] > UINT32_MAX || (*end && *end != ','))
            return false;
        at = end;
    }
    return true;
}

/* Returns the number of bytes, or UINT64_MAX if it does not fit into a sample. */
static uint64_t shape_bytes(const struct array_shape *shape)
{
    uint64_t bytes = shape->type->bytes;
    for (uint32_t i = 0; i < shape->axes; i++)
        if (__builtin_mul_overflow(bytes, shape->sizes[i], &bytes))
            return UINT64_MAX;
    return bytes;
}

/* Describes an array as an image: (height, width), (channels, height, width), (height, width, 1 or 3) or
 * (channels, depth, height, width). STATUS_USAGE if it is none. */
static enum status image_of(const char *column, const struct array_shape *shape, struct image *image)
{
    const uint64_t *size = shape->sizes;
    const uint32_t axes = shape->axes;
    const bool last = axes == 3 && (size[2] == 1 || size[2] == 3) && size[0] != 1 && size[0] != 3;
    bool fits = axes >= 2 && axes <= 4;
    for (uint32_t i = 0; i < axes && fits; i++)
        fits = size[i] > 0 && size[i] <= INT32_MAX;
    if (!fits || !shape->type->is_read)
        return status_set(STATUS_USAGE,
                          "its column '%s' has arrays of %s with %u axes, but images are arrays of uint8, "
                          "float16 or float32 with the axes (height, width), (channels, height, width), "
                          "(height, width, 1 or 3) or (channels, depth, height, width); name another column "
                          "with %simage",
                          column, shape->type->name, axes, OPTION_DASHES);
    *image = (struct image){.channels = axes == 2 ? 1 : (uint32_t)(last ? size[2] : size[0]),
                            .depth = axes == 4 ? (uint32_t)size[1] : 1,
                            .height = (uint32_t)(last ? size[0] : size[axes - 2]),
                            .width = (uint32_t)(last ? size[1] : size[axes - 1]),
                            .type = shape->type->type,
                            .interleaved = last};
    return STATUS_OK;
}

/* ---- The index ---- */

bool mds_is_shard(const char *name)
{
    static const char *const ends[] = {".mds",    ".mds.zstd", ".mds.zst",   ".mds.gz",
                                       ".mds.br", ".mds.bz2",  ".mds.snappy"};
    bool is = false;
    for (size_t i = 0; i < COUNT_OF(ends); i++)
        is |= text_ends_in(name, ends[i]);
    return is;
}

void mds_free(struct mds *mds)
{
    for (uint32_t c = 0; c < MDS_COLUMNS; c++) {
        free(mds->columns[c].name);
        free(mds->columns[c].member);
        free(mds->columns[c].encoding);
    }
    wids_free(&mds->list);
    free(mds->first);
    *mds = (struct mds){0};
}

#ifdef HAVE_JANSSON

static enum status read_column(const char *name, const char *text, const json_t *size,
                               struct mds_column *column)
{
    struct array_shape shape;
    const struct encoding *encoding = text ? encoding_of(text) : NULL;
    const uint64_t bytes = json_is_integer(size) ? (uint64_t)json_integer_value(size) : 0;
    if (!name || !*name || strlen(name) > NAME_MAX_)
        return status_set(STATUS_FAILED, "the name of a column is missing or has more than %d bytes",
                          NAME_MAX_);
    if (!encoding)
        return status_set(STATUS_FAILED, "column '%s' has the unknown encoding '%.60s'", name,
                          text ? text : "");
    if (bytes > UINT32_MAX || (size && !json_is_null(size) && !json_is_integer(size)) ||
        (encoding->bytes && bytes != encoding->bytes) || (encoding->kind == KIND_IMAGE && bytes))
        return status_set(STATUS_FAILED, "column '%s' of %s has a wrong size", name, text);
    if (encoding->kind == KIND_ARRAY &&
        (!read_shape(text, &shape) || (shape.type && shape.axes ? shape_bytes(&shape) != bytes : bytes != 0)))
        return status_set(STATUS_FAILED,
                          "column '%s' has the encoding '%.60s', whose type, shape or size is wrong", name,
                          text);
    *column = (struct mds_column){.name = strdup(name), .encoding = strdup(text), .bytes = (uint32_t)bytes};
    if (asprintf(&column->member, "%s.%s", name, encoding->format) < 0)
        column->member = NULL;
    return ALLOCATED(column->name && column->encoding && column->member, "out of memory");
}

/* Reads the columns of a shard, or compares them with those of the first one. */
static enum status read_columns(const json_t *shard, struct mds *mds)
{
    const json_t *names = json_object_get(shard, "column_names");
    const json_t *texts = json_object_get(shard, "column_encodings");
    const json_t *sizes = json_object_get(shard, "column_sizes");
    const size_t count = json_array_size(names);
    bool same = count == mds->count;
    if (count == 0 || count != json_array_size(texts) || count != json_array_size(sizes))
        return status_set(STATUS_FAILED, "it has no columns, or not as many encodings or sizes");
    if (count > MDS_COLUMNS)
        return status_set(STATUS_FAILED, "it has %zu columns, more than %d", count, MDS_COLUMNS);
    for (size_t c = 0; mds->count == 0 && c < count; c++)
        TRY(read_column(json_string_value(json_array_get(names, c)),
                        json_string_value(json_array_get(texts, c)), json_array_get(sizes, c),
                        &mds->columns[c]));
    for (size_t c = 0; mds->count == 0 && c < count; c++)
        for (size_t other = 0; other < c; other++)
            if (strcasecmp(mds->columns[c].name, mds->columns[other].name) == 0)
                return status_set(STATUS_FAILED, "it has the column '%s' twice", mds->columns[c].name);
    for (size_t c = 0; same && c < count; c++) {
        const struct mds_column *column = &mds->columns[c];
        const char *name = json_string_value(json_array_get(names, c));
        const char *text = json_string_value(json_array_get(texts, c));
        const json_t *size = json_array_get(sizes, c);
        same = name && text && strcmp(name, column->name) == 0 && strcmp(text, column->encoding) == 0 &&
               (json_is_integer(size) ? json_integer_value(size) : 0) == column->bytes;
    }
    if (mds->count > 0 && !same)
        return status_set(STATUS_FAILED, "its columns differ from those of the first shard");
    mds->count = (uint32_t)count;
    return STATUS_OK;
}

/* Sets a digest, ALGORITHM:HEX, of those of a file: the first one that can be computed. */
static enum status read_digest(const json_t *file, char **digest)
{
    const char *algorithm;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)json_object_get(file, "hashes"), algorithm,
                        value) if (json_is_string(value) && digest_is_known(algorithm))
    {
        TRY(ALLOCATED(asprintf(digest, "%s:%s", algorithm, json_string_value(value)) >= 0, "out of memory"));
        return STATUS_OK;
    }
    return STATUS_OK;
}

static enum status read_file(const json_t *file, const char **name, uint64_t *bytes)
{
    const json_t *size = json_object_get(file, "bytes");
    *name = json_string_value(json_object_get(file, "basename"));
    if (!*name || !**name || !json_is_integer(size) || json_integer_value(size) < 0)
        return status_set(STATUS_FAILED, "a file has no name or no size");
    if (**name == '/' || strstr(*name, "..") || strstr(*name, "://"))
        return status_set(STATUS_FAILED, "'%.200s' is outside the folder of the index", *name);
    *bytes = (uint64_t)json_integer_value(size);
    return STATUS_OK;
}

static enum status read_shard(const json_t *entry, bool (*exists)(void *context, const char *name),
                              void *context, struct mds *mds, struct wids_shard *shard)
{
    const json_t *version = json_object_get(entry, "version"), *samples = json_object_get(entry, "samples");
    const json_t *raw = json_object_get(entry, "raw_data"), *zip = json_object_get(entry, "zip_data");
    const char *format = json_string_value(json_object_get(entry, "format"));
    const char *compression = json_string_value(json_object_get(entry, "compression"));
    const char *name, *packed = NULL;
    uint64_t bytes, packed_bytes = 0;
    if (!format || strcmp(format, "mds") != 0)
        return status_set(STATUS_USAGE, "its format is '%.40s', but only mds is read", format ? format : "");
    if (!json_is_integer(version) || json_integer_value(version) != 2)
        return status_set(STATUS_USAGE, "only version 2 of the format is read");
    if (!json_is_integer(samples) || json_integer_value(samples) < 0 ||
        json_integer_value(samples) > SAMPLES_MAX)
        return status_set(STATUS_FAILED, "its number of samples is missing or wrong");
    TRY(read_file(raw, &name, &bytes));
    if (json_is_object(zip))
        TRY(read_file(zip, &packed, &packed_bytes));
    /* a compressed shard may have been unpacked, as the streaming library does */
    const bool takes_packed = packed && !exists(context, name);
    if (takes_packed && !unpack_is_packed(packed))
        return status_set(STATUS_USAGE,
                          "'%.200s' is compressed by %.20s, but only zstd and gz are read; write the set "
                          "with one of them, or unpack its shards",
                          packed, compression ? compression : "an unknown program");
    TRY(read_columns(entry, mds));
    *shard = (struct wids_shard){.url = strdup(takes_packed ? packed : name),
                                 .samples = (uint64_t)json_integer_value(samples),
                                 .bytes = takes_packed ? packed_bytes : bytes,
                                 .unpacked_bytes = takes_packed ? bytes : 0};
    TRY(ALLOCATED(shard->url, "out of memory"));
    return read_digest(takes_packed ? zip : raw, &shard->digest);
}

static enum status read_root(const json_t *root, bool (*exists)(void *context, const char *name),
                             void *context, struct mds *mds)
{
    const json_t *list = json_object_get(root, "shards");
    const size_t count = json_array_size(list);
    mds->list.name = strdup("");
    mds->list.shards = calloc(count + 1, sizeof *mds->list.shards);
    mds->first = calloc(count + 1, sizeof *mds->first);
    TRY(ALLOCATED(mds->list.name && mds->list.shards && mds->first, "out of memory"));
    for (size_t i = 0; i < count; mds->list.count = ++i) {
        struct wids_shard *shard = &mds->list.shards[i];
        enum status status = read_shard(json_array_get(list, i), exists, context, mds, shard);
        TRY(status_prefix(status, "shard %zu of the list", i));
        mds->first[i + 1] = mds->first[i] + shard->samples;
        if (mds->first[i + 1] > SAMPLES_MAX)
            return status_set(STATUS_FAILED, "it has more than %u samples; split the data set", SAMPLES_MAX);
    }
    return count ? STATUS_OK : status_set(STATUS_FAILED, "it has no shards");
}

enum status mds_parse(const char *text, size_t size, bool (*exists)(void *context, const char *name),
                      void *context, struct mds *mds, bool *found)
{
    json_error_t error;
    *mds = (struct mds){0};
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    *found = json_is_array(json_object_get(root, "shards"));
    enum status status = *found ? read_root(root, exists, context, mds) : STATUS_OK;
    if (!root && memmem(text, size, "\"shards\"", strlen("\"shards\"")))
        status = status_set(STATUS_FAILED, "line %d: invalid JSON: %s", error.line, error.text);
    json_decref(root);
    return status;
}

#else

enum status mds_parse(const char *text, size_t size, bool (*exists)(void *context, const char *name),
                      void *context, struct mds *mds, bool *found)
{
    (void)text, (void)size, (void)exists, (void)context;
    *mds = (struct mds){0};
    *found = true;
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no JSON support: install jansson (libjansson-dev) and build again");
}

#endif

/* ---- Choosing columns ---- */

static enum status refuse_column(const struct mds_column *column, const char *option)
{
    const struct encoding *encoding = encoding_of(column->encoding);
    return encoding->refused
               ? status_set(STATUS_USAGE, "its column '%s' has the encoding %s, %s", column->name,
                            encoding->name, encoding->refused)
               : status_set(STATUS_USAGE,
                            "its column '%s' has the encoding %s, which is no %s; name another column with "
                            "%s%s",
                            column->name, column->encoding, option, OPTION_DASHES, option);
}

/* Returns the first column that a list names, and the entry that names it. Replaces names of columns by those
 * of their members. Returns NULL if the list names none. */
static struct mds_column *find_named(struct mds *mds, struct member_list *list, struct member_rule **entry)
{
    struct mds_column *found = NULL;
    for (uint32_t r = 0; r < list->count; r++)
        for (uint32_t c = 0; c < mds->count; c++) {
            struct mds_column *column = &mds->columns[c];
            struct member_rule *rule = &list->rules[r];
            if (!rule->folder && strcasecmp(rule->extension, column->name) == 0)
                snprintf(rule->extension, sizeof rule->extension, "%s", column->member);
            if (found || !members_matches(rule, column->member))
                continue;
            found = column;
            *entry = rule;
        }
    return found;
}

/* Makes a list of one column. */
static void choose_column(const struct mds_column *column, struct member_list *list)
{
    *list = (struct member_list){.count = 1, .given = true};
    snprintf(list->rules[0].extension, sizeof list->rules[0].extension, "%s", column->member);
}

/* Returns the only column of this kind, or NULL. */
static const struct mds_column *only_one(const struct mds *mds, enum kind kind)
{
    const struct mds_column *only = NULL;
    uint32_t count = 0;
    for (uint32_t c = 0; c < mds->count; c++)
        if (encoding_of(mds->columns[c].encoding)->kind == kind) {
            only = &mds->columns[c];
            count++;
        }
    return count == 1 ? only : NULL;
}

/* Returns the column that has the labels, or NULL. */
static const struct mds_column *usual_label(const struct mds *mds)
{
    static const char *const names[] = {"label", "cls", "class", "target", "y"};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        for (uint32_t c = 0; c < mds->count; c++) {
            const enum kind kind = encoding_of(mds->columns[c].encoding)->kind;
            if ((kind == KIND_INTEGER || kind == KIND_TEXT) &&
                strcasecmp(mds->columns[c].name, names[i]) == 0)
                return &mds->columns[c];
        }
    return only_one(mds, KIND_INTEGER);
}

/* Takes the column of images: files, bytes that are files, or arrays. */
static enum status take_image(struct mds *mds, struct mds_column *column, struct member_rule *rule)
{
    const struct encoding *encoding = encoding_of(column->encoding);
    struct array_shape shape;
    if (encoding->kind == KIND_BYTES) { /* the first bytes of a file tell its format */
        column->member[strlen(column->member) - strlen("bin")] = '\0';
        memcpy(column->member + strlen(column->member), "jpg", sizeof "jpg");
        snprintf(rule->extension, sizeof rule->extension, "%s", column->member);
        return STATUS_OK;
    }
    if (encoding->kind != KIND_ARRAY)
        return encoding->kind == KIND_IMAGE ? STATUS_OK : refuse_column(column, "image");
    mds->image = (uint32_t)(column - mds->columns);
    (void)read_shape(column->encoding, &shape);
    return shape.type && shape.axes ? image_of(column->name, &shape, &mds->raw) : STATUS_OK;
}

/* Takes the column of labels: integers, text, or a field of JSON. */
static enum status take_label(const struct mds_column *column, struct member_rule *rule)
{
    const struct encoding *encoding = encoding_of(column->encoding);
    if (encoding->kind == KIND_INTEGER) {
        rule->number_bytes = (uint8_t)encoding->bytes;
        rule->number_signed = encoding->is_signed;
    }
    if (encoding->kind == KIND_JSON && !*rule->field)
        return status_set(STATUS_USAGE, "its column '%s' has JSON: name a field, as in %slabel %s:FIELD",
                          column->name, OPTION_DASHES, column->name);
    return encoding->kind == KIND_INTEGER || encoding->kind == KIND_TEXT || encoding->kind == KIND_JSON ||
                   encoding->kind == KIND_BYTES
               ? STATUS_OK
               : refuse_column(column, "label");
}

/* Refuses an option that names no column. Class folders, which an entry may also name, do not exist. */
static enum status check_names(const struct mds *mds, const struct member_list *list, const char *option)
{
    char names[512] = "";
    for (uint32_t c = 0; c < mds->count; c++)
        text_join(names, sizeof names, ", ", "%s", mds->columns[c].name);
    return list->preset || !list->count
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s%s: the set has no such column; its columns are %s",
                            OPTION_DASHES, option, names);
}

enum status mds_choose(struct mds *mds, struct members *choice)
{
    struct member_rule *rule;
    mds->image = mds->count;
    const struct mds_column *image = only_one(mds, KIND_IMAGE), *label = usual_label(mds);
    image = image ? image : only_one(mds, KIND_ARRAY);
    for (uint32_t c = 0; c < mds->count && !image && choice->image.preset && !choice->only.count; c++)
        if (strcmp(encoding_of(mds->columns[c].encoding)->format, "pil") == 0)
            return refuse_column(&mds->columns[c], "image");
    if (choice->image.preset && image)
        choose_column(image, &choice->image);
    struct mds_column *found = find_named(mds, &choice->only, &rule);
    if (found && encoding_of(found->encoding)->refused)
        return refuse_column(found, "member");
    if (choice->only.count)
        return STATUS_OK;
    found = find_named(mds, &choice->image, &rule);
    TRY(found ? take_image(mds, found, rule) : check_names(mds, &choice->image, "image"));
    if (choice->label.preset && label && found)
        choose_column(label, &choice->label);
    found = find_named(mds, &choice->label, &rule);
    return found ? take_label(found, rule) : check_names(mds, &choice->label, "label");
}

/* ---- Shards ---- */

static uint32_t read_u32(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static enum status read_bytes(int fd, uint64_t at, void *bytes, size_t size)
{
    size_t done;
    const bool read = file_read_at(fd, bytes, size, at, &done);
    if (read && done == size)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "offset %llu: cannot read: %s", (unsigned long long)(at + done),
                      read ? "the file was truncated" : strerror(errno));
}

/* Finds the values of a sample, which has the bytes from `begin` to `end`. */
static enum status find_values(const struct mds *mds, int fd, uint64_t begin, uint64_t end,
                               struct mds_sample *sample)
{
    uint8_t head[4 * MDS_COLUMNS];
    uint32_t heads = 0;
    for (uint32_t c = 0; c < mds->count; c++)
        heads += mds->columns[c].bytes == 0;
    uint64_t at = begin + 4 * heads;
    if (at > end)
        return status_set(STATUS_FAILED, "offset %llu: the sample has %llu bytes, too few for its sizes",
                          (unsigned long long)begin, (unsigned long long)(end - begin));
    TRY(read_bytes(fd, begin, head, 4 * heads));
    for (uint32_t c = 0, h = 0; c < mds->count; c++) {
        sample->offsets[c] = at;
        sample->sizes[c] = mds->columns[c].bytes ? mds->columns[c].bytes : read_u32(head + 4 * h++);
        at += sample->sizes[c];
    }
    return at == end ? STATUS_OK
                     : status_set(STATUS_FAILED,
                                  "offset %llu: the values of the sample have %llu bytes, but its place in "
                                  "the shard has %llu",
                                  (unsigned long long)begin, (unsigned long long)(at - begin),
                                  (unsigned long long)(end - begin));
}

/* Returns whether two images have the same shape and type. */
static bool same_shape(const struct image *one, const struct image *other)
{
    return one->channels == other->channels && one->depth == other->depth && one->height == other->height &&
           one->width == other->width && one->type == other->type && one->interleaved == other->interleaved;
}

/* Removes the type and the shape from the begin of an array that is an image. All arrays of a set must have
 * the same. */
static enum status strip_array(struct mds *mds, int fd, struct mds_sample *sample)
{
    const struct mds_column *column = &mds->columns[mds->image];
    uint8_t head[2 + AXES_MAX * sizeof(uint64_t)];
    uint64_t *offset = &sample->offsets[mds->image];
    uint32_t *size = &sample->sizes[mds->image], used = 0;
    const uint32_t most = *size < sizeof head ? *size : (uint32_t)sizeof head;
    struct array_shape shape;
    struct image image;
    if (column->bytes)
        return STATUS_OK;
    (void)read_shape(column->encoding, &shape);
    TRY(read_bytes(fd, *offset, head, most));
    bool valid = true;
    if (!shape.type)
        valid = used < most && (shape.type = type_of(NULL, 0, head[used++]));
    if (valid && !shape.axes) {
        valid = used < most;
        const uint8_t packed = valid ? head[used++] : 0;
        const uint32_t width = 1u << (packed & 3);
        shape.axes = packed >> 2;
        valid = valid && shape.axes > 0 && used + shape.axes * width <= most;
        for (uint32_t i = 0; valid && i < shape.axes; i++, used += width) {
            shape.sizes[i] = 0;
            memcpy(&shape.sizes[i], head + used, width); /* both are little-endian */
        }
    }
    if (!valid || shape_bytes(&shape) != *size - used)
        return status_set(STATUS_FAILED,
                          "offset %llu: the array of column '%s' has a wrong type, shape or size",
                          (unsigned long long)*offset, column->name);
    TRY(image_of(column->name, &shape, &image));
    if (mds->raw.channels == 0)
        mds->raw = image;
    if (!same_shape(&mds->raw, &image))
        return status_set(STATUS_USAGE,
                          "offset %llu: the array of column '%s' has another shape or type than that of the "
                          "first sample, so that they are no images of one size; " AS_FILES,
                          (unsigned long long)*offset, column->name);
    *offset += used;
    *size -= used;
    return STATUS_OK;
}

/* Checks the number of samples, and reads the table of offsets. The caller frees it. */
static enum status read_table(int fd, uint64_t bytes, uint32_t *count, uint8_t **table)
{
    uint8_t head[FILE_POINTER_BYTES] = {0};
    const size_t most = bytes < sizeof head ? (size_t)bytes : sizeof head;
    *table = NULL;
    TRY(read_bytes(fd, 0, head, most));
    TRY(file_refuse_pointer(head, most));
    *count = read_u32(head);
    if (bytes < 8 || *count > (bytes - 8) / 4)
        return status_set(STATUS_FAILED,
                          "offset 0: the shard begins with the number %u of samples, but has only %llu bytes",
                          *count, (unsigned long long)bytes);
    const size_t size = 4 * ((size_t)*count + 1);
    *table = malloc(size);
    TRY(ALLOCATED(*table, "out of memory for the offsets of %u samples", *count));
    return read_bytes(fd, 4, *table, size);
}

enum status mds_list(struct mds *mds, uint32_t shard, int fd, uint64_t bytes,
                     enum status (*add)(void *context, const struct mds_sample *sample), void *context)
{
    FREED uint8_t *table = NULL;
    uint32_t count;
    TRY(read_table(fd, bytes, &count, &table));
    uint64_t begin = read_u32(table);
    if (begin < 4 * ((uint64_t)count + 2))
        return status_set(STATUS_FAILED,
                          "offset 4: the first sample begins at %llu, within the table of offsets",
                          (unsigned long long)begin);
    if (count > mds->first[shard + 1] - mds->first[shard])
        return status_set(STATUS_FAILED, "the shard holds %u samples but its index says %llu", count,
                          (unsigned long long)(mds->first[shard + 1] - mds->first[shard]));
    for (uint32_t i = 0; i < count; i++) {
        struct mds_sample sample = {.number = mds->first[shard] + i};
        const uint64_t end = read_u32(table + 4 * ((size_t)i + 1));
        if (end < begin || end > bytes)
            return status_set(
                STATUS_FAILED,
                "offset %llu: sample %u is from offset %llu to %llu, but the shard has %llu bytes",
                4 * (i + 1ULL), i, (unsigned long long)begin, (unsigned long long)end,
                (unsigned long long)bytes);
        TRY(find_values(mds, fd, begin, end, &sample));
        if (mds->image < mds->count)
            TRY(strip_array(mds, fd, &sample));
        TRY(add(context, &sample));
        begin = end;
    }
    return begin == bytes
               ? STATUS_OK
               : status_set(STATUS_FAILED, "offset %llu: the samples end here, but the shard has %llu bytes",
                            (unsigned long long)begin, (unsigned long long)bytes);
}
