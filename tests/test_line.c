/* Tests the reference's lines (Bresenham's algorithm). Compares them with examples computed by hand and with
 * the closed form, and checks the end points. */
#include <criterion/criterion.h>

#include <string.h>

#include "core/philox.h"
#include "synth/atom.h"

TestSuite(line, .timeout = 60);

struct pixel {
    int32_t x, y;
};

enum { PIXELS_MAX = 4096 };

static struct line begin_line(enum formula_id formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1)
{
    const struct line_rules rules = line_rules_of(formula);
    return line_begin(&rules, x0, y0, x1, y1);
}

static int walk(enum formula_id formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1, struct pixel *pixels)
{
    int count = 0;
    for (struct line line = begin_line(formula, x0, y0, x1, y1); line.left > 0; line_step(&line)) {
        cr_assert_lt(count, PIXELS_MAX);
        pixels[count++] = (struct pixel){line.x, line.y};
    }
    return count;
}

/* The line from (0, 0) to (4, 2) passes half-way between two pixels at x = 1 and x = 3. At these points, it
 * already takes the step in y. Its mirror images in all octants do the same. Only the formula `visualatom`
 * draws the end point. */
Test(line, lines_in_all_octants_have_the_pixels_computed_by_hand)
{
    static const struct pixel shape[] = {{0, 0}, {1, 1}, {2, 1}, {3, 2}, {4, 2}};
    for (int octant = 0; octant < 8; octant++) {
        int32_t sx = octant & 1 ? -1 : 1, sy = octant & 2 ? -1 : 1;
        bool swap = octant & 4;
        int32_t x1 = sx * (swap ? 2 : 4), y1 = sy * (swap ? 4 : 2);
        for (int formula = FORMULA_UJI; formula <= FORMULA_VISUALATOM; formula++) {
            struct pixel pixels[PIXELS_MAX];
            int count = walk((enum formula_id)formula, 10, 20, 10 + x1, 20 + y1, pixels);
            cr_assert_eq(count, formula == FORMULA_VISUALATOM ? 5 : 4);
            for (int i = 0; i < count; i++) {
                int32_t x = 10 + sx * (swap ? shape[i].y : shape[i].x);
                int32_t y = 20 + sy * (swap ? shape[i].x : shape[i].y);
                cr_assert(pixels[i].x == x && pixels[i].y == y, "octant %d, pixel %d: (%d, %d)", octant, i,
                          pixels[i].x, pixels[i].y);
            }
        }
    }
}

Test(line, straight_and_diagonal_lines_have_the_expected_pixels)
{
    static const struct pixel steps[] = {{1, 0}, {-1, 0}, {0, 1},  {0, -1},
                                         {1, 1}, {-1, 1}, {1, -1}, {-1, -1}};
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        struct pixel pixels[PIXELS_MAX];
        int count = walk(FORMULA_VISUALATOM, 7, 7, 7 + 5 * steps[i].x, 7 + 5 * steps[i].y, pixels);
        cr_assert_eq(count, 6);
        for (int j = 0; j < count; j++)
            cr_assert(pixels[j].x == 7 + j * steps[i].x && pixels[j].y == 7 + j * steps[i].y);
    }
}

Test(line, diagonals_are_y_major)
{
    struct line line = begin_line(FORMULA_UJI, 0, 0, 3, -3);
    cr_assert(line.major == 3 && line.minor == 3 && line.left == 3);
    cr_assert(line.major_x == 0 && line.major_y == -1 && line.minor_x == 1 && line.minor_y == 0);
    line = begin_line(FORMULA_UJI, 0, 0, 4, -3);
    cr_assert(line.major == 4 && line.major_x == 1 && line.major_y == 0 && line.minor_x == 0 &&
              line.minor_y == -1);
}

Test(line, a_line_between_equal_ends_is_at_most_one_pixel)
{
    struct pixel pixels[PIXELS_MAX];
    cr_assert_eq(walk(FORMULA_UJI, 5, -6, 5, -6, pixels), 0);
    cr_assert_eq(walk(FORMULA_VISUALATOM, 5, -6, 5, -6, pixels), 1);
    cr_assert(pixels[0].x == 5 && pixels[0].y == -6);
}

/* Sets `ends` to the end points of a random line, with coordinates from -range to range. */
static void random_line(uint32_t number, int32_t range, int32_t ends[4])
{
    struct philox_block block = philox(philox_key(42), number, 0, 0, 0);
    for (int i = 0; i < 4; i++)
        ends[i] = (int32_t)philox_below(block.word[i], 2 * (uint32_t)range + 1) - range;
}

/* After s steps along the major axis, the line has moved floor((2 minor s + major) / (2 major)) pixels along
 * the minor axis. `major` and `minor` are the line's extents along the axes. */
