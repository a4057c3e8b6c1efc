#!/usr/bin/env python3
"""Pre-trains a network on the images of several formulas, fine-tunes each result on MNIST, and trains from scratch for comparison.

    scripts/compare/pretrain_formulas.py --data data/mnist --out results/formulas/rows.csv [--images 9000000] [--gpus 2] [--limit-s 540]

The sets are FractalDB-1k, RCDB-1k, VisualAtom and OFDB-1k. Pre-training differs only in the formula, the classes and the size of
the canvas: number of images, batch, recipe (--recipe paper with random resized crops) and seed are the same. Images are generated
while the network trains. Fine-tuning and training from scratch have the same epochs, batch, learning rate and seeds.

A pre-training run has a GPU to itself; several fine-tuning runs share a GPU (--share). The script prints one line when a run starts
and ends, and the progress of pre-training every --every-s seconds. Before --limit-s seconds have passed, it stops all runs. The same
command then continues: pre-training from its latest checkpoint, and fine-tuning with the runs that are not complete. --work keeps
the checkpoints, the weights, and the output of each run.

After each complete run, the script writes FILE of --out again: the rows of fdsl-bench of all complete runs, with the additional
column `set`. Pre-training has one row per epoch; fine-tuning has only the row of its last epoch. At the end, it prints the table of
scripts/figures/fine_tuning.py. `make plots` draws the figure fine_tuning_sets from the newest file in results/formulas.

Exit status: 0 done, or stopped by --limit-s; 1 a run failed; 2 usage; 4 the variant cannot run here.
"""
import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

from shared import PROGRAM, ROOT, Failed, joined, run_script, signals_held, start_process  # in this folder

sys.path.insert(0, str(ROOT / "scripts/figures"))
sys.pycache_prefix = str(ROOT / "build/pycache")
from plot import write_whole  # noqa: E402
from rows import BadInput, read_csv  # noqa: E402

# The options that differ between sets. A canvas has the size of the published images.
SETS = {"fractaldb-1k": ["--preset", "fractaldb-1k", "--res", "362"],
        "rcdb-1k": ["--preset", "rcdb-1k", "--res", "512"],
        "visualatom": ["--formula", "visualatom", "--preset", "paper-1000", "--res", "512"],
        "ofdb-1k": ["--preset", "ofdb-1k", "--res", "362"]}
SCRATCH = "scratch"
PRETRAIN = ["--recipe", "paper", "--fit", "random-resized-crop", "--interpolation", "bicubic"]
TUNE = ["--mean", "0.5", "--std", "0.5", "--channels", "3", "--optimizer", "adamw", "--weight-decay", "0.05",
        "--lr-schedule", "cosine"]
STOP_S = 8  # before the limit, to end all runs and write the rows
# Shortest times for which a run is started. About ten seconds pass before the first step of pre-training.
PRETRAIN_MIN_S, TUNE_MIN_S = 25, 8


