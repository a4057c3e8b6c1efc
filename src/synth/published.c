/* Random numbers of the published scripts, drawing, and the tables and states of published sets with the
 * file that keeps the states. */
#include "synth/published.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "core/timer.h"
#include "data/remote.h"
#include "synth/atom.h"
#include "synth/class.h"
#include "synth/input.h"
#include "synth/lines.h"

struct cursor;

struct published {
    const struct published_set *set; /* &own_set */
    struct published_set own_set;
    uint32_t users;                  /* how often it is open */
    struct published_class *classes; /* set->classes */
    struct twister *states;          /* one per block: the stream before the first number of each block */
    struct cursor *_Atomic
        *cursors; /* one per block: the stream after the latest image of a block, or NULL */

    /* For each number of vertices q: cos(2 pi v / q), v = 0 .. q - 1, then the sines. */
    double *directions;
};

/* Returns the cosines of polygons with this number of vertices; the sines follow. */
static inline const double *published_cosines(const struct published *published, uint32_t vertices)
{
    enum { FIRST = PUBLISHED_VERTICES_MIN };
    return published->directions + ((size_t)vertices * (vertices - 1) - FIRST * (FIRST - 1));
}

/* ---- MT19937 ---- */

enum { SHIFT = 397 }; /* word i of the next state depends on words i, i + 1 and i + SHIFT of this one */

static inline uint32_t twist(uint32_t word, uint32_t following)
{
    uint32_t joined = (word & 0x80000000u) | (following & 0x7fffffffu);
    return joined >> 1 ^ (-(following & 1) & 0x9908b0dfu);
}

WIDE_CLONES void twister_renew(struct twister *twister)
{
    uint32_t *word = twister->word;
    for (int i = 0; i < TWISTER_WORDS - SHIFT; i++)
        word[i] = word[i + SHIFT] ^ twist(word[i], word[i + 1]);
    for (int i = TWISTER_WORDS - SHIFT; i < TWISTER_WORDS - 1; i++)
        word[i] = word[i - (TWISTER_WORDS - SHIFT)] ^ twist(word[i], word[i + 1]);
    word[TWISTER_WORDS - 1] = word[SHIFT - 1] ^ twist(word[TWISTER_WORDS - 1], word[0]);
    twister->next = 0;
}

void twister_seed(struct twister *twister, uint32_t seed)
{
    for (uint32_t i = 0; i < TWISTER_WORDS; i++) {
        twister->word[i] = seed;
        seed = 1812433253u * (seed ^ seed >> 30) + i + 1;
    }
    twister->next = TWISTER_WORDS;
}

void twister_seed_array(struct twister *twister, const uint32_t *key, size_t count)
{
    twister_seed(twister, 19650218u);
    uint32_t *word = twister->word, i = 1;
    size_t steps = count > TWISTER_WORDS ? count : TWISTER_WORDS, digit = 0;
    for (size_t k = 0; k < steps + TWISTER_WORDS - 1; k++) {
        uint32_t before = word[i - 1] ^ word[i - 1] >> 30;
        if (k < steps) {
            word[i] = (word[i] ^ before * 1664525u) + key[digit] + (uint32_t)digit;
            digit = digit + 1 < count ? digit + 1 : 0;
        } else {
            word[i] = (word[i] ^ before * 1566083941u) - i;
        }
        if (++i == TWISTER_WORDS) {
            word[0] = word[TWISTER_WORDS - 1];
            i = 1;
        }
    }
    word[0] = 0x80000000u;
}

WIDE_CLONES static void temper(const uint32_t *restrict state, uint32_t *restrict words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t word = state[i];
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c5680u;
        word ^= word << 15 & 0xefc60000u;
        words[i] = word ^ word >> 18;
    }
}

void twister_words(struct twister *twister, uint32_t *words, size_t count)
{
    while (count > 0) {
        if (twister->next >= TWISTER_WORDS)
            twister_renew(twister);
        size_t left = TWISTER_WORDS - twister->next, part = count < left ? count : left;
        temper(twister->word + twister->next, words, part);
        twister->next += (uint32_t)part;
        words += part;
        count -= part;
    }
}

void twister_skip(struct twister *twister, uint64_t count)
{
    while (count > TWISTER_WORDS - twister->next) {
        count -= TWISTER_WORDS - twister->next;
        twister_renew(twister);
    }
    twister->next += (uint32_t)count;
}

/* ---- Laws ---- */

double python_expovariate(struct twister *twister, double rate)
{
    return -log(1.0 - twister_random(twister)) / rate;
}

int32_t numpy_randint(struct twister *twister, int32_t low, int32_t high)
{
    uint32_t largest = (uint32_t)(high - low) - 1, value;
    if (largest == 0)
        return low;
    uint32_t mask = UINT32_MAX >> __builtin_clz(largest);
    do
        value = twister_word(twister) & mask;
    while (value > largest);
    return low + (int32_t)value;
}

/* ---- Noise ---- */

/* The gradients of the cells of pnoise1, and that of cell 0 again. */
static float gradients[NOISE_PERIOD + 1];
static pthread_once_t gradients_once = PTHREAD_ONCE_INIT;

static void fill_gradients(void)
{
    for (int cell = 0; cell <= NOISE_PERIOD; cell++) {
        int hash = noise_permutation[cell % NOISE_PERIOD];
        gradients[cell] = hash & 8 ? -1.0f : (float)((hash & 7) + 1);
    }
}

