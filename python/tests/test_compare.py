"""Runs scripts/compare/python_streams.py on the CPU."""

from __future__ import annotations

import csv
import importlib.util
import os
import pathlib
import subprocess
import sys
from typing import Any

import fdsl
import pytest
from conftest import PROGRAM, ROOT

SCRIPT = ROOT / "scripts" / "compare" / "python_streams.py"
if not SCRIPT.exists():
    pytest.skip("needs the source tree", allow_module_level=True)
TORCH = importlib.util.find_spec("torch") is not None
NUMPY = importlib.util.find_spec("numpy") is not None


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    paths = os.path.dirname(os.path.dirname(fdsl.__file__))
    environment = {**os.environ, "PYTHONPATH": paths, "FDSL_LIBRARY": fdsl.library_path()}
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("compare")
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    for encode in "jpeg", "npy":
        words = f"--prepare {encode} --from synth --classes 4 --samples 300 --res 32 --channels 1 --encode {encode} --store shards"
        done = subprocess.run([PROGRAM, *words.split()], cwd=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return path


def test_all_parts_are_measured(folder: pathlib.Path) -> None:
    out = folder / "out.csv"
    done = run("--device", "cpu", "--data-jpeg", folder / "jpeg", "--data-raw", folder / "npy", "--rows", 300, "--seconds", 0.05,
               "--rounds", 2, "--workers", 2, "--bench", PROGRAM, "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    own = {"a": 1, "b": 1, **({"c": 1, "d": 1, "e": 6} if NUMPY else {})}
    for part, count in own.items():
        assert sum(row["part"] == part and row["implementation"] == "fdsl" for row in rows) == 2 * count, done.stderr
    found = {(row["part"], row["implementation"]) for row in rows}
    assert {("a", "stream"), *({("c", "ops-omp"), ("d", "fdsl.Loader")} if NUMPY else set())} <= found
    assert (("d", "fdsl.torch.Loader") in found) == (TORCH and NUMPY)
    peers = {(part, name) for part, name in found if name.startswith("torch")}
    assert {part for part, _ in peers} == (set("bcde") if TORCH and NUMPY else set())
    assert all(float(row["value"]) > 0 and row["unit"] and row["device"] == "cpu" for row in rows)
    assert len(done.stdout.splitlines()) == 1 + len({(row["what"], row["implementation"]) for row in rows})
    assert ("numpy is skipped" in done.stderr) != NUMPY and ("torch is skipped" in done.stderr) != TORCH


def test_what_is_not_measured_is_named(folder: pathlib.Path) -> None:
    done = run("--device", "cpu", "--only", "a,b", "--data-raw", folder / "npy", "--seconds", 0.05, "--rounds", 1, "--workers", 1)
    assert done.returncode == 0 and "part a is skipped: --data-jpeg is not given" in done.stderr, done.stderr
    assert not any(line.startswith("a ") for line in done.stdout.splitlines())
    done = run("--device", "cpu", "--only", "a", "--bench", PROGRAM)
    assert done.returncode == 4 and "part a is skipped" in done.stderr
    done = run("--only", "a,x")
    assert done.returncode == 2 and "'a,x' is not a list" in done.stderr
    done = run("--device", "cpu", "--only", "a", "--data-jpeg", folder / "jpeg", "--bench", "/bin/false")
    assert done.returncode == 1 and "/bin/false" in done.stderr
