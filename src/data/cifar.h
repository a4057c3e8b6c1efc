/* CIFAR-10 in its binary form: records of a label and a picture of 32 x 32 pixels, channel by channel. */
#ifndef FDSL_DATA_CIFAR_H
#define FDSL_DATA_CIFAR_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define CIFAR_SIDE         32
#define CIFAR_CHANNELS     3
#define CIFAR_IMAGE_BYTES  (CIFAR_CHANNELS * CIFAR_SIDE * CIFAR_SIDE)
#define CIFAR_RECORD_BYTES (1 + CIFAR_IMAGE_BYTES)
#define CIFAR_CLASSES      10

struct cifar {
    uint64_t count;
    const uint8_t *records; /* CIFAR_RECORD_BYTES each */
};

static inline uint8_t cifar_label(const struct cifar *cifar, uint64_t number)
{
    return cifar->records[number * CIFAR_RECORD_BYTES];
}

/* The picture: all red values, row by row, then green, then blue. */
static inline const uint8_t *cifar_image(const struct cifar *cifar, uint64_t number)
{
    return cifar->records + number * CIFAR_RECORD_BYTES + 1;
}

FDSL_C_BEGIN

/* Reads one file in memory; `cifar->records` points into it. STATUS_FAILED where it is not whole records with
 * labels 0 to 9: CIFAR-100 has two labels a record, and is refused so. */
enum status cifar_parse(const uint8_t *bytes, size_t size, struct cifar *cifar);

FDSL_C_END

#endif
