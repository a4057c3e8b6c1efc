#!/usr/bin/env python3
"""Other loaders over the same samples: PyTorch's DataLoader, and webdataset where it is installed.

    scripts/compare_loading.py --files DIR --shards DIR [--gpu] [--out FILE] [--workers N] [--batch N] [--time S]

A run is one epoch; every sample comes out as a tensor in a batch, as fdsl-bench delivers bytes in a batch. Loaders:

    torch-files         DataLoader over a Dataset that opens, reads and closes a file a sample, shuffled
    torch-shards        DataLoader over an IterableDataset that streams the tars with tarfile, shards shuffled
    webdataset          WebDataset over the same tars, where the module is installed

Rows have the columns of fdsl-bench's rows of the workload `load` (what does not apply is empty), so both can stand
in one table; counts of samples and bytes are checked in every epoch. Workers are processes; 0 is the process itself.

With --gpu batches end on the GPU, and the loaders are torch-files-gpu and torch-shards-gpu: what PyTorch recommends,
16 workers that stay over the epochs, batches stacked in shared memory, copied to pinned memory by a thread
(pin_memory) and from there with non_blocking=True. An epoch ends when the last copy has. The workers' start is not
timed, nor is anything done to the bytes on the GPU, which the GPU variants of fdsl-bench do.
"""
import argparse
import contextlib
import csv
import datetime
import os
import random
import socket
import statistics
import sys
import tarfile
import time

COLUMNS = (
    "schema,time_utc,host,job_id,revision,workload,variant,device,driver,cuda,ranks,rank,threads,scaling,ranks_per_device,"
    "data,batch,shuffle,seed,epochs,depth,block,prefetch,on_error,decode,augment,shift,mean,std,tensor,ring,chunk,compute_ms,"
    "warmups,samples,time_min_s,time_median_s,time_mean_s,time_p95_s,time_p99_s,time_sd_s,wall_s,"
    "items,items_per_s,bytes_per_s,roofline_share,time_cv,outliers,throttled,imbalance,efficiency,"
    "timed,layout,shards,sample_bytes,skipped,displacement,shards_a_batch,resident_before,resident_after,device_bytes,"
    "copy_bytes_per_s,copy_share,gds,open_p50_s,open_p99_s,open_p999_s,read_p50_s,read_p99_s,read_p999_s,"
    "close_p50_s,close_p99_s,close_p999_s,decode_s,augment_s,tally,"
    "steps,wait_share,first_wait_s,step_s,utilisation,slowdown,cache,verified,wrong").split(",")
METADATA = ("samples.csv", "metadata.parquet")
DATA_EXTENSIONS = ("npy", "bin", "png", "jpg", "jpeg")


def data_files(folder):
    """The files of a folder that hold a sample's data: one a sample, labels left out."""
    found = []
    for root, _, names in os.walk(folder):
        found += [os.path.join(root, name) for name in names
                  if name not in METADATA and name.rsplit(".", 1)[-1].lower() in DATA_EXTENSIONS]
    return sorted(found)


def data_shards(folder):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".tar"))


def is_data(name):
    return name.rsplit(".", 1)[-1].lower() in DATA_EXTENSIONS


def as_tensor(torch, data):
    """Bytes as a tensor of its own, as the default collation needs it; those of a bytearray stay where they are."""
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def read_whole(path):
    """A file, read once and into its place."""
    with open(path, "rb", buffering=0) as stream:
        data = bytearray(os.fstat(stream.fileno()).st_size)
        if stream.readinto(data) != len(data):
            raise OSError("%s: a short read" % path)
    return data


