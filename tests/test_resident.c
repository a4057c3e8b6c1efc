/* Tests of streams that keep the files of the first samples in memory (data/resident.h). The reference is the
 * stream that keeps none. */
#include "stream_support.h"

#include <pthread.h>

#include "data/resident.h"

TestSuite(resident, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- Which samples ---- */

/* Adds up the sizes of the members of the first samples, one after another. */
Test(resident, the_first_samples_that_fit_are_kept)
{
    enum { COUNT = 9 };
    struct dataset_member members[2 * COUNT] = {{0}};
    struct dataset_sample samples[COUNT] = {{0}};
    const struct dataset dataset = {.members = members, .samples = samples, .sample_count = COUNT};
    static const uint32_t chosen[] = {8, 3, 3, 0};
    for (uint32_t i = 0; i < COUNT; i++) {
        members[2 * i].size = 16 * (i + 1) - i % 3; /* 16 (i + 1) bytes with its padding */
        members[2 * i + 1].size = 1;
        samples[i] =
            (struct dataset_sample){.member = 2 * i, .members = 2, .image = i == 5 ? 2 : 0, .label = 1};
    }
    for (int labels = 0; labels < 2; labels++)
        for (int some = 0; some < 2; some++) {
            const struct resident_samples all = {&dataset, some ? chosen : NULL, some ? 4 : COUNT, labels};
            uint64_t needed = 0, bytes;
            for (uint32_t n = 0; n <= all.count; n++) {
                cr_expect_eq(resident_fit(&all, needed, &bytes), n);
                cr_expect_eq(bytes, needed);
                if (n == all.count)
                    break;
                const uint32_t i = some ? chosen[n] : n;
                const uint64_t before = needed;
                needed += 8 + (i == 5 ? 0 : 16 * (i + 1)) + (labels ? 8 + 16 : 0);
                cr_expect_eq(resident_fit(&all, needed - 1, &bytes), n);
                cr_expect_eq(bytes, before);
            }
            cr_expect_eq(resident_fit(&all, RESIDENT_ALL, &bytes), all.count);
            cr_expect_eq(bytes, needed);
        }
}

/* A member is written once. Until then, and after a failure, it is not found. */
Test(resident, bytes_are_found_when_they_are_complete)
{
    struct dataset_member members[4] = {{.size = 3}, {.size = 17}, {.size = 0}, {.size = 5}};
    struct dataset_sample samples[2] = {{.member = 0, .members = 2, .image = 0, .label = 1},
                                        {.member = 2, .members = 2, .image = 0, .label = 1}};
    const struct dataset dataset = {.members = members, .samples = samples, .sample_count = 2};
    const struct resident_samples all = {&dataset, NULL, 2, true};
    struct resident resident;
    must(resident_open(&all, RESIDENT_ALL, &resident));
    cr_assert_eq(resident.count, 2);
    for (uint32_t n = 0; n < 2; n++)
        for (int part = RESIDENT_IMAGE; part <= RESIDENT_LABEL; part++) {
            const uint64_t size = members[2 * n + (uint32_t)part].size;
            for (int complete = 0; complete < 2; complete++) {
                cr_expect_null(resident_find(&resident, n, part));
                uint8_t *place = resident_begin(&resident, n, part);
                cr_assert(place && (uintptr_t)place % RESIDENT_ALIGN == 0);
                cr_expect_null(resident_begin(&resident, n, part), "another thread writes");
                cr_expect_null(resident_find(&resident, n, part));
                memset(place, (int)(16 * n) + part, size);
                resident_end(&resident, n, part, complete);
            }
            cr_expect_null(resident_begin(&resident, n, part), "it is there");
        }
    for (uint32_t n = 0; n < 2; n++)
        for (int part = RESIDENT_IMAGE; part <= RESIDENT_LABEL; part++)
            for (uint64_t i = 0; i < members[2 * n + (uint32_t)part].size; i++)
                cr_expect_eq(resident_find(&resident, n, part)[i], 16 * n + (uint32_t)part);
    cr_expect(!resident_find(&resident, 2, RESIDENT_IMAGE) && !resident_begin(&resident, 2, RESIDENT_IMAGE));
    resident_close(&resident);
}

enum { PLACES = 20000 };

/* Begins all members of `resident`, and returns how many this thread may write. */
static void *begin_all(void *resident)
{
    uintptr_t count = 0;
    for (uint32_t n = 0; n < PLACES; n++)
        count += resident_begin(resident, n, RESIDENT_IMAGE) != NULL;
    return (void *)count;
}

/* Of several threads that begin a member at the same time, one may write it. */
Test(resident, one_thread_writes_a_member)
{
    static struct dataset_member members[PLACES];
    static struct dataset_sample samples[PLACES];
    const struct dataset dataset = {.members = members, .samples = samples, .sample_count = PLACES};
    const struct resident_samples all = {&dataset, NULL, PLACES, false};
    struct resident resident;
    for (uint32_t i = 0; i < PLACES; i++)
        samples[i] = (struct dataset_sample){.member = i, .members = 1, .label = 1};
    for (int trial = 0; trial < 50; trial++) {
        pthread_t threads[3];
        uintptr_t sum = 0;
        must(resident_open(&all, RESIDENT_ALL, &resident));
        for (size_t t = 0; t < COUNT_OF(threads); t++)
            cr_assert_eq(pthread_create(&threads[t], NULL, begin_all, &resident), 0);
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            void *count;
            pthread_join(threads[t], &count);
            sum += (uintptr_t)count;
        }
        cr_expect_eq(sum, PLACES, "trial %d: %zu", trial, (size_t)sum);
        resident_close(&resident);
    }
}

