/* Compares the engines on a GPU with the oracle, the reference in double precision, for every kind of layer
 * and every network, with odd sizes. Compares the gradients of the first step, the losses and parameter
 * updates of up to 50 steps, and the logits of the test set. Every five steps, the engine continues from the
 * oracle's state. Also checks that the same seed gives the same bits, even if a second engine runs half of
 * the steps. Each planted fault must exceed one of the error bounds. With `resnet`, also compares the first
 * step layer by layer: the oracle takes the engine's outputs of each layer (struct oracle_given). Large
 * batches are compared with the same engine in parts (`batches`). make check-gpu runs this program.
 *
 *     gpu_train [--engine cuda|tf32|bf16|amp|vit|vit-amp|resnet|resnet-amp] [--short] [--seed N] [NAME ...]
 *
 * The default engine is cuda. NAME is a network to test; the NAME "faults" selects the planted faults,
 * "recipe" the cases with clipping, averages and parts, "masked" those with masked samples, "multi-hot" those
 * with multi-hot labels, and "fp32" those with layers in fp32 (default: all). --short: small batches, two
 * steps, no faults. --seed N: the seed of parameters, order, dropout and shifts (default: 7).
 *
 * Prints one line per case. Exit status 2 for invalid arguments, 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include <cuda_bf16.h>

#include "core/philox.h"
#include "machine/device.h"
#include "train/engines.cuh"

/* ---- Networks ---- */

#define LAYERS(name, ...) static const struct layer_spec name##_layers[] = {__VA_ARGS__}
#define CONV(out, t, y, x, pad_t, pad_y, pad_x)                                                       \
    {                                                                                                 \
        .kind = LAYER_CONV, .channels = (out), .kernel = {t, y, x}, .padding = {pad_t, pad_y, pad_x}, \
        .rate = 0                                                                                     \
    }
#define POOL(t, y, x)                                                                    \
    {                                                                                    \
        .kind = LAYER_POOL, .channels = 0, .kernel = {t, y, x}, .padding = {}, .rate = 0 \
    }
#define RELU                                                                      \
    {                                                                             \
        .kind = LAYER_RELU, .channels = 0, .kernel = {}, .padding = {}, .rate = 0 \
    }
#define DROPOUT(share)                                                                     \
    {                                                                                      \
        .kind = LAYER_DROPOUT, .channels = 0, .kernel = {}, .padding = {}, .rate = (share) \
    }
#define LINEAR(out)                                                                     \
    {                                                                                   \
        .kind = LAYER_LINEAR, .channels = (out), .kernel = {}, .padding = {}, .rate = 0 \
    }
#define ADD(layers)                                                                                \
    {                                                                                              \
        .kind = LAYER_ADD, .channels = 0, .kernel = {}, .padding = {}, .rate = 0, .back = (layers) \
    }
#define MEAN                                                                      \
    {                                                                             \
        .kind = LAYER_MEAN, .channels = 0, .kernel = {}, .padding = {}, .rate = 0 \
    }

LAYERS(linear, LINEAR(67), LINEAR(0));
LAYERS(relu, LINEAR(65), RELU, LINEAR(33), RELU, DROPOUT(0.5f), LINEAR(0));
LAYERS(conv, CONV(3, 1, 3, 2, 0, 1, 0), CONV(37, 1, 2, 3, 0, 0, 2), CONV(2, 1, 1, 1, 0, 1, 0), LINEAR(0));
LAYERS(conv_deep, CONV(5, 3, 3, 3, 1, 1, 1), RELU, CONV(70, 2, 1, 2, 1, 0, 0), LINEAR(0));
LAYERS(pool, CONV(3, 1, 3, 3, 0, 1, 1), POOL(1, 2, 3), RELU, LINEAR(0));
LAYERS(pool_deep, CONV(4, 1, 1, 1, 0, 0, 0), RELU, POOL(2, 3, 2), LINEAR(0));
LAYERS(dropout, LINEAR(41), DROPOUT(0.25f), CONV(3, 1, 1, 1, 0, 0, 0), DROPOUT(0.5f), LINEAR(0));

LAYERS(mean, CONV(37, 1, 3, 3, 0, 1, 1), MEAN, RELU, LINEAR(0));
/* Adds outputs of a convolution, a ReLU, a pooling and an addition; one output is added twice. */
LAYERS(add, CONV(5, 1, 3, 3, 0, 1, 1), RELU, CONV(5, 1, 3, 3, 0, 1, 1), DROPOUT(0.25f), ADD(3),
       CONV(5, 1, 3, 3, 0, 1, 1), ADD(2), ADD(3), ADD(3), RELU, POOL(1, 2, 1), CONV(5, 1, 3, 3, 0, 1, 1),
       ADD(2), LINEAR(0));
/* For inputs with a height of 7. The pooling drops the last row of its input. The next convolution restores
 * the height by padding, and the pooling's input is added to the output of this convolution. */
LAYERS(add_pool, CONV(3, 1, 3, 3, 0, 1, 1), RELU, POOL(1, 2, 1), CONV(3, 1, 1, 1, 0, 2, 0), ADD(3),
       LINEAR(0));
LAYERS(add_rows, LINEAR(67), LINEAR(67), RELU, ADD(3), LINEAR(0));
/* In 16 bits, all outputs but the last are channels last. The second convolution is in packed_conv.cu. */
LAYERS(large, CONV(8, 1, 3, 3, 0, 1, 1), RELU, CONV(8, 1, 3, 1, 0, 1, 0), RELU, CONV(3, 1, 1, 2, 0, 0, 0),
       LINEAR(0));

/* Transformers, with NUMBER blocks of one width. */
#define TOKEN_LINEAR(out)                             \
    {                                                 \
        .kind = LAYER_TOKEN_LINEAR, .channels = (out) \
    }
#define NORM               \
    {                      \
        .kind = LAYER_NORM \
    }
#define ATTENTION(count)                          \
    {                                             \
        .kind = LAYER_ATTENTION, .heads = (count) \
    }
#define DROP_PATH(share)                         \
    {                                            \
        .kind = LAYER_DROP_PATH, .rate = (share) \
    }
#define PATCHES(out, size)                                                    \
    {                                                                         \
        .kind = LAYER_PATCHES, .channels = (out), .kernel = { 1, size, size } \
    }
#define GELU               \
    {                      \
        .kind = LAYER_GELU \
    }
#define TOKENS               \
    {                        \
        .kind = LAYER_TOKENS \
    }
#define SELECT               \
    {                        \
        .kind = LAYER_SELECT \
    }
#define VIT_BLOCK(width, heads, drop)                                                                      \
    NORM, TOKEN_LINEAR(3 * (width)), ATTENTION(heads), TOKEN_LINEAR(width), DROP_PATH(drop), ADD(6), NORM, \
        TOKEN_LINEAR(4 * (width)), GELU, TOKEN_LINEAR(width), DROP_PATH(drop), ADD(6)
#define VIT(width, heads, size, ...) PATCHES(width, size), TOKENS, __VA_ARGS__, SELECT, NORM, LINEAR(0)

