"""Tests arrays: DLPack, array interfaces, lifetimes and memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import random
import threading
import weakref
from typing import Any

import pytest
from conftest import COUNT, content, resident_bytes, run_python, small

import fdsl
from fdsl import _array

numpy = pytest.importorskip("numpy")


def outstanding() -> int:
    """Returns the number of exports that are alive after the package has checked all of them."""
    gc.collect()
    _array.collect(everything=True)
    return len(_array._exports)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = outstanding()
    yield
    assert outstanding() == before


def images_of(**changes: Any) -> tuple[fdsl.Array, fdsl.Array]:
    with small(out_res=24, **changes) as g:
        return g.generate(3, 8)


def test_arrays_outlive_their_generator() -> None:
    images, labels = images_of()
    assert images.shape == (8, 1, 24, 24) and len(images) == 8 and images.nbytes == 8 * 576 and images.ptr % 64 == 0
    assert labels.numpy().tolist() == [3, 4, 5, 6, 0, 1, 2, 3]
    assert repr(labels) == "fdsl.Array(shape=(8,), dtype='int64', device='cpu')"


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_numpy_shares_the_memory(dtype: str, layout: str) -> None:
    images, labels = images_of(dtype=dtype, layout=layout, channels=3)
    for view in numpy.from_dlpack(images), images.numpy(), numpy.asarray(images):
        assert view.ctypes.data == images.ptr and view.shape == images.shape and view.dtype == dtype
        assert view.flags.c_contiguous and view.tobytes() == content(images)
    assert (numpy.from_dlpack(labels) == labels.numpy()).all()


def test_bfloat16_is_uint16_bits_in_numpy() -> None:
    images, _ = images_of(dtype="bf16")
    wide = images_of(dtype="f32")[0].numpy()
    bits = images.numpy()
    assert images.dtype == "bfloat16" and bits.dtype == "uint16" and bits.ctypes.data == images.ptr
    assert numpy.abs((bits.astype("uint32") << 16).view("float32") - wide).max() < 1 / 256
    with pytest.raises((RuntimeError, BufferError, TypeError)):  # NumPy has no bfloat16; NumPy's own error is raised
        numpy.from_dlpack(images)


class Header(ctypes.Structure):
    """The tensor in a capsule. The tests read it like a consumer."""

    _fields_ = _array.TensorStruct._fields_


def pointer_of(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def test_capsules() -> None:
    images, _ = images_of(dtype="bf16", channels=3)
    assert images.__dlpack_device__() == (1, 0)
    legacy = Header.from_address(pointer_of(images.__dlpack__(), b"dltensor"))
    for version in (None, (0, 8)):
        capsule = images.__dlpack__(max_version=version)
        legacy = Header.from_address(pointer_of(capsule, b"dltensor"))
        about = legacy.device_type, legacy.ndim, legacy.code, legacy.bits, legacy.lanes
        assert legacy.data == images.ptr and about == (1, 4, 4, 16, 1)
        extents = (ctypes.c_int64 * 4).from_address(legacy.shape), (ctypes.c_int64 * 4).from_address(legacy.strides)
        assert [list(one) for one in extents] == [[8, 3, 24, 24], [3 * 576, 576, 24, 1]]
    for version in ((1, 0), (1, 3), (2, 0)):
        capsule = images.__dlpack__(max_version=version)
        address = pointer_of(capsule, b"dltensor_versioned")
        assert (ctypes.c_uint32 * 2).from_address(address)[:] == [1, 0]
        assert ctypes.c_uint64.from_address(address + 24).value == 0  # flags
        assert Header.from_address(address + 32).data == images.ptr


def test_requests_of_consumers() -> None:
    images, _ = images_of()
    copy = numpy.from_dlpack(Request(images, copy=True))
    assert copy.ctypes.data != images.ptr and copy.tobytes() == content(images)
    flags = pointer_of(capsule := images.__dlpack__(copy=True, max_version=(1, 0)), b"dltensor_versioned") + 24
    assert ctypes.c_uint64.from_address(flags).value == 2
    del capsule
    assert numpy.from_dlpack(Request(images, copy=False, dl_device=(1, 0))).ctypes.data == images.ptr
    assert numpy.from_dlpack(Request(images, stream=-1)).ctypes.data == images.ptr
    with pytest.raises(BufferError, match="dl_device: .2, 0. is not the device"):
        images.__dlpack__(dl_device=(2, 0))
    for stream in (0, 1, 2, 77, -2):
        with pytest.raises(ValueError, match=f"stream: {stream} is not a stream of DLPack"):
            images.__dlpack__(stream=stream)


class Request:
    """An array that is exported with given arguments."""

    def __init__(self, array: fdsl.Array, **arguments: Any) -> None:
        self.array, self.arguments = array, arguments

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__(**self.arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_each_device_has_its_array_interface() -> None:
    images, _ = images_of()
    assert images.__array_interface__["data"] == (images.ptr, False)
    assert not hasattr(images, "__cuda_array_interface__")


# ---- Lifetimes ----


def test_tensors_keep_the_memory() -> None:
    images, _ = images_of()
    memory, expected = weakref.ref(images), content(images)
    views = [numpy.from_dlpack(images), images.numpy(), numpy.from_dlpack(images)]
    del images
    gc.collect()
    images_of()  # this call would use the memory again if it were free
    assert all(view.tobytes() == expected for view in views)
    before = outstanding()
    del views[2], views[0]
    assert outstanding() == before - 2
    views.clear()
    assert memory() is None


def freed(monkeypatch: Any) -> list[int]:
    """Returns a list to which the address of each freed block of memory is appended."""
    addresses: list[int] = []
    original = _array._Memory.__del__

    def record(memory: Any) -> None:
        addresses.append(memory.pointer)
        original(memory)

    monkeypatch.setattr(_array._Memory, "__del__", record)
    return addresses


def test_memory_is_freed_once_and_after_its_last_user(monkeypatch: Any) -> None:
    addresses = freed(monkeypatch)
    images, labels = images_of()
    pointer, label_pointer = images.ptr, labels.ptr
    view = numpy.from_dlpack(images)
    capsule = images.__dlpack__()
    del images, labels
    outstanding()
    assert addresses == [label_pointer]
    del view
    outstanding()
    assert addresses == [label_pointer]  # the capsule can still be consumed
    del capsule
    outstanding()
    assert addresses == [label_pointer, pointer]


@pytest.mark.parametrize("living", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("order", ["first", "last", "random"])
def test_dropped_arrays_are_freed_while_earlier_ones_live(living: int, order: str, monkeypatch: Any) -> None:
    """Tensors that are dropped in any order keep no memory, however many earlier ones are alive."""
    addresses = freed(monkeypatch)
    outstanding()
    addresses.clear()
    made, dropped = 0, 0
    chance = random.Random(living)
    with small(res=8, batch=1) as g:
        earlier = [numpy.from_dlpack(g.generate()[0]) for _ in range(living)]
        window: list[Any] = []
        for _ in range(300):
            window.append(numpy.from_dlpack(g.generate()[0]))
            made += 1
            if len(window) > 8:
                window.pop({"first": 0, "last": -1, "random": chance.randrange(9)}[order])
                dropped += 1
            kept = living + made - (len(addresses) - made - living)  # images; the labels of each call are freed at once
            assert kept <= living + len(window) + 32, f"{dropped} of {made} were dropped, {kept} are kept"
        assert len(_array._exports) <= living + len(window) + 32
        del earlier, window
        outstanding()
        assert len(addresses) == 2 * (made + living)


def test_unconsumed_capsules_free_their_memory(monkeypatch: Any) -> None:
    images, labels = images_of()
    addresses = freed(monkeypatch)
    pointer = images.ptr
    for version in (None, (1, 0)):
        images.__dlpack__(max_version=version)
    capsule = images.__dlpack__(max_version=(1, 0))
    del images, capsule
    labels.__dlpack__()  # exporting any array frees memory that has no user
    assert addresses == [pointer]


def test_a_capsule_is_consumed_once() -> None:
    images, _ = images_of()
    capsule = images.__dlpack__()

    class Once:
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    view = numpy.from_dlpack(Once())
    assert view.ctypes.data == images.ptr
    with pytest.raises(Exception):
        numpy.from_dlpack(Once())
    del view, capsule


def test_deleters_run_in_other_threads() -> None:
    images, _ = images_of()
    views = [numpy.from_dlpack(images) for _ in range(200)]

    def drop() -> None:
        while views:
            try:
                views.pop()
            except IndexError:
                return
            numpy.from_dlpack(images)

    threads = [threading.Thread(target=drop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not views


def test_exit_with_everything_alive() -> None:
    """The interpreter exits cleanly while tensors, capsules and generators are alive in globals, threads and cycles."""
    code = """
