/* Tests fractals in colour (synth/color.h): variants and instruction sets against the reference, labels
 * against what is drawn, distributions, outputs, and files. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/array.h"
#include "data/image_formats.h"
#include "machine/host.h"
#include "synth/class.h"
#include "synth/ifs_classes.h"
#include "train/data.h"

TestSuite(color, .timeout = 300);

#define ONE  "--preset fractal-color-1k"
#define MANY "--preset multifractal-1k"

/* ---- Bits ---- */

/* Compares all images of a run of `omp` with the reference, and their labels. */
static void compare(const char *line, int threads)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    const uint64_t numbers[] = {3, 0};
    struct opened opened;
    int64_t *right_labels, *labels;
    open_synth(&opened, line);
    const size_t bytes = opened.synth->batch * synth_output_bytes(opened.synth);
    uint8_t *right = images_and_labels_of(&opened, "naive", 1, numbers, 2, &right_labels);
    for (size_t i = 0; i < COUNT_OF(isas); i++) {
        if (!isa_force(isas[i]))
            continue;
        uint8_t *images = images_and_labels_of(&opened, "omp", threads, numbers, 2, &labels);
        cr_expect_eq(memcmp(images, right, bytes), 0, "%s: %s", line, isas[i]);
        cr_expect_eq(memcmp(labels, right_labels, opened.synth->batch * sizeof *labels), 0, "%s", line);
        free(images);
        free(labels);
    }
    isa_force(NULL);
    free(right);
    free(right_labels);
    close_synth(&opened);
}

Test(color, variants_are_equal)
{
    static const char *const lines[] = {
        ONE " --batch 3",
        MANY " --batch 5",
        ONE " --batch 2 --res 1",
        MANY " --batch 3 --res 3 --seed 18446744073709551615",
        ONE " --batch 7 --res 31 --classes 1 --draw points",
        MANY " --batch 4 --res 257 --classes 3 --instance 1234567890123 --draw points",
        MANY " --batch 3 --res 113 --out-res 57 --dtype f16 --layout nhwc",
        ONE " --batch 3 --res 97 --out-res 61 --fit crop --dtype bf16 --mean 0.4,0.5,0.6 --std 0.2,0.3,0.4",
        MANY " --batch 2 --res 53 --out-res 101 --layout nhwc",
    };
    for (size_t i = 0; i < COUNT_OF(lines); i++)
        compare(lines[i], 1 + (int)(i % 3));
}

#ifdef HAVE_XXHASH
/* These hashes must never change. */
Test(color, images_are_golden)
{
    static const struct {
        const char *line;
        uint64_t hash;
    } golden[] = {
        {ONE " --batch 6", 0xe83eed5552e5ead2},
        {MANY " --batch 6", 0x0c366167ad7a3e15},
        {ONE " --batch 4 --draw points --seed 99 --res 77", 0x0e6fc481c17b861a},
        {MANY " --batch 4 --draw points --instance 987654321 --res 300", 0xbd12fc205f95ae9d},
    };
    for (size_t i = 0; i < COUNT_OF(golden); i++) {
        struct opened opened;
        const uint64_t numbers[] = {0};
        open_synth(&opened, golden[i].line);
        uint8_t *images = images_of(&opened, "naive", 1, numbers, 1);
        const uint64_t hash = XXH3_64bits(images, opened.synth->batch * synth_output_bytes(opened.synth));
        cr_expect_eq(hash, golden[i].hash, "%s: 0x%016llx", golden[i].line, (unsigned long long)hash);
        free(images);
        close_synth(&opened);
    }
}
#endif

/* An image is the same alone, in any batch, and as sample of a generator. */
Test(color, an_image_does_not_depend_on_its_batch)
{
    struct opened alone, batch;
    const uint64_t numbers[] = {0};
    open_synth(&batch, MANY " --batch 5 --res 60 --instance 40");
    open_synth(&alone, MANY " --batch 1 --res 60 --instance 43");
    const size_t bytes = synth_output_bytes(batch.synth);
    uint8_t *five = images_of(&batch, "omp", 2, numbers, 1), *one = images_of(&alone, "omp", 1, numbers, 1);
    cr_expect_eq(memcmp(five + 3 * bytes, one, bytes), 0);
    cr_expect_neq(memcmp(five + 2 * bytes, one, bytes), 0);
    free(five);
    free(one);
    close_synth(&batch);
    close_synth(&alone);
}

/* ---- Labels ---- */

