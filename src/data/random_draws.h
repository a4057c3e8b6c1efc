/* The random numbers of training, of augmentation, and of the sample sources `digits` and `clips`. They are
 * pure functions of a Philox counter, so they are identical on host and device, for any batch size, thread
 * count and rank count. To resume, a run needs no generator state, only the epoch.
 *
 * The Philox key is the seed. The last word of every counter is a DRAW_ constant, which separates the kinds
 * of random numbers. The other words are documented at the functions that use them; `sample` is the sample's
 * number in the set. */
#ifndef FDSL_DATA_RANDOM_DRAWS_H
#define FDSL_DATA_RANDOM_DRAWS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/philox.h"
#include "core/portable.h"

/* The last word of a counter. Code adds the tensor's number to DRAW_INIT, and the layer's number to
 * DRAW_DROPOUT and DRAW_PATH. */
#define DRAW_INIT    0x54520000u
#define DRAW_DROPOUT 0x54530000u
#define DRAW_AUGMENT 0x54540000u
#define DRAW_ORDER   0x54550000u
#define DRAW_DIGIT   0x54560000u
#define DRAW_CLIP    0x54580000u
#define DRAW_FIT     0x54590000u
#define DRAW_PATH    0x545A0000u
#define DRAW_CHANGE  0x545B0000u
#define DRAW_ERASE   0x545C0000u
#define DRAW_NOISE   0x545D0000u
#define DRAW_MIX     0x545E0000u /* data/mixing.h */
#define DRAW_LANES   0x545F0000u
#define DRAW_JITTER  0x54600000u /* data/jitter.h */
#define DRAW_RATE    0x54620000u /* train/optimizer.h */

/* ---- Initial parameters ---- */

/* Initial value of element `i` of a tensor, uniform in [-bound, bound). Counter: i / 4 in two words, 0. */
FDSL_HD float draw_initial(uint64_t seed, uint32_t tensor, uint64_t i, float bound)
{
    uint64_t block = i / 4;
    struct philox_block words =
        philox(philox_key(seed), (uint32_t)block, (uint32_t)(block >> 32), 0, DRAW_INIT | tensor);
    return (2 * philox_unit(philox_word(words, (uint32_t)(i % 4))) - 1) * bound;
}

/* Returns the initial value of element `i` of a tensor, normal with mean 0 and this standard deviation. Uses
 * the method of Box and Muller, "A note on the generation of random normal deviates", 1958. One block gives
 * the elements 2 j and 2 j + 1. Absolute values are at most 5.8 standard deviations. The computation is in
 * double, so that all machines round to the same float, except in rare cases. Counter: i / 2 in two words,
 * 1. */
static inline float draw_initial_normal(uint64_t seed, uint32_t tensor, uint64_t i, double deviation)
{
    uint64_t pair = i / 2;
    struct philox_block words =
        philox(philox_key(seed), (uint32_t)pair, (uint32_t)(pair >> 32), 1, DRAW_INIT | tensor);
    double angle = 6.28318530717958647692 * philox_unit(words.word[1]);
    double radius = sqrt(-2 * log(1 - (double)philox_unit(words.word[0])));
    return (float)(deviation * radius * (i % 2 ? sin(angle) : cos(angle)));
}

/* ---- Dropout ---- */

/* One Philox block holds one random byte for each of 16 adjacent elements, in C order of (channel, depth,
 * height, width). Counter: element / 16, sample, epoch. */
#define DRAW_DROPOUT_ELEMENTS 16

FDSL_HD struct philox_block draw_dropout(uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t layer,
                                         uint32_t element)
{
    return philox(philox_key(seed), element / DRAW_DROPOUT_ELEMENTS, sample, epoch, DRAW_DROPOUT | layer);
}

/* Returns whether dropout keeps `element`; `block` is the result of draw_dropout() for that element. The
 * dropout rate is `threshold` / 256. The caller multiplies kept elements by 256 / (256 - threshold). */
FDSL_HD bool draw_kept(struct philox_block block, uint32_t element, uint32_t threshold)
{
    uint32_t at = element % DRAW_DROPOUT_ELEMENTS;
    return (philox_word(block, at / 4) >> (8 * (at % 4)) & 255u) >= threshold;
}

