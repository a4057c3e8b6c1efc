/* Shared by the kernels for compute capability 9.0 (*_hopper.cu of transformers and of train-graph): thin
 * wrappers around PTX instructions, and tiles in their format. With wgmma, a warpgroup (4 adjacent warps, 128
 * threads) multiplies matrices asynchronously. stmatrix stores fragments in shared memory.
 *
 * D += A B, where A (64, 16) and B (16, N) are bf16 or fp16, and D (64, N) is fp32. Warp w of the warpgroup
 * holds rows 16 w to 16 w + 15 of D, and of A if A is in registers. The fragments of these 16 rows are those
 * of mma.cuh. For columns 8 n to 8 n + 7 of D, they are d[4 n] to d[4 n + 3]. B is in shared memory, and so
 * is A if it is not in registers (PTX ISA, "Asynchronous warpgroup level matrix instructions").
 *
 * A matrix in shared memory is a part of a tile. A tile consists of rows of 64 values (128 bytes), and its
 * address is a multiple of 1024. Bytes 16 c to 16 c + 15 of row r are at 16 (c ^ r % 8) in this row, so that
 * eight rows of a column are in different banks. If the rows of this part are the rows of A or the columns of
 * B, the part is not transposed. If its rows run along the summed dimension, it is transposed (TRANSPOSE_A,
 * TRANSPOSE_B).
 *
 * Sums (64, N) of a warpgroup are an array of N / 2 values per lane; values 4 * n to 4 * n + 3 are the
 * fragment of columns 8 * n to 8 * n + 7. */
#ifndef FDSL_CUDA_TRAIN_VIT_HOPPER_CUH
#define FDSL_CUDA_TRAIN_VIT_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

#include "common/check.cuh"
#include "common/barrier.cuh"
#include "common/stream.cuh"
#include "train/mma.cuh"
#include "train/vit/fragments.cuh"

#define TILE_WIDTH 64 /* values per row of a tile */

/* Distances between the operands of adjacent products along the summed dimension, in units of wgmma_tile().
 */
#define WGMMA_NEXT            2   /* 16 columns of a tile */
#define WGMMA_NEXT_TRANSPOSED 128 /* 16 rows of a tile */

/* Returns the descriptor of the matrix that begins at `row`, which is the address of a multiple of 8 rows of
 * a tile. A transposed matrix of more than 64 columns continues in the next tiles, which are `apart` bytes
 * apart; for other matrices, `apart` has no effect. */
static __device__ __forceinline__ uint64_t wgmma_tile(const void *row, uint32_t apart = 16)
{
    const uint64_t address = __cvta_generic_to_shared(row), rows8 = 8 * TILE_WIDTH * sizeof(uint16_t);
    return (address & 0x3ffff) >> 4 | (uint64_t)(apart >> 4) << 16 | (rows8 >> 4) << 32 | 1ull << 62;
}

/* Returns the descriptor of a matrix that is not in a tile. It consists of 8 x 8 matrices whose rows of 16
 * bytes are contiguous. `place` is the address of the first one in shared memory. Adjacent ones are `summed`
 * apart along the summed dimension and `other` along the other one. The unit of all three is 16 bytes. */
static __device__ __forceinline__ uint64_t wgmma_pieces(uint32_t place, uint32_t summed, uint32_t other)
{
    return (uint64_t)other << 32 | (place + (summed << 16));
}

/* Call this before the first product, and after registers of operands were written by other instructions. */
static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Combines the products since the previous call into one group, for wgmma_wait(). */
static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all groups, except the latest LEFT groups. Pass the sums of each group that has ended to
 * wgmma_ended(). */
template <int LEFT> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* Keeps the compiler from moving accesses to these sums before the wait, which does not name them. */
template <int COUNT> static __device__ __forceinline__ void wgmma_ended(float (&sums)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(sums[i])::"memory");
}

