#include "data/s3.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef HAVE_CRYPTO
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

#include "core/file.h"

#define DIGEST_BYTES 32
#define HEX_BYTES    (2 * DIGEST_BYTES + 1)
#define LINE_MAX_    (2 * S3_TOKEN_MAX)

/* ---- Credentials ---- */

/* Copies an environment variable; an unset variable becomes "". STATUS_USAGE if it is too long. */
static enum status from_environment(const char *name, char *value, size_t size)
{
    const char *text = getenv(name);
    if (text && strlen(text) >= size)
        return status_set(STATUS_USAGE, "%s is longer than %zu characters", name, size - 1);
    snprintf(value, size, "%s", text ? text : "");
    return STATUS_OK;
}

static char *trim(char *text)
{
    while (*text == ' ' || *text == '\t')
        text++;
    for (size_t end = strlen(text); end > 0 && strchr(" \t\r\n", text[end - 1]); end--)
        text[end - 1] = '\0';
    return text;
}

/* Takes one line "NAME = VALUE" of a profile. */
static void take_line(char *line, struct s3_credentials *credentials)
{
    char *equals = strchr(line, '=');
    if (!equals)
        return;
    *equals = '\0';
    const char *name = trim(line), *value = trim(equals + 1);
    if (strcmp(name, "aws_access_key_id") == 0)
        snprintf(credentials->key, sizeof credentials->key, "%s", value);
    else if (strcmp(name, "aws_secret_access_key") == 0)
        snprintf(credentials->secret, sizeof credentials->secret, "%s", value);
    else if (strcmp(name, "aws_session_token") == 0)
        snprintf(credentials->token, sizeof credentials->token, "%s", value);
}

/* Reads the lines of one profile, "[NAME]". Returns whether the file has it. */
static bool read_profile(FILE *file, const char *profile, struct s3_credentials *credentials)
{
    static char line[LINE_MAX_];
    bool inside = false, found = false;
    while (fgets(line, sizeof line, file)) {
        char *text = trim(line), *end = strchr(text, ']');
        if (*text == '[' && end) {
            *end = '\0';
            inside = strcmp(trim(text + 1), profile) == 0;
            found |= inside;
        } else if (inside)
            take_line(text, credentials);
    }
    memset(line, 0, sizeof line);
    return found;
}

static enum status from_file(struct s3_credentials *credentials)
{
    const char *profile = getenv("AWS_PROFILE"), *path = getenv("AWS_SHARED_CREDENTIALS_FILE");
    char usual[PATH_MAX];
    if (!path) {
        snprintf(usual, sizeof usual, "%s/.aws/credentials", getenv("HOME") ? getenv("HOME") : "");
        path = usual;
    }
    FILE *file = fopen(path, "re");
    bool found = file && read_profile(file, profile ? profile : "default", credentials);
    if (file)
        fclose(file);
    if (!found && profile)
        return status_set(STATUS_USAGE, "AWS_PROFILE: %s has no profile '%s'", path, profile);
    return STATUS_OK;
}

enum status s3_find_credentials(struct s3_credentials *credentials)
{
    *credentials = (struct s3_credentials){0};
    TRY(from_environment("AWS_ACCESS_KEY_ID", credentials->key, sizeof credentials->key));
    TRY(from_environment("AWS_SECRET_ACCESS_KEY", credentials->secret, sizeof credentials->secret));
    TRY(from_environment("AWS_SESSION_TOKEN", credentials->token, sizeof credentials->token));
    if (!*credentials->key)
        TRY(from_file(credentials));
    if (*credentials->key && !*credentials->secret)
        return status_set(STATUS_USAGE, "an access key for S3 is set, but its secret is not; set "
                                        "AWS_SECRET_ACCESS_KEY");
    return STATUS_OK;
}

/* ---- Signatures ---- */

bool s3_encode(const char *text, bool slashes, char *to, size_t size)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";
    size_t at = strnlen(to, size);
    for (; *text; text++) {
        bool kept = strchr(plain, *text) || (slashes && *text == '/');
        size_t need = kept ? 1 : 3;
        if (at + need >= size)
            return false;
        if (kept)
            to[at] = *text;
        else
            snprintf(to + at, 4, "%%%02X", (unsigned char)*text);
        at += need;
        to[at] = '\0';
    }
    return true;
}

#ifdef HAVE_CRYPTO

