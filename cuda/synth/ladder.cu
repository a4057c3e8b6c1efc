/* The variants of the paper's ladder that the host launches stage by stage (docs/synth.md): `gbase`,
 * `mem-float2`, `mem`, `rng`, and the alternatives to `rng`. They are in one file because they instantiate
 * the same templates of ladder.cuh, and because the headers of cuRAND take long to compile. */
#include "synth/ladder.cuh"

/* `gbase`: GBASE of the paper. The host launches three kernels per image, in sequence. */

struct gbase {
    using noise = noise_apart;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        gbase_noise_kernel<<<gbase_noise_grid(work), NOISE_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_gbase, ladder<gbase>, SYNTH_NOISE_XORWOW)

/* The noise stage of `mem-float2` and `mem`. Each sample has one thread and one XORWOW state, for both x and
 * y. */
template <class Noise>
static __global__ void __launch_bounds__(NOISE_BLOCK) xorwow_noise_kernel(image_work<Noise> work)
{
    uint64_t i = (uint64_t)blockIdx.x * NOISE_BLOCK + threadIdx.x;
    if (i >= work.segments())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), i, 0, &state);
    float x = noise_of_draw(work.input.gradients, curand(&state));
    work.noise.put(i, x, noise_of_draw(work.input.gradients, curand(&state)));
}

template <class Noise> struct xorwow_by_sample {
    using noise = Noise;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        xorwow_noise_kernel<<<blocks_for(work.segments(), NOISE_BLOCK), NOISE_BLOCK, 0, stream>>>(work);
    }
};

/* `mem-float2`: `gbase`, but the noise of x and y is stored as one float2. The threads seek to half as many
 * random-number states as in `gbase`. A float2 takes one memory access instead of two. */

LADDER_VARIANT(variant_mem_float2, ladder<xorwow_by_sample<noise_float2>>, SYNTH_NOISE_XORWOW)

/* `mem`: MEM of the paper. It is `mem-float2` with noise in half precision. This halves the
 * bytes that the noise stage writes and the vertex stage reads. */

LADDER_VARIANT(variant_mem, ladder<xorwow_by_sample<noise_half2>>, SYNTH_NOISE_XORWOW)

/* `rng`: RNG of the paper. It is `mem` with Philox instead of XORWOW. Philox is a function
 * of a counter, so threads need not seek to a state. A sample costs one Philox block of ten rounds. */

static __global__ void __launch_bounds__(NOISE_BLOCK) rng_noise_kernel(image_work<noise_half2> work)
{
    noise_by_sample(work);
}

struct rng {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_noise_kernel<<<work.orbits() * blocks_per_orbit(work.vertices(), NOISE_BLOCK), NOISE_BLOCK, 0,
                           stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng, ladder<rng>, SYNTH_NOISE_COUNTER)

/* `rng-reuse`, an alternative from the paper: `rng` with one thread per orbit, which computes the noise
 * of all vertices. Philox is a function of a counter and has no state to set up. Computing several samples
 * per thread therefore saves nothing; it only reduces parallelism. */

static __global__ void __launch_bounds__(STREAM_BLOCK) rng_reuse_noise_kernel(image_work<noise_half2> work)
{
    noise_by_orbit(work);
}

struct rng_reuse {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng_reuse, ladder<rng_reuse>, SYNTH_NOISE_COUNTER)

/* `rng-uniform4`, an alternative from the paper: `rng-reuse` with cuRAND's Philox state. curand_uniform4()
 * returns four floats: x and y of two vertices. The reference on the host generates the same random
 * numbers. */

static __global__ void __launch_bounds__(STREAM_BLOCK) rng_uniform4_noise_kernel(image_work<noise_half2> work)
{
    uint32_t orbit = blockIdx.x * STREAM_BLOCK + threadIdx.x, q = work.vertices();
    if (orbit >= work.orbits())
        return;
    const float *gradients = work.input.gradients;
    curandStatePhilox4_32_10_t state;
    curand_init(curand_seed(work.input.key), STREAM_CURAND + orbit, 0, &state);
    size_t i = (size_t)orbit * q;
    for (uint32_t vertex = 0; vertex < q; vertex += 2, i += 2) {
        float4 uniform = curand_uniform4(&state);
        work.noise.put(i, noise_of_uniform(gradients, uniform.x), noise_of_uniform(gradients, uniform.y));
        if (vertex + 1 < q)
            work.noise.put(i + 1, noise_of_uniform(gradients, uniform.z),
                           noise_of_uniform(gradients, uniform.w));
    }
}

struct rng_uniform4 {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_uniform4_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(work);
    }
};

LADDER_VARIANT(variant_rng_uniform4, ladder<rng_uniform4>, SYNTH_NOISE_UNIFORM4)

/* `rng-xorwow-reuse`, an alternative from the paper: XORWOW with one thread and one state per orbit. A thread
 * seeks once per orbit instead of once per sample. */

static __global__ void __launch_bounds__(STREAM_BLOCK)
    rng_xorwow_reuse_noise_kernel(image_work<noise_half2> work)
{
    uint32_t orbit = blockIdx.x * STREAM_BLOCK + threadIdx.x, q = work.vertices();
    if (orbit >= work.orbits())
        return;
    curandStateXORWOW_t state;
    curand_init(curand_seed(work.input.key), orbit, 0, &state);
    size_t i = (size_t)orbit * q;
    for (uint32_t vertex = 0; vertex < q; vertex++, i++) {
        float x = noise_of_draw(work.input.gradients, curand(&state));
        work.noise.put(i, x, noise_of_draw(work.input.gradients, curand(&state)));
    }
}

struct rng_xorwow_reuse {
    using noise = noise_half2;
    static void launch(const image_work<noise> &work, cudaStream_t stream)
    {
        rng_xorwow_reuse_noise_kernel<<<blocks_for(work.orbits(), STREAM_BLOCK), STREAM_BLOCK, 0, stream>>>(
            work);
    }
};

LADDER_VARIANT(variant_rng_xorwow_reuse, ladder<rng_xorwow_reuse>, SYNTH_NOISE_XORWOW)
