/* Tests that the images of exact variants are bit-identical to those of the reference, and that the
 * reference's images have the golden hashes. */
#include "support.h"

#include <stdio.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "golden.h"
#include "synth/synth.h"
#ifdef _OPENMP
#include "machine/host.h"
#endif

TestSuite(variants, .timeout = 300);

static const uint64_t run_0[] = {0};

/* ---- Golden images ---- */

static void open_golden(struct opened *opened, const struct golden *golden)
{
    char line[256], class_[64];
    if (golden->preset)
        snprintf(class_, sizeof class_, "--classes 10 --preset %s", golden->preset);
    else
        snprintf(class_, sizeof class_, "--vertices %u --orbits %u", golden->vertices, golden->orbits);
    snprintf(line, sizeof line, "--batch 1 --seed %llu --formula %s --res %u --instance %llu %s",
             (unsigned long long)golden->seed, golden->formula, golden->res,
             (unsigned long long)golden->number, class_);
    open_synth(opened, line);
}

#ifdef HAVE_XXHASH
Test(variants, naive_gives_the_golden_images)
{
    for (size_t i = 0; i < COUNT_OF(golden_images); i++) {
        struct opened opened;
        open_golden(&opened, &golden_images[i]);
        uint8_t *image = images_of(&opened, "naive", 1, run_0, 1);
        uint64_t hash = XXH3_64bits(image, synth_image_bytes(opened.synth));
        cr_expect_eq(hash, golden_images[i].hash, "golden image %zu has the hash 0x%016llx", i,
                     (unsigned long long)hash);
        free(image);
        close_synth(&opened);
    }
}
#endif

Test(variants, the_oracle_gives_the_golden_images)
{
    const struct synth_traits traits = {.noise = SYNTH_NOISE_COUNTER};
    for (size_t i = 0; i < COUNT_OF(golden_images); i++) {
        struct opened opened;
        open_golden(&opened, &golden_images[i]);
        const struct synth *synth = opened.synth;
        uint8_t *image = images_of(&opened, "naive", 1, run_0, 1),
                *expected = malloc(synth_image_bytes(synth));
        float *noise = malloc(2 * sizeof *noise * synth->segments_max);
        struct atom_point *points = malloc(synth->vertices_max * sizeof *points);
        cr_assert(expected && noise && points);
        struct synth_image which = synth_image_at(synth->first, 1, synth->turns, 0, 0);
        oracle_noise(synth, &traits, which, 0, noise);
        oracle_draw(synth, which, 0, noise, points, &(struct oracle_picture){.pixels = expected});
        cr_expect_arr_eq(image, expected, synth_image_bytes(synth), "golden image %zu", i);
        free(image);
        free(expected);
        free(noise);
        free(points);
        close_synth(&opened);
    }
}

Test(variants, runs_of_naive_are_independent)
{
    struct opened opened;
    open_synth(&opened, "--batch 3 --res 64 --classes 4");
    static const uint64_t both[] = {1, 0}, run_1[] = {1};
    uint8_t *alone = images_of(&opened, "naive", 1, run_0, 1),
            *after = images_of(&opened, "naive", 1, both, 2);
    uint8_t *other = images_of(&opened, "naive", 1, run_1, 1);
    cr_assert_arr_eq(alone, after, 3 * synth_image_bytes(opened.synth));
    cr_assert_neq(memcmp(alone, other, 3 * synth_image_bytes(opened.synth)), 0);
    free(alone);
    free(after);
    free(other);
    close_synth(&opened);
}

/* ---- omp against naive ---- */

#ifdef _OPENMP

static const char *const isas[] = {"scalar", "avx2", "avx512"};
static const int thread_counts[] = {1, 2, 3, 8};

/* Performs the runs `numbers` of omp with one instruction set. Expects the images of the last run to equal
 * `expected`. */
static void compare(const struct opened *opened, const char *line, const char *isa, int threads,
                    const uint64_t *numbers, int count, const uint8_t *expected)
{
    cr_assert(isa_force(isa));
    uint8_t *images = images_of(opened, "omp", threads, numbers, count);
    size_t bytes = synth_image_bytes(opened->synth);
    for (uint64_t j = 0; j < opened->synth->batch; j++)
        cr_assert_eq(memcmp(images + j * bytes, expected + j * bytes, bytes), 0,
                     "image %llu of %s differs (%s, %d threads)", (unsigned long long)j, line, isa, threads);
    free(images);
}

/* Compares run 0 of omp with naive, for every instruction set of this machine. `threads` is the number of
 * threads, or 0 for every number in thread_counts. */
static void expect_same(const char *line, int threads)
{
    struct opened opened;
    open_synth(&opened, line);
    uint8_t *expected = images_of(&opened, "naive", 1, run_0, 1);
    for (size_t i = 0; i < COUNT_OF(isas); i++)
        for (size_t t = 0; isa_force(isas[i]) && t < COUNT_OF(thread_counts); t++)
            if (threads == 0 || threads == thread_counts[t])
                compare(&opened, line, isas[i], thread_counts[t], run_0, 1, expected);
    free(expected);
    close_synth(&opened);
}

