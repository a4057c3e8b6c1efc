#!/usr/bin/env python3
"""Trains the same network in fdsl-bench and in PyTorch with the same recipe, and compares the losses.

  scripts/compare/curves.py DIR --seconds 120 --pytorch-gpu 1 --compile        # vit-tiny, 1000 classes, two GPUs at once
  scripts/compare/curves.py DIR --recipe pdp2026 --steps 200 --log-steps 10    # the transforms of the published script
  scripts/compare/curves.py DIR --cpu --steps 20 --log-steps 1 --augment none --drop-path 0 --first-bound 0.001

pretrain.py trains in PyTorch and saves its initial weights, from which fdsl-bench starts. Both programs train on the same images
in the same order, with the same learning rate and the same MixUp or CutMix in each step. For RandAugment, erasing and
--drop-path, the programs draw different random numbers from the same distributions. With --augment mix or none, and
--drop-path 0, the programs differ only in rounding. With --recipe pdp2026, PyTorch applies the transforms and the schedule of the
published script, and fdsl-bench those of its own --recipe pdp2026; both begin with the same weights and images, and draw different
random numbers. docs/pretrain.md has more.

Each program ends after --seconds of training, or after --steps. Steps that only one program has reached do not count. The
script prints each program's mean loss over the last tenth of the common steps. The two means may differ by at most --bound.

Run `make all lib` first: pretrain.py needs build/lib/libfdsl.so. It also needs PyTorch and timm.

DIR is created. It gets init.safetensors; ours.csv and pytorch.csv with rows of the schema steps/1, which the figure learning_steps
draws; and the output of the programs, ours.txt and pytorch.txt. With --cpu, or on one GPU, PyTorch trains first.
Arguments after -- are passed on to fdsl-bench.

Exit status: 0 done, 1 a failure, or the losses differ by more than a bound, 2 usage, 4 a package or a GPU is missing, 130
interrupted.
"""

import argparse
import csv
import importlib.util
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

from shared import PROGRAM, ROOT, Failed, start_process  # in this folder

HERE = pathlib.Path(__file__).resolve().parent
FIRST = 20  # rows that --first-bound compares
# Defaults with --cpu and on a GPU: a variant, a network and the options of its images
SMALL = {"variant": "train-omp", "model": "vit-micro", "batch": 32, "classes": 10, "preset": "uji", "res": 56, "out_res": 28}
LARGE = {"variant": "train-vit", "model": "vit-tiny", "batch": 256, "classes": 1000, "preset": "paper-1000", "res": 512, "out_res": 224}
# Options of each program for the values of --augment. SAME lists the options that have the same name in both programs.
MIX = "--mixup 0.8 --cutmix 1".split()
OURS = {"none": [], "mix": MIX, "recipe": [*MIX, *"--rand-augment 28 --rand-augment-ops 2 --erasing 0.25".split()]}
PYTORCH = {"none": ["--augment", "none"], "mix": ["--no-randaugment", "--no-erasing"], "recipe": []}
SAME = ("model", "batch", "classes", "preset", "res", "out_res", "channels", "lr", "weight_decay", "label_smoothing", "drop_path", "seed",
        "log_steps")


