#include "data/remote.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "core/array.h"
#include "core/parallel.h"
#include "data/checksum.h"
#include "data/http.h"
#include "data/mds.h"
#include "data/remote_cache.h"
#include "machine/host.h"

#define TRIES           6  /* attempts per request */
#define TRIES_FIRST     2  /* attempts of the first request: a wrong address should fail soon */
#define SPARE_MAX       4  /* files in memory that are kept for the next transfers */
#define OTHER_FILES     32 /* files that a process has open besides its connections */
#define URL_MAX         8192
#define LIST_BYTES_MAX  (UINT64_C(16) << 20) /* maximum size of one page of a list */
#define NAMES_MAX       1000000
#define EMPTY_MAX       1000 /* maximum number of consecutive pages without an object */
#define PIECE_BYTES_MIN (UINT64_C(1) << 20)
#define PIECE_BYTES_MAX (UINT64_C(8) << 20)

enum service { SERVICE_WEB, SERVICE_S3, SERVICE_AZURE };

struct remote_file {
    const char *name; /* owned */
    struct http_version version;
    bool known;                /* `version` and `ranged` are set */
    bool ranged;               /* the file can be read in ranges */
    bool passing;              /* in the cache, but only for this run; see `remote->passing` */
    bool examining;            /* a connection requests the version, or will do so */
    bool asked;                /* a transfer into memory begins when the version is known */
    struct remote_file *later; /* next in the queue of files to examine */
    struct remote_file *passing_later;
    struct transfer *transfer; /* running or complete; NULL if there is none, or remote_fd() has taken it */
};

/* A file, or a range of it, that is being read. Connections take pieces of it, in order. */
struct transfer {
    struct remote_file *file;
    struct transfer *later; /* next in the queue of transfers that have pieces to take */
    int fd;                 /* receives a whole file */
    uint8_t *to;            /* receives a range, which is read in one piece; otherwise NULL */
    uint64_t piece_bytes, next, end;
    uint64_t left;          /* bytes that have not arrived */
    atomic_bool abandoned;  /* no connection needs to read more pieces, or to finish those that it reads */
    struct failure failure; /* STATUS_OK if no piece has failed */
};

struct remote {
    enum service service;
    char *base;   /* URL of the data set, with a final slash */
    char *shown;  /* `base` without secrets and without the final slash */
    char *suffix; /* what follows the name of a file in its URL: "" or "?..." */
    char *prefix; /* S3 and Azure: the prefix of the object names, not percent-encoded */
    int root;     /* S3 and Azure: length of the URL of the bucket or container, with its slash, in `base` */
    char host[S3_FIELD_MAX], region[S3_FIELD_MAX];
    struct s3_credentials credentials;
    struct remote_options options;
    char *identity; /* the query without the parameters of a signature; part of the names in the cache */
    bool braces;    /* the URL has braces, which stand for several names */
    uint64_t run;   /* a random number, for files that are cached for this run only */

    struct remote_file **files; /* the listed files; files that are not listed are only in `tree` */
    uint32_t count;
    void *tree; /* tsearch() tree of all files, by name */

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct transfer *queue;      /* transfers with pieces to take */
    struct remote_file *unknown; /* files to examine */
    struct remote_file *passing; /* files to remove from the cache when the data set is closed */
    bool stopping;
    pthread_t *threads;
    uint32_t thread_count;
    int spare[SPARE_MAX]; /* files in memory that can be reused */
    uint32_t spare_count;
    pthread_mutex_t alone; /* protects `http` */
    struct http *http;     /* for lists, and for files that no connection examines */
};

#define REMOTE_ALLOCATED(room) ALLOCATED(room, "out of memory for a remote data set")

/* ---- URLs ---- */

/* Refuses kinds of URLs that cannot be read, and says how to write the same place. */
static enum status check_scheme(const char *option, const char *url)
{
    static const char *const known[] = {"https://", "http://", "s3://", "gs://"};
    static const struct {
        const char *schemes, *remedy;
    } others[] = {
        {" az abfs abfss wasb wasbs adl ",
         "for Azure, write https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX/?SAS"},
        {" gcs ", "for Google Cloud Storage, write gs://BUCKET/PREFIX/"},
        {" s3a s3n ", "write s3://BUCKET/PREFIX/"},
    };
    const char *remedy = "use https://, http://, s3://, gs:// or file://";
    const int length = (int)(strstr(url, "://") - url);
    char word[16];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(url, known[i], strlen(known[i])) == 0)
            return STATUS_OK;
    snprintf(word, sizeof word, " %.*s ", length, url);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (length < 10 && strstr(others[i].schemes, word))
            remedy = others[i].remedy;
    return status_set(STATUS_USAGE, "%s%s: %.*s:// is an unknown kind of URL; %s", OPTION_DASHES, option,
                      length < 40 ? length : 40, url, remedy);
}

/* Splits the URL of a data set into `remote->base`, `shown` and `suffix`. `*leaf` is the last component of
 * the path if it names files; otherwise NULL, and the data set consists of all files. The caller frees
 * `*leaf`. */
static enum status split_url(const char *url, struct remote *remote, char **leaf)
{
    const char *option = remote->options.option;
    size_t length = strcspn(url, "?");
    const char *host = strstr(url, "://") + 3;
    TRY(check_scheme(option, url));
    if (strcspn(host, "/?") == 0 && !s3_is_url(url))
        return status_set(STATUS_USAGE, "%s%s: a URL needs a host: https://HOST/PATH/NAME.tar", OPTION_DASHES,
                          option);
    if (strcspn(host, "/?") > strcspn(host, "@"))
        return status_set(STATUS_USAGE,
                          "%s%s: a URL with a user or password is refused, because it would be "
                          "printed; use the environment for credentials",
                          OPTION_DASHES, option);
    const char *list = strstr(host, ",http");
    if (list && list < url + length &&
        (strncmp(list + 5, "://", 3) == 0 || strncmp(list + 5, "s://", 4) == 0))
        return status_set(STATUS_USAGE,
                          "%s%s: a list of URLs is refused; name several shards of a folder in "
                          "one URL, as in https://HOST/PATH/{a,b}.tar",
                          OPTION_DASHES, option);
    size_t slash = length;
    while (slash > 0 && url[slash - 1] != '/')
        slash--;
    const char *dot = memchr(url + slash, '.', length - slash),
               *brace = memchr(url + slash, '{', length - slash);
    bool names_files = slash > (size_t)(host - url) && (dot || brace) && !remote->options.unlisted;
    remote->suffix = strdup(url + length);
    *leaf = NULL;
    if (asprintf(&remote->base, "%.*s%s", (int)(names_files ? slash : length), url,
                 names_files || url[length - 1] == '/' ? "" : "/") < 0)
        remote->base = NULL;
    if (names_files)
        *leaf = strndup(url + slash, length - slash);
    TRY(REMOTE_ALLOCATED(remote->base && remote->suffix && (!names_files || *leaf)));
    remote->shown = strndup(remote->base, strlen(remote->base) - 1);
    return REMOTE_ALLOCATED(remote->shown);
}

