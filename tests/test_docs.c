/* Tests that the docs agree with the program: every option is on a page, links lead to files, and numbers
 * equal those of the rows. */
#include "cells.h"
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

/* tests/mutate.py draws the same faults from the same seed, in C and in Python. */
Test(numbers, planted_faults_are_drawn_from_files)
{
    SHELL(0, "for i in 1 2; do tests/mutate.py --list --seed 3 --spares 1 'stats:4=src/core/stats.[ch]' "
             "'package:4=python/fdsl/_*.py' >$D/$i.txt || exit; done; cmp $D/1.txt $D/2.txt && grep -v '^#' "
             "$D/1.txt | cut -f1,2");
    cr_expect_eq(count_of(out, "stats\tsrc/core/stats."), 4, "%s", out);
    cr_expect_eq(count_of(out, "package\tpython/fdsl/_"), 4, "%s", out);
    cr_expect_eq(count_of(out, "stats+\t") + count_of(out, "package+\t"), 2, "%s", out);
    SHELL_PRINTS(1, "no line of a file that matches none.c", "tests/mutate.py --list none:1=none.c");
}

/* A fault is caught by a suite that fails with it and passes without it. A spare replaces a fault whose line
 * is gone. A repeated run continues after the results. In this test, a suite is a line that the file must
 * have. */
Test(numbers, planted_faults_are_caught_or_survive)
{
    static const char script[] =
        "import os, queue, sys, types\n"
        "import mutate\n"
        "from mutate_faults import Fault, write_list\n"
        "folder = sys.argv[1]\n"
        "os.makedirs(f'{folder}/python')\n"
        "text = 'a = 1\\nif a:\\n    b = 2\\nelse:\\n    b = 2\\n'\n"
        "def fault(spare, before, after, above=''):\n"
        "    return Fault('room', spare, 'python/x.py', 'constant', before, after, above)\n"
        "faults = [fault(False, 'a = 7', 'a = 8'), fault(False, 'b = 2', 'b = 3', 'else:'), fault(True, 'b = "
        "2', 'b = 4'),\n"
        "          fault(True, 'a = 1', 'a = 0'), fault(True, 'if a:', 'if not a:')]\n"
        "with open(f'{folder}/python/x.py', 'w') as file:\n"
        "    file.write(text)\n"
        "with open(f'{folder}/list', 'w') as file:\n"
        "    write_list(faults, 'test', file)\n"
        "class Tree(mutate.Tree):\n"
        "    def __init__(self, path, options, gpu):\n"
        "        self.path, self.gpu, self.saved, self.marker = folder, gpu, {}, f'{folder}/planted'\n"
        "    def run(self, suite, limit_s):\n"
        "        return '' if suite in self.read('python/x.py').decode() else 'exit 1'\n"
        "mutate.Tree = Tree\n"
        "mutate.order_of = lambda tree, fault, known: ['never', 'a = 1']\n"
        "arguments = types.SimpleNamespace(run=f'{folder}/list', gpu=False, only='.', work=folder, make='', "
        "jobs=1, limit=60)\n"
        "for _ in range(2):\n"
        "    mutate.run(arguments)\n"
        "    with open(f'{folder}/results.tsv') as file:\n"
        "        print('\\n'.join(row.split('\\t')[-1].split(' (')[0] for row in file.read().splitlines()))\n"
        "    with open(f'{folder}/python/x.py') as file:\n"
        "        assert file.read() == text\n"
        "mutate.table(f'{folder}/list', [f'{folder}/results.tsv'])\n";
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/run.py", getenv("D"));
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs(script, file) >= 0 && fclose(file) == 0);
    SHELL(0, "PYTHONPATH=tests python3 -B $D/run.py $D/tree 2>&1 | sed 's/^  .*//'");
    EXPECT_OUT("ignored, because it fails without a fault: never\n",
               "the line is gone\nsurvived 1 suites\nthe line is gone\n"
               "caught by a = 1: exit 1\n",
               "\n1 of 2 caught (50 %), 1 survived.\n");
    cr_expect_eq(count_of(out, "python/x.py: constant: the line is gone"), 2,
                 "a repeated run does not continue: %s", out);
}

Test(numbers, new_rows_are_written_into_the_pages)
{
    SHELL(0, COPY "%s && " NUMBERS "--fix; " NUMBERS, changes[1].change);
    shell("diff README.md $D/README.md; diff docs/fused.md $D/docs/fused.md");
    EXPECT_OUT("three kernels per image | 1,630 | 612 |");
    shell("grep -c . $D/README.md; grep -c . README.md");
    cr_expect_eq(atoi(out), atoi(strchr(out, '\n')), "%s", out);
}
