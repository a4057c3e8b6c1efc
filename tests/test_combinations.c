/* Tests runs of the program with lists and ranges: rows, the table, messages and outputs. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <sched.h>

#include "program.h"

TestSuite(combinations, .init = start, .fini = stop, .timeout = 60);

#define DIGITS   "--variant train-naive --data digits"
#define PIPELINE " --parallel pipeline --ranks 2"
#define SIX      NAIVE " --res 16,32 --batch 1:4:2x"

Test(combinations, each_combination_has_one_row)
{
    static const int sizes[][2] = {{16, 1}, {16, 2}, {16, 4}, {32, 1}, {32, 2}, {32, 4}};
    run_well(SIX " --verify --format csv --out rows.csv --samples-out samples.csv");
    expect_file("rows.csv", out);
    cr_assert_eq(count_of(out, "\n"), 7, "not a header and one row per combination: %s", out);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        cr_expect_eq(number(out, i + 1, "res"), sizes[i][0]);
        cr_expect_eq(number(out, i + 1, "batch"), sizes[i][1]);
        cr_expect_eq(number(out, i + 1, "items"), sizes[i][1],
                     "the run did not have the batch size of its row");
        cr_expect_str_eq(value(out, i + 1, "wrong"), "0");
    }
    char *samples = get("samples.csv", NULL);
    cr_expect_eq(count_of(samples, "\n"), 1 + 6 * 3);
    cr_expect_eq(number(samples, 18, "batch"), 4);
    free(samples);
}

Test(combinations, images_equal_those_of_single_commands)
{
    static const char *const types[] = {"u8", "f16"};
    char digests[4][32];
    run_well(NAIVE_MIXED " --batch 3 --dtype u8,f16 --classes 2,3 --format csv");
    for (size_t i = 0; i < 4; i++)
        snprintf(digests[i], sizeof digests[i], "%s", value(out, i + 1, "digest"));
    for (size_t i = 0; i < 4; i++) {
        run(NAIVE_MIXED " --batch 3 --dtype %s --classes %d --format csv", types[i / 2], (int)(2 + i % 2));
        cr_expect_str_eq(value(out, 1, "digest"), digests[i], "%s %zu", types[i / 2], 2 + i % 2);
        for (size_t j = 0; *digests[i] && j < i; j++)
            cr_expect_str_neq(digests[j], digests[i]);
    }
}

Test(combinations, each_combination_has_its_own_baseline)
{
    run_well("--variant omp,naive " TINY " --batch 2,3 --format csv");
    static const char *const names[] = {"naive", "omp", "naive", "omp"};
    for (size_t i = 0; i < 4; i++) {
        double own_s = number(out, i + 1, "time_median_s"),
               base_s = number(out, i / 2 * 2 + 1, "time_median_s");
        double speedup = number(out, i + 1, "speedup");
        cr_expect_str_eq(value(out, i + 1, "variant"), names[i]);
        cr_expect_eq(number(out, i + 1, "batch"), i < 2 ? 2 : 3);
        cr_expect(fabs(speedup * own_s / base_s - 1) < 1e-6, "row %zu: %g", i + 1, speedup);
    }
}

/* Returns line `number` of the table, counted from its header. */
static const char *line_of(int number)
{
    static char line[512];
    const char *at = strstr(out, "\nvariant ");
    cr_assert_not_null(at, "%s", out);
    for (at++; number > 0; number--)
        at = strchr(at, '\n') + 1;
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    return line;
}

Test(combinations, the_table_has_one_column_per_axis)
{
    char name[32], first[32], second[32], third[32];
    run_well(SIX " --vertices 20 --threads 1,2");
    cr_expect_eq(count_of(out, "\nvariant "), 1, "%s", out);
    cr_expect_eq(count_of(out, "\nnaive "), 12, "%s", out);
    cr_expect_eq(sscanf(line_of(0), "%31s %31s %31s %31s", name, first, second, third), 4);
    cr_expect(!strcmp(first, "res") && !strcmp(second, "batch") && !strcmp(third, "threads"), "%s",
              line_of(0));
    sscanf(line_of(4), "%31s %31s %31s %31s", name, first, second, third);
    cr_expect(!strcmp(first, "16") && !strcmp(second, "2") && !strcmp(third, "2"), "%s", line_of(4));
    cr_expect(strncmp(out, "synth: vertices 20 orbits 4", 27) == 0, "the caption must not have an axis: %s",
              out);
    run_well(NAIVE " --res 32,4096 --dry-run");
    run_well(NAIVE " --res 16:16:2x");
    sscanf(line_of(1), "%31s %31s", name, first);
    cr_expect_str_eq(first, "16");
    run_well(NAIVE);
    cr_expect(strstr(line_of(0), "variant               time/item"), "%s", line_of(0));
}

