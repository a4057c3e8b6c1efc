#include "load/unpack.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.cuh"
#include "load/tally.cuh"

#define BLOCK_THREADS 256
#define GROUP         8 /* values that a thread converts at once: 16 bytes of halves */
#define GROUPS        4 /* of a thread, so that as many loads are in flight */

static __device__ __forceinline__ struct unpack_entry entry_at(const struct unpack &job, uint32_t i)
{
    if (job.entries)
        return job.entries[i];
    uint32_t sample = job.order[i];
    return {job.places[sample], sample, (job.slot + i) % job.slots};
}

/* ---- Tallies: a thread a sample ---- */

static __device__ uint64_t hash_sample(const struct unpack &job, const struct array_sample &sample,
                                       const uint8_t *bytes)
{
    uint64_t members[ARRAY_MEMBERS_MAX];
    for (uint32_t m = 0; m < sample.members; m++)
        members[m] = job.whole ? device_tally_whole(bytes + sample.at[m], sample.size[m])
                               : device_tally_edges(bytes + sample.at[m], sample.size[m]);
    return device_tally_sample(sample.key_hash, members, sample.members);
}

/* The sum over a warp, in lane 0. */
static __device__ uint64_t warp_sum(uint64_t value)
{
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_down_sync(~0u, value, distance);
    return value;
}

static __device__ void add(uint64_t *to, uint64_t value)
{
    atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(value));
}

static __device__ void tally_samples(const struct unpack &job)
{
    uint32_t i = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    struct tally own = {0, 0, 0};
    if (i < job.count) {
        struct unpack_entry entry = entry_at(job, i);
        const struct array_sample &sample = job.samples[entry.sample];
        const uint8_t *bytes = job.bytes + entry.at;
        int32_t label = LABEL_NONE;
        own = {1, 0, hash_sample(job, sample, bytes)};
        for (uint32_t m = 0; m < sample.members; m++)
            own.bytes += sample.size[m];
        if (sample.label < sample.members)
            convert_label(bytes + sample.at[sample.label], sample.size[sample.label], &label);
        job.labels[entry.slot] = label;
        job.hashes[entry.slot] = own.sum;
    }
    own = {warp_sum(own.count), warp_sum(own.bytes), warp_sum(own.sum)};
    if (threadIdx.x % 32 == 0 && own.count > 0) {
        add(&job.tally->count, own.count);
        add(&job.tally->bytes, own.bytes);
        add(&job.tally->sum, own.sum);
    }
}

/* ---- Conversion: a thread some groups of values ---- */

/* A group's bytes as words, from an address that is as aligned as the group is long, up to 16 bytes. */
template <int BYTES> struct words {
    uint32_t word[BYTES / 4];
};

template <int BYTES> static __device__ __forceinline__ bool aligned(const void *address)
{
    return reinterpret_cast<uintptr_t>(address) % (BYTES < 16 ? BYTES : 16) == 0;
}

template <int BYTES> static __device__ __forceinline__ struct words<BYTES> load(const uint8_t *from) {
    struct words<BYTES> words;
    if constexpr (BYTES == 8) {
        uint2 pair = *reinterpret_cast<const uint2 *>(from);
        words.word[0] = pair.x;
        words.word[1] = pair.y;
    } else
        for (int i = 0; i < BYTES / 16; i++) {
            uint4 four = reinterpret_cast<const uint4 *>(from)[i];
            words.word[4 * i] = four.x;
            words.word[4 * i + 1] = four.y;
            words.word[4 * i + 2] = four.z;
            words.word[4 * i + 3] = four.w;
        }
    return words;
}

template <int BYTES>
static __device__ __forceinline__ void store(uint8_t *to, const struct words<BYTES> &words)
{
    if constexpr (BYTES == 8)
        *reinterpret_cast<uint2 *>(to) = make_uint2(words.word[0], words.word[1]);
    else
        for (int i = 0; i < BYTES / 16; i++)
            reinterpret_cast<uint4 *>(to)[i] = make_uint4(words.word[4 * i], words.word[4 * i + 1],
                                                          words.word[4 * i + 2], words.word[4 * i + 3]);
}

static __host__ __device__ constexpr int source_bytes(enum image_type source)
{
    return source == IMAGE_U8 ? 1 : source == IMAGE_F16 ? 2 : 4;
}

static __host__ __device__ constexpr int tensor_bytes(enum image_type source, enum tensor_type tensor)
{
    return tensor == TENSOR_RAW ? source_bytes(source) : tensor == TENSOR_F32 ? 4 : 2;
}

/* Value i of a group. */
template <enum image_type S, int BYTES>
static __device__ __forceinline__ float value_of(const struct words<BYTES> &words, int i)
{
    if constexpr (S == IMAGE_U8)
        return static_cast<float>(words.word[i / 4] >> 8 * (i % 4) & 0xFF);
    else if constexpr (S == IMAGE_F16)
        return __half2float(__ushort_as_half(static_cast<uint16_t>(words.word[i / 2] >> 16 * (i % 2))));
    else
        return __uint_as_float(words.word[i]);
}

