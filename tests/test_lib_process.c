/* Tests libfdsl.so as part of another program. The library must leave the caller's environment unchanged,
 * work in several threads and processes, free its memory, and be installable. */
#include <fcntl.h>
#include <fenv.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "lib_support.h"

TestSuite(lib_process, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

/* ---- The caller's environment ---- */

Test(lib_process, floating_point_environment_stays_and_does_not_matter)
{
    struct fdsl_config config = small();
    config.dtype = "f32";
    config.out_res = 31;
    struct fdsl_generator *generator = opened(&config);
    run_program(&config, "", image_bytes(generator));
    fdsl_close(generator);
    fesetround(FE_UPWARD);
#ifdef __SSE__
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
#endif
    feclearexcept(FE_ALL_EXCEPT);
    generator = opened(&config);
    int raised_by_open = fetestexcept(FE_ALL_EXCEPT), rounding = fegetround();
    expect_reference(generator, 5);
    int raised = fetestexcept(FE_ALL_EXCEPT);
#ifdef __SSE__
    cr_expect_eq(_MM_GET_FLUSH_ZERO_MODE(), _MM_FLUSH_ZERO_ON);
#endif
    cr_expect_eq(fegetround(), FE_UPWARD);
    fesetenv(FE_DFL_ENV);
    cr_expect_eq(rounding, FE_UPWARD);
    cr_expect(raised_by_open == 0 && raised == 0, "%x %x", raised_by_open, raised);
    fdsl_close(generator);
}

/* The library changes no signal handlers and no signal mask. It prints nothing, even if OMP_NUM_THREADS is
 * invalid. */
Test(lib_process, prints_nothing_and_leaves_signals_alone)
{
    struct sigaction before[32], after[32];
    sigset_t mask_before, mask_after;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/printed", folder);
    fflush(NULL);
    int printed = open(path, O_RDWR | O_CREAT, 0600), out_fd = dup(1), err_fd = dup(2);
    cr_assert(dup2(printed, 1) == 1 && dup2(printed, 2) == 2);
    setenv("OMP_NUM_THREADS", "many", 1);
    for (int i = 1; i < 32; i++)
        sigaction(i, NULL, &before[i]);
    pthread_sigmask(SIG_SETMASK, NULL, &mask_before);
    struct fdsl_config config = small();
    config.threads = 0;
    config.dtype = "f16";
    config.std[0] = 1e-6; /* values exceed the range of f16; the program would warn */
    struct fdsl_generator *generator, *other;
    enum fdsl_status opening = fdsl_open(&config, &generator);
    void *images;
    fdsl_alloc(FDSL_CPU, COUNT * 96 * 96 * 2, &images);
    fdsl_generate(generator, 0, COUNT, images, NULL, NULL);
    config.formula = "none";
    fdsl_open(&config, &other);
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
    pthread_sigmask(SIG_SETMASK, NULL, &mask_after);
    fflush(NULL);
    dup2(out_fd, 1);
    dup2(err_fd, 2);
    cr_assert_eq(opening, FDSL_OK, "%s", fdsl_error());
    cr_expect_eq(lseek(printed, 0, SEEK_END), 0);
    for (int i = 1; i < 32; i++) {
        sigaction(i, NULL, &after[i]);
        cr_expect(after[i].sa_handler == before[i].sa_handler && after[i].sa_flags == before[i].sa_flags,
                  "%d", i);
    }
    for (int i = 1; i < 32; i++)
        cr_expect_eq(sigismember(&mask_after, i), sigismember(&mask_before, i), "%d", i);
}

/* ---- Processes, threads, memory ---- */

Test(lib_process, a_forked_child_needs_a_generator_of_its_own)
{
    struct fdsl_config config = small();
    config.out_res = 96;
    struct fdsl_generator *generator = opened(&config);
    run_program(&config, "", image_bytes(generator));
    expect_reference(generator, 4);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        static uint8_t images[COUNT * 96 * 96];
        struct fdsl_generator *own;
        int wrong = fdsl_generate(generator, 0, 1, images, NULL, NULL) != FDSL_FAILED ||
                    !strstr(fdsl_error(), "before fork()");
        fdsl_close(generator); /* leaves the parent's generator alone */
        wrong |= fdsl_open(&config, &own) != FDSL_OK ? 2 : 0;
        wrong |= fdsl_generate(own, 0, COUNT, images, NULL, NULL) != FDSL_OK ? 4 : 0;
        wrong |= memcmp(images, reference, sizeof images) ? 8 : 0;
        fdsl_close(own);
        _exit(wrong);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    cr_expect(WIFEXITED(result) && WEXITSTATUS(result) == 0, "%x", result);
    expect_reference(generator, 6);
    fdsl_close(generator);
}

static void *generate_often(void *argument)
{
    struct fdsl_generator *generator = argument;
    for (int i = 0; i < 20; i++)
        expect_reference(generator, 1 + (uint32_t)i);
    return NULL;
}

Test(lib_process, generators_work_in_several_threads)
{
    enum { THREADS = 5 };
    struct fdsl_config config = small();
    config.out_res = 48;
    pthread_t threads[THREADS];
    struct fdsl_generator *generators[THREADS];
    for (int i = 0; i < THREADS; i++) {
        config.threads = i;
        generators[i] = opened(&config);
        if (i == 0)
            run_program(&config, "", image_bytes(generators[i]));
    }
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, generate_often, generators[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
        fdsl_close(generators[i]);
    }
}

#ifndef __SANITIZE_ADDRESS__
/* Tests 64 limits of the address space. With each limit, fdsl_open() must succeed, or report that memory or
 * threads are missing. */
Test(lib_process, memory_that_does_not_suffice_is_reported)
{
    struct fdsl_config config = small();
    struct fdsl_generator *generator;
    struct rlimit limit;
    int failures = 0, successes = 0;
    config.res = 1024;
    config.classes = 200;
    fdsl_close(opened(&config)); /* makes the allocations that happen once per process */
    cr_assert_eq(getrlimit(RLIMIT_AS, &limit), 0);
    for (rlim_t step = 0; step < 64; step++) {
        uint64_t pages = 0;
        FILE *statm = fopen("/proc/self/statm", "r");
        cr_assert(statm && fscanf(statm, "%" SCNu64, &pages) == 1);
        fclose(statm);
        limit.rlim_cur = pages * 4096 + step * 512 * 1024;
        cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
        enum fdsl_status result = fdsl_open(&config, &generator);
        limit.rlim_cur = limit.rlim_max;
        cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
        cr_expect(result == FDSL_OK || result == FDSL_FAILED, "%d: %s", result, fdsl_error());
        cr_expect_eq(result == FDSL_OK, generator != NULL);
        cr_expect(result == FDSL_OK || strstr(fdsl_error(), "memory") || strstr(fdsl_error(), "threads"),
                  "%s", fdsl_error());
        failures += result != FDSL_OK;
        successes += result == FDSL_OK;
        fdsl_close(generator);
    }
    cr_expect(failures > 0 && successes > 0, "%d failures, %d successes", failures, successes);
}

/* The first 100 generators may fill the allocator's caches. After that, memory must not grow: a leak of
 * 16 bytes per generator or call exceeds the bound. */
Test(lib_process, generators_and_calls_leak_no_memory)
{
    struct fdsl_config config = small();
    config.res = 16;
    size_t begin = 0;
    for (int i = 0; i < 400; i++) {
        fdsl_close(opened(&config));
        if (i == 99)
            begin = mallinfo2().uordblks;
    }
    cr_expect_leq(mallinfo2().uordblks, begin + 4096, "400 opened generators");
    struct fdsl_generator *generator = opened(&config);
    uint8_t *images = allocated(COUNT * 256);
    begin = mallinfo2().uordblks;
    for (uint64_t i = 0; i < 1000; i++)
        good(fdsl_generate(generator, i, 1 + (uint32_t)i % COUNT, images, NULL, NULL));
    cr_expect_leq(mallinfo2().uordblks, begin + 4096, "1000 calls");
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}
#endif

/* ---- The files ---- */

/* The picture written by docs/examples/generate.c has the program's images side by side. */
Test(lib_process, the_example_writes_the_images_of_the_program)
{
    enum { IMAGES = 8, SIDE = 224 };
    if (access("build/examples/generate", X_OK) != 0)
        cr_skip_test("build/examples/generate is missing");
    static uint8_t picture[SIDE][IMAGES][SIDE], images[IMAGES][SIDE][SIDE];
    EXPECT(0, "%s/build/examples/generate 2>&1", root);
    cr_expect_str_eq(out, "");
    read_tail("images.pgm", picture, sizeof picture);
    EXPECT(0, "$P --variant naive --batch 8 --classes 1000 --preset paper-1000 --out-res 224 --npy x.npy "
              "--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0 2>&1");
    read_tail("x.npy", images, sizeof images);
    for (int i = 0; i < IMAGES; i++)
        for (int y = 0; y < SIDE; y++)
            cr_assert_eq(memcmp(picture[y][i], images[i][y], SIDE), 0, "row %d of image %d", y, i);
}

/* Compiles the example against the installed files, which pkg-config finds. */
Test(lib_process, installed_files_are_found_by_pkg_config)
{
#ifdef __SANITIZE_ADDRESS__
    cr_skip_test("a program must link the runtime of the sanitizers before a library that uses it");
#endif
    if (access("build/lib/libfdsl.so", R_OK) != 0 || run("command -v pkg-config >/dev/null") != 0)
        cr_skip_test("build/lib/libfdsl.so or pkg-config is missing");
    EXPECT(0,
           "make -s -C %s -o build/found.mk install-files DESTDIR=$PWD/root PREFIX=/opt/fdsl "
           "LIBDIR=/opt/fdsl/lib64 "
           ">/dev/null 2>log || cat log",
           root);
    EXPECT(0,
           "export PKG_CONFIG_SYSROOT_DIR=$PWD/root PKG_CONFIG_PATH=$PWD/root/opt/fdsl/lib64/pkgconfig && "
           "cc %s/docs/examples/generate.c $(pkg-config --cflags --libs fdsl) -o generate 2>&1 && "
           "LD_LIBRARY_PATH=root/opt/fdsl/lib64 ./generate && pkg-config --modversion fdsl",
           root);
    cr_expect_str_eq(out, FDSL_VERSION "\n");
    EXPECT(0,
           "export PKG_CONFIG_SYSROOT_DIR=$PWD/root PKG_CONFIG_PATH=$PWD/root/opt/fdsl/lib64/pkgconfig && "
           "cc %s/docs/examples/generate.c $(pkg-config --cflags --static --libs fdsl | sed "
           "s/-lfdsl/-l:libfdsl.a/) -o generate 2>&1 && ./generate",
           root);
    EXPECT(0, "cd root/opt/fdsl && ls bin/fdsl-bench lib64/libfdsl.so.0 lib64/libfdsl.a include/fdsl.h "
              "lib64/cmake/fdsl/fdslConfig.cmake share/man/man1/fdsl-bench.1 share/man/man3/fdsl.3 "
              "share/modulefiles/fdsl-bench/" FDSL_VERSION
              ".lua share/doc/fdsl-bench/LICENSE share/doc/fdsl-bench/NOTICE "
              ">/dev/null 2>&1");
    EXPECT(0, "grep -o 'LINK_LIBRARIES \".*\"' root/opt/fdsl/lib64/cmake/fdsl/fdslConfig.cmake");
    cr_expect(strstr(out, "-lpthread;-ldl;-lm") && !strchr(out + strlen("LINK_LIBRARIES "), ' '),
              "CMake needs a list without blanks: %s", out);
    EXPECT(0, "grep -rIlE '@[A-Z_]+@' root; :");
    cr_expect_str_eq(out, "", "installed files contain placeholders");
}

Test(lib_process, exports_only_its_functions_and_needs_few_libraries)
{
    if (access("build/lib/libfdsl.so", R_OK) != 0)
        cr_skip_test("build/lib/libfdsl.so is missing");
    EXPECT(0,
           "nm -D --defined-only %s/build/lib/libfdsl.so | awk '$2 != \"A\" {print $3}' | grep -v ^fdsl_; :",
           root);
    cr_expect_str_eq(out, "");
    EXPECT(0,
           "[ $(nm -D --defined-only %s/build/lib/libfdsl.so | grep -c ' T fdsl_') = "
           "$(grep -c ^FDSL_API %s/src/lib/fdsl.h) ]",
           root, root);
    EXPECT(0,
           "readelf -d %s/build/lib/libfdsl.so | grep NEEDED | grep -vE "
           "'\\[(lib(c|m|dl|rt|pthread|gomp|xxhash|png16|jpeg|webp|jansson|z|zstd)[.]so|ld-linux)'; :",
           root);
    cr_expect_str_eq(out, "", "libfdsl.so needs a library that the wheel does not bring");
    EXPECT(0,
           "nm -g --defined-only %s/build/lib/libfdsl.a | awk 'NF == 3 {print $3}' | grep -vE "
           "'^(fdsl_|DW[.]ref[.]|[.]gomp_critical)'; :",
           root);
    cr_expect_str_eq(out, "");
}

Test(lib_process, header_is_c99_and_cplusplus)
{
    EXPECT(
        0,
        "printf '#include \"%s/src/lib/fdsl.h\"\\nint main(void) { return fdsl_version() == 0; }\\n' >h.c && "
        "cc -std=c99 -pedantic-errors -Wall -Wextra -Werror -fsyntax-only h.c 2>&1 && "
        "if command -v c++ >/dev/null; then "
        "c++ -x c++ -std=c++98 -pedantic-errors -Wall -Wextra -Werror -fsyntax-only h.c 2>&1; fi",
        root);
    cr_expect_str_eq(fdsl_version(), FDSL_VERSION_TEXT);
    cr_expect_str_eq(fdsl_version(), FDSL_VERSION);
}
