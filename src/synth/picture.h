/* Writes images as PNG files or as a contact sheet, with an index. */
#ifndef FDSL_SYNTH_PICTURE_H
#define FDSL_SYNTH_PICTURE_H

#include <stdint.h>

#include "core/status.h"

/* One image to write, with the values of its line in index.tsv. */
struct picture {
    const uint8_t *pixels; /* side * side gray bytes, row-major; not owned */
    uint32_t side;
    uint32_t class_id;
    uint64_t instance, seed;
};

/* Returns STATUS_OK if this build can write PNG, else STATUS_UNAVAILABLE. */
enum status picture_available(void);

/* Checks that files can be written into `folder` ("" is the current one), or that the folder can be created.
 * Does not leave any new file or folder. STATUS_USAGE gives the reason. */
enum status picture_check_folder(const char *folder);

/* Writes width * height gray bytes, row-major, as an 8-bit PNG file, atomically. */
enum status picture_write_png(const char *path, const uint8_t *pixels, uint32_t width, uint32_t height);

/* Writes every picture into `folder` as class-C_instance-I.png, with zero-padded numbers, and index.tsv with
 * the columns file, class, instance, seed. Creates the folder if needed. Uses all threads if OpenMP is
 * available. Shows progress on a terminal. */
enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count);

/* Writes a contact sheet: the pictures, row by row, in a nearly square grid with a thin border. Shrinks them
 * by an integer factor (box filter) so that no side of the sheet exceeds 8192 pixels. Writes index.tsv to the
 * same folder, with the columns file, class, instance, seed, row, column. */
enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count);

#endif
