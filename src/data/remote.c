#include "data/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <search.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "data/http.h"
#include "data/remote_cache.h"
#include "data/s3.h"
#include "machine/memory.h"

#define TRIES           6 /* attempts per request */
#define TRIES_FIRST     2 /* attempts of the first request: a wrong address should fail soon */
#define PIECE_BYTES_MIN (UINT64_C(1) << 20)
#define PIECE_BYTES_MAX (UINT64_C(8) << 20)
#define LIST_BYTES_MAX  (UINT64_C(16) << 20) /* maximum size of one page of a list */
#define SPARE_MAX       4                    /* files in memory that are kept for the next transfers */
#define NAMES_MAX       1000000
#define URL_MAX         8192

enum service { SERVICE_WEB, SERVICE_S3, SERVICE_AZURE };

struct transfer;

struct file {
    const char *name; /* owned */
    struct http_version version;
    bool known;                /* `version` and `ranged` are set */
    bool ranged;               /* the server can send ranges */
    struct transfer *transfer; /* running or complete, and not yet taken by remote_fd() */
};

/* A file that is being read. Connections take pieces of it, in order. */
struct transfer {
    struct file *file;
    struct transfer *later; /* in the queue of transfers with pieces that no connection has taken */
    int fd;
    uint64_t piece_bytes, next;
    uint64_t left; /* bytes that have not arrived */
    enum status status;
    char failure[1024];
};

struct remote {
    enum service service;
    char *base;   /* URL of the data set, with a final slash */
    char *shown;  /* `base` without secrets and without the final slash */
    char *suffix; /* what follows the name of a file in its URL: "" or "?..." */
    char *prefix; /* S3 and Azure: the prefix of the object names; `base` ends with it */
    char host[S3_FIELD_MAX], region[S3_FIELD_MAX];
    struct s3_credentials credentials;
    struct remote_options options;

    struct file **files; /* the listed files; files that are not listed are only in `tree` */
    uint32_t count, room;
    void *tree; /* tsearch() tree of all files, by name */

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct transfer *queue; /* transfers with pieces to take */
    bool stopping;
    pthread_t *threads;
    uint32_t thread_count;
    int spare[SPARE_MAX]; /* files in memory that can be reused */
    uint32_t spare_count;
    pthread_mutex_t alone; /* protects `http` */
    struct http *http;     /* for lists and the first request of a file */
};

static enum status out_of_memory(void)
{
    return status_set(STATUS_FAILED, "out of memory for a remote data set");
}

/* ---- URLs ---- */

bool remote_is(const char *path)
{
    return strstr(path, "://") != NULL;
}

const char *remote_local(const char *url)
{
    return strncmp(url, "file://", 7) == 0 ? url + 7 : NULL;
}

void remote_shown(const char *url, char *shown, size_t size)
{
    int length = (int)strcspn(url, "?");
    snprintf(shown, size, "%.*s%s", length, url, url[length] ? "?..." : "");
}

/* Writes the URL of a file. STATUS_FAILED if it is too long. */
static enum status url_of(const struct remote *remote, const char *name, char url[URL_MAX])
{
    bool fits = snprintf(url, URL_MAX, "%s", remote->base) < URL_MAX;
    if (remote->service == SERVICE_WEB)
        fits = fits && (strncat(url, name, URL_MAX - 1 - strlen(url)), strlen(url) < URL_MAX - 1);
    else
        fits = fits && s3_encode(name, true, url, URL_MAX);
    fits = fits && strlen(url) + strlen(remote->suffix) < URL_MAX;
    if (!fits)
        return status_set(STATUS_FAILED, "%s/%.80s: the address is too long", remote->shown, name);
    strcat(url, remote->suffix);
    return STATUS_OK;
}

