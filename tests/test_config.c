/* Tests three subjects: --config, which reads options from an INI file; options that are given twice; and
 * names of options that are abbreviated or belong to another command. */
#include "shell.h"

TestSuite(config, .init = shell_set_up, .fini = shell_tear_down, .timeout = 60);

#define RUN "$P --format csv --warmups 0 --warmup-time 0 --min-time 0 --max-time 0 "

#ifdef HAVE_INIH
Test(config, a_file_gives_options_and_the_command_line_overrides_them)
{
    put_text("c.ini",
             "; a comment\nvariant = naive\n[images]\n  res=32\n\tvertices = 50 ; of the class\nbest-gpu = "
             "no\nverify = yes\n"
             "min-samples=3\n");
    EXPECT(0, RUN "--config c.ini --batch 2 >row");
    EXPECT_PRINTS(0, "synth,naive", "cut -d , -f 6,7 row | tail -1");
    EXPECT(0, RUN "--config c.ini --batch 2 --res 40 --dry-run");
    EXPECT(0, RUN "--config c.ini --res 40 --out rows.csv >row && cmp row rows.csv");
    EXPECT(0, "python3 -c 'import csv; row = next(csv.DictReader(open(\"rows.csv\"))); "
              "assert (row[\"res\"], row[\"vertices\"], row[\"wrong\"]) == (\"40\", \"50\", \"0\"), row'");
    EXPECT(0, RUN "--config c.ini --verify=no --out unverified.csv >row");
    EXPECT(0, "python3 -c 'import csv; row = next(csv.DictReader(open(\"unverified.csv\"))); "
              "assert row[\"verified\"] == \"no\", row'");
}

Test(config, a_file_has_lists_and_ranges)
{
    put_text("c.ini", "variant = naive\nbatch = 2, 3\n");
    EXPECT_EXACTLY(0, "--batch 2\n--batch 3\n", "$P --config c.ini --dry-run");
    put_text("c.ini", "variant = naive , omp\nbatch = 2 , 3\n");
    EXPECT_EXACTLY(0, "variant\nnaive\nomp\n", "$P --config c.ini --list --format csv | cut -d, -f2");
    EXPECT_EXACTLY(0, "--batch 2\n--batch 3\n", "$P --config c.ini --dry-run");
    put_text("c.ini", "variant = naive\nbatch = 2,x\n");
    EXPECT_PRINTS(2, "--config c.ini: line 2: --batch: 'x' is not a whole number",
                  "$P --config c.ini --dry-run");
    put_text("c.ini",
             "variant = naive\nres = 16,32\nbatch = 1:4:2x\nvertices = 20\norbits = 4\nradius = 3\n");
    EXPECT_PRINTS(0, "--res 16 --batch 1\n--res 16 --batch 2\n--res 16 --batch 4\n--res 32 --batch 1\n",
                  "$P --config c.ini --dry-run");
    EXPECT(0, "$P --config c.ini --dry-run --res 64");
    cr_expect_str_eq(out, "--batch 1\n--batch 2\n--batch 4\n",
                     "an option on the command line must replace a list in the file");
    EXPECT_EXACTLY(0, "--res 8 --batch 3\n--res 8 --batch 5\n--res 9 --batch 3\n--res 9 --batch 5\n",
                   "$P --config c.ini --dry-run --res 8,9 --batch 3,5");
}

Test(config, prepare_takes_a_file_too)
{
    put_text("c.ini", "from = counter\nsamples = 6\nsample-shape = 3\n");
    EXPECT_PRINTS(0, "2\n", "$P --prepare set --config c.ini --shards 2 && ls set | grep -c tar$");
}

