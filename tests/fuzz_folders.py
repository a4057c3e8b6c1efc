#!/usr/bin/env python3
"""Compares how fdsl-bench and torchvision's ImageFolder read random trees of class folders.

    tests/fuzz_folders.py PROGRAM [--seed N] [--cases N | --time SECONDS] [--keep DIR]

Each case creates a tree with odd names, nested folders, links, dot files, sidecars and files that are no images.
--prepare then reads it, and image_folder() below, which has ImageFolder's rule. Both must find the same files with the
same labels in the same order, or the program must refuse the tree, name the place, and have one of the reasons that
excuse() finds in the tree. Exit status 1 after the first difference; --keep DIR then keeps the tree.
"""

import argparse
import csv
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
PARTS = ["a", "b", "Z", "a.b", "cat.0", "3", "red panda", "__x__", "é", "e\u0301", "\ue000", "😀", "\udcff", "\udcc3", "a,b",
         'q"', "-n", "~", "{1..2}", "%s", "x.png", "train", "val", "node.index", "a.tar", "ß", "\u0130", "..c", "d..", "\r"]
ENDS = [".jpg", ".png", ".JPEG", ".Png", ".webp", ".bmp", ".TIFF", ".pgm", ".ppm", ".tif", ".json", ".txt", ".npy", "",
        ".jpg.bak", ".cls.png", ".jpgx", ".", ".tar"]


