/* Tests classes: presets, drawing from ranges, INI and CSV files. Run from the repository root. */
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "support.h"
#include "class_rows.h"
#include "synth/class.h"

TestSuite(class, .timeout = 60);

static char folder[] = "/tmp/fdsl-class-XXXXXX";
static char file[64];

static void make_folder(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/list", folder);
}

static void remove_folder(void)
{
    unlink(file);
    cr_assert_eq(rmdir(folder), 0, "%s cannot be removed: it is not empty", folder);
}

static void write_bytes(const char *bytes, size_t count)
{
    FILE *stream = fopen(file, "w");
    cr_assert_not_null(stream);
    cr_assert_eq(fwrite(bytes, 1, count, stream), count);
    cr_assert_eq(fclose(stream), 0);
}

/* Expects the latest message to be one line with the name and both strings. */
static void expect_text(const char *name, const char *piece, const char *other)
{
    cr_assert(strstr(status_text(), name) && strstr(status_text(), piece) && strstr(status_text(), other),
              "the message is: %s", status_text());
    cr_assert(!strchr(status_text(), '\n'), "more than one line: %s", status_text());
}

static bool same_class(const struct atom_class *a, const struct atom_class *b)
{
    return a->id == b->id && a->vertices == b->vertices && a->orbits == b->orbits && a->oval_x == b->oval_x &&
           a->oval_y == b->oval_y && a->freq1 == b->freq1 && a->freq2 == b->freq2 && a->noise == b->noise &&
           a->radius == b->radius && a->line_width == b->line_width;
}

/* ---- Classes and ranges of the formulas uji and visualatom ---- */

/* The ranges of a preset as this suite writes them. */
struct ranges {
    uint64_t seed;
    uint32_t vertices_min, vertices_max;
    uint32_t orbits_min, orbits_max;
    double oval_max;
    uint32_t freq_min, freq_max;
    double noise_min, noise_max;
    uint32_t radius_min, radius_max;
    double line_width_max;
};

static struct class_ranges ranges_of(const struct ranges *r)
{
    /* In the order of the columns: vertices, orbits, ovals, frequencies, noise, radius, line width. */
    return (struct class_ranges){
        .formula = formulas[FORMULA_UJI],
        .seed = r->seed,
        .low = {r->vertices_min, r->orbits_min, 1, 1, r->freq_min, r->freq_min, r->noise_min, r->radius_min},
        .high = {r->vertices_max, r->orbits_max, r->oval_max, r->oval_max, r->freq_max, r->freq_max,
                 r->noise_max, r->radius_max, r->line_width_max}};
}

static void draw_read(const struct class_ranges *ranges, uint32_t id, struct atom_class *class_)
{
    struct class_row row;
    class_draw(ranges, id, &row);
    *class_ = class_of_row(&row);
}

static void draw(const struct ranges *ranges, uint32_t id, struct atom_class *class_)
{
    const struct class_ranges own = ranges_of(ranges);
    draw_read(&own, id, class_);
}

static enum status check(const struct atom_class *class_)
{
    const struct class_row row = row_of(class_);
    return class_check(formulas[FORMULA_UJI], &row);
}

static double reach(const struct atom_class *class_)
{
    const struct line_rules rules = line_rules_of(FORMULA_UJI);
    return lines_reach(&rules, class_);
}

static enum status read_ranges(const char *path, const char *preset, struct class_ranges *ranges)
{
    return class_ranges_read(path, preset, formulas[FORMULA_UJI], ranges);
}

static enum status read_list(const char *path, struct class_row **rows, size_t *count)
{
    return class_read_csv(path, formulas[FORMULA_UJI], rows, count);
}

static enum status write_list(const char *path, const struct class_row *rows, size_t count)
{
    return class_write_csv(path, formulas[FORMULA_UJI], rows, count);
}

/* ---- One class ---- */

/* The class that the paper's benchmark draws. */
static const struct atom_class paper = {0, 1000, 200, 1.2f, 1.8f, 5, 8, 2.0f, 25, 0.002f};

Test(class, benchmark_is_valid)
{
    cr_assert_eq(check(&paper), STATUS_OK);
}

