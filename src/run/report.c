#include "run/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "machine/comm.h"
#include "machine/env.h"
#include "machine/nvml.h"
#include "run/formats.h"

struct report {
    const struct settings *settings;
    size_t lines;         /* number of lines printed so far */
    size_t rows;          /* number of results with rows */
    const char *baseline; /* the baseline of speed-ups; NULL: none */
    bool unsettled;       /* a line is marked because its median did not settle */
    bool coloured;
    struct row_printer printer; /* for CSV and JSON */
};

/* ---- The environment ---- */

/* Adds a value. A negative value is unknown and becomes "". */
static void row_known(struct row *row, const char *column, double value)
{
    row_real(row, column, value < 0 ? NAN : value);
}

static void gpu_peak_fields(const struct machine_peaks *peaks, struct row *row)
{
    const struct {
        const char *column;
        double value;
    } fields[] = {{"gpu_peak_bytes_per_s", peaks->memory_bytes_per_s},
                  {"gpu_peak_fp32_flops", peaks->flops_per_s[UNIT_FP32]},
                  {"gpu_peak_tf32_flops", peaks->flops_per_s[UNIT_TF32]},
                  {"gpu_peak_half_flops", peaks->flops_per_s[UNIT_HALF]},
                  {"gpu_peak_bus_bytes_per_s", peaks->bus_bytes_per_s},
                  {"gpu_cache_bytes", peaks->cache_bytes},
                  {"gpu_chip_bytes", peaks->chip_bytes}};
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        row_known(row, fields[i].column, fields[i].value > 0 ? fields[i].value : -1);
}

static void gpu_fields(struct row *row, int number)
{
    struct device_info device;
    struct gpu_state state;
    char text[128];
    nvml_driver_version(text, sizeof text);
    row_text(row, "driver", text);
    if (device_describe(number, &device) != STATUS_OK) {
        row_text(row, "gpu", "");
        row_text(row, "gpu_unavailable", status_text());
        return;
    }
    row_text(row, "gpu", device.name);
    row_text(row, "gpu_pci_bus_id", device.pci_bus_id);
    row_text(row, "gpu_architecture", device.architecture);
    row_count(row, "gpu_multiprocessors", (unsigned long long)device.multiprocessors);
    row_count(row, "gpu_memory_bytes", device.memory_bytes);
    row_count(row, "gpu_memory_free_bytes", device.memory_free_bytes);
    gpu_peak_fields(&device.peaks, row);
    row_text(row, "cuda", device.runtime);
    row_text(row, "driver_cuda", device.driver_cuda);
    if (nvml_gpu_state(device.pci_bus_id, &state) != STATUS_OK)
        return;
    row_known(row, "gpu_sm_clock_mhz", state.sm_clock_mhz);
    row_known(row, "gpu_sm_clock_max_mhz", state.sm_clock_max_mhz);
    row_known(row, "gpu_memory_clock_mhz", state.memory_clock_mhz);
    row_known(row, "gpu_temperature_c", state.temperature_c);
    row_known(row, "gpu_power_w", state.power_w);
    row_known(row, "gpu_utilisation_percent", state.utilisation_percent);
    row_text(row, "gpu_throttled", nvml_throttle_words(state.throttle_reasons, text, sizeof text));
}

static enum status env_row(int device, struct row *row)
{
    struct env env;
    env_capture(&env);
    row_text(row, "time_utc", env.time_utc);
    row_text(row, "host", env.host);
    row_text(row, "job_id", env.job_id);
    row_text(row, "revision", env.revision);
    row_text(row, "compiler", env.compiler);
    row_text(row, "kernel", env.kernel);
    row_text(row, "cpu", env.cpu_model);
    row_text(row, "simd", env.simd);
    row_count(row, "cores", (unsigned long long)env.cores);
    row_count(row, "hardware_threads", (unsigned long long)env.threads);
    row_count(row, "allowed_threads", (unsigned long long)env.allowed_threads);
    row_count(row, "allowed_cores", (unsigned long long)env.allowed_cores);
    row_known(row, "max_clock_hz", env.max_clock_hz > 0 ? env.max_clock_hz : -1);
    row_text(row, "affinity", env.affinity);
    row_count(row, "memory_bytes", env.memory_bytes);
    row_count(row, "memory_available_bytes", env.memory_available_bytes);
    gpu_fields(row, device);
    return row_check(row);
}

