/* Tests that the docs agree with the program: every option is on a page, links lead to files, pages show what
 * commands print, and numbers equal those of the rows. */
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

Test(docs, every_link_leads_to_a_file_and_a_heading)
{
    if (shell("python3 -c ''") != 0)
        cr_skip_test("python3 is not installed");
    shell("tests/check_links.py");
    cr_expect_eq(status, 0, "%s", out);
}

Test(docs, the_order_of_variant_auto_is_on_its_page)
{
    SHELL(0, "grep -c '^PREFERENCE' src/core/variants.def");
    EXPECT_OUT("6\n");
    shell("sed -n 's/^PREFERENCE(\"\\([a-z]*\\)\", *\"\\(.*\\)\")$/| `\\1` | `\\2` |/p' "
          "src/core/variants.def | "
          "sed 's/,/`, `/g' | while read -r line; do grep -qF \"$line\" docs/sweeps.md || echo \"$line\"; "
          "done");
    cr_expect_str_eq(out, "", "docs/sweeps.md has another order for: %s", out);
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

/* ---- Output of commands ---- */

static void remove_copy(void)
{
    shell("rm -rf \"$D\"");
}

/* The pages that show commands with their output. A command is a line of code that begins with "$ "; the
 * lines of code after it are its output. The tests run the commands of a page in this order. With
 * FDSL_RECORD=1 they write what the commands print into the page. */
TestSuite(pages, .init = start, .fini = remove_copy, .timeout = 1200);

#define CODE "    "

struct shown {
    char *command, *output;           /* the output has no indentation and no lines about a busy machine */
    const char *output_begin, *after; /* on the page */
};

static const char *next_line(const char *line)
{
    line += strcspn(line, "\n");
    return line + (*line == '\n');
}

static bool begins_with(const char *line, const char *words)
{
    return strncmp(line, words, strlen(words)) == 0;
}

/* Appends a line to the output of a command, unless the line only says that the machine was busy. */
static void add_line(char *output, const char *line)
{
    static const char *const busy[] = {"background load", "stop other processes", "page cache",
                                       "not settled"};
    char *copy = strndup(line, (size_t)(next_line(line) - line));
    bool about_load = false;
    for (size_t i = 0; i < sizeof busy / sizeof *busy; i++)
        about_load |= strstr(copy, busy[i]) != NULL;
    if (!about_load)
        strcat(output, copy);
    free(copy);
}

static size_t read_page(const char *page, struct shown *list, size_t most)
{
    size_t count = 0;
    for (const char *line = page, *at; *line;) {
        if (!begins_with(line, CODE "$ ")) {
            line = next_line(line);
            continue;
        }
        cr_assert_lt(count, most);
        struct shown *shown = &list[count++];
        for (at = line, line = next_line(line); line[-2] == '\\';)
            line = next_line(line);
        shown->command = strndup(at + strlen(CODE "$ "), (size_t)(line - at) - strlen(CODE "$ \n"));
        shown->output = calloc(1, strlen(page) + 1);
        shown->output_begin = line;
        for (;; line = next_line(at)) { /* empty lines between two lines of code are part of the output */
            for (at = line; *at == '\n';)
                at++;
            if (!begins_with(at, CODE) || begins_with(at, CODE "$ "))
                break;
            strncat(shown->output, line, (size_t)(at - line));
            add_line(shown->output, at + strlen(CODE));
        }
        shown->after = line;
    }
    return count;
}

static void forget_page(struct shown *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(list[i].command), free(list[i].output);
}

/* Returns whether a line is a verdict about the speed of this machine. */
static bool is_verdict(const char *line)
{
    return begins_with(line, "Best here: ") || begins_with(line, "Undecided: ");
}

/* Returns what the commands of a page print: first to stderr, then to stdout. Runs them in a new folder.
 * Leaves out the paragraphs with which advise explains its verdict, because they depend on the machine. */
static void run_page(const struct shown *list, size_t count, char **printed)
{
    char folder[] = "/tmp/fdsl-page-XXXXXX";
    cr_assert_not_null(mkdtemp(folder));
    setenv("D", folder, 1);
    SHELL(0, "ln -s \"$P\" $D/fdsl-bench");
    for (size_t i = 0; i < count; i++) {
        SHELL(0,
              "cd $D && export PATH=$D:$PATH CUDA_VISIBLE_DEVICES= FDSL_PROGRESS_S=1e9 && unset "
              "OMP_NUM_THREADS "
              "&& { %s\n} >out.txt; status=$?; cat out.txt; exit $status",
              list[i].command);
        printed[i] = calloc(1, strlen(out) + 1);
        bool table = false, explains = false; /* advise: the text between the table and the verdict */
        for (const char *line = out; *line; line = next_line(line)) {
            table |= begins_with(line, "way ");
            if (explains && is_verdict(line)) {
                table = explains = false;
                add_line(printed[i], "\n");
            }
            explains |= table && *line == '\n';
            if (!explains)
                add_line(printed[i], line);
        }
    }
}

static bool is_one_of(const char *word, const char *const *words)
{
    while (*words && strcmp(word, *words) != 0)
        words++;
    return *words != NULL;
}

/* Returns the next word of a line, and moves `at` to its end. An empty word ends the line. The bound after a
 * share, as in "41.30% memory", belongs to the word: only some machines have both. */
static const char *next_word(const char **at, char word[256])
{
    static const char *const bounds[] = {"compute", "memory", "bus", NULL};
    char next[256];
    *at += strspn(*at, " ");
    size_t length = strcspn(*at, " \n");
    snprintf(word, 256, "%.*s", (int)length, *at);
    *at += length;
    if (length > 1 && word[length - 1] == '%') {
        const char *after = *at + strspn(*at, " ");
        snprintf(next, sizeof next, "%.*s", (int)strcspn(after, " \n"), after);
        *at = is_one_of(next, bounds) ? after + strlen(next) : *at;
    }
    return word;
}

static bool is_unit(const char *word)
{
    static const char *const units[] = {"ns", "us", "ms", "s", "min", "h", "images/s", NULL};
    char copy[256];
    snprintf(copy, sizeof copy, "%.*s", (int)strcspn(word, ",;:)"), word);
    copy[strlen(copy) - (*copy && copy[strlen(copy) - 1] == '.')] = '\0';
    return is_one_of(copy, units);
}

/* Returns whether the word says how the speed of a way compares with that of others. */
static bool is_rank(const char *word)
{
    static const char *const ranks[] = {"best", "equal", "slower", "open", NULL};
    return is_one_of(word, ranks);
}

/* Returns whether the word is a number, with its unit and a mark if there are any, or says that there is
 * none. */
static bool is_value(const char *word)
{
    size_t digits = strspn(word, "-+.,0123456789e");
    return strcmp(word, "unknown") == 0 ||
           (strpbrk(word, "-0123456789") && digits && strspn(word + digits, "%x*") == strlen(word + digits));
}

/* Columns with times, rates, sizes of buffers and numbers of repetitions, which differ from run to run. */
static const char *const measured[] = {"time/item", "+-95%",   "items/s",   "speed-up", "roofline", "samples",
                                       "images/s",  "waits/%", "memory/GB", "images",   "used/s",   NULL};
/* Columns that training computes. They are the same for any number of threads, but not for any instruction
 * set. */
static const char *const learned[] = {"train_loss", "train_acc", "test_loss", "test_acc", NULL};

/* Stores the title of the column that ends at this position of its line, or an empty one. A number with many
 * digits moves the rest of its line by a character or two. */
static const char *title_at(const char *header, size_t end, char title[256])
{
    *title = '\0';
    for (const char *at = header; header && *next_word(&at, title);)
        if (labs((long)(at - header) - (long)end) <= 2)
            break;
    return title;
}

/* Returns whether the rest of a line, from `at`, depends on the speed of the machine. */
static bool varies(const char *line, const char *at)
{
    static const char before[] = " no GPU); ";
    size_t length = strlen(before) - 1; /* `at` is before the blank */
    return is_verdict(line) || ((size_t)(at - line) >= length && begins_with(at - length, before));
}

/* Compares a line of a page with what was printed. Words must be equal, and numbers too, unless they are
 * measured: they have a unit of time or rate, or are in such a column of a table. */
static bool is_same_line(const char *page, const char *printed, const char *header, bool same_isa)
{
    if (is_verdict(page) && is_verdict(printed))
        return true;
    const char *at = page, *other = printed;
    char word[256], printed_word[256], title[256], unit[256], printed_unit[256];
    for (;;) {
        bool same = strcmp(next_word(&at, word), next_word(&other, printed_word)) == 0;
        if (same && (!*word || varies(page, at)))
            return true;
        if (same || (is_unit(word) && is_unit(printed_word)) || (is_rank(word) && is_rank(printed_word)))
            continue;
        const char *after = at, *printed_after = other;
        if (!is_value(word) || !is_value(printed_word))
            return false;
        title_at(header, (size_t)(at - page), title);
        if (!is_one_of(title, measured) && (same_isa || !is_one_of(title, learned)) &&
            !(is_unit(next_word(&after, unit)) && is_unit(next_word(&printed_after, printed_unit))))
            return false;
    }
}

/* Compares the output of a command on a page with what was printed. Returns the first line that differs, or
 * NULL. */
static const char *difference(const char *page, const char *printed, bool same_isa)
{
    const char *header = NULL;
    for (; *page || *printed; page = next_line(page), printed = next_line(printed)) {
        bool is_header = begins_with(page, "variant ") || begins_with(page, "way ");
        if (!*page || !*printed || (*page == '\n') != (*printed == '\n') ||
            !is_same_line(page, printed, is_header ? NULL : header, same_isa))
            return *page ? page : printed;
        if (is_header)
            header = page;
    }
    return NULL;
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file, "%s", path);
    char *text = calloc(1, 1 << 16);
    size_t length = fread(text, 1, (1 << 16) - 1, file);
    cr_assert(length > 0 && length < (1 << 16) - 1 && fclose(file) == 0);
    return text;
}

