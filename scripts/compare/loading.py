#!/usr/bin/env python3
"""Times loaders other than fdsl-bench on its data sets: PyTorch's DataLoader and, if installed, webdataset and NVIDIA DALI.

    scripts/compare/loading.py --files DIR --shards DIR [--gpu] [--decode RES] [--out FILE] [--workers N] [--batch N]
                               [--time S] [--bench PROGRAM]

A run is one epoch. Samples are delivered in batches of bytes, as in fdsl-bench. Only the data of a sample (npy, bin, png,
jpg) are read. Labels (.cls and the like) are skipped, but fdsl-bench delivers labels. Therefore compare on samples without
labels, such as those of --prepare --classes 0. Loaders:

    torch-files         DataLoader over a Dataset that opens, reads and closes one file per sample, shuffled
    torch-shards        DataLoader over an IterableDataset that streams the tars with tarfile, shards shuffled
    webdataset          DataLoader over webdataset.WebDataset of the same tars, if the module is installed
    dali                NVIDIA DALI's webdataset reader on the CPU, in order, if installed; with the .idx files of --prepare,
                        or without them if they do not exist

Workers are processes (threads for DALI) that persist over all epochs; the column `threads` has their number. With --workers 0,
the main process reads in one thread; these variants are named torch-files-inline and so on. Before the timing, the script sums the
hashes of all samples of one epoch. The sum must equal the sum over the files, or over the tar members that Python's tarfile
reads. Samples and bytes are counted in every epoch. Rows have the columns of fdsl-bench's workload `load`, so the rows of
both programs fit into one table; columns that do not apply are empty.

--bench PROGRAM also measures the fdsl-bench variants on the same data, with one thread per worker (one thread for
--workers 0). The script then prints the time per sample of every loader and its ratio to the fastest. With --gpu, the
fdsl-bench variants are files-gpu and shards-gpu, which deliver the same bytes on the GPU (--dtype raw).

With --gpu, the loaders are torch-files-gpu and torch-shards-gpu, which deliver batches on the GPU. They are set up as PyTorch
recommends. Workers (16 by default) stack batches in shared memory. A thread copies the batches to pinned memory (pin_memory),
and non_blocking=True copies them to the GPU. An epoch ends after the last copy. These loaders do not process the bytes on the
GPU; the GPU variants of fdsl-bench do.

With --decode RES, every loader decodes its images (JPEG, PNG) on the CPU, and cuts out a random part in the same way as
torchvision's RandomResizedCrop. Every loader delivers bytes of shape (3, RES, RES). Except for dali, the
suffix names the decoder: -pil (Pillow) or -io (torchvision.io). The fdsl-bench variants run with --out-res RES --fit random-resized-crop. The random parts
differ between the loaders, so only the number of samples and their shape are checked.

With --gpu --decode RES, PyTorch's workers decode on the CPU, and the pixels are copied to the GPU as above. dali-gpu decodes the
JPEG files by nvJPEG (device="mixed") and resizes them on the GPU; its --workers threads read and parse. The fdsl-bench variant is
shards-gpu with --dtype raw, and with 2 threads, which are enough for its decoders.
"""
import argparse
import contextlib
import csv
import datetime
import hashlib
import importlib
import io
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tarfile
import time

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
from shared import ROOT, failing  # noqa: E402  (in this folder)

sys.path.append(str(ROOT / "scripts/figures"))
from rows import COLUMNS as COLUMNS_OF, SCHEMAS  # noqa: E402

COLUMNS, SCHEMA = COLUMNS_OF["load"], SCHEMAS["load"]
fail = failing("compare/loading.py")
DATA_EXTENSIONS = ("npy", "bin", "png", "jpg", "jpeg")


def data_files(folder):
    """Returns the data files of a folder, one per sample, without labels."""
    return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names if is_data(name))


def data_shards(folder):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".tar"))


def is_data(name):
    return name.rsplit(".", 1)[-1].lower() in DATA_EXTENSIONS


