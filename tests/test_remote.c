/* Tests data sets at URLs: signatures, lists, transfers, the cache, and faults of servers.
 * tests/remote_server.py is the server. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "command.h"
#include "folder.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#ifdef HAVE_CURL
#include <curl/curl.h>
#endif
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/timer.h"
#include "data/http.h"
#include "data/remote.h"
#include "data/remote_cache.h"

/* ---- Signatures ---- */

#ifdef HAVE_CRYPTO
/* The examples of AWS's documentation, "Authenticating Requests: Using the Authorization Header". */
Test(remote, signatures_are_those_of_the_documentation)
{
    static const struct {
        const char *path, *query, *range, *names, *signature;
    } examples[] = {
        {"/test.txt", "", "bytes=0-9", "host;range;x-amz-content-sha256;x-amz-date",
         "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
        {"/", "lifecycle=", "", "host;x-amz-content-sha256;x-amz-date",
         "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
        {"/", "max-keys=2&prefix=J", "", "host;x-amz-content-sha256;x-amz-date",
         "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
    };
    const struct s3_credentials credentials = {"AKIAIOSFODNN7EXAMPLE",
                                               "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
    struct tm day = {.tm_year = 113, .tm_mon = 4, .tm_mday = 24};
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        char date[S3_DATE_MAX], found[S3_AUTHORIZATION_MAX], wanted[S3_AUTHORIZATION_MAX];
        const struct s3_request request = {
            .host = "examplebucket.s3.amazonaws.com",
            .path = examples[i].path,
            .query = examples[i].query,
            .range = examples[i].range,
            .region = "us-east-1",
            .payload = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            .time_s = timegm(&day)};
        cr_assert_eq(s3_sign(&request, &credentials, date, found), STATUS_OK, "%s", status_text());
        snprintf(wanted, sizeof wanted,
                 "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
                 "SignedHeaders=%s,Signature=%s",
                 examples[i].names, examples[i].signature);
        cr_expect_str_eq(found, wanted);
        cr_expect_str_eq(date, "20130524T000000Z");
    }
}
#endif

static char home[] = "/tmp/fdsl-remote-XXXXXX";

static void write_file(const char *name, const char *text)
{
    FILE *file = fopen(name, "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

Test(remote, credentials_come_from_the_environment_or_a_profile)
{
    struct s3_credentials found;
    enter_folder(home);
    setenv("AWS_SHARED_CREDENTIALS_FILE", "file", 1);
    cr_assert_eq(s3_find_credentials(&found), STATUS_OK);
    cr_expect_str_eq(found.key, "");
    write_file("file", "[other]\naws_access_key_id = A\n [ default ]\n; text\naws_access_key_id=B\r\n"
                       "aws_secret_access_key = C=\naws_session_token=D\n[last]\naws_access_key_id = E\n");
    cr_assert_eq(s3_find_credentials(&found), STATUS_OK);
    cr_expect(strcmp(found.key, "B") == 0 && strcmp(found.secret, "C=") == 0 &&
              strcmp(found.token, "D") == 0);
    setenv("AWS_PROFILE", "last", 1);
    cr_expect_eq(s3_find_credentials(&found), STATUS_USAGE);
    cr_expect(strstr(status_text(), "AWS_SECRET_ACCESS_KEY"), "%s", status_text());
    setenv("AWS_PROFILE", "none", 1);
    setenv("AWS_CONFIG_FILE", "config", 1);
    cr_expect_eq(s3_find_credentials(&found), STATUS_USAGE);
    cr_expect(strstr(status_text(), "no profile 'none'"), "%s", status_text());
    write_file("config", "[none]\naws_access_key_id = N\n[profile none]\naws_access_key_id = C\n"
                         "aws_secret_access_key = S\n");
    cr_assert_eq(s3_find_credentials(&found), STATUS_OK, "%s", status_text());
    cr_expect(strcmp(found.key, "C") == 0 && strcmp(found.secret, "S") == 0);
    /* Another source of keys is refused by its name, and does not matter if there are keys. */
    write_file("config", "[profile none]\nregion = eu-a\ncredential_process = /bin/print keys\n");
    cr_expect_eq(s3_find_credentials(&found), STATUS_USAGE);
    cr_expect(strstr(status_text(), "the profile 'none' takes its keys from credential_process") &&
                  !strstr(status_text(), "/bin/print"),
              "%s", status_text());
    write_file("file", "[none]\naws_access_key_id = C\naws_secret_access_key = S\n");
    cr_expect_eq(s3_find_credentials(&found), STATUS_OK, "%s", status_text());
    char text[S3_FIELD_MAX + 64];
    snprintf(text, sizeof text, "[none]\naws_access_key_id = %0*d\n", S3_FIELD_MAX, 0);
    write_file("file", text);
    cr_expect_eq(s3_find_credentials(&found), STATUS_USAGE);
    cr_expect(strstr(status_text(), "file: aws_access_key_id is longer than 255"), "%s", status_text());
    setenv("AWS_ACCESS_KEY_ID", "X", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "Y", 1);
    cr_assert_eq(s3_find_credentials(&found), STATUS_OK);
    cr_expect(strcmp(found.key, "X") == 0 && strcmp(found.secret, "Y") == 0 && !*found.token);
    leave_folder(home);
}

Test(remote, the_region_comes_from_the_environment_or_a_profile)
{
    static const struct {
        const char *profile, *region, *usual, *found;
    } cases[] = {
        {NULL, NULL, NULL, "eu-a"},         {"other", NULL, NULL, "eu-b"},
        {"plain", NULL, NULL, "us-east-1"}, {"none", NULL, NULL, "us-east-1"},
        {"other", NULL, "eu-c", "eu-c"},    {NULL, "eu-d", "eu-c", "eu-d"},
        {NULL, "", "eu-c", "eu-c"},
    };
    char region[S3_FIELD_MAX];
    enter_folder(home);
    setenv("AWS_CONFIG_FILE", "config", 1);
    unsetenv("AWS_REGION");
    unsetenv("AWS_DEFAULT_REGION");
    cr_assert_eq(s3_find_region(region), STATUS_OK);
    cr_expect_str_eq(region, "us-east-1"); /* no file */
    write_file("config", "[other]\nregion = wrong\n[default]\nregion=eu-a\n[profile other]\n region = eu-b\n"
                         "[plain]\nregion = wrong\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cases[i].profile ? setenv("AWS_PROFILE", cases[i].profile, 1) : unsetenv("AWS_PROFILE");
        cases[i].region ? setenv("AWS_REGION", cases[i].region, 1) : unsetenv("AWS_REGION");
        cases[i].usual ? setenv("AWS_DEFAULT_REGION", cases[i].usual, 1) : unsetenv("AWS_DEFAULT_REGION");
        cr_assert_eq(s3_find_region(region), STATUS_OK);
        cr_expect_str_eq(region, cases[i].found, "case %zu: %s", i, region);
    }
    setenv("HOME", ".", 1);
    unsetenv("AWS_CONFIG_FILE");
    unsetenv("AWS_REGION");
    unsetenv("AWS_DEFAULT_REGION");
    unsetenv("AWS_PROFILE");
    cr_assert(mkdir(".aws", 0755) == 0);
    write_file(".aws/config", "[default]\nregion=eu-e\n");
    cr_assert_eq(s3_find_region(region), STATUS_OK);
    cr_expect_str_eq(region, "eu-e");
    leave_folder(home);
}

/* The server: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile, that of AWS. */
Test(remote, the_server_comes_from_the_environment_or_a_profile)
{
    char endpoint[S3_FIELD_MAX];
    const char *origin;
    enter_folder(home);
    setenv("AWS_CONFIG_FILE", "config", 1);
    unsetenv("AWS_ENDPOINT_URL_S3");
    unsetenv("AWS_ENDPOINT_URL");
    unsetenv("AWS_PROFILE");
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "");
    write_file("config",
               "[default]\nregion = a\nendpoint_url = https://one\n[profile two]\nendpoint_url=https://two/\n"
               "[profile three]\nregion = b\n");
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "https://one");
    setenv("AWS_PROFILE", "two", 1);
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "https://two/");
    setenv("AWS_PROFILE", "three", 1);
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "");
    setenv("AWS_PROFILE", "two", 1);
    setenv("AWS_ENDPOINT_URL", "http://three", 1);
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect(strcmp(endpoint, "http://three") == 0 && strcmp(origin, "AWS_ENDPOINT_URL") == 0);
    setenv("AWS_ENDPOINT_URL_S3", "http://four", 1);
    cr_assert_eq(s3_find_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "http://four");
    unsetenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE");
    cr_assert_eq(s3_find_google_endpoint(endpoint, &origin), STATUS_OK);
    cr_expect_str_eq(endpoint, "https://storage.googleapis.com");
    struct s3_credentials found;
    setenv("AWS_ACCESS_KEY_ID", "A", 1); /* a key of AWS is not sent to Google */
    setenv("AWS_SECRET_ACCESS_KEY", "B", 1);
    unsetenv("GS_ACCESS_KEY_ID");
    unsetenv("GS_SECRET_ACCESS_KEY");
    cr_assert_eq(s3_find_google_credentials(&found), STATUS_OK);
    cr_expect(!*found.key && !*found.secret && !*found.token);
    setenv("GS_SECRET_ACCESS_KEY", "S", 1);
    cr_expect_eq(s3_find_google_credentials(&found), STATUS_USAGE);
    cr_expect(strstr(status_text(), "only the second is set"), "%s", status_text());
    leave_folder(home);
}

#if defined HAVE_CRYPTO && defined HAVE_CURL && defined HAVE_XXHASH && !defined __SANITIZE_ADDRESS__
/* Returns the number of places in writable memory, apart from `own`, that hold the secret whose inverted
 * bytes are in `inverse`. */
static int count_copies(const char *inverse, size_t size, const char *own)
{
    int copies = 0;
    char line[256];
    FILE *maps = fopen("/proc/self/maps", "re");
    const int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    cr_assert(maps && memory >= 0);
    static char bytes[1 << 20];
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        char mode[5];
        if (sscanf(line, "%lx-%lx %4s", &begin, &end, mode) != 3 || mode[1] != 'w')
            continue;
        while (begin < end) {
            const size_t part = end - begin < sizeof bytes ? end - begin : sizeof bytes;
            const ssize_t count = pread(memory, bytes, part, (off_t)begin);
            for (ssize_t i = 0; i + (ssize_t)size <= count; i++) {
                size_t same = 0;
                const char *at = (const char *)begin + i;
                while (same < size && bytes[i + (ssize_t)same] == (char)~inverse[same])
                    same++;
                copies += same == size && at != own && !(at >= bytes && at < bytes + sizeof bytes);
            }
            if (count < (ssize_t)part || end - begin <= sizeof bytes)
                break;
            begin += sizeof bytes - size; /* the secret may cross the border of two parts */
        }
    }
    explicit_bzero(bytes, sizeof bytes);
    fclose(maps);
    close(memory);
    return copies;
}