#ifdef HAVE_JANSSON
Test(combinations, json_is_one_document)
{
    run_well(SIX " --format json --out rows.csv");
    put("rows.json", out);
    check_with_python("import json, sys\n"
                      "rows = json.load(open(sys.argv[1]))['rows']\n"
                      "assert [row['batch'] for row in rows] == [1, 2, 4, 1, 2, 4], rows\n",
                      "rows.json");
}
#endif

/* ---- Checks and failures ---- */

Test(combinations, dry_run_lists_and_checks_each_combination)
{
    run_well(SIX " --dry-run --out rows.csv");
    cr_expect_str_eq(out, "--res 16 --batch 1\n--res 16 --batch 2\n--res 16 --batch 4\n--res 32 --batch 1\n"
                          "--res 32 --batch 2\n--res 32 --batch 4\n");
    cr_expect_eq(count_files(), 0);
    run(NAIVE " --res 32,16 --fit crop --out-res 20 --dry-run --ranks 2");
    cr_expect_eq(status, 2);
    cr_expect_str_eq(out, "--res 32\n");
    cr_expect_str_eq(
        err, "fdsl-bench: --res 16: --fit crop: --out-res 20 is larger than --res 16; lower --out-res, "
             "or enlarge with --fit resize\n"
             "fdsl-bench: 1 of 2 combinations failed\n");
    run_well("--variant naive --res 16,4096 --batch 1,16777216 --dry-run --ranks 1");
    run("--variant naive --res 16,4096 --batch 1,16777216 --dry-run");
    cr_expect_eq(status, 2);
    cr_expect(strstr(err, "--res 4096 --batch 16777216: variant 'naive' cannot run with these options: the "
                          "batch: 281474.98 GB of memory needed"),
              "%s", err);
    cr_expect_str_eq(out, "--res 16 --batch 1\n--res 16 --batch 16777216\n--res 4096 --batch 1\n");
}

Test(combinations, a_failing_combination_does_not_stop_the_others)
{
    run(NAIVE " --res 16,32 --noise 1:3:1 --fit crop --out-res 20 --out rows.csv --format csv");
    cr_expect_eq(status, 2);
    cr_expect_eq(count_of(out, "\n"), 4, "%s", out);
    cr_expect_eq(number(out, 1, "res"), 32);
    expect_file("rows.csv", out);
    cr_expect(strstr(err, "fdsl-bench: --res 16 --noise 1: --fit crop: "), "%s", err);
    cr_expect(!strstr(err, "--res 16 --noise 2: "), "the same failure is repeated: %s", err);
    cr_expect(strstr(err, "fdsl-bench: the next 2 combinations failed in the same way\n"), "%s", err);
    cr_expect(strstr(err, "fdsl-bench: warning: 3 of 3 rows took too few samples"), "%s", err);
    cr_expect(strstr(err, "fdsl-bench: 3 of 6 combinations failed\n"), "%s", err);
    run(NAIVE " --res 32,16,33 --fit crop --out-res 20 --format csv");
    cr_expect_eq(count_of(out, "\n"), 3);
    cr_expect(!strstr(err, "in the same way"), "%s", err);
}

/* An error message begins with the values of the combination. The text after these values does not repeat
 * them. */
Test(combinations, a_message_names_a_value_once)
{
    run(NAIVE " --batch 1,4 --scaling strong --dry-run --ranks 2");
    cr_expect_eq(status, 2);
    cr_expect(strstr(err, "fdsl-bench: --batch 1: --scaling strong: more ranks (2) than images"), "%s", err);
    run(NAIVE " --batch 1 --scaling weak,strong --dry-run --ranks 2");
    cr_expect(strstr(err, "fdsl-bench: --scaling strong: more ranks (2) than images"), "%s", err);
    cr_expect_eq(count_of(err, "--scaling strong"), 1, "%s", err);
}

