"""Tests fdsl.Monitor: its rows, phases and lifetime, and that every wrong argument is named."""

from __future__ import annotations

import csv
import gc
import os
import pathlib
import pickle
import subprocess
import threading
import time
from typing import Any

import pytest
from conftest import PROGRAM, run_python

import fdsl


def rows(path: Any) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def test_phases_are_named(tmp_path: pathlib.Path) -> None:
    path, before = tmp_path / "monitor.csv", thread_count()
    with fdsl.Monitor(path, interval=0.01, device="cpu", rank=3, name="süß, 1") as monitor:
        assert thread_count() == before + 2 and "running" in repr(monitor)
        for _ in range(2):
            for phase in "load", "train, é":
                monitor.phase(phase)
                time.sleep(0.1)
    assert thread_count() == before and "stopped" in repr(monitor)
    found = rows(path)
    phases = [row["phase"] for row in found]
    assert {"load", "train, é"} <= set(phases) <= {"idle", "load", "train, é"}
    assert phases.index("load") < phases.index("train, é") < len(phases) - phases[::-1].index("load")
    assert {(row["schema"], row["rank"], row["variant"], row["gpu"]) for row in found} == {("monitor/2", "3", "süß, 1", "")}
    times = [float(row["time_s"]) for row in found]
    assert times == sorted(times) and times[-1] > 0.35
    assert all(int(row["rss_bytes"]) > 1e6 for row in found)


def test_columns_are_those_of_the_program(tmp_path: pathlib.Path) -> None:
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    path = tmp_path / "monitor.csv"
    subprocess.run([PROGRAM, "--monitor", f"{path}:20", "--", "sleep", "0.1"], check=True, capture_output=True)
    of_program = len(rows(path))
    with fdsl.Monitor(str(path), interval=0.02):
        time.sleep(0.1)
    found = rows(path)
    assert len(found) > of_program and len({row["host"] for row in found}) == 1


def test_starts_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "monitor.csv"
    monitor = fdsl.Monitor(path, interval=0.01)
    monitor.stop()  # does nothing
    assert not path.exists()
    for _ in range(2):
        monitor.start()
        with pytest.raises(ValueError, match="^monitor: it is running"):
            monitor.start()
        monitor.phase("train")
        time.sleep(0.1)
        monitor.stop()
        monitor.stop()
        with pytest.raises(ValueError, match="^monitor: it is not running; call start"):
            monitor.phase("train")
    times = [float(row["time_s"]) for row in rows(path)]
    assert sum(after < before for before, after in zip(times, times[1:])) == 1


def test_an_exception_stops_it(tmp_path: pathlib.Path) -> None:
    before = thread_count()
    with pytest.raises(KeyError), fdsl.Monitor(tmp_path / "monitor.csv") as monitor:
        raise KeyError
    assert thread_count() == before and monitor._handle is None


def test_a_forgotten_monitor_writes_its_samples(tmp_path: pathlib.Path) -> None:
    gc.collect()  # ends the threads that earlier tests have left
    before = thread_count()
    monitor = fdsl.Monitor(tmp_path / "collected.csv", interval=0.01)
    monitor.start()
    time.sleep(0.2)
    del monitor
    gc.collect()
    assert thread_count() == before and len(rows(tmp_path / "collected.csv")) > 5
    path = str(tmp_path / "exit.csv")
    code = f"import fdsl, time; m = fdsl.Monitor({path!r}, interval=0.01); m.start(); time.sleep(0.3)"
    done = run_python(code)
    assert done.returncode == 0 and done.stdout == done.stderr == "", done
    assert len(rows(path)) > 5 and {row["variant"] for row in rows(path)} == {"-c"}


def test_threads_may_name_phases(tmp_path: pathlib.Path) -> None:
    with fdsl.Monitor(tmp_path / "monitor.csv", interval=0.01) as monitor:
        workers = [
            threading.Thread(target=lambda i=i: [monitor.phase(f"phase {i * k % 7}") for k in range(500)]) for i in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        monitor.phase("end")
        time.sleep(0.1)
    assert rows(tmp_path / "monitor.csv")[-1]["phase"] == "end"


def test_a_forked_child_needs_its_own_monitor(tmp_path: pathlib.Path) -> None:
    with fdsl.Monitor(tmp_path / "monitor.csv", interval=0.01) as monitor:
        child = os.fork()
        if child == 0:
            wrong = 0
            for call in monitor.start, monitor.stop, lambda: monitor.phase("child"):
                try:
                    call()
                    wrong += 1
                except fdsl.Error as error:
                    wrong += "before fork()" not in str(error)
            with fdsl.Monitor(tmp_path / "child.csv"):
                pass
            os._exit(wrong + (len(rows(tmp_path / "child.csv")) == 0))
        assert os.waitpid(child, 0)[1] == 0
        monitor.phase("parent")
    assert "child" not in {row["phase"] for row in rows(tmp_path / "monitor.csv")}


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (TypeError, "path", {"path": None}),
        (TypeError, "path", {"path": 3}),
        (ValueError, "path", {"path": ""}),
        (ValueError, "path", {"path": "a\0b"}),
        (TypeError, "interval", {"interval": "1"}),
        (TypeError, "interval", {"interval": True}),
        (ValueError, "interval", {"interval": 0.009}),
        (ValueError, "interval", {"interval": 61}),
        (ValueError, "interval", {"interval": float("nan")}),
        (TypeError, "device", {"device": 1.5}),
        (ValueError, "device", {"device": "gpu"}),
        (ValueError, "device", {"device": -2}),
        (TypeError, "rank", {"rank": "0"}),
        (ValueError, "rank", {"rank": -1}),
        (ValueError, "rank", {"rank": 1 << 32}),
        (TypeError, "name", {"name": 1}),
        (ValueError, "name", {"name": "a\0b"}),
    ],
)
def test_wrong_arguments_are_named(kind: type[Exception], name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(kind, match=f"^{name}: "):
        fdsl.Monitor(**{"path": "monitor.csv", **arguments})


def test_errors_of_start_and_phase_are_named(tmp_path: pathlib.Path) -> None:
    for path, words in (tmp_path / "none" / "x.csv", "^path: .*x.csv"), (tmp_path, "^path: .*folder"):
        with pytest.raises(ValueError, match=words):
            fdsl.Monitor(path).start()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="^path: .*other.csv"), fdsl.Monitor(tmp_path / "other.csv"):
        pass
    with pytest.raises(ValueError, match="^name: it is too long"):
        fdsl.Monitor(tmp_path / "x.csv", name=256 * "n").start()
    with pytest.raises(fdsl.Unavailable, match="^device: "):
        fdsl.Monitor(tmp_path / "x.csv", device=4096).start()
    with fdsl.Monitor(tmp_path / "x.csv") as monitor:
        for kind, name in (TypeError, None), (ValueError, ""), (ValueError, "a\nb"), (ValueError, 256 * "n"):
            with pytest.raises(kind, match="^name: "):
                monitor.phase(name)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pickle.dumps(monitor)
