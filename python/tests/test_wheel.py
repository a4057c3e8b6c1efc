"""Tests scripts/packaging/wheel.py: contents of a wheel, refusals, and an installation in a new environment."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from typing import Any

import pytest
from conftest import ROOT

import fdsl

TOOL = ROOT / "scripts" / "packaging" / "wheel.py"
LIBRARY = fdsl.library_path()
pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="wheel.py needs Python 3.11"),
    pytest.mark.skipif(not TOOL.exists() or not shutil.which("readelf"), reason="needs the source tree and binutils"),
]


def build(folder: pathlib.Path, library: str = LIBRARY, version: str = fdsl.__version__) -> Any:
    words = [sys.executable, str(TOOL), library, version, str(folder)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: Any) -> pathlib.Path:
    done = build(tmp_path_factory.mktemp("wheel"))
    assert done.returncode == 0, done.stderr
    return pathlib.Path(done.stdout.strip())


def test_version_is_that_of_the_makefile() -> None:
    match = re.search(r"^VERSION *:= *(\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert match and match[1] == fdsl.__version__


def test_contents(wheel: pathlib.Path) -> None:
    version = fdsl.__version__
    assert re.fullmatch(rf"fdsl-{re.escape(version)}-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
        dates = {entry.date_time for entry in archive.infolist()}
    info = f"fdsl-{version}.dist-info"
    package = {f"fdsl/{path.name}" for path in (ROOT / "python" / "fdsl").iterdir() if path.is_file()}
    extra = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE", "licenses/NOTICE"}
    bundled = {name for name in files if name.startswith("fdsl/fds")}
    assert set(files) == package | bundled | {"fdsl/libfdsl.so"} | {f"{info}/{name}" for name in extra}
    assert dates == {(1980, 1, 1, 0, 0, 0)}
    rows = {row[0]: row[1:] for row in csv.reader(files[f"{info}/RECORD"].decode().splitlines())}
    assert set(rows) == set(files) and rows[f"{info}/RECORD"] == ["", ""]
    for name, content in files.items():
        if not name.endswith("RECORD"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert rows[name] == [f"sha256={digest}", str(len(content))]
    metadata = files[f"{info}/METADATA"].decode()
    assert f"\nName: fdsl\nVersion: {version}\n" in metadata and "\nRequires-Python: >=3.9\n" in metadata
    assert "Tag: " + wheel.name[len(f"fdsl-{version}-") : -4] in files[f"{info}/WHEEL"].decode()
    assert f'VERSION = "{version}"'.encode() in files["fdsl/_version.py"]
    notice = files[f"{info}/licenses/NOTICE"].decode()
    assert "GCC Runtime Library Exception" in notice
    assert ("Ben Hoyt" in notice) == (b"BSD-3-Clause" in files[f"{info}/METADATA"])
    assert ("CUDA runtime" in notice) == (b"LicenseRef-NVIDIA" in files[f"{info}/METADATA"])
    has_nvtx = b"NVTX_INJECTION64_PATH" in files["fdsl/libfdsl.so"]
    assert ("parts of NVTX" in notice) == (b"Apache-2.0 WITH LLVM-exception" in files[f"{info}/METADATA"]) == has_nvtx
    installed = subprocess.run([str(TOOL.with_name("notice.py")), LIBRARY], capture_output=True, text=True)
    assert notice.startswith(installed.stdout), "make install must write the same notice about libfdsl"
    for name in bundled:
        assert f"lib{name[len('fdsl/fds'):]}, of the package " in notice[len(installed.stdout) :]
    assert (
        len(files["fdsl/libfdsl.so"]) < os.path.getsize(LIBRARY) or b".symtab" not in pathlib.Path(LIBRARY).read_bytes()
    )


def test_the_same_input_gives_the_same_bytes(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert pathlib.Path(build(tmp_path).stdout.strip()).read_bytes() == wheel.read_bytes()


def test_wrong_libraries_are_refused(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library" * 100)
    needs = sys.modules["_ctypes"].__file__ or ""  # needs libffi
    for library, version, error in (
        (LIBRARY, "9.9.9", f"{LIBRARY} is libfdsl {fdsl.__version__}, not 9.9.9"),
        (LIBRARY, "v1", "VERSION: 'v1' is not a version"),
        (str(tmp_path / "none.so"), "1.0", "No such file"),
        (str(text), "1.0", "Not an ELF file"),
        (needs, "1.0", "is not libfdsl"),
    ):
        done = build(tmp_path / "out", library, version)
        assert done.returncode == 1 and re.search(error, done.stderr) and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_bundled_library_with_a_runpath_is_refused(tmp_path: pathlib.Path) -> None:
    """A library with a DT_RUNPATH does not use the DT_RPATH of libfdsl, which leads to the files of the wheel."""
    if not shutil.which("cc"):
        pytest.skip("needs a compiler")
    for name, text, words in (
        ("libtwo", "int two(void) { return 2; }", ""),
        ("libone", "int two(void); int one(void) { return two(); }", "-ltwo -Wl,--enable-new-dtags"),
        ("libfdsl", 'int one(void); const char *fdsl_version(void) { return one() ? "1.0" : ""; }', "-lone"),
    ):
        (tmp_path / f"{name}.c").write_text(text)
        build_words = f"cc -shared -fPIC -o {name}.so {name}.c -L. {words} -Wl,-soname,{name}.so -Wl,-rpath,{tmp_path}"
        subprocess.run(build_words.split(), cwd=tmp_path, check=True)
    done = build(tmp_path / "out", str(tmp_path / "libfdsl.so"), "1.0")
    assert done.returncode == 1 and f"{tmp_path}/libone.so has a DT_RUNPATH" in done.stderr, done.stderr


def test_it_installs_and_runs(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ensurepip = pytest.importorskip("ensurepip", reason="python3-venv is not installed")
    bundled = pathlib.Path(ensurepip.__file__).parent / "_bundled"
    folders = [bundled, pathlib.Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or bundled)]
    pip = next((path for folder in folders for path in folder.glob("pip-*.whl")), None)
    if not pip:
        pytest.skip("pip is not installed")
    # pip runs from its wheel, because installing it takes longer than the rest of this test.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path)}  # no compiler, no FDSL_LIBRARY
    install = [python, f"{pip}/pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    code = "import fdsl; print(fdsl.__version__, fdsl.library_path(), fdsl.Generator(3, res=16, batch=2).generate()[0].shape)"
    # The libraries are those of the wheel, not those of the system.
    code += f"; assert all({str(tmp_path)!r} in line for line in open('/proc/self/maps') if 'png' in line or 'jpeg' in line)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"{fdsl.__version__} {tmp_path}") and done.stdout.endswith(
        " (2, 1, 16, 16)\n"
    ), done.stderr
