"""Arrays in memory of the library, on the CPU or a CUDA device, and their export through DLPack."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from collections import deque
from collections.abc import Sequence
from ctypes import c_int64, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NoReturn, Optional

from ._library import CPU, TensorStruct, check, lib

if TYPE_CHECKING:
    import numpy

# Per element type: bytes per element, type string of array interfaces, and type code of DLPack. NumPy has no bfloat16
# and gets the bits as uint16.
_ELEMENTS = {
    "uint8": (1, "|u1", 1), "float16": (2, "<f2", 2), "bfloat16": (2, "<u2", 4), "float32": (4, "<f4", 2), "int64": (8, "<i8", 0),
    "uint64": (8, "<u8", 1),
}  # fmt: skip
_FORMATS = {"uint8": "B", "float16": "e", "bfloat16": "H", "float32": "f", "int64": "q", "uint64": "Q"}  # for struct
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_LEGACY_STREAM = 1  # CUDA's default stream in DLPack and array interfaces; NULL in libfdsl


def device_name(device: int) -> str:
    """Returns "cpu" or "cuda:N" for a device number of the library."""
    return "cpu" if device == CPU else f"cuda:{device}"


class _Memory:
    """Memory on a device, freed with the object."""

    __slots__ = ("device", "pointer", "process", "shared")

    def __init__(self, device: int, size: int) -> None:
        self.device, self.pointer, self.process = device, 0, os.getpid()
        self.shared = False  # whether work on unknown CUDA streams may use the memory
        memory = c_void_p()
        status = lib.fdsl_alloc(device, size, memory)
        if status and collect(everything=True):
            status = lib.fdsl_alloc(device, size, memory)
        check(status)
        self.pointer = memory.value or 0

    def __del__(self, free: Any = lib.fdsl_free, getpid: Any = os.getpid) -> None:
        if self.device == CPU or getpid() == self.process:  # a forked child cannot use CUDA
            free(self.device, self.pointer)

    def __reduce__(self) -> NoReturn:  # a copy of the address would free the memory twice
        raise TypeError("fdsl.Array: it can be neither pickled nor copied; use its numpy(), or pickle the generator or loader")


# ---- DLPack ----


class _Legacy(ctypes.Structure):
    """DLManagedTensor"""

    capsule = b"dltensor"
    _fields_ = [("tensor", TensorStruct), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned"""

    capsule = b"dltensor_versioned"
    _fields_ = [
        ("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
        ("flags", c_uint64), ("tensor", TensorStruct),
    ]  # fmt: skip


_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, [c_void_p, ctypes.c_char_p, c_void_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]

# The consumer of a tensor may call its deleter on any thread, and even after the interpreter has ended. The call may
# also come while an exception is set, because a temporary tensor dies when a call fails. A Python function cannot run
# then: it would, for example, turn the exception into a SystemError. The deleter is therefore time() of the C library,
# which overwrites the first 8 bytes of the struct. collect() finds the change and frees the memory.
_DELETER = ctypes.cast(ctypes.CDLL(None).time, c_void_p).value


class _Export:
    """Keeps memory alive for a capsule, or for a tensor that was created from the capsule."""

    __slots__ = ("managed", "extents", "mark", "before", "capsule", "memory")

    def __init__(self, kind: Any, array: Array, copied: bool) -> None:
        size, _, code = _ELEMENTS[array.dtype]
        rank = len(array.shape)
        strides = [math.prod(array.shape[i + 1 :]) for i in range(rank)]
        self.extents = (c_int64 * (2 * rank))(*array.shape, *strides)
        self.memory: Optional[_Memory] = array._memory
        address = ctypes.addressof(self.extents)
        on_cpu = array._device == CPU
        self.managed = kind(deleter=_DELETER)
        self.managed.tensor = TensorStruct(
            array.ptr, _DLPACK_CPU if on_cpu else _DLPACK_CUDA, 0 if on_cpu else array._device,
            rank, code, 8 * size, 1, address, address + 8 * rank, 0,
        )  # fmt: skip
        if kind is _Versioned:
            self.managed.major, self.managed.flags = 1, 2 if copied else 0  # DLPACK_FLAG_BITMASK_IS_COPIED
        self.mark = c_uint64.from_buffer(self.managed)
        self.before = self.mark.value
        self.capsule = _capsule_new(ctypes.addressof(self.managed), kind.capsule, None)

    # Names are bound as defaults because this also runs while the interpreter clears its modules.
    def ended(self, references: Any = sys.getrefcount, is_valid: Any = _capsule_is_valid) -> bool:
        """Returns whether the memory may be freed: the consumer called the deleter, or dropped the capsule unused."""
        if self.mark.value != self.before:
            return True
        return references(self.capsule) <= 2 and bool(is_valid(self.capsule, self.managed.capsule))


# Tensors and capsules may outlive this module, so the structs that they point to are never freed at exit.
_exports: deque[_Export] = deque()
_KEPT_AT_EXIT = ctypes.py_object((_exports, _Legacy.capsule, _Versioned.capsule))
ctypes.pythonapi.Py_IncRef(_KEPT_AT_EXIT)


def collect(everything: bool = False, exports: deque[_Export] = _exports) -> int:
    """Frees the memory of exports that have ended, and returns the number of these exports.

    Unless `everything` is true, looks at up to 16 exports, so that a call is cheap even if thousands of tensors are
    alive. Thread-safe.
    """
    freed = 0
    for _ in range(len(exports) if everything else min(len(exports), 16)):
        try:
            export = exports.popleft()
        except IndexError:  # another thread has removed the last export
            break
        if export.ended():
            freed += 1
        else:
            exports.append(export)
    return freed


# ---- Arrays ----


class Array:
    """A contiguous array in memory of the library, on the CPU or on a CUDA device.

    Generator.generate() and Loader create arrays. Other libraries can use the memory of an array without a copy, through DLPack
    (torch.from_dlpack(), numpy.from_dlpack(), cupy.from_dlpack(), jax.dlpack.from_dlpack()), through
    __array_interface__ (CPU) or through __cuda_array_interface__ (version 3).

    The memory stays valid as long as the array or any tensor made from it exists, even after the generator or the loader
    is closed.
    If DLPack was used, the memory is not freed when the last tensor ends, but when the package next creates, exports
    or frees an array. Thread-safe. Only the caller changes the contents, with Generator.fill() or another library.

    Attributes: shape (a tuple of ints), dtype ("uint8", "float16", "bfloat16", "float32" or "int64"), device
    ("cpu" or "cuda:N"), ptr (the address, an int) and nbytes.
    """

    __slots__ = ("shape", "dtype", "ptr", "nbytes", "_device", "_memory", "_stream", "_stream_owner", "__weakref__")

    def __init__(
        self, shape: tuple[int, ...], dtype: str, device: int, stream: int = 0, owner: object = None,
        memory: Optional[_Memory] = None, ptr: Optional[int] = 0,
    ) -> None:  # fmt: skip
        if _exports:  # seldom; a call takes longer than this
            collect()
        self.shape, self.dtype, self._device = shape, dtype, device
        self.nbytes = math.prod(shape) * _ELEMENTS[dtype][0]
        self._memory = memory or _Memory(device, max(self.nbytes, 1))
        self.ptr = ptr or self._memory.pointer
        self._stream, self._stream_owner = stream, owner  # the stream of the work that fills the array

    def __del__(self, exports: deque[_Export] = _exports, collect: Any = collect) -> None:
        if exports:
            collect()

    @property
    def device(self) -> str:
        """The device, "cpu" or "cuda:N"."""
        return device_name(self._device)

    def __len__(self) -> int:
        return self.shape[0]

    def __reduce__(self) -> NoReturn:
        self._memory.__reduce__()

    def __repr__(self) -> str:
        return f"fdsl.Array(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"

    def _copy(self, device: int) -> Array:
        """Returns a copy on `device` (the CPU, or the device of this array). Waits until the copy is complete."""
        array = Array(self.shape, self.dtype, device)
        check(lib.fdsl_copy(max(device, self._device), array.ptr, self.ptr, self.nbytes, self._stream))
        return array

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """Returns a NumPy array: on the CPU, a view of this memory; for a CUDA device, a copy. The copy waits for
        the work that fills the array.

        bfloat16 becomes uint16 with the same bits. Raises ImportError without NumPy, Error if the copy fails.
        """
        try:
            import numpy
        except ModuleNotFoundError:
            raise ImportError("numpy(): NumPy is not installed; install fdsl[numpy], or use tolist()") from None

        return numpy.asarray(self if self._device == CPU else self._copy(CPU))

    def tolist(self) -> list[Any]:
        """Waits for the work that fills the array. Returns the elements as nested lists of numbers. Needs no NumPy.

        Use it for small arrays such as labels. Raises Error if the copy from a CUDA device fails.
        """
        array = self if self._device == CPU else self._copy(CPU)
        number = math.prod(self.shape)
        values: Any = struct.unpack(f"<{number}{_FORMATS[self.dtype]}", ctypes.string_at(array.ptr, array.nbytes))
        if self.dtype == "bfloat16":  # the upper half of a float32
            values = struct.unpack(f"<{number}f", struct.pack(f"<{number}I", *(bits << 16 for bits in values)))
        for extent in reversed(self.shape[1:]):
            values = [list(values[i : i + extent]) for i in range(0, len(values), extent)]
        return list(values)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._device != CPU:
            raise AttributeError("__array_interface__: the array is on a CUDA device; use numpy() for a copy")
        return {"version": 3, "shape": self.shape, "typestr": _ELEMENTS[self.dtype][1], "data": (self.ptr, False)}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device == CPU:
            raise AttributeError("__cuda_array_interface__: the array is on the CPU")
        self._memory.shared = True  # the interface does not tell on which stream the consumer works
        typestr, stream = _ELEMENTS[self.dtype][1], self._stream or _LEGACY_STREAM
        return {"version": 3, "shape": self.shape, "typestr": typestr, "data": (self.ptr, False), "stream": stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the device type of DLPack (1: CPU, 2: CUDA) and the device number."""
        return (_DLPACK_CPU, 0) if self._device == CPU else (_DLPACK_CUDA, self._device)

    def __dlpack__(
        self, *, stream: Optional[int] = None, max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None, copy: Optional[bool] = None,
    ) -> Any:  # fmt: skip
        """Returns a DLPack capsule of the array, without a copy unless the arguments request one.

        stream: the consumer's CUDA stream, which then waits for the work that fills the array. None or 1: the legacy
        default stream; 2: the per-thread default stream; -1: no synchronisation. On the CPU, None or -1.
        max_version: the highest DLPack version of the consumer; (1, 0) or higher returns a "dltensor_versioned".
        dl_device: the device of the result: the CPU or the array's device (None). copy: True always copies, False never.

        A capsule can be consumed once; each call returns a new one. Raises BufferError if the request cannot be met,
        ValueError for a stream that DLPack does not allow, and TypeError for an argument of the wrong type.
        """
        for name, pair in ("dl_device", dl_device), ("max_version", max_version):
            if pair is not None and not (isinstance(pair, Sequence) and [isinstance(n, int) for n in pair] == [True] * 2):
                raise TypeError(f"{name}: it must be None or two integers, not {pair!r}")
        if stream is not None and not isinstance(stream, int):
            raise TypeError(f"stream: it must be None or an int, not {type(stream).__name__}")
        here = self.__dlpack_device__()
        target = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target != here and (target != (_DLPACK_CPU, 0) or copy is False):
            raise BufferError(
                f"dl_device: {target} is not the device of the array, {here}; arrays can only be copied to the CPU, "
                "and not with copy=False"
            )
        if stream is not None and (stream != -1 if self._device == CPU else stream < -1 or stream == 0):
            raise ValueError(f"stream: {stream} is not a stream of DLPack for an array on {self.device}")
        array = self._copy(CPU if target[0] == _DLPACK_CPU else self._device) if copy or target != here else self
        consumer, producer = stream or _LEGACY_STREAM, array._stream or _LEGACY_STREAM
        if array._device != CPU and consumer != producer:
            array._memory.shared = True
            if consumer != -1:
                check(lib.fdsl_order(array._device, array._stream, consumer))
        collect()
        kind = _Versioned if max_version is not None and max_version[0] >= 1 else _Legacy
        export = _Export(kind, array, copied=array is not self)
        capsule = export.capsule  # kept, because collect() in another thread may drop the export
        _exports.append(export)
        return capsule