/* Draws an image, with class `changed` replaced by another one if it is not negative. */
static void draw_with(const struct synth *synth, uint64_t number, int changed, void *scratch, uint8_t *canvas)
{
    const struct synth_image image = synth_image_at(number, 1, synth->turns, 0, 0);
    struct color_system *systems = calloc(synth->class_count, sizeof *systems);
    struct class_row rows[64];
    cr_assert(systems);
    memcpy(systems, synth->colors, synth->class_count * sizeof *systems);
    cr_assert_eq(ifs_sampled_rows(NULL, COUNT_OF(rows), rows), STATUS_OK);
    if (changed >= 0)
        color_system(&rows[40 + changed], &systems[changed]);
    color_draw(&synth->color, systems, synth_image_key(synth, image), image.class_index, scratch, canvas);
    free(systems);
}

/* An image changes with a class if and only if its multi-hot label has the class. */
Test(color, multi_hot_labels_tell_what_is_drawn)
{
    struct opened opened;
    uint32_t hot = 0, wrong = 0;
    open_synth(&opened, MANY " --classes 9 --batch 1 --res 112");
    const struct synth *synth = opened.synth;
    const size_t bytes = synth_image_bytes(synth);
    void *scratch = aligned_alloc(64, color_scratch_bytes(&synth->color));
    uint8_t *right = malloc(bytes), *other = malloc(bytes), label[9];
    cr_assert(scratch && right && other);
    cr_assert_eq(synth_mask_bytes(synth), 9);
    for (uint64_t number = 0; number < 12; number++) {
        color_multi_hot(&synth->color, synth_image_key(synth, (struct synth_image){0, number}), label);
        draw_with(synth, number, -1, scratch, right);
        for (int c = 0; c < 9; c++) {
            draw_with(synth, number, c, scratch, other);
            hot += label[c];
            wrong += (memcmp(right, other, bytes) != 0) != label[c];
        }
    }
    cr_expect_eq(wrong, 0, "%u labels", wrong);
    cr_expect(hot > 12 && hot < 5 * 12);
    free(scratch);
    free(right);
    free(other);
    close_synth(&opened);
}

/* The target of a generator, the text of a class list, and the label agree. */
Test(color, all_forms_of_a_label_agree)
{
    struct opened opened;
    char text[SYNTH_CLASSES_TEXT], expected[SYNTH_CLASSES_TEXT];
    open_synth(&opened, MANY " --classes 30 --batch 8 --res 20");
    const struct synth *synth = opened.synth;
    const struct generator_request request = {.resources = {.threads = 1}, .batch = 8};
    struct generator *generator;
    uint8_t *images = malloc(8 * synth_output_bytes(synth)), hot[8][30];
    int64_t labels[8];
    memset(hot, 77, sizeof hot);
    cr_assert_eq(synth_generator_open(synth, variant_find("naive")->variant, &request, &generator),
                 STATUS_OK);
    const struct generator_numbers numbers = {.first = 100};
    const struct generator_targets targets = {.labels = labels, .masks = *hot};
    cr_assert_eq(generator_make(generator, &numbers, 8, images, &targets, NULL), STATUS_OK);
    for (uint64_t j = 0; j < 8; j++) {
        size_t length = 0;
        expected[0] = '\0';
        for (uint32_t c = 0; c < 30; c++) {
            cr_expect_leq(hot[j][c], 1);
            if (hot[j][c] == 1)
                length += (size_t)snprintf(expected + length, sizeof expected - length, "%s%u",
                                           length ? "," : "", c);
        }
        synth_classes_text(synth, (struct synth_image){0, 100 + j}, text);
        cr_expect_str_eq(text, expected);
        cr_expect_eq(labels[j], 0);
    }
    generator_close(generator);
    free(images);
    close_synth(&opened);
}

/* ---- Distributions ---- */

static double chi_squared(const uint32_t *counts, uint32_t kinds, uint32_t total)
{
    double sum = 0, expected = (double)total / kinds;
    for (uint32_t k = 0; k < kinds; k++)
        sum += (counts[k] - expected) * (counts[k] - expected) / expected;
    return sum;
}

/* Numbers of objects, their classes and orientations are uniform; sides and places are in their ranges. The
 * thresholds are exceeded with a probability below 1e-6. */
