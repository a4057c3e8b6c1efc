/* Tests runs of the program: sampling, monitor, consumed batches, terminal output and formats. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "program.h"

#include <sched.h>
#include <sys/file.h>

TestSuite(cli, .init = start, .fini = stop, .timeout = 60);

/* ---- Consumed batches ---- */

Test(cli, compute_needs_a_valid_step_and_a_gpu)
{
    static const struct refusal refusals[] = {
        {"--compute 0", "--compute: '0' is out of range; it must be 0.1 to 1000"},
        {"--compute 1001", "out of range"},
        {"--compute fast", "--compute: 'fast' is not a number"},
        {"--compute train:cnn",
         "--compute train:cnn: give the time of a step in milliseconds. To train on batches while they are "
         "read or generated, run --workload train --variant train-cuda --model cnn with --data DIR --feed "
         "load or --data synth --feed live"},
        {"--compute", "--compute needs a value"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    static const struct refusal of_training[] = {
        {"--compute train",
         "--compute is an option of the workloads synth and load; --list shows their variants"},
        {"--vertices=7", "--vertices is an option of the workload synth; --list"},
        {"--random published", "; --prepare DIR --from synth --random writes such images, which train reads"},
        {"--vertice 7", "unknown option '--vertice'; did you mean '--verify'?"},
    };
    expect_refusals(of_training, COUNT_OF(of_training), "--variant train-naive");
    expect_failure(
        2, "--data is an option of the workloads load, ops, train and infer; --list shows their variants",
        "--data x");
    /* Errors that do not depend on the machine are reported first. */
    expect_failure(2, "its folder does not exist", "--variant fused --device 1023 --out nowhere/rows.csv");
    run("--variant fused --best-gpu");
    cr_expect(status == 0 || strstr(err, "--best-gpu: "), "%s", err);
    run(NAIVE " --compute 5 --device 1023"); /* no machine has a GPU with this number */
    expect_error(4, "--compute: no", "--compute 5");
    expect_failure(4, "--compute: no", NAIVE " --compute 5 --device 1023 --dry-run");
    run_well(NAIVE " --format csv");
    expect_cells(out, 1,
                 "compute=;compute_ms=;steps=;stall_share=;first_batch_s=;step_s=;busy_share=;slowdown=");
    expect_cells(out, 1, "bus_share=;bus_slowdown=");
}

/* ---- Threads ---- */

#ifdef _OPENMP
Test(cli, omp_num_threads_is_the_default_of_threads)
{
    cpu_set_t mask;
    cr_assert(sched_getaffinity(0, sizeof mask, &mask) == 0);
    int all = CPU_COUNT(&mask);
    const struct {
        const char *variable, *arguments;
        int threads;
        bool ignored;
    } cases[] = {
        {"1", "", 1, false},
        {"4,2", "", 4, false},
        {" 3 , 2 ", "", 3, false},
        {"", "", all, false},
        {"1", "--threads 2", 2, false},
        {"1", "--threads 0", all, false},
        {"0", "", all, true},
        {"two", "", all, true},
        {"2x", "", all, true},
        {"-1", "", all, true},
        {"2,", "", all, true},
        {"8193", "", all, true},
        {"two", "--threads 1", 1, false},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        setenv("OMP_NUM_THREADS", cases[i].variable, 1);
        run("--variant omp " TINY " --format csv %s", cases[i].arguments);
        cr_assert_eq(status, 0, "%s", err);
        cr_expect_eq(number(out, 1, "threads"), cases[i].threads, "'%s' %s: %g threads, not %d",
                     cases[i].variable, cases[i].arguments, number(out, 1, "threads"), cases[i].threads);
        cr_expect_eq(strstr(err, "is ignored: it is not a number from 1 to") != NULL, cases[i].ignored,
                     "'%s': %s", cases[i].variable, err);
    }
    unsetenv("OMP_NUM_THREADS");
    run("--variant omp " TINY " --format csv");
    cr_expect_eq(number(out, 1, "threads"), all);
    run("--variant ops-omp --rows 9 --loops 1 --threads 2 --format csv");
    cr_expect(status == 4 || number(out, 1, "threads") == 2, "%s", err); /* 4: a build without xxHash */
}

Test(cli, omp_num_threads_may_exceed_the_cores)
{
    cpu_set_t mask, one;
    cr_assert(sched_getaffinity(0, sizeof mask, &mask) == 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &mask))
            CPU_SET(cpu, &one);
    cr_assert(sched_setaffinity(0, sizeof one, &one) == 0);
    run("--variant omp " TINY " --format csv");
    cr_expect_eq(number(out, 1, "threads"), 1, "%s", err);
    setenv("OMP_NUM_THREADS", "3", 1);
    run("--variant omp " TINY " --format csv");
    cr_expect_eq(number(out, 1, "threads"), 3, "%s", err);
}
#endif

Test(cli, prepare_takes_omp_num_threads)
{
    setenv("OMP_NUM_THREADS", "two", 1);
    run("--prepare %s/set --samples 2 --sample-shape 1,2,2 --dtype u8", folder);
    cr_expect_eq(status, 0, "%s", err);
    cr_expect(strstr(err, "OMP_NUM_THREADS='two' is ignored"), "%s", err);
}

/* ---- Terminals ---- */

Test(cli, pipes_see_no_escape_sequences)
{
    static const char *const commands[] = {"--variant " VARIANTS " " TINY " --verify", NAIVE " --format csv",
                                           "--variant nive", "--list", "--variant all " TINY};
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        run("%s", commands[i]);
        cr_expect(!strchr(out, '\033') && !strchr(err, '\033'), "%s", commands[i]);
        cr_expect(!strchr(out, '\r') && !strchr(err, '\r'), "%s", commands[i]);
    }
}

