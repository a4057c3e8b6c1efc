#!/usr/bin/env bash
# Tests the Python package in python/ with the built library and program.
#
#   scripts/check/python.sh [LIBRARY]     build/lib/libfdsl.so by default
#
# PYTHON selects the interpreter; default: python3, or /usr/bin/python3 if only that has pytest. Tests that need PyTorch or
# a GPU are skipped if it is missing. If mypy is installed, it checks the types. If pytest is missing, all tests are skipped.
# Exit status 1 if a test fails or mypy finds an error.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit

for python in ${PYTHON:-python3 /usr/bin/python3}; do
    "$python" -c 'import pytest' 2>/dev/null && break
done
FDSL_LIBRARY=$(realpath -s "${1:-build/lib/libfdsl.so}") && export FDSL_LIBRARY || exit
status=0
if "$python" -c 'import pytest' 2>/dev/null; then
    PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 "$python" -m pytest -q -p no:cacheprovider -rs python/tests || status=1
else
    echo "  skipped python: pytest is not installed (apt install python3-pytest python3-numpy)"
fi
if "$python" -c 'import mypy' 2>/dev/null; then
    "$python" -m mypy --strict --cache-dir=/dev/null python/fdsl || status=1
fi
exit "$status"
