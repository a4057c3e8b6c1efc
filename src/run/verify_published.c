#include "run/compare.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/array.h"
#include "core/file.h"
#include "core/options.h"
#include "core/parallel.h"
#include "core/text.h"
#include "data/image.h"
#include "machine/host.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"
#include "synth/lines.h"

/* ---- Options ---- */

struct verify_options {
    const char *preset;
    int draw; /* 1: points */
    uint64_t threads;
    bool help;
};

static const char *const draws[] = {IFS_DRAW_NAMES, NULL};

#define AT(field) offsetof(struct verify_options, field)
static const struct option_spec specs[] = {
    {"preset", "SET", OPTION_TEXT, AT(preset),
     .help = "the published set: rcdb-1k, rcdb-21k, segrcdb, visualatom-script-1k, fractaldb-1k, "
             "fractaldb-10k, ofdb-1k or ofdb-21k"},
    {"draw", "WHAT", OPTION_CHOICE, AT(draw), .fallback = "patches", .choices = draws,
     .help =
         "what the images of a fractal set show. points: compared pixel by pixel; patches: their bits are "
         "random, so the pixels that they can cover and the share of set bits are compared. WHAT is one of"},
    {"threads", "N", OPTION_COUNT, AT(threads), .maximum = THREADS_MAX,
     .help = "CPU threads; 0 means all that this process may use (default: OMP_NUM_THREADS, else 0)"},
    {"help", NULL, OPTION_FLAG, AT(help), .help = "print this help"},
};

static void print_help(void)
{
    puts("fdsl-bench verify-published - is this copy of a published data set complete and correct?\n"
         "\n"
         "usage: fdsl-bench verify-published DIR --preset SET [options]\n"
         "\n"
         "Compares the PNG files in DIR with the images of the published script, pixel by pixel, and class "
         "files\n"
         "with its parameters. DIR is the folder that the script calls save_root. Any subset of its files "
         "may\n"
         "exist:\n"
         "  rcdb-1k, rcdb-21k     image/CLASS/CLASS_INSTANCE.png, param/CLASS.csv\n"
         "  segrcdb               image/NUMBER.png, mask/NUMBER.png, param/CLASS.csv\n"
         "  visualatom-script-1k  CLASS/vertex_VERTICES_instance_INSTANCE.png, param/CLASS.csv\n"
         "  fractaldb-*, ofdb-*   CLASS/CLASS_WEIGHT_count_COUNT_flipFLIP.png; CLASS.csv, also in param/\n"
         "                        or csv0/ to csv39/\n"
         "\n"
         "examples:\n"
         "  fdsl-bench verify-published dataset/rcdb --preset rcdb-1k\n"
         "  fdsl-bench verify-published SegRCDB-dataset --preset segrcdb --threads 4\n"
         "  fdsl-bench verify-published FractalDB-1k --preset fractaldb-1k\n"
         "\n"
         "options:");
    options_help(stdout, specs, COUNT_OF(specs), NULL);
    puts("\nexit status: 0 all files are equal; 3 a file differs, cannot be read or is not in the set;\n"
         "             2 usage, or there is no file of the set; 4 this machine cannot draw the set");
}

/* ---- Counts ---- */

enum kind { IMAGES, MASKS, CLASSES, KINDS };

static const char *const kind_names[KINDS] = {"images", "masks", "class files"};

#define REASON_BYTES 256

struct verification {
    const char *folder;
    const struct formula *formula;
    const struct published_set *set;
    struct published *published;   /* NULL for fractals */
    const struct ifs_rules *rules; /* of fractals; NULL: not fractals */
    bool points;                   /* of fractals: not patches */
    struct class_row *rows;        /* of fractals: all classes */
    struct ifs_bank *bank;         /* of fractals: orbits of the classes that are being compared */
    struct shown *shown;           /* of fractals: their files */
    size_t shown_count;
    uint32_t shown_class; /* index of the first of these classes */
    int threads;
    struct worker *workers;
    pthread_mutex_t lock; /* of the fields below */
    uint64_t compared[KINDS], equal[KINDS], foreign;
    uint64_t first; /* order number of the first file that differs; UINT64_MAX: none */
    char detail[PATH_MAX + 2 * REASON_BYTES]; /* which one, and why */
    char stranger[PATH_MAX];                  /* a file that is not in the set */
    struct failure failure;                   /* an error that ends the verification */
    atomic_bool failed;
};

