/* Tests of streams (core/stream.h), of the order of their samples, and of the stream that reads data sets. */
#include "stream_support.h"

#include <dirent.h>
#include <malloc.h>
#include <math.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "core/timer.h"
#include "data/set_files.h"
#include "train/data.h"

TestSuite(stream, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- The order ---- */

/* The definition of draw_lanes(), computed with arrays. `order` has `count` elements. */
static void order_by_definition(uint64_t seed, uint32_t epoch, uint32_t count, uint32_t lanes,
                                uint32_t shuffle, uint32_t *order)
{
    const uint32_t even = count / (16 * lanes), block = even < 1 ? 1 : even < 256 ? even : 256;
    const uint32_t block_count = (count - 1) / block + 1;
    const struct permutation blocks =
        permutation_begin(draw_lanes_seed(seed, epoch, UINT32_MAX, 0), block_count);
    uint32_t *joined = malloc(count * sizeof *joined), filled = 0, begin = 0;
    for (uint32_t b = 0; b < block_count; b++) {
        const uint32_t first = (uint32_t)permutation_at(&blocks, b) * block;
        for (uint32_t i = first; i < first + block && i < count; i++)
            joined[filled++] = i;
    }
    cr_assert_eq(filled, count);
    for (uint32_t lane = 0; lane < lanes; lane++) {
        const uint32_t length = count / lanes + (lane < count % lanes), window = shuffle / lanes;
        for (uint32_t i = 0; i < length; i++) {
            const uint32_t w = i / window, left = length - w * window;
            const struct permutation within =
                permutation_begin(draw_lanes_seed(seed, epoch, lane, w), left < window ? left : window);
            order[i * lanes + lane] =
                joined[begin + w * window + (left < 2 ? 0 : permutation_at(&within, i - w * window))];
        }
        begin += length;
    }
    free(joined);
}

/* A small set in class folders: the first step must not have only the samples of one part of the set. */
Test(lanes, a_small_set_is_mixed)
{
    for (uint32_t seed = 0; seed < 100; seed++) {
        const struct draw_order order = draw_lanes(seed, 0, 253, 64, 16384);
        uint32_t thirds[3] = {0};
        for (uint32_t i = 0; i < 32; i++)
            thirds[draw_order_at(&order, i) * 3 / 253]++;
        for (int t = 0; t < 3; t++)
            cr_expect(thirds[t] >= 2, "seed %u: %u of 32 samples are in third %d", seed, thirds[t], t);
    }
}

Test(lanes, the_order_is_that_of_the_definition)
{
    static const uint32_t counts[] = {1, 2, 3, 97, 255, 256, 257, 509, 1000, 4099},
                          lanes[] = {1, 2, 7, 64, 130}, shuffles[] = {1, 2, 64, 1000, 5000};
    static struct draw_memo memo;
    uint32_t wanted[4099];
    for (size_t c = 0; c < COUNT_OF(counts); c++)
        for (size_t l = 0; l < COUNT_OF(lanes); l++)
            for (size_t s = 0; s < COUNT_OF(shuffles); s++) {
                const uint32_t count = counts[c], epoch = (uint32_t)(c + l + s);
                uint32_t used = lanes[l] < shuffles[s] ? lanes[l] : shuffles[s];
                used = used < count ? used : count;
                const struct draw_order order = draw_lanes(5, epoch, count, lanes[l], shuffles[s]);
                order_by_definition(5, epoch, count, used, shuffles[s], wanted);
                struct draw_order kept = order;
                memset(&memo, 0, sizeof memo);
                kept.memo = &memo;
                for (uint32_t i = 0; i < count; i++) {
                    cr_assert_eq(draw_order_at(&order, i), wanted[i], "%u of %u, %u lanes, shuffle %u", i,
                                 count, lanes[l], shuffles[s]);
                    cr_assert_eq(draw_order_at(&kept, i), wanted[i], "%u of %u, with a memo", i, count);
                    const uint32_t any = i * 7 % count;
                    cr_assert_eq(draw_order_at(&kept, any), wanted[any], "%u of %u, with a memo", any, count);
                }
            }
}

Test(lanes, each_sample_occurs_once_per_epoch)
{
    static const uint32_t counts[] = {1, 2, 3, 97, 256, 257, 509, 4099};
    uint8_t seen[4099];
    for (size_t c = 0; c < COUNT_OF(counts); c++)
        for (uint32_t lanes = 1; lanes <= 130; lanes += 43)
            for (uint32_t shuffle = 0; shuffle <= 3000; shuffle += 300) {
                const struct draw_order order = draw_lanes(c, shuffle, counts[c], lanes, shuffle);
                memset(seen, 0, sizeof seen);
                for (uint32_t i = 0; i < counts[c]; i++) {
                    const uint32_t sample = draw_order_at(&order, i);
                    cr_assert(sample < counts[c] && !seen[sample]++, "%u", sample);
                    cr_assert(shuffle > 0 || sample == i, "without a shuffle, the order is that of the set");
                }
            }
}

Test(lanes, epochs_and_seeds_differ)
{
    const struct draw_order one = draw_lanes(1, 0, 1000, 8, 100), two = draw_lanes(1, 1, 1000, 8, 100),
                            three = draw_lanes(2, 0, 1000, 8, 100);
    uint32_t twos = 0, threes = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        twos += draw_order_at(&one, i) == draw_order_at(&two, i);
        threes += draw_order_at(&one, i) == draw_order_at(&three, i);
    }
    cr_expect(twos < 100 && threes < 100, "%u and %u of 1000 positions are equal", twos, threes);
}

/* Ten classes of 1000 samples, sorted by class, as class folders are. Each batch must have nearly as many
 * samples of each class as a batch of random samples. */
Test(lanes, classes_are_mixed_within_batches)
{
    enum { COUNT = 10000, BATCH = 250, EPOCHS = 20 };
    double squares = 0, place = 0;
    for (uint32_t epoch = 0; epoch < EPOCHS; epoch++) {
        const struct draw_order order = draw_lanes(3, epoch, COUNT, 64, 1000);
        for (uint32_t first = 0; first < COUNT; first += BATCH) {
            uint32_t classes[10] = {0};
            for (uint32_t i = 0; i < BATCH; i++) {
                const uint32_t sample = draw_order_at(&order, first + i);
                classes[sample / 1000]++;
                place += sample == 0 ? first + i : 0;
            }
            for (uint32_t c = 0; c < 10; c++)
                squares += (classes[c] - BATCH / 10.0) * (classes[c] - BATCH / 10.0);
        }
    }
    /* The variance of random batches is 22; in batches of one block it would be about 5,000. */
    const double variance = squares / (10.0 * EPOCHS * (COUNT / BATCH));
    cr_expect_lt(variance, 3 * 22, "%g", variance);
    cr_expect(fabs(place / EPOCHS - COUNT / 2.0) < 4 * COUNT / sqrt(12.0 * EPOCHS), "%g", place / EPOCHS);
}

#if defined HAVE_PNG && defined HAVE_XXHASH
/* Writes `samples` digits to m/ as shards and to f/ as class folders. Both have the same order. */
static void prepare(unsigned samples)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples %u --store imagefolder && mkdir f && cp -r all/*/ f && "
           "$P --prepare m --from dataset --source f --store shards --shards 3 --name m",
           samples);
}

static struct opened opened;

/* ---- Contents ---- */

Test(stream, the_batches_do_not_depend_on_threads_or_storage)
{
    static const char *const names[] = {"m", "f"};
    static const int threads[] = {1, 2, 3, 7};
    static const uint32_t ahead[] = {1, 2, 5};
    struct record wanted = {.count = 0};
    prepare(257);
    for (size_t n = 0; n < COUNT_OF(names); n++)
        for (size_t t = 0; t < COUNT_OF(threads); t++)
            for (size_t a = 0; a < COUNT_OF(ahead); a++) {
                open_set(&opened, names[n]);
                opened.request.threads = threads[t];
                opened.request.ahead = ahead[a];
                start(&opened);
                struct record found = take(opened.stream, 2 * opened.request.plan.steps);
                cr_assert_eq(found.count, 2 * 257);
                if (wanted.count == 0) {
                    wanted = found;
                } else {
                    cr_expect(same(&wanted, &found), "%s, %d threads, %u ahead", names[n], threads[t],
                              ahead[a]);
                    forget(&found);
                }
                close_set(&opened);
            }
    forget(&wanted);
}

