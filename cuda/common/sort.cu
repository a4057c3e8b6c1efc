#include "common/sort.cuh"

#include <cub/device/device_radix_sort.cuh>

cudaError_t sort_pairs(void *scratch, size_t *scratch_bytes, const uint64_t *keys, uint64_t *sorted_keys,
                       const uint32_t *values, uint32_t *sorted_values, int64_t count, int bits,
                       cudaStream_t stream)
{
    return cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, keys, sorted_keys, values, sorted_values,
                                           count, 0, bits, stream);
}
