#include "synth/synth.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "data/image.h"
#include "data/index.h"
#include "data/npy.h"
#include "synth/class.h"

#define SHEET_SIDE_MAX      8192u
#define SHEET_BORDER        2u  /* pixels around every picture */
#define SHEET_GROUND        64u /* gray of the border */
#define OUT_OF_MEMORY(path) status_set(STATUS_EXHAUSTED, "%s: out of memory", path)

/* ---- Pictures ---- */

enum status picture_available(void)
{
#ifdef HAVE_PNG
    return STATUS_OK;
#else
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot write PNG files: install libpng (libpng-dev) and build again");
#endif
}

/* If the folder does not exist, creates and removes it. No other test shows reliably whether it can be
 * created. */
enum status picture_check_folder(const char *folder)
{
    struct stat info;
    const char *path = *folder ? folder : ".";
    TRY(picture_available());
    if (stat(path, &info) != 0) {
        if (errno == ENOENT && mkdir(path, 0777) == 0 && rmdir(path) == 0)
            return STATUS_OK;
        int cause = errno;
        char parent[PATH_MAX];
        snprintf(parent, sizeof parent, "%s", path);
        const char *above = dirname(parent);
        if (access(above, F_OK) != 0 && errno == ENOENT)
            return status_set(STATUS_USAGE, "%s: its folder does not exist; create it with: mkdir -p '%s'",
                              path, above);
        return status_set(STATUS_USAGE, "cannot create folder '%s': %s", path, strerror(cause));
    }
    if (!S_ISDIR(info.st_mode))
        return status_set(STATUS_USAGE, "'%s' is not a folder: choose another name", path);
    if (access(path, W_OK | X_OK) != 0)
        return status_set(STATUS_USAGE, "cannot write into folder '%s': %s", path, strerror(errno));
    return STATUS_OK;
}

/* Creates the folder and its parents. */
static enum status make_folder(const char *folder)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/", folder);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (*folder && mkdir(path, 0777) != 0 && errno != EEXIST)
            return status_set(STATUS_FAILED, "cannot create folder '%s': %s", path, strerror(errno));
        *slash = '/';
    }
    return STATUS_OK;
}

/* ---- One PNG ---- */

enum status picture_write_png(const char *path, const uint8_t *pixels, const struct png_shape *shape)
{
    FREED void *bytes = NULL;
    size_t size;
    TRY(status_prefix(png_encode(pixels, shape, &bytes, &size), "%s", path));
    return file_write_atomic(path, bytes, size);
}

/* ---- A folder of pictures ---- */

/* Builds "folder/name", or "name" if the folder is "". */
static enum status join_path(char path[PATH_MAX], const char *folder, const char *name)
{
    size_t length = strlen(folder);
    const char *slash = length > 0 && folder[length - 1] != '/' ? "/" : "";
    int size = snprintf(path, PATH_MAX, "%s%s%s", folder, slash, name);
    return size >= 0 && size < PATH_MAX ? STATUS_OK
                                        : status_set(STATUS_USAGE, "the path '%s' is too long", folder);
}

/* The widths of the numbers in file names. Numbers are zero-padded to the width of the largest one, so that
 * sorting by name also sorts by number. */
struct naming {
    int class_digits, instance_digits;
};

static struct naming naming_of(const struct picture *pictures, uint64_t count)
{
    uint32_t class_max = 0;
    uint64_t instance_max = 0;
    for (uint64_t i = 0; i < count; i++) {
        class_max = pictures[i].class_id > class_max ? pictures[i].class_id : class_max;
        instance_max = pictures[i].instance > instance_max ? pictures[i].instance : instance_max;
    }
    struct naming naming = {snprintf(NULL, 0, "%" PRIu32, class_max),
                            snprintf(NULL, 0, "%" PRIu64, instance_max)};
    return naming;
}

/* `ending` is "png" or "mask.png". */
static void picture_name(char name[64], const struct naming *naming, const struct picture *picture,
                         const char *ending)
{
    snprintf(name, 64, "class-%0*" PRIu32 "_instance-%0*" PRIu64 ".%s", naming->class_digits,
             picture->class_id, naming->instance_digits, picture->instance, ending);
}

