/* Tests the command line: information options, usage errors, classes, and unavailable features. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "program.h"

TestSuite(cli, .init = start, .fini = stop, .timeout = 60);

/* ---- Without a run ---- */

Test(cli, information_options_need_no_other_option_and_leave_stderr_empty)
{
    static const char *const commands[] = {
        "--help",
        "-h",
        "--version",
        "--list",
        "--list -v",
        "--list --verbose",
        "--env",
        "--env --format csv",
        "--workload synth --list",
        "--variant naive --list",
    };
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        run("%s", commands[i]);
        cr_expect(status == 0, "%s: exit %d", commands[i], status);
        cr_expect(*err == '\0', "%s: %s", commands[i], err);
        cr_expect(*out && out[strlen(out) - 1] == '\n', "%s", commands[i]);
        cr_expect(!strchr(out, '\033'), "%s", commands[i]);
    }
    cr_expect(count_files() == 0);
}

static void expect_help_names(const char *name)
{
    char option[80];
    snprintf(option, sizeof option, " --%s", name);
    for (const char *at = out; (at = strstr(at, option)); at++)
        if (strchr(" \n", at[strlen(option)]) && strncmp(at - 1, "  ", 2) == 0)
            return;
    if (strcmp(name, "help") != 0 && strcmp(name, "verbose") != 0) /* listed after their short form */
        cr_expect_fail("--help does not explain --%s", name);
    else
        cr_expect(strstr(out, option), "--help does not explain --%s", name);
}

Test(cli, help_names_every_option_and_exit_status)
{
    static const char *const shared[] = {
        "variant",   "workload", "list",        "verify",   "out",      "samples-out", "format",  "threads",
        "device",    "warmups",  "warmup-time", "min-time", "max-time", "min-samples", "env",     "verbose",
        "max-error", "version",  "help",        "monitor",  "loops",    "best-gpu",    "dry-run", "ranks"};
    static const char *const statuses[] = {"0 done", "1 a failure while running", "2 usage",
                                           "3 wrong results", "4 not supported by this build or machine"};
    run_well("--help -v");
    for (size_t i = 0; i < COUNT_OF(shared); i++)
        expect_help_names(shared[i]);
    for (size_t w = 0; workload_table[w]; w++)
        cr_expect(strstr(out, workload_table[w]->summary));
    for (size_t w = 0; workload_table[w]; w++) {
        run("--workload %s --help --verbose", workload_table[w]->name);
        cr_expect(status == 0 && strstr(out, workload_table[w]->summary));
        for (size_t i = 0; i < COUNT_OF(shared); i++)
            expect_help_names(shared[i]);
        for (size_t i = 0; i < workload_table[w]->option_count; i++)
            expect_help_names(workload_table[w]->options[i].name);
    }
    for (size_t i = 0; i < COUNT_OF(statuses); i++)
        cr_expect(strstr(strstr(out, "exit status"), statuses[i]), "%s", statuses[i]);
    expect_prints("--workload train - ", "--variant train-naive --help");
}

/* --help alone is an overview on two screens of 24 lines. It names the options of all workloads. */
Test(cli, the_short_help_fits_on_two_screens)
{
    char name[64];
    run_well("--help -v");
    char *all = strdup(strstr(out, "\noptions of all workloads:\n"));
    *strstr(all, "\noptions of the workload ") = '\0';
    run_well("--help");
    cr_expect(count_of(out, "\n") <= 50, "%d lines", (int)count_of(out, "\n"));
    for (const char *line = out; *line; line = strchr(line, '\n') + 1)
        cr_expect(strcspn(line, "\n") <= 100, "%.*s", (int)strcspn(line, "\n"), line);
    for (const char *at = all; (at = strstr(at, "\n  ")); at++) {
        const char *option = at + 3 + 4 * (at[4] != '-'); /* after "-h, " */
        if (at[3] == '-' && sscanf(option, "%63s", name) == 1)
            cr_expect(strstr(out, name), "--help does not name %s", name);
    }
    cr_expect(!strstr(out, "--vertices"), "an option of one workload is in the general help");
    for (size_t w = 0; workload_table[w]; w++)
        cr_expect(strstr(out, workload_table[w]->summary));
    free(all);
}

static void expect_page(const char *topic)
{
    run("--help %s", topic);
    cr_expect(status == 0 && *out && count_of(out, "\n") <= 50, "--help %s: %d lines; divide its section",
              topic, (int)count_of(out, "\n"));
}

/* Every workload and every section is a page of at most 50 lines. The page of a workload names all options.
 */
