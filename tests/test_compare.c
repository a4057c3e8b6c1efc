/* Tests fdsl-bench compare on the command line: which rows match, verdicts, refusals, and the exit status. */
#include "compare_rows.h"

TestSuite(compare, .init = start, .fini = stop, .timeout = 120);

/* ---- Verdicts ---- */

/* In b.csv, the first row takes 1.1 times as long as in a.csv. Both medians are known to 1 %, so the interval
 * of the ratio's logarithm extends by atanh(0.01) sqrt(2) = 0.0141426 to each side. */
Test(compare, a_slower_row_gives_exit_status_3)
{
    put_rows("a.csv", "variant=slower", "variant=faster", "variant=same;median_error=0.001",
             "variant=undecided;median_error=0.05", NULL);
    put_rows("b.csv", "variant=slower;time_median_s=0.0352", "variant=faster;time_median_s=0.016",
             "variant=same;time_median_s=0.0322;median_error=0.001",
             "variant=undecided;time_median_s=0.033;median_error=0.05", NULL);
    compare(3, "--format csv");
    static const char *const verdicts[] = {"slower", "faster", "same", "undecided"};
    for (size_t i = 0; i < 4; i++) {
        cr_expect_str_eq(value(out, i + 1, "variant"), verdicts[i]);
        expect_verdict(i + 1, verdicts[i]);
    }
    expect_number(1, "a", 0.001);
    expect_number(1, "b", 0.0011);
    expect_number(1, "ratio", 1.1);
    expect_number(1, "ratio_low", 1.1 * exp(-0.0141426));
    expect_number(1, "ratio_high", 1.1 * exp(0.0141426));
    cr_expect_str_eq(err, "fdsl-bench: 1 of 4 pairs is slower by more than 2 %\n");
    expect_cells(out, 1, "schema=compare/1;measure=time_per_item");
}

Test(compare, no_slower_row_is_success)
{
    put_rows("a.csv", "", "batch=64;median_error=0.1", NULL);
    put_rows("b.csv", "time_median_s=0.016", "batch=64;median_error=0.1", NULL);
    compare(0, "");
    cr_expect_str_eq(err, "");
    compare(3, "--strict");
    cr_expect(strstr(err, "--strict: 1 undecided, 0 wrong in A, 0 without a partner"), "%s", err);
}

Test(compare, verdicts_depend_on_margin_and_confidence)
{
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "time_median_s=0.0336", NULL); /* ratio 1.05, interval 1.0353 to 1.0650 */
    compare(3, "--margin 3.5");
    compare(0, "--margin 3.6 --format csv");
    expect_verdict(1, "undecided");
    compare(0, "--margin=7% --format csv");
    expect_verdict(1, "same");
    compare(0, "--margin 3.5 --confidence 99 --format csv");
    expect_verdict(1, "undecided");
    compare(3, "--margin 0");
}

Test(compare, items_of_different_runs_are_comparable)
{
    put_rows("a.csv", "items=32", NULL);
    put_rows("b.csv", "items=64;time_median_s=0.064", NULL);
    compare(0, "--format csv");
    expect_number(1, "ratio", 1);
}

Test(compare, higher_is_better_for_rates)
{
    put_rows("a.csv", "items_per_s=100;energy_j_per_item=1;test_acc=0.9", NULL);
    put_rows("b.csv", "items_per_s=90;energy_j_per_item=0.5", NULL);
    compare(3, "--measure items_per_s --format csv");
    expect_verdict(1, "slower");
    expect_number(1, "ratio", 0.9);
    /* Rows have no error estimate of the energy, so a pair of single rows has no interval. */
    compare(0, "--measure energy_j_per_item --format csv");
    expect_verdict(1, "undecided");
    cr_expect_str_eq(value(out, 1, "ratio_low"), "");
}

