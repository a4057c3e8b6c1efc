/* Tests the Makefile: which probes it runs, how often, and how it uses the results. The compiler is a script
 * that finds the headers in the folder `have` and counts its calls. */
#include "shell.h"

#define MAKE "env -i PATH=bin:$PATH CPATH=include $E make MPICC=false NVCC= CC=compiler "
static void set_up(void)
{
    shell_set_up();
    EXPECT(0,
           "mkdir bin have include && touch have/stdio.h have/png.h && ln -s %s/* . && rm -rf build dist "
           "results",
           root);
    put_script("bin/compiler", "#!/bin/sh\necho call >>calls\n"
                               "header=$(sed -n 's/#include <\\(.*\\)>/\\1/p' | tail -n 1)\n"
                               "[ -e have/$header ]\n");
}

/* Returns the number of compiler calls since the last call of this function. */
static int calls(void)
{
    EXPECT(0, "touch calls; wc -l <calls; rm calls");
    return atoi(out);
}

/* Expects that make, called with these arguments, expands an expression to `what`. */
static void expect_shown(const char *what, const char *expression, const char *arguments)
{
    char rule[256], line[256];
    snprintf(rule, sizeof rule, "show: ; @echo '[$(strip %s)]'\n", expression);
    snprintf(line, sizeof line, "[%s]\n", what);
    put_text("show.mk", rule);
    EXPECT(0, MAKE "-f Makefile -f show.mk show %s", arguments);
    cr_expect_str_eq(out, line, "make %s", arguments);
}

TestSuite(make, .init = set_up, .fini = shell_tear_down, .timeout = 60);

/* Without libinih.a, the static library does not contain inih. */
Test(make, users_of_the_static_library_link_what_it_lacks)
{
    expect_shown("-linih -lpng -lpthread -ldl -lm", "$(LIBS_PRIVATE)", "LIB_INIH=-linih OMP=0");
    expect_shown("-lpng -lpthread -ldl -lm", "$(LIBS_PRIVATE)", "LIB_INIH=/lib/libinih.a OMP=0");
}

Test(make, probes_once)
{
    EXPECT(0, MAKE "-n");
    int first = calls();
    cr_expect(first > 5 && first < 20, "%d calls", first);
    EXPECT(0, MAKE "-n");
    EXPECT(0, MAKE "report-parts");
    EXPECT_OUT("✓ libpng", "✗ jansson");
    EXPECT(0, MAKE "clean");
    EXPECT(0, MAKE "help");
    cr_expect_eq(calls(), 0);
}

Test(make, says_that_there_is_no_compiler)
{
    EXPECT(0, "rm have/stdio.h");
    EXPECT_PRINTS(2, "compiler' compiles no C program: install a compiler", MAKE "report-parts");
    cr_expect_not(says("libpng"), "%s", out);
    EXPECT(0, MAKE "help");
    EXPECT(0, "touch have/stdio.h include");
    EXPECT_PRINTS(0, "libpng", MAKE "report-parts");
}

Test(make, probes_again_if_a_package_or_a_flag_changes)
{
    EXPECT(0, MAKE "report-parts");
    (void)calls();
    EXPECT(0, "touch have/jansson.h include");
    EXPECT_PRINTS(0, "✓ jansson", MAKE "report-parts");
    cr_expect(calls() > 0);
    EXPECT(0, MAKE "report-parts CFLAGS=-O1");
    cr_expect(calls() > 0);
    EXPECT(0, MAKE "report-parts CFLAGS=-O1");
    cr_expect_eq(calls(), 0);
    /* make must not probe endlessly if a file has a timestamp in the future. */
    EXPECT(0, "touch -d tomorrow include");
    EXPECT_PRINTS(0, "✓ jansson", MAKE "report-parts CFLAGS=-O1");
}

Test(make, name_0_disables_a_part)
{
    EXPECT_PRINTS(0, "✗ libpng", MAKE "report-parts PNG=0");
    EXPECT_PRINTS(0, "✗ libpng", "E=PNG=0; " MAKE "report-parts");
    EXPECT_PRINTS(0, "✓ libpng", MAKE "report-parts");
}