def image_folder(root, allow_empty=False):
    """Lists (path, label) as ImageFolder does. Raises FileNotFoundError for a class without an image."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        before = len(samples)
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            samples += [(os.path.relpath(os.path.join(folder, file), root), label)
                        for file in sorted(files) if file.lower().endswith(IMAGES)]
        if len(samples) == before and not allow_empty:
            raise FileNotFoundError(name)
    return samples


def name_of(chance):
    name = "".join(chance.choice(PARTS) for _ in range(chance.choice((1, 1, 1, 2))))
    return ("." if chance.random() < 0.02 else "") + name


def fill(chance, folder, depth, outside):
    """Fills a folder with random entries."""
    for _ in range(chance.randrange(1, 6)):
        path = os.path.join(folder, name_of(chance))
        kind = chance.random()
        if kind < 0.2 and depth < 3:
            if not os.path.lexists(path):
                os.mkdir(path)
                fill(chance, path, depth + 1, outside)
            continue
        path += chance.choice(ENDS)
        if os.path.lexists(path) or os.path.basename(path) in (".", ".."):
            continue
        if kind > 0.98:
            os.symlink(chance.choice(("nothing", "..", "../..", ".")), path)
        elif kind > 0.92:
            os.symlink(os.path.join(outside, chance.choice(("file", "folder"))), path)
        elif kind > 0.91:
            os.mkfifo(path)
        else:
            with open(path, "wb") as file:
                file.write(os.fsencode(path[-40:]) or b"x")


def make_tree(chance, folder):
    """Creates the tree `folder`/tree."""
    root, outside = os.path.join(folder, "tree"), os.path.join(folder, "outside")
    os.makedirs(os.path.join(outside, "folder"))
    os.mkdir(root)
    for name in ("file", "folder/linked.png", "folder/linked.txt"):
        with open(os.path.join(outside, name), "w") as file:
            file.write("linked")
    for _ in range(chance.randrange(1, 6)):
        path = os.path.join(root, name_of(chance))
        if not os.path.lexists(path):
            os.mkdir(path)
            if chance.random() > 0.03:
                fill(chance, path, 0, outside)
                path = os.path.join(path, "sure" + chance.choice(ENDS[:9]))
                if not os.path.lexists(path):
                    with open(path, "w") as file:
                        file.write("x")
    for _ in range(chance.choice((0, 0, 1, 2))):
        path = os.path.join(root, name_of(chance) + chance.choice(ENDS))
        if not os.path.lexists(path) and not path.endswith((".tar", ".index")):
            with open(path, "w") as file:
                file.write("x")
    return root


def hidden(path):
    return any(part.startswith(".") for part in path.split("/"))


def find_loop(folder, above, under):
    """Returns "seen" if a link leads back to one of its parent folders, "hidden" if only below a dot folder."""
    real, found = os.path.realpath(folder), None
    if real in above:
        return "hidden" if under else "seen"
    for entry in os.scandir(folder):
        if found != "seen" and entry.is_dir():
            found = find_loop(entry.path, above + (real,), under or hidden(entry.name)) or found
    return found


def excuse(root, message):
    """Returns whether a refusal is right: the tree has what the message says, at the place that it names."""
    bad = {"the class folder has no image": lambda path: os.path.isdir(path),
           "a symbolic link to": lambda path: os.path.islink(path) and not os.path.exists(path),
           "No such file or directory": lambda path: os.path.islink(path) and not os.path.exists(path),
           "Too many levels of symbolic links": lambda path: os.path.islink(path),
           "links back to one of its parent folders": lambda path: os.path.isdir(path),
           "not a regular file": lambda path: not os.path.isfile(path)}
    for words, is_bad in bad.items():
        if words in message:
            place = message.split("fdsl-bench: ", 1)[1].split(": " + words)[0].split(" " + words)[0].rstrip("/")
            if "\\x" in place or "\\r" in place:  # the message shows a name that a terminal would not
                return True
            return is_bad(place)
    top = [name for name in os.listdir(root) if not name.startswith(".")]
    inside = [path for path, _ in image_folder(root, True) if not hidden(path)]
    if "folders are classes only" in message:
        flat = sum(name.lower().endswith(IMAGES) and not os.path.isdir(os.path.join(root, name)) for name in top)
        return flat >= len(inside)
    return ("no samples found" in message or "has no member for --image" in message) and not inside


def ours(program, root, folder):
    """Returns the samples that the program reads, and its messages."""
    target = os.path.join(folder, "out")
    run = subprocess.run([program, "--prepare", target, "--from", "dataset", "--source", root, "--label", "folder",
                          "--threads", "1"], capture_output=True, timeout=60)
    message = run.stderr.decode(errors="surrogateescape")
    if run.returncode:
        return None, [line for line in message.split("\n") if "warning" not in line][0]
    with tarfile.open(os.path.join(target, "dataset-000000.tar")) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    samples = []
    with open(os.path.join(target, "samples.csv"), newline="", errors="surrogateescape") as file:
        for row in csv.DictReader(file):
            label = int(members.pop(row["key"] + ".cls"))
            (name, data), = [(name, members[name]) for name in members if name.startswith(row["key"] + ".")]
            del members[name]
            with open(os.path.join(root, row["source_key"]), "rb") as image:
                if image.read() != data:
                    return [("other bytes", row["source_key"])], message
            samples.append((row["source_key"], label))
    if any("\r" in path.split("/")[0] for path, _ in samples) and "has a control character" in message:
        return samples, message
    with open(os.path.join(target, "classes.txt"), newline="", errors="surrogateescape") as file:
        names = file.read().split("\n")[:-1]
    if any(names[label] != path.split("/")[0] for path, label in samples):
        return [("other names", str(names))], message
    return samples, message


def compare(program, seed, folder):
    """Runs one case. Returns what differs, or None."""
    chance = random.Random(seed)
    root = make_tree(chance, folder)
    loop = find_loop(root, (), False)
    if loop == "hidden":  # ImageFolder would follow the link until the path is too long
        return None
    found, message = ours(program, root, folder)
    if loop:
        return None if found is None and excuse(root, message) else f"a loop is accepted: {message}"
    try:
        wanted = image_folder(root)
    except FileNotFoundError as fault:
        wanted = None
        if found and all(path.lower().endswith(".npy") for path, _ in found):
            return None  # without an image, arrays are read, which ImageFolder cannot
        if found is not None and not hidden(str(fault)) and "the class folder has no image" not in message:
            return f"class {fault} has no image, but is accepted: {found}"
    if found is None:
        return None if excuse(root, message) else f"wrongly refused: {message}"
    if wanted is None or any(hidden(path) for path, _ in wanted):
        if "begin with a dot" not in message and "the class folder has no image" not in message:
            return f"hidden names are skipped without a word: {message}"
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not hidden(entry.name))
        wanted = [(path, names.index(path.split("/")[0])) for path, _ in
                  (wanted if wanted is not None else found) if not hidden(path)]
    return None if found == wanted else f"wanted {wanted}\nfound  {found}\n{message}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--time", type=float, default=60)
    parser.add_argument("--keep")
    options = parser.parse_args()
    program, end, case = os.path.abspath(options.program), time.monotonic() + options.time, 0
    while case < options.cases if options.cases else time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            fault = compare(program, options.seed + case, folder)
            if fault and options.keep:
                subprocess.run(["cp", "-a", folder, options.keep], check=True)
        if fault:
            sys.exit(ascii(f"seed {options.seed + case}: {fault}").replace("\\n", "\n")[1:-1])
        case += 1
    print(f"{case} trees are read as ImageFolder reads them")


if __name__ == "__main__":
    main()
