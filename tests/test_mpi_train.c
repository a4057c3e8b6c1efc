/* Tests training under mpirun: the same results on any number of ranks, rows, checkpoints, and failures of
 * one rank. Skipped if the build has no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "core/philox.h"
#include "data/tensor_file.h"
#include "same_state.h"

#include "mpi_train.h" /* included last, because its `out` and `status` would shadow names in other headers */

TestSuite(mpi_train, .init = start, .fini = stop, .timeout = 400);

/* ---- Results ---- */

Test(mpi_train, any_number_of_ranks_trains_what_one_rank_trains)
{
    double loss[5];
    for (int ranks = 1; ranks <= 4; ranks++) {
        char line[512];
        snprintf(line, sizeof line, DIVIDE "--verify --verify-steps 3 --export %d.safetensors", ranks);
        run_well(ranks, line);
        size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
        loss[ranks] = number(out, last, "test_loss");
        cr_expect(fabs(loss[ranks] - loss[1]) < 1e-5 * loss[1], "%d ranks: %.9g instead of %.9g", ranks,
                  loss[ranks], loss[1]);
        cr_expect_str_eq(value(out, last, "items"), "62");
        cr_expect_str_eq(value(out, last, "wrong"), "0");
    }
    run_well(3, DIVIDE "--export again.safetensors");
    cr_expect(same_files("3.safetensors", "again.safetensors"), "repeated runs differ");
    run_well(2, LEARN "--export weak.safetensors");
    cr_expect(same_files("2.safetensors", "weak.safetensors"), "weak and strong scaling differ: %s", err);
}

#ifdef HAVE_JANSSON
/* Writes 80 rows of 19 random values with labels from 0 to 2. */
static void put_rows(const char *path)
{
    static float values[80][19];
    int32_t labels[80];
    for (uint32_t i = 0; i < 80; i++) {
        labels[i] = (int32_t)(i % 3);
        for (uint32_t k = 0; k < 19; k++)
            values[i][k] =
                (float)philox(philox_key(4), i, k, 0, 0).word[0] * 0x1p-32F + (float)(k % 3 == i % 3);
    }
    const struct safetensor tensors[] = {
        {.name = "x", .type = "F32", .axes = 2, .shape = {80, 19}, .values = values, .bytes = sizeof values},
        {.name = "labels",
         .type = "I32",
         .axes = 1,
         .shape = {80},
         .values = labels,
         .bytes = sizeof labels}};
    cr_assert_eq(safetensors_write(path, (const char *const[]){"fdsl-bench", "test", NULL}, tensors, 2),
                 STATUS_OK, "%s", status_text());
}

/* Rules that need whole tensors take the gradients of all ranks. In a pipeline, a stage has whole tensors. */
Test(mpi_train, ranks_update_whole_tensors_as_one_rank_does)
{
    static const char *const cases[] = {"--optimizer lamb --weight-decay 0.02 --verify --verify-steps 3",
                                        "--optimizer muon --clip-adaptive 0.05 --verify --verify-steps 3",
                                        "--optimizer muon --clip-adaptive 0.05 --parallel pipeline "
                                        "--microbatches 3 --verify --verify-steps 3"};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double one = 0;
        for (int ranks = 1; ranks <= 3; ranks++) {
            char line[512];
            snprintf(line, sizeof line, DIVIDE "%s", cases[ranks == 1 && i == 2 ? 1 : i]);
            run_well(ranks, line);
            const size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
            const double loss = number(out, last, "test_loss");
            one = ranks == 1 ? loss : one;
            cr_expect(loss > 0 && fabs(loss - one) < 1e-4 * one, "%s, %d ranks: %.9g instead of %.9g",
                      cases[i], ranks, loss, one);
            cr_expect_str_eq(value(out, last, "wrong"), "0");
        }
    }
}

/* Ranks divide rows of embeddings like other samples, with both feeds and in a pipeline. */
Test(mpi_train, any_number_of_ranks_trains_on_the_same_rows)
{
    static const struct {
        const char *options;
        int most; /* ranks */
    } ways[] = {{"--feed stored", 3},
                {"--feed load", 3},
                {"--parallel pipeline --microbatches 3", 2}}; /* mlp can be cut into two stages */
    put_rows("rows.safetensors");
    for (size_t way = 0; way < COUNT_OF(ways); way++) {
        double one = 0;
        for (int ranks = 1; ranks <= ways[way].most; ranks++) {
            char line[512];
            snprintf(line, sizeof line,
                     "--variant " TRAINED
                     " --data rows.safetensors --model mlp --epochs 2 --batch 24 --threads 1 "
                     "--verify --verify-steps 3 --scaling strong --format csv %s",
                     ranks == 1 && way == 2 ? "" : ways[way].options);
            run_well(ranks, line);
            const size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
            const double loss = number(out, last, "test_loss");
            one = ranks == 1 ? loss : one;
            cr_expect(fabs(loss - one) < 1e-5 * one, "%s, %d ranks: %.9g instead of %.9g", ways[way].options,
                      ranks, loss, one);
            cr_expect_str_eq(value(out, last, "wrong"), "0");
            cr_expect_str_eq(value(out, last, "dim"), "19");
        }
    }
}
#endif

