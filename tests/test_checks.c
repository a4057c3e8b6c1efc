/* Tests scripts/check/parallel.sh and scripts/check/steps.py, the help of all scripts, and error
 * messages for invalid options and variables. Needs no GPU.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <criterion/criterion.h>

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"

/* Removes environment variables. A check script may have set them before it started this suite. */
static void forget_settings(void)
{
    unsetenv("ONLY");
    unsetenv("JOBS");
}

TestSuite(checks, .init = forget_settings, .timeout = 60);

/* A script with two checks, one of which fails. */
#define SCRIPT                                                                                              \
    "timeout 20 bash -euo pipefail -c 'source scripts/check/parallel.sh; check \"a good one\" true; check " \
    "\"a bad "                                                                                              \
    "one\" "                                                                                                \
    "false; conclude' two.sh"

Test(checks, runs_all_checks_or_those_whose_name_matches)
{
    shell(SCRIPT);
    expect(1, "1 passed, 1 failed");
    shell("ONLY='go+d' JOBS=1 " SCRIPT);
    expect(0, "1 passed, 0 failed");
}

/* "ok" and "FAILED" in the output of a check must not count as verdicts. */
Test(checks, output_of_a_check_is_not_counted)
{
    shell("timeout 20 bash -euo pipefail -c 'source scripts/check/parallel.sh; check \"a bad one\" bash -c "
          "\"echo ok "
          "it; "
          "echo FAILED it; false\"; conclude' one.sh");
    expect(1, "0 passed, 1 failed");
}

/* The script must print the output of the hanging check, and kill all processes that the check started. */
Test(checks, a_check_that_hangs_fails)
{
    shell(
        "LIMIT=1 timeout 20 bash -euo pipefail -c 'source scripts/check/parallel.sh; hang() { echo began; "
        "(sleep "
        "109.%d; "
        "true) & sleep 108.%d; }; check \"a good one\" sleep 0.1; check \"a bad one\" hang; conclude' two.sh",
        getpid(), getpid());
    expect(1, "1 passed, 1 failed");
    expect(1, "a bad one\nbegan\n");
    expect(1, "did not end within 1 s; if it is only slow, give it more time: LIMIT=2\n");
    shell("for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; echo; done 2>/dev/null | grep '^sleep "
          "10[89][.]%d'",
          getpid());
    cr_expect_str_eq(out, "", "%s", out);
}

/* Suites: one hangs in its first run only, one in every run, and one fails. */
Test(checks, a_suite_that_hangs_under_sanitizers_runs_twice)
{
    static const char make[] =
        "suite() { printf '#!/bin/sh\\n%s\\n' \"$2\" > $D/tests/$1; chmod +x $D/tests/$1; }; "
        "mkdir $D/tests; suite test_once 'test -e $D/run || { touch $D/run; exec sleep 30; }; echo $GOOD'; "
        "suite test_ever 'exec sleep 30'; suite test_wrong 'echo $BAD; exit 1'; ";
    shell("export D=$(mktemp -d) GOOD='Tested: 3 | Passing: 3 |' BAD='Tested: 3 | Passing: 2 |'; %s"
          "{ LIMIT=7 scripts/check/run.sh $D 1; echo status $?; rm $D/run; "
          "LIMIT=3 ONLY=once scripts/check/run.sh $D 0; } 2>&1 | sed 's/ *[0-9]* s  / /'; rm -r $D",
          make);
    expect(0, "ok test_once");
    expect(0, "FAILED test_ever");
    expect(0, "FAILED test_wrong");
    expect(0, "5 passed, 2 failed\nstatus 1");
    expect(0, "FAILED test_once"); /* without sanitizers, there is no second run */
}

/* The suite ends one test and hangs in the next one. */
Test(checks, a_suite_at_its_limit_names_the_test_that_was_running)
{
    shell(
        "D=$(mktemp -d) && mkdir $D/tests && printf '#!/bin/sh\nprintf \"[RUN ] a::quick\\n[PASS] a::quick: "
        "(0.01s)\\n[RUN ] a::slow\\n\"; exec sleep 30\n' >$D/tests/test_a && chmod +x $D/tests/test_a && "
        "LIMIT=1 ONLY=test_a scripts/check/run.sh $D 0; S=$?; rm -r $D; exit $S");
    expect(1, "LIMIT=2\nstill running: a::slow\n");
    cr_expect_null(strstr(out, "quick"), "%s", out);
}

