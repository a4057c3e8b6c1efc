/* Tests the parser of options: values, abbreviations, errors, help, and suggestions for misspelt words. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/options.h"
#include "core/words.h"

TestSuite(options, .timeout = 60);

struct common {
    bool help, verbose, verify;
    const char *out;
    int format;
    double min_time_s;
};

struct workload_values {
    uint64_t batch, seed, limit;
    double noise, rate, share;
    int mode;
    const char *label;
};

static const char *const formats[] = {"table", "csv", "json", NULL};
static const char *const modes[] = {"fast", "exact", NULL};

static const struct option_spec common_specs[] = {
    {"help", NULL, OPTION_FLAG, offsetof(struct common, help), .help = "this text"},
    {"verbose", NULL, OPTION_FLAG, offsetof(struct common, verbose), .help = "say more"},
    {"verify", NULL, OPTION_FLAG, offsetof(struct common, verify), .help = "check results"},
    {"out", "FILE", OPTION_OUTPUT, offsetof(struct common, out), .help = "append rows"},
    {"format", "NAME", OPTION_CHOICE, offsetof(struct common, format), .fallback = "table",
     .choices = formats, .help = "what goes to stdout"},
    {"min-time", "S", OPTION_REAL, offsetof(struct common, min_time_s), .fallback = "1", .maximum = 86400,
     .help = "measure at least this long, however many samples that takes, and never less than the samples "
             "asked for"},
};

static const struct option_spec workload_specs[] = {
    {"batch", "N", OPTION_COUNT, offsetof(struct workload_values, batch), .fallback = "32", .minimum = 1,
     .maximum = 1048576, .column = COLUMN, .help = "images per run"},
    {"seed", "N", OPTION_COUNT, offsetof(struct workload_values, seed), .fallback = "1",
     .maximum = 18446744073709551615.0, .column = COLUMN, .help = "of every random stream"},
    {"limit", "N", OPTION_COUNT, offsetof(struct workload_values, limit), .minimum = 1, .maximum = 100,
     .column = COLUMN, .help = "at most"},
    {"noise", "P", OPTION_REAL, offsetof(struct workload_values, noise), .fallback = "0.1", .minimum = -4,
     .maximum = 4, .column = COLUMN, .help = "noise coefficient"},
    {"rate", "R", OPTION_REAL, offsetof(struct workload_values, rate), .maximum = 1e300, .column = COLUMN,
     .help = "per second"},
    {"share", "P", OPTION_REAL, offsetof(struct workload_values, share), .fallback = "0", .maximum = 1,
     .column = COLUMN, .help = "a part"},
    {"mode", "NAME", OPTION_CHOICE, offsetof(struct workload_values, mode), .choices = modes,
     .column = COLUMN, .help = "how exactly"},
    {"label", "TEXT", OPTION_TEXT, offsetof(struct workload_values, label), .fallback = "none",
     .column = COLUMN, .help = "a name for the rows"},
};

static struct common common;
static struct workload_values values;
static struct options options = {.tables = {{common_specs, COUNT_OF(common_specs), &common},
                                            {workload_specs, COUNT_OF(workload_specs), &values}},
                                 .table_count = 2};

/* Parses a command line. A single blank separates words. Two consecutive blanks give an empty word. */
static enum status parse(const char *line)
{
    static char text[1024];
    static char *argv[64];
    int argc = 0;
    memset(&common, 0xff, sizeof common); /* defaults must overwrite earlier contents */
    memset(&values, 0xff, sizeof values);
    snprintf(text, sizeof text, "fdsl-bench %s", line);
    char *rest = *line ? text : strtok(text, " ");
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    argv[argc] = NULL;
    options_free(&options);
    return options_parse(&options, argc, argv);
}

static void expect_ok(const char *line)
{
    cr_assert_eq(parse(line), STATUS_OK, "'%s': %s", line, status_text());
}

static void expect_usage(const char *line, const char *message)
{
    cr_expect_eq(parse(line), STATUS_USAGE, "'%s' passed", line);
    cr_expect_str_eq(status_text(), message);
    options_free(&options);
}

static const struct option_spec *spec_of(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(workload_specs); i++)
        if (strcmp(workload_specs[i].name, name) == 0)
            return &workload_specs[i];
    return NULL;
}