/* The memory and the counts of a thread. */
struct worker {
    void *drawing; /* scratch memory of published_draw() */
    struct image_scratch scratch;
    uint8_t *pixels, *mask;
    uint32_t *numbers;                /* of the files in a folder */
    size_t number_count, number_room; /* files of the folder, and the most of a folder */
};

static void count_file(struct verification *verification, enum kind kind, uint64_t order, bool equal,
                       const char *path, const char *reason)
{
    pthread_mutex_lock(&verification->lock);
    verification->compared[kind]++;
    verification->equal[kind] += equal;
    if (!equal && order < verification->first) {
        const size_t length = strlen(path);
        verification->first = order;
        if (strncmp(reason, path, length) == 0 && strncmp(reason + length, ": ", 2) == 0)
            reason += length + 2; /* messages about reading begin with the path */
        snprintf(verification->detail, sizeof verification->detail, "%s: %s", path, reason);
    }
    pthread_mutex_unlock(&verification->lock);
}

static void count_foreign(struct verification *verification, const char *path)
{
    pthread_mutex_lock(&verification->lock);
    if (verification->foreign++ == 0 || strcmp(path, verification->stranger) < 0)
        snprintf(verification->stranger, sizeof verification->stranger, "%s", path);
    pthread_mutex_unlock(&verification->lock);
}

/* ---- Files ---- */

/* Compares a decoded image with ours; every channel has our grays. Returns whether they are equal, else
 * writes the reason. */
static bool compare_pixels(const struct image *image, const uint8_t *ours, uint32_t res, char *reason,
                           size_t size)
{
    uint64_t wrong = 0, first = 0;
    unsigned value = 0; /* of the first wrong pixel */
    size_t plane = (size_t)res * res;
    size_t pixel_step = image->interleaved ? image->channels : 1,
           channel_step = image->interleaved ? 1 : plane;
    for (size_t i = 0; i < plane; i++)
        for (size_t c = 0; c < image->channels; c++)
            if (image->pixels[i * pixel_step + c * channel_step] != ours[i]) {
                first = wrong == 0 ? i : first;
                value = wrong == 0 ? image->pixels[i * pixel_step + c * channel_step] : value;
                wrong++;
                break;
            }
    if (wrong > 0)
        snprintf(reason, size, "%llu pixels differ; the first is pixel (%llu, %llu): %u instead of %u",
                 (unsigned long long)wrong, (unsigned long long)(first % res),
                 (unsigned long long)(first / res), value, ours[first]);
    return wrong == 0;
}

/* Compares a decoded image of patches with the pixels that they can cover: 1 in `covered`. Each of these
 * shows a bit, which is 1 with probability 256 / 511. The bits of different patches are independent, and
 * those of one patch nearly so: the share of ones may be six standard deviations from its mean. */
static bool compare_patches(const struct image *image, const uint8_t *covered, uint32_t res, char *reason,
                            size_t size)
{
    const size_t plane = (size_t)res * res, step = image->interleaved ? image->channels : 1;
    size_t pixels = 0, ones = 0;
    for (size_t i = 0; i < plane; i++) {
        const uint8_t value = image->pixels[i * step];
        for (size_t c = 1; c < image->channels; c++)
            if (image->pixels[i * step + c * (image->interleaved ? 1 : plane)] != value) {
                snprintf(reason, size, "pixel (%zu, %zu) is not gray", i % res, i / res);
                return false;
            }
        if (value != 0 && (value != IFS_GRAY || !covered[i])) {
            snprintf(reason, size, "pixel (%zu, %zu) is %u, but %s", i % res, i / res, value,
                     covered[i] ? "patches have the gray 127" : "no patch covers it");
            return false;
        }
        pixels += covered[i];
        ones += value != 0;
    }
    const double mean = (double)pixels * 256 / 511;
    if (fabs((double)ones - mean) <= 6 * 0.5 * sqrt((double)pixels))
        return true;
    snprintf(reason, size, "%.2f %% of the %zu pixels that patches cover are set, instead of 50.1 %%",
             100.0 * (double)ones / (double)pixels, pixels);
    return false;
}

