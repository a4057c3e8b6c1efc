/* The sources `idx`, `cifar` and `cifar100`: read existing labelled image sets completely into memory. */
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/file.h"
#include "data/labelled_files.h"
#include "data/npy.h"
#include "data/checksum.h"
#include "data/source.h"

#define FILES_MAX 16

/* All images and labels in memory. at() returns one image with its label. */
struct labelled {
    enum source_encoding encoding;
    struct png_shape shape;
    char npy_shape[NPY_SHAPE_MAX];
    struct idx images, labels; /* only for the source `idx` */
    char *files[FILES_MAX];    /* only for `cifar` and `cifar100`: contents of their files */
    struct cifar parts[FILES_MAX];
    size_t part_count;
    bool planar; /* values are stored channel by channel, not interleaved */
};

struct picture {
    const uint8_t *values;
    uint8_t label;
};

static struct picture at(const struct labelled *labelled, uint64_t number)
{
    size_t bytes = (size_t)labelled->shape.width * labelled->shape.height;
    if (labelled->part_count == 0) /* IDX */
        return (struct picture){labelled->images.values + number * bytes, labelled->labels.values[number]};
    size_t part = 0;
    while (number >= labelled->parts[part].count)
        number -= labelled->parts[part++].count;
    return (struct picture){cifar_image(&labelled->parts[part], number),
                            cifar_label(&labelled->parts[part], number)};
}

static void labelled_close(void *state)
{
    struct labelled *labelled = state;
    idx_free(&labelled->images);
    idx_free(&labelled->labels);
    for (size_t i = 0; i < labelled->part_count; i++)
        free(labelled->files[i]);
    free(labelled);
}

/* ---- Samples ---- */

/* Encodes an image as PNG or JPEG. Interleaves the channels first if they are stored as planes. */
static enum status encode(const struct labelled *labelled, const uint8_t *values,
                          struct source_sample *sample)
{
    uint8_t pixels[CIFAR_IMAGE_BYTES];
    if (labelled->planar) {
        for (size_t i = 0; i < sizeof pixels; i++)
            pixels[i] = values[i % CIFAR_CHANNELS * CIFAR_SIDE * CIFAR_SIDE + i / CIFAR_CHANNELS];
        values = pixels;
    }
    return source_add_image(sample, labelled->encoding, values, &labelled->shape);
}

static uint64_t labelled_label(const void *state, uint64_t number)
{
    return at(state, number).label;
}

static enum status make_one(const void *state, uint64_t number, struct source_sample *sample)
{
    const struct labelled *labelled = state;
    struct picture picture = at(labelled, number);
    size_t bytes = (size_t)labelled->shape.width * labelled->shape.height * labelled->shape.channels;
    TRY(source_add_label(sample, picture.label));
    return labelled->encoding == SOURCE_NPY
               ? source_add_array(sample, "|u1", labelled->npy_shape, picture.values, bytes, NULL)
               : encode(labelled, picture.values, sample);
}

/* ---- Opening ---- */

/* Sets the number of samples, the bytes per sample and the shape of the .npy arrays. */
static void fill_facts(struct labelled *labelled, uint64_t samples, struct source_facts *facts)
{
    const struct png_shape *shape = &labelled->shape;
    facts->samples = samples;
    facts->sample_bytes = (uint64_t)shape->width * shape->height * shape->channels + NPY_HEADER_MAX;
    if (shape->channels == 1)
        snprintf(labelled->npy_shape, NPY_SHAPE_MAX, "%u, %u", shape->height, shape->width);
    else
        snprintf(labelled->npy_shape, NPY_SHAPE_MAX, "%u, %u, %u", shape->channels, shape->height,
                 shape->width);
}

/* If `path` does not exist, adds or removes its ending ".gz", provided that a file with the other name
 * exists. */