Test(cli, progress_is_shown_only_on_a_terminal)
{
    run_well(NAIVE " --verify --format csv");
    cr_expect(!strstr(err, "sample 1") && !strstr(err, "setting up"), "%s", err);
    how.terminal_err = true;
    run_well(NAIVE " --verify --format csv");
    static const char *const phases[] = {"naive: setting up", "naive: verifying", "naive: sample 1, "};
    for (size_t i = 0; i < COUNT_OF(phases); i++)
        cr_expect(strstr(err, phases[i]), "'%s' is not in: %s", phases[i], err);
    cr_expect(count_of(out, "\n") == 2 && !strchr(out, '\033') && !strchr(out, '\r'),
              "progress on stdout, which is a pipe");
}

Test(cli, a_numpy_file_is_reported_on_a_terminal)
{
    static const char note[] = "fdsl-bench: wrote out.npy (2, 3, 9, 9) float16 and out.labels.npy (2)";
    run_well(NAIVE " --dtype f16 --channels 3 --out-res 9 --npy out.npy");
    cr_expect(!strstr(err, "wrote"), "%s", err);
    how.terminal_err = true;
    run_well(NAIVE " --dtype f16 --channels 3 --out-res 9 --npy out.npy");
    cr_expect(strstr(err, note), "%s", err);
}

/* Returns whether the text sets a colour. An escape sequence that sets a colour ends in m. The sequence that
 * clears a line ends in K. */
static bool coloured(const char *text)
{
    for (const char *at = text; (at = strchr(at, '\033')); at++)
        if (at[1] == '[' && at[2 + strspn(at + 2, "0123456789;")] == 'm')
            return true;
    return false;
}

Test(cli, no_color_disables_colours)
{
    how.terminal_out = how.terminal_err = true;
    for (int plain = 0; plain < 2; plain++) {
        if (plain)
            setenv("NO_COLOR", "1", 1);
        run_well(NAIVE " --verify");
        cr_expect(coloured(out) == !plain, "%s", out);
        run("--variant nive");
        cr_expect(status == 2 && coloured(err) == !plain, "%s", err);
    }
    setenv("NO_COLOR", "", 1); /* an empty variable counts as unset */
    run_well(NAIVE " --verify");
    cr_expect(coloured(out));
    setenv("TERM", "dumb", 1);
    run_well(NAIVE " --verify");
    cr_expect(!coloured(out));
    run("--variant nive");
    cr_expect(status == 2 && !coloured(err), "%s", err);
}

Test(cli, a_message_on_a_terminal_clears_the_progress_line)
{
    how.terminal_err = true;
    setenv("NO_COLOR", "1", 1);
    run("--variant nive");
    cr_expect(strstr(err, "\r\033[Kfdsl-bench: unknown variant"), "%s", err);
}

/* ---- Sampling ---- */

Test(cli, min_samples_is_honoured)
{
    run_well(NAIVE " --min-samples 37 --format csv");
    cr_expect(number(out, 1, "samples") == 37);
    run_well(NAIVE " --min-samples 1 --format csv");
    cr_expect(number(out, 1, "samples") == 1);
}