/* Residual networks with numbers of channels that no tile divides. */
#define NORMED(out, size, step, back)        \
    {.kind = LAYER_CONV,                     \
     .channels = (out),                      \
     .kernel = {1, size, size},              \
     .padding = {0, (size) / 2, (size) / 2}, \
     .stride = (step),                       \
     .no_bias = true,                        \
     .skipped = (back)},                     \
    {                                        \
        .kind = LAYER_BATCH_NORM             \
    }
#define RESIDUAL_BEGIN(width)                                                      \
    NORMED(width, 7, 2, 0), RELU,                                                  \
    {                                                                              \
        .kind = LAYER_POOL, .kernel = {1, 3, 3}, .padding = {0, 1, 1}, .stride = 2 \
    }
#define RESIDUAL_FIRST(width, out, step)                                                 \
    NORMED(width, 1, 1, 0), RELU, NORMED(width, 3, step, 0), RELU, NORMED(out, 1, 1, 0), \
        NORMED(out, 1, step, 8), ADD(3), RELU
#define RESIDUAL(width, out) \
    NORMED(width, 1, 1, 0), RELU, NORMED(width, 3, 1, 0), RELU, NORMED(out, 1, 1, 0), ADD(9), RELU
LAYERS(residual, RESIDUAL_BEGIN(24), RESIDUAL_FIRST(40, 136, 1), RESIDUAL(72, 136),
       RESIDUAL_FIRST(72, 264, 2), RESIDUAL(8, 264), MEAN, LINEAR(0));

LAYERS(vit64, VIT(64, 1, 4, VIT_BLOCK(64, 1, 0.25f)));
LAYERS(vit128, VIT(128, 4, 8, VIT_BLOCK(128, 4, 0), VIT_BLOCK(128, 4, 0.5f)));
LAYERS(vit192, VIT(192, 3, 16, VIT_BLOCK(192, 3, 0), VIT_BLOCK(192, 3, 0)));
LAYERS(vit200, VIT(400, 25, 16, VIT_BLOCK(400, 25, 0.1f)));
LAYERS(vit256, VIT(256, 4, 8, VIT_BLOCK(256, 4, 0.25f)));
LAYERS(vit384, VIT(384, 6, 16, VIT_BLOCK(384, 6, 0)));
LAYERS(vit768, VIT(768, 12, 16, VIT_BLOCK(768, 12, 0)));
LAYERS(vit1024, VIT(1024, 16, 8, VIT_BLOCK(1024, 16, 0.25f)));

#define TABLE(name, deep)                                       \
    {                                                           \
#name, "", deep, name##_layers, COUNT_OF(name##_layers) \
    }
static const struct model_table tables[] = {
    TABLE(linear, false), TABLE(relu, false),     TABLE(conv, false),     TABLE(conv_deep, true),
    TABLE(pool, false),   TABLE(pool_deep, true), TABLE(dropout, false),  TABLE(mean, false),
    TABLE(add, false),    TABLE(add_pool, false), TABLE(add_rows, false), TABLE(vit64, false),
    TABLE(vit128, false), TABLE(vit192, false),   TABLE(vit200, false),   TABLE(vit256, false),
    TABLE(vit384, false), TABLE(vit768, false),   TABLE(vit1024, false),  TABLE(residual, false),
    TABLE(large, false),
};

static const struct model_table *find_table(const char *name)
{
    for (const struct model_table *table = model_tables; table->name; table++)
        if (strcmp(table->name, name) == 0)
            return table;
    for (const struct model_table &table : tables)
        if (strcmp(table.name, name) == 0)
            return &table;
    return NULL;
}

/* ---- Cases ---- */

struct trial {
    const char *table;
    struct shape shape;
    uint32_t classes, batch, count, steps; /* `count`: training samples */
    enum optimizer_kind optimizer;
    enum dtype type;
    float smoothing;
    struct augment augment;
    bool overflows; /* also tests overflow, if the engine scales the loss */
    enum fault fault;
    struct mixing mixing;
    enum loss_kind loss;
    uint32_t parts;  /* parts of a step; if not 0, the optimizer also clips, averages and decays by layer */
    uint32_t masked; /* one in `masked` training samples is masked; 0: none */
    bool multi_hot;
    uint32_t fp32;   /* one in `fp32` of the layers that the engine can compute in fp32 is; 0: none */
    uint32_t pieces; /* if not 0, the reference is the same engine, with this many parts per step */
};

static const struct shape small = {3, 1, 7, 5}, gray = {1, 1, 13, 11}, volume = {2, 4, 5, 3},
                          picture = {1, 1, 28, 28}, colour = {3, 1, 17, 15}, clip = {3, 5, 9, 8},
                          row = {1, 1, 1, 37};
static const struct augment still = {0, false}, moved = {2, true};
static const struct mixing up = {0.8, 0}, cut = {0, 1}, both = {0.8, 1};
static const enum loss_kind binary = LOSS_BINARY;

static const char *const optimizers[] = {OPTIMIZERS(OPTIMIZER_NAME)};

#define SHORT_BATCH 64
#define SHORT_STEPS 2

