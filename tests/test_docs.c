/* Tests that the docs agree with the program: every option is on a page, links lead to files, and numbers
 * equal those of the rows. */
#include "command.h"
#include "folder.h"

static void start(void)
{
    static char program[PATH_MAX];
    find_program(program);
    setenv("P", program, 1);
}

TestSuite(docs, .init = start, .timeout = 60);

#define PAGES "README.md docs/*.md"
/* Copies the pages and the rows to $D, so that a test can change them. */
#define COPY                                                                                   \
    "rm -rf $D/docs $D/results && mkdir -p $D/results && cp README.md $D && cp -r docs $D && " \
    "cp results/README.md $D/results && cp -r results/reference $D/results && "
#define NUMBERS "scripts/check/docs_numbers.py --root $D "
#define OPTIONS                                                                               \
    "{ $P --help --verbose; $P --prepare --help; $P compare --help; } | sed -n 's/^  \\(-., " \
    "\\)\\?\\(--[a-z0-9-]*\\).*/\\2/p' | "                                                    \
    "sort -u"

Test(docs, every_option_is_on_a_page)
{
    shell(OPTIONS);
    EXPECT_OUT("--variant\n", "--sample-shape\n", "--verbose\n");
    shell(OPTIONS " | while read -r option; do grep -qE -e \"$option([^a-z0-9-]|$)\" " PAGES
                  " || echo $option; done");
    cr_expect_str_eq(out, "", "these options are on no page: %s", out);
}

Test(docs, every_link_leads_to_a_file)
{
    shell("for page in " PAGES " results/README.md results/reference/README.md; do "
          "grep -o '](\\([^)#]*\\)' $page | cut -c 3- | grep -v '^http' | "
          "while read -r file; do test -e $(dirname $page)/$file || echo $page: $file; done; done");
    cr_expect_str_eq(out, "", "%s", out);
}

/* The program may still be writing when man.sh has read the examples. SIGPIPE must not end the program. */
Test(docs, the_man_page_waits_for_a_slow_program)
{
    SHELL(0,
          "cd $(mktemp -d) && printf '#!/bin/sh\\n%%s \"$@\"; s=$?; sleep 0.1; echo; exit $s\\n' $P >slow && "
          "chmod +x slow && cd - >/dev/null && scripts/packaging/man.sh $OLDPWD/slow 1.2.3; s=$?; "
          "rm -r $OLDPWD; exit $s");
    EXPECT_OUT(".SH EXAMPLES\n.nf\n", ".SH EXIT STATUS\n");
}

/* ---- Numbers ---- */