/* Returns what is wrong with the format of an image file that was decoded, or NULL. Decoding drops the low
 * bits of 16-bit values, and the transparency. The header of a PNG file has the bits per value at byte 24,
 * and the kind of pixels at byte 25, where the bit 4 says that they are transparent. */
static const char *odd_format(const char *bytes)
{
    if (memcmp(bytes, "\x89PNG", 4) != 0)
        return "it is not a PNG file";
    return bytes[24] == 16 ? "it has 16 bits per value instead of 8"
           : bytes[25] & 4 ? "it has transparent pixels"
                           : NULL;
}

/* Reads a PNG file and compares it with our pixels, or with those that patches can cover. A file that cannot
 * be decoded differs. */
static enum status compare_file(struct verification *verification, struct worker *worker, enum kind kind,
                                uint64_t order, const char *path, const uint8_t *ours)
{
    const uint32_t res = verification->set->res;
    FREED char *bytes = NULL;
    char reason[REASON_BYTES];
    size_t size;
    struct image image;
    bool is_image = false, equal = false;
    enum status status = file_read(path, &bytes, &size);
    if (status == STATUS_OK)
        status = image_decode("png", (const uint8_t *)bytes, size, &worker->scratch, &image, &is_image);
    if (status == STATUS_EXHAUSTED || status == STATUS_UNAVAILABLE)
        return status;
    if (status != STATUS_OK)
        snprintf(reason, sizeof reason, "%s", status_text());
    else if (!is_image || odd_format(bytes))
        snprintf(reason, sizeof reason, "%s", is_image ? odd_format(bytes) : "it is not a PNG file");
    else if (image.width != res || image.height != res || image.type != DTYPE_U8)
        snprintf(reason, sizeof reason, "it has %u x %u pixels instead of %u x %u", image.width, image.height,
                 res, res);
    else
        equal = (verification->rules && !verification->points ? compare_patches : compare_pixels)(
            &image, ours, res, reason, sizeof reason);
    count_file(verification, kind, order, equal, path, reason);
    return STATUS_OK;
}

static bool exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0;
}

/* ---- Folders ---- */

