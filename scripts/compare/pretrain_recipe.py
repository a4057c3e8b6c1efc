"""The published recipe on the training device, the same for every source of images: RandAugment, random erasing, MixUp, CutMix,
label smoothing, and the learning rate.

All random choices are drawn on the host, from a generator that depends only on (seed, rank, step). So equal images give equal
inputs of the network. Nothing here waits for the GPU: each step copies one small tensor of choices from pinned memory.
"""

import math
import random

import torch
from torch.nn import functional

PARTS = ("randaugment", "mixup", "cutmix", "erasing")
OPERATIONS, MAGNITUDE = 2, 28 / 30  # magnitude 28 on torchvision's scale of 0 to 30
MIXUP, CUTMIX, ERASING = 0.8, 1.0, 0.25
MEAN, STD = 0.5, 0.5
LUMA = (0.299, 0.587, 0.114)


def learning_rate(step, options, total):
    """Returns the rate of a step: a linear warm-up, then a cosine to 0 at the step `total`."""
    if step < options.lr_warmup:
        return options.lr * (step + 1) / options.lr_warmup
    share = (step - options.lr_warmup) / max(1, total - options.lr_warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(1, share)))


# ---- RandAugment: each operation takes and returns float images with values from 0 to 255 ----


def blend(factor, other):
    """Returns the operation that moves images away from (factor > 1) or to (factor < 1) another version of them."""
    return lambda images: (other(images) * (1 - factor) + images * factor).clamp_(0, 255)


def gray(images):
    if images.shape[1] == 1:
        return images
    return sum(images[:, channel:channel + 1] * weight for channel, weight in enumerate(LUMA))


def smooth(images):
    """Returns images smoothed with weights 1 1 1, 1 5 1, 1 1 1; the border stays."""
    inner = (functional.avg_pool2d(images, 3, 1) * 9 + images[:, :, 1:-1, 1:-1] * 4) / 13
    smoothed = images.clone()
    smoothed[:, :, 1:-1, 1:-1] = inner
    return smoothed


def posterize(images):
    return torch.floor(images / 16) * 16  # 4 bits, as 8 - round(4 * MAGNITUDE)


def solarize(images):
    return torch.where(images >= 255 * (1 - MAGNITUDE), 255 - images, images)


def autocontrast(images):
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1), images)


def equalize(images):
    """Maps the gray values of each channel so that their cumulative histogram becomes linear, as PIL does."""
    values = images.flatten(2).long()
    counts = torch.zeros((*values.shape[:2], 256), device=images.device).scatter_add_(2, values, images.flatten(2) * 0 + 1)
    step = torch.floor((values.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) / 255)
    table = torch.floor((counts.cumsum(2) - counts + torch.floor(step / 2)) / step.clamp(min=1)).clamp_(0, 255)
    return torch.where(step > 0, table.gather(2, values), images.flatten(2)).view_as(images)


def warp(matrix, images, grids={}):
    """Applies an affine map (2 × 3, in coordinates from -1 to 1) with bilinear interpolation; outside is black. The grids are
    kept, because copying a matrix to the GPU in each step would wait for it."""
    key = (matrix, images.shape[2:], images.device)
    if key not in grids:
        theta = torch.tensor(matrix).view(1, 2, 3)
        grids[key] = functional.affine_grid(theta, (1, 1, *images.shape[2:]), align_corners=False).to(images.device)
    grid = grids[key].expand(len(images), -1, -1, -1)
    return functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=False)


def operations():
    """Returns the operations of RandAugment at the recipe's magnitude. Signed ones are in the list with both signs; the
    others are in it twice, so that each operation is equally likely."""
    both = []
    for sign in (1, -1):
        factor, shear, move = 1 + sign * 0.9 * MAGNITUDE, sign * 0.3 * MAGNITUDE, sign * 2 * 150 / 331 * MAGNITUDE
        angle = sign * math.radians(30 * MAGNITUDE)
        cos, sin = math.cos(angle), math.sin(angle)
        matrices = ((1.0, shear, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, shear, 1.0, 0.0), (1.0, 0.0, move, 0.0, 1.0, 0.0),
                    (1.0, 0.0, 0.0, 0.0, 1.0, move), (cos, sin, 0.0, -sin, cos, 0.0))
        both += [lambda images, matrix=matrix: warp(matrix, images) for matrix in matrices]
        both += [blend(factor, other) for other in (torch.zeros_like, gray, smooth,
                                                    lambda images: gray(images).mean((1, 2, 3), keepdim=True))]
        both += [None, posterize, solarize, autocontrast, equalize]
    return both