Test(color, objects_have_their_distributions)
{
    enum { IMAGES = 20000, CLASSES = 10 };
    const struct color_rules many = {1, 0, 224, CLASSES}, one = {0, 1, 224, CLASSES};
    uint32_t objects[COLOR_OBJECTS_MAX] = {0}, classes[CLASSES] = {0}, orientations[8] = {0}, total = 0;
    double scale = 0, shift = 0; /* means of the scale, and of squared shifts */
    uint32_t blurred = 0, bits = 0, least = UINT32_MAX, most = 0, outside = 0;
    for (uint32_t i = 0; i < IMAGES; i++) {
        const struct philox_key key = {{i, 5}};
        const uint32_t count = color_objects(&many, key);
        cr_assert(count >= 1 && count <= COLOR_OBJECTS_MAX);
        cr_assert_eq(color_objects(&one, key), 1);
        objects[count - 1]++;
        for (uint32_t slot = 0; slot < count; slot++, total++) {
            const struct color_place place = color_place(&many, key, slot);
            classes[color_class(&many, key, slot, 0)]++;
            orientations[place.orientation]++;
            least = place.width < least ? place.width : least;
            most = place.width > most ? place.width : most;
            cr_assert_eq(place.width, place.height);
            outside += place.x < 0 || place.y < 0 || place.x + (int32_t)place.width > 224 ||
                       place.y + (int32_t)place.height > 224;
            cr_assert(place.x + (int32_t)place.width > 0 && place.x < 224);
        }
        const struct color_place place = color_place(&one, key, 0);
        const double centre = place.x + place.width / 2.0, off = (centre - 112) / place.width;
        cr_assert(place.width >= 112 && place.width <= 448 && place.height >= 112 && place.height <= 448);
        cr_assert(fabs(off) < 0.22, "%g", off);
        scale += 224.0 / place.width / IMAGES;
        shift += off * off / IMAGES;
        const uint32_t weight = color_blur(key);
        cr_assert(weight == 0 || (weight >= 27 && weight <= 70));
        blurred += weight > 0;
        bits += (uint32_t)__builtin_popcount(color_pattern(&one, key));
    }
    cr_expect_lt(chi_squared(objects, COLOR_OBJECTS_MAX, IMAGES), 34.0);
    cr_expect_lt(chi_squared(classes, CLASSES, total), 46.0);
    cr_expect_lt(chi_squared(orientations, 8, total), 42.0);
    cr_expect(least >= 33 && least <= 34 && most >= 133 && most <= 134, "%u, %u", least, most);
    cr_expect(outside > total / 3 && outside < total, "%u of %u", outside, total);
    cr_expect_float_eq((double)blurred / IMAGES, 0.5, 0.02);
    cr_expect_float_eq((double)bits / IMAGES, 4.5 * 512 / 511, 0.06);
    cr_expect_float_eq(scale, 1.25, 0.02);
    cr_expect_float_eq(shift, 0.04 / 3, 0.001);
}

/* Singular values are at most 1, and their weighted sum is in the range of the law. */
Test(color, classes_follow_the_sigma_law)
{
    enum { CLASSES = 3000 };
    static struct class_row rows[CLASSES];
    uint32_t maps[3] = {0};
    double mean = 0;
    cr_assert_eq(ifs_sampled_rows(NULL, CLASSES, rows), STATUS_OK);
    for (uint32_t c = 0; c < CLASSES; c++) {
        const uint32_t n = (uint32_t)rows[c].value[0];
        double sum = 0;
        cr_assert(n >= 2 && n <= 4);
        cr_assert_eq(rows[c].id, c);
        cr_assert_eq(class_check(formulas[FORMULA_MULTIFRACTAL], &rows[c]), STATUS_OK, "%s", status_text());
        maps[n - 2]++;
        for (uint32_t m = 0; m < n; m++) {
            const double *map = rows[c].value + 1 + 7 * m;
            const double squares = map[0] * map[0] + map[1] * map[1] + map[2] * map[2] + map[3] * map[3];
            const double area = fabs(map[0] * map[3] - map[1] * map[2]);
            const double first = (sqrt(squares + 2 * area) + sqrt(fmax(0, squares - 2 * area))) / 2;
            sum += first + 2 * (sqrt(squares + 2 * area) - first);
            cr_expect(fabs(map[4]) <= 1 && fabs(map[5]) <= 1);
        }
        cr_expect(sum >= (5 + n) / 2.0 - 1e-5 && sum <= (6 + n) / 2.0 + 1e-5, "class %u: %g of %u maps", c,
                  sum, n);
        mean += sum - (5 + n) / 2.0;
    }
    cr_expect_lt(chi_squared(maps, 3, CLASSES), 30.0);
    cr_expect_float_eq(mean / CLASSES, 0.25, 0.015);
}