/* All ranks must clip by the norm of the gradients of all ranks. */
Test(mpi_train, ranks_clip_and_average_as_one_rank_does)
{
    static const char *const columns[] = {"gradient_norm", "test_loss", "ema_test_loss"};
    double one[COUNT_OF(columns)];
    for (int ranks = 1; ranks <= 3; ranks++) {
        run_well(ranks, DIVIDE "--clip-norm 0.05 --ema 0.9 --accumulate 3 --verify --verify-steps 3");
        size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
        for (size_t i = 0; i < COUNT_OF(columns); i++) {
            double is = number(out, last, columns[i]);
            one[i] = ranks == 1 ? is : one[i];
            cr_expect(is > 0 && fabs(is - one[i]) < 1e-4 * one[i], "%d ranks: %s %.9g instead of %.9g", ranks,
                      columns[i], is, one[i]);
        }
        cr_expect_str_eq(value(out, last, "wrong"), "0");
        cr_expect_gt(number(out, last, "gradient_norm"), 0.05);
    }
}

/* The partner of a sample may belong to another rank, and to another part of the step (--accumulate). With
 * live samples, each rank generates and augments the partners of its samples. */
Test(mpi_train, any_number_of_ranks_mixes_the_same_samples)
{
#define MIX                                                                               \
    "--variant " TRAINED                                                                  \
    " --model logreg --test-size 20 --epochs 2 --threads 1 --format csv --train-size 62 " \
    "--scaling strong --batch 24 --mixup 0.8 --cutmix 1 --shift 1 --flip "
#define CANVASES                                                                                            \
    "--data synth --res 24 --out-res 16 --classes 5 --fit random-resized-crop --rand-augment 28 --erasing " \
    "0.5 --repeats 3 "
    static const char *const data[] = {"--data digits", "--data synth --res 16 --classes 5 --feed live",
                                       CANVASES "--feed live", CANVASES "--feed stored --loss bce"};
    static const struct {
        int ranks;
        const char *options;
    } runs[] = {{1, ""},
                {1, "--accumulate 3"},
                {2, ""},
                {2, "--accumulate 7"},
                {3, "--balance 1:0:2"},
                {3, "--balance 1:0:2 --accumulate 3"}};
    for (size_t i = 0; i < COUNT_OF(data); i++) {
        double one = 0;
        for (size_t j = 0; j < COUNT_OF(runs); j++) {
            char line[512];
            const int ranks = runs[j].ranks;
            snprintf(line, sizeof line, MIX "%s --verify %s", data[i], runs[j].options);
            run_well(ranks, line);
            const size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
            const double loss = number(out, last, "test_loss");
            one = j == 0 ? loss : one;
            cr_expect(fabs(loss - one) < 1e-5 * one, "%s, %d ranks, %s: %.9g instead of %.9g", data[i], ranks,
                      runs[j].options, loss, one);
            cr_expect_str_eq(value(out, last, "wrong"), "0");
        }
    }
}

/* 3 ranks train on 62 samples in steps of 24, 24 and 14 samples. */
Test(mpi_train, each_rank_has_a_row_and_all_ranks_have_one)
{
    static const char *const items[] = {"21", "21", "20", "62"}, *const names[] = {"0", "1", "2", "all"};
    run_well(3, DIVIDE "--lr-scale linear");
    cr_expect_eq(count_of(out, "\n"), 1 + 2 * 4, "%s", out);
    for (size_t row = 1; row <= 8; row++) {
        size_t i = (row - 1) % 4;
        cr_expect_str_eq(value(out, row, "rank"), names[i]);
        cr_expect_str_eq(value(out, row, "items"), items[i]);
        cr_expect_str_eq(value(out, row, "batch"), i < 3 ? "8" : "24");
        cr_expect_str_eq(value(out, row, "epoch"), row <= 4 ? "1" : "2");
        cr_expect_str_eq(value(out, row, "steps"), "3");
        cr_expect_str_eq(value(out, row, "sync"), "auto");
        cr_expect_str_eq(value(out, row, "lr_scale"), "linear");
        cr_expect_str_eq(value(out, row, "exchange"), "mpi");
        cr_expect_str_eq(value(out, row, "last_lr"), "0.001");
        cr_expect_str_empty(value(out, row, "efficiency"));
        double share = number(out, row, "exchange_share");
        cr_expect(share > 0 && share < 1, "%g", share);
    }
}

/* The size of the training set limits the global batch. With --scaling strong, --batch is
 * the global batch; otherwise it is the batch of one rank. */
Test(mpi_train, ranks_agree_on_the_largest_batch)
{
#define LARGEST                                                                                   \
    "--variant " TRAINED " --model logreg --train-size 101 --test-size 9 --epochs 1 --threads 1 " \
    "--batch max --format csv "
    run_well(2, LARGEST);
    cr_expect(number(out, 1, "batch") == 50 && number(out, 2, "batch") == 50 &&
              number(out, 3, "batch") == 100);
    cr_expect_eq(number(out, 3, "batch_probes"), 1);
    run_well(3, LARGEST "--scaling strong --balance 2:1:1");
    cr_expect_eq(number(out, 4, "batch"), 101);
    cr_expect_eq(number(out, 4, "batch_probes"), 2);
}

