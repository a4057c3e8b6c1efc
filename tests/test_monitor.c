/* Tests the monitor: its sample times, values and output. The NVML library is a fake. */
#include "machine/monitor.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/file.h"
#include "core/phase.h"
#include "core/timer.h"
#include "run/settings.h"
#include "machine/nvml.h"
#include "cells.h"
#include "fake_nvml.h"
#include "must.h"

#define GPU "0000:17:00.0"

static const char header[] = "schema,time_utc,host,job_id,revision,rank,gpu,device,variant,phase,time_s,"
                             "gpu_utilisation_percent,gpu_memory_bytes,temperature_c,power_w,sm_clock_mhz,"
                             "memory_clock_mhz,pcie_rx_bytes_per_s,pcie_tx_bytes_per_s,throttled,cpu_cores,"
                             "rss_bytes,read_bytes_per_s,write_bytes_per_s\n";

static char folder[] = "/tmp/fdsl-monitor-XXXXXX", path[64];
static struct env env;
static struct monitor *monitor;

static void start(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/monitor.csv", folder);
    snprintf(env.time_utc, sizeof env.time_utc, "2026-01-31T12:34:56Z");
    snprintf(env.host, sizeof env.host, "node7");
    snprintf(env.job_id, sizeof env.job_id, "123_4");
    snprintf(env.cpu_model, sizeof env.cpu_model, "a device, say");
    snprintf(env.revision, sizeof env.revision, "abc");
}

static void stop(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert(system(command) == 0);
}

TestSuite(monitor, .init = start, .fini = stop, .timeout = 60);

static void sleep_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
    while (nanosleep(&left, &left) != 0)
        ;
}

static void open_monitor(uint64_t period_ms, const char *pci_bus_id)
{
    static struct monitor_gpu gpu;
    gpu = (struct monitor_gpu){5, "a GPU, say", pci_bus_id};
    const struct monitor_subject subject = {&env, 3, &gpu, *pci_bus_id != '\0', NULL, NULL};
    must(monitor_open(path, period_ms, &subject, &monitor));
}

/* Begins the variant `one` and its timed phase. */
static void begin_timed(void)
{
    must(monitor_begin(monitor, "one"));
    phase_enter(PHASE_TIMED);
}

static void end_monitor(void)
{
    must(monitor_stop(monitor));
}

/* Waits until the current variant has this many samples of its timed phase. */
static void wait_for_samples(size_t samples)
{
    while (monitor_timed_samples(monitor) < samples)
        sleep_for(1e-3);
}

/* ---- The file ---- */

static char text[1 << 20];
static size_t rows; /* number of rows, not counting the header */

static void read_rows(void)
{
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = '\0';
    cr_assert(strncmp(text, header, strlen(header)) == 0, "%s", text);
    rows = 0;
    for (const char *c = text; *c; c++)
        rows += *c == '\n';
    rows--;
}

static size_t count_phase(const char *variant, const char *phase)
{
    size_t count = 0;
    for (size_t row = 1; row <= rows; row++) {
        bool same = strcmp(value(text, row, "variant"), variant) == 0;
        count += same && strcmp(value(text, row, "phase"), phase) == 0;
    }
    return count;
}

/* ---- Samples ---- */

Test(monitor, a_row_has_the_host_job_and_device)
{
    open_monitor(10, "");
    end_monitor();
    monitor_free(monitor);
    read_rows();
    cr_assert_geq(rows, 1, "there is no sample at the start");
    expect_cells(text, 1,
                 "schema=monitor/2;time_utc=2026-01-31T12:34:56Z;host=node7;job_id=123_4;revision=abc");
    expect_cells(text, 1, "rank=3;device=a device, say;variant=;phase=idle");
    cr_expect(number(text, 1, "time_s") >= 0);
}

/* On a busy machine, a sample may be late. It is never early, and no period has two samples. */
Test(monitor, samples_are_taken_at_multiples_of_the_period)
{
    open_monitor(20, "");
    sleep_for(0.4);
    end_monitor();
    monitor_free(monitor);
    read_rows();
    cr_expect_gt(rows, 2);
    cr_expect_leq(rows, 30);
    for (size_t row = 2; row <= rows; row++) {
        double before = floor(number(text, row - 1, "time_s") / 0.02 + 1e-6);
        cr_expect(floor(number(text, row, "time_s") / 0.02 + 1e-6) > before, "row %zu: %s s", row,
                  value(text, row, "time_s"));
    }
}