/* The training set is all of f/. */
Test(stream, the_pixels_and_labels_are_those_of_stored_data)
{
    struct data data;
    char path[PATH_MAX];
    prepare(257);
    EXPECT(0, "mkdir both && cp -r f both/train && cp -r f both/test");
    snprintf(path, sizeof path, "%s/both", folder);
    for (uint32_t res = 0; res <= 20; res += 20) {
        const struct data_request request = {.name = path,
                                             .fit = {.how = FIT_RESIZE, .res = res, .channels = 3},
                                             .batch = 10,
                                             .feed = -1,
                                             .resources = {.threads = 2}};
        must(data_open(&request, &data));
        open_set(&opened, "m");
        opened.request.fit.res = res;
        opened.request.channels = data.shape.channels;
        opened.request.height = opened.request.width = data.shape.width;
        start(&opened);
        struct record found = take(opened.stream, opened.request.plan.steps);
        cr_assert(found.count == 257 && data.sets[DATA_TRAIN].count == 257);
        cr_assert_eq(found.sample_bytes, data.sample_bytes);
        for (uint32_t i = 0; i < found.count; i++) {
            const uint32_t n = found.numbers[i];
            cr_expect_eq(found.labels[i], (int32_t)data.sets[DATA_TRAIN].labels[n]);
            cr_expect_arr_eq(found.values + i * found.sample_bytes, data_sample(&data, DATA_TRAIN, n),
                             found.sample_bytes);
        }
        forget(&found);
        close_set(&opened);
        data_close(&data);
    }
}

/* Volumes of halves are stored as they are. */
Test(stream, arrays_of_halves_are_those_of_stored_data)
{
    struct data data;
    char path[PATH_MAX];
    EXPECT(0, "$P --prepare h/train --from clips --samples 61 --shards 2 && cp -r h/train h/test");
    snprintf(path, sizeof path, "%s/h", folder);
    const struct data_request request = {.name = path, .batch = 10, .feed = -1, .resources = {.threads = 2}};
    must(data_open(&request, &data));
    cr_assert_eq(data.type, DTYPE_F16);
    open_set(&opened, "h/train");
    opened.request.fit.res = 0;
    opened.request.channels = data.shape.channels;
    opened.request.height = data.shape.height;
    opened.request.width = data.shape.width;
    opened.request.depth = data.shape.depth;
    opened.request.type = DTYPE_F16;
    start(&opened);
    struct record found = take(opened.stream, opened.request.plan.steps);
    cr_assert(found.count == 61 && found.sample_bytes == data.sample_bytes);
    for (uint32_t i = 0; i < found.count; i++) {
        const uint32_t n = found.numbers[i];
        cr_expect_eq(found.labels[i], (int32_t)data.sets[DATA_TRAIN].labels[n]);
        cr_expect_arr_eq(found.values + i * found.sample_bytes, data_sample(&data, DATA_TRAIN, n),
                         found.sample_bytes);
    }
    forget(&found);
    close_set(&opened);
    data_close(&data);
}

/* ---- Blocks of shards ---- */

/* Returns the number of system calls that have read something. */
static uint64_t reads(void)
{
    unsigned long long count = 0;
    char line[80];
    FILE *file = fopen("/proc/self/io", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "syscr: %llu", &count);
    cr_assert(file && fclose(file) == 0);
    return count;
}

/* Takes two epochs of arrays. Sets `*calls` to the reads of an epoch, and `*memory_bytes` to the memory. */
static struct record take_arrays(uint32_t plan_lanes, uint32_t lanes, int threads, uint64_t *calls,
                                 uint64_t *memory_bytes)
{
    struct stream_stats stats;
    open_set(&opened, "b");
    opened.epochs.lanes = plan_lanes;
    opened.request.fit.res = 0;
    opened.request.channels = 1;
    opened.request.height = opened.request.width = 28;
    opened.request.lanes = lanes;
    opened.request.threads = threads;
    start(&opened);
    const uint64_t before = reads();
    struct record record = take(opened.stream, 2 * opened.request.plan.steps);
    *calls = (reads() - before) / 2;
    stream_stats(opened.stream, &stats);
    *memory_bytes = stats.memory_bytes;
    cr_expect_gt(stats.decode_s, 0);
    close_set(&opened);
    return record;
}

/* Small members are read in blocks, also if there is too little memory for the blocks, and if a member is in
 * two blocks. The members of a sample are an array and a label. */
Test(stream, blocks_give_the_same_batches)
{
    static const uint32_t lanes[] = {1, 2, 8};
    uint64_t alone, calls, without_bytes, bytes, crossing = 0;
    EXPECT(0, "$P --prepare b --from digits --samples 3001 --store shards --shards 3 --encode npy --name b");
    for (uint32_t plan_lanes = 1; plan_lanes <= 8; plan_lanes += 7) {
        struct record wanted = take_arrays(plan_lanes, 0, 1, &alone, &without_bytes);
        cr_assert_eq(wanted.count, 2 * 3001);
        cr_expect(alone >= 3001 && alone < 3200, "%llu reads",
                  (unsigned long long)alone); /* both members at once */
        for (size_t l = 0; l < COUNT_OF(lanes); l++)
            for (int threads = 1; threads <= 3; threads++) {
                struct record found = take_arrays(plan_lanes, lanes[l], threads, &calls, &bytes);
                cr_expect(same(&wanted, &found), "%u lanes, blocks for %u lanes, %d threads", plan_lanes,
                          lanes[l], threads);
                cr_expect(lanes[l] < plan_lanes || calls < alone / 8, "%llu of %llu reads",
                          (unsigned long long)calls, (unsigned long long)alone);
                bytes -= threads == 1 ? without_bytes : 0;
                cr_expect(bytes > 0 && (threads > 1 || bytes <= lanes[l] << 20), "%llu bytes",
                          (unsigned long long)bytes);
                forget(&found);
            }
        forget(&wanted);
    }
    open_set(&opened, "b");
    for (uint32_t m = 0; m < opened.dataset.member_count; m++) {
        const struct dataset_member *member = &opened.dataset.members[m];
        crossing += member->offset >> 19 != (member->offset + member->size - 1) >> 19;
    }
    dataset_close(&opened.dataset);
    cr_expect_gt(crossing, 0); /* one lane has blocks of 512 KiB */
}

/* In the order of the set there is one lane, whose memory has fewer blocks than a group of a large set. */
Test(stream, large_sets_are_read_in_blocks_with_any_shuffle)
{
    struct dataset_file shards[8];
    struct dataset dataset = {.shards = true, .files = shards, .file_count = 8, .sample_count = 8 << 16};
    for (int f = 0; f < 8; f++)
        shards[f] = (struct dataset_file){.bytes = UINT64_C(64) << 20};
    for (uint32_t lanes = 1; lanes <= 64; lanes *= 8) {
        const struct set_files_order order = {.lanes = lanes, .run = 256, .share = 1};
        struct set_files *files;
        must(set_files_open(&dataset, 1, 1, &order, &files));
        const uint64_t bytes = set_files_block_bytes(files);
        cr_expect(bytes > (uint64_t)lanes << 19 && bytes <= (uint64_t)lanes << 20, "%u lanes: %llu", lanes,
                  (unsigned long long)bytes);
        set_files_close(files);
    }
}

/* A shard is truncated. Blocks that cannot be read serve no member, also if the file was compared before in
 * the same round. The next round finds the fault also for members of other blocks. */
Test(stream, blocks_of_a_truncated_shard_are_failures)
{
    const struct set_files_order order = {.lanes = 1, .window = 64, .run = 64, .share = 1};
    struct set_files *files;
    uint8_t first[1024], again[1024];
    EXPECT(0, "$P --prepare b --from digits --samples 3001 --store shards --shards 1 --encode npy --name b");
    open_set(&opened, "b");
    must(set_files_open(&opened.dataset, 1, 1, &order, &files));
    const struct dataset_member *members = opened.dataset.members;
    const struct dataset_member *last = &members[opened.dataset.member_count - 1];
    cr_assert(set_files_block_bytes(files) > 0 && members[1].size == 912 && last->size == 912);
    must(set_files_read(files, &members[1], 912, first));
    EXPECT(0, "truncate -s 1M b/*.tar");
    must(set_files_read(files, &members[1], 912, again));
    cr_expect_arr_eq(first, again, 912);
    cr_expect_eq(set_files_read(files, last, 912, again), STATUS_FAILED);
    cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s", status_text());
    set_files_next_round(files);
    cr_expect_eq(set_files_read(files, &members[1], 912, again), STATUS_FAILED);
    cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s", status_text());
    set_files_close(files);
    dataset_close(&opened.dataset);
}

/* A sample whose image has no bytes is broken; its neighbours are not. */
Test(stream, members_without_bytes_are_broken)
{
    prepare(61);
    EXPECT(
        0,
        "mkdir e y && (cd e && tar xf ../m/m-000001.tar && i=$(ls *.png | sed -n 5p) && rm -f $i && : >$i && "
        "tar cf ../y/y.tar *)");
    open_set(&opened, "y");
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    struct record found = take(opened.stream, 2 * opened.request.plan.steps);
    uint32_t masked = 0;
    for (uint32_t i = 0; i < found.count; i++) {
        masked += found.labels[i] == STREAM_MASKED;
        cr_expect_eq(found.labels[i] == STREAM_MASKED, found.numbers[i] == 4, "sample %u", found.numbers[i]);
    }
    cr_expect_eq(masked, 2);
    forget(&found);
    close_set(&opened);
}

