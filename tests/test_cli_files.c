/* Tests the program's output files and their contents. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "program.h"

TestSuite(cli, .init = start, .fini = stop, .timeout = 60);

/* ---- Destinations of rows and pictures ---- */

Test(cli, refuses_to_write_where_it_cannot)
{
    static const char foreign[] = "schema,colour\nother/1,blue\n";
    static const struct refusal refusals[] = {
        {"--out nowhere/rows.csv", "its folder does not exist; create it with: mkdir -p 'nowhere'"},
        {"--samples-out nowhere/rows.csv", "its folder does not exist"},
        {"--out file/rows.csv", "file/rows.csv cannot be used: Not a directory"},
        {"--out .", ". is a folder"},
        {"--out rows/", "'rows/' names no file"},
        {"--out=", "--out: the value is empty"},
        {"--out", "--out needs a value"},
        {"--out /dev/full", "/dev/full is a device or pipe; name a regular file"},
        {"--out foreign.csv", "foreign.csv has other columns (column 2 is 'colour', not 'time_utc')"},
        {"--samples-out foreign.csv", "foreign.csv has other columns"},
        {"--out dangling.csv", "dangling.csv is a link to a file that does not exist"},
        {"--write-classes nowhere/c.csv", "its folder does not exist"},
        {"--write-classes /dev/full", "is not a regular file"},
#ifdef HAVE_PNG
        {"--png file", "'file' is not a folder"},
        {"--png nowhere/pictures", "its folder does not exist; create it with: mkdir -p 'nowhere'"},
        {"--png /proc/pictures", "cannot create folder '/proc/pictures'"},
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
        SKIP("permissions do not restrict root");
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
    cr_expect(strncmp(both, first, bytes) == 0, "the first row has changed");
    expect_cells(both, 1, "seed=0");
    expect_cells(both, 2, "seed=7");
    free(first);
    free(both);
    cr_expect(count_files() == 1);
}

Test(cli, a_row_has_the_parameters_of_the_run)
{
    setenv("SLURM_JOB_ID", "123", 1);
    run_well("--variant naive --format csv --res 24 --batch 3 --vertices 30 --orbits 5 --formula visualatom "
             "--seed 9 --instance 11 --noise 1.5 --freq2 2 --warmups 2 --warmup-time 0 --min-samples 4 "
             "--min-time 0 --max-time 0");
    expect_cells(
        out, 1,
        "schema=synth/8;job_id=123;workload=synth;variant=naive;driver=;cuda=;ranks=1;rank=0;threads=1");
    expect_cells(out, 1,
                 "batch=3;res=24;vertices=30;orbits=5;seed=9;formula=visualatom;instance=11;noise=1.5");
    expect_cells(out, 1, "line_width=0.002;freq1=5;freq2=2;warmups=3;samples=4;items=3;classes=0;preset=");
    expect_cells(out, 1, "verified=no;wrong=;throttled=;cache=;timed_stages=clear+draw");
    expect_cells(out, 1, "dtype=u8;channels=1;layout=nchw;out_res=24;fit=;mean=");
    double median = number(out, 1, "time_median_s");
    cr_expect(median > 0 && number(out, 1, "time_min_s") <= median);
    cr_expect(median <= number(out, 1, "time_p95_s"));
    cr_expect(number(out, 1, "time_p95_s") <= number(out, 1, "time_p99_s"));
    double rate = number(out, 1, "items_per_s") * median;
    cr_expect(rate > 2.999 && rate < 3.001, "%g", rate);
    double bytes = number(out, 1, "bytes_per_s") * median / (3 * (24 * 24 + 8)); /* 8 bytes for the label */
    cr_expect(bytes > 0.999 && bytes < 1.001, "%g", bytes);
}

Test(cli, samples_out_has_one_row_per_sample)
{
    run_well("--variant " VARIANTS " " TINY " --min-samples 7 --out rows.csv --samples-out samples.csv");
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
        cr_expect(fastest == number(rows, v, "time_min_s"), "the row's minimum is not that of its samples");
        expected += count;
    }
    cr_expect(count_of(samples, "\n") == expected + 1);
    free(rows);
    free(samples);
}

