#include "synth/synth.h"

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/dtype.h"
#include "core/stats.h"
#include "synth/atom.h"

/* The noise of SYNTH_NOISE_UNIFORM4: cuRAND's Philox with the image key as seed and one subsequence per
 * orbit. Each call returns four uniform floats: x and y of two vertices. In cuRAND's documented layout, the
 * counter is (call, 0, subsequence, 0), and a word becomes word * 2^-32 + 2^-33, rounded to float32. */
static void uniform4_noise(const struct synth *synth, struct philox_key key, uint32_t orbit,
                           uint32_t vertices, float *noise)
{
    for (uint32_t i = 0; i < 2 * vertices; i++) {
        uint32_t word = philox(key, i / 4, 0, STREAM_CURAND + orbit, 0).word[i % 4];
        noise[i] = noise_of_uniform(synth->gradients, fmaf((float)word, 0x1p-32f, 0x1p-33f));
    }
}

static void counter_noise(const struct synth *synth, struct philox_key key, uint32_t slot, uint32_t orbit,
                          uint32_t vertices, float *noise)
{
    for (uint32_t v = 0; v < vertices; v++) {
        struct atom_point point = atom_noise(key, slot, synth->gradients, v, orbit);
        noise[2 * (size_t)v] = point.x;
        noise[2 * (size_t)v + 1] = point.y;
    }
}

void oracle_noise(const struct synth *synth, const struct synth_traits *traits, struct synth_image image,
                  uint32_t slot, float *noise)
{
    struct philox_key key = synth_image_key(synth, image);
    const struct line_shape shape = synth_shape(synth, image, key, slot);
    const struct atom_class *class_ = &synth->classes[shape.class_index];
    size_t per_orbit = 2 * (size_t)class_->vertices;
    for (uint32_t k = 0; k < class_->orbits; k++) {
        float *orbit_noise = noise + k * per_orbit;
        if (traits->noise == SYNTH_NOISE_UNIFORM4)
            uniform4_noise(synth, key, k, class_->vertices, orbit_noise);
        else
            counter_noise(synth, key, slot, k, class_->vertices, orbit_noise);
        for (size_t i = 0; traits->half && i < per_orbit; i++)
            orbit_noise[i] = noise_round_half(orbit_noise[i]);
    }
}

/* The values of a line. */
struct paint {
    uint8_t gray, class_id;
};

/* A function to call for each pixel that a line covers. */
typedef void visitor(void *context, size_t pixel, struct paint paint);

static inline void walk_line(const struct synth *synth, struct paint paint, struct atom_point from,
                             struct atom_point to, visitor *visit, void *context)
{
    int32_t res = (int32_t)synth->res;
    int32_t x0 = (int32_t)from.x, y0 = (int32_t)from.y, x1 = (int32_t)to.x, y1 = (int32_t)to.y;
    if (!line_drawn(&synth->rules, x0, y0, x1, y1, res))
        return;
    for (struct line line = line_begin(&synth->rules, x0, y0, x1, y1); line.left > 0; line_step(&line))
        if (line_inside(line.x, line.y, res))
            visit(context, (size_t)line.y * synth->res + (size_t)line.x, paint);
}

/* Walks along the lines of all orbits of a shape, in order. Calls `visit` for each of their pixels inside the
 * image. */
