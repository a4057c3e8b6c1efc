/* The three stages of the variants of the paper's ladder (docs/synth.md), and the storage formats of noise.
 * An image is a polygon that is drawn once per orbit; noise moves its vertices from orbit to orbit.
 *
 *   noise     Computes a noise sample per orbit and vertex. The variants differ in this stage.
 *   vertices  One thread per vertex computes its position after each orbit.
 *   painting  Each line is drawn by one thread. Orbits are drawn concurrently, so either of two overlapping
 *             orbits may end up on top. */
#ifndef FDSL_CUDA_SYNTH_STAGES_CUH
#define FDSL_CUDA_SYNTH_STAGES_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdlib.h>

#include "common/check.cuh"
#include "machine/device.h"
#include "core/generator.h"
#include "synth/batch.cuh"
#include "synth/atom.h"

/* The bits of a set of stages. */
enum : unsigned {
    STAGE_NOISE = 1,
    STAGE_VERTICES = 2,
    STAGE_PAINTING = 4,
    STAGES_ALL = STAGE_NOISE | STAGE_VERTICES | STAGE_PAINTING
};

/* ---- Storage of noise ---- */

/* x and y in separate arrays. */
struct noise_apart {
    static constexpr size_t bytes = 2 * sizeof(float);
    static constexpr bool half = false;
    float *x, *y;

    static noise_apart at(void *memory, size_t count)
    {
        float *first = static_cast<float *>(memory);
        return {first, first + count};
    }
    __device__ void put(size_t i, float noise_x, float noise_y) const
    {
        x[i] = noise_x;
        y[i] = noise_y;
    }
    __host__ __device__ float2 get(size_t i) const
    {
        return make_float2(x[i], y[i]);
    }
};

/* x and y interleaved: one 8-byte access per sample. */
struct noise_float2 {
    static constexpr size_t bytes = sizeof(float2);
    static constexpr bool half = false;
    float2 *xy;

    __host__ __device__ static noise_float2 at(void *memory, size_t)
    {
        return {static_cast<float2 *>(memory)};
    }
    __device__ void put(size_t i, float noise_x, float noise_y) const
    {
        xy[i] = make_float2(noise_x, noise_y);
    }
    __host__ __device__ float2 get(size_t i) const
    {
        return xy[i];
    }
};

/* x and y interleaved in half precision: one 4-byte access per sample. */
struct noise_half2 {
    static constexpr size_t bytes = sizeof(__half2);
    static constexpr bool half = true;
    __half2 *xy;

    __host__ __device__ static noise_half2 at(void *memory, size_t)
    {
        return {static_cast<__half2 *>(memory)};
    }
    __device__ void put(size_t i, float noise_x, float noise_y) const
    {
        xy[i] = __floats2half2_rn(noise_x, noise_y);
    }
    __host__ __device__ float2 get(size_t i) const
    {
        return __half22float2(xy[i]);
    }
};

/* ---- The data of an image that the stages share ---- */

template <class Noise> struct image_work {
    struct image_input input;
    Noise noise;    /* samples [orbit][vertex] */
    int2 *points;   /* positions of the vertices after each orbit, in pixels; [orbit][vertex] */
    uint8_t *grays; /* one per orbit */

    __host__ __device__ uint32_t vertices() const
    {
        return input.class_.vertices;
    }
    __host__ __device__ uint32_t orbits() const
    {
        return input.class_.orbits;
    }
    __host__ __device__ uint64_t segments() const
    {
        return (uint64_t)input.class_.vertices * input.class_.orbits;
    }
};

/* Returns the seed of cuRAND's generators for an image. It is the image's key, so images have different
 * streams. */
static __device__ __forceinline__ unsigned long long curand_seed(struct philox_key key)
{
    return (unsigned long long)key.word[1] << 32 | key.word[0];
}

static __host__ __device__ __forceinline__ unsigned blocks_for(uint64_t threads, unsigned block)
{
    return (unsigned)((threads + block - 1) / block);
}

/* ---- Vertices and painting ---- */

/* Blocks are small, so that the vertices of an image (about a thousand) use many multiprocessors. */
#define VERTEX_BLOCK 32
/* Number of orbits whose noise is loaded ahead. A position depends on the position in the previous orbit, but
 * the loads do not depend on each other. */
#define VERTEX_AHEAD 8

