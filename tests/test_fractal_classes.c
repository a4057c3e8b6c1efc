/* Tests the classes of iterated function systems: the search, the built-in lists, 1p-frac, class files.
 *
 * FDSL_RECORD=1 searches all classes anew and writes configs/fractaldb.bin (about four minutes on two cores):
 *
 *     FDSL_RECORD=1 build/tests/test_fractal_classes -j1 --filter 'fractal_classes/the_list*' */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/file.h"
#include "folder.h"
#include "must.h"
#include "shell.h"
#include "synth/class.h"
#include "synth/synth.h"
#include "synth/ifs_classes.h"
#include "synth/published.h"

TestSuite(fractal_classes, .timeout = 1200);

extern const struct ifs_list fractaldb_bin;

static const struct formula_preset preset = {.name = "fractaldb"};

static struct class_row *rows_of(uint32_t count)
{
    struct class_row *rows = malloc(count * sizeof *rows);
    cr_assert_not_null(rows);
    must(ifs_rows(&preset, count, rows));
    return rows;
}

/* ---- Search and built-in lists ---- */

/* The hash of the bytes of the 1000 published files, consecutively. */
#define PUBLISHED_HASH UINT64_C(0x2a6e8d65fefc0c00)

Test(fractal_classes, the_built_in_classes_give_the_bytes_of_the_published_files)
{
    struct class_row *rows = rows_of(1000);
    uint64_t hash = FNV_BEGIN;
    for (uint32_t c = 0; c < 1000; c++) {
        char text[PUBLISHED_TEXT_BYTES];
        struct class_row again = {.id = c};
        size_t length = ifs_text_write(&rows[c], IFS_MAP_VALUES, text, sizeof text);
        hash = fnv_add(hash, text, length);
        must(ifs_text_read("again", text, IFS_MAP_VALUES, &again));
        cr_assert_arr_eq(&again, &rows[c], sizeof again, "class %u", c);
    }
    cr_assert_eq(hash, PUBLISHED_HASH, "0x%llx", (unsigned long long)hash);
    free(rows);
}

Test(fractal_classes, the_search_finds_the_published_classes_with_any_number_of_threads)
{
    enum { COUNT = 25 };
    struct class_row *rows = rows_of(COUNT);
    for (int threads = 1; threads <= 5; threads += 2) {
        struct ifs_found found[COUNT];
        struct class_row row;
        must(ifs_search(&(struct ifs_search){1, COUNT, IFS_THRESHOLD, threads, true}, found));
        for (uint32_t c = 0, candidate = 0; c < COUNT; c++) {
            candidate += fractaldb_bin.gaps[c];
            ifs_row(&found[c].system, &row);
            cr_assert_arr_eq(&row, &rows[c], sizeof row, "class %u, %d threads", c, threads);
            cr_assert_eq(found[c].candidate, candidate, "class %u", c);
        }
    }
    free(rows);
}

Test(fractal_classes, the_search_has_other_seeds_and_thresholds_and_names_its_limits)
{
    struct ifs_found low[8], high[2];
    must(ifs_search(&(struct ifs_search){7, 8, 0.12, 2, true}, low));
    must(ifs_search(&(struct ifs_search){7, 2, 0.21, 2, true}, high));
    cr_expect_lt(low[7].candidate, high[1].candidate, "more candidates reach a lower threshold");
    static const double wrong[] = {0.009, 0.36, -1, NAN, INFINITY};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        cr_assert_eq(ifs_search(&(struct ifs_search){1, 1, wrong[i], 1, true}, low), STATUS_USAGE);
        cr_expect(strstr(status_text(), "threshold"), "%s", status_text());
    }
}

static const struct formula_preset *one_preset(void)
{
    return formula_preset(formulas[FORMULA_FRACTALDB], "1p-frac");
}