/* Returns the noise between two gradients: t is the distance from the left one, from 0 to 1. The order of the
 * operations is that of the package. */
static inline float blend(float left, float right, float t)
{
    float fade = t * t * t * (t * (t * 6.0f - 15.0f) + 10.0f);
    float from_left = left * t, from_right = right * (t - 1.0f);
    return (from_left + fade * (from_right - from_left)) * 0.4f;
}

float published_noise(float position)
{
    pthread_once(&gradients_once, fill_gradients);
    int32_t whole = (int32_t)position;
    uint32_t cell = (uint32_t)whole % NOISE_PERIOD;
    return blend(gradients[cell], gradients[cell + 1], position - (float)whole);
}

enum { GROUP = 64 }; /* noises that are computed at a time */

WIDE_CLONES static void noise_group(const uint32_t *restrict words, float *restrict noises)
{
    int32_t cell[GROUP];
    float t[GROUP], left[GROUP], right[GROUP];
    for (int i = 0; i < GROUP; i++) {
        double high = (int32_t)(words[2 * i] >> 5), low = (int32_t)(words[2 * i + 1] >> 6);
        float position = (float)(10000.0 * ((high * 67108864.0 + low) * 0x1p-53));
        cell[i] = (int32_t)position;
        t[i] = position - (float)cell[i];
    }
    for (int i = 0; i < GROUP; i++) {
        left[i] = gradients[cell[i] & (NOISE_PERIOD - 1)];
        right[i] = gradients[(cell[i] & (NOISE_PERIOD - 1)) + 1];
    }
    for (int i = 0; i < GROUP; i++)
        noises[i] = blend(left[i], right[i], t[i]);
}

void published_noises(const uint32_t *words, size_t count, float *noises)
{
    pthread_once(&gradients_once, fill_gradients);
    for (; count >= GROUP; count -= GROUP, words += 2 * GROUP, noises += GROUP)
        noise_group(words, noises);
    if (count > 0) {
        uint32_t last[2 * GROUP] = {0};
        float results[GROUP];
        memcpy(last, words, 2 * count * sizeof *last);
        noise_group(last, results);
        memcpy(noises, results, count * sizeof *noises);
    }
}

/* ---- The numbers that a script draws ---- */

/* Where an image is, and the size of its start circle. */
struct placement {
    double oval_x, oval_y;
    uint32_t radius;
    double start_h, start_w;
};

static double draw_start(struct twister *stream, int32_t range)
{
    return (PUBLISHED_RES + python_randint(stream, -range, range)) / 2.0;
}

static void draw_centre(struct twister *stream, int32_t range, struct placement *placement)
{
    placement->start_h = draw_start(stream, range);
    placement->start_w = draw_start(stream, range);
}

static uint32_t draw_vertices(struct twister *stream, double most)
{
    double vertices;
    do
        vertices = floor(python_expovariate(stream, 1.0 / 100));
    while (vertices < PUBLISHED_VERTICES_MIN || vertices > most);
    return (uint32_t)vertices;
}

enum {
    RCDB_RANGE = 400,
    CENTRE_RANGE = 512
}; /* of twice the distance of the centre from that of the image */

static void draw_rcdb_class(struct twister *stream, struct published_class *class_)
{
    struct placement placement;
    class_->vertices = draw_vertices(stream, 200);
    class_->orbits = (uint32_t)python_randint(stream, 1, 200);
    class_->noise = twister_uniform(stream, 0, 4);
    class_->line_width = twister_uniform(stream, 0, 0.1);
    class_->radius = (uint32_t)python_randint(stream, 0, 100);
    class_->oval_x = twister_uniform(stream, 1, 2);
    class_->oval_y = twister_uniform(stream, 1, 2);
    draw_centre(stream, RCDB_RANGE, &placement);
    class_->start_h = placement.start_h;
    class_->start_w = placement.start_w;
}

static void draw_segrcdb_class(struct twister *stream, struct published_class *class_)
{
    class_->vertices = draw_vertices(stream, 500);
    class_->orbits = (uint32_t)python_randint(stream, 1, 50);
    class_->noise = twister_uniform(stream, 0, 4);
    class_->line_width = twister_uniform(stream, 0, 0.1);
    class_->radius = (uint32_t)python_randint(stream, 0, 50);
    class_->oval_x = twister_uniform(stream, 1, 2);
    class_->oval_y = twister_uniform(stream, 1, 2);
}

static void draw_visualatom_class(struct twister *stream, struct published_class *class_)
{
    struct placement placement;
    class_->vertices = (uint32_t)python_randint(stream, 200, 1000);
    class_->orbits = (uint32_t)python_randint(stream, 1, 200);
    class_->noise = twister_uniform(stream, 0, 4);
    class_->line_width = twister_uniform(stream, 0, 0.1);
    class_->radius = (uint32_t)python_randint(stream, 10, 60);
    class_->wave1 = (uint32_t)python_randint(stream, 0, 20);
    do
        class_->wave2 = (uint32_t)python_randint(stream, 0, 20);
    while (class_->wave2 == class_->wave1 && class_->wave1 != 0);
    class_->oval_x = twister_uniform(stream, 1, 2);
    class_->oval_y = twister_uniform(stream, 1, 2);
    draw_centre(stream, CENTRE_RANGE, &placement);
    class_->start_h = placement.start_h;
    class_->start_w = placement.start_w;
}

