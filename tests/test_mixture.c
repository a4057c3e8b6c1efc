/* Tests of mixtures: the shares of the sources (data/mixture.h), their stream, what --mix says, and training
 * with --feed mixed. */
#include "core/parallel.h" /* before shell.h, whose run() a parameter has as its name */

#include "stream_support.h"

#include <math.h>

#include "data/generated_stream.h"
#include "data/mixture.h"
#include "run/settings.h"
#include "train/data_mixture.h"

TestSuite(mixture, .init = shell_set_up, .fini = shell_tear_down, .timeout = 240);

/* ---- Shares ---- */

/* A mixture of up to four sources with these weights and sizes; 0 samples: without end. */
static struct mixture_request request_of(const uint32_t *weights, const uint32_t *samples, uint32_t count,
                                         uint32_t named, uint32_t batch, bool drop_last)
{
    struct mixture_request request = {
        .count = count, .named = named, .phase_count = 1, .seed = 5, .batch = batch, .drop_last = drop_last};
    for (uint32_t k = 0; k < count; k++) {
        snprintf(request.sources[k].name, MIXTURE_NAME, "source%u", k);
        request.sources[k].samples = samples[k];
        request.sources[k].lanes = samples[k] ? 4 : 0;
        request.sources[k].shuffle = samples[k] ? 16 : 0;
        request.phases[0].of[k] = weights[k];
    }
    return request;
}

/* Checks an epoch: each step has its share of each source up to less than two samples, and after any number
 * of positions up to less than two; the named source has each sample once; the others go on where `next`
 * says. */
static void check_epoch(const struct mixture *mixture, uint64_t epoch, uint64_t next[MIXTURE_SOURCES])
{
    const struct mixture_request *request = &mixture->request;
    const uint32_t samples = request->sources[request->named].samples;
    const uint64_t end = request->drop_last ? mixture->steps * request->batch : mixture->positions;
    uint8_t *seen = calloc(samples, 1);
    uint64_t *fresh[MIXTURE_SOURCES], counts[MIXTURE_SOURCES] = {0};
    double total = 0;
    struct mixture_pass pass = {0};
    for (uint32_t k = 0; k < request->count; k++) {
        total += request->phases[0].of[k];
        fresh[k] = calloc(mixture->positions, sizeof *fresh[k]);
    }
    for (uint64_t p = 0; p < end; p++) {
        const struct mixture_pick pick = mixture_at(mixture, epoch, (uint32_t)p);
        if (pick.source == request->named) {
            const uint32_t number = mixture_number(mixture, epoch, &pick, &pass);
            cr_assert(number < samples && !seen[number], "epoch %lu: sample %u twice", (unsigned long)epoch,
                      number);
            seen[number] = 1;
        } else {
            cr_assert(pick.index >= next[pick.source] && pick.index < next[pick.source] + end);
            cr_assert_eq(fresh[pick.source][pick.index - next[pick.source]]++, 0);
        }
        counts[pick.source]++;
        if ((p + 1) % request->batch == 0 || p + 1 == end)
            for (uint32_t k = 0; request->phase_count == 1 && k < request->count; k++) {
                const double share = (double)(p + 1) * request->phases[0].of[k] / total;
                cr_assert(fabs((double)counts[k] - share) < 2, "source %u has %lu instead of %g after %lu", k,
                          (unsigned long)counts[k], share, (unsigned long)p + 1);
            }
    }
    cr_assert(request->drop_last || counts[request->named] == samples);
    for (uint32_t k = 0; k < request->count; k++) {
        for (uint64_t i = 0; k != request->named && i < counts[k]; i++)
            cr_assert_eq(fresh[k][i], 1, "source %u left out a sample", k);
        next[k] += counts[k];
        free(fresh[k]);
    }
    free(seen);
}

