#!/usr/bin/env python3
"""Measures pre-training throughput in PyTorch, and compares images generated on the fly with loaded images.

  torchrun --nproc-per-node 4 scripts/compare/pretrain.py --source live --compile --out results/pretrain/rows.csv
  scripts/compare/pretrain.py --source folder --images 50000 --make-data DIR    # writes the data set
  scripts/compare/pretrain.py --source folder --data DIR --out results/pretrain/rows.csv
  scripts/compare/pretrain.py --source live --evaluate --steps 20000 --curve results/pretrain/curve.csv
  scripts/compare/pretrain.py --model vit-tiny --order train --step-log results/steps.csv  # as fdsl-bench's workload train

Sources: constant (one batch that stays on the device: the upper limit of the speed), live (fdsl, generator fused; omp on a CPU),
bat, gbase, omp (fdsl with these generators), folder (PNG files in class folders, ImageFolder), shards (tar files, webdataset).
Every source delivers uint8 images; the recipe is applied to them on the training device, identically for every source.
docs/pretrain.md describes the rows.

Training needs PyTorch and timm; scripts/compare/requirements.txt has the versions. Sources that generate images, and --evaluate, need the package fdsl (PYTHONPATH=python
FDSL_LIBRARY=build/lib/libfdsl.so); folder needs torchvision, shards needs webdataset, and both need Pillow. Exit status: 0 done, 1 a failure, 2 usage, 4 a package or a GPU is
missing, 130 interrupted. Under torchrun, the status is torchrun's.
"""

import argparse
import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
import pretrain_rows  # noqa: E402  (in this folder)
from pretrain_rows import COLUMNS, CURVE_COLUMNS, STEP_COLUMNS, Refused  # noqa: E402
from shared import PROGRAM, status_of  # noqa: E402

SOURCES = ("constant", "live", "bat", "gbase", "omp", "folder", "shards")
PRESETS = ("uji", "visualatom", "lowercompute", "paper-1000", "lowercompute-1000")
PARTS = ("randaugment", "mixup", "cutmix", "erasing")
# The defaults of options that a recipe replaces. `paper` approximates pdp2026 and has no random crops; docs/recipes.md has the others.
RECIPES = {
    "paper": {},
    "pdp2026": {"amp": "fp16", "schedule": "step", "warmup_lr": 1e-6, "decay_of": "matrices"},
    "cvpr2023": {"amp": "fp16", "warmup_lr": 1e-6, "min_lr": 1e-5, "lr_overlap": True, "decay_of": "matrices", "batch": 64,
                 "model": "deit_base_patch16_224", "classes": 21000, "preset": "visualatom", "images": 21_000_000},
    "deit": {"amp": "fp16", "warmup_lr": 1e-6, "min_lr": 1e-5, "lr_overlap": True, "decay_of": "matrices", "lr_warmup": None},
}
PACKAGES = {"torch": "pip install torch", "timm": "pip install timm",
            "fdsl": "make lib, then PYTHONPATH=python FDSL_LIBRARY=build/lib/libfdsl.so"}
OF_SOURCE = {"folder": {"torchvision": "pip install torchvision", "PIL": "pip install pillow"},
             "shards": {"webdataset": "pip install webdataset", "PIL": "pip install pillow"}}


# Options that change the result of training and have no column of their own. Rows record them in the column `settings`.
SETTINGS = ("recipe", "order", "preset", "channels", "channels_last", "drop_path", "label_smoothing", "lr", "lr_warmup", "warmup_lr",
            "schedule", "schedule_steps", "decay_steps", "decay_rate", "min_lr", "lr_overlap", "weight_decay", "decay_of")


def limits(low, high):
    return f"from {low} to {high}" if high < math.inf else f"of at least {low}"


def integer(low, high=math.inf):
    def parse(text):
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number {limits(low, high)}")
        return int(text)
    return parse


def number(low, high=math.inf):
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {limits(low, high)}")
        return value
    return parse


