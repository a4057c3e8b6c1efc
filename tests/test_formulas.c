/* Tests the formulas beyond uji and visualatom: their definition, with a second implementation; their images
 * and masks in naive and omp; their classes; and the tables that describe all formulas. Run from the
 * repository root. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "class_rows.h"
#include "golden.h"
#include "machine/host.h"
#include "synth/class.h"
#include "synth/synth.h"

#include "../cpu/synth/omp_kernel.h"

TestSuite(formulas, .timeout = 300);

/* ---- Drawing ---- */

/* A batch: images, then masks if the formula defines them. */
struct drawn {
    uint8_t *images, *masks;
    size_t image_bytes, mask_bytes; /* of the batch */
};

/* Draws run 1, then run `run`, and returns the latter. */
static struct drawn draw_run(const struct opened *opened, const char *name, int threads, uint64_t run)
{
    const struct variant *variant = variant_find(name)->variant;
    const struct resources resources = {.threads = threads};
    const struct synth *synth = opened->synth;
    const size_t bytes = synth_output_bytes(synth), mask_bytes = synth_mask_bytes(synth);
    struct drawn drawn = {malloc(synth->batch * bytes), calloc(synth->batch, mask_bytes + 1),
                          synth->batch * bytes, synth->batch * mask_bytes};
    struct run_time time;
    void *state;
    cr_assert(drawn.images && drawn.masks);
    cr_assert_eq(variant->setup(&resources, opened->input, &state), STATUS_OK, "%s", status_text());
    cr_assert_eq(variant->run(state, 1, &time), STATUS_OK, "%s", status_text());
    cr_assert_eq(variant->run(state, run, &time), STATUS_OK, "%s", status_text());
    for (uint64_t j = 0; j < synth->batch; j++) {
        struct synth_fetch fetch = {
            .j = j, .pixels = drawn.images + j * bytes, .mask = drawn.masks + j * mask_bytes};
        cr_assert_eq(variant->fetch(state, &fetch), STATUS_OK, "%s", status_text());
    }
    variant->teardown(state);
    return drawn;
}

static void drop(struct drawn *drawn)
{
    free(drawn->images);
    free(drawn->masks);
}

static void expect_equal(const struct drawn *drawn, const struct drawn *expected, const char *what)
{
    cr_assert_eq(memcmp(drawn->images, expected->images, expected->image_bytes), 0, "images of %s", what);
    cr_assert_eq(memcmp(drawn->masks, expected->masks, expected->mask_bytes), 0, "masks of %s", what);
}

/* ---- A second implementation of the definition (src/synth/atom.h) ---- */

struct canvas {
    int res;
    uint8_t *pixels, *mask;
};

static void plot_line(const struct canvas *canvas, int x0, int y0, int x1, int y1, int gray, int class_id)
{
    long dx = labs((long)x1 - x0), dy = labs((long)y1 - y0), major = dy >= dx ? dy : dx;
    long minor = dy >= dx ? dx : dy, sx = x1 > x0 ? 1 : -1, sy = y1 > y0 ? 1 : -1;
    for (long i = 0; i <= major; i++) {
        long j = major ? (2 * i * minor + major) / (2 * major) : 0;
        long x = x0 + sx * (dy >= dx ? j : i), y = y0 + sy * (dy >= dx ? i : j);
        if (x < 0 || y < 0 || x >= canvas->res || y >= canvas->res)
            continue;
        canvas->pixels[y * canvas->res + x] = (uint8_t)gray;
        canvas->mask[y * canvas->res + x] = (uint8_t)class_id;
    }
}

static uint32_t word(struct philox_key key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t i)
{
    return philox(key, c0, c1, c2, c3).word[i];
}

/* The noise, from the published permutation: bit 3 of a hash makes the gradient -1. */
static float noise_of(uint32_t draw)
{
    const double place = (double)draw * 10000 / 0x1p32;
    const uint32_t cell = (uint32_t)place % 256;
    const float t = (float)(floor((place - floor(place)) * 0x1p24) * 0x1p-24);
    float gradient[2];
    for (uint32_t side = 0; side < 2; side++) {
        int hash = noise_permutation[(cell + side) % 256];
        gradient[side] = 0.4f * (float)(hash & 8 ? -1 : (hash & 7) + 1);
    }
    const float fade = t * t * t * fmaf(fmaf(t, 6, -15), t, 10), left = gradient[0] * t;
    return fmaf(fade, fmaf(gradient[1], t - 1, -left), left);
}

