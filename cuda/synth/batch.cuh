/* A batch of images on the device: state and functions that all CUDA variants of `synth` share. */
#ifndef FDSL_CUDA_SYNTH_BATCH_CUH
#define FDSL_CUDA_SYNTH_BATCH_CUH

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* The input of the workload; pointers are to device memory. */
struct device_input {
    enum formula formula;
    uint32_t res, class_count;
    uint64_t stride, seed, first; /* as in struct synth */
    const struct atom_class *classes;
    const uint64_t *spoke_offset; /* class_count + 1 entries */
    const float *spoke_tables;    /* as in struct synth */
    const float *gradients;       /* NOISE_TABLE_COUNT */
    uint8_t *pixels;              /* images of the latest run, res * res bytes each */
};

/* The parameters of one image, for its kernels. */
struct image_input {
    struct philox_key key;
    struct atom_class class_;
    struct atom_spokes spokes;
    const float *gradients;
    uint8_t *pixels;
    enum formula formula;
    uint32_t res;
};

/* Returns image j of run `run`. `classes` and `spoke_offset` must be readable by the caller: device memory in
 * a kernel, host memory on the host. */
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

/* Copies the tables to device memory and fills `input`, except `pixels`. `*tables` is their only allocation;
 * the caller frees it. Waits for the copies. */
enum status device_input_open(int device, const struct synth *synth, struct device_input *input,
                              void **tables);

/* Returns the bytes of the tables of device_input_open(). */
size_t device_input_bytes(const struct synth *synth);

/* A stream with events that time its work. */
struct device_clock {
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

enum status device_clock_open(struct device_clock *clock);
/* Destroys the stream and events. Accepts a zeroed or partially initialised clock. */
void device_clock_close(struct device_clock *clock);
enum status device_clock_begin(struct device_clock *clock);
/* Waits for the stream and returns the device time since device_clock_begin(). */
enum status device_clock_end(struct device_clock *clock, struct run_time *time);

/* Calls `enqueue()`, which returns a status, waits for the clock's stream, and adds the device time of the
 * enqueued work. */
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

/* Host-side state of a batch on the device. */
struct device_batch {
    const struct synth *synth;
    int device;
    struct device_input input;
    void *tables;
    struct device_clock clock;
    uint64_t run; /* number of the latest run */
};

/* Allocates the batch. STATUS_USAGE if the images and `scratch_bytes` do not fit in device memory; the
 * message gives both sizes. */
enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes);
/* Frees a batch. Accepts a zeroed or partially initialised one. */
void device_batch_close(struct device_batch *batch);

/* The begin and the end of a run on batch->clock.stream. device_batch_begin() clears the images, which is
 * part of the timed work. device_batch_end() waits for the stream and returns the device time. */
enum status device_batch_begin(struct device_batch *batch, uint64_t run);
enum status device_batch_end(struct device_batch *batch, struct run_time *time);

/* Copies one image to the host: fetch() of a synth variant. */
enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch);

/* Returns the free device memory in bytes. */
enum status device_free_bytes(int device, size_t *bytes);

/* Returns STATUS_USAGE if `bytes` for a batch exceed the free device memory; the message gives both sizes. */
enum status device_check_memory(int device, const struct synth *synth, size_t bytes);

#endif
