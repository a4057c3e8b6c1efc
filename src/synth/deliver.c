#include "synth/deliver.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "synth/class.h"
#include "synth/npy.h"
#include "synth/picture.h"

/* Stores the folder of a file in `folder`, a buffer of PATH_MAX bytes, and returns `folder`. The folder is ""
 * or ends in a slash. */
static const char *folder_of(const char *file, char *folder)
{
    const char *slash = strrchr(file, '/');
    snprintf(folder, PATH_MAX, "%.*s", slash ? (int)(slash - file + 1) : 0, file);
    return folder;
}

/* Stores the path of the folder's index.tsv in `path`, a buffer of PATH_MAX bytes. Fails if a file of another
 * kind has that name. */
static enum status check_index(const char *folder, char *path)
{
    static const char header[] = "file\tclass\tinstance\tseed";
    static const struct file_kind index = {"picture index", 0, header, sizeof header - 1};
    bool slash = *folder && folder[strlen(folder) - 1] != '/';
    if (snprintf(path, PATH_MAX, "%s%sindex.tsv", folder, slash ? "/" : "") >= PATH_MAX)
        return status_set(STATUS_USAGE, "the name of folder '%s' is too long", folder);
    /* file_check_kind() would refuse an index in a folder that does not exist yet. */
    return access(path, F_OK) != 0 ? STATUS_OK : file_check_kind(path, &index);
}

/* Checks that `path` may be written. This program always writes it together with the file `beside`. If `path`
 * exists without `beside`, another program may have written it, so it must not be overwritten. */
static enum status check_pair(const char *path, const struct file_kind *kind, const char *beside)
{
    struct stat info;
    TRY(file_check_kind(path, kind));
    if (stat(path, &info) != 0 || info.st_size == 0 || stat(beside, &info) == 0)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "%s exists without %s, so another program may have written it; choose another name, "
                      "or remove it",
                      path, beside);
}

static enum status check_sheet(const char *path, char *index)
{
    static const struct file_kind png = {"PNG picture", 0, "\x89PNG\r\n\x1a\n", 8};
    char folder[PATH_MAX];
    if (strpbrk(path, "\t\r\n"))
        return status_set(
            STATUS_USAGE,
            "--sheet '%s': index.tsv cannot store a name with a tab or a line break; choose another", path);
    TRY(check_index(folder_of(path, folder), index));
    return check_pair(path, &png, index);
}

/* Checks that --npy can write `path` and its labels' file. Stores the name of the labels' file in `labels`.
 */
static enum status check_npy(const char *path, char *labels)
{
    static const struct file_kind npy = {"NumPy file", 0, "\x93NUMPY", 6};
    TRY(npy_labels_path(path, labels));
    TRY(file_check_kind(labels, &npy));
    return check_pair(path, &npy, labels);
}

/* Checks that no other option names the labels' file of --npy. */
static enum status check_labels(const struct options *given, const char *labels)
{
    for (size_t t = 0; t < given->table_count; t++)
        for (size_t i = 0; i < given->tables[t].count; i++) {
            const struct option_spec *spec = &given->tables[t].specs[i];
            const char *other = NULL;
            if (spec->kind == OPTION_OUTPUT)
                other = *(const char **)((char *)given->tables[t].values + spec->offset);
            if (other && file_same(other, labels))
                return status_set(STATUS_USAGE, "--npy and --%s would both write %s; choose another file",
                                  spec->name, labels);
        }
    return STATUS_OK;
}

