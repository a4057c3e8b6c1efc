"""Random numbers of fdsl-bench's workload train, for scripts/compare/pretrain.py --order train: the order of samples, and how
the samples of a step are mixed.

src/data/random_draws.h defines the order (draw_order), src/train/data.c defines the numbers of samples with --fresh, and src/train/feed.c
defines the mixing. The functions of the order use only operators, so an index may be an int or an int64 tensor of PyTorch. Needs
only the standard library.
"""

import math

MASK = 0xFFFFFFFF
DRAW_ORDER, DRAW_MIX, ROUNDS = 0x54550000, 0x545E0000, 8


def philox(key, counter):
    """Returns the block of Philox4x32-10 as four words. `key`: two words; `counter`: four words."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK, (left >> 32) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def mix(word):
    word = ((word ^ word >> 16) * 0x85EBCA6B) & MASK
    word = ((word ^ word >> 13) * 0xC2B2AE35) & MASK
    return word ^ word >> 16


class Order:
    """The order of the samples 0 to count - 1 in an epoch. Epochs are numbered from 0."""

    def __init__(self, seed, epoch, count):
        self.count, self.bits = count, 1
        while count > 1 << 2 * self.bits:
            self.bits += 1
        key = seed & MASK, seed >> 32
        self.keys = [word for block in range(ROUNDS // 4) for word in philox(key, (block, 0, epoch, DRAW_ORDER))]

    def permuted(self, index):
        """Applies the Feistel network once. Results may be `count` or larger."""
        mask = (1 << self.bits) - 1
        left, right = index >> self.bits, index & mask
        for key in self.keys:
            left, right = right, left ^ (mix((right + key) & MASK) & mask)
        return left << self.bits | right

    def at(self, index):
        """Returns the sample at a position, for an int."""
        index = self.permuted(index)
        while index >= self.count:
            index = self.permuted(index)
        return index

    def all(self, indices):
        """Returns the samples at all positions of a tensor."""
        found = self.permuted(indices)
        while True:
            outside = found >= self.count
            if not outside.any():
                return found
            found[outside] = self.permuted(found[outside])


def fresh_step(classes):
    """Returns the distance between the image numbers of a sample in consecutive epochs with --fresh."""
    return ((1 << 32) + classes - 1) // classes * classes


# ---- Mixing ----


def open_unit(word):
    """Maps a random word to (0, 1)."""
    return (word + 0.5) / 2**32


def log_gamma_draw(alpha, which, draw):
    """Returns the logarithm of a random number of the distribution Gamma(alpha, 1). `which` is 0 or 1."""
    d = (alpha + 1 if alpha < 1 else alpha) - 1 / 3
    c, attempt = 1 / math.sqrt(9 * d), 0
    while True:
        words = [open_unit(word) for word in draw(1 + 2 * attempt + which)]
        normal = math.sqrt(-2 * math.log(words[0])) * math.cos(2 * math.pi * words[1])
        root, attempt = 1 + c * normal, attempt + 1
        v = root**3
        if root > 0 and math.log(words[2]) < normal * normal / 2 + d * (1 - v + math.log(v)):
            return math.log(d * v) + (math.log(words[3]) / alpha if alpha < 1 else 0)


def cut_box(height, width, share, middle):
    """Returns the exact share of an image outside CutMix's rectangle, and the rectangle's top, bottom, left and right. The
    rectangle takes about 1 - `share` of the area. Half of each side is rounded down, as in timm, and the parts outside the image
    are cut off. `middle(size)` draws the middle of the rectangle on an axis."""
    side, box = math.sqrt(1 - share), []
    for size in (height, width):
        half, centre = int(size * side) // 2, middle(size)
        box += [max(0, centre - half), min(size, centre + half)]
    return 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width), box


def mix_of(seed, epoch, step, height, width, mixup, cutmix):
    """Returns (share, box), which define how the samples of a step of an epoch are mixed. share: the weight of a sample in its
    mixed sample. box: top, bottom, left and right of CutMix's rectangle; None for MixUp. `mixup` and `cutmix`: parameters of the
    distributions, or 0."""
    def draw(first):
        return philox((seed & MASK, seed >> 32), (first, step, epoch, DRAW_MIX))
    words = draw(0)
    cut = not mixup or (cutmix > 0 and words[0] >> 31 == 1)
    one, other = (log_gamma_draw(cutmix if cut else mixup, which, draw) for which in (0, 1))
    share = 1 / (1 + math.exp(other - one))
    if not cut:
        return share, None
    rest = iter(words[1:])
    return cut_box(height, width, share, lambda size: next(rest) * size >> 32)
