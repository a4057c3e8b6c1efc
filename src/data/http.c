#include "data/http.h"

#ifdef HAVE_CURL

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include <curl/curl.h>

#include "machine/host.h"

#define CONNECT_S   10
#define STALL_S     30          /* a transfer that is slower than SLOW_BPS for this long has failed */
#define SLOW_BPS    100         /* bytes per second */
#define HEADERS_MAX (256 << 10) /* bytes in the headers of all answers to an attempt */
#if LIBCURL_VERSION_NUM >= 0x080600
#define HEADER_TOO_LONG CURLE_TOO_LARGE
#else
#define HEADER_TOO_LONG CURLE_OUT_OF_MEMORY /* before 8.6.0, there was no code of its own */
#endif
#define REDIRECTS_MAX 5
#define DELAY_FIRST_S 0.1
#define DELAY_MAX_S   5.0
#define DELAY_STEP_S  0.05 /* while it waits, a thread looks this often whether the request was abandoned */
#define IDLE_NS       5000000 /* wait if libcurl has nothing to wait for, for example while it resolves a name */
#define ASKED_MAX_S   60.0    /* a longer Retry-After is shortened to this */
#define PROGRESS      (64 << 10) /* an attempt that receives this many bytes is not counted */

struct http {
    CURL *curl;
    CURLM *transfers; /* holds the open connections */
    char error[CURL_ERROR_SIZE];
    uint64_t random; /* state of the generator of delays */

    /* State of the current attempt */
    const struct http_request *request;
    struct http_reply *reply;
    long code;             /* status of the latest header block */
    uint64_t from;         /* offset of the first requested byte */
    uint64_t begin;        /* from Content-Range: offset of the first byte of the body */
    uint64_t promised;     /* from Content-Length */
    time_t date;           /* from Date */
    uint64_t asked_s;      /* from Retry-After, as a number of seconds; 0: none */
    time_t asked_until;    /* from Retry-After, as a date; 0: none */
    size_t headers;        /* bytes of headers */
    bool overflows, other; /* the body is too long; the reply is for another range or version */
    bool encoded;          /* the body is compressed */
    int unwritten;         /* errno, if the bytes could not be written */
    char url[256];         /* Location of a refused redirection */
    char region[64];       /* from x-amz-bucket-region */
    char page[4096];       /* beginning of the body of an error */
    size_t page_bytes;
};

/* ---- Connections ---- */

/* Initialises libcurl once. Without the lock, a child that begins in this time would inherit the locks of
 * libcurl. */
static void initialise(void)
{
    static bool initialised;
    process_lock();
    if (!initialised)
        curl_global_init(CURL_GLOBAL_DEFAULT);
    initialised = true;
    process_unlock();
}

enum status http_open(struct http **http)
{
    initialise();
    *http = calloc(1, sizeof **http);
    if (*http) {
        (*http)->curl = curl_easy_init();
        (*http)->transfers = curl_multi_init();
    }
    if (!*http || !(*http)->curl || !(*http)->transfers) {
        http_close(*http);
        *http = NULL;
        return status_set(STATUS_EXHAUSTED, "out of memory for a connection");
    }
    (*http)->random = (uint64_t)(uintptr_t)*http ^ (uint64_t)time(NULL);
    return STATUS_OK;
}

void http_close(struct http *http)
{
    if (http && http->curl)
        curl_easy_cleanup(http->curl);
    if (http && http->transfers)
        curl_multi_cleanup(http->transfers);
    free(http);
}

/* ---- Replies ---- */

/* Copies the value of a header field, without the line end. Returns false if the line is not this field. */
static bool field(const char *line, size_t size, const char *name, char *value, size_t room)
{
    size_t length = strlen(name);
    if (size <= length || strncasecmp(line, name, length) != 0)
        return false;
    line += length;
    size -= length;
    while (size > 0 && (*line == ' ' || *line == '\t'))
        line++, size--;
    while (size > 0 && (line[size - 1] == '\r' || line[size - 1] == '\n' || line[size - 1] == ' '))
        size--;
    if (size >= room)
        size = room - 1;
    memcpy(value, line, size);
    value[size] = '\0';
    return true;
}