static inline void walk_shape(const struct synth *synth, struct synth_image image, uint32_t slot,
                              const float *noise, struct atom_point *points, visitor *visit, void *context)
{
    struct philox_key key = synth_image_key(synth, image);
    const struct line_shape shape = synth_shape(synth, image, key, slot);
    const struct atom_class *class_ = &synth->classes[shape.class_index];
    const struct atom_spokes spokes = synth_spokes(synth, shape.class_index);
    uint32_t q = class_->vertices;
    for (uint32_t v = 0; v < q; v++)
        points[v] = line_start(&shape, spokes.cosine[v], spokes.sine[v]);
    for (uint32_t k = 0; k < class_->orbits; k++) {
        const float *orbit_noise = noise + 2 * (size_t)q * k;
        const struct paint paint = {atom_gray(&synth->rules, key, slot, k), (uint8_t)class_->id};
        for (uint32_t v = 0; v < q; v++) {
            struct atom_point draw = {orbit_noise[2 * (size_t)v], orbit_noise[2 * (size_t)v + 1]};
            points[v] = atom_advance(points[v], class_->noise, spokes.cosine[v], spokes.sine[v],
                                     spokes.advance[v], draw);
        }
        for (uint32_t v = 0; v < q; v++)
            walk_line(synth, paint, points[v], points[v + 1 < q ? v + 1 : 0], visit, context);
    }
}

static void paint_pixel(void *context, size_t pixel, struct paint paint)
{
    const struct oracle_picture *picture = context;
    picture->pixels[pixel] = paint.gray;
    if (picture->mask)
        picture->mask[pixel] = paint.class_id;
}

void oracle_draw(const struct synth *synth, struct synth_image image, uint32_t slot, const float *noise,
                 struct atom_point *points, const struct oracle_picture *picture)
{
    struct oracle_picture own = *picture;
    if (slot == 0) {
        memset(own.pixels, (int)synth->rules.background, synth_image_bytes(synth));
        if (own.mask)
            memset(own.mask, 0, synth_image_bytes(synth));
    }
    walk_shape(synth, image, slot, noise, points, paint_pixel, &own);
}

/* Marks of a pixel in oracle_member(). COVERED: an orbit covers the pixel. EXPLAINED: an orbit that covers
 * the pixel has the pixel's gray. */
enum { COVERED = 1, EXPLAINED = 2 };

struct membership {
    const uint8_t *pixels;
    uint8_t *marks;
};

static void explain(void *context, size_t pixel, struct paint paint)
{
    const struct membership *membership = context;
    membership->marks[pixel] |= membership->pixels[pixel] == paint.gray ? COVERED | EXPLAINED : COVERED;
}

bool oracle_member(const struct synth *synth, struct synth_image image, const float *noise,
                   struct atom_point *points, uint8_t *marks, const uint8_t *pixels)
{
    struct membership membership = {pixels, marks};
    size_t count = synth_image_bytes(synth);
    memset(marks, 0, count);
    walk_shape(synth, image, 0, noise, points, explain, &membership);
    for (size_t i = 0; i < count; i++)
        if (marks[i] & COVERED ? !(marks[i] & EXPLAINED) : pixels[i] != synth->rules.background)
            return false;
    return true;
}

/* The buffers for checking one image. */
struct slot {
    uint8_t *pixels, *mask; /* the image to check and its mask; `mask` is NULL if there are no masks */
    int64_t label;
    uint8_t *canvas, *mask_canvas; /* the reference's canvases */
    uint8_t *output, *mask_output; /* what they become; NULL if the canvas is the output */
    float *cloud, *cloud_output; /* the point cloud to check and that of the reference; NULL: there is none */
    float *noise;
    float *expected; /* room in noise_check.expected for the reference's noise of this image, or NULL */
    struct atom_point *points;
    void *scratch; /* of the published stream, or of fractals: the points of an orbit */
};

/* The published stream that draws the images of a set; `published` is NULL if there is none. */
struct oracle_stream {
    const struct published_stream *stream;
    struct published *published;
};

