/* Tests shards that are compressed by gzip: streams and programs read unpacked copies of them, with the same
 * samples as from shards that are not compressed. */
#include <sys/stat.h>
#include <unistd.h>

#include "data/unpack.h"
#include "must.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(unpack, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

#if defined HAVE_PNG && defined HAVE_XXHASH && defined HAVE_ZLIB

/* Writes 60 digits as shards (p), and the same shards compressed (z). */
static void prepare(void)
{
    EXPECT(0, "$P --prepare all --from digits --samples 60 --store imagefolder && mkdir f p z && "
              "cp -r all/*/ f && $P --prepare m --from dataset --source f --shards 3 --name s && "
              "cp m/*.tar p && for t in m/*.tar; do gzip -c $t >z/$(basename $t).gz; done");
}

static enum status unpack(const char *name, uint64_t limit, bool frozen, char *copy, uint64_t *bytes)
{
    char from[PATH_MAX], to[PATH_MAX];
    snprintf(from, sizeof from, "%s/%s", folder, name);
    snprintf(to, sizeof to, "%s/c", folder);
    return unpack_shard(from, to, limit, frozen, NULL, copy, bytes);
}

/* Expects that the cache folder has this many files, also hidden ones. */
static void expect_files(int count)
{
    EXPECT(0, "test $(ls -A c | wc -l) = %d || { ls -A c; false; }", count);
}

Test(unpack, copies_have_the_bytes_of_gunzip)
{
    char copy[PATH_MAX], again[PATH_MAX];
    uint64_t bytes, same;
    struct stat first, second;
    /* Several members; sizes around the pieces in which a file is read and written; data that do not shrink.
     */
    EXPECT(0,
           "head -c 1048576 /dev/urandom >1 && head -c 3145728 /dev/zero >2 && : >3 && printf x >4 && "
           "head -c 1048577 /dev/urandom >5 && cat 1 2 3 4 5 >all && for i in 1 2 3 4 5; do gzip $i; done && "
           "cat 1.gz 2.gz 3.gz 4.gz 5.gz >x.tar.gz && gzip -c all >y.tgz");
    must(unpack("x.tar.gz", 0, false, copy, &bytes));
    cr_expect_eq(bytes, 1048576 + 3145728 + 1 + 1048577);
    EXPECT(0, "cmp all %s", copy);
    must(unpack("y.tgz", bytes, false, again, &same));
    cr_expect(same == bytes && strcmp(copy, again) != 0);
    EXPECT(0, "cmp all %s", again);
    cr_assert_eq(stat(copy, &first), 0);
    must(unpack("x.tar.gz", 0, true, again, &same));
    cr_assert_eq(stat(copy, &second), 0);
    cr_expect(strcmp(copy, again) == 0 && same == bytes && first.st_ino == second.st_ino);
    EXPECT(0, "touch x.tar.gz");
    must(unpack("x.tar.gz", 0, false, again, &same));
    cr_expect_str_neq(copy, again, "a file that was changed gets another copy");
    cr_assert_eq(chdir(folder), 0);
    must(unpack_shard("x.tar.gz", "c", 0, true, NULL, copy, &same));
    cr_expect(*copy == '/' && strcmp(copy, again) == 0, "%s: the working folder may change later", copy);
    expect_files(3);
}

static void expect_failure(const char *name, uint64_t limit, bool frozen, enum status wanted,
                           const char *words)
{
    char copy[PATH_MAX];
    uint64_t bytes;
    cr_expect_eq(unpack(name, limit, frozen, copy, &bytes), wanted, "%s: %s", name, status_text());
    cr_expect(strstr(status_text(), words) && strstr(status_text(), name), "%s: %s", name, status_text());
    expect_files(0);
}