enum { SHOWN_MAX = 32 };

/* Returns whether the comparison notices that a part of the page is replaced. `shown` is what the page shows:
 * on another processor, some of what is printed differs anyway. */
static bool is_noticed(const char *page, const char *at, size_t length, const char *replacement,
                       const struct shown *shown, size_t count)
{
    struct shown list[SHOWN_MAX];
    char *changed;
    cr_assert_geq(asprintf(&changed, "%.*s%s%s", (int)(at - page), page, replacement, at + length), 0);
    size_t changed_count = read_page(changed, list, SHOWN_MAX);
    bool noticed = changed_count != count;
    for (size_t i = 0; i < count && !noticed; i++)
        noticed = difference(list[i].output, shown[i].output, true) != NULL;
    forget_page(list, changed_count);
    free(changed);
    return noticed;
}

/* Changes each line, each word and each number of the output, one at a time. The comparison must notice it,
 * except for numbers that are measured. */
static void expect_changes_noticed(const char *page, const struct shown *list, size_t count)
{
    static const char *const equal[] = {"#wrong",    "skipped",  "epoch",   "train_loss",
                                        "train_acc", "test_acc", "disk/GB", NULL};
    size_t words = 0, numbers = 0, unnoticed = 0;
    for (size_t i = 0; i < count; i++) {
        const char *header = NULL;
        for (const char *line = list[i].output_begin; line < list[i].after; line = next_line(line)) {
            if (*line == '\n')
                continue;
            const char *text = line + strlen(CODE), *at = text;
            bool is_header = begins_with(text, "variant ") || begins_with(text, "way ");
            cr_expect(is_noticed(page, line, (size_t)(next_line(line) - line), "", list, count),
                      "a lost line is not noticed: %.80s", text);
            cr_expect(is_noticed(page, line, 0, CODE "a line\n", list, count),
                      "a new line is not noticed: %.80s", text);
            for (char word[256]; *next_word(&at, word) && !varies(text, at);) {
                char other[256], title[256], next[256];
                const char *after = at;
                bool number = is_value(word), wanted = !number || is_header;
                if (number && header && !is_header)
                    wanted = *title_at(header, (size_t)(at - text), title) && is_one_of(title, equal);
                else if (number)
                    wanted = is_header || !is_unit(next_word(&after, next));
                snprintf(other, sizeof other, "%s",
                         word); /* of the same width, because columns are aligned */
                other[0] = number ? (word[0] == '7' ? '8' : '7') : word[0] == 'x' ? 'y' : 'x';
                bool noticed = is_noticed(page, at - strlen(word), strlen(word), other, list, count);
                words += noticed && !number;
                numbers += noticed && number;
                unnoticed += !noticed;
                cr_expect(noticed || !wanted, "%s in place of %s is not noticed in %.80s", other, word, text);
            }
            if (is_header)
                header = text;
        }
    }
    cr_expect(words > 20 && numbers > 5 && unnoticed > 10,
              "changes of %zu words and %zu numbers are noticed, and %zu are not", words, numbers, unnoticed);
}