/* After a data set is closed, neither the heap nor the stack has a copy of the secret key. */
Test(remote, secrets_are_erased)
{
    enum { SIZE = 40 };
    char inverse[SIZE];
    enter_folder(home);
    static char secret[SIZE + 1], text[256];
    for (int i = 0; i < SIZE; i++)
        secret[i] = (char)('A' + rand() % 26);
    for (int i = 0; i < SIZE; i++)
        inverse[i] = (char)~secret[i];
    cr_expect_eq(count_copies(inverse, SIZE, NULL), 1, "the search finds the secret itself");
    const int length = snprintf(text, sizeof text,
                                "[default]\naws_access_key_id=A\naws_secret_access_key=%s\n"
                                "aws_session_token = %s\n",
                                secret, secret);
    const int fd = open("file", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert(write(fd, text, (size_t)length) == length && close(fd) == 0);
    explicit_bzero(secret, sizeof secret);
    explicit_bzero(text, sizeof text);
    cr_assert_eq(count_copies(inverse, SIZE, NULL), 0);
    setenv("AWS_SHARED_CREDENTIALS_FILE", "file", 1);
    setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1", 1);
    struct remote *remote;
    struct s3_credentials credentials;
    cr_assert_eq(s3_find_credentials(&credentials), STATUS_OK, "%s", status_text());
    cr_expect_eq(count_copies(inverse, SIZE, credentials.secret), 1, "only the session token remains");
    char date[S3_DATE_MAX], authorization[S3_AUTHORIZATION_MAX];
    const struct s3_request request = {"host", "/", "", "", "region", "UNSIGNED-PAYLOAD", 0};
    cr_assert_eq(s3_sign(&request, &credentials, date, authorization), STATUS_OK);
    cr_expect_eq(count_copies(inverse, SIZE, credentials.secret), 1, "only the session token remains");
    explicit_bzero(&credentials, sizeof credentials);
    cr_expect_eq(remote_open("s3://bucket/a.tar", NULL, &remote), STATUS_FAILED);
    cr_expect(strstr(status_text(), "connect"), "%s", status_text());
    cr_expect_eq(count_copies(inverse, SIZE, NULL), 0);
    leave_folder(home);
}
#endif

/* ---- Lists ---- */

#ifdef HAVE_EXPAT
static enum status note(void *context, const struct s3_object *object)
{
    char *text = context;
    sprintf(text + strlen(text), "%s %llu %s;", object->name, (unsigned long long)object->bytes, object->tag);
    return STATUS_OK;
}

Test(remote, lists_are_read_or_refused)
{
    static const struct {
        const char *text, *objects, *next;
    } lists[] = {
        {"<?xml version=\"1.0\"?><ListBucketResult "
         "xmlns=\"http://x\"><NextContinuationToken>a&amp;b</NextContinuationToken>"
         "<Contents><Key>k&lt;1&gt;&#x41;&#66;&quot;&apos;</Key><ETag>&quot;e&quot;</ETag><Size>12</Size></"
         "Contents>"
         "<Contents><Key>z</Key><Size>0</Size><Owner><ID>1</ID></Owner></Contents></ListBucketResult>",
         "k<1>AB\"' 12 \"e\";z 0 ;", "a&b"},
        {"<ListBucketResult/>", "", ""},
        {"<?xml version='1.0' encoding='ISO-8859-1'?><a:ListBucketResult xmlns:a='u'><!-- <Contents> -->"
         "<a:Contents><a:Size>3</a:Size><a:Key>\xe9<![CDATA[<&]]></a:Key><b/></a:Contents>"
         "<a:IsTruncated>false</a:IsTruncated></a:ListBucketResult>",
         "\xc3\xa9<& 3 ;", ""},
        {"<EnumerationResults "
         "a=\"b\"><Blobs><Blob><Name>n</Name><Properties><Content-Length>7</Content-Length>"
         "<Etag>t</Etag></Properties></Blob></Blobs><NextMarker /></EnumerationResults>",
         "n 7 t;", ""},
        {"<Error><Code>x</Code></Error>", NULL, NULL},
        {"", NULL, NULL},
        {"<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>-1</Size></Contents></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>99999999999999999999</Size></Contents></"
         "ListBucketResult>",
         NULL, NULL},
        {"<ListBucketResult><Contents><Key>a&nbsp;</Key><Size>1</Size></Contents></ListBucketResult>", NULL,
         NULL},
        {"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><IsTruncated>maybe</IsTruncated></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><EncodingType>url</EncodingType></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Key>b</Key><Size>1</Size></Contents></ListBucketResult>",
         NULL, NULL},
        {"<ListBucketResult><Contents><Key>a<b/></Key><Size>1</Size></Contents></ListBucketResult>", NULL,
         NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>1</Size></ListBucketResult>", NULL, NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>1</Size></Contents>", NULL, NULL},
        {"<ListBucketResult></ListBucketResult><ListBucketResult/>", NULL, NULL},
        {"<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult/>", NULL, NULL},
        {"<EnumerationResults><Blobs><Blob><Name Encoded='true'>n</Name><Properties><Content-Length>7"
         "</Content-Length></Properties></Blob></Blobs></EnumerationResults>",
         NULL, NULL},
        {"<ListBucketResult><X><Contents><Key>a</Key><Size>1</Size></Contents></X></ListBucketResult>", NULL,
         NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>1</Size><Contents><Key>b</Key><Size>1</Size>"
         "</Contents></Contents></ListBucketResult>",
         NULL, NULL},
        {"<EnumerationResults><Blob><Name>n</Name><Properties><Content-Length>7</Content-Length></Properties>"
         "</Blob></EnumerationResults>",
         NULL, NULL},
        {"<ListBucketResult><Contents><Key>a</Key><Size>1</Size></Contents></ListBucketResult>", "a 1 ;",
         ""}, /* no IsTruncated */
        {"<ListBucketResult><Contents><Key>&#0;</Key><Size>1</Size></Contents></ListBucketResult>", NULL,
         NULL},
    };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        char objects[256] = "", next[S3_TOKEN_MAX];
        enum status found = s3_list(lists[i].text, strlen(lists[i].text), note, objects, next);
        cr_expect_eq(found, lists[i].objects ? STATUS_OK : STATUS_FAILED, "%s: %d", lists[i].text, found);
        if (lists[i].objects) {
            cr_expect_str_eq(objects, lists[i].objects);
            cr_expect_str_eq(next, lists[i].next);
        }
    }
}

static enum status print(void *context, const struct s3_object *object)
{
    fprintf(context, "%s %llu %s\n", object->name, (unsigned long long)object->bytes, object->tag);
    return STATUS_OK;
}

/* Python's XML parser finds the same objects and tokens in valid and in mutated lists, and refuses the same
 * lists. */
Test(remote, lists_are_read_as_by_python, .timeout = 60)
{
    enum { COUNT = 3000 };
    size_t page_bytes, wanted_bytes, found_bytes;
    int refused = 0;
    if (shell("python3 -c 'import xml.etree.ElementTree'") != 0)
        cr_skip_test("python3 is not installed");
    for (int seed = 1; seed <= 2; seed++) {
        char command[64];
        snprintf(command, sizeof command, "tests/s3_lists.py %d %d", COUNT, seed);
        FILE *stream = popen(command, "re");
        cr_assert_not_null(stream);
        for (int i = 0; i < COUNT; i++) {
            char next[S3_TOKEN_MAX], *found = NULL;
            cr_assert(fscanf(stream, "%zu %zu%*1[\n]", &page_bytes, &wanted_bytes) == 2, "seed %d: page %d",
                      seed, i);
            char *page = malloc(page_bytes + 1), *wanted = calloc(1, wanted_bytes + 1);
            cr_assert(fread(page, 1, page_bytes, stream) == page_bytes &&
                      fread(wanted, 1, wanted_bytes, stream) == wanted_bytes);
            page[page_bytes] = '\0';
            FILE *text = open_memstream(&found, &found_bytes);
            const bool fails = s3_list(page, page_bytes, print, text, next) != STATUS_OK;
            fprintf(text, "%s\n", next);
            fclose(text);
            cr_expect_str_eq(fails ? "REFUSED" : found, wanted, "seed %d: %s\n%s", seed, page, status_text());
            refused += fails;
            free(page);
            free(wanted);
            free(found);
        }
        cr_assert_eq(pclose(stream), 0);
    }
    cr_expect(refused > COUNT / 2 && refused < 2 * COUNT - COUNT / 2, "%d refused", refused);
}

/* Fields have limits. Texts that are too long are refused, and never cut. */
Test(remote, long_fields_of_lists_are_refused)
{
    static const struct {
        const char *before, *after;
        size_t most;
    } fields[] = {{"<Contents><Size>1</Size><Key>", "</Key></Contents>", S3_TOKEN_MAX - 1},
                  {"<Contents><Key>a</Key><Size>1</Size><ETag>", "</ETag></Contents>", S3_FIELD_MAX - 1},
                  {"<NextContinuationToken>", "</NextContinuationToken>", S3_TOKEN_MAX - 1}};
    static char objects[2 * S3_TOKEN_MAX], text[2 * S3_TOKEN_MAX], long_[S3_TOKEN_MAX + 1];
    memset(long_, 'x', sizeof long_);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (size_t length = fields[i].most; length <= fields[i].most + 1; length++) {
            char next[S3_TOKEN_MAX];
            *objects = '\0';
            snprintf(text, sizeof text, "<ListBucketResult>%s%.*s%s</ListBucketResult>", fields[i].before,
                     (int)length, long_, fields[i].after);
            cr_expect_eq(s3_list(text, strlen(text), note, objects, next),
                         length > fields[i].most ? STATUS_FAILED : STATUS_OK, "%zu: %zu", i, length);
            if (length == fields[i].most)
                cr_expect_geq(strlen(objects) + strlen(next), length);
        }
}

/* An element whose path does not fit would overwrite the memory after it. */
Test(remote, deep_and_long_elements_of_lists_are_refused)
{
    enum { PATH_LENGTH = 127 }; /* characters in the names of the open elements, each after a slash */
    char text[1024], name[256], objects[256], next[S3_TOKEN_MAX];
    memset(name, 'x', sizeof name);
    for (int length = 1; length < 200; length++)
        for (int deep = 0; deep < 2; deep++) {
            const char *outer = deep ? "<a><b>" : "", *close = deep ? "</b></a>" : "";
            *objects = '\0';
            snprintf(text, sizeof text,
                     "<ListBucketResult>%s<%.*s>text</%.*s>%s<Contents><Key>k</Key><Size>1</Size></Contents>"
                     "</ListBucketResult>",
                     outer, length, name, length, name, close);
            bool fits =
                strlen("/ListBucketResult/") + (deep ? strlen("a/b/") : 0) + (size_t)length <= PATH_LENGTH;
            cr_expect_eq(s3_list(text, strlen(text), note, objects, next), fits ? STATUS_OK : STATUS_FAILED,
                         "%d: %d: %s", deep, length, status_text());
            cr_expect_eq(*objects != '\0', fits, "%d: %d", deep, length);
        }
}

/* The time to parse a page grows with its size only: 16 MiB of unclosed elements took minutes once. */
Test(remote, hostile_lists_end_soon, .timeout = 20)
{
    enum { BYTES = 16 << 20 };
    static const char *const parts[] = {"<Contents", "<Contents>", "<Contents><Key>",
                                        "&amp;",     "<!--",       "<a b=''/>"};
    char *text = malloc(BYTES), next[S3_TOKEN_MAX];
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        size_t length = (size_t)sprintf(text, "<ListBucketResult>");
        while (length + strlen(parts[i]) < BYTES)
            length += (size_t)(stpcpy(text + length, parts[i]) - (text + length));
        cr_expect_eq(s3_list(text, length, note, next, next), STATUS_FAILED);
    }
    free(text);
}
#endif

Test(remote, secrets_of_a_url_are_not_shown)
{
    char shown[64];
    remote_shown("https://a/b?sv=1&sig=secret", shown, sizeof shown);
    cr_expect_str_eq(shown, "https://a/b?...");
    remote_shown("https://me:secret@a/b@c?sv=1&sig=secret", shown, sizeof shown);
    cr_expect_str_eq(shown, "https://...@a/b@c?...");
    remote_shown("s3://a/b/", shown, sizeof shown);
    cr_expect_str_eq(shown, "s3://a/b/");
}

#if defined HAVE_CURL && defined HAVE_XXHASH
/* ---- A server ---- */

static char program[PATH_MAX];
static FILE *server;
static pid_t server_pid;

/* True if openssl could create a certificate for the server. */
static bool has_certificate;

/* What all tests begin with: the folder files/, and a certificate if openssl can create one. */
static char template[] = "/tmp/fdsl-remote-files-XXXXXX";

/* Four data sets are in files/: set/ has an index, plain/ and "a=1% b"/ have only tars, and one/ has a single
 * file per sample. */
ReportHook(PRE_ALL)(struct criterion_test_set *tests)
{
    (void)tests;
    find_program(program);
    cr_assert_not_null(mkdtemp(template));
    setenv("TEMPLATE", template, 1); /* each test is a process of its own */
    setenv("P", program, 1);
    SHELL(0,
          "cd %s && $P --prepare files/set --store shards --shards 5 --samples 200 --sample-shape "
          "3,40,40 --dtype u8 --classes 0 && "
          "mkdir -p files/plain 'files/a=1%% b' && cp files/set/*.tar files/plain && "
          "cp files/set/*.tar 'files/a=1%% b' && : > files/empty.tar && "
          "$P --prepare files/one --store files --samples 3",
          template);
    shell("cd %s && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "
          "key.pem -out certificate.pem -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1",
          template);
}

ReportHook(POST_ALL)(struct criterion_global_stats *stats)
{
    (void)stats;
    shell("rm -rf %s", template);
}

/* Starts a server that serves the folder files/. The shell variable $U is its URL, and $T its URL with TLS.
 */
static void start_server(void)
{
    char script[PATH_MAX], ports[32], url[64];
    int port = 0, tls_port = 0;
    cr_assert_not_null(realpath("tests/remote_server.py", script));
    enter_folder(home);
    find_program(program);
    SHELL(0, "cp -r $TEMPLATE/. .");
    has_certificate = access("certificate.pem", F_OK) == 0;
    int to[2], from[2];
    cr_assert(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    server_pid = fork();
    if (server_pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execlp("python3", "python3", script, "files", has_certificate ? "certificate.pem" : NULL, "key.pem",
               NULL);
        _exit(127);
    }
    server = fdopen(from[0], "r");
    close(from[1]);
    cr_assert(fgets(ports, sizeof ports, server), "the server does not start");
    cr_assert_eq(sscanf(ports, "%d %d", &port, &tls_port), has_certificate ? 2 : 1, "%s", ports);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", port);
    setenv("U", url, 1);
    snprintf(url, sizeof url, "https://127.0.0.1:%d", tls_port);
    setenv("T", url, 1);
    setenv("no_proxy", "127.0.0.1,localhost", 1);
    setenv("N", "--variant shards --verify --loops 1 --warmups 0 --warmup-time 0 --format csv", 1);
    setenv("M", "--verify --loops 1 --warmups 0 --warmup-time 0 --format csv", 1);
}

static void stop_server(void)
{
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
    fclose(server);
    leave_folder(home);
}

TestSuite(servers, .init = start_server, .fini = stop_server, .timeout = 120);

static void set_credentials(void)
{
    setenv("AWS_ENDPOINT_URL", getenv("U"), 1);
    setenv("AWS_REGION", "eu-test-1", 1);
    setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "s/ecret+", 1);
    setenv("AWS_SESSION_TOKEN", "session/token=", 1);
    setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", getenv("U"), 1);
    setenv("GS_ACCESS_KEY_ID", "GOOGTEST", 1);
    setenv("GS_SECRET_ACCESS_KEY", "+terce/s", 1);
}

