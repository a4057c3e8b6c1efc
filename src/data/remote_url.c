#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "data/remote_parts.h"

/* Refuses kinds of URLs that cannot be read, and says how to write the same place. */
static enum status check_scheme(const char *url)
{
    static const char *const known[] = {"https://", "http://", "s3://"};
    static const struct {
        const char *schemes, *remedy;
    } others[] = {
        {" az abfs abfss wasb wasbs adl ",
         "for Azure, write https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX/?SAS"},
        {" gs gcs ", "for Google Cloud Storage, write s3://BUCKET/PREFIX/ with an HMAC key and "
                     "AWS_ENDPOINT_URL=https://storage.googleapis.com"},
        {" s3a s3n ", "write s3://BUCKET/PREFIX/"},
    };
    const char *remedy = "use https://, http://, s3:// or file://";
    const int length = (int)(strstr(url, "://") - url);
    char word[16];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(url, known[i], strlen(known[i])) == 0)
            return STATUS_OK;
    snprintf(word, sizeof word, " %.*s ", length, url);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (length < 10 && strstr(others[i].schemes, word))
            remedy = others[i].remedy;
    return status_set(STATUS_USAGE, "--data: %.*s:// is an unknown kind of URL; %s",
                      length < 40 ? length : 40, url, remedy);
}

enum status remote_split(const char *url, struct remote *remote, char **leaf)
{
    size_t length = strcspn(url, "?");
    const char *host = strstr(url, "://") + 3;
    TRY(check_scheme(url));
    if (strcspn(host, "/?") == 0 && strncmp(url, "s3:", 3) != 0)
        return status_set(STATUS_USAGE, "--data: a URL needs a host: https://HOST/PATH/NAME.tar");
    if (strcspn(host, "/?") > strcspn(host, "@"))
        return status_set(STATUS_USAGE,
                          "--data: a URL with a user or password is refused, because it would be "
                          "printed; use the environment for credentials");
    const char *list = strstr(host, ",http");
    if (list && list < url + length &&
        (strncmp(list + 5, "://", 3) == 0 || strncmp(list + 5, "s://", 4) == 0))
        return status_set(STATUS_USAGE,
                          "--data: a list of URLs is refused; name several shards of a folder in "
                          "one URL, as in https://HOST/PATH/{a,b}.tar");
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
    if (!remote->base || !remote->suffix || (names_files && !*leaf))
        return remote_out_of_memory();
    remote->shown = strndup(remote->base, strlen(remote->base) - 1);
    return remote->shown ? STATUS_OK : remote_out_of_memory();
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

/* Replaces s3://BUCKET/PREFIX/ by the URL of the service. In such URLs only a question mark and a percent
 * sign can be encoded, because names of objects may contain percent codes. */
static enum status find_s3(struct remote *remote, char *leaf)
{
    if (*remote->suffix)
        return status_set(
            STATUS_USAGE,
            "--data %s?...: an s3:// URL has no query; write %%3F for a question mark in a name",
            remote->shown);
    decode(remote->base, "?%");
    if (leaf)
        decode(leaf, "?%");

    const char *endpoint = getenv("AWS_ENDPOINT_URL_S3");
    const char *bucket = remote->base + strlen("s3://"), *slash = strchr(bucket, '/');
    int length = slash ? (int)(slash - bucket) : 0;
    char encoded[REMOTE_URL_MAX] = "", *base = NULL;
    endpoint = endpoint ? endpoint : getenv("AWS_ENDPOINT_URL");
    TRY(s3_find_region(remote->region));
    if (length == 0 || !s3_encode(slash + 1, true, encoded, sizeof encoded))
        return status_set(STATUS_USAGE, "--data %s: name a bucket: s3://BUCKET/PREFIX/", remote->shown);
    if (endpoint) { /* path style */
        size_t end = strlen(endpoint) - (*endpoint && endpoint[strlen(endpoint) - 1] == '/');
        if (strncmp(endpoint, "http://", 7) != 0 && strncmp(endpoint, "https://", 8) != 0)
            return status_set(STATUS_USAGE,
                              "AWS_ENDPOINT_URL: '%.80s' does not begin with http:// or https://", endpoint);
        if (asprintf(&base, "%.*s/%.*s/%s", (int)end, endpoint, length, bucket, encoded) < 0)
            return remote_out_of_memory();
    } else if (memchr(bucket, '.', (size_t)length)) {
        /* The certificate *.s3.REGION.amazonaws.com does not match bucket names that contain dots. */
        if (asprintf(&base, "https://s3.%s.amazonaws.com/%.*s/%s", remote->region, length, bucket, encoded) <
            0)
            return remote_out_of_memory();
    } else if (asprintf(&base, "https://%.*s.s3.%s.amazonaws.com/%s", length, bucket, remote->region,
                        encoded) < 0)
        return remote_out_of_memory();
    remote->prefix = strdup(slash + 1);
    remote->root = (int)(strlen(base) - strlen(encoded));
    free(remote->base);
    remote->base = base;
    const char *host = strstr(base, "://") + 3;
    snprintf(remote->host, sizeof remote->host, "%.*s", (int)strcspn(host, "/"), host);
    return remote->prefix ? s3_find_credentials(&remote->credentials) : remote_out_of_memory();
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
                          "--data %s: name a container: https://ACCOUNT.blob.core.windows.net/CONTAINER?SAS",
                          remote->shown);
    remote->root = (int)(at + 1 - remote->base);
    remote->prefix = strdup(at + 1);
    if (!remote->prefix)
        return remote_out_of_memory();
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

/* Returns whether a query has a parameter with this name. */
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

enum status remote_find_service(struct remote *remote, char *leaf)
{
    remote->identity = identity_of(remote->suffix);
    if (!remote->identity)
        return remote_out_of_memory();
    if (strncmp(remote->base, "s3://", 5) == 0) {
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

enum status remote_url_of(const struct remote *remote, const char *name, char url[REMOTE_URL_MAX])
{
    bool fits = snprintf(url, REMOTE_URL_MAX, "%s", remote->base) < REMOTE_URL_MAX;
    if (remote->service == SERVICE_WEB)
        fits =
            fits && (strncat(url, name, REMOTE_URL_MAX - 1 - strlen(url)), strlen(url) < REMOTE_URL_MAX - 1);
    else
        fits = fits && s3_encode(name, true, url, REMOTE_URL_MAX);
    fits = fits && strlen(url) + strlen(remote->suffix) < REMOTE_URL_MAX;
    if (!fits)
        return status_set(STATUS_FAILED, "%s/%.80s: the address is too long", remote->shown, name);
    strcat(url, remote->suffix);
    for (char *blank; (blank = strchr(url, ' ')); memcpy(blank, "%20", 3)) {
        if (strlen(url) + 2 >= REMOTE_URL_MAX)
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
    char date[S3_DATE_MAX], authorization[S3_AUTHORIZATION_MAX], value[80] = "", path[REMOTE_URL_MAX];
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
    return made ? STATUS_OK : remote_out_of_memory();
}

struct http_request remote_request(const struct remote *remote, const char *url, const char *shown)
{
    bool is_signed = remote->service == SERVICE_S3 && *remote->credentials.key;
    return (struct http_request){.url = url,
                                 .shown = shown,
                                 .redirects = remote->service != SERVICE_S3,
                                 .explained = remote->service != SERVICE_WEB,
                                 .region = remote->service == SERVICE_S3 ? remote->region : NULL,
                                 .sign = is_signed ? sign : NULL,
                                 .signer = remote};
}
