/* Tests Philox4x32-10 and the random streams of an image. */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "synth/atom.h"

TestSuite(philox, .timeout = 60);

static void expect_block(struct philox_block block, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    cr_assert(block.word[0] == w0 && block.word[1] == w1 && block.word[2] == w2 && block.word[3] == w3,
              "%08x %08x %08x %08x", block.word[0], block.word[1], block.word[2], block.word[3]);
}

/* Known answers published with Random123. */
Test(philox, equals_the_published_known_answers)
{
    expect_block(philox(philox_key(0), 0, 0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
    expect_block(philox(philox_key(UINT64_MAX), UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX), 0x408f276d,
                 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
    expect_block(philox(philox_key(0x299f31d0a4093822), 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
                 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

Test(philox, below_is_a_floor)
{
    static const uint32_t counts[] = {1, 2, 3, 21, 255, 256, 801, 32769, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        cr_assert_eq(philox_below(0, counts[i]), 0);
        cr_assert_eq(philox_below(UINT32_MAX, counts[i]), counts[i] - 1, "count %u", counts[i]);
    }
    /* The boundaries between thirds of 2^32. */
    cr_assert_eq(philox_below(1431655765, 3), 0);
    cr_assert_eq(philox_below(1431655766, 3), 1);
    cr_assert_eq(philox_below(2863311530, 3), 1);
    cr_assert_eq(philox_below(2863311531, 3), 2);
    for (uint32_t word = 1; word < 0xFFFF0000u; word += 65521) /* products are exact in long double */
        cr_assert_eq(philox_below(word, 801), (uint32_t)floorl((long double)word * 801 / 4294967296.0L));
}

Test(philox, unit_stays_under_one)
{
    cr_assert_eq(philox_unit(0), 0);
    cr_assert_eq(philox_unit(255), 0);
    cr_assert_eq(philox_unit(256), 0x1p-24f);
    cr_assert_eq(philox_unit(0x80000000u), 0.5f);
    cr_assert_eq(philox_unit(UINT32_MAX), 1 - 0x1p-24f);
}

/* ---- The streams of an image ---- */

static struct philox_key key_of(uint64_t seed, uint32_t class_id, uint64_t instance)
{
    const struct line_rules rules = line_rules_of(FORMULA_UJI);
    return atom_image_key(&rules, seed, class_id, instance);
}

static uint8_t gray_of(enum formula_id formula, struct philox_key key, uint32_t orbit)
{
    const struct line_rules rules = line_rules_of(formula);
    return atom_gray(&rules, key, 0, orbit);
}

static struct atom_point centre_of(enum formula_id formula, struct philox_key key, uint32_t res)
{
    const struct line_rules rules = line_rules_of(formula);
    const struct atom_class class_ = {.vertices = 1};
    return line_shape(&rules, key, 0, &class_, 0, 1, res).centre;
}

static float coordinate_of(enum formula_id formula, uint32_t draw, uint32_t res)
{
    const struct line_rules rules = line_rules_of(formula);
    return line_centre(&rules, draw, res);
}

static struct philox_key some_key(void)
{
    return key_of(0x0123456789abcdef, 7, 0x100000002);
}

/* Values that an independent implementation computed. They must never change. */
Test(philox, streams_never_change)
{
    struct philox_key key = some_key();
    cr_assert(key.word[0] == 0x7a6c713c && key.word[1] == 0x9af5becd, "%08x %08x", key.word[0], key.word[1]);
    expect_block(atom_noise_block(key, 0, 5, 1), 0xa055fc30, 0x7c101078, 0x59987c5f, 0xe59c7754);

    static const uint8_t uji[] = {166, 132, 19, 23}, visualatom[] = {166, 132, 19, 22};
    for (uint32_t orbit = 4; orbit < 8; orbit++) {
        cr_assert_eq(gray_of(FORMULA_UJI, key, orbit), uji[orbit - 4]);
        cr_assert_eq(gray_of(FORMULA_VISUALATOM, key, orbit), visualatom[orbit - 4]);
    }
    struct atom_point centre = centre_of(FORMULA_UJI, key, 512);
    cr_assert(centre.x == 342 && centre.y == 330);
    centre = centre_of(FORMULA_VISUALATOM, key, 512);
    cr_assert(centre.x == 342.5f && centre.y == 330.5f);
}

/* Orbits 2 and 3 share block 1: it has x and y of the even orbit, then x and y of the odd orbit. An
 * independent implementation computed the expected positions. */
Test(philox, each_axis_and_orbit_has_its_own_word)
{
    float gradients[NOISE_TABLE_COUNT];
    const struct line_rules rules = line_rules_of(FORMULA_UJI);
    noise_gradients(&rules, gradients);
    struct atom_point even = atom_noise(some_key(), 0, gradients, 5, 2),
                      odd = atom_noise(some_key(), 0, gradients, 5, 3);
    cr_assert_eq(even.x, noise_at(gradients, 119, 2018067.0f / 16777216.0f));
    cr_assert_eq(even.y, noise_at(gradients, 238, 3375951.0f / 16777216.0f));
    cr_assert_eq(odd.x, noise_at(gradients, 171, 13924926.0f / 16777216.0f));
    cr_assert_eq(odd.y, noise_at(gradients, 9, 3142977.0f / 16777216.0f));
}

Test(philox, grays_and_centres_reach_both_ends)
{
    bool gray[2][256] = {{false}}, edge[2][2] = {{false}};
    for (uint32_t i = 0; i < 40000; i++) {
        struct philox_key key = philox_key(i);
        for (int formula = 0; formula < 2; formula++) {
            gray[formula][gray_of((enum formula_id)formula, key, i)] = true;
            struct atom_point centre = centre_of((enum formula_id)formula, key, 32);
            cr_assert(centre.x >= 0 && centre.x <= 32 && centre.y >= 0 && centre.y <= 32);
            edge[formula][0] |= centre.x == 0;
            edge[formula][1] |= centre.y == 32;
        }
    }
    for (int formula = 0; formula < 2; formula++) {
        for (int i = 0; i < 256; i++)
            cr_assert(gray[formula][i], "formula %d never draws gray %d", formula, i);
        cr_assert(edge[formula][0] && edge[formula][1]);
    }
    /* The formula `uji` rounds, so the first and last values have half the probability of the others. */
    cr_assert_eq(coordinate_of(FORMULA_UJI, 0x80000000u / 32 - 1, 32), 0);
    cr_assert_eq(coordinate_of(FORMULA_UJI, 0x80000000u / 32, 32), 1);
    cr_assert_eq(coordinate_of(FORMULA_UJI, UINT32_MAX, 32), 32);
    cr_assert_eq(coordinate_of(FORMULA_VISUALATOM, UINT32_MAX, 32), 32);
}

static int compare_blocks(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct philox_block));
}

Test(philox, streams_share_no_block)
{
    enum { VERTICES = 200, PAIRS = 100, GRAYS = 50, COUNT = VERTICES * PAIRS + GRAYS + 1 };
    struct philox_block *blocks = malloc(COUNT * sizeof *blocks);
    cr_assert_not_null(blocks);
    size_t count = 0;
    struct philox_key key = some_key();
    for (uint32_t vertex = 0; vertex < VERTICES; vertex++)
        for (uint32_t pair = 0; pair < PAIRS; pair++)
            blocks[count++] = atom_noise_block(key, 0, vertex, pair);
    for (uint32_t i = 0; i < GRAYS; i++)
        blocks[count++] = philox(key, i, 0, STREAM_GRAY, 0);
    blocks[count++] = philox(key, 0, 0, STREAM_CENTRE, 0);
    qsort(blocks, count, sizeof *blocks, compare_blocks);
    for (size_t i = 1; i < count; i++)
        cr_assert_neq(compare_blocks(&blocks[i - 1], &blocks[i]), 0);
    free(blocks);
}

/* Words of different streams, and two words of one block, must agree in about half of their bits. */
Test(philox, streams_are_uncorrelated)
{
    enum { COUNT = 20000 };
    long noise_gray = 0, noise_centre = 0, gray_centre = 0, x_y = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        struct philox_key key = key_of(1, 0, i);
        struct philox_block block = atom_noise_block(key, 0, 0, 0);
        uint32_t noise = block.word[0], gray = philox(key, 0, 0, STREAM_GRAY, 0).word[0];
        uint32_t centre = philox(key, 0, 0, STREAM_CENTRE, 0).word[0];
        noise_gray += __builtin_popcount(noise ^ gray);
        noise_centre += __builtin_popcount(noise ^ centre);
        gray_centre += __builtin_popcount(gray ^ centre);
        x_y += __builtin_popcount(noise ^ block.word[1]);
    }
    double expected = 16.0 * COUNT, five_sigma = 5 * sqrt(8.0 * COUNT);
    cr_assert_float_eq((double)noise_gray, expected, five_sigma);
    cr_assert_float_eq((double)noise_centre, expected, five_sigma);
    cr_assert_float_eq((double)gray_centre, expected, five_sigma);
    cr_assert_float_eq((double)x_y, expected, five_sigma);
}

Test(philox, image_keys_differ)
{
    struct philox_key key = key_of(1, 2, 3);
    struct philox_key others[] = {key_of(2, 2, 3), key_of(1, 3, 3), key_of(1, 2, 4),
                                  key_of(1, 2, 3 + (UINT64_C(1) << 32)),
                                  key_of(1 + (UINT64_C(1) << 32), 2, 3)};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        cr_assert_neq(memcmp(&key, &others[i], sizeof key), 0, "%zu", i);
}
