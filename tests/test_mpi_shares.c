/* Tests training on ranks with different shares of the samples, under mpirun. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpi_train.h"

TestSuite(mpi_shares, .init = start, .fini = stop, .timeout = 400);

/* The ranks train on 62 samples in steps of 24, 24 and 14 samples. */
Test(mpi_shares, any_shares_train_what_one_rank_trains)
{
    static const struct {
        int ranks;
        const char *balance, *shares[3], *items[3];
    } cases[] = {{2, "3:1", {"18", "6"}, {"46", "16"}},
                 {3, "1:0:2", {"8", "0", "16"}, {"20", "0", "42"}},
                 {3, "5:1:5", {"11", "2", "11"}, {"28", "5", "29"}},
                 {3, "memory", {"8", "8", "8"}, {"20", "21", "21"}}};
    run_well(1, DIVIDE);
    double one = number(out, 2, "test_loss");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        size_t ranks = (size_t)cases[i].ranks;
        snprintf(line, sizeof line, DIVIDE "--verify --balance %s --export %zu.safetensors", cases[i].balance,
                 i);
        run_well(cases[i].ranks, line);
        double loss = number(out, 2 * (ranks + 1), "test_loss");
        cr_expect(fabs(loss - one) < 1e-5 * one, "%s: %.9g instead of %.9g", cases[i].balance, loss, one);
        for (size_t row = 1; row <= ranks; row++) {
            cr_expect_str_eq(value(out, row, "samples_per_step"), cases[i].shares[row - 1], "%s",
                             cases[i].balance);
            cr_expect_str_eq(value(out, row, "items"), cases[i].items[row - 1], "%s", cases[i].balance);
            cr_expect_str_eq(value(out, row, "balance"), cases[i].balance);
        }
        cr_expect_str_eq(value(out, ranks + 1, "samples_per_step"), "24");
        cr_expect_str_eq(value(out, ranks + 1, "items"), "62");
        snprintf(line, sizeof line, DIVIDE "--balance %s --export again.safetensors", cases[i].balance);
        run_well(cases[i].ranks, line);
        char file[32];
        snprintf(file, sizeof file, "%zu.safetensors", i);
        cr_expect(same_files(file, "again.safetensors"), "%s: repeated runs differ", cases[i].balance);
    }
    run_well(1, DIVIDE "--balance 3");
    cr_expect_str_empty(value(out, 1, "balance"));
    cr_expect_str_empty(value(out, 1, "samples_per_step"));
}

/* 62 samples in steps of 24 give two full steps. */
Test(mpi_shares, ranks_drop_the_same_last_batch)
{
    run_well(3, DIVIDE "--drop-last --verify --balance 5:1:2 --export three.safetensors");
    cr_expect_str_eq(value(out, 4, "items"), "48");
    cr_expect_str_eq(value(out, 1, "items"), "30");
    cr_expect_str_eq(value(out, 4, "steps"), "2");
    double three = number(out, 8, "test_loss"), one;
    run_well(1, DIVIDE "--drop-last");
    cr_expect_str_eq(value(out, 1, "items"), "48");
    one = number(out, 2, "test_loss");
    cr_expect(fabs(three - one) < 1e-5 * one, "%.9g on three ranks, %.9g on one", three, one);
}

/* Each call of expf() sleeps: 150 us on rank 0, and 650 us on rank 1. train-naive calls expf() a fixed number
 * of times per sample, so rank 1 is slower by a known factor. */
#define UNEVEN                                                                                              \
    "--variant train-naive --model logreg --train-size 192 --test-size 20 --batch 16 --threads 1 --format " \
    "csv "

static void run_uneven(const char *options)
{
    static const char slow[] = "#define _GNU_SOURCE\n"
                               "#include <dlfcn.h>\n"
                               "#include <stdlib.h>\n"
                               "#include <unistd.h>\n"
                               "float expf(float x)\n"
                               "{\n"
                               "    static float (*real)(float);\n"
                               "    static unsigned us;\n"
                               "    if (!real) {\n"
                               "        real = (float (*)(float))dlsym(RTLD_NEXT, \"expf\");\n"
                               "        us = getenv(\"OMPI_COMM_WORLD_RANK\")[0] == '0' ? 150 : 650;\n"
                               "    }\n"
                               "    usleep(us);\n"
                               "    return real(x);\n"
                               "}\n";
    FILE *file = fopen("slow.c", "w");
    cr_assert(file && fputs(slow, file) >= 0 && fclose(file) == 0);
    cr_assert(system("mpicc -shared -fPIC -o slow.so slow.c -ldl") == 0);
    shell("timeout 100 mpirun --bind-to none -x LD_PRELOAD=$PWD/slow.so -x "
          "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 -n 2 $PROGRAM %s",
          options);
    cr_assert_eq(status, 0, "%s", err);
}

static void expect_uneven(size_t first_row, const char *when)
{
    double fast = number(out, first_row, "samples_per_step"),
           slow = number(out, first_row + 1, "samples_per_step");
    cr_expect(fast + slow == 32 && fast >= 20 && fast <= 29, "%s: %g and %g", when, fast, slow);
    cr_expect_eq(number(out, first_row, "items"), fast * 6, "%s", when);
}

Test(mpi_shares, measured_shares_follow_the_speeds)
{
    run_uneven(UNEVEN "--epochs 3 --balance measured --verify");
    cr_expect_str_eq(value(out, 1, "samples_per_step"), "16");
    cr_expect_str_eq(value(out, 2, "samples_per_step"), "16");
    expect_uneven(4, "second epoch");
    expect_uneven(7, "third epoch");
    cr_expect_str_eq(value(out, 4, "batch"), "16");
    cr_expect_null(strstr(err, "uneven"), "%s", err);
}