#ifndef FDSL_SANITIZED /* sanitizers use memory themselves */
/* Two ranks need about 140 MB each with all layers, and about 80 MB in a pipeline. */
Test(mpi_train, the_choice_of_parallelism_respects_the_limit_of_each_rank)
{
#define CHOSEN                                                                                             \
    "--variant train-omp --model cnn --data digits --train-size 512 --test-size 9 --epochs 1 --threads 1 " \
    "--batch 256 --format csv "
    run_well(2, CHOSEN "--parallel auto --memory-limit 110M");
    cr_expect_not_null(strstr(err, "--parallel auto: a pipeline of 2 ranks ("), "%s", err);
    cr_expect_not_null(strstr(err, "data parallel on 2 ranks needs "), "%s", err);
    cr_expect_str_eq(value(out, 3, "parallel"), "pipeline");
    /* One layer cannot be a pipeline, so that measured times do not decide. */
    run_well(2, "--variant train-omp --model logreg --train-size 64 --test-size 9 --epochs 1 --threads 1 "
                "--batch 16 --format csv --parallel auto");
    cr_expect_not_null(strstr(err, "--parallel auto: data parallel on 2 ranks ("), "%s", err);
    cr_expect_str_eq(value(out, 3, "exchange"), "mpi");
    cr_expect_str_eq(value(out, 3, "bubble"), "");
    run(2, CHOSEN "--parallel auto --memory-limit 30M");
    cr_expect(status == 2 && strstr(err, "--parallel auto: nothing fits; data parallel on 2 ranks comes"),
              "%d: %s", status, err);
    run(2, CHOSEN "--parallel pipeline --balance memory --memory-limit 1M");
    cr_expect(status == 2 && strstr(err, "are in use, but the limit is 0.001 GB; raise it"), "%d: %s", status,
              err);
    run(2, CHOSEN "--memory-limit 1G,110M");
    cr_expect(status == 2 && strstr(err, "rank 1: --memory-limit: this run needs "), "%d: %s", status, err);
}
#endif

/* The row of all ranks has the sum of the ranks' rates, which must not be rounded to an integer. */
Test(mpi_train, the_row_of_all_ranks_has_the_sum_of_the_rates)
{
    run_well(2, LEARN "--model logreg --data synth --feed live --res 48 --classes 5 --epochs 1");
    double one = number(out, 1, "generated_per_s"), other = number(out, 2, "generated_per_s"),
           all = number(out, 3, "generated_per_s");
    cr_expect(one > 0 && other > 0 && fabs(all - (one + other)) < 1e-8 * all,
              "%.9g and %.9g, but %.9g on all ranks", one, other, all);
}

Test(mpi_train, the_learning_rate_follows_the_batch)
{
    static const struct {
        const char *options, *rate;
    } cases[] = {{"--lr-scale none", "0.001"},
                 {"--lr-scale linear", "0.002"},
                 {"--lr-scale sqrt --lr 0.5", "0.707106781"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        snprintf(line, sizeof line, LEARN "--model logreg --epochs 1 --sync mpi %s", cases[i].options);
        run_well(2, line);
        cr_expect_str_eq(value(out, 3, "last_lr"), cases[i].rate, "%s", cases[i].options);
        cr_expect_str_eq(value(out, 3, "sync"), "mpi");
    }
    run_well(1, LEARN "--model logreg --epochs 1 --sync mpi --lr-scale linear");
    cr_expect_str_empty(value(out, 1, "sync"));
    cr_expect_str_empty(value(out, 1, "lr_scale"));
    cr_expect_str_eq(value(out, 1, "last_lr"), "0.001");
}

/* ---- Checkpoints ---- */

#ifdef HAVE_XXHASH
Test(mpi_train, training_resumes_on_any_number_of_ranks)
{
    run_well(2, LEARN "--epochs 3 --export whole.safetensors");
    run_well(2, LEARN "--checkpoint k --out rows.csv");
    shell("cp -r k two");
    run_well(2, LEARN "--checkpoint k --resume --epochs 3 --out rows.csv --export resumed.safetensors");
    cr_expect_not_null(strstr(err, "2 of 3 epochs are done: continuing"), "%s", err);
    cr_expect(same_files("whole.safetensors", "resumed.safetensors"), "a resumed run differs");
    run_well(3, LEARN "--checkpoint two --resume --epochs 3 --batch 8 --out rows.csv");
    double three = number(out, 4, "test_loss"), two;
    cr_expect_str_eq(value(out, 4, "epoch"), "3");
    read_text("rows.csv", out);
    cr_expect_eq(count_of(out, "\n"), 1 + 3 * 3 + 4, "%s", out);
    two = number(out, 9, "test_loss");
    cr_expect(fabs(three - two) < 1e-5 * two, "%.9g on three ranks, %.9g on two", three, two);
    run(3, LEARN "--checkpoint two --resume --epochs 4");
    cr_expect(status == 2 && strstr(err, "batch=24 in the checkpoint, 36 now; choose --batch so that"),
              "%d: %s", status, err);
}

/* Epochs have three steps. The second checkpoint is after the first step of the second epoch. */
Test(mpi_train, training_resumes_within_an_epoch)
{
    run_well(2, LEARN "--export whole.safetensors");
    run_well(2,
             LEARN "--checkpoint k --checkpoint-steps 2 --keep 9 --log log.csv --log-steps 1 --out rows.csv "
                   "--export stopped.safetensors");
    cr_expect(same_files("whole.safetensors", "stopped.safetensors"), "checkpoints change the parameters");
    read_text("log.csv", out);
    cr_expect(count_of(out, "\n") == 1 + 6 && number(out, 6, "ranks") == 2, "%s", out);
    cr_expect(number(out, 1, "samples_seen") == 24 && number(out, 6, "samples_seen") == 124, "%s", out);
    shell("mkdir two three && cp k/epoch-000001.step-0000000001.ckpt two && cp two/* three");
    run_well(2, LEARN "--checkpoint two --checkpoint-steps 2 --log again.csv --log-steps 1 --resume "
                      "--out resumed.csv --export resumed.safetensors");
    cr_expect_not_null(strstr(err, "1 of 2 epochs and 1 of 3 steps are done: continuing"), "%s", err);
    cr_expect(same_files("whole.safetensors", "resumed.safetensors"), "a resumed run differs");
    read_text("rows.csv", out);
    char loss[64];
    snprintf(loss, sizeof loss, "%s", value(out, 6, "train_loss"));
    read_text("resumed.csv", out);
    cr_expect_str_eq(value(out, 6, "train_loss"), loss);
    run_well(3, LEARN "--checkpoint three --resume --batch 8 --verify");
    cr_expect_float_eq(number(out, 4, "train_loss"), atof(loss), 1e-4, "%s", out);
    cr_expect_str_eq(value(out, 4, "wrong"), "0");
}

/* Ranks continue within an epoch bit-exactly, with the options of recipes. Epochs have five steps. On another
 * number of ranks, only the order of sums differs. */
Test(mpi_train, recipes_resume_within_an_epoch)
{
#define RECIPE                                                                                             \
    "--variant " TRAINED " --model vit-micro --train-size 116 --test-size 20 --batch 24 --scaling strong " \
    "--epochs 2 --threads 1 --format csv --optimizer adamw --clip-norm 0.5 --ema 0.9 --drop-path 0.2 "     \
    "--checkpoint-steps 3 --keep 9 --log-steps 2 "
    static const char *const cases[] = {"--accumulate 3 --layer-decay 0.8 ", "--mixup 0.8 --cutmix 1 ",
                                        "--accumulate 2 --balance 3:1 --mixup 0.8 "};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char options[1024];
        shell("rm -rf k part other *.csv");
        snprintf(options, sizeof options, RECIPE "%s --checkpoint k --log whole.csv --out rows.csv",
                 cases[i]);
        run_well(2, options);
        shell("mkdir part && cp k/epoch-000001.step-0000000001.ckpt part && cp -r part other");
        cr_assert_eq(status, 0, "%s", err);
        snprintf(options, sizeof options,
                 RECIPE "%s --checkpoint part --resume --log part.csv --out again.csv", cases[i]);
        run_well(2, options);
        cr_expect_not_null(strstr(err, "1 of 2 epochs and 1 of 5 steps are done: continuing"), "%s", err);
        expect_same_state("k/epoch-000002.ckpt", "part/epoch-000002.ckpt", true);
        shell("rows=$(($(grep -c . part.csv) - 1)); test $rows -gt 1 && "
              "steps() { tail -n $rows $1 | cut -d, -f 7-18,22-; }; steps whole.csv > a; steps part.csv > b; "
              "diff a b");
        cr_expect_eq(status, 0, "%s", out);
        shell("columns() { awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } END { print "
              "$at[\"train_loss\"], $at[\"gradient_norm\"], $at[\"test_loss\"], $at[\"ema_test_loss\"] }' "
              "$1; }; "
              "columns rows.csv > a; columns again.csv > b; diff a b");
        cr_expect_eq(status, 0, "%s", out);
    }
    read_text("rows.csv", out);
    double loss = number(out, count_of(out, "\n") - 1, "ema_test_loss");
    run_well(3,
             RECIPE "--accumulate 3 --mixup 0.8 --balance 1:1:1 --checkpoint other --log other.csv --resume");
    cr_expect_float_eq(number(out, count_of(out, "\n") - 1, "ema_test_loss"), loss, 1e-3 * loss, "%s", out);
}

