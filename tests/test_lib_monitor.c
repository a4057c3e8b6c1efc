/* Tests the monitor of libfdsl.so: the rows are those of the program's --monitor, phases have the names of
 * the caller, several monitors run at the same time, and every wrong argument is an error that names it. */
#include <dirent.h>
#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "cells.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

static char path[PATH_MAX];

static void start(void)
{
    shell_set_up();
    snprintf(path, sizeof path, "%s/monitor.csv", folder);
}

TestSuite(lib_monitor, .timeout = 120, .init = start, .fini = shell_tear_down);

static struct fdsl_monitor_config config_of(const char *file)
{
    struct fdsl_monitor_config config;
    good(fdsl_monitor_config_init(&config, sizeof config));
    config.path = file;
    config.interval_s = 0.01;
    return config;
}

static struct fdsl_monitor *started(const char *file)
{
    const struct fdsl_monitor_config config = config_of(file);
    struct fdsl_monitor *monitor;
    good(fdsl_monitor_start(&config, &monitor));
    return monitor;
}

static void sleep_for(double seconds)
{
    nanosleep(&(struct timespec){(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))}, NULL);
}

static char text[1 << 20];

/* Reads the file of a monitor. Returns its number of rows, without the header. */
static size_t read_rows(const char *file)
{
    size_t rows = 0;
    FILE *stream = fopen(file, "r");
    cr_assert_not_null(stream, "%s", file);
    text[fread(text, 1, sizeof text - 1, stream)] = '\0';
    fclose(stream);
    for (const char *c = text; *c; c++)
        rows += *c == '\n';
    cr_assert_gt(rows, 1);
    return rows - 1;
}

static size_t rows_with(size_t rows, const char *column, const char *wanted)
{
    size_t count = 0;
    for (size_t row = 1; row <= rows; row++)
        count += strcmp(value(text, row, column), wanted) == 0;
    return count;
}

/* Returns the number of threads of this process, and expects that each except the caller's blocks SIGTERM. */
static size_t threads(void)
{
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    cr_assert_not_null(tasks);
    for (struct dirent *entry; (entry = readdir(tasks));) {
        char file[PATH_MAX], line[256];
        unsigned long long blocked = 0;
        if (atoi(entry->d_name) == 0)
            continue;
        snprintf(file, sizeof file, "/proc/self/task/%s/status", entry->d_name);
        FILE *stream = fopen(file, "r");
        while (stream && fgets(line, sizeof line, stream))
            (void)sscanf(line, "SigBlk: %llx", &blocked);
        if (stream)
            fclose(stream);
        if (atoi(entry->d_name) != getpid())
            cr_expect(blocked >> (SIGTERM - 1) & blocked >> (SIGINT - 1) & 1, "thread %s handles signals",
                      entry->d_name);
        count++;
    }
    closedir(tasks);
    return count;
}

/* ---- Rows ---- */

/* The program appends to the file only if its columns are the same. */
Test(lib_monitor, the_program_appends_to_the_file)
{
    struct fdsl_monitor *monitor = started(path);
    sleep_for(0.1);
    good(fdsl_monitor_stop(monitor));
    const size_t rows = read_rows(path);
    EXPECT(0, "$P --monitor monitor.csv:10 -- sleep 0.1 2>&1");
    const size_t both = read_rows(path);
    cr_expect_gt(both, rows);
    for (size_t row = 1; row <= both; row += both - 1) {
        cr_expect_str_eq(value(text, row, "schema"), "monitor/2");
        cr_expect_str_eq(value(text, row, "rank"), "0");
    }
    char host[128];
    snprintf(host, sizeof host, "%s", value(text, 1, "host"));
    cr_expect_str_eq(value(text, both, "host"), host);
}