/* The checksum of a run over a URL must be that of the local data set. */
static void expect_same(const char *urls[], size_t count)
{
    char local[64];
    SHELL(0, "$P $N --data files/plain 2>/dev/null | sed -n 's/.*,\\([0-9a-f]\\{16\\}\\),.*/\\1/p'");
    snprintf(local, sizeof local, "%.16s", out);
    cr_assert_eq(strlen(local), 16, "%s", out);
    for (size_t i = 0; i < count; i++) {
        cr_expect_eq(shell("$P $N --data \"%s\"", urls[i]), 0, "%s: %s", urls[i], out);
        cr_expect(says(local) && says(",any,"), "%s: %s is not in %s", urls[i], local, out);
    }
}

/* Adds a secret to a request. */
static enum status add_secret(const struct http_request *request, const char *range,
                              char *headers[HTTP_HEADERS_MAX])
{
    (void)request, (void)range;
    headers[0] = strdup("Authorization: secret");
    return STATUS_OK;
}

Test(servers, a_set_is_read_from_every_service)
{
    const char *urls[] = {"$U/web/set/counter.index",
                          "$U/web/set/counter.wids.json",
                          "$U/web/plain/counter-{000000..000004}.tar",
                          "$U/norange/plain/counter-{000000,000001,000002,000003,000004}.tar",
                          "$U/web/plain/counter-{000000..000004}.tar?sig=x&st=y", /* not Azure's */
                          "$U/web/b c/counter-{000000..000004}.tar",
                          "$U/account/box/plain/?sv=1&sig=se%2Bcret%2F",
                          "$U/account/box/plain/counter-{000000..000004}.tar?sv=1&sig=se%2Bcret%2F",
                          "$U/account/box/a=1%25%20b/?sv=1&sig=se%2Bcret%2F",
                          "$U/account/box/a%3D1%25%20b/counter%2D{000000..000004}.tar?sv=1&sig=se%2Bcret%2F",
#ifdef HAVE_CRYPTO
                          "s3://bucket/plain/",
                          "s3://bucket/set",
                          "s3://bucket/plain/counter-{000000..000004}.tar",
                          "s3://bucket/a=1% b/",
                          "s3://bucket/a=1% b/counter-{000000..000004}.tar",
                          "gs://bucket/plain/",
                          "gs://bucket/set",
                          "gs://bucket/a=1% b/counter-{000000..000004}.tar",
#endif
                          "file://$PWD/files/plain"};
    set_credentials();
    SHELL(0, "cp -r files/plain 'files/b%%20c'");
    expect_same(urls, sizeof urls / sizeof *urls - 1);
    SHELL(0, "$P $N --data \"%s\"", urls[sizeof urls / sizeof *urls - 1]);
    cr_expect_eq(shell("$P $N --data file://$PWD/files/set"), 0, "a folder with an index: %s", out);
}

/* A prefix names all shards below it. An index directly under the prefix is the index of the set. An index in
 * a subfolder is not, because it names shards relative to that folder. */
Test(servers, all_shards_below_a_prefix_are_read)
{
    const char *urls[] = {"$U/account/box/deep/?sv=1&sig=se%2Bcret%2F",
                          "$U/account/box/set/?sv=1&sig=se%2Bcret%2F",
#ifdef HAVE_CRYPTO
                          "s3://bucket/deep/", "s3://bucket/set/"
#endif
    };
    set_credentials();
    cr_assert_eq(
        shell("cd files && mkdir -p deep/a/b deep/c deep/.d deep/c/.e set/old && cp plain/*0.tar deep/a/b && "
              "cp plain/*[12].tar deep/c && cp plain/*[34].tar deep && cp set/counter.index deep/c && "
              "cp plain/*0.tar deep/.d && cp plain/*0.tar deep/c/.e && cp plain/*0.tar deep/c/f.txt && "
              "cp plain/*0.tar set/old"),
        0, "%s", out);
    expect_same(urls, sizeof urls / sizeof *urls);
}

#ifdef HAVE_CRYPTO
/* In URLs of S3, %3F and %25 stand for a question mark and a percent sign; everything else is taken as it is.
 */
Test(servers, keys_of_s3_may_have_question_marks)
{
    const char *urls[] = {"s3://bucket/w%3Fy/", "s3://bucket/w%3fy/%3F-{0..4}.tar", "s3://bucket/%253F%20/"};
    set_credentials();
    cr_assert_eq(shell("cd files && mkdir 'w?y' '%%3F%%20' && cp plain/*.tar '%%3F%%20' && "
                       "for i in 0 1 2 3 4; do cp plain/*$i.tar \"w?y/?-$i.tar\"; done"),
                 0, "%s", out);
    expect_same(urls, sizeof urls / sizeof *urls);
    cr_expect_eq(shell("$P $N --data \"s3://bucket/w?y/\""), 2, "%s", out);
    cr_expect(says("write %3F for a question mark in a name"), "%s", out);
}
#endif

/* Writes the wids index NAME, in which `place` precedes the name of each shard. */
static void write_wids(const char *name, const char *place)
{
    SHELL(0, "mkdir -p idx files/idx && sed \"s|\\\"url\\\": \\\"|&%s|\" files/set/counter.wids.json >%s",
          place, name);
}

/* An index on this machine may name shards at a URL, and an index at a URL shards on the same server. */
Test(servers, a_wids_index_names_shards_at_urls)
{
    const char *local[] = {"idx"};
    set_credentials();
    write_wids("idx/x.wids.json", "$U/web/plain/");
    expect_same(local, 1);
    SHELL(0,
          "$P $M --variant shards,shards-mmap,shards-omp --data idx --cache-dir cache && ls cache | wc -l");
    cr_expect(says("\n5\n") || says("\n6\n"), "%s", out);
    SHELL(
        0,
        "$P --prepare copy --from dataset --source idx --store shards && cat copy/*.tar | md5sum && "
        "$P --prepare copy2 --from dataset --source files/plain --store shards && cat copy2/*.tar | md5sum");
    write_wids("idx/x.wids.json", "$U/account/box/plain/");
    SHELL(0, "sed -i 's|tar\"|tar?sv=1\\&sig=se%%2Bcret%%2F\"|' idx/x.wids.json");
    expect_same(local, 1);
    SHELL(0, "sed -i '0,/sig=/s//sig=other/' idx/x.wids.json");
    shell("$P $N --data idx");
    expect_line(1, "has another query than the first shard");
    cr_expect(!says("cret"), "%s", out);
#ifdef HAVE_CRYPTO
    write_wids("idx/x.wids.json", "s3://bucket/plain/");
    expect_same(local, 1);
#endif
    write_wids("files/idx/x.wids.json", "$U/web/plain/");
    const char *remote[] = {"$U/web/idx/x.wids.json"};
    expect_same(remote, 1);
    write_wids("files/idx/x.wids.json", "$U/account/box/plain/");
    const char *azure[] = {"$U/account/box/idx/?sv=1&sig=se%2Bcret%2F"};
    expect_same(azure, 1);
}

/* An index at a URL must not make this program read local files, or connect to other servers. */
Test(servers, a_wids_index_at_a_url_stays_on_its_server)
{
    static const struct {
        const char *place, *words;
    } cases[] = {{"http://localhost:1/web/plain/", "is on another server than the index"},
                 {"$T/web/plain/", "is on another server than the index"},
                 {"s3://bucket/plain/", "is on another server than the index"},
                 {"$PWD/files/plain/", "is outside the folder of the index, which is at a URL"},
                 {"file://$PWD/files/plain/", "is outside the folder of the index, which is at a URL"},
                 {"file:$PWD/files/plain/", "is outside the folder of the index, which is at a URL"},
                 {"../plain/", "is outside the folder of the index, which is at a URL"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_wids("files/idx/x.wids.json", cases[i].place);
        shell("$P $N --data $U/web/idx/x.wids.json");
        expect_line(1, cases[i].words);
    }
    write_wids("idx/x.wids.json", "http://127.0.0.1:1/");
    shell("$P $N --data idx");
    expect_line(1, "Couldn't connect to server");
}

Test(servers, pointers_of_git_lfs_are_named)
{
    SHELL(0, "printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:1\\nsize 1\\n' >files/p.tar && "
             "cp files/p.tar files/p.wids.json && cp files/p.tar files/set/counter-000003.tar");
    const char *urls[] = {"$U/web/p.tar", "$U/web/p.wids.json", "$U/web/set/counter.index"};
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        shell("$P $N --data %s", urls[i]);
        expect_line(1, "a Git LFS pointer, not the file itself: run `git lfs pull`");
    }
}

Test(servers, certificates_are_checked)
{
    if (!has_certificate)
        cr_skip_test("openssl is not installed");
    const char *urls[] = {"$T/web/set/counter.index", "$T/web/plain/counter-{000000..000004}.tar"};
    shell("$P $N --data $T/web/set/counter.index");
    expect_line(1, "the certificate is not trusted");
    expect(1, "SSL_CERT_FILE names a file of further authorities");
    setenv("SSL_CERT_FILE", "certificate.pem", 1);
    expect_same(urls, 2);
    shell("$P $N --data $(echo $T | sed s/127.0.0.1/localhost/)/web/set/counter.index"); /* not in the
                                                                                            certificate */
    expect_line(1, "the certificate is not trusted");
    shell("$P $N --data $T/plainly/plain/counter-000000.tar");
    expect_line(1, "refused to follow a redirection to another protocol");
    setenv("SSL_CERT_FILE", "key.pem", 1);
    shell("$P $N --data $T/web/set/counter.index");
    expect_line(1, "certificate");
    setenv("SSL_CERT_FILE", "missing.pem", 1);
    shell("$P $N --data $T/web/set/counter.index");
    expect_line(1, "missing.pem");
    unsetenv("SSL_CERT_FILE");
}

Test(servers, variants_for_shards_read_urls)
{
    SHELL(0, "$P $M --variant shards,shards-mmap,shards-omp --iodepth 3 --epochs 2 --data "
             "$U/web/plain/counter-{000000..000004}.tar");
}

Test(servers, one_broken_request_in_ten_loses_nothing)
{
    const char *urls[] = {"$U/faulty/plain/counter-{000000..000004}.tar"};
    for (int i = 0; i < 3; i++)
        expect_same(urls, 1);
}

/* The first request of a data set is repeated once, so that a wrong address fails soon. */
Test(servers, the_first_request_is_tried_twice)
{
    SHELL(0, "$P $N --data $U/once/plain/counter-000000.tar");
    SHELL_PRINTS(1, "tried 2 times: ", "$P $N --data $U/busy/plain/counter-000000.tar");
#if defined HAVE_CRYPTO && defined HAVE_EXPAT
    set_credentials();
    SHELL(0, "mkdir files/twice && cp files/plain/*0.tar files/twice && $P $N --data s3://oncebucket/twice/");
#endif
}

/* Starts a process that answers connections with `greeting`. Sets $G to its address. */
static pid_t greet(const char *greeting)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    char text[64];
    const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert(bind(to, (struct sockaddr *)&address, size) == 0 && listen(to, 9) == 0 &&
              getsockname(to, (struct sockaddr *)&address, &size) == 0);
    snprintf(text, sizeof text, "127.0.0.1:%d", ntohs(address.sin_port));
    setenv("G", text, 1);
    const pid_t pid = fork();
    for (int fd; pid == 0 && (fd = accept(to, NULL, NULL)) >= 0; close(fd))
        if (write(fd, greeting, strlen(greeting)) < 0 || usleep(100000) != 0)
            _exit(1);
    close(to);
    return pid;
}

