/* The program from outside: exit statuses, what stdout and stderr hold, and the files that it leaves.
 *
 * FDSL_BENCH names the program; the default is ./fdsl-bench. Nothing here needs a GPU, and nothing depends on
 * how fast the machine is. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <criterion/criterion.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cells.h"
#include "core/variant.h"
#include "core/workload.h"

/* Images that take microseconds, and three samples of them whatever they say. */
#define QUICK       "--res 32 --batch 2 --warmups 1 --warmup-time 0 --min-samples 3 --min-time 0 --max-time 0"
#define TINY        QUICK " --vertices 20 --orbits 4 --radius 3"
#define NAIVE       "--variant naive " TINY
#define NAIVE_MIXED "--variant naive " QUICK

/* The documented order of the columns: scripts depend on it. */
static const char header[] =
    "schema,time_utc,host,job_id,revision,workload,variant,device,driver,cuda,ranks,rank,threads,scaling,"
    "ranks_per_device,"
    "batch,res,vertices,orbits,formula,seed,instance,classes,preset,preset_file,class,"
    "noise,line_width,radius,oval_x,oval_y,freq1,freq2,output,channels,layout,out_res,fit,mean,std,compute_"
    "ms,"
    "warmups,samples,time_min_s,time_median_s,time_mean_s,time_p95_s,time_p99_s,time_sd_s,wall_s,"
    "items,items_per_s,bytes_per_s,roofline_share,time_cv,outliers,throttled,imbalance,efficiency,"
    "timed,noise_s,vertices_s,painting_s,digest,steps,wait_share,first_wait_s,step_s,utilisation,slowdown,"
    "cache,verified,wrong";

/* ---- Running the program ---- */

enum { TEXT_MAX = 1 << 20, ARGUMENTS_MAX = 128 };

static char program[PATH_MAX];

/* How the next runs are started. */
static struct {
    bool terminal_out, terminal_err;
    const char *out_to;    /* a path instead of our pipe; NULL: none */
    rlim_t file_bytes_max; /* RLIMIT_FSIZE; 0: none */
} how;

/* What the latest run did. `status` is 128 + the signal where one ended it. */
static int status;
static char out[TEXT_MAX], err[TEXT_MAX];

static void open_channel(bool terminal, int *ours, int *theirs)
{
    int ends[2];
    if (!terminal) {
        cr_assert(pipe2(ends, O_CLOEXEC) == 0);
        *ours = ends[0];
        *theirs = ends[1];
        return;
    }
    *ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*ours < 0)
        cr_skip_test("no pseudo-terminals here"); /* a container without /dev/pts */
    cr_assert(grantpt(*ours) == 0 && unlockpt(*ours) == 0);
    *theirs = open(ptsname(*ours), O_RDWR | O_NOCTTY | O_CLOEXEC);
    cr_assert(*theirs >= 0);
}

/* Reads both channels to their ends, whichever has something. */
static void drain(int out_fd, int err_fd)
{
    struct pollfd channels[2] = {{out_fd, POLLIN, 0}, {err_fd, POLLIN, 0}};
    char *texts[2] = {out, err};
    size_t used[2] = {0};
    while (channels[0].fd >= 0 || channels[1].fd >= 0) {
        cr_assert(poll(channels, 2, -1) > 0);
        for (int i = 0; i < 2; i++) {
            if (channels[i].fd < 0 || !channels[i].revents)
                continue;
            ssize_t got = read(channels[i].fd, texts[i] + used[i], TEXT_MAX - 1 - used[i]);
            if (got <= 0) { /* a terminal whose other end is closed fails with EIO */
                close(channels[i].fd);
                channels[i].fd = -1;
            } else
                used[i] += (size_t)got;
        }
    }
    out[used[0]] = err[used[1]] = '\0';
}

static void start_program(char *const argv[], int out_fd, int err_fd)
{
    int in_fd = open("/dev/null", O_RDONLY);
    if (how.out_to)
        out_fd = open(how.out_to, O_WRONLY);
    if (how.file_bytes_max) {
        struct rlimit limit = {how.file_bytes_max, how.file_bytes_max};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
            _exit(126);
    }
    if (dup2(in_fd, 0) != 0 || dup2(out_fd, 1) != 1 || dup2(err_fd, 2) != 2)
        _exit(126);
    execvp(argv[0], argv);
    _exit(127);
}

static void run_vector(char *const argv[])
{
    int out_ours, out_theirs, err_ours, err_theirs, wait_status;
    open_channel(how.terminal_out, &out_ours, &out_theirs);
    open_channel(how.terminal_err, &err_ours, &err_theirs);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0)
        start_program(argv, out_theirs, err_theirs);
    close(out_theirs);
    close(err_theirs);
    drain(out_ours, err_ours);
    cr_assert(waitpid(pid, &wait_status, 0) == pid);
    status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

/* Runs the program with these arguments, which blanks part. */
static void run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run(const char *format, ...)
{
    static char text[8192];
    char *argv[ARGUMENTS_MAX] = {program}, *rest = text, *word;
    size_t count = 1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    while ((word = strsep(&rest, " ")))
        if (*word && count + 1 < ARGUMENTS_MAX)
            argv[count++] = word;
    argv[count] = NULL;
    run_vector(argv);
}

static void run_well(const char *arguments)
{
    run("%s", arguments);
    cr_assert(status == 0, "%s: exit %d: %s", arguments, status, err);
}

/* ---- Files ---- */

static char folder[] = "/tmp/fdsl-cli-XXXXXX";

static void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    cr_assert(fputs(text, file) >= 0 && fclose(file) == 0);
}

/* A whole file; the caller frees it. */
static char *get(const char *path, size_t *bytes)
{
    char *text = calloc(1, TEXT_MAX);
    FILE *file = fopen(path, "r");
    cr_assert(text && file, "%s: %s", path, strerror(errno));
    size_t count = fread(text, 1, TEXT_MAX - 1, file);
    fclose(file);
    if (bytes)
        *bytes = count;
    return text;
}

static void expect_file(const char *path, const char *expected)
{
    char *text = get(path, NULL);
    cr_expect_str_eq(text, expected, "%s has changed", path);
    free(text);
}