Test(class, options_default_to_the_benchmark)
{
    struct opened opened;
    open_synth(&opened, "--batch 1");
    cr_assert_eq(opened.synth->class_count, 1);
    cr_assert(same_class(opened.synth->classes, &paper));
    close_synth(&opened);
}

Test(class, reach_adds_the_start_and_the_farthest_steps)
{
    struct atom_class class_ = {0, 3, 10, 1.5f, 2.0f, 0, 0, -2.0f, 25, -0.5f};
    cr_assert_float_eq(reach(&class_), 25 * 2.0 + 10 * (2 * 4.2 + 1 + 0.5), 1e-5);
    class_.oval_x = 4.0f;
    cr_assert_float_eq(reach(&class_), 25 * 4.0 + 10 * (2 * 4.2 + 1 + 0.5), 1e-5);
}

static void expect_refused(struct atom_class class_, const char *parameter)
{
    class_.id = 17;
    cr_assert_eq(check(&class_), STATUS_USAGE, "%s", parameter);
    expect_text("class 17", parameter, "");
}

Test(class, check_names_class_and_parameter)
{
    struct atom_class bad = paper;
#define REFUSE(member, value, parameter) bad = paper, bad.member = value, expect_refused(bad, parameter)
    REFUSE(vertices, 0, "vertices 0");
    REFUSE(vertices, LINES_VERTICES_MAX + 1, "vertices 1048577");
    REFUSE(orbits, 0, "orbits 0");
    REFUSE(orbits, LINES_ORBITS_MAX + 1, "orbits 1048577");
    REFUSE(oval_x, -1.0f, "oval_x -1");
    REFUSE(oval_y, NAN, "oval_y");
    REFUSE(freq1, LINES_FREQ_MAX + 1, "freq1");
    REFUSE(freq2, UINT32_MAX, "freq2");
    REFUSE(noise, INFINITY, "noise");
    REFUSE(line_width, NAN, "line_width");
    REFUSE(radius, 8388609, "radius");
    REFUSE(radius, 8388608, "lower radius"); /* valid alone, but radius * oval_y exceeds 2^23 */
    REFUSE(orbits, 1000000, "lower orbits");
#undef REFUSE
}

Test(class, check_accepts_the_limits)
{
    struct atom_class class_ = {
        UINT32_MAX, LINES_VERTICES_MAX, LINES_ORBITS_MAX, 0, 1, LINES_FREQ_MAX, 0, 0, 0, 0};
    cr_assert_eq(check(&class_), STATUS_OK, "%s", status_text());
    /* The orbit can move a vertex 1 pixel further than the radius, to the limit of 2^23. */
    struct atom_class far = {0, 1, 1, 1, 1, 0, 0, 0, 8388607, 0};
    cr_assert_eq(check(&far), STATUS_OK, "%s", status_text());
    far.line_width = 0.5f;
    cr_assert_eq(check(&far), STATUS_USAGE);
}

/* ---- Drawing ---- */

static const struct ranges uji = {.seed = 0,
                                  .vertices_min = 200,
                                  .vertices_max = 1000,
                                  .orbits_min = 1,
                                  .orbits_max = 200,
                                  .oval_max = 2,
                                  .freq_min = 0,
                                  .freq_max = 20,
                                  .noise_min = 2,
                                  .noise_max = 6,
                                  .radius_min = 0,
                                  .radius_max = 50,
                                  .line_width_max = 0.01};

/* Classes that an independent implementation of the random stream computed. They must never change. Class 775
 * draws freq2 three times, until it differs from freq1. */
Test(class, drawn_classes_never_change)
{
    static const struct atom_class frozen[] = {
        {0, 592, 188, 1.237914800643921f, 1.3098275661468506f, 1, 20, 5.098313331604004f, 50,
         0.0005800628568977118f},
        {1, 205, 139, 1.3981432914733887f, 1.702523946762085f, 10, 18, 3.7301738262176514f, 0,
         0.004886451177299023f},
        {2, 268, 126, 1.4014904499053955f, 1.9981608390808105f, 1, 5, 4.859872817993164f, 2,
         0.005935809575021267f},
        {775, 210, 154, 1.4490129947662354f, 1.2173383235931396f, 6, 3, 4.205595970153809f, 32,
         0.006798745132982731f},
    };
    for (size_t i = 0; i < COUNT_OF(frozen); i++) {
        struct atom_class class_;
        draw(&uji, frozen[i].id, &class_);
        cr_assert(same_class(&class_, &frozen[i]), "class %u", frozen[i].id);
    }
}

