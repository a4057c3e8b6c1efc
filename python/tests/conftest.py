"""Helpers for the tests: small generators, and reference images from the program fdsl-bench."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
found = importlib.util.find_spec("fdsl")  # an installed package is tested as it is
if found is None:
    sys.path.insert(0, str(ROOT / "python"))
if found is None or not pathlib.Path(found.origin or "").with_name("libfdsl.so").exists():
    os.environ.setdefault("FDSL_LIBRARY", str(ROOT / "build" / "lib" / "libfdsl.so"))

import fdsl  # noqa: E402

CLASSES, COUNT, RES = 7, 23, 96
DIGITS = 120
ORDERS = {"cthw": (0, 1, 2, 3, 4), "tchw": (0, 2, 1, 3, 4), "thwc": (0, 2, 3, 4, 1)}  # the axes of clips, from cthw
MASKED: dict[str, Any] = {"formula": "segrcdb", "classes": 5, "res": 64, "out_res": 31}
PROGRAM = os.environ.get("FDSL_BENCH", str(ROOT / "fdsl-bench"))


def small(**changes: Any) -> fdsl.Generator:
    """Returns a small generator with the classes that the program draws for --classes 7."""
    if not {"class_list", "class_file"}.isdisjoint(changes):
        changes = {"classes": None, **changes}
    return fdsl.Generator(**{"classes": CLASSES, "res": RES, "batch": COUNT, "threads": 2, **changes})


def write_classes(path: pathlib.Path, classes: list[fdsl.Class]) -> None:
    """Writes classes to a CSV file, as the argument class_file expects it."""
    header = "class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width"
    path.write_text("\n".join([header, *(",".join(map(repr, one)) for one in classes), ""]))


def content(array: fdsl.Array) -> bytes:
    """Returns the bytes of an array on the CPU."""
    return ctypes.string_at(array.ptr, array.nbytes)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter; `fdsl` and these helpers can be imported there."""
    paths = [os.path.dirname(os.path.dirname(fdsl.__file__)), str(ROOT / "python" / "tests")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "FDSL_LIBRARY": fdsl.library_path()}
    environment = {**os.environ, **own, **environment}
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"  # a shell may ignore it
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Any:
    """Returns a function that returns (images, labels) of the program's reference variant, as bytes."""
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")

    def run(generator: fdsl.Generator) -> tuple[bytes, bytes]:
        config = generator.config
        words = f"--variant naive --batch {COUNT} --classes {config['classes']} --res {config['res'] or 512} --npy x.npy"
        for name in ("channels", "layout", "fit", "formula", "seed"):
            words += f" --{name} {config[name]}"
        words += f" --out-res {config['out_res'] or config['res'] or 512}"
        short = {"uint8": "u8", "float16": "f16", "bfloat16": "bf16", "float32": "f32"}[config["dtype"]]
        words += f" --dtype {short}"
        if short != "u8":
            for name in ("mean", "std"):
                words += f" --{name} {','.join(map(repr, config[name]))}"
        words += " --min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0"
        done = subprocess.run([PROGRAM, *words.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        size = COUNT * generator.shape[0] * generator.shape[1] * generator.shape[2] * int(short.strip("ubf")) // 8
        return (tmp_path / "x.npy").read_bytes()[-size:], (tmp_path / "x.labels.npy").read_bytes()[-8 * COUNT :]

    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory: Any) -> pathlib.Path:
    """A folder with 120 digits as class folders (f) and as shards (m), in the same order."""
    path: pathlib.Path = tmp_path_factory.mktemp("digits")
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    for words in (
        f"--prepare {path}/all --from digits --samples {DIGITS} --store imagefolder",
        f"--prepare {path}/m --from dataset --source {path}/f --shards 3 --name s",
    ):
        done = subprocess.run([PROGRAM, *words.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if not (path / "f").exists():
            (path / "f").mkdir()
            for entry in (path / "all").iterdir():
                if entry.is_dir():
                    shutil.copytree(entry, path / "f" / entry.name)
    return path


@pytest.fixture(scope="session", params=[(1, 3, 24, 20), (3, 5, 19, 23)])
def clips(tmp_path_factory: Any, request: Any) -> pathlib.Path:
    """Shards of 20 clips of bytes with the axes (channels, frames, height, width), as (c); (s) has clips whose frames are all
    the first frame, and (i) this frame as an image."""
    numpy = pytest.importorskip("numpy")
    path: pathlib.Path = tmp_path_factory.mktemp("clips")
    channels, frames, height, width = request.param
    draw = numpy.random.default_rng(4)
    for name in "csi":
        (path / name).mkdir()
    files = {name: tarfile.open(path / name / "0.tar", "w") for name in "csi"}
    for number in range(20):
        clip = draw.integers(0, 256, (channels, frames, height, width), "u1")
        still = clip[:, :1].repeat(frames, axis=1)
        for name, values in ("c", clip), ("s", still), ("i", clip[:, 0]):
            data = io.BytesIO()
            numpy.save(data, numpy.ascontiguousarray(values))
            for member, content_ in ("npy", data.getvalue()), ("cls", str(number % 3).encode()):
                entry = tarfile.TarInfo(f"{number:04}.{member}")
                entry.size = len(content_)
                files[name].addfile(entry, io.BytesIO(content_))
    for file in files.values():
        file.close()
    return path


@pytest.fixture(scope="session")
def masked(tmp_path_factory: Any) -> pathlib.Path:
    """A folder with the first 10 images of MASKED and their masks, as shards (s) and as a tree (i)."""
    path: pathlib.Path = tmp_path_factory.mktemp("masked")
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    for words in f"{path}/s --shards 2", f"{path}/i --store imagefolder":
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in MASKED.items())
        command = [PROGRAM, *f"--prepare {words} --from synth --samples 10 {options}".split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return path


def masked_set(path: pathlib.Path, kind: str) -> Any:
    """Returns the samples of MASKED, generated or from a folder of the fixture `masked`."""
    if kind == "images":
        return fdsl.Images(**MASKED, count=10)
    return fdsl.Shards(path / "s") if kind == "shards" else fdsl.Folder(path / "i")


def broken_digits(digits: pathlib.Path, to: pathlib.Path) -> str:
    """Copies the class folders to to/f, and breaks sample 50 there. Returns the name of its file."""
    shutil.copytree(digits / "f", to / "f")
    broken = sorted((to / "f").glob("*/*.png"))[50]
    broken.write_bytes(broken.read_bytes()[:60] + bytes(100))
    return broken.name