Test(compare, a_lower_busy_share_is_worse)
{
    put_rows("a.csv", "busy_share=0.9", "busy_share=0.9", NULL);
    put_rows("b.csv", "busy_share=0.5", "busy_share=0.5", NULL);
    compare(3, "--measure busy_share --format csv");
    expect_verdict(1, "worse");
    expect_number(1, "ratio", 0.5 / 0.9);
}

Test(compare, repeated_rows_of_any_measure_have_an_interval)
{
    put_rows("a.csv", "energy_j_per_item=1", "energy_j_per_item=1.001", "energy_j_per_item=0.999", NULL);
    put_rows("b.csv", "energy_j_per_item=1.5", "energy_j_per_item=1.501", "energy_j_per_item=1.502", NULL);
    compare(3, "--measure energy_j_per_item --format csv");
    expect_verdict(1, "worse");
    expect_number(1, "runs_a", 3);
    expect_number(1, "runs_b", 3);
    cr_expect(strstr(err, "1 of 1 pairs is worse by more than 2 %"), "%s", err);
}

/* ---- Which rows match ---- */

Test(compare, the_order_of_rows_does_not_matter)
{
    static const char *const rows[] = {"batch=1;time_median_s=0.001;items=1",
                                       "batch=2;time_median_s=0.003;items=2", "variant=omp;threads=4"};
    put_rows("a.csv", rows[0], rows[1], rows[2], NULL);
    put_rows("b.csv", rows[2], rows[0], rows[1], rows[0], NULL);
    compare(0, "--format csv");
    for (size_t i = 1; i <= 3; i++)
        expect_number(i, "ratio", 1);
    expect_cells(out, 1, "batch=1");
    expect_cells(out, 2, "batch=2");
    expect_cells(out, 3, "variant=omp");
    expect_number(1, "runs_b", 2);
    cr_expect_eq(count_of(out, "\n"), 4);
}

/* For each parameter: rows with different values do not match, and --ignore makes them match. */
Test(compare, rows_match_by_every_parameter)
{
    static const char *const columns[] = {
        "variant", "ranks_per_device", "threads", "scaling", "batch",   "seed",
        "noise",   "line_width",       "layout",  "std",     "compute", "cache"};
    for (size_t i = 0; i < COUNT_OF(columns); i++) {
        char row[64], ignore[64];
        snprintf(row, sizeof row, "%s=7", columns[i]);
        snprintf(ignore, sizeof ignore, "--ignore %s --format csv", columns[i]);
        put_rows("a.csv", "", NULL);
        put_rows("b.csv", row, NULL);
        compare(1, "");
        cr_expect(strstr(err, "the most similar rows differ in ") && strstr(err, columns[i]), "%s: %s",
                  columns[i], err);
        compare(0, ignore);
        expect_number(1, "ratio", 1);
    }
    static const char *const others[] = {"host",     "device",   "driver", "cuda",
                                         "revision", "time_utc", "job_id"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        char row[64];
        snprintf(row, sizeof row, "%s=7", others[i]);
        put_rows("b.csv", row, NULL);
        compare(0, "");
    }
}

Test(compare, several_parameters_are_ignored)
{
    put_rows("a.csv", "threads=2;line_width=0.1", NULL);
    put_rows("b.csv", "threads=4;line_width=0.2", NULL);
    compare(1, "");
    cr_expect(
        strstr(err, "differ in threads and line_width; --ignore NAME,... matches rows that differ in NAME"),
        "%s", err);
    compare(1, "--ignore threads");
    compare(0, "--ignore threads,line-width");
}

