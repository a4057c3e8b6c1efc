"""Tests loaders on a GPU: batches of data sets and of generated images, for NumPy, PyTorch, CuPy and JAX. NumPy is enough
for the first parts; those of PyTorch, CuPy and JAX run if the package is installed and has CUDA.

    make all lib && python3 -m pytest -s python/tests/test_gpu_loader.py
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import threading
import time
from typing import Any

import pytest
from conftest import DIGITS, ORDERS, PROGRAM, broken_digits, masked_set, resident_bytes, run_python, small
from test_gpu import busy, free_bytes, gpu, with_torch

import fdsl

numpy = pytest.importorskip("numpy")

CROP = fdsl.RandomResizedCrop(64, flip=True)
SCALED = CROP._replace(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SMALL: dict[str, Any] = {"seed": 9, "lanes": 3, "shuffle_buffer": 60, "num_threads": 2}
PHOTOS = 600
BOUNDS = {"cpu": 0, "hardware": 1, "hybrid": 3}  # of bytes; docs/stream.md


@pytest.fixture(scope="session")
def photos(tmp_path_factory: Any) -> pathlib.Path:
    """A folder with 600 JPEG files in class folders (f), and the same as shards (m). In colour, if Pillow is installed."""
    path: pathlib.Path = tmp_path_factory.mktemp("photos")
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    commands = [f"--prepare {path}/m --from dataset --source {path}/f --shards 3 --name s"]
    try:
        from PIL import Image
    except ImportError:
        words = f"--classes 10 --samples {PHOTOS} --res 320 --encode jpeg --store imagefolder"
        commands.insert(0, f"--prepare {path}/f --from synth --formula visualatom {words}")
    else:
        draw = numpy.random.default_rng(1)
        for number in range(PHOTOS):
            (path / "f" / str(number % 10)).mkdir(parents=True, exist_ok=True)
            small_image = Image.fromarray(draw.integers(0, 256, (20, 30, 3), "uint8"))
            size = 320 + 16 * (number % 7), 240 + 8 * (number % 9)
            small_image.resize(size, Image.Resampling.BICUBIC).save(path / "f" / str(number % 10) / f"{number:04}.jpg", quality=90)
    for words in commands:
        done = subprocess.run([PROGRAM, *words.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return path


def batches_of(loader: Any) -> list[tuple[Any, list[int]]]:
    """Returns copies of the batches in host memory."""
    return [(images.numpy().copy(), labels.tolist()) for images, labels in loader]


def same(found: list[tuple[Any, list[int]]], wanted: list[tuple[Any, list[int]]]) -> bool:
    return len(found) == len(wanted) and all(
        numbers == labels and images.shape == pixels.shape and (images == pixels).all()
        for (images, numbers), (pixels, labels) in zip(found, wanted)
    )


# ---- Arrays: NumPy is enough ----


@pytest.mark.parametrize(
    ("dtype", "layout"), itertools.product(("uint8", "float16", "bfloat16", "float32"), ("nchw", "nhwc"))
)
def test_batches_have_the_bits_of_the_cpu(digits: pathlib.Path, dtype: str, layout: str) -> None:
    words = {**SMALL, "dtype": dtype, "layout": layout, "transforms": CROP if dtype == "uint8" else SCALED}
    source = fdsl.Folder(digits / "f")
    cpu = fdsl.Loader(source, 16, **words)
    loader = fdsl.Loader(source, 16, device="cuda:0", decoder="cpu", **words)
    assert (loader.device, loader.shape, loader.dtype, len(loader)) == ("cuda:0", cpu.shape, cpu.dtype, 8)
    for _ in range(2):
        assert same(batches_of(loader), batches_of(cpu))
    for images, labels in loader:
        assert images.device == labels.device == "cuda:0" and images.__dlpack_device__() == (2, 0)
        assert images.ptr % 256 == 0 and not hasattr(images, "__array_interface__")
        break
    assert loader.epoch == 2 and loader.state_dict() == {**cpu.state_dict(), "sample": 16}


@pytest.mark.parametrize("decoder", ["auto", "cpu", "hardware", "hybrid"])
def test_decoders_differ_by_no_more_than_their_bound(photos: pathlib.Path, decoder: str) -> None:
    words: dict[str, Any] = {**SMALL, "transforms": fdsl.RandomResizedCrop(96)}
    for share in (None, 1.0) if decoder != "cpu" else (None,):
        try:
            loader = fdsl.Loader(fdsl.Folder(photos / "f"), 64, device=0, decoder=decoder, device_share=share, **words)
        except fdsl.Unavailable as error:
            assert decoder in ("hardware", "hybrid")
            pytest.skip(str(error))
        twin = fdsl.Loader(fdsl.Shards(photos / "m"), 64, device=0, decoder=decoder, device_share=share, **words)
        found, again = batches_of(loader), batches_of(twin)
        assert same(again, found), "class folders and shards"
        if decoder == "cpu":
            reference = fdsl.Loader(fdsl.Folder(photos / "f"), 64, **words)
        else:  # with a share, CPU threads decode at full size, as the GPU does; here, they decode all files
            reference = fdsl.Loader(fdsl.Folder(photos / "f"), 64, device=0, decoder=decoder, device_share=1e-9, **words)
        most = mean = 0.0
        for (images, labels), (pixels, numbers) in zip(found, batches_of(reference)):
            difference = numpy.abs(images.astype(int) - pixels.astype(int))
            most, mean = max(most, difference.max()), mean + difference.mean() / len(reference)
            assert labels == numbers
        print(f"\ndecoder {decoder}, share {share}: bytes differ by at most {most}, by {mean:.4f} in the mean")
        assert most <= BOUNDS.get(decoder, 3)


@pytest.mark.parametrize("crop", [CROP, SCALED, fdsl.Resize(20)])
def test_samples_on_the_gpu_do_not_change_the_batches(digits: pathlib.Path, crop: Any) -> None:
    words: dict[str, Any] = {**SMALL, "device": 0, "decoder": "cpu", "transforms": crop}
    words["dtype"] = "float16" if crop == SCALED else "uint8"
    with fdsl.Loader(fdsl.Folder(digits / "f"), 16, **words) as first:
        wanted = [batches_of(first) for _ in range(3)]
        read = first.stats()["bytes"]
    kept = []
    for size in (1, "40K", "4M"):
        with fdsl.Loader(fdsl.Folder(digits / "f"), 16, resident_device_bytes=size, **words) as loader:
            assert all(same(batches_of(loader), batches) for batches in wanted)
            stats = loader.stats()
            kept.append(stats["resident_device_samples"])
            # With few resident samples, batches that are read ahead decide which run reads more.
            assert stats["bytes"] < read or size != "4M"
            assert f"resident_device_bytes={size!r}" in repr(loader)
    assert kept[0] == 0 < kept[1] < kept[2] == DIGITS


def test_randaugment_is_that_of_the_cpu(photos: pathlib.Path) -> None:
    words: dict[str, Any] = {**SMALL, "transforms": [SCALED, fdsl.RandAugment(2, 20)], "dtype": "float16"}
    source = fdsl.Folder(photos / "f")
    assert same(batches_of(fdsl.Loader(source, 64, device=0, **words)), batches_of(fdsl.Loader(source, 64, **words)))
    with pytest.raises(ValueError, match="decoder: 'hybrid' excludes rand_augment"):
        fdsl.Loader(source, 64, device=0, decoder="hybrid", **words)


def test_colours_and_blur_are_those_of_the_cpu(photos: pathlib.Path) -> None:
    source = fdsl.Folder(photos / "f")
    changes = [fdsl.ColorJitter(0.4, 0.4, 0.4, 0.1, 0.8), fdsl.RandomGrayscale(0.2)]
    for dtype, layout, more in (
        ("uint8", "nchw", []),
        ("uint8", "nhwc", [fdsl.GaussianBlur(23, p=0.5)]),
        ("float16", "nchw", [fdsl.GaussianBlur(5, p=0.5)]),
        ("float32", "nhwc", [fdsl.RandomErasing(0.5)]),
    ):
        crop = CROP if dtype == "uint8" else SCALED
        words: dict[str, Any] = {**SMALL, "transforms": [crop, *changes, *more], "dtype": dtype, "layout": layout, "decoder": "cpu"}
        wanted = batches_of(fdsl.Loader(source, 64, **words))
        assert not same(wanted, batches_of(fdsl.Loader(source, 64, **{**words, "transforms": [crop]})))
        for kept in (None, "4M"):
            assert same(batches_of(fdsl.Loader(source, 64, device=0, resident_device_bytes=kept, **words)), wanted)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
def test_clips_are_those_of_the_cpu(clips: pathlib.Path, dtype: str) -> None:
    source, gray = fdsl.Shards(clips / "c"), fdsl.Loader(fdsl.Shards(clips / "c"), 4).shape[0] == 1
    colours = fdsl.ColorJitter(0.4, 0.4, p=0.8) if gray else fdsl.ColorJitter(0.4, 0.4, 0.4, 0.1, 0.8)
    erasing = [] if dtype == "uint8" else [fdsl.RandomErasing(0.5)]
    for axes in ORDERS:
        for transforms in [], [colours], [fdsl.RandomResizedCrop(12, flip=True), colours, fdsl.GaussianBlur(5, p=0.5), *erasing]:
            words: dict[str, Any] = {"seed": 3, "axes": axes, "transforms": transforms, "dtype": dtype, "channels": 1 if gray else 3}
            wanted = batches_of(fdsl.Loader(source, 7, **words))
            assert same(batches_of(fdsl.Loader(source, 7, device=0, **words)), wanted), (axes, transforms)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_erasing_and_mixtures_are_those_of_the_cpu(photos: pathlib.Path, dtype: str, ranks: int) -> None:
    source = fdsl.Folder(photos / "f")
    erasing = [] if dtype == "uint8" else [fdsl.RandomErasing(0.5)]
    crop = SCALED if erasing else SCALED._replace(mean=None, std=None)
    for mixing in ([], [fdsl.MixUp(0.8)], [fdsl.CutMix()], [fdsl.MixUp(0.8), fdsl.CutMix()]):
        words: dict[str, Any] = {**SMALL, "transforms": [crop, *erasing, *mixing], "dtype": dtype, "decoder": "cpu"}
        for rank in range(ranks):
            words.update(rank=rank, world_size=ranks)
            on_device = fdsl.Loader(source, 32, device=0, **words)
            count = 0
            for (images, targets), (pixels, rows) in zip(on_device, fdsl.Loader(source, 32, **words)):
                assert images.tolist() == pixels.tolist() and targets.tolist() == rows.tolist()
                count += 1
            assert count == len(on_device)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_generated_images_have_the_bits_of_the_cpu(shuffle: bool, fresh: bool) -> None:
    data = fdsl.Images(7, count=100, fresh=fresh, res=96, out_res=48, dtype="float16", mean=0.5, std=0.25, channels=3)
    words: dict[str, Any] = {"seed": 4, "shuffle": shuffle, "num_threads": 2}
    cpu, loader = fdsl.Loader(data, 32, **words), fdsl.Loader(data, 32, device=0, prefetch=4, **words)
    for _ in range(2):
        assert same(batches_of(loader), batches_of(cpu))
    parts = [fdsl.Loader(data, 16, rank=rank, world_size=2, device=0, **words) for rank in range(2)]
    cpu.set_epoch(0)
    for pair, (pixels, labels) in zip(zip(*parts), cpu):
        both = numpy.concatenate([images.numpy() for images, _ in pair])
        assert (both == pixels.numpy()).all() and sum((own.tolist() for _, own in pair), []) == labels.tolist()


@pytest.mark.parametrize("kind", ["images", "fresh", "shards", "folder"])
def test_masks_have_the_bits_of_the_cpu(kind: str, masked: pathlib.Path) -> None:
    words: dict[str, Any] = {"seed": 4}
    if kind in ("shards", "folder"):
        data = masked_set(masked, kind)
        words.update(transforms=fdsl.RandomResizedCrop(24, flip=True), dtype="float16", decoder="cpu")
    else:
        data = fdsl.Images(7, count=100, fresh=kind == "fresh", formula="segrcdb", res=96, out_res=48, dtype="float16", channels=3)
    cpu, loader = fdsl.Loader(data, 4, **words), fdsl.Loader(data, 4, device=0, **words)
    for _ in range(2):
        for (pixels, masks), (wanted, wanted_masks) in zip(loader, cpu):
            assert masks.device == "cuda:0" and masks.shape == wanted_masks.shape and wanted_masks.numpy().any()
            assert (pixels.numpy() == wanted.numpy()).all() and (masks.numpy() == wanted_masks.numpy()).all()


def test_states_move_between_devices_and_ranks(digits: pathlib.Path) -> None:
    words = {**SMALL, "transforms": CROP}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    loader = fdsl.Loader(source, 16, device=0, decoder="cpu", **words)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["sample"] == 48 and len(first) == 3
    cpu = fdsl.Loader(source, 16, **words)
    cpu.load_state_dict(state)
    assert same(batches_of(cpu), wanted[3:])
    ranks = [fdsl.Loader(source, 4, rank=r, world_size=4, device=0, decoder="cpu", **words) for r in range(4)]
    for one in ranks:
        one.load_state_dict(state)
    for parts, (pixels, labels) in zip(zip(*ranks), wanted[3:]):
        assert (numpy.concatenate([images.numpy() for images, _ in parts]) == pixels).all()
        assert sum((own.tolist() for _, own in parts), []) == labels


def test_broken_samples(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = broken_digits(digits, tmp_path)
    words: dict[str, Any] = {"shuffle": False, "transforms": fdsl.Resize(20), "device": 0}
    with pytest.raises(fdsl.Error, match=name):
        batches_of(fdsl.Loader(fdsl.Folder(tmp_path / "f"), 16, **words))
    loader = fdsl.Loader(fdsl.Folder(tmp_path / "f"), 16, on_error="mask", **words)
    with pytest.warns(RuntimeWarning, match=name):
        found = batches_of(loader)
    assert [(step, i) for step, (_, own) in enumerate(found) for i, label in enumerate(own) if label == -1] == [(3, 2)]
    assert (found[3][0][2] == 0).all() and loader.stats()["masked"] == 1


def test_batches_outlive_the_loader(digits: pathlib.Path) -> None:
    words = {**SMALL, "transforms": CROP, "decoder": "cpu"}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    loader = fdsl.Loader(source, 16, device=0, **words)
    kept = list(loader)  # two without a copy, six copies
    batches_of(loader)
    loader.close()
    source.close()
    del loader
    gc.collect()
    assert same([(images.numpy(), labels.tolist()) for images, labels in kept], wanted)


def test_break_leaks_neither_threads_nor_memory(photos: pathlib.Path) -> None:
    loader = fdsl.Loader(fdsl.Folder(photos / "f"), 32, device=0, transforms=CROP, **SMALL)
    threads = free = resident = 0
    for turn in range(1000):
        for images, labels in loader:
            break
        if turn == 300:
            threads, free, resident = len(os.listdir("/proc/self/task")), free_bytes(), resident_bytes()
    assert len(os.listdir("/proc/self/task")) == threads
    assert free - free_bytes() <= 2 << 20 and resident_bytes() <= 1.01 * resident + (1 << 20)
    loader.close()
    del images, labels
    for turn in range(60):
        for images, labels in fdsl.Loader(fdsl.Folder(photos / "f"), 32, device=0, transforms=CROP, **SMALL):
            break
        del images, labels
        if turn == 20:
            free, resident = free_bytes(), resident_bytes()
    assert free - free_bytes() <= 2 << 20 and resident_bytes() <= 1.02 * resident + (1 << 20)


def test_loaders_in_several_threads(digits: pathlib.Path) -> None:
    words = {**SMALL, "transforms": CROP, "decoder": "cpu"}
    wanted = batches_of(fdsl.Loader(fdsl.Folder(digits / "f"), 16, **words))
    results: list[bool] = []

    def work() -> None:
        loader = fdsl.Loader(fdsl.Folder(digits / "f"), 16, device=0, **words)
        results.append(all(same(batches_of(loader), wanted) for _ in range(3) if not loader.set_epoch(0)))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 4


def test_a_second_gpu(digits: pathlib.Path) -> None:
    if fdsl.cuda_devices() < 2:
        pytest.skip("needs two GPUs")
    words = {**SMALL, "transforms": CROP, "decoder": "cpu"}
    source = fdsl.Folder(digits / "f")
    loader = fdsl.Loader(source, 16, device="cuda:1", **words)
    assert next(iter(loader))[0].__dlpack_device__() == (2, 1)
    assert same(batches_of(loader), batches_of(fdsl.Loader(source, 16, **words)))


def test_processes(digits: pathlib.Path) -> None:
    code = f"""
