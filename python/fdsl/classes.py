"""Reads and writes the classes of any formula.

>>> import fdsl
>>> table = fdsl.classes.load("classes.csv", formula="fractaldb")
>>> fdsl.classes.save(table, "param", published=True)
"""

from __future__ import annotations

import ctypes
import os

from ._generator import ClassTable, Generator, Path, _path, _table_struct
from ._library import check, lib

__all__ = ["load", "save"]


def load(path: Path, formula: str = "auto") -> ClassTable:
    """Reads classes from a CSV file, or from class files of a published script: a folder of them, or one file.

    formula: the formula that the classes belong to; "auto" is that whose columns a CSV file has, so published files need
    its name. Raises ValueError for a file that is not valid.
    """
    with Generator(class_file=path, formula=formula, threads=1, batch=1) as generator:
        return generator.class_table


def save(table: ClassTable, path: Path, published: bool = False) -> None:
    """Writes classes to a CSV file, or if published is true, to a folder with one file per class, in the bytes that the
    published script of the formula writes. Replaces files."""
    check(lib.fdsl_write_classes(ctypes.pointer(_table_struct(table)), _path("path", os.fspath(path)), bool(published)))
