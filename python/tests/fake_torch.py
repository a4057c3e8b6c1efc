"""A stand-in for the parts of PyTorch that fdsl.torch.StreamLoader uses, for machines without PyTorch. Tensors are NumPy
arrays. Its "cuda" is host memory; work on streams is executed late: when an event or a stream is waited for. A batch that
is read or overwritten too early therefore has wrong values."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import numpy

__version__ = "2.99.0"
autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=None))
uint8, float16, float32, int64 = (numpy.dtype(name) for name in ("uint8", "float16", "float32", "int64"))
dtype = numpy.dtype


class device:
    def __init__(self, kind: Any, index: Any = None) -> None:
        kind, _, number = str(kind).partition(":")
        self.type, self.index = kind, int(number) if number else index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Stream:
    """Work that was enqueued and not executed yet."""

    def __init__(self, where: Any = None, priority: int = 0) -> None:
        self.work: list[Callable[[], None]] = []

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class Event:
    def __init__(self) -> None:
        self.stream, self.work = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.done = False

        def end() -> None:
            self.done = True

        stream.work.append(end)

    def synchronize(self) -> None:
        while self.stream.work and not self.done:
            self.stream.work.pop(0)()


default = Stream()
_current = [default]


class Tensor:
    def __init__(self, array: Any, where: str = "cpu", pinned: bool = False) -> None:
        self.array, self.where, self.pinned = array, where, pinned
        self.users: list[Stream] = []
        self.shape, self.dtype = array.shape, array.dtype

    def numpy(self) -> Any:
        return self.array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.where, self.pinned)

    def to(self, where: device, non_blocking: bool = False) -> Tensor:
        assert self.pinned and non_blocking, "the copy would wait"
        copy = Tensor(numpy.full_like(self.array, 99), str(where))
        _current[-1].work.append(lambda: numpy.copyto(copy.array, self.array))
        return copy

    def __eq__(self, value: Any) -> Any:  # as work on the stream, which reads the values when it is executed
        return lambda: self.array == value

    def masked_fill_(self, mask: Any, value: int) -> None:
        def fill() -> None:
            self.array[mask()] = value

        _current[-1].work.append(fill)

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)


def empty(shape: Any, dtype: Any = None, device: str = "cpu", pin_memory: bool = False) -> Tensor:
    return Tensor(numpy.empty(shape, dtype), pinned=pin_memory)


def from_dlpack(array: Any) -> Tensor:
    return Tensor(numpy.from_dlpack(array))


@contextlib.contextmanager
def _on(stream: Stream) -> Any:
    _current.append(stream)
    yield
    _current.pop()


cuda = SimpleNamespace(
    Stream=Stream, Event=Event, current_device=lambda: 0, current_stream=lambda where=None: _current[-1], stream=_on,
    device=lambda where: contextlib.nullcontext(),
)  # fmt: skip


def install() -> None:
    """Makes `import torch` find this module."""
    module: ModuleType = sys.modules[__name__]
    sys.modules["torch"] = module
