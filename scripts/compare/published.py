#!/usr/bin/env python3
"""Times the published code of the paper (a clone of hpca-uji/fdsl-gpu-pipeline) on this machine. Writes rows for our figures.

  scripts/compare/published.py CLONE FILE.csv [VARIANT:SIDE:VERTICES:BATCH=PROGRAM ...]

  scripts/compare/published.py clone results/published.csv gbase:512:1000:1=clone/build/baseline bat:512:1000:256=clone/build/batched

  --images N        images per size of the Python code (default: 10), after one warm-up image; 0: not the Python code
  --bench PROGRAM   fdsl-bench (default: FDSL_BENCH, or the one of this project)

Variants:
  published-python, published-numpy   the two classes of cpu/datagen.py, on one core, for the sizes of the paper's figures;
                                      each image is timed
  published-gbase, published-bat      each PROGRAM is a cuda/**/profile.cu that you built as its README says. Its sizes are
                                      constants in the source: change nvertex, res and batch_size, build, and name the
                                      program with these sizes (VARIANT: gbase or bat). All have 200 orbits.

A CUDA program prints only a mean, so every time column of its row has this value. Columns that do not apply are empty. Results
are not verified.

Exit status: 0 done, 1 a failure, 2 usage, 4 none of the code can run here.
"""

import argparse
import csv
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

import shared  # in this folder

fail = shared.failing("published.py")
SIZES = [(512, vertices) for vertices in (200, 400, 600, 800, 1000)] + [(256, 1000), (1024, 1000)]  # side, vertices
ORBITS = 200
PYTHON = {"published-python": "OriSyntDatasetClass", "published-numpy": "OptimSyntDatasetClass"}
PACKAGES = {"PIL": "pillow", "noise": "noise", "numpy": "numpy"}


def note(message):
    print(f"published.py: {message}", file=sys.stderr)


# ---- Rows ------------------------------------------------------------------------------------------------------


def ours(options, variant, side, vertices, batch):
    """Runs a variant of fdsl-bench with this size and batch. Returns its row, which supplies the identity columns; None if the
    variant cannot run here."""
    done = subprocess.run([options.bench, "--variant", variant, "--res", str(side), "--vertices", str(vertices),
                           "--batch", str(batch), "--loops", "1", "--warmups", "0", "--warmup-time", "0", "--format", "csv"],
                          capture_output=True, text=True, check=False)
    rows = shared.rows_of(done.stdout)
    if done.returncode == 4:
        return None
    if done.returncode or not rows:
        fail(f"{options.bench} --variant {variant}: {done.stderr.strip().splitlines()[-1:] or 'no row'}")
    return rows[0]


def row_of(template, variant, revision, seconds, samples, timed):
    """Returns a row with the identity and parameters of `template`, a row of fdsl-bench, and these times per batch."""
    columns = list(template)
    kept = columns[:columns.index("warmups")]
    batch, ordered = float(template["batch"]), sorted(seconds)
    median = statistics.median(seconds)
    values = {"time_min_s": ordered[0], "time_median_s": median, "time_mean_s": statistics.fmean(seconds),
              "time_p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
              "time_p99_s": ordered[-1], "wall_s": median, "items": batch, "items_per_s": batch / median,
              "bytes_per_s": batch * float(template["res"])**2 / median}
    return {**dict.fromkeys(columns, ""), **{column: template[column] for column in kept},
            **{column: f"{value:.9g}" for column, value in values.items() if column in columns},
            "variant": variant, "revision": revision, "warmups": "1", "samples": str(samples), "timed_stages": timed, "verified": "no"}


def keep(path, row):
    """Appends a row to the file, and prints it."""
    if path.exists() and path.stat().st_size > 0:
        with open(path, newline="", encoding="utf-8") as file:
            if next(csv.reader(file)) != list(row):
                fail(f"{path} has the columns of another version; choose a new file", 2)
    shared.append_rows(path, [row], row)
    us = 1e6 * float(row["time_median_s"]) / float(row["items"])
    print(f"{row['variant']:18} {row['res']:>5} {row['vertices']:>8} {row['batch']:>6} {us:14.2f}", flush=True)