import threading, time, numpy, fdsl
g = fdsl.Generator(5, res=32, batch=4)
images, labels = g.generate(0)
view, capsule = numpy.from_dlpack(images), labels.__dlpack__()
cycle = [images, view]; cycle.append(cycle)
class Late:
    def __del__(self, array=images, convert=numpy.from_dlpack): convert(array).sum()
import sys; sys.late = Late()
def loop():
    while True: numpy.from_dlpack(g.generate(0)[0]).sum()
threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(5):
        done = run_python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def grows(action: Any, rounds: int) -> int:
    """Returns the number of bytes by which the process grows in the last nine tenths of the rounds."""
    for _ in range(rounds // 10):
        action()
    before = resident_bytes()
    for _ in range(rounds - rounds // 10):
        action()
    return resident_bytes() - before


def test_memory_stays_flat() -> None:
    with small(out_res=64, dtype="float32", batch=16) as g:  # 256 KiB per batch

        def export() -> None:
            images, labels = g.generate(0, 16)
            numpy.from_dlpack(images)
            images.__dlpack__(max_version=(1, 0))
            labels.numpy()

        assert grows(export, 1000) < 4 << 20

    with small(res=1, out_res=1, batch=1, threads=1) as tiny:

        def many() -> None:
            images, labels = tiny.generate(0, 1)
            numpy.from_dlpack(images)
            labels.__dlpack__()

        assert grows(many, 10000) < 1 << 20
    destination = numpy.empty((COUNT, 1, 96, 96), "uint8")

    def reopen() -> None:
        with small(res=8, out_res=96) as g:
            g.fill(destination)

    assert grows(reopen, 300) < 2 << 20


def test_arrays_are_in_no_reference_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        images, labels = images_of()
        references = weakref.ref(images), weakref.ref(labels)
        numpy.from_dlpack(images)
        del images, labels
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_arrays_are_neither_pickled_nor_copied() -> None:
    images, labels = images_of()
    for array in images, labels, images._memory:
        for use in (copy.copy, copy.deepcopy, *(lambda x, p=p: pickle.dumps(x, p) for p in range(6))):
            with pytest.raises(TypeError, match="fdsl.Array: it can be neither pickled nor copied; use its numpy"):
                use(array)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
def test_tolist(dtype: str) -> None:
    images, labels = images_of(dtype=dtype, channels=3)
    assert labels.tolist() == labels.numpy().tolist()
    expected = images.numpy()
    if dtype == "bfloat16":
        expected = (expected.astype("uint32") << 16).view("float32")
    assert images.tolist() == expected.tolist()


def test_wrong_arguments_of_dlpack() -> None:
    images, _ = images_of()
    wrong: list[tuple[str, Any]] = [("dl_device", 3), ("dl_device", (1,)), ("max_version", "x"), ("max_version", "1.0")]
    for name, value in wrong:
        with pytest.raises(TypeError, match=f"^{name}: it must be None or two integers, not"):
            images.__dlpack__(**{name: value})
    with pytest.raises(TypeError, match="stream: it must be None or an int, not str"):
        images.__dlpack__(stream="x")  # type: ignore[arg-type]


def test_without_numpy_and_torch() -> None:
    code = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = None
import fdsl
labels = fdsl.Generator(5, res=16).generate(3, 4)[1]
print(labels.tolist())
try: labels.numpy()
except ImportError as error: print(error)
try: import fdsl.torch
except ImportError as error: print(error)
"""
    done = run_python(code)
    assert done.stdout.splitlines() == [
        "[3, 4, 0, 1]",
        "numpy(): NumPy is not installed; install fdsl[numpy], or use tolist()",
        "fdsl.torch: PyTorch is not installed; install fdsl[torch]",
    ], done.stderr
