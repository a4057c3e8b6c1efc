/* Lists the files under a directory, the samples of a folder of single files, and the class folders.
 *
 * In a folder of images without .cls files, each image is a sample, and its key is its path: two images never
 * become one sample, whatever their names are. In other folders, the files whose names are equal up to the
 * first dot are the members of one sample, as in shards. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/text.h"
#include "data/dataset.h"
#include "data/remote.h"

/* ---- Listing the files under a directory ---- */

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
    TRY(DATASET_ALLOCATED(branch));
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
    const int cause = fstatat(fd, name, &info, 0) == 0 ? 0 : errno;
    const bool image = walk->deep && dataset_is_image(walk->dataset, name);
    if (cause && dataset_dangles(walk->dataset, path))
        return image ? add_file(walk, path) /* a broken sample */
                     : dataset_skip(walk->dataset, STATUS_FAILED, DATASET_UNKNOWN);
    if (cause)
        return lose(walk, branch, name, cause);
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
        status = dataset_check_cancelled(dataset);
        if (status == STATUS_OK)
            status = list_branch(&walk, branch);
    }
    free_branches(walk.to_do);
    free_branches(walk.done);
    return status;
}

/* ---- Files of samples ---- */

/* A listed file. */
struct listed_file {
    const char *name;
    const char *extension; /* in `name`: the extension that makes the file a sample; otherwise NULL */
    const char *class_, *folder, *leaf; /* the parts of the name, for sorting */
    char *parts;                        /* owned: the text of `class_`, `folder` and `leaf` */
    bool mask;                          /* the file is the mask of an image: NAME.mask.png */
    bool owned;                         /* the file is a member of a sample */
};

struct files {
    struct listed_file *items; /* the samples come first, in their order; the other files follow */
    uint32_t count, samples;
    bool arrays; /* the samples are .npy files, because there are no images */
};

static const char *leaf_of(const char *name)
{
    const char *slash = strrchr(name, '/');
    return slash ? slash + 1 : name;
}

static bool is_metadata(const char *name)
{
    return strcmp(name, SAMPLES_NAME) == 0 || strcmp(name, CLASSES_NAME) == 0 ||
           strcmp(name, DRAWN_NAME) == 0 || strcmp(name, "metadata.parquet") == 0 ||
           text_ends_in(name, ".index") || text_ends_in(name, ".wids.json");
}

/* Splits a name at the first dot of its last component. Returns false if there is no dot, or if the key or
 * the extension is empty. Unlike in shards, names of the form __x__ have no meaning. */
static bool split(const char *name, size_t *key_length, const char **extension)
{
    const char *leaf = leaf_of(name), *dot = strchr(leaf, '.');
    if (!dot || dot == leaf || dot[1] == '\0')
        return false;
    *key_length = (size_t)(dot - name);
    *extension = dot + 1;
    return true;
}

/* ---- Samples of files with equal keys ---- */

/* Orders files by key, then by extension. Files without a key come first. */
static int by_key(const void *a, const void *b)
{
    const char *left = *(const char *const *)a, *right = *(const char *const *)b, *left_end, *right_end;
    size_t left_length = 0, right_length = 0;
    if (!split(left, &left_length, &left_end))
        left_length = 0;
    if (!split(right, &right_length, &right_end))
        right_length = 0;
    int order = memcmp(left, right, left_length < right_length ? left_length : right_length);
    if (order == 0 && left_length != right_length)
        order = left_length < right_length ? -1 : 1;
    return order ? order : strcmp(left, right);
}

static enum status add_member(struct dataset *dataset, const char *name, const char *extension)
{
    TRY(dataset_add_file(dataset, name, 0));
    dataset->samples[dataset->sample_count - 1].members++;
    return dataset_add_member(dataset,
                              (struct dataset_member){.extension = extension,
                                                      .size = UINT64_MAX, /* set once the file is open */
                                                      .file = dataset->file_count - 1});
}

