#include "data/cifar.h"

#include <inttypes.h>

enum status cifar_parse(const uint8_t *bytes, size_t size, struct cifar *cifar)
{
    *cifar = (struct cifar){size / CIFAR_RECORD_BYTES, bytes};
    if (size == 0 || size % CIFAR_RECORD_BYTES != 0)
        return status_set(STATUS_FAILED,
                          "not a binary CIFAR-10 file: its size, %zu bytes, is not a positive multiple of "
                          "%d, the record size",
                          size, CIFAR_RECORD_BYTES);
    for (uint64_t i = 0; i < cifar->count; i++)
        if (cifar_label(cifar, i) >= CIFAR_CLASSES)
            return status_set(STATUS_FAILED, "not a binary CIFAR-10 file: record %" PRIu64 " has label %u", i,
                              cifar_label(cifar, i));
    return STATUS_OK;
}
