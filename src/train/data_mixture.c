#include "train/data_mixture.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"
#include "data/checksum.h"
#include "data/generated_stream.h"
#include "data/remote.h"
#include "train/data_fill.h"

/* ---- The texts ---- */

#define WEIGHTS "from 0 to 1000 with at most four decimals"

/* Parses a weight with at most four decimals. Returns false if `text`, which ends at `end`, is none. */
static bool read_weight(const char *text, const char *end, uint32_t *weight)
{
    uint64_t whole = 0, unit = MIXTURE_UNITS;
    bool digits = false, point = false;
    for (; text < end; text++) {
        if (*text == '.' && !point) {
            point = true;
            continue;
        }
        if (!isdigit((unsigned char)*text) || (point && unit == 1) ||
            whole > (uint64_t)MIXTURE_MOST * MIXTURE_UNITS)
            return false;
        digits = true;
        unit /= point ? 10 : 1;
        whole = whole * 10 + (uint64_t)(*text - '0');
    }
    *weight = (uint32_t)(whole * unit);
    return digits && whole * unit <= (uint64_t)MIXTURE_MOST * MIXTURE_UNITS;
}

/* A part of --mix: NAME[=URL][:WEIGHT], from `begin` to `end`. */
struct entry {
    const char *begin, *end;
    const char *equals; /* NULL: no URL */
    const char *colon;  /* before the weight; `end`: there is none */
    bool automatic;
    uint32_t weight;
};

/* Finds the weight of an entry, from its right end, because a URL has colons, too. */
static void find_weight(struct entry *entry)
{
    const char *colon = entry->end;
    while (colon > entry->begin && colon[-1] != ':')
        colon--;
    entry->automatic = entry->end - colon == 4 && strncmp(colon, "auto", 4) == 0;
    const bool found =
        colon > entry->begin && (entry->automatic || read_weight(colon, entry->end, &entry->weight));
    entry->colon = found ? colon - 1 : entry->end;
}

/* Returns whether a text has the characters of a name. */
static bool is_name(const char *begin, const char *end)
{
    bool good = begin < end && end - begin < MIXTURE_NAME;
    for (; good && begin < end; begin++)
        good = isalnum((unsigned char)*begin) || *begin == '-' || *begin == '_';
    return good;
}

/* Reads the next entry. A comma without a weight before it belongs to the URL. */
static struct entry next_entry(const char *begin)
{
    struct entry entry = {.begin = begin, .end = begin};
    for (;;) {
        entry.end += strcspn(entry.end, ",");
        find_weight(&entry);
        entry.equals = memchr(begin, '=', (size_t)(entry.colon - begin));
        if (!*entry.end || entry.colon < entry.end || !entry.equals)
            return entry;
        entry.end++;
    }
}

static enum status refuse_entry(const char *text, const struct entry *entry, const char *why)
{
    return status_value(STATUS_USAGE, "mix", text, ": '%.*s' %s", (int)(entry->end - entry->begin),
                        entry->begin, why);
}