static int count_files(void)
{
    int count = -2; /* . and .. */
    DIR *directory = opendir(".");
    cr_assert_not_null(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Every test has a folder of its own, and no launcher, job or taste in colours from outside. */
static void start(void)
{
    static const char *const variables[] = {
        "OMPI_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "PMIX_RANK",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_JOB_ID",
        "NO_COLOR",
        "TERM",
    };
    const char *path = getenv("FDSL_BENCH");
    cr_assert_not_null(realpath(path && *path ? path : "./fdsl-bench", program),
                       "build the program first, or set FDSL_BENCH");
    for (size_t i = 0; i < COUNT_OF(variables); i++)
        unsetenv(variables[i]);
    cr_assert_not_null(mkdtemp(folder));
    cr_assert(chdir(folder) == 0);
}

static void stop(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert(chdir("/") == 0 && system(command) == 0);
}

/* A test that is skipped never gets to stop(). */
#define SKIP(reason)          \
    do {                      \
        stop();               \
        cr_skip_test(reason); \
    } while (0)

TestSuite(cli, .init = start, .fini = stop, .timeout = 60);

/* ---- Texts ---- */

/* One line on stderr that begins with the program's name and holds these words; nothing on stdout. */
static void expect_error(int expected, const char *words, const char *arguments)
{
    cr_expect(status == expected, "%s: exit %d, not %d: %s", arguments, status, expected, err);
    cr_expect(*out == '\0', "%s: stdout is not empty: %s", arguments, out);
    cr_expect(strncmp(err, "fdsl-bench: ", 12) == 0, "%s: %s", arguments, err);
    cr_expect(strstr(err, words), "%s: '%s' is not in: %s", arguments, words, err);
    cr_expect(count_of(err, "\n") == 1 && err[strlen(err) - 1] == '\n', "%s: not one line: %s", arguments,
              err);
}

/* Runs a Python script with a file as its argument; fails with what it says. */
static void check_with_python(const char *script, const char *path)
{
    char *argv[] = {"python3", "-c", (char *)script, (char *)path, (char *)header, NULL};
    run_vector(argv);
    if (status == 127)
        SKIP("python3 is not installed");
    cr_expect(status == 0, "%s: %s", path, err);
}

/* ---- Without a run ---- */

Test(cli, information_needs_nothing_and_says_nothing_on_stderr)
{
    static const char *const commands[] = {"--help",
                                           "-h",
                                           "--version",
                                           "--list",
                                           "--list -v",
                                           "--list --verbose",
                                           "--env",
                                           "--env --format csv",
                                           "--workload synth --list",
                                           "--variant naive --list"};
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        run("%s", commands[i]);
        cr_expect(status == 0, "%s: exit %d", commands[i], status);
        cr_expect(*err == '\0', "%s: %s", commands[i], err);
        cr_expect(*out && out[strlen(out) - 1] == '\n', "%s", commands[i]);
        cr_expect(!strchr(out, '\033'), "%s", commands[i]);
    }
    cr_expect(count_files() == 0);
}

static void expect_help_names(const char *name)
{
    char option[80];
    snprintf(option, sizeof option, " --%s", name);
    for (const char *at = out; (at = strstr(at, option)); at++)
        if (strchr(" \n", at[strlen(option)]) && strncmp(at - 1, "  ", 2) == 0)
            return;
    if (strcmp(name, "help") != 0 && strcmp(name, "verbose") != 0) /* these follow a letter */
        cr_expect_fail("--help does not explain --%s", name);
    else
        cr_expect(strstr(out, option), "--help does not explain --%s", name);
}

Test(cli, help_names_every_option_and_exit_status)
{
    static const char *const shared[] = {
        "variant",   "workload", "list",        "verify",   "out",      "samples",     "format",  "threads",
        "device",    "warmups",  "warmup-time", "min-time", "max-time", "min-samples", "env",     "verbose",
        "max-error", "version",  "help",        "monitor",  "loops",    "best-gpu",    "dry-run", "ranks"};
    static const char *const statuses[] = {"0 done", "1 a failure while running", "2 usage",
                                           "3 wrong results", "4 this build or machine lacks"};
    run_well("--help");
    for (size_t i = 0; i < COUNT_OF(shared); i++)
        expect_help_names(shared[i]);
    for (size_t w = 0; workload_table[w]; w++) {
        cr_expect(strstr(out, workload_table[w]->summary));
        for (size_t i = 0; i < workload_table[w]->option_count; i++)
            expect_help_names(workload_table[w]->options[i].name);
    }
    for (size_t i = 0; i < COUNT_OF(statuses); i++)
        cr_expect(strstr(strstr(out, "exit status"), statuses[i]), "%s", statuses[i]);
}

Test(cli, a_dry_run_checks_all_and_makes_nothing)
{
    run_well(NAIVE " --verify --dry-run --out rows.csv --samples samples.csv --npy batch.npy");
    cr_expect(*out == '\0' && *err == '\0' && count_files() == 0, "%s%s", out, err);
    run(NAIVE " --dry-run --out nowhere/rows.csv");
    expect_error(2, "nowhere", "a folder that is not there");
    run("--variant nave --dry-run");
    expect_error(2, "did you mean 'naive'", "a misspelt variant");
    run(NAIVE " --dry-run --fit crop --out-res 64");
    expect_error(2, "crop", "a crop that is larger than its canvas");
#ifndef HAVE_CUDA
    run("--variant bat --dry-run");
    expect_error(4, "not built", "a variant that is not in the build");
#endif
}

Test(cli, a_dry_run_knows_of_ranks)
{
    run_well(NAIVE " --dry-run --ranks 3 --batch 3 --scaling strong");
    cr_expect(*out == '\0' && *err == '\0', "%s%s", out, err);
    run(NAIVE " --dry-run --ranks 3 --batch 2 --scaling strong");
    expect_error(2, "more ranks (3) than images (--batch 2)", "more ranks than images");
    run(NAIVE " --dry-run --ranks 2 --device 1");
    expect_error(2, "--device and --best-gpu are for one rank", "a device for two ranks");
    run(NAIVE " --dry-run --ranks 2 --npy out.npy");
    expect_error(2, "--npy", "a file that one rank writes");
    run(NAIVE " --dry-run --ranks 2000000");
    expect_error(2, "--ranks", "more ranks than there can be");
    run(NAIVE " --ranks 2");
    expect_error(2, "--ranks is for --dry-run; to start 2 ranks: mpirun --bind-to none -n 2",
                 "a run of ranks");
}

Test(cli, strong_scaling_of_one_rank_is_warned_of)
{
    run_well(NAIVE " --scaling strong");
    cr_expect(strstr(err, "--scaling strong changes nothing with one rank"), "%s", err);
    run_well(NAIVE " --scaling weak");
    cr_expect(!strstr(err, "--scaling"), "%s", err);
}

Test(cli, version_is_one_line)
{
    run_well("--version");
    cr_expect(strncmp(out, "fdsl-bench ", 11) == 0 && strlen(out) > 12 && count_of(out, "\n") == 1);
}

/* The line of --list that is about a variant; static. */
static const char *list_line(const char *name)
{
    static char line[1024];
    char start_[64];
    snprintf(start_, sizeof start_, "\n  %s ", name);
    const char *at = strstr(out, start_);
    cr_assert(at, "--list does not name %s", name);
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
    return line;
}

Test(cli, list_names_every_variant_with_a_reason)
{
    run_well("--list");
    cr_expect(strstr(list_line("naive"), " available"));
    for (size_t i = 0; i < variant_count; i++) {
        const char *line = list_line(variant_table[i].name), *reason = strstr(line, "unavailable: ");
        cr_expect(reason ? strlen(reason) > 20 : strstr(line, " available") != NULL, "%s", line);
    }
    run_well("--list -v");
    for (size_t i = 0; i < variant_count; i++)
        cr_expect(strstr(out, variant_table[i].summary), "%s", variant_table[i].name);
}

Test(cli, environment_in_every_format)
{
    static const char *const facts[] = {"time_utc", "host", "revision", "compiler", "kernel", "memory_bytes"};
    run_well("--env");
    for (size_t i = 0; i < COUNT_OF(facts); i++)
        cr_expect(strstr(out, facts[i]), "%s", facts[i]);
    run_well("--env --format csv");
    cr_expect(number(out, 1, "memory_bytes") > 0);
    cr_expect(number(out, 1, "allowed_threads") >= 1);
    cr_expect(*value(out, 1, "revision") && !strchr(value(out, 1, "revision"), ' '), "'%s'",
              value(out, 1, "revision"));
#ifdef HAVE_JANSSON
    run_well("--env --format json");
    put("env.json", out);
    check_with_python("import json, sys; assert json.load(open(sys.argv[1]))['memory_bytes'] > 0",
                      "env.json");
#endif
}

/* ---- Usage ---- */

struct refusal {
    const char *arguments, *words;
};

/* Each of these ends with exit status 2 and one line, and leaves no file behind. */
static void expect_refusals(const struct refusal *refusals, size_t count, const char *before)
{
    int files = count_files();
    for (size_t i = 0; i < count; i++) {
        run("%s %s", before, refusals[i].arguments);
        expect_error(2, refusals[i].words, refusals[i].arguments);
        cr_expect(count_files() == files, "%s: a file was made", refusals[i].arguments);
    }
}

Test(cli, says_what_to_run_where_nothing_is_asked)
{
    static const struct refusal refusals[] = {
        {"", "--variant NAME"},
        {"", "--list shows the names"},
        {"--verify", "--variant NAME"},
        {"--batch 4 --out rows.csv", "--variant NAME"},
        {"naive", "unexpected argument 'naive'; options begin with --"},
        {"-- naive", "unexpected argument 'naive'"},
        {"-x", "unknown option '-x'"},
        {"--list extra", "unexpected argument 'extra'"},
        {"--list --format csv", "--format csv does not apply"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), "");
}

Test(cli, refuses_unknown_names_with_the_nearest_one)
{
    static const struct refusal refusals[] = {
        {"--variant nive", "unknown variant 'nive'; did you mean 'naive'?"},
        {"--variant naive,omq", "unknown variant 'omq'; did you mean 'omp'?"},
        {"--variant NAIVE", "did you mean 'naive'?"},
        {"--variant quantum", "unknown variant 'quantum'; --list shows them all"},
        {"--variant naive,naive", "variant 'naive' is asked for twice"},
        {"--variant naive,", "--variant: 'naive,': a name is missing after the last comma"},
        {"--variant naive, omp", "a name is missing after the last comma"},
        {"--variant all,naive", "--variant: all stands alone"},
        {"--variant naive,all", "--variant: all stands alone"},
        {"--variant=", "unknown variant ''"},
        {"--vari nive", "did you mean 'naive'?"},
        {"--variant", "--variant needs a value"},
        {"--variant --verify", "--variant needs a value"},
        {"--variant all --workload snth", "unknown workload 'snth'; did you mean 'synth'?"},
        {"--variant all --workload xyzzy", "unknown workload 'xyzzy'; there is synth"},
        {"--variant naive --bach 4", "unknown option '--bach'; did you mean '--batch'?"},
        {"--variant naive --vertexes=4", "did you mean '--vertices'?"},
        {"--variant naive --frobnicate", "unknown option '--frobnicate'; --help lists all options"},
        {"--variant naive --ver", "'--ver' is ambiguous"},
        {"--variant naive --verify=yes", "--verify takes no value"},
        {"--variant naive --format xml", "--format: 'xml' is not one of table, csv, json"},
        {"--variant naive --format jsn", "did you mean 'json'?"},
        {"--variant naive --formula uij", "did you mean 'uji'?"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), "--out rows.csv --samples samples.csv");
}

Test(cli, refuses_values_out_of_range)
{
    static const struct refusal refusals[] = {
        {"--batch 0", "--batch: '0' is out of range; it must be 1 to"},
        {"--batch -1", "--batch: '-1' is out of range"},
        {"--batch 16777217", "--batch: '16777217' is out of range"},
        {"--batch 99999999999999999999999999", "is out of range"},
        {"--batch many", "--batch: 'many' is not a whole number"},
        {"--batch 1.5", "--batch: '1.5' is not a whole number"},
        {"--batch 1e3", "is not a whole number"},
        {"--batch 0x10", "is not a whole number"},
        {"--batch +3", "is not a whole number"},
        {"--batch=", "--batch: '' is not a whole number"},
        {"--batch", "--batch needs a value"},
        {"--res 0", "--res: '0' is out of range; it must be 1 to 16384"},
        {"--res 16385", "--res: '16385' is out of range"},
        {"--res -512", "--res: '-512' is out of range"},
        {"--res big", "--res: 'big' is not a whole number"},
        {"--vertices 0", "--vertices: '0' is out of range"},
        {"--vertices 1048577", "--vertices: '1048577' is out of range"},
        {"--vertices x", "--vertices: 'x' is not a whole number"},
        {"--orbits 0", "--orbits: '0' is out of range"},
        {"--orbits -2", "--orbits: '-2' is out of range"},
        {"--orbits 18446744073709551616", "--orbits: '18446744073709551616' is out of range"},
        {"--orbits 1048576", "lower orbits, noise or line_width"},
        {"--radius 1000000 --oval-y 100", "lower radius, oval_x or oval_y"},
        {"--seed 18446744073709551616", "--seed: '18446744073709551616' is out of range"},
        {"--seed -1", "--seed: '-1' is out of range"},
        {"--instance 4611686018427387905", "--instance: '4611686018427387905' is out of range"},
        {"--classes 1048577", "--classes: '1048577' is out of range"},
        {"--noise nan", "--noise: 'nan' is not a number"},
        {"--noise inf", "--noise: 'inf' is not a number"},
        {"--noise -1", "--noise: '-1' is out of range"},
        {"--line-width 1e400", "--line-width: '1e400' is out of range"},
        {"--oval-x 1,2", "--oval-x: '1,2' is not a number"},
        {"--freq1 -3", "--freq1: '-3' is out of range"},
        {"--threads -1", "--threads: '-1' is out of range"},
        {"--threads 1000000", "--threads: '1000000' is out of range"},
        {"--device gpu", "--device: 'gpu' is not a whole number"},
        {"--min-samples 0", "--min-samples: '0' is out of range; it must be 1 to"},
        {"--warmups -1", "--warmups: '-1' is out of range"},
        {"--warmup-time soon", "--warmup-time: 'soon' is not a number"},
        {"--min-time -1", "--min-time: '-1' is out of range"},
        {"--max-time forever", "--max-time: 'forever' is not a number"},
        {"--min-time 2 --max-time 1", "--max-time 1 is shorter than --min-time 2"},
        {"--max-error 0", "--max-error: '0' is out of range"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE " --out rows.csv --samples samples.csv");
}

Test(cli, refuses_options_that_contradict_each_other)
{
    static const struct refusal refusals[] = {
        {"--classes 4 --vertices 10", "--vertices describes the benchmark class, which --classes replaces"},
        {"--classes 4 --oval-y 1.5", "--oval-y describes the benchmark class, which --classes replaces"},
        {"--class some.csv --radius 3", "--radius describes the benchmark class, which --class replaces"},
        {"--classes 4 --class some.csv", "--classes draws classes and --class reads them"},
        {"--preset uji", "--preset has ranges to draw classes from; say how many with --classes N"},
        {"--preset-file some.cfg", "--preset-file has ranges to draw classes from"},
        {"--preset uji --class some.csv", "say how many with --classes N"},
        {"--out same.csv --samples ./same.csv", "--out and --samples name the same file"},
        {"--out same.csv --write-classes same.csv", "--out and --write-classes name the same file"},
        {"--out same.csv --samples same.csv", "--out and --samples name the same file"},
        {"--samples same.csv --monitor ./same.csv:50", "--samples and --monitor name the same file"},
        {"--best-gpu --device 0", "--best-gpu chooses a device and --device names one; leave one out"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED " --out rows.csv");
}

/* The images of TINY have a side of 32. */
Test(cli, refuses_outputs_that_cannot_be)
{
    static const struct refusal refusals[] = {
        {"--output f64", "--output: 'f64' is not one of u8, f16, bf16, f32"},
        {"--channels 2", "--channels: '2' is neither 1 nor 3"},
        {"--channels 0", "--channels: '0' is neither 1 nor 3"},
        {"--channels 4", "--channels: '4' is neither 1 nor 3"},
        {"--layout hwc", "--layout: 'hwc' is not one of nchw, nhwc"},
        {"--out-res 0", "--out-res: '0' is out of range; it must be 1 to 16384"},
        {"--out-res 16385", "--out-res: '16385' is out of range"},
        {"--fit pad", "--fit: 'pad' is not one of resize, crop"},
        {"--fit crop --out-res 33", "--fit crop: --out-res 33 is larger than --res 32"},
        {"--mean 0.5", "--mean scales floats, and u8 holds grays as they are"},
        {"--output u8 --std 0.5", "--std scales floats, and u8 holds grays as they are"},
        {"--output f32 --mean x", "--mean: 'x' is not a number"},
        {"--output f32 --mean nan", "--mean: 'nan' is not a number"},
        {"--output f32 --mean=", "--mean: the value is empty"},
        {"--output f32 --mean 0,0,0", "--mean: '0,0,0' are 3 values for 1 channel"},
        {"--output f32 --channels 3 --mean 0,0", "--mean: '0,0' are 2 values for 3 channels"},
        {"--output f32 --channels 3 --std 1,,1", "--std: '' is not a number"},
        {"--output f32 --channels 3 --std 1,1,1,",
         "--std: '1,1,1,': a value is missing after the last comma"},
        {"--out f16", "--out f16: did you mean --output f16? If not, name the file ./f16"},
        {"--out u8", "did you mean --output u8?"},
        {"--output f32 --std 0", "--std: '0' is out of range"},
        {"--output f32 --std -1", "--std: '-1' is out of range"},
        {"--npy nowhere/a.npy", "its folder does not exist"},
        {"--npy /dev/full", "/dev/full is not a regular file"},
        {"--npy rows.csv", "--out and --npy name the same file"},
        {"--npy a.npy --samples a.labels.npy", "--npy and --samples would both write a.labels.npy"},
        {"--npy a.npy --write-classes ./a.labels.npy", "--npy and --write-classes would both write"},
#ifdef HAVE_PNG
        {"--output f16 --png folder", "--png shows u8 images of one channel; write others with --npy FILE"},
        {"--channels 3 --sheet a.png", "--sheet shows u8 images of one channel"},
#endif
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE " --out rows.csv");
}

Test(cli, outputs_fill_their_columns)
{
    static const struct {
        const char *arguments, *texts[7]; /* output, channels, layout, out_res, fit, mean, std */
    } rows[] = {
        {"", {"u8", "1", "nchw", "32", "", "", ""}},
        {"--fit crop --layout nhwc", {"u8", "1", "nhwc", "32", "", "", ""}},
        {"--out-res 32 --channels 3", {"u8", "3", "nchw", "32", "", "", ""}},
        {"--out-res 48", {"u8", "1", "nchw", "48", "resize", "", ""}},
        {"--output f16 --out-res 7 --fit crop", {"f16", "1", "nchw", "7", "crop", "0", "1"}},
        {"--output bf16 --mean 0.5", {"bf16", "1", "nchw", "32", "", "0.5", "1"}},
        {"--output f32 --channels 3 --std 1,2,3", {"f32", "3", "nchw", "32", "", "0", "1,2,3"}},
    };
    static const char *const columns[] = {"output", "channels", "layout", "out_res", "fit", "mean", "std"};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        run("--variant " VARIANTS " " TINY " --verify --format csv %s", rows[i].arguments);
        cr_assert(status == 0, "%s: %s", rows[i].arguments, err);
        for (size_t v = 1; v <= VARIANT_COUNT; v++) {
            for (size_t c = 0; c < COUNT_OF(columns); c++)
                cr_expect_str_eq(value(out, v, columns[c]), rows[i].texts[c], "%s: %s", rows[i].arguments,
                                 columns[c]);
            cr_expect_str_eq(value(out, v, "wrong"), "0", "%s", rows[i].arguments);
            bool canvas = i < 2;
            cr_expect_str_eq(value(out, v, "timed"), canvas ? "clear+draw" : "clear+draw+output");
        }
    }
}

Test(cli, scales_that_are_hardly_meant_are_warned_of)
{
    static const struct {
        const char *arguments, *words; /* NULL: nothing to warn of */
    } scales[] = {
        {"--output f16 --mean 0.485 --std 0.229", NULL},
        {"--output f32 --mean -1 --std 1", NULL},
        {"--output f32 --mean 123.675 --std 0.5", "warning: --mean 123.675: grays are 0 to 1; divide"},
        {"--output f16 --std 58.4", "warning: --std 58.4: grays are 0 to 1; divide"},
        {"--output f16 --mean 0.25 --std 0.00001", "warning: --output f16 holds values to 65504"},
        {"--output f16 --std 0.000016", NULL}, /* 62500 */
        {"--output bf16 --mean 0.25 --std 0.00001", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(scales); i++) {
        run(NAIVE " --min-samples 6 --max-error 100 %s", scales[i].arguments);
        cr_expect(status == 0, "%s: %s", scales[i].arguments, err);
        if (scales[i].words)
            cr_expect(strstr(err, scales[i].words), "%s: %s", scales[i].arguments, err);
        else
            cr_expect(!strstr(err, "warning: --"), "%s: %s", scales[i].arguments, err);
    }
}

Test(cli, what_a_variant_makes_is_said_before_what_the_machine_lacks)
{
    if (!variant_find("bat")->variant)
        SKIP("this build has no variant that makes canvases alone: no CUDA");
    run("--variant bat --output f16 " TINY);
    expect_error(2, "variant 'bat' cannot do this: it makes u8 images of one channel", "--output f16");
}

Test(cli, a_file_may_be_called_as_a_type_where_it_is_no_slip)
{
    run_well(NAIVE " --out ./f16");
    run_well(NAIVE " --output f32 --out f32");
    free(get("f16", NULL));
    free(get("f32", NULL));
}

Test(cli, bytes_are_those_of_the_output)
{
    run_well(NAIVE " --output f16 --channels 3 --out-res 10 --format csv");
    double bytes = number(out, 1, "bytes_per_s") * number(out, 1, "time_median_s");
    cr_expect(fabs(bytes / (2 * (10 * 10 * 3 * 2 + 8)) - 1) < 1e-6, "%g", bytes);
}

Test(cli, an_unambiguous_beginning_of_a_name_will_do)
{
    run_well("--vari naive --work synth --forma csv " TINY);
    cr_expect_str_eq(value(out, 1, "variant"), "naive");
    run_well("--vari=naive --forma=csv " TINY " --bat 3");
    cr_expect(number(out, 1, "batch") == 3);
}

Test(cli, a_batch_beyond_memory_says_how_much_it_needs)
{
    double needed = 0, available = 0;
    run(NAIVE " --batch 16777216 --res 16384 --out rows.csv");
    expect_error(2, "GB of host memory", "a batch of 4.5 PB");
    const char *numbers = strstr(err, "needs ");
    cr_assert(numbers);
    cr_expect(sscanf(numbers, "needs %lf GB of host memory and %lf GB are available", &needed, &available) ==
              2);
    cr_expect(needed > 4e6 && available > 0 && available < needed, "%s", err);
    cr_expect(strstr(err, "lower --batch or --res"));
    cr_expect(count_files() == 0);
}

/* ---- Classes ---- */

Test(cli, a_list_of_classes_must_have_the_right_columns)
{
    static const char right[] = "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n";
    static const struct refusal refusals[] = {
        {"--class missing.csv", "cannot open 'missing.csv': No such file or directory"},
        {"--class wrong.csv", "wrong.csv:1: column 2 of the header is 'edges': it must be 'vertices'"},
        {"--class short.csv", "short.csv:2: 3 values, not 10: oval_x is missing"},
        {"--class zero.csv", "zero.csv:3: vertices: '0' is out of range"},
        {"--class none.csv", "none.csv:2: there is no class"},
        {"--class empty.csv", "empty.csv:1: the file is empty"},
    };
    char text[512];
    put("wrong.csv", "class,edges,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n");
    snprintf(text, sizeof text, "%s0,20,4\n", right);
    put("short.csv", text);
    snprintf(text, sizeof text, "%s0,20,4,1,1,0,1,2,5,0\n1,0,4,1,1,0,1,2,5,0\n", right);
    put("zero.csv", text);
    put("none.csv", right);
    put("empty.csv", "");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED);
}

#ifdef HAVE_INIH

Test(cli, a_file_of_presets_must_be_whole)
{
    static const char ranges[] = "[mine]\nnvertex_min = %d\nnvertex_max = 40\nnorbits_min = 1\n"
                                 "norbits_max = 5\noval_max = 2\nfreq_min = 0\nfreq_max = 20\n"
                                 "noisecoef_min = 0\nstartrad_min = 0\nlinewidth_max = 0.1\n%s";
    static const struct refusal refusals[] = {
        {"--preset-file good.cfg --preset mien", "good.cfg: no section [mien]: did you mean [mine]?"},
        {"--preset-file good.cfg --preset xyzzy", "good.cfg: no section [xyzzy]; there is [mine]"},
        {"--preset-file good.cfg", "no section [uji]"},
        {"--preset-file keyless.cfg --preset mine", "section [mine]: key 'seed' is missing"},
        {"--preset-file inverted.cfg --preset mine", "nvertex_min 50 exceeds nvertex_max 40"},
        {"--preset-file unknown.cfg --preset mine", "unknown key 'sed': did you mean 'seed'?"},
        {"--preset-file torn.cfg --preset mine", "torn.cfg:2: neither a [section] nor key = value"},
        {"--preset-file missing.cfg --preset mine", "cannot open 'missing.cfg'"},
        {"--preset ujo", "no section [ujo]: did you mean [uji]?"},
    };
    char text[512];
    snprintf(text, sizeof text, ranges, 20, "seed = 1\n");
    put("good.cfg", text);
    snprintf(text, sizeof text, ranges, 20, "");
    put("keyless.cfg", text);
    snprintf(text, sizeof text, ranges, 50, "seed = 1\n");
    put("inverted.cfg", text);
    snprintf(text, sizeof text, ranges, 20, "sed = 1\n");
    put("unknown.cfg", text);
    put("torn.cfg", "[mine]\nnvertex_min\n");
    run_well(NAIVE_MIXED " --classes 3 --preset-file good.cfg --preset mine");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE_MIXED " --classes 3");
}

Test(cli, a_mixed_batch_leaves_the_columns_of_the_benchmark_class_empty)
{
    run_well(NAIVE_MIXED " --classes 3 --preset lowercompute --format csv");
    static const char *const columns[] = {"vertices", "orbits", "noise", "line_width", "radius",
                                          "oval_x",   "oval_y", "freq1", "freq2"};
    for (size_t i = 0; i < COUNT_OF(columns); i++)
        cr_expect_str_empty(value(out, 1, columns[i]), "%s", columns[i]);
    cr_expect_str_eq(value(out, 1, "classes"), "3");
    cr_expect_str_eq(value(out, 1, "preset"), "lowercompute");
    run_well(NAIVE_MIXED " --classes 3 --formula visualatom --format csv");
    cr_expect_str_eq(value(out, 1, "preset"), "visualatom", "the default is known in the row");
}

Test(cli, classes_that_were_written_can_be_read)
{
    char *text;
    run_well(NAIVE_MIXED " --batch 5 --classes 5 --write-classes classes.csv --format csv");
    char drawn[64];
    snprintf(drawn, sizeof drawn, "%.63s", value(out, 1, "digest"));
    text = get("classes.csv", NULL);
    cr_expect(count_of(text, "\n") == 6, "a header and five classes: %s", text);
    free(text);
    run_well(NAIVE_MIXED " --batch 5 --class classes.csv --format csv");
    cr_expect_str_eq(value(out, 1, "digest"), drawn, "the same classes make the same images");
}

#endif

/* ---- Where rows and pictures go ---- */

Test(cli, refuses_to_write_where_it_cannot)
{
    static const char foreign[] = "schema,colour\nother/1,blue\n";
    static const struct refusal refusals[] = {
        {"--out nowhere/rows.csv", "its folder does not exist; make it with: mkdir -p 'nowhere'"},
        {"--samples nowhere/rows.csv", "its folder does not exist"},
        {"--out file/rows.csv", "file/rows.csv cannot be used: Not a directory"},
        {"--out .", ". is a folder"},
        {"--out rows/", "'rows/' names no file"},
        {"--out=", "--out: the value is empty"},
        {"--out", "--out needs a value"},
        {"--out /dev/full", "/dev/full is a device or pipe; name a regular file"},
        {"--out foreign.csv", "foreign.csv holds other columns (column 2 is 'colour', not 'time_utc')"},
        {"--samples foreign.csv", "foreign.csv holds other columns"},
        {"--out dangling.csv", "dangling.csv is a link to a file that does not exist"},
        {"--write-classes nowhere/c.csv", "its folder does not exist"},
        {"--write-classes /dev/full", "is not a regular file"},
#ifdef HAVE_PNG
        {"--png file", "'file' is not a folder"},
        {"--png nowhere/pictures", "its folder does not exist; make it with: mkdir -p 'nowhere'"},
        {"--png /proc/pictures", "cannot make folder '/proc/pictures'"},
        {"--sheet nowhere/sheet.png", "its folder does not exist"},
        {"--sheet .", "is not a regular file"},
#endif
    };
    put("file", "text\n");
    put("foreign.csv", foreign);
    cr_assert(symlink("nothing.csv", "dangling.csv") == 0);
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    expect_file("foreign.csv", foreign);
    expect_file("file", "text\n");
}

Test(cli, refuses_a_folder_without_permission)
{
    if (geteuid() == 0)
        SKIP("permissions do not hold root back");
    static const struct refusal refusals[] = {
        {"--out locked/rows.csv", "cannot be written"},
#ifdef HAVE_PNG
        {"--png locked", "cannot write into folder 'locked'"},
#endif
    };
    cr_assert(mkdir("locked", 0500) == 0);
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
}

Test(cli, out_appends_rows_under_one_header)
{
    size_t bytes;
    run_well(NAIVE " --out rows.csv");
    char *first = get("rows.csv", &bytes);
    cr_expect(count_of(first, "\n") == 2);
    cr_expect(strncmp(first, header, strlen(header)) == 0 && first[strlen(header)] == '\n', "%s", first);
    run_well(NAIVE " --seed 7 --out rows.csv");
    char *both = get("rows.csv", NULL);
    cr_expect(count_of(both, "\n") == 3 && count_of(both, "schema,") == 1);
    cr_expect(strncmp(both, first, bytes) == 0, "the first row must stay as it was");
    cr_expect_str_eq(value(both, 1, "seed"), "0");
    cr_expect_str_eq(value(both, 2, "seed"), "7");
    free(first);
    free(both);
    cr_expect(count_files() == 1);
}

Test(cli, a_row_holds_what_was_run)
{
    setenv("SLURM_JOB_ID", "123", 1);
    run_well("--variant naive --format csv --res 24 --batch 3 --vertices 30 --orbits 5 --formula visualatom "
             "--seed 9 --instance 11 --noise 1.5 --freq2 2 --warmups 2 --warmup-time 0 --min-samples 4 "
             "--min-time 0 --max-time 0");
    static const struct {
        const char *column, *text;
    } cells[] = {{"schema", "synth/4"}, {"job_id", "123"},  {"workload", "synth"},
                 {"variant", "naive"},  {"driver", ""},     {"cuda", ""},
                 {"ranks", "1"},        {"rank", "0"},      {"threads", "1"},
                 {"batch", "3"},        {"res", "24"},      {"vertices", "30"},
                 {"orbits", "5"},       {"seed", "9"},      {"formula", "visualatom"},
                 {"instance", "11"},    {"noise", "1.5"},   {"line_width", "0.002"},
                 {"freq1", "5"},        {"freq2", "2"},     {"warmups", "3"},
                 {"samples", "4"},      {"items", "3"},     {"classes", "0"},
                 {"preset", ""},        {"verified", "no"}, {"wrong", ""},
                 {"throttled", ""},     {"cache", ""},      {"timed", "clear+draw"},
                 {"output", "u8"},      {"channels", "1"},  {"layout", "nchw"},
                 {"out_res", "24"},     {"fit", ""},        {"mean", ""}};
    for (size_t i = 0; i < COUNT_OF(cells); i++)
        cr_expect_str_eq(value(out, 1, cells[i].column), cells[i].text, "%s", cells[i].column);
    double median = number(out, 1, "time_median_s");
    cr_expect(median > 0 && number(out, 1, "time_min_s") <= median);
    cr_expect(median <= number(out, 1, "time_p95_s"));
    cr_expect(number(out, 1, "time_p95_s") <= number(out, 1, "time_p99_s"));
    double rate = number(out, 1, "items_per_s") * median;
    cr_expect(rate > 2.999 && rate < 3.001, "%g", rate);
    double bytes = number(out, 1, "bytes_per_s") * median / (3 * (24 * 24 + 8)); /* 8 for the label */
    cr_expect(bytes > 0.999 && bytes < 1.001, "%g", bytes);
}

Test(cli, samples_has_a_row_a_sample)
{
    run_well("--variant " VARIANTS " " TINY " --min-samples 7 --out rows.csv --samples samples.csv");
    char *rows = get("rows.csv", NULL), *samples = get("samples.csv", NULL);
    size_t expected = 0, row = 0;
    for (size_t v = 1; v <= VARIANT_COUNT; v++) {
        size_t count = (size_t)number(rows, v, "samples");
        double fastest = 1e9;
        cr_expect(count == 7);
        for (size_t i = 0; i < count; i++) {
            row++;
            cr_expect(number(samples, row, "sample") == (double)i);
            cr_expect(strncmp(value(samples, row, "variant"), v == 1 ? "naive" : "omp", 5) == 0);
            cr_expect_str_empty(value(samples, row, "device_s"));
            fastest = fmin(fastest, number(samples, row, "wall_s"));
        }
        cr_expect(fastest == number(rows, v, "time_min_s"), "the row must sum its samples up");
        expected += count;
    }
    cr_expect(count_of(samples, "\n") == expected + 1);
    free(rows);
    free(samples);
}

/* A limit on the size of files stands in for a full disk. */
Test(cli, a_row_that_does_not_fit_leaves_the_file_as_it_was)
{
    size_t bytes;
    run_well(NAIVE " --out rows.csv");
    char *before = get("rows.csv", &bytes);
    how.file_bytes_max = bytes + 20;
    run(NAIVE " --out rows.csv");
    cr_expect(status == 1, "exit %d: %s", status, err);
    cr_expect(strstr(err, "rows.csv: a row could not be written (File too large)"), "%s", err);
    cr_expect(strstr(err, "the rows before it are whole"), "%s", err);
    expect_file("rows.csv", before);
    how.file_bytes_max = 20;
    run(NAIVE " --out new.csv");
    cr_expect(status == 1 && strstr(err, "new.csv: a row could not be written (File too large)\n"), "%s",
              err);
    cr_expect(access("new.csv", F_OK) != 0, "an empty file is left");
    how.file_bytes_max = 0;
    run_well(NAIVE " --out rows.csv"); /* and with room it goes on */
    free(before);
}

Test(cli, rows_before_the_one_that_does_not_fit_stay_whole)
{
    if (VARIANT_COUNT < 2)
        SKIP("two variants are wanted, and this build has one: no OpenMP");
    size_t bytes;
    run_well(NAIVE " --out one.csv");
    free(get("one.csv", &bytes));
    how.file_bytes_max = bytes + 100; /* numbers may be longer next time, but a row takes more than that */
    run("--variant " VARIANTS " " TINY " --out rows.csv");
    cr_expect(status == 1, "exit %d: %s", status, err);
    cr_expect(strstr(err, "could not be written"), "%s", err);
    char *rows = get("rows.csv", NULL);
    cr_expect(count_of(rows, "\n") == 2 && rows[strlen(rows) - 1] == '\n');
    cr_expect_str_eq(value(rows, 1, "variant"), "naive");
    cr_expect_str_eq(value(rows, 1, "verified"), "no", "the row's last cells are there");
    free(rows);
}

Test(cli, a_full_stdout_is_a_failure)
{
    static const char *const commands[] = {"--help",
                                           "--list",
                                           "--version",
                                           "--env",
                                           NAIVE,
                                           NAIVE " --format csv"
#ifdef HAVE_JANSSON
                                           ,
                                           NAIVE " --format json"
#endif
    };
    how.out_to = "/dev/full";
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        run("%s", commands[i]);
        cr_expect(status == 1, "%s: exit %d", commands[i], status);
        cr_expect(strstr(err, "stdout"), "%s: %s", commands[i], err);
        cr_expect(strstr(err, "No space left on device"), "%s: %s", commands[i], err);
    }
    run(NAIVE " --out rows.csv");
    cr_expect(status == 1);
    char *rows = get("rows.csv", NULL);
    cr_expect(count_of(rows, "\n") == 2, "the row is safe all the same");
    free(rows);
}

