#include "data/mixture.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "data/checksum.h"
#include "machine/host.h"

/* ---- Weights ---- */

/* The option or field that messages name. */
#define WEIGHTS OPTION_OR_FIELD("--mix", "weights")
#define CHANGES OPTION_OR_FIELD("--mix-weights-at", "change_weights")

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Sums the weights of a phase, of all sources or of all but the named one, divided by their common divisor,
 * which `*divisor` becomes. */
static uint64_t sum_of(const struct mixture_request *request, uint32_t phase, bool named, uint64_t *divisor)
{
    uint64_t sum = 0;
    *divisor = 0;
    for (uint32_t k = 0; k < request->count; k++)
        if (named || k != request->named) {
            sum += request->phases[phase].of[k];
            *divisor = common_divisor(*divisor, request->phases[phase].of[k]);
        }
    return *divisor ? sum / *divisor : 0;
}

/* Computes the share of the named source as a reduced fraction. */
static void named_share(const struct mixture_request *request, uint32_t phase, uint64_t *weight,
                        uint64_t *total)
{
    uint64_t sum = 0;
    for (uint32_t k = 0; k < request->count; k++)
        sum += request->phases[phase].of[k];
    *weight = request->phases[phase].of[request->named];
    const uint64_t divisor = common_divisor(sum, *weight);
    *weight /= divisor ? divisor : 1;
    *total = sum / (divisor ? divisor : 1);
}

/* Returns whether a phase gives all sources the same shares as the phase before it. */
static bool changes_nothing(const struct mixture_request *request, uint32_t phase)
{
    const uint32_t *now = request->phases[phase].of, *before = request->phases[phase - 1].of;
    uint64_t sum = 0, sum_before = 0;
    bool same = true;
    for (uint32_t k = 0; k < request->count; k++) {
        sum += now[k];
        sum_before += before[k];
    }
    for (uint32_t k = 0; k < request->count; k++)
        same &= now[k] * sum_before == before[k] * sum;
    return same;
}

static enum status check_phase(const struct mixture_request *request, uint32_t phase)
{
    const char *name = request->sources[request->named].name;
    const char *option = phase ? CHANGES : WEIGHTS;
    const unsigned long long step = request->phases[phase].step;
    uint64_t weight, total, first, first_total, divisor;
    named_share(request, 0, &first, &first_total);
    named_share(request, phase, &weight, &total);
    if (phase > 0 && request->count < 3)
        return status_set(STATUS_USAGE,
                          "%s: weights can change only among three sources or more, because the source that "
                          "ends an epoch keeps its share; drop them, or add a source",
                          option);
    if (weight == 0)
        return status_set(STATUS_USAGE,
                          "%s: the weight of '%s' is 0, but an epoch ends when all its samples were "
                          "delivered; give it a weight above 0, or name another source",
                          option, name);
    if (weight != first || total != first_total)
        return status_set(STATUS_USAGE,
                          "%s: the weights from step %llu on give '%s' another share, %llu of %llu instead "
                          "of %llu of %llu, so epochs would have different lengths; keep the share of the "
                          "source that ends an epoch, and change those of the others",
                          option, step, name, (unsigned long long)weight, (unsigned long long)total,
                          (unsigned long long)first, (unsigned long long)first_total);
    if (phase > 0 && changes_nothing(request, phase))
        return status_set(STATUS_USAGE,
                          "%s: the weights from step %llu on give all sources the same shares as before; "
                          "drop them",
                          option, step);
    if (total > MIXTURE_PERIOD || sum_of(request, phase, false, &divisor) > MIXTURE_PERIOD)
        return status_set(STATUS_USAGE,
                          "%s: the sum of the weights, divided by their common divisor, is more than %d; "
                          "choose rounder weights",
                          option, MIXTURE_PERIOD);
    return phase == 0 ? request->phases[0].step == 0
                            ? STATUS_OK
                            : status_set(STATUS_USAGE, "%s: they must hold from step 0 on", option)
           : request->phases[phase].step > request->phases[phase - 1].step
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%s: the steps must ascend",
                            OPTION_OR_FIELD("--mix-weights-at", "change_steps"));
}

