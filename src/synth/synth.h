/* The workload `synth` apart from its variants, which see only input.h: the output files of a batch
 * (deliver.c) and the verification (oracle.c). */
#ifndef FDSL_SYNTH_SYNTH_H
#define FDSL_SYNTH_SYNTH_H

#include <limits.h>
#include <stdbool.h>

#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"
#include "data/image_formats.h"
#include "synth/input.h"

/* ---- Output files (--png, --sheet, --npy, --write-classes) ---- */

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

/* ---- The oracle ---- */

/* It computes images by their definition (atom.h) and compares the images of a variant with them. */

/* Computes the noise of shape `slot` of an image as a variant with `traits` draws it. `noise` receives 2 *
 * vertices * orbits floats: (x, y) for each vertex of orbit 0, then of orbit 1, and so on. Rounds to half
 * precision if the variant does. Not for SYNTH_NOISE_XORWOW, which cannot be replayed. */
void oracle_noise(const struct synth *synth, const struct synth_traits *traits, struct synth_image image,
                  uint32_t slot, float *noise);

/* The picture that the oracle draws: res * res grays and, unless `mask` is NULL, class numbers. */
struct oracle_picture {
    uint8_t *pixels, *mask;
};

/* Draws shape `slot` of the image for this noise, over the earlier shapes; shape 0 clears the picture first.
 * Later orbits paint over earlier ones. `points` is scratch space for the vertices of the class. */
void oracle_draw(const struct synth *synth, struct synth_image image, uint32_t slot, const float *noise,
                 struct atom_point *points, const struct oracle_picture *picture);

/* Returns whether a racy variant, which paints the orbits of its only shape in any order, can produce
 * `pixels` from this noise. Each pixel must have the gray of an orbit that covers it, or that of the
 * background if no orbit covers it. `marks` is scratch space of res * res bytes, and `points` is scratch
 * space for the vertices of the class. */
bool oracle_member(const struct synth *synth, struct synth_image image, const float *noise,
                   struct atom_point *points, uint8_t *marks, const uint8_t *pixels);

/* Implements verify() of the workload `synth`; `input` is a struct synth. Counts the images of the variant's
 * latest run whose pixels, mask or label differ from the reference for run number `run`. Checks every image.
 * Also tests noise that cannot be replayed on the host: it must have the reference's distribution
 * (Kolmogorov-Smirnov test), and no two of its streams may begin with equal draws. If either test fails, all
 * images count as wrong and a warning gives the reason. */
enum status oracle_verify(const void *input, const struct variant *variant, void *state, uint64_t run,
                          uint64_t *wrong);

#endif
