/* Tests that libfdsl.so generates the same images as the program, for every output format and for calls of
 * several sizes. An error about a wrong argument must name this argument. */
#include <math.h>
#include <pthread.h>

#include "lib_support.h"

TestSuite(lib, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

/* ---- Images ---- */

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
        bool floats = i % 4 != 0;
        if (floats)
            strcpy(words, "--mean 0.485 --std 0.25");
        for (int c = 0; c < 3; c++) {
            config.mean[c] = floats ? 0.485 : 0;
            config.std[c] = floats ? 0.25 : 1;
        }
        struct fdsl_generator *generator = opened(&config);
        run_program(&config, words, image_bytes(generator));
        expect_reference(generator, COUNT);
        expect_reference(generator, 1 + (uint32_t)i % 6);
        fdsl_close(generator);
    }
}

/* Tests 1, 5 and 9 threads. With batch = 1, several threads draw parts of one image. */
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
    for (int step = 0; step < 4; step++) /* the calls of one of 2 ranks, with batches of 3 */
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

/* Images, labels and point clouds equal those of the program. */
Test(lib, point_clouds)
{
    enum { SIDE = 40, IMAGES = 5, POINTS = 10000 };
    struct fdsl_config config = small();
    struct fdsl_layout layout = {.size = sizeof layout};
    static uint8_t images[IMAGES * SIDE * SIDE], expected[IMAGES * POINTS * 3 * sizeof(float)];
    static float points[IMAGES * POINTS * 3];
    int64_t labels[IMAGES];
    const struct fdsl_targets targets = {.size = sizeof targets, .labels = labels, .points = points};

    config.preset = "pc-fractaldb-1k";
    config.classes = 3;
    config.res = config.out_res = SIDE;
    config.channels = 1;
    config.dtype = "u8";
    struct fdsl_generator *generator = opened(&config);
    good(fdsl_describe(generator, &layout));
    cr_assert_eq(layout.points, POINTS);
    good(fdsl_generate_targets(generator, NULL, 0, IMAGES, images, &targets, NULL));
    EXPECT(
        0,
        "$P --variant naive --batch 5 --classes 3 --res 40 --preset pc-fractaldb-1k --seed %llu --npy p.npy "
        "--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0 2>&1",
        (unsigned long long)config.seed);
    read_tail("p.npy", expected, sizeof images);
    cr_expect_eq(memcmp(images, expected, sizeof images), 0);
    read_tail("p.points.npy", expected, sizeof points);
    cr_expect_eq(memcmp(points, expected, sizeof points), 0);
    for (int j = 0; j < IMAGES; j++)
        cr_expect_eq(labels[j], j % 3);
    fdsl_close(generator);
}

/* Images and masks equal those of the program. A table of the classes gives the same images again. */
Test(lib, masks_and_class_tables)
{
    enum { SIDE = 41, IMAGES = 5 };
    struct fdsl_config config = small();
    struct fdsl_layout layout = {.size = sizeof layout};
    struct fdsl_class_table table = {.size = sizeof table};
    static uint8_t images[IMAGES * SIDE * SIDE], masks[IMAGES * SIDE * SIDE], again[IMAGES * SIDE * SIDE],
        expected[IMAGES * SIDE * SIDE];
    int64_t labels[IMAGES];
    const struct fdsl_targets targets = {.size = sizeof targets, .labels = labels, .masks = masks};
    const uint64_t backwards[IMAGES] = {4, 3, 2, 1, 0};

    config.preset = "segrcdb";
    config.classes = 7;
    config.out_res = SIDE;
    config.channels = 1;
    config.dtype = "u8";
    config.fit = "crop";
    struct fdsl_generator *generator = opened(&config);
    good(fdsl_describe(generator, &layout));
    cr_assert_eq(layout.mask_bytes, SIDE * SIDE);
    good(fdsl_generate_targets(generator, NULL, 0, IMAGES, images, &targets, NULL));
    EXPECT(
        0,
        "$P --variant naive --batch 5 --classes 7 --res 96 --out-res 41 --fit crop --preset segrcdb --seed "
        "%llu --npy m.npy --min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0 2>&1",
        (unsigned long long)config.seed);
    read_tail("m.npy", expected, sizeof expected);
    cr_expect_eq(memcmp(images, expected, sizeof images), 0);
    read_tail("m.masks.npy", expected, sizeof expected);
    cr_expect_eq(memcmp(masks, expected, sizeof masks), 0);
    for (int j = 0; j < IMAGES; j++)
        cr_expect_eq(labels[j], 0);

    good(fdsl_get_classes(generator, &table));
    cr_expect_str_eq(table.formula, "segrcdb");
    cr_assert(table.count == 7 && table.parameters == 7 && table.ids[0] == 1);
    cr_expect_str_eq(table.names[0], "vertices");
    config.formula = "segrcdb";
    config.preset = NULL;
    config.class_table = &table;
    struct fdsl_generator *copy = opened(&config);
    fdsl_close(generator);
    good(fdsl_generate_list(copy, backwards, IMAGES, again, NULL, NULL));
    for (int j = 0; j < IMAGES; j++)
        cr_expect_eq(memcmp(again + j * SIDE * SIDE, images + (IMAGES - 1 - j) * SIDE * SIDE, SIDE * SIDE),
                     0);
    fdsl_close(copy);
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
        cr_expect_null(strstr(fdsl_error(), " --"), "%s", fdsl_error());                               \
        cr_expect_null(strchr(fdsl_error(), '\n'), "%s", fdsl_error());                                \
    } while (0)

