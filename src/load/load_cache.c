/* Brings the page cache into the requested state before a run of `load`, and counts the resident pages of the
 * data set. */
#include "load/input.h"

#include <stdlib.h>
#include <unistd.h>

#include "data/remote.h"
#include "load/load_parts.h"

/* Opens every file and calls `act` with it. With load->skip, skips files that cannot be opened. */
static enum status each_file(const struct load *load,
                             enum status (*act)(void *context, int fd, uint64_t bytes), void *context)
{
    const struct dataset *dataset = load->dataset;
    for (uint32_t f = 0; f < dataset->file_count; f++) {
        int fd;
        enum status status = dataset_file_open(dataset, f, 0, &fd);
        if (status == STATUS_FAILED && load->skip)
            continue;
        TRY(status);
        status = act(context, fd, dataset->files[f].bytes);
        close(fd);
        if (status != STATUS_OK)
            return status_prefix(status, "%s/%s", dataset->path, dataset->files[f].name);
    }
    return STATUS_OK;
}

static enum status count_file(void *context, int fd, uint64_t bytes)
{
    return cache_count(fd, bytes, context);
}

static enum status evict_file(void *context, int fd, uint64_t bytes)
{
    (void)context, (void)bytes;
    return cache_evict(fd);
}

#define FILL_BYTES ((uint64_t)1 << 20)

static enum status fill_file(void *context, int fd, uint64_t bytes)
{
    (void)bytes;
    return cache_fill(fd, context, FILL_BYTES);
}

enum status load_resident(const struct load *load, struct cache_pages *pages)
{
    *pages = (struct cache_pages){.hidden = load->dataset->remote && !remote_cached(load->dataset->remote)};
    return pages->hidden ? STATUS_OK : each_file(load, count_file, pages);
}

bool load_pages_hidden(const struct dataset *dataset)
{
    struct cache_pages pages = {0};
    int fd;
    for (uint32_t f = 0; pages.all == 0 && !pages.hidden && f < dataset->file_count; f++)
        if (dataset->files[f].bytes > 0 && dataset_file_open(dataset, f, 0, &fd) == STATUS_OK) {
            pages.hidden = cache_count(fd, 1, &pages) == STATUS_OK && pages.hidden;
            close(fd);
        }
    return pages.hidden;
}

#define COLD_SHARE_MAX 0.01
#define WARM_READS     3 /* maximum number of passes over all files; other processes may evict pages */

/* Reads all files, up to WARM_READS times, until their pages stay in the page cache. */
static enum status warm_up(const struct load *load, struct cache_pages *pages)
{
    FREED void *buffer = malloc(FILL_BYTES);
    TRY(ALLOCATED(buffer, "out of memory"));
    for (int i = 0; i < WARM_READS; i++) {
        TRY(each_file(load, fill_file, buffer));
        TRY(load_resident(load, pages));
        if (pages->hidden || cache_share(pages) >= WARM_SHARE_MIN)
            break;
    }
    return STATUS_OK;
}

enum status load_settle_cache(const struct load *load, struct cache_pages *pages)
{
    if (load->cache == LOAD_COLD) {
        TRY(each_file(load, evict_file, NULL));
        if (!load->rates_only) /* with it, other files stay cached, because runs alternate with warm ones */
            cache_drop_all();
    }
    TRY(load->cache == LOAD_WARM ? warm_up(load, pages) : load_resident(load, pages));
    if (load->cache == LOAD_COLD && !load->rates_only)
        cache_drop_all(); /* drop the directory entries and inodes that were cached when files were opened to
                           * count pages */
    double share = cache_share(pages);
    if (load->cache != LOAD_ANY && pages->hidden)
        return status_set(STATUS_FAILED,
                          "--cache %s: Linux reports resident pages only to processes that own the "
                          "files or may write them; use --cache any",
                          load->cache == LOAD_COLD ? "cold" : "warm");
    if (load->cache == LOAD_COLD && share > COLD_SHARE_MAX)
        return status_set(
            STATUS_FAILED,
            "--cache cold: %.1f %% of the data set stays in the page cache (the file system is in "
            "memory, or another process uses the files); use --cache any",
            100 * share);
    if (load->cache == LOAD_WARM && share < WARM_SHARE_MIN)
        return status_set(STATUS_FAILED,
                          "--cache warm: only %.1f %% of the data set is in the page cache after reading it "
                          "%d times (too little memory, or another process evicts pages); use --cache any",
                          100 * share, WARM_READS);
    return STATUS_OK;
}
