#!/usr/bin/env python3
"""Writes the wheel of the Python package: python/fdsl with stripped copies of libfdsl.so and of the libraries that it needs.

  scripts/packaging/wheel.py LIBRARY VERSION [FOLDER]     FOLDER: dist by default

Prints the path of the wheel, fdsl-VERSION-py3-none-manylinux_2_XX_MACHINE.whl, where 2.XX is the newest version of
glibc that LIBRARY and the bundled libraries need. Deletes other wheels of this version and machine. The same input gives the same bytes. Needs
Python 3.11 or newer, and binutils. Exit status 1 if the version of LIBRARY is not VERSION, if a library is missing, or if
the terms of a bundled library are not found.

The libraries that LIBRARY needs, except those of glibc, are stored next to it, where its DT_RPATH, $ORIGIN, finds them. Their
names begin with "fds" instead of "lib", so that they are not confused with other versions of them in the same process.
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


def described(path):
    """Returns what readelf says about a library."""
    return tool("readelf", "--wide", "--file-header", "--dynamic", "--version-info", "--sections", path)


def needed(headers):
    """Returns the names of the libraries, other than those of glibc, that a library needs."""
    return [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", headers) if not GLIBC.match(name)]


def find_bundled(path):
    """Returns the paths of all libraries that a library needs, directly or not, by their names."""
    found = dict(re.findall(r"^\s*(\S+) => (/\S+)", tool("ldd", path), re.M))
    bundled, left = {}, needed(described(path))
    while left:
        name = left.pop()
        if name not in found:
            fail(f"{path} needs {name}, which is not installed")
        if name not in bundled:
            bundled[name] = found[name]
            left += needed(described(found[name]))
    return bundled


def renamed(name):
    return re.sub("^lib", "fds", name)


def rename_needed(content, headers, names):
    """Returns the bytes of a library that needs libraries by their new names. These have the same length, so they are
    written over the old ones, in the string table of the dynamic section."""
    at, size = re.search(r"\.dynstr\s+STRTAB\s+[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+)", headers).groups()
    begin, end = int(at, 16), int(at, 16) + int(size, 16)
    table = content[begin:end]
    for name in names:
        old, new = (b"\0" + text.encode() + b"\0" for text in (name, renamed(name)))
        if (count := table.count(old)) != 1:
            fail(f"{name} occurs {count} times in a string table")
        table = table.replace(old, new)
    return content[:begin] + table + content[end:]


def stripped(path):
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "library.so"
        tool("strip", "--strip-unneeded", "-o", str(copy), path)
        return copy.read_bytes(), described(str(copy))


class Library:
    """The files of the libraries, and the properties that the wheel declares."""

    def __init__(self, path, version):
        headers = described(path)
        machine = re.search(r"Machine: +(.*)", headers)[1].strip()
        if machine not in MACHINES:
            fail(f"{path}: machine {machine} has no manylinux tag")
        try:
            loaded = ctypes.CDLL(str(pathlib.Path(path).resolve()))
            loaded.fdsl_version.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            fail(f"{path} is not libfdsl: {error}")
        if (own := loaded.fdsl_version().decode()) != version:
            fail(f"{path} is libfdsl {own}, not {version}")
        bundled = find_bundled(path)
        self.files, versions = {}, set()
        for name, source in {"libfdsl.so": path, **bundled}.items():
            content, headers = stripped(source)
            own_name = re.search(r"\(SONAME\).*\[(.*)\]", headers)[1]
            if name in bundled and needed(headers) and "(RUNPATH)" in headers:
                fail(f"{source} has a DT_RUNPATH, so it would not find the libraries that it needs in the wheel")
            names = needed(headers) + ([own_name] if name in bundled else [])
            self.files[renamed(name) if name in bundled else name] = rename_needed(content, headers, names)
            versions |= {tuple(map(int, number.split("."))) for number in re.findall(r"Name: GLIBC_([0-9.]+)", headers)}
        self.glibc = max(max(versions, default=(2, 5))[:2], (2, 5))  # manylinux tags begin with glibc 2.5
        self.tag = f"py3-none-manylinux_{self.glibc[0]}_{self.glibc[1]}_{MACHINES[machine]}"
        try:
            self.notices, self.terms = notices(pathlib.Path(path).read_bytes(), bundled)
        except LookupError as error:
            fail(error.args[0])


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
    for name, content in library.files.items():
        files[f"fdsl/{name}"] = content
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
            entry.external_attr = (0o100755 if ".so" in name else 0o100644) << 16
            archive.writestr(entry, files[name], compresslevel=9)
    unfinished.replace(path)
    for other in folder.glob(f"fdsl-{version}-*_{library.tag.split('_', 3)[3]}.whl"):  # pip refuses to install two
        if other != path:
            other.unlink()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