static enum status add_entry(const char *text, const struct entry *entry, struct data_mix *mix)
{
    const char *name_end = entry->equals ? entry->equals : entry->colon;
    const size_t length = (size_t)(name_end - entry->begin);
    if (!entry->equals && entry->colon == entry->end && memchr(entry->begin, ':', length))
        return refuse_entry(text, entry, "has a colon, but after it no weight: a number " WEIGHTS);
    if (!is_name(entry->begin, name_end))
        return refuse_entry(text, entry,
                            "does not begin with the name of a source: letters, digits, '-' and '_', at most "
                            "31; write NAME=URL:WEIGHT, or load:WEIGHT or synth:WEIGHT");
    if (mix->count == MIXTURE_SOURCES)
        return status_value(STATUS_USAGE, "mix", text, " has more than %d sources", MIXTURE_SOURCES);
    char name[MIXTURE_NAME] = "";
    memcpy(name, entry->begin, length);
    const bool synth = strcmp(name, "synth") == 0, load = strcmp(name, "load") == 0;
    if (entry->equals && (synth || load))
        return refuse_entry(text, entry,
                            "gives a URL to 'load', which is --data, or to 'synth', which is generated; "
                            "choose another name");
    if (!entry->equals && !synth && !load)
        return refuse_entry(text, entry,
                            "is not a source; write load, synth, or NAME=URL, each with ':' and its weight");
    if (entry->equals && entry->equals + 1 == entry->colon)
        return refuse_entry(text, entry, "has no folder and no URL");
    if (data_mix_find(mix, name) < mix->count)
        return refuse_entry(text, entry, "has the name of another source");
    if (entry->automatic && !synth)
        return refuse_entry(text, entry,
                            "has the weight auto, which is for synth; the other sources share the rest");
    if (entry->equals && memchr(entry->equals, '?', (size_t)(entry->colon - entry->equals)))
        return refuse_entry(text, entry,
                            "has a URL with a secret part, which rows would show; give it with --data, and "
                            "name it load");
    mix->automatic |= entry->automatic;
    if (synth)
        mix->generated = mix->count;
    memcpy(mix->sources[mix->count].name, name, sizeof name);
    mix->sources[mix->count].weight = entry->colon == entry->end ? 0 : entry->automatic ? 0 : entry->weight;
    if (entry->equals) {
        mix->sources[mix->count].path =
            strndup(entry->equals + 1, (size_t)(entry->colon - entry->equals) - 1);
        mix->count++;
        return ALLOCATED(mix->sources[mix->count - 1].path, "out of memory");
    }
    mix->count++;
    return STATUS_OK;
}

/* Reads all entries. Without a weight, an entry has the weight 1 if synth has auto. */
static enum status read_entries(const char *text, struct data_mix *mix)
{
    bool weighted[MIXTURE_SOURCES] = {false};
    for (const char *at = text;; at++) {
        const struct entry entry = next_entry(at);
        TRY(add_entry(text, &entry, mix));
        weighted[mix->count - 1] = entry.colon < entry.end;
        at = entry.end;
        if (!*at)
            break;
    }
    for (uint32_t k = 0; k < mix->count; k++) {
        if (!weighted[k] && !mix->automatic)
            return status_value(
                STATUS_USAGE, "mix", text, ": '%s' has no weight; write %s%s:WEIGHT, a number " WEIGHTS,
                mix->sources[k].name, mix->sources[k].name, mix->sources[k].path ? "=URL" : "");
        if (!weighted[k])
            mix->sources[k].weight = MIXTURE_UNITS;
    }
    return mix->count > (mix->generated < mix->count)
               ? STATUS_OK
               : status_value(STATUS_USAGE, "mix", text,
                              " names no source that is read; add load:WEIGHT, or use --feed live");
}

static enum status find_named(const struct data_mix_texts *texts, struct data_mix *mix)
{
    if (!texts->epoch) {
        mix->named = mix->generated == 0 ? 1 : 0;
        return STATUS_OK;
    }
    mix->named = data_mix_find(mix, texts->epoch);
    if (mix->named == MIXTURE_SOURCES)
        return status_value(STATUS_USAGE, "mix-epoch", texts->epoch, " is not a source of --mix %s",
                            texts->mix);
    return mix->named != mix->generated ? STATUS_OK
                                        : status_value(STATUS_USAGE, "mix-epoch", texts->epoch,
                                                       " has no end; name a source that is read");
}

static enum status refuse_weights(const struct data_mix_texts *texts, const char *why)
{
    return status_value(STATUS_USAGE, "mix-weights-at", texts->weights_at,
                        "%s; write STEP:W,W,... with a weight for each of the sources of --mix, in their "
                        "order, and '/' before the next STEP",
                        why);
}