Test(cli, the_help_of_a_topic_is_one_page)
{
    static const char *const of_all[] = {"what-to-run", "output",      "CPU-and-GPU", "ranks",
                                         "timing",      "information", "lists"};
    char topic[128];
    for (size_t i = 0; i < COUNT_OF(of_all); i++)
        expect_page(of_all[i]);
    for (size_t w = 0; workload_table[w]; w++) {
        const struct workload *workload = workload_table[w];
        expect_page(workload->name);
        for (size_t i = 0; i < workload->option_count; i++) {
            snprintf(topic, sizeof topic, " --%s", workload->options[i].name);
            const char *found = strstr(out, topic);
            while (found && !strchr(" \n", found[strlen(topic)]))
                found = strstr(found + 1, topic);
            cr_expect(found, "--help %s lacks%s", workload->name, topic);
        }
        for (const struct option_section *section = workload->option_sections; section->title; section++) {
            snprintf(topic, sizeof topic, "%s/%s", workload->name, section->title);
            for (char *at = topic; (at = strchr(at, ' '));)
                *at = '-';
            expect_page(topic);
            snprintf(topic, sizeof topic, "  --%s ", section->first);
            cr_expect(strstr(out, topic), "%s", out);
        }
    }
    run_well("--help train/loss");
    char *page = strdup(out);
    run_well("--workload train --help loss");
    cr_expect_str_eq(out, page);
    run_well("--variant train-naive --help train/loss");
    cr_expect_str_eq(out, page);
    free(page);
    expect_prints("  --lr RATE", "--help train/lr");
    expect_prints("(default 0.1)", "--recipe paper --help train/label-smoothing");
    expect_failure(2, "no topic or option is named 'optimiser'; did you mean 'optimizer'?",
                   "--help train/optimiser");
    expect_failure(2, "--help and --workload NAME --help list the topics", "--help xyzzyplugh");
    expect_failure(2, "unknown command 'adviser'; did you mean 'advise'?", "--help adviser");
    expect_prints("usage: fdsl-bench advise ", "--help advise");
    expect_prints("usage: fdsl-bench compare ", "-h compare");
    expect_prints("usage: fdsl-bench verify-published ", "--help verify-published");
    expect_prints("options of train with 'LIMIT':\n", "--workload train --help LIMIT");
    expect_prints("  all workloads           --monitor --best-gpu --gpu-others", "--help gpu");
    expect_failure(2, "no topic or option is named ''", "--help ''");
    expect_failure(2, "no topic or option is named 'vertices'", "--help train/vertices");
    expect_failure(2, "unexpected argument 'loss'", "--variant naive loss");
}

/* Every option is in exactly one section, because the first section begins with the first option. */
Test(cli, the_help_of_a_workload_has_sections)
{
    static const char *const of_train[] = {
        "\ndata:\n  --data",          "\nnetwork:\n  --model",          "\ntraining:\n  --recipe",
        "\naugmentation:\n  --shift", "\nparallel training:\n  --sync", "\noutput:\n  --checkpoint"};
    for (size_t w = 0; workload_table[w]; w++) {
        const struct workload *workload = workload_table[w];
        const struct option_section *section = workload->option_sections;
        cr_assert(section && section->title, "%s", workload->name);
        cr_expect_str_eq(section->first, workload->options[0].name);
        for (; section->title; section++)
            cr_expect(option_in_table(workload->options, workload->option_count, section->first), "%s: %s",
                      workload->name, section->first);
        run("--workload %s --help -v", workload->name);
        for (size_t i = 0; i < workload->option_count; i++) {
            char option[80];
            snprintf(option, sizeof option, "\n  --%s", workload->options[i].name);
            size_t count = 0;
            for (const char *at = out; (at = strstr(at, option)); at++)
                count += strchr(" \n", at[strlen(option)]) != NULL;
            cr_expect_eq(count, 1, "%s --%s", workload->name, workload->options[i].name);
        }
    }
    run_well("--workload train --help --verbose");
    const char *at = out; /* the sections have this order */
    for (size_t i = 0; i < COUNT_OF(of_train); i++) {
        const char *found = strstr(at, of_train[i]);
        cr_assert(found, "'%s' is not in: %s", of_train[i], at);
        at = found;
    }
    /* Sections with the same title in both tables are one. */
    cr_expect_eq(count_of(out, "\noutput:\n"), 1);
    cr_expect(strstr(strstr(out, "\noutput:\n"), "\n  --out FILE"), "%s", out);
}

/* Scripts read this list to choose variants. */
Test(cli, the_list_of_variants_can_be_csv_or_json)
{
    run_well("--list --format csv");
    cr_expect(strncmp(out, "workload,variant,platform,available,reason,summary\n", 51) == 0, "%s", out);
    expect_cells(out, 1, "variant=naive;available=yes");
    run_well("--list --format csv --workload infer");
    cr_expect_str_eq(value(out, 1, "variant"), "infer-naive");
#ifdef HAVE_JANSSON
    run_well("--list --format json --workload load");
    cr_expect(*out == '[' && strstr(out, "\"variant\": \"files\"") && !strstr(out, "\"naive\""), "%s", out);
#endif
}

Test(cli, a_dry_run_checks_everything_and_writes_nothing)
{
    run_well(NAIVE " --verify --dry-run --out rows.csv --samples-out samples.csv --npy batch.npy");
    cr_expect(*out == '\0' && *err == '\0' && count_files() == 0, "%s%s", out, err);
    expect_failure(2, "nowhere", NAIVE " --dry-run --out nowhere/rows.csv");
    expect_failure(2, "did you mean 'naive'", "--variant nave --dry-run");
    expect_failure(2, "crop", NAIVE " --dry-run --fit crop --out-res 64");
#ifndef HAVE_CUDA
    expect_failure(4, "not built", "--variant bat --dry-run");
#endif
}

