#include "common/cub.cuh"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

cudaError_t list_flagged(void *scratch, size_t *scratch_bytes, uint8_t *flags, uint32_t *numbers,
                         uint64_t *listed, int64_t count, cudaStream_t stream)
{
    return cub::DeviceSelect::Flagged(scratch, *scratch_bytes, thrust::counting_iterator<uint32_t>(0), flags,
                                      numbers, listed, count, stream);
}

cudaError_t sort_pairs(void *scratch, size_t *scratch_bytes, const uint64_t *keys, uint64_t *sorted_keys,
                       const uint32_t *values, uint32_t *sorted_values, int64_t count, int bits,
                       cudaStream_t stream)
{
    return cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, keys, sorted_keys, values, sorted_values,
                                           count, 0, bits, stream);
}