static void compare_page(const char *path)
{
#ifndef _OPENMP
    cr_skip_test("the variants omp need OpenMP");
#endif
    struct shown list[SHOWN_MAX];
    char *page = read_text(path), *printed[SHOWN_MAX];
    const char *record = getenv("FDSL_RECORD");
    size_t count = read_page(page, list, SHOWN_MAX);
    cr_assert_gt(count, 0);
    bool same_isa = shell("\"$P\" --env | grep -q '^simd  *avx512$'") == 0;
    run_page(list, count, printed);
    if (record && *record == '1') {
        cr_assert(same_isa, "record on a processor with AVX-512");
        FILE *file = fopen(path, "w");
        const char *from = page;
        for (size_t i = 0; i < count; from = list[i++].after) {
            fwrite(from, 1, (size_t)(list[i].output_begin - from), file);
            for (const char *line = printed[i]; *line; line = next_line(line))
                fprintf(file, "%s%.*s", *line == '\n' ? "" : CODE, (int)(next_line(line) - line), line);
        }
        fputs(from, file);
        cr_assert(fclose(file) == 0);
        return;
    }
    bool equal = true;
    for (size_t i = 0; i < count; i++) {
        const char *line = difference(list[i].output, printed[i], same_isa);
        equal &= !line;
        cr_expect_null(
            line,
            "%s: '%s' prints\n%sThe first difference is at '%.*s'. FDSL_RECORD=1 writes what is printed "
            "into the page.",
            path, list[i].command, printed[i], (int)strcspn(line ? line : "", "\n"), line);
    }
    if (equal)
        expect_changes_noticed(page, list, count);
}

