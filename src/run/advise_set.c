/* The data set of `advise`: its facts, and the part of it that is measured. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "data/dataset_open.h"
#include "data/image.h"
#include "data/plain.h"
#include "data/remote.h"
#include "run/advise_parts.h"

#define CODED_RES 224 /* default of --out-res for JPEG and PNG files */

/* Decodes the image of a sample, and sets the format and the size of the set's images from it. */
static enum status look_at_image(const struct dataset *dataset, uint32_t number,
                                 struct image_scratch *scratch, struct advise_set *set)
{
    struct plain plain = {.dataset = dataset, .fd = -1};
    const struct dataset_sample *sample = &dataset->samples[number];
    const struct dataset_member *member = &dataset->members[sample->member + sample->image % sample->members];
    struct image image;
    bool is_image = false;
    FREED uint8_t *bytes = malloc(member->size + 1);
    enum status status = bytes ? plain_bytes(&plain, member, member->size, bytes)
                               : status_set(STATUS_EXHAUSTED, "out of memory for an image");
    if (status == STATUS_OK)
        status =
            image_decode(members_format(member->extension), bytes, member->size, scratch, &image, &is_image);
    if (status == STATUS_OK && !is_image)
        status = status_set(STATUS_USAGE,
                            "'%s' is not an image, and advise compares images; name them with "
                            "--image",
                            member->extension);
    if (status == STATUS_OK) {
        set->coded = image_format(members_format(member->extension), bytes, member->size) != IMAGE_NPY;
        set->channels = set->coded || image.channels == 3 ? 3 : 1;
        if (!set->coded)
            set->res = image.height > image.width ? image.height : image.width;
    }
    plain_close(&plain);
    return status == STATUS_OK ? status
                               : status_prefix(status, "%s/%s: sample '%s'", dataset->path,
                                               dataset->files[member->file].name, sample->key);
}

/* Looks at the first image or, with --on-error skip, at the first image that can be read. */
static enum status look_at_images(const struct advise_options *options, const struct dataset *dataset,
                                  struct advise_set *set)
{
    struct image_scratch scratch = {0};
    enum status status = look_at_image(dataset, 0, &scratch, set);
    for (uint32_t i = 1; status == STATUS_FAILED && options->on_error && i < dataset->sample_count; i++)
        status = look_at_image(dataset, i, &scratch, set);
    image_scratch_close(&scratch);
    if (status != STATUS_FAILED || options->on_error)
        return status;
    return dataset_advise_skip(STATUS_FAILED);
}

static enum status cannot_link(const char *path)
{
    return status_set(STATUS_FAILED, "%s: cannot link a shard: %s", path, strerror(errno));
}

static void name_link(const struct advise_set *set, uint32_t shard, char *path, size_t size)
{
    snprintf(path, size, "%s/subset/%06u.tar", set->folder, shard);
}

/* Creates a folder with links to the first shards: as many as fit into `most` bytes, but at least one. */
static enum status link_shards(const struct dataset *dataset, uint64_t most, struct advise_set *set)
{
    char whole[PATH_MAX], target[PATH_MAX * 2], path[PATH_MAX + 64];
    snprintf(set->data, sizeof set->data, "%s/subset", set->folder);
    if (!realpath(remote_is(dataset->path) ? remote_local(dataset->path) : dataset->path, whole) ||
        mkdir(set->data, 0700) != 0)
        return cannot_link(set->data);
    set->measured_files = 0;
    set->measured_bytes = 0;
    for (uint32_t i = 0; i < dataset->file_count; i++) {
        if (i > 0 && set->measured_bytes + dataset->files[i].bytes > most)
            break;
        snprintf(target, sizeof target, "%s/%s", whole, dataset->files[i].name);
        name_link(set, i, path, sizeof path);
        if (symlink(target, path) != 0)
            return cannot_link(path);
        set->measured_bytes += dataset->files[i].bytes;
        set->measured_files++;
    }
    return STATUS_OK;
}

/* Creates the temporary folder. Holds signals back until advise_set_close() has removed the folder. */
static enum status open_folder(struct advise_set *set)
{
    const char *temporary = getenv("TMPDIR");
    file_hold_signals();
    snprintf(set->folder, sizeof set->folder, "%s/fdsl-advise-XXXXXX",
             temporary && *temporary ? temporary : "/tmp");
    if (mkdtemp(set->folder))
        return STATUS_OK;
    *set->folder = '\0';
    return status_set(STATUS_FAILED, "cannot create a temporary folder: %s; set TMPDIR", strerror(errno));
}

void advise_set_close(const struct advise_set *set)
{
    static const char *const files[] = {"synth.csv", "load.csv"};
    char path[PATH_MAX + 64];
    if (!*set->folder) {
        file_release_signals();
        return;
    }
    for (uint32_t i = 0; i < set->measured_files; i++) {
        name_link(set, i, path, sizeof path);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/subset", set->folder);
    rmdir(path);
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        snprintf(path, sizeof path, "%s/%s", set->folder, files[i]);
        unlink(path);
    }
    rmdir(set->folder);
    file_release_signals();
}

static enum status look(const struct advise_options *options, const struct dataset *dataset,
                        struct advise_set *set)
{
    set->shards = dataset->shards;
    set->samples = dataset->sample_count;
    set->bytes = dataset->shards ? 0 : dataset->bytes;
    for (uint32_t i = 0; dataset->shards && i < dataset->file_count; i++)
        set->bytes += dataset->files[i].bytes;
    set->files = set->measured_files = dataset->shards ? dataset->file_count : 0;
    set->measured_bytes = set->bytes;
    if (snprintf(set->data, sizeof set->data, "%s", options->data) >= (int)sizeof set->data)
        return status_set(STATUS_USAGE, "--data: the name is too long; use a shorter path");
    TRY(look_at_images(options, dataset, set));
    TRY(open_folder(set));
    if (options->out_res)
        set->res = (uint32_t)options->out_res;
    if (!dataset->shards || set->remote || set->files < 2 || set->bytes <= options->subset)
        return STATUS_OK;
    return link_shards(dataset, options->subset, set);
}

enum status advise_set_open(const struct advise_options *options, struct advise_set *set)
{
    struct members members;
    const struct remote_options remote = {.cache_dir = options->cache_dir,
                                          .cache_bytes = options->cache_bytes};
    *set = (struct advise_set){.res = CODED_RES, .channels = 1};
    TRY(members_parse(options->image, options->label, options->member, &members));
    CLOSED_BY(dataset_close) struct dataset dataset = {0};
    TRY(dataset_open(options->data, options->on_error, &members, &remote, &dataset));
    set->remote = dataset.remote;
    if (!set->remote && options->cache_dir)
        return status_set(STATUS_USAGE, "--cache-dir is for data at a URL; drop it");
    return look(options, &dataset, set);
}
