#!/usr/bin/env python3
"""Runs fdsl-bench with --compute and checks every row of a run with training steps. Steps and waits must add up to the measured
time, and the slowdown must be plausible. If CLASSES is not 0, --compute must be train. The script then also checks that bus_share
and bus_slowdown are plausible, and that the network has learned. The loss of the last steps must be well below the loss of
guessing.

  scripts/check/learning.py CLASSES ./fdsl-bench --compute train ...
  scripts/check/learning.py 0 ./fdsl-bench --compute MS ...

Prints one line per row. Exit status: 0 all rows are right, 1 a row is wrong or the command failed, 2 usage.
"""

import csv
import math
import subprocess
import sys

SHOWN = ("variant", "compute", "steps", "step_s", "busy_share", "slowdown", "loss", "bus_share", "bus_slowdown")
WELL_BELOW = 0.8  # limit of the loss, relative to the loss of guessing


def number(text):
    """Parses a number; an empty column is NaN, for which `<` is always false."""
    return float(text) if text else math.nan


def accounts_for_time(row):
    """Returns whether the time of the steps divided by busy_share is within 5 % of the time of the runs, and the slowdown is
    plausible."""
    counted_s = number(row["steps"]) * number(row["step_s"]) / number(row["busy_share"])
    timed_s = number(row["samples"]) * number(row["time_mean_s"])
    return abs(counted_s / timed_s - 1) < 0.05 and 0.8 < number(row["slowdown"]) < 5


def has_learnt(row, classes):
    return (row["compute"].startswith("train:") and number(row["loss"]) < WELL_BELOW * math.log(classes)
            and 0.3 < number(row["bus_share"]) < 1.3 and 0.9 < number(row["bus_slowdown"]) < 3)


def main(classes, *command):
    done = subprocess.run([*command, "--format", "csv"], stdout=subprocess.PIPE, text=True, check=False)
    rows = [row for row in csv.DictReader(done.stdout.splitlines()) if row["compute"]]
    for row in rows:
        print(*(f"{name} {row[name]}" for name in SHOWN), sep=", ")
    right = all(accounts_for_time(row) and (classes == "0" or has_learnt(row, int(classes))) for row in rows)
    return 0 if done.returncode == 0 and rows and right else 1


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    sys.exit(main(*sys.argv[1:]))