/* ---- Consumed batches ---- */

Test(cli, compute_is_a_time_and_needs_a_gpu)
{
    static const struct refusal refusals[] = {
        {"--compute 0", "--compute: '0' is out of range; it must be 0.1 to 1000"},
        {"--compute 1001", "out of range"},
        {"--compute train", "--compute: 'train' is not a number"},
        {"--compute", "--compute needs a value"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    run(NAIVE " --compute 5 --device 1023"); /* here there are not so many */
    expect_error(4, "--compute: no", "--compute 5");
    run(NAIVE " --compute 5 --device 1023 --dry-run");
    expect_error(4, "--compute: no", "--compute 5");
    run_well(NAIVE " --format csv");
    static const char *const empty[] = {"compute_ms", "steps",       "wait_share", "first_wait_s",
                                        "step_s",     "utilisation", "slowdown"};
    for (size_t i = 0; i < COUNT_OF(empty); i++)
        cr_expect_str_eq(value(out, 1, empty[i]), "", "%s", empty[i]);
}

/* ---- Formats ---- */

Test(cli, csv_on_stdout_is_a_header_and_a_row_a_variant)
{
    run_well("--variant " VARIANTS " " TINY " --format csv");
    cr_expect(strncmp(out, header, strlen(header)) == 0 && out[strlen(header)] == '\n', "%s", out);
    cr_expect(count_of(out, "\n") == 1 + VARIANT_COUNT);
    put("stdout.csv", out);
    check_with_python("import csv, sys\n"
                      "rows = list(csv.reader(open(sys.argv[1], newline=''), strict=True))\n"
                      "header = sys.argv[2].split(',')\n"
                      "assert rows[0] == header, rows[0]\n"
                      "assert all(len(row) == len(header) for row in rows), [len(row) for row in rows]\n"
                      "names = [row[header.index('variant')] for row in rows[1:]]\n"
                      "assert ','.join(names) == '" VARIANTS "', names\n",
                      "stdout.csv");
}

#ifdef HAVE_JANSSON
Test(cli, json_on_stdout_is_one_document_with_the_same_columns)
{
    run_well("--variant " VARIANTS " " TINY " --format json");
    put("stdout.json", out);
    check_with_python("import json, sys\n"
                      "document = json.load(open(sys.argv[1]))\n"
                      "header = sys.argv[2].split(',')\n"
                      "assert list(document) == ['environment', 'rows'], list(document)\n"
                      "rows = document['rows']\n"
                      "assert ','.join(row['variant'] for row in rows) == '" VARIANTS "'\n"
                      "for row in rows:\n"
                      "    assert list(row)[:len(header)] == header, list(row)\n"
                      "    assert row['batch'] == 2 and row['res'] == 32 and row['noise'] == 2\n"
                      "    assert row['driver'] is None and row['wrong'] is None and row['cache'] is None\n"
                      "    assert type(row['device']) is str and row['samples'] == 3\n"
                      "    assert row['verified'] is False and type(row['rank']) is int\n"
                      "    assert 0 < row['time_min_s'] <= row['time_median_s']\n"
                      "    assert row['settled'] in (True, False) and row['median_error'] is None\n",
                      "stdout.json");
}

#ifdef HAVE_XXHASH
Test(cli, json_of_loads_has_numbers_and_flags)
{
    run_well("--prepare samples --samples 40 --sample-shape 3,4,4 --dtype u8");
    run_well("--variant shards,shards-mmap --data samples --cache any --loops 3 --warmups 0 --warmup-time 0 "
             "--format json");
    put("loads.json", out);
    check_with_python(
        "import json, sys\n"
        "words = 'schema time_utc host job_id revision workload variant device driver cuda scaling data '\\\n"
        "    'on_error throttled timed layout tally cache'.split()\n"
        "flags = 'decode augment verified settled'.split()\n"
        "for row in json.load(open(sys.argv[1]))['rows']:\n"
        "    for name, value in row.items():\n"
        "        kind = str if name in words else bool if name in flags else (int, float)\n"
        "        assert value is None or (isinstance(value, kind) and\n"
        "            (name in flags) == (type(value) is bool)), (name, value)\n"
        "    assert row['decode'] is False and row['verified'] is False and row['wrong'] == 0\n"
        "    assert row['skipped'] == 0 and row['shards'] == 1 and len(row['tally']) == 16\n",
        "loads.json");
}
#endif
#else
Test(cli, json_is_refused_where_it_is_not_built)
{
    run(NAIVE " --format json");
    expect_error(4, "jansson", "--format json");
}
#endif

Test(cli, the_table_has_a_line_a_variant)
{
    run_well("--variant " VARIANTS " " TINY " --verify");
    cr_expect(strncmp(out, "synth: batch 2 res 32 vertices 20 orbits 4 formula uji", 54) == 0, "%s", out);
    cr_expect(strstr(out, "\nvariant ") && strstr(out, "#wrong"));
    cr_expect(strstr(out, "\nnaive "));
    cr_expect(count_of(out, "\n") == 3 + VARIANT_COUNT, "%s", out);
}

#ifdef HAVE_XXHASH
/* Every run of a loader is checked, so what is wrong is known without --verify too. */
Test(cli, the_table_of_loads_tells_the_cache_and_what_was_skipped)
{
    run_well("--prepare samples --samples 40 --sample-shape 3,4,4 --dtype u8");
    run_well("--variant shards --data samples --cache any --loops 3 --warmups 0 --warmup-time 0");
    cr_expect(strstr(out, " cache any\n"), "%s", out);
    cr_expect(strstr(out, " #wrong    skipped\n"), "%s", out);
    cr_expect(strstr(out, "        3        0          0\n"), "%s", out);
}
#endif

Test(cli, all_runs_what_can_run_here_and_notes_the_rest_on_stderr)
{
    size_t available = 0, count = 0;
    run_well("--list");
    for (size_t i = 0; i < variant_count; i++) {
        bool synth = strcmp(variant_table[i].workload, "synth") == 0;
        count += synth;
        available += synth && !strstr(list_line(variant_table[i].name), "unavailable: ");
    }
    run_well("--variant all " TINY " --format csv");
    cr_expect(count_of(out, "\n") == 1 + available);
    cr_expect(count_of(err, "skipping ") == count - available, "%s", err);
}

/* ---- What is missing here ---- */

Test(cli, a_variant_that_cannot_run_says_why_and_which_one_would)
{
    char name[64] = "", reason[512] = "", offer[64];
    run_well("--list");
    for (size_t i = 0; i < variant_count && !*name; i++) {
        const char *found = strstr(list_line(variant_table[i].name), "unavailable: ");
        if (!found)
            continue;
        snprintf(name, sizeof name, "%s", variant_table[i].name);
        snprintf(reason, sizeof reason, "%s", found + strlen("unavailable: "));
    }
    if (!*name)
        SKIP("every variant can run here: there is a GPU, and everything is built");
    snprintf(offer, sizeof offer, "'%s' would", strrchr("," VARIANTS, ',') + 1);
    run("--variant %s " TINY " --out rows.csv", name);
    expect_error(4, reason, name);
    expect_error(4, offer, name);
    run("--variant naive,%s " TINY " --out rows.csv", name);
    expect_error(4, reason, "nothing runs where one of several cannot");
    cr_expect(count_files() == 0);
}

Test(cli, a_serial_build_refuses_to_be_one_of_several_ranks)
{
#ifdef HAVE_MPI
    SKIP("this build has MPI");
#endif
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    run(NAIVE " --out rows.csv");
    expect_error(4, "started as one of 4 ranks (OMPI_COMM_WORLD_SIZE), but this build has no MPI", "4 ranks");
    cr_expect(count_files() == 0);
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    run_well(NAIVE);
}

/* ---- Right results ---- */

Test(cli, verify_fills_its_columns)
{
    run_well("--variant " VARIANTS " " TINY " --batch 5 --verify --format csv");
    for (size_t v = 1; v <= VARIANT_COUNT; v++) {
        cr_expect_str_eq(value(out, v, "verified"), "yes");
        cr_expect_str_eq(value(out, v, "wrong"), "0");
    }
    run_well("--variant " VARIANTS " " TINY " --format csv");
    for (size_t v = 1; v <= VARIANT_COUNT; v++) {
        cr_expect_str_eq(value(out, v, "verified"), "no");
        cr_expect_str_empty(value(out, v, "wrong"));
    }
}

#ifdef HAVE_XXHASH

/* The digest of a run's images; static, two at a time. */
static const char *digest_of(const char *arguments)
{
    static char digests[2][64];
    static int next;
    next ^= 1;
    run("%s --format csv", arguments);
    cr_assert(status == 0, "%s: %s", arguments, err);
    snprintf(digests[next], sizeof digests[next], "%.63s", value(out, 1, "digest"));
    cr_expect(strlen(digests[next]) == 16, "%s: '%s'", arguments, digests[next]);
    return digests[next];
}

Test(cli, the_digest_is_the_same_for_every_exact_variant)
{
#ifndef _OPENMP
    SKIP("this build has one exact variant: no OpenMP");
#endif
    static const char *const shapes[] = {"", "--formula visualatom", "--seed 5 --instance 3",
                                         "--res 61 --vertices 67 --orbits 9 --batch 5",
                                         "--vertices 1 --orbits 1 --res 1"};
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        run("--variant " VARIANTS " " TINY " %s --format csv", shapes[i]);
        cr_assert(status == 0, "%s", err);
        char reference[64];
        snprintf(reference, sizeof reference, "%.63s", value(out, 1, "digest"));
        cr_expect_str_eq(value(out, 2, "digest"), reference, "%s", shapes[i]);
    }
    cr_expect_str_eq(digest_of("--variant omp " TINY " --batch 6 --threads 1"),
                     digest_of("--variant omp " TINY " --batch 6 --threads 3"));
}

Test(cli, the_digest_follows_seed_and_instance_and_nothing_else)
{
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE));
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE " --min-samples 9 --warmups 4"));
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE " --seed 0 --instance 0"));
    /* At this size a large circle would leave all images black, and their digests equal. */
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --radius 1000"));
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --seed 1"));
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --instance 2"));
    cr_expect_str_neq(digest_of(NAIVE " --seed 1 --instance 2"), digest_of(NAIVE " --instance 2"));
    cr_expect_str_neq(digest_of(NAIVE " --batch 1"), digest_of(NAIVE " --batch 1 --instance 1"));
}