/* Decodes percent codes: all, or, if `only` is not NULL, only those of the bytes in `only`. */
static void decode(char *text, const char *only)
{
    char *to = text;
    unsigned value;
    for (; *text; text++)
        if (*text == '%' && isxdigit((unsigned char)text[1]) && isxdigit((unsigned char)text[2]) &&
            sscanf(text + 1, "%2x", &value) == 1 && value && (!only || strchr(only, (int)value))) {
            *to++ = (char)value;
            text += 2;
        } else
            *to++ = *text;
    *to = '\0';
}

/* Replaces s3://BUCKET/PREFIX/ or gs://BUCKET/PREFIX/ by the URL of the service. In such URLs only a question
 * mark and a percent sign can be encoded, because names of objects may contain percent codes. */
static enum status find_s3(struct remote *remote, char *leaf)
{
    if (*remote->suffix)
        return status_set(
            STATUS_USAGE,
            "%s%s %s?...: an s3:// or gs:// URL has no query; write %%3F for a question mark in a name",
            OPTION_DASHES, remote->options.option, remote->shown);
    decode(remote->base, "?%");
    if (leaf)
        decode(leaf, "?%");

    const bool google = *remote->base == 'g';
    char endpoint[S3_FIELD_MAX];
    const char *origin = NULL;
    const char *bucket = remote->base + strlen("s3://"), *slash = strchr(bucket, '/');
    int length = slash ? (int)(slash - bucket) : 0;
    FREED char *encoded = calloc(1, URL_MAX);
    char *base = NULL;
    TRY(REMOTE_ALLOCATED(encoded));
    TRY((google ? s3_find_google_endpoint : s3_find_endpoint)(endpoint, &origin));
    if (google) /* its interface accepts this region for all buckets */
        strcpy(remote->region, "auto");
    else
        TRY(s3_find_region(remote->region));
    if (length == 0 || !s3_encode(slash + 1, true, encoded, URL_MAX))
        return status_set(STATUS_USAGE, "%s%s %s: name a bucket: %s://BUCKET/PREFIX/", OPTION_DASHES,
                          remote->options.option, remote->shown, google ? "gs" : "s3");
    int made;
    if (*endpoint) { /* path style */
        size_t end = strlen(endpoint) - (endpoint[strlen(endpoint) - 1] == '/');
        if (strncmp(endpoint, "http://", 7) != 0 && strncmp(endpoint, "https://", 8) != 0)
            return status_set(STATUS_USAGE, "%s: '%.80s' does not begin with http:// or https://", origin,
                              endpoint);
        made = asprintf(&base, "%.*s/%.*s/%s", (int)end, endpoint, length, bucket, encoded);
    } else if (memchr(bucket, '.', (size_t)length)) {
        /* The certificate *.s3.REGION.amazonaws.com does not match bucket names that contain dots. */
        made =
            asprintf(&base, "https://s3.%s.amazonaws.com/%.*s/%s", remote->region, length, bucket, encoded);
    } else
        made =
            asprintf(&base, "https://%.*s.s3.%s.amazonaws.com/%s", length, bucket, remote->region, encoded);
    TRY(REMOTE_ALLOCATED(made >= 0));
    remote->prefix = strdup(slash + 1);
    remote->root = (int)(strlen(base) - strlen(encoded));
    free(remote->base);
    remote->base = base;
    const char *host = strstr(base, "://") + 3;
    snprintf(remote->host, sizeof remote->host, "%.*s", (int)strcspn(host, "/"), host);
    TRY(REMOTE_ALLOCATED(remote->prefix));
    return (google ? s3_find_google_credentials : s3_find_credentials)(&remote->credentials);
}

/* Finds the prefix in the URL of a container: https://HOST/CONTAINER/PREFIX/, or
 * https://HOST/ACCOUNT/CONTAINER/PREFIX/ if the host is not Azure's. Names of objects are not encoded, but
 * the URL is. */
static enum status find_azure(struct remote *remote, char *leaf)
{
    const char *host = strstr(remote->base, "://") + 3, *at = strchr(host, '/');
    int skipped = strstr(host, ".blob.") && strstr(host, ".blob.") < at ? 1 : 2;
    for (; at && skipped > 0; skipped--)
        at = strchr(at + 1, '/');
    if (!at)
        return status_set(STATUS_USAGE,
                          "%s%s %s: name a container: https://ACCOUNT.blob.core.windows.net/CONTAINER?SAS",
                          OPTION_DASHES, remote->options.option, remote->shown);
    remote->root = (int)(at + 1 - remote->base);
    remote->prefix = strdup(at + 1);
    TRY(REMOTE_ALLOCATED(remote->prefix));
    decode(remote->prefix, NULL);
    if (leaf)
        decode(leaf, NULL);
    return STATUS_OK;
}

/* ---- Queries ---- */

/* Parameters that belong to a signature: they are renewed while the data stay the same. The parameters of a
 * group are a signature only if the query has all parameters in `marks`; in other queries they may select
 * data. `names` may end in '*'. */
static const struct {
    const char *marks, *names;
} signatures[] = {
    {"sig", "sig"},
    /* Azure. snapshot and versionid are not in the list, because they select data. */
    {"sig sv", "sv ss srt sr sp st se sip spr si sdd ses skoid sktid skt ske sks skv saoid suoid scid"},
    {"X-Amz-Signature", "X-Amz-*"},
    {"X-Goog-Signature", "X-Goog-*"},
    {"Signature AWSAccessKeyId", "Signature AWSAccessKeyId Expires x-amz-security-token"}, /* version 2 */
    {"Signature GoogleAccessId", "Signature GoogleAccessId Expires"},
    {"Signature Key-Pair-Id", "Signature Key-Pair-Id Expires Policy Hash-Algorithm"}, /* CloudFront */
};

/* Returns the next parameter of a query, and its length; NULL at the end. `*at` begins at the '?'. */
static const char *next_parameter(const char **at, size_t *length)
{
    const char *begin = *at + (**at == '?' || **at == '&');
    if (!**at)
        return NULL;
    *length = strcspn(begin, "&");
    *at = begin + *length;
    return begin;
}

static bool has_parameter(const char *query, const char *name, size_t name_length)
{
    size_t length;
    for (const char *at = query, *parameter; (parameter = next_parameter(&at, &length));)
        if (strcspn(parameter, "=&") == name_length && memcmp(parameter, name, name_length) == 0)
            return true;
    return false;
}

/* Returns whether a parameter belongs to a signature of the query. */
static bool is_signature(const char *query, const char *parameter)
{
    const size_t length = strcspn(parameter, "=&");
    for (size_t i = 0; i < sizeof signatures / sizeof *signatures; i++) {
        bool marked = true;
        for (const char *mark = signatures[i].marks; marked && *mark; mark += strspn(mark, " ")) {
            size_t size = strcspn(mark, " ");
            marked = has_parameter(query, mark, size);
            mark += size;
        }
        for (const char *name = signatures[i].names; marked && *name; name += strspn(name, " ")) {
            size_t size = strcspn(name, " ");
            bool prefix = name[size - 1] == '*';
            if (prefix ? length >= size && strncmp(parameter, name, size - 1) == 0
                       : length == size && strncmp(parameter, name, size) == 0)
                return true;
            name += size;
        }
    }
    return false;
}

