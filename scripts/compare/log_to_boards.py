#!/usr/bin/env python3
"""Writes the rows of `fdsl-bench --workload train --log FILE` (schema steps/1) for TensorBoard or Weights & Biases.

  scripts/compare/log_to_boards.py FILE [--tensorboard DIR] [--wandb PROJECT] [--follow] [--poll S]

  FILE               a CSV file of --log; it may have rows of several runs
  --tensorboard DIR  write event files, one subfolder per run, which must be new or empty; needs tensorboardX, or torch and
                     tensorboard
  --wandb PROJECT    write runs of this project; needs the package wandb. WANDB_MODE=offline writes them to a local folder
  --follow           wait for further rows until interrupted, for a run that is still training
  --poll S           with --follow: look for new rows every S seconds (default: 5)

Rows with the same model, variant, device, number of ranks and seed are one run. Values are logged at the step number of their row. Rows that a
resumed run repeats are left out and counted. Such a row has the same loss as the first row of its step. A row with another
loss belongs to a second run, and is an error. fdsl-bench itself needs none of these packages.

Exit status: 0 done, 1 the file is invalid, 2 usage, 4 a package is not installed.
"""

import argparse
import csv
import pathlib
import sys
import time

SCHEMA = "steps/1"
RUN = ("model", "variant", "device", "ranks", "seed")
VALUES = ("loss", "accuracy", "lr", "gradient_norm", "items_per_s", "gpu_utilisation_percent", "gpu_memory_bytes", "test_loss",
          "test_acc", "samples_seen", "epoch")


class Failed(Exception):
    """Ends the program. The arguments are the message and the exit status."""


def tensorboard_writer():
    """Returns the class SummaryWriter of an installed package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter
    except ImportError:
        pass
    try:
        from tensorboardX import SummaryWriter
        return SummaryWriter
    except ImportError:
        raise Failed("--tensorboard needs one of two sets of Python packages, and neither is installed: torch and tensorboard, or "
                     "tensorboardX", 4) from None


class TensorBoard:
    def __init__(self, folder):
        self.writer, self.folder, self.runs = tensorboard_writer(), pathlib.Path(folder), {}

    def add(self, run, step, values):
        if run not in self.runs:
            folder = self.folder / "-".join(run).replace("/", "_").replace(" ", "_")
            if folder.exists() and any(folder.iterdir()):  # TensorBoard would show every point twice
                raise Failed(f"--tensorboard: {folder} has files of an earlier call; remove it, or name another folder", 2)
            self.runs[run] = self.writer(str(folder))
        for name, value in values.items():
            self.runs[run].add_scalar(name, value, step)

    def flush(self):
        for writer in self.runs.values():
            writer.flush()

    def close(self):
        for writer in self.runs.values():
            writer.close()


class Wandb:
    """Writes one run at a time, because wandb.init() of the next run ends the previous one."""

    def __init__(self, project):
        try:
            import wandb
        except ImportError:
            raise Failed("--wandb needs the Python package wandb, which is not installed", 4) from None
        self.wandb, self.project, self.run, self.current = wandb, project, None, None

    def add(self, run, step, values):
        if run != self.run:
            self.close()
            self.run = run
            self.current = self.wandb.init(project=self.project, name="-".join(run), config=dict(zip(RUN, run)))
        self.current.log(values, step=step)

    def flush(self):
        pass

    def close(self):
        if self.current:
            self.current.finish()


def whole_lines(stream):
    """Yields the lines of a file up to the last complete one. The next call continues after it."""
    while True:
        at = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(at)
            return
        yield line


def rows_of(path, stream, header):
    """Yields the new rows of the file as dicts. `header` is a list that receives the names of the columns."""
    for fields in csv.reader(whole_lines(stream)):
        if not header:
            header += fields
            missing = [name for name in (*RUN, "schema", "step", *VALUES) if name not in header]
            if missing:
                raise Failed(f"{path}: no column '{missing[0]}'; name a file of --log", 1)
            continue
        row = dict(zip(header, fields))
        if row["schema"] != SCHEMA:
            raise Failed(f"{path}: rows of schema '{row['schema']}', not {SCHEMA}; name a file of --log", 1)
        yield row


def pass_on(path, stream, header, runs, boards):
    """Passes the new rows on to the boards. `runs` has the losses of each run by step. Returns how many rows were passed on, and
    how many were left out."""
    count = left_out = 0
    for row in rows_of(path, stream, header):
        run, step = tuple(row[name] for name in RUN), int(row["step"])
        losses = runs.setdefault(run, {})  # in ascending order of steps
        if losses.get(step, row["loss"]) != row["loss"]:
            raise Failed(f"{path}: two runs of {' '.join(run)} have different losses in step {step}; use one file per run", 1)
        if losses and step <= next(reversed(losses)):
            left_out += 1
            continue
        losses[step] = row["loss"]
        values = {name: float(row[name]) for name in VALUES if row[name]}
        for board in boards:
            board.add(run, step, values)
        count += 1
    for board in boards:
        board.flush()
    return count, left_out


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--tensorboard", metavar="DIR")
    parser.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--poll", type=float, default=5)
    given = parser.parse_args()
    if not given.tensorboard and not given.wandb:
        raise Failed("nothing to write; give --tensorboard DIR, --wandb PROJECT or both", 2)
    if given.poll <= 0:
        raise Failed(f"--poll {given.poll:g}: give a positive number of seconds", 2)
    return given


def program():
    given, header, runs, count, left_out = read_arguments(), [], {}, 0, 0
    boards = ([TensorBoard(given.tensorboard)] if given.tensorboard else []) + ([Wandb(given.wandb)] if given.wandb else [])
    try:
        with open(given.file, encoding="utf-8", newline="") as stream:
            while True:
                passed_on, repeated = pass_on(given.file, stream, header, runs, boards)
                count, left_out = count + passed_on, left_out + repeated
                if not given.follow:
                    break
                time.sleep(given.poll)
    except OSError as error:
        raise Failed(f"{given.file}: {error.strerror}", 1) from None
    except KeyboardInterrupt:
        pass
    finally:
        for board in boards:
            board.close()
    print(f"{given.file}: {count} row{'s' * (count != 1)} of {len(runs)} run{'s' * (len(runs) != 1)}"
          + f"; {left_out} repeated row{'s' * (left_out != 1)} left out" * (left_out > 0))


if __name__ == "__main__":
    try:
        program()
    except Failed as failed:
        print(f"log_to_boards.py: {failed.args[0]}", file=sys.stderr)
        sys.exit(failed.args[1])