/* A limit on the size of files has the effect of a full disk. */
Test(cli, a_row_that_does_not_fit_leaves_the_file_as_it_was)
{
    size_t bytes;
    run_well(NAIVE " --out rows.csv");
    char *before = get("rows.csv", &bytes);
    how.file_bytes_max = bytes + 20;
    run(NAIVE " --out rows.csv");
    cr_expect(status == 1, "exit %d: %s", status, err);
    cr_expect(strstr(err, "rows.csv: a row could not be written (File too large)"), "%s", err);
    cr_expect(strstr(err, "the rows before it are complete"), "%s", err);
    expect_file("rows.csv", before);
    how.file_bytes_max = 20;
    run(NAIVE " --out new.csv");
    cr_expect(status == 1 && strstr(err, "new.csv: a row could not be written (File too large)\n"), "%s",
              err);
    cr_expect(access("new.csv", F_OK) != 0, "an empty file remains");
    how.file_bytes_max = 0;
    run_well(NAIVE " --out rows.csv"); /* without the limit, rows are appended again */
    free(before);
}

Test(cli, rows_before_one_that_does_not_fit_stay_complete)
{
    if (VARIANT_COUNT < 2)
        SKIP("needs two variants, but this build has one: no OpenMP");
    size_t bytes;
    run_well(NAIVE " --out one.csv");
    free(get("one.csv", &bytes));
    how.file_bytes_max = bytes + 100; /* the next row may be slightly longer, but not by this much */
    run("--variant " VARIANTS " " TINY " --out rows.csv");
    cr_expect(status == 1, "exit %d: %s", status, err);
    cr_expect(strstr(err, "could not be written"), "%s", err);
    char *rows = get("rows.csv", NULL);
    cr_expect(count_of(rows, "\n") == 2 && rows[strlen(rows) - 1] == '\n');
    cr_expect_str_eq(value(rows, 1, "variant"), "naive");
    cr_expect_str_eq(value(rows, 1, "verified"), "no", "the row is incomplete");
    free(rows);
}

Test(cli, a_write_error_on_stdout_is_a_failure)
{
    static const char *const commands[] = {
        "--help",
        "--list",
        "--version",
        "--env",
        NAIVE,
        NAIVE " --format csv",
#ifdef HAVE_JANSSON
        NAIVE " --format json",
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
    cr_expect(lines_of_file("rows.csv") == 2, "the row is not written to --out");
}

/* ---- Right results ---- */

Test(cli, verify_fills_its_columns)
{
    run_well("--variant " VARIANTS " " TINY " --batch 5 --verify --format csv");
    for (size_t v = 1; v <= VARIANT_COUNT; v++)
        expect_cells(out, v, "verified=yes;wrong=0");
    run_well("--variant " VARIANTS " " TINY " --format csv");
    for (size_t v = 1; v <= VARIANT_COUNT; v++)
        expect_cells(out, v, "verified=no;wrong=");
}

#ifdef HAVE_XXHASH

/* Returns the digest of a run's images. The result is valid until the second call after this one. */
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

Test(cli, the_digest_depends_only_on_the_images)
{
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE));
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE " --min-samples 9 --warmups 4"));
    cr_expect_str_eq(digest_of(NAIVE), digest_of(NAIVE " --seed 0 --instance 0"));
    /* At this size, a larger --radius in NAIVE would make all images black and their digests equal. */
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --radius 1000"));
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --seed 1"));
    cr_expect_str_neq(digest_of(NAIVE), digest_of(NAIVE " --instance 2"));
    cr_expect_str_neq(digest_of(NAIVE " --seed 1 --instance 2"), digest_of(NAIVE " --instance 2"));
    cr_expect_str_neq(digest_of(NAIVE " --batch 1"), digest_of(NAIVE " --batch 1 --instance 1"));
}

/* Rounding to p significant bits changes a value by at most the 2^p-th part of it, and on average by more
 * than a quarter of that. The digest is that of the rows after all steps. */
Test(cli, rows_of_ops_have_the_errors_and_the_digest_of_the_results)
{
    static const struct {
        const char *to;
        double most;
    } types[] = {{"f32", 0},      {"f16", 0x1p-11},  {"bf16", 0x1p-9},
                 {"fp8", 0x1p-4}, {"mxfp4", 0x1p-2}, {"nvfp4", 0x1p-2}};
    char digests[COUNT_OF(types) + 2][64];
    for (size_t i = 0; i < COUNT_OF(digests); i++) {
        const size_t type = i < COUNT_OF(types) ? i : 1;
        const double most = types[type].most;
        char command[256];
        snprintf(command, sizeof command,
                 "--variant ops-naive,ops-omp --rows 500 --dim 64 --loops 1 --warmups 0 --warmup-time 0 "
                 "--format csv --to %s --steps %s --seed %d",
                 types[type].to, i == COUNT_OF(types) ? "compact,convert,hash" : "convert",
                 i == COUNT_OF(types) + 1);
        run_well(command);
        snprintf(digests[i], sizeof digests[i], "%.63s", value(out, 1, "digest"));
        cr_expect_str_eq(value(out, 2, "digest"), digests[i], "%s", command);
        for (size_t row = 1; row <= 2; row++) {
            double mean = strtod(value(out, row, "error_mean"), NULL);
            double largest = strtod(value(out, row, "error_max"), NULL);
            cr_expect(mean <= most && mean >= most / 4 && largest >= mean, "%s: %g, %g", command, mean,
                      largest);
        }
        for (size_t k = 0; k < i; k++)
            cr_expect_str_neq(digests[i], digests[k], "%s", command);
    }
}

