/* Tests profiling: the NVTX ranges that variants open, and scripts/sweep/profile.sh with fake nsys and ncu.
 *
 * The environment variable FDSL_BENCH names the program; the default is ./fdsl-bench. */
#include "shell.h"

TestSuite(profile, .init = shell_set_up, .fini = shell_tear_down, .timeout = 60);

/* ---- Ranges ---- */

/* Builds the recorder. Skips the test if this build has no NVTX, or if the NVTX header is missing. */
static void build_recorder(void)
{
#ifndef HAVE_NVTX
    cr_skip_test("built without NVTX");
#endif
    EXPECT(0,
           "for dir in \"${CUDA_HOME:-/usr/local/cuda}\"/include /usr/lib/cuda/include /opt/cuda/include "
           "/usr/include; do test ! -e $dir/nvtx3/nvToolsExt.h || break; done; ${CC:-cc} -shared -fPIC "
           "-idirafter $dir -o recorder.so %s/tests/nvtx_recorder.c -lpthread || echo no recorder",
           root);
    if (says("no recorder"))
        cr_skip_test("no compiler, or no NVTX header");
}

/* Runs the program with the recorder. Each line of `out` then has a count, the enclosing range, and the
 * range. */
static void record(const char *options)
{
    EXPECT(0,
           "rm -f seen; NVTX_RECORD=seen NVTX_INJECTION64_PATH=$PWD/recorder.so $P %s >said 2>&1 || "
           "{ cat said; exit 1; }",
           options);
    EXPECT(0, "cat seen");
    cr_expect(says("depth 0\n"), "ranges were not closed: %s", out);
}

static void expect_range(const char *range)
{
    char text[128];
    snprintf(text, sizeof text, " %s\n", range);
    cr_expect(says(text), "no range %s: %s", range, out);
}

static void expect_ranges(const char *options, const char *const *names)
{
    record(options);
    for (; *names; names++)
        expect_range(*names);
}

#define SMALL "--batch 2 --res 32 --vertices 20 --orbits 4 --loops 1 --warmups 0 --warmup-time 0 "
#define TRAIN "--model lenet --data digits --train-size 40 --test-size 4 --batch 20 --epochs 1 "

Test(profile, generating_opens_its_ranges)
{
    build_recorder();
    expect_ranges("--variant naive " SMALL, (const char *const[]){"draw", NULL});
    cr_expect(says("2 sample draw\n"), "not two images in one sample: %s", out);
#ifdef _OPENMP
    expect_ranges("--variant omp " SMALL,
                  (const char *const[]){"draw", "clear", "vertices", "painting", NULL});
#endif
}

Test(profile, training_opens_its_ranges)
{
    build_recorder();
    expect_ranges("--variant train-naive " TRAIN,
                  (const char *const[]){"gather", "forward", "backward", "update", NULL});
    cr_expect(says("2 sample gather\n") && says("40 sample forward\n") && says("2 sample update\n"),
              "not two steps of 20 samples: %s", out);
#ifdef _OPENMP
    expect_ranges("--variant train-omp " TRAIN,
                  (const char *const[]){"gather", "forward", "backward", "update", NULL});
#endif
    expect_ranges("--variant train-naive --model lenet --data synth --res 28 --classes 4 --train-size 20 "
                  "--test-size 4 --batch 20 --epochs 1",
                  (const char *const[]){"generate", NULL});
}

#ifdef HAVE_XXHASH
Test(profile, loading_opens_its_ranges)
{
    build_recorder();
    EXPECT(0, "$P --prepare shards --store shards --shards 2 --samples 20 --sample-shape 5000 --dtype u8");
    EXPECT(0, "$P --prepare files --store files --samples 20 --sample-shape 5000 --dtype u8");
    static const char *const variants[][3] = {
        {"files --data files", "read"},        {"shards --data shards", "read", "copy"},
        {"shards-mmap --data shards", "copy"},
#ifdef HAVE_URING
        {"files-uring --data files", "wait"},  {"shards-uring --data shards", "wait", "copy"},
#endif
    };
    for (size_t i = 0; i < COUNT_OF(variants); i++) {
        char options[256];
        snprintf(options, sizeof options,
                 "--variant %s --batch 8 --loops 1 --warmups 0 --warmup-time 0 --cache any", variants[i][0]);
        if (strstr(options, "uring") && run("$P --list | grep -q '%.*s  *available'",
                                            (int)strcspn(variants[i][0], " "), variants[i][0]) != 0)
            continue;
        record(options);
        expect_range(variants[i][1]);
        if (variants[i][2])
            expect_range(variants[i][2]);
    }
}
#endif

/* The names of ranges in the code and in docs/monitor.md must be the same. */
Test(profile, the_page_lists_all_ranges)
{
    EXPECT(0,
           "cd %s; sed -n 's/^#define RANGE_[A-Z]* *\"\\(.*\\)\"/\\1/p' src/core/phase.h | sort >%s/code; "
           "sed -n '/^## Profiling/,$s/^| \\(`[^|]*\\)|.*/\\1/p' docs/monitor.md | grep -o '[a-z]*' | "
           "sort >%s/page; cd %s; test -s code; diff code page",
           root, folder, folder, folder);
}

/* ---- scripts/sweep/profile.sh ---- */

/* Creates a fake tool in bin/, which PROFILE puts first on the PATH. The tool logs its arguments and runs
 * `commands`. */
