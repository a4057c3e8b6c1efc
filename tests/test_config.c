/* --config: options from an INI file; options given twice; former names of options. */
#include "shell.h"

TestSuite(config, .init = shell_set_up, .fini = shell_tear_down, .timeout = 60);

#define RUN "$P --format csv --warmups 0 --warmup-time 0 --min-time 0 --max-time 0 "

static void config(const char *text)
{
    put("c.ini", text, strlen(text));
}

#ifdef HAVE_INIH
Test(config, a_file_gives_options_and_the_command_line_overrides_them)
{
    config("; a comment\nvariant = naive\n[images]\nres=32\nvertices = 50 ; of the class\nbest-gpu = "
           "no\nverify = yes\n"
           "min-samples=3\n");
    EXPECT(0, RUN "--config c.ini --batch 2 >row");
    EXPECT(0, "cut -d , -f 6,7 row | tail -1");
    cr_expect(says("synth,naive"), "%s", out);
    EXPECT(0, RUN "--config c.ini --batch 2 --res 40 --dry-run");
    EXPECT(0, RUN "--config c.ini --res 40 --out rows.csv >row && cmp row rows.csv");
    EXPECT(0, "python3 -c 'import csv; row = next(csv.DictReader(open(\"rows.csv\"))); "
              "assert (row[\"res\"], row[\"vertices\"], row[\"wrong\"]) == (\"40\", \"50\", \"0\"), row'");
}

Test(config, prepare_takes_a_file_as_well)
{
    config("from = counter\nsamples = 6\nsample-shape = 3\n");
    EXPECT(0, "$P --prepare set --config c.ini --shards 2 && ls set | grep -c tar$");
    cr_expect(says("2\n"), "%s", out);
}

Test(config, what_is_no_option_is_named)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"batch = 2\nres\n", "--config c.ini: line 2 is not an option; write \"name = value\""},
        {"batch = 2\nrse = 4\n", "in the file of --config: unknown option '--rse'; did you mean '--res'?"},
        {"res = 4\nres = 5\n", "in the file of --config: --res is given twice"},
        {"config = d.ini\n", "--config: a file cannot name another one"},
        {"res = many\n", "--res: 'many' is not a whole number"}};
    char line[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config(cases[i].text);
        EXPECT(2, "$P --variant naive --config c.ini");
        cr_expect(says(cases[i].words), "%s: %s", cases[i].words, out);
    }
    snprintf(line, sizeof line, "out = %0200d.csv\n", 7);
    config(line);
    EXPECT(2, "$P --variant naive --config c.ini");
    cr_expect(says("--config c.ini: line 1 has more than 190 bytes"), "%s", out);
    EXPECT(2, "$P --variant naive --config none.ini");
    cr_expect(says("--config: none.ini: cannot be read: No such file or directory"), "%s", out);
}
#endif

Test(config, an_option_given_twice_is_refused)
{
    EXPECT(2, "$P --variant naive --res 64 --batch 2 --res=128");
    cr_expect(says("--res is given twice; drop one of them"), "%s", out);
    EXPECT(0, "$P --list -v -v >list");
}

Test(config, former_names_work_with_a_warning)
{
    EXPECT(0, RUN "--variant naive --res 32 --batch 2 --samples s.csv --dry-run");
    cr_expect(says("fdsl-bench: warning: --samples is now called --samples-out"), "%s", out);
}