static void expect_text(const char *name, const char *expected)
{
    char text[64];
    options_text(spec_of(name), &values, text, sizeof text);
    cr_expect_str_eq(text, expected);
}

static void stop(void)
{
    options_free(&options);
}

Test(options, an_empty_command_line_gives_the_defaults, .fini = stop)
{
    expect_ok("");
    cr_expect(!common.help && !common.verbose && !common.verify);
    cr_expect_null(common.out);
    cr_expect_eq(common.format, 0);
    cr_expect_eq(common.min_time_s, 1);
    cr_expect_eq(values.batch, 32);
    cr_expect_eq(values.seed, 1);
    cr_expect_eq(values.limit, 0);
    cr_expect_eq(values.noise, 0.1);
    cr_expect(isnan(values.rate));
    cr_expect_eq(values.mode, -1);
    cr_expect_str_eq(values.label, "none");
    cr_expect(!options_given(&options, "batch") && !options_given(&options, "help"));
}

Test(options, every_kind_is_parsed_in_both_spellings, .fini = stop)
{
    expect_ok("--verify --batch 64 --noise=-1.5 --format json --mode=exact --out results.csv --label=a=b");
    cr_expect(common.verify && !common.verbose);
    cr_expect_eq(values.batch, 64);
    cr_expect_eq(values.noise, -1.5);
    cr_expect_eq(common.format, 2);
    cr_expect_eq(values.mode, 1);
    cr_expect_str_eq(common.out, "results.csv");
    cr_expect_str_eq(values.label, "a=b");
    expect_ok("--batch=64 --noise -1.5 --format=csv --mode fast --out=--odd");
    cr_expect_eq(values.noise, -1.5);
    cr_expect_eq(common.format, 1);
    cr_expect_eq(values.mode, 0);
    cr_expect_str_eq(common.out, "--odd");
}

Test(options, options_count_as_given_even_with_default_values, .fini = stop)
{
    expect_ok("--batch 32 --verify");
    cr_expect(options_given(&options, "batch"),
              "an option must count as given even if its value is the default");
    cr_expect(options_given(&options, "verify"));
    cr_expect(!options_given(&options, "seed") && !options_given(&options, "out"));
    cr_expect(!options_given(&options, "no-such-option"));
    options_free(&options);
    cr_expect(!options_given(&options, "batch"), "no option may count as given before a parse");
}

/* "none" leaves a number without a default unset, as if the option were not given. It sets a number whose
 * default is 0 to 0. */
Test(options, the_value_none_switches_an_option_off, .fini = stop)
{
    cr_assert_eq(parse("--limit none --rate none"), STATUS_OK, "%s", status_text());
    cr_expect_eq(values.limit, 0);
    cr_expect(isnan(values.rate));
    cr_expect(!options_given(&options, "limit") && !options_given(&options, "rate"));
    cr_assert_eq(parse("--limit 3 --rate 0"), STATUS_OK);
    cr_expect(options_given(&options, "limit") && options_given(&options, "rate"));
    cr_assert_eq(parse("--share none"), STATUS_OK, "%s", status_text());
    cr_expect_eq(values.share, 0);
    expect_usage("--batch none", "--batch: 'none' is not a whole number");
    expect_usage("--noise none", "--noise: 'none' is not a number");
}

Test(options, an_option_given_twice_is_refused, .fini = stop)
{
    expect_usage("--batch 1 --format csv --batch=2", "--batch is given twice; drop one of them");
    expect_ok("--format csv -v --verbose");
}

Test(options, an_error_records_the_option_at_fault)
{
    static const char *const lines[][2] = {{"--seed=x", "seed"},          {"--format=xml", "format"},
                                           {"--device", "device"},        {"--frm=3", "frm"},
                                           {"--seed=1 --seed=2", "seed"}, {"--verify=maybe", "verify"}};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        cr_expect_eq(parse(lines[i][0]), STATUS_USAGE, "%s", lines[i][0]);
        cr_expect_str_eq(status_subject(), lines[i][1], "%s: %s", lines[i][0], status_text());
        options_free(&options);
    }
}

Test(options, short_letters_can_be_combined, .fini = stop)
{
    expect_ok("-h");
    cr_expect(common.help && !common.verbose && options_given(&options, "help"));
    expect_ok("-vh --batch 3");
    cr_expect(common.help && common.verbose && values.batch == 3);
}

