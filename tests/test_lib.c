/* Tests libfdsl.so. It generates the same images as the program, for every output format and for calls of any
 * size. It reports each wrong argument with one error, and leaves the caller's environment unchanged. */
#include <criterion/criterion.h>

#include <fcntl.h>
#include <fenv.h>
#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "lib/fdsl.h"
#include "shell.h"

#define good(call) cr_assert_eq(call, FDSL_OK, "%s", fdsl_error())

TestSuite(lib, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

enum { CLASSES = 7, COUNT = 23 };

/* A small generator with the classes that the program draws for --classes 7. */
static struct fdsl_config small(void)
{
    struct fdsl_config config;
    good(fdsl_config_init(&config, sizeof config));
    config.classes = CLASSES;
    config.res = 96;
    config.batch = COUNT;
    config.threads = 2;
    return config;
}

static struct fdsl_generator *opened(const struct fdsl_config *config)
{
    struct fdsl_generator *generator;
    good(fdsl_open(config, &generator));
    return generator;
}

static uint64_t image_bytes(const struct fdsl_generator *generator)
{
    struct fdsl_layout layout = {.size = sizeof layout};
    good(fdsl_describe(generator, &layout));
    return layout.image_bytes;
}

static void *allocated(size_t bytes)
{
    void *memory;
    good(fdsl_alloc(FDSL_CPU, bytes, &memory));
    memset(memory, 0xaa, bytes);
    return memory;
}

/* ---- Images ---- */

static uint8_t reference[COUNT * 3 * 96 * 96 * 4];
static int64_t reference_labels[COUNT];

/* Reads a file of the test's folder and returns its last `bytes` bytes: the values of an .npy file. */
static void read_tail(const char *name, void *values, size_t bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fseek(file, -(long)bytes, SEEK_END), 0);
    cr_assert_eq(fread(values, 1, bytes, file), bytes);
    fclose(file);
}

/* Fills `reference` with the images that the program's variant naive generates. */
static void run_program(const struct fdsl_config *config, const char *words, size_t bytes)
{
    EXPECT(0,
           "$P --variant naive --batch %d --classes %d --res 96 --out-res %u --channels %u --layout %s "
           "--dtype %s "
           "--fit %s --formula %s --seed %llu %s --npy x.npy --min-samples 1 --min-time 0 --max-time 0 "
           "--warmups 0 "
           "--warmup-time 0 2>&1",
           COUNT, CLASSES, config->out_res, config->channels, config->layout, config->dtype, config->fit,
           config->formula, (unsigned long long)config->seed, words);
    read_tail("x.npy", reference, COUNT * bytes);
    read_tail("x.labels.npy", reference_labels, sizeof reference_labels);
}

/* Generates all images in calls of `step` images and compares them with the reference. */
static void expect_reference(struct fdsl_generator *generator, uint32_t step)
{
    size_t bytes = image_bytes(generator);
    uint8_t *images = allocated(COUNT * bytes);
    int64_t labels[COUNT];
    for (uint32_t first = 0; first < COUNT; first += step) {
        uint32_t count = COUNT - first < step ? COUNT - first : step;
        good(fdsl_generate(generator, first, count, images + first * bytes, labels + first, NULL));
    }
    cr_expect_eq(memcmp(images, reference, COUNT * bytes), 0, "in steps of %u", step);
    cr_expect_eq(memcmp(labels, reference_labels, sizeof labels), 0);
    fdsl_free(FDSL_CPU, images);
}

Test(lib, images_are_those_of_the_program_for_every_format)
{
    static const char *const dtypes[] = {"u8", "f16", "bf16", "f32"}, *const layouts[] = {"nchw", "nhwc"},
                             *const fits[] = {"resize", "crop"}, *const formulas[] = {"uji", "visualatom"};
    struct fdsl_config config = small();
    for (int i = 0; i < 32; i++) {
        char words[64] = "";
        config.dtype = dtypes[i % 4];
        config.layout = layouts[i / 4 % 2];
        config.channels = i / 8 % 2 ? 3 : 1;
        config.fit = fits[i / 16];
        config.formula = formulas[i / 3 % 2];
        config.out_res = i % 5 == 0 ? 96 : 37;
        config.seed = (uint64_t)i << 33;
        config.generator = i % 3 ? "omp" : "naive";
        memset(config.mean, 0, sizeof config.mean);
        if (i % 4) { /* floats */
            strcpy(words, "--mean 0.485 --std 0.25");
            for (int c = 0; c < 3; c++) {
                config.mean[c] = 0.485;
                config.std[c] = 0.25;
            }
        }
        struct fdsl_generator *generator = opened(&config);
        run_program(&config, words, image_bytes(generator));
        expect_reference(generator, COUNT);
        expect_reference(generator, 1 + (uint32_t)i % 6);
        fdsl_close(generator);
    }
}

