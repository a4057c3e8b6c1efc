/* Tests how the workload `exchange` checks sums and updated parameters. Correct sums must pass for two orders
 * of addition, with and without rounding of the intermediate sums. Wrong values must be counted. */
#include <criterion/criterion.h>

#include <math.h>

#include "train/allreduce.h"

TestSuite(allreduce, .timeout = 60);

enum { COUNT = 500, RANKS_MAX = 64, RUN = 7 };

/* Orders in which the values of all ranks are added up. */
enum way { IN_RANK_ORDER, PAIRWISE };

static float rounded(const struct allreduce_job *job, float value)
{
    return job->bf16 ? float_from_bits((uint32_t)bf16_from_float(value) << 16) : value;
}

/* Adds up `count` terms. If `each` is set, rounds every intermediate sum to the element type. */
static float add_up(const struct allreduce_job *job, const float *terms, uint32_t count, enum way way,
                    bool each)
{
    if (count == 1)
        return terms[0];
    uint32_t half = way == PAIRWISE ? count / 2 : count - 1;
    float sum = add_up(job, terms, half, way, each) + add_up(job, terms + half, count - half, way, each);
    return each ? rounded(job, sum) : sum;
}

/* Computes the result of run RUN, and writes it to `values`. */
static void perform(const struct allreduce_job *job, enum way way, bool each, void *values)
{
    float terms[RANKS_MAX];
    for (size_t i = 0; i < job->count; i++) {
        for (uint32_t rank = 0; rank < job->ranks; rank++)
            terms[rank] = (float)allreduce_term(job, RUN, rank, i) * ALLREDUCE_UNIT;
        float sum = 0;
        for (int call = 0; call < ALLREDUCE_CALLS; call++) {
            sum = rounded(job, add_up(job, terms, job->ranks, way, each));
            for (uint32_t rank = 0; rank < job->ranks; rank++)
                terms[rank] = sum;
        }
        if (job->bf16)
            ((uint16_t *)values)[i] = bf16_from_float(sum);
        else
            ((float *)values)[i] = sum;
    }
}

static struct allreduce_job job_of(uint32_t ranks, bool bf16)
{
    return (struct allreduce_job){
        .bytes = COUNT * (bf16 ? 2 : 4), .count = COUNT, .bf16 = bf16, .ranks = ranks};
}

static const uint32_t all_ranks[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64};

Test(allreduce, correct_sums_pass)
{
    float values[COUNT];
    for (size_t i = 0; i < COUNT_OF(all_ranks); i++)
        for (int kind = 0; kind < 8; kind++) {
            const struct allreduce_job job = job_of(all_ranks[i], kind & 1);
            perform(&job, kind & 2 ? PAIRWISE : IN_RANK_ORDER, kind & 4, values);
            cr_expect_eq(allreduce_count_wrong(&job, RUN, values), 0, "%u ranks, kind %d", job.ranks, kind);
        }
}

/* On 1, 2, 4 and 8 ranks, sums are exact, so one changed bit is found. */
Test(allreduce, exact_sums_have_no_tolerance)
{
    for (uint32_t ranks = 1; ranks <= 8; ranks *= 2)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            const struct allreduce_job job = job_of(ranks, bf16);
            float values[COUNT];
            cr_expect_eq(allreduce_tolerance(&job), 0, "%u ranks", ranks);
            perform(&job, IN_RANK_ORDER, false, values);
            *((unsigned char *)values + job.bytes / 2) ^= 1;
            cr_expect_eq(allreduce_count_wrong(&job, RUN, values), 1, "%u ranks", ranks);
        }
    for (uint32_t ranks = 3; ranks <= 7; ranks += 2) {
        const struct allreduce_job f32 = job_of(ranks, false), bf16 = job_of(ranks, true);
        cr_expect(allreduce_tolerance(&f32) > 0 && allreduce_tolerance(&f32) < 1e-5);
        cr_expect(allreduce_tolerance(&bf16) > 0 && allreduce_tolerance(&bf16) < 0.8);
    }
}