#endif

#ifdef HAVE_PNG
/* An image is a function of seed, class and instance alone: a batch that begins later holds the same ones. */
Test(cli, a_shifted_batch_holds_the_same_images)
{
    run_well(NAIVE " --batch 6 --seed 4 --png whole");
    run_well("--variant " VARIANTS " " TINY " --batch 2 --seed 4 --instance 3 --png shifted");
    run_well(NAIVE " --batch 2 --seed 5 --instance 3 --png other");
    for (int i = 3; i < 5; i++) {
        char path[64];
        size_t bytes, shifted_bytes, other_bytes;
        snprintf(path, sizeof path, "whole/class-0_instance-%d.png", i);
        char *image = get(path, &bytes);
        snprintf(path, sizeof path, "shifted/%sclass-0_instance-%d.png", VARIANT_COUNT > 1 ? "omp/" : "", i);
        char *shifted = get(path, &shifted_bytes);
        snprintf(path, sizeof path, "other/class-0_instance-%d.png", i);
        char *other = get(path, &other_bytes);
        cr_expect(bytes == shifted_bytes && memcmp(image, shifted, bytes) == 0, "instance %d", i);
        cr_expect(bytes != other_bytes || memcmp(image, other, bytes) != 0, "another seed, instance %d", i);
        free(image);
        free(shifted);
        free(other);
    }
    char *index = get("whole/index.tsv", NULL);
    cr_expect(count_of(index, "\n") == 7, "%s", index);
    free(index);
}
#else
Test(cli, pictures_are_refused_where_they_are_not_built)
{
    run(NAIVE " --png pictures");
    expect_error(4, "libpng", "--png");
}
#endif