/* Forgets the reply to an earlier request. */
static void begin_reply(struct http *http, long code)
{
    http->code = code;
    http->begin = http->promised = HTTP_UNKNOWN;
    http->date = http->asked_until = 0;
    http->asked_s = 0;
    http->page_bytes = 0;
    http->encoded = false;
    *http->url = *http->region = '\0';
    http->reply->version = (struct http_version){.bytes = HTTP_UNKNOWN};
}

static time_t date_of(const char *text)
{
    time_t date = curl_getdate(text, NULL);
    return date > 0 ? date : 0;
}

/* Reads a number, which consists of digits only, and advances `*text` to what follows it. Returns false if
 * there is none, or if it is larger than the size of any file. */
static bool number(const char **text, uint64_t *value)
{
    const char *at = *text;
    for (*value = 0; *at >= '0' && *at <= '9' && *value <= INT64_MAX / 10 - 1; at++)
        *value = *value * 10 + (uint64_t)(*at - '0');
    const bool found = at > *text && !(*at >= '0' && *at <= '9');
    *text = at;
    return found;
}

/* Reads the value of Retry-After: a number of seconds, or a date. */
static void read_delay(struct http *http, const char *text)
{
    const char *end = text;
    if (!number(&end, &http->asked_s) || *end) {
        http->asked_s = 0;
        http->asked_until = date_of(text);
    }
}

/* Reads the value of Content-Range, "bytes FIRST-LAST/SIZE", in which either the range or the size may be
 * "*". If it has another form, both `*first` and `*bytes` are HTTP_UNKNOWN. */
static void read_range(const char *text, uint64_t *first, uint64_t *bytes)
{
    uint64_t begin = HTTP_UNKNOWN, last = 0, size = HTTP_UNKNOWN;
    *first = *bytes = HTTP_UNKNOWN;
    if (strncmp(text, "bytes ", 6) != 0)
        return;
    text += 6;
    const bool whole = *text == '*';
    if (whole)
        text++;
    else if (!number(&text, &begin) || *text++ != '-' || !number(&text, &last) || last < begin)
        return;
    if (*text++ != '/')
        return;
    if (*text == '*' && !whole)
        text++;
    else if (!number(&text, &size) || (!whole && last >= size))
        return;
    if (*text)
        return;
    *first = begin;
    *bytes = size;
}

static size_t take_header(char *line, size_t one, size_t size, void *context)
{
    struct http *http = context;
    struct http_version *version = &http->reply->version;
    char value[256];
    (void)one;
    http->headers += size;
    if (http->headers > HEADERS_MAX)
        return 0;
    if (size > 5 && strncmp(line, "HTTP/", 5) == 0) { /* a new reply, for example after a redirection */
        const char *space = memchr(line, ' ', size);
        begin_reply(http, space ? strtol(space, NULL, 10) : 0);
    } else if (field(line, size, "Content-Length:", value, sizeof value)) {
        const char *text = value;
        if (!number(&text, &http->promised) || *text)
            http->promised = HTTP_UNKNOWN;
    } else if (field(line, size, "Content-Range:", value, sizeof value))
        read_range(value, &http->begin, &version->bytes);
    else if (field(line, size, "ETag:", value, sizeof value)) {
        bool fits = strlen(value) < sizeof version->tag && strcmp(value, "\"\"") != 0;
        memcpy(version->tag, fits ? value : "", fits ? strlen(value) + 1 : 1);
    } else if (field(line, size, "Last-Modified:", value, sizeof value))
        version->modified = date_of(value);
    else if (field(line, size, "Date:", value, sizeof value))
        http->date = date_of(value);
    else if (field(line, size, "Retry-After:", value, sizeof value))
        read_delay(http, value);
    else if (field(line, size, "Content-Encoding:", value, sizeof value))
        http->encoded = strcasecmp(value, "identity") != 0;
    else if (field(line, size, "Location:", http->url, sizeof http->url) ||
             field(line, size, "x-amz-bucket-region:", http->region, sizeof http->region))
        return size;
    return size;
}

