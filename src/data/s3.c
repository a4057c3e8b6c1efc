#include "data/http.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef HAVE_CRYPTO
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif
#ifdef HAVE_EXPAT
#include <expat.h>
#endif

#include "core/file.h"
#include "core/text.h"

#define DIGEST_BYTES 32
#define HEX_BYTES    (2 * DIGEST_BYTES + 1)
#define LINE_MAX_    (2 * S3_TOKEN_MAX)
#define LIST_EXAMPLE "s3://BUCKET/PREFIX/shard-{000000..000099}.tar"

/* ---- Credentials ---- */

/* A setting of the environment or of a profile. */
struct setting {
    const char *variable, *name; /* in the environment, and in a profile */
    char *value;                 /* receives it; empty if it is not set */
    size_t room;
};

static enum status set_value(const struct setting *setting, const char *name, const char *value)
{
    if (strlen(value) >= setting->room)
        return status_set(STATUS_USAGE, "%s is longer than %zu characters", name, setting->room - 1);
    memcpy(setting->value, value, strlen(value) + 1);
    return STATUS_OK;
}

/* Settings of a profile that name another source of keys, which is not read. */
static const char *const other_sources[] = {
    "credential_process", "credential_source", "login_session",  "role_arn",
    "sso_session",        "sso_start_url",     "source_profile", "web_identity_token_file"};

/* Takes one line "NAME = VALUE" of a profile. Sets `*other`, if it is not NULL, to another source of keys. */
static enum status take_line(char *line, const struct setting *settings, size_t count, const char **other)
{
    char *equals = strchr(line, '=');
    if (!equals)
        return STATUS_OK;
    *equals = '\0';
    const char *name = trim(line), *value = trim(equals + 1);
    for (size_t i = 0; i < count; i++)
        if (strcmp(name, settings[i].name) == 0)
            return set_value(&settings[i], name, value);
    for (size_t i = 0; other && !*other && i < COUNT_OF(other_sources); i++)
        if (strcmp(name, other_sources[i]) == 0)
            *other = other_sources[i];
    return STATUS_OK;
}

/* Returns whether a section is the profile. ~/.aws/credentials has sections [NAME]; ~/.aws/config has
 * [default] and [profile NAME]. */
static bool is_profile(char *section, const char *profile, bool config)
{
    if (config && strncmp(section, "profile", 7) == 0 && (section[7] == ' ' || section[7] == '\t'))
        section = trim(section + 7);
    else if (config && strcmp(section, "default") != 0)
        return false;
    return strcmp(section, profile) == 0;
}

/* Reads the settings of the profile AWS_PROFILE from the file that `variable` names, by default ~/.aws/NAME.
 * Sets `*found` to true if the file has this profile. `other` is for take_line(). */
static enum status read_profile(const char *variable, const char *name, const struct setting *settings,
                                size_t count, bool *found, const char **other)
{
    const char *profile = getenv("AWS_PROFILE"), *home = getenv("HOME"), *path = getenv(variable);
    char line[LINE_MAX_], usual[PATH_MAX];
    bool inside = false;
    enum status status = STATUS_OK;
    snprintf(usual, sizeof usual, "%s/.aws/%s", home ? home : "", name);
    FILE *file = fopen(path ? path : usual, "re");
    if (!file)
        return STATUS_OK;
    setvbuf(file, NULL, _IONBF, 0); /* a buffer of stdio would keep a copy of the secret */
    while (status == STATUS_OK && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        char *text = trim(line), *end = strchr(text, ']');
        if (*text == '[' && end) {
            *end = '\0';
            inside = is_profile(trim(text + 1), profile ? profile : "default", strcmp(name, "config") == 0);
            *found |= inside;
        } else if (inside)
            status = take_line(text, settings, count, other);
    }
    explicit_bzero(line, sizeof line);
    fclose(file);
    return status_prefix(status, "%s", path ? path : usual);
}

/* Sets each setting to its variable, or to "". */
static enum status read_environment(const struct setting *settings, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *value = getenv(settings[i].variable);
        *settings[i].value = '\0';
        if (value)
            TRY(set_value(&settings[i], settings[i].variable, value));
    }
    return STATUS_OK;
}

