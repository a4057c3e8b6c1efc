"""Tests data sets and the Loader on the CPU: order, ranks, states, transforms, lifetimes, errors."""

from __future__ import annotations

import gc
import http.server
import io
import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import subprocess
import tarfile
import threading
import time
import warnings
from typing import Any

import pytest
from conftest import DIGITS, ORDERS, PROGRAM, broken_digits, content, resident_bytes, run_python

import fdsl

numpy = pytest.importorskip("numpy")

SIDE = 20
CROP = fdsl.RandomResizedCrop(SIDE, flip=True)
SMALL: dict[str, Any] = {"seed": 9, "lanes": 3, "shuffle_buffer": 60, "transforms": CROP, "num_threads": 2}


def opened(digits: pathlib.Path, name: str = "f", batch_size: int = 16, **changes: Any) -> fdsl.Loader:
    source = fdsl.Shards(digits / name) if name == "m" else fdsl.Folder(digits / name)
    return fdsl.Loader(source, batch_size, **{**SMALL, **changes})


def batches_of(loader: Any) -> list[tuple[bytes, list[int]]]:
    return [(content(images), labels.tolist()) for images, labels in loader]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


class MixUp:
    """As in torchvision."""


class Jitter:
    """A transform that does not exist here."""


# ---- Contents ----


def test_items_are_arrays_without_a_copy(digits: pathlib.Path) -> None:
    with opened(digits, dtype="float32", transforms=fdsl.Resize(SIDE, mean=0.5, std=(0.25, 0.5, 1))) as loader:
        assert (len(loader), loader.shape, loader.dtype) == (8, (3, SIDE, SIDE), "float32")
        plain = opened(digits, transforms=fdsl.Resize(SIDE))
        for (images, labels), (raw, same) in zip(loader, plain):
            view = images.numpy()
            assert view.ctypes.data == images.ptr and view.shape == (labels.shape[0], 3, SIDE, SIDE)
            assert images.ptr % 256 == 0 and labels.dtype == "int64" and labels.tolist() == same.tolist()
            scale = numpy.array([0.25, 0.5, 1], "float32").reshape(1, 3, 1, 1)
            numpy.testing.assert_allclose(view, (raw.numpy() / 255 - 0.5) / scale, atol=2e-6)
            assert numpy.shares_memory(numpy.from_dlpack(images), view)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_libraries_take_batches_by_dlpack(digits: pathlib.Path, library: str) -> None:
    """Real consumers on the CPU: they use the memory of the batch, which stays valid while they keep it."""
    peer = pytest.importorskip(library)
    take = peer.dlpack.from_dlpack if library == "jax" else peer.from_dlpack
    wanted = batches_of(opened(digits, dtype="float32"))
    loader, kept, shared = opened(digits, dtype="float32"), [], 0
    for images, labels in loader:
        one = take(images)
        address = {"numpy": lambda: one.ctypes.data, "torch": lambda: one.data_ptr(), "jax": lambda: one.unsafe_buffer_pointer()}
        shared += address[library]() == images.ptr
        kept.append((one, take(labels)))
        del images, labels, one
    loader.close()
    gc.collect()
    assert [(numpy.asarray(one).tobytes(), numpy.asarray(labels).tolist()) for one, labels in kept] == wanted
    assert shared == len(wanted)


def test_fill_copies_the_batches(digits: pathlib.Path) -> None:
    plain, loader = opened(digits), opened(digits)
    wanted = [batches_of(plain), batches_of(plain)]
    images, labels = numpy.zeros((16, 3, SIDE, SIDE), "uint8"), numpy.zeros(20, "int64")
    for epoch in range(2):
        found = []
        while (count := loader.fill(images, labels)) is not None:
            found.append((images[:count].tobytes(), labels[:count].tolist()))
        assert found == wanted[epoch] and loader.epoch == epoch + 1
    loader.set_epoch(1)
    memory = bytearray(images.nbytes)
    assert loader.fill(memoryview(memory).cast("B", images.shape)) == 16 and memory == wanted[1][0][0]


def test_fill_and_iterations_share_the_position(digits: pathlib.Path) -> None:
    plain, loader = opened(digits), opened(digits)
    wanted = batches_of(plain)
    images, labels = numpy.zeros((16, 3, SIDE, SIDE), "uint8"), numpy.zeros(16, "int64")
    iterator = iter(loader)
    assert content(next(iterator)[0]) == wanted[0][0]
    for step in 1, 2:
        loader.fill(images, labels)
        assert (images.tobytes(), labels.tolist()) == wanted[step]
    with pytest.raises(RuntimeError, match="another iteration"):
        next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["sample"]) == (0, 48)
    other = opened(digits)
    other.load_state_dict(state)
    assert other.fill(images, labels) == 16 and (images.tobytes(), labels.tolist()) == wanted[3]
    assert batches_of(pickle.loads(pickle.dumps(loader))) == wanted[3:]
    loader.fill(images)
    assert batches_of(loader) == wanted, "an iteration begins the epoch again"
    loader.close()
    with pytest.raises(ValueError, match="loader: it is closed"):
        loader.fill(images)


@pytest.mark.parametrize(
    "images, labels, words, message",
    [
        (((15, 3, SIDE, SIDE), "u1"), None, {}, r"images: its shape is \(15, 3, 20, 20\), not \(count, 3, 20, 20\) with .* 16"),
        (((16, 3, SIDE), "u1"), None, {}, "images: its shape is"),
        (((16, SIDE, SIDE, 3), "u1"), None, {}, "images: its shape is"),
        (((16, 3, SIDE, SIDE), "f4"), None, {}, "images: its elements are float32, not uint8"),
        (((16, 3, SIDE, SIDE), "u1"), ((15,), "i8"), {}, r"labels: its shape is \(15,\), not \(count,\) with"),
        (((16, 3, SIDE, SIDE), "u1"), ((16, 1), "i8"), {}, "labels: its shape is"),
        (((16, 3, SIDE, SIDE), "u1"), ((16,), "u8"), {}, "labels: its elements are uint64, not int64"),
        (((16, 3, SIDE, SIDE), "u1"), None, {"stream": 1}, "stream: it must be None for a loader on the CPU"),
    ],
)
def test_fill_checks_its_arguments(digits: pathlib.Path, images: Any, labels: Any, words: Any, message: str) -> None:
    with opened(digits) as loader, pytest.raises(ValueError, match=message):
        loader.fill(numpy.zeros(*images), None if labels is None else numpy.zeros(*labels), **words)
    with opened(digits) as loader, pytest.raises(TypeError, match="images: int is not an array"):
        loader.fill(7)