/* With --lr-scale, the learning rate depends on the number of ranks. --lr can keep the rate unchanged. */
Test(mpi_train, training_resumes_with_the_scaled_learning_rate)
{
    run_well(2, LEARN "--lr-scale linear --checkpoint k");
    cr_expect_str_eq(value(out, 6, "last_lr"), "0.002");
    shell("cp -r k two");
    run(3, LEARN "--lr-scale linear --checkpoint two --resume --epochs 3 --batch 8");
    cr_expect(status == 2 &&
                  strstr(err, "lr=0.002 in the checkpoint, 0.003 now; give the rate of the checkpoint as "
                              "--lr, without --lr-scale"),
              "%d: %s", status, err);
    run_well(3, LEARN "--lr 0.002 --checkpoint two --resume --epochs 3 --batch 8");
    cr_expect_str_eq(value(out, 4, "last_lr"), "0.002");
    double three = number(out, 4, "test_loss"), two;
    run_well(2, LEARN "--lr-scale linear --checkpoint k --resume --epochs 3");
    two = number(out, 3, "test_loss");
    cr_expect(fabs(three - two) < 1e-5 * two, "%.9g on three ranks, %.9g on two", three, two);
}

/* A run may be killed after it wrote a checkpoint but before it wrote the rows. The resumed run must add
 * these rows. */
Test(mpi_train, rows_that_were_not_written_are_added_on_resumption)
{
    static char before[TEXT_MAX];
    run_well(2, LEARN "--checkpoint k --out rows.csv");
    read_text("rows.csv", before);
    for (int lost = 0; lost <= 3; lost++) {
        char message[64];
        shell("head -n -%d rows.csv | tee cut.csv", lost);
        run_well(2, LEARN "--checkpoint k --resume --out cut.csv");
        snprintf(message, sizeof message, "cut.csv: added %d missing row%s of the resumed run\n", lost,
                 lost == 1 ? "" : "s");
        cr_expect_eq(strstr(err, message) != NULL, lost > 0, "%d rows lost: %s", lost, err);
        read_text("cut.csv", out);
        cr_expect_str_eq(out, before, "%d rows lost", lost);
    }
}

/* Expects the latest checkpoint to be complete, and no temporary file to remain. */
static void expect_whole_checkpoint(void)
{
    unsetenv("LD_PRELOAD");
    shell("ls k/*.tmp");
    cr_expect_neq(status, 0, "a temporary file is left: %s", out);
    run_well(0, LEARN "--batch 36 --checkpoint k --resume --epochs 1");
    cr_expect_null(strstr(err, "damaged"), "%s", err);
}

