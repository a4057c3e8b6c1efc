#!/usr/bin/env python3
"""Prints the licence terms of the third-party code that a build of libfdsl contains. make install and wheel.py use this script.

  scripts/packaging/notice.py LIBRARY     libfdsl.so or libfdsl.a
"""

import pathlib
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


def notices(library):
    """Returns the licence terms of third-party code in the bytes of a library, and the licence expression of a package
    that contains the library."""
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