/* Tests 1, 5 and 9 threads. If a call has fewer images than threads, several threads share an image. */
Test(lib, images_do_not_depend_on_threads)
{
    struct fdsl_config config = small();
    config.dtype = "f16";
    config.out_res = 41;
    for (int threads = 1; threads <= 9; threads += 4)
        for (uint32_t batch = 1; batch <= COUNT; batch += 11) {
            config.threads = threads;
            config.batch = batch;
            struct fdsl_generator *generator = opened(&config);
            if (threads == 1 && batch == 1)
                run_program(&config, "", image_bytes(generator));
            expect_reference(generator, batch);
            fdsl_close(generator);
        }
}

Test(lib, lists_and_counters_select_images)
{
    static const uint64_t numbers[] = {5, 0, 22, 5, 7, 21};
    enum { LISTED = 6 };
    struct fdsl_config config = small();
    config.out_res = 33;
    struct fdsl_generator *generator = opened(&config);
    size_t bytes = image_bytes(generator);
    uint8_t *images = allocated(COUNT * bytes), *listed = allocated(COUNT * bytes);
    int64_t labels[COUNT], listed_labels[LISTED];
    good(fdsl_generate(generator, 0, COUNT, images, labels, NULL));
    good(fdsl_generate_list(generator, numbers, LISTED, listed, listed_labels, NULL));
    for (int i = 0; i < LISTED; i++) {
        cr_expect_eq(memcmp(listed + (size_t)i * bytes, images + numbers[i] * bytes, bytes), 0, "%d", i);
        cr_expect_eq(listed_labels[i], labels[numbers[i]]);
    }
    uint64_t next = 1;
    for (int step = 0; step < 4; step++) /* as rank 0 of 2, with batches of 3 */
        good(fdsl_generate_next(generator, &next, 6, 3, listed + (size_t)step * 3 * bytes, NULL, NULL));
    cr_expect_eq(next, 25);
    for (size_t i = 0; i < 12; i++)
        cr_expect_eq(memcmp(listed + i * bytes, images + (1 + i / 3 * 6 + i % 3) * bytes, bytes), 0, "%zu",
                     i);
    fdsl_free(FDSL_CPU, listed);
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}

/* Tests classes from an array, from a CSV file, and from a preset. */
Test(lib, classes_can_be_given)
{
    struct fdsl_config config = small();
    struct fdsl_class drawn[CLASSES], read[CLASSES + 1];
    struct fdsl_generator *generator = opened(&config);
    cr_expect_eq(fdsl_classes(generator, drawn, CLASSES), CLASSES);
    config.out_res = 96;
    run_program(&config, "--write-classes c.csv", image_bytes(generator));
    expect_reference(generator, COUNT);
    fdsl_close(generator);

    config.classes = 0;
    config.class_list = drawn;
    config.class_count = CLASSES;
    generator = opened(&config);
    memset(drawn, 0, sizeof drawn); /* fdsl_open() has copied the classes */
    expect_reference(generator, COUNT);
    fdsl_close(generator);

    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/c.csv", folder);
    config.class_list = NULL;
    config.class_count = 0;
    config.class_file = path;
    generator = opened(&config);
    cr_expect_eq(fdsl_classes(generator, read, CLASSES + 1), CLASSES);
    expect_reference(generator, COUNT);
    fdsl_close(generator);

    config.class_file = NULL;
    config.preset = "paper-1000";
    config.classes = 3;
    generator = opened(&config);
    cr_expect_eq(fdsl_classes(generator, NULL, 0), 3);
    cr_expect_eq(fdsl_classes(generator, read, 1), 3);
    cr_expect(read[0].vertices == 854 && read[0].orbits == 29 && read[0].radius == 43);
    fdsl_close(generator);
}

