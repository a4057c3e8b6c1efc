"""Tests PyTorch: tensors as destinations, DLPack, and the Loader on the CPU."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
from conftest import CLASSES, content, resident_bytes, run_python, small

import fdsl

torch = pytest.importorskip("torch", minversion="2.1", reason="PyTorch 2.1 or newer is not installed")
import fdsl.torch  # noqa: E402
from fdsl.torch import Loader  # noqa: E402

DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


# ---- Tensors ----


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


def test_a_tensor_that_dies_in_a_failing_call_keeps_its_exception() -> None:
    """If the deleter were Python code, the exception would become a SystemError."""
    with small(out_res=24) as g:
        images, _ = g.generate(0, 8)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shape"):
            torch.from_dlpack(images).reshape(3)
        with pytest.raises(TypeError):
            torch.add(torch.from_dlpack(images), "x")


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


def test_autograd_detects_overwritten_images() -> None:
    with small(out_res=24, dtype="float32") as g:
        images = torch.empty((4, *g.shape))
        g.fill(images)
        weight = torch.ones((), requires_grad=True)
        loss = (images * weight).sum()
        g.fill(images, first=4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


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


# ---- Loader ----


def numbered(**changes: Any) -> fdsl.Generator:
    """Returns a generator of images whose labels equal their numbers, for numbers below 5000."""
    one = small().classes[0]._replace(vertices=1, orbits=1, radius=1)
    classes = [one._replace(id=number) for number in range(5000)]
    return fdsl.Generator(**{"class_list": classes, "res": 2, "batch": 6, "threads": 1, **changes})


def labels_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def threads() -> int:
    return sum(thread.name == "fdsl.torch.Loader" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    gc.collect()
    assert threads() == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_an_epoch_is_a_permutation(prefetch: int) -> None:
    loader = Loader(numbered(), 5, prefetch=prefetch, seed=3)
    assert len(loader) == 5
    epochs = [labels_of(loader) for _ in range(3)]
    for epoch, batches in enumerate(epochs):
        assert [len(batch) for batch in batches] == [6] * 5
        assert sorted(sum(batches, [])) == list(range(30 * epoch, 30 * epoch + 30))
        assert sum(batches, []) != list(range(30 * epoch, 30 * epoch + 30))
    assert [label - 30 for label in sum(epochs[1], [])] != sum(epochs[0], [])
    other = Loader(numbered(), 5, seed=3, prefetch=2)
    assert [labels_of(other) for _ in range(3)] == epochs
    assert labels_of(Loader(numbered(), 5, seed=4)) != epochs[0]
    other.set_epoch(1)
    assert labels_of(other) == epochs[1] and labels_of(other) == epochs[2] and other.epoch == 3


def test_images_belong_to_labels() -> None:
    with small(out_res=24, dtype="f16", batch=6) as g:
        every = torch.from_dlpack(small(out_res=24, dtype="f16", batch=36).generate(36, 36)[0])
        loader = Loader(g, 6, seed=1)
        loader.set_epoch(1)
        seen = []
        for images, labels in loader:
            assert images.shape == (6, *g.shape) and images.dtype is torch.float16 and labels.dtype is torch.int64
            for image, label in zip(images, labels):
                matches = [n for n in range(36) if torch.equal(every[n], image)]
                assert len(matches) == 1 and (36 + matches[0]) % CLASSES == label
                seen += matches
        assert sorted(seen) == list(range(36))


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
    for epoch in range(2):
        assert sum(labels_of(loader), []) == list(range(12 * epoch, 12 * epoch + 12))


def test_batches_belong_to_the_caller() -> None:
    batches = list(Loader(numbered(), 5))
    assert len({images.data_ptr() for images, _ in batches}) == 5
    labels = sum((labels.tolist() for _, labels in batches), [])
    assert sorted(labels) == list(range(30))


def test_an_iterator_that_is_not_used_keeps_the_loaded_position() -> None:
    loader = Loader(small(), 6, seed=5)
    every = [labels.tolist() for _, labels in loader]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 4})
    iter(loader)
    assert [labels.tolist() for _, labels in loader] == every[4:]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
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
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert state["epoch"] * 5 + state["step"] == received
    resumed = Loader(numbered(), 5, seed=2, prefetch=prefetch)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(state["epoch"])  # training loops make this call; it must keep the position
    rest = []
    for _ in range(resumed.epoch, 3):
        rest += labels_of(resumed)
    assert taken + rest == expected
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert labels_of(resumed) == expected[10:]


def test_an_abandoned_epoch_starts_again() -> None:
    loader = Loader(numbered(), 5)
    first = next(iter(loader))[1].tolist()
    batches = labels_of(loader)
    assert batches[0] == first and len(batches) == 5 and loader.epoch == 1


def test_wrong_states() -> None:
    loader = Loader(numbered(), 5, seed=2)
    good = loader.state_dict()
    assert good == {
        "images": loader._images,
        "epoch": 0,
        "step": 0,
        "seed": 2,
        "batches_per_epoch": 5,
        "world_size": 1,
        "batch": 6,
        "shuffle": True,
    }
    for name, value in (("seed", 3), ("batches_per_epoch", 4), ("world_size", 2), ("batch", 5), ("shuffle", False)):
        with pytest.raises(ValueError, match=f"state_dict: its {name} is {value}, but that of this loader is"):
            loader.load_state_dict({**good, name: value})
    with pytest.raises(ValueError, match="state_dict: step: 5 is out of range"):
        loader.load_state_dict({**good, "step": 5})
    with pytest.raises(ValueError, match="state_dict: it has no 'seed'"):
        loader.load_state_dict({})
    for wrong in (None, [], "x"):
        with pytest.raises(TypeError, match="state_dict: it must be a dict, not"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]


def test_a_state_belongs_to_a_configuration() -> None:
    state = Loader(small(batch=6), 5).state_dict()
    for same in (
        {"threads": 1},
        {"batch": 8},
        {"generator": "naive"},
        {"class_list": small().classes},
        {"out_res": 96},
    ):
        Loader(small(**{"batch": 6, **same}), 5, count=6).load_state_dict(state)
    other: list[dict[str, Any]] = [
        {"seed": 1}, {"classes": 6}, {"res": 64}, {"out_res": 24}, {"dtype": "f16"}, {"channels": 3},
        {"layout": "nhwc"}, {"formula": "visualatom"}, {"preset": "paper-1000"}, {"fit": "crop"},
        {"class_list": [one._replace(noise=one.noise + 1) for one in small().classes]},
    ]  # fmt: skip
    for changes in other:
        with pytest.raises(ValueError, match="state_dict: it belongs to a generator of other images; open one with the same"):
            Loader(small(**{"batch": 6, **changes}), 5).load_state_dict(state)


def test_a_loader_is_no_data_set() -> None:
    loader = Loader(numbered(), 5)
    text = (
        "fdsl.torch.Loader: it is not a data set; iterate over the Loader itself, without torch.utils.data.DataLoader"
    )
    with pytest.raises(TypeError, match=text):
        loader[0]
    with pytest.raises(TypeError, match=text):
        next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))


def test_wrong_arguments() -> None:
    g, closed = numbered(), small()
    closed.close()
    for arguments, words, kind, text in (
        ((3, 5), {}, TypeError, "generator: it must be an fdsl.Generator, not int"),
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
        ((g, 10**12), {}, ValueError, "batches_per_epoch: to shuffle 6000000000000 images .* 44,703 GiB .* shuffle=False"),
        ((g, 1 << 40, 0, 1 << 24), {}, ValueError, "batches_per_epoch: to shuffle "),
    ):
        with pytest.raises(kind, match=text):
            Loader(*arguments, **words)
    with pytest.raises(ValueError, match="epoch: -1 is out of range"):
        Loader(g, 5).set_epoch(-1)
    late = Loader(g, 1 << 40, shuffle=False)
    late.set_epoch(1 << 39)
    with pytest.raises(ValueError, match="epoch: .* exceed 2\\^63"):
        next(iter(late))
    g._config["generator"] = "bat"  # cannot be opened here
    with pytest.raises(ValueError, match="shuffle: generator 'bat' generates only consecutive images; set shuffle"):
        Loader(g, 5)
    assert len(Loader(g, 5, shuffle=False)) == 5


# ---- The thread ----


def test_the_thread_ends_on_break_and_on_exceptions() -> None:
    loader = Loader(numbered(), 1000, prefetch=3)
    for _ in loader:
        assert threads() == 1
        break
    assert threads() == 0
    try:
        for _ in loader:
            raise KeyError
    except KeyError:
        pass
    gc.collect()
    assert threads() == 0
    iterator = iter(loader)
    next(iterator)
    assert threads() == 1
    del iterator
    assert threads() == 0
    iterator = iter(loader)
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    assert threads() == 0


def test_the_thread_runs_ahead_by_prefetch(monkeypatch: Any) -> None:
    g = numbered()
    made: list[int] = []
    fill = g.fill

    def count(*arguments: Any, **words: Any) -> None:
        made.append(1)
        fill(*arguments, **words)

    monkeypatch.setattr(fdsl.Generator, "fill", staticmethod(count))
    iterator = iter(Loader(g, 100, prefetch=3))
    for received in range(1, 10):
        next(iterator)
        deadline = time.monotonic() + 10
        while len(made) < received + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(made) == received + 3


def test_errors_of_the_thread_reach_the_caller() -> None:
    g = numbered()
    iterator = iter(Loader(g, 100, prefetch=2))
    next(iterator)
    g.close()
    with pytest.raises(ValueError, match="generator: it is closed"):
        for _ in range(5):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("end", ["", "raise SystemExit", "del g", "import threading; sys.l = loader", "1 / 0"])
def test_exit_during_an_epoch(end: str) -> None:
    code = f"""