Test(class, a_class_depends_only_on_ranges_and_number)
{
    struct atom_class alone, after_others;
    draw(&uji, 41, &alone);
    for (uint32_t id = 100; id-- > 41;)
        draw(&uji, id, &after_others);
    cr_assert(same_class(&alone, &after_others));

    struct ranges other = uji;
    other.seed = UINT64_C(1) << 32; /* changes the second word of the Philox key */
    struct atom_class seeded;
    draw(&other, 41, &seeded);
    cr_assert(!same_class(&alone, &seeded));
}

Test(class, equal_frequencies_are_redrawn)
{
    struct ranges two = uji;
    two.freq_min = 0, two.freq_max = 1;
    int zeros = 0;
    for (uint32_t id = 0; id < 4000; id++) {
        struct atom_class class_;
        draw(&two, id, &class_);
        cr_assert(class_.freq1 != class_.freq2 || class_.freq1 == 0, "class %u", id);
        zeros += class_.freq1 == 0 && class_.freq2 == 0;
    }
    cr_assert(zeros > 900 && zeros < 1100,
              "%d of 4000 classes have two frequencies of 0, expected about 1000", zeros);
}

Test(class, a_range_of_one_frequency_gives_equal_frequencies)
{
    struct ranges one = uji;
    one.freq_min = one.freq_max = 7;
    struct atom_class class_;
    draw(&one, 3, &class_);
    cr_assert(class_.freq1 == 7 && class_.freq2 == 7);
}

Test(class, a_range_of_one_value_gives_that_value)
{
    struct ranges one = {9, 5, 5, 6, 6, 1, 2, 3, 0.3, 0.3, 8, 8, 0};
    struct atom_class class_, expected = {1, 5, 6, 1, 1, 0, 0, 0.3f, 8, 0};
    draw(&one, 1, &class_);
    expected.freq1 = class_.freq1, expected.freq2 = class_.freq2;
    cr_assert(same_class(&class_, &expected));
}

/* A drawn real number never exceeds the upper bound of its range, even if float cannot represent the bound
 * exactly. */
Test(class, reals_do_not_exceed_inexact_bounds)
{
    struct ranges ranges = uji;
    ranges.oval_max = 1.3, ranges.noise_min = 0.7, ranges.noise_max = 4.7, ranges.line_width_max = 1e-7;
    for (uint32_t id = 0; id < 200000; id++) {
        struct atom_class class_;
        draw(&ranges, id, &class_);
        cr_assert(class_.oval_x >= 1 && class_.oval_x <= 1.3f && class_.oval_y <= 1.3f);
        cr_assert(class_.noise >= 0.7f && class_.noise <= 4.7f);
        cr_assert(class_.line_width >= 0 && class_.line_width <= 1e-7f);
    }
}

#ifdef HAVE_INIH

/* Statistics of many draws of one parameter. */
struct spread {
    double minimum, maximum, sum;
};

static void add(struct spread *spread, double value)
{
    spread->minimum = fmin(spread->minimum, value);
    spread->maximum = fmax(spread->maximum, value);
    spread->sum += value;
}

enum { DRAWS = 20000 };

/* Expects integers to reach both bounds of the range, and real numbers to miss each bound by at most 1/1000
 * of the range. Expects the mean to be within five standard errors of the middle. */
static void expect_spread(const char *name, struct spread spread, double minimum, double maximum, bool whole)
{
    double span = maximum - minimum, slack = whole ? 0 : span / 1000;
    double error = (span + whole) / sqrt(12.0 * DRAWS);
    cr_assert(spread.minimum >= minimum && spread.minimum <= minimum + slack, "minimum %s: %.9g", name,
              spread.minimum);
    cr_assert(spread.maximum <= maximum && spread.maximum >= maximum - slack, "maximum %s: %.9g", name,
              spread.maximum);
    cr_assert_float_eq(spread.sum / DRAWS, (minimum + maximum) / 2, 5 * error, "mean %s: %.9g", name,
                       spread.sum / DRAWS);
}

enum { Q, K, OX, OY, P, R0, L, N1, PARAMETERS };

