/* fdsl-bench verify-published DIR --preset SET: compares a downloaded or self-made copy of a published data
 * set with the images that this program draws. */
#ifndef FDSL_RUN_VERIFY_PUBLISHED_H
#define FDSL_RUN_VERIFY_PUBLISHED_H

#include "core/status.h"
#include "synth/formula.h"

/* Compares and prints the counts; argv[0] is the word "verify-published". Files have the names of the
 * published script; any subset of them may exist. STATUS_USAGE for wrong options, or if the folder has no
 * file of the set; STATUS_WRONG if a file differs, cannot be read, or is not in the set. */
enum status verify_published_run(int argc, char *argv[]);

/* Does the same for any set of a formula, without options. `folder` exists; threads >= 1. `points`: images of
 * a fractal set show points, not patches. */
enum status verify_published(const char *folder, const struct formula *formula,
                             const struct published_set *set, bool points, int threads);

#endif