static const struct trial trials[] = {
    {"linear", small, 4, 1, 3, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"linear", gray, 1000, 257, 600, 50, OPTIMIZER_ADAM, DTYPE_U8, 0.1f, still},
    {"relu", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F16, 0, moved, true},
    {"relu", gray, 1, 3, 5, 10, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved},
    {"conv", small, 4, 1, 1, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"conv", gray, 3, 7, 17, 50, OPTIMIZER_ADAMW, DTYPE_U8, 0.1f, moved},
    {"conv", small, 5, 257, 600, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"conv_deep", volume, 3, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F16, 0, moved},
    {"conv_deep", clip, 2, 1, 3, 20, OPTIMIZER_ADAM, DTYPE_U8, 0, still},
    {"pool", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"pool", gray, 2, 257, 300, 10, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"pool_deep", volume, 2, 13, 30, 50, OPTIMIZER_SGD, DTYPE_F16, 0, still},
    {"dropout", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"logreg", picture, 10, 257, 600, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"logreg", colour, 1, 1, 3, 50, OPTIMIZER_ADAM, DTYPE_U8, 0, still},
    {"logreg", row, 5, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F32, 0, still},
    {"mlp", row, 5, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F32, 0.1f, still},
    {"mlp", {1, 1, 1, 768}, 10, 257, 600, 3, OPTIMIZER_ADAM, DTYPE_BF16, 0, still},
    {"mlp", {1, 1, 1, 1}, 2, 1, 3, 10, OPTIMIZER_SGD, DTYPE_F16, 0, still},
    {"lenet", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"lenet", colour, 3, 1, 3, 50, OPTIMIZER_ADAM, DTYPE_U8, 0.1f, still},
    {"lenet", picture, 10, 257, 600, 3, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"cnn", colour, 3, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 1, 3, 50, OPTIMIZER_ADAMW, DTYPE_U8, 0, still},
    {"cnn", picture, 10, 65, 100, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"cnn3d", clip, 2, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F16, 0, moved},
    {"cnn3d", {1, 4, 8, 8}, 1, 1, 3, 10, OPTIMIZER_ADAM, DTYPE_F16, 0, still},
    {"mean", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"mean", picture, 3, 257, 300, 5, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"add", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"add", gray, 3, 257, 300, 10, OPTIMIZER_ADAMW, DTYPE_U8, 0.1f, moved},
    {"add_pool", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"add_rows", small, 4, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F16, 0, moved},
    {"cnn-fdsl", {1, 1, 8, 8}, 1000, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved},
    {"cnn-fdsl", {3, 1, 17, 15}, 10, 1, 3, 10, OPTIMIZER_ADAM, DTYPE_U8, 0, still},
    {"cnn-fdsl", picture, 10, 3, 50, 20, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"cnn-deep", {1, 1, 8, 8}, 10, 1, 7, 10, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"cnn-fdsl", {1, 1, 64, 65}, 100, 1, 9, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    /* Mixed samples: batches of one, of odd size, and short ones. Binary cross-entropy. */
    {"linear", small, 4, 1, 3, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still, false, FAULT_NONE, up},
    {"linear", gray, 99, 257, 600, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, {}, binary},
    {"conv", gray, 3, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, both},
    {"conv", small, 5, 257, 600, 5, OPTIMIZER_SGD, DTYPE_F16, 0, moved, false, FAULT_NONE, cut, binary},
    {"conv_deep", volume, 3, 7, 17, 50, OPTIMIZER_SGD, DTYPE_F16, 0, moved, false, FAULT_NONE, cut},
    {"lenet", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, both, binary},
    {"vit-micro", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, both},
    {"vit-micro", picture, 10, 65, 99, 9, OPTIMIZER_ADAMW, DTYPE_U8, 0, still, false, FAULT_NONE, cut,
     binary},
    {"vit192", {3, 1, 32, 48}, 9, 13, 30, 20, OPTIMIZER_SGD, DTYPE_F16, 0, moved, false, FAULT_NONE, up},
    /* Transformers. Some have one token more or fewer than a tile of 64, and one has the 197 tokens of
     * vit-tiny. */
    {"vit-micro", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, moved, true},
    {"vit-micro", picture, 10, 65, 100, 10, OPTIMIZER_ADAMW, DTYPE_U8, 0.1f, moved},
    {"vit64", {1, 1, 8, 4}, 1, 1, 3, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 248}, 3, 3, 7, 10, OPTIMIZER_SGD, DTYPE_F16, 0, still},
    {"vit64", {2, 1, 4, 252}, 3, 3, 7, 10, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit64", {2, 1, 4, 256}, 1000, 3, 7, 10, OPTIMIZER_ADAM, DTYPE_U8, 0.1f, moved},
    {"vit64", {1, 1, 80, 100}, 17, 1, 3, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit128", {3, 1, 16, 24}, 5, 257, 300, 5, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved},
    {"vit192", {3, 1, 32, 48}, 10, 13, 30, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit192", {3, 1, 224, 224}, 1000, 1, 3, 2, OPTIMIZER_ADAMW, DTYPE_U8, 0, still},
    /* Attention's kernels for compute capability 9.0 need 129 to 200 tokens, and process those from 192 on
     * apart. */
    {"vit64", {2, 1, 4, 512}, 3, 5, 7, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 764}, 3, 5, 7, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 796}, 3, 5, 7, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 800}, 3, 5, 7, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 252}, 3, 300, 500, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit200", {3, 1, 32, 32}, 3, 5, 9, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    /* Wide layers: 273, 4,515, 150 and 68 rows; with 4,515, a block has several tiles of 128 rows. */
    {"vit256", {3, 1, 32, 40}, 5, 13, 26, 2, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit256", {3, 1, 32, 40}, 5, 215, 215, 2, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit384", {3, 1, 48, 48}, 7, 15, 30, 2, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit768", {3, 1, 16, 48}, 7, 17, 34, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit1024", {3, 1, 24, 40}, 5, 7, 17, 3, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit-tiny", {3, 1, 32, 16}, 7, 3, 7, 5, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved},
    {"vit-base", {3, 1, 16, 16}, 7, 1, 3, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit-large", {3, 1, 16, 16}, 7, 1, 3, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    /* Residual networks with batch normalisation. */
    {"resnet-micro", {3, 1, 32, 32}, 10, 16, 40, 10, OPTIMIZER_SGD, DTYPE_U8, 0, moved, true},
    {"resnet-micro", picture, 10, 33, 99, 10, OPTIMIZER_SGD, DTYPE_U8, 0.1f, still},
    {"resnet-micro", {4, 1, 31, 45}, 7, 17, 34, 10, OPTIMIZER_SGD, DTYPE_F16, 0, moved},
    {"resnet-micro",
     {3, 1, 64, 64},
     10,
     257,
     514,
     2,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0,
     still,
     false,
     FAULT_NONE,
     both},
    {"residual", {3, 1, 40, 24}, 10, 17, 51, 5, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
};

/* Batches for which the oracle takes too long. The reference is the same engine, which computes each step in
 * PIECES parts. */
#define PIECES 13
static const struct trial batches[] = {
    /* Convolutions in 16 bits are launched in two parts: grids have at most 65,535 blocks along y. */
    {"large", picture, 10, 12001, 12001, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    /* Blocks of attention process several samples (one in the reference), with 192 and 200 tokens; blocks of
     * GELU several parts. */
    {"vit64", {2, 1, 4, 764}, 3, 601, 700, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 796}, 3, 601, 700, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit192", {3, 1, 32, 48}, 10, 1301, 1400, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    /* More than VIT_PARTS tiles along the rows. */
    {"vit384", {3, 1, 48, 48}, 10, 6801, 7000, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
};

#define FP32 "fp32" /* the argument that selects the cases below */

/* Each case runs with all layers in fp32 that the engine can compute so, and with every other one. */
static const struct trial wide[] = {
    {"conv", gray, 3, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"lenet", picture, 10, 65, 100, 10, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved},
    {"cnn", colour, 3, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved},
    {"cnn-fdsl", {1, 1, 8, 8}, 1000, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved},
    {"add", small, 4, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit192", {3, 1, 32, 48}, 9, 13, 30, 10, OPTIMIZER_SGD, DTYPE_F16, 0, still},
    {"resnet-micro", picture, 10, 33, 99, 10, OPTIMIZER_SGD, DTYPE_U8, 0, still},
};

#define RECIPE "recipe" /* the argument that selects the cases below */

/* Clipping, the moving average, layer decay, and steps in parts, also of mixed samples. The last step of an
 * epoch is short. */
static const struct trial recipes[] = {
    {"lenet", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 3},
    {"lenet", picture, 10, 65, 100, 20, OPTIMIZER_ADAMW, DTYPE_U8, 0.1f, still, false, FAULT_NONE, {}, {}, 7},
    {"cnn", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 1},
    {"cnn-fdsl", picture, 10, 5, 13, 10, OPTIMIZER_SGD, DTYPE_U8, 0, still, false, FAULT_NONE, {}, {}, 5},
    {"lenet", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, both, {}, 3},
    {"lenet", picture, 10, 65, 99, 20, OPTIMIZER_SGD, DTYPE_F16, 0, moved, false, FAULT_NONE, cut, binary, 7},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 3},
    {"vit-micro",
     picture,
     10,
     65,
     100,
     10,
     OPTIMIZER_ADAMW,
     DTYPE_U8,
     0.1f,
     still,
     false,
     FAULT_NONE,
     {},
     {},
     7},
    {"vit64", {2, 1, 4, 252}, 3, 3, 7, 10, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 4},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, both, {}, 3},
    {"vit-micro", picture, 10, 65, 99, 9, OPTIMIZER_SGD, DTYPE_U8, 0, still, false, FAULT_NONE, up, {}, 7},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 1},
    /* Rules that need whole tensors: matrices with more rows than columns, with fewer, and square ones. */
    {"lenet", picture, 10, 7, 17, 20, OPTIMIZER_LAMB, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 3},
    {"cnn-fdsl", picture, 10, 5, 13, 10, OPTIMIZER_LAMB, DTYPE_U8, 0, still, false, FAULT_NONE, {}, {}, 1},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_LAMB, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 3},
    {"lenet", colour, 3, 1, 3, 20, OPTIMIZER_MUON, DTYPE_U8, 0.1f, still, false, FAULT_NONE, {}, {}, 1},
    {"lenet", picture, 10, 65, 100, 20, OPTIMIZER_MUON, DTYPE_U8, 0, moved, false, FAULT_NONE, {}, {}, 3},
    {"cnn3d", clip, 2, 7, 17, 10, OPTIMIZER_MUON, DTYPE_F16, 0, moved, false, FAULT_NONE, {}, {}, 1},
    {"cnn-fdsl", picture, 10, 5, 13, 10, OPTIMIZER_MUON, DTYPE_U8, 0, still, false, FAULT_NONE, {}, {}, 5},
    {"mlp", row, 5, 7, 17, 20, OPTIMIZER_MUON, DTYPE_F32, 0, still, false, FAULT_NONE, {}, {}, 1},
    {"resnet-micro",
     picture,
     10,
     32,
     64,
     10,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0,
     moved,
     false,
     FAULT_NONE,
     both,
     {},
     1},
};

#define MASKED "masked" /* the argument that selects the cases below */

/* Masked samples, whose weight is 0, also in mixtures. Each case also runs with a planted fault. */
static const struct trial masks[] = {
    {"linear", small, 4, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, {}, {}, 0, 3},
    {"linear",
     gray,
     99,
     257,
     600,
     10,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0,
     still,
     false,
     FAULT_NONE,
     {},
     binary,
     0,
     2},
    {"lenet",
     picture,
     10,
     7,
     17,
     20,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0.1f,
     moved,
     false,
     FAULT_NONE,
     both,
     {},
     0,
     3},
    {"lenet", picture, 10, 65, 99, 9, OPTIMIZER_SGD, DTYPE_U8, 0.1f, still, false, FAULT_NONE, up, binary, 7,
     4},
    {"vit-micro",
     picture,
     10,
     7,
     17,
     20,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0,
     moved,
     false,
     FAULT_NONE,
     both,
     {},
     0,
     3},
    {"vit-micro", picture, 10, 65, 99, 9, OPTIMIZER_SGD, DTYPE_U8, 0.1f, still, false, FAULT_NONE, cut,
     binary, 3, 2},
};

#define MULTI_HOT "multi-hot" /* the argument that selects the cases below */

/* Multi-hot labels: one class, 32 of them, one more, and 1000; mixed, masked and in parts. Each case also
 * runs with the labels of other samples. */
static const struct trial multi_hot[] = {
    {"linear",
     small,
     1,
     3,
     7,
     20,
     OPTIMIZER_SGD,
     DTYPE_U8,
     0,
     still,
     false,
     FAULT_NONE,
     {},
     binary,
     0,
     0,
     true},
    {"linear", gray, 1000, 257, 600, 10, OPTIMIZER_SGD, DTYPE_U8, 0.1f, moved, false, FAULT_NONE, both,
     binary, 0, 3, true},
    {"conv", gray, 33, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, cut, binary, 0, 2,
     true},
    {"lenet", picture, 32, 65, 99, 9, OPTIMIZER_SGD, DTYPE_U8, 0.1f, still, false, FAULT_NONE, up, binary, 7,
     0, true},
    {"vit-micro", picture, 33, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved, false, FAULT_NONE, both, binary,
     0, 3, true},
    {"vit-micro",
     picture,
     1000,
     65,
     99,
     9,
     OPTIMIZER_ADAMW,
     DTYPE_U8,
     0.1f,
     still,
     false,
     FAULT_NONE,
     {},
     binary,
     3,
     0,
     true},
};

#define FAULTS "faults" /* the argument that selects the cases below */

/* Each case runs without a fault and with each fault that the network can have. */
static const struct trial planted[] = {
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_ADAMW, DTYPE_U8, 0.3f, moved},
    {"resnet-micro", picture, 10, 32, 64, 10, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"lenet", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"lenet", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_ADAM, DTYPE_U8, 0.3f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_ADAM, DTYPE_U8, 0.3f, moved},
};

/* ---- Engines ---- */

/* An engine and the upper bounds of its relative errors. An error is the norm of a difference, divided by the
 * norm of the correct values. `gradients` is for the gradients of the first step, and `logits` for the logits
 * of the test set. `chosen_gradients` replaces `gradients` for networks with ReLU or max-pooling. In these
 * layers, rounding may select another element, so gradients differ more. Losses and parameter updates have
 * the bounds of --verify. docs/notes/engines.md gives the reasons. */
struct contender {
    const struct engine *engine;
    double gradients, chosen_gradients, logits;
};
static const struct contender contenders[] = {
    {&engine_cuda, 1e-4, 1e-4, 1e-4},        {&engine_tf32, 1.5e-2, 0.2, 1.5e-2},
    {&engine_bf16, 5e-2, 0.4, 4e-2},         {&engine_amp, 1.5e-2, 0.2, 1.5e-2},
#ifdef HAVE_CUBLAS
    {&engine_vit, 5e-2, 5e-2, 4e-2},         {&engine_resnet, 5e-2, 0.8, 5e-2},
    {&engine_vit_amp, 1.5e-2, 1.5e-2, 1e-2}, {&engine_resnet_amp, 1.5e-2, 0.4, 1.5e-2},
#endif
};
static const struct contender *contender = &contenders[0];

/* The bound of gradients of trials with pieces: only the order of sums differs. A missing sample changes them
 * by more. Logits have the bounds above, because `vit` computes few rows with other kernels. */
#define PIECES_BOUND 1e-3

/* ---- Data and engines ---- */

static uint64_t seed = 7;
#define HALF_OF_ONE  0x3c00u
#define BF16_OF_ONE  0x3f80u
#define FLOAT_OF_ONE 0x3f800000u

/* Fills the set with random labels and random values: bytes, or numbers of magnitude 1 to 1.999 in another
 * type. */
static void fill_set(const struct data *data, uint32_t stream, uint32_t count, struct data_set *set)
{
    set->count = count;
    set->values = must_have(malloc(count * data->sample_bytes));
    set->labels = static_cast<uint32_t *>(must_have(malloc(count * sizeof *set->labels)));
    for (size_t i = 0; i < count * data->sample_values; i++) {
        uint32_t word = philox(philox_key(1), (uint32_t)i, stream, 0, 0).word[0];
        if (data->type == DTYPE_U8)
            static_cast<uint8_t *>(set->values)[i] = (uint8_t)word;
        else if (data->type == DTYPE_F32)
            static_cast<float *>(set->values)[i] = float_from_bits((word & 0x807fffffu) | FLOAT_OF_ONE);
        else if (data->type == DTYPE_F16)
            static_cast<uint16_t *>(set->values)[i] = (uint16_t)((word & 0x83ffu) | HALF_OF_ONE);
        else
            static_cast<uint16_t *>(set->values)[i] = (uint16_t)((word & 0x807fu) | BF16_OF_ONE);
    }
    for (uint32_t i = 0; i < count; i++)
        set->labels[i] = philox_below(philox(philox_key(2), i, stream, 0, 0).word[0], data->classes);
    if (!data->multi_hot)
        return;
    const uint32_t words = multi_hot_words(data->classes);
    set->multi_hot = static_cast<uint32_t *>(must_have(calloc((size_t)count * words, sizeof(uint32_t))));
    for (uint32_t i = 0; i < count; i++) {
        set->labels[i] = i;
        for (uint32_t k = 0; k < data->classes; k++)
            set->multi_hot[(size_t)i * words + k / 32] |=
                (uint32_t)(philox(philox_key(3), i, stream, k, 0).word[0] % 3 == 0) << k % 32;
    }
}

static void data_random(const struct trial *trial, struct data *data)
{
    *data = {};
    data->shape = trial->shape;
    data->type = trial->type;
    data->classes = trial->classes;
    data->multi_hot = trial->multi_hot;
    data->sample_values = shape_values(&trial->shape);
    data->sample_bytes = data->sample_values * dtype_bytes(trial->type);
    fill_set(data, DATA_TRAIN, trial->count, &data->sets[DATA_TRAIN]);
    fill_set(data, DATA_TEST, trial->batch + 3, &data->sets[DATA_TEST]);
    for (uint32_t i = 0; trial->masked > 0 && i < trial->count; i++)
        if (i % trial->masked == trial->masked - 1)
            data->sets[DATA_TRAIN].labels[i] = DATA_MASKED;
    data_normalise(data, true);
}

static void take_steps(const struct learner *learner, const struct train *train, uint32_t first,
                       uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        take_step(learner, train, i);
}

/* ---- Comparisons ---- */

static double compare_logits(const struct learner *mine, const struct learner *oracle,
                             const struct train *train)
{
    uint32_t count = train->data->sets[DATA_TEST].count - 1; /* from the second sample on */
    size_t values = (size_t)count * train->model->classes;
    float *ours = static_cast<float *>(must_have(malloc(values * sizeof *ours)));
    float *right = static_cast<float *>(must_have(malloc(values * sizeof *right)));
    must(mine->engine->evaluate(mine->state, DATA_TEST, 1, count, ours));
    must(oracle->engine->evaluate(oracle->state, DATA_TEST, 1, count, right));
    double off = off_by(ours, right, values);
    free(ours);
    free(right);
    return off;
}

/* Returns whether two engines that each run half of the steps give the same bits as one engine that runs them
 * all. */
static bool goes_on(const struct train *train, const struct train_state *begin, uint32_t steps)
{
    size_t values = train->model->arena_values;
    struct learner all = learner_open(contender->engine, train, begin);
    take_steps(&all, train, 0, steps);
    struct train_state end = state_of(&all, values);
    struct learner one = learner_open(contender->engine, train, begin);
    take_steps(&one, train, 0, steps / 2);
    struct train_state middle = state_of(&one, values);
    struct learner two = learner_open(contender->engine, train, &middle);
    take_steps(&two, train, steps / 2, steps - steps / 2);
    struct train_state last = state_of(&two, values);
    bool same = same_arenas(&last, &end, values) && memcmp(&last.scale, &end.scale, sizeof last.scale) == 0;
    for (const struct learner *each : {&all, &one, &two})
        each->engine->close(each->state);
    train_state_free(&end);
    train_state_free(&middle);
    train_state_free(&last);
    return same;
}

/* ---- Overflow, for engines that scale the loss ---- */

#define HUGE_SCALE     0x1p120f /* any gradient becomes Inf */
#define RECOVERY_STEPS 200      /* more than the halvings from HUGE_SCALE to a usable scale */

/* Returns whether the engine reports that all overflows since set() began in the last layer that has
 * parameters and is not computed in fp32. `steps` is their number. */
static bool names_layer(const struct learner *learner, const struct model *model, uint32_t steps)
{
    uint32_t counts[MODEL_LAYERS_MAX], last = 0, all = 0;
    must(learner->engine->overflows(learner->state, counts));
    for (uint32_t i = 0; i < model->layer_count; i++) {
        all += counts[i];
        if (model->layers[i].weight_values > 0 && !model->layers[i].fp32)
            last = i;
    }
    if (counts[last] == steps && all == steps)
        return true;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (counts[i] > 0)
            printf("FAILED  %u overflows began in %s, not in %s\n", counts[i], model->layers[i].name,
                   model->layers[last].name);
    return false;
}

static struct train_totals step_from(const struct learner *learner, const struct train_state *from)
{
    struct train_totals totals;
    must(learner->engine->set(learner->state, from));
    must(learner->engine->steps(learner->state, 0, 1, 1));
    must(learner->engine->totals(learner->state, &totals));
    return totals;
}

/* Makes a step overflow. Returns whether the engine recovers. The step must be skipped, the scale halved, and
 * parameters and moments unchanged. The engine must name the layer. Later steps must be applied again when
 * the scale is small enough. */
static bool recovers(const struct learner *learner, const struct model *model, struct train_state *state)
{
    const size_t values = model->arena_values;
    state->scale.scale = HUGE_SCALE;
    struct train_totals totals = step_from(learner, state);
    struct train_state after = state_of(learner, values);
    bool well = totals.skipped == 1 && totals.bad_step == TRAIN_FINE && same_arenas(&after, state, values) &&
                after.scale.scale == HUGE_SCALE / 2 && after.scale.good_steps == 0 &&
                names_layer(learner, model, 1);
    train_state_free(&after);
    uint32_t skipped = 1;
    for (int i = 0; i < RECOVERY_STEPS; i++) {
        must(learner->engine->steps(learner->state, 0, 1, 1));
        must(learner->engine->totals(learner->state, &totals));
        skipped += (uint32_t)totals.skipped;
    }
    after = state_of(learner, values);
    well = well && totals.skipped == 0 && totals.bad_step == TRAIN_FINE &&
           !same_arenas(&after, state, values) && ldexpf(after.scale.scale, (int)skipped) == HUGE_SCALE;
    printf("%s  amp overflow: skipped %u steps, then continued with a scale of %g\n",
           well ? "ok    " : "FAILED", skipped, after.scale.scale);
    train_state_free(&after);
    return well;
}

/* Repeats step 1 with parameters that make it overflow every time. Returns whether three conditions hold: the
 * scale stops at its minimum, no parameter changes, and step 1 is reported as bad. */
static bool stays_above_zero(const struct learner *learner, struct train_state *state, size_t values)
{
    struct train_totals totals;
    const struct loss_scale_rule rule = {};
    for (size_t i = 0; i < values; i++)
        state->parameters[i] = 1e30f;
    state->scale = loss_scale_begin(&rule);
    must(learner->engine->set(learner->state, state));
    for (int i = 0; i < RECOVERY_STEPS; i++)
        must(learner->engine->steps(learner->state, 0, 1, 1));
    must(learner->engine->totals(learner->state, &totals));
    struct train_state after = state_of(learner, values);
    bool well = totals.skipped == RECOVERY_STEPS && totals.bad_step == 1 &&
                after.scale.scale == LOSS_SCALE_LEAST && same_arenas(&after, state, values);
    printf("%s  amp overflow in every step: %u of %d steps skipped, the scale is %g\n",
           well ? "ok    " : "FAILED", (uint32_t)totals.skipped, RECOVERY_STEPS, after.scale.scale);
    train_state_free(&after);
    return well;
}

static bool overflows(const struct train *train, const struct train_state *begin)
{
    const struct model *model = train->model;
    struct learner learner = learner_open(contender->engine, train, begin);
    take_step(&learner, train, 0);
    struct train_state state = state_of(&learner, model->arena_values);
    bool well = recovers(&learner, model, &state) && stays_above_zero(&learner, &state, model->arena_values);
    learner.engine->close(learner.state);
    train_state_free(&state);
    return well;
}

/* Returns whether overflows() holds with all layers in 16 bits, and with the last layer in fp32. */
static bool all_overflows(const struct train *train, const struct train_state *begin)
{
    struct model model = *train->model;
    struct train own = *train;
    own.model = &model;
    model.layers[model.layer_count - 1].fp32 = true;
    return overflows(train, begin) && overflows(&own, begin);
}

/* Returns whether the network has a layer that selects: max-pooling or ReLU. */
static bool chooses(const struct model *model)
{
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].spec.kind == LAYER_RELU || model->layers[i].spec.kind == LAYER_POOL)
            return true;
    return false;
}

