/* Lists the samples of shards without an index of --prepare, by reading the tar headers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/dataset_parts.h"
#include "data/key.h"
#include "data/tar.h"

#define WINDOW_BYTES 8192 /* size of a read while searching for headers */

/* State of scanning one shard. */
struct scan {
    struct dataset *dataset;
    int fd;
    uint8_t window[WINDOW_BYTES];
    uint8_t *large; /* for requests larger than the window; owned */
    struct tar_parser parser;
};

/* Adds the member `found` to the current sample. If the member's key differs from the sample's key, begins a
 * new sample. Ignores members without a key. */
static enum status scan_member(struct scan *scan, const struct tar_member *found)
{
    struct dataset *dataset = scan->dataset;
    uint32_t file = dataset->file_count - 1;
    size_t length;
    const char *extension;
    if (!key_split(found->name, &length, &extension))
        return STATUS_OK;
    struct dataset_sample *sample = dataset->sample_count > dataset->shard_first[file]
                                        ? &dataset->samples[dataset->sample_count - 1]
                                        : NULL;
    if (!sample || strlen(sample->key) != length || memcmp(sample->key, found->name, length) != 0) {
        const char *key = NULL;
        TRY(dataset_keep_name(dataset, found->name, length, &key));
        TRY(dataset_add_sample(dataset, key));
        sample = &dataset->samples[dataset->sample_count - 1];
    }
    struct dataset_member member = {.offset = found->data, .size = found->size, .file = file};
    TRY(dataset_keep_name(dataset, extension, strlen(extension), &member.extension));
    TRY(dataset_add_member(dataset, member));
    sample->members++;
    return STATUS_OK;
}

/* Reads the shard's bytes from the parser's position on: at least `need` bytes, or all remaining bytes of the
 * shard. */
static enum status scan_bytes(struct scan *scan, uint64_t shard_bytes, size_t need, const uint8_t **bytes,
                              size_t *available)
{
    uint64_t left = scan->parser.position < shard_bytes ? shard_bytes - scan->parser.position : 0;
    uint8_t *to = scan->window;
    size_t wanted = need > sizeof scan->window ? need : sizeof scan->window;
    if (wanted > left)
        wanted = (size_t)left;
    if (wanted > sizeof scan->window) {
        free(scan->large);
        to = scan->large = malloc(wanted);
        if (!to)
            return dataset_out_of_memory();
    }
    ssize_t count = pread(scan->fd, to, wanted, (off_t)scan->parser.position);
    if (count < 0 || (size_t)count < wanted)
        return status_set(STATUS_FAILED, "offset %llu: cannot read: %s",
                          (unsigned long long)scan->parser.position,
                          count < 0 ? strerror(errno) : "the file was truncated");
    *bytes = to;
    *available = wanted;
    return STATUS_OK;
}

static enum status scan_open_shard(struct scan *scan, uint64_t shard_bytes)
{
    size_t need = TAR_BLOCK_BYTES;
    uint64_t at = 0; /* offset of `bytes` in the shard */
    const uint8_t *bytes = NULL;
    size_t available = 0;
    tar_open(&scan->parser, shard_bytes);
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        uint64_t skipped = scan->parser.position - at;
        if (!bytes || skipped + need > available) {
            TRY(scan_bytes(scan, shard_bytes, need, &bytes, &available));
            at = scan->parser.position;
            skipped = 0;
        }
        TRY(tar_next(&scan->parser, bytes + skipped, available - (size_t)skipped,
                     at + available >= shard_bytes, &member, &step, &need));
        if (step == TAR_END)
            return STATUS_OK;
        if (step == TAR_MEMBER) {
            TRY(scan_member(scan, &member));
            need = TAR_BLOCK_BYTES;
        }
    }
}

static enum status scan_file(struct scan *scan, uint32_t file)
{
    struct stat status_;
    struct dataset *dataset = scan->dataset;
    uint32_t first = dataset->sample_count;
    if (fstat(scan->fd, &status_) != 0 || !S_ISREG(status_.st_mode))
        return status_set(STATUS_FAILED, "not a regular file");
    dataset->files[file].bytes = (uint64_t)status_.st_size;
    enum status status = scan_open_shard(scan, (uint64_t)status_.st_size);
    dataset->files[file].global = scan->parser.has_global;
    if (status == STATUS_OK && dataset->sample_count == first)
        status = status_set(STATUS_FAILED, "the shard is empty");
    if (status != STATUS_OK && dataset->sample_count > first)
        dataset->sample_count--; /* this sample may be incomplete */
    return status;
}

/* Compares a shard that was read to its end with the shard's entry in the wids index. */
static enum status check_listed(const struct wids_shard *listed, uint64_t samples, uint64_t bytes)
{
    if (samples != listed->samples)
        return status_set(STATUS_FAILED, "the shard holds %llu samples but its wids index says %llu",
                          (unsigned long long)samples, (unsigned long long)listed->samples);
    if (listed->bytes && bytes != listed->bytes)
        return status_set(STATUS_FAILED, "the shard has %llu bytes but its wids index says %llu",
                          (unsigned long long)bytes, (unsigned long long)listed->bytes);
    return STATUS_OK;
}

enum status dataset_scan_shard(struct dataset *dataset, const char *name, const struct wids_shard *listed)
{
    TRY(dataset_add_file(dataset, name, 0));
    uint32_t file = dataset->file_count - 1, first = dataset->sample_count;
    dataset->shard_first[file] = first;
    struct scan *scan = calloc(1, sizeof *scan);
    if (!scan)
        return dataset_out_of_memory();
    scan->dataset = dataset;
    enum status status = dataset_file_open(dataset, file, 0, &scan->fd);
    if (status == STATUS_OK)
        status = scan_file(scan, file);
    uint64_t found = dataset->sample_count - first;
    if (status == STATUS_OK && listed)
        status = check_listed(listed, found, dataset->files[file].bytes);
    if (status != STATUS_OK && scan->fd >= 0)
        status_prefix(status, "%s/%s", dataset->path, name);
    if (scan->fd >= 0)
        dataset_file_close(dataset, scan->fd);
    free(scan->large);
    free(scan);
    if (status == STATUS_OK)
        return STATUS_OK;
    uint64_t left = listed && listed->samples > found ? listed->samples - found : 0;
    return dataset_skip(dataset, status, listed ? left : DATASET_UNKNOWN);
}
