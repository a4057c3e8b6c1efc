"""Tests CUDA: images, streams, graphs, DLPack, memory and host time. The tests are skipped without a GPU.

    make lib && python3 -m pytest -s python/tests/test_gpu.py

Most tests need PyTorch. The tests of CuPy and JAX run if these packages are installed.
"""

from __future__ import annotations

import csv
import gc
import itertools
import os
import pathlib
import statistics
import subprocess
import threading
import time
from typing import Any

import pytest
from conftest import COUNT, RES, resident_bytes, run_python, small

import fdsl

numpy = pytest.importorskip("numpy")
if fdsl.cuda_devices() == 0:
    pytest.skip("no CUDA device, or libfdsl was built without CUDA", allow_module_level=True)


def gpu(**changes: Any) -> fdsl.Generator:
    return small(**{"device": "cuda:0", **changes})


def with_torch() -> Any:
    torch = pytest.importorskip("torch", minversion="2.1")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


def expected(first: int, count: int, **changes: Any) -> tuple[Any, Any]:
    """Returns the images and labels that the CPU generates, as NumPy arrays that own their memory."""
    with small(**{"batch": 64, **changes}) as g:
        images, labels = g.generate(first, count)
        return images.numpy().copy(), labels.numpy().copy()


def free_bytes() -> int:
    """Returns the free memory of the first visible GPU that nvidia-smi reports, in bytes."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = f"nvidia-smi --id={first} --query-gpu=memory.free --format=csv,noheader,nounits".split()
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def busy(torch: Any) -> None:
    """Keeps the current stream busy for about 50 ms."""
    torch.cuda._sleep(100_000_000)


# ---- Images ----


@pytest.mark.parametrize("number", range(32))
def test_images_are_those_of_the_cpu(number: int) -> None:
    formats = itertools.product(
        ("uint8", "float16", "bfloat16", "float32"), ("nchw", "nhwc"), (1, 3), ("resize", "crop")
    )
    dtype, layout, channels, fit = list(formats)[number]
    changes: dict[str, Any] = {"dtype": dtype, "layout": layout, "channels": channels, "fit": fit, "out_res": 48}
    changes.update(seed=number << 33, formula=("uji", "visualatom")[number % 2])
    if dtype != "uint8":
        changes.update(mean=0.485, std=0.25)
    images, labels = expected(0, COUNT, **changes)
    with gpu(**changes) as g:
        assert g.device == "cuda:0" and g.memory_bytes > 0
        for split in (COUNT, 1 + number % 6):
            for first in range(0, COUNT, split):
                count = min(split, COUNT - first)
                some, some_labels = g.generate(first, count)
                assert some.device == "cuda:0" and some.__dlpack_device__() == (2, 0)
                assert (some.numpy() == images[first : first + count]).all()
                assert (some_labels.numpy() == labels[first : first + count]).all()
        order = [5, 0, 22, 5, 7, 21]
        assert (g.generate(numbers=order)[0].numpy() == images[order]).all()


@pytest.mark.parametrize("name", ["gbase", "bat"])
def test_kernels_of_the_paper_take_consecutive_numbers(name: str) -> None:
    torch = with_torch()
    with gpu(generator=name) as g:
        assert (g.generate(3, 8)[1].numpy() == expected(3, 8)[1]).all()
        slot = 12 * max(one.vertices * one.orbits for one in g.classes)  # bytes of noise and positions per image
        with gpu(generator=name, batch=1) as single:
            growth = (g.memory_bytes - single.memory_bytes) / (g.batch - 1)
            assert growth >= RES * RES + (slot if name == "bat" else 0)
        with pytest.raises(fdsl.Unavailable, match="needs the image numbers in host memory"):
            g.generate(numbers=[1, 2])
        with pytest.raises(fdsl.Unavailable):
            g.fill(
                torch.empty((2, *g.shape), dtype=torch.uint8, device="cuda:0"),
                next=torch.zeros(1, dtype=torch.int64, device="cuda:0"),
            )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", ["gbase", "bat"])
def test_loaders_use_the_kernels_of_the_paper(name: str, shuffle: bool) -> None:
    words: dict[str, Any] = {"classes": 7, "res": 96, "count": 40}
    loader = fdsl.Loader(fdsl.Images(**words, generator=name), 16, device=0, seed=2, shuffle=shuffle)
    cpu = fdsl.Loader(fdsl.Images(**words), 16, seed=2, shuffle=shuffle)
    for (images, labels), (_, numbers) in zip(loader, cpu):
        assert labels.tolist() == numbers.tolist() and images.numpy().any(axis=(1, 2, 3)).all()
    with pytest.raises((ValueError, fdsl.Unavailable), match="generator: "):
        fdsl.Loader(fdsl.Images(**words, generator=name), 16)


def test_arrays_outlive_their_generator() -> None:
    images, _ = expected(0, COUNT)
    g = gpu()
    arrays = [g.generate(first, 1)[0] for first in range(COUNT)]
    g.close()
    gpu().generate()
    assert all((array.numpy() == images[number]).all() for number, array in enumerate(arrays))
    assert not hasattr(arrays[0], "__array_interface__")


def test_wrong_memory_and_streams() -> None:
    torch = with_torch()
    g = gpu()
    good = torch.empty((2, *g.shape), dtype=torch.uint8, device="cuda:0")
    host_numbers = torch.zeros(2, dtype=torch.int64)
    for arguments, words, text in (
        ((torch.empty((2, *g.shape), dtype=torch.uint8),), {}, "images: it is on cpu, but the generator is on cuda:0"),
        ((numpy.empty((2, *g.shape), "uint8"),), {}, "images: it is on cpu, but the generator is on cuda:0"),
        ((good, host_numbers), {}, "labels: it is on cpu"),
        ((good,), {"numbers": host_numbers}, "numbers: it is on cpu"),
        ((good,), {"next": host_numbers[:1]}, "next: it is on cpu"),
        ((good.flatten()[1 : 1 + g.shape[1] ** 2].view(1, *g.shape),), {}, "images: .* not aligned to 16 bytes"),
        ((good.float(),), {}, "images: its elements are float32, not uint8"),
        ((good[:, :, ::2],), {}, "images: it is not contiguous"),
    ):
        with pytest.raises(ValueError, match=text):
            g.fill(*arguments, **words)
    with pytest.raises(TypeError, match="stream: it must be an int"):
        g.fill(good, stream="x")
    with small() as cpu, pytest.raises(ValueError, match="images: it is on cuda:0, but the generator is on cpu"):
        cpu.fill(good)
    if fdsl.cuda_devices() > 1:
        other = torch.empty((2, *g.shape), dtype=torch.uint8, device="cuda:1")
        with pytest.raises(ValueError, match="images: it is on cuda:1, but the generator is on cuda:0"):
            g.fill(other)
        with pytest.raises(ValueError, match="stream: it belongs to CUDA device 1"):
            g.fill(good, stream=torch.cuda.Stream("cuda:1"))
        with torch.cuda.device(1), fdsl.Generator(3, res=32, device="cuda") as second:
            assert second.device == "cuda:1" and torch.cuda.current_device() == 1
            assert (second.generate(0, 3)[0].numpy() == fdsl.Generator(3, res=32).generate(0, 3)[0].numpy()).all()


# ---- Streams ----


def test_fill_uses_the_current_stream() -> None:
    torch = with_torch()
    images, labels = expected(0, 20)
    with gpu() as g:
        g.generate()  # loads the kernels
        for side in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.current_stream()):
            with torch.cuda.stream(side):
                tensor = torch.zeros((20, *g.shape), dtype=torch.uint8, device="cuda:0")
                indices = torch.zeros(20, dtype=torch.int64, device="cuda:0")
                busy(torch)
                g.fill(tensor, indices)
                assert g._stream == side.cuda_stream
                assert not side.query(), "the call must not wait"
                result, result_labels = tensor.cpu(), indices.cpu()
            assert (result.numpy() == images).all() and (result_labels.numpy() == labels).all()


@pytest.mark.parametrize("count", [COUNT, COUNT - 1])  # a full batch, and a smaller one
def test_fill_does_not_wait(count: int) -> None:
    torch = with_torch()
    images, labels = expected(0, count)
    side = torch.cuda.Stream()
    numbers = torch.arange(count - 1, -1, -1, device="cuda:0")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    with gpu() as g:
        tensor = torch.zeros((count, *g.shape), dtype=torch.uint8, device="cuda:0")
        indices = torch.zeros(count, dtype=torch.int64, device="cuda:0")
        selections: list[dict[str, Any]] = [{"first": 0}, {"numbers": numbers}, {"next": counter, "step": 0}]
        for words, stream in itertools.product(selections, (None, side, side.cuda_stream)):
            g.fill(tensor, indices, **words, stream=stream)  # the first call, in which CUDA does its initial work
            torch.cuda.synchronize()
            tensor.zero_()
            indices.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                busy(torch)
                if stream is None:
                    g.fill(tensor, indices, **words)
            if stream is not None:
                g.fill(tensor, indices, **words, stream=stream)
            assert not side.query(), (words, stream)
            torch.cuda.synchronize()
            order = slice(None, None, -1 if "numbers" in words else 1)
            assert (tensor.cpu().numpy() == images[order]).all() and (indices.cpu().numpy() == labels[order]).all()


def test_calls_on_several_streams_are_ordered() -> None:
    """The calls share scratch memory: without fdsl_order(), they would overwrite each other's data."""
    torch = with_torch()
    images, _ = expected(0, 60, out_res=64)
    with gpu(batch=20, out_res=64) as g:
        for _ in range(20):
            streams = [torch.cuda.Stream() for _ in range(3)]
            tensors = []
            for number, stream in enumerate(streams):
                tensor = torch.zeros((20, *g.shape), dtype=torch.uint8, device="cuda:0")
                stream.wait_stream(torch.cuda.current_stream())
                g.fill(tensor, first=20 * number, stream=stream if number else stream.cuda_stream)
                tensors.append(tensor)
            torch.cuda.synchronize()
            for number, tensor in enumerate(tensors):
                assert (tensor.cpu().numpy() == images[20 * number : 20 * number + 20]).all()