/* docs/columns.md is what the program prints. */
Test(pages, the_columns_are_those_of_the_program)
{
    shell("\"$P\" --columns | diff -u docs/columns.md -");
    cr_expect_eq(status, 0, "to update the page: ./fdsl-bench --columns > docs/columns.md\n%s", out);
}

Test(pages, the_readme_shows_what_a_command_prints)
{
    compare_page("README.md");
}

Test(pages, the_first_steps_show_what_commands_print)
{
#if !defined HAVE_PNG || !defined HAVE_JPEG || !defined HAVE_XXHASH || !defined HAVE_INIH
    cr_skip_test("the commands need libpng, libjpeg, xxHash and inih");
#endif
    compare_page("docs/start.md");
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

TestSuite(numbers, .init = need_python, .fini = remove_copy, .timeout = 300);

Test(numbers, numbers_and_tables_on_the_pages_are_those_of_the_rows)
{
    shell("scripts/figures/measured.py");
    cr_expect_eq(status, 0, "scripts/figures/measured.py --fix writes numbers and tables into the pages: %s",
                 out);
}

/* A project of two pages and a file of rows. */
#define PROJECT                                                                                             \
    "rm -rf $D/* && mkdir -p $D/docs/measured $D/results/reference/quoted && cd $D && "                     \
    "printf 'variant,batch,items,time_median_s,device,revision,settled\\n"                                  \
    "fused,8,100,0.001,A GPU,abc,yes\\nfused,64,100,0.0005,A GPU,abc,yes\\n"                                \
    "bat,8,100,0.004,A GPU,abc,no\\n' > results/reference/quoted/own.csv && "                               \
    "printf '| file | command and conditions |\\n|---|---|\\n"                                              \
    "| `quoted/own.csv` | `run it`, see [x](../../docs/x.md) |\\n' > results/reference/README.md && "       \
    "printf 'It takes 1<!-- us(fused @quoted/own batch=8) ~.0 --> µs, twice 5<!-- stated --> GB/s.\\n' > " \
    "docs/x.md && printf '# Own\\n\\n<!-- table quoted/own\\nby batch \"images\"\\n"                        \
    "column fused (µs) | us(fused)\\ncolumn ratio | us(bat)/us(fused) ~2\\n"                               \
    "column done | text.settled(fused)\\n-->\\n<!-- end -->\\n' > docs/measured/own.md && cd - >/dev/null " \
    "&& "
#define MEASURED "scripts/figures/measured.py --root $D"

Test(numbers, tables_are_written_from_the_rows)
{
    SHELL(1, PROJECT MEASURED);
    EXPECT_OUT("docs/measured/own.md:9: differs from the rows",
               "docs/x.md:1: differs from the rows; they give: It takes 10<!-- us(");
    SHELL(0, MEASURED " --fix && " MEASURED " && cat $D/docs/*.md $D/docs/measured/own.md");
    EXPECT_OUT(
        "It takes 10<!-- us(fused @quoted/own batch=8) ~.0 --> µs",
        "\n| images | fused (µs) | ratio | done |\n|---|--:|--:|---|\n"
        "| 8 | 10.0 | 4.0 | yes |\n| 64 | 5.00 | – | yes |\n\n"
        "Rows: [quoted/own.csv](../../results/reference/quoted/own.csv); A GPU; revision abc. Command: "
        "`run it`, see [x](../x.md).\n<!-- end -->\n");
}

/* Faults of pages and rows, the exit status, and the message that each must cause. */
static const struct {
    const char *change;
    int status;
    const char *says;
} changes[] = {
    {"sed -i 's/0.001/0.002/' $D/results/reference/quoted/own.csv", 1, "docs/x.md:1: differs from the rows"},
    {"sed -i 's/| 10.0 |/| 10.1 |/' $D/docs/measured/own.md", 1,
     "own.md:11: differs from the rows; they give: | 8 | 10.0"},
    {"echo 'It draws 500 images/s.' >> $D/docs/x.md", 1, "docs/x.md:2: '500 images/s' has no row"},
    {"echo 'It is 3 times as fast.' >> $D/docs/x.md", 1, "'3 times as fast' has no row"},
    {"echo 'Here<!-- us(fused @quoted/own) --> is none.' >> $D/docs/x.md", 1, "no number before '<!-- us("},
    {"sed -i 's/batch=8/batch=9/' $D/docs/x.md", 1, "no row of quoted/own fits 'variant=fused batch=9'"},
    {"sed -i 's/batch=8) //' $D/docs/x.md", 1, "is not arithmetic over"},
    {"sed -i 's/ batch=8//' $D/docs/x.md", 1,
     "2 rows of quoted/own fit 'variant=fused'; select one with min"},
    {"sed -i 's/@quoted.own batch/@none batch/' $D/docs/x.md", 1, "no file none.csv in"},
    {"sed -i 's/batch=8/bacth=8/' $D/docs/x.md", 1, "no column 'bacth' in quoted/own.csv"},
    {"sed -i 's/^by batch.*/by bacth/' $D/docs/measured/own.md", 1, "'by bacth': no such column"},
    {"sed -i 's/^by batch.*/bye/' $D/docs/measured/own.md", 1, "'bye' is no line of a table"},
    {"sed -i '/^by batch/d' $D/docs/measured/own.md", 1,
     "needs lines `column`, and either `by` or lines `row`"},
    {"sed -i '/-- end --/d' $D/docs/measured/own.md", 1, "a table has no '<!-- end -->'"},
    {"rm $D/results/reference/README.md", 1, "results/reference/README.md has no command for quoted/own.csv"},
    {"cp results/reference/*.csv $D/results/reference && "
     "echo '![x](ladder.svg)<!-- figure 00 -->' >> $D/docs/measured/own.md",
     1, "ladder.svg differs from the rows"},
    {"rm $D/docs/x.md; set -- docs/x.md", 2, "no page docs/x.md"},
    {"sed -i 's/$/\\r/' $D/docs/x.md", 2, "docs/x.md has carriage returns"},
    {"printf '\\377\\n' >> $D/docs/x.md", 2, "docs/x.md, line 2: not UTF-8 text"},
};

Test(numbers, changes_are_detected)
{
    SHELL(0, PROJECT MEASURED " --fix && mkdir $D/right && cp -r $D/docs $D/results $D/right");
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        shell("cp -r $D/right/. $D && { %s; } && " MEASURED " \"$@\"", changes[i].change);
        cr_expect_eq(status, changes[i].status, "%s: %d, %s", changes[i].change, status, out);
        cr_expect(says(changes[i].says), "%s: %s", changes[i].change, out);
        cr_expect(!says("Traceback"), "%s", out);
    }
}