/* Finds all classes and writes configs/fractaldb.bin. */
static void record_list(void)
{
    struct ifs_list *list = calloc(1, sizeof *list);
    struct ifs_found *found = calloc(IFS_LIST_COUNT, sizeof *found);
    struct ifs_system system;
    struct twister stream;
    uint64_t candidate = 0;
    uint32_t maps = 0;
    cr_assert(list && found);
    must(ifs_search(&(struct ifs_search){1, IFS_LIST_COUNT, IFS_THRESHOLD, 2, false}, found));
    twister_seed(&stream, 1);
    for (uint32_t c = 0; c < IFS_LIST_COUNT; c++) {
        list->gaps[c] = (uint16_t)(found[c].candidate - (c ? found[c - 1].candidate : 0));
        for (; candidate < found[c].candidate; candidate++) {
            ifs_draw_candidate(&stream, &system);
            twister_skip(&stream, IFS_SEARCH_WORDS);
        }
        if (c % IFS_LIST_STEP == 0)
            memcpy(list->states[c / IFS_LIST_STEP], &stream, sizeof stream);
        for (uint32_t m = 0; c < IFS_LIST_BEGIN && m < found[c].system.maps; m++)
            memcpy(list->maps[maps++], found[c].system.map[m], sizeof *list->maps);
        if (c < IFS_LIST_BEGIN)
            list->counts[c] = (uint8_t)found[c].system.maps;
        if (c == 9999 || c == 20999) {
            uint64_t hash = FNV_BEGIN;
            for (uint32_t i = 0; i <= c; i++)
                hash = fnv_add(hash, &found[i].system, sizeof found[i].system);
            fprintf(stderr, "hash of %u classes: 0x%016llx\n", c + 1, (unsigned long long)hash);
        }
    }
    cr_assert_eq(maps, IFS_LIST_MAPS, "%u", maps);
    struct class_row *ones = calloc(IFS_LIST_BEGIN, sizeof *ones);
    must(ifs_draw_ones(&ifs_one_frac, one_preset()->ifs, IFS_LIST_BEGIN, ones, list->attempts));
    free(ones);
    must(file_write_atomic("configs/fractaldb.bin", list, sizeof *list));
    free(list);
    free(found);
}

/* ---- 1p-frac ---- */

/* Returns the singular values of the matrix of a map, the larger one first. */
static void singular_values(const double *map, double values[2])
{
    double a = map[0], b = map[1], c = map[2], d = map[3];
    double sum = a * a + b * b + c * c + d * d, determinant = fabs(a * d - b * c);
    double spread = sqrt(fmax(sum * sum - 4 * determinant * determinant, 0));
    values[0] = sqrt((sum + spread) / 2);
    values[1] = sqrt(fmax(sum - spread, 0) / 2);
}

Test(fractal_classes, base_systems_of_1p_frac_have_the_sum_of_singular_values)
{
    double least = 10, most = 0;
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct ifs_system system;
        double sum = 0, shares = 0, values[2];
        ifs_draw_one(&(struct ifs_one){seed, 3.5, 0}, 3, 0, &system);
        cr_assert_eq(system.maps, 2);
        for (int m = 0; m < 2; m++) {
            singular_values(system.map[m], values);
            cr_assert(values[0] <= 1 + 1e-6 && values[1] <= values[0], "seed %d: %g, %g", (int)seed,
                      values[0], values[1]);
            sum += values[0] + 2 * values[1];
            shares += system.map[m][6];
            cr_assert(fabs(system.map[m][4]) <= 1 && fabs(system.map[m][5]) <= 1);
        }
        cr_assert_float_eq(shares, 1, 1e-12);
        least = fmin(least, sum);
        most = fmax(most, sum);
    }
    cr_expect(least > 3.4 - 1e-6 && least < 3.42 && most > 3.58 && most < 3.6 + 1e-6, "%g .. %g", least,
              most);
}