/* Draws a shape with the class of `row` at (x, y); its circle starts with the radii rx and ry. */
static void plot_shape(const struct canvas *canvas, const struct formula *formula,
                       const struct class_row *row, struct philox_key key, uint32_t slot, float centre_x,
                       float centre_y, float rx, float ry)
{
    const uint32_t q = (uint32_t)formula_value(formula, row, "vertices");
    const uint32_t orbits = (uint32_t)formula_value(formula, row, "orbits");
    const float p = (float)formula_value(formula, row, "noise");
    const float width = (float)formula_value(formula, row, "line_width");
    const float advance = (float)((double)p + (double)width);
    float *x = malloc(4 * q * sizeof *x), *y = x + q, *cosine = y + q, *sine = cosine + q;
    cr_assert(x);
    for (uint32_t v = 0; v < q; v++) {
        cosine[v] = (float)cos(2 * M_PI * v / q);
        sine[v] = (float)sin(2 * M_PI * v / q);
        x[v] = fmaf(rx, cosine[v], centre_x);
        y[v] = fmaf(ry, sine[v], centre_y);
    }
    for (uint32_t k = 0; k < orbits; k++) {
        const uint64_t draw = word(key, k / 4, 0, 1, slot, k % 4);
        const bool rcdb = formula->id == FORMULA_RCDB;
        const int gray = (int)(draw * (rcdb ? 257 : 256) >> 32);
        for (uint32_t v = 0; v < q; v++) {
            const float ex = noise_of(word(key, v, k / 2, 0, slot, k % 2 * 2));
            const float ey = noise_of(word(key, v, k / 2, 0, slot, k % 2 * 2 + 1));
            x[v] = fmaf(cosine[v], fmaf(-2 * p, ex, advance), x[v]);
            y[v] = fmaf(sine[v], fmaf(-2 * p, ey, advance), y[v]);
        }
        for (uint32_t v = 0; v < q; v++)
            plot_line(canvas, (int)x[v], (int)y[v], (int)x[(v + 1) % q], (int)y[(v + 1) % q],
                      gray > 255 ? 255 : gray, (int)row->id);
    }
    free(x);
}

static struct philox_key key_of(uint64_t seed, uint64_t instance, uint32_t class_id, uint32_t domain)
{
    const struct philox_block block =
        philox(philox_key(seed), (uint32_t)instance, (uint32_t)(instance >> 32), class_id, domain);
    return (struct philox_key){{block.word[0], block.word[1]}};
}

static uint32_t below(uint32_t draw, uint32_t count)
{
    return (uint32_t)((uint64_t)draw * count >> 32);
}

static float unit(uint32_t draw)
{
    return (float)(draw >> 8) * 0x1p-24f;
}

static float coordinate(uint32_t draw, int res, int span)
{
    const int most = res * span / 512;
    return (float)(res - most + (int)below(draw, (uint32_t)(2 * most + 1))) / 2;
}

static void plot_rcdb(const struct synth *synth, uint64_t number, const struct canvas *canvas)
{
    const struct class_row *row = &synth->rows[number % synth->class_count];
    const struct philox_key key = key_of(synth->seed, number / synth->class_count, row->id, 1);
    const float r0 = (float)below(word(key, 0, 0, 4, 0, 0), 101);
    memset(canvas->pixels, 255, (size_t)canvas->res * (size_t)canvas->res);
    plot_shape(canvas, formulas[FORMULA_RCDB], row, key, 0,
               coordinate(word(key, 0, 0, 2, 0, 0), canvas->res, 400),
               coordinate(word(key, 0, 0, 2, 0, 1), canvas->res, 400),
               r0 * (1 + unit(word(key, 0, 0, 4, 0, 1))), r0 * (1 + unit(word(key, 0, 0, 4, 0, 2))));
}

static void plot_segrcdb(const struct synth *synth, uint64_t number, const struct canvas *canvas)
{
    const struct formula *formula = formulas[FORMULA_SEGRCDB];
    const struct philox_key key = key_of(synth->seed, number, 0, 2);
    memset(canvas->pixels, 0, (size_t)canvas->res * (size_t)canvas->res);
    memset(canvas->mask, 0, (size_t)canvas->res * (size_t)canvas->res);
    for (uint32_t slot = 0; slot < 32; slot++) {
        const struct class_row *row = &synth->rows[below(word(key, slot, 0, 4, 0, 0), synth->class_count)];
        const float r0 = (float)formula_value(formula, row, "radius");
        plot_shape(canvas, formula, row, key, slot, coordinate(word(key, slot, 0, 4, 0, 2), canvas->res, 512),
                   coordinate(word(key, slot, 0, 4, 0, 1), canvas->res, 512),
                   r0 * (float)formula_value(formula, row, "oval_x"),
                   r0 * (float)formula_value(formula, row, "oval_y"));
    }
}

/* Compares naive with the second implementation. */
static void expect_defined(const char *line)
{
    struct opened opened;
    open_synth(&opened, line);
    const struct synth *synth = opened.synth;
    const size_t pixels = synth_image_bytes(synth), mask_bytes = synth_mask_bytes(synth);
    struct drawn drawn = draw_run(&opened, "naive", 1, 0);
    const struct canvas canvas = {(int)synth->res, malloc(pixels), calloc(pixels, 1)};
    cr_assert(canvas.pixels && canvas.mask);
    size_t painted = 0;
    for (uint64_t j = 0; j < synth->batch; j++) {
        if (synth->formula == FORMULA_RCDB)
            plot_rcdb(synth, synth->first + j, &canvas);
        else
            plot_segrcdb(synth, synth->first + j, &canvas);
        cr_assert_eq(memcmp(drawn.images + j * pixels, canvas.pixels, pixels), 0, "image %d of %s", (int)j,
                     line);
        cr_assert_eq(memcmp(drawn.masks + j * mask_bytes, canvas.mask, mask_bytes), 0, "mask %d of %s",
                     (int)j, line);
        for (size_t i = 0; i < pixels; i++)
            painted += canvas.pixels[i] != synth->rules.background;
    }
    cr_expect_gt(painted, pixels / 8, "the images of %s are nearly empty", line);
    free(canvas.pixels);
    free(canvas.mask);
    drop(&drawn);
    close_synth(&opened);
}