/* A subset of the samples, with labels of its own. */
Test(stream, samples_and_labels_may_be_given)
{
    static const uint32_t samples[] = {5, 60, 5, 17, 1}, labels[] = {9, 8, 7, 6, 5};
    prepare(61);
    open_set(&opened, "f");
    start(&opened);
    struct record all = take(opened.stream, opened.request.plan.steps);
    close_set(&opened);
    open_set(&opened, "m");
    opened.request.samples = samples;
    opened.request.labels = labels;
    opened.request.count = 5;
    opened.epochs = (struct epochs){5, 3, 1, 0};
    start(&opened);
    struct record some = take(opened.stream, 2);
    cr_assert_eq(some.count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t at = 0;
        while (all.numbers[at] != samples[i])
            at++;
        cr_expect(some.numbers[i] == i && some.labels[i] == (int32_t)labels[i]);
        cr_expect_arr_eq(some.values + i * some.sample_bytes, all.values + at * all.sample_bytes,
                         some.sample_bytes);
    }
    forget(&some);
    stream_close(opened.stream);
    /* Copies have larger numbers, and the same pixels and labels. */
    opened.request.copies = 3;
    opened.epochs = (struct epochs){15, 15, 1, 0};
    start(&opened);
    some = take(opened.stream, 1);
    cr_assert_eq(some.count, 15);
    for (uint32_t i = 5; i < 15; i++) {
        cr_expect(some.numbers[i] == i && some.labels[i] == some.labels[i - 5]);
        cr_expect_arr_eq(some.values + i * some.sample_bytes, some.values + (i - 5) * some.sample_bytes,
                         some.sample_bytes);
    }
    forget(&some);
    stream_close(opened.stream);
    /* A number beyond the arrays and a sample beyond the set are refused before they are used. */
    struct stream_batch batch;
    opened.request.copies = 2;
    start(&opened);
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_USAGE);
    cr_expect(strstr(status_text(), "of 10"), "%s", status_text());
    const uint32_t beyond[] = {5, 60, 61, 17, 1};
    struct stream *none;
    opened.request.samples = beyond;
    cr_expect_eq(set_stream_open(&opened.request, &none), STATUS_USAGE);
    cr_expect(strstr(status_text(), "sample 61 of 61"), "%s", status_text());
    forget(&all);
    close_set(&opened);
}

/* Counts 1, 3, primes, and one more than a block. */
Test(stream, each_sample_is_delivered_once_per_epoch)
{
    static const uint32_t counts[] = {1, 3, 13, 251, 257};
    prepare(257);
    open_set(&opened, "m");
    for (size_t c = 0; c < COUNT_OF(counts); c++) {
        opened.epochs.count = counts[c];
        start(&opened);
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            uint32_t seen[257] = {0};
            for (uint64_t step = 0; step < opened.request.plan.steps; step++) {
                struct stream_batch batch;
                must(stream_next(opened.stream, &batch));
                cr_expect(batch.epoch == epoch && batch.step == step);
                cr_expect_eq(batch.last, step + 1 == opened.request.plan.steps);
                for (uint32_t i = 0; i < batch.samples.count; i++)
                    seen[batch.numbers[i]]++;
                must(stream_release(opened.stream, &batch, NULL));
            }
            for (uint32_t i = 0; i < counts[c]; i++)
                cr_expect_eq(seen[i], 1);
        }
        struct stream_stats stats;
        stream_stats(opened.stream, &stats);
        cr_expect(stats.samples == 3 * counts[c] && stats.batches == 3 * opened.request.plan.steps);
        cr_expect(stats.masked == 0 && stats.bytes > 0 && stats.memory_bytes > 0);
        stream_close(opened.stream);
    }
    dataset_close(&opened.dataset);
}

/* Random crops are drawn again in each epoch, and only by seed, epoch and sample. */
Test(stream, crops_differ_between_epochs)
{
    prepare(61);
    struct record records[2];
    for (int threads = 1; threads <= 2; threads++) {
        open_set(&opened, threads == 1 ? "m" : "f");
        opened.request.fit.how = FIT_RANDOM_RESIZED_CROP;
        opened.request.threads = threads;
        opened.epochs.shuffle = 0;
        start(&opened);
        records[threads - 1] = take(opened.stream, 3 * opened.request.plan.steps);
        close_set(&opened);
    }
    cr_expect(same(&records[0], &records[1]));
    uint32_t equal = 0;
    const size_t bytes = records[0].sample_bytes;
    for (uint32_t i = 0; i < 61; i++) {
        equal += memcmp(records[0].values + i * bytes, records[0].values + (i + 61) * bytes, bytes) == 0;
        equal += memcmp(records[0].values + i * bytes, records[0].values + (i + 122) * bytes, bytes) == 0;
    }
    cr_expect_lt(equal, 4, "%u crops of 122 are equal to those of epoch 0", equal);
    forget(&records[0]);
    forget(&records[1]);
}

/* ---- Positions ---- */

/* Returns batches `first` to `first` + `count` - 1 of a record of whole epochs. The caller frees nothing. */
static struct record slice(const struct record *all, uint64_t first, uint64_t count)
{
    const uint64_t steps = opened.request.plan.steps, batch = opened.epochs.batch;
    const uint64_t begin = first / steps * opened.epochs.count + first % steps * batch,
                   end_batch = first + count;
    const uint64_t end = end_batch / steps * opened.epochs.count + end_batch % steps * batch;
    return (struct record){.values = all->values + begin * all->sample_bytes,
                           .labels = all->labels + begin,
                           .numbers = all->numbers + begin,
                           .count = (uint32_t)(end - begin),
                           .sample_bytes = all->sample_bytes};
}

/* Expects that the stream delivers `count` batches from batch `first` on. */
static void expect_batches(const struct record *all, uint64_t first, uint64_t count)
{
    const uint64_t steps = opened.request.plan.steps;
    struct record found = take(opened.stream, count), wanted = slice(all, first, count);
    cr_expect(same(&found, &wanted), "from batch %llu", (unsigned long long)first);
    cr_expect(opened.stream->at.epoch == (first + count) / steps &&
              opened.stream->at.step == (first + count) % steps);
    forget(&found);
}

static struct stream_position position(uint64_t batch)
{
    return (struct stream_position){batch / opened.request.plan.steps, batch % opened.request.plan.steps};
}

Test(stream, a_seek_leads_to_the_same_batches)
{
    prepare(61);
    open_set(&opened, "m");
    opened.request.fit.how = FIT_RANDOM_RESIZED_CROP;
    start(&opened);
    const uint64_t steps = opened.request.plan.steps;
    struct record all = take(opened.stream, 4 * steps);
    for (int threads = 1; threads <= 3; threads++) {
        stream_close(opened.stream);
        opened.request.threads = threads;
        opened.request.begin = position(steps + 1);
        start(&opened);
        cr_expect(opened.stream->at.epoch == 1 && opened.stream->at.step == 1);
        expect_batches(&all, steps + 1, 2);
        for (uint64_t at = 3 * steps; at-- > 0;) {
            must(stream_seek(opened.stream, position(at)));
            must(stream_seek(opened.stream, position(at))); /* where it is */
            expect_batches(&all, at, 1 + at % 3);
        }
        must(stream_seek(opened.stream, position(0)));
        expect_batches(&all, 0, 1);
        stream_cancel(opened.stream);
        struct stream_batch batch;
        cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
        cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
        must(stream_seek(opened.stream, position(1)));
        expect_batches(&all, 1, 3);
        cr_expect_eq(stream_seek(opened.stream, (struct stream_position){0, steps}), STATUS_USAGE);
        expect_batches(&all, 4, 1);
    }
    forget(&all);
    close_set(&opened);
}

/* ---- Broken samples ---- */

/* Positions of broken samples in epoch 0: two in step 2, one in step 3. */
static const uint32_t broken_at[] = {37, 44, 48};

/* Opens f/ after some files were broken, and sets `all` to two epochs of the intact files. */
static void open_broken(struct record *all)
{
    prepare(61);
    EXPECT(0, "cp -r f intact");
    open_set(&opened, "intact");
    start(&opened);
    *all = take(opened.stream, 2 * opened.request.plan.steps);
    for (size_t i = 0; i < COUNT_OF(broken_at); i++)
        EXPECT(0, "echo no > f/%s", opened.dataset.samples[all->numbers[broken_at[i]]].key);
    close_set(&opened);
    open_set(&opened, "f");
}

/* Expects that the next batch is a failure that names the sample at a position, twice. */
static void expect_failure(const struct record *all, uint32_t place)
{
    const char *key = opened.dataset.samples[all->numbers[place]].key;
    struct stream_batch batch;
    for (int i = 0; i < 2; i++) {
        status_set(STATUS_OK, "nothing");
        cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
        cr_expect(strstr(status_text(), key), "'%s' lacks %s", status_text(), key);
    }
}

