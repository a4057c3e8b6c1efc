/* A mixture of streams: each step takes a fixed number of samples from each of several sources. Which source
 * fills which sample of a step, and with which of its samples, is a pure function of the weights, the seed,
 * the epoch and the step. It depends neither on ranks and threads nor on timing.
 *
 * One source with a finite number of samples is named: an epoch has each of its samples exactly once, and
 * ends with the last one. With weight w of total W, its samples are at the positions p of the epoch at which
 * floor(p w / W) increases. The other sources share the remaining positions, which are counted over all
 * epochs: their samples go on where the previous epoch ended. The shares follow Tijdeman's rule for the
 * chairman assignment problem (Discrete Mathematics 32, 1980): after any number of positions, each source has
 * received its share up to less than one sample. A finite source begins another pass when all its samples
 * were delivered; a source without end never repeats a sample.
 *
 * The positions of a step are rotated by a number drawn from the seed, the epoch and the step. Any rank's
 * consecutive part of a step has therefore nearly the same shares as the whole step. */
#ifndef FDSL_DATA_MIXTURE_H
#define FDSL_DATA_MIXTURE_H

#include "core/stream.h"
#include "data/random_draws.h"

#define MIXTURE_SOURCES 16        /* maximum number of sources */
#define MIXTURE_PHASES  16        /* maximum number of different sets of weights */
#define MIXTURE_PERIOD  (1 << 20) /* maximum sum of the weights, after division by their common divisor */
#define MIXTURE_NAME    32        /* room for the name of a source */
#define MIXTURE_UNITS   10000     /* of a user's weight of 1 in struct mixture_weights */
#define MIXTURE_MOST    1000      /* maximum of a user's weight */

/* A source. `samples` is 0 if it has no end; otherwise each pass has the order draw_lanes() with `lanes` and
 * `shuffle`, or without `lanes` draw_order(), or without both the order of the numbers. */
struct mixture_source {
    char name[MIXTURE_NAME];
    uint32_t samples, lanes, shuffle;
    uint32_t label_offset; /* is added to the labels of its samples */
};

/* Weights that hold from a step on, which is counted over all epochs. */
struct mixture_weights {
    uint64_t step;
    uint32_t of[MIXTURE_SOURCES];
};

struct mixture_request {
    uint32_t count, named; /* number of sources; index of the named source */
    struct mixture_source sources[MIXTURE_SOURCES];
    uint32_t phase_count; /* at least 1; the first phase has step 0, and steps ascend */
    struct mixture_weights phases[MIXTURE_PHASES];
    uint64_t seed;
    uint32_t batch; /* samples of a step of all ranks */
    bool drop_last; /* an epoch leaves out the samples after its last full step */
};

/* How the other sources share positions in a phase. */
struct mixture_phase {
    uint64_t begin;                   /* the first position, counted over all epochs */
    uint64_t before[MIXTURE_SOURCES]; /* samples that each source has delivered before it */
    uint32_t weights[MIXTURE_SOURCES], period;
    uint8_t *sources; /* owned: the source of each position of a period */
    uint32_t *ranks;  /* owned: how many samples this source has had in the period before */
};

/* A zeroed struct is a closed mixture. */
struct mixture {
    struct mixture_request request;
    uint32_t weight, total; /* of the named source; of all sources */
    uint32_t positions;     /* of an epoch, also if the last ones are dropped */
    uint64_t steps, others; /* per epoch: steps; samples of the other sources that are delivered */
    uint32_t phase_count;
    struct mixture_phase phases[MIXTURE_PHASES];
};

/* A sample of the mixture. */
struct mixture_pick {
    uint32_t source;
    uint64_t index; /* how many samples the source has delivered before, over all epochs; of the named source:
                       within the epoch */
};

FDSL_C_BEGIN

/* Sets `*positions` to the number of samples of an epoch: ceil(samples * W / w) for the named source. Checks
 * the weights. STATUS_USAGE if the named source has no end or no weight, if a phase changes its share or no
 * share at all, or if an epoch would have 2^31 samples or more. Messages name the option or the field. */
