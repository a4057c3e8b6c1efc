#!/usr/bin/env python3
"""The same training in PyTorch: net, initial weights, data, batch, optimizer and epochs of an fdsl-bench run.

  scripts/compare_pytorch.py --variant train-naive,train-omp --data ../mnist --model cnn --epochs 2 --out results/train.csv
  scripts/compare_pytorch.py --gradients --variant train-naive       # one step of each model and optimizer

All other options go to fdsl-bench as they are. The first form runs the variants, then PyTorch, and prints one table; rows of
PyTorch (torch-cpu, torch-cuda) have our columns and go into the same --out. The second compares loss, gradients and the
parameters behind a step: the loss within 1e-5 of itself, each tensor of gradients within 1e-5 of its norm, and the way that
each tensor of parameters went within 1e-3 of that way's length (Adam makes a step of the whole rate of the least gradient, so
its rounding too). A NaN is a difference. Exit status: 0 done, 1 a failure or a difference, 2 usage, 4 no
PyTorch.
"""

import argparse
import csv
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

try:
    import numpy
    import torch
    from torch.nn import functional
except ImportError as error:
    print(f"compare_pytorch.py: {error}; install PyTorch and NumPy (python3-torch, python3-numpy)", file=sys.stderr)
    sys.exit(4)

PROGRAM = str(pathlib.Path(__file__).resolve().parent.parent / "fdsl-bench")
TOLERANCE = 1e-5  # of the loss, and of the norm of a tensor's gradients
STEP_TOLERANCE = 1e-3  # of the way that a tensor went
# The layers of src/train/model.c by their names; what follows a colon is padding, the rate of dropout, or how many layers
# before an addition the other output is.
MODELS = {
    "logreg": "fc1",
    "lenet": "conv1:2 relu pool conv2 relu pool fc1 relu fc2 relu fc3",
    "cnn": "conv1 relu conv2 relu pool dropout1:0.25 fc1 relu dropout2:0.5 fc2",
    "cnn3d": "conv1:1 relu pool conv2:1 relu pool fc1 relu dropout1:0.5 fc2",
    "cnn-fdsl": "conv1:1 relu pool conv2:1 relu conv3:1 add:4 relu conv4:1 relu pool conv5:1 relu conv6:1 add:4 relu "
                "conv7:1 relu pool conv8:1 relu conv9:1 add:4 relu mean fc1",
}
TYPES = {"F32": numpy.float32, "F64": numpy.float64, "F16": numpy.float16, "I64": numpy.int64, "I32": numpy.int32,
         "U8": numpy.uint8}


def fail(message, status=1):
    print(f"compare_pytorch.py: {message}", file=sys.stderr)
    sys.exit(status)


