/* --balance: how the ranks divide the samples of a step. A rank's share is its number of samples per step.
 * docs/distributed.md describes the option. All functions are pure; train/trainer_balance.c uses them. */
#ifndef FDSL_TRAIN_BALANCE_H
#define FDSL_TRAIN_BALANCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

enum balance {
    BALANCE_EQUAL,
    BALANCE_MEASURED, /* shares in proportion to the speeds, measured in each epoch */
    BALANCE_MEMORY,   /* shares in proportion to the free memory */
    BALANCE_FIXED,    /* shares in proportion to the numbers in the value of --balance */
};

/* --balance measured changes the shares only if it expects to save more than this part of a step's time. */
#define BALANCE_GAIN_MIN 0.02

/* Parses the value of --balance: "equal", "measured", "memory", or one number per rank, such as "3:1". Sets
 * `weights` to these numbers; without numbers, sets all weights to 1. Returns STATUS_USAGE if the value is
 * invalid; the message says what to give instead. */
enum status balance_parse(const char *text, uint32_t ranks, enum balance *balance, double *weights);

/* Returns the part of a step's time that the shares `next` would save, compared with `now`. A step takes as
 * long as its slowest rank. `speeds` are in samples per second, and more than 0 for ranks with a share. */
double balance_gain(const double *speeds, uint32_t ranks, const uint32_t *now, const uint32_t *next);

/* Sets `next` to shares in proportion to `speeds`, at least 1 per rank, with the same sum as `now`, which is
 * at least the number of ranks. If these shares would not save more than `gain_min` of a step's time, sets
 * `next` to `now`. Returns the part that `next` saves: 0 or more than `gain_min`. If a speed is not finite
 * and positive, nothing is known about the rank, so `next` becomes `now`. */
double balance_improve(const double *speeds, uint32_t ranks, double gain_min, const uint32_t *now,
                       uint32_t *next);

/* Formats shares as "measured 18:6", which balance_read() reads. The caller frees the text; NULL if memory
 * runs out. */
char *balance_text(enum balance balance, const uint32_t *shares, uint32_t ranks);

/* Reads what balance_text() wrote. Returns false, and leaves `shares` undefined, if the text was written with
 * another value of --balance or another number of ranks, or if its samples per step are not `batch`. */
bool balance_read(const char *text, enum balance balance, uint32_t ranks, uint32_t batch, uint32_t *shares);

#endif