Test(fractal_classes, classes_of_1p_frac_vary_every_coefficient_by_delta)
{
    struct ifs_system base, system;
    double low = 2, high = 0, sum = 0;
    uint32_t count = 0;
    ifs_draw_one(&(struct ifs_one){0, 3.5, 0}, 0, 0, &base);
    for (uint32_t id = 0; id < 500; id++) {
        ifs_draw_one(&(struct ifs_one){0, 3.5, 0.1}, id, id % 2, &system);
        for (int m = 0; m < 2; m++) {
            cr_assert_eq(system.map[m][6], base.map[m][6]);
            for (int i = 0; i < 6; i++, count++) {
                double factor = system.map[m][i] / base.map[m][i];
                low = fmin(low, factor);
                high = fmax(high, factor);
                sum += factor;
            }
        }
    }
    cr_expect(low > 0.9 && low < 0.9005 && high < 1.1 && high > 1.0995, "%g .. %g", low, high);
    cr_expect_float_eq(sum / count, 1, 0.004); /* five standard deviations: 5 * 0.0577 / sqrt(6000) */
}

Test(fractal_classes, classes_of_1p_frac_are_the_first_bright_attempts)
{
    enum { COUNT = 80 };
    struct class_row drawn[COUNT], listed[COUNT];
    uint8_t attempts[COUNT], most = 0;
    must(ifs_draw_ones(&ifs_one_frac, one_preset()->ifs, COUNT, drawn, attempts));
    must(ifs_one_rows(one_preset(), COUNT, listed));
    for (uint32_t c = 0; c < COUNT; c++) {
        cr_assert_arr_eq(&drawn[c], &listed[c], sizeof *drawn, "class %u", c);
        cr_assert_eq(attempts[c], fractaldb_bin.attempts[c]);
        most = attempts[c] > most ? attempts[c] : most;
    }
    cr_assert_gt(most, 0, "no class needs a second attempt");
}

/* ---- Class files ---- */

#define MAP "0.1,0.2,0.3,0.4,0.5,0.6,0.5"

Test(fractal_classes, bad_class_files_are_refused_with_their_line)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "line 1: the file is empty"},
        {"\n\n", "line 1: the file is empty"},
        {MAP "\n0.1,0.2\n", "line 2: 2 values, not 7"},
        {MAP ",1\n", "line 1: more than 7 values"},
        {MAP "\n\n" MAP "\n", "line 2: the line is blank"},
        {"nan,0.2,0.3,0.4,0.5,0.6,0.5\n", "'nan' is not a number"},
        {"0.1,inf,0.3,0.4,0.5,0.6,0.5\n", "'inf' is not a number"},
        {"0.1,1e999,0.3,0.4,0.5,0.6,0.5\n", "'1e999' is not a finite number"},
        {"0.1,,0.3,0.4,0.5,0.6,0.5\n", "'' is not a number"},
        {"0.1,0x1,0.3,0.4,0.5,0.6,0.5\n", "'0x1' is not a number"},
        {"0.1,--1,0.3,0.4,0.5,0.6,0.5\n", "'--1' is not a finite number"},
        {MAP "\n" MAP "\n" MAP "\n" MAP "\n" MAP "\n" MAP "\n" MAP "\n" MAP "\n",
         "line 8: a class has at most 7 maps"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[512];
        struct class_row row = {.id = 0};
        snprintf(text, sizeof text, "%s", cases[i].text);
        cr_assert_eq(ifs_text_read("file", text, IFS_MAP_VALUES, &row), STATUS_USAGE, "case %zu", i);
        cr_expect(strstr(status_text(), cases[i].message) && strstr(status_text(), "file"), "case %zu: %s", i,
                  status_text());
    }
    char windows[] = MAP "\r\n" MAP "\r\n\r\n";
    struct class_row row = {.id = 5};
    must(ifs_text_read("file", windows, IFS_MAP_VALUES, &row));
    cr_expect(row.id == 5 && row.value[0] == 2 && row.value[14] == 0.5 && row.value[15] == 0);
}

/* ---- The command line ---- */

