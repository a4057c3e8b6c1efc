"""Data sets for scripts/compare/pretrain.py: class folders of PNG files, or tar shards, written with fdsl-bench."""

import pathlib
import shutil
import subprocess

from pretrain_rows import Refused


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
        status = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise Refused(f"{options.bench}: {error.strerror}; build it, or name it with --bench") from None
    if status:
        raise Refused("fdsl-bench --prepare failed; see above", 1)
    if store == "files":
        into_class_folders(part, options.classes)
    part.rename(target)


def into_class_folders(folder, classes):
    """Turns the folders of numbered images and labels that fdsl-bench wrote into the layout of ImageFolder: CLASS/NUMBER.png."""
    for label in range(classes):
        (folder / f"class-{label:06d}").mkdir()
    for image in folder.glob("[0-9]*/*.png"):
        text = image.with_suffix(".cls")
        image.rename(folder / f"class-{int(text.read_text()):06d}" / f"{int(image.stem):08d}.png")
        text.unlink()
    for old in [path for path in folder.iterdir() if path.name[0].isdigit()]:
        old.rmdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:  # the index of fdsl-bench
        path.unlink()