import os, pickle, fdsl
loader = fdsl.Loader(fdsl.Folder({str(digits / "f")!r}), 16, device="cuda:0", transforms=fdsl.Resize(20))
iterator = iter(loader)
next(iterator)
child = os.fork()
if child == 0:
    try: next(iterator); os._exit(1)
    except fdsl.Error as error: os._exit(0 if "before fork()" in str(error) else 2)
print(os.waitpid(child, 0)[1], len(list(pickle.loads(pickle.dumps(loader)))))
"""
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("0 8\n", "")


def test_wrong_arguments(digits: pathlib.Path) -> None:
    source = fdsl.Folder(digits / "f")
    for words, kind, text in (
        ({"device": "cuda:99"}, fdsl.Unavailable, "99"),
        ({"decoder": "fast"}, ValueError, "decoder: 'fast' is unknown"),
        ({"decoder": "hardware", "transforms": fdsl.CenterCrop(20)}, ValueError, "decoder: "),
        ({"device_share": 1.5}, ValueError, "device_share: 1.5 is out of range"),
        ({"decoder": "cpu", "device_share": 0.5}, ValueError, "device_share: "),
        ({"resident_device_bytes": "all"}, ValueError, "resident_device_bytes: the sizes of decoded images are not known"),
        ({"resident_device_bytes": 1 << 50}, ValueError, "lower resident_device_bytes"),
        ({"resident_device_bytes": 1, "transforms": [CROP, fdsl.RandAugment()]}, ValueError, "resident_device_bytes: it keeps"),
    ):
        with pytest.raises(kind, match=text):
            fdsl.Loader(source, 16, **{"device": 0, "transforms": CROP, **words})


# ---- PyTorch ----


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_torch_batches_are_those_of_the_cpu(prefetch: int, digits: pathlib.Path) -> None:
    """The consumer's stream is busy, so a batch that is overwritten too early has wrong values."""
    torch = with_torch()
    from fdsl.torch import Loader

    words: dict[str, Any] = {**SMALL, "transforms": SCALED, "dtype": "float16", "prefetch": prefetch, "decoder": "cpu"}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    loader = Loader(source, 16, device="cuda", **words)
    for images, labels in loader:  # an epoch that is left begins again
        break
    for stream in None, torch.cuda.Stream(), torch.cuda.Stream(priority=-1):
        loader.set_epoch(0)
        found = []
        with torch.cuda.stream(stream):
            for images, labels in loader:
                assert images.is_cuda and labels.is_cuda
                assert loader.state_dict()["sample"] == 16 * (len(found) + 1) % 128
                torch.cuda._sleep(5_000_000)
                found.append((images + 0, labels + 0))  # copies, on this stream
                del images, labels
        torch.cuda.synchronize()
        assert same([(images.cpu().numpy(), labels.tolist()) for images, labels in found], wanted)
    assert loader.epoch == 1