#ifdef HAVE_INIH
Test(formulas, images_are_those_of_the_definition)
{
    expect_defined("--formula rcdb --batch 40 --seed 18446744073709551615 --instance 3");
    expect_defined("--formula rcdb --batch 16 --res 97 --classes 5 --instance 4294967290");
    expect_defined("--formula rcdb --batch 3 --res 1025 --classes 3");
    expect_defined("--formula segrcdb --batch 2 --seed 7 --instance 4294967295");
    expect_defined("--formula segrcdb --batch 4 --res 97 --classes 3 --instance 11");
}

/* ---- Golden images ---- */

#ifdef HAVE_XXHASH
Test(formulas, naive_gives_the_golden_images)
{
    for (size_t i = 0; i < COUNT_OF(golden_formulas); i++) {
        const struct golden_formula *golden = &golden_formulas[i];
        struct opened opened;
        open_synth(&opened, golden->line);
        struct drawn drawn = draw_run(&opened, "naive", 1, 0);
        const uint64_t hash = XXH3_64bits(drawn.images, drawn.image_bytes);
        const uint64_t mask = drawn.mask_bytes ? XXH3_64bits(drawn.masks, drawn.mask_bytes) : 0;
        cr_expect(hash == golden->hash && mask == golden->mask, "%s: 0x%016llx, 0x%016llx", golden->line,
                  (unsigned long long)hash, (unsigned long long)mask);
        drop(&drawn);
        close_synth(&opened);
    }
}
#endif
#endif

/* ---- omp against naive ---- */

static char class_file[] = "/tmp/fdsl-formulas-XXXXXX";

static void write_classes(const char *text)
{
    strcpy(class_file, "/tmp/fdsl-formulas-XXXXXX");
    int file = mkstemp(class_file);
    cr_assert_geq(file, 0);
    cr_assert_eq(write(file, text, strlen(text)), (ssize_t)strlen(text));
    close(file);
}

#define RCDB_HEADER    "class,vertices,orbits,noise,line_width,radius,oval_x,oval_y,start_x,start_y\n"
#define SEGRCDB_HEADER "class,vertices,orbits,noise,line_width,radius,oval_x,oval_y\n"

/* Few and many vertices, steps of many pixels, orbits that leave the image and return, and lines that are too
 * long for vectors. */
static const char rcdb_classes[] = RCDB_HEADER "0,1,7,1,0.1,9,1,1,0,0\n"
                                               "7,2,60,3,0.05,50,1.5,2,0,0\n"
                                               "3,3,200,4,0.1,0,1,2,0,0\n"
                                               "4,5,199,3.999,0,100,2,1,0,0\n"
                                               "9,15,40,90,0,3,1,1,0,0\n"
                                               "5,16,41,-4,2,80,1,1,0,0\n"
                                               "6,17,12,900,0,3,1,1,0,0\n"
                                               "4294967295,200,201,2,0.1,33,1.25,1.75,0,0\n"
                                               "2,33,3,0,0,70,2,2,0,0\n"
                                               "1,5,66000,0,-0.001,40,1,1,0,0\n";
static const char segrcdb_classes[] = SEGRCDB_HEADER "1,1,7,1,0.1,9,1,1\n"
                                                     "255,2,50,3,0.05,50,1.5,2\n"
                                                     "3,3,50,4,0.1,0,1,2\n"
                                                     "4,5,49,90,0,50,2,1\n"
                                                     "128,500,13,2,0.1,33,1.25,1.75\n"
                                                     "6,17,3,900,0,3,1,1\n"
                                                     "17,33,1,0,0,70,2,2\n";

#ifdef _OPENMP
static const char *const isas[] = {"scalar", "avx2", "avx512"};

/* Compares run 0 of omp with naive, for every instruction set of this machine. */
static void expect_same(const char *line, int threads)
{
    struct opened opened;
    char what[256];
    open_synth(&opened, line);
    struct drawn expected = draw_run(&opened, "naive", 1, 0);
    for (size_t i = 0; i < COUNT_OF(isas); i++)
        if (isa_force(isas[i])) {
            struct drawn drawn = draw_run(&opened, "omp", threads, 0);
            snprintf(what, sizeof what, "%s (%s, %d threads)", line, isas[i], threads);
            expect_equal(&drawn, &expected, what);
            drop(&drawn);
        }
    drop(&expected);
    close_synth(&opened);
}

