/* The CIFAR-10 binary format: records of one label and one image of 32 x 32 pixels, stored channel by
 * channel. */
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

/* The image: all red values, row by row, then green, then blue. */
static inline const uint8_t *cifar_image(const struct cifar *cifar, uint64_t number)
{
    return cifar->records + number * CIFAR_RECORD_BYTES + 1;
}

FDSL_C_BEGIN

/* Parses a file in memory; `cifar->records` points into it. STATUS_FAILED if the file does not consist of
 * whole records with labels 0 to 9. This also rejects CIFAR-100, which has two labels per record. */
enum status cifar_parse(const uint8_t *bytes, size_t size, struct cifar *cifar);

FDSL_C_END

#endif
