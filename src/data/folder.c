#include "data/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "data/class_folders.h"
#include "data/samples.h"
#include "data/unit_writer.h"

#define WORK "/.prepare"

void folder_unit_name(const struct folder *folder, uint64_t unit, char name[PATH_MAX])
{
    if (folder->layout == INDEX_FILES)
        snprintf(name, PATH_MAX, "%s%0*" PRIu64, folder->above, folder->unit_count > 1000 ? 6 : 3, unit);
    else if (folder->layout == INDEX_IMAGEFOLDER)
        strcpy(name, INDEX_HERE);
    else
        snprintf(name, PATH_MAX, "%s-%06" PRIu64 ".tar", folder->name, unit);
}

/* Writes the folder's path, followed by the formatted text, to `path`. STATUS_USAGE if the result is too
 * long. */
__attribute__((format(printf, 3, 4))) static enum status inside(const struct folder *folder,
                                                                char path[PATH_MAX], const char *format, ...)
{
    va_list arguments;
    int used = snprintf(path, PATH_MAX, "%s", folder->path);
    va_start(arguments, format);
    if (used < PATH_MAX)
        used += vsnprintf(path + used, (size_t)(PATH_MAX - used), format, arguments);
    va_end(arguments);
    return used < PATH_MAX ? STATUS_OK
                           : status_set(STATUS_USAGE, "the path '%.80s...' is too long", folder->path);
}

enum status folder_part_path(const struct folder *folder, uint64_t unit, char path[PATH_MAX])
{
    return inside(folder, path, WORK "/%06" PRIu64 ".part", unit);
}

static enum status index_path(const struct folder *folder, char path[PATH_MAX])
{
    return inside(folder, path, "/%s.index", folder->name);
}

/* ---- Checks ---- */

static bool has_size(const char *path, uint64_t bytes)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == bytes;
}

static bool file_is_whole(const struct folder *folder, const struct index_unit *unit, const char *key,
                          const struct index_member *member)
{
    char path[PATH_MAX];
    return inside(folder, path, "/%s/%s.%s", unit->name, key, member->extension) == STATUS_OK &&
           has_size(path, member->size);
}

/* Returns whether a file contains exactly this text. */
static bool has_text(const char *path, const char *text, size_t size)
{
    FREED char *bytes = NULL;
    size_t count = 0;
    return has_size(path, size) && file_read(path, &bytes, &count) == STATUS_OK && count == size &&
           memcmp(bytes, text, size) == 0;
}

/* Returns whether a shard and its DALI index are complete. */
static bool shard_is_whole(const struct folder *folder, const struct index *index, uint64_t number)
{
    const struct index_unit *unit = &index->units[number];
    FREED char *dali = NULL;
    char path[PATH_MAX];
    size_t size = 0;
    if (inside(folder, path, "/%s", unit->name) != STATUS_OK || !has_size(path, unit->bytes))
        return false;
    char *dot = strrchr(path, '.');
    if (dot)
        strcpy(dot, ".idx");
    return dot && dali_format(index, number, &dali, &size) == STATUS_OK && has_text(path, dali, size);
}

/* Returns whether a unit is complete: its files have the sizes that the index gives, and a shard's DALI index
 * is complete. A unit is a shard, or a folder of files. */
static bool is_whole(const struct folder *folder, const struct index *index, uint64_t number)
{
    const struct index_unit *unit = &index->units[number];
    if (index->layout == INDEX_SHARDS)
        return shard_is_whole(folder, index, number);
    for (uint64_t s = unit->first; s < unit->first + unit->count; s++) {
        const struct index_sample *sample = &index->samples[s];
        for (uint64_t m = sample->first; m < sample->first + sample->count; m++)
            if (!file_is_whole(folder, unit, sample->key, &index->members[m]))
                return false;
    }
    return true;
}

/* Returns whether the wids index is complete. Builds without jansson cannot write one and return true. */
static bool wids_is_whole(const struct folder *folder, const struct index *index)
{
    FREED char *text = NULL;
    char path[PATH_MAX];
    if (inside(folder, path, "/%s.wids.json", folder->name) != STATUS_OK)
        return false;
    enum status status = wids_format(folder->name, index, &text);
    return status == STATUS_OK ? has_text(path, text, strlen(text)) : status == STATUS_UNAVAILABLE;
}

/* Returns whether classes.txt, samples.csv and, for shards, the wids index are complete. */
static bool lists_are_whole(const struct folder *folder, const struct index *index)
{
    char path[PATH_MAX];
    if (folder->class_list && (inside(folder, path, "/" CLASSES_NAME) != STATUS_OK ||
                               !has_text(path, folder->class_list, strlen(folder->class_list))))
        return false;
    return samples_are_whole(folder->path, index) &&
           (index->layout != INDEX_SHARDS || wids_is_whole(folder, index));
}