#define LOOPED "--variant naive --res 32 --batch 2 --vertices 20 --orbits 4 --radius 3 --format csv "

Test(cli, loops_sets_the_exact_number_of_samples)
{
    run_well(LOOPED "--loops 1 --warmups 0 --warmup-time 0");
    cr_expect(number(out, 1, "samples") == 1);
    run_well(LOOPED "--loops 4321 --samples-out samples.csv");
    cr_expect(number(out, 1, "samples") == 4321);
    cr_expect_eq(lines_of_file("samples.csv"), 4322);
}

Test(cli, loops_refuses_other_limits)
{
    static const struct refusal refusals[] = {
        {"--loops 5 --min-samples 5", "--loops sets the exact number of samples and ignores --min-samples"},
        {"--loops 5 --min-time 1", "ignores --min-time; leave one out"},
        {"--loops 5 --max-time 1", "ignores --max-time; leave one out"},
        {"--loops 5 --max-error 5", "ignores --max-error; leave one out"},
        {"--loops 0", "--loops: '0' is out of range"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), LOOPED);
}

Test(cli, loops_are_counted_on_a_terminal)
{
    how.terminal_err = true;
    run_well(LOOPED "--loops 12");
    cr_expect(strstr(err, "naive: sample 1 of 12, 0.0 s"), "%s", err);
}

/* ---- The monitor ---- */

static const char monitor_header[] =
    "schema,time_utc,host,job_id,revision,rank,gpu,device,variant,phase,time_s,gpu_utilisation_percent,"
    "gpu_memory_bytes,temperature_c,power_w,sm_clock_mhz,memory_clock_mhz,pcie_rx_bytes_per_s,"
    "pcie_tx_bytes_per_s,throttled,cpu_cores,rss_bytes,read_bytes_per_s,write_bytes_per_s\n";

/* Options of a run that is long enough for many monitor samples at a period of 10 ms. On a busy machine, the
 * run has fewer samples, but not none. */
#define WATCHED                                                                                           \
    "--variant naive --res 32 --batch 2 --vertices 20 --orbits 4 --radius 3 --warmups 0 --warmup-time 0 " \
    "--min-time 0.6 --max-error 100 "

Test(cli, the_monitor_writes_its_samples)
{
    run_well(WATCHED "--monitor watched.csv:10 --out rows.csv");
    char *csv = get("watched.csv", NULL), *row = get("rows.csv", NULL);
    size_t samples = count_of(csv, "\n") - 1, timed = 0;
    cr_expect(strncmp(csv, monitor_header, sizeof monitor_header - 1) == 0, "%s", csv);
    cr_assert(samples >= 2);
    char time_utc[4096];
    snprintf(time_utc, sizeof time_utc, "%s", value(row, 1, "time_utc"));
    for (size_t i = 1; i <= samples; i++) {
        timed += strcmp(value(csv, i, "phase"), "timed") == 0;
        cr_expect_str_eq(value(csv, i, "time_utc"), time_utc,
                         "rows and samples of a run have different times");
        cr_expect_str_empty(value(csv, i, "power_w"));
        cr_expect(i == 1 || number(csv, i, "cpu_cores") >= 0);
        cr_expect(number(csv, i, "rss_bytes") > 0);
        cr_expect(i == 1 || number(csv, i, "time_s") > number(csv, i - 1, "time_s"));
    }
    cr_expect(timed >= 1, "%zu", timed);
    cr_expect(strstr(out, "\nwhile timed ") && strstr(out, "CPU cores") && strstr(out, "RSS GB"), "%s", out);
    cr_expect(!strstr(out, "GPU %"), "a column without values is printed: %s", out);
    free(csv);
    free(row);
}

Test(cli, the_monitor_does_not_change_csv_and_json)
{
    run_well(NAIVE " --monitor watched.csv --format csv");
    cr_expect(count_of(out, "\n") == 2 && !strstr(out, "while timed"), "%s", out);
#ifdef HAVE_JANSSON
    run_well(NAIVE " --monitor watched.csv --format json");
    put("out.json", out);
    check_with_python("import json, sys; json.load(open(sys.argv[1]))", "out.json");
#endif
    char *csv = get("watched.csv", NULL);
    cr_expect(count_of(csv, "schema") == 1, "more than one header: %s", csv);
    free(csv);
}

