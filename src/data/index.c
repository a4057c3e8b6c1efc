#include "data/index.h"

#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/remote.h"
#include "data/tar.h"

#define FIRST_FIELD "fdsl-index/1"

#define INDEX_REMEDY                                                                                   \
    "remove the folder and prepare the data set again, or remove only the index to read the data set " \
    "without it"

static const char *const layouts[] = {"files", "shards",
                                      "imagefolder"}; /* in the order of enum index_layout */

/* ---- The last line ---- */

/* Numbers of units, samples and members in an index. A line that begins with "place" describes a unit; a line
 * that begins with "sample" describes a sample. The first letter distinguishes them. */
struct counts {
    uint64_t units, samples, members;
};

/* Counts one line. A sample line has one tab before the key and four tabs per member. */
static void count_line(const char *line, const char *end, struct counts *counts)
{
    uint64_t tabs = 0;
    if (*line == 'p')
        counts->units++;
    if (*line != 's')
        return;
    counts->samples++;
    for (const char *c = line; c < end; c++)
        tabs += *c == '\t';
    counts->members += tabs / 4;
}

static struct counts count_lines(const char *text, size_t size)
{
    struct counts counts = {0};
    for (const char *line = text, *end; line < text + size; line = end + 1) {
        end = memchr(line, '\n', (size_t)(text + size - line));
        if (!end)
            break;
        count_line(line, end, &counts);
    }
    return counts;
}

/* Formats the last line of the index: the counts and the hash of `text`. */
static enum status sign(const char *text, size_t size, char line[128])
{
#ifdef HAVE_XXHASH
    struct counts counts = count_lines(text, size);
    snprintf(line, 128, "end\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\t%016" PRIx64 "\n", counts.units,
             counts.samples, counts.members, checksum_seeded(text, size, 0));
    return STATUS_OK;
#else
    (void)text, (void)size, (void)line, (void)count_lines;
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no xxHash: install it (libxxhash-dev) and build again");
#endif
}

/* ---- Writing ---- */

#define INDEX_ALLOCATED(room) ALLOCATED(room, "out of memory for an index")

enum status index_text_begin(struct index_text *text, enum index_layout layout, const char *provenance)
{
    *text = (struct index_text){0};
    text->stream = open_memstream(&text->text, &text->size);
    TRY(INDEX_ALLOCATED(text->stream));
    fprintf(text->stream, FIRST_FIELD "\t%s\t%s\n", layouts[layout], provenance);
    return STATUS_OK;
}

void index_text_add_unit(struct index_text *text, const struct index_unit *unit)
{
    fprintf(text->stream, "place\t%s\t%" PRIu64 "\t%s\n", unit->name, unit->bytes,
            *unit->md5 ? unit->md5 : "-");
}

/* Refuses empty names, and names with a character below `least`. */
static enum status check_name(const char *name, char least)
{
    if (!*name)
        return status_set(STATUS_FAILED, "a key or an extension is empty; rename the file");
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < (unsigned char)least || *c == 127)
            return status_set(
                STATUS_FAILED,
                "'%s' contains a blank or a control character, which an index cannot store; rename the file",
                name);
    return STATUS_OK;
}

enum status index_check_name(const char *name)
{
    return check_name(name, '!');
}

enum status index_extensions_add(struct index_extensions *extensions, const char *extension)
{
    for (size_t i = 0; i < extensions->count; i++)
        if (strcmp(extensions->names[i], extension) == 0)
            return STATUS_OK;
    if (extensions->count == INDEX_EXTENSIONS_MAX)
        return status_set(STATUS_FAILED, "'%s' exceeds the limit of %d extensions per data set", extension,
                          INDEX_EXTENSIONS_MAX);
    TRY(index_check_name(extension));
    if (strchr(extension, '/')) /* a column of MDS; the member would be in another folder */
        return status_set(STATUS_FAILED,
                          "'%s' contains a slash, so it cannot be the extension of a file; rename the column",
                          extension);
    extensions->names[extensions->count++] = extension;
    return STATUS_OK;
}

