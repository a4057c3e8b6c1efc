"""Trains a network of fdsl-bench in PyTorch, from typical user code to the fastest configuration.

Training modes, by the names in MODES:

  loader    eager, with a DataLoader's worker processes
  resident  eager, with all samples on the device as bytes; samples are shuffled and normalised there
  graph     as resident, but in bf16 (autocast), channels-last, with cuDNN's fastest algorithms and a fused optimizer; one
            CUDA graph has all steps of an epoch
  best      as graph, but torch.compile compiles forward, backward and optimizer: half a minute of set-up
  autotuned as best, but torch.compile also tunes kernels (max-autotune): a minute or more of set-up

The first two use PyTorch's defaults. On a CPU, best and autotuned compile, but use no graph and no bf16.
"""

import contextlib
import time

import numpy  # noqa: F401  torch needs it to read tensors
import torch
from torch.nn import functional

MODES = ("loader", "resident", "graph", "best", "autotuned")
PRECISIONS = ("fp32", "tf32", "bf16")
# Modes of torch.compile, without its CUDA graphs, because one graph already has the whole epoch.
EFFORTS = {"best": "default", "autotuned": "max-autotune-no-cudagraphs"}
# The layers of src/train/model.c by name. After a colon: the padding, the dropout rate, or the distance in
# layers to the other input of an addition.
MODELS = {
    "logreg": "fc1",
    "lenet": "conv1:2 relu pool conv2 relu pool fc1 relu fc2 relu fc3",
    "cnn": "conv1 relu conv2 relu pool dropout1:0.25 fc1 relu dropout2:0.5 fc2",
    "cnn3d": "conv1:1 relu pool conv2:1 relu pool fc1 relu dropout1:0.5 fc2",
    "cnn-fdsl": "conv1:1 relu pool conv2:1 relu conv3:1 add:4 relu conv4:1 relu pool conv5:1 relu conv6:1 add:4 relu "
                "conv7:1 relu pool conv8:1 relu conv9:1 add:4 relu mean fc1",
}


class Net(torch.nn.Module):
    """A model of fdsl-bench in PyTorch, with given parameters."""

    def __init__(self, model, parameters, channels_last=False):
        """With `channels_last`, tensors stay in that layout when they are flattened, and the columns of the next linear layer's
        weights are permuted to match. The network is the same, but needs no transpositions."""
        super().__init__()
        self.layers = [tuple((layer + ":0").split(":")[:2]) for layer in MODELS[model].split()]
        convs = [tensor for name, tensor in parameters.items() if name.startswith("conv") and tensor.dim() > 1]
        self.channels_last = channels_last and bool(convs)
        if self.channels_last:
            weight, channels = parameters["fc1.weight"], len(convs[-1])
            turned = weight.reshape(len(weight), channels, -1).transpose(1, 2).reshape(weight.shape)
            parameters = {**parameters, "fc1.weight": turned}
        self.tensors = torch.nn.ParameterDict(
            {name.replace(".", "_"): torch.nn.Parameter(tensor.clone()) for name, tensor in parameters.items()})

    def named(self):
        """Returns the parameters under the names of fdsl-bench."""
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
                if self.channels_last and values.dim() > 2:
                    values = values.movedim(1, -1)
                values = functional.linear(values.flatten(1), weight, self.tensors[name + "_bias"])
            outputs.append(values)
        return values