/* A refused value of a list: the option at fault is printed once, with its value. */
static const struct refused_value {
    const char *command, *option, *value;
} refused_values[] = {
    {"--variant ops-naive --norm-min 1e-30,1e-20", "norm-min", "1e-30"},
    {"--variant ops-naive --norm-min 300,400 --norm-max 200", "norm-min", "300"},
    {"--variant ops-naive --steps mask,permute --rows 10 --sample 20,30", "sample", "20"},
    {"--variant ops-naive --steps hash --fp8 nan,saturate", "fp8", "nan"},
    {"--variant ops-naive --data set --dim 3,4", "dim", "3"},
    {"--variant shards --data http://127.0.0.1:1/x.tar --cache cold,warm", "cache", "cold"},
    {"--variant shards --data set --block 6,7", "block", "6"},
    {"--variant shards --data set --chunk 6,7", "chunk", "6"},
    {"--variant shards --data set --augment --channels 1,3", "channels", "1"},
    {"--variant shards --data set --shift 1,2", "shift", "1"},
    {"--variant shards --data set --dtype raw,f32 --mean 0.5 --std 0.5", "dtype", "raw"},
    {NAIVE " --classes 2,3 --class 0.1,0.2,0.3,0.4", "classes", "2"},
    {NAIVE " --orbits 3,4 --classes 2", "orbits", "3"},
    {DIGITS " --classes 2,3", "classes", "2"},
    {DIGITS " --channels 1,3", "channels", "1"},
    {DIGITS " --feed live,stored", "feed", "live"},
    {DIGITS " --fit crop,resize", "fit", "crop"},
    {DIGITS " --shift 28,40", "shift", "28"},
    {DIGITS " --accumulate 8,9 --batch 4", "accumulate", "8"},
    {DIGITS " --repeats 3,5 --batch 4", "repeats", "3"},
    {DIGITS " --drop-path 0.1,0.2", "drop-path", "0.1"},
    {DIGITS " --layer-decay 0.5,0.6", "layer-decay", "0.5"},
    {DIGITS " --optimizer adam --momentum 0.5,0.8", "momentum", "0.5"},
    {DIGITS " --lr-schedule multistep,step", "lr-schedule", "multistep"},
    {DIGITS " --lr-gamma 0.1,0.2", "lr-gamma", "0.1"},
    {DIGITS " --lr-schedule cosine --lr-warmup 2,3 --epochs 2", "lr-warmup", "2"},
    {DIGITS " --lr-schedule cosine --lr-cycles 100000,200000 --batch 50", "lr-cycles", "100000"},
    {DIGITS " --lr-schedule cosine --lr 0.1 --lr-min 0.5,0.6", "lr-min", "0.5"},
    {DIGITS " --generator omp,fused", "generator", "omp"},
    {DIGITS " --res 16,20", "res", "16"},
    {DIGITS PIPELINE " --stages 3,5", "stages", "3"},
    {DIGITS PIPELINE " --batch 4 --microbatches 9,10", "microbatches", "9"},
    {DIGITS PIPELINE " --clip-norm 1,2", "clip-norm", "1"},
    {DIGITS PIPELINE " --accumulate 2,3", "accumulate", "2"},
    {DIGITS PIPELINE " --model vit-micro --schedule zb-h1,gpipe", "schedule", "zb-h1"},
    {DIGITS " --sync peer,nccl --ranks 2", "sync", "peer"},
    {DIGITS " --batch max,4 --variant train-naive,train-omp", "batch", "max"},
    {"--variant mpi --bytes 3,5", "bytes", "3"},
};

Test(combinations, a_refused_value_is_named_once)
{
    run_well("--prepare set --samples 8 --sample-shape 4 --dtype u8");
    for (size_t i = 0; i < COUNT_OF(refused_values); i++) {
        const struct refused_value *refused = &refused_values[i];
        char words[64], twice[64];
        run("%s --dry-run", refused->command);
        cr_expect_neq(status, 0, "%s: %s", refused->command, out);
        err[strcspn(err, "\n")] = '\0';
        snprintf(words, sizeof words, "--%s %s", refused->option, refused->value);
        snprintf(twice, sizeof twice, "--%s: ", refused->option);
        cr_expect(count_of(err, words) == 1 && count_of(err, twice) == 0, "%s: %s", refused->command, err);
    }
}

Test(combinations, values_with_the_same_effect_are_refused)
{
    expect_failure(2, "--scaling: weak and strong are the same with one rank; give one of them",
                   NAIVE " --scaling weak,strong");
    run_well(NAIVE " --scaling weak,strong --dry-run --ranks 2");
    cpu_set_t allowed;
    sched_getaffinity(0, sizeof allowed, &allowed);
    int cores = CPU_COUNT(&allowed);
    run(NAIVE " --threads 0,%d", cores);
    char words[128];
    snprintf(words, sizeof words, "--threads: 0 means %d here, so %d occurs twice", cores, cores);
    expect_error(2, words, "all threads");
    run(NAIVE " --threads 0,%d --dry-run", cores + 1);
    cr_expect(status == 0 && count_of(out, "--threads ") == 2, "%s%s", out, err);
}