/* ---- Stochastic depth ---- */

/* The factor of a sample in a LAYER_DROP_PATH layer: 0 with probability `rate`, else 1 / (1 - rate). Counter:
 * 0, sample, epoch. */
FDSL_HD float draw_path(uint64_t seed, uint32_t epoch, uint32_t sample, uint32_t layer, float rate)
{
    struct philox_block block = philox(philox_key(seed), 0, sample, epoch, DRAW_PATH | layer);
    return philox_unit(block.word[0]) < rate ? 0 : 1 / (1 - rate);
}

/* ---- Order ---- */

/* A permutation of 0 .. count - 1 that needs no memory: a Feistel network over the smallest even number of
 * bits that can represent count - 1. While the result is out of range, the network is applied again (Black
 * and Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is murmur3's finaliser with
 * keys from Philox. */
#define ORDER_ROUNDS 8

struct draw_memo;

/* The order of the samples in an epoch: draw_order(), draw_lanes() or draw_rows(). */
struct draw_order {
    uint32_t count, half_bits; /* half_bits: 0 for draw_rows() */
    uint32_t keys[ORDER_ROUNDS];
    struct permutation blocks; /* draw_rows(): of all rows; draw_lanes(): of the blocks */

    /* Only draw_lanes(); lanes is 0 otherwise. */
    uint32_t lanes, window, block; /* block, window: in samples */
    uint32_t epoch, short_at;      /* short_at: index of the short block in `blocks` */
    uint64_t seed;
    struct draw_memo *memo; /* on the host; NULL: none */
};

/* What draw_order_at() computes for many positions of an order of draw_lanes() alike: the permutations of the
 * windows, and the places of blocks. If a caller sets order->memo, ascending positions take a fraction of the
 * time. Zero it before it is used with another order. Not thread safe. */
#define DRAW_MEMO_LANES  64
#define DRAW_MEMO_BLOCKS 1024
struct draw_memo_window {
    uint32_t lane, window, size; /* size 0: not set */
    struct permutation within;
};
struct draw_memo_block {
    uint32_t next, at; /* `next`: number of the block + 1; 0: not set */
};
struct draw_memo {
    struct draw_memo_window windows[DRAW_MEMO_LANES];
    struct draw_memo_block blocks[DRAW_MEMO_BLOCKS];
};

/* The order of `count` samples in an epoch. Requires 1 <= count < 2^31. Counter: block, 0, epoch. */
FDSL_HD struct draw_order draw_order(uint64_t seed, uint32_t epoch, uint32_t count)
{
    struct draw_order order = {0};
    order.count = count;
    order.half_bits = 1;
    while (count > UINT64_C(1) << (2 * order.half_bits))
        order.half_bits++;
    for (uint32_t i = 0; i < ORDER_ROUNDS; i += 4) {
        struct philox_block block = philox(philox_key(seed), i / 4, 0, epoch, DRAW_ORDER);
        for (uint32_t j = 0; j < 4; j++)
            order.keys[i + j] = philox_word(block, j);
    }
    return order;
}

/* The order of `count` rows of embeddings, which are read in any order at the same cost: the permutation of
 * the workload `ops` (core/philox.h), which also the kernels for rows on a device compute. Requires
 * 1 <= count. */
FDSL_HD struct draw_order draw_rows(uint64_t seed, uint64_t epoch, uint32_t count)
{
    struct draw_order order = {0};
    order.count = count;
    order.blocks = permutation_begin(seed + epoch, count);
    return order;
}

/* Maximum number of samples per block of draw_lanes(), for long reads from a shard; and the number of blocks
 * per lane that smaller sets have at least, to mix the classes of class folders. */
#define ORDER_BLOCK       256
#define ORDER_LANE_BLOCKS 16

FDSL_HD uint64_t draw_lanes_seed(uint64_t seed, uint32_t epoch, uint32_t lane, uint32_t window)
{
    const struct philox_block block = philox(philox_key(seed), lane, window, epoch, DRAW_LANES);
    return (uint64_t)block.word[1] << 32 | block.word[0];
}

