#include "data/remote.h"

#include <errno.h>
#include <inttypes.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "data/remote_cache.h"
#include "data/remote_parts.h"

enum status remote_out_of_memory(void)
{
    return status_set(STATUS_EXHAUSTED, "out of memory for a remote data set");
}

/* ---- Files ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->name, ((const struct file *)b)->name);
}

struct file *remote_find_file(struct remote *remote, const char *name)
{
    struct file wanted = {.name = name};
    struct file **found = tfind(&wanted, &remote->tree, by_name);
    if (found)
        return *found;
    struct file *file = calloc(1, sizeof *file);
    if (file)
        file->name = strdup(name);
    if (!file || !file->name || !tsearch(file, &remote->tree, by_name)) {
        if (file)
            free((char *)file->name);
        free(file);
        return NULL;
    }
    return file;
}

/* Returns whether the version of a file is known. */
static bool is_known(struct remote *remote, const struct file *file)
{
    pthread_mutex_lock(&remote->lock);
    bool known = file->known;
    pthread_mutex_unlock(&remote->lock);
    return known;
}

/* Stores what a server says about a file. Two contents with the same version could be mixed in one file, so
 * a file whose version is not exact is read in one piece. */
static void set_version(struct remote *remote, struct file *file, const struct http_reply *reply)
{
    pthread_mutex_lock(&remote->lock);
    if (!file->known) {
        file->version = reply->version;
        file->ranged = reply->ranged && reply->version.exact;
        file->known = true;
    }
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_examine(struct remote *remote, struct http *http, struct file *file, int tries)
{
    char url[REMOTE_URL_MAX], shown[REMOTE_URL_MAX];
    uint8_t byte;
    struct http_reply reply;
    if (is_known(remote, file))
        return STATUS_OK;
    snprintf(shown, sizeof shown, "%s/%s", remote->shown, file->name);
    TRY(remote_url_of(remote, file->name, url));
    struct http_request request = remote_request(remote, url, shown);
    request.wanted = 1;
    request.to = &byte;
    if (strpbrk(file->name, "*["))
        request.absent = "patterns such as * are not expanded: name the numbers, as in {000..099}";
    else if (remote->braces)
        request.absent = "check the address, and the names that the braces stand for";
    else if (remote->count != 1 || remote->files[0] != file)
        request.absent = "the index or list of the data set names it: add the file, or correct the list";
    TRY(http_get(http, &request, tries, &reply));
    if (!reply.version.exact && reply.version.modified && remote->options.cache_dir) {
        /* If the file was written in this second, its date is exact from the next second on. */
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        TRY(http_get(http, &request, tries, &reply));
    }
    if (reply.version.bytes == HTTP_UNKNOWN)
        return status_set(STATUS_FAILED, "%s: the server does not say how long the file is", shown);
    set_version(remote, file, &reply);
    return STATUS_OK;
}

/* Examines a file with the connection of `remote`, which one thread at a time can use. */
static enum status examine_alone(struct remote *remote, struct file *file, int tries)
{
    pthread_mutex_lock(&remote->alone);
    enum status status = remote_examine(remote, remote->http, file, tries);
    pthread_mutex_unlock(&remote->alone);
    return status;
}

/* ---- Opening ---- */

/* Removes entries of the cache that exceed the limit, unless a file of this data set is itself larger than
 * the limit: such a limit is a mistake, and reading the file fails. */
static enum status trim_cache(const struct remote *remote)
{
    const struct remote_options *options = &remote->options;
    bool fits = !options->frozen && !options->unlisted;
    for (uint32_t i = 0; i < remote->count; i++)
        fits = fits && (!remote->files[i]->known || !options->cache_bytes ||
                        remote->files[i]->version.bytes <= options->cache_bytes);
    return fits ? cache_trim(options->cache_dir, options->cache_bytes) : STATUS_OK;
}

static enum status open_all(const char *url, struct remote *remote)
{
    FREED char *leaf = NULL;
    TRY(remote_split(url, remote, &leaf));
    TRY(remote_find_service(remote, leaf));
    TRY(http_open(&remote->http));
    if (remote->options.cache_dir)
        TRY(cache_open(remote->options.cache_dir, remote->options.frozen));
    if (!remote->options.unlisted)
        TRY(remote_list(remote, leaf));
    if (remote->count && !remote->files[0]->known)
        TRY(examine_alone(remote, remote->files[0], REMOTE_TRIES_FIRST));
    if (remote->options.cache_dir)
        TRY(trim_cache(remote));
    return remote_start_threads(remote);
}

enum status remote_open(const char *url, const struct remote_options *options, struct remote **remote)
{
    struct remote *opened = *remote = calloc(1, sizeof *opened);
    if (!opened)
        return remote_out_of_memory();
    if (options)
        opened->options = *options;
    if (getrandom(&opened->run, sizeof opened->run, 0) != sizeof opened->run)
        opened->run = (uint64_t)time(NULL) ^ (uint64_t)getpid() << 32;
    pthread_mutex_init(&opened->lock, NULL);
    pthread_mutex_init(&opened->alone, NULL);
    pthread_cond_init(&opened->work, NULL);
    pthread_cond_init(&opened->done, NULL);
    enum status status = open_all(url, opened);
    if (status != STATUS_OK) {
        remote_close(opened);
        *remote = NULL;
    }
    return status;
}

static struct cache_entry entry_of(const struct remote *remote, const struct file *file);

static void free_file(void *node)
{
    struct file *file = node;
    if (file->transfer)
        remote_close_transfer(file->transfer, false);
    free((char *)file->name);
    free(file);
}

void remote_close(struct remote *remote)
{
    if (!remote)
        return;
    pthread_mutex_lock(&remote->lock);
    remote->stopping = true;
    pthread_cond_broadcast(&remote->work);
    pthread_mutex_unlock(&remote->lock);
    for (uint32_t i = 0; i < remote->thread_count; i++)
        pthread_join(remote->threads[i], NULL);
    for (struct file *file = remote->passing; file; file = file->passing_later) {
        const struct cache_entry entry = entry_of(remote, file);
        cache_remove(remote->options.cache_dir, &entry);
    }
    tdestroy(remote->tree, free_file);
    while (remote->spare_count > 0)
        close(remote->spare[--remote->spare_count]);
    http_close(remote->http);
    explicit_bzero(&remote->credentials, sizeof remote->credentials);
    if (remote->suffix)
        explicit_bzero(remote->suffix, strlen(remote->suffix)); /* the signature of Azure */
    free(remote->threads);
    free(remote->files);
    free(remote->base);
    free(remote->shown);
    free(remote->suffix);
    free(remote->prefix);
    free(remote->identity);
    free(remote);
}

uint32_t remote_count(const struct remote *remote)
{
    return remote->count;
}

const char *remote_name(const struct remote *remote, uint32_t file)
{
    return remote->files[file]->name;
}

bool remote_encoded(const struct remote *remote)
{
    return remote->service == SERVICE_WEB;
}

bool remote_cached(const struct remote *remote)
{
    return remote->options.cache_dir != NULL;
}

/* ---- The cache ---- */

/* The name in the cache is a hash of a text that says which bytes are meant. The text begins with a number,
 * which changes with its format. URLs begin with a letter, and texts before number 2 began with the URL. */
static struct cache_entry entry_of(const struct remote *remote, const struct file *file)
{
    char text[3 * REMOTE_URL_MAX];
    const struct http_version *version = &file->version;
    const bool strong = *version->tag && strncmp(version->tag, "W/", 2) != 0; /* the date does not matter */
    struct cache_entry entry = {.bytes = version->bytes};
    int length =
        snprintf(text, sizeof text, "2\n%s%s%s\n%s\n%lld\n%" PRIu64 "\n%016" PRIx64, remote->base, file->name,
                 remote->identity, version->tag, strong ? 0 : (long long)version->modified, version->bytes,
                 version->exact ? 0 : remote->run);
#ifdef HAVE_XXHASH
    entry.source = XXH3_64bits(text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
#else
    (void)length;
#endif
    return entry;
}

/* Records that a file is cached for this run only, and warns about the first. */
static void note_passing(struct remote *remote, struct file *file)
{
    pthread_mutex_lock(&remote->lock);
    bool first = !remote->passing;
    if (!file->passing) {
        file->passing = true;
        file->passing_later = remote->passing;
        remote->passing = file;
    }
    pthread_mutex_unlock(&remote->lock);
    if (first)
        status_warn(
            "%s/%s: the server sends neither an ETag nor a Last-Modified that identifies the content; "
            "--cache-dir keeps such files during this run only",
            remote->shown, file->name);
}

/* Reads a file into a draft of the cache. */
static enum status fill_draft(struct remote *remote, struct file *file, const struct cache_draft *draft)
{
    struct transfer *transfer = NULL;
    int fd = dup(draft->fd);
    if (fd < 0)
        return status_set(STATUS_EXHAUSTED, "--cache-dir: %s", strerror(errno));
    pthread_mutex_lock(&remote->lock);
    enum status status = remote_start_transfer(remote, file, fd, &transfer);
    if (status == STATUS_OK)
        status = remote_await(remote, transfer);
    pthread_mutex_unlock(&remote->lock);
    if (transfer)
        remote_close_transfer(transfer, false);
    return status;
}

static enum status read_to_cache(struct remote *remote, struct file *file, int *fd)
{
    const char *folder = remote->options.cache_dir;
    const struct cache_entry entry = entry_of(remote, file);
    TRY(cache_check_fits(&entry, remote->options.cache_bytes));
    TRY(cache_find(folder, &entry, remote->options.frozen, fd));
    if (*fd >= 0)
        return STATUS_OK;
    if (remote->options.frozen)
        return remote_read_to_memory(remote, file, fd);
    if (!file->version.exact)
        note_passing(remote, file);
    CLOSED_BY(cache_abandon) struct cache_draft draft;
    TRY(cache_begin(folder, &entry, remote->options.cache_bytes, &draft, fd));
    if (*fd >= 0)
        return STATUS_OK;
    TRY(fill_draft(remote, file, &draft));
    return cache_complete(folder, &entry, &draft, fd);
}

/* ---- Reading ---- */

/* Returns the file with this name. On success, its size and version are known. If a connection has failed to
 * find them, this function tries again, so that the calling thread gets the error message. */
static enum status known_file(struct remote *remote, const char *name, struct file **found)
{
    pthread_mutex_lock(&remote->lock);
    struct file *file = *found = remote_find_file(remote, name);
    while (file && file->examining)
        pthread_cond_wait(&remote->done, &remote->lock);
    pthread_mutex_unlock(&remote->lock);
    return file ? examine_alone(remote, file, REMOTE_TRIES) : remote_out_of_memory();
}

void remote_ask_size(struct remote *remote, const char *name)
{
    pthread_mutex_lock(&remote->lock);
    struct file *file = remote_find_file(remote, name);
    if (file)
        remote_start_examining(remote, file);
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_size(struct remote *remote, const char *name, uint64_t *bytes)
{
    struct file *file;
    TRY(known_file(remote, name, &file));
    *bytes = file->version.bytes;
    return STATUS_OK;
}

void remote_ask(struct remote *remote, const char *name)
{
    if (remote_cached(remote))
        return;
    pthread_mutex_lock(&remote->lock);
    struct file *file = remote_find_file(remote, name);
    if (file && file->known)
        (void)remote_start_in_memory(remote, file); /* remote_fd() reports errors */
    else if (file) {
        file->asked = true;
        remote_start_examining(remote, file);
    }
    pthread_mutex_unlock(&remote->lock);
}

enum status remote_fd(struct remote *remote, const char *name, int *fd)
{
    struct file *file;
    *fd = -1;
    TRY(known_file(remote, name, &file));
    return (remote_cached(remote) ? read_to_cache : remote_read_to_memory)(remote, file, fd);
}

enum status remote_text(struct remote *remote, const char *name, uint64_t limit, char **text, size_t *size)
{
    uint64_t bytes;
    *text = NULL;
    TRY(remote_size(remote, name, &bytes));
    if (bytes > limit)
        return status_set(STATUS_FAILED,
                          "%s/%s: the file has %" PRIu64 " bytes; at most %" PRIu64 " are read",
                          remote->shown, name, bytes, limit);
    int fd;
    TRY(remote_fd(remote, name, &fd));
    *text = malloc(bytes + 1);
    bool done = *text != NULL;
    for (*size = 0; done && *size < bytes;) {
        ssize_t count = pread(fd, *text + *size, bytes - *size, (off_t)*size);
        done = count > 0;
        *size += done ? (size_t)count : 0;
    }
    remote_done(remote, fd);
    if (!done)
        return status_set(STATUS_FAILED, "%s/%s: cannot read it", remote->shown, name);
    (*text)[bytes] = '\0';
    return STATUS_OK;
}