Test(compare, rows_without_a_partner_are_reported)
{
    put_rows("a.csv", "", "batch=1", "batch=2", NULL);
    put_rows("b.csv", "batch=3", "", NULL);
    compare(0, "--format csv");
    cr_expect(strstr(err, "warning: 2 of the rows in a.csv and 1 in b.csv have no partner"), "%s", err);
    expect_verdict(1, "same");
    expect_verdict(2, "only in A");
    expect_verdict(4, "only in B");
    expect_cells(out, 4, "batch=3;a=;ratio=");
    compare(3, "--strict");
    cr_expect(strstr(err, "0 undecided, 0 wrong in A, 3 without a partner"), "%s", err);
    put_rows("b.csv", "", "batch=1", NULL);
    compare(0, "");
    cr_expect(strstr(err, "warning: 1 of the rows in a.csv has no partner"), "%s", err);
    put_rows("a.csv", "", NULL);
    compare(0, "");
    cr_expect(strstr(err, "warning: 1 of the rows in b.csv has no partner"), "%s", err);
}

/* One file may have rows of several hosts and revisions. */
Test(compare, rows_of_different_origins_are_pooled_with_a_warning)
{
    put_rows("a.csv", "revision=aaa", "revision=bbb;host=w", "batch=1;driver=5", NULL);
    put_rows("b.csv", "revision=ccc", "batch=1;driver=6", NULL);
    compare(0, "--format csv");
    expect_number(1, "runs_a", 2);
    cr_expect_str_eq(err, "fdsl-bench: warning: a.csv: rows that differ in host and revision are pooled as "
                          "repeated runs; to avoid this, write them to separate files\n");
}

/* Rows that differ in the ignored parameter must not count as repeated runs. */
Test(compare, rows_that_differ_in_an_ignored_parameter_are_not_judged)
{
    static const char mixed[] = "fdsl-bench: warning: %s: rows that differ in variant and threads, which "
                                "--ignore names, are pooled and not judged; ";
    put_rows("a.csv", "time_median_s=8", "variant=omp;threads=9", "batch=1", NULL);
    put_rows("b.csv", "time_median_s=16", "variant=omp;threads=9;time_median_s=0.1", "batch=1;threads=2",
             NULL);
    compare(0, "--ignore variant,threads --format csv");
    expect_verdict(1, "undecided");
    expect_verdict(2, "same");
    cr_expect_str_eq(value(out, 1, "marks_a"), "mixed");
    cr_expect_str_eq(value(out, 2, "marks_a"), "");
    for (size_t side = 0; side < 2; side++) {
        char words[256];
        snprintf(words, sizeof words, mixed, side ? "b.csv" : "a.csv");
        cr_expect(strstr(err, words), "'%s' is not in\n%s", words, err);
    }
    compare(0, "--ignore variant,threads");
    cr_expect(strstr(out, "\nm mixed: ") && !strstr(out, "\nundecided"), "%s", out);
    /* These rows have equal times within each file. They are still not judged, because their ignored
     * parameter differs. */
    put_rows("a.csv", "threads=2", "threads=3", "threads=4", NULL);
    put_rows("b.csv", "threads=5;time_median_s=9", "threads=6;time_median_s=9", NULL);
    compare(0, "--ignore threads --format csv");
    expect_verdict(1, "undecided");
}

/* `cache` is an option of load and a column of all workloads. It must count as one parameter. */
Test(compare, cache_occurs_once_among_the_parameters_of_load)
{
    const struct workload *load = workload_find("load");
    for (size_t side = 0; side < 2; side++) {
        FILE *file = fopen(side ? "b.csv" : "a.csv", "w");
        cr_assert_not_null(file);
        fputs("schema,ranks,rank,variant,threads,scaling,ranks_per_device,time_median_s,items,median_error",
              file);
        for (size_t i = 0; i < load->option_count; i++) {
            char name[64];
            snprintf(name, sizeof name, "%s", load->options[i].name);
            for (char *c = name; (c = strchr(c, '-'));)
                *c = '_';
            if (load->options[i].column)
                fprintf(file, ",%s", name);
        }
        fprintf(file, "\n%s,1,0,files,1,,1,1,1,0.001", load->schema);
        for (size_t i = 0; i < load->option_count; i++)
            if (load->options[i].column)
                fprintf(file, ",%s", strcmp(load->options[i].name, "cache") ? "" : side ? "cold" : "warm");
        fputc('\n', file);
        cr_assert(fclose(file) == 0);
    }
    compare(0, "--ignore cache --format csv");
    expect_verdict(1, "same");
}

