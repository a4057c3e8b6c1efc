"""The transforms of published training scripts, for scripts/compare/pretrain.py --recipe NAME. They are applied by the libraries that
the scripts use: torchvision's transforms v2 (pdp2026), or those of timm (cvpr2023, deit).

docs/recipes.md compares each option of the scripts with that of fdsl-bench. All random choices of a step depend on (seed, rank, step) only.
"""

import random

import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
MIXUP, CUTMIX, ERASING = 0.8, 1.0, 0.25
TIMM_POLICY = "rand-m9-mstd0.5-inc1"


class Published:
    """Turns uint8 images of --res pixels and their labels into inputs of --out-res pixels and soft targets."""

    def __init__(self, options, device, rank):
        self.device, self.size, self.classes = device, options.out_res, options.classes
        self.smoothing, self.name = options.label_smoothing, f"{options.seed} {rank}"
        self.mean, self.std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
        self.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format

    def __call__(self, images, labels, step):
        draw = random.Random(f"{self.name} {step}")
        torch.manual_seed(draw.getrandbits(63))
        random.seed(draw.getrandbits(63))
        inputs, targets = self.transformed(images, labels, draw)
        return inputs.contiguous(memory_format=self.memory_format), targets

    def normalised(self, images):
        return (images.float() / 255 - self.mean) / self.std


class Pdp2026(Published):
    """pretrain/pretrain_cuda_optim of hpca-uji/fdsl-gpu-pipeline: crops and mixes a batch at once, and applies RandAugment and
    erasing to one image at a time."""

    def __init__(self, options, device, rank):
        super().__init__(options, device, rank)
        from torchvision.transforms import v2
        self.crop = v2.RandomResizedCrop((self.size, self.size), interpolation=v2.InterpolationMode.BICUBIC)
        self.change = rand_augment_with_invert()(num_ops=2, magnitude=28, fill=128)
        self.mix = v2.RandomChoice([v2.MixUp(alpha=MIXUP, num_classes=self.classes),
                                    v2.CutMix(alpha=CUTMIX, num_classes=self.classes)])
        self.erase = v2.RandomErasing(p=ERASING, value="random")

    def transformed(self, images, labels, _):
        images = self.crop(images)
        images = torch.stack([self.change(image) for image in images])
        inputs, targets = self.mix(images.float() / 255, labels)
        inputs = (inputs - self.mean) / self.std
        inputs = torch.stack([self.erase(image) for image in inputs])
        return inputs, targets * (1 - self.smoothing) + self.smoothing / self.classes


def rand_augment_with_invert():
    """Returns the class of the script: RandAugment with invert. An operation that has a magnitude gets the magnitude 0 with
    probability 1/2, which makes posterize clear all bits, and solarize invert all values."""
    from torchvision.transforms import v2

    class RandAugmentWithInvert(v2.RandAugment):
        _AUGMENTATION_SPACE = {**v2.RandAugment._AUGMENTATION_SPACE, "Invert": (lambda *_: None, False)}

        def forward(self, image):
            for _ in range(self.num_ops):
                name, (levels, signed) = self._get_random_item(self._AUGMENTATION_SPACE)
                values, magnitude = levels(self.num_magnitude_bins, *image.shape[-2:]), 0.0
                if values is not None and torch.rand(()) <= 0.5:
                    sign = -1 if signed and torch.rand(()) <= 0.5 else 1
                    magnitude = sign * float(values[self.magnitude])
                image = self._apply_image_or_video_transform(image, name, magnitude, interpolation=self.interpolation,
                                                             fill=self._fill)
            return image

    return RandAugmentWithInvert


class Timm(Published):
    """The scripts that use timm's transforms: one image at a time, in Pillow, on the CPU. cvpr2023 mixes bytes and then erases; deit
    erases and then mixes."""

    def __init__(self, options, device, rank):
        super().__init__(options, device, rank)
        from timm.data import Mixup, create_transform
        from timm.data.random_erasing import RandomErasing
        self.deit = options.recipe == "deit"
        self.transform = create_transform(
            self.size, is_training=True, hflip=0.5 if self.deit else 0.0, auto_augment=TIMM_POLICY,
            interpolation="bicubic" if self.deit else "random", mean=MEAN, std=STD, re_prob=ERASING if self.deit else 0.0,
            re_mode="pixel", use_prefetcher=not self.deit)
        self.mix = Mixup(MIXUP, CUTMIX, label_smoothing=self.smoothing, num_classes=self.classes)
        self.erase = RandomErasing(ERASING, mode="pixel", device=device.type)

    def transformed(self, images, labels, draw):
        import numpy
        from PIL import Image
        numpy.random.seed(draw.getrandbits(32))
        pictures = [Image.fromarray(image) for image in images.movedim(1, 3).cpu().numpy()]
        inputs = torch.stack([torch.as_tensor(self.transform(picture)) for picture in pictures]).to(self.device)
        inputs, targets = self.mix(inputs.float(), labels)
        return (inputs if self.deit else self.erase(self.normalised(inputs.round_()))), targets


def published(options, device, rank):
    """Returns the transforms of --recipe."""
    return (Pdp2026 if options.recipe == "pdp2026" else Timm)(options, device, rank)