/* The largest count has grade 255, and the clouds have all shades. Fractals cover a plausible share. */
Test(color, rasters_and_clouds_use_their_ranges)
{
    struct opened opened;
    double lit = 0;
    open_synth(&opened, ONE " --batch 1");
    const struct synth *synth = opened.synth;
    const size_t plane = (size_t)224 * 224;
    void *scratch = aligned_alloc(64, color_scratch_bytes(&synth->color));
    uint8_t *image = malloc(3 * plane), *hidden = malloc(3 * plane);
    struct color_system *systems = calloc(1000, sizeof *systems);
    cr_assert(scratch && image && hidden && systems);
    for (uint32_t c = 0; c < 40; c++) {
        const struct philox_key key = synth_image_key(synth, (struct synth_image){c, 0});
        uint32_t colors = 0;
        uint8_t reds[256] = {0};
        color_draw(&synth->color, synth->colors, key, c, scratch, image);
        systems[c] = (struct color_system){.maps = 2, .below = {65536, 65536, 65536, 65536}}; /* one cell */
        color_draw(&synth->color, systems, key, c, scratch, hidden);
        for (size_t i = 0; i < plane; i++) {
            lit += (image[i] != hidden[i] || image[plane + i] != hidden[plane + i]) / (40.0 * (double)plane);
            colors += !reds[image[i]]++;
        }
        cr_expect_gt(colors, 20);
    }
    cr_expect(lit > 0.05 && lit < 0.4, "%g", lit);
    free(systems);
    free(scratch);
    free(image);
    free(hidden);
    close_synth(&opened);
}

/* ---- The parts of the definition ---- */

/* Colours of pure hues, grays, and the wheel's continuity. */
Test(color, hues_are_those_of_the_hexagon)
{
    cr_expect_eq(color_rgb(0, 255, 255), 0x0000ff);
    cr_expect_eq(color_rgb(128, 255, 255), 0xffff00);
    for (uint32_t v = 0; v < 256; v++)
        cr_expect_eq(color_rgb(v, 0, v), v | v << 8 | v << 16);
    for (uint32_t h = 0; h < 256; h++)
        for (uint32_t c = 0; c < 24; c += 8) {
            const int one = (int)(color_rgb(h, 255, 255) >> c & 255),
                      two = (int)(color_rgb((h + 1) & 255, 255, 255) >> c & 255);
            cr_expect_leq(abs(one - two), 6, "hue %u", h);
        }
}

/* Blurring keeps a constant colour, and equals the weighted mean of each channel. */
Test(color, blur_is_the_mean_of_each_channel)
{
    for (uint32_t weight = 27; weight <= 70; weight++)
        for (uint32_t i = 0; i < 300; i++) {
            const struct philox_block b = philox((struct philox_key){{weight, i}}, 0, 0, 0, 0);
            const uint32_t words[3] = {b.word[0] & 0xffffff, b.word[1] & 0xffffff, b.word[2] & 0xffffff};
            const uint32_t blurred = color_blurred(weight, words[0], words[1], words[2]);
            cr_assert_eq(color_blurred(weight, words[0], words[0], words[0]), words[0]);
            for (uint32_t c = 0; c < 24; c += 8)
                cr_assert_eq(blurred >> c & 255,
                             (weight * (words[0] >> c & 255) + (256 - 2 * weight) * (words[1] >> c & 255) +
                              weight * (words[2] >> c & 255) + 128) >>
                                 8);
            cr_assert_eq(blurred >> 24, 0);
        }
}

/* The spots of a level are all different, and follow each other as their numbers do. */
Test(color, clouds_compute_each_value_once)
{
    static uint8_t seen[COLOR_SKY * COLOR_SKY];
    const uint32_t last = COLOR_SKY - 1;
    seen[0] = seen[last] = seen[last * COLOR_SKY] = seen[last * COLOR_SKY + last] = 1;
    for (uint32_t level = 1; level <= COLOR_SKY_LEVELS; level++)
        for (uint32_t phase = 0; phase < 2; phase++) {
            struct color_spot next = color_spot(level, phase, 0);
            for (uint32_t n = 0; n < color_sky_count(level, phase); n++) {
                const struct color_spot spot = color_spot(level, phase, n);
                cr_assert(spot.row == next.row && spot.column == next.column, "%u %u %u", level, phase, n);
                cr_assert(spot.row <= last && spot.column <= last);
                cr_assert_eq(seen[spot.row * COLOR_SKY + spot.column]++, 0);
                next = color_next_spot(level, phase, spot);
            }
        }
    for (size_t i = 0; i < sizeof seen; i++)
        cr_assert_eq(seen[i], 1);
}