Test(stream, the_first_broken_sample_ends_the_stream_at_its_step)
{
    struct record all;
    open_broken(&all);
    for (int threads = 1; threads <= 7; threads += 2)
        for (uint32_t ahead = 1; ahead <= 5; ahead += 2)
            for (int seeks = 0; seeks < 2; seeks++) {
                opened.request.threads = threads;
                opened.request.ahead = ahead;
                start(&opened);
                expect_batches(&all, 0, 2);
                expect_failure(&all, broken_at[0]);
                must(stream_seek(opened.stream, position(seeks)));
                expect_batches(&all, (uint64_t)seeks, 2 - (uint64_t)seeks);
                expect_failure(&all, broken_at[0]);
                must(stream_seek(opened.stream, position(3)));
                expect_failure(&all, broken_at[2]);
                stream_close(opened.stream);
            }
    forget(&all);
    dataset_close(&opened.dataset);
}

Test(stream, broken_samples_are_masked)
{
    struct record all;
    open_broken(&all);
    opened.request.on_error = SET_STREAM_MASK;
    for (uint32_t i = 0; i < COUNT_OF(broken_at); i++) {
        memset(all.values + broken_at[i] * all.sample_bytes, 0, all.sample_bytes);
        all.labels[broken_at[i]] = STREAM_MASKED;
    }
    for (int threads = 1; threads <= 3; threads++) {
        struct record found = {.count = 0};
        opened.request.threads = threads;
        start(&opened);
        for (uint64_t step = 0; step < opened.request.plan.steps; step++) {
            struct stream_batch batch;
            must(stream_next(opened.stream, &batch));
            cr_expect_eq(batch.masked, step == 2 ? 2 : step == 3 ? 1 : 0);
            add(&found, &batch);
            must(stream_release(opened.stream, &batch, NULL));
        }
        const struct record wanted = slice(&all, 0, opened.request.plan.steps);
        cr_expect(same(&found, &wanted), "%d threads", threads);
        struct stream_stats stats;
        stream_stats(opened.stream, &stats);
        cr_expect_eq(stats.masked, 3);
        forget(&found);
        stream_close(opened.stream);
    }
    forget(&all);
    dataset_close(&opened.dataset);
}

/* A symbolic link to a file that does not exist is a broken sample: the error names the link, skipped samples
 * and masked ones are counted. A dangling link that is not an image may be a class folder, so it is an error.
 */
Test(stream, links_without_a_target_are_broken_samples)
{
    static const char *const links[] = {"ln -sf /none/x.png $L", "ln -sfn $(basename $L) $L"};
    static const char *const causes[] = {"/none/x.png', which cannot be opened: No such file",
                                         ".png', which cannot be opened: Too many levels of symbolic links"};
    char link[64], words[256];
    EXPECT(0, "$P --prepare all --from digits --samples 120 --store imagefolder >/dev/null && mkdir f && "
              "cp -r all/*/ f && ls f/*/*.png | sed -n 51p");
    snprintf(link, sizeof link, "%.*s", (int)strcspn(out, "\n"), out);
    setenv("L", link, 1);
    setenv("R", "--data f --loops 1 --warmups 0 --warmup-time 0 --format csv", 1);
    setenv("S", "--variant stream --out-res 20 --channels 1", 1);
    for (size_t i = 0; i < COUNT_OF(links); i++) {
        EXPECT(0, "%s", links[i]);
        snprintf(words, sizeof words, "%s: a symbolic link to '", link);
        EXPECT_PRINTS(1, words, "$P $R $S");
        EXPECT_OUT(causes[i]);
        EXPECT_PRINTS(0, words, "$P $R $S --on-error mask --verify");
    }
    EXPECT_PRINTS(1, words, "$P $R --variant files");
    EXPECT_PRINTS(0, words, "$P $R --variant files --on-error skip --verify");
    EXPECT_PRINTS(0, "broken training sample was masked",
                  "$P --variant train-omp --model lenet --data f --feed load --on-error mask --epochs 1 "
                  "--out-res 28 --verbose");
    EXPECT(0, "cp all/0000/000000.png y && mv y $L && ln -s ../none f/0010");
    EXPECT_PRINTS(1, "f/0010: a symbolic link to '../none'", "$P $R --variant files");
}

#ifdef HAVE_JPEG
/* Half of the files end at 80 % of their bytes. Most random parts end above the missing rows. */
Test(stream, whether_a_jpeg_is_broken_does_not_depend_on_its_crop)
{
    enum { COUNT = 40, EPOCHS = 6 };
    bool broken[COUNT];
    EXPECT(0,
           "$P --prepare all --from synth --samples %d --classes 4 --res 96 --encode jpeg --store "
           "imagefolder && mkdir j && cp -r all/*/ j && ls j/*/* | sed -n '1~2p' | while read f; do "
           "truncate -s $(($(stat -c %%s $f) * 4 / 5)) $f; done",
           COUNT);
    open_set(&opened, "j");
    cr_assert_eq(opened.dataset.sample_count, COUNT);
    opened.request.fit.how = FIT_RANDOM_RESIZED_CROP;
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        struct record found = take(opened.stream, opened.request.plan.steps);
        uint32_t masked = 0;
        cr_assert_eq(found.count, COUNT);
        for (uint32_t i = 0; i < COUNT; i++) {
            const bool is = found.labels[i] == STREAM_MASKED;
            masked += is;
            if (epoch == 0)
                broken[found.numbers[i]] = is;
            cr_expect_eq(is, broken[found.numbers[i]], "epoch %d, sample %u", epoch, found.numbers[i]);
        }
        cr_expect_eq(masked, COUNT / 2, "epoch %d: %u", epoch, masked);
        forget(&found);
    }
    close_set(&opened);
}
#endif

/* Each data set has a fault that decoding finds. Masking applies to those of samples only. */
Test(stream, faults_of_samples_are_told_apart)
{
    static const struct {
        const char *command, *words;
        bool masks;
        bool before; /* the data set is opened after the fault */
    } cases[] = {
        {"rm x/0000/*", "cannot open", false, false},
        {"echo 1 >> $(ls x/0000/* | head -1)", "changed after the data set was opened", false, false},
        {"for i in x/0000/*; do cp -p $i y; mv y $i; done", "changed after the data set was opened", false,
         false},
        {"for i in x/0000/*; do cp $i y; mv y $i; done", "changed after the data set was opened", false,
         false},
        {"for i in x/0000/*; do : >$i; done", "0 bytes", true, true},
        {"for i in x/0000/*; do seq 100 >$i; done", "libpng: ", true, true},
        {"for i in x/0000/*; do truncate -s 60 $i; done", "libpng: ", true, true},
    };
    prepare(61);
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int masks = 0; masks < 2; masks++) {
            EXPECT(0, "rm -rf x; cp -r f x");
            if (cases[i].before)
                EXPECT(0, "%s", cases[i].command);
            open_set(&opened, "x");
            if (!cases[i].before)
                EXPECT(0, "%s", cases[i].command);
            opened.request.on_error = masks ? SET_STREAM_MASK : SET_STREAM_FAIL;
            start(&opened);
            enum status result = STATUS_OK;
            for (uint64_t step = 0; result == STATUS_OK && step < opened.request.plan.steps; step++) {
                struct stream_batch batch;
                result = stream_next(opened.stream, &batch);
                if (result == STATUS_OK)
                    must(stream_release(opened.stream, &batch, NULL));
            }
            cr_expect_eq(result, masks && cases[i].masks ? STATUS_OK : STATUS_FAILED, "%s", cases[i].command);
            cr_expect(result == STATUS_OK || strstr(status_text(), cases[i].words), "%s", status_text());
            cr_expect(result == STATUS_OK || strstr(status_text(), "/x/0000/"), "%s", status_text());
            close_set(&opened);
        }
}

/* The index of --prepare has a hash of each member. */
Test(stream, damaged_bytes_are_found_by_the_hash_of_the_index)
{
    prepare(61);
    open_set(&opened, "m");
    const struct dataset_sample *sample = &opened.dataset.samples[20];
    const struct dataset_member *member = &opened.dataset.members[sample->member + sample->image];
    const char *name = opened.dataset.files[member->file].name;
    cr_assert_gt(member->size, 150);
    EXPECT(0, "printf X | dd of=m/%s bs=1 seek=%llu conv=notrunc 2>/dev/null", name,
           (unsigned long long)(member->offset + 70));
    dataset_close(&opened.dataset);
    open_set(&opened, "m");
    opened.epochs.shuffle = 0;
    start(&opened);
    struct record found = take(opened.stream, 1);
    struct stream_batch batch;
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
    cr_expect(strstr(status_text(), "do not match the hash in the index"), "%s", status_text());
    cr_expect(strstr(status_text(), opened.dataset.samples[20].key), "%s", status_text());
    forget(&found);
    stream_close(opened.stream);
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    found = take(opened.stream, opened.request.plan.steps);
    for (uint32_t i = 0; i < found.count; i++)
        cr_expect_eq(found.labels[i] == STREAM_MASKED, found.numbers[i] == 20, "sample %u", found.numbers[i]);
    forget(&found);
    close_set(&opened);
}