/* Draws the parameters of a class. Leaves class_->number, and what the law does not have, unchanged. */
static void published_draw_class(enum published_law law, struct twister *stream,
                                 struct published_class *class_)
{
    if (law == PUBLISHED_RCDB)
        draw_rcdb_class(stream, class_);
    else if (law == PUBLISHED_SEGRCDB)
        draw_segrcdb_class(stream, class_);
    else
        draw_visualatom_class(stream, class_);
}

static struct placement first_placement(const struct published_class *class_)
{
    return (struct placement){class_->oval_x, class_->oval_y, class_->radius, class_->start_h,
                              class_->start_w};
}

/* Draws what the script of RCDB or VisualAtom draws after an image, for the next one. */
static void draw_next_placement(enum published_law law, struct twister *stream, struct placement *placement)
{
    if (law == PUBLISHED_RCDB) {
        placement->oval_x = twister_uniform(stream, 1, 2);
        placement->oval_y = twister_uniform(stream, 1, 2);
        placement->radius = (uint32_t)python_randint(stream, 0, 100);
    }
    draw_centre(stream, law == PUBLISHED_RCDB ? RCDB_RANGE : CENTRE_RANGE, placement);
}

/* Draws the gray of a polygon. RCDB's randint(0, 256) has 257 values, and the image stores 256 as 255. */
static uint8_t draw_gray(enum published_law law, struct twister *stream)
{
    uint32_t gray = python_below(stream, law == PUBLISHED_RCDB ? 257 : 256);
    return (uint8_t)(gray < 255 ? gray : 255);
}

static void skip_polygons(enum published_law law, const struct published_class *class_,
                          struct twister *stream)
{
    for (uint32_t k = 0; k < class_->orbits; k++) {
        draw_gray(law, stream);
        twister_skip(stream, 4ull * class_->vertices); /* x and y of a vertex, two words each */
    }
}

/* Draws the class and the place of the next atom in an image of SegRCDB. */
static const struct published_class *draw_atom(const struct published *published, struct twister *stream,
                                               struct placement *placement)
{
    const struct published_class *class_ = &published->classes[python_below(stream, published->set->classes)];
    *placement = first_placement(class_);
    draw_centre(stream, CENTRE_RANGE, placement);
    return class_;
}

/* ---- Positions in a stream ---- */

/* The stream before image `instance` of a block, and the placement of this image (not SegRCDB). */
struct cursor {
    struct twister stream;
    uint32_t instance;
    struct placement placement;
};

enum { SEG_ATOMS = 32 }; /* atoms per image of SegRCDB */

static void cursor_begin(const struct published *published, uint32_t block, struct cursor *cursor)
{
    cursor->stream = published->states[block];
    cursor->instance = 0;
    if (published->set->law != PUBLISHED_SEGRCDB) {
        struct published_class class_ = {0};
        published_draw_class(published->set->law, &cursor->stream, &class_);
        cursor->placement = first_placement(&class_);
    }
}

static void cursor_skip(const struct published *published, uint32_t block, struct cursor *cursor)
{
    enum published_law law = published->set->law;
    struct placement unused;
    if (law == PUBLISHED_SEGRCDB)
        for (int i = 0; i < SEG_ATOMS; i++)
            skip_polygons(law, draw_atom(published, &cursor->stream, &unused), &cursor->stream);
    else {
        skip_polygons(law, &published->classes[block], &cursor->stream);
        draw_next_placement(law, &cursor->stream, &cursor->placement);
    }
    cursor->instance++;
}

/* Moves `stream` from the beginning of a block to that of the next block of the same script thread. Sets the
 * parameters of the class that is the block (not SegRCDB). */
static void published_skip_block(const struct published *published, uint32_t block, struct twister *stream)
{
    enum published_law law = published->set->law;
    struct cursor cursor = {.stream = *stream};
    if (law != PUBLISHED_SEGRCDB) {
        struct published_class *class_ = &published->classes[block];
        published_draw_class(law, &cursor.stream, class_);
        class_->number = published->set->first_class + block;
    }
    while (cursor.instance < published->set->block_images)
        cursor_skip(published, block, &cursor);
    *stream = cursor.stream;
}

/* ---- Drawing ---- */

/* The memory that drawing needs. */
struct scratch {
    uint32_t words[4 * PUBLISHED_VERTICES_MAX];
    float noises[2 * PUBLISHED_VERTICES_MAX]; /* of x, then of y */
    double x[PUBLISHED_VERTICES_MAX], y[PUBLISHED_VERTICES_MAX];
    int32_t column[PUBLISHED_VERTICES_MAX + 1], row[PUBLISHED_VERTICES_MAX + 1];
    double wave1[PUBLISHED_VERTICES_MAX], wave2[PUBLISHED_VERTICES_MAX]; /* half the sines; VisualAtom */
    struct cursor cursor;                                                /* for when memory runs out */
};

size_t published_scratch_bytes(const struct published *published)
{
    (void)published;
    return sizeof(struct scratch);
}

/* One atom: its class, its place, and where it is drawn. */
struct atom_job {
    const struct published_class *class_;
    struct placement placement;
    const double *cosine, *sine;
    uint8_t *pixels, *mask; /* mask: NULL if there is none */
    int32_t pitch;
};