static enum status add_keyed_file(struct dataset *dataset, const char *name)
{
    size_t length;
    const char *extension, *key = NULL;
    if ((!strchr(name, '/') && is_metadata(name)) || !split(name, &length, &extension))
        return STATUS_OK;
    const char *last = dataset->sample_count ? dataset->samples[dataset->sample_count - 1].key : NULL;
    if (!last || strlen(last) != length || memcmp(last, name, length) != 0) {
        TRY(dataset_keep_name(dataset, name, length, &key));
        TRY(dataset_add_sample(dataset, key));
    }
    return add_member(dataset, name, extension);
}

static void drop_classes(struct dataset *dataset)
{
    free(dataset->classes);
    dataset->classes = NULL;
    dataset->class_count = 0;
}

/* Adds samples whose files have equal keys. `cls` is true if a file is a label. If there is none, and all
 * samples are in folders, these folders are the classes. */
static enum status open_keyed(struct dataset *dataset, const struct dataset_names *names, bool cls)
{
    bool inside = !cls && names->count > 0;
    if (names->count)
        qsort(names->items, names->count, sizeof *names->items, by_key);
    for (uint32_t i = 0; i < names->count; i++)
        TRY(add_keyed_file(dataset, names->items[i]));
    for (uint32_t i = 0; inside && i < dataset->sample_count; i++)
        inside = strchr(dataset->samples[i].key, '/') != NULL;
    if (!inside)
        drop_classes(dataset);
    return STATUS_OK;
}

/* ---- Samples of one image each ---- */

/* Returns the extension in `name` that makes the file a sample, or NULL. By default, all formats that
 * ImageFolder reads do so, or .npy, if `arrays` is set. */
static const char *sample_extension(const struct members *choice, bool arrays, const char *name)
{
    const struct member_list *list = choice->only.count ? &choice->only : &choice->image;
    const char *leaf = leaf_of(name);
    const size_t length = strlen(leaf);
    for (uint32_t r = 0; r < list->count; r++) {
        const char *extension = list->rules[r].extension;
        const size_t end = strlen(extension);
        if (list->preset && (strcasecmp(extension, "npy") == 0) != arrays)
            continue;
        if (list->rules[r].pattern) { /* of the whole name of the file */
            const char *dot = strrchr(leaf, '.');
            if (dot && dot > leaf && dot[1] && fnmatch(extension, leaf, FNM_CASEFOLD) == 0)
                return dot + 1;
            continue;
        }
        if (length > end + 1 && leaf[length - end - 1] == '.' &&
            strcasecmp(leaf + length - end, extension) == 0)
            return leaf + length - end;
    }
    return NULL;
}

bool dataset_is_image(const struct dataset *dataset, const char *name)
{
    return sample_extension(&dataset->choice, false, name) || sample_extension(&dataset->choice, true, name);
}

static enum status find_samples(const struct dataset *dataset, const struct dataset_names *names,
                                struct files *files)
{
    files->items = calloc((size_t)names->count + 1, sizeof *files->items);
    TRY(DATASET_ALLOCATED(files->items));
    files->count = names->count;
    for (int arrays = 0; arrays <= 1 && !files->samples; arrays++)
        for (uint32_t i = 0; i < names->count; i++) {
            struct listed_file *file = &files->items[i];
            file->name = names->items[i];
            file->extension = sample_extension(&dataset->choice, arrays, file->name);
            files->samples += file->extension != NULL;
            files->arrays = arrays;
        }
    return STATUS_OK;
}

/* Splits the name of a file into its class folder, the folders below it, and the rest. */
static enum status split_parts(struct listed_file *file)
{
    file->parts = strdup(file->name);
    TRY(DATASET_ALLOCATED(file->parts));
    char *first = strchr(file->parts, '/'), *last = strrchr(file->parts, '/');
    file->class_ = file->folder = "";
    file->leaf = last ? last + 1 : file->parts;
    if (!first)
        return STATUS_OK;
    file->class_ = file->parts;
    if (last > first)
        file->folder = first + 1;
    *first = *last = '\0';
    return STATUS_OK;
}