#define AVERAGED_STEPS 3

/* Returns the largest relative error of a tensor's moving average, after a few steps: the norm of the
 * difference, divided by the norm of the change of the oracle's average. */
static double compare_averages(const struct learner *mine, const struct learner *oracle,
                               const struct train *train, const struct train_state *begin)
{
    struct train_state ends[2];
    double worst = 0;
    if (!train_averages(train))
        return 0;
    for (int i = 0; i < 2; i++) {
        const struct learner *learner = i ? oracle : mine;
        if (!train_state_for(train, &ends[i]))
            must_have(NULL);
        must(learner->engine->set(learner->state, begin));
        take_steps(learner, train, 0, AVERAGED_STEPS);
        must(learner->engine->get(learner->state, &ends[i]));
        memcpy(ends[i].parameters, ends[i].ema, train->model->arena_values * sizeof(float));
    }
    worst = compare_updates(&ends[0], begin, &ends[1], begin, train->model);
    for (struct train_state &end : ends)
        train_state_free(&end);
    return worst;
}

struct verdict {
    struct distance off;
    double logits, averages;
    bool same;
};

/* Copies the labels of a training set. Replaces masked ones by class 0, and multi-hot ones by those of the
 * next sample. */
static uint32_t *unmasked(const struct data_set *set)
{
    auto *labels = static_cast<uint32_t *>(must_have(malloc(set->count * sizeof *set->labels)));
    for (uint32_t i = 0; i < set->count; i++)
        labels[i] = set->multi_hot                  ? (i + 1) % set->count
                    : set->labels[i] == DATA_MASKED ? 0
                                                    : set->labels[i];
    return labels;
}

