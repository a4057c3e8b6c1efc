"""Runs the examples of docs/coming_from.md, each "after", and each "before" whose library is installed, and those of
docs/start.md."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
from typing import Any

import pytest
from conftest import PROGRAM, ROOT, run_python

numpy = pytest.importorskip("numpy", minversion="1.23")
PAGE = ROOT / "docs" / "coming_from.md"
if not PAGE.exists():
    pytest.skip("needs the source tree", allow_module_level=True)
BLOCKS = re.findall(r"^```python ?(before|after)?=?(\S*)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
REAL = importlib.util.find_spec("torch") is not None
PHOTOS = 120

SETTING = """
import sys
sys.path.insert(0, {tests!r})
if not {real}:
    import fake_torch; fake_torch.install()
seen = []
def train(images, labels):
    assert len(images) == len(labels) <= 64 and tuple(images.shape[1:]) == (3, 224, 224), images.shape
    assert str(labels.dtype).endswith("int64") and "float" in str(images.dtype)
    seen.extend(labels.tolist())
    values.append(float(abs(images[0].numpy().astype("float32") if not {real} else images[0].float()).max()))
values = []
"""


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package before a dot
        return False


@pytest.fixture(scope="session")
def folder(tmp_path_factory: Any) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("coming")
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip(f"{PROGRAM} is not built")
    for words in (
        f"--prepare photos --from synth --formula visualatom --classes 10 --samples {PHOTOS} --res 192 --encode jpeg "
        "--store imagefolder",
        "--prepare shards --from dataset --source photos --permute 1",
        "--prepare unseen --from synth --formula visualatom --seed 2 --classes 10 --samples 40 --res 192 --encode jpeg "
        "--store imagefolder",
    ):
        done = subprocess.run([PROGRAM, *words.split()], cwd=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return path


def test_the_page_has_all_blocks() -> None:
    assert sorted((when, name.split(",")[0]) for when, name, _ in BLOCKS if when) == sorted(
        (when, name) for when in ("before", "after") for name in ("torchvision", "webdataset", "streaming", "nvidia.dali", "ffcv")
    )
    for when, name, code in BLOCKS:
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 14, name
        compile(code, f"{when} {name}", "exec")


@pytest.mark.parametrize(("when", "name", "code"), [block for block in BLOCKS if block[0]], ids=lambda text: text[:20])
def test_an_example_runs(when: str, name: str, code: str, folder: pathlib.Path) -> None:
    for library in name.split(",") if when == "before" else []:
        if not installed(library):
            pytest.skip(f"{library} is not installed")
    cuda = REAL and bool(__import__("torch").cuda.is_available())
    if not cuda:
        if when == "before" and name in ("nvidia.dali", "ffcv"):
            pytest.skip(f"the example of {name} needs a GPU")
        code = code.replace('"cuda"', '"cpu"')
    if "train.beton" in code:
        write_beton(folder)
    if '"mds"' in code:
        write_mds(folder)
    preamble = next(text for kind, _, text in BLOCKS if not kind)
    setting = SETTING.format(tests=str(ROOT / "python" / "tests"), real=REAL)
    check = f"\nassert len(seen) == {PHOTOS} and sorted(seen) == sorted(list(range(10)) * {PHOTOS // 10}), sorted(seen)\n"
    done = run_python(f"import os; os.chdir({str(folder)!r})\n{setting}{preamble}{code}{check}assert 0.5 < max(values) < 4\n")
    assert done.returncode == 0, done.stderr


def test_the_first_steps(folder: pathlib.Path) -> None:
    """The blocks of docs/start.md, one after another; without PyTorch, those before the first that needs it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "start.md").read_text(), re.M | re.S)
    assert len(blocks) == 4
    for code in blocks:
        compile(code, "docs/start.md", "exec")
    done = run_python(f"import os; os.chdir({str(folder)!r})\n" + "".join(blocks if REAL else blocks[:1]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("(120, 3, 64, 64) uint8 [") and lines[1].startswith("120 photographs, 1 batches, ")
    if REAL:
        losses = [float(line.split()[1]) for line in lines[2:8]]
        assert [line.split()[0] for line in lines[2:8]] == list("123456") and losses[5] < losses[0]
        assert 0.2 < float(lines[8]) <= 1


def write_mds(folder: pathlib.Path) -> None:
    """Writes the photographs as one MDS shard: the column x has the files, and y the numbers of their classes."""
    if (folder / "mds").exists():
        return
    files = sorted((folder / "photos").glob("*/*.jpg"))
    names = sorted({file.parent.name for file in files})
    values = [(file.read_bytes(), names.index(file.parent.name).to_bytes(8, "little")) for file in files]
    data = [len(image).to_bytes(4, "little") + image + label for image, label in values]
    ends = [4 * (len(data) + 2)]
    for one in data:
        ends.append(ends[-1] + len(one))
    raw = b"".join(number.to_bytes(4, "little") for number in (len(data), *ends)) + b"".join(data)
    (folder / "mds").mkdir()
    (folder / "mds" / "shard.00000.mds").write_bytes(raw)
    columns = {"column_names": ["x", "y"], "column_encodings": ["jpeg", "int"], "column_sizes": [None, 8]}
    files_of = {"raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}}, "zip_data": None}
    more = {"samples": len(data), "compression": None, "hashes": [], "size_limit": None, "format": "mds", "version": 2}
    (folder / "mds" / "index.json").write_text(json.dumps({"version": 2, "shards": [{**columns, **files_of, **more}]}))


def write_beton(folder: pathlib.Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    if not (folder / "train.beton").exists():
        writer = DatasetWriter(str(folder / "train.beton"), {"image": RGBImageField(), "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset(ImageFolder(str(folder / "photos")))
