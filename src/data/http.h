/* Reads parts of files over HTTP and HTTPS, with libcurl. */
#ifndef FDSL_DATA_HTTP_H
#define FDSL_DATA_HTTP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "core/status.h"

#define HTTP_TAG_MAX     128
#define HTTP_HEADERS_MAX 8

/* Identifies the content of a file. */
struct http_version {
    uint64_t bytes;         /* size of the whole file; HTTP_UNKNOWN if the server does not say */
    char tag[HTTP_TAG_MAX]; /* the ETag, with its quotes; empty if the server sends none, or a longer one */
    time_t modified;        /* Last-Modified; 0 if the server sends none */

    /* Two contents of the file cannot have the same version. This is true for an ETag, unless it is weak
     * (RFC 9110, section 8.8.3), and for a Last-Modified at least one second before the answer: a change in
     * the same second would leave it as it is. */
    bool exact;
};
#define HTTP_UNKNOWN UINT64_MAX

struct http_request {
    const char *url;
    const char *shown;  /* the URL without secrets, for messages */
    uint64_t first;     /* offset of the first requested byte */
    uint64_t wanted;    /* number of requested bytes */
    bool whole;         /* asks for the whole file, of at most `wanted` bytes, without a range */
    bool redirects;     /* follow up to five redirections; never from HTTPS to HTTP */
    const char *absent; /* what to do if the file does not exist; NULL: check the address */
    bool explained;     /* the body of an error is that of S3 or Azure (s3_read_error()) */
    const char *region; /* the region that the request is for; NULL if there are no regions */
    uint8_t *to;        /* receives the bytes: room for `wanted`; or NULL */
    int fd; /* if `to` is NULL: file that receives the bytes, at their offsets in the remote file */

    /* The version that the file must have; NULL if it is not known yet. */
    const struct http_version *version;

    /* Sets the headers of an attempt, for example a signature that expires after some minutes. Adds at most
     * HTTP_HEADERS_MAX strings from malloc. NULL if the request needs no such headers. */
    enum status (*sign)(const struct http_request *request, const char *range,
                        char *headers[HTTP_HEADERS_MAX]);
    const void *signer; /* for sign() */

    /* When another thread sets this flag, the request fails within about a second, and is not tried again.
     * The same for the second flag. NULL: it cannot be stopped. */
    const atomic_bool *abandoned, *cancelled;
};

struct http_reply {
    uint64_t got;                /* bytes written */
    struct http_version version; /* the version that the server reports */
    bool ranged;                 /* the server sent the requested range */
};

/* Opens a connection, which stays open between requests. One thread at a time can use it. STATUS_UNAVAILABLE
 * in builds without libcurl. The caller closes it. */
struct http;
enum status http_open(struct http **http);
void http_close(struct http *http);

/* Reads a part of a file. If the server is busy (408, 429, or 5xx except 501 and 505) or the connection
 * breaks, tries again and continues at the first missing byte (with `whole`, at the first byte). The delay
 * before a try is random, and grows with each try. With status 429 or 503 and a Retry-After, waits in
 * addition for that time, but at most 60 s. Gives up after `tries` attempts in succession of which none
 * received 64 KiB; with `whole`, after `tries` attempts. If the server ignores or refuses ranges and
 * `request->version` is NULL, `ranged` is false and nothing is read; if a version is given, that is a
 * failure.
 *
 * STATUS_FAILED, with request->shown and a remedy, if the file does not exist, if access is denied, if the
 * file does not have the version `request->version` or an answer does not say so, or if the body's length
 * differs from its headers. */
enum status http_get(struct http *http, const struct http_request *request, int tries,
                     struct http_reply *reply);

#endif
