#include "load/arrays.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "data/members.h"
#include "data/npy.h"
#include "data/plain_reader.h"

#define HEAD_BYTES     4096       /* bytes read first, to find the header of a .npy */
#define SPAN_MAX       (64 << 20) /* maximum distance of the members of a sample, if one is a hard link */
#define HEAD_BYTES_MAX (1 << 20)  /* bytes read if HEAD_BYTES do not hold the whole header */

/* State of arrays_open() while it examines the samples. */
struct inspection {
    const struct dataset *dataset;
    const struct image_fit *fit; /* NULL: images are .npy */
    struct plain plain;
    struct arrays *arrays;
    struct jpeg_decoder *jpeg;
    struct npy_header first; /* header of sample 0 */
    uint8_t *head;           /* HEAD_BYTES_MAX bytes */
};

/* Prepends the file, the sample and the member to the error message, unless `status` is STATUS_OK. */
static enum status about(const struct inspection *inspection, const struct dataset_sample *sample,
                         const struct dataset_member *member, enum status status)
{
    const struct dataset *dataset = inspection->dataset;
    return status_prefix(status, "%s/%s: sample '%s', '%s'", dataset->path, dataset->files[member->file].name,
                         sample->key, member->extension);
}

/* Sets the message for an image that GPU variants do not accept. */
static enum status unfit(const struct dataset_member *image)
{
    return status_set(STATUS_USAGE,
                      "without --decode, a GPU variant reads only .npy arrays, but this member is '%s'; "
                      "choose an array with --image npy, prepare the data set with --encode npy, or use "
                      "--variant shards-gpu or shards-omp with --decode --out-res PIXELS",
                      image->extension);
}

static enum status read_header(struct inspection *inspection, const struct dataset_member *member,
                               struct npy_header *header)
{
    uint64_t bytes = member->size < HEAD_BYTES ? member->size : HEAD_BYTES;
    TRY(plain_bytes(&inspection->plain, member, bytes, inspection->head));
    if (npy_header_parse(inspection->head, bytes, header) == STATUS_OK)
        return STATUS_OK;
    bytes = member->size < HEAD_BYTES_MAX ? member->size : HEAD_BYTES_MAX;
    TRY(plain_bytes(&inspection->plain, member, bytes, inspection->head));
    return npy_header_parse(inspection->head, bytes, header) == STATUS_OK ? STATUS_OK : STATUS_USAGE;
}

static bool same_arrays(const struct npy_header *a, const struct npy_header *b)
{
    return strcmp(a->type, b->type) == 0 && a->axes == b->axes && a->fortran == b->fortran &&
           memcmp(a->shape, b->shape, a->axes * sizeof *a->shape) == 0;
}

/* Compares one header with the header of sample 0. A batch is one tensor, so all samples need the same type
 * and shape. */
static enum status check_header(struct inspection *inspection, uint32_t number, uint64_t size,
                                const struct npy_header *header)
{
    if (number == 0) {
        if (!dtype_from_npy(header->type, &inspection->arrays->type))
            return status_set(STATUS_USAGE,
                              "it has values of type '%s', but a GPU variant accepts |u1, <f2 and <f4; "
                              "prepare the data set with --dtype u8, f16 or f32",
                              header->type);
        inspection->arrays->value_count = header->values;
        inspection->first = *header;
        if (header->values == 0)
            return status_set(STATUS_USAGE, "an empty array cannot be part of a tensor");
    }
    if (!same_arrays(header, &inspection->first))
        return status_set(
            STATUS_USAGE,
            "its .npy (%llu values of type '%s') and the .npy of sample '%s' (%llu values of type '%s') "
            "differ in type or shape; a batch is one tensor, so all samples need the same type and shape",
            (unsigned long long)header->values, header->type, inspection->dataset->samples[0].key,
            (unsigned long long)inspection->first.values, inspection->first.type);
    return npy_header_check(header, size) == STATUS_OK ? STATUS_OK : STATUS_USAGE;
}

static enum status look_at_array(struct inspection *inspection, uint32_t number,
                                 const struct dataset_member *member, uint64_t at)
{
    struct npy_header header;
    TRY(read_header(inspection, member, &header));
    TRY(check_header(inspection, number, member->size, &header));
    inspection->arrays->samples[number].values_offset = at + header.data;
    return STATUS_OK;
}

/* Reads the header of a JPEG. */
static enum status look_at_picture(struct inspection *inspection, uint32_t number,
                                   const struct dataset_member *member)
{
    struct array_picture *picture = &inspection->arrays->pictures[number];
    for (uint64_t most = HEAD_BYTES; most <= HEAD_BYTES_MAX; most *= HEAD_BYTES_MAX / HEAD_BYTES) {
        uint64_t bytes = member->size < most ? member->size : most;
        TRY(plain_bytes(&inspection->plain, member, bytes, inspection->head));
        if (image_format(members_format(member->extension), inspection->head, bytes) != IMAGE_JPEG)
            return STATUS_OK;
        enum status status = jpeg_begin(inspection->jpeg, inspection->head, bytes, &picture->shape);
        if (status == STATUS_UNAVAILABLE)
            return status;
        picture->on_device = status == STATUS_OK && image_suits_device(&picture->shape, inspection->fit->res);
        if (status == STATUS_OK || bytes == member->size)
            return STATUS_OK;
    }
    return STATUS_OK;
}