Test(servers, ports_that_do_not_speak_http_are_reported)
{
    static const char *const greetings[] = {"SSH-2.0-OpenSSH_9.2\r\n", "\x15\x03\x01\x00\x02\x02\x46",
                                            "+OK\r\n"};
    for (size_t i = 0; i < sizeof greetings / sizeof *greetings; i++) {
        const pid_t pid = greet(greetings[i]);
        shell("$P $N --data http://$G/a.tar");
        expect_line(1, "the server does not speak HTTP on this port");
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
}

/* Nothing of a request may be part of the next request on the same connection, nor of one to another host. */
Test(servers, requests_share_nothing)
{
    struct http *http;
    struct http_reply reply;
    char url[128], body[4096];
    const struct http_request plain = {.url = url,
                                       .shown = "x",
                                       .whole = true,
                                       .redirects = true,
                                       .wanted = sizeof body - 1,
                                       .to = (uint8_t *)body};
    cr_assert_eq(http_open(&http), STATUS_OK);
    for (int i = 0; i < 6; i++) {
        struct http_request request = plain;
        const struct http_version version = {.bytes = HTTP_UNKNOWN, .tag = "\"a\""};
        memset(body, 0, sizeof body);
        snprintf(url, sizeof url, "%s/%s", getenv("U"),
                 i == 2   ? "away"
                 : i == 4 ? "error-AccessDenied"
                          : "echo");
        if (i == 0 || i == 2) {
            request.sign = add_secret;
            request.version = &version;
        }
        request.explained = i >= 4;
        if (i == 5)
            snprintf(url, sizeof url, "%s/web/none", getenv("U"));
        const enum status got = http_get(http, &request, 1, &reply);
        cr_expect_eq(got, i < 4 ? STATUS_OK : STATUS_FAILED, "%d: %s", i, status_text());
        cr_expect_eq(strstr(body, "secret") != NULL, i == 0, "%d: %s", i, body);
        cr_expect_eq(strstr(body, "If-Match") != NULL, i == 0 || i == 2, "%d: %s", i, body);
        cr_expect(!strstr(body, "Range"), "%d: %s", i, body);
        if (i == 1) { /* this request has a range */
            request.whole = false;
            (void)http_get(http, &request, 1, &reply);
        }
        if (i == 4)
            cr_expect(strstr(status_text(), "(403 AccessDenied: Access Denied)"), "%s", status_text());
        if (i == 5)
            cr_expect(strstr(status_text(), "(404)"), "%s", status_text());
    }
    http_close(http);
}

Test(servers, connections_need_open_files)
{
    SHELL(1, "ulimit -n 60; $P $M --variant shards --iodepth 16 --data $U/web/set/counter.index");
    cr_expect(strstr(out, "ulimit -n 80") && strstr(out, "--iodepth"), "%s", out);
}

/* A file without a version is read with one request, because parts of several requests may differ. */
Test(servers, versions_are_never_mixed)
{
    struct remote *remote;
    char url[128], *text;
    size_t size;
    snprintf(url, sizeof url, "%s/turning/x.bin", getenv("U"));
    cr_assert_eq(remote_open(url, NULL, &remote), STATUS_OK, "%s", status_text());
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(remote_text(remote, "x.bin", 1 << 22, &text, &size), STATUS_OK, "%s", status_text());
        cr_expect(size == 3000000 && memcmp(text, text + 1, size - 1) == 0);
        free(text);
    }
    remote_close(remote);
}

/* Bytes of two versions are never mixed, even if answers to later requests have no version, or the same weak
 * tag. */
Test(servers, every_range_has_the_version_of_the_first)
{
    static const struct {
        const char *kind, *words;
    } cases[] = {{"steady", NULL},
                 {"weak", "the file changed while it was read"},
                 {"untagged", "an answer has no ETag, although an earlier one had it"},
                 {"undated", "an answer has no Last-Modified, although"},
                 {"undated_weak", "an answer has no Last-Modified, although"},
                 {"moved", "an answer has no ETag, although"}};
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        const struct remote_options options = {.cache_dir = i % 2 ? "cache" : NULL};
        const char *words = cases[i / 2].words;
        struct remote *remote;
        char url[128], *text = NULL;
        size_t size;
        snprintf(url, sizeof url, "%s/mixed-%s/x.bin", getenv("U"), cases[i / 2].kind);
        cr_assert_eq(remote_open(url, &options, &remote), STATUS_OK, "%s", status_text());
        cr_expect_eq(remote_text(remote, "x.bin", 1 << 22, &text, &size), words ? STATUS_FAILED : STATUS_OK,
                     "%s: %s", cases[i / 2].kind, status_text());
        if (words)
            cr_expect(strstr(status_text(), words), "%s: %s", cases[i / 2].kind, status_text());
        free(text);
        remote_close(remote);
    }
    SHELL(0, "test $(ls cache/*.data | wc -l) = 1"); /* that of `steady` */
}

/* Requests the first `wanted` bytes of a path. */
static enum status get_first(const char *path, uint64_t wanted, struct http_reply *reply)
{
    struct http *http;
    char url[256];
    uint8_t bytes[1024];
    snprintf(url, sizeof url, "%s/%s", getenv("U"), path);
    const struct http_request request = {.url = url, .shown = "x", .wanted = wanted, .to = bytes};
    cr_assert_eq(http_open(&http), STATUS_OK);
    const enum status got = http_get(http, &request, 1, reply);
    http_close(http);
    return got;
}

Test(servers, ranges_are_read_strictly)
{
    static const struct {
        const char *range;
        uint64_t bytes; /* 0: refused */
    } cases[] = {{"bytes 0-0/1", 1},
                 {"bytes 0-0/922337203685477580", 922337203685477580},
                 {"bytes 0-7/8", 8},
                 {"bytes 0-0/*", HTTP_UNKNOWN},
                 {"bytes -0-0/5", 0},
                 {"bytes 0--0/5", 0},
                 {"bytes 0-0/-5", 0},
                 {"bytes +0-0/5", 0},
                 {"bytes 0-+0/5", 0},
                 {"bytes 0-0/5x", 0},
                 {"bytes 0-0/", 0},
                 {"bytes 0-0", 0},
                 {"bytes 0/5", 0},
                 {"bytes /5", 0},
                 {"bytes */5", 0},
                 {"bytes */*", 0},
                 {"bytes 0-5/5", 0},
                 {"bytes 1-1/5", 0},
                 {"bytes 0-0/18446744073709551615", 0},
                 {"bytes 0-0/18446744073709551621", 0},
                 {"bytes 18446744073709551616-0/5", 0},
                 {"octets 0-0/5", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct http_reply reply;
        char path[128] = "range/x?";
        cr_assert(s3_encode(cases[i].range, false, path, sizeof path));
        cr_expect_eq(get_first(path, 1, &reply), cases[i].bytes ? STATUS_OK : STATUS_FAILED, "%s: %s",
                     cases[i].range, status_text());
        if (cases[i].bytes)
            cr_expect_eq(reply.version.bytes, cases[i].bytes, "%s", cases[i].range);
        else
            cr_expect(strstr(status_text(), "the server sent another range"), "%s: %s", cases[i].range,
                      status_text());
    }
}

Test(servers, headers_have_a_limit)
{
    static const char *const refused[] = {"headers/400000?1", "headers/50000?6"};
    struct http_reply reply;
    cr_expect_eq(get_first("headers/50000?4", 1, &reply), STATUS_OK, "%s", status_text());
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        cr_expect_eq(get_first(refused[i], 1, &reply), STATUS_FAILED);
        cr_expect(strstr(status_text(), "the headers of the answer are too long"), "%s", status_text());
    }
}

/* While `slow_s` is not 0, it stands for the time after which libcurl ends a slow transfer. `wanted_slow_s`
 * is the time that the program asked for. */
static long slow_s, wanted_slow_s;

CURLcode(curl_easy_setopt)(CURL *curl, CURLoption option, ...)
{
    CURLcode (*real)(CURL *, CURLoption, ...) =
        (CURLcode(*)(CURL *, CURLoption, ...))dlsym(RTLD_NEXT, "curl_easy_setopt");
    va_list arguments;
    va_start(arguments, option);
    const long value = va_arg(arguments, long); /* a number or a pointer, which has the same size */
    va_end(arguments);
    if (option == CURLOPT_LOW_SPEED_TIME)
        wanted_slow_s = value;
    return real(curl, option, option == CURLOPT_LOW_SPEED_TIME && slow_s ? slow_s : value);
}

/* A server that sends some bytes now and then would never let a run end. */
Test(servers, slow_transfers_stall)
{
    struct http_reply reply;
    slow_s = 2;
    cr_expect_eq(get_first("drip/x", 600, &reply), STATUS_FAILED);
    cr_expect(strstr(status_text(), "Operation too slow"), "%s", status_text());
    cr_expect(reply.got > 0 && reply.got < 600);
    cr_expect_eq(wanted_slow_s, 30);
}

Test(servers, servers_with_odd_ranges_are_read_or_refused)
{
    const char *urls[] = {
        "$U/refusing/plain/counter-{000000..000004}.tar", "$U/dated/plain/counter-{000000..000004}.tar",
        "$U/weak/plain/counter-{000000..000004}.tar", "$U/bare/plain/counter-{000000..000004}.tar"};
    expect_same(urls, sizeof urls / sizeof *urls);
    SHELL_PRINTS(1, "empty.tar: offset 0: the shard is empty", "$P $N --data $U/refusing/empty.tar");
    SHELL(0, "cat files/plain/*.tar files/plain/*.tar > files/large.tar"); /* more than one piece */
    shell("$P $N --data $U/later/large.tar");
    expect_line(1, "the server sends the whole file instead of the bytes from ");
    shell("$P $N --data $U/unnamed/plain/counter-000000.tar");
    expect_line(1, "the server sent another range");
    shell("$P $N --data $U/redated/plain/counter-000000.tar");
    expect_line(1, "the file changed while it was read");
}

Test(servers, each_fault_is_reported_in_one_line)
{
    static const struct {
        int status;
        const char *url, *words;
    } refused[] = {
        {1, "$U/web/none.tar", "/web/none.tar: the server has no such file (404); check the address"},
        {1, "$U/web/none-{0..3}.tar",
         "none-0.tar: the server has no such file (404); check the address, and the "
         "names that the braces stand for"},
        {1, "$U/web/plain/counter-*.tar", "(404); patterns such as * are not expanded: name the numbers"},
        {1, "$U/web/gone/counter.index",
         "0.tar: the server has no such file (404); the index or list of the data"},
        {1, "$U/list/x.tar",
         "x.tar: this is not a tar file, but an HTML or XML page, such as a server's page for"},
        {2, "x-{000..003}.tar", "No such file or directory; patterns are only for URLs"},
        {2, "$U/web/plain/", "a web server has no list of files; name the shards"},
        {2, "$U/web/one/counter.index", "only tar shards can be read from a URL"},
        {1, "$U/changing/plain/counter-000000.tar", "the file changed while it was read"},
        {1, "$U/endless/x.tar", "the server sends more than the 1 bytes that it should"},
        {1, "$U/secure/plain/counter-000000.tar", "SSL"},
        {1, "$U/loop", "a web server has no list"},
        {1, "$U/loop/x.tar", "more than 5 redirections"},
        {1, "$U/account/box/plain/?sv=1&sig=wrong", "access denied (403)"},
        {1, "http://127.0.0.1:1/x.tar", "Couldn't connect to server"},
        {2, "http://user:secret@127.0.0.1/x.tar", "a URL with a user or password is refused"},
        {2, "ftp://127.0.0.1/x.tar", "ftp:// is an unknown kind of URL; use https://"},
        {2, "abfss://box@account.dfs.core.windows.net/x.tar", "write https://ACCOUNT.blob.core.windows.net"},
        {2, "az://box/x.tar", "write https://ACCOUNT.blob.core.windows.net"},
        {2, "wasbs://box@account.blob.core.windows.net/", "write https://ACCOUNT.blob.core.windows.net"},
        {2, "gcs://bucket/x.tar", "write gs://BUCKET/PREFIX/"},
        {2, "gs://", "name a bucket: gs://BUCKET/PREFIX/"},
        {2, "hdfs://host/x.tar", "hdfs:// is an unknown kind of URL"},
        {2, "s3a://bucket/x.tar", "s3a:// is an unknown kind of URL; write s3://"},
        {2, "$U/web/plain/counter-{000000,000000}.tar", "'counter-000000.tar' is named twice"},
        {2, "$U/web/plain/counter-{000004..000000}.tar", "the range {000004..000000} counts down"},
        {2, "$U/web/plain/counter-{0..5000000}.tar", "has more than 1000000 files"},
        {2, "$U/web/plain/counter-{0.tar", "a brace without its counterpart"},
        {2, "$U/web/plain/counter-0}.tar", "a brace without its counterpart"},
        {2, "$U/web/plain/counter-00000{0,1,0}.tar", "'counter-000000.tar' is named twice"},
        {2, "$U/web/plain/counter-{000000,%30%3000%300}.tar", "are the same file; name each file once"},
        {2, "s3://", "name a bucket"},
#ifdef HAVE_EXPAT
        {1, "s3://list/", "s3://list: the answer is not a list of objects"},
        {1, "s3://list-repeated/plain/",
         "the list has 'plain/counter-000000.tar' after 'plain/counter-000000.tar'"},
        {1, "s3://list-overlapping/plain/",
         "the list has 'plain/counter-000001.tar' after 'plain/counter-000001.tar'"},
        {1, "s3://list-descending/plain/", "keys must ascend"},
        {1, "s3://list-constant/plain/", "the list does not end: the server sends the same page again"},
        {1, "s3://list-turning/plain/", "the list does not end: the server sends the same page again"},
        {1, "s3://list-nested/plain/", "an object in an unknown place, /ListBucketResult/Part/Contents"},
        {1, "s3://list-empty/plain/", "the list does not end: the server sends only empty pages"},
        {1, "s3://list-version1/plain/", "the server only has version 1 of S3's lists"},
        {1, "s3://list-other/plain/",
         "'planet/counter-000000.tar', which does not begin with the prefix 'plain/'"},
        {1, "s3://list-encoded/plain/", "the list has encoded names"},
        {1, "s3://list-doctype/plain/", "it has a document type"},
        {1, "s3://list-error/plain/", "the server answers with the error InternalError: We failed."},
        {1, "s3://list-cut/plain/", "the list of objects is cut or damaged at offset"},
        {1, "s3://list-open/plain/", "the list of objects is cut or damaged at offset"},
        {1, "s3://error-PermanentRedirect/plain/",
         "(301 PermanentRedirect: Use the endpoint.); the bucket is in the region 'eu-far-1', but the "
         "request is for "
         "'eu-test-1': set AWS_REGION=eu-far-1"},
        {1, "s3://error-AuthorizationHeaderMalformed/plain/", "set AWS_REGION=eu-far-1"},
        {1, "s3://error-AccessDenied/plain/", "access denied (403 AccessDenied: Access Denied); check"},
        {1, "s3://error-NoSuchBucket/a.tar", "a.tar: the server has no such file (404 NoSuchBucket: No"},
#endif
        {1, "s3://bucket/", "s3://bucket: access denied (403)"},
        {2, "https://", "a URL needs a host"},
        {2, "$U/web/a.tar,$U/web/b.tar",
         "a list of URLs is refused; name several shards of a folder in one URL"},
        {1, "$U/web/empty.tar", "empty.tar: offset 0: the shard is empty"},
        {1, "$U/norange/empty.tar", "empty.tar: offset 0: the shard is empty"},
    };
    set_credentials();
    setenv("AWS_SECRET_ACCESS_KEY", "wrong", 1);
    SHELL(0, "mkdir files/gone && cp files/set/counter.index files/gone");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        int wanted = strcmp(refused[i].url, "$U/loop") == 0 ? 2 : refused[i].status;
        cr_expect_eq(shell("$P $N --data \"%s\"", refused[i].url), wanted, "%s: %d: %s", refused[i].url,
                     status, out);
        cr_expect(says(refused[i].words), "'%s' is not in: %s", refused[i].words, out);
        cr_expect(strchr(out, '\n') == out + strlen(out) - 1 && !says("secret"), "%s", out);
    }
}