Test(cli, too_few_monitor_samples_give_a_warning)
{
    run_well(NAIVE " --monitor watched.csv --verbose");
    cr_expect(strstr(err, " during the timed runs, but meaningful statistics need 20; sample longer with "
                          "--min-time 10.5, or use a shorter period\n"),
              "%s", err);
    /* Adds runs until the timed phase has a monitor sample. The phase then has one sample in most cases,
     * because a run takes less than the period of 10 ms. */
    int looks = 0;
    for (int loops = 1; looks == 0 && loops < 100; loops++) {
        run("--variant naive --res 512 --batch 1 --warmups 0 --warmup-time 0 --loops %d --monitor few.csv:10 "
            "--verbose",
            loops);
        const char *took = strstr(err, "took only ");
        cr_assert(took && sscanf(took, "took only %d ", &looks) == 1, "%s", err);
        cr_expect(strstr(took, looks == 1 ? "1 sample during" : " samples during"), "%s", err);
    }
    run_well(LOOPED "--loops 1 --monitor watched.csv:10 --verbose");
    const char *remedy = strstr(err, "sample longer with --loops ");
    cr_assert(remedy, "%s", err);
    cr_expect(strtod(remedy + 27, NULL) > 1 && !strstr(remedy, "shorter"), "%s", err);
}

Test(cli, the_monitors_file_name_may_contain_colons)
{
    run_well(NAIVE " --monitor a:b.csv");
    run_well(NAIVE " --monitor c:12:50");
    run_well(NAIVE " --monitor d:");
    cr_expect(access("a:b.csv", F_OK) == 0 && access("c:12", F_OK) == 0 && access("d:", F_OK) == 0);
}

Test(cli, refuses_invalid_monitor_options)
{
    static const struct refusal refusals[] = {
        {"--monitor x:9", "--monitor FILE:MS: '9' is out of range; it must be 10 to 60000"},
        {"--monitor x:60001", "'60001' is out of range"},
        {"--monitor :50", "--monitor: name a file before the colon"},
        {"--monitor gone/x", "gone/x: its folder does not exist"},
        {"--monitor .", ". is a folder"},
        {"--monitor foreign.csv", "foreign.csv has other columns (column 2 is 'b', not 'time_utc')"},
    };
    put("foreign.csv", "schema,b\n");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    expect_file("foreign.csv", "schema,b\n");
}

/* The program is killed as soon as the first variant's samples are written, while the second variant runs. */
Test(cli, a_killed_run_keeps_the_samples_of_completed_variants)
{
    struct stat info = {0};
    pid_t pid = start_run("--variant " VARIANTS " --res 32 --batch 2 --orbits 4 --vertices 20 --min-time 0.6 "
                          "--max-error 100 --monitor watched.csv:10",
                          "/dev/null");
    while (stat("watched.csv", &info) != 0 || info.st_size == 0)
        usleep(1000);
    int fd = open("watched.csv", O_RDONLY);
    cr_assert(fd >= 0 && flock(fd, LOCK_SH) == 0); /* the program holds no lock, so the file is complete */
    close(fd);
    expect_ended_by(pid, SIGKILL);
    char *csv = get("watched.csv", NULL);
    size_t lines = count_of(csv, "\n");
    cr_expect(lines > 2 && csv[strlen(csv) - 1] == '\n', "%s", csv);
    cr_expect(count_of(csv, ",") == lines * count_of(monitor_header, ","), "a row is incomplete: %s", csv);
    cr_expect(strstr(csv, ",naive,timed,") != NULL, "%s", csv);
    free(csv);
}

/* ---- The best GPU ---- */

Test(cli, best_gpu_needs_a_gpu)
{
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    expect_failure(4, "CUDA", "--variant naive --best-gpu");
    expect_failure(4, "CUDA", "--env --best-gpu");
    run_well("--version --best-gpu");
}

Test(cli, warmups_are_honoured)
{
    run_well(NAIVE " --warmups 6 --format csv");
    cr_expect(number(out, 1, "warmups") == 7);
    run_well(NAIVE " --warmups 0 --format csv");
    cr_expect(number(out, 1, "warmups") == 1);
}

/* Sampling stops when the latest sample ends after the time limit. So all samples except the last fit into
 * the limit, even on a slow machine. */
