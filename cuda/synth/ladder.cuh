/* The ladder's steps that the host drives: image after image, three launches each.
 *
 * A step is a `Step`: how noise is kept, and how the noise stage is launched.
 *
 *     struct step {
 *         using noise = noise_half2;
 *         static void launch(const image_work<noise> &work, cudaStream_t stream);
 *     };
 *     LADDER_VARIANT(variant_name, step, traits);
 */
#ifndef FDSL_CUDA_SYNTH_LADDER_CUH
#define FDSL_CUDA_SYNTH_LADDER_CUH

#include <stdlib.h>

#include "common/check.cuh"
#include "synth/stages.cuh"

template <class Step> struct ladder {
    using noise = typename Step::noise;

    struct device_batch batch;
    void *noise_memory; /* scratch for one image: images follow each other on one stream */
    int2 *points;
    uint8_t *grays;

    static const uint8_t *images(const void *state)
    {
        return static_cast<const ladder *>(state)->batch.input.pixels;
    }

    static void teardown(void *state)
    {
        ladder *self = static_cast<ladder *>(state);
        (void)cudaFree(self->grays);
        (void)cudaFree(self->points);
        (void)cudaFree(self->noise_memory);
        device_batch_close(&self->batch);
        free(self);
    }

    enum status make(const struct resources *resources, const struct synth *synth)
    {
        size_t noise_bytes = synth->segments_max * noise::bytes,
               points_bytes = synth->segments_max * sizeof(int2);
        TRY(device_batch_open(&batch, resources, synth, noise_bytes + points_bytes + synth->orbits_max));
        CUDA_TRY(cudaMalloc(&noise_memory, noise_bytes));
        CUDA_TRY(cudaMalloc(&points, points_bytes));
        CUDA_TRY(cudaMalloc(&grays, synth->orbits_max));
        return STATUS_OK;
    }

    static enum status setup(const struct resources *resources, const void *input, void **state)
    {
        return device_batch_setup<ladder>(resources, input, state);
    }

    image_work<noise> work_of(uint64_t j) const
    {
        const struct synth *synth = batch.synth;
        image_work<noise> work;
        work.input = image_input_at(batch.input, synth->classes,
                                    reinterpret_cast<const uint64_t *>(synth->spoke_offset), batch.run, j);
        work.noise = noise::at(noise_memory, work.segments());
        work.points = points;
        work.grays = grays;
        return work;
    }

    enum status launch_noise(const image_work<noise> &work) const
    {
        Step::launch(work, batch.clock.stream);
        CUDA_TRY_LAUNCH("the noise kernel");
        return STATUS_OK;
    }
    enum status launch_vertices(const image_work<noise> &work) const
    {
        vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, batch.clock.stream>>>(
            work);
        CUDA_TRY_LAUNCH("vertex_kernel");
        return STATUS_OK;
    }
    enum status launch_painting(const image_work<noise> &work) const
    {
        paint_kernel<<<paint_grid(work.vertices(), work.orbits()), PAINT_BLOCK, 0, batch.clock.stream>>>(
            work);
        CUDA_TRY_LAUNCH("paint_kernel");
        return STATUS_OK;
    }

    static enum status run(void *state, uint64_t number, struct run_time *time)
    {
        ladder *self = static_cast<ladder *>(state);
        TRY(device_batch_begin(&self->batch, number));
        for (uint64_t j = 0; j < self->batch.synth->batch; j++) {
            image_work<noise> work = self->work_of(j);
            TRY(self->launch_noise(work));
            TRY(self->launch_vertices(work));
            TRY(self->launch_painting(work));
        }
        return device_batch_end(&self->batch, time);
    }

    static enum status fetch(void *state, void *result)
    {
        ladder *self = static_cast<ladder *>(state);
        return device_batch_fetch(&self->batch, static_cast<struct synth_fetch *>(result));
    }

    /* Makes the noise of image j again, which is a function of its key, and copies it out. */
    static enum status fetch_noise(void *state, uint64_t j, float *result)
    {
        ladder *self = static_cast<ladder *>(state);
        CUDA_TRY(cudaSetDevice(self->batch.device));
        image_work<noise> work = self->work_of(j);
        TRY(self->launch_noise(work));
        void *copy = malloc(work.segments() * noise::bytes);
        if (!copy)
            return status_set(STATUS_FAILED, "out of memory for the noise of an image");
        cudaError_t error = cudaMemcpyAsync(copy, self->noise_memory, work.segments() * noise::bytes,
                                            cudaMemcpyDeviceToHost, self->batch.clock.stream);
        if (error == cudaSuccess)
            error = cudaStreamSynchronize(self->batch.clock.stream);
        noise samples = noise::at(copy, work.segments());
        for (uint64_t i = 0; error == cudaSuccess && i < work.segments(); i++) {
            float2 sample = samples.get(i);
            result[2 * i] = sample.x;
            result[2 * i + 1] = sample.y;
        }
        free(copy);
        return cuda_status(error, "copy of the noise", __FILE__, __LINE__);
    }

    /* Times one stage of one image on the device. */
    enum status time_stage(enum status (ladder::*launch)(const image_work<noise> &) const,
                           const image_work<noise> &work, double *total_s) const
    {
        struct run_time time;
        struct device_clock clock = batch.clock;
        TRY(device_clock_begin(&clock));
        TRY((this->*launch)(work));
        TRY(device_clock_end(&clock, &time));
        *total_s += time.device_s;
        return STATUS_OK;
    }

    /* One more run, a stage at a time. The images are not cleared: nobody looks at them. */
    static enum status stages(void *state, double *noise_s, double *vertices_s, double *painting_s)
    {
        ladder *self = static_cast<ladder *>(state);
        CUDA_TRY(cudaSetDevice(self->batch.device));
        *noise_s = *vertices_s = *painting_s = 0;
        for (uint64_t j = 0; j < self->batch.synth->batch; j++) {
            image_work<noise> work = self->work_of(j);
            TRY(self->time_stage(&ladder::launch_noise, work, noise_s));
            TRY(self->time_stage(&ladder::launch_vertices, work, vertices_s));
            TRY(self->time_stage(&ladder::launch_painting, work, painting_s));
        }
        return STATUS_OK;
    }
};

#define LADDER_VARIANT(symbol, step, traits_)                           \
    extern "C" {                                                        \
    extern const struct variant symbol;                                 \
    const struct variant symbol = {.platform = "cuda",                  \
                                   .threaded = false,                   \
                                   .traits = &(traits_),                \
                                   .probe = device_batch_probe,         \
                                   .setup = ladder<step>::setup,        \
                                   .run = ladder<step>::run,            \
                                   .fetch = ladder<step>::fetch,        \
                                   .teardown = ladder<step>::teardown}; \
    }

#endif
