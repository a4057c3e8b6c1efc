/* fdsl-bench advise --data DIR --compute MS: measures several ways to get images, a few seconds each, and
 * names the best one. The ways are to generate images, to keep the data set in GPU memory, and to read it
 * from memory, from disk or from a URL. */
#ifndef FDSL_RUN_ADVISE_H
#define FDSL_RUN_ADVISE_H

#include "core/status.h"

/* Measures and prints the advice; argv[0] is the word "advise". Each measurement is a run of this program in
 * a child process; if a run reports an error, the other ways are still measured. STATUS_USAGE for wrong
 * options or if there is no such data set; STATUS_UNAVAILABLE if an option needs a GPU that does not exist;
 * STATUS_FAILED if no way could be measured, or if a signal ended a run. */
enum status advise_run(int argc, char *argv[]);

#endif