Test(cli, max_time_is_honoured)
{
    run_well("--variant naive --res 64 --batch 8 --vertices 200 --orbits 20 --warmups 1 --warmup-time 0 "
             "--min-samples 1 --min-time 0 --max-time 0.2 --max-error 0.000001 --format csv "
             "--samples-out samples.csv");
    char *samples = get("samples.csv", NULL);
    size_t count = (size_t)number(out, 1, "samples");
    double sum_s = 0;
    for (size_t i = 1; i < count; i++)
        sum_s += number(samples, i, "wall_s");
    cr_expect(sum_s < 0.2, "%g s", sum_s);
    free(samples);
}

Test(cli, an_uncertain_median_gives_a_warning)
{
    run(NAIVE " --min-samples 2 --max-error 0.000001");
    cr_expect(status == 0);
    cr_expect(strncmp(err, "fdsl-bench: warning: the row ", 29) == 0 || *err == '\0', "%s", err);
}

/* ---- Warnings ---- */

#define UNSETTLED "--variant " VARIANTS " " TINY " --res 16,32 "

Test(cli, warnings_about_rows_are_one_line_per_run)
{
    char expected[256];
    int rows = 2 * VARIANT_COUNT;
    snprintf(expected, sizeof expected,
             "fdsl-bench: warning: %d of %d rows took too few samples for the error of the median: raise "
             "--min-samples (details: --verbose)\n",
             rows, rows);
    run_well(UNSETTLED);
    cr_expect_str_eq(err, expected);
    run_well(UNSETTLED "--format csv");
    cr_expect_str_eq(err, expected);
    run_well(UNSETTLED "--verbose");
    cr_expect_eq(count_of(err, "\n"), rows + 1, "%s", err);
    cr_expect(strncmp(err, "fdsl-bench: warning: --res 16: naive: too few samples (3) for the error", 69) ==
                  0,
              "%s", err);
}

/* Runs a shell command with stdout and stderr on one terminal. "$P" is the program. */
static void run_on_terminal(const char *command)
{
    setenv("NO_COLOR", "1", 1);
    setenv("P", program, 1);
    how.terminal_out = true;
    run_vector((char *[]){"sh", "-c", (char *)command, NULL});
}

/* On a terminal, stdout and stderr are one text, so a warning must not split the table. */
Test(cli, warnings_on_a_terminal_follow_the_table)
{
    run_on_terminal("exec \"$P\" --variant " VARIANTS " " TINY " --verbose 2>&1");
    cr_assert_eq(status, 0, "%s", out);
    const char *note = strstr(out, "* not settled: "), *warning = strstr(out, "warning: ");
    cr_expect(note && warning && warning > note, "%s", out);
    cr_expect_eq(count_of(out, "warning: "), VARIANT_COUNT + 1, "%s", out);
}

/* Ends the program while it holds the warning about its first row, and measures the second one for long. */
Test(cli, warnings_on_a_terminal_are_not_lost_by_an_interrupt)
{
    run_on_terminal("(while ! test -s rows.csv; do sleep 0.1; done; sleep 0.5; kill -INT $$) & "
                    "exec \"$P\" --variant naive --res 32,2048 --batch 100 --warmups 0 --warmup-time 0 "
                    "--min-time 0 --max-time 0 --min-samples 5 --verbose --out rows.csv 2>&1");
    cr_expect_eq(status, 128 + SIGINT);
    cr_expect(strstr(out, "naive: too few samples (5)") && strstr(out, "interrupted: "), "%s", out);
    cr_expect(strstr(out, "warning: 1 row took too few samples"), "%s", out);
}

/* ---- Formats ---- */

Test(cli, csv_on_stdout_has_a_header_and_one_row_per_variant)
{
    run_well("--variant " VARIANTS " " TINY " --format csv");
    cr_expect(strncmp(out, header, strlen(header)) == 0 && out[strlen(header)] == '\n', "%s", out);
    cr_expect(count_of(out, "\n") == 1 + VARIANT_COUNT);
    put("stdout.csv", out);
    check_with_python("import csv, sys\n"
                      "rows = list(csv.reader(open(sys.argv[1], newline=''), strict=True))\n"
                      "header = sys.argv[2].split(',')\n"
                      "assert rows[0] == header, rows[0]\n"
                      "assert all(len(row) == len(header) for row in rows), [len(row) for row in rows]\n"
                      "names = [row[header.index('variant')] for row in rows[1:]]\n"
                      "assert ','.join(names) == '" VARIANTS "', names\n",
                      "stdout.csv");
}

