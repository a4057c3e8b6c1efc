"""Tests processes and threads: fork, spawn, pickling, parallel calls and import."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from conftest import COUNT, content, run_python, small

import fdsl


def images_of(generator: fdsl.Generator) -> bytes:
    images, labels = generator.generate(0, 9)
    return content(images) + content(labels)


def work(generator: fdsl.Generator, pipe: Any) -> None:
    pipe.send((images_of(generator), generator.config))


def test_spawned_workers_open_their_own_generator() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with small(out_res=40, seed=5, dtype="f16", mean=0.5) as g:
        worker = context.Process(target=work, args=(g, there))
        worker.start()
        assert here.poll(60)
        assert here.recv() == (images_of(g), g.config)
        worker.join()
        assert worker.exitcode == 0


def test_pickles_and_copies_are_equal() -> None:
    with small(out_res=40, seed=5, channels=3, layout="nhwc") as g:
        expected = images_of(g)
        for other in pickle.loads(pickle.dumps(g)), copy.copy(g), copy.deepcopy(g), fdsl.Generator(**g.config):
            assert other is not g and other.config == g.config and repr(other) == repr(g)
            assert images_of(other) == expected
            other.close()
        assert images_of(g) == expected


def test_a_forked_child_needs_its_own_generator() -> None:
    g = small(out_res=40)
    expected = images_of(g)
    child = os.fork()
    if child == 0:
        wrong = 0
        for use in (g.generate, lambda: g.classes, lambda: pickle.dumps(g)):
            try:
                use()
                wrong |= 1
            except fdsl.Error as error:
                wrong |= 0 if "before fork(); open another one in this process" in str(error) else 2
        g.close()
        try:
            with small(out_res=40) as own:
                wrong |= 0 if images_of(own) == expected else 4
        except BaseException:
            wrong |= 8
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert images_of(g) == expected


def test_a_child_of_a_busy_parent_does_not_hang() -> None:
    """The parent calls fork() while another thread is in a call."""
    code = """
import os, threading, fdsl
g = fdsl.Generator(5, res=256, batch=64, threads=1)
stop = False
def loop():
    while not stop: g.generate(0)
thread = threading.Thread(target=loop); thread.start()
results = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        wrong = 0
        for use in (lambda: g.generate(0), lambda: g.classes, lambda: g.memory_bytes):
            try: use(); wrong = 1
            except fdsl.Error: pass
        g.close(); os._exit(wrong)
    results.append(os.waitpid(child, 0)[1])
stop = True; thread.join()
print(results == [0] * 20)
"""
    done = run_python(code)
    assert done.stdout == "True\n", done.stderr


def test_threads_share_a_generator() -> None:
    with small(out_res=40) as g:
        expected = [content(g.generate(first, 5)[0]) for first in range(8)]
        wrong: list[int] = []

        def loop(first: int) -> None:
            for _ in range(30):
                if content(g.generate(first, 5)[0]) != expected[first]:
                    wrong.append(first)

        threads = [threading.Thread(target=loop, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_other_threads_run_during_a_call() -> None:
    """A call releases the GIL."""
    with fdsl.Generator(5, res=512, batch=512, threads=1) as g:
        thread = threading.Thread(target=g.generate)
        thread.start()
        steps = 0
        while thread.is_alive():
            time.sleep(0.001)
            steps += 1
        assert steps > 5


def test_close_while_another_thread_calls() -> None:
    for _ in range(10):
        g = small()
        ends: list[str] = []

        def loop(g: fdsl.Generator = g, ends: list[str] = ends) -> None:
            try:
                while True:
                    g.generate(0, COUNT)
            except ValueError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        g.close()
        for thread in threads:
            thread.join()
        assert ends == ["generator: it is closed"] * 3


def test_generators_are_collected() -> None:
    gc.disable()
    try:
        g = small()
        reference = weakref.ref(g)
        g.generate(0, 3)
        del g
        assert reference() is None
    finally:
        gc.enable()


def test_import_is_light(tmp_path: pathlib.Path) -> None:
    """Compares the CPU time of the import with that of starting the interpreter; compiled files are kept, as after pip."""
    code = """