def test_a_graph_generates_the_following_images() -> None:
    torch = with_torch()
    images, labels = expected(0, 60)
    with gpu() as g:
        tensor = torch.zeros((5, *g.shape), dtype=torch.uint8, device="cuda:0")
        indices = torch.zeros(5, dtype=torch.int64, device="cuda:0")
        counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
        g.fill(tensor, indices, next=counter)  # loads the kernels
        assert counter.item() == 5
        counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            g.fill(tensor, indices, next=counter, step=10)
        for replay in range(5):
            graph.replay()
            assert (tensor.cpu().numpy() == images[10 * replay : 10 * replay + 5]).all()
            assert (indices.cpu().numpy() == labels[10 * replay : 10 * replay + 5]).all()
        assert counter.item() == 50
        other = gpu()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(ValueError, match="numbers: a list cannot be captured"):
                g.fill(tensor, numbers=[1, 2, 3, 4, 5])
            g.fill(tensor, first=2)
            other.close()  # frees memory, which must not invalidate the capture
        graph.replay()
        assert (tensor.cpu().numpy() == images[2:7]).all()
        g.fill(tensor, first=7)
        torch.cuda.synchronize()
        assert (tensor.cpu().numpy() == images[7:12]).all()
        del graph


# ---- DLPack and interfaces ----