Test(options, short_letters_need_their_flags)
{
    struct workload_values only;
    struct options few = {.tables = {{workload_specs, COUNT_OF(workload_specs), &only}}, .table_count = 1};
    char *argv[] = {"fdsl-bench", "-h", NULL};
    cr_expect_eq(options_parse(&few, 2, argv), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "unknown option '-h'; see --help");
    options_free(&few);
}

Test(options, unique_abbreviations_are_accepted, .fini = stop)
{
    expect_ok("--bat 5 --verb --no=2");
    cr_expect_eq(values.batch, 5);
    cr_expect(common.verbose && options_given(&options, "verbose"));
    cr_expect_eq(values.noise, 2);
    expect_usage("--ver", "option '--ver' is ambiguous: it could be --verbose or --verify");
    expect_usage("--l=3", "option '--l' is ambiguous: it could be --limit or --label");
}

Test(options, an_unknown_option_is_refused_with_the_nearest_one)
{
    expect_usage("--btach 3", "unknown option '--btach'; did you mean '--batch'?");
    expect_usage("--nosie=3", "unknown option '--nosie'; did you mean '--noise'?");
    expect_usage("--BATCH 3", "unknown option '--BATCH'; did you mean '--batch'?");
    expect_usage("--batches=3", "unknown option '--batches'; did you mean '--batch'?");
    expect_usage("--xyzzyplugh", "unknown option '--xyzzyplugh'; see --help");
    expect_usage("-batch 3", "unknown option '-batch'; did you mean '--batch'?");
    expect_usage("-hq", "unknown option '-hq'; see --help");
    expect_usage("-5", "unknown option '-5'; see --help");
    expect_usage("--=5", "unknown option '--'; see --help");
}

Test(options, the_message_about_a_very_long_option_is_short)
{
    char line[600] = "--";
    memset(line + 2, 'b', 500);
    cr_expect_eq(parse(line), STATUS_USAGE);
    cr_expect(strlen(status_text()) < 200);
    cr_expect_not_null(strstr(status_text(), "see --help"));
    options_free(&options);
}

Test(options, arguments_in_the_wrong_place_are_refused)
{
    expect_usage("x", "unexpected argument 'x'; options begin with --");
    expect_usage("--verify x", "unexpected argument 'x'; options begin with --");
    expect_usage("-- --batch", "unexpected argument '--batch'; options begin with --");
    expect_usage("-", "unexpected argument '-'; options begin with --");
    expect_usage("--verify=maybe", "--verify: 'maybe' is not one of true, yes, on, false, no, off");
    expect_usage("--help= --batch", "--help: '' is not one of true, yes, on, false, no, off");
}

Test(options, a_missing_value_is_refused)
{
    expect_usage("--batch", "--batch needs a value, e.g. --batch 32");
    expect_usage("--verify --out", "--out needs a value, e.g. --out FILE");
    expect_usage("--out --verify", "--out needs a value, e.g. --out FILE");
    expect_usage("--mode", "--mode needs a value, e.g. --mode fast");
    expect_usage("--format", "--format needs a value, e.g. --format table");
    expect_usage("--out=", "--out: the value is empty; give one or omit --out");
    expect_usage("--out ", "--out: the value is empty; give one or omit --out");
}

Test(options, invalid_counts_are_refused)
{
    static const char *const wrong[] = {"12x", "1e3", "0x10", "1.5", "nan",  "inf",
                                        "",    "-",   "+5",   "--",  "1,000"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        char line[64], message[128];
        snprintf(line, sizeof line, "--batch=%s", wrong[i]);
        snprintf(message, sizeof message, "--batch: '%s' is not a whole number", wrong[i]);
        expect_usage(line, message);
    }
    static const char *const outside[] = {
        "0", "1048577", "-1", "18446744073709551616", "99999999999999999999999", "-18446744073709551615"};
    for (size_t i = 0; i < COUNT_OF(outside); i++) {
        char line[64], message[128];
        snprintf(line, sizeof line, "--batch=%s", outside[i]);
        snprintf(message, sizeof message, "--batch: '%s' is out of range; it must be 1 to 1048576",
                 outside[i]);
        expect_usage(line, message);
    }
}