/* The steps of a line inside the image, found one by one. */
Test(formulas, omp_clips_lines_at_the_border)
{
    static const int spreads[] = {4, 40, 400, 3000000}, sides[] = {1, 2, 17, 300};
    uint32_t seen = 0;
    for (uint32_t n = 0; n < 40000; n++) {
        const struct philox_block words = philox(philox_key(5), n, 0, 0, 0);
        const int spread = spreads[n % 4], side = sides[n / 4 % 4];
        const struct line_rules rules = {.ends = n / 16 % 2, .outside = 1};
        int at[4];
        for (int i = 0; i < 4; i++)
            at[i] = (int)below(words.word[i], (uint32_t)(2 * spread + side)) - spread;
        if (n % 4 == 3) { /* long lines through the image: few steps near one end */
            at[0] = at[0] % 50;
            at[1] = at[1] % 50;
        }
        const struct line line = line_begin(&rules, at[0], at[1], at[2], at[3]);
        const struct omp_span span = omp_clip(&line, side);
        int64_t first = -1, end = -1, step = 0;
        for (struct line walk = line; walk.left > 0 && step < 4000; line_step(&walk), step++)
            if (line_inside(walk.x, walk.y, side)) {
                first = first < 0 ? step : first;
                end = step + 1;
            }
        if (n % 4 == 3 && step == 4000 && span.end > 4000)
            continue; /* not walked to its end */
        if (first < 0)
            cr_assert(span.first >= span.end, "%u: %ld to %ld", n, (long)span.first, (long)span.end);
        else
            cr_assert(span.first == first && span.end == end, "%u: %ld to %ld, not %ld to %ld", n,
                      (long)span.first, (long)span.end, (long)first, (long)end);
        seen += first >= 0;
    }
    cr_expect_gt(seen, 5000);
}

static void expect_same_sizes(const char *formula, const char *classes)
{
    static const int sides[] = {1, 2, 3, 31, 97, 224, 513}, batches[] = {10, 1, 3}, threads[] = {1, 2, 7};
#ifdef __SANITIZE_ADDRESS__
    const size_t step = 3; /* one batch per side */
#else
    const size_t step = 1;
#endif
    char line[200];
    write_classes(classes);
    for (size_t r = 0; r < COUNT_OF(sides); r++)
        for (size_t b = r % step; b < COUNT_OF(batches); b += step) {
            snprintf(line, sizeof line, "--formula %s --class %s --res %d --batch %d --instance %zu", formula,
                     class_file, sides[r], batches[b], r + b);
            expect_same(line, threads[(r + b) % 3]);
        }
    unlink(class_file);
}

Test(formulas, omp_matches_naive_with_rcdb)
{
    expect_same_sizes("rcdb", rcdb_classes);
}

Test(formulas, omp_matches_naive_with_segrcdb)
{
    expect_same_sizes("segrcdb", segrcdb_classes);
}

/* Images and masks of other types and sizes. With 16 threads and one image, omp splits the image. */
Test(formulas, omp_matches_naive_in_other_formats)
{
    static const char *const formats[] = {"--out-res 31", "--out-res 200 --channels 3 --layout nhwc",
                                          "--out-res 31 --fit crop --dtype f16", "--dtype f32 --channels 3"};
    char line[200];
    for (int formula = 0; formula < 2; formula++) {
        write_classes(formula ? segrcdb_classes : rcdb_classes);
        for (size_t f = 0; f < COUNT_OF(formats); f++)
            for (int batch = 1; batch <= 5; batch += 4) {
                snprintf(line, sizeof line, "--formula %s --class %s --res 97 --batch %d %s",
                         formula ? "segrcdb" : "rcdb", class_file, batch, formats[f]);
                expect_same(line, batch == 1 ? 16 : 3);
            }
        unlink(class_file);
    }
}
#endif

/* ---- Masks ---- */

/* The mask of a resized image has the pixel of the canvas under the centre of each output pixel; that of a
 * crop is cut at the same place as the image. */
Test(formulas, masks_are_cut_like_images)
{
    static const char *const base = "--formula segrcdb --res 90 --batch 4 --seed 5 --instance 2 --class";
    char line[200];
    struct opened whole, other;
    write_classes(segrcdb_classes);
    snprintf(line, sizeof line, "%s %s", base, class_file);
    open_synth(&whole, line);
    struct drawn canvas = draw_run(&whole, "naive", 1, 0);
    for (int side = 30; side <= 180; side *= 2) { /* an odd shrinking factor 3, then enlargement */
        snprintf(line, sizeof line, "%s %s --out-res %d", base, class_file, side);
        open_synth(&other, line);
        struct drawn resized = draw_run(&other, "naive", 1, 0);
        for (int j = 0; j < 4; j++)
            for (int y = 0; y < side; y++)
                for (int x = 0; x < side; x++) {
                    const int from_x = (int)((x + 0.5) * 90 / side), from_y = (int)((y + 0.5) * 90 / side);
                    cr_assert_eq(resized.masks[(j * side + y) * side + x],
                                 canvas.masks[(j * 90 + from_y) * 90 + from_x], "%d: %d, %d", side, x, y);
                }
        drop(&resized);
        close_synth(&other);
    }
    snprintf(line, sizeof line, "%s %s --out-res 41 --fit crop", base, class_file);
    open_synth(&other, line);
    struct drawn crop = draw_run(&other, "naive", 1, 0);
    for (int j = 0; j < 4; j++) {
        int places = 0, mask_places = 0;
        for (int y = 0; y <= 49; y++)
            for (int x = 0; x <= 49; x++) {
                bool same = true, mask_same = true;
                for (int row = 0; row < 41; row++) {
                    const size_t from = (size_t)((j * 90 + y + row) * 90 + x),
                                 to = (size_t)((j * 41 + row) * 41);
                    same = same && memcmp(canvas.images + from, crop.images + to, 41) == 0;
                    mask_same = mask_same && memcmp(canvas.masks + from, crop.masks + to, 41) == 0;
                }
                places += same;
                mask_places += same && mask_same;
            }
        cr_expect(places == 1 && mask_places == 1, "image %d: %d, %d", j, places, mask_places);
    }
    drop(&crop);
    close_synth(&other);
    drop(&canvas);
    close_synth(&whole);
    unlink(class_file);
}

