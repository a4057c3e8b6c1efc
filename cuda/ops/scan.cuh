/* Computes the number of kept rows before a tile. */
#ifndef FDSL_CUDA_OPS_SCAN_CUH
#define FDSL_CUDA_OPS_SCAN_CUH

#include <stdint.h>

#include "ops/barrier.cuh"
#include "ops/row.cuh"

/* Tiles of consecutive rows are numbered in order. When the rows of a tile have been examined, a warp
 * publishes how many of them are kept. One warp per block reads these counts in order and adds them up. It
 * reads a window of SCAN_TILES tiles at a time. Each lane reads SCAN_LANE_TILES of them. */

#define SCAN_LANE_TILES 16
#define SCAN_TILES      (SCAN_LANE_TILES * WARP_LANES)
#define NOT_KNOWN       0xFFFFFFFFu

struct scan {
    uint32_t first, sum; /* the window's first tile, a multiple of SCAN_LANE_TILES; kept rows before it */
    uint32_t known;      /* number of tiles with known counts before the first unknown count of the window */
    uint32_t words[SCAN_LANE_TILES / 4]; /* the lane's counts, one byte each: 1 + count, 0 if not known */
    uint32_t before;                     /* kept rows before the lane's tiles, if they are known */
};

/* Returns the number of kept rows of the first `tiles` tiles of a lane, whose counts are known. */
static __device__ __forceinline__ uint32_t scan_sum(const uint32_t (&words)[SCAN_LANE_TILES / 4],
                                                    uint32_t tiles)
{
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++) {
        uint32_t bytes = min(max(tiles, 4 * i) - 4 * i, 4u);
        uint32_t mask = bytes == 4 ? 0xFFFFFFFFu : (1u << 8 * bytes) - 1;
        sum = __dp4a(words[i] & mask, 0x01010101u, sum);
    }
    return sum - tiles;
}

/* Returns the number of a lane's counts before its first unknown count. */
static __device__ __forceinline__ uint32_t scan_known(const uint32_t (&words)[SCAN_LANE_TILES / 4])
{
    uint32_t known = 0;
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++) {
        /* Marks bytes that are 0. Only the lowest set bit is exact. */
        uint32_t zeros = (words[i] - 0x01010101u) & ~words[i] & 0x80808080u;
        if (known == 4 * i)
            known += zeros ? (__ffs((int)zeros) - 1) / 8 : 4;
    }
    return known;
}

/* Reads the counts of the window. `counts` is aligned to 16 bytes and ends with SCAN_TILES zeros. */
static __device__ __forceinline__ void scan_read(struct scan &scan, const uint8_t *counts)
{
    uint32_t lane = threadIdx.x % WARP_LANES;
    words_poll(counts + scan.first + lane * SCAN_LANE_TILES, scan.words);
    uint32_t known = scan_known(scan.words), sum = scan_sum(scan.words, known), total = sum;
    uint32_t partial = __ballot_sync(ALL_LANES, known < SCAN_LANE_TILES);
    uint32_t last = partial ? __ffs((int)partial) - 1 : WARP_LANES; /* the first lane with an unknown count */
    scan.known = last * SCAN_LANE_TILES + (partial ? __shfl_sync(ALL_LANES, known, last % WARP_LANES) : 0);
#pragma unroll
    for (uint32_t distance = 1; distance < WARP_LANES; distance *= 2) {
        uint32_t other = __shfl_up_sync(ALL_LANES, total, distance);
        total += lane >= distance ? other : 0;
    }
    scan.before = scan.sum + total - sum;
}

/* Returns the number of kept rows before `tile`. Lanes may pass different tiles. Returns NOT_KNOWN if the
 * number is not known yet, or if the tile is not in the window. */
static __device__ __forceinline__ uint32_t scan_before(const struct scan &scan, uint32_t tile)
{
    uint32_t offset = tile - scan.first, lane = offset / SCAN_LANE_TILES % WARP_LANES;
    uint32_t words[SCAN_LANE_TILES / 4], before = __shfl_sync(ALL_LANES, scan.before, lane);
#pragma unroll
    for (uint32_t i = 0; i < SCAN_LANE_TILES / 4; i++)
        words[i] = __shfl_sync(ALL_LANES, scan.words[i], lane);
    bool known = offset < SCAN_TILES && offset <= scan.known;
    return known ? before + scan_sum(words, offset % SCAN_LANE_TILES) : NOT_KNOWN;
}

/* Moves the window forward. The new window begins at or before `tile`; all counts before it are known. */
static __device__ __forceinline__ void scan_move(struct scan &scan, uint32_t tile)
{
    uint32_t lanes = min(min(tile - scan.first, scan.known) / SCAN_LANE_TILES, WARP_LANES - 1u);
    scan.sum = __shfl_sync(ALL_LANES, scan.before, lanes);
    scan.first += lanes * SCAN_LANE_TILES;
}

#endif