Test(mpi_train, a_killed_rank_ends_all_ranks)
{
    pid_t ranks[8], mpirun = start_training(LEARN, ranks);
    int rank = rank_of(ranks[1]);
    kill(ranks[1], SIGKILL);
    expect_end(mpirun, "noticed that process rank", rank);
    cr_expect_not_null(strstr(err, "Killed"), "%s", err);
    expect_whole_checkpoint();
}

/* The message may also name ranks that still wait in an earlier collective call than rank 0. */
Test(mpi_train, a_rank_that_does_not_answer_ends_all_ranks)
{
    pid_t ranks[8], mpirun = start_training(LEARN, ranks);
    int rank = rank_of(ranks[1]);
    kill(ranks[1], SIGSTOP);
    expect_end(mpirun, "gave up waiting for rank", rank);
    expect_whole_checkpoint();
}
#endif

/* ---- Failures and differences of one rank ---- */

#ifndef __SANITIZE_ADDRESS__ /* a sanitizer has its own allocator */
/* A library in which rank 1 gets no memory for the totals of all ranks. */
static const char no_totals[] =
    "#include <stdlib.h>\n"
    "void *__libc_calloc(size_t, size_t);\n"
    "void *calloc(size_t count, size_t size)\n"
    "{\n"
    "    const char *rank = getenv(\"OMPI_COMM_WORLD_RANK\");\n"
    "    return count == 2 && size == SIZE && rank && *rank == '1' ? NULL : __libc_calloc(count, size);\n"
    "}\n";

Test(mpi_train, a_rank_without_memory_ends_all_ranks)
{
    FILE *file = fopen("totals.c", "w");
    cr_assert(file && fputs(no_totals, file) >= 0 && fclose(file) == 0);
    shell("cc -shared -fPIC -DSIZE=%zu -o totals.so totals.c", sizeof(struct train_totals));
    cr_assert_eq(status, 0, "%s", err);
    shell("timeout 150 mpirun --bind-to none -n 2 -x LD_PRELOAD=$PWD/totals.so $PROGRAM " LEARN);
    cr_expect_eq(status, 1, "exit %d: %s", status, err);
    cr_expect_not_null(strstr(err, "rank 1: out of memory"), "%s", err);
}
#endif

/* Runs two ranks with different commands, in which $PROGRAM is the program. */
static void run_two(const char *one, const char *other)
{
    shell("timeout 150 mpirun --bind-to none -n 1 %s : -n 1 %s", one, other);
}

Test(mpi_train, ranks_may_have_different_numbers_of_threads)
{
#define ANY_THREADS \
    "--variant " TRAINED " --model lenet --train-size 62 --test-size 20 --epochs 1 --format csv "
    run_two("$PROGRAM " ANY_THREADS "--batch 12 --threads 2",
            "$PROGRAM " ANY_THREADS "--batch 12 --threads 1");
    cr_expect_eq(status, 0, "%s", err);
    cr_expect_str_eq(value(out, 1, "threads"), strcmp(TRAINED, "train-omp") == 0 ? "2" : "1");
    cr_expect_str_eq(value(out, 2, "threads"), "1");
}

Test(mpi_train, ranks_that_differ_are_refused)
{
    run_two("$PROGRAM " LEARN "--seed 1", "$PROGRAM " LEARN "--seed 2");
    cr_expect(status == 2 && strstr(err, "rank 1: its options differ from those of rank 0"), "%d: %s", status,
              err);
    shell("$PROGRAM --env");
    char revision[64] = "";
    const char *at = strstr(out, "\nrevision ");
    cr_assert(at && sscanf(at, " revision %63s", revision) == 1, "%s", out);
    shell("LC_ALL=C sed 's/%s/%.*s/g' $PROGRAM >other && chmod +x other", revision, (int)strlen(revision),
          "0000000000000000000000000000000000000000000000000000000000000000");
    run_two("$PROGRAM " LEARN, "./other " LEARN);
    cr_expect(status == 2 && strstr(err, "rank 1: its version and revision differ from those of rank 0"),
              "%d: %s", status, err);
}

/* Checks that rank 1 is refused when the ranks have different files of the same name in their folders. */
static void expect_other_files(const char *options, const char *what)
{
    char one[1024], other[1024], message[128];
    snprintf(one, sizeof one, "sh -c 'cd one && exec $PROGRAM %s'", options);
    snprintf(other, sizeof other, "sh -c 'cd two && exec $PROGRAM %s'", options);
    snprintf(message, sizeof message, "rank 1: its %s differ from those of rank 0", what);
    run_two(one, other);
    cr_expect(status == 2 && strstr(err, message), "%d: %s", status, err);
    run_two(one, one);
    cr_expect_eq(status, 0, "the same files are refused: %s", err);
}

#ifdef HAVE_XXHASH
Test(mpi_train, ranks_with_other_samples_are_refused)
{
    for (int i = 0; i < 2; i++) {
        shell("mkdir %s && $PROGRAM --prepare %s/set --from digits --samples 60 --seed %d", i ? "two" : "one",
              i ? "two" : "one", i);
        if (strstr(err, "not built"))
            cr_skip_test("this build cannot prepare data sets");
        cr_assert_eq(status, 0, "%s", err);
    }
    expect_other_files("--variant train-naive --model logreg --batch 4 --epochs 1 --data set", "data");
}

/* All ranks hold out and skip the same samples, so they train and test what one rank trains and tests, also
 * if the batches of the ranks together are larger than the set. */
