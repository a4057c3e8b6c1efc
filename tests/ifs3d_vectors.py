#!/usr/bin/env python3
"""Prints tests/ifs3d_vectors.h: classes, views and point clouds of the formula ifs3d, as NumPy computes them from the
definition in src/synth/ifs3d.h. Independent of the C code.

    pip install numpy && tests/ifs3d_vectors.py > tests/ifs3d_vectors.h      (about four minutes)
"""
import io

import numpy as np

POINTS, WALKS, LENGTH, BURN = 9999, 32, 313, 512
single, wide = np.float32, np.longdouble  # 64 bits of mantissa hold the exact product of two float32


def fnv(data, value=0xCBF29CE484222325):
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def search(seed, threshold, count):
    """The law of the published category_search.py, given the seed: the text of each class file, and its maps."""
    np.random.seed(seed)
    found = []
    while len(found) < count:
        maps = np.empty((np.random.randint(2, 8), 13))
        for row in maps:
            row[:12] = np.random.uniform(-1.0, 1.0, 12)
            row[12] = abs(np.linalg.det(row[:9].reshape(3, 3)))
        maps[:, 12] /= sum(maps[:, 12].tolist())
        sums, total = [], 0.0
        for row in maps:
            total += row[12]
            sums.append(total)
        choices = np.searchsorted(sums, np.random.random(POINTS + 1))
        points = walk(maps, choices[:POINTS].tolist())
        with np.errstate(all="ignore"):
            low, high = points.min(), points.max()
            scaled = ((points - low) / (high - low)) * 2.0 - 1.0
            centred = scaled - np.array([sum(axis) / 10000 for axis in scaled])[:, None]
            accepted = not np.isnan(centred[1]).any() and (np.var(centred, axis=1) > threshold).all()
        if accepted:
            text = io.BytesIO()
            np.savetxt(text, maps, delimiter=",")
            found.append((text.getvalue(), maps))
    return found


def walk(maps, choices):
    """The points after each step, from the origin."""
    rows, x, y, z, points = maps.tolist(), 0.0, 0.0, 0.0, []
    for choice in choices:
        if choice < len(rows):
            a, b, c, d, e, f, g, h, i, j, k, l = rows[choice][:12]
            x, y, z = x * a + y * b + z * c + j, x * d + y * e + z * f + k, x * g + y * h + z * i + l
        points.append((x, y, z))
    return np.array(points).T


