"""Tests which CUDA calls the package makes, without a GPU. A generator on the CPU acts as a generator on device 0, and
the calls to the library are recorded."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Iterator

import pytest
from conftest import content, small

import fdsl
from fdsl import _array, _generator
from fdsl._library import lib

DEVICE_FIRST = ("fdsl_alloc", "fdsl_free", "fdsl_copy", "fdsl_wait", "fdsl_order")
STREAMS_LAST = {"fdsl_copy": 1, "fdsl_wait": 1, "fdsl_order": 2}  # function: number of streams at the end


class Recorder:
    """Replaces the library: records calls, and redirects calls for device 0 or with a stream to the CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(lib, name)

        def call(*arguments: Any) -> Any:
            streams = STREAMS_LAST.get(name, 0)
            if streams:
                self.calls.append((name[5:], *(one for one in arguments if not isinstance(one, ctypes._Pointer))))
            if name.startswith("fdsl_generate"):
                self.calls.append((name[5:], arguments[-1]))
                streams = 1
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


def test_loader_on_cuda(monkeypatch: Any) -> None:
    """Tests prefetching, events and streams, with replacements for the events and streams of PyTorch."""
    torch = pytest.importorskip("torch", minversion="2.1")
    import fdsl.torch as module

    log: list[tuple[Any, ...]] = []
    current = ["main"]

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            log.append(("synchronize", self.name))

    class Stream:
        def __init__(self, name: Any = "side", priority: int = 0) -> None:
            self.name = "main" if name == "main" else "side"
            assert priority == 0

        def record_event(self) -> Event:
            return Event(f"{self.name} {sum(entry[0] == 'make' for entry in log)}")

        def wait_event(self, event: Event) -> None:
            log.append(("wait", self.name, event.name))

    class Tensor:
        def record_stream(self, stream: Stream) -> None:
            assert stream.name == "main"
            log.append(("record",))

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    def maker(loader: Any, epoch: int) -> Any:
        def make(step: int) -> Any:
            assert current[-1] == "side"
            log.append(("make", step))
            return Tensor(), Tensor()

        return make

    monkeypatch.setattr(module, "_maker", maker)
    for name, value in (
        ("Stream", Stream), ("stream", use), ("current_stream", lambda device: Stream("main")),
        ("device", lambda device: contextlib.nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    g = small()
    g._device = 0
    try:
        for prefetch in (0, 1, 3):
            log.clear()
            loader = module.Loader(g, 6, prefetch=prefetch)
            for received, batch in enumerate(loader):
                made = [entry[1] for entry in log if entry[0] == "make"]
                assert made == list(range(min(received + 1 + prefetch, 6))) and current == ["main"]
                waits = [entry for entry in log if entry[0] == "wait"]
                assert waits[-1] == ("wait", "main", f"side {received + 1}") and len(waits) == received + 1
                assert sum(entry[0] == "record" for entry in log) == 2 * (received + 1)
                assert sum(entry[0] == "synchronize" for entry in log) == max(0, received - prefetch - 1)
                assert (loader.epoch, loader._step) == ((1, 0) if received == 5 else (0, received + 1))
    finally:
        g._device = -1
