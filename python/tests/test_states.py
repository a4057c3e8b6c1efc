"""Tests files of states: a loader continues where `fdsl-bench --workload train` stopped, and the other way round."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
from conftest import PROGRAM, content

import fdsl

SIDE, BATCH, STEPS, MEAN, STD = 20, 16, 8, 0.5, 0.25  # of 120 samples
CROP = fdsl.RandomResizedCrop(SIDE, flip=True, mean=MEAN, std=STD)
IMAGES = f"--out-res {SIDE} --channels 3 --fit random-resized-crop --flip --mean {MEAN} --std {STD} --lanes 3 --shuffle 60"


def opened(data: Any, ranks: int = 1, rank: int = 0, **changes: Any) -> fdsl.Loader:
    order: dict[str, Any] = {"seed": 9, "rank": rank, "world_size": ranks, "num_threads": 2, "dtype": "float32"}
    if not isinstance(data, fdsl.Embeddings):
        order.update(lanes=3, shuffle_buffer=60, transforms=CROP)
    return fdsl.Loader(data, BATCH // ranks, **{**order, **changes})


def train(folder: pathlib.Path, data: pathlib.Path, words: str, launcher: str = "", status: int = 0) -> str:
    """Runs fdsl-bench in a folder, with the order of opened(). Returns what it printed to stderr."""
    samples = f"--data {data} --test-data {data} --feed load --batch {BATCH} --seed 9 --optimizer sgd --momentum 0 --lr 0.01"
    command = f"{launcher} {PROGRAM} --variant train-naive --model logreg {samples} {words}"
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done.stderr


def tensors_of(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the tensors of a safetensors file."""
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: whole[8 + size :][slice(*entry["data_offsets"])] for name, entry in header.items()}


def next_step(folder: pathlib.Path, data: pathlib.Path, words: str) -> tuple[bytes, bytes]:
    """Returns the images and the labels of the step with which training begins."""
    (folder / "step.safetensors").unlink(missing_ok=True)
    train(folder, data, f"{words} --export-step step.safetensors --dry-run")
    tensors = tensors_of(folder / "step.safetensors")
    return tensors["inputs"], tensors["labels"]


def next_batch(data: Any, ranks: int, path: pathlib.Path) -> tuple[bytes, bytes]:
    """Returns the images and labels that all ranks together receive next after load_state()."""
    images = labels = b""
    for rank in range(ranks):
        with opened(data, ranks, rank) as loader:
            loader.load_state(path)
            batch = next(iter(loader))
            images += content(batch[0])
            labels += content(batch[1])
    return images, labels