/* A label is broken if it is another number than in the index, or no number. */
Test(stream, a_broken_label_is_masked)
{
    prepare(61);
    for (int i = 0; i < 2; i++) {
        open_set(&opened, "m");
        const struct dataset_sample *sample = &opened.dataset.samples[20];
        cr_assert_lt(sample->label, sample->members);
        const struct dataset_member *member = &opened.dataset.members[sample->member + sample->label];
        EXPECT(0,
               "byte=%s; f=m/%s at=%llu; [ $byte = x ] || { [ $(dd if=$f bs=1 skip=$at count=1 2>/dev/null) "
               "= 1 ] "
               "&& byte=2; }; printf $byte | dd of=$f bs=1 seek=$at conv=notrunc 2>/dev/null",
               i == 0 ? "1" : "x", opened.dataset.files[member->file].name,
               (unsigned long long)member->offset);
        dataset_close(&opened.dataset);
        open_set(&opened, "m");
        opened.request.on_error = SET_STREAM_MASK;
        start(&opened);
        struct record found = take(opened.stream, opened.request.plan.steps);
        for (uint32_t k = 0; k < found.count; k++)
            cr_expect_eq(found.labels[k] == STREAM_MASKED, found.numbers[k] == 20, "sample %u",
                         found.numbers[k]);
        forget(&found);
        close_set(&opened);
    }
}

/* Images of different sizes are no fault of a sample. */
Test(stream, shapes_must_be_those_of_the_request)
{
    prepare(61);
    open_set(&opened, "m");
    opened.request.fit.res = 0;
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    struct stream_batch batch;
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_USAGE);
    cr_expect(strstr(status_text(), "--out-res"), "%s", status_text());
    close_set(&opened);
}

/* ---- Sets that change ---- */

/* Runs a command after the first batches, and expects a failure that names a shard. Batches before it have
 * the original contents. */
static void expect_change(const char *command, const struct record *all)
{
    struct stream_batch batch;
    enum status result = STATUS_OK;
    uint64_t at = 2;
    EXPECT(0, "rm -rf x; cp -r m x");
    open_set(&opened, "x");
    start(&opened);
    expect_batches(all, 0, 2);
    EXPECT(0, "%s", command);
    while (at < 2 * opened.request.plan.steps && (result = stream_next(opened.stream, &batch)) == STATUS_OK) {
        struct record found = {.count = 0}, wanted = slice(all, at++, 1);
        add(&found, &batch);
        cr_expect(same(&found, &wanted), "%s: batch %llu", command, (unsigned long long)at);
        must(stream_release(opened.stream, &batch, NULL));
        forget(&found);
    }
    cr_expect_eq(result, STATUS_FAILED, "%s", command);
    cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s: %s", command,
              status_text());
    cr_expect(strstr(status_text(), "/x/m-00000"), "%s: %s", command, status_text());
    close_set(&opened);
}

Test(stream, shards_that_change_are_failures)
{
    prepare(251);
    open_set(&opened, "m");
    start(&opened);
    struct record all = take(opened.stream, 2 * opened.request.plan.steps);
    close_set(&opened);
    expect_change("truncate -s 4096 x/m-000001.tar", &all);
    expect_change("truncate -s 0 x/m-000000.tar", &all);
    expect_change("cp m/m-000002.tar x/y && mv x/y x/m-000002.tar", &all);
    expect_change("cat m/m-000001.tar > x/m-000002.tar", &all);
    expect_change("cat m/m-000002.tar > x/m-000002.tar", &all); /* the same bytes, but written again */
    expect_change("touch -r x/m-000002.tar ref && cat m/m-000002.tar >x/m-000002.tar && touch -r ref "
                  "x/m-000002.tar",
                  &all); /* the time of modification is that of before */
    expect_change("rm x/*.tar", &all);
    expect_change("ln x/m-000002.tar x/old && cp m/m-000002.tar x/y && mv x/y x/m-000002.tar", &all);
    forget(&all);
}

/* ---- The functions of a stream ---- */

Test(stream, batches_may_be_released_in_any_order)
{
    prepare(61);
    open_set(&opened, "m");
    opened.request.held = 3;
    start(&opened);
    const uint64_t steps = opened.request.plan.steps;
    struct record all = take(opened.stream, 4 * steps);
    must(stream_seek(opened.stream, position(0)));
    struct stream_batch batches[6];
    for (uint64_t at = 0; at + 3 < 4 * steps; at += 3) {
        for (int i = 0; i < 3; i++)
            must(stream_next(opened.stream, &batches[i]));
        usleep(2000); /* the threads prepare further batches */
        struct record found = {.count = 0}, wanted = slice(&all, at, 3);
        for (int i = 0; i < 3; i++)
            add(&found, &batches[i]);
        cr_expect(same(&found, &wanted), "from batch %llu", (unsigned long long)at);
        must(stream_release(opened.stream, &batches[1], NULL));
        cr_expect_eq(stream_release(opened.stream, &batches[1], NULL), STATUS_USAGE);
        must(stream_release(opened.stream, &batches[2], NULL));
        must(stream_release(opened.stream, &batches[0], NULL));
        forget(&found);
    }
    for (int i = 0; i < 5; i++)
        must(stream_next(opened.stream, &batches[i]));
    cr_expect_eq(stream_next(opened.stream, &batches[5]), STATUS_USAGE, "all batches are held");
    cr_expect_eq(stream_release(opened.stream, &batches[4], &all), STATUS_USAGE, "events are for devices");
    /* A seek leaves held batches as they are. */
    struct record held = {.count = 0}, still = {.count = 0};
    for (int i = 0; i < 4; i++)
        add(&held, &batches[i]);
    must(stream_release(opened.stream, &batches[4], NULL));
    for (uint64_t at = 0; at < 4; at++) {
        must(stream_seek(opened.stream, position(at)));
        const struct record wanted = slice(&all, at, 1);
        struct record found = take(opened.stream, 1);
        cr_expect(same(&found, &wanted), "batch %llu", (unsigned long long)at);
        forget(&found);
    }
    for (int i = 0; i < 4; i++)
        add(&still, &batches[i]);
    cr_expect(same(&held, &still));
    forget(&held);
    forget(&still);
    for (int i = 4; i-- > 0;)
        must(stream_release(opened.stream, &batches[i], NULL));
    forget(&all);
    close_set(&opened);
}

Test(stream, a_batch_is_copied_into_memory_of_the_caller)
{
    prepare(61);
    open_set(&opened, "m");
    start(&opened);
    struct record all = take(opened.stream, opened.request.plan.steps);
    must(stream_seek(opened.stream, position(0)));
    for (uint64_t at = 0; at < opened.request.plan.steps; at++) {
        uint8_t values[16 * 3 * 20 * 20];
        int32_t labels[16];
        uint32_t count;
        const struct record wanted = slice(&all, at, 1);
        must(stream_fill(opened.stream, values, at % 2 ? labels : NULL, &count));
        cr_assert_eq(count, wanted.count);
        cr_expect_arr_eq(values, wanted.values, count * wanted.sample_bytes);
        cr_expect(at % 2 == 0 || memcmp(labels, wanted.labels, count * sizeof *labels) == 0);
    }
    forget(&all);
    close_set(&opened);
}

/* A plan whose lists wait for a semaphore from the second epoch on. */
static sem_t gate;
static _Atomic uint64_t listed_epoch;

static uint32_t list_at_gate(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    if (epoch > listed_epoch)
        listed_epoch = epoch;
    if (epoch > 0)
        while (sem_wait(&gate) != 0)
            ;
    return list(context, epoch, step, numbers);
}

static void *cancel_soon(void *stream)
{
    usleep(50000);
    stream_cancel(stream);
    return NULL;
}

Test(stream, a_cancel_ends_a_waiting_call)
{
    pthread_t thread;
    struct stream_batch batch;
    prepare(61);
    sem_init(&gate, 0, 0);
    open_set(&opened, "m");
    start(&opened);
    struct record all = take(opened.stream, 2 * opened.request.plan.steps);
    stream_close(opened.stream);
    opened.request.plan.list = list_at_gate;
    must(set_stream_open(&opened.request, &opened.stream));
    expect_batches(&all, 0, opened.request.plan.steps);
    cr_assert_eq(pthread_create(&thread, NULL, cancel_soon, opened.stream), 0);
    const double begin_s = timer_now_s();
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
    cr_expect(strstr(status_text(), "cancelled"), "%s", status_text());
    cr_expect_lt(timer_now_s() - begin_s, 20);
    pthread_join(thread, NULL);
    for (int i = 0; i < 100; i++)
        sem_post(&gate);
    must(stream_seek(opened.stream, position(3)));
    expect_batches(&all, 3, 4);
    close_set(&opened);
    forget(&all);
}

