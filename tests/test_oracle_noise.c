/* Tests how the oracle of synth verifies variants with their own random generators. It must accept the noise
 * of correct generators and detect typical errors. */
#include "synth_by_hand.h"

#include <criterion/redirect.h>

TestSuite(oracle_noise, .timeout = 60);

enum { STREAM_VERTICES = 300, STREAM_ORBITS = 120, STREAM_BATCH = 8 };

/* A fake variant with its own generator and configurable errors. */
struct fake_generator {
    uint64_t made, asked; /* the run that generated the images, and the run to compare with */
    float scale, shift;
    uint64_t copy_from, copy_to; /* two images that share a stream; if equal, no images share one */
    bool same_axes;              /* the last orbit of the last image has equal draws for x and y */
    uint32_t still_from;         /* from this orbit on, the noise after vertex 11 is 0.5; 0: never */
    bool wrong_images;           /* images are drawn with the negated noise */
    bool fails;
};

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Draws one stream: the noise of axis `axis` of orbit `k` of image `j`. */
static void draw_stream(const struct fake_generator *generator, uint64_t j, uint32_t k, uint32_t axis,
                        float *noise_)
{
    uint64_t state = ((j * STREAM_ORBITS + k) * 2 + axis) * 0x2545f4914f6cdd1du;
    for (uint32_t v = 0; v < STREAM_VERTICES; v++) {
        float value = noise_of_draw(synth.gradients, (uint32_t)(splitmix64(&state) >> 32));
        bool still = generator->still_from > 0 && k >= generator->still_from && v >= 12;
        noise_[2 * (k * STREAM_VERTICES + v) + axis] =
            still ? 0.5f : value * generator->scale + generator->shift;
    }
}

static enum status generator_noise(void *state, uint64_t run, uint64_t image, float *noise_)
{
    const struct fake_generator *generator = state;
    uint64_t j = run * STREAM_BATCH + image;
    if (generator->fails)
        return status_set(STATUS_FAILED, "the noise is gone");
    for (uint32_t k = 0; k < STREAM_ORBITS; k++)
        for (uint32_t axis = 0; axis < 2; axis++) {
            bool copies = j == generator->copy_to && k == 17 && axis == 1;
            draw_stream(generator, copies ? generator->copy_from : j, k, axis, noise_);
        }
    for (uint32_t v = 0; generator->same_axes && j == STREAM_BATCH - 1 && v < STREAM_VERTICES; v++) {
        float *last = noise_ + 2 * ((STREAM_ORBITS - 1) * STREAM_VERTICES + v);
        last[1] = last[0];
    }
    return STATUS_OK;
}

static enum status generator_fetch(void *state, void *result)
{
    static float stream_noise[2 * STREAM_VERTICES * STREAM_ORBITS];
    static struct atom_point stream_points[STREAM_VERTICES];
    struct synth_fetch *fetch = result;
    const struct fake_generator *generator = state;
    struct fake_generator sound = *generator;
    sound.fails = false;
    cr_assert(generator_noise(&sound, generator->made, fetch->j, stream_noise) == STATUS_OK);
    for (size_t i = 0; generator->wrong_images && i < COUNT_OF(stream_noise); i++)
        stream_noise[i] = -stream_noise[i];
    oracle_draw(&synth, image_at(generator->made, fetch->j), 0, stream_noise, stream_points,
                &(struct oracle_picture){.pixels = fetch->pixels});
    return STATUS_OK;
}

static enum status verify_generator(struct fake_generator generator, uint64_t *wrong)
{
    const struct atom_class class_ = {.id = 0,
                                      .vertices = STREAM_VERTICES,
                                      .orbits = STREAM_ORBITS,
                                      .oval_x = 1,
                                      .oval_y = 1,
                                      .noise = 1,
                                      .radius = 3};
    const struct synth_traits traits = {
        .noise = SYNTH_NOISE_XORWOW, .timed = "draw", .fetch_noise = generator_noise};
    const struct variant variant = {.platform = "cpu", .traits = &traits, .fetch = generator_fetch};
    make_synth(FORMULA_UJI, &class_, 1, STREAM_BATCH, RES);
    enum status status = oracle_verify(&synth, &variant, &generator, generator.asked, wrong);
    stop();
    return status;
}

static uint64_t wrong_of(struct fake_generator generator)
{
    uint64_t wrong = 12345;
    cr_assert(verify_generator(generator, &wrong) == STATUS_OK, "%s", status_text());
    fflush(stderr);
    return wrong;
}

Test(oracle_noise, noise_of_a_correct_generator_is_accepted, .init = cr_redirect_stderr)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1}) == 0);
    cr_expect_stderr_eq_str("");
}

/* The distribution test uses all 576,000 draws of the 8 images. They suffice to detect a shift of 0.01, and
 * a change of the spread by 5 %. */
Test(oracle_noise, shifted_noise_is_rejected, .init = cr_redirect_stderr)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .shift = 0.01f}) == STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .shift = -0.01f}) == STREAM_BATCH);
}

Test(oracle_noise, noise_with_another_spread_is_rejected, .init = cr_redirect_stderr)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .still_from = STREAM_ORBITS * 3 / 4}) ==
              STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 1.05f}) == STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 0.95f}) == STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 0}) == STREAM_BATCH);
}

Test(oracle_noise, two_equal_streams_are_rejected, .init = cr_redirect_stderr)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .copy_from = 2, .copy_to = 5}) == STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .same_axes = true}) == STREAM_BATCH);
}

static void expect_warning(struct fake_generator generator, const char *words)
{
    char text[1024] = "";
    cr_redirect_stderr();
    wrong_of(generator);
    FILE *redirected = cr_get_redirected_stderr();
    cr_assert(fgets(text, sizeof text, redirected));
    cr_expect(strstr(text, "warning: ") && strstr(text, words), "'%s' is not in: %s", words, text);
}

Test(oracle_noise, a_warning_says_that_the_distribution_differs)
{
    expect_warning((struct fake_generator){.scale = 2}, "Kolmogorov-Smirnov");
}

Test(oracle_noise, a_warning_says_that_streams_overlap)
{
    expect_warning((struct fake_generator){.scale = 1, .copy_from = 0, .copy_to = 1}, "streams");
}

Test(oracle_noise, images_that_do_not_follow_from_their_noise_are_wrong)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .wrong_images = true}) == STREAM_BATCH);
}

/* If a run does nothing, the images of an earlier run remain. They do not match the noise of this run. */
Test(oracle_noise, images_of_another_run_are_wrong)
{
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .asked = 3}) == STREAM_BATCH);
    cr_expect(wrong_of((struct fake_generator){.scale = 1, .made = 3, .asked = 3}) == 0);
}

Test(oracle_noise, verify_relays_a_failing_fetch_of_noise)
{
    uint64_t wrong;
    cr_expect(verify_generator((struct fake_generator){.scale = 1, .fails = true}, &wrong) == STATUS_FAILED);
    cr_expect_str_eq(status_text(), "the noise is gone");
}
