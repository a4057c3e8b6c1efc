/* Several ranks that read one data set: whether it is identical on all of them, and whether together they
 * read all of it. */
#include "load_support.h"

#include <inttypes.h>

#include "run/record.h"

TestSuite(load_ranks, .init = make_folder, .fini = remove_folder, .timeout = 60);

static uint64_t identity(void)
{
    struct job job;
    cr_assert_eq(open_job(&job, "--cache any"), STATUS_OK, "%s", status_text());
    uint64_t hash = job.workload->ranks.identity(job.input);
    close_job(&job);
    return hash;
}

Test(load_ranks, identity_depends_on_contents)
{
    make_shards(21);
    uint64_t whole = identity();
    cr_expect_eq(identity(), whole);
    overwrite("x-000001.tar", TAR_BLOCK_BYTES, "other bytes", 11);
    uint64_t changed = identity();
    cr_expect_neq(changed, whole, "another content of the same size");
    cr_assert_eq(
        rename(in_folder("x-000001.tar"), "/tmp/fdsl-load-gone.tar") + unlink("/tmp/fdsl-load-gone.tar"), 0);
    cr_expect(identity() != changed && identity() != whole, "a shard is missing");
}

/* Runs check_total() on a row that sums up all ranks. */
static enum status judge(const struct job *job, const char *skipped, uint64_t checksum)
{
    struct measures total = {.columns = job->workload->measures};
    measures_put(&total, "skipped", "%s", skipped);
    measures_put(&total, "checksum", "%016" PRIx64, checksum);
    return job->workload->ranks.check_total(job->input, &total);
}

Test(load_ranks, ranks_together_deliver_every_sample)
{
    struct job job;
    void *state;
    struct run_time unused;
    struct load_result result;
    uint64_t sum = 0;
    make_shards(21);
    cr_assert_eq(open_job(&job, "--cache any --epochs 2"), STATUS_OK, "%s", status_text());
    for (uint64_t rank = 0; rank < 3; rank++) {
        const struct partition partition = {.rank = rank, .ranks = 3, .strong = true};
        cr_assert_eq(job.workload->repartition(job.input, job.parameters, &partition), STATUS_OK);
        const struct variant *variant = start(&job, "shards", &state);
        cr_assert_eq(variant_run(variant, state, 1, &unused), STATUS_OK, "%s", status_text());
        cr_assert_eq(variant->fetch(state, &result), STATUS_OK);
        variant->teardown(state);
        sum += result.checksum.sum;
    }
    cr_expect_eq(judge(&job, "0", sum), STATUS_OK, "%s", status_text());
    cr_expect_eq(judge(&job, "0", sum + 1), STATUS_WRONG);
    cr_expect_eq(judge(&job, "0", sum - result.checksum.sum), STATUS_WRONG, "one rank's samples are missing");
    cr_expect_eq(judge(&job, "1", sum + 1), STATUS_OK, "which sample was skipped is not known");
    close_job(&job);
}