int index_member_path(enum index_layout layout, const char *key, const char *extension, char *path,
                      size_t size)
{
    static const char images[] = INDEX_IMAGES "/", mask[] = "mask.";
    const bool moves = layout == INDEX_IMAGEFOLDER && strncmp(key, images, strlen(images)) == 0 &&
                       strncmp(extension, mask, strlen(mask)) == 0;
    return moves ? snprintf(path, size, INDEX_MASKS "/%s.%s", key + strlen(images), extension + strlen(mask))
                 : snprintf(path, size, "%s.%s", key, extension);
}

enum status index_text_add_sample(FILE *stream, const char *key, const struct index_member *members,
                                  size_t count)
{
    TRY(check_name(key, ' ')); /* a class folder may have a blank, and tabs separate the fields */
    for (size_t i = 0; i < count; i++)
        TRY(index_check_name(members[i].extension));
    fprintf(stream, "sample\t%s", key);
    for (size_t i = 0; i < count; i++)
        fprintf(stream, "\t%s\t%" PRIu64 "\t%" PRIu64 "\t%016" PRIx64, members[i].extension,
                members[i].offset, members[i].size, members[i].hash);
    fputc('\n', stream);
    return STATUS_OK;
}

enum status index_text_add_all(struct index_text *text, const struct index *index, uint64_t number)
{
    const struct index_unit *unit = &index->units[number];
    index_text_add_unit(text, unit);
    for (uint64_t i = unit->first; i < unit->first + unit->count; i++)
        TRY(index_text_add_sample(text->stream, index->samples[i].key,
                                  index->members + index->samples[i].first, index->samples[i].count));
    return STATUS_OK;
}

/* text->text is final only after fclose(), because writing the last line may move the text. */
enum status index_text_end(struct index_text *text)
{
    char line[128];
    enum status status = INDEX_ALLOCATED(fflush(text->stream) == 0);
    if (status == STATUS_OK)
        status = sign(text->text, text->size, line);
    if (status == STATUS_OK)
        fputs(line, text->stream);
    bool whole = text_close(text->stream);
    text->stream = NULL;
    return status == STATUS_OK ? INDEX_ALLOCATED(whole) : status;
}

void index_text_free(struct index_text *text)
{
    if (text->stream)
        fclose(text->stream);
    free(text->text);
    *text = (struct index_text){0};
}

enum status index_save(const char *path, const struct index *index, uint64_t first, uint64_t count)
{
    CLOSED_BY(index_text_free) struct index_text text;
    TRY(index_text_begin(&text, index->layout, index->provenance));
    for (uint64_t i = first; i < first + count; i++)
        TRY(index_text_add_all(&text, index, i));
    TRY(index_text_end(&text));
    return file_write_atomic(path, text.text, text.size);
}

/* ---- Reading ---- */

/* Returns the next field of a line, or NULL if there is none. Tabs separate the fields. */
static char *next_field(char **rest)
{
    return strsep(rest, "\t");
}

/* Parses an unsigned integer in base 10 or 16. Returns false if the text is empty, has any other character,
 * or if the number is too large. */
static bool number(const char *text, int base, uint64_t *value)
{
    static const char digits[] = "0123456789abcdef";
    *value = 0;
    if (!text || !*text)
        return false;
    for (; *text; text++) {
        const char *digit = memchr(digits, *text, (size_t)base);
        if (!digit || *value > (UINT64_MAX - 15) / (uint64_t)base)
            return false;
        *value = *value * (uint64_t)base + (uint64_t)(digit - digits);
    }
    return true;
}

static bool hash_number(const char *text, uint64_t *value)
{
    return text && strlen(text) == 16 && sscanf(text, "%16" SCNx64, value) == 1 &&
           strspn(text, "0123456789abcdef") == 16;
}

static enum status read_head(char *line, struct index *index)
{
    char *kind = next_field(&line), *layout = next_field(&line);
    if (strcmp(kind, FIRST_FIELD) != 0)
        return status_set(STATUS_FAILED, "not an index of this program: it begins with '%.20s' instead of %s",
                          kind, FIRST_FIELD);
    for (index->layout = INDEX_FILES; layout && index->layout < INDEX_IMAGEFOLDER; index->layout++)
        if (strcmp(layout, layouts[index->layout]) == 0)
            break;
    index->provenance = line; /* the rest of the line, including tabs */
    return layout && line && strcmp(layout, layouts[index->layout]) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "unknown layout");
}

