#include "data/members.h"
#include "load/unpack.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.cuh"
#include "common/shared.cuh"
#include "core/phase.h"
#include "load/checksum.cuh"

#define BLOCK_THREADS    256
#define GROUP_BYTES      16  /* tensor bytes per store of a thread; a warp then writes whole cache lines */
#define GROUPS_MAX       8u  /* maximum groups per thread; all their loads are in flight together */
#define FLIGHT_BYTES     128 /* maximum bytes of a thread's loads in flight, which are held in registers */
#define CHECKSUM_SAMPLES (BLOCK_THREADS / XXH3_PARTS) /* samples that a block checksums */
/* Minimum number of blocks per multiprocessor. This limits the registers per thread. Only the code that
 * computes hashes then spills registers. */
#define BLOCKS_WANTED 4

static __device__ __forceinline__ struct unpack_entry entry_at(const struct unpack &job, uint32_t i)
{
    if (job.entries)
        return job.entries[i];
    return {0, job.order[i], job.slot + i};
}

/* ---- Checksums: one thread per part of a sample's edges ---- */

/* Returns the hash of a member (one file of a sample), computed by a single thread. */
static __device__ __noinline__ uint64_t hash_alone(const uint8_t *bytes, uint64_t size, bool whole)
{
    return whole ? device_checksum_whole(bytes, size) : device_checksum_edges(bytes, size);
}

/* Returns the hash of a member (one file of a sample), computed by XXH3_PARTS threads. `lane` is the thread's
 * number among them. The result is valid in the thread with lane 0. All threads of the warp must call this. A
 * thread without a member passes false for `there`. */
static __device__ __forceinline__ uint64_t hash_member(const uint8_t *bytes, uint64_t size, bool whole,
                                                       uint32_t lane, bool there)
{
    bool parts = there && !whole && size > 2 * CHECKSUM_EDGE;
    uint64_t sum = parts ? device_checksum_part(bytes, size, lane) : 0;
    for (int distance = XXH3_PARTS / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    if (parts)
        return xxh3_of_parts(sum);
    return there && lane == 0 ? hash_alone(bytes, size, whole) : 0;
}

static __device__ void add(uint64_t *to, uint64_t value)
{
    atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(value));
}

/* Adds the checksums of all threads of the block to `*to`. Uses one set of atomics per block, because atomics
 * on one address serialise. All threads of the block must call this. */
static __device__ void block_add(struct checksum *to, struct checksum own)
{
    __shared__ struct checksum warps[BLOCK_THREADS / 32];
    own = {warp_sum(own.count), warp_sum(own.bytes), warp_sum(own.sum)};
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int w = 1; w < BLOCK_THREADS / 32; w++) {
        own.count += warps[w].count;
        own.bytes += warps[w].bytes;
        own.sum += warps[w].sum;
    }
    add(&to->count, own.count);
    add(&to->bytes, own.bytes);
    add(&to->sum, own.sum);
}

/* Hashes CHECKSUM_SAMPLES samples and stores their labels. */
static __device__ void checksum_samples(const struct unpack &job, uint32_t block)
{
    uint32_t i = block * CHECKSUM_SAMPLES + threadIdx.x / XXH3_PARTS, lane = threadIdx.x % XXH3_PARTS;
    struct unpack_entry entry = entry_at(job, i < job.count ? i : job.count - 1);
    const struct array_sample &sample = job.samples[entry.sample];
    const uint8_t *bytes = job.bytes + entry.at;
    uint64_t members[ARRAY_MEMBERS_MAX];
    struct checksum own = {0, 0, 0};
#pragma unroll
    for (uint32_t m = 0; m < ARRAY_MEMBERS_MAX; m++)
        members[m] = hash_member(bytes + sample.at[m], sample.size[m], job.whole, lane, m < sample.members);
    if (lane == 0 && i < job.count) {
        own = {1, sample.bytes, device_checksum_sample(sample.key_hash, members, sample.members)};
        job.labels[entry.slot] = sample.label;
        job.hashes[entry.slot] = own.sum;
    }
    block_add(job.checksum, own);
}

