/* Tests the oracle of synth, the reference that verifies images. It must draw images as defined, accept every
 * valid order in which orbits may be painted, and reject all other images. */
#include "synth_by_hand.h"

TestSuite(oracle, .timeout = 60);

/* ---- A second implementation of the definition ---- */

/* The orbits of an image as layers: which pixels each orbit covers, and its gray. */
struct layers {
    uint32_t count;
    uint8_t covered[ORBITS][PIXELS], gray[ORBITS];
};

static int nearest(uint32_t draw, uint32_t scale) /* round(U * scale), U = draw / 2^32 */
{
    return (int)floor((double)draw * scale / 0x1p32 + 0.5);
}

static struct philox_key key_of(struct synth_image image)
{
    struct philox_block block =
        philox(philox_key(synth.seed), (uint32_t)image.instance, (uint32_t)(image.instance >> 32),
               synth.classes[image.class_index].id, 0);
    return (struct philox_key){{block.word[0], block.word[1]}};
}

static int gray_of(struct synth_image image, uint32_t k)
{
    uint32_t draw = philox(key_of(image), k / 4, 0, 1, 0).word[k % 4];
    return synth.formula == FORMULA_UJI ? nearest(draw, 255) : (int)((double)draw * 256 / 0x1p32);
}

static float centre_of(uint32_t draw)
{
    if (synth.formula == FORMULA_UJI)
        return (float)nearest(draw, synth.res);
    return 0.5f * (float)(int)((double)draw * (2 * synth.res + 1) / 0x1p32);
}

static bool inside(int x, int y)
{
    return x >= 0 && y >= 0 && x < (int)synth.res && y < (int)synth.res;
}

/* Bresenham's line in closed form: after step i along the major axis, the line has moved round(i * minor /
 * major) pixels along the minor axis. Halves are rounded up. */
static void cover_line(uint8_t *covered, int x0, int y0, int x1, int y1)
{
    int dx = abs(x1 - x0), dy = abs(y1 - y0), sx = x1 > x0 ? 1 : -1, sy = y1 > y0 ? 1 : -1;
    int major = dy >= dx ? dy : dx, minor = dy >= dx ? dx : dy;
    bool whole = synth.formula == FORMULA_VISUALATOM;
    if (!whole && !inside(x0, y0) && !inside(x1, y1))
        return;
    for (int i = 0; i < major + whole; i++) {
        int j = major ? (2 * i * minor + major) / (2 * major) : 0;
        int x = x0 + sx * (dy >= dx ? j : i), y = y0 + sy * (dy >= dx ? i : j);
        if (inside(x, y))
            covered[y * (int)synth.res + x] = 1;
    }
}

static void make_layers(struct synth_image image, const float *noise, struct layers *layers)
{
    const struct atom_class *class_ = &synth.classes[image.class_index];
    const float *cosine = synth.spoke_tables + synth.spoke_offset[image.class_index];
    const float *sine = cosine + synth.spoke_offset[synth.class_count];
    const float *advance = sine + synth.spoke_offset[synth.class_count];
    struct philox_block centre = philox(key_of(image), 0, 0, 2, 0);
    uint32_t q = class_->vertices;
    float x[VERTICES], y[VERTICES];
    *layers = (struct layers){.count = class_->orbits};
    for (uint32_t v = 0; v < q; v++) {
        x[v] = fmaf((float)class_->radius * class_->oval_x, cosine[v], centre_of(centre.word[0]));
        y[v] = fmaf((float)class_->radius * class_->oval_y, sine[v], centre_of(centre.word[1]));
    }
    for (uint32_t k = 0; k < class_->orbits; k++) {
        for (uint32_t v = 0; v < q; v++, noise += 2) {
            x[v] = fmaf(cosine[v], fmaf(-class_->noise, noise[0], advance[v]), x[v]);
            y[v] = fmaf(sine[v], fmaf(-class_->noise, noise[1], advance[v]), y[v]);
        }
        for (uint32_t v = 0; v < q; v++)
            cover_line(layers->covered[k], (int)x[v], (int)y[v], (int)x[(v + 1) % q], (int)y[(v + 1) % q]);
        layers->gray[k] = (uint8_t)gray_of(image, k);
    }
}