static struct verdict compare(const struct trial *trial, const struct train *train,
                              const struct train_state *begin)
{
    struct verdict verdict;
    struct train ours = *train, theirs = *train;
    struct data whole = *train->data;
    uint32_t *labels = unmasked(&whole.sets[DATA_TRAIN]);
    plant(trial->fault, &ours);
    whole.sets[DATA_TRAIN].labels = labels;
    ours.data = trial->fault == FAULT_MASK ? &whole : train->data;
    if (trial->pieces > 0)
        theirs.accumulate = trial->pieces;
    struct learner mine = learner_open(contender->engine, &ours, begin);
    struct learner oracle =
        learner_open(trial->pieces > 0 ? contender->engine : &engine_oracle, &theirs, begin);
    verdict.off = compare_steps(&mine, &oracle, train, trial->fault, trial->steps, begin);
    verdict.logits = compare_logits(&mine, &oracle, train);
    verdict.averages = trial->fault ? 0 : compare_averages(&mine, &oracle, train, begin);
    for (const struct learner *each : {&mine, &oracle})
        each->engine->close(each->state);
    free(labels);
    verdict.same = trial->fault || goes_on(train, begin, trial->steps);
    return verdict;
}

#ifdef HAVE_CUBLAS

/* ---- The first step of a residual network, layer by layer ----
 *
 * Rounding to bf16 changes the masks of ReLU, which makes gradients differ by half of their norm. With the
 * engine's own outputs, the oracle has the same masks. Then outputs differ by one rounding, the gradients of
 * weights by the roundings of the gradients on the way back (1e-2 in a simulation of these roundings on a
 * CPU), and those of normalisations, whose terms nearly cancel each other, by up to 5e-2. */

