"""fdsl.Trainer on GPUs: the parameters and the speed of the program in the same run, on its data and on a Loader; batches in
host and device memory; two ranks by torchrun, or as plain processes. Skipped without a GPU.

    make all lib && python3 -m pytest -s python/tests/test_trainer_gpu.py
"""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import io
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import PROGRAM, ROOT

import fdsl

numpy = pytest.importorskip("numpy")
if fdsl.cuda_devices() == 0:
    pytest.skip("no CUDA device, or libfdsl was built without CUDA", allow_module_level=True)

SAMPLES, BATCH, EPOCHS = 10240, 256, 6  # of the tests of speed
IMAGES: dict[str, Any] = {"classes": 1000, "res": 512, "out_res": 224, "fit": "crop", "channels": 3}
TRAIN: dict[str, Any] = {"model": "vit-tiny", "optimizer": "adamw", "lr": 1e-3, "epochs": EPOCHS}
OWN: dict[str, Any] = {"data": "synth", "train_size": SAMPLES, "test_size": 256, "batch": BATCH, **IMAGES, **TRAIN}
LEAST = 0.98  # of the program's speed
SMALL_IMAGES: dict[str, Any] = {"classes": 10, "res": 32, "out_res": 28, "fit": "crop", "channels": 1}
SMALL: dict[str, Any] = {**OWN, **SMALL_IMAGES, "model": "vit-micro", "train_size": 250, "test_size": 64, "batch": 64, "epochs": 2}
TIMEOUT_S = 60