def read_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--source", choices=SOURCES, default="live", help="where images come from (default live)")
    add("--model", default="deit_tiny_patch16_224", help="model of timm, or vit-micro, vit-tiny, vit-small or "
                                                                    "vit-base of fdsl-bench (default deit_tiny_patch16_224)")
    add("--tiny", action="store_true", help="a vision transformer of 2 layers instead of --model, for tests")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device that trains (default cuda)")
    add("--batch", type=integer(1), default=256, help="images per rank and step (default 256)")
    add("--steps", type=integer(1), help="timed steps (default 100, unless --seconds or --time-limit is given)")
    add("--seconds", type=number(0), help="end the timed steps after this many seconds, evaluations not included")
    add("--time-limit", type=number(0), help="end the training run after this many seconds, warm-up steps and evaluations included")
    add("--warmup-steps", type=integer(0), default=20, help="number of untimed steps at the start (default 20)")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--channels-last", action="store_true", help="store inputs and weights in the format channels_last")
    add("--amp", choices=("bf16", "fp16", "off"), default="bf16", help="precision of autocast: fp16 with a loss scale, as in the "
        "published scripts; off: train in fp32 (default bf16)")
    add("--no-amp", dest="amp", action="store_const", const="off", help="the same as --amp off")
    add("--threads", type=integer(1), help="CPU threads of the generator omp, and of PyTorch on a CPU, for all ranks "
                                          "of this host together (default: all)")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="seed of images, weights, order and augmentation (default 0)")
    images = parser.add_argument_group("images")
    add = images.add_argument
    add("--preset", default="paper-1000", help="preset of the classes (default paper-1000)")
    add("--classes", type=integer(2), default=1000, help="number of classes (default 1000)")
    add("--res", type=integer(1), default=512, help="side of the drawn image in pixels (default 512)")
    add("--out-res", type=integer(4), default=224, help="side of the network's input image in pixels (default 224)")
    add("--channels", type=int, choices=(1, 3), default=3, help="image channels; 3 channels have the same gray (default 3)")
    add("--images", type=integer(1), help="images per epoch if the source generates them, or images that --make-data writes "
                                         "(default 1000000)")
    add("--order", choices=("source", "same", "train"), default="source", help=
        "same: in each epoch, the images of --data (or the first --images images) in the order in which --source folder reads them; "
        "train: the images and the order of fdsl-bench's workload train, with --images samples per epoch and --fresh; source: "
        "new images in each epoch, or those of --data (default source)")
    add("--data", help="folder of the data set, for --source folder and shards, and for --order same")
    add("--workers", type=integer(0), default=16, help="worker processes per rank, for --source folder and shards (default 16)")
    add("--make-data", metavar="DIR", help="write a data set of --images images for --source folder or shards, then end")
    add("--bench", default=PROGRAM, help="path of fdsl-bench, for --make-data")
    add_recipe(parser.add_argument_group("recipe").add_argument)
    add_outputs(parser.add_argument_group("evaluation and output").add_argument)
    parser.set_defaults(**RECIPES[parser.parse_args(arguments).recipe])
    options = parser.parse_args(arguments)
    changed = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) != parser.get_default(name)}
    options.settings = " ".join(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}" if isinstance(value, str)
                                                                 else f" {value:.9g}") for name, value in changed.items())
    return options


def add_recipe(add):
    add("--recipe", choices=tuple(RECIPES), default="paper", help="pdp2026, cvpr2023, deit: the transforms and the defaults of these "
        "published scripts (docs/recipes.md); paper: an approximation of pdp2026 that needs less time (default paper)")
    add("--augment", choices=("recipe", "none"), default="recipe", help="recipe: with RandAugment, MixUp, CutMix and erasing; "
                                                                  "none: without these four (default recipe)")
    for part in PARTS:
        add(f"--no-{part}", action="store_true", help=f"leave {part} out of the recipe")
    add("--lr", type=number(0), default=0.001, help="highest learning rate of AdamW (default 0.001)")
    add("--weight-decay", type=number(0), default=0.05, help="weight decay of AdamW (default 0.05)")
    add("--decay-of", choices=("all", "matrices"), default="all", help="what the weight decay applies to: all parameters; or "
        "matrices, as in fdsl-bench: neither biases, norms and positions nor the class token (default all)")
    add("--lr-warmup", type=integer(0), default=5000, help="steps of the linear warm-up (default 5000; --recipe deit: those of 5 epochs "
        "of --images)")
    add("--warmup-lr", type=number(0), help="rate of the first step; the last step of the warm-up then is one before --lr, as in timm "
        "(default: the first step has --lr / --lr-warmup)")
    add("--schedule", choices=("cosine", "step"), default="cosine", help="how the rate falls after the warm-up (default cosine)")
    add("--schedule-steps", type=integer(1), help="step at which the cosine ends (default: the last step; if "
                                                "--seconds or --time-limit replaces --steps, the rate stays constant)")
    add("--min-lr", type=number(0), default=0.0, help="rate at the end of the cosine (default 0)")
    add("--lr-overlap", action="store_true", help="count the cosine from the first step, not from the end of the warm-up")
    add("--decay-steps", type=integer(1), default=42000, help="steps between two decays of --schedule step (default 42000)")
    add("--decay-rate", type=number(0, 1), default=0.5, help="factor of each decay (default 0.5)")
    add("--drop-path", type=number(0, 1), default=0.1, help="rate of stochastic depth (default 0.1)")
    add("--label-smoothing", type=number(0, 1), default=0.1, help="label smoothing (default 0.1)")