/* Returns the last number in a name "...NUMBER.png"; UINT32_MAX if there is none. */
static uint32_t number_of_name(const char *name)
{
    const char *dot = strrchr(name, '.');
    const char *digits = dot;
    while (digits && digits > name && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    return digits && digits < dot && dot - digits <= 9 ? (uint32_t)strtoul(digits, NULL, 10) : UINT32_MAX;
}

/* Returns the number of the instance in the name of an image; UINT32_MAX if there is none. */
static uint32_t instance_of_name(const struct verification *verification, const char *name)
{
    const struct ifs_rules *rules = verification->rules;
    unsigned weight, count, flip;
    if (!rules)
        return number_of_name(name);
    if (sscanf(name, "%*9u_%2u_count_%6u_flip%1u", &weight, &count, &flip) != 3 ||
        weight >= ifs_orbits(rules) || flip >= rules->flips)
        return UINT32_MAX;
    return (count * ifs_orbits(rules) + weight) * rules->flips + flip;
}

static void image_name(const struct verification *verification, const struct class_row *row, uint32_t number,
                       char name[PUBLISHED_NAME_BYTES])
{
    if (verification->rules)
        ifs_image_name(verification->rules, row->id, number, name);
    else
        published_image_name(verification->set, row, number, name);
}

static enum status add_number(struct worker *worker, uint32_t number)
{
    if (worker->number_count == worker->number_room) {
        TRY(ALLOCATED(array_grow(&worker->numbers, worker->number_room, sizeof *worker->numbers),
                      "out of memory for a list of files"));
        worker->number_room++;
    }
    worker->numbers[worker->number_count++] = number;
    return STATUS_OK;
}

/* Lists the numbers below `count` of the PNG files in a folder, in ascending order. Counts PNG files with
 * names that are not in the set. A folder that does not exist has no files. */
static enum status list_files(struct verification *verification, struct worker *worker, const char *path,
                              const struct class_row *row, uint32_t count)
{
    CLOSED_BY(folder_close) DIR *folder = opendir(path);
    worker->number_count = 0;
    if (!folder && errno == ENOENT)
        return STATUS_OK;
    if (!folder)
        return status_about(status_set(STATUS_FAILED, "%s: %s", path, strerror(errno)), path);
    for (struct dirent *entry; (entry = readdir(folder));) {
        char expected[PUBLISHED_NAME_BYTES], whole[PATH_MAX];
        if (!text_ends_in(entry->d_name, ".png"))
            continue;
        uint32_t number = instance_of_name(verification, entry->d_name);
        image_name(verification, row, number, expected);
        const size_t length = strlen(expected);
        if (number < count && strncmp(expected, entry->d_name, length) == 0 &&
            strcmp(entry->d_name + length, ".png") == 0) {
            TRY(add_number(worker, number));
            continue;
        }
        if (snprintf(whole, sizeof whole, "%s/%s", path, entry->d_name) < (int)sizeof whole)
            count_foreign(verification, whole);
    }
    if (worker->number_count > 0)
        qsort(worker->numbers, worker->number_count, sizeof *worker->numbers, compare_u32);
    return STATUS_OK;
}

static void draw(const struct verification *verification, struct worker *worker, uint32_t class_index,
                 uint64_t instance)
{
    const struct published_image image = {.class_index = class_index,
                                          .instance = instance,
                                          .canvas = worker->pixels,
                                          .mask = worker->mask,
                                          .pitch = PUBLISHED_RES};
    published_draw(verification->published, &image, worker->drawing);
}

/* ---- RCDB and VisualAtom: a folder per class ---- */

static enum status verify_class(struct verification *verification, struct worker *worker, uint32_t block)
{
    const struct published_set *set = verification->set;
    const struct published_class *class_ = &published_classes(verification->published)[block];
    char folder[PATH_MAX], path[PATH_MAX + 64], name[PUBLISHED_NAME_BYTES];
    struct class_row row;
    const char *inner = set->law == PUBLISHED_RCDB ? "/image" : "";
    if (snprintf(folder, sizeof folder, "%s%s/%05u", verification->folder, inner, class_->number) >=
        (int)sizeof folder)
        return status_set(STATUS_USAGE, "%s: the path is too long", verification->folder);
    published_row(verification->formula, class_, &row);
    TRY(list_files(verification, worker, folder, &row, (uint32_t)set->instances));
    for (size_t i = 0; i < worker->number_count; i++) {
        uint32_t instance = worker->numbers[i];
        published_image_name(set, &row, instance, name);
        snprintf(path, sizeof path, "%s/%s.png", folder, name);
        draw(verification, worker, block, instance);
        TRY(compare_file(verification, worker, IMAGES, (uint64_t)block * set->instances + instance, path,
                         worker->pixels));
    }
    return STATUS_OK;
}

/* ---- SegRCDB: one folder of images, one of masks ---- */

static enum status verify_pair(struct verification *verification, struct worker *worker, uint32_t number)
{
    char paths[2][PATH_MAX];
    bool there[2];
    for (int i = 0; i < 2; i++) {
        if (snprintf(paths[i], sizeof paths[i], "%s/%s/%06u.png", verification->folder, i ? "mask" : "image",
                     number) >= (int)sizeof paths[i])
            return status_set(STATUS_USAGE, "%s: the path is too long", verification->folder);
        there[i] = exists(paths[i]);
    }
    if (there[0] || there[1])
        draw(verification, worker, 0, number);
    for (int i = 0; i < 2; i++)
        if (there[i])
            TRY(compare_file(verification, worker, i ? MASKS : IMAGES, 2ull * number + (uint64_t)i, paths[i],
                             i ? worker->mask : worker->pixels));
    return STATUS_OK;
}

static enum status verify_pairs(struct verification *verification, struct worker *worker, uint32_t block)
{
    const uint32_t count = verification->set->block_images;
    for (uint32_t i = 0; i < count; i++)
        TRY(verify_pair(verification, worker, block * count + i));
    return STATUS_OK;
}

/* Counts files in the two folders whose names are not in the set. */
static enum status find_foreign(struct verification *verification)
{
    static const char *const folders[] = {"image", "mask"};
    const struct published_set *set = verification->set;
    struct worker *worker = &verification->workers[0];
    for (size_t i = 0; i < COUNT_OF(folders); i++) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof path, "%s/%s", verification->folder, folders[i]) < (int)sizeof path)
            TRY(list_files(verification, worker, path, NULL, (uint32_t)set->instances));
    }
    return STATUS_OK;
}

