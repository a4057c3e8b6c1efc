#!/usr/bin/env python3
"""Checks `fdsl-bench advise --compute train:MODEL`: that repeated runs give the same verdict, and that training runs which are
made afterwards reach the rates.

    scripts/check/advise.py [--runs N] [--seconds S] [--tolerance T] -- OPTIONS OF ADVISE
    scripts/check/advise.py --runs 10 -- --data photos --compute train:vit-tiny --batch 256 --out-res 224

Runs advise N times (10). Then trains for about S seconds (60) with the command that the last run of advise names for each way,
and compares images per second without the first epoch. For the way that reads from disk, evicts the set from the page cache
after each epoch. The rates must agree within T (0.10). With `--nodes 2` among the options of advise, also trains on two ranks
of this machine with `mpirun -n 2`: with --device and --threads as they are, so both ranks need their own GPU or cores, and
their rate must be within the stated interval, widened by T. FDSL_BENCH is the program (default: ./fdsl-bench).

Prints one line per run and per way. Exit status: 0 if everything agrees, 1 if not, 2 for wrong usage.
"""

import argparse
import csv
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLD = "from disk"  # in the name of a way


def evict(folder):
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def train(command, rows, cold):
    """Runs a training run. Evicts the folder `cold`, if there is one, whenever an epoch has ended."""
    size = 0
    with tempfile.TemporaryFile() as output:
        run = subprocess.Popen(command, stdout=output, stderr=output)
        while run.poll() is None:
            now = rows.stat().st_size if rows.exists() else 0
            if cold and now != size:
                evict(cold)
                size = now
            time.sleep(0.01)
        output.seek(0)
        if run.returncode:
            sys.exit(f"check/advise.py: {shlex.join(command)} failed:\n{output.read().decode()}")
    with open(rows) as file:
        counted = [row for row in csv.DictReader(file) if int(row["epoch"]) > 1 and row["rank"] in ("0", "all")]
    counted = [row for row in counted if row["rank"] == "all"] or counted
    return sum(float(row["items"]) for row in counted) / sum(float(row["time_mean_s"]) for row in counted)


def lengthen(way, epoch_images, seconds):
    """Returns the options with which a run trains for about `seconds` after its first epoch."""
    images = way["reached_per_s"] * seconds
    share = float(way["mix"].rsplit(":", 1)[1]) if way["mix"] else 1
    generated = way["variant"] in ("live", "constant")
    most = math.inf if generated else 0.85 * epoch_images / share  # a part may be held out
    epoch = min(images / 2, most)
    options = ["--epochs", str(1 + max(2, math.ceil(images / epoch)))]
    if epoch < most:
        options += ["--train-size", str(max(1, round(epoch * share)))]
    return [*options, "--test-size", "1", "--mean", "0.5", "--std", "0.25", "--allow-nan"]


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].strip(), description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("advise", nargs="+")
    options = parser.parse_args()
    bench = os.path.abspath(os.environ.get("FDSL_BENCH", "fdsl-bench"))
    data = options.advise[options.advise.index("--data") + 1]
    failed, best = 0, []
    for number in range(options.runs):
        begin = time.monotonic()
        answer = subprocess.run([bench, "advise", *options.advise, "--format", "json"], stdout=subprocess.PIPE, check=True)
        answer = json.loads(answer.stdout)
        best.append([way["way"] for way in answer["rows"] if way["best"]])
        print(f"run {number + 1}, {time.monotonic() - begin:.0f} s: {answer['advice']['verdict']}", flush=True)
    if any(ways != best[0] or not ways for ways in best):
        print("FAILED: the verdicts differ, or one is undecided")
        failed += 1
    about = answer["advice"]
    print(f"{'way':24}{'advise':>10}{'+-95%':>8}{'training':>10}{'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(way for way in answer["rows"] if not way["reason"]):
            *before, command = way["command"].split(" && ")
            program, *words = shlex.split(command)
            words = [os.path.join(folder, "prepared") if word == "prepared" else word for word in words]
            for line in before:
                subprocess.run([bench, *shlex.split(line)[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
                words += ["--test-data", os.path.join(folder, "prepared")]
            words += lengthen(way, about["epoch_images"], options.seconds)
            rows = Path(folder, f"{number}.csv")
            cold = Path(data) if COLD in way["way"] else None
            if cold:
                evict(cold)
            rate = train([bench, *words, "--out", str(rows)], rows, cold)
            ratio = way["reached_per_s"] / rate
            low, high = way["reached_per_s_low"], way["reached_per_s_high"]
            half = f"{100 * (math.sqrt(high / low) - 1):.1f}%" if low and high else "-"
            wrong = abs(ratio - 1) > options.tolerance
            failed += wrong
            print(f"{way['way']:24}{way['reached_per_s']:10.0f}{half:>8}{rate:10.0f}{ratio:7.3f}{'  FAILED' if wrong else ''}",
                  flush=True)
            if about["nodes"] != 2 or not way["nodes_per_s"]:
                continue
            rows = Path(folder, f"{number}-2.csv")
            rate = train(["mpirun", "--bind-to", "none", "-n", "2", bench, *words, "--scaling", "weak", "--out", str(rows)],
                         rows, cold)
            low = (way["nodes_per_s_low"] or way["nodes_per_s"]) / (1 + options.tolerance)
            high = (way["nodes_per_s_high"] or way["nodes_per_s"]) * (1 + options.tolerance)
            wrong = not low <= rate <= high
            failed += wrong
            print(f"  on two ranks{way['nodes_per_s']:22.0f}{'':8}{rate:10.0f}{way['nodes_per_s'] / rate:7.3f}"
                  f"  expected {low:.0f} to {high:.0f}{'  FAILED' if wrong else ''}", flush=True)
    print(f"{failed} failed" if failed else "all agree")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