#ifdef HAVE_JANSSON
Test(cli, json_on_stdout_is_one_document_with_the_same_columns)
{
    run_well("--variant " VARIANTS " " TINY " --format json");
    put("stdout.json", out);
    check_with_python("import json, sys\n"
                      "document = json.load(open(sys.argv[1]))\n"
                      "header = sys.argv[2].split(',')\n"
                      "assert list(document) == ['environment', 'rows'], list(document)\n"
                      "rows = document['rows']\n"
                      "assert ','.join(row['variant'] for row in rows) == '" VARIANTS "'\n"
                      "for row in rows:\n"
                      "    assert list(row)[:len(header)] == header, list(row)\n"
                      "    assert row['batch'] == 2 and row['res'] == 32 and row['noise'] == 2\n"
                      "    assert row['driver'] is None and row['wrong'] is None and row['cache'] is None\n"
                      "    assert type(row['device']) is str and row['samples'] == 3\n"
                      "    assert row['verified'] is False and type(row['rank']) is int\n"
                      "    assert 0 < row['time_min_s'] <= row['time_median_s']\n"
                      "    assert row['settled'] in (True, False) and row['median_error'] is None\n",
                      "stdout.json");
}

#ifdef HAVE_XXHASH
Test(cli, json_of_loads_has_numbers_and_flags)
{
    run_well("--prepare samples --samples 40 --sample-shape 3,4,4 --dtype u8");
    run_well("--variant shards,shards-mmap --data samples --cache any --loops 3 --warmups 0 --warmup-time 0 "
             "--format json");
    put("loads.json", out);
    check_with_python(
        "import json, sys\n"
        "words = 'schema time_utc host job_id revision workload variant device driver cuda scaling data '\\\n"
        "    'on_error throttled instruction_set baseline timed_stages store checksum cache'.split()\n"
        "flags = 'decode augment verified settled'.split()\n"
        "for row in json.load(open(sys.argv[1]))['rows']:\n"
        "    for name, value in row.items():\n"
        "        kind = str if name in words else bool if name in flags else (int, float)\n"
        "        assert value is None or (isinstance(value, kind) and\n"
        "            (name in flags) == (type(value) is bool)), (name, value)\n"
        "    assert row['decode'] is False and row['verified'] is False and row['wrong'] == 0\n"
        "    assert row['skipped'] == 0 and row['shards'] == 1 and len(row['checksum']) == 16\n",
        "loads.json");
}
#endif
#else
Test(cli, json_is_refused_by_a_build_without_it)
{
    expect_failure(4, "jansson", NAIVE " --format json");
}
#endif

Test(cli, the_table_has_one_line_per_variant)
{
    run_well("--variant " VARIANTS " " TINY " --verify");
    cr_expect(
        strncmp(out, "synth: batch 2 res 32 vertices 20 orbits 4 radius 3; speed-up over naive\n", 72) == 0,
        "%s", out);
    cr_expect(strstr(out, "\nvariant ") && strstr(out, "#wrong"));
    cr_expect(strstr(out, "\nnaive "));
    cr_expect(count_of(out, "\n") == 4 + VARIANT_COUNT,
              "a footnote must say that three samples do not settle: %s", out);
}

#ifdef HAVE_XXHASH
/* The title has only what differs from the defaults, also if an option is given with its default. */
Test(cli, the_title_of_a_table_leaves_out_defaults)
{
#define DEFAULTS "--variant naive --loops 1 --warmups 0 --warmup-time 0 "
    expect_prints("synth: default options; speed-up over naive\n",
                  DEFAULTS "--res 512 --formula uji --seed 0");
    expect_prints("synth: vertices 20 seed 3 noise 2.5; speed-up over naive\n",
                  DEFAULTS "--seed 3 --vertices 20 --noise 2.5 --batch 32");
}

/* The workload `load` verifies checksums in every run, so wrong samples are counted even without --verify. */
Test(cli, the_table_of_load_has_the_cache_and_skipped_samples)
{
    run_well("--prepare samples --samples 40 --sample-shape 3,4,4 --dtype u8");
    expect_prints(" cache any; speed-up over shards\n",
                  "--variant shards --data samples --cache any --loops 3 --warmups 0 --warmup-time 0");
    cr_expect(strstr(out, " #wrong    skipped\n"), "%s", out);
    cr_expect(strstr(out, "        3        0          0\n"), "%s", out);
    expect_prints("load: data samples; speed-up over shards\n",
                  "--variant shards --data samples --cache warm --loops 3 --warmups 0 --warmup-time 0");
}
#endif