template <class Noise> __global__ void __launch_bounds__(VERTEX_BLOCK) vertex_kernel(image_work<Noise> work)
{
    const struct image_input &image = work.input;
    uint32_t v = blockIdx.x * VERTEX_BLOCK + threadIdx.x, q = work.vertices(), orbits = work.orbits();
    for (uint32_t k = v; k < orbits; k += gridDim.x * VERTEX_BLOCK)
        work.grays[k] = atom_gray(&image.rules, image.key, 0, k);
    if (v >= q)
        return;
    float cosine = image.spokes.cosine[v], sine = image.spokes.sine[v], advance = image.spokes.advance[v];
    const struct line_shape shape = line_shape(&image.rules, image.key, 0, &image.class_, 0, 1, image.res);
    struct atom_point point = line_start(&shape, cosine, sine);
    for (uint32_t k = 0; k < orbits; k += VERTEX_AHEAD) {
        float2 noise[VERTEX_AHEAD];
        size_t i = (size_t)k * q + v;
#pragma unroll
        for (uint32_t ahead = 0; ahead < VERTEX_AHEAD; ahead++)
            if (k + ahead < orbits)
                noise[ahead] = work.noise.get(i + (size_t)ahead * q);
#pragma unroll
        for (uint32_t ahead = 0; ahead < VERTEX_AHEAD; ahead++)
            if (k + ahead < orbits) {
                point = atom_advance(point, image.class_.noise, cosine, sine, advance,
                                     {noise[ahead].x, noise[ahead].y});
                work.points[i + (size_t)ahead * q] = make_int2((int)point.x, (int)point.y);
            }
    }
}

/* Returns the number of blocks for the `threads` threads of one orbit. A grid has this many blocks per orbit.
 * Kernels derive the orbit from the block index, so no 32-bit index overflows. */
static __host__ __device__ __forceinline__ unsigned blocks_per_orbit(uint32_t threads, unsigned block)
{
    return (threads + block - 1) / block;
}

#define PAINT_BLOCK 256

/* Draws the line between two points. Nearly all visible lines have both ends inside the image. Their pixels
 * need no bounds test. */
static __device__ __forceinline__ void paint_line(const struct image_input &image, int2 from, int2 to,
                                                  uint8_t gray)
{
    int32_t res = (int32_t)image.res;
    struct line line = line_begin(&image.rules, from.x, from.y, to.x, to.y);
    if (line_inside(from.x, from.y, res) && line_inside(to.x, to.y, res))
        for (; line.left > 0; line_step(&line))
            image.pixels[line.y * res + line.x] = gray;
    else
        for (; line.left > 0; line_step(&line))
            if (line_inside(line.x, line.y, res))
                image.pixels[line.y * res + line.x] = gray;
}

/* Returns the number of blocks with which each thread of paint_kernel() draws at most one line. With fewer
 * blocks, threads loop over several lines. */
static __host__ __device__ __forceinline__ unsigned paint_grid(uint32_t vertices, uint32_t orbits)
{
    return orbits * blocks_per_orbit(vertices, PAINT_BLOCK);
}

template <class Noise> __global__ void __launch_bounds__(PAINT_BLOCK) paint_kernel(image_work<Noise> work)
{
    const struct image_input &image = work.input;
    uint32_t q = work.vertices(), blocks = blocks_per_orbit(q, PAINT_BLOCK);
    for (uint32_t block = blockIdx.x; block < blocks * work.orbits(); block += gridDim.x) {
        uint32_t k = block / blocks, v = (block - k * blocks) * PAINT_BLOCK + threadIdx.x;
        if (v >= q)
            continue;
        const int2 *orbit = work.points + (size_t)k * q;
        int2 from = orbit[v], to = orbit[v + 1 < q ? v + 1 : 0];
        if (line_drawn(&image.rules, from.x, from.y, to.x, to.y, (int32_t)image.res))
            paint_line(image, from, to, work.grays[k]);
    }
}

/* ---- Noise stages that several variants share ---- */

#define NOISE_BLOCK  256
#define STREAM_BLOCK 32

/* Computes noise with one thread per sample. A Philox block has the random numbers of a vertex in two orbits.
 * The thread computes this block and uses the two words of its own orbit. */
template <class Noise> __device__ __forceinline__ void noise_by_sample(const image_work<Noise> &work)
{
    uint32_t q = work.vertices(), blocks = blocks_per_orbit(q, NOISE_BLOCK);
    uint32_t orbit = blockIdx.x / blocks, vertex = (blockIdx.x - orbit * blocks) * NOISE_BLOCK + threadIdx.x;
    if (vertex >= q)
        return;
    struct atom_point noise = atom_noise(work.input.key, 0, work.input.gradients, vertex, orbit);
    work.noise.put((size_t)orbit * q + vertex, noise.x, noise.y);
}

