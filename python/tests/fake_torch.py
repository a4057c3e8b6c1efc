"""A stand-in for the parts of PyTorch that fdsl.torch uses, for machines without PyTorch. Tensors are NumPy arrays. Its
"cuda" is host memory: streams of the library for device 0 are streams on the CPU, whose fills are executed late, when an
event or a stream is waited for. A batch that is read too early therefore has wrong values."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Iterator

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

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.cuda_stream = 4096 + 16 * len(streams)
        streams[self.cuda_stream] = self

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


_kept: list[Any] = []
streams: dict[int, Stream] = {}
default = Stream()
_current = [default]


class Tensor:
    def __init__(self, array: Any, where: str = "cpu", pinned: bool = False) -> None:
        self.array, self.where, self.pinned = array, where, pinned
        self.shape, self.dtype = array.shape, array.dtype

    def numpy(self) -> Any:
        return self.array

    def tolist(self) -> list[Any]:
        return list(self.array.tolist())

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_pinned(self) -> bool:
        return self.pinned

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.where, self.pinned)

    def _do(self, work: Callable[[], None]) -> None:
        if self.where == "cpu":
            work()
        else:
            _current[-1].work.append(work)

    def __eq__(self, value: Any) -> Any:  # as work on the stream, which reads the values when it is executed
        return lambda: self.array == value

    def masked_fill_(self, mask: Any, value: int) -> None:
        def fill() -> None:
            self.array[mask()] = value

        self._do(fill)


def empty(shape: Any, dtype: Any = None, device: Any = "cpu", pin_memory: bool = False) -> Tensor:
    assert not (pin_memory and str(device) != "cpu")
    array = numpy.full(shape, 99, dtype)
    if str(device) != "cpu":
        _kept.append(array)  # work that is executed late may write to a tensor that has ended
    return Tensor(array, str(device), pin_memory)


def from_dlpack(array: Any) -> Tensor:
    return Tensor(numpy.from_dlpack(array))


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    yield
    _current.pop()


cuda = SimpleNamespace(
    Stream=Stream, stream=_on, current_device=lambda: 0, is_available=lambda: True,
    current_stream=lambda where=None: _current[-1],
)  # fmt: skip


class Library:
    """The library, with a device 0 that is the CPU."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.fills: list[int] = []  # the CUDA streams of fdsl_stream_fill()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def fdsl_stream_begin(self, source: Any, config: Any, stream: Any) -> int:
        device, decoder, share = config.device, config.decoder, config.device_share
        if device == 0:
            config.device, config.decoder, config.device_share = -1, b"auto", -1
        status = int(self.lib.fdsl_stream_begin(source, config, stream))
        config.device, config.decoder, config.device_share = device, decoder, share
        return status

    def fdsl_stream_fill(self, stream: Any, images: int, labels: int, count: Any, cuda_stream: Any) -> int:
        if cuda_stream is None:
            return int(self.lib.fdsl_stream_fill(stream, images, labels, count, None))
        self.fills.append(cuda_stream)
        batch = ctypes.c_void_p()
        status = int(self.lib.fdsl_stream_next(stream, None, batch))
        if status:
            return status
        from fdsl._library import BatchInfoStruct, TensorStruct

        info, tensor = BatchInfoStruct(ctypes.sizeof(BatchInfoStruct)), TensorStruct()
        self.lib.fdsl_batch_describe(batch, info)
        count.value = info.count
        parts = []
        for field, to in enumerate((images, labels)):
            self.lib.fdsl_batch_tensor(batch, field, tensor)
            extents = (ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)
            parts.append((to, ctypes.string_at(tensor.data, int(numpy.prod(list(extents))) * tensor.bits // 8)))
        self.lib.fdsl_batch_release(batch, None)
        streams[cuda_stream].work.extend(lambda to=to, data=data: ctypes.memmove(to, data, len(data)) for to, data in parts)
        return 0


def install() -> ModuleType:
    """Imports fdsl.torch with this module as PyTorch. Returns fdsl.torch."""
    assert "torch" not in sys.modules
    sys.modules["torch"] = sys.modules[__name__]
    try:
        import fdsl.torch
    finally:
        del sys.modules["torch"]
    return fdsl.torch
