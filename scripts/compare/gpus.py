#!/usr/bin/env python3
"""Measures a machine with several GPUs: training, generating, Python streams and exchanges, on 1, 2, 4, ... GPUs, in one run.

    scripts/compare/gpus.py OUT [--limit-s 540] [--parts training,formulas,...] [--gpus 1,2,4] [--dry-run]

Parts, in the order in which they run:

    training     scripts/compare/training.sh: vit-tiny and vit-base from one constant batch, generated images and JPEG shards
    formulas     images per second of `fused` for the default classes of each formula, one rank per GPU, verified
    python       python/tests/torchrun_rank.py (each sample goes to one rank, with equal steps), then the images per second of
                 fdsl.torch.Loader on each rank, from JPEG shards
    exchange     all-reduces of bf16 over all GPUs
    peer         train-graph, cnn on MNIST, with --sync peer
    ddp          the same in PyTorch with DistributedDataParallel: scripts/compare/pytorch.py
    distributed  scripts/check/distributed_gpu.sh
    pipeline     scripts/check/pipeline_gpu.sh

A run on several GPUs comes before the same run on fewer. OUT gets a file of rows per part, such as OUT/training.csv, which
`scripts/figures/draw.py --results OUT training` draws; OUT/runs keeps the rows and the output of each run. The same command continues: it
repeats only runs that are not complete. --dry-run prints the commands and the seconds that they take on H200s.

A run does not start if less than its expected seconds are left of --limit-s. A run that reaches the limit is stopped.
At the end, the script prints a table of all complete runs. `share` is the value on N GPUs / (N x the value on one GPU).

Exit status: 0 done, or stopped by --limit-s; 1 a run failed; 2 usage; 4 no GPU.
"""
import argparse
import contextlib
import csv
import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import time

from shared import PROGRAM, ROOT, Failed, joined, rows_of, run_script, signals_held, start_process  # in this folder
from torch_ranks import torchrun

sys.path.insert(0, str(ROOT / "scripts/figures"))
sys.pycache_prefix = str(ROOT / "build/pycache")

# Images per epoch and GPU, epochs, and the expected seconds of a run. nvJPEG's engines need about 200 steps to reach their full rate.
NETWORKS = {"vit-tiny": (8192, 12, 8), "vit-base": (4096, 6, 12)}
SOURCES = ("constant", "live", "jpeg")
CLASSES = 1000
BYTES = "1200000,2400000,4900000"  # gradients of cnn in bf16 and in f32, and two more sizes
MANY_BYTES = "180000000"  # gradients of vit-base in bf16
BATCH, OUT_RES, WARM, RATE_S = 256, 224, 300, 3  # of fdsl.torch.Loader; WARM: batches before the timing
STOP_S = 5
LATE = "stopped by --limit-s"


