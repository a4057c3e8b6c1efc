/* Tests all CPU variants of `load` on data that are broken or that break during a run. */
#include "load_support.h"

#include <sys/resource.h>

TestSuite(load_faults, .timeout = 60);

Test(load_faults, truncated_shard_is_reported_with_offset, .init = make_folder, .fini = remove_folder)
{
    static const uint32_t left[] = {20000, 300}; /* 300: not even the first header is complete */
    make_shards(101);
    for (size_t i = 0; i < COUNT_OF(left); i++) {
        cr_assert_eq(truncate(in_folder("x-000001.tar"), left[i]), 0);
        expect_refused("x-000001.tar: offset ");
        expect_skipped(101 - 25 + whole_before(25, left[i]),
                       ""); /* how many samples the truncation removed is unknown */
    }
}

Test(load_faults, flipped_bit_in_header_is_reported, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    overwrite("x-000001.tar", 3, "z", 1);
    expect_refused("x-000001.tar: offset 0: ");
    expect_skipped(76, "");
}

Test(load_faults, empty_shard_is_reported, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), 0), 0);
    expect_refused("x-000002.tar");
    expect_skipped(50, "");
}

Test(load_faults, invalid_or_empty_folder_is_refused, .init = make_folder, .fini = remove_folder)
{
    expect_refused("no samples found");
    fclose(fopen(in_folder("1.bin"), "w"));
    expect_refused("contain no data; copy or write their empty files again");
    cr_assert_eq(symlink(".", in_folder("again")), 0);
    expect_refused("again/ links back to one of its parent folders");
    cr_assert_eq(mkdir(in_folder(".prepare"), 0777), 0);
    expect_refused("is incomplete: its --prepare");
    remove_folder();
    expect_refused("No such file");
    make_folder();
}

/* Truncates the shard `broken` after the data set was opened. Without --on-error skip, the variant must fail
 * and name the shard. With --on-error skip, the variant must continue, count the lost samples, and exclude
 * them from the work. But if an earlier run has read these samples, the data set has changed between
 * the runs. Then the variant must fail even with --on-error skip. */
static void expect_run_fault(const char *name, const char *broken, const char *words)
{
    for (int skip = 0; skip <= 2; skip++) { /* 2: with skip, and the shard is truncated between two runs */
        struct job job;
        make_shards(101);
        if (start_job(&job, name, skip ? "--cache any --on-error skip --batch 8" : "--cache any --batch 8")) {
            if (skip != 1)
                run_well(&job, 0);
            cr_assert_eq(job.workload->work(job.input, job.variant).items, 101);
            must(job.variant->ready(job.state, 1));
            cr_assert_eq(truncate(in_folder(broken), 8192), 0);
            enum status status = run_ready(&job, 1);
            cr_assert_eq(status, skip == 1 ? STATUS_OK : STATUS_FAILED, "%s: %s", name, status_text());
            if (skip == 1) {
                const struct load_result result = result_of(&job);
                const struct work work = job.workload->work(job.input, job.variant);
                cr_assert_gt(result.skipped, 0, "%s", name);
                cr_assert_eq(result.skipped + result.checksum.count, 101, "%s", name);
                cr_assert_eq(work.items, (double)result.checksum.count, "%s", name);
                cr_assert_eq(work.bytes, (double)result.checksum.bytes, "%s", name);
            } else if (skip) {
                expect_words("the data set changes");
            } else {
                expect_words(broken);
                expect_words(words);
            }
        }
        close_job(&job);
    }
}

Test(load_faults, shard_truncated_during_run_is_an_error, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants);
         v++) { /* variants that map files report the offset of the sample, others the offset of the read */
        bool maps =
            strcmp(shard_variants[v], "shards-mmap") == 0 || strcmp(shard_variants[v], "shards-omp") == 0;
        expect_run_fault(shard_variants[v], "x-000001.tar", maps ? "offset " : "offset 8192: ");
    }
}

/* Renames a shard or file. If `pipe_instead` is set, creates a pipe with the old name. */
static void take_away(const char *name, bool pipe_instead)
{
    char moved[2 * PATH_MAX];
    snprintf(moved, sizeof moved, "%s", in_folder("moved"));
    cr_assert_eq(rename(in_folder(name), moved), 0);
    cr_assert(!pipe_instead || mkfifo(in_folder(name), 0600) == 0);
}

static void bring_back(const char *name)
{
    char moved[2 * PATH_MAX];
    snprintf(moved, sizeof moved, "%s", in_folder("moved"));
    cr_assert_eq(rename(moved, in_folder(name)), 0); /* replaces the pipe, if there is one */
}