/* Puts samples before other files, and sorts both as ImageFolder does: by class, folder and name. */
static int in_order(const void *a, const void *b)
{
    const struct listed_file *left = a, *right = b;
    int order = !left->extension - !right->extension;
    order = order ? order : text_order(left->class_, right->class_);
    order = order ? order : text_order(left->folder, right->folder);
    return order ? order : text_order(left->leaf, right->leaf);
}

/* ---- Names without extensions ---- */

/* Returns the length of NAME if the name of a file is NAME.mask.png, as --png writes masks, else 0. */
static size_t mask_stem(const char *name)
{
    const size_t length = strlen(name), end = sizeof "." MASK_MEMBER - 1;
    const char *leaf = leaf_of(name);
    return length > (size_t)(leaf - name) + end && strcasecmp(name + length - end, "." MASK_MEMBER) == 0
               ? length - end
               : 0;
}

/* Compares `length` bytes of a name with the name of a sample up to its extension. */
static int compare_stem(const char *name, size_t length, const struct listed_file *sample)
{
    const size_t stem = (size_t)(sample->extension - 1 - sample->name);
    int order = memcmp(name, sample->name, length < stem ? length : stem);
    return order ? order : (length > stem) - (length < stem);
}

static int by_stem(const void *a, const void *b, void *items)
{
    const uint32_t one = *(const uint32_t *)a, other = *(const uint32_t *)b;
    const struct listed_file *left = (const struct listed_file *)items + one;
    const struct listed_file *right = (const struct listed_file *)items + other;
    const int order = compare_stem(left->name, (size_t)(left->extension - 1 - left->name), right);
    return order ? order : (one > other) - (one < other);
}

/* The samples from a number on, sorted by stem, then by number. */
struct stems {
    const struct files *files;
    uint32_t *order, count; /* `order` is owned */
};

static enum status stems_open(const struct files *files, uint32_t first, struct stems *stems)
{
    *stems = (struct stems){files, calloc((size_t)files->samples - first + 1, sizeof *stems->order),
                            files->samples - first};
    TRY(DATASET_ALLOCATED(stems->order));
    for (uint32_t i = 0; i < stems->count; i++)
        stems->order[i] = first + i;
    qsort_r(stems->order, stems->count, sizeof *stems->order, by_stem, files->items);
    return STATUS_OK;
}

/* Returns whether the sample at a place of the order has this stem. */
static bool stems_match(const struct stems *stems, uint32_t at, const char *name, size_t length)
{
    return at < stems->count && compare_stem(name, length, &stems->files->items[stems->order[at]]) == 0;
}

/* Returns the place of the first sample with this stem, or any place if there is none. */
static uint32_t stems_find(const struct stems *stems, const char *name, size_t length)
{
    uint32_t low = 0, high = stems->count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const bool after = compare_stem(name, length, &stems->files->items[stems->order[middle]]) > 0;
        low = after ? middle + 1 : low;
        high = after ? high : middle;
    }
    return low;
}

/* ---- Warnings ---- */

/* Warns about files that are not read, and about names that ImageFolder would read. */
static void warn_of_others(struct dataset *dataset, const struct dataset_names *names,
                           const struct files *files)
{
    uint32_t others = 0;
    const char *first = NULL;
    for (uint32_t i = files->samples; i < files->count; i++) {
        const char *name = files->items[i].name;
        bool metadata = !strchr(name, '/') && is_metadata(name);
        if (!files->items[i].owned && !metadata)
            first = others++ ? first : name;
    }
    bool hidden = dataset->classes && names->hidden;
    if ((!others && !hidden) || !dataset_warns(dataset))
        return;
    if (others)
        status_warn(
            "%s: ignored %u of %u files, which are not images%s%s; the first is %s", dataset->path, others,
            files->samples + others, dataset->classes ? " in class folders" : "",
            OPTION_OR_FIELD("; to read other files, such as .npy, name their extension with --image", ""),
            first);
    if (hidden)
        status_warn("%s: skipped folders or images whose names begin with a dot (%u; the first is %s); "
                    "ImageFolder reads them, and counts such folders as classes, so its labels may differ",
                    dataset->path, names->hidden, names->first_hidden);
}