Test(make, is_parallel_by_default)
{
    EXPECT(0, "nproc");
    char jobs[64];
    snprintf(jobs, sizeof jobs, "-j%d", atoi(out));
    expect_shown(jobs, "$(filter -j%,$(MAKEFLAGS))", "");
    expect_shown("-j3", "$(filter -j%,$(MAKEFLAGS))", "-j3");
    expect_shown("-j1", "$(filter -j%,$(MAKEFLAGS))", "-j1");
    setenv("E", "OMP_NUM_THREADS=1", 1); /* nproc obeys this variable, but make must not */
    expect_shown(jobs, "$(filter -j%,$(MAKEFLAGS))", "");
}

Test(make, compiles_for_the_gpus_of_the_machine)
{
    put_script("bin/nvcc", "#!/bin/sh\nprintf 'sm_75\\nsm_80\\nsm_90\\nsm_100\\nsm_103\\n'\n");
    expect_shown("sm_80 compute_80", "$(codes)", "NVCC=nvcc");
    expect_shown("-gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=compute_80", "$(GENCODE)",
                 "NVCC=nvcc");
    expect_shown("sm_80 sm_90 sm_100 compute_100", "$(codes)", "NVCC=nvcc CUDA_ARCHS=all");
    expect_shown("sm_75", "$(codes)", "NVCC=nvcc CUDA_ARCHS=75");
    put_script("bin/nvidia-smi", "#!/bin/sh\necho 9.0; echo 9.0; echo 10.3\n");
    EXPECT(0, "touch include");
    expect_shown("sm_90 sm_103", "$(codes)", "NVCC=nvcc");
}

#define OBJECTS "build/src/main.c.o build/src/core/variant.c.o build/src/train/exchange.c.o "
#define KERNEL  "build/cuda/common/product.cu.o "

/* Expects that make, called with these arguments, compiles exactly `files` (one per line, in any order). */
static void expect_compiled(const char *files, const char *arguments)
{
    EXPECT(0, MAKE "NVCC=compiler %s >/dev/null; touch built", arguments);
    EXPECT_EXACTLY(0, files, "sort built; rm built");
}

/* A build without CUDA leaves the kernels of an earlier build as they are. */
Test(make, builds_with_and_without_cuda_share_objects)
{
    put_script("bin/compiler", "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" != -o ] || out=$2; shift; done\n"
                               "case $out in *.o) echo \"${out##*/}\" >>built; : >\"$out\"; esac\n");
    expect_compiled("exchange.c.o\nmain.c.o\nvariant.c.o\n", "CUDA=0 " OBJECTS);
    expect_compiled("exchange.c.o\nproduct.cu.o\nvariant.c.o\n", OBJECTS KERNEL);
    expect_compiled("exchange.c.o\nvariant.c.o\n", "CUDA=0 " OBJECTS);
    expect_compiled("exchange.c.o\nvariant.c.o\n", OBJECTS KERNEL);
    expect_compiled("", OBJECTS KERNEL);
    expect_compiled("product.cu.o\n", "NVCCFLAGS=-O2 " OBJECTS KERNEL);
}

/* All other files are compiled without these macros, so asking for one there would always give the same
 * answer. */
Test(make, knows_the_files_that_ask_for_cuda)
{
    EXPECT(0, "grep -rlE 'HAVE_(CUDA|CUBLAS|CUDNN|NCCL|CUFILE)' src/ cpu/ mpi/ tests/ --include='*.[ch]' | "
              "sed 's/[.]c$//' | LC_ALL=C sort | paste -sd' ' | tr -d '\n'");
    char *files = strdup(out);
    expect_shown(files, "$(sort $(ASK_CUDA))", "");
    free(files);
}