class TorchLoader:
    """A DataLoader whose workers persist over all epochs, so that no timed epoch includes their start."""

    def __init__(self, torch, dataset, options, **more):
        def collate(samples):  # one tensor per batch, because workers need time for each tensor that they pass on
            sizes = [len(sample) for sample in samples]
            return torch.stack(samples) if min(sizes) == max(sizes) else (torch.cat(samples), sizes)
        self.loader = torch.utils.data.DataLoader(dataset, batch_size=options.batch, num_workers=options.workers,
                                                  persistent_workers=options.workers > 0, collate_fn=collate,
                                                  pin_memory=options.gpu, **more)

    def epoch(self):
        """Yields the batches of an epoch. A batch is a tensor (samples, bytes). If the samples differ in size, it is a pair: a
        tensor of all bytes, and a list of the sizes."""
        return iter(self.loader)

    @staticmethod
    def count(batch):
        """Counts samples and bytes without inspecting each sample."""
        return (batch.shape[0], batch.numel()) if hasattr(batch, "numel") else (len(batch[1]), batch[0].numel())

    @staticmethod
    def samples(batch):
        return (sample.cpu().numpy().tobytes()
                for sample in (batch if hasattr(batch, "numel") else batch[0].split(batch[1])))


class GpuLoader(TorchLoader):
    """A loader whose batches are delivered on the GPU."""

    def __init__(self, torch, *arguments, **more):
        super().__init__(torch, *arguments, **more)
        self.torch = torch

    def epoch(self):
        for batch in self.loader:
            if hasattr(batch, "numel"):
                yield batch.to("cuda", non_blocking=True)
            else:
                yield batch[0].to("cuda", non_blocking=True), batch[1]
        self.torch.cuda.synchronize()


class DaliLoader:
    """DALI's reader of tars. With --gpu, it decodes and resizes on the GPU. It pads the last batch of an epoch with copies of the last sample. The copies are not
    counted."""

    def __init__(self, dali, shards, options):
        with tarfile.open(shards[0]) as shard:
            extension = next(member.name for member in shard if is_data(member.name)).split(".", 1)[1]
        indexes = [shard[:-len("tar")] + "idx" for shard in shards]
        indexes = indexes if all(map(os.path.exists, indexes)) else []
        self.pipeline = dali.Pipeline(batch_size=options.batch, num_threads=max(options.workers, 1),
                                      device_id=0 if options.gpu else None)
        with self.pipeline:
            samples = dali.fn.readers.webdataset(
                paths=shards, index_paths=indexes, ext=[extension], name="reader", pad_last_batch=True)
            if options.decode:
                samples = dali.fn.decoders.image_random_crop(
                    samples, device="mixed" if options.gpu else "cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
                samples = dali.fn.resize(samples, resize_x=options.decode, resize_y=options.decode)
            self.pipeline.set_outputs(samples)
        self.pipeline.build()
        self.size = self.pipeline.reader_meta("reader")["epoch_size"]
        self.batch = options.batch

    def epoch(self):
        for first in range(0, self.size, self.batch):
            yield self.pipeline.run()[0], min(self.batch, self.size - first)

    @staticmethod
    def count(batch):
        tensors, samples = batch
        return samples, sum(math.prod(shape) for shape in tensors.shape()[:samples])

    @staticmethod
    def samples(batch):
        tensors, samples = batch
        return (bytes(tensors.at(i)) for i in range(samples))


def as_tensor(torch, data):
    """Converts bytes to a tensor. A bytearray is not copied."""
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def read_whole(path):
    """Reads a file without an extra copy."""
    with open(path, "rb", buffering=0) as stream:
        data = bytearray(os.fstat(stream.fileno()).st_size)
        if stream.readinto(data) != len(data):
            raise OSError("%s: a short read" % path)
    return data


def make_decoder(name, size):
    """Returns a function that converts the bytes of an image to a tensor (3, size, size). If a module is not installed, prints a
    message and returns None."""
    torchvision = find_module("torchvision.transforms.v2")
    module = torchvision and find_module({"pil": "PIL.Image", "io": "torchvision.io"}[name])
    if not module:
        return None
    crop = torchvision.RandomResizedCrop(size, antialias=True)
    if name == "pil":
        return lambda data: torchvision.functional.pil_to_tensor(crop(module.open(io.BytesIO(data)).convert("RGB")))
    import torch
    return lambda data: crop(module.decode_image(as_tensor(torch, data), mode=module.ImageReadMode.RGB))


def make_datasets(torch):
    """Returns the two classes of data sets for a DataLoader: files and shards. `convert` converts a sample's bytes to a tensor."""
    class Files(torch.utils.data.Dataset):
        def __init__(self, paths, convert):
            self.paths = paths
            self.convert = convert

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            return self.convert(read_whole(self.paths[index]))

    class Shards(torch.utils.data.IterableDataset):
        """Each worker has a copy of this object and counts epochs itself, so all workers use the same order of shards."""

        def __init__(self, paths, convert):
            self.paths = list(paths)
            self.convert = convert
            self.epoch = 0

        def __iter__(self):
            paths = list(self.paths)
            random.Random(self.epoch).shuffle(paths)
            self.epoch += 1
            worker = torch.utils.data.get_worker_info()
            for path in paths[worker.id::worker.num_workers] if worker else paths:
                with tarfile.open(path, "r|") as shard:
                    for member in shard:
                        if member.isfile() and is_data(member.name):
                            yield self.convert(shard.extractfile(member).read())
    return Files, Shards


def find_module(name):
    """Imports a module. If it is not installed, prints a message and returns None."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print("compare/loading.py: %s is skipped: %s" % (name, error), file=sys.stderr)
        return None


def make_converters(torch, options):
    """Returns pairs of a suffix and a function that converts a sample's bytes to a tensor."""
    if not options.decode:
        return [("", lambda data: as_tensor(torch, data))]
    decoders = [("-" + name, make_decoder(name, options.decode)) for name in ("pil", "io")]
    return [(suffix, decode) for suffix, decode in decoders if decode]


def make_loaders(torch, options):
    """Yields (name, layout, folder, number of shards, function that creates the loader)."""
    Files, Shards = make_datasets(torch)
    torch_loader = GpuLoader if options.gpu else TorchLoader
    shards = data_shards(options.shards) if options.shards else []
    gpu = "-gpu" if options.gpu else ""
    converters = make_converters(torch, options)
    for suffix, convert in converters:
        if options.files:
            yield "torch-files" + suffix + gpu, "files", options.files, "", lambda: torch_loader(
                torch, Files(data_files(options.files), convert), options, shuffle=True)
        if shards:
            yield "torch-shards" + suffix + gpu, "shards", options.shards, len(shards), lambda: torch_loader(
                torch, Shards(shards, convert), options)
    if not shards or options.gpu and not options.decode:
        return
    webdataset = find_module("webdataset") if not options.gpu else None
    for suffix, convert in converters if webdataset else []:
        def tensor_of(sample):
            return convert(next(value for key, value in sample.items() if is_data("." + key)))
        yield "webdataset" + suffix, "shards", options.shards, len(shards), lambda: TorchLoader(
            torch, webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False).map(tensor_of), options)
    dali = find_module("nvidia.dali")
    if dali:
        yield "dali" + gpu, "shards", options.shards, len(shards), lambda: DaliLoader(dali, shards, options)