static bool is_abandoned(const struct http *http)
{
    const struct http_request *request = http->request;
    return (request->abandoned && atomic_load(request->abandoned)) ||
           (request->cancelled && atomic_load(request->cancelled));
}

static enum status report_abandoned(const struct http *http)
{
    return status_set(STATUS_FAILED, "%s: reading was stopped", http->request->shown);
}

static bool has_strong_tag(const struct http_version *version)
{
    return *version->tag && strncmp(version->tag, "W/", 2) != 0;
}

/* Sets `exact` of the received version. */
static void judge_version(const struct http *http)
{
    struct http_version *version = &http->reply->version;
    const time_t date = http->date ? http->date : time(NULL);
    version->exact = has_strong_tag(version) || (version->modified && version->modified < date);
}

/* Returns the field that identifies the required version but is missing in the reply, or NULL. */
static const char *missing_field(const struct http *http)
{
    const struct http_version *wanted = http->request->version, *is = &http->reply->version;
    return !wanted                             ? NULL
           : *wanted->tag && !*is->tag         ? "ETag"
           : has_strong_tag(wanted)            ? NULL
           : wanted->modified && !is->modified ? "Last-Modified"
                                               : NULL;
}

/* Returns whether the reply is for the version that the request requires. A weak tag may stay the same while
 * the bytes change, so the date must be the same, too. */
static bool same_version(const struct http *http)
{
    const struct http_version *wanted = http->request->version, *is = &http->reply->version;
    return !wanted ||
           ((is->bytes == HTTP_UNKNOWN || wanted->bytes == HTTP_UNKNOWN || is->bytes == wanted->bytes) &&
            (!*wanted->tag || strcmp(is->tag, wanted->tag) == 0) &&
            (has_strong_tag(wanted) || !wanted->modified || is->modified == wanted->modified));
}

/* Writes the next bytes of the body. */
static bool store(struct http *http, const char *bytes, size_t size)
{
    const struct http_request *request = http->request;
    struct http_reply *reply = http->reply;
    if (request->to) {
        memcpy(request->to + reply->got, bytes, size);
        reply->got += size;
        return true;
    }
    while (size > 0) {
        ssize_t count = pwrite(request->fd, bytes, size, (off_t)(request->first + reply->got));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            http->unwritten = count < 0 ? errno : ENOSPC;
            return false;
        }
        bytes += count;
        size -= (size_t)count;
        reply->got += (uint64_t)count;
    }
    return true;
}

/* Receives a part of the body. Returns less than `size` to end the transfer. */
static size_t take_body(char *bytes, size_t one, size_t size, void *context)
{
    struct http *http = context;
    const struct http_request *request = http->request;
    struct http_reply *reply = http->reply;
    (void)one;
    if (http->code >= 300) {
        size_t room = sizeof http->page - http->page_bytes, count = size < room ? size : room;
        memcpy(http->page + http->page_bytes, bytes, count);
        http->page_bytes += count;
        return size;
    }
    if ((http->code == 200 && !request->whole) || http->encoded)
        return 0; /* the server ignores the range, or compresses */
    if (http->code == 206 && (http->begin != http->from || !same_version(http))) {
        http->other = true;
        return 0;
    }
    if (request->wanted - reply->got < size) {
        http->overflows = true;
        return 0;
    }
    return store(http, bytes, size) ? size : 0;
}

/* ---- Requests ---- */

/* Writes the status of a reply, and what S3 or Azure says about it: "403", or "403 AccessDenied: ...". Sets
 * `region` to that of the bucket, or to "". */
static void describe(const struct http *http, char text[400], char region[64])
{
    struct s3_error error = {0};
    if (http->request->explained)
        s3_read_error(http->page, http->page_bytes, &error);
    error.message[strcspn(error.message, "\r\n")] = '\0'; /* in Azure's, identifiers follow */
    snprintf(text, 400, "%ld%s%s%s%s", http->code, *error.code ? " " : "", error.code,
             *error.message ? ": " : "", error.message);
    snprintf(region, 64, "%s", *http->region ? http->region : error.region);
}