/* State that the writing threads share. */
struct folder_job {
    const char *folder;
    const struct picture *pictures;
    uint64_t count, written;
    struct naming naming;
    struct progress progress;
    enum status status;
    struct failure failure; /* the first one; messages are per thread */
};

static enum status write_one(const struct folder_job *job, const struct picture *picture)
{
    const struct png_shape shape = {picture->side, picture->side, picture->color ? COLOR_CHANNELS : 1};
    const struct png_shape mask = {picture->side, picture->side, 1};
    char name[64], path[PATH_MAX];
    picture_name(name, &job->naming, picture, "png");
    TRY(join_path(path, job->folder, name));
    TRY(picture_write_png(path, picture->pixels, &shape));
    if (!picture->mask)
        return STATUS_OK;
    picture_name(name, &job->naming, picture, "mask.png");
    TRY(join_path(path, job->folder, name));
    return picture_write_png(path, picture->mask, &mask);
}

/* Records the result of one picture. Call from one thread at a time. */
static void note_written(struct folder_job *job, enum status status)
{
    if (status != STATUS_OK && job->status == STATUS_OK) {
        job->failure = status_save(status);
#pragma omp atomic write
        job->status = status; /* write_all() reads it outside the critical section */
    }
    job->written++;
    if (progress_due(&job->progress))
        progress_show(&job->progress, "writing pictures: %" PRIu64 " of %" PRIu64, job->written, job->count);
}

static enum status write_all(struct folder_job *job)
{
    progress_begin(&job->progress, false);
#pragma omp parallel for schedule(dynamic)
    for (uint64_t i = 0; i < job->count; i++) {
        enum status failed;
#pragma omp atomic read
        failed = job->status;
        if (failed != STATUS_OK)
            continue; /* OpenMP loops cannot break: skip the rest */
        enum status status = write_one(job, &job->pictures[i]);
#pragma omp critical(picture_progress)
        note_written(job, status);
    }
    progress_clear(&job->progress);
    return job->status == STATUS_OK ? STATUS_OK : status_restore(&job->failure);
}

/* Closes an in-memory stream, saves its text as the file `path` and frees the text. */
static enum status save_text(FILE *stream, char **text, size_t *length, const char *path)
{
    enum status status = text_close(stream) ? file_write_atomic(path, *text, *length) : OUT_OF_MEMORY(path);
    free(*text);
    return status;
}

static enum status write_index(const struct folder_job *job)
{
    char path[PATH_MAX], name[64], *text = NULL;
    size_t length = 0;
    TRY(join_path(path, job->folder, DRAWN_NAME));
    FILE *stream = open_memstream(&text, &length);
    if (!stream)
        return OUT_OF_MEMORY(path);
    const bool masks = job->count > 0 && job->pictures[0].mask;
    const bool classes = job->count > 0 && job->pictures[0].classes;
    fprintf(stream, "file\tclass\tinstance\tseed%s%s\n", masks ? "\tmask" : "", classes ? "\tclasses" : "");
    for (uint64_t i = 0; i < job->count; i++) {
        const struct picture *picture = &job->pictures[i];
        picture_name(name, &job->naming, picture, "png");
        fprintf(stream, "%s\t%" PRIu32 "\t%" PRIu64 "\t%" PRIu64, name, picture->class_id, picture->instance,
                picture->seed);
        picture_name(name, &job->naming, picture, "mask.png");
        if (masks)
            fprintf(stream, "\t%s", name);
        fprintf(stream, classes ? "\t%s\n" : "\n", picture->classes);
    }
    return save_text(stream, &text, &length, path);
}

enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count)
{
    struct folder_job job = {.folder = folder, .pictures = pictures, .count = count};
    TRY(picture_available());
    job.naming = naming_of(pictures, count);
    TRY(make_folder(folder));
    TRY(write_all(&job));
    return write_index(&job);
}

/* ---- A contact sheet ---- */

struct sheet {
    uint32_t rows, columns;
    uint32_t shrink; /* picture pixels per sheet pixel, per axis */
    uint32_t pitch;  /* sheet pixels from one picture to the next */
    uint32_t width, height;
    uint32_t channels;
    uint8_t *pixels;
};

