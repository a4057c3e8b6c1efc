/* Tests the formula ifs3d: its classes, orbits, views and point clouds. tests/ifs3d_vectors.py, which does
 * not use the C code, made the expected hashes. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "data/npy.h"
#include "data/source.h"
#include "ifs3d_vectors.h"
#include "must.h"
#include "shell.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"
#include "synth/input.h"

TestSuite(ifs3d, .timeout = 1200);

static const struct formula *formula(void)
{
    return formulas[FORMULA_IFS3D];
}

static struct class_row *searched(uint32_t seed, double threshold, uint32_t count)
{
    struct class_row *rows = calloc(count, sizeof *rows);
    cr_assert_not_null(rows);
    must(ifs3d_search(seed, threshold, count, rows));
    return rows;
}

/* ---- Classes ---- */

Test(ifs3d, a_seed_gives_the_class_files_of_the_published_script)
{
    for (size_t i = 0; i < COUNT_OF(searches); i++) {
        struct class_row *rows = searched(searches[i].seed, searches[i].threshold, searches[i].count);
        uint64_t hash = FNV_BEGIN;
        for (uint32_t c = 0; c < searches[i].count; c++) {
            char text[PUBLISHED_TEXT_BYTES];
            struct class_row again = {.id = c};
            must(class_check(formula(), &rows[c]));
            hash = fnv_add(hash, text, published_text_write(formula(), &rows[c], text));
            must(published_text_read("again", text, formula(), c, &again));
            cr_assert_arr_eq(again.value, rows[c].value, sizeof again.value, "class %u", c);
        }
        cr_expect_eq(hash, searches[i].hash, "seed %u: 0x%llx", searches[i].seed, (unsigned long long)hash);
        free(rows);
    }
}

Test(ifs3d, thresholds_and_class_files_outside_the_limits_are_refused)
{
    struct class_row row;
    char text[] = "1,2,3,4,5,6,1\n";
    cr_expect_eq(ifs3d_search(1, 0.0009, 1, &row), STATUS_USAGE);
    cr_expect_eq(ifs3d_search(1, NAN, 1, &row), STATUS_USAGE);
    cr_expect_eq(ifs3d_search(1, 0.301, 1, &row), STATUS_USAGE);
    cr_expect_eq(published_text_read("file", text, formula(), 0, &row), STATUS_USAGE);
    cr_expect(strstr(status_text(), "7 values, not 13"), "%s", status_text());
    struct class_row *rows = searched(1, IFS3D_THRESHOLD, 1);
    rows->value[IFS3D_COEFFICIENTS + 1] += 0.5;
    cr_expect_eq(class_check(formula(), rows), STATUS_USAGE);
    rows->value[IFS3D_COEFFICIENTS + 1] -= 0.5;
    rows->value[IFS3D_PARAMETERS - 1] = 1e-9; /* of a map that the class does not have */
    cr_expect_eq(class_check(formula(), rows), rows->value[0] < IFS_MAPS_MAX ? STATUS_USAGE : STATUS_OK);
    free(rows);
}

Test(ifs3d, weights_are_those_of_the_published_file)
{
    uint32_t next = 0;
    for (uint32_t c = 0; c < IFS3D_COEFFICIENTS; c++)
        for (uint32_t tenths = 4; tenths <= 16; tenths++) {
            if (tenths == 10 && c > 0)
                continue; /* row 6 is 1 already */
            const struct ifs3d_weight weight = ifs3d_weight(next);
            const double factor = next == 108 ? 0.6 : tenths / 10.0;
            cr_expect_eq(weight.coefficient, c, "row %u", next);
            cr_expect_eq(weight.factor, factor, "row %u", next);
            next++;
        }
    cr_expect_eq(next, IFS3D_WEIGHTS);
    cr_expect_eq(ifs3d_weight(IFS3D_IDENTITY).factor, 1);
}