class Run:
    """A training run: pre-training if `size` is None. The file `rows` exists if and only if the run is complete; until then, `part`
    has the rows. `after` is the run whose weights this run needs."""

    def __init__(self, work, of_set, size=None, words="", after=None):
        self.set, self.size, self.after, self.command = of_set, size, after, []
        self.name = of_set if size is None else f"{of_set}-{size}{words}"
        self.rows, self.part, self.output, self.log, self.weights = (
            work / f"{self.name}.{end}" for end in ("csv", "part", "txt", "steps.csv", "safetensors"))
        self.process = self.gpu = self.started_s = self.failed = None

    @property
    def pretrains(self):
        return self.size is None

    @property
    def done(self):
        return self.rows.exists()

    def last_row(self):
        header, records = read_csv(self.rows)
        return dict(zip(header, records[-1][1]))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("--data", default="data/mnist", help="folder with the four files of MNIST, or digits (default data/mnist)")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="CSV file of the rows; it is replaced")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/pretrain_formulas",
                        help="folder for checkpoints and output (default build/pretrain_formulas)")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs to use at the same time (default 1)")
    parser.add_argument("--share", type=int, default=2, help="fine-tuning runs that share a GPU (default 2)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop within this time (default: no limit)")
    parser.add_argument("--every-s", type=float, default=20, help="time between two lines about progress (default 20)")
    parser.add_argument("--sets", default=",".join(SETS), help=f"sets to pre-train on (default {','.join(SETS)})")
    parser.add_argument("--images", type=int, default=9_000_000, help="images of each pre-training run (default 9000000)")
    parser.add_argument("--epochs", type=int, default=10, help="parts of a pre-training run, each with new images and a row (default 10)")
    parser.add_argument("--batch", type=int, default=256, help="batch of pre-training (default 256)")
    parser.add_argument("--classes", type=int, default=1000, help="classes of each set (default 1000)")
    parser.add_argument("--held-out", type=int, default=2000, help="generated images that test the pre-training (default 2000)")
    parser.add_argument("--checkpoint-steps", type=int, default=2000, help="steps between two checkpoints (default 2000)")
    parser.add_argument("--sizes", default="1000:20,10000:10", metavar="SIZE:EPOCHS,...",
                        help="fine-tuning: training samples and epochs (default 1000:20,10000:10)")
    parser.add_argument("--seeds", default="0,1,2", help="fine-tuning: seeds (default 0,1,2)")
    parser.add_argument("--tune-batch", type=int, default=50, help="fine-tuning: batch (default 50)")
    parser.add_argument("--tune-lr", default="0.0005", help="fine-tuning: learning rate (default 0.0005)")
    parser.add_argument("--test-size", type=int, default=10000, help="fine-tuning: test samples (default 10000)")
    parser.add_argument("--variant", default="train-vit", help="variant (default train-vit; without a GPU, train-omp)")
    parser.add_argument("--model", default="vit-tiny", help="network (default vit-tiny)")
    parser.add_argument("--out-res", type=int, default=224, help="width and height of the network's input (default 224)")
    parser.add_argument("--bench", default=os.environ.get("FDSL_BENCH", PROGRAM),
                        help="the program (default: FDSL_BENCH, or fdsl-bench of this project)")
    given = parser.parse_args()
    given.sets = given.sets.split(",")
    for name in given.sets:
        if name not in SETS:
            raise Failed(f"no set '{name}'; choose from {', '.join(SETS)}", 2)
    try:
        given.sizes = [tuple(map(int, size.split(":"))) for size in given.sizes.split(",")]
        given.seeds = [int(seed) for seed in given.seeds.split(",")]
        if not all(len(size) == 2 for size in given.sizes):
            raise ValueError
    except ValueError:
        raise Failed("--sizes are pairs such as 1000:20,10000:10, and --seeds numbers such as 0,1,2", 2) from None
    for option in ("gpus", "share", "images", "epochs", "batch"):
        if getattr(given, option) < 1:
            raise Failed(f"--{option} must be at least 1", 2)
    if given.images < given.epochs * given.batch:
        raise Failed(f"--images {given.images} are less than one step of {given.batch} images in each of {given.epochs} epochs", 2)
    return given


