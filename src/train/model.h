/* A network as a table of layers. All variants use the shapes and the parameter layout that follow from the
 * table. An arena is one array of all parameters of a network, or of their gradients or moments.
 *
 * Tensors are in C order, as in PyTorch: a sample is (channels, depth, height, width), convolution weights
 * are (out, in, depth, height, width), linear weights are (out, in). An image has depth 1, so a 2-D
 * convolution is a 3-D one with kernel depth 1.
 *
 * A transformer is a network whose first layer is LAYER_PATCHES. The activations between its layers are
 * tokens: vectors of equal width, stored one after another. Their shape is (tokens, 1, 1, width). The names
 * of its layers and tensors are those of the library timm. */
#ifndef FDSL_TRAIN_MODEL_H
#define FDSL_TRAIN_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

#define MODEL_LAYERS_MAX    320
#define MODEL_TENSORS_MAX   320
#define MODEL_NAME_MAX      16 /* bytes of a model's name, with the terminating zero */
#define LAYER_NAME_MAX      24 /* bytes of a layer's name, with the terminating zero */
#define TENSOR_NAME_MAX     48 /* bytes of a tensor's name, with the terminating zero */
#define MODEL_ALIGNMENT     32 /* values: each parameter tensor starts at a multiple of 32 floats (128 bytes) */
#define LAYER_NORM_EPSILON  1e-6
#define BATCH_NORM_EPSILON  1e-5
#define BATCH_NORM_MOMENTUM 0.1 /* weight of a step's statistics in the running statistics */
#define MODEL_AXES          3   /* kernel axes: depth, height, width */

enum layer_kind {
    LAYER_CONV,
    LAYER_RELU,
    LAYER_POOL,
    LAYER_DROPOUT,
    LAYER_LINEAR,
    LAYER_ADD,        /* sum of the outputs of the previous layer and of an earlier layer of the same shape */
    LAYER_MEAN,       /* mean of each channel over all positions */
    LAYER_BATCH_NORM, /* normalises each channel over the samples and positions of a batch (Ioffe and Szegedy,
                         "Batch normalization", 2015); inference uses running statistics instead */

    /* Only in transformers, which otherwise have only LAYER_ADD and LAYER_LINEAR. */
    LAYER_PATCHES,      /* cuts an image into patches without overlap; a linear layer makes a token of each */
    LAYER_TOKENS,       /* puts a learned class token before the tokens, then adds learned positions */
    LAYER_NORM,         /* layer normalisation of each token */
    LAYER_TOKEN_LINEAR, /* a linear layer, applied to each token */
    LAYER_ATTENTION, /* softmax(q k^T / sqrt(d)) v for each head; a token of its input is (q, k, v), each of
                        which has the values of head 0, of head 1, ... */
    LAYER_GELU,      /* x times the normal distribution function of x, by erf() */
    LAYER_DROP_PATH, /* replaces a whole sample by zeros at random: stochastic depth */
    LAYER_SELECT,    /* keeps only the first token of each sample */
    LAYER_KINDS
};

/* One row of a model table. */
struct layer_spec {
    enum layer_kind kind;
    uint32_t channels; /* output channels of a convolution or linear layer, width of tokens; 0: number of
                          classes */
    uint32_t kernel[MODEL_AXES];  /* kernel of a convolution; window of max-pooling; size of a patch */
    uint32_t padding[MODEL_AXES]; /* on each side of the input: zeros before a convolution, nothing that can
                                     be the maximum before max-pooling */
    float rate;       /* dropout rate: a multiple of 1/256, see draw_kept(); or rate of LAYER_DROP_PATH */
    uint32_t back;    /* LAYER_ADD: the earlier layer is `back` layers before this one. No ReLU, dropout or
                         LAYER_DROP_PATH may directly follow the earlier layer, because engines run them in
                         place */
    uint32_t heads;   /* LAYER_ATTENTION */
    const char *name; /* NULL: named by kind and number */
    uint32_t stride;  /* convolution, max-pooling: along height and width. 0: 1 for a convolution, and the
                         window for max-pooling */
    bool no_bias;     /* convolution without bias */
    uint32_t skipped; /* the input is the output of the layer that is this number of layers before the
                         previous one; 0: of the previous layer */
};