Test(ifs3d, instances_are_views_of_weights)
{
    const struct ifs_rules *rules = formula()->ifs;
    const struct ifs_instance shown = ifs_instance(rules, 1740 * 5 + 12 * 144 + 7);
    cr_expect(shown.flip == 7 && shown.weight == 144 && shown.drawing == 145 * 5 + 144);
    char name[PUBLISHED_NAME_BYTES];
    ifs3d_image_name(rules, 12, 12 * 144 + 7, name);
    cr_expect_str_eq(name, "000012_00144_007");
}

/* ---- Views and point clouds ---- */

/* A set of classes that a test draws. */
static void open_set(struct synth *synth, const struct ifs_rules *rules, uint64_t seed, uint32_t res,
                     struct class_row *rows, uint32_t count)
{
    *synth = (struct synth){.res = res, .seed = seed, .rows = rows, .class_count = count, .batch = 1};
    synth_set_formula(synth, FORMULA_IFS3D);
    synth->ifs = *rules;
    must(synth_fill_tables(synth));
}

static void close_set(struct synth *synth)
{
    synth->rows = NULL;
    synth_free(synth);
}

Test(ifs3d, views_are_those_of_the_definition)
{
    struct class_row *rows = searched(1, IFS3D_THRESHOLD, 30);
    void *scratch = malloc(synth_solid_scratch_bytes());
    for (size_t i = 0; i < COUNT_OF(images); i++) {
        struct ifs_rules rules = *formula()->ifs;
        struct synth synth;
        rules.sphere = images[i].sphere;
        rules.weights = images[i].weights;
        open_set(&synth, &rules, images[i].seed, images[i].res, rows, 30);
        const struct synth_image image = {images[i].class_index, images[i].instance};
        uint8_t *canvas = malloc(synth_image_bytes(&synth));
        synth_draw_solid(&synth, image, scratch, canvas, NULL);
        const uint64_t hash = fnv_add(FNV_BEGIN, canvas, synth_image_bytes(&synth));
        cr_expect_eq(hash, images[i].hash, "image %zu: 0x%llx", i, (unsigned long long)hash);
        free(canvas);
        close_set(&synth);
    }
    free(scratch);
    free(rows);
}

Test(ifs3d, point_clouds_are_those_of_the_definition)
{
    struct class_row *rows = searched(1, IFS3D_THRESHOLD, 30);
    void *scratch = malloc(synth_solid_scratch_bytes());
    float *cloud = malloc(3 * IFS3D_CLOUD * sizeof *cloud);
    for (size_t i = 0; i < COUNT_OF(clouds); i++) {
        struct synth synth;
        uint8_t canvas[1];
        open_set(&synth, formula()->ifs, clouds[i].seed, 1, rows, 30);
        const struct synth_image image = {clouds[i].class_index, clouds[i].instance};
        synth_draw_solid(&synth, image, scratch, canvas, cloud);
        const uint64_t hash = fnv_add(FNV_BEGIN, cloud, 3 * IFS3D_CLOUD * sizeof *cloud);
        cr_expect_eq(hash, clouds[i].hash, "cloud %zu: 0x%llx", i, (unsigned long long)hash);
        close_set(&synth);
    }
    free(cloud);
    free(scratch);
    free(rows);
}

Test(ifs3d, a_cloud_mixes_another_class)
{
    uint32_t seen[5] = {0};
    for (uint32_t n = 0; n < 4000; n++) {
        const uint32_t other = ifs3d_partner(philox_key(n), 2, 5);
        cr_assert(other < 5 && other != 2);
        seen[other]++;
    }
    for (uint32_t c = 0; c < 5; c++)
        cr_expect(c == 2 || (seen[c] > 850 && seen[c] < 1150), "class %u: %u", c, seen[c]);
}

/* Directions are uniform on the sphere: each coordinate has the mean 0 and the variance 1/3. The axes of a
 * camera are orthonormal, but for the focal length, and no camera is upside down. */
