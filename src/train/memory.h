/* The memory of a training run: limits per rank (--memory-limit). */
#ifndef FDSL_TRAIN_MEMORY_H
#define FDSL_TRAIN_MEMORY_H

#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* Parses the value of --memory-limit: one size for all ranks, such as "16G", or one per rank, such as
 * "16G,8G". Sets `limits` to the bytes of each rank. STATUS_USAGE with a remedy if a size is invalid, or if
 * there is neither one size nor one per rank. */
enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits);

FDSL_C_END

#endif
