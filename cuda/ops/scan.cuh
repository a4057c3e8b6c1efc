/* The count of kept rows before a tile. */
#ifndef FDSL_CUDA_OPS_SCAN_CUH
#define FDSL_CUDA_OPS_SCAN_CUH

#include <stdint.h>

#include "ops/barrier.cuh"
#include "ops/row.cuh"

/* Tiles of consecutive rows are numbered in order. When the rows of a tile have been examined, a warp
 * publishes how many of them are kept. One warp of the grid, the scanner, adds up these counts in order, and
 * publishes for each tile the number of kept rows before it. Both arrays have 1 + the value; 0 means that it
 * is not known yet. */

#define SCAN_TILES 16 /* tiles per lane and step */
#define SCAN_STEP  (SCAN_TILES * WARP_LANES)

/* Reads the counts of SCAN_TILES tiles. Returns how many of them, from the first one on, are known. */
static __device__ __forceinline__ uint32_t scan_read(const uint32_t *counts, uint32_t (&known)[SCAN_TILES])
{
    uint32_t ready = 0;
    bool all = true;
#pragma unroll
    for (int i = 0; i < SCAN_TILES; i += 4) {
        uint4 four = words_poll(counts + i);
        known[i] = four.x, known[i + 1] = four.y, known[i + 2] = four.z, known[i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < SCAN_TILES; i++) {
        all = all && known[i];
        ready += all;
    }
    return ready;
}

/* Returns the sum of `value` over the lanes before this one. */
static __device__ __forceinline__ uint32_t sum_before(uint32_t value)
{
    uint32_t lane = threadIdx.x % WARP_LANES, sum = value;
#pragma unroll
    for (uint32_t distance = 1; distance < WARP_LANES; distance *= 2) {
        uint32_t other = __shfl_up_sync(ALL_LANES, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    return sum - value;
}

/* The scanner. `counts` and `before` are aligned to 16 bytes; `counts` ends with at least SCAN_STEP zeros.
 * `*listed` is the number of kept rows before the first tile; the scanner sets it to that after the last one.
 */
static __device__ __noinline__ void scan(const uint32_t *counts, uint32_t *before, uint32_t tiles,
                                         uint64_t *listed)
{
    uint32_t lane = threadIdx.x % WARP_LANES, sum = (uint32_t)*listed;
    for (uint32_t first = 0;;) {
        uint32_t at = first + lane * SCAN_TILES, known[SCAN_TILES];
        uint32_t ready = scan_read(counts + at, known);
        uint32_t partial = __ballot_sync(ALL_LANES, ready < SCAN_TILES);
        uint32_t last = partial ? __ffs((int)partial) - 1 : WARP_LANES; /* lanes after this one must wait */
        uint32_t mine = 0;
        ready = lane <= last ? ready : 0;
#pragma unroll
        for (uint32_t i = 0; i < SCAN_TILES; i++)
            mine += i < ready ? known[i] - 1 : 0;
        uint32_t running = sum + sum_before(mine);
#pragma unroll
        for (uint32_t i = 0; i < SCAN_TILES; i++)
            if (i < ready) {
                word_publish(before + at + i, running);
                running += known[i] - 1;
            }
        uint32_t after = __shfl_sync(ALL_LANES, running, last < WARP_LANES ? last : WARP_LANES - 1);
        uint32_t done =
            first + last * SCAN_TILES + (last < WARP_LANES ? __shfl_sync(ALL_LANES, ready, last) : 0);
        if (done >= tiles) {
            if (lane == 0)
                *listed = after;
            return;
        }
        /* The next step begins with the tiles of lane `last`, and reads their counts again. */
        sum = last < WARP_LANES ? __shfl_sync(ALL_LANES, running - mine, last) : after;
        first += last * SCAN_TILES;
    }
}

#endif
