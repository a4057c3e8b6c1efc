/* Images as files: PNG, a contact sheet, and the index beside them. */
#ifndef FDSL_SYNTH_PICTURE_H
#define FDSL_SYNTH_PICTURE_H

#include <stdint.h>

#include "core/status.h"

/* One image's line in index.tsv. */
struct picture {
    const uint8_t *pixels; /* side * side, gray, row by row; not owned */
    uint32_t side;
    uint32_t class_id;
    uint64_t instance, seed;
};

/* Whether this build can write PNG: STATUS_OK or STATUS_UNAVAILABLE. */
enum status picture_available(void);

/* Checks, before any image is made, that files can be written into `folder` ("" is the current one), or that
 * it can be made: nothing is left behind. STATUS_USAGE with the reason. */
enum status picture_check_folder(const char *folder);

/* Writes one gray 8-bit PNG of width x height, atomically. */
enum status picture_write_png(const char *path, const uint8_t *pixels, uint32_t width, uint32_t height);

/* Writes every picture into `folder`, made where it does not exist, as class-C_instance-I.png (numbers
 * zero-padded to a common width), in parallel where OpenMP is there, and index.tsv with the columns file,
 * class, instance, seed. Shows progress on a terminal. */
enum status picture_write_folder(const char *folder, const struct picture *pictures, uint64_t count);

/* Writes a contact sheet: the pictures row by row in a nearly square grid with a thin border, each shrunk by
 * a whole factor (box filter) so that no side of the sheet exceeds 8192 pixels, and index.tsv beside it with
 * the columns file, class, instance, seed, row, column. */
enum status picture_write_sheet(const char *path, const struct picture *pictures, uint64_t count);

#endif