#ifdef HAVE_PNG
Test(cli, pictures_show_the_output)
{
    run_well(NAIVE " --out-res 20 --png small --sheet sheet.png");
    size_t bytes;
    char *image = get("small/class-0_instance-0.png", &bytes);
    cr_assert(bytes > 24 && memcmp(image + 12, "IHDR\0\0\0\x14\0\0\0\x14", 12) == 0, "20 x 20");
    free(image);
    char *sheet = get("sheet.png", &bytes); /* two of them, with borders of 2 */
    cr_assert(bytes > 24 && memcmp(sheet + 12, "IHDR\0\0\0\x2e\0\0\0\x18", 12) == 0, "46 x 24");
    free(sheet);
}
#endif

/* ---- NumPy files ---- */

/* The definition of outputs a third time: canvas.npy holds canvases, out.npy what the options make of them.
 * struct rounds to half precision as IEEE does; the class numbers are 7, 4000000000, 7, ... */
static const char npy_script[] =
    "import ast, struct, sys\n"
    "def load(path):\n"
    "    data = open(path, 'rb').read()\n"
    "    assert data[:8] == b'\\x93NUMPY\\x01\\x00' and struct.unpack('<H', data[8:10])[0] % 64 == 54\n"
    "    end = 10 + struct.unpack('<H', data[8:10])[0]\n"
    "    head = ast.literal_eval(data[10:end].decode())\n"
    "    assert data[end - 1:end] == b'\\n' and head['fortran_order'] is False\n"
    "    code = {'|u1': 'B', '<u2': 'H', '<f2': 'e', '<f4': 'f', '<i8': 'q'}[head['descr']]\n"
    "    count = (len(data) - end) // struct.calcsize(code)\n"
    "    return head['descr'], head['shape'], struct.unpack('<%d%s' % (count, code), data[end:])\n"
    "def rounded(code, v): return struct.unpack(code, struct.pack(code, v))[0]\n"
    "def bf16(v):\n"
    "    bits = struct.unpack('I', struct.pack('f', v))[0]\n"
    "    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16\n"
    "kind, shape, values = load(sys.argv[1])\n"
    "canvas = load('canvas.npy')\n"
    "labels = load(sys.argv[1][:-4] + '.labels.npy')\n"
    "expected = eval(open('expected.py').read())\n"
    "assert (kind, shape) == expected[:2], (kind, shape)\n"
    "assert labels == ('<i8', (3,), (7, 4000000000, 7)), labels\n"
    "assert canvas[:2] == ('|u1', (3, 1, 32, 32)) and len(set(canvas[2])) > 4\n"
    "n, a, b, c = shape\n"
    "assert len(values) == n * a * b * c\n"
    "convert, mean, std = expected[2:]\n"
    "where = iter(values)\n"
    "for i in range(n):\n"
    "    for j in range(a):\n"
    "        for k in range(b):\n"
    "            for l in range(c):\n"
    "                channel, y, x = (j, k, l) if a == 3 else (l, j, k)\n"
    "                gray = canvas[2][i * 1024 + y * 32 + x]\n"
    "                f = rounded('f', rounded('f', 1 / (255 * std[channel])) * gray\n"
    "                            + rounded('f', -mean[channel] / std[channel]))\n"
    "                assert next(where) == convert(gray, f), (i, j, k, l)\n";

