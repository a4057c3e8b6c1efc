/* Golden hashes: XXH3 (64 bits) of the pixels of some images and of some converted outputs. These hashes must
 * never change: users must be able to generate the same images again.
 *
 * If `preset` is NULL, the image is of the program's default class, with these numbers of vertices and
 * orbits. Otherwise the image belongs to one of the first ten classes of the preset. `number` is the value of
 * --instance. */
#ifndef FDSL_TESTS_GOLDEN_H
#define FDSL_TESTS_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

struct golden {
    uint64_t seed;
    const char *formula, *preset;
    uint32_t vertices, orbits, res;
    uint64_t number, hash;
};

static const struct golden golden_images[] = {
    {0, "uji", NULL, 1000, 200, 512, 0, 0xbe66547506e0ebd4},
    {0, "uji", NULL, 1000, 200, 512, 1, 0xf01cdb51f7807ad6},
    {1, "uji", NULL, 1000, 200, 224, 0, 0x8728c842f09a08d1},
    {7, "uji", NULL, 500, 100, 256, 4294967296u, 0x3caf4391c995bf04},
    {0, "uji", NULL, 7, 9, 61, 2, 0x523c554c50484cbb},
    {18446744073709551615u, "uji", NULL, 997, 33, 513, 5, 0x71d406190a9dd141},
    {0, "uji", "uji", 0, 0, 224, 3, 0xb582597ac754c599},
    {0, "uji", "visualatom", 0, 0, 224, 17, 0x0e19d41a02d93aea},
    {42, "uji", "lowercompute", 0, 0, 128, 29, 0x18f330a68dcc2339},
    {0, "visualatom", NULL, 1000, 200, 512, 0, 0x65ed3e32e26c86a4},
    {0, "visualatom", NULL, 1000, 200, 512, 1, 0x7880fcbb543f45c5},
    {1, "visualatom", NULL, 1000, 200, 224, 0, 0x32d11d304604d104},
    {7, "visualatom", NULL, 500, 100, 256, 4294967296u, 0xb0b7c05f7ab6ab73},
    {0, "visualatom", NULL, 7, 9, 61, 2, 0xd1b78d600c13413f},
    {18446744073709551615u, "visualatom", NULL, 997, 33, 513, 5, 0xf53cd49e52b961bc},
    {0, "visualatom", "uji", 0, 0, 224, 3, 0xe7b00ca75cbdf393},
    {0, "visualatom", "visualatom", 0, 0, 224, 17, 0x76fe50aa4219c85e},
    {42, "visualatom", "lowercompute", 0, 0, 128, 29, 0x50f056afccc385af},
};

/* The hash of the outputs of two images that are generated with `options`. The images have 224 x 224 pixels
 * before conversion. Their classes are among the first ten of the preset uji. */
struct golden_output {
    const char *options;
    uint64_t hash;
};

static const struct golden_output golden_outputs[] = {
    {"--dtype u8", 0x3a41da0c504b055f},
    {"--channels 3", 0x1dba1226018e9d77},
    {"--channels 3 --layout nhwc", 0x256bb0462ea21a93},
    {"--dtype f32", 0x27e031eea4c234f0},
    {"--dtype f16 --channels 3 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225", 0x73fce5b56c7a84a9},
    {"--dtype bf16 --channels 3 --layout nhwc --mean 0.5 --std 0.5", 0x96e1ee8640563e5b},
    {"--out-res 96", 0x6ce10b9c13bbca4b},
    {"--out-res 331", 0x8c903ad0eccd399f},
    {"--dtype f32 --out-res 97 --channels 3 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225",
     0x978523929fd56060},
    {"--out-res 160 --fit crop", 0x9c9d5042a4145e83},
    {"--dtype f16 --out-res 160 --fit crop --channels 3 --mean 0.5 --std 0.25", 0x8fb8a3e0b72a3390},
};

/* Images of other formulas: the options of a batch, and the hashes of its images and its masks (0: no masks).
 */
struct golden_formula {
    const char *line;
    uint64_t hash, mask;
};

static const struct golden_formula golden_formulas[] = {
    {"--formula rcdb --batch 8", 0x43a6b119dc36cd6a, 0},
    {"--formula rcdb --batch 5 --res 97 --classes 5 --seed 18446744073709551615 --instance 4294967290",
     0xac221b79f0e2ca2b, 0},
    {"--formula rcdb --batch 3 --res 1025 --classes 3", 0xdb45df6a835d3603, 0},
    {"--formula segrcdb --preset segrcdb-ranges --classes 254 --batch 2", 0xe55cc3750f8ab6d7,
     0x5bc54259656decb2},
    {"--formula segrcdb --preset segrcdb-ranges --batch 4 --res 97 --classes 3 --seed 7 --instance "
     "4294967295",
     0x0070ffa05e2c18ae, 0xd8138c278f83c511},
};

#endif