Test(ifs3d, cameras_look_from_everywhere)
{
    enum { COUNT = 20000 };
    for (uint32_t sphere = 0; sphere < 2; sphere++) {
        struct ifs_rules rules = *formula()->ifs;
        double sum[3] = {0}, squares[3] = {0};
        rules.sphere = sphere;
        for (uint32_t n = 0; n < COUNT; n++) {
            const struct ifs3d_camera camera = ifs3d_camera(&rules, philox_key(n / 12), n % 12);
            double products[6] = {0};
            for (int i = 0; i < 3; i++) {
                const double r = (double)camera.right[i] / (double)IFS3D_FOCAL;
                const double u = (double)camera.up[i] / (double)IFS3D_FOCAL, f = (double)camera.forward[i];
                const double terms[6] = {r * r - 1 / 3.0, u * u - 1 / 3.0, f * f - 1 / 3.0,
                                         r * u,           u * f,           f * r};
                for (int k = 0; k < 6; k++)
                    products[k] += terms[k];
                sum[i] += f / COUNT;
                squares[i] += f * f / COUNT;
            }
            for (int k = 0; k < 6; k++)
                cr_assert(fabs(products[k]) < 1e-5, "camera %u, product %d: %g", n, k, products[k]);
            cr_assert(camera.up[1] >= 0);
        }
        for (int i = 0; i < 3; i++) {
            const double expected = sphere ? 1 / 3.0 : i == 1 ? 0 : 0.5;
            cr_expect(fabs(sum[i]) < 0.015 && fabs(squares[i] - expected) < 0.01, "%u %d: %g %g", sphere, i,
                      sum[i], squares[i]);
        }
    }
}

/* A class whose coordinates grow by the factor per step. */
static struct ifs3d_system growing(double factor)
{
    struct ifs3d_system system = {.maps = 2, .bounds = {UINT32_MAX / 2}};
    for (int m = 1; m < IFS_MAPS_MAX; m++)
        system.bounds[m] = UINT32_MAX;
    for (int m = 0; m < 2; m++) {
        system.map[m][0] = system.map[m][4] = system.map[m][8] = factor;
        system.map[m][9] = m ? 1 : -0.5;
        system.map[m][10] = 0.25;
        system.map[m][11] = m ? 0 : 1;
    }
    return system;
}

/* Walks of all classes and weights, also of orbits that overflow late or at once, and whose weights are
 * replaced. */
Test(ifs3d, walks_at_a_time_equal_single_ones)
{
    static const double factors[] = {0, 0.5, 0.99, 1, 1.01, 1.073, 1.2, 3, 1e200, -1e300};
    enum { CLASSES = 25 };
    struct class_row *rows = searched(3, IFS3D_THRESHOLD, CLASSES);
    struct ifs3d_points *expected = malloc(sizeof *expected), *points = malloc(sizeof *points);
    struct ifs3d_point *walked = malloc(IFS3D_POINTS * sizeof *walked);
    void *scratch = malloc(ifs3d_scratch_bytes());
    uint32_t dark = 0, replaced = 0;
    for (uint32_t i = 0; i < CLASSES + COUNT_OF(factors); i++) {
        struct ifs3d_system system;
        if (i < CLASSES)
            ifs3d_system(&rows[i], &system);
        else
            system = growing(factors[i - CLASSES]);
        for (uint32_t row = i % 5; row < IFS3D_WEIGHTS; row += 9) {
            const struct philox_key key = philox_key(1000 * i + row);
            memset(expected, 0, sizeof *expected);
            memset(points, 1, sizeof *points);
            ifs3d_walk(&system, row, key, walked, expected);
            ifs3d_walk_fast(&system, row, key, scratch, points);
            cr_assert_eq(points->count, expected->count);
            cr_assert_arr_eq(points->at, expected->at, points->count * sizeof *points->at, "class %u, row %u",
                             i, row);
            dark += points->count == 0;
            replaced += ifs3d_weight(row).coefficient == 8 && i == CLASSES + 2; /* 0.99 * 1.5 overflows */
        }
    }
    cr_expect(dark > 20 && replaced > 0, "%u %u", dark, replaced);
    free(scratch);
    free(walked);
    free(points);
    free(expected);
    free(rows);
}

