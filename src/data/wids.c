/* The index of wids, format "wids-shard-index-v1". */
#include "data/index.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_JANSSON

#include <jansson.h>

#include "data/remote.h"

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
    strcpy(shard->md5, md5 ? md5 : "");
    shard->samples = (uint64_t)json_integer_value(samples);
    shard->bytes = (uint64_t)json_integer_value(bytes);
    return ALLOCATED(shard->url, "out of memory");
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
        if (status != STATUS_OK)
            return status_prefix(status, "shard %zu of the list", wids->count);
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
    for (size_t i = 0; i < wids->count + 1 && wids->shards; i++)
        free(wids->shards[i].url); /* including an entry that failed to parse */
    free(wids->shards);
    free(wids->name);
    *wids = (struct wids){0};
}