/* Reads a unit's part of the index. Fails if the part is missing or belongs to another unit or dataset. */
static enum status read_part(const struct folder *folder, uint64_t unit, struct index *part)
{
    char path[PATH_MAX], name[PATH_MAX];
    *part = (struct index){0};
    folder_unit_name(folder, unit, name);
    TRY(folder_part_path(folder, unit, path));
    TRY(index_read(path, part));
    if (part->unit_count == 1 && part->layout == folder->layout && strcmp(part->units[0].name, name) == 0 &&
        strcmp(part->provenance, folder->provenance) == 0)
        return STATUS_OK;
    return status_set(
        STATUS_FAILED,
        "%s: part %" PRIu64
        " of the index belongs to another unit or data set; is another program using the folder?",
        folder->path, unit);
}

bool folder_finished(const struct folder *folder, uint64_t unit)
{
    CLOSED_BY(index_free) struct index part;
    return read_part(folder, unit, &part) == STATUS_OK && is_whole(folder, &part, 0);
}

/* ---- Claiming ---- */

/* Returns the length of the first word. A line of options consists of words that are separated by blanks,
 * such as "--name=value". */
static int word_length(const char *word)
{
    return (int)strcspn(word, " \n");
}

static const char *next_word(const char *word)
{
    word += word_length(word);
    return word + strspn(word, " \n");
}

/* Returns the word of `line` that sets the same option as `word`, or "". */
static const char *same_option(const char *line, const char *word)
{
    size_t length = strcspn(word, "=/ \n"); /* the name of the option, or of this program */
    while (*line && (strcspn(line, "=/ \n") != length || strncmp(line, word, length) != 0))
        line = next_word(line);
    return line;
}

/* Returns the first word of `line` that is not in `other`, or "". Ignores --samples and --shards unless
 * `derived` is set: if they are not given, they follow from the other options and the source. */
static const char *first_change(const char *line, const char *other, bool derived)
{
    for (; *line; line = next_word(line)) {
        const char *same = same_option(other, line);
        bool follows = strncmp(line, "--samples=", 10) == 0 || strncmp(line, "--shards=", 9) == 0;
        if ((derived || !follows) &&
            (word_length(same) != word_length(line) || strncmp(same, line, (size_t)word_length(line)) != 0))
            return line;
    }
    return line;
}

/* Refuses to continue a data set that was begun with other options or another source. The message names one
 * option that differs. */
static enum status refuse_options(const struct folder *folder, const char *theirs)
{
    const char *ours = folder->provenance, *now = "", *there = "";
    for (int derived = 0; derived < 2 && !*now && !*there; derived++) {
        now = first_change(ours, theirs, derived);
        there = *now ? same_option(theirs, now) : first_change(theirs, ours, derived);
    }
    if (strncmp(now, "inputs=", 7) == 0)
        return status_set(STATUS_USAGE,
                          "%.300s was prepared from other files, or its source files have changed; name "
                          "another folder, or remove this one",
                          folder->path);
    return status_set(STATUS_USAGE,
                      "%.300s was prepared with other options (%.*s there, %.*s now); name another folder, "
                      "or remove this one",
                      folder->path, *there ? word_length(there) : 4, *there ? there : "none",
                      *now ? word_length(now) : 4, *now ? now : "none");
}

static enum status make_folder(const char *path)
{
    if (mkdir(path, 0777) == 0 || errno == EEXIST)
        return STATUS_OK;
    return status_set(STATUS_USAGE, "cannot create folder '%s': %s", path, strerror(errno));
}

