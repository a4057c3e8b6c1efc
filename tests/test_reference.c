/* Tests scripts/sweep/reference.sh and scripts/compare/published.sh with stubs for fdsl-bench and the
 * published code. */
#include "figures.h"

static void open_reference(void)
{
    open_folder();
    setenv("FDSL_BENCH", "tests/data/published/bench.sh", 1);
}

TestSuite(reference, .init = open_reference, .fini = remove_folder, .timeout = 120);

/* ---- The published code ---- */

#define PROFILE "=tests/data/published/profile.sh "
#define PUBLISHED                                                                            \
    "scripts/compare/published.py tests/data/published $D/results/published.csv --images 4 " \
    "gbase:256:1000:1" PROFILE "bat:512:1000:512" PROFILE "bat:512:400:256" PROFILE
/* Prints variant, resolution, vertices, batch, microseconds per batch, device and `verified` of each row. */
#define SHOW                                                                                               \
    "awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } { print $at[\"variant\"], "           \
    "$at[\"res\"], "                                                                                       \
    "$at[\"vertices\"], $at[\"batch\"], 1e6 * $at[\"time_median_s\"], $at[\"device\"], $at[\"verified\"] " \
    "}' "                                                                                                  \
    "$D/results/published.csv"

Test(reference, published_code_is_timed_at_the_sizes_of_the_figures)
{
    SHELL(0, PUBLISHED "&& " SHOW);
    cr_expect(says("\npublished-python 512 200 1 205 Made-up(R) Processor 9000 no\n"),
              "not the median of four images of 1.01 to 1.04 times 200 us: %s", out);
    EXPECT_OUT("\npublished-numpy 1024 1000 1 512.5 ");
    EXPECT_OUT("\npublished-gbase 256 1000 1 105.4 Made-up Accelerator X1 no\n");
    EXPECT_OUT("\npublished-bat 512 1000 512 53964.8 ", "\npublished-bat 512 400 256 26982.4 ");
    shell("cut -d, -f7 $D/results/published.csv | sort | uniq -c | tr -s ' ' | tr '\\n' ';'");
    cr_expect_str_eq(out,
                     " 2 published-bat; 1 published-gbase; 7 published-numpy; 7 published-python; 1 variant;",
                     "%s", out);
    shell(SELECT "vertices resolution batch > /dev/null; grep -h '^array legend_text' $D/work/*.vars; " REPORT
                 "> /dev/null; grep -c '<pre>scripts/compare/published.sh CLONE' $D/report.html");
    EXPECT_OUT("'published-python, batch 1', 'published-numpy, batch 1'",
               "'published-gbase, batch 1', 'published-bat, batch 512'", "'published-bat, batch 256'");
    cr_expect(!says("\n0\n"), "%s", out);
}

Test(reference, missing_parts_of_the_published_code_are_skipped)
{
    SHELL(0, "cp -r tests/data/published $D/clone; sed -i '1a import noise.nowhere as noise' "
             "$D/clone/cpu/datagen.py; "
             "scripts/compare/published.py $D/clone $D/p.csv bat:512:1000:4" PROFILE
             "&& cut -d, -f7 $D/p.csv | sort -u");
    EXPECT_OUT("the published Python code is skipped: ",
               "install noise (the published code needs pillow, noise, numpy)");
    cr_expect(says("published-bat\n") && !says("published-numpy"), "%s", out);
    SHELL(4, "scripts/compare/published.py $D/clone $D/q.csv");
    SHELL(4, "scripts/compare/published.py $D/clone $D/q.csv bat:512:1000:4=nowhere");
    SHELL(2, "scripts/compare/published.py $D/clone $D/q.csv gbase:512:1000:4" PROFILE);
    SHELL(1, "STUB_TIME_MS=none scripts/compare/published.py $D/clone $D/q.csv bat:512:1000:4" PROFILE);
    SHELL(0, "STUB_FAILS=gbase,bat " PUBLISHED);
    EXPECT_OUT("profile.sh is skipped: gbase cannot run here");
    SHELL_PRINTS(2, "has no cpu/datagen.py; give a clone of", "scripts/compare/published.py $D $D/q.csv");
    shell("STUB_FAILS=gbase scripts/compare/published.sh tests/data/published $D/results/r.csv && head -2 "
          "$D/results/r.csv");
    cr_expect(status == 0 && says("published-python"),
              "without a GPU, the Python code of the clone must be timed: %s", out);
}

/* ---- Reference rows ---- */

Test(reference, default_sections_fit_ten_minutes)
{
    shell(
        "scripts/sweep/reference.sh $D/out --list | awk '$3 == \"yes\" { s += $2 } END { print s <= 600 }'");
    cr_expect_str_eq(out, "1\n", "%s", out);
    shell("scripts/sweep/reference.sh $D/out --mnist $D --dry-run");
    cr_expect(status == 0 && says("ladder: takes about ") && says("train-graph") && !says("compare/pytorch"),
              "%s", out);
    SHELL(0, "scripts/sweep/reference.sh $D/out --mnist $D --dry-run --section "
             "$(scripts/sweep/reference.sh $D/out --list | awk '{ print $1 }' | paste -sd,)");
    EXPECT_OUT("compare/pytorch.py");
    /* results/reference must have every file that reference.sh writes. */
    SHELL(0, "ls $(scripts/sweep/reference.sh $D/out --list | awk '{ for (i = 4; i <= NF; i++) print "
             "\"results/reference/h?00_\" $i \".csv\" }')");
}

Test(reference, errors_are_reported_first)
{
    static const struct {
        const char *arguments;
        int status;
        const char *says;
    } faults[] = {
        {"", 2, "name a folder for the rows"},
        {"$D/out --section steps", 2, "no section 'steps'; the sections are ladder break-even"},
        {"$D/out --section train", 2, "section train needs --mnist DIR"},
        {"$D/out --sections ladder", 2, "unknown option --sections"},
        {"$D/out $D/other", 2, "one folder at a time"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        shell("scripts/sweep/reference.sh %s", faults[i].arguments);
        cr_expect(status == faults[i].status && says(faults[i].says), "%s: %d, %s", faults[i].arguments,
                  status, out);
    }
    SHELL(4, "STUB_REVISION=unknown scripts/sweep/reference.sh $D/out --section ladder");
    EXPECT_OUT("build it with make REVISION=NAME");
}

Test(reference, a_section_replaces_its_files)
{
    SHELL(0, "mkdir $D/out; echo old > $D/out/h200_synth.csv; scripts/sweep/reference.sh $D/out --section "
             "ladder && "
             "tar -tzf $D/out/reference.tar.gz && cut -d, -f7 $D/out/h200_synth.csv | sort | uniq -c");
    cr_expect(says("h200_synth.csv\n") && says("5 omp\n") && says("1 naive\n") && !says("old"), "%s", out);
    shell("STUB_FAILS=naive scripts/sweep/reference.sh $D/out --section ladder,monitor; cut -d, -f7 "
          "$D/out/h200_synth.csv | uniq");
    cr_expect(says("ladder: failed with exit status 4") && says("failed: ladder monitor") && says("omp\n"),
              "measurements after a failure are missing: %s", out);
}