Test(line, steps_follow_the_closed_form)
{
    for (uint32_t number = 0; number < 9000; number++) {
        int32_t e[4], range = number % 3 == 0 ? 3 : number % 3 == 1 ? 60 : 1500;
        random_line(number, range, e);
        struct line line = begin_line(FORMULA_VISUALATOM, e[0], e[1], e[2], e[3]);
        const struct line first = line;
        cr_assert_eq(line.left, line.major + 1);
        for (int64_t s = 0; line.left > 0; s++, line_step(&line)) {
            int64_t m = first.major ? (2 * first.minor * s + first.major) / (2 * first.major) : 0;
            cr_assert_eq(line.x, e[0] + s * first.major_x + m * first.minor_x, "line %u, step %d", number,
                         (int)s);
            cr_assert_eq(line.y, e[1] + s * first.major_y + m * first.minor_y, "line %u, step %d", number,
                         (int)s);
        }
    }
}

Test(line, begins_and_ends_at_its_end_points)
{
    for (uint32_t number = 0; number < 5000; number++) {
        struct pixel with[PIXELS_MAX], without[PIXELS_MAX];
        int32_t e[4];
        random_line(number, 40, e);
        int count = walk(FORMULA_VISUALATOM, e[0], e[1], e[2], e[3], with);
        cr_assert(with[0].x == e[0] && with[0].y == e[1]);
        cr_assert(with[count - 1].x == e[2] && with[count - 1].y == e[3], "line %u", number);
        cr_assert_eq(walk(FORMULA_UJI, e[0], e[1], e[2], e[3], without), count - 1);
        cr_assert_eq(memcmp(with, without, (size_t)(count - 1) * sizeof *with), 0);
    }
}

/* Returns whether the line passes exactly half-way between two pixels at some step s: (2 minor s) mod (2
 * major) = major. */
static bool has_tie(int32_t major, int32_t minor)
{
    for (int32_t s = 1; s < major; s++)
        if (2 * minor * s % (2 * major) == major)
            return true;
    return false;
}

/* A reversed line has the same pixels in reverse order, unless it passes half-way between two pixels. At such
 * a point, each direction already takes the step along the minor axis, so the directions differ. */
Test(line, reversed_lines_differ_only_if_they_have_a_tie)
{
    int ties = 0, plain = 0;
    for (uint32_t number = 0; number < 5000; number++) {
        struct pixel there[PIXELS_MAX], back[PIXELS_MAX];
        int32_t e[4];
        random_line(number, 12, e);
        int count = walk(FORMULA_VISUALATOM, e[0], e[1], e[2], e[3], there);
        cr_assert_eq(walk(FORMULA_VISUALATOM, e[2], e[3], e[0], e[1], back), count);
        bool same = true;
        for (int i = 0; i < count; i++)
            same &= there[i].x == back[count - 1 - i].x && there[i].y == back[count - 1 - i].y;
        struct line line = begin_line(FORMULA_UJI, e[0], e[1], e[2], e[3]);
        bool tie = has_tie(line.major, line.minor);
        cr_assert_eq(same, !tie, "line %u", number);
        ties += tie;
        plain += !tie;
    }
    cr_assert(ties > 500 && plain > 500, "%d with a tie, %d without", ties, plain);
}

/* The most distant end points allowed do not cause overflow. */
Test(line, the_farthest_ends_do_not_overflow)
{
    const int32_t far = 1 << 24;
    struct line line = begin_line(FORMULA_UJI, -far, -far, far, far - 1);
    cr_assert_eq(line.left, 2 * far);
    while (line.left > 1)
        line_step(&line);
    cr_assert(line.x == far - 1 && line.y == far - 2, "(%d, %d)", line.x, line.y);
    line_step(&line);
    cr_assert(line.x == far && line.y == far - 1);
}

Test(line, only_pixels_of_the_image_are_inside)
{
    cr_assert(line_inside(0, 0, 32) && line_inside(31, 31, 32) && line_inside(0, 31, 32));
    cr_assert(!line_inside(-1, 0, 32) && !line_inside(0, -1, 32) && !line_inside(32, 0, 32) &&
              !line_inside(0, 32, 32) && !line_inside(-1, -1, 32) && !line_inside(INT32_MIN, 5, 32));
}

Test(line, lines_are_drawn_or_skipped)
{
    static const struct {
        int32_t x0, y0, x1, y1;
        bool uji;
    } cases[] = {
        {0, 0, 31, 31, true},    {0, 0, 100, 5, true},   {100, 5, 0, 0, true},    {-1, 5, 32, 5, false},
        {-5, -5, -9, -9, false}, {31, 31, 32, 31, true}, {32, 31, 31, 32, false},
    };
    const struct line_rules uji = line_rules_of(FORMULA_UJI);
    const struct line_rules visualatom = line_rules_of(FORMULA_VISUALATOM);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_assert_eq(line_drawn(&uji, cases[i].x0, cases[i].y0, cases[i].x1, cases[i].y1, 32), cases[i].uji,
                     "%zu", i);
        cr_assert(line_drawn(&visualatom, cases[i].x0, cases[i].y0, cases[i].x1, cases[i].y1, 32), "%zu", i);
    }
}