/* Returns whether a name is that of the folder of a class. */
static bool is_class_folder(const struct published_set *set, const char *name)
{
    char expected[16];
    const size_t digits = strspn(name, "0123456789");
    const uint32_t number = digits > 0 && digits < 10 ? (uint32_t)strtoul(name, NULL, 10) : UINT32_MAX;
    snprintf(expected, sizeof expected, "%05u", number);
    return number - set->first_class < set->classes && strcmp(name, expected) == 0;
}

/* Counts PNG files beside the folders of the classes, and in other folders there. */
static enum status find_foreign_folders(struct verification *verification)
{
    const bool inner = verification->set->law == PUBLISHED_RCDB;
    const struct class_row none = {0};
    char path[PATH_MAX], entry_path[PATH_MAX];
    snprintf(path, sizeof path, "%s%s", verification->folder, inner ? "/image" : "");
    CLOSED_BY(folder_close) DIR *folder = opendir(path);
    TRY(list_files(verification, &verification->workers[0], path, &none, 0));
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        struct stat info;
        const bool known = *entry->d_name == '.' || is_class_folder(verification->set, entry->d_name) ||
                           (!inner && strcmp(entry->d_name, "param") == 0);
        if (!known &&
            snprintf(entry_path, sizeof entry_path, "%s/%s", path, entry->d_name) < (int)sizeof entry_path &&
            stat(entry_path, &info) == 0 && S_ISDIR(info.st_mode))
            TRY(list_files(verification, &verification->workers[0], entry_path, &none, 0));
    }
    return STATUS_OK;
}

/* ---- Fractals: a folder per class ---- */

/* A file of an image. */
struct shown {
    uint32_t class_index;
    uint32_t instance;
};

/* Adds the files of a class to the list. */
static enum status list_shown(struct verification *verification, uint32_t index)
{
    struct worker *worker = &verification->workers[0];
    char folder[PATH_MAX];
    if (snprintf(folder, sizeof folder, "%s/%05u", verification->folder,
                 (unsigned)verification->rows[index].id) >= (int)sizeof folder)
        return status_set(STATUS_USAGE, "%s: the path is too long", verification->folder);
    TRY(list_files(verification, worker, folder, &verification->rows[index],
                   (uint32_t)verification->set->instances));
    for (size_t i = 0; i < worker->number_count; i++) {
        TRY(ALLOCATED(
            array_grow(&verification->shown, verification->shown_count, sizeof *verification->shown),
            "out of memory for a list of files"));
        verification->shown[verification->shown_count++] = (struct shown){index, worker->numbers[i]};
    }
    return STATUS_OK;
}

static uint64_t orbit_of(const struct verification *verification, const struct shown *shown)
{
    return (uint64_t)(shown->class_index - verification->shown_class) * ifs_orbits(verification->rules) +
           ifs_instance(verification->rules, shown->instance).weight;
}

/* Writes the pixels of an image of points, or 1 for each pixel that patches can cover. */
static void expect_shown(const struct verification *verification, const struct shown *shown, uint8_t *pixels)
{
    const uint8_t *map = ifs_bank_map(verification->bank, orbit_of(verification, shown));
    const uint32_t res = verification->set->res,
                   flip = ifs_instance(verification->rules, shown->instance).flip;
    const size_t pitch = ifs_map_pitch(verification->points, res);
    for (uint32_t y = 0; y < res; y++)
        for (uint32_t x = 0; x < res; x++) {
            const uint8_t *row = map + (flip & 1 ? res - 1 - y : y) * pitch;
            const uint32_t column = flip & 2 ? res - 1 - x : x;
            *pixels++ = verification->points ? (row[column / 8] >> column % 8 & 1) * IFS_GRAY
                                             : (row[column / 2] >> column % 2 * 4 & 15) != IFS_NO_OWNER;
        }
}

static void verify_shown(void *context, uint64_t task, int thread)
{
    struct verification *verification = context;
    struct worker *worker = &verification->workers[thread];
    const struct shown *shown = &verification->shown[task];
    const struct class_row *row = &verification->rows[shown->class_index];
    char path[PATH_MAX], name[PUBLISHED_NAME_BYTES];
    if (verification->failed)
        return;
    ifs_image_name(verification->rules, row->id, shown->instance, name);
    snprintf(path, sizeof path, "%s/%05u/%s.png", verification->folder, (unsigned)row->id, name);
    expect_shown(verification, shown, worker->pixels);
    enum status status = compare_file(verification, worker, IMAGES,
                                      shown->class_index * verification->set->instances + shown->instance,
                                      path, worker->pixels);
    if (status != STATUS_OK && !atomic_exchange(&verification->failed, true))
        verification->failure = status_save(status);
}