Test(allreduce, planted_faults_are_counted)
{
    for (size_t i = 1; i < COUNT_OF(all_ranks); i++) {
        const struct allreduce_job job = job_of(all_ranks[i], false);
        float values[COUNT];
        perform(&job, IN_RANK_ORDER, false, values);
        values[0] = -values[0];
        values[1] *= 1.001f;
        values[2] = NAN;
        values[3] = 0;
        values[COUNT - 1] = INFINITY;
        cr_expect_eq(allreduce_count_wrong(&job, RUN, values), 5, "%u ranks", job.ranks);
        /* The sums of another run differ in most values. */
        perform(&job, IN_RANK_ORDER, false, values);
        cr_expect_gt(allreduce_count_wrong(&job, RUN + 1, values), COUNT / 2, "%u ranks", job.ranks);
    }
}

/* Terms differ between ranks, runs and neighbouring indices, and are within the documented range. */
Test(allreduce, terms_depend_on_run_rank_and_index)
{
    for (size_t n = 0; n < COUNT_OF(all_ranks); n++) {
        const struct allreduce_job job = job_of(all_ranks[n], true);
        uint32_t most = allreduce_term_max(job.ranks), same_rank = 0, same_run = 0, same_index = 0;
        for (uint64_t i = 0; i < COUNT; i++) {
            uint32_t term = allreduce_term(&job, RUN, 1, i);
            cr_assert(term >= 1 && term <= most, "%u", term);
            same_rank += term == allreduce_term(&job, RUN, 0, i);
            same_run += term == allreduce_term(&job, RUN + 1, 1, i);
            same_index += term == allreduce_term(&job, RUN, 1, i + 1);
        }
        uint32_t limit = COUNT * 3 / (2 * most);
        cr_expect(same_rank < limit && same_run < limit && same_index < limit, "%u ranks: %u %u %u",
                  job.ranks, same_rank, same_run, same_index);
    }
}

/* ---- Updates ---- */

/* Writes the parameters after run RUN. Each call adds up the gradients of the ranks in rank order and updates
 * the parameters. If `grows` is set, the sums replace the gradients. `missing` is a rank whose gradients are
 * left out in call `at`; -1: none. */
static void update(const struct allreduce_job *job, bool grows, int missing, int at, float *parameters)
{
    for (size_t i = 0; i < job->count; i++) {
        float gradients[RANKS_MAX], m = 0, v = 0;
        parameters[i] = 0;
        for (uint32_t rank = 0; rank < job->ranks; rank++)
            gradients[rank] = allreduce_gradient(job, RUN, rank, i);
        for (int call = 0; call < ALLREDUCE_CALLS; call++) {
            const struct update by = allreduce_update(call);
            float sum = -0.f;
            for (uint32_t rank = 0; rank < job->ranks; rank++)
                if ((int)rank != missing || call != at)
                    sum += gradients[rank];
            for (uint32_t rank = 0; grows && rank < job->ranks; rank++)
                gradients[rank] = sum;
            optimizer_step(&by, sum, &parameters[i], &m, &v);
        }
    }
}

Test(allreduce, correct_parameters_pass)
{
    float parameters[COUNT];
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (int grows = 0; grows < 2; grows++) {
            const struct allreduce_job job = job_of(ranks, false);
            update(&job, grows, -1, 0, parameters);
            cr_expect_eq(allreduce_count_wrong_parameters(&job, RUN, grows, parameters), 0, "%u ranks",
                         ranks);
            for (size_t i = 0; i < COUNT; i++)
                cr_assert(isfinite(parameters[i]) && parameters[i] < 0, "%g", parameters[i]);
        }
}

/* If the first or the last call leaves out the gradients of one rank, over 90 % of the parameters must be
 * wrong. A wrong run number must make most parameters wrong. */
Test(allreduce, wrong_parameters_are_counted)
{
    float parameters[COUNT];
    for (uint32_t ranks = 2; ranks <= 8; ranks++)
        for (int grows = 0; grows < 2; grows++) {
            const struct allreduce_job job = job_of(ranks, false);
            for (int at = 0; at < ALLREDUCE_CALLS; at += ALLREDUCE_CALLS - 1) {
                update(&job, grows, (int)ranks - 1, at, parameters);
                cr_expect_gt(allreduce_count_wrong_parameters(&job, RUN, grows, parameters), COUNT * 9 / 10,
                             "%u ranks, call %d", ranks, at);
            }
            update(&job, grows, -1, 0, parameters);
            cr_expect_gt(allreduce_count_wrong_parameters(&job, RUN + 1, grows, parameters), COUNT / 2);
            parameters[7] = NAN;
            cr_expect_eq(allreduce_count_wrong_parameters(&job, RUN, grows, parameters), 1);
        }
}