Test(options, an_invalid_count_keeps_the_value)
{
    uint64_t value = 7;
    cr_expect_eq(parse_count("rows", "x", 0, 9, &value), STATUS_USAGE);
    cr_expect_eq(parse_count("rows", "10", 0, 9, &value), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "rows: '10' is out of range; it must be 0 to 9");
    cr_expect_eq(value, 7);
    cr_expect_eq(parse_count("rows", " 8", 0, 9, &value), STATUS_USAGE, "a blank must be refused");
    cr_expect_eq(parse_count("rows", "8\n", 0, 9, &value), STATUS_USAGE);
    cr_expect_eq(parse_count("rows", "007", 0, 9, &value), STATUS_OK);
    cr_expect_eq(value, 7);
}

Test(options, sizes_in_bytes_accept_suffixes)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } sizes[] = {{"1", 1},
                 {"1000", 1000},
                 {"4K", 4096},
                 {"3m", 3u << 20},
                 {"16G", UINT64_C(16) << 30},
                 {"1024G", UINT64_C(1) << 40}};
    static const char *const wrong[] = {"", "K", "1.5K", "-1", "1KB", "1 K", "0x10", "1T", "K1"};
    static const char *const outside[] = {
        "0", "0K", "1025G", "1099511627777", "17179869184G", "99999999999999999999999"};
    uint64_t value;
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        cr_assert_eq(parse_bytes("--bytes", sizes[i].text, 1, 0x1p40, &value), STATUS_OK, "%s",
                     status_text());
        cr_expect_eq(value, sizes[i].bytes, "%s", sizes[i].text);
    }
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        cr_expect_eq(parse_bytes("--bytes", wrong[i], 1, 0x1p40, &value), STATUS_USAGE, "%s", wrong[i]);
        cr_expect(strstr(status_text(), "is not a size"), "%s: %s", wrong[i], status_text());
    }
    for (size_t i = 0; i < COUNT_OF(outside); i++) {
        cr_expect_eq(parse_bytes("--bytes", outside[i], 1, 0x1p40, &value), STATUS_USAGE, "%s", outside[i]);
        cr_expect(strstr(status_text(), "is out of range; it must be 1 to 1099511627776"), "%s: %s",
                  outside[i], status_text());
    }
}

Test(options, counts_are_exact_at_the_ends, .fini = stop)
{
    expect_ok("--batch 1");
    expect_ok("--batch 1048576");
    cr_expect_eq(values.batch, 1048576);
    expect_ok("--seed 18446744073709551615");
    cr_expect_eq(values.seed, UINT64_MAX);
    expect_text("seed", "18446744073709551615");
    expect_ok("--seed=9007199254740993"); /* 2^53 + 1 is not representable as a double */
    cr_expect_eq(values.seed, UINT64_C(9007199254740993));
    expect_ok("--seed 0");
    cr_expect_eq(values.seed, 0);
    expect_usage("--seed 18446744073709551616",
                 "--seed: '18446744073709551616' is out of range; it must be 0 to 18446744073709551615");

    uint64_t value;
    cr_expect_eq(parse_count("n", "9007199254740993", 0, 0x1p53, &value), STATUS_USAGE);
    cr_expect_eq(parse_count("n", "9007199254740992", 0, 0x1p53, &value), STATUS_OK);
    cr_expect_eq(parse_count("n", "2", 2.5, 9, &value), STATUS_USAGE, "a lower bound of 2.5 must refuse 2");
    cr_expect_eq(parse_count("n", "3", 2.5, 3.9, &value), STATUS_OK);
    cr_expect_eq(parse_count("n", "4", 2.5, 3.9, &value), STATUS_USAGE);
    cr_expect_eq(parse_count("n", "0", -5, 3, &value), STATUS_OK);
}

Test(options, invalid_reals_are_refused)
{
    static const char *const wrong[] = {"1.2.3", "x",  "nan", "inf", "-inf",    "0x1p3",
                                        "",      "1e", ".",   "1,5", "infinity"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        char line[64], message[128];
        snprintf(line, sizeof line, "--noise=%s", wrong[i]);
        snprintf(message, sizeof message, "--noise: '%s' is not a number", wrong[i]);
        expect_usage(line, message);
    }
    expect_usage("--noise 4.0001", "--noise: '4.0001' is out of range; it must be -4 to 4");
    expect_usage("--noise -4.1", "--noise: '-4.1' is out of range; it must be -4 to 4");
    expect_usage("--rate 1e999", "--rate: '1e999' is out of range; it must be 0 to 1e+300");
    double value = 7;
    cr_expect_eq(parse_real("x", " 1", 0, 9, &value), STATUS_USAGE);
    cr_expect_eq(parse_real("x", "1e999", 0, INFINITY, &value), STATUS_USAGE, "infinity must be refused");
    cr_expect_eq(value, 7);
}

