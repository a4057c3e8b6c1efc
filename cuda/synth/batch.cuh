/* A batch of images on the device: what every CUDA variant of `synth` needs, whatever its kernels. */
#ifndef FDSL_CUDA_SYNTH_BATCH_CUH
#define FDSL_CUDA_SYNTH_BATCH_CUH

#include <cuda_runtime.h>
#include <stdlib.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* The workload's input, in device memory. */
struct device_input {
    enum formula formula;
    uint32_t res, class_count;
    uint64_t stride, seed, first; /* as struct synth's */
    const struct atom_class *classes;
    const uint64_t *spoke_offset; /* class_count + 1 */
    const float *spoke_tables;    /* as struct synth's */
    const float *gradients;       /* NOISE_TABLE_COUNT */
    uint8_t *pixels;              /* res * res an image: those of the latest run */
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
    struct synth_image id = synth_image_at(input.first, input.stride, input.class_count, run, j);
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

/* Fills `input`, but for `pixels`, with tables in device memory: `*tables` is the one allocation that holds
 * them, the caller's to free. Waits until they are there. */
enum status device_input_open(int device, const struct synth *synth, struct device_input *input,
                              void **tables);

/* Bytes of those tables. */
size_t device_input_bytes(const struct synth *synth);

/* A stream, and the time of what is done on it. */
struct device_clock {
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

enum status device_clock_open(struct device_clock *clock);
/* Safe on a zeroed or half-made one. */
void device_clock_close(struct device_clock *clock);
enum status device_clock_begin(struct device_clock *clock);
/* Waits for the stream and gives the device's time since begin. */
enum status device_clock_end(struct device_clock *clock, struct run_time *time);

/* Adds the device's time of what `enqueue()`, which returns a status, enqueues on the clock's stream. Waits
 * for it. */
template <class Enqueue>
enum status device_clock_add(const struct device_clock *clock, double *total_s, Enqueue enqueue)
{
    struct run_time time;
    struct device_clock own = *clock;
    TRY(device_clock_begin(&own));
    TRY(enqueue());
    TRY(device_clock_end(&own, &time));
    *total_s += time.device_s;
    return STATUS_OK;
}

/* What the host keeps of a batch on the device. */
struct device_batch {
    const struct synth *synth;
    int device;
    struct device_input input;
    void *tables;
    struct device_clock clock;
    uint64_t run; /* the latest run's number */
};

/* Checks that `scratch_bytes` fit beside the images (STATUS_USAGE says how much is needed and there is), and
 * makes the batch. */
enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes);
/* Frees it; safe on a zeroed or half-made one. */
void device_batch_close(struct device_batch *batch);

/* Brackets the work of a run on batch->clock.stream. Begin clears the images, which is part of the work; end
 * waits for the stream and gives the device's time. */
enum status device_batch_begin(struct device_batch *batch, uint64_t run);
enum status device_batch_end(struct device_batch *batch, struct run_time *time);

/* Copies one image out, as fetch() of a synth variant must. */
enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch);

/* Free device memory in bytes. */
enum status device_free_bytes(int device, size_t *bytes);

/* STATUS_USAGE where `bytes` for a batch do not fit the device's free memory: says both. */
enum status device_check_memory(int device, const struct synth *synth, size_t bytes);

/* probe() of the CUDA variants. */
enum status device_batch_probe(const struct resources *resources);

/* setup() of those whose state is a `self`: zeroed, made by its make(), torn down where that fails. */
template <class self>
enum status device_batch_setup(const struct resources *resources, const void *input, void **state)
{
    self *made = static_cast<self *>(calloc(1, sizeof *made));
    if (!made)
        return status_set(STATUS_FAILED, "out of memory");
    enum status status = made->make(resources, static_cast<const struct synth *>(input));
    if (status != STATUS_OK)
        self::teardown(made);
    else
        *state = made;
    return status;
}

#endif