/* Ranks divide a global batch. The images do not depend on their number. */
Test(formulas, ranks_generate_parts_of_one_batch)
{
    struct opened whole, part;
    write_classes(segrcdb_classes);
    char line[200], part_line[220];
    snprintf(line, sizeof line, "--formula segrcdb --res 64 --class %s --batch", class_file);
    snprintf(part_line, sizeof part_line, "%s 7", line);
    open_synth(&whole, part_line);
    struct drawn all = draw_run(&whole, "naive", 1, 3);
    for (uint64_t rank = 0, at = 0; rank < 3; rank++) {
        open_synth(&part, part_line);
        const struct partition partition = {.rank = rank, .ranks = 3, .strong = true};
        cr_assert_eq(part.workload->repartition(part.input, part.parameters, &partition), STATUS_OK);
        struct drawn own = draw_run(&part, "naive", 1, 3);
        cr_expect_eq(memcmp(own.images, all.images + at, own.image_bytes), 0, "rank %d", (int)rank);
        cr_expect_eq(memcmp(own.masks, all.masks + at, own.mask_bytes), 0, "rank %d", (int)rank);
        at += own.image_bytes;
        drop(&own);
        close_synth(&part);
    }
    drop(&all);
    close_synth(&whole);
    unlink(class_file);
}

/* ---- The oracle ---- */

/* Draws with naive, and then changes one byte of an image or of a mask. */
struct faulty {
    const struct variant *variant;
    void *state;
    uint64_t j;
    size_t image_at, mask_at; /* SIZE_MAX: no fault */
};

static enum status faulty_fetch(void *state, void *result)
{
    const struct faulty *faulty = state;
    struct synth_fetch *fetch = result;
    TRY(faulty->variant->fetch(faulty->state, fetch));
    if (fetch->j == faulty->j && faulty->image_at != SIZE_MAX)
        fetch->pixels[faulty->image_at] ^= 1;
    if (fetch->j == faulty->j && faulty->mask_at != SIZE_MAX)
        fetch->mask[faulty->mask_at] ^= 1;
    return STATUS_OK;
}

#define FRACTALS "--formula fractaldb --class tests/data/fractaldb.csv --res 64 --batch 3"

static void expect_wrong(const char *line, size_t image_at, size_t mask_at, uint64_t expected)
{
    struct opened opened;
    struct run_time time;
    uint64_t wrong;
    open_synth(&opened, line);
    struct faulty faulty = {variant_find("naive")->variant, NULL, 1, image_at, mask_at};
    const struct resources resources = {.threads = 1};
    const struct variant variant = {
        .platform = "cpu", .traits = faulty.variant->traits, .fetch = faulty_fetch};
    cr_assert_eq(faulty.variant->setup(&resources, opened.input, &faulty.state), STATUS_OK);
    cr_assert_eq(faulty.variant->run(faulty.state, 0, &time), STATUS_OK);
    cr_assert_eq(oracle_verify(opened.input, &variant, &faulty, 0, &wrong), STATUS_OK);
    cr_expect_eq(wrong, expected, "%s: %d images are wrong", line, (int)wrong);
    faulty.variant->teardown(faulty.state);
    close_synth(&opened);
}

Test(formulas, verify_finds_one_wrong_pixel_and_one_wrong_class)
{
    char line[200];
    write_classes(segrcdb_classes);
    for (int out = 0; out < 2; out++) {
        snprintf(line, sizeof line, "--formula segrcdb --res 64 --batch 3 --class %s --out-res %d",
                 class_file, out ? 30 : 64);
        expect_wrong(line, SIZE_MAX, SIZE_MAX, 0);
        expect_wrong(line, 0, SIZE_MAX, 1);
        expect_wrong(line, SIZE_MAX, 899, 1);
    }
    unlink(class_file);
    write_classes(rcdb_classes);
    snprintf(line, sizeof line, "--formula rcdb --res 64 --batch 3 --class %s", class_file);
    expect_wrong(line, SIZE_MAX, SIZE_MAX, 0);
    expect_wrong(line, 4095, SIZE_MAX, 1);
    unlink(class_file);
    expect_wrong(FRACTALS, SIZE_MAX, SIZE_MAX, 0);
    expect_wrong(FRACTALS, 4095, SIZE_MAX, 1);
    expect_wrong(FRACTALS " --draw points", 4095, SIZE_MAX, 1);
}

/* ---- Classes ---- */

#ifdef HAVE_INIH
/* The law of the published scripts: an exponential number, rounded down, drawn again until it is in the
 * range.
 */
