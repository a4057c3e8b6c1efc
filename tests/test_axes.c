/* Tests lists and ranges as values of options: their values, errors and combinations. */
#include <criterion/criterion.h>

#include <string.h>

#include "core/options.h"

TestSuite(axes, .timeout = 60);

struct values {
    uint64_t batch, seed, threads, bytes;
    double noise, rate;
    int type;
    const char *mean;
    bool keep;
};

static const char *const types[] = {"u8", "f16", "f32", NULL};

#define AT(field) offsetof(struct values, field)
static const struct option_spec specs[] = {
    {"batch", "N", OPTION_COUNT, AT(batch), .fallback = "32", .minimum = 1, .maximum = 1048576,
     .column = COLUMN, .help = "images"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "of the images"},
    {"threads", "N", OPTION_COUNT, AT(threads), .maximum = 64, .column = COLUMN_APART, .help = "threads"},
    {"noise", "P", OPTION_REAL, AT(noise), .fallback = "2", .minimum = -4, .maximum = 4, .column = COLUMN,
     .help = "noise"},
    {"rate", "R", OPTION_REAL, AT(rate), .maximum = 1e300, .help = "has no column"},
    {"type", "T", OPTION_CHOICE, AT(type), .fallback = "u8", .choices = types, .column = COLUMN,
     .help = "type"},
    {"mean", "M[,M]", OPTION_TEXT, AT(mean), .fallback = "0", .column = COLUMN, .help = "a list of its own"},
    {"keep", NULL, OPTION_FLAG, AT(keep), .column = COLUMN, .help = "a flag"},
    {"bytes", "N", OPTION_BYTES, AT(bytes), .fallback = "1M", .minimum = 1, .maximum = 0x1p40,
     .column = COLUMN, .help = "a size"},
};

static struct values values;
static struct axes axes;

/* Parses a command line of words separated by blanks. */
static enum status parse(const char *line)
{
    static char text[1024];
    char *argv[64] = {"fdsl-bench"}, *rest = text;
    int argc = 1;
    struct options options = {.tables = {{specs, COUNT_OF(specs), &values}}, .table_count = 1, .axes = &axes};
    snprintf(text, sizeof text, "%s", line);
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    axes_free(&axes);
    enum status status = options_parse(&options, argc, argv);
    options_free(&options);
    return status;
}

/* Returns the values of the first axis, separated by blanks. */
static const char *expanded(const char *line)
{
    static char text[1024];
    cr_assert_eq(parse(line), STATUS_OK, "%s: %s", line, status_text());
    text[0] = '\0';
    for (size_t i = 0; axes.count > 0 && i < axes.at[0].count; i++)
        strcat(strcat(text, i ? " " : ""), axes.at[0].texts[i]);
    return text;
}

