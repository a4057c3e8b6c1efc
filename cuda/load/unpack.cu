#include "load/unpack.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.cuh"
#include "load/tally.cuh"

#define BLOCK_THREADS 256
#define GROUP         8  /* values that a thread converts at once: 16 bytes of halves */
#define BLOCKS_WANTED 5  /* on a multiprocessor: what is left over of registers, tallies spill */
#define GROUPS        4u /* of a thread, so that as many loads are in flight */

static __device__ __forceinline__ struct unpack_entry entry_at(const struct unpack &job, uint32_t i)
{
    if (job.entries)
        return job.entries[i];
    uint32_t sample = job.order[i];
    return {job.places[sample], sample, job.slot + i};
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

/* Value i of a group. A byte becomes the end of a float's bits, 2^23 and the byte, less 2^23: two
 * instructions of full rate. */
template <enum image_type S, int BYTES>
static __device__ __forceinline__ float value_of(const struct words<BYTES> &words, int i)
{
    if constexpr (S == IMAGE_U8)
        return __uint_as_float(__byte_perm(words.word[i / 4], 0x4B000000, 0x7650 | i % 4)) - 0x1p23f;
    else if constexpr (S == IMAGE_F16)
        return __half2float(__ushort_as_half(static_cast<uint16_t>(words.word[i / 2] >> 16 * (i % 2))));
    else
        return __uint_as_float(words.word[i]);
}

/* What no bytes can become needs no look. */
template <enum image_type S>
static __device__ __forceinline__ float scaled(const struct convert &convert, float value)
{
    return S == IMAGE_U8 ? fmaf(value, convert.scale, convert.bias)
                         : convert_scale(value, convert.scale, convert.bias);
}

/* Two values of the tensor, 2i and 2i + 1 of a group. */
template <enum tensor_type T, int BYTES>
static __device__ __forceinline__ void put_pair(struct words<BYTES> &words, int i, float first, float second)
{
    if constexpr (T == TENSOR_F32) {
        words.word[2 * i] = __float_as_uint(first);
        words.word[2 * i + 1] = __float_as_uint(second);
    } else if constexpr (T == TENSOR_F16) {
        __half2 pair = __floats2half2_rn(first, second);
        words.word[i] = *reinterpret_cast<uint32_t *>(&pair);
    } else {
        __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        words.word[i] = *reinterpret_cast<uint32_t *>(&pair);
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
        for (int i = 0; i < GROUP / 2; i++)
            put_pair<T>(to, i, scaled<S>(convert, value_of<S>(from, 2 * i)),
                        scaled<S>(convert, value_of<S>(from, 2 * i + 1)));
}

/* How the groups of samples fall to threads: `lanes` threads a sample (a power of two, up to a block), each
 * with every lanes'th group, GROUPS of them; and `pieces` blocks a sample where it has more groups than a
 * block takes. */
struct share {
    uint32_t groups, whole; /* of a sample; of these, full ones */
    uint32_t lanes_log2, pieces;
};

/* The end of a sample, or a group at an odd address: value by value. */
static __device__ __noinline__ void convert_rest(const struct convert &convert, const uint8_t *values,
                                                 uint64_t first, uint64_t end, uint8_t *slot)
{
    for (uint64_t i = first; i < first + GROUP && i < end; i++)
        convert_one(&convert, values, i, slot);
}

template <enum image_type S, enum tensor_type T>
static __device__ __forceinline__ void convert_values(const struct unpack &job, uint32_t block,
                                                      const struct share &share)
{
    constexpr uint32_t FROM = GROUP * source_bytes(S), TO = GROUP * tensor_bytes(S, T);
    uint32_t lanes = 1u << share.lanes_log2, row = block / share.pieces;
    uint32_t which = row * (BLOCK_THREADS >> share.lanes_log2) + (threadIdx.x >> share.lanes_log2);
    uint32_t first = (block - row * share.pieces) * (lanes * GROUPS) + (threadIdx.x & (lanes - 1));
    if (which >= job.count)
        return;
    struct unpack_entry entry = entry_at(job, which);
    const uint8_t *values = job.bytes + entry.at + job.samples[entry.sample].values;
    uint8_t *slot = job.tensor + entry.slot * job.stride;
    const uint8_t *at = values + static_cast<uint64_t>(first) * FROM;
    uint8_t *to = slot + static_cast<uint64_t>(first) * TO;
    uint32_t whole = aligned<FROM>(values) ? share.whole : 0;
    struct words<FROM> from[GROUPS];
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++)
        if (first + g * lanes < whole)
            from[g] = load<FROM>(at + g * lanes * FROM);
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++)
        if (first + g * lanes < whole) {
            struct words<TO> words;
            convert_group<S, T>(job.convert, from[g], words);
            store<TO>(to + g * lanes * TO, words);
        }
    for (uint32_t i = first; whole < share.groups && i < share.groups && i < first + lanes * GROUPS;
         i += lanes)
        if (i >= whole)
            convert_rest(job.convert, values, static_cast<uint64_t>(i) * GROUP, job.values, slot);
}

template <enum image_type S, enum tensor_type T>
static __global__
__launch_bounds__(BLOCK_THREADS, BLOCKS_WANTED) void unpack_kernel(const __grid_constant__ struct unpack job,
                                                                   uint32_t tally_blocks,
                                                                   const __grid_constant__ struct share share)
{
    if (blockIdx.x < tally_blocks)
        tally_samples(job); /* first, as a few threads take long */
    else
        convert_values<S, T>(job, blockIdx.x - tally_blocks, share);
}

/* ---- Launching ---- */

typedef void unpack_function(const struct unpack, uint32_t, const struct share);

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

/* A block a piece of a sample, or several samples a block where they are small. */
static struct share share_of(const struct unpack *unpack)
{
    struct share share = {static_cast<uint32_t>((unpack->values + GROUP - 1) / GROUP),
                          static_cast<uint32_t>(unpack->values / GROUP), 0, 1};
    while (1u << share.lanes_log2 < BLOCK_THREADS && GROUPS << share.lanes_log2 < share.groups)
        share.lanes_log2++;
    share.pieces = (share.groups + (GROUPS << share.lanes_log2) - 1) / (GROUPS << share.lanes_log2);
    return share;
}

enum status unpack_launch(const struct unpack *unpack, cudaStream_t stream)
{
    if (unpack->count == 0)
        return STATUS_OK;
    if (unpack->values > UINT32_MAX)
        return status_set(STATUS_USAGE, "samples of %llu values are more than the kernel takes (2^32)",
                          (unsigned long long)unpack->values);
    struct share share = share_of(unpack);
    uint32_t rows_a_block = BLOCK_THREADS >> share.lanes_log2;
    uint32_t tally_blocks = (unpack->count + BLOCK_THREADS - 1) / BLOCK_THREADS;
    uint64_t blocks =
        (uint64_t)((unpack->count + rows_a_block - 1) / rows_a_block) * share.pieces + tally_blocks;
    if (blocks > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "%u samples of %llu values are more than one launch takes; lower --chunk",
                          unpack->count, (unsigned long long)unpack->values);
    kernel_of(&unpack->convert)<<<static_cast<uint32_t>(blocks), BLOCK_THREADS, 0, stream>>>(
        *unpack, tally_blocks, share);
    CUDA_TRY_LAUNCH("unpack_kernel");
    return STATUS_OK;
}