enum status mixture_count(const struct mixture_request *request, uint32_t *positions);

/* Computes the tables of a mixture. The caller closes it, even after a failure. */
enum status mixture_open(const struct mixture_request *request, struct mixture *mixture);
void mixture_close(struct mixture *mixture);

/* Returns the sample at a position of an epoch: position b of step s is s * batch + b. Thread-safe. */
struct mixture_pick mixture_at(const struct mixture *mixture, uint64_t epoch, uint32_t position);

/* Returns how many numbers a finite source has, as a multiple of its samples: mixture_number(). */
uint32_t mixture_copies(const struct mixture *mixture, uint32_t source);

/* Finds numbers of a finite source. A zeroed struct is ready for use; each thread has its own. */
struct mixture_pass {
    bool known;
    uint64_t pass;
    struct draw_order order;
};

/* Returns the number of a sample of a finite source. The numbers of an epoch differ: sample n of the source
 * has the number n + c * samples in a pass with c = pass modulo mixture_copies(), and so random crops of its
 * own. The named source has c = 0. */
uint32_t mixture_number(const struct mixture *mixture, uint64_t epoch, const struct mixture_pick *pick,
                        struct mixture_pass *pass);

/* Returns a hash of everything that decides which source fills which sample, and of the labels. */
uint64_t mixture_hash(const struct mixture_request *request);

/* ---- The stream ---- */

/* The plans of the sources of a rank, made from a plan that lists positions of the mixture. */
struct mixture_plans;

/* `plan` is copied; its context must outlive the plans, and so must the mixture. */
enum status mixture_plans_open(const struct mixture *mixture, const struct stream_plan *plan,
                               struct mixture_plans **plans);
void mixture_plans_close(struct mixture_plans *plans);

/* Returns the plan of a source: for each step, the samples that the whole plan takes from it, in its order.
 * Numbers are those of mixture_number(); of a source without end, they are positions of the mixture. */
struct stream_plan mixture_plan_of(const struct mixture_plans *plans, uint32_t source);

/* Implements generated_stream_request.number for such a source. */
uint64_t mixture_sample(const void *context, uint64_t epoch, uint32_t number);

/* Returns the plan of the whole mixture. */
const struct stream_plan *mixture_plan(const struct mixture_plans *plans);

/* Lists a step: the positions, and the source of each. Both arrays have room for plan.capacity. */
uint32_t mixture_list(const struct mixture_plans *plans, struct stream_position at, uint32_t *numbers,
                      uint8_t *sources);

/* The label of a sample of a mixture whose source gave it the label `label`. */
static inline int32_t mixture_label(const struct mixture *mixture, uint32_t source, int32_t label)
{
    return label == STREAM_MASKED ? label : label + (int32_t)mixture->request.sources[source].label_offset;
}

struct mixture_stream_request {
    const struct mixture *mixture;           /* must outlive the stream */
    struct mixture_plans *plans;             /* taken over */
    struct stream *streams[MIXTURE_SOURCES]; /* taken over; one per source, in host memory, with its plan */
    size_t sample_bytes;
    size_t mask_bytes; /* 0: the samples have no masks */
    uint32_t held;     /* number of batches that the consumer holds at a time; 0: one */
    enum status (*allocate)(size_t bytes, void **memory); /* as in struct set_stream_request */
    void (*deallocate)(void *memory);
};

/* Opens the stream of a mixture in host memory. `numbers` of its batches are positions; `read` and labels are
 * those of the sources. A failure of a source ends the stream at its step. If the stream cannot be opened,
 * closes what it would have taken over. */
enum status mixture_stream_open(const struct mixture_stream_request *request, struct stream **stream);

/* Adds the statistics of a source to those of the mixture; `first`: it is the first one. A mixture has as
 * many finished batches as the source that has the fewest. */
void mixture_add_stats(const struct stream_stats *source, bool first, struct stream_stats *sum);

FDSL_C_END

#endif