enum status report_env(int device, int format)
{
    CLOSED_BY(row_free) struct row row = {0};
    TRY(env_row(device, &row));
    if (format != FORMAT_TABLE)
        return format_row(&row, format);
    for (size_t i = 0; i < row.count; i++)
        if (*row.fields[i].text) {
            printf("%-26s ", row.fields[i].column);
            text_print(stdout, row.fields[i].text);
            putchar('\n');
        }
    return STATUS_OK;
}

/* ---- The list of variants ---- */

/* Lists the variants that are slower if the build has no code for the device's own architecture. */
static void names_of_own_architecture(char *names, size_t size)
{
    names[0] = '\0';
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant *variant = variant_table[i].variant;
        if (variant && variant->wants_own_architecture)
            text_join(names, size, ", ", "%s", variant_table[i].name);
    }
}

void report_compiled_at_load(const struct device_info *device)
{
    char names[256];
    if (!device->compiled_at_load)
        return;
    names_of_own_architecture(names, sizeof names);
    status_warn("this build has no code for %s (%s): the driver compiles the CUDA kernels when they are "
                "loaded, which delays their first run%s%s%s; build for this GPU with: make CUDA_ARCHS=%s",
                device->name, device->architecture, *names ? ", and " : "", names,
                *names ? " stay slower" : "", device->architecture + strlen("sm_"));
}

/* Describes one variant in machine-readable form. Errors are recorded in `row`. */
static void describe_variant(const struct variant_entry *entry, bool available, struct row *row)
{
    row_text(row, "workload", entry->workload);
    row_text(row, "variant", entry->name);
    row_text(row, "platform", entry->variant ? entry->variant->platform : "");
    row_add(row, "available", available ? "yes" : "no", FIELD_FLAG);
    row_text(row, "reason", available ? "" : status_text());
    row_text(row, "summary", entry->summary);
}

static bool is_listed(const struct settings *settings, const struct variant_entry *entry)
{
    for (size_t i = 0; i < settings->variant_count; i++)
        if (settings->variants[i] == entry)
            return true;
    return settings->variant_count == 0 &&
           (!settings->workload_name || strcmp(settings->workload_name, entry->workload) == 0);
}

/* Lists variants as CSV or JSON: one row per variant. */
static enum status list_rows(const struct resources *resources, const struct settings *settings)
{
    enum status status = STATUS_OK;
    struct row_printer printer;
    TRY(format_check(settings->format));
    rows_begin(&printer, settings->format);
    for (size_t i = 0; status == STATUS_OK && i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        CLOSED_BY(row_free) struct row row = {0};
        if (!is_listed(settings, entry))
            continue;
        describe_variant(entry, variant_available(entry, resources) == STATUS_OK, &row);
        status = row_check(&row);
        if (status == STATUS_OK)
            rows_add(&printer, &row);
    }
    enum status printed = rows_end(&printer, NULL, NULL);
    return status == STATUS_OK ? printed : status;
}

enum status report_list(const struct resources *resources, const struct settings *settings)
{
    const char *workload = "";
    if (settings->format != FORMAT_TABLE)
        return list_rows(resources, settings);
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        if (!is_listed(settings, entry))
            continue;
        if (strcmp(workload, entry->workload) != 0) {
            workload = entry->workload;
            printf("%s: %s\n", workload, workload_find(workload)->summary);
        }
        bool available = variant_available(entry, resources) == STATUS_OK;
        printf("  %-18s %s%s\n", entry->name,
               available ? "available" : "unavailable: ", available ? "" : status_text());
        if (settings->verbose)
            printf("  %-18s %s\n", "", entry->summary);
    }
    struct device_info device;
    if (device_describe(resources->device, &device) == STATUS_OK)
        report_compiled_at_load(&device);
    return STATUS_OK;
}

/* ---- The table ---- */

/* Returns whether the table has the column "stall". With several ranks, only the CSV rows have it, as
 * stall_share. */
