/* Shared by the kernels for compute capability 9.0 (attention_hopper.cu, hidden_hopper.cu): tiles in the
 * format of wgmma.cuh. Sums (64, N) of a warpgroup are an array of N / 2 values per lane; values 4 * n to 4 *
 * n + 3 are the fragment of columns 8 * n to 8 * n + 7. */
#ifndef FDSL_CUDA_TRAIN_VIT_HOPPER_CUH
#define FDSL_CUDA_TRAIN_VIT_HOPPER_CUH

#include "common/check.cuh"
#include "train/mma.cuh"
#include "train/vit/fragments.cuh"
#include "train/wgmma.cuh"

#define HEIGHT 64               /* rows that a warpgroup multiplies at a time */
#define PARTS  (TILE_WIDTH / 8) /* parts of a row: 16 bytes each */

typedef __nv_bfloat16 tile_row[TILE_WIDTH];

/* Returns the address of values 8 * part to 8 * part + 7 of a row. */
static __device__ __forceinline__ __nv_bfloat16 *part_at(tile_row *tile, uint32_t row, uint32_t part)
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
static __device__ __forceinline__ void copy_rows16(tile_row *tile, uint32_t first, uint32_t count,
                                                   const __nv_bfloat16 *from, size_t apart)
{
#pragma unroll
    for (uint32_t i = threadIdx.x % 32; i < 16 * PARTS; i += 32) {
        const uint32_t row = first + i / PARTS, part = i % PARTS;
        const bool inside = row < count;
        copy_async16(part_at(tile, row, part), from + (inside ? row : 0) * apart + 8 * part, inside);
    }
}

/* Copies 16 rows of a tile to global memory, from row `first` on, but without rows from `count` on. */
static __device__ __forceinline__ void write_rows16(tile_row *tile, uint32_t first, uint32_t count,
                                                    __nv_bfloat16 *to, size_t apart)
{
#pragma unroll
    for (uint32_t i = threadIdx.x % 32; i < 16 * PARTS; i += 32) {
        const uint32_t row = first + i / PARTS, part = i % PARTS;
        if (row < count)
            *reinterpret_cast<uint4 *>(to + row * apart + 8 * part) =
                *reinterpret_cast<const uint4 *>(part_at(tile, row, part));
    }
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
