/* For --store imagefolder: chooses the class folder and the image file of each sample. */
#ifndef FDSL_DATA_CLASS_FOLDERS_H
#define FDSL_DATA_CLASS_FOLDERS_H

#include <stdint.h>

#include "core/status.h"
#include "data/source.h"

/* The classes of the samples of a source. The caller frees `labels`, even after a failure. */
struct class_folders {
    uint32_t *labels; /* class of each sample */
    uint64_t count;   /* number of classes; each has at least one sample */
};

/* Reads the labels of the first `samples` samples. STATUS_USAGE if the source has no labels, or if a class
 * below the largest has no sample. ImageFolder refuses an empty class folder; without the folder, it would
 * give all larger classes other numbers. Before anything is written, also checks that the first sample has an
 * image. */
enum status class_folders_read(const struct source *source, void *state, uint64_t samples,
                               struct class_folders *folders);

/* Reduces sample `number` to its image, and sets its class folder. STATUS_FAILED if the sample has no image
 * of a format that ImageFolder reads. */
enum status class_folders_keep(const struct class_folders *folders, uint64_t number,
                               struct source_sample *sample);

#endif