/* Each line has a fault. */
Test(numbers, every_fault_of_a_page_is_reported)
{
    SHELL(0, PROJECT "cat > $D/docs/x.md <<'END'\n"
                     "**500** images/s\n"
                     "3-5 times as fast\n"
                     "2 GiB/s\n"
                     "500 images/s <!-- rows quoted/own -->\n"
                     "5<!-- 5 -->\n"
                     "5<!-- us(fused batch=8)*1e308*10 -->\n"
                     "5<!-- us(fused batch=8)**9**9**9 -->\n"
                     "5<!-- us(fused batch=8)~0 -->\n"
                     "5<!-- device(bat) -->\n"
                     "5<!-- mean.us(fused) -->\n"
                     "5<!-- us(variant>=bat batch=64) -->\n"
                     "5<!-- us(zero) -->\n"
                     "<!--table x-->\n"
                     "![x](../ladder.svg)<!-- figure 00 -->\n"
                     "5<!-- stated >\n"
                     "END\n"
                     "echo 'zero,8,0,0.001,A GPU,abc,yes' >> $D/results/reference/quoted/own.csv && "
                     "sed -i 's/us(fused)$/us(fuzed)/' $D/docs/measured/own.md");
    shell(MEASURED " --fix");
    cr_expect_eq(status, 1);
    EXPECT_OUT("x.md:1: '500** images/s' has no row", "x.md:2: '5 times as fast' has no row",
               "x.md:3: '2 GiB/s' has no row", "x.md:4: '500 images/s' has no row",
               "x.md:5: 5: '5' is not arithmetic", "10' has no value: cannot convert float",
               "x.md:7: us(fused batch=8)**9**9**9: 'us(fused batch=8)**9**9**9' is not arithmetic",
               "x.md:8: us(fused batch=8)~0: 'us(fused batch=8)' is not arithmetic",
               "has no value: could not convert string", "no prefix 'mean'", "'variant>=bat' needs a number",
               "division by zero", "x.md:13: a table has no '<!-- end -->'",
               "x.md:14: a figure is ](NAME.svg)<!-- figure", "x.md:15: a comment has no '-->'",
               "own.md:3: column 'fused (µs)' of the table of");
    SHELL_PRINTS(2, "no pages in", "rm -r $D/docs; " MEASURED " --fix");
}