Test(resident, more_memory_than_there_is_is_refused)
{
    struct dataset_member member = {.size = UINT64_C(1) << 60};
    struct dataset_sample sample = {.members = 1, .label = 1};
    const struct dataset dataset = {.members = &member, .samples = &sample, .sample_count = 1};
    const struct resident_samples all = {&dataset, NULL, 1, false};
    struct resident resident;
    cr_expect_eq(resident_open(&all, RESIDENT_ALL, &resident), STATUS_TOO_LARGE);
    cr_expect(strstr(status_text(), "lower --resident-bytes"), "%s", status_text());
    resident_close(&resident);
    must(resident_open(&all, 1000, &resident));
    cr_expect_eq(resident.count, 0);
    resident_close(&resident);
}

#if defined HAVE_PNG && defined HAVE_XXHASH

/* ---- Data sets ---- */

static struct opened opened;

/* Writes 251 digits: images as class folders (f) and shards (m), and arrays as shards (a) and, without an
 * index, (p). */
static void prepare(void)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples 251 --store imagefolder && mkdir f && cp -r all/*/ f && "
           "$P --prepare m --from dataset --source f --store shards --shards 3 --name m && "
           "$P --prepare a --from digits --samples 251 --store shards --shards 3 --encode npy --name m && "
           "mkdir p && cp a/*.tar p");
}

/* Opens a set: images become 20 * 20 pixels, arrays keep their size. */
static void open_named(const char *name)
{
    open_set(&opened, name);
    opened.request.fit.how = FIT_RANDOM_RESIZED_CROP;
    if (*name == 'a' || *name == 'p') {
        opened.request.fit.res = 0;
        opened.request.channels = 1;
        opened.request.height = opened.request.width = 28;
    }
}

/* ---- A consumer that keeps samples ---- */

/* The first samples that are delivered, as a device keeps them (request.device_bytes). */
static struct {
    uint8_t *values;
    uint32_t room, count; /* samples */
    uint8_t there[300];   /* by sample */
    uint32_t swapped;     /* planted fault: 1: places 0 and 1 are exchanged */
    uint64_t left_out;    /* samples that were delivered without values */
    uint64_t read;        /* hash of stream_batch.read of all samples */
} keeper;

/* Opens a set whose consumer keeps `room` samples; start() follows. Random crops cannot be kept. */
static void open_kept(const char *name, uint32_t room)
{
    open_named(name);
    opened.request.fit.how = FIT_RESIZE;
    opened.request.device_bytes = 1;
    free(keeper.values);
    memset(&keeper, 0, sizeof keeper);
    keeper.room = room;
    keeper.values = calloc(300, 3 * 400);
}

