#!/usr/bin/env python3
"""Prints the licence terms of the third-party code that a build of libfdsl contains. make install and wheel.py use this script.

  scripts/packaging/notice.py LIBRARY     libfdsl.so or libfdsl.a
"""

import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
GCC_NOTICE = """libfdsl contains parts of GCC's runtime libraries (libgcc{cxx}),
Copyright Free Software Foundation, Inc. They are licensed under the GNU General Public License, version 3
or later, with the GCC Runtime Library Exception, version 3.1. The exception permits distribution of compiled
programs that contain them under terms of your choice:
https://www.gnu.org/licenses/gcc-exception-3.1.html
"""
CUDA_NOTICE = """libfdsl contains parts of the NVIDIA CUDA runtime (cudart_static, cudadevrt), Copyright NVIDIA Corporation.
NVIDIA's End User License Agreement for the CUDA Toolkit lists them as redistributable (Attachment A) and sets the
terms under which they may be used and distributed as part of this package: https://docs.nvidia.com/cuda/eula/
"""
NVTX_NOTICE = """libfdsl contains parts of NVTX, Copyright NVIDIA Corporation, licensed under the Apache License, version 2.0,
with LLVM exceptions: https://nvidia.github.io/NVTX/LICENSE.txt
The exceptions permit distribution of compiled programs that contain parts of NVTX without a copy of the licence.
"""


# The licence expressions of libraries that a wheel may bundle, by the beginnings of their names
TERMS = {
    "libjpeg": "IJG AND BSD-3-Clause AND Zlib",
    "libpng": "libpng-2.0",
    "libwebp": "BSD-3-Clause",
    "libsharpyuv": "BSD-3-Clause",
    "libjansson": "MIT",
    "libz.": "Zlib",
    "libzstd": "BSD-3-Clause",
}


def terms_of(path):
    """Returns the terms of a library of the system: the text that its package installs. Raises LookupError."""
    for real in (path, str(pathlib.Path(path).resolve()), re.sub("^/usr", "", path)):
        if not shutil.which("dpkg"):
            break
        done = subprocess.run(["dpkg", "-S", real], capture_output=True, text=True)
        if done.returncode == 0:
            package = done.stdout.split(":")[0]
            return package, (pathlib.Path("/usr/share/doc") / package / "copyright").read_text(errors="replace")
    if shutil.which("rpm"):
        done = subprocess.run(["rpm", "-q", "--licensefiles", "-f", path], capture_output=True, text=True)
        files = [pathlib.Path(line) for line in done.stdout.splitlines() if line.startswith("/")]
        if done.returncode == 0 and files:
            return pathlib.Path(path).name, "\n".join(file.read_text(errors="replace") for file in files)
    raise LookupError(f"{path}: no package of the system has its licence terms, which the wheel must contain")


def notices(library, bundled=None):
    """Returns the licence terms of third-party code in the bytes of a library, and the licence expression of a package
    that contains the library and those in `bundled`, a dict of paths by their names."""
    cuda = b".nv_fatbin" in library
    parts, terms = [GCC_NOTICE.format(cxx=", libstdc++" if cuda else "")], ["MIT"]
    terms.append("GPL-3.0-or-later WITH GCC-exception-3.1")
    if b".symtab" not in library or b"ini_parse\0" in library:
        text = (ROOT / "python/licenses/inih.txt").read_text()
        parts.append(f"libfdsl contains inih, https://github.com/benhoyt/inih\n\n{text}")
        terms.append("BSD-3-Clause")
    if b"NVTX_INJECTION64_PATH" in library:
        parts.append(NVTX_NOTICE)
        terms.append("Apache-2.0 WITH LLVM-exception")
    if cuda:
        parts.append(CUDA_NOTICE)
        terms.append("LicenseRef-NVIDIA-CUDA-Toolkit-EULA")
    for name, path in sorted((bundled or {}).items()):
        package, text = terms_of(path)
        parts.append(f"{name}, of the package {package}, is stored next to libfdsl. Its terms:\n\n{text}")
        terms += [TERMS[stem] for stem in TERMS if name.startswith(stem) and TERMS[stem] not in terms]
    return "\n---\n\n".join(parts), " AND ".join(terms)


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    try:
        print(notices(pathlib.Path(sys.argv[1]).read_bytes())[0], end="")
    except OSError as error:
        sys.exit(f"notice.py: {error.filename}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