Test(servers, short_bodies_are_an_error_after_some_attempts)
{
    /* The server sends half of the requested bytes each time. */
    SHELL_PRINTS(1, "tried 6 times", "$P $N --data $U/short/plain/counter-000000.tar");
}

Test(servers, signatures_of_azure_are_in_no_row)
{
    SHELL(0, "$P $N --data \"$U/account/box/plain/?sv=1&sig=se%%2Bcret%%2F\" --out rows.csv; cat rows.csv");
    cr_expect(says("account/box/plain/?...") && !says("cret"), "%s", out);
}

/* ---- The cache ---- */

static int count_files(const char *end)
{
    int count = 0;
    DIR *folder = opendir("cache");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += strstr(entry->d_name, end) != NULL;
    closedir(folder);
    return count;
}

#define CACHED "$P $N --data $U/web/plain/counter-{000000..000004}.tar --cache-dir cache "

Test(servers, a_cache_keeps_verified_shards)
{
    SHELL(0, CACHED);
    cr_expect_eq(count_files(".data"), 5);
    cr_expect_eq(count_files(".part"), 0);
    /* A flipped byte is found, and the shard is read again. */
    SHELL(0, "f=$(ls cache/*.data | head -1); printf X | dd of=$f bs=1 seek=5000 conv=notrunc status=none");
    SHELL_PRINTS(0, "is damaged; it is removed and read again", CACHED);
    cr_expect_eq(count_files(".data"), 5);
    /* For shards in the cache, the program requests only their version from the server. */
    SHELL(0, "$P $M --variant shards-mmap --cache warm --data "
             "$U/web/plain/counter-{000000..000004}.tar --cache-dir cache");
    EXPECT_OUT(",warm,");
}

Test(servers, a_dry_run_does_not_change_the_cache)
{
    SHELL(0, CACHED "--dry-run && test ! -e cache");
    SHELL_PRINTS(2, "--cache-dir: none/cache: its folder does not exist; create it with: mkdir -p 'none'",
                 "$P $N --data $U/web/plain/counter-000000.tar --cache-dir none/cache --dry-run");
    SHELL(0, CACHED "&& f=$(ls cache/*.data | head -1) && printf X | "
                    "dd of=$f bs=1 seek=5000 conv=notrunc status=none && cp -a cache before");
    SHELL_PRINTS(0, "is damaged; a run will remove it and read it again", CACHED "--dry-run");
    SHELL(0, "diff -r cache before && test \"$(stat -c %%y cache/*)\" = \"$(stat -c %%y before/*)\"");
}

Test(servers, a_cache_removes_shards_to_stay_below_its_limit)
{
    SHELL(0, CACHED "--cache-bytes 800K"); /* three of five shards fit */
    cr_expect_eq(count_files(".data"), 3);
    EXPECT_OUT("--cache-bytes is too small for this set of 1131520 bytes");
    /* A stream would download most shards of this cache again and again. */
    shell("$P $M --variant stream --data $U/web/plain/counter-{000000..000004}.tar --cache-dir cache "
          "--cache-bytes 800K");
    cr_expect(says("raise --cache-bytes to at least 1131520"), "%s", out);
    SHELL(0, "$P $N --data $U/web/plain/counter-000000.tar --cache-dir cache --cache-bytes 300K");
    cr_expect_eq(count_files(".data"), 1); /* a smaller limit removes files of earlier runs */
    /* A limit below the size of a shard is a mistake, such as a forgotten G: the cache remains as it is. */
    SHELL_PRINTS(2, "a file of 226304 bytes does not fit; raise the limit", CACHED "--cache-bytes 100K");
    cr_expect_eq(count_files(".data"), 1);
    SHELL_PRINTS(2, "--cache-bytes 200: a file of 226304 bytes does not fit; raise the limit",
                 CACHED "--cache-bytes 200 --dry-run");
    SHELL(2, "$P $N --data $U/web/plain/counter-000001.tar --cache-dir cache --cache-bytes 200");
    SHELL(2, "$P $N --data $U/web/set/counter.index --cache-dir cache --cache-bytes 200");
    cr_expect_eq(count_files(".data"), 1);
}

/* Shards that the cache has no room for are not damaged, so --on-error skip does not apply to them. A limit
 * that is too low for a shard is an error of usage; a full disk is a failure while running. */
Test(servers, a_cache_without_room_ends_the_run)
{
    SHELL(2, CACHED "--cache-bytes 100K --on-error skip");
    cr_expect(!says("skipped"), "%s", out);
    static const char *const variants[] = {"shards", "shards-mmap", "shards-omp"};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        SHELL(1,
              "trap '' XFSZ; ulimit -f 100; $P $M --variant %s --data "
              "$U/web/plain/counter-{000000..000004}.tar --cache-dir cache --on-error skip",
              variants[i]);
        cr_expect(says(".part: File too large") && !says("skipped"), "%s: %s", variants[i], out);
    }
}

Test(servers, several_processes_share_a_cache_and_a_kill_leaves_no_harm)
{
    for (int i = 0; i < 3; i++)
        SHELL(0, "timeout -s KILL 0.%d " CACHED "; true", 1 + i);
    SHELL(0, "for i in 1 2 3; do " CACHED
             ">out$i 2>&1 & p$i=$!; done; for i in 1 2 3; do eval wait \\$p$i || exit 1; done");
    cr_expect_eq(count_files(".data"), 5);
    cr_expect_eq(count_files(".part"), 0);
}

/* Writes the shards compressed: files/gz, and files/zst. Returns false without the program zstd, or if this
 * build cannot read its files. */
static bool compress_shards(void)
{
    SHELL(0, "mkdir files/gz files/zst && for t in files/plain/*; do gzip -c $t >files/gz/${t##*/}.gz; done");
#ifdef HAVE_ZSTD
    return shell("for t in files/plain/*; do zstd -q -c $t >files/zst/${t##*/}.zst || exit; done") == 0;
#else
    return false;
#endif
}

/* Compressed shards have the samples of others. The cache keeps only their unpacked copies, and those without
 * a version not at all. */
Test(servers, compressed_shards_are_read_from_every_service)
{
    static const struct {
        const char *url;
        int kept;
    } cases[] = {{"$U/web/%s/counter-{000000..000004}.tar.%s", 5},
                 {"$U/norange/%s/counter-{000000..000004}.tar.%s", 5},
                 {"$U/faulty/%s/counter-{000000..000004}.tar.%s", 5},
                 {"$U/bare/%s/counter-{000000..000004}.tar.%s", 0},
#ifdef HAVE_EXPAT
                 {"$U/account/box/%s/?sv=1&sig=se%%2Bcret%%2F&x=%s", 5},
#ifdef HAVE_CRYPTO
                 {"s3://bucket/%s/counter-{000000..000004}.tar.%s", 5},
                 {"s3://bucket/%s/", 5},
#endif
#endif
                 {"idx", 5},
                 {"$U/web/idx/x.wids.json", 5}};
    static const char *const kinds[] = {"gz", "zst"};
    const bool zstd = compress_shards();
    char local[64], url[256];
    set_credentials();
    SHELL(0, "$P $N --data files/plain 2>/dev/null | sed -n 's/.*,\\([0-9a-f]\\{16\\}\\),.*/\\1/p'");
    snprintf(local, sizeof local, "%.16s", out);
    for (int k = 0; k < 1 + zstd; k++) {
        for (int i = 0; i < 2; i++) { /* in a folder here, and in one of the server */
            write_wids(i ? "files/idx/x.wids.json" : "idx/x.wids.json", "$U/web/KIND/");
            SHELL(0,
                  "python3 - %s %s <<'END'\n"
                  "import hashlib, json, sys\n"
                  "wids = json.load(open(sys.argv[1]))\n"
                  "for shard in wids['shardlist']:\n"
                  "    shard['url'] = shard['url'].replace('KIND', sys.argv[2]) + '.' + sys.argv[2]\n"
                  "    data = open('files/' + shard['url'].split('/web/')[1], 'rb').read()\n"
                  "    shard.update(filesize=len(data), md5sum=hashlib.md5(data).hexdigest())\n"
                  "json.dump(wids, open(sys.argv[1], 'w'))\n"
                  "END",
                  i ? "files/idx/x.wids.json" : "idx/x.wids.json", kinds[k]);
        }
        for (size_t i = 0; i < COUNT_OF(cases); i++) {
            snprintf(url, sizeof url, cases[i].url, kinds[k], kinds[k]);
            SHELL(0, "rm -rf cache");
            for (int again = 0; again < (i ? 1 : 2); again++) {
                cr_expect_eq(shell("$P $M --variant shards,shards-omp --data \"%s\" --cache-dir "
                                   "cache --cache any",
                                   url),
                             0, "%s: %s", url, out);
                cr_expect(says(local), "%s: %s is not in %s", url, local, out);
            }
            cr_expect_eq(shell("$P $M --variant shards,shards-omp --data \"%s\"", url), 0, "%s: %s", url,
                         out);
            cr_expect(says(local), "%s: %s is not in %s", url, local, out); /* unpacked in memory */
            cr_expect_eq(count_files(".part"), 0);
            /* --verify compares the md5 of the compressed shards, which then stay, as does the index */
            const int others = strcmp(url, "idx") == 0 ? 5 : strstr(url, "idx") ? 6 : 0;
            cr_expect_eq(count_files(".data"), cases[i].kept + others, "%s", url);
        }
    }
}

/* MDS sets are read as their local copies: by the name of the index, and below a prefix. */
Test(servers, mds_sets_are_read_from_every_service)
{
    const char *urls[] = {
        "$U/web/%s/index.json",
        "$U/norange/%s/index.json",
#if defined HAVE_CRYPTO && defined HAVE_EXPAT
        "s3://bucket/%s/"
#endif
    };
    static const char *const kinds[] = {"mds", "mdz"};
    char local[64], url[256];
    set_credentials();
    SHELL(
        0,
        "python3 - <<'END'\n"
        "import gzip, json, os, struct\n"
        "for packed in (False, True):\n"
        "    out = 'files/' + ('mdz' if packed else 'mds')\n"
        "    os.makedirs(out)\n"
        "    entries = []\n"
        "    for s in range(3):\n"
        "        data = [struct.pack('<I', 900 + i) + bytes((s + i,)) * (900 + i) for i in range(5)]\n"
        "        at = [28]\n"
        "        for one in data: at.append(at[-1] + len(one))\n"
        "        raw = struct.pack('<7I', 5, *at) + b''.join(data)\n"
        "        name = f'shard.0000{s}.mds'\n"
        "        zip = dict(basename=name + '.gz', bytes=len(gzip.compress(raw))) if packed else None\n"
        "        open(out + '/' + name + ('.gz' if packed else ''), 'wb').write(gzip.compress(raw) if packed "
        "else raw)\n"
        "        entries.append(dict(version=2, format='mds', samples=5, column_names=['v'], "
        "column_encodings=['bytes'],\n"
        "            column_sizes=[None], raw_data=dict(basename=name, bytes=len(raw)), zip_data=zip))\n"
        "    json.dump(dict(version=2, shards=entries), open(out + '/index.json', 'w'))\n"
        "END");
    for (int k = 0; k < 2; k++) {
        SHELL(0,
              "$P $M --variant shards-omp --cache any --data files/%s 2>/dev/null | sed -n "
              "'s/.*,\\([0-9a-f]\\{16\\}\\),.*/\\1/p'",
              kinds[k]);
        snprintf(local, sizeof local, "%.16s", out);
        cr_assert_eq(strlen(local), 16, "%s", out);
        for (size_t i = 0; i < COUNT_OF(urls); i++)
            for (int cached = 0; cached < 2; cached++) {
                snprintf(url, sizeof url, urls[i], kinds[k]);
                cr_expect_eq(shell("$P $M --variant shards-omp,shards-mmap --cache any --data \"%s\"%s", url,
                                   cached ? " --cache-dir cache" : ""),
                             0, "%s: %s", url, out);
                cr_expect(says(local), "%s: %s is not in %s", url, local, out);
            }
    }
    cr_expect_eq(
        shell("rm files/mds/shard.00001.mds; $P $M --variant shards-omp --data $U/web/mds/index.json"), 1);
    cr_expect(says("mds/shard.00001.mds") && says("404"), "%s", out);
    SHELL(0, "sed -i 's/\"shards\"/\"other\"/' files/mds/index.json");
    cr_expect_eq(shell("$P $M --variant shards-omp --data $U/web/mds/index.json"), 2);
    cr_expect(says("the folder has no index.json of an MDS set"), "%s", out);
}