static void put_tool(const char *name, const char *commands)
{
    EXPECT(0,
           "mkdir -p bin; { echo '#!/bin/bash'; echo 'echo \"$@\" >>%s/arguments'; cat; } >bin/%s "
           "<<'END'\n%s\nEND\n"
           "chmod +x bin/%s",
           folder, name, commands, name);
}

/* Creates a fake ncu, which runs the program and writes the recorded log of a real ncu. */
static void put_ncu(void)
{
    char commands[2 * PATH_MAX];
    snprintf(commands, sizeof commands,
             "while [[ $1 != --log-file ]]; do shift; done\ncp %s/tests/data/profile/ncu.csv $2\nshift "
             "2\nexec \"$@\"",
             root);
    put_tool("ncu", commands);
}

static void put_nsys(const char *report)
{
    char commands[4 * PATH_MAX];
    snprintf(commands, sizeof commands,
             "if [[ $1 == profile ]]; then while [[ $1 != --output ]]; do shift; done; %s; shift 2; exec "
             "\"$@\"; fi\n"
             "case \"$*\" in *cuda_gpu_kern_sum*) cat %s/tests/data/profile/nsys_kernels.csv ;; "
             "*nvtx_sum*) cat %s/tests/data/profile/nsys_ranges.csv ;; esac",
             report, root, root);
    put_tool("nsys", commands);
}

#define PROFILE "rm -f arguments; PATH=$PWD/bin:$PATH FDSL_BENCH=$P %s/scripts/sweep/profile.sh "
#define SYNTH   "naive --res 16 --batch 1 --vertices 5 --orbits 2"

static void expect_row(const char *name, const char *calls, const char *total, const char *median,
                       const char *share)
{
    cr_expect_eq(run("grep -Eq '^%s  +%s  +%s  +%s  +%s$' said", name, calls, total, median, share), 0,
                 "no row %s %s %s %s %s in: %s", name, calls, total, median, share, (run("cat said"), out));
}

Test(profile, ncu_gives_two_tables)
{
    put_ncu();
    EXPECT(0, PROFILE "--tool ncu --launches 7 " SYNTH " >said", root);
    /* The CUDA kernel of the warm-up is omitted. */
    expect_row("kernel", "calls", "total", "median", "share");
    expect_row("fused_paint_kernel", "2", "9 us", "4.5 us", "90.0 %");
    expect_row("fused_vertices_kernel", "1", "1 us", "1 us", "10.0 %");
    expect_row("painting", "2", "9 us", "4.5 us", "90.0 %");
    expect_row("vertices", "1", "1 us", "1 us", "10.0 %");
    expect_row("timed", "3", "10 us", "4 us", "100.0 %");
    EXPECT_PRINTS(0, "--clock-control none --nvtx --launch-count 7 ", "cat arguments");
    EXPECT_OUT("--variant naive --loops 3 --warmups 1 --warmup-time 0 --res 16");
    EXPECT(0, PROFILE "--tool ncu " SYNTH " --loops 2 >said; cat arguments", root);
    cr_expect(says("--loops 2") && !says("--loops 3"), "an option of the user must replace the default: %s",
              out);
}

Test(profile, nsys_gives_two_tables)
{
    put_ncu();
    put_nsys("echo report >$2.nsys-rep");
    EXPECT(0, PROFILE SYNTH " >said", root);
    expect_row("fused_paint_kernel", "2", "9 us", "4.5 us", "75.0 %");
    expect_row("fused_vertices_kernel", "3", "3 us", "1 us", "25.0 %");
    expect_row("timed", "1", "2 ms", "2 ms", "100.0 %");
    expect_row("painting", "4", "1 ms", "200 us", "50.0 %");
}

Test(profile, ncu_is_used_if_nsys_writes_no_report)
{
    put_ncu();
    put_nsys("true"); /* succeeds but writes no report */
    EXPECT(0, PROFILE SYNTH " >said 2>note", root);
    expect_row("painting", "2", "9 us", "4.5 us", "90.0 %");
    EXPECT_PRINTS(0, "nsys did not produce a report here; using ncu", "cat note");
    EXPECT_PRINTS(1, "nsys ended with status 1", PROFILE "--tool nsys " SYNTH, root);
}

Test(profile, a_failing_program_is_reported)
{
    put_ncu();
    EXPECT(1, PROFILE "--tool ncu naive --no-such-option", root);
    EXPECT_OUT("unknown option", "ncu ended with status 2");
}

/* Tests a machine without nsys and ncu. Skipped if one of them is on the PATH or at another usual
 * location. */
Test(profile, missing_tools_are_named)
{
    if (run("ls -d /opt/nvidia/nsight-*/*/ncu /opt/nvidia/nsight-*/*/bin/nsys /usr/local/cuda/bin/ncu "
            "2>/dev/null | grep -q . || "
            "command -v ncu nsys") == 0)
        cr_skip_test("nsys or ncu is installed on this machine");
    EXPECT_PRINTS(4, "neither nsys nor ncu is installed: get Nsight", PROFILE SYNTH, root);
    EXPECT_PRINTS(4, "ncu is not installed", PROFILE "--tool ncu " SYNTH, root);
    EXPECT_PRINTS(0, "Examples:\n", PROFILE "--help", root);
    EXPECT(2, PROFILE "--launches 0 " SYNTH, root);
    EXPECT_PRINTS(2, "give a variant", PROFILE, root);
}