Test(stream, lists_of_the_next_epoch_may_have_to_wait)
{
    prepare(61);
    sem_init(&gate, 0, 1000);
    open_set(&opened, "m");
    opened.request.plan.by_epoch = true;
    opened.request.ahead = 9;
    start(&opened);
    stream_close(opened.stream);
    opened.request.plan.list = list_at_gate;
    must(set_stream_open(&opened.request, &opened.stream));
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        struct record found = take(opened.stream, opened.request.plan.steps);
        usleep(20000);
        cr_expect_eq(listed_epoch, epoch);
        cr_expect_eq(found.count, 61);
        forget(&found);
    }
    close_set(&opened);
}

static _Atomic uint32_t first_epochs_listed;

static uint32_t list_and_count(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    first_epochs_listed += epoch == 0;
    return list(context, epoch, step, numbers);
}

/* A run that resumes opens a stream and seeks: it must not read the beginning of epoch 0. */
Test(stream, nothing_is_read_before_the_first_call)
{
    prepare(61);
    open_set(&opened, "m");
    start(&opened);
    stream_close(opened.stream);
    opened.request.plan.list = list_and_count;
    must(set_stream_open(&opened.request, &opened.stream));
    usleep(50000);
    must(stream_seek(opened.stream, position(2 * opened.request.plan.steps)));
    usleep(50000);
    struct record found = take(opened.stream, 2);
    cr_expect(found.count > 0 && first_epochs_listed == 0, "%u", first_epochs_listed);
    forget(&found);
    close_set(&opened);
}

static uint32_t list_too_many(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const uint32_t count = list(context, epoch, step, numbers);
    return step == 2 ? count + 1 : step == 1 ? 0 : count;
}

static uint32_t list_unknown(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    const uint32_t count = list(context, epoch, step, numbers);
    numbers[1] = step == 2 ? 61 : numbers[1];
    return count;
}

Test(stream, plans_are_checked)
{
    struct stream_batch batch;
    prepare(61);
    open_set(&opened, "m");
    start(&opened);
    for (int i = 0; i < 2; i++) {
        stream_close(opened.stream);
        opened.request.plan.list = i ? list_unknown : list_too_many;
        must(set_stream_open(&opened.request, &opened.stream));
        struct record found = take(opened.stream, 2);
        cr_expect_eq(found.count, i ? 32 : 16);
        cr_expect_eq(stream_next(opened.stream, &batch), STATUS_USAGE);
        cr_expect(strstr(status_text(), i ? "61 of 61" : "17 samples"), "%s", status_text());
        forget(&found);
    }
    struct stream *stream;
    struct set_stream_request request = opened.request;
    request.width = 21;
    cr_expect_eq(set_stream_open(&request, &stream), STATUS_USAGE);
    request = opened.request;
    request.threads = 0;
    cr_expect_eq(set_stream_open(&request, &stream), STATUS_USAGE);
    request = opened.request;
    request.begin.step = request.plan.steps;
    cr_expect_eq(set_stream_open(&request, &stream), STATUS_USAGE);
    cr_expect_null(stream);
    close_set(&opened);
}

/* ---- Random configurations ---- */

static uint32_t random_state;

/* Returns a random number below `below`. */
static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)(random_state >> 4) * below >> 28);
}

/* A consumer of a stream: the batches that it holds, and the next one. */
struct consumer {
    struct stream_batch held[8];
    uint32_t count;
    uint64_t at;
};

/* Compares a batch with the samples that the plan lists. `samples` has all samples, in the order of the set.
 */
static void expect_listed(const struct stream_batch *batch, uint64_t at, const struct record *samples)
{
    uint32_t numbers[64];
    const struct stream_position where = position(at);
    const uint32_t count = list(&opened.epochs, where.epoch, where.step, numbers);
    cr_assert(batch->epoch == where.epoch && batch->step == where.step && batch->samples.count == count);
    for (uint32_t i = 0; i < count; i++) {
        cr_assert(batch->numbers[i] == numbers[i] && batch->samples.labels[i] == samples->labels[numbers[i]]);
        cr_assert(memcmp((const uint8_t *)batch->samples.values + i * batch->samples.stride,
                         samples->values + numbers[i] * samples->sample_bytes, samples->sample_bytes) == 0);
    }
}

static void release_one(struct consumer *consumer, uint32_t i)
{
    must(stream_release(opened.stream, &consumer->held[i], NULL));
    consumer->held[i] = consumer->held[--consumer->count];
}

/* Takes a batch, releases one, seeks, cancels, or compares the batches that are held. */
static void act(struct consumer *consumer, const struct record *samples)
{
    const uint32_t most = opened.request.ahead + (opened.request.held ? opened.request.held : 1),
                   what = draw(16);
    if (what < 10 && consumer->count < most && consumer->count < COUNT_OF(consumer->held)) {
        must(stream_next(opened.stream, &consumer->held[consumer->count++]));
        expect_listed(&consumer->held[consumer->count - 1], consumer->at++, samples);
    } else if (what < 14 && consumer->count > 0) {
        const uint32_t i = draw(consumer->count);
        const struct stream_batch *batch = &consumer->held[i];
        expect_listed(batch, batch->epoch * opened.request.plan.steps + batch->step, samples);
        release_one(consumer, i);
    } else if (what >= 14) {
        while (consumer->count > 0)
            release_one(consumer, consumer->count - 1);
        if (what == 15)
            stream_cancel(opened.stream);
        consumer->at = draw(3 * (uint32_t)opened.request.plan.steps);
        must(stream_seek(opened.stream, position(consumer->at)));
    }
}

Test(stream, random_configurations_deliver_what_the_plan_lists)
{
    static const char *const names[] = {"m", "f"};
    prepare(61);
    open_set(&opened, "f");
    opened.epochs.shuffle = 0;
    start(&opened);
    struct record samples = take(opened.stream, opened.request.plan.steps);
    close_set(&opened);
    for (uint32_t seed = 0; seed < 100; seed++) {
        struct consumer consumer = {.count = 0};
        random_state = seed;
        open_set(&opened, names[draw(2)]);
        opened.epochs = (struct epochs){1 + draw(61), 1 + draw(64), 1 + draw(70), draw(3) * draw(100)};
        opened.request.threads = 1 + (int)draw(5);
        opened.request.ahead = 1 + draw(6);
        opened.request.held = draw(4);
        opened.request.plan.by_epoch = draw(2);
        opened.request.resident_bytes = draw(2) * draw(60000);
        start(&opened);
        for (int i = 0; i < 60; i++)
            act(&consumer, &samples);
        close_set(&opened);
    }
    forget(&samples);
}

/* ---- Resources ---- */

static int entries_of(const char *path)
{
    int count = 0;
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        count += *entry->d_name != '.';
    cr_assert(directory && closedir(directory) == 0);
    return count;
}

