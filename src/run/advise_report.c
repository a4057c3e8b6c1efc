/* The output of `advise`: a table and the verdict or, with --format csv or json, rows. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "core/text.h"
#include "data/remote.h"
#include "run/advise_parts.h"
#include "run/formats.h"

/* Writes a number with three digits, or "unknown". */
static const char *cell(double value, char *text, size_t size)
{
    if (isnan(value))
        snprintf(text, size, "unknown");
    else
        snprintf(text, size, "%.3g", value);
    return text;
}

static void print_caption(const struct advise_options *options, const struct advise_set *set,
                          const struct advice_question *question)
{
    char shown[512];
    remote_shown(options->data, shown, sizeof shown);
    fputs("advise: data ", stdout);
    text_print(stdout, shown);
    printf(", %" PRIu64 " samples, %.3g GB", set->samples, 1e-9 * (double)set->bytes);
    if (set->measured_files < set->files)
        printf(" (measured: %" PRIu32 " of %" PRIu32 " shards, %.3g GB)", set->measured_files, set->files,
               1e-9 * (double)set->measured_bytes);
    printf("; images %" PRIu32 " x %" PRIu32 "; batch %" PRIu64 "; a step takes %.4g ms", question->res,
           question->res, question->batch, 1e3 * question->step_s);
    puts(question->estimated ? " (waits are computed, because there is no GPU)\n" : "\n");
}

static void print_table(const struct advice *advice, size_t count)
{
    char texts[5][32];
    printf("%-22s %-12s %10s %8s %12s %8s %10s %14s\n", "way", "variant", "images/s", "waits/%", "hours/1e6",
           "disk/GB", "memory/GB", "J/1000 images");
    for (size_t i = 0; i < count; i++) {
        const struct advice *row = &advice[i];
        printf("%-22s %-12s ", row->name, row->variant);
        if (!row->measured) {
            fputs("not possible: ", stdout);
            text_print(stdout, row->reason);
            putchar('\n');
            continue;
        }
        printf("%10.0f %8s %12s %8s %10s %14s\n", row->images_per_s,
               cell(100 * row->stall_share, texts[0], sizeof texts[0]),
               cell(1e6 / 3600 / row->reached_per_s, texts[1], sizeof texts[0]),
               cell(1e-9 * row->disk_bytes, texts[2], sizeof texts[0]),
               cell(1e-9 * row->memory_bytes, texts[3], sizeof texts[0]),
               cell(1e3 * row->joules_per_image, texts[4], sizeof texts[0]));
    }
}

static enum status print_rows(int format, const struct advice_question *question, const char *verdict,
                              const struct advice *advice, size_t count, size_t best)
{
    struct row_printer printer;
    enum status status = STATUS_OK;
    rows_begin(&printer, format);
    for (size_t i = 0; status == STATUS_OK && i < count; i++) {
        CLOSED_BY(row_free) struct row row = {0};
        row_text(&row, "way", advice[i].name);
        row_text(&row, "variant", advice[i].variant);
        row_count(&row, "best", i == best);
        row_real(&row, "images_per_s", advice[i].images_per_s);
        row_real(&row, "stall_share", advice[i].stall_share);
        row_real(&row, "reached_per_s", advice[i].reached_per_s);
        row_real(&row, "disk_bytes", advice[i].disk_bytes);
        row_real(&row, "memory_bytes", advice[i].memory_bytes);
        row_real(&row, "joules_per_image", advice[i].joules_per_image);
        row_text(&row, "reason", advice[i].reason);
        status = row_check(&row);
        if (status == STATUS_OK)
            rows_add(&printer, &row);
    }
    CLOSED_BY(row_free) struct row about = {0};
    row_text(&about, "verdict", verdict);
    row_count(&about, "batch", question->batch);
    row_real(&about, "step_s", question->step_s);
    row_count(&about, "res", question->res);
    enum status printed = rows_end(&printer, "advice", &about);
    return status == STATUS_OK ? printed : status;
}

enum status advise_print(const struct advise_options *options, const struct advise_set *set,
                         const struct advice_question *question, const struct advice *advice, size_t count)
{
    char verdict[2048];
    size_t best = advise_best(advice, count);
    advise_verdict(question, advice, count, best, verdict, sizeof verdict);
    if (options->format != FORMAT_TABLE)
        TRY(print_rows(options->format, question, verdict, advice, count, best));
    else {
        print_caption(options, set, question);
        print_table(advice, count);
    }
    if (best == count)
        return status_set(STATUS_FAILED, "nothing could be measured; the reasons are in the table");
    if (options->format == FORMAT_TABLE)
        printf("\n%s\n", verdict);
    return format_flush();
}