/* Returns the query without the parameters of signatures, from malloc; NULL if memory runs out. */
static char *identity_of(const char *query)
{
    char *identity = calloc(1, strlen(query) + 2), *to = identity;
    size_t length;
    for (const char *at = query, *parameter; to && (parameter = next_parameter(&at, &length));)
        if (!is_signature(query, parameter)) {
            *to = to == identity ? '?' : '&';
            to++;
            memcpy(to, parameter, length);
            to += length;
        }
    return identity;
}

/* Sets `remote->service`, `identity` and, for S3 and Azure, the prefix. For S3, also sets the URL, region and
 * credentials. Removes the percent-encoding of `leaf`, which may be NULL. */
static enum status find_service(struct remote *remote, char *leaf)
{
    remote->identity = identity_of(remote->suffix);
    TRY(REMOTE_ALLOCATED(remote->identity));
    if (s3_is_url(remote->base)) {
        remote->service = SERVICE_S3;
        return find_s3(remote, leaf);
    }
    if (has_parameter(remote->suffix, "sig", 3) && has_parameter(remote->suffix, "sv", 2)) {
        remote->service = SERVICE_AZURE;
        return find_azure(remote, leaf);
    }
    return STATUS_OK;
}

/* ---- Requests ---- */

/* The URL of a file, and the same without secrets, for messages. Too large for small stacks. */
struct address {
    char url[URL_MAX], shown[URL_MAX];
};

/* Sets `*address`, which the caller frees, even after a failure. STATUS_FAILED if the URL is too long. */
static enum status find_address(const struct remote *remote, const char *name, struct address **address)
{
    *address = malloc(sizeof **address);
    TRY(REMOTE_ALLOCATED(*address));
    char *url = (*address)->url;
    snprintf((*address)->shown, sizeof(*address)->shown, "%s/%s", remote->shown, name);
    bool fits = snprintf(url, URL_MAX, "%s", remote->base) < URL_MAX;
    if (remote->service == SERVICE_WEB)
        fits = fits && (strncat(url, name, URL_MAX - 1 - strlen(url)), strlen(url) < URL_MAX - 1);
    else
        fits = fits && s3_encode(name, true, url, URL_MAX);
    fits = fits && strlen(url) + strlen(remote->suffix) < URL_MAX;
    if (!fits)
        return status_set(STATUS_FAILED, "%s/%.80s: the address is too long", remote->shown, name);
    strcat(url, remote->suffix);
    for (char *blank; (blank = strchr(url, ' ')); memcpy(blank, "%20", 3)) {
        if (strlen(url) + 2 >= URL_MAX)
            return status_set(STATUS_FAILED, "%s/%.80s: the address is too long", remote->shown, name);
        memmove(blank + 3, blank + 1, strlen(blank));
    }
    return STATUS_OK;
}

/* Implements sign() of struct http_request for S3. */
static enum status sign(const struct http_request *request, const char *range,
                        char *headers[HTTP_HEADERS_MAX])
{
    const struct remote *remote = request->signer;
    char date[S3_DATE_MAX], authorization[S3_AUTHORIZATION_MAX], value[80] = "";
    const char *begin = strchr(strstr(request->url, "://") + 3, '/'), *query = strchr(begin, '?');
    FREED char *path = strndup(begin, query ? (size_t)(query - begin) : strlen(begin));
    TRY(REMOTE_ALLOCATED(path));
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
    return REMOTE_ALLOCATED(made);
}

/* Returns a GET request, which is signed if the data set is on S3 and there are credentials. `shown` is the
 * URL for messages. Both strings must outlive the request. The caller sets the fields that say what to
 * read. */
static struct http_request request_for(const struct remote *remote, const char *url, const char *shown)
{
    bool is_signed = remote->service == SERVICE_S3 && *remote->credentials.key;
    return (struct http_request){.url = url,
                                 .shown = shown,
                                 .redirects = remote->service != SERVICE_S3,
                                 .explained = remote->service != SERVICE_WEB,
                                 .region = remote->service == SERVICE_S3 ? remote->region : NULL,
                                 .sign = is_signed ? sign : NULL,
                                 .cancelled = remote->options.cancel ? &remote->options.cancel->set : NULL,
                                 .signer = remote};
}

/* ---- Files ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct remote_file *)a)->name, ((const struct remote_file *)b)->name);
}

/* Returns the file with this name, and adds it if it is new; NULL if memory runs out. The caller holds
 * `remote->lock`. */