/* --fix replaces only numbers and lines of tables. */
Test(numbers, prose_survives)
{
    SHELL(0, PROJECT MEASURED " --fix");
    SHELL(1,
          "cp $D/docs/measured/own.md $D/docs/measured/two.md && cd $D/docs/measured && "
          "sed 's/^<!-- end -->/Prose./' two.md > own.md && cat two.md >> own.md && cp own.md ../own.txt && "
          "cd - >/dev/null && " MEASURED
          " --fix; s=$?; cmp $D/docs/own.txt $D/docs/measured/own.md && exit $s");
    EXPECT_OUT("own.md:3: a table has no '<!-- end -->', or other lines before it");
    SHELL(0, PROJECT MEASURED
          " --fix && printf '`5<!-- us(x) -->`\\n```\\n<!-- table x\\n-->\\n<!-- end -->\\n```\\n' "
          ">> $D/docs/x.md && cp $D/docs/x.md $D/x.txt && " MEASURED " --fix && cmp $D/x.txt $D/docs/x.md");
    SHELL(0, "sed -i 's/8,100,0.004,A GPU,abc,no/8,100,-0.004,A GPU,abc,a|b <!-- end -->/' "
             "$D/results/reference/quoted/own.csv && sed -i 's/(fused)$/(bat)/; s/column done/column a | b/' "
             "$D/docs/measured/own.md && echo 'It is -5<!-- us(bat @quoted/own) -->, 0<!-- us(bat "
             "@quoted/own)/1e9~.0 --> "
             "and −9<!-- us(bat @quoted/own)~2 -->.' > $D/docs/x.md && " MEASURED " --fix && " MEASURED
             " && cat $D/docs/x.md $D/docs/measured/own.md");
    EXPECT_OUT("It is -40.0<!-- us(bat", ", 0<!-- us(bat", "and −40<!-- us(bat",
               "| images | fused (µs) | ratio | a \\| b |\n",
               "| 8 | -40.0 | -4.0 | a\\|b &lt;!-- end --> |\n");
    shell(
        "sed -i s/40/50/ $D/docs/x.md && cp $D/docs/x.md $D/x.txt && trap '' XFSZ && ulimit -f 0 && " MEASURED
        " --fix 2>&1 | cat; "
        "cmp $D/x.txt $D/docs/x.md && ls -A $D/docs");
    EXPECT_OUT("docs/x.md cannot be written: File too large", "\nmeasured\nx.md\n");
}