static void expect_preset(const char *preset, const struct ranges *expected)
{
    struct class_ranges ranges;
    cr_assert_eq(read_ranges(NULL, preset, &ranges), STATUS_OK, "%s", status_text());
    struct spread spread[PARAMETERS];
    for (int i = 0; i < PARAMETERS; i++)
        spread[i] = (struct spread){INFINITY, -INFINITY, 0};
    for (uint32_t id = 0; id < DRAWS; id++) {
        struct atom_class c;
        draw_read(&ranges, id, &c);
        cr_assert_eq(check(&c), STATUS_OK, "%s", status_text());
        cr_assert(c.id == id && (c.freq1 != c.freq2 || c.freq1 == 0) && c.freq2 <= expected->freq_max);
        double values[] = {c.vertices, c.orbits, c.oval_x,     c.oval_y,
                           c.noise,    c.radius, c.line_width, c.freq1};
        for (int i = 0; i < PARAMETERS; i++)
            add(&spread[i], values[i]);
    }
    expect_spread("vertices", spread[Q], expected->vertices_min, expected->vertices_max, true);
    expect_spread("orbits", spread[K], expected->orbits_min, expected->orbits_max, true);
    expect_spread("oval_x", spread[OX], 1, (float)expected->oval_max, false);
    expect_spread("oval_y", spread[OY], 1, (float)expected->oval_max, false);
    expect_spread("noise", spread[P], (float)expected->noise_min, (float)expected->noise_max, false);
    expect_spread("radius", spread[R0], expected->radius_min, expected->radius_max, true);
    expect_spread("line_width", spread[L], 0, (float)expected->line_width_max, false);
    expect_spread("freq1", spread[N1], expected->freq_min, expected->freq_max, true);
}

Test(class, preset_uji_has_the_expected_ranges)
{
    expect_preset("uji", &uji);
}

Test(class, preset_visualatom_has_the_expected_ranges)
{
    struct ranges expected = uji;
    expected.noise_min = 0, expected.noise_max = 4;
    expected.radius_min = 10, expected.radius_max = 60;
    expected.line_width_max = 0.1;
    expect_preset("visualatom", &expected);
}

Test(class, preset_lowercompute_has_the_expected_ranges)
{
    struct ranges expected = uji;
    expected.vertices_max = 400;
    expect_preset("lowercompute", &expected);
}

Test(class, the_shipped_file_is_built_in)
{
    static const char *const presets[] = {"visualatom", "uji", "lowercompute"};
    for (size_t i = 0; i < COUNT_OF(presets); i++) {
        struct class_ranges built_in, shipped;
        memset(&built_in, 0, sizeof built_in), memset(&shipped, 0, sizeof shipped);
        cr_assert_eq(read_ranges(NULL, presets[i], &built_in), STATUS_OK, "%s", status_text());
        cr_assert_eq(read_ranges("configs/classes.cfg", presets[i], &shipped), STATUS_OK, "%s",
                     status_text());
        struct atom_class a, b;
        draw_read(&built_in, 12, &a);
        draw_read(&shipped, 12, &b);
        cr_assert(same_class(&a, &b), "%s", presets[i]);
    }
}

/* ---- INI files ---- */

static const char ini[] = "# mine\n"
                          "[mine]\n"
                          "nvertex_min = 3\n"
                          "nvertex_max = 40\n"
                          "norbits_min = 1\n"
                          "norbits_max = 9\n"
                          "oval_max = 1.5\n"
                          "freq_min = 2\n"
                          "freq_max = 6\n"
                          "noisecoef_min = 0.25\n"
                          "startrad_min = 7\n"
                          "linewidth_max = 0.125\n"
                          "seed = 18446744073709551615\n"
                          "[other]\n"
                          "what = ever\n";

Test(class, ini_reads_every_key, .init = make_folder, .fini = remove_folder)
{
    write_bytes(ini, strlen(ini));
    struct class_ranges r;
    cr_assert_eq(read_ranges(file, "mine", &r), STATUS_OK, "%s", status_text());
    const struct ranges expected = {UINT64_MAX, 3, 40, 1, 9, 1.5, 2, 6, 0.25, 4.25, 7, 57, 0.125};
    const struct class_ranges all = ranges_of(&expected);
    cr_assert(r.seed == all.seed && r.formula == all.formula);
    for (size_t i = 0; i < all.formula->parameter_count; i++)
        cr_expect(r.low[i] == all.low[i] && r.high[i] == all.high[i], "%s", all.formula->parameters[i].name);
}