Test(mpi_shares, uneven_ranks_are_reported_once)
{
    run_uneven(UNEVEN "--epochs 3");
    cr_expect_eq(count_of(err, "warning: the ranks are uneven: rank 1 computes 16 samples of each step at "),
                 1, "%s", err);
    cr_expect(strstr(err, "; --balance measured divides the samples by speed"), "%s", err);
    cr_expect_eq(count_of(err, "uneven"), 1, "%s", err);
}

#ifdef _OPENMP
/* A rank whose device is cpu runs train-omp, but its row names the GPU variant. A build without CUDA can do
 * this too. */
Test(mpi_shares, a_rank_on_a_cpu_stands_in_for_a_gpu)
{
    run_well(2, LEARN "--variant train-omp --export omp.safetensors");
    run_well(2, LEARN "--variant train-cuda --rank-device 1:cpu,0:cpu --export cuda.safetensors --verify");
    cr_expect_str_eq(value(out, 2, "variant"), "train-cuda");
    cr_expect_str_empty(value(out, 2, "cuda"));
    cr_expect_str_eq(value(out, 2, "wrong"), "0");
    cr_expect(same_files("omp.safetensors", "cuda.safetensors"), "%s", err);
    run_well(2, LEARN "--variant train-omp --rank-device 1:cpu");
}

/* On rank 0, train-omp stands in for each GPU variant, but rank 1 can run none of them without a GPU. If all
 * ranks are on CPUs, no GPU variant runs, even under its name. */
Test(mpi_shares, auto_chooses_the_best_variant_that_all_ranks_can_run)
{
    run_well(2, LEARN_ON("auto --workload train") "--rank-device 0:cpu,1:cpu");
    cr_expect_str_eq(value(out, 1, "variant"), "train-omp", "%s", err);
    cr_expect_eq(count_of(err, "--variant auto chose train-omp; better variants cannot run here: "), 1, "%s",
                 err);
#ifndef HAVE_CUDA
    run_well(2, LEARN_ON("auto --workload train") "--rank-device 0:cpu");
    cr_expect_str_eq(value(out, 2, "variant"), "train-omp", "%s", err);
    cr_expect(strstr(err, "rank 1: not built: this build has no CUDA"), "%s", err);
#endif
}
#endif

Test(mpi_shares, wrong_lists_of_devices_are_refused)
{
    static const struct {
        const char *options;
        int status;
        const char *message;
    } cases[] = {
        {"--rank-device 2:cpu", 2, "--rank-device names rank 2, but the run has 2 ranks"},
        {"--rank-device 0:cpu,1:cpu,0:cuda:1", 2, "--rank-device names rank 0 twice"},
        {"--rank-device 0:gpu", 2, "'0:gpu' is not RANK:cuda:N or RANK:cpu"},
        {"--rank-device 0:cpu --device 1", 2, "--device, --best-gpu and --rank-device all choose a GPU"},
        {"--rank-device 0:cpu --variant fused", 2,
         "--rank-device: a rank on the CPU cannot run fused: it has no implementation for CPUs"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        bool own = strstr(cases[i].options, "fused");
        snprintf(line, sizeof line, "%s%s", own ? "" : LEARN, cases[i].options);
        run(2, line);
        cr_expect(status == cases[i].status && strstr(err, cases[i].message), "%s: %d: %s", cases[i].options,
                  status, err);
    }
}

#ifdef HAVE_XXHASH
/* A checkpoint contains the shares of the next epoch. */
Test(mpi_shares, a_resumed_run_has_the_measured_shares)
{
    static char before[TEXT_MAX];
    run_uneven(UNEVEN "--epochs 1 --balance measured --checkpoint k");
    shell("cp -r k again && cp -r k memory && cp -r k three");
    run_uneven(UNEVEN "--epochs 2 --balance measured --checkpoint k --resume --export one.safetensors");
    expect_uneven(1, "resumed");
    snprintf(before, sizeof before, "%s", value(out, 1, "samples_per_step"));
    run_uneven(UNEVEN "--epochs 2 --balance measured --checkpoint again --resume --export other.safetensors");
    cr_expect_str_eq(value(out, 1, "samples_per_step"), before);
    cr_expect(same_files("one.safetensors", "other.safetensors"), "the resumed runs differ");
    run_uneven(UNEVEN "--epochs 2 --balance memory --checkpoint memory --resume");
    cr_expect_str_eq(value(out, 1, "samples_per_step"), "16");
    run_well(4, UNEVEN "--batch 8 --epochs 2 --balance measured --checkpoint three --resume");
    cr_expect_str_eq(value(out, 1, "samples_per_step"), "8");
}

/* Epochs have six steps. The second checkpoint is after the first step of the second epoch. */
Test(mpi_shares, measured_shares_resume_within_an_epoch)
{
    run_uneven(UNEVEN "--epochs 2 --balance measured --checkpoint measured --checkpoint-steps 1 --keep 99");
    shell("mkdir part && cp measured/epoch-000001.step-0000000001.ckpt part");
    run_uneven(UNEVEN "--epochs 2 --balance measured --checkpoint part --resume");
    cr_expect_not_null(strstr(err, "1 of 2 epochs and 1 of 6 steps are done: continuing"), "%s", err);
}

Test(mpi_shares, training_with_fixed_shares_resumes_bit_exactly)
{
    run_well(2, LEARN "--balance 3:1 --epochs 3 --export whole.safetensors");
    run_well(2, LEARN "--balance 3:1 --checkpoint k");
    run_well(2, LEARN "--balance 3:1 --checkpoint k --resume --epochs 3 --export resumed.safetensors");
    cr_expect(same_files("whole.safetensors", "resumed.safetensors"), "a resumed run differs");
}
#endif
