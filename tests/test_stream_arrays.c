/* Tests of arrays in shards, which a stream reads directly into its batches (data/set_stream.c). */
#include "stream_support.h"

TestSuite(stream_arrays, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

static struct opened opened;

/* Opens a set of arrays of one shape. */
static void open_arrays(const char *name)
{
    open_set(&opened, name);
    opened.request.fit.res = opened.request.fit.channels = 0;
    must(set_stream_find_shape(&opened.request));
}

/* Returns the batches of two epochs. */
static struct record take_all(const char *name, int threads)
{
    open_arrays(name);
    opened.request.threads = threads;
    start(&opened);
    struct record record = take(opened.stream, 2 * opened.request.plan.steps);
    close_set(&opened);
    return record;
}

/* Prepares arrays as shards in `m`, as files in `f`, and shards without an index in `p`. */
static void prepare_arrays(unsigned shards)
{
    const char *command = "$P --prepare %s --from digits --samples 607 --store %s --encode npy --name m";
    char text[256];
    snprintf(text, sizeof text, command, "m", "shards");
    EXPECT(0, "%s --shards %u", text, shards);
    snprintf(text, sizeof text, command, "f", "files");
    EXPECT(0, "%s", text);
    EXPECT(0, "mkdir p && cp m/*.tar p");
}

/* Overwrites a byte of the image or the label of sample 20 of a set. */
static void damage(const char *set, bool image, uint64_t at, char byte)
{
    open_arrays(set);
    const struct dataset_sample *sample = &opened.dataset.samples[20];
    const struct dataset_member *member =
        &opened.dataset.members[sample->member + (image ? sample->image : sample->label)];
    EXPECT(0, "printf '\\%o' | dd of=%s/%s bs=1 seek=%llu conv=notrunc 2>/dev/null", (unsigned char)byte, set,
           opened.dataset.files[member->file].name, (unsigned long long)(member->offset + at));
    dataset_close(&opened.dataset);
}

/* Expects that sample 20 is masked, and that it ends a stream without masks with this reason. */
static void expect_broken(const char *set, const char *reason)
{
    struct stream_batch batch;
    open_arrays(set);
    opened.epochs.shuffle = 0;
    opened.request.threads = 1; /* it has read 20 arrays directly before */
    start(&opened);
    struct record found = take(opened.stream, 1);
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_FAILED);
    cr_expect(strstr(status_text(), reason), "%s: %s", set, status_text());
    cr_expect(strstr(status_text(), opened.dataset.samples[20].key), "%s: %s", set, status_text());
    forget(&found);
    stream_close(opened.stream);
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    found = take(opened.stream, opened.request.plan.steps);
    for (uint32_t i = 0; i < found.count; i++) {
        cr_expect_eq(found.labels[i] == STREAM_MASKED, found.numbers[i] == 20, "%s: sample %u", set,
                     found.numbers[i]);
        for (size_t at = 0; found.numbers[i] == 20 && at < found.sample_bytes; at++)
            cr_assert_eq(found.values[i * found.sample_bytes + at], 0);
    }
    forget(&found);
    close_set(&opened);
}

/* Files are read one member at a time. With 300 shards, some are closed and opened again. */
Test(stream_arrays, the_batches_are_those_of_files)
{
    static const unsigned shards[] = {1, 3, 300};
    for (size_t s = 0; s < COUNT_OF(shards); s++) {
        prepare_arrays(shards[s]);
        struct record wanted = take_all("f", 1);
        cr_assert_eq(wanted.count, 2 * 607);
        for (int threads = 1; threads <= 3; threads++)
            for (int indexed = 0; indexed < 2; indexed++) {
                struct record found = take_all(indexed ? "m" : "p", threads);
                cr_expect(same(&wanted, &found), "%u shards, %d threads, index: %d", shards[s], threads,
                          indexed);
                forget(&found);
            }
        forget(&wanted);
        EXPECT(0, "rm -r m f p");
    }
}

/* An array may have another header; then its shape and type count. */
Test(stream_arrays, headers_may_differ)
{
    struct stream_batch batch;
    prepare_arrays(1);
    EXPECT(
        0,
        "mkdir e y z && cd e && tar xf ../m/m-000000.tar && i=$(ls *.npy | sed -n 8p) && export LC_ALL=C && "
        "sed -i \"1s/'descr': /'descr':/;1s/\\$/ /\" $i && tar cf ../y/y.tar * && "
        "sed -i '1s/28, 28/14, 56/' $i && tar cf ../z/z.tar *");
    struct record wanted = take_all("p", 1), found = take_all("y", 1);
    cr_expect(same(&wanted, &found));
    forget(&wanted);
    forget(&found);
    open_arrays("z");
    opened.epochs.shuffle = 0;
    opened.request.threads = 1;
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    cr_expect_eq(stream_next(opened.stream, &batch), STATUS_USAGE);
    cr_expect(strstr(status_text(), "14x56"), "%s", status_text());
    close_set(&opened);
}