/* Returns a copy of `text` with the only occurrence of `from` replaced; the caller frees it. */
static char *replaced(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    cr_assert(at && !strstr(at + 1, from), "'%s' must occur once", from);
    char *copy = malloc(strlen(text) + strlen(to) + 1);
    cr_assert_not_null(copy);
    sprintf(copy, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return copy;
}

static void expect_ini_error(const char *from, const char *to, const char *preset, const char *piece,
                             const char *other)
{
    char *text = replaced(ini, from, to);
    write_bytes(text, strlen(text));
    free(text);
    struct class_ranges ranges = ranges_of(&uji), before = ranges;
    cr_assert_eq(read_ranges(file, preset, &ranges), STATUS_USAGE, "'%s' for '%s'", to, from);
    expect_text(file, piece, other);
    cr_assert_eq(memcmp(&ranges, &before, sizeof ranges), 0, "a failure has changed the ranges");
}

Test(class, invalid_ini_files_are_refused, .init = make_folder, .fini = remove_folder)
{
    expect_ini_error("freq_min = 2\n", "", "mine", "[mine]", "'freq_min' is missing");
    expect_ini_error("seed = 18446744073709551615\n", "", "mine", "[mine]", "'seed' is missing");
    expect_ini_error("oval_max", "oval_mux", "mine", ":7: unknown key 'oval_mux'", "oval_max");
    expect_ini_error("oval_max", "entirely_else", "mine", ":7: unknown key 'entirely_else'", "");
    expect_ini_error("freq_max = 6", "freq_min = 6", "mine", ":9: key 'freq_min'", "twice");
    expect_ini_error("nvertex_min = 3", "nvertex_min = 41", "mine", "nvertex_min 41", "nvertex_max 40");
    expect_ini_error("norbits_min = 1", "norbits_min = 10", "mine", "norbits_min 10", "norbits_max 9");
    expect_ini_error("freq_min = 2", "freq_min = 7", "mine", "freq_min 7", "freq_max 6");
    expect_ini_error("oval_max = 1.5", "oval_max = wide", "mine", ":7: oval_max", "wide");
    expect_ini_error("oval_max = 1.5", "oval_max = 0.5", "mine", ":7: oval_max", "0.5");
    expect_ini_error("nvertex_min = 3", "nvertex_min = 0", "mine", ":3: nvertex_min", "0");
    expect_ini_error("nvertex_min = 3", "nvertex_min = 3.5", "mine", ":3: nvertex_min", "3.5");
    expect_ini_error("nvertex_min = 3", "nvertex_min =", "mine", ":3: nvertex_min", "");
    expect_ini_error("551615", "551616", "mine", ":13: seed", "18446744073709551616");
    expect_ini_error("seed = 18446744073709551615", "seed = -1", "mine", ":13: seed", "-1");
    expect_ini_error("linewidth_max = 0.125", "linewidth_max = nan", "mine", ":12: linewidth_max", "nan");
    expect_ini_error("norbits_max = 9", "norbits_max = 1000000", "mine", "largest class", "lower orbits");
    expect_ini_error("# mine", "# mine", "mime", "no section [mime]", "did you mean [mine]?");
    expect_ini_error("# mine", "# mine", "zzzzzzzzzzzz", "no section [zzzzzzzzzzzz]", "[mine] [other]");
    expect_ini_error("# mine", "early = 1", "mine", ":1: key 'early'", "before any [section]");
    expect_ini_error("# mine", "what is this", "mine", ":1: ", "[section]");
    /* The first of two errors is reported, whether inih or the program's handler finds it. */
    expect_ini_error("nvertex_min = 3\n", "nvertex_min\noval_max = x\n", "mine", ":3: neither", "");
    expect_ini_error("nvertex_min = 3\n", "nvertex_min = x\nseed\n", "mine", ":3: nvertex_min", "");
}

Test(class, ini_files_with_long_lines_or_zero_bytes_are_refused, .init = make_folder, .fini = remove_folder)
{
    struct class_ranges ranges;
    char line[5000];
    memset(line, 'x', sizeof line);
    write_bytes(line, sizeof line);
    cr_assert_eq(read_ranges(file, "mine", &ranges), STATUS_USAGE);
    expect_text(file, ":1: ", "more than 198 characters");
    write_bytes("[mine]\na\0b = 1\n", 15);
    cr_assert_eq(read_ranges(file, "mine", &ranges), STATUS_USAGE);
    expect_text(file, ":2: ", "not text");
    write_bytes("", 0);
    cr_assert_eq(read_ranges(file, "mine", &ranges), STATUS_USAGE);
    expect_text(file, "no section [mine]", "none");
}

Test(class, unreadable_ini_files_and_missing_sections_are_refused, .init = make_folder, .fini = remove_folder)
{
    struct class_ranges ranges;
    cr_assert_eq(read_ranges("/nowhere/classes.cfg", "uji", &ranges), STATUS_USAGE);
    expect_text("/nowhere/classes.cfg", "cannot open", "No such file");
    cr_assert_eq(read_ranges(folder, "uji", &ranges), STATUS_USAGE);
    expect_text(folder, "cannot read", "directory");
    cr_assert_eq(read_ranges(NULL, "ujo", &ranges), STATUS_USAGE);
    expect_text("classes.cfg", "no section [ujo]", "[uji]");
}

#else

Test(class, without_inih_ranges_are_unavailable)
{
    struct class_ranges ranges;
    cr_assert_eq(read_ranges(NULL, "uji", &ranges), STATUS_UNAVAILABLE);
    expect_text("inih", "build again", "CSV");
}

#endif

/* ---- CSV lists ---- */

#define HEADER "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width"
#define ROW    "1000,200,1.2,1.8,5,8,2,25,0.002"

static void read_one(const char *text, struct atom_class *class_)
{
    struct class_row *classes = NULL;
    size_t count = 0;
    write_bytes(text, strlen(text));
    cr_assert_eq(read_list(file, &classes, &count), STATUS_OK, "%s", status_text());
    cr_assert_eq(count, 1);
    *class_ = class_of_row(&classes[0]);
    free(classes);
}

Test(class, usual_forms_of_csv_are_read, .init = make_folder, .fini = remove_folder)
{
    static const char *const texts[] = {
        HEADER "\n0," ROW "\n",
        HEADER "\n0," ROW,
        HEADER "\r\n0," ROW "\r\n",
        HEADER "\n0," ROW "\n\n",
        HEADER "\n0," ROW "\r\n\r\n\n",
        ("\"class\",vertices,orbits,\"oval_x\",oval_y,freq1,freq2,noise,radius,\"line_width\"\n"
         "\"0\",1000,\"200\",1.2,\"1.8\",5,8,2.0,25,\"2e-3\"\n"),
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct atom_class class_;
        read_one(texts[i], &class_);
        cr_assert(same_class(&class_, &paper), "form %zu", i);
    }
}

Test(class, csv_round_trip_is_exact, .init = make_folder, .fini = remove_folder)
{
    enum { COUNT = 3000 };
    struct atom_class *classes = calloc(COUNT, sizeof *classes);
    struct class_row *rows = calloc(COUNT, sizeof *rows), *back = NULL;
    for (uint32_t i = 0; i < COUNT; i++)
        draw(&uji, i, &classes[i]);
    classes[0] =
        (struct atom_class){UINT32_MAX, LINES_VERTICES_MAX, 1,       0,      0x1.fffffep-1f, LINES_FREQ_MAX,
                            0,          -0x1.000002p0f,     8388000, -1e-30f};
    classes[1].line_width = 0x1p-149f, classes[1].noise = 1e4f, classes[1].oval_x = 8388.607f;
    for (uint32_t i = 0; i < COUNT; i++)
        rows[i] = row_of(&classes[i]);
    cr_assert_eq(write_list(file, rows, COUNT), STATUS_OK, "%s", status_text());
    size_t count = 0;
    cr_assert_eq(read_list(file, &back, &count), STATUS_OK, "%s", status_text());
    cr_assert_eq(count, COUNT);
    for (size_t i = 0; i < count; i++)
        cr_assert(memcmp(&rows[i], &back[i], sizeof rows[i]) == 0, "class %u", classes[i].id);
    free(rows);
    free(classes);
    free(back);
}

Test(class, csv_writes_the_fewest_digits, .init = make_folder, .fini = remove_folder)
{
    const struct class_row row = row_of(&paper);
    cr_assert_eq(write_list(file, &row, 1), STATUS_OK, "%s", status_text());
    char text[256] = "";
    FILE *stream = fopen(file, "r");
    cr_assert_not_null(stream);
    cr_assert_gt(fread(text, 1, sizeof text - 1, stream), 0);
    fclose(stream);
    cr_assert_str_eq(text, HEADER "\n0," ROW "\n");
}

Test(class, a_csv_that_cannot_be_written_is_an_error)
{
    const struct class_row row = row_of(&paper);
    cr_assert_neq(write_list("/nowhere/list.csv", &row, 1), STATUS_OK);
    expect_text("/nowhere/list.csv", "", "");
}

static void expect_csv_error(const char *text, size_t length, const char *place, const char *piece)
{
    write_bytes(text, length);
    struct class_row *classes = NULL;
    size_t count = 0;
    cr_assert_eq(read_list(file, &classes, &count), STATUS_USAGE, "%s", text);
    expect_text(file, place, piece);
    cr_assert(!classes && count == 0);
}

#define CSV_ERROR(text, place, piece) expect_csv_error(text, sizeof(text) - 1, place, piece)

Test(class, invalid_csv_headers_are_refused, .init = make_folder, .fini = remove_folder)
{
    CSV_ERROR("", ":1: ", "empty");
    CSV_ERROR(HEADER "\n", ":2: ", "no class");
    CSV_ERROR(HEADER "\n\n\n", ": ", "no class");
    CSV_ERROR("0," ROW "\n", ":1: column 1", "'class'");
    CSV_ERROR("\n" HEADER "\n0," ROW "\n", ":1: column 1", "'class'");
    CSV_ERROR("class,vertices,orbits,oval_y,oval_x,freq1,freq2,noise,radius,line_width\n0," ROW,
              ":1: column 4", "'oval_y': it must be 'oval_x'");
    CSV_ERROR("class,vertices,orbits,oval_x,oval_y,freq1,freq2,radius,line_width\n0," ROW, ":1: column 8",
              "'radius': it must be 'noise'");
    CSV_ERROR("class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius\n0," ROW, ":1: ", "'line_width'");
    CSV_ERROR(HEADER ",more\n0," ROW ",1\n", ":1: ", "11 columns");
}

Test(class, invalid_csv_rows_are_refused, .init = make_folder, .fini = remove_folder)
{
    CSV_ERROR(HEADER "\n0," ROW "\n1,1000,200,1.2,1.8,5,8,2,25\n", ":3: ", "line_width is missing");
    CSV_ERROR(HEADER "\n0," ROW ",9\n", ":2: ", "follow line_width");
    CSV_ERROR(HEADER "\n0," ROW ",\n", ":2: ", "follow line_width");
    CSV_ERROR(HEADER "\n0,many,200,1.2,1.8,5,8,2,25,0.002\n", ":2: vertices", "many");
    CSV_ERROR(HEADER "\n0,1000,0,1.2,1.8,5,8,2,25,0.002\n", ":2: orbits", "0");
    CSV_ERROR(HEADER "\n0,1000,200,,1.8,5,8,2,25,0.002\n", ":2: oval_x", "");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,-1,5,8,2,25,0.002\n", ":2: oval_y", "-1");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,1.8,5.5,8,2,25,0.002\n", ":2: freq1", "5.5");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,1.8,5,-8,2,25,0.002\n", ":2: freq2", "-8");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,1.8,5,8,inf,25,0.002\n", ":2: noise", "inf");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,1.8,5,8,2,25px,0.002\n", ":2: radius", "25px");
    CSV_ERROR(HEADER "\n0,1000,200,1.2,1.8,5,8,2,25,1e99\n", ":2: line_width", "1e99");
    CSV_ERROR(HEADER "\n4294967296," ROW "\n", ":2: class", "4294967296");
    CSV_ERROR(HEADER "\n3,1000,1000000,1.2,1.8,5,8,2,25,0.002\n", ":2: class 3", "lower orbits");
    CSV_ERROR(HEADER "\n0," ROW "\n\n1," ROW "\n", ":4: ", "line 3");
    CSV_ERROR(HEADER "\n7," ROW "\n1," ROW "\n7," ROW "\n", ":4: class 7", "line 2");
    CSV_ERROR(HEADER "\n0\0," ROW "\n", ":2: ", "zero byte");
}

