/* The networks: tables of layers. */
#include "train/model.h"

#define LAYER(type, ...)                  \
    {                                     \
        .kind = LAYER_##type, __VA_ARGS__ \
    }

/* CONV and POOL are for images and have square kernels. CONV3D and POOL3D are for volumes and have cubic
 * kernels. */
#define CONV(out, size, pad) \
    LAYER(CONV, .channels = (out), .kernel = {1, size, size}, .padding = {0, pad, pad})
#define CONV3D(out, size, pad) \
    LAYER(CONV, .channels = (out), .kernel = {size, size, size}, .padding = {pad, pad, pad})
#define POOL(size)     LAYER(POOL, .kernel = {1, size, size})
#define POOL3D(size)   LAYER(POOL, .kernel = {size, size, size})
#define RELU           LAYER(RELU)
#define DROPOUT(share) LAYER(DROPOUT, .rate = (share))
#define LINEAR(out)    LAYER(LINEAR, .channels = (out))
#define ADD(layers)    LAYER(ADD, .back = (layers))
#define MEAN           LAYER(MEAN)
#define CLASSES        0

/* Layers of a transformer; `layer` is the name of the layer in timm. */
#define PATCHES(layer, out, size) \
    LAYER(PATCHES, .channels = (out), .kernel = {1, size, size}, .name = (layer))
#define TOKENS(layer)            LAYER(TOKENS, .name = (layer))
#define NORM(layer)              LAYER(NORM, .name = (layer))
#define TOKEN_LINEAR(layer, out) LAYER(TOKEN_LINEAR, .channels = (out), .name = (layer))
#define ATTENTION(layer, count)  LAYER(ATTENTION, .heads = (count), .name = (layer))
#define GELU(layer)              LAYER(GELU, .name = (layer))
#define DROP_PATH(layer, share)  LAYER(DROP_PATH, .rate = (share), .name = (layer))
#define NAMED_ADD(layer, layers) LAYER(ADD, .back = (layers), .name = (layer))
#define SELECT                   LAYER(SELECT)
#define HEAD                     LAYER(LINEAR, .channels = CLASSES, .name = "head")

static const struct layer_spec logreg[] = {LINEAR(CLASSES)};

/* LeCun et al., "Gradient-based learning applied to document recognition", 1998, with ReLU and
 * max-pooling. */
static const struct layer_spec lenet[] = {
    CONV(6, 5, 2), RELU,       POOL(2), CONV(16, 5, 0),  RELU, POOL(2), LINEAR(120),
    RELU,          LINEAR(84), RELU,    LINEAR(CLASSES),
};

/* The network of PyTorch's MNIST example: 1,199,882 parameters for 28 x 28 pixels and 10 classes. */
static const struct layer_spec cnn[] = {
    CONV(32, 3, 0), RELU,        CONV(64, 3, 0), RELU,          POOL(2),
    DROPOUT(0.25f), LINEAR(128), RELU,           DROPOUT(0.5f), LINEAR(CLASSES),
};

static const struct layer_spec cnn3d[] = {
    CONV3D(16, 3, 1), RELU,       POOL3D(2), CONV3D(32, 3, 1), RELU,
    POOL3D(2),        LINEAR(64), RELU,      DROPOUT(0.5f),    LINEAR(CLASSES),
};

/* STAGE: a convolution, then pooling that halves the image. BLOCK: a residual block of two convolutions (He
 * et al., "Deep residual learning for image recognition", 2016). */
#define STAGE(out) CONV(out, 3, 1), RELU, POOL(2)
#define BLOCK(out) CONV(out, 3, 1), RELU, CONV(out, 3, 1), ADD(4), RELU

/* Accepts images of any size from 8 x 8 up, because the mean reduces each channel to one number. The network
 * trains without normalisation layers, because it has only three convolutions without a shortcut around
 * them. */
static const struct layer_spec cnn_fdsl[] = {
    STAGE(32), BLOCK(32), STAGE(64), BLOCK(64), STAGE(128), BLOCK(128), MEAN, LINEAR(CLASSES),
};

/* Eight residual blocks of equal cost, for pipelines. */
static const struct layer_spec cnn_deep[] = {
    STAGE(32), BLOCK(32), BLOCK(32), BLOCK(32), BLOCK(32),       BLOCK(32),
    BLOCK(32), BLOCK(32), BLOCK(32), MEAN,      LINEAR(CLASSES),
};

