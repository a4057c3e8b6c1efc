/* A batch of images on the device: what every CUDA variant of `synth` needs, whatever its kernels. */
#ifndef FDSL_CUDA_SYNTH_BATCH_CUH
#define FDSL_CUDA_SYNTH_BATCH_CUH

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/synth.h"

/* The workload's input, in device memory. */
struct device_input {
    enum formula formula;
    uint32_t res, class_count;
    uint64_t batch, seed, first;
    const struct atom_class *classes;
    const uint64_t *spoke_offset; /* class_count + 1 */
    const float *spoke_tables;    /* as struct synth's */
    const float *gradients;       /* NOISE_TABLE_COUNT */
    uint8_t *pixels;              /* batch * res * res: the images of the latest run */
};

/* One image: all that its kernels need to know. */
struct image_input {
    struct philox_key key;
    struct atom_class class_;
    struct atom_spokes spokes;
    const float *gradients;
    uint8_t *pixels;
    enum formula formula;
    uint32_t res;
};

/* Image j of run `run`. `input` is as on the device, or the host's twin of it for `classes` and
 * `spoke_offset`. */
FDSL_HD struct image_input image_input_at(const struct device_input &input, const struct atom_class *classes,
                                          const uint64_t *spoke_offset, uint64_t run, uint64_t j)
{
    struct synth_image id = synth_image_at(input.first, input.batch, input.class_count, run, j);
    const float *first = input.spoke_tables + spoke_offset[id.class_index];
    uint64_t stride = spoke_offset[input.class_count];
    struct image_input image;
    image.class_ = classes[id.class_index];
    image.key = atom_image_key(input.seed, image.class_.id, id.instance);
    image.spokes = {first, first + stride, first + 2 * stride};
    image.gradients = input.gradients;
    image.pixels = input.pixels + j * input.res * input.res;
    image.formula = input.formula;
    image.res = input.res;
    return image;
}

/* What the host keeps of a batch on the device. */
struct device_batch {
    const struct synth *synth;
    int device;
    struct device_input input;
    void *tables; /* classes, offsets, spokes, gradients: one allocation */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    uint64_t run; /* the latest run's number */
};

/* Checks that `scratch_bytes` fit beside the images (STATUS_USAGE says how much is needed and there is), and
 * makes the batch. */
enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes);
/* Frees it; safe on a zeroed or half-made one. */
void device_batch_close(struct device_batch *batch);

/* Brackets the work of a run on batch->stream. Begin clears the images, which is part of the work; end waits
 * for the stream and gives the device's time. */
enum status device_batch_begin(struct device_batch *batch, uint64_t run);
enum status device_batch_end(struct device_batch *batch, struct run_time *time);

/* Copies one image out, as fetch() of a synth variant must. */
enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch);

/* Free device memory in bytes. */
enum status device_free_bytes(int device, size_t *bytes);

/* probe() of the CUDA variants. */
enum status device_batch_probe(const struct resources *resources);

#endif
