#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "data/remote_parts.h"

#define LIST_BYTES_MAX (UINT64_C(16) << 20) /* maximum size of one page of a list */
#define NAMES_MAX      1000000
#define EMPTY_MAX      1000 /* maximum number of consecutive pages without an object */

/* Adds a file to the list. */
static enum status list_file(struct remote *remote, const char *name, struct file **file)
{
    if (remote->count == NAMES_MAX)
        return status_set(STATUS_USAGE, "%s: more than %d files", remote->shown, NAMES_MAX);
    if (remote->count == remote->room) {
        uint32_t room = remote->room ? 2 * remote->room : 256;
        struct file **larger = realloc(remote->files, room * sizeof *larger);
        if (!larger)
            return remote_out_of_memory();
        remote->files = larger;
        remote->room = room;
    }
    *file = remote_find_file(remote, name);
    if (!*file)
        return remote_out_of_memory();
    remote->files[remote->count++] = *file;
    return STATUS_OK;
}

/* Expands the braces in `text`, such as {a,b} or {000..123}, and adds the resulting names to the list. */
static enum status expand(struct remote *remote, const char *text)
{
    char name[REMOTE_URL_MAX];
    struct file *file;
    const char *open = strchr(text, '{'), *close = open ? strchr(open, '}') : NULL;
    if (!open && !strchr(text, '}'))
        return list_file(remote, text, &file);
    remote->braces = true;
    if (!close)
        return status_set(STATUS_USAGE, "--data: '%.80s' has a brace without its counterpart", text);
    unsigned long long first, last;
    int begin, end, length = (int)(open - text);
    if (sscanf(open, "{%n%llu..%n%llu}", &begin, &first, &end, &last) == 2) {
        int digits = end - 2 - begin;
        if (first > last)
            return status_set(STATUS_USAGE, "--data: the range %.*s counts down; write {FIRST..LAST}",
                              (int)(close + 1 - open), open);
        if (last - first >= NAMES_MAX)
            return status_set(STATUS_USAGE, "--data: the range %.*s has more than %d files",
                              (int)(close + 1 - open), open, NAMES_MAX);
        for (; first <= last; first++) {
            snprintf(name, sizeof name, "%.*s%0*llu%s", length, text, digits, first, close + 1);
            TRY(expand(remote, name));
        }
        return STATUS_OK;
    }
    for (const char *at = open + 1; at <= close;) {
        int part = (int)strcspn(at, ",}");
        snprintf(name, sizeof name, "%.*s%.*s%s", length, text, part, at, close + 1);
        TRY(expand(remote, name));
        at += part + 1;
    }
    return STATUS_OK;
}

/* State while the pages of a list are read. */
struct listing {
    struct remote *remote;
    char last[S3_TOKEN_MAX]; /* the latest key */
    bool empty;              /* the page has no objects */
};

static enum status add_object(void *context, const struct s3_object *object)
{
    struct listing *listing = context;
    struct remote *remote = listing->remote;
    struct file *file;
    size_t length = strlen(remote->prefix);
    listing->empty = false;
    /* S3 sorts keys by their bytes. Azure's order depends on the kind of the account. */
    if (remote->service == SERVICE_S3 && *listing->last && strcmp(object->name, listing->last) <= 0)
        return status_set(
            STATUS_FAILED,
            "the list has '%.300s' after '%.300s': keys must ascend, or some would be lost or read "
            "twice; name the shards, as in %s/shard-{000000..000099}.tar",
            object->name, listing->last, remote->shown);
    snprintf(listing->last, sizeof listing->last, "%s", object->name);
    if (strncmp(object->name, remote->prefix, length) != 0)
        return status_set(STATUS_FAILED,
                          "the list has '%.300s', which does not begin with the prefix '%.300s'",
                          object->name, remote->prefix);
    if (!object->name[length])
        return STATUS_OK; /* the prefix itself, which some tools store as an empty object */
    TRY(list_file(remote, object->name + length, &file));
    /* Azure's lists have tags without quotes. A file without a tag is examined later. */
    const bool quoted = *object->tag == '"' || strncmp(object->tag, "W/", 2) == 0;
    const int tag_length =
        snprintf(file->version.tag, sizeof file->version.tag, quoted ? "%s" : "\"%s\"", object->tag);
    file->version.bytes = object->bytes;
    file->known = file->ranged = file->version.exact =
        *object->tag && *object->tag != 'W' && tag_length < (int)sizeof file->version.tag;
    return STATUS_OK;
}