static void fill_waves(const struct published_class *class_, struct scratch *scratch)
{
    double angle = M_PI * 2 / class_->vertices;
    for (uint32_t v = 0; v < class_->vertices; v++) {
        scratch->wave1[v] = 0.5 * sin(angle * v * class_->wave1);
        scratch->wave2[v] = 0.5 * sin(angle * v * class_->wave2);
    }
}

/* Moves the vertices of one axis by a step. The order of the operations is that of the script. */
WIDE_CLONES static void move_vertices(bool waves, uint32_t count, const struct published_class *class_,
                                      const float *restrict noises, const double *restrict direction,
                                      const double *restrict wave1, const double *restrict wave2,
                                      double *restrict place)
{
    double p = class_->noise, width = class_->line_width;
    if (waves)
        for (uint32_t v = 0; v < count; v++)
            place[v] -= direction[v] * (((noises[v] * p - p) - wave1[v]) - wave2[v] - width);
    else
        for (uint32_t v = 0; v < count; v++)
            place[v] -= direction[v] * ((noises[v] * p * 2 - p) - width);
}

/* Truncates coordinates to pixels, and closes the polygon. */
WIDE_CLONES static void round_vertices(uint32_t count, const double *restrict place, double origin,
                                       int32_t *restrict pixel)
{
    for (uint32_t v = 0; v < count; v++)
        pixel[v] = (int32_t)(place[v] + origin);
    pixel[count] = pixel[0];
}

/* Sets the vertices on the start circle. RCDB adds the centre when it draws, the others here; this decides
 * the last bit of a coordinate. */
static void start_vertices(enum published_law law, const struct atom_job *job, struct scratch *scratch)
{
    const struct placement *placement = &job->placement;
    bool centred = law != PUBLISHED_RCDB;
    for (uint32_t v = 0; v < job->class_->vertices; v++) {
        double x = job->cosine[v] * placement->radius * placement->oval_x;
        double y = job->sine[v] * placement->radius * placement->oval_y;
        scratch->x[v] = centred ? x + placement->start_w : x;
        scratch->y[v] = centred ? y + placement->start_h : y;
    }
}

/* ---- Lines ---- */

/* Pillow's line: Bresenham's, with both end points. After i steps along the major axis, the line has moved
 * floor((2 * minor * i + major) / (2 * major)) pixels along the minor axis. */

/* Paints the plain way. */
static void paint_line_plain(const struct atom_job *job, int32_t x0, int32_t y0, int32_t x1, int32_t y1,
                             uint8_t gray)
{
    const struct line_rules rules = line_rules_of(FORMULA_VISUALATOM);
    for (struct line line = line_begin(&rules, x0, y0, x1, y1); line.left > 0; line_step(&line))
        if (line_inside(line.x, line.y, PUBLISHED_RES)) {
            size_t at = (size_t)(line.y * job->pitch + line.x);
            job->pixels[at] = gray;
            if (job->mask)
                job->mask[at] = (uint8_t)job->class_->number;
        }
}

/* Steps first .. last of a line, both inclusive. */
struct steps {
    int64_t first, last;
};

/* Limits the steps to those whose coordinate start + sign * i is inside the image. */
static struct steps clip_major(struct steps steps, int32_t start, int32_t sign)
{
    int64_t low = sign > 0 ? -(int64_t)start : (int64_t)start - (PUBLISHED_RES - 1);
    int64_t high = sign > 0 ? PUBLISHED_RES - 1 - (int64_t)start : start;
    return (struct steps){low > steps.first ? low : steps.first, high < steps.last ? high : steps.last};
}

/* Limits the steps to those whose coordinate start + sign * (pixels moved along the minor axis) is inside. */
static struct steps clip_minor(struct steps steps, int32_t start, int32_t sign, int64_t minor, int64_t major)
{
    /* Moved m or more pixels: 2 * minor * i + major >= 2 * major * m. */
    int64_t enter = sign > 0 ? -(int64_t)start : (int64_t)start - (PUBLISHED_RES - 1); /* first m inside */
    int64_t leave = 1 + (sign > 0 ? PUBLISHED_RES - 1 - (int64_t)start : start);       /* first m outside */
    if (leave <= 0)
        return (struct steps){0, -1};
    if (minor == 0)
        return enter > 0 ? (struct steps){0, -1} : steps;
    if (enter > 0) {
        int64_t first = (2 * major * enter - major + 2 * minor - 1) / (2 * minor);
        steps.first = first > steps.first ? first : steps.first;
    }
    int64_t last = (2 * major * leave - major + 2 * minor - 1) / (2 * minor) - 1;
    steps.last = last < steps.last ? last : steps.last;
    return steps;
}

