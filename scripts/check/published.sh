#!/usr/bin/env bash
# Compares images and class files of published data sets with those of the program.
#
#   scripts/check/published.sh IMAGES.csv [PROGRAM]
#
# Of FractalDB-1k, also compares the points of all 25,000 orbits with `naive`, and counts those that overflow (minutes).
#
# IMAGES.csv has one row per image, with the columns generator, set, thread, class, instance, kind, file, width, height,
# sha256_of_raw_pixels and params_file. Class files are compared if they are in the folder of IMAGES.csv. Rows of
# generators without published streams are counted as skipped. Needs Python 3. Exit status 1 if something differs.
set -uo pipefail
[[ ${1:-} && $1 != -h && $1 != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
images=$(realpath "$1") || exit
program=$(realpath "${2:-$(dirname "$0")/../../fdsl-bench}") || exit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
PROGRAM=$program python3 - "$images" <<'PYTHON'
import csv, hashlib, os, pathlib, re, subprocess, sys, time

program, images = os.environ["PROGRAM"], pathlib.Path(sys.argv[1])
CLASSES = {"rcdb-1k": 1000, "rcdb-21k": 21000, "visualatom-script-1k": 1000, "segrcdb": 1, "fractaldb-1k": 1000}
ORBITS, OVERFLOWS = 25000, 1141  # of FractalDB-1k


def run(*arguments):
    result = subprocess.run([program, *arguments], capture_output=True, text=True)
    if result.returncode:
        sys.exit("%s: %s" % (" ".join(arguments), result.stderr))
    return result.stdout


def planes(name, side):
    """The images of a .npy file of bytes."""
    data = pathlib.Path(name).read_bytes()
    pixels = data[10 + int.from_bytes(data[8:10], "little"):]
    return [pixels[at:at + side * side] for at in range(0, len(pixels), side * side)]


def check_orbits(draw):
    """Draws flip 0 of all weights of all classes, verified against naive. Returns whether all are equal."""
    began = time.time()
    for weight in range(25):  # a row is only printed if no image is wrong
        run("--variant", "omp", *draw, "--loops", "1", "--verify", "--instance", str(4 * weight * 1000), "--batch", "1000")
    report = run("--preset", "fractaldb-1k", "--describe")
    overflows = int(re.search(r"overflow: (\d+) orbits", report).group(1))
    print("fractaldb-1k: %d orbits equal those of naive, %d of them overflow (expected %d), %.1f s"
          % (ORBITS, overflows, OVERFLOWS, time.time() - began))
    return overflows == OVERFLOWS


rows = list(csv.DictReader(images.open()))
known = [row for row in rows if row["set"] in CLASSES]
failed = False
for name in sorted({row["set"] for row in known}):
    own = [row for row in known if row["set"] == name]
    began, equal, drawn = time.time(), 0, {}
    side = int(own[0]["width"])
    draw = ["--preset", name, "--random", "published", *(["--draw", "points"] if own[0]["kind"] == "points" else [])]
    for instance in sorted({int(row["instance"]) for row in own}):
        of_instance = [row for row in own if int(row["instance"]) == instance]
        numbers = [0 if row["class"] == "-" else int(row["class"]) for row in of_instance]
        first = min(numbers)
        run("--variant", "omp", *draw, "--loops", "1", "--npy", name + ".npy", "--instance", str(instance * CLASSES[name] + first),
            "--batch", str(max(numbers) - first + 1))
        drawn["image"] = drawn["points"] = planes(name + ".npy", side)
        if name == "segrcdb":
            drawn["mask"] = planes(name + ".masks.npy", side)
        for row, number in zip(of_instance, numbers):
            same = hashlib.sha256(drawn[row["kind"]][number - first]).hexdigest() == row["sha256_of_raw_pixels"]
            equal += same
            if not same:
                print("differs:", row["file"])
    print("%s: %d of %d images and masks equal, %.1f s" % (name, equal, len(own), time.time() - began))
    failed |= equal < len(own)
    if own[0]["kind"] == "points":
        failed |= not check_orbits(draw)
    files = {row["params_file"] for row in own}
    files = {images.parent / file for file in files}
    files = sorted(path for file in files for path in (file.glob("*.csv") if file.is_dir() else [file]) if path.is_file())
    if files:
        run("--preset", name, "--write-classes", "classes-" + name, "--class-format", "published")
        wrong = [file for file in files if file.read_bytes() != pathlib.Path("classes-" + name, file.name).read_bytes()]
        print("%s: %d of %d class files equal, byte for byte" % (name, len(files) - len(wrong), len(files)))
        failed |= bool(wrong)
if len(known) < len(rows):
    print("skipped: %d rows of other generators" % (len(rows) - len(known)))
if not known:
    sys.exit("no rows of a set with a published stream")
sys.exit(failed)
PYTHON