/* Reads STEP:W,W,...[/STEP:...]. */
static enum status read_phases(const struct data_mix_texts *texts, struct data_mix *mix)
{
    for (const char *at = texts->weights_at; at; at = *at ? at + 1 : NULL) {
        struct mixture_weights *phase = &mix->phases[mix->phase_count];
        char *end = NULL;
        if (mix->phase_count == MIXTURE_PHASES)
            return refuse_weights(texts, " has too many steps");
        phase->step = isdigit((unsigned char)*at) ? strtoull(at, &end, 10) : 0;
        if (phase->step == 0 || phase->step > UINT32_MAX || *end != ':')
            return refuse_weights(texts, ": a step is a whole number from 1 on, before a ':'");
        at = end;
        for (uint32_t k = 0; k < mix->count; k++) {
            const char *begin = at + 1;
            if (*at != (k ? ',' : ':'))
                return refuse_weights(texts, " has too few weights");
            at = begin + strcspn(begin, ",/");
            if (!read_weight(begin, at, &phase->of[k]))
                return refuse_weights(texts, " has a weight that is no number " WEIGHTS);
        }
        if (*at == ',')
            return refuse_weights(texts, " has too many weights");
        mix->phase_count++;
        if (!*at)
            return STATUS_OK;
    }
    return STATUS_OK;
}

/* With synth:auto, gives the other sources `share` of DATA_MIX_SHARES. */
static void share_weights(const struct data_mix *mix, uint32_t share, uint32_t weights[MIXTURE_SOURCES])
{
    uint32_t sum = 0, divisor = MIXTURE_UNITS;
    for (uint32_t k = 0; k < mix->count; k++)
        while (k != mix->generated && mix->sources[k].weight % divisor)
            divisor /= 10;
    for (uint32_t k = 0; k < mix->count; k++)
        if (k != mix->generated) {
            weights[k] = mix->sources[k].weight / divisor * share;
            sum += mix->sources[k].weight / divisor;
        }
    weights[mix->generated] = sum * (DATA_MIX_SHARES - share);
}

enum status data_mix_parse(const struct data_mix_texts *texts, struct data_mix *mix)
{
    *mix = (struct data_mix){.generated = MIXTURE_SOURCES, .phase_count = 1};
    TRY(read_entries(texts->mix, mix));
    TRY(find_named(texts, mix));
    if (texts->labels == DATA_MIX_OFFSET && mix->named > 0) /* infer does not know the offset */
        return status_value(STATUS_USAGE, "mix-labels", "offset",
                            ": the test set has the labels of '%s', so it must be the first source of --mix",
                            mix->sources[mix->named].name);
    for (uint32_t k = 0; k < mix->count; k++)
        mix->phases[0].of[k] = mix->sources[k].weight;
    if (mix->automatic)
        share_weights(mix, texts->share ? (uint32_t)texts->share : DATA_MIX_SHARES, mix->phases[0].of);
    if (mix->automatic && texts->weights_at)
        return status_value(STATUS_USAGE, "mix-weights-at", texts->weights_at,
                            " contradicts synth:auto, whose share is chosen once; drop one of the two");
    return read_phases(texts, mix);
}

void data_mix_free(struct data_mix *mix)
{
    for (uint32_t k = 0; k < mix->count; k++)
        free(mix->sources[k].path);
    mix->count = 0;
}

uint32_t data_mix_find(const struct data_mix *mix, const char *name)
{
    for (uint32_t k = 0; k < mix->count; k++)
        if (strcmp(mix->sources[k].name, name) == 0)
            return k;
    return MIXTURE_SOURCES;
}

/* ---- Opening ---- */