static enum status look_at_image(struct inspection *inspection, uint32_t number,
                                 const struct dataset_member *image, uint64_t at)
{
    if (inspection->fit)
        return look_at_picture(inspection, number, image);
    return strcasecmp(members_format(image->extension), "npy") == 0
               ? look_at_array(inspection, number, image, at)
               : unfit(image);
}

/* Computes the extent of a sample, and the offsets and sizes of its members. */
static void lay_out(const struct dataset *dataset, const struct dataset_sample *sample, bool packed,
                    struct array_sample *array, struct array_extent *extent)
{
    const struct dataset_member *members = &dataset->members[sample->member];
    uint64_t begin = packed ? 0 : UINT64_MAX, end = 0;
    for (uint32_t m = 0; !packed && m < sample->members; m++)
        begin = members[m].offset < begin ? members[m].offset : begin;
    for (uint32_t m = 0; m < sample->members; m++) {
        array->at[m] = packed ? array_align(end) : members[m].offset - begin;
        array->size[m] = members[m].size;
        array->bytes += members[m].size;
        end = array->at[m] + members[m].size > end ? array->at[m] + members[m].size : end;
    }
    *extent = (struct array_extent){begin, end};
}

/* Reads the label of a sample, if it has one. */
static enum status look_at_label(struct inspection *inspection, const struct dataset_sample *sample,
                                 struct array_sample *array)
{
    array->label = LABEL_NONE;
    enum status status = sample->rule ? plain_label(&inspection->plain, sample, 0, &array->label) : STATUS_OK;
    return status == STATUS_FAILED ? STATUS_USAGE : status;
}

static enum status look_at_sample(struct inspection *inspection, uint32_t number, bool packed)
{
    const struct dataset *dataset = inspection->dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    const struct dataset_member *members = &dataset->members[sample->member];
    struct array_sample *array = &inspection->arrays->samples[number];
    *array = (struct array_sample){.key_hash = sample->key_hash, .members = sample->members};
    if (sample->image == sample->members) {
        (void)dataset_lacks(dataset, sample, &dataset->choice.image, "image");
        return about(inspection, sample, &members[0], STATUS_USAGE);
    }
    if (sample->members > ARRAY_MEMBERS_MAX)
        return about(inspection, sample, &members[0],
                     status_set(STATUS_USAGE, "a GPU variant accepts one image and one label per sample; "
                                              "choose them with --image and --label"));
    const struct dataset_member *image = &members[sample->image];
    struct array_extent *extent = &inspection->arrays->extents[number];
    lay_out(dataset, sample, packed, array, extent);
    if (!packed && (members[0].linked || members[sample->members - 1].linked) &&
        extent->bytes > array->bytes + SPAN_MAX)
        return about(inspection, sample, image,
                     status_set(STATUS_USAGE,
                                "its members are %llu bytes apart, because one is a hard link; copy the set "
                                "with --prepare NEW --from dataset --source %s",
                                (unsigned long long)extent->bytes, dataset->path));
    TRY(about(inspection, sample, image, look_at_image(inspection, number, image, array->at[sample->image])));
    return about(inspection, sample, &members[sample->label % sample->members],
                 look_at_label(inspection, sample, array));
}

/* Allocates the headers of the images to decode. Decoded values are bytes. */
static enum status begin_pictures(struct inspection *inspection)
{
    struct arrays *arrays = inspection->arrays;
    const struct image_fit *fit = inspection->fit;
    arrays->type = DTYPE_U8;
    arrays->value_count = (uint64_t)fit->channels * fit->res * fit->res;
    arrays->pictures = calloc(inspection->dataset->sample_count, sizeof *arrays->pictures);
    inspection->jpeg = jpeg_open();
    return ALLOCATED(arrays->pictures, "out of memory for image headers");
}

enum status arrays_open(const struct dataset *dataset, const struct image_fit *fit, bool packed,
                        struct arrays *arrays)
{
    struct inspection inspection = {
        .dataset = dataset, .fit = fit, .plain = {.dataset = dataset, .fd = -1}, .arrays = arrays};
    *arrays = (struct arrays){0};
    arrays->samples = calloc(dataset->sample_count, sizeof *arrays->samples);
    arrays->extents = calloc(dataset->sample_count, sizeof *arrays->extents);
    inspection.head = malloc(HEAD_BYTES_MAX);
    enum status status = ALLOCATED(arrays->samples && arrays->extents && inspection.head,
                                   "out of memory for the headers of %u samples", dataset->sample_count);
    if (status == STATUS_OK && fit)
        status = begin_pictures(&inspection);
    for (uint32_t i = 0; status == STATUS_OK && i < dataset->sample_count; i++) {
        status = look_at_sample(&inspection, i, packed);
        if (arrays->extents[i].bytes > arrays->bytes_max)
            arrays->bytes_max = arrays->extents[i].bytes;
    }
    free(inspection.head);
    jpeg_close(inspection.jpeg);
    plain_close(&inspection.plain);
    return status;
}

void arrays_close(struct arrays *arrays)
{
    free(arrays->samples);
    free(arrays->extents);
    free(arrays->pictures);
    *arrays = (struct arrays){0};
}
