/* Samples out of the bytes that arrived: one kernel a chunk finds them by a table, converts them into the
 * slots of a batch tensor, reads their labels, and checksums the bytes as they came. */
#ifndef FDSL_CUDA_LOAD_UNPACK_CUH
#define FDSL_CUDA_LOAD_UNPACK_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "data/label.h"
#include "data/checksum.h"
#include "load/arrays.h"
#include "load/convert.h"

/* Where a sample is, and where it belongs. */
struct unpack_entry {
    uint64_t at; /* of its first byte in the chunk */
    uint32_t sample, slot;
};

/* A job of the kernel. All pointers are the device's. */
struct unpack {
    const uint8_t *bytes; /* the chunk */
    uint32_t count;       /* samples in it */

    /* Either a table, or the first of `count` samples in an order, whose offsets count from `bytes`, for
     * slots in a row from `slot` on. */
    const struct unpack_entry *entries;
    const uint32_t *order;
    uint32_t slot;

    const struct array_sample *samples; /* of the set */
    struct convert convert;
    uint64_t values; /* of a sample */

    uint8_t *tensor;
    uint64_t stride;           /* of a slot in bytes, a multiple of UNPACK_ALIGNMENT */
    int32_t *labels;           /* by slot; LABEL_NONE where a sample has none */
    uint64_t *hashes;          /* by slot: the sample's hash, as it is tallied */
    bool whole;                /* over every byte, not over the edges */
    struct checksum *checksum; /* added to */
};

#define UNPACK_ALIGNMENT 32

/* Launches it on the stream. STATUS_FAILED where CUDA fails. */
enum status unpack_launch(const struct unpack *unpack, cudaStream_t stream);

#endif