Test(lib_monitor, phases_have_the_names_of_the_caller)
{
    struct fdsl_monitor_config config = config_of(path);
    struct fdsl_monitor *monitor;
    config.rank = 4294967295;
    config.name = "a \"name\", say";
    good(fdsl_monitor_start(&config, &monitor));
    memset(&config, 0xff, sizeof config); /* nothing of it is used after the start */
    sleep_for(0.1);
    for (int i = 0; i < 3; i++) {
        char name[16] = "load, é";
        good(fdsl_monitor_phase(monitor, name));
        memset(name, 'x', sizeof name - 1);
        sleep_for(0.1);
        good(fdsl_monitor_phase(monitor, "train"));
        sleep_for(0.1);
    }
    good(fdsl_monitor_stop(monitor));
    const size_t rows = read_rows(path);
    const size_t idle = rows_with(rows, "phase", "idle"), load = rows_with(rows, "phase", "load, é"),
                 train = rows_with(rows, "phase", "train");
    cr_expect(idle > 0 && load > 0 && train > 0, "%zu %zu %zu", idle, load, train);
    cr_expect_eq(idle + load + train, rows);
    cr_expect_str_eq(value(text, 1, "phase"), "idle");
    cr_expect_str_eq(value(text, rows, "phase"), "train");
    cr_expect_eq(rows_with(rows, "variant", "a name, say"), rows); /* cells.h leaves out quotes */
    cr_expect_eq(rows_with(rows, "rank", "4294967295"), rows);
}

Test(lib_monitor, the_default_name_is_that_of_the_program)
{
    struct fdsl_monitor *monitor = started(path);
    good(fdsl_monitor_stop(monitor));
    const size_t rows = read_rows(path);
    cr_expect_eq(rows_with(rows, "variant", program_invocation_short_name), rows);
}

Test(lib_monitor, samples_measure_this_process)
{
    struct fdsl_monitor *monitor = started(path);
    good(fdsl_monitor_phase(monitor, "work"));
    for (clock_t end = clock() + CLOCKS_PER_SEC / 2; clock() < end;)
        ;
    good(fdsl_monitor_stop(monitor));
    const size_t rows = read_rows(path);
    double cores = 0;
    for (size_t row = 1; row <= rows; row++) {
        cr_expect_gt(number(text, row, "rss_bytes"), 1e6);
        cores = fmax(cores, strtod(value(text, row, "cpu_cores"), NULL));
    }
    cr_expect_gt(cores, 0.2);
}

/* The device of the CPU has no columns of a GPU, even on a machine with GPUs. */
Test(lib_monitor, without_gpus_their_columns_are_empty)
{
    struct fdsl_monitor_config config = config_of(path);
    struct fdsl_monitor *monitor;
    config.device = FDSL_CPU;
    good(fdsl_monitor_start(&config, &monitor));
    cr_expect_str_eq(fdsl_warnings(), "");
    sleep_for(0.1);
    good(fdsl_monitor_stop(monitor));
    const size_t rows = read_rows(path);
    cr_expect_eq(rows_with(rows, "gpu", ""), rows);
    cr_expect_eq(rows_with(rows, "power_w", ""), rows);
    cr_expect_eq(rows_with(rows, "device", ""), 0);
}

/* A caller's decimal comma would add a column. */
Test(lib_monitor, the_locale_does_not_matter)
{
    if (run("localedef -i de_DE -f UTF-8 ./de_DE.UTF-8") != 0)
        cr_skip_test("localedef cannot make a locale with a decimal comma");
    setenv("LOCPATH", folder, 1);
    cr_assert_not_null(setlocale(LC_ALL, "de_DE.UTF-8"));
    char comma[8];
    snprintf(comma, sizeof comma, "%.1f", 0.5);
    cr_assert_str_eq(comma, "0,5");
    struct fdsl_monitor *monitor = started(path);
    sleep_for(0.1);
    good(fdsl_monitor_stop(monitor));
    setlocale(LC_ALL, "C");
    const size_t rows = read_rows(path);
    cr_expect_gt(number(text, rows, "time_s"), 0.05);
    cr_expect_lt(number(text, rows, "time_s"), 60);
}

/* ---- Several monitors, threads and processes ---- */

Test(lib_monitor, several_write_to_one_file_and_leave_no_thread)
{
    enum { MONITORS = 4 };
    struct fdsl_monitor *monitors[MONITORS];
    const size_t before = threads();
    for (uint32_t i = 0; i < MONITORS; i++) {
        struct fdsl_monitor_config config = config_of(path);
        config.rank = i;
        good(fdsl_monitor_start(&config, &monitors[i]));
    }
    sleep_for(0.2);
    cr_expect_eq(threads(), before + 2 * MONITORS);
    for (uint32_t i = 0; i < MONITORS; i++)
        good(fdsl_monitor_stop(monitors[i]));
    cr_expect_eq(threads(), before);
    const size_t rows = read_rows(path);
    size_t sum = 0;
    for (uint32_t i = 0; i < MONITORS; i++) {
        char rank[16];
        snprintf(rank, sizeof rank, "%u", i);
        const size_t own = rows_with(rows, "rank", rank);
        cr_expect_gt(own, 2);
        sum += own;
    }
    cr_expect_eq(sum, rows);
}