/* A run of several ranks is compared by its row of all ranks. The rows of single ranks are ignored. */
Test(compare, only_the_row_of_all_ranks_is_compared)
{
    put_rows("a.csv", "ranks=2;rank=0", "ranks=2;rank=1", "ranks=2;rank=all", NULL);
    put_rows("b.csv", "ranks=2;rank=0;time_median_s=9", "ranks=2;rank=1", "ranks=2;rank=all", NULL);
    compare(0, "--format csv");
    cr_expect_eq(count_of(out, "\n"), 2);
    expect_number(1, "ratio", 1);
    expect_number(1, "runs_a", 1);
}

Test(compare, rows_without_a_time_are_left_out)
{
    static const char *const times[] = {"", "0", "-1", "nan", "inf", "1e999", "1s", "0x"};
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        char row[64];
        snprintf(row, sizeof row, "batch=1;time_median_s=%s", times[i]);
        put_rows("a.csv", "", row, NULL);
        put_rows("b.csv", "", NULL);
        compare(0, "--format csv");
        cr_expect(strstr(err, "a.csv: left out 1 row without a positive time_per_item (the first: line 3)"),
                  "'%s': %s", times[i], err);
        cr_expect_eq(count_of(out, "\n"), 2, "'%s'", times[i]);
        compare(1, "--measure wall_s");
        cr_expect(strstr(err, "a.csv has no row to compare"), "%s", err);
    }
    put_rows("a.csv", "items=0", NULL);
    compare(1, "");
}

Test(compare, quoted_values_are_compared)
{
    put_rows("a.csv", "preset_file=\"a, \"\"b\"\"\nc\"", NULL);
    put_rows("b.csv", "preset_file=\"a, \"\"b\"\"\nc\"", NULL);
    compare(0, "--format csv");
    cr_expect(strstr(out, ",\"a, \"\"b\"\"\nc\","), "%s", out);
    put_rows("b.csv", "preset_file=\"a, \"\"b\"\"\nd\"", NULL);
    compare(1, "");
    compare(0, "--ignore preset-file");
}

/* --help lists the measures whose unit does not tell whether higher values are better, each once. */
Test(compare, help_lists_measures)
{
    static const char *const measures[] = {"roofline_share", "energy_j_per_item", "stall_share",
                                           "test_loss",      "test_acc",          "storage_read_bytes"};
    run("compare --help");
    char *list = strstr(out, "\nmeasures: ");
    cr_assert_not_null(list, "%s", out);
    for (size_t i = 0; i < COUNT_OF(measures); i++) {
        char name[64];
        snprintf(name, sizeof name, " %s,", measures[i]);
        cr_expect_eq(count_of(list, name), 1, "%s: %s", measures[i], list);
    }
    cr_expect(!strstr(list, "trained_s") && !strstr(list, "epochs"), "%s", list);
}

/* ---- Refusals ---- */