#define GIVEN_OUTPUTS    4e-3
#define GIVEN_WEIGHTS    3e-2
#define GIVEN_NORMS      0.15
#define GIVEN_STATISTICS 1e-3

/* Errors of the first step: of the outputs, and of the gradients relative to their bounds. */
struct given_errors {
    double outputs, gradients,
        without_tap;            /* without_tap: of the gradients of a 3 x 3 kernel without a tap */
    const char *layer, *tensor; /* with the largest errors */
};

static double given_bound(const struct model_tensor *tensor)
{
    return tensor->is_statistic               ? GIVEN_STATISTICS
           : tensor->axes > 1 || tensor->head ? GIVEN_WEIGHTS
                                              : GIVEN_NORMS;
}

/* Gets all outputs that the engine stores. */
static void take_outputs(const struct learner *mine, const struct train *train, struct oracle_given *given)
{
    for (uint32_t i = 0; i < train->model->layer_count; i++) {
        const size_t values = train->batch * train->model->layers[i].out_values;
        float *outputs = static_cast<float *>(must_have(malloc(values * sizeof *outputs)));
        if (resnet_output(mine->state, i, train->batch, outputs) == STATUS_OK)
            given->outputs[i] = outputs;
        else
            free(outputs);
    }
}

static void find_given_errors(const struct learner *mine, const struct learner *oracle,
                              const struct model *model, const struct oracle_given *given,
                              struct given_errors *errors)
{
    const size_t bytes = model->arena_values * sizeof(float);
    float *ours = static_cast<float *>(must_have(malloc(bytes)));
    float *right = static_cast<float *>(must_have(malloc(bytes)));
    must(mine->engine->gradients(mine->state, ours));
    must(oracle->engine->gradients(oracle->state, right));
    *errors = {0, 0, 0, "", ""};
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const double off = given->outputs[i] ? sqrt(given->off[i] / given->all[i]) : 0;
        errors->layer = off > errors->outputs || isnan(off) ? model->layers[i].name : errors->layer;
        errors->outputs = worst_of(off, errors->outputs);
    }
    for (uint32_t t = 0; t < model->tensor_count; t++) {
        const struct model_tensor *tensor = &model->tensors[t];
        float *own = ours + tensor->first;
        const double off = off_by(own, right + tensor->first, tensor->values) / given_bound(tensor);
        errors->tensor = off > errors->gradients || isnan(off) ? tensor->name : errors->tensor;
        errors->gradients = worst_of(off, errors->gradients);
        if (errors->without_tap > 0 || tensor->axes != 4 || tensor->shape[2] != 3)
            continue;
        for (size_t i = 4; i < tensor->values; i += 9)
            own[i] = 0;
        errors->without_tap = off_by(own, right + tensor->first, tensor->values) / given_bound(tensor);
    }
    free(ours);
    free(right);
}

