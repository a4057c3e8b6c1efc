/* Tests fdsl-bench --monitor FILE -- COMMAND: how a command is started, watched and ended. */
#include "shell.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/timer.h"
#include "machine/monitor.h"

/* burn(0.3) uses 0.3 s of CPU time, even on a busy machine. child() runs a function in a forked process. */
static const char tree[] = "import os, signal, subprocess, sys, time\n"
                           "def burn(seconds):\n"
                           "    end = time.process_time() + seconds\n"
                           "    while time.process_time() < end: pass\n"
                           "def child(work):\n"
                           "    pid = os.fork()\n"
                           "    if pid == 0:\n"
                           "        work()\n"
                           "        os._exit(0)\n"
                           "    return pid\n";

/* A Python program that reads a file of monitor rows. It prints the number of rows, the sums of CPU seconds
 * and written bytes, the largest memory, the lowest rate, and the first row's variant. */
static const char sums[] =
    "import csv, sys\n"
    "rows = list(csv.DictReader(open(sys.argv[1])))\n"
    "cpu, written, before = 0, 0, 0\n"
    "rates = []\n"
    "for row in rows:\n"
    "    assert row['schema'] == 'monitor/2' and row['phase'] == 'timed', row\n"
    "    seconds, before = float(row['time_s']) - before, float(row['time_s'])\n"
    "    if row['cpu_cores']:\n"
    "        rates += [float(row[name]) for name in ('cpu_cores', 'read_bytes_per_s',\n"
    "                                                'write_bytes_per_s')]\n"
    "        cpu += seconds * rates[-3]\n"
    "        written += seconds * rates[-1]\n"
    "rss = max(float(row['rss_bytes'] or 0) for row in rows)\n"
    "print(len(rows), cpu, written, rss, min(rates, default=0), rows[0]['variant'])\n";