/* Paints the layers in this order. NULL means the order 0, 1, ... */
static void paint_layers(const struct layers *layers, const int *order, uint8_t *pixels)
{
    memset(pixels, 0, PIXELS);
    for (uint32_t i = 0; i < layers->count; i++) {
        uint32_t k = order ? (uint32_t)order[i] : i;
        for (int p = 0; p < PIXELS; p++)
            if (layers->covered[k][p])
                pixels[p] = layers->gray[k];
    }
}

/* Computes the noise of the Philox streams that exact variants share. Words 0 and 1 of block j are x and y of
 * orbit 2j; words 2 and 3 are x and y of orbit 2j + 1. */
static void counter_noise(struct synth_image image, float *noise)
{
    const struct atom_class *class_ = &synth.classes[image.class_index];
    for (uint32_t k = 0; k < class_->orbits; k++)
        for (uint32_t v = 0; v < class_->vertices; v++, noise += 2) {
            struct philox_block block = philox(key_of(image), v, k / 2, 0, 0);
            noise[0] = noise_of_draw(synth.gradients, block.word[k % 2 * 2]);
            noise[1] = noise_of_draw(synth.gradients, block.word[k % 2 * 2 + 1]);
        }
}

static struct layers layers;
static float noise[2 * VERTICES * ORBITS];
static struct atom_point points[VERTICES];
static uint8_t pixels[PIXELS], expected[PIXELS], marks[PIXELS];

/* ---- Noise and drawing ---- */

static const struct synth_traits exact = {.noise = SYNTH_NOISE_COUNTER, .timed = "draw"};
static const struct synth_traits half = {.noise = SYNTH_NOISE_COUNTER, .half = true, .timed = "draw"};
static const struct synth_traits racy = {.noise = SYNTH_NOISE_COUNTER, .racy = true, .timed = "draw"};

Test(oracle, noise_is_that_of_the_shared_streams, .init = start, .fini = stop)
{
    float reference[COUNT_OF(noise)];
    for (uint64_t j = 0; j < 4; j++) {
        size_t count =
            2 * tiny[image_at(0, j).class_index].vertices * tiny[image_at(0, j).class_index].orbits;
        counter_noise(image_at(0, j), reference);
        oracle_noise(&synth, &exact, image_at(0, j), 0, noise);
        cr_expect(memcmp(noise, reference, count * sizeof *noise) == 0, "image %d", (int)j);
        size_t rounded = 0;
        oracle_noise(&synth, &half, image_at(0, j), 0, noise);
        for (size_t i = 0; i < count; i++) {
            cr_expect(noise[i] == noise_round_half(reference[i]));
            rounded += noise[i] != reference[i];
        }
        cr_expect(rounded > count / 2, "half precision must change most values: %zu of %zu", rounded, count);
    }
}

/* cuRAND's documented layout: a call of curand_uniform4() gives 4 floats, which are x and y of two vertices.
 * Each orbit has its own subsequence. */
Test(oracle, each_call_gives_the_noise_of_two_vertices, .init = start, .fini = stop)
{
    const struct synth_traits uniform4 = {.noise = SYNTH_NOISE_UNIFORM4, .timed = "draw"};
    struct synth_image image = image_at(0, 0);
    oracle_noise(&synth, &uniform4, image, 0, noise);
    for (uint32_t k = 0; k < ORBITS; k++)
        for (uint32_t i = 0; i < 2 * VERTICES; i++) {
            uint32_t word = philox(key_of(image), i / 4, 0, STREAM_CURAND + k, 0).word[i % 4];
            float uniform = (float)word * 0x1p-32f + 0x1p-33f;
            cr_expect(noise[2 * VERTICES * k + i] == noise_of_uniform(synth.gradients, uniform));
        }
}

