/* The scalar kernel of `omp`, for any machine. Like the vector kernels, it uses each Philox block for two
 * orbits. */
#include "omp_kernel.h"

#include "synth/line.h"

static void begin(struct omp_arc *arc)
{
    (void)arc;
}

static void advance(struct omp_arc *arc, uint32_t pair)
{
    const float *gradients = arc->tables->gradients;
    for (uint32_t i = 0; i <= arc->count; i++) {
        struct philox_block block = atom_noise_block(arc->keys[0], omp_vertex(arc, i), pair);
        struct atom_point point = {arc->x[i], arc->y[i]};
        for (int parity = 0; parity < 2; parity++) {
            struct atom_point noise = {noise_of_draw(gradients, block.word[2 * parity]),
                                       noise_of_draw(gradients, block.word[2 * parity + 1])};
            point = atom_advance(point, arc->p, arc->cosine[i], arc->sine[i], arc->advance[i], noise);
            arc->column[parity][i] = (int32_t)point.x;
            arc->row[parity][i] = (int32_t)point.y;
        }
        arc->x[i] = point.x;
        arc->y[i] = point.y;
    }
}

void omp_trace_line(const struct omp_arc *arc, int parity, uint32_t i, const struct omp_pen *pen)
{
    enum { LIST = 256 };
    int32_t pixels[LIST];
    size_t count = 0;
    const int32_t *column = arc->column[parity], *row = arc->row[parity];
    int32_t res = (int32_t)arc->res;
    if (!line_drawn(arc->formula, column[i], row[i], column[i + 1], row[i + 1], res))
        return;
    for (struct line line = line_begin(arc->formula, column[i], row[i], column[i + 1], row[i + 1]);
         line.left > 0; line_step(&line)) {
        if (!line_inside(line.x, line.y, res))
            continue;
        pixels[count++] = line.y * (int32_t)arc->pitch + line.x;
        if (count == LIST) {
            pen->paint(pen, pixels, count);
            count = 0;
        }
    }
    pen->paint(pen, pixels, count);
}

static void trace(const struct omp_arc *arc, int parity, const struct omp_pen *pen)
{
    for (uint32_t i = 0; i < arc->count; i++)
        omp_trace_line(arc, parity, i, pen);
}

const struct omp_kernel omp_kernel_scalar = {
    .begin = begin,
    .advance = advance,
    .trace = trace,
};