Test(mpi_train, ranks_hold_out_and_skip_the_same_samples)
{
    static const char *const batches[] = {"--scaling strong --batch 24 ", "--scaling weak --batch 180 "};
    shell("{ $PROGRAM --prepare d --from digits --samples 200 --encode npy --store files && mkdir m && "
          "cp d/not-imagefolder/000/* m && for i in 005 100 101; do echo no > m/000$i.npy; done; }");
    if (strstr(err, "not built"))
        cr_skip_test("this build cannot prepare data sets");
    cr_assert_eq(status, 0, "%s", err);
    double loss[4];
    for (int i = 0; i < 6; i++) {
        char line[512];
        int ranks = 1 + i % 3;
        snprintf(line, sizeof line,
                 "--variant train-naive --model logreg --epochs 1 --data m --test-share 0.2 --on-error skip "
                 "--format csv --threads 1 %s",
                 batches[i / 3]);
        run_well(ranks, line);
        size_t last = ranks > 1 ? (size_t)(ranks + 1) : 1;
        loss[ranks] = number(out, last, "test_loss");
        cr_expect_eq(number(out, last, "train_samples") + number(out, last, "test_samples"), 197);
        cr_expect(number(out, last, "test_samples") >= 37 && number(out, last, "test_samples") <= 40);
        cr_expect(fabs(loss[ranks] - loss[1]) < 1e-5 * loss[1], "%d ranks", ranks);
        cr_expect_not_null(strstr(err, "--data m: skipped "), "%s", err);
        if (i / 3 == 1 && ranks > 1)
            cr_expect(number(out, 1, "batch") == ceil(number(out, last, "train_samples") / ranks) &&
                          number(out, last, "steps") == 1 && strstr(err, "samples to train on: a batch has"),
                      "%s", err);
    }
    run(3, "--variant train-naive --train-size 2 --test-size 2");
    cr_expect(status == 2 && strstr(err, "only 2 samples to train on, fewer than the 3 ranks"), "%s", err);
}

Test(mpi_train, ranks_with_other_initial_parameters_are_refused)
{
    for (int i = 0; i < 2; i++) {
        shell("mkdir %s && $PROGRAM --variant train-naive --model logreg --epochs 1 --train-size 64 "
              "--test-size 5 --seed %d --checkpoint %s/k",
              i ? "two" : "one", i, i ? "two" : "one");
        cr_assert_eq(status, 0, "%s", err);
    }
    expect_other_files("--variant train-naive --model logreg --batch 4 --epochs 1 --train-size 20 "
                       "--test-size 5 --init k",
                       "initial parameters");
}
#endif

