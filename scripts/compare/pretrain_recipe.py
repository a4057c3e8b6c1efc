"""The published recipe on the training device, the same for every source of images: RandAugment, random erasing, MixUp, CutMix,
label smoothing, and the learning rate.

All random choices are drawn on the host, from a generator that depends only on (seed, rank, step). The noise of random erasing is
drawn on the device, from a generator that depends on (seed, rank) and on the earlier steps. The same sequence of images
therefore gives the same inputs of the network. No function here waits for the GPU: each step copies small tensors of choices
from pinned memory.
"""

import math
import random

import torch
from pretrain_order import cut_box, mix_of
from pretrain_sources import to
from torch.nn import functional

OPERATIONS, MAGNITUDE = 2, 28 / 30  # magnitude 28 on torchvision's scale of 0 to 30
MIXUP, CUTMIX, ERASING = 0.8, 1.0, 0.25
MEAN, STD = 0.5, 0.5
LUMA = (0.299, 0.587, 0.114)


def learning_rate(step, options, total):
    """Returns the rate of a step: a linear warm-up, then a cosine to 0 at the step `total`; constant if `total` is None."""
    if step < options.lr_warmup:
        return options.lr * (step + 1) / options.lr_warmup
    if total is None:
        return options.lr
    share = (step - options.lr_warmup) / max(1, total - options.lr_warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(1, share)))


# ---- RandAugment: each function takes float images with values from 0 to 255, and a row of numbers per image ----


def blend(other):
    """Returns the function that moves images away from (factor > 1) or towards (factor < 1) another version of them."""
    return lambda images, factors: torch.lerp(other(images), images, factors[:, :1, None, None]).clamp_(0, 255)


def gray(images):
    if images.shape[1] == 1:
        return images
    return sum(images[:, channel:channel + 1] * weight for channel, weight in enumerate(LUMA))


def smooth(images):
    """Returns images smoothed with weights 1 1 1, 1 5 1, 1 1 1. Border pixels are not changed."""
    inner = (functional.avg_pool2d(images, 3, 1) * 9 + images[:, :, 1:-1, 1:-1] * 4) / 13
    smoothed = images.clone()
    smoothed[:, :, 1:-1, 1:-1] = inner
    return smoothed


def posterize(images, _):
    return torch.floor(images / 16) * 16  # 4 bits, as 8 - round(4 * MAGNITUDE)


def solarize(images, _):
    return torch.where(images >= 255 * (1 - MAGNITUDE), 255 - images, images)


def autocontrast(images, _):
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1), images)


def equalize(images, _):
    """Maps the gray values of each channel so that their cumulative histogram becomes linear, as PIL does."""
    values = images.flatten(2).long()
    counts = torch.zeros((*values.shape[:2], 256), device=images.device).scatter_add_(2, values, images.flatten(2) * 0 + 1)
    step = torch.floor((values.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) / 255)
    table = torch.floor((counts.cumsum(2) - counts + torch.floor(step / 2)) / step.clamp(min=1)).clamp_(0, 255)
    return torch.where(step > 0, table.gather(2, values), images.flatten(2)).view_as(images)


def warp(images, matrices):
    """Applies affine maps (2 × 3, in coordinates from -1 to 1) with bilinear interpolation. The area outside the image is
    black. The grid is computed without a matrix product, which might use TF32."""
    y, x = ((2 * torch.arange(size, device=images.device) + 1) / size - 1 for size in images.shape[2:])
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    grid = torch.stack((x * a + y[:, None] * b + c, x * d + y[:, None] * e + f), 3)
    return functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=False)


BLENDS = tuple(map(blend, (torch.zeros_like, gray, smooth, lambda images: gray(images).mean((1, 2, 3), keepdim=True))))
FUNCTIONS = (warp, *BLENDS, posterize, solarize, autocontrast, equalize)


def operations():
    """Returns RandAugment's operations at the recipe's magnitude, each a function (None: no change) and six numbers, of which it
    may ignore some. Signed operations appear once with each sign, the others twice, so that each operation is equally likely.
    Shears keep the top left corner."""
    both = []
    for sign in (1, -1):
        factor, shear, move = 1 + sign * 0.9 * MAGNITUDE, sign * 0.3 * MAGNITUDE, sign * -2 * 150 / 331 * MAGNITUDE
        angle = sign * math.radians(-30 * MAGNITUDE)
        cos, sin = math.cos(angle), math.sin(angle)
        matrices = ((1.0, shear, shear, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, shear, 1.0, shear), (1.0, 0.0, move, 0.0, 1.0, 0.0),
                    (1.0, 0.0, 0.0, 0.0, 1.0, move), (cos, sin, 0.0, -sin, cos, 0.0))
        both += [(warp, matrix) for matrix in matrices] + [(function, (factor,) + 5 * (0.0,)) for function in BLENDS]
        both += [(function, 6 * (0.0,)) for function in (None, posterize, solarize, autocontrast, equalize)]
    return both