static enum status read_place(char *line, struct index *index)
{
    struct index_unit *unit = &index->units[index->unit_count];
    char *name = next_field(&line), *bytes = next_field(&line), *md5 = next_field(&line);
    if (!md5 || line || !*name || !number(bytes, 10, &unit->bytes))
        return status_set(STATUS_FAILED, "a 'place' line must have a name, a size in bytes and an md5");
    if (name[0] == '/' || strstr(name, ".."))
        return status_set(STATUS_FAILED, "'%.100s' is outside the folder", name);
    unit->name = name;
    unit->md5 = strcmp(md5, "-") == 0 ? "" : md5;
    unit->first = index->sample_count;
    unit->count = 0;
    index->unit_count++;
    return STATUS_OK;
}

static enum status read_member(char *extension, char **line, const struct index_unit *unit,
                               struct index_member *member)
{
    char *offset = next_field(line), *size = next_field(line), *hash = next_field(line);
    if (!*extension || strchr(extension, '/') || !number(offset, 10, &member->offset) ||
        !number(size, 10, &member->size) || !hash_number(hash, &member->hash))
        return status_set(STATUS_FAILED, "a member must have four fields: extension, offset, size and hash");
    if (member->offset > unit->bytes || member->size > unit->bytes - member->offset)
        return status_set(STATUS_FAILED,
                          "a member of %" PRIu64 " bytes at %" PRIu64
                          " ends after the end of %s, which has %" PRIu64 " bytes",
                          member->size, member->offset, unit->name, unit->bytes);
    member->extension = extension;
    return STATUS_OK;
}

/* Checks that a member of a shard starts after the previous one, with room for a header block between them.
 * Readers rely on this order, because they do not seek back. */
static enum status check_unit_of(const struct index *index, const struct index_unit *unit)
{
    const struct index_member *member = &index->members[index->member_count];
    bool is_first = index->samples[unit->first].first == index->member_count;
    uint64_t end = is_first ? 0 : member[-1].offset + member[-1].size;
    if (index->layout != INDEX_SHARDS ||
        (member->offset >= end && member->offset - end >= tar_padding(end) + TAR_BLOCK_BYTES))
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "%s: offset %" PRIu64 ": the previous member ends at %" PRIu64
                      ", so there is no room for a header; " INDEX_REMEDY,
                      unit->name, member->offset, end);
}

static enum status read_sample(char *line, struct index *index)
{
    if (index->unit_count == 0)
        return status_set(STATUS_FAILED, "a 'sample' line comes before the first 'place' line");
    struct index_unit *unit = &index->units[index->unit_count - 1];
    struct index_sample *sample = &index->samples[index->sample_count];
    char *extension;
    *sample = (struct index_sample){next_field(&line), index->unit_count - 1, index->member_count, 0};
    if (!sample->key || !*sample->key || sample->key[0] == '/' || strstr(sample->key, ".."))
        return status_set(STATUS_FAILED, "a sample has no valid key");
    while ((extension = next_field(&line))) {
        TRY(read_member(extension, &line, unit, &index->members[index->member_count]));
        TRY(check_unit_of(index, unit));
        index->member_count++;
        sample->count++;
    }
    if (sample->count == 0)
        return status_set(STATUS_FAILED, "sample '%.100s' has no members", sample->key);
    index->sample_count++;
    unit->count++;
    return STATUS_OK;
}

/* Checks that the last line has the counts and the hash of the text before it. Sets `*size` to the size of
 * that text. */
static enum status check_sign(const char *text, size_t *size)
{
    char line[128] = "";
    const char *begin = *size > 1 && text[*size - 1] == '\n' ? memrchr(text, '\n', *size - 1) : NULL;
    size_t before = begin ? (size_t)(begin + 1 - text) : 0;
    TRY(sign(text, before, line));
    if (!begin || *size - before != strlen(line) || memcmp(text + before, line, strlen(line)) != 0)
        return status_set(
            STATUS_FAILED,
            "the index was truncated or changed: its last line does not match the rest; " INDEX_REMEDY);
    *size = before;
    return STATUS_OK;
}

