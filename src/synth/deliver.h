/* Checks and writes the output files of a batch (--png, --sheet, --npy, --write-classes). */
#ifndef FDSL_SYNTH_DELIVER_H
#define FDSL_SYNTH_DELIVER_H

#include <limits.h>

#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/image_formats.h"
#include "synth/input.h"

enum class_format { CLASSES_CSV, CLASSES_PUBLISHED };

/* Paths from the command line; NULL if the option was not given. */
struct deliver_files {
    const char *write_classes, *png, *sheet, *npy;
    int class_format; /* enum class_format: of write_classes */
};

/* Checks that each file can be written, and that no two options write the same index.tsv or labels file.
 * Otherwise STATUS_USAGE or STATUS_UNAVAILABLE gives the reason. `given` contains all options, including
 * the output options of other parts of the program. */
enum status deliver_check(const struct options *given, const struct synth *synth,
                          const struct deliver_files *files);

/* Writes the classes to files->write_classes. */
enum status deliver_classes(const struct synth *synth, const struct deliver_files *files);

/* Writes the pictures and arrays of run 0, which must be the latest run of `state`. If several variants write
 * files, `name` is the variant's name, and becomes part of the paths. Otherwise `name` is NULL. */
enum status deliver_write(const struct synth *synth, const struct deliver_files *files, const char *name,
                          const struct variant *variant, void *state);

/* ---- Pictures ---- */

/* One image to write, with the values of its line in index.tsv. */
struct picture {
    const uint8_t *pixels; /* side * side gray bytes, row-major, or RGB if `color`; not owned */
    const uint8_t *mask;   /* the same for class numbers; NULL if the image has no mask */
    uint32_t side;
    uint32_t class_id;
    uint64_t instance, seed;
    bool color;
    const char *classes; /* the numbers of the classes that it shows, as "3,17"; NULL: one class */
};

/* Returns STATUS_OK if this build can write PNG, else STATUS_UNAVAILABLE. */
enum status picture_available(void);

/* Checks that files can be written into `folder` ("" is the current one), or that the folder can be created.
 * Does not leave any new file or folder. STATUS_USAGE gives the reason. */
enum status picture_check_folder(const char *folder);

/* Writes pixels, row by row, as an 8-bit PNG file, atomically. */
enum status picture_write_png(const char *path, const uint8_t *pixels, const struct png_shape *shape);

/* Writes every picture into `folder` as class-C_instance-I.png, with zero-padded numbers, its mask as
 * class-C_instance-I.mask.png, and index.tsv with the columns file, class, instance, seed, and mask if the
 * pictures have masks, or classes if they show several. Creates the folder if needed. Uses all threads if
 * OpenMP is available. Shows progress on a terminal. */
enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count);

/* Writes a contact sheet: the pictures, row by row, in a nearly square grid with a thin border. Shrinks them
 * by an integer factor (box filter) so that no side of the sheet exceeds 8192 pixels. Writes index.tsv to the
 * same folder, with the columns file, class, instance, seed, row, column, and classes if pictures show
 * several. */
enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count);

/* ---- NumPy files ---- */

/* Stores the name of the file of a target ("labels", "masks", "multihot" or "points"): "a/b.labels.npy" for
 * "a/b.npy"; other names get ".labels.npy" appended. STATUS_USAGE if the name is too long. */
enum status npy_target_path(const char *path, const char *target, char target_path[PATH_MAX]);

#endif
