#!/usr/bin/env python3
"""Repeats a training run of fdsl-bench in PyTorch, with the same network, initial weights, data, batch, optimizer, seed and epochs.

  scripts/compare/pytorch.py --variant train-naive,train-omp --data ../mnist --model cnn --epochs 2 --out results/train.csv
  scripts/compare/pytorch.py --variant train-cuda --device cuda --modes loader,resident,graph,best --data ../mnist \\
      --batch 256 --epochs 10
  scripts/compare/pytorch.py --ranks 1,2 --variant train-graph --device cuda --modes resident,graph,best --data ../mnist \\
      --model cnn --batch 256 --epochs 8
  scripts/compare/pytorch.py --gradients --variant train-naive       # one step of several models with each optimizer

The options of this script are listed below, if PyTorch is installed. All others are passed to fdsl-bench. The first two forms
run each variant, then PyTorch in each mode (see torch_training.py), and print one table. PyTorch's rows have the columns of
fdsl-bench and are appended to the same --out. Their variant is torch-MODE; for mode resident it is torch-cpu or torch-cuda.
Set-up is not part of the epochs' time. PyTorch's set-up starts when the samples are in host memory. The set-up of fdsl-bench is
everything except the epochs: program start, reading the samples, and tests. With a GPU, `GPU %` is the share of time in which a kernel
ran, by NVML: during the epochs of fdsl-bench (--monitor), and during the epochs and tests of PyTorch (nvidia-smi).

With --ranks, each variant and each mode trains on each of these numbers of ranks, on this machine. --batch is the number of
samples per rank and step (--scaling strong: the global batch). On several ranks, mpirun starts fdsl-bench, and torchrun
starts PyTorch, in which DistributedDataParallel adds up the gradients. The table has one line per run. `efficiency` is samples/s on N ranks /
(N x samples/s on one rank). On several ranks, PyTorch has only rows with rank = all.

The last form compares one step. Bounds: the loss within a relative error of 1e-5, each gradient tensor within 1e-5 of its
norm, and the update of each parameter tensor within 1e-3 of the update's norm. The last bound is wider because Adam amplifies
rounding: it makes a full step even for the smallest gradient. A NaN counts as a difference.

Exit status: 0 done, 1 a failure or a difference, 2 usage, 4 no PyTorch, no CUDA in PyTorch, or an unavailable variant. If
fdsl-bench fails, the exit status is that of fdsl-bench.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

import gpu_use
import shared
import torch_ranks
from shared import rows_of

try:
    import torch
    from torch.nn import functional
    from torch_training import (EFFORTS, MODELS, MODES, PRECISIONS, Net, optimizer_of, part, read_data, read_safetensors, step_errors,
                                trained, training_of)
except ImportError as error:
    shared.end_without("compare/pytorch.py", __doc__, error)

PROGRAM, fail = shared.PROGRAM, shared.failing("compare/pytorch.py")
TOLERANCE = 1e-5  # relative to the loss and to the norm of a gradient tensor
STEP_TOLERANCE = 1e-3  # relative to the norm of a tensor's update


def options_of(path):
    """Returns the options with which fdsl-bench created a file, from the file's metadata."""
    raw = pathlib.Path(path).read_bytes()
    about = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["fdsl-bench"]
    return dict(word.split("=", 1) for word in about.split())


