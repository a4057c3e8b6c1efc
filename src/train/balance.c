#include "train/balance.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/parallel.h"
#include "core/portable.h"

#define WEIGHT_MAX 1e6

static const char *const names[] = {"equal", "measured", "memory", "fixed"}; /* indexed by enum balance */

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
    uint32_t count;
    for (uint32_t i = 0; i < ranks; i++)
        weights[i] = 1;
    for (size_t i = 0; i < BALANCE_FIXED; i++)
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

/* ---- Shares in a checkpoint ---- */

char *balance_text(enum balance balance, const uint32_t *shares, uint32_t ranks)
{
    char *text;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    if (!stream)
        return NULL;
    fputs(names[balance], stream);
    for (uint32_t i = 0; i < ranks; i++)
        fprintf(stream, "%c%" PRIu32, i == 0 ? ' ' : ':', shares[i]);
    if (fclose(stream) == 0)
        return text;
    free(text);
    return NULL;
}

bool balance_read(const char *text, enum balance balance, uint32_t ranks, uint32_t batch, uint32_t *shares)
{
    size_t length = strlen(names[balance]);
    uint64_t sum = 0;
    if (strncmp(text, names[balance], length) != 0)
        return false;
    text += length;
    for (uint32_t i = 0; i < ranks; i++) {
        char number[32];
        uint64_t share;
        int digits = *text ? (int)strcspn(text + 1, ":") : 0;
        snprintf(number, sizeof number, "%.*s", digits, text + 1);
        if (*text != (i == 0 ? ' ' : ':') ||
            parse_count(names[balance], number, 0, batch, &share) != STATUS_OK)
            return false;
        text += 1 + digits;
        shares[i] = (uint32_t)share;
        sum += share;
    }
    return !*text && sum == batch;
}