Test(checks, counts_suites_on_a_terminal)
{
    shell("D=$(mktemp -d) && mkdir $D/tests && printf '#!/bin/sh\necho \"Tested: 1 | Passing: 1 |\"\n' "
          ">$D/tests/test_a && "
          "chmod +x $D/tests/test_a && cp $D/tests/test_a $D/tests/test_b && export ONLY=test_. && "
          "scripts/check/run.sh $D 0 && script -qec \"scripts/check/run.sh $D 0\" /dev/null </dev/null | tr "
          "-d '\\r'; rm -r $D");
    expect(0, "2 of 2 suites have ended\n");
    cr_expect_null(strstr(strstr(out, "2 of 2 suites") + 1, "2 of 2 suites"), "without a terminal too: %s",
                   out);
}

/* Checks that end together are counted one by one. `tee` takes time here, so that they would overlap. */
Test(checks, counts_each_check_once)
{
    shell("JOBS=20 bash -euo pipefail -c 'tee() { command tee \"$@\"; sleep 0.1; }; source "
          "scripts/check/parallel.sh; checks_total=20; for i in $(seq 20); do check $i true; done; conclude' "
          "two.sh | grep 'have ended'");
    expect(0, "");
    cr_expect_str_eq(out, "        10 of 20 suites have ended\n        20 of 20 suites have ended\n");
}

Test(checks, an_interrupt_ends_running_checks)
{
    shell("bash -euo pipefail -c 'source scripts/check/parallel.sh; check \"a long one\" sleep 31.%d; "
          "conclude' "
          "two.sh & "
          "for i in $(seq 1500); do pgrep -fx 'sleep 31[.]%d' && break; sleep 0.02; done >/dev/null; "
          "kill -TERM $!; wait $!; echo ended $?",
          getpid(), getpid());
    expect(0, "ended 130\n");
    shell(
        "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$p; echo; done 2>/dev/null | grep '^sleep 31[.]%d'",
        getpid());
    cr_expect_str_eq(out, "", "%s", out);
}

/* Processes that a command leaves running must not block the script. */
Test(checks, processes_that_a_check_leaves_are_not_waited_for, .timeout = 10)
{
    shell("LIMIT=30 timeout 9 bash -euo pipefail -c 'source scripts/check/parallel.sh; check \"a good one\" "
          "bash -c "
          "\"(sleep "
          "11 &)\"; conclude' two.sh");
    expect(0, "1 passed, 0 failed");
}

Test(checks, refuses_invalid_numbers)
{
    static const char *const numbers[] = {"0", "-2", "abc", "2x", "1.5", "99999999999999999999"};
    static const char *const names[] = {"JOBS", "LIMIT"};
    for (size_t i = 0; i < 2 * sizeof numbers / sizeof *numbers; i++) {
        shell("%s=%s " SCRIPT, names[i % 2], numbers[i / 2]);
        expect(2, i % 2 ? "two.sh: LIMIT=" : "two.sh: JOBS=");
        expect(2, ": give a whole number from 1 to 9999");
        cr_expect_eq(strchr(out, '\n'), strrchr(out, '\n'), "%s", out);
    }
}

Test(checks, refuses_names_that_match_no_check)
{
    shell("ONLY=neither " SCRIPT);
    expect(2, "two.sh: ONLY=neither matches no check\n");
    shell("ONLY='(' " SCRIPT);
    expect(2, "two.sh: ONLY=( is not a regular expression\n");
}

/* A script's help is the comment at its top. The help must name the script's current path, and printing it
 * must need no Python package. */
Test(checks, help_names_the_script_by_its_path)
{
    glob_t scripts;
    size_t run = 0;
    cr_assert_eq(glob("scripts/*/*.sh", 0, NULL, &scripts), 0);
    if (shell("python3 -c ''") == 0)
        cr_assert_eq(glob("scripts/*/*.py", GLOB_APPEND, NULL, &scripts), 0);
    for (size_t i = 0; i < scripts.gl_pathc; i++) {
        const char *path = scripts.gl_pathv[i];
        if (access(path, X_OK) != 0)
            continue; /* a file that other scripts source or import */
        char usage[256];
        snprintf(usage, sizeof usage, "\n  %s", path);
        shell("text=$(%s --help < /dev/null 2> /dev/null) && printf '%%s\\n' \"$text\" | sed 's/^    /  /'",
              path);
        expect(0, usage);
        cr_expect_null(strstr(out, "\nset -"), "%s", out);
        run++;
    }
    cr_expect_gt(run, 20);
    globfree(&scripts);
}