enum status mixture_count(const struct mixture_request *request, uint32_t *positions)
{
    uint64_t weight, total;
    if (request->count < 1 || request->count > MIXTURE_SOURCES || request->named >= request->count ||
        request->phase_count < 1 || request->phase_count > MIXTURE_PHASES)
        return status_set(STATUS_USAGE, "%s: a mixture has 1 to %d sources and 1 to %d sets of weights",
                          WEIGHTS, MIXTURE_SOURCES, MIXTURE_PHASES);
    const struct mixture_source *named = &request->sources[request->named];
    if (named->samples == 0)
        return status_set(STATUS_USAGE,
                          "%s: '%s' has no end, so it cannot end an epoch; name a source that is read",
                          OPTION_OR_FIELD("--mix-epoch", "epoch"), named->name);
    for (uint32_t i = 0; i < request->phase_count; i++)
        TRY(check_phase(request, i));
    named_share(request, 0, &weight, &total);
    const uint64_t count = (named->samples * total + weight - 1) / weight;
    if (count >> 31)
        return status_set(STATUS_USAGE,
                          "%s: an epoch would have %llu samples, because it ends when all %u of '%s' were "
                          "delivered; it must have fewer than 2^31: give '%s' a larger weight",
                          WEIGHTS, (unsigned long long)count, named->samples, named->name, named->name);
    *positions = (uint32_t)count;
    return STATUS_OK;
}

/* ---- The tables ---- */

/* Assigns the positions of a period to the sources, by Tijdeman's rule. With n sources, weights w and a
 * period of W positions, the deficit of a source after r positions with c samples is w (r + 1) - c W. Among
 * the sources whose deficit is at least W / (2n - 2), the one with the earliest deadline is next. */
static void assign(struct mixture_phase *phase, uint32_t count)
{
    const int64_t period = phase->period;
    int64_t taken[MIXTURE_SOURCES] = {0}, used = 0;
    for (uint32_t k = 0; k < count; k++)
        used += phase->weights[k] > 0;
    const int64_t unit = used > 1 ? 2 * used - 2 : 1;
    for (uint32_t r = 0; r < phase->period; r++) {
        uint32_t next = 0;
        bool found = false; /* a source with such a deficit; there always is one */
        int64_t best = 0;
        for (uint32_t k = 0; k < count; k++) {
            const int64_t weight = phase->weights[k],
                          deficit = unit * (weight * (r + (int64_t)1) - taken[k] * period);
            const int64_t slack = (unit - 1) * period - deficit;
            if (weight == 0 || deficit < period)
                continue;
            if (!found || slack * phase->weights[next] < best * weight) {
                found = true;
                next = k;
                best = slack;
            }
        }
        phase->sources[r] = (uint8_t)next;
        phase->ranks[r] = (uint32_t)taken[next]++;
    }
}

/* Returns how many of the first `positions` positions of an epoch belong to the named source. */
static uint64_t named_before(const struct mixture *mixture, uint64_t positions)
{
    return positions * mixture->weight / mixture->total;
}

/* Returns how many samples a source has delivered before position `at` of all the other sources, which is
 * within a phase or at its end. */
static uint64_t taken_before(const struct mixture_phase *phase, uint32_t source, uint64_t at)
{
    const uint64_t since = at - phase->begin;
    uint64_t count = phase->before[source];
    if (phase->period == 0)
        return count;
    count += since / phase->period * phase->weights[source];
    for (uint32_t r = 0; r < since % phase->period; r++)
        count += phase->sources[r] == source;
    return count;
}

