#!/usr/bin/env bash
# Tests the Python package in python/ with the built library and program.
#
#   scripts/check/python.sh [--torch] [LIBRARY]     build/lib/libfdsl.so by default
#
# PYTHON selects the interpreter; default: python3, or /usr/bin/python3 if only that has pytest. Tests that need PyTorch or
# a GPU are skipped if it is missing. If mypy is installed, it checks the types. If pytest is missing, all tests are skipped.
#
# --torch runs the tests of PyTorch, too. If the interpreter has no PyTorch 2.1 or newer, it creates a virtual environment in
# build/python, once, and installs PyTorch, NumPy and pytest there with pip: about 3 GB to download and 6 GB on the disk,
# because PyTorch needs the libraries of CUDA even without a GPU. The settings of pip apply, for example PIP_INDEX_URL.
# Exit status 1 if a test fails or mypy finds an error.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit
torch=''
[[ ${1:-} != --torch ]] || { torch=yes && shift; }

has_torch() { # interpreter
    "$1" -c 'from torch.autograd.graph import increment_version' 2>/dev/null
}

for python in ${PYTHON:-python3 /usr/bin/python3}; do
    "$python" -c 'import pytest' 2>/dev/null && break
done
if [[ $torch ]] && ! has_torch "$python"; then
    python=$PWD/build/python/bin/python
    if ! has_torch "$python"; then
        free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
        ((free_kib > 9 << 20)) || { echo "$0: PyTorch needs 9 GB of free disk space in $PWD/build" >&2 && exit 1; }
        echo "installing PyTorch in build/python: about 3 GB to download"
        { python3 -m venv build/python && "$python" -m pip install -q 'torch>=2.1' numpy pytest; } ||
            { echo "$0: cannot install PyTorch; set PYTHON to an interpreter with PyTorch 2.1 or newer and pytest" >&2 && exit 1; }
    fi
fi
FDSL_LIBRARY=$(realpath -s "${1:-build/lib/libfdsl.so}") && export FDSL_LIBRARY || exit
status=0
if "$python" -c 'import pytest' 2>/dev/null; then
    # Tests start Python many times. It keeps what it compiles, outside of the source folders.
    unset PYTHONDONTWRITEBYTECODE
    PYTHONPATH=python PYTHONPYCACHEPREFIX=$PWD/build/pycache "$python" -m pytest -q -p no:cacheprovider -rs python/tests || status=1
else
    echo "  skipped python: pytest is not installed (apt install python3-pytest python3-numpy)"
fi
has_torch "$python" || echo "  skipped python: the tests of fdsl.torch need PyTorch 2.1 or newer; make check-python installs it and runs them"
if "$python" -c 'import mypy' 2>/dev/null; then
    "$python" -m mypy --strict --config-file python/pyproject.toml --cache-dir=/dev/null python/fdsl || status=1
fi
exit "$status"