static enum status refuse(const struct http *http)
{
    const char *shown = http->request->shown, *ours = http->request->region;
    char text[400], region[64];
    describe(http, text, region);
    if (ours && *region && strcmp(region, ours) != 0)
        return status_set(STATUS_FAILED,
                          "%s: the server refuses the request (%s); the bucket is in the region '%s', but "
                          "the request is for '%s': set AWS_REGION=%s",
                          shown, text, region, ours, region);
    switch (http->code) {
    case 301:
    case 302:
    case 303:
    case 307:
    case 308:
        return status_set(STATUS_FAILED,
                          "%s: the server redirects to '%.80s' (%s), which is not followed; use the final "
                          "address (for S3, set AWS_REGION to the region of the bucket)",
                          shown, http->url, text);
    case 400:
        return status_set(STATUS_FAILED,
                          "%s: the server refuses the request (%s); check the address, the region and "
                          "the credentials",
                          shown, text);
    case 401:
    case 403:
        return status_set(STATUS_FAILED,
                          "%s: access denied (%s); check the credentials and their permissions", shown, text);
    case 404:
    case 410:
        return status_set(STATUS_FAILED, "%s: the server has no such file (%s); %s", shown, text,
                          http->request->absent ? http->request->absent : "check the address");
    case 412:
        return status_set(STATUS_FAILED, "%s: the file changed while it was read; start again", shown);
    case 416:
        return status_set(STATUS_FAILED,
                          "%s: the server refuses the bytes from %" PRIu64 " on (%s), although it reported a "
                          "larger file; the file may have changed: start again",
                          shown, http->from, text);
    default:
        return status_set(STATUS_FAILED,
                          "%s: the server answers with status %s; try again later, or ask its operator",
                          shown, text);
    }
}

static bool is_busy(long code)
{
    return code == 408 || code == 429 || (code >= 500 && code != 501 && code != 505);
}

/* Returns whether another attempt may succeed after this error of libcurl. */
static bool is_passing(CURLcode code)
{
    switch (code) {
    case CURLE_COULDNT_CONNECT:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_PARTIAL_FILE:
    case CURLE_RECV_ERROR:
    case CURLE_SEND_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_SSL_CONNECT_ERROR:
        return true;
    default:
        return false;
    }
}

/* Returns whether the latest reply redirects to a protocol that is not allowed. libcurl has the same error
 * code for this and for a server that does not speak HTTP. */
static bool is_other_protocol(const struct http *http)
{
    const char *end = strstr(http->url, "://");
    return http->code >= 300 && http->code < 400 && end && strncasecmp(http->url, "https:", 6) != 0 &&
           (strncasecmp(http->request->url, "https:", 6) == 0 || strncasecmp(http->url, "http:", 5) != 0);
}

