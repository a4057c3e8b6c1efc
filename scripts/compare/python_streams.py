#!/usr/bin/env python3
"""Measures the Python package fdsl, each figure beside its peers in the same run: fdsl-bench, PyTorch and NVIDIA DALI.

    scripts/compare/python_streams.py [--data-jpeg DIR] [--data-raw DIR] [--rows N] [--device cuda|cpu] [--only a,b,...]
                                      [--seconds S] [--rounds N] [--workers N] [--threads N,N,...] [--prefetch N] [--bench PROGRAM] [--out FILE.csv]

Parts:

    a   JPEG shards (--data-jpeg), random parts of 224 x 224 pixels, uint8, batches of 256: fdsl; the program's variant
        stream-gpu (on the CPU stream); DALI, if installed
    b   shards of .npy arrays of one shape and bytes (--data-raw), batches of 1024: fdsl; PyTorch's DataLoader, whose workers
        read the arrays with NumPy, in random order, with pinned memory. With --threads, fdsl is measured with each of these
        numbers of threads, and `fdsl` is the fastest of them
    c   --rows rows of 768 floats, which the script writes to a temporary folder (--folder): the rows with a norm from 0.1
        to 100 as float16: fdsl (Embeddings.validate); the program's variant ops-fused (on the CPU ops-omp); PyTorch
    d   random batches of 8192 rows of the result of c: fdsl (Loader.fill); the batches of an epoch of fdsl.Loader and, with
        PyTorch, of fdsl.torch.Loader; PyTorch (index_select)
    e   host time of one call of Loader.fill(), median and 90th percentile: batches of 256 of the shards of --data-raw or
        --data-jpeg and of generated images, and batches of 8192 of the rows of c; with PyTorch, beside it one copy_() of
        a tensor to the same memory. Before each call, the script waits for 2 ms without sleeping, so that batches are
        ready. The GPU computes while the call runs, as in training. The script never waits for the GPU: after a wait
        of some milliseconds, any call of CUDA takes two to five times as long, copy_() too

fdsl-bench and the loaders have --workers threads or worker processes (16). A part is measured --rounds times (3), its
implementations in turn, each for --seconds (2) after a warm-up, in part a on a GPU of 300 batches, which its JPEG engines need to
reach their speed; the table has the medians of the rounds. `ratio` is the speed of
fdsl, divided by that of the implementation in the row. With --out, all rounds are written to a CSV file, one line each. On a
GPU, a measurement ends when the GPU has finished, except in e.

What cannot be measured is named on stderr: parts whose data are not given, and peers that are not installed. With --device
cuda, PyTorch is needed. Prepare data with, for example:

    fdsl-bench --prepare raw --store shards --from synth --classes 16 --res 128 --channels 1 --samples 65536 --encode npy --shards 32

Interrupted (SIGINT or SIGTERM), the script prints and writes the rounds that it has measured.

Exit status: 0 done, 2 usage, 4 nothing could be measured, 130 interrupted.
"""
import argparse
import csv
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import loading  # noqa: E402

FIELDS = ("part", "what", "implementation", "round", "value", "unit", "device", "threads", "batch", "seconds")
PARTS = "abcde"
DIM, ROW_BATCH, RES = 768, 8192, 224
LOW, HIGH = 0.1, 100.0
CHUNK = 65536  # rows that are written at a time
GAP_S = 0.002  # between two calls of part e
ENGINES_WARM = 300  # batches


def skip(what, why):
    print(f"compare/python_streams.py: {what} is skipped: {why}", file=sys.stderr)


def find_fdsl():
    """Imports fdsl: the installed package, or the one of this source tree."""
    if importlib.util.find_spec("fdsl") is None:
        sys.path.append(os.path.join(loading.ROOT, "python"))
        os.environ.setdefault("FDSL_LIBRARY", os.path.join(loading.ROOT, "build", "lib", "libfdsl.so"))
    import fdsl
    return fdsl