Test(unpack, broken_files_leave_no_copy)
{
    EXPECT(0, "mkdir c && head -c 200000 /dev/urandom >r && gzip -c r >whole.tar.gz && "
              "head -c 150000 whole.tar.gz >short.tar.gz && head -c -1 whole.tar.gz >last.tar.gz && "
              "cp r plain.tar.gz && : >empty.tar.gz && mkdir folder.tar.gz && cp whole.tar.gz bad.tar.gz && "
              "printf '\\377\\377\\377\\377' | dd of=bad.tar.gz bs=1 seek=200020 conv=notrunc 2>/dev/null && "
              "(cat whole.tar.gz; printf garbage) >more.tar.gz && gzip -c /dev/null >nothing.tar.gz");
    expect_failure("short.tar.gz", 0, false, STATUS_FAILED, "truncated");
    expect_failure("last.tar.gz", 0, false, STATUS_FAILED, "truncated");
    expect_failure("empty.tar.gz", 0, false, STATUS_FAILED, "truncated");
    expect_failure("plain.tar.gz", 0, false, STATUS_FAILED, "damaged gzip file");
    expect_failure("bad.tar.gz", 0, false, STATUS_FAILED, "damaged gzip file: incorrect");
    expect_failure("more.tar.gz", 0, false, STATUS_FAILED, "damaged gzip file");
    expect_failure("folder.tar.gz", 0, false, STATUS_FAILED, "not a regular file");
    expect_failure("none.tar.gz", 0, false, STATUS_FAILED, "No such file");
    expect_failure("whole.tar.gz", 199999, false, STATUS_USAGE, "more than 199999 bytes");
    expect_failure("whole.tar.gz", 0, true, STATUS_USAGE, "a dry run writes none");
}

static struct fdsl_source *open_source(const char *name, bool cached)
{
    char path[PATH_MAX], cache[PATH_MAX];
    struct fdsl_source_config config;
    struct fdsl_source *source;
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(cache, sizeof cache, "%s/c", folder);
    config.path = path;
    config.kind = "shards";
    config.cache_dir = cached ? cache : NULL;
    good(fdsl_source_open(&config, &source));
    return source;
}

/* What a killed process has left of a copy is removed by the next one that writes this copy. */
Test(unpack, left_files_of_a_copy_are_removed)
{
    char copy[PATH_MAX];
    uint64_t bytes;
    EXPECT(0, "head -c 5000 /dev/urandom >r && gzip -c r >x.tar.gz");
    must(unpack("x.tar.gz", 0, false, copy, &bytes));
    EXPECT(0, "mv %s %s.99-0.tmp && : >c/unpacked-0-0.tar.98-0.tmp && : >%s.keep", copy, copy, copy);
    must(unpack("x.tar.gz", 0, false, copy, &bytes));
    EXPECT(0, "cmp r %s", copy);
    expect_files(3);
}

/* A copy that is damaged is named, and not only the shard. */
Test(unpack, a_damaged_copy_is_named)
{
    struct fdsl_source_config config;
    struct fdsl_source *source;
    char path[PATH_MAX], cache[PATH_MAX];
    prepare();
    fdsl_source_close(open_source("z", true));
    EXPECT(0, "for t in c/*; do truncate -s 1536 $t; done");
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/z", folder);
    snprintf(cache, sizeof cache, "%s/c", folder);
    config.path = path;
    config.cache_dir = cache;
    cr_assert_eq(fdsl_source_open(&config, &source), FDSL_FAILED);
    cr_expect(strstr(fdsl_error(), "remove its unpacked copy, ") && strstr(fdsl_error(), "/c/unpacked-"),
              "%s", fdsl_error());
}

/* Several processes want the same copy: one writes it, and all get it. */
Test(unpack, processes_share_a_copy)
{
    prepare();
    EXPECT(0,
           "for i in 1 2 3 4; do $P --variant stream --data z --decode --cache-dir c --cache any --batch 8 "
           "--min-samples 1 --max-time 0 >log$i 2>&1 & done; wait; for i in 1 2 3 4; do grep -q stream log$i "
           "|| { cat log$i; exit 1; }; done");
    expect_files(3);
}

