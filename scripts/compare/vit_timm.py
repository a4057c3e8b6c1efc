#!/usr/bin/env python3
"""Compares one training step of the vision transformers of fdsl-bench with PyTorch, on networks of timm if it is installed.
With --logits, compares the results of inference instead, with parameters that either program wrote.

  scripts/compare/vit_timm.py                                     # vit-micro and vit-tiny, train-omp
  scripts/compare/vit_timm.py --logits --variant infer-vit --models vit-large,vit-tiny:160
  scripts/compare/vit_timm.py --variant train-naive --models vit-micro

For each model, optimizer and loss, the script writes the network of timm (VisionTransformer, as in deit_*_patch16_224) with random
parameters as safetensors. fdsl-bench starts from this file (--init) and writes its first step (--export-step). The parameters
must arrive unchanged, under timm's names. PyTorch then computes the same step, with the samples, the targets and the
factors of stochastic depth that fdsl-bench used. In the steps "mixed" and "bce", samples are mixed. Without timm, the script
uses its own network, whose parameters have the same names.

Bounds: the loss within a relative error of 1e-5, each gradient tensor within 1e-5 of its norm, and the update of each parameter
tensor within 1e-3 of the update's norm. adamw's weight decay applies to the tensors that timm's param_groups_weight_decay()
chooses. It does not apply to vectors, pos_embed and cls_token. "recipe" is adamw with --clip-norm, --layer-decay and --drop-path;
PyTorch clips with clip_grad_norm_(), and timm's param_groups_layer_decay(), if installed, gives the learning rates. The biases of
keys have zero gradients except for rounding, so the bound on updates excludes them. A NaN counts as a difference.

--logits: timm's network is saved as timm's CheckpointSaver does, and `infer` computes its predictions on a few random images. Then
fdsl-bench trains one step from the same file, and timm loads what it exports. Both programs must give the same logits for the same
parameters, up to a constant per image: --bound is the largest difference relative to the largest logit. With MODEL:SIZE, the images
have another size than the network in the file; both programs then interpolate its positions. Needs timm.

Exit status: 0 done, 1 a failure or a difference, 2 usage, 4 no PyTorch.
"""

import argparse
import csv
import json
import math
import pathlib
import sys
import tempfile

import shared  # in this folder

try:
    import numpy
    import torch
    from torch import nn
    from torch.nn import functional
    from torch_training import part, read_safetensors, step_errors
except ImportError as error:
    shared.end_without("compare/vit_timm.py", __doc__, error)
try:
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
except ImportError:
    VisionTransformer = checkpoint_filter_fn = None
try:
    from timm.optim import param_groups_layer_decay
except ImportError:  # timm is too old, or not installed
    param_groups_layer_decay = None

fail = shared.failing("compare/vit_timm.py")
LOSS, GRADIENT, STEP = 1e-5, 1e-5, 1e-3
PICTURES = ["--data", "synth", "--res", "224", "--classes", "10", "--train-size", "3", "--batch", "3"]
# Image size, channels, size of a patch, width, blocks, heads; options of fdsl-bench for samples of this size
MODELS = {
    "vit-micro": ((28, 1, 4, 32, 2, 2), ["--data", "digits", "--train-size", "33", "--batch", "33"]),
    "vit-tiny": ((224, 1, 16, 192, 12, 3), PICTURES),
    "vit-small": ((224, 1, 16, 384, 12, 6), PICTURES),
    "vit-base": ((224, 1, 16, 768, 12, 12), PICTURES),
    "vit-large": ((224, 1, 16, 1024, 24, 16), PICTURES),
}
SHAPE = ("img_size", "in_chans", "patch_size", "embed_dim", "depth", "num_heads")
OPTIMIZERS = {"sgd": ["--optimizer", "sgd", "--lr", "0.01"],
              "adamw": ["--optimizer", "adamw", "--lr", "0.001", "--epsilon", "1e-3", "--weight-decay", "0.05"],
              "recipe": ["--optimizer", "adamw", "--lr", "0.001", "--epsilon", "1e-3", "--weight-decay", "0.05",
                         "--clip-norm", "0.5", "--layer-decay", "0.75", "--drop-path", "0.3"]}

