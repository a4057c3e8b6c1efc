/* The index arithmetic of convolutions as matrix products, for host and device. Tensors are in NHWC order:
 * (sample, height, width, channel). Weights have one row per output channel: (out, tap y, tap x, in). */
#ifndef FDSL_CUDA_TRAIN_RESNET_GEOMETRY_H
#define FDSL_CUDA_TRAIN_RESNET_GEOMETRY_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"

/* A convolution. The first one of a network reads an image whose pixels have IMAGE_CHANNELS values, zero
 * padding included. It multiplies the adjacent pixels of a kernel row at once, as if they were the channels
 * of one tap. */
struct conv_shape {
    uint32_t height, width, channels; /* of the input; channels per tap, a multiple of 8 */
    uint32_t kernel_y, kernel_x, stride, padding;
    uint32_t out_height, out_width, outputs; /* `outputs`: channels of the output, a multiple of 8 */
    uint32_t pixel, line;                    /* distance in values between pixels and lines of the input */
    size_t image;                            /* distance in values between samples of the input */
};

#define IMAGE_CHANNELS 4 /* values per pixel of an image: up to 4 channels, the rest is zero */
#define STEM_KERNEL    7
#define STEM_PADDING   3
#define STEM_CHANNELS \
    32 /* values per tap of the first convolution: 8 pixels, the last one with weights of zero */

/* Returns a convolution whose input is not padded in memory. */
FDSL_HD struct conv_shape conv_shape_of(uint32_t height, uint32_t width, uint32_t channels, uint32_t outputs,
                                        uint32_t kernel, uint32_t stride)
{
    struct conv_shape shape;
    shape.height = height;
    shape.width = width;
    shape.channels = channels;
    shape.kernel_y = shape.kernel_x = kernel;
    shape.stride = stride;
    shape.padding = kernel / 2;
    shape.out_height = (height + 2 * shape.padding - kernel) / stride + 1;
    shape.out_width = (width + 2 * shape.padding - kernel) / stride + 1;
    shape.outputs = outputs;
    shape.pixel = channels;
    shape.line = width * channels;
    shape.image = (size_t)height * shape.line;
    return shape;
}

/* Returns the first convolution for images of height x width pixels: 7 x 7, stride 2. In memory, an image has
 * STEM_PADDING lines above and below and STEM_PADDING pixels to the left. Its lines end with at least 4
 * pixels of padding, so that 8 adjacent pixels of any window are inside the line. */
FDSL_HD struct conv_shape stem_shape_of(uint32_t height, uint32_t width, uint32_t outputs)
{
    struct conv_shape shape = conv_shape_of(height, width, STEM_CHANNELS, outputs, STEM_KERNEL, 2);
    shape.height = height + 2 * STEM_PADDING;
    shape.width = (width + STEM_PADDING + 5) / 2 * 2;
    shape.kernel_x = 1;
    shape.padding = 0;
    shape.pixel = IMAGE_CHANNELS;
    shape.line = shape.width * shape.pixel;
    shape.image = (size_t)shape.height * shape.line;
    return shape;
}

/* A pass of a convolution as a matrix product: rows are pixels of a result, columns are its channels, and the
 * sum runs over taps and channels of the source. Row (n, p, q) with tap (i, j) reads the source's pixel
 * (p * scale + first_y + i * step, q * scale + first_x + j * step) of sample n, or zeros outside of it. */
struct conv_pass {
    uint32_t lines, across; /* pixels of a sample that are rows */
    int32_t scale, first_y, first_x, step;
    int32_t height, width; /* of the source */
    uint32_t pixel, line;
    size_t image;
    uint32_t taps_y, taps_x, channels;
    /* Weights are at column * weight_row + tap_at() * channels + channel. */
    uint32_t weight_row, tap_first, tap_step_y, tap_step_x;
    uint32_t columns;
    /* Row (n, p, q) is pixel (p * out_scale + out_y, q * out_scale + out_x) of the result. */
    uint32_t out_scale, out_y, out_x, out_height, out_width;
};