/* Returns the request for the data of a source. */
static struct data_request request_of(const struct data_request *request, const struct data_mix *mix,
                                      uint32_t source)
{
    struct data_request own = *request;
    own.mix = NULL;
    own.mixed = true;
    own.train_only = source != mix->named;
    if (source == mix->generated) {
        own.name = "synth";
        own.url = own.test_name = own.test_url = own.image = own.label = NULL;
        own.feed = DATA_LIVE;
        own.fresh = true;
        own.skip = own.mask = false;
        own.train_size = DATA_MEASURED;
        own.resident_bytes = own.resident_device_bytes = 0;
        if (own.fit.res) { /* drawn at the size of the output */
            own.res = own.fit.res;
            own.fit.how = FIT_RESIZE;
        }
        return own;
    }
    own.feed = DATA_LOAD;
    own.classes = 0;
    own.formula = own.preset = own.preset_file = own.class_file = NULL;
    if (mix->sources[source].path) {
        own.name = mix->sources[source].path;
        own.url = NULL;
    }
    if (own.train_only) {
        own.test_name = own.test_url = NULL;
        own.test_share = 0;
        own.train_size = own.resident_device_bytes = 0;
    }
    return own;
}

/* Checks that the samples of all sources have one shape and one type. */
static enum status check_shapes(const struct data_mixture *mixture)
{
    const struct data *first = &mixture->sources[0];
    for (uint32_t k = 1; k < mixture->mix.count; k++) {
        const struct shape *a = &first->shape, *b = &mixture->sources[k].shape;
        if (memcmp(a, b, sizeof *a) != 0 || first->type != mixture->sources[k].type)
            return status_set(STATUS_USAGE,
                              "--mix: the samples of '%s' are %s of %ux%ux%ux%u (channels, depth, height, "
                              "width), those of '%s' %s of %ux%ux%ux%u; give images one size with --out-res",
                              mixture->mix.sources[0].name, dtype_names[first->type], a->channels, a->depth,
                              a->height, a->width, mixture->mix.sources[k].name,
                              dtype_names[mixture->sources[k].type], b->channels, b->depth, b->height,
                              b->width);
    }
    return STATUS_OK;
}

/* Opens the data of a source. */
static enum status open_source(const struct data_request *request, struct data_mixture *mixture, uint32_t k)
{
    const struct data_request own = request_of(request, &mixture->mix, k);
    struct data *data = &mixture->sources[k];
    const char *name = mixture->mix.sources[k].name;
    if (k != mixture->mix.generated && (!own.name || data_is_generated(own.name)))
        return status_set(STATUS_USAGE,
                          "--mix: '%s' reads files, but --data %s is generated; give --data a "
                          "folder or a URL",
                          name, own.name ? own.name : "");
    TRY(status_prefix(data_open(&own, data), "--mix: source '%s'", name));
    if (data->multi_hot)
        return status_set(STATUS_USAGE,
                          "--mix: source '%s' has multi-hot labels, which cannot be mixed; use --feed %s",
                          name, k == mixture->mix.generated ? "live" : "load");
    return !data->rows ? STATUS_OK
                       : status_set(STATUS_USAGE,
                                    "--mix: source '%s' has rows of embeddings, which cannot be mixed; use "
                                    "--feed load",
                                    name);
}

/* Sets the classes of the mixture, and the offsets of the labels. */
static void join_classes(struct data_mixture *mixture, bool offset, struct data *data)
{
    data->classes = 0;
    for (uint32_t k = 0; k < mixture->mix.count; k++) {
        const uint32_t classes = mixture->sources[k].classes;
        if (offset) {
            mixture->request.sources[k].label_offset = data->classes;
            data->classes += classes;
        } else if (classes > data->classes) {
            data->classes = classes;
        }
    }
}

