/* fdsl-bench compare A.csv B.csv: finds the rows of B that are slower or faster than the matching rows of
 * A. */
#ifndef FDSL_RUN_COMPARE_H
#define FDSL_RUN_COMPARE_H

#include "core/status.h"

/* Compares two files and prints the result; argv[0] is the word "compare". STATUS_WRONG if a row of B is
 * slower or has wrong results (--strict: in more cases); STATUS_FAILED if a file cannot be read or no rows
 * match; STATUS_USAGE for wrong options, or files whose rows cannot be compared. */
enum status compare_run(int argc, char *argv[]);

#endif