/* The walks have the points of the one orbit of the published script: all bits of 90 % of the orbits, and the
 * same pixels in more. The rest contracts slowly or not at all. Orbits that overflow are detected from their
 * walks. */
Test(ifs3d, walks_join_to_the_published_orbit)
{
    enum { CLASSES = 40, RES = 224 };
    struct class_row *rows = searched(1, IFS3D_THRESHOLD, CLASSES);
    struct ifs3d_points *points = malloc(sizeof *points), *orbit = malloc(sizeof *orbit);
    struct ifs3d_point *walked = malloc(IFS3D_POINTS * sizeof *walked);
    uint8_t *views[2] = {malloc(RES * RES), malloc(RES * RES)};
    struct ifs3d_point *again = malloc(IFS3D_POINTS * sizeof *again),
                       *identity = malloc(IFS3D_POINTS * sizeof *again);
    uint32_t orbits = 0, same_bits = 0, same_pixels = 0, overflows = 0;
    double lit[2] = {0};
    for (uint32_t i = 0; i < CLASSES; i++) {
        struct ifs3d_system system;
        ifs3d_system(&rows[i], &system);
        for (uint32_t row = i % 3; row < IFS3D_WEIGHTS; row += 12) {
            const struct philox_key key = philox_key(1000 * i + row);
            const struct ifs3d_weight weight = ifs3d_weight(row);
            struct ifs3d_extent extent = ifs3d_no_extent();
            struct ifs3d_point point = {{0, 0, 0}};
            for (uint32_t step = 0; step < IFS3D_POINTS; step++) {
                const struct philox_block words = ifs3d_choice_block(key, step / 4);
                const uint32_t map = ifs3d_choice(system.bounds, philox_word(words, step % 4));
                double coefficients[IFS3D_COEFFICIENTS];
                for (uint32_t k = 0; k < IFS3D_COEFFICIENTS; k++)
                    coefficients[k] = ifs3d_coefficient(&system, weight, map, k);
                walked[step] = point = ifs3d_step(coefficients, point);
                ifs3d_extend(&extent, point);
            }
            const struct ifs3d_frame frame = ifs3d_frame(&extent);
            ifs3d_walk(&system, row, key, again, points);
            if (!isfinite(point.at[0])) { /* then the weights are those of row IFS3D_IDENTITY */
                ifs3d_walk(&system, IFS3D_IDENTITY, key, identity, orbit);
                cr_expect(memcmp(again, identity, IFS3D_POINTS * sizeof *again) == 0, "class %u, row %u", i,
                          row);
                overflows++;
            }
            if (!frame.drawn)
                continue;
            orbit->count = IFS3D_POINTS;
            for (uint32_t step = 0; step < IFS3D_POINTS; step++)
                for (int axis = 0; axis < 3; axis++)
                    orbit->at[step][axis] = ifs3d_coordinate(&frame, walked[step], axis);
            ifs3d_view(formula()->ifs, orbit, key, 4, RES, views[0]);
            ifs3d_view(formula()->ifs, points, key, 4, RES, views[1]);
            orbits++;
            same_bits += memcmp(again, walked, IFS3D_POINTS * sizeof *again) == 0;
            same_pixels += memcmp(views[0], views[1], RES * RES) == 0;
            for (int v = 0; v < 2; v++)
                for (uint32_t p = 0; p < RES * RES; p++)
                    lit[v] += views[v][p] != 0;
        }
    }
    cr_expect_gt(overflows, 0);
    cr_expect(same_bits > 0.9 * orbits && same_bits < orbits, "%u of %u orbits", same_bits, orbits);
    cr_expect(same_pixels > 0.95 * orbits, "%u of %u views", same_pixels, orbits);
    cr_expect(fabs(lit[1] / lit[0] - 1) < 0.002, "lit %g and %g", lit[0] / orbits, lit[1] / orbits);
    free(views[0]);
    free(views[1]);
    free(again);
    free(identity);
    free(walked);
    free(orbit);
    free(points);
    free(rows);
}