static enum status read_line(char *line, bool first, struct index *index)
{
    if (first)
        return read_head(line, index);
    const char *kind = next_field(&line);
    if (line && strcmp(kind, "place") == 0)
        return read_place(line, index);
    if (line && strcmp(kind, "sample") == 0)
        return read_sample(line, index);
    return status_set(STATUS_FAILED, "'%.20s' is not a known kind of line", kind);
}

enum status index_parse(char *text, size_t size, struct index *index)
{
    *index = (struct index){.text = text};
    TRY(check_sign(text, &size));
    struct counts counts = count_lines(text, size);
    index->units = calloc(counts.units + 1, sizeof *index->units);
    index->samples = calloc(counts.samples + 1, sizeof *index->samples);
    index->members = calloc(counts.members + 1, sizeof *index->members);
    TRY(ALLOCATED(index->units && index->samples && index->members,
                  "out of memory for an index of %" PRIu64 " samples", counts.samples));
    size_t lines = 0;
    for (char *line = text, *end; line < text + size; line = end + 1) {
        size_t left = (size_t)(text + size - line);
        end = memchr(line, '\n', left); /* not NULL: check_sign() found the last line */
        *end = '\0';
        enum status status = read_line(line, lines++ == 0, index);
        TRY(status_prefix(status, "line %zu", lines));
    }
    return index->provenance ? STATUS_OK : status_set(STATUS_FAILED, "the index is empty");
}

enum status index_read(const char *path, struct index *index)
{
    char *text;
    size_t size;
    *index = (struct index){0};
    TRY(file_read(path, &text, &size));
    return status_prefix(index_parse(text, size, index), "%s", path);
}

void index_free(struct index *index)
{
    free(index->units);
    free(index->samples);
    free(index->members);
    free(index->text);
    *index = (struct index){0};
}

/* The index of wids, format "wids-shard-index-v1". */

#ifdef HAVE_JANSSON

#define KIND "wids-shard-index-v1"

/* ---- Reading ---- */

static enum status read_shard(const json_t *entry, struct wids_shard *shard)
{
    const char *url = json_string_value(json_object_get(entry, "url"));
    const char *md5 = json_string_value(json_object_get(entry, "md5sum"));
    const json_t *samples = json_object_get(entry, "nsamples"), *bytes = json_object_get(entry, "filesize");
    if (!url || !*url)
        return status_set(STATUS_FAILED, "it has no url");
    char shown[PATH_MAX];
    remote_shown(url, shown, sizeof shown);
    if (!json_is_integer(samples) || json_integer_value(samples) < 0)
        return status_set(STATUS_FAILED, "'%.200s' has no number of samples", shown);
    if (bytes && (!json_is_integer(bytes) || json_integer_value(bytes) < 0))
        return status_set(STATUS_FAILED, "'%.200s' has an invalid filesize", shown);
    if (md5 && (strlen(md5) != 32 || strspn(md5, "0123456789abcdefABCDEF") != 32))
        return status_set(STATUS_FAILED, "'%.200s' has an invalid md5sum", shown);
    shard->url = strdup(url);
    shard->samples = (uint64_t)json_integer_value(samples);
    shard->bytes = (uint64_t)json_integer_value(bytes);
    const bool copied = !md5 || asprintf(&shard->digest, "md5:%s", md5) >= 0;
    return ALLOCATED(shard->url && copied, "out of memory");
}