def test_torch_does_not_wait_for_the_gpu(digits: pathlib.Path) -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    for source, words in (
        (fdsl.Folder(digits / "f"), {"transforms": CROP, **SMALL}),
        (fdsl.Images(5, count=DIGITS, res=64), {"seed": 9}),
    ):
        loader = Loader(source, 16, device="cuda", prefetch=4, **words)
        iterator, stream = iter(loader), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            next(iterator)  # PyTorch allocates memory for this stream
            time.sleep(0.5)  # batches are ready
            torch.cuda.synchronize()
            busy(torch)
            next(iterator)
            assert not stream.query(), type(source)
        torch.cuda.synchronize()


def test_torch_labels_of_masked_samples(digits: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with_torch()
    from fdsl.torch import Loader

    broken_digits(digits, tmp_path)
    words = {"shuffle": False, "on_error": "mask", "transforms": fdsl.Resize(20), "device": "cuda"}
    with pytest.warns(RuntimeWarning):
        labels = [labels.tolist() for _, labels in Loader(fdsl.Folder(tmp_path / "f"), 16, **words)]
    assert labels[3][2] == -100 and sum(own.count(-100) for own in labels) == 1


def test_fill_copies_the_batches(digits: pathlib.Path) -> None:
    torch = with_torch()
    source, words = fdsl.Folder(digits / "f"), {**SMALL, "transforms": CROP}
    loader = fdsl.Loader(source, 16, device=0, decoder="cpu", **words)
    images = torch.empty((16, *loader.shape), dtype=torch.uint8, device="cuda")
    labels = torch.empty(16, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    for number, (pixels, numbers) in enumerate(fdsl.Loader(source, 16, **words)):
        stream = side if number % 2 else None
        side.wait_stream(torch.cuda.current_stream())
        assert loader.fill(images, labels, stream=stream) == numbers.shape[0]
        torch.cuda.current_stream().wait_stream(side)
        assert (images[: numbers.shape[0]].cpu().numpy() == pixels.numpy()).all()
        assert labels[: numbers.shape[0]].tolist() == numbers.tolist()
    assert loader.fill(images, labels) is None
    with pytest.raises(ValueError, match="images: it is on cpu, but the loader is on cuda:0"):
        loader.fill(images.cpu())
    other, version = torch.zeros_like(images), images._version
    for array in (images, images, other, images):
        assert loader.fill(array, labels) == 16
    assert images._version == version + 3 and other._version > 0 and other.any() and not torch.equal(images, other)
    with pytest.raises(ValueError, match="labels: its shape"):
        loader.fill(images, labels.resize_(15))
    with pytest.raises(ValueError, match="images: it requires a gradient"):
        floats = fdsl.Loader(source, 16, device=0, dtype="f32", **words)
        pixels = torch.empty((16, *floats.shape), device="cuda")
        assert floats.fill(pixels) == floats.fill(pixels) == 16
        floats.fill(pixels.requires_grad_())


def test_a_graph_fills_the_following_batches() -> None:
    torch = with_torch()
    data = fdsl.Images(7, count=96, res=96, out_res=48, dtype="float16", mean=0.5, std=0.25)
    plain, loader = fdsl.Loader(data, 32, seed=4), fdsl.Loader(data, 32, seed=4, device=0)
    wanted = [(images.numpy(), labels.tolist()) for _ in range(3) for images, labels in plain]
    images = torch.empty((32, *loader.shape), dtype=torch.float16, device="cuda")
    labels = torch.empty(32, dtype=torch.int64, device="cuda")

    def expect(number: int) -> None:
        assert (images.cpu().numpy() == wanted[number][0]).all() and labels.tolist() == wanted[number][1]

    assert loader.fill(images, labels) == 32
    expect(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loader.fill(images, labels)
    for number in range(1, 8):
        graph.replay()
        expect(number)
    state = loader.state_dict()
    assert (state["epoch"], state["sample"]) == (2, 64) and loader.epoch == 2
    assert loader.fill(images, labels) == 32
    expect(8)
    torch.cuda.synchronize()
    del graph


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_graph_fills_resident_rows(tmp_path: pathlib.Path, library: str, shuffle: bool) -> None:
    """A graph around fill() of rows that are on the device, over the end of an epoch."""
    peer = with_torch() if library == "torch" else pytest.importorskip("cupy")
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(1).random((96, 24), "float32"))
    numpy.save(tmp_path / "y.npy", numpy.arange(96) % 7)
    data = fdsl.Embeddings(tmp_path / "x.npy", labels=tmp_path / "y.npy")
    words = {"seed": 4, "shuffle": shuffle, "dtype": "float16"}
    plain, loader = fdsl.Loader(data, 32, **words), fdsl.Loader(data.to(0), 32, device=0, **words)
    wanted = [(rows.numpy(), labels.tolist()) for _ in range(3) for rows, labels in plain]
    where = {"device": "cuda"} if library == "torch" else {}
    rows, labels = peer.zeros((32, 24), dtype=peer.float16, **where), peer.zeros(32, dtype=peer.int64, **where)

    def expect(number: int) -> None:
        pixels = rows.cpu().numpy() if library == "torch" else rows.get()
        assert (pixels == wanted[number][0]).all() and labels.tolist() == wanted[number][1], number

    assert loader.fill(rows, labels) == 32
    expect(0)
    if library == "torch":
        graph = peer.cuda.CUDAGraph()
        with peer.cuda.graph(graph):
            loader.fill(rows, labels)
        replay, wait = graph.replay, peer.cuda.synchronize
    else:
        stream = peer.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            loader.fill(rows, labels, stream=stream)
            graph = stream.end_capture()
        replay, wait = lambda: graph.launch(stream), stream.synchronize
    for number in range(1, 8):
        replay()
        wait()
        expect(number)
    assert loader.epoch == 2 and loader.state_dict()["sample"] == 64
    del graph, replay


@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_torch_loader_of_a_generator(prefetch: int) -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    changes: dict[str, Any] = {"dtype": "float16", "out_res": 32, "mean": 0.5, "std": 0.25}
    for shuffle in (True, False):
        with small(**changes) as host, gpu(**changes) as g:
            cpu = Loader(host, 6, seed=5, shuffle=shuffle)
            loader = Loader(g, 6, seed=5, prefetch=prefetch, shuffle=shuffle)
            for epoch in range(3):
                for (images, labels), (pixels, numbers) in zip(loader, cpu):
                    assert images.device == torch.device("cuda:0") and images.dtype is torch.float16
                    assert torch.equal(images.cpu(), pixels) and torch.equal(labels.cpu(), numbers)
                assert loader.epoch == epoch + 1


def test_torch_resumes_after_an_abandoned_epoch() -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    with gpu() as g:
        loader = Loader(g, 6, seed=5)
        every = [labels.tolist() for _ in range(2) for _, labels in loader]
        loader = Loader(g, 6, seed=5)
        iterator = iter(loader)
        taken = [next(iterator)[1].tolist() for _ in range(4)]
        state = loader.state_dict()
        del iterator
        resumed = Loader(g, 6, seed=5, prefetch=4)
        resumed.load_state_dict(state)
        rest = [labels.tolist() for _, labels in resumed] + [labels.tolist() for _, labels in resumed]
        assert taken + rest == every
        torch.cuda.synchronize()


def test_torch_memory_stays_flat(photos: pathlib.Path) -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    for source, words in (
        (fdsl.Folder(photos / "f"), {"transforms": SCALED, "dtype": "float32", **SMALL}),
        (fdsl.Images(5, count=PHOTOS, res=64, dtype="float32"), {}),
    ):
        loader = Loader(source, 16, device="cuda", **words)
        reserved = free = resident = 0
        for turn in range(200):
            for step, (images, labels) in enumerate(loader):
                images.mul_(2)  # without synchronising
                if step == (turn % 2) * 5:
                    break
            if turn == 60:
                torch.cuda.synchronize()
                reserved, free, resident = torch.cuda.memory_reserved(), free_bytes(), resident_bytes()
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved and free - free_bytes() <= 2 << 20
        assert resident_bytes() <= 1.01 * resident + (1 << 20)


def test_torch_pinned_memory(digits: pathlib.Path) -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    words = {**SMALL, "transforms": CROP}
    wanted = batches_of(fdsl.Loader(fdsl.Folder(digits / "f"), 16, **words))
    loader = Loader(fdsl.Folder(digits / "f"), 16, pin_memory=True, **words)
    found = []
    for images, labels in loader:
        assert images.is_pinned() and labels.is_pinned()
        busy(torch)
        found.append((images.cuda(non_blocking=True), labels.cuda(non_blocking=True)))
        del images, labels
    assert same([(images.cpu().numpy(), labels.tolist()) for images, labels in found], wanted)
    with pytest.raises(ValueError, match="pin_memory: "):
        Loader(fdsl.Folder(digits / "f"), 16, pin_memory=True, device="cuda", **words)


def test_torch_host_time_per_batch() -> None:
    torch = with_torch()
    from fdsl.torch import Loader

    data = fdsl.Images(1000, count=256 * 400, res=64, out_res=32, channels=3, dtype="float16")
    times = []
    for _, begin in zip(Loader(data, 256, device="cuda"), iter(time.perf_counter, None)):
        times.append(begin)
    torch.cuda.synchronize()
    median = 1e6 * statistics.median(numpy.diff(times))
    print(f"\nmedian host time per batch of a torch Loader, 256 generated images of 64 to 32: {median:.1f} µs")
    assert median < 1000  # catches a loader that waits for the GPU


def test_torch_host_time_of_resident_rows(tmp_path: pathlib.Path) -> None:
    """Compares the loader with PyTorch's indexing of the same rows and labels."""
    torch = with_torch()
    from fdsl.torch import Loader

    count, batch = 1 << 18, 1024
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(1).random((count, 256), "float32").astype("float16"))
    numpy.save(tmp_path / "y.npy", numpy.arange(count) % 10)
    data = fdsl.Embeddings(tmp_path / "x.npy", labels=tmp_path / "y.npy").to("cuda")
    loader = Loader(data, batch, device="cuda")
    rows, labels = (torch.from_numpy(numpy.load(tmp_path / name)).cuda() for name in ("x.npy", "y.npy"))

    def indexed() -> Any:
        order = torch.randperm(count, device="cuda")
        for first in range(0, count, batch):
            index = order[first : first + batch]
            yield rows[index], labels[index]

    times = {}
    for name, batches in (("loader", lambda: loader), ("indexing", indexed)):
        medians = []
        for _ in range(9):
            torch.cuda.synchronize()
            stamps = [begin for _, begin in zip(batches(), iter(time.perf_counter, None))]
            medians.append(1e6 * statistics.median(numpy.diff(stamps)))
        times[name] = statistics.median(medians)
    print(f"\nhost time per batch of {batch} resident rows: {times['loader']:.1f} µs; indexing: {times['indexing']:.1f} µs")
    assert times["loader"] < 1.5 * times["indexing"]


def test_torch_rate(photos: pathlib.Path) -> None:
    """From JPEG shards to tensors, compared with the program. Both in turn, because the machine may be busy at times."""
    torch = with_torch()
    from fdsl.torch import Loader

    crop = fdsl.RandomResizedCrop(224, flip=True)
    loader = Loader(fdsl.Shards(photos / "m"), 100, seed=1, transforms=crop, device="cuda", prefetch=4)
    list(loader)
    words = (
        f"--workload load --variant stream-gpu --data {photos / 'm'} --batch 100 --seed 1 --out-res 224 --channels 3 "
        "--fit random-resized-crop --epochs 40 --prefetch 4 --max-time 6 --format json"
    )
    shares = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        count = sum(len(labels) for _ in range(40) for _, labels in loader)
        torch.cuda.synchronize()
        rate = count / (time.perf_counter() - begin)
        assert count == 40 * PHOTOS
        done = subprocess.run([PROGRAM, *words.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        program = json.loads(done.stdout)["rows"][-1]["items_per_s"]
        shares.append(rate / program)
        print(f"\nJPEG shards to tensors of 224 x 224: {rate:.0f} images/s in Python, {program:.0f} in the program")
    assert statistics.median(shares) > 0.8


# ---- CuPy and JAX ----


@pytest.mark.parametrize("kind", ["default", "blocking", "non-blocking"])
def test_cupy(digits: pathlib.Path, kind: str) -> None:
    """The consumer's stream is busy when its last reference to a batch ends."""
    cupy = pytest.importorskip("cupy")
    words = {**SMALL, "transforms": CROP, "decoder": "cpu", "prefetch": 1}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    stream = cupy.cuda.Stream.null if kind == "default" else cupy.cuda.Stream(non_blocking=kind == "non-blocking")
    large = cupy.ones((4096, 4096), "float32")
    for how in (cupy.from_dlpack, cupy.asarray):
        found = []
        with stream:
            for images, labels in fdsl.Loader(source, 16, device=0, **words):
                pixels, numbers = how(images), how(labels)
                assert pixels.data.ptr == images.ptr
                cupy.matmul(large, large)
                found.append((pixels + 0, numbers + 0))
                del images, labels, pixels, numbers
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        assert same([(pixels.get(), numbers.tolist()) for pixels, numbers in found], wanted)


def test_torch_dlpack_on_a_stream_of_its_own(digits: pathlib.Path) -> None:
    """PyTorch's DLPack passes the current stream, which is busy when the last reference to a batch ends."""
    torch = with_torch()
    words = {**SMALL, "transforms": CROP, "decoder": "cpu", "prefetch": 1}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    stream, large, found = torch.cuda.Stream(), torch.ones(4096, 4096, device="cuda"), []
    with torch.cuda.stream(stream):
        for images, labels in fdsl.Loader(source, 16, device=0, **words):
            pixels, numbers = torch.from_dlpack(images), torch.from_dlpack(labels)
            assert pixels.data_ptr() == images.ptr
            torch.matmul(large, large)
            found.append((pixels + 0, numbers + 0))
            del images, labels, pixels, numbers
    torch.cuda.synchronize()
    assert same([(pixels.cpu().numpy(), numbers.tolist()) for pixels, numbers in found], wanted)


def test_jax(digits: pathlib.Path) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    words = {**SMALL, "transforms": CROP, "decoder": "cpu", "prefetch": 1}
    source = fdsl.Folder(digits / "f")
    wanted = batches_of(fdsl.Loader(source, 16, **words))
    found = []
    for images, labels in fdsl.Loader(source, 16, device=0, **words):
        found.append((jax.dlpack.from_dlpack(images) + 0, labels.tolist()))
        del images, labels
    assert same([(numpy.asarray(pixels), numbers) for pixels, numbers in found], wanted)