/* Takes the test set and the settings of the source that ends an epoch. */
static void take_named(struct data_mixture *mixture, struct data *data)
{
    struct data *named = &mixture->sources[mixture->mix.named];
    struct data_set *test = &named->sets[DATA_TEST];
    for (uint32_t i = 0; i < test->count; i++)
        test->labels[i] += mixture->request.sources[mixture->mix.named].label_offset;
    data->sets[DATA_TEST] = *test;
    *test = (struct data_set){0};
    data->hashes[DATA_TEST] = named->hashes[DATA_TEST];
    data->shape = named->shape;
    data->type = named->type;
    data->fit = named->fit;
    data->members = named->members;
    data->sample_values = named->sample_values;
    data->sample_bytes = named->sample_bytes;
    data->skips = named->skips;
    data->split = named->split;
    data->sets[DATA_TRAIN].skipped = named->sets[DATA_TRAIN].skipped;
}

/* Sets the number of samples of an epoch, and room for their labels, which the streams set. */
static enum status set_count(struct data *data)
{
    uint32_t count;
    struct data_set *set = &data->sets[DATA_TRAIN];
    TRY(mixture_count(&data->mixture->request, &count));
    TRY(data_check_memory(count, sizeof *set->labels, "--train-size"));
    uint32_t *labels = realloc(set->labels, count * sizeof *labels);
    TRY(ALLOCATED(labels, "out of memory for %" PRIu32 " labels", count));
    memset(labels, 0, count * sizeof *labels);
    set->labels = labels;
    set->count = count;
    return STATUS_OK;
}

static uint64_t identity_of(const struct data *data)
{
    const struct data_mixture *mixture = data->mixture;
    uint64_t hash = mixture_hash(&mixture->request);
    for (uint32_t k = 0; k < mixture->mix.count; k++) {
        const uint64_t words[] = {mixture->sources[k].hashes[DATA_TRAIN], mixture->sources[k].classes};
        hash = checksum_seeded(words, sizeof words, hash);
    }
    return hash;
}

/* Opens all sources, and sets what the data have together. */
static enum status open_all(const struct data_request *request, struct data *data)
{
    struct data_mixture *mixture = data->mixture;
    struct mixture_request *whole = &mixture->request;
    TRY(data_mix_parse(request->mix, &mixture->mix));
    const struct data_mix *mix = &mixture->mix;
    mixture->chosen = request->mix->share > 0;
    whole->count = mix->count;
    whole->named = mix->named;
    whole->phase_count = mix->phase_count;
    memcpy(whole->phases, mix->phases, sizeof whole->phases);
    bool caches = false;
    for (uint32_t k = 0; k < mix->count; k++) {
        TRY(open_source(request, mixture, k));
        const struct data *source = &mixture->sources[k];
        caches = caches || source->caches;
        const bool reads = k != mix->generated;
        whole->sources[k] = (struct mixture_source){.samples = reads ? source->sets[DATA_TRAIN].count : 0,
                                                    .lanes = reads ? source->lanes : 0,
                                                    .shuffle = reads ? source->shuffle : 0};
        memcpy(whole->sources[k].name, mix->sources[k].name, sizeof whole->sources[k].name);
        if (reads && source->sets[DATA_TRAIN].count == 0)
            return status_set(STATUS_USAGE, "--mix: source '%s' has no samples", mix->sources[k].name);
        if (k == mix->named)
            data_warn_of_classes(source, request->name, false);
    }
    if (!caches)
        TRY(data_refuse_cache(request));
    data->resident_bytes = 0;
    for (uint32_t k = 0; k < mix->count; k++)
        data->resident_bytes += mixture->sources[k].resident_bytes;
    TRY(check_shapes(mixture));
    join_classes(mixture, request->mix->labels == DATA_MIX_OFFSET, data);
    take_named(mixture, data);
    TRY(set_count(data));
    data->hashes[DATA_TRAIN] = identity_of(data);
    return STATUS_OK;
}

enum status data_mixture_open(const struct data_request *request, struct data *data)
{
    data->mixture = calloc(1, sizeof *data->mixture);
    TRY(ALLOCATED(data->mixture, "out of memory"));
    data->feed = DATA_LOAD;
    data->lanes = 1; /* numbers are positions: the mixture has the orders of its sources */
    data->shuffle = 0;
    return open_all(request, data);
}