template <enum tensor_type T, int BYTES>
static __device__ __forceinline__ void put_value(struct words<BYTES> &words, int i, float value)
{
    if constexpr (T == TENSOR_F32)
        words.word[i] = __float_as_uint(value);
    else {
        uint32_t bits = T == TENSOR_F16 ? __half_as_ushort(__float2half_rn(value))
                                        : __bfloat16_as_ushort(__float2bfloat16_rn(value));
        words.word[i / 2] = i % 2 ? words.word[i / 2] | bits << 16 : bits;
    }
}

/* As convert_one(), a group at once. */
template <enum image_type S, enum tensor_type T>
static __device__ __forceinline__ void convert_group(const struct convert &convert,
                                                     const struct words<GROUP * source_bytes(S)> &from,
                                                     struct words<GROUP * tensor_bytes(S, T)> &to)
{
    if constexpr (T == TENSOR_RAW)
        to = from;
    else
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            put_value<T>(to, i, convert_scale(value_of<S>(from, i), convert.scale, convert.bias));
}

template <enum image_type S, enum tensor_type T>
static __device__ __forceinline__ void convert_values(const struct unpack &job, uint32_t block,
                                                      uint32_t groups_a_sample)
{
    constexpr int FROM = GROUP * source_bytes(S), TO = GROUP * tensor_bytes(S, T);
    struct words<FROM> from[GROUPS];
    const uint8_t *values[GROUPS];
    uint8_t *slots[GROUPS];
    uint32_t group[GROUPS];
    bool whole[GROUPS];
    uint64_t first = static_cast<uint64_t>(block) * BLOCK_THREADS * GROUPS + threadIdx.x,
             all = static_cast<uint64_t>(job.count) * groups_a_sample;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        uint64_t i = first + static_cast<uint64_t>(g) * BLOCK_THREADS;
        values[g] = nullptr;
        whole[g] = false;
        if (i >= all)
            continue;
        uint32_t which = static_cast<uint32_t>(i) / groups_a_sample; /* unpack_launch() sees that it fits */
        struct unpack_entry entry = entry_at(job, which);
        group[g] = static_cast<uint32_t>(i) - which * groups_a_sample;
        values[g] = job.bytes + entry.at + job.samples[entry.sample].values;
        slots[g] = job.tensor + entry.slot * job.stride;
        const uint8_t *at = values[g] + static_cast<uint64_t>(group[g]) * FROM;
        whole[g] = aligned<FROM>(at) && (group[g] + 1ull) * GROUP <= job.values;
        if (whole[g])
            from[g] = load<FROM>(at);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        if (!values[g])
            continue;
        uint64_t begin = static_cast<uint64_t>(group[g]) * GROUP;
        if (whole[g]) {
            struct words<TO> to;
            convert_group<S, T>(job.convert, from[g], to);
            store<TO>(slots[g] + static_cast<uint64_t>(group[g]) * TO, to);
        } else /* the end of a sample, or one at an odd address */
            for (uint64_t i = begin; i < begin + GROUP && i < job.values; i++)
                convert_one(&job.convert, values[g], i, slots[g]);
    }
}

template <enum image_type S, enum tensor_type T>
static __global__
__launch_bounds__(BLOCK_THREADS) void unpack_kernel(const __grid_constant__ struct unpack job,
                                                    uint32_t tally_blocks, uint32_t groups_a_sample)
{
    if (blockIdx.x < tally_blocks)
        tally_samples(job); /* first, as a few threads take long */
    else
        convert_values<S, T>(job, blockIdx.x - tally_blocks, groups_a_sample);
}

/* ---- Launching ---- */

typedef void unpack_function(const struct unpack, uint32_t, uint32_t);

template <enum image_type S> static unpack_function *kernel_from(enum tensor_type tensor)
{
    switch (tensor) {
    case TENSOR_RAW:
        return unpack_kernel<S, TENSOR_RAW>;
    case TENSOR_F32:
        return unpack_kernel<S, TENSOR_F32>;
    case TENSOR_F16:
        return unpack_kernel<S, TENSOR_F16>;
    default:
        return unpack_kernel<S, TENSOR_BF16>;
    }
}

static unpack_function *kernel_of(const struct convert *convert)
{
    return convert->source == IMAGE_U8    ? kernel_from<IMAGE_U8>(convert->tensor)
           : convert->source == IMAGE_F16 ? kernel_from<IMAGE_F16>(convert->tensor)
                                          : kernel_from<IMAGE_F32>(convert->tensor);
}

enum status unpack_launch(const struct unpack *unpack, cudaStream_t stream)
{
    uint64_t groups = (unpack->values + GROUP - 1) / GROUP, all = groups * unpack->count;
    if (unpack->count == 0)
        return STATUS_OK;
    if (all > UINT32_MAX)
        return status_set(STATUS_FAILED,
                          "%u samples of %llu values are more than one kernel takes; lower --chunk",
                          unpack->count, (unsigned long long)unpack->values);
    uint32_t tally_blocks = (unpack->count + BLOCK_THREADS - 1) / BLOCK_THREADS;
    uint32_t blocks = static_cast<uint32_t>((all + BLOCK_THREADS * GROUPS - 1) / (BLOCK_THREADS * GROUPS));
    kernel_of(&unpack->convert)<<<tally_blocks + blocks, BLOCK_THREADS, 0, stream>>>(
        *unpack, tally_blocks, static_cast<uint32_t>(groups));
    CUDA_TRY_LAUNCH("unpack_kernel");
    return STATUS_OK;
}