Test(options, valid_reals_are_parsed_exactly)
{
    static const struct {
        const char *text;
        double value;
    } cases[] = {{"1", 1}, {"-.5", -0.5}, {"1e-3", 0.001}, {"2E2", 200}, {"+3", 3}, {"4.", 4}, {"1e-400", 0}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double value = NAN;
        cr_expect_eq(parse_real("x", cases[i].text, -1000, 1000, &value), STATUS_OK, "%s", status_text());
        cr_expect_eq(value, cases[i].value, "%s gave %g", cases[i].text, value);
    }
    double zero = 1;
    cr_expect_eq(parse_real("x", "-0", 0, 1, &zero), STATUS_OK);
    cr_expect(!signbit(zero));
}

Test(options, invalid_choices_are_refused)
{
    expect_usage("--format cvs", "--format: 'cvs' is not one of table, csv, json; did you mean 'csv'?");
    expect_usage("--format=xml-rpc", "--format: 'xml-rpc' is not one of table, csv, json");
    expect_usage("--mode=", "--mode: '' is not one of fast, exact");
}

Test(options, values_have_the_expected_text, .fini = stop)
{
    expect_ok("");
    expect_text("batch", "32");
    expect_text("limit", "");
    expect_text("noise", "0.1");
    expect_text("rate", "");
    expect_text("mode", "");
    expect_text("label", "none");
    expect_ok("--limit 5 --rate 0 --mode exact --label x --seed 0");
    expect_text("limit", "5");
    expect_text("rate", "0");
    expect_text("mode", "exact");
    expect_text("label", "x");
    expect_text("seed", "0");

    char text[8];
    options_text(&common_specs[2], &common, text, sizeof text);
    cr_expect_str_eq(text, "0");
    options_text(&common_specs[3], &common, text, sizeof text);
    cr_expect_str_eq(text, "", "a text that is not given must be empty");
    common.verify = true;
    options_text(&common_specs[2], &common, text, sizeof text);
    cr_expect_str_eq(text, "1");
}

Test(options, text_of_reals_is_shortest_and_exact)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0.1, "0.1"},
                 {1.0 / 3, "0.3333333333333333"},
                 {2, "2"},
                 {0.002, "0.002"},
                 {1e300, "1e+300"},
                 {0.1 + 0.2, "0.30000000000000004"},
                 {123456789, "123456789"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        values.rate = cases[i].value;
        expect_text("rate", cases[i].text);
    }
}

/* Equal lists of numbers must have equal texts, because rows and checkpoints compare texts. */
Test(options, text_of_numbers_depends_on_their_values)
{
    static const char *const cases[][2] = {{"0.50", "0.5"},
                                           {"5e-1", "0.5"},
                                           {"-0", "0"},
                                           {".5,0.50,0.5", "0.5"},
                                           {"0.50,1.0,-2", "0.5,1,-2"},
                                           {"0.50,", "0.50,"},
                                           {"0.50 ,1", "0.50 ,1"},
                                           {"", ""}};
    const struct option_spec numbers = {.name = "mean", .kind = OPTION_TEXT, .minimum = -1, .maximum = 1};
    const struct option_spec words = {.name = "label", .kind = OPTION_TEXT};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char *value = cases[i][0];
        char text[64];
        options_text(&numbers, &value, text, sizeof text);
        cr_expect_str_eq(text, cases[i][1]);
        options_text(&words, &value, text, sizeof text);
        cr_expect_str_eq(text, value);
    }
}

Test(options, the_hash_depends_on_all_values_except_file_names, .fini = stop)
{
    static const char *const lines[] = {"",         "--verify",    "--batch 33", "--seed 33",
                                        "--rate 1", "--mode fast", "--label f",  "--out f"};
    uint64_t hashes[COUNT_OF(lines)];
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        expect_ok(lines[i]);
        hashes[i] = options_hash(&options, NULL);
        for (size_t j = 0; j < i; j++)
            cr_expect(hashes[i] != hashes[j], "'%s' and '%s'", lines[i], lines[j]);
    }
    expect_ok("--batch 32 --format table");
    cr_expect(options_hash(&options, NULL) == hashes[0], "defaults that are given must not change the hash");
    expect_ok("--out another.csv");
    cr_expect(options_hash(&options, NULL) == hashes[COUNT_OF(lines) - 1],
              "another file name must not change the hash");
}

