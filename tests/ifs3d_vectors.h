/* Made by tests/ifs3d_vectors.py. */
static const struct {
    uint32_t seed;
    double threshold;
    uint32_t count;
    uint64_t hash;
} searches[] = {
    {1, 0.05, 30, UINT64_C(0x6457896fe1c0dfe0)},
    {7, 0.05, 10, UINT64_C(0x21c16a5ebd5c6b23)},
    {2024, 0.1, 4, UINT64_C(0x3adc998fbf6baa8b)},
};

static const struct {
    uint32_t sphere, weights, seed, class_index, instance, res;
    uint64_t hash;
} images[] = {
    {0, 145, 0, 0, 0, 224, UINT64_C(0x452936a4fc1f2959)},
    {0, 145, 0, 3, 11, 224, UINT64_C(0xf4ec2ec7b81a6591)},
    {0, 145, 5, 7, 77, 224, UINT64_C(0x5ace9722b95331d2)},
    {0, 145, 1, 12, 1299, 97, UINT64_C(0xe102455d92304cee)},
    {0, 145, 0, 19, 5224, 224, UINT64_C(0xc5365ba72d183332)},
    {0, 1, 0, 8, 17, 224, UINT64_C(0xa93aa814299d89aa)},
    {1, 145, 0, 0, 0, 224, UINT64_C(0x16f49c4521f3c337)},
    {1, 145, 9, 5, 1735, 224, UINT64_C(0xceab739262458bf2)},
    {1, 145, 0, 11, 400, 31, UINT64_C(0x6c541b4f7a1005c3)},
    {1, 145, 0, 2, 9, 1, UINT64_C(0xaf64724c8602eb6e)},
};

static const struct {
    uint32_t seed, class_index, instance;
    uint64_t hash;
} clouds[] = {
    {0, 0, 0, UINT64_C(0x4edadd3cab4b0dcf)},
    {3, 17, 601, UINT64_C(0x5fa8f0ef3fe4a237)},
};
