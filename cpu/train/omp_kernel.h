/* Inside `train-omp` and `infer-omp`: what is written per instruction set. omp_simd.h has it in vectors, and
 * a file an instruction set says what a vector is. All are loops of one thread over floats, without state. */
#ifndef FDSL_CPU_TRAIN_OMP_KERNEL_H
#define FDSL_CPU_TRAIN_OMP_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "train/model.h"
#include "train/optimizer.h"

/* C = A B, with the rows of C and of B in whole vectors, and A wherever it lies:
 *
 *     c[i][n] = (bias[n] or c[i][n] or 0) + sum over s of a[rows[i] + steps[s]] * b[s][n]
 *
 * That is a matrix product where rows[i] = i * pitch and steps[s] = s; where they are places of an image and
 * offsets of a kernel it is a convolution, whose im2col never exists; and with the two exchanged it is the
 * gradient of the weights. Every element takes its sum in the order of s, whoever computes it. */
struct product {
    const float *a;
    const uint32_t *rows, *steps;
    size_t row_count, step_count;
    const float *b;
    size_t b_pitch; /* from row to row, as c_pitch */
    float *c;
    size_t c_pitch;
    size_t columns;    /* of b and c: a multiple of the lanes */
    const float *bias; /* NULL: none */
    bool add;          /* to what is in c; no bias then */
    bool relu;         /* of the sum */
};

/* Max-pooling over places of `pitch` floats: the largest value of each window and the place where it is. */
struct pool {
    struct shape in, out; /* their channels are not looked at */
    const uint32_t *kernel;
    size_t pitch;
};

/* The non-zero gradients of one output channel of a convolution that max-pooling follows: there are few, as
 * only the largest of a window has one. */
struct peaks {
    const uint32_t *places; /* where in the input the window of the kernel begins, in floats */
    const float *deltas;
    size_t count;
};

struct net_kernel {
    const char *name;
    uint32_t lanes;
    bool (*supported)(void);

    /* A product is cut into tiles of c; any range of them can be computed by any thread. */
    size_t (*tiles)(const struct product *product);
    void (*multiply)(const struct product *product, size_t first, size_t count);

    void (*pool)(const struct pool *pool, const float *in, float *out, uint32_t *places);

    /* With kernel windows of `vectors` vectors at offsets runs[]: for every peak and vector,
     * weight_delta += delta * in and, unless in_delta is NULL, in_delta += delta * weight. */
    void (*spread)(const struct peaks *peaks, const uint32_t *runs, size_t vectors, const float *in,
                   float *weight_delta, const float *weight, float *in_delta);

    void (*add)(const float *from, float *to, size_t count);
    void (*relu)(float *values, size_t count);
    void (*relu_backward)(const float *values, float *deltas, size_t count);

    /* The random bytes of dropout, for elements 0 .. count - 1, rounded up to DRAW_DROPOUT_ELEMENTS; and what
     * they make of values or gradients. */
    void (*draw)(uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t layer, size_t count,
                 uint8_t *bytes);
    void (*drop)(const uint8_t *bytes, uint32_t threshold, float *values, size_t count);

    /* to[j][i] = from[i][j] */
    void (*transpose)(const float *from, size_t from_pitch, size_t rows, size_t columns, float *to,
                      size_t to_pitch);

    void (*update)(const struct update *update, const float *gradients, float *parameters, float *first,
                   float *second, size_t count);
};

extern const struct net_kernel net_kernel_scalar;
#if defined(__x86_64__)
extern const struct net_kernel net_kernel_avx2, net_kernel_avx512;
#endif

#endif
