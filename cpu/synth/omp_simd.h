/* The kernel of `omp` in vectors: a file an instruction set defines LANES, vint, vreal and the operations
 * v_...(), and includes this. Vectors are read and written where they lie, aligned or not.
 *
 * The arithmetic is that of noise.h and atom.h, operation by operation, so that the bits are the same. Only
 * scaling by powers of two is moved about, which is exact.
 */

/* ---- Vertices ---- */

/* Philox works in 64-bit lanes, a counter word in the low half of each, as that is where the multiplication
 * looks; what is above is of no account. A vector holds LANES / 2 vertices, so LANES of them take two: `half`
 * 0 holds the even ones and 1 the odd.
 *
 * Of the counter (vertex, pair, 0, 0) only the second word changes from pair to pair, so half of what the
 * first three rounds do depends on the vertex alone. With m = M0 vertex, n = M1 (high(m) ^ k1 of round 1):
 *
 *     round 1 makes  (pair ^ k0,  0,  high(m) ^ k1,  low(m))
 *     round 2        (high(n) ^ k0,  low(n),  high(M0 (pair ^ k0)) ^ low(m) ^ k1,  low(M0 (pair ^ k0)))
 *
 * and round 3 multiplies the first of these by M0. That product goes into stir[1]; low(m) and low(n) go into
 * the halves of stir[0]. */
static void begin(struct omp_arc *arc)
{
    const struct philox_key *keys = arc->keys;
    const vint m0 = v_set64(PHILOX_M0), m1 = v_set64(PHILOX_M1), polygon = v_set(arc->vertices);
    for (uint32_t i = 0; i <= arc->count; i += LANES) {
        vint number = v_add(v_count(), v_set(arc->first + i));
        number = v_min_unsigned(number, v_sub(number, polygon)); /* wraps after the last vertex */
        for (uint32_t half = 0; half < 2; half++) {
            vint vertex = half ? v_high(number) : number;
            vint m = v_multiply_wide(vertex, m0);
            vint n = v_multiply_wide(v_xor(v_high(m), v_set(keys[0].word[1])), m1);
            vint product = v_multiply_wide(v_xor(v_high(n), v_set(keys[1].word[0])), m0);
            v_store(arc->stir[0] + i + half * (LANES / 2), v_lows(m, n));
            v_store(arc->stir[1] + i + half * (LANES / 2), product);
        }
    }
}

/* The four words of LANES / 2 vertices from what begin() stored. `high` and `low` are the halves of
 * M0 (pair ^ k0 of round 1), the keys of the second and third round mixed in. */
static inline void philox_words(const struct philox_key *keys, vint stirred, vint product, vint high,
                                vint low, vint word[4])
{
    const vint m0 = v_set64(PHILOX_M0), m1 = v_set64(PHILOX_M1);
    vint product1 = v_multiply_wide(v_xor(stirred, high), m1);
    word[0] = v_high(v_xor3(product1, stirred, v_set(keys[2].word[0])));
    word[1] = product1;
    word[2] = v_xor(v_high(product), low);
    word[3] = product;
    for (int round = 3; round < PHILOX_ROUNDS; round++) {
        vint product0 = v_multiply_wide(word[0], m0);
        product1 = v_multiply_wide(word[2], m1);
        word[0] = v_xor3(v_high(product1), word[1], v_set(keys[round].word[0]));
        word[1] = product1;
        word[2] = v_xor3(v_high(product0), word[3], v_set(keys[round].word[1]));
        word[3] = product0;
    }
}

/* noise_of_draw() for draws in the low halves of 64-bit lanes. T is 2^24 t, the gradients come with a factor
 * of 2^-24, and the fade curve's polynomial with 2^-72. */
static inline vreal noise_of_draws(const struct omp_tables *tables, vint even, vint odd)
{
    const vint range = v_set64(NOISE_RANGE);
    vint place_even = v_multiply_wide(even, range), place_odd = v_multiply_wide(odd, range);
    vreal left, right;
    v_gradients(tables, v_highs(place_even, place_odd), &left, &right);
    vreal t = v_real(v_right(v_lows(place_even, place_odd), 8));
    vreal polynomial =
        v_fma(v_fma(t, v_real_set(6 * 0x1p-120f), v_real_set(-15 * 0x1p-96f)), t, v_real_set(10 * 0x1p-72f));
    vreal fade = v_real_mul(v_real_mul(v_real_mul(t, t), t), polynomial);
    vreal from_left = v_real_mul(left, t);
    vreal rise = v_fms(right, v_real_sub(t, v_real_set(0x1p24f)), from_left);
    return v_fma(fade, rise, from_left);
}

