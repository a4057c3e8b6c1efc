/* Tests the outputs of variants: naive converts the images that it draws, other variants give the same
 * outputs, and the oracle, which verifies them, detects errors. */
#include "support.h"

#include <stdio.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "golden.h"
#include "class_rows.h"
#include "synth/class.h"
#include "synth/synth.h"
#include "synth/output.h"
#ifdef _OPENMP
#include "machine/host.h"
#endif

TestSuite(output_variants, .timeout = 120);

static const uint64_t run_0[] = {0};

/* ---- Variants ---- */

static const char *const output_lines[] = {
    "--dtype u8 --channels 3",
    "--dtype u8 --layout nhwc",
    "--dtype f32 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --channels 3",
    "--dtype f16 --out-res 31",
    "--dtype bf16 --out-res 31 --channels 3 --layout nhwc --mean 0.5 --std 0.5",
    "--dtype u8 --out-res 200",
    "--dtype f32 --out-res 31 --fit crop",
    "--dtype u8 --out-res 64 --fit crop --channels 3 --layout nhwc",
    "--dtype f16 --channels 3 --fit crop",
};

/* Performs run 1, then run 0. Returns the images of run 0 and their labels; the caller frees both. */
static uint8_t *make_batch(const struct opened *opened, const char *name, int threads, int64_t **labels)
{
    static const uint64_t runs[] = {1, 0};
    return images_and_labels_of(opened, name, threads, runs, 2, labels);
}

#ifdef HAVE_INIH
/* Draws images with naive without output options, and converts them with output_convert(). naive with output
 * options must give the same bytes. */
Test(output_variants, naive_converts_its_canvases)
{
    static const char base[] = "--res 97 --classes 4 --batch 5 --instance 3 --seed 11";
    struct opened plain;
    open_synth(&plain, base);
    uint8_t *canvases = images_of(&plain, "naive", 1, run_0, 1);
    for (size_t i = 0; i < COUNT_OF(output_lines); i++) {
        struct opened opened;
        char line[256];
        int64_t *labels;
        snprintf(line, sizeof line, "%s %s", base, output_lines[i]);
        open_synth(&opened, line);
        const struct synth *synth = opened.synth;
        size_t bytes = synth_output_bytes(synth);
        uint8_t *images = make_batch(&opened, "naive", 1, &labels), *expected = malloc(bytes);
        for (uint64_t j = 0; j < synth->batch; j++) {
            struct synth_image image = synth_image_at(synth->first, synth->stride, synth->turns, 0, j);
            uint32_t id = synth->classes[image.class_index].id;
            output_convert(&synth->output, 97, atom_image_key(&synth->rules, synth->seed, id, image.instance),
                           canvases + j * 97 * 97, 97, expected);
            cr_expect_arr_eq(images + j * bytes, expected, bytes, "image %d of %s", (int)j, line);
            cr_expect_eq(labels[j], (3 + (int64_t)j) % 4);
        }
        free(images);
        free(labels);
        free(expected);
        close_synth(&opened);
    }
    free(canvases);
    close_synth(&plain);
}
#endif

/* Expects labels to be the numbers of the classes. These numbers differ from the classes' indices. */
static void expect_labels(const char *line, const char *name, int threads)
{
    static const int64_t numbers[] = {4000000000, 7, 12};
    struct opened opened;
    int64_t *labels;
    open_synth(&opened, line);
    free(make_batch(&opened, name, threads, &labels));
    for (uint64_t j = 0; j < opened.synth->batch; j++)
        cr_expect_eq(labels[j], numbers[(opened.synth->first + j) % 3], "%s: %s", name, line);
    free(labels);
    close_synth(&opened);
}

Test(output_variants, labels_are_class_numbers)
{
    static const struct atom_class classes[] = {
        {.id = 4000000000, .vertices = 20, .orbits = 4, .oval_x = 1, .oval_y = 1, .radius = 3},
        {.id = 7, .vertices = 20, .orbits = 4, .oval_x = 1, .oval_y = 1, .radius = 3},
        {.id = 12, .vertices = 20, .orbits = 4, .oval_x = 1, .oval_y = 1, .radius = 3}};
    static const char *const ends[] = {"--batch 7", "--batch 2 --instance 4",
                                       "--batch 7 --dtype f16 --out-res 9",
                                       "--batch 2 --instance 1 --channels 3"};
    char path[] = "/tmp/fdsl-output-XXXXXX", line[256];
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && close(fd) == 0);
    struct class_row rows[COUNT_OF(classes)];
    for (size_t i = 0; i < COUNT_OF(classes); i++)
        rows[i] = row_of(&classes[i]);
    cr_assert_eq(class_write_csv(path, formulas[FORMULA_UJI], rows, COUNT_OF(rows)), STATUS_OK, "%s",
                 status_text());
    for (size_t i = 0; i < COUNT_OF(ends); i++) {
        snprintf(line, sizeof line, "--res 32 --class %s %s", path, ends[i]);
        expect_labels(line, "naive", 1);
#ifdef _OPENMP
        expect_labels(line, "omp", 1);
        expect_labels(line, "omp", 8);
#endif
    }
    unlink(path);
}

#ifdef _OPENMP
static void expect_same_as_naive(const char *line, int threads)
{
    struct opened opened;
    int64_t *labels, *expected_labels;
    open_synth(&opened, line);
    uint8_t *expected = make_batch(&opened, "naive", 1, &expected_labels);
    uint8_t *images = make_batch(&opened, "omp", threads, &labels);
    size_t batch = opened.synth->batch;
    cr_expect_arr_eq(images, expected, batch * synth_output_bytes(opened.synth), "%s, %d threads", line,
                     threads);
    cr_expect_arr_eq(labels, expected_labels, batch * sizeof *labels, "%s, %d threads", line, threads);
    free(images);
    free(labels);
    free(expected);
    free(expected_labels);
    close_synth(&opened);
}

