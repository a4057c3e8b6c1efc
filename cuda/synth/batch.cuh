/* A batch of images on the device: state and functions that all CUDA variants of `synth` share. */
#ifndef FDSL_CUDA_SYNTH_BATCH_CUH
#define FDSL_CUDA_SYNTH_BATCH_CUH

#include <cuda_runtime.h>

#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* The input of the workload. All pointers point to device memory. */
struct device_input {
    struct line_rules rules; /* of the formula */
    uint32_t res, class_count;
    uint32_t turns;               /* as in struct synth */
    uint64_t stride, seed, first; /* as in struct synth */
    const struct atom_class *classes;
    const uint64_t *spoke_offset; /* class_count + 1 entries */
    const float *spoke_tables;    /* as in struct synth */
    const float *gradients;       /* NOISE_TABLE_COUNT entries */
    uint8_t *pixels;              /* images of the latest run, res * res bytes each */
};

/* The parameters of one image, for its kernels. */
struct image_input {
    struct philox_key key;
    struct atom_class class_;
    struct atom_spokes spokes;
    const float *gradients;
    uint8_t *pixels;
    struct line_rules rules;
    uint32_t res;
};

/* Returns the parameters of image j of run `run`. `classes` and `spoke_offset` are pointers that the caller
 * can dereference: to device memory in a kernel, to host memory on the host. */
FDSL_HD struct image_input image_input_at(const struct device_input &input, const struct atom_class *classes,
                                          const uint64_t *spoke_offset, uint64_t run, uint64_t j)
{
    struct synth_image id = synth_image_at(input.first, input.stride, input.turns, run, j);
    const float *first = input.spoke_tables + spoke_offset[id.class_index];
    uint64_t stride = spoke_offset[input.class_count];
    struct image_input image;
    image.class_ = classes[id.class_index];
    image.key = atom_image_key(&input.rules, input.seed, image.class_.id, id.instance);
    image.spokes = {first, first + stride, first + 2 * stride};
    image.gradients = input.gradients;
    image.pixels = input.pixels + j * input.res * input.res;
    image.rules = input.rules;
    image.res = input.res;
    return image;
}

/* Returns the only shape of an image. */
FDSL_HD struct line_shape image_shape(const struct image_input &image)
{
    return line_shape(&image.rules, image.key, 0, &image.class_, 0, 1, image.res);
}

/* Returns the parameters of image j of a batch. If `numbers` is NULL, the batch is that of run `run`, as for
 * image_input_at(). Otherwise the image has the number numbers[j], relative to input.first. The caller must
 * be able to dereference `numbers`, `classes` and `spoke_offset`. */
FDSL_HD struct image_input image_input_listed(const struct device_input &input,
                                              const struct atom_class *classes, const uint64_t *spoke_offset,
                                              const uint64_t *numbers, uint64_t run, uint64_t j)
{
    if (!numbers)
        return image_input_at(input, classes, spoke_offset, run, j);
    struct image_input image = image_input_at(input, classes, spoke_offset, 0, numbers[j]);
    image.pixels = input.pixels + j * input.res * input.res;
    return image;
}

/* Copies the tables to device memory, waits for the copies, and fills `input` except `pixels`. `*tables` must
 * be NULL before the call. It receives the address of a single allocation that contains all tables. The
 * caller frees this allocation with cudaFree(), even after a failure. */
enum status device_input_open(int device, const struct synth *synth, struct device_input *input,
                              void **tables);

/* Returns the size of the allocation of device_input_open(), in bytes. */
size_t device_input_bytes(const struct synth *synth);

/* A stream with events that time its work. */
struct device_clock {
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

/* Creates a stream of the highest priority and the events on the current device. The caller closes the clock,
 * even after a failure. */
enum status device_clock_open(struct device_clock *clock);
/* Destroys the stream and events. Accepts a zeroed or partially initialised clock. */
void device_clock_close(struct device_clock *clock);
/* Records the start of the timed work on the stream. */
enum status device_clock_begin(struct device_clock *clock);
/* Waits for the stream and sets time->device_s to the device time since device_clock_begin(). */
enum status device_clock_end(struct device_clock *clock, struct run_time *time);

/* Calls enqueue(), which enqueues work on the clock's stream and returns an enum status. Waits for the stream
 * and adds the device time of that work to `*total_s`, in seconds. */
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
    /* The list of image numbers in device memory, and its copy in host memory. Both are set only while a
     * generator draws; otherwise they are NULL, and the images are those of run `run`. */
    const uint64_t *numbers, *host_numbers;
    /* Allocated device memory, including the `scratch_bytes` of device_batch_open(). A caller that allocates
     * more scratch memory adds the difference. */
    uint64_t bytes;
};

/* Allocates the batch. The caller will allocate `scratch_bytes` more. STATUS_USAGE if the batch and the
 * scratch memory do not fit in the free device memory; the message gives both sizes. Nothing is left
 * allocated after a failure. */
enum status device_batch_open(struct device_batch *batch, const struct resources *resources,
                              const struct synth *synth, size_t scratch_bytes);
/* Frees a batch. Accepts a zeroed or partially initialised batch. */
void device_batch_close(struct device_batch *batch);

/* Begin and end a run on batch->clock.stream. device_batch_begin() makes the device current and clears the
 * images; clearing is timed. device_batch_end() waits for the stream and sets time->device_s. */
enum status device_batch_begin(struct device_batch *batch, uint64_t run);
enum status device_batch_end(struct device_batch *batch, struct run_time *time);

/* Implements fetch() of synth variants: copies image fetch->j of the latest run to the host. */
enum status device_batch_fetch(struct device_batch *batch, struct synth_fetch *fetch);

/* Makes the device current and gets its free memory in bytes. */
enum status device_free_bytes(int device, size_t *bytes);

/* Makes the device current. Returns STATUS_TOO_LARGE if it has less than `bytes` bytes of free memory for a
 * batch. The message gives both sizes. */
enum status device_check_memory(int device, const struct synth *synth, size_t bytes);

/* ---- Conversion of canvases ---- */

/* Converts canvases (images as drawn, one gray byte per pixel) to output images, for variants that draw only
 * canvases. */
/* Enqueues the conversion of `count` canvases. The canvases begin at input->pixels. They are the first images
 * of the list `numbers`, which is in device memory, or of run number `run` if `numbers` is NULL. Writes
 * consecutive images in the format `output` to `images`, and their class numbers to `labels`. Both are in
 * device memory; `images` is aligned for its type. STATUS_FAILED if the launch fails. */
enum status convert_enqueue(const struct device_input *input, const struct synth_output *output,
                            const uint64_t *numbers, uint64_t run, uint32_t count, void *images,
                            int64_t *labels, cudaStream_t stream);

#endif
