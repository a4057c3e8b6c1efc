"""Tests which CUDA calls the package makes, without a GPU. A generator on the CPU acts as a generator on device 0, and
the calls to the library are recorded."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Iterator

import pytest
from conftest import content, small

import fdsl
from fdsl import _array, _generator, _memory, _stream
from fdsl._library import lib

DEVICE_FIRST = ("fdsl_alloc", "fdsl_free", "fdsl_copy", "fdsl_wait", "fdsl_order")
STREAMS_LAST = {"fdsl_copy": 1, "fdsl_wait": 1, "fdsl_order": 2}  # function: number of streams at the end


class Recorder:
    """Replaces the library: records calls, and redirects calls for device 0 or with a stream to the CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.allocations = False  # whether to record them

    def fdsl_stream_begin(self, source: Any, config: Any, stream: Any) -> int:
        device, decoder, share = config.device, config.decoder, config.device_share
        if device == 0:
            self.calls.append(("open", device, decoder, share))
            config.device, config.decoder, config.device_share = -1, b"auto", -1
        status = int(lib.fdsl_stream_begin(source, config, stream))
        config.device, config.decoder, config.device_share = device, decoder, share
        return status

    def fdsl_stream_next(self, stream: int, cuda_stream: Any, batch: Any) -> int:
        self.calls.append(("next", cuda_stream))
        return int(lib.fdsl_stream_next(stream, None, batch))

    def fdsl_batch_tensor(self, batch: int, field: int, tensor: Any) -> int:
        status = int(lib.fdsl_batch_tensor(batch, field, tensor))
        tensor.device_type, tensor.device_id = 2, 0
        return status

    def __getattr__(self, name: str) -> Any:
        function = getattr(lib, name)

        def call(*arguments: Any) -> Any:
            streams = STREAMS_LAST.get(name, 0)
            if streams:
                self.calls.append((name[5:], *(one for one in arguments if not isinstance(one, ctypes._Pointer))))
            if name.startswith("fdsl_generate"):
                self.calls.append((name[5:], arguments[-1]))
                streams = 1
            if name == "fdsl_alloc" and self.allocations:
                self.calls.append((name[5:], arguments[0]))
            if name in DEVICE_FIRST:
                arguments = (-1, *arguments[1:])
            return function(*arguments[: len(arguments) - streams], *[None] * streams)  # the CPU refuses streams

        return call

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def recorder(monkeypatch: Any) -> Iterator[Recorder]:
    fake = Recorder()
    monkeypatch.setattr(_generator, "lib", fake)
    monkeypatch.setattr(_array, "lib", fake)
    monkeypatch.setattr(_memory, "lib", fake)
    monkeypatch.setattr(_array._Memory, "__del__", lambda memory: lib.fdsl_free(-1, memory.pointer))
    yield fake
    _array.collect(everything=True)


@pytest.fixture
def cuda(recorder: Recorder) -> Iterator[fdsl.Generator]:
    with small(out_res=16) as g:
        g._device = 0
        yield g
        g._device = -1


class Foreign:
    """CUDA memory of another library."""

    def __init__(self, array: Any, stream: Any = None) -> None:
        interface = {"version": 3, "shape": array.shape, "typestr": "|u1", "data": (array.ptr, False), "strides": None}
        self.__cuda_array_interface__ = {**interface, "stream": stream} if stream is not None else interface


def test_calls_on_several_streams_are_ordered(cuda: fdsl.Generator, recorder: Recorder) -> None:
    images, labels = cuda.generate(0, 4)
    assert recorder.take() == [("generate", 0)] and images.device == "cuda:0"
    memory = Foreign(images)
    for stream, calls in (
        (48, [("order", 0, 0, 48), ("generate", 48)]),
        (48, [("generate", 48)]),
        (64, [("order", 0, 48, 64), ("generate", 64)]),
        (None, [("order", 0, 64, 0), ("generate", 0)]),
        (0, [("generate", 0)]),
    ):
        cuda.fill(memory, stream=stream)
        assert recorder.take() == calls
    cuda.fill(Foreign(images, 80))
    assert recorder.take() == [("order", 0, 0, 80), ("generate", 80)]
    cuda.fill(images, labels, stream=96)  # arrays remember their own stream
    assert recorder.take() == [("order", 0, 80, 96), ("order", 0, 0, 96), ("order", 0, 0, 96), ("generate", 96)]
    cuda.fill(images)
    assert recorder.take() == [("generate", 96)]