/* Moves LANES vertices from number i on by two orbits, given their words. */
static inline void move(const struct omp_arc *arc, uint32_t i, vint words[2][4])
{
    const struct omp_tables *tables = arc->tables;
    const vreal p = v_real_set(arc->p);
    vreal x = v_real_load(arc->x + i), y = v_real_load(arc->y + i);
    vreal cosine = v_real_load(arc->cosine + i), sine = v_real_load(arc->sine + i);
    vreal step = v_real_load(arc->advance + i);
    for (int parity = 0; parity < 2; parity++) {
        vreal noise_x = noise_of_draws(tables, words[0][2 * parity], words[1][2 * parity]);
        vreal noise_y = noise_of_draws(tables, words[0][2 * parity + 1], words[1][2 * parity + 1]);
        x = v_fma(cosine, v_fnma(p, noise_x, step), x);
        y = v_fma(sine, v_fnma(p, noise_y, step), y);
        v_store(arc->column[parity] + i, v_truncate(x));
        v_store(arc->row[parity] + i, v_truncate(y));
    }
    v_real_store(arc->x + i, x);
    v_real_store(arc->y + i, y);
}

/* Random words are made for several vectors before they are used: either loop is small enough for a core to
 * have two turns of it in flight, which hides the latency of the multiplications. */
static void advance(struct omp_arc *arc, uint32_t pair)
{
    enum { GROUP = 4 };
    const struct philox_key *keys = arc->keys;
    const uint64_t shared = (uint64_t)PHILOX_M0 * (pair ^ keys[0].word[0]);
    const vint high = v_set((uint32_t)(shared >> 32) ^ keys[1].word[1]);
    const vint low = v_set((uint32_t)shared ^ keys[2].word[1]);
    vint words[GROUP][2][4];
    for (uint32_t begin_i = 0; begin_i <= arc->count; begin_i += GROUP * LANES) {
        for (uint32_t g = 0, i = begin_i; g < GROUP && i <= arc->count; g++, i += LANES)
            for (uint32_t half = 0; half < 2; half++)
                philox_words(keys, v_load(arc->stir[0] + i + half * (LANES / 2)),
                             v_load(arc->stir[1] + i + half * (LANES / 2)), high, low, words[g][half]);
        for (uint32_t g = 0, i = begin_i; g < GROUP && i <= arc->count; g++, i += LANES)
            move(arc, i, words[g]);
    }
}

/* ---- Lines ---- */

/* After s steps along its major axis a line has made m = floor((2 minor s + major) / (2 major)) along the
 * other. In 16.16 fixed point m is the upper half of slope s + bias, with slope = 2^16 minor / major and
 * bias = 2^16 (1/2 + 1 / (4 major)), in float32 and cut to an integer.
 *
 * That is exact for major <= OMP_MAJOR_MAX: before the floor the true value is a multiple of 1 / (2 major),
 * and the bias puts ours 1 / (4 major) above it. Rounding of the reciprocal, the slope, the bias and the sum
 * amounts to less than (3 major + 2) 2^-24, which is less than 1 / (4 major) up to major = 1181. */

#define BLOCK 128 /* lines at a time: the lists below stay in the first-level cache */

/* The lines of a block, and which of them are to be walked. */
struct lines {
    int32_t x[BLOCK], y[BLOCK]; /* where they begin */
    int32_t pixel[BLOCK];       /* y pitch + x */
    int32_t octant[BLOCK];
    int32_t step[BLOCK];   /* in pixels: major | minor << 16 */
    int32_t length[BLOCK]; /* pixels */
    int32_t head[BLOCK];   /* pixels, at most LANES */
    float slope[BLOCK], bias[BLOCK];

    /* Lines all inside the image, those of them with more than LANES pixels, and lines that cross a border */
    uint32_t inside[BLOCK + LANES], longer[BLOCK + LANES], crossing[BLOCK + LANES];
};

/* How many lines are in those lists: apart from them, so that they can stay in registers. */
struct counts {
    uint32_t inside, longer, crossing;
};

/* Pixels to paint. Long lists cost cache, short ones a mispredicted branch each. */
struct pixels {
    uint32_t list[BLOCK * LANES + LANES];
    size_t count;
};

static void flush(struct pixels *pixels, const struct omp_pen *pen)
{
    pen->paint(pen, pixels->list, pixels->count);
    pixels->count = 0;
}

