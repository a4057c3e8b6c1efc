/* Tests the workload `exchange` under mpirun: sums, rows, refused sizes, and faults. Skipped if the build has
 * no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "mpirun.h"

TestSuite(mpi_exchange, .init = start, .fini = stop, .timeout = 400);

#define EXCHANGE \
    "--workload exchange --variant mpi --warmups 1 --warmup-time 0 --loops 3 --format csv --verify "
#define ODD_SIZES "--bytes 4,12,4096,1000004 "

/* Returns the values of a column in all rows, separated by blanks. */
static const char *column(const char *name, size_t rows)
{
    static char text[TEXT_MAX];
    text[0] = '\0';
    for (size_t row = 1; row <= rows; row++)
        strcat(strcat(text, row > 1 ? " " : ""), value(out, row, name));
    return text;
}

Test(mpi_exchange, any_number_of_ranks_has_correct_sums)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        run_well(ranks, EXCHANGE ODD_SIZES);
        size_t per_size = ranks > 1 ? (size_t)ranks + 1 : 1;
        cr_expect_eq(count_of(out, "\n"), 1 + 4 * per_size, "%s", out);
        for (size_t row = 1; row <= 4 * per_size; row++) {
            static const char *const sizes[] = {"array_bytes=4;count=1", "array_bytes=12;count=3",
                                                "array_bytes=4096;count=1024",
                                                "array_bytes=1000004;count=250001"};
            size_t size = (row - 1) / per_size, last = (size + 1) * per_size;
            expect_cells(out, row, sizes[size]);
            expect_cells(out, row, "schema=exchange/1;dtype=f32;redop=sum;items=20;wrong=0");
            expect_cells(out, row, "scaling=;efficiency=;bytes=");
            char checksum[64];
            strcpy(checksum, value(out, last, "checksum"));
            cr_expect_str_eq(value(out, row, "checksum"), checksum);
            double call_s = number(out, row, "time_median_s") / 20;
            cr_expect(fabs(number(out, row, "time_us") / (1e6 * call_s) - 1) < 1e-3, "%s", out);
            if (ranks == 1) { /* nothing is sent */
                expect_cells(out, row, "algbw_gbs=;busbw_gbs=;items_per_s=;bytes_per_s=");
                continue;
            }
            double algbw = number(out, row, "algbw_gbs"), busbw = number(out, row, "busbw_gbs");
            cr_expect(number(out, row, "items_per_s") > 0 && number(out, row, "bytes_per_s") > 0, "%s", out);
            cr_expect(fabs(algbw / (1e-9 * number(out, row, "array_bytes") / call_s) - 1) < 1e-3, "%s", out);
            cr_expect(fabs(busbw - algbw * 2 * (ranks - 1) / ranks) <= 1e-3 * algbw, "%s", out);
        }
        if (ranks > 1) {
            cr_expect_str_eq(value(out, per_size, "rank"), "all");
            cr_expect(number(out, per_size, "time_us") >= 0.999 * number(out, 1, "time_min_s") * 1e6 / 20);
        }
        cr_expect_eq(strstr(err, "one rank exchanges nothing, so there are no bandwidths") != NULL,
                     ranks == 1, "%s", err);
        cr_expect(count_of(err, "one rank exchanges nothing") <= 1, "%s", err);
    }
}

/* The table has the columns that nccl-tests prints: time, algbw, busbw and #wrong. */
Test(mpi_exchange, the_table_has_bandwidths)
{
    run_well(1, EXCHANGE "--format table --bytes 1K");
    char rate[32], algbw[32], busbw[32];
    const char *line = strstr(out, "\nmpi ");
    cr_assert(line && sscanf(line, " mpi %*s %*s %*s %31s %*s %*s %*s %*s %*s %*s %31s %31s", rate, algbw,
                             busbw) == 3,
              "%s", out);
    cr_expect(!strcmp(rate, "-") && !strcmp(algbw, "-") && !strcmp(busbw, "-"), "%s", out);
    run_well(2, EXCHANGE "--format table --bytes 1K:4K:2x");
    cr_expect(strstr(out, "exchange: default options on 2 ranks; speed-up over mpi\n") &&
                  strstr(out, "bytes") && strstr(out, "#wrong      count    time_us  algbw_gbs  busbw_gbs"),
              "%s", out);
    cr_expect_eq(count_of(out, "\nmpi "), 3, "%s", out);
    run_well(2, EXCHANGE "--format table --bytes 1K");
    cr_expect(strstr(out, "exchange: bytes 1024 on 2 ranks; speed-up over mpi\n"), "%s", out);
}