/* ---- The program ---- */

TestSuite(ifs3d_files, .init = shell_set_up, .fini = shell_tear_down, .timeout = 1200);

#define DRAW "$P --verify --max-time 0 "

/* Images do not depend on the variant, the batch and the classes' order in memory; all formats are verified.
 */
Test(ifs3d_files, variants_and_batches_draw_the_same_bits)
{
    static const char *const formats[] = {"--res 1",
                                          "--res 33 --channels 3",
                                          "--res 97 --out-res 31 --fit crop",
                                          "--res 224 --out-res 65 --dtype f32 --mean 0.5 --std 0.25",
                                          "--res 101 --out-res 150 --dtype bf16",
                                          "--res 64 --layout nhwc --channels 3 --dtype f16"};
    static const char *const presets[] = {"mv-fractaldb-1k", "exfractaldb-1k", "3d-ofdb-1k",
                                          "pc-fractaldb-1k"};
    for (size_t i = 0; i < COUNT_OF(formats); i++)
        EXPECT(0, DRAW "--variant naive,omp --preset %s --classes %zu --batch %zu --seed 4 %s --instance 7",
               presets[i % 4], 2 + i, 5 + 6 * i, formats[i]);
    EXPECT(0, DRAW
           "--variant omp --preset exfractaldb-1k --classes 3 --batch 40 --npy a.npy && " DRAW
           "--variant omp --preset exfractaldb-1k --classes 3 --batch 13 --instance 11 --threads 1 --npy "
           "b.npy && "
           "tail -c $((40 * 50176)) a.npy | tail -c +$((11 * 50176 + 1)) | head -c $((13 * 50176)) > part && "
           "tail -c $((13 * 50176)) b.npy | cmp - part");
}

Test(ifs3d_files, point_clouds_are_written_to_arrays_only)
{
    EXPECT(0, DRAW "--variant omp --preset pc-fractaldb-1k --classes 3 --batch 2 --npy x.npy && "
                   "test $(stat -c %%s x.points.npy) = $((128 + 2 * 10000 * 3 * 4))");
    EXPECT_PRINTS(2, "one class", DRAW "--variant omp --preset pc-fractaldb-1k --classes 1");
    EXPECT_PRINTS(2, "samples have no point clouds",
                  "$P --prepare set --from synth --preset pc-fractaldb-1k --samples 3 --classes 3");
    EXPECT_PRINTS(2, "samples have no point clouds",
                  "$P --variant train-omp --model lenet --data synth --preset pc-fractaldb-1k --classes 3");
    EXPECT_PRINTS(0, "leave out the point clouds",
                  DRAW "--variant omp --preset pc-fractaldb-1k --classes 3 --batch 3 --png shown");
    EXPECT_PRINTS(2, "--points", DRAW "--variant omp --preset ifs3d --points x.npy");
}