#endif

#ifdef HAVE_PNG
/* The random numbers of an image depend only on seed, class and instance. So an image is the same in batches
 * that begin with different instances. */
Test(cli, images_do_not_depend_on_the_first_instance)
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
    cr_expect_eq(lines_of_file("whole/index.tsv"), 7);
}
#else
Test(cli, pictures_are_refused_by_a_build_without_them)
{
    expect_failure(4, "libpng", NAIVE " --png pictures");
}
#endif

#ifdef HAVE_PNG
Test(cli, pictures_show_the_output)
{
    run_well(NAIVE " --out-res 20 --png small --sheet sheet.png");
    size_t bytes;
    char *image = get("small/class-0_instance-0.png", &bytes);
    cr_assert(bytes > 24 && memcmp(image + 12, "IHDR\0\0\0\x14\0\0\0\x14", 12) == 0, "not 20 x 20 pixels");
    free(image);
    char *sheet = get("sheet.png", &bytes); /* two images with borders of 2 pixels */
    cr_assert(bytes > 24 && memcmp(sheet + 12, "IHDR\0\0\0\x2e\0\0\0\x18", 12) == 0, "not 46 x 24 pixels");
    free(sheet);
}
#endif

/* ---- NumPy files ---- */

/* An independent implementation of the output conversion, in Python. canvas.npy has the images before
 * conversion, and out.npy the converted images. Python's struct rounds to half precision as IEEE 754 defines.
 * The classes of the images are 7, 4000000000 and 7. */
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

Test(cli, npy_files_have_the_batch_and_its_labels)
{
    static const struct {
        const char *arguments, *expected; /* type, shape, conversion, means, deviations */
    } outputs[] = {
        {"--channels 3", "('|u1', (3, 3, 32, 32), lambda gray, f: gray, [0] * 3, [1] * 3)"},
        {"--channels 3 --layout nhwc", "('|u1', (3, 32, 32, 3), lambda gray, f: gray, [0] * 3, [1] * 3)"},
        {"--dtype f32 --channels 3 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225",
         "('<f4', (3, 3, 32, 32), lambda gray, f: f, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])"},
        {"--dtype f16 --channels 3 --layout nhwc --mean 0.5 --std 0.25",
         "('<f2', (3, 32, 32, 3), lambda gray, f: rounded('e', f), [0.5] * 3, [0.25] * 3)"},
        {"--dtype bf16 --channels 3 --mean 0.1",
         "('<u2', (3, 3, 32, 32), lambda gray, f: bf16(f), [0.1] * 3, [1] * 3)"},
    };
    put_two_classes();
    run_well(NAIVE_MIXED " --class two.csv --batch 3 --npy canvas.npy");
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        put("expected.py", outputs[i].expected);
        run(NAIVE_MIXED " --class two.csv --batch 3 --npy out.npy %s", outputs[i].arguments);
        cr_assert(status == 0, "%s: %s", outputs[i].arguments, err);
        bool bf16 = strstr(outputs[i].arguments, "bf16");
        cr_expect(bf16 == !!strstr(err, "out.npy stores bfloat16 as <u2"), "%s", err);
        check_with_python(npy_script, "out.npy");
    }
    cr_expect(count_files() == 6, "other files remain");
}