/* Draws the reference on the canvases of the slot. */
static void draw_reference(const struct synth *synth, const struct synth_traits *traits,
                           const struct oracle_stream *stream, struct synth_image image, struct slot *slot)
{
    const struct oracle_picture picture = {slot->canvas, slot->mask_canvas};
    if (synth_is_ifs(synth)) {
        ifs_draw(&synth->ifs, &synth->systems[image.class_index], synth->seed, image.instance, synth->points,
                 synth->res, synth->uniforms, slot->scratch, picture.pixels);
        return;
    }
    if (synth_is_ifs3d(synth)) {
        synth_draw_solid(synth, image, slot->scratch, picture.pixels, slot->cloud_output);
        return;
    }
    if (synth_is_color(synth)) {
        color_draw_plain(&synth->color, synth->colors, synth_image_key(synth, image), image.class_index,
                         slot->scratch, picture.pixels);
        return;
    }
    if (stream->published) {
        const struct published_image published = {.class_index = image.class_index,
                                                  .instance = image.instance % synth->set->instances,
                                                  .canvas = picture.pixels,
                                                  .mask = picture.mask,
                                                  .pitch = synth->res,
                                                  .plain = true};
        stream->stream->draw(stream->published, &published, slot->scratch);
        return;
    }
    for (uint32_t s = 0; s < synth->rules.shapes; s++) {
        if (!traits->fetch_noise)
            oracle_noise(synth, traits, image, s, slot->noise);
        oracle_draw(synth, image, s, slot->noise, slot->points, &picture);
    }
}

/* Also checks a multi-hot label. */
static bool mask_correct(const struct synth *synth, struct philox_key key, const struct slot *slot)
{
    if (!slot->mask)
        return true;
    if (synth_multi_hot(synth))
        color_multi_hot(&synth->color, key, slot->mask_output);
    else
        output_convert_mask(&synth->output, synth->res, key, slot->mask_canvas, synth->res,
                            (struct output_rows){0, synth->output.res}, slot->mask_output);
    return memcmp(slot->mask, slot->mask_output, synth_mask_bytes(synth)) == 0;
}

static bool image_correct(const struct synth *synth, const struct synth_traits *traits,
                          const struct oracle_stream *stream, struct synth_image image, struct slot *slot)
{
    const struct philox_key key = synth_image_key(synth, image);
    if (traits->racy) {
        if (!traits->fetch_noise)
            oracle_noise(synth, traits, image, 0, slot->noise);
        return oracle_member(synth, image, slot->noise, slot->points, slot->canvas, slot->pixels);
    }
    draw_reference(synth, traits, stream, image, slot);
    if (slot->output)
        output_convert(&synth->output, synth->res, key, slot->canvas, synth->res, slot->output);
    const uint8_t *expected = slot->output ? slot->output : slot->canvas;
    return memcmp(slot->pixels, expected, synth_output_bytes(synth)) == 0 && mask_correct(synth, key, slot) &&
           (!slot->cloud || memcmp(slot->cloud, slot->cloud_output, synth_cloud_bytes(synth)) == 0) &&
           (!traits->outputs || slot->label == synth_label(synth, image));
}

static void slots_free(struct slot *slots, int count)
{
    for (int i = 0; slots && i < count; i++) {
        free(slots[i].pixels);
        free(slots[i].mask);
        free(slots[i].canvas);
        free(slots[i].mask_canvas);
        free(slots[i].output);
        free(slots[i].mask_output);
        free(slots[i].cloud);
        free(slots[i].cloud_output);
        free(slots[i].noise);
        free(slots[i].points);
        free(slots[i].scratch);
    }
    free(slots);
}

/* Allocates `bytes` bytes unless they are 0. Clears `*made` if memory runs out. */
static void *room(size_t bytes, bool *made)
{
    void *memory = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    *made = *made && (memory || !bytes);
    return memory;
}