/* Writes the URL of a page of the list. */
static enum status list_url(const struct remote *remote, const char *next, char url[REMOTE_URL_MAX])
{
    bool s3 = remote->service == SERVICE_S3, fits;
    snprintf(url, REMOTE_URL_MAX, "%.*s?", s3 ? remote->root : remote->root - 1, remote->base);
    if (s3 && *next)
        fits = (strcat(url, "continuation-token="), s3_encode(next, false, url, REMOTE_URL_MAX)) &&
               (strcat(url, "&"), true);
    else
        fits = s3 || (strcat(url, "comp=list&"), !*next) ||
               ((strcat(url, "marker="), s3_encode(next, false, url, REMOTE_URL_MAX)) &&
                (strcat(url, "&"), true));
    fits = fits && strlen(url) + strlen(remote->suffix) + 64 < REMOTE_URL_MAX;
    if (fits)
        strcat(url, s3 ? "list-type=2&prefix=" : "prefix=");
    fits = fits && s3_encode(remote->prefix, false, url, REMOTE_URL_MAX) &&
           strlen(url) + strlen(remote->suffix) + 64 < REMOTE_URL_MAX;
    if (!fits)
        return status_set(STATUS_FAILED, "%s: the address of the list is too long", remote->shown);
    if (!s3) {
        strcat(url, "&restype=container&");
        strcat(url, remote->suffix + 1);
    }
    return STATUS_OK;
}

static bool holds(const uint64_t *hashes, int count, uint64_t hash)
{
    for (int i = 0; i < count; i++)
        if (hashes[i] == hash)
            return true;
    return false;
}

static enum status list_objects(struct remote *remote)
{
    char next[S3_TOKEN_MAX] = "", url[REMOTE_URL_MAX];
    struct listing listing = {.remote = remote};
    uint64_t tokens[EMPTY_MAX]; /* hashes of the tokens of the latest page and of empty pages before it */
    int count = 0;
    if (s3_list("", 0, add_object, &listing, next) == STATUS_UNAVAILABLE)
        return STATUS_UNAVAILABLE; /* before anything is requested */
    FREED uint8_t *page = malloc(LIST_BYTES_MAX);
    if (!page)
        return remote_out_of_memory();
    int tries = REMOTE_TRIES_FIRST;
    do {
        struct http_reply reply;
        TRY(list_url(remote, next, url));
        struct http_request request = remote_request(remote, url, remote->shown);
        request.whole = true;
        request.wanted = LIST_BYTES_MAX;
        request.to = page;
        TRY(http_get(remote->http, &request, tries, &reply));
        tokens[count++] = fnv_add(FNV_BEGIN, next, strlen(next));
        listing.empty = true;
        enum status status = s3_list((char *)page, reply.got, add_object, &listing, next);
        if (status != STATUS_OK)
            return status_prefix(status, "%s", remote->shown);
        const bool again = holds(tokens, count, fnv_add(FNV_BEGIN, next, strlen(next)));
        if (!listing.empty)
            count = 0;
        if (*next && (again || count == EMPTY_MAX))
            return status_set(STATUS_FAILED,
                              "%s: the list does not end: the server sends %s; name the shards, as in "
                              "%s/shard-{000000..000099}.tar",
                              remote->shown, again ? "the same page again" : "only empty pages",
                              remote->shown);
        tries = REMOTE_TRIES;
    } while (*next);
    return remote->count == 0
               ? status_set(STATUS_USAGE, "--data %s: no objects with this prefix", remote->shown)
               : STATUS_OK;
}

enum status remote_list(struct remote *remote, const char *leaf)
{
    if (leaf)
        return expand(remote, leaf);
    if (remote->service == SERVICE_WEB)
        return status_set(STATUS_USAGE,
                          "--data %s: a web server has no list of files; name the shards, as in "
                          "%s/shard-{000000..000099}.tar, or an index (.index, .wids.json)",
                          remote->shown, remote->shown);
    return list_objects(remote);
}