static void put_two_classes(void)
{
    put("two.csv", "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n"
                   "7,20,4,1,1,0,1,2,3,0\n4000000000,20,9,1,1,2,3,2,3,0\n");
}

Test(cli, npy_holds_the_batch_and_its_labels)
{
    static const struct {
        const char *arguments, *expected; /* type, shape, conversion, means, deviations */
    } outputs[] = {
        {"--channels 3", "('|u1', (3, 3, 32, 32), lambda gray, f: gray, [0] * 3, [1] * 3)"},
        {"--channels 3 --layout nhwc", "('|u1', (3, 32, 32, 3), lambda gray, f: gray, [0] * 3, [1] * 3)"},
        {"--output f32 --channels 3 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225",
         "('<f4', (3, 3, 32, 32), lambda gray, f: f, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])"},
        {"--output f16 --channels 3 --layout nhwc --mean 0.5 --std 0.25",
         "('<f2', (3, 32, 32, 3), lambda gray, f: rounded('e', f), [0.5] * 3, [0.25] * 3)"},
        {"--output bf16 --channels 3 --mean 0.1",
         "('<u2', (3, 3, 32, 32), lambda gray, f: bf16(f), [0.1] * 3, [1] * 3)"},
    };
    put_two_classes();
    run_well(NAIVE_MIXED " --class two.csv --batch 3 --npy canvas.npy");
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        put("expected.py", outputs[i].expected);
        run(NAIVE_MIXED " --class two.csv --batch 3 --npy out.npy %s", outputs[i].arguments);
        cr_assert(status == 0, "%s: %s", outputs[i].arguments, err);
        bool bf16 = strstr(outputs[i].arguments, "bf16");
        cr_expect(bf16 == !!strstr(err, "out.npy holds bfloat16 as <u2"), "%s", err);
        check_with_python(npy_script, "out.npy");
    }
    cr_expect(count_files() == 6, "nothing else is left");
}