import json, sys, time
begin = time.process_time(); before = set(sys.modules)
import fdsl
elapsed = time.process_time() - begin
threads = sum(line.startswith('Threads') and int(line.split()[1]) for line in open('/proc/self/status'))
maps = open('/proc/self/maps').read()
print(json.dumps([begin, elapsed, threads, 'libcuda' in maps, sorted(set(sys.modules) - before)]))
"""
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    run_python("import fdsl", **compiled)
    ratios, times = [], []
    for _ in range(9):
        begin, elapsed, threads, cuda, modules = json.loads(run_python(code, **compiled).stdout)
        ratios.append(elapsed / begin)
        times.append(1e3 * elapsed)
        assert threads == 1 and not cuda
        assert not {"numpy", "torch", "threading", "subprocess", "multiprocessing"} & set(modules)
    print(f"import fdsl: median {statistics.median(times):.1f} ms, {statistics.median(ratios):.1f} starts of the interpreter")
    assert statistics.median(ratios) < 3


def test_works_without_numpy() -> None:
    code = """
import sys
sys.modules['numpy'] = None
import fdsl
g = fdsl.Generator(5, res=32, batch=4)
images, labels = g.generate(0)
memory = bytearray(images.nbytes)
g.fill(memoryview(memory).cast('B', images.shape), numbers=[0, 1, 2, 3])
import ctypes
print(memory == ctypes.string_at(images.ptr, images.nbytes))
try: images.numpy()
except ImportError: print('ImportError')
"""
    assert run_python(code).stdout == "True\nImportError\n"


def test_a_constructor_that_fails_leaves_nothing_to_close() -> None:
    """Python prints errors of __del__() on stderr, and no exception shows them."""
    code = """
import fdsl
for words in dict(classes=0), dict(generator='none'), dict(device='none'), dict(class_list=[]), dict(preset_file='/none'):
    try: fdsl.Generator(**words)
    except (ValueError, fdsl.Error, OSError) as error: print(type(error).__name__)
"""
    done = run_python(code)
    assert done.returncode == 0 and done.stdout.count("\n") == 5 and done.stderr == "", done


def test_doctests() -> None:
    code = """
import doctest, fdsl, fdsl._array, fdsl._embeddings, fdsl._generator, fdsl._images, fdsl._memory, fdsl._monitor, fdsl._trainer
for module in fdsl, fdsl._array, fdsl._embeddings, fdsl._generator, fdsl._images, fdsl._memory, fdsl._monitor, fdsl._trainer:
    print(doctest.testmod(module).failed)