# ---- The recipe ----


class Recipe:
    """Turns uint8 images and labels on the device into inputs and soft targets."""

    def __init__(self, options, device, rank, ranks=1):
        self.parts = options.parts
        self.classes, self.smoothing = options.classes, options.label_smoothing
        self.device, self.name = device, f"{options.seed} {rank}"
        self.operations = operations()
        self.order, self.seed = options.order, options.seed
        self.steps = options.images // (options.batch * ranks) if options.order == "train" else 0  # per epoch
        self.noise = torch.Generator(device).manual_seed(options.seed * 4096 + rank)
        self.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format

    def __call__(self, images, labels, step):
        draw = random.Random(f"{self.name} {step}")
        if "randaugment" in self.parts:
            images = self.augmented(images, draw)
        inputs = ((images.float() / 255) - MEAN) / STD
        if "erasing" in self.parts:
            inputs = self.erased(inputs, draw)
        inputs, targets = self.mixed(inputs, self.targets(labels), draw, step)
        return inputs.contiguous(memory_format=self.memory_format), targets

    def augmented(self, images, draw):
        """Applies one operation to each image, OPERATIONS times. Images with the same function are processed together."""
        images, count = images.clone(), len(images)  # the batch of `constant` must not change
        for _ in range(OPERATIONS):
            chosen = [draw.choice(self.operations) for _ in range(count)]
            groups = [[index for index in range(count) if chosen[index][0] is function] for function in FUNCTIONS]
            order, sizes = sum(groups, []), list(map(len, groups))
            indices = to(torch.tensor(order, dtype=torch.int64), self.device)
            numbers = to(torch.tensor([chosen[index][1] for index in order]), self.device)
            for function, group, group_numbers in zip(FUNCTIONS, indices.split(sizes), numbers.split(sizes)):
                if len(group):
                    images[group] = function(images[group].float(), group_numbers).round_().to(torch.uint8)
        return images

    def erased(self, inputs, draw):
        """Fills a rectangle of 2 % to a third of the area with noise, in each image with probability ERASING. A box that is
        too large is drawn again, up to ten times in all, as in timm."""
        height, width = inputs.shape[2:]
        boxes = []
        for index in range(len(inputs)):
            for _ in range(10 if draw.random() < ERASING else 0):
                area = draw.uniform(0.02, 1 / 3) * height * width
                aspect = math.exp(draw.uniform(math.log(0.3), math.log(1 / 0.3)))
                tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if tall < height and wide < width:
                    boxes.append((index, draw.randint(0, height - tall), tall, draw.randint(0, width - wide), wide))
                    break
        if not boxes:
            return inputs
        indices, *sides = to(torch.tensor(boxes), self.device).unbind(1)
        top, tall, left, wide = (side.view(-1, 1, 1, 1) for side in sides)
        rows = torch.arange(height, device=self.device).view(1, 1, -1, 1)
        columns = torch.arange(width, device=self.device).view(1, 1, 1, -1)
        inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
        chosen = inputs[indices]
        inputs[indices] = torch.where(inside, torch.empty_like(chosen).normal_(generator=self.noise), chosen)
        return inputs

    def targets(self, labels):
        other = self.smoothing / self.classes
        targets = torch.full((len(labels), self.classes), other, device=self.device)
        return targets.scatter_(1, labels.view(-1, 1), 1 - self.smoothing + other)

    def mixed(self, inputs, targets, draw, step):
        """Mixes the batch with itself in reverse order, by MixUp or CutMix with equal probability."""
        mixup, cutmix = MIXUP * ("mixup" in self.parts), CUTMIX * ("cutmix" in self.parts)
        if not mixup and not cutmix:
            return inputs, targets
        if self.order == "train":
            share, box = mix_of(self.seed, *divmod(step, self.steps), *inputs.shape[2:], mixup, cutmix)
        else:
            share, box = self.draw_mix(draw, *inputs.shape[2:], mixup, cutmix)
        if box:
            top, bottom, left, right = box
            inputs[:, :, top:bottom, left:right] = inputs.flip(0)[:, :, top:bottom, left:right]
        else:
            inputs = inputs * share + inputs.flip(0) * (1 - share)
        return inputs, targets * share + targets.flip(0) * (1 - share)

    @staticmethod
    def draw_mix(draw, height, width, mixup, cutmix):
        """Draws how the samples of a step are mixed. Returns (share, box). share: the weight of a sample in its mixed sample. box:
        top, bottom, left and right of CutMix's rectangle; None for MixUp."""
        if draw.choice([way for way, alpha in (("mixup", mixup), ("cutmix", cutmix)) if alpha]) == "mixup":
            return draw.betavariate(mixup, mixup), None
        return cut_box(height, width, draw.betavariate(cutmix, cutmix), draw.randrange)