static enum status explain(const struct http *http, CURLcode code)
{
    const char *reason = *http->error ? http->error : curl_easy_strerror(code);
    const char *shown = http->request->shown;
    if (code == CURLE_ABORTED_BY_CALLBACK)
        return report_abandoned(http);
    if (http->unwritten)
        return status_set(STATUS_EXHAUSTED, "%s: cannot store it: %s", shown, strerror(http->unwritten));
    if (http->overflows)
        return status_set(STATUS_FAILED,
                          "%s: the server sends more than the %" PRIu64 " bytes that it should", shown,
                          http->request->wanted);
    if (http->headers > HEADERS_MAX || code == HEADER_TOO_LONG)
        return status_set(STATUS_FAILED,
                          "%s: the headers of the answer are too long (at most %d KiB in all, and 100 KB per "
                          "line), or memory ran out; ask the operator of the server",
                          shown, HEADERS_MAX >> 10);
    if (http->encoded)
        return status_set(STATUS_FAILED,
                          "%s: the server compresses the answer, so its bytes are not those of the file; "
                          "switch off Content-Encoding for these files on the server",
                          shown);
    const char *missing = missing_field(http);
    if (http->other && missing)
        return status_set(STATUS_FAILED,
                          "%s: an answer has no %s, although an earlier one had it, so the bytes may be of "
                          "another version; if several servers share this address, use the address of one "
                          "of them",
                          shown, missing);
    if (http->other)
        return status_set(
            STATUS_FAILED,
            "%s: the file changed while it was read, or the server sent another range; start again", shown);
    if (code == CURLE_PEER_FAILED_VERIFICATION)
        return status_set(STATUS_FAILED,
                          "%s: the certificate is not trusted: %s; SSL_CERT_FILE names a file of further "
                          "authorities",
                          shown, reason);
    if (code == CURLE_TOO_MANY_REDIRECTS)
        return status_set(STATUS_FAILED, "%s: more than %d redirections", shown, REDIRECTS_MAX);
    if ((code == CURLE_UNSUPPORTED_PROTOCOL && !is_other_protocol(http)) || code == CURLE_WEIRD_SERVER_REPLY)
        return status_set(
            STATUS_FAILED,
            "%s: the server does not speak HTTP on this port; check the port, and whether it needs https://",
            shown);
    if (code == CURLE_UNSUPPORTED_PROTOCOL)
        return status_set(STATUS_FAILED,
                          "%s: refused to follow a redirection to another protocol (https may lead only "
                          "to https, http only to http and https)",
                          shown);
    if (code == CURLE_COULDNT_RESOLVE_HOST)
        return status_set(STATUS_FAILED,
                          "%s: unknown host; check the name of the server and this machine's DNS", shown);
    if (code == CURLE_COULDNT_CONNECT)
        return status_set(STATUS_FAILED, "%s: %s; check the host, its port and the proxy", shown, reason);
    if (code == CURLE_SSL_CONNECT_ERROR)
        return status_set(STATUS_FAILED, "%s: %s; if this port has no TLS, write http://", shown, reason);
    return status_set(STATUS_FAILED, "%s: %s", shown, reason);
}

/* Sets the headers of an attempt. The caller frees `*list`, even after a failure. */
static enum status set_headers(const struct http_request *request, const char *range,
                               struct curl_slist **list)
{
    char *headers[HTTP_HEADERS_MAX] = {0}, match[HTTP_TAG_MAX + 16];
    enum status status = request->sign ? request->sign(request, range, headers) : STATUS_OK;
    for (int i = 0; i < HTTP_HEADERS_MAX; i++) {
        struct curl_slist *longer =
            status == STATUS_OK && headers[i] ? curl_slist_append(*list, headers[i]) : *list;
        if (!longer && headers[i] && status == STATUS_OK)
            status = status_set(STATUS_EXHAUSTED, "out of memory for a request");
        else
            *list = longer;
        if (headers[i])
            explicit_bzero(headers[i], strlen(headers[i]));
        free(headers[i]);
    }
    /* A weak tag cannot be compared with If-Match (RFC 9110, section 13.1.1). */
    if (status == STATUS_OK && request->version && *request->version->tag == '"') {
        snprintf(match, sizeof match, "If-Match: %s", request->version->tag);
        struct curl_slist *longer = curl_slist_append(*list, match);
        *list = longer ? longer : *list;
    }
    return status;
}