def run(arguments):
    try:
        done = subprocess.run([PROGRAM] + arguments, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        fail(f"{PROGRAM}: {error.strerror}; build it, or name it with --bench", 2)
    if done.returncode < 0:
        fail(f"{PROGRAM} was ended by signal {-done.returncode}")
    if done.returncode:  # the program has printed the reason
        sys.exit(done.returncode)
    return done.stdout


# ---- One step ----

def check_step(variant, model, arguments, device):
    """Compares one step. Returns whether all differences are within the bounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step.safetensors"
        row = rows_of(run(["--variant", variant, "--model", model, "--epochs", "1", "--format", "csv",
                           "--export-step", path] + arguments))[0]
        step = {name: tensor.to(device) for name, tensor in read_safetensors(path).items()}
    net = Net(model, part(step, "before.")).to(device)
    optimizer = optimizer_of(net, row)
    loss = functional.cross_entropy(net(step["inputs"], part(step, "factor.")), step["labels"],
                                    label_smoothing=float(row["label_smoothing"]))
    loss_off, (off, tensor), (step_off, step_tensor) = step_errors(net.named(), loss, step, optimizer.step)
    fine = loss_off <= TOLERANCE and off <= TOLERANCE and step_off <= STEP_TOLERANCE
    print(f"{variant:12} {model:7} {row['optimizer']:6} loss {loss_off:8.1e}  gradients {off:8.1e} ({tensor})  "
          f"step {step_off:8.1e} ({step_tensor})  {'ok' if fine else 'DIFFERS'}")
    return fine


def check_gradients(variants, arguments, device):
    fine = True
    cases = [("logreg", []), ("lenet", ["--label-smoothing", "0.1"]), ("cnn", ["--shift", "2"]),
             ("cnn3d", ["--data", "clips"]),
             # The batch and its images are small. Among millions of values before a ReLU, rounding would change the
             # signs of some, and hence their gradients.
             ("cnn-fdsl", ["--data", "synth", "--res", "16", "--shift", "2", "--batch", "7", "--train-size", "7"])]
    optimizers = [["--optimizer", "sgd", "--weight-decay", "0.01"], ["--optimizer", "adam", "--weight-decay", "0.01"],
                  ["--optimizer", "adamw", "--weight-decay", "0.01"]]
    for variant in variants.split(","):
        for model, more in cases:
            for optimizer in optimizers:
                # One batch per epoch suffices for one step.
                size = [] if "--batch" in more else ["--batch", "33", "--train-size", "33"]
                fine &= check_step(variant, model, ["--test-size", "10"] + size + more + optimizer + arguments, device)
    return 0 if fine else 1


# ---- Epochs ----

# Columns that PyTorch's rows leave empty.
OURS_ALONE = ("flops", "bytes", "peak_flops_per_s", "peak_bytes_per_s", "bound", "roofline_share",
              "sm_clock_mhz", "memory_clock_mhz", "energy_j_per_item", "instruction_set", "speedup", "baseline",
              "data_share", "throttled", "wrong", "skipped_steps", "loss_scale_last", "generate_share", "generated_per_s",
              "opening_s", "imbalance", "exchange_share")


def name_of(mode, device):
    return f"torch-{device.type}" if mode == "resident" else f"torch-{mode}"


def torch_row(training, epoch, name, ours, number, device, threads):
    """Returns the row of an epoch in PyTorch, based on the row of fdsl-bench for the same epoch. `training` is what trained()
    returned, and `epoch` an element of its list."""
    elapsed, ranks = epoch["elapsed"], int(ours["ranks"])
    row, items, cuda = dict(ours), float(ours["items"]), device.type == "cuda"
    row.update({
        "variant": name, "revision": f"torch {torch.__version__}" + (f" {training['precision']}" if training["precision"] else ""),
        "warmups": "0", "samples": "1", "device": torch.cuda.get_device_name(device) if cuda else ours["device"],
        "cuda": (torch.version.cuda or "") if cuda else "", "threads": str(threads * ranks),
        "timed_stages": f"gather+forward+backward+{'exchange+' if ranks > 1 else ''}update",
        "items_per_s": f"{items / elapsed:.9g}", "bytes_per_s": f"{float(ours['bytes_per_s']) * float(ours['wall_s']) / elapsed:.9g}",
        "epoch": str(number), "train_loss": f"{epoch['loss']:.9g}", "train_acc": f"{epoch['accuracy']:.6g}",
        "test_loss": f"{epoch['test_loss']:.9g}", "test_acc": f"{epoch['test_accuracy']:.6g}",
        "trained_s": f"{epoch['trained_s']:.9g}", "verified": "no", "memory_bytes": str(training["memory_bytes"]) if cuda else "",
        "to_98_s": f"{epoch['to_98_s']:.9g}" if epoch["to_98_s"] else "",
        "to_99_s": f"{epoch['to_99_s']:.9g}" if epoch["to_99_s"] else "",
        "exchange": "" if ranks == 1 else "nccl" if cuda else "gloo",
    })
    row.update({column: "" for column in OURS_ALONE if column in row})
    for column in ("time_min_s", "time_median_s", "time_mean_s", "time_p95_s", "time_p99_s", "wall_s"):
        row[column] = f"{elapsed:.9g}"
    return row


def torch_rows(training, mode, ours, device, threads):
    return [torch_row(training, epoch, name_of(mode, device), row, number + 1, device, threads)
            for number, (epoch, row) in enumerate(zip(training["epochs"], ours))]


def print_table(results):
    """Prints one line per run. `results` has triples (set-up in seconds, rows of the epochs, use of the GPU in percent). The ratio is
    the speed relative to the fastest PyTorch mode."""
    speeds = [statistics.median(float(row["items_per_s"]) for row in rows) for _, rows, _ in results]
    fastest = max((speed for speed, (_, rows, _) in zip(speeds, results) if rows[0]["variant"].startswith("torch-")),
                  default=math.nan)
    print(f"{'variant':14} {'threads':>7} {'set-up s':>8} {'epochs':>6} {'epoch s':>9} {'samples/s':>12} {'ratio':>6} "
          f"{'GPU %':>6} {'loss':>8} {'acc 1':>7} {'acc end':>7} {'to 98% s':>8} {'to 99% s':>8}")
    for speed, (setup_s, rows, use) in zip(speeds, results):
        last = rows[-1]
        print(f"{last['variant']:14} {last['threads']:>7} {setup_s:8.2f} {len(rows):6} "
              f"{statistics.median(float(row['time_median_s']) for row in rows):9.4f} {speed:12.1f} {speed / fastest:6.2f} "
              f"{gpu_use.shown(use):>6} {float(last['train_loss'] or 'nan'):8.4f} {float(rows[0]['test_acc']):7.4f} {float(last['test_acc']):7.4f} "
              f"{last['to_98_s'][:8] or '-':>8} {last['to_99_s'][:8] or '-':>8}")


def run_ours(variant, arguments, device):
    """Runs a variant in its own process. Returns its set-up time in seconds, its rows, and the use of the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        watched = device.type == "cuda" and not passes_on(arguments, "monitor", 3)
        monitor = ["--monitor", f"{folder}/monitor.csv:100"] if watched else []
        begin = time.perf_counter()
        rows = rows_of(run(["--variant", variant, "--format", "csv"] + monitor + arguments))
        setup_s = time.perf_counter() - begin - sum(float(row["wall_s"]) for row in rows)
        return setup_s, rows, gpu_use.of_monitor(f"{folder}/monitor.csv")


def run_torch(mode, options, data, ours, device, threads):
    """Runs a mode of PyTorch for one epoch per row of fdsl-bench. Returns its set-up time in seconds, its rows, and the use of the
    GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    print(f"compare/pytorch.py: {mode} ...", file=sys.stderr)
    prepared = training_of(mode, ours[0], data, device, options.precision, options.workers)
    with gpu_use.GpuUse(gpu_use.smi_id(device)) as use:
        training = trained(prepared, len(ours))
    return training["setup_s"], torch_rows(training, mode, ours, device, threads), use.percent


def export_data(path, variant, arguments):
    """Writes the samples and initial parameters, from which PyTorch trains."""
    if any(argument.startswith(("--balance", "--rank-device")) for argument in arguments):
        fail("PyTorch's ranks have equal parts, and devices of one kind; drop --balance and --rank-device", 2)
    run(["--variant", variant, "--dry-run", "--export-data", path] + arguments)
    given = options_of(path)
    if given["model"] not in MODELS:
        fail(f"--model {given['model']}: PyTorch trains only {', '.join(MODELS)} here; vit_timm.py compares steps of vit-*", 2)
    if given["lr-schedule"] != "constant" or any(float(given.get(name) or 0) for name in ("lr-warmup", "shift", "flip", "drop-last")):
        fail("PyTorch trains here only at a constant learning rate, without augmentation, on all samples; drop --lr-schedule, "
             "--lr-warmup, --shift, --flip and --drop-last", 2)
    if given["loss"] != "cross-entropy" or any(float(given[name]) for name in ("mixup", "cutmix")):
        fail("PyTorch trains here only with cross-entropy, on samples that are not mixed; vit_timm.py compares mixed steps", 2)


def compare(options, arguments):
    device = options.device
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    variants = options.variant.split(",")
    more = ["--threads", str(threads)] + arguments
    with tempfile.TemporaryDirectory() as folder:
        export_data(f"{folder}/data", variants[0], more)
        data = read_data(f"{folder}/data")
    out = ["--out", options.out] if options.out else []
    results = [run_ours(variant, out + more, device) for variant in variants]
    failed = 0
    for mode in options.modes:
        try:
            results.append(run_torch(mode, options, data, results[0][1], device, threads))
        except Exception:  # after any exception of PyTorch, measure the other modes
            traceback.print_exc()
            print(f"compare/pytorch.py: {mode} failed; see above", file=sys.stderr)
            failed = 1
            continue
        if options.out:
            shared.append_rows(options.out, results[-1][1], results[-1][1][0])
    print_table(results)
    return failed


# ---- Epochs on several ranks ----

class OursFailed(Exception):
    """fdsl-bench has printed why it failed."""

    def __init__(self, ranks, status):
        super().__init__(f"fdsl-bench failed on {on_ranks(ranks)}, see above" +
                         ("; try another --sync or variant, or fewer --ranks" if ranks > 1 else ""))
        self.status = status if status > 0 else 1


def on_ranks(ranks):
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def run_ours_on(ranks, arguments):
    """Runs fdsl-bench on `ranks` ranks. Returns its set-up time in seconds, and the rows that are about all ranks."""
    launcher = ["mpirun", "--bind-to", "none", "-n", str(ranks)] if ranks > 1 else []
    begin = time.perf_counter()
    try:
        done = torch_ranks.start(launcher + [PROGRAM, "--format", "csv"] + arguments, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE if launcher else None, text=True)
    except OSError as error:
        fail(f"{PROGRAM}: {error.strerror}; build it, or name it with --bench", 2)
    elapsed, errors = time.perf_counter() - begin, done.stderr or ""
    if done.returncode and "fdsl-bench: " in errors:  # without the lines that mpirun adds
        errors = "".join(line for line in errors.splitlines(True) if line.startswith("fdsl-bench: "))
    sys.stderr.write(errors)
    if done.returncode:
        raise OursFailed(ranks, done.returncode)
    rows = [row for row in rows_of(done.stdout) if ranks == 1 or row["rank"] == "all"]
    return elapsed - sum(float(row["wall_s"]) for row in rows), rows


def measure_on(ranks, options, arguments, job, results):
    """Trains every variant and mode on `ranks` ranks, and adds pairs (set-up in seconds, rows) to `results`."""
    out = ["--out", options.out] if options.out else []
    first = len(results)
    for variant in options.variant.split(","):
        for method in options.sync if ranks > 1 else [None]:
            sync = ["--sync", method] if method else []
            print(f"compare/pytorch.py: {' '.join([variant] + sync)} on {on_ranks(ranks)} ...", file=sys.stderr)
            results.append(run_ours_on(ranks, ["--variant", variant] + sync + out + arguments))
    rows = results[first][1]
    print(f"compare/pytorch.py: PyTorch ({', '.join(options.modes)}) on {on_ranks(ranks)} ...", file=sys.stderr)
    # Unlike lr, last_lr includes the factor of --lr-scale.
    job = {**job, "row": {**rows[0], "lr": rows[0]["last_lr"]}, "epochs": len(rows)}
    trainings, failure = torch_ranks.train(job, ranks)
    for mode, training in trainings.items():
        results.append((training["setup_s"], torch_rows(training, mode, rows, options.device, job["threads"])))
        if options.out:
            shared.append_rows(options.out, results[-1][1], results[-1][1][0])
    if failure:
        raise failure


def print_ranks(results):
    """Prints one line per run. `results` has pairs (set-up in seconds, rows of the epochs)."""
    speeds = [statistics.median(float(row["items_per_s"]) for row in rows) for _, rows in results]
    alone = {rows[0]["variant"]: speed for speed, (_, rows) in zip(speeds, results) if rows[0]["ranks"] == "1"}
    print(f"{'ranks':>5} {'variant':15} {'exchange':8} {'batch':>6} {'set-up s':>8} {'samples/s':>12} {'efficiency':>10} "
          f"{'loss':>8} {'to 99% s':>8} {'acc end':>7}")
    for speed, (setup_s, rows) in zip(speeds, results):
        last = rows[-1]
        one = alone.get(last["variant"])
        efficiency = f"{speed / one / int(last['ranks']):.3f}" if one else ""
        print(f"{last['ranks']:>5} {last['variant']:15} {last['exchange']:8} {last['batch']:>6} {setup_s:8.2f} {speed:12.1f} "
              f"{efficiency:>10} {float(last['train_loss'] or 'nan'):8.4f} {last['to_99_s'][:8]:>8} {float(last['test_acc']):7.4f}")
    scaling = results[-1][1][0]["scaling"]
    print("batch: samples per step, summed over all ranks" + (f"; {scaling} scaling" if scaling else ""))


def compare_ranks(options, arguments):
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // max(options.ranks))
    more = ["--threads", str(threads)] + arguments
    results, words, status = [], None, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # to end the ranks and to remove files
    with tempfile.TemporaryDirectory() as folder:
        export_data(f"{folder}/data", options.variant.split(",")[0], more)
        job = {"folder": folder, "data": f"{folder}/data", "device": options.device.type, "modes": options.modes,
               "precision": options.precision, "workers": options.workers, "threads": threads}
        try:
            for ranks in options.ranks:
                measure_on(ranks, options, more, job, results)
        except OursFailed as error:
            words, status = str(error), error.status
        except torch_ranks.RankFailure as error:
            words, status = str(error), 1
    if results:  # even after a failure: the training runs before it
        print_ranks(results)
    if words:
        sys.stdout.flush()
        fail(words, status)
    return 0


def ranks_of(text):
    ranks = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if min(ranks) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': give numbers of at least 1, such as 1,2,4")
    return sorted(set(ranks))


def modes_of(text):
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"no mode '{mode}'; choose from {', '.join(MODES)}")
    return modes


def device_of(name):
    """Returns the PyTorch device of this name. Exits if PyTorch cannot use it."""
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists dozens of devices
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail(f"--device {name}: give cpu, cuda, or a GPU as cuda:1", 2)
    if device.type == "cuda" and not torch.cuda.is_available():
        fail(f"--device {name}: PyTorch {torch.__version__} sees no GPU, or was built without CUDA; use --device cpu", 4)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail(f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs; the first is cuda:0", 4)
    return device


def can_compile():
    try:
        import torch._inductor.config  # noqa: F401
    except ImportError:
        return False
    return True


def passes_on(arguments, name, shortest):
    """Returns whether an option is passed on to fdsl-bench, which also accepts prefixes of at least `shortest` characters."""
    words = [word.split("=")[0][2:] for word in arguments if word.startswith("--")]
    return any(name.startswith(word) and len(word) >= shortest for word in words)


def refuse_what_cannot_work(options, arguments):
    """Refuses combinations of options that cannot work, before anything runs."""
    variants = options.variant.split(",")
    of_cuda = "graph" in (options.modes or []) or options.precision not in (None, "fp32")
    out = options.out or "-"
    appendable = not out.startswith(("/dev/", "/proc/")) and (os.path.isfile(out) or not os.path.exists(out))
    compiled = [mode for mode in options.modes or [] if mode in EFFORTS]
    faults = {
        f"--variant {options.variant}: name variants of training, as in train-omp":
            not all(name.startswith("train-") for name in variants),
        "--checkpoint works with one variant at a time": len(variants) > 1 and passes_on(arguments, "checkpoint", 2),
        "--format is set here; use --out FILE for the rows": passes_on(arguments, "format", 2),
        f"--out {options.out}: several programs append rows to it; name a regular file":
            options.out and not appendable,
        "--gradients compares one step, without --out, --modes and --precision":
            options.gradients and (options.out or options.modes or options.precision),
        "--gradients compares one step on one rank; remove --ranks": options.gradients and options.ranks,
        "--checkpoint and --export work with one number of ranks only; remove them, or remove --ranks":
            options.ranks and (passes_on(arguments, "checkpoint", 2) or passes_on(arguments, "export", 4)),
        f"--sync {','.join(options.sync or [])} needs several ranks; add --ranks 1,2":
            options.sync and max(options.ranks or [1]) == 1,
        f"--device {options.device}: with --ranks, rank i uses GPU i; give --device cuda":
            options.ranks and options.device.type == "cuda" and options.device.index is not None,
        f"--workers {options.workers}: give at least 1; mode resident uses no workers": options.workers < 1,
        f"--threads {options.threads}: give at least 1, or omit it to use all":
            options.threads is not None and options.threads < 1,
        "graph and lower precisions need --device cuda": options.device.type == "cpu" and of_cuda,
        f"--modes {','.join(compiled)}: PyTorch {torch.__version__} has no Inductor here, which these modes need":
            compiled and not can_compile(),
    }
    for words, is_so in faults.items():
        if is_so:
            fail(words, 2)


def refuse_ranks(ranks, device):
    """Refuses a number of ranks that this machine or this PyTorch cannot run."""
    if ranks > 1 and not shutil.which("mpirun"):
        fail(f"--ranks {ranks}: mpirun is not installed; install Open MPI (openmpi-bin), or use --ranks 1", 4)
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        fail(f"--ranks {ranks}: PyTorch needs one GPU per rank, and sees {torch.cuda.device_count()}; give fewer ranks", 4)
    backend = "nccl" if device.type == "cuda" else "gloo"
    found = torch.distributed.is_available() and getattr(torch.distributed, "is_backend_available", lambda name: False)(backend)
    if not found:  # also in PyTorch 1
        fail(f"--ranks {ranks}: PyTorch {torch.__version__} has no {backend} here; install another build, or remove --ranks", 4)


def main():
    global PROGRAM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="train-naive", help="training variants of fdsl-bench, separated by commas (default train-naive)")
    parser.add_argument("--bench", default=PROGRAM, help="path of fdsl-bench")
    parser.add_argument("--gradients", action="store_true", help="compare one training step instead of epochs")
    parser.add_argument("--device", default="cpu", help="device of PyTorch: cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--modes", type=modes_of, help=f"modes of PyTorch: {', '.join(MODES)} (default: resident)")
    parser.add_argument("--precision", choices=PRECISIONS, help="precision of PyTorch (default: PyTorch's, fp32 with TF32 in "
                                                                "convolutions; on a GPU bf16 for graph, best and autotuned)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes of mode loader (default 4)")
    parser.add_argument("--threads", type=int, help="CPU threads of both programs (default: all that this process may use)")
    parser.add_argument("--ranks", type=ranks_of, help="train on these numbers of ranks of this machine, separated by commas, such as "
                                                       "1,2,4; --threads are then per rank (default: the threads that this "
                                                       "process may use / the largest number of ranks)")
    parser.add_argument("--sync", type=lambda text: text.split(","), help="methods with which fdsl-bench adds up gradients on "
                                                                          "several ranks, separated by commas (default: auto)")
    parser.add_argument("--out", help="CSV file to append all rows to")
    options, arguments = parser.parse_known_args()
    PROGRAM = options.bench
    options.device = device_of(options.device)
    refuse_what_cannot_work(options, arguments)
    options.modes = options.modes or ["resident"]
    if options.ranks:
        options.sync = options.sync or ["auto"]
        refuse_ranks(max(options.ranks), options.device)
        return compare_ranks(options, arguments)
    return (check_gradients(options.variant, arguments, options.device) if options.gradients else
            compare(options, arguments))


def program():
    """Runs main(). If stdout or the file of rows cannot be written, prints one line."""
    return shared.status_of("compare/pytorch.py", main)


if __name__ == "__main__":
    sys.exit(program())