static enum status lay_out(struct sheet *sheet, const char *path, const struct picture *pictures,
                           uint64_t count)
{
    const uint32_t room = SHEET_SIDE_MAX - SHEET_BORDER, columns_max = room / (SHEET_BORDER + 1);
    if (count == 0 || count > (uint64_t)columns_max * columns_max)
        return status_set(STATUS_USAGE, "%s: a sheet holds 1 to %" PRIu64 " pictures, not %" PRIu64, path,
                          (uint64_t)columns_max * columns_max, count);
    uint32_t side = 1;
    for (uint64_t i = 0; i < count; i++)
        side = pictures[i].side > side ? pictures[i].side : side;
    sheet->columns = (uint32_t)ceil(sqrt((double)count));
    sheet->rows = (uint32_t)((count + sheet->columns - 1) / sheet->columns); /* at most sheet->columns */
    uint32_t cell_max = room / sheet->columns - SHEET_BORDER;
    sheet->shrink = (side + cell_max - 1) / cell_max;
    sheet->pitch = (side + sheet->shrink - 1) / sheet->shrink + SHEET_BORDER;
    sheet->width = sheet->columns * sheet->pitch + SHEET_BORDER;
    sheet->height = sheet->rows * sheet->pitch + SHEET_BORDER;
    sheet->channels = pictures[0].color ? COLOR_CHANNELS : 1;
    sheet->pixels = malloc((size_t)sheet->width * sheet->height * sheet->channels);
    return sheet->pixels ? STATUS_OK : OUT_OF_MEMORY(path);
}

/* Returns the mean of a channel over the box with upper left corner (x, y), clipped to the picture. */
static uint8_t box_mean(const struct picture *picture, uint32_t channels, uint32_t channel, uint32_t x,
                        uint32_t y, uint32_t shrink)
{
    uint32_t width = picture->side - x < shrink ? picture->side - x : shrink;
    uint32_t height = picture->side - y < shrink ? picture->side - y : shrink;
    uint64_t sum = 0, area = (uint64_t)width * height;
    for (uint32_t row = 0; row < height; row++)
        for (uint32_t column = 0; column < width; column++)
            sum += picture->pixels[((size_t)(y + row) * picture->side + x + column) * channels + channel];
    return (uint8_t)((sum + area / 2) / area);
}

static void place(const struct sheet *sheet, const struct picture *picture, uint64_t number)
{
    size_t left = SHEET_BORDER + (size_t)(number % sheet->columns) * sheet->pitch;
    size_t top = SHEET_BORDER + (size_t)(number / sheet->columns) * sheet->pitch;
    for (uint32_t y = 0; y < picture->side; y += sheet->shrink) {
        uint8_t *to = sheet->pixels + ((top + y / sheet->shrink) * sheet->width + left) * sheet->channels;
        for (uint32_t x = 0; x < picture->side; x += sheet->shrink)
            for (uint32_t c = 0; c < sheet->channels; c++)
                *to++ = box_mean(picture, sheet->channels, c, x, y, sheet->shrink);
    }
}

static enum status write_sheet_index(const struct sheet *sheet, const char *path,
                                     const struct picture *pictures, uint64_t count)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char folder[PATH_MAX], index_path[PATH_MAX], *text = NULL;
    size_t length = 0;
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    TRY(join_path(index_path, folder, DRAWN_NAME));
    FILE *stream = open_memstream(&text, &length);
    if (!stream)
        return OUT_OF_MEMORY(index_path);
    const bool classes = pictures[0].classes;
    fprintf(stream, "file\tclass\tinstance\tseed\trow\tcolumn%s\n", classes ? "\tclasses" : "");
    for (uint64_t i = 0; i < count; i++) {
        fprintf(stream, "%s\t%" PRIu32 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64, name,
                pictures[i].class_id, pictures[i].instance, pictures[i].seed, i / sheet->columns,
                i % sheet->columns);
        fprintf(stream, classes ? "\t%s\n" : "\n", pictures[i].classes);
    }
    return save_text(stream, &text, &length, index_path);
}

enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count)
{
    struct sheet sheet;
    TRY(picture_available());
    TRY(lay_out(&sheet, path, pictures, count));
    memset(sheet.pixels, SHEET_GROUND, (size_t)sheet.width * sheet.height * sheet.channels);
#pragma omp parallel for schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        place(&sheet, &pictures[i], i);
    const struct png_shape shape = {sheet.width, sheet.height, sheet.channels};
    enum status status = picture_write_png(path, sheet.pixels, &shape);
    free(sheet.pixels);
    return status == STATUS_OK ? write_sheet_index(&sheet, path, pictures, count) : status;
}

/* ---- NumPy files ---- */

enum status npy_target_path(const char *path, const char *target, char target_path[PATH_MAX])
{
    size_t length = strlen(path);
    int stem = (int)(text_ends_in(path, ".npy") ? length - 4 : length);
    int bytes = snprintf(target_path, PATH_MAX, "%.*s.%s.npy", stem, path, target);
    return bytes < PATH_MAX ? STATUS_OK
                            : status_set(STATUS_USAGE, "the file name '%.80s...' is too long", path);
}

/* Begins a NumPy file. Examples: `type` is "<f4"; `shape` is "2, 3". */
static enum status begin_array(struct file_writer *writer, const char *path, const char *type,
                               const char *shape)
{
    char header[NPY_HEADER_MAX];
    TRY(file_begin(writer, path));
    return file_add(writer, header, npy_header_make(header, type, shape));
}

/* Formats the shape of the batch, such as "256, 3, 224, 224". */
static void shape_of(const struct synth *synth, char shape[NPY_SHAPE_MAX])
{
    const struct synth_output *output = &synth->output;
    if (output->layout == OUTPUT_NCHW)
        snprintf(shape, NPY_SHAPE_MAX, "%" PRIu64 ", %u, %u, %u", synth->batch, output->channels, output->res,
                 output->res);
    else
        snprintf(shape, NPY_SHAPE_MAX, "%" PRIu64 ", %u, %u, %u", synth->batch, output->res, output->res,
                 output->channels);
}

static enum status begin_images(struct file_writer *writer, const char *path, const struct synth *synth)
{
    char shape[NPY_SHAPE_MAX];
    shape_of(synth, shape);
    return begin_array(writer, path, dtype_npy(synth->output.type), shape);
}

/* The files of a batch. */
struct npy_files {
    struct file_writer images, masks, points, labels;
};

/* Copies the images, masks and point clouds of the batch to the files, and their labels to `labels`. Sets
 * each label before it calls fetch(), because some variants do not set labels. */
static enum status add_images(struct npy_files *files, const struct synth *synth,
                              const struct variant *variant, void *state, uint8_t *pixels, int64_t *labels)
{
    const size_t bytes = synth_output_bytes(synth), mask_bytes = synth_mask_bytes(synth);
    const size_t cloud_bytes = synth_cloud_bytes(synth);
    FREED float *cloud = cloud_bytes ? malloc(cloud_bytes) : NULL;
    TRY(ALLOCATED(cloud || !cloud_bytes, "out of memory for a point cloud"));
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_image image = synth_image_at(synth->first, synth->stride, synth->turns, 0, j);
        struct synth_fetch fetch = {.j = j,
                                    .pixels = pixels,
                                    .mask = mask_bytes ? pixels + bytes : NULL,
                                    .cloud = cloud,
                                    .label = synth_label(synth, image)};
        TRY(variant->fetch(state, &fetch));
        TRY(file_add(&files->images, pixels, bytes));
        if (mask_bytes)
            TRY(file_add(&files->masks, fetch.mask, mask_bytes));
        if (cloud_bytes)
            TRY(file_add(&files->points, cloud, cloud_bytes));
        labels[j] = fetch.label;
    }
    return STATUS_OK;
}

/* Begins the file of a target: "labels", "masks", "multihot" or "points". */
static enum status begin_target(struct file_writer *writer, const char *path, const char *target,
                                const char *type, const char *shape)
{
    char target_path[PATH_MAX];
    TRY(npy_target_path(path, target, target_path));
    return begin_array(writer, target_path, type, shape);
}

/* The target whose file has what takes the place of masks. */
static const char *mask_target(const struct synth *synth)
{
    return synth_multi_hot(synth) ? "multihot" : "masks";
}

