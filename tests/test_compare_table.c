/* Tests the output of fdsl-bench compare: the table, CSV and JSON. */
#include "compare_rows.h"

TestSuite(compare_table, .init = start, .fini = stop, .timeout = 120);

#define SAME "compare a.csv a.csv "

/* Expects that the table of the latest comparison contains these words. */
static void expect_words(const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        cr_expect(strstr(out, words[i]), "'%s' is not in\n%s", words[i], out);
}

Test(compare_table, the_table_says_what_differs)
{
    put_rows("a.csv", "batch=1;items=1;settled=no", "batch=2;items=2;verified=no;wrong=", NULL);
    put_rows("b.csv", "batch=1;items=1;revision=bbb;device=GPU;throttled=thermal",
             "batch=2;items=2;revision=ccc;device=GPU", NULL);
    compare(0, "");
    static const char *const words[] = {
        "synth: ratio B / A of time_per_item, margin 2 %, 95 % confidence intervals\n",
        "  A        a.csv (2 rows)\n",
        "  host     vm\n",
        "  device   A: CPU   B: GPU\n",
        "  revision A: aaa   B: bbb, ccc\n",
        "  rows with variant naive ranks 1 threads 1 res 512\n",
        "\nnaive batch=1          32.00 ms *      32.00 ms t ",
        "\nnaive batch=2          16.00 ms v      16.00 ms    ",
        " 1.0000   0.9860 .. 1.0142  same\n",
        "\n2 same; geometric mean of B/A: 1.0000\n",
        "\nruns 1/1: one run does not show how much runs differ",
        "\n* not settled: ",
        "\nt throttled: ",
        "\nv not verified: ",
    };
    expect_words(words, COUNT_OF(words));
    compare(0, "--format csv");
    expect_cells(out, 1, "marks_a=unsettled;marks_b=throttled");
    expect_cells(out, 2, "marks_a=unverified;marks_b=");
}

/* The label of a row omits a value if more than half of the rows have the same value. */
Test(compare_table, the_table_omits_values_that_most_rows_share)
{
    put_rows("a.csv", "out_res=512;noise=2", "variant=omp;threads=9;out_res=512;noise=2",
             "res=64;out_res=64;noise=2;preset=uji", "out_res=64;noise=2", "dtype=f16;out_res=512", NULL);
    run_well(SAME);
    static const char *const words[] = {
        "\n  rows with ranks 1 batch 32\n", "\n  most with threads 1 res 512 noise 2\n",
        "\nnaive               ",           "\nomp threads=9       ",
        "\nnaive res=64 preset=uji ",       "\nnaive out_res=64    ",
        "\nnaive dtype=f16     ",
    };
    expect_words(words, COUNT_OF(words));
    expect_prints("\nas most ", SAME "--ignore variant,threads");
    expect_prints("\nall ", SAME "--ignore variant,threads,res,out_res,noise,preset,dtype");
}

/* The second row's label shows its empty value. Otherwise the first two rows would have the same label. */
Test(compare_table, rows_of_the_table_have_different_labels)
{
    put_rows("a.csv", "noise=2", "noise=", "noise=2;batch=1", NULL);
    run_well(SAME);
    cr_expect(strstr(out, "\nnaive  ") && strstr(out, "\nnaive noise=-  "), "%s", out);
    put_rows("a.csv", "out_res=64", "out_res=512", "out_res=64;batch=1", NULL);
    run_well(SAME);
    cr_expect(strstr(out, "\nnaive  ") && strstr(out, "\nnaive out_res=512  "), "%s", out);
}

Test(compare_table, huge_intervals_keep_the_columns)
{
    put_rows("a.csv", "time_median_s=0.000001", "time_median_s=3000", "batch=1", NULL);
    put_rows("b.csv", "time_median_s=0.00002", "time_median_s=3000", "batch=1", NULL);
    compare(0, "");
    const char *end[2];
    cr_assert((end[0] = strstr(out, "  undecided\n")) && (end[1] = strstr(out, "  same\n")), "%s", out);
    for (size_t i = 0; i < 2; i++) {
        const char *begin = end[i];
        while (begin[-1] != '\n')
            begin--;
        cr_expect_eq(end[i] - begin, end[1] - (strstr(out, "\nnaive batch=1") + 1), "%s", out);
    }
}