static void set_options(struct http *http, const char *range, struct curl_slist *headers)
{
    const struct http_request *request = http->request;
    CURL *curl = http->curl;
    const char *authorities = getenv("SSL_CERT_FILE");
    bool secure = strncasecmp(request->url, "https:", 6) == 0;
    curl_easy_reset(curl); /* keeps the connection */
    curl_easy_setopt(curl, CURLOPT_URL, request->url);
#if LIBCURL_VERSION_NUM >= 0x075700
    curl_easy_setopt(curl, CURLOPT_QUICK_EXIT,
                     1L); /* a request that is given up does not wait for the resolver */
#endif
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
#else
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS, (long)(CURLPROTO_HTTPS | (secure ? 0 : CURLPROTO_HTTP)));
#endif
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, request->redirects ? 1L : 0L);
    curl_easy_setopt(curl, CURLOPT_MAXREDIRS, (long)REDIRECTS_MAX);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L); /* required in programs with threads */
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, (long)SLOW_BPS);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, (long)STALL_S);
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 128L << 10);
    curl_easy_setopt(curl, CURLOPT_USERAGENT, "fdsl-bench/" FDSL_VERSION);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, http->error);
    curl_easy_setopt(curl, CURLOPT_SUPPRESS_CONNECT_HEADERS,
                     1L); /* headers of a proxy are not the server's */
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_header);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, http);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, http);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    if (*range)
        curl_easy_setopt(curl, CURLOPT_RANGE, range);
    if (authorities && *authorities)
        curl_easy_setopt(curl, CURLOPT_CAINFO, authorities);
}

/* Removes the headers of an attempt from memory; some of them are secret. */
static void free_headers(struct curl_slist *headers)
{
    for (struct curl_slist *header = headers; header; header = header->next)
        explicit_bzero(header->data, strlen(header->data));
    curl_slist_free_all(headers);
}

/* Does what curl_easy_perform() does, but ends soon if the request is abandoned. */
static CURLcode perform(struct http *http)
{
    CURLcode code = CURLE_OK;
    CURLMcode failed = curl_multi_add_handle(http->transfers, http->curl);
    int running = 1, ready, left;
    while (failed == CURLM_OK && running > 0 && code == CURLE_OK) {
        failed = curl_multi_perform(http->transfers, &running);
        if (failed == CURLM_OK && running > 0)
            failed = curl_multi_wait(http->transfers, NULL, 0, (int)(1e3 * DELAY_STEP_S), &ready);
        if (failed == CURLM_OK && running > 0 && ready == 0)
            nanosleep(&(struct timespec){.tv_nsec = IDLE_NS}, NULL);
        if (running > 0 && is_abandoned(http))
            code = CURLE_ABORTED_BY_CALLBACK;
    }
    for (CURLMsg *ended; (ended = curl_multi_info_read(http->transfers, &left));)
        code = ended->msg == CURLMSG_DONE ? ended->data.result : code;
    curl_multi_remove_handle(http->transfers, http->curl);
    return failed == CURLM_OK ? code : CURLE_OUT_OF_MEMORY;
}

/* Sends the request, and receives the reply. `range` may be "". */
static enum status exchange(struct http *http, const char *range, CURLcode *code)
{
    struct curl_slist *headers = NULL;
    *http->error = '\0';
    http->overflows = http->other = false;
    http->unwritten = 0;
    http->headers = 0;
    begin_reply(http, 0);
    enum status status = set_headers(http->request, range, &headers);
    if (status == STATUS_OK) {
        set_options(http, range, headers);
        *code = perform(http);
        judge_version(http);
    }
    free_headers(headers);
    return status;
}

/* A server without ranges sends the whole file. If its version is not known yet, the caller then reads the
 * file without ranges. Otherwise, a piece of the file was requested. */
static enum status whole_file(struct http *http)
{
    struct http_reply *reply = http->reply;
    reply->version.bytes = http->promised;
    if (!http->request->version)
        return STATUS_OK;
    http->other = !same_version(http);
    return http->other ? explain(http, CURLE_OK)
                       : status_set(STATUS_FAILED,
                                    "%s: the server sends the whole file instead of the bytes from %" PRIu64
                                    " on, although it sent a range before; if several servers share this "
                                    "address, use the address of one of them",
                                    http->request->shown, http->from);
}

