"""fdsl.Trainer on GPUs: the parameters and the speed of the program in the same run, on its data and on a Loader; batches in
host and device memory; two ranks by torchrun, or as plain processes. Skipped without a GPU.

    make all lib && python3 -m pytest -s python/tests/test_trainer_gpu.py
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import pytest
from conftest import PROGRAM, ROOT

import fdsl

numpy = pytest.importorskip("numpy")
if fdsl.cuda_devices() == 0:
    pytest.skip("no CUDA device, or libfdsl was built without CUDA", allow_module_level=True)

SAMPLES, BATCH, EPOCHS = 10240, 256, 6
IMAGES: dict[str, Any] = {"classes": 1000, "res": 512, "out_res": 224, "fit": "crop", "channels": 3}
TRAIN: dict[str, Any] = {"model": "vit-tiny", "optimizer": "adamw", "lr": 1e-3, "batch": BATCH, "epochs": EPOCHS}
OWN: dict[str, Any] = {"data": "synth", "train_size": SAMPLES, "test_size": 256, **IMAGES, **TRAIN}
LEAST = 0.98  # of the program's speed
SHORT: dict[str, Any] = {**OWN, "train_size": 4 * BATCH, "epochs": 2}


def run(folder: pathlib.Path, ranks: int = 1, **options: Any) -> list[dict[str, str]]:
    """Trains with the program. Returns its rows."""
    words = [PROGRAM, "--workload", "train", "--variant", "train-vit", "--format", "csv"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if ranks > 1:
        words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=400)
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


def test_constant_batches_have_the_programs_parameters_and_speed(tmp_path: pathlib.Path) -> None:
    run(tmp_path, feed="constant", export="program.safetensors", **SHORT)
    with fdsl.Trainer(variant="train-vit", feed="constant", **SHORT) as trainer:
        trainer.step(count=3)
        trainer.save(tmp_path / "checkpoints")
        trainer.fit()
        trainer.export(tmp_path / "library.safetensors")
        assert parameters(tmp_path / "library.safetensors") == parameters(tmp_path / "program.safetensors")
        trainer.load(tmp_path / "checkpoints")
        trainer.fit()
        trainer.export(tmp_path / "resumed.safetensors")
        assert parameters(tmp_path / "resumed.safetensors") == parameters(tmp_path / "program.safetensors")
    expected = program_speed(tmp_path, "constant")
    with fdsl.Trainer(variant="train-vit", feed="constant", **OWN) as trainer:
        ours = speed(trainer)
    print(f"\nconstant: {ours:.0f} samples/s, the program {expected:.0f}, ratio {ours / expected:.3f}")
    assert ours >= LEAST * expected


def test_a_generated_stream_has_the_programs_speed(tmp_path: pathlib.Path) -> None:
    expected = program_speed(tmp_path, "live")
    with fdsl.Loader(fdsl.Images(**IMAGES, count=SAMPLES), BATCH, device="cuda:0") as loader:
        with fdsl.Trainer(loader, variant="train-vit", **{**TRAIN, "batch": None}) as trainer:
            ours = speed(trainer)
            assert trainer.epoch == EPOCHS and trainer.history["train_loss"] < 8
    print(f"\nstream: {ours:.0f} samples/s, the program's live feed {expected:.0f}, ratio {ours / expected:.3f}")
    assert ours >= LEAST * expected


@pytest.mark.parametrize("variant, model", [("train-vit", "vit-micro"), ("train-cuda", "lenet"), ("train-bf16", "cnn")])
def test_batches_in_host_and_device_memory_are_those_of_the_stream(variant: str, model: str) -> None:
    options: dict[str, Any] = {"variant": variant, "model": model, "epochs": 2, "lr": 1e-3}
    source = fdsl.Images(**{**IMAGES, "classes": 10, "out_res": 28, "channels": 1}, count=150)
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
    with fdsl.Loader(fdsl.Images(**{**IMAGES, "classes": 10, "out_res": 28, "channels": 1}, count=64), 64, device="cuda:0") as loader:
        images, labels = next(iter(loader))
        with fdsl.Trainer(variant="train-cuda", model="lenet", classes=5, samples=128, epochs=1) as trainer:
            loss = trainer.step(images, labels)
            with pytest.raises(ValueError, match="labels that are not below the number of classes, 5"):
                float(loss)


RANK = """
import os, sys, fdsl
with fdsl.Trainer(variant="train-vit", **{options}) as trainer:
    trainer.fit()
    trainer.export("{path}")
    print(trainer.variant, trainer.epoch, trainer.history)
"""


@pytest.mark.parametrize("way", ["torchrun", "plain"])
def test_two_ranks_have_the_programs_parameters(tmp_path: pathlib.Path, way: str) -> None:
    if fdsl.cuda_devices() < 2:
        pytest.skip("needs two GPUs")
    if way == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    script = tmp_path / "rank.py"
    options = {**SHORT, "feed": "live"}
    script.write_text(RANK.format(options=options, path=tmp_path / "library.safetensors"))
    environment = {**os.environ, "FDSL_LIBRARY": fdsl.library_path(), "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])}
    if way == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    else:
        port = str(20000 + os.getpid() % 20000)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port},
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    run(tmp_path, ranks=2, export="program.safetensors", **options)
    assert parameters(tmp_path / "library.safetensors") == parameters(tmp_path / "program.safetensors")


NCCL = """
import ctypes, fdsl, sys
with fdsl.Trainer(variant="train-vit", rank=int(sys.argv[1]), world_size=2, device=int(sys.argv[1]),
                  nccl_id=bytes.fromhex(sys.argv[2]), **{options}) as trainer:
    trainer.fit()
    trainer.export("{path}")
"""


def test_ranks_meet_by_an_nccl_id(tmp_path: pathlib.Path) -> None:
    import ctypes

    if fdsl.cuda_devices() < 2:
        pytest.skip("needs two GPUs")
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError:
        pytest.skip("libnccl.so.2 is not on the path of libraries")
    identifier = ctypes.create_string_buffer(128)
    script = tmp_path / "rank.py"
    script.write_text(NCCL.format(options={**SHORT, "feed": "live"}, path=tmp_path / "library.safetensors"))
    # The process that creates the id stays alive while the ranks join, because it listens for them.
    assert nccl.ncclGetUniqueId(identifier) == 0
    environment = {**os.environ, "FDSL_LIBRARY": fdsl.library_path(), "PYTHONPATH": str(ROOT / "python")}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), identifier.raw.hex()], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    run(tmp_path, ranks=2, export="program.safetensors", **{**SHORT, "feed": "live"})
    assert parameters(tmp_path / "library.safetensors") == parameters(tmp_path / "program.safetensors")
