#!/usr/bin/env python3
"""Writes the files in this folder with PyTorch and timm: a checkpoint of `vit-micro` as timm's CheckpointSaver writes it, and
its positions for images of other sizes, as timm's resample_abs_pos_embed() interpolates them. tests/test_train_init.c reads both.
Two files with the same tensors have the older and the newer format of torch.save().

    pip install torch==2.15.0 timm==1.0.31 && python3 make.py

Value i of a tensor NAME is ((31 len(NAME) + 7 i) mod 61 - 30) / 64, which bfloat16 holds exactly; its moving average is twice that.
"""
import argparse
import collections
import datetime
import pathlib

import numpy
import torch
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

net = VisionTransformer(img_size=28, in_chans=1, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=10).bfloat16()
with torch.no_grad():
    for name, tensor in net.named_parameters():
        count = torch.arange(tensor.numel())
        tensor.copy_((((31 * len(name) + 7 * count) % 61 - 30) / 64).reshape(tensor.shape))
optimizer = torch.optim.AdamW([net.head.bias], lr=1e-3)
net.head.bias.grad = torch.zeros_like(net.head.bias)
optimizer.step()
with torch.no_grad():
    net.head.bias.copy_((((31 * len("head.bias") + 7 * torch.arange(10)) % 61 - 30) / 64))
state = net.state_dict()

# Training scripts store these values as their arguments. None of them is a parameter.
args = argparse.Namespace(
    lr=1e-3, betas=(0.9, 0.95), data_dir=pathlib.Path("data/images"), device=torch.device("cuda:0"), dtype=torch.bfloat16,
    model_kwargs=collections.defaultdict(list, {"depth": [2]}), tags={"vit", "micro"}, resume=None, seed=2**70,
    scale=numpy.float64(0.08), ratios=numpy.arange(3.0), begun=datetime.datetime(2026, 1, 2), key=b"\x00\xff",
    nested=argparse.Namespace(clip=float("inf")), size=torch.Size([1, 28, 28]), best=collections.Counter("aab"),
    recent=collections.deque([1, 2], 5))
torch.save({"epoch": 7, "arch": "vit_micro", "state_dict": state, "optimizer": optimizer.state_dict(), "version": 2, "args": args,
            "amp_scaler": {"scale": 65536.0}, "state_dict_ema": {name: 2 * tensor for name, tensor in state.items()},
            "metric": numpy.float64(77.5)}, "timm.pth.tar")

positions = state["pos_embed"].float()
save_file({f"{side}": resample_abs_pos_embed(positions, [side, side]) for side in (1, 3, 5, 8, 14)}, "positions.safetensors")

# The same object in the format before PyTorch 1.6 and as a zip archive, for tests/test_torch_file.c.
torch.manual_seed(0)
views = torch.arange(40.0).reshape(10, 4)
values = {"state_dict": {"fc.weight": torch.randn(3, 5), "fc.bias": torch.randn(3)}, "view": views[2:5],
          "half": torch.randn(7).half(), "bf": torch.randn(3, 5).bfloat16(), "i": torch.arange(9),
          "args": argparse.Namespace(a=1), "p": torch.nn.Parameter(torch.randn(2, 3)), "empty": torch.zeros(0)}
torch.save(values, "legacy.pt", _use_new_zipfile_serialization=False)
torch.save(values, "legacy_zip.pt")
