"""Reads sets that MosaicML's streaming writes (mosaicml-streaming on PyPI). Skipped where it is not installed."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
from typing import Any, Iterator

import pytest

import fdsl

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming")

COUNT = 60
KINDS = ("jpeg", "png", "bytes", "zstd", "gz", "array", "chw")


def images() -> list[Any]:
    numbers = np.random.default_rng(5)
    return [Image.fromarray(numbers.integers(0, 255, (16, 20, 3), dtype=np.uint8)) for _ in range(COUNT)]


def encode(image: Any) -> bytes:
    to = io.BytesIO()
    image.save(to, format="PNG")
    return to.getvalue()


def write(to: pathlib.Path, kind: str) -> tuple[list[Any], list[int]]:
    """Writes a set, and returns the images and labels that readers must deliver."""
    made = images()
    labels = [i * 7 % 11 for i in range(COUNT)]
    encodings = {"png": "png", "bytes": "bytes", "array": "ndarray:uint8:16,20,3", "chw": "ndarray"}
    columns = {"x": encodings.get(kind, "jpeg"), "y": "uint16" if kind == "png" else "int", "note": "str"}
    options: dict[str, Any] = {"size_limit": 20000, "hashes": ["sha1", "xxh64"] if kind != "gz" else ["md5"]}
    if kind in ("zstd", "gz"):
        options["compression"] = kind
    with streaming.MDSWriter(out=str(to), columns=columns, **options) as writer:
        for i, image in enumerate(made):
            pixels = np.asarray(image)
            value = {"bytes": encode(image), "array": pixels, "chw": np.ascontiguousarray(pixels.transpose(2, 0, 1))}
            writer.write({"x": value.get(kind, image), "y": labels[i], "note": "n" * (i % 5)})
    if columns["x"] == "jpeg":
        for i, image in enumerate(made):
            file = io.BytesIO()
            image.save(file, format="JPEG")
            made[i] = Image.open(file)
    return made, labels


def read(source: Any) -> Iterator[tuple[Any, int]]:
    for batch, labels in fdsl.Loader(source, 7, lanes=1, shuffle=False):
        yield from zip(np.asarray(batch), labels.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_sets_of_the_writer_are_read(tmp_path: pathlib.Path, kind: str) -> None:
    made, labels = write(tmp_path / "set", kind)
    assert len(list((tmp_path / "set").glob("shard*"))) > 1
    for cache in (None, tmp_path / "cache") if kind in ("zstd", "gz") else (None,):
        got = list(read(fdsl.Shards(tmp_path / "set", image="x" if kind == "bytes" else None, cache_dir=cache)))
        assert [label for _, label in got] == labels
        for image, (pixels, _) in zip(made, got):
            expected = np.asarray(image.convert("RGB"), dtype=np.int16).transpose(2, 0, 1)
            # decoders of JPEG round differently
            assert np.abs(np.asarray(pixels, dtype=np.int16) - expected).max() <= (2 if image.format == "JPEG" else 0)


def test_columns_are_chosen_by_name(tmp_path: pathlib.Path) -> None:
    with streaming.MDSWriter(
        out=str(tmp_path / "set"), columns={"a": "png", "b": "png", "word": "str", "meta": "json"}
    ) as writer:
        for i, image in enumerate(images()):
            writer.write({"a": image, "b": images()[0], "word": "abc"[i % 3], "meta": {"of": {"label": i % 4}}})
    words = fdsl.Shards(tmp_path / "set", image="a", label="word")
    assert [label for _, label in read(words)] == [i % 3 for i in range(COUNT)]
    fields = fdsl.Shards(tmp_path / "set", image="b", label="meta:of.label")
    got = list(read(fields))
    assert [label for _, label in got] == [i % 4 for i in range(COUNT)]
    assert all((np.asarray(pixels) == np.asarray(got[0][0])).all() for pixels, _ in got)


def test_faults_are_named(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "set", "zstd")
    index = json.loads((tmp_path / "set" / "index.json").read_text())
    shard = tmp_path / "set" / index["shards"][1]["zip_data"]["basename"]
    broken = tmp_path / "broken"

    def refused(words: str) -> None:
        with pytest.raises((ValueError, fdsl.Error), match=words):
            list(read(fdsl.Shards(broken)))
        shutil.rmtree(broken)

    def copy(change: Any = None) -> None:
        shutil.copytree(tmp_path / "set", broken)
        changed = json.loads(json.dumps(index))
        if change:
            change(changed["shards"][1])
        (broken / "index.json").write_text(json.dumps(changed))

    copy(lambda entry: entry["zip_data"]["hashes"].update(sha1="0" * 40))
    refused("sha1 is [0-9a-f]{40}, but its index says 0{40}")
    copy(lambda entry: entry["zip_data"].update(hashes={"xxh64": "0" * 16}))
    refused("xxh64 is [0-9a-f]{16}, but its index says 0{16}")
    copy(lambda entry: entry.update(samples=entry["samples"] + 1))
    refused("samples but its index says")
    copy(lambda entry: entry["raw_data"].update(bytes=5))
    refused("unpacked bytes but its index says 5")
    copy(lambda entry: entry.update(column_names=["note", "x", "z"]))
    refused("its columns differ from those of the first shard")
    copy()
    (broken / shard.name).unlink()
    refused(f"{shard.name}: .*No such file")
    copy()
    (broken / "index.json").unlink()
    refused("the folder has no index.json of an MDS set, but shards")


@pytest.mark.parametrize("encoding", ("pil", "pkl", "float32"))
def test_other_encodings_are_refused_by_name(tmp_path: pathlib.Path, encoding: str) -> None:
    with streaming.MDSWriter(out=str(tmp_path / "set"), columns={"cls": "int8", "x": "png", "y": encoding}) as writer:
        for image in images()[:3]:
            writer.write({"cls": 1, "x": image, "y": image if encoding == "pil" else 1.5})
    with pytest.raises(ValueError, match=f"its column 'y' has the encoding {encoding}"):
        fdsl.Shards(tmp_path / "set", label="y")
    assert len(list(read(fdsl.Shards(tmp_path / "set")))) == 3