static enum status slots_make(const struct synth *synth, const struct oracle_stream *stream, int count,
                              struct slot **slots)
{
    const size_t canvas_bytes = synth_image_bytes(synth), output_bytes = synth_output_bytes(synth);
    const size_t mask_bytes = synth_mask_bytes(synth), noise_bytes = 2 * sizeof(float) * synth->segments_max;
    const size_t converted_bytes = output_is_canvas(&synth->output) ? 0 : output_bytes;
    const size_t cloud_bytes = synth_cloud_bytes(synth);
    const size_t scratch_bytes = synth_is_ifs(synth)     ? synth->ifs.points * sizeof(struct ifs_point)
                                 : synth_is_ifs3d(synth) ? synth_solid_scratch_bytes()
                                 : synth_is_color(synth) ? color_scratch_bytes(&synth->color)
                                 : stream->published     ? stream->stream->scratch_bytes(stream->published)
                                                         : 0;
    uint64_t slot_bytes = (synth->rules.masked ? 2 : 1) * canvas_bytes + output_bytes + converted_bytes +
                          2 * mask_bytes + 2 * cloud_bytes + noise_bytes + scratch_bytes;
    TRY(memory_check((uint64_t)count * slot_bytes, "--verify",
                     "lower --threads, --vertices, --orbits, --res or --out-res"));
    *slots = calloc((size_t)count, sizeof **slots);
    bool made = *slots != NULL;
    for (int i = 0; made && i < count; i++)
        (*slots)[i] = (struct slot){
            .pixels = room(output_bytes, &made),
            .mask = room(mask_bytes, &made),
            .canvas = room(canvas_bytes, &made),
            .mask_canvas = room(synth->rules.masked ? canvas_bytes : 0, &made),
            .output = room(converted_bytes, &made),
            .mask_output = room(mask_bytes, &made),
            .cloud = room(cloud_bytes, &made),
            .cloud_output = room(cloud_bytes, &made),
            .noise = room(noise_bytes, &made),
            .points = room(synth->vertices_max * sizeof(struct atom_point), &made),
            .scratch = room(scratch_bytes, &made),
        };
    if (made)
        return STATUS_OK;
    slots_free(*slots, count);
    *slots = NULL;
    return status_set(STATUS_EXHAUSTED, "--verify: out of memory; lower --vertices, --orbits or --res");
}

/* ---- Noise that cannot be replayed: distribution and streams ---- */

#define NOISE_IMAGES  8      /* images whose noise the distribution test samples */
#define NOISE_SAMPLES 524288 /* maximum number of draws per image, spread over all orbits */
#define NOISE_ALPHA   1e-6   /* significance level: a correct generator fails one test in a million */
#define STREAM_PREFIX 12     /* draws compared per stream; chance of equality of two streams: <= 2^-100 */

struct noise_check {
    float *fetched, *expected; /* sampled noise of the variant, and of the reference for the same images */
    float *scratch;            /* for sorting */
    size_t sample_count;       /* of each */
    float (*streams)[STREAM_PREFIX]; /* the first draws of each (image, orbit, axis) */
    size_t stream_count;
};

