/* The CIFAR-10 binary format: each record has one label byte and one RGB image of 32 x 32 pixels. */
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

/* Returns the label of record `number`. */
static inline uint8_t cifar_label(const struct cifar *cifar, uint64_t number)
{
    return cifar->records[number * CIFAR_RECORD_BYTES];
}

/* Returns the image of record `number`: all red values, row by row, then all green and all blue values. */
static inline const uint8_t *cifar_image(const struct cifar *cifar, uint64_t number)
{
    return cifar->records + number * CIFAR_RECORD_BYTES + 1;
}

FDSL_C_BEGIN

/* Parses a file in memory; `cifar->records` points into `bytes`. STATUS_FAILED if the file does not consist
 * of whole records with labels 0 to 9. CIFAR-100 fails, because its records have two labels. */
enum status cifar_parse(const uint8_t *bytes, size_t size, struct cifar *cifar);

FDSL_C_END

#endif