/* Changes fields of a valid configuration, and expects fdsl_open() to refuse it. */
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
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.res = 16385, "res: 16385 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.classes = 1048577, "classes: 1048577 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.preset = "papers",
                       "preset: the built-in classes.cfg: no section [papers]: did you mean [paper]?");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.preset = "paper-1000", config.classes = 1001),
                       "classes: preset paper-1000 has 1000");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.preset_file = "/nonexistent",
                       "preset_file: cannot open '/nonexistent'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/nonexistent",
                       "class_file: cannot open '/nonexistent'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/proc/self/exe", "/proc/self/exe");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/my--set-a/b", "'/my--set-a/b'");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_count = 2, "class_count: it is 2, but class_list is NULL");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_list = twice, "class_count: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.class_list = twice, config.class_count = 2),
                       "class_list: classes 0 and 1");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.class_list = &bad, config.class_count = 1),
                       "class_list[0]: class 3");
    EXPECT_WRONG_FIELD(FDSL_INVALID,
                       (config.class_list = twice, config.class_count = 1, config.class_file = "c.csv"),
                       "class_file: class_list already gives the classes");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.formula = "uji", config.preset = "rcdb"),
                       "preset: rcdb is a preset of the formula rcdb, not of uji; set formula to auto");
    EXPECT_WRONG_FIELD(FDSL_INVALID,
                       (config.formula = "segrcdb", config.preset = "segrcdb-ranges", config.classes = 256),
                       "1 to 255");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.random = "numpy", "random: 'numpy' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.formula = "uji", config.random = "published"),
                       "random: published");
    EXPECT_WRONG_FIELD(FDSL_INVALID,
                       (config.preset = "rcdb-1k", config.random = "published", config.seed = 3), "seed: ");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.out_res = 16385, "out_res: 16385 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.out_res = 97, config.fit = "crop"),
                       "out_res: 97 is larger than res");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.fit = "pad", "fit: 'pad' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.channels = 2, "channels: 2 is neither 1 nor 3");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.layout = "nchv", "layout: 'nchv' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.dtype = "float16", "dtype: 'float16' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.std[0] = 0, "std[0]: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.std[0] = 2, "std[0]: u8 images are not normalised");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.mean[0] = 1, "mean[0]: u8 images are not normalised");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.class_file = "/dev/full", "class_file: '/dev/full' is a device");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.channels = 3, config.std[2] = 1e7),
                       "std[2]: 1e+07 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.mean[0] = NAN, "mean[0]: nan is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.generator = "opm", "generator: 'opm' is unknown");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.generator = "fused",
                       "generator: 'fused' works on CUDA devices, but device is FDSL_CPU; set it to 0");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.generator = "omp", config.device = 0),
                       "generator: 'omp' works on the CPU, but device is 0; set it to FDSL_CPU");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.device = -2, "device: -2");
    EXPECT_WRONG_FIELD(FDSL_UNAVAILABLE, config.device = 4096, "device: ");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.threads = -1, "threads: -1 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.threads = 8193, "threads: 8193 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.threads = 8192, config.res = 16384), /* 2.2 TB */
                       "GB available; lower threads or res");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.batch = 0, "batch: 0 is out of range");
    EXPECT_WRONG_FIELD(FDSL_INVALID, config.batch = (1 << 24) + 1, "batch: 16777217 is out of range");
}

