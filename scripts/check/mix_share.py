#!/usr/bin/env python3
"""Checks the share that `--mix synth:auto,load` chooses, with reads of a known rate.

    scripts/check/mix_share.py [--rates F ...] [--model M] [--batch N] [--variant V]

Prepares JPEG images in a temporary folder, and measures how many of them per second the network trains on without reading
(--feed constant). Then trains on mixtures while a library that is loaded before the program (LD_PRELOAD) delays its reads:
all threads together read F times this rate. Prints the chosen share, the images per second that were read, their ratio to
the rate of reading, and the share of the time that the steps waited.

The share is right if the mixture reads at least 60 % of the known rate (the search keeps a third in reserve), or at least 95 % of
all samples, and steps wait for at most 5 % of their time. Needs a C compiler. FDSL_BENCH is the program (default: ./fdsl-bench). Exit status: 0 if all shares are
right, 1 if not, 2 for wrong usage.

On a busy machine, steps take longer in one second than in the next, and there is no best share. There, --model logreg
--sleep 20000 --rates 0.1 0.2 0.3 0.4 0.47 --threads 1 makes steps of the CPU as long as they sleep.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LATE_NS 20000000 /* reads may catch up with this delay, so that decoding does not lower their rate */

static _Atomic int64_t free_ns; /* the time until which the reads so far take */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

ssize_t pread(int fd, void *bytes, size_t size, off_t at)
{
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real)
        real = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    const ssize_t got = real(fd, bytes, size, at);
    const int64_t took_ns = (int64_t)(1e9 * (got > 0 ? got : 0) / atof(getenv("PACED_BYTES_PER_S")));
    int64_t begin_ns = atomic_load(&free_ns), now = now_ns(), end_ns;
    do
        end_ns = (begin_ns > now - LATE_NS ? begin_ns : now - LATE_NS) + took_ns;
    while (!atomic_compare_exchange_weak(&free_ns, &begin_ns, end_ns));
    const struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, 0);
    return got;
}

ssize_t pread64(int fd, void *bytes, size_t size, off_t at)
{
    return pread(fd, bytes, size, at);
}

/* Makes the duration of a step independent of other processes: it sleeps longer than it computes. */
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
{
    static void (*real)(void (*)(void *), void *, unsigned, unsigned);
    const double sleep_us = atof(getenv("PACED_PARALLEL_US"));
    const struct timespec pause = {0, (long)(1e3 * sleep_us)};
    if (!real)
        real = (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(RTLD_NEXT, "GOMP_parallel");
    real(function, data, threads, flags);
    if (sleep_us > 0)
        nanosleep(&pause, 0);
}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.15, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--res", type=int, default=32)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=4, help="of the epochs that are counted")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sleep", type=float, default=0, help="microseconds after each parallel region of OpenMP")
    parser.add_argument("--variant", default="train-omp")
    options = parser.parse_args()
    bench = os.path.abspath(os.environ.get("FDSL_BENCH", "fdsl-bench"))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "paced.c")
        source.write_text(PACED, encoding="utf-8")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/paced.so", source, "-ldl"], check=True)
        data = Path(folder, "set")
        subprocess.run([bench, "--prepare", data, "--from", "synth", "--store", "files", "--encode", "jpeg", "--res", str(options.res),
                        "--samples", str(options.images), "--classes", "10"], check=True, stdout=subprocess.DEVNULL)
        size = sum(path.stat().st_size for path in data.rglob("*.jp*g")) / options.images

        def train(name, words, rate=1e12):
            """Returns images per second and the shares of waiting of the epochs after the first, and what was printed."""
            rows = Path(folder, f"{name}.csv")
            command = [bench, "--workload", "train", "--variant", options.variant, "--model", options.model, "--batch", str(options.batch), "--out-res",
                       str(options.res), "--channels", "3", "--classes", "10", "--test-size", "1", "--mean", "0.5", "--std",
                       "0.25", "--allow-nan", "--out", rows, *words]
            command += ["--threads", str(options.threads)] if options.threads else []
            extra = {"LD_PRELOAD": f"{folder}/paced.so", "PACED_BYTES_PER_S": str(rate), "PACED_PARALLEL_US": str(options.sleep)}
            run = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(f"check/mix_share.py: {run.stderr}")
            with open(rows, encoding="utf-8") as file:
                counted = [row for row in csv.DictReader(file) if int(row["epoch"]) > 1]
            spent = sum(float(row["time_mean_s"]) for row in counted)
            stalls = sum(float(row["stall_share"] or 0) * float(row["time_mean_s"]) for row in counted)
            return sum(float(row["items"]) for row in counted) / spent, stalls / spent, run.stderr

        alone, _, _ = train("constant", ["--feed", "constant", "--epochs", "3", "--data", "synth", "--res", str(options.res)])
        print(f"{alone:.0f} images/s without reading\n{'reading/s':>10}{'share':>8}{'tried':>7}{'read/s':>9}{'ratio':>8}{'waits':>8}")
        for part in options.rates:
            rate = part * alone
            epoch = max(options.batch, min(0.9 * options.images, options.seconds * rate / 2))
            got, stalls, text = train(f"{part}", ["--feed", "mixed", "--mix", "synth:auto,load", "--shuffle", "64", "--data", data, "--epochs", "4",
                                                  "--train-size", str(round(epoch))], rate * size)
            share, tried = re.search(r"that are read is ([0-9.]+) \((\d+) tried", text).groups()
            ratio = float(share) * got / rate
            wrong = stalls > 0.05 or (ratio < 0.6 and float(share) < 0.95)
            failed += wrong
            print(f"{rate:10.0f}{float(share):8.2f}{tried:>7}{float(share) * got:9.0f}{ratio:8.3f}{stalls:8.3f}"
                  f"{'  WRONG' if wrong else ''}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
