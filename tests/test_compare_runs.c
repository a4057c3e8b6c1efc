/* Tests repeated runs in fdsl-bench compare: which rows belong to one run, and how a single run is judged. */
#include "compare_rows.h"

TestSuite(runs, .init = start, .fini = stop, .timeout = 120);

Test(runs, a_single_run_is_assumed_to_vary_as_much_as_repeated_runs)
{
    static const char note[] =
        "\none run against several: the single run is assumed to vary as much as the repeated runs; ";
    put_rows("a.csv", "", NULL);
    put_rows("b.csv", "time_median_s=0.0331", "time_median_s=0.0335", "time_median_s=0.0339", NULL);
    compare(0, "");
    cr_expect(strstr(out, note) && !strstr(out, "runs 1/1"), "%s", out);
    compare(0, "--format csv"); /* ratio 1.047; A's error alone would give the verdict slower */
    expect_verdict(1, "undecided");
    expect_number(1, "runs_a", 1);
    expect_number(1, "runs_b", 3);
    put_rows("a.csv", "", "", NULL);
    compare(0, "");
    cr_expect(!strstr(out, note), "%s", out);
}

#define TRAIN "--variant train-naive --model logreg --train-size 200 --test-size 50 --epochs 3 "

/* Each row of a training run is an epoch. The epochs of a run share one process, so they count as one value.
 */
Test(runs, the_epochs_of_a_run_count_as_one_value)
{
    run_well(TRAIN "--out a.csv");
    run_well(TRAIN "--out a.csv");
    run_well(TRAIN "--out b.csv");
    run_well("compare a.csv a.csv");
    cr_expect(strstr(out, "a.csv (6 rows)\n") && strstr(out, " 2/2 "), "%s", out);
    run_well("compare a.csv a.csv --format csv");
    cr_expect_eq(count_of(out, "\n"), 2);
    expect_number(1, "runs_a", 2);
    expect_number(1, "ratio", 1);
    cr_expect(number(out, 1, "ratio_low") < 1);
    run_well("compare b.csv b.csv");
    cr_expect(strstr(out, " 1/1 ") && strstr(out, "\nruns 1/1: one run does not show"), "%s", out);
}

/* For some measures, the value of a run is that of its last epoch, for example the test accuracy and the
 * total training time. */
Test(runs, some_measures_are_those_of_the_last_epoch)
{
    static const char *const measures[] = {"test_acc", "test_loss", "train_acc", "train_loss", "trained_s"};
    run_well(TRAIN "--out a.csv --format csv");
    for (size_t i = 0; i < COUNT_OF(measures); i++) {
        char *rows = get("a.csv", NULL), line[96];
        double last = number(rows, 3, measures[i]);
        free(rows);
        snprintf(line, sizeof line, "compare a.csv a.csv --format csv --measure %s", measures[i]);
        run_well(line);
        expect_number(1, "a", last);
        expect_number(1, "runs_a", 1);
    }
    cr_assert(system("head -n 3 a.csv > b.csv") == 0);
    run("compare a.csv b.csv --measure test_loss");
    cr_expect(status == 1 && strstr(err, "b.csv has no row to compare"), "%d: %s", status, err);
    cr_expect(strstr(err, "b.csv: left out 1 run without the last epoch, because test_loss describes a whole "
                          "training run\n"),
              "%s", err);
}

/* Writes rows of training runs of three epochs. Each triple is one row: job, epoch, and time in milliseconds.
 */
static void put_epochs(const char *path, const int (*epochs)[3], size_t count)
{
    char text[1 << 16];
    size_t used = (size_t)snprintf(text, sizeof text, "%s,epoch,epochs\n", header);
    for (size_t i = 0; i < count; i++) {
        FILE *file = fmemopen(text + used, sizeof text - used, "w");
        char row[128];
        snprintf(row, sizeof row, "job_id=%d;time_median_s=%g;median_error=", epochs[i][0],
                 epochs[i][2] * 1e-3);
        cr_assert_not_null(file);
        write_row(file, row);
        cr_assert(fclose(file) == 0);
        used += strlen(text + used) - 1; /* the line end */
        used += (size_t)snprintf(text + used, sizeof text - used, ",%d,3\n", epochs[i][1]);
    }
    put(path, text);
}

/* Each case is one file. The files have:
 *
 * - one training run
 * - two consecutive training runs
 * - a training run that was interrupted and restarted
 * - two training runs of one job, with alternating rows
 * - two training runs of different jobs, with alternating rows
 * - a training run that another job resumed
 * - the rest of a resumed training run
 * - rows in descending order of epochs */
Test(runs, epochs_are_grouped_into_runs)
{
    static const struct {
        int epochs[8][3];
        size_t count, runs;
    } files[] = {
        {{{1, 1, 32}, {1, 2, 32}, {1, 3, 32}}, 3, 1},
        {{{1, 1, 32}, {1, 2, 32}, {1, 3, 32}, {1, 1, 32}, {1, 2, 32}, {1, 3, 32}}, 6, 2},
        {{{1, 1, 32}, {1, 2, 32}, {1, 1, 32}, {1, 2, 32}, {1, 3, 32}}, 5, 2},
        {{{1, 1, 32}, {1, 1, 32}, {1, 2, 32}, {1, 2, 32}, {1, 3, 32}, {1, 3, 32}}, 6, 2},
        {{{1, 1, 32}, {2, 1, 32}, {1, 2, 32}, {2, 2, 32}, {2, 3, 32}, {1, 3, 32}}, 6, 2},
        {{{1, 1, 32}, {2, 2, 32}, {2, 3, 32}}, 3, 2},
        {{{1, 2, 32}, {1, 3, 32}}, 2, 1},
        {{{1, 3, 32}, {1, 2, 32}, {1, 1, 32}}, 3, 3},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        put_epochs("a.csv", files[i].epochs, files[i].count);
        run_well("compare a.csv a.csv --format csv");
        expect_number(1, "runs_a", (double)files[i].runs);
        cr_expect_eq(count_of(out, "\n"), 2, "%zu", i);
    }
    /* The two runs have medians of 20 and 80 ms, whose geometric mean is 40 ms. The median and the geometric
     * mean of all six rows are not 40 ms. */
    static const int epochs[][3] = {{1, 1, 900}, {1, 2, 20}, {1, 3, 10}, {1, 1, 80}, {1, 2, 81}, {1, 3, 79}};
    put_epochs("a.csv", epochs, COUNT_OF(epochs));
    run_well("compare a.csv a.csv --format csv");
    expect_number(1, "a", 0.04 / 32);
}
