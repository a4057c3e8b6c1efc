/* The decision between ways to get images, and the page that shows it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/stats.h"
#include "core/text.h"
#include "data/remote.h"
#include "run/advise.h"
#include "run/report.h"

#define NEVER 0.005 /* a step that waits for a smaller share of the time "never waits" */
#define CONFIDENCE \
    0.98 /* of decisions, which look at one end of an interval: each errs with 1 % probability */
#define SHOWN ADVISE_SHOWN
#define EQUAL_MOST \
    2.0 /* at the end, an open ratio counts as equal if the ends of its interval differ by less */
#define VAGUE     100.0 /* an interval whose ends differ by this factor says nothing */
#define BUSY      0.5   /* load per thread above which the details mention it */
#define WIDTH     100   /* of the lines of paragraphs */
#define TIME_MOST 20    /* an undecided verdict advises at most this multiple of the time */

/* ---- The decision ---- */

double advise_needed(const struct advice_question *question)
{
    return (double)question->batch / question->step_s;
}

void advise_add(const struct advice_question *question, struct advice *advice, double images_per_s,
                double reached_per_s, double stall_share)
{
    double needed = advise_needed(question);
    size_t known = 0;
    advice->images_per_s[advice->rounds] = images_per_s;
    advice->reached_per_s[advice->rounds++] =
        question->estimated ? fmin(images_per_s, needed) : reached_per_s;
    for (size_t i = 0; i < advice->rounds; i++)
        known += !isnan(advice->reached_per_s[i]);
    double waits = 1 - advise_reached(advice, SHOWN).value / needed;
    if (question->estimated)
        advice->stall_share = waits > 1e-9 ? waits : 0; /* without the rounding error of logarithms */
    else
        advice->stall_share = known > 1
                                  ? advice->stall_share + (stall_share - advice->stall_share) / (double)known
                                  : stall_share;
    advice->measured = true;
}

void advise_miss(struct advice *advice)
{
    advice->images_per_s[advice->rounds] = advice->reached_per_s[advice->rounds] = NAN;
    advice->rounds++;
}

struct ratio advise_mean(const double *values, size_t count, double confidence)
{
    struct side one = {0}, side = {0}; /* `one`: as many exact ones, so that the ratio is the mean */
    for (size_t i = 0; i < count; i++)
        if (!isnan(values[i])) {
            side_add(&side, values[i], NAN);
            side_add(&one, 1, NAN);
        }
    struct ratio mean = side.count ? side_ratio(&one, &side, confidence) : (struct ratio){NAN, NAN, NAN};
    if (side.count < ADVISE_ROUNDS_MIN)
        mean.low = mean.high = NAN;
    return mean;
}

/* Returns the rate of a round; NaN if it is unknown or does not count. */
static double rate_at(const struct advice *advice, size_t round)
{
    return round < advice->rounds && !advice->off[round] ? advice->reached_per_s[round] : NAN;
}

struct ratio advise_reached(const struct advice *advice, double confidence)
{
    double values[ADVISE_ROUNDS_MAX];
    for (size_t i = 0; i < advice->rounds; i++)
        values[i] = rate_at(advice, i);
    return advise_mean(values, advice->rounds, confidence);
}

#define PRIOR  4    /* degrees of freedom that the noise of all ways counts for in the ratio of two */
#define UNSEEN 0.02 /* relative: runs differ by this; the rounds of a run do not show it */

/* Adjusts the interval of a mean of `count` >= 1 logarithms of ratios with this variance. */
static void moderate(const struct advice_question *question, double variance, size_t count, double confidence,
                     struct ratio *ratio)
{
    const double prior = fmin(PRIOR, question->noise_freedom), own = (double)count - 1;
    const double pooled = (prior * 2 * question->noise + own * variance) / (prior + own);
    const double half =
        fmax(log1p(UNSEEN), stats_student(confidence, prior + own) * sqrt(pooled / (double)count));
    ratio->low = ratio->value * exp(-half);
    ratio->high = ratio->value * exp(half);
}

static struct ratio ratio_of(const struct advice_question *question, const struct advice *a,
                             const struct advice *b, double confidence)
{
    double ratios[ADVISE_ROUNDS_MAX] = {0}, sum = 0, squares = 0;
    size_t count = a->rounds < b->rounds ? a->rounds : b->rounds, known = 0;
    for (size_t i = 0; i < count; i++) {
        ratios[i] = rate_at(b, i) / rate_at(a, i);
        if (isnan(ratios[i]))
            continue;
        known++;
        sum += log(ratios[i]);
        squares += log(ratios[i]) * log(ratios[i]);
    }
    struct ratio ratio = advise_mean(ratios, count, confidence);
    if (question->noise_freedom > 0 && known >= ADVISE_ROUNDS_MIN) {
        const double mean = sum / (double)known;
        moderate(question, fmax(0, squares - sum * mean) / ((double)known - 1), known, confidence, &ratio);
    }
    return ratio;
}

struct ratio advise_ratio(const struct advice_question *question, const struct advice *a,
                          const struct advice *b)
{
    return ratio_of(question, a, b, CONFIDENCE);
}