Test(lib, class_tables_are_checked)
{
    static const char *const names[] = {"vertices", "orbits", "noise", "line_width",
                                        "radius",   "oval_x", "oval"};
    static const uint32_t ids[] = {1, 1};
    double values[] = {3, 5, 1, 0, 1, 1, 1, 3, 5, 1, 0, 1, 1, 1};
    const struct fdsl_class_table right = {.size = sizeof right,
                                           .formula = "segrcdb",
                                           .count = 1,
                                           .parameters = 7,
                                           .ids = ids,
                                           .values = values};
    struct fdsl_class_table table = right;
#define EXPECT_WRONG_TABLE(change, message)                                                             \
    table = right;                                                                                      \
    EXPECT_WRONG_FIELD(FDSL_INVALID, (config.formula = "segrcdb", config.class_table = &table, change), \
                       message)
    EXPECT_WRONG_TABLE(table.size = 8, "class_table->size: it is 8");
    EXPECT_WRONG_TABLE(table.formula = "rcdb",
                       "class_table: its formula is 'rcdb', but formula is 'segrcdb'");
    EXPECT_WRONG_TABLE(table.parameters = 9, "class_table: it has 9 parameters; the formula segrcdb has 7");
    EXPECT_WRONG_TABLE(table.names = names, "class_table: name 6 is 'oval'; it must be 'oval_y'");
    EXPECT_WRONG_TABLE(table.values = NULL, "class_table: values is NULL");
    EXPECT_WRONG_TABLE(table.count = 0, "class_table->count: 0 is out of range");
    EXPECT_WRONG_TABLE(table.count = 2, "class_table: classes 0 and 1");
    EXPECT_WRONG_TABLE(values[0] = 0.5, "class_table: class 1: vertices 0.5");
    EXPECT_WRONG_TABLE((values[0] = 3, config.class_file = "x.csv"), "class_table: class_list or class_file");
    struct fdsl_config config = small();
    struct fdsl_generator *generator = opened(&config);
    uint8_t mask = 0;
    const struct fdsl_targets targets = {.size = sizeof targets, .masks = &mask}, old = {.size = 8};
    uint8_t *images = allocated(image_bytes(generator));
    expect_error(FDSL_INVALID, fdsl_generate_targets(generator, NULL, 0, 1, images, &targets, NULL),
                 "masks: the formula uji defines no masks");
    float point = 0;
    const struct fdsl_targets cloud = {.size = sizeof cloud, .points = &point};
    expect_error(FDSL_INVALID, fdsl_generate_targets(generator, NULL, 0, 1, images, &cloud, NULL),
                 "points: the images have no point clouds");
    expect_error(FDSL_INVALID, fdsl_generate_targets(generator, NULL, 0, 1, images, &old, NULL),
                 "targets->size: it is 8");
    expect_error(FDSL_INVALID, fdsl_get_classes(generator, NULL), "table: it is NULL");
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}

/* Messages name fields, but a file may have the name of an option. */
Test(lib, file_names_in_messages_are_unchanged)
{
    static const char *const names[] = {"/a --out-res b", "/don't --out-res", "/x (--fit)",
                                        "--class-file",   "/a's (--fit",      "-- --mean"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        struct fdsl_config config = small();
        struct fdsl_generator *generator;
        char expected[96];
        config.class_file = names[i];
        snprintf(expected, sizeof expected, "class_file: cannot open '%s': No such file", names[i]);
        cr_expect_eq(fdsl_open(&config, &generator), FDSL_INVALID);
        cr_expect(strncmp(fdsl_error(), expected, strlen(expected)) == 0, "%s", fdsl_error());
    }
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
    expect_error(FDSL_INVALID, fdsl_generate(generator, UINT64_MAX, 2, images, labels, NULL),
                 "first: image 18446744073709551615 and the following 1 exceed");
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
    expect_error(FDSL_INVALID, fdsl_copy(FDSL_CPU, images, labels, 8, images), "stream: it must be NULL");
    expect_error(FDSL_INVALID, fdsl_wait(FDSL_CPU, images), "stream: it must be NULL");
    expect_error(FDSL_INVALID, fdsl_order(FDSL_CPU, images, NULL), "before: it must be NULL");
    expect_error(FDSL_INVALID, fdsl_order(FDSL_CPU, NULL, images), "after: it must be NULL");
    good(fdsl_wait(FDSL_CPU, NULL));
    good(fdsl_order(FDSL_CPU, NULL, NULL));
    good(fdsl_copy(FDSL_CPU, images, labels, 8, NULL));
    fdsl_free(FDSL_CPU, NULL);
    fdsl_close(NULL);
    fdsl_free(FDSL_CPU, images);
    fdsl_close(generator);
}

Test(lib, a_missing_device_is_one_error)
{
    enum { MISSING = 4096 };
    struct fdsl_config config = small();
    struct fdsl_generator *generator;
    char there[8] = "", first[256];
    void *memory;
    config.device = MISSING;
    cr_expect_eq(fdsl_open(&config, &generator), FDSL_UNAVAILABLE);
    snprintf(first, sizeof first, "%s", fdsl_error());
    expect_error(FDSL_UNAVAILABLE, fdsl_alloc(MISSING, 8, &memory), first);
    expect_error(FDSL_UNAVAILABLE, fdsl_copy(MISSING, there, there, 8, NULL), first);
    expect_error(FDSL_UNAVAILABLE, fdsl_wait(MISSING, NULL), first);
    expect_error(FDSL_UNAVAILABLE, fdsl_order(MISSING, NULL, there), first);
    good(fdsl_order(MISSING, NULL, NULL)); /* a stream need not wait for itself */
}

static void *fail_elsewhere(void *text)
{
    cr_expect_str_eq(fdsl_error(), "", "the error of another thread is returned");
    fdsl_generate(NULL, 0, 1, NULL, NULL, NULL);
    snprintf(text, 256, "%s", fdsl_error());
    return NULL;
}

Test(lib, each_thread_has_its_own_error)
{
    char there[256];
    pthread_t thread;
    expect_error(FDSL_INVALID, fdsl_wait(-7, NULL), "device: -7");
    cr_assert_eq(pthread_create(&thread, NULL, fail_elsewhere, there), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_str_eq(there, "generator: it is NULL");
    cr_expect_not_null(strstr(fdsl_error(), "device: -7"));
}