def test_order_is_free_of_threads_storage_and_prefetch(digits: pathlib.Path) -> None:
    first = opened(digits)
    wanted = [batches_of(first), batches_of(first)]
    assert wanted[0] != wanted[1] and sum(len(labels) for _, labels in wanted[0]) == DIGITS
    for name, changes in (("m", {"num_threads": 1}), ("f", {"num_threads": 3, "prefetch": 5}), ("m", {"prefetch": 1})):
        loader = opened(digits, name, **changes)
        assert [batches_of(loader), batches_of(loader)] == wanted


@pytest.mark.parametrize("name", ["f", "m"])
@pytest.mark.parametrize("kept", [1, "40K", "all"])
def test_files_in_memory_do_not_change_the_batches(digits: pathlib.Path, name: str, kept: Any) -> None:
    first, loader = opened(digits, name), opened(digits, name, resident_bytes=kept)
    for _ in range(3):
        assert batches_of(loader) == batches_of(first)
    before, after = first.stats(), loader.stats()
    assert before["resident_samples"] == 0
    assert {1: lambda n: n == 0, "40K": lambda n: 0 < n < DIGITS, "all": lambda n: n == DIGITS}[kept](after["resident_samples"])
    assert after["bytes"] < before["bytes"] or kept == 1
    assert f"resident_bytes={kept!r}" in repr(loader)