TestSuite(fractal_files, .init = shell_set_up, .fini = shell_tear_down, .timeout = 900);

Test(fractal_files, class_files_survive_every_way_of_reading_and_writing)
{
    EXPECT(0,
           "$P --preset ofdb-21k --classes 12 --write-classes list.csv && "
           "$P --preset fractaldb-1k --classes 12 --write-classes dir --class-format published && "
           "$P --formula fractaldb --class dir --write-classes again.csv && cmp list.csv again.csv && "
           "$P --preset fractaldb --class again.csv --write-classes dir2 --class-format published && "
           "diff -r dir dir2 && sed -i 's/$/\\r/' dir2/*.csv && "
           "$P --preset fractaldb --class dir2 --write-classes dir3 --class-format published && "
           "diff -r dir dir3 && "
           "$P --formula fractaldb --class dir/00007.csv --write-classes one.csv && grep -q '^7,' one.csv && "
           "$P --preset fractaldb-search --classes 12 --write-classes found.csv && cmp list.csv found.csv && "
           "$P --classes 3 --write-classes uji.csv && " /* a pipe, whose formula cannot be looked up */
           "cat uji.csv | $P --class /dev/stdin --write-classes piped.csv && cmp uji.csv piped.csv");
    put_text("search.cfg", "[mine]\nseed = 7\nthreshold = 0.12\n");
    EXPECT(
        0,
        "$P --formula fractaldb --preset-file search.cfg --preset mine --classes 3 --write-classes a.csv && "
        "! cmp -s a.csv list.csv && test $(wc -l < a.csv) = 4");
    put_text("search.cfg", "[mine]\nseed = 4294967296\nthreshold = 0.12\n");
    EXPECT_PRINTS(2, "seed",
                  "$P --formula fractaldb --preset-file search.cfg --preset mine --classes 3 "
                  "--write-classes a.csv");
    put_text("search.cfg", "[mine]\nseed = 4\nthreshold = 0.5\n");
    EXPECT_PRINTS(2, "threshold",
                  "$P --formula fractaldb --preset-file search.cfg --preset mine --classes 3 "
                  "--write-classes a.csv");
}

Test(fractal_files, reports_and_lists_refuse_outputs_that_they_would_not_write)
{
    EXPECT_PRINTS(2, "--png has no effect with --describe and without --variant",
                  "$P --preset fractaldb-1k --classes 2 --describe --png out");
    EXPECT_PRINTS(2, "--out has no effect with --describe",
                  "$P --preset fractaldb-1k --classes 2 --describe --out rows.csv");
    EXPECT_PRINTS(2, "--sheet has no effect with --write-classes",
                  "$P --preset fractaldb-1k --classes 2 --write-classes list.csv --sheet sheet.png");
    EXPECT(2, "$P --preset fractaldb-1k --classes 2 --describe --write-classes list.csv");
    EXPECT(0, "test ! -e list.csv && $P --preset fractaldb-1k --classes 2 --write-classes list.csv");
}

Test(fractal_files, bad_classes_are_refused_with_their_file)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {MAP "\n", "maps 1 is not in 2 .. 7"},
        {MAP "\n" MAP "\n" MAP "\n", "have the sum 1.5"},
        {MAP "\n0.1,0.2,0.3,0.4,0.5,0.6,-0.5\n", "is not in 0 .. 1"},
        {MAP "\n1e7,0.2,0.3,0.4,0.5,0.6,0.5\n", "a2"},
        {MAP "\nnan,0.2,0.3,0.4,0.5,0.6,0.5\n", "line 2"},
        {"x," MAP "\n", "column 1 of the header is 'x'"},
        {"", "the file is empty"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_text("00003.csv", cases[i].text);
        EXPECT_PRINTS(2, cases[i].words, "$P --formula fractaldb --class 00003.csv --write-classes a.csv");
        EXPECT_OUT("00003.csv");
    }
    EXPECT_PRINTS(2, "the built-in list has 21000 classes",
                  "$P --preset fractaldb --classes 21001 --write-classes a.csv");
    EXPECT_PRINTS(2, "has 1000 classes", "$P --preset fractaldb-1k --classes 1001 --write-classes a.csv");
}