@pytest.mark.parametrize("name", ["f", "m"])
def test_the_program_continues_a_loader(digits: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    data = fdsl.Folder(digits / "f") if name == "f" else fdsl.Shards(digits / "m")
    state, again = tmp_path / "state", tmp_path / "again"
    for ranks, epoch, step in ((1, 0, 0), (2, 1, 3), (4, 2, STEPS - 1)):
        with opened(data, ranks) as loader:
            loader.set_epoch(epoch)
            iterator = iter(loader)
            for _ in range(step):
                next(iterator)
            loader.save_state(state)
            text = state.read_text()
            assert text.startswith(f"fdsl stream state 1\nepoch {epoch}\nsample {step * BATCH}\nsamples 120\nseed 9\n")
            expected = next_batch(data, ranks, state)
        words = f"{IMAGES} --epochs {epoch + 1} --init-state {state}"
        assert next_step(tmp_path, digits / name, words) == expected, (ranks, epoch, step)
        # Training to the end of the epoch ends at its end.
        train(tmp_path, digits / name, f"{words} --export-state {again} --verify")
        with opened(data) as loader:
            loader.load_state(again)
            assert loader.epoch == epoch + 1 and loader.state_dict()["sample"] == 0


def test_a_loader_continues_the_program(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data, keeps = digits / "m", "--checkpoint k --keep 100 --checkpoint-steps 5"
    train(tmp_path, data, f"{IMAGES} --epochs 2 {keeps} --export whole.safetensors")
    (tmp_path / "k" / "epoch-000002.ckpt").unlink()  # as if it had been killed in epoch 2, after step 7
    train(tmp_path, data, f"{IMAGES} --epochs 2 --checkpoint k --resume --dry-run --export part.safetensors --export-state s")
    shards = fdsl.Shards(data)
    with opened(shards) as loader:
        loader.load_state(tmp_path / "s")
        state = loader.state_dict()
        assert (state["epoch"], state["sample"]) == (1, 7 * BATCH)
        assert len(list(loader)) == 1 and loader.epoch == 2
    words = f"{IMAGES} --epochs 2 --init part.safetensors --init-state s"
    expected = next_step(tmp_path, data, words)
    for ranks in (1, 2, 4, 8):
        assert next_batch(shards, ranks, tmp_path / "s") == expected, ranks
    # Parameters and position are all that plain gradient descent needs: the weights are those of one run.
    train(tmp_path, data, f"{words} --export again.safetensors")
    assert tensors_of(tmp_path / "again.safetensors") == tensors_of(tmp_path / "whole.safetensors")
    if shutil.which("mpirun"):
        ranks = "mpirun --allow-run-as-root --oversubscribe -n 3"
        train(tmp_path, data, f"{words} --scaling strong --verify --export-state t", ranks)
        assert (tmp_path / "t").read_text().splitlines()[1:3] == ["epoch 2", "sample 0"]


def test_rows_continue_in_both_directions(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(1)
    numpy.save(tmp_path / "rows.npy", generator.standard_normal((120, 24), dtype=numpy.float32))
    numpy.save(tmp_path / "labels.npy", numpy.arange(120) % 5)
    rows = fdsl.Embeddings(tmp_path / "rows.npy", labels=tmp_path / "labels.npy")
    labels = "--labels labels.npy --test-labels labels.npy --raw"
    with opened(rows, 2) as loader:
        for _, _ in zip(range(3), loader):
            pass
        loader.save_state(tmp_path / "s")
    expected = next_batch(rows, 2, tmp_path / "s")
    assert next_step(tmp_path, tmp_path / "rows.npy", f"{labels} --init-state s") == expected
    train(tmp_path, tmp_path / "rows.npy", f"{labels} --init-state s --epochs 1 --export-state t --verify")
    with opened(rows, 4) as loader:
        loader.load_state(tmp_path / "t")
        assert loader.epoch == 1


def test_wrong_states_are_refused_by_name(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state, data = tmp_path / "s", digits / "f"
    with opened(fdsl.Folder(data)) as loader:
        list(zip(range(2), loader))
        loader.save_state(state)
        loader.save_state(state)  # replaces it
    for words, message in (
        ("--seed 8", "--init-state s: its seed is 9, but that of the stream is 8; use --seed 9"),
        ("--shuffle 61", "its shuffle_buffer (0: no shuffle) is 60, but that of the stream is 61; use --shuffle 60"),
        ("--lanes 2", "its lanes (0: no shuffle) is 3, but that of the stream is 2; use --lanes 3"),
        ("--batch 15", "choose --batch so that all ranks together use 16 samples per step"),
        ("--drop-last", "its drop_last is 0, but that of the stream is 1; drop --drop-last"),
        ("--train-size 60", "60 of them are trained on; name the test set with --test-data, and drop --train-size"),
        ("--repeats 2", "--repeats: steps of repeated samples have no state"),
        ("--batch max", "--init-state needs a known batch"),
        ("--checkpoint run --export-state s", "--export-state would replace the file of --init-state"),
        ("--save-batch 1:x", "--init-state begins later"),
    ):
        option = words.split()[0]
        samples = f"--data {data} --test-data {data} --feed load --batch {BATCH} --seed 9 {IMAGES} "
        samples = re.sub(f"{option} [^ ]+ ", "", samples)  # an option is given once
        command = f"{PROGRAM} --variant train-naive --model logreg {samples} {words} --init-state s --epochs 1"
        done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)
    assert "1 epochs" not in train(tmp_path, data, f"{IMAGES} --epochs 1 --init-state s")
    other = tmp_path / "other"
    shutil.copytree(data, other)
    shutil.copy(next(iter(sorted(other.glob("*/*.png")))), next(iter(sorted(other.glob("*/*.png"), reverse=True))))
    assert "it belongs to another data set" in train(tmp_path, other, f"{IMAGES} --init-state s", status=2)
    loader = opened(fdsl.Folder(data))
    text = state.read_text()
    for changed, message in (
        (text.replace("seed 9", "seed 7"), "damaged: its lines do not have its checksum"),
        (text.replace("lanes", "lane"), "damaged: the line 'lanes' is missing or wrong"),
        (text.replace("epoch 0", "epoch -1"), "damaged: the line 'epoch' is missing or wrong"),
        (text.replace("drop_last 0", "drop_last 4294967296"), "damaged: the line 'drop_last' is missing or wrong"),
        (text[:-2], "damaged: the line 'check' is missing or wrong"),
        (text + "more\n", "damaged: the line 'check' is missing or wrong"),
        (text.replace("state 1", "state 2"), "has version 2, but this program reads version 1"),
        (text.replace("state 1", "state 1\r"), "damaged: its version is missing or wrong"),
        (text.replace("state 1", "state 12345678901234567890"), "damaged: its version is missing or wrong"),
        (text.partition("1")[0], "damaged: its version is missing or wrong"),
        ("", "is no state of a stream"),
        ("PK\x03\x04", "is no state of a stream; give a file that Loader.save_state() or --export-state has written"),
    ):
        state.write_text(changed)
        with pytest.raises((ValueError, fdsl.Error)) as error:
            loader.load_state(state)
        assert message in str(error.value) and str(state) in str(error.value), changed
    assert loader.state_dict()["sample"] == 0
    state.write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a state of a stream"):
        loader.save_state(state)
    assert state.read_text() == "mine"
    with pytest.raises(ValueError, match="path: it is empty"):
        loader.save_state("")
    with pytest.raises(TypeError, match="path: it must be a path"):
        loader.load_state(None)  # type: ignore[arg-type]
    with pytest.raises(fdsl.Error, match="none: cannot be read: No such file"):
        loader.load_state(tmp_path / "none")
    loader.close()
    with pytest.raises(ValueError, match="loader: it is closed"):
        loader.save_state(tmp_path / "closed")