/* Returns the bits of a float as a number that has the float's place in ascending order. */
static uint32_t order_of(float value)
{
    uint32_t bits = float_bits(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#define DIGIT_BITS 11 /* three passes sort 32 bits */
#define DIGITS     (1u << DIGIT_BITS)

/* Sorts `values` by their digits, the lowest digit first. qsort() takes ten times as long for the millions of
 * draws of a batch. `other` is scratch space for as many values. */
static void sort_floats(float *values, float *other, size_t count)
{
    for (uint32_t shift = 0; shift < 32; shift += DIGIT_BITS) {
        size_t at[DIGITS] = {0}, sum = 0;
        for (size_t i = 0; i < count; i++)
            at[order_of(values[i]) >> shift & (DIGITS - 1)]++;
        for (size_t digit = 0; digit < DIGITS; digit++) {
            size_t of_digit = at[digit];
            at[digit] = sum;
            sum += of_digit;
        }
        for (size_t i = 0; i < count; i++)
            other[at[order_of(values[i]) >> shift & (DIGITS - 1)]++] = values[i];
        memcpy(values, other, count * sizeof *values);
    }
}

static int compare_streams(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(float[STREAM_PREFIX]));
}

static void noise_check_free(struct noise_check *check)
{
    free(check->fetched);
    free(check->expected);
    free(check->scratch);
    free(check->streams);
}

static enum status noise_check_make(const struct synth *synth, struct noise_check *check)
{
    uint64_t stream_bytes = synth->batch * 2 * synth->orbits_max * sizeof *check->streams;
    TRY(memory_check(stream_bytes, "--verify", "lower --batch or --orbits"));
    check->fetched = malloc(sizeof(float) * NOISE_IMAGES * NOISE_SAMPLES);
    check->expected = malloc(sizeof(float) * NOISE_IMAGES * NOISE_SAMPLES);
    check->scratch = malloc(sizeof(float) * NOISE_IMAGES * NOISE_SAMPLES);
    check->streams = malloc(stream_bytes);
    if (check->fetched && check->expected && check->scratch && check->streams)
        return STATUS_OK;
    noise_check_free(check);
    return status_set(STATUS_EXHAUSTED, "--verify: out of memory for the noise streams; lower --batch");
}

/* Returns the number of draws of an image. */
static size_t draws_of(const struct atom_class *class_)
{
    return 2 * (size_t)class_->vertices * class_->orbits;
}

/* Copies at most NOISE_SAMPLES of the draws of one image. Returns how many. The noise alternates between x
 * and y. An odd step therefore samples both axes. */
static size_t sample_noise(const struct atom_class *class_, const float *noise, float *samples)
{
    size_t draws = draws_of(class_), step = (draws + NOISE_SAMPLES - 1) / NOISE_SAMPLES | 1, count = 0;
    for (size_t i = 0; i < draws; i += step)
        samples[count++] = noise[i];
    return count;
}

/* Records the first draws of each noise stream of one image. */
static void add_streams(struct noise_check *check, const struct atom_class *class_, const float *noise)
{
    size_t segments = draws_of(class_) / 2;
    for (size_t first = 0; first + STREAM_PREFIX <= segments; first += class_->vertices)
        for (size_t axis = 0; axis < 2; axis++, check->stream_count++)
            for (size_t i = 0; i < STREAM_PREFIX; i++)
                check->streams[check->stream_count][i] = noise[2 * (first + i) + axis];
}

/* Returns whether the noise passes both tests; if not, warns with the reason. */
static bool noise_check_passes(struct noise_check *check)
{
    size_t n = check->sample_count;
    sort_floats(check->fetched, check->scratch, n);
    sort_floats(check->expected, check->scratch, n);
    double distance = stats_ks(check->fetched, n, check->expected, n);
    double critical = stats_ks_critical(n, n, NOISE_ALPHA);
    if (distance > critical) {
        status_warn_own("the noise does not have the reference's distribution: Kolmogorov-Smirnov D = %.5f > "
                        "%.5f over %zu draws",
                        distance, critical, n);
        return false;
    }
    qsort(check->streams, check->stream_count, sizeof *check->streams, compare_streams);
    for (size_t i = 1; i < check->stream_count; i++)
        if (compare_streams(check->streams[i - 1], check->streams[i]) == 0) {
            status_warn_own("two noise streams of the batch overlap: they begin with the same draws");
            return false;
        }
    return true;
}

/* ---- The batch ---- */

/* The run to check: the latest run of `state`, which must be number `run`. */
struct checked {
    const struct synth *synth;
    const struct variant *variant;
    void *state;
    uint64_t run;
    struct oracle_stream stream;
};

static struct synth_image image_of(const struct checked *checked, uint64_t j)
{
    const struct synth *synth = checked->synth;
    return synth_image_at(synth->first, synth->stride, synth->turns, checked->run, j);
}

/* Fetches images [begin, begin + count) of the batch into the slots, with their noise if it cannot be
 * replayed on the host. */
static enum status fetch_slots(const struct checked *checked, uint64_t begin, int count, struct slot *slots,
                               struct noise_check *check)
{
    const struct synth *synth = checked->synth;
    const struct synth_traits *traits = checked->variant->traits;
    for (int i = 0; i < count; i++) {
        uint64_t j = begin + (uint64_t)i;
        struct synth_fetch fetch = {
            .j = j, .pixels = slots[i].pixels, .mask = slots[i].mask, .cloud = slots[i].cloud, .label = -1};
        TRY(checked->variant->fetch(checked->state, &fetch));
        slots[i].label = fetch.label;
        if (!traits->fetch_noise)
            continue;
        TRY(traits->fetch_noise(checked->state, checked->run, j, slots[i].noise));
        const struct atom_class *class_ = &synth->classes[image_of(checked, j).class_index];
        add_streams(check, class_, slots[i].noise);
        slots[i].expected = j < NOISE_IMAGES ? check->expected + check->sample_count : NULL;
        if (slots[i].expected)
            check->sample_count += sample_noise(class_, slots[i].noise, check->fetched + check->sample_count);
    }
    return STATUS_OK;
}

/* Checks the image of a slot. If the slot has room for it, also samples the reference's noise of the image,
 * which replaces the variant's noise. */
static bool slot_correct(const struct checked *checked, uint64_t j, struct slot *slot)
{
    const struct synth *synth = checked->synth;
    const struct synth_traits *traits = checked->variant->traits;
    const struct synth_traits reference = {.noise = SYNTH_NOISE_COUNTER, .half = traits->half};
    const struct synth_image image = image_of(checked, j);
    bool correct = image_correct(synth, traits, &checked->stream, image, slot);
    if (slot->expected) {
        oracle_noise(synth, &reference, image, 0, slot->noise);
        sample_noise(&synth->classes[image.class_index], slot->noise, slot->expected);
    }
    return correct;
}

static enum status count_wrong(const struct checked *checked, struct slot *slots, int slot_count,
                               struct noise_check *check, uint64_t *wrong)
{
    const struct synth *synth = checked->synth;
    const struct synth_traits *traits = checked->variant->traits;
    for (uint64_t begin = 0; begin < synth->batch; begin += (uint64_t)slot_count) {
        uint64_t left = synth->batch - begin;
        int count = left < (uint64_t)slot_count ? (int)left : slot_count;
        TRY(fetch_slots(checked, begin, count, slots, check));
        uint64_t wrong_here = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : wrong_here)
        for (int i = 0; i < count; i++)
            wrong_here += !slot_correct(checked, begin + (uint64_t)i, &slots[i]);
        *wrong += wrong_here;
    }
    if (traits->fetch_noise && !noise_check_passes(check))
        *wrong = synth->batch;
    return STATUS_OK;
}