def count_epoch(loader):
    """Runs an epoch. Returns its numbers of samples and bytes."""
    samples = total = 0
    for batch in loader.epoch():
        found = loader.count(batch)
        samples += found[0]
        total += found[1]
    return samples, total


def hash_samples(samples):
    """Returns (number of samples, bytes, sum of hashes modulo 2^64), which do not depend on the order."""
    count = total = hashes = 0
    for sample in samples:
        count += 1
        total += len(sample)
        hashes = (hashes + int.from_bytes(hashlib.blake2b(sample, digest_size=8).digest(), "little")) % 2**64
    return count, total, hashes


def check_end(path, offset):
    """Checks that tarfile stopped at a block of zeros. It also stops, without an error, at a broken header and at the end of a
    truncated shard."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            fail(f"{path}: offset {os.path.getsize(path)}: the shard is truncated: it ends without a block of zeros")
        if block.strip(b"\0"):
            fail(f"{path}: offset {offset}: a broken header; the data after it would not be read")
        while block := stream.read(1 << 20):
            if block.strip(b"\0"):
                fail(f"{path}: offset {offset}: data after the end of the shard would not be read")


def check_count(folder, found):
    """If the folder has a samples.csv, checks that at least as many samples were found as it lists."""
    path = os.path.join(folder, "samples.csv")
    if not os.path.exists(path):
        return
    with open(path, newline="") as stream:
        told = sum(1 for _ in csv.DictReader(stream))
    if found < told:
        fail(f"{folder} contains {found} samples, but its samples.csv lists {told}")


def shard_samples(folder):
    for path in data_shards(folder):
        with tarfile.open(path) as shard:
            for member in shard:
                if member.isfile() and is_data(member.name):
                    yield shard.extractfile(member).read()
            check_end(path, shard.offset)


def file_samples(folder):
    for path in data_files(folder):
        with open(path, "rb") as stream:
            yield stream.read()


def expected(layout, folder):
    """Returns (number of samples, bytes, hash) of a data set, read without a loader: the reference for all loaders."""
    return hash_samples(file_samples(folder) if layout == "files" else shard_samples(folder))


def quantile(ordered, p):
    position = p * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def check(name, what, found, wanted):
    if found != wanted:
        fail(f"{name}: {what} delivered {found}, but the data set has {wanted} (samples, bytes, hash)")


def measure(name, loader, wanted, options):
    """Returns the seconds of each epoch. Before the timing, runs one epoch and, unless images are decoded, checks its hashes. Every
    epoch must deliver all samples. `wanted` are the samples, bytes and hash of the data set."""
    times = []
    if options.decode:
        wanted = wanted[0], wanted[0] * 3 * options.decode**2, "random"
        count_epoch(loader)
    else:
        check(name, "the first epoch", hash_samples(sample for batch in loader.epoch() for sample in loader.samples(batch)), wanted)
    while len(times) < options.min_samples or sum(times) < options.time:
        begin = time.perf_counter()
        found = count_epoch(loader)
        times.append(time.perf_counter() - begin)
        check(name, "epoch %d" % len(times), found, wanted[:2])
    return times


def name_of(loader, workers):
    """Returns the name of a variant. The column `threads` is 1 with one worker and also without workers. Therefore the suffix
    -inline marks a variant without workers. DALI always has a thread of its own."""
    return loader if workers or loader.startswith("dali") else loader + "-inline"


def row_of(name, layout, folder, shards, wanted, times, options):
    ordered = sorted(times)
    median = statistics.median(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else None  # undefined for one epoch
    row = dict.fromkeys(COLUMNS, "")
    row.update({
        "time_utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "host": socket.gethostname(), "job_id": os.environ.get("SLURM_JOB_ID", ""), "workload": "load",
        "variant": name, "ranks": 1, "rank": 0, "threads": max(options.workers, 1), "data": folder,
        "batch": options.batch, "warmups": 1, "samples": len(times), "time_min_s": "%.9g" % ordered[0],
        "time_median_s": "%.9g" % median, "time_mean_s": "%.9g" % statistics.mean(ordered),
        "time_p95_s": "%.9g" % quantile(ordered, 0.95), "time_p99_s": "%.9g" % quantile(ordered, 0.99),
        "time_sd_s": "" if deviation is None else "%.9g" % deviation, "wall_s": "%.9g" % median, "items": wanted[0],
        "items_per_s": "%.9g" % (wanted[0] / median), "bytes_per_s": "%.9g" % (wanted[1] / median),
        "time_cv": "" if deviation is None else "%.9g" % (deviation / median),
        "timed_stages": "order+read+collate" + "+pin+copy" * options.gpu,
        "store": layout, "shards": shards,
        "sample_bytes": "%.9g" % (wanted[1] / wanted[0]), "skipped": 0, "cache": "any", "verified": "yes", "wrong": 0,
    })
    if options.decode:
        row.update({"out_res": options.decode, "fit": "random-resized-crop", "channels": 3,
                    "timed_stages": row["timed_stages"].replace("read", "read+decode")})
    if options.gpu:
        import torch
        row.update({"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "ranks_per_device": 1})
    return row


def columns_of(path):
    """Returns the columns and schema of an existing file, or the current ones if there is none. Exits if the
    file lacks a column or has rows of another workload."""
    if not path or not os.path.exists(path) or os.path.getsize(path) == 0:
        return COLUMNS, SCHEMA
    with open(path, newline="") as stream:
        reader = csv.DictReader(stream)
        first = next(reader, {})
        header = list(reader.fieldnames)
    lacking, schema = set(COLUMNS) - set(header), first.get("schema")
    if lacking or not (schema or "load/").startswith("load/"):
        fail(f"{path} does not have the columns of {SCHEMA}; choose another file")
    return header, schema or SCHEMA


def append(path, rows):
    """Appends rows to a CSV file, which it creates if necessary. Without a path, writes to stdout."""
    columns, schema = columns_of(path)
    for row in rows:
        row["schema"] = schema
    with open(path, "a", newline="") if path else contextlib.nullcontext(sys.stdout) as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        if not path or stream.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def run_ours(options):
    """Runs fdsl-bench on the same data with the same number of threads. Returns its rows."""
    several = options.workers > 1
    threads = 2 if options.gpu and options.decode else max(options.workers, 1)
    decode = ["--out-res", str(options.decode), "--fit", "random-resized-crop"] if options.decode else []
    of_files, of_shards, more = (
        ("", "shards-gpu", ["--dtype", "raw", *decode]) if options.gpu and decode else
        ("files-gpu", "shards-gpu", ["--dtype", "raw"]) if options.gpu else
        ("files-omp", "shards-omp", decode) if several or decode else ("files,files-uring", "shards,shards-mmap,shards-uring", []))
    runs = [(of_files, options.files, more)] if options.files and of_files else []
    if options.shards:
        runs += [(of_shards, options.shards, more + ["--shuffle", shuffle]) for shuffle in ("1000", "0")]
    rows = []
    for names, folder, added in runs:
        command = [options.bench, "--variant", names, "--data", folder, "--threads", str(threads),
                   "--batch", str(options.batch), "--min-time", str(options.time), "--verify",
                   "--format", "csv", *added]
        try:
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            fail(error)
        rows += csv.DictReader(done.stdout.splitlines())
    return rows


def print_ratios(rows):
    """Prints the time per sample of each loader, and its ratio to the fastest."""
    def micros(row):
        return 1e6 * float(row["time_median_s"]) / float(row["items"])
    fastest = min(map(micros, rows))
    print("%-22s %-8s %7s %12s %9s" % ("", "shuffle", "threads", "us/sample", "ratio"))
    for row in sorted(rows, key=micros):
        print("%-22s %-8s %7s %12.3f %9.1f"
              % (row["variant"], row["shuffle"] if row["store"] == "shards" else "all", row["threads"], micros(row),
                 micros(row) / fastest))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", metavar="DIR", help="samples as files")
    parser.add_argument("--shards", metavar="DIR", help="the same samples as tar shards")
    parser.add_argument("--out", metavar="FILE", help="append rows to this CSV file")
    parser.add_argument("--gpu", action="store_true", help="deliver batches on the GPU")
    parser.add_argument("--decode", type=int, metavar="RES", help="decode images to RES x RES pixels")
    parser.add_argument("--workers", type=int, metavar="N",
                        help="worker processes; 0: read in the main process (default 1; with --gpu 16)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples per batch (default 32)")
    parser.add_argument("--time", type=float, default=1, metavar="S", help="minimum seconds per loader (default 1)")
    parser.add_argument("--min-samples", type=int, default=5, metavar="N", help="minimum epochs per loader (default 5)")
    parser.add_argument("--bench", metavar="PROGRAM", help="also measure this fdsl-bench and print a table; needs --out")
    options = parser.parse_args()
    if not options.files and not options.shards:
        parser.error("name --files DIR, --shards DIR or both")
    if options.bench and not options.out:
        parser.error("--bench prints a table; name --out FILE for the rows")
    if options.decode is not None and options.decode < 1:
        parser.error("--decode RES must be at least 1")
    if options.bench and options.gpu and options.decode and not options.shards:
        parser.error("--bench with --gpu and --decode runs shards-gpu; name --shards DIR")
    if options.workers is None:
        options.workers = 16 if options.gpu else 1
    if options.batch < 1 or options.min_samples < 1 or options.workers < 0:
        parser.error("--batch and --min-samples must be at least 1, and --workers at least 0")
    try:
        import torch
        import torch.utils.data
    except ImportError:
        fail("PyTorch is not installed (Debian: python3-torch)", 4)
    if options.gpu and not torch.cuda.is_available():
        fail("--gpu: PyTorch sees no GPU", 4)
    columns_of(options.out)
    torch.set_num_threads(1)  # as in the workers; more threads do not copy a batch faster
    rows = []
    for name, layout, folder, shards, make in make_loaders(torch, options):
        wanted = expected(layout, folder)
        if not wanted[0]:
            fail(f"{folder} contains no samples")
        check_count(folder, wanted[0])
        name = name_of(name, options.workers)
        rows.append(row_of(name, layout, folder, shards, wanted, measure(name, make(), wanted, options), options))
    ours = run_ours(options) if options.bench else []
    append(options.out, rows + ours)
    if options.bench:
        print_ratios(rows + ours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
