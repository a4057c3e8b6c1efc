/* --rank-device: which rank uses which GPU, or the CPU. */
#ifndef FDSL_RUN_RANK_DEVICE_H
#define FDSL_RUN_RANK_DEVICE_H

#include <stdint.h>

#include "core/status.h"

enum {
    RANK_DEVICE_AUTO = -1, /* the list does not name the rank */
    RANK_DEVICE_CPU = -2
};

/* Parses a list such as "0:cuda:0,1:cpu" for a run on `ranks` ranks. Sets `*device` to the CUDA device of
 * rank `rank`, or to one of the values above. A NULL list names no rank. STATUS_USAGE with the reason if the
 * list is malformed, names a rank twice, or names a rank that does not exist. A pure function. */
enum status rank_device_find(const char *list, uint64_t ranks, uint64_t rank, int *device);

#endif
