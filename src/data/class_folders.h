/* The names of classes. For --store imagefolder: the class folder and the image file of each sample. */
#ifndef FDSL_DATA_CLASS_FOLDERS_H
#define FDSL_DATA_CLASS_FOLDERS_H

#include <stdint.h>

#include "core/status.h"
#include "data/source.h"

#define CLASSES_NAME "classes.txt" /* in a prepared set: the names of the classes, one per line */

/* The classes of the samples of a source. The caller calls class_folders_free(), even after a failure.
 * `labels` and `names` are only for --store imagefolder. */
struct class_folders {
    uint32_t *labels; /* class of each sample */
    uint64_t count;   /* number of classes; each has at least one sample */
    char **names;     /* names of the class folders, in sorted order */
    char *list;       /* content of classes.txt, or NULL */
};

/* Reads the labels of the first `samples` samples. STATUS_USAGE if the source has no labels, or if a class
 * below the largest has no sample. ImageFolder refuses an empty class folder; without the folder, it would
 * give all larger classes other numbers. Before anything is written, also checks that the first sample has an
 * image. */
enum status class_folders_read(const struct source *source, void *state, uint64_t samples,
                               struct class_folders *folders);

/* Names the class folders after the classes of the source, and formats classes.txt. The folders get numbers
 * if the source has no names, or, with a warning, if a name cannot be that of a folder or would change the
 * order. `set` is the name of the data set. Call after class_folders_read(). */
enum status class_folders_name(const struct source_facts *facts, const char *set,
                               struct class_folders *folders);
void class_folders_free(struct class_folders *folders);

/* Reduces sample `number` to its image, and sets its class folder. STATUS_FAILED if the sample has no image
 * of a format that ImageFolder reads. */
enum status class_folders_keep(const struct class_folders *folders, uint64_t number,
                               struct source_sample *sample);

#endif
