/* Shared by the training suites: small transformers with every kind of layer. They have odd sizes, for images
 * of 7 x 5 pixels. */
#ifndef FDSL_TESTS_TRAIN_TRANSFORMERS_H
#define FDSL_TESTS_TRAIN_TRANSFORMERS_H

#include "train_support.h"

#define PATCHES(out, y, x)                                            \
    {                                                                 \
        .kind = LAYER_PATCHES, .channels = out, .kernel = { 1, y, x } \
    }
#define PLAIN_KIND(kind_) \
    {                     \
        .kind = kind_     \
    }
#define TOKENS PLAIN_KIND(LAYER_TOKENS)
#define NORM   PLAIN_KIND(LAYER_NORM)
#define GELU   PLAIN_KIND(LAYER_GELU)
#define SELECT PLAIN_KIND(LAYER_SELECT)
#define LAST   PLAIN_KIND(LAYER_LINEAR)
#define TOKEN_LINEAR(out)                           \
    {                                               \
        .kind = LAYER_TOKEN_LINEAR, .channels = out \
    }
#define ATTENTION(count)                        \
    {                                           \
        .kind = LAYER_ATTENTION, .heads = count \
    }
#define DROP_PATH(share)                       \
    {                                          \
        .kind = LAYER_DROP_PATH, .rate = share \
    }
#define ADD_TOKENS(layers)                  \
    {                                       \
        .kind = LAYER_ADD, .back = (layers) \
    }
LAYERS(patches, false, PATCHES(5, 1, 5), SELECT, LAST);
LAYERS(tokens, false, PATCHES(3, 7, 1), TOKENS, ATTENTION(1), SELECT, LAST);
LAYERS(norm_tokens, false, PATCHES(7, 1, 1), NORM, SELECT, NORM, LAST);
LAYERS(token_linear, false, PATCHES(3, 7, 5), TOKEN_LINEAR(11), TOKEN_LINEAR(5), SELECT, LAST);
LAYERS(gelu, false, PATCHES(13, 7, 5), GELU, SELECT, LAST);
LAYERS(one_head, false, PATCHES(9, 7, 1), ATTENTION(1), SELECT, LAST);
LAYERS(one_token, false, PATCHES(15, 7, 5), ATTENTION(5), SELECT, LAST);
LAYERS(heads, false, PATCHES(5, 1, 1), TOKENS, TOKEN_LINEAR(21), ATTENTION(7), SELECT, LAST);
/* Adds every kind of output, one of them twice. */
LAYERS(add_tokens, false, PATCHES(6, 7, 1), TOKENS, TOKEN_LINEAR(18), ATTENTION(2), DROP_PATH(0.5f),
       ADD_TOKENS(4), NORM, GELU, ADD_TOKENS(3), ADD_TOKENS(2), TOKEN_LINEAR(6), ADD_TOKENS(4), SELECT, NORM,
       ADD_TOKENS(2), LAST);

static const struct model_table *const transformers[] = {
    &patches, &tokens, &norm_tokens, &token_linear, &gelu, &one_head, &one_token, &heads, &add_tokens};

#endif