static inline __attribute__((always_inline)) void paint_line(uint8_t *pixels, uint8_t *mask, uint8_t class_,
                                                             int32_t pitch, int32_t x0, int32_t y0,
                                                             int32_t x1, int32_t y1, uint8_t gray)
{
    enum { LAST = PUBLISHED_RES - 1 };
    int32_t dx = abs(x1 - x0), dy = abs(y1 - y0), sign_x = x1 > x0 ? 1 : -1, sign_y = y1 > y0 ? 1 : -1;
    bool steep = dy >= dx;
    int32_t major = steep ? dy : dx, minor = steep ? dx : dy;
    int32_t along = steep ? sign_y * pitch : sign_x, across = steep ? sign_x : sign_y * pitch;
    int32_t at = y0 * pitch + x0, error = 2 * minor - major, count = major;
    if (((x0 | y0 | x1 | y1) & ~LAST) != 0) {
        if ((x0 < 0 && x1 < 0) || (y0 < 0 && y1 < 0) || (x0 > LAST && x1 > LAST) || (y0 > LAST && y1 > LAST))
            return;
        struct steps steps = {0, major};
        steps = clip_major(steps, steep ? y0 : x0, steep ? sign_y : sign_x);
        steps = clip_minor(steps, steep ? x0 : y0, steep ? sign_x : sign_y, minor, major);
        if (steps.first > steps.last)
            return;
        int64_t moved = major ? (2 * (int64_t)minor * steps.first + major) / (2 * (int64_t)major) : 0;
        at += (int32_t)(steps.first * along + moved * across);
        error += (int32_t)(2 * minor * steps.first - 2 * major * moved);
        count = (int32_t)(steps.last - steps.first);
    }
    for (int32_t i = count;; i--) {
        pixels[at] = gray;
        if (mask)
            mask[at] = class_;
        if (i == 0)
            return;
        int32_t moves = -(int32_t)(error >= 0); /* all bits set if error >= 0 */
        at += along + (across & moves);
        error += 2 * minor - (2 * major & moves);
    }
}

static void paint_polygon(const struct atom_job *job, const struct scratch *scratch, uint8_t gray)
{
    const int32_t *column = scratch->column, *row = scratch->row;
    for (uint32_t v = 0; v < job->class_->vertices; v++)
        paint_line(job->pixels, NULL, 0, job->pitch, column[v], row[v], column[v + 1], row[v + 1], gray);
}

static void paint_polygon_and_mask(const struct atom_job *job, const struct scratch *scratch, uint8_t gray)
{
    const int32_t *column = scratch->column, *row = scratch->row;
    for (uint32_t v = 0; v < job->class_->vertices; v++)
        paint_line(job->pixels, job->mask, (uint8_t)job->class_->number, job->pitch, column[v], row[v],
                   column[v + 1], row[v + 1], gray);
}

static void paint_polygon_plain(const struct atom_job *job, const struct scratch *scratch, uint8_t gray)
{
    const int32_t *column = scratch->column, *row = scratch->row;
    for (uint32_t v = 0; v < job->class_->vertices; v++)
        paint_line_plain(job, column[v], row[v], column[v + 1], row[v + 1], gray);
}

/* ---- Images ---- */

static void draw_noises(struct twister *stream, uint32_t count, bool plain, struct scratch *scratch)
{
    if (!plain) {
        twister_words(stream, scratch->words, 2 * (size_t)count);
        published_noises(scratch->words, count, scratch->noises);
    }
    for (uint32_t i = 0; plain && i < count; i++)
        scratch->noises[i] = published_noise((float)twister_uniform(stream, 0, 10000));
}

static void draw_polygons(enum published_law law, const struct atom_job *job, struct twister *stream,
                          bool plain, struct scratch *scratch)
{
    const struct published_class *class_ = job->class_;
    uint32_t count = class_->vertices;
    bool waves = law == PUBLISHED_VISUALATOM;
    double origin_x = law == PUBLISHED_RCDB ? job->placement.start_w : 0;
    double origin_y = law == PUBLISHED_RCDB ? job->placement.start_h : 0;
    start_vertices(law, job, scratch);
    for (uint32_t k = 0; k < class_->orbits; k++) {
        uint8_t gray = draw_gray(law, stream);
        draw_noises(stream, 2 * count, plain, scratch);
        move_vertices(waves, count, class_, scratch->noises, job->cosine, scratch->wave1, scratch->wave2,
                      scratch->x);
        move_vertices(waves, count, class_, scratch->noises + count, job->sine, scratch->wave1,
                      scratch->wave2, scratch->y);
        round_vertices(count, scratch->x, origin_x, scratch->column);
        round_vertices(count, scratch->y, origin_y, scratch->row);
        (plain       ? paint_polygon_plain
         : job->mask ? paint_polygon_and_mask
                     : paint_polygon)(job, scratch, gray);
    }
}

static void set_class(const struct published *published, const struct published_class *class_,
                      struct atom_job *job)
{
    job->class_ = class_;
    job->cosine = published_cosines(published, class_->vertices);
    job->sine = job->cosine + class_->vertices;
}

static void clear(uint8_t *plane, size_t pitch, uint8_t value)
{
    for (size_t y = 0; y < PUBLISHED_RES; y++)
        memset(plane + y * pitch, value, PUBLISHED_RES);
}