static void need_python(void)
{
    static char folder[] = "/tmp/fdsl-docs-XXXXXX";
    if (shell("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    cr_assert_not_null(mkdtemp(folder));
    setenv("D", folder, 1);
}

static void remove_copy(void)
{
    shell("rm -rf \"$D\"");
}

TestSuite(numbers, .init = need_python, .fini = remove_copy, .timeout = 300);

Test(numbers, numbers_on_the_pages_equal_those_of_the_rows)
{
    shell("scripts/check/docs_numbers.py");
    cr_expect_eq(status, 0,
                 "scripts/check/docs_numbers.py --fix writes the numbers of the rows into the pages: %s",
                 out);
}

/* Changes of the pages, rows or docs/numbers.txt, and the messages that they must cause. */
static const struct {
    const char *change, *says;
} changes[] = {
    {"sed -i 's/,0.0105[0-9]*,/,0.0205,/' $D/results/reference/h200_infer.csv; "
     "sed -i '/,fused,/s/,256,512,1000,/,255,512,1000,/' $D/results/reference/h200_synth.csv",
     "us(fused batch=256): 0 rows of h200_synth fit 'variant=fused batch=256 res=512"},
    {"awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } $at[\"variant\"] == \"gbase\" { "
     "$at[\"time_median_s\"] *= 2 } 1' results/reference/h200_synth.csv > "
     "$D/results/reference/h200_synth.csv",
     " should be 1,630, from us(gbase batch=32)\n"},
    {"sed -i 's/H200. This is [0-9.]* times/H200. This is 9.99 times/' $D/README.md", ": 9.99 should be "},
    {"sed -i 's/| `mem` | the paper.s memory/| `mem` | the memory/' $D/README.md",
     "0 lines of README.md contain '| `mem` | the paper's memory step: noise in half precision | {} | {} |', "
     "expected 1"},
    {"echo 'A fast one takes 3.5 µs per image.' >> $D/README.md", ": 3.5 µs has no row in docs/numbers.txt"},
    {"printf '\\n| a | time |\\n|---|---|\\n| b | 12.5 |\\n' >> $D/docs/train_mixed.md",
     ": 12.5 has no row in docs/numbers.txt"},
    {"echo '# New' > $D/docs/new.md", "docs/new.md is not a page of docs/numbers.txt"},
    {"sed -i 's/^page README.md$/&\\nother ## Two floors: counted/' $D/docs/numbers.txt",
     "no line of README.md begins with '## Two floors'"},
    {"sed -i 's/^    us(naive batch=32); rate(naive batch=32)/    us(naive)/' $D/docs/numbers.txt",
     "the line has 2 {}, but 1 values follow"},
    {"sed -i 's/us(naive batch=32)/us(naive batch=32).real/' $D/docs/numbers.txt", "is not arithmetic over"},
};

Test(numbers, changes_are_detected)
{
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        shell(COPY "{ %s; } && " NUMBERS "README.md docs/train_mixed.md results/reference/README.md",
              changes[i].change);
        cr_expect_eq(status, 1, "%s: %d, %s", changes[i].change, status, out);
        cr_expect(says(changes[i].says), "%s: %s", changes[i].change, out);
        cr_expect(!says("Traceback"), "%s", out);
    }
}

Test(numbers, unknown_pages_and_repeated_lists_are_refused)
{
    SHELL(2, "scripts/check/docs_numbers.py docs/laod.md");
    EXPECT_OUT("no page 'docs/laod.md' in docs/numbers.txt; did you mean 'docs/load.md'?");
    SHELL(2, COPY "echo 'page README.md' >> $D/docs/numbers.txt; " NUMBERS);
    EXPECT_OUT("a second list of README.md; merge it with the first");
}

/* tests/mutate.py --table replaces the table of a page and keeps its text. */
Test(numbers, the_table_of_planted_faults_keeps_its_page)
{
    SHELL(0,
          "cp docs/notes/mutations.md $D/page.md; echo '# After' >> $D/page.md; cp $D/page.md $D/before.md; "
          "PYTHONPATH=tests python3 -B -c 'import mutate, mutate_faults\n"
          "rows, around = mutate.read_page(\"'$D'/page.md\")\n"
          "order = mutate_faults.read_list(\"tests/mutations.txt\", mutate.TREE)[0]\n"
          "mutate.write_page(\"'$D'/page.md\", rows, around, order, {}, [])' && cmp $D/page.md $D/before.md");
}

/* Every fault of tests/mutations.txt has exactly one line in the sources. */
Test(numbers, planted_faults_fit_the_sources)
{
    SHELL_PRINTS(0, " faults fit the sources", "tests/mutate.py --check tests/mutations.txt");
    SHELL(1, "printf '1\\tmpi/comm_mpi.c\\tboolean\\tbroken = true;\\tbroken = "
             "false;\\n2\\tsrc/none.c\\tbits\\ta\\tb\\n"
             "3\\tsrc/main.c\\tbits\\tnone\\tb\\n' > $D/list; tests/mutate.py --check $D/list");
    EXPECT_OUT("fault 1: mpi/comm_mpi.c: ", " lines \"broken = true;\", not one",
               "fault 2: src/none.c: ", "fault 3: src/main.c: it has 0 lines \"none\"",
               "3 faults do not fit the sources");
}

Test(numbers, new_rows_are_written_into_the_pages)
{
    SHELL(0, COPY "%s && " NUMBERS "--fix; " NUMBERS, changes[1].change);
    shell("diff README.md $D/README.md; diff docs/fused.md $D/docs/fused.md");
    EXPECT_OUT("three kernels per image | 1,630 | 612 |");
    shell("grep -c . $D/README.md; grep -c . README.md");
    cr_expect_eq(atoi(out), atoi(strchr(out, '\n')), "%s", out);
}