Test(mpi_train, options_that_ranks_cannot_use_are_refused)
{
    static const struct {
        const char *options, *message;
    } cases[] = {
        {"--batch 2 --scaling strong", "--batch 2 has too few samples for 3 ranks"},
        {"--export-step step", "--export-step writes the samples of one rank"},
        {"--balance 3:1", "--balance 3:1 has 2 numbers, but there are 3 ranks; give one number per rank"},
        {"--balance 0:0:0", "leaves no samples to any rank"},
        {"--balance fair", "'fair' is not equal, measured, memory or a list"},
        {"--sync smoke", "--sync: 'smoke' is not one of auto, mpi"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        snprintf(line, sizeof line, LEARN "%s", cases[i].options);
        run(3, line);
        cr_expect(status == 2 && strstr(err, cases[i].message), "%s: %d: %s", cases[i].options, status, err);
    }
    run(2, LEARN "--variant train-cuda");
    cr_expect(status == 4 && strstr(err, "variant 'train-cuda' cannot"), "%d: %s", status, err);
}

/* ---- Inference ---- */

/* Three ranks divide 20 samples unevenly, and give the predictions and the accuracy of one rank, in its
 * order. */
Test(mpi_train, ranks_divide_the_test_set_of_inference)
{
    char one[8][64];
    run_well(0, LEARN "--checkpoint k");
    if (strstr(err, "xxHash"))
        cr_skip_test("this build writes no checkpoints");
#define INFER "--variant infer-naive --checkpoint k --batch 3 --loops 10 --format csv "
    static const char *const columns[] = {"test_loss", "test_acc", "test_samples"};
    run_well(0, INFER "--predictions one.csv");
    for (size_t i = 0; i < COUNT_OF(columns); i++)
        snprintf(one[i], sizeof one[i], "%s", value(out, 1, columns[i]));
    for (int ranks = 2; ranks <= 3; ranks++) {
        run_well(ranks, INFER "--verify --predictions all.csv");
        for (size_t i = 0; i < COUNT_OF(columns); i++)
            cr_expect_str_eq(value(out, 1, columns[i]), one[i], "%d ranks: %s", ranks, columns[i]);
        cr_expect(same_files("one.csv", "all.csv"), "%d ranks", ranks);
        run_well(ranks, INFER "--predictions -");
        read_text("one.csv", err);
        cr_expect_str_eq(out, err, "%d ranks", ranks);
    }
    run(2, INFER "--scaling strong");
    cr_expect(status == 2 && strstr(err, "--scaling strong: the ranks of infer have a whole batch"), "%s",
              err);
    shell("cp -r k k1 && timeout 150 mpirun --bind-to none -n 2 sh -c '$PROGRAM " INFER
          "--test-size $((19 + OMPI_COMM_WORLD_RANK))'");
    cr_expect(status == 2 && strstr(err, "differ from those of rank 0"), "%d: %s", status, err);
#undef INFER
}

/* ---- Faults ---- */

/* In the second step, only rank 0 has a sample, and its loss is infinite. */
Test(mpi_train, a_loss_that_is_not_finite_names_the_rank_and_the_layer)
{
    run(2, DIVIDE "--train-size 5 --batch 4 --optimizer sgd --lr 1e38");
    cr_expect(status == 1 && strstr(err, "fdsl-bench: rank 0: epoch 1, step 2 of 2: the loss is not finite; "
                                         "first non-finite result: conv2"),
              "%d: %s", status, err);
    run(2, DIVIDE "--train-size 5 --batch 4 --optimizer sgd --lr 1e38 --epochs 1 --allow-nan");
    cr_expect_eq(status, 0, "%s", err);
}

Test(mpi_train, wrong_sums_are_detected)
{
    run_with_fault(-1, -1, LEARN "--verify");
    cr_expect(status == 3 && strstr(err, "of 10 tensors are wrong"), "%d: %s", status, err);
    run_with_fault(-1, -1, LEARN);
    cr_expect_eq(status, 0, "%s", err);
}

Test(mpi_train, ranks_whose_parameters_differ_stop)
{
    run_with_fault(1, -1, LEARN);
    cr_expect(status == 1 &&
                  strstr(err, "rank 1: its parameters after the epoch differ from those of rank 0"),
              "%d: %s", status, err);
    cr_expect_eq(count_of(out, "\n"), 0, "%s", out);
}

/* ---- Samples that are read during training ---- */

#if defined HAVE_PNG && defined HAVE_XXHASH
#define READ                                                                                             \
    "--variant " TRAINED " --model logreg --data f --test-data f --feed load --on-error mask --lanes 5 " \
    "--shuffle 30 --batch 24 --scaling strong --epochs 2 --threads 1 --format csv "

#define NORMED(variant)                                                                               \
    "--variant " variant " --model resnet-micro --train-size 43 --test-size 9 --batch 14 --epochs 1 " \
    "--scaling strong --threads 1 --format csv "

/* With sums over all ranks, any number of ranks takes the steps of one rank: --verify compares them with the
 * reference, which has all samples in one batch. The last step has one sample, so other ranks have none.
 * Without these sums, the steps differ, and --verify is refused. */
Test(mpi_train, ranks_normalise_together)
{
    static const char *const lines[] = {NORMED("train-naive"),
#ifdef _OPENMP
                                        NORMED("train-omp")
#endif
    };
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        double loss[4];
        char line[512];
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            const size_t last = ranks > 1 ? (size_t)ranks + 1 : 1;
            snprintf(line, sizeof line, "%s--sync-batch-norm --verify --verify-steps 4", lines[i]);
            run_well(ranks, line);
            loss[ranks] = number(out, last, "train_loss");
            cr_expect(fabs(loss[ranks] - loss[1]) < 1e-5 * loss[1], "%d ranks: %.9g instead of %.9g", ranks,
                      loss[ranks], loss[1]);
            cr_expect_str_eq(value(out, last, "wrong"), "0");
        }
        run_well(3, lines[i]);
        cr_expect(fabs(number(out, 4, "train_loss") - loss[1]) > 1e-4 * loss[1]);
        snprintf(line, sizeof line, "%s--verify", lines[i]);
        run(3, line);
        cr_expect(status == 2 && strstr(err, "add --sync-batch-norm, or drop --verify"), "%d: %s", status,
                  err);
    }
}

/* Without these sums, other ranks or shares would give other parameters. */
Test(mpi_train, ranks_that_normalise_alone_stay_as_they_are)
{
    static const struct {
        int before, now;
        const char *shares, *says;
    } cases[] = {
        {2, 1, "", "ranks=2 in the checkpoint, none now; start as many ranks as before (2)"},
        {1, 2, "", "no ranks in the checkpoint, 2 now; start as many ranks as before (1)"},
        {2, 2, "--balance 3:1", "balance=equal in the checkpoint, 3:1 now"},
    };
    run_well(1, NORMED("train-naive") "--checkpoint k1");
    run_well(2, NORMED("train-naive") "--checkpoint k2");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        snprintf(line, sizeof line, "%s--checkpoint k%d --resume %s", NORMED("train-naive"), cases[i].before,
                 cases[i].shares);
        run(cases[i].now, line);
        cr_expect(status == 2 && strstr(err, cases[i].says), "%d: %s", status, err);
    }
    run(2, NORMED("train-naive") "--parallel pipeline --stages 1 --microbatches 2");
    cr_expect(status == 2 && strstr(err, "which micro-batches would change"), "%d: %s", status, err);
}

static void prepare_folders(void)
{
    shell("{ $PROGRAM --prepare all --from digits --samples 62 --store imagefolder && mkdir f && "
          "cp -r all/*/ f; }");
    cr_assert_eq(status, 0, "%s", err);
}

/* --verify checks that all ranks together train on each sample once per epoch. */
Test(mpi_train, ranks_read_the_samples_of_a_step_together)
{
    double loss[5];
    prepare_folders();
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_well(ranks, READ "--verify --verify-steps 3 --mixup 0.5 --shift 1 --resident-bytes 12K");
        size_t last = ranks > 1 ? 2 * (size_t)(ranks + 1) : 2;
        loss[ranks] = number(out, last, "train_loss");
        cr_expect(fabs(loss[ranks] - loss[1]) < 1e-5 * loss[1], "%d ranks: %.9g instead of %.9g", ranks,
                  loss[ranks], loss[1]);
        cr_expect_str_eq(value(out, last, "items"), "62");
        cr_expect_str_eq(value(out, last, "wrong"), "0");
        cr_expect_str_eq(value(out, last, "masked"), "0");
    }
}