/* Copies samples that were kept into the batch, and keeps others. */
static void keep_batch(const struct stream_batch *batch)
{
    const struct batch *samples = &batch->samples;
    const uint64_t *places = set_stream_places(opened.stream, batch);
    for (uint32_t i = 0; i < samples->count; i++) {
        const uint32_t number = batch->numbers[i] % set_stream_request_of(opened.stream)->count;
        uint8_t *values = (uint8_t *)samples->values + i * samples->stride;
        keeper.read = stream_hash(keeper.read + batch->read[i]);
        if (places[i] != SET_STREAM_LOADED) {
            cr_assert(places[i] < keeper.count && keeper.there[number]);
            keeper.left_out++;
            const uint64_t place = places[i] < 2 ? places[i] ^ keeper.swapped : places[i];
            memcpy(values, keeper.values + place * samples->stride, samples->stride);
        } else if (keeper.count < keeper.room && !keeper.there[number] &&
                   samples->labels[i] != STREAM_MASKED) {
            memcpy(keeper.values + keeper.count * samples->stride, values, samples->stride);
            keeper.there[number] = 1;
            set_stream_keep(opened.stream, batch, i, keeper.count++, NULL);
        }
    }
}

/* As take(). */
static struct record take_kept(uint64_t batches)
{
    struct record record = {.count = 0};
    for (uint64_t i = 0; i < batches; i++) {
        struct stream_batch batch;
        must(stream_next(opened.stream, &batch));
        keep_batch(&batch);
        add(&record, &batch);
        must(stream_release(opened.stream, &batch, NULL));
    }
    return record;
}

/* ---- Batches ---- */

/* Returns the memory that all samples of the set need, or, with a share below 1, about that share of it. */
static uint64_t bytes_of(double share)
{
    const struct resident_samples samples = {&opened.dataset, NULL, opened.dataset.sample_count, true};
    uint64_t bytes;
    cr_assert_eq(resident_fit(&samples, RESIDENT_ALL, &bytes), opened.dataset.sample_count);
    return (uint64_t)(share * (double)bytes);
}

/* Returns the size of the members of the samples from number `first` on. */
static uint64_t members_from(uint32_t first)
{
    uint64_t bytes = 0;
    for (uint32_t i = first; i < opened.dataset.sample_count; i++) {
        const struct dataset_sample *sample = &opened.dataset.samples[i];
        const struct dataset_member *members = &opened.dataset.members[sample->member];
        bytes += members[sample->image].size;
        bytes += sample->label < sample->members ? members[sample->label].size : 0;
    }
    return bytes;
}

/* Takes three epochs. Sets `*stats` to the counts at the end. */
static struct record take_three(const char *name, double share, int threads, struct stream_stats *stats)
{
    open_named(name);
    opened.request.threads = threads;
    opened.request.resident_bytes = share > 1 ? RESIDENT_ALL : bytes_of(share);
    start(&opened);
    struct record record = take(opened.stream, 3 * opened.request.plan.steps);
    stream_stats(opened.stream, stats);
    return record;
}

/* Each sample that is kept is read once, and the others once per epoch and again in the batches ahead. */
static void expect_stats(const struct stream_stats *with, const struct stream_stats *without, double share)
{
    const struct resident_samples samples = {&opened.dataset, NULL, opened.dataset.sample_count, true};
    uint64_t used;
    const uint32_t kept = resident_fit(&samples, opened.request.resident_bytes, &used);
    const uint64_t rest = members_from(kept), all = members_from(0);
    cr_expect_eq(with->resident, kept);
    cr_expect(used <= opened.request.resident_bytes && with->memory_bytes == without->memory_bytes + used,
              "%g: %llu, %llu and %llu bytes", share, (unsigned long long)with->memory_bytes,
              (unsigned long long)without->memory_bytes, (unsigned long long)used);
    cr_expect(with->bytes >= all + 2 * rest && with->bytes <= all + 3 * rest, "%g: %llu of %llu bytes", share,
              (unsigned long long)with->bytes, (unsigned long long)all);
    cr_expect(share < 1 ? kept < opened.dataset.sample_count : with->bytes == all);
}