/* Makes this thread's stores to shared memory visible to wgmma, after a barrier. */
static __device__ __forceinline__ void wgmma_publish(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define WGMMA(n, type, sums, a, b, add, flags)                                                              \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\n"                                                    \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums "}, " a ", " b ", add, " flags \
    ";\n}"
/* The instruction for T. */
#define WGMMA_OF(n, sums, a, b, add, flags, out, in)                           \
    do {                                                                       \
        if constexpr (std::is_same<T, __nv_bfloat16>::value)                   \
            asm volatile(WGMMA(n, "bf16", sums, a, b, add, flags) : out : in); \
        else                                                                   \
            asm volatile(WGMMA(n, "f16", sums, a, b, add, flags) : out : in);  \
    } while (0)
#define SUMS4  "%0, %1, %2, %3"
#define SUMS8  SUMS4 ", %4, %5, %6, %7"
#define SUMS16 SUMS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS24 SUMS16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS32 SUMS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS36 SUMS32 ", %32, %33, %34, %35"
#define SUMS48 SUMS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS64                                                                                            \
    SUMS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
           "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS96                                                                                       \
    SUMS64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
           "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OUT4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT8(i)  OUT4(i), OUT4(i + 4)
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT24(i) OUT16(i), OUT8(i + 16)
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define OUT36(i) OUT32(i), OUT4(i + 32)
#define OUT48(i) OUT32(i), OUT16(i + 32)
#define OUT64(i) OUT32(i), OUT32(i + 32)
#define OUT96    OUT64(0), OUT32(64)
#define A_TILE   "l"(a), "l"(b), "r"((int)add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B)
#define A_WORDS  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(TRANSPOSE_B)

/* Starts d += a b, or d = a b if `add` is false, for operands of the 16-bit type T. `a` and `b` are
 * descriptors of wgmma_tile(). `add` should be a compile-time constant: otherwise the compiler keeps
 * registers for the earlier value of `d`. */
template <class T, int N, int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add)
{
    static_assert(N == 8 || N == 16 || N == 32 || N == 48 || N == 64 || N == 72 || N == 96 || N == 128 ||
                      N == 192,
                  "no wrapper for this number of columns");
    if constexpr (N == 8)
        WGMMA_OF("8", SUMS4, "%4", "%5", "%6", "1, 1, %7, %8", OUT4(0), A_TILE);
    else if constexpr (N == 16)
        WGMMA_OF("16", SUMS8, "%8", "%9", "%10", "1, 1, %11, %12", OUT8(0), A_TILE);
    else if constexpr (N == 32)
        WGMMA_OF("32", SUMS16, "%16", "%17", "%18", "1, 1, %19, %20", OUT16(0), A_TILE);
    else if constexpr (N == 48)
        WGMMA_OF("48", SUMS24, "%24", "%25", "%26", "1, 1, %27, %28", OUT24(0), A_TILE);
    else if constexpr (N == 64)
        WGMMA_OF("64", SUMS32, "%32", "%33", "%34", "1, 1, %35, %36", OUT32(0), A_TILE);
    else if constexpr (N == 72)
        WGMMA_OF("72", SUMS36, "%36", "%37", "%38", "1, 1, %39, %40", OUT36(0), A_TILE);
    else if constexpr (N == 96)
        WGMMA_OF("96", SUMS48, "%48", "%49", "%50", "1, 1, %51, %52", OUT48(0), A_TILE);
    else if constexpr (N == 128)
        WGMMA_OF("128", SUMS64, "%64", "%65", "%66", "1, 1, %67, %68", OUT64(0), A_TILE);
    else
        WGMMA_OF("192", SUMS96, "%96", "%97", "%98", "1, 1, %99, %100", OUT96, A_TILE);
}