Test(stream_arrays, damaged_bytes_are_found_by_the_hash_of_the_index)
{
    prepare_arrays(2);
    damage("m", true, 300, 'X');
    expect_broken("m", "do not match the hash in the index");
}

Test(stream_arrays, broken_headers_and_labels_are_found)
{
    prepare_arrays(2);
    damage("p", false, 0, 'x');
    expect_broken("p", "is not a label");
    EXPECT(0, "cp m/*.tar p");
    damage("p", true, 3, 'x');
    expect_broken("p", "wrong magic number");
}

Test(stream_arrays, values_must_be_finite)
{
    EXPECT(0, "$P --prepare h --from clips --samples 61 --shards 2 && mkdir p && cp h/*.tar p");
    struct record whole = take_all("p", 1);
    cr_assert_eq(whole.count, 2 * 61);
    forget(&whole);
    damage("p", true, 1001, (char)0x7F);
    damage("p", true, 1000, (char)0xFF);
    expect_broken("p", "NaN");
}

/* MixUp and CutMix have targets of `classes` columns, so a larger label is broken. */
Test(stream_arrays, labels_are_below_the_number_of_classes)
{
    prepare_arrays(2);
    struct record all = take_all("m", 1);
    open_arrays("m");
    opened.request.threads = 2;
    opened.request.classes = 5;
    opened.request.on_error = SET_STREAM_MASK;
    start(&opened);
    struct record found = take(opened.stream, 2 * opened.request.plan.steps);
    cr_assert_eq(found.count, all.count);
    uint32_t masked = 0;
    for (uint32_t i = 0; i < all.count; i++) {
        cr_expect_eq(found.labels[i], all.labels[i] < 5 ? all.labels[i] : STREAM_MASKED, "sample %u",
                     all.numbers[i]);
        masked += found.labels[i] == STREAM_MASKED;
    }
    cr_expect(masked > all.count / 4);
    forget(&found);
    forget(&all);
    close_set(&opened);
}

/* ---- Sets that change ---- */

/* Runs a command after the first batches, and expects a failure that names a shard. All batches before it
 * have the original contents. */
static void expect_change(const char *command, uint32_t lanes, const struct record *all)
{
    struct stream_batch batch;
    enum status result = STATUS_OK;
    uint32_t at = 0;
    EXPECT(0, "rm -rf x; cp -r m x");
    open_arrays("x");
    opened.request.lanes = lanes; /* 0: shards are not read in blocks */
    start(&opened);
    for (uint64_t i = 0; i < 2 * opened.request.plan.steps; i++) {
        if (i == 2)
            EXPECT(0, "%s", command);
        result = stream_next(opened.stream, &batch);
        if (result != STATUS_OK)
            break;
        cr_expect_arr_eq(batch.samples.values, all->values + at * all->sample_bytes, batch.samples.bytes);
        at += batch.samples.count;
        must(stream_release(opened.stream, &batch, NULL));
    }
    cr_expect_eq(result, STATUS_FAILED, "%s", command);
    cr_expect(strstr(status_text(), "changed after the data set was opened"), "%s: %s", command,
              status_text());
    cr_expect(strstr(status_text(), "/x/m-00000") && strstr(status_text(), "sample '"), "%s: %s", command,
              status_text());
    close_set(&opened);
}

Test(stream_arrays, shards_that_change_are_failures)
{
    prepare_arrays(3);
    struct record all = take_all("m", 2);
    for (uint32_t lanes = 0; lanes <= 8; lanes += 8) {
        expect_change("truncate -s 4096 x/m-000001.tar", lanes, &all);
        expect_change("cp m/m-000002.tar x/y && mv x/y x/m-000002.tar", lanes, &all);
        expect_change("cat m/m-000001.tar > x/m-000002.tar", lanes, &all);
        expect_change("cat m/m-000002.tar > x/m-000002.tar", lanes, &all); /* the same bytes */
        expect_change("rm x/*.tar", lanes, &all);
    }
    forget(&all);
}
