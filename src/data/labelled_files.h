/* Files of labelled images: IDX, the format of MNIST and similar data sets, plain or gzipped, and the binary
 * formats of CIFAR-10 and CIFAR-100. */
#ifndef FDSL_DATA_LABELLED_FILES_H
#define FDSL_DATA_LABELLED_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* ---- IDX ---- */

#define IDX_AXES_MAX   4
#define IDX_HEADER_MAX (4 + 4 * IDX_AXES_MAX) /* bytes */

/* A parsed file. Values are bytes. The length of axis 0 is the number of images or labels. */
struct idx {
    uint32_t axes;
    uint32_t shape[IDX_AXES_MAX];
    const uint8_t *values; /* in C order; their number is the product of the axis lengths in `shape` */
    uint8_t *owned;        /* buffer that idx_free() frees; NULL after idx_parse() */
};

FDSL_C_BEGIN

/* Checks that one file has images, and the other one label for each image. STATUS_FAILED with the name of a
 * file otherwise. */
enum status idx_check_pair(const char *images_name, const struct idx *images, const char *labels_name,
                           const struct idx *labels);

/* Parses a file in memory: magic 00 00 08 AXES, big-endian lengths, values. `idx->values` points into
 * `bytes`. STATUS_FAILED for any other content, value types other than bytes, or a size that does not
 * match. */
enum status idx_parse(const uint8_t *bytes, size_t size, struct idx *idx);

/* Parses a file in memory that may be gzipped. Takes ownership of `bytes` (from malloc). Stops unpacking when
 * there is more data than the IDX header specifies. `idx->owned` holds the values. The caller frees `idx`,
 * even after a failure. STATUS_FAILED for invalid content, STATUS_USAGE or STATUS_EXHAUSTED for lack of
 * memory, STATUS_UNAVAILABLE for gzip in a build without zlib. */
enum status idx_take(uint8_t *bytes, size_t size, struct idx *idx);

/* Reads a file, plain or gzipped (one or more gzip members), with the same errors as idx_take(). The caller
 * frees `idx`, even after a failure. Messages begin with the path. */
enum status idx_read(const char *path, struct idx *idx);
void idx_free(struct idx *idx);

/* ---- CIFAR-10 and CIFAR-100 ----
 * Each record has its labels, one byte each, and one RGB image of 32 x 32 pixels. CIFAR-100 has a coarse and
 * a fine label. */

#define CIFAR_SIDE        32
#define CIFAR_CHANNELS    3
#define CIFAR_IMAGE_BYTES (CIFAR_CHANNELS * CIFAR_SIDE * CIFAR_SIDE)
#define CIFAR_LABELS_MAX  2

/* Which labels are read. */
enum cifar_kind { CIFAR_10, CIFAR_100_FINE, CIFAR_100_COARSE };

struct cifar_layout {
    const char *name;
    uint32_t labels;                    /* per record */
    uint32_t own;                       /* the label that is read */
    uint32_t classes[CIFAR_LABELS_MAX]; /* of each label */
};
extern const char *const cifar_label_names[]; /* values of --labels-of, from CIFAR_100_FINE on */
#define CIFAR_LABELS_HELP \
    "which labels of CIFAR-100 are the classes: the 100 fine or the 20 coarse ones. WHICH is one of"

struct cifar {
    const struct cifar_layout *layout;
    uint64_t count;
    const uint8_t *records;
};

static inline uint32_t cifar_record_bytes(const struct cifar_layout *layout)
{
    return layout->labels + CIFAR_IMAGE_BYTES;
}

/* Returns the label of record `number`. */
static inline uint8_t cifar_label(const struct cifar *cifar, uint64_t number)
{
    return cifar->records[number * cifar_record_bytes(cifar->layout) + cifar->layout->own];
}

/* Returns the image of record `number`: all red values, row by row, then all green and all blue values. */
static inline const uint8_t *cifar_image(const struct cifar *cifar, uint64_t number)
{
    return cifar->records + number * cifar_record_bytes(cifar->layout) + cifar->layout->labels;
}

/* Parses a file in memory; `cifar->records` points into `bytes`. STATUS_FAILED if the file does not consist
 * of whole records whose labels are classes. */
enum status cifar_parse(enum cifar_kind kind, const uint8_t *bytes, size_t size, struct cifar *cifar);

FDSL_C_END

#endif