# ---- The recipe ----


class Recipe:
    """Turns uint8 images and labels on the device into inputs and soft targets."""

    def __init__(self, options, device, rank):
        self.parts = options.parts
        self.classes, self.smoothing = options.classes, options.label_smoothing
        self.device, self.name = device, f"{options.seed} {rank}"
        self.operations = operations()
        self.noise = torch.Generator(device).manual_seed(options.seed * 4096 + rank)
        self.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format

    def __call__(self, images, labels, step):
        draw = random.Random(f"{self.name} {step}")
        if "randaugment" in self.parts:
            images = self.augmented(images, draw)
        inputs = ((images.float() / 255) - MEAN) / STD
        if "erasing" in self.parts:
            inputs = self.erased(inputs, draw)
        inputs, targets = self.mixed(inputs, self.targets(labels), draw)
        return inputs.contiguous(memory_format=self.memory_format), targets

    def to_device(self, numbers, dtype=torch.int64):
        tensor = torch.tensor(numbers, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def augmented(self, images, draw):
        """Applies one operation to each image, OPERATIONS times. Images with the same operation are processed together."""
        images, count = images.clone(), len(images)  # the batch of `constant` must not change
        for _ in range(OPERATIONS):
            chosen = [draw.randrange(len(self.operations)) for _ in range(count)]
            order = sorted(range(count), key=chosen.__getitem__)
            positions, begin = self.to_device(order), 0
            for index, operation in enumerate(self.operations):
                size = chosen.count(index)
                if size and operation:
                    own = positions[begin:begin + size]
                    images[own] = operation(images[own].float()).round_().to(torch.uint8)
                begin += size
        return images

    def erased(self, inputs, draw):
        """Fills a rectangle of 2 % to a third of the area with noise, in each image with probability ERASING."""
        height, width = inputs.shape[2:]
        boxes = []
        for position in range(len(inputs)):
            if draw.random() < ERASING:
                area, aspect = draw.uniform(0.02, 1 / 3), math.exp(draw.uniform(math.log(0.3), math.log(1 / 0.3)))
                tall = min(height, round(height * math.sqrt(area * aspect)))
                wide = min(width, round(width * math.sqrt(area / aspect)))
                boxes.append((position, draw.randint(0, height - tall), tall, draw.randint(0, width - wide), wide))
        if not boxes:
            return inputs
        own, top, tall, left, wide = (column.view(-1, 1, 1, 1) for column in self.to_device(boxes).unbind(1))
        rows = torch.arange(height, device=self.device).view(1, 1, -1, 1)
        columns = torch.arange(width, device=self.device).view(1, 1, 1, -1)
        inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
        chosen = inputs[own.flatten()]
        inputs[own.flatten()] = torch.where(inside, torch.empty_like(chosen).normal_(generator=self.noise), chosen)
        return inputs

    def targets(self, labels):
        other = self.smoothing / self.classes
        targets = torch.full((len(labels), self.classes), other, device=self.device)
        return targets.scatter_(1, labels.view(-1, 1), 1 - self.smoothing + other)

    def mixed(self, inputs, targets, draw):
        """Mixes the batch with itself in reverse order, by MixUp or CutMix with equal probability."""
        ways = [way for way in ("mixup", "cutmix") if way in self.parts]
        if not ways:
            return inputs, targets
        if draw.choice(ways) == "mixup":
            share = draw.betavariate(MIXUP, MIXUP)
            inputs = inputs * share + inputs.flip(0) * (1 - share)
        else:
            inputs, share = self.cut(inputs, draw.betavariate(CUTMIX, CUTMIX), draw)
        return inputs, targets * share + targets.flip(0) * (1 - share)

    @staticmethod
    def cut(inputs, share, draw):
        """Replaces a rectangle by that of the image to mix with. Returns the inputs and the share that stays."""
        height, width = inputs.shape[2:]
        side = math.sqrt(1 - share)
        middle_y, middle_x = draw.randrange(height), draw.randrange(width)
        top, bottom = (min(height, max(0, round(middle_y + sign * side * height / 2))) for sign in (-1, 1))
        left, right = (min(width, max(0, round(middle_x + sign * side * width / 2))) for sign in (-1, 1))
        other = inputs.flip(0)
        inputs[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        return inputs, 1 - (bottom - top) * (right - left) / (height * width)
