#include "data/label.h"

#include <inttypes.h>

enum status label_check(int32_t label, uint32_t classes)
{
    if (label >= 0 && (uint32_t)label < classes)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "its label %" PRIi32 " is not a class from 0 to %" PRIu32, label,
                      classes - 1);
}