/* Makes one attempt. Sets `*again` to true if another attempt may succeed. */
static enum status attempt(struct http *http, bool *again)
{
    const struct http_request *request = http->request;
    struct http_reply *reply = http->reply;
    char range[64] = "";
    CURLcode code = CURLE_OK;
    *again = false;
    if (request->whole)
        reply->got = 0;
    http->from = request->first + reply->got;
    if (!request->whole)
        snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, http->from,
                 request->first + request->wanted - 1);
    TRY(exchange(http, range, &code));
    if (http->code == 416 && !request->version && reply->version.bytes != 0)
        TRY(exchange(http, "", &code)); /* either the file is empty, or the server refuses all ranges */
    reply->ranged = http->code == 206;
    if (http->code == 200 && !request->whole && http->headers <= HEADERS_MAX)
        return whole_file(http);
    if (http->code == 416 && !request->version && reply->version.bytes == 0)
        return STATUS_OK; /* the file is empty */
    if (code != CURLE_OK) {
        *again = !http->overflows && !http->other && !http->encoded && !http->unwritten && is_passing(code);
        return explain(http, code);
    }
    *again = is_busy(http->code);
    if (http->code >= 300 || http->code < 200)
        return refuse(http);
    if (request->whole) {
        http->other = http->code == 206 || !same_version(http);
        return http->other ? explain(http, CURLE_OK) : STATUS_OK;
    }
    *again = reply->got < request->wanted;
    return *again ? status_set(STATUS_FAILED, "%s: the body ends after %" PRIu64 " of %" PRIu64 " bytes",
                               request->shown, reply->got, request->wanted)
                  : STATUS_OK;
}

/* Returns how long the server asks to wait before the next attempt. */
static double asked_delay_s(const struct http *http)
{
    double asked_s = (double)http->asked_s;
    if (http->asked_until)
        asked_s = difftime(http->asked_until, http->date ? http->date : time(NULL));
    const bool asks = (http->code == 429 || http->code == 503) && asked_s > 0;
    return !asks ? 0 : asked_s < ASKED_MAX_S ? asked_s : ASKED_MAX_S;
}

/* Waits before the next attempt: a random time between half and all of a delay that doubles each time, after
 * the time that the server asks for. Returns early if the request is abandoned. */
static void wait_before(struct http *http, int tries)
{
    double delay_s = DELAY_FIRST_S;
    for (int i = 0; i < tries && delay_s < DELAY_MAX_S; i++)
        delay_s *= 2;
    delay_s = delay_s < DELAY_MAX_S ? delay_s : DELAY_MAX_S;
    http->random = http->random * 6364136223846793005u + 1442695040888963407u;
    delay_s *= 0.5 + (double)(http->random >> 33) * 0x1p-32;
    delay_s += asked_delay_s(http);
    for (; delay_s > 0 && !is_abandoned(http); delay_s -= DELAY_STEP_S) {
        const double step_s = delay_s < DELAY_STEP_S ? delay_s : DELAY_STEP_S;
        struct timespec left = {.tv_nsec = (long)(step_s * 1e9)};
        while (nanosleep(&left, &left) != 0 && errno == EINTR) {
        }
    }
}

enum status http_get(struct http *http, const struct http_request *request, int tries,
                     struct http_reply *reply)
{
    bool again = true;
    enum status status = STATUS_OK;
    *reply = (struct http_reply){0};
    http->request = request;
    http->reply = reply;
    for (int failed = 0; again && failed < tries;) { /* attempts since the latest that received bytes */
        const uint64_t before = reply->got;
        if (status != STATUS_OK)
            wait_before(http, failed > 0 ? failed - 1 : 0);
        if (is_abandoned(http))
            return status == STATUS_OK ? report_abandoned(http) : status; /* of the latest attempt */
        status = attempt(http, &again);
        failed = !request->whole && reply->got >= before + PROGRESS ? 0 : failed + 1;
    }
    return again ? status_prefix(status, "tried %d times", tries) : status;
}

#else

enum status http_open(struct http **http)
{
    *http = NULL;
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot read URLs: install libcurl (libcurl4-openssl-dev) and build again");
}

void http_close(struct http *http)
{
    (void)http;
}

enum status http_get(struct http *http, const struct http_request *request, int tries,
                     struct http_reply *reply)
{
    (void)request, (void)tries, (void)reply;
    return http_open(&http);
}

#endif