def read_safetensors(path):
    """The tensors of a file by their names."""
    raw = pathlib.Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, of in json.loads(raw[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = of["data_offsets"]
            values = numpy.frombuffer(raw[8 + length + begin:8 + length + end], TYPES[of["dtype"]])
            tensors[name] = torch.from_numpy(values.reshape(of["shape"]).copy())
    return tensors


def options_of(path):
    """The options that a file was made with, which are in its metadata."""
    raw = pathlib.Path(path).read_bytes()
    about = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["fdsl-bench"]
    return dict(word.split("=", 1) for word in about.split())


def part(tensors, prefix):
    return {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def run(arguments, **more):
    command = [PROGRAM] + arguments
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **more)
    if done.returncode:
        fail(f"'{' '.join(command)}' ended with status {done.returncode}")
    return done.stdout


class Net(torch.nn.Module):
    """A model of ours in PyTorch, over given parameters."""

    def __init__(self, model, parameters):
        super().__init__()
        self.layers = [tuple((layer + ":0").split(":")[:2]) for layer in MODELS[model].split()]
        self.tensors = torch.nn.ParameterDict(
            {name.replace(".", "_"): torch.nn.Parameter(tensor.clone()) for name, tensor in parameters.items()})

    def named(self):
        """The parameters under our names."""
        return {"_".join(name.split("_")[:-1]) + "." + name.split("_")[-1]: tensor
                for name, tensor in self.tensors.items()}

    def forward(self, values, factors=None):
        outputs = []
        for name, detail in self.layers:
            weight = self.tensors[name + "_weight"] if name[:2] in ("co", "fc") else None
            if name.startswith("conv"):
                conv = functional.conv2d if weight.dim() == 4 else functional.conv3d
                values = conv(values, weight, self.tensors[name + "_bias"], padding=int(detail))
            elif name == "relu":
                values = functional.relu(values)
            elif name == "pool":
                values = (functional.max_pool2d if values.dim() == 4 else functional.max_pool3d)(values, 2)
            elif name.startswith("dropout"):
                values = (values * factors[name].reshape(values.shape) if factors else
                          functional.dropout(values, float(detail), self.training))
            elif name == "add":
                values = values + outputs[-int(detail)]
            elif name == "mean":
                values = values.flatten(2).mean(2)
            else:
                values = functional.linear(values.flatten(1), weight, self.tensors[name + "_bias"])
            outputs.append(values)
        return values


def optimizer_of(net, row):
    """torch.optim's of what a row says."""
    rate, decay = float(row["lr"]), float(row["weight_decay"])
    if row["optimizer"] == "sgd":
        return torch.optim.SGD(net.parameters(), rate, momentum=float(row["momentum"]), weight_decay=decay)
    kind = torch.optim.Adam if row["optimizer"] == "adam" else torch.optim.AdamW
    return kind(net.parameters(), rate, (float(row["beta1"]), float(row["beta2"])), float(row["epsilon"]), decay)


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


# ---- One step ----

def worst(mine, theirs):
    """The largest distance of a tensor from ours, over its norm; and which it is."""
    distances = []
    for name, tensor in theirs.items():
        norm = tensor.double().norm().item()
        off = (mine[name].double() - tensor.double()).norm().item()
        distances.append((off / norm if norm else off, name))
    return max(distances, key=lambda distance: (math.isnan(distance[0]), distance[0]))


def check_step(variant, model, arguments, device):
    """Compares one step; returns whether all is within bounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step.safetensors"
        row = rows_of(run(["--variant", variant, "--model", model, "--epochs", "1", "--format", "csv",
                           "--export-step", path] + arguments))[0]
        step = {name: tensor.to(device) for name, tensor in read_safetensors(path).items()}
    before, after, gradients = (part(step, prefix) for prefix in ("before.", "after.", "gradient."))
    net = Net(model, before).to(device)
    optimizer = optimizer_of(net, row)
    loss = functional.cross_entropy(net(step["inputs"], part(step, "factor.")), step["labels"],
                                    label_smoothing=float(row["label_smoothing"]))
    loss.backward()
    off, tensor = worst({name: parameter.grad for name, parameter in net.named().items()}, gradients)
    optimizer.step()
    # Of the way that the step went: Adam's is the rate, whatever the gradient.
    step_off, step_tensor = worst({name: parameter.detach() - before[name] for name, parameter in net.named().items()},
                                  {name: after[name] - before[name] for name in before})
    loss_off = abs(loss.item() - step["loss"].item()) / max(step["loss"].item(), 1e-30)
    fine = loss_off <= TOLERANCE and off <= TOLERANCE and step_off <= STEP_TOLERANCE
    print(f"{variant:12} {model:7} {row['optimizer']:6} loss {loss_off:8.1e}  gradients {off:8.1e} ({tensor})  "
          f"step {step_off:8.1e} ({step_tensor})  {'ok' if fine else 'DIFFERS'}")
    return fine


def check_gradients(variants, arguments, device):
    fine = True
    cases = [("logreg", []), ("lenet", ["--label-smoothing", "0.1"]), ("cnn", ["--shift", "2"]),
             ("cnn3d", ["--data", "clips"]),
             # Few and small: of millions of values one is within rounding of zero, and its gradient goes or stays.
             ("cnn-fdsl", ["--data", "synth", "--res", "16", "--shift", "2", "--batch", "7", "--train-size", "7"])]
    optimizers = [["--optimizer", "sgd", "--weight-decay", "0.01"], ["--optimizer", "adam", "--weight-decay", "0.01"],
                  ["--optimizer", "adamw", "--weight-decay", "0.01"]]
    for variant in variants.split(","):
        for model, more in cases:
            for optimizer in optimizers:
                # A step needs a batch, and an epoch no more than that.
                fine &= check_step(variant, model, ["--batch", "33", "--train-size", "33", "--test-size", "10"]
                                   + more + optimizer + arguments, device)
    return 0 if fine else 1


# ---- Epochs ----

def loader_of(data, batch, device, workers):
    """A DataLoader whose worker processes have begun and stay for all epochs; None without workers."""
    if workers == 0:
        return None
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data["train.values"], data["train.labels"]), batch_size=batch, shuffle=True,
        num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=True)
    for _ in loader:
        pass
    return loader


def batches(data, batch, device, loader):
    """The shuffled batches of an epoch: of data that is where it is needed, or of a DataLoader."""
    if loader is None:
        order = torch.randperm(len(data["train.labels"]), device=data["train.labels"].device)
        for picks in order.split(batch):
            yield data["train.values"][picks], data["train.labels"][picks]
        return
    for values, labels in loader:
        yield values.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Training:
    def __init__(self, row, data, before, device, workers):
        self.row, self.device = row, device
        place = device if workers == 0 else torch.device("cpu")
        self.data = {name: tensor.to(place) for name, tensor in data.items()}
        self.scale, self.offset = data["scale"].to(device), data["offset"].to(device)
        self.net = Net(row["model"], {name: tensor.to(device) for name, tensor in before.items()})
        self.optimizer = optimizer_of(self.net, row)
        self.batch, self.trained_s, self.reached = int(row["batch"]), 0.0, {}
        self.loader = loader_of(self.data, self.batch, device, workers)

    def normalised(self, values):
        shape = [1, -1] + [1] * (values.dim() - 2)
        return values.float() * self.scale.reshape(shape) + self.offset.reshape(shape)

    def epoch(self):
        """One epoch: its seconds, mean loss and share of right answers while it went."""
        self.net.train()
        count = len(self.data["train.labels"])
        loss_sum = torch.zeros((), device=self.device)
        right = torch.zeros((), device=self.device)
        synchronise(self.device)
        begin = time.perf_counter()
        for values, labels in batches(self.data, self.batch, self.device, self.loader):
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.net(self.normalised(values))
            loss = functional.cross_entropy(logits, labels, label_smoothing=float(self.row["label_smoothing"]))
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            right += (logits.argmax(1) == labels).sum()
        synchronise(self.device)
        elapsed = time.perf_counter() - begin
        self.trained_s += elapsed
        return elapsed, loss_sum.item() / count, right.item() / count

    @torch.no_grad()
    def test(self):
        self.net.eval()
        loss = right = 0.0
        for values, labels in zip(self.data["test.values"].split(1000), self.data["test.labels"].split(1000)):
            values, labels = values.to(self.device), labels.to(self.device)
            logits = self.net(self.normalised(values))
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
        count = len(self.data["test.labels"])
        return loss / count, right / count


def torch_row(training, ours, number, threads):
    """A row of PyTorch in our columns, over one of ours for the same epoch."""
    elapsed, loss, accuracy = training.epoch()
    test_loss, test_accuracy = training.test()
    for share in (98, 99):
        if test_accuracy >= share / 100:
            training.reached.setdefault(share, training.trained_s)
    row, device, items = dict(ours), training.device, float(ours["items"])
    cuda = device.type == "cuda"
    row.update({
        "variant": f"torch-{device.type}", "revision": f"torch {torch.__version__}", "warmups": "0", "samples": "1",
        "device": torch.cuda.get_device_name(device) if cuda else ours["device"],
        "cuda": (torch.version.cuda or "") if cuda else "", "threads": str(threads), "timed": "forward+backward+update",
        "items_per_s": f"{items / elapsed:.9g}", "bytes_per_s": f"{float(ours['bytes_per_s']) * float(ours['wall_s']) / elapsed:.9g}",
        "roofline_share": "", "epoch": str(number), "loss": f"{loss:.9g}", "train_acc": f"{accuracy:.6g}",
        "test_loss": f"{test_loss:.9g}", "test_acc": f"{test_accuracy:.6g}", "trained_s": f"{training.trained_s:.9g}",
        "data_share": "", "throttled": "", "verified": "no", "wrong": "",
        "generate_share": "", "generated_per_s": "", "opening_s": "",
        "memory_bytes": str(torch.cuda.max_memory_allocated(device)) if cuda else "",
        "to_98_s": f"{training.reached[98]:.9g}" if 98 in training.reached else "",
        "to_99_s": f"{training.reached[99]:.9g}" if 99 in training.reached else "",
    })
    for column in ("time_min_s", "time_median_s", "time_mean_s", "time_p95_s", "time_p99_s", "wall_s"):
        row[column] = f"{elapsed:.9g}"
    return row


def append(path, rows):
    """Appends to a file that fdsl-bench has just written."""
    with open(path, "a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, rows[0].keys(), lineterminator="\n").writerows(rows)


def print_table(rows):
    print(f"{'variant':14} {'threads':>7} {'epoch':>5} {'seconds':>10} {'samples/s':>12} {'loss':>10} {'test_acc':>9}")
    for row in rows:
        print(f"{row['variant']:14} {row['threads']:>7} {row['epoch']:>5} {float(row['time_median_s']):10.3f} "
              f"{float(row['items_per_s']):12.1f} {float(row['loss'] or 'nan'):10.5f} {float(row['test_acc']):9.4f}")


def compare(options, arguments):
    device = torch.device(options.device)
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        first = options.variant.split(",")[0]
        more = ["--threads", str(threads)] + arguments
        run(["--variant", first, "--dry-run", "--export-data", f"{folder}/data"] + more)
        given = options_of(f"{folder}/data")
        if given["lr-schedule"] != "constant" or any(float(given.get(name) or 0) for name in ("lr-warmup", "shift", "flip")):
            fail("PyTorch is compared at a constant rate, without --shift and --flip", 2)
        data = read_safetensors(f"{folder}/data")
        out = ["--out", options.out] if options.out else []
        rows = rows_of(run(["--variant", options.variant, "--format", "csv"] + out + more))
    data["train.labels"], data["test.labels"] = data["train.labels"].long(), data["test.labels"].long()
    training = Training(rows[0], data, part(data, "initial."), device, options.workers)
    ours = [row for row in rows if row["variant"] == rows[0]["variant"]]
    theirs = [torch_row(training, row, number + 1, threads) for number, row in enumerate(ours)]
    if options.out:
        append(options.out, theirs)
    print_table(rows + theirs)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="train-naive", help="variants of fdsl-bench, the first of which has a row for each epoch")
    parser.add_argument("--gradients", action="store_true", help="compare one step instead")
    parser.add_argument("--device", default="cpu", help="PyTorch's: cpu or cuda")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of a DataLoader; 0: data lie on the device")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of both")
    parser.add_argument("--out", help="CSV file to append all rows to")
    options, arguments = parser.parse_known_args()
    if options.gradients:
        return check_gradients(options.variant, arguments, torch.device(options.device))
    return compare(options, arguments)


if __name__ == "__main__":
    sys.exit(main())