/* Warns if the names of images are those of masks of other images, but the images are in class folders, or
 * --image or --label was given: then each is a sample of its own. */
static void warn_of_masks(struct dataset *dataset, const struct files *files)
{
    for (uint32_t i = 0; i + 1 < files->samples && dataset_warns(dataset); i++) {
        const char *name = files->items[i].name, *next = files->items[i + 1].name;
        const size_t stem = mask_stem(name);
        if (stem > 0 && strncmp(name, next, stem + 1) == 0) {
            status_warn("%s: %s has the name of a mask of %s, but is read as an image of its own: samples "
                        "have either masks, or classes and chosen members; for masks, move all files to one "
                        "folder, and drop %simage and %slabel",
                        dataset->path, name, next, OPTION_DASHES, OPTION_DASHES);
            return;
        }
    }
}

/* Finds class folders without a sample. dataset_check() refuses them. With --image or --member, a class may
 * have no file of the extensions that these options name. */
static void find_empty_classes(struct dataset *dataset, const struct files *files)
{
    if (dataset->choice.only.count || !dataset->choice.image.preset)
        return;
    for (uint32_t c = 0, i = 0; c < dataset->class_count; c++) {
        const uint32_t before = i;
        while (i < files->samples && strcmp(files->items[i].class_, dataset->classes[c]) == 0)
            i++;
        if (i == before && !dataset->empty_classes++)
            dataset->empty_class = dataset->classes[c];
    }
}

/* Warns if class folders have the names of parts of a data set, such as `train` and `val`. */
static void warn_of_parts(struct dataset *dataset)
{
    static const char *const parts[] = {"train", "training", "test", "testing", "val", "valid", "validation"};
    const char *found[2] = {NULL, NULL};
    for (size_t p = 0; p < COUNT_OF(parts); p++)
        for (uint32_t c = 0; !found[1] && c < dataset->class_count; c++)
            if (strcasecmp(dataset->classes[c], parts[p]) == 0)
                found[found[0] != NULL] = dataset->classes[c];
    if (found[1] && dataset_warns(dataset))
        status_warn("%s: its folders %s and %s become classes; if they contain class folders, name one of "
                    "them, such as %s/%s",
                    dataset->path, found[0], found[1], dataset->path, found[0]);
}

/* A file whose name is that of a sample with another extension, such as its label. */
struct sidecar {
    uint32_t sample; /* number in files->items */
    const char *name, *extension;
};

static int by_sample(const void *a, const void *b)
{
    const struct sidecar *left = a, *right = b;
    return left->sample == right->sample ? strcmp(left->name, right->name)
                                         : (left->sample > right->sample) - (left->sample < right->sample);
}

/* Adds a file to `sidecars` for each sample to which it belongs. The longest stem counts: a.b.json belongs to
 * a.b.jpg, and if there is none, to a.jpg. A mask has one stem. */
static enum status find_owners(const struct stems *stems, struct listed_file *file, struct sidecar **sidecars,
                               uint32_t *count)
{
    const char *name = file->name, *leaf = leaf_of(name);
    for (const char *dot = name + (file->mask ? mask_stem(name) + 1 : strlen(name));
         !file->owned && dot-- > leaf + 1;) {
        if (*dot != '.' || dot[1] == '\0')
            continue;
        const size_t length = (size_t)(dot - name);
        for (uint32_t at = stems_find(stems, name, length); stems_match(stems, at, name, length); at++) {
            TRY(dataset_grow(sidecars, *count, sizeof **sidecars));
            (*sidecars)[(*count)++] = (struct sidecar){stems->order[at], name, dot + 1};
            file->owned = true;
        }
    }
    return STATUS_OK;
}