#define NOISE_WAYS       16
#define FITS             20   /* passes in which the centres of ways and rounds converge */
#define UPPER            0.7  /* weight of positive residuals; negative ones have the rest */
#define SMALL            0.01 /* residuals below this, relative, count as equally small */
#define FAR              3.0 /* a run is off if it is further from the centres than this many standard deviations */
#define FAR_LEAST        0.08 /* and than this, relative */
#define FAR_PASSES       3    /* without the runs that are off, others may be */
#define ROUNDS_DISTURBED 6    /* common rounds of two ways that count, if some are off */

/* Residuals: the logarithms of all rates minus the centres of ways and rounds. */
struct remains {
    double of[NOISE_WAYS][ADVISE_ROUNDS_MAX]; /* NaN: not measured, or off */
    struct advice *ways_of[NOISE_WAYS];
    size_t ways, rounds;
};

/* Subtracts the mean of the known values of a way, or of a round. If `robust` is set, repetitions minimise
 * the sum of the sizes of all values instead of their squares, and positive ones count more, because other
 * processes only delay runs. */
static void centre(struct remains *remains, size_t line, bool way, bool robust)
{
    const size_t length = way ? remains->rounds : remains->ways;
    double sum = 0, weights = 0;
    for (size_t i = 0; i < length; i++) {
        const double value = way ? remains->of[line][i] : remains->of[i][line];
        const double weight = robust ? (value > 0 ? UPPER : 1 - UPPER) / (fabs(value) + SMALL) : 1;
        sum += isnan(value) ? 0 : weight * value;
        weights += isnan(value) ? 0 : weight;
    }
    for (size_t i = 0; weights > 0 && i < length; i++)
        *(way ? &remains->of[line][i] : &remains->of[i][line]) -= sum / weights;
}

/* Computes the residuals of the rates that are not off. Returns their degrees of freedom. */
static double fit(struct remains *remains, bool robust)
{
    size_t count = 0;
    for (size_t way = 0; way < remains->ways; way++)
        for (size_t round = 0; round < remains->rounds; round++)
            remains->of[way][round] = log(rate_at(remains->ways_of[way], round));
    for (int pass = 0; pass < FITS; pass++) {
        for (size_t way = 0; way < remains->ways; way++)
            centre(remains, way, true, robust);
        for (size_t round = 0; round < remains->rounds; round++)
            centre(remains, round, false, robust);
    }
    for (size_t way = 0; way < remains->ways; way++)
        for (size_t round = 0; round < remains->rounds; round++)
            count += !isnan(remains->of[way][round]);
    return (double)count - (double)(remains->ways + remains->rounds) + 1;
}

/* Estimates the standard deviation of the rates from the residuals of medians. As many residuals are 0 as
 * there are centres; a few may be far off. */
static double deviation_of(const struct remains *remains, double freedom)
{
    double sizes[NOISE_WAYS * ADVISE_ROUNDS_MAX] = {0};
    size_t count = 0;
    for (size_t way = 0; way < remains->ways; way++)
        for (size_t round = 0; round < remains->rounds; round++)
            if (!isnan(remains->of[way][round]))
                sizes[count++] = fabs(remains->of[way][round]);
    qsort(sizes, count, sizeof sizes[0], compare_reals);
    return 2.32 * sizes[count - (size_t)ceil(freedom * 2 / 3)];
}

void advise_note_noise(struct advice_question *question, struct advice *advice, size_t count)
{
    struct remains remains = {.ways = 0};
    double squares = 0;
    question->noise_freedom = 0;
    for (size_t i = 0; i < count && remains.ways < NOISE_WAYS; i++) {
        memset(advice[i].off, 0, sizeof advice[i].off);
        if (!advice[i].measured)
            continue;
        remains.ways_of[remains.ways++] = &advice[i];
        remains.rounds = advice[i].rounds > remains.rounds ? advice[i].rounds : remains.rounds;
    }
    if (!question->model || remains.ways == 0)
        return;
    for (int pass = 0; pass < FAR_PASSES && remains.ways > 2; pass++) {
        const double freedom = fit(&remains, true);
        if (freedom < 1)
            break;
        const double far = fmax(FAR_LEAST, FAR * deviation_of(&remains, freedom));
        for (size_t way = 0; way < remains.ways; way++)
            for (size_t round = 0; round < remains.rounds; round++)
                if (fabs(remains.of[way][round]) > far)
                    remains.ways_of[way]->off[round] = true;
    }
    const double freedom = fit(&remains, false);
    if (freedom < 1)
        return;
    for (size_t way = 0; way < remains.ways; way++)
        for (size_t round = 0; round < remains.rounds; round++)
            squares += isnan(remains.of[way][round]) ? 0 : remains.of[way][round] * remains.of[way][round];
    question->noise = squares / freedom;
    question->noise_freedom = freedom;
}

/* Returns whether a way takes part in the decision. */
static bool competes(const struct advice *advice)
{
    return advice->measured && advice->place != ADVISE_CONSTANT;
}

/* Returns whether a way may be the best. */
static bool remains_open(const struct advice *advice)
{
    return competes(advice) && !advice->dropped;
}