void data_mixture_close(struct data *data)
{
    struct data_mixture *mixture = data->mixture;
    if (!mixture)
        return;
    mixture_close(&mixture->plan);
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        data_close(&mixture->sources[k]);
    data_mix_free(&mixture->mix);
    free(mixture);
    data->mixture = NULL;
}

enum status data_mixture_set_share(struct data *data, uint32_t share)
{
    struct data_mixture *mixture = data->mixture;
    share_weights(&mixture->mix, share, mixture->request.phases[0].of);
    TRY(set_count(data));
    data->hashes[DATA_TRAIN] = identity_of(data);
    return STATUS_OK;
}

enum status data_mixture_plan(struct data *data, uint64_t seed, uint32_t batch, bool drop_last)
{
    struct data_mixture *mixture = data->mixture;
    mixture_close(&mixture->plan);
    mixture->request.seed = seed;
    mixture->request.batch = batch;
    mixture->request.drop_last = drop_last;
    return mixture_open(&mixture->request, &mixture->plan);
}

void data_mixture_shares(const struct data *data, char *text, size_t size)
{
    const struct mixture_request *request = &data->mixture->request;
    double sum = 0;
    *text = '\0';
    for (uint32_t k = 0; k < request->count; k++)
        sum += request->phases[0].of[k];
    for (uint32_t k = 0; k < request->count; k++)
        text_join(text, size, " ", "%s=%.4g", request->sources[k].name, request->phases[0].of[k] / sum);
}

/* ---- Streams ---- */

/* Opens a stream that generates samples on the host. */
static enum status open_generated(const struct data *source, const struct stream_plan *plan,
                                  const struct data_stream_request *request, struct stream **stream)
{
    struct generated_stream_request with = {.number = mixture_sample,
                                            .count = 1,
                                            .sample_bytes = source->sample_bytes,
                                            .type = source->type,
                                            .plan = *plan,
                                            .held = 1};
    const struct generator_request from = {.resources = {.threads = request->threads},
                                           .batch = plan->capacity};
    TRY(data_generator(source, &from, &with.generator));
    return generated_stream_open(&with, stream);
}

enum status data_mixture_source(const struct data *data, uint32_t k, const struct stream_plan *plan,
                                const struct data_stream_request *request, struct stream **stream)
{
    const struct data_mixture *mixture = data->mixture;
    const struct data *source = &mixture->sources[k];
    if (k == mixture->mix.generated)
        return open_generated(source, plan, request, stream);
    struct data_stream_request own = *request;
    own.plan = *plan;
    own.seed = mixture->request.seed;
    own.copies = mixture_copies(&mixture->plan, k);
    return data_stream(source, &own, stream);
}

enum status data_mixture_stream(const struct data *data, const struct data_stream_request *request,
                                struct stream **stream)
{
    struct mixture_stream_request with = {.mixture = &data->mixture->plan,
                                          .sample_bytes = data->sample_bytes,
                                          .held = request->held,
                                          .allocate = request->allocate,
                                          .deallocate = request->deallocate};
    struct data_stream_request of_source = *request;
    of_source.held = 1;
    of_source.device_share = 0;
    of_source.device_bytes = 0;
    of_source.allocate = NULL;
    of_source.deallocate = NULL;
    enum status status = mixture_plans_open(with.mixture, &request->plan, &with.plans);
    for (uint32_t k = 0; status == STATUS_OK && k < data->mixture->mix.count; k++) {
        const struct stream_plan plan = mixture_plan_of(with.plans, k);
        status = data_mixture_source(data, k, &plan, &of_source, &with.streams[k]);
    }
    if (status == STATUS_OK)
        return mixture_stream_open(&with, stream);
    const struct failure failure = status_save(status);
    for (uint32_t k = 0; k < MIXTURE_SOURCES; k++)
        stream_close(with.streams[k]);
    mixture_plans_close(with.plans);
    return status_restore(&failure);
}
