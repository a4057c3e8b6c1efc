/* Shared by the suites that train on the command line. Include after shell.h. */
#ifndef FDSL_TESTS_TRAIN_CLI_H
#define FDSL_TESTS_TRAIN_CLI_H

#include <string.h>

#include "shell.h"

/* Options of a training run that takes milliseconds. */
#define SMALL "--variant train-naive --model logreg --train-size 200 --test-size 50 --batch 16 "

/* Runs training with these options. Expects this exit status and one line that contains `words`. If `options`
 * begins with a comma, it continues the list of variants. */
static inline void expect_refusal(int wanted, const char *options, const char *words)
{
    const char *variant = strncmp(options, "--variant ", 10) == 0 ? "" : "--variant train-naive";
    run("timeout 60 $P %s%s%s", variant, *options == ',' ? "" : " ", options);
    expect_line(wanted, words);
}

#endif
