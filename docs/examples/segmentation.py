"""Trains a small U-Net on images of SegRCDB and their masks, which are generated during training, or read from files.

Each image shows 32 overlapping contours of four classes: triangles, squares, circles and ellipses. The mask says for each
pixel which class it shows. Only the background is easy, because it is black: the classes have the same grays, so the network
must recognise shapes. The program prints the loss, and the mean intersection over union (IoU) of the four classes, without
background, on images that it never trains on.

    python3 docs/examples/segmentation.py                     # a few minutes on a CPU
    python3 docs/examples/segmentation.py --device cuda --steps 3000 --size 224 --width 32

The same images can be prepared before, here as tar shards, and read during training:

    python3 docs/examples/segmentation.py --write-classes shapes.csv
    fdsl-bench --prepare train --from synth --class shapes.csv --res 128 --samples 3200 --seed 1
    fdsl-bench --prepare test --from synth --class shapes.csv --res 128 --samples 64 --seed 2
    python3 docs/examples/segmentation.py --data train --test-data test

All of this needs PyTorch. The published pre-training is another task: 254 classes, whose contours fill images of 512 x 512
pixels. With --published, the program trains on these classes; that needs a larger network and many more steps.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fdsl
import fdsl.torch


# Small classes, so that contours fit in small images.
SHAPES = fdsl.ClassTable(
    "segrcdb",
    ("vertices", "orbits", "noise", "line_width", "radius", "oval_x", "oval_y"),
    [1, 2, 3, 4],
    [(3, 6, 0.5, 0.1, 8, 1, 1), (4, 6, 0.5, 0.1, 6, 1, 1), (200, 6, 0.5, 0.1, 6, 1, 1), (200, 6, 0.5, 0.1, 4, 1, 2)],
)


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, which keep the size of the image."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of three levels. The sides of the images must be multiples of 4."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up_middle, self.up_top = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape (count, classes, height, width)."""
        top = self.top(images)
        middle = self.middle(functional.max_pool2d(top, 2))
        bottom = self.bottom(functional.max_pool2d(middle, 2))
        up = self.up_middle(torch.cat((functional.interpolate(bottom, scale_factor=2.0), middle), 1))
        return self.head(self.up_top(torch.cat((functional.interpolate(up, scale_factor=2.0), top), 1)))


@torch.no_grad()
def mean_iou(network: nn.Module, loader: fdsl.torch.Loader, classes: int, device: torch.device) -> float:
    """Returns the mean over the classes 1, 2, ...: pixels where mask and prediction agree on the class, divided by pixels
    where at least one of them shows it."""
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    network.eval()
    loader.set_epoch(0)
    for images, masks in loader:
        found = network(images.to(device)).argmax(1)
        pairs = masks.to(device).long() * classes + found
        counts += torch.bincount(pairs.flatten(), minlength=classes * classes)
    network.train()
    table = counts.reshape(classes, classes).double()
    both = table.diagonal()
    either = table.sum(0) + table.sum(1) - both
    shown = either[1:] > 0  # classes that neither the masks nor the predictions show do not count
    return float((both[1:][shown] / either[1:][shown]).mean())


def open_loaders(options: argparse.Namespace) -> list[fdsl.torch.Loader]:
    """Returns the loaders of the training and the test images. Generated test images have the same classes and another seed,
    so they are other images."""
    training: dict[str, Any] = {"batch_size": options.batch, "device": options.device, "seed": 1}
    testing: dict[str, Any] = {"batch_size": 16, "device": options.device, "shuffle": False}
    if options.data:
        form: dict[str, Any] = {"dtype": "float32", "channels": 1}
        size = fdsl.Resize(options.size, mean=0.5, std=0.5)  # of the masks, too
        return [
            fdsl.torch.Loader(fdsl.Shards(options.data), transforms=size._replace(flip=True), drop_last=True, **training, **form),
            fdsl.torch.Loader(fdsl.Shards(options.test_data), transforms=size, **testing, **form),
        ]
    images: dict[str, Any] = {"formula": "segrcdb", "res": options.size, "dtype": "float32", "mean": 0.5, "std": 0.5}
    images.update({"preset": "segrcdb"} if options.published else {"class_table": SHAPES})
    count = options.steps * options.batch
    return [
        fdsl.torch.Loader(fdsl.Images(count=count, fresh=True, seed=1, **images), **training),
        fdsl.torch.Loader(fdsl.Images(count=64, seed=2, **images), **testing),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--published", action="store_true", help="train on the 254 classes of the published set")
    parser.add_argument("--data", help="folder of a prepared set to train on, instead of generated images")
    parser.add_argument("--test-data", help="folder of the test images, with --data")
    parser.add_argument("--write-classes", type=pathlib.Path, metavar="FILE", help="write the four classes, and do nothing else")
    parser.add_argument("--size", type=int, default=128, help="side of the images, a multiple of 4 (default: 128)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--batch", type=int, default=8, help="images per step (default: 8)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first level (default: 16)")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of output (default: 50)")
    options = parser.parse_args()
    if options.write_classes:
        return fdsl.classes.save(SHAPES, options.write_classes)
    if bool(options.data) != bool(options.test_data):
        parser.error("give both --data and --test-data, or none")
    torch.manual_seed(0)
    device, classes = torch.device(options.device), 255 if options.published else 5
    loader, tests = open_loaders(options)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))

    network = UNet(classes, options.width).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)
    print(f"untrained: mean IoU {mean_iou(network, tests, classes, device):.3f}", flush=True)
    began, total, count = time.monotonic(), 0.0, 0
    for step, (batch, masks) in zip(range(1, options.steps + 1), epochs):
        loss = functional.cross_entropy(network(batch), masks.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total, count = total + float(loss.detach()), count + 1
        if step % options.every == 0 or step == options.steps:
            iou = mean_iou(network, tests, classes, device)
            print(f"step {step}: loss {total / count:.3f}, mean IoU {iou:.3f}, {time.monotonic() - began:.0f} s", flush=True)
            total, count = 0.0, 0
    loader.close()
    tests.close()


if __name__ == "__main__":
    main()