Test(options, an_invalid_default_is_a_failure)
{
    static const struct option_spec broken[] = {{"batch", "N", OPTION_COUNT, 0, .fallback = "0", .minimum = 1,
                                                 .maximum = 9, .column = COLUMN, .help = "images per run"}};
    uint64_t batch;
    struct options one = {.tables = {{broken, 1, &batch}}, .table_count = 1};
    char *argv[] = {"fdsl-bench", NULL};
    cr_expect_eq(options_parse(&one, 1, argv), STATUS_FAILED);
    cr_expect_str_eq(status_text(),
                     "the default of an option is wrong: --batch: '0' is out of range; it must be 1 to 9");
    options_free(&one);
}

Test(options, a_parser_without_options_refuses_all_arguments)
{
    struct options none = {.table_count = 0};
    char *argv[] = {"fdsl-bench", "--batch", NULL};
    cr_expect_eq(options_parse(&none, 1, argv), STATUS_OK);
    options_free(&none);
    cr_expect_eq(options_parse(&none, 2, argv), STATUS_USAGE);
    options_free(&none);
}

static char *help_text(const struct option_spec *specs, size_t count)
{
    static char text[4096];
    FILE *stream = fmemopen(text, sizeof text, "w");
    cr_assert_not_null(stream);
    options_help(stream, specs, count, NULL);
    fclose(stream);
    return text;
}

Test(options, help_fits_in_80_columns)
{
    const char *text = help_text(common_specs, COUNT_OF(common_specs));
    cr_expect_not_null(strstr(text, "  -h, --help              this text\n"));
    cr_expect_not_null(strstr(text, "  --out FILE              append rows\n"));
    cr_expect_not_null(
        strstr(text, "  --format NAME           what goes to stdout: table, csv, json (default table)\n"));
    for (const char *line = text; *line; line = strchr(line, '\n') + 1)
        cr_expect(strcspn(line, "\n") <= 80, "%.*s", (int)strcspn(line, "\n"), line);
}

static char *help_of_sections(const struct option_group *groups, size_t count, bool brief)
{
    static char text[4096];
    FILE *stream = fmemopen(text, sizeof text, "w");
    cr_assert_not_null(stream);
    options_help_sections(stream, groups, count, NULL, brief);
    fclose(stream);
    return text;
}

Test(options, help_has_sections)
{
    static const struct option_spec first[] = {
        {"aa", NULL, OPTION_FLAG, 0, .help = "one"},
        {"bb", NULL, OPTION_FLAG, 0, .help = "two"},
        {"cc", NULL, OPTION_FLAG, 0, .help = "three"},
        {"dd", NULL, OPTION_FLAG, 0, .help = "four"},
    };
    static const struct option_spec second[] = {
        {"ee", NULL, OPTION_FLAG, 0, .help = "five"},
        {"ff", NULL, OPTION_FLAG, 0, .help = "six"},
    };
    static const struct option_section of_first[] = {{"data", "aa"},
                                                     {"output", "cc"},
                                                     {"data", "dd"},
                                                     {NULL, NULL}},
                                       of_second[] = {{"output", "ee"}, {"time", "ff"}, {NULL, NULL}};
    const struct option_group groups[] = {{first, 4, of_first}, {second, 2, of_second}};
#define LINE(name, help) "  --" name "                    " help "\n"
    cr_expect_str_eq(help_of_sections(groups, 2, false),
                     "\ndata:\n" LINE("aa", "one") LINE("bb", "two")
                         LINE("dd", "four") "\noutput:\n" LINE("cc", "three")
                             LINE("ee", "five") "\ntime:\n" LINE("ff", "six"));
    cr_expect_str_eq(help_of_sections(groups, 2, true), "  data                    --aa --bb --dd\n"
                                                        "  output                  --cc --ee\n"
                                                        "  time                    --ff\n");
}