/* Quotes around a value are not part of it, in any column, neither when it is read nor in a message. */
Test(class, quotes_are_stripped_in_every_column, .init = make_folder, .fini = remove_folder)
{
    static const char *const names[] = {"class", "vertices", "orbits", "oval_x", "oval_y",
                                        "freq1", "freq2",    "noise",  "radius", "line_width"};
    static const char *const values[] = {"0", "1000", "200", "1.2", "1.8", "5", "8", "2", "25", "0.002"};
    static const char *const bad[] = {"\"x\"", "\"\"", "\"", "x\"", "\"x", "\"\"\""};
    static const char *const shown[] = {"'x'", "''", "'\"'", "'x\"'", "'\"x'", "'\"'"};
    char text[512], place[32];
    for (size_t column = 0; column < COUNT_OF(names); column++) {
        size_t count = 0;
        struct class_row *classes = NULL;
        for (int row = 0; row < 2; row++) {
            for (size_t i = 0; i < COUNT_OF(names); i++) {
                const char *quote = i == column ? "\"" : "", *value = row ? values[i] : names[i];
                count += (size_t)sprintf(text + count, "%s%s%s%s", i ? "," : "", quote, value, quote);
            }
            count += (size_t)sprintf(text + count, "\n");
        }
        write_bytes(text, count);
        count = 0;
        cr_assert_eq(read_list(file, &classes, &count), STATUS_OK, "%s: %s", text, status_text());
        cr_expect_eq(count, 1);
        free(classes);
        for (size_t b = 0; b < COUNT_OF(bad); b++) {
            count = (size_t)sprintf(text, "%s\n", HEADER);
            for (size_t i = 0; i < COUNT_OF(names); i++)
                count +=
                    (size_t)sprintf(text + count, "%s%s", i ? "," : "", i == column ? bad[b] : values[i]);
            snprintf(place, sizeof place, ":2: %s", names[column]);
            expect_csv_error(text, count, place, shown[b]);
            count = 0;
            for (size_t i = 0; i < COUNT_OF(names); i++)
                count += (size_t)sprintf(text + count, "%s%s", i ? "," : "", i == column ? bad[b] : names[i]);
            count += (size_t)sprintf(text + count, "\n0,%s\n", ROW);
            snprintf(place, sizeof place, ":1: column %zu", column + 1);
            expect_csv_error(text, count, place, shown[b]);
        }
    }
}

