#include "run/report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "core/text.h"
#include "machine/comm.h"
#include "machine/host.h"
#include "machine/nvml.h"

const char *const format_names[] = {"table", "csv", "json", NULL};

enum status format_check(int format)
{
#ifndef HAVE_JANSSON
    if (format == FORMAT_JSON)
        return status_option(STATUS_UNAVAILABLE, "format",
                             " json: not built, because jansson was not found; use --format csv");
#endif
    (void)format;
    return STATUS_OK;
}

enum status format_flush(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return STATUS_OK;
    return status_set(STATUS_FAILED, "stdout could not be written: %s", strerror(errno));
}

/* ---- JSON ---- */

#ifdef HAVE_JANSSON
/* Converts a text to JSON. A text that is not valid UTF-8, such as some file names, is escaped, because JSON
 * must be UTF-8. */
static json_t *json_text(const char *text)
{
    char printable[4096];
    json_t *string = json_string(text);
    return string ? string : json_string(text_printable(text, printable, sizeof printable));
}

/* Converts the value of column `index` to JSON. Numbers have the digits that CSV shows. A word in a column of
 * numbers may be a number too. */
static json_t *json_value(const struct row *row, size_t index)
{
    const struct value *value = &row->values[index];
    const enum value_type type = row->columns[index].type;
    char buffer[VALUE_TEXT_MAX], *end;
    const char *text = row_cell(row, index, buffer);
    if (value->type == VALUE_ABSENT)
        return json_null();
    if (value->type == VALUE_FLAG)
        return json_boolean(value->flag);
    if (type == VALUE_WORD || type == VALUE_HASH)
        return json_text(text);
    errno = 0;
    long long whole = strtoll(text, &end, 10);
    if (*end == '\0') /* integers that need more than 63 bits become strings, to stay exact */
        return errno == 0 ? json_integer(whole) : json_string(text);
    double real = strtod(text, &end);
    return *end == '\0' && isfinite(real) ? json_real(real) : json_string(text);
}

static enum status print_json(json_t *document)
{
    int printed = json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(document);
    putchar('\n');
    return printed == 0 ? STATUS_OK
                        : status_set(STATUS_FAILED, "the JSON document could not be written to stdout");
}

static json_t *json_row(const struct row *row)
{
    json_t *object = json_object();
    for (size_t i = 0; i < row->count; i++)
        json_object_set_new(object, row->columns[i].name, json_value(row, i));
    return object;
}
#endif

/* ---- Rows ---- */

/* Prints one row as CSV (header and line) or as a JSON object. */
static enum status format_row(const struct row *row, int format)
{
    TRY(format_check(format));
#ifdef HAVE_JANSSON
    if (format == FORMAT_JSON)
        return print_json(json_row(row));
#endif
    csv_write_header(stdout, row);
    csv_write_row(stdout, row);
    return STATUS_OK;
}

void rows_begin(struct row_printer *printer, int format)
{
    *printer = (struct row_printer){.format = format};
#ifdef HAVE_JANSSON
    if (format == FORMAT_JSON)
        printer->json = json_array();
#endif
}

void rows_add(struct row_printer *printer, const struct row *row)
{
    printer->failed |= row->failed;
    if (row->failed)
        return;
    if (printer->format == FORMAT_CSV) {
        if (printer->count == 0)
            csv_write_header(stdout, row);
        csv_write_row(stdout, row);
    }
#ifdef HAVE_JANSSON
    if (printer->format == FORMAT_JSON)
        json_array_append_new(printer->json, json_row(row));
#endif
    printer->count++;
}

enum status rows_end(struct row_printer *printer, const char *name, const struct row *about)
{
    const struct row worst = {.failed = printer->failed || (about && about->failed)};
    enum status printed = STATUS_OK;
#ifdef HAVE_JANSSON
    if (printer->format == FORMAT_JSON) {
        json_t *document = printer->json;
        if (about) {
            document = json_object();
            json_object_set_new(document, name, json_row(about));
            json_object_set_new(document, "rows", printer->json);
        }
        printed = print_json(document);
    }
#else
    (void)name;
#endif
    *printer = (struct row_printer){0};
    TRY(row_check(&worst));
    return printed;
}

/* ---- Values ---- */

const char *format_time(double time_s, char *text, size_t size)
{
    static const struct {
        double scale;
        const char *unit;
    } units[] = {{1, "s"}, {1e3, "ms"}, {1e6, "us"}, {1e9, "ns"}};
    size_t i = 0;
    while (i + 1 < COUNT_OF(units) && time_s * units[i].scale < 1)
        i++;
    double value = time_s * units[i].scale;
    snprintf(text, size, "%.*f %s", value < 10 ? 3 : value < 100 ? 2 : 1, value, units[i].unit);
    return text;
}

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
        row_positive(row, fields[i].column, fields[i].value);
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

static void env_row(int device, struct row *row)
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
    row_positive(row, "max_clock_hz", env.max_clock_hz);
    row_text(row, "affinity", env.affinity);
    row_count(row, "memory_bytes", env.memory_bytes);
    row_count(row, "memory_available_bytes", env.memory_available_bytes);
    gpu_fields(row, device);
}