Test(axes, lists_and_ranges_expand_to_their_values)
{
    static const struct {
        const char *line, *values;
    } cases[] = {
        {"--batch 224,512", "224 512"},
        {"--batch 512,224", "512 224"},
        {"--batch 1:256:2x", "1 2 4 8 16 32 64 128 256"},
        {"--batch 1:100:2x", "1 2 4 8 16 32 64"},
        {"--batch 3:100:10x", "3 30"},
        {"--batch=50:200:50", "50 100 150 200"},
        {"--batch 50:210:50", "50 100 150 200"},
        {"--batch 1,8:64:2x", "1 8 16 32 64"},
        {"--batch 1:3:1,10:30:10,100", "1 2 3 10 20 30 100"},
        {"--batch 8:8:2x", "8"},
        {"--batch 5:9:100", "5"},
        /* The first value is also the last. */
        {"--batch 8:8:3", "8"},
        {"--bytes 1K:1K:2x", "1024"},
        {"--bytes 1K:1K:1", "1024"},
        {"--seed 18446744073709551615:18446744073709551615:1", "18446744073709551615"},
        {"--noise 0.5:0.5:0.1", "0.5"},
        {"--noise 2:2:1.5x", "2"},
        {"--noise 0:0:1", "0"},
        {"--noise -1:-1:0.5", "-1"},
        {"--seed 0:4:2", "0 2 4"},
        {"--seed 0,1:4:2x", "0 1 2 4"},
        {"--threads 0,2", "0 2"},
        {"--seed 18446744073709551614:18446744073709551615:1", "18446744073709551614 18446744073709551615"},
        {"--seed 18446744073709551613:18446744073709551615:5", "18446744073709551613"},
        {"--seed 9223372036854775808:18446744073709551615:2x", "9223372036854775808"},
        {"--seed 9007199254740993,1", "9007199254740993 1"},
        {"--noise 0.5:2:0.5", "0.5 1 1.5 2"},
        {"--noise 0.1:0.5:0.1", "0.1 0.2 0.3 0.4 0.5"},
        {"--noise 0:1:0.1", "0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"},
        {"--noise -0.3:0.3:0.1", "-0.3 -0.2 -0.1 0 0.1 0.2 0.3"},
        {"--noise 1e-3:1:10x", "0.001 0.01 0.1 1"},
        {"--noise 1:4:1.5x", "1 1.5 2.25 3.375"},
        {"--noise 0.123456789012345678,.5", "0.12345678901234568 0.5"},
        {"--noise 0.123456789012345678:0.2:1", "0.12345678901234568"},
        {"--type u8,f32", "u8 f32"},
        {"--bytes 1K:16K:4x,3", "1024 4096 16384 3"},
        {"--bytes 1M:3M:1M", "1048576 2097152 3145728"},
        {"--bytes 512,1k,1G", "512 1024 1073741824"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        cr_expect_str_eq(expanded(cases[i].line), cases[i].values, "%s: %s", cases[i].line,
                         expanded(cases[i].line));
}

Test(axes, single_values_are_not_axes)
{
    cr_assert_eq(parse("--batch 8 --noise -1e-3 --type f16 --mean 0.5,0.5:x --rate 3 --keep"), STATUS_OK);
    cr_expect_eq(axes.count, 0);
    cr_expect_eq(axes_combinations(&axes), 1);
    cr_expect_str_eq(values.mean, "0.5,0.5:x");
    cr_expect(values.keep && values.batch == 8);
}

Test(axes, invalid_lists_and_ranges_are_refused)
{
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"--batch ,", "--batch: ',' has an empty value; write 1,2 or 1:8:2x"},
        {"--batch 1,", "--batch: '1,' has an empty value; write 1,2 or 1:8:2x"},
        {"--batch ,1", "--batch: ',1' has an empty value; write 1,2 or 1:8:2x"},
        {"--batch 1,,2", "--batch: '1,,2' has an empty value; write 1,2 or 1:8:2x"},
        {"--batch 0,2", "--batch: '0' is out of range; it must be 1 to 1048576"},
        {"--batch 1:2097152:2x", "--batch: '2097152' is out of range; it must be 1 to 1048576"},
        {"--batch 2,x", "--batch: 'x' is not a whole number"},
        {"--batch 1.5,2", "--batch: '1.5' is not a whole number"},
        {"--batch 1,024", "--batch: '1,024' has a value that begins with 0; write numbers without thousands "
                          "separators"},
        {"--batch 1,2,1", "--batch: 1 occurs twice; drop one of them"},
        {"--batch 4,1:8:2x", "--batch: 4 occurs twice; drop one of them"},
        {"--noise .5,0.50", "--noise: 0.5 occurs twice; drop one of them"},
        {"--batch 8:1:2x",
         "--batch: '8:1:2x' is a range FIRST:LAST:STEP that descends; write the smaller value first"},
        {"--batch 8:1:1",
         "--batch: '8:1:1' is a range FIRST:LAST:STEP that descends; write the smaller value first"},
        {"--noise 2:1:0.5",
         "--noise: '2:1:0.5' is a range FIRST:LAST:STEP that descends; write the smaller value first"},
        {"--batch 1:8:0", "--batch: '1:8:0' does not grow; use a step above 0"},
        {"--batch 1:8:1x",
         "--batch: '1:8:1x' does not grow; multiply by 2x or more, from a first value above 0"},
        {"--batch 1:8:0x",
         "--batch: '1:8:0x' does not grow; multiply by 2x or more, from a first value above 0"},
        {"--seed 0:8:2x",
         "--seed: '0:8:2x' does not grow; multiply by 2x or more, from a first value above 0"},
        {"--noise 1:2:0", "--noise: '1:2:0' does not grow; use a step above 0"},
        {"--noise 1:2:1x",
         "--noise: '1:2:1x' does not grow; multiply by more than 1x, from a first value above 0"},
        {"--noise -1:2:2x",
         "--noise: '-1:2:2x' does not grow; multiply by more than 1x, from a first value above 0"},
        {"--batch 1:8:1.5x", "--batch: '1.5' is not a whole number"},
        {"--batch 8:1:-1", "--batch: '8:1:-1' descends, but ranges ascend; write the smaller value first and "
                           "a step above 0"},
        {"--noise 1:2:-.5", "--noise: '1:2:-.5' descends, but ranges ascend; write the smaller value first "
                            "and a step above 0"},
        {"--batch 1:64:x2", "--batch: '1:64:x2' has its x before the factor; write 2x"},
        {"--bytes 1K:1Q:2x",
         "--bytes: '1Q' is not a size; write a number of bytes, or a number and K, M or G "
         "(powers of 1024)"},
        {"--bytes 1K,1024", "--bytes: 1024 occurs twice; drop one of them"},
        {"--bytes 2M:1K:2x",
         "--bytes: '2M:1K:2x' is a range FIRST:LAST:STEP that descends; write the smaller value first"},
        {"--batch 1:8:x", "--batch: 'x' is not a whole number"},
        {"--batch 1:8:", "--batch: '' is not a whole number"},
        {"--batch :8:1", "--batch: '' is not a whole number"},
        {"--batch 1:8",
         "--batch: '1:8' is not a range; write FIRST:LAST:STEP to add, FIRST:LAST:2x to multiply"},
        {"--batch 1:8:1:1",
         "--batch: '1:8:1:1' is not a range; write FIRST:LAST:STEP to add, FIRST:LAST:2x to multiply"},
        {"--noise 1:2:nan", "--noise: 'nan' is not a number"},
        {"--type u8,f61", "--type: 'f61' is not one of u8, f16, f32; did you mean 'f16'?"},
        {"--type u8:f32:1", "--type: 'u8:f32:1' is a range, but only numbers have ranges; write a list: A,B"},
        {"--rate 1,2", "--rate: '1,2' is not a number"},
        {"--batch 1,2 --batch 3", "--batch is given twice; drop one of them"},
        {"--seed 0:10000:1", "--seed has more than 10000 values; raise the step"},
        {"--noise 1:2:1e-9", "--noise has more than 10000 values; raise the step"},
        {"--batch 1:101:1 --seed 0:99:1",
         "the lists and ranges have more than 10000 combinations; shorten them or run several sweeps"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_expect_eq(parse(cases[i].line), STATUS_USAGE, "%s passed", cases[i].line);
        cr_expect_str_eq(status_text(), cases[i].message);
    }
    cr_expect_eq(parse("--batch 1:100:1 --seed 0:99:1"), STATUS_OK, "%s", status_text());
    cr_expect_eq(axes_combinations(&axes), 10000);
}

Test(axes, the_last_option_changes_fastest)
{
    static const char *const expected[] = {
        "--noise 1 --type u8 --batch 1",  "--noise 1 --type u8 --batch 3",  "--noise 1 --type f16 --batch 1",
        "--noise 1 --type f16 --batch 3", "--noise 2 --type u8 --batch 1",  "--noise 2 --type u8 --batch 3",
        "--noise 2 --type f16 --batch 1", "--noise 2 --type f16 --batch 3",
    };
    cr_assert_eq(parse("--noise 1,2 --type u8,f16 --seed 7 --batch 1,3"), STATUS_OK, "%s", status_text());
    cr_expect(values.noise == 1 && values.type == 0 && values.batch == 1,
              "the options must have the values of the first combination");
    cr_assert_eq(axes_combinations(&axes), COUNT_OF(expected));
    for (size_t i = 0; i < COUNT_OF(expected); i++) {
        char text[256], stored[256];
        axes_describe(&axes, i, text, sizeof text);
        cr_expect_str_eq(text, expected[i]);
        cr_assert_eq(axes_select(&axes, i), STATUS_OK);
        snprintf(stored, sizeof stored, "--noise %g --type %s --batch %llu", values.noise, types[values.type],
                 (unsigned long long)values.batch);
        cr_expect_str_eq(stored, expected[i]);
        cr_expect_eq(values.seed, 7);
    }
    char cut[9];
    axes_describe(&axes, 0, cut, sizeof cut);
    cr_expect_str_eq(cut, "--noise ");
}

/* Entry i of `expected` describes the combinations that remain after i combinations have completed. */
Test(axes, remaining_combinations_are_described_as_options)
{
    static const char *const expected[] = {"",
                                           "--noise 1 --batch 2,3, then with --noise 2",
                                           "--noise 1 --batch 3, then with --noise 2",
                                           "--noise 2",
                                           "--noise 2 --batch 2,3",
                                           "--noise 2 --batch 3"};
    char text[64];
    cr_assert_eq(parse("--noise 1,2 --batch 1:3:1"), STATUS_OK);
    for (size_t i = 0; i < COUNT_OF(expected); i++) {
        cr_expect(axes_describe_rest(&axes, i, text, sizeof text));
        cr_expect_str_eq(text, expected[i]);
    }
    for (size_t size = 1; size <= strlen(expected[1]); size++)
        cr_expect(!axes_describe_rest(&axes, 1, text, size), "%zu bytes", size);
    cr_expect(axes_describe_rest(&axes, 1, text, strlen(expected[1]) + 1));
    cr_assert_eq(parse("--seed 0,1 --noise 1,2 --batch 1,2"), STATUS_OK);
    cr_expect(axes_describe_rest(&axes, 2, text, sizeof text));
    cr_expect_str_eq(text, "--seed 0 --noise 2, then with --seed 1");
    cr_expect(axes_describe_rest(&axes, 6, text, sizeof text));
    cr_expect_str_eq(text, "--seed 1 --noise 2");
}

Test(axes, the_hash_of_options_covers_all_values)
{
    struct options options = {.tables = {{specs, COUNT_OF(specs), &values}}, .table_count = 1, .axes = &axes};
    static const char *const lines[] = {"--batch 1,2", "--batch 1,3", "--batch 1,2,3", "--batch 1"};
    uint64_t hashes[COUNT_OF(lines)];
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        cr_assert_eq(parse(lines[i]), STATUS_OK);
        hashes[i] = options_hash(&options, NULL);
        for (size_t j = 0; j < i; j++)
            cr_expect_neq(hashes[j], hashes[i], "%s and %s", lines[j], lines[i]);
    }
    cr_assert_eq(parse("--batch 1:2:1"), STATUS_OK);
    cr_expect_eq(options_hash(&options, NULL), hashes[0],
                 "equal values that are written differently must have the same hash");
}

Test(axes, more_than_16_axes_are_refused)
{
    struct axes many = {.count = AXES_MAX};
    cr_expect_eq(axes_add(&many, &specs[0], &values, "1,2"), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "--batch: more than 16 options have lists; run two sweeps");
}