static void expect_same_sizes(const char *formula)
{
    static const int vertices[] = {1, 2, 3, 7, 15, 16, 17, 31, 997, 1025}, orbits[] = {1, 2, 3, 201};
    static const int sides[] = {1, 2, 3, 31, 97, 224, 513}, batches[] = {1, 3, 7};
#ifdef __SANITIZE_ADDRESS__
    const size_t step = 2; /* each number of vertices still occurs with each side */
#else
    const size_t step = 1;
#endif
    int turn = 0; /* selects the number of threads and the batch */
    for (size_t v = 0; v < COUNT_OF(vertices); v++)
        for (size_t k = 0; k < COUNT_OF(orbits); k++)
            for (size_t r = k % step; r < COUNT_OF(sides); r += step, turn++) {
                char line[160];
                snprintf(line, sizeof line, "--formula %s --vertices %d --orbits %d --res %d --batch %d",
                         formula, vertices[v], orbits[k], sides[r], batches[turn % 3]);
                expect_same(line, thread_counts[turn % 4]);
            }
}

Test(variants, omp_matches_naive_at_odd_sizes_with_uji)
{
    expect_same_sizes("uji");
}

Test(variants, omp_matches_naive_at_odd_sizes_with_visualatom)
{
    expect_same_sizes("visualatom");
}

Test(variants, omp_matches_naive_with_any_threads_and_batches)
{
    static const int batches[] = {1, 2, 3, 7, 8};
    for (size_t i = 0; i < COUNT_OF(batches); i++) {
        char line[160];
        snprintf(line, sizeof line, "--vertices 311 --orbits 41 --res 100 --batch %d", batches[i]);
        expect_same(line, 0);
    }
}

/* With more threads than vertices, some threads have no work. */
Test(variants, omp_matches_naive_with_fewer_vertices_than_threads)
{
    expect_same("--vertices 1 --orbits 60 --res 100 --batch 1", 0);
    expect_same("--vertices 2 --orbits 60 --res 100 --batch 1 --formula visualatom", 0);
    expect_same("--vertices 5 --orbits 60 --res 100 --batch 1", 0);
}

Test(variants, omp_matches_naive_on_mixed_classes)
{
    static const char *const lines[] = {
        "--classes 5 --batch 7 --res 224", "--classes 16 --batch 3 --res 129",
        "--classes 6 --batch 1 --res 200 --formula visualatom",
        "--classes 3 --batch 7 --res 256 --preset lowercompute --instance 1000003"};
    static const uint64_t numbers[] = {0, 1, 7};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        struct opened opened;
        open_synth(&opened, lines[i]);
        for (size_t n = 0; n < COUNT_OF(numbers); n++) {
            uint8_t *expected = images_of(&opened, "naive", 1, &numbers[n], 1);
            for (size_t t = 0; t < COUNT_OF(thread_counts); t++)
                for (size_t s = 0; s < COUNT_OF(isas); s++)
                    if (isa_force(isas[s]))
                        compare(&opened, lines[i], isas[s], thread_counts[t], &numbers[n], 1, expected);
            free(expected);
        }
        close_synth(&opened);
    }
}

/* Tests lines that fill many SIMD vectors, lines that are too long for vectors, and lines with ends far
 * outside the image. */
Test(variants, omp_matches_naive_on_long_lines)
{
    static const char *const names[] = {"uji", "visualatom"};
    static const char *const sizes[] = {
        "--vertices 400 --orbits 20 --noise 60 --res 1100",
        "--vertices 9 --orbits 40 --noise 90 --res 3001",
        "--vertices 3 --orbits 1500 --res 513",
        "--vertices 64 --orbits 60 --noise 4000 --res 300",
        "--vertices 500 --orbits 3 --radius 800 --res 1025",
        "--vertices 200 --orbits 9 --noise 0 --radius 0",
    };
    for (size_t f = 0; f < COUNT_OF(names); f++)
        for (size_t i = 0; i < COUNT_OF(sizes); i++) {
            char line[160];
            snprintf(line, sizeof line, "--batch 2 --formula %s %s", names[f], sizes[i]);
            expect_same(line, thread_counts[i % 4]);
        }
}

/* Some vertices leave the image and return in a later orbit, because of their steps, noise or both. Others
 * never return. omp may skip only vertices that never return, so it must distinguish the two kinds. */