/* Draws the image at the cursor, and moves the cursor to the next one. */
static void draw_image(const struct published *published, const struct published_image *image, uint32_t block,
                       struct cursor *cursor, struct scratch *scratch)
{
    enum published_law law = published->set->law;
    struct atom_job job = {.pixels = image->canvas,
                           .mask = published->set->has_masks ? image->mask : NULL,
                           .pitch = (int32_t)image->pitch};
    clear(job.pixels, image->pitch, published->set->background);
    if (job.mask)
        clear(job.mask, image->pitch, 0);
    for (int i = 0; law == PUBLISHED_SEGRCDB && i < SEG_ATOMS; i++) {
        set_class(published, draw_atom(published, &cursor->stream, &job.placement), &job);
        draw_polygons(law, &job, &cursor->stream, image->plain, scratch);
    }
    if (law != PUBLISHED_SEGRCDB) {
        set_class(published, &published->classes[block], &job);
        job.placement = cursor->placement;
        if (law == PUBLISHED_VISUALATOM)
            fill_waves(job.class_, scratch);
        draw_polygons(law, &job, &cursor->stream, image->plain, scratch);
        draw_next_placement(law, &cursor->stream, &cursor->placement);
    }
    cursor->instance++;
}

/* Takes the cursor that the latest image of the block left, so that no other thread uses it. If it is past
 * the instance, or if there is none, returns a cursor at the beginning of the block. Without memory for
 * another cursor, this is `spare`. */
static struct cursor *take_cursor(const struct published *published, uint32_t block, uint32_t instance,
                                  struct cursor *spare)
{
    struct cursor *cursor = atomic_exchange(&published->cursors[block], NULL);
    bool usable = cursor && cursor->instance <= instance;
    if (!cursor)
        cursor = malloc(sizeof *cursor);
    if (!cursor)
        cursor = spare;
    if (!usable)
        cursor_begin(published, block, cursor);
    return cursor;
}

void published_draw(const struct published *published, const struct published_image *image, void *memory)
{
    struct scratch *scratch = memory;
    const struct published_set *set = published->set;
    uint32_t block = image->class_index + (uint32_t)(image->instance / set->block_images);
    uint32_t instance = (uint32_t)(image->instance % set->block_images);
    struct cursor *cursor = take_cursor(published, block, instance, &scratch->cursor);
    while (cursor->instance < instance)
        cursor_skip(published, block, cursor);
    draw_image(published, image, block, cursor, scratch);
    if (cursor != &scratch->cursor)
        free(atomic_exchange(&published->cursors[block], cursor));
}

const struct published_class *published_classes(const struct published *published)
{
    return published->classes;
}

/* ---- Directions ---- */

/* A hash of all cosines and sines, computed by the C library that the published images were drawn with: glibc
 * from 2.28, on a processor with FMA. */
#define DIRECTIONS_HASH UINT64_C(0xea9d2bd2cd07d422)

/* Returns a hash of `count` 32-bit words that begins with `hash`. */
static uint64_t hash_words(uint64_t hash, const uint32_t *words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

static enum status fill_directions(struct published *published)
{
    enum { FIRST = PUBLISHED_VERTICES_MIN, LAST = PUBLISHED_VERTICES_MAX };
    size_t count = (size_t)(LAST + 1) * LAST - FIRST * (FIRST - 1);
    published->directions = malloc(count * sizeof *published->directions);
    TRY(ALLOCATED(published->directions, "out of memory for tables of sines"));
    double *to = published->directions;
    for (uint32_t q = FIRST; q <= LAST; q++) {
        double angle = M_PI * 2 / q;
        for (uint32_t v = 0; v < q; v++) {
            to[v] = cos(angle * v);
            to[q + v] = sin(angle * v);
        }
        to += 2 * q;
    }
    const void *words = published->directions;
    uint64_t hash = hash_words(1, words, 2 * count);
    if (hash != DIRECTIONS_HASH)
        return status_set(STATUS_UNAVAILABLE,
                          "%s cannot be drawn as published on this machine: its C library rounds cosines and "
                          "sines differently (hash %016llx), so that pixels would differ; use glibc 2.28 or "
                          "newer on a processor with FMA, or the random numbers philox",
                          published->set->name, (unsigned long long)hash);
    return STATUS_OK;
}

/* ---- Computing states ---- */

static _Thread_local const struct remote_cancel *cancel_by; /* of this thread; NULL: none */

void published_cancel_by(const struct remote_cancel *cancel)
{
    cancel_by = cancel;
}

const struct remote_cancel *published_cancel(void)
{
    return cancel_by;
}

static bool is_cancelled(void)
{
    return cancel_by && cancel_by->set;
}

static enum status stopped(const struct published_set *set)
{
    return status_set(STATUS_FAILED, "reading the random numbers of %s was stopped", set->name);
}

/* Computes the states of all blocks. One task per script thread. */
struct scan {
    struct published *published;
    const atomic_bool *cancel; /* NULL: none */
    struct progress progress;
    _Atomic uint32_t done; /* blocks */
};

static void show(struct scan *scan)
{
    if (progress_due(&scan->progress))
        progress_show(
            &scan->progress, "%s: reading the random numbers of the published script, once: %.0f %%",
            scan->published->set->name, 100.0 * scan->done / published_blocks(scan->published->set));
}

static void scan_thread(void *context, uint64_t task, int thread)
{
    struct scan *scan = context;
    struct published *published = scan->published;
    const struct published_set *set = published->set;
    uint32_t count = published_blocks(set) / set->threads, first = (uint32_t)task * count;
    uint32_t seed = (uint32_t)task + 1;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t block = first; block < first + count && !(scan->cancel && *scan->cancel); block++) {
        published->states[block] = stream;
        published_skip_block(published, block, &stream);
        scan->done++;
        if (thread == 0)
            show(scan);
    }
}

