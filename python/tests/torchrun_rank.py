"""One rank of a check that fdsl gives each rank of torchrun the same number of steps, and each sample to one rank:

    torchrun --nproc-per-node 2 python/tests/torchrun_rank.py SHARDS

Trains with a step that all ranks take together, as DistributedDataParallel does: with NCCL if there is a GPU for each rank,
else with gloo on the CPU. Without PyTorch, ranks are processes that exchange files in the folder MEET (test_torchrun.py).
Prints one line per kind of epoch on rank 0. Exit status 1 if a rank differs.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import zlib
from typing import Any

import fdsl

BATCH, EPOCHS, SIDE, PATIENCE_S = 8, 2, 20, 60
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAULT = os.environ.get("FAULT", "")  # for the test of this check


class Files:
    """Collectives over files."""

    device, loader = "cpu", fdsl.Loader

    def __init__(self, folder: str) -> None:
        self.folder, self.count = pathlib.Path(folder), 0

    def step(self, images: Any) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        self.count += 1
        own = self.folder / f"{self.count}-{RANK}"
        own.with_suffix(".part").write_text(json.dumps(value))
        own.with_suffix(".part").rename(own)
        end = time.monotonic() + PATIENCE_S
        others = [self.folder / f"{self.count}-{rank}" for rank in range(RANKS)]
        while not all(other.exists() for other in others):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {RANK} waits for the other ranks")
            time.sleep(0.002)
        return [json.loads(other.read_text()) for other in others]


class Distributed:
    """The same with PyTorch."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        import fdsl.torch

        self.distributed, self.loader = distributed, fdsl.torch.Loader
        local = int(os.environ.get("LOCAL_RANK", RANK))
        on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", RANKS))
        self.device = f"cuda:{local}" if on_gpu else "cpu"
        if on_gpu:
            torch.cuda.set_device(local)
        distributed.init_process_group("nccl" if on_gpu else "gloo")

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * RANKS
        self.distributed.all_gather_object(values, value)
        return values

    def step(self, images: Any) -> None:
        """A gradient that all ranks add up: with unequal numbers of steps, it would wait for ever."""
        total = images.float().sum().reshape(1)
        self.distributed.all_reduce(total)


def epoch_of(loader: Any, step: Any = None) -> list[list[int]]:
    """Returns, for each step, hashes of the samples that this rank receives; `step` is a step of training."""
    steps = []
    for images, labels in loader:
        if step:
            step(images)
        values = images.cpu().numpy() if hasattr(images, "cpu") else images.numpy()
        steps.append([zlib.crc32(values[i].tobytes(), label) for i, label in enumerate(labels.tolist())])
    return steps


def verdict(ranks: list[list[list[int]]], wanted: list[list[int]], drop_last: bool) -> str:
    """Compares the steps of all ranks with those of one rank that has larger batches. Returns what is wrong, or ""."""
    counts = [len(steps) for steps in ranks]
    if counts != [len(wanted)] * len(ranks):
        return f"the ranks have {counts} steps, not {len(wanted)}"
    for number, samples in enumerate(wanted):
        found = [sample for steps in ranks for sample in steps[number]]
        if found != samples:
            return f"step {number} has {len(found)} samples, of which {len(set(found) & set(samples))} are expected"
        if drop_last and any(len(steps[number]) != BATCH for steps in ranks):
            return f"step {number} is not full on all ranks"
    return ""


def main(shards: str) -> int:
    group: Any = Files(os.environ["MEET"]) if "MEET" in os.environ else Distributed()
    faults = 0
    for drop_last in (False, True):
        common: dict[str, Any] = {"seed": 3, "shuffle_buffer": 40, "lanes": 4, "transforms": fdsl.Resize(SIDE)}
        common.update(drop_last=drop_last, device=group.device, decoder="cpu", num_threads=2)
        rank = 0 if FAULT == "rank" else RANK
        own = group.loader(fdsl.Shards(shards), BATCH, rank=rank, world_size=RANKS, **common)
        alone = group.loader(fdsl.Shards(shards), BATCH * RANKS, **common)
        for epoch in range(EPOCHS):
            own.set_epoch(epoch)
            alone.set_epoch(epoch)
            steps = epoch_of(own, group.step)
            if FAULT == "step" and RANK == 1:
                steps.pop()
            ranks = group.gather(steps)
            wrong = verdict(ranks, epoch_of(alone), drop_last)
            faults += bool(wrong)
            if RANK == 0:
                size = sum(len(samples) for each in ranks for samples in each)
                print(f"{RANKS} ranks, {group.device}, drop_last={drop_last}, epoch {epoch}, {len(steps)} steps, {size} samples: "
                      f"{wrong or 'equal steps, every sample once'}", flush=True)  # fmt: skip
    return int(any(group.gather(faults)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