/* Where NumPy is there, it must agree. */
Test(cli, npy_is_what_numpy_reads)
{
    put_two_classes();
    run_well(NAIVE_MIXED " --class two.csv --batch 3 --output f16 --channels 3 --out-res 9 --npy out.npy");
    char *argv[] = {"python3", "-c", "import numpy", NULL};
    run_vector(argv);
    if (status != 0)
        SKIP("NumPy is not installed");
    check_with_python("import numpy, sys\n"
                      "images, labels = numpy.load(sys.argv[1]), numpy.load('out.labels.npy')\n"
                      "assert images.shape == (3, 3, 9, 9) and images.dtype == numpy.float16\n"
                      "assert images.flags.c_contiguous and (images[:, 0] == images[:, 2]).all()\n"
                      "assert labels.dtype == numpy.int64 and labels.tolist() == [7, 4000000000, 7]\n",
                      "out.npy");
}

Test(cli, several_variants_write_a_numpy_file_each)
{
    if (VARIANT_COUNT < 2)
        SKIP("two variants are wanted, and this build has one: no OpenMP");
    size_t bytes, other_bytes;
    run_well("--variant " VARIANTS " " TINY " --output f32 --out-res 9 --npy out.npy");
    char *image = get("naive/out.npy", &bytes), *other = get("omp/out.npy", &other_bytes);
    cr_expect(bytes == 128 + 2 * 9 * 9 * 4 && bytes == other_bytes && memcmp(image, other, bytes) == 0);
    free(image);
    free(other);
    free(get("omp/out.labels.npy", &bytes));
    cr_expect(bytes == 128 + 2 * 8);
}

/* A limit on the size of files stands in for a full disk. */
Test(cli, a_numpy_file_that_does_not_fit_is_not_there)
{
    put("out.npy", "what was there");
    how.file_bytes_max = 1000;
    run(NAIVE " --npy out.npy");
    expect_error(1, "out.npy cannot be written: File too large", "--npy");
    expect_file("out.npy", "what was there");
    cr_expect(count_files() == 1);
}

/* Labels of more bytes than images, so that only they do not fit. */
Test(cli, labels_that_do_not_fit_leave_both_files_as_they_were)
{
    put("out.npy", "old images");
    put("out.labels.npy", "old labels");
    how.file_bytes_max = 1000;
    run(NAIVE " --batch 200 --out-res 1 --npy out.npy");
    expect_error(1, "out.labels.npy cannot be written: File too large", "--npy");
    expect_file("out.npy", "old images");
    expect_file("out.labels.npy", "old labels");
    cr_expect(count_files() == 2);
}

/* The name of a file that is still being written is there. */
static bool any_temporary(void)
{
    bool found = false;
    DIR *directory = opendir(".");
    cr_assert_not_null(directory);
    for (struct dirent *entry; (entry = readdir(directory));)
        found |= strstr(entry->d_name, ".tmp") != NULL;
    closedir(directory);
    return found;
}

Test(cli, a_signal_leaves_nothing_half_written)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    char *argv[] = {program,    "--variant",  "naive",     "--batch", "4096",     "--res", "32",
                    "--orbits", "1",          "--out-res", "64",      "--output", "f32",   "--channels",
                    "3",        "--vertices", "1",         "--npy",   "out.npy",  NULL};
    put("out.npy", "what was there");
    for (size_t i = 0; i < COUNT_OF(signals); i++) {
        int wait_status;
        pid_t pid = fork();
        cr_assert(pid >= 0);
        if (pid == 0)
            start_program(argv, open("/dev/null", O_WRONLY), open("/dev/null", O_WRONLY));
        while (!any_temporary())
            usleep(1000);
        cr_assert(kill(pid, signals[i]) == 0 && waitpid(pid, &wait_status, 0) == pid);
        cr_expect(WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == signals[i], "%x", wait_status);
        expect_file("out.npy", "what was there");
        cr_expect(count_files() == 1);
    }
}

/* ---- Terminals ---- */

Test(cli, pipes_see_no_escape_sequences)
{
    static const char *const commands[] = {"--variant " VARIANTS " " TINY " --verify", NAIVE " --format csv",
                                           "--variant nive", "--list", "--variant all " TINY};
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        run("%s", commands[i]);
        cr_expect(!strchr(out, '\033') && !strchr(err, '\033'), "%s", commands[i]);
        cr_expect(!strchr(out, '\r') && !strchr(err, '\r'), "%s", commands[i]);
    }
}

Test(cli, progress_shows_on_a_terminal_alone)
{
    run_well(NAIVE " --verify --format csv");
    cr_expect(!strstr(err, "sample 1") && !strstr(err, "setting up"), "%s", err);
    how.terminal_err = true;
    run_well(NAIVE " --verify --format csv");
    static const char *const phases[] = {"naive: setting up", "naive: verifying", "naive: sample 1, "};
    for (size_t i = 0; i < COUNT_OF(phases); i++)
        cr_expect(strstr(err, phases[i]), "'%s' is not in: %s", phases[i], err);
    cr_expect(count_of(out, "\n") == 2 && !strchr(out, '\033') && !strchr(out, '\r'), "stdout is a pipe");
}

Test(cli, a_terminal_is_told_of_a_numpy_file)
{
    static const char note[] = "fdsl-bench: wrote out.npy (2, 3, 9, 9) float16 and out.labels.npy (2)";
    run_well(NAIVE " --output f16 --channels 3 --out-res 9 --npy out.npy");
    cr_expect(!strstr(err, "wrote"), "%s", err);
    how.terminal_err = true;
    run_well(NAIVE " --output f16 --channels 3 --out-res 9 --npy out.npy");
    cr_expect(strstr(err, note), "%s", err);
}

/* A sequence that sets a colour ends in m; the one that clears a progress line ends in K. */
static bool coloured(const char *text)
{
    for (const char *at = text; (at = strchr(at, '\033')); at++)
        if (at[1] == '[' && at[2 + strspn(at + 2, "0123456789;")] == 'm')
            return true;
    return false;
}

Test(cli, no_color_takes_colours_off)
{
    how.terminal_out = how.terminal_err = true;
    for (int plain = 0; plain < 2; plain++) {
        if (plain)
            setenv("NO_COLOR", "1", 1);
        run_well(NAIVE " --verify");
        cr_expect(coloured(out) == !plain, "%s", out);
        run("--variant nive");
        cr_expect(status == 2 && coloured(err) == !plain, "%s", err);
    }
    setenv("NO_COLOR", "", 1); /* present but empty counts as absent */
    run_well(NAIVE " --verify");
    cr_expect(coloured(out));
    setenv("TERM", "dumb", 1);
    run_well(NAIVE " --verify");
    cr_expect(!coloured(out));
    run("--variant nive");
    cr_expect(status == 2 && !coloured(err), "%s", err);
}