static void to_hex(const uint8_t digest[DIGEST_BYTES], char hex[HEX_BYTES])
{
    for (int i = 0; i < DIGEST_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

static bool hmac(const void *key, size_t key_bytes, const char *text, uint8_t digest[DIGEST_BYTES])
{
    return HMAC(EVP_sha256(), key, (int)key_bytes, (const uint8_t *)text, strlen(text), digest, NULL) != NULL;
}

/* Formats the text whose hash is signed. The headers are sorted by name. The range and the token are left out
 * if they are empty. */
static int canonical_request(const struct s3_request *request, const char *token, const char *date,
                             const char *names, char *text, size_t size)
{
    bool ranged = *request->range, held = *token;
    return snprintf(text, size,
                    "GET\n%s\n%s\nhost:%s\n%s%s%sx-amz-content-sha256:%s\nx-amz-date:%s\n%s%s%s\n%s\n%s",
                    request->path, request->query, request->host, ranged ? "range:" : "", request->range,
                    ranged ? "\n" : "", request->payload, date, held ? "x-amz-security-token:" : "", token,
                    held ? "\n" : "", names, request->payload);
}

/* Computes the signature of `text` with the key that is derived from the secret, day and region. */
static bool sign_text(const char *secret, const char *day, const char *region, const char *text,
                      char hex[HEX_BYTES])
{
    char first[S3_FIELD_MAX + 8];
    uint8_t key[DIGEST_BYTES];
    snprintf(first, sizeof first, "AWS4%s", secret);
    bool done = hmac(first, strlen(first), day, key) && hmac(key, sizeof key, region, key) &&
                hmac(key, sizeof key, "s3", key) && hmac(key, sizeof key, "aws4_request", key) &&
                hmac(key, sizeof key, text, key);
    to_hex(key, hex);
    memset(first, 0, sizeof first);
    return done;
}

enum status s3_sign(const struct s3_request *request, const struct s3_credentials *credentials,
                    char date[S3_DATE_MAX], char authorization[S3_AUTHORIZATION_MAX])
{
    size_t room = strlen(request->path) + strlen(request->query) + strlen(credentials->token) + 1024;
    char names[128], day[9], scope[S3_FIELD_MAX + 64], text[S3_FIELD_MAX + 256], hex[HEX_BYTES];
    char *canonical = malloc(room);
    uint8_t digest[DIGEST_BYTES];
    struct tm utc;
    gmtime_r(&request->time_s, &utc);
    strftime(date, S3_DATE_MAX, "%Y%m%dT%H%M%SZ", &utc);
    strftime(day, sizeof day, "%Y%m%d", &utc);
    snprintf(names, sizeof names, "host;%sx-amz-content-sha256;x-amz-date%s", *request->range ? "range;" : "",
             *credentials->token ? ";x-amz-security-token" : "");
    bool done = canonical &&
                canonical_request(request, credentials->token, date, names, canonical, room) < (int)room &&
                EVP_Digest(canonical, strlen(canonical), digest, NULL, EVP_sha256(), NULL);
    free(canonical);
    if (!done)
        return status_set(STATUS_FAILED, "cannot sign a request");
    to_hex(digest, hex);
    snprintf(scope, sizeof scope, "%s/%.*s/s3/aws4_request", day, S3_FIELD_MAX, request->region);
    snprintf(text, sizeof text, "AWS4-HMAC-SHA256\n%s\n%s\n%s", date, scope, hex);
    if (!sign_text(credentials->secret, day, request->region, text, hex))
        return status_set(STATUS_FAILED, "cannot sign a request");
    snprintf(authorization, S3_AUTHORIZATION_MAX,
             "AWS4-HMAC-SHA256 Credential=%s/%s,SignedHeaders=%s,Signature=%s", credentials->key, scope,
             names, hex);
    return STATUS_OK;
}

#else

enum status s3_sign(const struct s3_request *request, const struct s3_credentials *credentials,
                    char date[S3_DATE_MAX], char authorization[S3_AUTHORIZATION_MAX])
{
    (void)request, (void)credentials, (void)date, (void)authorization;
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot sign requests to S3: install libcrypto (libssl-dev) and "
                      "build again");
}

#endif

/* ---- Lists ---- */

/* A part of an XML text. The parser relies on two properties of the lists: they contain no comments, and the
 * elements whose content is read have no nested elements of the same name. */
struct span {
    const char *begin, *end;
};

/* Finds the first element with this name inside `from`, and sets `*inside` to its content and `*after` to
 * what follows it. Returns false if there is none, or if it does not end. */
static bool find_element(struct span from, const char *name, struct span *inside, struct span *after)
{
    size_t length = strlen(name);
    for (const char *at = from.begin; (at = memchr(at, '<', (size_t)(from.end - at))); at++) {
        if ((size_t)(from.end - at) < length + 2 || memcmp(at + 1, name, length) != 0)
            continue;
        const char *end = memchr(at, '>', (size_t)(from.end - at));
        if (!end || !strchr(" />", at[1 + length]))
            continue;
        *after = (struct span){end + 1, from.end};
        *inside = (struct span){end + 1, end + 1};
        if (end[-1] == '/')
            return true;
        for (const char *close = end + 1; (close = memchr(close, '<', (size_t)(from.end - close))); close++)
            if ((size_t)(from.end - close) >= length + 3 && close[1] == '/' &&
                memcmp(close + 2, name, length) == 0 && close[2 + length] == '>') {
                inside->end = close;
                after->begin = close + length + 3;
                return true;
            }
        return false;
    }
    return false;
}

/* Writes a character of Unicode as UTF-8. Returns the number of bytes; 0 if the code is 0, a surrogate or
 * above U+10FFFF. */
static size_t put_character(unsigned long code, char *to)
{
    if (code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    size_t count = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = count; i-- > 1; code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)((count == 2 ? 0xc0 : count == 3 ? 0xe0 : 0xf0) | code);
    return count;
}

/* Decodes one entity after '&'. Returns the number of bytes written, 0 if it is not valid; moves `*at` to its
 * last character. */
static size_t put_entity(const char **at, const char *end, char *to)
{
    static const struct {
        const char *name;
        char value;
    } known[] = {{"amp;", '&'}, {"lt;", '<'}, {"gt;", '>'}, {"quot;", '"'}, {"apos;", '\''}};
    const char *from = *at + 1, *close = memchr(from, ';', (size_t)(end - from));
    if (!close || close - from > 10)
        return 0;
    *at = close;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(from, known[i].name, strlen(known[i].name)) == 0) {
            *to = known[i].value;
            return 1;
        }
    bool hex = from[0] == '#' && from[1] == 'x';
    return from[0] == '#' ? put_character(strtoul(from + 1 + hex, NULL, hex ? 16 : 10), to) : 0;
}

