/* Tests scripts/sweep/reference.sh and scripts/compare/published.sh with stubs for fdsl-bench and the
 * published code. */
#include "figures.h"

static void open_reference(void)
{
    open_folder();
    setenv("FDSL_BENCH", "tests/data/published/bench.sh", 1);
    setenv("MEMORY", folder, 1);
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

#define SWEEP "scripts/sweep/reference.sh $D/out "

Test(reference, default_sections_fit_ten_minutes)
{
    shell(SWEEP "--list | awk '$3 == \"yes\" { s += $2 } END { print s <= 600 }'");
    cr_expect_str_eq(out, "1\n", "%s", out);
    shell(SWEEP "--mnist $D --dry-run");
    cr_expect(status == 0 && says("ladder: takes about ") && says("train-graph") && !says("compare/pytorch"),
              "%s", out);
    SHELL(0, SWEEP "--mnist $D --dry-run --section all");
    EXPECT_OUT("compare/pytorch.py", "--sync peer-fused", "compare/memory.py largest");
}

/* README.md names each file of rows that no section writes, with the reason. */
Test(reference, sections_write_all_rows)
{
    shell("sed -n '/^## Rows without a section/,/^## /p' " REFERENCE "/README.md > $D/others; "
          "{ " SWEEP "--list | awk '{ for (i = 5; i <= NF; i++) print $i }' | sed '/@/!s/^/@_/'; "
          "grep -o '`[^`]*\\.csv`' $D/others | tr -d '`' | sed 's/\\.csv$//'; } > $D/known; "
          "cd " REFERENCE " && ls *.csv */*.csv | grep -v ^quoted/ | sed 's/\\.csv$//' | while read -r f; do "
          "grep -qxF -e \"$f\" -e \"$(echo $f | sed 's/h[12]00/@/')\" $D/known || echo $f; done");
    cr_expect_str_eq(out, "", "no section writes these rows, and README.md does not tell why: %s", out);
    SHELL(0, "test $(wc -l < $D/others) -gt 3");
}

Test(reference, errors_are_reported_first)
{
    static const struct {
        const char *arguments;
        int status;
        const char *says;
    } faults[] = {
        {"", 2, "name a folder for the rows"},
        {"$D/out --section steps", 2, "no section 'steps'; the sections are train vit"},
        {"$D/out --section train", 2, "section train needs --mnist DIR"},
        {"$D/out --section ops-ranks", 4, "section ops-ranks needs 2 GPUs and mpirun"},
        {"$D/out --limit-s x", 2, "--limit-s 'x': give a whole number from 1"},
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
    SHELL(0, "mkdir $D/out; echo old > $D/out/h200_synth.csv; " SWEEP "--section ladder && "
             "tar -tzf $D/out/reference.tar.gz && cut -d, -f7 $D/out/h200_synth.csv | sort | uniq -c");
    cr_expect(says("h200_synth.csv\n") && says("5 omp\n") && says("1 naive\n") && !says("old"), "%s", out);
    SHELL(1, "STUB_FAILS=naive " SWEEP "--redo --section ladder,load-stress");
    EXPECT_OUT("ladder: failed with exit status 4", "load-stress: failed");
    shell("cut -f 1-2 $D/out/state.tsv | sort | paste -sd ';'; cut -d, -f7 $D/out/h200_synth.csv | uniq");
    cr_expect(says("ladder\tfailed;load-stress\tfailed") && says("omp\n") && !says("naive"),
              "measurements after a failure are missing: %s", out);
}

/* The states of the table at the end, as `section state;` */
#define STATES "| awk '/^section / { on = 1; next } on && NF > 2 { print $1, $3 \";\" }' | paste -sd ' '"
/* Starts a run that hangs at the second command of `ladder`, and then sends it a signal. Prints its exit
 * status, and whether the command still runs. */
#define INTERRUPT(signal)                                                                       \
    "STUB_HANGS=omp " SWEEP "--section load-cpu,ladder,formulas > $D/first 2>&1 & run=$!; "     \
    "for i in $(seq 200); do [ -s $D/out/new/h200_synth.csv.pid ] && break; sleep 0.05; done; " \
    "hangs=$(cat $D/out/new/h200_synth.csv.pid); kill -" signal                                 \
    " $run; wait $run; echo status $?; sleep 0.1; "                                             \
    "kill -0 $hangs 2> /dev/null && echo runs on; "

Test(reference, an_interrupted_run_continues)
{
    shell(INTERRUPT("TERM"));
    cr_expect(says("status 143\n") && !says("runs on"), "%s", out);
    shell("cat $D/first " STATES "; ls $D/out/*.csv");
    cr_expect(says("load-cpu done; ladder left:; formulas left;") && says("h200_load_cpu.csv\n") &&
                  !says("h200_synth.csv"),
              "an incomplete file is in the folder: %s", out);
    SHELL(1, SWEEP "--limit-s 150 --section load-cpu,ladder,formulas 2>&1 " STATES "; " SWEEP
                   "--limit-s 150 --section ladder");
    cr_expect(says("load-cpu done; ladder left:; formulas done;") && says("takes about 165 s, 1"), "%s", out);
    shell("rm $D/out/state.tsv; " INTERRUPT("KILL") SWEEP "--section ladder; kill $hangs");
    cr_expect(says("runs on") && says("another run measures into "), "%s", out);
    SHELL(0, "sleep 0.1; " SWEEP "--section load-cpu,ladder,formulas");
    EXPECT_OUT("load-cpu: is done", "ladder: took", "formulas: took");
    SHELL(0, "grep -c . $D/out/h200_synth.csv; " SWEEP "--redo --section load-cpu");
    cr_expect(says("load-cpu: took") && !says("is done"), "%s", out);
    SHELL_PRINTS(2, "has rows of 0123456789ab, no GPU, h200, and this run is of abc, no GPU, h200;",
                 "STUB_REVISION=abc " SWEEP "--section load-cpu");
    SHELL_PRINTS(2, "this run is of 0123456789ab, no GPU, h100;", SWEEP "--prefix h100 --section load-cpu");
    SHELL_PRINTS(1, "load-cpu              ~40  left: takes about 40 s, ",
                 SWEEP "--redo --limit-s 2 --section load-cpu");
    SHELL(0, "rm $D/out/h200_load_cpu.csv; " SWEEP "--section load-cpu");
    cr_expect(says("load-cpu: took") && !says("is done"), "a file was deleted: %s", out);
    SHELL_PRINTS(2, "--prefix 'a/b': give letters", SWEEP "--prefix a/b");
    SHELL_PRINTS(2, "--limit-s needs a value", SWEEP "--limit-s");
    SHELL_PRINTS(2, "state.tsv is damaged at 'load-cpu'",
                 "sed -i 's/done/no/' $D/out/state.tsv; " SWEEP "--section load-cpu");
}
