/* Kernels that all-reduce over peer memory: each rank stores data into staging memory of the other ranks,
 * over NVLink or PCIe. Ranks wait for each other inside the kernels.
 *
 * Each block is a channel: block b exchanges data only with the blocks b of the other ranks, through memory
 * and flags of its own. Channels do not wait for each other, so there is no barrier of the whole grid, and
 * blocks need not run at the same time. An array is divided into chunks; chunk i belongs to channel
 * i mod (number of blocks). A channel handles its chunks one after the other: each is one step.
 *
 *     one-shot  A rank stores its chunk into the inbox of every other rank, and publishes flag INPUT there.
 * It waits for this flag of all ranks, and adds up the terms of all ranks. two-shot  A chunk has one part per
 * rank, its owner. A rank stores each part into its owner's inbox, and publishes flag INPUT. It waits for
 * INPUT of all ranks, adds up the terms of its own part, stores the sums into the results of every other
 * rank, and publishes flag RESULT. It waits for RESULT of all ranks, and copies the sums of the other parts.
 *
 * Both add up in rank order in fp32, and round each sum to the format in which it travels. So all ranks get
 * the same bits, and both kernels give the same bits.
 *
 * A channel numbers its steps over all calls. The number is the value of the flags, and is in device memory,
 * so that a CUDA graph can be replayed. Each channel has two halves of inbox and results, and step s uses
 * half s mod 2. Two halves suffice, for any mixture of both kernels:
 *   1. A rank stores data of step s into another rank's inbox only after its own step s - 1.
 *   2. In step s - 1 of either kernel, it waited for INPUT of step s - 1 from every rank.
 *   3. A rank publishes INPUT of step s - 1 after all its threads have completed step s - 2, so it no longer
 *      reads any half of step s - 2, which step s overwrites.
 *   4. A rank stores results of step s only after it waited for INPUT of step s, so by 3 the receiver has
 *      completed step s - 1, and even one half of results would suffice.
 *   5. The release of a flag follows a barrier of the block, and the acquire precedes one; they therefore
 *      order the reads and writes of all threads of both blocks. */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PEER_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#define PEER_RANKS_MAX    8
#define PEER_CHANNELS_MAX 256
#define PEER_THREADS      256
/* A unit is 16 bytes of data that travel. A slot is the memory of one channel and half for one rank; the
 * slots of all ranks together have this many units. */
#define PEER_HALF_UNITS 8192
#define PEER_UNIT_BYTES 16
#define PEER_LINE_UNITS 8 /* 128 bytes; parts are multiples of it, so that blocks write whole cache lines */
/* While a thread waits, it reads the clock once per this many polls. */
#define PEER_POLLS_PER_CLOCK 1024

enum peer_stage { PEER_INPUT, PEER_RESULT, PEER_STAGES };

/* The memory of all ranks as this rank sees it; a kernel parameter. */
struct peer_links {
    uint32_t rank;
    uint32_t slot_units;
    /* By rank; each array is in memory of that rank. flags: [stage][channel][PEER_RANKS_MAX], the latest
     * step that the rank of the last index has published. inbox and results: [channel][half][rank][slot]. */
    uint32_t *flags[PEER_RANKS_MAX];
    uint4 *inbox[PEER_RANKS_MAX], *results[PEER_RANKS_MAX];
    uint32_t *steps;  /* in own memory: the latest step of each channel */
    uint32_t *failed; /* in own memory: not 0 after a timeout */
    uint32_t *late;   /* in host memory: 1 + the rank that did not answer; 0: none */
    uint64_t timeout_ns;
};

struct peer_call {
    void *values;
    size_t count;
    uint32_t part_units; /* units per chunk (one-shot), or per part of a chunk (two-shot) */
};

/* ---- Formats: how values travel ---- */

static __device__ __forceinline__ uint32_t peer_bf16_pair(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&both);
}

static __device__ __forceinline__ uint4 peer_pack_bf16(const float (&v)[8])
{
    return make_uint4(peer_bf16_pair(v[0], v[1]), peer_bf16_pair(v[2], v[3]), peer_bf16_pair(v[4], v[5]),
                      peer_bf16_pair(v[6], v[7]));
}

static __device__ __forceinline__ void peer_unpack_bf16(uint4 unit, float (&values)[8])
{
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    }
}