static enum status begin_masks(struct file_writer *writer, const char *path, const struct synth *synth)
{
    char shape[NPY_SHAPE_MAX];
    if (synth_multi_hot(synth))
        snprintf(shape, sizeof shape, "%" PRIu64 ", %u", synth->batch, synth->class_count);
    else
        snprintf(shape, sizeof shape, "%" PRIu64 ", %u, %u", synth->batch, synth->output.res,
                 synth->output.res);
    return begin_target(writer, path, mask_target(synth), "|u1", shape);
}

static enum status begin_points(struct file_writer *writer, const char *path, const struct synth *synth)
{
    char shape[NPY_SHAPE_MAX];
    snprintf(shape, sizeof shape, "%" PRIu64 ", %u, 3", synth->batch, synth->ifs.cloud);
    return begin_target(writer, path, "points", "<f4", shape);
}

/* Writes all images, masks and point clouds, but does not yet rename the files from their temporary names. */
static enum status complete_images(struct npy_files *files, const char *path, const struct synth *synth,
                                   const struct variant *variant, void *state, int64_t *labels)
{
    FREED uint8_t *pixels = malloc(synth_output_bytes(synth) + synth_mask_bytes(synth));
    TRY(ALLOCATED(pixels, "%s: out of memory; lower --out-res", path));
    TRY(begin_images(&files->images, path, synth));
    if (synth_mask_bytes(synth))
        TRY(begin_masks(&files->masks, path, synth));
    if (synth_cloud_bytes(synth))
        TRY(begin_points(&files->points, path, synth));
    TRY(add_images(files, synth, variant, state, pixels, labels));
    if (synth_mask_bytes(synth))
        TRY(file_complete(&files->masks));
    if (synth_cloud_bytes(synth))
        TRY(file_complete(&files->points));
    return file_complete(&files->images);
}

/* Writes all labels to a file, but does not yet rename this file from its temporary name. */
static enum status complete_labels(struct file_writer *writer, const char *path, const int64_t *labels,
                                   uint64_t count)
{
    char shape[32];
    snprintf(shape, sizeof shape, "%" PRIu64 ",", count);
    TRY(begin_target(writer, path, "labels", "<i8", shape));
    TRY(file_add(writer, labels, count * sizeof *labels));
    return file_complete(writer);
}

/* Prints a note about the files. The hint about bfloat16 is printed even if stderr is not a terminal, so that
 * logs contain it. */
static void report_written(const char *path, const struct synth *synth)
{
    static const char *const types[] = {
        [DTYPE_U8] = "uint8", [DTYPE_F16] = "float16", [DTYPE_BF16] = "uint16", [DTYPE_F32] = "float32"};
    char shape[NPY_SHAPE_MAX], labels_path[PATH_MAX], more_path[PATH_MAX];
    const char *target = synth_mask_bytes(synth)    ? mask_target(synth)
                         : synth_cloud_bytes(synth) ? "points"
                                                    : NULL;
    const bool more = target && npy_target_path(path, target, more_path) == STATUS_OK;
    shape_of(synth, shape);
    if (npy_target_path(path, "labels", labels_path) == STATUS_OK)
        status_note("wrote %s (%s) %s and %s (%" PRIu64 ")%s%s", path, shape, types[synth->output.type],
                    labels_path, synth->batch, more ? " and " : "", more ? more_path : "");
    if (synth->output.type == DTYPE_BF16)
        status_say("%s stores bfloat16 as <u2; to convert the loaded array a in PyTorch: "
                   "torch.from_numpy(a.view('int16')).view(torch.bfloat16)",
                   path);
}

/* Removes the files of targets that an earlier run wrote beside `path` and that this run does not have:
 * they belong to other images. */
static enum status remove_others(const char *path, const struct synth *synth)
{
    const char *const targets[] = {"masks", "multihot", "points"};
    const char *const masks = synth_mask_bytes(synth) ? mask_target(synth) : "";
    char other[PATH_MAX];
    for (size_t i = 0; i < COUNT_OF(targets); i++) {
        const bool written =
            strcmp(targets[i], masks) == 0 || (i == 2 && synth_cloud_bytes(synth)); /* by this run */
        if (written)
            continue;
        TRY(npy_target_path(path, targets[i], other));
        if (unlink(other) == 0)
            status_note("removed %s, which belonged to images of an earlier run", other);
        else if (errno != ENOENT)
            return status_set(STATUS_FAILED,
                              "%s: belongs to other images, and cannot be removed: %s; remove it, or choose "
                              "another --npy",
                              other, strerror(errno));
    }
    return STATUS_OK;
}