Test(ifs3d_files, classes_are_exported_and_imported)
{
    EXPECT(0, "$P --preset exfractaldb-1k --classes 30 --write-classes out --class-format published && "
              "test -f out/000029.csv && ! test -e out/000030.csv && "
              "$P --formula ifs3d --class out --write-classes again --class-format published && diff -r out "
              "again && "
              "$P --formula ifs3d --class out --write-classes list.csv && "
              "$P --class list.csv --write-classes third --class-format published && diff -r out third");
    EXPECT(0, DRAW "--variant omp --preset 3d-ofdb-1k --class out --batch 9 --npy a.npy && " DRAW
                   "--variant omp --preset 3d-ofdb-1k --classes 30 --batch 9 --npy b.npy && cmp a.npy b.npy");
    EXPECT_PRINTS(2, "'exfractal' is not a preset of ifs3d; exfractaldb-1k",
                  DRAW "--variant omp --formula ifs3d --class out --preset exfractal");
    EXPECT_PRINTS(2, "of the formula fractaldb, not of ifs3d",
                  DRAW "--variant omp --formula ifs3d --class out --preset fractaldb-1k");
    EXPECT(0, "printf '[mine]\\nseed = 1\\nthreshold = 0.05\\n' > mine.cfg && "
              "$P --formula ifs3d --preset-file mine.cfg --preset mine --classes 30 --write-classes mine "
              "--class-format published && diff -r out mine");
    EXPECT_PRINTS(2, "threshold",
                  "printf '[mine]\\nseed = 1\\nthreshold = 0.4\\n' > bad.cfg && "
                  "$P --formula ifs3d --preset-file bad.cfg --preset mine --classes 3 --variant omp");
}

Test(ifs3d_files, a_damaged_cache_file_is_replaced)
{
    EXPECT(0, "export XDG_CACHE_HOME=$PWD/cache; $P --preset ifs3d --classes 3 --write-classes a.csv && "
              "printf x | dd of=$(find cache -name 'ifs3d*') bs=1 seek=5000 conv=notrunc 2>/dev/null");
    EXPECT_PRINTS(0, "is damaged; searching the classes again",
                  "export XDG_CACHE_HOME=$PWD/cache; $P --preset ifs3d --classes 3 --write-classes b.csv && "
                  "cmp a.csv b.csv");
}

Test(ifs3d_files, a_set_is_described)
{
    EXPECT_PRINTS(0, "4 classes of", "$P --preset exfractaldb-1k --classes 4 --describe");
    EXPECT_OUT("145 weights per class, 12 views of 9999 points, 224 x 224 pixels", "without points: 0",
               "set pixels of view 0: mean");
}

Test(ifs3d_files, live_training_draws_views)
{
    EXPECT_PRINTS(0, "train-omp",
                  "$P --variant train-omp --model lenet --data synth --preset exfractaldb-1k --classes 3 "
                  "--train-size 60 --test-size 30 --out-res 32 --batch 10 --epochs 1");
}

Test(ifs3d_files, options_that_have_no_effect_are_refused)
{
    EXPECT_PRINTS(2, "seed none of their random numbers",
                  DRAW "--variant omp --preset exfractaldb-1k --random published");
    EXPECT_PRINTS(2, "--draw", DRAW "--variant omp --preset exfractaldb-1k --draw points");
    EXPECT_PRINTS(2, "--min-lit", DRAW "--variant omp --preset exfractaldb-1k --min-lit 0.1");
}

Test(ifs3d_files, sets_are_prepared_with_the_published_names)
{
    EXPECT(0,
           "$P --prepare set --from synth --preset mv-fractaldb-1k --classes 3 --samples 40 --res 32 --store "
           "imagefolder --names published && test -f set/000002/000002_00001_000.png");
}

/* ---- Scenes ---- */