def add_outputs(add):
    add("--evaluate", action="store_true", help="measure loss and top-1 on held-out images, which training never uses")
    add("--evaluate-every", type=integer(1), default=100_000, help="images between evaluations (default 100000)")
    add("--held-out", type=integer(1), default=10_000, help="held-out images (default 10000)")
    add("--curve", metavar="FILE", help="CSV file to append each evaluation to; needs --evaluate")
    add("--out", metavar="FILE", help="CSV file to append the row to")
    add("--step-log", metavar="FILE", help="CSV file to append rows about the steps to, with the columns of fdsl-bench --log")
    add("--log-steps", type=integer(1), default=100, help="steps between two rows of --step-log (default 100)")
    add("--checkpoint", metavar="FILE", help="write weights, optimizer and step to this file at the end, for --resume and --init of "
        "fdsl-bench")
    add("--checkpoint-steps", type=integer(1), help="also write --checkpoint every N steps")
    add("--resume", action="store_true", help="continue from --checkpoint if the file exists; needs --order train or same, or --source "
        "constant")
    add("--save-init", metavar="FILE", help="write the initial weights as safetensors, for fdsl-bench --init FILE")


# ---- Writing a data set ----


def make_data(options):
    """Writes --images images with fdsl-bench: class folders, or tar shards. The folder appears when it is complete."""
    target = pathlib.Path(options.make_data)
    part = target.with_name(target.name + ".part")
    if target.exists():
        raise Refused(f"--make-data {target}: it exists; remove it, or choose another folder")
    shutil.rmtree(part, ignore_errors=True)
    store = "shards" if options.source == "shards" else "files"
    command = [options.bench, "--prepare", str(part), "--from", "synth", "--store", store, "--encode", "png", "--preset",
               options.preset, "--classes", str(options.classes), "--samples", str(options.images), "--res",
               str(options.res), "--seed", str(options.seed)]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--shards", str(max(1, options.images // 1000))] if store == "shards" else []
    try:
        prepare(command, str(part), str(target))
        if store == "files":
            into_class_folders(part, options.classes)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{target}: {options.images} images of {options.classes} classes")


def prepare(command, part, target):
    """Runs fdsl-bench. Its errors and its progress name the target."""
    try:
        bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise Refused(f"{command[0]}: {error.strerror}; build it, or name it with --bench") from None
    with bench:
        for line in bench.stderr:
            print(line.replace(part, target), end="", file=sys.stderr, flush=True)
    if bench.returncode:
        raise Refused("fdsl-bench --prepare failed; see above", 1)


def into_class_folders(folder, classes):
    """Turns the folders of numbered images and labels that fdsl-bench wrote into the layout of ImageFolder: CLASS/NUMBER.png."""
    for label in range(classes):
        (folder / f"class-{label:06d}").mkdir()
    for image in list(folder.glob("**/[0-9]*/*.png")):  # folders of numbered images are in not-imagefolder/
        text = image.with_suffix(".cls")
        image.rename(folder / f"class-{int(text.read_text()):06d}" / f"{int(image.stem):08d}.png")
        text.unlink()
    for old in [path for path in folder.iterdir() if not path.name.startswith("class-") and path.is_dir()]:
        shutil.rmtree(old)
    for path in [path for path in folder.iterdir() if path.is_file()]:  # the index of fdsl-bench
        path.unlink()


# ---- Checking a data set ----


def data_fault(options):
    """Returns the message of an error if --data does not fit the other options, else an empty string."""
    folder = pathlib.Path(options.data)
    if not folder.is_dir():
        return f"--data {folder}: no such folder; write one with --make-data {folder}"
    try:
        return shards_fault(folder, options) if options.source == "shards" else folders_fault(folder, options)
    except OSError as error:
        return f"--data {folder}: {error.filename} cannot be read: {error.strerror}; change its permissions"