/* Values have the format in which they travel. */
template <class Value, int VALUES_PER_UNIT> struct peer_format_same {
    static constexpr int UNIT = VALUES_PER_UNIT;

    /* Returns the unit that begins with value `at` of `count`; values after the last one are 0. */
    static __device__ __forceinline__ uint4 load(const void *values, size_t at, size_t count)
    {
        const Value *from = static_cast<const Value *>(values) + at;
        if (at + UNIT <= count)
            return __ldcg(reinterpret_cast<const uint4 *>(from));
        union {
            uint4 unit;
            Value values[UNIT];
        } rest = {make_uint4(0, 0, 0, 0)};
#pragma unroll
        for (int i = 0; i < UNIT; i++)
            if (at + i < count)
                rest.values[i] = from[i];
        return rest.unit;
    }
    static __device__ __forceinline__ void store(void *values, size_t at, size_t count, uint4 unit)
    {
        Value *to = static_cast<Value *>(values) + at;
        if (at + UNIT <= count) {
            __stcg(reinterpret_cast<uint4 *>(to), unit);
            return;
        }
        union {
            uint4 unit;
            Value values[UNIT];
        } rest = {unit};
#pragma unroll
        for (int i = 0; i < UNIT; i++)
            if (at + i < count)
                to[i] = rest.values[i];
    }
};

struct peer_format_f32 : peer_format_same<uint32_t, 4> {
    static __device__ __forceinline__ uint4 pack(const float (&v)[4])
    {
        return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                          __float_as_uint(v[3]));
    }
    static __device__ __forceinline__ void unpack(uint4 unit, float (&values)[4])
    {
        values[0] = __uint_as_float(unit.x), values[1] = __uint_as_float(unit.y);
        values[2] = __uint_as_float(unit.z), values[3] = __uint_as_float(unit.w);
    }
};

struct peer_format_bf16 : peer_format_same<uint16_t, 8> {
    static __device__ __forceinline__ uint4 pack(const float (&values)[8])
    {
        return peer_pack_bf16(values);
    }
    static __device__ __forceinline__ void unpack(uint4 unit, float (&values)[8])
    {
        peer_unpack_bf16(unit, values);
    }
};

struct peer_format_f32_as_bf16 {
    static constexpr int UNIT = 8;

    static __device__ __forceinline__ uint4 load(const void *values, size_t at, size_t count)
    {
        const float *from = static_cast<const float *>(values) + at;
        float loaded[8] = {};
        if (at + UNIT <= count) {
            float4 low = __ldcg(reinterpret_cast<const float4 *>(from));
            float4 high = __ldcg(reinterpret_cast<const float4 *>(from) + 1);
            loaded[0] = low.x, loaded[1] = low.y, loaded[2] = low.z, loaded[3] = low.w;
            loaded[4] = high.x, loaded[5] = high.y, loaded[6] = high.z, loaded[7] = high.w;
        } else {
#pragma unroll
            for (int i = 0; i < UNIT; i++)
                if (at + i < count)
                    loaded[i] = from[i];
        }
        return peer_pack_bf16(loaded);
    }
    static __device__ __forceinline__ void store(void *values, size_t at, size_t count, uint4 unit)
    {
        float *to = static_cast<float *>(values) + at, stored[8];
        peer_unpack_bf16(unit, stored);
        if (at + UNIT <= count) {
            __stcg(reinterpret_cast<float4 *>(to), make_float4(stored[0], stored[1], stored[2], stored[3]));
            __stcg(reinterpret_cast<float4 *>(to) + 1,
                   make_float4(stored[4], stored[5], stored[6], stored[7]));
            return;
        }
#pragma unroll
        for (int i = 0; i < UNIT; i++)
            if (at + i < count)
                to[i] = stored[i];
    }
    static __device__ __forceinline__ uint4 pack(const float (&values)[8])
    {
        return peer_pack_bf16(values);
    }
    static __device__ __forceinline__ void unpack(uint4 unit, float (&values)[8])
    {
        peer_unpack_bf16(unit, values);
    }
};

/* ---- Flags ---- */

static __device__ __forceinline__ void peer_store_release(uint32_t *at, uint32_t value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

static __device__ __forceinline__ uint32_t peer_load_acquire(const uint32_t *at)
{
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

static __device__ __forceinline__ uint64_t peer_clock_ns(void)
{
    uint64_t now_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now_ns));
    return now_ns;
}

