/* Tests scripts/figures/report.py: the contents of the page, and that its commands repeat the measurements of
 * the rows. */
#include "figures.h"

TestSuite(report, .init = open_folder, .fini = remove_folder, .timeout = 120);

Test(report, refers_to_nothing_outside)
{
    shell("cp " FIXTURES "/* $D/results && cp -r tests/data/pretrain $D/results && sed -i 's/X1/<X\\&1>/' "
          "$D/results/*.csv && " REPORT "&& tests/check_page.py $D/report.html");
    cr_assert_eq(status, 0, "%s", out);
    shell("test $(grep -c '<svg' $D/report.html) = $(scripts/figures/draw.py --list | wc -l)");
    cr_assert_eq(status, 0, "a figure is missing");
    shell("grep -o '<pre>mpirun [^<]* 4 [^<]*\\|<dd>128.0 GiB' $D/report.html");
    cr_assert(
        says(
            "mpirun --bind-to none -n 4 ./fdsl-bench --variant fused --batch 1024 --scaling weak --verify") &&
            says("--scaling strong") && says("128.0 GiB"),
        "%s", out);
}

Test(report, your_rows_come_first_and_every_workload_is_shown)
{
    shell(
        "cp " FIXTURES "/*.csv $D/results && { head -1 " REFERENCE "/h200_infer.csv; tail -1 " REFERENCE
        "/h200_infer.csv; } > $D/results/infer.csv && awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) "
        "at[$i] = "
        "i } { print $0, NR == 1 ? \"settled,median_error\" : $at[\"variant\"] == \"naive\" ? \"no,0.074\" : "
        "\"yes,0.005\" }' " FIXTURES "/synth.csv > $D/results/synth.csv; " REPORT
        "&& tests/check_page.py $D/report.html && tr -d '\\n' < $D/report.html | grep -o '<h2 id=\"[a-z]*' | "
        "tr -d '\\n'");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("<h2 id=\"your<h2 id=\"figures<h2 id=\"reference<h2 id=\"machine"), "%s", out);
    shell("sed '/id=\"figures\"/q' $D/report.html | grep -o "
          "'<h3>\\(training\\|inference\\)[^<]*\\|<pre>[^<]*train-naive[^<]*\\|"
          "<pre>[^<]*infer-[^<]*\\|<pre>[^<]*pytorch[^<]*\\|± [^<]*\\|yes (not settled)' | sort | uniq -c");
    cr_assert(says("<h3>training, lenet on 3000 samples of digits, batch 64, adam at 0.001") &&
                  says("<pre>./fdsl-bench --variant train-naive --train-size 3000 --test-size 1000 --model "
                       "lenet --epochs 2\n"),
              "%s", out);
    cr_assert(says("<pre>scripts/compare/pytorch.py --device cpu --modes resident --train-size 3000"), "%s",
              out);
    cr_assert(says("<h3>inference, cnn, batch 4096, mnist") &&
                  says("infer-cuda --checkpoint run --data mnist --batch 4096"),
              "%s", out);
    cr_assert(says("± 0.5 %") && says("± 7.4 %") && says("yes (not settled)"), "%s", out);
    shell("grep -o '<h3>all-reduces[^<]*\\|<pre>[^<]*workload exchange[^<]*\\|<th[^>]*>busbw[^<]*' "
          "$D/report.html");
    cr_assert(says("<h3>all-reduces, f32, 2 ranks") &&
                  says("<pre>mpirun --bind-to none -n 2 ./fdsl-bench --workload exchange --variant ") &&
                  says("--bytes 1024,4096,16384") && says("busbw GB/s"),
              "%s", out);
}

Test(report, commands_have_the_threads_of_their_rows)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "16", "64", "weak")
              ON_CPU("2", "5", "64", "strong") "} > $D/results/a.csv; " REPORT
                                               "--reference $D/reference; grep -o '<pre>mpirun "
                                               "[^<]*' $D/report.html");
    cr_assert(
        says("mpirun --bind-to none -n 2 ./fdsl-bench --variant omp --scaling weak --threads 8 --verify\n"),
        "%s", out);
    cr_assert(says("./fdsl-bench --variant omp --batch 64 --scaling strong --verify\n"),
              "threads that differ between ranks must be left to the default: %s", out);
}

Test(report, without_rows)
{
    shell(REPORT "--reference $D/reference && tests/check_page.py $D/report.html");
    cr_assert_eq(status, 0, "%s", out);
    shell("grep -c 'to measure it\\|To measure it' $D/report.html");
    cr_assert_eq(atoi(out), 29, "%s", out);
}

