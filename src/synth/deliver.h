/* Checks and writes the output files of a batch (--png, --sheet, --npy, --write-classes). */
#ifndef FDSL_SYNTH_DELIVER_H
#define FDSL_SYNTH_DELIVER_H

#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"
#include "synth/input.h"

/* Paths from the command line; NULL if the option was not given. */
struct deliver_files {
    const char *write_classes, *png, *sheet, *npy;
};

/* Checks that each file can be written, and that no two options write the same index.tsv or labels file.
 * Otherwise STATUS_USAGE or STATUS_UNAVAILABLE gives the reason. `given` contains all options, including
 * the output options of other parts of the program. */
enum status deliver_check(const struct options *given, const struct deliver_files *files);

/* Writes the pictures and arrays of run 0, which must be the latest run of `state`. If several variants write
 * files, `name` is the variant's name, and becomes part of the paths. Otherwise `name` is NULL. */
enum status deliver_write(const struct synth *synth, const struct deliver_files *files, const char *name,
                          const struct variant *variant, void *state);

#endif