/* Copies the text of an element, with entities decoded. Returns false if it is too long or not text. */
static bool text_of(struct span from, const char *name, char *text, size_t size)
{
    struct span inside, after;
    size_t length = 0;
    *text = '\0';
    if (!find_element(from, name, &inside, &after))
        return false;
    for (const char *at = inside.begin; at < inside.end; at++) {
        size_t count = 1;
        if (length + 5 > size || *at == '<' || *at == '\0')
            return false;
        text[length] = *at;
        if (*at == '&' && (count = put_entity(&at, inside.end, text + length)) == 0)
            return false;
        length += count;
    }
    text[length] = '\0';
    return true;
}

/* The names of elements in the lists of the two services. */
struct dialect {
    const char *root, *object, *name, *bytes, *tag, *next;
};
static const struct dialect dialects[] = {
    {"ListBucketResult", "Contents", "Key", "Size", "ETag", "NextContinuationToken"},
    {"EnumerationResults", "Blob", "Name", "Content-Length", "Etag", "NextMarker"},
};

static enum status add_object(const struct dialect *dialect, struct span object,
                              enum status (*add)(void *context, const struct s3_object *object),
                              void *context)
{
    char name[S3_TOKEN_MAX], bytes[32], tag[S3_FIELD_MAX], *end;
    if (!text_of(object, dialect->name, name, sizeof name) || !*name)
        return status_set(STATUS_FAILED, "the list has an object without a name");
    bool sized = text_of(object, dialect->bytes, bytes, sizeof bytes) && *bytes >= '0' && *bytes <= '9';
    errno = 0;
    unsigned long long value = sized ? strtoull(bytes, &end, 10) : 0;
    if (!sized || *end || errno)
        return status_set(STATUS_FAILED, "the list has no valid size of '%s'", name);
    text_of(object, dialect->tag, tag, sizeof tag);
    return add(context, &(struct s3_object){name, value, tag});
}

enum status s3_list(const char *text, size_t size,
                    enum status (*add)(void *context, const struct s3_object *object), void *context,
                    char next[S3_TOKEN_MAX])
{
    struct span whole = {text, text + size}, root, rest, object;
    *next = '\0';
    for (size_t d = 0; d < sizeof dialects / sizeof *dialects; d++) {
        const struct dialect *dialect = &dialects[d];
        if (!find_element(whole, dialect->root, &root, &rest))
            continue;
        rest = root;
        while (find_element(rest, dialect->object, &object, &rest))
            TRY(add_object(dialect, object, add, context));
        text_of(rest, dialect->next, next, S3_TOKEN_MAX);
        if (!*next)
            text_of(root, dialect->next, next, S3_TOKEN_MAX); /* S3 may put the token before the objects */
        return STATUS_OK;
    }
    return status_set(STATUS_FAILED, "the answer is not a list of objects");
}