/* Computes the same noise as noise_by_sample(), but with one thread per orbit. Each thread loops over the
 * vertices. */
template <class Noise> __device__ __forceinline__ void noise_by_orbit(const image_work<Noise> &work)
{
    uint32_t orbit = blockIdx.x * STREAM_BLOCK + threadIdx.x;
    if (orbit >= work.orbits())
        return;
    size_t i = (size_t)orbit * work.vertices();
    for (uint32_t vertex = 0; vertex < work.vertices(); vertex++, i++) {
        struct atom_point noise = atom_noise(work.input.key, 0, work.input.gradients, vertex, orbit);
        work.noise.put(i, noise.x, noise.y);
    }
}

/* ---- Variants ---- */

/* Base class of the state of a variant. `self` is the derived class. setup() zeroes the state. The derived
 * class defines
 *
 *     enum status make(const struct resources *resources, const struct synth *synth);
 *     static void teardown(void *state);
 *     uint64_t step() const;
 *     enum status launch(uint64_t first, unsigned stages) const;
 *     enum status finish() const;
 *
 * step() returns the number of images per launch. launch() enqueues stages of step() images from `first` on.
 * finish() returns the status of the launched work; call it after waiting for the stream. */
template <class self> struct staged {
    struct device_batch batch;

    static const uint8_t *images(const void *state)
    {
        return static_cast<const self *>(state)->batch.input.pixels;
    }

    static enum status setup(const struct resources *resources, const void *input, void **state)
    {
        self *made = static_cast<self *>(calloc(1, sizeof *made));
        *state = made;
        return made ? made->make(resources, static_cast<const struct synth *>(input))
                    : status_set(STATUS_EXHAUSTED, "out of memory");
    }

    static enum status run(void *state, uint64_t number, struct run_time *time)
    {
        self *made = static_cast<self *>(state);
        TRY(device_batch_begin(&made->batch, number));
        for (uint64_t first = 0; first < made->batch.synth->batch; first += made->step())
            TRY(made->launch(first, STAGES_ALL));
        TRY(device_batch_end(&made->batch, time));
        return made->finish();
    }

    /* Repeats the latest run and times each stage. For each launch, the three stages run consecutively, each
     * for all images of the launch. Does not clear the images. */
    static enum status stages(void *state, double *noise_s, double *vertices_s, double *painting_s)
    {
        self *made = static_cast<self *>(state);
        double *const stage_s[] = {noise_s, vertices_s, painting_s};
        CUDA_TRY(cudaSetDevice(made->batch.device));
        *noise_s = *vertices_s = *painting_s = 0;
        for (uint64_t first = 0; first < made->batch.synth->batch; first += made->step())
            for (unsigned i = 0; i < COUNT_OF(stage_s); i++)
                TRY(device_clock_add(&made->batch.clock, stage_s[i],
                                     [&] { return made->launch(first, STAGE_NOISE << i); }));
        return made->finish();
    }

    static enum status fetch(void *state, void *result)
    {
        return device_batch_fetch(&static_cast<self *>(state)->batch,
                                  static_cast<struct synth_fetch *>(result));
    }
};

/* A variant as a generator (core/generator.h): draws canvases on the caller's stream and converts them there.
 * The caller must also pass image numbers in host memory, because in variants like `gbase` the host reads
 * them. */
