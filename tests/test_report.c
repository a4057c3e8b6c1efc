/* Tests scripts/figures/report.py: the contents of the page, and that its commands repeat the measurements of
 * the rows. */
#include "figures.h"

#include "core/workload.h"

static void open_report(void)
{
    const char *program = getenv("FDSL_BENCH");
    open_folder();
    setenv("B", program ? program : "./fdsl-bench", 1);
}

TestSuite(report, .init = open_report, .fini = remove_folder, .timeout = 120);

Test(report, refers_to_nothing_outside)
{
    SHELL(
        0,
        "cp " FIXTURES
        "/* $D/results && cp -r tests/data/pretrain tests/data/formulas $D/results && sed -i 's/X1/<X\\&1>/' "
        "$D/results/*.csv && " REPORT "&& tests/check_page.py $D/report.html");
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
    SHELL_PRINTS(
        0, "<h2 id=\"your<h2 id=\"figures<h2 id=\"reference<h2 id=\"machine",
        "cp " FIXTURES "/*.csv $D/results && { head -1 " REFERENCE "/h200_infer.csv; tail -1 " REFERENCE
        "/h200_infer.csv; } > $D/results/infer.csv && awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) "
        "at[$i] = "
        "i } { print $0, NR == 1 ? \"settled,median_error\" : $at[\"variant\"] == \"naive\" ? \"no,0.074\" : "
        "\"yes,0.005\" }' " FIXTURES "/synth.csv > $D/results/synth.csv; " REPORT
        "&& tests/check_page.py $D/report.html && tr -d '\\n' < $D/report.html | grep -o '<h2 id=\"[a-z]*' | "
        "tr -d '\\n'");
    shell("sed '/id=\"figures\"/q' $D/report.html | grep -o "
          "'<h3>\\(training\\|inference\\)[^<]*\\|<pre>[^<]*train-naive[^<]*\\|"
          "<pre>[^<]*infer-[^<]*\\|<pre>[^<]*pytorch[^<]*\\|± [^<]*\\|yes (not settled)' | sort | uniq -c");
    EXPECT_OUT("<h3>training, lenet on 3000 samples of digits, batch 64, adam at 0.001",
               "<pre>./fdsl-bench --variant train-naive --train-size 3000 --test-size 1000 --model "
               "lenet --epochs 2\n");
    EXPECT_OUT("<pre>scripts/compare/pytorch.py --device cpu --modes resident --train-size 3000");
    EXPECT_OUT("<h3>inference, cnn, batch 4096, mnist",
               "infer-cuda --checkpoint run --data mnist --on-error fail --batch 4096");
    EXPECT_OUT("± 0.5 %", "± 7.4 %", "yes (not settled)");
    shell("grep -o '<h3>all-reduces[^<]*\\|<pre>[^<]*workload exchange[^<]*\\|<th[^>]*>busbw[^<]*' "
          "$D/report.html");
    EXPECT_OUT("<h3>all-reduces, f32, 2 ranks",
               "<pre>mpirun --bind-to none -n 2 ./fdsl-bench --workload exchange --variant ",
               "--bytes 1024,4096,16384", "busbw GB/s");
}

Test(report, commands_have_the_threads_of_their_rows)
{
    shell("{ head -1 " FIXTURES "/sweep_scaling.csv; " ON_CPU("2", "16", "64", "weak")
              ON_CPU("2", "5", "64", "strong") "} > $D/results/a.csv; " REPORT
                                               "--reference $D/reference; grep -o '<pre>mpirun "
                                               "[^<]*' $D/report.html");
    EXPECT_OUT("mpirun --bind-to none -n 2 ./fdsl-bench --variant omp --scaling weak --threads 8 --verify\n");
    cr_assert(says("./fdsl-bench --variant omp --batch 64 --scaling strong --verify\n"),
              "threads that differ between ranks must be left to the default: %s", out);
}

