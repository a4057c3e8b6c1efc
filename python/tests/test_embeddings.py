"""Tests fdsl.Embeddings: rows and batches are compared with NumPy, and with `fdsl-bench --workload ops` on the same file."""

from __future__ import annotations

import csv
import gc
import os
import pathlib
import pickle
import struct
import subprocess
from typing import Any

import pytest
from conftest import PROGRAM, content, resident_bytes, run_python

import fdsl
from fdsl import _embeddings

numpy = pytest.importorskip("numpy")

ROWS, COLUMNS = 4099, 33
LOW, HIGH = 0.4, 2.5


def make_rows() -> Any:
    """Returns rows with bad norms, NaN, infinity, zeros and duplicates; no norm is near LOW or HIGH."""
    random = numpy.random.default_rng(3)
    rows = random.standard_normal((ROWS, COLUMNS)).astype("f4")
    rows *= (1 / numpy.linalg.norm(rows.astype("f8"), axis=1)).astype("f4")[:, None]
    rows[::17] *= 1e-3
    rows[5::19] *= 1e3
    rows[7::101, 3], rows[8::103, 32], rows[9::107, 0], rows[10::109] = numpy.nan, numpy.inf, -numpy.inf, 0
    for i in random.integers(1, ROWS, 700):
        rows[i] = rows[random.integers(0, i)]
    return rows


@pytest.fixture(scope="module")
def values() -> Any:
    return make_rows()


