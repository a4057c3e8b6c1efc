/* Tests fdsl-bench advise: the verdict from made-up measurements, and the command on small data sets. */
#include "shell.h"

#include <math.h>
#include <string.h>

#include "run/advise_parts.h"

TestSuite(advise, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- The verdict ---- */

/* 256 images per 5 ms: a step consumes 51,200 images per second. */
static const struct advice_question five_ms = {.step_s = 0.005, .batch = 256};

static struct advice way(const char *name, double images_per_s, double disk_bytes, double memory_bytes)
{
    double share = images_per_s / 51200;
    return (struct advice){.name = name,
                           .measured = images_per_s > 0,
                           .images_per_s = images_per_s,
                           .stall_share = share < 1 ? 1 - share : 0,
                           .disk_bytes = disk_bytes,
                           .memory_bytes = memory_bytes,
                           .joules_per_image = NAN};
}

static void expect_best(const struct advice *advice, size_t count, size_t best, const char *words)
{
    char text[1024];
    cr_expect_eq(advise_best(&five_ms, advice, count), best);
    advise_verdict(&five_ms, advice, count, best, text, sizeof text);
    cr_expect(strstr(text, words), "'%s' is not in '%s'", words, text);
}

Test(advise, the_way_that_waits_least_is_best)
{
    struct advice advice[] = {way("generating", 60000, 0, 0), way("memory", 40000, 2e9, 3e9),
                              way("disk", 10000, 2e9, 1e9)};
    expect_best(
        advice, 3, 0,
        "Best here: generating. It delivers 6e+04 images/s, a step consumes 5.12e+04, and so the step "
        "never waits. With memory, which is next, the step waits 22 % of the time.");
    advice[0] = way("generating", 20000, 0, 0);
    expect_best(advice, 3, 1, "Best here: memory.");
    advice[2] = way("disk", 50000, 2e9, 1e9);
    expect_best(advice, 3, 2, "waits 2 % of the time. With memory, which is next, the step waits 22 %");
}

Test(advise, among_equals_the_cheapest_is_best)
{
    struct advice advice[] = {way("memory", 900000, 2e9, 3e9), way("disk", 60000, 2e9, 1e9),
                              way("remote", 50500, 0, 1e9), way("slow", 1000, 0, 0)};
    expect_best(advice, 4, 2, "With memory, as well, the step never waits; it needs more disk or memory.");
    advice[2].stall_share = 0.05; /* outside the margin */
    expect_best(advice, 4, 1, "Best here: disk.");
    advice[0].disk_bytes = 0; /* the same size as the other, and less energy */
    advice[0].memory_bytes = 3e9;
    advice[0].joules_per_image = 0.1;
    expect_best(advice, 4, 0, "Best here: memory.");
    advice[1].joules_per_image = 0.05;
    expect_best(advice, 4, 1, "Best here: disk.");
}

Test(advise, ways_that_were_not_measured_do_not_count)
{
    struct advice advice[] = {way("generating", 0, 0, 0), way("disk", 100, 2e9, NAN)};
    expect_best(advice, 2, 1,
                "It delivers 100 images/s, a step consumes 5.12e+04, and so the step waits 100 %");
    advice[1].measured = false;
    expect_best(advice, 2, 2, "");
    cr_expect_eq(advise_best(&five_ms, advice, 0), 0);
}

/* ---- The command ---- */

#if defined(HAVE_XXHASH)

#define ADVISE "$P advise --compute 1000 --batch 4 --seconds 0.01 "

static void expect_refused(int wanted, const char *words, const char *command)
{
    run("%s", command);
    expect_line(wanted, words);
}

/* On a machine with a GPU, the ways have other names. */
static const char *place(const char *name, char *text, size_t size)
{
    snprintf(text, size, "\n%s ", name);
    return text;
}

Test(advise, each_way_to_get_images_is_measured)
{
    char text[64];
    EXPECT(0,
           "$P --prepare d --from synth --res 24 --samples 12 --shards 2 && " ADVISE "--data d --out rows");
    cr_expect(says(place("shards from memory", text, sizeof text)), "%s", out);
    cr_expect(says(place("shards from disk", text, sizeof text)), "%s", out);
    cr_expect(says("\ngenerating on the "), "%s", out);
    cr_expect(says("Best here: "), "%s", out);
    EXPECT(0, "grep -c ^synth/ rows/synth.csv && grep -c ^load/ rows/load.csv && cut -d, -f17 rows/synth.csv "
              "| tail -1");
    cr_expect(says("24"), "the generated images have another size: %s", out);
}

Test(advise, files_and_urls_have_their_own_ways)
{
    EXPECT(0, "$P --prepare f --store files --from synth --res 24 --samples 12 --encode png && " ADVISE
              "--data f --out-res 16 --format csv");
    cr_expect(says("way,best,images_per_s,stall_share,disk_bytes,memory_bytes,joules_per_image,reason\n"),
              "%s", out);
    cr_expect(says("\nfiles from memory,") && says("\nfiles from disk,") && !says("shards"), "%s", out);
    if (run(ADVISE "--data f --format json") == 0) /* builds without jansson cannot write JSON */
        cr_expect(says("\"verdict\": \"Best here: ") && says("\"way\": \"files from disk\""), "%s", out);
#ifdef HAVE_CURL
    EXPECT(0,
           "$P --prepare s --from synth --res 24 --samples 12 --shards 1 && " ADVISE "--data file://$PWD/s");
    cr_expect(says("\nshards from memory "), "%s", out);
#endif
}

Test(advise, wrong_options_and_data_are_refused)
{
    expect_refused(2, "name the data set with --data DIR or URL", "$P advise --compute 5");
    expect_refused(2, "say how long a training step takes: --compute MS", "$P advise --data x");
    expect_refused(2, "x: No such file or directory", "$P advise --data x --compute 5");
    expect_refused(2, "did you mean '--compute'?", "$P advise --data x --computed 5");
    expect_refused(2, "--compute", "$P advise --data x --compute fast");
    expect_refused(2, "unknown command 'advice'; did you mean 'advise'?", "$P advice");
    EXPECT(0, "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && touch file");
    expect_refused(1, "--out file/rows: cannot create the folder", ADVISE "--data d --out file/rows");
}

Test(advise, no_files_are_left)
{
    EXPECT(0, "$P --prepare d --from synth --res 8 --samples 4 --shards 1 && mkdir t && TMPDIR=t " ADVISE
              "--data d && ls -A t | wc -l | tail -1");
    cr_expect(strcmp(out + strlen(out) - 3, "\n0\n") == 0, "%s", out);
}

#endif