/* ---- Conversion: several groups of values per thread ---- */

/* A group is the values that fill GROUP_BYTES of the tensor. This struct contains the bytes of a group as
 * 32-bit words. load() needs an address aligned to BYTES, or to 16 bytes if BYTES is larger than 16. store()
 * needs an address aligned to 16 bytes. */
template <int BYTES> struct words {
    uint32_t word[BYTES / 4];
};

template <int BYTES> static __device__ __forceinline__ bool aligned(const void *address)
{
    return reinterpret_cast<uintptr_t>(address) % (BYTES < 16 ? BYTES : 16) == 0;
}

template <int BYTES> static __device__ __forceinline__ struct words<BYTES> load(const uint8_t *from) {
    struct words<BYTES> words;
    if constexpr (BYTES == 4)
        words.word[0] = *reinterpret_cast<const uint32_t *>(from);
    else if constexpr (BYTES == 8) {
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

static __device__ __forceinline__ void
store(uint8_t *to, const struct words<GROUP_BYTES> &words)
{
    *reinterpret_cast<uint4 *>(to) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
}

static __host__ __device__ constexpr int source_bytes(enum dtype source)
{
    return source == DTYPE_U8 ? 1 : source == DTYPE_F16 ? 2 : 4;
}

static __host__ __device__ constexpr int tensor_bytes(enum dtype source, enum dtype tensor)
{
    return tensor == DTYPE_STORED ? source_bytes(source) : tensor == DTYPE_F32 ? 4 : 2;
}

/* Sizes for values stored as type S that are converted to type T. */
template <enum dtype S, enum dtype T>
struct group {
    static constexpr int VALUES = GROUP_BYTES / tensor_bytes(S, T); /* values per group */
    static constexpr int FROM = VALUES * source_bytes(S);           /* stored bytes per group */
    /* maximum number of groups per thread */
    static constexpr uint32_t GROUPS = FROM * GROUPS_MAX <= FLIGHT_BYTES ? GROUPS_MAX : FLIGHT_BYTES / FROM;
};

/* Converts value i of a group to float. A byte is inserted into the low bits of the float 2^23, which gives
 * 2^23 + byte; then 2^23 is subtracted. This takes two instructions: a permute and an addition. */
template <enum dtype S, int BYTES>
static __device__ __forceinline__ float value_of(const struct words<BYTES> &words, int i)
{
    if constexpr (S == DTYPE_U8)
        return __uint_as_float(__byte_perm(words.word[i / 4], 0x4B000000, 0x7650 | i % 4)) - 0x1p23f;
    else if constexpr (S == DTYPE_F16)
        return __half2float(__ushort_as_half(static_cast<uint16_t>(words.word[i / 2] >> 16 * (i % 2))));
    else
        return __uint_as_float(words.word[i]);
}

/* Scales a value. Omits the NaN check for u8 values, because they are never NaN. */
template <enum dtype S>
static __device__ __forceinline__ float scaled(const struct convert &convert, float value)
{
    return S == DTYPE_U8 ? fmaf(value, convert.scale, convert.bias)
                         : convert_scale(value, convert.scale, convert.bias);
}

/* Stores values 2i and 2i + 1 of a group in the tensor's type. */
template <enum dtype T, int BYTES>
static __device__ __forceinline__ void put_pair(struct words<BYTES> &words, int i, float first, float second)
{
    if constexpr (T == DTYPE_F32) {
        words.word[2 * i] = __float_as_uint(first);
        words.word[2 * i + 1] = __float_as_uint(second);
    } else if constexpr (T == DTYPE_F16) {
        __half2 pair = __floats2half2_rn(first, second);
        words.word[i] = *reinterpret_cast<uint32_t *>(&pair);
    } else {
        __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        words.word[i] = *reinterpret_cast<uint32_t *>(&pair);
    }
}

/* Converts a group. The results are bit-identical to those of convert_one(). */
template <enum dtype S, enum dtype T>
static __device__ __forceinline__ struct words<GROUP_BYTES>
convert_group(const struct convert &convert, const struct words<group<S, T>::FROM> &from) {
    if constexpr (T == DTYPE_STORED)
        return from;
    else {
        struct words<GROUP_BYTES> to;
#pragma unroll
        for (int i = 0; i < group<S, T>::VALUES / 2; i++)
            put_pair<T>(to, i, scaled<S>(convert, value_of<S>(from, 2 * i)),
                        scaled<S>(convert, value_of<S>(from, 2 * i + 1)));
        return to;
    }
}

/* The distribution of groups over threads. Each sample gets lanes = 2^lanes_log2 threads, at most
 * BLOCK_THREADS. A thread converts every lanes-th group, but at most group::GROUPS groups. If one block
 * cannot convert a whole sample, the sample gets `pieces` blocks. */
struct share {
    uint32_t groups, whole; /* groups per sample; full groups among them */
    uint32_t lanes_log2, pieces;
    uint32_t run; /* number of converting blocks after each checksumming block */
};

/* Converts a group value by value. Used for the incomplete group at the end of a sample, and for all groups
 * of a sample whose address is not aligned. */
template <enum dtype S, enum dtype T>
static __device__ __noinline__ void convert_rest(const struct convert &convert, const uint8_t *values,
                                                 uint64_t first, uint64_t end, uint8_t *slot)
{
    for (uint64_t i = first; i < first + group<S, T>::VALUES && i < end; i++)
        convert_one(&convert, values, i, slot);
}

template <enum dtype S, enum dtype T>
static __device__ __forceinline__ void convert_values(const struct unpack &job, uint32_t block,
                                                      const struct share &share)
{
    constexpr uint32_t FROM = group<S, T>::FROM, GROUPS = group<S, T>::GROUPS;
    uint32_t lanes = 1u << share.lanes_log2, row = block / share.pieces;
    uint32_t which = row * (BLOCK_THREADS >> share.lanes_log2) + (threadIdx.x >> share.lanes_log2);
    uint32_t first = (block - row * share.pieces) * (lanes * GROUPS) + (threadIdx.x & (lanes - 1));
    if (which >= job.count)
        return;
    struct unpack_entry entry = entry_at(job, which);
    const uint8_t *values = job.bytes + entry.at + job.samples[entry.sample].values_offset;
    uint8_t *slot = job.tensor + entry.slot * job.stride;
    const uint8_t *at = values + static_cast<uint64_t>(first) * FROM;
    uint8_t *to = slot + static_cast<uint64_t>(first) * GROUP_BYTES;
    uint32_t whole = aligned<FROM>(values) ? share.whole : 0;
    struct words<FROM> from[GROUPS];
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++)
        if (first + g * lanes < whole)
            from[g] = load<FROM>(at + g * lanes * FROM);
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++)
        if (first + g * lanes < whole)
            store(to + g * lanes * GROUP_BYTES, convert_group<S, T>(job.convert, from[g]));
    for (uint32_t i = first; whole < share.groups && i < share.groups && i < first + lanes * GROUPS;
         i += lanes)
        if (i >= whole)
            convert_rest<S, T>(job.convert, values, static_cast<uint64_t>(i) * group<S, T>::VALUES,
                               job.values, slot);
}