/* Returns the flag in memory of rank `owner` that rank `writer` publishes. */
static __device__ __forceinline__ uint32_t *peer_flag(const struct peer_links &links, enum peer_stage stage,
                                                      uint32_t owner, uint32_t writer)
{
    return links.flags[owner] + (stage * PEER_CHANNELS_MAX + blockIdx.x) * PEER_RANKS_MAX + writer;
}

/* Publishes to all other ranks that all threads of this block have completed everything before this call. */
template <int RANKS>
static __device__ __forceinline__ void peer_publish(const struct peer_links &links, enum peer_stage stage,
                                                    uint32_t step)
{
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != links.rank)
        peer_store_release(peer_flag(links, stage, threadIdx.x, links.rank), step);
}

/* Waits for one rank. Returns false after a timeout, also if it was in another block. */
static __device__ __forceinline__ bool peer_wait_long(const struct peer_links &links, const uint32_t *flag,
                                                      uint32_t step, uint32_t rank)
{
    const uint64_t begin_ns = peer_clock_ns();
    for (;;) {
        for (int poll = 0; poll < PEER_POLLS_PER_CLOCK; poll++)
            if ((int32_t)(peer_load_acquire(flag) - step) >= 0)
                return true;
        if (*(volatile uint32_t *)links.failed)
            return false;
        if (peer_clock_ns() - begin_ns > links.timeout_ns) {
            *(volatile uint32_t *)links.late = 1 + rank;
            *(volatile uint32_t *)links.failed = 1;
            __threadfence_system();
            return false;
        }
    }
}

/* Waits until all other ranks have published the step. Returns false, in all threads, after a timeout. A
 * flag may be ahead of the step, because other ranks may have begun the next one. */
template <int RANKS>
static __device__ __forceinline__ bool peer_wait(const struct peer_links &links, enum peer_stage stage,
                                                 uint32_t step)
{
    bool timed_out = false;
    if (threadIdx.x < RANKS && threadIdx.x != links.rank) {
        const uint32_t *flag = peer_flag(links, stage, links.rank, threadIdx.x);
        timed_out =
            (int32_t)(peer_load_acquire(flag) - step) < 0 && !peer_wait_long(links, flag, step, threadIdx.x);
    }
    return !__syncthreads_or(timed_out);
}

/* ---- Data ---- */

/* Units that a thread loads before it uses the first one. */
template <int RANKS> static constexpr int peer_batch = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1;

/* Returns the slot of rank `writer` in an array of slots, the inbox or the results of a rank. */
template <int RANKS>
static __device__ __forceinline__ uint4 *peer_slot(const struct peer_links &links, uint4 *slots,
                                                   uint32_t step, uint32_t writer)
{
    return slots + ((size_t)(blockIdx.x * 2 + (step & 1)) * RANKS + writer) * links.slot_units;
}

/* A batch of a thread: units at, at + PEER_THREADS, at + 2 * PEER_THREADS ... below `units`. */
#define FOR_BATCH(i)           _Pragma("unroll") for (int i = 0; i < BATCH; i++)
#define IN_BATCH(at, i, units) ((at) + (i)*PEER_THREADS < (units))

template <class Format, int BATCH>
static __device__ __forceinline__ void peer_load(const struct peer_call &call, size_t first, uint32_t at,
                                                 uint32_t units, uint4 (&batch)[BATCH])
{
    FOR_BATCH(i)
    if (IN_BATCH(at, i, units))
        batch[i] = Format::load(call.values, (first + at + i * PEER_THREADS) * Format::UNIT, call.count);
}

template <class Format, int BATCH>
static __device__ __forceinline__ void peer_store(const struct peer_call &call, size_t first, uint32_t at,
                                                  uint32_t units, const uint4 (&batch)[BATCH])
{
    FOR_BATCH(i)
    if (IN_BATCH(at, i, units))
        Format::store(call.values, (first + at + i * PEER_THREADS) * Format::UNIT, call.count, batch[i]);
}

/* Stores a batch into a slot of another rank. */
template <int BATCH>
static __device__ __forceinline__ void peer_send(uint4 *slot, uint32_t at, uint32_t units,
                                                 const uint4 (&batch)[BATCH])
{
    FOR_BATCH(i)
    if (IN_BATCH(at, i, units))
        __stcg(slot + at + i * PEER_THREADS, batch[i]);
}