def test_streams_of_objects_are_kept_alive(cuda: fdsl.Generator, recorder: Recorder) -> None:
    class Stream:
        device_id, ptr = 0, 112

    stream = Stream()
    images, _ = cuda.generate(0, 4, stream=stream)
    assert recorder.take() == [("generate", 112)]
    assert cuda._stream_owner is stream and images._stream_owner is stream
    Stream.device_id = 1
    with pytest.raises(ValueError, match="stream: it belongs to CUDA device 1"):
        cuda.generate(0, 4, stream=stream)


def test_consumers_wait_for_the_producer(cuda: fdsl.Generator, recorder: Recorder) -> None:
    images, _ = cuda.generate(0, 4, stream=48)
    recorder.take()
    assert images.__dlpack_device__() == (2, 0)
    for stream, calls in (
        (None, [("order", 0, 48, 1)]),
        (1, [("order", 0, 48, 1)]),
        (2, [("order", 0, 48, 2)]),
        (48, []),
        (64, [("order", 0, 48, 64)]),
        (-1, []),
    ):
        assert "dltensor" in repr(images.__dlpack__(stream=stream))
        assert recorder.take() == calls
    assert images.__cuda_array_interface__["stream"] == 48
    default, _ = cuda.generate(0, 4, stream=0)
    recorder.take()
    default.__dlpack__(stream=1)
    default.__dlpack__()
    assert recorder.take() == [] and default.__cuda_array_interface__["stream"] == 1
    assert default.__cuda_array_interface__["data"] == (default.ptr, False)
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="stream"):
            images.__dlpack__(stream=wrong)


def test_copies_wait_for_the_producer(cuda: fdsl.Generator, recorder: Recorder) -> None:
    numpy = pytest.importorskip("numpy")
    images, _ = cuda.generate(0, 4, stream=48)
    recorder.take()
    assert images.numpy().tobytes() == content(images)
    ((name, device, _, source, size, stream),) = recorder.take()
    assert (name, device, source, size, stream) == ("copy", 0, images.ptr, 4 * 256, 48)
    assert numpy.from_dlpack(Exported(images)).tobytes() == content(images)
    assert images._copy(0).device == "cuda:0"