Test(mpi_exchange, rows_are_appended_and_compared)
{
    run_well(2, EXCHANGE "--bytes 4K,64K --out rows.csv --samples-out samples.csv");
    run_well(2, EXCHANGE "--bytes 64K --out rows.csv --samples-out samples.csv");
    read_text("rows.csv", out);
    cr_expect_eq(count_of(out, "\n"), 1 + 3 * 3, "%s", out);
    cr_expect_str_eq(column("array_bytes", 9), "4096 4096 4096 65536 65536 65536 65536 65536 65536");
    read_text("samples.csv", out);
    cr_expect_eq(count_of(out, "\n"), 1 + 3 * 2 * 3, "%s", out);
    shell("$PROGRAM compare rows.csv rows.csv");
    cr_expect(status == 0 && strstr(out, "array_bytes=4096") && strstr(out, "array_bytes=65536"), "%d: %s%s",
              status, out, err);
}

Test(mpi_exchange, invalid_options_are_refused)
{
    static const struct {
        const char *options, *message;
    } cases[] = {
        {"--bytes 6", "--bytes 6: not a multiple of 4 bytes, the size of one f32 value"},
        {"--bytes 0", "--bytes: '0' is out of range; it must be 1 to 1099511627776"},
        {"--bytes 1Q", "--bytes: '1Q' is not a size; write a number of bytes, or a number and K, M or G"},
        {"--bytes 1024G", "the arrays: "},
        {"--dtype bf16", "variant 'mpi' cannot run with these options: it adds up f32 only; use --dtype f32"},
        {"--dtype f16", "--dtype: 'f16' is not one of f32, bf16"},
        {"--scaling weak", "--scaling: all ranks of exchange take part in each of its all-reduces"},
        {"--byts 4", "unknown option '--byts'; did you mean '--bytes'?"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        snprintf(line, sizeof line, EXCHANGE "%s", cases[i].options);
        run(2, line);
        cr_expect(status == 2 && strstr(err, cases[i].message), "%s: %d: %s", cases[i].options, status, err);
    }
    /* In a list of sizes, only the refused size has no row. */
    run(2, EXCHANGE "--bytes 4,6,8");
    cr_expect(status == 2 && count_of(out, "\n") == 1 + 2 * 3 && strstr(err, "1 of 3 combinations failed"),
              "%d: %s%s", status, out, err);
    cr_expect_eq(count_of(err, "--bytes 6: "), 1, "%s", err);
}

Test(mpi_exchange, wrong_sums_are_detected)
{
    run_with_fault(-1, 3, EXCHANGE "--bytes 64");
    cr_expect(status == 3 && strstr(err, "mpi: 2 values are wrong; the time is not recorded"), "%d: %s",
              status, err);
    cr_expect_eq(count_of(out, "\n"), 0, "%s", out);
}

/* Two sizes need two reducers, but the warning appears once. */
Test(mpi_exchange, ranks_without_shared_memory_use_mpi)
{
    static const char warning[] = "no shared memory for sums, so MPI exchanges the values: rank 0: cannot "
                                  "create shared memory: Function not implemented";
    run_with_fault(-1, 1, EXCHANGE "--bytes 64,300000");
    cr_expect(status == 0 && count_of(err, warning) == 1, "%d: %s", status, err);
}

/* The program compares the sums of all ranks even without --verify. */
Test(mpi_exchange, ranks_with_different_sums_are_detected)
{
    run_with_fault(1, 3, EXCHANGE "--verify=no --bytes 64");
    cr_expect(status == 3 && strstr(err, "the ranks have different sums; the time is not recorded"), "%d: %s",
              status, err);
    cr_expect_eq(count_of(out, "\n"), 0, "%s", out);
}
