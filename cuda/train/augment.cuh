/* Augmentation on the device: computes the images of a batch from its stored samples, with the same bits as
 * augment_image() on the host (train/augment.h). */
#ifndef FDSL_CUDA_TRAIN_AUGMENT_CUH
#define FDSL_CUDA_TRAIN_AUGMENT_CUH

#include "common/jitter.cuh"
#include "train/augment.h"
#include "train/network.cuh"

/* The part of a stored sample that becomes the image, its filter, and whether it is mirrored. */
struct augment_part {
    struct image_box box;
    bool flip, bicubic;
};

/* The input pixels of one output pixel of a resize, along one axis. */
struct augment_entry_inputs {
    uint32_t first, count;
};

/* The images that RandAugment changes. Gray images have only one channel in memory, until they are gathered.
 * The frames of a clip are further channels. */
struct change_plan {
    struct shape shape;    /* in memory, with a depth of 1 */
    uint32_t channels;     /* of the images of the network */
    struct divider across; /* words of four values per row; the last may be partly outside the image */
    uint32_t plane_bytes;  /* of a channel with its border */
    uint8_t *planes;       /* a plane per image; NULL: blocks use shared memory */
};

struct device_augment {
    struct augment_plan plan;
    struct change_plan change;
    struct jitter_batch color;
    uint8_t *images;                     /* images of a batch; NULL: nothing is computed */
    uint8_t *colored;                    /* the same after changes of colour; NULL: there are none */
    struct augment_part *parts;          /* per sample */
    struct augment_entry_inputs *inputs; /* per sample and output of an axis: along x, then along y */
    int16_t *weights;                    /* `taps` weights for each entry of `inputs` */
    uint32_t taps;
    bool partners;       /* a batch also has the partners of its samples (train_part_augmented()) */
    uint32_t band, rows; /* a block resizes `band` rows of the image, from up to `rows` rows of the canvas */
};

/* Allocates memory for the images of the largest part of a step (train_part_max()) and for their partners.
 * Only zeroes `augment` if there is nothing to compute (augment_computes()), or for inference. */
enum status device_augment_open(const struct train *train, struct allocations *allocations,
                                struct device_augment *augment);

/* Computes the images of the `count` samples of a batch and, with augment->partners, of their partners. Reads
 * the stored samples from set->values. `numbers`, in device memory, has the numbers of all these samples.
 * Sets `set` to the computed images. Does nothing if augment->images is NULL. */
enum status device_augment_run(const struct device_augment *augment, uint32_t epoch, const uint32_t *numbers,
                               uint32_t count, struct device_set *set, cudaStream_t stream);

/* For tests: applies one operation to `count` images. `from` and `to` are arrays in device memory. With
 * `gray`, they have only the first channel of each image. */
enum status device_augment_apply(const struct shape *shape, bool gray, enum augment_operation operation,
                                 const struct augment_numbers *numbers, uint32_t count, const uint8_t *from,
                                 uint8_t *to, cudaStream_t stream);

#endif
