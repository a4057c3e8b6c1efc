#!/usr/bin/env python3
"""Compares the residual networks of fdsl-bench with PyTorch: one training step, or the speed of training.

  scripts/compare/resnet_torch.py                                          # a step of train-naive, resnet-micro
  scripts/compare/resnet_torch.py --variant train-resnet --model resnet50  # a step in bf16
  scripts/compare/resnet_torch.py --speed                                  # images/s of resnet50, batch 256, on one GPU

The network is torchvision's resnet50 if it is installed, otherwise a network of this script whose parameters have the same names.

A step: fdsl-bench writes its first step (--export-step). PyTorch computes the same step in double precision, with the samples and
targets that fdsl-bench used. With train-naive, the loss must be within 1e-5, and each gradient within 1e-3 of its norm; the running
statistics after the step within 1e-5. Gradients in bf16 are noisy, because rounding changes the masks of ReLU. For another variant,
the script therefore also computes the step with PyTorch's autocast to bf16 (on a GPU, in channels-last), and prints the errors of both
programs. The errors of the variant must be at most 1.5 times PyTorch's, plus 1 % (all gradients together; all statistics together).

The speed: fdsl-bench trains on one batch that stays on the GPU (--feed constant), and so does PyTorch: channels-last, autocast to
bf16, SGD with momentum. The two programs take turns; the table has the median of the repeats.

Exit status: 0 done, 1 a failure or a difference, 2 usage, 4 no PyTorch.
"""

import argparse
import statistics
import sys
import tempfile
import time

import shared  # in this folder

try:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch_training import part, read_safetensors
except ImportError as error:
    shared.end_without("compare/resnet_torch.py", __doc__, error)
try:
    from torchvision.models import resnet50
except ImportError:
    resnet50 = None

fail = shared.failing("compare/resnet_torch.py")
LOSS, GRADIENT, STATISTIC, RATIO, SLACK = 1e-5, 1e-3, 1e-5, 1.5, 1e-2
# Width of the first convolution; blocks and width of each stage; options of fdsl-bench for a step
MODELS = {"resnet-micro": (8, ((2, 8), (1, 16)), ["--data", "digits", "--train-size", "33", "--batch", "33"]),
          "resnet50": (64, ((3, 64), (4, 128), (6, 256), (3, 512)),
                       ["--data", "synth", "--res", "224", "--classes", "10", "--train-size", "16", "--batch", "16"])}
# Modes of PyTorch, and the mode of torch.compile
MODES = {"eager": None, "compile": "default", "compile-graphs": "reduce-overhead"}
STEPS, REPEATS = 30, 5


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, values):
        shortcut = self.downsample(values) if self.downsample else values
        values = functional.relu(self.bn1(self.conv1(values)))
        values = functional.relu(self.bn2(self.conv2(values)))
        return functional.relu(self.bn3(self.conv3(values)) + shortcut)


class Residual(nn.Module):
    """The network of torchvision, for other widths and for machines without torchvision."""

    def __init__(self, channels, stem, stages, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem)
        width = stem
        self.stages = []
        for i, (count, planes) in enumerate(stages):
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(width, planes, 2 if i > 0 and block == 0 else 1))
                width = 4 * planes
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            self.stages.append(f"layer{i + 1}")
        self.fc = nn.Linear(width, classes)

    def forward(self, values):
        values = functional.max_pool2d(functional.relu(self.bn1(self.conv1(values))), 3, 2, 1)
        for stage in self.stages:
            values = getattr(self, stage)(values)
        return self.fc(values.mean((2, 3)))


def network(model, channels, classes):
    stem, stages, _ = MODELS[model]
    return resnet50(num_classes=classes) if resnet50 and model == "resnet50" and channels == 3 else \
        Residual(channels, stem, stages, classes)


def run(options, arguments):
    """Runs fdsl-bench. Returns its rows."""
    return shared.run_bench(fail, [options.bench, "--variant", options.variant, "--model", options.model, "--format", "csv", *arguments])


# ---- One step ----

def gradients_of(net, step, device, half):
    """Returns the loss and the gradients of a step, in double precision, or with autocast to bf16."""
    net = net.to(device) if half else net.double().to(device)
    inputs, targets = step["inputs"].to(device), step["targets"].to(device)
    if half and device == "cuda":
        net, inputs = net.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16, enabled=half):
        logits = net(inputs if half else inputs.double())
    loss = functional.cross_entropy(logits.float() if half else logits, targets if half else targets.double())
    loss.backward()
    return loss.item(), {name: tensor.grad.double().cpu() for name, tensor in net.named_parameters()}


def statistics_of(net):
    """Returns the running means and variances of a network, in double precision."""
    return {name: tensor.double().cpu() for name, tensor in net.named_buffers() if "running" in name}


def distances(mine, right):
    """Returns the error of each tensor, relative to its norm, and that of all tensors together."""
    off = {name: (mine[name].double() - tensor).norm().item() for name, tensor in right.items()}
    norms = {name: tensor.norm().item() for name, tensor in right.items()}
    whole = sum(value**2 for value in off.values())**0.5 / sum(value**2 for value in norms.values())**0.5
    return {name: off[name] / norms[name] if norms[name] else off[name] for name in right}, whole