/* Loads a batch that another rank stored into a slot of this rank. __ldcg() bypasses the L1 cache, which may
 * have data of an earlier step. */
template <int BATCH>
static __device__ __forceinline__ void peer_receive(const uint4 *slot, uint32_t at, uint32_t units,
                                                    uint4 (&batch)[BATCH])
{
    FOR_BATCH(i)
    if (IN_BATCH(at, i, units))
        batch[i] = __ldcg(slot + at + i * PEER_THREADS);
}

/* Receives a batch of all other ranks, adds up in rank order, and replaces the own terms in `batch` by the
 * sums. consume(index, sums, valid) may change the sums of the `valid` values from `index` on. */
template <class Format, int RANKS, int BATCH, class Consume>
static __device__ __forceinline__ void
peer_add_up(const struct peer_links &links, const struct peer_call &call, uint32_t step, size_t first,
            uint32_t at, uint32_t units, uint4 (&batch)[BATCH], const Consume &consume)
{
    uint4 terms[RANKS][BATCH];
#pragma unroll
    for (uint32_t writer = 0; writer < RANKS; writer++)
        if (writer != links.rank)
            peer_receive(peer_slot<RANKS>(links, links.inbox[links.rank], step, writer), at, units,
                         terms[writer]);
    FOR_BATCH(i)
    {
        if (!IN_BATCH(at, i, units))
            continue;
        float sums[Format::UNIT], term[Format::UNIT];
#pragma unroll
        for (uint32_t writer = 0; writer < RANKS; writer++) {
            Format::unpack(writer == links.rank ? batch[i] : terms[writer][i], term);
#pragma unroll
            for (int j = 0; j < Format::UNIT; j++)
                sums[j] = writer == 0 ? term[j] : sums[j] + term[j];
        }
        size_t index = (first + at + i * PEER_THREADS) * Format::UNIT;
        consume(index, sums, index + Format::UNIT <= call.count ? Format::UNIT : (int)(call.count - index));
        batch[i] = Format::pack(sums);
    }
}

struct peer_consume_nothing {
    template <int UNIT> __device__ __forceinline__ void operator()(size_t, float (&)[UNIT], int) const
    {
    }
};

/* ---- Kernels ---- */

template <class Format, int RANKS>
static __global__ void __launch_bounds__(PEER_THREADS, 2)
    one_shot_kernel(const __grid_constant__ struct peer_links links,
                    const __grid_constant__ struct peer_call call)
{
    constexpr int BATCH = peer_batch<RANKS>;
    constexpr uint32_t BATCH_UNITS = BATCH * PEER_THREADS;
    const size_t all_units = (call.count + Format::UNIT - 1) / Format::UNIT;
    uint32_t step = links.steps[blockIdx.x];
    if (__syncthreads_or(*links.failed != 0))
        return;
    for (size_t first = (size_t)blockIdx.x * call.part_units; first < all_units;
         first += (size_t)gridDim.x * call.part_units) {
        const uint32_t units = (uint32_t)min(all_units - first, (size_t)call.part_units);
        step++;
        /* The first batch stays in registers until the sums. */
        uint4 begin[BATCH] = {}, batch[BATCH] = {};
        auto send = [&](uint32_t at, uint4(&data)[BATCH]) {
            peer_load<Format>(call, first, at, units, data);
#pragma unroll
            for (uint32_t i = 1; i < RANKS; i++) {
                /* Each rank begins with another receiver, so that no receiver gets the data of all first. */
                uint32_t reader = (links.rank + i) % RANKS;
                peer_send(peer_slot<RANKS>(links, links.inbox[reader], step, links.rank), at, units, data);
            }
        };
        send(threadIdx.x, begin);
        for (uint32_t at = threadIdx.x + BATCH_UNITS; at < units; at += BATCH_UNITS)
            send(at, batch);
        peer_publish<RANKS>(links, PEER_INPUT, step);
        if (!peer_wait<RANKS>(links, PEER_INPUT, step))
            return;
        const struct peer_consume_nothing nothing;
        peer_add_up<Format, RANKS>(links, call, step, first, threadIdx.x, units, begin, nothing);
        peer_store<Format>(call, first, threadIdx.x, units, begin);
        for (uint32_t at = threadIdx.x + BATCH_UNITS; at < units; at += BATCH_UNITS) {
            peer_load<Format>(call, first, at, units, batch);
            peer_add_up<Format, RANKS>(links, call, step, first, at, units, batch, nothing);
            peer_store<Format>(call, first, at, units, batch);
        }
    }
    if (threadIdx.x == 0)
        links.steps[blockIdx.x] = step;
}