/* Compares the first step. Returns whether all errors are within the bounds or, with a planted fault, at
 * least one exceeds its bound; and whether the bounds would find a gradient without a tap. */
static bool agrees_by_layer(const struct trial *trial, const struct train *train,
                            const struct train_state *begin)
{
    const size_t values = train->model->arena_values;
    struct train_state from = copy_of(begin, values), faulty;
    struct oracle_given given = {};
    struct given_errors errors;
    for (size_t i = 0; i < values; i++)
        from.parameters[i] = __bfloat162float(__float2bfloat16(from.parameters[i]));
    faulty = copy_of(&from, values);
    plant(trial->fault, train->model, faulty.parameters);
    struct learner mine = learner_open(contender->engine, train, &faulty);
    struct learner oracle = learner_open(&engine_oracle, train, &from);
    must(mine.engine->steps(mine.state, 0, 0, 1));
    take_outputs(&mine, train, &given);
    oracle_give(oracle.state, &given);
    must(oracle.engine->steps(oracle.state, 0, 0, 1));
    find_given_errors(&mine, &oracle, train->model, &given, &errors);
    const bool near = errors.outputs <= GIVEN_OUTPUTS && errors.gradients <= 1;
    const bool well = near == (trial->fault == FAULT_NONE) && errors.without_tap > 1;
    printf("%s  %s %-9s by layer%s%s: outputs %.1e (%s, bound %.0e), gradients %.2f of their bounds (%s), "
           "without a tap %.1f\n",
           well ? "ok    " : "FAILED", contender->engine->name, trial->table,
           trial->fault ? ", planted: " : "", fault_names[trial->fault], errors.outputs, errors.layer,
           GIVEN_OUTPUTS, errors.gradients, errors.tensor, errors.without_tap);
    for (const float *outputs : given.outputs)
        free(const_cast<float *>(outputs));
    for (const struct learner *each : {&mine, &oracle})
        each->engine->close(each->state);
    train_state_free(&from);
    train_state_free(&faulty);
    return well;
}
#endif

/* Returns whether all layers with parameters are computed in fp32, and tensors between layers are in fp32
 * too: not in the engines of 16 bits. */
static bool all_fp32(const struct model *model)
{
    if (contender->engine->unit == UNIT_HALF)
        return false;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].weight_values > 0 && !model->layers[i].fp32)
            return false;
    return true;
}

/* Prints the errors of a case. If everything is in fp32, the bounds are those of the engine cuda. Returns
 * whether it passed: repeated runs give the same bits, and all errors are within the bounds or, with a
 * planted fault, at least one exceeds its bound. */
static bool judge(const struct trial *trial, const struct model *model, const struct verdict *verdict)
{
    const struct contender *like = all_fp32(model) ? &contenders[0] : contender;
    const struct engine_bounds *bounds = &like->engine->bounds;
    const double gradients = trial->pieces > 0 ? PIECES_BOUND
                             : chooses(model)  ? like->chosen_gradients
                                               : like->gradients;
    bool near = verdict->off.gradients <= gradients && verdict->off.losses <= bounds->loss &&
                verdict->off.updates <= bounds->drift && verdict->logits <= like->logits &&
                verdict->averages <= bounds->drift;
    bool well = verdict->same && near == (trial->fault == FAULT_NONE);
    printf("%s  %s %-9s %ux%ux%ux%u, %u classes, batch %u, %u steps, %s%s%s: errors: gradients %.1e, "
           "losses %.1e, updates %.1e, logits %.1e, averages %.1e%s%s%s%s%s%s%s\n",
           well ? "ok    " : "FAILED", contender->engine->name, trial->table, trial->shape.channels,
           trial->shape.depth, trial->shape.height, trial->shape.width, trial->classes, trial->batch,
           trial->steps, optimizers[trial->optimizer],
           trial->fault   ? ", planted: "
           : trial->parts ? ", recipe in parts"
                          : "",
           fault_names[trial->fault], verdict->off.gradients, verdict->off.losses, verdict->off.updates,
           verdict->logits, verdict->averages, verdict->same ? "" : "; bits differ between runs",
           trial->mixing.mixup + trial->mixing.cutmix > 0 ? "; mixed samples" : "",
           trial->loss == LOSS_BINARY ? "; binary cross-entropy" : "",
           trial->masked ? "; masked samples" : "", trial->multi_hot ? "; multi-hot labels" : "",
           trial->fp32 > 1 ? "; every other layer in fp32"
           : trial->fp32   ? "; layers in fp32"
                           : "",
           trial->pieces ? "; compared with steps in parts" : "");
    return well;
}

/* Opens and closes the engine, and counts its memory in `account`. */
static void count_memory(struct train train, bool plans, struct memory_account *account)
{
    const struct resources resources = {.threads = 1, .device = 0};
    void *state = NULL;
    *account = {};
    account->plans = plans;
    train.memory = account;
    must(contender->engine->open(&train, &resources, &state));
    if (!plans && contender->engine->memory_bytes(state) > memory_total(account))
        account->bytes[MEMORY_CONTEXT] = 1; /* not all allocations were counted */
    contender->engine->close(state);
}

#define LOOKS 100 /* other processes on the GPU also take and return memory */

/* Returns whether a plan has the same bytes in all parts as the allocations, and leaves no memory in use. */
static bool plans_memory(const struct train *train)
{
    struct memory_account planned, taken;
    size_t before = 0, after = 0, total;
    count_memory(*train, true, &planned); /* loads what the engine needs besides */
    for (int tries = 0; tries == 0 || (before != after && tries < LOOKS); tries++) {
        must(cudaMemGetInfo(&before, &total));
        count_memory(*train, true, &planned);
        must(cudaMemGetInfo(&after, &total));
    }
    count_memory(*train, false, &taken);
    const bool well = memcmp(planned.bytes, taken.bytes, sizeof taken.bytes) == 0 && before == after &&
                      memory_total(&taken) > 0;
    if (!well)
        printf("FAILED  %s plans %llu bytes of memory and allocates %llu; a plan leaves %lld bytes in use\n",
               contender->engine->name, (unsigned long long)memory_total(&planned),
               (unsigned long long)memory_total(&taken), (long long)before - (long long)after);
    return well;
}

static void choose_fp32(const struct trial *trial, struct model *model)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        model->layers[i].fp32 = model->layers[i].weight_values > 0 &&
                                contender->engine->keeps_fp32(&model->layers[i]) == FP32_CHOSEN &&
                                seen++ % trial->fp32 == 0;
}