static enum status scan_states(struct published *published, int threads)
{
    struct scan scan = {.published = published, .cancel = cancel_by ? &cancel_by->set : NULL};
    progress_begin(&scan.progress, true);
    parallel_for(threads, published->set->threads, scan_thread, &scan);
    progress_clear(&scan.progress);
    return scan.done == published_blocks(published->set) ? STATUS_OK : stopped(published->set);
}

/* Draws the classes of a set. `states` are those of its classes; NULL: SegRCDB, whose classes have their own
 * stream. */
static void draw_classes(const struct published_set *set, const struct twister *states,
                         struct published_class *classes)
{
    uint32_t seed = 0;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t i = 0; i < set->classes; i++) {
        if (states)
            stream = states[i];
        published_draw_class(set->law, &stream, &classes[i]);
        classes[i].number = set->first_class + i;
    }
}

/* ---- The file ---- */

/* A header, and the states as little-endian words, which each machine that we support stores. */
struct states_header {
    char magic[8];
    uint32_t version, threads, blocks, block_images;
    char set[32];
    uint64_t hash; /* of the states */
};

static const char magic[8] = "FDSLMT19";
enum { VERSION = 1 }; /* increase it if the states of a set change */

static struct states_header make_header(const struct published *published)
{
    struct states_header header = {.version = VERSION,
                                   .threads = published->set->threads,
                                   .blocks = published_blocks(published->set),
                                   .block_images = published->set->block_images};
    memcpy(header.magic, magic, sizeof magic);
    snprintf(header.set, sizeof header.set, "%s", published->set->name);
    header.hash = hash_words(VERSION, published->states[0].word,
                             published_blocks(published->set) * (sizeof(struct twister) / sizeof(uint32_t)));
    return header;
}

void cache_path(const char *name, char path[PATH_MAX])
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = 0;
    if (cache && cache[0] == '/')
        length = snprintf(path, PATH_MAX, "%s/fdsl-bench/%s", cache, name);
    else if (home && home[0] == '/')
        length = snprintf(path, PATH_MAX, "%s/.cache/fdsl-bench/%s", home, name);
    if (length <= 0 || length >= PATH_MAX)
        path[0] = '\0';
}

static bool states_valid(const struct published *published)
{
    const struct published_set *set = published->set;
    uint32_t count = published_blocks(set) / set->threads;
    for (uint32_t block = 0; block < published_blocks(set); block++) {
        uint32_t seed = block / count + 1;
        struct twister first;
        if (published->states[block].next > TWISTER_WORDS)
            return false;
        if (block % count != 0)
            continue;
        twister_seed_array(&first, &seed, 1);
        if (memcmp(&first, &published->states[block], sizeof first) != 0)
            return false;
    }
    return true;
}

/* Reads the states. Returns false if there is no valid file; warns if there is a damaged one. */
static bool states_read(struct published *published, const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    struct states_header header, expected;
    struct stat info;
    size_t bytes = published_blocks(published->set) * sizeof *published->states, got;
    bool whole = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                 (uint64_t)info.st_size == sizeof header + bytes &&
                 file_read_at(fd, &header, sizeof header, 0, &got) && got == sizeof header &&
                 file_read_at(fd, published->states, bytes, sizeof header, &got) && got == bytes;
    close(fd);
    if (whole) {
        expected = make_header(published);
        whole = memcmp(&header, &expected, sizeof header) == 0 && states_valid(published);
    }
    if (!whole)
        status_warn("%s is damaged or of another version; computing it again", path);
    return whole;
}

void cache_make_folders(char *path)
{
    for (char *slash = path[0] ? strchr(path + 1, '/') : NULL; slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0777); /* an error shows when the file is written */
        *slash = '/';
    }
}

static enum status states_write(const struct published *published, char *path)
{
    struct states_header header = make_header(published);
    struct file_writer writer;
    cache_make_folders(path);
    TRY(file_begin(&writer, path));
    enum status status = file_add(&writer, &header, sizeof header);
    if (status == STATUS_OK)
        status = file_add(&writer, published->states,
                          published_blocks(published->set) * sizeof *published->states);
    return status == STATUS_OK ? file_end(&writer) : status;
}

/* Gets the states from the file, or computes them and writes the file. */
static enum status get_states(struct published *published, int threads)
{
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "%s.states", published->set->name);
    cache_path(name, path);
    if (published->set->law == PUBLISHED_SEGRCDB)
        draw_classes(published->set, NULL, published->classes); /* the images depend on them */
    if (path[0] && states_read(published, path)) {
        if (published->set->law != PUBLISHED_SEGRCDB)
            draw_classes(published->set, published->states, published->classes);
        return STATUS_OK;
    }
    TRY(scan_states(published, threads));
    if (!path[0] || states_write(published, path) != STATUS_OK)
        status_warn("the positions in the random numbers of %s are computed at every start, because they "
                    "cannot be stored%s%s; set XDG_CACHE_HOME to a folder that can be written",
                    published->set->name, path[0] ? ": " : "", path[0] ? status_text() : "");
    return STATUS_OK;
}

/* ---- Opening ---- */

static void published_free(struct published *published)
{
    uint32_t blocks = published_blocks(published->set);
    for (uint32_t block = 0; published->cursors && block < blocks; block++)
        free(published->cursors[block]);
    free(published->cursors);
    free(published->classes);
    free(published->states);
    free(published->directions);
    free(published);
}

