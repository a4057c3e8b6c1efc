#include "synth/published.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/parallel.h"
#include "core/portable.h"
#include "synth/atom.h"
#include "synth/published_parts.h"
#include "synth/published_random.h"

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

void published_draw_class(enum published_law law, struct twister *stream, struct published_class *class_)
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

void published_skip_block(const struct published *published, uint32_t block, struct twister *stream)
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