Test(report, without_rows_the_page_says_how_to_measure)
{
    SHELL(0, REPORT "--reference $D/reference && tests/check_page.py $D/report.html");
    shell("grep -c 'to measure it\\|To measure it' $D/report.html");
    cr_assert_eq(atoi(out), 34, "%s", out);
    shell("grep -A 1 '<b>break_even\\|<b>pretraining_tiny' $D/report.html");
    EXPECT_OUT("no data. To measure it (needs an NVIDIA GPU):</p>\n"
               "<pre>scripts/compare/break_even.sh DIR results/break_even</pre>",
               "<pre>scripts/compare/pretrain.py --model deit_tiny_patch16_224 --source live --out "
               "results/pretrain/rows.csv</pre>");
}

Test(report, commands_of_loading_have_the_options_of_their_rows)
{
    SHELL(0, "cp " FIXTURES "/load.csv $D/results && " REPORT
             "--reference $D/reference && tests/check_page.py $D/report.html && grep -o '<h3>[0-9]* "
             "samples[^<]*\\|^<pre>[^<]*\\|^[.s][^<]*\\|^<p [^<]*' $D/report.html");
    EXPECT_OUT(
        "<pre>test -e data/2048-shards || ./fdsl-bench --prepare data/2048-shards --store shards --shards 10 "
        "--samples 10000 --sample-shape 1920 --dtype u8 --classes 0\n"
        "./fdsl-bench --variant shards,shards-mmap,shards-uring,shards-omp --data "
        "data/2048-shards --shuffle 0 --threads 1 --verify\n");
    EXPECT_OUT("--variant files,files-uring --data data/2048-files --cache cold --verify\n");
    EXPECT_OUT("\nscripts/compare/loading.py --files data/16384-files --batch 32 --workers 2\n");
    EXPECT_OUT("data/2048-shards does not exist here. The first command writes samples of the same number "
               "and size, ");
    EXPECT_OUT("1000 samples of 192.1 KiB, 10 shards, samples shuffled, cache warm, batch 32\n");
    SHELL(0, "awk -F, -v OFS=, '$7 == \"shards\" { $28 = 1 } NR == 1 || $28 == 1' " FIXTURES
             "/load.csv > $D/results/load.csv && " REPORT "--reference $D/reference && cat $D/report.html");
    EXPECT_OUT("<pre>./fdsl-bench --variant shards --data data/2048-shards --decode", /* any images may be in
                                                                                         that set */
               "data/2048-shards does not exist here: replace it by the path of your copy.");
    /* Sets ranks, rank, scaling and batch of a row. In a row of all ranks, batch is the sum over ranks. */
    shell("awk -F, -v OFS=, '$7 == \"shards-omp\" && $13 == 2 { $11 = 2; $12 = \"all\"; $14 = \"strong\"; "
          "$20 = "
          "128 } NR == 1 || $20 == 128' " FIXTURES "/load.csv > $D/results/load.csv && " REPORT
          "--reference $D/reference && grep -o '^mpirun[^<]*' $D/report.html | head -1");
    EXPECT_OUT("-n 2 ./fdsl-bench --variant shards-omp --data data/2048-shards --batch 64 --shuffle 0 "
               "--scaling strong --threads 1 --verify\n");
}

#define TINY " --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0"
#define ODD                                                                                               \
    " --res 40 --batch 3 --vertices 20 --orbits 4 --formula visualatom --seed 7 --instance 5 --noise 1.5" \
    " --line-width 0.25 --radius 3 --oval-x 1.1 --oval-y 1.7 --freq1 3 --freq2 6"

/* Runs a job, then the command that the report shows for the rows of the job. The command must contain
 * `words`. The rows of the job and of the command must have the same values in the columns from `first` on,
 * which are parameters. */
