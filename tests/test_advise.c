/* Tests fdsl-bench advise: the verdict on invented measurements, and the command on small data sets. */
#include "shell.h"

#include <math.h>

#include "run/advise_parts.h"
#include "run/formats.h"

TestSuite(advise, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- The verdict ---- */

/* 256 images per 5 ms: a step consumes 51,200 images per second. */
static const struct advice_question five_ms = {.step_s = 0.005, .batch = 256, .res = 224};

static struct advice way(const char *name, double images_per_s, double disk_bytes, double memory_bytes)
{
    struct advice advice = {.name = name,
                            .variant = "v",
                            .measured = images_per_s > 0,
                            .images_per_s = images_per_s,
                            .disk_bytes = disk_bytes,
                            .memory_bytes = memory_bytes,
                            .joules_per_image = NAN};
    advise_compute(&five_ms, &advice);
    return advice;
}

static void expect_best(const struct advice *advice, size_t count, size_t best, const char *words)
{
    char text[2048];
    cr_expect_eq(advise_best(advice, count), best, "%zu, not %zu", advise_best(advice, count), best);
    advise_verdict(&five_ms, advice, count, best, text, sizeof text);
    cr_expect(strstr(text, words), "'%s' is not in '%s'", words, text);
}

Test(advise, the_way_that_waits_least_is_best)
{
    struct advice advice[] = {way("generating", 61349, 0, 0), way("memory", 40000, 2e9, 3e9),
                              way("disk", 10000, 2e9, 1e9), way("the URL", 900, 0, 1e8)};
    expect_best(advice, 4, 0,
                "Best here: generating (v), for images of 224 x 224 pixels. It delivers 61,300 images/s, a "
                "step of 5 ms on 256 images consumes 51,200, and so the step never waits. With memory (v), "
                "which is next, the step waits 22 % of the time. A million images take 19.5 s, no disk, no "
                "memory and an unknown amount of energy.");
    advice[0] = way("generating", 999.7, 0, 0);
    expect_best(advice, 4, 1, "Best here: memory (v)");
    expect_best(advice, 4, 1, " A million images take 25 s, 2 GB of disk, 3 GB of memory and");
    advice[2] = way("disk", 50000, 2e9, 1e9);
    expect_best(advice, 4, 2, "waits 2 % of the time. With memory (v), which is next, the step waits 22 %");
    advice[3] = way("the URL", 1e9, 0, 1e8);
    expect_best(advice, 4, 3,
                "Best here: the URL (v), for images of 224 x 224 pixels. It delivers "
                "1,000,000,000 images/s");
}

Test(advise, long_times_are_printed_in_minutes_or_hours)
{
    struct advice advice = way("disk", 1000, 0, NAN);
    expect_best(&advice, 1, 0, "It delivers 1,000 images/s");
    expect_best(&advice, 1, 0, "A million images take 16.7 min, no disk, an unknown amount of memory and");
    advice = way("disk", 100, 0, 0);
    expect_best(&advice, 1, 0, "It delivers 100 images/s");
    expect_best(&advice, 1, 0, "A million images take 2.78 h,");
}

Test(advise, among_equally_fast_ways_the_cheapest_is_best)
{
    struct advice advice[] = {way("memory", 900000, 2e9, 3e9), way("disk", 60000, 2e9, 1e9),
                              way("remote", 50500, 0, 1e9), way("slow", 1000, 0, 0)};
    struct advice small[] = {way("a core", 50500, 0, 0), way("a GPU", 60000, 0, 9e8)};
    /* The sizes differ by less than 1 GB, so they do not count. */
    expect_best(small, 2, 1, " A core (v) is as fast within 3 %. A million");
    small[1].memory_bytes = 1.1e9;
    expect_best(small, 2, 0, ", but takes 1.1 GB of disk and memory instead of 0 GB");
    expect_best(
        advice, 4, 2,
        " Memory (v) is as fast within 3 %, but takes 5 GB of disk and memory instead of 1 GB. A million");
    advice[2].reached_per_s = 0.96 * 51200; /* outside the margin */
    expect_best(advice, 4, 1, "Best here: disk");
    advice[0].disk_bytes = 0; /* as many bytes as advice[1], whose energy is unknown */
    advice[0].memory_bytes = 3e9;
    advice[0].joules_per_image = 0.1;
    expect_best(advice, 4, 0,
                " Disk (v) is as fast within 3 %. A million images take 19.5 s, no disk, 3 GB "
                "of memory and 100 kJ of the GPU's energy.");
    advice[1].joules_per_image = 0.05;
    expect_best(advice, 4, 1, " Memory (v) is as fast within 3 %, but takes 2 times the energy.");
}

/* A step never waits for generated images, but generating them slows the step down. */
Test(advise, a_way_that_slows_the_step_down_ranks_lower)
{
    struct advice advice[] = {way("generating", 2e6, 0, 0), way("memory", 8e5, 2e9, 2e9)};
    advice[0].reached_per_s = 0.86 * 51200;
    expect_best(advice, 2, 1, "With generating (v), which is next, the step never waits.");
    struct advice turned[] = {advice[1], advice[0]};
    expect_best(turned, 2, 0, "Best here: memory");
    advice[1].measured = false;
    expect_best(advice, 2, 0, "so the step never waits, but runs at 86 % of its speed. A million");
}

Test(advise, ways_that_were_not_measured_do_not_count)
{
    struct advice advice[] = {way("generating", 0, 0, 0), way("disk", 100, 2e9, NAN)};
    expect_best(advice, 2, 1, "so the step waits 100 % of the time. A million");
    advice[1].measured = false;
    expect_best(advice, 2, 2, "");
    cr_expect_eq(advise_best(advice, 0), 0);
}

/* ---- The output ---- */

/* Every number is different, so that no column can have the value of another. */
Test(advise, columns_have_their_own_values)
{
    const struct advise_options options[] = {{.data = "set", .format = FORMAT_TABLE},
                                             {.data = "set", .format = FORMAT_CSV}};
    const struct advise_set set = {
        .samples = 1234, .bytes = 5600000000, .files = 9, .measured_files = 7, .measured_bytes = 4200000000};
    const struct advice advice[] = {{.name = "memory",
                                     .variant = "v",
                                     .measured = true,
                                     .images_per_s = 12345.6,
                                     .stall_share = 0.25,
                                     .reached_per_s = 38400,
                                     .disk_bytes = 2e9,
                                     .memory_bytes = 3e9,
                                     .joules_per_image = 0.5},
                                    {.name = "disk",
                                     .variant = "w",
                                     .reason = "no disk",
                                     .images_per_s = NAN,
                                     .stall_share = NAN,
                                     .reached_per_s = NAN,
                                     .disk_bytes = NAN,
                                     .memory_bytes = NAN,
                                     .joules_per_image = NAN}};
    cr_assert_eq(chdir(folder), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_not_null(freopen(i ? "csv" : "table", "w", stdout));
        cr_assert_eq(advise_print(&options[i], &set, &five_ms, advice, 2), STATUS_OK);
    }
    EXPECT(0, "cat table csv");
    EXPECT_OUT("advise: data set, 1234 samples, 5.6 GB (measured: 7 of 9 shards, 4.2 GB); images 224 x 224; "
               "batch 256; a step takes 5 ms\n");
    EXPECT_OUT(
        "\nway                    variant        images/s  waits/%    hours/1e6  disk/GB  memory/GB  "
        "J/1000 images\n"
        "memory                 v                 12346       25      0.00723        2          3        "
        "    500\n"
        "disk                   w            not possible: no disk\n");
    EXPECT_OUT("way,variant,best,images_per_s,stall_share,reached_per_s,disk_bytes,memory_bytes,"
               "joules_per_image,reason\n"
               "memory,v,1,12345.6,0.25,38400,2e+09,3e+09,0.5,\n"
               "disk,w,0,,,,,,,no disk\n");
}

/* ---- The command ---- */

#if defined(HAVE_XXHASH)

#define ADVISE "$P advise --compute 1000 --batch 4 --seconds 0.01 "

/* Sets `text` to the beginning of the table row that is named `name`, and returns it. */
static const char *row_begin(const char *name, char *text, size_t size)
{
    snprintf(text, size, "\n%s ", name);
    return text;
}

Test(advise, each_way_to_get_images_is_measured)
{
    char text[64];
    EXPECT(0,
           "$P --prepare d --from synth --res 24 --samples 12 --shards 2 && " ADVISE "--data d --out rows");
    cr_expect(says(row_begin("shards from memory", text, sizeof text)), "%s", out);
    cr_expect(says(row_begin("shards from disk", text, sizeof text)), "%s", out);
    EXPECT_OUT("\ngenerating on the ", "Best here: ");
    EXPECT(0, "grep -c ^synth/ rows/synth.csv && grep -c ^load/ rows/load.csv && cut -d, -f17 rows/synth.csv "
              "| tail -1");
    cr_expect(says("24"), "the generated images have another size: %s", out);
}

#ifdef _OPENMP
/* Computes the columns from the rows of the measurements, which --out keeps, and from the data set. A step of
 * 0.1 ms consumes 120,000 images per second, so that it waits for some of the sources. */
static const char values_check[] =
    "import csv, json, os, sys\n"
    "STEP_S, BATCH, RES, CHANNELS = 1e-4, 12, 24, 1\n"
    "COLUMNS = ['images_per_s', 'stall_share', 'reached_per_s', 'disk_bytes', 'memory_bytes',\n"
    "           'joules_per_image']\n"
    "disk = sum(os.path.getsize('d/' + name) for name in os.listdir('d') if name.endswith('.tar'))\n"
    "def row_of(kind, workload, cache):\n"
    "    with open(f'{kind}/{workload}.csv') as file:\n"
    "        return next((row for row in csv.DictReader(file) if row.get('cache', '') == cache), None)\n"
    "def expected(kind):\n"
    "    for way, workload, cache in [('generating on the CPU', 'synth', ''),\n"
    "                                 ('shards from memory', 'load', 'warm'),\n"
    "                                 ('shards from disk', 'load', 'cold')]:\n"
    "        row = row_of(kind, workload, cache)\n"
    "        if row is None:\n"
    "            assert cache == 'cold', f'{way} was not measured'  # some file systems keep files in "
    "memory\n"
    "            continue\n"
    "        speed, needed = float(row['items_per_s']), BATCH / STEP_S\n"
    "        reached = min(speed, needed)\n"
    "        memory = float(row['peak_memory_bytes']) if cache else RES * RES * CHANNELS * BATCH\n"
    "        yield way, [speed, 1 - reached / needed, reached, disk if cache else 0,\n"
    "                    memory + (disk if cache == 'warm' else 0), None]\n"
    "def compare(kind, rows):\n"
    "    best = [way for way, row in rows.items() if row['best'] in ('1', 1)]\n"
    "    most = max(values[2] for _, values in expected(kind))\n"
    "    for way, values in expected(kind):\n"
    "        for column, value in zip(COLUMNS, values):\n"
    "            got = rows[way][column]\n"
    "            got = None if got in ('', None) else float(got)\n"
    "            same = got == value if value is None else got is not None and "
    "abs(got - value) <= 1e-6 * abs(value)\n"
    "            assert same, f'{kind}: {way}: {column} is {got}, not {value}'\n"
    "        if way in best:\n"
    "            assert values[2] >= 0.97 * most and not rows[way]['reason']\n"
    "    assert len(best) == 1, best\n"
    "    for way, row in rows.items():\n"
    "        assert (row['images_per_s'] in ('', None)) == bool(row['reason']), row\n"
    "def rows_of(rows):\n"
    "    return {row['way']: row for row in rows if row['variant'] in ('omp', 'shards-omp')}\n"
    "with open('csv.txt') as file:\n"
    "    compare('csv', rows_of(csv.DictReader(file)))\n"
    "if os.path.exists('json.txt'):\n"
    "    with open('json.txt') as file:\n"
    "        document = json.load(file)\n"
    "    compare('json', rows_of(document['rows']))\n"
    "    about = document['advice']\n"
    "    assert (about['batch'], about['step_s'], about['res']) == (BATCH, STEP_S, RES), about\n"
    "    assert next(row['way'] for row in document['rows'] if row['best']).lower() in "
    "about['verdict'][:60].lower()\n"
    "with open('table.txt') as file:\n"
    "    text = file.read()\n"
    "assert f'data d, 12 samples, {disk / 1e9:.3g} GB; images 24 x 24; batch 12; a step takes 0.1 ms' in "
    "text, "
    "text\n"
    "for way, values in expected('table'):\n"
    "    cells = next(line for line in text.split('\\n') if line.startswith(way) and '-gpu' not in line)"
    "[35:].split()\n"
    "    wanted = [values[0], 100 * values[1], 1e6 / 3600 / values[2], values[3] / 1e9, values[4] / 1e9]\n"
    "    assert cells.pop() == 'unknown' and len(cells) == len(wanted), cells\n"
    "    for cell, value in zip(cells, wanted):\n"
    "        assert abs(float(cell) - value) <= 0.006 * abs(value), f'table: {way}: {cell} is not {value}'\n";

Test(advise, values_are_those_of_the_rows_and_the_set)
{
    static const char *const formats[] = {"table", "csv", "json"};
    if (run("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    put_text("check.py", values_check);
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 12 --shards 2 --encode npy");
    for (size_t i = 0; i < COUNT_OF(formats); i++) {
        if (run("CUDA_VISIBLE_DEVICES= $P advise --compute 0.1 --batch 12 --seconds 0.01 --data d --out %s "
                "--format %s >%s.txt 2>err.txt",
                formats[i], formats[i], formats[i]) == 0)
            continue;
        EXPECT(0, "grep 'this build has no jansson' err.txt && rm %s.txt", formats[i]);
    }
    EXPECT(0, "python3 check.py 2>&1");
}
#endif

/* GPU variants are in the table even if they cannot run. The CPU variants deliver decoded images. */
Test(advise, impossible_ways_are_listed_with_a_reason)
{
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 12 --shards 2 --encode npy");
    EXPECT_PRINTS(0, "generating on the GPU  fused        not possible: ",
                  "CUDA_VISIBLE_DEVICES= " ADVISE "--data d --out rows");
    EXPECT_OUT("the set in GPU memory  gpu-resident not possible: ");
    EXPECT_OUT("shards from disk       shards-gpu   not possible: ");
    cr_expect(!says("not possible: variant '"),
              "a run reported the reason, but no run is needed to know it: %s", out);
    EXPECT_OUT("(waits are computed, because there is no GPU)");
    EXPECT_OUT("images 24 x 24; batch 4; a step takes 1000 ms");
    EXPECT(0, "tr , '\\n' < rows/load.csv | grep -cx order+copy+decode");
}

/* --subset measures a temporary folder of links to the first shards, and removes this folder. */
Test(advise, a_part_of_a_large_set_is_measured)
{
    EXPECT(0, "$P --prepare d --from synth --res 24 --samples 40 --shards 4 && mkdir t && TMPDIR=t " ADVISE
              "--data d --subset 50K --out rows && echo left: $(ls -A t)");
    EXPECT_OUT("40 samples, ", "(measured: 2 of 4 shards, ", "left:\n");
    EXPECT_PRINTS(0, "items 20",
                  "awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) "
                  "if ($i == \"items\") c = i } END { print \"items \" $c }' rows/load.csv");
}

Test(advise, files_and_urls_have_their_own_ways)
{
    EXPECT_PRINTS(0,
                  "way,variant,best,images_per_s,stall_share,reached_per_s,disk_bytes,memory_bytes,"
                  "joules_per_image,reason\n",
                  "$P --prepare f --store files --from synth --res 24 --samples 12 --encode png && " ADVISE
                  "--data f --out-res 16 --format csv");
    cr_expect(says("\nfiles from memory,") && says("\nfiles from disk,") && !says("shards"), "%s", out);
    if (run(ADVISE "--data f --format json") == 0) /* builds without jansson cannot write JSON */
        EXPECT_OUT("\"verdict\": \"Best here: ", "\"way\": \"files from disk\"");
#ifdef HAVE_CURL
    EXPECT_PRINTS(0, "\nshards from memory ",
                  "$P --prepare s --from synth --res 24 --samples 12 --shards 1 && " ADVISE
                  "--data file://$PWD/s");
#endif
}

Test(advise, wrong_options_and_data_are_refused)
{
    expect_refused(2, "name the data set with --data DIR or URL", "$P advise --compute 5");
    expect_refused(2, "unexpected argument 'photos'; write --data photos", "$P advise photos --compute 5");
    expect_refused(2, "unexpected argument 'photos'; write --data photos", "$P advise --compute 5 photos");
    expect_refused(2, "say how long a training step takes: --compute MS", "$P advise --data x");
    expect_refused(2, "x: No such file or directory", "$P advise --data x --compute 5");
    expect_refused(2, "did you mean '--compute'?", "$P advise --data x --computed 5");
    expect_refused(2, "--compute", "$P advise --data x --compute fast");
    expect_refused(2, "--image", "$P advise --data . --compute 5 --image ';;'");
    expect_refused(4, "--compute train:lenet needs a GPU",
                   "CUDA_VISIBLE_DEVICES= $P advise --data x --compute train:lenet");
    expect_refused(4, "--device 1000: ", "$P advise --data x --compute 5 --device 1000");
    expect_refused(2, "unknown command 'advice'; did you mean 'advise'?", "$P advice");
    EXPECT(0, "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && touch file");
    expect_refused(2, "--cache-dir is for data at a URL", ADVISE "--data d --cache-dir c");
    expect_refused(2, "--out file/rows: cannot create the folder", ADVISE "--data d --out file/rows");
    expect_refused(2, "--out file: this is a file", ADVISE "--data d --out file");
    expect_refused(2, "'cls' is not an image, and advise compares images", ADVISE "--data d --member cls");
    EXPECT(0, "mkdir bad && for i in 1 2 3; do echo broken >bad/$i.png; echo $i >bad/$i.cls; done");
    expect_refused(1, "sample '1': ", ADVISE "--data bad");
    expect_refused(1, "; --on-error skip omits such samples", ADVISE "--data bad");
}

Test(advise, no_files_are_left)
{
    EXPECT_PRINTS(0, "left:\n",
                  "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && mkdir t && TMPDIR=t " ADVISE
                  "--data d && echo left: $(ls -A t)");
    EXPECT_PRINTS(0, "143 left:\n",
                  ": ; (TMPDIR=t; export TMPDIR; exec $P advise --data d --compute 1000 "
                  "--batch 4 --seconds 20) & p=$!; "
                  "for i in $(seq 500); do [ -z \"$(ls -A t)\" ] || break; sleep 0.01; done; "
                  "kill $p; wait $p; echo $? left: $(ls -A t)");
}

/* Rank 0 measures in runs of one rank. All other ranks print nothing. */
Test(advise, under_a_launcher_only_rank_0_advises)
{
    EXPECT_PRINTS(0, "Best here: ",
                  "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && OMPI_COMM_WORLD_SIZE=2 "
                  "OMPI_COMM_WORLD_RANK=0 timeout 60 " ADVISE "--data d");
    EXPECT_EXACTLY(0, "", "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 " ADVISE "--data d");
}

#endif