/* Arrays are read directly into their batch; the other sets are decoded. */
Test(resident, any_number_of_bytes_gives_the_same_batches)
{
    static const char *const names[] = {"m", "f", "a", "p"};
    static const double shares[] = {0.0001, 0.3, 0.9, 1, 2};
    prepare();
    for (size_t n = 0; n < COUNT_OF(names); n++) {
        struct stream_stats stats, without;
        struct record wanted = take_three(names[n], 0, 1, &without);
        cr_assert_eq(wanted.count, 3 * 251);
        cr_expect_eq(without.resident, 0);
        close_set(&opened);
        for (size_t s = 0; s < COUNT_OF(shares); s++)
            for (int threads = 1; threads <= 3; threads++) {
                struct record found = take_three(names[n], shares[s], threads, &stats);
                cr_expect(same(&wanted, &found), "%s, share %g, %d threads", names[n], shares[s], threads);
                if (threads == 1)
                    expect_stats(&stats, &without, shares[s]);
                forget(&found);
                close_set(&opened);
            }
        forget(&wanted);
    }
}

/* The batches of a consumer that keeps samples, of any number of them, also after a seek. What it keeps is
 * not read again, except in batches that were prepared before. */
Test(resident, samples_that_the_consumer_keeps_are_not_read_again)
{
    static const char *const names[] = {"m", "f", "a", "p"};
    static const uint32_t rooms[] = {0, 1, 125, 251, 300};
    prepare();
    for (size_t n = 0; n < COUNT_OF(names); n++) {
        open_kept(names[n], 0);
        start(&opened);
        const uint64_t steps = opened.request.plan.steps, all = members_from(0);
        struct record wanted = take_kept(3 * steps);
        const uint64_t read = keeper.read;
        cr_expect_eq(keeper.left_out, 0);
        close_set(&opened);
        for (size_t r = 0; r < COUNT_OF(rooms); r++)
            for (int threads = 1; threads <= 3; threads++) {
                struct stream_stats stats;
                const uint32_t kept = rooms[r] < 251 ? rooms[r] : 251;
                open_kept(names[n], rooms[r]);
                opened.request.threads = threads;
                start(&opened);
                struct record found = take_kept(3 * steps);
                cr_expect(same(&wanted, &found) && keeper.read == read, "%s, %u kept, %d threads", names[n],
                          kept, threads);
                stream_stats(opened.stream, &stats);
                const uint32_t ahead = 3 * 16; /* samples of batches that are listed before one is kept */
                cr_expect(keeper.count == kept && keeper.left_out <= 2 * kept &&
                              keeper.left_out + ahead >= 2 * kept,
                          "%s: %u of %u kept, %llu not read", names[n], keeper.count, kept,
                          (unsigned long long)keeper.left_out);
                cr_expect(kept < 251 || stats.bytes <= all + all / 4, "%s: %llu of %llu bytes", names[n],
                          (unsigned long long)stats.bytes, (unsigned long long)all);
                must(stream_seek(opened.stream, (struct stream_position){0, 0}));
                struct record again = take_kept(3 * steps);
                cr_expect(same(&wanted, &again));
                forget(&found);
                forget(&again);
                keeper.swapped = 1;
                must(stream_seek(opened.stream, (struct stream_position){0, 0}));
                again = take_kept(steps);
                cr_expect_eq(memcmp(wanted.values, again.values, 251 * again.sample_bytes) != 0, kept > 0);
                forget(&again);
                close_set(&opened);
            }
        forget(&wanted);
    }
}

