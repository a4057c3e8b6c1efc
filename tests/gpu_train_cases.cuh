/* The networks and cases of gpu_train. */
#ifndef FDSL_TESTS_GPU_TRAIN_CASES_CUH
#define FDSL_TESTS_GPU_TRAIN_CASES_CUH

#include "gpu_learner.cuh"

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

LAYERS(vit64, VIT(64, 1, 4, VIT_BLOCK(64, 1, 0.25f)));
LAYERS(vit128, VIT(128, 4, 8, VIT_BLOCK(128, 4, 0), VIT_BLOCK(128, 4, 0.5f)));
LAYERS(vit192, VIT(192, 3, 16, VIT_BLOCK(192, 3, 0), VIT_BLOCK(192, 3, 0)));
LAYERS(vit200, VIT(400, 25, 16, VIT_BLOCK(400, 25, 0.1f)));

#define TABLE(name, deep)                                       \
    {                                                           \
#name, "", deep, name##_layers, COUNT_OF(name##_layers) \
    }
static const struct model_table tables[] = {
    TABLE(linear, false), TABLE(relu, false),     TABLE(conv, false),     TABLE(conv_deep, true),
    TABLE(pool, false),   TABLE(pool_deep, true), TABLE(dropout, false),  TABLE(mean, false),
    TABLE(add, false),    TABLE(add_pool, false), TABLE(add_rows, false), TABLE(vit64, false),
    TABLE(vit128, false), TABLE(vit192, false),   TABLE(vit200, false),
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
    uint32_t parts; /* parts of a step; if not 0, the optimizer also clips, averages and decays by layer */
};

static const struct shape small = {3, 1, 7, 5}, gray = {1, 1, 13, 11}, volume = {2, 4, 5, 3},
                          picture = {1, 1, 28, 28}, colour = {3, 1, 17, 15}, clip = {3, 5, 9, 8};
static const struct augment still = {0, false}, moved = {2, true};
static const struct mixing up = {0.8, 0}, cut = {0, 1}, both = {0.8, 1};
static const enum loss_kind binary = LOSS_BINARY;

static const char *const optimizers[] = {"sgd", "adam", "adamw"};

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
    {"vit-micro", picture, 10, 7, 17, 50, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit-micro", picture, 10, 65, 100, 10, OPTIMIZER_ADAMW, DTYPE_U8, 0.1f, moved},
    {"vit64", {1, 1, 8, 4}, 1, 1, 3, 50, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 248}, 3, 3, 7, 10, OPTIMIZER_SGD, DTYPE_F16, 0, still},
    {"vit64", {2, 1, 4, 252}, 3, 3, 7, 10, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit64", {2, 1, 4, 256}, 1000, 3, 7, 10, OPTIMIZER_ADAM, DTYPE_U8, 0.1f, moved},
    {"vit64", {1, 1, 80, 100}, 17, 1, 3, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit128", {3, 1, 16, 24}, 5, 257, 300, 5, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved},
    {"vit192", {3, 1, 32, 48}, 10, 13, 30, 20, OPTIMIZER_SGD, DTYPE_U8, 0, moved},
    {"vit192", {3, 1, 224, 224}, 1000, 1, 3, 2, OPTIMIZER_ADAMW, DTYPE_U8, 0, still},
    /* Blocks of attention process several samples, with 64 and 201 tokens; blocks of GELU several parts. */
    {"vit64", {2, 1, 4, 252}, 3, 300, 500, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit64", {2, 1, 4, 800}, 3, 140, 200, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit192", {3, 1, 32, 48}, 10, 500, 700, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit200", {3, 1, 32, 32}, 3, 5, 9, 5, OPTIMIZER_SGD, DTYPE_U8, 0, still},
    {"vit-tiny", {3, 1, 32, 16}, 7, 3, 7, 5, OPTIMIZER_ADAMW, DTYPE_U8, 0, moved},
    {"vit-base", {3, 1, 16, 16}, 7, 1, 3, 2, OPTIMIZER_SGD, DTYPE_U8, 0, still},
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
};

#define FAULTS "faults" /* the argument that selects the cases below */

/* Each case runs without a fault and with each fault that the network can have. */
static const struct trial planted[] = {
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"vit-micro", picture, 10, 7, 17, 20, OPTIMIZER_ADAMW, DTYPE_U8, 0.3f, moved},
    {"lenet", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"lenet", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_ADAM, DTYPE_U8, 0.3f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_SGD, DTYPE_U8, 0.3f, moved},
    {"cnn", {1, 1, 16, 16}, 10, 7, 17, 20, OPTIMIZER_ADAM, DTYPE_U8, 0.3f, moved},
};

#endif