Test(variants, omp_skips_only_vertices_that_never_return)
{
    static const char classes[] =
        "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width\n"
        "1,300,200,1,1,5,8,0.5,400,-4\n"
        "2,300,201,1.2,1.8,5,8,-2,300,0\n"
        "3,128,400,1,2,3,4,3,40,-3\n"
        "4,333,150,2,1,1,2,10,20,-10\n"
        "5,77,150,1,1,0,0,-8,25,8\n"
        "6,500,97,1,1,0,7,0,90,-2\n"
        "7,1000,200,1.2,1.8,5,8,2,25,0.002\n"
        "8,5,66000,1,1,0,0,0,40,-0.001\n" /* so many orbits that omp skips no vertices */
        "9,5,66000,1,1,0,0,-0.01,60,0.01\n";
    char path[] = "/tmp/fdsl-classes-XXXXXX";
    int file = mkstemp(path);
    cr_assert_geq(file, 0);
    cr_assert_eq(write(file, classes, sizeof classes - 1), (ssize_t)(sizeof classes - 1));
    close(file);
    static const char *const names[] = {"uji", "visualatom"};
    static const int sides[] = {1, 3, 61, 131, 200};
#ifdef __SANITIZE_ADDRESS__
    const size_t step = 2; /* each side with one of the formulas */
#else
    const size_t step = 1;
#endif
    for (size_t f = 0; f < COUNT_OF(names); f++)
        for (size_t r = f % step; r < COUNT_OF(sides); r += step) {
            char line[160];
            snprintf(line, sizeof line, "--class %s --batch 9 --formula %s --res %d", path, names[f],
                     sides[r]);
            expect_same(line, thread_counts[r % 3]);
        }
    unlink(path);
}

/* Tests lines that are about as long as omp's tables allow and that cross the image's border on all sides. */
Test(variants, omp_matches_naive_on_lines_across_the_border)
{
    static const char *const names[] = {"uji", "visualatom"};
    static const int noises[] = {1, 3, 6, 12, 25}, sides[] = {1, 3, 17, 33, 101};
    for (size_t f = 0; f < COUNT_OF(names); f++)
        for (size_t n = 0; n < COUNT_OF(noises); n++)
            for (size_t r = 0; r < COUNT_OF(sides); r++) {
                char line[160];
                snprintf(line, sizeof line,
                         "--batch 5 --formula %s --vertices 150 --orbits 60 --noise %d --res %d", names[f],
                         noises[n], sides[r]);
                expect_same(line, thread_counts[(n + r) % 4]);
            }
}

Test(variants, omp_matches_naive_with_many_vertices)
{
    expect_same("--batch 1 --vertices 4096 --orbits 21 --res 300", 3);
    expect_same("--batch 1 --vertices 1000000 --orbits 2 --res 64", 2);
    expect_same("--batch 1 --vertices 1000000 --orbits 1 --res 64 --formula visualatom", 1);
}

Test(variants, omp_matches_naive_on_large_images)
{
    expect_same("--batch 1 --vertices 500 --orbits 30 --res 16384 --instance 3", 1);
    expect_same("--batch 1 --vertices 500 --orbits 30 --res 8191 --formula visualatom", 2);
}

/* No image may contain pixels of an earlier run, even if several threads draw one image. */
Test(variants, runs_of_omp_are_independent)
{
    static const uint64_t both[] = {1, 0};
    static const char *const lines[] = {"--batch 1 --res 224", "--batch 5 --res 224 --classes 3"};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        struct opened opened;
        open_synth(&opened, lines[i]);
        uint8_t *expected = images_of(&opened, "naive", 1, run_0, 1);
        for (size_t s = 0; s < COUNT_OF(isas); s++)
            for (size_t t = 0; isa_force(isas[s]) && t < COUNT_OF(thread_counts); t++)
                compare(&opened, lines[i], isas[s], thread_counts[t], both, 2, expected);
        free(expected);
        close_synth(&opened);
    }
}

Test(variants, omp_measures_its_stages)
{
    struct opened opened;
    open_synth(&opened, "--batch 2 --res 224");
    const struct variant *variant = variant_find("omp")->variant;
    const struct synth_traits *traits = variant->traits;
    const struct resources resources = {.threads = 2};
    void *state;
    struct run_time time;
    double noise_s, vertices_s, painting_s;
    cr_assert_eq(variant->setup(&resources, opened.input, &state), STATUS_OK);
    cr_assert_eq(variant->run(state, 0, &time), STATUS_OK);
    cr_assert_eq(traits->stages(state, &noise_s, &vertices_s, &painting_s), STATUS_OK);
    cr_assert(noise_s > 0 && vertices_s == 0 && painting_s > 0, "%g %g %g", noise_s, vertices_s, painting_s);
    variant->teardown(state);
    close_synth(&opened);
}

Test(variants, an_instruction_set_can_be_forced)
{
    cr_assert(isa_force("scalar"));
    cr_expect_str_eq(variant_find("omp")->variant->instruction_set(), "scalar");
    cr_assert_not(isa_force("none such"));
    cr_assert(isa_force(NULL));
}

#endif
