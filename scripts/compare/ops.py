#!/usr/bin/env python3
"""Compares the workload ops with PyTorch: typical user code, vectorised code, and torch.compile.

    scripts/compare/ops.py [--bench PROGRAM] [--variant NAMES] [--device cuda|cpu] [--rows N] [--dim D] [--batch K]
                           [--loop-rows N] [--repeats N] [--file] [--out FILE.csv]

Tasks:

    mask     computes which rows have a norm between 0.1 and 100
    f16      computes the mask, removes the invalid rows, and converts the valid rows to f16
    fp8      computes the mask, removes the invalid rows, and converts the valid rows to fp8 e4m3fn
    permute  draws a random permutation of the row numbers
    gather   gathers random batches of --batch rows (8192) from a set that stays in memory
    file     --file: reads a .pt file from the page cache and computes the mask. PyTorch reads the file with torch.load and
             runs the row loop; fdsl-bench copies the rows of the file to the GPU in chunks

PyTorch's rows have the same shape and the same share of bad rows (5 %) as ours, but other values. Implementations:

    torch-loop      a loop that calls .item() for each of --loop-rows rows (20,000); its time is scaled to all rows
    torch           vectorised, eager
    torch-compile   torch.compile of the vectorised code
    the variants    of fdsl-bench; on a GPU with --resident, except for the task file

Times are medians of --repeats runs (20) after three warm-ups; on a GPU they are measured with events. Only torch-loop is timed
once, on the host. The script prints one
table: time, rows per second, and speed relative to the fastest PyTorch implementation of the task.
"""
import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

LOW, HIGH = 0.1, 100.0
WARMUPS = 3
STEPS = {"mask": ["--steps", "mask"], "f16": ["--steps", "mask,compact,convert", "--to", "f16"],
         "fp8": ["--steps", "mask,compact,convert", "--to", "fp8"], "permute": ["--steps", "permute"],
         "gather": ["--steps", "permute"]}


def make_rows(torch, options):
    """Returns rows with norms near 1. Every 20th row is bad. The kinds of bad rows alternate: too small, too large, NaN, infinity,
    zero."""
    rows = torch.randn(options.rows, options.dim, device=options.device) / math.sqrt(options.dim)
    bad = [rows[19 + 20 * kind::100] for kind in range(5)]
    bad[0].mul_(1e-3)
    bad[1].mul_(1e3)
    bad[2][:, 0] = math.nan
    bad[3][:, 0] = math.inf
    bad[4].zero_()
    return rows


def median_s(torch, options, run):
    """Returns the median time of a function. On a GPU, events measure it."""
    times = []
    for i in range(WARMUPS + options.repeats):
        if options.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(i)
            end.record()
            torch.cuda.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            begin_s = time.perf_counter()
            run(i)
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[WARMUPS:])


def row_loop(rows):
    """The loop of typical user code: one comparison on the host per row."""
    kept = []
    for i in range(rows.shape[0]):
        norm = rows[i].norm().item()
        if LOW <= norm <= HIGH:
            kept.append(i)
    return kept


def loop_s(torch, options, rows):
    """Returns the time of the row loop, scaled to all rows."""
    part = rows[:options.loop_rows]
    row_loop(part[:100])
    begin_s = time.perf_counter()
    row_loop(part)
    return (time.perf_counter() - begin_s) * options.rows / part.shape[0]


def time_torch(torch, options, rows):
    """Yields (task, implementation, seconds)."""
    def mask(values):
        norm = torch.linalg.vector_norm(values, dim=1)
        return (norm >= LOW) & (norm <= HIGH)

    def convert(dtype):
        return lambda values: values[mask(values)].to(dtype)

    yield "mask", "torch-loop", loop_s(torch, options, rows)
    for task, function in ("mask", mask), ("f16", convert(torch.float16)), ("fp8", convert(torch.float8_e4m3fn)):
        for name, wrap in ("torch", lambda f: f), ("torch-compile", torch.compile):
            compiled = wrap(function)
            yield task, name, median_s(torch, options, lambda i, run=compiled: run(rows))
    yield "permute", "torch", median_s(torch, options, lambda i: torch.randperm(options.rows, device=options.device))
    order = torch.randperm(options.rows, device=options.device)
    batches = max(options.rows // options.batch, 1)

    def gather(i):
        first = i % batches * options.batch
        return rows[order[first:first + options.batch]]
    yield "gather", "torch", median_s(torch, options, gather)


def time_file(torch, options, path):
    """Returns the time of torch.load and the row loop. The loop's time is scaled to all rows."""
    torch.load(path, map_location="cpu")
    begin_s = time.perf_counter()
    rows = torch.load(path, map_location="cpu")
    return time.perf_counter() - begin_s + loop_s(torch, options, rows)


def time_ours(options, task, more, folder):
    """Yields (variant, seconds) for each variant of --variant."""
    path = os.path.join(folder, f"{task}.csv")
    command = [options.bench, "--workload", "ops", "--variant", options.variant, "--loops", str(options.repeats), "--warmups",
               str(WARMUPS), "--warmup-time", "0", "--out", path, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare/ops.py: {' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield row["variant"], float(row["time_median_s"])


def measure(torch, options):
    """Returns rows (task, implementation, seconds)."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(torch, options)
        results += time_torch(torch, options, rows)
        path = os.path.join(folder, "rows.pt")
        if options.file:
            torch.save(rows.cpu(), path)
            results.append(("file", "torch-loop", time_file(torch, options, path)))
        del rows
        if options.device == "cuda":
            torch.cuda.empty_cache()
        common = ["--rows", str(options.rows), "--dim", str(options.dim)]
        common += ["--resident"] if options.device == "cuda" else []
        for task, steps in STEPS.items():
            more = [*steps, *common, *(["--sample", str(options.batch)] if task == "gather" else [])]
            results += [(task, variant, seconds) for variant, seconds in time_ours(options, task, more, folder)]
        if options.file:
            results += [("file", variant, seconds)
                        for variant, seconds in time_ours(options, "file", ["--data", path, *STEPS["mask"]], folder)]
    return results


def print_table(options, results):
    print(f"{options.rows} rows of {options.dim} values, f32")
    print(f"{'task':8} {'implementation':16} {'time':>12} {'rows/s':>10} {'speed':>10}")
    for task in dict.fromkeys(task for task, _, _ in results):
        timed = [(name, seconds) for of, name, seconds in results if of == task]
        best = min(seconds for name, seconds in timed if name.startswith("torch"))
        for name, seconds in timed:
            rows = options.batch if task == "gather" else options.rows
            print(f"{task:8} {name:16} {1e3 * seconds:9.4f} ms {rows / seconds:10.3g} {best / seconds:9.2f}x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="./fdsl-bench")
    parser.add_argument("--variant")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=4000000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--loop-rows", type=int, default=20000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--file", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.variant = options.variant or ("ops-cuda,ops-fused" if options.device == "cuda" else "ops-naive,ops-omp")
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except ImportError:
        sys.exit("compare/ops.py: needs PyTorch; install it, for example with pip install torch")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("compare/ops.py: PyTorch sees no GPU; use --device cpu")
    results = measure(torch, options)
    print_table(options, results)
    if options.out:
        with open(options.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["task", "implementation", "time_s", "rows", "dim"])
            writer.writerows([*result, options.rows, options.dim] for result in results)


if __name__ == "__main__":
    main()
