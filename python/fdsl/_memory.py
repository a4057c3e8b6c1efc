"""Finds the address, shape, element type, device and stream of the caller's arrays: PyTorch tensors, CuPy and NumPy
arrays, fdsl.Array, and anything with __cuda_array_interface__, __array_interface__ or the buffer protocol."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from ._array import Array, device_name
from ._library import CPU, check, lib

SOME_CUDA_DEVICE = -2  # __cuda_array_interface__ does not name the device; the library checks the address

# (address, shape, name of the element type, device number)
Description = tuple[int, tuple[int, ...], str, int]


class Kind(NamedTuple):
    """The functions that describe arrays of one type."""

    describe: Callable[[str, Any, bool], Description]  # (argument's name, array, whether it will be written)
    stream: Callable[[Any], int]  # the stream on which to write the array
    owner: Callable[[Any], object]  # an object that keeps this stream alive
    repeat: Optional[Callable[[Sequence[Any]], Callable[[], bool]]] = None  # see _torch_describer()


_kinds: dict[type, Kind] = {}


def kind_of(name: str, array: object) -> Kind:
    """Returns the functions that describe `array`, the argument `name`. Raises TypeError if its type is not
    supported."""
    kind = _kinds.get(type(array))
    if kind is None:
        kind = _kinds[type(array)] = _find_kind(name, array)
    return kind


def _find_kind(name: str, array: object) -> Kind:
    modules = {base.__module__.partition(".")[0]: base.__name__ for base in type(array).__mro__}
    if "jax" in modules or "jaxlib" in modules:
        raise TypeError(f"{name}: JAX arrays are immutable; use generate() and jax.dlpack.from_dlpack()")
    if isinstance(array, Array):
        return Kind(
            lambda name, own, write: (own.ptr, own.shape, own.dtype, own._device), lambda own: own._stream, lambda own: own._stream_owner
        )
    if modules.get("torch") in ("Tensor", "_TensorBase", "TensorBase"):
        describe, repeat = _torch_describer(name)
        torch = sys.modules["torch"]
        raw = raw_torch_stream(torch)
        current: Callable[[Any], object] = lambda tensor: torch.cuda.current_stream(tensor.get_device())
        return Kind(describe, lambda tensor: raw(tensor.get_device()), current, repeat)
    if hasattr(array, "__cuda_array_interface__"):
        if "cupy" in modules:
            return Kind(_describe_interface, lambda own: _cupy_stream(own).ptr, _cupy_stream)
        return Kind(_describe_interface, lambda own: own.__cuda_array_interface__.get("stream") or 0, lambda own: own)
    if modules.get("numpy") != "generic":  # the interface of a NumPy scalar describes a temporary copy
        if hasattr(array, "__array_interface__"):
            return Kind(_describe_interface, lambda own: 0, lambda own: None)
        try:
            memoryview(array)  # type: ignore[arg-type]
            return Kind(_describe_buffer, lambda own: 0, lambda own: None)
        except TypeError:
            pass
    raise TypeError(
        f"{name}: {type(array).__name__} is not an array; give a PyTorch tensor, a CuPy or NumPy array, fdsl.Array, "
        "or an object with __cuda_array_interface__, __array_interface__ or the buffer protocol"
    )


def check_kind(name: str, dtype: str, device: int, dtypes: tuple[str, ...], own: int, owner: str) -> None:
    """Raises an error if an argument is not on the device `own` of `owner`, or has another element type."""
    if device != own and not (device == SOME_CUDA_DEVICE and own != CPU):
        where = "a CUDA device" if device == SOME_CUDA_DEVICE else device_name(device)
        raise ValueError(f"{name}: it is on {where}, but the {owner} is on {device_name(own)}")
    if dtype not in dtypes:
        raise ValueError(f"{name}: its elements are {dtype}, not {' or '.join(dtypes)}")


def order_arrays(device: int, stream: int, owner: Callable[[], object], *arrays: Any) -> None:
    """Makes a CUDA stream, which is not being captured, wait for earlier work on the arrays of this package. `owner`
    returns the object that keeps the stream alive."""
    for array in arrays:
        if isinstance(array, Array):
            if array._stream != stream:
                check(lib.fdsl_order(device, array._stream, stream))
            array._stream, array._stream_owner = stream, owner()


# ---- PyTorch ----


def old_torch(torch: Any) -> str:
    """Returns why this version of PyTorch is refused, or an empty string. Only increment_version() tells autograd that
    a tensor was overwritten; PyTorch has it since version 2.1."""
    if hasattr(getattr(torch.autograd, "graph", None), "increment_version"):
        return ""
    return (
        f"PyTorch {torch.__version__} would not notice that a batch was overwritten before its backward pass, and would "
        "compute wrong gradients; install PyTorch 2.1 or newer"
    )


def _torch_describer(
    name: str,
) -> tuple[Callable[[str, Any, bool], Description], Callable[[Sequence[Any]], Callable[[], bool]]]:
    """Returns the function that describes tensors. The second one takes tensors that were described, and returns a function
    that says whether the description of all still holds and, if so, marks them as written. It takes a third of the time."""
    torch = sys.modules["torch"]
    if reason := old_torch(torch):
        raise TypeError(f"{name}: {reason}")
    # Autograd compares version numbers to detect that a tensor saved for the backward pass was overwritten.
    increment_version = torch.autograd.graph.increment_version
    scratch = torch.empty(0)
    try:  # the function below increment_version(), which takes a quarter of its time; PyTorch 2.1 has another one
        torch._C._increment_version((scratch,))
        direct = scratch._version == 1
    except (AttributeError, RuntimeError, TypeError):
        direct = False
    dtypes: dict[Any, str] = {}
    increment = torch._C._increment_version if direct else lambda tensors: [increment_version(tensor) for tensor in tensors]

    def describe(name: str, tensor: Any, write: bool) -> Description:
        if tensor.is_cuda:
            device = tensor.get_device()
        elif tensor.is_cpu:
            device = CPU
        else:
            raise ValueError(f"{name}: a tensor on {tensor.device} is neither on the CPU nor on a CUDA device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous")
        if tensor.is_neg():  # its memory stores the negated values
            raise ValueError(f"{name}: it is a negated view; give {name}.resolve_neg()")
        if write:
            if tensor.requires_grad:
                raise ValueError(f"{name}: it requires a gradient; give a tensor without one, such as {name}.detach()")
            increment((tensor,))
        dtype = dtypes.get(tensor.dtype)
        if dtype is None:
            dtype = dtypes[tensor.dtype] = str(tensor.dtype).rpartition(".")[2]
        return tensor.data_ptr(), tensor.shape, dtype, device

    def repeat(tensors: Sequence[Any]) -> Callable[[], bool]:
        checks = [(tensor, tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        written = tuple(tensors)

        def again() -> bool:
            for tensor, address, shape, dtype in checks:
                if (
                    tensor.data_ptr() != address
                    or tensor.shape != shape
                    or tensor.dtype is not dtype
                    or tensor.requires_grad
                    or tensor.is_neg()
                    or not tensor.is_contiguous()
                ):
                    return False
            increment(written)
            return True

        return again

    return describe, repeat


def raw_torch_stream(torch: Any) -> Callable[[int], int]:
    """Returns a function that returns the address of the current stream of a device."""
    # PyTorch's compilers use this function, too. It takes a tenth of the time of current_stream(). Builds without CUDA
    # lack it.
    raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


# ---- Array interfaces and buffers ----

# Element types by the type strings of array interfaces (without the byte order) and by the formats of buffers
_TYPES = {
    "u1": "uint8", "u2": "uint16", "u8": "uint64", "i8": "int64", "f2": "float16", "V2": "bfloat16", "f4": "float32",
    "B": "uint8", "H": "uint16", "L": "uint64", "Q": "uint64", "l": "int64", "q": "int64",
    "e": "float16", "f": "float32",
}  # fmt: skip


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


def _describe_interface(name: str, array: Any, write: bool) -> Description:
    on_cuda = hasattr(array, "__cuda_array_interface__")
    interface = array.__cuda_array_interface__ if on_cuda else array.__array_interface__
    data, typestr, shape, strides = (interface.get(key) for key in ("data", "typestr", "shape", "strides"))
    if interface.get("mask") is not None:
        raise ValueError(f"{name}: masked arrays are not supported")
    if not isinstance(data, tuple):
        return _describe_buffer(name, array if data is None else data, write)
    if strides is not None and not _is_contiguous(shape, strides, int(typestr[2:])):
        raise ValueError(f"{name}: it is not contiguous")
    if write and data[1]:
        raise ValueError(f"{name}: it is read-only")
    dtype = typestr if typestr[0] == ">" else _TYPES.get(typestr[1:], typestr)
    return data[0] or 0, shape, dtype, SOME_CUDA_DEVICE if on_cuda else CPU


def _cupy_stream(array: Any) -> Any:
    return sys.modules["cupy"].cuda.get_current_stream(array.device.id)


def _describe_buffer(name: str, buffer: Any, write: bool) -> Description:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name}: it is not contiguous")
    if view.readonly:
        if write:
            raise ValueError(f"{name}: it is read-only")
        raise TypeError(f"{name}: read-only buffers are not supported; give a list or a NumPy array")
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
    return address, view.shape or (), _TYPES.get(view.format.lstrip("@=<"), view.format), CPU


# ---- Streams ----


def stream_pointer(stream: object, device: int) -> int:
    """Returns the address of a CUDA stream: an int, a torch.cuda.Stream, a CuPy stream, or an object with
    __cuda_stream__(). Raises ValueError if it belongs to another device, and TypeError for any other object."""
    number: Optional[int] = None
    for attribute in ("device_index", "device_id"):  # PyTorch, CuPy
        number = getattr(stream, attribute, number)
    if number is not None and number >= 0 and number != device:
        raise ValueError(f"stream: it belongs to CUDA device {number}, not {device}")
    pointer: Any = stream
    if hasattr(stream, "cuda_stream"):
        pointer = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        pointer = stream.ptr
    elif hasattr(stream, "__cuda_stream__"):
        pointer = stream.__cuda_stream__()[1]
    if isinstance(pointer, bool) or not isinstance(pointer, int):
        raise TypeError(f"stream: it must be an int, a torch.cuda.Stream or a CuPy stream, not {type(stream).__name__}")
    if not 0 <= pointer < 1 << 64:
        raise ValueError(f"stream: {pointer} is not the address of a stream")
    return int(pointer)