Test(load_faults, changed_or_deleted_file_is_an_error, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (int skip = 0; skip <= 1; skip++) {
            struct job job;
            if (start_job(&job, file_variants[v], skip ? "--cache any --on-error skip" : "--cache any")) {
                take_away("000/000050.bin", false);
                enum status status = run(&job, 0);
                cr_assert_eq(status, skip ? STATUS_OK : STATUS_FAILED, "%s", file_variants[v]);
                cr_assert(skip || strstr(status_text(), "000050.bin"), "%s", status_text());
                const struct load_result result = result_of(&job);
                cr_assert(!skip || result.skipped == 1);
                bring_back("000/000050.bin");
            }
            close_job(&job);
        }
}

Test(load_faults, a_run_that_reads_no_sample_is_an_error, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    make_files(100);
    cr_assert(start_job(&job, "files", "--cache any --on-error skip"));
    take_away("000", false);
    expect_failure(&job, 0, "none of its 100 samples");
    close_job(&job);
}

Test(load_faults, grown_file_is_an_error, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++) {
        struct job job;
        struct stat before;
        const char *name = in_folder("000/000050.bin");
        bool started = start_job(&job, file_variants[v], "--cache any");
        cr_assert_eq(stat(name, &before), 0);
        cr_assert_eq(truncate(name, before.st_size + 5), 0);
        if (started)
            expect_failure(&job, 0, "size has changed");
        cr_assert_eq(truncate(in_folder("000/000050.bin"), before.st_size), 0);
        close_job(&job);
    }
}

Test(load_faults, pipe_instead_of_file_is_reported, .init = make_folder, .fini = remove_folder)
{
    prepare("files");
    cr_assert_eq(unlink(in_folder("not-imagefolder/000/000020.npy")), 0);
    cr_assert_eq(mkfifo(in_folder("not-imagefolder/000/000020.npy"), 0600), 0);
    expect_refused("000020.npy: not a regular file");
    renew_folder();
    make_shards(101);
    struct job job;
    int fd;
    must(open_job(&job, "--cache any"));
    take_away("x-000001.tar", true);
    cr_assert_eq(dataset_file_open(dataset_of(&job), 1, 0, &fd), STATUS_FAILED);
    cr_assert_lt(fd, 0);
    expect_words("not a regular file");
    close_job(&job);
}

/* A shard disappears before a run. Without --on-error skip, this must be an error. With --on-error skip,
 * every run without the shard must count its samples as skipped, and the columns must still be filled. When
 * the shard is back, the next run must fail, because the data set has changed between the runs. */
static void expect_loss_of_a_shard(const char *name, const char *cache, bool pipe_instead)
{
    for (int skip = 0; skip <= 1; skip++) {
        struct job job;
        char line[128];
        make_shards(101);
        snprintf(line, sizeof line, "--cache %s --block 4 --iodepth 3%s", cache,
                 skip ? " --on-error skip" : "");
        bool started = start_job(&job, name, line);
        if (started && skip) {
            take_away("x-000001.tar", pipe_instead);
            for (uint64_t number = 0; number < 3; number++) {
                run_well(&job, number);
                const struct load_result result = result_of(&job);
                cr_assert(result.skipped == 25 && result.checksum.count == 76, "%s", name);
            }
            struct row row = row_of(&job);
            row_free(&row);
            bring_back("x-000001.tar");
            expect_failure(&job, 3, "the data set changes");
        } else if (started) {
            must(job.variant->ready(job.state, 0));
            take_away("x-000001.tar", pipe_instead);
            cr_assert_eq(run_ready(&job, 0), STATUS_FAILED, "%s", name);
            expect_words("x-000001.tar");
            bring_back("x-000001.tar");
            run_well(&job, 1);
        }
        close_job(&job);
    }
}

Test(load_faults, deleted_shard_is_an_error_or_skipped, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (int pipe_instead = 0; pipe_instead <= 1; pipe_instead++)
            expect_loss_of_a_shard(shard_variants[v], "any", pipe_instead);
    expect_loss_of_a_shard("shards-uring", "warm", true);
}

/* Lowers the number of files that this process may have open, so that it can open no other file. */
static struct rlimit allow_no_more_files(void)
{
    struct rlimit before;
    int next = dup(0);
    cr_assert(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    const struct rlimit lower = {(rlim_t)next, before.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &lower), 0);
    return before;
}

/* If a file cannot be opened because too many are open, the file is not broken. (files-uring needs no
 * descriptors: its files are in a table of the ring.) */