Test(lib, layouts_are_described)
{
    struct fdsl_config config = small();
    struct fdsl_layout layout = {.size = sizeof layout};
    config.out_res = 10;
    config.channels = 3;
    config.dtype = "f16";
    struct fdsl_generator *generator = opened(&config);
    good(fdsl_describe(generator, &layout));
    cr_expect(layout.shape[0] == 3 && layout.shape[1] == 10 && layout.shape[2] == 10);
    cr_expect(layout.strides_bytes[0] == 200 && layout.strides_bytes[1] == 20 &&
              layout.strides_bytes[2] == 2);
    cr_expect(layout.element_bytes == 2 && layout.image_bytes == 600);
    fdsl_close(generator);
    config.layout = "nhwc";
    generator = opened(&config);
    good(fdsl_describe(generator, &layout));
    cr_expect(layout.shape[0] == 10 && layout.shape[1] == 10 && layout.shape[2] == 3);
    cr_expect(layout.strides_bytes[0] == 60 && layout.strides_bytes[1] == 6 && layout.strides_bytes[2] == 2);
    cr_expect_gt(fdsl_memory_bytes(generator), 0);
    fdsl_close(generator);
}

/* ---- Wrong arguments ---- */

#define expect_error(code, call, fragment)                                                             \
    do {                                                                                               \
        cr_expect_eq(call, code, "%s", fdsl_error());                                                  \
        cr_expect_not_null(strstr(fdsl_error(), fragment), "'%s' lacks '%s'", fdsl_error(), fragment); \
        cr_expect_null(strstr(fdsl_error(), "--"), "%s", fdsl_error());                                \
        cr_expect_null(strchr(fdsl_error(), '\n'), "%s", fdsl_error());                                \
    } while (0)

/* Changes one field of a valid configuration, and expects fdsl_open() to refuse it. */
#define EXPECT_WRONG_FIELD(code, change, fragment)                                     \
    do {                                                                               \
        struct fdsl_config config = small();                                           \
        struct fdsl_generator *generator = (void *)&config;                            \
        change;                                                                        \
        expect_error(code, fdsl_open(&config, &generator), fragment);                  \
        cr_expect_null(generator, "*generator must be NULL after an error: " #change); \
    } while (0)

Test(lib, wrong_fields_are_named)
{
    struct fdsl_class twice[2] = {{.id = 3, .vertices = 5, .orbits = 2, .radius = 9},
                                  {.id = 3, .vertices = 6, .orbits = 2, .radius = 9}};
    struct fdsl_class bad = {.id = 3, .vertices = 0, .orbits = 2};
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.size = 8, "config->size: it is 8");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.formula = "ujji", "formula: 'ujji' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.formula = "ujji", "did you mean 'uji'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.formula = NULL, "formula: it is NULL");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.res = 0, "res: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.res = 16385, "res: 16385 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.classes = 0, "classes: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.preset = "paper", "no section [paper]");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.preset = "paper-1000", config.classes = 1001),
                       "classes: preset paper-1000 has 1000");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.preset_file = "/nonexistent", "'/nonexistent'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/nonexistent", "'/nonexistent'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/proc/self/exe", "/proc/self/exe");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_count = 2, "class_count: it is 2, but class_list is NULL");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_list = twice, "class_count: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.class_list = twice, config.class_count = 2), "same id, 3");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.class_list = &bad, config.class_count = 1),
                       "class_list[0]: class 3");
    EXPECT_WRONG_FIELD(FDSL_INVALID,
                       (config.class_list = twice, config.class_count = 1, config.class_file = "c.csv"),
                       "class_file: class_list gives the classes");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.out_res = 16385, "out_res: 16385 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.out_res = 97, config.fit = "crop"),
                       "out_res: 97 is larger than res");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.fit = "pad", "fit: 'pad' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.channels = 2, "channels: 2 is neither 1 nor 3");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.layout = "nchv", "layout: 'nchv' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.dtype = "float16", "dtype: 'float16' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.std[0] = 0, "std[0]: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.channels = 3, config.std[2] = 1e7),
                       "std[2]: 1e+07 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.mean[0] = NAN, "mean[0]: nan is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.generator = "opm", "generator: 'opm' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.generator = "fused", "generator: 'fused' works on CUDA devices");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.generator = "omp", config.device = 0), "works on the CPU");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.device = -2, "device: -2");
    EXPECT_WRONG_FIELD(FDSL_UNAVAILABLE, config.device = 4096, "CUDA");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.threads = -1, "threads: -1 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.threads = 8193, "threads: 8193 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.batch = 0, "batch: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.batch = (1 << 24) + 1, "batch: 16777217 is out of range");
}