def test_torch_shares_the_memory_and_waits() -> None:
    torch = with_torch()
    for dtype in ("uint8", "float16", "bfloat16", "float32"):
        images, labels = expected(0, 20, dtype=dtype)
        with gpu(dtype=dtype) as g:
            producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(producer):
                busy(torch)
            array, label_array = g.generate(0, 20, stream=producer)
            with torch.cuda.stream(consumer):
                tensor, indices = torch.from_dlpack(array), torch.from_dlpack(label_array)
                result = (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).cpu()
            assert tensor.data_ptr() == array.ptr and tensor.device == torch.device("cuda:0")
            assert tensor.dtype is getattr(torch, dtype) and tuple(tensor.shape) == array.shape
            assert (result.numpy() == images).all() and (indices.cpu().numpy() == labels).all()
            if dtype != "bfloat16":
                assert torch.as_tensor(array, device="cuda:0").data_ptr() == array.ptr
            del array
            gc.collect()
            g.generate(20, 20)
            torch.cuda.synchronize()
            again = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
            assert (again.cpu().numpy() == images).all()


def test_numpy_gets_a_copy() -> None:
    images, _ = expected(0, 20)
    with gpu() as g:
        array, _ = g.generate(0, 20)
        assert (array.numpy() == images).all()
        host = array.__dlpack__(dl_device=(1, 0), max_version=(1, 0))
        assert "dltensor_versioned" in repr(host)
        with pytest.raises(BufferError):
            array.__dlpack__(dl_device=(1, 0), copy=False)
        twin = array.__dlpack__(copy=True)
        assert "dltensor" in repr(twin)
        for stream in (0, -2):
            with pytest.raises(ValueError, match="stream:"):
                array.__dlpack__(stream=stream)
        for allowed in (None, 1, 2, -1):
            array.__dlpack__(stream=allowed)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    images, labels = expected(0, 20)
    with gpu() as g:
        array, label_array = g.generate(0, 20)
        shared = cupy.from_dlpack(array)
        assert shared.data.ptr == array.ptr and (shared.get() == images).all()
        assert cupy.asarray(array).data.ptr == array.ptr
        assert (cupy.asarray(label_array).get() == labels).all()
        destination, indices = cupy.zeros((20, *g.shape), "uint8"), cupy.zeros(20, "int64")
        g.fill(destination, indices)
        assert (destination.get() == images).all() and (indices.get() == labels).all()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            destination.fill(0)
            g.fill(destination, first=3)
            assert g._stream == stream.ptr
            assert (destination.get()[:17] == images[3:]).all()
        g.fill(destination, stream=stream)
        stream.synchronize()
        assert (destination.get() == images).all()
        g.fill(destination, numbers=cupy.arange(19, -1, -1))
        assert (destination.get() == images[::-1]).all()
        with pytest.raises(ValueError, match="images: it is not contiguous"):
            g.fill(destination[::2])
        del shared, array
        gc.collect()


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    images, labels = expected(0, 20)
    with gpu() as g:
        array, label_array = g.generate(0, 20)
        tensor = jax.dlpack.from_dlpack(array)
        assert tensor.unsafe_buffer_pointer() == array.ptr and (numpy.asarray(tensor) == images).all()
        assert (numpy.asarray(jax.dlpack.from_dlpack(label_array)) == labels).all()
        with pytest.raises(TypeError, match="images: JAX arrays are immutable; use generate"):
            g.fill(tensor)