Test(formulas, vertices_follow_the_published_law)
{
    enum { DRAWS = 40000, LOW = 3, HIGH = 200 };
    static int counts[HIGH + 1];
    struct class_ranges ranges;
    cr_assert_eq(class_ranges_read(NULL, "rcdb", formulas[FORMULA_RCDB], &ranges), STATUS_OK, "%s",
                 status_text());
    double worst = 0, seen = 0;
    for (uint32_t id = 0; id < DRAWS; id++) {
        struct class_row row;
        class_draw(&ranges, id, &row);
        cr_assert_eq(class_check(formulas[FORMULA_RCDB], &row), STATUS_OK, "%s", status_text());
        const double q = formula_value(formulas[FORMULA_RCDB], &row, "vertices");
        cr_assert(q >= LOW && q <= HIGH && q == floor(q));
        counts[(int)q]++;
    }
    for (int q = LOW; q <= HIGH; q++) { /* Kolmogorov-Smirnov: 1.95 / sqrt(n) has a probability of 0.1 % */
        seen += counts[q];
        const double expected =
            (exp(-LOW / 100.0) - exp(-(q + 1) / 100.0)) / (exp(-LOW / 100.0) - exp(-(HIGH + 1) / 100.0));
        worst = fmax(worst, fabs(seen / DRAWS - expected));
    }
    cr_expect_lt(worst, 1.95 / sqrt(DRAWS));
    cr_expect_gt(counts[LOW] + counts[HIGH], 0);
}

/* Drawn classes must never change. */
Test(formulas, drawn_classes_never_change)
{
    static const struct {
        enum formula_id formula;
        const char *preset;
        struct class_row row;
    } frozen[] = {
        {FORMULA_RCDB,
         "rcdb",
         {0,
          {57, 188, 0.95165896415710449, 0.030982756987214088, 78, 1.9864434003829956, 1.0580062866210938,
           256, 256}}},
        {FORMULA_RCDB,
         "rcdb",
         {775,
          {4, 154, 1.7960522174835205, 0.021733826026320457, 55, 1.6428940296173096, 1.6798745393753052, 256,
           256}}},
        {FORMULA_SEGRCDB,
         "segrcdb-ranges",
         {1, {3, 35, 1.5925731658935547, 0.070252396166324615, 22, 1.0148369073867798, 1.488645076751709}}},
        {FORMULA_SEGRCDB,
         "segrcdb-ranges",
         {254,
          {95, 24, 1.1439924240112305, 0.023292452096939087, 19, 1.2505056858062744, 1.2271144390106201}}},
    };
    for (size_t i = 0; i < COUNT_OF(frozen); i++) {
        struct class_ranges ranges;
        struct class_row row;
        cr_assert_eq(class_ranges_read(NULL, frozen[i].preset, formulas[frozen[i].formula], &ranges),
                     STATUS_OK, "%s", status_text());
        class_draw(&ranges, frozen[i].row.id, &row);
        cr_expect_eq(memcmp(&row, &frozen[i].row, sizeof row), 0, "%s %u", frozen[i].preset, row.id);
        for (size_t p = 0; p < formulas[frozen[i].formula]->parameter_count; p++)
            cr_expect_eq(row.value[p], frozen[i].row.value[p], "%s %u: value %zu is %.17g", frozen[i].preset,
                         row.id, p, row.value[p]);
    }
}
#endif

static enum status read_text(enum formula_id formula, const char *text)
{
    struct class_row *rows = NULL;
    size_t count;
    enum status status = class_read_text(text, "list", formulas[formula], &rows, &count);
    free(rows);
    return status;
}

static void expect_refused(enum formula_id formula, const char *text, const char *piece)
{
    cr_expect_eq(read_text(formula, text), STATUS_USAGE, "%s", text);
    cr_expect(strstr(status_text(), piece), "the message is: %s", status_text());
}

Test(formulas, lists_are_those_of_the_formula)
{
    cr_expect_eq(read_text(FORMULA_RCDB, rcdb_classes), STATUS_OK, "%s", status_text());
    cr_expect_eq(read_text(FORMULA_SEGRCDB, segrcdb_classes), STATUS_OK, "%s", status_text());
    expect_refused(FORMULA_UJI, rcdb_classes, "column 4");
    expect_refused(FORMULA_SEGRCDB, rcdb_classes, "10 columns");
    expect_refused(FORMULA_SEGRCDB, SEGRCDB_HEADER "0,3,5,1,0,1,1,1\n", "1 to 255");
    expect_refused(FORMULA_SEGRCDB, SEGRCDB_HEADER "256,3,5,1,0,1,1,1\n", "1 to 255");
    expect_refused(FORMULA_SEGRCDB, SEGRCDB_HEADER "1,3.5,5,1,0,1,1,1\n", "vertices");
    expect_refused(FORMULA_SEGRCDB, SEGRCDB_HEADER "1,3,900000,9,0,1,1,1\n", "lower orbits");
    expect_refused(FORMULA_RCDB, RCDB_HEADER "1,3,5,nan,0,1,1,1,0,0\n", "noise");
}

Test(formulas, doubles_are_written_exactly)
{
    char path[] = "/tmp/fdsl-formulas-XXXXXX";
    int file = mkstemp(path);
    cr_assert(file >= 0 && close(file) == 0);
    const struct class_row row = {
        9, {14, 196, 0.2524272885508373, 0.1, 97, 1.449491064788738, 0x1p-1074, 104, 163}};
    struct class_row *back = NULL;
    size_t count;
    cr_assert_eq(class_write_csv(path, formulas[FORMULA_RCDB], &row, 1), STATUS_OK, "%s", status_text());
    cr_assert_eq(class_read_csv(path, formulas[FORMULA_RCDB], &back, &count), STATUS_OK, "%s", status_text());
    cr_expect(count == 1 && memcmp(back, &row, sizeof row) == 0);
    free(back);
    unlink(path);
}

