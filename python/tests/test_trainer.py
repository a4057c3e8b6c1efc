"""fdsl.Trainer on the CPU: the parameters of the program after the same steps, checkpoints in both directions, batches of the
caller and of a Loader, two ranks, and errors."""

from __future__ import annotations

import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import PROGRAM, ROOT, run_python

import fdsl

numpy = pytest.importorskip("numpy")

OWN: dict[str, Any] = {"data": "digits", "model": "mlp", "train_size": 53, "test_size": 11, "batch": 16, "seed": 5}
SMALL: dict[str, Any] = {"variant": "train-omp", "num_threads": 1, "epochs": 2, **OWN}


def run(folder: pathlib.Path, variant: str = "train-omp", ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Trains with the program. Returns its parameters."""
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    path = folder / "program.safetensors"
    words = [PROGRAM, "--workload", "train", "--variant", variant, "--threads", "1", "--export", str(path)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    if ranks > 1:
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    with fdsl.Trainer(variant="train-naive", init=path, **{**OWN, "epochs": 1}) as trainer:
        return arrays(trainer.state_dict())


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters as arrays of NumPy; with PyTorch they are tensors."""
    return {name: numpy.asarray(values) for name, values in state.items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Returns whether two sets of parameters have the same bits."""
    left, right = arrays(left), arrays(right)
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.mark.parametrize("variant", ["train-naive", "train-omp"])
def test_own_data_gives_the_programs_parameters(tmp_path: pathlib.Path, variant: str) -> None:
    expected = run(tmp_path, variant, epochs=2, optimizer="adamw", lr=1e-3, drop_last=True, **OWN)
    with fdsl.Trainer(**{**SMALL, "variant": variant}, optimizer="adamw", lr=1e-3, drop_last=True) as trainer:
        assert trainer.variant == variant and trainer.position == (0, 3) and trainer.classes == 10
        assert trainer.parameters == sum(values.size for values in expected.values()) < trainer.memory_bytes / 4
        loss = trainer.step()
        trainer.step(count=2)
        assert trainer.epoch == 1 and 1 < float(loss) < 4 and f"{loss:.3f}" == f"{float(loss):.3f}"
        loss = trainer.step()
        assert float(loss) == trainer._loss != float(trainer.step()) and loss.item() == float(loss)
        loss = trainer.step()
        assert trainer.read().loss == float(loss)  # read() took the steps of this loss
        trainer.fit()
        assert same(trainer.state_dict(), expected)
        assert trainer.history["test_accuracy"] == trainer.evaluate().accuracy
        with pytest.raises(ValueError, match="2 epochs"):
            trainer.step()


@pytest.mark.parametrize("feed", ["live", "constant"])
def test_generated_data_give_the_programs_parameters(tmp_path: pathlib.Path, feed: str) -> None:
    options = {**OWN, "data": "synth", "classes": 10, "res": 32, "out_res": 28, "channels": 1, "feed": feed, "epochs": 2}
    expected = run(tmp_path, **options)
    with fdsl.Trainer(**{**SMALL, **options}) as trainer:
        trainer.fit()
        assert same(trainer.state_dict(), expected)


def test_checkpoints_are_those_of_the_program(tmp_path: pathlib.Path) -> None:
    expected = run(tmp_path, epochs=2, **OWN)
    with fdsl.Trainer(**SMALL) as trainer:
        trainer.step(count=3)  # within the first epoch
        trainer.save(tmp_path / "library")
        trainer.fit()
        final = trainer.state_dict()
        assert same(final, expected)
        trainer.load(tmp_path / "library")
        assert (trainer.epoch, trainer.position) == (0, (3, 4))
        trainer.fit()
        assert same(trainer.state_dict(), expected)
    assert same(run(tmp_path, epochs=2, checkpoint=tmp_path / "library", resume=True, **OWN), expected)
    run(tmp_path, epochs=1, checkpoint=tmp_path / "program", **OWN)
    with fdsl.Trainer(**SMALL, checkpoint=tmp_path / "program", resume=True) as trainer:
        assert trainer.epoch == 1
        trainer.fit()
        assert same(trainer.state_dict(), expected)
    with fdsl.Trainer(**{**SMALL, "lr": 0.5}) as trainer, pytest.raises(ValueError, match="lr"):
        trainer.load(tmp_path / "program")


def batches(count: int = 40, size: int = 16, dtype: str = "u1") -> list[tuple[Any, Any]]:
    draw = numpy.random.default_rng(3)
    images = draw.integers(0, 256, (count, 1, 5, 7)).astype(dtype)
    labels = draw.integers(0, 3, count).astype("i8")
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, count, size)]


def test_batches_of_the_caller() -> None:
    """The network, its update and its epochs are those of float batches that have the same values."""
    results = []
    for variant, convert in ("train-naive", numpy.array), ("train-naive", lambda v: v.astype("f4") / 255), ("train-omp", numpy.array):
        data = [(convert(images), labels) for images, labels in batches()]
        with fdsl.Trainer(variant=variant, num_threads=1, model="logreg", classes=3, lr=0.1, epochs=3) as trainer:
            trainer.fit(data, epochs=2)
            assert (trainer.epoch, trainer.position, trainer.batch) == (2, (0, 3), 16)
            before = trainer.evaluate(data)
            trainer.fit(data)
            after = trainer.evaluate(data)
            assert after.loss < before.loss and after.samples == 40
            results.append(trainer.state_dict())
    for other in results[1:]:
        for name, values in results[0].items():
            assert numpy.allclose(values, other[name], atol=1e-5), name


def test_a_masked_sample_does_not_count() -> None:
    (images, labels), *_ = batches(16)
    masked, other = labels.copy(), images.copy()
    masked[3], other[3] = -1, 255 - images[3]
    states = []
    for values in images, other:
        with fdsl.Trainer(variant="train-naive", model="logreg", classes=3, samples=16, epochs=1) as trainer:
            trainer.step(values, masked)
            assert trainer.read().samples == 15
            states.append(trainer.state_dict())
    assert same(*states)


def test_mixed_and_multi_hot_batches() -> None:
    (images, labels), *_ = batches(16, dtype="f4")
    images = images / 255
    mixed = 0.7 * images + 0.3 * images[::-1]
    targets = 0.7 * numpy.eye(3, dtype="f4")[labels] + 0.3 * numpy.eye(3, dtype="f4")[labels[::-1]]
    options: dict[str, Any] = {"variant": "train-naive", "model": "logreg", "classes": 3, "samples": 16, "epochs": 1, "optimizer": "sgd",
                               "momentum": 0, "lr": 1.0}  # fmt: skip
    with fdsl.Trainer(**options) as trainer:
        start = trainer.state_dict() if trainer._handle else None
        trainer.step(mixed.astype("f4"), targets)
        ours = arrays(trainer.state_dict())
        with pytest.raises(ValueError, match="soft targets"):
            trainer._batch(mixed.astype("f4"), targets[[1, 0, *range(2, 16)]], None)
        for share, words in (0.0, "not above 0"), (1.5, "not above 0"), (0.7, "soft targets have it"):
            with pytest.raises(ValueError, match=f"share: .*{words}"):
                trainer.step(mixed.astype("f4"), targets, share=share)
        given, _, kept = trainer._batch(mixed.astype("f4"), numpy.eye(3, dtype="f4")[labels], None)  # as with timm's prob below 1
        assert given.share == 1 and list(kept[-1]) == list(labels)
    with fdsl.Trainer(**options) as trainer:
        trainer.step(mixed.astype("f4"), labels, share=0.7)
        assert all(numpy.allclose(values, ours[name], atol=1e-6) for name, values in arrays(trainer.state_dict()).items())
    for loader, words in ([], "no batch"), ((batch for batch in ()), "len"):
        with pytest.raises((TypeError, ValueError), match=words):
            fdsl.Trainer(**options).fit(loader)
    assert start is None
    with fdsl.Trainer(**{**options, "lr": 1e-30}) as trainer:  # leaves the initial parameters
        trainer.step(mixed.astype("f4"), targets)
        start = arrays(trainer.state_dict())
    weight, bias = (next(start[name] for name in start if name.endswith(end)) for end in ("weight", "bias"))
    logits = mixed.reshape(16, -1) @ weight.T + bias
    softmax = numpy.exp(logits) / numpy.exp(logits).sum(axis=1, keepdims=True)
    expected = weight - ((softmax - targets).T @ mixed.reshape(16, -1)) / 16
    assert numpy.allclose(next(ours[name] for name in ours if name.endswith("weight")), expected, atol=1e-5)
    rows = numpy.zeros((16, 3), "u1")
    rows[numpy.arange(16), labels] = 1
    with fdsl.Trainer(**options, loss="bce", multi_hot=True) as trainer:
        trainer.step(images.astype("f4"), rows)
        assert trainer.read().samples == 16
        assert trainer.evaluate([(images.astype("f4"), rows)]).samples == 16


def test_a_loader_gives_its_batches(tmp_path: pathlib.Path) -> None:
    states, scores = [], []
    source = fdsl.Images(formula="visualatom", classes=3, res=32, out_res=16, count=24)
    for stream in True, False:
        loader = fdsl.Loader(source, 8, seed=2, num_threads=1)
        with fdsl.Trainer(variant="train-naive", model="logreg", classes=3, epochs=2, batch=None if stream else 8) as trainer:
            trainer.fit(loader if stream else [(i.numpy().copy(), n.numpy().copy()) for i, n in loader], epochs=1)
            assert trainer.epoch == 1
            if stream:
                trainer.save(tmp_path)
                trainer.load(tmp_path)
            states.append(trainer.state_dict())
            scores.append(trainer.evaluate([(i.numpy().copy(), n.numpy().copy()) for i, n in loader]))
        loader.close()
    with fdsl.Loader(source, 8, seed=3, num_threads=1) as loader:  # another order
        with fdsl.Trainer(loader, variant="train-naive", model="logreg", classes=3, epochs=2) as trainer:
            with pytest.raises(ValueError, match="samples"):
                trainer.load(tmp_path)
    assert same(*states)
    assert scores[0][:3] == pytest.approx(scores[1][:3])  # the epochs have other orders
    assert scores[0].samples == 24


RANK = """
import os, fdsl
try:
    fdsl.Trainer(variant="train-omp", num_threads=1, epochs=2 + int(os.environ["RANK"]), **{own})
except ValueError as error:
    assert "rank 1: its options differ from those of rank 0" in str(error), error
else:
    raise AssertionError("ranks with different options were accepted")
with fdsl.Trainer(variant="train-omp", num_threads=1, epochs=2, **{own}) as trainer:
    trainer.fit()
    state = trainer.state_dict()
    if state:
        import numpy
        numpy.savez("{path}", **state)
"""


def test_two_ranks_give_the_programs_parameters(tmp_path: pathlib.Path) -> None:
    own = {**OWN, "batch": 8}
    code = RANK.format(own=own, path=tmp_path / "state.npz")
    environment = {**os.environ, "FDSL_LIBRARY": fdsl.library_path(), "PYTHONPATH": str(ROOT / "python"), "WORLD_SIZE": "2"}
    port = 20000 + os.getpid() % 20000
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True,
            env={**environment, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    with numpy.load(tmp_path / "state.npz") as ours:
        assert same(dict(ours), run(tmp_path, ranks=2, epochs=2, **own))


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    port = 20000 + (os.getpid() + 7000) % 20000
    meet = {"address": "127.0.0.1", "port": port, "variant": "train-omp", "num_threads": 1}
    greeting = struct.Struct("=3I")

    def open_as(rank: int, ranks: int, **options: Any) -> subprocess.Popen[str]:
        words = {**meet, **OWN, "batch": 8, **options, "rank": rank, "world_size": ranks}
        code = f"import fdsl; fdsl.Trainer(**{words})"
        environment = {**os.environ, "FDSL_LIBRARY": fdsl.library_path(), "PYTHONPATH": str(ROOT / "python")}
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment)

    def connect(data: bytes) -> socket.socket:
        for _ in range(500):
            try:
                connection = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                time.sleep(0.01)
            else:
                connection.sendall(data)
                return connection
        raise TimeoutError("rank 0 does not listen")

    first = open_as(0, 2)
    with connect(b"GET / HTTP/1") as stranger:  # is closed, and the ranks go on meeting
        assert stranger.recv(1) == b""
    assert "world_size: it is 3, but 2 on rank 0" in open_as(1, 3).communicate(timeout=60)[1]
    other = open_as(1, 2, lr=0.25)
    for process in (first, other):
        assert "rank 1: its options differ from those of rank 0" in process.communicate(timeout=60)[1]

    first = open_as(0, 2)
    word = 0x66647377
    with connect(greeting.pack(word, 1, 2)) as peer:
        assert greeting.unpack(peer.recv(12, socket.MSG_WAITALL)) == (word, 1, 2)
        peer.sendall(b"\xff" * 64)
        assert "rank 1 sent 18446744073709551615 bytes" in first.communicate(timeout=60)[1]


def test_parameters_can_be_replaced(tmp_path: pathlib.Path) -> None:
    with fdsl.Trainer(**SMALL) as trainer:
        start = trainer.state_dict()
        trainer.save(tmp_path / "begin")
        trainer.step()
        trainer.save(tmp_path / "step")
        trainer.save(tmp_path / "step")
        trainer.load(tmp_path / "begin")
        with pytest.raises(ValueError, match="step holds a checkpoint of a later step"):  # load() would take that one
            trainer.save(tmp_path / "step")
        trainer.step()
        with pytest.raises(ValueError, match="between two epochs"):
            trainer.load_state_dict(start)
        trainer.step(count=3)
        assert not same(trainer.state_dict(), start)
        trainer.load_state_dict(start)
        assert same(trainer.state_dict(), start)


def refused_in_child(words: str) -> None:
    """A trainer cannot be opened in a child of this process: OpenMP's threads do not survive fork()."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ValueError, match=words):
                fdsl.Trainer(**SMALL)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_errors_name_the_argument() -> None:
    for changes, words in (
        ({"optimiser": "sgd"}, "unknown option 'optimiser'; did you mean 'optimizer'"),
        ({"variant": "train-opm"}, "unknown variant 'train-opm'; did you mean 'train-omp'"),
        ({"lr": "fast"}, "lr: 'fast' is not a number"),
        ({"momentum": 0.5}, "momentum needs optimizer"),
        ({"model": "vit-tiny", "variant": "train-vit"}, "not built|CUDA"),
        ({"batch": "max"}, "batch"),
        ({"parallel": "auto"}, "parallel auto needs measurements"),
        ({"memory": True}, "memory: only the program prints"),
        ({"init": "/no/such--file-x"}, "init /no/such--file-x: "),
        ({"out": 14}, "unknown option 'out'; did you mean 'out_res'"),
        ({"shape": (1, 2, 2)}, "shape: it describes batches that are handed over"),
    ):
        with pytest.raises((ValueError, fdsl.Unavailable), match=words):
            fdsl.Trainer(**{**SMALL, **changes})
    with fdsl.Trainer(**SMALL) as trainer:
        with pytest.raises(ValueError, match="another one is open in this process"):
            fdsl.Trainer(**SMALL)
        with pytest.raises(ValueError, match="own samples"):
            trainer.step(*batches(16)[0])
        refused_in_child("forked while one was open")
    refused_in_child("forked after its parent had opened one")
    with pytest.raises(ValueError, match="closed"):
        trainer.step()
    with fdsl.Loader(fdsl.Images(classes=3, res=32, out_res=12, count=8), 8, num_threads=1) as loader:
        for field in {"classes": 2}, {"drop_last": True}, {"batch": 8}, {"samples": 8}, {"multi_hot": True}:
            with pytest.raises(ValueError, match=f"^{next(iter(field))}: "):
                fdsl.Trainer(loader, variant="train-naive", model="logreg", **field)
    trainer = fdsl.Trainer(variant="train-naive", model="logreg", classes=3, samples=16)
    with pytest.raises(ValueError, match="labels: a batch needs them"):
        trainer.step(batches(16)[0][0])
    data = batches()
    with fdsl.Trainer(variant="train-naive", model="logreg", classes=3, epochs=4) as other:
        other.fit(data, epochs=1)
        for wrong, words in (data + data[:2], "3 steps, but the loader gave more"), (data[:2], "the loader gave 2"), (data, "2 steps of the"):
            with pytest.raises(ValueError, match=f"loader: .*{words}"):
                other.fit(wrong)
    for field, value in ("shape", (1, 5, 6)), ("dtype", "float32"):  # not replaced by those of the first batch
        with pytest.raises(ValueError, match="images: shape"):
            with fdsl.Trainer(variant="train-naive", model="logreg", classes=3, **{field: value}) as other:
                other.fit(batches(16)[:1])
    with pytest.raises(ValueError, match="count: 2, but a batch is one step"):
        trainer.step(*batches(16)[0], count=2)
    with pytest.raises(ValueError, match="images: labels and share need them"):
        trainer.step(labels=batches(16)[0][1])
    with pytest.raises(TypeError, match="a generator has no len"):
        trainer.fit(batch for batch in batches(16))
    with pytest.raises(ValueError, match="loader: it has no batch"):
        trainer.fit([])
    trainer.close()
    with pytest.raises(ValueError, match="it is closed; open another one"):  # not opened again with other parameters
        trainer.step(*batches(16)[0])
    options: dict[str, Any] = {"variant": "train-naive", "model": "logreg", "classes": 3, "samples": 40, "shape": (1, 5, 7), "epochs": 1,
                               "batch": 16}  # fmt: skip
    with pytest.raises(ValueError, match="train_size needs samples that the trainer opens itself"):
        fdsl.Trainer(**options, train_size=3)
    with fdsl.Trainer(**options) as trainer:
        images, labels = batches(16)[0]
        for wrong, text in ((images[:9], labels[:9]), "has 9 samples"), ((images, labels + 3), "not below the number of classes"), (
            (images[:, :, :4].copy(), labels), "shape"), ((images, labels[:8]), "labels: there are 8"):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                trainer.step(*wrong)
        assert trainer.position == (0, 3)  # a refused batch is not a step
        with pytest.raises(ValueError, match="test set"):
            trainer.evaluate()


def test_a_keyboard_interrupt_ends_training_between_two_steps() -> None:
    done = run_python(
        f"""
import fdsl, _thread, threading
trainer = fdsl.Trainer(**{{**{SMALL!r}, "epochs": 1 << 20}})
threading.Timer(0.3, _thread.interrupt_main).start()
try:
    trainer.fit()
except KeyboardInterrupt:
    step = trainer.epoch * 4 + trainer.position[0]
    trainer.step()
    print(step > 0 and trainer.epoch * 4 + trainer.position[0] == step + 1)
"""
    )
    assert done.stdout == "True\n", done.stderr


def test_a_loader_that_mixes_gives_its_targets(digits: pathlib.Path) -> None:
    """The targets of MixUp and CutMix, as the trainer reads them from the stream, are those that the loader delivers."""
    states = []
    for stream in True, False:
        transforms = [fdsl.Resize(12), fdsl.MixUp(0.8, num_classes=10), fdsl.CutMix(1.0, num_classes=10)]
        with fdsl.Loader(fdsl.Folder(digits / "f"), 32, seed=4, num_threads=1, transforms=transforms, dtype="float32") as loader:
            with fdsl.Trainer(variant="train-naive", model="logreg", classes=10, epochs=1) as trainer:
                trainer.fit(loader if stream else [(i.numpy().copy(), t.numpy().copy()) for i, t in loader])
                states.append(trainer.state_dict())
                images, targets = (values.numpy().copy() for values in next(iter(loader)))
                with pytest.raises(ValueError, match="share: samples that are mixed cannot be evaluated"):
                    trainer.evaluate([(images, targets)])
    for name, values in states[0].items():
        assert numpy.allclose(values, states[1][name], atol=1e-5), name


def test_a_mixture_needs_weights(tmp_path: pathlib.Path, digits: pathlib.Path) -> None:
    own = {**OWN, "data": digits / "m", "train_size": None, "test_size": 10, "classes": 10, "out_res": 28, "channels": 1}
    own |= {"feed": "mixed", "epochs": 1}
    expected = run(tmp_path, mix="synth:1,load:1", **{name: value for name, value in own.items() if value is not None})
    with fdsl.Trainer(**{**SMALL, **own}, mix="synth:1,load:1") as trainer:
        trainer.fit()
        assert same(trainer.state_dict(), expected)
    with pytest.raises(ValueError, match="mix: synth:auto needs measurements"):
        fdsl.Trainer(**{**SMALL, **own}, mix="synth:auto,load")
    with fdsl.Trainer(**{**SMALL, **own, "data": None}, mix=f"synth:1,digits={digits / 'm'}:1") as trainer:
        trainer.step()


def test_training_on_a_loader_is_resumed_within_an_epoch(tmp_path: pathlib.Path) -> None:
    states = []
    with fdsl.Loader(fdsl.Images(classes=3, res=32, out_res=12, count=40), 8, seed=2, num_threads=1, prefetch=1) as loader:
        for attempt in range(3):
            with fdsl.Trainer(loader, variant="train-naive", model="logreg", epochs=2) as trainer:
                if attempt < 2:
                    trainer.step(count=numpy.int64(2))
                    assert trainer.position == (2, 5)
                if attempt == 1:
                    trainer.save(tmp_path)
                    trainer.step()
                    continue
                if attempt == 2:
                    trainer.load(tmp_path)
                    assert trainer.position == (2, 5)
                trainer.fit()
                states.append(trainer.state_dict())
        with pytest.raises(ValueError, match="at the step of the trainer"):
            with fdsl.Trainer(loader, variant="train-naive", model="logreg", epochs=2) as trainer:
                trainer.step()
                own = iter(loader)
                next(own), next(own)
                trainer.step()
    assert same(*states)