/* Compares the files of `count` classes from index `first` on, all of whose orbits fit in memory. */
static enum status verify_fractals(struct verification *verification, const double *uniforms, uint32_t first,
                                   uint32_t count)
{
    verification->shown_count = 0;
    verification->shown_class = first;
    for (uint32_t i = 0; i < count; i++)
        TRY(list_shown(verification, first + i));
    if (verification->shown_count == 0)
        return STATUS_OK;
    FREED struct ifs_system *systems = calloc(count, sizeof *systems);
    FREED uint64_t *orbits = calloc(verification->shown_count, sizeof *orbits);
    TRY(ALLOCATED(systems && orbits, "out of memory for orbits"));
    for (uint32_t i = 0; i < count; i++)
        ifs_system(&verification->rows[first + i], &systems[i]);
    for (size_t i = 0; i < verification->shown_count; i++)
        orbits[i] = orbit_of(verification, &verification->shown[i]);
    TRY(ifs_bank_open(verification->rules, systems, count, uniforms, verification->set->res,
                      verification->points, &verification->bank));
    enum status status =
        ifs_bank_need(verification->bank, orbits, verification->shown_count, verification->threads);
    if (status == STATUS_OK)
        parallel_for(verification->threads, verification->shown_count, verify_shown, verification);
    ifs_bank_close(verification->bank);
    TRY(status);
    return verification->failed ? status_restore(&verification->failure) : STATUS_OK;
}

static enum status verify_all_fractals(struct verification *verification)
{
    enum { CLASSES_AT_A_TIME = 64 };
    const uint32_t count = verification->set->classes, steps = verification->rules->points - 1;
    FREED double *uniforms = malloc(steps * sizeof *uniforms);
    TRY(ALLOCATED(uniforms, "out of memory for orbits"));
    ifs_uniforms(steps, uniforms);
    for (uint32_t first = 0; first < count; first += CLASSES_AT_A_TIME)
        TRY(verify_fractals(verification, uniforms, first,
                            count - first < CLASSES_AT_A_TIME ? count - first : CLASSES_AT_A_TIME));
    return STATUS_OK;
}

/* ---- Class files ---- */

static enum status verify_class_file(struct verification *verification, uint32_t index, const char *path)
{
    struct class_row ours, *row;
    size_t count;
    char reason[REASON_BYTES] = "its parameters differ";
    enum status status = published_files_read(path, verification->formula, &row, &count);
    if (verification->rules)
        ours = verification->rows[index];
    else
        published_row(verification->formula, &published_classes(verification->published)[index], &ours);
    if (status == STATUS_EXHAUSTED)
        return status;
    if (status != STATUS_OK)
        snprintf(reason, sizeof reason, "%s", status_text());
    bool equal = status == STATUS_OK && memcmp(row, &ours, sizeof ours) == 0;
    /* Class files come after all images. */
    count_file(verification, CLASSES, UINT64_MAX / 2 + index, equal, path, reason);
    free(row);
    return STATUS_OK;
}

/* Compares the class files in a folder of the set. */
static enum status verify_class_files(struct verification *verification, const char *inner)
{
    const struct published_set *set = verification->set;
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", verification->folder, inner) < (int)sizeof path && !exists(path))
        return STATUS_OK;
    for (uint32_t i = 0; i < set->classes; i++) {
        if (snprintf(path, sizeof path, "%s/%s/%05u.csv", verification->folder, inner,
                     set->first_class + i) >= (int)sizeof path)
            return status_set(STATUS_USAGE, "%s: the path is too long", verification->folder);
        if (exists(path))
            TRY(verify_class_file(verification, i, path));
    }
    return STATUS_OK;
}

/* The search of FractalDB writes its files into one folder, which a script divides into 40. */
static enum status verify_fractal_class_files(struct verification *verification)
{
    TRY(verify_class_files(verification, "."));
    for (int i = 0; i < 40; i++) {
        char inner[16];
        snprintf(inner, sizeof inner, "csv%d", i);
        TRY(verify_class_files(verification, inner));
    }
    return STATUS_OK;
}