enum status deliver_check(const struct options *given, const struct deliver_files *files)
{
    char sheet_index[PATH_MAX], png_index[PATH_MAX], labels[PATH_MAX];
    if (files->png || files->sheet)
        TRY(picture_available());
    if (files->sheet)
        TRY(check_sheet(files->sheet, sheet_index));
    if (files->png) {
        TRY(picture_check_folder(files->png));
        TRY(check_index(files->png, png_index));
    }
    if (files->png && files->sheet && file_same(sheet_index, png_index))
        return status_set(STATUS_USAGE, "--sheet and --png would both write %s; choose another folder",
                          png_index);
    if (files->npy) {
        TRY(check_npy(files->npy, labels));
        TRY(check_labels(given, labels));
    }
    return files->write_classes ? class_check_csv(files->write_classes) : STATUS_OK;
}

/* Builds the path of one variant's output. If several variants write, `name` is the variant's name: a
 * folder PATH becomes PATH/name, and a file DIR/FILE becomes DIR/name/FILE. Otherwise `name` is NULL. */
static void picture_path(char *result, size_t size, const char *path, const char *name, bool folder)
{
    char parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (!name)
        snprintf(result, size, "%s", path);
    else if (folder)
        snprintf(result, size, "%s/%s", path, name);
    else
        snprintf(result, size, "%s%s/%s", folder_of(path, parent), name, slash ? slash + 1 : path);
}

/* Creates the folder of a variant's file if it does not exist. */
static enum status make_parent(const char *file)
{
    char folder[PATH_MAX];
    if (mkdir(folder_of(file, folder), 0777) == 0 || errno == EEXIST)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "cannot create folder '%s': %s", folder, strerror(errno));
}

/* Checks each path again, because deliver_check() did not see the paths that contain a variant's name. */
static enum status write_pictures(const struct synth *synth, const struct deliver_files *files,
                                  const char *name, const struct picture *pictures)
{
    char path[2 * PATH_MAX], index[PATH_MAX];
    if (files->png) {
        picture_path(path, sizeof path, files->png, name, true);
        TRY(check_index(path, index));
        TRY(picture_write_folder(path, pictures, synth->batch));
    }
    if (files->sheet) {
        picture_path(path, sizeof path, files->sheet, name, false);
        if (name)
            TRY(make_parent(path));
        TRY(check_sheet(path, index));
        TRY(picture_write_sheet(path, pictures, synth->batch));
    }
    return STATUS_OK;
}

/* Writes the images as pictures. Keeps all images in memory at once, because several threads write them. */
static enum status deliver_pictures(const struct synth *synth, const struct deliver_files *files,
                                    const char *name, const struct variant *variant, void *state)
{
    size_t bytes = synth_output_bytes(synth);
    TRY(memory_check(synth->batch * bytes, "writing pictures of the batch", "lower --batch or --res"));
    FREED uint8_t *pixels = malloc(synth->batch * bytes);
    FREED struct picture *pictures = calloc(synth->batch, sizeof *pictures);
    TRY(ALLOCATED(pixels && pictures, "out of memory for pictures of the batch; lower --batch"));
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_image image = synth_image_at(synth->first, synth->stride, synth->class_count, 0, j);
        struct synth_fetch fetch = {.j = j, .pixels = pixels + j * bytes};
        pictures[j] = (struct picture){pixels + j * bytes, synth->output.res,
                                       synth->classes[image.class_index].id, image.instance, synth->seed};
        TRY(variant->fetch(state, &fetch));
    }
    return write_pictures(synth, files, name, pictures);
}

static enum status deliver_npy(const struct synth *synth, const char *file, const char *name,
                               const struct variant *variant, void *state)
{
    char path[2 * PATH_MAX], labels[PATH_MAX];
    picture_path(path, sizeof path, file, name, false);
    if (name)
        TRY(make_parent(path));
    TRY(check_npy(path, labels));
    return npy_write_batch(path, synth, variant, state);
}

enum status deliver_write(const struct synth *synth, const struct deliver_files *files, const char *name,
                          const struct variant *variant, void *state)
{
    if (files->png || files->sheet)
        TRY(deliver_pictures(synth, files, name, variant, state));
    return files->npy ? deliver_npy(synth, files->npy, name, variant, state) : STATUS_OK;
}