Test(checks, scripts_refuse_invalid_options)
{
    shell("scripts/sweep/bench.sh foo");
    expect(2, "bench.sh: unexpected argument 'foo'; see --help\n");
    shell("scripts/check/train_gpu.sh --engine foo");
    expect(2, "--engine 'foo': the engines are cuda, tf32, bf16, amp, vit, vit-amp, resnet and resnet-amp\n");
    shell("scripts/check/train_gpu.sh --engine");
    expect(2, "the engines are cuda");
}

/* train-graph and infer-graph support only cnn. The program is a stub that writes its options to a file. */
Test(checks, bench_trains_with_a_model_that_train_graph_supports)
{
    shell("d=$(mktemp -d) && mkdir -p $d/scripts/sweep && cp scripts/sweep/bench.sh $d/scripts/sweep && "
          "printf '#!/bin/sh\\necho $@ >> options\\necho train,train-naive,cpu,yes\\n"
          "echo train,train-graph,cuda,yes\\n' > $d/fdsl-bench && chmod +x $d/fdsl-bench && "
          "$d/scripts/sweep/bench.sh > /dev/null && cat $d/options; rm -r $d");
    expect(0, "\n--variant train-graph --verify --model cnn ");
    expect(0, "\n--workload train --variant auto --model cnn ");
    expect(0, "\n--variant all --verify --workload infer ");
}

/* A run prints at most one line of warnings about its rows. bench.sh must not start so many runs that it
 * prints more than eight such lines, and hides the lines about skipped variants. The program is a stub that
 * prints one line of each kind per run. All kinds of variants are available. */
Test(checks, bench_prints_at_most_eight_warnings)
{
    shell("d=$(mktemp -d) && mkdir -p $d/scripts/sweep && cp scripts/sweep/bench.sh $d/scripts/sweep\n"
          "cat > $d/fdsl-bench <<'STUB'\n"
          "#!/bin/sh\n"
          "case $* in\n"
          "*--list*) printf '%%s,cpu,yes\\n' synth,naive synth,fused load,files train,train-naive "
          "train,train-cuda;;\n"
          "--prepare*) mkdir -p \"$2\";;\n"
          "*--verify*) echo fdsl-bench: skipping x >&2; echo fdsl-bench: warning: x >&2;;\n"
          "*) echo fdsl-bench: warning: x >&2;;\n"
          "esac\n"
          "STUB\n"
          "chmod +x $d/fdsl-bench; $d/scripts/sweep/bench.sh 2> $d/err > $d/out; echo exit $?\n"
          "echo skipped $(grep -c skipping $d/err) warnings $(grep -c warning: $d/err); rm -r $d");
    const char *count = strstr(out, "exit 0\nskipped 0 warnings ");
    cr_assert_not_null(count, "%s", out);
    long warnings = strtol(count + strlen("exit 0\nskipped 0 warnings "), NULL, 10);
    cr_expect(warnings >= 5 && warnings <= 8, "%s", out);
}

/* A row must be rejected if a column is empty or implausible. It must also be rejected if its loss is near
 * the loss of guessing, which is ln 4 = 1.39 for four classes. With 0 classes, the last three columns may be
 * empty. */
Test(checks, steps_that_do_not_add_up_are_rejected)
{
    static const struct {
        const char *columns; /* steps, step_s, busy_share, slowdown, bus_share, bus_slowdown */
        bool right;
    } cases[] = {
        {"8,0.1,0.5,1.1,0.99,1.01", true}, {"8,0.1,0.5,1.1,,", true}, {"8,0.1,0.6,1.1,0.99,1.01", false},
        {"8,0.1,1,1.1,,", false},          {"8,,0.5,,,", false},      {"8,0.1,0.5,,,", false},
        {"8,0.1,0.5,0.1,,", false},        {"8,0.1,0.5,nan,,", false}};
    static const char line[] = "scripts/check/steps.py sh -c 'echo variant,compute,samples,time_mean_s,steps,"
                               "step_s,busy_share,slowdown,bus_share,bus_slowdown; echo files,5,2,0.8,%s'";
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[512];
        snprintf(command, sizeof command, line, cases[i].columns);
        cr_expect_eq(shell("%s", command) == 0, cases[i].right, "%s: %s", cases[i].columns, out);
        cr_expect(strncmp(out, "variant files", 13) == 0, "%s: %s", cases[i].columns, out);
    }
}

Test(checks, reference_rows_pass_the_checks_of_steps)
{
    static const char *const names[] = {"load", "loaders", "synth", "cold"};
    if (system("python3 -c pass 2>/dev/null") != 0)
        cr_skip_test("no python3");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        cr_expect_eq(
            shell("scripts/check/steps.py sh -c 'cat results/reference/h200_break_even_%s.csv'", names[i]), 0,
            "%s: %s", names[i], out);
}
