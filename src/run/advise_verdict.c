/* The verdict of `advise`, computed from measurements. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/text.h"
#include "run/advise_parts.h"

#define NEVER \
    0.005 /* if a step waits for a smaller share of the time, the verdict says that it never waits */

double advise_needed(const struct advice_question *question)
{
    return (double)question->batch / question->step_s;
}

void advise_compute(const struct advice_question *question, struct advice *advice)
{
    double share = advice->images_per_s / advise_needed(question);
    advice->stall_share = share < 1 ? 1 - share : 0;
    advice->reached_per_s = advise_needed(question) * (1 - advice->stall_share);
}

static double bytes_of(const struct advice *advice)
{
    return (isnan(advice->disk_bytes) ? 0 : advice->disk_bytes) +
           (isnan(advice->memory_bytes) ? 0 : advice->memory_bytes);
}

/* Returns whether advise_best() prefers `a` to `b` if both are equally fast. */
static bool is_cheaper(const struct advice *a, const struct advice *b)
{
    if (fabs(bytes_of(a) - bytes_of(b)) > ADVISE_SMALL_BYTES)
        return bytes_of(a) < bytes_of(b);
    if (!isnan(a->joules_per_image) && !isnan(b->joules_per_image))
        return a->joules_per_image < b->joules_per_image;
    return a->reached_per_s > b->reached_per_s;
}

static bool is_equal(const struct advice *advice, double most)
{
    return advice->measured && advice->reached_per_s >= (1 - ADVISE_MARGIN) * most;
}

size_t advise_best(const struct advice *advice, size_t count)
{
    double most = 0;
    size_t best = count;
    for (size_t i = 0; i < count; i++)
        if (advice[i].measured && advice[i].reached_per_s > most)
            most = advice[i].reached_per_s;
    for (size_t i = 0; i < count; i++)
        if (is_equal(&advice[i], most) && (best == count || is_cheaper(&advice[i], &advice[best])))
            best = i;
    return best;
}

/* Returns the fastest measured way other than `best`, or `count` if there is none. */
static size_t next_best(const struct advice *advice, size_t count, size_t best)
{
    size_t next = count;
    for (size_t i = 0; i < count; i++)
        if (i != best && advice[i].measured &&
            (next == count || advice[i].reached_per_s > advice[next].reached_per_s))
            next = i;
    return next;
}

/* ---- Sentences ---- */

/* Appends a number with three significant digits, without an exponent: 61,300 or 12.5. */
static void append_number(char *text, size_t size, double value)
{
    char digits[32];
    double unit = pow(10, floor(log10(value)) - 2);
    if (value < 1000) {
        text_append(text, size, "%.3g", value);
        return;
    }
    snprintf(digits, sizeof digits, "%.0f", round(value / unit) * unit);
    for (size_t i = 0, length = strlen(digits); i < length; i++)
        text_append(text, size, "%s%c", i > 0 && (length - i) % 3 == 0 ? "," : "", digits[i]);
}

static void append_time(char *text, size_t size, double time_s)
{
    if (time_s < 120)
        text_append(text, size, "%.3g s", time_s);
    else if (time_s < 7200)
        text_append(text, size, "%.3g min", time_s / 60);
    else {
        append_number(text, size, time_s / 3600);
        text_append(text, size, " h");
    }
}

static void append_bytes(char *text, size_t size, double bytes, const char *what)
{
    if (isnan(bytes))
        text_append(text, size, "an unknown amount of %s", what);
    else if (bytes == 0)
        text_append(text, size, "no %s", what);
    else
        text_append(text, size, "%.3g GB of %s", 1e-9 * bytes, what);
}

static void append_wait(char *text, size_t size, const struct advice *advice)
{
    if (advice->stall_share < NEVER)
        text_append(text, size, "never waits");
    else
        text_append(text, size, "waits %.0f %% of the time", 100 * advice->stall_share);
}

static void append_choice(char *text, size_t size, const struct advice_question *question,
                          const struct advice *chosen)
{
    double needed = advise_needed(question), awake = needed * (1 - chosen->stall_share);
    text_append(text, size, "Best here: %s (%s), for images of %u x %u pixels. It delivers ", chosen->name,
                chosen->variant, question->res, question->res);
    append_number(text, size, chosen->images_per_s);
    text_append(text, size, " images/s, a step of %.4g ms on %llu images consumes ", 1e3 * question->step_s,
                (unsigned long long)question->batch);
    append_number(text, size, needed);
    text_append(text, size, ", and so the step ");
    append_wait(text, size, chosen);
    if (chosen->reached_per_s < (1 - ADVISE_MARGIN) * awake)
        text_append(text, size, ", but runs at %.0f %% of its speed", 100 * chosen->reached_per_s / awake);
    text_append(text, size, ".");
}

/* Returns whether at least one way that reads the set was measured. */
static bool was_read(const struct advice *advice, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (advice[i].measured && advice[i].reads)
            return true;
    return false;
}

/* Says why `chosen` is better than `next`, which is equally fast. */
static void append_reason(char *text, size_t size, const struct advice *chosen, const struct advice *next)
{
    text_append(text, size, " %c%s (%s) is as fast within %.0f %%", next->name[0] - 'a' + 'A', next->name + 1,
                next->variant, 100 * ADVISE_MARGIN);
    if (bytes_of(next) > bytes_of(chosen) + ADVISE_SMALL_BYTES) {
        text_append(text, size, ", but takes %.3g GB of disk and memory instead of %.3g GB",
                    1e-9 * bytes_of(next), 1e-9 * bytes_of(chosen));
    } else if (next->joules_per_image > chosen->joules_per_image)
        text_append(text, size, ", but takes %.3g times the energy",
                    next->joules_per_image / chosen->joules_per_image);
    text_append(text, size, ".");
}

static void append_costs(char *text, size_t size, const struct advice *chosen)
{
    text_append(text, size, " A million images take ");
    append_time(text, size, 1e6 / chosen->reached_per_s);
    text_append(text, size, ", ");
    append_bytes(text, size, chosen->disk_bytes, "disk");
    text_append(text, size, ", ");
    append_bytes(text, size, chosen->memory_bytes, "memory");
    if (isnan(chosen->joules_per_image))
        text_append(text, size, " and an unknown amount of energy.");
    else
        text_append(text, size, " and %.3g kJ of the GPU's energy.", 1e3 * chosen->joules_per_image);
}

void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    size_t best, char *text, size_t size)
{
    *text = '\0';
    if (best == count)
        return;
    const struct advice *chosen = &advice[best];
    size_t next = next_best(advice, count, best);
    append_choice(text, size, question, chosen);
    if (next < count && is_equal(&advice[next], chosen->reached_per_s))
        append_reason(text, size, chosen, &advice[next]);
    else if (next < count) {
        text_append(text, size, " With %s (%s), which is next, the step ", advice[next].name,
                    advice[next].variant);
        append_wait(text, size, &advice[next]);
        text_append(text, size, ".");
    }
    append_costs(text, size, chosen);
    if (!was_read(advice, count))
        text_append(text, size, " Reading the set could not be measured; the reasons are in the table.");
}
