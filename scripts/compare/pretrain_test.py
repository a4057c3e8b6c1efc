"""Tests scripts/compare/pretrain.py with PyTorch on a CPU. Skipped where a package is missing.

  PYTHONPATH=python FDSL_LIBRARY=build/lib/libfdsl.so python3 -m pytest scripts/compare/pretrain_test.py

Needs PyTorch, torchvision, timm, webdataset, fdsl and a built fdsl-bench (or FDSL_BENCH=PATH).
"""

import argparse
import csv
import os
import pathlib
import subprocess
import sys

import pytest

for package in ("torch", "torchvision", "timm", "webdataset", "fdsl"):
    pytest.importorskip(package)
sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import pretrain_recipe  # noqa: E402
import pretrain_sources  # noqa: E402
import torch  # noqa: E402
from torchvision.transforms.v2 import functional as vision  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = str(HERE / "pretrain.py")
BENCH = os.environ.get("FDSL_BENCH", str(HERE.parents[1] / "fdsl-bench"))
JOB = ("--tiny --device cpu --res 32 --out-res 32 --classes 8 --images 64 --batch 8 --steps 6 --warmup-steps 2 --workers 2 "
       "--lr-warmup 3 --no-amp --threads 2").split()


def run(*arguments, ranks=1, status=0):
    """Runs the program with the small job. Later options replace those of the job."""
    start = [sys.executable] + (["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else [])
    command = start + [PROGRAM] + JOB + [str(word) for word in arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same 64 images as PNG files and as shards."""
    folder = tmp_path_factory.mktemp("data")
    run("--source", "folder", "--make-data", folder / "folder", "--bench", BENCH)
    run("--source", "shards", "--make-data", folder / "shards", "--bench", BENCH)
    return folder


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("source", ("constant", "live", "omp", "folder", "shards"))
def test_every_source_trains(source, ranks, data, tmp_path):
    run("--source", source, "--data", data / source, "--out", tmp_path / "rows.csv", ranks=ranks)
    row, = rows_of(tmp_path / "rows.csv")
    assert (row["source"], row["ranks"], row["steps"]) == (source, str(ranks), "6")
    assert float(row["images_per_s"]) == pytest.approx(6 * 8 * ranks / float(row["seconds"]), rel=1e-6)
    assert 0 <= float(row["stall_share"]) < 1 and 1 < float(row["loss"]) < 4


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("size,bound", ((32, 0), (73, 4e-3)))
def test_generated_and_loaded_images_give_the_same_losses(ranks, size, bound, data, tmp_path):
    """Images that are stored at the final size are equal. Resized ones may differ by one gray level from fdsl's."""
    folder = data / "folder" if size == 32 else tmp_path / "large"
    if size != 32:
        run("--source", "folder", "--make-data", folder, "--bench", BENCH, "--res", size)
    curves = []
    for source in ("folder", "live"):
        run("--source", source, "--order", "same", "--data", folder, "--res", size, "--evaluate", "--evaluate-every", 8 * ranks,
            "--held-out", 32, "--curve", tmp_path / source, ranks=ranks)
        curves.append([[float(row[column]) for column in ("train_loss", "held_out_loss")] for row in rows_of(tmp_path / source)])
    assert len(curves[0]) == 8
    for loaded, generated in zip(*curves):
        assert loaded == pytest.approx(generated, abs=bound, rel=1e-6)


def test_share_of_constant_and_other_headers(tmp_path):
    for source in ("constant", "live"):
        run("--source", source, "--out", tmp_path / "rows.csv")
    constant, live = rows_of(tmp_path / "rows.csv")
    assert float(live["constant_share"]) == pytest.approx(float(live["images_per_s"]) / float(constant["images_per_s"]), rel=1e-6)
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "its header is not" in run("--out", tmp_path / "rows.csv", status=2).stderr


def test_a_time_limit_ends_with_an_evaluation(tmp_path):
    run("--steps", 10**9, "--time-limit", 1, "--evaluate", "--held-out", 9, "--curve", tmp_path / "curve")
    last = rows_of(tmp_path / "curve")[-1]
    assert int(last["images"]) % 160 == 0 and 1 <= float(last["seconds"]) < 20


def test_unknown_models_and_gpus():
    without = [word for word in JOB if word not in ("--tiny", "--device", "cpu")]
    def says(*words):
        return subprocess.run([sys.executable, PROGRAM, *without, *words], capture_output=True, text=True, check=False)
    assert "did you mean deit_tiny_patch16_224?" in says("--device", "cpu", "--model", "deit_tiny_patch16_22").stderr
    if not torch.cuda.is_available():
        done = says()
        assert done.returncode == 4 and "sees no GPU" in done.stderr and done.stderr.count("\n") == 1


def test_ranks_share_an_epoch_without_overlap():
    options = argparse.Namespace(batch=4, seed=1)
    parts = [pretrain_sources.positions(19, options, rank, 2) for rank in range(2)]
    first, second = ([next(part) for part in parts] for _ in range(2))
    assert len({number for own in first + second for number in own}) == 16
    assert [len(own) for own in first] == [4, 4] and all(0 <= number < 19 for own in first + second for number in own)


def test_operations_are_those_of_torchvision():
    images = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images[0] //= 3
    factor = 1 + 0.9 * pretrain_recipe.MAGNITUDE
    expected = (vision.adjust_brightness(images, factor), vision.adjust_saturation(images, factor),
                vision.adjust_sharpness(images, factor), vision.adjust_contrast(images, factor), images,
                vision.posterize(images, 4), vision.solarize(images, 255 * (1 - pretrain_recipe.MAGNITUDE)),
                vision.autocontrast(images), vision.equalize(images))
    for operation, one in zip(pretrain_recipe.operations()[5:], expected):
        mine = operation(images.float()) if operation else images.float()
        assert (mine.round() - one.float()).abs().max() <= 1  # torchvision truncates
    turned = vision.rotate(images, -30 * pretrain_recipe.MAGNITUDE, vision.InterpolationMode.BILINEAR)
    assert (pretrain_recipe.operations()[4](images.float()) - turned.float()).abs().mean() < 2


def test_the_recipe_depends_on_seed_rank_and_step_only():
    options = argparse.Namespace(parts=list(pretrain_recipe.PARTS), classes=5, label_smoothing=0.1, seed=3, channels_last=False)
    images, labels = torch.full((8, 3, 32, 32), 99, dtype=torch.uint8), torch.arange(8) % 5
    def inputs(rank, step):
        return pretrain_recipe.Recipe(options, torch.device("cpu"), rank)(images, labels, step)
    (one, targets), (two, _) = inputs(0, 4), inputs(0, 4)
    assert torch.equal(one, two) and torch.allclose(targets.sum(1), torch.ones(8)) and (images == 99).all()
    assert not torch.equal(one, inputs(1, 4)[0]) and not torch.equal(one, inputs(0, 5)[0])


def test_learning_rate():
    options = argparse.Namespace(lr=1.0, lr_warmup=4)
    rates = [pretrain_recipe.learning_rate(step, options, 8) for step in range(9)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1] and rates[6] == pytest.approx(0.5) and rates[8] == pytest.approx(0)