Test(cli, a_dry_run_checks_options_of_ranks)
{
    run_well(NAIVE " --dry-run --ranks 3 --batch 3 --scaling strong");
    cr_expect(*out == '\0' && *err == '\0', "%s%s", out, err);
    expect_failure(2, "more ranks (3) than images (--batch 2)",
                   NAIVE " --dry-run --ranks 3 --batch 2 --scaling strong");
    expect_failure(2, "--device and --best-gpu work only with one rank",
                   NAIVE " --dry-run --ranks 2 --device 1");
    expect_failure(2, "--npy", NAIVE " --dry-run --ranks 2 --npy out.npy");
    expect_failure(2, "--ranks", NAIVE " --dry-run --ranks 2000000");
    expect_failure(2, "--ranks is for --dry-run; to start 2 ranks: mpirun --bind-to none -n 2",
                   NAIVE " --ranks 2");
}

Test(cli, strong_scaling_with_one_rank_gives_a_warning)
{
    run_well(NAIVE " --scaling strong");
    cr_expect(strstr(err, "--scaling strong has no effect with one rank"), "%s", err);
    run_well(NAIVE " --scaling weak");
    cr_expect(!strstr(err, "--scaling"), "%s", err);
}

Test(cli, version_is_one_line)
{
    run_well("--version");
    cr_expect(strncmp(out, "fdsl-bench ", 11) == 0 && strlen(out) > 12 && count_of(out, "\n") == 1);
}

/* Returns the line of a variant in the output of --list. The next call overwrites it. */
static const char *list_line(const char *name)
{
    static char line[1024];
    char start_[64];
    snprintf(start_, sizeof start_, "\n  %s ", name);
    const char *at = strstr(out, start_);
    cr_assert(at, "--list does not name %s", name);
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
    return line;
}

Test(cli, list_names_every_variant_with_a_reason)
{
    run_well("--list");
    cr_expect(strstr(list_line("naive"), " available"));
    for (size_t i = 0; i < variant_count; i++) {
        const char *line = list_line(variant_table[i].name), *reason = strstr(line, "unavailable: ");
        cr_expect(reason ? strlen(reason) > 20 : strstr(line, " available") != NULL, "%s", line);
    }
    run_well("--list --workload train");
    cr_expect(strstr(list_line("train-omp"), "available"));
    cr_expect_not(strstr(out, "\n  naive ") || strstr(out, "synth: "), "%s", out);
    run_well("--list --variant omp,naive");
    cr_expect(strstr(out, "synth: ") == out && strstr(list_line("naive"), " available") &&
                  strstr(list_line("omp"), "available"),
              "%s", out);
    cr_expect_not(strstr(out, "\n  bat ") || strstr(out, "train: "), "%s", out);
    run_well("--list --variant all --workload infer --format csv");
    cr_expect(strstr(out, ",infer-naive,") && !strstr(out, ",naive,"), "%s", out);
    run_well("--list --variant all");
    cr_expect(strstr(list_line("naive"), " available") && !strstr(out, "train: "), "not only synth: %s", out);
    expect_failure(2, "did you mean 'naive'", "--list --variant nave");
    run_well("--list -v");
    for (size_t i = 0; i < variant_count; i++)
        cr_expect(strstr(out, variant_table[i].summary), "%s", variant_table[i].name);
}

Test(cli, the_environment_is_printed_in_every_format)
{
    static const char *const facts[] = {"time_utc", "host", "revision", "compiler", "kernel", "memory_bytes"};
    run_well("--env");
    for (size_t i = 0; i < COUNT_OF(facts); i++)
        cr_expect(strstr(out, facts[i]), "%s", facts[i]);
    run_well("--env --format csv");
    cr_expect(number(out, 1, "memory_bytes") > 0);
    cr_expect(number(out, 1, "allowed_threads") >= 1);
    cr_expect(*value(out, 1, "revision") && !strchr(value(out, 1, "revision"), ' '), "'%s'",
              value(out, 1, "revision"));
#ifdef HAVE_JANSSON
    run_well("--env --format json");
    put("env.json", out);
    check_with_python("import json, sys; assert json.load(open(sys.argv[1]))['memory_bytes'] > 0",
                      "env.json");
#endif
}

/* ---- Usage ---- */

Test(cli, without_a_command_says_what_to_run)
{
    static const struct refusal refusals[] = {
        {"", "--variant NAME"},
        {"", "--list shows the names"},
        {"--verify", "--variant NAME"},
        {"--batch 4 --out rows.csv", "--variant NAME"},
        {"naive", "unexpected argument 'naive'; options begin with --"},
        {"-- naive", "-- COMMAND needs --monitor FILE, for the samples of 'naive'"},
        {"-x", "unknown option '-x'"},
        {"--list extra", "unexpected argument 'extra'"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), "");
}