/* Overload with A in registers: each warp passes its fragment of 16 x 16 values. */
template <class T, int N, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add)
{
    static_assert(N == 64 || N == 128 || N == 192, "no wrapper for this number of columns");
    if constexpr (N == 64)
        WGMMA_OF("64", SUMS32, "{%32, %33, %34, %35}", "%36", "%37", "1, 1, %38", OUT32(0), A_WORDS);
    else if constexpr (N == 128)
        WGMMA_OF("128", SUMS64, "{%64, %65, %66, %67}", "%68", "%69", "1, 1, %70", OUT64(0), A_WORDS);
    else
        WGMMA_OF("192", SUMS96, "{%96, %97, %98, %99}", "%100", "%101", "1, 1, %102", OUT96, A_WORDS);
}

#undef WGMMA
#undef WGMMA_OF
#undef SUMS4
#undef SUMS8
#undef SUMS16
#undef SUMS24
#undef SUMS32
#undef SUMS36
#undef SUMS48
#undef SUMS64
#undef SUMS96
#undef OUT4
#undef OUT8
#undef OUT16
#undef OUT24
#undef OUT32
#undef OUT36
#undef OUT48
#undef OUT64
#undef OUT96
#undef A_TILE
#undef A_WORDS

/* Stores four 8 x 8 matrices; the opposite of mma_load4(). Lane 8 i + j passes the address of row j of matrix
 * i. */
static __device__ __forceinline__ void store4(void *row, const uint32_t word[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(row)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

/* Transposes an 8 x 8 matrix of 16-bit values: lane l has columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
 */
static __device__ __forceinline__ uint32_t transpose8(uint32_t word)
{
    uint32_t transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
    return transposed;
}

/* ---- Tiles ---- */

#define HEIGHT 64               /* rows that a warpgroup multiplies at a time */
#define PARTS  (TILE_WIDTH / 8) /* parts of a row: 16 bytes each */

typedef uint16_t tile_row[TILE_WIDTH]; /* of a 16-bit type */

/* Returns the address of values 8 * part to 8 * part + 7 of a row. */
static __device__ __forceinline__ uint16_t *part_at(tile_row *tile, uint32_t row, uint32_t part)
{
    return &tile[row][(part ^ row % 8) * 8];
}

/* Stores a fragment of 16 x 16 values at a row and a column of a tile, both multiples of 16. */
static __device__ __forceinline__ void put_fragment(tile_row *tile, uint32_t row, uint32_t column,
                                                    const uint32_t word[4])
{
    const uint32_t lane = threadIdx.x % 32;
    store4(part_at(tile, row + lane % 16, column / 8 + lane / 16), word);
}

/* The opposite of put_fragment(). */
static __device__ __forceinline__ void get_fragment(tile_row *tile, uint32_t row, uint32_t column,
                                                    uint32_t word[4])
{
    const uint32_t lane = threadIdx.x % 32;
    mma_load4(word, part_at(tile, row + lane % 16, column / 8 + lane / 16));
}

/* Starts copying 16 rows, from row `first` on, from global memory to a tile. `from` has `count` rows; further
 * rows are zeros. All lanes of a warp call this function. */
template <class T>
static __device__ __forceinline__ void copy_rows16(tile_row *tile, uint32_t first, uint32_t count,
                                                   const T *from, size_t apart)
{
#pragma unroll
    for (uint32_t i = threadIdx.x % 32; i < 16 * PARTS; i += 32) {
        const uint32_t row = first + i / PARTS, part = i % PARTS;
        const bool inside = row < count;
        copy_async16(part_at(tile, row, part), from + (inside ? row : 0) * apart + 8 * part, inside);
    }
}

/* Copies 16 rows of a tile to global memory, from row `first` on, but without rows from `count` on. */
template <class T>
static __device__ __forceinline__ void write_rows16(tile_row *tile, uint32_t first, uint32_t count, T *to,
                                                    size_t apart)
{
#pragma unroll
    for (uint32_t i = threadIdx.x % 32; i < 16 * PARTS; i += 32) {
        const uint32_t row = first + i / PARTS, part = i % PARTS;
        if (row < count)
            *reinterpret_cast<uint4 *>(to + row * apart + 8 * part) =
                *reinterpret_cast<const uint4 *>(part_at(tile, row, part));
    }
}

/* Returns the number of this thread's warpgroup in its block. With __shfl_sync(), the compiler knows that it
 * is the same for all lanes, and computes addresses once per warp. */
static __device__ __forceinline__ uint32_t own_group(void)
{
    return __shfl_sync(~0u, threadIdx.x / 128, 0);
}

/* Waits for all warps of the warpgroup. */
static __device__ __forceinline__ void meet_group(void)
{
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128)
                 : "memory"); /* __syncthreads() uses barrier 0 */
}