static enum status open_parts(struct published *published, int threads)
{
    const struct published_set *set = published->set;
    published->classes = calloc(set->classes, sizeof *published->classes);
    published->states = malloc(published_blocks(set) * sizeof *published->states);
    published->cursors = calloc(published_blocks(set), sizeof *published->cursors);
    TRY(ALLOCATED(published->classes && published->states && published->cursors,
                  "out of memory for the random numbers of %s", set->name));
    TRY(fill_directions(published));
    return get_states(published, threads);
}

#define CANCEL_POLL_S 0.1 /* time between two looks at the caller's cancellation */

/* The set that was opened last, or NULL. While a thread opens a set, which it does without the lock, `latest`
 * is NULL and `opening` is true. */
static struct published *latest;
static bool opening;
static pthread_mutex_t latest_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t latest_opened; /* `opening` has become false */

static void make_condition(void)
{
    timer_cond_init(&latest_opened);
}

static bool is_latest(const struct published_set *set)
{
    return latest && strcmp(latest->set->name, set->name) == 0 && latest->set->threads == set->threads &&
           latest->set->classes == set->classes && latest->set->instances == set->instances;
}

static void forget_latest(void)
{
    if (latest && latest->users == 0)
        published_free(latest);
    latest = NULL;
}

/* Waits until no other thread opens a set. Called with the lock. */
static enum status await_turn(const struct published_set *set)
{
    while (opening && !is_cancelled()) {
        const struct timespec until = timer_deadline(CANCEL_POLL_S);
        pthread_cond_timedwait(&latest_opened, &latest_lock, &until);
    }
    return opening ? stopped(set) : STATUS_OK;
}

/* Opens a set. `*published` is NULL after a failure. */
static enum status open_set(const struct published_set *set, int threads, struct published **published)
{
    struct published *opened = *published = calloc(1, sizeof *opened);
    TRY(ALLOCATED(opened, "out of memory for %s", set->name));
    opened->own_set = *set;
    opened->set = &opened->own_set;
    enum status status = open_parts(opened, threads);
    if (status == STATUS_OK)
        return STATUS_OK;
    published_free(opened);
    *published = NULL;
    return status;
}

enum status published_open(const struct published_set *set, int threads, struct published **published)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    *published = NULL;
    pthread_once(&once, make_condition);
    pthread_mutex_lock(&latest_lock);
    enum status status = await_turn(set);
    if (status == STATUS_OK && !is_latest(set)) {
        struct published *opened;
        forget_latest();
        opening = true;
        pthread_mutex_unlock(&latest_lock);
        status = open_set(set, threads, &opened);
        pthread_mutex_lock(&latest_lock);
        opening = false;
        latest = opened;
        pthread_cond_broadcast(&latest_opened);
    }
    if (status == STATUS_OK) {
        *published = latest;
        latest->users++;
    }
    pthread_mutex_unlock(&latest_lock);
    return status;
}

void published_close(struct published *published)
{
    if (!published)
        return;
    pthread_mutex_lock(&latest_lock);
    published->users--;
    if (published->users == 0 && published != latest)
        published_free(published);
    pthread_mutex_unlock(&latest_lock);
}

void published_forget(void)
{
    pthread_mutex_lock(&latest_lock);
    forget_latest();
    pthread_mutex_unlock(&latest_lock);
}

/* ---- What formulas use (lines.h) ---- */

static enum status open_stream(const struct synth *synth, int threads, struct published **published)
{
    return published_open(synth->set, threads, published);
}

const struct published_stream published_lines = {
    .open = open_stream,
    .draw = published_draw,
    .scratch_bytes = published_scratch_bytes,
    .close = published_close,
};

void published_row(const struct formula *formula, const struct published_class *class_, struct class_row *row)
{
    const struct {
        const char *column;
        double value;
    } values[] = {
        {"vertices", class_->vertices},     {"orbits", class_->orbits},   {"noise", class_->noise},
        {"line_width", class_->line_width}, {"radius", class_->radius},   {"oval_x", class_->oval_x},
        {"oval_y", class_->oval_y},         {"freq1", class_->wave1},     {"freq2", class_->wave2},
        {"start_x", class_->start_w},       {"start_y", class_->start_h},
    };
    *row = (struct class_row){.id = class_->number};
    for (size_t i = 0; i < COUNT_OF(values); i++)
        (void)published_set_column(formula, row, values[i].column, values[i].value);
}

static void fill_rows(const struct formula_preset *preset, const struct published_class *classes,
                      uint32_t count, struct class_row *rows)
{
    for (uint32_t i = 0; i < count; i++)
        published_row(formula_of_preset(preset->name), &classes[i], &rows[i]);
}

enum status published_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    struct published *published;
    if (preset->set->law == PUBLISHED_SEGRCDB) { /* the states are not needed */
        FREED struct published_class *classes = calloc(preset->set->classes, sizeof *classes);
        TRY(ALLOCATED(classes, "out of memory for the classes of %s", preset->name));
        draw_classes(preset->set, NULL, classes);
        fill_rows(preset, classes, count, rows);
        return STATUS_OK;
    }
    TRY(published_open(preset->set, parallel_threads(), &published));
    fill_rows(preset, published_classes(published), count, rows);
    published_close(published);
    return STATUS_OK;
}
