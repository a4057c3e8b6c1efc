"""Trains in PyTorch on one or more ranks of this machine, for scripts/compare/pytorch.py --ranks.

train() starts torchrun, which runs this file once per rank. With several ranks, DistributedDataParallel (DDP) adds up the
gradients: with NCCL on GPUs, with Gloo on CPUs. Rank i uses GPU i.
"""

import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from shared import die_with_parent, signals_held, start_process  # in this folder


class RankFailure(Exception):
    """A rank failed. The message is one line with the rank, the reason and a remedy."""


def start(command, **more):
    """Runs a launcher. The launcher ends its ranks when it gets SIGTERM, so no rank outlives this script."""
    process = None
    try:
        with signals_held():
            process = start_process(command, **more)
        output, errors = process.communicate()
    finally:
        if process and process.poll() is None:
            process.terminate()
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def torchrun(ranks, *words):
    """Returns the command that starts torchrun with a script and its arguments. torchrun finds a free port itself."""
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", *words]


def environment(threads):
    """Returns the environment of the ranks. Variables that the user has set keep their values."""
    mine = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # PyTorch requires this to capture DDP in a CUDA graph
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }
    return {**mine, **os.environ}


def reason_of(folder, log):
    """Returns the mode, the rank and the reason of the first failure, from the files of the ranks or the output of torchrun."""
    faults = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("fault.*")]
    if faults:
        first = min(faults, key=lambda fault: fault["time"])
        return first["mode"], first["rank"], first["reason"]
    # In its list of failures, torchrun names the first one last.
    found = re.findall(r"rank\s*:\s*(\d+) \(local_rank.*?\n\s*exitcode\s*:\s*(-?\d+)", log)
    if found:
        rank, status = (int(number) for number in found[-1])
        return None, rank, f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    lines = [line for line in log.splitlines() if line.strip()]
    return None, None, lines[-1].strip() if lines else "torchrun printed no reason"


def remedy_of(mode, ranks, reason):
    if re.search("out of memory|OutOfMemory|signal 9", reason):
        return "lower --batch or --ranks"
    if re.search("NCCL|nccl", reason) and mode in (None, "start"):
        return "NCCL_DEBUG=INFO shows more"
    if mode in (None, "start"):
        return "try --ranks 1" if ranks > 1 else "try without --ranks"
    return f"leave {mode} out of --modes"


def message_of(ranks, folder, log, path):
    """Returns the line about a torchrun that failed."""
    mode, rank, reason = reason_of(folder, log)
    where = (f" in mode {mode}" if mode else "") + (f": rank {rank}" if rank is not None else "")
    return f"PyTorch failed on {ranks} rank{'s' if ranks > 1 else ''}{where}: {reason}; {remedy_of(mode, ranks, reason)} (output: {path})"


def train(job, ranks):
    """Trains in each mode of the job. Returns the results of the modes that were finished, and None or a RankFailure."""
    path = pathlib.Path(job["folder"]) / f"ranks-{ranks}"
    path.mkdir()
    (path / "job.json").write_text(json.dumps({**job, "folder": str(path)}))
    with tempfile.NamedTemporaryFile("w+", prefix="fdsl-ddp-", suffix=".log", delete=False) as log:
        try:
            done = start(torchrun(ranks, __file__, str(path / "job.json")), env=environment(job["threads"]), stdin=subprocess.DEVNULL, stdout=log,
                         stderr=subprocess.STDOUT)
        except BaseException:
            os.unlink(log.name)
            raise
        log.seek(0)
        text = log.read()
    results = {mode: json.loads((path / f"{mode}.json").read_text()) for mode in job["modes"] if (path / f"{mode}.json").exists()}
    if done.returncode == 0 and len(results) == len(job["modes"]):
        os.unlink(log.name)
        return results, None
    return results, RankFailure(message_of(ranks, path, text, log.name))


# ---- One rank ----

def write(path, value):
    """Writes a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def train_modes(job, notice):
    """Trains in each mode. Calls notice() with each mode before it begins."""
    import torch
    import torch.distributed as dist
    from torch_training import Ranks, read_data, trained, training_of

    folder, rank, count = pathlib.Path(job["folder"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(job["device"], int(os.environ["LOCAL_RANK"]) if job["device"] == "cuda" else None)
    torch.set_num_threads(job["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                **({"device_id": device} if device.type == "cuda" else {}))
    data = read_data(job["data"])
    for mode in job["modes"]:
        notice(mode)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        training = training_of(mode, job["row"], data, device, job["precision"], job["workers"], Ranks(rank, count))
        result = trained(training, job["epochs"])
        if rank == 0:
            write(folder / f"{mode}.json", result)
        # Destroy a CUDA graph before the communicator that it uses.
        if getattr(training, "graph", None):
            training.graph.reset()
        del training
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if count > 1:
        dist.barrier()
        ending = threading.Timer(20, os._exit, [0])  # all results are written; do not wait longer for the communicator
        ending.daemon = True
        ending.start()
        dist.destroy_process_group()


def main():
    die_with_parent(signal.SIGKILL)
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    modes = ["start"]
    try:
        train_modes(job, modes.append)
    except Exception as error:  # the script reports any exception of PyTorch
        now = time.time()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        rank = int(os.environ["RANK"])
        write(pathlib.Path(job["folder"]) / f"fault.{rank}", {"time": now, "mode": modes[-1], "rank": rank, "reason": reason})
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # ending NCCL could wait for the other ranks


if __name__ == "__main__":
    main()