/* Creates a folder and its parents. */
static enum status make_folders(const char *path)
{
    char above[PATH_MAX];
    if (snprintf(above, sizeof above, "%s", path) >= (int)sizeof above)
        return status_set(STATUS_USAGE, "the path '%.80s...' is too long", path);
    for (char *slash = above + 1; *above && (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        TRY(make_folder(above));
        *slash = '/';
    }
    return make_folder(path);
}

/* Opens and locks the folder. Linux releases the lock when the process ends. On a file system without locks,
 * continues without a lock. */
static enum status lock_folder(struct folder *folder)
{
    folder->lock = open(folder->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder->lock < 0)
        return status_set(STATUS_USAGE, "cannot open folder '%s': %s", folder->path, strerror(errno));
    if (flock(folder->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return status_set(STATUS_USAGE, "another run is preparing %s; wait until it ends", folder->path);
    if (access(folder->path, W_OK | X_OK) != 0)
        return status_set(STATUS_USAGE, "cannot write into folder '%s': %s", folder->path, strerror(errno));
    return STATUS_OK;
}

void folder_release(struct folder *folder)
{
    if (folder->lock >= 0)
        close(folder->lock);
    folder->lock = -1;
}

/* Checks that the folder contains nothing but .prepare/. If it has a data set whose index is lost, the
 * message says how to get another index. */
static enum status check_empty(const struct folder *folder)
{
    char other[256] = "", ours[256] = "";
    bool indexed = false;
    DIR *list = opendir(folder->path);
    if (!list)
        return status_set(STATUS_USAGE, "cannot read folder '%s': %s", folder->path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(list));) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, WORK + 1) == 0)
            continue;
        snprintf(other, sizeof other, "%s", name);
        indexed |= text_ends_in(name, ".index");
        if (strcmp(name, "samples.csv") == 0 || text_ends_in(name, ".wids.json"))
            snprintf(ours, sizeof ours, "%s", name);
    }
    closedir(list);
    if (*ours && !indexed)
        return status_set(
            STATUS_USAGE,
            "%.300s has a data set ('%.100s') without its index, %.100s.index; copy it with "
            "--prepare NEW --from dataset --source %.300s, which writes an index, or remove this "
            "folder and repeat the command",
            folder->path, ours, folder->name, folder->path);
    return *other
               ? status_set(STATUS_USAGE, "%s contains other files ('%.100s'): name a new or an empty folder",
                            folder->path, other)
               : STATUS_OK;
}

/* Creates the folders that all ranks write to, and removes temporary files of killed runs from them. */
static enum status make_subfolders(const struct folder *folder)
{
    char path[PATH_MAX];
    if (folder->layout == INDEX_FILES && *folder->above) {
        TRY(inside(folder, path, "/%s", folder->above));
        TRY(make_folder(path));
    }
    for (uint64_t i = 0; i < folder->class_count; i++) {
        TRY(inside(folder, path, "/%s", folder->class_folders[i]));
        TRY(make_folder(path));
        unit_sweep(path);
    }
    return STATUS_OK;
}

/* Starts a new dataset in an empty folder. */
static enum status begin(const struct folder *folder)
{
    char work[PATH_MAX], spec[PATH_MAX];
    TRY(check_empty(folder));
    TRY(inside(folder, work, WORK));
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(make_folder(work));
    return file_write_atomic(spec, folder->provenance, strlen(folder->provenance));
}

/* Continues an incomplete dataset, or starts a new one. */
static enum status resume(const struct folder *folder)
{
    char spec[PATH_MAX], work[PATH_MAX], *theirs;
    size_t size;
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(inside(folder, work, WORK));
    if (access(spec, F_OK) != 0)
        return begin(folder);
    TRY(file_read(spec, &theirs, &size));
    enum status status = strcmp(theirs, folder->provenance) == 0 ? STATUS_OK : refuse_options(folder, theirs);
    free(theirs);
    if (status != STATUS_OK)
        return status;
    unit_sweep(folder->path);
    unit_sweep(work);
    return STATUS_OK;
}

/* ---- A dataset that has an index ---- */

/* Makes a data set unfinished again, so that --prepare writes its missing or damaged files. Keeps complete
 * units. */
static enum status reopen(const struct folder *folder, const struct index *index, const char *path)
{
    char work[PATH_MAX], spec[PATH_MAX], part[PATH_MAX];
    uint64_t kept = 0;
    TRY(inside(folder, work, WORK));
    TRY(inside(folder, spec, WORK "/spec"));
    TRY(make_folder(work));
    for (uint64_t i = 0; i < index->unit_count; i++)
        if (is_whole(folder, index, i)) {
            TRY(folder_part_path(folder, i, part));
            TRY(index_save(part, index, i, 1));
            kept++;
        }
    TRY(file_write_atomic(spec, folder->provenance, strlen(folder->provenance)));
    if (index->unit_count == 0)
        status_warn("%s was truncated or changed: preparing all files again", path);
    else if (kept < index->unit_count)
        status_warn("%s: %" PRIu64 " of %" PRIu64
                    " %s have missing files, or files of the wrong size; preparing them again",
                    folder->path, index->unit_count - kept, index->unit_count,
                    folder->layout == INDEX_SHARDS  ? "shards"
                    : folder->layout == INDEX_FILES ? "folders"
                                                    : "parts");
    else
        status_warn("%s: samples.csv, classes.txt or the wids index is missing or incomplete; writing the "
                    "lists again",
                    folder->path);
    return unlink(path) == 0 ? STATUS_OK
                             : status_set(STATUS_FAILED, "cannot remove %s: %s", path, strerror(errno));
}

static void remove_work(const struct folder *folder)
{
    char path[PATH_MAX];
    for (uint64_t i = 0; i < folder->unit_count; i++)
        if (folder_part_path(folder, i, path) == STATUS_OK)
            unlink(path);
    if (inside(folder, path, WORK "/spec") == STATUS_OK)
        unlink(path);
    if (inside(folder, path, WORK) == STATUS_OK) {
        unit_sweep(path);
        rmdir(path);
    }
}