@pytest.fixture(scope="module")
def labels() -> Any:
    return (numpy.arange(ROWS) * 7 + numpy.arange(ROWS) // 13) % 10 - 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any, values: Any, labels: Any) -> pathlib.Path:
    folder: pathlib.Path = tmp_path_factory.mktemp("embeddings")
    numpy.save(folder / "x.npy", values)
    numpy.save(folder / "y.npy", labels)
    return folder / "x.npy"


def valid_by_numpy(values: Any) -> Any:
    """Returns which rows are valid, from norms in double precision."""
    with numpy.errstate(invalid="ignore"):
        norms = numpy.sqrt((values.astype("f8") ** 2).sum(axis=1))
    assert not numpy.any(numpy.abs(norms - LOW) < 1e-5) and not numpy.any(numpy.abs(norms - HIGH) < 1e-5)
    return (norms >= LOW) & (norms <= HIGH)


def first_by_numpy(values: Any, numbers: Any) -> Any:
    """Returns those of the rows `numbers` whose bytes no earlier one has."""
    packed = numpy.ascontiguousarray(values[numbers]).view(numpy.dtype((numpy.void, values.itemsize * values.shape[1])))
    _, firsts = numpy.unique(packed.ravel(), return_index=True)
    return numbers[numpy.sort(firsts)]


def all_rows(source: fdsl.Embeddings, **arguments: Any) -> Any:
    """Returns all rows in the order of the source, and their labels."""
    with fdsl.Loader(source, batch_size=257, shuffle=False, num_threads=3, **arguments) as loader:
        batches = [(rows.numpy().copy(), labels) for rows, labels in loader]
    rows = numpy.concatenate([rows for rows, labels in batches])
    return rows, None if batches[0][1] is None else numpy.concatenate([labels.numpy() for rows, labels in batches])


def same(one: Any, two: Any) -> bool:
    """Compares bits."""
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


# ---- Rows and batches ----


def test_rows_are_those_of_the_file(path: pathlib.Path, values: Any, labels: Any) -> None:
    data = fdsl.Embeddings(path, labels=path.with_name("y.npy"))
    assert len(data) == ROWS and data.width == data.columns == COLUMNS and data.dtype == "float32" and data.labelled
    assert data.nbytes == values.nbytes and repr(data).endswith("width=33, dtype='float32'>")
    rows, given = all_rows(data)
    assert same(rows, values) and (given == labels).all()
    assert fdsl.Embeddings(path, None, None, None).labelled is False


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_rounds_to_nearest(path: pathlib.Path, values: Any, dtype: str) -> None:
    padded = fdsl.Embeddings(path, align=16)
    assert padded.width == 48
    rows, _ = all_rows(padded, dtype=dtype)
    assert rows.shape == (ROWS, 48) and not rows[:, COLUMNS:].view("u2").any()
    nan = numpy.isnan(values)
    if dtype == "float16":
        with numpy.errstate(over="ignore"):
            wanted = values.astype("f2").view("u2")
    else:
        bits = values.view("u4").astype("u8")
        wanted = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")
    wanted[nan] = 0x7FFF
    assert (rows[:, :COLUMNS].view("u2") == wanted).all()
    converted, _ = all_rows(padded.convert(dtype))
    assert same(converted, rows) and padded.convert(dtype).dtype == dtype


def test_half_files_and_tensors_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = numpy.arange(300 * 5, dtype="f2").reshape(300, 5)
    other = numpy.ones((2, 7), "f4")
    tensors = {"emb": rows, "other": other, "y": numpy.arange(300, dtype="i4")}
    names = {"f2": "F16", "f4": "F32", "i4": "I32"}
    header, body = {}, b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    text = str(header).replace("'", '"').encode()
    (tmp_path / "s.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    data = fdsl.Embeddings(tmp_path / "s.safetensors", "emb", "y")
    loaded, labels = all_rows(data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y").mkdir()  # a name without a slash is that of a tensor, whatever the current folder has
    assert (all_rows(fdsl.Embeddings("s.safetensors", "emb", "y"))[1] == labels).all()
    with pytest.raises(ValueError, match="^labels: y/: there are 0 labels for 300 rows"):
        fdsl.Embeddings("s.safetensors", "emb", "y/")
    assert data.dtype == "float16" and same(loaded, rows) and (labels == numpy.arange(300)).all()
    assert same(all_rows(data, dtype="float32")[0], rows.astype("f4"))
    with pytest.raises(fdsl.Error, match="other"):
        fdsl.Embeddings(tmp_path)  # two widths
    assert len(fdsl.Embeddings(os.fspath(tmp_path), tensor="o*")) == 2


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
def test_archives_have_rows_and_labels(tmp_path: pathlib.Path, values: Any, labels: Any, save: Any) -> None:
    save(tmp_path / "x.npz", emb=values, y=labels)
    rows, given = all_rows(fdsl.Embeddings(tmp_path / "x.npz", "emb", "y"))
    assert same(rows, values) and (given == labels).all()


def test_doubles_become_floats(tmp_path: pathlib.Path, values: Any) -> None:
    finite = values[numpy.isfinite(values).all(axis=1)].astype("f8") * (1 + 1e-9)
    numpy.save(tmp_path / "d.npy", finite)
    assert same(all_rows(fdsl.Embeddings(tmp_path / "d.npy"))[0], finite.astype("f4"))


def test_fill_copies_rows(path: pathlib.Path) -> None:
    plain, loader = (fdsl.Loader(fdsl.Embeddings(path, align=8), 500, seed=3, dtype="bf16") for _ in range(2))
    rows = numpy.zeros((500, 40), "uint16")
    for batch, _ in plain:
        assert loader.fill(rows) == batch.shape[0] and content(batch) == rows[: batch.shape[0]].tobytes()
    assert loader.fill(rows) is None
    with pytest.raises(ValueError, match="labels: the rows have no labels"):
        loader.fill(rows, numpy.zeros(500, "int64"))


def test_shuffled_batches_are_a_permutation(path: pathlib.Path, values: Any) -> None:
    data = fdsl.Embeddings(path)
    epochs = []
    for world_size in 1, 3:
        parts: list[list[Any]] = [[], []]
        for rank in range(world_size):
            loader = fdsl.Loader(data, batch_size=96 // world_size, rank=rank, world_size=world_size, seed=5)
            assert len(loader) == -(-ROWS // 96) and loader.shape == (COLUMNS,)
            for epoch in range(2):
                for step, (rows, labels) in enumerate(loader):
                    assert labels is None
                    parts[epoch].append((step, rank, rows.numpy().copy()))
            loader.close()
        epochs.append([numpy.concatenate([rows for _, _, rows in sorted(part, key=lambda one: one[:2])]) for part in parts])
    assert same(epochs[0][0], epochs[1][0]) and same(epochs[0][1], epochs[1][1])  # any number of ranks
    assert not same(epochs[0][0], epochs[0][1]) and not same(epochs[0][0], values)
    for epoch in epochs[0]:
        assert sorted(row.tobytes() for row in epoch) == sorted(row.tobytes() for row in values)


def test_positions(path: pathlib.Path) -> None:
    data = fdsl.Embeddings(path).validate((LOW, HIGH))
    loader = fdsl.Loader(data, batch_size=100, seed=5)
    batches = [rows.numpy().copy() for rows, _ in loader]
    loader.set_epoch(0)
    for step, (rows, _) in enumerate(loader):
        if step == 4:
            break
    state = loader.state_dict()
    for copy in pickle.loads(pickle.dumps(loader)), fdsl.Loader(data, batch_size=100, seed=5):
        copy.load_state_dict(state)
        assert all(same(rows.numpy(), wanted) for (rows, _), wanted in zip(copy, batches[5:]))
        assert copy.epoch == 1
    with pytest.raises(ValueError, match="data set"):
        fdsl.Loader(data.sample(len(data)), batch_size=100, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="transform"):
        fdsl.Loader(data, batch_size=100, seed=5, dtype="f16").load_state_dict(state)


# ---- Choosing rows ----


def test_validate_and_dedup_are_those_of_numpy(path: pathlib.Path, values: Any) -> None:
    data = fdsl.Embeddings(path)
    valid = numpy.flatnonzero(valid_by_numpy(values))
    good = data.validate(norm=(LOW, HIGH))
    assert same(all_rows(good)[0], values[valid])
    assert good.removed == {"filtered": 0, "invalid": ROWS - len(valid), "duplicates": 0, "unsampled": 0}
    firsts = first_by_numpy(values, valid)
    unique = good.dedup()
    assert same(all_rows(unique)[0], values[firsts]) and 0 < len(unique) < len(good) < len(data)
    assert unique.removed["duplicates"] == len(valid) - len(firsts)
    at_once = data.validate((LOW, HIGH), dedup=True)
    assert at_once.removed == unique.removed and same(all_rows(at_once)[0], values[firsts])
    assert same(all_rows(data.dedup())[0], values[first_by_numpy(values, numpy.arange(ROWS))])
    finite = numpy.isfinite(values).all(axis=1)
    assert same(all_rows(data.validate())[0], values[finite])
    assert len(data) == ROWS  # a set does not change
    assert repr(unique).startswith(f"<fdsl.Embeddings({path!r}): {len(unique)} of {ROWS} rows")


def test_filter_and_sample(path: pathlib.Path, values: Any, labels: Any) -> None:
    data = fdsl.Embeddings(path, labels=path.with_name("y.npy"))
    scores = numpy.random.default_rng(1).random(ROWS)
    rows, given = all_rows(data.filter(scores > 0.5, labels=[3, -1, 77]))
    wanted = (scores > 0.5) & numpy.isin(labels, [3, -1])
    assert same(rows, values[wanted]) and (given == labels[wanted]).all()
    assert same(all_rows(data.filter([i % 2 == 0 for i in range(ROWS)]))[0], values[::2])
    assert (all_rows(data.filter(labels=4))[1] == 4).all()
    assert (all_rows(data.filter(labels=numpy.array(4)))[1] == 4).all()
    drawn = data.sample(1000, seed=8)
    numbers = [row.tobytes() for row in all_rows(drawn)[0]]
    assert len(drawn) == 1000 and drawn.removed["unsampled"] == ROWS - 1000
    assert numbers == [row.tobytes() for row in all_rows(data.sample(1000, 8))[0]]
    assert numbers != [row.tobytes() for row in all_rows(data.sample(1000, 9))[0]]
    together = data.sample(ROWS, seed=8)
    assert [row.tobytes() for row in all_rows(together)[0]][:1000] == numbers
    assert sorted(row.tobytes() for row in all_rows(together)[0]) == sorted(row.tobytes() for row in values)


def test_arrays_of_bools_need_no_list(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, even = fdsl.Embeddings(path), numpy.arange(ROWS) % 2 == 0
    wanted = all_rows(data.filter(even.tolist()))[0]

    class Tensor:
        """As in PyTorch, without the buffer protocol."""

        shape, numpy, __len__ = even.shape, lambda self: even, lambda self: ROWS

    class OnGpu(Tensor):
        def numpy(self) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def tolist(self) -> Any:
            return even.tolist()

    strided = numpy.zeros((ROWS, 3), bool)
    strided[:, 1] = even
    for keep in (even, strided[:, 1], Tensor(), OnGpu(), tuple(even.tolist())):
        assert same(all_rows(data.filter(keep))[0], wanted)
    assert _embeddings._bools(even) is not None and _embeddings._bools(Tensor()) is not None
    for wrong in (even.astype("uint8"), even.reshape(-1, 1), even.astype(float)):
        with pytest.raises(TypeError, match="^keep: "):
            data.filter(wrong)


@pytest.mark.parametrize("steps", ["mask,compact", "mask,compact,hash --dedup", "mask,compact,permute,hash --dedup"])
def test_same_rows_as_the_program(path: pathlib.Path, tmp_path: pathlib.Path, values: Any, steps: str) -> None:
    """Compares the number of rows and, with `convert`, a digest of the program with that of the batches."""
    out, prepared = tmp_path / "r.csv", tmp_path / "clean"
    bounds = ["--norm-min", str(LOW), "--norm-max", str(HIGH)]
    sample = ["--sample", "333", "--seed", "6"] if "permute" in steps else []
    words = [PROGRAM, "--workload", "ops", "--variant", "ops-omp", "--data", path, "--steps", *steps.split(), *bounds]
    fast = ["--min-samples", "1", "--min-time", "0", "--max-time", "0", "--warmups", "0", "--warmup-time", "0", "--verify"]
    subprocess.run([*words, *sample, *fast, "--out", out], check=True, capture_output=True)
    with open(out) as file:
        row = next(csv.DictReader(file))
    data = fdsl.Embeddings(path).validate((LOW, HIGH), dedup="dedup" in steps)
    assert len(data) == int(row["rows_kept"])
    dedup = ["--dedup"] if "dedup" in steps else []
    source = [PROGRAM, "--prepare", prepared, "--from", "embeddings", "--source", path, "--encode", "npy", *bounds, *dedup]
    subprocess.run(source, check=True, capture_output=True)
    files = sorted(prepared.rglob("*.npy"))
    rows = numpy.concatenate([numpy.load(file) for file in files])
    assert same(all_rows(data)[0], rows)
    assert same(all_rows(fdsl.Embeddings(prepared))[0], rows)  # the sets that --prepare writes


# ---- Objects ----


def test_pickle_repeats_the_steps(path: pathlib.Path, values: Any) -> None:
    data = fdsl.Embeddings(path, labels=path.with_name("y.npy"), align=8)
    chosen = data.filter(numpy.arange(ROWS) % 5 != 2).validate((LOW, HIGH)).dedup().sample(500, 4).convert("f16")
    copy = pickle.loads(pickle.dumps(chosen))
    assert len(copy) == 500 and copy.removed == chosen.removed and repr(copy) == repr(chosen)
    assert same(all_rows(copy)[0], all_rows(chosen)[0])
    code = f"import pickle, sys; data = pickle.loads({pickle.dumps(chosen)!r}); print(len(data), data.removed)"
    result = run_python(code)
    assert result.stdout == f"500 {chosen.removed}\n", result.stderr


def test_ctrl_c_ends_a_selection(tmp_path: pathlib.Path) -> None:
    large = tmp_path / "x.npy"
    numpy.lib.format.open_memmap(large, "w+", dtype="float32", shape=(1 << 22, 256))  # a sparse file of 4 GiB
    code = f"""
import fdsl, os, signal, threading, time
rows = fdsl.Embeddings({str(large)!r}, num_threads=1)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try: rows.validate()
except KeyboardInterrupt: print("interrupted", flush=True)
took = time.monotonic() - begin
print(took < 1.5, took)
"""
    result = run_python(code)
    assert result.stdout.startswith("interrupted\nTrue "), (result.stdout, result.stderr)


def test_close_and_with(path: pathlib.Path) -> None:
    with fdsl.Embeddings(path) as data:
        good = data.validate()
    with pytest.raises(ValueError, match="closed"):
        data.dedup()
    assert len(all_rows(good)[0]) == len(good)  # it shares the files
    loader = fdsl.Loader(good, batch_size=64)
    good.close()
    rows, _ = next(iter(loader))
    loader.close()
    assert rows.numpy().shape == (64, COLUMNS)


def test_a_changed_file_is_an_error(tmp_path: pathlib.Path, values: Any) -> None:
    numpy.save(tmp_path / "x.npy", values)
    data = fdsl.Embeddings(tmp_path / "x.npy")
    loader = fdsl.Loader(data, batch_size=64)
    iterator = iter(loader)
    next(iterator)
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(100000)
    with pytest.raises(fdsl.Error, match=r"x\.npy"):
        for _ in iterator:
            pass
    with pytest.raises(fdsl.Error, match=r"x\.npy"):
        data.dedup()


def test_forked_child(path: pathlib.Path) -> None:
    code = f"""
import os, fdsl
data = fdsl.Embeddings({str(path)!r})
if os.fork() == 0:
    try:
        data.validate()
    except fdsl.Error as error:
        print("fork" in str(error), len(fdsl.Embeddings({str(path)!r}).validate()) > 0, flush=True)
    os._exit(0)
os.wait()
"""
    result = run_python(code)
    assert result.stdout == "True True\n", result.stderr


def test_memory_is_flat(path: pathlib.Path) -> None:
    data = fdsl.Embeddings(path)
    before = 0
    for i in range(150):
        with fdsl.Loader(data.validate((LOW, HIGH)), batch_size=512) as loader:
            for _ in loader:
                break
        if i == 50:
            gc.collect()
            before = resident_bytes()
    gc.collect()
    assert resident_bytes() < before * 1.02 + (1 << 20)


# ---- Wrong arguments ----


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"path": None}, TypeError, "path"),
        ({"path": 5}, TypeError, "path"),
        ({"path": ""}, ValueError, "path: it is empty"),
        ({"path": "/nowhere/x.npy"}, ValueError, "path: "),
        ({"tensor": 5}, TypeError, "tensor"),
        ({"tensor": ""}, ValueError, "tensor: it is empty"),
        ({"tensor": "emb"}, fdsl.Error, "no tensor matches tensor 'emb'"),
        ({"labels": 5}, TypeError, "labels"),
        ({"labels": "nothing"}, ValueError, "labels: "),
        ({"labels": "/nowhere/y.npy"}, ValueError, "labels: "),
        ({"align": 0}, ValueError, "align"),
        ({"align": 65}, ValueError, "align"),
        ({"align": "8"}, TypeError, "align"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"num_threads": 1.5}, TypeError, "num_threads"),
    ],
)
def test_wrong_arguments(path: pathlib.Path, arguments: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fdsl.Embeddings(**{"path": path, **arguments})


@pytest.mark.parametrize(
    "method, arguments, error, words",
    [
        ("validate", {"norm": 5}, TypeError, "norm"),
        ("validate", {"norm": (1, 2, 3)}, TypeError, "norm"),
        ("validate", {"norm": ("a", 2)}, TypeError, "norm"),
        ("validate", {"norm": (2, 1)}, ValueError, "norm"),
        ("validate", {"norm": (-1, 1)}, ValueError, "norm"),
        ("validate", {"norm": (float("nan"), 1)}, ValueError, "norm"),
        ("validate", {"norm": (1e-16, 1)}, ValueError, "norm_min"),
        ("validate", {"norm": (1e7, 1e8)}, ValueError, "no row is left"),
        ("validate", {"dedup": 1}, TypeError, "dedup"),
        ("validate", {"dtype": "uint8"}, ValueError, "dtype"),
        ("sample", {"n": 0}, ValueError, "n: "),
        ("sample", {"n": 2.5}, TypeError, "n: "),
        ("sample", {"n": ROWS + 1}, ValueError, "n: only 4099"),
        ("sample", {"n": 1, "seed": -1}, ValueError, "seed"),
        ("filter", {}, ValueError, "keep"),
        ("filter", {"keep": [True]}, ValueError, "keep: it has 1 value for 4099 rows"),
        ("filter", {"keep": [1] * ROWS}, TypeError, "keep"),
        ("filter", {"keep": "x" * ROWS}, TypeError, "keep"),
        ("filter", {"keep": 5}, TypeError, "keep"),
        ("filter", {"keep": numpy.array(True)}, TypeError, "keep"),
        ("filter", {"keep": [False] * ROWS}, ValueError, "no row is left"),
        ("filter", {"labels": "3"}, TypeError, "labels"),
        ("filter", {"labels": [0.5]}, TypeError, "labels"),
        ("filter", {"labels": numpy.array(0.5)}, TypeError, "labels: it must be an integer"),
        ("filter", {"labels": 3}, ValueError, "labels: the rows have no labels"),
        ("convert", {"dtype": "int64"}, ValueError, "dtype"),
        ("convert", {"dtype": None}, TypeError, "dtype"),
        ("to", {"device": "gpu"}, ValueError, "device"),
        ("to", {"device": 1.5}, TypeError, "device"),
    ],
)
def test_wrong_steps(path: pathlib.Path, method: str, arguments: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(fdsl.Embeddings(path), method)(**arguments)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"transforms": fdsl.Resize(8)}, ValueError, "transforms: it describes images"),
        ({"channels": 3}, ValueError, "channels"),
        ({"layout": "nchw"}, ValueError, "layout"),
        ({"dtype": "uint8"}, ValueError, "dtype"),
        ({"lanes": 3}, ValueError, "lanes: it has no effect on rows"),
        ({"shuffle_buffer": 3}, ValueError, "shuffle_buffer"),
        ({"on_error": "mask"}, ValueError, "on_error"),
        ({"resident": True}, ValueError, "resident"),
        ({"resident": 1}, TypeError, "resident"),
    ],
)
def test_wrong_arguments_of_a_loader(path: pathlib.Path, arguments: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fdsl.Loader(fdsl.Embeddings(path), **arguments)


def test_rows_on_the_cpu(path: pathlib.Path, values: Any) -> None:
    data = fdsl.Embeddings(path).to("cpu")
    assert data.device == "cpu" and same(all_rows(data)[0], values)
    if fdsl.cuda_devices() == 0:
        with pytest.raises(fdsl.Unavailable, match="device: "):
            data.to("cuda")


def test_converted_rows_are_final(path: pathlib.Path) -> None:
    halves = fdsl.Embeddings(path).validate((LOW, HIGH), dtype="float16")
    assert halves.dtype == "float16" and fdsl.Loader(halves).dtype == "float16"
    for call in halves.validate, halves.dedup:
        with pytest.raises(ValueError, match="converted to f16"):
            call()
    with pytest.raises(ValueError, match="dtype"):
        fdsl.Loader(halves, dtype="float32")
    assert sorted(map(bytes, all_rows(halves.sample(len(halves)))[0])) == sorted(map(bytes, all_rows(halves)[0]))
