#include "data/embeddings.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "data/file_list.h"
#include "data/tensor_file.h"

/* Linux limits a process to about 65,000 mappings. Therefore, files with at most this many bytes of values
 * are copied instead of mapped. */
#define COPY_BYTES 65536

const char *const embeddings_sample_columns[] = {"first_row", "rows", NULL};

struct embeddings_file {
    char *path; /* owned */
    struct stat info;
    void *mapping;   /* of the whole file, or NULL */
    uint8_t *copies; /* values of its tensors, or NULL; owned */
};

static enum status out_of_memory(void)
{
    return status_set(STATUS_EXHAUSTED, "out of memory for the list of embeddings");
}

/* ---- Selecting tensors ---- */

/* Returns whether `tensor` is selected if the user names no tensor. */
static bool has_axes(const struct tensor *tensor, uint32_t axes)
{
    return tensor->real && tensor->axes == axes;
}

/* Selects tensors of a file: those that match the pattern or, if the pattern is "", the floating-point
 * tensors with `axes` axes. */
struct selection {
    const char *pattern;
    uint32_t axes;
};

static bool is_selected(const struct tensor *tensor, const struct selection *selection)
{
    return *selection->pattern ? fnmatch(selection->pattern, tensor->name, 0) == 0
                               : has_axes(tensor, selection->axes);
}

/* Returns 2 if the file has a floating-point tensor with two axes, else 1. */
static uint32_t default_axes(const struct tensor_file *file)
{
    for (size_t i = 0; i < file->count; i++)
        if (has_axes(&file->tensors[i], 2))
            return 2;
    return 1;
}

/* Sets a message for a file without selected tensors. The message lists the first tensors of the file. */
static enum status explain_none(const struct tensor_file *file, const char *pattern)
{
    char list[600] = "";
    text_append(list, sizeof list, file->count ? "it has " : "it has no tensors");
    for (size_t i = 0; i < file->count && i < 4; i++)
        text_append(list, sizeof list, "%s'%.60s' (%s, %" PRIu32 " axes)", i ? ", " : "",
                    file->tensors[i].name, file->tensors[i].type, file->tensors[i].axes);
    if (*pattern)
        return status_set(STATUS_FAILED, "no tensor matches --tensor '%.80s'; %s%s", pattern, list,
                          file->count > 4 ? " and more" : "");
    return status_set(STATUS_FAILED,
                      "no tensor of float32, float16 or bfloat16 with 1 or 2 axes; %s%s; convert it, or "
                      "leave the file out",
                      list, file->count > 4 ? " and more" : "");
}

static enum status check_tensor(const struct tensor *tensor)
{
    if (tensor->fault)
        return status_set(STATUS_FAILED, "%s", tensor->fault);
    if (!tensor->readable)
        return status_set(STATUS_FAILED,
                          "its values have the type %s; convert them to float32, float16 or bfloat16",
                          tensor->type);
    if (tensor->axes != 1 && tensor->axes != 2)
        return status_set(STATUS_FAILED, "it has %" PRIu32 " axes; embeddings need 2, or 1 for a single row",
                          tensor->axes);
    uint64_t columns = tensor->shape[tensor->axes - 1];
    return columns > 0 && columns <= EMBEDDINGS_COLUMNS_MAX
               ? STATUS_OK
               : status_set(STATUS_FAILED, "it has %" PRIu64 " values per row; 1 to %d are supported",
                            columns, EMBEDDINGS_COLUMNS_MAX);
}

/* ---- Adding files ---- */

/* Refuses a part whose type or number of values per row differs from that of the first part. */
static enum status check_same(const struct embeddings *set, const struct tensor_file *file,
                              const struct tensor *tensor)
{
    uint64_t columns = tensor->shape[tensor->axes - 1];
    if (set->part_count == 0 || (set->columns == columns && set->dtype == tensor->dtype))
        return STATUS_OK;
    const struct embeddings_part *first = &set->parts[0];
    return status_set(
        STATUS_FAILED,
        "%s%s%.100s has %" PRIu64 " values per row of %s, but %s%s%.100s has %" PRIu32
        " of %s; a set has one type and number of values per row: select tensors with --tensor, or "
        "leave a file out",
        file->path, *tensor->name ? ": " : "", tensor->name, columns, dtype_names[tensor->dtype], first->file,
        *first->tensor ? ": " : "", first->tensor, set->columns, dtype_names[set->dtype]);
}

static enum status add_part(struct embeddings *set, const struct embeddings_file *file,
                            const struct tensor *tensor, const uint8_t *values)
{
    char *name = NULL;
    if (!array_grow(&set->parts, set->part_count, sizeof *set->parts) || !(name = strdup(tensor->name)))
        return out_of_memory();
    uint64_t rows = tensor->axes == 2 ? tensor->shape[0] : 1;
    set->parts[set->part_count++] = (struct embeddings_part){
        .file = file->path, .tensor = name, .values = values, .first = set->rows, .rows = rows};
    set->rows += rows;
    set->columns = (uint32_t)tensor->shape[tensor->axes - 1];
    set->dtype = tensor->dtype;
    return STATUS_OK;
}