/* Signs a request to S3: http_request.sign. */
static enum status sign(const struct http_request *request, const char *range,
                        char *headers[HTTP_HEADERS_MAX])
{
    const struct remote *remote = request->signer;
    char date[S3_DATE_MAX], authorization[S3_AUTHORIZATION_MAX], value[80] = "", path[URL_MAX];
    const char *begin = strchr(strstr(request->url, "://") + 3, '/'), *query = strchr(begin, '?');
    snprintf(path, sizeof path, "%.*s", query ? (int)(query - begin) : (int)strlen(begin), begin);
    if (*range)
        snprintf(value, sizeof value, "bytes=%s", range);
    struct s3_request signed_ = {.host = remote->host,
                                 .path = path,
                                 .query = query ? query + 1 : "",
                                 .range = value,
                                 .region = remote->region,
                                 .payload = "UNSIGNED-PAYLOAD",
                                 .time_s = time(NULL)};
    TRY(s3_sign(&signed_, &remote->credentials, date, authorization));
    bool made = asprintf(&headers[0], "x-amz-date: %s", date) > 0 &&
                asprintf(&headers[1], "x-amz-content-sha256: UNSIGNED-PAYLOAD") > 0 &&
                asprintf(&headers[2], "Authorization: %s", authorization) > 0;
    if (made && *remote->credentials.token)
        made = asprintf(&headers[3], "x-amz-security-token: %s", remote->credentials.token) > 0;
    return made ? STATUS_OK : out_of_memory();
}

static struct http_request request_to(const struct remote *remote, const char *url, const char *shown)
{
    bool is_signed = remote->service == SERVICE_S3 && *remote->credentials.key;
    return (struct http_request){.url = url,
                                 .shown = shown,
                                 .redirects = remote->service != SERVICE_S3,
                                 .sign = is_signed ? sign : NULL,
                                 .signer = remote};
}

/* ---- Files ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->name, ((const struct file *)b)->name);
}

/* Returns the file with this name, and adds it if it is new; NULL if memory runs out. The caller holds the
 * lock. */
static struct file *find_file(struct remote *remote, const char *name)
{
    struct file wanted = {.name = name};
    struct file **found = tfind(&wanted, &remote->tree, by_name);
    if (found)
        return *found;
    struct file *file = calloc(1, sizeof *file);
    if (file)
        file->name = strdup(name);
    if (!file || !file->name || !tsearch(file, &remote->tree, by_name)) {
        if (file)
            free((char *)file->name);
        free(file);
        return NULL;
    }
    return file;
}

/* Adds a file to the list. */
static enum status list_file(struct remote *remote, const char *name, struct file **file)
{
    if (remote->count == NAMES_MAX)
        return status_set(STATUS_USAGE, "%s: more than %d files", remote->shown, NAMES_MAX);
    if (remote->count == remote->room) {
        uint32_t room = remote->room ? 2 * remote->room : 256;
        struct file **larger = realloc(remote->files, room * sizeof *larger);
        if (!larger)
            return out_of_memory();
        remote->files = larger;
        remote->room = room;
    }
    *file = find_file(remote, name);
    if (!*file)
        return out_of_memory();
    remote->files[remote->count++] = *file;
    return STATUS_OK;
}

/* Requests the first byte of a file, to find its size, its version, and whether the server can send
 * ranges. */
static enum status examine(struct remote *remote, struct file *file, int tries)
{
    char url[URL_MAX], shown[URL_MAX];
    uint8_t byte;
    struct http_reply reply;
    snprintf(shown, sizeof shown, "%s/%s", remote->shown, file->name);
    TRY(url_of(remote, file->name, url));
    struct http_request request = request_to(remote, url, shown);
    request.wanted = 1;
    request.to = &byte;
    pthread_mutex_lock(&remote->alone);
    enum status status = file->known ? STATUS_OK : http_get(remote->http, &request, tries, &reply);
    if (status == STATUS_OK && !file->known && reply.version.bytes == HTTP_UNKNOWN)
        status = status_set(STATUS_FAILED, "%s: the server does not say how long the file is", shown);
    if (status == STATUS_OK && !file->known) {
        file->version = reply.version;
        file->ranged = reply.ranged;
        file->known = true;
    }
    pthread_mutex_unlock(&remote->alone);
    return status;
}