/* The order of a set that is read while it is used. Blocks of consecutive samples are permuted, and cut into
 * `lanes` runs that differ by at most one sample. Within each run, windows of shuffle / lanes samples are
 * permuted. Position p of the order is index p / lanes of lane p mod lanes. A reader therefore reads from at
 * most `lanes` windows at a time; each window covers a few blocks. The order depends neither on shards nor on
 * threads or ranks. `shuffle` is the number of samples in all windows together; 0: the order of the set.
 * Requires 1 <= lanes, and count as for draw_order(). At most max(1, min(shuffle, count)) lanes are used.
 * Counters: lane, window, epoch; the blocks have lane 2^32 - 1. */
FDSL_HD struct draw_order draw_lanes(uint64_t seed, uint32_t epoch, uint32_t count, uint32_t lanes,
                                     uint32_t shuffle)
{
    struct draw_order order = draw_order(seed, epoch, count);
    lanes = lanes < shuffle ? lanes : shuffle;
    lanes = lanes < count ? lanes : count;
    order.lanes = lanes ? lanes : 1;
    order.block = (uint32_t)(count / ((uint64_t)ORDER_LANE_BLOCKS * order.lanes));
    order.block = order.block < 1 ? 1 : order.block < ORDER_BLOCK ? order.block : ORDER_BLOCK;
    const uint32_t blocks = (count - 1) / order.block + 1;
    order.window = shuffle / order.lanes;
    order.epoch = epoch;
    order.seed = seed;
    order.blocks = permutation_begin(draw_lanes_seed(seed, epoch, 0xFFFFFFFFu, 0), blocks);
    order.short_at = (uint32_t)permutation_inverse(&order.blocks, blocks - 1);
    return order;
}

FDSL_HD uint32_t draw_mix(uint32_t word)
{
    word = (word ^ word >> 16) * 0x85ebca6bu;
    word = (word ^ word >> 13) * 0xc2b2ae35u;
    return word ^ word >> 16;
}

/* Returns the permutation of a window. */
FDSL_HD struct permutation draw_window(const struct draw_order *order, uint32_t lane, uint32_t window,
                                       uint32_t size)
{
#ifndef __CUDA_ARCH__
    struct draw_memo_window *kept = order->memo ? &order->memo->windows[lane % DRAW_MEMO_LANES] : NULL;
    if (kept && kept->lane == lane && kept->window == window && kept->size == size)
        return kept->within;
#endif
    const struct permutation within =
        permutation_begin(draw_lanes_seed(order->seed, order->epoch, lane, window), size);
#ifndef __CUDA_ARCH__
    const struct draw_memo_window entry = {lane, window, size, within};
    if (kept)
        *kept = entry;
#endif
    return within;
}

/* Returns index `index` of a lane after the permutation of its window. */
FDSL_HD uint32_t draw_in_window(const struct draw_order *order, uint32_t lane, uint32_t length,
                                uint32_t index)
{
    const uint32_t window = index / order->window, first = window * order->window;
    const uint32_t size = length - first < order->window ? length - first : order->window;
    if (size < 2)
        return index;
    const struct permutation within = draw_window(order, lane, window, size);
    return first + (uint32_t)permutation_at(&within, index - first);
}

/* Returns the block of the set at place `place` of the permuted blocks. */
FDSL_HD uint32_t draw_block(const struct draw_order *order, uint32_t place)
{
#ifndef __CUDA_ARCH__
    struct draw_memo_block *kept = order->memo ? &order->memo->blocks[place % DRAW_MEMO_BLOCKS] : NULL;
    if (kept && kept->next == place + 1)
        return kept->at;
#endif
    const uint32_t at = (uint32_t)permutation_at(&order->blocks, place);
#ifndef __CUDA_ARCH__
    const struct draw_memo_block entry = {place + 1, at};
    if (kept)
        *kept = entry;
#endif
    return at;
}

