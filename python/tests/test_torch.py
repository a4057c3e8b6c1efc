"""Tests PyTorch: tensors as destinations, DLPack, and fdsl.torch.Loader. Without PyTorch, a stand-in (fake_torch.py) takes
its place in the tests of the Loader, also with a CUDA device that it simulates."""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CLASSES, MASKED, PROGRAM, ROOT, broken_digits, content, masked_set, resident_bytes, run_python, small

import fdsl
from fdsl._memory import kind_of
from fdsl import _stream

numpy = pytest.importorskip("numpy", minversion="1.23")
REAL = importlib.util.find_spec("torch") is not None
if REAL:
    torch = pytest.importorskip("torch", minversion="2.1", reason="PyTorch is older than 2.1")
    import fdsl.torch
else:
    import fake_torch as torch

    torch.install()

Loader: Any = fdsl.torch.Loader
real = pytest.mark.skipif(not REAL, reason="needs PyTorch")
stand_in = pytest.mark.skipif(REAL, reason="the stand-in is for machines without PyTorch; test_gpu.py tests CUDA")
DTYPES = {name: getattr(torch, name, None) for name in ("uint8", "float16", "bfloat16", "float32")}


# ---- Tensors ----


@real
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_are_filled(name: str) -> None:
    with small(out_res=24, dtype=DTYPES[name], channels=3) as g:
        assert g.dtype == name
        images, labels = g.generate(4, 8)
        tensor = torch.full((8, *g.shape), 7, dtype=DTYPES[name])
        indices = torch.zeros(8, dtype=torch.int64)
        g.fill(tensor, indices, 4)
        assert bytes(tensor.view(torch.uint8).numpy().data) == content(images)
        assert indices.tolist() == [number % CLASSES for number in range(4, 12)]
        g.fill(tensor, numbers=torch.arange(4, 12).flip(0))
        assert torch.equal(tensor.flip(0), torch.from_dlpack(images))
        counter = torch.tensor([4])
        g.fill(tensor, next=counter)
        assert counter.item() == 12 and torch.equal(tensor, torch.from_dlpack(images))


@real
def test_a_description_of_tensors_is_used_again_while_it_holds() -> None:
    """fill() of a loader on a GPU describes the tensors of its latest call only if they have changed."""
    changes = {
        "none": lambda one: None,
        "memory": lambda one: one.set_(torch.zeros(6)),
        "size": lambda one: one.resize_(5),
        "order": lambda one: one.resize_(2, 3).t_(),
        "type": lambda one: setattr(one, "data", one.view(torch.int32)),
        "gradient": lambda one: one.requires_grad_(),
    }
    for name, change in changes.items():
        one, other = torch.zeros(6), torch.zeros(2)
        again = kind_of("images", one).repeat([one, other])
        assert again() and one._version == other._version == 1
        change(one)
        assert again() == (name == "none"), name
        assert other._version == (2 if name == "none" else 1)


@real
@pytest.mark.parametrize("name", DTYPES)
def test_dlpack_shares_the_memory(name: str) -> None:
    with small(out_res=24, dtype=name) as g:
        images, labels = g.generate(0, 8)
    tensor, indices = torch.from_dlpack(images), torch.from_dlpack(labels)
    assert tensor.data_ptr() == images.ptr and indices.data_ptr() == labels.ptr
    assert tensor.dtype is DTYPES[name] and tuple(tensor.shape) == images.shape and indices.dtype is torch.int64
    expected = content(images)
    del images, labels, g
    gc.collect()
    small().generate()
    assert bytes(tensor.view(torch.uint8).numpy().data) == expected


@real
def test_a_tensor_that_dies_in_a_failing_call_keeps_its_exception() -> None:
    """If the deleter were Python code, the exception would become a SystemError."""
    with small(out_res=24) as g:
        images, _ = g.generate(0, 8)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shape"):
            torch.from_dlpack(images).reshape(3)
        with pytest.raises(TypeError):
            torch.add(torch.from_dlpack(images), "x")


