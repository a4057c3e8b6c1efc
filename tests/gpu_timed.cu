/* Tests --verify with variants on the GPU that give correct results before the timing, but do nothing in
 * timed runs. --verify must detect the wrong results, and no row may be written. tests/test_timed.c tests
 * variants on the CPU. make check-gpu runs this program.
 *
 *     gpu_timed DIR   DIR: a data set of shards
 *
 * Prints one line per case. Exit status 2 for invalid arguments, 3 if a case fails, 4 without a GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <initializer_list>

extern "C" {
#include "core/phase.h"
#include "run/runner.h"
#include "run/settings.h"
}
#include "machine/device.h"

static int failures;
static const struct variant *real; /* the unchanged variant */

/* Performs only runs 1 and 0, which precede the timing. */
static enum status first_two(void *state, uint64_t number, struct run_time *time)
{
    time->device_s = 1e-6;
    return number >= 2 ? STATUS_OK : real->run(state, number, time);
}

/* Performs only runs that are not timed. Training cannot use first_two(), because all epochs have the same
 * run number. */
static enum status unless_timed(void *state, uint64_t number, struct run_time *time)
{
    time->device_s = -1;
    return phase_now() == PHASE_TIMED ? STATUS_OK : real->run(state, number, time);
}

typedef enum status faulty_run(void *state, uint64_t number, struct run_time *time);

/* Runs the program with one variant, whose row is appended to the file `rows`. If `fault` is not NULL, it
 * replaces the variant's run(). */
static enum status run_words(const char *name, const char *arguments, const char *rows, faulty_run *fault)
{
    char text[2048], *argv[64] = {const_cast<char *>("fdsl-bench")}, *rest = text, *word;
    int argc = 1;
    struct settings settings;
    snprintf(text, sizeof text, "--variant %s --verify --out %s %s", name, rows, arguments);
    while ((word = strsep(&rest, " ")))
        if (*word)
            argv[argc++] = word;
    const struct config config = {argv, argc, 0};
    enum status status = settings_read(&settings, &config);
    if (status == STATUS_OK) {
        real = settings.variants[0]->variant;
        struct variant faulty = *real;
        struct variant_entry entry = *settings.variants[0];
        const struct variant_entry *one[] = {&entry}, **own = settings.variants;
        faulty.run = fault ? fault : real->run;
        entry.variant = &faulty;
        settings.variants = one;
        status = runner_run(&settings);
        settings.variants = own;
    }
    settings_free(&settings);
    return status;
}

static bool has_rows(const char *path)
{
    FILE *file = fopen(path, "r");
    bool rows = file && getc(file) != EOF;
    if (file)
        fclose(file);
    return rows;
}

static void expect_caught(const char *name, const char *arguments, faulty_run *fault,
                          enum status verdict = STATUS_WRONG)
{
    char rows[] = "/tmp/fdsl-gpu-timed-XXXXXX";
    const struct variant_entry *entry = variant_find(name);
    const struct resources resources = {.threads = 2, .device = 0};
    if (variant_available(entry, &resources) != STATUS_OK) {
        printf("skipped %s %s: %s\n", name, arguments, status_text());
        return;
    }
    close(mkstemp(rows));
    enum status right = run_words(name, arguments, rows, nullptr);
    bool written = has_rows(rows);
    if (truncate(rows, 0) != 0)
        written = false;
    enum status wrong = right == STATUS_OK ? run_words(name, arguments, rows, fault) : right;
    bool caught = wrong == verdict && written && !has_rows(rows);
    printf("%s  %s %s%s%s\n", caught ? "ok    " : "FAILED", name, arguments, caught ? "" : ": ",
           caught ? "" : status_text());
    fflush(stdout);
    failures += !caught;
    unlink(rows);
}

#define RUNS "--warmups 2 --warmup-time 0 --loops 13 "

int main(int argc, char *argv[])
{
    static const char *const synth[] = {"gbase", "gbase-device", "mem", "bat", "rng-xorwow-reuse",
                                        "fused", "fused-graph"};
    if (argc != 2 || device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_timed: %s\n",
                argc != 2 ? "usage: gpu_timed DIR (a data set of shards)" : status_text());
        return argc != 2 ? 2 : 4;
    }
    for (const char *name : synth)
        if (variant_find(name))
            expect_caught(name, "--res 64 --batch 5 --vertices 100 --orbits 20 " RUNS, first_two);
    expect_caught("fused", "--res 64 --batch 5 --classes 5 --dtype f16 " RUNS, unless_timed);
    expect_caught("fused", "--res 64 --batch 5 --vertices 100 --orbits 20 --compute 0.5 " RUNS, first_two);
    char load[512];
    snprintf(load, sizeof load, "--data %s --batch 8 --threads 2 " RUNS, argv[1]);
    for (const char *name : {"shards-gpu", "gpu-resident", "shards-omp"})
        expect_caught(name, load, first_two);
    strcat(load, "--compute 0.5 ");
    expect_caught("shards-gpu", load, first_two, STATUS_FAILED); /* no batch reaches the training step */
    for (const char *name : {"train-cuda", "train-bf16", "train-graph"})
        expect_caught(name, "--data digits --train-size 600 --test-size 100 --model cnn --epochs 1 ",
                      unless_timed);
    printf("%d failed\n", failures);
    return failures ? 3 : 0;
}