/* Each checksumming block is followed by share.run converting blocks. Checksumming blocks have few loads in
 * flight. They are spread over the grid, so that converting blocks can use the memory bandwidth at the same
 * time. */
template <enum dtype S, enum dtype T>
static __global__
__launch_bounds__(BLOCK_THREADS, BLOCKS_WANTED) void unpack_kernel(const __grid_constant__ struct unpack job,
                                                                   const __grid_constant__ struct share share)
{
    uint32_t run = blockIdx.x / (share.run + 1), at = blockIdx.x - run * (share.run + 1);
    if (at == 0)
        checksum_samples(job, run);
    else
        convert_values<S, T>(job, run * share.run + at - 1, share);
}

static __global__
__launch_bounds__(BLOCK_THREADS) void checksum_kernel(const __grid_constant__ struct unpack job)
{
    checksum_samples(job, blockIdx.x);
}

/* ---- Launching ---- */

/* A kernel and the amount of work per thread. */
struct unpacker {
    void (*kernel)(const struct unpack, const struct share);
    uint32_t values, groups; /* values per group; groups per thread */
};

template <enum dtype S, enum dtype T> static struct unpacker unpacker_of()
{
    return {unpack_kernel<S, T>, group<S, T>::VALUES, group<S, T>::GROUPS};
}