/* Kernels cannot run without a GPU. nvidia-smi is asked if no file of the driver shows a GPU. */
Test(make, bench_needs_no_kernels_without_a_gpu)
{
    expect_shown("CUDA=0", "$(bench_parts)", "NVCC=compiler GPUS=");
    expect_shown("", "$(bench_parts)", "NVCC=compiler GPUS=/dev/nvidia0");
    expect_shown("", "$(bench_parts)", "NVCC=compiler GPUS= CUDA=1");
    expect_shown("", "$(bench_parts)", "GPUS=");
    put_script("bin/nvidia-smi", "#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H200'\n");
    expect_shown("", "$(bench_parts)", "NVCC=compiler");
}

/* Without git history, rows have the revision that REVISION= gives. The file build/revision is written only
 * when the revision changes. */
Test(make, takes_a_revision)
{
    EXPECT_EXACTLY(0, "v1\n", MAKE "REVISION=v1 build/revision >/dev/null && cat build/revision");
    EXPECT(0, "touch -d 2001-01-01 build/revision");
    EXPECT_EXACTLY(0, "",
                   MAKE "REVISION=v1 build/revision >/dev/null && find build/revision -newermt 2002-01-01");
    EXPECT_EXACTLY(0, "unknown\n", MAKE "build/revision >/dev/null && cat build/revision");
}

Test(make, builds_no_suites_that_are_left_out)
{
#define TWO "$(notdir $(filter %/test_make %/test_text,$(CHOSEN_TESTS)))"
    expect_shown("test_make test_text", TWO, "");
    expect_shown("test_make", TWO, "SKIP='^test_te(xt|n)$'");
#undef TWO
}

Test(make, help_names_the_goals)
{
    EXPECT(0, MAKE "help");
    static const char *const goals[] = {"make bench", "make check", "make plots", "make dist", "CUDA_ARCHS",
                                        "CUDA=0",     "ONLY=REGEX", "JOBS=N",     "LIMIT=N"};
    for (size_t i = 0; i < COUNT_OF(goals); i++)
        cr_expect(strstr(out, goals[i]), "%s", goals[i]);
    cr_expect_not(strstr(out, "VERSION  :="), "the help must end after the comment at the top");
}

/* The program opens cuFile and nvJPEG by name at run time, so a container image without them can be built.
 * Therefore this test checks that the build recipes copy both libraries. */
Test(make, images_contain_libraries_that_are_opened_by_name)
{
    static const char *const recipes[] = {"Dockerfile", "fdsl-bench.def"};
    EXPECT(0, "grep -oE 'libcufile[.]so[.][0-9]+' cuda/load/gds.cu | sort -u >name && [ -s name ] && "
              "grep -qF '\"libnvjpeg.so.\" TEXT(NVJPEG_VER_MAJOR)' cuda/common/image_decoder.cu && "
              "sed -n 's/^FROM nvidia.cuda:\\([0-9]*\\)[.].*/libnvjpeg.so.\\1/p' "
              "scripts/packaging/Dockerfile >name2 && "
              "[ -s name2 ]");
    for (size_t i = 0; i < COUNT_OF(recipes); i++) {
        EXPECT(0, "sed '/^FROM ubuntu/,$d; /^Stage: final/,$d' scripts/packaging/%s >stage", recipes[i]);
        EXPECT(0, "grep \"cp .*/$(cat name) /opt/fdsl-bench/lib/\" stage");
        EXPECT(0, "grep \"cp .*/$(cat name2) /opt/fdsl-bench/lib/\" stage");
        EXPECT(0, "grep 'LD_LIBRARY_PATH=/opt/fdsl-bench/lib' scripts/packaging/%s", recipes[i]);
    }
}

/* The program in a container image is linked with these libraries, so the image must contain them. */
Test(make, images_contain_the_libraries_of_the_build)
{
    EXPECT(0, "for f in Dockerfile fdsl-bench.def; do for l in libpng16 libjpeg libwebp libcurl4 libexpat1 "
              "libjansson4 "
              "libxxhash0; do "
              "sed -n '/^FROM ubuntu/,$p; /^Stage: final/,$p' scripts/packaging/$f | grep -q \" $l\" || exit "
              "1; done; done");
}