Test(cli, refuses_unknown_names_with_the_nearest_one)
{
    static const struct refusal refusals[] = {
        {"--variant nive", "unknown variant 'nive'; did you mean 'naive'?"},
        {"--variant naive,omq", "unknown variant 'omq'; did you mean 'omp'?"},
        {"--variant NAIVE", "did you mean 'naive'?"},
        {"--variant quantum", "unknown variant 'quantum'; --list shows them all"},
        {"--variant naive,naive", "variant 'naive' is named twice"},
        {"--variant naive,", "--variant: 'naive,': a name is missing after the last comma"},
        {"--variant naive, omp", "a name is missing after the last comma"},
        {"--variant all,naive", "--variant: 'all' cannot be combined with names"},
        {"--variant naive,all", "--variant: 'all' cannot be combined with names"},
        {"--variant=", "unknown variant ''"},
        {"--vari nive", "did you mean 'naive'?"},
        {"--variant", "--variant needs a value"},
        {"--variant --verify", "--variant needs a value"},
        {"--variant all --workload snth", "unknown workload 'snth'; did you mean 'synth'?"},
        {"--variant all --workload xyzzy",
         "unknown workload 'xyzzy'; the workloads are synth, load, ops, train, infer and exchange"},
        {"-help", "unknown option '-help'; did you mean '--help'?"},
        {"-variant fused", "unknown option '-variant'; did you mean '--variant'?"},
        {"-prepare x", "unknown option '-prepare'; did you mean '--prepare'?"},
        {"--variant naive -help", "unknown option '-help'; did you mean '--help'?"},
        {"--variant naive --HELP", "unknown option '--HELP'; did you mean '--help'?"},
        {"prepare data", "unexpected argument 'prepare'; did you mean '--prepare'?"},
        {"help", "unexpected argument 'help'; did you mean '--help'?"},
        {"variant naive", "unexpected argument 'variant'; did you mean '--variant'?"},
        {"--variant naive verify", "unexpected argument 'verify'; did you mean '--verify'?"},
        {"--variant naive --bach 4", "unknown option '--bach'; did you mean '--batch'?"},
        {"--variant naive --vertexes=4", "did you mean '--vertices'?"},
        {"--compare a.csv b.csv", "compare is a command without dashes: fdsl-bench compare A.csv B.csv"},
        {"--variant naive --frobnicate", "unknown option '--frobnicate'; see --help"},
        {"--variant naive --ver", "'--ver' is ambiguous"},
        {"--variant naive --verify=maybe", "--verify: 'maybe' is not one of true, yes"},
        {"--variant naive --format xml", "--format: 'xml' is not one of table, csv, json"},
        {"--variant naive --format jsn", "did you mean 'json'?"},
        {"--variant naive --formula uij", "did you mean 'uji'?"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), "--out rows.csv --samples-out samples.csv");
}