static enum status read_root(const json_t *root, struct wids *wids)
{
    const char *kind = json_string_value(json_object_get(root, "__kind__"));
    const char *name = json_string_value(json_object_get(root, "name"));
    const json_t *list = json_object_get(root, "shardlist");
    if (!kind || strcmp(kind, KIND) != 0)
        return status_set(STATUS_FAILED, "not a wids index: \"__kind__\" is not \"" KIND "\"");
    if (!json_is_array(list))
        return status_set(STATUS_FAILED, "the index has no \"shardlist\"");
    wids->name = strdup(name ? name : "");
    wids->shards = calloc(json_array_size(list) + 1, sizeof *wids->shards);
    TRY(ALLOCATED(wids->name && wids->shards, "out of memory"));
    for (; wids->count < json_array_size(list); wids->count++) {
        enum status status = read_shard(json_array_get(list, wids->count), &wids->shards[wids->count]);
        TRY(status_prefix(status, "shard %zu of the list", wids->count));
    }
    return STATUS_OK;
}

enum status wids_parse(const char *text, size_t size, struct wids *wids)
{
    json_error_t error;
    *wids = (struct wids){0};
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return status_set(STATUS_FAILED, "line %d: invalid JSON: %s", error.line, error.text);
    enum status status = read_root(root, wids);
    json_decref(root);
    return status;
}

/* ---- Writing ---- */

/* Creates the entry of a shard. Omits an unknown md5sum. */
static json_t *shard_of(const struct index_unit *unit)
{
    return json_pack("{s:s, s:s*, s:I, s:I}", "url", unit->name, "md5sum", *unit->md5 ? unit->md5 : NULL,
                     "nsamples", (json_int_t)unit->count, "filesize", (json_int_t)unit->bytes);
}

enum status wids_format(const char *name, const struct index *index, char **text)
{
    json_t *root =
        json_pack("{s:s, s:i, s:s, s:[]}", "__kind__", KIND, "wids_version", 1, "name", name, "shardlist");
    json_t *list = json_object_get(root, "shardlist");
    bool whole = root;
    for (uint64_t i = 0; whole && i < index->unit_count; i++)
        whole = json_array_append_new(list, shard_of(&index->units[i])) == 0;
    *text = whole ? json_dumps(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    return *text ? STATUS_OK
                 : status_set(STATUS_FAILED,
                              "%s: cannot write the wids index: a name is not UTF-8, or out of memory", name);
}

#else

enum status wids_parse(const char *text, size_t size, struct wids *wids)
{
    (void)text, (void)size;
    *wids = (struct wids){0};
    return status_set(STATUS_UNAVAILABLE,
                      "this build has no JSON support: install jansson (libjansson-dev) and build again");
}

enum status wids_format(const char *name, const struct index *index, char **text)
{
    struct wids none;
    (void)name, (void)index;
    *text = NULL;
    return wids_parse(NULL, 0, &none);
}

#endif

void wids_free(struct wids *wids)
{
    for (size_t i = 0; i < wids->count + 1 && wids->shards; i++) { /* with one that failed to parse */
        free(wids->shards[i].url);
        free(wids->shards[i].digest);
    }
    free(wids->shards);
    free(wids->name);
    *wids = (struct wids){0};
}

/* Formats the index file that DALI's webdataset reader needs for each shard. */

enum status dali_add_sample(FILE *stream, const char *key, const struct index_member *members, size_t count)
{
    TRY(index_check_name(key));
    for (size_t i = 0; i < count; i++)
        TRY(index_check_name(members[i].extension));
    for (size_t i = 0; i < count; i++)
        fprintf(stream, "%s%s %" PRIu64 " %" PRIu64 " %s.%s", i ? " " : "", members[i].extension,
                members[i].offset, members[i].size, key, members[i].extension);
    fputc('\n', stream);
    return STATUS_OK;
}

enum status dali_format(const struct index *index, uint64_t number, char **text, size_t *size)
{
    const struct index_unit *unit = &index->units[number];
    *text = NULL;
    FILE *stream = open_memstream(text, size);
    TRY(ALLOCATED(stream, "out of memory for a DALI index"));
    fprintf(stream, DALI_HEAD, unit->count);
    enum status status = STATUS_OK;
    for (uint64_t s = unit->first; status == STATUS_OK && s < unit->first + unit->count; s++)
        status = dali_add_sample(stream, index->samples[s].key, index->members + index->samples[s].first,
                                 index->samples[s].count);
    bool whole = text_close(stream);
    return status == STATUS_OK ? ALLOCATED(whole, "out of memory for a DALI index") : status;
}
