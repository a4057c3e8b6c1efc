#include "data/label.h"

#include <inttypes.h>

enum status label_read(const uint8_t *text, uint64_t size, uint32_t classes, int32_t *label)
{
    if (size <= LABEL_BYTES_MAX && label_parse(text, size, label) && *label >= 0 &&
        (uint32_t)*label < classes)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "its label is not a class from 0 to %" PRIu32, classes - 1);
}