static enum status open_phase(struct mixture *mixture, uint32_t i)
{
    const struct mixture_request *request = &mixture->request;
    struct mixture_phase *phase = &mixture->phases[i];
    uint64_t divisor;
    phase->period = (uint32_t)sum_of(request, i, false, &divisor);
    for (uint32_t k = 0; k < request->count; k++)
        phase->weights[k] =
            k == request->named || !divisor ? 0 : (uint32_t)(request->phases[i].of[k] / divisor);
    const uint64_t step = request->phases[i].step, epoch = step / mixture->steps,
                   position = step % mixture->steps * request->batch;
    phase->begin = epoch * mixture->others + position - named_before(mixture, position);
    for (uint32_t k = 0; i > 0 && k < request->count; k++)
        phase->before[k] = taken_before(phase - 1, k, phase->begin);
    phase->sources = malloc(phase->period + 1);
    phase->ranks = malloc((phase->period + (size_t)1) * sizeof *phase->ranks);
    TRY(ALLOCATED(phase->sources && phase->ranks, "out of memory for the weights of a mixture"));
    assign(phase, request->count);
    return STATUS_OK;
}

enum status mixture_open(const struct mixture_request *request, struct mixture *mixture)
{
    uint64_t weight, total;
    *mixture = (struct mixture){.request = *request, .phase_count = 0};
    TRY(mixture_count(request, &mixture->positions));
    named_share(request, 0, &weight, &total);
    mixture->weight = (uint32_t)weight;
    mixture->total = (uint32_t)total;
    const uint32_t batch = request->batch, rest = batch ? mixture->positions % batch : 0;
    if (batch < 1 || (request->drop_last && batch > mixture->positions))
        return status_set(STATUS_USAGE, "%s: a step of %u samples does not fit into an epoch of %u",
                          OPTION_OR_FIELD("--batch", "batch_size"), batch, mixture->positions);
    mixture->steps = mixture->positions / batch + (rest > 0 && !request->drop_last);
    const uint64_t delivered = request->drop_last ? mixture->steps * batch : mixture->positions;
    mixture->others = delivered - named_before(mixture, delivered);
    for (; mixture->phase_count < request->phase_count; mixture->phase_count++) {
        const enum status status = open_phase(mixture, mixture->phase_count);
        if (status != STATUS_OK) {
            mixture->phase_count++;
            return status;
        }
    }
    return STATUS_OK;
}

void mixture_close(struct mixture *mixture)
{
    for (uint32_t i = 0; i < mixture->phase_count; i++) {
        free(mixture->phases[i].sources);
        free(mixture->phases[i].ranks);
    }
    *mixture = (struct mixture){.phase_count = 0};
}

/* ---- Samples ---- */

/* Returns the position that fills slot `slot` of a step. */
static uint32_t rotated(const struct mixture *mixture, uint64_t epoch, uint32_t position)
{
    const uint32_t batch = mixture->request.batch, step = position / batch, first = step * batch,
                   left = mixture->positions - first, size = left < batch ? left : batch;
    const uint64_t draw = stream_hash(stream_hash(mixture->request.seed + epoch) ^ step);
    return first + (uint32_t)((position - first + draw % size) % size);
}

struct mixture_pick mixture_at(const struct mixture *mixture, uint64_t epoch, uint32_t position)
{
    const uint64_t at = rotated(mixture, epoch, position), before = named_before(mixture, at);
    if (named_before(mixture, at + 1) > before)
        return (struct mixture_pick){mixture->request.named, before};
    const uint64_t other = epoch * mixture->others + at - before;
    const struct mixture_phase *phase = &mixture->phases[mixture->phase_count - 1];
    while (phase->begin > other)
        phase--;
    const uint64_t since = other - phase->begin;
    const uint32_t r = (uint32_t)(since % phase->period), source = phase->sources[r];
    return (struct mixture_pick){
        source, phase->before[source] + since / phase->period * phase->weights[source] + phase->ranks[r]};
}

uint32_t mixture_copies(const struct mixture *mixture, uint32_t source)
{
    const uint32_t samples = mixture->request.sources[source].samples;
    return source == mixture->request.named || samples == 0 ? 1 : (uint32_t)(mixture->others / samples + 2);
}