/* Finds the sidecars of all samples. An image or an array is never a sidecar, unless it is a mask. */
static enum status find_sidecars(const struct dataset *dataset, const struct files *files,
                                 struct sidecar **sidecars, uint32_t *count)
{
    struct stems stems;
    enum status status = stems_open(files, 0, &stems);
    for (uint32_t i = files->samples; status == STATUS_OK && i < files->count; i++) {
        struct listed_file *file = &files->items[i];
        bool metadata = !strchr(file->name, '/') && is_metadata(file->name);
        if (file->mask || (!metadata && !sample_extension(&dataset->choice, !files->arrays, file->name)))
            status = find_owners(&stems, file, sidecars, count);
    }
    free(stems.order);
    if (*count)
        qsort(*sidecars, *count, sizeof **sidecars, by_sample);
    return status;
}

static enum status add_samples(struct dataset *dataset, struct files *files)
{
    const struct members *choice = &dataset->choice;
    FREED struct sidecar *sidecars = NULL;
    uint32_t count = 0, next = 0;
    if (!choice->only.count && (choice->all || !choice->label.preset || !dataset->classes))
        TRY(find_sidecars(dataset, files, &sidecars, &count));
    for (uint32_t i = 0; i < files->samples; i++) {
        TRY(dataset_add_sample(dataset, files->items[i].name));
        TRY(add_member(dataset, files->items[i].name, files->items[i].extension));
        for (; next < count && sidecars[next].sample == i; next++)
            TRY(add_member(dataset, sidecars[next].name, sidecars[next].extension));
    }
    return STATUS_OK;
}

/* ---- Images with masks ---- */

/* Returns whether samples may have masks: neither --image, --label nor --member was given. */
static bool takes_masks(const struct dataset *dataset)
{
    return dataset->choice.label.preset && dataset->choice.image.preset && !dataset->choice.only.count;
}

/* Makes the files NAME.mask.png sidecars of the images NAME.EXTENSION, as --png writes them: they are then no
 * samples. Called before the files are sorted, for a folder without classes. */
static enum status find_masks(struct files *files)
{
    struct files images = {.items = calloc((size_t)files->count + 1, sizeof *images.items)};
    struct stems stems = {0};
    enum status status = DATASET_ALLOCATED(images.items);
    for (uint32_t i = 0; status == STATUS_OK && i < files->count; i++)
        if (files->items[i].extension && mask_stem(files->items[i].name) == 0)
            images.items[images.samples++] = files->items[i];
    if (status == STATUS_OK && images.samples < files->samples)
        status = stems_open(&images, 0, &stems);
    for (uint32_t i = 0; stems.order && i < files->count; i++) {
        struct listed_file *file = &files->items[i];
        const size_t stem = file->extension ? mask_stem(file->name) : 0;
        if (stem == 0 || !stems_match(&stems, stems_find(&stems, file->name, stem), file->name, stem))
            continue;
        file->mask = true;
        file->extension = NULL;
        files->samples--;
    }
    free(stems.order);
    free(images.items);
    return status;
}

/* Returns whether the only class folders are those of images and masks that --prepare writes. Without an
 * index, they would be two classes. */
static bool are_masked(const struct dataset *dataset)
{
    return dataset->class_count == 2 && takes_masks(dataset) &&
           strcmp(dataset->classes[0], INDEX_IMAGES) == 0 && strcmp(dataset->classes[1], INDEX_MASKS) == 0;
}

/* Returns whether an image and a mask have the same name within their folders, without their extensions. */
static bool are_pair(const struct listed_file *image, const struct listed_file *mask)
{
    const char *a = image->name + strlen(INDEX_IMAGES), *b = mask->name + strlen(INDEX_MASKS);
    const ptrdiff_t length = image->extension - a;
    return length == mask->extension - b && memcmp(a, b, (size_t)length) == 0;
}

/* Returns the number of the mask of an image, or files->samples if there is none. `next` is the number after
 * the mask of the previous image, and nearly always that of this mask. */