def optimizer_of(net, row, **more):
    """Returns the optimizer of torch.optim that a row's options describe."""
    rate, decay = float(row["lr"]), float(row["weight_decay"])
    if row["optimizer"] == "sgd":
        more.pop("capturable", None)  # SGD counts no steps and has no such argument
        return torch.optim.SGD(net.parameters(), rate, momentum=float(row["momentum"]), weight_decay=decay, **more)
    kind = torch.optim.Adam if row["optimizer"] == "adam" else torch.optim.AdamW
    return kind(net.parameters(), rate, (float(row["beta1"]), float(row["beta2"])), float(row["epsilon"]), decay, **more)


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Training:
    """Base class of the modes. epoch_sums() of a subclass runs an epoch. It returns two tensors: the sum of the losses, and the
    number of correct answers."""

    def __init__(self, row, data, before, device, precision, channels_last=False):
        self.row, self.device, self.precision = row, device, precision
        self.batch, self.smoothing = int(row["batch"]), float(row["label_smoothing"])
        self.data, self.count = data, len(data["train.labels"])
        self.scale, self.offset = data["scale"].to(device), data["offset"].to(device)
        self.net = Net(row["model"], {name: tensor.to(device) for name, tensor in before.items()}, channels_last)
        self.trained_s, self.reached, self.setup_s = 0.0, {}, 0.0
        torch.backends.cuda.matmul.allow_tf32 = precision in ("tf32", "bf16")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"  # PyTorch's default allows TF32 in cuDNN only
        torch.backends.cudnn.benchmark = False
        torch.manual_seed(int(row["seed"]))

    def normalised(self, values):
        shape = [1, -1] + [1] * (values.dim() - 2)
        return values.float() * self.scale.reshape(shape) + self.offset.reshape(shape)

    def forward(self, values, labels):
        """Returns the mean loss of a batch and the number of correct answers."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext():
            logits = self.net(self.normalised(values))
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        return loss, (logits.argmax(1) == labels).sum()

    def epoch(self):
        """Runs one epoch; returns its seconds, mean loss and training accuracy."""
        self.net.train()
        synchronise(self.device)
        begin = time.perf_counter()
        loss_sum, right = self.epoch_sums()
        synchronise(self.device)
        elapsed = time.perf_counter() - begin
        self.trained_s += elapsed
        return elapsed, loss_sum.item() / self.count, right.item() / self.count

    @torch.no_grad()
    def test(self):
        """Returns the mean loss and the accuracy on the test set, in fp32."""
        self.net.eval()
        loss = right = 0.0
        for values, labels in zip(self.data["test.values"].split(1000), self.data["test.labels"].split(1000)):
            values, labels = values.to(self.device), labels.to(self.device)
            logits = self.net(self.normalised(values))
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
        count = len(self.data["test.labels"])
        accuracy = right / count
        for share in (98, 99):
            if accuracy >= share / 100:
                self.reached.setdefault(share, self.trained_s)
        return loss / count, accuracy


class Eager(Training):
    """Eager mode. Samples come from a DataLoader with `workers` processes; if `workers` is 0, they are on the device."""

    def __init__(self, row, data, before, device, precision, workers):
        if workers == 0:
            data = {name: tensor.to(device) for name, tensor in data.items()}
        super().__init__(row, data, before, device, precision)
        self.optimizer = optimizer_of(self.net, row)
        self.loader = self.loader_of(workers) if workers else None

    def loader_of(self, workers):
        """Returns a DataLoader whose worker processes are running and persist over all epochs."""
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(self.data["train.values"], self.data["train.labels"]), batch_size=self.batch,
            shuffle=True, num_workers=workers, pin_memory=self.device.type == "cuda", persistent_workers=True)
        for _ in loader:
            pass
        return loader

    def batches(self):
        """Yields the shuffled batches of an epoch, on the device."""
        if self.loader is None:
            for picks in torch.randperm(self.count, device=self.device).split(self.batch):
                yield self.data["train.values"][picks], self.data["train.labels"][picks]
            return
        for values, labels in self.loader:
            yield values.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def epoch_sums(self):
        loss_sum = torch.zeros((), device=self.device)
        right_sum = torch.zeros((), device=self.device)
        for values, labels in self.batches():
            self.optimizer.zero_grad(set_to_none=True)
            loss, right = self.forward(values, labels)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            right_sum += right
        return loss_sum, right_sum


class Replayed(Training):
    """All steps of an epoch in one CUDA graph; on a CPU, without a graph. `effort`: a mode of torch.compile (EFFORTS), or None
    to compile nothing."""

    def __init__(self, row, data, before, device, precision, effort):
        super().__init__(row, {name: tensor.to(device) for name, tensor in data.items()}, before, device, precision, True)
        cuda = device.type == "cuda"
        self.net.to(memory_format=torch.channels_last_3d if data["train.values"].dim() == 5 else torch.channels_last)
        # contiguous() forces the layout, which is ambiguous for a single channel.
        self.values = self.data["train.values"].movedim(1, -1).contiguous()
        self.initial = [tensor.detach().clone() for tensor in self.net.parameters()]
        # PyTorch's fused Adam uses too few blocks for so few parameters; the compiled foreach version fills the GPU.
        self.optimizer = optimizer_of(self.net, row, **({"capturable": True} if cuda else {}),
                                      **({"foreach": True} if effort else {"fused": True} if cuda else {}))
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0  # 0: try all algorithms
        # A partial last batch is not compiled, because that would double the set-up for one step per epoch.
        self.whole_forward, self.update = self.compiled(effort) if effort else (self.picked_forward, self.optimizer.step)
        self.order = torch.empty(self.count, dtype=torch.int64, device=device)
        self.firsts = range(0, self.count, self.batch)
        self.sizes = torch.tensor([min(self.batch, self.count - first) for first in self.firsts], device=device)
        self.net.train()
        self.graph = self.captured() if cuda else None
        if not cuda:
            self.warm_up()
        self.start_over()

    def compiled(self, effort):
        import torch._inductor.config  # missing in some builds of PyTorch
        torch._inductor.config.autotune_num_choices_displayed = 0
        return [torch.compile(function, mode=effort, dynamic=False)
                for function in (self.picked_forward, self.optimizer.step)]

    def picked_forward(self, picks):
        values = self.values.index_select(0, picks).movedim(-1, 1)
        return self.forward(values, self.data["train.labels"].index_select(0, picks))

    def step(self, first):
        picks = self.order[first:first + self.batch]
        self.optimizer.zero_grad(set_to_none=True)
        loss, right = (self.whole_forward if len(picks) == self.batch else self.picked_forward)(picks)
        loss.backward()
        self.update()
        return loss.detach(), right

    def all_steps(self):
        losses, rights = zip(*[self.step(first) for first in self.firsts])
        return torch.dot(torch.stack(losses), self.sizes.float()), torch.stack(rights).sum()

    def warm_up(self):
        """Runs steps of both batch sizes, so that compiling and tuning of algorithms happen now."""
        torch.arange(self.count, out=self.order)
        for first in (self.firsts[0], self.firsts[0], self.firsts[0], self.firsts[-1]):
            self.step(first)

    def captured(self):
        side = torch.cuda.Stream()  # PyTorch requires a warm-up on a side stream before capturing
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.sums = self.all_steps()
        return graph

    @torch.no_grad()
    def start_over(self):
        """Resets parameters and optimizer state in place, because the graph refers to these tensors."""
        for tensor, initial in zip(self.net.parameters(), self.initial):
            tensor.copy_(initial)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                if torch.is_tensor(tensor):
                    tensor.zero_()

    def epoch_sums(self):
        torch.randperm(self.count, out=self.order)
        if self.graph is None:
            return self.all_steps()
        self.graph.replay()
        return self.sums


def training_of(mode, row, data, before, device, precision, workers):
    """Returns a training that is ready for its first epoch. If `precision` is None, uses PyTorch's default precision, or bf16
    with a CUDA graph. `workers` applies only to mode loader."""
    synchronise(device)
    begin = time.perf_counter()
    if mode in ("loader", "resident"):
        training = Eager(row, data, before, device, precision, workers if mode == "loader" else 0)
    else:
        training = Replayed(row, data, before, device, precision or ("bf16" if device.type == "cuda" else "fp32"),
                            EFFORTS.get(mode))
    synchronise(device)
    training.setup_s = time.perf_counter() - begin
    return training
