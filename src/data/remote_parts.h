/* Internal interface of the files that read data sets at a URL: remote.c (opens data sets and returns files),
 * remote_url.c (URLs and requests), remote_list.c (lists of files) and remote_transfer.c (connections). No
 * other file includes this header. */
#ifndef FDSL_DATA_REMOTE_PARTS_H
#define FDSL_DATA_REMOTE_PARTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"
#include "data/http.h"
#include "data/remote.h"
#include "data/s3.h"

#define REMOTE_TRIES       6 /* attempts per request */
#define REMOTE_TRIES_FIRST 2 /* attempts of the first request: a wrong address should fail soon */
#define REMOTE_SPARE_MAX   4 /* files in memory that are kept for the next transfers */
#define REMOTE_URL_MAX     8192

enum service { SERVICE_WEB, SERVICE_S3, SERVICE_AZURE };

struct transfer;

struct file {
    const char *name; /* owned */
    struct http_version version;
    bool known;         /* `version` and `ranged` are set */
    bool ranged;        /* the file can be read in ranges */
    bool passing;       /* in the cache, but only for this run; see `remote->passing` */
    bool examining;     /* a connection requests the version, or will do so */
    bool asked;         /* a transfer into memory begins when the version is known */
    struct file *later; /* next in the queue of files to examine */
    struct file *passing_later;
    struct transfer *transfer; /* running or complete; NULL if there is none, or remote_fd() has taken it */
};

/* A file that is being read. Connections take pieces of it, in order. */
struct transfer {
    struct file *file;
    struct transfer *later; /* next in the queue of transfers that have pieces to take */
    int fd;
    uint64_t piece_bytes, next;
    uint64_t left; /* bytes that have not arrived */
    enum status status;
    char failure[1024];
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

    struct file **files; /* the listed files; files that are not listed are only in `tree` */
    uint32_t count, room;
    void *tree; /* tsearch() tree of all files, by name */

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct transfer *queue; /* transfers with pieces to take */
    struct file *unknown;   /* files to examine */
    struct file *passing;   /* files to remove from the cache when the data set is closed */
    bool stopping;
    pthread_t *threads;
    uint32_t thread_count;
    int spare[REMOTE_SPARE_MAX]; /* files in memory that can be reused */
    uint32_t spare_count;
    pthread_mutex_t alone; /* protects `http` */
    struct http *http;     /* for lists, and for files that no connection examines */
};

/* Sets a message and returns STATUS_EXHAUSTED. */
enum status remote_out_of_memory(void);

/* Returns the file with this name, and adds it if it is new; NULL if memory runs out. The caller holds
 * `remote->lock`. */
struct file *remote_find_file(struct remote *remote, const char *name);

/* ---- remote_url.c ---- */

/* Splits the URL of a data set into `remote->base`, `shown` and `suffix`. `*leaf` is the last component of
 * the path if it names files; otherwise NULL, and the data set consists of all files. The caller frees
 * `*leaf`. */
enum status remote_split(const char *url, struct remote *remote, char **leaf);

/* Sets `remote->service`, `identity` and, for S3 and Azure, the prefix. For S3, also sets the URL, region and
 * credentials. Removes the percent-encoding of `leaf`, which may be NULL. */
enum status remote_find_service(struct remote *remote, char *leaf);

/* Writes the URL of a file. STATUS_FAILED if it is too long. */
enum status remote_url_of(const struct remote *remote, const char *name, char url[REMOTE_URL_MAX]);

/* Returns a GET request, which is signed if the data set is on S3 and there are credentials. `shown` is the
 * URL for messages. Both strings must outlive the request. The caller sets the fields that say what to
 * read. */
struct http_request remote_request(const struct remote *remote, const char *url, const char *shown);

/* ---- remote_list.c ---- */

/* Lists the files of the data set: those that `leaf` names, or all with the prefix if `leaf` is NULL.
 * STATUS_USAGE if there are none, or if the server has no list. */
enum status remote_list(struct remote *remote, const char *leaf);

/* Requests the first byte of a file, to find its size, its version, and whether the server can send ranges.
 * If another thread has found them, does nothing. */
enum status remote_examine(struct remote *remote, struct http *http, struct file *file, int tries);

/* ---- remote_transfer.c ---- */

/* Starts one thread per connection. remote_close() joins the threads. */
enum status remote_start_threads(struct remote *remote);

/* Queues a file whose version is not known yet for a connection to examine. The caller holds `remote->lock`.
 */
void remote_start_examining(struct remote *remote, struct file *file);

/* Starts to read a file into `fd`, which already has the size of the file. Takes ownership of `fd`, even
 * after a failure. The caller holds `remote->lock`. */
enum status remote_start_transfer(struct remote *remote, struct file *file, int fd,
                                  struct transfer **started);

/* Waits until all pieces have arrived. The caller holds `remote->lock`. */
enum status remote_await(struct remote *remote, const struct transfer *transfer);

/* Starts a transfer into memory, unless the file already has a transfer. The caller holds `remote->lock`. */
enum status remote_start_in_memory(struct remote *remote, struct file *file);

/* Reads a whole file into memory, and sets `*fd` to its descriptor; on failure, `*fd` is -1 or unchanged. */
enum status remote_read_to_memory(struct remote *remote, struct file *file, int *fd);

/* Frees a transfer. Closes its descriptor unless `keep_file` is set. */
void remote_close_transfer(struct transfer *transfer, bool keep_file);

#endif