static void expect_repeated(const char *job, const char *sampling, const char *words, const char *first)
{
    shell("rm -f $D/results/a.csv $D/b.csv; $B --variant %s%s --out $D/results/a.csv", job, sampling);
    if (status == 2 || status == 4) /* a build without omp, or without presets */
        return;
    cr_assert_eq(status, 0, "%s", out);
    SHELL(
        0,
        REPORT
        "--reference $D/reference && grep -o '<pre>./fdsl-bench [^<]*' $D/report.html | grep -m 1 -- '%s' | "
        "sed 's/^<pre>..fdsl-bench//; s/&#x27;/'\\''/g' > $D/command; "
        "eval \"$B $(cat $D/command)%s --out $D/b.csv\"; cat $D/command",
        words, sampling);
    shell("python3 -c 'import csv, sys\n"
          "a, b = (list(csv.DictReader(open(path)))[-1] for path in sys.argv[1:])\n"
          "columns = list(a)\n"
          "columns = columns[columns.index(\"%s\"):columns.index(\"warmups\")] + [\"variant\", "
          "\"threads\", \"cache\"]\n"
          "wrong = [c for c in columns if a[c] != b[c]]\n"
          "print(wrong)\nsys.exit(bool(wrong))' $D/results/a.csv $D/b.csv",
          first);
    cr_assert_eq(status, 0, "%s: columns that differ: %s", job, out);
}

Test(report, commands_repeat_their_rows)
{
    expect_repeated("naive" ODD, TINY, "--res 40", "batch");
    expect_repeated("naive --res 24 --batch 4 --classes 3 --preset visualatom", TINY, "--classes 3", "batch");
    expect_repeated("omp" ODD " --dtype f16 --channels 3 --layout nhwc --out-res 20 --fit crop --mean 0.5",
                    TINY, "--res 40", "batch");
}

Test(report, commands_repeat_their_rows_of_loading)
{
    shell("$B --prepare $D/set --store shards --shards 2 --samples 20 --sample-shape 3,4,4 --dtype u8 "
          "--classes 0");
    if (status == 4) /* this build cannot prepare data sets */
        cr_skip_test("%s", out);
    cr_assert_eq(status, 0, "%s", out);
    static const char *const jobs[] = {
        "shards --data $D/set --shuffle 0 --batch 3 --seed 5 --cache any --decode",
        "shards-mmap --data $D/set --epochs 2 --readahead 1 --augment --shift 2 --mean 0.5",
        "shards-omp --data $D/set --threads 2 --on-error skip"};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        expect_repeated(jobs[i], TINY, "--data ", "data");
}

/* Runs a mini `make bench` that deletes its data, then every command above a table of the report, in order.
 * The new rows must have the number and size of the samples of the old rows. */
Test(report, commands_make_the_data_that_is_not_there)
{
    shell("for s in files shards; do $B --prepare $D/$s --store $s --samples 20 --sample-shape 3,4,4 --dtype "
          "u8 || exit; done");
    if (status == 4) /* this build cannot prepare data sets */
        cr_skip_test("%s", out);
    cr_assert_eq(status, 0, "%s", out);
    SHELL(0, "mkdir $D/nets; for v in files shards shards-mmap; do $B --variant $v --data $D/${v%%-*} "
             "--verify" TINY
             " --out $D/results/load.csv || exit; done; $B --variant train-naive --model cnn --train-size 64 "
             "--test-size 16 "
             "--epochs 1 --checkpoint $D/nets/one && $B --variant infer-naive --checkpoint $D/nets/one" TINY
             " --out $D/results/infer.csv && rm -r $D/files $D/shards $D/nets && " REPORT
             "--reference $D/reference && grep -c 'class=figures' $D/report.html");
    SHELL(0,
          "python3 -c 'if True:\n"
          "    import html, os, re\n"
          "    page = open(os.environ[\"D\"] + \"/report.html\").read()\n"
          "    page = page[:page.index(\"id=\\\"figures\")]\n"
          "    for i, block in enumerate(re.findall(r\"<pre>(.*?)</pre>\", page, re.S)):\n"
          "        *before, command = html.unescape(block).split(\"\\n\")\n"
          "        print(*before, f\"{command}" TINY
          " --out $D/again{i}.csv\", sep=\"\\n\")' > $D/commands && "
          "sed -i \"s#[.]/fdsl-bench#$B#g\" $D/commands && cat $D/commands && bash -e $D/commands && for i "
          "in 0 1 2; do "
          "test -e $D/again$i.csv || exit; done && python3 -c '"
          "import csv, glob, sys\n"
          "def facts(pattern):\n"
          "    return sorted((row[\"variant\"], row[\"items\"], row.get(\"sample_bytes\"), "
          "row.get(\"shards\"), "
          "row.get(\"test_samples\")) for path in glob.glob(pattern) for row in csv.DictReader(open(path)))\n"
          "print(facts(sys.argv[1] + \"/results/*.csv\"), facts(sys.argv[1] + \"/again*.csv\"))\n"
          "sys.exit(facts(sys.argv[1] + \"/results/*.csv\") != facts(sys.argv[1] + \"/again*.csv\"))' $D");
}

