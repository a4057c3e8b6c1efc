/* Tests several ranks that read one data set. The ranks must notice if their data sets differ, and together
 * they must read all samples. */
#include "load_support.h"

#include <inttypes.h>

#include "core/record.h"

TestSuite(load_ranks, .init = make_folder, .fini = remove_folder, .timeout = 60);

static uint64_t identity(void)
{
    struct job job;
    must(open_job(&job, "--cache any"));
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
    cr_expect_neq(changed, whole, "other contents of the same size must change the hash");
    cr_assert_eq(
        rename(in_folder("x-000001.tar"), "/tmp/fdsl-load-gone.tar") + unlink("/tmp/fdsl-load-gone.tar"), 0);
    cr_expect(identity() != changed && identity() != whole, "a missing shard must change the hash");
}

/* Runs the workload's check of the row of all ranks, which has these two cells. */
static enum status judge(const struct job *job, const char *skipped, uint64_t checksum)
{
    CLOSED_BY(row_free) struct row total;
    row_open(&total, job->workload->columns);
    if (*skipped)
        row_count(&total, "skipped", strtoull(skipped, NULL, 10));
    row_hash(&total, "checksum", checksum);
    return job->workload->ranks.check_total(job->input, &total);
}

Test(load_ranks, ranks_together_deliver_every_sample)
{
    struct job job;
    uint64_t last = 0, sum = 0;
    make_shards(21);
    must(open_job(&job, "--cache any --epochs 2"));
    for (uint64_t rank = 0; rank < 3; rank++) {
        const struct partition partition = {.rank = rank, .ranks = 3, .strong = true};
        must(job.workload->repartition(job.input, job.parameters, &partition));
        cr_assert(start(&job, "shards"));
        run_well(&job, 1);
        last = result_of(&job).checksum.sum;
        stop(&job);
        sum += last;
    }
    cr_expect_eq(judge(&job, "0", sum), STATUS_OK, "%s", status_text());
    cr_expect_eq(judge(&job, "0", sum + 1), STATUS_WRONG);
    cr_expect_eq(judge(&job, "0", sum - last), STATUS_WRONG,
                 "the missing samples of one rank must be detected");
    cr_expect_eq(judge(&job, "1", sum + 1), STATUS_OK,
                 "the checksum of a skipped sample is unknown, so any total must pass");
    close_job(&job);
}