/* A killed program leaves the samples up to the last write. */
Test(lib_monitor, writes_every_ten_seconds)
{
    struct fdsl_monitor *monitor = started(path);
    size_t rows = 0;
    for (int i = 0; i < 150 && rows < 50; i++) { /* a first write may have a single sample */
        sleep_for(0.1);
        rows = access(path, F_OK) == 0 ? read_rows(path) : 0;
    }
    cr_expect_geq(rows, 50);
    good(fdsl_monitor_stop(monitor));
}

Test(lib_monitor, a_forked_child_needs_a_monitor_of_its_own)
{
    struct fdsl_monitor *monitor = started(path);
    const pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        int wrong =
            fdsl_monitor_phase(monitor, "child") != FDSL_FAILED || !strstr(fdsl_error(), "before fork()");
        wrong |= (fdsl_monitor_stop(monitor) != FDSL_FAILED || !strstr(fdsl_error(), "before fork()")) << 1;
        const struct fdsl_monitor_config config = config_of(path);
        struct fdsl_monitor *own;
        wrong |= (fdsl_monitor_start(&config, &own) != FDSL_OK || fdsl_monitor_stop(own) != FDSL_OK) << 2;
        _exit(wrong);
    }
    int ended;
    waitpid(child, &ended, 0);
    cr_expect(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "%x", ended);
    good(fdsl_monitor_phase(monitor, "parent"));
    good(fdsl_monitor_stop(monitor));
    cr_expect_eq(rows_with(read_rows(path), "phase", "child"), 0);
}