#define TINY_TRAINING "train-omp --model vit-micro --train-size 32 --test-size 16 --batch 16 --epochs 2"

Test(report, commands_repeat_their_rows_of_training)
{
    expect_repeated(TINY_TRAINING " --recipe paper --data digits --out-res 28 --lr-warmup 1", "", "-size ",
                    "data");
    expect_repeated(TINY_TRAINING " --loss bce --clip-norm 1 --ema 0.99 --accumulate 2 --layer-decay 0.5 "
                                  "--lr-schedule polynomial --lr-power 2 --drop-path 0.1 --repeats 2",
                    "", "-size ", "data");
}

/* Every parameter of a row is in the command that measures it again. */
Test(report, commands_have_every_option)
{
    shell("cat > $D/every.py <<'END'\n"
          "import sys\n"
          "sys.path.insert(0, 'scripts/figures')\n"
          "import report, rows\n"
          "others = {'variant': 'x', 'cuda': '', 'ranks': 1, 'rank': '0', 'threads': 1, 'scaling': '',\n"
          "          'verified': 'no'}\n"
          "for workload, schema in rows.SCHEMAS.items():\n"
          "    table = rows.PARAMETERS[workload]\n"
          "    texts = {column: '1' if option.flag else '71' for column, option in table.items()}\n"
          "    texts['res'] = '72'\n"
          "    row = rows.Row(texts, schema=schema, batch=71, array_bytes=71, **others)\n"
          "    row.texts = texts\n"
          "    words = report.command([row]).split()\n"
          "    lacking = [option.option for option in table.values() if option.option not in words]\n"
          "    print(schema, len(table), lacking)\n"
          "    if lacking or not table: sys.exit(1)\n"
          "END\n"
          "python3 $D/every.py");
    cr_assert_eq(status, 0, "options that are not in the command: %s", out);
}

/* Trainings that differ in one option are separate. Empty fields are defaults. */
Test(report, training_runs_differ_in_every_option)
{
    shell("cp " FIXTURES "/train.csv $D/results && cd $D/results && for set in mixup=0.8 clip_norm=0.5 "
          "repeats=4 ema=0.9 loss=bce seed=1 mixup=0 loss=cross-entropy; do awk -F, -v OFS=, -v "
          "name=${set%%=*} "
          "-v value=${set#*=} 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } "
          "$at[\"variant\"] == \"train-naive\" { $at[name] = value; print }' train.csv >> more; done; "
          "cat more >> train.csv; rm more");
    SHELL(0, REPORT "--reference $D/reference >/dev/null && sed -n '/id=\"figures\"/q; "
                    "s/<pre>\\(.*train-naive[^<]*\\).*/\\1/p' "
                    "$D/report.html | grep -o 'epochs .*'");
    cr_expect_str_eq(out, "epochs 2\nepochs 2 --mixup 0.8\nepochs 2 --clip-norm 0.5\nepochs 2 --repeats 4\n"
                          "epochs 2 --ema 0.9\nepochs 2 --loss bce\nepochs 2 --seed 1\n");
}
