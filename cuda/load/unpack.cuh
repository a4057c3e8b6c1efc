/* Unpacks samples on the device. One launch per chunk finds the samples through a table and converts each
 * sample into its slot of a tensor. The kernel also stores the samples' labels and hashes their original
 * bytes. */
#ifndef FDSL_CUDA_LOAD_UNPACK_CUH
#define FDSL_CUDA_LOAD_UNPACK_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "core/status.h"
#include "data/members.h"
#include "data/checksum.h"
#include "load/arrays.h"
#include "load/convert.h"

/* Position of a sample in the chunk, and its slot. */
struct unpack_entry {
    uint64_t at; /* offset of the sample's first byte in the chunk */
    uint32_t sample, slot;
};

/* Arguments of the kernel. All pointers are device pointers. */
struct unpack {
    const uint8_t *bytes; /* the chunk, or the whole data set (gpu-resident) */
    uint32_t count;       /* number of samples to unpack */

    /* The samples to unpack are listed in `entries` or, if that is NULL, in `order`, an array of `count`
     * sample numbers. The samples of `order` go to consecutive slots, beginning with `slot`; their offsets in
     * `samples` are relative to the pointer `bytes`. */
    const struct unpack_entry *entries;
    const uint32_t *order;
    uint32_t slot;

    const struct array_sample *samples; /* all samples of the data set, by sample number */
    struct convert convert;
    uint64_t values; /* number of values per sample */

    uint8_t *tensor;
    uint64_t stride;           /* bytes per slot, a multiple of UNPACK_ALIGNMENT */
    int32_t *labels;           /* per slot; LABEL_NONE if the sample has no label */
    uint64_t *hashes;          /* per slot: hash of the sample */
    bool whole;                /* hash every byte, not only the edges (data/checksum.h) */
    struct checksum *checksum; /* the kernel adds the samples' hashes and sizes to this */
};

#define UNPACK_ALIGNMENT 32

/* Launches the kernel on the stream; launches nothing if `count` is 0. STATUS_USAGE if the samples exceed the
 * kernel's limits; STATUS_FAILED on CUDA errors. */
enum status unpack_launch(const struct unpack *unpack, cudaStream_t stream);

/* Launches a kernel that stores only labels, hashes and the checksum, and leaves the tensor as it is. */
enum status unpack_checksums_launch(const struct unpack *unpack, cudaStream_t stream);

#endif