/* Shades equal the quotient for all values of a range. */
Test(color, shades_are_exact)
{
    for (int32_t range = 0; range < 20480; range += range < 300 ? 1 : 97) {
        const struct color_shades shades = color_shades(-5000, range - 5000);
        for (int32_t value = 0; value <= range; value++)
            cr_assert_eq(color_shade(shades, value - 5000), range ? (uint32_t)(value * 255 / range) : 0);
    }
}

/* A count of all points is below 2^16, and grades are monotonous. */
Test(color, grades_are_monotonous)
{
    cr_expect_lt(COLOR_POINTS, 65536);
    for (uint32_t most = 1; most < 300; most += 7)
        for (uint32_t count = 1; count <= most; count++) {
            cr_assert(color_grade(count, most) >= color_grade(count - 1, most) &&
                      color_grade(count, most) >= 1);
            cr_assert_eq(color_grade(most, most), 255);
        }
    cr_expect_eq(color_grade(COLOR_POINTS, COLOR_POINTS), 255);
    cr_expect_eq(color_grade(0, COLOR_POINTS), 0);
}

/* ---- Outputs and files ---- */

/* Each channel of an output is the gray output of its plane. */
Test(color, channels_are_converted_like_grays)
{
    static const char *const ends[] = {"", " --out-res 50", " --out-res 150", " --out-res 41 --fit crop"};
    static const char *const types[] = {"u8", "f16", "f32"};
    for (size_t i = 0; i < COUNT_OF(ends) * COUNT_OF(types) * 2; i++) {
        struct opened opened;
        char line[200];
        const bool pixels = i % 2;
        snprintf(line, sizeof line, ONE " --batch 1 --res 71%s --dtype %s --layout %s%s", ends[i / 6],
                 types[i / 2 % 3], pixels ? "nhwc" : "nchw",
                 i / 2 % 3 ? " --mean 0.1,0.2,0.3 --std 0.4,0.5,0.6" : "");
        open_synth(&opened, line);
        const struct synth *synth = opened.synth;
        const size_t side = synth->output.res, element = dtype_bytes(synth->output.type);
        const struct philox_key key = synth_image_key(synth, (struct synth_image){0, 0});
        const uint64_t numbers[] = {0};
        uint8_t *image = images_of(&opened, "omp", 1, numbers, 1);
        uint8_t *canvas = malloc(synth_image_bytes(synth)), *gray = malloc(side * side * element);
        void *scratch = aligned_alloc(64, color_scratch_bytes(&synth->color));
        color_draw_plain(&synth->color, synth->colors, key, 0, scratch, canvas);
        for (uint32_t c = 0; c < 3; c++) {
            struct synth_output own = synth->output;
            own.color = false;
            own.channels = 1;
            own.scale[0] = own.scale[c];
            own.bias[0] = own.bias[c];
            output_convert(&own, 71, key, canvas + c * 71 * 71, 71, gray);
            size_t wrong = 0;
            for (size_t at = 0; at < side * side; at++)
                wrong += memcmp(gray + at * element,
                                image + (pixels ? 3 * at + c : c * side * side + at) * element, element) != 0;
            cr_expect_eq(wrong, 0, "%s: channel %u", line, c);
        }
        free(image);
        free(canvas);
        free(gray);
        free(scratch);
        close_synth(&opened);
    }
}