Test(cli, numpy_reads_the_file)
{
    put_two_classes();
    run_well(NAIVE_MIXED " --class two.csv --batch 3 --dtype f16 --channels 3 --out-res 9 --npy out.npy");
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

Test(cli, each_of_several_variants_writes_a_numpy_file)
{
    if (VARIANT_COUNT < 2)
        SKIP("needs two variants, but this build has one: no OpenMP");
    size_t bytes, other_bytes;
    run_well("--variant " VARIANTS " " TINY " --dtype f32 --out-res 9 --npy out.npy");
    char *image = get("naive/out.npy", &bytes), *other = get("omp/out.npy", &other_bytes);
    cr_expect(bytes == 128 + 2 * 9 * 9 * 4 && bytes == other_bytes && memcmp(image, other, bytes) == 0);
    free(image);
    free(other);
    free(get("omp/out.labels.npy", &bytes));
    cr_expect(bytes == 128 + 2 * 8);
}

#define OLD_NPY "\x93NUMPY of an earlier run"

static void put_old(void)
{
    put("out.npy", OLD_NPY);
    put("out.labels.npy", OLD_NPY);
}

/* A limit on the size of files has the effect of a full disk. */
Test(cli, a_numpy_file_that_does_not_fit_is_removed)
{
    put_old();
    how.file_bytes_max = 1000;
    expect_failure(1, "out.npy cannot be written: File too large", NAIVE " --npy out.npy");
    expect_file("out.npy", OLD_NPY);
    cr_expect(count_files() == 2);
}

/* The labels have more bytes than the images, so only the labels exceed the limit. */
Test(cli, labels_that_do_not_fit_leave_both_files_as_they_were)
{
    put_old();
    how.file_bytes_max = 1000;
    expect_failure(1, "out.labels.npy cannot be written: File too large",
                   NAIVE " --batch 200 --out-res 1 --npy out.npy");
    expect_file("out.npy", OLD_NPY);
    expect_file("out.labels.npy", OLD_NPY);
    cr_expect(count_files() == 2);
}

/* Returns whether the folder has a temporary file. */
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

Test(cli, a_signal_leaves_no_incomplete_file)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    put_old();
    for (size_t i = 0; i < COUNT_OF(signals); i++) {
        pid_t pid = start_run(
            "--variant naive --batch 4096 --res 32 --vertices 1 --orbits 1 --out-res 64 --dtype f32 "
            "--channels 3 --npy out.npy",
            "/dev/null");
        while (!any_temporary())
            usleep(1000);
        expect_ended_by(pid, signals[i]);
        expect_file("out.npy", OLD_NPY);
        cr_expect(count_files() == 2);
    }
}

/* Outputs overwrite only empty files and files of their own kind. */
Test(cli, other_files_are_not_overwritten)
{
    static const struct {
        const char *option, *name, *words;
    } outputs[] = {
        {"--npy", "a.npy", "a.npy exists and is not a NumPy file; choose another file, or remove it"},
        {"--npy", "b.npy", "b.npy exists without b.labels.npy, so another program may have written it"},
        {"--npy", "c.npy", "c.labels.npy exists and is not a NumPy file"},
        {"--write-classes", "a.csv", "a.csv exists and is not a list of classes"},
#ifdef HAVE_PNG
        {"--sheet", "a.png", "a.png exists and is not a PNG picture"},
        {"--sheet", "b.png", "b.png exists without index.tsv, so another program may have written it"},
#endif
    };
    put("a.npy", "mine");
    put("b.npy", OLD_NPY);
    put("c.npy", OLD_NPY);
    put("c.labels.npy", "mine");
    put("a.csv", "class,vertices,mine\n");
    put("a.png", "mine");
    put("b.png", "\x89PNG\r\n\x1a\n, mine");
    int files = count_files();
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        char *before = get(outputs[i].name, NULL);
        run(NAIVE " %s %s", outputs[i].option, outputs[i].name);
        expect_error(2, outputs[i].words, outputs[i].name);
        expect_file(outputs[i].name, before);
        free(before);
    }
    cr_expect(count_files() == files);

    /* If there are several variants, each one writes its own file. These files must be checked too. */
    cr_assert(mkdir("naive", 0777) == 0);
    put("naive/a.npy", "mine");
    cr_assert(remove("a.npy") == 0);
    run("--variant " VARIANTS " " TINY " --npy a.npy");
    cr_expect(status == 1 || status == 2, "%d", status);
    cr_expect(strstr(err, "naive/a.npy exists and is not a NumPy file"), "%s", err);
    expect_file("naive/a.npy", "mine");
}

Test(cli, files_of_an_earlier_run_are_replaced)
{
    put("empty.npy", "");
    put("empty.csv", "");
    for (int i = 0; i < 2; i++) {
        run_well(NAIVE " --npy a.npy --write-classes a.csv");
        run_well(NAIVE " --npy empty.npy --write-classes empty.csv");
#ifdef HAVE_PNG
        run_well(NAIVE " --sheet a.png --png folder");
#endif
    }
}