Test(output_variants, omp_gives_the_same_outputs)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    for (size_t s = 0; s < COUNT_OF(isas); s++)
        for (size_t i = 0; isa_force(isas[s]) && i < COUNT_OF(output_lines); i++)
            for (int batch = 1; batch <= 5; batch += 4)
                for (int threads = 1; threads <= 8;
                     threads = 2 * threads + 1) { /* 1, 3, 7: not always divisors of the batch */
                    char line[256];
                    snprintf(line, sizeof line, "--res 97 --classes 4 --batch %d %s", batch, output_lines[i]);
                    expect_same_as_naive(line, threads);
                }
    isa_force(NULL);
}
#endif

/* ---- The oracle ---- */

/* The error of spoiled_fetch() in image 1. */
static enum { BAD_PIXEL, BAD_LABEL, NO_LABEL } mistake;

static enum status spoiled_fetch(void *state, void *result)
{
    struct synth_fetch *fetch = result;
    int64_t before = fetch->label;
    enum status status = variant_find("naive")->variant->fetch(state, result);
    if (fetch->j != 1)
        return status;
    fetch->pixels[0] ^= mistake == BAD_PIXEL;
    fetch->label = mistake == NO_LABEL ? before : fetch->label + (mistake == BAD_LABEL);
    return status;
}

static uint64_t wrong_of(const char *line, const struct variant *variant)
{
    const struct resources resources = {.threads = 1};
    struct opened opened;
    struct run_time time;
    uint64_t wrong;
    void *state;
    open_synth(&opened, line);
    cr_assert_eq(variant->setup(&resources, opened.input, &state), STATUS_OK, "%s", status_text());
    cr_assert_eq(variant->run(state, 0, &time), STATUS_OK);
    cr_assert_eq(oracle_verify(opened.synth, variant, state, 0, &wrong), STATUS_OK, "%s", status_text());
    variant->teardown(state);
    close_synth(&opened);
    return wrong;
}

Test(output_variants, the_oracle_checks_outputs_and_labels)
{
    const struct variant *naive = variant_find("naive")->variant;
    struct variant spoiled = *naive;
    spoiled.fetch = spoiled_fetch;
    for (size_t i = 0; i < COUNT_OF(output_lines); i++) {
        char line[256];
        snprintf(line, sizeof line, "--res 97 --vertices 40 --orbits 9 --batch 3 %s", output_lines[i]);
        cr_expect_eq(wrong_of(line, naive), 0, "%s", line);
        for (mistake = BAD_PIXEL; mistake <= NO_LABEL; mistake++)
            cr_expect_eq(wrong_of(line, &spoiled), 1, "%s, mistake %d", line, (int)mistake);
    }
    for (mistake = BAD_PIXEL; mistake <= NO_LABEL; mistake++)
        cr_expect_eq(wrong_of("--res 32 --vertices 40 --orbits 9 --batch 3", &spoiled), 1, "mistake %d",
                     (int)mistake);
}

/* The oracle must not check labels of variants that have none. */
Test(output_variants, the_oracle_ignores_missing_labels_of_variants_without_labels)
{
    struct variant unlabelled = *variant_find("naive")->variant;
    struct synth_traits traits = *(const struct synth_traits *)unlabelled.traits;
    traits.outputs = false;
    unlabelled.traits = &traits;
    unlabelled.fetch = spoiled_fetch;
    mistake = NO_LABEL;
    cr_expect_eq(wrong_of("--res 32 --vertices 40 --orbits 9 --batch 3", &unlabelled), 0);
}

Test(output_variants, variants_of_canvases_refuse_other_outputs)
{
    struct variant plain = *variant_find("naive")->variant;
    struct synth_traits traits = *(const struct synth_traits *)plain.traits;
    traits.outputs = false;
    for (size_t i = 0; i < COUNT_OF(output_lines); i++) {
        struct opened opened;
        char line[256];
        snprintf(line, sizeof line, "--res 97 --batch 3 %s", output_lines[i]);
        open_synth(&opened, line);
        bool canvas = strcmp(output_lines[i], "--dtype u8 --layout nhwc") == 0;
        cr_expect_eq(opened.workload->accepts(opened.input, &plain), STATUS_OK);
        plain.traits = &traits;
        cr_expect_eq(opened.workload->accepts(opened.input, &plain), canvas ? STATUS_OK : STATUS_USAGE, "%s",
                     line);
        cr_expect(canvas || strstr(status_text(), "use naive"), "%s", status_text());
        plain.traits = variant_find("naive")->variant->traits;
        close_synth(&opened);
    }
}

/* ---- Golden outputs ---- */

#ifdef HAVE_XXHASH
Test(output_variants, naive_gives_the_golden_outputs)
{
    for (size_t i = 0; i < COUNT_OF(golden_outputs); i++) {
        struct opened opened;
        char line[256];
        snprintf(line, sizeof line, "--batch 2 --res 224 --seed 7 --classes 10 --instance 5 %s",
                 golden_outputs[i].options);
        open_synth(&opened, line);
        uint8_t *images = images_of(&opened, "naive", 1, run_0, 1);
        uint64_t hash = XXH3_64bits(images, 2 * synth_output_bytes(opened.synth));
        cr_expect_eq(hash, golden_outputs[i].hash, "{\"%s\", 0x%016llx},", golden_outputs[i].options,
                     (unsigned long long)hash);
        free(images);
        close_synth(&opened);
    }
}
#endif
