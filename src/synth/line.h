/* Bresenham's line between two integer points, shared by host and device code.
 *
 * J. E. Bresenham, "Algorithm for computer control of a digital plotter", IBM Systems Journal 4(1), 1965.
 * This reference walks along the line pixel by pixel. Fast variants may compute pixels with a closed form
 * instead; tests compare their images with those of this code. */
#ifndef FDSL_SYNTH_LINE_H
#define FDSL_SYNTH_LINE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "synth/noise.h"

/* Iterates over the pixels of a line: for (line = line_begin(...); line.left > 0; line_step(&line)) plot. */
struct line {
    int32_t x, y; /* the pixel to plot */
    int32_t left; /* pixels still to plot, including this one */
    int32_t major, minor, error;
    int32_t major_x, major_y, minor_x, minor_y; /* steps of one pixel along the major and the minor axis */
};

/* Returns whether pixel (x, y) is inside an image of side `res`. */
FDSL_HD bool line_inside(int32_t x, int32_t y, int32_t res)
{
    return (uint32_t)x < (uint32_t)res && (uint32_t)y < (uint32_t)res;
}

/* Returns whether a line is drawn. With the formula `uji`, lines with both ends outside the image are not
 * drawn. With `visualatom`, all lines are drawn. */
FDSL_HD bool line_drawn(enum formula formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1, int32_t res)
{
    return formula == FORMULA_VISUALATOM || line_inside(x0, y0, res) || line_inside(x1, y1, res);
}

/* Begins the line from (x0, y0) to (x1, y1). With the formula `uji`, the end point is not painted, so a line
 * has max(|dx|, |dy|) pixels. With `visualatom`, the end point is painted, so a line has one pixel more. If
 * |dx| equals |dy|, y is the major axis. Coordinates must be within +-2^24. */
FDSL_HD struct line line_begin(enum formula formula, int32_t x0, int32_t y0, int32_t x1, int32_t y1)
{
    int32_t dx = x1 > x0 ? x1 - x0 : x0 - x1, dy = y1 > y0 ? y1 - y0 : y0 - y1;
    int32_t step_x = x1 > x0 ? 1 : -1, step_y = y1 > y0 ? 1 : -1;
    bool steep = dy >= dx;
    struct line line;
    line.x = x0;
    line.y = y0;
    line.major = steep ? dy : dx;
    line.minor = steep ? dx : dy;
    line.left = line.major + (formula == FORMULA_VISUALATOM);
    line.error = 2 * line.minor - line.major;
    line.major_x = steep ? 0 : step_x;
    line.major_y = steep ? step_y : 0;
    line.minor_x = steep ? step_x : 0;
    line.minor_y = steep ? 0 : step_y;
    return line;
}

/* Advances to the next pixel. */
FDSL_HD void line_step(struct line *line)
{
    if (line->error >= 0) {
        line->x += line->minor_x;
        line->y += line->minor_y;
        line->error -= 2 * line->major;
    }
    line->error += 2 * line->minor;
    line->x += line->major_x;
    line->y += line->major_y;
    line->left--;
}

#endif