Test(servers, faults_of_compressed_shards_are_named)
{
    static const struct {
        int status;
        const char *words, *prepare, *arguments;
    } cases[] = {
        {2, "gz/counter-000000.tar.gz: it has no unpacked copy in cache yet, and a dry run writes none", ":",
         "web/gz/ --cache-dir cache --dry-run"},
        {2,
         "gz/counter-000000.tar.gz: --cache-bytes 200000: the unpacked data have more bytes; raise the limit",
         ":", "web/gz/ --cache-dir cache --cache-bytes 200000"},
        {2, "the unpacked copies of the shards have more than the 800000 bytes of the cache folder", ":",
         "web/gz/ --cache-dir cache --cache-bytes 800000"},
        {1, "gz/counter-000001.tar.gz: the gzip data are truncated; copy or download the file again",
         "truncate -s -5 files/gz/counter-000001.tar.gz", "web/gz/ --cache-dir cache"},
        {1, "gz/counter-000001.tar.gz: this is neither gzip nor zstd data",
         "cp files/plain/counter-000001.tar files/gz/counter-000001.tar.gz", "web/gz/ --cache-dir cache"},
        {1, "counter-000000.tar.gz: the file changed while it was read", ":",
         "changing/gz/ --cache-dir cache"},
    };
    (void)compress_shards();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        SHELL(0, "rm -rf cache && %s", cases[i].prepare);
        shell("set -- %s; u=$1; shift; $P $M --variant stream --cache any --data "
              "\"$U/${u}counter-{000000..000004}.tar.gz\" $*",
              cases[i].arguments);
        expect_line(cases[i].status, cases[i].words);
        SHELL(0, "! ls cache/*.part");
    }
    SHELL(0, "rm -rf cache && $P $N --data \"$U/web/gz/counter-{000000..000004}.tar.gz\" --cache-dir cache "
             "--cache any --on-error skip");
    cr_expect(says("skipped an unknown number of samples: ") && count_files(".data") == 4, "%s", out);
}

/* A folder that this user cannot write needs another remedy than a full one. */
Test(servers, a_cache_without_permission_has_a_remedy)
{
    const char *other = geteuid() == 0 ? "setpriv --reuid 65534 --regid 65534 --clear-groups" : "";
    SHELL(0, "mkdir ro cache && chmod 555 ro && chmod 755 . && cp $P program && touch cache/lock && "
             "chmod 777 cache && chmod 444 cache/lock"); /* root may write everywhere */
    static const char *const folders[] = {"ro", "ro/new", "cache", "/proc/x"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        shell("%s ./program $N --data $U/web/plain/counter-000000.tar --cache-dir %s", other, folders[i]);
        cr_expect(says("; name a folder where this user may create files, or drop "
                       "--cache-dir"),
                  "%s: %s", folders[i], out);
    }
}

Test(servers, options_of_the_cache_are_checked)
{
    static const char *const refused[][2] = {
        {"--data files/plain --cache-dir cache", "are for data at a URL"},
        {"--data $U/web/plain/x.tar --cache-bytes 1M", "name its folder with --cache-dir"},
        {"--data $U/web/plain/x.tar --cache cold", "--cache cold needs files: add --cache-dir DIR"},
        {"--data $U/web/plain/counter-000000.tar --cache-dir none/cache",
         "cannot create the folder: No such file or directory; create its parent folders"},
        {"--data $U/web/plain/counter-000000.tar --cache-dir /proc/x",
         "cannot create the folder: No such file or directory; name a folder where this user may create "
         "files"},
        {"--data $U/web/plain/counter-000000.tar --cache-dir plain_file", "this is a file; name a folder"},
        {"--data $U/web/plain/counter-{000000..000004}.tar --cache-dir cache --cache-bytes 300K --cache warm",
         "--cache warm: --cache-bytes is too small for this set of 1131520 bytes"},
    };
    SHELL(0, "touch plain_file");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        SHELL(2, "$P $N %s", refused[i][0]);
        cr_expect(says(refused[i][1]), "'%s' is not in: %s", refused[i][1], out);
    }
}

/* Returns the checksum of a run. */
static unsigned long long checksum_of(const char *url)
{
    unsigned long long sum = 0;
    SHELL(0, "$P $N --data \"%s\" --cache-dir cache", url);
    SHELL(0,
          "$P $N --data \"%s\" --cache-dir cache 2>/dev/null | sed -n 's/.*,\\([0-9a-f]\\{16\\}\\),.*/\\1/p'",
          url);
    cr_assert_eq(sscanf(out, "%llx", &sum), 1, "%s", out);
    return sum;
}

/* Parameters of a query select the data, unless they belong to a signature. */
Test(servers, the_cache_distinguishes_queries_but_not_signatures)
{
    static const char *const same[][2] = {
        {"$U/web/plain/counter-000000.tar?X-Amz-Date=1&X-Amz-Signature=a&id=1",
         "$U/web/plain/counter-000000.tar?X-Amz-Date=2&X-Amz-Security-Token=t&id=1&X-Amz-Signature=b"},
        {"$U/web/plain/counter-000000.tar?X-Goog-Expires=1&X-Goog-Signature=a",
         "$U/web/plain/counter-000000.tar?X-Goog-Expires=2&X-Goog-Signature=b"},
        {"$U/web/plain/counter-000000.tar?AWSAccessKeyId=a&Signature=b&Expires=1",
         "$U/web/plain/counter-000000.tar?AWSAccessKeyId=a&Signature=c&Expires=2"},
        {"$U/account/box/plain/counter-000000.tar?sv=1&se=1&sp=r&sr=c&sig=se%2Bcret%2F",
         "$U/account/box/plain/"
         "counter-000000.tar?sv=2&st=1&se=2&sp=rl&sr=b&spr=https&sip=1&sig=se%2Bcret%2F"},
    };
    static const char *const different[][2] = {
        {"$U/dated/x.tar?f=plain/counter-000000.tar", "$U/dated/x.tar?f=plain/counter-000001.tar"},
        {"$U/web/plain/counter-000000.tar?versionId=1", "$U/web/plain/counter-000000.tar?versionId=2"},
        {"$U/web/plain/counter-000000.tar?se=1", "$U/web/plain/counter-000000.tar?se=2"},
        {"$U/web/plain/counter-000000.tar?Expires=1&X-Amz-Signature=a",
         "$U/web/plain/counter-000000.tar?Expires=2&X-Amz-Signature=a"},
        {"$U/account/box/plain/counter-000000.tar?sv=1&snapshot=1&sig=se%2Bcret%2F",
         "$U/account/box/plain/counter-000000.tar?sv=1&snapshot=2&sig=se%2Bcret%2F"},
    };
    SHELL(0, "touch -d 2001-01-01 files/plain/*.tar");
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        SHELL(0, "rm -rf cache");
        cr_expect_eq(checksum_of(same[i][0]), checksum_of(same[i][1]));
        cr_expect_eq(count_files(".data"), 1, "%s", same[i][0]);
    }
    for (size_t i = 0; i < sizeof different / sizeof *different; i++) {
        SHELL(0, "rm -rf cache");
        const bool other = checksum_of(different[i][0]) != checksum_of(different[i][1]);
        cr_expect_eq(count_files(".data"), 2, "%s", different[i][0]);
        cr_expect_eq(other, i == 0);
    }
}

/* A shard that another of the same size replaces is read again, whatever the server says about versions. */
Test(servers, the_cache_returns_no_stale_shard)
{
    static const char *const kinds[] = {"web", "dated", "weak", "bare"};
    char url[64];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        snprintf(url, sizeof url, "$U/%s/s.tar", kinds[i]);
        SHELL(0, "rm -rf cache; cp files/plain/counter-000000.tar files/s.tar");
        const unsigned long long before = checksum_of(url); /* the file was written in this second */
        SHELL(0, "cp files/plain/counter-000001.tar files/s.tar");
        const unsigned long long after = checksum_of(url);
        cr_expect_neq(before, after, "%s", kinds[i]);
        cr_expect_eq(checksum_of(url), after, "%s", kinds[i]);
        cr_expect_eq(count_files(".data"), i < 3 ? 2 : 0, "%s", kinds[i]);
    }
}

Test(servers, a_shard_without_a_version_is_cached_for_one_run)
{
    SHELL(0, "$P $M --variant shards --epochs 2 --data $U/bare/plain/counter-{000000..000001}.tar "
             "--cache-dir cache");
    const char *warning = strstr(out, "--cache-dir keeps such files during this run only");
    cr_expect(warning && !strstr(warning + 1, "--cache-dir keeps"), "one warning: %s", out);
    cr_expect_eq(count_files(".data") + count_files(".part"), 0);
    SHELL(
        0,
        "$P $M --variant shards-mmap --cache warm --data $U/bare/plain/counter-000000.tar --cache-dir cache");
    EXPECT_OUT(",warm,");
    /* Another process does not read the shard of a run that has not ended, or that was killed. */
    struct remote *remote;
    char url[128];
    int fd;
    SHELL(0, "cp files/plain/counter-000000.tar files/s.tar");
    snprintf(url, sizeof url, "%s/bare/s.tar", getenv("U"));
    const unsigned long long before = checksum_of("$U/bare/s.tar");
    cr_assert_eq(remote_open(url, &(struct remote_options){.cache_dir = "cache"}, &remote), STATUS_OK);
    cr_assert_eq(remote_fd(remote, "s.tar", NULL, &fd), STATUS_OK, "%s", status_text());
    cr_expect_eq(count_files(".data"), 1);
    SHELL(0, "cp files/plain/counter-000001.tar files/s.tar");
    cr_expect_neq(checksum_of("$U/bare/s.tar"), before);
    remote_done(remote, fd);
    remote_close(remote);
    cr_expect_eq(count_files(".data"), 0);
}

/* Earlier versions of the program left the query out of the name. */
Test(servers, entries_with_names_of_earlier_versions_are_not_read)
{
    static const char *const url = "$U/web/plain/counter-000000.tar";
    char text[256], tag[33];
    unsigned long long bytes;
    const unsigned long long sum = checksum_of(url);
    SHELL(0, "rm -r cache; mkdir cache; cd files/plain; stat -c %%s counter-000000.tar; md5sum < "
             "counter-000000.tar");
    cr_assert_eq(sscanf(out, "%llu %32s", &bytes, tag), 2, "%s", out);
    const int length =
        snprintf(text, sizeof text, "%s/web/plain/counter-000000.tar\n\"%s\"\n%llu", getenv("U"), tag, bytes);
    void *zeros = calloc(1, bytes);
    SHELL(0, "head -c %llu /dev/zero > cache/%016llx-%016llx.data", bytes,
          (unsigned long long)XXH3_64bits(text, (size_t)length),
          (unsigned long long)XXH3_64bits(zeros, bytes));
    free(zeros);
    cr_expect_eq(checksum_of(url), sum);
    cr_expect_eq(count_files(".data"), 2);
}

/* ---- Attempts ---- */

/* While `slept_s` is not negative, nanosleep() only adds up the times. */
static _Atomic double slept_s = -1;

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    if (slept_s < 0)
        return clock_nanosleep(CLOCK_REALTIME, 0, wanted, left);
    slept_s = slept_s + (double)wanted->tv_sec + 1e-9 * (double)wanted->tv_nsec;
    return 0;
}

/* The delay before the second attempt is 0.05 to 0.1 s after what the server asks for, which is at most 60 s
 * for a status that says "later". */
Test(servers, the_server_may_ask_for_a_delay)
{
    static const struct {
        const char *answer;
        double least_s, most_s;
    } cases[] = {{"503-3", 3.05, 3.1},    {"429-1", 1.05, 1.1},   {"503-100000", 60.05, 60.1},
                 {"503-0", 0.05, 0.1},    {"503-date", 28, 30.1}, {"500-5", 0.05, 0.1},
                 {"503-soon", 0.05, 0.1}, {"503-3+s", 0.05, 0.1}, {"429-18446744073709551617", 0.05, 0.1},
                 {"408-5", 0.05, 0.1}};
    struct http *http;
    cr_assert_eq(http_open(&http), STATUS_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char url[128];
        uint8_t byte;
        struct http_reply reply;
        const struct http_request request = {.url = url, .shown = "x", .wanted = 1, .to = &byte};
        snprintf(url, sizeof url, "%s/retry-%s/plain/counter-000000.tar", getenv("U"), cases[i].answer);
        slept_s = 0;
        cr_expect_eq(http_get(http, &request, 2, &reply), STATUS_OK, "%s: %s", cases[i].answer,
                     status_text());
        const double slept = slept_s;
        slept_s = -1;
        cr_expect(slept > cases[i].least_s - 1e-6 && slept < cases[i].most_s + 1e-6, "%s: %g s",
                  cases[i].answer, slept);
    }
    http_close(http);
}