class Run:
    """The options, the modules and the results of a run."""

    def __init__(self, options, torch, fdsl):
        self.options, self.torch, self.fdsl = options, torch, fdsl
        self.gpu = options.device == "cuda"
        self.results = []
        if torch:
            import fdsl.torch
        self.Loader = fdsl.torch.Loader if torch else fdsl.Loader

    def open(self, source, batch, threads=None, **more):
        return self.Loader(source, batch, device=self.options.device, num_threads=threads or self.options.workers,
                           prefetch=self.options.prefetch, seed=1, **more)

    def finish(self):
        """Waits for the GPU."""
        if self.gpu:
            self.torch.cuda.synchronize()

    def compare(self, part, what, unit, batch, implementations):
        """Measures implementations (name, function that returns a value, and perhaps its threads) in turn."""
        for number in range(self.options.rounds):
            for name, function, *threads in implementations:
                value = function()
                if value is not None:
                    self.keep(part, what, unit, batch, name, number, value, *threads)

    def keep(self, part, what, unit, batch, name, number, value, threads=None):
        self.results.append({
            "part": part, "what": what, "implementation": name, "round": number, "value": value, "unit": unit,
            "device": self.options.device, "threads": threads or self.options.workers, "batch": batch,
            "seconds": self.options.seconds})

    def rate(self, batches, count, epoch, warm=0):
        """Returns the samples per second of an endless sequence of batches: the median over spans of `epoch` batches, as a
        row of the program is the median of its runs; if there are fewer than three spans, over all. The warm-up has at least
        `warm` batches, and takes at least half of the time, at most one second."""
        seconds = self.options.seconds
        warm_s = time.perf_counter() + min(seconds / 2, 1)
        for number, _ in enumerate(batches, 1):
            if number >= warm and time.perf_counter() > warm_s:
                break
        self.finish()
        samples, begin_s, spans = 0, time.perf_counter(), []
        for number, batch in enumerate(batches, 1):
            samples += count(batch)
            if number % epoch == 0:
                spans.append((samples, time.perf_counter()))
            if time.perf_counter() - begin_s > seconds:
                break
        self.finish()
        if len(spans) < 4:
            return samples / (time.perf_counter() - begin_s)
        return statistics.median((b - a) / (until - since) for (a, since), (b, until) in zip(spans, spans[1:]))

    def median_us(self, function):
        """Returns the median time of a function in microseconds, each call with the work that it enqueued."""
        times, begin_s = [], time.perf_counter()
        for i in range(3):
            function(i)
        while len(times) < 5 or time.perf_counter() - begin_s < self.options.seconds:
            self.finish()
            call_s = time.perf_counter()
            function(len(times))
            self.finish()
            times.append(time.perf_counter() - call_s)
        return 1e6 * statistics.median(times)

    def mean_us(self, function):
        """Returns the mean time of consecutive calls in microseconds; the GPU is waited for once."""
        for i in range(16):
            function(i)
        self.finish()
        calls, begin_s = 0, time.perf_counter()
        while time.perf_counter() - begin_s < self.options.seconds:
            for _ in range(16):
                function(calls)
                calls += 1
            self.finish()
        return 1e6 * (time.perf_counter() - begin_s) / calls

    def program(self, variant, column, *arguments):
        """Returns a column of the program's row."""
        command = [self.options.bench, "--variant", variant, "--max-time", str(self.options.seconds), "--format", "csv", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 4):
            sys.exit(f"compare/python_streams.py: {' '.join(command)}: {done.stderr.strip()[-500:]}")
        rows = list(csv.DictReader(done.stdout.splitlines()))
        if not rows:
            skip(variant, done.stderr.strip().splitlines()[-1])
            return None
        return float(rows[0][column])


def endless(iterable):
    """Yields the items of an iterable, epoch after epoch."""
    while True:
        yield from iterable


def measure_jpeg(run):
    options = run.options
    data = run.fdsl.Shards(options.data_jpeg)
    # a file of another type, such as an array, cannot be cropped; the loader names it
    loader = run.open(data, 256, transforms=run.fdsl.RandomResizedCrop(RES))
    more = ["--dtype", "raw"] if run.gpu else ["--decode"]
    program = ["--data", options.data_jpeg, "--batch", "256", "--threads", str(options.workers), "--prefetch", str(options.prefetch),
               "--out-res", str(RES), "--fit", "random-resized-crop", "--cache", "any", *more]
    batches, warm = endless(loader), ENGINES_WARM if run.gpu else 0
    if run.gpu:  # a run of the program is an epoch
        program += ["--warmups", str(math.ceil(warm / math.ceil(len(data) / 256)))]
    implementations = [
        ("fdsl", lambda: run.rate(batches, lambda batch: len(batch[0]), len(loader), warm)),
        ("stream-gpu" if run.gpu else "stream",
         lambda: run.program("stream-gpu" if run.gpu else "stream", "items_per_s", *program)),
    ]
    dali = loading.find_module("nvidia.dali")
    if dali:
        names = argparse.Namespace(batch=256, workers=options.workers, gpu=run.gpu, decode=RES)
        peer = loading.DaliLoader(dali, loading.data_shards(options.data_jpeg), names)
        of_dali = (batch for _ in endless([0]) for batch in peer.epoch())
        implementations.append(("dali", lambda: run.rate(of_dali, lambda batch: batch[1], len(loader), warm)))
    run.compare("a", f"JPEG shards, {RES} x {RES} uint8", "images/s", 256, implementations)
    loader.close()