/* Returns the forward pass: source and result are the input and the output. */
FDSL_HD struct conv_pass conv_forward_pass(const struct conv_shape *shape)
{
    struct conv_pass pass;
    pass.lines = pass.out_height = shape->out_height;
    pass.across = pass.out_width = shape->out_width;
    pass.scale = (int32_t)shape->stride;
    pass.first_y = pass.first_x = -(int32_t)shape->padding;
    pass.step = 1;
    pass.height = (int32_t)shape->height;
    pass.width = (int32_t)shape->width;
    pass.pixel = shape->pixel;
    pass.line = shape->line;
    pass.image = shape->image;
    pass.taps_y = shape->kernel_y;
    pass.taps_x = shape->kernel_x;
    pass.channels = shape->channels;
    pass.weight_row = shape->kernel_y * shape->kernel_x * shape->channels;
    pass.tap_first = 0;
    pass.tap_step_y = shape->kernel_x;
    pass.tap_step_x = 1;
    pass.columns = shape->outputs;
    pass.out_scale = 1;
    pass.out_y = pass.out_x = 0;
    return pass;
}

/* Sets, along one axis, where the pass for the pixels phase, phase + stride, ... of the input begins to read
 * the output's gradients: tap `*tap`, pixel `*first`. Returns its number of taps. Tap r of pixel y belongs to
 * the output (y + padding - r) / stride, if the division is exact. */
FDSL_HD uint32_t phase_taps(uint32_t kernel, uint32_t stride, uint32_t padding, uint32_t phase, uint32_t *tap,
                            int32_t *first)
{
    *tap = (phase + padding) % stride;
    *first = (int32_t)((phase + padding) / stride);
    return *tap < kernel ? (kernel - 1 - *tap) / stride + 1 : 0;
}

/* Returns the pass that computes the gradients of the input's pixels (phase_y + stride * p, phase_x + stride
 * * q): the source has the gradients of the output, and the result those of the input. Together, the passes
 * of all phases (each less than the stride) compute all gradients. Its weights are those of the forward pass
 * in another order: (in, tap y, tap x, out). It may have no rows, or no taps and then results of zero. */
FDSL_HD struct conv_pass conv_input_pass(const struct conv_shape *shape, uint32_t phase_y, uint32_t phase_x)
{
    struct conv_pass pass;
    uint32_t tap_y, tap_x;
    pass.taps_y = phase_taps(shape->kernel_y, shape->stride, shape->padding, phase_y, &tap_y, &pass.first_y);
    pass.taps_x = phase_taps(shape->kernel_x, shape->stride, shape->padding, phase_x, &tap_x, &pass.first_x);
    pass.out_height = shape->height;
    pass.out_width = shape->width;
    pass.lines = (shape->height + shape->stride - 1 - phase_y) / shape->stride;
    pass.across = (shape->width + shape->stride - 1 - phase_x) / shape->stride;
    pass.scale = 1;
    pass.step = -1;
    pass.height = (int32_t)shape->out_height;
    pass.width = (int32_t)shape->out_width;
    pass.pixel = pass.channels = shape->outputs;
    pass.line = shape->out_width * shape->outputs;
    pass.image = (size_t)shape->out_height * pass.line;
    pass.weight_row = shape->kernel_y * shape->kernel_x * shape->outputs;
    pass.tap_first = tap_y * shape->kernel_x + tap_x;
    pass.tap_step_y = shape->stride * shape->kernel_x;
    pass.tap_step_x = shape->stride;
    pass.columns = shape->channels;
    pass.out_scale = shape->stride;
    pass.out_y = phase_y;
    pass.out_x = phase_x;
    return pass;
}

/* Returns the length of the sums of a pass. */
FDSL_HD uint32_t pass_depth(const struct conv_pass *pass)
{
    return pass->taps_y * pass->taps_x * pass->channels;
}

/* Returns the number of tap (i, j) of a pass in a row of weights. */
FDSL_HD uint32_t tap_at(const struct conv_pass *pass, uint32_t i, uint32_t j)
{
    return pass->tap_first + i * pass->tap_step_y + j * pass->tap_step_x;
}

/* Returns whether the source has the pixel (y, x). */
FDSL_HD bool is_inside(const struct conv_pass *pass, int32_t y, int32_t x)
{
    return (uint32_t)y < (uint32_t)pass->height && (uint32_t)x < (uint32_t)pass->width;
}

/* Returns the offset of channel 0 of row (n, p, q) in the result. */
FDSL_HD size_t result_at(const struct conv_pass *pass, uint32_t n, uint32_t p, uint32_t q)
{
    const size_t line = (size_t)n * pass->out_height + p * pass->out_scale + pass->out_y;
    return (line * pass->out_width + q * pass->out_scale + pass->out_x) * pass->columns;
}

#endif
