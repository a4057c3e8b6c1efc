/* Tests ranks that train on a mixture (--feed mixed): each global step has the same samples on any number of
 * ranks, also after a resume, a broken source ends all ranks, and all ranks have one share of synth:auto. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpirun.h"

TestSuite(mpi_mixture, .init = start, .fini = stop, .timeout = 240);

#if defined HAVE_XXHASH && defined HAVE_PNG

#define TRAIN                                                                                           \
    "--variant train-naive --model logreg --feed mixed --data a --out-res 12 --channels 1 --classes 5 " \
    "--threads 1 --scaling strong --batch 10 --format csv "
#define SOURCES "--mix load:0.4,b=b/:0.2,synth:0.4 "

static void make_sets(void)
{
    shell("{ $PROGRAM --prepare a --from synth --samples 37 --classes 5 --res 20 --store shards && "
          "$PROGRAM --prepare b --from synth --samples 11 --classes 5 --res 20 --seed 9 --store shards; }");
    cr_assert(status == 0, "%s", err);
}

/* --verify compares the sum of the hashes of all samples of load, and two steps with the reference. The
 * losses on several ranks are those on one rank, up to the order of sums. */
Test(mpi_mixture, ranks_have_the_samples_of_one_rank)
{
    static const char *const ends[] = {"", "--drop-last "};
    make_sets();
    for (size_t e = 0; e < COUNT_OF(ends); e++) {
        double alone = 0;
        char line[512];
        for (int ranks = 1; ranks <= 5; ranks++) {
            snprintf(line, sizeof line, TRAIN SOURCES "--verify --epochs 2 %s", ends[e]);
            run_well(ranks, line);
            const int last = 2 * (ranks + (ranks > 1)); /* one row for each rank, and one for all of them */
            const double loss = number(out, last, "train_loss");
            cr_expect_str_eq(value(out, last, "wrong"), "0");
            cr_expect_str_eq(value(out, last, "mix_shares"), "load=0.4 b=0.2 synth=0.4");
            if (ranks == 1)
                alone = loss;
            cr_expect_float_eq(loss, alone, 1e-5 * alone, "%d ranks: %.9g instead of %.9g", ranks, loss,
                               alone);
        }
    }
}

Test(mpi_mixture, training_resumes_on_another_number_of_ranks)
{
    make_sets();
    run_well(2, TRAIN SOURCES "--epochs 2 --checkpoint k --checkpoint-steps 3 --keep 9");
    const double whole = number(out, 6, "train_loss");
    shell("mkdir j && cp k/epoch-000001.step-*4.ckpt j && ls j");
    cr_assert(status == 0, "%s", err);
    run_well(3, TRAIN SOURCES "--epochs 2 --checkpoint j --resume --verify");
    cr_expect_not_null(strstr(err, "1 of 2 epochs and 4 of 8 steps are done: continuing"), "%s", err);
    cr_expect_float_eq(number(out, 4, "train_loss"), whole, 1e-5 * whole, "%s", out);
    cr_expect_str_eq(value(out, 4, "wrong"), "0");
}

Test(mpi_mixture, a_broken_source_ends_all_ranks)
{
    make_sets();
    shell("mkdir x && cd x && tar -xf ../b/*.tar && printf broken > 000003.png && "
          "tar -cf ../c.tar --sort=name [0-9]*");
    cr_assert(status == 0, "%s", err);
    run(2, TRAIN "--mix load:0.4,c=c.tar:0.2,synth:0.4 --raw --epochs 2");
    cr_expect(status != 0 && strstr(err, "sample '000003'"), "%d: %s", status, err);
    run_well(2, TRAIN "--mix load:0.4,c=c.tar:0.2,synth:0.4 --on-error mask --verify --epochs 2");
    cr_expect(number(out, 6, "masked") > 0, "%s", out);
}

Test(mpi_mixture, all_ranks_choose_one_share)
{
    make_sets();
    run_well(2, TRAIN "--mix synth:auto,load --epochs 1");
    cr_expect_not_null(strstr(err, "--mix: the share of the samples that are read is "), "%s", err);
    char first[64];
    snprintf(first, sizeof first, "%s", value(out, 1, "mix_shares"));
    cr_expect_str_eq(value(out, 2, "mix_shares"), first);
    cr_expect(strstr(first, "synth=") && strstr(first, "load="), "%s", first);
}
#endif