static void abandon(struct npy_files *files)
{
    file_abandon(&files->images);
    file_abandon(&files->masks);
    file_abandon(&files->points);
    file_abandon(&files->labels);
}

/* Fetches the images of the latest run, which must be run 0, and writes them to `path`. The shape is (N, C,
 * H, W) or (N, H, W, C), in C order. The type is |u1, <f2 or <f4; bfloat16, which NumPy lacks, is stored as
 * <u2. The labels, int64 of shape (N), are written to the labels' file, masks, |u1 of shape (N, H, W), or
 * multi-hot labels, |u1 of shape (N, classes), to their own, and point clouds, <f4 of shape (N, points, 3),
 * to the points' file. Keeps one image at a time in memory. Renames the files only when all are complete, so
 * a failure while writing leaves existing files unchanged. */
static enum status npy_write_batch(const char *path, const struct synth *synth, const struct variant *variant,
                                   void *state)
{
    CLOSED_BY(abandon) struct npy_files files = {{.fd = -1}, {.fd = -1}, {.fd = -1}, {.fd = -1}};
    FREED int64_t *labels = malloc(synth->batch * sizeof *labels);
    TRY(ALLOCATED(labels, "%s: out of memory; lower --batch", path));
    TRY(complete_images(&files, path, synth, variant, state, labels));
    TRY(complete_labels(&files.labels, path, labels, synth->batch));
    TRY(file_end(&files.labels));
    if (synth_mask_bytes(synth))
        TRY(file_end(&files.masks));
    if (synth_cloud_bytes(synth))
        TRY(file_end(&files.points));
    TRY(file_end(&files.images));
    report_written(path, synth);
    return remove_others(path, synth);
}

/* ---- The files of a batch ---- */

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
    if (snprintf(path, PATH_MAX, "%s%s" DRAWN_NAME, folder, slash ? "/" : "") >= PATH_MAX)
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

/* Checks that --npy can write `path` and the file of a target, and stores the name of the latter. */
static enum status check_npy(const char *path, const char *target, char *target_path)
{
    static const struct file_kind npy = {"NumPy file", 0, "\x93NUMPY", 6};
    TRY(npy_target_path(path, target, target_path));
    TRY(file_check_kind(target_path, &npy));
    return check_pair(path, &npy, target_path);
}

/* Refuses a file whose name ends as that of another format, because other programs would misread it. */
static enum status check_ending(const char *option, const char *path, const char *own)
{
    static const char *const endings[] = {".png", ".npy", ".npz",  ".jpg",  ".jpeg", ".gif",
                                          ".bmp", ".tif", ".tiff", ".webp", ".pdf",  ".pt"};
    const char *dot = strrchr(path, '.');
    for (size_t i = 0; dot && i < COUNT_OF(endings); i++)
        if (strcmp(endings[i], own) != 0 && strcasecmp(dot, endings[i]) == 0)
            return status_value(STATUS_USAGE, option, path,
                                " would be a file of the format %s; choose a name that ends in %s", own + 1,
                                own);
    return STATUS_OK;
}

/* Checks that no other option names the file of a target of --npy. */
static enum status check_alone(const struct options *given, const char *file)
{
    for (size_t t = 0; t < given->table_count; t++)
        for (size_t i = 0; i < given->tables[t].count; i++) {
            const struct option_spec *spec = &given->tables[t].specs[i];
            const char *other = NULL;
            if (spec->kind == OPTION_OUTPUT)
                other = *(const char **)((char *)given->tables[t].values + spec->offset);
            if (other && file_same(other, file))
                return status_set(STATUS_USAGE, "--npy and --%s would both write %s; choose another file",
                                  spec->name, file);
        }
    return STATUS_OK;
}