uint32_t mixture_number(const struct mixture *mixture, uint64_t epoch, const struct mixture_pick *pick,
                        struct mixture_pass *pass)
{
    const struct mixture_source *source = &mixture->request.sources[pick->source];
    const bool named = pick->source == mixture->request.named;
    const uint64_t number = named ? epoch : pick->index / source->samples;
    const uint32_t index = (uint32_t)(named ? pick->index : pick->index % source->samples);
    if (!pass->known || pass->pass != number) {
        pass->known = true;
        pass->pass = number;
        if (source->lanes || source->shuffle)
            pass->order = source->lanes
                              ? draw_lanes(mixture->request.seed, (uint32_t)number, source->samples,
                                           source->lanes, source->shuffle)
                              : draw_order(mixture->request.seed, (uint32_t)number, source->samples);
    }
    const uint32_t sample = source->lanes || source->shuffle ? draw_order_at(&pass->order, index) : index;
    return sample + (uint32_t)(named ? 0 : number % mixture_copies(mixture, pick->source)) * source->samples;
}

uint64_t mixture_hash(const struct mixture_request *request)
{
    uint64_t hash = checksum_seeded(&request->count, sizeof request->count, request->named + UINT64_C(1));
    for (uint32_t k = 0; k < request->count; k++) {
        const struct mixture_source *source = &request->sources[k];
        const uint32_t words[] = {source->samples, source->lanes, source->shuffle, source->label_offset};
        hash = checksum_seeded(words, sizeof words, hash);
    }
    for (uint32_t i = 0; i < request->phase_count; i++) {
        uint64_t divisor = 0, words[MIXTURE_SOURCES + 1] = {request->phases[i].step};
        (void)sum_of(request, i, true, &divisor);
        for (uint32_t k = 0; k < request->count; k++)
            words[k + 1] = request->phases[i].of[k] / (divisor ? divisor : 1);
        hash = checksum_seeded(words, sizeof words, hash);
    }
    return hash;
}

/* ---- Plans ---- */

/* The context of a source's plan. */
struct part {
    const struct mixture_plans *plans;
    uint32_t source;
};

struct mixture_plans {
    const struct mixture *mixture;
    struct stream_plan plan;
    struct part parts[MIXTURE_SOURCES];
};

enum status mixture_plans_open(const struct mixture *mixture, const struct stream_plan *plan,
                               struct mixture_plans **plans)
{
    struct mixture_plans *self = *plans = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory for the plans of a mixture"));
    self->mixture = mixture;
    self->plan = *plan;
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        self->parts[k] = (struct part){self, k};
    return STATUS_OK;
}

void mixture_plans_close(struct mixture_plans *plans)
{
    free(plans);
}

/* Implements stream_plan.list. The samples of the source replace the list of the whole step from its front.
 */
static uint32_t list_part(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct part *part = context;
    const struct mixture *mixture = part->plans->mixture;
    const struct stream_plan *plan = &part->plans->plan;
    const uint32_t count = plan->list(plan->context, epoch, step, numbers);
    struct mixture_pass pass = {0};
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct mixture_pick pick = mixture_at(mixture, epoch, numbers[i]);
        if (pick.source == part->source)
            numbers[kept++] = mixture->request.sources[pick.source].samples
                                  ? mixture_number(mixture, epoch, &pick, &pass)
                                  : numbers[i];
    }
    return kept;
}

struct stream_plan mixture_plan_of(const struct mixture_plans *plans, uint32_t source)
{
    struct stream_plan plan = plans->plan;
    plan.list = list_part;
    plan.context = &plans->parts[source];
    return plan;
}

const struct stream_plan *mixture_plan(const struct mixture_plans *plans)
{
    return &plans->plan;
}

uint64_t mixture_sample(const void *context, uint64_t epoch, uint32_t number)
{
    const struct part *part = context;
    return mixture_at(part->plans->mixture, epoch, number).index;
}