/* Two epochs of shuffled batches are those of the shards that are not compressed. */
Test(unpack, streams_deliver_the_same_batches)
{
    static uint8_t images[2][16 * 3 * 28 * 28];
    static int64_t labels[2][16];
    prepare();
    for (int time = 0; time < 2; time++) {
        struct fdsl_stream_config config;
        struct fdsl_stream *streams[2];
        good(fdsl_stream_config_init(&config, sizeof config));
        config.out_res = 28;
        config.batch_size = 16;
        config.seed = 3;
        config.lanes = 3;
        config.shuffle_buffer = 30;
        config.num_threads = 2;
        for (int i = 0; i < 2; i++) {
            struct fdsl_source *source = open_source(i ? "z" : "p", i);
            good(fdsl_stream_open(source, &config, &streams[i]));
            fdsl_source_close(source);
        }
        for (int epoch = 0; epoch < 2;) {
            uint32_t count[2];
            enum fdsl_status status_[2];
            for (int i = 0; i < 2; i++)
                status_[i] = fdsl_stream_fill(streams[i], images[i], labels[i], &count[i], NULL);
            cr_assert(status_[0] == status_[1] && (status_[0] == FDSL_OK || status_[0] == FDSL_END), "%s",
                      fdsl_error());
            epoch += status_[0] == FDSL_END;
            cr_assert_eq(count[0], count[1]);
            cr_expect_eq(memcmp(images[0], images[1], count[0] * sizeof *images / 16), 0);
            cr_expect_eq(memcmp(labels[0], labels[1], count[0] * sizeof **labels), 0);
        }
        for (int i = 0; i < 2; i++)
            fdsl_stream_close(streams[i]);
        expect_files(3);
    }
}

/* A copy that changes while it is read ends the stream. */
Test(unpack, a_copy_that_changes_is_noticed)
{
    static uint8_t images[3 * 28 * 28];
    struct fdsl_stream_config config;
    struct fdsl_stream *stream;
    uint32_t count;
    prepare();
    good(fdsl_stream_config_init(&config, sizeof config));
    config.out_res = 28;
    config.batch_size = 1;
    config.prefetch = 1;
    struct fdsl_source *source = open_source("z", true);
    good(fdsl_stream_open(source, &config, &stream));
    good(fdsl_stream_fill(stream, images, NULL, &count, NULL));
    EXPECT(0, "for t in c/*; do cp $t new && mv new $t; done");
    enum fdsl_status result = FDSL_OK;
    while (result == FDSL_OK)
        result = fdsl_stream_fill(stream, images, NULL, &count, NULL);
    cr_expect(result == FDSL_FAILED && strstr(fdsl_error(), "the file changed after"), "%s", fdsl_error());
    fdsl_stream_close(stream);
    fdsl_source_close(source);
}

Test(unpack, programs_read_compressed_shards)
{
    prepare();
    EXPECT(
        0,
        "for d in p z; do $P --variant train-omp --model logreg --data $d --feed load --batch 16 --epochs 2 "
        "--threads 2 $(test $d = z && echo --cache-dir c) --out $d.csv >log 2>&1 || { cat log; exit 1; }; "
        "done; python3 - <<'END'\n"
        "import csv\n"
        "rows = [[row['train_loss'] for row in csv.DictReader(open(d + '.csv'))] for d in ('p', 'z')]\n"
        "assert len(rows[0]) == 2 and rows[0] == rows[1], rows\n"
        "END");
    EXPECT(0,
           "$P --variant shards-mmap,shards-omp,stream --data z --decode --cache-dir c --cache any --batch 8 "
           "--min-samples 1 --max-time 0");
    EXPECT(0, "$P --variant stream --decode --data z/s-000001.tar.gz --cache-dir c --cache any --batch 8 "
              "--min-samples 1 "
              "--max-time 0");
    expect_files(3);
}

Test(unpack, refusals_name_the_remedy)
{
    prepare();
    expect_refused(2, "read them with --cache-dir DIR on a disk with room", "$P --variant stream --data z");
    expect_refused(2, "read them with --cache-dir DIR on a disk with room",
                   "$P --variant train-omp --data z/s-000000.tar.gz --feed load");
    expect_refused(2, "unpack the shards with gunzip", "$P --prepare q --from dataset --source z");
    expect_refused(2,
                   "--cache-dir and --cache-bytes are for data at a URL and for shards that are compressed",
                   "$P --variant stream --data p --cache-dir c");
    expect_refused(2, "raise --cache-bytes",
                   "$P --variant stream --data z --cache-dir c --cache-bytes 150K --cache any");
    expect_refused(2, "a dry run writes none",
                   "$P --variant stream --data z --cache-dir d --cache any --dry-run");
    EXPECT(
        0,
        "cp p/s-000000.tar z && $P --variant stream --decode --data z --cache any --batch 8 --min-samples 1 "
        "--max-time 0 2>&1");
    EXPECT_OUT("only the shards whose names end in .tar are read, not s-000000.tar.gz");
}

#endif