FDSL_HD uint32_t draw_lanes_at(const struct draw_order *order, uint32_t position)
{
    if (order->window == 0)
        return position;
    const uint32_t lane = position % order->lanes, least = order->count / order->lanes;
    const uint32_t longer = order->count % order->lanes; /* the first lanes have one sample more */
    const uint32_t begin = lane * least + (lane < longer ? lane : longer);
    const uint32_t at = begin + draw_in_window(order, lane, least + (lane < longer), position / order->lanes);
    /* The last block of the set may be short. The blocks after it in the permutation begin earlier by the
     * missing samples. */
    const uint32_t last = (uint32_t)order->blocks.count - 1, size = order->count - last * order->block;
    const uint32_t before = order->short_at * order->block;
    if (at >= before && at - before < size)
        return last * order->block + (at - before);
    const uint32_t moved = at < before ? at : at + (order->block - size);
    return draw_block(order, moved / order->block) * order->block + moved % order->block;
}

/* The sample at position `index` of the order, 0 <= index < count. */
FDSL_HD uint32_t draw_order_at(const struct draw_order *order, uint32_t index)
{
    if (order->lanes)
        return draw_lanes_at(order, index);
    if (order->half_bits == 0)
        return (uint32_t)permutation_at(&order->blocks, index);
    uint32_t bits = order->half_bits, mask = (UINT32_C(1) << bits) - 1;
    do {
        uint32_t left = index >> bits, right = index & mask;
        for (uint32_t i = 0; i < ORDER_ROUNDS; i++) {
            uint32_t next = left ^ (draw_mix(right + order->keys[i]) & mask);
            left = right;
            right = next;
        }
        index = left << bits | right;
    } while (index >= order->count);
    return index;
}

/* ---- Augmentation ---- */

/* Random changes of colour and Gaussian blur (data/jitter.h). */
#define JITTER_STEPS 4 /* brightness, contrast, saturation, hue */

struct jitter {
    float probability;       /* of the four steps, which have a random order */
    float low[JITTER_STEPS]; /* range of the factors, or for the hue of turns, from -0.5 to 0.5 */
    float high[JITTER_STEPS];
    float grayscale;            /* probability that an image loses its colours */
    float blur;                 /* probability of blur */
    uint32_t kernel;            /* side of the blur's kernel in pixels, odd */
    float sigma_min, sigma_max; /* range of the blur's standard deviation, in pixels */
};

/* Returns whether a step changes images. */
FDSL_HD bool jitter_step_on(const struct jitter *jitter, uint32_t step)
{
    const float neutral = step < JITTER_STEPS - 1 ? 1.0f : 0.0f;
    return jitter->probability > 0 && !(jitter->low[step] == neutral && jitter->high[step] == neutral);
}

/* Returns whether images may change at all. */
FDSL_HD bool jitter_on(const struct jitter *jitter)
{
    return jitter->probability > 0 || jitter->grayscale > 0 || jitter->blur > 0;
}

/* Which operations RandAugment draws, and what a magnitude means (data/rand_augment.h). */
enum augment_policy_kind {
    AUGMENT_TORCHVISION, /* torchvision's 14 operations, always applied; magnitudes 0 to 30 */
    AUGMENT_PDP2026,     /* the class of the PDP 2026 scripts: these and invert; with 1 - probability, an
                            operation gets the magnitude 0; nearest pixels; whole pixels of translation */
    AUGMENT_TIMM         /* timm's 15 operations, each applied with `probability`; magnitudes 0 to 10 */
};
#define AUGMENT_TIMM_UNIT     10  /* the magnitude at which timm's operations are strongest */
#define AUGMENT_DEVIATION_MAX 100 /* larger deviations mean uniform magnitudes, as in timm */

struct augment_policy {
    enum augment_policy_kind kind;
    uint8_t fill[3];    /* per channel: the value outside of sheared, moved and rotated images */
    double probability; /* not AUGMENT_TORCHVISION */

    /* Only AUGMENT_TIMM */
    double deviation, limit; /* of the magnitudes: standard deviation; upper limit */
    bool increasing;         /* posterize, solarize and the enhancements become stronger with the magnitude */
    bool bicubic, random_filter; /* the filter; random_filter: each operation draws bilinear or bicubic */
};