def shards_fault(folder, options):
    """Compares --classes and --res with those in the index of fdsl-bench, if the shards have one."""
    if not any(folder.glob("*.tar")):
        return f"--data {folder}: it has no tar files; write some with --source shards --make-data DIR"
    for index in folder.glob("*.index"):
        with open(index, encoding="utf-8", errors="replace") as file:
            written = dict(re.findall(r" --(classes|res)=(\d+)", file.readline()))
        for name, value in written.items():
            given = getattr(options, name)
            if int(value) != given:
                return f"--data {folder}: it was written with --{name} {value}, not {given}; give --{name} {value}"
    return ""


def folders_fault(folder, options):
    classes = [path for path in folder.iterdir() if path.is_dir()]
    if not any(any(path.iterdir()) for path in classes):
        return f"--data {folder}: it has no class folders with images; write some with --make-data DIR"
    if len(classes) != options.classes:
        return (f"--data {folder}: it has {len(classes)} class folders, but --classes is {options.classes}; "
                f"give --classes {len(classes)}")
    return same_fault(folder, options) if options.order == "same" else ""


@functools.cache
def images_of(folder):
    """Returns the paths of the files in the class folders."""
    return [path for path in pathlib.Path(folder).glob("*/*") if path.is_file()]


def same_fault(folder, options):
    """Returns why --order same cannot generate the images in the class folders, else an empty string. Reads the size of the first
    image only."""
    images = images_of(options.data)
    numbers = sorted(int(path.stem) if path.stem.isdecimal() else -1 for path in images)
    head = b""
    if numbers and numbers == list(range(len(images))):
        with open(min(images), "rb") as file:
            head = file.read(24)
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n":
        return f"--data {folder}: --order same needs PNG files with the numbers 0 to N - 1; write them with --make-data DIR"
    if options.images != len(images):
        return f"--images {options.images}: --data {folder} has {len(images)}, and --order same uses all of them; drop --images"
    width, height = struct.unpack(">II", head[16:])
    if (width, height) != (options.res, options.res):
        return f"--data {folder}: its images have {width} x {height} pixels, but --res is {options.res}; give --res {width}"
    return ""


# ---- Checking the options ----


def set_defaults(options):
    """Fills in defaults that depend on other options."""
    options.parts = [part for part in PARTS if options.augment == "recipe" and not getattr(options, f"no_{part}")]
    options.augment = "recipe" if len(options.parts) == len(PARTS) else "+".join(options.parts) or "none"
    options.whole = len(options.parts) == len(PARTS)
    options.formula = "visualatom" if options.recipe == "cvpr2023" else "auto"
    options.source_res = options.out_res if options.recipe == "paper" else options.res  # the others crop the canvas
    if not (options.steps or options.seconds or options.time_limit):
        options.steps = 100
    if options.tiny:
        options.model = "tiny"
    if options.images is None and (options.order != "same" or options.make_data):
        options.images = 1_000_000
    elif options.images is None and options.data:
        options.images = len(images_of(options.data))
    if options.lr_warmup is None:  # DeiT's 5 epochs
        options.lr_warmup = 5 * (options.images or 0) // (options.batch * int(os.environ.get("WORLD_SIZE", 1)))


