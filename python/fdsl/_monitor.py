"""The monitor: GPU and CPU load of this process over time, in a CSV file."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from _thread import allocate_lock
from typing import Any, NoReturn, Optional

from ._generator import Path, _device, _text
from ._library import Error, MonitorConfigStruct, check, integer, lib
from ._stream import _warn, named, number


class Monitor:
    """Samples the GPUs and this process, and appends the samples to a CSV file, whose columns are those of
    `fdsl-bench --monitor FILE`. `make plots` of fdsl-bench draws them.

    path       the CSV file, new or with rows of a monitor
    interval   seconds between two samples, 0.01 to 60, rounded to milliseconds
    device     which GPUs: None: all that this process can use; "cpu": none; or a device as for Generator
    rank       number of this process in the rows; ranks may write to the same file
    name       name of the program in the rows; None: the name of the script

    Between start() and stop(), two threads of the library take samples and write them to the file every 10 seconds. A
    `with` block calls both. Without a GPU or NVML, the columns of GPUs are empty; without NVML, a RuntimeWarning says so.
    The values of the process do not include its children, such as the workers of a DataLoader.

    >>> import fdsl, tempfile
    >>> file = tempfile.NamedTemporaryFile(suffix=".csv")
    >>> with fdsl.Monitor(file.name, interval=0.1, device="cpu") as monitor:
    ...     for epoch in range(2):
    ...         monitor.phase("train")
    ...         total = sum(range(1000))
    ...         monitor.phase("validate")
    >>> file.readline()[:38]
    b'schema,time_utc,host,job_id,revision,r'

    Thread-safe. Raises ValueError or TypeError, whose message names the argument; Unavailable if this machine lacks the
    device; and Error if the file cannot be written, or in a forked process. A monitor that is garbage collected, or that
    runs when the interpreter exits, is stopped.
    """

    def __init__(
        self, path: Path, *, interval: float = 0.5, device: Any = None, rank: int = 0, name: Optional[str] = None,
    ) -> None:  # fmt: skip
        c = MonitorConfigStruct()
        check(lib.fdsl_monitor_config_init(c, ctypes.sizeof(c)))
        c.path, c.interval_s = named(path), number("interval", interval, 0.01, 60)
        if device is not None:
            c.device = _device(device)
        c.rank = integer("rank", rank, 0, (1 << 32) - 1)
        script = os.path.basename(sys.argv[0]) if sys.argv else ""
        if name is not None:
            c.name = _text("name", name)
        elif script and script.isprintable():  # else the library takes the name of the interpreter
            c.name = script.encode()
        self._config = c
        self._shown = f"fdsl.Monitor({os.fspath(path)!r})"
        self._process = os.getpid()
        self._lock = allocate_lock()
        self._handle: Optional[int] = None
        self._finalize: Any = None

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # checked before locking, because the parent may have held the lock at fork()
            raise Error("monitor: it was made before fork(); make another one in this process")

    def start(self) -> None:
        """Starts the monitor, whose first phase is "idle". It can be started again after stop(), for another run in the
        same file."""
        self._check_process()
        with self._lock:
            if self._handle is not None:
                raise ValueError("monitor: it is running")
            handle = ctypes.c_void_p()
            check(lib.fdsl_monitor_start(self._config, handle))
            self._handle = handle.value
            self._finalize = weakref.finalize(self, lib.fdsl_monitor_stop, self._handle)
        _warn()

    def phase(self, name: str) -> None:
        """Gives all following samples this phase, a name of 1 to 255 bytes in UTF-8. The monitor keeps each different name
        until it stops."""
        text = _text("name", name)
        self._check_process()
        with self._lock:
            if self._handle is None:
                raise ValueError("monitor: it is not running; call start()")
            check(lib.fdsl_monitor_phase(self._handle, text))

    def stop(self) -> None:
        """Stops the monitor and writes the remaining samples. If it is not running, does nothing."""
        self._check_process()
        with self._lock:
            if self._handle is None:
                return
            self._handle = None
            check(self._finalize())
        _warn()

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError("Monitor: it cannot be pickled or copied; make one in each process")

    def __repr__(self) -> str:
        return f"<{self._shown}, {'running' if self._handle is not None else 'stopped'}>"