"""
    pytest.importorskip("numpy")
    assert run_python(code).stdout == "0\n" * 8


def test_readme_examples_that_need_no_gpu(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """The Python blocks of python/README.md and docs/python.md compile. Those without PyTorch, CUDA, CuPy and JAX run."""
    pytest.importorskip("numpy")
    from conftest import ROOT

    ran = 0
    monkeypatch.chdir(tmp_path)  # some blocks write files
    for name in ("python/README.md", "docs/python.md"):
        if not (ROOT / name).exists():
            continue
        for block in (ROOT / name).read_text().split("```python\n")[1:]:
            code = block.split("```")[0]
            compile(code, name, "exec")
            if "torch" not in code and "cuda" not in code and "cupy" not in code and "jax" not in code:
                done = run_python(code)
                assert done.returncode == 0, done.stderr
                ran += 1
    assert ran or not (ROOT / "python/README.md").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_no_compiler_is_needed() -> None:
    environment = {
        "PATH": "/nonexistent",
        "FDSL_LIBRARY": fdsl.library_path(),
        "PYTHONPATH": os.path.dirname(os.path.dirname(fdsl.__file__)),
    }
    code = "import fdsl; print(fdsl.Generator(3, res=16, batch=2).generate(0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "(2, 1, 16, 16)\n", done.stderr


OLD = "SimpleNamespace(graph=SimpleNamespace())"
NEW = "SimpleNamespace(graph=SimpleNamespace(increment_version=None))"


@pytest.mark.parametrize(
    ("version", "autograd", "refused"),
    [
        ("0.4.1", "SimpleNamespace()", True),
        ("1.13.0a0+git1a2b", OLD, True),
        ("2.0.1", OLD, True),
        ("2.1.0", NEW, False),
        ("2.15.0+cu132", NEW, False),
    ],
)
def test_old_pytorch_is_refused(version: str, autograd: str, refused: bool, tmp_path: Any) -> None:
    """A stand-in for PyTorch has the version. Before 2.1, autograd cannot be told that fill() overwrites a tensor."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass Tensor: pass\nfrom types import SimpleNamespace\n"
        f"autograd = {autograd}\nempty = lambda size: Tensor()\n_C = SimpleNamespace()\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import fdsl, torch
for attempt in (lambda: __import__("fdsl.torch"), lambda: fdsl.Generator(2, res=8).fill(torch.Tensor())):
    try: attempt()
    except (ImportError, TypeError, AttributeError) as error: print(type(error).__name__, error)
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    if refused:
        reason = (
            f"PyTorch {version} would not notice that a batch was overwritten before its backward pass, and would compute "
            "wrong gradients; install PyTorch 2.1 or newer"
        )
        assert done.stdout == f"ImportError fdsl.torch: {reason}\nTypeError images: {reason}\n"
    else:
        assert "PyTorch" not in done.stdout and "ImportError" not in done.stdout


def test_ctrl_c_ends_the_opening_of_a_url() -> None:
    """A server accepts the connection and does not answer. No thread and no connection is left."""
    code = (
        "import os, signal, socket, threading, time\n"
        "import fdsl\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "url = f'http://127.0.0.1:{server.getsockname()[1]}/a.tar'\n"
        "def count(what): return len(os.listdir(f'/proc/self/{what}'))\n"
        "for attempt in range(2):\n"  # the first one opens the libraries
        "    threads, files = count('task'), count('fd')\n"
        "    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))\n"
        "    timer.start()\n"
        "    begin = time.monotonic()\n"
        "    try:\n"
        "        fdsl.Shards(url)\n"
        "    except KeyboardInterrupt:\n"
        "        print(attempt, time.monotonic() - begin < 3)\n"
        "    except fdsl.Unavailable:\n"
        "        print('unavailable')\n"
        "        os._exit(0)\n"
        "    timer.join()\n"
        "print(count('task') - threads, count('fd') - files)\n"
    )
    result = run_python(code, no_proxy="127.0.0.1")
    assert result.stdout in ("0 True\n1 True\n0 0\n", "unavailable\n"), result.stderr


@pytest.mark.parametrize("what", ["Generator(", "Images(count=9, "])
def test_ctrl_c_ends_the_first_use_of_a_published_set(what: str, tmp_path: Any) -> None:
    """Without a cache file, it takes most of a minute."""
    code = (
        "import os, signal, threading, time\n"
        "import fdsl\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))\n"
        "timer.start()\n"
        "begin = time.monotonic()\n"
        "try:\n"
        f"    fdsl.{what}preset='visualatom-script-1k', random='published')\n"
        "except KeyboardInterrupt:\n"
        "    print(0.5 < time.monotonic() - begin < 10)\n"
        "timer.join()\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    result = run_python(code, XDG_CACHE_HOME=str(tmp_path))
    assert result.stdout == "True\n0\n", result.stderr + result.stdout
    assert not list(tmp_path.rglob("*.states"))