enum status s3_find_credentials(struct s3_credentials *credentials)
{
    const struct setting settings[] = {
        {"AWS_ACCESS_KEY_ID", "aws_access_key_id", credentials->key, sizeof credentials->key},
        {"AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", credentials->secret, sizeof credentials->secret},
        {"AWS_SESSION_TOKEN", "aws_session_token", credentials->token, sizeof credentials->token},
    };
    const char *profile = getenv("AWS_PROFILE"), *other = NULL;
    bool found = false;
    TRY(read_environment(settings, 3));
    if (!*credentials->key) {
        TRY(read_profile("AWS_SHARED_CREDENTIALS_FILE", "credentials", settings, 3, &found, &other));
        if (!*credentials->key)
            TRY(read_profile("AWS_CONFIG_FILE", "config", settings, 3, &found, &other));
        if (!found && profile)
            return status_set(STATUS_USAGE,
                              "AWS_PROFILE: no profile '%s' in ~/.aws/credentials "
                              "(AWS_SHARED_CREDENTIALS_FILE) or ~/.aws/config (AWS_CONFIG_FILE)",
                              profile);
        if (!*credentials->key && other)
            return status_set(STATUS_USAGE,
                              "AWS_PROFILE: the profile '%s' takes its keys from %s, which is not read; set "
                              "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as 'aws configure "
                              "export-credentials --format env' prints them",
                              profile ? profile : "default", other);
    }
    if (*credentials->key && !*credentials->secret)
        return status_set(STATUS_USAGE, "an access key for S3 is set, but its secret is not; set "
                                        "AWS_SECRET_ACCESS_KEY");
    return STATUS_OK;
}

enum status s3_find_google_credentials(struct s3_credentials *credentials)
{
    const struct setting settings[] = {
        {"GS_ACCESS_KEY_ID", NULL, credentials->key, sizeof credentials->key},
        {"GS_SECRET_ACCESS_KEY", NULL, credentials->secret, sizeof credentials->secret},
    };
    *credentials->token = '\0';
    TRY(read_environment(settings, 2));
    return !*credentials->key == !*credentials->secret
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "of GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY, only %s is set; set both to "
                            "the parts of an HMAC key, or none",
                            *credentials->key ? "the first" : "the second");
}

/* Sets a setting to the first of two variables that is set, or to that of the profile. Sets `*origin` to
 * where an endpoint comes from. */
static enum status read_first(const struct setting settings[2], const char **origin)
{
    bool found = false;
    for (size_t i = 0; i < 2; i++) {
        *origin = settings[i].variable;
        TRY(read_environment(&settings[i], 1));
        if (*settings[i].value)
            return STATUS_OK;
    }
    *origin = "endpoint_url in the file AWS_CONFIG_FILE (~/.aws/config)";
    return read_profile("AWS_CONFIG_FILE", "config", settings, 1, &found, NULL);
}

enum status s3_find_endpoint(char endpoint[S3_FIELD_MAX], const char **origin)
{
    const struct setting settings[] = {{"AWS_ENDPOINT_URL_S3", "endpoint_url", endpoint, S3_FIELD_MAX},
                                       {"AWS_ENDPOINT_URL", "endpoint_url", endpoint, S3_FIELD_MAX}};
    return read_first(settings, origin);
}

enum status s3_find_google_endpoint(char endpoint[S3_FIELD_MAX], const char **origin)
{
    const struct setting setting = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", NULL, endpoint, S3_FIELD_MAX};
    *origin = setting.variable;
    TRY(read_environment(&setting, 1));
    return *endpoint ? STATUS_OK : set_value(&setting, setting.variable, "https://storage.googleapis.com");
}

