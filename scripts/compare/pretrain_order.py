"""The order of samples in fdsl-bench's workload train, for scripts/compare/pretrain.py --order train.

src/data/draws.h defines the order (draw_order), and src/train/data.c the numbers of samples with --fresh. The functions use
only operators, so an index may be an int or an int64 tensor of PyTorch. Needs only the standard library.
"""

MASK = 0xFFFFFFFF
DRAW_ORDER, ROUNDS = 0x54550000, 8


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
    """The order of the samples 0 to count - 1 in an epoch, which is counted from 0."""

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
