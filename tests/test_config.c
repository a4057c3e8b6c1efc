/* Tests three subjects: --config, which reads options from an INI file; options that are given twice; and
 * former names of options. */
#include "shell.h"

TestSuite(config, .init = shell_set_up, .fini = shell_tear_down, .timeout = 60);

#define RUN "$P --format csv --warmups 0 --warmup-time 0 --min-time 0 --max-time 0 "

#ifdef HAVE_INIH
Test(config, a_file_gives_options_and_the_command_line_overrides_them)
{
    put_text("c.ini",
             "; a comment\nvariant = naive\n[images]\nres=32\nvertices = 50 ; of the class\nbest-gpu = "
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
        {"output = f16\ndtype = f32\n",
         "--config c.ini: line 2: --output and --dtype are the same option; give only --dtype"},
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

Test(config, an_option_given_twice_is_refused)
{
    EXPECT_PRINTS(2, "--res is given twice; drop one of them",
                  "$P --variant naive --res 64 --batch 2 --res=128");
    EXPECT(0, "$P --list -v -v >list");
}

#define DRY  "--dry-run --res 32 --batch 2 "
#define LOAD "$P --dry-run --data set --cache any "

static void need_samples(void)
{
    EXPECT(0, "$P --prepare set --samples 4 --sample-shape 3,2,2 --dtype u8 --shards 2");
}

static const struct {
    const char *command, *warning;
} former_names[] = {
    {"$P --variant naive " DRY "--samples s.csv", "--samples is now called --samples-out"},
    {"$P --variant naive " DRY "--output f16", "--output f16 is now called --dtype f16"},
    {"$P --variant naive " DRY "--output u8,f16", "--output u8,f16 is now called --dtype u8,f16"},
    {"$P --variant naive " DRY "--output=bf16 --layout nhwc", "--output bf16 is now called --dtype bf16"},
    {"$P --prepare f --samples 3 --layout files", "--layout files is now called --store files"},
#ifdef HAVE_PNG
    {"$P --prepare g --from synth --samples 3 --res 32 --layout=files",
     "--layout files is now called --store files"},
#endif
#ifdef HAVE_XXHASH
    {LOAD "--variant shards --depth 3", "--depth is now called --iodepth"},
    {LOAD "--variant shards --tensor raw", "--tensor raw is now called --dtype raw"},
#endif
};

Test(config, former_names_work_with_one_warning)
{
    need_samples();
    for (size_t i = 0; i < sizeof former_names / sizeof *former_names; i++) {
        EXPECT(0, "%s 2>err && cat err", former_names[i].command);
        char line[256];
        snprintf(line, sizeof line, "fdsl-bench: warning: %s\n", former_names[i].warning);
        const char *once = strstr(out, line);
        cr_expect(once && !strstr(once + strlen(line), "now called"), "%s: %s", former_names[i].command, out);
    }
    EXPECT(0, "ls f/not-imagefolder/000/000002.npy");
#ifdef HAVE_INIH
    put_text("c.ini", "output = f16\n");
    EXPECT_PRINTS(0, "warning: --output f16 is now called --dtype f16\n",
                  "$P --variant naive --config c.ini " DRY);
    EXPECT(0, "$P --variant naive --config c.ini --dtype f32 " DRY);
#endif
}

Test(config, former_names_have_the_effect_of_the_present_ones)
{
    EXPECT(0, RUN "--variant naive --res 16 --batch 2 --output f16 >was 2>err && " RUN
                  "--variant naive --res 16 --batch 2 --dtype f16 >now");
    EXPECT(0, "python3 -c 'import csv; was, now = (next(csv.DictReader(open(name))) for name in (\"was\", "
              "\"now\")); assert was[\"digest\"] == now[\"digest\"] != \"\" and was[\"dtype\"] == \"f16\"'");
#ifdef HAVE_XXHASH
    need_samples();
    EXPECT(0, RUN "--variant shards-uring --data set --cache any --depth 3 >row 2>err || grep -q uring err");
    EXPECT(0,
           "! test -s row || python3 -c 'import csv; assert next(csv.DictReader(open(\"row\")))[\"iodepth\"] "
           "== \"3\"'");
#endif
}

struct refusal {
    const char *options, *words;
};

static void expect_refusals(const struct refusal *refusals, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        EXPECT(2, "$P %s", refusals[i].options);
        cr_expect(says(refusals[i].words) && !says("warning"), "%s: %s", refusals[i].options, out);
    }
}

Test(config, a_former_name_with_the_present_one_is_refused)
{
    static const struct refusal cases[] = {
        {"--variant naive --samples s.csv --samples-out t.csv",
         "--samples and --samples-out are the same option"},
        {"--variant naive --output f16 --dtype f16",
         "--output and --dtype are the same option; give only --dtype"},
        {"--variant naive --dtype=f16 --output=f16", "--dtype and --output are the same option"},
        {"--variant naive --output f16 --output f16", "--output is given twice"},
        {"--variant shards --tensor raw --dtype raw", "--tensor and --dtype are the same option"},
        {"--variant shards --iodepth 4 --depth 4",
         "--iodepth and --depth are the same option; give only --iodepth"},
        {"--prepare x --layout files --store files", "--layout and --store are the same option"},
        {"--prepare x --from synth --store files --layout shards",
         "--store and --layout are the same option"},
    };
    expect_refusals(cases, sizeof cases / sizeof *cases);
}

Test(config, misused_former_names_are_refused)
{
    static const struct refusal cases[] = {
        {"--variant naive --samples 10", "--samples 10: --loops N takes exactly N samples, --min-samples N "
                                         "at least N; --samples-out FILE names a file"},
        {"--prepare x --samples 2 --layout nhwc", "--layout is an option of --from synth"},
        {"--variant naive --layout files", "--layout: 'files' is not one of nchw, nhwc"},
        {"--variant shards --layout files", "--layout: 'files' is not one of nchw, nhwc"},
        {"--workload load --variant all --store shards",
         "--store is an option of --prepare; --prepare --help lists its options"},
        {"--variant train-naive --samples 200",
         "--samples 200: --train-size N trains on N samples; --samples-out FILE names a file"},
        {"--variant naive --output f64", "--dtype: 'f64' is not one of u8, f16, f32, bf16"},
        {"--variant naive --depth 3",
         "--depth is now called --iodepth: --iodepth is an option of the workload load; --list shows its "
         "variants"},
        {"--variant shards --depth", "--depth is now called --iodepth and needs a value, e.g. --iodepth 32"},
    };
    expect_refusals(cases, sizeof cases / sizeof *cases);
    EXPECT(0, "! test -e 10 && ! test -e x");
    EXPECT(0, "$P --variant naive " DRY "--samples-out 10");
    cr_expect(!says("warning"), "%s", out);
}

Test(config, former_names_are_hidden)
{
    EXPECT(0, "$P --workload synth --help");
    cr_expect(says("\n  --dtype TYPE            element type of the output") && says("\n  --layout ORDER") &&
                  !says("--output"),
              "%s", out);
    EXPECT(0, "$P --workload load --help");
    cr_expect(says("\n  --dtype TYPE            element type of the batches") &&
                  says("\n  --iodepth N             maximum number of files") && !says("--tensor") &&
                  !says("--depth"),
              "%s", out);
    EXPECT(0, "$P --prepare --help");
    cr_expect(says("\n  --store HOW ") && says("(default shards)") && !says("--layout"), "%s", out);
    EXPECT_PRINTS(2, "ambiguous: it could be --out or --out-res", "$P --variant naive --ou rows.csv " DRY);
    /* --t is short for --threads; the former name --tensor does not make it ambiguous. */
    EXPECT(0, "$P --variant naive --t 1 " DRY);
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