/* The parts that random-resized-crop cuts out: the range of their share of the area, and of width / height
 * with its logarithms. Zeros: 0.08 to 1, and 3/4 to 4/3. See crop_range_set() in data/image.h. */
struct crop_range {
    double scale[2], ratio[2], log_ratio[2];
};

struct augment {
    uint32_t shift; /* largest shift in pixels, vertically and horizontally; equivalent to padding each
                       side with `shift` zeros before normalisation, and then cropping at random */
    bool flip;      /* mirror each sample horizontally with probability 1/2 */

    /* With crop, RandAugment, changes of colour or repeats, new images are computed from the stored samples
     * in every epoch (train/augment.h). */
    bool crop, bicubic;  /* random-resized-crop, and its filter */
    bool random_filter;  /* each crop draws bilinear or bicubic */
    uint32_t operations; /* RandAugment: number of operations per sample; 0: off */
    double magnitude;    /* RandAugment: see struct rand_augment */
    struct augment_policy policy;
    uint32_t repeats;        /* copies of each sample in a step; 0 means 1 */
    float erasing;           /* probability of random erasing */
    bool erase_last;         /* random erasing follows the mixing of samples, and so does not mix its noise */
    uint32_t height, width;  /* size of the images, for random erasing */
    struct jitter color;     /* zeros: none */
    struct crop_range range; /* of `crop` */
};

/* Returns whether new images are computed from the stored samples before a batch is gathered. */
FDSL_HD bool augment_computes(const struct augment *augment)
{
    return augment->crop || augment->operations > 0 || augment->repeats > 1 || jitter_on(&augment->color);
}

/* A rectangle of pixels of an upright image. */
struct image_box {
    uint32_t left, top, width, height;
};

/* Random erasing of one sample: the rectangle is filled with noise, which depends on the other members. */
struct draw_erase {
    struct image_box box; /* height 0: nothing is erased */
    uint32_t sample, epoch;
    uint64_t seed;
};

/* The augmentation of one sample. The output at (y, x) is the input at (y + down, x' + right). Without a
 * flip, x' is x; with a flip, x' is width - 1 - x. Counter: 0, sample, epoch. */
struct draw_move {
    int32_t down, right;
    bool flip;
    struct draw_erase erase; /* set by box_move() (data/random_boxes.h) */
};

/* Returns whether a sample is mirrored in runs with augment->flip. */
FDSL_HD bool draw_flip(uint64_t seed, uint32_t epoch, uint32_t sample)
{
    return philox(philox_key(seed), 0, sample, epoch, DRAW_AUGMENT).word[2] >> 31;
}

/* Returns how a sample is shifted and mirrored, without random erasing. If augment_computes() is true, `flip`
 * is false, because augment_image() mirrors the sample instead. */
FDSL_HD struct draw_move draw_move(const struct augment *augment, uint64_t seed, uint32_t epoch,
                                   uint32_t sample)
{
    struct draw_move move = {0, 0, false, {{0, 0, 0, 0}, 0, 0, 0}};
    if (augment->shift == 0 && !augment->flip)
        return move;
    struct philox_block block = philox(philox_key(seed), 0, sample, epoch, DRAW_AUGMENT);
    uint32_t span = 2 * augment->shift + 1;
    move.down = (int32_t)philox_below(block.word[0], span) - (int32_t)augment->shift;
    move.right = (int32_t)philox_below(block.word[1], span) - (int32_t)augment->shift;
    move.flip = augment->flip && !augment_computes(augment) && block.word[2] >> 31;
    return move;
}

/* Returns the index (row * width + column) of the input element that becomes output (y, x), or -1 if the
 * element is outside the image. */
FDSL_HD int32_t draw_moved(const struct draw_move *move, uint32_t height, uint32_t width, uint32_t y,
                           uint32_t x)
{
    int32_t from_y = (int32_t)y + move->down;
    int32_t from_x = (int32_t)(move->flip ? width - 1 - x : x) + move->right;
    bool inside = from_y >= 0 && from_y < (int32_t)height && from_x >= 0 && from_x < (int32_t)width;
    return inside ? from_y * (int32_t)width + from_x : -1;
}

#endif