Test(mixture, each_source_has_its_share_and_the_named_one_ends_the_epoch)
{
    static const struct {
        uint32_t count, named, weights[4], samples[4];
    } cases[] = {
        {2, 0, {3, 7}, {97, 0}},           {2, 1, {7000, 3000}, {0, 1}},           {2, 0, {1, 1}, {64, 5}},
        {3, 1, {5, 2, 3}, {10, 131, 0}},   {4, 0, {1, 10, 100, 3}, {40, 0, 7, 9}}, {1, 0, {5}, {33}},
        {3, 0, {9999, 1, 0}, {300, 0, 0}}, {4, 2, {1, 1, 1, 1}, {3, 5, 257, 0}}};
    static const uint32_t batches[] = {1, 2, 3, 16, 31, 33};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t b = 0; b < COUNT_OF(batches); b++)
            for (int drop_last = 0; drop_last < 2; drop_last++) {
                struct mixture mixture;
                struct mixture_request request =
                    request_of(cases[i].weights, cases[i].samples, cases[i].count, cases[i].named, batches[b],
                               drop_last);
                uint32_t positions;
                uint64_t next[MIXTURE_SOURCES] = {0};
                must(mixture_count(&request, &positions));
                if (drop_last && positions < batches[b])
                    continue;
                must(mixture_open(&request, &mixture));
                cr_expect_eq(mixture.positions, positions);
                for (uint64_t epoch = 0; epoch < 4; epoch++)
                    check_epoch(&mixture, epoch, next);
                mixture_close(&mixture);
            }
}

/* After any number of positions, a source has its share of the positions of the others up to less than one.
 */
Test(mixture, the_pattern_of_a_period_is_even)
{
    static const uint32_t weights[][6] = {
        {1, 1, 1, 1, 1, 1}, {100, 1, 1, 1, 1, 1}, {1, 7, 11, 13, 17, 19}, {1, 1000, 3, 500, 2, 1}};
    const uint32_t samples[6] = {50, 0, 0, 0, 0, 0};
    for (size_t i = 0; i < COUNT_OF(weights); i++) {
        struct mixture mixture;
        struct mixture_request request = request_of(weights[i], samples, 6, 0, 8, false);
        must(mixture_open(&request, &mixture));
        const struct mixture_phase *phase = &mixture.phases[0];
        double counts[6] = {0};
        for (uint32_t r = 0; r < phase->period; r++) {
            cr_assert_eq(phase->ranks[r], (uint32_t)counts[phase->sources[r]]);
            counts[phase->sources[r]]++;
            for (uint32_t k = 0; k < 6; k++)
                cr_assert(fabs(counts[k] - (r + 1.0) * phase->weights[k] / phase->period) < 1);
        }
        mixture_close(&mixture);
    }
}

/* Weights that change at a step change nothing before it, keep the epochs' length, and lose no sample. */
Test(mixture, weights_change_at_a_step)
{
    const uint32_t weights[3] = {4, 3, 1}, samples[3] = {41, 0, 13};
    for (uint64_t step = 1; step < 40; step++) {
        struct mixture_request request = request_of(weights, samples, 3, 0, 8, step % 2);
        struct mixture plain, changed;
        uint64_t next[MIXTURE_SOURCES] = {0};
        must(mixture_open(&request, &plain));
        request.phase_count = 2;
        request.phases[1] = (struct mixture_weights){.step = step, .of = {12, 0, 12}};
        must(mixture_open(&request, &changed));
        cr_expect_eq(plain.positions, changed.positions);
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            check_epoch(&changed, epoch, next);
            for (uint32_t p = 0; p < plain.steps * 8 && p < plain.positions; p++) {
                const uint64_t at = epoch * plain.steps + p / 8;
                const struct mixture_pick was = mixture_at(&plain, epoch, p),
                                          is = mixture_at(&changed, epoch, p);
                cr_assert(at >= step || (was.source == is.source && was.index == is.index));
                cr_assert(at < step || is.source != 1);
            }
        }
        mixture_close(&plain);
        mixture_close(&changed);
    }
}

