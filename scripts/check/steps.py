#!/usr/bin/env python3
"""Runs fdsl-bench with --compute MS and checks every row of a run with training steps. Steps and waits must add up to the measured
time, and the slowdown must be plausible.

  scripts/check/steps.py ./fdsl-bench --compute MS ...

Prints one line per row. Exit status: 0 all rows are right, 1 a row is wrong or the command failed, 2 usage.
"""

import csv
import math
import subprocess
import sys

SHOWN = ("variant", "compute", "steps", "step_s", "busy_share", "slowdown", "bus_share", "bus_slowdown")


def number(text):
    """Parses a number; an empty column is NaN, for which `<` is always false."""
    return float(text) if text else math.nan


def accounts_for_time(row):
    """Returns whether the time of the steps divided by busy_share is within 5 % of the time of the runs, and the slowdown is
    plausible."""
    counted_s = number(row["steps"]) * number(row["step_s"]) / number(row["busy_share"])
    timed_s = number(row["samples"]) * number(row["time_mean_s"])
    return abs(counted_s / timed_s - 1) < 0.05 and 0.8 < number(row["slowdown"]) < 5


def main(*command):
    done = subprocess.run([*command, "--format", "csv"], stdout=subprocess.PIPE, text=True, check=False)
    rows = [row for row in csv.DictReader(done.stdout.splitlines()) if row["compute"]]
    for row in rows:
        print(*(f"{name} {row[name]}" for name in SHOWN), sep=", ")
    return 0 if done.returncode == 0 and rows and all(map(accounts_for_time, rows)) else 1


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    sys.exit(main(*sys.argv[1:]))
