/* Lists the files under a directory. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/text.h"
#include "data/dataset_parts.h"
#include "data/remote.h"

/* A folder that the walk has found, in the list `to_do` or `done`. Folders in `done` stay allocated, because
 * `above` of their subfolders points to them. */
struct branch {
    const char *path; /* relative to the dataset's directory, with a final slash; "" for that directory */
    const struct branch *above; /* parent folder, or NULL */
    struct branch *next;        /* next folder in `to_do` or `done` */
    dev_t device;
    ino_t inode;
};

struct walk {
    struct dataset *dataset;
    bool deep; /* include all subfolders */
    struct branch *to_do, *done;
    struct dataset_names *names;
};

static enum status add_branch(struct walk *walk, const char *path, const struct branch *above)
{
    struct branch *branch = calloc(1, sizeof *branch);
    if (!branch)
        return dataset_out_of_memory();
    *branch = (struct branch){.above = above, .next = walk->to_do};
    walk->to_do = branch;
    return dataset_keep_name(walk->dataset, path, strlen(path), &branch->path);
}

static void free_branches(struct branch *branch)
{
    while (branch) {
        struct branch *next = branch->next;
        free(branch);
        branch = next;
    }
}

/* Returns whether a folder is also one of its own ancestors, because a link leads back to that ancestor. */
static bool leads_back(const struct branch *branch)
{
    for (const struct branch *above = branch->above; above; above = above->above)
        if (above->device == branch->device && above->inode == branch->inode)
            return true;
    return false;
}

/* Handles an unreadable entry: skips it with a warning if dataset->skip is set, fails otherwise. `cause` is
 * the errno. */
static enum status lose(struct walk *walk, const struct branch *branch, const char *name, int cause)
{
    enum status status = status_set(status_of_errno(cause), "%s/%s%s: %s", walk->dataset->path, branch->path,
                                    name, strerror(cause));
    return dataset_skip(walk->dataset, status, DATASET_UNKNOWN);
}

static enum status add_file(struct walk *walk, const char *path)
{
    struct dataset_names *names = walk->names;
    TRY(dataset_grow(&names->items, names->count, sizeof *names->items));
    return dataset_keep_name(walk->dataset, path, strlen(path), &names->items[names->count++]);
}

/* Adds a folder to `to_do`. The folders directly in the dataset's directory may be classes. */
static enum status add_folder(struct walk *walk, const struct branch *branch, const char *name, char *path)
{
    struct dataset *dataset = walk->dataset;
    if (!branch->above) {
        TRY(dataset_grow(&dataset->classes, dataset->class_count, sizeof *dataset->classes));
        TRY(dataset_keep_name(dataset, name, strlen(name), &dataset->classes[dataset->class_count++]));
    }
    return add_branch(walk, strcat(path, "/"), branch);
}

/* Counts folders and images whose names begin with a dot, and that ImageFolder would read. */
static enum status note_hidden(struct walk *walk, const struct branch *branch, int fd, const char *name)
{
    struct dataset_names *names = walk->names;
    struct stat info;
    char path[PATH_MAX];
    bool folder = fstatat(fd, name, &info, 0) == 0 && S_ISDIR(info.st_mode);
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || !walk->deep ||
        !(folder || (branch->above && dataset_is_image(walk->dataset, name))) ||
        snprintf(path, sizeof path, "%s%s", branch->path, name) >= PATH_MAX)
        return STATUS_OK;
    return names->hidden++ ? STATUS_OK
                           : dataset_keep_name(walk->dataset, path, strlen(path), &names->first_hidden);
}

static enum status add_entry(struct walk *walk, const struct branch *branch, int fd, const char *name)
{
    char path[PATH_MAX];
    struct stat info;
    int length = snprintf(path, sizeof path, "%s%s", branch->path, name);
    if (length >= (int)sizeof path - 1) /* leave room for a slash */
        return lose(walk, branch, name, ENAMETOOLONG);
    if (fstatat(fd, name, &info, 0) != 0)
        return lose(walk, branch, name, errno);
    bool image = walk->deep && dataset_is_image(walk->dataset, name);
    if (S_ISREG(info.st_mode) || (image && !S_ISDIR(info.st_mode))) /* opening a pipe is an error */
        return add_file(walk, path);
    if (S_ISDIR(info.st_mode) && walk->deep)
        return add_folder(walk, branch, name, path);
    if (S_ISDIR(info.st_mode) && !walk->names->folder)
        return dataset_keep_name(walk->dataset, path, strlen(path), &walk->names->folder);
    if (!S_ISDIR(info.st_mode) && !walk->deep && text_ends_in(path, ".tar"))
        status_warn("%s/%s is not a regular file and will not be read", walk->dataset->path, path);
    return STATUS_OK;
}