/* ---- Lists ---- */

/* Expands the first braces of `text`: {a,b} or {000..123}. Adds the names without braces. */
static enum status expand(struct remote *remote, const char *text)
{
    char name[URL_MAX];
    struct file *file;
    const char *open = strchr(text, '{'), *close = open ? strchr(open, '}') : NULL;
    if (!open && !strchr(text, '}'))
        return list_file(remote, text, &file);
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

static enum status add_object(void *context, const struct s3_object *object)
{
    struct remote *remote = context;
    struct file *file;
    size_t length = strlen(remote->prefix);
    if (strncmp(object->name, remote->prefix, length) != 0 || !object->name[length])
        return STATUS_OK; /* the prefix itself, which some tools store as an empty object */
    TRY(list_file(remote, object->name + length, &file));
    file->version.bytes = object->bytes;
    snprintf(file->version.tag, sizeof file->version.tag, "%s%s%s",
             *object->tag == '"' || !*object->tag ? "" : "\"", object->tag,
             *object->tag == '"' || !*object->tag ? "" : "\"");
    file->known = file->ranged = true;
    return STATUS_OK;
}

/* Writes the URL of a page of the list. */
static enum status list_url(const struct remote *remote, const char *next, char url[URL_MAX])
{
    int bucket =
        (int)(strlen(remote->base) - strlen(remote->prefix)); /* the prefix needs no encoding in `base` */
    bool s3 = remote->service == SERVICE_S3, fits;
    snprintf(url, URL_MAX, "%.*s?", s3 ? bucket : bucket - 1, remote->base);
    if (s3 && *next)
        fits = (strcat(url, "continuation-token="), s3_encode(next, false, url, URL_MAX)) &&
               (strcat(url, "&"), true);
    else
        fits = s3 || (strcat(url, "comp=list&"), !*next) ||
               ((strcat(url, "marker="), s3_encode(next, false, url, URL_MAX)) && (strcat(url, "&"), true));
    fits = fits && strlen(url) + strlen(remote->suffix) + 64 < URL_MAX;
    if (fits)
        strcat(url, s3 ? "list-type=2&prefix=" : "prefix=");
    fits = fits && s3_encode(remote->prefix, false, url, URL_MAX) &&
           strlen(url) + strlen(remote->suffix) + 64 < URL_MAX;
    if (!fits)
        return status_set(STATUS_FAILED, "%s: the address of the list is too long", remote->shown);
    if (!s3) {
        strcat(url, "&restype=container&");
        strcat(url, remote->suffix + 1);
    }
    return STATUS_OK;
}

static enum status list_objects(struct remote *remote)
{
    char next[S3_TOKEN_MAX] = "", url[URL_MAX];
    uint8_t *page = malloc(LIST_BYTES_MAX);
    enum status status = page ? STATUS_OK : out_of_memory();
    int tries = TRIES_FIRST;
    do {
        struct http_reply reply;
        if (status == STATUS_OK)
            status = list_url(remote, next, url);
        struct http_request request = request_to(remote, url, remote->shown);
        request.whole = true;
        request.wanted = LIST_BYTES_MAX;
        request.to = page;
        if (status == STATUS_OK)
            status = http_get(remote->http, &request, tries, &reply);
        if (status == STATUS_OK && s3_list((char *)page, reply.got, add_object, remote, next) != STATUS_OK)
            status = status_prefix(STATUS_FAILED, "%s", remote->shown);
        tries = TRIES;
    } while (status == STATUS_OK && *next);
    free(page);
    return status == STATUS_OK && remote->count == 0
               ? status_set(STATUS_USAGE, "--data %s: no objects with this prefix", remote->shown)
               : status;
}

/* ---- Opening ---- */

/* Splits the URL: `*leaf` is the last component, which names files, or "" to list everything. */
static enum status split(const char *url, struct remote *remote, const char **leaf)
{
    size_t length = strcspn(url, "?");
    const char *host = strstr(url, "://") + 3;
    if (strcspn(host, "/?") == 0 && strncmp(url, "s3:", 3) != 0)
        return status_set(STATUS_USAGE, "--data: a URL needs a host: https://HOST/PATH/NAME.tar");
    if (strcspn(host, "/?") > strcspn(host, "@"))
        return status_set(STATUS_USAGE,
                          "--data: a URL with a user or password is refused, because it would be "
                          "printed; use the environment for credentials");
    size_t slash = length;
    while (slash > 0 && url[slash - 1] != '/')
        slash--;
    const char *dot = memchr(url + slash, '.', length - slash),
               *brace = memchr(url + slash, '{', length - slash);
    bool names_files = slash > (size_t)(host - url) && (dot || brace);
    remote->suffix = strdup(url + length);
    *leaf = NULL;
    if (asprintf(&remote->base, "%.*s%s", (int)(names_files ? slash : length), url,
                 names_files || url[length - 1] == '/' ? "" : "/") < 0)
        remote->base = NULL;
    if (names_files)
        *leaf = strndup(url + slash, length - slash);
    if (!remote->base || !remote->suffix || (names_files && !*leaf))
        return out_of_memory();
    remote->shown = strndup(remote->base, strlen(remote->base) - 1);
    return remote->shown ? STATUS_OK : out_of_memory();
}

/* Replaces s3://BUCKET/PREFIX/ by the URL of the service. */
static enum status find_s3(struct remote *remote)
{
    const char *endpoint = getenv("AWS_ENDPOINT_URL_S3"), *region = getenv("AWS_REGION");
    const char *bucket = remote->base + strlen("s3://"), *slash = strchr(bucket, '/');
    int length = slash ? (int)(slash - bucket) : 0;
    char encoded[URL_MAX] = "", *base = NULL;
    endpoint = endpoint ? endpoint : getenv("AWS_ENDPOINT_URL");
    region = region ? region : getenv("AWS_DEFAULT_REGION");
    snprintf(remote->region, sizeof remote->region, "%s", region ? region : "us-east-1");
    if (length == 0 || !s3_encode(slash + 1, true, encoded, sizeof encoded))
        return status_set(STATUS_USAGE, "--data %s: name a bucket: s3://BUCKET/PREFIX/", remote->shown);
    if (endpoint) { /* path style */
        size_t end = strlen(endpoint) - (*endpoint && endpoint[strlen(endpoint) - 1] == '/');
        if (strncmp(endpoint, "http://", 7) != 0 && strncmp(endpoint, "https://", 8) != 0)
            return status_set(STATUS_USAGE,
                              "AWS_ENDPOINT_URL: '%.80s' does not begin with http:// or https://", endpoint);
        if (asprintf(&base, "%.*s/%.*s/%s", (int)end, endpoint, length, bucket, encoded) < 0)
            return out_of_memory();
    } else if (memchr(bucket, '.',
                      (size_t)length)) { /* a certificate does not cover names with further dots */
        if (asprintf(&base, "https://s3.%s.amazonaws.com/%.*s/%s", remote->region, length, bucket, encoded) <
            0)
            return out_of_memory();
    } else if (asprintf(&base, "https://%.*s.s3.%s.amazonaws.com/%s", length, bucket, remote->region,
                        encoded) < 0)
        return out_of_memory();
    remote->prefix = strdup(encoded);
    free(remote->base);
    remote->base = base;
    const char *host = strstr(base, "://") + 3;
    snprintf(remote->host, sizeof remote->host, "%.*s", (int)strcspn(host, "/"), host);
    return remote->prefix ? s3_find_credentials(&remote->credentials) : out_of_memory();
}

/* Finds the prefix in the URL of a container: https://HOST/CONTAINER/PREFIX/, or
 * https://HOST/ACCOUNT/CONTAINER/PREFIX/ if the host is not Azure's. */
static enum status find_azure(struct remote *remote)
{
    const char *host = strstr(remote->base, "://") + 3, *at = strchr(host, '/');
    int skipped = strstr(host, ".blob.") && strstr(host, ".blob.") < at ? 1 : 2;
    for (; at && skipped > 0; skipped--)
        at = strchr(at + 1, '/');
    remote->prefix = at ? strdup(at + 1) : NULL;
    return at ? (remote->prefix ? STATUS_OK : out_of_memory())
              : status_set(STATUS_USAGE,
                           "--data %s: name a container: https://ACCOUNT.blob.core.windows.net/CONTAINER?SAS",
                           remote->shown);
}

static enum status find_service(struct remote *remote)
{
    if (strncmp(remote->base, "s3://", 5) == 0) {
        remote->service = SERVICE_S3;
        return find_s3(remote);
    }
    if (strncmp(remote->base, "http://", 7) != 0 && strncmp(remote->base, "https://", 8) != 0)
        return status_set(STATUS_USAGE,
                          "--data %s: unknown kind of URL; use https://, http://, s3:// or file://",
                          remote->shown);
    if (strstr(remote->suffix, "sig=")) {
        remote->service = SERVICE_AZURE;
        return find_azure(remote);
    }
    return STATUS_OK;
}

static enum status list(struct remote *remote, const char *leaf)
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

static void *serve(void *context);

static enum status start_threads(struct remote *remote)
{
    uint32_t wanted = remote->options.connections ? remote->options.connections : REMOTE_CONNECTIONS;
    remote->threads = calloc(wanted, sizeof *remote->threads);
    if (!remote->threads)
        return out_of_memory();
    sigset_t every, before;
    sigfillset(&every); /* signals are for the main thread */
    pthread_sigmask(SIG_BLOCK, &every, &before);
    while (remote->thread_count < wanted &&
           pthread_create(&remote->threads[remote->thread_count], NULL, serve, remote) == 0)
        remote->thread_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return remote->thread_count == wanted
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot start a thread for a connection; lower --iodepth");
}

static enum status open_all(const char *url, struct remote *remote)
{
    const char *leaf = NULL;
    enum status status = split(url, remote, &leaf);
    if (status == STATUS_OK)
        status = find_service(remote);
    if (status == STATUS_OK)
        status = http_open(&remote->http);
    if (status == STATUS_OK && remote->options.cache_dir)
        status = cache_open(remote->options.cache_dir, remote->options.cache_bytes);
    if (status == STATUS_OK)
        status = list(remote, leaf);
    if (status == STATUS_OK && remote->count && !remote->files[0]->known)
        status = examine(remote, remote->files[0], TRIES_FIRST);
    if (status == STATUS_OK)
        status = start_threads(remote);
    free((char *)leaf);
    return status;
}

enum status remote_open(const char *url, const struct remote_options *options, struct remote **remote)
{
    struct remote *opened = *remote = calloc(1, sizeof *opened);
    if (!opened)
        return out_of_memory();
    if (options)
        opened->options = *options;
    pthread_mutex_init(&opened->lock, NULL);
    pthread_mutex_init(&opened->alone, NULL);
    pthread_cond_init(&opened->work, NULL);
    pthread_cond_init(&opened->done, NULL);
    enum status status = open_all(url, opened);
    if (status != STATUS_OK) {
        remote_close(opened);
        *remote = NULL;
    }
    return status;
}

static void close_transfer(struct transfer *transfer, bool keep_file)
{
    if (!keep_file && transfer->fd >= 0)
        close(transfer->fd);
    free(transfer);
}

static void free_file(void *node)
{
    struct file *file = node;
    if (file->transfer)
        close_transfer(file->transfer, false);
    free((char *)file->name);
    free(file);
}

void remote_close(struct remote *remote)
{
    if (!remote)
        return;
    pthread_mutex_lock(&remote->lock);
    remote->stopping = true;
    pthread_cond_broadcast(&remote->work);
    pthread_mutex_unlock(&remote->lock);
    for (uint32_t i = 0; i < remote->thread_count; i++)
        pthread_join(remote->threads[i], NULL);
    tdestroy(remote->tree, free_file);
    while (remote->spare_count > 0)
        close(remote->spare[--remote->spare_count]);
    http_close(remote->http);
    memset(&remote->credentials, 0, sizeof remote->credentials);
    free(remote->threads);
    free(remote->files);
    free(remote->base);
    free(remote->shown);
    free(remote->suffix);
    free(remote->prefix);
    free(remote);
}

uint32_t remote_count(const struct remote *remote)
{
    return remote->count;
}

const char *remote_name(const struct remote *remote, uint32_t file)
{
    return remote->files[file]->name;
}

bool remote_cached(const struct remote *remote)
{
    return remote->options.cache_dir != NULL;
}

/* ---- Transfers ---- */

/* Takes the next piece of the first transfer in the queue. Returns NULL if the connections must end. */
static struct transfer *take_piece(struct remote *remote, uint64_t *first, uint64_t *bytes)
{
    while (!remote->queue && !remote->stopping)
        pthread_cond_wait(&remote->work, &remote->lock);
    struct transfer *transfer = remote->queue;
    if (remote->stopping)
        return NULL;
    uint64_t left = transfer->file->version.bytes - transfer->next;
    *first = transfer->next;
    *bytes = left < transfer->piece_bytes ? left : transfer->piece_bytes;
    transfer->next += *bytes;
    if (*bytes == left)
        remote->queue = transfer->later;
    return transfer;
}

/* Reads a piece. */
static enum status read_piece(struct remote *remote, struct http *http, const struct transfer *transfer,
                              uint64_t first, uint64_t bytes)
{
    const struct file *file = transfer->file;
    char url[URL_MAX], shown[URL_MAX];
    struct http_reply reply;
    snprintf(shown, sizeof shown, "%s/%s", remote->shown, file->name);
    TRY(url_of(remote, file->name, url));
    struct http_request request = request_to(remote, url, shown);
    request.first = first;
    request.wanted = bytes;
    request.whole = !file->ranged;
    request.fd = transfer->fd;
    request.version = &file->version;
    TRY(http_get(http, &request, TRIES, &reply));
    if (reply.got != bytes)
        return status_set(STATUS_FAILED,
                          "%s: the file has %" PRIu64 " bytes, not %" PRIu64 ": it changed while it was read",
                          shown, reply.got, bytes);
    return STATUS_OK;
}

/* A connection: reads pieces until the data set is closed. */
static void *serve(void *context)
{
    struct remote *remote = context;
    struct http *http = NULL;
    enum status opened = http_open(&http);
    struct transfer *transfer;
    uint64_t first, bytes;
    pthread_mutex_lock(&remote->lock);
    while ((transfer = take_piece(remote, &first, &bytes))) {
        bool failed = transfer->status != STATUS_OK; /* another piece has failed, so this piece is not
                                                      * needed */
        pthread_mutex_unlock(&remote->lock);
        enum status status = failed                ? STATUS_OK
                             : opened != STATUS_OK ? opened
                                                   : read_piece(remote, http, transfer, first, bytes);
        pthread_mutex_lock(&remote->lock);
        if (status != STATUS_OK && transfer->status == STATUS_OK) {
            transfer->status = status;
            snprintf(transfer->failure, sizeof transfer->failure, "%s", status_text());
        }
        transfer->left -= bytes;
        if (transfer->left == 0)
            pthread_cond_broadcast(&remote->done);
    }
    pthread_mutex_unlock(&remote->lock);
    http_close(http);
    return NULL;
}

/* Starts to read a file into `fd`, which already has the size of the file. Takes ownership of `fd`, also
 * after a failure. The caller holds the lock. */
static enum status start_transfer(struct remote *remote, struct file *file, int fd, struct transfer **started)
{
    struct transfer *transfer = *started = calloc(1, sizeof *transfer);
    uint64_t bytes = file->version.bytes;
    if (!transfer) {
        close(fd);
        return out_of_memory();
    }
    *transfer = (struct transfer){.file = file, .fd = fd, .left = bytes};
    if (bytes == 0)
        return STATUS_OK;
    transfer->piece_bytes = bytes / remote->thread_count;
    if (transfer->piece_bytes < PIECE_BYTES_MIN)
        transfer->piece_bytes = PIECE_BYTES_MIN;
    if (transfer->piece_bytes > PIECE_BYTES_MAX)
        transfer->piece_bytes = PIECE_BYTES_MAX;
    if (!file->ranged)
        transfer->piece_bytes = bytes;
    struct transfer **last = &remote->queue;
    while (*last)
        last = &(*last)->later;
    *last = transfer;
    pthread_cond_broadcast(&remote->work);
    return STATUS_OK;
}

/* Waits until all pieces have arrived. The caller holds the lock. */
static enum status await(struct remote *remote, const struct transfer *transfer)
{
    while (transfer->left > 0)
        pthread_cond_wait(&remote->done, &remote->lock);
    return transfer->status == STATUS_OK ? STATUS_OK : status_set(transfer->status, "%s", transfer->failure);
}

/* Returns an anonymous file in memory that has the size of `file`. Reuses an earlier one if possible, because
 * Linux needs longer to allocate memory than a fast server needs to fill it. On failure, returns -1 and sets
 * a message. The caller holds the lock. */
static int memory_file(struct remote *remote, const struct file *file)
{
    bool reused = remote->spare_count > 0;
    if (!reused && memory_check(file->version.bytes, "a remote file",
                                "store the data set in smaller shards, or use --cache-dir") != STATUS_OK)
        return -1;
    int fd = reused ? remote->spare[--remote->spare_count] : memfd_create("fdsl-remote", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)file->version.bytes) == 0 && lseek(fd, 0, SEEK_SET) == 0)
        return fd;
    status_set(STATUS_FAILED, "%s/%s: cannot create a file in memory: %s", remote->shown, file->name,
               strerror(errno));
    if (fd >= 0)
        close(fd);
    return -1;
}