/* A child that is forked while the file is locked must not keep the lock. */
Test(lib_monitor, forked_children_do_not_hold_up_writing)
{
    pid_t children[40];
    size_t count = 0;
    const time_t begin = time(NULL);
    while (count < sizeof children / sizeof *children && time(NULL) - begin < 30) {
        struct fdsl_monitor *monitor = started(path); /* writes for the first time now */
        sleep_for(1e-4 * (double)(count % 10));
        const pid_t child = fork();
        if (child == 0) {
            pause();
            _exit(0);
        }
        cr_assert_gt(child, 0);
        children[count++] = child;
        (void)fdsl_monitor_stop(monitor);
    }
    for (size_t i = 0; i < count; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    cr_expect_lt(time(NULL) - begin, 30);
}

/* ---- Errors ---- */

static void refused(enum fdsl_status code, const struct fdsl_monitor_config *config, const char *words)
{
    struct fdsl_monitor *monitor = (void *)&code;
    cr_expect_eq(fdsl_monitor_start(config, &monitor), code, "%s", words);
    cr_expect(strstr(fdsl_error(), words) == fdsl_error(), "'%s' does not begin with '%s'", fdsl_error(),
              words);
    cr_expect_null(strstr(fdsl_error(), "--"), "%s", fdsl_error());
    cr_expect_null(monitor);
}

Test(lib_monitor, every_wrong_argument_is_named)
{
    static const double intervals[] = {0, -1, 0.00999, 60.001, NAN, INFINITY, DBL_MAX};
    struct fdsl_monitor_config config = config_of(path);
    static char long_name[257];
    memset(long_name, 'n', 256);
    cr_expect_eq(fdsl_monitor_config_init(NULL, sizeof config), FDSL_INVALID);
    cr_expect_str_eq(fdsl_error(), "config: it is NULL");
    cr_expect_eq(fdsl_monitor_config_init(&config, 3), FDSL_INVALID);
    cr_expect_eq(fdsl_monitor_start(&config, NULL), FDSL_INVALID);
    cr_expect_str_eq(fdsl_error(), "monitor: it is NULL");
    refused(FDSL_INVALID, NULL, "config: it is NULL");
#define REFUSED(code, words, ...) \
    config = config_of(path);     \
    __VA_ARGS__;                  \
    refused(code, &config, words)
    REFUSED(FDSL_INVALID, "config->size: ", config.size = 1);
    REFUSED(FDSL_INVALID, "path: it is NULL", config.path = NULL);
    REFUSED(FDSL_INVALID, "path: it is empty", config.path = "");
    REFUSED(FDSL_INVALID, "path: /nowhere/x.csv", config.path = "/nowhere/x.csv");
    REFUSED(FDSL_INVALID, "path: ", config.path = folder);
    REFUSED(FDSL_INVALID, "device: -3", config.device = -3);
    REFUSED(FDSL_UNAVAILABLE, "device: ", config.device = 4096);
    REFUSED(FDSL_INVALID, "name: it is empty", config.name = "");
    REFUSED(FDSL_INVALID, "name: it is too long", config.name = long_name);
    REFUSED(FDSL_INVALID, "name: it contains a control character", config.name = "a\nb");
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++) {
        REFUSED(FDSL_INVALID, "interval_s: ", config.interval_s = intervals[i]);
    }
    cr_expect_neq(access(path, F_OK), 0, "a refused monitor has made the file");
    struct fdsl_monitor *monitor = started(path);
    cr_expect_eq(fdsl_monitor_phase(NULL, "train"), FDSL_INVALID);
    cr_expect_eq(fdsl_monitor_phase(monitor, NULL), FDSL_INVALID);
    cr_expect_str_eq(fdsl_error(), "name: it is NULL; it must have 1 to 255 bytes");
    cr_expect_eq(fdsl_monitor_phase(monitor, ""), FDSL_INVALID);
    cr_expect_eq(fdsl_monitor_phase(monitor, long_name), FDSL_INVALID);
    cr_expect_eq(fdsl_monitor_phase(monitor, "a\tb"), FDSL_INVALID);
    good(fdsl_monitor_phase(monitor, long_name + 1));
    good(fdsl_monitor_stop(monitor));
    good(fdsl_monitor_stop(NULL));
    const size_t rows = read_rows(path);
    cr_expect_eq(rows_with(rows, "phase", "idle") + rows_with(rows, "phase", long_name + 1), rows);
}

Test(lib_monitor, a_file_of_other_rows_is_refused)
{
    const struct fdsl_monitor_config config = config_of(path);
    put_text("monitor.csv", "schema,time_utc\nsynth/8,now\n");
    refused(FDSL_INVALID, &config, "path: ");
    read_rows(path);
    cr_expect_str_eq(text, "schema,time_utc\nsynth/8,now\n");
}

Test(lib_monitor, the_error_of_the_last_write_is_returned)
{
    struct fdsl_monitor *monitor = started(path);
    sleep_for(0.1);
    put_text("monitor.csv", "schema,time_utc\nsynth/8,now\n");
    cr_expect_neq(fdsl_monitor_stop(monitor), FDSL_OK);
    cr_expect_not_null(strstr(fdsl_error(), "monitor.csv"), "%s", fdsl_error());
}

#ifndef __SANITIZE_ADDRESS__ /* ASan ends the process if it gets no memory */
Test(lib_monitor, missing_threads_are_an_error)
{
    const struct fdsl_monitor_config config = config_of(path);
    struct rlimit before, none = {1, 1};
    cr_assert_eq(getrlimit(RLIMIT_AS, &before), 0);
    none.rlim_max = before.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_AS, &none), 0);
    struct fdsl_monitor *monitor;
    const enum fdsl_status code = fdsl_monitor_start(&config, &monitor);
    setrlimit(RLIMIT_AS, &before);
    cr_expect_eq(code, FDSL_FAILED, "%s", fdsl_error());
    cr_expect_null(monitor);
}
#endif

Test(lib_monitor, memory_does_not_grow)
{
    const size_t before = threads();
    for (int i = 0; i < 200; i++) {
        struct fdsl_monitor *monitor = started(path);
        for (int k = 0; k < 100; k++)
            good(fdsl_monitor_phase(monitor, k % 2 ? "train" : "load"));
        good(fdsl_monitor_stop(monitor));
    }
    cr_expect_geq(read_rows(path), 200);
    cr_expect_eq(threads(), before);
}