Test(compare, invalid_command_lines_are_refused)
{
    static const struct refusal refusals[] = {
        {"", "compare needs two CSV files"},
        {"a.csv", "compare needs two CSV files"},
        {"a.csv b.csv c.csv", "unexpected argument 'c.csv'"},
        {"a.csv b.csv -- c.csv", "unexpected argument 'c.csv'"},
        {"a.csv b.csv --margn 2", "did you mean '--margin'?"},
        {"a.csv b.csv --xyzzyplugh", "unknown option '--xyzzyplugh'; see compare --help"},
        {"a.csv b.csv --margin -1", "--margin: '-1' is out of range; it must be 0 to 1000"},
        {"a.csv b.csv --margin 2%%", "--margin: '2%' is not a number"},
        {"a.csv b.csv --margin %", "--margin: '' is not a number"},
        {"a.csv b.csv --confidence 100", "--confidence: '100' is out of range"},
        {"a.csv b.csv --format xml", "'xml' is not one of table, csv, json"},
        {"a.csv b.csv --ignore threds", "'threds' is not a parameter of synth; did you mean 'threads'?"},
        {"a.csv b.csv --ignore threads,batch,threads", "--ignore: 'threads' is named twice"},
        {"a.csv b.csv --ignore line-width,line_width", "--ignore: 'line_width' is named twice"},
        {"a.csv b.csv --ignore device", "'device' is not a parameter of synth"},
        {"a.csv b.csv --measure time_media_s",
         "a.csv has no column 'time_media_s'; did you mean 'time_median_s'?"},
        {"a.csv b.csv --measure outliers", "it is not known whether lower or higher values"},
        {"a.csv b.csv --measure host", "it is not known whether lower or higher values"},
    };
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "", NULL);
    expect_refusals(refusals, COUNT_OF(refusals), "compare");
    expect_failure(2, "unknown command 'compar'; did you mean 'compare'?", "compar a.csv b.csv");
    expect_failure(2, "unexpected argument 'nonsense'", "nonsense");
}

Test(compare, file_names_may_begin_with_a_dash)
{
    put_rows("-a.csv", "", NULL);
    put_rows("b.csv", "", NULL);
    run_well("compare -- -a.csv b.csv");
}

static void expect_b(int expected, const char *words)
{
    expect_failure(expected, words, "compare a.csv b.csv");
}

Test(compare, files_of_other_rows_are_refused)
{
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "", "schema=synth/1", NULL);
    expect_b(2, "b.csv, line 3: rows of schema 'synth/1' cannot be compared; name a file that --out of");
    put_rows("b.csv", "schema=monitor/1", NULL);
    expect_b(2, "b.csv, line 2: rows of schema 'monitor/1' cannot be compared");
    char row[64];
    snprintf(row, sizeof row, "schema=%s", workload_find("load")->schema);
    put_rows("b.csv", row, NULL);
    expect_b(2, "b.csv, line 2: a row of the workload load cannot be compared with rows of synth");
    put("b.csv", "schema,x\nsynth/1,2\n");
    expect_b(2, "rows of schema 'synth/1'");
    put("b.csv", "x\n2\n");
    expect_b(2, "b.csv has no column 'schema'");
    snprintf(row, sizeof row, "schema,x\n%s,2\n", workload_find("synth")->schema);
    put("b.csv", row);
    expect_b(2, "b.csv has no column 'ranks'");
    put("b.csv", "schema,x\n");
    expect_b(1, "b.csv has no rows");
    put("b.csv", "");
    expect_b(2, "b.csv has no column 'schema'");
}

Test(compare, unreadable_files_are_refused)
{
    put_rows("a.csv", "", NULL);
    expect_b(1, "b.csv cannot be read: No such file or directory");
    cr_assert(mkdir("b.csv", 0777) == 0);
    expect_b(1, "b.csv");
    cr_assert(rmdir("b.csv") == 0 && mkfifo("b.csv", 0600) == 0);
    expect_b(1, "b.csv: not a regular file; name a file, not a folder or a pipe");
}

