/* The functions of `train-omp` and `infer-omp` that are compiled once per instruction set. omp_simd.c
 * implements them with vectors. All are single-threaded and have no state. */
#ifndef FDSL_CPU_TRAIN_OMP_KERNEL_H
#define FDSL_CPU_TRAIN_OMP_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "train/model.h"
#include "train/optimizer.h"

/* C = A B, a GEMM with gathered A:
 *
 *     c[i][n] = (bias[n] or c[i][n] or 0) + sum over s of a[rows[i] + steps[s]] * b[s][n]
 *
 * With rows[i] = i * pitch and steps[s] = s, this is a matrix product. If `rows` has image positions and
 * `steps` has offsets of the convolution kernel, this is a convolution without an im2col copy. With `rows`
 * and `steps` exchanged, this is the gradient of the convolution's weights. Each element of c is summed in
 * the order of s, on any thread. Rows of B and C consist of whole vectors. */
struct gemm {
    const float *a;
    const uint32_t *rows, *steps;
    size_t row_count, step_count;
    const float *b;
    size_t b_pitch; /* distance between two rows of b in floats */
    float *c;
    size_t c_pitch;
    size_t columns;    /* columns of b and c; a multiple of the kernel's `lanes` */
    const float *bias; /* NULL: no bias */
    bool add;          /* add to the contents of c; `bias` is ignored */
    bool relu;         /* apply ReLU to the sum */
};

/* Max-pooling. Each position has `pitch` floats, one per channel and some for padding. For each window and
 * channel, finds the maximum and its position. */
struct pool {
    struct shape in, out; /* the channels of these shapes are ignored */
    const uint32_t *kernel, *padding;
    uint32_t stride[MODEL_AXES];
    size_t pitch;
};

/* The non-zero gradients of one output channel of a convolution followed by max-pooling. There are few of
 * them, because only the maximum of each window has a gradient. */
struct argmax_list {
    const uint32_t
        *positions; /* offsets in the input, in floats, where the convolution kernel's windows begin */
    const float *deltas;
    size_t count;
};

struct net_kernel {
    uint32_t lanes;

    /* A GEMM is divided into tiles of c. Any thread can compute any range of tiles. */
    size_t (*tiles)(const struct gemm *gemm);
    void (*multiply)(const struct gemm *gemm, size_t first, size_t count);

    void (*pool)(const struct pool *pool, const float *in, float *out, uint32_t *positions);

    /* A window of the convolution kernel has `vectors` vectors at the offsets runs[]. For every list entry
     * and every vector: weight_delta += delta * in, unless weight_delta is NULL, and in_delta +=
     * delta * weight, unless in_delta is NULL. */
    void (*spread)(const struct argmax_list *argmax, const uint32_t *runs, size_t vectors, const float *in,
                   float *weight_delta, const float *weight, float *in_delta);

    void (*add)(const float *from, float *to, size_t count);
    void (*relu)(float *values, size_t count);
    void (*relu_backward)(const float *values, float *deltas, size_t count);

    /* draw() writes one random byte of dropout for each of `count` elements, rounded up to a multiple of
     * DRAW_DROPOUT_ELEMENTS. drop() applies these bytes to values or gradients. */
    void (*draw)(uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t layer, size_t count,
                 uint8_t *bytes);
    void (*drop)(const uint8_t *bytes, uint32_t threshold, float *values, size_t count);

    /* to[j][i] = from[i][j] */
    void (*transpose)(const float *from, size_t from_pitch, size_t rows, size_t columns, float *to,
                      size_t to_pitch);

    /* Transformers. softmax() replaces scores by softmax(factor * scores), in place; softmax_backward()
     * replaces gradients of these weights by those of the scores. norm() normalises a token and writes its
     * two moments for norm_backward(). norm_weights() adds to the gradients of the parameters. With `adds`,
     * the backward functions add to in_deltas; otherwise they overwrite it. */
    void (*softmax)(float *scores, size_t count, float factor);
    void (*softmax_backward)(const float *weights, float *deltas, size_t count, float factor);
    void (*norm)(const float *in, const float *weight, const float *bias, float *out, size_t count,
                 float *moments);
    void (*norm_backward)(const float *in, const float *moments, const float *weight, const float *deltas,
                          float *in_deltas, size_t count, bool adds);
    void (*norm_weights)(const float *in, const float *moments, const float *deltas, float *weights,
                         float *biases, size_t count);
    void (*gelu)(const float *in, float *out, size_t count);
    void (*gelu_backward)(const float *in, const float *deltas, float *in_deltas, size_t count, bool adds);

    /* Batch normalisation of `count` positions, which have `pitch` floats each, one per channel. moments()
     * computes the mean of each channel, and the sum of the squares of the distances from it. apply()
     * computes out = (in - mean) * scale + shift. sums() computes the sums of the gradients, and of their
     * products with in - mean. apply_backward() computes scale * (delta - fall - (in - mean) * slope), and
     * adds it to in_deltas if `adds` is true. The other arrays have `pitch` values, one per channel. */
    void (*channel_moments)(const float *in, size_t count, size_t pitch, float *means, float *squares);
    void (*channel_apply)(const float *in, size_t count, size_t pitch, const float *means,
                          const float *scales, const float *shifts, float *out);
    void (*channel_sums)(const float *in, const float *deltas, size_t count, size_t pitch, const float *means,
                         float *sums, float *products);
    void (*channel_backward)(const float *in, const float *deltas, size_t count, size_t pitch,
                             const float *means, const float *scales, const float *falls, const float *slopes,
                             float *in_deltas, bool adds);

    void (*update)(const struct update *update, const float *gradients, float *parameters, float *m, float *v,
                   size_t count);
};

extern const struct net_kernel net_kernel_scalar;
#if defined(__x86_64__)
extern const struct net_kernel net_kernel_avx2, net_kernel_avx512;
#endif

struct engine;
struct resources;
struct train;

/* ---- The engines, for tests and for the variant that uses OpenBLAS ---- */

extern const struct engine engine_omp, engine_omp_blas;

/* A GEMM implementation; members as in struct net_kernel. */
struct gemm_kernels {
    size_t (*tiles)(const struct gemm *gemm);
    void (*multiply)(const struct gemm *gemm, size_t first, size_t count);
};

/* Returns the GEMM of the kernel that open() will use. Tests wrap it to inject a fault. */
struct gemm_kernels omp_net_gemm_kernels(void);

/* Implements open() of an engine that uses the given GEMM. */
enum status omp_net_open(const struct train *train, const struct resources *resources,
                         struct gemm_kernels gemm, void **state);

#endif