Test(oracle, draws_images_as_defined)
{
    static const enum formula_id drawn[] = {FORMULA_UJI, FORMULA_VISUALATOM};
    for (size_t f = 0; f < COUNT_OF(drawn); f++) {
        size_t painted = 0;
        make_tiny(drawn[f]);
        for (uint64_t j = 0; j < 200; j++) {
            struct synth_image image = image_at(j, 0);
            counter_noise(image, noise);
            make_layers(image, noise, &layers);
            paint_layers(&layers, NULL, expected);
            memset(pixels, 0xa5, sizeof pixels);
            oracle_draw(&synth, image, 0, noise, points, &(struct oracle_picture){.pixels = pixels});
            cr_assert(memcmp(pixels, expected, PIXELS) == 0, "formula %zu, image %d", f, (int)j);
            for (int p = 0; p < PIXELS; p++)
                painted += pixels[p] != 0;
        }
        cr_expect(painted > 200 * 50, "the images are almost black: %zu pixels", painted);
        stop();
    }
}

/* ---- Membership ---- */

/* Finds an image with overlapping orbits, whose five grays differ from each other and from 0. */
static struct synth_image choose_image(void)
{
    for (uint64_t j = 0;; j += 2) { /* images with even numbers belong to class 0 */
        struct synth_image image = image_at(0, j);
        uint32_t different = 0, overlaps = 0;
        counter_noise(image, noise);
        make_layers(image, noise, &layers);
        for (uint32_t k = 0; k < ORBITS; k++) {
            bool alone = layers.gray[k] != 0;
            for (uint32_t i = 0; i < k; i++)
                alone &= layers.gray[i] != layers.gray[k];
            different += alone;
        }
        for (int p = 0; p < PIXELS; p++)
            overlaps += layers.covered[ORBITS - 2][p] && layers.covered[ORBITS - 1][p];
        if (different == ORBITS && overlaps >= 5)
            return image;
        cr_assert(j < 10000);
    }
}

static bool member(struct synth_image image)
{
    return oracle_member(&synth, image, noise, points, marks, pixels);
}

static bool next_order(int *order) /* next permutation in lexical order; false after the last */
{
    int i = ORBITS - 2, j = ORBITS - 1;
    while (i >= 0 && order[i] > order[i + 1])
        i--;
    if (i < 0)
        return false;
    while (order[j] < order[i])
        j--;
    for (int swap = order[i], once = 1; once; once = 0)
        order[i] = order[j], order[j] = swap;
    for (int a = i + 1, b = ORBITS - 1; a < b; a++, b--) {
        int swap = order[a];
        order[a] = order[b], order[b] = swap;
    }
    return true;
}

Test(oracle, every_order_of_orbits_is_accepted, .init = start, .fini = stop)
{
    struct synth_image image = choose_image();
    int order[ORBITS] = {0, 1, 2, 3, 4}, orders = 0, others = 0;
    paint_layers(&layers, NULL, expected);
    do {
        paint_layers(&layers, order, pixels);
        cr_expect(member(image), "order %d%d%d%d%d", order[0], order[1], order[2], order[3], order[4]);
        others += memcmp(pixels, expected, PIXELS) != 0;
        orders++;
    } while (next_order(order));
    cr_expect(orders == 120);
    cr_expect(others > 60, "only %d orders give another image than the defined one", others);
}

Test(oracle, any_order_at_each_pixel_is_accepted, .init = start, .fini = stop)
{
    struct synth_image image = choose_image();
    paint_layers(&layers, NULL, pixels);
    for (int p = 0; p < PIXELS; p++)
        for (uint32_t i = 0; i < ORBITS; i++)
            if (layers.covered[((uint32_t)p + i) % ORBITS][p])
                pixels[p] = layers.gray[((uint32_t)p + i) % ORBITS];
    cr_expect(member(image));
}