template <class self> struct staged_generator {
    struct generator generator; /* must be first */
    struct synth synth;         /* synth.batch is the number of images of the current call */
    void *state;
    int64_t *labels; /* destination of the labels if the caller wants none */

    static enum status draw(const self *drawing, uint32_t count, void *samples, int64_t *labels)
    {
        const struct device_batch *batch = &drawing->batch;
        CUDA_TRY(cudaMemsetAsync(batch->input.pixels, 0, count * synth_image_bytes(batch->synth),
                                 batch->clock.stream));
        for (uint64_t first = 0; first < count; first += drawing->step())
            TRY(drawing->launch(first, STAGES_ALL));
        return convert_enqueue(&batch->input, &batch->synth->output, batch->numbers, batch->run, count,
                               samples, labels, batch->clock.stream);
    }

    /* Draws `count` images on `stream`. If a kernel fails to launch another kernel, the next call of make()
     * reports this failure. */
    static enum status make(struct generator *generator, const struct generator_numbers *numbers,
                            uint32_t count, void *samples, const struct generator_targets *targets,
                            void *stream)
    {
        staged_generator *made = reinterpret_cast<staged_generator *>(generator);
        self *drawing = static_cast<self *>(made->state);
        if ((numbers->list && !numbers->host_list) || numbers->counter)
            return status_set(STATUS_UNAVAILABLE,
                              "this generator needs the image numbers in host memory, but "
                              "they are only in device memory; use fused");
        TRY(drawing->finish());
        const cudaStream_t own = drawing->batch.clock.stream;
        drawing->batch.clock.stream = static_cast<cudaStream_t>(stream);
        drawing->batch.run = numbers->first;
        drawing->batch.numbers = numbers->list;
        drawing->batch.host_numbers = numbers->list ? numbers->host_list : nullptr;
        made->synth.batch = count;
        enum status status =
            draw(drawing, count, samples, targets && targets->labels ? targets->labels : made->labels);
        drawing->batch.numbers = drawing->batch.host_numbers = nullptr;
        drawing->batch.clock.stream = own;
        return status;
    }

    static uint64_t memory_bytes(const struct generator *generator)
    {
        const staged_generator *made = reinterpret_cast<const staged_generator *>(generator);
        return static_cast<const self *>(made->state)->batch.bytes;
    }

    static void close(struct generator *generator)
    {
        staged_generator *made = reinterpret_cast<staged_generator *>(generator);
        if (made->state)
            self::teardown(made->state);
        (void)cudaFree(made->labels);
        free(made);
    }

    /* Draws the images of one launch, so that CUDA loads the kernels. CUDA would otherwise load them in the
     * first call, and it must not do so while this call is captured. The converted image overwrites the first
     * canvas. */
    enum status load_kernels()
    {
        self *drawing = static_cast<self *>(state);
        const struct synth_output output = synth.output;
        synth.output = {DTYPE_U8, OUTPUT_NCHW, OUTPUT_WHOLE, synth.res, 1, {}, {}};
        enum status status = draw(drawing, 1, drawing->batch.input.pixels, labels);
        synth.output = output;
        TRY(status);
        CUDA_TRY(cudaStreamSynchronize(drawing->batch.clock.stream));
        return drawing->finish();
    }

    enum status fill(const struct resources *resources, uint32_t batch)
    {
        CUDA_TRY(cudaSetDevice(resources->device));
        CUDA_TRY(cudaMalloc(&labels, batch * sizeof *labels));
        TRY(self::setup(resources, &synth, &state));
        static_cast<self *>(state)->batch.bytes += batch * sizeof *labels;
        return load_kernels();
    }

    static enum status open(const struct generator_request *request, const struct synth *synth,
                            struct generator **generator)
    {
        static const struct generator_type type = {make, memory_bytes, close};
        staged_generator *made = static_cast<staged_generator *>(calloc(1, sizeof *made));
        TRY(ALLOCATED(made, "out of memory"));
        made->generator.type = &type;
        made->synth = *synth;
        made->synth.batch = request->batch;
        made->synth.stride = 1; /* so that run number n begins with image n */
        enum status status = made->fill(&request->resources, request->batch);
        if (status != STATUS_OK)
            close(&made->generator);
        else
            *generator = &made->generator;
        return status;
    }
};

/* Defines a variant with a state type derived from staged<>. struct synth_traits explains `fetch_noise_`. */
#define STAGED_VARIANT(symbol, state, noise_, half_, fetch_noise_)                                       \
    static const struct synth_traits symbol##_traits = {.noise = (noise_),                               \
                                                        .half = (half_),                                 \
                                                        .racy = true,                                    \
                                                        .timed = "clear+draw",                           \
                                                        .fetch_noise = (fetch_noise_),                   \
                                                        .images = state::images,                         \
                                                        .generator_open = staged_generator<state>::open, \
                                                        .stages = state::stages};                        \
    extern "C" {                                                                                         \
    extern const struct variant symbol;                                                                  \
    const struct variant symbol = {.platform = "cuda",                                                   \
                                   .traits = &symbol##_traits,                                           \
                                   .probe = device_probe_variant,                                        \
                                   .setup = state::setup,                                                \
                                   .run = state::run,                                                    \
                                   .fetch = state::fetch,                                                \
                                   .teardown = state::teardown};                                         \
    }

#endif