def philox(key, c0, c1, c2, c3):
    """Philox4x32-10 of arrays of counters (Salmon et al., SC 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(c0, c1, c2, c3))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & mask,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & mask,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1)


def fma(a, b, c):
    return (wide(1) * a * b + c).astype(single) if isinstance(a, np.ndarray) else single(wide(a) * wide(b) + wide(c))


WEIGHTS = [(i, f / 10) for i in range(12) for f in range(4, 17) if f != 10 or i == 0]
WEIGHTS[108] = (8, 0.6)  # as in the published file


def scaled(maps, row, key):
    """The points of a drawing in float32, (points, 3), or None if a coordinate overflows."""
    maps = maps.copy()
    coefficient, factor = WEIGHTS[row]
    maps[:, coefficient] *= factor
    words = philox(key, np.arange((POINTS + 3) // 4), 0, 8, 0).reshape(-1)[:POINTS]
    sums, total = [], 0.0
    for probability in maps[:, 12]:
        total += probability
        sums.append(total)
    choices = np.minimum(np.searchsorted(sums, words.astype(np.float64) * 2.0**-32), len(maps) - 1).tolist()
    low, high, total, points = np.inf, -np.inf, np.zeros(3), []
    for first in range(0, WALKS * LENGTH, LENGTH):
        begin, end = max(0, first - BURN), min(first + LENGTH, POINTS)
        own = walk(maps, choices[begin:end])[:, first - begin :]
        low, high = min(low, own.min()), max(high, own.max())
        total = total + np.array([sum(axis, 0.0) for axis in own])
        points.append(own)
    points = np.concatenate(points, 1)
    centre, scale = (total + (low + high) * 0.5) / 10000, np.float64(2) / (high - low)
    if not (high - low <= 1e25 and np.isfinite(scale) and np.isfinite(centre).all()):
        return None
    return ((points.T - centre) * scale).astype(single)


def drawing(maps, weights, seed, number, instance):
    key = philox((seed, 0), instance // 12, 0, number, 5)[:2]
    row = instance // 12 % weights
    points = scaled(maps, row, key)
    return key, scaled(maps, 6, key) if points is None else points


def unit(word):
    return single(int(word) >> 8) * single(2.0**-24)


def camera(key, view, sphere):
    if sphere:
        for attempt in range(100):
            words = philox(key, view, attempt // 2, 9, 0)
            a, b = (fma(single(2), unit(words[attempt % 2 * 2 + i]), single(-1)) for i in range(2))
            square = fma(a, a, b * b)
            if 0 < square < 1:
                break
        inverse, away = single(1) / np.sqrt(square), np.sqrt(single(1) - square)
        x, y, z = single(2) * a * away, fma(single(-2), square, single(1)), single(2) * b * away
        right = (-(b * inverse), single(0), a * inverse)
        up = (-(right[2] * y), fma(right[2], x, -(right[0] * z)), right[0] * y)
        return right, up, (x, y, z)
    degrees = np.radians(30 * (view + 1))
    cosine, sine = single(round(np.cos(degrees), 12)), single(round(np.sin(degrees), 12))
    angle = single(np.pi**2 / 180) * fma(single(2), unit(philox(key, view, 0, 9, 0)[0]), single(-1))
    square = angle * angle
    near_one = fma(square, fma(square, single(1 / 24), single(-0.5)), single(1))
    near_zero = angle * fma(square, fma(square, single(1 / 120), single(-1 / 6)), single(1))
    c, s = fma(cosine, near_one, -(sine * near_zero)), fma(sine, near_one, cosine * near_zero)
    return (s, single(0), c), (single(0), single(1), single(0)), (c, single(0), -s)


def view(points, key, number, sphere, side):
    right, up, forward = camera(key, number, sphere)
    focal, half = single(1 / np.tan(np.radians(22.5))), single(side / 2)
    x, y, z = points.T

    def along(direction, start):
        return fma(x, direction[0], fma(y, direction[1], fma(z, direction[2], single(start))))

    depth = along(forward, 4)
    inverse = single(1) / depth
    column = fma(along([v * focal for v in right], 0) * inverse, half, half)
    row = fma(along([v * focal for v in up], 0) * inverse, half, half)
    kept = (depth >= 1) & (depth <= 100) & (column >= 0) & (row >= 0) & (column < side) & (row < side)
    image = np.zeros((side, side), np.uint8)
    image[row[kept].astype(int), column[kept].astype(int)] = 255
    return image


def cloud(classes, weights, seed, index, instance):
    key, own = drawing(classes[index], weights, seed, index, instance)
    other = int(philox(key, 0, 0, 10, 0)[0]) * (len(classes) - 1) >> 32
    other += other >= index
    return np.concatenate([own[:8000], drawing(classes[other], weights, seed, other, instance)[1][:2000]])


SEARCHES = [(1, 0.05, 30), (7, 0.05, 10), (2024, 0.1, 4)]
IMAGES = [
    # sphere, weights, seed, class, instance, side
    (False, 145, 0, 0, 0, 224), (False, 145, 0, 3, 11, 224), (False, 145, 5, 7, 12 * 6 + 5, 224),
    (False, 145, 1, 12, 12 * 108 + 3, 97), (False, 145, 0, 19, 1740 * 3 + 4, 224), (False, 1, 0, 8, 17, 224),
    (True, 145, 0, 0, 0, 224), (True, 145, 9, 5, 12 * 144 + 7, 224), (True, 145, 0, 11, 400, 31), (True, 145, 0, 2, 9, 1),
]  # fmt: skip

if __name__ == "__main__":
    print("/* Made by tests/ifs3d_vectors.py. */")
    print("static const struct {\n    uint32_t seed;\n    double threshold;\n    uint32_t count;\n    uint64_t hash;")
    print("} searches[] = {")
    for seed, threshold, count in SEARCHES:
        found = search(seed, threshold, count)
        if seed == 1:
            classes = [maps for _, maps in found]
        print(f"    {{{seed}, {threshold}, {count}, UINT64_C(0x{fnv(b''.join(text for text, _ in found)):016x})}},")
    print("};\n\nstatic const struct {\n    uint32_t sphere, weights, seed, class_index, instance, res;\n    uint64_t hash;")
    print("} images[] = {")
    for sphere, weights, seed, index, instance, side in IMAGES:
        key, points = drawing(classes[index], weights, seed, index, instance)
        image = view(points, key, instance % 12, sphere, side)
        print(f"    {{{int(sphere)}, {weights}, {seed}, {index}, {instance}, {side}, UINT64_C(0x{fnv(image.tobytes()):016x})}},")
    print("};\n\nstatic const struct {\n    uint32_t seed, class_index, instance;\n    uint64_t hash;\n} clouds[] = {")
    for seed, index, instance in [(0, 0, 0), (3, 17, 12 * 50 + 1)]:
        points = cloud(classes, 145, seed, index, instance)
        print(f"    {{{seed}, {index}, {instance}, UINT64_C(0x{fnv(points.tobytes()):016x})}},")
    print("};")