/* ---- The tables ---- */

/* Each struct formula is complete and consistent. A new formula is checked without a change of this test. */
Test(formulas, every_formula_is_described)
{
    for (size_t f = 0; f < FORMULA_COUNT; f++) {
        const struct formula *formula = formulas[f];
        uint32_t turns = 0;
        cr_expect_eq((size_t)formula->id, f);
        cr_expect_str_eq(formula->name, formula_names[f]);
        cr_expect(formula->summary && formula->check && formula->targets && formula->canvas);
        cr_expect(formula->published || formula->unpublished, "%s", formula->name);
        cr_assert_leq(formula->parameter_count, FORMULA_PARAMETERS_MAX);
        for (size_t i = 0; i < formula->parameter_count; i++) {
            const struct formula_parameter *parameter = &formula->parameters[i];
            cr_expect(parameter->least <= parameter->most && parameter->span >= 0, "%s", parameter->name);
            cr_expect(!parameter->low_key || parameter->high_key || parameter->span > 0, "%s",
                      parameter->name);
            cr_expect(parameter->law != LAW_DIFFERENT || i > 0);
            cr_expect(parameter->law != LAW_EXPONENTIAL || formula->mean_key);
            turns |= formula->family == FAMILY_LINES ? 1u << parameter->turn : 0;
            for (size_t k = 0; k < i; k++)
                cr_expect_str_neq(parameter->name, formula->parameters[k].name);
        }
        if (formula->family == FAMILY_LINES) /* other classes are not drawn from ranges */
            cr_expect_eq(turns, (1u << formula->parameter_count) - 1, "%s", formula->name);
        cr_expect_eq(formula_is_system(formula), formula->ifs != NULL, "%s", formula->name);
        const struct line_rules rules = line_rules_of((enum formula_id)f);
        cr_expect(rules.shapes >= 1 && rules.noise_factor > 0 && rules.background <= 255, "%s",
                  formula->name);
        cr_expect(!rules.masked || (formula->id_least > 0 && formula->id_most <= 255), "%s", formula->name);
        cr_expect_eq(rules.masked != 0, (formula->targets & TARGET_MASK) != 0, "%s", formula->name);
        for (size_t other = 0; other < f; other++) { /* other formulas must have other random numbers */
            const struct line_rules theirs = line_rules_of((enum formula_id)other);
            cr_expect(theirs.domain != rules.domain || formulas[other]->parameters == formula->parameters,
                      "%s", formula->name);
        }
    }
}

/* Opens the workload; expects the message to contain `piece`. */
static void expect_usage(const char *words, const char *piece)
{
    char line[256], *rest = line, *argv[32] = {(char *)"test"};
    int argc = 1;
    const struct workload *workload = workload_find("synth");
    const struct partition alone = {.ranks = 1};
    void *input = NULL, *parameters = calloc(1, workload->parameters_bytes);
    snprintf(line, sizeof line, "%s", words);
    for (char *each; (each = strsep(&rest, " ")); argc++)
        argv[argc] = each;
    struct options options = {.tables = {{workload->options, workload->option_count, parameters}},
                              .table_count = 1};
    cr_assert_eq(options_parse(&options, argc, argv), STATUS_OK, "%s", status_text());
    cr_expect_eq(workload->open(&options, parameters, &alone, &input), STATUS_USAGE, "%s", words);
    cr_expect(strstr(status_text(), piece), "%s: %s", words, status_text());
    workload->close(input);
    options_free(&options);
    free(parameters);
}

Test(formulas, options_that_contradict_the_formula_are_refused)
{
    expect_usage("--formula uji --preset rcdb --classes 3",
                 "rcdb is a preset of the formula rcdb, not of uji");
    expect_usage("--formula rcdb --vertices 9", "--vertices");
    expect_usage("--formula segrcdb --preset segrcdb-ranges --classes 300", "1 to 255");
    expect_usage("--formula uji --random published", "cuRAND");
    expect_usage("--preset rcdb-1k --random published --seed 3", "--seed has no effect on published images");
    expect_usage("--formula rcdb --class x.csv --random published", "drop --class");
    expect_usage("--preset rcdb-1k --preset-file x --classes 9 --random published", "drop --preset-file");
    expect_usage("--formula rcdb --draw points", "--draw: the formula rcdb draws no fractals of the plane");
    expect_usage("--preset fractaldb-1k --random published", "add --draw points");
    /* Points do not help if there is no set. */
    expect_usage("--formula fractaldb --classes 3 --random published",
                 "set --preset to the name of one, such as");
    expect_usage("--preset 1p-frac --random published", "set --preset to the name of one, such as");
    expect_usage("--formula fractaldb --class tests/data/fractaldb.csv --res 12",
                 "--res: 12 pixels per side");
    expect_usage("--formula fractaldb --class tests/data/fractaldb.csv --draw points --random published",
                 "drop --class");
    expect_usage("--preset multifractal-1k --channels 1", "have colours; drop it");
    expect_usage("--formula colorfractal --preset multifractal-1k",
                 "multifractal-1k is a preset of the formula multifractal, not of colorfractal");
    expect_usage("--formula multifractal --preset-file x --preset y --classes 3", "has no ranges");
    expect_usage("--preset fractal-color-1k --random published", "unseeded generators");
    expect_usage("--preset fractal-color-1k --min-lit 0.1", "draws no fractals of the plane with weights");
    expect_usage("--preset segrcbd --classes 3", "did you mean [segrcdb]?");
    expect_usage("--preset segrcbd", "did you mean [segrcdb]?");
    expect_usage("--preset visualatom", "--preset has an effect only with --classes; add --classes N");
    expect_usage("--preset rcdb1k --classes 3", "did you mean [rcdb-1k]?");
}

