#!/usr/bin/env python3
"""Prints tests/published_vectors.h: what CPython's `random`, NumPy, `noise` and repr() compute.

    pip install numpy noise && tests/published_vectors.py > tests/published_vectors.h
"""
import random
import struct
import sys

import noise
import numpy


def bits(value):
    return "0x%016x" % struct.unpack("<Q", struct.pack("<d", value))[0]


def table(kind, name, values):
    print("static const %s %s[] = {%s};" % (kind, name, ", ".join(values)))


def python_draws(seed):
    """The draws of test_published.c, in the same order; every number as the bits of a double."""
    random.seed(seed)
    draws = []
    for _ in range(300):  # more than two blocks of 624 words
        draws += [random.random(), random.uniform(-2.5, 7), random.randint(-400, 400), random.randint(0, 256)]
        draws += [random.randint(5, 5), random.expovariate(1 / 100), random.getrandbits(32)]
    return draws


def numpy_draws(seed):
    numpy.random.seed(seed)
    draws = []
    for _ in range(300):
        draws += [numpy.random.random_sample(), numpy.random.uniform(-1, 1), int(numpy.random.randint(2, 8))]
    return draws


def digest(draws):
    """FNV-1a of the bits, so that the table stays small; the first draws are in full."""
    value = 0xCBF29CE484222325
    for draw in draws:
        for byte in struct.pack("<d", float(draw)):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return "0x%016x" % value


print("/* Written by tests/published_vectors.py with CPython %s and NumPy %s. Doubles are stored as their bits. */"
      % (sys.version.split()[0], numpy.__version__))
seeds = [0, 1, 40, 4294967295, 2**40 + 7]
table("uint64_t", "python_seeds", map(str, seeds))
table("uint64_t", "python_first", [bits(float(draw)) for seed in seeds for draw in python_draws(seed)[:7]])
table("uint64_t", "python_digests", [digest(python_draws(seed)) for seed in seeds])
seeds = [1, 100, 4294967295]
table("uint32_t", "numpy_seeds", map(str, seeds))
table("uint64_t", "numpy_first", [bits(float(draw)) for seed in seeds for draw in numpy_draws(seed)[:3]])
table("uint64_t", "numpy_digests", [digest(numpy_draws(seed)) for seed in seeds])

random.seed(48)
places = [random.uniform(0, 10000) for _ in range(4000)] + [0.0, 1.0, 255.5, 256.0, 1023.99, 1024.0, 9999.999]
table("uint64_t", "noise_digest", [digest([noise.pnoise1(place) for place in places])])
table("uint64_t", "noise_first", [bits(noise.pnoise1(place)) for place in places[:4]])

reals = [2.0**i for i in range(-17, 24)] + [10.0**i for i in range(-7, 23)] + [0.0, -0.5, 0.1, 1 / 3, 163.0, 104.5, 9.5e-05]
reals += [random.uniform(0, 0.1) for _ in range(40)] + [random.uniform(1, 2) for _ in range(20)]
table("uint64_t", "repr_values", map(bits, reals))
print("static const char *const repr_texts[] = {%s};" % ", ".join('"%r"' % real for real in reals))