MIXING = ["--mixup", "0.8", "--cutmix", "1", "--label-smoothing", "0.1"]
# The options of fdsl-bench, and the loss as a function of logits and soft targets
LOSSES = {"plain": ([], functional.cross_entropy), "mixed": (MIXING, functional.cross_entropy),
          "bce": ([*MIXING, "--loss", "bce"], functional.binary_cross_entropy_with_logits)}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens):
        batch, count, width = tokens.shape
        query, key, value = self.qkv(tokens).reshape(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        values = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(values.transpose(1, 2).reshape(batch, count, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(width, 4 * width))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(4 * width, width))
        self.drop_path1 = self.drop_path2 = nn.Identity()

    def forward(self, tokens):
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))


class Vit(nn.Module):
    """The network of timm, for machines without timm."""

    def __init__(self, img_size, in_chans, patch_size, embed_dim, depth, num_heads, num_classes):
        super().__init__()
        self.patch_embed = nn.Sequential()
        self.patch_embed.add_module("proj", nn.Conv2d(in_chans, embed_dim, patch_size, patch_size))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (img_size // patch_size)**2 + 1, embed_dim))
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(embed_dim, eps=1e-6), nn.Linear(embed_dim, num_classes)

    def forward(self, images):
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Factors(nn.Module):
    """Stochastic depth with given factors, one per sample."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors.reshape(-1, 1, 1)

    def forward(self, tokens):
        return tokens * self.factors


def network(model, classes):
    """Returns the network with random parameters, large enough that an error in any layer shows."""
    shape = dict(zip(SHAPE, MODELS[model][0]))
    net = (VisionTransformer or Vit)(**shape, num_classes=classes)
    with torch.no_grad():
        for name, tensor in net.named_parameters():
            fan_in = tensor[0].numel() if tensor.dim() == 2 or tensor.dim() == 4 else 25
            values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) / math.sqrt(fan_in)
            tensor.copy_(1 + values if "norm" in name and name.endswith("weight") else values)
    return net


def write_safetensors(path, tensors):
    header, values = {}, b""
    for name, tensor in tensors.items():
        data = tensor.detach().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(values), len(values) + len(data)]}
        values += data
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + values)


def fdsl_step(options, model, optimizer, loss, net, folder):
    """Returns the first step of fdsl-bench from the parameters of `net`, and its row."""
    write_safetensors(f"{folder}/begin.safetensors", dict(net.named_parameters()))
    command = [options.bench, "--variant", options.variant, "--model", model, "--epochs", "1", "--test-size", "2", "--format", "csv",
               "--init", f"{folder}/begin.safetensors", "--export-step", f"{folder}/step"] + MODELS[model][1] + OPTIMIZERS[optimizer] + LOSSES[loss][0]
    rows = shared.run_bench(fail, command)
    return read_safetensors(f"{folder}/step"), rows[0]


def layers_after(name, blocks):
    """Returns how many layers follow the tensor's, as timm counts them: the norm is a part of the last block."""
    first = name.split(".")[0]
    return blocks - int(name.split(".")[1]) if first == "blocks" else {"norm": 1, "head": 0}.get(first, blocks + 1)


def optimizer_of(net, row):
    rate, decay = float(row["lr"]), float(row["weight_decay"])
    if row["optimizer"] == "sgd":
        return torch.optim.SGD(net.parameters(), rate, momentum=float(row["momentum"]))
    constants = rate, (float(row["beta1"]), float(row["beta2"])), float(row["epsilon"])
    if param_groups_layer_decay:
        groups = param_groups_layer_decay(net, decay, ("pos_embed", "cls_token"), layer_decay=float(row["layer_decay"]))
        return torch.optim.AdamW([{**group, "lr": rate * group["lr_scale"]} for group in groups], *constants)
    groups = [{"params": [tensor], "lr": rate * float(row["layer_decay"])**layers_after(name, len(net.blocks)),
               "weight_decay": decay * (tensor.dim() > 1 and name not in ("pos_embed", "cls_token"))}
              for name, tensor in net.named_parameters()]
    return torch.optim.AdamW(groups, *constants)


def without_keys(name, values):
    """Leaves out the biases of keys, whose gradients are zero except for rounding."""
    return torch.cat([values.chunk(3)[0], values.chunk(3)[2]]) if name.endswith("qkv.bias") else values


def check(options, model, optimizer, loss_name):
    """Compares one step. Returns whether all differences are within the bounds."""
    net = network(model, 10)
    with tempfile.TemporaryDirectory() as folder:
        step, row = fdsl_step(options, model, optimizer, loss_name, net, folder)
    before = part(step, "before.")
    arrived = all(torch.equal(before[name], tensor) for name, tensor in net.named_parameters())
    net.load_state_dict(before)  # the names and shapes must be the same
    for name, factors in part(step, "factor.").items():
        _, number, which = name.split(".")
        setattr(net.blocks[int(number)], which, Factors(factors))
    if options.fault:
        net.norm.bias.data[3] += 1e-2
    torch_step = optimizer_of(net, row)

    def update():
        if row["clip_norm"]:
            nn.utils.clip_grad_norm_(net.parameters(), float(row["clip_norm"]))
        torch_step.step()

    loss = LOSSES[loss_name][1](net(step["inputs"]), step["targets"])
    loss_off, (off, tensor), (step_off, step_tensor) = step_errors(
        dict(net.named_parameters()), loss, step, update, *([without_keys] if optimizer != "sgd" else []))
    fine = arrived and loss_off <= LOSS and off <= GRADIENT and step_off <= STEP
    print(f"{options.variant:12} {model:9} {optimizer:6} {loss_name:6} parameters {'the same' if arrived else 'CHANGED'}  loss {loss_off:8.1e}  "
          f"gradients {off:8.1e} ({tensor})  step {step_off:8.1e} ({step_tensor})  {'ok' if fine else 'DIFFERS'}")
    return fine


# Options of the step before --export, whose parameters differ visibly from those before it
STEP_OPTIONS = ["--classes", "10", "--epochs", "1", "--train-size", "4", "--test-size", "2", "--batch", "4", "--optimizer", "sgd", "--lr", "0.01", "--out-res"]


def write_images(folder, size):
    """Writes random images of two classes, and returns them as the network sees them, by their keys."""
    images, generator = {}, torch.Generator().manual_seed(5)
    for number in range(6):
        path = pathlib.Path(folder, "images", str(number % 2), f"{number:02}.npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (size, size), dtype=torch.uint8, generator=generator)
        numpy.save(path, pixels.numpy())
        images[f"{number % 2}/{number:02}.npy"] = (pixels.float() / 255 - 0.5) / 0.25
    return images


def logits_of(options, checkpoint, arguments, folder, images):
    """Returns the logits of fdsl-bench up to a constant per image: the logarithms of the probabilities."""
    shared.run_bench(fail, [options.bench, "--variant", options.variant, "--checkpoint", checkpoint, "--test-data", f"{folder}/images", "--loops", "1", "--top", "10",
                  "--predictions", f"{folder}/predictions.csv", *arguments])
    with open(f"{folder}/predictions.csv", encoding="utf-8", newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    if set(rows) != set(images):
        fail(f"the predictions are about {sorted(rows)[:3]}..., not {sorted(images)[:3]}...")
    result = torch.zeros(len(images), 10, dtype=torch.float64)
    for line, key in zip(result, images):
        for number in range(1, 11):
            line[int(rows[key][f"class_{number}"])] = math.log(float(rows[key][f"probability_{number}"]))
    return result


def logits_off(mine, net, images):
    """Returns the largest difference of the logits from those of timm's network, relative to timm's largest."""
    with torch.no_grad():
        theirs = torch.cat([net(image[None, None]) for image in images.values()]).double()
    if not torch.equal(mine.argmax(1), theirs.argmax(1)):
        close = (theirs.topk(2).values.diff().abs() / theirs.abs().max()).squeeze(1)
        print(f"  {int((mine.argmax(1) != theirs.argmax(1)).sum())} other classes, whose logits are {close.min():.1e} apart in timm")
    centred = [each - each.mean(1, keepdim=True) for each in (mine, theirs)]
    return ((centred[0] - centred[1]).abs().max() / centred[1].abs().max()).item()


def check_logits(options, name):
    """Compares the logits of a model in both directions. Returns whether all differences are within the bound."""
    model, _, size = name.partition(":")
    size = int(size or MODELS[model][0][0])
    net = network(model, 10).eval()
    shape = dict(zip(SHAPE, MODELS[model][0]), img_size=size)
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(folder, size)
        saved = {"epoch": 1, "arch": model, "state_dict": net.state_dict(), "version": 2, "args": argparse.Namespace(lr=0.1, path=pathlib.Path())}
        torch.save(saved, f"{folder}/timm.pth.tar")
        timm_net = VisionTransformer(**shape, num_classes=10).eval()
        timm_net.load_state_dict(checkpoint_filter_fn(net.state_dict(), timm_net))
        mine = logits_of(options, f"{folder}/timm.pth.tar", ["--model", model, "--mean", "0.5", "--std", "0.25"], folder, images)
        if options.fault:
            timm_net.pos_embed.data[0, 3, 0] += 0.1
        theirs_off = logits_off(mine, timm_net, images)
        shared.run_bench(fail, [options.bench, "--variant", options.variant.replace("infer", "train"), "--model", model, "--init", f"{folder}/timm.pth.tar",
                      "--data", f"{folder}/images", "--mean", "0.5", "--std", "0.25", "--export", f"{folder}/ours.safetensors",
                      *STEP_OPTIONS, str(size), "--channels", "1"])
        timm_net.load_state_dict(read_safetensors(f"{folder}/ours.safetensors"))
        ours_off = logits_off(logits_of(options, f"{folder}/ours.safetensors", [], folder, images), timm_net, images)
    fine = theirs_off <= options.bound and ours_off <= options.bound
    print(f"{options.variant:12} {name:13} logits of {len(images)} images, with parameters of timm {theirs_off:8.1e}, "
          f"of fdsl-bench {ours_off:8.1e}  {'ok' if fine else 'DIFFERS'}")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", help="variant of fdsl-bench (default train-omp, with --logits infer-omp)")
    parser.add_argument("--models", help="models, separated by commas (default vit-micro,vit-tiny, with --logits vit-large,vit-tiny:160)")
    parser.add_argument("--logits", action="store_true", help="compare logits instead of a training step")
    parser.add_argument("--bound", type=float, default=1e-4, help="bound of --logits (default 1e-4; for infer-vit, which computes in bf16, 0.05)")
    parser.add_argument("--bench", default=shared.PROGRAM, help="path of fdsl-bench")
    parser.add_argument("--fault", action="store_true", help="change one parameter in PyTorch, to see that the check fails")
    options = parser.parse_args()
    options.variant = options.variant or ("infer-omp" if options.logits else "train-omp")
    options.models = options.models or ("vit-large,vit-tiny:160" if options.logits else "vit-micro,vit-tiny")
    if options.logits and not VisionTransformer:
        fail("--logits needs timm; install it (pip install timm)", 4)
    unknown = [model for model in options.models.split(",") if (model.partition(":")[0] if options.logits else model) not in MODELS]
    if unknown:
        fail(f"--models {unknown[0]}: not one of {', '.join(MODELS)}", 2)
    print(f"PyTorch {torch.__version__}, " + ("networks of timm" if VisionTransformer else "timm is not installed: networks of this script")
          + (", without its param_groups_layer_decay()" if VisionTransformer and not param_groups_layer_decay else ""))
    if options.logits:
        return 0 if all([check_logits(options, name) for name in options.models.split(",")]) else 1
    results = [check(options, model, optimizer, loss) for model in options.models.split(",") for optimizer in OPTIMIZERS
               for loss in LOSSES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
