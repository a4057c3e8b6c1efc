"""Tests scripts/compare/pytorch.py --ranks with PyTorch on a CPU. The tests are skipped if PyTorch or mpirun is missing.

  python3 -m pytest tests/torch_ranks_test.py

Needs a built fdsl-bench (or FDSL_BENCH=PATH).
"""

import csv
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")
if not shutil.which("mpirun"):
    pytest.skip("no mpirun", allow_module_level=True)

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPARE = ROOT / "scripts/compare"
BENCH = os.environ.get("FDSL_BENCH", str(ROOT / "fdsl-bench"))
# lenet has no dropout, so its losses can be compared.
JOB = [sys.executable, str(COMPARE / "pytorch.py"), "--bench", BENCH, "--variant", "train-omp", "--model", "lenet", "--threads", "1",
       "--test-size", "100", "--workers", "1"]


def environment(**more):
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", **more}


def run(*arguments, status=0, **more):
    done = subprocess.run(JOB + [str(word) for word in arguments], capture_output=True, text=True, check=False,
                          env=environment(**more))
    assert done.returncode == status, done.stderr
    return done


def losses(path, ranks):
    """Returns the losses of the epochs on this number of ranks, by variant."""
    found = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["ranks"] == str(ranks) and (ranks == 1 or row["rank"] == "all"):
                found.setdefault(row["variant"], []).append(float(row["train_loss"]))
    return found


def processes(text):
    """Returns the processes with this text in their command line."""
    return [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if text in read(path)]


def no_processes(text):
    """Waits up to 10 s for these processes to end."""
    for _ in range(100):
        if not processes(text):
            return True
        time.sleep(0.1)
    return False


def read(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # the process has ended
        return ""


@pytest.mark.parametrize("scaling, batch", [("weak", 32), ("strong", 65)])
def test_same_losses_as_ours(tmp_path, scaling, batch):
    """A step uses the whole training set, so the order of the samples does not matter. With 65 samples, the ranks' parts have
    different sizes."""
    path = tmp_path / "rows.csv"
    run("--ranks", "2", "--scaling", scaling, "--batch", batch, "--train-size", 64 if scaling == "weak" else 65, "--epochs", 12,
        "--modes", "resident,loader", "--lr-scale", "linear", "--out", path)
    found = losses(path, 2)
    assert set(found) == {"train-omp", "torch-cpu", "torch-loader"}
    assert found["train-omp"][-1] < found["train-omp"][0] - 0.1
    for variant in ("torch-cpu", "torch-loader"):
        assert found[variant] == pytest.approx(found["train-omp"], rel=1e-4)


def test_ranks_do_not_change_the_training(tmp_path):
    """With the same global batch, DDP on two ranks has the losses of one rank. The last step has one sample, so one rank
    has none."""
    path = tmp_path / "rows.csv"
    done = run("--ranks", "2,1", "--scaling", "strong", "--batch", 32, "--train-size", 129, "--epochs", 3, "--modes",
               "resident,loader,best", "--out", path)
    one, two = losses(path, 1), losses(path, 2)
    assert set(one) == set(two) == {"train-omp", "torch-cpu", "torch-loader", "torch-best"}
    for variant in one:
        assert len(one[variant]) == 3 and two[variant] == pytest.approx(one[variant], rel=1e-3), variant
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [[ranks, name] for ranks in "12" for name in
                                                          ("train-omp", "torch-cpu", "torch-loader", "torch-best")]


@pytest.mark.parametrize("fault, words", [
    ("os.kill(os.getpid(), 9)", "PyTorch failed on 2 ranks: rank 1: ended by signal 9; lower --batch or --ranks"),
    ("sys.modules['torch_training'] = None", "PyTorch failed on 2 ranks in mode start: rank 1: ModuleNotFoundError: import of "
                                             "torch_training halted; None in sys.modules; try --ranks 1"),
])
def test_failed_rank(tmp_path, fault, words):
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nif os.environ.get('RANK') == '1' and 'LOCAL_RANK' in os.environ:\n"
                                               f"    {fault}\n")
    done = run("--ranks", "1,2", "--batch", 32, "--train-size", 64, "--epochs", 1, status=1, PYTHONPATH=str(tmp_path),
               TMPDIR=str(tmp_path))
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"compare/pytorch.py: {words} (output: {tmp_path}/fdsl-ddp-"), done.stderr
    assert "train-omp" in done.stdout  # what was measured before
    assert no_processes(str(tmp_path))


def test_a_failure_of_fdsl_bench_is_reported():
    done = run("--ranks", "1,2", "--batch", 32, "--train-size", 64, "--epochs", 1, "--sync", "nccl", status=4)
    assert "--sync nccl" in done.stderr and "mpirun" not in done.stderr
    assert done.stderr.endswith("compare/pytorch.py: fdsl-bench failed on 2 ranks, see above; try another --sync or variant, or "
                                "fewer --ranks\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_script(tmp_path, number):
    with subprocess.Popen(JOB + ["--ranks", "2", "--batch", "32", "--train-size", "3000", "--epochs", "100"],
                          env=environment(TMPDIR=str(tmp_path)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as script:
        for line in script.stderr:
            if "PyTorch" in line:
                break
        time.sleep(8)
        assert processes(str(tmp_path))
        script.send_signal(number)
        script.wait(30)
    assert no_processes(str(tmp_path))
    assert number == signal.SIGKILL or not [path for path in tmp_path.iterdir() if path.name.startswith(("fdsl", "tmp"))]
