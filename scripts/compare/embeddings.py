#!/usr/bin/env python3
"""Times embeddings from Python: the selection of rows that are on a GPU, and then random batches.

    scripts/compare/embeddings.py [--device cuda|cpu] [--rows N] [--dim D] [--batch K] [--repeats N] [--folder DIR]
                                  [--bench PROGRAM]

Writes a file of --rows rows (4,000,000) of --dim floats (768) to --folder, and removes it at the end. Every 20th row is bad.
Needs PyTorch on a GPU. Prints medians:

    select   validate((0.1, 100), dtype="float16") until the new set is complete. The same task of PyTorch, and with --bench
             the median of ops-fused, for comparison
    next     one batch of --batch rows (8192) of fdsl.Loader and of fdsl.torch.Loader: the time of an epoch, until the
             last batch is complete, divided by its batches
    fill     fdsl.Loader.fill() of such a batch, and the time of the calling thread alone
"""
import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../python"))

import numpy  # noqa: E402

import fdsl  # noqa: E402

BLOCK = 100_000  # rows; the file repeats them
WARMUPS = 4  # the first selections take memory from the device


def write_rows(path, options):
    rows = numpy.random.default_rng(1).standard_normal((min(BLOCK, options.rows), options.dim), "f4")
    rows /= numpy.float32(options.dim**0.5)
    for kind, value in enumerate((1e-3, 1e3, numpy.nan, numpy.inf, 0)):
        rows[19 + 20 * kind :: 100] *= numpy.float32(value)
    with open(path, "wb") as file:
        numpy.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (options.rows, options.dim)}
        )
        for first in range(0, options.rows, BLOCK):
            file.write(memoryview(rows[: options.rows - first]).cast("B"))


def times_s(run, repeats):
    """Returns the times of a function, which are sorted."""
    times = []
    for _ in range(WARMUPS + repeats):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return sorted(times[WARMUPS:])


def tell(name, times, unit):
    factor = {"ms": 1e3, "us": 1e6}[unit]
    print(f"{name:44} {factor * statistics.median(times):10.3f} {unit}, least {factor * times[0]:.3f} {unit}", flush=True)


def select_of_torch(torch, path):
    rows = torch.from_numpy(numpy.load(path)).cuda()

    def run():
        norm = rows.norm(dim=1)
        kept = rows[(norm >= 0.1) & (norm <= 100)].half()
        torch.cuda.synchronize()
        return kept

    return run


def time_of_bench(options, folder):
    path = os.path.join(folder, "ops.csv")
    command = [options.bench, "--workload", "ops", "--variant", "ops-fused", "--resident", "--steps", "mask,compact,convert",
               "--to", "f16", "--rows", str(options.rows), "--dim", str(options.dim), "--loops", str(options.repeats),
               "--out", path]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare/embeddings.py: {' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    with open(path, newline="", encoding="utf-8") as file:
        return [float(row["time_median_s"]) for row in csv.DictReader(file)]


def time_batches(options, rows, synchronize):
    arguments = {"device": options.device, "seed": 1, "drop_last": True}
    loaders = [fdsl.Loader(rows, options.batch, **arguments)]
    if options.device == "cuda":
        from fdsl import torch

        loaders.append(torch.Loader(rows, options.batch, **arguments))
    for loader in loaders:

        def epoch(loader=loader):
            for _ in loader:
                pass
            synchronize()

        tell(f"next, {type(loader).__module__}.Loader", [one / len(loader) for one in times_s(epoch, 5)], "us")
    loader = loaders[0]
    images, _ = next(iter(loader))
    host, all_s = [], []
    for _ in range(3):
        begin_s, count = time.perf_counter(), 0
        while True:
            call_s = time.perf_counter()
            if loader.fill(images) is None:
                break
            host.append(time.perf_counter() - call_s)
            count += 1
        synchronize()
        all_s.append((time.perf_counter() - begin_s) / max(count, 1))
    tell("fill, until the batches are complete", sorted(all_s), "us")
    tell("fill, the time of a call", sorted(host), "us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, value in ("rows", 4_000_000), ("dim", 768), ("batch", 8192), ("repeats", 20):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--bench", default=None)
    options = parser.parse_args()
    synchronize = lambda: None  # noqa: E731
    if options.device == "cuda":
        import torch

        synchronize = torch.cuda.synchronize
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(folder, "rows.npy")
        write_rows(path, options)
        rows = fdsl.Embeddings(path).to(options.device)
        kept = []

        def select():
            kept[:] = [rows.validate((0.1, 100), dtype="float16")]
            synchronize()

        tell("select", times_s(select, options.repeats), "ms")
        print(f"{len(kept[0])} of {len(rows)} rows are kept")
        time_batches(options, kept[0], synchronize)
        del rows, kept[:]
        if options.bench:
            tell("select, ops-fused", time_of_bench(options, folder), "ms")
        if options.device == "cuda":
            tell("select, PyTorch", times_s(select_of_torch(torch, path), options.repeats), "ms")


if __name__ == "__main__":
    main()