/* A preset that does not exist must not be taken for the default. */
Test(fractal_files, the_preset_of_listed_classes_exists)
{
    EXPECT(0, "$P --preset 1p-frac --classes 2 --write-classes list.csv");
    EXPECT_PRINTS(2, "'1p-farc' is not a preset of fractaldb",
                  "$P --class list.csv --preset 1p-farc --variant omp --batch 2 --loops 1");
    EXPECT_PRINTS(2, "'nope' is not a preset of fractaldb",
                  "$P --class list.csv --formula fractaldb --preset nope --describe");
    EXPECT_PRINTS(0, "1 orbits per class of 100000 points",
                  "$P --class list.csv --preset 1p-frac --describe");
    EXPECT_PRINTS(0, "25 orbits per class of 200000 points", "$P --class list.csv --describe");
}

#define PREPARE "$P --from synth --store imagefolder --names published --prepare "

Test(fractal_files, copies_of_published_sets_are_verified)
{
    EXPECT(0, PREPARE
           "patches --preset fractaldb-1k --classes 3 --samples 330 && "
           "test -f patches/00002/00002_24_count_0_flip3.png && "
           "test -f patches/00002/00002_01_count_1_flip1.png && "
           "$P --preset fractaldb-1k --classes 5 --write-classes patches/csv3 --class-format published");
    EXPECT_PRINTS(0, "330 of 330 images equal", "$P verify-published patches --preset fractaldb-1k");
    EXPECT_OUT("5 of 5 class files equal", "pixels cannot be compared");
    EXPECT_PRINTS(3, "0 of 330 images equal",
                  "$P verify-published patches --preset fractaldb-1k --draw points");
    EXPECT(0, PREPARE "points --preset ofdb-1k --draw points --classes 3 --samples 12");
    EXPECT_PRINTS(0, "12 of 12 images equal", "$P verify-published points --preset ofdb-1k --draw points");
    EXPECT_PRINTS(3, "0 of 12 images equal", "$P verify-published points --preset ofdb-1k");
    /* A black image has no pixel outside the patches, but too few set bits. */
    char path[PATH_MAX];
    uint8_t *black = calloc(362, 362);
    snprintf(path, sizeof path, "%s/patches/00002/00002_03_count_0_flip0.png", folder);
    EXPECT(0, "cp %s kept.png", path);
    must(picture_write_png(path, black, &(struct png_shape){362, 362, 1}));
    free(black);
    EXPECT_PRINTS(3, "329 of 330 images equal", "$P verify-published patches --preset fractaldb-1k");
    EXPECT_OUT("00002_03_count_0_flip0.png: 0.00 % of the", "instead of 50.1 %");
    EXPECT(0, "cp kept.png %s", path);
    /* One orbit under the name of another, one point instead of a patch image, a name and a class that
     * differ. */
    EXPECT(0, "cd patches && cp 00001/00001_03_count_0_flip0.png 00001/00001_02_count_0_flip0.png && "
              "cp ../points/00002/00002_00_count_0_flip1.png 00002/00002_00_count_0_flip1.png && "
              "cp 00000/00000_00_count_0_flip0.png 00000/00000_25_count_0_flip0.png && "
              "sed -i '1s/1/2/' csv3/00003.csv");
    EXPECT_PRINTS(3, "328 of 330 images equal", "$P verify-published patches --preset fractaldb-1k");
    EXPECT_OUT("00001_02_count_0_flip0.png: pixel", "00000_25_count_0_flip0.png", "4 of 5 class files equal");
    EXPECT_PRINTS(2, "--draw", "$P verify-published patches --preset rcdb-1k --draw points");
    EXPECT_PRINTS(2, "is not a published set", "$P verify-published patches --preset 1p-frac");
}

