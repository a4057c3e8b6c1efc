/* Layout of the samples' raw bytes, from which the GPU extracts the arrays, and the labels, which the host
 * has read. Every sample has one image and optionally one label. The image is a .npy; all arrays have the
 * same shape and type: uint8, float16 or float32. With --decode, the image is a file of any format that
 * image_fit() decodes. */
#ifndef FDSL_LOAD_ARRAYS_H
#define FDSL_LOAD_ARRAYS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/image_formats.h"

#define ARRAY_MEMBERS_MAX 2

/* One sample. Offsets are in bytes from the start of the sample's extent (struct array_extent). The struct
 * takes 64 bytes, two sectors of device memory. */
struct array_sample {
    uint64_t key_hash;
    uint64_t at[ARRAY_MEMBERS_MAX],
        size[ARRAY_MEMBERS_MAX]; /* offset and size of each member, in member order */
    uint64_t bytes;              /* total over all members */
    uint64_t values_offset;      /* offset of the array's values */
    uint32_t members;
    int32_t label; /* LABEL_NONE if there is none */
};

/* The range of bytes that holds a sample. */
struct array_extent {
    uint64_t begin; /* offset of the first byte in the shard; 0 after arrays_open() with `packed` */
    uint64_t bytes; /* from the first to the last byte, including tar headers between members */
};

/* An image to decode. */
struct array_picture {
    struct jpeg_shape shape; /* only with `on_device` */
    bool on_device;          /* true: the GPU can decode the image; false: a CPU thread must */
};

struct arrays {
    enum dtype type;
    uint64_t value_count;           /* number of values per sample */
    struct array_picture *pictures; /* indexed by sample number; NULL unless images are decoded */
    struct array_sample *samples;   /* indexed by sample number */
    struct array_extent *extents;   /* indexed by sample number */
    uint64_t bytes_max;             /* size of the largest extent */
};

FDSL_C_BEGIN

/* Reads the label of every sample, and the header of its image. If `fit` is not NULL, images are decoded to
 * fit->channels * fit->res^2 bytes. arrays_open() then accepts a damaged header; the CPU thread that decodes
 * the image reports the error. With `packed`, the caller stores the members of a sample consecutively, each
 * aligned to ARRAY_ALIGNMENT bytes. Otherwise the members keep their relative offsets in the shard.
 * STATUS_USAGE if a GPU variant cannot read a sample; the message names the sample and the problem.
 * STATUS_FAILED if a sample cannot be read, STATUS_EXHAUSTED if memory runs out. With `fit`,
 * STATUS_UNAVAILABLE in builds without libjpeg-turbo. The caller closes `arrays`, even after a failure. */
#define ARRAY_ALIGNMENT 32
enum status arrays_open(const struct dataset *dataset, const struct image_fit *fit, bool packed,
                        struct arrays *arrays);
void arrays_close(struct arrays *arrays);

static inline uint64_t array_align(uint64_t bytes)
{
    return (bytes + ARRAY_ALIGNMENT - 1) / ARRAY_ALIGNMENT * ARRAY_ALIGNMENT;
}

FDSL_C_END

#endif