/* A connection that breaks after each megabyte still transfers a shard that needs more connections than a
 * request has attempts. Without ranges, each attempt begins again, so that is a failure. */
Test(servers, attempts_that_bring_bytes_are_not_counted)
{
    enum { BYTES = 15000000 };
    const struct remote_options one = {.connections = 1};
    struct remote *remote;
    char url[128], *text;
    size_t size;
    SHELL(
        0,
        "python3 -c 'import random; open(\"files/large.bin\", \"wb\").write(random.Random(1).randbytes(%d))'",
        BYTES);
    snprintf(url, sizeof url, "%s/breaking/large.bin", getenv("U"));
    cr_assert_eq(remote_open(url, &one, &remote), STATUS_OK, "%s", status_text());
    cr_assert_eq(remote_text(remote, "large.bin", BYTES, &text, &size), STATUS_OK, "%s", status_text());
    FILE *file = fopen("got.bin", "w");
    cr_assert(fwrite(text, 1, size, file) == size && fclose(file) == 0);
    SHELL(0, "cmp got.bin files/large.bin");
    free(text);
    remote_close(remote);
}

/* ---- Braces ---- */

static void expect_names(const char *leaf, const char *names)
{
    struct remote *remote;
    char *url = NULL, found[1024] = "";
    cr_assert(asprintf(&url, "%s/turning/%s", getenv("U"), leaf) > 0);
    cr_expect_eq(remote_open(url, NULL, &remote), STATUS_OK, "%.200s: %s", leaf, status_text());
    for (uint32_t i = 0; remote && i < remote_count(remote); i++)
        sprintf(found + strlen(found), "%s;", remote_name(remote, i));
    cr_expect_str_eq(found, names);
    remote_close(remote);
    free(url);
}

Test(servers, braces_stand_for_all_combinations)
{
    char many[4096] = "a{1..2}.b", *end = many + strlen(many);
    for (int i = 0; i < 1300; i++)
        end = stpcpy(end, "{}");
    expect_names("x.{b,a}-{08..11}{x,}", "x.b-08x;x.b-08;x.b-09x;x.b-09;x.b-10x;x.b-10;x.b-11x;x.b-11;"
                                         "x.a-08x;x.a-08;x.a-09x;x.a-09;x.a-10x;x.a-10;x.a-11x;x.a-11;");
    expect_names("x{9..11}.tar", "x9.tar;x10.tar;x11.tar;");
    expect_names("{one,}.{}", "one.;.;");
    expect_names(many,
                 "a1.b;a2.b;"); /* a function that calls itself for each group would need 10 MB of stack */
}

Test(servers, braces_that_stand_for_too_much_are_refused)
{
    static const struct {
        const char *leaf, *words;
    } cases[] = {{"{a{b,c}}", "a brace without its counterpart"},
                 {"{0..999}{0..999}{a,b}", "stand for more than 1000000 files"},
                 {"a}{b,c}", "a brace without its counterpart"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        SHELL_PRINTS(2, cases[i].words, "$P $N --data \"$U/web/%s\"", cases[i].leaf);
    char url[10000];
    struct remote *remote;
    snprintf(url, sizeof url, "%s/web/{a,b}%09000d.tar", getenv("U"), 0);
    cr_expect_eq(remote_open(url, NULL, &remote), STATUS_FAILED);
    cr_expect(strstr(status_text(), "the address is too long"), "%s", status_text());
}

/* ---- Small stacks ---- */

/* The main thread and the threads of connections have stacks of 72 KiB, of which the CUDA runtime takes 8. */
Test(servers, small_stacks_suffice)
{
    static const struct {
        const char *url, *options;
    } cases[] = {{"$U/web/set/counter.index", ""},
                 {"$T/web/set/counter.wids.json", "--cache-dir cache"},
                 {"$U/web/plain/counter-{000000..000004}.tar", "--cache-dir cache"},
                 {"$U/account/box/plain/?sv=1&sig=se%2Bcret%2F", ""},
#ifdef HAVE_CRYPTO
                 {"s3://bucket/plain/", ""}
#endif
    };
    if (strstr(program, "/san/"))
        cr_skip_test("a sanitizer needs larger stacks");
    set_credentials();
    setenv("SSL_CERT_FILE", "certificate.pem", 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (cases[i].url[1] != 'T' || has_certificate)
            SHELL(0,
                  "V=shards,shards-omp,stream; X=\"%s\"; ulimit -s 72 && exec env -i "
                  "$(env | grep -E '^(AWS|SSL|no_proxy)') $P --variant $V $M --data \"$X\" %s",
                  cases[i].url, cases[i].options);
}

/* ---- fork() ---- */

static pthread_mutex_t lock_of_curl = PTHREAD_MUTEX_INITIALIZER;

/* Stands for libcurl's function, which holds a lock while it initialises the library. */
CURLcode curl_global_init(long flags)
{
    CURLcode (*real)(long) = (CURLcode(*)(long))dlsym(RTLD_NEXT, "curl_global_init");
    pthread_mutex_lock(&lock_of_curl);
    usleep(300000);
    const CURLcode code = real(flags);
    pthread_mutex_unlock(&lock_of_curl);
    return code;
}

static void *open_first(void *context)
{
    (void)context;
    struct http *http;
    if (http_open(&http) == STATUS_OK)
        http_close(http);
    return NULL;
}

/* A child that begins while another thread initialises libcurl can use URLs. */
Test(remote, a_fork_during_the_first_use_leaves_no_lock, .timeout = 20)
{
    pthread_t thread;
    int ended;
    cr_assert_eq(pthread_create(&thread, NULL, open_first, NULL), 0);
    usleep(100000);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(5);
        (void)open_first(NULL);
        _exit(0);
    }
    cr_assert(waitpid(pid, &ended, 0) == pid);
    cr_expect_eq(ended, 0, "the child waits for a lock");
    pthread_join(thread, NULL);
}

/* ---- The folder of the cache ---- */

static const struct cache_entry entry = {.source = 7, .bytes = 5};

/* Writes the entry and opens it again. While a process reads an entry that it has stored, others need not
 * wait for it. */
static void write_entry(uint64_t limit)
{
    struct cache_draft draft;
    int fd;
    char text[5] = "", same[32];
    cr_assert_eq(cache_begin("cache", &entry, limit, NULL, &draft, &fd), STATUS_OK, "%s", status_text());
    cr_assert(fd < 0 && write(draft.fd, "abcde", 5) == 5);
    cr_assert_eq(cache_complete("cache", &entry, NULL, &draft, &fd), STATUS_OK, "%s", status_text());
    snprintf(same, sizeof same, "/proc/self/fd/%d", fd);
    int other = open(same, O_RDONLY);
    cr_expect(other >= 0 && flock(other, LOCK_EX | LOCK_NB) == 0, "the entry is locked");
    close(other);
    close(fd);
    cr_assert_eq(cache_find("cache", &entry, false, &fd), STATUS_OK, "%s", status_text());
    cr_assert(fd >= 0 && pread(fd, text, 5, 0) == 5 && memcmp(text, "abcde", 5) == 0);
    close(fd);
}

/* A process that stored an entry does not read it again to verify it: that takes a page fault per 64 KiB or
 * so. */
Test(remote, an_entry_is_hashed_once_per_process, .timeout = 20)
{
    enum { MIB = 16 };
    const struct cache_entry large = {.source = 9, .bytes = (uint64_t)MIB << 20};
    struct cache_draft draft;
    struct rusage before, after;
    int fd;
    char *zeros = calloc(1, large.bytes);
    enter_folder(home);
    SHELL(0, "mkdir cache");
    cr_assert_eq(cache_begin("cache", &large, 0, NULL, &draft, &fd), STATUS_OK, "%s", status_text());
    cr_assert(fd < 0 && write(draft.fd, zeros, large.bytes) == (ssize_t)large.bytes);
    cr_assert_eq(cache_complete("cache", &large, NULL, &draft, &fd), STATUS_OK, "%s", status_text());
    close(fd);
    getrusage(RUSAGE_SELF, &before);
    cr_assert_eq(cache_find("cache", &large, false, &fd), STATUS_OK, "%s", status_text());
    getrusage(RUSAGE_SELF, &after);
    cr_expect(fd >= 0 && after.ru_minflt - before.ru_minflt < 4 * MIB, "%ld page faults",
              after.ru_minflt - before.ru_minflt);
    close(fd);
    free(zeros);
    leave_folder(home);
}

/* A pipe, a link or a socket in the place of a file of the cache is neither waited for nor followed. */
Test(remote, odd_files_in_a_cache_are_replaced, .timeout = 20)
{
    static const char *const makes[] = {"mkfifo", "ln -s /dev/zero", "ln -s none", "ln -s loop",
                                        "python3 -c 'import socket,sys; socket.socket(1).bind(sys.argv[1])'"};
    enter_folder(home);
    setenv("D", "cache/0000000000000007", 1);
    for (size_t i = 0; i < sizeof makes / sizeof *makes; i++) {
        int fd;
        SHELL(0, "rm -rf cache; mkdir cache; %s $D-0000000000000001.data; %s $D.part", makes[i], makes[i]);
        cr_assert_eq(cache_trim("cache", 100, NULL), STATUS_OK, "%s", status_text());
        cr_assert_eq(cache_find("cache", &entry, true, &fd), STATUS_OK, "%s: %s", makes[i], status_text());
        cr_expect_eq(fd, -1);
        SHELL(0, "test -e $D-0000000000000001.data -o -L $D-0000000000000001.data");
        cr_assert_eq(cache_find("cache", &entry, false, &fd), STATUS_OK, "%s: %s", makes[i], status_text());
        cr_expect_eq(fd, -1);
        SHELL(1, "test -e $D-0000000000000001.data -o -L $D-0000000000000001.data");
        write_entry(0);
    }
    SHELL(0, "rm -rf cache; mkdir cache; mkfifo cache/lock");
    write_entry(0);
    const struct cache_entry empty = {.source = 7};
    int fd;
    SHELL(0, "rm $D-*.data; mkfifo $D-0000000000000000.data");
    cr_assert_eq(cache_find("cache", &empty, false, &fd), STATUS_OK, "%s", status_text());
    cr_expect_eq(fd, -1);
    leave_folder(home);
}

/* A folder cannot be replaced, as it may contain anything. */
Test(remote, folders_in_a_cache_are_refused, .timeout = 20)
{
    enter_folder(home);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "0000000000000007.part" : "0000000000000007-0000000000000001.data";
        struct cache_draft draft;
        int fd;
        SHELL(0, "rm -rf cache; mkdir -p cache/%s; touch cache/%s/mine", name, name);
        cr_assert(cache_open("cache", false) == STATUS_OK && cache_trim("cache", 1, NULL) == STATUS_OK, "%s",
                  status_text());
        cr_expect_eq(cache_find("cache", &entry, i, &fd), i ? STATUS_OK : STATUS_EXHAUSTED);
        cr_expect_eq(fd, -1);
        cr_expect_eq(cache_begin("cache", &entry, 10, NULL, &draft, &fd), STATUS_EXHAUSTED);
        cr_expect(strstr(status_text(), name) && strstr(status_text(), "remove or rename the folder"), "%s",
                  status_text());
        cr_expect_eq(fd, -1);
        cache_abandon(&draft);
        SHELL(0, "test -e cache/%s/mine", name);
    }
    leave_folder(home);
}

/* Users may name a folder that has other files. A cache removes, and counts, only what it has written. */
Test(remote, other_files_in_the_folder_of_a_cache_stay, .timeout = 20)
{
    static const char *const names[] = {"movie.part",
                                        "my.data",
                                        "000000000000000g.part",
                                        "000000000000000A.part",
                                        "0000000000000008.data",
                                        ".part",
                                        ".data",
                                        "00000000000000081.part",
                                        "0000000000000008-0000000000000001.part",
                                        "0000000000000008-00000000000000012.data",
                                        "0000000000000008_0000000000000001.data",
                                        "a-0000000000000008-0000000000000001.data",
                                        "0000000000000008.part.part",
                                        "0000000000000008-0000000000000001.data.data",
                                        "0000000000000008-0000000000000001.data~",
                                        "0000000000000007-.data",
                                        "0000000000000007-x.data"};
    const size_t count = sizeof names / sizeof *names;
    enter_folder(home);
    SHELL(0, "mkdir cache");
    for (size_t i = 0; i < count; i++)
        SHELL(0, "printf 'twenty bytes of data' > 'cache/%s'", names[i]);
    /* Links of our form, although only a process of this program would write such a name */
    SHELL(0, "printf data > mine; cd cache; ln -s ../mine 0000000000000009.part; "
             "ln -s ../mine 0000000000000009-0000000000000001.data; mkfifo 000000000000000a.part");
    cr_assert(cache_open("cache", false) == STATUS_OK && cache_trim("cache", 5, NULL) == STATUS_OK, "%s",
              status_text());
    write_entry(5); /* as large as the limit, so no other file counts */
    cr_assert(cache_open("cache", false) == STATUS_OK && cache_trim("cache", 1, NULL) == STATUS_OK, "%s",
              status_text());
    for (size_t i = 0; i < count; i++)
        SHELL(0, "test \"$(cat 'cache/%s')\" = 'twenty bytes of data'", names[i]);
    SHELL(0, "cd cache; test -L 0000000000000009.part -a -L 0000000000000009-0000000000000001.data -a "
             "-p 000000000000000a.part -a \"$(cat ../mine)\" = data; "
             "test $? = 0 -a -z \"$(ls | grep -x '0000000000000007-[0-9a-f]\\{16\\}.data')\"");
    leave_folder(home);
}

/* ---- Waits for other processes ---- */

static _Atomic bool stops;

static bool is_set(void *context)
{
    (void)context;
    return stops;
}

static void *stop_soon(void *context)
{
    (void)context;
    usleep(200000);
    stops = true;
    return NULL;
}

/* Another process writes the entry, holds the lock of the folder, or leaves no room: such waits can be ended.
 */
Test(remote, waits_for_a_cache_can_be_ended, .timeout = 20)
{
    static const char *const held[] = {"cache/0000000000000007.part", "cache/lock",
                                       "cache/0000000000000008.part", "cache"};
    struct cache_entry own = {.source = 7, .bytes = 5};
    const struct cache_stop stop = {is_set, NULL};
    enter_folder(home);
    cr_assert_eq(cache_open("cache", false), STATUS_OK);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        struct cache_draft draft;
        pthread_t thread;
        int fd;
        const bool turn = i == 3; /* another process writes an entry of unknown size */
        const int other = open(held[i], (turn ? O_DIRECTORY : O_RDWR | O_CREAT) | O_CLOEXEC, 0600);
        cr_assert(other >= 0 && flock(other, LOCK_EX) == 0 && (turn || ftruncate(other, 8) == 0));
        own.bytes = turn ? CACHE_UNKNOWN : 5;
        stops = false;
        cr_assert_eq(pthread_create(&thread, NULL, stop_soon, NULL), 0);
        const double begin_s = timer_now_s();
        cr_expect_eq(cache_begin("cache", &own, 10, &stop, &draft, &fd), STATUS_FAILED, "%s", held[i]);
        const double took_s = timer_now_s() - begin_s;
        cr_expect(took_s > 0.15 && took_s < 4, "%s: %g s", held[i], took_s);
        cr_expect(strstr(status_text(), "reading was stopped"), "%s", status_text());
        cache_abandon(&draft);
        pthread_join(thread, NULL);
        cr_expect_eq(access(held[i], F_OK), 0, "%s of another process was removed", held[i]);
        unlink(held[i]);
        close(other);
    }
    write_entry(10);
    leave_folder(home);
}

