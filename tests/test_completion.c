/* Tests scripts/packaging/completion.bash, which completes options and values from the program's help. */
#include "shell.h"

static void set_up(void)
{
    shell_set_up();
    if (shell("bash -c 'type -t complete compgen' && awk 1 </dev/null") != 0)
        cr_skip_test("bash or awk is missing");
}

TestSuite(completion, .init = set_up, .fini = shell_tear_down, .timeout = 60);

/* Completes the last of these words of a command line. `out` has one line per suggestion. PATH has no
 * fdsl-bench. */
static void complete(const char *words)
{
    EXPECT(0,
           "bash -c 'source %s/scripts/packaging/completion.bash; COMP_WORDS=(%s %s); "
           "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _fdsl_bench; printf \"%%s\\n\" \"${COMPREPLY[@]}\"'",
           root, program, words);
}

Test(completion, values_are_those_of_the_help)
{
    static const struct {
        const char *words, *suggestions;
    } cases[] = {
        {"--variant naive --dtype \"\"", "u8\nf16\nf32\nbf16\n"},
        {"--dtype b", "bf16\n"},
        {"--variant files --dtype \"\"", "raw\nf32\nf16\nbf16\n"},
        {"--prepare x --dtype \"\"", "u8\nf16\nf32\n"},
        {"--prepare x --store \"\"", "files\nshards\nimagefolder\n"},
        {"--prepare x --from synth --layout \"\"", "nchw\nnhwc\n"},
        {"--layout \"\"", "nchw\nnhwc\n"},
        {"--workload load --cache \"\"", "warm\ncold\nany\n"},
        {"--cache c", "cold\n"},
        {"--workload load --on-error \"\"", "fail\nskip\n"},
        {"--workload train --feed \"\"", "stored\nlive\nconstant\n"},
        {"--format \"\"", "table\ncsv\njson\n"},
        {"--preset l", "lowercompute\nlowercompute-1000\n"},
        {"--preset p", "paper-1000\n"},
        {"--baseline train-n", "train-naive\n"},
        {"--compute train:l", "train:logreg\ntrain:lenet\n"},
        {"--variant naive,train-n", "naive,train-naive\n"},
        {"--workload inf", "infer\n"},
        {"--prepare x --from id", "idx\n"},
        {"compare a.csv b.csv --format j", "json\n"},
        {"compare a.csv b.csv --measure t",
         "time_per_item\ntrain_acc\ntest_acc\ntrain_loss\ntest_loss\ntime_cv\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        complete(cases[i].words);
        cr_expect_str_eq(out, cases[i].suggestions, "%s", cases[i].words);
    }
}

Test(completion, measures_are_also_columns_of_the_file)
{
    EXPECT(0, "printf 'schema,wall_s,seed,time_p99_s\\r\\n' > a.csv");
    complete("compare a.csv b.csv --measure time_p");
    cr_expect_str_eq(out, "time_per_item\ntime_p99_s\n");
    complete("compare a.csv b.csv --measure w");
    cr_expect_str_eq(out, "wall_s\n");
}

Test(completion, options_are_those_of_the_help)
{
    complete("--variant files --iod");
    cr_expect_str_eq(out, "--iodepth\n");
    complete("--prepare x --sto");
    cr_expect_str_eq(out, "--store\n");
    complete("--res 32 --lay");
    cr_expect_str_eq(out, "--layout\n", "without a variant, the options of synth must be completed");
    complete("--verify --dt");
    cr_expect_str_eq(out, "--dtype\n", "--verify must take no value");
    complete("compare a.csv --mar");
    cr_expect_str_eq(out, "--margin\n");
    complete("comp");
    cr_expect_str_eq(out, "compare\n");
    complete("adv");
    cr_expect_str_eq(out, "advise\n");
    complete("advise --mar");
    cr_expect_str_eq(out, "--margin\n");
    complete("--outp");
    cr_expect_str_eq(out, "\n", "former names are completed");
}

Test(completion, a_command_after_two_dashes_is_completed_as_a_command)
{
    EXPECT(0, "touch train.py");
    complete("--monitor m.csv -- python3 tra");
    cr_expect_str_eq(out, "train.py\n");
    complete("--monitor m.csv -- bas");
    EXPECT_OUT("bash\n");
    complete("--monitor m.csv -- tool --vari");
    cr_expect_str_eq(out, "\n", "options of this program are completed after --");
}
