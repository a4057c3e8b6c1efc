"""Data sets for scripts/compare/pretrain.py: class folders of PNG files, or tar shards, written with fdsl-bench. Needs only the
standard library."""

import functools
import pathlib
import re
import shutil
import struct
import subprocess
import sys

from pretrain_rows import Refused

AGAIN = "write the data set again with --make-data"


# ---- Writing ----


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


# ---- Checking ----


def fault(options):
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