Test(cli, refuses_values_out_of_range)
{
    static const struct refusal refusals[] = {
        {"--batch 0", "--batch: '0' is out of range; it must be 1 to"},
        {"--batch -1", "--batch: '-1' is out of range"},
        {"--batch 16777217", "--batch: '16777217' is out of range"},
        {"--batch 99999999999999999999999999", "is out of range"},
        {"--batch many", "--batch: 'many' is not a whole number"},
        {"--batch 1.5", "--batch: '1.5' is not a whole number"},
        {"--batch 1e3", "is not a whole number"},
        {"--batch 0x10", "is not a whole number"},
        {"--batch +3", "is not a whole number"},
        {"--batch=", "--batch: '' is not a whole number"},
        {"--batch", "--batch needs a value"},
        {"--res 0", "--res: '0' is out of range; it must be 1 to 16384"},
        {"--res 16385", "--res: '16385' is out of range"},
        {"--res -512", "--res: '-512' is out of range"},
        {"--res big", "--res: 'big' is not a whole number"},
        {"--vertices 0", "--vertices: '0' is out of range"},
        {"--vertices 1048577", "--vertices: '1048577' is out of range"},
        {"--vertices x", "--vertices: 'x' is not a whole number"},
        {"--orbits 0", "--orbits: '0' is out of range"},
        {"--orbits -2", "--orbits: '-2' is out of range"},
        {"--orbits 18446744073709551616", "--orbits: '18446744073709551616' is out of range"},
        {"--orbits 1048576", "lower orbits, noise or line_width"},
        {"--radius 1000000 --oval-y 100", "lower radius, oval_x or oval_y"},
        {"--seed 18446744073709551616", "--seed: '18446744073709551616' is out of range"},
        {"--seed -1", "--seed: '-1' is out of range"},
        {"--instance 4611686018427387905", "--instance: '4611686018427387905' is out of range"},
        {"--classes 1048577", "--classes: '1048577' is out of range"},
        {"--noise nan", "--noise: 'nan' is not a number"},
        {"--noise inf", "--noise: 'inf' is not a number"},
        {"--noise -1", "--noise: '-1' is out of range"},
        {"--line-width 1e400", "--line-width: '1e400' is out of range"},
        {"--oval-x 1,two", "--oval-x: 'two' is not a number"},
        {"--freq1 -3", "--freq1: '-3' is out of range"},
        {"--threads -1", "--threads: '-1' is out of range"},
        {"--threads 1000000", "--threads: '1000000' is out of range"},
        {"--device gpu", "--device: 'gpu' is not a whole number"},
        {"--min-samples 0", "--min-samples: '0' is out of range; it must be 1 to"},
        {"--warmups -1", "--warmups: '-1' is out of range"},
        {"--warmup-time soon", "--warmup-time: 'soon' is not a number"},
        {"--min-time -1", "--min-time: '-1' is out of range"},
        {"--max-time forever", "--max-time: 'forever' is not a number"},
        {"--min-time 2 --max-time 1", "--max-time 1 is shorter than --min-time 2"},
        {"--max-error 0", "--max-error: '0' is out of range"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE " --out rows.csv --samples-out samples.csv");
}

Test(cli, refuses_options_that_contradict_each_other)
{
    static const struct refusal refusals[] = {
        {"--classes 4 --vertices 10", "--vertices describes the benchmark class, which --classes replaces"},
        {"--classes 4 --oval-y 1.5", "--oval-y describes the benchmark class, which --classes replaces"},
        {"--class some.csv --radius 3", "--radius describes the benchmark class, which --class replaces"},
        {"--classes 4 --class some.csv", "--classes and --class both choose the classes"},
        {"--preset uji", "--preset has an effect only with --classes; add --classes N"},
        {"--preset-file some.cfg", "--preset-file has an effect only with --classes"},
        {"--preset uji --class some.csv", "--preset and --class both choose the classes"},
        {"--out same.csv --samples-out ./same.csv", "--out and --samples-out name the same file"},
        {"--out same.csv --write-classes same.csv", "--out and --write-classes name the same file"},
        {"--out same.csv --samples-out same.csv", "--out and --samples-out name the same file"},
        {"--samples-out same.csv --monitor ./same.csv:50", "--samples-out and --monitor name the same file"},
        {"--best-gpu --device 0", "--best-gpu chooses a device and --device names one; leave one out"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED " --out rows.csv");
}

/* The images of TINY are 32 x 32. */
/* --columns describes rows, and refuses what it would ignore. */
Test(cli, columns_are_described_with_choices_units_and_without_other_options)
{
    static const struct refusal refusals[] = {
        {"--out x.csv", "--out does not apply to --columns"},
        {"--table x.csv", "--table does not apply to --columns"},
        {"--list", "--list does not apply to --columns"},
        {"--env", "--env does not apply to --columns"},
        {"--verify", "--verify does not apply to --columns"},
        {"--batch 3", "--batch does not apply to --columns"},
        {"-- true", "does not apply to -- COMMAND"},
        {"31 --workload ops --variant ops-omp", "the number of values per row is --dim"},
        {"--columns=31 --variant ops-omp", "the number of values per row is --dim"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), "--columns ");
    expect_prints("- `dtype` (word): `--dtype` (f32)\n", "--columns --workload ops");
    expect_prints("- `chunk` (integer, KiB): `--chunk` (16384)\n", "--columns --variant ops-omp");
    expect_prints("- `dedup` (flag): `--dedup`\n", "--columns --workload ops");
    cr_expect(!strstr(out, "TYPE is one of") && !strstr(out, "this page") && !strstr(out, "default 0: drop"));
    expect_prints("- `copy_share` (real, none): ", "--columns --workload load");
    cr_expect(strstr(out, "- `flops` (real, FLOP, computed): "), "%s", out);
    /* Columns of train with another default, or another row of all ranks, are not "as in `train`". */
    run_well("--columns");
    const char *infer = strstr(out, "\n## infer\n");
    cr_assert_not_null(infer);
    cr_expect(strstr(infer, "\n- `on_error` (word): `--on-error`\n"), "%s", infer);
    cr_expect(strstr(infer, "\n- `memory_bytes` (integer, bytes): "), "%s", infer);
    run_well("--columns --format csv");
    cr_expect(strstr(out, "TYPE is one of: f32, f16, bf16, fp8, nvfp4, mxfp4"), "%s", out);
    cr_expect(strstr(out, ",f32 f16 bf16 fp8 nvfp4 mxfp4,"), "%s", out);
}

/* Readers of CSV lose one of two columns of the same name. */
Test(cli, columns_of_a_schema_have_different_names)
{
    size_t count = 0;
    run_well("--columns --format csv");
    for (const char *line = strchr(out, '\n'); line && line[1]; line = strchr(line + 1, '\n')) {
        const char *schema = strchr(line, ',') + 1, *name = strchr(schema, ',') + 1;
        const int length = (int)(strchr(name, ',') + 1 - schema);
        char wanted[128];
        snprintf(wanted, sizeof wanted, ",%.*s", length, schema);
        cr_expect(!strstr(line + 1 + (schema - line), wanted), "twice: %s", wanted);
        count++;
    }
    cr_expect(count > 500);
}

Test(cli, refuses_impossible_outputs)
{
    static const struct refusal refusals[] = {
        {"--dtype f64", "--dtype: 'f64' is not one of u8, f16, f32, bf16"},
        {"--channels 2", "--channels: '2' is neither 1 nor 3"},
        {"--channels 0", "--channels: '0' is neither 1 nor 3"},
        {"--channels 4", "--channels: '4' is neither 1 nor 3"},
        {"--layout hwc", "--layout: 'hwc' is not one of nchw, nhwc"},
        {"--out-res 0", "--out-res: '0' is out of range; it must be 1 to 16384"},
        {"--out-res 16385", "--out-res: '16385' is out of range"},
        {"--fit pad", "--fit: 'pad' is not one of resize, crop"},
        {"--fit crop --out-res 33", "--fit crop: --out-res 33 is larger than --res 32"},
        {"--mean 0.5", "--mean scales floats, but u8 stores grays unscaled"},
        {"--dtype u8 --std 0.5", "--std scales floats, but u8 stores grays unscaled"},
        {"--dtype f32 --mean x", "--mean: 'x' is not a number"},
        {"--dtype f32 --mean nan", "--mean: 'nan' is not a number"},
        {"--dtype f32 --mean=", "--mean: the value is empty"},
        {"--dtype f32 --mean 0,0,0", "--mean: '0,0,0' has 3 values for 1 channel"},
        {"--dtype f32 --channels 3 --mean 0,0", "--mean: '0,0' has 2 values for 3 channels"},
        {"--dtype f32 --channels 3 --std 1,,1", "--std: '' is not a number"},
        {"--dtype f32 --channels 3 --std 1,1,1,", "--std: '1,1,1,': a value is missing after the last comma"},
        {"--out f16", "--out f16: did you mean --dtype f16? If not, name the file ./f16"},
        {"--out u8", "did you mean --dtype u8?"},
        {"--dtype f32 --std 0", "--std: '0' is out of range"},
        {"--dtype f32 --std -1", "--std: '-1' is out of range"},
        {"--npy nowhere/a.npy", "its folder does not exist"},
        {"--npy /dev/full", "/dev/full is not a regular file"},
        {"--npy rows.csv", "--out and --npy name the same file"},
        {"--npy a.npy --samples-out a.labels.npy", "--npy and --samples-out would both write a.labels.npy"},
        {"--npy a.npy --write-classes ./a.labels.npy", "--npy and --write-classes would both write"},
#ifdef HAVE_PNG
        {"--dtype f16 --png folder",
         "--png writes u8 images of one channel only; use --npy FILE for other images"},
        {"--channels 3 --sheet a.png", "--sheet writes u8 images of one channel only"},
        {"--sheet a.jpg", "--sheet a.jpg would be a file of the format png; choose a name that ends in .png"},
        {"--npy a.PNG", "--npy a.PNG would be a file of the format npy; choose a name that ends in .npy"},
#endif
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE " --out rows.csv");
}

Test(cli, outputs_fill_their_columns)
{
    static const struct {
        const char *arguments, *cells;
    } rows[] = {
        {"", "dtype=u8;channels=1;layout=nchw;out_res=32;fit=;mean=;std="},
        {"--fit crop --layout nhwc", "dtype=u8;channels=1;layout=nhwc;out_res=32;fit=;mean=;std="},
        {"--out-res 32 --channels 3", "dtype=u8;channels=3;layout=nchw;out_res=32;fit=;mean=;std="},
        {"--out-res 48", "dtype=u8;channels=1;layout=nchw;out_res=48;fit=resize;mean=;std="},
        {"--dtype f16 --out-res 7 --fit crop",
         "dtype=f16;channels=1;layout=nchw;out_res=7;fit=crop;mean=0;std=1"},
        {"--dtype bf16 --mean 0.5", "dtype=bf16;channels=1;layout=nchw;out_res=32;fit=;mean=0.5;std=1"},
        {"--dtype f32 --channels 3 --std 1,2,3",
         "dtype=f32;channels=3;layout=nchw;out_res=32;fit=;mean=0;std=1,2,3"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        run("--variant " VARIANTS " " TINY " --verify --format csv %s", rows[i].arguments);
        cr_assert(status == 0, "%s: %s", rows[i].arguments, err);
        for (size_t v = 1; v <= VARIANT_COUNT; v++) {
            expect_cells(out, v, rows[i].cells);
            expect_cells(
                out, v, i < 2 ? "wrong=0;timed_stages=clear+draw" : "wrong=0;timed_stages=clear+draw+output");
        }
    }
}

Test(cli, unlikely_scales_give_a_warning)
{
    static const struct {
        const char *arguments, *words; /* NULL: no warning */
    } scales[] = {
        {"--dtype f16 --mean 0.485 --std 0.229", NULL},
        {"--dtype f32 --mean -1 --std 1", NULL},
        {"--dtype f32 --mean 123.675 --std 0.5", "warning: --mean 123.675: grays are 0 to 1; divide"},
        {"--dtype f16 --std 58.4", "warning: --std 58.4: grays are 0 to 1; divide"},
        {"--dtype f16 --mean 0.25 --std 0.00001", "warning: --dtype f16 is limited to 65504"},
        {"--dtype f16 --std 0.000016", NULL}, /* the largest value is 62500 */
        {"--dtype bf16 --mean 0.25 --std 0.00001", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(scales); i++) {
        run(NAIVE " --min-samples 6 --max-error 100 %s", scales[i].arguments);
        cr_expect(status == 0, "%s: %s", scales[i].arguments, err);
        if (scales[i].words)
            cr_expect(strstr(err, scales[i].words), "%s: %s", scales[i].arguments, err);
        else
            cr_expect(!strstr(err, "warning: --"), "%s: %s", scales[i].arguments, err);
    }
}

Test(cli, unsupported_outputs_are_reported_before_missing_hardware)
{
    if (!variant_find("bat")->variant)
        SKIP("no variant of this build is limited to u8 images of one channel: no CUDA");
    expect_failure(2, "variant 'bat' cannot run with these options: supports only u8 images of one channel",
                   "--variant bat --dtype f16 " TINY);
}

Test(cli, files_may_have_names_of_element_types)
{
    run_well(NAIVE " --out ./f16");
    run_well(NAIVE " --dtype f32 --out f32");
    free(get("f16", NULL));
    free(get("f32", NULL));
}

Test(cli, bytes_per_s_counts_the_converted_output)
{
    run_well(NAIVE " --dtype f16 --channels 3 --out-res 10 --format csv");
    double bytes = number(out, 1, "bytes_per_s") * number(out, 1, "time_median_s");
    cr_expect(fabs(bytes / (2 * (10 * 10 * 3 * 2 + 8)) - 1) < 1e-6, "%g", bytes);
}

Test(cli, options_can_be_abbreviated)
{
    run_well("--vari naive --work synth --forma csv " TINY);
    cr_expect_str_eq(value(out, 1, "variant"), "naive");
    run_well("--vari=naive --forma=csv --res 32 --vertices 20 --orbits 4 --radius 3 --min-samples 3 "
             "--min-time 0 --max-time 0 --bat 3");
    cr_expect(number(out, 1, "batch") == 3);
}

Test(cli, a_batch_that_exceeds_memory_is_refused_with_the_needed_size)
{
    double needed = 0, available = 0;
    expect_failure(2, "GB of memory needed", NAIVE " --batch 16777216 --res 16384 --out rows.csv");
    const char *numbers = strstr(err, "the batch: ");
    cr_assert(numbers);
    cr_expect(sscanf(numbers, "the batch: %lf GB of memory needed, %lf GB available", &needed, &available) ==
              2);
    cr_expect(needed > 4e6 && available > 0 && available < needed, "%s", err);
    cr_expect(strstr(err, "lower --batch or --res"));
    cr_expect(count_files() == 0);
}

/* ---- Classes ---- */

Test(cli, a_list_of_classes_must_have_the_right_columns)
{
    static const char right[] = "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n";
    static const struct refusal refusals[] = {
        {"--class missing.csv", "cannot open 'missing.csv': No such file or directory"},
        {"--class wrong.csv", "wrong.csv:1: column 2 of the header is 'edges': it must be 'vertices'"},
        {"--class short.csv", "short.csv:2: 3 values, not 10: oval_x is missing"},
        {"--class zero.csv", "zero.csv:3: vertices: '0' is out of range"},
        {"--class none.csv", "none.csv:2: the file has no classes"},
        {"--class empty.csv", "empty.csv:1: the file is empty"},
    };
    char text[512];
    put("wrong.csv", "class,edges,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n");
    snprintf(text, sizeof text, "%s0,20,4\n", right);
    put("short.csv", text);
    snprintf(text, sizeof text, "%s0,20,4,1,1,0,1,2,5,0\n1,0,4,1,1,0,1,2,5,0\n", right);
    put("zero.csv", text);
    put("none.csv", right);
    put("empty.csv", "");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED);
}

#ifdef HAVE_INIH

Test(cli, a_file_of_presets_must_be_complete)
{
    static const char ranges[] = "[mine]\nnvertex_min = %d\nnvertex_max = 40\nnorbits_min = 1\n"
                                 "norbits_max = 5\noval_max = 2\nfreq_min = 0\nfreq_max = 20\n"
                                 "noisecoef_min = 0\nstartrad_min = 0\nlinewidth_max = 0.1\n%s";
    static const struct refusal refusals[] = {
        {"--preset-file good.cfg --preset mien", "good.cfg: no section [mien]: did you mean [mine]?"},
        {"--preset-file good.cfg --preset xyzzy", "good.cfg: no section [xyzzy]; there are: [mine]"},
        {"--preset-file good.cfg", "no section [uji]"},
        {"--preset-file keyless.cfg --preset mine", "section [mine]: key 'seed' is missing"},
        {"--preset-file inverted.cfg --preset mine", "nvertex_min 50 exceeds nvertex_max 40"},
        {"--preset-file unknown.cfg --preset mine", "unknown key 'sed': did you mean 'seed'?"},
        {"--preset-file torn.cfg --preset mine", "torn.cfg:2: neither a [section] nor key = value"},
        {"--preset-file missing.cfg --preset mine", "cannot open 'missing.cfg'"},
        {"--preset ujo", "no section [ujo]: did you mean [uji]?"},
    };
    char text[512];
    snprintf(text, sizeof text, ranges, 20, "seed = 1\n");
    put("good.cfg", text);
    snprintf(text, sizeof text, ranges, 20, "");
    put("keyless.cfg", text);
    snprintf(text, sizeof text, ranges, 50, "seed = 1\n");
    put("inverted.cfg", text);
    snprintf(text, sizeof text, ranges, 20, "sed = 1\n");
    put("unknown.cfg", text);
    put("torn.cfg", "[mine]\nnvertex_min\n");
    run_well(NAIVE_MIXED " --classes 3 --preset-file good.cfg --preset mine");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED " --classes 3");
}

Test(cli, a_mixed_batch_leaves_the_columns_of_the_benchmark_class_empty)
{
    run_well(NAIVE_MIXED " --classes 3 --preset lowercompute --format csv");
    expect_cells(out, 1, "vertices=;orbits=;noise=;line_width=;radius=;oval_x=;oval_y=;freq1=;freq2=");
    expect_cells(out, 1, "classes=3;preset=lowercompute");
    run_well(NAIVE_MIXED " --classes 3 --formula visualatom --format csv");
    cr_expect_str_eq(value(out, 1, "preset"), "visualatom", "the row does not have the default preset");
}

Test(cli, written_classes_can_be_read)
{
    run_well(NAIVE_MIXED " --batch 5 --classes 5 --write-classes classes.csv --format csv");
    char drawn[64];
    snprintf(drawn, sizeof drawn, "%.63s", value(out, 1, "digest"));
    cr_expect_eq(lines_of_file("classes.csv"), 6, "not a header and five classes");
    run_well(NAIVE_MIXED " --batch 5 --class classes.csv --format csv");
    cr_expect_str_eq(value(out, 1, "digest"), drawn, "the same classes give other images");
}

#endif

/* ---- Unavailable features ---- */

Test(cli, all_runs_available_variants_and_reports_the_others)
{
    size_t available = 0, count = 0;
    run_well("--list");
    for (size_t i = 0; i < variant_count; i++) {
        bool synth = strcmp(variant_table[i].workload, "synth") == 0;
        count += synth;
        available += synth && !strstr(list_line(variant_table[i].name), "unavailable: ");
    }
    run_well("--variant all " TINY " --format csv");
    cr_expect(count_of(out, "\n") == 1 + available);
    cr_expect(count_of(err, "skipping ") == (count > available), "%s", err);
    size_t named = 0;
    for (size_t i = 0; i < variant_count; i++) {
        char name[80], *line = strstr(err, "skipping ");
        snprintf(name, sizeof name, " %s", variant_table[i].name);
        for (char *at = line; at && (at = strstr(at, name)); at++)
            named +=
                strchr(", ", at[strlen(name)]) != NULL && strcmp(variant_table[i].workload, "synth") == 0;
    }
    cr_expect_eq(named, count - available, "%s", err);
    if (available < count) {
        run_well("--variant all " TINY " --batch 1,2 --format csv");
        cr_expect_eq(count_of(err, "skipping "), 1, "the line is repeated: %s", err);
    }
}

/* One configuration file for machines with and without a GPU. The row names the variant that ran. */
Test(cli, auto_runs_the_first_candidate_that_can_run)
{
    const struct variant_entry **chosen;
    const struct resources resources = {.threads = 1};
    size_t count, best = 0;
    cr_assert(variant_select("auto", "synth", &chosen, &count) == STATUS_OK);
    while (variant_available(chosen[best], &resources) != STATUS_OK)
        best++;
    put("auto.ini", "variant = auto\nworkload = synth\n");
    run_well("--config auto.ini " TINY " --batch 1,2 --format csv");
    cr_expect_eq(count_of(out, "\n"), 3, "%s", out);
    cr_expect_str_eq(value(out, 1, "variant"), chosen[best]->name);
    cr_expect_str_eq(value(out, 2, "variant"), chosen[best]->name);
    cr_expect_eq(count_of(err, "--variant auto chose "), 1, "%s", err);
    cr_expect(best == 0 || strstr(err, chosen[0]->name), "%s", err);
    free(chosen);
    run_well("--variant auto " TINY " --batch 2 --dry-run");
    run_well(
        "--variant auto --workload train --checkpoint c --epochs 1 --train-size 20 --test-size 5 --model "
        "logreg --dry-run"); /* --checkpoint needs a single variant */
    run_well("--variant auto --workload ops --list");
    cr_expect(strstr(out, "ops-naive") && !strstr(out, "files"), "%s", out);
}

Test(cli, an_unavailable_variant_is_refused_with_reason_and_alternative)
{
    char name[64] = "", reason[512] = "", offer[64];
    run_well("--list");
    for (size_t i = 0; i < variant_count && !*name; i++) {
        const char *found = strstr(list_line(variant_table[i].name), "unavailable: ");
        if (!found)
            continue;
        snprintf(name, sizeof name, "%s", variant_table[i].name);
        snprintf(reason, sizeof reason, "%s", found + strlen("unavailable: "));
    }
    if (!*name)
        SKIP("every variant can run here: the machine has a GPU, and everything is built");
    snprintf(offer, sizeof offer, "'%s' can", strrchr("," VARIANTS, ',') + 1);
    run("--variant %s " TINY " --out rows.csv", name);
    expect_error(4, reason, name);
    expect_error(4, offer, name);
    run("--variant naive,%s " TINY " --out rows.csv", name);
    expect_error(4, reason, "one of several variants is unavailable, so none runs");
    cr_expect(count_files() == 0);
}

Test(cli, a_build_without_mpi_refuses_to_run_as_one_of_several_ranks)
{
#ifdef HAVE_MPI
    SKIP("this build has MPI");
#endif
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    expect_failure(4, "started as one of 4 ranks (OMPI_COMM_WORLD_SIZE), but this build has no MPI",
                   NAIVE " --out rows.csv");
    cr_expect(count_files() == 0);
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    run_well(NAIVE);
}