/* Checks that the points of an object, which has `count` of them, fill its box exactly. */
static void expect_box(const float *box, const float (*points)[3], uint32_t count)
{
    float least[3] = {INFINITY, INFINITY, INFINITY}, most[3] = {-INFINITY, -INFINITY, -INFINITY};
    cr_expect_float_eq(box[6] * box[6] + box[7] * box[7], 1, 1e-5f);
    cr_expect(box[8] >= 0 && box[8] < 7 && box[8] == floorf(box[8]));
    for (uint32_t i = 0; i < count; i++) {
        const float x = points[i][0] - box[0], y = points[i][1] - box[1];
        const float own[3] = {box[6] * x + box[7] * y, box[6] * y - box[7] * x, points[i][2] - box[2]};
        cr_assert(points[i][0] > -1e-4f && points[i][0] < 15.0001f && points[i][1] > -1e-4f &&
                  points[i][1] < 15.0001f && points[i][2] >= 0);
        for (int axis = 0; axis < 3; axis++) {
            least[axis] = fminf(least[axis], own[axis]);
            most[axis] = fmaxf(most[axis], own[axis]);
        }
    }
    for (int axis = 0; axis < 3; axis++) {
        cr_expect_float_eq(most[axis], box[3 + axis] / 2, 2e-5f);
        cr_expect_float_eq(least[axis], -box[3 + axis] / 2, 2e-5f);
    }
}

/* Boxes fit the points of their objects, the numbers of objects have the mean and the variance of 15 plus a
 * Poisson distribution of mean 5, and a sample is the same whenever it is made. */
Test(ifs3d, scenes_have_boxes_of_their_objects)
{
    enum { SCENES = 300, FITTED = 5 };
    const struct scenes_values values = {.seed = 4, .classes = 7};
    struct source_reader reader;
    uint64_t hash = FNV_BEGIN;
    double sum = 0, squares = 0;
    must(source_open("scenes", &(struct source_request){.parameters = &values}, &reader));
    for (uint64_t n = SCENES; n-- > 0;) {
        struct source_sample sample = {.count = 0};
        struct npy_header header, boxes;
        must(source_make(reader.source, reader.state, n, 1, &sample));
        cr_assert(sample.count == 2 && strcmp(sample.members[0].extension, "boxes.npy") == 0);
        must(npy_header_parse(sample.members[0].bytes, sample.members[0].size, &boxes));
        must(npy_header_parse(sample.members[1].bytes, sample.members[1].size, &header));
        cr_assert(header.axes == 2 && header.shape[0] == 40000 && header.shape[1] == 3 &&
                  boxes.shape[1] == 9);
        const float(*points)[3] = (const void *)((const char *)sample.members[1].bytes + header.data);
        const float *box = (const void *)((const char *)sample.members[0].bytes + boxes.data);
        const uint32_t count = (uint32_t)boxes.shape[0];
        sum += count;
        squares += (double)count * count;
        cr_assert(count >= 15 && count < 64);
        for (uint32_t o = 0, at = 0; n < FITTED && o < count; o++) {
            const uint32_t own = 40000 * (o + 1) / count - 40000 * o / count;
            expect_box(box + (size_t)9 * o, points + at, own);
            at += own;
        }
        for (size_t m = 0; n < FITTED && m < 2; m++)
            hash = fnv_add(hash, sample.members[m].bytes, sample.members[m].size);
        source_sample_free(&sample);
    }
    source_close(&reader);
    const double mean = sum / SCENES;
    cr_expect_float_eq(mean, 20, 0.5, "%g", mean);
    cr_expect_float_eq(squares / SCENES - mean * mean, 5, 1.5, "%g", squares / SCENES - mean * mean);
    cr_expect_eq(hash, UINT64_C(0x9411a1c562f213ef), "%016llx", (unsigned long long)hash);
}

Test(ifs3d_files, scenes_are_prepared)
{
    EXPECT(0, "$P --prepare a --from scenes --classes 5 --samples 7 --shards 2 --threads 1 && "
              "$P --prepare b --from scenes --classes 5 --samples 7 --shards 2 --threads 2 && "
              "cmp a/scenes-000001.tar b/scenes-000001.tar && "
              "tar tf a/scenes-000000.tar | head -2 | tr '\\n' ' ' | grep -x '000000.boxes.npy 000000.npy '");
    EXPECT_PRINTS(2, "--classes", "$P --prepare c --from scenes --classes 1001 --samples 7");
    EXPECT(0, "$P --variant shards --data a --verify --max-time 0.1");
}