Test(monitor, stops_without_waiting_for_the_period)
{
    double begin_s = timer_now_s();
    open_monitor(60000, "");
    end_monitor();
    monitor_free(monitor);
    cr_expect_lt(timer_now_s() - begin_s, 30);
    read_rows();
    cr_expect_eq(rows, 1);
}

Test(monitor, rows_have_the_variant_and_the_phase)
{
    static const enum phase phases[] = {PHASE_SETUP, PHASE_VERIFY,  PHASE_WARM_UP,
                                        PHASE_TIMED, PHASE_MEASURE, PHASE_TEARDOWN};
    open_monitor(10, "");
    must(monitor_begin(monitor, "one"));
    for (size_t i = 0; i < COUNT_OF(phases); i++) {
        phase_enter(phases[i]);
        sleep_for(0.2);
    }
    must(monitor_end(monitor));
    read_rows();
    for (size_t i = 0; i < COUNT_OF(phases); i++)
        cr_expect(count_phase("one", phase_name(phases[i])) > 0, "%s", phase_name(phases[i]));
    phase_enter(PHASE_IDLE);
    sleep_for(0.1);
    end_monitor();
    monitor_free(monitor);
    read_rows();
    cr_expect_gt(count_phase("", "idle"), 0);
}

Test(monitor, a_phase_may_have_a_name)
{
    char name[] = "epoch, 1";
    open_monitor(10, "");
    begin_timed();
    wait_for_samples(1);
    must(monitor_phase(monitor, name));
    memset(name, 'x', sizeof name - 1);
    size_t before = monitor_timed_samples(monitor);
    wait_for_samples(before + 3);
    must(monitor_phase(monitor, "epoch, 2"));
    wait_for_samples(before + 6);
    end_monitor();
    monitor_free(monitor);
    read_rows();
    cr_expect_gt(count_phase("one", "timed"), 0);
    cr_expect_gt(count_phase("one", "epoch, 1"), 1);
    cr_expect_gt(count_phase("one", "epoch, 2"), 1);
    cr_expect_eq(monitor_phase(NULL, "x"), STATUS_OK);
}

/* Samples are written when a variant ends. So the file of a killed run has the samples of all variants that
 * were completed. */
Test(monitor, writes_at_the_end_of_each_variant)
{
    open_monitor(10, "");
    cr_assert(access(path, F_OK) != 0, "rows are written before the variant ends");
    begin_timed();
    wait_for_samples(5);
    cr_assert(access(path, F_OK) != 0);
    must(monitor_end(monitor));
    read_rows();
    cr_expect_geq(count_phase("one", "timed"), 5);
    size_t before = rows;
    must(monitor_begin(monitor, "two"));
    wait_for_samples(5);
    end_monitor();
    monitor_free(monitor);
    read_rows();
    cr_expect_geq(rows, before + 5);
    cr_expect_geq(count_phase("two", "timed"), 5);
}

Test(monitor, measures_the_process)
{
    static char block[32 << 20];
    open_monitor(20, "");
    begin_timed();
    memset(block, 1, sizeof block);
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < 0.3;)
        ;
    wait_for_samples(3);
    end_monitor();
    const struct monitor_summary *summary;
    cr_assert_eq(monitor_summaries(monitor, &summary), 1);
    cr_expect_gt(summary->of[MONITOR_CPU_CORES].max, 0.05);
    cr_expect_lt(summary->of[MONITOR_CPU_CORES].sum / (double)summary->of[MONITOR_CPU_CORES].count, 1.5);
    cr_expect_gt(summary->of[MONITOR_RSS_BYTES].max, (double)sizeof block);
    cr_expect_eq(summary->of[MONITOR_POWER_W].count, 0);
    monitor_free(monitor);
    read_rows();
    cr_expect_str_empty(value(text, 1, "cpu_cores"),
                        "the first sample must have no rate, because no sample precedes it");
    for (size_t row = 1; row <= rows; row++) {
        cr_expect_gt(number(text, row, "rss_bytes"), 1 << 20);
        expect_cells(text, row, "gpu_utilisation_percent=;gpu_memory_bytes=;pcie_rx_bytes_per_s=;throttled=");
    }
}

/* ---- The GPU ---- */