/* A stream that is closed does not wait for a process that holds the lock of the cache. */
static void *stop_remote(void *context)
{
    static bool *stopped;
    usleep(200000);
    stopped = ((void **)context)[1];
    remote_stop(((void **)context)[0], stopped, true);
    return NULL;
}

Test(servers, reading_to_a_cache_can_be_ended)
{
    const struct remote_options options = {.cache_dir = "cache"};
    struct remote *remote;
    bool stopped = false;
    char url[128];
    pthread_t thread;
    int fd;
    snprintf(url, sizeof url, "%s/web/plain/counter-000000.tar", getenv("U"));
    cr_assert_eq(remote_open(url, &options, &remote), STATUS_OK, "%s", status_text());
    const int lock = open("cache/lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert(lock >= 0 && flock(lock, LOCK_EX) == 0);
    void *context[] = {remote, &stopped};
    cr_assert_eq(pthread_create(&thread, NULL, stop_remote, context), 0);
    const double begin_s = timer_now_s();
    cr_expect_eq(remote_fd(remote, "counter-000000.tar", &stopped, &fd), STATUS_FAILED);
    cr_expect_lt(timer_now_s() - begin_s, 1);
    pthread_join(thread, NULL);
    close(lock);
    cr_expect_eq(count_files(".part"), 0);
    remote_close(remote);
}

/* A draft that a killed process left neither mixes with the new bytes nor takes room. */
Test(remote, drafts_begin_empty, .timeout = 20)
{
    enter_folder(home);
    SHELL(0, "mkdir cache; printf 'remains of a draft' > cache/0000000000000007.part");
    write_entry(10);
    leave_folder(home);
}

#define LIMIT UINT64_C(10)

/* Adds entries of 3 to 5 bytes, each of its own source. Processes with even numbers do not know the sizes. */
static void fill_cache(int process, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        const bool known = process % 2;
        const size_t bytes = (size_t)(3 + (process + round) % 3);
        struct cache_entry own = {.source = (uint64_t)(process * rounds + round) + 1,
                                  .bytes = known ? bytes : CACHE_UNKNOWN};
        struct cache_draft draft;
        int fd;
        if (cache_begin("cache", &own, LIMIT, NULL, &draft, &fd) != STATUS_OK || fd >= 0 ||
            (known ? pwrite(draft.fd, "abcdef", bytes, 0) != (ssize_t)bytes
                   : cache_append("cache", LIMIT, NULL, &draft, "abcdef", 2) != STATUS_OK ||
                         cache_append("cache", LIMIT, NULL, &draft, "cdef", bytes - 2) != STATUS_OK ||
                         draft.bytes != bytes))
            _exit(1);
        own.bytes = bytes;
        char text[8] = "";
        if (cache_complete("cache", &own, NULL, &draft, &fd) != STATUS_OK || pread(fd, text, 8, 0) < 3 ||
            strncmp(text, "abcdef", bytes) != 0 || text[bytes])
            _exit(2);
        close(fd);
    }
}

/* Returns the number of bytes in the cache, and a hash of the names of its entries. The caller holds its
 * lock. */
static uint64_t bytes_in_cache(uint64_t *names)
{
    uint64_t bytes = 0;
    struct stat info;
    DIR *folder = opendir("cache");
    *names = 0;
    for (struct dirent *found; (found = readdir(folder));)
        if (strstr(found->d_name, ".data"))
            *names += XXH3_64bits(found->d_name, strlen(found->d_name));
    rewinddir(folder);
    for (struct dirent *found; (found = readdir(folder));)
        if (found->d_name[0] != '.' && fstatat(dirfd(folder), found->d_name, &info, 0) == 0)
            bytes += (uint64_t)info.st_size;
    closedir(folder);
    return bytes;
}

/* Processes that start together never exceed the limit while the lock is free. While another process holds
 * it, no entry appears or vanishes. */
Test(remote, processes_together_keep_the_limit, .timeout = 100)
{
    enum { PROCESSES = 6, ROUNDS = 30 };
    pid_t pids[PROCESSES];
    uint64_t most = 0, names, later_names;
    int running = PROCESSES, ended, checks = 0;
    enter_folder(home);
    cr_assert(cache_open("cache", false) == STATUS_OK && cache_trim("cache", LIMIT, NULL) == STATUS_OK);
    const int lock = open("cache/lock", O_RDWR | O_CLOEXEC);
    cr_assert(lock >= 0 && flock(lock, LOCK_EX) == 0); /* until all processes have started */
    for (int i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            close(lock); /* otherwise it stays locked if this test is killed */
            fill_cache(i, ROUNDS);
            _exit(0);
        }
    }
    usleep(100000);
    while (running > 0) {
        uint64_t bytes = bytes_in_cache(&names);
        usleep(1000);
        (void)bytes_in_cache(&later_names);
        cr_expect_eq(names, later_names);
        most = bytes > most ? bytes : most;
        checks++;
        flock(lock, LOCK_UN);
        usleep(5000); /* the processes try at intervals */
        while (waitpid(-1, &ended, WNOHANG) > 0) {
            cr_expect_eq(ended, 0);
            running--;
        }
        flock(lock, LOCK_EX);
    }
    close(lock);
    cr_expect_leq(most, LIMIT, "%llu bytes of at most %llu", (unsigned long long)most,
                  (unsigned long long)LIMIT);
    cr_expect(most >= 6 && checks > 2, "%llu bytes, %d checks", (unsigned long long)most, checks);
    leave_folder(home);
}

/* ---- Other users of data sets ---- */

Test(servers, train_reads_a_remote_set)
{
    SHELL(0, "$P --prepare digits --from digits --encode npy --samples 60 --store shards --shards 2 && "
             "mv digits files/digits");
    SHELL(0, "$P --workload train --variant train-omp --model logreg --batch 10 --epochs 1 "
             "--data \"$U/web/digits/digits-{000000..000001}.tar\"");
}

/* Sets `*count` to the number of requests for files in /slow/, and `*most` to the number that ran at the same
 * time during the last eight. */
static void count_requests(int *count, int *most)
{
    SHELL(0, "python3 -c \"import urllib.request as r; print(r.urlopen('$U/requests/8').read().decode())\"");
    cr_assert_eq(sscanf(out, "%d %d", count, most), 2, "%s", out);
}

/* Rows and checkpoints do not contain the signature, so a run may be resumed with another one. */
Test(servers, train_stores_no_signatures)
{
#define SIGNED "--data \"$U/account/box/digits/?sv=1&sig=se%%2Bcret%%2F\" "
#define SIGNED_RUN \
    "$P --variant train-naive --model logreg --batch 10 --checkpoint k --resume --out r.csv --format csv "
    SHELL(0, "$P --prepare files/digits --from digits --encode npy --samples 60 --store shards --shards 2");
    SHELL(0, SIGNED_RUN "--epochs 1 " SIGNED "&& cat r.csv && ! grep -c cret r.csv k/*.ckpt");
    cr_expect(says("account/box/digits/?...") && !says("cret/") && !says("secret"), "%s", out);
    SHELL(0, SIGNED_RUN "--epochs 2 --data $U/web/digits/digits.index");
    SHELL(0, "$P --variant infer-naive --checkpoint k --loops 1 --format csv " SIGNED);
    cr_expect(!says("cret") && !says("not the test samples"), "%s", out);
    SHELL(2, SIGNED_RUN "--epochs 3 --test-size 1000 " SIGNED);
    cr_expect(!says("cret"), "%s", out);
    SHELL(0, "rm -r k && " SIGNED_RUN "--epochs 1 " SIGNED);
    SHELL_PRINTS(2, "/digits/?... without the secret part; give the whole URL with --data",
                 "$P --variant infer-naive --checkpoint k");
}

#define TRAIN "$P --variant train-naive --model logreg --batch 10 --epochs 1 "

/* When the set is opened, the program requests the size of every shard, and then the shard, to hash the first
 * and the last bytes of its samples. Later, it requests each shard once for the training samples and once for
 * the test samples. Requests for several shards must run at the same time, and the samples must be those of
 * the local set. */
Test(servers, train_requests_shards_at_the_same_time)
{
    int before, count, most;
    SHELL(0, "$P --prepare files/eight --from digits --encode npy --samples 800 --store shards --shards 8 "
             "&& " TRAIN "--data files/eight --export-data a");
    SHELL(0, TRAIN "--data $U/slow/eight/digits.index --export-data b && cmp a b");
    count_requests(&count, &most);
    cr_expect_eq(count, 2 + 8 + 8 + 2 * 8); /* the index, sizes, edges, training and test samples */
    cr_expect_geq(most, 4);                 /* up to 8, but a busy machine sends the last ones later */
    /* Shards without samples of the set are not requested. */
    before = count;
    SHELL(0, TRAIN "--data $U/slow/eight/digits.index --train-size 150 --test-size 5");
    count_requests(&count, &most);
    cr_expect_eq(count - before, 2 + 8 + 8 + 2 + 1);
}

Test(servers, prepare_copies_a_remote_set)
{
    int count, most;
    SHELL(0,
          "$P --prepare copy --from dataset --source $U/slow/set/counter.index --store shards --shards 1 && "
          "$P --variant shards --data copy --loops 1 --warmups 0 --warmup-time 0 --verify");
    count_requests(&count, &most);
    cr_expect_eq(count, 2 + 5 + 5 + 5); /* the index, sizes, edges, samples */
    cr_expect_geq(most, 3);             /* up to 5 */
}

/* Class folders need all labels before the first sample is written. Each shard is read once for its labels,
 * and once for its samples. */
Test(servers, prepare_reads_each_shard_once_for_its_labels)
{
    int count, most;
    SHELL(0, "$P --prepare files/eight --from digits --samples 80 --store shards --shards 8 && "
             "$P --prepare near --from dataset --source files/eight --store imagefolder && "
             "$P --prepare far --from dataset --source $U/slow/eight/digits.index --store imagefolder && "
             "rm near/*.index far/*.index && diff -r near far");
    count_requests(&count, &most);
    cr_expect_eq(count, 2 + 8 + 8 + 8 + 8); /* the index, sizes, edges, labels, samples */
    cr_expect_geq(most, 4);                 /* up to 8 */
}
#endif