struct layer {
    struct layer_spec spec;
    char name[LAYER_NAME_MAX]; /* "conv1", "relu1", "pool1", "dropout1", "fc1", ..., like names of PyTorch
                                * modules */
    uint32_t number;           /* index in the table; selects the random stream of a dropout layer. In a slice
                                * (model_slice()), the index in the whole network */
    bool is_added;             /* a later LAYER_ADD uses the output of this layer */
    bool is_branched;          /* a later layer has skipped to the output of this layer */
    struct shape in, out;
    size_t in_values, out_values; /* values per sample */
    /* Start offsets in a parameter arena. LAYER_TOKENS has the positions as weights, and the class token as
     * bias. */
    size_t weight, bias;
    size_t weight_values, bias_values; /* 0 if this kind of layer has none */
    size_t mean, variance;             /* LAYER_BATCH_NORM: start offsets of the running statistics */
    bool fp32;     /* --fp32-layers: engines of lower precision compute this layer in fp32 */
    size_t output; /* start offset of its output in an array with the outputs of all layers for one sample */
};

/* The distribution from which model_initialise() draws the values of a tensor. */
enum initial { INITIAL_UNIFORM, INITIAL_NORMAL, INITIAL_ZEROS, INITIAL_ONES };

/* A parameter tensor. */
struct model_tensor {
    char name[TENSOR_NAME_MAX]; /* "conv1.weight" */
    size_t first, values;       /* offset and size in the arena */
    uint64_t shape[5];          /* as in PyTorch: a Conv2d weight has no depth axis */
    uint32_t axes;
    uint32_t stream; /* random stream of its initial values */
    enum initial initial;
    float spread; /* the bound of INITIAL_UNIFORM, or the standard deviation of INITIAL_NORMAL */
    bool decays;  /* whether weight decay applies to it. In a transformer, it does not apply to norms, biases,
                     positions or the class token; in other networks, it applies to all tensors */
    /* For --layer-decay: 0 before the blocks, i + 1 in block i, and one more than the last block in the head,
     * as in timm. The norm after the last block counts as a part of that block. */
    uint32_t depth;
    /* A running statistic of LAYER_BATCH_NORM. Its "gradient" is the statistic of the step's samples, so that
     * an exchange averages it over the ranks; the update moves the tensor towards it (optimizer_step()). */
    bool is_statistic;
    /* Values of the tensor whose gradients would be zero without rounding errors: biases of keys. They add
     * the same number to all scores of a query, and softmax cancels it. */
    size_t idle_first, idle_values;
    /* Weights of convolutions and linear layers between the first and the last layer with weights. Muon
     * updates them as matrices of shape[0] rows. */
    bool hidden;
    bool head; /* belongs to the last layer */
};

struct model {
    const char *name, *summary;
    bool volumetric; /* samples have a depth axis */
    bool transformer;
    bool normalises; /* has LAYER_BATCH_NORM: the samples of a batch are not independent */
    struct shape input;
    uint32_t classes;
    struct layer layers[MODEL_LAYERS_MAX];
    uint32_t layer_count;
    struct model_tensor tensors[MODEL_TENSORS_MAX];
    uint32_t tensor_count;
    uint32_t depth;        /* model_tensor.depth of the last tensor */
    size_t parameters;     /* number of parameters, without running statistics */
    size_t arena_values;   /* size of an arena, alignment gaps included; the gaps are always zero */
    size_t trained_values; /* size of the first part of an arena, which has all tensors but the running
                              statistics */
    size_t input_values, output_values; /* per sample; output_values sums the outputs of all layers */
    double multiplications;             /* multiply-adds of one sample's forward pass */
    /* In a slice: its first layer in the whole network, and the offset of its arena in the whole network's
     * arena. Otherwise 0. */
    uint32_t first_layer;
    size_t arena_first;
};

/* Multiplications that an implementation may omit. A lower bound on the work must not count them. */
struct model_savings {
    bool backward;         /* the whole backward pass, for inference */
    bool pooled_gradients; /* products with the zero gradients that a convolution before pooling receives */
    bool convolutions; /* a convolution may use fewer multiplications than its definition (Winograd, FFT) */
};

/* A model before its shapes are known. */
struct model_table {
    const char *name, *summary;
    bool volumetric;
    const struct layer_spec *layers;
    uint32_t layer_count;
};

FDSL_C_BEGIN

/* Returns the number of tokens to which the layer applies its weights separately; 1 if it applies them to the
 * whole sample. */
static inline uint32_t layer_rows(const struct layer *layer)
{
    bool by_token = layer->spec.kind == LAYER_PATCHES || layer->spec.kind == LAYER_TOKEN_LINEAR;
    return by_token ? layer->out.channels : 1;
}