static size_t allocated(void)
{
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

/* Without random crops, the memory of the decoders does not grow after the first samples. */
Test(stream, openings_and_epochs_need_no_further_memory)
{
    size_t before = 0;
    int files = 0, threads = entries_of("/proc/self/task");
    prepare(61);
    for (int n = 0; n < 2; n++) {
        open_set(&opened, n ? "f" : "m");
        before = 0;
        for (int i = 0; i < 214; i++) {
            start(&opened);
            struct record some = take(opened.stream, (uint64_t)i % 7);
            forget(&some);
            stream_close(opened.stream);
            before = i < 14 && allocated() > before ? allocated() : before;
            files = i < 14 ? entries_of("/proc/self/fd") : files;
        }
        cr_expect_leq(allocated(), before + before / 100, "%zu, then %zu bytes", before, allocated());
        cr_expect_eq(entries_of("/proc/self/fd"), files);
        for (int turn = 0; turn < 500 && entries_of("/proc/self/task") != threads; turn++)
            usleep(2000); /* Linux lists a thread for a moment after pthread_join() */
        cr_expect_eq(entries_of("/proc/self/task"), threads);
        start(&opened);
        struct record some = take(opened.stream, 20 * opened.request.plan.steps);
        forget(&some);
        before = allocated();
        files = entries_of("/proc/self/fd");
        for (int epoch = 0; epoch < 100; epoch++) {
            some = take(opened.stream, opened.request.plan.steps);
            forget(&some);
        }
        cr_expect_leq(allocated(), before + before / 100, "%zu, then %zu bytes", before, allocated());
        cr_expect_leq(entries_of("/proc/self/fd"), files + opened.request.threads);
        close_set(&opened);
    }
}

/* ---- URLs ---- */

#ifdef HAVE_CURL
static pid_t server_pid;

/* Starts tests/remote_server.py for the test's folder, and returns its port. */
static int start_server(void)
{
    char script[PATH_MAX + 32], line[32];
    int to[2], from[2], port = 0;
    snprintf(script, sizeof script, "%s/tests/remote_server.py", root);
    cr_assert(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    server_pid = fork();
    if (server_pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execlp("python3", "python3", script, folder, NULL);
        _exit(127);
    }
    close(from[1]);
    FILE *server = fdopen(from[0], "r");
    cr_assert(fgets(line, sizeof line, server) && sscanf(line, "%d", &port) == 1,
              "the server does not start");
    setenv("no_proxy", "127.0.0.1", 1);
    return port;
}

/* Returns the size of the files of a folder that this process has open. */
static uint64_t open_bytes(const char *within)
{
    uint64_t bytes = 0;
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char path[PATH_MAX], target[PATH_MAX];
        struct stat info;
        snprintf(path, sizeof path, "/proc/self/fd/%.16s", entry->d_name);
        const ssize_t length = readlink(path, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        if (strstr(target, within) && stat(path, &info) == 0)
            bytes += (uint64_t)info.st_size;
    }
    cr_assert(directory && closedir(directory) == 0);
    return bytes;
}

/* A removed file of the cache keeps its room on the disk while it is open. */
Test(stream, open_shards_do_not_exceed_a_bounded_cache)
{
    char url[128], cache[PATH_MAX];
    prepare(257);
    EXPECT(0, "mv m/*.tar . && mkdir cache && stat -c %%s m-000000.tar");
    snprintf(url, sizeof url, "http://127.0.0.1:%d/web/m-{000000..000002}.tar", start_server());
    snprintf(cache, sizeof cache, "%s/cache", folder);
    remote.cache_dir = cache;
    remote.cache_bytes = (uint64_t)atoll(out) * 3 / 2; /* room for one shard of three */
    open_set(&opened, url);
    opened.request.threads = 1;
    start(&opened);
    for (uint64_t i = 0; i < opened.request.plan.steps; i++) {
        struct record some = take(opened.stream, 1);
        /* A thread may close a shard and open another one while the descriptors are counted. */
        uint64_t bytes = open_bytes("/cache/");
        for (int turn = 0; turn < 100 && bytes > remote.cache_bytes; turn++) {
            usleep(2000);
            bytes = open_bytes("/cache/");
        }
        cr_expect_leq(bytes, remote.cache_bytes, "batch %llu: %llu bytes", (unsigned long long)i,
                      (unsigned long long)bytes);
        forget(&some);
    }
    close_set(&opened);
    remote = (struct remote_options){0};
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
}

/* One answer in ten is late, incomplete, or an error. */
Test(stream, shards_at_a_url_give_the_same_batches)
{
    char url[128], cache[PATH_MAX];
    prepare(257);
    open_set(&opened, "m");
    start(&opened);
    struct record wanted = take(opened.stream, 2 * opened.request.plan.steps);
    close_set(&opened);
    EXPECT(0, "mv m/*.tar .");
    const int port = start_server();
    snprintf(cache, sizeof cache, "%s/cache", folder);
    EXPECT(0, "mkdir cache");
    for (int i = 0; i < 3; i++) {
        remote.cache_dir = i == 2 ? cache : NULL;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m-{000000..000002}.tar", port,
                 i == 1 ? "norange" : "faulty"); /* without ranges, whole shards are read */
        open_set(&opened, url);
        opened.request.threads = i + 1;
        opened.request.shard_bytes = i == 1; /* one shard in memory */
        start(&opened);
        struct record found = take(opened.stream, 2 * opened.request.plan.steps);
        cr_expect(same(&found, &wanted), "case %d", i);
        struct stream_stats stats;
        stream_stats(opened.stream, &stats);
        uint64_t all = 0;
        for (uint32_t f = 0; f < 3; f++)
            all += opened.dataset.files[f].bytes;
        cr_expect(i == 0   ? stats.shard_bytes == all
                  : i == 1 ? stats.shard_bytes < all / 2
                           : stats.shard_bytes == 0,
                  "case %d: %llu of %llu", i, (unsigned long long)stats.shard_bytes, (unsigned long long)all);
        forget(&found);
        close_set(&opened);
    }
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
    forget(&wanted);
}

/* Returns the number of requests for files in /slow/. Sets `*most` to the largest number of the latest nine
 * that ran at the same time. */
static int slow_requests(int port, int *most)
{
    int count = 0;
    EXPECT(0,
           "python3 -c 'import urllib.request as r; "
           "print(r.urlopen(\"http://127.0.0.1:%d/requests/9\").read().decode())'",
           port);
    cr_assert_eq(sscanf(out, "%d %d", &count, most), 2, "%s", out);
    return count;
}

/* Replaces a shard on the server, and expects a failure that names it. */
static void expect_replaced(uint64_t steps)
{
    struct stream_batch batch;
    enum status result = STATUS_OK;
    EXPECT(0, "cp m/m-000001.tar m/x && mv m/x m/m-000000.tar");
    for (uint64_t b = 0; b < steps && result == STATUS_OK; b++)
        if ((result = stream_next(opened.stream, &batch)) == STATUS_OK)
            must(stream_release(opened.stream, &batch, NULL));
    cr_expect(result == STATUS_FAILED && strstr(status_text(), "m-000000.tar") &&
                  strstr(status_text(), "changed while it was read"),
              "%s", status_text());
}

/* Shards of several blocks: with enough memory each block is requested once, and with too little memory the
 * batches are the same. A shard that is replaced on the server is a failure. */
Test(stream, shards_at_a_url_are_read_in_blocks)
{
    const uint64_t few = 5 * REMOTE_BLOCK_BYTES / 2;
    char url[128];
    EXPECT(0, "$P --prepare m --from synth --samples 120 --res 320 --store shards --shards 3 --name m");
    open_set(&opened, "m");
    start(&opened);
    const uint64_t steps = opened.request.plan.steps;
    struct record wanted = take(opened.stream, 2 * steps);
    close_set(&opened);
    const int port = start_server();
    for (int i = 0; i < 3; i++) { /* 1: few blocks, and the files in memory */
        snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m/m-{000000..000002}.tar", port,
                 i == 2 ? "faulty" : "slow");
        open_set(&opened, url);
        opened.request.threads = 1 + 2 * (i == 2);
        opened.request.shard_bytes = i > 0 ? few : 0;
        opened.request.resident_bytes = i == 1 ? UINT64_MAX : 0;
        opened.request.plan.by_epoch = i == 1; /* nothing of the second epoch is asked for in the first */
        start(&opened);
        int most;
        const int before = slow_requests(port, &most);
        struct record found = take(opened.stream, steps);
        struct stream_stats stats;
        stream_stats(opened.stream, &stats);
        uint64_t blocks = 0, bytes = 0;
        for (uint32_t f = 0; f < 3; f++) {
            blocks += (opened.dataset.files[f].bytes - 1) / REMOTE_BLOCK_BYTES + 1;
            bytes += opened.dataset.files[f].bytes;
        }
        cr_assert_eq(blocks, 9);
        struct record first = slice(&wanted, 0, steps), second = slice(&wanted, steps, steps);
        cr_expect(same(&found, &first), "case %d", i);
        forget(&found);
        if (i < 2) {
            const int between = slow_requests(port, &most);
            found = take(opened.stream, steps);
            cr_expect(same(&found, &second));
            forget(&found);
            const int after = slow_requests(port, &most);
            cr_expect(i == 1 ? after == between : after - before == 9, "%s after %d and %d", out, before,
                      between);
            cr_expect(i == 1 || most >= 4, "%d requests at a time", most);
        }
        if (i == 2)
            expect_replaced(steps);
        cr_expect(i > 0 ? stats.shard_bytes <= few : stats.shard_bytes == bytes, "case %d: %llu bytes", i,
                  (unsigned long long)stats.shard_bytes);
        close_set(&opened);
    }
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
    forget(&wanted);
}

/* ---- Servers that do not answer ---- */

#define END_S 2 /* within this time, a stream must end its requests */

/* "stall" or "busy": lets the server not answer, or answer 503; NULL: lets it answer. */
static void set_gate(const char *how)
{
    EXPECT(0, how ? "printf %%s %s >gate.new && mv gate.new gate" : "rm -f gate", how);
}

/* A stream of shards at a server. */
struct waiting {
    const char *place; /* of the server */
    const char *how;   /* it does not answer */
    const char *cache; /* folder, or NULL */
    uint32_t connections;
};

/* Opens the stream, and lets its threads wait for the server. */
static void open_waiting(const struct waiting *waiting, int port)
{
    char url[128];
    remote = (struct remote_options){.connections = waiting->connections, .cache_dir = waiting->cache};
    snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m/m-{000000..000002}.tar", port, waiting->place);
    set_gate(NULL);
    open_set(&opened, url);
    opened.request.threads = 3;
    start(&opened);
    EXPECT(0, "rm -rf cache/*"); /* the shards are there since they were listed */
    set_gate(waiting->how);
    cr_expect_not(stream_wait(opened.stream, 0.15), "%s: %s", waiting->place, waiting->how);
}