/* Sets every third pixel in turn to each gray of the image, and to a neighbour of each gray. A changed value
 * must be accepted only if it is the gray of an orbit that covers the pixel. */
Test(oracle, a_single_wrong_pixel_is_rejected, .init = start, .fini = stop)
{
    struct synth_image image = choose_image();
    size_t wrong_values = 0;
    paint_layers(&layers, NULL, pixels);
    cr_assert(member(image));
    for (int p = 0; p < PIXELS; p += 3)
        for (uint32_t k = 0; k < 2 * ORBITS; k++) {
            uint8_t right = pixels[p], value = (uint8_t)(layers.gray[k / 2] ^ (k & 1));
            bool possible = value == right;
            for (uint32_t i = 0; i < ORBITS; i++)
                possible |= layers.covered[i][p] && value == layers.gray[i];
            pixels[p] = value;
            cr_expect(member(image) == possible, "pixel %d as %d", p, value);
            wrong_values += !possible;
            pixels[p] = right;
        }
    cr_expect(wrong_values > PIXELS / 3);
}

Test(oracle, a_painted_pixel_outside_of_all_lines_is_rejected, .init = start, .fini = stop)
{
    struct synth_image image = choose_image();
    int outside = 0;
    paint_layers(&layers, NULL, pixels);
    for (int p = 0; p < PIXELS; p++) {
        if (pixels[p] != 0)
            continue;
        pixels[p] = 1;
        cr_expect_not(member(image), "pixel %d", p);
        pixels[p] = 0;
        outside++;
    }
    cr_expect(outside > PIXELS / 4);
}

Test(oracle, a_missing_pixel_is_rejected, .init = start, .fini = stop)
{
    struct synth_image image = choose_image();
    int missing = 0;
    paint_layers(&layers, NULL, pixels);
    for (int p = 0; p < PIXELS; p++) {
        uint8_t right = pixels[p];
        if (right == 0)
            continue;
        pixels[p] = 0;
        cr_expect_not(member(image), "pixel %d", p);
        pixels[p] = right;
        missing++;
    }
    cr_expect(missing > 50, "%d", missing);
    memset(pixels, 0, PIXELS);
    cr_expect_not(member(image), "a black image");
}

/* ---- A batch, with a fake variant ---- */

struct fake {
    uint64_t run;   /* the run that generated the images */
    uint64_t asked; /* the run to compare with */
    bool half_noise, flip_order;
    uint64_t bad_images; /* bit j: image j has one wrong pixel */
    uint64_t fails_at;   /* index of an image that cannot be fetched */
    unsigned fetched[BATCH];
};

static enum status fake_fetch(void *state, void *result)
{
    static const int backwards[ORBITS] = {4, 3, 2, 1, 0}, backwards3[ORBITS] = {2, 1, 0};
    struct fake *fake = state;
    struct synth_fetch *fetch = result;
    struct synth_image image = image_at(fake->run, fetch->j);
    cr_assert(fetch->j < BATCH);
    if (fetch->j == fake->fails_at)
        return status_set(STATUS_FAILED, "image %d is gone", (int)fetch->j);
    fake->fetched[fetch->j]++;
    counter_noise(image, noise);
    for (size_t i = 0; fake->half_noise && i < COUNT_OF(noise); i++)
        noise[i] = noise_round_half(noise[i]);
    make_layers(image, noise, &layers);
    paint_layers(&layers,
                 !fake->flip_order   ? NULL
                 : layers.count == 3 ? backwards3
                                     : backwards,
                 fetch->pixels);
    fetch->pixels[PIXELS - 1] ^= (uint8_t)(fake->bad_images >> fetch->j & 1);
    return STATUS_OK;
}

