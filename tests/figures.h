/* Shared by the suites of figures: runs scripts/figures/draw.py and scripts/figures/report.py on a folder of
 * results.
 *
 * The rows in tests/data/figures are invented for these tests; they are not measurements. */
#ifndef FDSL_TESTS_FIGURES_H
#define FDSL_TESTS_FIGURES_H

#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "command.h"

#define FIXTURES  "tests/data/figures"
#define REFERENCE "results/reference"

#define FIGURES   "scripts/figures/draw.py --work $D/work --out $D/out --results $D/results "
/* Writes the data of the figures and prints the gnuplot commands, but draws nothing. */
#define SELECT FIGURES "--commands "
#define REPORT "scripts/figures/report.py --work $D/work --out $D/report.html --results $D/results "

/* A shell command that changes a row of the fixture into a row of omp for all ranks, and prints it. `ranks`
 * is the number of ranks; `threads` and `batch` are sums over all ranks. The rate is always 1000 images per
 * second. */
#define ON_CPU(ranks, threads, batch, scaling)                                               \
    "grep ',weak,.*,0.991,' " FIXTURES                                                       \
    "/sweep_scaling.csv | sed 's/,fused,Made-up Accelerator X1,[^,]*,[^,]*,2,/,omp,Made-up " \
    "9000,,," ranks ",/; s/,all,2,weak,1,2048,/,all," threads "," scaling ",," batch         \
    ",/; s/,991000,/,1000,/; s/,1,2048,/,,2048,/'; "

static char folder[] = "/tmp/fdsl-figures-XXXXXX"; /* temporary folder of the current test; $D in commands */

/* The functions for .init and .fini of a suite. */
static inline void open_folder(void)
{
    if (shell("python3 -c '' && gnuplot --version") != 0)
        cr_skip_test("python3 or gnuplot is not installed");
    cr_assert_not_null(mkdtemp(folder));
    setenv("D", folder, 1);
    shell("mkdir $D/results $D/reference && cp " REFERENCE "/published_*.csv $D/reference");
}

static inline void remove_folder(void)
{
    if (!strstr(folder, "XXXXXX"))
        shell("rm -rf '%s'", folder);
}

#endif
