/* A network as a table of layers, from which shapes, parameters and memory follow; the same for all variants.
 *
 * Tensors are in C order, as PyTorch has them: a sample (channels, depth, height, width), the weights of a
 * convolution (out, in, depth, height, width), those of a linear layer (out, in). A picture has depth 1, so a
 * convolution in two dimensions is one in three with a kernel of depth 1. */
#ifndef FDSL_TRAIN_MODEL_H
#define FDSL_TRAIN_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define MODEL_LAYERS_MAX  40
#define MODEL_TENSORS_MAX (2 * MODEL_LAYERS_MAX)
#define MODEL_NAME_MAX    16
#define MODEL_ALIGNMENT   32 /* values: each tensor of parameters begins at a multiple, 128 bytes of floats */
#define MODEL_AXES        3  /* of a kernel: depth, height, width */

enum layer_kind {
    LAYER_CONV,
    LAYER_RELU,
    LAYER_POOL,
    LAYER_DROPOUT,
    LAYER_LINEAR,
    LAYER_ADD,  /* of two outputs: of the layer before it, and of an earlier one of the same shape */
    LAYER_MEAN, /* of each channel over all places */
    LAYER_KINDS
};

/* A line of a table. */
struct layer_spec {
    enum layer_kind kind;
    uint32_t channels;            /* that a convolution or linear layer makes; 0: as many as classes */
    uint32_t kernel[MODEL_AXES];  /* of a convolution (stride 1), or of max-pooling, whose stride it is too */
    uint32_t padding[MODEL_AXES]; /* of a convolution: zeros on either side */
    float rate;                   /* of dropout: a multiple of 1/256, as draw_kept() has it */
    uint32_t back; /* of an addition: the earlier layer is so many before it. Behind that one no ReLU or
                    * dropout may come at once: engines let these work in place */
};

struct shape {
    uint32_t channels, depth, height, width; /* after a linear layer: features, 1, 1, 1 */
};

struct layer {
    struct layer_spec spec;
    char name[MODEL_NAME_MAX]; /* "conv1", "relu1", "pool1", "dropout1", "fc1", ... as a PyTorch module's */
    uint32_t number;           /* its place in the table: the stream of its draws */
    bool is_added;             /* some addition behind it takes its output */
    struct shape in, out;
    size_t in_values, out_values;      /* of a sample */
    size_t weight, bias;               /* where these begin in an arena of parameters */
    size_t weight_values, bias_values; /* 0 where the kind has none */
    size_t output; /* where outputs would begin if those of all layers of a sample lay behind each other */
};

/* A tensor of parameters. */
struct model_tensor {
    char name[2 * MODEL_NAME_MAX]; /* "conv1.weight" */
    size_t first, values;          /* in the arena */
    uint64_t shape[5];             /* PyTorch's: a Conv2d has no axis of depth */
    uint32_t axes;
    uint32_t fan_in; /* inputs that an output of its layer sums */
    uint32_t stream; /* of its initial values */
};

struct model {
    const char *name, *summary;
    bool volumetric; /* its samples have a depth */
    struct shape input;
    uint32_t classes;
    struct layer layers[MODEL_LAYERS_MAX];
    uint32_t layer_count;
    struct model_tensor tensors[MODEL_TENSORS_MAX];
    uint32_t tensor_count;
    size_t parameters;                  /* how many there are */
    size_t arena_values;                /* with the gaps that align tensors; gaps are zeros and stay so */
    size_t input_values, output_values; /* of a sample; outputs of all layers together */
    double multiplications;             /* multiply-adds of a sample's way forward */
};

/* Products of a network that an implementation may leave out, so that no bound may count them. */
struct model_savings {
    bool backward;         /* all of backward: inference */
    bool pooled_gradients; /* backward through a convolution before a pooling: only gradients that are not
                              zero */
    bool convolutions;     /* a convolution may take fewer products than its definition (Winograd, FFT) */
};

/* What a model is made of. */
struct model_table {
    const char *name, *summary;
    bool volumetric;
    const struct layer_spec *layers;
    uint32_t layer_count;
};

FDSL_C_BEGIN

/* The values of a shape. */
static inline size_t shape_values(const struct shape *shape)
{
    return (size_t)shape->channels * shape->depth * shape->height * shape->width;
}

/* logreg, lenet, cnn, cnn3d, cnn-fdsl; ends with a name that is NULL. */
extern const struct model_table model_tables[];

/* Names for an option, in the order of the tables, NULL-terminated. */
extern const char *const model_names[];

/* Fills `*model` from a table, for samples of this shape and so many classes (at least 1). STATUS_USAGE where
 * the table's layers do not fit the shape, or their numbers are too large. Nothing is allocated. */
enum status model_build(const struct model_table *table, struct shape input, uint32_t classes,
                        struct model *model);

/* The least floating-point operations of a sample: those of the products of convolutions and linear layers,
 * forward and backward (gradients of weights and of inputs, except those of the samples), less these savings.
 * A multiply-add counts as two. Zeros that pad a convolution are no work. */
double model_flops(const struct model *model, const struct model_savings *savings);

/* Fills an arena with the initial parameters: weights and biases evenly from +-1 / sqrt(fan-in), as PyTorch's
 * Conv2d and Linear begin (kaiming_uniform_ with a = sqrt(5)), zeros in the gaps. A pure function of the
 * seed.
 */
void model_initialise(const struct model *model, uint64_t seed, float *parameters);

FDSL_C_END

#endif