Test(compare_table, undecided_rows_have_a_reason)
{
    static const char wide[] = "\nundecided: the interval crosses the margin; ",
                      unknown[] = "\nundecided without an interval: a run has no median_error (too "
                                  "few samples or epochs); repeat the runs\n",
                      single[] =
                          "\nundecided without an interval: a single run gives no error for this measure";
    put_rows("a.csv", "median_error=;energy_j_per_item=1", NULL);
    run_well(SAME);
    cr_expect(strstr(out, unknown) && !strstr(out, wide), "%s", out);
    run("compare a.csv a.csv --measure energy_j_per_item");
    cr_expect(strstr(out, single) && !strstr(out, unknown), "%s", out);
    put_rows("a.csv", "median_error=0.2", NULL);
    run_well(SAME);
    cr_expect(strstr(out, wide) && !strstr(out, unknown), "%s", out);
}

/* If B has rows with wrong results, the comparison fails. A row with wrong results has no ratio and does not
 * count in the mean. */
Test(compare_table, wrong_results_are_not_judged)
{
    put_rows("a.csv", "", "batch=1", NULL);
    put_rows("b.csv", "time_median_s=9;wrong=3", "batch=1", NULL);
    compare(3, "");
    cr_expect_str_eq(err, "fdsl-bench: b.csv: 1 row with wrong results (the first: line 2)\n");
    cr_expect(strstr(out, " -  wrong\n") && strstr(out, "\nw wrong results: the row is not judged\n"), "%s",
              out);
    cr_expect(strstr(out, "\n1 same, 1 wrong; geometric mean of B/A: 1.0000\n"), "%s", out);
    cr_expect(!strstr(out, "measure longer"), "%s", out);
    compare(3, "--format csv");
    expect_verdict(1, "wrong");
    cr_expect_str_eq(value(out, 1, "ratio"), "");
    put_rows("b.csv", "", "batch=1;time_median_s=9", NULL);
    compare(3, "");
    cr_expect(strstr(err, "1 of 2 pairs is slower"), "%s", err);
}

/* Wrong results in B are an error, even in a row that is not compared. Wrong results in A, the older file,
 * fail only with --strict. */
Test(compare_table, wrong_results_fail_in_b_and_with_strict_in_a)
{
    put_rows("a.csv", "wrong=3", NULL);
    put_rows("b.csv", "", NULL);
    compare(0, "");
    cr_expect(strstr(out, "\n1 wrong\n"), "%s", out);
    compare(3, "--strict");
    cr_expect(strstr(err, "--strict: 0 undecided, 1 wrong in A, 0 without a partner"), "%s", err);
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "", "batch=1;wrong=1", "batch=2;wrong=1;time_median_s=", NULL);
    compare(3, "");
    cr_expect(strstr(err, "b.csv: 2 rows with wrong results (the first: line 3)"), "%s", err);
}

Test(compare_table, the_mean_ratio_is_geometric)
{
    put_rows("a.csv", "batch=1", "batch=2", "batch=3", NULL);
    put_rows("b.csv", "batch=1;time_median_s=0.064", "batch=2;time_median_s=0.008",
             NULL); /* ratios 2 and 1/4 */
    compare(3, "");
    cr_expect(strstr(out, "1 faster, 1 slower, 1 only in A; geometric mean of B/A: 0.7071"), "%s", out);
}

Test(compare_table, json_has_the_comparison_and_its_rows)
{
#ifndef HAVE_JANSSON
    SKIP("json needs jansson");
#endif
    put_rows("a.csv", "", "batch=1", NULL);
    put_rows("b.csv", "time_median_s=0.064", NULL);
    compare(3, "--format json");
    put("out.json", out);
    check_with_python(
        "import json, sys\n"
        "document = json.load(open(sys.argv[1]))\n"
        "about, rows = document['comparison'], document['rows']\n"
        "assert (about['a'], about['b'], about['slower'], about['only_in_A']) == ('a.csv', 'b.csv', 1, 1)\n"
        "assert about['host_a'] == 'vm' and abs(about['mean_ratio'] - 2) < 1e-9 and about['margin'] == 0.02\n"
        "assert rows[0]['verdict'] == 'slower' and rows[0]['batch'] == 32 and rows[1]['ratio'] is None\n",
        "out.json");
}

Test(compare_table, colours_are_for_terminals)
{
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "time_median_s=0.064", NULL);
    setenv("TERM", "xterm", 1);
    how.terminal_out = true;
    compare(3, "");
    cr_expect(strstr(out, "\033[31mslower\033[0m"), "%s", out);
    setenv("NO_COLOR", "1", 1);
    compare(3, "");
    cr_expect(!strstr(out, "\033"), "%s", out);
}

Test(compare_table, a_write_error_on_stdout_is_a_failure)
{
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "", NULL);
    how.out_to = "/dev/full";
    compare(1, "");
    compare(1, "--format csv");
}