def make_loaders(torch, options):
    """Yields (name, layout, folder, shards, a function from epoch to an iterable of batches)."""
    class Files(torch.utils.data.Dataset):
        def __init__(self, paths):
            self.paths = paths

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            return as_tensor(torch, read_whole(self.paths[index]))

    class Shards(torch.utils.data.IterableDataset):
        def __init__(self, paths, epoch):
            self.paths, self.epoch = list(paths), epoch

        def __iter__(self):
            paths = list(self.paths)
            random.Random(self.epoch).shuffle(paths)
            self.epoch += 1  # of this worker's copy, where workers stay
            worker = torch.utils.data.get_worker_info()
            mine = paths[worker.id::worker.num_workers] if worker else paths
            for path in mine:
                with tarfile.open(path, "r|") as shard:
                    for member in shard:
                        if member.isfile() and is_data(member.name):
                            yield as_tensor(torch, shard.extractfile(member).read())

    def loader(dataset, **more):
        return torch.utils.data.DataLoader(dataset, batch_size=options.batch, num_workers=options.workers,
                                           collate_fn=collate, pin_memory=options.gpu,
                                           persistent_workers=options.gpu and options.workers > 0, **more)

    def collate(samples):
        same = all(len(sample) == len(samples[0]) for sample in samples)
        return torch.utils.data.default_collate(samples) if same else samples

    if options.gpu:
        yield from gpu_loaders(torch, options, loader, Files, Shards)
        return

    if options.files:
        files = Files(data_files(options.files))
        yield "torch-files", "files", options.files, "", lambda epoch: loader(
            files, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    if not options.shards:
        return
    shards = data_shards(options.shards)
    yield "torch-shards", "shards", options.shards, len(shards), lambda epoch: loader(Shards(shards, epoch))
    try:
        import webdataset
    except ImportError:
        print("compare_loading: webdataset is not installed; left out", file=sys.stderr)
        return

    def web(epoch):
        paths = list(shards)
        random.Random(epoch).shuffle(paths)
        dataset = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).map(
            lambda sample: as_tensor(torch, next(value for key, value in sample.items() if is_data("." + key))))
        return loader(dataset)
    yield "webdataset", "shards", options.shards, len(shards), web


def gpu_loaders(torch, options, loader, files_of, shards_of):
    """The same with batches that end on the GPU: one loader over all epochs, whose workers stay."""
    def onto_gpu(batches):
        def epoch(_):
            for batch in batches:
                if isinstance(batch, torch.Tensor):
                    yield batch.to("cuda", non_blocking=True)
                else:
                    yield [sample.to("cuda", non_blocking=True) for sample in batch]
            torch.cuda.synchronize()
        return epoch

    if options.files:
        yield "torch-files-gpu", "files", options.files, "", onto_gpu(
            loader(files_of(data_files(options.files)), shuffle=True, generator=torch.Generator().manual_seed(0)))
    if options.shards:
        shards = data_shards(options.shards)
        yield "torch-shards-gpu", "shards", options.shards, len(shards), onto_gpu(loader(shards_of(shards, 0)))


def read_epoch(batches):
    """Samples and bytes of an epoch."""
    samples = total = 0
    for batch in batches:
        samples += len(batch)
        total += batch.numel() if hasattr(batch, "numel") else sum(len(sample) for sample in batch)
    return samples, total


