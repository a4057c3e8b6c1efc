#!/usr/bin/env python3
"""Runs fdsl-bench with --compute train and says whether every row of it has learnt: the loss of its last steps is well
below that of guessing among so many classes, and what the step and the bus take from each other has been measured.

  scripts/check_learning.py CLASSES ./fdsl-bench --compute train ...

Prints a line a row. Exit status: 0 all have, 1 one has not or the command failed.
"""

import csv
import math
import subprocess
import sys

SHOWN = ("variant", "compute", "steps", "loss", "bus_share", "bus_slowdown")
WELL_BELOW = 0.8  # of the loss of guessing


def number(text):
    """NaN, which no comparison holds for, where a column is empty."""
    return float(text) if text else math.nan


def has_learnt(row, classes):
    return (row["compute"].startswith("train:") and number(row["loss"]) < WELL_BELOW * math.log(classes)
            and 0.3 < number(row["bus_share"]) < 1.1 and 0.9 < number(row["bus_slowdown"]) < 3)


def main(classes, *command):
    done = subprocess.run([*command, "--format", "csv"], stdout=subprocess.PIPE, text=True, check=False)
    rows = list(csv.DictReader(done.stdout.splitlines()))
    for row in rows:
        print(*(f"{name} {row[name]}" for name in SHOWN), sep=", ")
    return 0 if done.returncode == 0 and rows and all(has_learnt(row, int(classes)) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