static void choose_form(char path[PATH_MAX])
{
    static const char ending[] = ".gz";
    const size_t length = strlen(path), plain = length - (sizeof ending - 1);
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%s", path);
    if (length >= sizeof ending && strcmp(path + plain, ending) == 0)
        other[plain] = '\0';
    else if (length + sizeof ending <= sizeof other)
        strcat(other, ending);
    if (access(path, F_OK) != 0 && access(other, F_OK) == 0)
        strcpy(path, other);
}

/* Derives the name of the label file: "x/train-images-idx3-ubyte.gz" gives "x/train-labels-idx1-ubyte.gz". */
static enum status labels_of(const char *images, char labels[PATH_MAX])
{
    static const char images_part[] = "images-idx3", labels_part[] = "labels-idx1";
    const char *slash = strrchr(images, '/'), *part = strstr(slash ? slash : images, images_part);
    int length = part ? snprintf(labels, PATH_MAX, "%.*s%s%s", (int)(part - images), images, labels_part,
                                 part + strlen(images_part))
                      : PATH_MAX;
    return length < PATH_MAX ? STATUS_OK
                             : status_set(STATUS_USAGE,
                                          "--source %.80s: cannot derive the label file from this name; name "
                                          "it with --labels FILE",
                                          images);
}

static enum status fill_idx(struct labelled *labelled, const struct labelled_values *parameters,
                            struct source_facts *facts)
{
    char path[PATH_MAX];
    const char *labels_path = parameters->labels;
    struct idx *images = &labelled->images, *labels = &labelled->labels;
    if (!labels_path) {
        TRY(labels_of(parameters->source, path));
        choose_form(path);
        labels_path = path;
    }
    TRY(idx_read(parameters->source, images));
    TRY(idx_read(labels_path, labels));
    TRY(idx_check_pair(parameters->source, images, labels_path, labels));
    labelled->shape = (struct png_shape){images->shape[2], images->shape[1], 1};
    fill_facts(labelled, images->shape[0], facts);
    facts->identity =
        checksum_seeded(images->values, (size_t)images->shape[0] * images->shape[1] * images->shape[2], 0);
    facts->identity = checksum_seeded(labels->values, labels->shape[0], facts->identity);
    return STATUS_OK;
}

/* Copies the next path of the list "A,B,..." to `path` and advances `*rest`, which becomes NULL after the
 * last path. */
static enum status next_path(const char *list, const char **rest, char path[PATH_MAX])
{
    size_t length = strcspn(*rest, ",");
    if (length == 0)
        return status_set(STATUS_USAGE, "--source '%.200s': a name between commas is empty; drop the comma",
                          list);
    if (length >= PATH_MAX)
        return status_set(STATUS_USAGE, "--source: the path '%.80s...' is too long", *rest);
    memcpy(path, *rest, length);
    path[length] = '\0';
    *rest = (*rest)[length] ? *rest + length + 1 : NULL;
    return STATUS_OK;
}

/* Reads the files of the list in --source. */
static enum status fill_records(struct labelled *labelled, const struct labelled_values *parameters,
                                enum cifar_kind kind, struct source_facts *facts)
{
    char paths[FILES_MAX][PATH_MAX];
    const char *names[FILES_MAX];
    uint64_t samples = 0;
    for (const char *rest = parameters->source; rest; labelled->part_count++) {
        struct cifar *part = &labelled->parts[labelled->part_count];
        size_t size;
        if (labelled->part_count == FILES_MAX)
            return status_set(STATUS_USAGE, "--source names more than %d files", FILES_MAX);
        const char *path = names[labelled->part_count] = paths[labelled->part_count];
        TRY(next_path(parameters->source, &rest, paths[labelled->part_count]));
        TRY(file_read(path, &labelled->files[labelled->part_count], &size));
        const uint8_t *bytes = (const uint8_t *)labelled->files[labelled->part_count];
        enum status status = cifar_parse(kind, bytes, size, part);
        if (status != STATUS_OK) {
            free(labelled->files[labelled->part_count]); /* this part is not counted yet */
            return status_prefix(status, "%s", path);
        }
        facts->identity = checksum_seeded(bytes, size, facts->identity);
        samples += part->count;
    }
    TRY(paths_check_distinct(AT_FDCWD, names, labelled->part_count));
    labelled->planar = true;
    labelled->shape = (struct png_shape){CIFAR_SIDE, CIFAR_SIDE, CIFAR_CHANNELS};
    fill_facts(labelled, samples, facts);
    return STATUS_OK;
}