Test(compare, malformed_files_are_refused)
{
    static const struct {
        const char *text, *words;
    } files[] = {
        {"schema,x\na,\"b\nc,d\n", "b.csv, line 2: a quote is not closed"},
        {"schema,x\na,\"b\"c\n", "b.csv, line 2: neither a comma nor a line end follows a cell"},
        {"schema,x\na,b\rc\n", "b.csv, line 2: neither a comma nor a line end follows a cell"},
        {"schema,x\n\na,b\na,b,c\n", "b.csv, line 4: 3 cells, but the header has 2"},
        {"schema,x\n\"a\nb\",c\nd\n", "b.csv, line 4: 1 cell, but the header has 2"},
        {"schema,x\na,b", "b.csv, line 2: this last line has no line end and may be incomplete"},
        {"schema,x\na,\"b\"", "b.csv, line 2: this last line has no line end and may be incomplete"},
        {"schema,x\na,b\r", "b.csv, line 2: "},
    };
    put_rows("a.csv", "", NULL);
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        put("b.csv", files[i].text);
        expect_b(1, files[i].words);
    }
    FILE *file = fopen("b.csv", "w");
    cr_assert(file && fwrite("schema\nx\n\0\n", 1, 11, file) == 11 && fclose(file) == 0);
    expect_b(1, "b.csv, line 3: a NUL byte");
}

/* A spreadsheet writes a byte order mark, and CRLF at line ends. */
Test(compare, files_from_a_spreadsheet_are_read)
{
    put_rows("a.csv", "", "batch=2", NULL);
    put_rows("b.csv", "", "batch=2", NULL);
    cr_assert(system("sed -i '1s/^/\\xEF\\xBB\\xBF/; s/$/\\r/' b.csv; echo >> b.csv") == 0);
    compare(0, "--strict");
    cr_expect_str_eq(err, "");
}

/* ---- Size ---- */

/* Compares two files of 50,000 rows in opposite orders. This must take less than 5 s of CPU time. In a build
 * with sanitizers, which is slower, the files have 5,000 rows. */
Test(compare, two_files_of_50_000_rows_are_compared_within_5_s)
{
#ifdef __SANITIZE_ADDRESS__
    enum { ROWS = 5000 };
#else
    enum { ROWS = 50000 };
#endif
    FILE *a = fopen("a.csv", "w"), *b = fopen("b.csv", "w");
    cr_assert(a && b);
    fprintf(a, "%s\n", header);
    fprintf(b, "%s\n", header);
    for (int i = 0; i < ROWS; i++) {
        char row[64];
        snprintf(row, sizeof row, "batch=%d", i);
        write_row(a, row);
        snprintf(row, sizeof row, "batch=%d", ROWS - 1 - i);
        write_row(b, row);
    }
    cr_assert(fclose(a) == 0 && fclose(b) == 0);
    how.out_to = "/dev/null";
    compare(0, "--strict");
    struct rusage used;
    cr_assert(getrusage(RUSAGE_CHILDREN, &used) == 0);
    cr_expect(used.ru_utime.tv_sec < 5, "%ld s", (long)used.ru_utime.tv_sec);
}

/* ---- Real rows ---- */

Test(compare, rows_of_this_program_are_compared)
{
    run_well("--variant naive --batch 1 --res 64 --loops 50 --out a.csv");
    run_well("--variant naive --batch 1 --res 64 --loops 50 --out b.csv");
    run("compare a.csv b.csv --format csv");
    cr_expect(status == 0 || status == 3, "%d: %s", status, err);
    cr_expect_eq(count_of(out, "\n"), 2);
    cr_expect(number(out, 1, "ratio") > 0);
    run_well("compare a.csv a.csv --format csv");
    expect_number(1, "ratio", 1);
}

Test(compare, losses_are_measures)
{
    run_well("--variant train-naive --model logreg --train-size 200 --test-size 50 --epochs 2 --out a.csv");
    run_well("compare a.csv a.csv --measure train_loss --format csv");
    expect_number(1, "ratio", 1);
    run_well("compare a.csv a.csv --measure test_loss");
}

Test(compare, help_has_examples)
{
    run_well("compare --help");
    cr_expect(strstr(out, "examples:\n") && strstr(out, "--margin PERCENT") && strstr(out, "exit status: 0 "),
              "%s", out);
    expect_prints("fdsl-bench compare A.csv B.csv", "--help");
}