Test(fractal_files, folders_of_1p_frac_have_the_published_names)
{
    EXPECT(0,
           PREPARE "set --preset 1p-frac --classes 103 --samples 103 --res 48 && "
                   "test -f set/07/07_07_count_0_flip0.png && test -f set/102/102_102_count_0_flip0.png && "
                   "! test -e set/007");
}

/* Reading and searching classes, and the orbits of a report, use --threads threads. With this variable, the
 * OpenMP runtime of GCC prints each thread that it starts. */
#define AFFINITY "OMP_DISPLAY_AFFINITY=TRUE OMP_AFFINITY_FORMAT='thread %%n of %%N' "

/* Expects that the latest command had 1 or 3 threads. */
static void expect_threads(int threads)
{
    cr_expect_eq(says("thread 2 of 3"), threads == 3, "%s", out);
    cr_expect(!says("thread 1 of 2"), "%s", out);
}

Test(fractal_files, classes_are_read_on_the_given_threads)
{
    static const char *const works[] = {"--preset fractaldb-search --classes 8 --write-classes s.csv",
                                        "--preset fractaldb-1k --classes 4 --describe"};
    for (size_t i = 0; i < COUNT_OF(works); i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            EXPECT(0, "rm -rf cache && " AFFINITY "XDG_CACHE_HOME=$PWD/cache $P --threads %d %s", threads,
                   works[i]);
            expect_threads(threads);
        }
}

/* The default list has 10,000 classes, which are found once. The program finds them again on the given
 * threads. */
Test(fractal_files, the_list_of_10000_is_computed_once_and_a_damaged_file_is_noticed)
{
    if (getenv("FDSL_RECORD")) {
        record_list();
        return;
    }
#ifdef FDSL_SANITIZED
    cr_skip_test("sanitizers make it 30 times as slow; the other tests run its functions");
#endif
    char path[PATH_MAX], *bytes, *again;
    size_t size, size_again;
    cr_assert_eq(setenv("XDG_CACHE_HOME", folder, 1), 0);
    snprintf(path, sizeof path, "%s/fdsl-bench/fractaldb-10000.ifs", folder);
    struct class_row *first = rows_of(1001), *begin = rows_of(1000);
    must(file_read(path, &bytes, &size));
    for (int damage = 0; damage < 2; damage++) {
        bytes[size / 2] ^= (char)damage;
        must(file_write_atomic(path, bytes, size));
        bytes[size / 2] ^= (char)damage;
        if (damage) {
            EXPECT_PRINTS(0, "is damaged; computing it again",
                          AFFINITY "$P --threads 3 --preset fractaldb --classes 1001 --write-classes l.csv");
            expect_threads(3);
        }
        struct class_row *all = rows_of(10000); /* the hash of all classes is checked */
        cr_assert_arr_eq(all, first, 1001 * sizeof *all);
        cr_assert_arr_eq(all, begin, 1000 * sizeof *all);
        must(file_read(path, &again, &size_again));
        cr_assert(size == size_again && memcmp(bytes, again, size) == 0);
        free(all);
        free(again);
    }
    free(bytes);
    free(first);
    free(begin);
}