static bool shows_stall(const struct settings *settings)
{
    return comm_size() == 1 && settings_compute(settings);
}

/* Prints all candidates for the baseline, because the data decides which of them can run. */
static void print_missing_baseline(const struct workload *workload)
{
    printf("; speed-up is unknown without ");
    for (size_t i = 0; workload->baselines[i]; i++)
        printf("%s%s", i ? " or " : "", workload->baselines[i]);
}

/* Prints those options that differ from their defaults, so that the table can be understood without the
 * command line. They include choices without a column, such as --recipe, because they replace defaults. An
 * option that was not given and has no default gets its value from the data, and is left out. */
static void print_options(const struct settings *settings)
{
    const struct workload *workload = settings->workload;
    bool any = false;
    for (size_t i = 0; i < workload->option_count; i++) {
        const struct option_spec *spec = &workload->options[i];
        char text[4096];
        options_text(spec, settings->parameters, text, sizeof text);
        const bool recipe = spec->column == COLUMN_NONE && spec->kind == OPTION_CHOICE;
        bool known = spec->fallback || options_given(&settings->options, spec->name);
        if ((spec->column == COLUMN_NONE && !recipe) || !known || !*text ||
            !settings_uses(settings, spec->name) || axes_find(&settings->axes, spec->name) ||
            options_is_default(&settings->options, spec, settings->parameters))
            continue;
        printf(" %s ", spec->name);
        text_print(stdout, text);
        any = true;
    }
    if (!any)
        fputs(" default options", stdout);
}

/* Prints the caption and the header of the table. Workloads with epochs have one line per epoch, with its
 * number; other workloads have the number of samples. */
static void print_caption(const struct report *report, const struct result *result)
{
    const struct settings *settings = report->settings;
    const struct workload *workload = settings->workload;
    printf("%s:", workload->name);
    print_options(settings);
    if (comm_size() > 1)
        printf(" on %d ranks", comm_size());
    if (comm_size() > 1 && settings->axes.count == 0 &&
        !workload->ranks.joint) /* in a sweep, the work differs from line to line */
        printf(", %s scaling: %.0f %s per run", settings_scaling(settings), result->work.items,
               workload->item);
    if (report->baseline)
        printf("; speed-up over %s", report->baseline);
    else
        print_missing_baseline(workload);
    printf("\n\n%-18s", "variant");
    for (size_t i = 0; i < settings->axes.count; i++)
        printf(" %*s", axes_width(&settings->axes, i), settings->axes.at[i].spec->name);
    printf(" %12s %8s", "time/item", "+-95%");
    if (workload->shows_p99)
        printf(" %12s", "p99/item");
    printf(" %14s %9s %15s %8s %8s", "items/s", "speed-up", "roofline",
           workload->epochs.more ? "epoch" : "samples", "#wrong");
    for (size_t i = 0; workload->shown && workload->shown[i]; i++)
        printf(" %10s", workload->shown[i]);
    if (comm_size() > 1)
        printf(" %10s %10s", "imbalance", "efficiency");
    if (shows_stall(settings))
        printf(" %9s", "stall");
    putchar('\n');
}

/* Prints imbalance and efficiency. */
static void print_together(const struct result *result)
{
    char imbalance[32] = "-", efficiency[32] = "-";
    if (result->imbalance > 0)
        snprintf(imbalance, sizeof imbalance, "%.3f", result->imbalance);
    if (result->efficiency > 0)
        snprintf(efficiency, sizeof efficiency, "%.3f", result->efficiency);
    printf(" %10s %10s", imbalance, efficiency);
}

/* Returns a column of the last row, which covers all ranks; "-" if it has no value. */
static const char *shown_text(const char *column, const struct result *result)
{
    const char *text = result->row_count ? row_get(&result->rows[result->row_count - 1], column) : NULL;
    return text && *text ? text : "-";
}

static void print_stall(const struct result *result)
{
    char stall[32] = "-";
    if (result->stall_share >= 0)
        snprintf(stall, sizeof stall, "%.2f%%", 100 * result->stall_share);
    printf(" %9s", stall);
}

/* Formats the error of the median, with a mark if the median did not settle. Workloads whose runs are
 * epochs have no mark, because an epoch is not repeated. */
