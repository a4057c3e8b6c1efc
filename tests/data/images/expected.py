#!/usr/bin/env python3
"""Writes the JPEG and WebP files of this folder with Pillow, the pixels that Pillow decodes from them (NAME.jpg.png), and
expected.tsv: the hash of the pixels of every PNG file in pngsuite/, as pypng decodes them.

    pip install pillow numpy pypng && python3 tests/data/images/expected.py

pypng and Pillow do not use libpng. Pillow must agree with pypng, except for 16-bit values, which Pillow cannot keep.
"""
import io
import pathlib
import struct

import numpy as np
import png
from PIL import Image, ImageOps

FOLDER = pathlib.Path(__file__).parent


def fnv(data):
    """FNV-1a, 64 bits."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value


def png_pixels(path):
    """8-bit gray or RGB, by the rules of docs/decode.md: no transparency, 16 bits rounded to 8."""
    width, height, rows, info = png.Reader(filename=str(path)).read()
    most = (1 << info["bitdepth"]) - 1
    raw = np.array([list(row) for row in rows]).reshape(height, width, -1)
    if "palette" in info:
        return np.array([entry[:3] for entry in info["palette"]], "u1")[raw[..., 0]]
    gray = info["greyscale"]
    colours = raw[..., : 1 if gray else 3]
    pixels = ((colours * 255 + most // 2) // most).astype("u1")
    if most < 65535:
        pillow = Image.open(path).convert("L" if gray else "RGB")
        assert (np.asarray(pillow).reshape(pixels.shape) == pixels).all(), path
    return pixels


def write_table():
    with open(FOLDER / "expected.tsv", "w", encoding="ascii") as out:
        for path in sorted((FOLDER / "pngsuite").glob("*.png")):
            pixels = png_pixels(path)
            height, width, channels = pixels.shape
            print(path.name, width, height, channels, f"{fnv(pixels.tobytes()):016x}", sep="\t", file=out)


def picture(width, height, seed):
    y, x = np.mgrid[0:height, 0:width]
    waves = 127 + 90 * np.sin(x[..., None] / (3 + np.arange(3)) + y[..., None] / 7.0)
    return np.clip(waves + np.random.default_rng(seed).normal(0, 8, (height, width, 3)), 0, 255).astype("u1")


def exif(orientation, kind, order):
    """EXIF data with one entry, of type SHORT (kind H) or LONG (kind I)."""
    value = struct.pack(order + kind, orientation).ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1)
    return b"Exif\0\0" + head + struct.pack(order + "HHI", 0x112, 3 if kind == "H" else 4, 1) + value + bytes(4)


def strip(data, marker):
    """Removes all segments with this marker."""
    out, at = data[:2], 2
    while True:
        size = 2 + struct.unpack(">H", data[at + 2 : at + 4])[0]
        if data[at + 1] != marker:
            out += data[at : at + size]
        at += size
        if data[at - size + 1] == 0xDA:
            return out + data[at:]


def write_jpegs():
    def encode(seed, mode="RGB", **options):
        stream = io.BytesIO()
        Image.fromarray(picture(43, 27, seed)).convert(mode).save(stream, "JPEG", **{"quality": 85, **options})
        return stream.getvalue()

    files = {
        "gray": encode(1, "L"),
        "444_optimized": encode(2, subsampling=0, optimize=True),
        "422": encode(3, subsampling=1),
        "420_low": encode(4, subsampling=2, quality=20),
        "progressive": encode(5, progressive=True),
        "restart": encode(6, restart_marker_blocks=2),
        "rgb": encode(7, keep_rgb=True, subsampling=0),
        "cmyk": encode(8, "CMYK"),
        "cmyk_without_adobe": strip(encode(9, "CMYK"), 0xEE),
        "without_huffman_tables": strip(encode(10, quality=60), 0xC4),
        "exif_short_little": encode(11, exif=exif(6, "H", "<")),
        "exif_long_big": encode(12, exif=exif(8, "I", ">")),
    }
    for name, data in files.items():
        (FOLDER / f"{name}.jpg").write_bytes(data)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        image = image.convert("RGB") if image.mode != "L" else image
        image.save(FOLDER / f"{name}.jpg.png", optimize=True, exif=b"")


def write_webps():
    colours = picture(23, 19, 13)
    alpha = np.random.default_rng(13).integers(0, 256, (19, 23, 1), "u1")
    turned = Image.Exif()
    turned[0x112] = 6
    files = {
        "lossy": (colours, {"quality": 60}),
        "lossless": (colours, {"lossless": True}),
        "alpha": (np.concatenate([colours, alpha], -1), {"quality": 70, "exact": True}),
        "exif": (colours, {"lossless": True, "exif": turned.tobytes()}),
    }
    for name, (pixels, options) in files.items():
        path = FOLDER / f"{name}.webp"
        Image.fromarray(pixels).save(path, **options)
        ImageOps.exif_transpose(Image.open(path)).convert("RGB").save(f"{path}.png", optimize=True)


write_jpegs()
write_webps()
write_table()