def nearest(name, known):
    import difflib
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def refuse(options):
    """Refuses options that cannot work, before PyTorch is imported."""
    ranks, of_data = int(os.environ.get("WORLD_SIZE", 1)), options.source in OF_SOURCE
    mixes, images = {"mixup", "cutmix"} & set(options.parts), options.images or 0
    uses_data = options.data and not options.make_data and (of_data or options.order == "same")
    fault = data_fault(options) if uses_data else ""
    for words, is_so in (
        (f"--preset {options.preset}: unknown; {nearest(options.preset, PRESETS)}", options.preset not in PRESETS),
        (f"--batch {options.batch}: MixUp and CutMix pair images; give an even number", mixes and options.batch % 2),
        (f"--make-data is for --source folder or shards, not {options.source}", options.make_data and not of_data),
        (f"--images {images}: give at least one per class ({options.classes})",
            options.make_data and images < options.classes),
        (f"--source {options.source} needs --data DIR", of_data and not options.data and not options.make_data),
        ("--order same is for --source live, omp and folder",
            options.order == "same" and options.source not in ("live", "omp", "folder")),
        ("--order train is for --source live and omp", options.order == "train" and options.source not in ("live", "omp")),
        (f"--images {images}: --order train needs fewer than 2^31", options.order == "train" and images >= 1 << 31),
        ("--order same needs --data DIR or --images N", options.images is None),
        (fault, fault),
        (f"--images {images}: fewer than the {options.batch * ranks} images of one step (the global batch)",
            options.source in ("live", "omp", "constant") and images < options.batch * ranks),
        (f"--recipe {options.recipe} has all parts of its script; drop --augment none and --no-...",
            options.recipe != "paper" and not options.whole),
        (f"--recipe {options.recipe} has images of 3 channels; drop --channels 1", options.recipe != "paper" and options.channels != 3),
        ("--amp fp16 needs a GPU; use --amp off", options.amp == "fp16" and options.device == "cpu"),
        ("--resume and --checkpoint-steps need --checkpoint FILE",
            (options.resume or options.checkpoint_steps) and not options.checkpoint),
        ("--resume needs images that can begin at any step: --order train or same, or --source constant",
            options.resume and options.order == "source" and options.source != "constant"),
        ("--curve needs --evaluate", options.curve and not options.evaluate),
        (f"--data is for --source folder and shards, and for --order same, not for {options.source}",
            options.data and not of_data and options.order != "same"),
        (f"--held-out {options.held_out}: give at least one per rank", options.evaluate and options.held_out < ranks),
        (f"--source {options.source} needs a GPU; on a CPU, use live or omp",
            options.device == "cpu" and options.source in ("bat", "gbase")),
        (f"--out-res {options.out_res} is larger than --res {options.res}",
            options.out_res > options.res and not options.make_data),
    ):
        if is_so:
            raise Refused(words)
    for path, columns in ((options.out, COLUMNS), (options.curve, CURVE_COLUMNS), (options.step_log, STEP_COLUMNS)):
        if path:
            pretrain_rows.check_writable(path, columns)


def uses_fdsl(options):
    return options.evaluate or options.source not in OF_SOURCE


def need_packages(options):
    more = {"safetensors": "pip install safetensors"} if options.save_init else {}
    more |= {"torchvision": "pip install torchvision"} if options.recipe == "pdp2026" else {}
    more |= {"PIL": "pip install pillow"} if options.recipe in ("cvpr2023", "deit") else {}
    for package, remedy in {**PACKAGES, **OF_SOURCE.get(options.source, {}), **more}.items():
        if (package != "fdsl" or uses_fdsl(options)) and importlib.util.find_spec(package) is None:
            raise Refused(f"the Python package {package} is not installed; to get it: {remedy}", 4)


def versions(options):
    import timm
    import torch
    fdsl = ""
    if uses_fdsl(options):
        import fdsl as package
        fdsl = package.__version__
    return {"torch": torch.__version__, "timm": timm.__version__, "fdsl": fdsl}


def measure(options):
    """Trains, then writes and prints the row on the first rank."""
    import torch
    from pretrain_training import Ranks, Training, device_of
    device = device_of(options)
    ranks = Ranks(device)
    try:
        result = Training(options, device, ranks).run()
    except torch.OutOfMemoryError:
        raise Refused(f"the GPU has too little memory for --batch {options.batch}; use a smaller one", 1) from None
    except RuntimeError as error:
        if ranks.count == 1 or "by peer" not in str(error):  # a connection of gloo was closed
            raise
        raise Refused("another rank has ended; see its message", 1) from None
    ranks.leave()  # not after an error: other ranks may be waiting for this one, and torchrun ends them
    if ranks.rank:
        return
    row = pretrain_rows.row_of(result, options, versions(options))
    pretrain_rows.progress("")
    pretrain_rows.print_table(row)
    if options.out:
        pretrain_rows.append(options.out, [row], COLUMNS)


def work(arguments):
    """Returns the exit status. Only the first rank prints errors that occur on all ranks: wrong options and missing packages."""
    options = read_arguments(arguments)
    set_defaults(options)
    try:
        refuse(options)
        if options.make_data:
            make_data(options)
        else:
            need_packages(options)
            measure(options)
    except Refused as error:
        if os.environ.get("RANK", "0") == "0" or error.status == 1:
            print(f"compare/pretrain.py: {error}", file=sys.stderr)
        return error.status
    return 0


def main(arguments):
    return status_of("compare/pretrain.py", lambda: work(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
