#include "train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"
#include "core/parallel.h"
#include "core/portable.h"

#define WEIGHT_MAX 1e6

/* ---- The option ---- */

/* Parses the numbers of "3:1" into `weights`, which has room for `ranks`. Sets `*count` to the number of
 * weights in the text, even if it exceeds `ranks`. */
static enum status parse_weights(const char *text, uint32_t ranks, double *weights, uint32_t *count)
{
    double sum = 0;
    *count = 0;
    for (const char *at = text; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        char number[32];
        uint64_t weight;
        snprintf(number, sizeof number, "%.*s", (int)strcspn(at, ":"), at);
        if (parse_count("--balance", number, 0, WEIGHT_MAX, &weight) != STATUS_OK)
            return status_set(STATUS_USAGE,
                              "--balance: '%.80s' is not equal, measured, memory or a list of whole "
                              "numbers from 0 to %.0f, such as 3:1",
                              text, WEIGHT_MAX);
        if (*count < ranks)
            weights[*count] = (double)weight;
        sum += (double)weight;
        ++*count;
    }
    return sum > 0 ? STATUS_OK
                   : status_set(STATUS_USAGE,
                                "--balance %.80s leaves no samples to any rank; give at least "
                                "one rank a number above 0",
                                text);
}

enum status balance_parse(const char *text, uint32_t ranks, enum balance *balance, double *weights)
{
    static const char *const names[] = {"equal", "measured", "memory"}; /* indexed by enum balance */
    uint32_t count;
    for (uint32_t i = 0; i < ranks; i++)
        weights[i] = 1;
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *balance = (enum balance)i;
            return STATUS_OK;
        }
    *balance = BALANCE_FIXED;
    TRY(parse_weights(text, ranks, weights, &count));
    return count == ranks ? STATUS_OK
                          : status_set(STATUS_USAGE,
                                       "--balance %.80s has %" PRIu32 " number%s, but there %s %" PRIu32
                                       " rank%s; give one number per rank",
                                       text, count, count == 1 ? "" : "s", ranks == 1 ? "is" : "are", ranks,
                                       ranks == 1 ? "" : "s");
}

/* ---- Shares by speed ---- */

/* Returns the time of the slowest rank. */
static double step_s(const double *speeds, uint32_t ranks, const uint32_t *shares)
{
    double longest_s = 0;
    for (uint32_t i = 0; i < ranks; i++)
        if (shares[i] > 0)
            longest_s = fmax(longest_s, shares[i] / speeds[i]);
    return longest_s;
}

double balance_gain(const double *speeds, uint32_t ranks, const uint32_t *now, const uint32_t *next)
{
    return 1 - step_s(speeds, ranks, next) / step_s(speeds, ranks, now);
}

double balance_improve(const double *speeds, uint32_t ranks, double gain_min, const uint32_t *now,
                       uint32_t *next)
{
    uint32_t batch = 0;
    bool known = true;
    for (uint32_t i = 0; i < ranks; i++) {
        batch += now[i];
        known &= isfinite(speeds[i]) && speeds[i] > 0;
    }
    if (known) {
        partition_divide(speeds, ranks, batch, 1, next);
        double gain = balance_gain(speeds, ranks, now, next);
        if (gain > gain_min)
            return gain;
    }
    memcpy(next, now, ranks * sizeof *next);
    return 0;
}

bool balance_continues(const struct checkpoint *checkpoint, enum balance balance, uint32_t ranks,
                       uint32_t batch)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < checkpoint->share_count; i++)
        sum += checkpoint->shares[i];
    return checkpoint->balance == balance && checkpoint->share_count == ranks && sum == batch;
}