static struct remote_file *find_file(struct remote *remote, const char *name)
{
    struct remote_file wanted = {.name = name};
    struct remote_file **found = tfind(&wanted, &remote->tree, by_name);
    if (found)
        return *found;
    struct remote_file *file = calloc(1, sizeof *file);
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

/* Returns whether the version of a file is known. */
static bool is_known(struct remote *remote, const struct remote_file *file)
{
    pthread_mutex_lock(&remote->lock);
    bool known = file->known;
    pthread_mutex_unlock(&remote->lock);
    return known;
}

/* Stores what a server says about a file. Two contents with the same version could be mixed in one file, so
 * a file whose version is not exact is read in one piece. */
static void set_version(struct remote *remote, struct remote_file *file, const struct http_reply *reply)
{
    pthread_mutex_lock(&remote->lock);
    if (!file->known) {
        file->version = reply->version;
        file->ranged = reply->ranged && reply->version.exact;
        file->known = true;
    }
    pthread_mutex_unlock(&remote->lock);
}

/* Requests the first byte of a file, to find its size, its version, and whether the server can send ranges.
 * If another thread has found them, does nothing. */
static enum status examine(struct remote *remote, struct http *http, struct remote_file *file, int tries)
{
    FREED struct address *address = NULL;
    uint8_t byte;
    struct http_reply reply;
    if (is_known(remote, file))
        return STATUS_OK;
    TRY(find_address(remote, file->name, &address));
    struct http_request request = request_for(remote, address->url, address->shown);
    request.wanted = 1;
    request.to = &byte;
    if (strpbrk(file->name, "*["))
        request.absent = "patterns such as * are not expanded: name the numbers, as in {000..099}";
    else if (remote->braces)
        request.absent = "check the address, and the names that the braces stand for";
    else if (remote->count != 1 || remote->files[0] != file)
        request.absent = "the index or list of the data set names it: add the file, or correct the list";
    TRY(http_get(http, &request, tries, &reply));
    if (!reply.version.exact && reply.version.modified && remote->options.cache_dir) {
        /* If the file was written in this second, its date is exact from the next second on. */
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        TRY(http_get(http, &request, tries, &reply));
    }
    if (reply.version.bytes == HTTP_UNKNOWN)
        return status_set(STATUS_FAILED, "%s: the server does not say how long the file is", address->shown);
    set_version(remote, file, &reply);
    return STATUS_OK;
}

/* Examines a file with the connection of `remote`, which one thread at a time can use. */
static enum status examine_alone(struct remote *remote, struct remote_file *file, int tries)
{
    pthread_mutex_lock(&remote->alone);
    enum status status = examine(remote, remote->http, file, tries);
    pthread_mutex_unlock(&remote->alone);
    return status;
}

/* ---- Lists of files ---- */

static enum status list_file(struct remote *remote, const char *name, struct remote_file **file)
{
    if (remote->count == NAMES_MAX)
        return status_set(STATUS_USAGE, "%s: more than %d files", remote->shown, NAMES_MAX);
    *file = find_file(remote, name);
    TRY(REMOTE_ALLOCATED(*file && array_grow(&remote->files, remote->count, sizeof *remote->files)));
    remote->files[remote->count++] = *file;
    return STATUS_OK;
}

/* A group of braces in a name: a range such as {000..123}, or a list of words such as {a,b}. */
struct brace_group {
    const char *open, *close;
    uint64_t first, count,
        chosen; /* the first number of a range; the number of choices; the current choice */
    int digits; /* of a range; 0: a list */
};

static enum status refuse_brace(const struct remote *remote, const char *text)
{
    return status_set(STATUS_USAGE, "%s%s: '%.80s' has a brace without its counterpart", OPTION_DASHES,
                      remote->options.option, text);
}

/* Sets what the braces from group->open to group->close stand for. */
static enum status read_group(const struct remote *remote, struct brace_group *group)
{
    const char *open = group->open;
    const char *option = remote->options.option;
    const int length = (int)(group->close + 1 - open);
    unsigned long long first, last;
    int begin, end, whole = 0;
    if (sscanf(open, "{%n%llu..%n%llu}%n", &begin, &first, &end, &last, &whole) == 2 && whole == length) {
        if (first > last)
            return status_set(STATUS_USAGE, "%s%s: the range %.*s counts down; write {FIRST..LAST}",
                              OPTION_DASHES, option, length, open);
        if (last - first >= NAMES_MAX)
            return status_set(STATUS_USAGE, "%s%s: the range %.*s has more than %d files", OPTION_DASHES,
                              option, length, open, NAMES_MAX);
        group->first = first;
        group->count = last - first + 1;
        group->digits = end - 2 - begin;
        return STATUS_OK;
    }
    group->count = 1;
    for (const char *at = open; at < group->close; at++)
        group->count += *at == ',';
    return STATUS_OK;
}

/* Finds the groups in `text`, from left to right. The caller frees `*groups`. */
static enum status find_groups(const struct remote *remote, const char *text, struct brace_group **groups,
                               size_t *count)
{
    uint64_t names = 1;
    for (const char *at = text; *(at += strcspn(at, "{}"));) {
        struct brace_group group = {.open = at, .close = at + 1 + strcspn(at + 1, "{}")};
        if (*at == '}' || *group.close != '}')
            return refuse_brace(remote, text);
        TRY(read_group(remote, &group));
        names *= group.count; /* both are at most NAMES_MAX or the length of the text */
        if (names > NAMES_MAX)
            return status_set(STATUS_USAGE, "%s%s: the braces in '%.80s' stand for more than %d files",
                              OPTION_DASHES, remote->options.option, text, NAMES_MAX);
        TRY(REMOTE_ALLOCATED(array_grow(groups, *count, sizeof **groups)));
        (*groups)[(*count)++] = group;
        at = group.close + 1;
    }
    return STATUS_OK;
}

/* Appends `length` bytes of `part` to a name, as far as there is room. Returns whether all fit. */
static bool append_part(char name[URL_MAX], const char *part, size_t length)
{
    const size_t used = strlen(name);
    return snprintf(name + used, URL_MAX - used, "%.*s", (int)length, part) < (int)(URL_MAX - used);
}

/* Writes the name for the current choice of each group. */
static enum status write_name(const struct remote *remote, const char *text, const struct brace_group *groups,
                              size_t count, char name[URL_MAX])
{
    bool fits = true;
    *name = '\0';
    for (size_t i = 0; fits && i < count; i++) {
        const struct brace_group *group = &groups[i];
        const char *word = group->open + 1;
        char number[32];
        fits = append_part(name, text, (size_t)(group->open - text));
        for (uint64_t w = 0; !group->digits && w < group->chosen; w++)
            word = strchr(word, ',') + 1;
        if (group->digits) {
            const int length =
                snprintf(number, sizeof number, "%0*" PRIu64, group->digits, group->first + group->chosen);
            fits = fits && length < (int)sizeof number && append_part(name, number, (size_t)length);
        } else
            fits = fits && append_part(name, word, strcspn(word, ",}"));
        text = group->close + 1;
    }
    return fits && append_part(name, text, strlen(text))
               ? STATUS_OK
               : status_set(STATUS_FAILED, "%s/%.80s: the address is too long", remote->shown, name);
}

/* Adds the names to the list that `text` stands for. The choices of the last group change first. */
static enum status expand(struct remote *remote, const char *text)
{
    FREED struct brace_group *groups = NULL;
    FREED char *name = malloc(URL_MAX);
    size_t count = 0, changed;
    TRY(REMOTE_ALLOCATED(name));
    TRY(find_groups(remote, text, &groups, &count));
    remote->braces = count > 0;
    do {
        struct remote_file *file;
        TRY(write_name(remote, text, groups, count, name));
        TRY(list_file(remote, name, &file));
        for (changed = count; changed > 0 && ++groups[changed - 1].chosen == groups[changed - 1].count;)
            groups[--changed].chosen = 0;
    } while (changed > 0);
    return STATUS_OK;
}

/* State while the pages of a list are read. Too large for small stacks. */
struct listing {
    struct remote *remote;
    char last[S3_TOKEN_MAX];    /* the latest key */
    char next[S3_TOKEN_MAX];    /* token of the next page */
    char url[URL_MAX];          /* of the current page */
    uint64_t tokens[EMPTY_MAX]; /* hashes of the tokens of the latest page and of empty pages before it */
    bool empty;                 /* the page has no objects */
    uint8_t page[LIST_BYTES_MAX];
};

static enum status add_object(void *context, const struct s3_object *object)
{
    struct listing *listing = context;
    struct remote *remote = listing->remote;
    struct remote_file *file;
    size_t length = strlen(remote->prefix);
    listing->empty = false;
    /* S3 sorts keys by their bytes. Azure's order depends on the kind of the account. */
    if (remote->service == SERVICE_S3 && *listing->last && strcmp(object->name, listing->last) <= 0)
        return status_set(STATUS_FAILED,
                          "the list has '%.300s' after '%.300s': keys must ascend, or some would be lost or "
                          "read twice; name the shards, as in %s/shard-{000000..000099}.tar",
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
static enum status list_url(const struct remote *remote, const char *next, char url[URL_MAX])
{
    bool s3 = remote->service == SERVICE_S3, fits;
    snprintf(url, URL_MAX, "%.*s?", s3 ? remote->root : remote->root - 1, remote->base);
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

static bool holds(const uint64_t *hashes, int count, uint64_t hash)
{
    for (int i = 0; i < count; i++)
        if (hashes[i] == hash)
            return true;
    return false;
}

static enum status list_objects(struct remote *remote)
{
    FREED struct listing *listing = calloc(1, sizeof *listing);
    TRY(REMOTE_ALLOCATED(listing));
    char *next = listing->next;
    int count = 0, tries = TRIES_FIRST;
    listing->remote = remote;
    if (s3_list("", 0, add_object, listing, next) == STATUS_UNAVAILABLE)
        return STATUS_UNAVAILABLE; /* before anything is requested */
    *next = '\0';
    do {
        struct http_reply reply;
        TRY(list_url(remote, next, listing->url));
        struct http_request request = request_for(remote, listing->url, remote->shown);
        request.whole = true;
        request.wanted = sizeof listing->page;
        request.to = listing->page;
        TRY(http_get(remote->http, &request, tries, &reply));
        listing->tokens[count++] = fnv_add(FNV_BEGIN, next, strlen(next));
        listing->empty = true;
        enum status status = s3_list((char *)listing->page, reply.got, add_object, listing, next);
        TRY(status_prefix(status, "%s", remote->shown));
        const bool again = holds(listing->tokens, count, fnv_add(FNV_BEGIN, next, strlen(next)));
        if (!listing->empty)
            count = 0;
        if (*next && (again || count == EMPTY_MAX))
            return status_set(STATUS_FAILED,
                              "%s: the list does not end: the server sends %s; name the shards, as in "
                              "%s/shard-{000000..000099}.tar",
                              remote->shown, again ? "the same page again" : "only empty pages",
                              remote->shown);
        tries = TRIES;
    } while (*next);
    return remote->count == 0 ? status_set(STATUS_USAGE, "%s%s %s: no objects with this prefix",
                                           OPTION_DASHES, remote->options.option, remote->shown)
                              : STATUS_OK;
}

/* Lists the files of the data set: those that `leaf` names, or all with the prefix if `leaf` is NULL.
 * STATUS_USAGE if there are none, or if the server has no list. */
static enum status list_files(struct remote *remote, const char *leaf)
{
    if (leaf)
        return expand(remote, leaf);
    if (remote->service == SERVICE_WEB)
        return status_set(STATUS_USAGE,
                          "%s%s %s: a web server has no list of files; name the shards, as in "
                          "%s/shard-{000000..000099}.tar, or an index (.index, .wids.json, index.json)",
                          OPTION_DASHES, remote->options.option, remote->shown, remote->shown);
    return list_objects(remote);
}

/* ---- Connections and transfers ---- */

/* Frees a transfer. Closes its descriptor unless `keep_file` is set. */
static void close_transfer(struct transfer *transfer, bool keep_file)
{
    if (!keep_file && transfer->fd >= 0)
        close(transfer->fd);
    free(transfer);
}

/* Takes the next piece of the first transfer in the queue. */
static struct transfer *take_piece(struct remote *remote, uint64_t *first, uint64_t *bytes)
{
    struct transfer *transfer = remote->queue;
    uint64_t left = transfer->end - transfer->next;
    *first = transfer->next;
    *bytes = left < transfer->piece_bytes ? left : transfer->piece_bytes;
    transfer->next += *bytes;
    if (*bytes == left)
        remote->queue = transfer->later;
    return transfer;
}

static enum status read_piece(struct remote *remote, struct http *http, const struct transfer *transfer,
                              uint64_t first, uint64_t bytes)
{
    const struct remote_file *file = transfer->file;
    FREED struct address *address = NULL;
    struct http_reply reply;
    TRY(find_address(remote, file->name, &address));
    struct http_request request = request_for(remote, address->url, address->shown);
    request.first = first;
    request.wanted = bytes;
    request.whole = !file->ranged;
    request.to = transfer->to;
    request.fd = transfer->fd;
    request.version = &file->version;
    request.abandoned = &transfer->abandoned;
    TRY(http_get(http, &request, TRIES, &reply));
    if (reply.got != bytes)
        return status_set(STATUS_FAILED,
                          "%s: the file has %" PRIu64 " bytes, not %" PRIu64 ": it changed while it was read",
                          address->shown, reply.got, bytes);
    return STATUS_OK;
}

/* Reads the next piece of a transfer. `http` is NULL if it could not be opened, for the reason `opened`. The
 * caller holds the lock, which is released during requests. */
static void serve_piece(struct remote *remote, struct http *http, enum status opened)
{
    uint64_t first, bytes;
    struct transfer *transfer = take_piece(remote, &first, &bytes);
    bool failed =
        transfer->failure.status != STATUS_OK; /* another piece has failed, so this piece is not needed */
    pthread_mutex_unlock(&remote->lock);
    enum status status = failed                ? STATUS_OK
                         : opened != STATUS_OK ? opened
                                               : read_piece(remote, http, transfer, first, bytes);
    pthread_mutex_lock(&remote->lock);
    if (status != STATUS_OK && transfer->failure.status == STATUS_OK)
        transfer->failure = status_save(status);
    transfer->left -= bytes;
    if (transfer->left == 0)
        pthread_cond_broadcast(&remote->done);
}

/* Queues a file whose version is not known yet for a connection to examine. The caller holds `remote->lock`.
 */
static void start_examining(struct remote *remote, struct remote_file *file)
{
    if (file->known || file->examining)
        return;
    file->examining = true;
    struct remote_file **last = &remote->unknown;
    while (*last)
        last = &(*last)->later;
    *last = file;
    pthread_cond_broadcast(&remote->work);
}

/* Queues a transfer for the connections. The caller holds `remote->lock`. */
static void queue_transfer(struct remote *remote, struct transfer *transfer)
{
    struct transfer **last = &remote->queue;
    while (*last)
        last = &(*last)->later;
    *last = transfer;
    pthread_cond_broadcast(&remote->work);
}

/* Starts to read a file into `fd`, which already has the size of the file. Takes ownership of `fd`, even
 * after a failure. The caller holds `remote->lock`. */
static enum status start_transfer(struct remote *remote, struct remote_file *file, int fd,
                                  struct transfer **started)
{
    struct transfer *transfer = *started = calloc(1, sizeof *transfer);
    uint64_t bytes = file->version.bytes;
    if (!transfer) {
        close(fd);
        return REMOTE_ALLOCATED(transfer);
    }
    *transfer = (struct transfer){.file = file, .fd = fd, .end = bytes, .left = bytes};
    if (bytes == 0)
        return STATUS_OK;
    transfer->piece_bytes = bytes / remote->thread_count;
    if (transfer->piece_bytes < PIECE_BYTES_MIN)
        transfer->piece_bytes = PIECE_BYTES_MIN;
    if (transfer->piece_bytes > PIECE_BYTES_MAX)
        transfer->piece_bytes = PIECE_BYTES_MAX;
    if (!file->ranged)
        transfer->piece_bytes = bytes;
    queue_transfer(remote, transfer);
    return STATUS_OK;
}

/* Abandons a transfer: takes its other pieces from the queue, and ends its requests. The caller holds
 * `remote->lock`. */
static void abandon(struct remote *remote, struct transfer *transfer)
{
    struct transfer **place = &remote->queue;
    if (transfer->left == 0)
        return;
    const struct failure latest = status_save(STATUS_FAILED); /* the caller may be about to report it */
    if (transfer->failure.status == STATUS_OK)
        transfer->failure = status_save(
            status_set(STATUS_FAILED, "%s/%s: reading was stopped", remote->shown, transfer->file->name));
    (void)status_restore(&latest);
    atomic_store(&transfer->abandoned, true);
    while (*place && *place != transfer)
        place = &(*place)->later;
    if (!*place)
        return;
    *place = transfer->later;
    transfer->left -= transfer->end - transfer->next;
    transfer->next = transfer->end;
}

/* Waits until all pieces have arrived, or until `*stopped`. The caller holds `remote->lock`. */
static enum status await_transfer(struct remote *remote, struct transfer *transfer, const bool *stopped)
{
    while (transfer->left > 0) {
        if (stopped && *stopped)
            abandon(remote, transfer);
        if (transfer->left > 0)
            pthread_cond_wait(&remote->done, &remote->lock);
    }
    return transfer->failure.status == STATUS_OK ? STATUS_OK : status_restore(&transfer->failure);
}

/* Returns an anonymous file in memory that has the size of `file`. Reuses an earlier one if possible, because
 * Linux needs longer to allocate memory than a fast server needs to fill it. STATUS_EXHAUSTED if there is
 * too little memory. The caller holds the lock. */
static enum status memory_file(struct remote *remote, const struct remote_file *file, int *fd)
{
    bool reused = remote->spare_count > 0;
    if (!reused &&
        memory_check(file->version.bytes, "a remote file",
                     OPTION_OR_FIELD("store the data set in smaller shards, or use --cache-dir",
                                     "store the data set in smaller shards, or set cache_dir")) != STATUS_OK)
        return STATUS_EXHAUSTED;
    *fd = reused ? remote->spare[--remote->spare_count] : memfd_create("fdsl-remote", MFD_CLOEXEC);
    if (*fd >= 0 && ftruncate(*fd, (off_t)file->version.bytes) == 0 && lseek(*fd, 0, SEEK_SET) == 0)
        return STATUS_OK;
    status_set(STATUS_EXHAUSTED, "%s/%s: cannot create a file in memory: %s", remote->shown, file->name,
               strerror(errno));
    if (*fd >= 0)
        close(*fd);
    return STATUS_EXHAUSTED;
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

/* Starts a transfer into memory, unless the file already has a transfer. The caller holds `remote->lock`. */
static enum status start_in_memory(struct remote *remote, struct remote_file *file)
{
    if (file->transfer)
        return STATUS_OK;
    int fd;
    TRY(memory_file(remote, file, &fd));
    return start_transfer(remote, file, fd, &file->transfer);
}

/* Reads a whole file into memory, and sets `*fd` to its descriptor; on failure, `*fd` is -1 or unchanged. */
static enum status read_to_memory(struct remote *remote, struct remote_file *file, const bool *stopped,
                                  int *fd)
{
    pthread_mutex_lock(&remote->lock);
    enum status status = start_in_memory(remote, file);
    struct transfer *transfer = file->transfer;
    file->transfer = NULL; /* another thread that opens the file starts its own transfer */
    if (status == STATUS_OK)
        status = await_transfer(remote, transfer, stopped);
    pthread_mutex_unlock(&remote->lock);
    if (transfer) {
        *fd = status == STATUS_OK ? transfer->fd : -1;
        close_transfer(transfer, status == STATUS_OK);
    }
    return status;
}

/* Examines the first file in the queue. If it is wanted in memory, starts its transfer. */
static void serve_examination(struct remote *remote, struct http *http)
{
    struct remote_file *file = remote->unknown;
    remote->unknown = file->later;
    file->later = NULL;
    pthread_mutex_unlock(&remote->lock);
    if (http)
        (void)examine(remote, http, file, TRIES); /* the thread that opens the file reports errors */
    pthread_mutex_lock(&remote->lock);
    file->examining = false;
    if (file->known && file->asked)
        (void)start_in_memory(remote, file);
    pthread_cond_broadcast(&remote->done);
}

/* A connection: examines files and reads pieces until the data set is closed. Examines first, because no
 * connection can read a file whose size is unknown. */
static void *serve(void *context)
{
    struct remote *remote = context;
    struct http *http = NULL;
    enum status opened = http_open(&http);
    pthread_mutex_lock(&remote->lock);
    while (!remote->stopping) {
        if (remote->unknown)
            serve_examination(remote, http);
        else if (remote->queue)
            serve_piece(remote, http, opened);
        else
            pthread_cond_wait(&remote->work, &remote->lock);
    }
    pthread_mutex_unlock(&remote->lock);
    http_close(http);
    return NULL;
}

/* Refuses a limit of open files that is too small for the connections: each may need a socket, and the two
 * ends of a pipe that wakes it. */
static enum status check_descriptors(const struct remote *remote, uint32_t connections)
{
    struct rlimit limit;
    const uint64_t needed = 3 * (uint64_t)connections + OTHER_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed)
        return STATUS_OK;
    return status_set(STATUS_EXHAUSTED,
                      "%" PRIu32 " connections to a server need %" PRIu64
                      " open files, but ulimit -n allows %" PRIu64 "; raise it: ulimit -n %" PRIu64 "%s",
                      connections, needed, (uint64_t)limit.rlim_cur, needed,
                      remote->options.connections ? ", or lower --iodepth" : "");
}

/* Starts one thread per connection. remote_close() joins the threads. */
static enum status start_threads(struct remote *remote)
{
    uint32_t wanted = remote->options.connections ? remote->options.connections : REMOTE_CONNECTIONS;
    TRY(check_descriptors(remote, wanted));
    remote->threads = calloc(wanted, sizeof *remote->threads);
    TRY(REMOTE_ALLOCATED(remote->threads));
    while (remote->thread_count < wanted &&
           parallel_start(&remote->threads[remote->thread_count], serve, remote) == 0)
        remote->thread_count++;
    return remote->thread_count == wanted
               ? STATUS_OK
               : status_set(STATUS_FAILED, "cannot start a thread for a connection%s",
                            OPTION_OR_FIELD("; lower --iodepth", ""));
}

/* ---- The cache ---- */

/* The name in the cache is a hash of a text that says which bytes are meant. The text begins with a number,
 * which changes with its format. URLs begin with a letter, and texts before number 2 began with the URL.
 * `unpacked`: the unpacked copy of the file is meant, whose size is not known. */
static enum status find_entry(const struct remote *remote, const struct remote_file *file, bool unpacked,
                              struct cache_entry *entry)
{
    char *text = NULL;
    const struct http_version *version = &file->version;
    const bool strong = *version->tag && strncmp(version->tag, "W/", 2) != 0; /* the date does not matter */
    const int length =
        asprintf(&text, "%s\n%s%s%s\n%s\n%lld\n%" PRIu64 "\n%016" PRIx64, unpacked ? "2 unpacked" : "2",
                 remote->base, file->name, remote->identity, version->tag,
                 strong ? 0 : (long long)version->modified, version->bytes, version->exact ? 0 : remote->run);
    TRY(REMOTE_ALLOCATED(length >= 0));
    *entry = (struct cache_entry){.source = checksum_seeded(text, (size_t)length, 0),
                                  .bytes = unpacked ? CACHE_UNKNOWN : version->bytes};
    free(text);
    return STATUS_OK;
}

/* Records that a file is cached for this run only, and warns about the first. */
static void note_passing(struct remote *remote, struct remote_file *file)
{
    pthread_mutex_lock(&remote->lock);
    bool first = !remote->passing;
    if (!file->passing) {
        file->passing = true;
        file->passing_later = remote->passing;
        remote->passing = file;
    }
    pthread_mutex_unlock(&remote->lock);
    if (first)
        status_warn("%s/%s: the server sends neither an ETag nor a Last-Modified that identifies the "
                    "content; %s keeps such files during this run only",
                    remote->shown, file->name, REMOTE_CACHE_DIR);
}

/* Reads a file into a draft of the cache. */
static enum status fill_draft(struct remote *remote, struct remote_file *file,
                              const struct cache_draft *draft, const bool *stopped)
{
    struct transfer *transfer = NULL;
    int fd = dup(draft->fd);
    if (fd < 0)
        return status_set(STATUS_EXHAUSTED, "%s: %s", REMOTE_CACHE_DIR, strerror(errno));
    pthread_mutex_lock(&remote->lock);
    enum status status = start_transfer(remote, file, fd, &transfer);
    if (status == STATUS_OK)
        status = await_transfer(remote, transfer, stopped);
    pthread_mutex_unlock(&remote->lock);
    if (transfer)
        close_transfer(transfer, false);
    return status;
}

/* A thread that waits for other processes, which use the cache. It gives up when `*stopped` or the `cancel`
 * of the remote is set. */
struct waiter {
    struct remote *remote;
    const bool *stopped; /* may be NULL */
};

/* Implements cache_stop.is_set(). */
static bool is_stopped(void *context)
{
    const struct waiter *waiter = context;
    pthread_mutex_t *lock = &waiter->remote->lock;
    const struct remote_cancel *cancel = waiter->remote->options.cancel;
    pthread_mutex_lock(lock);
    const bool stopped = waiter->stopped && *waiter->stopped;
    pthread_mutex_unlock(lock);
    return stopped || (cancel && atomic_load(&cancel->set));
}

static enum status read_to_cache(struct remote *remote, struct remote_file *file, const bool *stopped,
                                 int *fd)
{
    const char *folder = remote->options.cache_dir;
    struct waiter waiter = {remote, stopped};
    const struct cache_stop stop = {is_stopped, &waiter};
    struct cache_entry entry;
    TRY(find_entry(remote, file, false, &entry));
    TRY(cache_check_fits(&entry, remote->options.cache_bytes));
    TRY(cache_find(folder, &entry, remote->options.frozen, fd));
    if (*fd >= 0)
        return STATUS_OK;
    if (remote->options.frozen)
        return read_to_memory(remote, file, stopped, fd);
    if (!file->version.exact)
        note_passing(remote, file);
    CLOSED_BY(cache_abandon) struct cache_draft draft;
    TRY(cache_begin(folder, &entry, remote->options.cache_bytes, &stop, &draft, fd));
    if (*fd >= 0)
        return STATUS_OK;
    TRY(fill_draft(remote, file, &draft, stopped));
    return cache_complete(folder, &entry, &stop, &draft, fd);
}

/* Opens the unpacked copy of a file. If there is none, reads the file to the cache, unpacks and removes it.
 * Without a cache, does so in memory. */
static enum status read_unpacked(struct remote *remote, struct remote_file *file, const bool *stopped,
                                 int *fd)
{
    struct waiter waiter = {remote, stopped};
    const struct cache_stop stop = {is_stopped, &waiter};
    const char *folder = remote->options.cache_dir;
    struct cache_entry packed, copy;
    int from = -1;
    if (!folder) {
        TRY(read_to_memory(remote, file, stopped, &from));
        const enum status unpacked = unpack_to_memory(
            &stop, &(struct unpack_input){.fd = from, .tar = !mds_is_shard(file->name)}, NULL, fd);
        remote_done(remote, from);
        return status_prefix(unpacked, "%s/%s", remote->shown, file->name);
    }
    TRY(find_entry(remote, file, false, &packed));
    TRY(find_entry(remote, file, true, &copy));
    TRY(cache_find(folder, &copy, remote->options.frozen, fd));
    if (*fd >= 0)
        return STATUS_OK;
    if (!remote->options.frozen)
        TRY(read_to_cache(remote, file, stopped, &from));
    const enum status status =
        unpack_open(&remote->options, &stop, &copy,
                    &(struct unpack_input){.fd = from, .tar = !mds_is_shard(file->name)}, NULL, fd);
    if (from >= 0) {
        close(from);
        cache_remove(folder, &packed);
    }
    return status_prefix(status, "%s/%s", remote->shown, file->name);
}

/* ---- Opening and closing ---- */

/* Removes entries of the cache that exceed the limit, unless a file of this data set is itself larger than
 * the limit: such a limit is a mistake, and reading the file fails. */
static enum status trim_cache(struct remote *remote)
{
    struct waiter waiter = {remote, NULL};
    const struct cache_stop stop = {is_stopped, &waiter};
    const struct remote_options *options = &remote->options;
    bool fits = !options->frozen && !options->unlisted;
    for (uint32_t i = 0; i < remote->count; i++)
        fits = fits && (!remote->files[i]->known || !options->cache_bytes ||
                        remote->files[i]->version.bytes <= options->cache_bytes);
    return fits ? cache_trim(options->cache_dir, options->cache_bytes, &stop) : STATUS_OK;
}

static enum status open_all(const char *url, struct remote *remote)
{
    FREED char *leaf = NULL;
    TRY(split_url(url, remote, &leaf));
    TRY(find_service(remote, leaf));
    TRY(http_open(&remote->http));
    if (remote->options.cache_dir)
        TRY(cache_open(remote->options.cache_dir, remote->options.frozen));
    if (!remote->options.unlisted)
        TRY(list_files(remote, leaf));
    if (remote->count && !remote->files[0]->known)
        TRY(examine_alone(remote, remote->files[0], TRIES_FIRST));
    if (remote->options.cache_dir)
        TRY(trim_cache(remote));
    return start_threads(remote);
}

static void free_file(void *node)
{
    struct remote_file *file = node;
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
    for (struct remote_file *file = remote->passing; file; file = file->passing_later) {
        struct cache_entry entry;
        for (int unpacked = 0; unpacked < 2; unpacked++)
            if (find_entry(remote, file, unpacked, &entry) == STATUS_OK)
                cache_remove(remote->options.cache_dir, &entry);
    }
    tdestroy(remote->tree, free_file);
    while (remote->spare_count > 0)
        close(remote->spare[--remote->spare_count]);
    http_close(remote->http);
    explicit_bzero(&remote->credentials, sizeof remote->credentials);
    if (remote->suffix)
        explicit_bzero(remote->suffix, strlen(remote->suffix)); /* the signature of Azure */
    free(remote->threads);
    free(remote->files);
    free(remote->base);
    free(remote->shown);
    free(remote->suffix);
    free(remote->prefix);
    free(remote->identity);
    free(remote);
}

enum status remote_open(const char *url, const struct remote_options *options, struct remote **remote)
{
    *remote = NULL;
    if (options && options->prepare)
        TRY(options->prepare(url));
    struct remote *opened = *remote = calloc(1, sizeof *opened);
    TRY(REMOTE_ALLOCATED(opened));
    if (options)
        opened->options = *options;
    if (!opened->options.option)
        opened->options.option = "data";
    if (getrandom(&opened->run, sizeof opened->run, 0) != sizeof opened->run)
        opened->run = (uint64_t)time(NULL) ^ (uint64_t)getpid() << 32;
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

uint32_t remote_count(const struct remote *remote)
{
    return remote->count;
}

const char *remote_name(const struct remote *remote, uint32_t file)
{
    return remote->files[file]->name;
}

bool remote_encoded(const struct remote *remote)
{
    return remote->service == SERVICE_WEB;
}

bool remote_cached(const struct remote *remote)
{
    return remote->options.cache_dir != NULL;
}

uint64_t remote_cache_bytes(const struct remote *remote)
{
    return remote_cached(remote) ? remote->options.cache_bytes : 0;
}

/* ---- Reading ---- */

/* Returns the file with this name. On success, its size and version are known. If a connection has failed to
 * find them, this function tries again, so that the calling thread gets the error message. */
static enum status known_file(struct remote *remote, const char *name, struct remote_file **found)
{
    pthread_mutex_lock(&remote->lock);
    struct remote_file *file = *found = find_file(remote, name);
    while (file && file->examining)
        pthread_cond_wait(&remote->done, &remote->lock);
    pthread_mutex_unlock(&remote->lock);
    TRY(REMOTE_ALLOCATED(file));
    return examine_alone(remote, file, TRIES);
}

void remote_ask_size(struct remote *remote, const char *name)
{
    pthread_mutex_lock(&remote->lock);
    struct remote_file *file = find_file(remote, name);
    if (file)
        start_examining(remote, file);
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_size(struct remote *remote, const char *name, uint64_t *bytes)
{
    struct remote_file *file;
    TRY(known_file(remote, name, &file));
    *bytes = file->version.bytes;
    return STATUS_OK;
}

void remote_ask(struct remote *remote, const char *name)
{
    if (remote_cached(remote))
        return;
    pthread_mutex_lock(&remote->lock);
    struct remote_file *file = find_file(remote, name);
    if (file && file->known)
        (void)start_in_memory(remote, file); /* remote_fd() reports errors */
    else if (file) {
        file->asked = true;
        start_examining(remote, file);
    }
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_fd(struct remote *remote, const char *name, const bool *stopped, int *fd)
{
    struct remote_file *file;
    *fd = -1;
    pthread_mutex_lock(&remote->lock);
    const bool ends = stopped && *stopped;
    pthread_mutex_unlock(&remote->lock);
    if (ends)
        return status_set(STATUS_FAILED, "%s/%s: reading was stopped", remote->shown, name);
    TRY(known_file(remote, name, &file));
    return (unpack_is_packed(name)  ? read_unpacked
            : remote_cached(remote) ? read_to_cache
                                    : read_to_memory)(remote, file, stopped, fd);
}

enum status remote_packed_fd(struct remote *remote, const char *name, int *fd)
{
    struct remote_file *file;
    *fd = -1;
    TRY(known_file(remote, name, &file));
    return (remote_cached(remote) ? read_to_cache : read_to_memory)(remote, file, NULL, fd);
}

bool remote_ranged(struct remote *remote, const char *name)
{
    pthread_mutex_lock(&remote->lock);
    const struct remote_file *file = find_file(remote, name);
    const bool ranged = file && file->known && file->ranged;
    pthread_mutex_unlock(&remote->lock);
    return ranged;
}

enum status remote_begin(struct remote *remote, const char *name, uint64_t first, uint64_t bytes, uint8_t *to,
                         struct transfer **begun)
{
    struct remote_file *file;
    *begun = NULL;
    TRY(known_file(remote, name, &file));
    if (!file->ranged || bytes == 0 || first + bytes > file->version.bytes)
        return status_set(STATUS_FAILED,
                          "%s/%s: bytes %" PRIu64 " to %" PRIu64 " of %" PRIu64 " cannot be read",
                          remote->shown, name, first, first + bytes, file->version.bytes);
    struct transfer *transfer = calloc(1, sizeof *transfer);
    TRY(REMOTE_ALLOCATED(transfer));
    *transfer = (struct transfer){.file = file,
                                  .fd = -1,
                                  .to = to,
                                  .piece_bytes = bytes,
                                  .next = first,
                                  .end = first + bytes,
                                  .left = bytes};
    pthread_mutex_lock(&remote->lock);
    queue_transfer(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
    *begun = transfer;
    return STATUS_OK;
}

enum status remote_await(struct remote *remote, struct transfer *transfer, const bool *stopped)
{
    pthread_mutex_lock(&remote->lock);
    const enum status status = await_transfer(remote, transfer, stopped);
    pthread_mutex_unlock(&remote->lock);
    close_transfer(transfer, false);
    return status;
}

void remote_abandon(struct remote *remote, struct transfer *transfer)
{
    pthread_mutex_lock(&remote->lock);
    abandon(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
}

void remote_stop(struct remote *remote, bool *stopped, bool value)
{
    pthread_mutex_lock(&remote->lock);
    *stopped = value;
    pthread_cond_broadcast(&remote->done);
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_text(struct remote *remote, const char *name, uint64_t limit, char **text, size_t *size)
{
    uint64_t bytes;
    *text = NULL;
    TRY(remote_size(remote, name, &bytes));
    if (bytes > limit)
        return status_set(STATUS_FAILED,
                          "%s/%s: the file has %" PRIu64 " bytes; at most %" PRIu64 " are read",
                          remote->shown, name, bytes, limit);
    int fd;
    TRY(remote_fd(remote, name, NULL, &fd));
    *text = malloc(bytes + 1);
    const bool done = *text && file_read_at(fd, *text, bytes, 0, size) && *size == bytes;
    remote_done(remote, fd);
    if (!done)
        return status_set(STATUS_FAILED, "%s/%s: cannot read it", remote->shown, name);
    (*text)[bytes] = '\0';
    return STATUS_OK;
}