uint32_t mixture_list(const struct mixture_plans *plans, struct stream_position at, uint32_t *numbers,
                      uint8_t *sources)
{
    const uint32_t count = plans->plan.list(plans->plan.context, at.epoch, at.step, numbers);
    for (uint32_t i = 0; i < count; i++)
        sources[i] = (uint8_t)mixture_at(plans->mixture, at.epoch, numbers[i]).source;
    return count;
}

/* ---- The stream ---- */

/* Room for a batch. */
struct slot {
    uint8_t *values, *masks;
    int32_t *labels;
    uint32_t *numbers;
    uint64_t *read;
    uint8_t *sources;
    bool held;
};

struct mixture_stream {
    struct stream stream; /* must be the first member */
    struct mixture_stream_request request;
    uint32_t count, slot_count;
    struct slot *slots;
    struct failure fault; /* status STATUS_OK: none */
    struct stream_batch taken[MIXTURE_SOURCES];
    pthread_mutex_t lock; /* protects everything below, and `held` of the slots */
    struct stream_stats stats;
};

static struct mixture_stream *of(const struct stream *stream)
{
    return (struct mixture_stream *)(uintptr_t)stream;
}

/* Copies a sample of a source to its place in the batch. */
static void copy_sample(const struct mixture_stream *self, struct slot *slot, uint32_t i,
                        const struct stream_batch *from, uint32_t at)
{
    const size_t bytes = self->request.sample_bytes, mask = self->request.mask_bytes;
    memcpy(slot->values + i * bytes, (const uint8_t *)from->samples.values + at * from->samples.stride,
           bytes);
    if (mask)
        memcpy(slot->masks + i * mask, from->masks + at * mask, mask);
    slot->labels[i] = mixture_label(self->request.mixture, slot->sources[i], from->labels[at]);
    slot->read[i] = from->read[at];
}

/* Checks that the batches of the sources are those of the step. */
static enum status check_taken(const struct mixture_stream *self, struct stream_position at,
                               const uint32_t counts[MIXTURE_SOURCES])
{
    for (uint32_t k = 0; k < self->count; k++) {
        const struct stream_batch *batch = &self->taken[k];
        if (batch->epoch != at.epoch || batch->step != at.step || batch->samples.count != counts[k] ||
            (counts[k] > 0 && batch->samples.stride != self->request.sample_bytes))
            return status_set(STATUS_FAILED, "the source '%s' delivered another batch than that of the step",
                              self->request.mixture->request.sources[k].name);
    }
    return STATUS_OK;
}

static enum status assemble(const struct mixture_stream *self, struct slot *slot, struct stream_batch *batch)
{
    const struct stream_position at = self->stream.at;
    uint32_t counts[MIXTURE_SOURCES] = {0};
    const uint32_t count = mixture_list(self->request.plans, at, slot->numbers, slot->sources);
    for (uint32_t i = 0; i < count; i++)
        counts[slot->sources[i]]++;
    TRY(check_taken(self, at, counts));
    memset(counts, 0, sizeof counts);
    *batch = (struct stream_batch){.samples = {.values = slot->values,
                                               .bytes = count * self->request.sample_bytes,
                                               .stride = self->request.sample_bytes,
                                               .count = count,
                                               .labels = slot->labels,
                                               .first = count ? slot->numbers[0] : 0},
                                   .numbers = slot->numbers,
                                   .read = slot->read,
                                   .masks = slot->masks,
                                   .epoch = at.epoch,
                                   .step = at.step,
                                   .last = self->taken[0].last,
                                   .slot = (uint32_t)(slot - self->slots)};
    for (uint32_t i = 0; i < count; i++)
        copy_sample(self, slot, i, &self->taken[slot->sources[i]], counts[slot->sources[i]]++);
    for (uint32_t k = 0; k < self->count; k++) {
        batch->masked += self->taken[k].masked;
        if (self->taken[k].samples.count > 0)
            batch->samples.type = self->taken[k].samples.type;
        batch->samples.interleaved |= self->taken[k].samples.interleaved;
    }
    return STATUS_OK;
}

