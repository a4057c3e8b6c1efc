/* Data sets at a URL: https://, http://, s3:// and file:// (docs/remote.md). Files are read whole, into
 * memory or into a local cache, or in ranges into memory of the caller. */
#ifndef FDSL_DATA_REMOTE_H
#define FDSL_DATA_REMOTE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "core/portable.h"
#include "core/status.h"

#define REMOTE_CONNECTIONS 16 /* default number of connections */

/* The names of the cache in messages. */
#define REMOTE_CACHE_DIR   OPTION_OR_FIELD("--cache-dir", "cache_dir")
#define REMOTE_CACHE_BYTES OPTION_OR_FIELD("--cache-bytes", "cache_bytes")

/* Rows of the option tables of workloads that use a cache; `dir` and `bytes` are offsets of their values. */
#define CACHE_OPTIONS(dir, bytes, also)                                                                      \
    OPTION_ROW("cache-dir", "DIR", OPTION_TEXT, dir,                                                         \
               .help = "folder that keeps the shards of a URL, and unpacked copies of shards that are "      \
                       "compressed (.tar.gz, .tgz, .tar.zst, .tzst); otherwise, every run downloads shards " \
                       "again, and unpacks them in memory" also),                                            \
        OPTION_ROW("cache-bytes", "N[K|M|G]", OPTION_BYTES, bytes, .fallback = "0", .maximum = 1e18,         \
                   .help = "maximum size of --cache-dir; the least recently used shards are removed first. " \
                           "0 means no limit")

/* Another thread sets `set` to end all functions below that wait: they return STATUS_FAILED within about a
 * second. */
struct remote_cancel {
    atomic_bool set;
};

struct remote_options {
    const char *option;    /* the option that names the data set, for messages; NULL: "data" */
    uint32_t connections;  /* 0: REMOTE_CONNECTIONS */
    const char *cache_dir; /* folder of the cache; NULL: files are read into memory */
    uint64_t cache_bytes;  /* maximum size of the cache; 0: unlimited */
    bool frozen;           /* read from the cache, but do not change it: read other files into memory */
    bool unlisted;         /* the URL is a folder whose files the caller names; do not list it */

    const struct remote_cancel *cancel; /* valid until remote_close(); NULL: the functions cannot be ended */

    /* Called by remote_open() before it uses another library; a failure is relayed. With NULL in place of the
     * URL, opens the libraries that there are. NULL: nothing to do. */
    enum status (*prepare)(const char *url);
};

/* Returns whether a path is a URL. */
static inline bool remote_is(const char *path)
{
    return strstr(path, "://") != NULL;
}

/* Returns the path of a file:// URL, otherwise NULL. */
static inline const char *remote_local(const char *url)
{
    return strncmp(url, "file://", 7) == 0 ? url + 7 : NULL;
}

/* Copies a path, or a URL without its secrets (an Azure signature, a user and a password), for messages and
 * rows. */
static inline void remote_shown(const char *url, char *shown, size_t size)
{
    if (!remote_is(url)) {
        snprintf(shown, size, "%s", url);
        return;
    }
    const char *host = strstr(url, "://") + 3, *user = memrchr(host, '@', strcspn(host, "/?"));
    const char *rest = user ? user : host;
    const int length = (int)strcspn(rest, "?");
    snprintf(shown, size, "%.*s%s%.*s%s", (int)(host - url), url, user ? "..." : "", length, rest,
             rest[length] ? "?..." : "");
}

FDSL_C_BEGIN

/* Opens a data set and lists its files. STATUS_USAGE if the URL does not name a data set; STATUS_UNAVAILABLE
 * in builds without libcurl; STATUS_FAILED with the reason if the server does not answer. The caller closes
 * `remote`, which is NULL after a failure. */
struct remote;
enum status remote_open(const char *url, const struct remote_options *options, struct remote **remote);
void remote_close(struct remote *remote);

/* Returns the listed files, in the order of the list. Names are relative to the URL and valid until
 * remote_close(). A web server has no list of files; for such a server, the list consists of the files that
 * the URL names. */
uint32_t remote_count(const struct remote *remote);
const char *remote_name(const struct remote *remote, uint32_t file);

/* Returns whether the names of files are percent-encoded: on web servers, but not in S3 and Azure. */
bool remote_encoded(const struct remote *remote);

/* Returns whether files are stored in a cache on a file system. */
bool remote_cached(const struct remote *remote);

/* Returns the maximum size of the cache; 0: unlimited, or no cache. */
uint64_t remote_cache_bytes(const struct remote *remote);

/* The functions below are thread safe. `name` may also be a file that is not listed. */

/* Sets `*bytes` to the size of a file. */
enum status remote_size(struct remote *remote, const char *name, uint64_t *bytes);

/* Start to find the size of a file, or to read it, unless this was already done. The functions neither wait
 * nor report errors. remote_ask() does nothing if files are stored in a cache. */
void remote_ask_size(struct remote *remote, const char *name);
void remote_ask(struct remote *remote, const char *name);

/* Reads a whole file and sets `*fd` to a descriptor of its content. The caller must not write to the
 * descriptor. The caller closes the descriptor with remote_done(), or with close() if the content stays
 * mapped; after a failure it is -1. STATUS_FAILED if the file cannot be read, STATUS_EXHAUSTED if there
 * is no room for it in memory or on the disk of the cache, STATUS_USAGE if it is larger than the cache.
 * STATUS_FAILED also if `stopped` is not NULL and `*stopped` is true, or becomes true (remote_stop()). */
enum status remote_fd(struct remote *remote, const char *name, const bool *stopped, int *fd);
void remote_done(struct remote *remote, int fd);

/* If the name is that of a shard that is compressed (data/remote_cache.h), remote_fd() opens its unpacked
 * copy in the cache, or in memory. The file itself is in the cache only until it is unpacked. This function
 * opens the file itself, as remote_fd() opens others. */
enum status remote_packed_fd(struct remote *remote, const char *name, int *fd);

/* Returns whether ranges of a file can be read: its size is known, the server sends ranges, and it says which
 * version of the file they belong to. */
bool remote_ranged(struct remote *remote, const char *name);

/* Starts to read `bytes` bytes, at least 1, from offset `first` of a file into `to`, and sets `*begun`. The
 * next free connection reads them in one request. The caller must end each transfer with remote_await(),
 * which waits for the bytes and frees the transfer. STATUS_FAILED from both if the range cannot be read, or
 * if the file has another version than at its first request. Both ignore the cache. `stopped` is as for
 * remote_fd(). */
struct transfer;
enum status remote_begin(struct remote *remote, const char *name, uint64_t first, uint64_t bytes, uint8_t *to,
                         struct transfer **begun);
enum status remote_await(struct remote *remote, struct transfer *transfer, const bool *stopped);

/* Ends the requests of a transfer that is not needed any more; remote_await() then returns STATUS_FAILED
 * within about a second, without further attempts. Has no effect if all bytes have arrived. */
void remote_abandon(struct remote *remote, struct transfer *transfer);

/* Sets `*stopped` to `value`. Calls that wait with this flag then abandon their requests. The functions above
 * read the flag, and this function writes it, with a lock of `remote`. */
void remote_stop(struct remote *remote, bool *stopped, bool value);

/* Reads a whole file of at most `limit` bytes. Sets `*text` to its content and a terminating zero, in memory
 * that the caller frees, and `*size` to the number of bytes without the zero. */
enum status remote_text(struct remote *remote, const char *name, uint64_t limit, char **text, size_t *size);

FDSL_C_END

#endif