Test(class, unreadable_csv_files_are_refused, .init = make_folder, .fini = remove_folder)
{
    struct class_row *classes = NULL;
    size_t count = 0;
    cr_assert_eq(read_list("/nowhere/list.csv", &classes, &count), STATUS_USAGE);
    expect_text("/nowhere/list.csv", "cannot open", "No such file");
    cr_assert_eq(read_list(folder, &classes, &count), STATUS_USAGE);
    expect_text(folder, "directory", "");
}

/* ---- Spokes ---- */

Test(class, spokes_match_the_formula)
{
    struct atom_class class_ = {0, 8191, 1, 1, 1, 3, 1048573, 2.5f, 0, 0.25f};
    const struct line_rules rules = line_rules_of(FORMULA_UJI);
    float cosine[8191], sine[8191], advance[8191];
    atom_spokes_fill(&rules, &class_, cosine, sine, advance);
    for (uint32_t i = 0; i < 8191; i++) {
        long double theta = 2 * acosl(-1) * i / 8191;
        long double wave = (sinl(3 * theta) + sinl(1048573 * theta)) / 2;
        cr_assert_float_eq(cosine[i], cosl(theta), 6.1e-8, "cosine %u",
                           i); /* slightly more than 2^-24, the rounding error of a float near 1 */
        cr_assert_float_eq(sine[i], sinl(theta), 6.1e-8, "sine %u", i);
        cr_assert_float_eq(advance[i], 2.75L + wave, 2.5e-7, "advance %u", i);
    }
    cr_assert(cosine[0] == 1 && sine[0] == 0 && advance[0] == 2.75f);
}