static uint32_t find_mask(const struct stems *masks, const struct listed_file *image, uint32_t next)
{
    const struct files *files = masks->files;
    char name[PATH_MAX + sizeof INDEX_MASKS];
    if (next < files->samples && are_pair(image, &files->items[next]))
        return next;
    const char *rest = image->name + strlen(INDEX_IMAGES);
    const size_t length =
        (size_t)snprintf(name, sizeof name, INDEX_MASKS "%.*s", (int)(image->extension - 1 - rest), rest);
    const uint32_t at = stems_find(masks, name, length);
    return stems_match(masks, at, name, length) ? masks->order[at] : files->samples;
}

/* Adds each image with its mask, as the index of such a set lists them. */
static enum status add_masked(struct dataset *dataset, struct files *files)
{
    struct listed_file *const items = files->items;
    struct stems masks;
    uint32_t images = 0, next;
    while (images < files->samples && strcmp(items[images].class_, INDEX_IMAGES) == 0)
        images++;
    enum status status = stems_open(files, images, &masks);
    next = images;
    for (uint32_t i = 0; status == STATUS_OK && i < images; i++) {
        const char *key = NULL;
        const uint32_t mask = find_mask(&masks, &items[i], next);
        status =
            dataset_keep_name(dataset, items[i].name, (size_t)(items[i].extension - 1 - items[i].name), &key);
        if (status == STATUS_OK)
            status = dataset_add_sample(dataset, key);
        if (status == STATUS_OK)
            status = add_member(dataset, items[i].name, items[i].extension);
        if (status == STATUS_OK && mask < files->samples)
            status = add_member(dataset, items[mask].name, MASK_MEMBER);
        next = mask < files->samples ? mask + 1 : next;
    }
    free(masks.order);
    dataset->class_count = 1;
    return status;
}

/* Returns the name of an image that is in no class folder, or NULL. */
static const char *first_outside(const struct files *files)
{
    for (uint32_t i = 0; i < files->count; i++)
        if (files->items[i].extension && !*files->items[i].class_)
            return files->items[i].name;
    return NULL;
}

/* Adds each image as a sample. If more images are in subfolders than directly in the data set's folder, the
 * subfolders are classes, and the other images are ignored, as ImageFolder does. */