/* Returns the value of parameter i of a valid class. A fractal has two maps, each with the probability 0.5.
 */
static double some_value(const struct formula *formula, size_t i)
{
    const size_t values = formula->family == FAMILY_IFS3D ? IFS3D_MAP_VALUES : IFS_MAP_VALUES; /* per map */
    if (formula->family != FAMILY_LINES)
        return i == 0 ? 2 : i <= 2 * values ? 0.5 : 0;
    return fmax(formula->parameters[i].least, fmin(5, formula->parameters[i].most));
}

/* The columns of a list name its formula, or the first one that has them. A byte order mark is skipped. */
Test(formulas, the_columns_of_a_list_imply_the_formula)
{
    for (int f = 0; f < FORMULA_COUNT; f++)
        for (int marked = 0; marked < 2; marked++) {
            char path[] = "/tmp/formulas-XXXXXX", words[64];
            const int file = mkstemp(path);
            const struct formula *formula = formulas[f];
            struct opened opened;
            cr_assert(file >= 0 && dprintf(file, "%sclass", marked ? "\xEF\xBB\xBF" : "") > 0);
            for (size_t i = 0; i < formula->parameter_count; i++)
                dprintf(file, ",%s", formula->parameters[i].name);
            dprintf(file, "\n%u", formula->id_least);
            for (size_t i = 0; i < formula->parameter_count; i++)
                dprintf(file, ",%.17g", some_value(formula, i));
            dprintf(file, "\n");
            close(file);
            snprintf(words, sizeof words, "--class %s --batch 1", path);
            open_synth(&opened, words);
            cr_expect_eq(opened.synth->formula, f == FORMULA_VISUALATOM     ? FORMULA_UJI
                                                : f == FORMULA_MULTIFRACTAL ? FORMULA_COLORFRACTAL
                                                                            : (enum formula_id)f);
            close_synth(&opened);
            unlink(path);
        }
}

#ifdef HAVE_INIH
Test(formulas, a_preset_implies_the_formula_and_its_classes)
{
    struct opened opened;
    for (int ranges = 0; ranges < 2; ranges++) {
        open_synth(&opened, ranges ? "--preset segrcdb-ranges --batch 1" : "--preset segrcdb --batch 1");
        cr_expect_eq(opened.synth->formula, FORMULA_SEGRCDB);
        cr_expect_eq(opened.synth->class_count, 254);
        cr_expect_eq(opened.synth->rows[0].id, 1);
        close_synth(&opened);
    }
    open_synth(&opened, "--preset visualatom --classes 3 --batch 1");
    cr_expect_eq(opened.synth->formula, FORMULA_UJI, "presets of VisualAtom suit both formulas");
    close_synth(&opened);
}
#endif

/* The variants of the paper draw only its formulas, and the message names others. */
Test(formulas, the_ladder_refuses_other_formulas)
{
    const struct synth_traits ladder = {.timed = "draw"};
    const struct variant variant = {.platform = "cuda", .traits = &ladder};
    struct synth synth = {.batch = 1};
    for (size_t f = 0; f < FORMULA_COUNT; f++) {
        synth_set_formula(&synth, (enum formula_id)f);
        enum status status = synth_check_formula(&synth, &variant);
        cr_expect_eq(status, formulas[f]->paper ? STATUS_OK : STATUS_USAGE, "%s", formulas[f]->name);
        cr_expect(formulas[f]->paper || (strstr(status_text(), formulas[f]->name) &&
                                         strstr(status_text(), "use naive, omp or fused")));
    }
}

/* ---- The page ---- */

/* The table of docs/formulas.md has one row per formula, in order. A row ends with the published program. */
Test(formulas, the_page_lists_all_formulas)
{
    FILE *file = fopen("docs/formulas.md", "r");
    static char page[1 << 16];
    cr_assert_not_null(file);
    cr_assert_gt(fread(page, 1, sizeof page - 1, file), 0);
    fclose(file);
    const char *at = page;
    for (size_t f = 0; f < FORMULA_COUNT; f++) {
        const struct formula *formula = formulas[f];
        char row[512], classes[32] = "the benchmark class";
        if (formula->classes)
            snprintf(classes, sizeof classes, "%u", (unsigned)formula->classes);
        snprintf(row, sizeof row, "\n| `%s` | %s | %s | %s |", formula->name, formula->summary,
                 formula->targets == TARGET_MASK        ? "mask"
                 : formula->targets == TARGET_MULTI_HOT ? "multi-hot label"
                 : formula->targets == TARGET_LABEL     ? "label"
                                                        : "label, points",
                 classes);
        at = strstr(at, row);
        cr_assert_not_null(at, "docs/formulas.md has no row that begins with:%s", row);
    }
}