/* Maps a file, or allocates memory for copies of its values. `bytes` is the size of the values. */
static enum status provide(const struct tensor_file *file, uint64_t bytes, struct embeddings_file *entry)
{
    if (bytes <= COPY_BYTES) {
        entry->copies = malloc(bytes + 1);
        return entry->copies ? STATUS_OK : out_of_memory();
    }
    void *mapping = mmap(NULL, file->bytes, PROT_READ, MAP_SHARED, file->fd, 0);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(errno), "%s: cannot be mapped: %s%s", file->path, strerror(errno),
                          errno == ENOMEM ? "; raise vm.max_map_count, or join files" : "");
    entry->mapping = mapping;
    return STATUS_OK;
}

/* Checks the selected tensors, and adds up their bytes. */
static enum status check_selected(const struct tensor_file *file, const struct selection *selection,
                                  uint64_t *bytes)
{
    size_t selected = 0;
    *bytes = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        if (!is_selected(tensor, selection))
            continue;
        enum status status = check_tensor(tensor);
        if (status != STATUS_OK)
            return *tensor->name ? status_prefix(status, "%s: tensor '%.200s'", file->path, tensor->name)
                                 : status_prefix(status, "%s", file->path);
        *bytes += tensor->bytes;
        selected++;
    }
    return selected ? STATUS_OK : status_prefix(explain_none(file, selection->pattern), "%s", file->path);
}

static enum status add_tensors(struct embeddings *set, const struct tensor_file *file, const char *pattern,
                               struct embeddings_file *entry)
{
    const struct selection selection = {pattern, default_axes(file)};
    uint64_t bytes = 0;
    TRY(check_selected(file, &selection, &bytes));
    TRY(provide(file, bytes, entry));
    uint8_t *copy = entry->copies;
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        if (!is_selected(tensor, &selection))
            continue;
        TRY(check_same(set, file, tensor));
        if (entry->mapping) {
            TRY(add_part(set, entry, tensor, (const uint8_t *)entry->mapping + tensor->offset));
            continue;
        }
        enum status status = tensor_file_read(file, tensor->offset, copy, tensor->bytes);
        if (status != STATUS_OK)
            return status_prefix(status, "%s", file->path);
        TRY(add_part(set, entry, tensor, copy));
        copy += tensor->bytes;
    }
    return STATUS_OK;
}

static enum status add_file(struct embeddings *set, const char *path, const char *pattern)
{
    struct embeddings_file *entry = &set->files[set->file_count++];
    *entry = (struct embeddings_file){.path = strdup(path)};
    if (!entry->path)
        return out_of_memory();
    CLOSED_BY(tensor_file_close) struct tensor_file file;
    TRY(tensor_file_open(entry->path, &file));
    if (fstat(file.fd, &entry->info) != 0)
        return status_set(STATUS_FAILED, "%s: %s", path, strerror(errno));
    return add_tensors(set, &file, pattern, entry);
}

/* ---- Opening ---- */

enum status embeddings_open(const char *path, const char *tensor, struct embeddings **set)
{
    struct paths paths;
    *set = NULL;
    enum status status = paths_find(path, tensor_file_named, &paths);
    if (status == STATUS_OK && paths.count == 0)
        status = status_set(STATUS_USAGE,
                            "%s: no file whose name ends in .npy, .safetensors, .pt, .pth or .pth.tar", path);
    if (status == STATUS_OK)
        status = paths_check_distinct(AT_FDCWD, (const char *const *)paths.names, paths.count);
    struct embeddings *opened = calloc(1, sizeof *opened);
    if (opened)
        opened->files = calloc(paths.count + 1, sizeof *opened->files);
    if (status == STATUS_OK && (!opened || !opened->files))
        status = out_of_memory();
    for (size_t i = 0; status == STATUS_OK && i < paths.count; i++)
        status = add_file(opened, paths.names[i], tensor);
    paths_free(&paths);
    if (status == STATUS_OK)
        *set = opened;
    else
        embeddings_close(opened);
    return status;
}

void embeddings_close(struct embeddings *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->part_count; i++)
        free((char *)set->parts[i].tensor);
    for (size_t i = 0; i < set->file_count; i++) {
        if (set->files[i].mapping)
            munmap(set->files[i].mapping, (size_t)set->files[i].info.st_size);
        free(set->files[i].copies);
        free(set->files[i].path);
    }
    free(set->files);
    free(set->parts);
    free(set);
}

enum status embeddings_check_files(const struct embeddings *set)
{
    for (size_t i = 0; i < set->file_count; i++) {
        const struct embeddings_file *file = &set->files[i];
        struct stat info;
        if (stat(file->path, &info) != 0)
            return status_set(STATUS_FAILED, "%s: cannot be read any more: %s", file->path, strerror(errno));
        const struct file_identity before = file_identify(&file->info), now = file_identify(&info);
        if (file_compare(&before, &now) != 0)
            return status_set(STATUS_FAILED,
                              "%s was changed while it was read: it had %" PRIu64 " bytes and has %" PRIu64
                              " now; read it again when nothing writes it",
                              file->path, (uint64_t)file->info.st_size, (uint64_t)info.st_size);
    }
    return STATUS_OK;
}