/* Closes the stream, which must neither wait for the server nor change the latest message. */
static void close_waiting(const struct waiting *waiting)
{
    status_set(STATUS_FAILED, "the latest message");
    const double begin_s = timer_now_s();
    stream_close(opened.stream);
    const double took_s = timer_now_s() - begin_s;
    cr_expect_lt(took_s, END_S, "%s, %s: close took %.1f s", waiting->place, waiting->how, took_s);
    cr_expect_str_eq(status_text(), "the latest message");
    dataset_close(&opened.dataset);
}

/* After the seek, the batches must be those of an epoch but for its first one. */
static void seek_waiting(const struct waiting *waiting, const struct record *epoch)
{
    const uint64_t steps = opened.request.plan.steps;
    const struct record wanted = slice(epoch, 1, steps - 1);
    set_gate(NULL); /* the threads continue at once; the server has the earlier requests */
    const double begin_s = timer_now_s();
    must(stream_seek(opened.stream, (struct stream_position){0, 1}));
    const double took_s = timer_now_s() - begin_s;
    cr_expect_lt(took_s, END_S, "%s, %s: seek took %.1f s", waiting->place, waiting->how, took_s);
    struct record found = take(opened.stream, steps - 1);
    cr_expect(same(&found, &wanted), "%s, %s", waiting->place, waiting->how);
    forget(&found);
}

static void cancel_waiting(void)
{
    struct stream_batch batch;
    stream_cancel(opened.stream);
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
    cr_expect_str_eq(status_text(), "the stream was cancelled");
}

/* Closing and seeking end requests to a server that does not answer, and the attempts after a 503. */
Test(stream, a_server_that_does_not_answer_delays_no_end, .timeout = 200)
{
    char cache[PATH_MAX];
    snprintf(cache, sizeof cache, "%s/cache", folder);
    const struct waiting cases[] = {{.place = "gate", .connections = 2}, /* other requests are in the queue */
                                    {.place = "gate"},
                                    {.place = "wholegate"},
                                    {.place = "gate", .cache = cache}};
    EXPECT(0, "$P --prepare m --from synth --samples 120 --res 320 --store shards --shards 3 --name m && "
              "mkdir cache");
    open_set(&opened, "m");
    start(&opened);
    struct record epoch = take(opened.stream, opened.request.plan.steps);
    close_set(&opened);
    const int port = start_server();
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        struct waiting waiting = cases[i / 2];
        waiting.how = i % 2 ? "busy" : "stall";
        open_waiting(&waiting, port);
        close_waiting(&waiting);
        open_waiting(&waiting, port);
        cancel_waiting();
        close_waiting(&waiting);
        open_waiting(&waiting, port);
        seek_waiting(&waiting, &epoch);
        close_waiting(&waiting);
    }
    remote = (struct remote_options){0};
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
    forget(&epoch);
}

/* A block of a shard that a thread reads. */
struct block_read {
    pthread_t thread;
    struct remote_blocks *blocks;
    uint64_t offset;
    enum status status;
};

static void *read_block(void *context)
{
    struct block_read *read = context;
    uint8_t byte;
    read->status = remote_blocks_read(read->blocks, 0, read->offset, 1, &byte);
    return NULL;
}

/* The delays between attempts are a quarter as long. */
static atomic_bool hurries;

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    const long part = hurries ? 4 : 1;
    const struct timespec shorter = {wanted->tv_sec / part, wanted->tv_nsec / part};
    return clock_nanosleep(CLOCK_REALTIME, 0, &shorter, left);
}

/* Threads that wait for the same bytes. */
struct waiting_read {
    pthread_t thread;
    struct remote_blocks *blocks; /* or: */
    struct set_files *files;
    enum status status;
    char text[256];
};

static void *read_same(void *context)
{
    struct waiting_read *read = context;
    uint8_t byte;
    const struct dataset_member member = {.size = 1};
    read->status = read->blocks ? remote_blocks_read(read->blocks, 0, 0, 1, &byte)
                                : set_files_read(read->files, &member, 1, &byte);
    snprintf(read->text, sizeof read->text, "%s", status_text());
    return NULL;
}

/* Returns how many requests the server has refused. */
static int refused_at(int port)
{
    int count = -1;
    EXPECT(0,
           "python3 -c 'import urllib.request; print(urllib.request.urlopen(\"http://127.0.0.1:%d/refused\")"
           ".read().decode())'",
           port);
    cr_assert_eq(sscanf(out, "%d", &count), 1, "%s", out);
    return count;
}

/* All threads that wait for a block, or for a whole shard, report the failure of one request with its six
 * attempts. The next read makes another request. */
Test(stream, a_failure_is_reported_to_all_that_wait)
{
    enum { THREADS = 6, ATTEMPTS = 6 };
    const int port = start_server();
    int refused = 0;
    EXPECT(0, "$P --prepare m --from synth --samples 40 --res 64 --store shards --shards 1 --name m");
    for (int whole = 0; whole < 2; whole++) {
        struct waiting_read reads[THREADS] = {0}, again = {0};
        struct remote_blocks *blocks = NULL;
        struct set_files *files = NULL;
        const struct set_files_order order = {0};
        char url[128];
        snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m/m-000000.tar", port,
                 whole ? "wholegate" : "gate");
        open_set(&opened, url);
        if (whole)
            must(set_files_open(&opened.dataset, THREADS, UINT64_C(1) << 30, &order, &files));
        else
            must(remote_blocks_open(&opened.dataset, 2 * REMOTE_BLOCK_BYTES, &blocks));
        set_gate("busy");
        hurries = true;
        for (int i = 0; i < THREADS; i++) {
            reads[i].blocks = blocks;
            reads[i].files = files;
            cr_assert_eq(pthread_create(&reads[i].thread, NULL, read_same, &reads[i]), 0);
        }
        for (int i = 0; i < THREADS; i++) {
            pthread_join(reads[i].thread, NULL);
            cr_expect_eq(reads[i].status, STATUS_FAILED);
            cr_expect(strstr(reads[i].text, "tried 6 times") && strcmp(reads[i].text, reads[0].text) == 0,
                      "%s", reads[i].text);
        }
        const int now = refused_at(port);
        cr_expect_eq(now - refused, ATTEMPTS, "%s: %d requests", url, now - refused);
        refused = now;
        hurries = false;
        set_gate(NULL);
        again.blocks = blocks;
        again.files = files;
        read_same(&again);
        must(again.status);
        remote_blocks_close(blocks);
        set_files_close(files);
        dataset_close(&opened.dataset);
    }
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
}

/* The first block was asked for, the second one is read, and the third one needs room: its thread waits for
 * the first block. Other threads can use the blocks in the meantime. */
Test(stream, a_thread_that_waits_for_room_blocks_no_other)
{
    char url[128];
    struct remote_blocks *blocks;
    struct block_read reads[2] = {{.offset = REMOTE_BLOCK_BYTES}, {.offset = 2 * REMOTE_BLOCK_BYTES}};
    EXPECT(0, "$P --prepare m --from synth --samples 40 --res 320 --store shards --shards 1 --name m");
    snprintf(url, sizeof url, "http://127.0.0.1:%d/gate/m/m-000000.tar", start_server());
    open_set(&opened, url);
    cr_assert_gt(opened.dataset.files[0].bytes, 2 * REMOTE_BLOCK_BYTES);
    must(remote_blocks_open(&opened.dataset, 2 * REMOTE_BLOCK_BYTES, &blocks));
    set_gate("stall");
    remote_blocks_ask(blocks, 0, 0, 1);
    for (int i = 0; i < 2; i++) {
        reads[i].blocks = blocks;
        cr_assert_eq(pthread_create(&reads[i].thread, NULL, read_block, &reads[i]), 0);
        usleep(200000);
    }
    const double begin_s = timer_now_s();
    cr_expect_eq(remote_blocks_held(blocks), 2 * REMOTE_BLOCK_BYTES);
    remote_blocks_stop(blocks);
    cr_expect_lt(timer_now_s() - begin_s, 0.5);
    for (int i = 0; i < 2; i++) {
        pthread_join(reads[i].thread, NULL);
        cr_expect_eq(reads[i].status, STATUS_FAILED);
    }
    cr_expect_lt(timer_now_s() - begin_s, END_S);
    set_gate(NULL);
    remote_blocks_resume(blocks);
    read_block(&reads[1]);
    must(reads[1].status);
    const uint64_t left = opened.dataset.files[0].bytes - 2 * REMOTE_BLOCK_BYTES;
    cr_expect_eq(remote_blocks_held(blocks), left < REMOTE_BLOCK_BYTES ? left : REMOTE_BLOCK_BYTES);
    remote_blocks_close(blocks);
    dataset_close(&opened.dataset);
    kill(server_pid, SIGKILL);
    waitpid(server_pid, NULL, 0);
}
#endif
#endif