static void expect_no_skips_without_files(const char *name)
{
    struct job job;
    if (start_job(&job, name, "--cache any --on-error skip")) {
        cr_assert_eq(job.variant->ready(job.state, 0), STATUS_OK, "%s", status_text());
        struct rlimit before = allow_no_more_files();
        enum status status = run_ready(&job, 0);
        cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
        cr_expect_eq(status, STATUS_EXHAUSTED, "%s: %d", name, status);
        cr_expect(strstr(status_text(), "Too many open files"), "%s: %s", name, status_text());
    }
    close_job(&job);
}

Test(load_faults, too_many_open_files_skip_nothing, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_no_skips_without_files(shard_variants[v]);
    remove_folder();
    make_folder();
    make_files(101);
    expect_no_skips_without_files("files");
    expect_no_skips_without_files("files-omp");
}

/* A variant whose call number `failing` fails; `calls` counts the calls of run(), fetch(), ready() and
 * copy(). */
static struct {
    const struct variant *real;
    int calls, failing;
} faulty;

static enum status fail_in_turn(void)
{
    return faulty.calls++ == faulty.failing ? status_set(STATUS_FAILED, "planted") : STATUS_OK;
}

static enum status faulty_run(void *state, uint64_t number, struct run_time *time)
{
    TRY(fail_in_turn());
    return faulty.real->run(state, number, time);
}

static enum status faulty_ready(void *state, uint64_t number)
{
    TRY(fail_in_turn());
    return faulty.real->ready ? faulty.real->ready(state, number) : STATUS_OK;
}

static enum status faulty_fetch(void *state, void *result)
{
    TRY(fail_in_turn());
    return faulty.real->fetch(state, result);
}

static enum status faulty_copy(void *state, double *bytes_per_s)
{
    TRY(fail_in_turn());
    return ((const struct load_traits *)faulty.real->traits)->copy(state, bytes_per_s);
}

/* load makes further runs after the timed ones, to time system calls and to measure the copy bandwidth. If
 * any call of such a run fails, there must be no row: its columns would be those of an earlier run. */
Test(load_faults, failing_calls_of_extra_runs_are_errors, .init = make_folder, .fini = remove_folder)
{
    make_files(20);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++) {
        struct job job;
        if (start_job(&job, file_variants[v], "--cache any")) {
            faulty.real = job.variant;
            struct variant changed = *job.variant;
            changed.run = faulty_run;
            changed.ready = faulty_ready;
            struct load_traits traits = *(const struct load_traits *)job.variant->traits;
            changed.fetch = faulty_fetch;
            traits.copy = faulty_copy;
            changed.traits = &traits;
            run_well(&job, 0);
            enum status status = STATUS_FAILED;
            for (faulty.failing = 0; status != STATUS_OK; faulty.failing++) {
                CLOSED_BY(row_free) struct row row;
                row_open(&row, job.workload->columns);
                faulty.calls = 0;
                status = job.workload->observe(job.input, &changed, job.state, &row);
                if (status == STATUS_OK)
                    status = job.workload->measure(job.input, &changed, job.state, &row);
                cr_assert_eq(status != STATUS_OK, faulty.calls > faulty.failing, "%s: call %d", job.name,
                             faulty.failing);
            }
            /* At least fetch() of the timed run; ready(), run() and fetch() if calls are timed; and ready(),
             * run(), fetch() and copy() of one round. */
            cr_expect_geq(faulty.failing - 1, traits.calls ? 8 : 5, "%s: %d calls", job.name,
                          faulty.failing - 1);
        }
        close_job(&job);
    }
}

/* The measurement of copy bandwidth must exclude a truncated shard, because copying its mapping would raise
 * SIGBUS. */
Test(load_faults, truncated_shard_is_excluded_from_copy_bandwidth, .init = make_folder, .fini = remove_folder)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        make_shards(101);
        if (start_job(&job, shard_variants[v], "--cache any --on-error skip")) {
            cr_assert_eq(truncate(in_folder("x-000001.tar"), 20000), 0);
            run_well(&job, 0);
            struct row row = row_of(&job);
            row_free(&row);
        }
        close_job(&job);
    }
}

/* Replaces a file by an empty pipe, which the test holds open if `held` is set. A read from an empty pipe
 * never ends while the pipe is open for writing. */