/* Takes the next batch of each source. Returns those that it took before a failure. */
static enum status take_all(struct mixture_stream *self)
{
    enum status status = STATUS_OK;
    uint32_t taken = 0;
    for (; status == STATUS_OK && taken < self->count; taken++) {
        status = stream_next(self->request.streams[taken], &self->taken[taken]);
        if (status != STATUS_OK)
            status = status_prefix(status, "source '%s' of the mixture",
                                   self->request.mixture->request.sources[taken].name);
    }
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct failure failure = status_save(status);
    for (uint32_t k = 0; k + 1 < taken; k++)
        (void)stream_release(self->request.streams[k], &self->taken[k], NULL); /* the first failure counts */
    return status_restore(&failure);
}

static enum status release_all(struct mixture_stream *self)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < self->count; k++)
        if (stream_release(self->request.streams[k], &self->taken[k], NULL) != STATUS_OK)
            status = STATUS_FAILED;
    return status;
}

static enum status fill_slot(struct mixture_stream *self, struct slot *slot, struct stream_batch *batch)
{
    TRY(take_all(self));
    const enum status status = assemble(self, slot, batch);
    const struct failure failure = status_save(status);
    TRY(release_all(self));
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}

static enum status mixture_next(struct stream *stream, struct stream_batch *batch)
{
    struct mixture_stream *self = of(stream);
    struct slot *slot = self->slots, *const end = slot + self->slot_count;
    if (self->fault.status != STATUS_OK)
        return status_restore(&self->fault);
    pthread_mutex_lock(&self->lock);
    while (slot < end && slot->held)
        slot++;
    pthread_mutex_unlock(&self->lock);
    if (slot == end)
        return status_set(STATUS_USAGE, "all %u batches of the stream are held; release one",
                          self->slot_count);
    const enum status status = fill_slot(self, slot, batch);
    if (status != STATUS_OK) {
        self->fault = status_save(status);
        return status;
    }
    pthread_mutex_lock(&self->lock);
    slot->held = true;
    self->stats.batches++;
    self->stats.samples += batch->samples.count;
    pthread_mutex_unlock(&self->lock);
    return STATUS_OK;
}

static bool mixture_wait(struct stream *stream, double seconds)
{
    const struct mixture_stream *self = of(stream);
    const double end_s = timer_now_s() + seconds;
    for (uint32_t k = 0; k < self->count; k++) {
        const double left_s = end_s - timer_now_s();
        if (!stream_wait(self->request.streams[k], left_s > 0 ? left_s : 0))
            return false;
    }
    return true;
}

static enum status mixture_release(struct stream *stream, const struct stream_batch *batch, void *done_event)
{
    struct mixture_stream *self = of(stream);
    if (done_event)
        return status_set(STATUS_USAGE, "a stream in host memory cannot wait for an event");
    pthread_mutex_lock(&self->lock);
    const bool held = batch->slot < self->slot_count && self->slots[batch->slot].held;
    if (held)
        self->slots[batch->slot].held = false;
    pthread_mutex_unlock(&self->lock);
    return held ? STATUS_OK : status_set(STATUS_USAGE, "the batch was released before");
}

static enum status mixture_seek(struct stream *stream, struct stream_position to)
{
    struct mixture_stream *self = of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        TRY(stream_seek(self->request.streams[k], to));
    self->fault.status = STATUS_OK;
    return STATUS_OK;
}

void mixture_add_stats(const struct stream_stats *source, bool first, struct stream_stats *sum)
{
    sum->masked += source->masked;
    sum->bytes += source->bytes;
    sum->wait_s += source->wait_s;
    sum->read_s += source->read_s;
    sum->decode_s += source->decode_s;
    sum->generate_s += source->generate_s;
    sum->jpeg_warnings += source->jpeg_warnings;
    sum->memory_bytes += source->memory_bytes;
    sum->shard_bytes += source->shard_bytes;
    sum->resident += source->resident;
    sum->resident_device += source->resident_device;
    sum->ready = first || source->ready < sum->ready ? source->ready : sum->ready;
}

