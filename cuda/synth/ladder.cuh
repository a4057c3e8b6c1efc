/* The variants of the paper's ladder (docs/synth.md) that generate a batch one image at a time.
 *
 * A variant defines a `Step`: how it stores noise, and how the host launches the noise stage.
 *
 *     struct step {
 *         using noise = noise_half2;
 *         static void launch(const image_work<noise> &work, cudaStream_t stream);
 *     };
 *     LADDER_VARIANT(variant_name, ladder<step>, SYNTH_NOISE_COUNTER)
 *
 * A variant whose stages are launched differently has the state ladder_by<Launcher> (see bat.cu). */
#ifndef FDSL_CUDA_SYNTH_LADDER_CUH
#define FDSL_CUDA_SYNTH_LADDER_CUH

#include <curand_kernel.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "core/phase.h"
#include "synth/stages.cuh"

/* The host launches one kernel per stage. */
template <class Step> struct host_launcher {
    using noise = typename Step::noise;

    enum status open()
    {
        return STATUS_OK;
    }
    void close()
    {
    }

    /* Enqueues the given stages of an image. */
    enum status launch(const image_work<noise> &work, unsigned stages, cudaStream_t stream) const
    {
        if (stages & STAGE_NOISE) {
            RANGE(NOISE);
            Step::launch(work, stream);
            CUDA_TRY_LAUNCH("the noise kernel");
        }
        if (stages & STAGE_VERTICES) {
            RANGE(VERTICES);
            vertex_kernel<<<blocks_for(work.vertices(), VERTEX_BLOCK), VERTEX_BLOCK, 0, stream>>>(work);
            CUDA_TRY_LAUNCH("vertex_kernel");
        }
        if (stages & STAGE_PAINTING) {
            RANGE(PAINTING);
            paint_kernel<<<paint_grid(work.vertices(), work.orbits()), PAINT_BLOCK, 0, stream>>>(work);
            CUDA_TRY_LAUNCH("paint_kernel");
        }
        return STATUS_OK;
    }

    /* Returns the status of the launched work. Call it after waiting for the stream. */
    enum status finish() const
    {
        return STATUS_OK;
    }
};

/* The state of a variant. Scratch memory for one image suffices, because images run in sequence. */
template <class Launcher> struct ladder_by : staged<ladder_by<Launcher>> {
    using noise = typename Launcher::noise;
    using staged<ladder_by<Launcher>>::batch;

    Launcher launcher;
    void *noise_memory;
    int2 *points;
    uint8_t *grays;

    static void teardown(void *state)
    {
        ladder_by *self = static_cast<ladder_by *>(state);
        (void)cudaFree(self->grays);
        (void)cudaFree(self->points);
        (void)cudaFree(self->noise_memory);
        self->launcher.close();
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
        return launcher.open();
    }

    image_work<noise> work_of(uint64_t run, uint64_t j) const
    {
        const struct synth *synth = batch.synth;
        image_work<noise> work;
        work.input = image_input_listed(batch.input, synth->classes,
                                        reinterpret_cast<const uint64_t *>(synth->spoke_offset),
                                        batch.host_numbers, run, j);
        work.noise = noise::at(noise_memory, work.segments());
        work.points = points;
        work.grays = grays;
        return work;
    }

    uint64_t step() const
    {
        return 1;
    }
    enum status launch(uint64_t j, unsigned stages) const
    {
        return launcher.launch(work_of(batch.run, j), stages, batch.clock.stream);
    }
    enum status finish() const
    {
        return launcher.finish();
    }

    /* Generates the noise of an image again and copies it to the host. The noise is a pure function of the
     * image's key, so it is the same as in run `run`. */
    static enum status fetch_noise(void *state, uint64_t run, uint64_t j, float *result)
    {
        ladder_by *self = static_cast<ladder_by *>(state);
        CUDA_TRY(cudaSetDevice(self->batch.device));
        image_work<noise> work = self->work_of(run, j);
        TRY(self->launcher.launch(work, STAGE_NOISE, self->batch.clock.stream));
        void *copy = malloc(work.segments() * noise::bytes);
        TRY(ALLOCATED(copy, "out of memory for the noise of an image"));
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
        TRY(cuda_status(error, "copy of the noise", __FILE__, __LINE__));
        return self->launcher.finish();
    }
};

template <class Step> using ladder = ladder_by<host_launcher<Step>>;

/* Defines a variant with state type `state`, a ladder_by<>. */
#define LADDER_VARIANT(symbol, state, noise_)                 \
    STAGED_VARIANT(symbol, state, noise_, state::noise::half, \
                   noise_ == SYNTH_NOISE_XORWOW ? state::fetch_noise : nullptr)

/* ---- Noise ---- */

/* The noise stage of `gbase` and `gbase-device`. There is one thread per sample; x and y are separate
 * samples. Each thread seeks to its own XORWOW state. Seeking dominates the cost, because it multiplies
 * matrices of 160 x 160 bits. */
static __global__ void __launch_bounds__(NOISE_BLOCK) gbase_noise_kernel(image_work<noise_apart> work)
{
    uint64_t i = (uint64_t)blockIdx.x * NOISE_BLOCK + threadIdx.x;
    if (i >= 2 * work.segments())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), i, 0, &state);
    /* Index i covers all x and then all y, because the y array follows the x array in memory. */
    work.noise.x[i] = noise_of_draw(work.input.gradients, curand(&state));
}

static __host__ __device__ __forceinline__ unsigned gbase_noise_grid(const image_work<noise_apart> &work)
{
    return blocks_for(2 * work.segments(), NOISE_BLOCK);
}

#endif
