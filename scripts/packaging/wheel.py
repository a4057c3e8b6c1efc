#!/usr/bin/env python3
"""Writes the wheel of the Python package: python/fdsl with a stripped copy of libfdsl.so.

  scripts/packaging/wheel.py LIBRARY VERSION [FOLDER]     FOLDER: dist by default

Prints the path of the wheel, fdsl-VERSION-py3-none-manylinux_2_XX_MACHINE.whl, where 2.XX is the newest version of
glibc that LIBRARY needs. Deletes other wheels of this version and machine. The same input gives the same bytes. Needs
Python 3.11 or newer, and binutils. Exit status 1 if the version of LIBRARY is not VERSION, or if LIBRARY needs
libraries other than those of glibc.
"""

import base64
import ctypes
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile

from notice import notices

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python"
GLIBC = re.compile(r"(libc\.so\.6|lib(m|mvec)\.so\.\d|lib(dl|pthread|rt|util)\.so\.\d|ld-linux[-_a-z0-9]*\.so\.\d)$")
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}


def fail(text):
    sys.exit(f"wheel.py: {text}")


def tool(*words):
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        fail(f"{words[0]} is not installed; it is in the package binutils")
    except subprocess.CalledProcessError as error:
        fail(error.stderr.strip().splitlines()[0])


class Library:
    """The contents of libfdsl.so and the properties that the wheel declares."""

    def __init__(self, path, version):
        headers = tool("readelf", "--wide", "--file-header", "--dynamic", "--version-info", "--sections", path)
        machine = re.search(r"Machine: +(.*)", headers)[1].strip()
        if machine not in MACHINES:
            fail(f"{path}: machine {machine} has no manylinux tag")
        others = [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", headers) if not GLIBC.match(name)]
        if others:
            fail(f"{path} needs {', '.join(others)}; link it statically, because only glibc is on every machine")
        versions = {tuple(map(int, number.split("."))) for number in re.findall(r"Name: GLIBC_([0-9.]+)", headers)}
        self.glibc = max(max(versions, default=(2, 5))[:2], (2, 5))  # manylinux tags begin with glibc 2.5
        self.tag = f"py3-none-manylinux_{self.glibc[0]}_{self.glibc[1]}_{MACHINES[machine]}"
        try:
            loaded = ctypes.CDLL(str(pathlib.Path(path).resolve()))
            loaded.fdsl_version.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            fail(f"{path} is not libfdsl: {error}")
        if (own := loaded.fdsl_version().decode()) != version:
            fail(f"{path} is libfdsl {own}, not {version}")
        self.notices, self.terms = notices(pathlib.Path(path).read_bytes())
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "libfdsl.so"
            tool("strip", "--strip-unneeded", "-o", str(copy), path)
            self.content = copy.read_bytes()


def metadata(version, terms):
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version}"]
    lines += [f"Summary: {project['description']}"]
    lines += [f"Author: {author['name']}" for author in project["authors"]]
    lines += [f"Keywords: {','.join(project['keywords'])}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"License-Expression: {terms}", "License-File: LICENSE", "License-File: NOTICE"]
    lines += [f"Classifier: {classifier}" for classifier in project["classifiers"]]
    for extra, requirements in sorted(project["optional-dependencies"].items()):
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {requirement}; extra == '{extra}'" for requirement in requirements]
    lines += ["Description-Content-Type: text/markdown", "", (PACKAGE / project["readme"]).read_text()]
    return "\n".join(lines)


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2
    path, version = sys.argv[1:3]
    folder = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else ROOT / "dist")
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d+)?", version):
        fail(f"VERSION: '{version}' is not a version of a Python package")
    library = Library(path, version)
    info = f"fdsl-{version}.dist-info"
    files = {f"fdsl/{file.name}": file.read_bytes() for file in (PACKAGE / "fdsl").glob("*.py")}
    files["fdsl/py.typed"] = b""
    own = f'VERSION = "{version}"'.encode()
    pinned, count = re.subn(rb'^VERSION = "".*$', own, files["fdsl/_version.py"], flags=re.M)
    if count != 1:
        fail("python/fdsl/_version.py has no line VERSION = \"\"")
    files["fdsl/_version.py"] = pinned
    files["fdsl/libfdsl.so"] = library.content
    files[f"{info}/METADATA"] = metadata(version, library.terms).encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: fdsl-bench\nRoot-Is-Purelib: false\nTag: {library.tag}\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{info}/licenses/NOTICE"] = library.notices.encode()
    record = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fdsl-{version}-{library.tag}.whl"
    unfinished = path.with_suffix(".new")
    with zipfile.ZipFile(unfinished, "w") as archive:
        # The metadata comes last, as PEP 427 recommends.
        for name in sorted(files, key=lambda name: (name.startswith(info), name)):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, files[name], compresslevel=9)
    unfinished.replace(path)
    for other in folder.glob(f"fdsl-{version}-*_{library.tag.split('_', 3)[3]}.whl"):  # pip refuses to install two
        if other != path:
            other.unlink()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