Test(mixture, wrong_weights_are_refused)
{
    const uint32_t samples[3] = {10, 0, 0};
    const struct {
        uint32_t weights[2], named, size;
        const char *words;
    } cases[] = {{{0, 1}, 0, 10, "the weight of 'source0' is 0"},
                 {{1, 1}, 1, 10, "'source1' has no end"},
                 {{1, 999999}, 0, 4000, "an epoch would have 4000000000 samples"},
                 {{1048577, 1}, 0, 10, "choose rounder weights"},
                 {{1, 1}, 2, 10, "a mixture has 1 to 16 sources"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct mixture_request request = request_of(cases[i].weights, samples, 2, cases[i].named, 4, false);
        uint32_t positions;
        request.sources[0].samples = cases[i].size;
        cr_expect_eq(mixture_count(&request, &positions), STATUS_USAGE);
        cr_expect(strstr(status_text(), cases[i].words), "%s", status_text());
    }
    struct mixture_request request = request_of((const uint32_t[]){1, 1, 1}, samples, 3, 0, 4, false);
    uint32_t positions;
    request.phase_count = 2;
    request.phases[1] = (struct mixture_weights){.step = 5, .of = {1, 2, 3}};
    cr_expect_eq(mixture_count(&request, &positions), STATUS_USAGE);
    cr_expect(strstr(status_text(), "the weights from step 5 on give 'source0' another share"), "%s",
              status_text());
    request.phases[1] = (struct mixture_weights){.step = 0, .of = {1, 2, 0}};
    cr_expect_eq(mixture_count(&request, &positions), STATUS_USAGE);
    cr_expect(strstr(status_text(), "must ascend"), "%s", status_text());
}

/* ---- The stream ---- */

/* A generator whose sample n has the bytes of n, and the label n % 7. */
static enum status make_numbers(struct generator *generator, const struct generator_numbers *numbers,
                                uint32_t count, void *samples, const struct generator_targets *targets,
                                void *stream)
{
    (void)generator, (void)stream;
    for (uint32_t i = 0; i < count; i++) {
        memset((uint8_t *)samples + i * 1200, (int)(numbers->list[i] % 251), 1200);
        targets->labels[i] = (int64_t)(numbers->list[i] % 7);
    }
    return STATUS_OK;
}

static uint64_t no_memory(const struct generator *generator)
{
    (void)generator;
    return 0;
}

static void close_nothing(struct generator *generator)
{
    (void)generator;
}

static const struct generator_type numbers_type = {make_numbers, no_memory, close_nothing};
static struct generator numbers_generator = {&numbers_type};

/* A rank's part of the positions of an epoch. */
struct ranks {
    const struct mixture *mixture;
    uint32_t rank, count;
};

static uint32_t list_positions(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const struct ranks *ranks = context;
    const struct partition partition = {.rank = ranks->rank, .ranks = ranks->count, .strong = true};
    const struct share share =
        partition_step(&partition, ranks->mixture->positions, ranks->mixture->request.batch, (uint32_t)step);
    (void)epoch;
    for (uint32_t i = 0; i < share.count; i++)
        numbers[i] = (uint32_t)(step * ranks->mixture->request.batch + share.first + i);
    return (uint32_t)share.count;
}

/* A mixture of two data sets and numbers. */
struct mixed {
    struct opened sets[2];
    struct mixture mixture;
};

static void open_mixed(struct mixed *mixed, bool drop_last)
{
    const uint32_t weights[3] = {5, 2, 3};
    open_set(&mixed->sets[0], "a");
    open_set(&mixed->sets[1], "b");
    const uint32_t samples[3] = {mixed->sets[0].dataset.sample_count, mixed->sets[1].dataset.sample_count, 0};
    struct mixture_request request = request_of(weights, samples, 3, 0, 11, drop_last);
    request.sources[1].label_offset = 100;
    request.sources[2].label_offset = 200;
    must(mixture_open(&request, &mixed->mixture));
}

static void close_mixed(struct mixed *mixed)
{
    mixture_close(&mixed->mixture);
    dataset_close(&mixed->sets[0].dataset);
    dataset_close(&mixed->sets[1].dataset);
}

static struct stream *start_mixed(struct mixed *mixed, const struct ranks *ranks, int threads,
                                  enum set_stream_error on_error)
{
    struct mixture_stream_request request = {.mixture = &mixed->mixture, .sample_bytes = 1200};
    struct stream *stream;
    const struct stream_plan plan = {
        .steps = mixed->mixture.steps, .capacity = 11, .list = list_positions, .context = ranks};
    must(mixture_plans_open(&mixed->mixture, &plan, &request.plans));
    for (uint32_t k = 0; k < 2; k++) {
        struct set_stream_request *set = &mixed->sets[k].request;
        set->plan = mixture_plan_of(request.plans, k);
        set->copies = mixture_copies(&mixed->mixture, k);
        set->threads = threads;
        set->on_error = on_error;
        must(set_stream_open(set, &request.streams[k]));
    }
    const struct generated_stream_request generated = {.generator = &numbers_generator,
                                                       .number = mixture_sample,
                                                       .count = 1,
                                                       .sample_bytes = 1200,
                                                       .type = DTYPE_U8,
                                                       .plan = mixture_plan_of(request.plans, 2)};
    must(generated_stream_open(&generated, &request.streams[2]));
    must(mixture_stream_open(&request, &stream));
    return stream;
}

static void make_sets(void)
{
    EXPECT(0, "$P --prepare a --from synth --samples 53 --classes 5 --res 20 --store shards --shards 2 && "
              "$P --prepare b --from synth --samples 17 --classes 5 --res 20 --seed 9 --store shards");
}

/* The batches of all ranks, joined, are those of one rank, from any step on. */
Test(mixture, batches_do_not_depend_on_ranks_threads_and_resumes)
{
    make_sets();
    for (int drop_last = 0; drop_last < 2; drop_last++) {
        struct mixed mixed;
        open_mixed(&mixed, drop_last);
        const uint64_t steps = mixed.mixture.steps, all = 2 * steps + 1;
        const struct ranks alone = {&mixed.mixture, 0, 1};
        struct stream *stream = start_mixed(&mixed, &alone, 2, SET_STREAM_FAIL);
        struct record whole = take(stream, all);
        stream_close(stream);
        uint32_t offsets[3] = {0};
        for (uint32_t i = 0; i < whole.count; i++)
            offsets[whole.labels[i] / 100]++;
        cr_expect(offsets[0] > 0 && offsets[1] > 0 && offsets[2] > 0);
        for (uint32_t count = 1; count <= 5; count++)
            for (uint64_t begin = 0; begin < all; begin += count) {
                struct stream *parts[5];
                struct ranks ranks[5];
                for (uint32_t r = 0; r < count; r++) {
                    ranks[r] = (struct ranks){&mixed.mixture, r, count};
                    parts[r] = start_mixed(&mixed, &ranks[r], 1 + (int)r % 2, SET_STREAM_FAIL);
                    must(stream_seek(parts[r], (struct stream_position){begin / steps, begin % steps}));
                }
                struct record joined = {.count = 0};
                for (uint64_t step = begin; step < all; step++)
                    for (uint32_t r = 0; r < count; r++) {
                        struct stream_batch batch;
                        must(stream_next(parts[r], &batch));
                        cr_assert(batch.epoch == step / steps && batch.step == step % steps &&
                                  batch.last == ((step + 1) % steps == 0));
                        add(&joined, &batch);
                        must(stream_release(parts[r], &batch, NULL));
                    }
                const uint32_t skipped = whole.count - joined.count;
                const struct record rest = {whole.values + skipped * whole.sample_bytes,
                                            whole.labels + skipped,
                                            whole.numbers + skipped,
                                            joined.count,
                                            whole.sample_bytes,
                                            0};
                cr_assert(same(&rest, &joined), "%u ranks from step %lu on differ", count,
                          (unsigned long)begin);
                forget(&joined);
                for (uint32_t r = 0; r < count; r++)
                    stream_close(parts[r]);
            }
        forget(&whole);
        close_mixed(&mixed);
    }
}

/* A broken sample of a source is masked, or ends the stream with the name of the source, until a seek. */
Test(mixture, a_broken_sample_is_masked_or_ends_the_stream)
{
    make_sets();
    EXPECT(0,
           "mkdir x && cd x && for i in ../b/*.tar; do tar -xf $i; done && "
           "printf broken > $(ls *.png | head -n 1) && tar -cf ../b.tar --sort=name * && cd .. && rm -r b && "
           "mkdir b && mv b.tar b/");
    for (int mask = 0; mask < 2; mask++) {
        struct mixed mixed;
        struct stream_batch batch;
        enum status result = STATUS_OK;
        uint32_t masked = 0, labels = 0;
        open_mixed(&mixed, false);
        const struct ranks alone = {&mixed.mixture, 0, 1};
        struct stream *stream = start_mixed(&mixed, &alone, 2, mask ? SET_STREAM_MASK : SET_STREAM_FAIL);
        for (uint64_t i = 0; i < 3 * mixed.mixture.steps && result == STATUS_OK; i++) {
            result = stream_next(stream, &batch);
            if (result != STATUS_OK)
                break;
            masked += batch.masked;
            for (uint32_t j = 0; j < batch.samples.count; j++)
                labels += batch.labels[j] == STREAM_MASKED;
            must(stream_release(stream, &batch, NULL));
        }
        cr_expect_eq(result, mask ? STATUS_OK : STATUS_FAILED);
        cr_expect(mask ? masked > 0 && masked == labels
                       : strstr(status_text(), "source 'source1' of the mixture: ") != NULL,
                  "%s", status_text());
        if (!mask) {
            cr_expect_eq(stream_next(stream, &batch), STATUS_FAILED);
            must(stream_seek(stream, (struct stream_position){0, 0}));
            cr_expect(stream_next(stream, &batch) == STATUS_OK || strstr(status_text(), "source1"));
        }
        stream_cancel(stream);
        stream_close(stream);
        close_mixed(&mixed);
    }
}

/* ---- --mix ---- */

static enum status parse(const char *mix, const char *epoch, const char *weights_at, struct data_mix *found)
{
    const struct data_mix_texts texts = {.mix = mix, .epoch = epoch, .weights_at = weights_at};
    return data_mix_parse(&texts, found);
}

Test(mixture, texts_are_read_from_the_right)
{
    struct data_mix mix;
    must(parse("a=s3://bucket/x:y/:0.5,b=http://h:8080/d,e/:0.25,synth:0.25", "b", "7:1,1,0/9:0.5,0.5,1",
               &mix));
    cr_expect(mix.count == 3 && mix.named == 1 && mix.generated == 2 && !mix.automatic);
    cr_expect_str_eq(mix.sources[0].path, "s3://bucket/x:y/");
    cr_expect_str_eq(mix.sources[1].path, "http://h:8080/d,e/");
    cr_expect(mix.sources[0].weight == 5000 && mix.sources[1].weight == 2500);
    cr_expect(mix.phase_count == 3 && mix.phases[1].step == 7 && mix.phases[2].of[2] == 10000);
    data_mix_free(&mix);
    must(parse("synth:auto,load", NULL, NULL, &mix));
    cr_expect(mix.automatic && mix.named == 1 && mix.phases[0].of[0] == 0 && mix.phases[0].of[1] > 0);
    data_mix_free(&mix);
}

Test(mixture, wrong_texts_are_refused)
{
    static const char *const cases[][4] = {
        {"", NULL, NULL, "does not begin with the name of a source"},
        {"load", NULL, NULL, "'load' has no weight"},
        {"load:x", NULL, NULL, "'load:x' has a colon, but after it no weight: a number from 0 to 1000"},
        {"load:0.12345,synth:1", NULL, NULL, "'load:0.12345' has a colon, but after it no weight"},
        {"load:1001,synth:1", NULL, NULL, "'load:1001' has a colon, but after it no weight"},
        {"load:1,b=d:1e3", NULL, NULL, "'b' has no weight; write b=URL:WEIGHT, a number from 0 to 1000"},
        {"synth:-1,load:1", NULL, NULL, "'synth:-1' has a colon, but after it no weight"},
        {"load:1,load:2", NULL, NULL, "has the name of another source"},
        {"load:1,other:2", NULL, NULL, "is not a source"},
        {"load:1,a=:2", NULL, NULL, "has no folder and no URL"},
        {"load=x:1", NULL, NULL, "choose another name"},
        {"synth:1", NULL, NULL, "names no source that is read"},
        {"load:auto,synth", NULL, NULL, "which is for synth"},
        {"load:1,a=http://h/x?key=1:2", NULL, NULL, "a secret part"},
        {"load:1,a_name_that_is_much_longer_than_others=x:1", NULL, NULL, "at most 31"},
        {"load:1,synth:1", "other", NULL, "--mix-epoch other"},
        {"load:1,synth:1", "synth", NULL, "has no end"},
        {"load:1,synth:1", NULL, "5:1", "has too few weights"},
        {"load:1,synth:1", NULL, "5:1,1,1", "has too many weights"},
        {"load:1,synth:1", NULL, "0:1,1", "a step is a whole number"},
        {"load:1,synth:1", NULL, "5:1,x", "that is no number"},
        {"load:1,synth:1", NULL, "5", "a step is a whole number"},
        {"load:1,synth:1", NULL, "5:1,1/", "a step is a whole number"},
        {"synth:auto,load", NULL, "5:1,1", "contradicts synth:auto"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct data_mix mix;
        cr_expect_eq(parse(cases[i][0], cases[i][1], cases[i][2], &mix), STATUS_USAGE, "%s", cases[i][0]);
        cr_expect(strstr(status_text(), cases[i][3]), "%s: %s", cases[i][0], status_text());
        data_mix_free(&mix);
    }
}

/* Texts of random characters are either refused with a message or describe a mixture with valid sources. */
Test(mixture, random_texts_do_no_harm)
{
    static const char characters[] = "load:synt,=.0123456789auo/-_?x@ ";
    uint64_t state = 1;
    for (int i = 0; i < 20000; i++) {
        char texts[2][48] = {"load:1,", ""};
        struct data_mix mix;
        for (int t = 0; t < 2; t++) {
            const size_t first = t == 0 && i % 2 ? 7 : 0, size = first + (state >> 40) % 40;
            for (size_t c = first; c < size; c++) {
                state = stream_hash(state + c + 1);
                texts[t][c] = characters[state % (sizeof characters - 1)];
            }
            texts[t][size] = '\0';
        }
        const enum status result = parse(texts[0], NULL, i % 3 ? NULL : texts[1], &mix);
        cr_assert(result == STATUS_OK || result == STATUS_USAGE);
        cr_assert(result != STATUS_OK || (mix.count > 0 && mix.named < mix.count &&
                                          mix.named != mix.generated && mix.phase_count <= MIXTURE_PHASES));
        data_mix_free(&mix);
    }
}

/* ---- Training ---- */

#if defined HAVE_XXHASH && defined HAVE_PNG
#define MIXED                                                                                             \
    "$P --variant train-naive --model logreg --feed mixed --out-res 12 --channels 1 --classes 5 --batch " \
    "8 --format csv --data a "

Test(mixture, training_verifies_that_each_sample_is_read_once)
{
    make_sets();
    EXPECT_PRINTS(0, "load=0.3 synth=0.7", MIXED "--mix load:0.3,synth:0.7 --epochs 2 --verify");
    EXPECT_PRINTS(0, "a=0.25 b=0.25 synth=0.5",
                  MIXED "--mix load:0.5,b=b/:0.5,synth:1 --epochs 2 --verify --drop-last | "
                        "sed s/load=0.25/a=0.25/");
    EXPECT_PRINTS(0, ",yes",
                  MIXED "--mix b=b/:0.3,load:0.5,synth:0.2 --mix-labels offset --mix-epoch b "
                        "--epochs 3 --verify --mix-weights-at 3:0.3,0.2,0.5");
    EXPECT_PRINTS(0, "--mix-weights-at 3:1,2,1/90:1,1,2: the last weights are not reached within the",
                  MIXED "--mix load:1,b=b/:1,synth:2 --epochs 1 --dry-run --mix-weights-at 3:1,2,1/90:1,1,2");
    /* --repeats of a recipe has no effect. */
    EXPECT(0, MIXED "--mix load:0.5,synth:0.5 --recipe deit --epochs 2 --lr-warmup 1 --std none --verify");
    EXPECT(0, MIXED "--mix load:0.5,synth:0.5 --recipe deit --epochs 2 --lr-warmup 1 --std none --dry-run | "
                    "{ ! grep -e --repeats; }");
}

/* Tests the network on the test set of the training: cut out in the same way, and with all its classes, which
 * may be more than the --classes of the generated images. */
Test(mixture, inference_has_the_test_set_of_the_training)
{
    make_sets();
    EXPECT(0, "$P --variant train-naive --model logreg --feed mixed --out-res 12 --channels 1 --classes 2 "
              "--batch 8 --data a --mix load:0.5,synth:0.5 --epochs 1 --fit random-resized-crop "
              "--checkpoint k");
    EXPECT(0, "$P --variant infer-naive --checkpoint k --loops 1 >out 2>&1");
    EXPECT(1, "grep 'not the test samples' out");
}

/* Training continues from a checkpoint within an epoch with the same batches. */
Test(mixture, training_resumes_within_an_epoch)
{
    make_sets();
#define LONG MIXED "--mix load:0.5,b=b/:0.3,synth:0.2 --mix-weights-at 9:0.5,0.1,0.4 --epochs 3 "
    EXPECT(0, LONG "--checkpoint k --checkpoint-steps 5 --keep 100 --export whole.safetensors");
    for (const char *const *name = (const char *const[]){"epoch-000000.step-0000000005.ckpt",
                                                         "epoch-000001.ckpt", "epoch-000002.ckpt", NULL};
         *name; name++) {
        EXPECT(0, "rm -rf again && mkdir again && cp k/%s again", *name);
        EXPECT_PRINTS(0, ": continuing", LONG "--checkpoint again --resume --export again.safetensors");
        EXPECT(0, "cmp whole.safetensors again.safetensors");
    }
    expect_refused(2, "mix=load:0.5,b=b/:0.3,synth:0.2 in the checkpoint",
                   MIXED "--mix load:0.5,b=b/:0.2,synth:0.3 --epochs 3 --checkpoint again --resume");
}

/* As with --feed load, nvJPEG's own streams must not wait for the training steps. */
Test(mixture, streams_of_a_device_have_all_hardware_queues)
{
    static const char name[] = "CUDA_DEVICE_MAX_CONNECTIONS";
    const char *words[] = {"fdsl-bench", "--variant", "train-naive", "--feed",    "mixed", "--mix",
                           "load:1",     "--data",    "a",           "--decoder", "cpu",   NULL};
    for (int cpu = 1; cpu >= 0; cpu--) {
        char *argv[COUNT_OF(words)];
        struct settings settings;
        memcpy(argv, words, sizeof words);
        unsetenv(name);
        must(settings_read(&settings, &(struct config){.argc = cpu ? 11 : 9, .argv = argv}));
        cr_expect(cpu ? !getenv(name) : getenv(name) && strcmp(getenv(name), "32") == 0);
        settings_free(&settings);
    }
}

/* The share is chosen once, is in the row, and stays after a resume. */
Test(mixture, the_share_is_chosen_once)
{
    make_sets();
#define AUTO MIXED "--mix synth:auto,load --checkpoint k --checkpoint-steps 2 --keep 9 "
    EXPECT_PRINTS(0, "--mix: the share of the samples that are read is ", AUTO "--epochs 1 | tee first");
    EXPECT(0, AUTO "--epochs 2 --resume > second");
    EXPECT(1, "grep -q 'the share of the samples' second");
    EXPECT(
        0,
        "shares() { grep -o 'synth=[0-9.]* load=[0-9.]*' $1 | tail -n 1; }; test -n \"$(shares first)\" && "
        "test \"$(shares first)\" = \"$(shares second)\"");
    EXPECT(0, MIXED "--mix synth:auto,load --dry-run");
}

/* The folder keeps the orbits of the generated images, as with --data synth. */
Test(mixture, orbits_are_kept)
{
    make_sets();
#define FRACTALS                                                                                            \
    "$P --variant train-naive --model logreg --feed mixed --out-res 16 --channels 1 --classes 5 --batch 8 " \
    "--data a --mix load:0.5,synth:0.5 --formula fractaldb --cache-dir kept --export "
    EXPECT(0, FRACTALS "one.safetensors && ls kept | grep -q .");
    EXPECT(0, "touch -d '2 days ago' kept/* && " FRACTALS "two.safetensors && "
              "cmp one.safetensors two.safetensors && test -z \"$(find kept -type f -newermt yesterday)\"");
    expect_refused(2, "--cache-dir needs data at a URL, images of FractalDB or shards",
                   MIXED "--mix load:0.5,synth:0.5 --cache-dir kept");
}

Test(mixture, options_without_effect_are_refused)
{
    static const char *const cases[][2] = {
        {"--mix load:1,synth:1 --feed load --data a", "--mix needs --feed mixed"},
        {"--feed mixed --data a", "--feed mixed needs --mix"},
        {"--feed mixed --mix load:1,synth:1 --data digits", "give --data a folder or a URL"},
        {"--feed mixed --mix b=b/:1,synth:1 --data a", "--mix does not name it"},
        {"--feed mixed --mix load:1,b=b/:1 --data a --preset uji", "--preset needs"},
        {"--feed mixed --mix load:1,synth:1 --data a --out-res 12 --res 20",
         "--res contradicts --out-res: a mixture "},
        {"--feed mixed --mix load:1,synth:1 --data a --out-res 12 --repeats 2", "--repeats needs"},
        {"--feed mixed --mix load:1,synth:1 --data a --fresh", "--fresh needs"},
        {"--feed mixed --mix load:1,synth:1 --data a --on-error skip", "mask"},
        {"--feed mixed --mix load:1,synth:1 --data a --export-state s", "--export-state needs --feed load"},
        {"--feed mixed --mix load:1,synth:1 --data a --res 24", "give images one size with --out-res"},
        {"--feed mixed --mix load:1,b=none/:1 --data a", "none"},
        {"--feed mixed --mix synth:1,load:1 --data a --mix-labels offset", "must be the first source"},
        {"--feed mixed --mix load:1,synth:1 --mix-weights-at 4:1,2 --data a --out-res 12 --channels 1",
         "--mix-weights-at: weights can change only among three sources"},
        {"--feed mixed --mix load:1,b=b/:1,synth:1 --mix-weights-at 4:2,1,1 --data a --out-res 12 --channels "
         "1",
         "--mix-weights-at: the weights from step 4 on give 'load' another share"},
        {"--feed mixed --mix load:1,b=b/:1,synth:1 --mix-weights-at 4:2,2,2 --data a --out-res 12 --channels "
         "1",
         "--mix-weights-at: the weights from step 4 on give all sources the same shares"},
    };
    make_sets();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run("$P --variant train-naive --model logreg %s", cases[i][0]);
        expect_line(2, cases[i][1]);
    }
}
#endif