class Run:
    """A command. The file `done` exists if and only if the run is complete: it has the rows, or nothing if the run prints none. Until
    then, `part` has the rows; "{}" in the command stands for it."""

    def __init__(self, out, part, what, gpus, seconds, command, environment=None):
        self.part_name, self.what, self.gpus, self.seconds = part, what, gpus, seconds
        self.name = f"{part}-{what}-{gpus}".replace(" ", "-")
        self.done, self.part, self.output = (out / "runs" / f"{self.name}.{end}" for end in ("csv", "part", "txt"))
        self.command = [word.replace("{}", str(self.part)) for word in command]
        self.environment = environment or {}
        self.status = None

    def words(self):
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.command])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder for the rows")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop within this time (default: no limit)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run (default: all)")
    parser.add_argument("--gpus", help="numbers of GPUs (default: 1, 2, 4, ... up to all GPUs of this machine)")
    parser.add_argument("--memory", default="/dev/shm/training", help="folder in memory for images (default /dev/shm/training)")
    parser.add_argument("--mnist", default="data/mnist", help="folder with the four files of MNIST (default data/mnist)")
    parser.add_argument("--samples", help="images per epoch and GPU of each network (default "
                        f"{','.join(str(network[0]) for network in NETWORKS.values())})")
    parser.add_argument("--launcher", default=os.environ.get("MPIRUN", "mpirun --bind-to none -n"),
                        help="launcher of the ranks (default: MPIRUN, or mpirun --bind-to none -n)")
    parser.add_argument("--bench", default=os.environ.get("FDSL_BENCH", PROGRAM),
                        help="the program (default: FDSL_BENCH, or fdsl-bench of this project)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    given = parser.parse_args()
    given.out, given.memory, given.bench = given.out.resolve(), os.path.abspath(given.memory), os.path.abspath(given.bench)
    given.parts = given.parts.split(",")
    for part in given.parts:
        if part not in PARTS:
            raise Failed(f"no part '{part}'; choose from {', '.join(PARTS)}", 2)
    try:
        given.gpus = sorted({int(number) for number in given.gpus.split(",")}, reverse=True) if given.gpus else powers(count_gpus())
        given.samples = [int(number) for number in given.samples.split(",")] if given.samples else [each[0] for each in NETWORKS.values()]
        if given.gpus[-1] < 1 or len(given.samples) != len(NETWORKS) or min(given.samples) < BATCH:
            raise ValueError
    except ValueError:
        raise Failed(f"--gpus are numbers such as 1,2,4, and --samples {len(NETWORKS)} numbers from {BATCH}", 2) from None
    return given


def count_gpus():
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen:
        return len(seen.split(","))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        listed = ""
    gpus = sum(line.startswith("GPU") for line in listed.splitlines())
    if not gpus:
        raise Failed("nvidia-smi lists no GPU here; name the numbers of GPUs with --gpus", 4)
    return gpus


def powers(gpus):
    """Returns 1, 2, 4, ... and all GPUs, the largest number first."""
    return sorted({gpus, *(1 << bit for bit in range(gpus.bit_length()) if 1 << bit <= gpus)}, reverse=True)


# ---- The runs of each part: functions that yield (what, GPUs, expected seconds, command, environment) ----


def ranks(given, gpus):
    return ([*given.launcher.split(), str(gpus)] if gpus > 1 else []) + [given.bench]


def images(given):
    return max(given.samples) * given.gpus[0]


def prepared(given):
    """The JPEG shards, for the parts that read them."""
    settings = {"MODELS": "none", "SOURCES": "jpeg", "IMAGES": str(images(given)), "MEMORY": given.memory, "FDSL_BENCH": given.bench}
    return "JPEG shards", 0, 5 + images(given) / 3000, [str(ROOT / "scripts/compare/training.sh"), given.memory, "{}"], settings


def training(given):
    yield prepared(given)
    for (model, (_, epochs, seconds)), samples in zip(NETWORKS.items(), given.samples):
        for gpus in given.gpus:
            for source in SOURCES:
                settings = {"MODELS": model, "GPUS": str(gpus), "SOURCES": source, "SAMPLES": str(samples), "EPOCHS": str(epochs),
                            "IMAGES": str(images(given)), "MEMORY": given.memory, "MPIRUN": given.launcher, "FDSL_BENCH": given.bench}
                yield f"{model} {source}", gpus, seconds, [str(ROOT / "scripts/compare/training.sh"), given.memory, "{}"], settings


def names_of_formulas(given):
    """Asks the program for its formulas."""
    printed = subprocess.run([given.bench, "--columns", "--workload", "synth", "--format", "json"], check=True, capture_output=True,
                             text=True).stdout
    return next(column["choices"] for column in json.loads(printed) if column["column"] == "formula").split()


def formulas(given):
    """Formulas without a published list of classes draw the first CLASSES classes of their ranges."""
    for formula in names_of_formulas(given):
        options = ["--formula", formula, "--preset", formula]
        if subprocess.run([given.bench, "--variant", "naive", *options, "--batch", "1", "--dry-run"], capture_output=True, check=False).returncode:
            options += ["--classes", str(CLASSES)]
        for gpus in dict.fromkeys((given.gpus[0], given.gpus[-1])):
            yield formula, gpus, 8, [*ranks(given, gpus), "--variant", "fused", *options, "--batch", "256", "--verify", "--min-time", "0.3",
                                     "--max-time", "1", "--out", "{}"], None


def python(given):
    yield prepared(given)
    settings = {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
                "FDSL_LIBRARY": os.environ.get("FDSL_LIBRARY", str(ROOT / "build/lib/libfdsl.so.0")), "FDSL_BENCH": given.bench,
                "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    yield ("torchrun_rank.py", given.gpus[0], 30,
           torchrun(given.gpus[0], str(ROOT / "python/tests/torchrun_rank.py"), f"{given.memory}/jpeg/test"), settings)
    for gpus in given.gpus:
        yield "fdsl.torch.Loader JPEG", gpus, 25, torchrun(gpus, __file__, "--rank", f"{given.memory}/jpeg/train", "{}"), settings


def exchange(given):
    if given.gpus[0] == 1:
        return
    for sizes, more in ((BYTES, ["--verify"]), (MANY_BYTES, [])):
        yield (sizes, given.gpus[0], 15, [
            *ranks(given, given.gpus[0]), "--workload", "exchange", "--variant", "nccl,peer,peer-one-shot,peer-two-shot", "--dtype", "bf16",
            "--min-samples", "20", "--min-time", "0", "--max-time", "0.25", "--warmup-time", "0", "--warmups", "2", "--bytes", sizes, *more,
            "--out", "{}"], None)


def peer(given):
    for gpus in given.gpus:
        yield "train-graph cnn", gpus, 8, [
            *ranks(given, gpus), "--variant", "train-graph", "--data", given.mnist, "--model", "cnn", "--batch", "256", "--epochs", "10",
            *(["--sync", "peer"] if gpus > 1 else []), "--out", "{}"], None


def ddp(given):
    numbers = ",".join(str(number) for number in sorted({1, given.gpus[0]}))
    sync = ["--sync", "auto,nccl"] if given.gpus[0] > 1 else []
    yield "cnn", given.gpus[0], 130, [
        sys.executable, str(ROOT / "scripts/compare/pytorch.py"), "--bench", given.bench, "--ranks", numbers, "--variant", "train-graph", *sync,
        "--device", "cuda", "--modes", "resident,graph,best", "--data", given.mnist, "--model", "cnn", "--batch", "256", "--epochs", "12",
        "--lr", "0.0015", "--out", "{}"], None


def checks(script, seconds):
    def runs(given):
        if given.gpus[0] > 1:
            yield script, given.gpus[0], seconds, [str(ROOT / "scripts/check" / script), str(given.gpus[0])], {"FDSL_BENCH": given.bench}
    return runs


PARTS = {"training": training, "formulas": formulas, "python": python, "exchange": exchange, "peer": peer, "ddp": ddp,
         "distributed": checks("distributed_gpu.sh", 300), "pipeline": checks("pipeline_gpu.sh", 150)}


def runs_of(given):
    runs = {}
    for part in given.parts:
        for what, gpus, seconds, command, environment in PARTS[part](given):
            run = Run(given.out, "images" if what == "JPEG shards" else part, what, gpus, seconds, command, environment)
            runs.setdefault(run.name, run)
    return list(runs.values())


# ---- Running ----


def perform(run, left_s):
    """Runs a command until it ends, or `left_s` seconds have passed."""
    run.part.unlink(missing_ok=True)  # rows of a run that was stopped
    with open(run.output, "wb") as output:
        process = None
        try:
            with signals_held():
                process = start_process(run.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                        env={**os.environ, **run.environment}, start_new_session=True)
            run.status = process.wait(None if left_s == float("inf") else max(1, left_s))
        except subprocess.TimeoutExpired:
            run.status = LATE
        finally:
            if process and process.poll() is None:
                end(process)
    if run.status == 0:
        run.part.touch()
        os.replace(run.part, run.done)


def end(process):
    """Ends a process and its descendants."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(run):
    """Returns the last line that a run printed; of a run that failed, the first error of the program, because mpirun adds lines."""
    said = [line for line in run.output.read_text("utf-8", "replace").splitlines() if line.strip()] or ["no output"]
    errors = [line for line in said if line.startswith("fdsl-bench: ") and "warning" not in line]
    return errors[0] if errors and run.status else said[-1]


def collect(given, runs):
    """Writes the rows of all complete runs to a file per part."""
    from plot import write_whole
    for part in dict.fromkeys(run.part_name for run in runs):
        tables = [(run.done, list(csv.reader(run.done.read_text("utf-8").splitlines()))) for run in runs
                  if run.part_name == part and run.done.exists()]
        text = joined(((path, *rows) for path, rows in tables if rows), "so another revision wrote it; give another OUT")
        if text:
            write_whole(given.out / f"{part}.csv", text)


# ---- The table ----


def results(run):
    """Returns [(what, GPUs, value, unit)] of a complete run."""
    rows = rows_of(run.done.read_text("utf-8"))
    if run.part_name == "images":
        return []
    if not rows:
        return [(run.what, run.gpus, None, last_line(run))]
    if "images_per_s" in rows[0]:
        return [(run.what, run.gpus, sum(float(row["images_per_s"]) for row in rows), "images/s")]
    groups = {}
    for row in rows:
        if (row["rank"] == "all" or row["ranks"] == "1") and 2 * float(row.get("epoch") or 1) > float(row.get("epochs") or 1):
            what = {"exchange": "{variant} {array_bytes} bytes", "ddp": "{variant} {exchange}"}.get(run.part_name, run.what).format(**row).strip()
            groups.setdefault((what, int(row["ranks"])), []).append(row)
    if run.part_name == "exchange":
        return [(*key, statistics.median(1e6 * float(row["time_median_s"]) for row in group), "us") for key, group in groups.items()]
    return [(*key, statistics.median(float(row["items_per_s"]) for row in group), "images/s") for key, group in groups.items()]


def print_table(runs):
    lines = [(run.part_name, *result) for run in runs if run.done.exists() for result in results(run)]
    alone = {(part, what): value for part, what, gpus, value, _ in lines if gpus == 1}
    print(f"\n{'part':<12}{'run':<36}{'GPUs':>5}{'value':>14} {'unit':<10}{'share':>6}")
    for part, what, gpus, value, unit in lines:
        one = alone.get((part, what), alone.get((part, what.split()[0]))) if unit == "images/s" and gpus > 1 else None
        print(f"{part:<12}{what:<36}{gpus:>5}" + (f"  {unit}" if value is None else
              f"{value:>14,.1f} {unit:<10}" + (f"{value / (gpus * one):>6.3f}" if one else "")))


# ---- One rank of the part python ----


def measure_rank(shards, out):
    """Measures fdsl.torch.Loader on one rank of torchrun. Rank 0 writes a row per rank."""
    import torch
    from torch import distributed

    import fdsl
    import fdsl.torch
    rank, ranks_here = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks_here
    if on_gpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group("gloo")
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    loader = fdsl.torch.Loader(fdsl.Shards(shards), BATCH, rank=rank, world_size=ranks_here, device=f"cuda:{rank}" if on_gpu else "cpu",
                               drop_last=True, num_threads=threads, transforms=fdsl.RandomResizedCrop(OUT_RES))
    if not len(loader):
        raise Failed(f"{shards}: fewer than {BATCH} images per rank; prepare more")
    batches = (batch for _ in iter(int, 1) for batch in loader)
    for _ in range(WARM if on_gpu else 1):
        next(batches)
    distributed.barrier()  # all ranks load at the same time
    count, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < RATE_S:
        count += len(next(batches)[0])
    if on_gpu:
        torch.cuda.synchronize()
    rates = [None] * ranks_here
    distributed.all_gather_object(rates, count / (time.perf_counter() - begin_s))
    if rank == 0:
        with open(out, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [("ranks", "rank", "device", "threads", "batch", "images_per_s"),
                 *((ranks_here, each, "cuda" if on_gpu else "cpu", threads, BATCH, f"{rate:.1f}") for each, rate in enumerate(rates))])
    loader.close()
    distributed.destroy_process_group()


def main():
    given = arguments()
    runs = runs_of(given)
    if given.dry_run:
        for run in runs:
            print(f"# {run.name}: {run.seconds:.0f} s\n{run.words()}")
        print(f"# {sum(run.seconds for run in runs):.0f} s")
        return 0
    (given.out / "runs").mkdir(parents=True, exist_ok=True)
    if not (pathlib.Path(given.memory) / "jpeg/test/dataset.index").exists():
        for run in (run for run in runs if run.part_name == "images"):  # memory is empty after a restart
            run.done.unlink(missing_ok=True)
    began, late = time.monotonic(), []
    for run in (run for run in runs if not run.done.exists()):
        left_s = given.limit_s - STOP_S - (time.monotonic() - began)
        if run.seconds > left_s:
            late.append(run.name)
            continue
        begin_s = time.monotonic()
        perform(run, left_s)
        print(f"[{time.monotonic() - began:6.1f} s] {run.name}: "
              + (f"done after {time.monotonic() - begin_s:.1f} s" if run.status == 0 else run.status if run.status == LATE
                 else f"FAILED with status {run.status}: {last_line(run)} (see {run.output})"), flush=True)
        late += [run.name] * (run.status == LATE)
        collect(given, runs)
    collect(given, runs)
    print_table(runs)
    failed = [run.name for run in runs if run.status not in (None, 0, LATE)]
    print(f"\n{sum(run.done.exists() for run in runs)} of {len(runs)} runs are complete"
          + (f"; failed: {', '.join(failed)}" if failed else "") + (f"; no time for: {', '.join(late)}" if late else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    run_script("compare/gpus.py", (lambda: measure_rank(*sys.argv[2:])) if sys.argv[1:2] == ["--rank"] else main)
