/* Reads parts of files over HTTP and HTTPS, with libcurl. */
#ifndef FDSL_DATA_HTTP_H
#define FDSL_DATA_HTTP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "core/portable.h"
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

/* ---- S3 (s3.c) ---- */

/* The parts of S3's interface that reading needs: credentials, signatures (Signature Version 4), and lists
 * of objects. Lists of Azure's blob storage have the same structure. */

#define S3_FIELD_MAX 256
#define S3_TOKEN_MAX 4096

/* Credentials. They must never be printed. */
struct s3_credentials {
    char key[S3_FIELD_MAX], secret[S3_FIELD_MAX];
    char token[S3_TOKEN_MAX]; /* session token, or empty */
};

/* Finds credentials: in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else in the profile
 * AWS_PROFILE (default: default) of the file AWS_SHARED_CREDENTIALS_FILE (default: ~/.aws/credentials), else
 * of AWS_CONFIG_FILE (default: ~/.aws/config). If there are none, `key` stays empty, and requests are not
 * signed. STATUS_USAGE if a key has no secret, or if no file has the profile that AWS_PROFILE names. The
 * caller erases the credentials, even after a failure. */
enum status s3_find_credentials(struct s3_credentials *credentials);

/* Finds the HMAC key of Google Cloud Storage in GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY. Otherwise as
 * s3_find_credentials(). STATUS_USAGE if only one of them is set. */
enum status s3_find_google_credentials(struct s3_credentials *credentials);

/* Finds the URL of the server: in AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, else `endpoint_url` in the profile
 * of AWS_CONFIG_FILE; empty: the server of AWS. `*origin` names the setting, for messages. */
enum status s3_find_endpoint(char endpoint[S3_FIELD_MAX], const char **origin);

/* Finds the URL of Google Cloud Storage: in CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE, as the programs of
 * Google, else https://storage.googleapis.com. */
enum status s3_find_google_endpoint(char endpoint[S3_FIELD_MAX], const char **origin);

/* Returns whether a URL names objects of S3, or of a service with its interface: s3:// or gs://. */
static inline bool s3_is_url(const char *url)
{
    return strncmp(url, "s3://", 5) == 0 || strncmp(url, "gs://", 5) == 0;
}

/* Finds the region: in AWS_REGION or AWS_DEFAULT_REGION, else in the profile of AWS_CONFIG_FILE, else
 * us-east-1. */
enum status s3_find_region(char region[S3_FIELD_MAX]);

/* The parts of a request that are signed. The strings are percent-encoded, as they are sent. */
struct s3_request {
    const char *host, *path;
    const char *query; /* sorted by name, without '?'; or empty */
    const char *range; /* value of the header Range; or empty */
    const char *region;
    const char *payload; /* SHA-256 of the body in hex, or UNSIGNED-PAYLOAD */
    time_t time_s;
};

/* Writes the values of the headers x-amz-date and Authorization. STATUS_UNAVAILABLE in builds without
 * libcrypto. Source: AWS, "Authenticating Requests: Using the Authorization Header". */
#define S3_DATE_MAX          17
#define S3_AUTHORIZATION_MAX 1024
enum status s3_sign(const struct s3_request *request, const struct s3_credentials *credentials,
                    char date[S3_DATE_MAX], char authorization[S3_AUTHORIZATION_MAX]);

/* Appends `text` to the string in `to`, a buffer of `size` bytes. Percent-encodes all bytes except letters,
 * digits, "-._~" and, if `slashes` is set, '/'. Returns false if the result does not fit. */
bool s3_encode(const char *text, bool slashes, char *to, size_t size);

/* An object of a list. */
struct s3_object {
    const char *name; /* valid during the call */
    uint64_t bytes;
    const char *tag; /* the ETag; may be empty */
};

/* Reads one page of a list: S3's ListBucketResult (version 2), or Azure's EnumerationResults. Calls `add` for
 * each object. Sets `next` to the token of the next page, or to "". STATUS_FAILED with the reason if the text
 * is not such a list, or is cut; STATUS_UNAVAILABLE in builds without expat. */
enum status s3_list(const char *text, size_t size,
                    enum status (*add)(void *context, const struct s3_object *object), void *context,
                    char next[S3_TOKEN_MAX]);

/* The error that the body of an answer contains. Each text may be empty, or cut. */
struct s3_error {
    char code[64], message[256];
    char region[64]; /* where the bucket is */
};
void s3_read_error(const char *text, size_t size, struct s3_error *error);

#endif