static void watch_gpu(uint64_t period_ms, const char *flags, size_t samples)
{
    load_fake_nvml(folder, flags);
    open_monitor(period_ms, GPU);
    begin_timed();
    wait_for_samples(samples);
    end_monitor();
}

Test(monitor, measures_the_gpu)
{
    watch_gpu(50, "", 2);
    const struct monitor_summary *summary;
    cr_assert_eq(monitor_summaries(monitor, &summary), 1);
    cr_expect_str_eq(summary->variant, "one");
    cr_expect_geq(summary->samples, 2);
    cr_expect_eq(summary->of[MONITOR_GPU_UTILISATION_PERCENT].count, summary->samples);
    cr_expect_float_eq(summary->of[MONITOR_POWER_W].sum, 312.5 * (double)summary->samples, 1e-6);
    cr_expect_float_eq(summary->of[MONITOR_POWER_W].max, 312.5, 1e-9);
    monitor_free(monitor);
    read_rows();
    expect_cells(text, rows,
                 "gpu_utilisation_percent=97;gpu_memory_bytes=50754820095;temperature_c=61;power_w=312.5");
    expect_cells(text, rows, "sm_clock_mhz=1410;memory_clock_mhz=3201;throttled=power cap, thermal");
    expect_cells(text, rows, "pcie_rx_bytes_per_s=2500000000;pcie_tx_bytes_per_s=1250000");
}

Test(monitor, a_short_period_omits_the_bus)
{
    watch_gpu(20, "", 3);
    monitor_free(monitor);
    read_rows();
    cr_expect_str_empty(value(text, rows, "pcie_rx_bytes_per_s"));
    cr_expect(number(text, rows, "power_w") == 312.5);
}

Test(monitor, a_gpu_without_readings_has_empty_columns)
{
    watch_gpu(50, "-DMUTE", 2);
    monitor_free(monitor);
    read_rows();
    expect_cells(text, rows,
                 "gpu_utilisation_percent=;gpu_memory_bytes=;temperature_c=;power_w=;sm_clock_mhz=");
    expect_cells(text, rows, "memory_clock_mhz=;pcie_rx_bytes_per_s=;pcie_tx_bytes_per_s=;throttled=");
    cr_expect_gt(number(text, rows, "rss_bytes"), 0);
}

static void expect_warning(const char *words)
{
    char said[4096];
    FILE *stream = cr_get_redirected_stderr();
    fflush(stderr);
    said[fread(said, 1, sizeof said - 1, stream)] = '\0';
    cr_expect(words ? strstr(said, words) != NULL : !strstr(said, "% of a core"), "%s", said);
}

Test(monitor, measures_several_gpus)
{
    load_fake_nvml(folder, "");
    const struct monitor_gpu gpus[] = {{2, "one", GPU}, {3, "other", "0000:99:00.0"}};
    const struct monitor_subject subject = {&env, 0, gpus, 2, NULL, NULL};
    must(monitor_open(path, 120, &subject, &monitor));
    begin_timed();
    wait_for_samples(2);
    end_monitor();
    const struct monitor_summary *summary;
    cr_assert_eq(monitor_summaries(monitor, &summary), 1);
    size_t samples = summary->samples;
    monitor_free(monitor);
    read_rows();
    cr_expect_geq(rows, 2 * samples, "not one row per GPU");
    expect_cells(text, rows - 1, "gpu=2;device=one;power_w=312.5");
    cr_expect_gt(number(text, rows - 1, "rss_bytes"), 0);
    expect_cells(text, rows, "gpu=3;device=other");
    cr_expect_str_empty(value(text, rows, "power_w"), "a row has the values of another GPU");
    cr_expect_str_empty(value(text, rows, "rss_bytes"),
                        "values of processes must be only in the row of the first GPU");
}

Test(monitor, has_the_name_of_a_gpu)
{
    char name[64];
    load_fake_nvml(folder, "");
    cr_expect_eq(nvml_gpu_name(GPU, name, sizeof name), STATUS_OK, "%s", status_text());
    cr_expect_str_eq(name, "Fake GPU");
}

Test(monitor, without_nvml_it_warns_and_continues)
{
    cr_redirect_stderr();
    watch_gpu(10, "-DBROKEN", 2);
    monitor_free(monitor);
    expect_warning("warning: --monitor: the GPU columns stay empty: no NVML: nvmlInit_v2: Driver Not Loaded");
    read_rows();
    cr_expect_str_empty(value(text, rows, "power_w"));
}