/* Handles an index that was truncated or changed and therefore no longer describes the units. If the first
 * line of the index has the options of this run, all units are prepared again, which produces the same bytes.
 * Otherwise the index may belong to another dataset, and the run fails. */
static enum status replace_index(const struct folder *folder, const char *path)
{
    FREED char *theirs = NULL;
    size_t size;
    CLOSED_BY(index_text_free) struct index_text ours;
    const struct index none = {0};
    TRY(index_text_begin(&ours, folder->layout, folder->provenance));
    fflush(ours.stream);
    TRY(file_read(path, &theirs, &size));
    bool same = size >= ours.size && memcmp(theirs, ours.text, ours.size) == 0;
    return same ? reopen(folder, &none, path)
                : status_set(
                      STATUS_USAGE,
                      "%s was truncated or changed, and its first line has other options; remove the folder "
                      "and prepare it again, or remove only the index to read the data set without it",
                      path);
}

/* Checks a dataset that has an index, and reopens it if it is not complete. */
static enum status look_at_index(const struct folder *folder)
{
    char path[PATH_MAX];
    TRY(index_path(folder, path));
    CLOSED_BY(index_free) struct index index;
    enum status status = index_read(path, &index);
    if (status == STATUS_FAILED)
        return replace_index(folder, path);
    TRY(status);
    if (strcmp(index.provenance, folder->provenance) != 0)
        return refuse_options(folder, index.provenance);
    bool complete = lists_are_whole(folder, &index);
    for (uint64_t i = 0; i < index.unit_count; i++)
        complete &= is_whole(folder, &index, i);
    if (!complete)
        return reopen(folder, &index, path);
    remove_work(folder); /* a previous run may have been killed just before this step */
    return STATUS_OK;
}

bool folder_complete(const struct folder *folder)
{
    char path[PATH_MAX];
    return index_path(folder, path) == STATUS_OK && access(path, F_OK) == 0;
}

static uint64_t count_parts(const struct folder *folder)
{
    char path[PATH_MAX];
    uint64_t parts = 0;
    for (uint64_t i = 0; i < folder->unit_count; i++)
        parts += folder_part_path(folder, i, path) == STATUS_OK && access(path, F_OK) == 0;
    return parts;
}

enum status folder_claim(struct folder *folder)
{
    TRY(make_folders(folder->path));
    TRY(lock_folder(folder));
    TRY(folder_complete(folder) ? look_at_index(folder) : resume(folder));
    if (!folder_complete(folder))
        TRY(make_subfolders(folder));
    folder->part_count = count_parts(folder);
    return STATUS_OK;
}

/* ---- Finishing ---- */

static enum status add_part(const struct folder *folder, uint64_t unit, struct index_text *text)
{
    CLOSED_BY(index_free) struct index part;
    TRY(read_part(folder, unit, &part));
    return index_text_add_all(text, &part, 0);
}

enum status folder_gather(const struct folder *folder, struct index *index)
{
    struct index_text text;
    *index = (struct index){0};
    TRY(index_text_begin(&text, folder->layout, folder->provenance));
    enum status status = STATUS_OK;
    for (uint64_t i = 0; i < folder->unit_count && status == STATUS_OK; i++)
        status = add_part(folder, i, &text);
    if (status == STATUS_OK)
        status = index_text_end(&text);
    if (status == STATUS_OK)
        return index_parse(text.text, text.size, index); /* takes ownership of the text */
    index_text_free(&text);
    return status;
}

/* Writes the wids index. Warns instead in builds without jansson. */
static enum status write_wids(const struct folder *folder, const struct index *index)
{
    FREED char *text = NULL;
    char path[PATH_MAX];
    TRY(inside(folder, path, "/%s.wids.json", folder->name));
    enum status status = wids_format(folder->name, index, &text);
    if (status == STATUS_UNAVAILABLE) {
        status_warn("%s is not written: %s", path, status_text());
        return STATUS_OK;
    }
    return status == STATUS_OK ? file_write_atomic(path, text, strlen(text)) : status;
}

enum status folder_conclude(const struct folder *folder, const struct index *index)
{
    char path[PATH_MAX];
    if (folder->class_list) {
        TRY(inside(folder, path, "/" CLASSES_NAME));
        TRY(file_write_atomic(path, folder->class_list, strlen(folder->class_list)));
    }
    if (folder->layout == INDEX_SHARDS)
        TRY(write_wids(folder, index));
    TRY(index_path(folder, path));
    TRY(index_save(path, index, 0, index->unit_count));
    remove_work(folder);
    return STATUS_OK;
}