void remote_done(struct remote *remote, int fd)
{
    pthread_mutex_lock(&remote->lock);
    if (!remote_cached(remote) && remote->spare_count < SPARE_MAX) {
        remote->spare[remote->spare_count++] = fd;
        fd = -1;
    }
    pthread_mutex_unlock(&remote->lock);
    if (fd >= 0)
        close(fd);
}

/* Starts a transfer into memory, unless the file already has a transfer. The caller holds the lock. */
static enum status start_in_memory(struct remote *remote, struct file *file)
{
    if (file->transfer)
        return STATUS_OK;
    int fd = memory_file(remote, file);
    return fd < 0 ? STATUS_FAILED : start_transfer(remote, file, fd, &file->transfer);
}

static enum status read_to_memory(struct remote *remote, struct file *file, int *fd)
{
    pthread_mutex_lock(&remote->lock);
    enum status status = start_in_memory(remote, file);
    struct transfer *transfer = file->transfer;
    file->transfer = NULL; /* another thread that opens the file reads it again */
    if (status == STATUS_OK)
        status = await(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
    if (transfer) {
        *fd = status == STATUS_OK ? transfer->fd : -1;
        close_transfer(transfer, status == STATUS_OK);
    }
    return status;
}

/* ---- The cache ---- */

static struct cache_entry entry_of(const struct remote *remote, const struct file *file)
{
    char text[URL_MAX + HTTP_TAG_MAX];
    int length = snprintf(text, sizeof text, "%s%s\n%s\n%" PRIu64, remote->base, file->name,
                          file->version.tag, file->version.bytes);
    struct cache_entry entry = {.bytes = file->version.bytes};
#ifdef HAVE_XXHASH
    entry.source = XXH3_64bits(text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
#else
    (void)length;
#endif
    return entry;
}

/* Reads a file into a draft of the cache. */
static enum status fill_draft(struct remote *remote, struct file *file, const struct cache_draft *draft)
{
    struct transfer *transfer = NULL;
    int fd = dup(draft->fd);
    if (fd < 0)
        return status_set(STATUS_FAILED, "--cache-dir: %s", strerror(errno));
    pthread_mutex_lock(&remote->lock);
    enum status status = start_transfer(remote, file, fd, &transfer);
    if (status == STATUS_OK)
        status = await(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
    if (transfer)
        close_transfer(transfer, false);
    return status;
}

static enum status read_to_cache(struct remote *remote, struct file *file, int *fd)
{
    const char *folder = remote->options.cache_dir;
    const struct cache_entry entry = entry_of(remote, file);
    struct cache_draft draft;
    TRY(cache_find(folder, &entry, fd));
    if (*fd >= 0)
        return STATUS_OK;
    enum status status = cache_begin(folder, &entry, remote->options.cache_bytes, &draft, fd);
    if (status == STATUS_OK && *fd < 0)
        status = fill_draft(remote, file, &draft);
    if (status == STATUS_OK && *fd < 0)
        status = cache_complete(folder, &entry, &draft, fd);
    cache_abandon(&draft);
    return status;
}

/* ---- Reading ---- */

/* Returns the file with this name. On success, its size and version are known. */
static enum status known_file(struct remote *remote, const char *name, struct file **file)
{
    pthread_mutex_lock(&remote->lock);
    *file = find_file(remote, name);
    pthread_mutex_unlock(&remote->lock);
    return *file ? examine(remote, *file, TRIES) : out_of_memory();
}

enum status remote_size(struct remote *remote, const char *name, uint64_t *bytes)
{
    struct file *file;
    TRY(known_file(remote, name, &file));
    *bytes = file->version.bytes;
    return STATUS_OK;
}

void remote_ask(struct remote *remote, const char *name)
{
    struct file *file;
    if (remote_cached(remote) || known_file(remote, name, &file) != STATUS_OK)
        return; /* remote_fd() reads the file, and reports errors */
    pthread_mutex_lock(&remote->lock);
    (void)start_in_memory(remote, file);
    pthread_mutex_unlock(&remote->lock);
}

int remote_fd(struct remote *remote, const char *name)
{
    struct file *file;
    int fd = -1;
    enum status status = known_file(remote, name, &file);
    if (status == STATUS_OK)
        status = (remote_cached(remote) ? read_to_cache : read_to_memory)(remote, file, &fd);
    if (status != STATUS_OK)
        errno = EIO;
    return status == STATUS_OK ? fd : -1;
}

enum status remote_text(struct remote *remote, const char *name, uint64_t limit, char **text, size_t *size)
{
    uint64_t bytes;
    *text = NULL;
    TRY(remote_size(remote, name, &bytes));
    if (bytes > limit)
        return status_set(STATUS_FAILED, "%s/%s: %" PRIu64 " bytes are too many for such a file",
                          remote->shown, name, bytes);
    int fd = remote_fd(remote, name);
    if (fd < 0)
        return STATUS_FAILED;
    *text = malloc(bytes + 1);
    bool done = *text != NULL;
    for (*size = 0; done && *size < bytes;) {
        ssize_t count = pread(fd, *text + *size, bytes - *size, (off_t)*size);
        done = count > 0;
        *size += done ? (size_t)count : 0;
    }
    remote_done(remote, fd);
    if (!done)
        return status_set(STATUS_FAILED, "%s/%s: cannot read it", remote->shown, name);
    (*text)[bytes] = '\0';
    return STATUS_OK;
}
