#!/usr/bin/env python3
"""Times the published code of the paper (a clone of hpca-uji/fdsl-gpu-pipeline) on this machine, for the sizes of the paper's
figures. Writes rows for our figures.

  scripts/compare/published.py CLONE FILE.csv

  --images N        images per size of the Python code (default: 10), after one warm-up image
  --bench PROGRAM   fdsl-bench (default: FDSL_BENCH, or the one of this project)
  --nvcc PROGRAM    the CUDA compiler (default: nvcc)

Variants:
  published-python, published-numpy   the two classes of cpu/datagen.py, on one core; each image is timed
  published-gbase                     cuda/baseline/profile.cu
  published-bat                       cuda/batched/philox_rdc/profile.cu

The CUDA programs print only a mean, so every time column of their rows has this value. Their sizes are constants in the source,
so the script compiles copies with other constants. Columns that do not apply are empty. Results are not verified.

Exit status: 0 done, 1 a failure, 2 usage, 4 none of the code can run here.
"""

import argparse
import concurrent.futures
import csv
import io
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERTICES, SIDES, BATCHES = (200, 400, 600, 800, 1000), (256, 512, 1024), tuple(2**e for e in range(10))
SIZES = [(512, vertices) for vertices in VERTICES] + [(side, 1000) for side in SIDES if side != 512]  # side, vertices
ORBITS = 200
PYTHON = {"published-python": "OriSyntDatasetClass", "published-numpy": "OptimSyntDatasetClass"}
CUDA = {"published-gbase": ("gbase", "cuda/baseline/profile.cu", [(*size, 1) for size in SIZES]),
        "published-bat": ("bat", "cuda/batched/philox_rdc/profile.cu",
                          [(*size, 256) for size in SIZES] + [(512, 1000, batch) for batch in BATCHES if batch != 256])}
PACKAGES = {"PIL": "pillow", "noise": "noise", "numpy": "numpy"}


def fail(message, status=1):
    print(f"published.py: {message}", file=sys.stderr)
    sys.exit(status)


def note(message):
    print(f"published.py: {message}", file=sys.stderr)


# ---- Rows ------------------------------------------------------------------------------------------------------


def ours(options, variant, side, vertices, batch):
    """Runs a variant of fdsl-bench with this size and batch. Returns its row, which supplies the identity columns; None if the
    variant cannot run here."""
    done = subprocess.run([options.bench, "--variant", variant, "--res", str(side), "--vertices", str(vertices),
                           "--batch", str(batch), "--loops", "1", "--warmups", "0", "--warmup-time", "0", "--format", "csv"],
                          capture_output=True, text=True, check=False)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
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


def append(path, row):
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with open(path, newline="", encoding="utf-8") as file:
            if next(csv.reader(file)) != list(row):
                fail(f"{path} has the columns of another version; choose a new file", 2)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def say(row):
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
            append(options.out, row)
            say(row)
            rows += 1
    return rows


# ---- CUDA ------------------------------------------------------------------------------------------------------


def with_constants(text, path, constants):
    """Returns the source code with new values of these constants. Each must be defined exactly once."""
    for name, value in constants.items():
        text, found = re.subn(rf"(\bconst(?:expr)? int {name} = )\d+;", rf"\g<1>{value};", text)
        if found != 1:
            fail(f"{path} has {found} constants {name}, not one; another revision of the published code?", 2)
    return text


def compiled(options, folder, variant, source, side, vertices, batch):
    """Compiles the program for one size."""
    path = options.clone / source
    constants = {"nvertex": vertices, "norbits": ORBITS, "res": side} | ({"batch_size": batch} if variant == "published-bat" else {})
    program = folder / f"{variant}-{side}-{vertices}-{batch}"
    program.with_suffix(".cu").write_text(with_constants(path.read_text("utf-8"), path, constants), "utf-8")
    done = subprocess.run([options.nvcc, "-O3", "-arch=native", "-rdc=true", str(program.with_suffix(".cu")), "-o", str(program),
                           "-lcudadevrt"], capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{source} does not compile: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return program


def time_cuda(options, revision):
    if not shutil.which(options.nvcc):
        note(f"the published CUDA code is skipped: {options.nvcc} not found")
        return 0
    jobs = [(variant, like, source, *size) for variant, (like, source, sizes) in CUDA.items() for size in sizes]
    if not ours(options, "gbase", 64, 20, 1):
        note("the published CUDA code is skipped: gbase cannot run here")
        return 0
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(lambda job: compiled(options, pathlib.Path(name), job[0], *job[2:]), jobs))
        for (variant, like, _, side, vertices, batch), program in zip(jobs, programs):
            done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
            mean = re.search(r"Average main_kernel time: ([\d.]+) ms", done.stdout)
            if done.returncode or not mean or not float(mean[1]):
                fail(f"{variant} of {side} x {side}, {vertices} vertices, batch {batch} printed no time: "
                     f"{(done.stdout + done.stderr).strip()[:100]}")
            row = row_of(ours(options, like, side, vertices, batch), variant, revision, [1e-3 * float(mean[1]) * batch], 1,
                         "mean of its own")
            append(options.out, row)
            say(row)
    return len(jobs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--bench", default=os.environ.get("FDSL_BENCH", str(ROOT / "fdsl-bench")))
    parser.add_argument("--nvcc", default="nvcc")
    options = parser.parse_args()
    if options.images < 1:
        fail(f"--images {options.images}: give at least 1", 2)
    if not shutil.which(options.bench):
        fail(f"{options.bench} is not built; run make first", 4)
    for path in ["cpu/datagen.py"] + [source for _, source, _ in CUDA.values()]:
        if not (options.clone / path).is_file():
            fail(f"{options.clone} has no {path}; give a clone of hpca-uji/fdsl-gpu-pipeline", 2)
    revision = revision_of(options.clone)
    print(f"{'variant':18} {'side':>5} {'vertices':>8} {'batch':>6} {'us per image':>14}")
    if time_python(options, revision) + time_cuda(options, revision) == 0:
        fail("none of the published code can run here", 4)


if __name__ == "__main__":
    main()
