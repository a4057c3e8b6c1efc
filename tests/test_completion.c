/* Tests scripts/packaging/completion.bash, which completes options and values from the program's help, in
 * bash, and in zsh and fish if they are installed. */
#include "core/text.h"
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
        {"--workload load --on-error \"\"", "fail\nskip\nmask\n"},
        {"--workload train --feed \"\"", "stored\nlive\nconstant\nload\nmixed\n"},
        {"--format \"\"", "table\ncsv\njson\n"},
        {"--preset l", "lowercompute\nlowercompute-1000\n"},
        {"--preset p", "paper-1000\n"},
        {"--baseline train-n", "train-naive\n"},
        {"advise --compute train:l", "train:logreg\ntrain:lenet\n"},
        {"--variant omp --compute t", "\n"},
        {"--variant train-n", "train-naive\n"},
        {"--variant naive,o", "naive,omp\n"},
        {"--workload ops --variant a", "all\nauto\n"},
        {"--variant naive,train-n", "\n"},
        {"--variant train-naive,train-om", "train-naive,train-omp\ntrain-naive,train-omp-blas\n"},
        {"--variant omp,naive,o", "\n"},
        {"--workload infer --variant infer-n", "infer-naive\n"},
        {"--workload infer --variant n", "\n"},
        {"--workload inf", "infer\n"},
        {"--prepare x --from id", "idx\n"},
        {"compare a.csv b.csv --format j", "json\n"},
        {"compare a.csv b.csv --measure t",
         "time_per_item\ntime_cv\ntrain_loss\ntrain_acc\ntest_loss\ntest_acc\ntest_map\n"},
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

/* Installs the completion for all shells into share/, as make install does. */
static void install(const char *shell_name)
{
    if (shell("command -v %s", shell_name) != 0)
        cr_skip_test("%s is missing", shell_name);
    EXPECT(0,
           "mkdir -p share/bash-completion/completions share/zsh/site-functions "
           "share/fish/vendor_completions.d && "
           "f=%s/scripts/packaging/completion.bash && cp $f share/bash-completion/completions/fdsl-bench && "
           "bash $f zsh >share/zsh/site-functions/_fdsl-bench && "
           "bash $f fish >share/fish/vendor_completions.d/fdsl-bench.fish && cp $P fdsl-bench && touch a.csv",
           root);
}

/* Command lines that have only one continuation, and what follows their last character. */
static const struct {
    const char *words, *rest;
} lines[] = {
    {"--variant naive,o", "mp"},
    {"--variant naive,train-n", ""},
    {"--format j", "son"},
    {"--variant files --iod", "epth"},
    {"--out a.c", "sv"},
    {"--data di", "gits"},
    {"--prepare sh", "are/"},
    {"compare a.csv a.c", "sv"},
    {"adv", "ise"},
    {"--monitor m -- basena", "me"},
};

Test(completion, fish_completes_as_bash)
{
    install("fish");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const char *last = strrchr(lines[i].words, ' ') ? strrchr(lines[i].words, ' ') + 1 : lines[i].words;
        EXPECT(0,
               "HOME=$PWD fish -N -c 'source share/fish/vendor_completions.d/fdsl-bench.fish; "
               "complete -C \"./fdsl-bench %s\"' </dev/null | cut -f 1",
               lines[i].words);
        char wanted[256] = "";
        if (*lines[i].rest)
            snprintf(wanted, sizeof wanted, "%s%s\n", last, lines[i].rest);
        cr_expect_str_eq(out, wanted, "%s: %s", lines[i].words, out);
    }
}

/* Types each line of stdin and a tab in an interactive zsh, and prints the completed line. */
static const char type_in_zsh[] =
    "zmodload zsh/zpty\n"
    "zpty z env TERM=dumb zsh -f -i\n"
    "wait_for() { out=''; until [[ $out == *$'\\n'$~1* ]]; do zpty -r -t z "
    "line && out+=$line || sleep 0.02; done }\n"
    "zpty -w z 'PS1=\"\" PS2=\"\"; bindkey -e; unsetopt auto_remove_slash; fpath=(share/zsh/site-functions "
    "$fpath); autoload -Uz compinit; "
    "compinit -u -D; print READ\"\"Y'\n"
    "wait_for READY\n"
    "while IFS= read -r words; do\n"
    "    zpty -w -n z \"./fdsl-bench $words\"$'\\t'\n"
    "    zpty -w z $'\\C-aprint -r -- \"<'$'\\C-e>\"'\n"
    "    wait_for '<*>'\n"
    "    print -r -- \"${${out##*$'\\n'\\<./fdsl-bench }%%>*}\"\n"
    "done\n";

Test(completion, zsh_completes_as_bash)
{
    char typed[1024] = "", wanted[1024] = "";
    install("zsh");
    if (shell("zsh -f -c 'zmodload zsh/zpty'") != 0)
        cr_skip_test("zsh has no zpty");
    put_text("type.zsh", type_in_zsh);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        text_append(typed, sizeof typed, "%s\n", lines[i].words);
        text_append(wanted, sizeof wanted, "%s%s\n", lines[i].words, lines[i].rest);
    }
    put_text("typed", typed);
    EXPECT(0, "timeout 50 zsh -f type.zsh <typed | sed 's/ *$//'");
    cr_expect_str_eq(out, wanted, "%s", out);
}