template <enum dtype S> static struct unpacker unpacker_from(enum dtype tensor)
{
    switch (tensor) {
    case DTYPE_STORED:
        return unpacker_of<S, DTYPE_STORED>();
    case DTYPE_F32:
        return unpacker_of<S, DTYPE_F32>();
    case DTYPE_F16:
        return unpacker_of<S, DTYPE_F16>();
    default:
        return unpacker_of<S, DTYPE_BF16>();
    }
}

static struct unpacker choose(const struct convert *convert)
{
    return convert->source == DTYPE_U8    ? unpacker_from<DTYPE_U8>(convert->tensor)
           : convert->source == DTYPE_F16 ? unpacker_from<DTYPE_F16>(convert->tensor)
                                          : unpacker_from<DTYPE_F32>(convert->tensor);
}

/* Computes the distribution and the number of blocks. A block converts a piece of a sample, or several
 * samples if they are small. */
static struct share share_of(const struct unpack *unpack, const struct unpacker *unpacker, uint64_t *blocks)
{
    struct share share = {static_cast<uint32_t>((unpack->values + unpacker->values - 1) / unpacker->values),
                          static_cast<uint32_t>(unpack->values / unpacker->values), 0, 1, 0};
    while (1u << share.lanes_log2 < BLOCK_THREADS && unpacker->groups << share.lanes_log2 < share.groups)
        share.lanes_log2++;
    uint32_t rows = BLOCK_THREADS >> share.lanes_log2, block_groups = unpacker->groups << share.lanes_log2;
    uint64_t runs = ((uint64_t)unpack->count + CHECKSUM_SAMPLES - 1) / CHECKSUM_SAMPLES;
    share.pieces = (share.groups + block_groups - 1) / block_groups;
    uint64_t run = ((uint64_t)((unpack->count + rows - 1) / rows) * share.pieces + runs - 1) / runs;
    share.run = static_cast<uint32_t>(run);
    *blocks = runs * (run + 1);
    return share;
}

enum status unpack_launch(const struct unpack *unpack, cudaStream_t stream)
{
    if (unpack->count == 0)
        return STATUS_OK;
    if (unpack->values > UINT32_MAX)
        return status_set(STATUS_USAGE, "samples have %llu values; GPU variants support at most 2^32 - 1",
                          (unsigned long long)unpack->values);
    struct unpacker unpacker = choose(&unpack->convert);
    uint64_t blocks;
    struct share share = share_of(unpack, &unpacker, &blocks);
    if (blocks > INT32_MAX)
        return status_set(STATUS_USAGE,
                          "%u samples of %llu values are too many for one kernel launch; lower --chunk",
                          unpack->count, (unsigned long long)unpack->values);
    RANGE(UNPACK);
    unpacker.kernel<<<static_cast<uint32_t>(blocks), BLOCK_THREADS, 0, stream>>>(*unpack, share);
    CUDA_TRY_LAUNCH("unpack_kernel");
    return STATUS_OK;
}

enum status unpack_checksums_launch(const struct unpack *unpack, cudaStream_t stream)
{
    if (unpack->count == 0)
        return STATUS_OK;
    RANGE(UNPACK);
    checksum_kernel<<<(unpack->count - 1) / CHECKSUM_SAMPLES + 1, BLOCK_THREADS, 0, stream>>>(*unpack);
    CUDA_TRY_LAUNCH("checksum_kernel");
    return STATUS_OK;
}