Test(lib, wrong_arguments_are_named)
{
    struct fdsl_config config = small();
    struct fdsl_generator *generator;
    struct fdsl_layout layout = {.size = 3};
    uint64_t numbers[COUNT + 1] = {0};
    void *memory;
    config.dtype = "f32";
    expect_error(FDSL_INVALID, fdsl_config_init(NULL, sizeof config), "config: it is NULL");
    expect_error(FDSL_INVALID, fdsl_config_init(&config, 5), "config->size: it is 5");
    expect_error(FDSL_INVALID, fdsl_open(NULL, &generator), "config: it is NULL");
    expect_error(FDSL_INVALID, fdsl_open(&config, NULL), "generator: it is NULL");
    generator = opened(&config);
    char *images = allocated(COUNT * image_bytes(generator) + 8);
    int64_t labels[COUNT + 1];
    expect_error(FDSL_INVALID, fdsl_describe(NULL, &layout), "generator: it is NULL");
    expect_error(FDSL_INVALID, fdsl_describe(generator, NULL), "layout: it is NULL");
    expect_error(FDSL_INVALID, fdsl_describe(generator, &layout), "layout->size: it is 3");
    expect_error(0, fdsl_classes(NULL, NULL, 0), "generator: it is NULL");
    expect_error(0, fdsl_classes(generator, NULL, 1), "classes: it is NULL");
    cr_expect_eq(fdsl_memory_bytes(NULL), 0);
    expect_error(FDSL_INVALID, fdsl_generate(NULL, 0, 1, images, labels, NULL), "generator: it is NULL");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, 0, images, labels, NULL),
                 "count: 0 is out of range");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, COUNT + 1, images, labels, NULL), "count: 24");
    expect_error(FDSL_INVALID, fdsl_generate(generator, UINT64_MAX, 2, images, labels, NULL), "first: 1844");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, 1, NULL, labels, NULL), "images: it is NULL");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, 1, images + 2, labels, NULL),
                 "is not aligned to 4");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, 1, images, (void *)((char *)labels + 4), NULL),
                 "labels: ");
    expect_error(FDSL_INVALID, fdsl_generate(generator, 0, 1, images, labels, images),
                 "stream: it must be NULL");
    expect_error(FDSL_INVALID, fdsl_generate_list(generator, NULL, 1, images, labels, NULL),
                 "numbers: it is NULL");
    expect_error(FDSL_INVALID, fdsl_generate_list(generator, numbers, 0, images, labels, NULL), "count: 0");
    expect_error(FDSL_INVALID, fdsl_generate_list(NULL, numbers, 1, images, labels, NULL), "generator: ");
    expect_error(FDSL_INVALID, fdsl_generate_next(generator, NULL, 1, 1, images, labels, NULL),
                 "next: it is NULL");
    expect_error(FDSL_INVALID, fdsl_generate_next(NULL, numbers, 1, 1, images, labels, NULL), "generator: ");
    expect_error(FDSL_INVALID, fdsl_alloc(FDSL_CPU, 0, &memory), "bytes: it is 0");
    expect_error(FDSL_INVALID, fdsl_alloc(FDSL_CPU, 1, NULL), "memory: it is NULL");
    expect_error(FDSL_FAILED, fdsl_alloc(FDSL_CPU, SIZE_MAX, &memory), "out of memory");
    expect_error(FDSL_INVALID, fdsl_alloc(-7, 1, &memory), "device: -7");
    expect_error(FDSL_UNAVAILABLE, fdsl_alloc(4096, 1, &memory), "CUDA");
    expect_error(FDSL_INVALID, fdsl_copy(FDSL_CPU, NULL, images, 1, NULL), "to: it is NULL");
    expect_error(FDSL_INVALID, fdsl_copy(FDSL_CPU, images, NULL, 1, NULL), "from: it is NULL");
    expect_error(FDSL_INVALID, fdsl_wait(-7, NULL), "device: -7");
    expect_error(FDSL_INVALID, fdsl_order(-7, NULL, NULL), "device: -7");
    good(fdsl_wait(FDSL_CPU, NULL));
    good(fdsl_order(FDSL_CPU, NULL, NULL));
    good(fdsl_copy(FDSL_CPU, images, labels, 8, NULL));
    fdsl_free(FDSL_CPU, NULL);
    fdsl_close(NULL);
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}

static void *fail_elsewhere(void *text)
{
    cr_expect_str_eq(fdsl_error(), "", "the error of another thread is returned");
    fdsl_generate(NULL, 0, 1, NULL, NULL, NULL);
    snprintf(text, 256, "%s", fdsl_error());
    return NULL;
}