/* Adds all entries of one folder: files to `names`, subfolders to `to_do`. */
static enum status list_branch(struct walk *walk, struct branch *branch)
{
    struct dataset *dataset = walk->dataset;
    struct stat info;
    int fd =
        openat(dataset->directory, *branch->path ? branch->path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream || fstat(fd, &info) != 0) {
        enum status status = status_set(status_of_errno(errno), "%s/%s: cannot list the folder: %s",
                                        dataset->path, branch->path, strerror(errno));
        if (stream)
            closedir(stream);
        else if (fd >= 0)
            close(fd);
        return branch->above ? dataset_skip(dataset, status, DATASET_UNKNOWN) : status;
    }
    branch->device = info.st_dev;
    branch->inode = info.st_ino;
    enum status status = STATUS_OK;
    if (leads_back(branch))
        status = status_set(STATUS_USAGE, "%s/%s links back to one of its parent folders; remove that link",
                            dataset->path, branch->path);
    struct dirent *entry = NULL;
    while (status == STATUS_OK && (errno = 0, entry = readdir(stream)))
        status = (*entry->d_name == '.' ? note_hidden : add_entry)(walk, branch, fd, entry->d_name);
    if (status == STATUS_OK && errno != 0) /* readdir() failed, so entries may be missing */
        status = lose(walk, branch, "", errno);
    closedir(stream);
    return status;
}

uint64_t dataset_count_images(const struct dataset *dataset)
{
    uint64_t images = 0;
    const int top = openat(dataset->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folders = top < 0 ? NULL : fdopendir(top);
    if (!folders && top >= 0)
        close(top);
    for (const struct dirent *folder; folders && (folder = readdir(folders));) {
        if (*folder->d_name == '.')
            continue;
        const int fd = openat(dataset->directory, folder->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *files = fd < 0 ? NULL : fdopendir(fd);
        if (!files && fd >= 0)
            close(fd);
        for (const struct dirent *file; files && (file = readdir(files));)
            images += *file->d_name != '.' && dataset_is_image(dataset, file->d_name);
        if (files)
            closedir(files);
    }
    if (folders)
        closedir(folders);
    return images;
}

/* Returns whether a name or one of its folders begins with a dot. */
static bool is_hidden(const char *name)
{
    return *name == '.' || strstr(name, "/.");
}

/* Adds the listed files of a remote data set: shards of all folders, but other files only of the top folder,
 * because an index names shards relative to its own folder. */
static enum status list_remote(struct walk *walk)
{
    const struct remote *remote = walk->dataset->remote;
    for (uint32_t i = 0; i < remote_count(remote); i++) {
        const char *name = remote_name(remote, i);
        size_t length = strlen(name);
        bool shard = length > 4 && strcmp(name + length - 4, ".tar") == 0;
        if (!is_hidden(name) && (shard || !strchr(name, '/')))
            TRY(add_file(walk, name));
    }
    return STATUS_OK;
}

enum status dataset_list(struct dataset *dataset, bool deep, struct dataset_names *names)
{
    struct walk walk = {.dataset = dataset, .deep = deep, .names = names};
    if (dataset->remote)
        return list_remote(&walk);
    if (dataset->shard)
        return add_file(&walk, dataset->shard);
    enum status status = add_branch(&walk, "", NULL);
    while (status == STATUS_OK && walk.to_do) {
        struct branch *branch = walk.to_do;
        walk.to_do = branch->next;
        branch->next = walk.done;
        walk.done = branch;
        status = list_branch(&walk, branch);
    }
    free_branches(walk.to_do);
    free_branches(walk.done);
    return status;
}
