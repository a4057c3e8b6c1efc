/* The parts of S3's interface that reading needs: credentials, signatures (Signature Version 4), and lists of
 * objects. Lists of Azure's blob storage have the same structure. */
#ifndef FDSL_DATA_S3_H
#define FDSL_DATA_S3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "core/portable.h"
#include "core/status.h"

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
