"""Runs torchrun_rank.py: as plain processes, and with torchrun if PyTorch is installed."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import tarfile
from typing import Any

import pytest

import fdsl

RANK = pathlib.Path(__file__).with_name("torchrun_rank.py")
SHARDS = (1, 50, 17, 33)  # samples of each shard; 101 is prime


@pytest.fixture(scope="module")
def uneven(digits: pathlib.Path, tmp_path_factory: Any) -> pathlib.Path:
    """A folder with shards of different sizes, as webdataset writes them."""
    folder: pathlib.Path = tmp_path_factory.mktemp("uneven")
    files = iter(sorted((digits / "f").glob("*/*.png")))
    for shard, count in enumerate(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for number in range(count):
                file = next(files)
                for ending, data in ("png", file.read_bytes()), ("cls", str(int(file.parent.name)).encode()):
                    info = tarfile.TarInfo(f"{shard:04d}{number:04d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return folder


def environment(**words: str) -> dict[str, str]:
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(fdsl.__file__)), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, "FDSL_LIBRARY": fdsl.library_path(), **words}


def expect_right(printed: str, ranks: int) -> None:
    lines = printed.splitlines()
    assert len(lines) == 4 and all(line.endswith("equal steps, every sample once") for line in lines), printed
    steps, rest = divmod(sum(SHARDS), 8 * ranks)
    assert f"{steps + (rest > 0)} steps, {sum(SHARDS)} samples" in lines[0], printed
    assert f"{steps} steps, {steps * 8 * ranks} samples" in lines[2], printed


@pytest.mark.parametrize("ranks, fault", [(1, ""), (2, ""), (3, ""), (2, "rank"), (2, "step")])
def test_plain_processes(uneven: pathlib.Path, tmp_path: pathlib.Path, ranks: int, fault: str) -> None:
    pytest.importorskip("numpy")
    names = {"WORLD_SIZE": str(ranks), "MEET": str(tmp_path), "FAULT": fault}
    command = [sys.executable, str(RANK), str(uneven)]
    processes = [
        subprocess.Popen(command, env=environment(RANK=str(rank), **names), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [int(fault != "")] * ranks, printed
    if not fault:
        expect_right(printed[0][0], ranks)
    else:
        expected = "step 0 has 16 samples, of which 8 are" if fault == "rank" else "the ranks have [7, 6] steps, not 7"
        assert expected in printed[0][0], printed


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun(uneven: pathlib.Path, ranks: int) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(RANK), str(uneven)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    expect_right(done.stdout, ranks)