#ifdef HAVE_XXHASH
/* The bank in a file gives the same images, also to ranks that start at once; a broken file is named once. */
Test(fractal_files, orbits_are_kept_in_a_cache_folder)
{
#define BANKED "$P --variant omp --preset fractaldb-1k --classes 2 --batch 12 --max-time 0 "
    EXPECT(0, BANKED "--npy a.npy && " BANKED "--npy b.npy --cache-dir c && " BANKED
                     "--npy c.npy --cache-dir c && cmp a.npy b.npy && cmp a.npy c.npy && ls c/*.bank");
    EXPECT(0, "truncate -s 9 c/*.bank");
    EXPECT_PRINTS(0, "is damaged or belongs to other orbits; computing it again",
                  BANKED "--verify --cache-dir c");
    EXPECT(0, BANKED "--verify --cache-dir c");
    cr_expect(!strstr(out, "damaged"), "%s", out);
    EXPECT(0, "rm c/*.bank && touch $(ls c/*.lock | sed 's/lock$/1-0.tmp/') other.tmp c/other.tmp && " BANKED
              "--cache-dir c && ls c/*.tmp"); /* a killed process left the first one */
    EXPECT_OUT("c/other.tmp\n");
    EXPECT(0,
           "rm c/other.tmp && cp c/*.bank bank && rm c/*.bank && mkfifo $(ls c/*.lock | sed 's/.lock$//')");
    EXPECT_PRINTS(1, "is not a regular file", "timeout 60 " BANKED "--cache-dir c");
    EXPECT(0, "cp --remove-destination bank c/*.bank");
    EXPECT(0, "$P --prepare p --from synth --preset fractaldb-1k --classes 2 --samples 9 --encode npy "
              "--cache-dir c && ls c/*.bank | wc -l");
    EXPECT_OUT("1\n");
    EXPECT(0, "$P --variant train-naive --model logreg --data synth --preset ofdb-1k --classes 2 --res 40 "
              "--train-size 8 --test-size 4 --batch 4 --epochs 1 --cache-dir c && ls c/*.bank | wc -l");
    EXPECT_OUT("2\n");
    EXPECT_PRINTS(2, "this variant does not use them: drop --cache-dir",
                  "$P --variant naive --preset ofdb-1k --cache-dir c");
    EXPECT_PRINTS(2, "but the formula rcdb has none; drop it",
                  "$P --variant omp --preset rcdb --classes 3 --cache-dir c");
    EXPECT_PRINTS(2, "--cache-dir has no effect without --variant",
                  "$P --preset ofdb-1k --classes 3 --describe --cache-dir c");
    EXPECT_PRINTS(1, "--cache-dir no/folder: cannot create the folder no/folder: No such file",
                  BANKED "--cache-dir no/folder");
    EXPECT_PRINTS(2, "--cache-bytes needs data at a URL",
                  "$P --variant train-naive --data synth --cache-dir c --cache-bytes 1G");
}
#endif

Test(fractal_files, dark_weights_are_described_and_replaced)
{
    static const char describe[] = "$P --preset fractaldb-1k --classes 6 --describe";
    EXPECT_PRINTS(0, "25 orbits per class of 200000 points, 4 flips, 362 x 362 pixels", describe);
    EXPECT_OUT("overflow: 5 orbits (3.3 %), of 3 classes", "occupied cells: mean 21.3 %",
               "below 1 %: 13 orbits");
    EXPECT_PRINTS(0, "below 1 %: 0 orbits (0.0 %)", "%s --min-lit 0.01", describe);
    EXPECT_OUT("overflow: 0 orbits (0.0 %), of 0 classes");
    EXPECT_PRINTS(0, "1 orbits per class of 100000 points, 1 flips, 512 x 512",
                  "$P --preset 1p-frac --describe "
                  "--classes 20");
    EXPECT_OUT("below 5 %: 0 orbits (0.0 %)");
    /* Class 0 with weight 4, which overflows. The oracle draws it by the definition. */
#define DRAW "$P --verify --preset fractaldb-1k --classes 1 --batch 1 --max-time 0 --instance 16 --variant "
    EXPECT(0,
           DRAW "omp --npy dark.npy && " DRAW "omp --npy omp.npy --min-lit 0.01 && " DRAW
                "naive --npy naive.npy --min-lit 0.01 && ! cmp -s dark.npy omp.npy && cmp naive.npy omp.npy");

    EXPECT_PRINTS(2, "this set has none", "$P --variant omp --preset 1p-frac --min-lit 0.01");
    EXPECT_PRINTS(2, "draws no fractals", "$P --preset rcdb-1k --describe");
}
