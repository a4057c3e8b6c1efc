#!/usr/bin/env python3
"""Writes tests/data/augment/pillow.bin: operations of timm's RandAugment on small images, as Pillow computes them.

    pip install pillow && tests/pillow_vectors.py        # with Pillow 13.0.0; tests/test_augment_pillow.c reads the file

timm applies its operations with these calls of Pillow. Each record is `<7id`, then the values of the result, channels first:
operation and strength (enums of src/data/rand_augment.h and src/data/random_draws.h), whether severities increase, filter (0 bilinear, 1
bicubic), height, width, channels, and the level of timm. With the operation -1, the result is a resized image of 20 x 17 pixels.
"""
import pathlib
import struct

from PIL import Image, ImageEnhance, ImageOps

OPERATIONS = ("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
              "sharpness", "posterize", "solarize", "autocontrast", "equalize", "invert", "solarize_add")
FILTERS = (Image.BILINEAR, Image.BICUBIC)
FILL = (124, 116, 104)
SIZES = ((13, 11, 3), (5, 3, 3), (7, 1, 1), (1, 1, 3), (9, 8, 1))  # height, width, channels
ENHANCE = {"brightness": ImageEnhance.Brightness, "color": ImageEnhance.Color, "contrast": ImageEnhance.Contrast,
           "sharpness": ImageEnhance.Sharpness}


def picture(height, width, channels):
    plane = height * width
    values = [0 if i % 5 == 0 else (i * 37 + i * i % 61 * 3) % 256 for i in range(channels * plane)]
    bands = [Image.frombytes("L", (width, height), bytes(values[c * plane:(c + 1) * plane])) for c in range(channels)]
    return bands[0] if channels == 1 else Image.merge("RGB", bands)


def changed(name, image, level, negative, increasing, resample):
    share, sign = level / 10, -1 if negative else 1
    fill = FILL[0] if image.mode == "L" else FILL
    affine = {"shear_x": (1, 0.3 * share * sign, 0, 0, 1, 0), "shear_y": (1, 0, 0, 0.3 * share * sign, 1, 0),
              "translate_x": (1, 0, 0.45 * share * sign * image.width, 0, 1, 0),
              "translate_y": (1, 0, 0, 0, 1, 0.45 * share * sign * image.height)}
    if name in affine:
        return image.transform(image.size, Image.AFFINE, affine[name], resample=resample, fillcolor=fill)
    if name == "rotate":
        return image.rotate(30 * share * sign, resample=resample, fillcolor=fill)
    if name in ENHANCE:
        return ENHANCE[name](image).enhance(max(0.1, 1 + 0.9 * share * sign) if increasing else 0.1 + 1.8 * share)
    if name == "posterize":
        bits = 4 - int(share * 4) if increasing else int(share * 4)
        if bits < 1:  # black until Pillow 12, which the scripts of timm rely on; later versions refuse 0 bits
            return image.point([0] * 256 * len(image.getbands()))
        return image if bits >= 8 else ImageOps.posterize(image, bits)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(share * 256) if increasing else int(share * 256))
    if name == "solarize_add":
        added = [min(255, i + int(share * 110)) if i < 128 else i for i in range(256)]
        return image.point(added * len(image.getbands()))
    return {"autocontrast": ImageOps.autocontrast, "equalize": ImageOps.equalize, "invert": ImageOps.invert}[name](image)


def record(numbers, level, result):
    return struct.pack("<7id", *numbers, level) + b"".join(band.tobytes() for band in result.split())


def main():
    out = b""
    for size in SIZES:
        image = picture(*size)
        for operation, name in enumerate(OPERATIONS[1:], 1):
            moves, enhances = 1 <= operation <= 5, 6 <= operation <= 9
            levels = (0.0,) if name in ("autocontrast", "equalize", "invert") else (9.0, 3.3, 10.0)
            for level in levels:
                for negative in (0, 1) if moves or enhances else (0,):
                    for increasing in (1,) if moves or len(levels) == 1 or name == "solarize_add" else (1, 0):
                        for way in (0, 1) if moves else (0,):
                            if negative and not increasing:
                                continue
                            result = changed(name, image, level, negative, increasing, FILTERS[way])
                            out += record((operation, negative, increasing, way, *size), level, result)
    for size in ((41, 50, 3), (9, 12, 3), (300, 17, 1)):
        for way, resample in enumerate(FILTERS):
            out += record((-1, 0, 0, way, *size), 0.0, picture(*size).resize((17, 20), resample))
    target = pathlib.Path(__file__).parent / "data/augment/pillow.bin"
    target.write_bytes(out)


main()