@real
def test_wrong_tensors() -> None:
    g = small(out_res=24, dtype="float32")
    good = torch.empty((4, 1, 24, 24))
    for tensor, kind, text in (
        (good.double(), ValueError, "images: its elements are float64, not float32"),
        (good.to(memory_format=torch.channels_last).expand(4, 3, 24, 24), ValueError, "images: "),
        (good[::2], ValueError, "images: it is not contiguous"),
        (good.transpose(2, 3), ValueError, "images: it is not contiguous"),
        (good[0], ValueError, "images: its shape is"),
        (good.clone().requires_grad_(), ValueError, "images: it requires a gradient"),
        (torch.nn.Parameter(good.clone()), ValueError, "images: it requires a gradient"),
        (torch._neg_view(good), ValueError, "images: it is a negated view; give images.resolve_neg"),
        (good.to("meta"), ValueError, "images: a tensor on meta is neither"),
    ):
        with pytest.raises(kind, match=text):
            g.fill(tensor)
    for name in ("numbers", "next"):
        with pytest.raises(ValueError, match=f"{name}: it is a negated view"):
            g.fill(good, **{name: torch._neg_view(torch.zeros(4, dtype=torch.int64))})
    with pytest.raises(ValueError, match="numbers: -2 is out of range"):
        g.fill(good, numbers=torch.tensor([0, 1, -2, 3]))
    with pytest.raises(ValueError, match="labels: its elements are int32"):
        g.fill(good, torch.empty(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="dtype: 'float64' is unknown"):
        small(dtype=torch.float64)
    assert small(device=torch.device("cpu")).device == "cpu"
    with pytest.raises(ValueError, match="device: 'meta' is unknown"):
        small(device=torch.device("meta"))


@real
def test_autograd_detects_overwritten_images() -> None:
    with small(out_res=24, dtype="float32") as g:
        images = torch.empty((4, *g.shape))
        g.fill(images)
        weight = torch.ones((), requires_grad=True)
        loss = (images * weight).sum()
        g.fill(images, first=4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@real
def test_time_per_call() -> None:
    one = small().classes[0]._replace(vertices=1, orbits=1, radius=1)
    with fdsl.Generator(class_list=[one], res=1, batch=1, threads=1) as g:
        images, labels = torch.empty((1, 1, 1, 1), dtype=torch.uint8), torch.empty(1, dtype=torch.int64)
        arrays = images.numpy(), labels.numpy()
        numbers = torch.zeros(1, dtype=torch.int64)
        times = {}
        calls: dict[str, Any] = {
            "torch": lambda: g.fill(images, labels, 5),
            "torch, numbers": lambda: g.fill(images, labels, numbers=numbers),
            "NumPy": lambda: g.fill(*arrays, 5),
        }
        for name, call in calls.items():
            best = 1.0
            for _ in range(30):
                begin = time.perf_counter()
                for _ in range(300):
                    call()
                best = min(best, (time.perf_counter() - begin) / 300)
            times[name] = 1e6 * best
    print("host time per fill():", ", ".join(f"{name} {value:.1f} µs" for name, value in times.items()))
    assert times["torch"] < 10


# ---- Generated images ----


def numbered(**changes: Any) -> fdsl.Generator:
    """Returns a generator of images whose labels equal their numbers, for numbers below 5000."""
    one = small().classes[0]._replace(vertices=1, orbits=1, radius=1)
    classes = [one._replace(id=number) for number in range(5000)]
    return fdsl.Generator(**{"class_list": classes, "res": 2, "batch": 6, "threads": 1, **changes})


def labels_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def batches_of(loader: Any) -> list[tuple[bytes, list[int]]]:
    return [(images.numpy().tobytes(), labels.tolist()) for images, labels in loader]


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_an_epoch_is_a_permutation(prefetch: int) -> None:
    loader = Loader(numbered(), 5, prefetch=prefetch, seed=3)
    assert len(loader) == 5 and isinstance(loader, fdsl.Loader)
    epochs = [labels_of(loader) for _ in range(3)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [6] * 5
        assert sorted(sum(batches, [])) == list(range(30)) != sum(batches, [])
    assert epochs[0] != epochs[1] != epochs[2]
    other = Loader(numbered(), 5, seed=3, prefetch=2)
    assert [labels_of(other) for _ in range(3)] == epochs
    assert labels_of(Loader(numbered(), 5, seed=4)) != epochs[0]
    other.set_epoch(1)
    assert labels_of(other) == epochs[1] and labels_of(other) == epochs[2] and other.epoch == 3


def test_batches_per_epoch_has_a_name() -> None:
    assert labels_of(Loader(numbered(), batches_per_epoch=2)) == labels_of(Loader(numbered(), 2))
    with pytest.raises(TypeError, match="batches_per_epoch"):
        Loader(numbered())
    with pytest.raises(TypeError, match="batch_size"):
        Loader(numbered(), 5, batch_size=2)


def test_the_order_is_that_of_the_program() -> None:
    """scripts/compare/pretrain_order.py computes it independently of the library."""
    path = ROOT / "scripts" / "compare" / "pretrain_order.py"
    if not path.exists():
        pytest.skip("needs the source tree")
    spec = importlib.util.spec_from_file_location("pretrain_order", path)
    assert spec and spec.loader
    order = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(order)
    loader = Loader(numbered(), 5, seed=(3 << 32) + 7)
    for epoch in range(2):
        wanted = order.Order((3 << 32) + 7, epoch, 30)
        assert sum(labels_of(loader), []) == [wanted.at(index) for index in range(30)]


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("kind", ["images", "shards", "folder"])
def test_masks_instead_of_labels(kind: str, pin_memory: bool, masked: pathlib.Path) -> None:
    if pin_memory and REAL and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("PyTorch with CUDA cannot pin memory without a GPU")
    channels = {} if kind == "images" else {"channels": 1}
    loader = Loader(masked_set(masked, kind), 4, shuffle=False, pin_memory=pin_memory, **channels)
    with fdsl.Generator(**MASKED, batch=10) as g:
        wanted = [part.numpy() for part in g.generate(0, 10)]
        taken = list(loader)
        assert [tuple(masks.shape) for _, masks in taken] == [(4, 31, 31), (4, 31, 31), (2, 31, 31)]
        for part in (0, 1):
            assert all("uint8" in str(batch[part].dtype) for batch in taken)
            assert (numpy.concatenate([batch[part].numpy() for batch in taken]) == wanted[part]).all()


@pytest.mark.parametrize("fresh", [True, False])
def test_images_belong_to_labels(fresh: bool) -> None:
    """In epoch e, sample n is image n + e * s, and s is a multiple of the number of classes."""
    config: dict[str, Any] = {"classes": CLASSES, "res": 96, "out_res": 24, "dtype": "float16"}
    step = -(-(1 << 32) // CLASSES) * CLASSES
    if fresh:
        loader = Loader(fdsl.Generator(**config, batch=6, threads=2), 6, seed=1)
    else:
        loader = Loader(fdsl.Images(**config, count=36), 6, seed=1, num_threads=2)
    with fdsl.Generator(**config, batch=36) as g:
        for epoch in range(2):
            first = epoch * step if fresh else 0
            every = g.generate(first, 36)[0].numpy()
            seen = []
            for images, labels in loader:
                assert tuple(images.shape) == (6, *g.shape) and "float16" in str(images.dtype)
                for image, label in zip(images.numpy(), labels.tolist()):
                    (match,) = [n for n in range(36) if (every[n] == image).all()]
                    assert match % CLASSES == label
                    seen.append(match)
            assert sorted(seen) == list(range(36)) != seen


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_generate_the_images_of_one_rank(world_size: int, shuffle: bool) -> None:
    one = Loader(numbered(batch=12), 5, seed=9, shuffle=shuffle)
    ranks = [
        Loader(numbered(batch=12 // world_size), 5, rank, world_size, seed=9, shuffle=shuffle)
        for rank in range(world_size)
    ]
    for _ in range(2):
        alone = labels_of(one)
        parts = [labels_of(rank) for rank in ranks]
        assert [sum((part[step] for part in parts), []) for step in range(5)] == alone


def test_without_shuffle_numbers_ascend() -> None:
    loader = Loader(numbered(), 3, shuffle=False, count=4)
    for _ in range(2):
        assert sum(labels_of(loader), []) == list(range(12))


def test_batches_belong_to_the_caller() -> None:
    batches = list(Loader(numbered(), 5))
    assert len({images.data_ptr() for images, _ in batches}) == 5
    labels = sum((labels.tolist() for _, labels in batches), [])
    assert sorted(labels) == list(range(30))


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("received", [0, 1, 4, 5, 7])
def test_resuming_continues_after_the_last_received_batch(prefetch: int, received: int) -> None:
    whole = Loader(numbered(), 5, seed=2)
    expected = labels_of(whole) + labels_of(whole) + labels_of(whole)
    loader = Loader(numbered(), 5, seed=2, prefetch=prefetch)
    taken = []
    while len(taken) < received:
        for _, labels in loader:
            taken.append(labels.tolist())
            if len(taken) == received:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["epoch"] * 30 + state["sample"] == received * 6
    resumed = Loader(numbered(), 5, seed=2, prefetch=prefetch)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(state["epoch"])  # training loops make this call; it must keep the position
    iter(resumed)  # an iterator that is not used keeps it, too
    rest = []
    for _ in range(resumed.epoch, 3):
        rest += labels_of(resumed)
    assert taken + rest == expected
    parts = [Loader(numbered(), 5, rank, 2, seed=2, count=3) for rank in range(2)]  # on another number of ranks
    for part in parts:
        part.load_state_dict(state)
    both = [sum(pair, []) for pair in zip(*(labels_of(part) for part in parts))]
    assert both == expected[received : received // 5 * 5 + 5]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert labels_of(resumed) == expected[10:]


def test_a_state_belongs_to_a_configuration() -> None:
    config: dict[str, Any] = {"classes": CLASSES, "res": 96, "count": 30}
    with small() as g:
        classes = g.classes
    state = Loader(fdsl.Images(**config), 6).state_dict()
    for same in ({"generator": "naive"}, {"out_res": 96}, {"dtype": "u8"}):
        Loader(fdsl.Images(**{**config, **same}), 6, num_threads=1).load_state_dict(state)
    Loader(fdsl.Images(class_list=classes, res=96, count=30), 6).load_state_dict(state)
    other: list[dict[str, Any]] = [
        {"seed": 1}, {"classes": 6}, {"res": 64}, {"out_res": 24}, {"dtype": "f16"}, {"channels": 3}, {"count": 31},
        {"layout": "nhwc"}, {"formula": "visualatom"}, {"preset": "paper-1000"}, {"fresh": True},
        {"class_list": [one._replace(noise=one.noise + 1) for one in classes], "classes": None},
    ]  # fmt: skip
    for changes in other:
        with pytest.raises(ValueError, match="^state: it"):
            Loader(fdsl.Images(**{**config, **changes}), 6).load_state_dict(state)


def test_wrong_arguments_of_generated_images() -> None:
    g, closed = numbered(), small()
    closed.close()
    for arguments, words, kind, text in (
        ((3, 5), {}, TypeError, "source: it must be a data set, such as fdsl.Folder, .*, not int"),
        ((g, 0), {}, ValueError, "batches_per_epoch: 0 is out of range"),
        ((g, 5, 2, 2), {}, ValueError, "rank: 2 is out of range; it must be 0 to 1"),
        ((g, 5), {"world_size": 0}, ValueError, "world_size: 0 is out of range"),
        ((g, 5), {"seed": -1}, ValueError, "seed: -1 is out of range"),
        ((g, 5), {"prefetch": -1}, ValueError, "prefetch: -1 is out of range"),
        ((g, 5), {"count": 7}, ValueError, "count: 7 is out of range; it must be 1 to 6"),
        ((g, 5), {"shuffle": "no"}, TypeError, "shuffle: it must be a bool, not str"),
        ((g, True), {}, TypeError, "batches_per_epoch: it must be an integer, not bool"),
        ((closed, 5), {}, ValueError, "generator: it is closed"),
        ((g, "5"), {}, TypeError, "batches_per_epoch: it must be an integer, not str"),
        ((g, 10**12), {}, ValueError, "batches_per_epoch: an epoch would have 6000000000000 images"),
        ((fdsl.Images(3, count=9, res=8), 5), {"lanes": 3}, ValueError, "lanes: it has no effect on generated images"),
        ((fdsl.Images(3, count=9, res=8), 5), {"on_error": "mask"}, ValueError, "on_error: it has no effect"),
        ((g, 5), {"dtype": "f16"}, ValueError, "dtype: fdsl.Images decides about the format"),
        ((g, 5), {"transforms": fdsl.Resize(9)}, ValueError, "transforms: fdsl.Images decides about the format"),
        ((g, 5), {"transforms": [fdsl.MixUp(1, 9)]}, ValueError, "transforms: MixUp changes only images of fdsl.Folder"),
        ((g, 5), {"transforms": fdsl.Resize(8)}, ValueError, "transforms: fdsl.Images decides"),
        ((g, 5), {"pin_memory": 1}, TypeError, "pin_memory: it must be a bool, not int"),
        ((g, 5), {"device": "tpu"}, ValueError, "device: 'tpu' is unknown"),
        ((fdsl.Images(3, count=9, res=8), 5, 3), {}, TypeError, "rank: give the arguments after batch_size by name"),
    ):
        with pytest.raises(kind, match=text):
            Loader(*arguments, **words)
    for words, kind, text in (
        ({}, TypeError, "count"),
        ({"count": 0}, ValueError, "count: 0 is out of range"),
        ({"count": 1 << 31}, ValueError, "count: 2147483648 is out of range"),
        ({"count": 5, "fresh": 1}, TypeError, "fresh: it must be a bool"),
        ({"count": 5, "batch": 2}, TypeError, "batch: the Loader decides about this; give it batch_size"),
        ({"count": 5, "device": 0}, TypeError, "device: the Loader decides"),
        ({"count": 5, "tint": 0}, TypeError, "tint: Images has no such argument"),
        ({"count": 5, "classes": 3, "class_list": g.classes}, ValueError, "classes: class_list or class_file gives"),
        ({"count": 5, "res": 0}, ValueError, "res: 0 is out of range"),
        ({"count": 5, "formula": "x"}, ValueError, "formula: 'x' is unknown"),
        ({"count": 5, "mean": 0.5}, ValueError, "mean, std: "),
    ):
        with pytest.raises(kind, match=text):
            fdsl.Images(**words)
    with pytest.raises(ValueError, match="epoch: -1 is out of range"):
        Loader(g, 5).set_epoch(-1)


@pytest.mark.parametrize("end", ["", "raise SystemExit", "del g", "import threading; sys.l = loader", "1 / 0"])
def test_exit_during_an_epoch(end: str) -> None:
    imports = "import fdsl.torch" if REAL else "import fake_torch; fake_torch.install()"
    code = f"""
import sys, fdsl
{imports}
g = fdsl.Generator(5, res=64, batch=8)
loader = fdsl.torch.Loader(g, 1000000 // 8)
iterator = iter(loader)
batch = next(iterator)
other = iter(fdsl.torch.Loader(g, 100, prefetch=50)); next(other)
{end}
"""
    for _ in range(2):
        done = run_python(code)
        assert (done.returncode == 0) == (end != "1 / 0")
        assert done.stderr == "" or (end == "1 / 0" and done.stderr.count("Error") == 1), done.stderr


def test_leaving_epochs_keeps_threads_and_memory_flat() -> None:
    loader = Loader(small(out_res=96, batch=16, res=16), 50)
    count = before = 0
    for turn in range(1000):
        for images, labels in loader:
            break
        if turn == 300:
            gc.collect()
            count, before = tasks(), resident_bytes()
    gc.collect()
    assert tasks() == count and resident_bytes() - before < 8 << 20  # 700 lost batches would have 98 MiB
    loader.close()
    del images, labels
    gc.collect()
    small().generate()  # frees the memory of tensors that have ended
    assert tasks() < count


@real
def test_global_settings_do_not_matter() -> None:
    expected = labels_of(Loader(numbered(), 5))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert labels_of(Loader(numbered(), 5)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


# ---- Data sets ----

CROP = fdsl.RandomResizedCrop(20, flip=True)
SMALL: dict[str, Any] = {"seed": 9, "lanes": 3, "shuffle_buffer": 60, "transforms": CROP, "num_threads": 2}


@pytest.mark.parametrize("name", DTYPES)
def test_data_sets_are_tensors_without_a_copy(name: str, digits: pathlib.Path) -> None:
    if DTYPES[name] is None:
        pytest.skip("the stand-in has no bfloat16")
    words: dict[str, Any] = {**SMALL, "dtype": DTYPES[name]}
    loader = Loader(fdsl.Folder(digits / "f"), 16, **words)
    assert isinstance(loader, Loader) and len(loader) == 8
    plain = fdsl.Loader(fdsl.Shards(digits / "m"), 16, **{**words, "num_threads": 1})
    kept = list(loader)
    for (images, labels), (array, numbers) in zip(kept, plain):
        assert images.dtype is DTYPES[name] and images.data_ptr() % 64 == 0
        raw = images.contiguous().view(torch.uint8) if REAL else images
        assert raw.numpy().tobytes() == content(array)
        assert labels.tolist() == numbers.tolist()
    own = (kept[0][0].contiguous().view(torch.uint8) if REAL else kept[0][0]).numpy()  # NumPy has no bfloat16
    assert own.flags.writeable or not REAL  # the stand-in uses from_dlpack() of NumPy, which NumPy 1 makes read-only
    if own.flags.writeable:
        own[...] = 0
    loader.close()
    assert loader.epoch == 1 and tuple(kept[7][0].shape) == (8, 3, 20, 20)


def test_a_rank_may_have_no_image_in_the_last_batch(digits: pathlib.Path) -> None:
    for rank in range(5):
        batches = list(Loader(fdsl.Folder(digits / "f"), 13, rank=rank, world_size=9, **SMALL))  # 120 = 117 + 3
        assert [tuple(images.shape) for images, _ in batches] == [(13, 3, 20, 20), (1 if rank < 3 else 0, 3, 20, 20)]
        assert all(type(part) is torch.Tensor for batch in batches for part in batch)


def test_pinned_memory(digits: pathlib.Path) -> None:
    if REAL and not torch.cuda.is_available():
        pytest.skip("PyTorch pins memory only with CUDA")
    source = fdsl.Folder(digits / "f")
    loader = Loader(source, 16, pin_memory=True, **SMALL)
    assert all(images.is_pinned() and labels.is_pinned() for images, labels in loader)
    loader.set_epoch(0)
    assert batches_of(loader) == batches_of(Loader(source, 16, **SMALL))
    assert "pin_memory=True" in repr(loader) and "pin_memory=True" in repr(pickle.loads(pickle.dumps(loader)))


def test_a_ctrl_c_loses_no_batch(digits: pathlib.Path) -> None:
    """The interrupts come after the library has filled the tensors, and before Python knows of it."""
    words = {**SMALL, "pin_memory": not REAL or torch.cuda.is_available()}
    loader, wanted = Loader(fdsl.Folder(digits / "f"), 16, **words), batches_of(Loader(fdsl.Folder(digits / "f"), 16, **words))
    wait = loader._stream._await

    def interrupted(*arguments: Any) -> int:
        wait(*arguments)
        raise KeyboardInterrupt

    for _ in range(8):
        loader._stream._await = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        loader._stream._await = wait
    state = loader.state_dict()
    assert state["epoch"] == state["sample"] == 0 and batches_of(loader) == wanted


def test_labels_of_masked_samples(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = broken_digits(digits, tmp_path)
    words = {"shuffle": False, "on_error": "mask", "transforms": fdsl.Resize(20)}
    for pinned in [False] if REAL and not torch.cuda.is_available() else [False, True]:
        loader = Loader(fdsl.Folder(tmp_path / "f"), 16, pin_memory=pinned, **words)
        with pytest.warns(RuntimeWarning, match=name):
            labels = labels_of(loader)
        assert [(step, i) for step, one in enumerate(labels) for i, label in enumerate(one) if label < 0] == [(3, 2)]
        assert labels[3][2] == -100


def test_a_pickled_loader_continues(digits: pathlib.Path) -> None:
    loader = Loader(fdsl.Folder(digits / "f"), 16, **SMALL)
    expected = batches_of(loader)
    state = loader.state_dict()
    other = pickle.loads(pickle.dumps(loader))
    assert other.epoch == 1 and other.state_dict() == state and repr(other) == repr(loader)
    other.set_epoch(0)
    assert batches_of(other) == expected


def spawned(loader: Any, pipe: Any) -> None:
    pipe.send(labels_of(loader))


@real
def test_a_spawned_process_opens_the_loader_again() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    loader = Loader(numbered(), 5, seed=4)
    worker = context.Process(target=spawned, args=(loader, there))
    worker.start()
    assert here.poll(120) and here.recv() == labels_of(loader)
    worker.join()


# ---- PyTorch's DataLoader ----


def test_workers_of_a_dataloader_are_refused(digits: pathlib.Path, monkeypatch: Any) -> None:
    """Each worker would deliver all samples again."""
    loader = Loader(fdsl.Folder(digits / "f"), 16, **SMALL)
    worker: list[Any] = [None]
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda: worker[0]))
    assert len(list(loader)) == 8
    worker[0] = SimpleNamespace(id=0)
    for one in (loader, fdsl.Loader(fdsl.Folder(digits / "f"), 16, **SMALL)):
        with pytest.raises(fdsl.Error, match="each worker of torch.utils.data.DataLoader would deliver all samples again"):
            iter(one)


@real
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_error_in_a_worker_names_the_remedy(method: str) -> None:
    data = Samples(Loader(numbered(), 5))
    workers = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=method)
    with pytest.raises(RuntimeError, match="(?s)iterate over the loader itself, without torch.utils.data.DataLoader"):
        next(iter(workers))
    assert len(list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=0))) == 5


class Samples(torch.utils.data.IterableDataset if REAL else object):  # type: ignore[misc]
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


def test_a_forked_process_is_refused() -> None:
    for _ in range(20):  # the threads may be at any point when the process forks
        iterator = iter(Loader(numbered(), 5))
        next(iterator)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                next(iterator)
                os._exit(1)
            except RuntimeError as error:
                del iterator
                gc.collect()
                os._exit(0 if "iterate over the loader itself" in str(error) else 2)
        assert os.waitpid(child, 0)[1] == 0


def test_a_loader_is_no_data_set() -> None:
    loader = Loader(numbered(), 5)
    text = "Loader: it is not a data set; iterate over the Loader itself, without torch.utils.data.DataLoader"
    with pytest.raises(TypeError, match=text):
        loader[0]
    if REAL:
        with pytest.raises(TypeError, match=text):
            next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))


# ---- A simulated CUDA device ----


@pytest.fixture
def library(monkeypatch: Any) -> Any:
    monkeypatch.setattr(_stream, "lib", torch.Library(_stream.lib))
    torch.default.work.clear()
    return _stream.lib


@stand_in
def test_batches_on_cuda_come_on_the_current_stream(library: Any, digits: pathlib.Path) -> None:
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(Loader(source, 16, **SMALL))
    loader = Loader(source, 16, device="cuda", **SMALL)
    assert loader.device == "cuda:0" and len(loader) == 8
    for images, labels in loader:
        break  # an epoch that is left begins again
    torch.default.synchronize()
    stream, kept = torch.Stream(), []
    for step, (images, labels) in enumerate(loader):
        kept.append((images, labels))
        assert images.where == labels.where == "cuda:0"
        assert loader.state_dict()["sample"] == (step + 1) * 16 % 128
        if step == 3:
            iterator_stream = torch.cuda.stream(stream)
            iterator_stream.__enter__()
    iterator_stream.__exit__(None, None, None)
    assert library.fills == [torch.default.cuda_stream] * 5 + [stream.cuda_stream] * 5
    assert (kept[0][0].numpy() == 99).all()  # the host did not wait
    torch.default.synchronize()
    stream.synchronize()
    assert [(images.numpy().tobytes(), labels.tolist()) for images, labels in kept] == wanted
    assert kept[7][0].shape == (8, 3, 20, 20)
    again = pickle.loads(pickle.dumps(loader))
    assert again.device == "cuda:0" and again.epoch == 1


@stand_in
def test_labels_of_masked_samples_on_cuda(library: Any, digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    broken_digits(digits, tmp_path)
    words = {"shuffle": False, "on_error": "mask", "transforms": fdsl.Resize(20), "device": "cuda:0"}
    with pytest.warns(RuntimeWarning) as warned:
        kept = [labels for _, labels in Loader(fdsl.Folder(tmp_path / "f"), 16, **words)]
    assert [pathlib.Path(one.filename).name for one in warned] == ["test_torch.py"]
    torch.default.synchronize()
    assert kept[3].tolist()[2] == -100 and sum(labels.tolist().count(-100) for labels in kept) == 1


class Recorder(torch.Library if not REAL else object):  # type: ignore[misc]
    def __init__(self, lib: Any) -> None:
        super().__init__(lib)
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("fdsl_") and name != "fdsl_stream_begin":
            self.names.append(name)
        return super().__getattribute__(name)


@stand_in
def test_a_batch_on_cuda_takes_one_call(monkeypatch: Any) -> None:
    """Neither other calls of the library nor of the system may be necessary."""
    library = Recorder(_stream.lib)
    monkeypatch.setattr(_stream, "lib", library)
    loader = Loader(numbered(), 5, device="cuda:0", num_threads=1)
    iterator = iter(loader)
    next(iterator)
    library.names.clear()
    monkeypatch.setattr(library, "fdsl_stream_fill", lambda handle, images, labels, count, stream: setattr(count, "value", 4) or 0)
    library.names.clear()
    monkeypatch.setattr(os, "getpid", None)
    assert [images.shape for images, _ in (next(iterator), next(iterator))] == [(4, 1, 2, 2)] * 2
    assert library.names == ["fdsl_stream_fill"] * 2


@stand_in
def test_generated_images_on_cuda(library: Any) -> None:
    loader = Loader(numbered(), 5, seed=3, device="cuda:0", num_threads=1)
    kept = [labels for _, labels in loader]
    torch.default.synchronize()
    assert [labels.tolist() for labels in kept] == labels_of(Loader(numbered(), 5, seed=3))


@stand_in
def test_pinned_memory_is_for_the_cpu(library: Any) -> None:
    with pytest.raises(ValueError, match="pin_memory: the tensors are on cuda:0"):
        Loader(numbered(), 5, device="cuda:0", pin_memory=True)


def test_doctests() -> None:
    if not REAL:
        pytest.skip("needs PyTorch")
    code = "import doctest, fdsl.torch; print(doctest.testmod(fdsl.torch))"
    assert "failed=0, attempted=3" in run_python(code).stdout


@real
@pytest.mark.parametrize("prepared", [False, True])
def test_the_segmentation_example_learns(prepared: bool, tmp_path: pathlib.Path) -> None:
    words = "--size 64 --steps 60 --every 20 --batch 4 --width 8"
    if prepared:
        run_example("segmentation.py", f"--write-classes {tmp_path}/shapes.csv")
        for seed, (name, samples) in enumerate({"train": 120, "test": 64}.items(), 1):
            options = f"--from synth --class {tmp_path}/shapes.csv --formula segrcdb --res 64 --samples {samples} --seed {seed}"
            subprocess.run([PROGRAM, "--prepare", str(tmp_path / name), *options.split()], check=True)
        words += f" --data {tmp_path}/train --test-data {tmp_path}/test"
    done = run_example("segmentation.py", words)
    lines = re.findall(r"^step (\d+): loss ([\d.]+), mean IoU ([\d.]+)", done, re.M)
    assert [int(step) for step, _, _ in lines] == [20, 40, 60], done
    losses = [float(loss) for _, loss, _ in lines]
    before = float(re.findall(r"^untrained: mean IoU ([\d.]+)", done, re.M)[0])
    assert losses[2] < losses[1] < losses[0] and float(lines[2][2]) > before, done


def run_example(name: str, words: str) -> str:
    """Runs a program of docs/examples with this package, and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(fdsl.__file__).parents[1])}
    command = [sys.executable, str(ROOT / "docs" / "examples" / name), *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