Test(lib, errors_belong_to_a_thread)
{
    char there[256];
    pthread_t thread;
    expect_error(FDSL_INVALID, fdsl_wait(-7, NULL), "device: -7");
    cr_assert_eq(pthread_create(&thread, NULL, fail_elsewhere, there), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_str_eq(there, "generator: it is NULL");
    cr_expect_not_null(strstr(fdsl_error(), "device: -7"));
}

/* ---- The caller's environment ---- */

Test(lib, floating_point_environment_stays_and_does_not_matter)
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
Test(lib, prints_nothing_and_leaves_signals_alone)
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

Test(lib, a_forked_child_needs_a_generator_of_its_own)
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
        int wrong = fdsl_generate(generator, 0, 1, images, NULL, NULL) != FDSL_INVALID ||
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

Test(lib, generators_work_in_several_threads)
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
/* Limits the address space to 64 different sizes. For each, fdsl_open() must succeed, or report that memory
 * or threads are missing. */
Test(lib, memory_that_does_not_suffice_is_reported)
{
    struct fdsl_config config = small();
    struct fdsl_generator *generator;
    struct rlimit limit;
    int failures = 0, successes = 0;
    config.res = 1024;
    config.classes = 200;
    fdsl_close(opened(&config)); /* makes the allocations that a process makes only once */
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

/* Memory may grow only in the first 100 cycles, which fill the allocator's caches. */
Test(lib, memory_stays_flat)
{
    struct fdsl_config config = small();
    config.res = 16;
    size_t begin = 0;
    for (int i = 0; i < 1000; i++) {
        fdsl_close(opened(&config));
        if (i == 99)
            begin = mallinfo2().uordblks;
    }
    cr_expect_leq(mallinfo2().uordblks, begin + 4096, "1000 opened generators");
    struct fdsl_generator *generator = opened(&config);
    uint8_t *images = allocated(COUNT * 256);
    begin = mallinfo2().uordblks;
    for (uint64_t i = 0; i < 10000; i++)
        good(fdsl_generate(generator, i, 1 + (uint32_t)i % COUNT, images, NULL, NULL));
    cr_expect_leq(mallinfo2().uordblks, begin + 4096, "10,000 calls");
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}
#endif

/* ---- The files ---- */

/* The picture of the example has the images of the program, side by side. */
Test(lib, the_example_works)
{
    enum { IMAGES = 8, SIDE = 224 };
    if (access("build/examples/generate", X_OK) != 0)
        cr_skip_test("another build folder");
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

/* A program is compiled against the installed files, found by pkg-config. */
Test(lib, installed_files_are_found_by_pkg_config)
{
    if (access("build/lib/libfdsl.so", R_OK) != 0 || run("command -v pkg-config >/dev/null") != 0)
        cr_skip_test("another build folder, or no pkg-config");
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
           "cd root/opt/fdsl && ls bin/fdsl-bench lib64/libfdsl.so.0 lib64/libfdsl.a include/fdsl.h "
           "lib64/cmake/fdsl/fdslConfig.cmake share/man/man1/fdsl-bench.1 share/man/man3/fdsl.3 "
           "share/modulefiles/fdsl-bench/" FDSL_VERSION ".lua share/doc/fdsl-bench/LICENSE >/dev/null 2>&1");
    EXPECT(0, "grep -rIlE '@[A-Z_]+@' root; :");
    cr_expect_str_eq(out, "", "no placeholder is left");
}

Test(lib, exports_only_its_functions_and_needs_only_glibc)
{
    if (access("build/lib/libfdsl.so", R_OK) != 0)
        cr_skip_test("another build folder");
    EXPECT(0,
           "nm -D --defined-only %s/build/lib/libfdsl.so | awk '$2 != \"A\" {print $3}' | grep -v ^fdsl_; :",
           root);
    cr_expect_str_eq(out, "");
    EXPECT(0, "nm -D --defined-only %s/build/lib/libfdsl.so | grep -c ' T fdsl_'", root);
    cr_expect_str_eq(out, "17\n");
    EXPECT(0, "nm -g --defined-only %s/build/lib/libfdsl.a | awk 'NF == 3 {print $3}' | grep -v ^fdsl_; :",
           root);
    cr_expect_str_eq(out, "");
}

Test(lib, header_is_c99_and_cplusplus)
{
    EXPECT(
        0,
        "printf '#include \"%s/src/lib/fdsl.h\"\\nint main(void) { return fdsl_version() == 0; }\\n' >h.c && "
        "cc -std=c99 -pedantic-errors -Wall -Wextra -Werror -fsyntax-only h.c 2>&1 && "
        "c++ -x c++ -std=c++98 -pedantic-errors -Wall -Wextra -Werror -fsyntax-only h.c 2>&1",
        root);
    cr_expect_str_eq(fdsl_version(), FDSL_VERSION_TEXT);
    cr_expect_str_eq(fdsl_version(), FDSL_VERSION);
}