static void mixture_stats(struct stream *stream, struct stream_stats *stats)
{
    struct mixture_stream *self = of(stream);
    pthread_mutex_lock(&self->lock);
    *stats = self->stats;
    pthread_mutex_unlock(&self->lock);
    for (uint32_t k = 0; k < self->count; k++) {
        struct stream_stats own;
        stream_stats(self->request.streams[k], &own);
        if (self->request.mixture->request.sources[k].samples == 0)
            own.wait_s = 0; /* stream_next() generates: this is work, and reading does not delay it */
        mixture_add_stats(&own, k == 0, stats);
    }
}

static void mixture_cancel(struct stream *stream)
{
    const struct mixture_stream *self = of(stream);
    for (uint32_t k = 0; k < self->count; k++)
        stream_cancel(self->request.streams[k]);
}

/* Closes what the request passes on. */
static void close_parts(const struct mixture_stream_request *request)
{
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        stream_close(request->streams[k]);
    mixture_plans_close(request->plans);
}

static void mixture_stream_close(struct stream *stream)
{
    struct mixture_stream *self = of(stream);
    close_parts(&self->request);
    for (uint32_t i = 0; self->slots && i < self->slot_count; i++)
        if (self->slots[i].values)
            self->request.deallocate(self->slots[i].values);
    pthread_mutex_destroy(&self->lock);
    free(self->slots);
    free(self);
}

static const struct stream_type mixture_type = {
    .next = mixture_next,
    .wait = mixture_wait,
    .release = mixture_release,
    .seek = mixture_seek,
    .stats = mixture_stats,
    .cancel = mixture_cancel,
    .close = mixture_stream_close,
};

static enum status allocate_slots(struct mixture_stream *self)
{
    const size_t capacity = self->request.plans->plan.capacity,
                 samples = stream_aligned(capacity * self->request.sample_bytes),
                 values = samples + stream_aligned(capacity * self->request.mask_bytes),
                 words = stream_aligned(capacity * sizeof(uint32_t)), bytes = values + 5 * words;
    TRY(memory_check(bytes * self->slot_count, "the batches of the mixture",
                     OPTION_OR_FIELD("lower --batch", "lower batch_size")));
    for (uint32_t i = 0; i < self->slot_count; i++) {
        struct slot *slot = &self->slots[i];
        void *memory;
        TRY(self->request.allocate(bytes, &memory));
        slot->values = memory;
        slot->masks = self->request.mask_bytes ? slot->values + samples : NULL;
        slot->labels = (int32_t *)(slot->values + values);
        slot->numbers = (uint32_t *)(slot->values + values + words);
        slot->read = (uint64_t *)(slot->values + values + 2 * words);
        slot->sources = slot->values + values + 4 * words;
    }
    self->stats.memory_bytes = bytes * self->slot_count;
    return STATUS_OK;
}

enum status mixture_stream_open(const struct mixture_stream_request *request, struct stream **stream)
{
    *stream = NULL;
    struct mixture_stream *self = calloc(1, sizeof *self);
    if (!self) {
        close_parts(request);
        return ALLOCATED(self, "out of memory for a stream");
    }
    self->stream = (struct stream){&mixture_type, request->streams[0]->at};
    self->request = *request;
    if (!request->allocate) {
        self->request.allocate = stream_allocate;
        self->request.deallocate = free;
    }
    self->count = request->mixture->request.count;
    self->slot_count = request->held ? request->held : 1;
    pthread_mutex_init(&self->lock, NULL);
    self->slots = calloc(self->slot_count, sizeof *self->slots);
    enum status status = ALLOCATED(self->slots, "out of memory for a stream");
    if (status == STATUS_OK)
        status = allocate_slots(self);
    if (status == STATUS_OK) {
        *stream = &self->stream;
        return STATUS_OK;
    }
    const struct failure failure = status_save(status);
    mixture_stream_close(&self->stream);
    return status_restore(&failure);
}