# ---- Memory, time and lifetimes ----


def test_memory_stays_flat() -> None:
    torch = with_torch()
    with gpu(batch=16) as g:
        tensor = torch.zeros((16, *g.shape), dtype=torch.uint8, device="cuda:0")

        def call(number: int) -> None:
            g.fill(tensor, first=number)
            if number % 10 == 0:
                images, labels = g.generate(0, 16)
                torch.from_dlpack(images).add_(1)
                labels.__dlpack__()

        for number in range(1000):
            call(number)
        torch.cuda.synchronize()
        free, resident = free_bytes(), resident_bytes()
        for number in range(10_000):
            call(number)
        torch.cuda.synchronize()
        assert free - free_bytes() <= 2 << 20 and resident_bytes() - resident < 8 << 20


def test_opening_and_closing_stays_flat() -> None:
    for _ in range(50):
        gpu(res=16).close()
    free, resident = free_bytes(), resident_bytes()
    for number in range(1000):
        g = gpu(res=16)
        if number % 10 == 0:
            g.generate(0, 4)
        g.close()
    assert free - free_bytes() <= 2 << 20 and resident_bytes() - resident < 16 << 20


def test_host_time_per_call() -> None:
    torch = with_torch()
    times = {}
    with fdsl.Generator(
        1000, res=512, out_res=224, channels=3, dtype="float16", batch=256, device="cuda:0"
    ) as g:
        images = torch.empty((256, *g.shape), dtype=torch.float16, device="cuda:0")
        labels = torch.empty(256, dtype=torch.int64, device="cuda:0")
        numbers = torch.arange(256, device="cuda:0")
        counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
        stream = torch.cuda.current_stream()
        generate = fdsl._library.lib.fdsl_generate
        calls: dict[str, Any] = {
            "fill": lambda: g.fill(images, labels, 5),
            "fill, no labels": lambda: g.fill(images, first=5),
            "fill, stream given": lambda: g.fill(images, labels, 5, stream=stream),
            "fill, numbers": lambda: g.fill(images, labels, numbers=numbers),
            "fill, next": lambda: g.fill(images, labels, next=counter),
            "fill, 255 images": lambda: g.fill(images[:255], labels[:255], 5),
            "C call": lambda: generate(g._handle, 5, 256, images.data_ptr(), labels.data_ptr(), 0),
            "C call, 255 images": lambda: generate(g._handle, 5, 255, images.data_ptr(), labels.data_ptr(), 0),
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(60):  # in turn, so that none is measured with cold caches
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(10):
                    call()
                samples[name].append((time.perf_counter() - begin) / 10)
        times = {name: 1e6 * statistics.median(values[10:]) for name, values in samples.items()}
    print("\nmedian host time per call, 256 RGB images in f16 of 512 to 224, 1000 classes:")
    for name, value in times.items():
        print(f"{value:8.1f} µs  {name}")
    assert times["fill"] - times["C call"] < 20  # catches a call that waits for the GPU, or a slow path in Python


def test_tensors_die_in_other_threads_and_in_failing_calls() -> None:
    torch = with_torch()
    with gpu() as g:
        images, _ = g.generate(0, 8)
        tensors = [torch.from_dlpack(images) for _ in range(100)]
        threads = [threading.Thread(target=lambda: [tensors.pop() for _ in range(20)]) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not tensors
        with pytest.raises(RuntimeError, match="shape"):
            torch.from_dlpack(images).reshape(3)


def test_exit_with_everything_alive() -> None:
    with_torch()
    code = """
import fdsl, torch, fdsl.torch
g = fdsl.Generator(5, res=64, batch=8, device="cuda:0")
images, labels = g.generate()
tensor, capsule = torch.from_dlpack(images), labels.__dlpack__()
iterator = iter(fdsl.torch.Loader(g, 100)); batch = next(iterator)
g.fill(batch[0])
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_refused() -> None:
    code = """
import os, fdsl
g = fdsl.Generator(5, res=64, batch=8, device="cuda:0")
g.generate()
child = os.fork()
if child == 0:
    try: g.generate(); os._exit(1)
    except fdsl.Error as error: os._exit(0 if "before fork()" in str(error) else 2)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code).stdout == "0\n"


# ---- The monitor ----


def monitored(path: pathlib.Path, device: str) -> list[dict[str, str]]:
    """Runs a monitor for two seconds in a process without a CUDA context. Returns its rows."""
    code = f"""
import fdsl, os, subprocess, time, warnings
warnings.simplefilter("error")
with fdsl.Monitor({str(path)!r}, interval=1, device={device}) as monitor:
    monitor.phase("rest")
    time.sleep(2)
    words = "nvidia-smi --query-compute-apps=pid --format=csv,noheader"
    assert str(os.getpid()) not in subprocess.run(words.split(), capture_output=True, text=True).stdout.split()
"""
    done = run_python(code)
    assert done.returncode == 0 and done.stdout == done.stderr == "", done
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_monitor_has_all_gpus_or_one(tmp_path: pathlib.Path) -> None:
    count = fdsl.cuda_devices()
    rows = monitored(tmp_path / "all.csv", "None")
    assert {row["gpu"] for row in rows} == {str(i) for i in range(count)}
    assert {"rest"} <= {row["phase"] for row in rows} <= {"idle", "rest"}
    for row in rows:
        assert float(row["power_w"]) > 1 and int(row["gpu_memory_bytes"]) > 1e6 and row["device"], row
        assert bool(row["rss_bytes"]) == (row["gpu"] == "0"), row
    last = str(count - 1)
    rows = monitored(tmp_path / "one.csv", last)
    assert {row["gpu"] for row in rows} == {last}
    assert all(row["rss_bytes"] and row["power_w"] for row in rows)
    with pytest.raises(fdsl.Unavailable, match=f"^device: .* no device {count}"):
        fdsl.Monitor(tmp_path / "none.csv", device=count).start()