static void error_text(struct report *report, const struct result *result, char *text, size_t size)
{
    double error = result->bench.time.median_error;
    bool unsettled = !report->settings->workload->epochs.more && !result->bench.settled;
    const char *mark = unsettled ? "*" : "";
    report->unsettled |= unsettled;
    if (isfinite(error))
        snprintf(text, size, "%.*f%%%s", error < 1 ? 2 : 0, 100 * error, mark);
    else
        snprintf(text, size, "-%s", mark);
}

/* Prints the line of a result. If its results are wrong, the line has no time. */
static void print_line(struct report *report, const struct result *result)
{
    char time[32] = "-", error[32] = "-", p99[32] = "-", rate[32] = "-", speed_up[32] = "-",
         roofline[32] = "-", samples[32] = "", wrong[32] = "-";
    if (result->row_count) {
        const struct stats *stats = &result->bench.time;
        double items = result->work.items, per_s = result_rate(report->settings, result, items);
        error_text(report, result, error, sizeof error);
        if (items > 0) {
            format_time(stats->median / items, time, sizeof time);
            format_time(stats->p99 / items, p99, sizeof p99);
        }
        if (per_s > 0)
            snprintf(rate, sizeof rate, "%.*f", per_s < 1000 ? 2 : 0, per_s);
        if (result->speedup > 0)
            snprintf(speed_up, sizeof speed_up, "%.*fx", result->speedup < 100 ? 2 : 0, result->speedup);
        if (result->roofline.floor_s > 0)
            snprintf(roofline, sizeof roofline, "%.2f%% %s", 100 * result->roofline.floor_s / stats->median,
                     roofline_bound_name(result->roofline.bound));
    }
    const struct workload *workload = report->settings->workload;
    bool checked = result->verified || (result->row_count && workload->checks.every_run);
    if (checked)
        snprintf(wrong, sizeof wrong, "%llu", (unsigned long long)result->wrong);
    snprintf(samples, sizeof samples, "%zu", result->bench.count);
    const char *colour = !report->coloured || !checked ? "" : result->wrong ? "\033[31m" : "\033[32m";
    const struct axes *axes = &report->settings->axes;
    printf("%-18s", result->variant);
    for (size_t i = 0; i < axes->count; i++)
        printf(" %*s", axes_width(axes, i), axes_text(axes, i, report->settings->combination));
    printf(" %12s %8s", time, error);
    if (workload->shows_p99)
        printf(" %12s", p99);
    printf(" %14s %9s %15s %8s %s%8s%s", rate, speed_up, roofline,
           workload->epochs.more ? shown_text("epoch", result) : samples, colour, wrong,
           *colour ? "\033[0m" : "");
    for (size_t i = 0; workload->shown && workload->shown[i]; i++)
        printf(" %10s", shown_text(workload->shown[i], result));
    if (comm_size() > 1)
        print_together(result);
    if (shows_stall(report->settings))
        print_stall(result);
    putchar('\n');
    fflush(stdout); /* show each line immediately, because an epoch can take long */
}

/* ---- The monitor ---- */

static const struct {
    const char *name;
    double unit;
    int decimals;
} monitored[MONITOR_VALUES] = {
    [MONITOR_GPU_UTILISATION_PERCENT] = {"GPU %", 1, 0}, [MONITOR_GPU_MEMORY_BYTES] = {"GPU GB", 1e9, 2},
    [MONITOR_TEMPERATURE_C] = {"deg C", 1, 0},           [MONITOR_POWER_W] = {"W", 1, 0},
    [MONITOR_SM_CLOCK_MHZ] = {"SM MHz", 1, 0},           [MONITOR_MEMORY_CLOCK_MHZ] = {"mem MHz", 1, 0},
    [MONITOR_PCIE_RX_BYTES_PER_S] = {"rx GB/s", 1e9, 2}, [MONITOR_PCIE_TX_BYTES_PER_S] = {"tx GB/s", 1e9, 2},
    [MONITOR_CPU_CORES] = {"CPU cores", 1, 2},           [MONITOR_RSS_BYTES] = {"RSS GB", 1e9, 3},
    [MONITOR_READ_BYTES_PER_S] = {"read GB/s", 1e9, 3},  [MONITOR_WRITE_BYTES_PER_S] = {"wr. GB/s", 1e9, 3},
};

