#!/usr/bin/env python3
"""Measures how --balance affects the speed of uneven ranks: the speed of all ranks together, and of each rank alone.

    scripts/compare/balance.py [--threads 12,4] [--cores 0-11:12-15] [--devices cuda:0,cpu] [--variant train-cuda]
                               [--balance equal,measured] [--bench PROGRAM] [--out FILE] [--must SHARE] [-- OPTION...]

First trains on each rank alone, with its threads and cores. Then runs one separate training per rank, all at the same time.
Without an exchange of gradients, these training runs slow each other down only through shared resources, such as memory bandwidth
and the clock frequency. Finally trains on all ranks together, once per value of --balance. Ranks on CPUs train with train-omp, and ranks on GPUs
(--devices) with the variant of --variant. OPTION are options of fdsl-bench, by default: --data digits --train-size 20000
--test-size 1000 --model cnn --batch 512 --epochs 8. --batch is per rank. With --cores, each rank uses the same cores alone and
together with the others. If --cores is not given, fdsl-bench divides the cores among the ranks.
Epochs before the third are not counted, because `measured` begins with equal shares. A speed is the median over the counted
epochs.

Prints one line per run, with three values: its speed in samples/s; this speed divided by the sum of the speeds at which each rank
trains alone; and the samples of each rank per step in the last epoch. --out FILE appends the rows. Exit status 1 if a run fails,
or if `measured` reaches less than --must (0.9) of the sum; 4 without mpirun.
"""
import argparse
import os
import shutil
import statistics
import subprocess

import shared  # in this folder

fail = shared.failing("compare/balance.py")
DEFAULTS = "--data digits --train-size 20000 --test-size 1000 --model cnn --batch 512 --epochs 8".split()
FIRST_COUNTED = 3  # epoch


def options_of_script():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="12,4", help="threads of each rank (default 12,4)")
    parser.add_argument("--cores", help="cores of each rank in the format of taskset, separated by colons, e.g. 0-11:12-15")
    parser.add_argument("--devices", help="device of each rank: cuda:N or cpu, e.g. cuda:0,cpu (default: all on CPUs)")
    parser.add_argument("--variant", default="train-cuda", help="variant of ranks on GPUs (default train-cuda)")
    parser.add_argument("--balance", default="equal,measured", help="values of --balance (default equal,measured)")
    parser.add_argument("--bench", default="./fdsl-bench", help="the program (default ./fdsl-bench)")
    parser.add_argument("--out", help="append the rows to this file")
    parser.add_argument("--must", type=float, default=0.9, help="minimum of (speed with `measured`) / (sum of the speeds alone), default 0.9")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of fdsl-bench, after --")
    options = parser.parse_args()
    options.threads = options.threads.split(",")
    options.cores = options.cores.split(":") if options.cores else [None] * len(options.threads)
    options.devices = options.devices.split(",") if options.devices else ["cpu"] * len(options.threads)
    for name in "cores", "devices":
        if len(getattr(options, name)) != len(options.threads):
            fail(f"--threads has {len(options.threads)} ranks, --{name} has {len(getattr(options, name))}; give the same number", 2)
    if not shutil.which("mpirun"):
        fail("mpirun is not installed; install Open MPI (openmpi-bin)", 4)
    return options


def alone(options, rank):
    """Returns the options that select the variant and the device of a rank that trains alone."""
    device = options.devices[rank]
    return ["--variant", "train-omp"] if device == "cpu" else ["--variant", options.variant, "--device", device.split(":")[1]]


def all_devices(options):
    """Returns the options that select the variant and the devices of all ranks."""
    if set(options.devices) == {"cpu"}:
        return ["--variant", "train-omp"]
    devices = ",".join(f"{rank}:{device}" for rank, device in enumerate(options.devices))
    return ["--variant", options.variant, "--rank-device", devices]


def rank_command(options, rank, more, keep_rows=True):
    """Returns the command of a rank."""
    bound = ["taskset", "-c", options.cores[rank]] if options.cores[rank] else []
    out = ["--out", options.out] if options.out and keep_rows else []
    return [*bound, os.path.abspath(options.bench), "--threads", options.threads[rank],
            *(options.options or DEFAULTS), "--format", "csv", *out, *more]


def rows_of(command):
    return finished(started(command))


def started(command):
    return shared.start_process(command, stdout=subprocess.PIPE, text=True)


def finished(run):
    """Waits for a training run. Returns its rows."""
    output = run.communicate()[0]
    if run.returncode:
        fail(f"exit status {run.returncode}: {' '.join(run.args)}")
    rows = shared.rows_of(output)
    if not any(int(row["epoch"]) >= FIRST_COUNTED for row in rows):
        fail(f"too few epochs; give at least --epochs {FIRST_COUNTED}", 2)
    return rows


def speed_of(rows):
    """Returns the median speed of all ranks together over the counted epochs, in samples/s."""
    return statistics.median(float(row["items_per_s"]) for row in rows
                             if int(row["epoch"]) >= FIRST_COUNTED and (row["ranks"] == "1" or row["rank"] == "all"))


def side_by_side(options, speeds, train_size):
    """Runs one separate training per rank, all at the same time. Returns the sum of their speeds. The rows are not kept, because
    the figure `balance` would take them for the speeds of ranks that train alone."""
    runs = []
    for rank, speed in enumerate(speeds):
        command = rank_command(options, rank, alone(options, rank), keep_rows=False)
        if "--train-size" in command:
            at = command.index("--train-size")
            del command[at:at + 2]
        command = [word for word in command if not word.startswith("--train-size=")]
        runs.append(started([*command, "--train-size", str(max(1, int(train_size * speed / max(speeds))))]))
    try:
        return sum(speed_of(finished(run)) for run in runs)
    finally:
        for run in runs:  # after a failure, the others still run
            run.kill()
            run.wait()


def together(options, balance):
    """Trains on all ranks. Returns the speed, and the samples of each rank per step in the last epoch."""
    command = ["mpirun", "--bind-to", "none"]
    for rank in range(len(options.threads)):
        command += [":"] * (rank > 0) + ["-n", "1", *rank_command(options, rank, [*all_devices(options), "--balance", balance])]
    rows = rows_of(command)
    shares = [row["samples_per_step"] for row in rows if row["rank"] != "all"][-len(options.threads):]
    return speed_of(rows), ":".join(shares)


def main():
    options = options_of_script()
    speeds = []
    print(f"{'training':<28}{'samples/s':>12}{'of the sum':>12}  samples per step")
    for rank, threads in enumerate(options.threads):
        rows = rows_of(rank_command(options, rank, alone(options, rank)))
        speeds.append(speed_of(rows))
        where = f"{threads} threads" if options.devices[rank] == "cpu" else options.devices[rank]
        print(f"{f'rank {rank} alone, {where}':<28}{speeds[-1]:>12.0f}", flush=True)
    print(f"{'sum':<28}{sum(speeds):>12.0f}{1:>12.3f}")
    apart = side_by_side(options, speeds, int(rows[-1]["train_samples"]))
    print(f"{'side by side, no exchange':<28}{apart:>12.0f}{apart / sum(speeds):>12.3f}", flush=True)
    reached = 1
    for balance in options.balance.split(","):
        speed, shares = together(options, balance)
        share = speed / sum(speeds)
        print(f"{f'together, {balance}':<28}{speed:>12.0f}{share:>12.3f}  {shares}", flush=True)
        reached = share if balance == "measured" else reached
    if reached < options.must:
        fail(f"measured reaches {reached:.3f} of the sum, but must reach {options.must}")


if __name__ == "__main__":
    main()