class Exported:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__(dl_device=(1, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_lists_are_copied_to_the_device(cuda: fdsl.Generator, recorder: Recorder) -> None:
    images, labels = cuda.generate(numbers=[6, 0, 2])
    assert [name for name, *_ in recorder.take()] == ["copy", "generate_list"]
    with pytest.raises(ValueError, match="numbers: it is on cpu, but the generator is on cuda:0"):
        cuda.fill(images, numbers=pytest.importorskip("numpy").zeros(3, "int64"))
    labels_on_device = ctypes.string_at(labels.ptr, 24)
    assert labels_on_device == b"".join(n.to_bytes(8, "little") for n in (6, 0, 2))


# ---- The Loader ----


@pytest.fixture
def streams(recorder: Recorder, monkeypatch: Any) -> Recorder:
    """Streams of the library for device 0 are streams on the CPU, whose batches claim to be on device 0."""
    monkeypatch.setattr(_stream, "lib", recorder)
    recorder.allocations = True

    def release(batch: int, stream: Any) -> None:
        recorder.calls.append(("release", stream))
        lib.fdsl_batch_release(batch, None)

    monkeypatch.setattr(_stream._BatchMemory.__del__, "__defaults__", (release, os.getpid, _array._Memory))
    return recorder


def test_batches_of_a_loader_come_on_the_default_stream(streams: Recorder) -> None:
    data = fdsl.Images(5, count=40, res=16)
    wanted = [(content(images), labels.tolist()) for images, labels in fdsl.Loader(data, 8, seed=1, num_threads=1)]
    streams.take()
    loader = fdsl.Loader(data, 8, seed=1, device=0, num_threads=1, decoder="hardware", device_share=0.5)
    assert streams.take() == [("open", 0, b"hardware", 0.5)] and loader.device == "cuda:0"
    iterator = iter(loader)
    images, labels = next(iterator)
    assert streams.take() == [("next", None)]
    assert images.device == labels.device == "cuda:0" and images.__dlpack_device__() == (2, 0)
    assert images.ptr != labels.ptr and (content(images), ctypes.string_at(labels.ptr, 64)) == (
        wanted[0][0], b"".join(label.to_bytes(8, "little") for label in wanted[0][1]),
    )  # fmt: skip
    for stream, calls in ((1, []), (None, []), (64, [("order", 0, 0, 64)]), (-1, [])):
        images.__dlpack__(stream=stream)
        assert streams.take() == calls


def test_arrays_of_fill_exist_until_another_call(streams: Recorder) -> None:
    """The library does not check the addresses of its latest call again, so no other memory may get them."""
    loader = fdsl.Loader(fdsl.Images(5, count=16, res=16), 8, device=0, num_threads=1)
    room, labels = fdsl.Array((8, 1, 16, 16), "uint8", -1), fdsl.Array((8,), "int64", -1)
    images, numbers = Foreign(room), Foreign(labels)
    numbers.__cuda_array_interface__["typestr"] = "<i8"
    kept = [weakref.ref(images), weakref.ref(numbers)]
    assert loader.fill(images, numbers) == 8
    del images, numbers
    assert None not in [each() for each in kept]
    assert loader.fill(Foreign(room)) == 8  # without labels: those of the first call are still the latest ones
    assert kept[0]() is None and kept[1]() is not None
    images = Foreign(room)
    assert loader.fill(images) is None  # the end of an epoch: the library has not seen the address
    kept[0] = weakref.ref(images)
    del images
    assert kept[0]() is None


def test_refused_batches_go_back_later(streams: Recorder, monkeypatch: Any) -> None:
    """A batch that the library does not take back must not stay held: the stream has only some."""
    refusals = [1, 1]

    def release(batch: int, stream: Any) -> int:
        return refusals.pop() if refusals else int(lib.fdsl_batch_release(batch, stream))

    monkeypatch.setattr(_stream._BatchMemory.__del__, "__defaults__", (release, os.getpid, _array._Memory))
    wanted = [labels.tolist() for _, labels in fdsl.Loader(fdsl.Images(5, count=40, res=16), 8, num_threads=1)]
    loader = fdsl.Loader(fdsl.Images(5, count=40, res=16), 8, num_threads=1)
    refusals[:] = [1, 1]
    assert [labels.tolist() for _, labels in loader] == wanted
    assert refusals == [] and not _stream._BatchMemory._refused

    def fails(device: int, size: int) -> None:
        raise MemoryError

    memory = _stream._BatchMemory(0, {})
    memory.shared = True
    memory.handle.value = 4711
    given: list[int] = []
    with pytest.raises(MemoryError):
        memory._give_back((4711, 0, True, os.getpid()), given.append, fails)
    assert _stream._BatchMemory._refused.pop() == (4711, 0, True, os.getpid()) and given == []  # work may use the memory
    memory.handle.value = None


@pytest.mark.parametrize("stream", [None, 1, 2, 64, -1, "interface"])
def test_memory_is_used_again_after_the_work_of_consumers(streams: Recorder, stream: Any) -> None:
    """A consumer on another stream than the default one may have work in flight when its tensor ends."""
    loader = fdsl.Loader(fdsl.Images(5, count=40, res=16), 8, device=0, num_threads=1)
    images, labels = next(iter(loader))
    if stream == "interface":
        assert images.__cuda_array_interface__["data"] == (images.ptr, False)
    else:
        images.__dlpack__(stream=stream)
    streams.take()
    del images, labels
    _array.collect(everything=True)
    waits = [] if stream in (None, 1) else [("alloc", 0)]
    assert streams.take() == [*waits, ("release", None)]


def test_batches_that_are_kept_become_copies_on_the_device(streams: Recorder) -> None:
    loader = fdsl.Loader(fdsl.Images(5, count=40, res=16), 8, device=0, num_threads=1, shuffle=False)
    kept = list(loader)
    assert [call[0] for call in streams.take() if call[0] == "copy"] == ["copy"] * 6  # two arrays of three batches
    assert all(images.device == "cuda:0" for images, _ in kept)
    wanted = [content(images) for images, _ in fdsl.Loader(fdsl.Images(5, count=40, res=16), 8, shuffle=False)]
    assert [content(images) for images, _ in kept] == wanted