/* Each rank warns about its own broken samples. Together, the ranks name each of them once. */
Test(mpi_train, all_ranks_name_their_broken_samples)
{
    prepare_folders();
    shell("cp -r f tested && for i in $(ls f/*/*.png | head -12 | tee broken); do echo no >$i; done");
    cr_assert_eq(status, 0, "%s", err);
    run_well(3,
             "--variant " TRAINED " --model logreg --data f --test-data tested --feed load --on-error mask "
             "--batch 3 --scaling strong --epochs 1 --threads 1 --format csv");
    cr_expect_str_eq(value(out, 4, "masked"), "12");
    cr_expect_eq(count_of(err, " broken sample of epoch 1, step "), 12, "%s", err);
    for (int rank = 0; rank < 3; rank++) {
        char from[32];
        snprintf(from, sizeof from, "warning: rank %d: 1 broken", rank);
        cr_expect_gt(count_of(err, from), 0, "%s", err);
    }
    char said[sizeof err];
    strcpy(said, err);
    shell("cat broken");
    for (char *name = strtok(out, "\n"); name; name = strtok(NULL, "\n"))
        cr_expect_eq(count_of(said, strrchr(name, '/')), 1, "%s: %s", name, said);
}

Test(mpi_train, other_ranks_resume_within_an_epoch_with_the_same_samples)
{
    double loss;
    prepare_folders();
    run_well(1, READ "--checkpoint whole --checkpoint-steps 2 --keep 10");
    loss = number(out, 2, "train_loss");
    for (int ranks = 2; ranks <= 4; ranks++) {
        shell("rm -rf k && mkdir k && cp whole/*step* k && ls k");
        cr_assert_eq(status, 0, "%s", err);
        run_well(ranks, READ "--checkpoint k --checkpoint-steps 2 --resume");
        size_t last = 0;
        for (const char *end = out; (end = strchr(end, '\n')); end++)
            last++;
        last--; /* without the header */
        cr_expect(fabs(number(out, last, "train_loss") - loss) < 1e-5 * loss, "%d ranks: %s", ranks, out);
    }
}

/* A rank is killed by SIGKILL at any time after a checkpoint within an epoch. The resumed run then has
 * the same loss in each step, and the same weights, as a run that was not interrupted. */
Test(mpi_train, ranks_that_are_killed_resume_with_the_same_bits)
{
    static const char parts[] = READ "--checkpoint k --checkpoint-steps 1 --keep 2 --resume --log parts.csv "
                                     "--log-steps 1 ";
    char line[640];
    prepare_folders();
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        snprintf(line, sizeof line, "%s--epochs 100000", parts);
        drop_repeated_in(line);
        shell("{ rm -rf k parts.csv; "
              "mpirun --bind-to none -n %d $PROGRAM %s >killed.txt 2>&1 & pid=$!; "
              "while kill -0 $pid && ! ls k/*step* >found 2>&1; do sleep 0.05; "
              "done; "
              "sleep 0.$(shuf -i 100-299 -n 1); "
              "read child rest </proc/$pid/task/$pid/children; kill -KILL $child; ! wait $pid || exit 1; "
              "ls k | tail -n 1 | sed 's/[^0-9]*0*\\([0-9]*\\).*/\\1/'; }",
              ranks, line);
        cr_assert(status == 0, "exit %d: %s%s", status, out, err);
        const int epochs = atoi(out) + 2;
        snprintf(line, sizeof line, "%s--export parts --epochs %d", parts, epochs);
        run_well(ranks, line);
        snprintf(line, sizeof line, READ "--log whole%d.csv --log-steps 1 --export whole --epochs %d", ranks,
                 epochs);
        run_well(ranks, line);
        cr_expect(same_files("whole", "parts"), "%d ranks: the weights differ after %d epochs", ranks,
                  epochs);
        shell(
            "{ for f in whole%d parts; do awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } "
            "{ print $at[\"step\"], $at[\"samples_seen\"], $at[\"loss\"] }' $f.csv | sort -u >$f.txt; done; "
            "wc -l <whole%d.txt; diff whole%d.txt parts.txt; }",
            ranks, ranks, ranks);
        cr_expect(status == 0 && atoi(out) == 3 * epochs, "%d ranks, %d epochs: %s", ranks, epochs, out);
    }
}

static void expect_all_end(const char *model)
{
    shell("rm -rf k");
    shell("{ (for i in $(seq 500); do ls k/*.ckpt && break; sleep 0.1; done; date +%%s >begin; printf x >>"
          "$(ls f/*/*.png | head -1)) & timeout 60 mpirun --bind-to none -n 3 $PROGRAM --variant " TRAINED
          " --model %s --data f --test-data f --feed load --batch 24 --scaling strong --epochs 1000000 "
          "--threads 1 --checkpoint k; s=$?; date +%%s >end; (exit $s); }",
          model);
    cr_expect_eq(status, 1, "exit %d: %s", status, err);
    cr_expect(strstr(err, ".png") != NULL, "%s", err);
    shell("echo $(($(cat end) - $(cat begin)))");
    cr_expect(atoi(out) <= 15, "it took %s s", out);
}

/* A file that grows while it is read is an error on the rank that reads it. Every rank then ends, also if the
 * others wait for the sums of a normalisation. */
Test(mpi_train, a_stream_that_fails_on_one_rank_ends_all_ranks)
{
    prepare_folders();
    expect_all_end("logreg");
    shell("rm -rf f all");
    prepare_folders();
    expect_all_end("resnet-micro --sync-batch-norm");
}
#endif