def runs_of(given):
    """Returns all runs in the order in which they start."""
    network = [given.bench, "--variant", given.variant, "--model", given.model, "--out-res", str(given.out_res)]
    pretrained, tuned = {}, []
    for name in given.sets:
        run = pretrained[name] = Run(given.work, name)
        run.command = network + SETS[name] + PRETRAIN + [
            "--classes", str(given.classes), "--train-size", str(given.images // given.epochs), "--epochs", str(given.epochs),
            "--test-size", str(given.held_out), "--batch", str(given.batch), "--lr-warmup", f"{given.epochs / 20:g}",
            "--checkpoint", str(given.work / name), "--checkpoint-steps", str(given.checkpoint_steps), "--keep", "2", "--resume",
            "--log", str(run.log), "--out", str(run.part), "--export", str(run.weights)]
    for seed, (size, epochs), name in itertools.product(given.seeds, given.sizes, [*given.sets, SCRATCH]):
        run = Run(given.work, name, size, f"x{epochs}-{seed}", pretrained.get(name))
        run.command = network + TUNE + [
            "--data", given.data, "--train-size", str(size), "--test-size", str(given.test_size), "--epochs", str(epochs),
            "--lr-warmup", f"{epochs / 20:g}", "--batch", str(given.tune_batch), "--lr", given.tune_lr, "--seed", str(seed),
            "--out", str(run.part)]
        run.command += ["--init", str(run.after.weights)] if run.after else []
        tuned.append(run)
    return [*pretrained.values(), *tuned]


def check(runs):
    """Checks the options of each kind of run before the first one starts. Fine-tuning has the options of training from scratch, but
    needs weights that do not exist yet."""
    for run in {(run.set, run.size): run for run in runs if not run.after and not run.done}.values():
        checked = subprocess.run(run.command + ["--dry-run"], capture_output=True, text=True, check=False)
        if checked.returncode:
            hint = "; without a GPU, give --variant train-omp" if checked.returncode == 4 else ""
            raise Failed((checked.stderr.strip().splitlines() or ["fdsl-bench failed"])[-1] + hint, checked.returncode)


def same_settings(given):
    """Refuses to continue runs that were started with other settings, because their rows would be of different jobs."""
    settings = {name: value for name, value in sorted(vars(given).items())
                if name not in ("out", "work", "gpus", "share", "limit_s", "every_s", "bench", "sets", "seeds", "sizes")}
    path = given.work / "settings.json"
    if path.exists():
        begun = json.loads(path.read_text("utf-8"))
        differs = sorted(name for name in settings if begun.get(name) != settings[name])
        if differs:
            raise Failed(f"{given.work} has runs with --{differs[0].replace('_', '-')} {begun.get(differs[0])}; give the same value, or "
                         "another --work", 2)
    else:
        write_whole(path, json.dumps(settings, indent=1) + "\n")


def collect(given, runs):
    """Writes the rows of all complete runs to the file of --out."""
    tables = []
    for run in (run for run in runs if run.done):
        columns, rows = read_csv(run.rows)
        tables.append((run.rows, columns + ["set"], *(fields + [run.set] for _, fields in (rows if run.pretrains else rows[-1:]))))
    text = joined(tables, "so another revision of fdsl-bench wrote it; give another --work")
    if text:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(given.out, text)


class Schedule:
    def __init__(self, given, runs):
        self.given, self.runs, self.began = given, runs, time.monotonic()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = seen.split(",")[:given.gpus] if seen else [str(gpu) for gpu in range(given.gpus)]
        if len(self.devices) < given.gpus:
            raise Failed(f"--gpus {given.gpus}: CUDA_VISIBLE_DEVICES names only {seen}", 2)
        self.on_gpu = [[] for _ in self.devices]
        self.tuned_s = {}  # longest time of a fine-tuning run by size

    @property
    def now_s(self):
        return time.monotonic() - self.began

    @property
    def left_s(self):
        return self.given.limit_s - STOP_S - self.now_s

    def say(self, text):
        print(f"[{self.now_s:6.1f} s] {text}", flush=True)

    def expected_s(self, run):
        """Returns the shortest time for which it is worth to start this run."""
        return PRETRAIN_MIN_S if run.pretrains else 1.2 * self.tuned_s.get(run.size, TUNE_MIN_S)

    def may_start(self, run, gpu):
        if run.done or run.process or run.failed or (run.after and not run.after.done):
            return False
        busy = self.on_gpu[gpu]
        room = not busy if run.pretrains else len(busy) < self.given.share and not any(other.pretrains for other in busy)
        return room and self.expected_s(run) < self.left_s

    def start(self, run, gpu):
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=self.devices[gpu])
        shares = len(self.devices) * (1 if run.pretrains else self.given.share)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // shares)))
        if not run.pretrains:
            run.part.unlink(missing_ok=True)  # rows of a run that was stopped
        with open(run.output, "ab") as output, signals_held():
            run.process = start_process(run.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
            run.gpu, run.started_s = gpu, self.now_s
            self.on_gpu[gpu].append(run)
        self.say(f"GPU {self.devices[gpu]}: {run.name} starts")

    def finish(self, run, status):
        self.on_gpu[run.gpu].remove(run)
        run.process, lasted_s = None, self.now_s - run.started_s
        if status:
            run.failed = True
            words = run.output.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
            self.say(f"{run.name} FAILED with status {status} after {lasted_s:.1f} s: {words[-1]} (see {run.output})")
            return
        os.replace(run.part, run.rows)
        last = run.last_row()
        self.tuned_s[run.size] = max(lasted_s, self.tuned_s.get(run.size, 0))
        self.say(f"{run.name} done after {lasted_s:.1f} s: training loss {float(last['train_loss']):.4g}, test accuracy "
                 f"{100 * float(last['test_acc']):.2f} %, {float(last['items_per_s']):,.0f} images/s")
        collect(self.given, self.runs)

    def progress(self):
        for run in (run for gpu in self.on_gpu for run in gpu if run.pretrains):
            with contextlib.suppress(OSError, BadInput, IndexError, ValueError):  # the file may be absent, or locked while it grows
                header, records = read_csv(run.log)
                last = dict(zip(header, records[-1][1]))
                share = float(last["samples_seen"]) / self.given.images
                self.say(f"  {run.name}: step {last['step']}, {100 * share:.0f} % of the images, loss {float(last['loss']):.4g}, "
                         f"{float(last['items_per_s']):,.0f} images/s")

    def stop(self):
        running = [run for gpu in self.on_gpu for run in gpu]
        for run in running:
            run.process.terminate()
        until = time.monotonic() + STOP_S / 2
        for run in running:
            try:
                run.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()
            self.say(f"{run.name} stopped; it will {'continue from its latest checkpoint' if run.pretrains else 'start again'}")
            run.process = None

    def run_all(self):
        """Runs until all runs are complete, none can start any more, or the time is over."""
        said_s = 0
        try:
            while self.left_s > 0:
                for run in [run for gpu in self.on_gpu for run in gpu]:
                    status = run.process.poll()
                    if status is not None:
                        self.finish(run, status)
                for gpu, run in itertools.product(range(len(self.devices)), self.runs):
                    if self.may_start(run, gpu):
                        self.start(run, gpu)
                if not any(self.on_gpu):
                    break
                if self.now_s - said_s >= self.given.every_s:
                    said_s = self.now_s
                    self.progress()
                time.sleep(0.1)
        finally:
            self.stop()


def main():
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    runs = runs_of(given)
    schedule = Schedule(given, runs)
    same_settings(given)
    check(runs)
    collect(given, runs)  # so that another file of --out also has the rows of earlier starts
    schedule.say(f"{sum(run.done for run in runs)} of {len(runs)} runs are complete")
    schedule.run_all()
    done, failed = sum(run.done for run in runs), [run.name for run in runs if run.failed]
    if given.out.exists():
        print(flush=True)
        subprocess.run([sys.executable, ROOT / "scripts/figures/fine_tuning.py", given.out],
                       env=dict(os.environ, FDSL_BENCH=given.bench), check=True)
    schedule.say(f"{done} of {len(runs)} runs are complete" + (f"; failed: {', '.join(failed)}" if failed else
                 "" if done == len(runs) else "; the same command continues"))
    return 1 if failed else 0


if __name__ == "__main__":
    run_script("compare/pretrain_formulas.py", main, BadInput)
