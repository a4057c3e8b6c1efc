/* fdsl-bench advise --data DIR --compute MS: measures shortly whether it is best to generate images, to keep
 * the data set in GPU memory, or to read it from memory, from disk or from a URL. */
#ifndef FDSL_RUN_ADVISE_H
#define FDSL_RUN_ADVISE_H

#include "core/status.h"

/* Measures and prints the advice; argv[0] is the word "advise". Each measurement is a run of this program in
 * a child process, so a failed one ends only itself. STATUS_USAGE for wrong options or data that cannot be
 * opened; STATUS_FAILED if no way could be measured. */
enum status advise_run(int argc, char *argv[]);

#endif
