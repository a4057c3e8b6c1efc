#!/usr/bin/env python3
"""Compares planned memory and times of training with measured ones, or finds the largest batch of each variant and model.

    scripts/compare/memory.py plan [--small] [--limit 16G] [--bench PROGRAM] [--out FILE]
    scripts/compare/memory.py largest [--variants A,B] [--models A,B] [--limit SIZE] [--bench PROGRAM] [--out FILE]

`plan` trains ten configurations of variants, networks and batches on one GPU with --parallel auto: one line per configuration, with
the choice, planned and used memory, and planned and measured time per step. One configuration is vit-large with --memory-limit
(--limit, default 16G), which fits only if the forward pass is computed again. --small takes configurations of train-omp and
train-naive instead, for a machine without a GPU. Exit status 1 if the memory differs by more than 5 %, a time by more than 10 %,
or vit-large does not recompute.

`largest` searches the largest batch (--batch max) of each variant with each network, and prints one line each. The number of training
samples is 1.2 times the batch that fits by the plan (--memory --dry-run), at most --samples. A `+` after the batch says that more
samples would fit, a reason in place of the batch that the variant does not train this network. Exit status 1 if a run failed.

--out FILE appends the rows of fdsl-bench. Exit status 4 if `plan` without --small finds no GPU.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys

import shared  # in this folder

fail = shared.failing("compare/memory.py")
VARIANTS = "train-cuda,train-tf32,train-bf16,train-amp,train-cudnn,train-cudnn-tf32,train-graph,train-vit,train-resnet"
MODELS = ("logreg,mlp,lenet,cnn,cnn-deep,vit-micro,vit-tiny,vit-small,vit-base,vit-large,resnet-micro,resnet50")
LARGE = ("vit-tiny", "vit-small", "vit-base", "vit-large", "resnet50")  # networks for images of 224 x 224 pixels
IMAGES = "--data synth --res 224 --out-res 224 --channels 3 --fit resize --feed live"
DIGITS = "--data digits --feed stored"

# Variant, network, samples per step, steps per epoch, further options
CONFIGURATIONS = [
    ("train-cuda", "cnn", 1024, 100, ""),
    ("train-tf32", "cnn-fdsl", 512, 40, ""),
    ("train-bf16", "cnn-deep", 1024, 100, ""),
    ("train-amp", "cnn", 2048, 100, ""),
    ("train-graph", "cnn", 1024, 400, ""),
    ("train-resnet", "resnet50", 128, 20, "--optimizer sgd"),
    ("train-vit", "vit-tiny", 512, 20, "--optimizer adamw"),
    ("train-vit", "vit-small", 256, 20, "--optimizer adamw --mixup 0.8 --cutmix 1"),
    ("train-vit", "vit-base", 256, 15, "--optimizer adamw"),
    ("train-vit", "vit-large", 128, 15, "--optimizer adamw"),
]
SMALL = [
    ("train-omp", "cnn", 256, 4, ""),
    ("train-omp", "lenet", 1024, 8, "--ema 0.9"),
    ("train-naive", "logreg", 512, 40, ""),
]


def run(options, *arguments):
    """Runs the program. Returns its rows, and what it wrote to stderr."""
    done = subprocess.run([options.bench, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, shared.rows_of(done.stdout), done.stderr.strip()


def training(variant, model, samples, more=""):
    """Returns the arguments of a training run that writes CSV."""
    data = IMAGES if model in LARGE else DIGITS
    return ["--variant", variant, "--model", model, *data.split(), "--train-size", str(samples), "--test-size", "64", "--format", "csv",
            *more.split()]


def reason_of(text):
    return text.splitlines()[-1].removeprefix("fdsl-bench: ") if text else "no message"


def step_s(rows):
    """Returns the shortest measured time per step: the first epoch also loads kernels."""
    steps = int(rows[0]["steps"])
    return min(float(row["time_median_s"]) for row in rows[1:] or rows) / steps


def compare_plans(options):
    """Prints planned and measured values of each configuration. Returns the number of those that differ too much."""
    wrong = 0
    print(f"{'variant':14} {'network':13} {'batch':>6} {'choice':22} {'memory GB: planned':>18} {'used':>7} {'differs':>8} "
          f"{'step ms: planned':>17} {'measured':>9} {'differs':>8}")
    for variant, model, batch, steps, more in SMALL if options.small else CONFIGURATIONS:
        limited = model == "vit-large"
        limit = ["--memory-limit", options.limit or "16G"] if limited else []
        out = ["--out", options.out] if options.out else []
        status, rows, said = run(options, *training(variant, model, batch * steps, more), "--batch", str(batch), "--epochs", "3",
                                 "--parallel", "auto", *limit, *out)
        if status == 4:
            fail(reason_of(said), 4)
        if status != 0 or not rows:
            print(f"{variant:14} {model:13} {batch:6} {reason_of(said)}")
            wrong += 1
            continue
        last = rows[-1]
        recomputes = last["checkpoint_activations"] == "1"
        planned, used = float(last["memory_planned_bytes"]), max(float(row["memory_used_bytes"]) for row in rows)
        planned_s, measured_s = float(last["step_planned_s"]), step_s(rows)
        off, off_s = used / planned - 1, measured_s / planned_s - 1
        bad = abs(off) > 0.05 or abs(off_s) > 0.1 or (limited and not recomputes)
        wrong += bad
        print(f"{variant:14} {model:13} {batch:6} {'one GPU, recomputing' if recomputes else 'one GPU':22} {planned / 1e9:18.3f} "
              f"{used / 1e9:7.3f} {100 * off:+7.1f}% {1e3 * planned_s:17.3f} {1e3 * measured_s:9.3f} {100 * off_s:+7.1f}%"
              f"{'  WRONG' if bad else ''}", flush=True)
    return wrong


def planned_bytes(options, variant, model, batch):
    """Returns the planned memory, or None and why there is no plan."""
    status, _, said = run(options, *training(variant, model, 256), "--batch", str(batch), "--memory", "--dry-run")
    total = re.search(r"^fdsl-bench: +total +([0-9.]+)", said, re.MULTILINE)
    return (1e6 * float(total.group(1)), "") if status == 0 and total else (None, reason_of(said))


def size_bytes(text):
    """Returns the bytes of a size such as 16G."""
    number, unit = re.fullmatch(r"([0-9]+)([KMG]?)", text, re.IGNORECASE).groups()
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit.upper()]


def room_bytes(options):
    """Returns the limit, the memory of the GPU, or without a GPU that of the machine."""
    if options.limit:
        return size_bytes(options.limit)
    if not shutil.which("nvidia-smi"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True,
                           check=False).stdout.split()
    return int(found[0]) << 20


def find_largest(options, variant, model):
    """Returns the largest batch as text, or why there is none; and whether a run failed that should not."""
    small, why = planned_bytes(options, variant, model, 64)
    large, _ = planned_bytes(options, variant, model, 256)
    if not small or not large:
        return why, False
    each = max((large - small) / 192, 1)
    samples = min(options.samples, max(256, int(1.2 * (64 + (room_bytes(options) - small) / each))))
    limit = ["--memory-limit", options.limit] if options.limit else []
    out = ["--out", options.out] if options.out else []
    status, rows, said = run(options, *training(variant, model, samples), "--batch", "max", "--epochs", "1", *limit, *out)
    if status != 0 or not rows:
        return reason_of(said), status not in (2, 4)
    batch = int(rows[-1]["batch"])
    return f"{batch}{'+' if batch == samples else ''} ({float(rows[-1]['memory_bytes']) / 1e9:.2f} GB, {rows[-1]['batch_probes']} tried)", False


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "largest"])
    parser.add_argument("--small", action="store_true", help="configurations for a CPU")
    parser.add_argument("--variants", default=VARIANTS, help="variants of `largest`")
    parser.add_argument("--models", default=MODELS, help="networks of `largest`")
    parser.add_argument("--limit", help="--memory-limit: of vit-large in `plan` (default 16G), of all runs in `largest`")
    parser.add_argument("--samples", type=int, default=200000, help="most training samples of `largest` (default 200000)")
    parser.add_argument("--bench", default="./fdsl-bench", help="the program (default ./fdsl-bench)")
    parser.add_argument("--out", help="append the rows to this file")
    options = parser.parse_args()
    if options.limit and not re.fullmatch(r"[0-9]+[KMG]?", options.limit, re.IGNORECASE):
        parser.error(f"--limit: '{options.limit}' is not a size; give a number, such as 16G")
    return options


def main():
    options = parse()
    if options.what == "plan":
        sys.exit(1 if compare_plans(options) else 0)
    failed = 0
    for variant in options.variants.split(","):
        for model in options.models.split(","):
            found, wrong = find_largest(options, variant, model)
            failed += wrong
            print(f"{variant:18} {model:13} {'FAILED: ' if wrong else ''}{found}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