def check_end(path, offset):
    """Where tarfile stopped must be the end of the shard: before a broken header it stops without a word."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            sys.exit("compare_loading: %s: offset %d: a broken header; what is behind it would not be read"
                     % (path, offset))


def check_count(folder, found):
    """Where the folder tells how many samples it holds, as many must be there."""
    path = os.path.join(folder, "samples.csv")
    if not os.path.exists(path):
        return
    with open(path, newline="") as stream:
        told = sum(1 for _ in csv.DictReader(stream))
    if found < told:
        sys.exit("compare_loading: %s holds %d samples and its samples.csv tells of %d" % (folder, found, told))


def expected(layout, folder):
    """The same by plain means."""
    if layout == "files":
        sizes = [os.path.getsize(path) for path in data_files(folder)]
        return len(sizes), sum(sizes)
    sizes = []
    for path in data_shards(folder):
        with tarfile.open(path) as shard:
            sizes += [member.size for member in shard if member.isfile() and is_data(member.name)]
            check_end(path, shard.offset)
    return len(sizes), sum(sizes)


def quantile(ordered, p):
    position = p * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def measure(batches_of, wanted, options):
    """Seconds of each epoch, after one to warm up. Every epoch must deliver what is there."""
    times = []
    epoch = 0
    while epoch == 0 or len(times) < options.min_samples or sum(times) < options.time:
        begin = time.perf_counter()
        found = read_epoch(batches_of(epoch))
        seconds = time.perf_counter() - begin
        if found != wanted:
            sys.exit("compare_loading: epoch %d delivered %d samples and %d bytes where %d and %d are right"
                     % (epoch, *found, *wanted))
        if epoch > 0:
            times.append(seconds)
        epoch += 1
    return times


def row_of(name, layout, folder, shards, wanted, times, options):
    ordered = sorted(times)
    median = statistics.median(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0
    row = dict.fromkeys(COLUMNS, "")
    row.update({
        "time_utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "host": socket.gethostname(), "job_id": os.environ.get("SLURM_JOB_ID", ""), "workload": "load",
        "variant": name, "ranks": 1, "rank": 0, "threads": max(options.workers, 1), "data": folder,
        "batch": options.batch, "warmups": 1, "samples": len(times), "time_min_s": "%.9g" % ordered[0],
        "time_median_s": "%.9g" % median, "time_mean_s": "%.9g" % statistics.mean(ordered),
        "time_p95_s": "%.9g" % quantile(ordered, 0.95), "time_p99_s": "%.9g" % quantile(ordered, 0.99),
        "time_sd_s": "%.9g" % deviation, "wall_s": "%.9g" % median, "items": wanted[0],
        "items_per_s": "%.9g" % (wanted[0] / median), "bytes_per_s": "%.9g" % (wanted[1] / median),
        "time_cv": "%.9g" % (deviation / median), "timed": "order+read+collate" + "+pin+copy" * options.gpu, "layout": layout, "shards": shards,
        "sample_bytes": "%.9g" % (wanted[1] / wanted[0]), "skipped": 0, "cache": "any", "verified": "no", "wrong": 0,
    })
    if options.gpu:
        import torch
        row.update({"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "ranks_per_device": 1})
    return row


def columns_of(path):
    """The columns and the schema of a file that fdsl-bench or this script began; else ours."""
    if not path or not os.path.exists(path) or os.path.getsize(path) == 0:
        return COLUMNS, "load/4"
    with open(path, newline="") as stream:
        reader = csv.DictReader(stream)
        first = next(reader, {})
        header = list(reader.fieldnames)
    if set(COLUMNS) - set(header) or not first.get("schema", "load/").startswith("load/"):
        sys.exit("compare_loading: %s is no table of the workload load; name another file" % path)
    return header, first.get("schema", "load/4")


def append(path, rows):
    """Appends to a table, or begins one; on stdout without a path."""
    columns, schema = columns_of(path)
    for row in rows:
        row["schema"] = schema
    with open(path, "a", newline="") if path else contextlib.nullcontext(sys.stdout) as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        if not path or stream.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", metavar="DIR", help="samples as files")
    parser.add_argument("--shards", metavar="DIR", help="the same samples as tar shards")
    parser.add_argument("--out", metavar="FILE", help="append rows to this CSV file")
    parser.add_argument("--gpu", action="store_true", help="batches end on the GPU")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default 0; with --gpu 16)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples a batch (default 32)")
    parser.add_argument("--time", type=float, default=1, metavar="S", help="at least so long (default 1)")
    parser.add_argument("--min-samples", type=int, default=5, metavar="N", help="never fewer epochs (default 5)")
    options = parser.parse_args()
    if not options.files and not options.shards:
        parser.error("name --files DIR, --shards DIR or both")
    if options.workers is None:
        options.workers = 16 if options.gpu else 0
    if options.batch < 1 or options.min_samples < 1 or options.workers < 0:
        parser.error("--batch and --min-samples are at least 1, and --workers is at least 0")
    try:
        import torch
        import torch.utils.data
    except ImportError:
        print("compare_loading: PyTorch is not installed (Debian: python3-torch)", file=sys.stderr)
        return 4
    if options.gpu and not torch.cuda.is_available():
        print("compare_loading: --gpu: PyTorch sees no GPU", file=sys.stderr)
        return 4
    columns_of(options.out)
    rows = []
    for name, layout, folder, shards, batches_of in make_loaders(torch, options):
        wanted = expected(layout, folder)
        if not wanted[0]:
            sys.exit("compare_loading: %s holds no samples" % folder)
        check_count(folder, wanted[0])
        rows.append(row_of(name, layout, folder, shards, wanted, measure(batches_of, wanted, options), options))
    append(options.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