/* Change the number of registers per thread; for all warps of a warpgroup. raise_registers() waits until
 * other warpgroups of the block have given up enough registers. */
template <int COUNT> static __device__ __forceinline__ void lower_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void raise_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- Clusters of blocks ---- */

/* Arrives at the barrier at the same place in block `rank` of the cluster. Does not order stores before it
 * for other blocks: .release.cluster would, but compiles to a fence for the whole GPU, with which a gemm took
 * 585 instead of 443 us. Products that read shared memory must have ended; see wgmma_wait(). */
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, uint32_t rank)
{
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_at(barrier)),
                 "r"(rank)
                 : "memory");
}

/* Waits for all threads of the cluster. */
static __device__ __forceinline__ void meet_cluster(void)
{
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

/* ---- Copies of tiles by the hardware for bulk copies ---- */

/* Adds the bytes of map_load() calls to those that the barrier's phase waits for, and arrives. */
static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* Starts copying a part of a matrix, with the sizes of describe_tiles(), to a tile. Rows after the matrix's
 * last row are zeros. */
static __device__ __forceinline__ void map_load(tile_row *tile, const CUtensorMap *map, uint32_t column,
                                                uint32_t row, uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], [%4];" ::"r"(shared_at(tile)),
        "l"(map), "r"(column), "r"(row), "r"(shared_at(barrier))
        : "memory");
}

/* Like map_load(), but copies to the same place in all blocks of the cluster whose bits are set in `blocks`,
 * and completes bytes at the barrier at the same place in each of them. */
static __device__ __forceinline__ void map_load_shared(tile_row *tile, const CUtensorMap *map,
                                                       uint32_t column, uint32_t row, uint64_t *barrier,
                                                       uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_at(tile)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_at(barrier)), "h"(blocks)
                 : "memory");
}

/* Starts the opposite copy, without rows after the matrix's last row; see bulk_store_wait(). */
static __device__ __forceinline__ void map_store(const tile_row *tile, const CUtensorMap *map,
                                                 uint32_t column, uint32_t row)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(shared_at(tile))
                 : "memory");
}

/* Combines this thread's map_store() calls since the previous call into one group. */
static __device__ __forceinline__ void bulk_store_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until the stores of all groups, except the latest LEFT groups, have read shared memory. */
template <int LEFT> static __device__ __forceinline__ void bulk_store_wait_but(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

/* Like map_load() and map_store(), for maps of describe_samples(). `row` is a row of the sample. */
static __device__ __forceinline__ void sample_load(tile_row *tile, const CUtensorMap *map, uint32_t column,
                                                   uint32_t sample, uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, 0, "
        "%3}], [%4];" ::"r"(shared_at(tile)),
        "l"(map), "r"(column), "r"(sample), "r"(shared_at(barrier))
        : "memory");
}

/* Starts loading into L2 what sample_load() would load. */
static __device__ __forceinline__ void sample_fetch(const CUtensorMap *map, uint32_t column, uint32_t sample)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, 0, %2}];" ::"l"(map), "r"(column),
                 "r"(sample)
                 : "memory");
}

static __device__ __forceinline__ void sample_store(const tile_row *tile, const CUtensorMap *map,
                                                    uint32_t column, uint32_t row, uint32_t sample)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(row), "r"(sample), "r"(shared_at(tile))
                 : "memory");
}