/* Prints the line of means, or the line of maxima, of a variant. Omits columns that no variant has a value
 * for. */
static void print_monitored(const struct monitor_summary *summary, const bool shown[], bool maxima)
{
    printf("%-18s %8s", maxima ? "" : summary->variant, maxima ? "max" : "mean");
    for (size_t i = 0; i < MONITOR_VALUES; i++) {
        char text[32] = "-";
        if (!shown[i])
            continue;
        if (summary->of[i].count) {
            double value = maxima ? summary->of[i].max : summary->of[i].sum / (double)summary->of[i].count;
            snprintf(text, sizeof text, "%.*f", monitored[i].decimals, value / monitored[i].unit);
        }
        printf(" %9s", text);
    }
    if (maxima)
        printf("\n");
    else
        printf(" %8zu\n", summary->samples);
}

/* If a line is marked because its median did not settle, prints the meaning of the mark, once. */
static void explain_mark(struct report *report)
{
    if (report->unsettled)
        puts("* not settled: the error of the median is above --max-error");
    report->unsettled = false;
}

enum status report_monitor(struct report *report, const struct monitor *monitor)
{
    const struct monitor_summary *summaries;
    size_t count = monitor_summaries(monitor, &summaries), samples = 0;
    bool shown[MONITOR_VALUES] = {false};
    for (size_t v = 0; v < count; v++) {
        samples += summaries[v].samples;
        for (size_t i = 0; i < MONITOR_VALUES; i++)
            shown[i] |= summaries[v].of[i].count > 0;
    }
    explain_mark(report);
    if (samples == 0)
        return STATUS_OK;
    printf("\n%-18s %8s", "while timed", "");
    for (size_t i = 0; i < MONITOR_VALUES; i++)
        if (shown[i])
            printf(" %9s", monitored[i].name);
    printf(" %8s\n", "samples");
    for (size_t v = 0; v < count; v++)
        for (int maxima = 0; summaries[v].samples && maxima < 2; maxima++)
            print_monitored(&summaries[v], shown, maxima);
    return format_flush();
}

/* ---- The report ---- */

double result_rate(const struct settings *settings, const struct result *result, double amount)
{
    return settings->workload->ranks.joint && comm_size() == 1 ? NAN : amount / result->bench.time.median;
}

enum status report_begin(const struct settings *settings, const char *baseline, struct report **report)
{
    *report = calloc(1, sizeof **report);
    TRY(ALLOCATED(*report, "out of memory"));
    (*report)->settings = settings;
    (*report)->baseline = baseline;
    (*report)->coloured = status_coloured(STDOUT_FILENO);
    status_show_caveats(settings->verbose);
    if (settings->format == FORMAT_TABLE && status_shows_progress() && isatty(STDOUT_FILENO))
        status_hold();
    rows_begin(&(*report)->printer, settings->format);
    return STATUS_OK;
}

enum status report_add(struct report *report, const struct result *result)
{
    if (report->settings->format == FORMAT_TABLE) {
        if (report->lines++ == 0)
            print_caption(report, result);
        print_line(report, result);
    }
    report->rows += result->row_count > 0;
    for (size_t i = 0; i < result->row_count && report->settings->format != FORMAT_TABLE; i++)
        rows_add(&report->printer, &result->rows[i]);
    return format_flush();
}

/* Ends the output of rows. In JSON, the environment comes before them. */
static enum status end_rows(struct report *report)
{
    CLOSED_BY(row_free) struct row row = {0};
    enum status status = STATUS_OK;
    if (report->settings->format == FORMAT_JSON)
        status = env_row(report->settings->resources.device, &row);
    enum status printed = rows_end(&report->printer, "environment", &row);
    return status == STATUS_OK ? printed : status;
}

enum status report_end(struct report *report)
{
    explain_mark(report);
    enum status status = end_rows(report), flushed = format_flush();
    status_release();
    status_summarise_caveats(report->rows);
    free(report);
    return status == STATUS_OK ? flushed : status;
}