Test(numbers, links_are_found)
{
    SHELL(
        1,
        "rm -rf $D/* && mkdir -p $D/tests $D/build && cp tests/check_links.py $D/tests && "
        "touch $D/build/x.md \"$D/a b.md\" && "
        "printf '# `A` ##\\n~~~\\n# No\\n~~~\\n[x](a%%20b.md) [x](#a) [x](mailto:a@b) <a href=\"#a\"> "
        "`[x](1.md)`\\n"
        "[x](2.md \"title\")\\n[x](build/x.md)\\n[x](#no)\\n[x]: 3.md\\n<img src=\"4.png\">\\n' > $D/ü.md && "
        "$D/tests/check_links.py | sed 's/.*md:\\([0-9]*\\): .*/\\1/' | tr '\\n' ' '; "
        "$D/tests/check_links.py >$D/out");
    EXPECT_OUT("6 7 8 9 10 ");
}

/* tests/mutate.py draws the same faults from the same seed, in C and in Python. */
Test(numbers, planted_faults_are_drawn_from_files)
{
    SHELL(0, "for i in 1 2; do tests/mutate.py --list --seed 3 'stats:1=src/core/stats.[ch]' "
             "'package:1=python/fdsl/_*.py' >$D/$i.txt || exit; done; cmp $D/1.txt $D/2.txt && "
             "cut -f1,2 $D/1.txt");
    cr_expect_eq(count_of(out, "stats\tsrc/core/stats."), 4, "%s", out);
    cr_expect_eq(count_of(out, "package\tpython/fdsl/_"), 4, "%s", out);
    SHELL_PRINTS(1, "no line of a file that matches none.c", "tests/mutate.py --list none:1=none.c");
}

/* A fault is caught by a suite that fails with it and passes without it. A spare replaces a fault that is not
 * part of the build. A repeated run continues after the results. In this test, a suite is a line that the
 * file must have. */
Test(numbers, planted_faults_are_caught_or_survive)
{
    static const char script[] =
        "import os, sys, types\n"
        "import mutate\n"
        "folder = sys.argv[1]\n"
        "os.makedirs(f'{folder}/python')\n"
        "text = 'a = 1\\nif a:\\n    b = 2\\n'\n"
        "def fault(path, before, after, at):\n"
        "    return mutate.Fault('room', path, 'constant', before, after, at)\n"
        "faults = [fault('python/x.py', 'a = 1', 'a = 0', 0), fault('x.c', 'c', 'd', 0),\n"
        "          fault('python/x.py', 'b = 2', 'b = 3', 2), fault('python/x.py', 'if a:', 'if not a:', "
        "1)]\n"
        "for path in ('python/x.py', 'x.c'):\n"
        "    with open(f'{folder}/{path}', 'w') as file:\n"
        "        file.write(text)\n"
        "class Tree(mutate.Tree):\n"
        "    def __init__(self, path, options, gpu):\n"
        "        self.path, self.gpu, self.saved, self.marker = folder, gpu, {}, f'{folder}/planted'\n"
        "    def run(self, suite, limit_s):\n"
        "        return '' if suite in self.read('python/x.py').decode() else 'exit 1'\n"
        "mutate.Tree = Tree\n"
        "mutate.order_of = lambda tree, fault, known: ['never', 'a = 1']\n"
        "mutate.read_reach = lambda work: {'other': {'failure': ''}}\n"
        "arguments = types.SimpleNamespace(gpu=False, work=folder, make='', limit=60)\n"
        "for _ in range(2):\n"
        "    mutate.run(arguments, [(2, faults)])\n"
        "    with open(f'{folder}/results.tsv') as file:\n"
        "        print('\\n'.join(row.split('\\t')[-1].split(' (')[0] for row in file.read().splitlines()))\n"
        "    with open(f'{folder}/python/x.py') as file:\n"
        "        assert file.read() == text\n"
        "mutate.table([f'{folder}/results.tsv'])\n";
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/run.py", getenv("D"));
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs(script, file) >= 0 && fclose(file) == 0);
    SHELL(0, "PYTHONPATH=tests python3 -B $D/run.py $D/tree 2>&1 | sed 's/^  .*//'");
    EXPECT_OUT("ignored, because it fails without a fault: never",
               "caught by a = 1: exit 1\nnot part of this build\nsurvived 1 suites\n",
               "\n1 of 2 caught (50 %), 1 survived.\n");
    cr_expect_eq(count_of(out, "x.c: constant: not part"), 1, "a repeated run does not continue: %s", out);
}
