"""Tests scripts/compare/pretrain.py with PyTorch on a CPU. The tests are skipped if a package is missing.

  PYTHONPATH=python FDSL_LIBRARY=build/lib/libfdsl.so python3 -m pytest tests/pretrain_test.py

Needs PyTorch, torchvision, timm, webdataset, fdsl and a built fdsl-bench (or FDSL_BENCH=PATH).
"""

import argparse
import csv
import io
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

for package in ("torch", "torchvision", "timm", "webdataset", "fdsl"):
    pytest.importorskip(package)
sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPARE = ROOT / "scripts/compare"
sys.path.insert(0, str(COMPARE))
import pretrain  # noqa: E402
import pretrain_order  # noqa: E402
import pretrain_sources  # noqa: E402
import pretrain_training  # noqa: E402
import torch  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

PROGRAM = str(COMPARE / "pretrain.py")
BENCH = os.environ.get("FDSL_BENCH", str(ROOT / "fdsl-bench"))
JOB = ("--tiny --device cpu --res 32 --out-res 32 --classes 8 --images 64 --batch 8 --steps 6 --warmup-steps 2 --workers 2 "
       "--lr-warmup 3 --no-amp --threads 2").split()


def run(*arguments, ranks=1, status=0, program=PROGRAM):
    """Runs the program with the small job. Later options replace those of the job."""
    start = [sys.executable] + (["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else [])
    command = start + [str(program)] + JOB + [str(word) for word in arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Writes the same 64 images as PNG files and as shards. Returns the folder."""
    folder = tmp_path_factory.mktemp("data")
    run("--source", "folder", "--make-data", folder / "folder", "--bench", BENCH)
    run("--source", "shards", "--make-data", folder / "shards", "--bench", BENCH)
    return folder


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("source", ("constant", "live", "omp", "folder", "shards"))
def test_every_source_trains(source, ranks, data, tmp_path):
    folder = ("--data", data / source) if (data / source).exists() else ()
    run("--source", source, *folder, "--out", tmp_path / "rows.csv", ranks=ranks)
    row, = rows_of(tmp_path / "rows.csv")
    assert (row["source"], row["ranks"], row["steps"]) == (source, str(ranks), "6")
    assert float(row["images_per_s"]) == pytest.approx(6 * 8 * ranks / float(row["seconds"]), rel=1e-6)
    assert 0 <= float(row["stall_share"]) < 1 and 1 < float(row["loss"]) < 4


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("size,bound", ((32, 0), (73, 4e-3)))
def test_generated_and_loaded_images_give_the_same_losses(ranks, size, bound, data, tmp_path):
    """Stored images of the final size equal the generated ones. Resized images may differ from those by one gray level."""
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


def damaged(folder, data, wrong):
    """Copies the images into a folder, and damages one. Adds two shards with the samples x and y. The label of y is `wrong`; if that
    is empty, the image of y is damaged."""
    shutil.copytree(data / "folder", folder)
    (folder / "class-000003" / "00000011.png").write_bytes(b"no image")
    image = (data / "folder" / "class-000003" / "00000011.png").read_bytes()
    for shard in ("a.tar", "b.tar"):
        parts = {"x.png": image, "x.cls": b"3", "y.png": image if wrong else b"no image", "y.cls": wrong or b"3"}
        with tarfile.open(folder / shard, "w") as file:
            for name, content in parts.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return folder


@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("source,label,words", (
    ("folder", b"", "class-000003/00000011.png cannot be read: the image is damaged, or its format is unknown; write the data"),
    ("shards", b"", ".tar, sample y cannot be read: the image is damaged, or its format is unknown; write the data"),
    ("shards", b"8", ".tar, sample y: its label is 8, but --classes 8 has labels from 0 to 7; give the number of classes"),
    ("shards", b"-1", ".tar, sample y: its label is -1, but --classes 8 has labels from 0 to 7; give the number of classes"),
    ("shards", b" ", ".tar, sample y: it needs a file .png and a file .cls; write the data set again")))
def test_errors_about_damaged_samples_are_one_line(source, label, words, workers, data, tmp_path):
    folder = damaged(tmp_path / "damaged", data, label)
    done = run("--source", source, "--data", folder, "--workers", workers, "--steps", 99, status=1)
    assert done.stderr.startswith("compare/pretrain.py: ") and done.stderr.count("\n") == 1 and words in done.stderr
    assert str(folder) in done.stderr


def test_other_ranks_end_with_one_line(data, tmp_path):
    done = run("--source", "folder", "--data", damaged(tmp_path / "damaged", data, b""), "--steps", 99, ranks=2, status=1)
    assert "00000011.png cannot be read" in done.stderr and "RuntimeError" not in done.stderr


def test_the_error_about_a_truncated_shard_is_one_line(data, tmp_path):
    shard, = (data / "shards").glob("*.tar")
    with tarfile.open(shard) as file:
        end = file.getmember("000040.png").offset_data + 9
    (tmp_path / "short.tar").write_bytes(shard.read_bytes()[:end])
    done = run("--source", "shards", "--data", tmp_path, "--steps", 99, status=1)
    assert done.stderr == (f"compare/pretrain.py: {tmp_path}/short.tar is damaged: ReadError; write the data set again with "
                           "--make-data\n")


def test_no_thread_of_the_process_group_runs_at_exit(tmp_path):
    """A thread of the process group aborts the process if it releases a tensor while the interpreter exits."""
    (tmp_path / "program.py").write_text(f"""
import pathlib, sys
sys.path.insert(0, {str(COMPARE)!r})
import pretrain
status = pretrain.main(sys.argv[1:])
print("at exit:", *sorted({{path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}}))
sys.exit(status)
""")
    done = run("--source", "omp", ranks=2, program=tmp_path / "program.py")
    lines = [line for line in done.stdout.splitlines() if line.startswith("at exit: ")]
    assert len(lines) == 2 and not any("gloo" in line or "fdsl" in line for line in lines)


def test_share_of_constant_and_other_headers(tmp_path):
    for source in ("constant", "live"):
        run("--source", source, "--out", tmp_path / "rows.csv")
    constant, live = rows_of(tmp_path / "rows.csv")
    assert float(live["constant_share"]) == pytest.approx(float(live["images_per_s"]) / float(constant["images_per_s"]), rel=1e-6)
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "its header is not" in run("--out", tmp_path / "rows.csv", status=2).stderr


def test_an_interrupted_run_keeps_its_curve(tmp_path):
    words = [sys.executable, PROGRAM, *JOB, "--steps", "1000000", "--evaluate", "--held-out", "8", "--evaluate-every", "8"]
    process = subprocess.Popen([*words, "--curve", str(tmp_path / "curve")])
    while not (tmp_path / "curve").exists() or len(rows_of(tmp_path / "curve")) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    points = rows_of(tmp_path / "curve")
    assert len({point["time_utc"] for point in points}) == 1 and [point["images"] for point in points[:3]] == ["8", "16", "24"]


def test_a_time_limit_ends_with_an_evaluation(tmp_path):
    run("--steps", 10**9, "--time-limit", 1, "--evaluate", "--held-out", 9, "--curve", tmp_path / "curve")
    last = rows_of(tmp_path / "curve")[-1]
    assert int(last["images"]) % 160 == 0 and 1 <= float(last["seconds"]) < 20


def test_seconds_are_without_evaluations(tmp_path):
    run("--steps", 10**9, "--seconds", 1, "--evaluate", "--evaluate-every", 160, "--held-out", 2000, "--out", tmp_path / "rows.csv")
    row, = rows_of(tmp_path / "rows.csv")
    assert 1 <= float(row["seconds"]) < 20


def test_unknown_models_and_gpus():
    without = [word for word in JOB if word not in ("--tiny", "--device", "cpu")]
    def says(*words):
        return subprocess.run([sys.executable, PROGRAM, *without, *words], capture_output=True, text=True, check=False)
    assert "did you mean deit_tiny_patch16_224?" in says("--device", "cpu", "--model", "deit_tiny_patch16_22").stderr
    if not torch.cuda.is_available():
        done = says()
        assert done.returncode == 4 and "sees no GPU" in done.stderr and done.stderr.count("\n") == 1


def test_ranks_share_an_epoch_without_overlap():
    options = argparse.Namespace(batch=4, seed=1, order="source")
    parts = [pretrain_sources.batch_numbers(19, options, rank, 2) for rank in range(2)]
    first, second = ([next(part) for part in parts] for _ in range(2))
    assert len({number for batch in first + second for number in batch}) == 16
    assert [len(batch) for batch in first] == [4, 4] and all(0 <= number < 19 for batch in first + second for number in batch)


def test_orders_of_different_seeds_and_epochs_differ():
    def order(seed, epoch):
        return pretrain_sources.order_of(epoch, 64, argparse.Namespace(seed=seed))
    assert torch.equal(order(2**32 - 1, 5), order(2**32 - 1, 5))
    assert not torch.equal(order(0, 1_000_003), order(1, 0)) and not torch.equal(order(0, 1), order(0, 0))


def test_batches_on_the_cpu_are_all_filled():
    generator = pretrain_sources.generator_of(pretrain.read_arguments([*JOB, "--source", "omp"]), torch.device("cpu"), "omp")
    for count in (0, 1, 5):
        batches = list(pretrain_sources.filled(generator, iter([[number] for number in range(count)]), False))
        assert [labels.tolist() for _, labels in batches] == [[number % 8] for number in range(count)]


@pytest.mark.parametrize("name,status", (("Error", 1), ("Unavailable", 4)))
def test_errors_of_fdsl_are_one_line(name, status, monkeypatch, capsys):
    import fdsl
    def fails(*_, **__):
        raise getattr(fdsl, name)("out of memory")
    monkeypatch.setattr(fdsl, "Generator", fails)
    assert pretrain.main([*JOB]) == status
    assert capsys.readouterr().err == "compare/pretrain.py: fdsl: out of memory\n"


NAMES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Sharpness", "Contrast", "Identity",
         "Posterize", "Solarize", "AutoContrast", "Equalize")


def applied(index, images):
    function, numbers = pretrain_training.operations()[index]
    return function(images.float(), torch.tensor(numbers).expand(len(images), -1)).round() if function else images.float()


@pytest.mark.parametrize("index", range(28))
def test_operations_are_those_of_torchvision(index):
    """A side of 331 pixels makes the translation a whole number of pixels: 140."""
    images = torch.randint(0, 256, (3, 3, 331, 331), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images[0] //= 3
    name, other = NAMES[index % 14], v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR)
    magnitudes, signed = other._AUGMENTATION_SPACE[name]
    values = magnitudes(31, 331, 331)
    magnitude = 0.0 if values is None else float(values[28]) * (-1 if signed and index >= 14 else 1)
    magnitude = round(magnitude) if name.startswith("Translate") else magnitude
    expected = other._apply_image_or_video_transform(images, name, magnitude, other.interpolation, other._fill)
    difference = (applied(index, images) - expected.float()).abs().max()
    assert difference <= (2 if name == "Color" else 1)  # torchvision truncates twice: the gray image and the blended image


def test_augmenting_in_groups_equals_augmenting_each_image():
    options = argparse.Namespace(parts=["randaugment"], classes=5, label_smoothing=0.1, seed=3, channels_last=False,
                                 order="source")
    recipe = pretrain_training.Recipe(options, torch.device("cpu"), 0)
    images = torch.randint(0, 256, (56, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    chosen = [random.Random(seed).sample(2 * pretrain_training.operations(), 56) for seed in range(2)]
    def augmented(images, choices):
        return recipe.augmented(images, argparse.Namespace(choice=lambda _: choices.pop(0)))
    alone = [augmented(images[i:i + 1], [first, second]) for i, (first, second) in enumerate(zip(*chosen))]
    assert torch.equal(augmented(images, chosen[0] + chosen[1]), torch.cat(alone))


def test_erased_boxes_fit():
    """A box as wide or as high as the image is drawn again, so no row and no column of these images is erased completely."""
    options = argparse.Namespace(parts=["erasing"], classes=5, label_smoothing=0.1, seed=3, channels_last=False,
                                 order="source")
    recipe = pretrain_training.Recipe(options, torch.device("cpu"), 0)
    erased = recipe.erased(torch.full((2000, 1, 64, 16), 9.0), random.Random(1)) != 9
    assert not erased.all(2).any() and not erased.all(3).any() and 0.2 < erased.any(3).any(2).float().mean() < 0.3


def test_the_recipe_depends_on_seed_rank_and_step_only():
    options = argparse.Namespace(parts=list(pretrain.PARTS), classes=5, label_smoothing=0.1, seed=3, channels_last=False,
                                 order="source")
    images, labels = torch.full((8, 3, 32, 32), 99, dtype=torch.uint8), torch.arange(8) % 5
    def inputs(rank, step):
        return pretrain_training.Recipe(options, torch.device("cpu"), rank)(images, labels, step)
    (one, targets), (two, _) = inputs(0, 4), inputs(0, 4)
    assert torch.equal(one, two) and torch.allclose(targets.sum(1), torch.ones(8)) and (images == 99).all()
    assert not torch.equal(one, inputs(1, 4)[0]) and not torch.equal(one, inputs(0, 5)[0])


def test_learning_rate():
    options = argparse.Namespace(lr=1.0, lr_warmup=4, warmup_lr=None, schedule="cosine", min_lr=0.0, lr_overlap=False)
    rates = [pretrain_training.learning_rate(step, options, 8) for step in range(9)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1] and rates[6] == pytest.approx(0.5) and rates[8] == pytest.approx(0)


@pytest.mark.parametrize("recipe", ("pdp2026", "cvpr2023", "deit"))
def test_learning_rates_of_recipes_are_those_of_timm(recipe):
    """The schedulers that the published scripts create, updated in each step as the scripts of VisualAtom do."""
    from timm.scheduler.cosine_lr import CosineLRScheduler
    from timm.scheduler.step_lr import StepLRScheduler
    options = pretrain.read_arguments(["--recipe", recipe, "--lr-warmup", "5", "--decay-steps", "7"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], options.lr)
    warmup = {"warmup_t": 5, "warmup_lr_init": 1e-6, "t_in_epochs": False}
    scheduler = (StepLRScheduler(optimizer, decay_t=7, decay_rate=0.5, **warmup) if recipe == "pdp2026"
                 else CosineLRScheduler(optimizer, t_initial=30, lr_min=1e-5, **warmup))
    for step in range(30):
        scheduler.step_update(step)
        assert pretrain_training.learning_rate(step, options, 30) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@pytest.mark.parametrize("recipe", ("pdp2026", "cvpr2023", "deit"))
def test_recipes_train_and_resume(recipe, tmp_path):
    """A run that is continued has the losses of an uninterrupted run. The draws of a step depend only on the seed and the step."""
    job = ("--recipe", recipe, "--source", "omp", "--order", "train", "--res", 48, "--preset", "uji", "--warmup-steps", 0, "--log-steps", 1,
           "--drop-path", 0)
    run(*job, "--steps", 6, "--step-log", tmp_path / "whole.csv")
    for steps in (3, 6):
        run(*job, "--steps", steps, "--step-log", tmp_path / "parts.csv", "--checkpoint", tmp_path / "c.pth", "--schedule-steps", 6, "--resume")
    whole, parts = (rows_of(tmp_path / f"{name}.csv") for name in ("whole", "parts"))
    assert [row["step"] for row in parts] == list("123456")
    assert [row["lr"] for row in whole] == [row["lr"] for row in parts]
    assert [float(row["loss"]) for row in parts] == pytest.approx([float(row["loss"]) for row in whole], rel=1e-6)
    other = run(*job, "--steps", 9, "--seed", 5, "--checkpoint", tmp_path / "c.pth", "--schedule-steps", 6, "--resume", status=2)
    assert "it was written with seed '0', not '5'; give the same, or drop --resume" in other.stderr
    again = run(*job, "--steps", 6, "--checkpoint", tmp_path / "c.pth", "--schedule-steps", 6, "--resume", status=2)
    assert "has seen all 6 steps; raise --steps, or drop --resume" in again.stderr


def test_the_class_of_pdp2026_clears_posterized_images_at_magnitude_0():
    """As in the published class: at magnitude 0, posterize keeps no bits, solarize inverts, and the others change nothing."""
    import pretrain_recipes
    change = pretrain_recipes.rand_augment_with_invert()(num_ops=1, magnitude=28, fill=128)
    image = torch.randint(1, 255, (3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert len(change._AUGMENTATION_SPACE) == 15
    results = {"Posterize": image * 0, "Solarize": 255 - image, "Brightness": image, "TranslateX": image, "Rotate": image,
               "Invert": 255 - image}
    for name, expected in results.items():
        changed = change._apply_image_or_video_transform(image, name, 0.0, interpolation=change.interpolation, fill=change._fill)
        assert torch.equal(changed, expected), name


@pytest.mark.parametrize("augment", ("none", "mix"))
def test_training_equals_that_of_fdsl_bench(augment, tmp_path):
    """From the same weights, both programs have the same losses in each step, except for rounding."""
    command = [sys.executable, str(COMPARE / "curves.py"), str(tmp_path / "run"), "--cpu", "--threads", "1", "--bench", BENCH, "--steps", "20",
               "--log-steps", "1", "--augment", augment, "--drop-path", "0", "--bound", "0.001"]
    done = subprocess.run([*command, "--first-bound", "0.001"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 in both" in done.stdout and "first 20 rows" in done.stdout


def test_a_recipe_that_differs_is_noticed(tmp_path):
    command = [sys.executable, str(COMPARE / "curves.py"), str(tmp_path / "run"), "--cpu", "--threads", "1", "--bench", BENCH, "--steps", "20",
               "--log-steps", "1", "--augment", "none", "--drop-path", "0", "--first-bound", "0.001", "--", "--loss", "bce"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "OUTSIDE THE BOUNDS" in done.stdout, done.stdout + done.stderr


def test_rows_of_steps_on_two_ranks(tmp_path):
    run("--source", "omp", "--order", "train", "--step-log", tmp_path / "log.csv", "--log-steps", 3, ranks=2)
    rows = rows_of(tmp_path / "log.csv")
    assert [(row["epoch"], row["step"], row["samples_seen"]) for row in rows] == [("1", "3", "48"), ("2", "6", "96"), ("2", "8", "128")]
    assert all(1 < float(row["loss"]) < 4 and 0 <= float(row["accuracy"]) <= 1 and float(row["items_per_s"]) > 0 for row in rows)


def test_the_order_of_a_tensor_is_that_of_its_elements():
    order = pretrain_order.Order(5, 1, 999)
    assert order.all(torch.arange(999)).tolist() == [order.at(index) for index in range(999)]


def test_weight_decay_of_matrices():
    options = pretrain.read_arguments([*JOB, "--decay-of", "matrices"])
    options.model = "tiny"
    net = pretrain_training.model_of(options)
    decayed, spared = (sum(tensor.numel() for tensor in group["params"])
                       for group in pretrain_training.optimizer_of(net, options, torch.device("cpu")).param_groups)
    named = dict(net.named_parameters())
    assert decayed == sum(tensor.numel() for name, tensor in named.items() if name.endswith("weight") and "norm" not in name)
    assert decayed + spared == sum(tensor.numel() for tensor in named.values())