static void start(void)
{
    shell_set_up();
    if (shell("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    put("sums.py", sums, strlen(sums));
}

TestSuite(command, .init = start, .fini = shell_tear_down, .timeout = 120);

/* Monitors a Python program, which may use burn() and child(), with a sampling period of 20 ms. */
static void watch(const char *program_text)
{
    char text[4096];
    int length = snprintf(text, sizeof text, "%s%s", tree, program_text);
    put("job.py", text, (size_t)length);
    run("$P --monitor m.csv:20 -- python3 job.py");
}

static struct {
    double rows, cpu_s, written, rss_bytes, lowest;
    char variant[64];
} sum;

static void read_sums(void)
{
    EXPECT(0, "python3 sums.py m.csv");
    cr_assert_eq(sscanf(out, "%lf %lf %lf %lf %lf %63s", &sum.rows, &sum.cpu_s, &sum.written, &sum.rss_bytes,
                        &sum.lowest, sum.variant),
                 6, "%s", out);
    cr_expect_geq(sum.lowest, 0, "a rate is negative: %s", out);
}

/* ---- Starting a command, and its exit status ---- */

Test(command, has_its_own_input_output_and_exit_status)
{
    EXPECT(7, "echo words | $P --monitor m.csv -- sh -c 'cat; echo \"$1\"; exit 7' x --help 2>err");
    cr_expect_str_eq(out, "words\n--help\n");
    EXPECT(0, "cat err");
    cr_expect(says("fdsl-bench: sh: ") && says(" s of CPU time (") && says(" samples in m.csv\n"), "%s", out);
    cr_expect_eq(strchr(out, '\n') - out, (long)strlen(out) - 1, "not one line: %s", out);
}

Test(command, a_very_short_command_has_samples)
{
    EXPECT(0, "$P --monitor m.csv:60000 -- true");
    expect_line(0, "fdsl-bench: true: ");
    read_sums();
    cr_expect_eq(sum.rows, 2, "not one sample at the start and one at the end");
    cr_expect_str_eq(sum.variant, "true");
}

Test(command, a_command_that_cannot_be_started_is_named)
{
    EXPECT(127, "$P --monitor m.csv -- no-such-command");
    expect_line(127, "fdsl-bench: cannot start 'no-such-command': No such file or directory");
    EXPECT(126, "touch file && $P --monitor m.csv -- ./file");
    expect_line(126, "fdsl-bench: cannot start './file': Permission denied");
    EXPECT(1, "test -e m.csv");
}

Test(command, is_not_started_if_its_samples_cannot_be_written)
{
    EXPECT(2, "echo schema,other > m.csv; $P --monitor m.csv -- touch started");
    expect_line(2, "m.csv has other columns");
    EXPECT(2, "$P --monitor no/folder/m.csv -- touch started");
    EXPECT(1, "test -e started");
}

Test(command, a_command_whose_samples_are_lost_ends_with_1)
{
    EXPECT(1, "mkdir d && $P --monitor d/m.csv -- rm -r d");
    cr_expect(says("d/m.csv cannot be opened") && !says(" samples in "), "%s", out);
}

Test(command, output_line_has_sizes_in_suitable_units)
{
    EXPECT(0, "$P --monitor m.csv:20 -- sleep 0.3");
    cr_expect(says("B of memory, ") && says(" kB written; "), "%s", out);
    cr_expect(!says(" GB") && !says("e-") && !says("e+") && !says("at most 0 "), "%s", out);
    watch("block = b'x' * 50_000_000\ntime.sleep(0.2)\n");
    cr_expect(says(" MB of memory"), "%s", out);
}

Test(command, invalid_command_lines_are_refused)
{
    static const char *const refused[][2] = {
        {"--monitor m.csv --", "name a command after --, e.g. --monitor FILE -- python3 train.py"},
        {"-- true", "-- COMMAND needs --monitor FILE, for the samples of 'true'"},
        {"--monitor m.csv --variant naive -- true", "--variant does not apply to -- COMMAND; leave one out"},
        {"--monitor m.csv --batch 3 -- true", "--batch does not apply to -- COMMAND; leave one out"},
        {"--prepare d -- true", "--prepare does not apply to -- COMMAND; leave one out"},
        {"--monitor m.csv:5 -- true", "--monitor FILE:MS"},
        {"--monitor m.csv true -- true", "unexpected argument 'true'"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        run("$P %s", refused[i][0]);
        expect_line(2, refused[i][1]);
    }
    EXPECT(0, "$P --help -- false");
    cr_expect(says("usage: fdsl-bench"), "%s", out);
}

/* ---- The tree ---- */

/* A child, a grandchild and a daemon use 0.3 s of CPU time each. The daemon's parent has ended. */
Test(command, is_watched_with_all_its_descendants)
{
    watch("os.waitpid(child(lambda: (burn(0.3), os.waitpid(child(lambda: burn(0.3)), 0))), 0)\n"
          "ours, theirs = os.pipe()\n"
          "def daemon():\n"
          "    os.setsid()\n"
          "    child(lambda: (burn(0.3), os.write(theirs, b'x')))\n"
          "os.waitpid(child(daemon), 0)\n"
          "os.read(ours, 1)\n"
          "time.sleep(0.3)\n");
    cr_assert_eq(status, 0, "%s", out);
    double said_s = 0;
    const char *line = strstr(out, "fdsl-bench: python3: ");
    cr_assert_not_null(line, "%s", out);
    cr_assert_eq(sscanf(line, "fdsl-bench: python3: %*f s, %lf s of CPU time", &said_s), 1, "%s", out);
    cr_expect(said_s >= 0.89 && said_s < 1.5, "not 0.9 s, with each process counted once: %s", out);
    cr_expect(!says("still run"), "%s", out);
    read_sums();
    cr_expect_geq(sum.cpu_s, 0.85);
    cr_expect_leq(sum.cpu_s, said_s + 0.1);
}

/* If a process ignores SIGCHLD, Linux does not add the CPU time of ended children to that of the process. */
Test(command, counts_children_of_a_process_that_ignores_sigchld)
{
    watch("signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
          "for i in range(3):\n"
          "    pid = child(lambda: burn(0.3))\n"
          "    try: os.waitpid(pid, 0)\n"
          "    except ChildProcessError: pass\n"
          "time.sleep(0.2)\n");
    read_sums();
    cr_expect_geq(sum.cpu_s, 0.5, "%g s", sum.cpu_s);
    cr_expect_leq(sum.cpu_s, 2, "%g s", sum.cpu_s);
}

/* The CPU time of processes that live for less than the sampling period is counted, and only once. */
Test(command, counts_many_short_processes_once)
{
    watch("for i in range(100): os.waitpid(child(lambda: burn(0.01)), 0)\n"
          "print(sum(os.times()[:4]))\n");
    double own_s = 0;
    cr_assert_eq(sscanf(out, "%lf", &own_s), 1, "%s", out);
    read_sums();
    cr_expect_geq(sum.cpu_s, 0.8 * own_s - 0.1, "%g of %g s", sum.cpu_s, own_s);
    cr_expect_leq(sum.cpu_s, 1.3 * own_s + 0.1, "%g of %g s", sum.cpu_s, own_s);
}

/* Linux rounds the times in /proc/PID/stat down to 10 ms: here, to nothing. */
Test(command, counts_cpu_times_shorter_than_a_tick)
{
    enum { CHILDREN = 8 };
    struct process_tree *processes;
    struct process_use use;
    pid_t pids[CHILDREN];
    int ready[2];
    char byte;
    cr_assert_eq(process_tree_open(&processes), STATUS_OK, "%s", status_text());
    cr_assert_eq(pipe(ready), 0);
    for (int i = 0; i < CHILDREN; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            while (timer_clock_s(CLOCK_PROCESS_CPUTIME_ID) < 0.008) {
            }
            _exit(write(ready[1], "", 1) != 1 || pause() != 0);
        }
    }
    for (int i = 0; i < CHILDREN; i++)
        cr_assert_eq(read(ready[0], &byte, 1), 1);
    cr_assert(process_tree_use(processes, &use));
    cr_expect(use.counters[PROCESS_CPU_S] >= CHILDREN * 0.008 && use.counters[PROCESS_CPU_S] < CHILDREN * 0.1,
              "%g s", use.counters[PROCESS_CPU_S]);
    for (int i = 0; i < CHILDREN; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    process_tree_free(processes);
}

Test(command, includes_memory_and_storage_of_children)
{
    watch("def work():\n"
          "    block = b'x' * 50_000_000\n"
          "    with open('big', 'wb') as file:\n"
          "        file.write(block)\n"
          "        os.fsync(file.fileno())\n"
          "    burn(0.2)\n"
          "    written = open('/proc/self/io').read().split('\\nwrite_bytes: ')[1].split()[0]\n"
          "    os.write(1, f'{written}\\n'.encode())  # one call, because print() may use two, which mixes "
          "lines\n"
          "first, second = child(work), child(work)\n"
          "os.waitpid(first, 0), os.waitpid(second, 0)\n"
          "time.sleep(0.1)\n");
    double written[2] = {0};
    cr_assert_eq(sscanf(out, "%lf %lf", &written[0], &written[1]), 2, "%s", out);
    read_sums();
    cr_expect_geq(sum.rss_bytes, 60e6, "%g bytes for two processes of 50 MB", sum.rss_bytes);
    cr_expect_geq(sum.written, 0.95 * (written[0] + written[1]), "%g bytes", sum.written);
    cr_expect_leq(sum.written, 1.1 * (written[0] + written[1]) + 1e6, "%g bytes", sum.written);
}

Test(command, remaining_processes_are_reported)
{
    EXPECT(0,
           "timeout 20 $P --monitor m.csv -- sh -c 'sleep 30 >/dev/null 2>&1 & echo $!' >pid 2>err; cat err; "
           "kill $(cat pid)");
    cr_expect(says("; 1 of its processes still runs but will not be sampled; "), "%s", out);
}

/* ---- SIGCHLD ---- */

/* An alarm ends the monitor if the monitor does not notice that its command has ended. */
Test(command, ends_if_sigchld_is_ignored)
{
    static const char ignore[] = "import os, signal, sys\n"
                                 "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
                                 "signal.alarm(30)\n"
                                 "os.execv(sys.argv[1], sys.argv[1:])\n";
    static const char job[] = "import signal, time\n"
                              "time.sleep(0.3)\n"
                              "print('ignores' if signal.getsignal(signal.SIGCHLD) else 'waits')\n"
                              "raise SystemExit(5)\n";
    put("ignore.py", ignore, sizeof ignore - 1);
    put("job.py", job, sizeof job - 1);
    EXPECT(5, "python3 ignore.py $P --monitor m.csv:20 -- python3 job.py 2>err");
    cr_expect_str_eq(out, "ignores\n", "the command must inherit the ignored SIGCHLD");
    EXPECT(5, "$P --monitor m.csv:20 -- python3 job.py 2>err");
    cr_expect_str_eq(out, "waits\n");
    read_sums();
}

Test(command, a_command_reaped_by_other_code_counts_as_ended)
{
    struct process_tree *processes;
    int wait_status = 0;
    cr_assert_eq(process_tree_open(&processes), STATUS_OK, "%s", status_text());
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    cr_expect(process_tree_collect(processes, pid, &wait_status));
    cr_expect(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 1);
    process_tree_free(processes);
}

/* ---- Signals ---- */

Test(command, a_command_killed_by_a_signal_has_all_its_samples)
{
    EXPECT(137, "$P --monitor m.csv:20 -- sh -c 'sleep 0.3; kill -9 $$'");
    expect(137, " samples in m.csv");
    read_sums();
    cr_expect_geq(sum.rows, 3);
}

/* Starts the monitor with trap.sh as its command, and waits until trap.sh has created the file `ready`. Then
 * sends the signal to the monitor, and waits until the monitor has ended. */
#define SEND(name)                                                                                         \
    "rm -f ready; $P --monitor m.csv:20 -- sh trap.sh >said 2>/dev/null & p=$!; while ! [ -e ready ]; do " \
    "sleep 0.01; done; "                                                                                   \
    "kill -" name " $p; wait $p; s=$?; cat said; exit $s"

Test(command, the_monitor_forwards_its_signals)
{
    static const char trap[] =
        "for s in HUP INT QUIT TERM USR1 USR2; do trap \"echo got $s; exit 5\" $s; done\n"
        "touch ready\n"
        "while :; do sleep 0.02; done\n";
    put("trap.sh", trap, sizeof trap - 1);
    static const char *const names[] = {"TERM", "HUP", "USR1",
                                        "USR2"}; /* INT and QUIT are ignored by background jobs of a shell */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char wanted[32];
        run("n=%s; " SEND("$n"), names[i]);
        snprintf(wanted, sizeof wanted, "got %s\n", names[i]);
        cr_expect_eq(status, 5, "%s: %d: %s", names[i], status, out);
        cr_expect_str_eq(out, wanted);
    }
    read_sums();
}

Test(command, a_forwarded_signal_that_ends_the_command_is_reported)
{
    static const char plain[] = "touch ready; exec sleep 30\n";
    put("trap.sh", plain, sizeof plain - 1);
    cr_expect_eq(run(SEND("TERM")), 143, "%s", out);
    read_sums();
    cr_expect_geq(sum.rows, 1);
}

/* On Ctrl-C, the terminal sends SIGINT to the whole process group. The monitor must not forward it. */
Test(command, ctrl_c_interrupts_the_command_once)
{
    static const char count[] = "import signal, time\n"
                                "got = []\n"
                                "signal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
                                "print('ready', input(), flush=True)\n"
                                "end = time.monotonic() + 30\n"
                                "while not got and time.monotonic() < end: time.sleep(0.01)\n"
                                "time.sleep(0.3)\n"
                                "print('interrupts:', len(got), flush=True)\n"
                                "raise SystemExit(3)\n";
    static const char terminal[] = "import os, pty, sys\n"
                                   "pid, fd = pty.fork()\n"
                                   "if pid == 0:\n"
                                   "    os.execv(sys.argv[1], [sys.argv[1], '--monitor', 'm.csv:20', '--',\n"
                                   "                           'python3', 'count.py'])\n"
                                   "os.write(fd, b'typed\\n')\n"
                                   "text, sent = b'', False\n"
                                   "while True:\n"
                                   "    try: text += os.read(fd, 4096)\n"
                                   "    except OSError: break\n"
                                   "    if b'ready typed' in text and not sent:\n"
                                   "        sent = os.write(fd, b'\\x03')\n"
                                   "print(text.decode())\n"
                                   "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n";
    put("count.py", count, sizeof count - 1);
    put("terminal.py", terminal, sizeof terminal - 1);
    run("python3 terminal.py $P");
    expect(3, "interrupts: 1\r\n");
    expect(3, " samples in m.csv");
}

/* ---- The rows ---- */

Test(command, its_rows_fit_in_the_file_of_a_run)
{
    EXPECT(0, "printf '[monitor]\\nmonitor = m.csv:20\\n' > c.ini; $P --config c.ini -- sleep 0.1 && "
              "$P --variant naive --res 32 --batch 2 --min-time 0.2 --monitor m.csv:20 >/dev/null");
    EXPECT(0, "grep -c '^schema' m.csv");
    expect_line(0, "1");
    run("mkdir results && mv m.csv results && cd %s && scripts/figures/draw.py --results %s/results --work "
        "%s "
        "--commands "
        "monitor >/dev/null && grep -c . %s/monitor.dat",
        root, folder, folder, folder);
    cr_expect_eq(status, 0, "%s", out);
}