/* Returns whether `b` cannot be faster than `a`, because both deliver the same bytes. */
static bool cannot_win(const struct advice *a, const struct advice *b)
{
    return a->place == ADVISE_MEMORY && (b->place == ADVISE_DISK || b->place == ADVISE_REMOTE) &&
           strcmp(a->variant, b->variant) == 0;
}

/* Returns VERDICT_BETTER if a way is superior to way `a`, VERDICT_UNDECIDED if a way may be, otherwise
 * VERDICT_SAME. In the first two cases sets `*rival` to that way, and `*ratio` to its ratio to `a`. */
static enum verdict judge(const struct advice_question *question, const struct advice *advice, size_t count,
                          size_t a, size_t *rival, struct ratio *ratio)
{
    enum verdict verdict = VERDICT_SAME;
    for (size_t b = 0; b < count; b++) {
        if (b == a || !remains_open(&advice[b]) || cannot_win(&advice[a], &advice[b]))
            continue;
        struct ratio found = advise_ratio(question, &advice[a], &advice[b]);
        enum verdict one = ratio_judge(&found, question->margin, true);
        if (one != VERDICT_BETTER && (found.high <= 1 + question->margin ||
                                      (verdict == VERDICT_UNDECIDED && found.value < ratio->value)))
            continue;
        *rival = b;
        *ratio = found;
        if (one == VERDICT_BETTER)
            return one;
        verdict = VERDICT_UNDECIDED;
    }
    return verdict;
}

bool advise_lacks_rounds(const struct advice_question *question, const struct advice *advice, size_t count)
{
    for (size_t a = 0; question->model && a < count; a++)
        for (size_t b = 0; remains_open(&advice[a]) && b <= a; b++) {
            size_t known = 0, off = 0;
            for (size_t round = 0; round < advice[a].rounds; round++) {
                known += !isnan(rate_at(&advice[a], round) * rate_at(&advice[b], round));
                off += advice[a].off[round] || advice[b].off[round];
            }
            if (remains_open(&advice[b]) && known < (off ? ROUNDS_DISTURBED : ADVISE_ROUNDS_MIN))
                return true;
        }
    return false;
}

struct advice_decision advise_decide(const struct advice_question *question, const struct advice *advice,
                                     size_t count)
{
    struct advice_decision decision = {.best = count, .rival = count};
    for (size_t a = 0; a < count; a++) {
        if (!remains_open(&advice[a]))
            continue;
        enum verdict verdict = judge(question, advice, count, a, &decision.rival, &decision.ratio);
        decision.best = a;
        if (verdict == VERDICT_UNDECIDED && question->over &&
            decision.ratio.high < EQUAL_MOST * decision.ratio.low)
            verdict = VERDICT_SAME;
        decision.decided = verdict == VERDICT_SAME;
        if (verdict != VERDICT_BETTER)
            break;
    }
    /* Whether a way that reads was measured: one that reads the set itself, if there is any in the table. */
    bool reads = false, listed = false;
    for (size_t i = 0; i < count; i++) {
        const bool own = advice[i].place != ADVISE_GENERATED && advice[i].place != ADVISE_CONSTANT &&
                         advice[i].place != ADVISE_PREPARED;
        if (own && !listed)
            reads = false;
        listed |= own;
        reads |= competes(&advice[i]) && (own || (!listed && advice[i].place == ADVISE_PREPARED));
    }
    if (!reads) { /* nothing that was measured competes with generating */
        decision.decided = false;
        decision.rival = count;
    }
    return decision;
}

void advise_drop(const struct advice_question *question, struct advice *advice, size_t count)
{
    for (size_t a = 0; a < count; a++) {
        size_t rival;
        struct ratio ratio;
        if (competes(&advice[a]))
            advice[a].dropped |= judge(question, advice, count, a, &rival, &ratio) == VERDICT_BETTER;
    }
}

/* ---- Costs of training ---- */

/* Returns the way that gets its images from this place, or NULL if it was not measured. */
static const struct advice *find(const struct advice *advice, size_t count, enum advise_place place)
{
    for (size_t i = 0; i < count; i++)
        if (advice[i].measured && advice[i].place == place)
            return &advice[i];
    return NULL;
}

void advise_conclude(struct advice_question *question, struct advice *advice, size_t count)
{
    const struct advice *constant = find(advice, count, ADVISE_CONSTANT);
    question->over = true;
    advise_note_noise(question, advice, count);
    if (constant)
        question->step_s = (double)question->batch / advise_reached(constant, SHOWN).value;
}

struct ratio advise_on_nodes(const struct advice_question *question, const struct advice *advice)
{
    const struct ratio rate = advise_reached(advice, SHOWN), *exchange = &question->exchange_s;
    const double batch = (double)question->batch, images = batch * question->nodes;
    double least_s = batch / rate.high;
    return (struct ratio){
        .value = images / (batch / rate.value + exchange->value),
        .low = images / (batch / rate.low + exchange->high),
        .high = images / (question->overlaps ? fmax(least_s, exchange->low) : least_s + exchange->low)};
}