/* Copies of a sample share what is kept, if the same decoder decodes them. */
Test(resident, copies_that_another_decoder_decodes_are_read)
{
    prepare();
    open_kept("m", 100);
    opened.request.copies = 3;
    opened.request.device_share = 0.5;
    opened.epochs.count = 3 * 251;
    start(&opened);
    for (uint64_t i = 0; i < 3 * opened.request.plan.steps; i++) {
        struct stream_batch batch;
        must(stream_next(opened.stream, &batch));
        const uint64_t *places = set_stream_places(opened.stream, &batch);
        for (uint32_t j = 0; j < batch.samples.count; j++)
            if (places[j] != SET_STREAM_LOADED)
                cr_expect_eq(set_stream_on_device((uint32_t)places[j], 0.5),
                             set_stream_on_device(batch.numbers[j], 0.5));
        for (uint32_t j = 0; j < batch.samples.count; j++)
            if (places[j] == SET_STREAM_LOADED && !keeper.there[batch.numbers[j] % 251]) {
                keeper.there[batch.numbers[j] % 251] = 1;
                set_stream_keep(opened.stream, &batch, j, batch.numbers[j], NULL);
            } else {
                keeper.left_out += places[j] != SET_STREAM_LOADED;
            }
        must(stream_release(opened.stream, &batch, NULL));
    }
    cr_expect(keeper.left_out > 2 * 251 && keeper.left_out < 8 * 251, "%llu",
              (unsigned long long)keeper.left_out);
    close_set(&opened);
}

Test(resident, samples_that_threads_change_are_not_kept)
{
    static const struct image_output output = {.type = DTYPE_U8};
    prepare();
    for (int mixes = 0; mixes < 2; mixes++) {
        open_kept("m", 1);
        if (mixes)
            opened.request.mixing.mixup = 0.5F;
        else
            opened.request.output = &output;
        opened.request.plan = (struct stream_plan){1, 16, list, &opened.epochs, false};
        cr_expect_eq(set_stream_open(&opened.request, &opened.stream), STATUS_USAGE);
        cr_expect(strstr(status_text(), "--resident-device-bytes") &&
                      strstr(status_text(), mixes ? "mixtures" : "--rand-augment"),
                  "%s", status_text());
        close_set(&opened);
    }
}

/* A resumed stream has nothing in memory yet. */
Test(resident, a_stream_continues_anywhere_with_the_same_batches)
{
    struct stream_stats stats;
    prepare();
    struct record wanted = take_three("m", 0, 2, &stats);
    close_set(&opened);
    open_named("m");
    opened.request.resident_bytes = bytes_of(0.5);
    start(&opened);
    const uint64_t steps = opened.request.plan.steps;
    const uint64_t places[] = {2 * steps + 3, 0, steps - 1, steps, 1};
    for (int reopens = 0; reopens < 2; reopens++)
        for (size_t p = 0; p < COUNT_OF(places); p++) {
            const struct stream_position at = {places[p] / steps, places[p] % steps};
            if (reopens) {
                stream_close(opened.stream);
                opened.request.begin = at;
                start(&opened);
            } else {
                must(stream_seek(opened.stream, at));
            }
            const uint64_t first = at.epoch * 251 + at.step * opened.epochs.batch;
            struct record found = take(opened.stream, 3 * steps - places[p]);
            const struct record rest = {.values = wanted.values + first * wanted.sample_bytes,
                                        .labels = wanted.labels + first,
                                        .numbers = wanted.numbers + first,
                                        .count = wanted.count - (uint32_t)first,
                                        .sample_bytes = wanted.sample_bytes};
            cr_expect(same(&found, &rest), "batch %llu", (unsigned long long)places[p]);
            forget(&found);
        }
    close_set(&opened);
    forget(&wanted);
}

/* Repeats of a sample, and samples in another order, share its file. Labels may be given. */
Test(resident, samples_of_a_list_are_kept_by_their_place_in_it)
{
    static uint32_t samples[100], labels[100];
    prepare();
    for (uint32_t i = 0; i < 100; i++) {
        samples[i] = 250 - 2 * i;
        labels[i] = i % 7;
    }
    for (int given = 0; given < 2; given++) {
        struct record records[2];
        for (int kept = 0; kept < 2; kept++) {
            open_named("m");
            opened.request.samples = samples;
            opened.request.labels = given ? labels : NULL;
            opened.request.count = 100;
            opened.request.copies = 3;
            opened.request.lanes = 0;
            opened.epochs.count = 300;
            opened.request.resident_bytes = kept ? bytes_of(0.2) : 0;
            start(&opened);
            records[kept] = take(opened.stream, 2 * opened.request.plan.steps);
            struct stream_stats stats;
            stream_stats(opened.stream, &stats);
            cr_expect(kept ? stats.resident > 30 && stats.resident < 100 : stats.resident == 0, "%llu",
                      (unsigned long long)stats.resident);
            close_set(&opened);
        }
        cr_expect(same(&records[0], &records[1]));
        forget(&records[0]);
        forget(&records[1]);
    }
}