Test(combinations, errors_are_reported_before_the_first_run)
{
    static const struct refusal refusals[] = {
        {"--res 16,many", "--res: 'many' is not a whole number"},
        {"--res 16,32 --npy x.npy",
         "--npy is for one combination, but the lists and ranges have 2; use single"},
        {"--res 16,32 --sheet x.png", "--sheet is for one combination"},
        {"--res 16,32 --png x", "--png is for one combination"},
        {"--res 16,32 --write-classes x.csv --classes 2", "--write-classes is for one combination"},
        {"--res 16,32 --monitor x.csv", "--monitor is for one combination"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    /* Options that decide how long is measured, and not what, have one value. */
    static const char *const single[] = {"warmups",  "warmup-time",  "min-samples",
                                         "min-time", "max-time",     "max-error",
                                         "loops",    "lock-timeout", "rank-timeout"};
    for (size_t i = 0; i < COUNT_OF(single); i++)
        for (const char *const *list = (const char *const[]){"1,2", "1:2:1", NULL}; *list; list++) {
            char words[80];
            snprintf(words, sizeof words, "--%s: '%s' is not a ", single[i], *list);
            run(NAIVE " --%s %s", single[i], *list);
            expect_error(2, words, single[i]);
        }
    static const struct refusal of_training[] = {
        {"--seed 1,2 --checkpoint x", "--checkpoint is for one combination"},
        {"--seed 1,2 --export x.safetensors", "--export is for one combination"},
        {"--seed 1,2 --export-data x.safetensors --dry-run", "--export-data is for one combination"},
    };
    expect_refusals(of_training, COUNT_OF(of_training), "--variant train-naive");
    run("--prepare %s/set --samples 2,3", folder);
    expect_error(2, "--samples: '2,3' is not a whole number", "--prepare");
    put("old.csv", "other,columns\n");
    run(SIX " --out old.csv");
    cr_expect(status == 2 && *out == '\0', "%s", out);
    cr_expect(strstr(err, "--res 16 --batch 1: old.csv has other columns"), "%s", err);
    cr_expect(strstr(err, "6 of 6 combinations failed"), "%s", err);
}

Test(combinations, training_and_loading_accept_lists)
{
    run_well("--variant train-naive --data digits --model lenet --train-size 20 --test-size 10 --batch 5,10 "
             "--lr 0.001:0.1:10x --epochs 2 --format csv");
    cr_expect_eq(count_of(out, "\n"), 1 + 2 * 3 * 2, "not one row per epoch: %s", out);
    expect_cells(out, 11, "batch=10");
    expect_cells(out, 12, "lr=0.1");
    run("--prepare %s/set --samples 8 --sample-shape 4 --dtype u8", folder);
    run("--variant shards --data %s/set --cache warm,any --batch 2,4 --min-samples 3 --min-time 0 --max-time "
        "0 --format csv",
        folder);
    cr_assert_eq(status, 0, "%s", err);
    cr_expect_eq(count_of(out, ",cache,"), 1, "the column cache occurs more than once: %s", out);
    expect_cells(out, 1, "cache=warm");
    expect_cells(out, 4, "cache=any;batch=4");
    cr_expect_eq(count_of(out, "\n"), 5);
}

/* ---- Progress and signals ---- */

Test(combinations, progress_counts_combinations)
{
    how.terminal_err = true;
    run_well(NAIVE " --batch 1,3 --format csv");
    cr_expect(strstr(err, "[1/2] naive: setting up") && strstr(err, "[2/2] naive: sample 1, "), "%s", err);
    run_well(NAIVE " --format csv");
    cr_expect(!strstr(err, "[1/1]"), "%s", err);
}

/* Interrupts the program in its second combination, which takes long. */
Test(combinations, an_interrupt_reports_completed_combinations)
{
    pid_t pid = start_run("--variant naive --batch 1,4096 --res 1024 --warmups 0 --warmup-time 0 --loops 1 "
                          "--out rows.csv",
                          "err.txt");
    while (access("rows.csv", F_OK) != 0)
        usleep(1000);
    wait_for_text("rows.csv", "naive");
    sleep(1); /* the second combination begins */
    expect_ended_by(pid, SIGINT);
    char *text = get("err.txt", NULL);
    cr_expect(strstr(text, "fdsl-bench: interrupted: 1 of 2 combinations are done, with their rows in "
                           "rows.csv; to continue, repeat the same command with --batch 4096\n"),
              "%s", text);
    free(text);
    cr_expect_eq(lines_of_file("rows.csv"), 2, "the first combination's row is missing");
}
