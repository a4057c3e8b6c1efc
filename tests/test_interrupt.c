/* Tests the message of a run that a signal ends: what is kept, and how to continue. */
#include "shell.h"

#include <string.h>

/* Starts a command, sends it a signal when a shell condition holds, and prints its stderr and exit status. */
static const char interrupt[] =
    "import signal, subprocess, sys, time\n"
    "number, condition, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]\n"
    "process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,\n"
    "                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))\n"
    "while process.poll() is None and subprocess.call(condition, shell=True, stderr=subprocess.DEVNULL):\n"
    "    time.sleep(0.01)\n"
    "process.send_signal(number)\n"
    "print(process.communicate()[1], process.returncode)\n";

static void start(void)
{
    shell_set_up();
    if (shell("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    put("interrupt.py", interrupt, sizeof interrupt - 1);
}

TestSuite(interrupt, .init = start, .fini = shell_tear_down, .timeout = 120);

#define INT               "python3 interrupt.py 2 "
#define TERM              "python3 interrupt.py 15 "
#define ROWS(count)       "'test $(grep -c . rows.csv) -gt " #count "' $P --out rows.csv "
#define SYNTH             "--batch 2 --res 32 --orbits 4 --warmup-time 0 --variant "
#define EXPECT_SAYS(what) cr_expect(says("fdsl-bench: interrupted: " what), "%s", out)

/* The signal ends the run during its first variant, then during its second. */
Test(interrupt, synth_names_the_remaining_variants)
{
    EXPECT(0, "$P " SYNTH "naive --loops 3 --out rows.csv && " INT "'sleep 1' $P " SYNTH
              "naive,omp --loops 100000000 --out rows.csv");
    EXPECT_SAYS("kept: 0 new rows in rows.csv; to continue, repeat the same command\n");
    EXPECT(0, "rm rows.csv; " INT ROWS(1) SYNTH "naive,omp --min-time 2 --max-time 2");
    EXPECT_SAYS("kept: 1 new row in rows.csv; to continue, repeat the same command with --variant naive,omp "
                "(naive again, "
                "for the speed-up)\n");
    cr_expect(says(" -2\n"), "SIGINT does not end the program: %s", out);
    EXPECT(0, "$P " SYNTH "omp --min-time 0.1 --max-time 0.1 --out rows.csv && grep -c . rows.csv");
    cr_expect(says("\n3\n"), "%s", out);
    EXPECT(0, "rm rows.csv; " INT ROWS(1) SYNTH "naive,omp --min-time 2 --max-time 2 --baseline naive");
    EXPECT_SAYS("kept: 1 new row in rows.csv; to continue, repeat the same command with --variant naive,omp "
                "(naive again, for the speed-up)\n");
    EXPECT(0, TERM "'sleep 1' $P " SYNTH "naive --loops 100000000");
    EXPECT_SAYS(
        "kept: no rows except those on stdout, because --out FILE was not given; to continue, repeat the "
        "same command\n");
}

#ifdef HAVE_JANSSON
Test(interrupt, json_without_a_file_loses_all_rows)
{
    EXPECT(0,
           "rm -f s.csv; " INT "'test $(grep -c . s.csv) -gt 1' $P --format json --samples-out s.csv " SYNTH
           "naive,omp --min-time 2 --max-time 2");
    EXPECT_SAYS("kept: no rows, because --format json prints them at the end; to continue, repeat the same "
                "command with --out FILE\n");
    EXPECT(
        0, INT
        "'test $(grep -c . s2.csv) -gt 1 && sleep 0.5' $P --format json --samples-out s2.csv --variant naive "
        "--batch 2 --res 32,33 --warmup-time 0 --min-time 2 --max-time 2");
    EXPECT_SAYS(
        "1 of 2 combinations are done, but their rows are lost, because --format json prints all rows "
        "at the end; to start again, repeat the same command with --out FILE\n");
}
#endif

#ifdef HAVE_XXHASH
Test(interrupt, load_names_the_remaining_variants)
{
    EXPECT(0, "$P --prepare d --samples 50 --shards 2 --sample-shape 10 && " TERM ROWS(
                  1) "--workload load --variant shards,shards-mmap --baseline shards --data d --min-time 2 "
                     "--max-time 2");
    EXPECT_SAYS(
        "kept: 1 new row in rows.csv; to continue, repeat the same command with --variant shards,shards-mmap "
        "(shards again, for the speed-up)\n");
    cr_expect(says(" -15\n"), "%s", out);
}

#define TRAIN "--variant train-naive --model logreg --train-size 1000 --test-size 50 "

Test(interrupt, train_says_how_to_resume)
{
    EXPECT(0, INT ROWS(2) TRAIN "--epochs 100000 --checkpoint ck");
    EXPECT_SAYS("kept: ");
    cr_expect(says(" in rows.csv; the latest checkpoint is in ck; to continue, repeat the same command with "
                   "--resume\n"),
              "%s", out);
    EXPECT(0, "n=$(grep -c . rows.csv); $P " TRAIN
              "--epochs $((n + 2)) --checkpoint ck --out rows.csv --resume && "
              "test $(grep -c . rows.csv) -eq $((n + 3))");
    EXPECT(0, "rm rows.csv; " TERM ROWS(2) TRAIN "--epochs 100000");
    cr_expect(says(" in rows.csv; no epochs, because --checkpoint DIR was not given; to start again, repeat "
                   "the same command\n"),
              "%s", out);
    EXPECT(0, INT "'test -e new/.lock && sleep 1' $P --variant train-naive --model cnn --train-size 10000 "
                  "--test-size 50 --checkpoint new");
    EXPECT_SAYS(
        "kept: no rows except those on stdout, because --out FILE was not given; this run has not "
        "finished an epoch; to continue from the latest checkpoint in new, if it has one, repeat the same "
        "command with --resume\n");
}

Test(interrupt, prepare_counts_what_is_finished)
{
    int kept = 0, samples;
    for (int again = 0; again < 2; again++) { /* the second run continues the first one */
        EXPECT(0,
               INT
               "'test $(ls d/.prepare/*.part | grep -c .) -gt %d' $P --prepare d --from synth --classes 5 "
               "--samples 4000 --shards 40 --res 128",
               kept + 2);
        const char *line = strstr(out, "fdsl-bench: interrupted: ");
        cr_assert_not_null(line, "%s", out);
        cr_assert_eq(
            sscanf(line, "fdsl-bench: interrupted: %d of 40 shards with %d samples", &kept, &samples), 2,
            "%s", out);
        cr_expect(kept >= 1 + 2 * again && kept < 40 && samples == 100 * kept, "%s", out);
        cr_expect(says(" samples are kept in d; to continue, repeat the same command\n"), "%s", out);
        EXPECT(0, "ls d/.prepare/*.part | grep -c .");
        int parts = atoi(out);
        cr_expect(parts == kept || parts == kept + 1, "%d parts, but %d in the message", parts, kept);
    }
    EXPECT(0, "$P --prepare d --from synth --classes 5 --samples 4000 --shards 40 --res 128");
    cr_expect(says(" already finished)"), "%s", out);
}

/* ---- Progress of --prepare ---- */

Test(interrupt, piped_progress_is_lines)
{
    EXPECT(0, "FDSL_PROGRESS_S=0 $P --prepare d --samples 1000 --shards 4 --sample-shape 10 2>err");
    EXPECT(0, "cat err");
    cr_expect(!strchr(out, '\r') && !strchr(out, '\033'), "%s", out);
    cr_expect(says("fdsl-bench: preparing: shard 1 of 4, 250 of 1000 samples, "), "%s", out);
    cr_expect(says("fdsl-bench: preparing: shard 4 of 4, 1000 of 1000 samples, "), "%s", out);
    cr_expect(says(" samples/s, 0 s left\n"), "%s", out);
    EXPECT(0, "grep -c . err");
    cr_expect_str_eq(out, "4\n");
    EXPECT(0, "FDSL_PROGRESS_S=x $P --prepare e --samples 1000 --shards 4 --sample-shape 10 2>&1 >/dev/null");
    cr_expect_str_eq(out, "", "progress before the period of ten seconds is over");
}

Test(interrupt, progress_on_a_terminal_has_the_time_left)
{
    EXPECT(0, "python3 -c 'import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))' $P --prepare d --samples 1000 "
              "--shards 4 --sample-shape 10 </dev/null");
    cr_expect(says("\r\033[Kpreparing: shard 1 of 4, 250 of 1000 samples, ") && says(" left"), "%s", out);
}
#endif