static enum status fill_cifar(struct labelled *labelled, const struct labelled_values *parameters,
                              struct source_facts *facts)
{
    return fill_records(labelled, parameters, CIFAR_10, facts);
}

static enum status fill_cifar100(struct labelled *labelled, const struct labelled_values *parameters,
                                 struct source_facts *facts)
{
    return fill_records(labelled, parameters, (enum cifar_kind)(CIFAR_100_FINE + parameters->labels_of),
                        facts);
}

typedef enum status filler(struct labelled *, const struct labelled_values *, struct source_facts *);

static enum status open_with(filler *fill, const struct source_request *request, struct source_facts *facts,
                             void **state)
{
    const struct labelled_values *parameters = request->parameters;
    if (!parameters->source)
        return status_set(STATUS_USAGE, "name the file to read with --source FILE");
    struct labelled *labelled = *state = calloc(1, sizeof *labelled);
    TRY(ALLOCATED(labelled, "out of memory"));
    labelled->encoding = (enum source_encoding)parameters->encoding;
    return fill(labelled, parameters, facts);
}

static enum status idx_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    return open_with(fill_idx, request, facts, state);
}

static enum status cifar_open(const struct source_request *request, struct source_facts *facts, void **state)
{
    return open_with(fill_cifar, request, facts, state);
}

static enum status cifar100_open(const struct source_request *request, struct source_facts *facts,
                                 void **state)
{
    return open_with(fill_cifar100, request, facts, state);
}

#define AT(field) offsetof(struct labelled_values, field)
#define ENCODE                                                                   \
    OPTION_ROW("encode", "KIND", OPTION_CHOICE, AT(encoding), .fallback = "png", \
               .choices = source_encodings, .column = COLUMN,                    \
               .help = "file format of an image. jpeg has quality 90. KIND is one of")

static const struct option_spec idx_options[] = {
    {"source", "FILE", OPTION_TEXT, AT(source), .help = "image file: IDX with byte values, plain or gzipped"},
    {"labels", "FILE", OPTION_TEXT, AT(labels),
     .help = "label file (default: the name of the image file with labels-idx1 in place of images-idx3)"},
    ENCODE,
};

static const struct option_spec cifar_options[] = {
    {"source", "FILE[,FILE]", OPTION_TEXT, AT(source), .help = "binary CIFAR-10 files, separated by commas"},
    ENCODE,
};

static const struct option_spec cifar100_options[] = {
    {"source", "FILE[,FILE]", OPTION_TEXT, AT(source),
     .help = "binary CIFAR-100 files (train.bin, test.bin), separated by commas"},
    ENCODE,
    {"labels-of", "WHICH", OPTION_CHOICE, AT(labels_of), .fallback = "fine", .choices = cifar_label_names,
     .column = COLUMN, .help = CIFAR_LABELS_HELP},
};

#define LABELLED_SOURCE(word, about, which)                                                            \
    {                                                                                                  \
        .name = word, .summary = about, .options = which##_options,                                    \
        .option_count = COUNT_OF(which##_options), .parameters_bytes = sizeof(struct labelled_values), \
        .columns = source_label_columns, .open = which##_open, .close = labelled_close,                \
        .make_one = make_one, .label = labelled_label                                                  \
    }

const struct source source_idx = LABELLED_SOURCE("idx", "MNIST and similar data sets in IDX files", idx);
const struct source source_cifar = LABELLED_SOURCE("cifar", "CIFAR-10 in its binary format", cifar);
const struct source source_cifar100 = LABELLED_SOURCE("cifar100", "CIFAR-100 in its binary format", cifar100);