/* Vision transformers (Dosovitskiy et al., "An image is worth 16x16 words", 2021), with the shapes of
 * deit_*_patch16_224 in timm (Touvron et al., "Training data-efficient image transformers & distillation
 * through attention", 2021): layer normalisation before attention and before the two linear layers of a
 * block, and a shortcut around both. VIT_BLOCK has 12 layers. With `drop`, the rate of stochastic depth rises
 * linearly from 0 in the first of 12 blocks to `drop` in the last. timm normalises all tokens before it
 * selects the class token; here the class token is selected first, which gives the same logits. */
#define VIT_BLOCK(n, width, heads, rate)                                                        \
    NORM("blocks." #n ".norm1"), TOKEN_LINEAR("blocks." #n ".attn.qkv", 3 * (width)),           \
        ATTENTION("blocks." #n ".attn", heads), TOKEN_LINEAR("blocks." #n ".attn.proj", width), \
        DROP_PATH("blocks." #n ".drop_path1", rate), NAMED_ADD("blocks." #n ".add1", 6),        \
        NORM("blocks." #n ".norm2"), TOKEN_LINEAR("blocks." #n ".mlp.fc1", 4 * (width)),        \
        GELU("blocks." #n ".mlp.act"), TOKEN_LINEAR("blocks." #n ".mlp.fc2", width),            \
        DROP_PATH("blocks." #n ".drop_path2", rate), NAMED_ADD("blocks." #n ".add2", 6)
#define VIT_BEGIN(width, patch) PATCHES("patch_embed.proj", width, patch), TOKENS("tokens")
#define VIT_END                 SELECT, NORM("norm"), HEAD
#define VIT_12(width, heads, drop)                                                                \
    VIT_BEGIN(width, 16), VIT_BLOCK(0, width, heads, 0), VIT_BLOCK(1, width, heads, (drop) / 11), \
        VIT_BLOCK(2, width, heads, (drop)*2 / 11), VIT_BLOCK(3, width, heads, (drop)*3 / 11),     \
        VIT_BLOCK(4, width, heads, (drop)*4 / 11), VIT_BLOCK(5, width, heads, (drop)*5 / 11),     \
        VIT_BLOCK(6, width, heads, (drop)*6 / 11), VIT_BLOCK(7, width, heads, (drop)*7 / 11),     \
        VIT_BLOCK(8, width, heads, (drop)*8 / 11), VIT_BLOCK(9, width, heads, (drop)*9 / 11),     \
        VIT_BLOCK(10, width, heads, (drop)*10 / 11), VIT_BLOCK(11, width, heads, drop), VIT_END

static const struct layer_spec vit_micro[] = {
    VIT_BEGIN(32, 4),
    VIT_BLOCK(0, 32, 2, 0),
    VIT_BLOCK(1, 32, 2, 0.0625f),
    VIT_END,
};
static const struct layer_spec vit_tiny[] = {VIT_12(192, 3, 0.0f)};
static const struct layer_spec vit_small[] = {VIT_12(384, 6, 0.0f)};
static const struct layer_spec vit_base[] = {VIT_12(768, 12, 0.1f)};

#define NAMED(name, symbol, deep, text)            \
    {                                              \
        name, text, deep, symbol, COUNT_OF(symbol) \
    }
#define TABLE(symbol, deep, text) NAMED(#symbol, symbol, deep, text)
const struct model_table model_tables[] = {
    TABLE(logreg, false, "one linear layer"),
    TABLE(lenet, false, "two convolutions 5 x 5, three linear layers"),
    TABLE(cnn, false, "two convolutions 3 x 3, dropout, two linear layers: PyTorch's MNIST example"),
    TABLE(cnn3d, true, "two convolutions 3 x 3 x 3, two linear layers"),
    NAMED("cnn-fdsl", cnn_fdsl, false,
          "three residual blocks, global average pooling, one linear layer; images of any size"),
    NAMED("cnn-deep", cnn_deep, false,
          "eight equal residual blocks, global average pooling, one linear layer: for pipelines; images of "
          "any size"),
    NAMED("vit-micro", vit_micro, false,
          "vision transformer: patches 4 x 4, two blocks of width 32, two heads; for tests and CPUs"),
    NAMED("vit-tiny", vit_tiny, false, "DeiT-Tiny: patches 16 x 16, twelve blocks of width 192, three heads"),
    NAMED("vit-small", vit_small, false, "DeiT-Small: as vit-tiny, with width 384 and six heads"),
    NAMED("vit-base", vit_base, false,
          "DeiT-Base: as vit-tiny, with width 768, twelve heads and stochastic depth"),
    {0},
};

const char *const model_names[] = {"logreg",    "lenet",    "cnn",       "cnn3d",    "cnn-fdsl", "cnn-deep",
                                   "vit-micro", "vit-tiny", "vit-small", "vit-base", NULL};