enum status report_env(int device, int format)
{
    CLOSED_BY(row_free) struct row row = {0};
    env_row(device, &row);
    TRY(row_check(&row));
    if (format != FORMAT_TABLE)
        return format_row(&row, format);
    for (size_t i = 0; i < row.count; i++)
        if (row.values[i].type != VALUE_ABSENT) {
            char buffer[VALUE_TEXT_MAX];
            printf("%-26s ", row.columns[i].name);
            text_print(stdout, row_cell(&row, i, buffer));
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
    row_flag(row, "available", available);
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
    struct row_printer printer;
    TRY(format_check(settings->format));
    rows_begin(&printer, settings->format);
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        CLOSED_BY(row_free) struct row row = {0};
        if (!is_listed(settings, entry))
            continue;
        describe_variant(entry, variant_available(entry, resources) == STATUS_OK, &row);
        rows_add(&printer, &row);
    }
    return rows_end(&printer, NULL, NULL);
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
static void print_caption(const struct report *report, const struct row *row)
{
    const struct settings *settings = report->settings;
    const struct workload *workload = settings->workload;
    printf("%s:", workload->name);
    print_options(settings);
    if (comm_size() > 1)
        printf(" on %d ranks", comm_size());
    if (comm_size() > 1 && settings->axes.count == 0 &&
        !workload->ranks.joint) /* in a sweep, the work differs from line to line */
        printf(", %s scaling: %.0f %s per run", settings_scaling(settings), row_get_real(row, "items"),
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

/* Formats a number of the row, multiplied by `scale`; "-" if the column has no value. Returns `text`. */
static const char *number_text(const struct row *row, const char *column, const char *format, double scale,
                               char text[32])
{
    double value = row_get_real(row, column);
    snprintf(text, 32, isnan(value) ? "-" : format, scale * value);
    return text;
}

/* Formats a column of the row as CSV has it; "-" if it has no value. */
static const char *shown_text(const struct row *row, const char *column, char buffer[VALUE_TEXT_MAX])
{
    const char *text = row_value(row, column) ? row_cell(row, row_find(row, column), buffer) : "";
    return *text ? text : "-";
}

/* Formats the error of the median, with a mark if the median did not settle. Workloads whose runs are
 * epochs have no mark, because an epoch is not repeated. */
static const char *error_text(struct report *report, const struct row *row, char text[32])
{
    const struct value *settled = row_value(row, "settled");
    bool unsettled = settled && !settled->flag;
    double error = row_get_real(row, "median_error");
    report->unsettled |= unsettled;
    if (isnan(error))
        snprintf(text, 32, "-%s", unsettled ? "*" : "");
    else
        snprintf(text, 32, "%.*f%%%s", error < 1 ? 2 : 0, 100 * error, unsettled ? "*" : "");
    return text;
}

/* Formats a time per item. */
static const char *item_time_text(const struct row *row, const char *column, char text[32])
{
    double time_s = row_get_real(row, column) / row_get_real(row, "items");
    if (!isfinite(time_s))
        return "-";
    return format_time(time_s, text, 32);
}

/* Prints the line of a result. If its results are wrong, the line has no time. */
static void print_line(struct report *report, const struct row *row)
{
    const struct workload *workload = report->settings->workload;
    const struct value *wrong = row_value(row, "wrong");
    const char *colour = !report->coloured || !wrong ? "" : wrong->integer ? "\033[31m" : "\033[32m";
    const struct axes *axes = &report->settings->axes;
    double per_s = row_get_real(row, "items_per_s"), speedup = row_get_real(row, "speedup");
    char text[32], roofline[64] = "-";
    if (row_value(row, "roofline_share"))
        snprintf(roofline, sizeof roofline, "%.2f%% %s", 100 * row_get_real(row, "roofline_share"),
                 row_get_word(row, "bound"));
    printf("%-18s", row_get_word(row, "variant"));
    for (size_t i = 0; i < axes->count; i++)
        printf(" %*s", axes_width(axes, i), axes_text(axes, i, report->settings->combination));
    printf(" %12s", item_time_text(row, "time_median_s", text));
    printf(" %8s", error_text(report, row, text));
    if (workload->shows_p99)
        printf(" %12s", item_time_text(row, "time_p99_s", text));
    printf(" %14s", number_text(row, "items_per_s", per_s < 1000 ? "%.2f" : "%.0f", 1, text));
    printf(" %9s", number_text(row, "speedup", speedup < 100 ? "%.2fx" : "%.0fx", 1, text));
    printf(" %15s", roofline);
    printf(" %8s", shown_text(row, workload->epochs.more ? "epoch" : "samples", text));
    printf(" %s%8s%s", colour, shown_text(row, "wrong", text), *colour ? "\033[0m" : "");
    for (size_t i = 0; workload->shown && workload->shown[i]; i++)
        printf(" %10s", shown_text(row, workload->shown[i], text));
    if (comm_size() > 1) {
        printf(" %10s", number_text(row, "imbalance", "%.3f", 1, text));
        printf(" %10s", number_text(row, "efficiency", "%.3f", 1, text));
    }
    if (shows_stall(report->settings))
        printf(" %9s", number_text(row, "stall_share", "%.2f%%", 100, text));
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

enum status report_add(struct report *report, const struct row *rows, size_t count)
{
    const struct row *last = &rows[count - 1];
    bool timed = row_value(last, "time_median_s");
    if (report->settings->format == FORMAT_TABLE) {
        if (report->lines++ == 0)
            print_caption(report, last);
        print_line(report, last);
    }
    report->rows += timed;
    for (size_t i = 0; timed && i < count && report->settings->format != FORMAT_TABLE; i++)
        rows_add(&report->printer, &rows[i]);
    return format_flush();
}

/* Ends the output of rows. In JSON, the environment comes before them. */
static enum status end_rows(struct report *report)
{
    CLOSED_BY(row_free) struct row row = {0};
    if (report->settings->format == FORMAT_JSON)
        env_row(report->settings->resources.device, &row);
    return rows_end(&report->printer, "environment", &row);
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