/* Makes room for LANES pixels of each of `lines` lines. */
static inline void reserve(struct pixels *pixels, uint32_t lines, const struct omp_pen *pen)
{
    if (pixels->count + (size_t)(lines + 1) * LANES > COUNT_OF(pixels->list))
        flush(pixels, pen);
}

/* A lane whose sign is set is outside the image. */
static inline vint outside(vint x, vint y, vint last)
{
    return v_or(v_or3(x, y, v_sub(last, x)), v_sub(last, y));
}

/* A lane whose sign is set holds a line that draws nothing: `uji` drops a line whose two ends are outside,
 * and any line draws nothing whose ends are beyond the same border. */
static inline vint invisible(enum formula formula, vint x0, vint y0, vint x1, vint y1, vint last)
{
    if (formula == FORMULA_UJI)
        return v_and(outside(x0, y0, last), outside(x1, y1, last));
    return v_or(v_or3(v_and(x0, x1), v_and(y0, y1), v_and(v_sub(last, x0), v_sub(last, x1))),
                v_and(v_sub(last, y0), v_sub(last, y1)));
}

static inline uint32_t append(const struct omp_tables *tables, uint32_t *list, uint32_t mask, vint number)
{
    v_compress(tables, list, mask, number);
    return (uint32_t)__builtin_popcount(mask);
}

/* Sets LANES lines up and enters those that are seen into the lists. Returns those that are too long. */
static inline uint32_t set_up(const struct omp_arc *arc, const int32_t *column, const int32_t *row,
                              uint32_t i, uint32_t valid, struct lines *lines, struct counts *counts)
{
    const struct omp_tables *tables = arc->tables;
    const vint last = v_set(arc->res - 1);
    vint x0 = v_load(column + i), y0 = v_load(row + i), x1 = v_load(column + i + 1), y1 = v_load(row + i + 1);
    uint32_t seen = valid & ~v_signs(invisible(arc->formula, x0, y0, x1, y1, last));
    if (!seen)
        return 0;
    uint32_t inside = seen & ~v_signs(v_or(outside(x0, y0, last), outside(x1, y1, last)));
    vint dx = v_sub(x1, x0), dy = v_sub(y1, y0), width = v_abs(dx), height = v_abs(dy);
    vint major = v_max(width, height), minor = v_min(width, height);
    vint steep = v_sub(v_sub(width, height), v_set(1)); /* negative where height >= width */
    vint octant = v_or3(v_right(dx, 31), v_and(v_right(dy, 30), v_set(OCTANT_UP)),
                        v_and(v_right(steep, 29), v_set(OCTANT_STEEP)));
    uint32_t too_long = seen & v_signs(v_sub(v_set(OMP_MAJOR_MAX), major));
    vint length = v_add(major, v_set(arc->formula == FORMULA_VISUALATOM));
    vreal reciprocal = v_real_div(v_real_set(0x1p16f), v_real(v_max(major, v_set(1))));

    uint32_t at = i % BLOCK;
    v_store(lines->x + at, x0);
    v_store(lines->y + at, y0);
    v_store(lines->pixel + at, v_add(v_multiply(y0, v_set(arc->pitch)), x0));
    v_store(lines->octant + at, octant);
    v_store(lines->step + at, v_octant(tables->step_pixel, octant));
    v_store(lines->length + at, length);
    v_real_store(lines->slope + at, v_real_mul(v_real(minor), reciprocal));
    v_real_store(lines->bias + at, v_fma(reciprocal, v_real_set(0.25f), v_real_set(0x1p15f)));
    v_store(lines->head + at, v_min(length, v_set(LANES)));

    vint number = v_add(v_count(), v_set(at));
    uint32_t longer = inside & ~too_long & v_signs(v_sub(v_set(LANES), length));
    counts->inside += append(tables, lines->inside + counts->inside, inside & ~too_long, number);
    counts->longer += append(tables, lines->longer + counts->longer, longer, number);
    counts->crossing +=
        append(tables, lines->crossing + counts->crossing, seen & ~inside & ~too_long, number);
    return too_long;
}

/* Steps s of line i, LANES of them: s | m << 16. */
static inline vint steps(const struct lines *lines, uint32_t i, vint s, vreal s_real)
{
    vint fixed = v_truncate(v_fma(s_real, v_real_set(lines->slope[i]), v_real_set(lines->bias[i])));
    return v_or(v_and(fixed, v_set(0xFFFF0000u)), s);
}