def check_step(options):
    """Compares one step. Returns whether all differences are within the bounds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        run(options, ["--epochs", "1", "--test-size", "2", "--export-step", f"{folder}/step", *MODELS[options.model][2]])
        step = read_safetensors(f"{folder}/step")
    before, after, ours = (part(step, prefix) for prefix in ("before.", "after.", "gradient."))
    channels, classes = step["inputs"].shape[1], len(before["fc.bias"])

    def filled():
        net = network(options.model, channels, classes)
        missing, unexpected = net.load_state_dict(before, strict=False)
        if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
            fail(f"the names of the parameters differ: {missing + unexpected}")
        if options.fault:
            net.layer1[0].conv2.weight.data[:, :, 1, 1] = 0
        return net

    exact = filled()
    loss, right = gradients_of(exact, step, device, False)
    each, whole = distances(ours, right)
    worst = max(each, key=each.get)
    off = abs(step["loss"].item() - loss) / abs(loss)
    buffers = statistics_of(exact)
    statistics_off = distances(after, buffers)[1]
    print(f"{options.variant} {options.model}, relative errors: loss {off:.1e}, gradients {whole:.1e} (worst: {worst} {each[worst]:.1e}), "
          f"running statistics {statistics_off:.1e}")
    if options.variant == "train-naive":
        return off <= LOSS and each[worst] <= GRADIENT and statistics_off <= STATISTIC
    rounded = filled()
    half_loss, half = gradients_of(rounded, step, device, True)
    their_each, theirs = distances(half, right)
    their_statistics = distances(statistics_of(rounded), buffers)[1]
    print(f"PyTorch with autocast to bf16: loss {abs(half_loss - loss) / abs(loss):.1e}, gradients {theirs:.1e} "
          f"(worst: {max(their_each.values()):.1e}), running statistics {their_statistics:.1e}")
    return off <= 2e-2 and whole <= RATIO * theirs + SLACK and statistics_off <= RATIO * their_statistics + SLACK


# ---- Speed ----

class Trainer:
    """Steps of PyTorch on one batch that stays on the GPU."""

    def __init__(self, options, mode):
        size, batch = options.res, options.batch
        self.net = network(options.model, 3, 1000).cuda().to(memory_format=torch.channels_last).train()
        self.values = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
        self.labels = torch.randint(1000, (batch,), device="cuda")
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, fused=True)
        self.forward = torch.compile(self.loss, mode=MODES[mode]) if MODES[mode] else self.loss
        self.batch = batch
        for _ in range(5):
            self.step()

    def loss(self, values, labels):
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.net(values)
        return functional.cross_entropy(logits.float(), labels)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.forward(self.values, self.labels).backward()
        self.optimizer.step()

    def rate(self):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        torch.cuda.synchronize()
        return self.batch * STEPS / (time.perf_counter() - begin)


def our_rate(options):
    """Returns the images per second of fdsl-bench: the median of the epochs after the first one."""
    rows = run(options, ["--data", "synth", "--res", str(options.res), "--out-res", str(options.res), "--channels", "3", "--classes", "1000",
                         "--train-size", str(options.batch * STEPS), "--test-size", "1", "--batch", str(options.batch), "--feed", "constant",
                         "--epochs", "4", "--optimizer", "sgd", "--lr", "0.1", "--weight-decay", "1e-4"])
    return statistics.median(float(row["items_per_s"]) for row in rows[1:])


def compare_speed(options):
    if not torch.cuda.is_available():
        fail("--speed needs a GPU", 4)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    rates = {options.variant: []}
    for _ in range(2):
        rates[options.variant].append(our_rate(options))
    for mode in options.modes.split(","):
        trainer = Trainer(options, mode)
        rates["torch " + mode] = [trainer.rate() for _ in range(REPEATS)]
        del trainer
        torch.cuda.empty_cache()
        rates[options.variant].append(our_rate(options))
    best = max(statistics.median(values) for name, values in rates.items() if name.startswith("torch"))
    print(f"{options.model}, {options.res} x {options.res} pixels, batch {options.batch}, bf16, {torch.cuda.get_device_name()}, PyTorch "
          f"{torch.__version__}" + ("" if resnet50 else ", without torchvision"))
    print(f"{'program':22} {'images/s':>9} {'least':>9} {'most':>9} {'ratio':>6}")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:22} {median:9.0f} {min(values):9.0f} {max(values):9.0f} {median / best:6.2f}")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", help="training variant of fdsl-bench (default train-naive; with --speed train-resnet)")
    parser.add_argument("--model", help="resnet-micro or resnet50 (default resnet-micro; with --speed resnet50)")
    parser.add_argument("--bench", default=shared.PROGRAM, help="path of fdsl-bench")
    parser.add_argument("--fault", action="store_true", help="change a tap in PyTorch, to see that the check of a step fails")
    parser.add_argument("--speed", action="store_true", help="compare the speed of training instead of a step")
    parser.add_argument("--modes", default="eager,compile", help=f"of PyTorch, with --speed: {', '.join(MODES)} (default eager,compile)")
    parser.add_argument("--batch", type=int, default=256, help="with --speed: images per step (default 256)")
    parser.add_argument("--res", type=int, default=224, help="with --speed: pixels along an axis (default 224)")
    options = parser.parse_args()
    options.variant = options.variant or ("train-resnet" if options.speed else "train-naive")
    options.model = options.model or ("resnet50" if options.speed else "resnet-micro")
    if options.model not in MODELS:
        fail(f"--model {options.model}: not one of {', '.join(MODELS)}", 2)
    if any(mode not in MODES for mode in options.modes.split(",")):
        fail(f"--modes {options.modes}: not from {', '.join(MODES)}", 2)
    return 0 if (compare_speed if options.speed else check_step)(options) else 1


if __name__ == "__main__":
    sys.exit(main())
