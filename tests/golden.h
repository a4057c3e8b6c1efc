/* Golden answers: XXH3 (64 bits) of the pixels of some images. The random streams are frozen, so a difference
 * here means that images which users have made before can no longer be made.
 *
 * Where `preset` is NULL the image is of the benchmark class with these vertices and orbits, else of one of
 * the first ten classes of the preset. `number` is what --instance takes. */
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

#endif