/* LANES pixels of line i in a row, from step s. What is written beyond its end the next line overwrites. */
static inline void emit(const struct lines *lines, uint32_t i, vint s, vreal s_real, uint32_t *list)
{
    vint offset = v_multiply_add(steps(lines, i, s, s_real), v_set(lines->step[i]));
    v_store(list, v_add(offset, v_set(lines->pixel[i])));
}

/* The first pixels of all lines that lie inside. */
static inline void walk_heads(const struct lines *lines, uint32_t count, struct pixels *pixels,
                              const struct omp_pen *pen)
{
    const vint s = v_count();
    const vreal s_real = v_real(s);
    reserve(pixels, count, pen);
    uint32_t *list = pixels->list + pixels->count;
    for (uint32_t j = 0; j < count; j++) {
        uint32_t i = lines->inside[j];
        emit(lines, i, s, s_real, list);
        list += lines->head[i];
    }
    pixels->count = (size_t)(list - pixels->list);
}

/* The other pixels of those that are longer: LANES of each in a first pass, as many of those that go on in a
 * second, and so on. */
static inline void walk_longer(struct lines *lines, uint32_t count, struct pixels *pixels,
                               const struct omp_pen *pen)
{
    for (int32_t begin_s = LANES; count > 0; begin_s += LANES) {
        const vint s = v_add(v_count(), v_set(begin_s));
        const vreal s_real = v_real(s);
        uint32_t going_on = 0;
        reserve(pixels, count, pen);
        uint32_t *list = pixels->list + pixels->count;
        for (uint32_t j = 0; j < count; j++) {
            uint32_t i = lines->longer[j];
            int32_t more = lines->length[i] - begin_s - LANES; /* pixels after this pass, if positive */
            emit(lines, i, s, s_real, list);
            list += LANES + (more < 0 ? more : 0);
            lines->longer[going_on] = i;
            going_on += more > 0;
        }
        count = going_on;
        pixels->count = (size_t)(list - pixels->list);
    }
}

/* The same for lines that cross the border: every pixel is tested. */
static inline void walk_crossing(const struct omp_arc *arc, struct lines *lines, uint32_t count,
                                 struct pixels *pixels, const struct omp_pen *pen)
{
    const struct omp_tables *tables = arc->tables;
    const vint last = v_set(arc->res - 1), pitch = v_set(arc->pitch);
    for (int32_t begin_s = 0; count > 0; begin_s += LANES) {
        const vint s = v_add(v_count(), v_set(begin_s));
        const vreal s_real = v_real(s);
        reserve(pixels, count, pen);
        uint32_t going_on = 0;
        for (uint32_t j = 0; j < count; j++) {
            uint32_t i = lines->crossing[j];
            int32_t octant = lines->octant[i], left = lines->length[i] - begin_s;
            vint walked = steps(lines, i, s, s_real);
            vint x = v_add(v_multiply_add(walked, v_set(tables->step_x[octant])), v_set(lines->x[i]));
            vint y = v_add(v_multiply_add(walked, v_set(tables->step_y[octant])), v_set(lines->y[i]));
            uint32_t kept =
                ~v_signs(outside(x, y, last)) & (left < LANES ? (1u << left) - 1 : (1u << LANES) - 1);
            v_compress(tables, pixels->list + pixels->count, kept, v_add(v_multiply(y, pitch), x));
            pixels->count += (size_t)__builtin_popcount(kept);
            lines->crossing[going_on] = i;
            going_on += left > LANES;
        }
        count = going_on;
    }
}

static void trace(const struct omp_arc *arc, int parity, const struct omp_pen *pen)
{
    const int32_t *column = arc->column[parity], *row = arc->row[parity];
    struct lines lines;
    struct pixels pixels;
    pixels.count = 0;
    for (uint32_t begin_i = 0; begin_i < arc->count; begin_i += BLOCK) {
        uint32_t end_i = arc->count - begin_i < BLOCK ? arc->count : begin_i + BLOCK;
        struct counts counts = {0};
        for (uint32_t i = begin_i; i < end_i; i += LANES) {
            uint32_t valid = end_i - i < LANES ? (1u << (end_i - i)) - 1 : (1u << LANES) - 1;
            uint32_t too_long = set_up(arc, column, row, i, valid, &lines, &counts);
            for (; too_long; too_long &= too_long - 1)
                omp_trace_line(arc, parity, i + (uint32_t)__builtin_ctz(too_long), pen);
        }
        walk_heads(&lines, counts.inside, &pixels, pen);
        walk_longer(&lines, counts.longer, &pixels, pen);
        walk_crossing(arc, &lines, counts.crossing, &pixels, pen);
    }
    flush(&pixels, pen);
}