/* ---- The whole command ---- */

static void verify_block(void *context, uint64_t block, int thread)
{
    struct verification *verification = context;
    struct worker *worker = &verification->workers[thread];
    if (verification->failed)
        return;
    enum status status =
        (verification->set->has_masks ? verify_pairs : verify_class)(verification, worker, (uint32_t)block);
    if (status != STATUS_OK && !atomic_exchange(&verification->failed, true))
        verification->failure = status_save(status);
}

static enum status open_workers(struct verification *verification)
{
    size_t bytes = (size_t)verification->set->res * verification->set->res;
    verification->workers = calloc((size_t)verification->threads, sizeof *verification->workers);
    TRY(ALLOCATED(verification->workers, "out of memory"));
    for (int i = 0; i < verification->threads; i++) {
        struct worker *worker = &verification->workers[i];
        worker->drawing =
            verification->rules ? malloc(1) : malloc(published_scratch_bytes(verification->published));
        worker->pixels = malloc(bytes);
        worker->mask = malloc(bytes);
        TRY(ALLOCATED(worker->drawing && worker->pixels && worker->mask,
                      "out of memory for images; lower --threads"));
    }
    return STATUS_OK;
}

static void close_verification(struct verification *verification)
{
    for (int i = 0; verification->workers && i < verification->threads; i++) {
        struct worker *worker = &verification->workers[i];
        free(worker->drawing);
        image_scratch_close(&worker->scratch);
        free(worker->pixels);
        free(worker->mask);
        free(worker->numbers);
    }
    free(verification->workers);
    free(verification->rows);
    free(verification->shown);
    published_close(verification->published);
    pthread_mutex_destroy(&verification->lock);
}

static enum status report(const struct verification *verification)
{
    const struct published_set *set = verification->set;
    uint64_t compared = 0, equal = 0;
    const uint64_t images = set->has_masks ? set->instances : set->classes * set->instances;
    const uint64_t whole[KINDS] = {images, set->has_masks ? images : 0, set->classes};
    for (int kind = 0; kind < KINDS; kind++) {
        compared += verification->compared[kind];
        equal += verification->equal[kind];
        if (verification->compared[kind] > 0)
            printf("%s: %llu of %llu %s equal; the whole set has %llu\n", set->name,
                   (unsigned long long)verification->equal[kind],
                   (unsigned long long)verification->compared[kind], kind_names[kind],
                   (unsigned long long)whole[kind]);
    }
    if (equal < compared) {
        fputs("first difference: ", stdout);
        text_print(stdout, verification->detail);
        putchar('\n');
    }
    if (verification->foreign > 0) {
        printf("not in the set: %llu PNG files, such as ", (unsigned long long)verification->foreign);
        text_print(stdout, verification->stranger);
        putchar('\n');
    }
    if (verification->rules && !verification->points && verification->compared[IMAGES] > 0)
        puts("The script draws patches with an unseeded generator, so their pixels cannot be compared. Here, "
             "\"equal\" means that only pixels of patches are set, and that the share of set bits is as "
             "expected.");
    if (compared == 0 && verification->foreign == 0)
        return status_about(status_set(STATUS_USAGE,
                                       "%s: contains no file of %s; name the folder that contains image/ or "
                                       "class folders (see verify-published --help)",
                                       verification->folder, set->name),
                            verification->folder);
    if (equal < compared || verification->foreign > 0)
        return status_set(STATUS_WRONG, "%s: %llu of %llu files differ from %s", verification->folder,
                          (unsigned long long)(compared - equal + verification->foreign),
                          (unsigned long long)(compared + verification->foreign), set->name);
    return STATUS_OK;
}

static enum status verify_fractal_set(struct verification *verification)
{
    const struct formula_preset *preset = formula_preset(verification->formula, verification->set->name);
    verification->rules = preset->ifs;
    verification->rows = calloc(verification->set->classes, sizeof *verification->rows);
    TRY(ALLOCATED(verification->rows, "out of memory for classes"));
    TRY(preset->rows(preset, verification->set->classes, verification->rows));
    TRY(open_workers(verification));
    TRY(verify_all_fractals(verification));
    TRY(find_foreign_folders(verification));
    TRY(verify_fractal_class_files(verification));
    TRY(verify_class_files(verification, "param"));
    return report(verification);
}