#ifdef HAVE_PNG
/* Files have the pixels of the images, and their lists the classes. */
Test(color, pictures_have_colours)
{
    char folder[] = "/tmp/fdsl-color-XXXXXX", command[300], line[200], text[400] = "";
    cr_assert(mkdtemp(folder));
    struct opened opened;
    const uint64_t numbers[] = {0};
    snprintf(line, sizeof line, MANY " --batch 2 --res 40");
    open_synth(&opened, line);
    uint8_t *images = images_of(&opened, "naive", 1, numbers, 1), pixels[3 * 40 * 40];
    struct png_shape shape;
    uint32_t orientation;
    size_t wrong = 0;
    snprintf(command, sizeof command,
             "${FDSL_BENCH:-./fdsl-bench} --variant omp " MANY
             " --batch 2 --res 40 --max-time 0.1 --png %s/p >/dev/null 2>%s/e",
             folder, folder);
    cr_assert_eq(system(command), 0);
    snprintf(line, sizeof line, "%s/p/class-0_instance-1.png", folder);
    FILE *file = fopen(line, "rb");
    static uint8_t bytes[1 << 16];
    cr_assert(file);
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    cr_assert_eq(png_decode(bytes, size, pixels, sizeof pixels, &shape, &orientation), STATUS_OK, "%s",
                 status_text());
    cr_assert(shape.width == 40 && shape.channels == 3);
    for (size_t i = 0; i < 1600; i++)
        for (size_t c = 0; c < 3; c++)
            wrong += pixels[3 * i + c] != images[3 * 1600 + c * 1600 + i];
    cr_expect_eq(wrong, 0);
    snprintf(line, sizeof line, "%s/p/index.tsv", folder);
    file = fopen(line, "r");
    cr_assert(file && fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    synth_classes_text(opened.synth, (struct synth_image){0, 1}, line);
    cr_expect(strstr(text, "\tseed\tclasses\n") && strstr(text, line), "%s", text);
    snprintf(command, sizeof command, "rm -r %s", folder);
    cr_expect_eq(system(command), 0);
    free(images);
    close_synth(&opened);
}
#endif

#if defined(HAVE_JPEG) && defined(HAVE_XXHASH)
/* Runs a command in a folder; `%s` in it is the program. Returns its exit status. */
static int run_in(const char *folder, const char *words)
{
    char command[600], program[300];
    const char *given = getenv("FDSL_BENCH");
    snprintf(program, sizeof program, "%s", given ? given : "./fdsl-bench");
    char *absolute = realpath(program, NULL);
    cr_assert_not_null(absolute, "%s", program);
    snprintf(command, sizeof command, "cd %s && P=%s && %s", folder, absolute, words);
    free(absolute);
    const int status = system(command);
    return status < 0 ? status : status >> 8;
}

/* Samples of prepared shards have multi-hot labels, which are those of the images, and no class. */
Test(color, shards_have_multi_hot_labels)
{
    char folder[] = "/tmp/fdsl-color-XXXXXX", path[100], line[300];
    uint8_t file[400], expected[11];
    struct opened opened;
    cr_assert(mkdtemp(folder));
    open_synth(&opened, MANY " --classes 11 --batch 1 --res 24");
    for (int jpeg = 0; jpeg < 2; jpeg++) {
        snprintf(line, sizeof line,
                 "$P --prepare d%d --from synth " MANY " --classes 11 --res 24 --samples 5 "
                 "--encode %s >/dev/null 2>&1",
                 jpeg, jpeg ? "jpeg" : "npy");
        cr_assert_eq(run_in(folder, line), 0);
        snprintf(line, sizeof line, "tar xf d%d/synth-000000.tar && ! ls *.cls 2>/dev/null", jpeg);
        cr_assert_eq(run_in(folder, line), 0);
        for (uint64_t n = 0; n < 5; n++) {
            snprintf(path, sizeof path, "%s/00000%d.multihot.npy", folder, (int)n);
            FILE *stream = fopen(path, "rb");
            cr_assert_not_null(stream, "%s", path);
            const size_t size = fread(file, 1, sizeof file, stream);
            fclose(stream);
            cr_assert(size > 11 && memmem(file, size, "'|u1'", 5) && memmem(file, size, "(11,)", 5));
            color_multi_hot(&opened.synth->color, synth_image_key(opened.synth, (struct synth_image){0, n}),
                            expected);
            cr_expect_eq(memcmp(file + size - 11, expected, 11), 0, "%s", path);
        }
    }
    cr_expect_eq(run_in(folder, "$P --variant shards --data d0 --verify --max-time 0.1 >/dev/null 2>&1"), 0);
    cr_expect_eq(run_in(folder,
                        "$P --prepare d2 --from synth " MANY " --samples 5 --store imagefolder 2>&1 | "
                        "grep -q 'needs one class per image'"),
                 0);
    cr_expect_eq(run_in(folder, "$P --variant stream --data d0 --verify --max-time 0.1 >/dev/null 2>&1"), 0);
    snprintf(line, sizeof line, "rm -r %s", folder);
    cr_expect_eq(system(line), 0);
    close_synth(&opened);
}
#endif

/* --npy removes the files of targets that belong to the images of an earlier run, and no others. */
Test(color, targets_of_earlier_images_are_removed)
{
    char folder[] = "/tmp/fdsl-color-XXXXXX", line[300];
    cr_assert(mkdtemp(folder));
    static const struct {
        const char *preset, *name, *files;
    } runs[] = {{"multifractal-1k", "a", "a.labels.npy a.multihot.npy a.npy y.masks.npy"},
                {"fractal-color-1k", "a", "a.labels.npy a.npy y.masks.npy"},
                {"segrcdb", "b", "a.labels.npy a.npy b.labels.npy b.masks.npy b.npy y.masks.npy"},
                {"rcdb", "b", "a.labels.npy a.npy b.labels.npy b.npy y.masks.npy"},
                {"pc-fractaldb-1k", "a/c", "c.labels.npy c.npy c.points.npy"},
                {"mv-fractaldb-1k", "a/c", "c.labels.npy c.npy"}};
    cr_assert_eq(run_in(folder, "mkdir a && : > y.masks.npy"), 0);
    for (size_t i = 0; i < COUNT_OF(runs); i++) {
        snprintf(
            line, sizeof line,
            "$P --variant omp --preset %s --classes 2 --res 20 --batch 2 --loops 1 --npy %s.npy >/dev/null "
            "2>&1 && cd $(dirname ./%s) && test \"$(echo *.*)\" = '%s'",
            runs[i].preset, runs[i].name, runs[i].name, runs[i].files);
        cr_expect_eq(run_in(folder, line), 0, "%s", runs[i].preset);
    }
    snprintf(line, sizeof line, "rm -r %s", folder);
    cr_expect_eq(system(line), 0);
}

/* The report counts the objects and the classes of the first images. */
Test(color, sets_are_described)
{
    struct opened opened;
    struct ifs_report report;
    uint8_t label[30];
    uint32_t shown[30] = {0}, least = UINT32_MAX, most = 0;
    uint64_t objects[COLOR_OBJECTS_MAX] = {0}, labels = 0;
    open_synth(&opened, MANY " --classes 30 --batch 1 --res 60 --draw points");
    const struct synth *synth = opened.synth;
    cr_assert_eq(synth_describe_colors(synth, &report), STATUS_OK);
    cr_assert(report.classes == 30 && report.images == 30 && report.res == 60);
    for (uint64_t n = 0; n < 30; n++) {
        const struct philox_key key = synth_image_key(synth, (struct synth_image){0, n});
        color_multi_hot(&synth->color, key, label);
        for (uint32_t c = 0; c < 30; c++)
            shown[c] += label[c], labels += label[c];
        objects[color_objects(&synth->color, key) - 1]++;
    }
    for (uint32_t c = 0; c < 30; c++) {
        least = shown[c] < least ? shown[c] : least;
        most = shown[c] > most ? shown[c] : most;
    }
    cr_expect_arr_eq(report.objects, objects, sizeof objects);
    cr_expect(report.shown_least == least && report.shown_most == most);
    cr_expect_float_eq(report.shown_mean, (double)labels / 30, 1e-12);
    close_synth(&opened);
    /* The report on one image is that image's. */
    open_synth(&opened, ONE " --classes 1 --batch 1 --res 60 --draw points");
    void *scratch = aligned_alloc(64, color_scratch_bytes(&opened.synth->color));
    const struct philox_key key = synth_image_key(opened.synth, (struct synth_image){0, 0});
    const struct color_look look = color_look(&opened.synth->color, opened.synth->colors, key, 0, scratch);
    cr_assert_eq(synth_describe_colors(opened.synth, &report), STATUS_OK);
    cr_expect(look.objects == 1 && look.lit > 0 && look.lit < 1 && look.fill[0] > 0 && look.fill[0] < 1);
    cr_expect_float_eq(report.lit.mean, (double)look.lit, 1e-7);
    cr_expect_float_eq(report.fill.mean, (double)look.fill[0], 1e-7);
    free(scratch);
    close_synth(&opened);
}

#ifdef HAVE_INIH
static uint32_t list_backwards(const void *context, uint64_t epoch, uint64_t step, uint32_t *numbers)
{
    (void)context, (void)epoch, (void)step;
    for (uint32_t j = 0; j < 7; j++)
        numbers[j] = 6 - j;
    return 7;
}

/* With fresh samples, the labels in training are those of the images of the epoch. */
Test(color, training_takes_the_multi_hot_labels_of_each_epoch)
{
    struct data data;
    struct opened opened;
    uint8_t expected[45];
    struct stream *stream = NULL;
    struct stream_batch batch;
    open_synth(&opened, MANY " --classes 45 --batch 1 --res 24");
    const struct data_request request = {.name = "synth",
                                         .preset = "multifractal-1k",
                                         .classes = 45,
                                         .res = 24,
                                         .train_size = 7,
                                         .test_size = 3,
                                         .batch = 7,
                                         .feed = -1,
                                         .fresh = true,
                                         .resources = {.threads = 1}};
    cr_assert_eq(data_open(&request, &data), STATUS_OK, "%s", status_text());
    const struct data_stream_request of = {
        .plan = {.steps = 1, .capacity = 7, .list = list_backwards}, .copies = 1, .threads = 1, .held = 1};
    cr_assert_eq(data_stream(&data, &of, &stream), STATUS_OK, "%s", status_text());
    for (uint32_t epoch = 0; epoch < 3; epoch++) {
        cr_assert_eq(stream_next(stream, &batch), STATUS_OK, "%s", status_text());
        data_take_labels(&data, &batch, 7);
        for (uint32_t n = 0; n < 7; n++) {
            const struct synth_image image = {0, data_number(data.fresh, epoch, n)};
            color_multi_hot(&opened.synth->color, synth_image_key(opened.synth, image), expected);
            for (uint32_t k = 0; k < 45; k++)
                cr_expect_eq(target_has(data.sets[DATA_TRAIN].multi_hot, 45, n, k), expected[k],
                             "epoch %u, sample %u, class %u", epoch, n, k);
        }
        cr_assert_eq(stream_release(stream, &batch, NULL), STATUS_OK);
    }
    stream_close(stream);
    data_close(&data);
    close_synth(&opened);
}
#endif

/* ---- Class lists ---- */

static void expect_refused(const double *values, const char *piece)
{
    struct class_row row = {.id = 0};
    memcpy(row.value, values, COLOR_PARAMETERS * sizeof *values);
    cr_expect_eq(class_check(formulas[FORMULA_COLORFRACTAL], &row), STATUS_USAGE);
    cr_expect(strstr(status_text(), piece), "%s", status_text());
}

Test(color, classes_that_are_no_systems_are_refused)
{
    double right[COLOR_PARAMETERS] = {2, 0.5, 0, 0, 0.5, 1, 1, 0.5, 0.5, 0, 0, 0.5, 0, 0, 0.5},
           wrong[COLOR_PARAMETERS];
    struct class_row row = {.id = 0};
    memcpy(row.value, right, sizeof right);
    cr_expect_eq(class_check(formulas[FORMULA_COLORFRACTAL], &row), STATUS_OK, "%s", status_text());
    memcpy(wrong, right, sizeof right);
    wrong[1] = 1.01;
    expect_refused(wrong, "map 1 stretches by 1.01");
    wrong[1] = 0.8, wrong[2] = 0.8;
    expect_refused(wrong, "map 1 stretches by 1.");
    memcpy(wrong, right, sizeof right);
    wrong[14] = 0.4;
    expect_refused(wrong, "the sum 0.9");
    wrong[14] = 0.5, wrong[15] = 0.1;
    expect_refused(wrong, "a3 is 0.1, but the class has 2 maps");
    wrong[0] = 5;
    expect_refused(wrong, "maps");
}

/* Written classes draw the same images. */
Test(color, class_lists_are_read_back)
{
    char path[] = "/tmp/fdsl-color-XXXXXX", line[100];
    struct opened opened, again;
    const int file = mkstemp(path);
    const uint64_t numbers[] = {0};
    cr_assert_geq(file, 0);
    close(file);
    unlink(path);
    open_synth(&opened, ONE " --classes 4 --batch 4 --res 50");
    cr_assert_eq(class_write_csv(path, formulas[FORMULA_COLORFRACTAL], opened.synth->rows, 4), STATUS_OK);
    snprintf(line, sizeof line, "--class %s --batch 4 --res 50", path);
    open_synth(&again, line);
    cr_assert_eq(again.synth->formula, FORMULA_COLORFRACTAL);
    uint8_t *one = images_of(&opened, "omp", 1, numbers, 1), *two = images_of(&again, "omp", 1, numbers, 1);
    cr_expect_eq(memcmp(one, two, 4 * synth_output_bytes(opened.synth)), 0);
    free(one);
    free(two);
    close_synth(&opened);
    close_synth(&again);
    unlink(path);
}