enum status s3_find_region(char region[S3_FIELD_MAX])
{
    const struct setting settings[] = {{"AWS_REGION", "region", region, S3_FIELD_MAX},
                                       {"AWS_DEFAULT_REGION", "region", region, S3_FIELD_MAX}};
    const char *origin;
    TRY(read_first(settings, &origin));
    return *region ? STATUS_OK : set_value(settings, "region", "us-east-1");
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
    explicit_bzero(first, sizeof first);
    explicit_bzero(key, sizeof key);
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
    if (canonical)
        explicit_bzero(canonical, room); /* it contains the session token */
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

/* ---- Lists and errors ---- */

#ifdef HAVE_EXPAT

#define XML_PATH_MAX 128

/* The texts of an answer. */
struct texts {
    char name[S3_TOKEN_MAX], bytes[32], tag[S3_FIELD_MAX]; /* of the current object */
    char next[S3_TOKEN_MAX], truncated[8], encoding[8];    /* of the page */
    struct s3_error error;
};

/* The elements that are read. The first FIELDS_OF_OBJECT entries occur once per object, the others once. */
static const struct {
    const char *path;
    size_t offset, room;
} fields[] = {
#define TEXT(path, field)                                                     \
    {                                                                         \
        path, offsetof(struct texts, field), sizeof((struct texts *)0)->field \
    }
    TEXT("/ListBucketResult/Contents/Key", name),
    TEXT("/ListBucketResult/Contents/Size", bytes),
    TEXT("/ListBucketResult/Contents/ETag", tag),
    TEXT("/EnumerationResults/Blobs/Blob/Name", name),
    TEXT("/EnumerationResults/Blobs/Blob/Properties/Content-Length", bytes),
    TEXT("/EnumerationResults/Blobs/Blob/Properties/Etag", tag),
    TEXT("/ListBucketResult/NextContinuationToken", next),
    TEXT("/ListBucketResult/IsTruncated", truncated),
    TEXT("/ListBucketResult/EncodingType", encoding),
    TEXT("/EnumerationResults/NextMarker", next),
    TEXT("/Error/Code", error.code),
    TEXT("/Error/Message", error.message),
    TEXT("/Error/Region", error.region),
#undef TEXT
};
enum { FIELDS = sizeof fields / sizeof *fields, FIELDS_OF_OBJECT = 6, FIELD_NONE = FIELDS };

/* State while an answer is parsed. Too large for small stacks. */
struct reader {
    XML_Parser parser;
    enum status (*add)(void *context, const struct s3_object *object); /* NULL: read an error */
    void *context;
    enum status status;
    char path[XML_PATH_MAX]; /* names of the open elements, such as "/ListBucketResult/Contents" */
    int field;               /* the field whose text is read, or FIELD_NONE */
    size_t length;           /* of this text */
    unsigned seen;           /* a bit for each field that has occurred */
    struct texts texts;
};

static void stop(struct reader *reader, enum status status)
{
    reader->status = status;
    XML_StopParser(reader->parser, XML_FALSE);
}

static bool is_object(const struct reader *reader)
{
    return strcmp(reader->path, "/ListBucketResult/Contents") == 0 ||
           strcmp(reader->path, "/EnumerationResults/Blobs/Blob") == 0;
}

static void begin_element(void *context, const char *name, const char **attributes)
{
    struct reader *reader = context;
    const char *space = strrchr(name, '\n'), *local = space ? space + 1 : name; /* "NAMESPACE\nNAME" */
    size_t length = strlen(reader->path), size = strlen(local);
    if (reader->status != STATUS_OK)
        return;
    if (length == 0 && strcmp(local, "Error") != 0 &&
        (!reader->add ||
         (strcmp(local, "ListBucketResult") != 0 && strcmp(local, "EnumerationResults") != 0))) {
        stop(reader, status_set(STATUS_FAILED, "the answer is not a list of objects"));
        return;
    }
    if (reader->field != FIELD_NONE || length + 1 + size >= sizeof reader->path) {
        stop(reader, status_set(STATUS_FAILED, "the list has an unknown structure: %.40s in %s", local,
                                reader->path));
        return;
    }
    reader->path[length] = '/';
    memcpy(reader->path + length + 1, local, size + 1);
    /* If one of these were ignored in other places, shards could be missing. */
    if (reader->add && !is_object(reader) && (strcmp(local, "Contents") == 0 || strcmp(local, "Blob") == 0)) {
        stop(reader,
             status_set(STATUS_FAILED, "the list has an object in an unknown place, %s", reader->path));
        return;
    }
    if (is_object(reader)) {
        reader->seen &= ~((1u << FIELDS_OF_OBJECT) - 1);
        *reader->texts.name = *reader->texts.bytes = *reader->texts.tag = '\0';
    }
    for (int i = 0; i < FIELDS; i++)
        if (strcmp(reader->path, fields[i].path) == 0)
            reader->field = i;
    if (reader->field == FIELD_NONE)
        return;
    if (reader->seen & 1u << reader->field || attributes[0]) /* Azure's <Name Encoded="true"> is encoded */
        stop(reader, status_set(STATUS_FAILED, "the list has %s with an attribute, or twice", reader->path));
    reader->seen |= 1u << reader->field;
    reader->length = 0;
}

static void take_text(void *context, const char *text, int size)
{
    struct reader *reader = context;
    if (reader->status != STATUS_OK || reader->field == FIELD_NONE)
        return;
    size_t room = fields[reader->field].room - 1 - reader->length, count = (size_t)size;
    if (count > room && strncmp(reader->path, "/Error/", 7) != 0) {
        stop(reader, status_set(STATUS_FAILED, "the list has %s with more than %zu characters", reader->path,
                                fields[reader->field].room - 1));
        return;
    }
    count = count < room ? count : room;
    char *value = (char *)&reader->texts + fields[reader->field].offset;
    memcpy(value + reader->length, text, count);
    reader->length += count;
    value[reader->length] = '\0';
}

static enum status add_object(struct reader *reader)
{
    const struct texts *texts = &reader->texts;
    if (!*texts->name)
        return status_set(STATUS_FAILED, "the list has an object without a name");
    errno = 0;
    char *end = NULL;
    unsigned long long bytes =
        *texts->bytes >= '0' && *texts->bytes <= '9' ? strtoull(texts->bytes, &end, 10) : 0;
    if (!end || *end || errno)
        return status_set(STATUS_FAILED, "the list has no valid size of '%s'", texts->name);
    return reader->add(reader->context, &(struct s3_object){texts->name, bytes, texts->tag});
}

static void end_element(void *context, const char *name)
{
    struct reader *reader = context;
    (void)name;
    if (reader->status != STATUS_OK)
        return;
    if (reader->add && is_object(reader)) {
        enum status status = add_object(reader);
        if (status != STATUS_OK) {
            stop(reader, status);
            return;
        }
    }
    reader->field = FIELD_NONE;
    *strrchr(reader->path, '/') = '\0';
}

/* Refuses document types, whose entities can expand to any size. */
static void refuse_doctype(void *context, const char *name, const char *system, const char *public_,
                           int internal)
{
    (void)name, (void)system, (void)public_, (void)internal;
    stop(context, status_set(STATUS_FAILED, "the answer is not a list of objects (it has a document type)"));
}

static enum status parse(const char *text, size_t size, struct reader *reader)
{
    reader->field = FIELD_NONE;
    reader->parser = XML_ParserCreateNS(NULL, '\n');
    TRY(ALLOCATED(reader->parser && size <= INT_MAX, "out of memory for a list of objects"));
    XML_SetUserData(reader->parser, reader);
    XML_SetElementHandler(reader->parser, begin_element, end_element);
    XML_SetCharacterDataHandler(reader->parser, take_text);
    XML_SetStartDoctypeDeclHandler(reader->parser, refuse_doctype);
    enum XML_Status parsed = XML_Parse(reader->parser, text, (int)size, XML_TRUE);
    if (reader->status == STATUS_OK && parsed != XML_STATUS_OK)
        reader->status = status_set(
            STATUS_FAILED, "the list of objects is cut or damaged at offset %ld: %s; try again",
            (long)XML_GetCurrentByteIndex(reader->parser), XML_ErrorString(XML_GetErrorCode(reader->parser)));
    XML_ParserFree(reader->parser);
    return reader->status;
}

enum status s3_list(const char *text, size_t size,
                    enum status (*add)(void *context, const struct s3_object *object), void *context,
                    char next[S3_TOKEN_MAX])
{
    FREED struct reader *reader = calloc(1, sizeof *reader);
    *next = '\0';
    TRY(ALLOCATED(reader, "out of memory for a list"));
    reader->add = add;
    reader->context = context;
    TRY(parse(text, size, reader));
    const struct texts *texts = &reader->texts;
    if (*texts->error.code)
        return status_set(STATUS_FAILED, "the server answers with the error %s: %s", texts->error.code,
                          texts->error.message);
    if (*texts->encoding)
        return status_set(STATUS_FAILED,
                          "the list has encoded names (EncodingType %s), which were not requested",
                          texts->encoding);
    bool truncated = strcmp(texts->truncated, "true") == 0;
    if (*texts->truncated && !truncated && strcmp(texts->truncated, "false") != 0)
        return status_set(STATUS_FAILED, "the list has IsTruncated '%s' instead of true or false",
                          texts->truncated);
    if (truncated && !*texts->next)
        return status_set(
            STATUS_FAILED,
            "the list is incomplete, but has no NextContinuationToken: the server only has version 1 "
            "of S3's lists, which is not supported; name the shards, as in " LIST_EXAMPLE);
    memcpy(next, texts->next, sizeof texts->next);
    return STATUS_OK;
}

void s3_read_error(const char *text, size_t size, struct s3_error *error)
{
    FREED struct reader *reader = calloc(1, sizeof *reader);
    *error = (struct s3_error){0};
    if (!reader)
        return;
    (void)parse(text, size, reader); /* a damaged text may still have a code */
    *error = reader->texts.error;
}

#else

enum status s3_list(const char *text, size_t size,
                    enum status (*add)(void *context, const struct s3_object *object), void *context,
                    char next[S3_TOKEN_MAX])
{
    (void)text, (void)size, (void)add, (void)context;
    *next = '\0';
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot read lists of S3 and Azure: install expat (libexpat1-dev) and build "
                      "again, or name the shards, as in " LIST_EXAMPLE);
}

void s3_read_error(const char *text, size_t size, struct s3_error *error)
{
    (void)text, (void)size;
    *error = (struct s3_error){0};
}

#endif