def run(folder: pathlib.Path, ranks: int = 1, **options: Any) -> list[dict[str, str]]:
    """Trains with the program. Returns its rows."""
    words = [PROGRAM, "--workload", "train", "--variant", "train-vit", "--format", "csv"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if ranks > 1:
        words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def program_speed(folder: pathlib.Path, feed: str) -> float:
    """Returns the median samples/s of the epochs after the first."""
    rows = run(folder, feed=feed, **OWN)
    return statistics.median(float(row["items_per_s"]) for row in rows[1:])


def speed(trainer: fdsl.Trainer) -> float:
    times = []
    for epoch in range(1, EPOCHS + 1):
        trainer.fit(epochs=epoch)
        times.append(trainer.history["epoch_s"])
    return SAMPLES / statistics.median(times[1:])


def parameters(path: pathlib.Path) -> bytes:
    """Returns the values in a file of safetensors, after its header."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


@pytest.mark.parametrize("feed", ["live", "constant"])
def test_own_data_give_the_programs_parameters(tmp_path: pathlib.Path, feed: str) -> None:
    run(tmp_path, feed=feed, export="program.safetensors", **SMALL)
    expected = parameters(tmp_path / "program.safetensors")
    with fdsl.Trainer(variant="train-vit", feed=feed, **SMALL) as trainer:
        trainer.step(count=3)
        trainer.save(tmp_path / "checkpoints")
        trainer.fit()
        trainer.export(tmp_path / "library.safetensors")
        assert parameters(tmp_path / "library.safetensors") == expected
        trainer.load(tmp_path / "checkpoints")
        assert (trainer.epoch, trainer.position) == (0, (3, 4))
        trainer.fit()
        trainer.export(tmp_path / "resumed.safetensors")
        assert parameters(tmp_path / "resumed.safetensors") == expected


def test_constant_batches_have_the_programs_speed(tmp_path: pathlib.Path) -> None:
    expected = program_speed(tmp_path, "constant")
    with fdsl.Trainer(variant="train-vit", feed="constant", **OWN) as trainer:
        ours = speed(trainer)
    print(f"\nconstant: {ours:.0f} samples/s, the program {expected:.0f}, ratio {ours / expected:.3f}")
    assert ours >= LEAST * expected


def test_a_generated_stream_has_the_programs_speed(tmp_path: pathlib.Path) -> None:
    expected = program_speed(tmp_path, "live")
    with fdsl.Loader(fdsl.Images(**IMAGES, count=SAMPLES), BATCH, device="cuda:0") as loader:
        with fdsl.Trainer(loader, variant="train-vit", **TRAIN) as trainer:
            ours = speed(trainer)
            assert trainer.epoch == EPOCHS and trainer.history["train_loss"] < 8
    print(f"\nstream: {ours:.0f} samples/s, the program's live feed {expected:.0f}, ratio {ours / expected:.3f}")
    assert ours >= LEAST * expected


@pytest.mark.parametrize("variant, model", [("train-vit", "vit-micro"), ("train-cuda", "lenet"), ("train-bf16", "cnn")])
def test_batches_in_host_and_device_memory_are_those_of_the_stream(variant: str, model: str) -> None:
    options: dict[str, Any] = {"variant": variant, "model": model, "epochs": 2, "lr": 1e-3}
    source = fdsl.Images(**SMALL_IMAGES, count=150)
    states = []
    for way in "stream", "device", "host", "stream on the host":
        with fdsl.Loader(source, 64, device="cpu" if "host" in way else "cuda:0") as loader:
            with fdsl.Trainer(classes=10, samples=None if "stream" in way else 150, **options) as trainer:
                if "stream" in way:
                    trainer.fit(loader)
                else:
                    for _ in range(2):
                        for images, labels in loader:
                            trainer.step(images, labels)
                assert trainer.epoch == 2
                states.append(trainer.state_dict())
                images, labels = next(iter(loader))
                score = trainer.evaluate([(images, labels)])
                assert score.samples == 64 and 0 <= score.accuracy <= 1 and numpy.isfinite(score.loss)
    for other in states[1:]:
        for name, values in states[0].items():
            assert numpy.asarray(values).tobytes() == numpy.asarray(other[name]).tobytes(), name


def test_labels_in_device_memory_are_checked() -> None:
    with fdsl.Loader(fdsl.Images(**SMALL_IMAGES, count=64), 64, device="cuda:0") as loader:
        images, labels = next(iter(loader))
        with fdsl.Trainer(variant="train-cuda", model="lenet", classes=5, samples=128, epochs=1) as trainer:
            loss = trainer.step(images, labels)
            with pytest.raises(ValueError, match="labels that are not below the number of classes, 5"):
                float(loss)


def run_ranks(folder: pathlib.Path, ranks: list[tuple[list[str], dict[str, str]]]) -> None:
    """Runs commands at the same time, each with variables of its environment. Ends all if one fails, because others wait for it."""
    paths = os.pathsep.join([str(ROOT / "python"), *filter(None, sys.path)])
    common = {**os.environ, "FDSL_LIBRARY": fdsl.library_path(), "PYTHONPATH": paths}
    errors = [folder / f"errors{rank}" for rank in range(len(ranks))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for path, (command, own) in zip(errors, ranks):
            with open(path, "wb") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env={**common, **own}))
        end = time.monotonic() + TIMEOUT_S
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            assert time.monotonic() < end, [path.read_text() for path in errors]
            time.sleep(0.05)
        assert not any(process.poll() for process in processes), [path.read_text() for path in errors]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_ranks(folder: pathlib.Path) -> None:
    """Compares the parameters of two ranks of the library with those of the program."""
    run(folder, ranks=2, export="program.safetensors", feed="live", **SMALL)
    assert parameters(folder / "library.safetensors") == parameters(folder / "program.safetensors")


def need_two_gpus() -> None:
    if fdsl.cuda_devices() < 2:
        pytest.skip("needs two GPUs")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun, for the program's ranks")


RANK = """
import fdsl
with fdsl.Trainer(variant="train-vit", feed="live", **{arguments}, **{options}) as trainer:
    trainer.fit()
    trainer.export("{path}")
"""


@pytest.mark.parametrize("way", ["torchrun", "plain"])
def test_two_ranks_have_the_programs_parameters(tmp_path: pathlib.Path, way: str) -> None:
    need_two_gpus()
    if way == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(arguments={}, options=SMALL, path=tmp_path / "library.safetensors"))
    if way == "torchrun":
        run_ranks(tmp_path, [([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)], {})])
    else:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] - 1  # the trainer listens at the next one
        own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_ranks(tmp_path, [([sys.executable, str(script)], {**own, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"])
    check_ranks(tmp_path)


def test_ranks_meet_by_an_nccl_id(tmp_path: pathlib.Path) -> None:
    need_two_gpus()
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError:
        pytest.skip("libnccl.so.2 is not on the path of libraries")
    identifier = ctypes.create_string_buffer(128)
    # The process that creates the id stays alive while the ranks join, because it listens for them.
    assert nccl.ncclGetUniqueId(identifier) == 0
    ranks = []
    for rank in range(2):
        script = tmp_path / f"rank{rank}.py"
        arguments = {"rank": rank, "world_size": 2, "device": rank, "nccl_id": identifier.raw}
        script.write_text(RANK.format(arguments=arguments, options=SMALL, path=tmp_path / "library.safetensors"))
        ranks.append(([sys.executable, str(script)], {}))
    run_ranks(tmp_path, ranks)
    check_ranks(tmp_path)