static enum status verify(struct verification *verification)
{
    const struct published_set *set = verification->set;
    if (verification->formula->family == FAMILY_IFS)
        return verify_fractal_set(verification);
    TRY(published_open(set, verification->threads, &verification->published));
    TRY(open_workers(verification));
    parallel_for(verification->threads, published_blocks(set), verify_block, verification);
    if (verification->failed)
        return status_restore(&verification->failure);
    TRY((set->has_masks ? find_foreign : find_foreign_folders)(verification));
    TRY(verify_class_files(verification, "param"));
    return report(verification);
}

enum status verify_published(const char *folder, const struct formula *formula,
                             const struct published_set *set, bool points, int threads)
{
    FREED struct verification *verification = calloc(1, sizeof *verification);
    TRY(ALLOCATED(verification, "out of memory"));
    verification->folder = folder;
    verification->formula = formula;
    verification->set = set;
    verification->points = points;
    verification->threads = threads;
    verification->first = UINT64_MAX;
    pthread_mutex_init(&verification->lock, NULL);
    enum status status = verify(verification);
    close_verification(verification);
    return status;
}

/* Lists the published sets of all formulas. */
static void list_sets(char *names, size_t size)
{
    names[0] = '\0';
    for (size_t f = 0; f < FORMULA_COUNT; f++)
        for (const struct formula_preset *preset = formulas[f]->presets; preset && preset->name; preset++)
            if (preset->set)
                text_join(names, size, ", ", "%s", preset->name);
}

static enum status find_set(const char *name, const struct formula **formula,
                            const struct published_set **set)
{
    char names[256];
    if (!name)
        return status_option(STATUS_USAGE, "preset", " is missing: it names the published set");
    *formula = formula_of_preset(name);
    const struct formula_preset *preset = *formula ? formula_preset(*formula, name) : NULL;
    *set = preset ? preset->set : NULL;
    if (*set)
        return STATUS_OK;
    list_sets(names, sizeof names);
    return status_value(STATUS_USAGE, "preset", name,
                        " is not a published set whose images can be drawn again; these can: %s", names);
}

static enum status get_threads(uint64_t given, bool is_given, int *threads)
{
    uint64_t requested = given;
    if (!is_given && !threads_requested(&requested))
        return status_set(STATUS_USAGE, "OMP_NUM_THREADS is not a number of threads; set --threads");
    long usable = sysconf(_SC_NPROCESSORS_ONLN);
    *threads = requested ? (int)requested : usable > 0 ? (int)usable : 1;
#ifdef _OPENMP
    omp_set_num_threads(*threads); /* those that read classes */
#endif
    return STATUS_OK;
}

static enum status check_folder(const char *folder)
{
    struct stat info;
    if (!folder)
        return status_set(STATUS_USAGE, "verify-published needs a folder: fdsl-bench verify-published DIR "
                                        "--preset SET; see verify-published --help");
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        return status_about(status_set(STATUS_USAGE, "%s is not a folder", folder), folder);
    return STATUS_OK;
}

enum status verify_published_run(int argc, char *argv[])
{
    struct verify_options values = {0};
    const char *folder = NULL;
    struct options options = {.tables = {{specs, COUNT_OF(specs), &values}},
                              .table_count = 1,
                              .operands_max = 1,
                              .operands = &folder,
                              .help = "verify-published --help"};
    enum status status = options_parse(&options, argc, argv);
    bool threads_given = status == STATUS_OK && options_given(&options, "threads");
    bool draw_given = status == STATUS_OK && options_given(&options, "draw");
    options_free(&options);
    TRY(status);
    if (values.help) {
        print_help();
        return STATUS_OK;
    }
    const struct formula *formula = NULL;
    const struct published_set *set = NULL;
    int threads = 1;
    TRY(check_folder(folder));
    TRY(find_set(values.preset, &formula, &set));
    if (draw_given && formula->family != FAMILY_IFS)
        return status_option(STATUS_USAGE, "draw", " chooses what fractals show, and %s has none; drop it",
                             set->name);
    TRY(get_threads(values.threads, threads_given, &threads));
    return verify_published(folder, formula, set, values.draw == 1, threads);
}
