#!/usr/bin/env python3
"""Runs fdsl-bench with --compute and checks what every row with steps says of them: with the waits between them they fill
the measured time, and their slowdown is known. With --compute train and a number of classes, whether the network has
learnt as well: the loss of the last steps is well below that of guessing, and what the step and the bus take from each
other has been measured.

  scripts/check_learning.py CLASSES ./fdsl-bench --compute train ...
  scripts/check_learning.py 0 ./fdsl-bench --compute MS ...

Prints one line per row. Exit status: 0 all rows are right, 1 one is not or the command failed.
"""

import csv
import math
import subprocess
import sys

SHOWN = ("variant", "compute", "steps", "step_s", "utilisation", "slowdown", "loss", "bus_share", "bus_slowdown")
WELL_BELOW = 0.8  # of the loss of guessing


def number(text):
    """NaN, which no comparison holds for, where a column is empty."""
    return float(text) if text else math.nan


def accounts_for_time(row):
    """Whether the steps, over the share of the time that they take, are as long as the timed runs."""
    counted_s = number(row["steps"]) * number(row["step_s"]) / number(row["utilisation"])
    timed_s = number(row["samples"]) * number(row["time_mean_s"])
    return abs(counted_s / timed_s - 1) < 0.05 and 0.8 < number(row["slowdown"]) < 5


def has_learnt(row, classes):
    return (row["compute"].startswith("train:") and number(row["loss"]) < WELL_BELOW * math.log(classes)
            and 0.3 < number(row["bus_share"]) < 1.1 and 0.9 < number(row["bus_slowdown"]) < 3)


def main(classes, *command):
    done = subprocess.run([*command, "--format", "csv"], stdout=subprocess.PIPE, text=True, check=False)
    rows = [row for row in csv.DictReader(done.stdout.splitlines()) if row["compute"]]
    for row in rows:
        print(*(f"{name} {row[name]}" for name in SHOWN), sep=", ")
    right = all(accounts_for_time(row) and (classes == "0" or has_learnt(row, int(classes))) for row in rows)
    return 0 if done.returncode == 0 and rows and right else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
