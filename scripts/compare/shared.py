"""What the scripts of this folder share: how they run fdsl-bench, and how they end. Needs only the standard library."""

import contextlib
import csv
import ctypes
import errno
import io
import os
import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "fdsl-bench")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """An error with a message of one line, and the exit status."""

    def __init__(self, text, status=1):
        super().__init__(text)
        self.status = status


def failing(script):
    """Returns a function that ends a script with a message and an exit status."""
    def fail(message, status=1):
        print(f"{script}: {message}", file=sys.stderr)
        sys.exit(status)
    return fail


def end_without(script, document, error, packages="PyTorch and NumPy (python3-torch, python3-numpy)"):
    """Ends a script that cannot import its packages. --help works without them."""
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(document.strip())
        sys.exit()
    failing(script)(f"{error}; install {packages}", 4)


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


def run_bench(fail, command, named=False):
    """Runs fdsl-bench. Returns the rows that it prints as CSV. With `named`, the message about a failure has the command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}; build it, or name it with --bench", 2)
    if done.returncode:
        fail(f"{' '.join(command)}: " * named + done.stderr.strip())
    return rows_of(done.stdout)


def joined(tables, remedy):
    """Returns the text of a CSV file with the rows of several tables (path, header, row, ...); None without a table."""
    header, records = None, []
    for path, columns, *rows in tables:
        if header not in (None, columns):
            raise Failed(f"{path} has other columns than the rows before it, {remedy}")
        header = columns
        records += rows
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *records] if header else [])
    return text.getvalue() or None


def append_rows(path, rows, columns):
    """Appends rows to a CSV file, with a header if it is new or empty."""
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if os.fstat(file.fileno()).st_size == 0:  # tell() fails for a pipe
            writer.writeheader()
        writer.writerows(rows)


def status_of(script, main):
    """Runs main(). Returns its exit status. If stdout or a file of rows cannot be written, prints one line."""
    try:
        try:
            status = main()
        except SystemExit as leaving:
            status = leaving.code
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        print(f"{script}: output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        return 1


@contextlib.contextmanager
def signals_held():
    """Signals that end the script wait until this block has stored the process that it starts. So the script ends that, too.
    The signals are not blocked, because the system would then send them to another thread, and new programs would inherit it."""
    arrived, handlers = [], {number: signal.getsignal(number) for number in ENDING}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def die_with_parent(number):
    """Makes the kernel send a signal to this process when its parent ends for any reason."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def start_process(command, **more):
    """Starts a program that gets SIGTERM when this script ends."""
    parent = os.getpid()

    def prepare():
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before
            os._exit(1)
    return subprocess.Popen(command, preexec_fn=prepare, **more)


def run_script(script, main, *errors):
    """Runs main() and ends the script with its status. Signals end it by SystemExit, so that it ends its processes first."""
    def interrupted(number, _):
        sys.exit(128 + number)
    for ending in ENDING:
        signal.signal(ending, interrupted)
    try:
        sys.exit(main())
    except (Failed, OSError, subprocess.CalledProcessError, *errors) as error:
        failing(script)(error, getattr(error, "status", 1))