/* ---- Faults ---- */

/* All files are in memory when one changes. The stream must fail within the next epoch, without a batch that
 * differs. */
static void expect_change(bool consumer, const char *name, const char *command, const char *file)
{
    struct stream_batch batch;
    enum status result = STATUS_OK;
    uint64_t at = 0;
    EXPECT(0, "rm -rf xx x; cp -r %s x && rm -f x/y", name);
    open_named(*name == 'a' ? "a" : name);
    opened.request.fit.how = consumer ? FIT_RESIZE : opened.request.fit.how;
    const uint32_t steps = (251 + 15) / 16;
    start(&opened);
    struct record all = take(opened.stream, 2 * steps);
    close_set(&opened);
    EXPECT(0, "rm -rf keep; mv %s keep && mv x %s", name, name);
    if (consumer)
        open_kept(name, 251);
    else
        open_named(name);
    opened.request.resident_bytes = consumer ? 0 : RESIDENT_ALL;
    start(&opened);
    struct record first = consumer ? take_kept(steps) : take(opened.stream, steps);
    EXPECT(0, "%s", command);
    struct record rest = {.count = 0};
    for (; at < steps && (result = stream_next(opened.stream, &batch)) == STATUS_OK; at++) {
        if (consumer)
            keep_batch(&batch);
        add(&rest, &batch);
        must(stream_release(opened.stream, &batch, NULL));
    }
    cr_expect_eq(result, STATUS_FAILED, "%s", command);
    cr_expect(strstr(status_text(), "changed after the data set was opened") && strstr(status_text(), file),
              "%s: %s", command, status_text());
    cr_expect(rest.count < 251 && memcmp(rest.values, all.values + first.count * all.sample_bytes,
                                         rest.count * all.sample_bytes) == 0,
              "%s", command);
    forget(&first);
    forget(&rest);
    forget(&all);
    close_set(&opened);
    EXPECT(0, "rm -rf %s && mv keep %s", name, name);
}

Test(resident, files_that_change_are_failures)
{
    prepare();
    for (int by = 0; by < 2; by++) {
        expect_change(by, "m", "cat m/m-000001.tar >y && cat y >m/m-000001.tar", "m-000001.tar");
        expect_change(by, "m", "cp m/m-000000.tar y && mv y m/m-000000.tar", "m-000000.tar");
        expect_change(by, "m", "rm m/m-000002.tar", "m-000002.tar");
        expect_change(by, "a", "cat a/m-000001.tar >y && cat y >a/m-000001.tar", "m-000001.tar");
        expect_change(by, "f", "for i in f/*/*.png; do cat $i >y && cat y >$i; done", "f/");
        expect_change(by, "f", "rm f/*/*.png", "f/");
    }
}

/* A broken file is masked in each epoch, whether it is in memory or not. */
Test(resident, broken_samples_are_masked_alike)
{
    struct stream_batch batch;
    uint64_t masked[2] = {0, 0};
    prepare();
    EXPECT(0, "for i in $(ls f/*/*.png | awk 'NR %% 30 == 1'); do head -c 90 $i >y && cat y >$i; done");
    for (int kept = 0; kept < 2; kept++) {
        open_named("f");
        opened.request.on_error = SET_STREAM_MASK;
        opened.request.resident_bytes = kept ? RESIDENT_ALL : 0;
        start(&opened);
        for (uint64_t i = 0; i < 3 * opened.request.plan.steps; i++) {
            must(stream_next(opened.stream, &batch));
            for (uint32_t j = 0; j < batch.samples.count; j++)
                masked[kept] +=
                    batch.labels[j] == STREAM_MASKED ? 1000003 * (batch.numbers[j] + 1) * (i + 1) : 0;
            must(stream_release(opened.stream, &batch, NULL));
        }
        struct stream_stats stats;
        stream_stats(opened.stream, &stats);
        cr_expect_eq(stats.masked, 3 * 9, "%llu", (unsigned long long)stats.masked);
        close_set(&opened);
    }
    cr_expect_eq(masked[0], masked[1]);
}

#endif