def make_arrays(run, numpy):
    """Returns a data set for a DataLoader: the arrays of the shards, read at random positions. Every worker keeps the shards
    open, and all arrays have the header of the first one, so a sample costs one read."""
    places = []
    for path in loading.data_shards(run.options.data_raw):
        with tarfile.open(path) as shard:
            places += [(path, member.offset_data, member.size) for member in shard
                       if member.isfile() and loading.is_data(member.name)]
    path, offset, size = places[0]
    with open(path, "rb") as file:
        file.seek(offset)
        first = numpy.load(file)
    header = size - first.nbytes

    class Arrays(run.torch.utils.data.Dataset):
        files = {}

        def __len__(self):
            return len(places)

        def __getitem__(self, index):
            path, offset, size = places[index]
            if path not in self.files:
                self.files[path] = os.open(path, os.O_RDONLY)
            data = bytearray(size)
            os.preadv(self.files[path], [data], offset)
            array = numpy.frombuffer(data, first.dtype, offset=header).reshape(first.shape)
            return run.torch.from_numpy(array)
    return Arrays()


def measure_raw(run):
    options = run.options
    data = run.fdsl.Shards(options.data_raw)
    with run.open(data, 1024, channels=1) as loader:
        what = f"raw shards, {math.prod(loader.shape)} bytes"

    def rate(threads):
        """Returns the rate of a loader of its own: threads of several loaders would compete for the cores."""
        with run.open(data, 1024, threads, channels=1) as loader:
            return run.rate(endless(loader), lambda batch: len(batch[0]), len(loader))
    implementations = [(f"fdsl, {threads} threads", lambda threads=threads: rate(threads), threads)
                       for threads in options.threads or [options.workers]]
    own = [name for name, _, _ in implementations]
    numpy = loading.find_module("numpy")
    if run.torch and numpy:
        names = argparse.Namespace(batch=1024, workers=options.workers, gpu=run.gpu)
        kind = loading.GpuLoader if run.gpu else loading.TorchLoader
        peer = kind(run.torch, make_arrays(run, numpy), names, shuffle=True)
        of_torch = (batch for _ in endless([0]) for batch in peer.epoch())
        epoch = math.ceil(len(data) / 1024)
        implementations.append(("torch DataLoader", lambda: run.rate(of_torch, lambda batch: batch.shape[0], epoch)))
    run.compare("b", what, "samples/s", 1024, implementations)
    rows = {name: [row for row in run.results if row["implementation"] == name] for name in own}
    fastest = max(own, key=lambda name: statistics.median(row["value"] for row in rows[name]))
    run.results += [{**row, "implementation": "fdsl"} for row in rows[fastest]]


