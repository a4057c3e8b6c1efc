"""Searches classes as published scripts do.

>>> import fdsl
>>> table = fdsl.search.fractaldb(2000, seed=1)     # the first 1000 are those of FractalDB-1k
>>> generator = fdsl.Generator(class_table=table)
"""

from __future__ import annotations

import ctypes
from typing import Optional

from ._generator import ClassTable
from ._library import check, integer, lib

__all__ = ["fractaldb"]

_MAPS = 7
_NAMES = ("maps", *(f"{name}{m}" for m in range(1, _MAPS + 1) for name in "abcdefp"))


def fractaldb(n: int, seed: int = 1, threshold: float = 0.2, threads: Optional[int] = None) -> ClassTable:
    """Finds n classes of FractalDB: those among the candidates of NumPy's random numbers from this seed whose orbits visit
    at least the share `threshold` (0.01 to 0.35) of 512 x 512 cells. Seed 1 and threshold 0.2 give the published classes.
    The result does not depend on the number of threads."""
    count = integer("n", n, 1, 1 << 20)
    values = (ctypes.c_double * (count * len(_NAMES)))()
    number = 0 if threads is None else integer("threads", threads, 1, 8192)
    width = len(_NAMES)
    first = integer("seed", seed, 0, (1 << 32) - 1)
    check(lib.fdsl_search_fractals(first, float(threshold), count, number, values, width))
    rows = [tuple(values[c * width : (c + 1) * width]) for c in range(count)]
    return ClassTable("fractaldb", _NAMES, list(range(count)), rows)
