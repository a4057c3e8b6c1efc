/* The files that a user asked for of a batch: whether they can be written, found out before anything is made,
 * and their writing. */
#ifndef FDSL_SYNTH_DELIVER_H
#define FDSL_SYNTH_DELIVER_H

#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* Paths as given; NULL where nobody asked. */
struct deliver_files {
    const char *write_classes, *png, *sheet, *npy;
};

/* STATUS_USAGE or STATUS_UNAVAILABLE with the reason where one of them cannot be written, or two would be
 * one. `given`: all options, for the names of those that write files. */
enum status deliver_check(const struct options *given, const struct deliver_files *files);

/* Writes pictures and arrays of run 0 of the variant, which `state` holds; `name` is in their paths where it
 * is not NULL. */
enum status deliver_write(const struct synth *synth, const struct deliver_files *files, const char *name,
                          const struct variant *variant, void *state);

#endif