def write_rows(numpy, path, count):
    """Writes rows with norms near 1. Every 20th row is bad: too small, too large, NaN, infinity, zero."""
    with open(path, "wb") as file:
        numpy.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, DIM)})
        values = numpy.random.default_rng(0).standard_normal((min(CHUNK, count), DIM), dtype=numpy.float32) / math.sqrt(DIM)
        for first in range(0, count, CHUNK):
            rows = numpy.roll(values, first // CHUNK, axis=1)[:count - first]  # other rows in each chunk
            rows[19::100] *= 1e-3
            rows[39::100] *= 1e3
            rows[59::100, 0] = math.nan
            rows[79::100, 0] = math.inf
            rows[99::100] = 0
            file.write(rows.tobytes())


def torch_rows(run, numpy, path):
    return run.torch.from_numpy(numpy.load(path)).to(run.options.device)


def keep_torch(torch, rows):
    norm = torch.linalg.vector_norm(rows, dim=1)
    return rows[(norm >= LOW) & (norm <= HIGH)].to(torch.float16)


def measure_rows(run, numpy, path):
    """Returns the valid rows as float16: those of fdsl, and those of PyTorch or None."""
    rows, torch = run.fdsl.Embeddings(path, num_threads=run.options.workers), run.torch
    rows = rows.to("cuda") if run.gpu else rows
    program = ["--workload", "ops", "--data", path, "--steps", "mask,compact,convert", "--to", "f16", "--threads",
               str(run.options.workers), *(["--resident"] if run.gpu else [])]
    variant = "ops-fused" if run.gpu else "ops-omp"
    good = rows.validate((LOW, HIGH), dtype="float16")
    implementations = [("fdsl", lambda: run.median_us(lambda i: rows.validate((LOW, HIGH), dtype="float16"))),
                       (variant, lambda: scaled(1e6, run.program(variant, "time_median_s", *program)))]
    good_torch = None
    if torch:
        peer = torch_rows(run, numpy, path)
        good_torch = keep_torch(torch, peer)
        if len(good_torch) != len(good):
            sys.exit(f"compare/python_streams.py: fdsl keeps {len(good)} rows, but PyTorch keeps {len(good_torch)}")
        implementations.append(("torch", lambda: run.median_us(lambda i: keep_torch(torch, peer))))
    if "c" in run.options.only:
        run.compare("c", f"{run.options.rows} rows, filter and float16", "us", "", implementations)
    return good, good_torch


def scaled(factor, value):
    return None if value is None else factor * value


def memory_for(run, loader, numpy):
    """Returns arrays for fill(), on the loader's device."""
    shape = (loader.batch_size, *loader.shape)
    if run.torch:
        of = {"device": run.options.device}
        return (run.torch.empty(shape, dtype=getattr(run.torch, loader.dtype), **of),
                run.torch.empty(shape[:1], dtype=run.torch.int64, **of))
    return numpy.empty(shape, loader.dtype), numpy.empty(shape[:1], numpy.int64)


def filler(loader, batch, labels):
    """Returns a function that fills the next batch, also over the end of an epoch."""
    def fill(_):
        if loader.fill(batch, labels) is None:
            loader.fill(batch, labels)
    return fill


def taker(loader):
    """Returns a function that takes the next batch, epoch after epoch."""
    batches = endless(loader)
    return lambda _: next(batches)


def measure_batches(run, numpy, good, good_torch):
    batch = min(ROW_BATCH, len(good))
    loader = run.open(good, batch, resident=run.gpu, drop_last=True)
    memory, _ = memory_for(run, loader, numpy)
    implementations = [("fdsl", lambda: run.mean_us(filler(loader, memory, None)))]
    for kind in (run.fdsl.Loader, *([run.fdsl.torch.Loader] if run.torch else [])):
        one = kind(good, batch, device=run.options.device, num_threads=run.options.workers, seed=1, resident=run.gpu, drop_last=True)
        implementations.append((f"{kind.__module__.replace('._stream', '')}.Loader", lambda one=one: run.mean_us(taker(one))))
    if run.torch:
        order = run.torch.randperm(len(good_torch), device=run.options.device)
        batches = len(order) // batch

        def select(i):
            first = i % batches * batch
            run.torch.index_select(good_torch, 0, order[first:first + batch])
        implementations.append(("torch", lambda: run.mean_us(select)))
    run.compare("d", f"random batches, float16 rows of {DIM}", "us", batch, implementations)
    loader.close()


def host_us(run, call):
    """Returns the median and the 90th percentile of the time that a call takes on the host, if batches are ready. As in a
    training loop, the GPU computes while the call runs: after an idle time, the driver would need longer."""
    times, begin_s = [], time.perf_counter()
    if run.gpu:
        factor = run.torch.ones(2048, 2048, dtype=run.torch.float32, device="cuda")
    for i in range(16):
        call(i)
    run.finish()
    while len(times) < 20 or time.perf_counter() - begin_s < run.options.seconds:
        wait_s = time.perf_counter() + GAP_S / 2
        while time.perf_counter() < wait_s:
            pass  # after a sleep, the core would be slow for the next 0.1 ms
        for _ in range(3 if run.gpu else 0):
            run.torch.mm(factor, factor)  # together less than GAP_S
        wait_s = time.perf_counter() + GAP_S / 2
        while time.perf_counter() < wait_s:
            pass
        call_s = time.perf_counter()
        call(0)
        times.append(time.perf_counter() - call_s)
    run.finish()
    return 1e6 * statistics.median(times), 1e6 * statistics.quantiles(times, n=10)[-1]


def measure_fill(run, numpy, good):
    options, fdsl = run.options, run.fdsl
    sources = []
    if options.data_raw:
        sources.append(("data set", fdsl.Shards(options.data_raw), {"channels": 1}))
    elif options.data_jpeg:
        sources.append(("data set", fdsl.Shards(options.data_jpeg), {"transforms": fdsl.RandomResizedCrop(RES)}))
    sources.append(("generated", fdsl.Images(16, count=4096, res=64, channels=1), {}))
    if good is not None:
        sources.append(("rows", good, {"resident": run.gpu}))
    for name, source, more in sources:
        loader = run.open(source, min(ROW_BATCH if source is good else 256, len(source)), drop_last=True, **more)
        images, labels = memory_for(run, loader, numpy)
        calls = [("fdsl", filler(loader, images, labels if source.labelled else None))]
        if run.torch:
            other = images.clone()
            calls.append(("torch copy_", lambda _, to=images, other=other: to.copy_(other)))
        for number in range(options.rounds):
            for implementation, call in calls:
                for what, value in zip(("median", "90 %"), host_us(run, call)):
                    run.keep("e", f"host time of fill: {name}, {what}", "us", loader.batch_size, implementation, number, value)
        loader.close()


def measure(run):
    options = run.options
    for part, function, folder, name in (("a", measure_jpeg, options.data_jpeg, "--data-jpeg"),
                                         ("b", measure_raw, options.data_raw, "--data-raw")):
        if part in options.only and folder:
            function(run)
        elif part in options.only:
            skip(f"part {part}", f"{name} is not given")
    if not set("cde") & set(options.only):
        return
    numpy = loading.find_module("numpy")
    if not numpy:
        skip("parts c, d and e", "they need NumPy")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, good, good_torch = os.path.join(folder, "rows.npy"), None, None
        if options.rows:
            write_rows(numpy, path, options.rows)
            good, good_torch = measure_rows(run, numpy, path)
        if "d" in options.only and good is not None:
            measure_batches(run, numpy, good, good_torch)
        if "e" in options.only:
            measure_fill(run, numpy, good)


def print_table(results):
    groups = {}
    for row in results:
        groups.setdefault((row["part"], row["what"], row["unit"]), {}).setdefault(row["implementation"], []).append(row)
    print(f"{'':36} {'implementation':16} {'threads':>7} {'median':>12} {'':9} {'ratio':>6}")
    for (part, what, unit), found in groups.items():
        own = statistics.median([row["value"] for row in found.get("fdsl", ())] or [math.nan])
        for name, rows in found.items():
            value = statistics.median(row["value"] for row in rows)
            ratio = value / own if unit == "us" else own / value
            print(f"{part} {what:34} {name:16} {rows[0]['threads']:7} {value:12.4g} {unit:9} {ratio:6.2f}")


def parts(text):
    names = text.split(",")
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of a, b, c, d and e")
    return names


def counts(text):
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers of threads")
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-jpeg", metavar="DIR", help="tar shards of JPEG files")
    parser.add_argument("--data-raw", metavar="DIR", help="tar shards of .npy arrays (1, height, width) or (height, width) of bytes")
    parser.add_argument("--rows", type=int, default=4_000_000, metavar="N",
                        help="embeddings of parts c, d and e (default 4000000: files of 12 GB); 0: none")
    parser.add_argument("--folder", metavar="DIR", help="folder for the temporary embeddings (default: that of the system)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="a,b,...", help="the parts to measure (default: all)")
    parser.add_argument("--seconds", type=float, default=2, metavar="S", help="time of each measurement (default 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each implementation (default 3)")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="threads or worker processes (default 16)")
    parser.add_argument("--threads", type=counts, metavar="N,N,...",
                        help="numbers of threads of fdsl in part b, such as 8,12,14,15,16,20 (default: --workers)")
    parser.add_argument("--prefetch", type=int, default=4, metavar="N", help="batches that fdsl prepares ahead (default 4)")
    parser.add_argument("--bench", default=os.path.join(loading.ROOT, "fdsl-bench"), metavar="PROGRAM")
    parser.add_argument("--out", metavar="FILE", help="write all rounds to this CSV file")
    options = parser.parse_args()
    if min(options.seconds, options.rounds, options.workers, options.prefetch) <= 0 or options.rows < 0:
        parser.error("--seconds, --rounds, --workers and --prefetch must be above 0, and --rows at least 0")
    torch = loading.find_module("torch")
    if options.device == "cuda" and not (torch and torch.cuda.is_available()):
        skip("everything", "--device cuda needs PyTorch and a GPU; use --device cpu")
        return 4
    run = Run(options, torch, find_fdsl())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    try:
        measure(run)
    except KeyboardInterrupt:
        interrupted = True
    print_table(run.results)
    if options.out:
        with open(options.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(run.results)
    if interrupted:
        return 130
    return 0 if run.results else 4


if __name__ == "__main__":
    sys.exit(main())