def revision_of(clone):
    done = subprocess.run(["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    own = (clone / ".git").exists() and done.returncode == 0  # otherwise git may name a repository that contains CLONE
    return f"published {done.stdout.strip()}" if own else "published"


# ---- Python ----------------------------------------------------------------------------------------------------


def import_datagen(clone):
    """Imports the module of the clone; returns None, with a note, if packages are missing."""
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    sys.path.insert(0, str(clone / "cpu"))
    try:
        import datagen
    except ImportError as error:
        missing = PACKAGES.get((error.name or "").split(".")[0], error.name)
        note(f"the published Python code is skipped: {error}; install {missing} (the published code needs "
             f"{', '.join(PACKAGES.values())})")
        return None
    return datagen


def time_python(options, revision):
    datagen = import_datagen(options.clone)
    if not datagen:
        return 0
    cores = os.sched_getaffinity(0)
    rows = 0
    for variant, name in PYTHON.items():
        if not hasattr(datagen, name):
            fail(f"{datagen.__file__} has no class {name}; another revision of the published code?", 2)
        for side, vertices in SIZES:
            template = ours(options, "naive", side, vertices, 1)
            generator = getattr(datagen, name)(
                image_size=side, vertex_number=vertices, perlin_noise_coefficient=2.0, line_width=0.002, start_rad=25,
                line_draw_num=ORBITS, nami1=5, nami2=8, oval_rate_x=1.2, oval_rate_y=1.8)
            os.sched_setaffinity(0, {min(cores)})
            seconds = [generator.gen_image(image, profile=True)[1] for image in range(options.images + 1)][1:]
            os.sched_setaffinity(0, cores)
            row = row_of(template, variant, revision, seconds, options.images, "drawing")
            row["threads"] = "1"
            keep(options.out, row)
            rows += 1
    return rows


# ---- CUDA ------------------------------------------------------------------------------------------------------


def sized_program(text):
    """Parses VARIANT:SIDE:VERTICES:BATCH=PROGRAM."""
    found = re.fullmatch(r"(gbase|bat):(\d+):(\d+):(\d+)=(.+)", text)
    if not found or found[1] == "gbase" and found[4] != "1":
        raise argparse.ArgumentTypeError(f"'{text}' is not VARIANT:SIDE:VERTICES:BATCH=PROGRAM, such as bat:512:1000:256=./profile "
                                         "(gbase has batch 1)")
    return found[1], *map(int, found.groups()[1:4]), found[5]


def time_program(options, revision, like, side, vertices, batch, program):
    """Runs a program and writes the time that it prints. Returns whether its variant can run here."""
    template = ours(options, like, side, vertices, batch)
    if not template:
        note(f"{program} is skipped: {like} cannot run here")
        return False
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    mean = re.search(r"Average main_kernel time: ([\d.]+) ms", done.stdout)
    if done.returncode or not mean or not float(mean[1]):
        fail(f"{program} printed no time: {(done.stdout + done.stderr).strip()[:100]}")
    row = row_of(template, f"published-{like}", revision, [1e-3 * float(mean[1]) * batch], 1, "mean of its own")
    keep(options.out, row)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("programs", nargs="*", type=sized_program)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--bench", default=os.environ.get("FDSL_BENCH", shared.PROGRAM))
    options = parser.parse_intermixed_args()
    if options.images < 0:
        fail(f"--images {options.images}: give at least 0", 2)
    for program in [options.bench] + [program for *_, program in options.programs]:
        if not shutil.which(program):
            fail(f"{program} is not built; {'run make first' if program == options.bench else 'see the README of the clone'}", 4)
    if not (options.clone / "cpu/datagen.py").is_file():
        fail(f"{options.clone} has no cpu/datagen.py; give a clone of hpca-uji/fdsl-gpu-pipeline", 2)
    revision = revision_of(options.clone)
    print(f"{'variant':18} {'side':>5} {'vertices':>8} {'batch':>6} {'us per image':>14}")
    timed = time_python(options, revision) if options.images else 0
    if timed + sum(time_program(options, revision, *program) for program in options.programs) == 0:
        fail("none of the published code can run here", 4)


if __name__ == "__main__":
    main()
