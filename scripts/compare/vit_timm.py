#!/usr/bin/env python3
"""Compares one training step of the vision transformers of fdsl-bench with PyTorch, on networks of timm if it is installed.

  scripts/compare/vit_timm.py                                     # vit-micro and vit-tiny, train-omp
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

Exit status: 0 done, 1 a failure or a difference, 2 usage, 4 no PyTorch.
"""

import argparse
import csv
import json
import math
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch_training import part, read_safetensors
except ImportError as error:
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(__doc__.strip())
        sys.exit()
    print(f"compare/vit_timm.py: {error}; install PyTorch and NumPy (python3-torch, python3-numpy)", file=sys.stderr)
    sys.exit(4)
try:
    from timm.models.vision_transformer import VisionTransformer
except ImportError:
    VisionTransformer = None
try:
    from timm.optim import param_groups_layer_decay
except ImportError:  # timm is too old, or not installed
    param_groups_layer_decay = None

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "fdsl-bench"
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
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, count, width))


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
    names = ("img_size", "in_chans", "patch_size", "embed_dim", "depth", "num_heads")
    shape = dict(zip(names, MODELS[model][0]))
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


def fail(message, status=1):
    print(f"compare/vit_timm.py: {message}", file=sys.stderr)
    sys.exit(status)


def fdsl_step(options, model, optimizer, loss, net, folder):
    """Returns the first step of fdsl-bench from the parameters of `net`, and its row."""
    write_safetensors(f"{folder}/begin.safetensors", dict(net.named_parameters()))
    command = [options.bench, "--variant", options.variant, "--model", model, "--epochs", "1", "--test-size", "2", "--format", "csv",
               "--init", f"{folder}/begin.safetensors", "--export-step", f"{folder}/step"] + MODELS[model][1] + OPTIMIZERS[optimizer] + LOSSES[loss][0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as reason:
        fail(f"{options.bench}: {reason.strerror}; build it, or name it with --bench", 2)
    if done.returncode:
        fail(done.stderr.strip())
    return read_safetensors(f"{folder}/step"), list(csv.DictReader(done.stdout.splitlines()))[0]


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


def worst(mine, theirs, skips=False):
    """Returns the largest relative distance between a tensor of one program and the same tensor of the other, and the tensor's
    name. With `skips`, leaves out the biases of keys."""
    distances = []
    for name, tensor in theirs.items():
        one, other = mine[name].double().flatten(), tensor.double().flatten()
        if skips and name.endswith("qkv.bias"):
            one, other = (torch.cat([values.chunk(3)[0], values.chunk(3)[2]]) for values in (one, other))
        norm, off = other.norm().item(), (one - other).norm().item()
        distances.append((off / norm if norm else off, name))
    return max(distances, key=lambda distance: (math.isnan(distance[0]), distance[0]))


def check(options, model, optimizer, loss_name):
    """Compares one step. Returns whether all differences are within the bounds."""
    net = network(model, 10)
    with tempfile.TemporaryDirectory() as folder:
        step, row = fdsl_step(options, model, optimizer, loss_name, net, folder)
    before, after, gradients = (part(step, prefix) for prefix in ("before.", "after.", "gradient."))
    arrived = all(torch.equal(before[name], tensor) for name, tensor in net.named_parameters())
    net.load_state_dict(before)  # the names and shapes must be the same
    for name, factors in part(step, "factor.").items():
        _, number, which = name.split(".")
        setattr(net.blocks[int(number)], which, Factors(factors))
    if options.fault:
        net.norm.bias.data[3] += 1e-2
    torch_step = optimizer_of(net, row)
    loss = LOSSES[loss_name][1](net(step["inputs"]), step["targets"])
    loss.backward()
    loss_off = abs(loss.item() - step["loss"].item()) / max(step["loss"].item(), 1e-30)
    off, tensor = worst({name: parameter.grad for name, parameter in net.named_parameters()}, gradients)
    if row["clip_norm"]:
        nn.utils.clip_grad_norm_(net.parameters(), float(row["clip_norm"]))
    torch_step.step()
    step_off, step_tensor = worst({name: parameter.detach() - before[name] for name, parameter in net.named_parameters()},
                                  {name: after[name] - before[name] for name in before}, optimizer != "sgd")
    fine = arrived and loss_off <= LOSS and off <= GRADIENT and step_off <= STEP
    print(f"{options.variant:12} {model:9} {optimizer:6} {loss_name:6} parameters {'the same' if arrived else 'CHANGED'}  loss {loss_off:8.1e}  "
          f"gradients {off:8.1e} ({tensor})  step {step_off:8.1e} ({step_tensor})  {'ok' if fine else 'DIFFERS'}")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="train-omp", help="training variant of fdsl-bench (default train-omp)")
    parser.add_argument("--models", default="vit-micro,vit-tiny", help="models, separated by commas (default vit-micro,vit-tiny)")
    parser.add_argument("--bench", default=PROGRAM, help="path of fdsl-bench")
    parser.add_argument("--fault", action="store_true", help="change one parameter in PyTorch, to see that the check fails")
    options = parser.parse_args()
    unknown = [model for model in options.models.split(",") if model not in MODELS]
    if unknown:
        fail(f"--models {unknown[0]}: not one of {', '.join(MODELS)}", 2)
    print(f"PyTorch {torch.__version__}, " + ("networks of timm" if VisionTransformer else "timm is not installed: networks of this script")
          + (", without its param_groups_layer_decay()" if VisionTransformer and not param_groups_layer_decay else ""))
    results = [check(options, model, optimizer, loss) for model in options.models.split(",") for optimizer in OPTIMIZERS
               for loss in LOSSES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