static enum status open_images(struct dataset *dataset, const struct dataset_names *names,
                               struct files *files)
{
    uint32_t inside = 0;
    bool labelled = false; /* by files such as a.b.cls */
    const struct member_list *list =
        dataset->choice.only.count ? &dataset->choice.only : &dataset->choice.image;
    for (uint32_t r = 0; r < list->count; r++)
        dataset->named |= list->rules[r].pattern;
    for (uint32_t i = 0; i < files->count; i++) {
        TRY(split_parts(&files->items[i]));
        inside += files->items[i].extension && *files->items[i].class_;
        labelled |= strlen(files->items[i].name) > 4 &&
                    strcasecmp(files->items[i].name + strlen(files->items[i].name) - 4, ".cls") == 0;
    }
    const bool flat = inside <= files->samples - inside;
    if (flat && inside && !labelled && dataset_warns(dataset))
        status_warn("%s: the folders in it are not classes, because it has %u images itself, and its folders "
                    "only %u; for class folders, move those images elsewhere (the first is %s)",
                    dataset->path, files->samples - inside, inside, first_outside(files));
    if (labelled || flat)
        drop_classes(dataset);
    for (uint32_t i = 0; dataset->classes && i < files->count; i++)
        if (!*files->items[i].class_)
            files->items[i].extension = NULL;
    files->samples = dataset->classes ? inside : files->samples;
    if (!dataset->classes && takes_masks(dataset))
        TRY(find_masks(files));
    qsort(files->items, files->count, sizeof *files->items, in_order);
    TRY((are_masked(dataset) ? add_masked : add_samples)(dataset, files));
    warn_of_others(dataset, names, files);
    warn_of_parts(dataset);
    warn_of_masks(dataset, files);
    find_empty_classes(dataset, files);
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Warns about the first archive among single files. The archive is read as one member of a sample, which is
 * rarely intended. */
static void warn_of_archives(const struct dataset *dataset, const struct dataset_names *names)
{
    static const char *const ends[] = {".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tzst"};
    for (uint32_t i = 0; i < names->count; i++)
        for (size_t e = 0; e < sizeof ends / sizeof *ends; e++) {
            size_t length = strlen(names->items[i]), end_length = strlen(ends[e]);
            if (length <= end_length || strcasecmp(names->items[i] + length - end_length, ends[e]) != 0)
                continue;
            status_warn("%s/%s looks like a shard but is read as a file: shards are tar files "
                        "whose names end in .tar, directly in %s",
                        dataset->path, names->items[i], OPTION_OR_FIELD("--data DIR", "path"));
            return;
        }
}

static int by_name(const void *a, const void *b)
{
    return text_order(*(const char *const *)a, *(const char *const *)b);
}

static void sort_classes(struct dataset *dataset)
{
    if (dataset->class_count)
        qsort(dataset->classes, dataset->class_count, sizeof *dataset->classes, by_name);
}

/* Warns if folders of images are not classes because of label files, of which there are fewer than images. */
static void warn_of_labels(struct dataset *dataset, const struct dataset_names *names)
{
    uint32_t labels = 0, images = 0;
    const char *first = NULL;
    for (uint32_t i = 0; i < names->count; i++) {
        const char *name = names->items[i];
        const size_t length = strlen(name);
        images += strchr(name, '/') && dataset_is_image(dataset, name);
        if (length > 4 && strcasecmp(name + length - 4, ".cls") == 0)
            first = labels++ ? first : name;
    }
    if (labels && labels < images && dataset_warns(dataset))
        status_warn("%s: the folders in it are not classes, because it has label files (%u for %u images in "
                    "folders; the first is %s); for class folders, remove the .cls files",
                    dataset->path, labels, images, first);
}

enum status dataset_open_files(struct dataset *dataset)
{
    struct dataset_names names = {0};
    struct files files = {0};
    bool cls = false;
    enum status status = dataset_list(dataset, true, &names);
    for (uint32_t i = 0; status == STATUS_OK && i < names.count; i++) {
        size_t length;
        const char *extension;
        cls |= split(names.items[i], &length, &extension) && strcasecmp(extension, "cls") == 0;
    }
    if (status == STATUS_OK) {
        warn_of_archives(dataset, &names);
        warn_of_labels(dataset, &names);
        sort_classes(dataset);
    }
    if (status == STATUS_OK && !cls)
        status = find_samples(dataset, &names, &files);
    if (status == STATUS_OK)
        status = files.samples ? open_images(dataset, &names, &files) : open_keyed(dataset, &names, cls);
    for (uint32_t i = 0; i < files.count; i++)
        free(files.items[i].parts);
    free(files.items);
    free(names.items);
    return status;
}

enum status dataset_index_classes(struct dataset *dataset)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const char *key = dataset->samples[i].key;
        const size_t length = strcspn(key, "/");
        const char *last = count ? dataset->classes[count - 1] : NULL;
        if (last && strlen(last) == length && memcmp(last, key, length) == 0)
            continue;
        TRY(dataset_grow(&dataset->classes, count, sizeof *dataset->classes));
        TRY(dataset_keep_name(dataset, key, length, &dataset->classes[count]));
        dataset->class_count = ++count;
    }
    sort_classes(dataset);
    dataset->class_count = 0;
    for (uint32_t c = 0; c < count; c++)
        if (c == 0 || strcmp(dataset->classes[c], dataset->classes[dataset->class_count - 1]) != 0)
            dataset->classes[dataset->class_count++] = dataset->classes[c];
    return STATUS_OK;
}

int32_t dataset_class_of(const struct dataset *dataset, const char *key)
{
    FREED char *name = dataset->classes ? strndup(key, strcspn(key, "/")) : NULL;
    const char *const *found =
        name ? bsearch(&name, dataset->classes, dataset->class_count, sizeof *dataset->classes, by_name)
             : NULL;
    return found ? (int32_t)(found - dataset->classes) : LABEL_NONE;
}