struct ratio advise_pays(const struct advice_question *question, const struct advice *live,
                         const struct advice *prepared)
{
    const struct ratio unknown = {NAN, NAN, NAN}, *prepare = &question->prepare_s;
    if (!live || !prepared)
        return unknown;
    const struct ratio faster = advise_ratio(question, live, prepared);
    /* Epochs, if reading takes no time at all. */
    double epochs = advise_reached(live, SHOWN).value * prepare->value;
    if (faster.high <= 1)
        return (struct ratio){INFINITY, INFINITY, INFINITY};
    if (!(faster.low > 1))
        return unknown;
    return (struct ratio){.value = epochs / (1 - 1 / faster.value),
                          .low = epochs * prepare->low / prepare->value / (1 - 1 / faster.high),
                          .high = epochs * prepare->high / prepare->value / (1 - 1 / faster.low)};
}

/* ---- Sentences ---- */

/* Appends a number with three significant digits, without an exponent: 61,300 or 12.5. */
static void append_number(char *text, size_t size, double value)
{
    char digits[32];
    double unit = pow(10, floor(log10(value)) - 2);
    if (value < 999.5) {
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

static void append_way(char *text, size_t size, const struct advice *advice)
{
    text_append(text, size, "%s (%s)", advice->name, advice->variant);
}

/* Like append_way(), at the beginning of a sentence. */
static void append_subject(char *text, size_t size, const struct advice *advice)
{
    text_append(text, size, " %c%s (%s)", advice->name[0] - 'a' + 'A', advice->name + 1, advice->variant);
}

static double reached(const struct advice *advice)
{
    return advise_reached(advice, SHOWN).value;
}

/* Appends the disk, the memory and the energy that this number of images needs. */
static void append_costs(char *text, size_t size, const struct advice *chosen, double images)
{
    append_bytes(text, size, chosen->disk_bytes, "disk");
    text_append(text, size, ", ");
    append_bytes(text, size, chosen->memory_bytes, "memory");
    if (isnan(chosen->joules_per_image))
        text_append(text, size, " and an unknown amount of energy.");
    else
        text_append(text, size, " and %.3g kJ of the GPU's energy.",
                    1e-3 * chosen->joules_per_image * images);
}

/* Like append_rates(), of a way that was measured by training. */
static void append_training(char *text, size_t size, const struct advice_question *question,
                            const struct advice *chosen)
{
    append_subject(text, size, chosen);
    text_append(text, size, " trains ");
    append_number(text, size, reached(chosen));
    text_append(text, size,
                " images/s of %u x %u pixels: %.0f %% of what steps of %.4g ms on %llu images consume "
                "without input. An epoch of %llu images takes ",
                question->res, question->res, 100 * reached(chosen) / advise_needed(question),
                1e3 * question->step_s, (unsigned long long)question->batch,
                (unsigned long long)question->samples);
    append_time(text, size, (double)question->samples / reached(chosen));
    text_append(text, size, ", ");
    append_costs(text, size, chosen, (double)question->samples);
}

static void append_rates(char *text, size_t size, const struct advice_question *question,
                         const struct advice *chosen)
{
    double needed = advise_needed(question), awake = needed * (1 - chosen->stall_share);
    append_subject(text, size, chosen);
    text_append(text, size, " delivers ");
    append_number(text, size, advise_mean(chosen->images_per_s, chosen->rounds, SHOWN).value);
    text_append(text, size, " images/s of %u x %u pixels. A step of %.4g ms on %llu images consumes ",
                question->res, question->res, 1e3 * question->step_s, (unsigned long long)question->batch);
    append_number(text, size, needed);
    text_append(text, size, " images/s, and so the step ");
    if (chosen->stall_share < NEVER)
        text_append(text, size, "never waits");
    else
        text_append(text, size, "waits %.0f %% of the time", 100 * chosen->stall_share);
    if (!question->estimated && reached(chosen) < 0.97 * awake)
        text_append(text, size, ", but runs at %.0f %% of its speed", 100 * reached(chosen) / awake);
    text_append(text, size, ". A million images take ");
    append_time(text, size, 1e6 / reached(chosen));
    text_append(text, size, ", ");
    append_costs(text, size, chosen, 1e6);
}

/* Says so if data seemed to come faster from a slower place. */
static void append_noise(char *text, size_t size, const struct advice_question *question,
                         const struct advice *advice, size_t count)
{
    for (size_t a = 0; a < count; a++)
        for (size_t b = 0; b < count; b++) {
            if (!advice[a].measured || !advice[b].measured || !cannot_win(&advice[a], &advice[b]))
                continue;
            double percent = 100 * (advise_ratio(question, &advice[a], &advice[b]).value - 1);
            if (!(percent >= 0.5))
                continue;
            append_subject(text, size, &advice[b]);
            text_append(text, size,
                        " seemed %.0f %% faster than %s. This is noise: the same bytes cannot come faster "
                        "from there.",
                        percent, advice[a].name);
        }
}

/* Names the runs that are off. */
static void append_off(char *text, size_t size, const struct advice *advice, size_t count)
{
    size_t off = 0, runs = 0;
    for (size_t i = 0; i < count; i++)
        for (size_t round = 0; advice[i].measured && round < advice[i].rounds; round++) {
            off += advice[i].off[round];
            runs++;
        }
    if (off > 0)
        text_append(text, size,
                    " %zu of %zu runs do not count, because they do not fit the others; other processes may "
                    "have delayed them.",
                    off, runs);
}

void advise_details(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size)
{
    *text = '\0';
    if (decision->best == count)
        return;
    const struct advice *chosen = &advice[decision->best];
    if (question->over)
        append_training(text, size, question, chosen);
    else
        append_rates(text, size, question, chosen);
    for (size_t i = 0; i < count; i++) {
        const struct ratio ratio = advise_ratio(question, chosen, &advice[i]);
        if (!decision->decided || i <= decision->best || !remains_open(&advice[i]) || ratio.high < 1)
            continue;
        append_subject(text, size, &advice[i]);
        if (ratio.high > 1 + question->margin) /* the measurements ended before this was known */
            text_append(text, size,
                        " is not certainly faster (%.2f to %.2f times as fast), and needs more: ", ratio.low,
                        ratio.high);
        else
            text_append(text, size, " is not slower and at most %.3g %% faster, but needs more: ",
                        100 * question->margin);
        append_bytes(text, size, advice[i].disk_bytes, "disk");
        text_append(text, size, " and ");
        append_bytes(text, size, advice[i].memory_bytes, "memory");
        text_append(text, size, ".");
    }
    append_noise(text, size, question, advice, count);
    append_off(text, size, advice, count);
    if (question->load > BUSY * question->threads)
        text_append(text, size,
                    " Before the first round, the load of the machine was %.1f on %d threads, so an idle "
                    "machine reaches higher rates.",
                    question->load, question->threads);
    if (chosen->place == ADVISE_GENERATED ||
        (!decision->decided &&
         (decision->rival == count || advice[decision->rival].place == ADVISE_GENERATED)))
        text_append(text, size,
                    " Generated images would replace the images of this set, such as photographs; only "
                    "pre-training on formulas can use generated images.");
    memmove(text, text + 1, strlen(text)); /* the first sentence begins with a blank */
}

/* Returns a time in which the intervals would probably become narrow enough: their width falls with the
 * square root of the number of rounds. */
static double time_needed(const struct advice_question *question, const struct advice_decision *decision)
{
    const struct ratio *ratio = &decision->ratio;
    double distance = fabs(log(ratio->value) - log1p(question->margin));
    double factor = isnan(ratio->high) ? 4 : 1.5 * pow(log(ratio->high / ratio->low) / 2 / distance, 2);
    double time_s = fmax(question->time_s, question->took_s) * fmin(fmax(factor, 2), TIME_MOST);
    return time_s < 10 ? ceil(time_s) : 10 * ceil(time_s / 10);
}

void advise_verdict(const struct advice_question *question, const struct advice *advice, size_t count,
                    const struct advice_decision *decision, char *text, size_t size)
{
    const struct ratio *ratio = &decision->ratio;
    *text = '\0';
    if (decision->best == count)
        return;
    const struct advice *best = &advice[decision->best];
    text_append(text, size, decision->decided ? "Best here: " : "Undecided: ");
    append_way(text, size, best);
    if (decision->decided) {
        bool certain = true;
        for (size_t i = 0; i < count; i++)
            certain &= i == decision->best || !remains_open(&advice[i]) || cannot_win(best, &advice[i]) ||
                       advise_ratio(question, best, &advice[i]).high <= 1 + question->margin;
        text_append(text, size, "; no other way is %smore than %.3g %% faster.", certain ? "" : "certainly ",
                    100 * question->margin);
        return;
    }
    if (decision->rival == count) {
        text_append(text, size,
                    " or reading the set, because reading could not be measured; see the reasons above.");
        return;
    }
    const struct advice *rival = &advice[decision->rival];
    size_t rounds = best->rounds < rival->rounds ? best->rounds : rival->rounds;
    text_append(text, size, " or ");
    append_way(text, size, rival);
    text_append(text, size, ", because %zu round%s ", rounds, rounds == 1 ? "" : "s");
    if (!(ratio->high < VAGUE * ratio->low))
        text_append(text, size, "cannot tell which is faster");
    else
        text_append(text, size, "only show that the latter is %.2g to %.2g times as fast", ratio->low,
                    ratio->high);
    text_append(text, size, "; try --time %.0f, or a less busy machine.", time_needed(question, decision));
}

/* ---- Output ---- */

/* Writes a number with three digits, or "unknown". */
static const char *cell(double value, char *text, size_t size)
{
    if (isnan(value))
        snprintf(text, size, "unknown");
    else
        snprintf(text, size, "%.3g", value);
    return text;
}

/* Writes half the width of an interval, relative to the value: "7.5%", or "-" if it is unknown or vague. */
static const char *half_cell(const struct ratio *ratio, char *text, size_t size)
{
    double half = 100 * (sqrt(ratio->high / ratio->low) - 1);
    if (!(ratio->high < VAGUE * ratio->low))
        snprintf(text, size, "-");
    else
        snprintf(text, size, "%.*f%%", half < 10 ? 1 : 0, half);
    return text;
}

static void print_caption(const char *data, const struct advice_question *question, size_t rounds)
{
    char shown[512];
    remote_shown(data, shown, sizeof shown);
    fputs("advise: data ", stdout);
    text_print(stdout, shown);
    printf(", %" PRIu64 " samples, %.3g GB", question->samples, 1e-9 * question->bytes);
    if (question->measured < question->samples)
        printf(" (measured: %" PRIu64 " sample%s, %.3g GB)", question->measured,
               question->measured == 1 ? "" : "s", 1e-9 * question->measured_bytes);
    printf("; images %" PRIu32 " x %" PRIu32 "; batch %" PRIu64 "; a step takes %.4g ms", question->res,
           question->res, question->batch, 1e3 * question->step_s);
    if (question->model)
        printf(" (%s, %s %s)", question->model, question->over ? "trained with" : "measured with",
               question->engine);
    printf("%s; %zu round%s in %.3g s\n",
           question->estimated ? " (waits are computed, because there is no GPU)" : "", rounds,
           rounds == 1 ? "" : "s", question->took_s);
}

/* Returns how a way compares with the best: "best"; "slower", if the whole interval of the ratio is below 1;
 * otherwise "equal": not slower, and at most the margin faster. Returns "open" if the verdict is undecided
 * and the way may be the best. */
static const char *standing(const struct advice_question *question, const struct advice *advice,
                            size_t number, const struct advice_decision *decision)
{
    if (advice[number].place == ADVISE_CONSTANT)
        return "limit";
    if (!decision->decided)
        return advice[number].dropped ? "slower" : "open";
    if (number == decision->best)
        return "best";
    return advice[number].dropped || advise_ratio(question, &advice[decision->best], &advice[number]).high < 1
               ? "slower"
               : "equal";
}

static void print_table(const struct advice_question *question, const struct advice *advice, size_t count,
                        const struct advice_decision *decision)
{
    char texts[8][32];
    const size_t size = sizeof texts[0];
    printf("\n%-22s %-12s %10s %6s %8s %10s %6s %8s %10s %13s %s\n", "way", "variant", "images/s", "+-95%",
           "waits/%", "used/s", "+-95%", "disk/GB", "memory/GB", "J/1000 images", "speed");
    for (size_t i = 0; i < count; i++) {
        const struct advice *row = &advice[i];
        if (!row->measured)
            continue;
        printf("%-22s %-12s ", row->name, row->variant);
        struct ratio rate = advise_mean(row->images_per_s, row->rounds, SHOWN),
                     used = advise_reached(row, SHOWN);
        printf("%10.0f %6s %8s %10.0f %6s %8s %10s %13s %s\n", rate.value, half_cell(&rate, texts[0], size),
               cell(100 * row->stall_share, texts[1], size), used.value, half_cell(&used, texts[2], size),
               cell(1e-9 * row->disk_bytes, texts[3], size), cell(1e-9 * row->memory_bytes, texts[4], size),
               cell(1e3 * row->joules_per_image, texts[5], size), standing(question, advice, i, decision));
    }
}

/* Prints the table of ways that were measured by training: what an epoch costs. */
static void print_trainings(const struct advice_question *question, const struct advice *advice, size_t count,
                            const struct advice_decision *decision)
{
    char texts[8][32];
    const size_t size = sizeof texts[0];
    const double samples = (double)question->samples;
    printf("\n%-22s %-8s %10s %6s %7s %8s %9s %9s %8s %10s %s\n", "way", "--feed", "images/s", "+-95%",
           "limit/%", "waits/%", "s/epoch", "kJ/epoch", "disk/GB", "memory/GB", "speed");
    for (size_t i = 0; i < count; i++) {
        const struct advice *row = &advice[i];
        if (!row->measured)
            continue;
        struct ratio rate = advise_reached(row, SHOWN);
        printf("%-22s %-8s %10.0f %6s %7s %8s %9s %9s %8s %10s %s\n", row->name, row->variant, rate.value,
               half_cell(&rate, texts[0], size),
               cell(100 * rate.value / advise_needed(question), texts[1], size),
               cell(100 * row->stall_share, texts[2], size), cell(samples / rate.value, texts[3], size),
               cell(1e-3 * samples * row->joules_per_image, texts[4], size),
               cell(1e-9 * row->disk_bytes, texts[5], size), cell(1e-9 * row->memory_bytes, texts[6], size),
               standing(question, advice, i, decision));
    }
}

/* Prints a paragraph about the shares of the mixture, and one about preparing a set of generated images. */
static void print_preparing(const struct advice_question *question, const struct advice *advice, size_t count)
{
    char text[2048] = "";
    const size_t size = sizeof text;
    const double samples = (double)question->samples;
    const struct advice *mixed = find(advice, count, ADVISE_MIXED);
    if (mixed) {
        text_append(
            text, size,
            "Generated and read: --mix %s, the largest share of read samples with which steps do not wait.",
            mixed->mix);
        text_print_wrapped(stdout, text, 0, WIDTH);
        *text = '\0';
    }
    if (isnan(question->prepare_s.value)) {
        text_append(text, size, "Preparing a set of generated images: not measured (%s).",
                    question->prepare_reason.text);
    } else {
        const struct advice *live = find(advice, count, ADVISE_GENERATED),
                            *prepared = find(advice, count, ADVISE_PREPARED);
        struct ratio pays = advise_pays(question, live, prepared);
        text_append(text, size, "Preparing a set of %llu generated images once (--prepare) takes ",
                    (unsigned long long)question->samples);
        append_time(text, size, samples * question->prepare_s.value);
        text_append(text, size, " (%.3g to %.3g s) and %.3g GB of disk; its energy is not measured.",
                    samples * question->prepare_s.low, samples * question->prepare_s.high,
                    1e-9 * samples * question->prepare_bytes);
        if (isinf(pays.value))
            text_append(text, size, " It never pays: reading it is not faster than generating.");
        else if (!isnan(pays.value))
            text_append(
                text, size,
                " It takes less time than generating in each epoch from %.0f epochs on (%.0f to %.0f).",
                ceil(pays.value), ceil(pays.low), ceil(pays.high));
        else if (live && prepared)
            text_append(text, size,
                        " Whether it pays is open: reading it and generating are equally fast within their "
                        "intervals.");
        else
            text_append(text, size,
                        " Whether it pays is unknown, because one of both ways was not measured.");
    }
    text_print_wrapped(stdout, text, 0, WIDTH);
}

/* Prints the rates of several machines. */
static void print_nodes(const struct advice_question *question, const struct advice *advice, size_t count)
{
    char text[1024] = "";
    const size_t size = sizeof text;
    if (question->nodes < 2)
        return;
    putchar('\n');
    if (isnan(question->exchange_s.value)) {
        text_append(text, size, "%u nodes: not extrapolated (%s)", question->nodes,
                    question->exchange_reason.text);
        text_print_wrapped(stdout, text, 0, WIDTH);
        return;
    }
    text_append(text, size,
                "%u nodes, each with %llu images per step: an all-reduce of %.3g MB of gradients takes %.3g "
                "ms (%.3g to %.3g), extrapolated from one between %u ranks. ",
                question->nodes, (unsigned long long)question->batch, 1e-6 * question->gradient_bytes,
                1e3 * question->exchange_s.value, 1e3 * question->exchange_s.low,
                1e3 * question->exchange_s.high, question->exchange_ranks);
    text_append(text, size,
                question->overlaps ? "The highest rate is reached if the backward pass hides it entirely."
                                   : "It is added to each step, because this engine does not overlap them.");
    text_append(text, size,
                " Each node reads as fast as this one; a URL that all nodes share may be slower.");
    text_print_wrapped(stdout, text, 0, WIDTH);
    printf("\n%-22s %-8s %10s %10s %10s\n", "way", "--feed", "images/s", "lowest", "highest");
    for (size_t i = 0; i < count; i++) {
        struct ratio rate = advise_on_nodes(question, &advice[i]);
        char low[32] = "-", high[32] = "-"; /* too few rounds */
        if (!advice[i].measured)
            continue;
        if (!isnan(rate.low)) {
            snprintf(low, sizeof low, "%.0f", rate.low);
            snprintf(high, sizeof high, "%.0f", rate.high);
        }
        printf("%-22s %-8s %10.0f %10s %10s\n", advice[i].name, advice[i].variant, rate.value, low, high);
    }
}

/* Returns the first way that was not measured for the same reason as way number `i`. */
static size_t first_missing(const struct advice *advice, size_t i)
{
    size_t first = 0;
    while (advice[first].measured || !failure_same(&advice[first].reason, &advice[i].reason))
        first++;
    return first;
}

/* Prints the ways that were not measured, one paragraph per reason. */
static void print_missing(const struct advice *advice, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char text[4096], reason[2048];
        if (advice[i].measured || first_missing(advice, i) != i)
            continue;
        snprintf(text, sizeof text, "Not measured (%s)",
                 text_printable(advice[i].reason.text, reason, sizeof reason));
        for (size_t other = i; other < count; other++)
            if (!advice[other].measured && first_missing(advice, other) == i) {
                text_append(text, sizeof text, other == i ? ": " : ", ");
                append_way(text, sizeof text, &advice[other]);
            }
        putchar('\n');
        text_print_wrapped(stdout, text, 0, WIDTH);
    }
}

static void add_interval(struct row *row, const char *name, struct ratio rate)
{
    static const char *const ends[] = {"", "_low", "_high"};
    const double parts[] = {rate.value, rate.low, rate.high};
    for (size_t i = 0; i < 3; i++) {
        char column[64];
        snprintf(column, sizeof column, "%s%s", name, ends[i]);
        row_real(row, column, parts[i]);
    }
}

/* Adds the columns of a way that was measured by training. */
static void add_training(struct row *row, const struct advice_question *question, const struct advice *way,
                         const struct advice *constant)
{
    const struct ratio unknown = {NAN, NAN, NAN};
    const struct ratio rate = advise_reached(way, SHOWN);
    const double samples = (double)question->samples;
    add_interval(row, "limit_share",
                 constant && way->measured ? ratio_of(question, constant, way, SHOWN) : unknown);
    add_interval(row, "epoch_s",
                 (struct ratio){samples / rate.value, samples / rate.high, samples / rate.low});
    row_real(row, "epoch_joules", samples * way->joules_per_image);
    row_text(row, "mix", way->mix);
    row_text(row, "command", way->command);
    if (question->nodes > 1)
        add_interval(row, "nodes_per_s", way->measured ? advise_on_nodes(question, way) : unknown);
}

/* Adds what was measured beside the ways. */
static void add_network(struct row *about, const struct advice_question *question,
                        const struct advice *advice, size_t count)
{
    struct ratio pays =
        advise_pays(question, find(advice, count, ADVISE_GENERATED), find(advice, count, ADVISE_PREPARED));
    row_count(about, "epoch_images", question->samples);
    add_interval(about, "prepare_s_per_image", question->prepare_s);
    row_real(about, "prepare_bytes_per_image", question->prepare_bytes);
    row_text(about, "prepare_reason", question->prepare_reason.text);
    row_text(about, "prepare_pays", isinf(pays.value) ? "no" : isnan(pays.value) ? "unknown" : "yes");
    if (isinf(pays.value))
        pays = (struct ratio){NAN, NAN, NAN};
    add_interval(about, "prepare_pays_from_epoch", pays);
    row_count(about, "nodes", question->nodes);
    row_real(about, "gradient_bytes", question->gradient_bytes);
    row_count(about, "exchange_ranks", question->exchange_ranks);
    add_interval(about, "exchange_s", question->exchange_s);
    row_text(about, "exchange_reason", question->exchange_reason.text);
}

static enum status print_rows(int format, const struct advice_question *question, const char *verdict,
                              const struct advice *advice, size_t count,
                              const struct advice_decision *decision)
{
    struct row_printer printer;
    rows_begin(&printer, format);
    for (size_t i = 0; i < count; i++) {
        CLOSED_BY(row_free) struct row row = {0};
        row_text(&row, "way", advice[i].name);
        row_text(&row, "variant", advice[i].variant);
        row_count(&row, "best", decision->decided && i == decision->best);
        add_interval(&row, "images_per_s", advise_mean(advice[i].images_per_s, advice[i].rounds, SHOWN));
        row_real(&row, "stall_share", advice[i].stall_share);
        add_interval(&row, "reached_per_s", advise_reached(&advice[i], SHOWN));
        row_count(&row, "rounds", advice[i].rounds);
        row_real(&row, "disk_bytes", advice[i].disk_bytes);
        row_real(&row, "memory_bytes", advice[i].memory_bytes);
        row_real(&row, "joules_per_image", advice[i].joules_per_image);
        if (question->over)
            add_training(&row, question, &advice[i], find(advice, count, ADVISE_CONSTANT));
        row_text(&row, "speed", advice[i].measured ? standing(question, advice, i, decision) : "");
        row_text(&row, "reason", advice[i].measured ? "" : advice[i].reason.text);
        rows_add(&printer, &row);
    }
    CLOSED_BY(row_free) struct row about = {0};
    row_text(&about, "verdict", verdict);
    row_count(&about, "decided", decision->decided);
    row_count(&about, "batch", question->batch);
    row_real(&about, "step_s", question->step_s);
    row_count(&about, "res", question->res);
    row_real(&about, "time_s", question->took_s);
    row_text(&about, "model", question->model);
    row_text(&about, "engine", question->engine);
    row_text(&about, "command", decision->decided ? advice[decision->best].command : NULL);
    if (question->over)
        add_network(&about, question, advice, count);
    return rows_end(&printer, "advice", &about);
}

enum status advise_print(const char *data, int format, const struct advice_question *question,
                         const struct advice *advice, size_t count)
{
    char verdict[1024], details[4096];
    size_t rounds = 0;
    for (size_t i = 0; i < count; i++)
        rounds = advice[i].rounds > rounds ? advice[i].rounds : rounds;
    struct advice_decision decision = advise_decide(question, advice, count);
    advise_verdict(question, advice, count, &decision, verdict, sizeof verdict);
    advise_details(question, advice, count, &decision, details, sizeof details);
    if (format != FORMAT_TABLE)
        TRY(print_rows(format, question, verdict, advice, count, &decision));
    else {
        print_caption(data, question, rounds);
        if (decision.best < count && question->over)
            print_trainings(question, advice, count, &decision);
        else if (decision.best < count)
            print_table(question, advice, count, &decision);
        print_missing(advice, count);
    }
    if (decision.best == count)
        return status_set(STATUS_FAILED, "nothing could be measured; the reasons are above");
    if (format == FORMAT_TABLE) {
        putchar('\n');
        if (question->over) {
            print_preparing(question, advice, count);
            print_nodes(question, advice, count);
            putchar('\n');
        }
        text_print_wrapped(stdout, details, 0, WIDTH);
        const char *command = decision.decided ? advice[decision.best].command : NULL;
        if (command) {
            fputs("\nTo train on these images:\n    ", stdout);
            text_print(stdout, command);
            putchar('\n');
        }
        printf("\n%s\n", verdict);
    }
    return format_flush();
}