/* logreg, lenet, cnn, cnn3d, cnn-fdsl, cnn-deep, mlp, vit-micro, vit-tiny, vit-small, vit-base, vit-large,
 * resnet-micro, resnet50; the last entry has a NULL name. */
extern const struct model_table model_tables[];

/* Returns the entry with this name; NULL if there is none. */
const struct model_table *model_find(const char *name);

/* The values of --model, in the order of model_tables, NULL-terminated. */
extern const char *const model_names[];

/* Fills `*model` from a table, for samples of shape `input` and `classes` >= 1 classes. STATUS_USAGE if the
 * layers do not fit the shape or a layer is too large. Allocates nothing. */
enum status model_build(const struct model_table *table, struct shape input, uint32_t classes,
                        struct model *model);

/* For engines that cannot train transformers: returns STATUS_USAGE if the network is one. The reason calls
 * the engine "it". */
enum status model_refuse_transformer(const struct model *model);

/* For engines without LAYER_BATCH_NORM: returns STATUS_USAGE if the network has such layers. The reason calls
 * the engine "it". */
enum status model_refuse_batch_norm(const struct model *model);

/* Returns whether the network has LAYER_BATCH_NORM. */
bool model_has_batch_norm(const struct model_table *table);

/* Sets the weights of the last LAYER_BATCH_NORM of each residual block to zero, so that the block begins as
 * its shortcut (Goyal et al., "Accurate, large minibatch SGD", 2017; torchvision's zero_init_residual). */
void model_zero_last_gamma(const struct model *model, float *parameters);

/* Returns the stride of a convolution or of max-pooling along an axis (0: depth, 1: height, 2: width). */
uint32_t layer_stride(const struct layer *layer, int axis);

/* Sets the rates of stochastic depth: they rise linearly from 0 in the first block to `rate` in the last.
 * STATUS_USAGE if the network has no blocks with stochastic depth. */
enum status model_set_drop_path(struct model *model, double rate);

/* Sets the rate of all dropout layers to the multiple of 1/256 that is nearest to `rate`. STATUS_USAGE if the
 * network has none. */
enum status model_set_dropout(struct model *model, double rate);

/* Returns whether the network may be cut before this layer. A slice begins with a convolution, a linear layer
 * or the first layer of a transformer's block other than the first. A LAYER_ADD may use layers of its slice
 * and the input of its slice, but no earlier layer. A network with LAYER_BATCH_NORM may not be cut, because a
 * stage never has a whole batch. */
bool model_may_cut(const struct model *model, uint32_t layer);

/* Makes `slice` a network of the layers first .. end - 1 of `whole`, between two cuts. Each of its arenas is
 * the part of the whole network's arena that begins at arena_first. A slice that does not end with the last
 * layer outputs the activations of its last layer instead of logits. */
void model_slice(const struct model *whole, uint32_t first, uint32_t end, struct model *slice);

/* Returns the minimum number of floating-point operations per sample. Counts the multiply-adds of
 * convolutions, linear layers and attention in the forward and backward pass. A multiply-add counts as two
 * operations. Gradients of the samples, the products in `savings` and multiplications by padding zeros do not
 * count. */
double model_flops(const struct model *model, const struct model_savings *savings);

/* Fills an arena with the initial parameters. Weights and biases are uniform in +-1 / sqrt(fan-in), like the
 * defaults of PyTorch's Conv2d and Linear (kaiming_uniform_ with a = sqrt(5)). The fan-in is the number of
 * inputs that are summed for one output. Gaps are zero. The result is a pure function of the model and the
 * seed.
 *
 * A transformer is initialised as in timm (VisionTransformer.init_weights). Weights of linear layers and
 * positions are normal with a standard deviation of 0.02, and the class token is normal with 1e-6. Biases are
 * 0; norms have weight 1 and bias 0; LAYER_PATCHES is initialised like a Conv2d. (timm truncates the normal
 * distribution at +-2, which is 100 standard deviations.)
 *
 * A network with LAYER_BATCH_NORM is initialised as torchvision's resnet50. Weights of convolutions are
 * normal with a standard deviation of sqrt(2 / (out channels * kernel values)). Norms have weight 1 and bias
 * 0, with running mean 0 and running variance 1. The linear layer is initialised like PyTorch's Linear. */
void model_initialise(const struct model *model, uint64_t seed, float *parameters);

/* Multiplies the parameters of the last layer by `scale`, then sets its biases to `bias`. Both may be NaN,
 * and then have no effect. */
void model_initialise_head(const struct model *model, double scale, double bias, float *parameters);

FDSL_C_END

#endif