Test(cli, a_message_on_a_terminal_wipes_the_progress_off)
{
    how.terminal_err = true;
    setenv("NO_COLOR", "1", 1);
    run("--variant nive");
    cr_expect(strstr(err, "\r\033[Kfdsl-bench: unknown variant"), "%s", err);
}

/* ---- Sampling ---- */

Test(cli, min_samples_is_honoured)
{
    run_well(NAIVE " --min-samples 37 --format csv");
    cr_expect(number(out, 1, "samples") == 37);
    run_well(NAIVE " --min-samples 1 --format csv");
    cr_expect(number(out, 1, "samples") == 1);
}

#define LOOPED "--variant naive --res 32 --batch 2 --vertices 20 --orbits 4 --radius 3 --format csv "

Test(cli, loops_are_as_many_as_asked_and_no_more)
{
    run_well(LOOPED "--loops 1 --warmups 0 --warmup-time 0");
    cr_expect(number(out, 1, "samples") == 1);
    run_well(LOOPED "--loops 4321 --samples samples.csv");
    cr_expect(number(out, 1, "samples") == 4321);
    char *samples = get("samples.csv", NULL);
    cr_expect(count_of(samples, "\n") == 4322);
    free(samples);
}

Test(cli, loops_end_for_no_other_reason)
{
    static const struct refusal refusals[] = {
        {"--loops 5 --min-samples 5", "--loops takes exactly so many samples, whatever --min-samples says"},
        {"--loops 5 --min-time 1", "whatever --min-time says; leave one out"},
        {"--loops 5 --max-time 1", "whatever --max-time says; leave one out"},
        {"--loops 5 --max-error 5", "whatever --max-error says; leave one out"},
        {"--loops 0", "--loops: '0' is out of range"},
    };
    expect_refusals(refusals, COUNT_OF(refusals), LOOPED);
}

Test(cli, loops_are_counted_on_a_terminal)
{
    how.terminal_err = true;
    run_well(LOOPED "--loops 12");
    cr_expect(strstr(err, "naive: sample 1 of 12, 0.0 s"), "%s", err);
}

/* ---- The monitor ---- */

static const char monitor_header[] =
    "schema,time_utc,host,job_id,revision,rank,device,variant,phase,time_s,gpu_utilisation_percent,"
    "gpu_memory_bytes,temperature_c,power_w,sm_clock_mhz,memory_clock_mhz,pcie_rx_bytes_per_s,"
    "pcie_tx_bytes_per_s,throttled,cpu_cores,rss_bytes\n";

/* Long enough for many samples of 10 ms, and for some though the machine be busy. */
#define WATCHED                                                                                           \
    "--variant naive --res 32 --batch 2 --vertices 20 --orbits 4 --radius 3 --warmups 0 --warmup-time 0 " \
    "--min-time 0.6 --max-error 100 "

Test(cli, the_monitor_writes_its_samples)
{
    run_well(WATCHED "--monitor watched.csv:10 --out rows.csv");
    char *csv = get("watched.csv", NULL), *row = get("rows.csv", NULL);
    size_t samples = count_of(csv, "\n") - 1, timed = 0;
    cr_expect(strncmp(csv, monitor_header, sizeof monitor_header - 1) == 0, "%s", csv);
    cr_assert(samples >= 2);
    char time_utc[4096];
    snprintf(time_utc, sizeof time_utc, "%s", value(row, 1, "time_utc"));
    for (size_t i = 1; i <= samples; i++) {
        timed += strcmp(value(csv, i, "phase"), "timed") == 0;
        cr_expect_str_eq(value(csv, i, "time_utc"), time_utc, "rows and samples of a run can be joined");
        cr_expect_str_empty(value(csv, i, "power_w"));
        cr_expect(i == 1 || number(csv, i, "cpu_cores") >= 0);
        cr_expect(number(csv, i, "rss_bytes") > 0);
        cr_expect(i == 1 || number(csv, i, "time_s") > number(csv, i - 1, "time_s"));
    }
    cr_expect(timed >= 1, "%zu", timed);
    cr_expect(strstr(out, "\nwhile timed ") && strstr(out, "CPU cores") && strstr(out, "RSS GB"), "%s", out);
    cr_expect(!strstr(out, "GPU %"), "a column that nobody knows is left out: %s", out);
    free(csv);
    free(row);
}

Test(cli, the_monitor_leaves_machine_formats_alone)
{
    run_well(NAIVE " --monitor watched.csv --format csv");
    cr_expect(count_of(out, "\n") == 2 && !strstr(out, "while timed"), "%s", out);
#ifdef HAVE_JANSSON
    run_well(NAIVE " --monitor watched.csv --format json");
    put("out.json", out);
    check_with_python("import json, sys; json.load(open(sys.argv[1]))", "out.json");
#endif
    char *csv = get("watched.csv", NULL);
    cr_expect(count_of(csv, "schema") == 1, "one header, and the runs below it: %s", csv);
    free(csv);
}

Test(cli, the_monitor_says_when_it_saw_too_little)
{
    run_well(NAIVE " --monitor watched.csv");
    cr_expect(strstr(err, "samples of --monitor fell within its timed runs, and 20 make a figure; give it "
                          "longer with --min-time 10.5, or a shorter period\n"),
              "%s", err);
    run_well(LOOPED "--loops 1 --monitor watched.csv:10");
    const char *remedy = strstr(err, "give it longer with --loops ");
    cr_assert(remedy, "%s", err);
    cr_expect(strtod(remedy + 28, NULL) > 1 && !strstr(remedy, "shorter"), "%s", err);
}

Test(cli, the_monitors_file_may_hold_colons)
{
    run_well(NAIVE " --monitor a:b.csv");
    run_well(NAIVE " --monitor c:12:50");
    run_well(NAIVE " --monitor d:");
    cr_expect(access("a:b.csv", F_OK) == 0 && access("c:12", F_OK) == 0 && access("d:", F_OK) == 0);
}

Test(cli, refuses_a_monitor_that_cannot_be)
{
    static const struct refusal refusals[] = {
        {"--monitor x:9", "--monitor FILE:MS: '9' is out of range; it must be 10 to 60000"},
        {"--monitor x:60001", "'60001' is out of range"},
        {"--monitor :50", "--monitor: name a file before the colon"},
        {"--monitor gone/x", "gone/x: its folder does not exist"},
        {"--monitor .", ". is a folder"},
        {"--monitor foreign.csv", "foreign.csv holds other columns (column 2 is 'b', not 'time_utc')"},
    };
    put("foreign.csv", "schema,b\n");
    expect_refusals(refusals, COUNT_OF(refusals), NAIVE);
    expect_file("foreign.csv", "schema,b\n");
}

/* Killed as soon as the first variant is written, which is when the second one runs. */
Test(cli, a_killed_run_keeps_the_samples_of_what_was_complete)
{
    char *argv[] = {
        program,    "--variant", VARIANTS,         "--res", "32",         "--batch", "2",
        "--orbits", "4",         "--vertices",     "20",    "--min-time", "0.6",     "--max-error",
        "100",      "--monitor", "watched.csv:10", NULL};
    struct stat info = {0};
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0)
        start_program(argv, open("/dev/null", O_WRONLY), open("/dev/null", O_WRONLY));
    while (stat("watched.csv", &info) != 0 || info.st_size == 0)
        usleep(1000);
    cr_assert(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    char *csv = get("watched.csv", NULL);
    size_t lines = count_of(csv, "\n");
    cr_expect(lines > 2 && csv[strlen(csv) - 1] == '\n', "%s", csv);
    cr_expect(count_of(csv, ",") == lines * count_of(monitor_header, ","), "each row is whole: %s", csv);
    cr_expect(strstr(csv, ",naive,timed,") != NULL, "%s", csv);
    free(csv);
}

/* ---- The best GPU ---- */

Test(cli, the_best_gpu_needs_one)
{
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    run("--variant naive --best-gpu");
    expect_error(4, "CUDA", "--best-gpu");
    run("--env --best-gpu");
    expect_error(4, "CUDA", "--env --best-gpu");
    run_well("--version --best-gpu");
}

Test(cli, warmups_are_honoured)
{
    run_well(NAIVE " --warmups 6 --format csv");
    cr_expect(number(out, 1, "warmups") == 7);
    run_well(NAIVE " --warmups 0 --format csv");
    cr_expect(number(out, 1, "warmups") == 1);
}

/* Sampling goes on before the time is over and ends with the first sample after that, so that all samples but
 * the last fit in, however slow the machine is. */
Test(cli, max_time_is_honoured)
{
    run_well("--variant naive --res 64 --batch 8 --vertices 200 --orbits 20 --warmups 1 --warmup-time 0 "
             "--min-samples 1 --min-time 0 --max-time 0.2 --max-error 0.000001 --format csv "
             "--samples samples.csv");
    char *samples = get("samples.csv", NULL);
    size_t count = (size_t)number(out, 1, "samples");
    double sum_s = 0;
    for (size_t i = 1; i < count; i++)
        sum_s += number(samples, i, "wall_s");
    cr_expect(sum_s < 0.2, "%g s", sum_s);
    free(samples);
}

Test(cli, a_shaky_median_is_a_warning_and_no_failure)
{
    run(NAIVE " --min-samples 2 --max-error 0.000001");
    cr_expect(status == 0);
    cr_expect(strncmp(err, "fdsl-bench: warning: naive: ", 28) == 0 || *err == '\0', "%s", err);
}