def read_arguments(arguments):
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder to create")
    add("--seconds", type=float, help="end each program after this many seconds of training")
    add("--steps", type=int, default=10000, help="number of steps, after which the learning rate is 0; --seconds may end training earlier (default 10000)")
    add("--cpu", action="store_true", help="train a small network on the CPU: vit-micro with train-omp")
    add("--ours-gpu", type=int, default=0, help="GPU of fdsl-bench (default 0)")
    add("--pytorch-gpu", type=int, default=0, help="GPU of PyTorch (default 0)")
    add("--compile", action="store_true", help="compile the network in PyTorch")
    add("--amp", choices=("bf16", "fp16", "off"), help="PyTorch: bf16 or fp16 with autocast, or fp32 without (off) (default bf16; with "
        "--recipe, fp16; with --cpu, off)")
    add("--threads", type=int, help="CPU threads of each program (default: all)")
    add("--augment", choices=("recipe", "mix", "none"), default="recipe",
        help="recipe: RandAugment, erasing, MixUp and CutMix; mix: MixUp and CutMix alone (default recipe)")
    add("--recipe", choices=("pdp2026",), help="compare this recipe of both programs, instead of --augment")
    add("--lr-warmup", type=int, help="steps of the linear warm-up (default: a tenth of --steps; with --recipe, 5000)")
    for name, value in {"lr": 0.001, "weight-decay": 0.05, "label-smoothing": 0.1, "drop-path": 0.1}.items():
        add(f"--{name}", type=float, default=value, help=f"option of both programs (default {value})")
    for name in SMALL:
        add(f"--{name.replace('_', '-')}", type=type(SMALL[name]), help=f"default {LARGE[name]}; with --cpu, {SMALL[name]}")
    add("--channels", type=int, default=3, help="channels of the images (default 3)")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation (default 0)")
    add("--log-steps", type=int, help="steps per row (default 50; with --cpu, 10)")
    add("--bound", type=float, default=2, help="largest allowed difference of the mean losses over the last tenth of the steps, in percent (default 2)")
    add("--first-bound", type=float, help=f"largest allowed difference of the losses in any of the first {FIRST} rows, in percent (default: no limit)")
    add("--bench", default=PROGRAM, help="path of fdsl-bench")
    options = parser.parse_args(arguments[:split])
    options.more = arguments[split + 1:]
    for name, value in (SMALL if options.cpu else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.amp = options.amp or ("off" if options.cpu else "fp16" if options.recipe else "bf16")
    options.log_steps = options.log_steps or (10 if options.cpu else 50)
    if options.lr_warmup is None:
        options.lr_warmup = 5000 if options.recipe else options.steps // 10
    return options


# ---- The two commands ----


def common(options):
    """Returns the options that both programs have."""
    return [word for name in SAME for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
            if name != "variant"] + (["--threads", str(options.threads)] if options.threads else [])


def pytorch_command(options):
    words = [sys.executable, str(HERE / "pretrain.py"), *common(options), "--order", "train", "--images",
             str(options.steps * options.batch), "--decay-of", "matrices", "--lr-warmup", str(options.lr_warmup),
             "--schedule-steps", str(options.steps), *(["--recipe", options.recipe] if options.recipe else PYTORCH[options.augment]),
             "--amp", options.amp, "--save-init",
             f"{options.folder}/init.safetensors", "--step-log", f"{options.folder}/pytorch.csv"]
    warmup = min(20, options.steps - 1)  # steps in which PyTorch compiles; --seconds does not count them
    words += ["--warmup-steps", str(warmup), "--steps", str(options.steps - warmup)]
    words += ["--seconds", str(options.seconds)] if options.seconds else []
    words += ["--compile"] if options.compile else []
    return words + (["--device", "cpu"] if options.cpu else [])


def ours_command(options):
    """Returns the command of fdsl-bench. All steps are one epoch, so the warm-up of `lr_warmup` steps is a part of it."""
    words = [options.bench, "--variant", options.variant, *common(options), "--data", "synth", "--train-size",
             str(options.steps * options.batch), "--test-size", str(min(1000, options.steps * options.batch)), "--epochs", "1",
             "--init", f"{options.folder}/init.safetensors", "--log", f"{options.folder}/ours.csv"]
    if options.recipe:  # --warmup-lr as in the published script
        words += ["--recipe", options.recipe, "--lr-warmup-updates", str(options.lr_warmup), "--warmup-lr", "1e-6"]
    else:
        words += ["--drop-last", "--mean", "0.5", "--std", "0.5", "--optimizer", "adamw", "--lr-schedule", "cosine", "--lr-warmup",
                  f"{options.lr_warmup / options.steps:.12g}", *OURS[options.augment]]
    return words + ([] if options.cpu else ["--device", str(options.ours_gpu)]) + options.more


# ---- Runs ----


def library():
    """Returns the path of libfdsl, with which pretrain.py draws images."""
    return os.environ.get("FDSL_LIBRARY") or str(ROOT / "build/lib/libfdsl.so")


def create_folder(options):
    """Checks that everything that the programs need exists, then creates DIR."""
    if os.path.exists(options.folder):
        raise Failed(f"{options.folder}: File exists; name a new folder, or remove this one", 2)
    if not os.path.exists(options.bench):
        raise Failed(f"{options.bench} is missing; run `make`, or name the program with --bench", 2)
    if not os.path.exists(library()):
        raise Failed(f"{library()} is missing, which pretrain.py needs; run `make lib`, or set FDSL_LIBRARY", 4)
    for package in ("torch", "timm"):
        if not importlib.util.find_spec(package):
            raise Failed(f"pretrain.py needs the Python package {package}; run `pip install {package}`", 4)
    try:
        os.makedirs(options.folder)
    except OSError as error:
        raise Failed(f"{options.folder}: {error.strerror}; name a new folder", 2) from None


def start(options, name, words):
    """Starts a program. Its output goes to a file."""
    environment = dict(os.environ)
    if name == "pytorch":
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [environment.get("PYTHONPATH")])])
        environment["FDSL_LIBRARY"] = library()
        if not options.cpu:
            shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if environment.get("CUDA_VISIBLE_DEVICES") else []
            environment["CUDA_VISIBLE_DEVICES"] = shown[options.pytorch_gpu] if shown else str(options.pytorch_gpu)
    with open(f"{options.folder}/{name}.txt", "w", encoding="utf-8") as output:
        print(*words, file=output, flush=True)
        try:
            return start_process(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise Failed(f"{words[0]}: {error.strerror}; build it, or name it with --bench", 2) from None


def check_ended(options, name, process, stopped=False):
    """Waits for the end of a program."""
    status = process.wait()
    if status and not (stopped and status == -signal.SIGTERM):
        lines = pathlib.Path(f"{options.folder}/{name}.txt").read_text(encoding="utf-8").splitlines()
        raise Failed(f"{name} ended with status {status}: {lines[-1] if lines else ''} (see {options.folder}/{name}.txt)",
                     status if status in (2, 4) else 1)


def wait_for(path, options, name, process):
    """Waits until a program has written a file."""
    while not os.path.exists(path):
        if process.poll() is not None:
            check_ended(options, name, process)
            if not os.path.exists(path):
                raise Failed(f"{name} has not written {path}")
        time.sleep(0.1)


def run_ours(options):
    """Trains in fdsl-bench. --seconds begins with the first row, because the program first generates its test set."""
    process = start(options, "ours", ours_command(options))
    try:
        wait_for(f"{options.folder}/ours.csv", options, "ours", process)
        stopped = False
        if options.seconds:
            try:
                process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                stopped = True
        check_ended(options, "ours", process, stopped)
    finally:
        process.kill()


def run(options):
    pytorch = start(options, "pytorch", pytorch_command(options))
    try:
        wait_for(f"{options.folder}/init.safetensors", options, "pytorch", pytorch)
        if options.cpu or options.ours_gpu == options.pytorch_gpu:
            check_ended(options, "pytorch", pytorch)
        run_ours(options)
        check_ended(options, "pytorch", pytorch)
    finally:
        pytorch.kill()


# ---- Comparison ----


def read(path):
    """Returns the loss, the learning rate and the samples of each row, by step."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    losses, seen = {}, 0
    for step in sorted(rows):
        losses[step] = float(rows[step]["loss"]), float(rows[step]["lr"]), int(rows[step]["samples_seen"]) - seen
        seen = int(rows[step]["samples_seen"])
    return losses


def percent(one, other):
    return 100 * abs(one / other - 1) if other else math.nan


def mean_of(losses, steps):
    return sum(losses[step][0] * losses[step][2] for step in steps) / sum(losses[step][2] for step in steps)


def compare(ours, pytorch, bound, first_bound):
    """Prints the comparison of two logs. Returns whether the differences are within the bounds; NaN is not."""
    steps = sorted(ours.keys() & pytorch.keys())
    if not steps:
        raise Failed("the logs have no step in common; train for longer")
    other_rate = [step for step in steps if not math.isclose(ours[step][1], pytorch[step][1], rel_tol=1e-6, abs_tol=1e-12)]
    if other_rate:
        raise Failed(f"the learning rates differ in step {other_rate[0]}")
    tenth = [step for step in steps if step > 0.9 * steps[-1]]
    means = mean_of(ours, tenth), mean_of(pytorch, tenth)
    first = max((percent(ours[step][0], pytorch[step][0]) for step in steps[:FIRST]), key=lambda value: (value != value, value))
    print(f"steps: {max(ours)} in fdsl-bench, {max(pytorch)} in PyTorch, {steps[-1]} in both\n"
          f"first {len(steps[:FIRST])} rows: losses differ by at most {first:.3g} %\n"
          f"last tenth, {len(tenth)} rows from step {tenth[0]} on: mean loss {means[0]:.5f} in fdsl-bench, {means[1]:.5f} in PyTorch, "
          f"ratio {means[0] / means[1]:.5f}")
    within = percent(*means) <= bound and (first_bound is None or first <= first_bound)
    print(f"{'within the bounds' if within else 'OUTSIDE THE BOUNDS'}: {bound:g} %"
          + (f", first rows {first_bound:g} %" if first_bound is not None else ""))
    return within


def main(arguments):
    options = read_arguments(arguments)
    try:
        if options.steps < 2 or (options.lr_warmup >= options.steps and not options.recipe):
            raise Failed(f"--steps {options.steps}: give at least 2, and more than --lr-warmup", 2)
        create_folder(options)
        run(options)
        logs = (read(f"{options.folder}/{name}.csv") for name in ("ours", "pytorch"))
        return 0 if compare(*logs, options.bound, options.first_bound) else 1
    except Failed as error:
        print(f"compare/curves.py: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