static void expect_no_hang(const char *name, bool skip, bool held, const char *file)
{
    struct job job;
    if (start_job(&job, name, skip ? "--cache any --on-error skip --iodepth 2" : "--cache any --iodepth 2")) {
        must(job.variant->ready(job.state, 0));
        take_away(file, true);
        int writer = held ? open(in_folder(file), O_RDWR) : -1;
        enum status status = run_ready(&job, 0);
        cr_assert_eq(status, skip ? STATUS_OK : STATUS_FAILED, "%s: %s", name, status_text());
        cr_assert(skip || strstr(status_text(), file), "%s", status_text());
        const struct load_result result = result_of(&job);
        cr_assert(!skip || (result.skipped == 1 && result.checksum.count == 100));
        if (held)
            close(writer);
        bring_back(file);
    }
    close_job(&job);
}

Test(load_faults, pipe_instead_of_file_does_not_hang, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    for (size_t v = 0; v < COUNT_OF(file_variants); v++)
        for (int skip = 0; skip <= 1; skip++)
            for (int held = 0; held <= 1; held++) {
                expect_no_hang(file_variants[v], skip, held, "000/000050.bin");
                expect_no_hang(file_variants[v], skip, held, "000/000051.cls"); /* this file is empty */
            }
}

/* The last member of a shard is empty, so the last block has only its header. That block must be read too. */
Test(load_faults, block_of_empty_last_member_is_read, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES], data[4096 - 512] = {1, 2, 3};
    for (int shard = 0; shard < 4; shard++) {
        char name[64];
        uint8_t header[TAR_BLOCK_BYTES];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        FILE *stream = fopen(in_folder(name), "w");
        cr_assert_not_null(stream);
        for (int member = 0; member < 2; member++) {
            snprintf(name, sizeof name, "%d.%s", shard, member ? "cls" : "bin");
            cr_assert_eq(tar_header(header, name, member ? 0 : sizeof data), STATUS_OK);
            fwrite(header, 1, sizeof header, stream);
            fwrite(data, 1, member ? 0 : sizeof data, stream);
        }
        fwrite(zeros, 1, sizeof zeros, stream);
        fclose(stream);
    }
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        bool started = start_job(&job, shard_variants[v], "--cache any --block 4 --iodepth 3 --shuffle 0");
        for (uint64_t number = 0; started && number < 4; number++)
            run_well(&job, number);
        close_job(&job);
    }
}

#ifdef HAVE_PNG
/* The rank that reads the broken sample may change between epochs. In every run, exactly one rank must skip
 * the sample. */
static void expect_a_picture_lost(const char *name, uint64_t ranks)
{
    uint64_t skipped[4] = {0};
    if (!is_available(name))
        return;
    for (uint64_t rank = 0; rank < ranks; rank++) {
        struct job job;
        must(open_job(&job, "--cache any --augment --on-error skip --batch 3 --shuffle 5"));
        must(job.workload->repartition(job.input, job.parameters,
                                       &(const struct partition){.rank = rank, .ranks = ranks}));
        cr_assert(start(&job, name));
        for (uint64_t number = 0; number < 4; number++) {
            run_well(&job, number);
            const struct load_result result = result_of(&job);
            cr_assert_eq(result.skipped + result.checksum.count, 20 / ranks, "%s", name);
            cr_assert_eq(job.workload->work(job.input, job.variant).items, (double)result.checksum.count,
                         "%s", name);
            skipped[number] += result.skipped;
        }
        expect_none_wrong(&job);
        close_job(&job);
    }
    for (int number = 0; number < 4; number++)
        cr_assert_eq(skipped[number], 1, "%s: run %d lost %d", name, number, (int)skipped[number]);
}

Test(load_faults, undecodable_image_is_an_error_or_skipped, .init = make_folder, .fini = remove_folder)
{
    for (int shard = 0; shard <= 1; shard++) {
        make_pictures(shard);
        for (size_t v = 0; v < (shard ? COUNT_OF(shard_variants) : COUNT_OF(file_variants)); v++) {
            const char *name = shard ? shard_variants[v] : file_variants[v];
            struct job job;
            if (start_job(&job, name, "--cache any --decode")) {
                expect_failure(&job, 0, shard ? "p.tar: offset " : "000007.png: libpng: ");
                expect_words(shard ? "sample '000007'" : "CRC error");
            }
            close_job(&job);
            expect_a_picture_lost(name, 1);
            expect_a_picture_lost(name, 2);
        }
        renew_folder();
    }
}
#endif

Test(load_faults, wrong_bytes_are_detected, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    make_shards(101);
    cr_assert(start_job(&job, "shards-mmap", "--cache any"));
    const struct dataset *dataset = dataset_of(&job);
    overwrite("x-000000.tar", (long)dataset->members[dataset->samples[1].member].offset, "\xff\xee", 2);
    cr_assert_eq(run(&job, 0), STATUS_WRONG);
    expect_words("delivered");
    close_job(&job);
}
