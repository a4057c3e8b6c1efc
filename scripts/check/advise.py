#!/usr/bin/env python3
"""Checks `fdsl-bench advise --compute train:MODEL`: that repeated runs give the same verdict, and that training runs which are
made afterwards reach the rates.

    scripts/check/advise.py [--runs N] [--seconds S] [--tolerance T] [--state FILE] [--limit-s S] -- OPTIONS OF ADVISE
    scripts/check/advise.py --runs 10 -- --data photos --compute train:vit-tiny --batch 256 --out-res 224

Runs advise N times (10). Then trains for about S seconds (60) with the command that the last run of advise names for each way,
and compares images per second without the first epoch. For the way that reads from disk, evicts the set from the page cache
after each epoch. The rates must agree within T (0.10). With `--nodes 2` among the options of advise, also trains on two ranks
of this machine with `mpirun -n 2`: with --device and --threads as they are, so both ranks need their own GPU or cores, and
their rate must be within the stated interval, widened by T. FDSL_BENCH is the program (default: ./fdsl-bench).

With --state, FILE keeps what was measured, and the same command continues. With --limit-s, nothing is started that would
probably end later than S seconds after the start; the exit status is then that of what was measured.

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
import types
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("advise", nargs="+")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    options = parser.parse_args()
    check = types.SimpleNamespace(options=options, begin_s=time.monotonic(), longest_s={},
                                  bench=os.path.abspath(os.environ.get("FDSL_BENCH", "fdsl-bench")),
                                  state={"advise": options.advise, "answers": [], "rates": {}})
    if options.state and options.state.exists():
        check.state = json.loads(options.state.read_text(encoding="utf-8"))
        if check.state["advise"] != options.advise:
            sys.exit(f"check/advise.py: {options.state} is of other options: {shlex.join(check.state['advise'])}")
    complete = repeat(check) and train_all(check)
    failed = compare(check)
    print(f"{failed} failed" if failed else "all agree", "" if complete else "so far; the same command continues")
    return failed > 0


def measured(check, kind, measure):
    """Returns what measure() returns, and saves the state with it; None if it would probably end too late."""
    now_s = time.monotonic()
    if now_s - check.begin_s + check.longest_s.get(kind, 0) > check.options.limit_s:
        return None
    result = measure()
    check.longest_s[kind] = max(check.longest_s.get(kind, 0), time.monotonic() - now_s)
    return result


def save(check):
    if check.options.state:
        check.options.state.write_text(json.dumps(check.state), encoding="utf-8")


def repeat(check):
    """Repeats advise. Returns whether all runs are complete."""
    answers = check.state["answers"]
    while len(answers) < check.options.runs:
        begin_s = time.monotonic()
        answer = measured(check, "advise", lambda: subprocess.run(
            [check.bench, "advise", *check.options.advise, "--format", "json"], stdout=subprocess.PIPE, check=True).stdout)
        if answer is None:
            return False
        answers.append(json.loads(answer))
        save(check)
        print(f"run {len(answers)}, {time.monotonic() - begin_s:.0f} s: {answers[-1]['advice']['verdict']}", flush=True)
    return True


def train_all(check):
    """Trains with the command of each way of the last answer. Returns whether all ways are complete."""
    options, answer, rates = check.options, check.state["answers"][-1], check.state["rates"]
    data = options.advise[options.advise.index("--data") + 1]
    with tempfile.TemporaryDirectory() as folder:
        for way in answer["rows"]:
            if way["reason"] or way["way"] in rates:
                continue
            *before, command = way["command"].split(" && ")
            words = shlex.split(command)[1:]
            words = [os.path.join(folder, "prepared") if word == "prepared" else word for word in words]
            for line in before:
                subprocess.run([check.bench, *shlex.split(line)[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
                words += ["--test-data", os.path.join(folder, "prepared")]
            words += lengthen(way, answer["advice"]["epoch_images"], options.seconds)
            cold = Path(data) if COLD in way["way"] else None
            launchers = [[]]
            if answer["advice"]["nodes"] == 2 and way["nodes_per_s"]:
                launchers.append(["mpirun", "--bind-to", "none", "-n", "2"])
            of_way = []
            for launcher in launchers:
                rows = Path(folder, f"{len(rates)}-{len(of_way)}.csv")
                run = [*launcher, check.bench, *words, *(["--scaling", "weak"] if launcher else []), "--out", str(rows)]
                if cold:
                    evict(cold)
                of_way.append(measured(check, "train", lambda: train(run, rows, cold)))
            if None in of_way:
                return False
            rates[way["way"]] = of_way
            save(check)
    return True


def compare(check):
    """Prints the rates of the last answer and of training. Returns the number of differences."""
    answers, tolerance = check.state["answers"], check.options.tolerance
    if not answers:
        return 0
    best = [[way["way"] for way in answer["rows"] if way["best"]] for answer in answers]
    failed = any(ways != best[0] or not ways for ways in best)
    if failed:
        print("FAILED: the verdicts differ, or one is undecided:", "; ".join(sorted({", ".join(ways) or "-" for ways in best})))
    print(f"{'way':24}{'advise':>10}{'+-95%':>8}{'runs differ':>13}{'training':>10}{'ratio':>7}")
    for way in answers[-1]["rows"]:
        if way["way"] not in check.state["rates"]:
            continue
        of_runs = [each["reached_per_s"] for answer in answers for each in answer["rows"]
                   if each["way"] == way["way"] and each["reached_per_s"]]
        rate, *on_two = check.state["rates"][way["way"]]
        ratio = way["reached_per_s"] / rate
        low, high = way["reached_per_s_low"], way["reached_per_s_high"]
        half = f"{100 * (math.sqrt(high / low) - 1):.1f}%" if low and high else "-"
        wrong = abs(ratio - 1) > tolerance
        failed += wrong
        print(f"{way['way']:24}{way['reached_per_s']:10.0f}{half:>8}{100 * (max(of_runs) / min(of_runs) - 1):12.1f}%{rate:10.0f}"
              f"{ratio:7.3f}{'  FAILED' if wrong else ''}")
        for rate in on_two:
            low = (way["nodes_per_s_low"] or way["nodes_per_s"]) / (1 + tolerance)
            high = (way["nodes_per_s_high"] or way["nodes_per_s"]) * (1 + tolerance)
            wrong = not low <= rate <= high
            failed += wrong
            print(f"  on two ranks{way['nodes_per_s']:22.0f}{'':21}{rate:10.0f}{way['nodes_per_s'] / rate:7.3f}"
                  f"  expected {low:.0f} to {high:.0f}{'  FAILED' if wrong else ''}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