@pytest.mark.parametrize("world_size", range(1, 6))
def test_ranks_together_are_one(digits: pathlib.Path, world_size: int) -> None:
    whole = batches_of(opened(digits, batch_size=60))
    parts = [batches_of(opened(digits, "m", 60 // world_size, rank=r, world_size=world_size)) for r in range(world_size)]
    for step, (images, labels) in enumerate(whole):
        assert b"".join(part[step][0] for part in parts) == images
        assert sum((part[step][1] for part in parts), []) == labels


def test_a_rank_may_have_no_image_in_the_last_batch(digits: pathlib.Path) -> None:
    for rank in range(5):
        loader = opened(digits, batch_size=13, rank=rank, world_size=9)  # 120 = 117 + 3
        shapes = [images.shape for images, labels in loader]
        assert len(loader) == 2 and shapes == [(13, 3, SIDE, SIDE), (1 if rank < 3 else 0, 3, SIDE, SIDE)]
        images, labels = list(loader)[1]
        assert images.numpy().shape == images.shape and labels.numpy().shape == (images.shape[0],)
        assert numpy.from_dlpack(images).shape == images.shape


def test_gray_nhwc_and_center_crop(digits: pathlib.Path) -> None:
    loader = opened(digits, transforms=fdsl.CenterCrop(24), channels=1, layout="nhwc")
    assert loader.shape == (24, 24, 1)
    planar = opened(digits, transforms=fdsl.CenterCrop(24), channels=1)
    assert batches_of(loader) == batches_of(planar)
    same = opened(digits, transforms=None, channels=1)
    assert same.shape == (1, 28, 28) and len(batches_of(same)) == 8


def test_changes_of_images(digits: pathlib.Path) -> None:
    """tests/test_lib_stream.c compares them with those of the trainer."""
    words: dict[str, Any] = {"dtype": "float32", "batch_size": DIGITS}
    ((plain, _),) = opened(digits, **words)
    ((erased, _),) = opened(digits, transforms=[CROP, fdsl.RandomErasing(1)], **words)
    different = (plain.numpy() != erased.numpy()).any(axis=1).reshape(DIGITS, -1).mean(axis=1)
    assert (0.01 < different).all() and (different < 0.4).all()
    assert abs(float(erased.numpy()[plain.numpy() != erased.numpy()].std()) - 1) < 0.1
    wanted = None
    assert batches_of(opened(digits, transforms=[CROP, fdsl.RandAugment(2, "rand-m9-mstd0.5-inc1")])) != batches_of(opened(digits))
    for name, threads in (("f", 1), ("m", 2), ("m", 3)):
        loader = opened(digits, name, transforms=[CROP, fdsl.RandAugment(2, 20)], num_threads=threads)
        epochs = [batches_of(loader), batches_of(loader)]
        assert wanted in (None, epochs)
        wanted = epochs
    assert wanted and wanted[0] != batches_of(opened(digits))
    assert [labels for _, labels in wanted[0]] == [labels for _, labels in batches_of(opened(digits))]


@pytest.fixture(scope="module")
def colourful(tmp_path_factory: Any) -> pathlib.Path:
    """Class folders with 24 images: noise, from dark to bright, from pale to colourful, of 29 x 22 pixels."""
    image = pytest.importorskip("PIL.Image")
    path: pathlib.Path = tmp_path_factory.mktemp("colourful")
    random = numpy.random.default_rng(3)
    for k in range(24):
        (path / f"{k % 2}").mkdir(exist_ok=True)
        values = random.integers(0, 256, (22, 29, 3)) * (k % 5 + 1) / 5
        values = values.mean(axis=2, keepdims=True) * (k % 3) / 2 + values * (2 - k % 3) / 2
        image.fromarray(values.astype("u1")).save(path / f"{k % 2}" / f"{k}.png")
    return path


def plain_and_changed(path: pathlib.Path, *transforms: Any) -> tuple[Any, Any]:
    """All images of an epoch as they are, and changed, as arrays of shape (count, height, width, 3)."""
    words: dict[str, Any] = {"batch_size": 24, "layout": "nhwc", "shuffle": False}
    ((plain, _),), ((changed, _),) = fdsl.Loader(fdsl.Folder(path), **words), fdsl.Loader(fdsl.Folder(path), transforms=transforms, **words)
    assert plain.shape == (24, 22, 29, 3)
    return plain.numpy().copy(), changed.numpy().copy()


def test_colours_are_those_of_pillow(colourful: pathlib.Path) -> None:
    image, enhance = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageEnhance")
    for kind, field, factors in (
        (enhance.Brightness, "brightness", (0, 0.3, 1.7)),
        (enhance.Contrast, "contrast", (0, 0.4, 2.5)),
        (enhance.Color, "saturation", (0, 0.7, 3)),
    ):
        for factor in factors:
            plain, changed = plain_and_changed(colourful, fdsl.ColorJitter(**{field: (factor, factor)}))
            for own, other in zip(plain, changed):
                assert numpy.array_equal(numpy.asarray(kind(image.fromarray(own)).enhance(factor)), other), (field, factor)
    plain, changed = plain_and_changed(colourful, fdsl.RandomGrayscale(1))
    for own, other in zip(plain, changed):
        assert numpy.array_equal(numpy.asarray(image.fromarray(own).convert("L").convert("RGB")), other)


def test_hue_and_blur_are_those_of_torchvision(colourful: pathlib.Path) -> None:
    torch, vision = pytest.importorskip("torch"), pytest.importorskip("torchvision.transforms.functional")

    def largest(transform: Any, function: Any) -> int:
        plain, changed = plain_and_changed(colourful, transform)
        wanted = function(torch.from_numpy(plain).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
        assert (wanted != plain).any() and (changed != plain).any()
        return int(abs(wanted.astype(int) - changed).max())

    for turn in (-0.5, -0.2, 0.1, 0.37):
        assert largest(fdsl.ColorJitter(hue=(turn, turn)), lambda images: vision.adjust_hue(images, turn)) <= 1
    for size, sigma in (3, 0.4), (5, 1), (9, 2), (15, 7):
        blur = fdsl.GaussianBlur(size, sigma)
        assert largest(blur, lambda images: vision.gaussian_blur(images, [size, size], [sigma, sigma])) <= 1


def changes_of_clips(gray: bool) -> list[list[Any]]:
    """Lists of transforms that clips may have."""
    colours = fdsl.ColorJitter(0.4, 0.4, p=0.8) if gray else fdsl.ColorJitter(0.4, 0.4, 0.4, 0.1, 0.8)
    crop, blur = fdsl.RandomResizedCrop(12, flip=True), fdsl.GaussianBlur(5, p=0.5)
    return [[], [fdsl.Resize(9)], [fdsl.CenterCrop(16), blur], [colours], [crop, colours, *([] if gray else [fdsl.RandomGrayscale(0.3)]), blur]]


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_frames_of_a_clip_are_changed_alike(clips: pathlib.Path, dtype: str) -> None:
    for transforms in changes_of_clips(gray := fdsl.Loader(fdsl.Shards(clips / "i"), 20).shape[0] == 1):
        erasing = [fdsl.RandomErasing(0.5)] if dtype != "uint8" else []
        words: dict[str, Any] = {"seed": 3, "dtype": dtype, "channels": 1 if gray else 3}
        found = {}
        for axes, order in ORDERS.items():
            loader = fdsl.Loader(fdsl.Shards(clips / "c"), 20, axes=axes, transforms=[*transforms, *erasing], **words)
            ((images, labels),) = loader
            assert images.shape == (20, *loader.shape)
            found[axes] = images.numpy().copy(), labels.tolist()
            assert (found[axes][0] == found["cthw"][0].transpose(order)).all() and found[axes][1] == found["cthw"][1]
            ((still, _),) = fdsl.Loader(fdsl.Shards(clips / "s"), 20, axes=axes, transforms=transforms, **words)
            ((alone, _),) = fdsl.Loader(fdsl.Shards(clips / "i"), 20, transforms=transforms, **words)
            frames = still.numpy().transpose(numpy.argsort(order))
            assert (frames == alone.numpy()[:, :, None]).all(), (axes, transforms)


def test_clips_refuse_what_is_for_images(clips: pathlib.Path) -> None:
    source = fdsl.Shards(clips / "c")
    for words, text in (
        ({"layout": "nhwc"}, 'layout: it is for images, .* set axes to "thwc"'),
        ({"axes": "hwtc"}, "axes: 'hwtc' is unknown"),
        ({"transforms": fdsl.RandAugment()}, "rand_augment: it is for images, but the samples are clips of . frames"),
        ({"transforms": fdsl.MixUp(num_classes=3)}, "mixup: it is for images"),
    ):
        with pytest.raises(ValueError, match=text):
            fdsl.Loader(source, 4, **words)
    with pytest.raises(ValueError, match="axes: it is for clips"):
        fdsl.Loader(fdsl.Shards(clips / "i"), 4, axes="tchw")


def test_mixtures_are_those_of_plain_batches(digits: pathlib.Path) -> None:
    """tests/test_lib_stream.c compares them with those of the trainer."""
    words: dict[str, Any] = {"dtype": "float32", "batch_size": 16}
    kinds = set()
    for mixing in ([fdsl.MixUp(0.8)], [fdsl.CutMix()], [fdsl.MixUp(0.8, num_classes=12), fdsl.CutMix(1, 12)]):
        loader = opened(digits, transforms=[CROP, *mixing], **words)
        classes = mixing[0].num_classes or 10
        for (images, targets), (plain, labels) in zip(loader, opened(digits, **words)):
            mixed, own, rows = images.numpy(), plain.numpy(), targets.numpy()
            assert rows.shape == (len(own), classes) and rows.dtype == numpy.float32
            assert numpy.allclose(rows.sum(axis=1), 1)
            onehot = numpy.eye(classes)[labels.numpy()]
            different = (onehot != onehot[::-1]).any(axis=1)
            share = float(rows[different][0, labels.numpy()[different][0]])
            assert numpy.allclose(rows, share * onehot + (1 - share) * onehot[::-1], atol=1e-6)
            up = numpy.allclose(mixed, share * own + (1 - share) * own[::-1], atol=1e-5)
            cut = ((mixed == own) | (mixed == own[::-1])).all()
            assert up or cut
            kinds.add((len(mixing), "up" if up and not cut else "cut"))
    assert kinds == {(1, "up"), (1, "cut"), (2, "up"), (2, "cut")}


def test_fill_takes_targets(digits: pathlib.Path) -> None:
    loader = opened(digits, transforms=[CROP, fdsl.MixUp(0.8)])
    images = numpy.empty((16, *loader.shape), "u1")
    labels, targets = numpy.empty(16, "i8"), numpy.empty((16, 10), "f4")
    assert loader.fill(images, labels, targets=targets) == 16
    ((wanted, rows), *_) = opened(digits, transforms=[CROP, fdsl.MixUp(0.8)])
    assert (images == wanted.numpy()).all() and (targets == rows.numpy()).all()
    ((_, plain), *_) = opened(digits)
    assert (labels == plain.numpy()).all()
    with pytest.raises(ValueError, match="targets: its shape is"):
        loader.fill(images, targets=numpy.empty((16, 9), "f4"))
    with pytest.raises(ValueError, match="targets: the loader has none"):
        opened(digits).fill(images, targets=targets)


def test_batches_are_those_of_the_program(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The images that fdsl-bench trains on, as it writes them to PNG files."""
    image = pytest.importorskip("PIL.Image")
    words = (
        f"--variant train-omp --model logreg --data {digits / 'f'} --test-data {digits / 'f'} --feed load --batch 16 --seed 9 "
        f"--lanes 3 --shuffle 60 --out-res {SIDE} --channels 3 --fit random-resized-crop --flip --rand-augment 20 "
        "--crop-scale 0.3,0.6 --crop-ratio 0.5,1.5 --color-jitter 0.4,0.4,0.4,0.1 --color-jitter-p 0.8 --grayscale 0.2 --blur 0.5 --blur-kernel 3 --save-batch 16:out --dry-run"
    )
    done = subprocess.run([PROGRAM, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 16, files
    changes = [fdsl.RandAugment(2, 20), fdsl.ColorJitter(0.4, 0.4, 0.4, 0.1, 0.8), fdsl.RandomGrayscale(0.2), fdsl.GaussianBlur(3, p=0.5)]
    crop = CROP._replace(scale=(0.3, 0.6), ratio=(0.5, 1.5))
    images, labels = next(iter(opened(digits, transforms=[crop, *changes])))
    assert [int(file.stem.partition("-")[2]) for file in files] == labels.tolist()
    for number, file in enumerate(files):
        assert numpy.array_equal(numpy.asarray(image.open(file)), images.numpy()[number].transpose(1, 2, 0)), file


def test_ranges_of_crops(digits: pathlib.Path) -> None:
    ((plain, _), *_) = opened(digits, transforms=CROP)
    ((same, _), *_) = opened(digits, transforms=CROP._replace(scale=(0.08, 1), ratio=(0.75, 1.3333)))
    ((whole, _), *_) = opened(digits, transforms=fdsl.RandomResizedCrop(SIDE, scale=(1, 1), ratio=(1, 1)))
    ((resized, _), *_) = opened(digits, transforms=fdsl.Resize(SIDE))
    assert (plain.numpy() == same.numpy()).all() and (whole.numpy() == resized.numpy()).all()
    for words, text in (
        ({"scale": (0.5, 0.2)}, "transforms: scale: 0.5 is larger than 0.2"),
        ({"scale": (0, 1)}, "transforms: scale: 0 is out of range"),
        ({"ratio": (1, 8)}, "transforms: ratio: 8 is out of range"),
        ({"ratio": (1, 1, 1)}, "transforms: ratio: it must be a number or"),
    ):
        with pytest.raises(ValueError, match=text):
            opened(digits, transforms=fdsl.RandomResizedCrop(SIDE, **words))


# ---- Position ----


def test_states_move_to_other_ranks_at_any_step(digits: pathlib.Path) -> None:
    one = opened(digits, batch_size=20)
    epochs = [batches_of(one) for _ in range(3)]
    wanted = sum(epochs, [])
    found: list[Any] = []
    state: Any = None
    for turn in range(100):
        world_size = (1, 2, 4, 5)[turn % 4]
        ranks = [
            opened(digits, "m", 20 // world_size, rank=rank, world_size=world_size, prefetch=1 + turn % 3)
            for rank in range(world_size)
        ]
        if state:
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(state)))
                assert loader.state_dict() == state
        steps = 1 + turn % 7
        for loader in ranks:
            loader.set_epoch(loader.epoch)
        for _ in range(steps):  # over the ends of epochs
            parts = []
            for loader in ranks:
                iterator = getattr(loader, "kept", None) or iter(loader)
                item = next(iterator, None)
                if item is None:
                    iterator = iter(loader)
                    item = next(iterator)
                loader.kept = iterator  # type: ignore[attr-defined]
                parts.append((content(item[0]), item[1].tolist()))
            found.append((b"".join(part[0] for part in parts), sum((part[1] for part in parts), [])))
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        if len(found) >= len(wanted):
            break
    assert found[: len(wanted)] == wanted


def test_an_epoch_that_is_left_begins_again(digits: pathlib.Path) -> None:
    loader = opened(digits)
    wanted = [batches_of(loader), batches_of(loader)]
    loader = opened(digits)
    for images, _ in loader:
        break
    kept = content(images)
    assert loader.epoch == 0 and loader.state_dict()["sample"] == 16
    assert batches_of(loader) == wanted[0] and loader.epoch == 1
    assert content(images) == kept == wanted[0][0][0]
    loader.set_epoch(0)
    assert batches_of(loader) == wanted[0]
    assert batches_of(loader) == wanted[1]
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="another iteration"):
        next(first)
    next(second)


def test_states_of_other_loaders_are_refused(digits: pathlib.Path) -> None:
    state = opened(digits).state_dict()
    for changes, text in (
        ({"batch_size": 8}, "global batch"),
        ({"world_size": 2}, "global batch"),
        ({"seed": 1}, "seed"),
        ({"transforms": fdsl.Resize(SIDE)}, "another transform"),
        ({"dtype": "float16"}, "another transform"),
        ({"shuffle": False}, "shuffle_buffer"),
        ({"drop_last": True}, "drop_last"),
        ({"name": "m"}, "another data set"),
    ):
        with pytest.raises(ValueError, match=text):
            opened(digits, **changes).load_state_dict(state)
    loader = opened(digits)
    for wrong, kind in ((3, TypeError), ({}, ValueError), ({**state, "epoch": -1}, ValueError)):
        with pytest.raises(kind, match="state_dict: "):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sample 3"):
        loader.load_state_dict({**state, "sample": 3})


# ---- Lifetime ----


def test_batches_may_be_kept_beyond_the_loader(digits: pathlib.Path) -> None:
    loader = opened(digits, dtype="f32")
    kept = list(loader)
    copies = [content(images) for images, _ in kept]
    assert len(kept) == 8 and copies == [images for images, _ in batches_of(opened(digits, dtype="f32"))]
    tensors = [numpy.from_dlpack(images) for images, _ in kept]
    batches_of(loader)
    loader.source.close()
    loader.close()
    before = threads()
    del loader
    gc.collect()
    assert [content(images) for images, _ in kept] == copies
    del kept
    gc.collect()
    assert [tensor.tobytes() for tensor in tensors] == copies
    del tensors
    gc.collect()
    fdsl.Generator(2, res=8, batch=1).generate()  # frees the memory of tensors that have ended
    assert threads() < before


def test_break_leaks_neither_threads_nor_memory(digits: pathlib.Path) -> None:
    loader = opened(digits)
    count = resident = 0
    for turn in range(1000):
        for images, labels in loader:
            break
        if turn == 200:
            count, resident = threads(), resident_bytes()
    assert threads() == count
    assert resident_bytes() <= resident * 1.01 + 100_000
    loader.close()
    for turn in range(120):
        for images, labels in opened(digits, num_threads=1):
            break
        if turn == 20:
            resident = resident_bytes()
    del images, labels
    gc.collect()
    assert threads() == count - 2
    assert resident_bytes() <= resident + 8_000_000  # 80 KB per loader; arenas of malloc take a few MB


def test_two_loaders_at_once(digits: pathlib.Path) -> None:
    source = fdsl.Folder(digits / "f")
    one, two = fdsl.Loader(source, 16, **SMALL), fdsl.Loader(source, 16, **{**SMALL, "seed": 3})
    pairs = [((content(a), b.tolist()), (content(c), d.tolist())) for (a, b), (c, d) in zip(one, two)]
    assert [pair[0] for pair in pairs] == batches_of(opened(digits))
    assert [pair[1] for pair in pairs] == batches_of(opened(digits, seed=3))
    results: list[Any] = []
    workers = [threading.Thread(target=lambda: results.append(batches_of(opened(digits)))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [batches_of(opened(digits))] * 4


def work(loader: fdsl.Loader, pipe: Any) -> None:
    pipe.send(batches_of(loader))


def test_spawned_workers_open_the_loader_again(digits: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    loader = opened(digits)
    next(iter(loader))
    worker = context.Process(target=work, args=(loader, there))
    worker.start()
    assert here.poll(60)
    wanted = batches_of(opened(digits))[1:]
    assert here.recv() == wanted  # it continues, although the epoch was left
    worker.join()
    resumed = opened(digits)
    resumed.load_state_dict(loader.state_dict())
    assert batches_of(pickle.loads(pickle.dumps(resumed))) == wanted == batches_of(resumed)
    copy = pickle.loads(pickle.dumps(loader))
    assert repr(copy) == repr(loader) and copy.state_dict() == loader.state_dict()
    assert batches_of(copy) == wanted and batches_of(loader) == batches_of(opened(digits))
    assert batches_of(copy) != wanted  # the next epoch


def test_a_forked_child_needs_its_own_loader(digits: pathlib.Path) -> None:
    loader = opened(digits)
    iterator = iter(loader)
    next(iterator)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        for call in (lambda: next(iterator), lambda: iter(loader), lambda: fdsl.Loader(loader.source, 4), loader.stats):
            try:
                call()
            except fdsl.Error as error:
                texts.append("before fork()" in str(error))
        loader.close()
        texts.append(batches_of(opened(digits)) == batches_of(opened(digits, "m")))
        os.write(write, json.dumps(texts).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(read, 1000)) == [True] * 5
    assert len(list(iterator)) == 7


class Stalling(http.server.SimpleHTTPRequestHandler):
    """Serves shards, until a file /stall is requested; then it answers no more."""

    stalled = threading.Event()
    ended = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/stall":
            self.stalled.set()
        elif self.stalled.is_set():
            self.ended.wait(30)
        super().do_GET()

    def log_message(self, *words: Any) -> None:
        pass


def run_with_a_stalling_server(digits: pathlib.Path, code: str) -> str:
    """Runs code, in which URL is that of shards and stall() makes the server silent. Returns what it prints."""
    kind = type("One", (Stalling,), {"stalled": threading.Event(), "ended": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: kind(*words, directory=str(digits / "m")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begin = f"""
import os, signal, threading, time, urllib.request
import fdsl
HOST = "http://127.0.0.1:{server.server_port}/"
URL = HOST + "s-{{000000..000002}}.tar"
def stall():
    try: urllib.request.urlopen(HOST + "stall")
    except OSError: pass
"""
    done = run_python(begin + code)
    kind.ended.set()
    server.shutdown()
    server.server_close()
    if done.stdout.startswith("unavailable"):
        pytest.skip(done.stdout)
    assert not done.stderr, done
    return done.stdout


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_compressed_shards_have_the_same_batches(digits: pathlib.Path, tmp_path: pathlib.Path, form: str) -> None:
    """In a folder and at a URL, unpacked in memory or into copies, which are written once. A limit that is too small
    for the copies is refused."""
    if not shutil.which({"gz": "gzip", "zst": "zstd"}[form]):
        pytest.skip(f"no program for .{form}")
    packed = tmp_path / "z"
    packed.mkdir()
    for shard in sorted((digits / "m").glob("*.tar")):
        command = ["gzip", "-c"] if form == "gz" else ["zstd", "-q", "-c"]
        (packed / f"{shard.name}.{form}").write_bytes(subprocess.run([*command, shard], stdout=-1, check=True).stdout)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: Quiet(*words, directory=str(packed)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for place in (packed, f"http://127.0.0.1:{server.server_port}/s-{{000000..000002}}.tar.{form}"):
            assert batches_of(fdsl.Loader(fdsl.Shards(place), 16, **SMALL)) == batches_of(opened(digits, "m"))
            with pytest.raises(ValueError, match="cache_bytes.*raise"):
                fdsl.Shards(place, cache_dir=tmp_path / "c", cache_bytes=60000)
            for _ in range(2):
                source = fdsl.Shards(place, cache_dir=tmp_path / "c", cache_bytes="1M")
                assert batches_of(fdsl.Loader(source, 16, **SMALL)) == batches_of(opened(digits, "m"))
    except fdsl.Unavailable as error:
        pytest.skip(str(error))
    finally:
        server.shutdown()
        server.server_close()
    assert len(list((tmp_path / "c").glob("*.data"))) == 3  # the limit of 60,000 bytes has removed others


def test_ctrl_c_and_close_end_a_wait(digits: pathlib.Path) -> None:
    """The server stops to answer after the data set was opened, so the first batch never comes."""
    code = """
try:
    source = fdsl.Shards(URL)
except fdsl.Unavailable as error:
    print("unavailable", error)
    raise SystemExit
stall()
loader = fdsl.Loader(source, 16, transforms=fdsl.Resize(20))
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try: next(iter(loader))
except KeyboardInterrupt: print("interrupted", time.monotonic() - begin < 5, flush=True)
threading.Timer(0.5, loader.close).start()
try: next(iter(loader))
except ValueError as error: print("closed" if str(error) == "loader: it is closed" else error, time.monotonic() - begin < 10, flush=True)
os._exit(0)
"""
    assert run_with_a_stalling_server(digits, code) == "interrupted True\nclosed True\n"


@pytest.mark.parametrize("what", ["fdsl.Shards(URL)", "fdsl.Loader(source, 16)"])
def test_ctrl_c_ends_an_opening(digits: pathlib.Path, what: str) -> None:
    """Without a size, a loader reads the first image while it opens."""
    code = f"""
try: source = fdsl.Shards(URL)
except fdsl.Unavailable as error:
    print("unavailable", error)
    raise SystemExit
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
stall()
for _ in range(2):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try: {what}
    except KeyboardInterrupt: print("interrupted", time.monotonic() - begin < 5, flush=True)
while threading.active_count() > 1: time.sleep(0.01)
print(count() - before, len(source), flush=True)
source.close()
"""
    assert run_with_a_stalling_server(digits, code) == "interrupted True\ninterrupted True\n0 120\n"


# ---- Errors ----


def test_broken_samples(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = broken_digits(digits, tmp_path)
    options = {"shuffle": False, "transforms": fdsl.Resize(SIDE)}
    loader = opened(tmp_path, **options)
    seen = []
    with pytest.raises(fdsl.Error, match=name):
        for images, _ in loader:
            seen.append(content(images))
    assert seen == [images for images, _ in batches_of(opened(digits, **options))][:3]
    loader = opened(tmp_path, on_error="mask", **options)
    with pytest.warns(RuntimeWarning, match=name) as warned:
        items = list(loader)
    assert [pathlib.Path(one.filename).name for one in warned] == ["test_loader.py"]
    for step, (images, labels) in enumerate(items):
        assert [i for i, label in enumerate(labels.tolist()) if label == -1] == ([2] if step == 3 else [])
        assert (images.numpy().reshape(images.shape[0], -1).sum(axis=1) == 0).tolist().count(True) == (step == 3)
    assert loader.stats()["masked"] == 1 and loader.stats()["samples"] == DIGITS


def test_a_file_that_vanishes_is_an_error(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(digits / "m", tmp_path / "m")
    loader = opened(tmp_path, "m", on_error="mask")
    (tmp_path / "m" / "s-000001.tar").unlink()
    with pytest.raises(fdsl.Error, match="s-000001.tar"):
        batches_of(loader)


def test_every_argument_is_checked(digits: pathlib.Path) -> None:
    source = fdsl.Folder(digits / "f")
    for words, kind, text in (
        ({"batch_size": 0}, ValueError, "batch_size: "),
        ({"batch_size": "8"}, TypeError, "batch_size: "),
        ({"rank": 1}, ValueError, "rank: "),
        ({"world_size": 0}, ValueError, "world_size: "),
        ({"seed": -1}, ValueError, "seed: "),
        ({"shuffle": 1}, TypeError, "shuffle: "),
        ({"shuffle_buffer": 0}, ValueError, "shuffle_buffer: "),
        ({"lanes": 0}, ValueError, "lanes: "),
        ({"drop_last": None}, TypeError, "drop_last: "),
        ({"drop_last": True, "batch_size": 121}, ValueError, "drop_last: "),
        ({"num_threads": 0}, ValueError, "num_threads: "),
        ({"prefetch": 0}, ValueError, "prefetch: "),
        ({"resident_bytes": 0}, ValueError, "resident_bytes: 0 is out of range"),
        ({"resident_bytes": "most"}, ValueError, "resident_bytes: 'most' is not a number of bytes"),
        ({"resident_bytes": 0.5}, TypeError, "resident_bytes: "),
        ({"resident_device_bytes": 1}, ValueError, "resident_device_bytes: it has an effect only on a CUDA device"),
        ({"resident_device_bytes": 0}, ValueError, "resident_device_bytes: 0 is out of range"),
        ({"transforms": 224}, TypeError, "transforms: "),
        ({"transforms": [CROP, CROP]}, ValueError, "transforms: give one size or crop"),
        ({"transforms": [fdsl.RandAugment(), CROP]}, ValueError, "transforms: give one size or crop"),
        ({"transforms": [CROP, fdsl.RandAugment(0)]}, ValueError, "transforms: num_ops: 0 is out of range"),
        ({"transforms": [CROP, fdsl.RandAugment(2, 31)]}, ValueError, "transforms: magnitude: 31 is out of range"),
        ({"transforms": [CROP, fdsl.RandAugment(2, "9")]}, TypeError, "transforms: magnitude: "),
        ({"transforms": [CROP, fdsl.RandAugment(2, "rand-m9-m5")]}, ValueError, "'rand-m9-m5' has the part 'm' twice"),
        ({"transforms": [CROP, fdsl.ColorJitter()]}, ValueError, "transforms: ColorJitter changes nothing"),
        ({"transforms": [CROP, fdsl.ColorJitter((1, 1), hue=(0, 0))]}, ValueError, "transforms: ColorJitter changes nothing"),
        ({"transforms": [CROP, fdsl.ColorJitter(hue=0.6)]}, ValueError, "transforms: hue: 0.6 is out of range"),
        ({"transforms": [CROP, fdsl.ColorJitter((2, 1))]}, ValueError, "transforms: brightness: 2 is larger than 1"),
        ({"transforms": [CROP, fdsl.GaussianBlur(4)]}, ValueError, "transforms: kernel_size: 4 is even"),
        ({"transforms": [CROP, fdsl.GaussianBlur(63)]}, ValueError, "transforms: kernel_size: a kernel of 63 pixels is too large"),
        ({"transforms": [CROP, fdsl.GaussianBlur(3, (0, 1))]}, ValueError, "transforms: sigma: 0 is out of range"),
        ({"transforms": [fdsl.RandomGrayscale(), CROP]}, ValueError, "transforms: give one size or crop"),
        ({"transforms": [CROP, fdsl.RandomGrayscale()], "channels": 1}, ValueError, "grayscale_p: it has no effect on images of one channel"),
        ({"transforms": [CROP, fdsl.RandomErasing(2)], "dtype": "f32"}, ValueError, "transforms: p: 2 is out of range"),
        ({"transforms": [CROP, fdsl.RandomErasing()]}, ValueError, "dtype: the noise of RandomErasing .* set dtype"),
        ({"transforms": [CROP, MixUp()]}, TypeError, "transforms: MixUp of .* is unknown here; use fdsl.MixUp or fdsl.CutMix"),
        ({"transforms": [CROP, fdsl.MixUp(0)]}, ValueError, "transforms: alpha: it is 0; leave out MixUp"),
        ({"transforms": [CROP, fdsl.CutMix(1001)]}, ValueError, "transforms: alpha: 1001 is out of range"),
        ({"transforms": [CROP, fdsl.CutMix(1, 1)]}, ValueError, "transforms: num_classes: 1 is out of range"),
        ({"transforms": [CROP, fdsl.CutMix(), fdsl.MixUp()]}, ValueError, "transforms: give one size or crop"),
        ({"transforms": [CROP, fdsl.MixUp(1, 10), fdsl.CutMix(1, 11)]}, ValueError, "transforms: num_classes: it is 10 in"),
        ({"transforms": [Jitter()]}, TypeError, "transforms: .* not Jitter"),
        ({"device": "tpu"}, ValueError, "device: 'tpu' is unknown"),
        ({"device": 1.5}, TypeError, "device: "),
        ({"device": "cuda:4095"}, fdsl.Unavailable, "device: .*(CUDA|4095)"),
        ({"decoder": "fast"}, ValueError, "decoder: 'fast' is unknown"),
        ({"decoder": None}, TypeError, "decoder: "),
        ({"decoder": "hardware"}, ValueError, "decoder: "),
        ({"device_share": 2}, ValueError, "device_share: 2 is out of range"),
        ({"device_share": "1"}, TypeError, "device_share: "),
        ({"device_share": 0.5}, ValueError, "device_share: .* leave it"),
        ({"transforms": fdsl.Resize(0)}, ValueError, "transforms: size: "),
        ({"transforms": fdsl.Resize(8, flip=1)}, TypeError, "transforms: flip: "),  # type: ignore[arg-type]
        ({"transforms": fdsl.Resize(8, mean=(1, 2)), "dtype": "f32"}, ValueError, "transforms: mean: "),
        ({"transforms": fdsl.Resize(8, std=0), "dtype": "f32"}, ValueError, "transforms: std: "),
        ({"transforms": fdsl.Resize(8, mean=0.5)}, ValueError, "dtype: "),
        ({"transforms": None, "channels": 3}, ValueError, "channels: "),
        ({"dtype": "int8"}, ValueError, "dtype: "),
        ({"channels": 2}, ValueError, "channels: "),
        ({"layout": "chw"}, ValueError, "layout: "),
        ({"on_error": "skip"}, ValueError, "on_error: "),
        ({"on_error": 3}, TypeError, "on_error: "),
    ):
        with pytest.raises(kind, match=text):
            fdsl.Loader(source, **{**SMALL, **words})
    for path, words, kind, text in (
        (None, {}, TypeError, "path: "),
        ("", {}, ValueError, "path: "),
        (digits / "none", {}, ValueError, "path .*none"),
        (digits / "f", {}, ValueError, "path: .* no shards"),
        (digits / "m", {"label": ":"}, ValueError, "label: "),
        (digits / "m", {"cache_bytes": "2X"}, ValueError, "cache_bytes: "),
        (digits / "m", {"cache_bytes": "2G"}, ValueError, "cache_bytes: it needs cache_dir"),
    ):
        with pytest.raises(kind, match=text):
            fdsl.Shards(path, **words)
    with pytest.raises(ValueError, match="path: .* has shards"):
        fdsl.Folder(digits / "m")
    with pytest.raises(TypeError, match="source: "):
        fdsl.Loader(digits / "f")  # type: ignore[arg-type]
    loader = fdsl.Loader(source, **SMALL)
    with pytest.raises(TypeError, match="not a data set"):
        loader[0]
    with pytest.raises(ValueError, match="epoch: "):
        loader.set_epoch(-1)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="loader: it is closed"):
        next(iter(loader))
    source.close()
    with pytest.raises(ValueError, match="source: it is closed"):
        fdsl.Loader(source, **SMALL)


def test_labels_are_words_or_in_a_table(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "flat").mkdir()
    lines = ["name,label"]
    with tarfile.open(tmp_path / "w" / "a.tar", "w") as shard:
        for i, file in enumerate(sorted((digits / "f").glob("*/*.png"))):
            word = f"class {file.parent.name}"
            for extension, data in (("png", file.read_bytes()), ("txt", word.encode())):
                member = tarfile.TarInfo(f"{i:06d}.{extension}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
            shutil.copy(file, tmp_path / "flat" / f"{i:06d}.png")
            lines.append(f"{i:06d},{word}")
    table = tmp_path / "l.csv"
    table.write_text("\n".join(lines))
    expected = fdsl.Folder(digits / "f")
    for source in (
        fdsl.Shards(tmp_path / "w"),
        fdsl.Shards(tmp_path / "w", labels=table),
        fdsl.Folder(tmp_path / "flat", labels=table),
        pickle.loads(pickle.dumps(fdsl.Shards(tmp_path / "w", image="*.png", labels=table))),
    ):
        assert source.classes == [f"class {name}" for name in expected.classes]
        for (a, one), (b, other) in zip(fdsl.Loader(source, **SMALL), fdsl.Loader(expected, **SMALL)):
            assert a.tolist() == b.tolist() and one.tolist() == other.tolist()
    with pytest.raises(ValueError, match="^labels: .*l.csv has the labels of images; drop label"):
        fdsl.Shards(tmp_path / "w", label="txt", labels=table)
    table.write_text("\n".join(lines[:-1]))
    with pytest.raises(fdsl.Error, match="l.csv has no line for it"):
        fdsl.Loader(fdsl.Shards(tmp_path / "w", labels=table), **SMALL)


def test_an_exact_resize_is_that_of_all_pixels(tmp_path: pathlib.Path) -> None:
    for words in (
        f"--prepare {tmp_path}/j --from synth --classes 3 --samples 9 --res 128 --encode jpeg --shards 1",
        f"--prepare {tmp_path}/p --from dataset --source {tmp_path}/j --out-res 128 --encode png --shards 1",
    ):
        subprocess.run([PROGRAM, *words.split()], check=True, capture_output=True)

    def images(name: str, **words: Any) -> Any:
        loader = fdsl.Loader(fdsl.Shards(tmp_path / name), 9, transforms=fdsl.Resize(15, **words), channels=1)
        return [values.tolist() for values, _ in loader]

    assert images("j", exact=True) == images("p") == images("p", exact=True) != images("j")
    with pytest.raises(TypeError, match="^transforms: exact: "):
        images("j", exact=1)


def test_a_folder_without_class_folders(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "flat").mkdir()
    for i, file in enumerate(sorted((digits / "f").glob("*/*.png"))[:5]):
        shutil.copy(file, tmp_path / "flat" / f"{i}.png")
    with pytest.raises(ValueError, match="^path: .*flat has no class folders; move .*flat/CLASS/IMAGE$"):
        fdsl.Folder(tmp_path / "flat")
    with pytest.raises(ValueError, match="^cache_dir: it is for data at a URL"):
        fdsl.Shards(digits / "m", cache_dir=tmp_path)


def test_images_of_several_sizes_are_refused_at_opening(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(digits / "f", tmp_path / "f")
    sizes = subprocess.run(
        [PROGRAM, "--prepare", str(tmp_path / "large"), "--from", "synth", "--classes", "1", "--samples", "1", "--res", "64",
         "--encode", "png", "--store", "imagefolder"], capture_output=True,
    )  # fmt: skip
    assert sizes.returncode == 0, sizes.stderr
    last = sorted((tmp_path / "f").glob("*/*.png"))[-1]
    shutil.copy(next((tmp_path / "large").glob("*/*.png")), last)
    with pytest.raises(ValueError, match=f"{last.name}: .*to give all images one size, set transforms and channels"):
        fdsl.Loader(fdsl.Folder(tmp_path / "f"), 4, channels=1)


def test_messages_name_transforms_and_positions(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = fdsl.Folder(digits / "f")
    for fit, words in (
        (fdsl.Resize(32, std=0), "transforms: std: 0 is out of range"),
        (fdsl.Resize(32, std=float("nan")), "transforms: std: nan is out of range"),
        (fdsl.Resize(32, mean=1e9), r"transforms: mean: 1e\+09 is out of range"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            fdsl.Loader(source, 4, transforms=fit, dtype="float32")
    shutil.copytree(digits / "f", tmp_path / "f")
    for image in sorted((tmp_path / "f").glob("*/*.png"))[16:20]:
        image.write_bytes(b"x" * 100)
    loader = opened(tmp_path, shuffle=False, on_error="mask")
    with pytest.warns(RuntimeWarning, match=r"of epoch 0, step 1 \(counted from 0\) masked"):
        batches_of(loader)


def test_opening_prints_nothing(digits: pathlib.Path, capfd: Any, tmp_path: pathlib.Path) -> None:
    shutil.copytree(digits / "f", tmp_path / "f")
    (tmp_path / "f" / "0000" / "readme.txt").write_text("")
    with pytest.warns(RuntimeWarning, match="ignored 1 of") as warned:
        fdsl.Folder(tmp_path / "f")
    assert [pathlib.Path(one.filename).name for one in warned] == ["test_loader.py"]
    assert "image;" not in str(warned[0].message)  # Folder has no such argument
    shutil.copytree(digits / "f", tmp_path / "p" / "train")
    shutil.copytree(digits / "f", tmp_path / "p" / "val")
    with pytest.warns(RuntimeWarning, match="folders train and val become classes.*such as .*/train"):
        fdsl.Folder(tmp_path / "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fdsl.Folder(digits / "f")
    assert capfd.readouterr() == ("", "")


def test_a_ctrl_c_loses_no_batch(digits: pathlib.Path) -> None:
    """The interrupts come after the library has handed a batch out, and before Python knows of it."""
    loader, wanted = opened(digits, prefetch=1), batches_of(opened(digits))
    wait = loader._stream._await

    def interrupted(*arguments: Any) -> int:
        wait(*arguments)
        raise KeyboardInterrupt

    for _ in range(8):
        loader._stream._await = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        loader._stream._await = wait  # type: ignore[method-assign]
    assert batches_of(loader) == wanted


def test_several_threads_may_close(digits: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened(digits)._stream
    lib = fdsl._stream.lib
    cancel, handles, begun = lib.fdsl_stream_cancel, [], threading.Event()

    def slow(handle: int) -> None:
        begun.set()
        time.sleep(0.3)
        handles.append(stream._handle)  # 0: another thread has freed the stream
        if stream._handle:
            cancel(handle)

    monkeypatch.setattr(lib, "fdsl_stream_cancel", slow)
    thread = threading.Thread(target=stream.close)
    thread.start()
    assert begun.wait(60)
    stream.close()
    thread.join()
    assert len(handles) == 1 and handles[0] and not stream._handle


@pytest.mark.parametrize(
    ("url", "broken", "name"),
    [
        ("http://127.0.0.1:9/s.tar", ("libcurl.so.4", "libcurl-gnutls.so.4"), "libcurl"),
        ("s3://bucket/", ("libexpat.so.1",), "Expat"),
    ],
)
def test_a_missing_library_is_named(tmp_path: pathlib.Path, url: str, broken: tuple[str, ...], name: str) -> None:
    """Broken files hide the libraries of the system. Everything but URLs works without them."""
    for file in broken:
        (tmp_path / file).write_bytes(b"no library")
    code = f"""
import fdsl
try: fdsl.Shards({url!r})
except fdsl.Unavailable as error: print(error)
print(len(fdsl.Generator(2, res=8, batch=2).generate()[0]))
"""
    if run_python("", LD_LIBRARY_PATH=str(tmp_path)).returncode != 0:
        pytest.skip(f"this Python itself needs {broken[0]}")
    done = run_python(code, LD_LIBRARY_PATH=str(tmp_path))
    if "built without" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.startswith(f"path: a data set at this URL needs {name}: {tmp_path}/{broken[0]}: "), done
    assert done.stdout.endswith("\n2\n")


def sources(digits: pathlib.Path, tmp_path: pathlib.Path) -> dict[str, Any]:
    numpy.save(tmp_path / "rows.npy", numpy.arange(800, dtype=numpy.float32).reshape(100, 8))
    return {"set": fdsl.Folder(digits / "f"), "images": fdsl.Images(5, count=100, res=16), "fresh":
            fdsl.Images(5, count=100, res=16, fresh=True), "rows": fdsl.Embeddings(tmp_path / "rows.npy")}  # fmt: skip


@pytest.mark.parametrize("name", ["set", "images", "fresh", "rows"])
def test_the_last_epoch(digits: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    """The epochs end with number 2^32 - 2; nothing wraps to epoch 0."""
    last = (2**64 - 101) // (2**32 + 4) if name == "fresh" else 2**32 - 2  # image numbers have 64 bits
    source = sources(digits, tmp_path)[name]
    changes: dict[str, Any] = {"transforms": fdsl.Resize(SIDE)} if name == "set" else {}
    loader = fdsl.Loader(source, 40, seed=1, **changes)
    with pytest.raises(ValueError, match="epoch: 4294967295 is out of range; it must be 0 to 4294967294"):
        loader.set_epoch(2**32 - 1)
    loader.set_epoch(last - 1)
    before, final = ([content(images) for images, _ in loader] for _ in range(2))
    assert loader.epoch == last + 1 and len(final) == 3 and before != final
    for _ in range(2):
        with pytest.raises(ValueError, match=f"epoch: {last + 1} is out of range; the last epoch is {last}"):
            next(iter(loader))
    loader.set_epoch(last)
    assert [content(images) for images, _ in loader] == final
    loader.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match=f"epoch: {last + 1} is out of range; the last epoch is {last}"):
        loader.load_state(tmp_path / "state")
    loader.set_epoch(last)
    images = numpy.empty((40, *loader.shape), loader.dtype)
    for step in range(3):
        count = loader.fill(images)
        assert images[:count].tobytes() == final[step]
    assert loader.fill(images) is None and loader.epoch == last + 1
    with pytest.raises(ValueError, match=rf"epoch: the last one, {last}, has ended; continue with set_epoch\(\)"):
        loader.fill(images)
    loader.set_epoch(0)
    labels = [labels.tolist() for _, labels in loader] if name in ("images", "fresh") else []
    loader.set_epoch(last)
    assert not labels or name == "images" or sorted(sum(labels, [])) == sorted(sum((y.tolist() for _, y in loader), []))