static bool run(const struct trial *trial)
{
    struct model model;
    struct data data;
    struct train_state begin;
    must(model_build(find_table(trial->table), trial->shape, trial->classes, &model));
    data_random(trial, &data);
    if (!train_state_new(model.arena_values, &begin))
        must_have(NULL);
    model_initialise(&model, seed, begin.parameters);
    if (trial->fp32)
        choose_fp32(trial, &model);
    struct train train = {};
    train.model = &model;
    train.data = &data;
    train.seed = seed;
    train.batch = trial->batch;
    train.augment = trial->augment;
    train.optimizer = {trial->optimizer, 0.9, 0.9, 0.999, 1e-8, 1e-3};
    train.schedule = {SCHEDULE_COSINE, trial->optimizer == OPTIMIZER_SGD ? 0.01 : 0.001, 5, 1000, 0, 0};
    train.smoothing = trial->smoothing;
    if (trial->parts > 0) {
        train.accumulate = trial->parts;
        train.optimizer.average = 0.5;
        train.optimizer.matrix_rate = 20;
        train.optimizer.average_warms = optimizer_needs_tensors(trial->optimizer);
        if (trial->optimizer == OPTIMIZER_MUON)
            train.optimizer.clip_adaptive = 0.05;
        else
            train.optimizer.clip_norm = 0.2;
        train.optimizer.layer_decay = model.transformer ? 0.75 : 1;
    }
    train.mixing = trial->mixing;
    train.loss = trial->loss;
    struct verdict verdict = compare(trial, &train, &begin);
    bool well = judge(trial, &model, &verdict);
    well = plans_memory(&train) && well;
#ifdef HAVE_CUBLAS
    if (contender->engine == &engine_resnet && trial->fault != FAULT_LABEL && trial->fault != FAULT_MOVE)
        well = agrees_by_layer(trial, &train, &begin) && well;
#endif
    if (contender->engine->scales_loss && trial->overflows)
        well = all_overflows(&train, &begin) && well;
    train_state_free(&begin);
    data_close(&data);
    return well;
}

/* Returns whether the network is selected on the command line. */
static bool asked_for(const char *name, int count, char **names)
{
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return count == 0;
}

/* If the arguments start with the option `name`, removes the option and its value, and returns the value.
 * Otherwise returns NULL. */
static const char *option(const char *name, int *argc, char ***argv)
{
    if (*argc < 2 || strcmp((*argv)[0], name) != 0)
        return NULL;
    *argc -= 2;
    *argv += 2;
    return (*argv)[-1];
}

/* Selects the engine of that name. Prints an error and returns false if there is none. */
static bool choose(const char *name)
{
    for (const struct contender &each : contenders)
        if (strcmp(each.engine->name, name) == 0) {
            contender = &each;
            return true;
        }
    fprintf(
        stderr,
        "gpu_train: unknown engine '%s'; give cuda, tf32, bf16, amp, vit, vit-amp, resnet or resnet-amp\n",
        name);
    return false;
}

/* Returns whether the engine is precise enough for a trial. Muon amplifies the rounding of gradients, so
 * updates cannot be compared with the oracle's if gradients are rounded to 16 bits; --verify compares them
 * with the engine's own moments. */
static bool precise(const struct trial *trial)
{
    return trial->optimizer != OPTIMIZER_MUON || contender->engine->bounds.drift < 0.1;
}

/* Returns whether the engine supports the network: `vit` and `vit-amp` compute transformers, `resnet` and
 * `resnet-amp` residual networks with batch normalisation, and the others all other networks. */
static bool supports(const char *table)
{
    const char *name = contender->engine->name;
    const char *engine = strncmp(name, "vit", 3) == 0 || strncmp(name, "res", 3) == 0 ? name : "net";
    const char *network = strncmp(table, "vit", 3) == 0 || strncmp(table, "res", 3) == 0 ? table : "net";
    return strncmp(engine, network, 3) == 0;
}

/* Runs each case of `planted` without and with each fault. Returns the number of failed cases. */
static int run_planted(void)
{
    int failures = 0;
    for (struct trial trial : planted)
        for (size_t fault = FAULT_NONE; supports(trial.table) && fault < COUNT_OF(fault_names); fault++) {
            trial.fault = static_cast<enum fault>(fault);
            if (fault_fits(trial.fault, strncmp(trial.table, "vit", 3) == 0))
                failures += !run(&trial);
        }
    return failures;
}

/* Runs each case of `masks` or `multi_hot` without and with a planted fault. Returns the number of failed
 * cases. */
template <size_t COUNT> static int run_labels(const struct trial (&cases)[COUNT], bool brief)
{
    int failures = 0;
    for (struct trial trial : cases) {
        if (!supports(trial.table) || (brief && trial.batch > SHORT_BATCH))
            continue;
        failures += !run(&trial);
        trial.fault = FAULT_MASK;
        failures += !brief && !run(&trial);
    }
    return failures;
}

int main(int argc, char **argv)
{
    int failures = 0;
    argc--;
    argv++;
    const char *engine = option("--engine", &argc, &argv);
    if (engine && !choose(engine))
        return 2;
    bool brief = argc > 0 && strcmp(argv[0], "--short") == 0;
    argc -= brief;
    argv += brief;
    const char *number = option("--seed", &argc, &argv);
    if (number)
        seed = strtoull(number, NULL, 10);
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_train: %s\n", status_text());
        return 4;
    }
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], FAULTS) != 0 && strcmp(argv[i], RECIPE) != 0 && strcmp(argv[i], MASKED) != 0 &&
            strcmp(argv[i], MULTI_HOT) != 0 && strcmp(argv[i], FP32) != 0 && !find_table(argv[i])) {
            fprintf(stderr, "gpu_train: unknown network '%s'\n", argv[i]);
            return 2;
        }
    for (struct trial trial : trials) {
        if (!supports(trial.table) || !asked_for(trial.table, argc, argv) ||
            (brief && trial.batch > SHORT_BATCH))
            continue;
        if (brief && trial.steps > SHORT_STEPS)
            trial.steps = SHORT_STEPS;
        failures += !run(&trial);
    }
    for (struct trial trial : batches) {
        trial.pieces = PIECES;
        if (supports(trial.table) && asked_for(trial.table, argc, argv) && !brief)
            failures += !run(&trial);
    }
    for (const struct trial &trial : recipes)
        if (supports(trial.table) && precise(&trial) && asked_for(RECIPE, argc, argv) &&
            (!brief || trial.batch <= SHORT_BATCH))
            failures += !run(&trial);
    for (struct trial trial : wide)
        for (trial.fp32 = 1; trial.fp32 <= 2; trial.fp32++)
            if (contender->engine->keeps_fp32 && supports(trial.table) && asked_for(FP32, argc, argv) &&
                (!brief || trial.batch <= SHORT_BATCH))
                failures += !run(&trial);
    if (asked_for(MASKED, argc, argv))
        failures += run_labels(masks, brief);
    if (asked_for(MULTI_HOT, argc, argv))
        failures += run_labels(multi_hot, brief);
    if (!brief && asked_for(FAULTS, argc, argv))
        failures += run_planted();
    return failures ? 3 : 0;
}