import sys, fdsl, fdsl.torch
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


def test_the_error_in_a_forked_worker_names_the_remedy() -> None:
    class Images(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Any:
            return iter(self.loader)

    data = Images(Loader(numbered(), 5))
    workers = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="(?s)before fork.*iterate over the Loader itself.*open the generator"):
        next(iter(workers))
    assert len(list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=0))) == 5
    for _ in range(40):  # the thread may be at any point when the process forks
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
                os._exit(0 if "iterate over the Loader itself" in str(error) else 2)
        assert os.waitpid(child, 0)[1] == 0


def spawned(loader: Any, pipe: Any) -> None:
    pipe.send(labels_of(loader))


def test_a_loader_can_be_pickled() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    loader = Loader(numbered(), 5, seed=4)
    worker = context.Process(target=spawned, args=(loader, there))
    worker.start()
    assert here.poll(120) and here.recv() == labels_of(loader)
    worker.join()


def test_memory_stays_flat() -> None:
    loader = Loader(small(out_res=96, batch=16, res=16), 50)
    before = 0
    for epoch in range(12):
        for images, _ in loader:
            pass
        if epoch == 3:
            before = resident_bytes()
    assert resident_bytes() - before < 4 << 20


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


@pytest.mark.parametrize("name", DTYPES)
def test_data_sets_are_tensors_without_a_copy(name: str, digits: Any) -> None:
    crop = fdsl.RandomResizedCrop(20, flip=True)
    words: dict[str, Any] = {"seed": 9, "transforms": crop, "dtype": DTYPES[name]}
    loader = Loader(fdsl.Folder(digits / "f"), 16, **words)
    assert isinstance(loader, Loader) and len(loader) == 8
    plain = fdsl.Loader(fdsl.Shards(digits / "m"), 16, **{**words, "num_threads": 1})
    kept = list(loader)
    for (images, labels), (array, numbers) in zip(kept, plain):
        assert images.dtype is DTYPES[name] and labels.dtype is torch.int64 and images.data_ptr() % 64 == 0
        assert bytes(images.contiguous().view(torch.uint8).numpy().data) == content(array)
        assert labels.tolist() == numbers.tolist()
    kept[0][0].zero_()  # the caller's own memory
    loader.close()
    assert loader.epoch == 1 and kept[7][0].shape == (8, 3, 20, 20)


def test_workers_of_pytorch_open_data_sets_again(digits: Any) -> None:
    loader = Loader(fdsl.Folder(digits / "f"), 16, seed=9, transforms=fdsl.Resize(20))
    expected = labels_of(loader)
    state = loader.state_dict()
    other = pickle.loads(pickle.dumps(loader))
    other.set_epoch(0)
    assert labels_of(other) == expected
    other.load_state_dict(state)
    assert other.epoch == 1


def test_doctests() -> None:
    code = "import doctest, fdsl.torch; print(doctest.testmod(fdsl.torch))"
    assert "failed=0, attempted=3" in run_python(code).stdout
