#!/usr/bin/env python3
"""Compares the pixels of --rand-augment with those of the libraries that the published scripts use.

  scripts/check/augment_pixels.py [--bench ./fdsl-bench] [--rounds 24]

fdsl-bench applies one operation to each of 24 colour images, and writes the results (--save-batch). For each image, the script applies
every operation of the library, with both signs, to the original: torchvision's transforms v2 for the policy pdp2026-m28, and timm for
rand-m9-n1-inc1-p1. One of these results must have the pixels that fdsl-bench wrote, except for BOUNDS, and each operation must occur.

Needs PyTorch, torchvision, timm and Pillow (scripts/compare/requirements.txt), and a build with libpng. Runs on a CPU in about a minute.
Exit status: 0 all pixels are within the bounds; 1 a failure, 2 usage, 4 a package is missing.
"""

import argparse
import importlib.util
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEIGHT, WIDTH, CLASSES, EACH = 33, 47, 3, 8
# Largest share of the values of an image that differ by more than STEPS. A position may be nearest to two pixels (pdp2026), or on the
# border of the image (timm). torchvision rounds the gray image down before it blends it with the colours.
BOUNDS = {"pdp2026-m28": 0.03, "rand-m9-n1-inc1-p1": 0.002}
STEPS = {"pdp2026-m28": 2, "rand-m9-n1-inc1-p1": 1}
OPTIONS = {"pdp2026-m28": ["--rand-augment-ops", "1"], "rand-m9-n1-inc1-p1": ["--interpolation", "bicubic"]}


class Failed(Exception):
    pass


def write_images(folder):
    """Writes smooth colour images with noise, in class folders."""
    from PIL import Image
    draw = random.Random(1)
    for index in range(CLASSES * EACH):
        (folder / f"class-{index % CLASSES}").mkdir(exist_ok=True)
        slopes = [(draw.uniform(-3, 3), draw.uniform(-3, 3), draw.randrange(60, 200)) for _ in range(3)]
        image = Image.new("RGB", (WIDTH, HEIGHT))
        image.putdata([tuple(max(0, min(255, int(a * x + b * y + c + draw.gauss(0, 20)))) for a, b, c in slopes)
                       for y in range(HEIGHT) for x in range(WIDTH)])
        image.save(folder / f"class-{index % CLASSES}" / f"{index:03d}.png")


def saved(bench, data, seed, out, options):
    """Returns the images that fdsl-bench writes with these options, by name."""
    from PIL import Image
    words = [bench, "--variant", "train-naive", "--model", "logreg", "--data", str(data), "--test-data", str(data), "--batch", str(CLASSES * EACH),
             "--epochs", "1", "--seed", str(seed), "--mean", "0.5", "--std", "0.5", "--save-batch", f"{CLASSES * EACH}:{out}", "--dry-run",
             *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"fdsl-bench ended with status {done.returncode}: {done.stderr.strip()}")
    return {path.name: Image.open(path).convert("RGB") for path in sorted(out.iterdir())}


def of_torchvision():
    """Returns a function that yields the name and the pixels of every result of the class of the PDP 2026 scripts."""
    import torch
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import pretrain_recipes
    change = pretrain_recipes.rand_augment_with_invert()(num_ops=1, magnitude=28, fill=128)

    def results(image):
        import numpy
        pixels = torch.from_numpy(numpy.array(image)).movedim(2, 0)
        for name, (levels, signed) in change._AUGMENTATION_SPACE.items():
            values = levels(change.num_magnitude_bins, HEIGHT, WIDTH)
            strength = 0.0 if values is None else float(values[change.magnitude])
            for sign, magnitude in (("", 0.0), ("+", strength), ("-", -strength if signed else strength)):
                if sign and values is None:
                    continue
                changed = change._apply_image_or_video_transform(pixels, name, magnitude, interpolation=change.interpolation,
                                                                 fill=change._fill)
                yield name + (sign if signed else sign and "+"), changed.movedim(0, 2).numpy()
    return results


def of_timm():
    """Returns a function that yields the name and the pixels of every result of timm's operations at the magnitude 9."""
    from PIL import Image
    from timm.data import auto_augment
    hyper = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BICUBIC}
    names = auto_augment._RAND_INCREASING_TRANSFORMS
    operations = {name: auto_augment.AugmentOp(name, prob=1.0, magnitude=9, hparams=hyper) for name in names}

    def results(image):
        import numpy
        for name, operation in operations.items():
            random.seed(1)
            for number, changed in enumerate({operation(image.copy()).tobytes() for _ in range(12)}):  # both signs, if there are two
                yield f"{name} {number}", numpy.frombuffer(changed, numpy.uint8).reshape(HEIGHT, WIDTH, 3)
    return results


def off(one, other, steps):
    """Returns the share of values that differ by more than `steps`."""
    return float((abs(one.astype("int16") - other.astype("int16")) > steps).mean())


def check(policy, results, bench, folder, rounds):
    """Compares all images of all rounds. Returns the number of failures, and prints a line per operation."""
    import numpy
    worst, counts, failures = {}, {}, 0
    for seed in range(rounds):
        plain = saved(bench, folder / "data", seed, folder / f"{policy}-{seed}-plain", [])
        changed = saved(bench, folder / "data", seed, folder / f"{policy}-{seed}", ["--rand-augment", policy, *OPTIONS[policy]])
        if plain.keys() != changed.keys() or len(plain) != CLASSES * EACH:
            raise Failed(f"{len(plain)} and {len(changed)} files, or other names")
        for name, image in plain.items():
            mine = numpy.array(changed[name])
            share, operation = min((off(mine, right, STEPS[policy]), operation) for operation, right in results(image))
            counts[operation] = counts.get(operation, 0) + 1
            worst[operation] = max(worst.get(operation, 0), share)
            failures += share > BOUNDS[policy]
    possible = {operation for operation, _ in results(image)}
    missing = {operation.rstrip("+- 01") for operation in possible} - {operation.rstrip("+- 01") for operation in counts}
    for operation in sorted(counts):
        print(f"{policy:20} {operation:24} {counts[operation]:4} images, at most {100 * worst[operation]:.3f} % of the values differ by more than {STEPS[policy]}")
    if missing - {"Identity"}:
        print(f"{policy}: no image got {', '.join(sorted(missing))}; raise --rounds")
        failures += 1
    print(f"{policy}: {rounds * CLASSES * EACH} images, {failures} failures (bound {100 * BOUNDS[policy]} %)")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--bench", default=str(ROOT / "fdsl-bench"), help="path of fdsl-bench")
    parser.add_argument("--rounds", type=int, default=24, help=f"runs of {CLASSES * EACH} images for each policy (default 24)")
    options = parser.parse_args()
    for package in ("torch", "torchvision", "timm", "PIL"):
        if not importlib.util.find_spec(package):
            print(f"check/augment_pixels.py: the Python package {package} is not installed; pip install -r scripts/compare/requirements.txt",
                  file=sys.stderr)
            return 4
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "data").mkdir()
        write_images(folder / "data")
        try:
            failures = sum(check(policy, results(), options.bench, folder, options.rounds)
                           for policy, results in (("pdp2026-m28", of_torchvision), ("rand-m9-n1-inc1-p1", of_timm)))
        except Failed as error:
            print(f"check/augment_pixels.py: {error}", file=sys.stderr)
            return 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
