/* The verdict of `advise`, computed from measurements. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "run/advise_parts.h"

double advise_needed(const struct advice_question *question)
{
    return (double)question->batch / question->step_s;
}

double advise_reached(const struct advice_question *question, const struct advice *advice)
{
    return advise_needed(question) * (1 - advice->stall_share);
}

static double bytes_of(const struct advice *advice)
{
    return (isnan(advice->disk_bytes) ? 0 : advice->disk_bytes) +
           (isnan(advice->memory_bytes) ? 0 : advice->memory_bytes);
}

/* Whether `a` costs less than `b`. */
static bool is_cheaper(const struct advice *a, const struct advice *b)
{
    if (bytes_of(a) < bytes_of(b) || bytes_of(a) > bytes_of(b))
        return bytes_of(a) < bytes_of(b);
    return !isnan(a->joules_per_image) &&
           (isnan(b->joules_per_image) || a->joules_per_image < b->joules_per_image);
}

size_t advise_best(const struct advice_question *question, const struct advice *advice, size_t count)
{
    double most = 0;
    size_t best = count;
    for (size_t i = 0; i < count; i++)
        if (advice[i].measured && advise_reached(question, &advice[i]) > most)
            most = advise_reached(question, &advice[i]);
    for (size_t i = 0; i < count; i++)
        if (advice[i].measured && advise_reached(question, &advice[i]) >= (1 - ADVISE_MARGIN) * most &&
            (best == count || is_cheaper(&advice[i], &advice[best])))
            best = i;
    return best;
}

/* Returns the fastest of the others, or `count`. */
static size_t next_best(const struct advice_question *question, const struct advice *advice, size_t count,
                        size_t best)
{
    size_t next = count;
    for (size_t i = 0; i < count; i++)
        if (i != best && advice[i].measured &&
            (next == count || advise_reached(question, &advice[i]) > advise_reached(question, &advice[next])))
            next = i;
    return next;
}

__attribute__((format(printf, 3, 4))) static void append(char *text, size_t size, const char *format, ...)
{
    va_list arguments;
    size_t used = strlen(text);
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

static void append_wait(char *text, size_t size, const struct advice *advice)
{
    if (advice->stall_share < 0.005)
        append(text, size, "never waits");
    else
        append(text, size, "waits %.0f %% of the time", 100 * advice->stall_share);
}

void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    size_t best, char *text, size_t size)
{
    *text = '\0';
    if (best == count)
        return;
    const struct advice *chosen = &advice[best];
    size_t next = next_best(question, advice, count, best);
    append(text, size, "Best here: %s. It delivers %.3g images/s, a step consumes %.3g, and so the step ",
           chosen->name, chosen->images_per_s, advise_needed(question));
    append_wait(text, size, chosen);
    append(text, size, ".");
    if (next == count)
        return;
    bool equal =
        advise_reached(question, &advice[next]) >= (1 - ADVISE_MARGIN) * advise_reached(question, chosen);
    append(text, size, " With %s, %s the step ", advice[next].name, equal ? "as well," : "which is next,");
    append_wait(text, size, &advice[next]);
    append(text, size, equal ? "; it needs more disk or memory." : ".");
}
