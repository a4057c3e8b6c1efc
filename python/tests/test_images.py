"""Tests that images equal those of fdsl-bench, for every format, batch size, destination and selection of images."""

from __future__ import annotations

import array
import itertools
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
from typing import Any

import pytest
from conftest import CLASSES, COUNT, MASKED, PROGRAM, content, masked_set, small, write_classes

import fdsl

numpy = pytest.importorskip("numpy")

FORMATS = list(
    itertools.product(("uint8", "float16", "bfloat16", "float32"), ("nchw", "nhwc"), (1, 3), ("resize", "crop"))
)


def numpy_dtype(generator: fdsl.Generator) -> Any:
    return "uint16" if generator.dtype == "bfloat16" else generator.dtype


@pytest.mark.parametrize("number", range(len(FORMATS)))
def test_images_are_those_of_the_program(number: int, program: Any) -> None:
    dtype, layout, channels, fit = FORMATS[number]
    scale = {} if dtype == "uint8" else {"mean": [0.485, 0.456, 0.406][:channels], "std": 0.25}
    with small(
        dtype=dtype, layout=layout, channels=channels, fit=fit, out_res=37 + number % 2 * 59, seed=number << 33,
        formula=("uji", "visualatom")[number // 3 % 2], generator=("omp", "naive")[number % 3 == 0], **scale,
    ) as g:  # fmt: skip
        side = 37 + number % 2 * 59
        assert g.shape == ((channels, side, side) if layout == "nchw" else (side, side, channels))
        assert (g.dtype, g.device, g.batch) == (dtype, "cpu", COUNT)
        expected, expected_labels = program(g)
        images, labels = g.generate(0, COUNT)
        assert images.shape == (COUNT, *g.shape) and images.dtype == dtype and labels.shape == (COUNT,)
        assert content(images) == expected and content(labels) == expected_labels
        split = 1 + number % 6
        parts = [g.generate(first, min(split, COUNT - first)) for first in range(0, COUNT, split)]
        assert b"".join(content(part) for part, _ in parts) == expected
        assert b"".join(content(part) for _, part in parts) == expected_labels
        destination = numpy.full((COUNT, *g.shape), 77, numpy_dtype(g))
        g.fill(destination)
        assert destination.tobytes() == expected


def test_numbers_select_images() -> None:
    with small(out_res=33) as g:
        images, labels = (part.numpy() for part in g.generate(0, COUNT))
        order = [5, 0, 22, 5, 7, 21]
        ways = [order, tuple(order), numpy.array(order, "int64"), numpy.array(order, "uint64"), array.array("q", order)]
        for numbers in ways:
            some, some_labels = g.generate(numbers=numbers)
            assert (some.numpy() == images[order]).all() and (some_labels.numpy() == labels[order]).all()
        assert (g.generate(numbers=range(3, 9))[0].numpy() == images[3:9]).all()
        destination = numpy.empty((6, *g.shape), "uint8")
        g.fill(destination, numbers=order)
        assert (destination == images[order]).all()
        read_only = numpy.array(order)
        read_only.flags.writeable = False
        g.fill(destination, numbers=read_only)
        big = (1 << 64) - 2
        assert g.generate(big, 1)[1].numpy()[0] == big % CLASSES
        assert g.generate(numbers=[big])[1].numpy()[0] == big % CLASSES


def test_next_advances() -> None:
    with small(out_res=33) as g:
        images = g.generate(0, COUNT)[0].numpy()
        destination, labels = numpy.empty((3, *g.shape), "uint8"), numpy.empty(3, "int64")
        counter = numpy.array([1], "uint64")
        for step in range(4):  # as rank 0 of 2
            g.fill(destination, labels, next=counter, step=6)
            first = 1 + 6 * step
            assert counter[0] == first + 6
            assert (labels == numpy.arange(first, first + 3) % CLASSES).all()
            assert (destination[: COUNT - first] == images[first : first + 3]).all()
        scalar = numpy.zeros((), "int64")
        g.fill(destination, next=scalar)
        assert scalar == 3 and (destination == images[:3]).all()


def test_destinations() -> None:
    """fill() writes to buffers, array interfaces, arrays of the package, and slices of larger arrays."""
    with small(out_res=20) as g:
        expected = content(g.generate(2, 4)[0])
        shape = (4, *g.shape)
        size = len(expected)
        owned, labels = g.generate(9, 4)
        g.fill(owned, labels, 2)
        assert content(owned) == expected and content(labels) == struct.pack("4q", 2, 3, 4, 5)
        memory = bytearray(size)
        g.fill(memoryview(memory).cast("B", shape), array.array("q", [0] * 4), 2)
        assert memory == expected
        large = numpy.zeros((8, *g.shape), "uint8")
        g.fill(large[3:7], None, 2)
        assert large[3:7].tobytes() == expected and not large[:3].any() and not large[7:].any()

        class Interface:
            __array_interface__ = large[4:8].__array_interface__

        g.fill(Interface(), first=2)
        assert large[4:8].tobytes() == expected


def test_classes_can_be_given(tmp_path: Any) -> None:
    with small() as drawn:
        classes, expected = drawn.classes, content(drawn.generate(0, COUNT)[0])
        assert len(classes) == CLASSES and [one.id for one in classes] == list(range(CLASSES))
    with fdsl.Generator(class_list=classes[::-1], res=96, batch=COUNT) as reverse:
        assert reverse.classes == classes[::-1]
        labels = reverse.generate(0, COUNT)[1].numpy()
        assert labels[:CLASSES].tolist() == list(range(CLASSES))[::-1]
    path = tmp_path / "classes.csv"
    write_classes(path, classes)
    with small(class_file=path) as given:
        assert given.classes == classes and content(given.generate(0, COUNT)[0]) == expected
        saved = pickle.dumps(given)
    path.unlink()  # a pickled generator needs no file
    with pickle.loads(saved) as again:
        assert again.classes == classes and content(again.generate(0, COUNT)[0]) == expected


def test_preset_lists() -> None:
    with fdsl.Generator(3, preset="paper-1000", res=64) as g:
        assert len(g.classes) == 3
        assert (g.classes[0].vertices, g.classes[0].orbits, g.classes[0].radius) == (854, 29, 43)
        assert g.memory_bytes > 0


@pytest.mark.parametrize("fresh", [False, True])
def test_loaders_deliver_masks(fresh: bool, tmp_path: Any) -> None:
    words: dict[str, Any] = {"formula": "segrcdb", "classes": 5, "res": 64, "out_res": 31, "seed": 4, "dtype": "float16"}
    data = fdsl.Images(count=10, fresh=fresh, **words)
    with fdsl.Generator(**words, batch=10) as g, fdsl.Loader(data, 4, shuffle=False) as loader:
        assert loader.mask_shape == g.mask_shape == (31, 31) and len(loader) == 3
        images, masks = numpy.empty((4, *loader.shape), "float16"), numpy.empty((4, 31, 31), "uint8")
        for epoch in range(2):
            wanted = [content(part) for part in g.generate(epoch << 32 if fresh else 0, 10)]
            assert len(set(wanted[1])) > 2
            taken = list(loader)
            assert [m.shape for _, m in taken] == [(4, 31, 31), (4, 31, 31), (2, 31, 31)]
            assert all(m.dtype == "uint8" for _, m in taken)
            assert [b"".join(content(batch[part]) for batch in taken) for part in (0, 1)] == wanted
            loader.set_epoch(epoch)
            parts = [b"", b""]
            while (count := loader.fill(images, masks=masks)) is not None:
                parts = [parts[0] + images[:count].tobytes(), parts[1] + masks[:count].tobytes()]
            assert parts == wanted
        loader.set_epoch(0)
        loader.fill(images)
        state = loader.state_dict()
        for other in (pickle.loads(pickle.dumps(loader)), fdsl.Loader(data, 4, shuffle=False)):
            other.load_state_dict(state)
            assert content(next(iter(other))[1]) == content(g.generate(4, 4)[1])
        with pytest.raises(ValueError, match="labels: the images have masks instead of labels"):
            loader.fill(images, numpy.empty(4, "int64"))
        with pytest.raises(ValueError, match=r"masks: its shape is \(4, 31, 30\), not \(count, 31, 31\)"):
            loader.fill(images, masks=numpy.empty((4, 31, 30), "uint8"))
    with fdsl.Loader(fdsl.Images(5, count=8, res=16), 4) as loader:
        assert loader.mask_shape is None
        with pytest.raises(ValueError, match="masks: the loader has none"):
            loader.fill(numpy.empty((4, 1, 16, 16), "uint8"), masks=masks)


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_prepared_masks_are_cut_like_their_images(kind: str, masked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data = masked_set(masked, kind)
    with fdsl.Generator(**MASKED, batch=10) as g, fdsl.Loader(data, 4, channels=1, shuffle=False) as loader:
        taken = list(loader)
        assert loader.mask_shape == (31, 31) and repr(data).startswith(f"fdsl.{kind.title()}(")
        for part, wanted in enumerate(g.generate(0, 10)):
            assert b"".join(content(batch[part]) for batch in taken) == content(wanted)
    assert fdsl.Loader(data, 4).shape == (1, 31, 31)  # without a size or crop, images keep their channels
    crop = fdsl.RandomResizedCrop(20, flip=True)
    words: dict[str, Any] = {"transforms": crop, "seed": 3, "channels": 1}
    planar, wide = fdsl.Loader(data, 4, **words), fdsl.Loader(data, 4, layout="nhwc", **words)
    assert planar.mask_shape == wide.mask_shape == (20, 20) and wide.shape == (20, 20, 1)
    images, masks = numpy.empty((4, 1, 20, 20), "uint8"), numpy.empty((4, 20, 20), "uint8")
    for pixels, own in wide:
        count = planar.fill(images, masks=masks)
        assert (pixels.numpy()[..., 0] == images[:count, 0]).all() and (own.numpy() == masks[:count]).all()
    again = pickle.loads(pickle.dumps(wide))
    assert content(next(iter(again))[1]) == content(next(iter(wide))[1])
    with pytest.raises(ValueError, match="rand_augment: it changes images, but not their masks"):
        fdsl.Loader(data, 4, transforms=[crop, fdsl.RandAugment()])
    with pytest.raises(ValueError, match="labels: the images have masks instead of labels"):
        planar.fill(images, numpy.empty(4, "int64"), masks=masks)
    if kind == "shards":
        (_, labels), *_ = fdsl.Loader(fdsl.Shards(masked / "s", label="cls"), 4, channels=1)
        assert labels.tolist() == [0, 0, 0, 0]
        return
    shutil.copytree(masked / "i", tmp_path / "i")
    mask = tmp_path / "i" / "mask" / "000002.png"
    mask.write_bytes(mask.read_bytes()[:60] + bytes(mask.stat().st_size - 60))
    broken = fdsl.Loader(fdsl.Folder(tmp_path / "i"), 4, channels=1, shuffle=False, on_error="mask")
    with pytest.warns(RuntimeWarning, match="mask"):
        pixels, own = next(iter(broken))
    assert [(one == 255).all() for one in own.numpy()] == [False, False, True, False] and not pixels.numpy()[2].any()
    with pytest.raises(fdsl.Error, match=r"000002.*mask"):
        list(fdsl.Loader(fdsl.Folder(tmp_path / "i"), 4, channels=1))


def test_point_clouds() -> None:
    words: dict[str, Any] = {"preset": "pc-fractaldb-1k", "classes": 4, "res": 20, "batch": 8}
    with fdsl.Generator(**words) as g:
        images, labels, points = g.generate(3, 3)
        assert g.points_shape == (10000, 3) and points.shape == (3, 10000, 3) and points.dtype == "float32"
        assert images.shape == (3, 1, 20, 20) and labels.numpy().tolist() == [3, 0, 1]
        assert abs(points.numpy()).max() < 2 and len({one.tobytes() for one in points.numpy()}) == 3
        backwards = g.generate(numbers=[5, 4, 3])
        assert content(backwards[2])[: 10000 * 12] == content(points)[2 * 10000 * 12 :]
        with pytest.raises(ValueError, match="points, next: they exclude"):
            g.fill(images, points=points, next=array.array("Q", [0]))
        with pytest.raises(ValueError, match=r"points: its shape is \(3, 10000, 3\), not \(2, 10000, 3\)"):
            g.fill(g.generate(0, 2)[0], points=points)
    with fdsl.Generator(preset="mv-fractaldb-1k", classes=4, res=20) as views:
        same, labels = views.generate(3, 3)
        assert content(same) == content(images) and views.points_shape is None
        with pytest.raises(ValueError, match="points: the images have no point clouds"):
            views.fill(images, points=points)
    with pytest.raises(ValueError, match="preset: streams have no point clouds"):
        fdsl.Loader(fdsl.Images(4, count=8, preset="pc-fractaldb-1k", res=20), 4)
    with pytest.raises(ValueError, match="random: published is not supported for the formula ifs3d"):
        fdsl.Generator(preset="exfractaldb-1k", random="published")


def test_multi_hot_labels() -> None:
    words: dict[str, Any] = {"preset": "multifractal-1k", "classes": 12, "res": 40, "seed": 3}
    with fdsl.Generator(**words, batch=10) as g, fdsl.Loader(fdsl.Images(count=10, **words), 4, shuffle=False) as loader:
        images, hot = g.generate(0, 10)
        assert images.shape == (10, 3, 40, 40) and hot.shape == (10, 12) and hot.dtype == "uint8"
        assert g.mask_shape == loader.mask_shape == (12,) and g.config["channels"] == 3 and g.config["mean"] == [0.0] * 3
        assert set(content(hot)) == {0, 1} and all(1 <= row.sum() <= 5 for row in hot.numpy())
        taken = list(loader)
        assert [m.shape for _, m in taken] == [(4, 12), (4, 12), (2, 12)]
        assert [b"".join(content(batch[part]) for batch in taken) for part in (0, 1)] == [content(images), content(hot)]
        filled = numpy.empty((4, 12), "uint8")
        assert loader.fill(numpy.empty((4, 3, 40, 40), "uint8"), masks=filled) == 4
        assert filled.tobytes() == content(hot)[:48]
        with pytest.raises(ValueError, match=r"masks: its shape is \(4, 11\), not \(count, 12\)"):
            loader.fill(numpy.empty((4, 3, 40, 40), "uint8"), masks=numpy.empty((4, 11), "uint8"))
        table = g.class_table
        for other in (pickle.loads(pickle.dumps(g)), fdsl.Generator(class_table=table, res=40, seed=3, batch=10)):
            with other:
                assert [content(one) for one in other.generate(0, 10)] == [content(images), content(hot)]
    with fdsl.Generator(4, preset="fractal-color-1k", res=30, dtype="f32", mean=0.5, layout="nhwc", batch=4) as one:
        images, labels = one.generate()
        assert images.shape == (4, 30, 30, 3) and labels.numpy().tolist() == [0, 1, 2, 3] and one.mask_shape is None
        assert float(images.numpy().min()) < -0.2
    with pytest.raises(ValueError, match="channels: the images of the formula multifractal have colours; set it to 3"):
        fdsl.Generator(preset="multifractal-1k", channels=1)
    with pytest.raises(ValueError, match="mean: it has 3 values for 1 channel"):
        fdsl.Generator(preset="multifractal-1k", dtype="f32", mean=[0, 0, 0])
    assert fdsl.Generator(preset="multifractal-1k", dtype="f32", mean=[0, 0, 1], channels=3).config["mean"] == [0.0, 0.0, 1.0]


def test_fractals_in_colour_are_described() -> None:
    with fdsl.Generator(40, preset="multifractal-1k", res=60, batch=40) as g:
        facts, hot = g.describe(2), g.generate(0, 40)[1].numpy()
        assert facts["classes"] == facts["images"] == sum(facts["objects"]) == 40 and "overflows" not in facts
        shown = hot.sum(0)
        assert facts["shown"] == [shown.min(), shown.mean(), shown.max()]
        assert 0 < facts["set_pixels"]["mean"] < 1 and 0 < facts["cells"]["mean"] < 1
    with fdsl.Generator(3, preset="fractal-color-1k", res=60, batch=3) as g:
        assert g.describe()["objects"] == [3, 0, 0, 0, 0]
        with pytest.raises(ValueError, match="classes: the formula colorfractal has other parameters; use class_table"):
            g.classes  # noqa: B018


def test_prepared_multi_hot_labels(tmp_path: pathlib.Path) -> None:
    """Shards of images with several classes deliver the labels of the images as they are generated."""
    words: dict[str, Any] = {"preset": "multifractal-1k", "classes": 45, "res": 24}
    options = " ".join(f"--{name} {value}" for name, value in words.items())
    done = subprocess.run([PROGRAM, *f"--prepare {tmp_path}/s --from synth --samples 10 {options}".split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with fdsl.Loader(fdsl.Images(**words, count=10), 4, shuffle=False) as drawn, fdsl.Loader(
        fdsl.Shards(tmp_path / "s"), 4, shuffle=False, transforms=fdsl.RandAugment()
    ) as read:
        assert read.mask_shape == (45,)
        assert [content(hot) for _, hot in read] == [content(hot) for _, hot in drawn]
    for field, mixing in (("mixup", fdsl.MixUp(0.8, 45)), ("cutmix", fdsl.CutMix(1, 45))):
        with pytest.raises(ValueError, match=f"{field}: it mixes images, but not their multi-hot labels"):
            fdsl.Loader(fdsl.Shards(tmp_path / "s"), 4, transforms=mixing)


def test_masks_and_class_tables() -> None:
    with segrcdb() as g:
        images, masks = g.generate(1, 3)
        assert images.shape == (3, 1, 31, 31) and masks.shape == (3, 31, 31) and masks.dtype == "uint8"
        assert g.mask_shape == (31, 31) and g.config["formula"] == "segrcdb"
        assert len(set(content(masks))) > 2 and set(content(masks)) <= {0, 1, 2, 3, 4, 5}
        table = g.class_table
        assert table.formula == "segrcdb" and table.ids == [1, 2, 3, 4, 5] and table.names[0] == "vertices"
        backwards, of_backwards = g.generate(numbers=[3, 2, 1])
        assert content(of_backwards)[: 31 * 31] == content(masks)[2 * 31 * 31 :]
        assert content(backwards)[: 31 * 31] == content(images)[2 * 31 * 31 :]
        with pytest.raises(ValueError, match="masks, next: they exclude"):
            g.fill(images, masks=masks, next=array.array("Q", [0]))
        with pytest.raises(ValueError, match=r"masks: its shape is \(3, 31, 31\), not \(2, 31, 31\)"):
            g.fill(g.generate(0, 2)[0], masks=masks)
    for other in (fdsl.Generator(class_table=table, res=64, out_res=31, batch=4), pickle.loads(pickle.dumps(segrcdb()))):
        with other:
            assert [content(one) for one in other.generate(1, 3)] == [content(images), content(masks)]
    with fdsl.Generator(formula="rcdb", classes=3, res=64, batch=4) as rcdb:
        images, labels = rcdb.generate()
        assert labels.dtype == "int64" and rcdb.mask_shape is None
        with pytest.raises(ValueError, match="masks: the formula rcdb defines no masks"):
            rcdb.fill(images, masks=masks)
    for words, message in (
        ({"class_table": table._replace(formula="rcdb")}, "class_table: it has 7 parameters; the formula rcdb has 9"),
        ({"class_table": table._replace(ids=[1])}, "class_table: give 1 to 1048576 ids"),
        ({"class_table": table, "preset": "segrcdb"}, "preset: class_list or class_file gives"),
        ({"formula": "uji", "preset": "rcdb"}, "rcdb is a preset of the formula rcdb, not of uji"),
        ({"formula": "uji", "random": "published"}, "random: published is not supported for the formula uji"),
    ):
        with pytest.raises(ValueError, match=message):
            fdsl.Generator(**words)


def test_fractals() -> None:
    with pytest.raises(ValueError, match="preset: '1p-farc' is not a preset of fractaldb"):
        fdsl.Generator(formula="fractaldb", class_file="tests/data/fractaldb.csv", preset="1p-farc")
    words: dict[str, Any] = {"formula": "fractaldb", "class_file": "tests/data/fractaldb.csv", "batch": 12}
    drawn = {}
    for draw in ("patches", "points"):
        with fdsl.Generator(**words, draw=draw, generator="naive") as g, fdsl.Generator(**words, draw=draw, threads=2) as fast:
            assert g.shape == (1, 362, 362) and g.class_table.names[1] == "a1" and g.class_table.ids == [0, 1, 7]
            images, labels = g.generate(0, 12)
            drawn[draw], table = content(images), g.class_table
            assert content(fast.generate(0, 12)[0]) == drawn[draw] and labels.numpy().tolist() == [0, 1, 7] * 4
            assert set(drawn[draw]) == {0, 127}
    assert drawn["points"] != drawn["patches"]
    with fdsl.Generator(class_table=table, res=64, batch=4, seed=3) as other:
        assert other.shape == (1, 64, 64) and other.config["res"] == 64
        wanted = content(other.generate(0, 4)[0])
    images_of = fdsl.Images(count=4, class_table=table, res=64, seed=3)
    with fdsl.Loader(images_of, 4, shuffle=False) as loader:
        assert content(next(iter(loader))[0]) == wanted
    for wrong, message in (
        ({"formula": "rcdb", "draw": "points"}, "draw: the formula rcdb draws no fractals of the plane"),
        ({**words, "res": 12}, "res: 12 pixels per side are too few"),
        ({**words, "draw": "squares"}, "draw: 'squares' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            fdsl.Generator(**wrong)


def segrcdb() -> fdsl.Generator:
    return fdsl.Generator(preset="segrcdb", classes=5, res=64, out_res=31, batch=4)


def test_classes_of_fractals_are_searched_and_survive_files(tmp_path: pathlib.Path) -> None:
    table = fdsl.search.fractaldb(6, threads=2)
    assert table == fdsl.search.fractaldb(6, threads=1) and table.formula == "fractaldb"
    assert table != fdsl.search.fractaldb(6, seed=2, threshold=0.15)
    with fdsl.Generator(preset="fractaldb-1k", classes=6, batch=6) as g:
        assert g.class_table == table and g.shape == (1, 362, 362)
        images = content(g.generate(0, 6)[0])
        dark = content(g.generate(16 * 6, 6)[0])  # weight 4, with which class 0 overflows
    fdsl.classes.save(table, tmp_path / "list.csv")
    fdsl.classes.save(table, tmp_path / "param", published=True)
    assert (tmp_path / "param" / "00005.csv").read_bytes().count(b"\n") == table.values[5][0]
    for path in tmp_path / "list.csv", tmp_path / "param":
        assert fdsl.classes.load(path, formula="fractaldb") == table
    with fdsl.Generator(preset="ofdb-1k", classes=6, batch=6) as g:
        ofdb = content(g.generate(0, 6)[0])
    file = {"class_file": tmp_path / "param", "formula": "fractaldb", "batch": 6}
    with fdsl.Generator(**file) as g, fdsl.Generator(**file, preset="ofdb-1k") as h:
        assert content(g.generate(0, 6)[0]) == images and content(h.generate(6 * 4, 6)[0]) != images
        assert content(h.generate(0, 6)[0]) == ofdb
        with pickle.loads(pickle.dumps(h)) as again:
            assert content(again.generate(24, 6)[0]) == content(h.generate(24, 6)[0])
    with fdsl.Generator(class_table=table, min_lit=0.01, batch=6) as g:
        assert content(g.generate(0, 6)[0]) == images and content(g.generate(16 * 6, 6)[0]) != dark
    with fdsl.Generator(preset="1p-frac", classes=3, batch=3) as g:
        assert g.shape == (1, 512, 512) and g.generate(0, 3)[1].tolist() == [0, 1, 2]


def test_orbits_are_kept_in_a_folder(tmp_path: pathlib.Path) -> None:
    words: dict[str, Any] = {"preset": "ofdb-1k", "classes": 3}
    with fdsl.Generator(batch=6, **words) as g:
        images = content(g.generate(0, 6)[0])
    words["cache_dir"] = tmp_path / "orbits"
    for _ in range(2):
        with fdsl.Generator(batch=6, **words) as g:
            assert content(g.generate(0, 6)[0]) == images and g.config["cache_dir"] == tmp_path / "orbits"
    (kept,) = (tmp_path / "orbits").glob("*.bank")
    data = fdsl.Images(count=6, **words)
    with fdsl.Loader(data, batch_size=6, shuffle=False) as loader:
        assert content(next(iter(loader))[0]) == images
    kept.write_bytes(kept.read_bytes()[:-1])
    with fdsl.Generator(batch=6, **words) as g:
        assert content(g.generate(0, 6)[0]) == images
    with pytest.raises(ValueError, match="cache_dir: keeps the orbits of omp; this generator or device does not use them"):
        fdsl.Generator(generator="naive", **words)
    with pytest.raises(ValueError, match="cache_dir: keeps the orbits of FractalDB's fractals, but the formula rcdb has none"):
        fdsl.Generator(preset="rcdb", cache_dir=tmp_path)
    with pytest.raises(fdsl.Error, match="cache_dir .*/no/folder: cannot create the folder"):
        fdsl.Generator(preset="ofdb-1k", classes=3, cache_dir=tmp_path / "no/folder")


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_fractals_are_described(threads: Any, capfd: Any) -> None:
    with fdsl.Generator(preset="fractaldb-1k", classes=6, batch=1) as g:
        facts = g.describe(threads)
    assert json.loads(json.dumps(facts)) == facts and capfd.readouterr() == ("", "")
    cells, lit = facts.pop("cells"), facts.pop("set_pixels")
    assert facts == {
        "classes": 6, "orbits": 25, "points": 200000, "flips": 4, "res": 362, "maps": facts["maps"], "overflows": 5,
        "overflow_classes": 3,
    }  # fmt: skip
    assert 2 <= facts["maps"] <= 7 and cells["mean"] == pytest.approx(0.213, abs=5e-4)
    assert cells["quartiles"] == sorted(cells["quartiles"]) and 0 < lit["mean"] < lit["quartiles"][2] < 256 / 511
    assert list(lit["below"]) == ["0.001", "0.01", "0.05", "0.2"] and lit["below"]["0.01"] > 0
    assert list(lit["below"].values()) == sorted(lit["below"].values()) and lit["below"]["0.2"] <= 150
    with fdsl.Generator(preset="fractaldb-1k", classes=6, batch=1, min_lit=0.01) as g:
        assert g.describe()["set_pixels"]["below"]["0.01"] == 0 and g.describe()["overflows"] == 0
    with pytest.raises(ValueError, match="generator: it is closed"):
        g.describe()
    with fdsl.Generator(2, batch=1) as g, pytest.raises(ValueError, match="formula uji draws no fractals of the plane"):
        g.describe()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fdsl.search.fractaldb(0), "n: 0 is out of range"),
        (lambda: fdsl.search.fractaldb(1, seed=1 << 32), "seed: 4294967296 is out of range"),
        (lambda: fdsl.search.fractaldb(1, threshold=0.5), "threshold 0.5 is not in 0.01 .. 0.35"),
        (lambda: fdsl.search.fractaldb(1, threshold=float("nan")), "threshold nan is not in"),
        (lambda: fdsl.classes.load("/nonexistent", "fractaldb"), "/nonexistent"),
        (lambda: fdsl.classes.save(fdsl.ClassTable("uj", (), [0], [()]), "x"), "its formula 'uj' is unknown"),
        (lambda: fdsl.Generator(preset="fractaldb-1k", min_lit=0.6), "min_lit: 0.6 is out of range"),
        (lambda: fdsl.Generator(preset="rcdb", min_lit=0.1), "min_lit: the formula rcdb draws no fractals of the plane with weights"),
        (lambda: fdsl.Generator(preset="1p-frac", classes=2, min_lit=0.1), "this set has none"),
    ],
)
def test_wrong_classes_of_fractals_are_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