/* ---- The monitor's own cost ---- */

Test(monitor, low_cost_gives_no_warning)
{
    cr_redirect_stderr();
    watch_gpu(50, "", MONITOR_SAMPLES_MIN + 1);
    monitor_free(monitor);
    expect_warning(NULL);
}

Test(monitor, high_cost_gives_a_warning)
{
    cr_redirect_stderr();
    watch_gpu(10, "-DBUSY", MONITOR_SAMPLES_MIN + 1);
    monitor_free(monitor);
    expect_warning("% of a core, which may slow down what it watches; use a longer period than 10 ms");
}

Test(monitor, late_samples_give_a_warning)
{
    cr_redirect_stderr();
    watch_gpu(10, "-DSLOW", MONITOR_SAMPLES_MIN + 1);
    monitor_free(monitor);
    expect_warning("use a longer period than 10 ms, or reduce background load");
}

/* ---- Failures ---- */

Test(monitor, a_file_that_cannot_be_written_is_a_failure)
{
    stop(); /* removes the folder */
    open_monitor(10, "");
    begin_timed();
    wait_for_samples(1);
    cr_expect_eq(monitor_end(monitor), STATUS_FAILED);
    cr_expect(strstr(status_text(), "monitor.csv cannot be opened"), "%s", status_text());
    (void)monitor_stop(monitor);
    monitor_free(monitor);
}

static void expect_all_timed_samples(void)
{
    const struct monitor_summary *summary;
    end_monitor();
    cr_assert_eq(monitor_summaries(monitor, &summary), 1);
    size_t samples = summary->samples;
    monitor_free(monitor);
    read_rows();
    cr_expect_eq(count_phase("one", "timed"), samples, "not each sample once");
}

Test(monitor, keeps_samples_until_they_can_be_written)
{
    open_monitor(10, "");
    begin_timed();
    wait_for_samples(3);
    cr_assert(mkdir(path, 0777) == 0);
    cr_expect_eq(monitor_flush(monitor), STATUS_FAILED);
    cr_assert(rmdir(path) == 0);
    wait_for_samples(6);
    expect_all_timed_samples();
}

Test(monitor, try_flush_waits_briefly_for_a_lock)
{
    open_monitor(10, "");
    begin_timed();
    wait_for_samples(3);
    must(monitor_try_flush(monitor));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    wait_for_samples(6);
    double begin_s = timer_now_s();
    cr_expect_eq(monitor_try_flush(monitor), STATUS_FAILED);
    cr_expect_lt(timer_now_s() - begin_s, LOCK_TIMEOUT_S / 2);
    cr_expect(isinf(lock_set_limit(INFINITY)), "the time limit of other locks has changed");
    close(fd);
    expect_all_timed_samples();
}

Test(monitor, a_file_of_other_rows_is_refused_beforehand)
{
    cr_expect_eq(monitor_check(path), STATUS_OK, "%s", status_text());
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs("schema,time_utc,variant\n", file) >= 0 && fclose(file) == 0);
    cr_expect_eq(monitor_check(path), STATUS_USAGE);
    cr_expect(strstr(status_text(), "has other columns"), "%s", status_text());
    cr_expect(strstr(status_text(), "not 'host'"), "%s", status_text());
}

Test(monitor, a_null_monitor_does_nothing)
{
    const struct monitor_summary *summaries;
    cr_expect_eq(monitor_begin(NULL, "one"), STATUS_OK);
    cr_expect_eq(monitor_timed_samples(NULL), 0);
    cr_expect_eq(monitor_end(NULL), STATUS_OK);
    cr_expect_eq(monitor_stop(NULL), STATUS_OK);
    cr_expect_eq(monitor_summaries(NULL, &summaries), 0);
    monitor_free(NULL);
}

/* ---- Choosing a GPU ---- */

Test(monitor, the_gpu_with_most_free_memory_is_chosen)
{
    static const int64_t equal[] = {7, 7, 7}, last[] = {1, 2, 150754820096}, tie[] = {3, 9, 5, 9};
    cr_expect_eq(gpu_most_free(equal, 3), 0);
    cr_expect_eq(gpu_most_free(last, 3), 2);
    cr_expect_eq(gpu_most_free(tie, 4), 1);
    cr_expect_eq(gpu_most_free(last, 1), 0);
}