static uint64_t count_wrong(struct fake *fake, const struct synth_traits *traits)
{
    const struct variant variant = {.platform = "cpu", .traits = traits, .fetch = fake_fetch};
    uint64_t wrong = 12345;
    fake->fails_at = UINT64_MAX;
    cr_assert(oracle_verify(&synth, &variant, fake, fake->asked, &wrong) == STATUS_OK, "%s", status_text());
    for (int j = 0; j < BATCH; j++)
        cr_expect(fake->fetched[j] == 1, "image %d was fetched %u times, not once", j, fake->fetched[j]);
    return wrong;
}

Test(oracle, verify_accepts_a_correct_batch, .init = start, .fini = stop)
{
    cr_expect(count_wrong(&(struct fake){0}, &exact) == 0);
    cr_expect(count_wrong(&(struct fake){0}, &racy) == 0);
    cr_expect(count_wrong(&(struct fake){.half_noise = true}, &half) == 0);
}

Test(oracle, verify_counts_every_bad_image_once, .init = start, .fini = stop)
{
    for (uint64_t bad = 0; bad < 1 << BATCH; bad++) {
        uint64_t count = (uint64_t)__builtin_popcountll(bad);
        cr_expect(count_wrong(&(struct fake){.bad_images = bad}, &exact) == count, "images %02x",
                  (unsigned)bad);
        cr_expect(count_wrong(&(struct fake){.bad_images = bad}, &racy) == count, "images %02x",
                  (unsigned)bad);
    }
}

Test(oracle, verify_rejects_the_images_of_another_run, .init = start, .fini = stop)
{
    cr_expect(count_wrong(&(struct fake){.run = 1}, &exact) == BATCH);
    cr_expect(count_wrong(&(struct fake){.run = 1}, &racy) == BATCH);
}

Test(oracle, verify_accepts_the_images_of_any_run, .init = start, .fini = stop)
{
    static const uint64_t runs[] = {1, 2, 17, 100003};
    for (size_t i = 0; i < COUNT_OF(runs); i++) {
        uint64_t run = runs[i];
        cr_expect(count_wrong(&(struct fake){.run = run, .asked = run}, &exact) == 0);
        cr_expect(count_wrong(&(struct fake){.run = run, .asked = run}, &racy) == 0);
        cr_expect(count_wrong(&(struct fake){.run = run - 1, .asked = run}, &exact) == BATCH);
        cr_expect(count_wrong(&(struct fake){.run = 0, .asked = run}, &exact) == BATCH);
    }
}

Test(oracle, verify_rejects_another_order_unless_the_variant_is_racy, .init = start, .fini = stop)
{
    cr_expect(count_wrong(&(struct fake){.flip_order = true}, &racy) == 0);
    cr_expect(count_wrong(&(struct fake){.flip_order = true}, &exact) > BATCH / 2);
}

/* The rounding error of a vertex rarely changes a pixel, so few images show the precision of the noise. This
 * class amplifies the rounding. */
Test(oracle, verify_distinguishes_half_precision_from_single)
{
    const struct atom_class large = {.id = 1,
                                     .vertices = VERTICES,
                                     .orbits = ORBITS,
                                     .oval_x = 1,
                                     .oval_y = 1,
                                     .noise = 60,       /* amplifies the rounding */
                                     .line_width = -60, /* keeps the orbits inside the image */
                                     .radius = 9};
    make_synth(FORMULA_VISUALATOM, &large, 1, BATCH, RES);
    cr_expect(count_wrong(&(struct fake){.half_noise = true}, &half) == 0);
    cr_expect(count_wrong(&(struct fake){.half_noise = true}, &exact) > 0);
    cr_expect(count_wrong(&(struct fake){.half_noise = false}, &half) > 0);
    stop();
}

Test(oracle, verify_relays_a_failing_fetch, .init = start, .fini = stop)
{
    struct fake fake = {.fails_at = 4};
    const struct variant variant = {.platform = "cpu", .traits = &exact, .fetch = fake_fetch};
    uint64_t wrong;
    cr_expect(oracle_verify(&synth, &variant, &fake, 0, &wrong) == STATUS_FAILED);
    cr_expect_str_eq(status_text(), "image 4 is gone");
}