enum status deliver_check(const struct options *given, const struct synth *synth,
                          const struct deliver_files *files)
{
    char sheet_index[PATH_MAX], png_index[PATH_MAX], target[PATH_MAX];
    if (files->png || files->sheet)
        TRY(picture_available());
    if (files->sheet) {
        TRY(check_ending("sheet", files->sheet, ".png"));
        TRY(check_sheet(files->sheet, sheet_index));
    }
    if (files->png) {
        TRY(picture_check_folder(files->png));
        TRY(check_index(files->png, png_index));
    }
    if (files->png && files->sheet && file_same(sheet_index, png_index))
        return status_set(STATUS_USAGE, "--sheet and --png would both write %s; choose another folder",
                          png_index);
    if (files->npy) {
        TRY(check_ending("npy", files->npy, ".npy"));
        TRY(check_npy(files->npy, "labels", target));
        TRY(check_alone(given, target));
    }
    if (files->npy && (synth->rules.masked || synth_multi_hot(synth))) {
        TRY(check_npy(files->npy, mask_target(synth), target));
        TRY(check_alone(given, target));
    }
    if (files->npy && synth_cloud_bytes(synth)) {
        TRY(check_npy(files->npy, "points", target));
        TRY(check_alone(given, target));
    }
    if (!files->write_classes)
        return STATUS_OK;
    return (files->class_format == CLASSES_PUBLISHED ? published_files_check : class_check_csv)(
        files->write_classes, formulas[synth->formula]);
}

enum status deliver_classes(const struct synth *synth, const struct deliver_files *files)
{
    return (files->class_format == CLASSES_PUBLISHED ? published_files_write : class_write_csv)(
        files->write_classes, formulas[synth->formula], synth->rows, synth->class_count);
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
    const size_t image_bytes = synth_output_bytes(synth), bytes = image_bytes + synth_mask_bytes(synth);
    TRY(memory_check(synth->batch * bytes, "writing pictures of the batch", "lower --batch or --res"));
    FREED uint8_t *pixels = malloc(synth->batch * bytes);
    FREED struct picture *pictures = calloc(synth->batch, sizeof *pictures);
    FREED char(*classes)[SYNTH_CLASSES_TEXT] = calloc(synth->batch, sizeof *classes);
    TRY(ALLOCATED(pixels && pictures && classes, "out of memory for pictures of the batch; lower --batch"));
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_image image = synth_image_at(synth->first, synth->stride, synth->turns, 0, j);
        uint8_t *own = pixels + j * bytes, *mask = synth->rules.masked ? own + image_bytes : NULL;
        struct synth_fetch fetch = {.j = j, .pixels = own, .mask = mask};
        pictures[j] = (struct picture){.pixels = own,
                                       .mask = mask,
                                       .color = synth->output.channels > 1,
                                       .classes = synth_multi_hot(synth) ? classes[j] : NULL,
                                       .side = synth->output.res,
                                       .class_id = synth_label(synth, image),
                                       .instance = image.instance,
                                       .seed = synth->seed};
        TRY(variant->fetch(state, &fetch));
        TRY(output_interleave(&synth->output, own));
        synth_classes_text(synth, image, classes[j]);
    }
    return write_pictures(synth, files, name, pictures);
}

static enum status deliver_npy(const struct synth *synth, const char *file, const char *name,
                               const struct variant *variant, void *state)
{
    char path[2 * PATH_MAX], target[PATH_MAX];
    picture_path(path, sizeof path, file, name, false);
    if (name)
        TRY(make_parent(path));
    TRY(check_npy(path, "labels", target));
    if (synth_mask_bytes(synth))
        TRY(check_npy(path, mask_target(synth), target));
    if (synth_cloud_bytes(synth))
        TRY(check_npy(path, "points", target));
    return npy_write_batch(path, synth, variant, state);
}

enum status deliver_write(const struct synth *synth, const struct deliver_files *files, const char *name,
                          const struct variant *variant, void *state)
{
    if (files->png || files->sheet)
        TRY(deliver_pictures(synth, files, name, variant, state));
    if ((files->png || files->sheet) && synth_cloud_bytes(synth) && !files->npy)
        status_say("the pictures leave out the point clouds; --npy FILE writes them");
    return files->npy ? deliver_npy(synth, files->npy, name, variant, state) : STATUS_OK;
}