/* Checks all images with `slot_count` slots. */
static enum status check_all(const struct checked *checked, int slot_count, uint64_t *wrong)
{
    struct slot *slots;
    struct noise_check check = {0};
    TRY(slots_make(checked->synth, &checked->stream, slot_count, &slots));
    enum status status = STATUS_OK;
    if (((const struct synth_traits *)checked->variant->traits)->fetch_noise)
        status = noise_check_make(checked->synth, &check);
    if (status == STATUS_OK) {
        status = count_wrong(checked, slots, slot_count, &check, wrong);
        noise_check_free(&check);
    }
    slots_free(slots, slot_count);
    return status;
}

enum status oracle_verify(const void *input, const struct variant *variant, void *state, uint64_t run,
                          uint64_t *wrong)
{
    const struct synth *synth = input;
    struct checked checked = {synth, variant, state, run, {formulas[synth->formula]->published, NULL}};
    int slot_count = 1;
#ifdef _OPENMP
    slot_count = 2 * omp_get_max_threads();
#endif
    if ((uint64_t)slot_count > synth->batch)
        slot_count = (int)synth->batch;
    *wrong = 0;
    enum status status = STATUS_OK;
    if (synth->set && !synth_is_ifs(synth))
        status = checked.stream.stream->open(synth, (slot_count + 1) / 2, &checked.stream.published);
    if (status == STATUS_OK)
        status = check_all(&checked, slot_count, wrong);
    if (checked.stream.published)
        checked.stream.stream->close(checked.stream.published);
    return status;
}