/* Describes an array (samples, rows, columns) or, if `samples` is 0, a matrix (rows, columns). The functions
 * above copy `height` rows of a sample and TILE_WIDTH columns at a time. Rows after a sample's last row are
 * zeros when loaded, and are not stored. `columns` is a multiple of 8. */
template <class T>
static enum status describe_samples(const T *array, uint32_t samples, uint32_t rows, uint32_t columns,
                                    uint32_t height, CUtensorMap *map)
{
    const cuuint64_t sizes[3] = {columns, rows, samples},
                     apart[2] = {columns * sizeof(T), (cuuint64_t)rows * columns * sizeof(T)};
    const cuuint32_t part[3] = {TILE_WIDTH, height, 1}, steps[3] = {1, 1, 1};
    const CUtensorMapDataType type = std::is_same<T, __nv_bfloat16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    void *encode = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                              &found));
#else
    CUDA_TRY(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found));
#endif
    const CUresult result = !encode
                                ? CUDA_ERROR_NOT_FOUND
                                : reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
                                      map, type, samples > 0 ? 3 : 2, const_cast<T *>(array), sizes, apart,
                                      part, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS
               ? STATUS_OK
               : status_set(
                     STATUS_FAILED,
                     "vit: the driver cannot describe a matrix of %u x %u values (CUresult %d); update "
                     "the driver",
                     rows, columns, (int)result);
}

/* Describes a matrix (rows, columns), of which map_load() and map_store() copy `height` rows and TILE_WIDTH
 * columns at a time. `columns` is a multiple of 8. */
template <class T>
static enum status describe_tiles(const T *matrix, uint32_t rows, uint32_t columns, uint32_t height,
                                  CUtensorMap *map)
{
    return describe_samples<T>(matrix, 0, rows, columns, height, map);
}

struct early_launch {
    dim3 grid;
    uint32_t threads, bytes; /* threads per block; shared memory per block */
    uint32_t cluster;        /* blocks per cluster, along x */
};

/* The number of multiprocessors of the current device. */
static inline enum status processors_of(uint32_t *processors)
{
    int device, count;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    *processors = (uint32_t)count;
    return STATUS_OK;
}

/* How many blocks of a row of a grid fit beside `spared` multiprocessors. Nothing is spared on a part of a
 * GPU of which that would leave less than a third. */
static inline uint32_t blocks_beside(uint32_t processors, uint32_t spared, uint32_t rows)
{
    const uint32_t fit = (2 * processors > 3 * spared ? processors - spared : processors) / rows;
    return fit > 0 ? fit : 1;
}

/* Launches a kernel that calls wait_for_previous(), and reads only parameters before this. They are complete:
 * between their update and the first such kernel of a pass, there is a plain launch, which gathers samples or
 * normalises. If the stream has waited for another one, a captured kernel waits for the kernels of both. CUDA
 * before 12.3 does not capture such launches in graphs; the kernel then starts when the one before it has
 * ended. */
template <class... Parameters, class... Arguments>
static enum status launch_early(void (*kernel)(Parameters...), const struct early_launch *launch,
                                cudaStream_t stream, Arguments... arguments)
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    int driver;
    CUDA_TRY(cudaDriverGetVersion(&driver));
    if (CUDART_VERSION >= 12030 && driver >= 12030) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch->cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {launch->cluster, 1, 1};
    }
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->bytes));
    config.gridDim = launch->grid;
    config.blockDim = launch->threads;
    config.dynamicSmemBytes = launch->bytes;
    config.stream = stream;
    config.attrs = attributes;
    return CUDA_STATUS(cudaLaunchKernelEx(&config, kernel, arguments...));
}

/* Sets `*is` to whether the current device has compute capability 9.0. */
static inline enum status on_hopper(bool *is)
{
    int device, major, minor;
    CUDA_TRY(cudaGetDevice(&device));
    CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    *is = major == 9 && minor == 0;
    return STATUS_OK;
}

#endif
