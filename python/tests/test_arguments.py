"""Tests that every wrong argument raises an error whose message is one line and names the argument."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import COUNT, run_python, small, write_classes

import fdsl

numpy = pytest.importorskip("numpy")


def one_line(error: Any) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 300
    return text


ONE = fdsl.Class(1, 5, 2, 1, 1, 1, 1, 1, 9, 1)
WRONG_FIELDS: list[tuple[dict[str, Any], type, str]] = [
    ({"classes": "7"}, TypeError, "classes: it must be an integer, not str"),
    ({"classes": 7.0}, TypeError, "classes: it must be an integer, not float"),
    ({"classes": True}, TypeError, "classes: it must be an integer, not bool"),
    ({"classes": 0}, ValueError, "classes: 0 is out of range; it must be 1 to 1048576"),
    ({"classes": -1}, ValueError, "classes: -1 is out of range"),
    ({"classes": 1 << 32}, ValueError, "classes: 4294967296 is out of range"),
    ({"preset": 3}, TypeError, "preset: it must be a str, not int"),
    ({"preset": "\udcff"}, ValueError, "preset: it contains a character that cannot be encoded"),
    ({"formula": "\udcff"}, ValueError, "formula: it contains a character that cannot be encoded"),
    ({"class_file": "\ud800"}, ValueError, "class_file: it contains a character that cannot be encoded"),
    ({"class_file": "a\0b"}, ValueError, "class_file: it contains a null character"),
    ({"preset": "papers"}, ValueError, r"no section \[papers\]"),
    ({"preset": "a\0b"}, ValueError, "preset: it contains a null character"),
    ({"preset": "paper-1000", "classes": 1001}, ValueError, "classes: preset paper-1000 has 1000"),
    ({"preset_file": 3}, TypeError, "preset_file: it must be a path, not int"),
    ({"preset_file": "/nonexistent"}, ValueError, "'/nonexistent'"),
    ({"class_file": b"c"}, TypeError, "class_file: it must be a path, not bytes"),
    ({"class_file": "/nonexistent"}, ValueError, "'/nonexistent'"),
    ({"class_list": 3}, TypeError, "class_list: it must be a sequence of fdsl.Class"),
    ({"class_list": [(1, 2)]}, TypeError, "class_list: it must be a sequence of fdsl.Class"),
    ({"class_list": []}, ValueError, "class_list: it has 0 classes; there must be 1 to 1048576"),
    ({"class_list": [ONE], "classes": 2}, ValueError, "classes: it is 2, but class_list has 1; leave classes out"),
    ({"class_list": [ONE], "preset": "uji"}, ValueError, "preset: class_list or class_file gives the classes"),
    ({"class_list": [ONE], "preset_file": "x"}, ValueError, "preset_file: class_list or class_file gives"),
    ({"class_file": "x", "preset": "uji"}, ValueError, "preset: class_list or class_file gives the classes"),
    ({"class_list": [ONE._replace(noise=10**400)]}, ValueError, r"class_list\[0\].noise: it is too large"),
    ({"class_list": [ONE._replace(noise=True)]}, TypeError, r"class_list\[0\].noise: it must be a number, not bool"),
    ({"class_list": [ONE._replace(id=True)]}, TypeError, r"class_list\[0\].id: it must be an integer, not bool"),
    ({"class_list": [ONE._replace(vertices="x")]}, TypeError, r"class_list\[0\].vertices: it must be an integer"),
    ({"class_list": [ONE._replace(oval_x="x")]}, TypeError, r"class_list\[0\].oval_x: it must be a number"),
    ({"class_list": [ONE._replace(id=-1)]}, ValueError, r"class_list\[0\].id: -1 is out of range"),
    ({"class_list": [ONE] * 2}, ValueError, "same id, 1"),
    ({"class_list": [ONE], "class_file": "c.csv"}, ValueError, "class_file: class_list"),
    ({"formula": "ujji"}, ValueError, "formula: 'ujji' is unknown.*did you mean 'uji'"),
    ({"formula": None}, TypeError, "formula: it must be a str, not NoneType"),
    ({"seed": -1}, ValueError, "seed: -1 is out of range"),
    ({"seed": 1 << 64}, ValueError, "seed: 18446744073709551616 is out of range"),
    ({"seed": None}, TypeError, "seed: it must be an integer"),
    ({"res": 0}, ValueError, "res: 0 is out of range"),
    ({"res": 16385}, ValueError, "res: 16385 is out of range; it must be 1 to 16384"),
    ({"res": "96"}, TypeError, "res: it must be an integer"),
    ({"out_res": 0}, ValueError, "out_res: 0 is out of range"),
    ({"out_res": 16385}, ValueError, "out_res: 16385 is out of range; it must be 1 to 16384"),
    ({"out_res": 97, "fit": "crop"}, ValueError, "out_res: 97 is larger than res"),
    ({"fit": "pad"}, ValueError, "fit: 'pad' is unknown"),
    ({"fit": 1}, TypeError, "fit: it must be a str"),
    ({"dtype": "float64"}, ValueError, "dtype: 'float64' is unknown; .* uint8, float16, bfloat16 and float32"),
    ({"dtype": numpy.float64}, ValueError, "dtype: 'float64' is unknown"),
    ({"dtype": 8}, TypeError, "dtype: it must be a name or a dtype, not int"),
    ({"dtype": None}, TypeError, "dtype: it must be a name or a dtype, not NoneType"),
    ({"channels": 2}, ValueError, "channels: 2 is neither 1 nor 3"),
    ({"channels": 0}, ValueError, "channels: 0 is neither 1 nor 3"),
    ({"channels": 4_000_000_000}, ValueError, "channels: 4000000000 is neither 1 nor 3"),
    ({"channels": "1"}, TypeError, "channels: it must be an integer"),
    ({"layout": "nchv"}, ValueError, "layout: 'nchv' is unknown"),
    ({"mean": 0.5}, ValueError, "mean, std: uint8 images are not normalised"),
    ({"std": 2}, ValueError, "mean, std: uint8 images are not normalised"),
    ({"mean": "x", "dtype": "f32"}, TypeError, "mean: it must be a number"),
    ({"mean": "5", "dtype": "f32"}, TypeError, "mean: it must be a number"),
    ({"mean": ["5"], "dtype": "f32"}, TypeError, "mean: it must be a number"),
    ({"mean": b"5", "dtype": "f32"}, TypeError, "mean: it must be a number"),
    ({"std": True, "dtype": "f32"}, TypeError, "std: it must be a number"),
    ({"mean": 10**400, "dtype": "f32"}, ValueError, "mean: it is too large"),
    ({"mean": None, "dtype": "f32"}, TypeError, "mean: it must be a number"),
    ({"mean": [0.5, 0.5], "dtype": "f32", "channels": 3}, ValueError, "mean: it has 2 values for 3 channels"),
    ({"std": [], "dtype": "f32"}, ValueError, "std: it has 0 values for 1 channel"),
    ({"std": 0, "dtype": "f32"}, ValueError, r"std\[0\]: 0 is out of range"),
    ({"mean": float("nan"), "dtype": "f32"}, ValueError, r"mean\[0\]: nan is out of range"),
    ({"generator": "opm"}, ValueError, "generator: 'opm' is unknown"),
    ({"generator": "fused"}, ValueError, "generator: 'fused' works on CUDA devices"),
    ({"generator": "omp", "device": "cuda:0"}, ValueError, "generator: 'omp' works on the CPU"),
    ({"device": "gpu"}, ValueError, "device: 'gpu' is unknown"),
    ({"device": "cuda:x"}, ValueError, "device: 'cuda:x' is unknown"),
    ({"device": "cuda:"}, ValueError, "device: 'cuda:' is unknown"),
    ({"device": "cpu:1"}, ValueError, "device: 'cpu:1' is unknown"),
    ({"device": -2}, ValueError, "device: -2 is out of range"),
    ({"device": 1.0}, TypeError, "device: it must be .*, not float"),
    ({"device": None}, TypeError, "device: it must be .*, not NoneType"),
    ({"device": "cuda:4096"}, fdsl.Unavailable, "device: .*CUDA"),
    ({"device": 4096}, fdsl.Unavailable, "device: .*CUDA"),
    ({"threads": 0}, ValueError, "threads: 0 is out of range; it must be 1 to 8192"),
    ({"threads": 8193}, ValueError, "threads: 8193 is out of range; it must be 1 to 8192"),
    ({"threads": True}, TypeError, "threads: it must be an integer, not bool"),
    ({"threads": "2"}, TypeError, "threads: it must be an integer"),
    ({"batch": 0}, ValueError, "batch: 0 is out of range; it must be 1 to 16777216"),
    ({"batch": (1 << 24) + 1}, ValueError, "batch: 16777217 is out of range"),
]


@pytest.mark.parametrize("changes, kind, text", WRONG_FIELDS)
def test_fields(changes: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text) as error:
        small(**changes)
    assert error.type is kind
    one_line(error)


def test_only_classes_is_positional() -> None:
    with pytest.raises(TypeError):
        fdsl.Generator(7, "uji")  # type: ignore[misc]
    with pytest.raises(TypeError, match="clases"):
        fdsl.Generator(clases=7)  # type: ignore[call-arg]


def test_spellings() -> None:
    for dtype in ("f16", "float16", numpy.float16, numpy.dtype("float16")):
        assert small(dtype=dtype).dtype == "float16"
    for dtype in ("u8", "uint8", numpy.uint8, numpy.dtype("uint8")):
        assert small(dtype=dtype).dtype == "uint8"
    for device in ("cpu", "cpu:0", -1):
        assert small(device=device).device == "cpu"
    g = small(dtype="f32", channels=3, mean=numpy.array([0.1, 0.2, 0.3]), std=(1, 2, 3), classes=numpy.int64(3))
    assert g.config["mean"] == [0.1, 0.2, 0.3] and len(g.classes) == 3
    text = repr(g)
    assert text.startswith(
        "fdsl.Generator(classes=3, res=96, dtype='float32', channels=3, mean=[0.1"
    ) and text.endswith(")")
    g.close()
    assert repr(g).endswith(" (closed)")


def test_fill() -> None:
    g = small(out_res=24, dtype="float32")
    good = numpy.zeros((4, 1, 24, 24), "float32")
    labels = numpy.empty(4, "int64")
    frozen, frozen_labels = good.copy(), labels.copy()
    frozen.flags.writeable = frozen_labels.flags.writeable = False
    unaligned = numpy.frombuffer(bytearray(4 * 576 * 4 + 1), "uint8")[1:].view("float32").reshape(good.shape)

    class Cuda:
        __cuda_array_interface__ = {"version": 3, "shape": good.shape, "typestr": "<f4", "data": (1 << 40, False)}

    class Jax:
        pass

    Jax.__module__ = "jaxlib.xla_extension"
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type, str]] = [
        ((None,), {}, TypeError, "images: NoneType is not an array"),
        (([1, 2],), {}, TypeError, "images: list is not an array"),
        ((numpy.float32(3),), {}, TypeError, "images: float32 is not an array"),
        ((Jax(),), {}, TypeError, "images: JAX arrays are immutable; use generate"),
        ((Cuda(),), {}, ValueError, "images: it is on a CUDA device, but the generator is on cpu"),
        ((good.astype("float64"),), {}, ValueError, "images: its elements are <f8, not float32"),
        ((good.astype(">f4"),), {}, ValueError, "images: its elements are >f4, not float32"),
        ((good.astype("uint8"),), {}, ValueError, "images: its elements are uint8, not float32"),
        ((good[0],), {}, ValueError, r"images: its shape is \(1, 24, 24\), not \(count, 1, 24, 24\)"),
        ((good[:, 0],), {}, ValueError, "images: its shape is"),
        ((numpy.empty((), "float32"),), {}, ValueError, "images: its shape is"),
        ((numpy.empty((0, 1, 24, 24), "float32"),), {}, ValueError, "images: there are 0; give 1 to"),
        ((numpy.empty((24, 1, 24, 24), "float32"),), {}, ValueError, "images: there are 24; give 1 to 23"),
        ((good[::2],), {}, ValueError, "images: it is not contiguous"),
        ((good.transpose(0, 1, 3, 2),), {}, ValueError, "images: it is not contiguous"),
        ((frozen,), {}, ValueError, "images: it is read-only"),
        ((bytes(16),), {}, ValueError, "images: it is read-only"),
        ((unaligned,), {}, ValueError, "images: .* is not aligned to 4 bytes"),
        ((good, labels.astype("int32")), {}, ValueError, "labels: its elements are <i4, not int64"),
        ((good, labels[:3]), {}, ValueError, r"labels: its shape is \(3,\), not \(4,\)"),
        ((good, numpy.empty(8, "int64")[::2]), {}, ValueError, "labels: it is not contiguous"),
        ((good, frozen_labels), {}, ValueError, "labels: it is read-only"),
        ((good, 3), {}, TypeError, "labels: int is not an array"),
        ((good, labels, -1), {}, ValueError, "first: -1 is out of range"),
        ((good, labels, 1 << 64), {}, ValueError, "first: 18446744073709551616 is out of range"),
        ((good, labels, (1 << 64) - 2), {}, ValueError, "first: .* exceed the last number"),
        ((good, labels, 1.5), {}, TypeError, "first: it must be an integer, not float"),
        ((good,), {"numbers": [1, 2, 3]}, ValueError, r"numbers: its shape is \(3,\), not \(4,\)"),
        ((good,), {"numbers": [1, 2, 3, -4]}, ValueError, "numbers: -4 is out of range"),
        ((good,), {"numbers": numpy.array([1, -5, 3, 4])}, ValueError, "numbers: -5 is out of range; .* 0 to 2"),
        ((good,), {"next": numpy.array([-1])}, ValueError, "next: -1 is out of range; it must be 0 to 2"),
        ((good,), {"next": numpy.array(-1)}, ValueError, "next: -1 is out of range"),
        ((good,), {"next": numpy.array([(1 << 64) - 1], "uint64")}, ValueError, "next: .* exceed the last number"),
        ((good,), {"numbers": []}, ValueError, "numbers: there are 0; give 1 to 23, the batch of the generator"),
        ((good,), {"numbers": [1, 2, 3, "x"]}, TypeError, "numbers: it must be an integer, not str"),
        ((good,), {"numbers": 3}, TypeError, "numbers: int is not an array"),
        ((good,), {"numbers": numpy.zeros(4)}, ValueError, "numbers: its elements are <f8, not int64 or uint64"),
        ((good,), {"numbers": numpy.zeros((2, 2), "int64")}, ValueError, "numbers: its shape"),
        ((good, labels, 5), {"numbers": [1, 2, 3, 4]}, ValueError, "first, numbers, next: they exclude each other"),
        ((good,), {"numbers": [1, 2, 3, 4], "next": labels}, ValueError, "next: its shape|exclude"),
        ((good,), {"next": labels}, ValueError, r"next: its shape is \(4,\), not \(1,\)"),
        ((good,), {"next": numpy.zeros(1, "int32")}, ValueError, "next: its elements are <i4, not int64 or uint64"),
        ((good,), {"next": numpy.int64(3)}, TypeError, "next: int64 is not an array"),
        ((good,), {"next": 3}, TypeError, "next: int is not an array"),
        ((good,), {"next": frozen_labels[:1]}, ValueError, "next: it is read-only"),
        ((good,), {"next": labels[:1], "step": -1}, ValueError, "step: -1 is out of range"),
        ((good,), {"next": labels[:1], "step": 0.5}, TypeError, "step: it must be an integer"),
        ((good,), {"step": 4}, ValueError, "step: it needs next"),
        ((good,), {"stream": 0}, ValueError, "stream: it must be None for a generator on the CPU"),
    ]
    before = good.copy()
    for arguments, words, kind, text in wrong:
        with pytest.raises(kind, match=text) as error:
            g.fill(*arguments, **words)
        one_line(error)
    assert good.tobytes() == before.tobytes()
    g.fill(good, labels)


def test_generate() -> None:
    g = small()
    for arguments, words, kind, text in (
        ((0, 0), {}, ValueError, "count: 0 is out of range"),
        ((0, COUNT + 1), {}, ValueError, "count: 24 is out of range; it must be 1 to 23"),
        ((0, 1.0), {}, TypeError, "count: it must be an integer, not float"),
        ((-1,), {}, ValueError, "first: -1 is out of range"),
        (("0",), {}, TypeError, "first: it must be an integer, not str"),
        ((), {"numbers": 3}, TypeError, "numbers: int is not an array"),
        ((), {"numbers": numpy.zeros((), "int64")}, ValueError, r"numbers: its shape is \(\), not \(count,\)"),
        ((), {"numbers": numpy.zeros((2, 2), "int64")}, ValueError, r"numbers: its shape is \(2, 2\), not"),
        ((), {"numbers": []}, ValueError, "numbers: there are 0; give 1 to"),
        ((), {"numbers": numpy.zeros(0, "int64")}, ValueError, "numbers: there are 0; give 1 to"),
        ((), {"numbers": range(24)}, ValueError, "numbers: there are 24; give 1 to 23"),
        ((), {"numbers": range(10**12)}, ValueError, "numbers: there are 1000000000000; give 1 to"),
        ((), {"numbers": range(10**30)}, ValueError, "numbers: there are more than"),
        ((True,), {}, TypeError, "first: it must be an integer, not bool"),
        ((0, 3), {"numbers": range(4)}, ValueError, r"numbers: its shape is \(4,\), not \(3,\)"),
        ((), {"stream": 0}, ValueError, "stream: it must be None"),
    ):
        with pytest.raises(kind, match=text) as error:
            g.generate(*arguments, **words)
        one_line(error)


def test_closed() -> None:
    g = small()
    images = numpy.empty((1, 1, 96, 96), "uint8")
    g.close()
    g.close()
    for use in (lambda: g.fill(images), g.generate, lambda: g.classes, lambda: g.memory_bytes, lambda: pickle.dumps(g)):
        with pytest.raises(ValueError, match="^generator: it is closed$"):
            use()
    assert g.shape == (1, 96, 96)
    with pytest.raises(ZeroDivisionError), small() as g:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="it is closed"):
        g.generate()


def test_stream_objects() -> None:
    from fdsl._memory import stream_pointer

    def thing(**attributes: Any) -> Any:
        return type("Stream", (), attributes)()

    assert stream_pointer(0, 1) == 0 and stream_pointer(1 << 47, 0) == 1 << 47
    assert stream_pointer(thing(cuda_stream=48, device_index=1), 1) == 48
    assert stream_pointer(thing(ptr=64, device_id=-1), 1) == 64
    assert stream_pointer(thing(__cuda_stream__=lambda self: (0, 80)), 1) == 80
    with pytest.raises(ValueError, match="stream: it belongs to CUDA device 1, not 0"):
        stream_pointer(thing(cuda_stream=48, device_index=1), 0)
    for wrong in ("x", 1.5, True, thing()):
        with pytest.raises(TypeError, match="stream: it must be an int"):
            stream_pointer(wrong, 0)
    with pytest.raises(ValueError, match="stream: -1 is not"):
        stream_pointer(-1, 0)


def test_library_errors(tmp_path: Any) -> None:
    done = run_python("import fdsl", FDSL_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode == 1 and "ImportError: fdsl cannot load" in done.stderr and "FDSL_LIBRARY" in done.stderr
    (tmp_path / "text.so").write_text("no library")
    assert "ImportError: fdsl cannot load" in run_python("import fdsl", FDSL_LIBRARY=str(tmp_path / "text.so")).stderr
    code = "import sys, types; sys.modules['fdsl._version'] = types.SimpleNamespace(VERSION='9.9.9')\nimport fdsl"
    done = run_python(code)
    last = done.stderr.splitlines()[-1]
    assert last == f"ImportError: fdsl 9.9.9 needs libfdsl 9.9.9, but {fdsl.library_path()} is {fdsl.__version__}"
    code = code.replace("9.9.9", fdsl.__version__)
    assert run_python(code + "; print(fdsl.__version__)").stdout.strip() == fdsl.__version__


def test_the_number_of_classes_is_that_of_the_list(tmp_path: Any) -> None:
    table = tmp_path / "two.csv"
    with small() as g:
        classes = g.classes[:2]
    write_classes(table, classes)
    for words in ({"class_list": classes}, {"class_file": table}, {"class_file": str(table), "classes": 2}):
        with small(**words) as g:
            assert g.config["classes"] == 2 == len(g.classes) and "classes=2" in repr(g)
            with fdsl.Generator(**g.config) as other:
                assert other.config == g.config and other.classes == g.classes
    with pytest.raises(ValueError, match="classes: it is 3, but class_file has 2; leave classes out"):
        small(class_file=table, classes=3)


def test_attributes_cannot_be_added() -> None:
    with small() as g:
        for name in ("seed", "batch", "x"):
            with pytest.raises(AttributeError):
                setattr(g, name, 4)


@pytest.mark.skipif(fdsl.cuda_devices() > 0, reason="has CUDA")
def test_errors_use_the_names_of_python() -> None:
    with pytest.raises(fdsl.Unavailable) as error:
        small(device="cuda")
    assert "FDSL_CPU" not in one_line(error)
    with pytest.raises(ValueError) as wrong:
        fdsl.Generator(10, generator="fused")
    message = 'generator: \'fused\' works on CUDA devices, but device is "cpu"; set it to 0 or another CUDA device'
    assert str(wrong.value) == message
    with pytest.raises(ValueError) as wrong:
        fdsl.Generator(10, generator="omp", device=0)
    assert str(wrong.value) == 'generator: \'omp\' works on the CPU, but device is 0; set it to "cpu"'


def test_a_relative_library_is_found(tmp_path: Any) -> None:
    (tmp_path / "libfdsl.so").symlink_to(fdsl.library_path())
    code = f"import os; os.chdir({str(tmp_path)!r}); import fdsl; print(fdsl.library_path())"
    assert run_python(code, FDSL_LIBRARY="libfdsl.so").stdout.strip() == str(tmp_path / "libfdsl.so")


def test_module() -> None:
    assert isinstance(fdsl.cuda_devices(), int) and ".so" in fdsl.library_path()
    assert issubclass(fdsl.Unavailable, fdsl.Error) and issubclass(fdsl.Error, RuntimeError)
    assert set(fdsl.__all__) <= set(dir(fdsl))


STRUCTURES = [
    ("config", "ConfigStruct"),
    ("layout", "LayoutStruct"),
    ("targets", "TargetsStruct"),
    ("class_table", "ClassTableStruct"),
    ("fractals", "FractalsStruct"),
    ("source_config", "SourceConfigStruct"),
    ("source_info", "SourceInfoStruct"),
    ("rows_config", "RowsConfigStruct"),
    ("select_config", "SelectConfigStruct"),
    ("mix_config", "MixConfigStruct"),
    ("stream_config", "StreamConfigStruct"),
    ("stream_info", "StreamInfoStruct"),
    ("batch_info", "BatchInfoStruct"),
]


@pytest.mark.parametrize(("name", "structure"), STRUCTURES)
def test_structures_have_the_fields_of_the_header(name: str, structure: str) -> None:
    from fdsl import _library

    header = Path(__file__).parents[2] / "src" / "lib" / "fdsl.h"
    body = re.search(rf"^struct fdsl_{name} {{\n(.*?)^}};", header.read_text(), re.DOTALL | re.MULTILINE)
    assert body
    members = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    in_header = [re.sub(r"\[\w+\]", "", part).split()[-1].lstrip("*") for part in re.split("[,;]", members) if part.strip()]
    assert [field[0] for field in getattr(_library, structure)._fields_] == in_header