Test(config, invalid_lines_are_named)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"batch = 2\nres\n", "--config c.ini: line 2 is not an option; write \"name = value\""},
        {"batch = 2\nrse = 4\n", "--config c.ini: line 2: unknown option '--rse'; did you mean '--res'?"},
        {"res = 4\n\n; size\nres = 5\n", "--config c.ini: line 4: --res is given twice"},
        {"config = d.ini\n", "--config c.ini: line 1: a file cannot include another file"},
        {"[images]\nres = many\n", "--config c.ini: line 2: --res: 'many' is not a whole number"},
        {"res = no\n", "--config c.ini: line 1: --res: 'no' is not a whole number"},
        {"batch = 2\nverify = maybe\n",
         "--config c.ini: line 2: --verify: 'maybe' is not one of true, yes, on, false, no, off"},
        {"verify =\n", "--config c.ini: line 1: --verify: '' is not one of true, yes, on, false, no, off"}};
    char line[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_text("c.ini", cases[i].text);
        EXPECT(2, "$P --variant naive --config c.ini");
        cr_expect(says(cases[i].words), "%s: %s", cases[i].words, out);
    }
    snprintf(line, sizeof line, "out = %0200d.csv\n", 7);
    put_text("c.ini", line);
    EXPECT_PRINTS(2, "--config c.ini: line 1 has more than 190 bytes", "$P --variant naive --config c.ini");
    static const char nul[] = "batch = 2\nres = 16\0\nverify = yes\n";
    put("c.ini", nul, sizeof nul - 1);
    EXPECT_PRINTS(2, "--config c.ini: line 2 has a NUL byte; save it as UTF-8 text",
                  "$P --variant naive --config c.ini");
    EXPECT_PRINTS(2, "--config: none.ini: cannot be read: No such file or directory",
                  "$P --variant naive --config none.ini");
}
#endif

Test(config, a_size_of_rows_is_not_a_request_to_describe_columns)
{
    put_text("c.ini", "variant = ops-omp\ncolumns = 31\n");
    EXPECT_PRINTS(2, "the number of values per row is --dim", "$P --config c.ini");
}

Test(config, an_option_given_twice_is_refused)
{
    EXPECT_PRINTS(2, "--res is given twice; drop one of them",
                  "$P --variant naive --res 64 --batch 2 --res=128");
    EXPECT(0, "$P --list -v -v >list");
}

#define DRY "--dry-run --res 32 --batch 2 "

Test(config, names_of_other_commands_are_explained)
{
    static const struct {
        const char *options, *words;
    } cases[] = {
        {"--variant shards --depth 3", "unknown option '--depth'; did you mean '--iodepth'?"},
        {"--variant shards --norm-min 1", "--norm-min is an option of the workload ops"},
        {"--prepare x --samples 2 --layout nhwc", "--layout is an option of --from synth"},
        {"--workload load --variant all --store shards",
         "--store is an option of --prepare; --prepare --help lists its options"},
        {"--variant naive --samples 10", "--samples is an option of --prepare; "},
        {"--variant shards --data x --res=32", "--res is an option of the workloads synth"},
        {"--variant naive --layout files", "--layout: 'files' is not one of nchw, nhwc"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        EXPECT_PRINTS(2, cases[i].words, "$P %s", cases[i].options);
    EXPECT(0, "! test -e 10 && ! test -e x");
}

Test(config, names_may_be_abbreviated)
{
    EXPECT_PRINTS(2, "ambiguous: it could be --out or --out-res", "$P --variant naive --ou rows.csv " DRY);
    EXPECT(0, "$P --variant naive --th 1 " DRY);
}

Test(config, prepare_help_needs_no_folder)
{
    static const char *const lines[] = {"--prepare --help", "--help --prepare", "--prepare -h",
                                        "--prepare --from synth --help"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        EXPECT_EXACTLY(0, "", "$P --prepare x --help >with && $P %s >without && cmp with without", lines[i]);
    }
    EXPECT_PRINTS(2, "--prepare needs a value, e.g. --prepare DIR", "$P --prepare");
    EXPECT(0, "$P --help --prepare x >with && cmp with without");
}