/* `consume` may change the sums of the own part before they are sent; see peer_add_up(). */
template <class Format, int RANKS, class Consume>
static __global__ void __launch_bounds__(PEER_THREADS, 2)
    two_shot_kernel(const __grid_constant__ struct peer_links links,
                    const __grid_constant__ struct peer_call call, const __grid_constant__ Consume consume)
{
    constexpr int BATCH = peer_batch<RANKS>;
    constexpr uint32_t BATCH_UNITS = BATCH * PEER_THREADS;
    const size_t all_units = (call.count + Format::UNIT - 1) / Format::UNIT;
    const size_t chunk_units = (size_t)RANKS * call.part_units;
    uint32_t step = links.steps[blockIdx.x];
    if (__syncthreads_or(*links.failed != 0))
        return;
    for (size_t first = blockIdx.x * chunk_units; first < all_units; first += gridDim.x * chunk_units) {
        step++;
        auto part_first = [&](uint32_t owner) { return first + (size_t)owner * call.part_units; };
        auto part_units = [&](uint32_t owner) { /* the last chunk of an array may have empty parts */
                                                size_t begin = part_first(owner);
                                                return begin < all_units
                                                           ? (uint32_t)min(all_units - begin,
                                                                           (size_t)call.part_units)
                                                           : 0;
        };
        uint4 begin[BATCH] = {}, batch[BATCH] = {};
#pragma unroll
        for (uint32_t i = 1; i < RANKS; i++) {
            const uint32_t owner = (links.rank + i) % RANKS, units = part_units(owner);
            uint4 *slot = peer_slot<RANKS>(links, links.inbox[owner], step, links.rank);
            for (uint32_t at = threadIdx.x; at < units; at += BATCH_UNITS) {
                peer_load<Format>(call, part_first(owner), at, units, batch);
                peer_send(slot, at, units, batch);
            }
        }
        const size_t own_first = part_first(links.rank);
        const uint32_t own_units = part_units(links.rank);
        peer_load<Format>(call, own_first, threadIdx.x, own_units,
                          begin); /* before waiting, to hide latency */
        peer_publish<RANKS>(links, PEER_INPUT, step);
        if (!peer_wait<RANKS>(links, PEER_INPUT, step))
            return;
        auto add_up = [&](uint32_t at, uint4(&data)[BATCH]) {
            peer_add_up<Format, RANKS>(links, call, step, own_first, at, own_units, data, consume);
#pragma unroll
            for (uint32_t i = 1; i < RANKS; i++) {
                uint32_t reader = (links.rank + i) % RANKS;
                peer_send(peer_slot<RANKS>(links, links.results[reader], step, links.rank), at, own_units,
                          data);
            }
            peer_store<Format>(call, own_first, at, own_units, data);
        };
        if (threadIdx.x < own_units)
            add_up(threadIdx.x, begin);
        for (uint32_t at = threadIdx.x + BATCH_UNITS; at < own_units; at += BATCH_UNITS) {
            peer_load<Format>(call, own_first, at, own_units, batch);
            add_up(at, batch);
        }
        peer_publish<RANKS>(links, PEER_RESULT, step);
        if (!peer_wait<RANKS>(links, PEER_RESULT, step))
            return;
#pragma unroll
        for (uint32_t i = 1; i < RANKS; i++) {
            const uint32_t owner = (links.rank + i) % RANKS, units = part_units(owner);
            const uint4 *slot = peer_slot<RANKS>(links, links.results[links.rank], step, owner);
            for (uint32_t at = threadIdx.x; at < units; at += BATCH_UNITS) {
                peer_receive(slot, at, units, batch);
                peer_store<Format>(call, part_first(owner), at, units, batch);
            }
        }
    }
    if (threadIdx.x == 0)
        links.steps[blockIdx.x] = step;
}

#undef FOR_BATCH
#undef IN_BATCH

#endif