/* A default is compared as a value: 1 K and 1024 are the same size. */
Test(options, values_are_compared_with_defaults)
{
    struct values {
        uint64_t size, count;
        double rate;
        bool flag;
        const char *text;
    } given = {.size = 1024, .count = 3, .rate = 0.5, .text = "a"};
    static const struct option_spec specs[] = {
        {"size", "N", OPTION_BYTES, offsetof(struct values, size), .fallback = "1K", .minimum = 1,
         .maximum = 1e6, .column = COLUMN, .help = ""},
        {"count", "N", OPTION_COUNT, offsetof(struct values, count), .minimum = 1, .maximum = 9,
         .column = COLUMN, .help = ""},
        {"rate", "R", OPTION_REAL, offsetof(struct values, rate), .fallback = "0.50", .maximum = 1,
         .column = COLUMN, .help = ""},
        {"flag", NULL, OPTION_FLAG, offsetof(struct values, flag), .column = COLUMN, .help = ""},
        {"text", "T", OPTION_TEXT, offsetof(struct values, text), .fallback = "a", .column = COLUMN,
         .help = ""},
    };
    static const char *const recipe[] = {"size", "2K", "flag", "yes", NULL};
    struct options own = {.table_count = 0};
    static const bool usual[] = {true, false, true, true, true};
    for (size_t i = 0; i < COUNT_OF(specs); i++)
        cr_expect_eq(options_is_default(&own, &specs[i], &given), usual[i], "%s", specs[i].name);
    own.defaults = recipe;
    cr_expect(!options_is_default(&own, &specs[0], &given) && !options_is_default(&own, &specs[3], &given));
    given = (struct values){.size = 2048, .rate = 0.25, .flag = true, .text = "b"};
    static const bool other[] = {true, true, false, true, false};
    for (size_t i = 0; i < COUNT_OF(specs); i++)
        cr_expect_eq(options_is_default(&own, &specs[i], &given), other[i], "%s", specs[i].name);
}

Test(options, help_gives_long_names_a_line_of_their_own)
{
    static const struct option_spec specs[] = {
        {"a-very-long-option-name", "NUMBER", OPTION_COUNT, 0, .maximum = 1, .help = "short"}};
    cr_expect_str_eq(help_text(specs, 1),
                     "  --a-very-long-option-name NUMBER\n                          short\n");
}

Test(options, the_nearest_word_is_suggested)
{
    static const char *const names[] = {"naive", "omp", "bat", "bat-reuse", "fused", "gbase"};
    size_t count = COUNT_OF(names);
    cr_expect_str_eq(nearest_word("bta", names, count), "bat", "two swapped letters must count as one error");
    cr_expect_str_eq(nearest_word("po", (const char *const[]){"op"}, 1), "op",
                     "two swapped letters must not count as two errors");
    cr_expect_str_eq(nearest_word("nave", names, count), "naive");
    cr_expect_null(nearest_word("val", (const char *const[]){"raw"}, 1),
                   "must be null, because only one letter of three is right");
    cr_expect_str_eq(nearest_word("FUSED", names, count), "fused");
    cr_expect_str_eq(nearest_word("bat-resue", names, count), "bat-reuse");
    cr_expect_str_eq(nearest_word("bat-", names, count), "bat",
                     "if two words begin alike, the shorter one must be nearer");
    cr_expect_str_eq(nearest_word("bat-re", names, count), "bat-reuse");
    cr_expect_str_eq(nearest_word("gbase-float2", names, count), "gbase",
                     "a word that is a prefix must be found");
    cr_expect_str_eq(nearest_word("bat", names, count), "bat");
    cr_expect_null(nearest_word("transformer", names, count));
    cr_expect_null(nearest_word("", names, count));
    cr_expect_null(nearest_word("omp", names, 0));
    char longer[200] = "";
    memset(longer, 'o', sizeof longer - 1);
    cr_expect_null(nearest_word(longer, names, count));
    const char *const odd[] = {"", longer, "omp"};
    cr_expect_str_eq(nearest_word("opm", odd, 3), "omp");
}

Test(options, nearest_word_allows_errors_in_half_of_the_letters)
{
    static const char *const names[] = {"abcdef"};
    cr_expect_str_eq(nearest_word("xbcxef", names, 1), "abcdef", "2 errors in 6 letters");
    cr_expect_str_eq(nearest_word("xbcxex", names, 1), "abcdef", "3 errors in 6 letters");
    cr_expect_null(nearest_word("xxcxex", names, 1), "4 errors in 6 letters");
}
