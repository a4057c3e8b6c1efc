#include "synth/picture.h"

#include "core/status.h"

#ifdef HAVE_PNG

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/image_formats.h"

#define SHEET_SIDE_MAX      8192u
#define SHEET_BORDER        2u  /* pixels around every picture */
#define SHEET_GROUND        64u /* gray of the border */
#define PROGRESS_PERIOD_S   0.1
#define INDEX_NAME          "index.tsv"
#define OUT_OF_MEMORY(path) status_set(STATUS_EXHAUSTED, "%s: out of memory", path)

enum status picture_available(void)
{
    return STATUS_OK;
}

/* If the folder does not exist, creates and removes it. No other test shows reliably whether it can be
 * created. */
enum status picture_check_folder(const char *folder)
{
    struct stat info;
    const char *path = *folder ? folder : ".";
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

enum status picture_write_png(const char *path, const uint8_t *pixels, uint32_t width, uint32_t height)
{
    const struct png_shape shape = {width, height, 1};
    FREED void *bytes = NULL;
    size_t size;
    enum status status = png_encode(pixels, &shape, &bytes, &size);
    return status == STATUS_OK ? file_write_atomic(path, bytes, size) : status_prefix(status, "%s", path);
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

static void picture_name(char name[64], const struct naming *naming, const struct picture *picture)
{
    snprintf(name, 64, "class-%0*" PRIu32 "_instance-%0*" PRIu64 ".png", naming->class_digits,
             picture->class_id, naming->instance_digits, picture->instance);
}

/* State that the writing threads share. */
struct folder_job {
    const char *folder;
    const struct picture *pictures;
    uint64_t count, written;
    struct naming naming;
    double shown_s; /* when progress was last shown; negative if stderr is not a terminal */
    enum status status;
    char text[1024]; /* message of the first failure, copied because status_text() is per thread */
};

static enum status write_one(const struct folder_job *job, const struct picture *picture)
{
    char name[64], path[PATH_MAX];
    picture_name(name, &job->naming, picture);
    TRY(join_path(path, job->folder, name));
    return picture_write_png(path, picture->pixels, picture->side, picture->side);
}

/* Records the result of one picture. Call from one thread at a time. */
static void note_written(struct folder_job *job, enum status status)
{
    if (status != STATUS_OK && job->status == STATUS_OK) {
        snprintf(job->text, sizeof job->text, "%s", status_text());
#pragma omp atomic write
        job->status = status; /* write_all() reads it outside the critical section */
    }
    job->written++;
    double now_s = timer_now_s();
    if (job->shown_s < 0 || now_s - job->shown_s < PROGRESS_PERIOD_S)
        return;
    job->shown_s = now_s;
    fprintf(stderr, "\r\033[Kwriting pictures: %" PRIu64 " of %" PRIu64, job->written, job->count);
}

static enum status write_all(struct folder_job *job)
{
    job->shown_s = status_shows_progress() ? timer_now_s() : -1;
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
    if (job->shown_s >= 0)
        fprintf(stderr, "\r\033[K");
    return job->status == STATUS_OK ? STATUS_OK : status_set(job->status, "%s", job->text);
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
    TRY(join_path(path, job->folder, INDEX_NAME));
    FILE *stream = open_memstream(&text, &length);
    if (!stream)
        return OUT_OF_MEMORY(path);
    fprintf(stream, "file\tclass\tinstance\tseed\n");
    for (uint64_t i = 0; i < job->count; i++) {
        const struct picture *picture = &job->pictures[i];
        picture_name(name, &job->naming, picture);
        fprintf(stream, "%s\t%" PRIu32 "\t%" PRIu64 "\t%" PRIu64 "\n", name, picture->class_id,
                picture->instance, picture->seed);
    }
    return save_text(stream, &text, &length, path);
}

enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count)
{
    struct folder_job job = {.folder = folder, .pictures = pictures, .count = count};
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
    sheet->pixels = malloc((size_t)sheet->width * sheet->height);
    return sheet->pixels ? STATUS_OK : OUT_OF_MEMORY(path);
}

/* Returns the mean of the box with upper left corner (x, y), clipped to the picture. */
static uint8_t box_mean(const struct picture *picture, uint32_t x, uint32_t y, uint32_t shrink)
{
    uint32_t width = picture->side - x < shrink ? picture->side - x : shrink;
    uint32_t height = picture->side - y < shrink ? picture->side - y : shrink;
    uint64_t sum = 0, area = (uint64_t)width * height;
    for (uint32_t row = 0; row < height; row++)
        for (uint32_t column = 0; column < width; column++)
            sum += picture->pixels[(size_t)(y + row) * picture->side + x + column];
    return (uint8_t)((sum + area / 2) / area);
}

static void place(const struct sheet *sheet, const struct picture *picture, uint64_t number)
{
    size_t left = SHEET_BORDER + (size_t)(number % sheet->columns) * sheet->pitch;
    size_t top = SHEET_BORDER + (size_t)(number / sheet->columns) * sheet->pitch;
    for (uint32_t y = 0; y < picture->side; y += sheet->shrink) {
        uint8_t *row = sheet->pixels + (top + y / sheet->shrink) * sheet->width + left;
        for (uint32_t x = 0; x < picture->side; x += sheet->shrink)
            row[x / sheet->shrink] = box_mean(picture, x, y, sheet->shrink);
    }
}

static enum status write_sheet_index(const struct sheet *sheet, const char *path,
                                     const struct picture *pictures, uint64_t count)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char folder[PATH_MAX], index_path[PATH_MAX], *text = NULL;
    size_t length = 0;
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    TRY(join_path(index_path, folder, INDEX_NAME));
    FILE *stream = open_memstream(&text, &length);
    if (!stream)
        return OUT_OF_MEMORY(index_path);
    fprintf(stream, "file\tclass\tinstance\tseed\trow\tcolumn\n");
    for (uint64_t i = 0; i < count; i++)
        fprintf(stream, "%s\t%" PRIu32 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\n", name,
                pictures[i].class_id, pictures[i].instance, pictures[i].seed, i / sheet->columns,
                i % sheet->columns);
    return save_text(stream, &text, &length, index_path);
}

enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count)
{
    struct sheet sheet;
    TRY(lay_out(&sheet, path, pictures, count));
    memset(sheet.pixels, SHEET_GROUND, (size_t)sheet.width * sheet.height);
#pragma omp parallel for schedule(dynamic)
    for (uint64_t i = 0; i < count; i++)
        place(&sheet, &pictures[i], i);
    enum status status = picture_write_png(path, sheet.pixels, sheet.width, sheet.height);
    free(sheet.pixels);
    return status == STATUS_OK ? write_sheet_index(&sheet, path, pictures, count) : status;
}

#else

enum status picture_available(void)
{
    return status_set(STATUS_UNAVAILABLE,
                      "this build cannot write PNG files: install libpng (libpng-dev) and build again");
}

enum status picture_check_folder(const char *folder)
{
    (void)folder;
    return picture_available();
}

enum status picture_write_png(const char *path, const uint8_t *pixels, uint32_t width, uint32_t height)
{
    (void)path, (void)pixels, (void)width, (void)height;
    return picture_available();
}

enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count)
{
    (void)folder, (void)pictures, (void)count;
    return picture_available();
}

enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count)
{
    (void)path, (void)pictures, (void)count;
    return picture_available();
}

#endif