Test(report, commands_of_loading)
{
    shell("cp " FIXTURES "/load.csv $D/results && " REPORT
          "--reference $D/reference && tests/check_page.py $D/report.html && grep -o '<h3>[0-9]* "
          "samples[^<]*\\|"
          "<pre>[^<]*' $D/report.html");
    cr_assert_eq(status, 0, "%s", out);
    cr_assert(says("<pre>./fdsl-bench --variant shards,shards-mmap,shards-uring,shards-omp --data "
                   "data/2048-shards --shuffle 0 --threads 1 --verify\n"),
              "%s", out);
    cr_assert(says("--variant files,files-uring --data data/2048-files --cache cold --verify\n"), "%s", out);
    cr_assert(says("<pre>scripts/compare/loading.py --files data/16384-files --batch 32 --workers 2\n"), "%s",
              out);
    cr_assert(says("1000 samples of 192.1 KiB, 10 shards, samples shuffled, cache warm, batch 32\n"), "%s",
              out);
    /* Sets ranks, rank, scaling and batch of a row. In a row of all ranks, batch is the sum over ranks. */
    shell("awk -F, -v OFS=, '$7 == \"shards-omp\" && $13 == 2 { $11 = 2; $12 = \"all\"; $14 = \"strong\"; "
          "$20 = "
          "128 } NR == 1 || $20 == 128' " FIXTURES "/load.csv > $D/results/load.csv && " REPORT
          "--reference $D/reference && grep -o '<pre>mpirun[^<]*' $D/report.html | head -1");
    cr_assert(says("-n 2 ./fdsl-bench --variant shards-omp --data data/2048-shards --batch 64 --shuffle 0 "
                   "--scaling strong --threads 1 --verify\n"),
              "%s", out);
}

#define TINY " --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0"
#define ODD                                                                                               \
    " --res 40 --batch 3 --vertices 20 --orbits 4 --formula visualatom --seed 7 --instance 5 --noise 1.5" \
    " --line-width 0.25 --radius 3 --oval-x 1.1 --oval-y 1.7 --freq1 3 --freq2 6"

Test(report, commands_repeat_their_rows)
{
    static const char *const jobs[] = {
        ODD, " --res 24 --batch 4 --classes 3 --preset visualatom",
        ODD " --dtype f16 --channels 3 --layout nhwc --out-res 20 --fit crop --mean 0.5"};
    const char *program = getenv("FDSL_BENCH");
    setenv("B", program ? program : "./fdsl-bench", 1);
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        const char *variant = i == 2 ? "omp" : "naive";
        shell("rm -f $D/results/a.csv; \"$B\" --variant %s %s" TINY " --out $D/results/a.csv", variant,
              jobs[i]);
        if (status == 2 || status == 4) /* a build without omp, or without presets */
            continue;
        cr_assert_eq(status, 0, "%s", out);
        shell(REPORT "&& grep -o '<pre>./fdsl-bench [^<]*' $D/report.html | head -9 | grep -m 1 -- '%s' | "
                     "sed 's/^<pre>..fdsl-bench//; s/&#x27;/'\\''/g' > $D/command; "
                     "eval \"$B $(cat $D/command)" TINY " --out $D/b.csv\"; cat $D/command",
              i == 1 ? "--classes 3" : "--res 40");
        cr_assert_eq(status, 0, "%s", out);
        shell("python3 -c 'import csv, sys\n"
              "a, b = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])\n"
              "columns = list(a)\n"
              "wrong = [c for c in columns[columns.index(\"batch\"):columns.index(\"warmups\")] if a[c] != "
              "b[c]]\n"
              "print(wrong)\nsys.exit(bool(wrong))' $D/results/a.csv $D/b.csv; s=$?; rm -f $D/b.csv; exit "
              "$s");
        cr_assert_eq(status, 0, "columns that differ: %s", out);
    }
}

Test(report, commands_repeat_their_rows_of_loading)
{
    static const char *const jobs[] = {"shards --shuffle 0 --batch 3 --seed 5 --cache any --decode",
                                       "shards-mmap --epochs 2 --prefetch 1 --augment --shift 2 --mean 0.5",
                                       "shards-omp --threads 2 --on-error skip"};
    const char *program = getenv("FDSL_BENCH");
    setenv("B", program ? program : "./fdsl-bench", 1);
    shell("\"$B\" --prepare $D/set --store shards --shards 2 --samples 20 --sample-shape 3,4,4 --dtype "
          "u8");
    if (status == 4) /* this build cannot prepare data sets */
        cr_skip_test("%s", out);
    cr_assert_eq(status, 0, "%s", out);
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        shell("rm -f $D/results/a.csv $D/b.csv; \"$B\" --data $D/set --variant %s" TINY
              " --out $D/results/a.csv",
              jobs[i]);
        if (status == 4) /* for example, a build without omp */
            continue;
        cr_assert_eq(status, 0, "%s", out);
        shell(REPORT
              "--reference $D/reference && grep -o '<pre>./fdsl-bench [^<]*--data [^<]*' $D/report.html |"
              " sed 's/^<pre>..fdsl-bench//' > $D/command; "
              "eval \"$B $(cat $D/command)" TINY " --out $D/b.csv\"; cat $D/command");
        cr_assert_eq(status, 0, "%s", out);
        shell("python3 -c 'import csv, sys\n"
              "a, b = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])\n"
              "columns = list(a)\n"
              "columns = columns[columns.index(\"data\"):columns.index(\"warmups\")] + [\"variant\", "
              "\"threads\", \"cache\"]\n"
              "wrong = [c for c in columns if a[c] != b[c]]\n"
              "print(wrong)\nsys.exit(bool(wrong))' $D/results/a.csv $D/b.csv");
        cr_assert_eq(status, 0, "columns that differ: %s", out);
    }
}
