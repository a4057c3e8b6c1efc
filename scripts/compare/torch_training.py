"""Trains a network of fdsl-bench in PyTorch, from typical user code to the fastest configuration.

Training modes, by the names in MODES:

  loader    eager, with a DataLoader's worker processes
  resident  eager, with all samples on the device as bytes; samples are shuffled and normalised there
  graph     like resident, but in bf16 (autocast), channels-last, with cuDNN's fastest algorithms and a fused optimizer; one
            CUDA graph contains all steps of an epoch
  best      like graph, but torch.compile compiles forward, backward and optimizer: half a minute of set-up
  autotuned like best, but torch.compile also tunes kernels (max-autotune): a minute or more of set-up

The first two use PyTorch's defaults. On a CPU, best and autotuned compile, but use no graph and no bf16.

On several ranks, DistributedDataParallel (DDP) adds up the gradients. The batch is the global batch (samples per step).
Each step's samples are divided among the ranks without overlap. The order of the samples does not depend on the number of ranks.
"""

import contextlib
import json
import math
import pathlib
import time

import numpy
import torch
from torch.nn import functional

MODES = ("loader", "resident", "graph", "best", "autotuned")
PRECISIONS = ("fp32", "tf32", "bf16")
# Modes of torch.compile, without its CUDA graphs, because one graph already contains the whole epoch.
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
    "cnn-deep": "conv1:1 relu pool " + "".join(f"conv{i}:1 relu conv{i + 1}:1 add:4 relu " for i in range(2, 18, 2)) + "mean fc1",
    "vit-micro": "",  # see network_of()
}
TYPES = {"F32": numpy.float32, "F64": numpy.float64, "F16": numpy.float16, "I64": numpy.int64, "I32": numpy.int32,
         "U8": numpy.uint8}
DDP_WARMUPS = 11  # PyTorch requires this many steps of DDP before capturing, because the first ones measure time and reorder buckets


def read_safetensors(path):
    """Returns the tensors of a safetensors file as {name: tensor}."""
    raw = pathlib.Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, of in json.loads(raw[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = of["data_offsets"]
            values = numpy.frombuffer(raw[8 + length + begin:8 + length + end], TYPES[of["dtype"]])
            tensors[name] = torch.from_numpy(values.reshape(of["shape"]).copy())
    return tensors


def read_data(path):
    """Returns the samples and initial parameters that fdsl-bench exported with --export-data."""
    data = read_safetensors(path)
    data["train.labels"], data["test.labels"] = data["train.labels"].long(), data["test.labels"].long()
    return data


def part(tensors, prefix):
    return {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def worst(mine, theirs):
    """Returns the largest relative distance between a tensor of one program and the same tensor of the other, and the
    tensor's name."""
    distances = []
    for name, tensor in theirs.items():
        norm, off = tensor.double().norm().item(), (mine[name].double() - tensor.double()).norm().item()
        distances.append((off / norm if norm else off, name))
    return max(distances, key=lambda distance: (math.isnan(distance[0]), distance[0]))


def step_errors(parameters, loss, step, update, chosen=lambda name, values: values):
    """Compares a step of PyTorch with a step that fdsl-bench exported. update() updates `parameters` ({name: parameter}) by their
    gradients. Returns the relative error of the loss, and the largest ones of gradients and of updates, each with its tensor.
    Of updates, chosen(name, values) are compared. They are relative to the update, because Adam's update has about the size of
    the learning rate for any gradient."""
    loss.backward()
    gradients = worst({name: parameter.grad for name, parameter in parameters.items()}, part(step, "gradient."))
    update()
    before, after = part(step, "before."), part(step, "after.")
    updates = worst({name: chosen(name, parameter.detach() - before[name]) for name, parameter in parameters.items()},
                    {name: chosen(name, after[name] - before[name]) for name in before})
    return abs(loss.item() - step["loss"].item()) / max(step["loss"].item(), 1e-30), gradients, updates


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
            permuted = weight.reshape(len(weight), channels, -1).transpose(1, 2).reshape(weight.shape)
            parameters = {**parameters, "fc1.weight": permuted}
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


def network_of(model, parameters, channels_last=False):
    """Returns the network of a model, with given parameters. Transformers have the parameters of timm's networks."""
    if not model.startswith("vit-"):
        return Net(model, parameters, channels_last)
    import vit_timm  # it imports this module
    shape = dict(zip(vit_timm.SHAPE, vit_timm.MODELS[model][0]))
    net = vit_timm.Vit(**shape, num_classes=len(parameters["head.bias"])).to(parameters["head.bias"].device)
    net.load_state_dict(parameters)
    return net


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


class Shared(torch.nn.Module):
    """The module that DDP wraps: a network, and the function that computes a step's loss with it."""

    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, *inputs):
        return self.function(*inputs)


class Ranks:
    """This rank and the number of ranks. With several ranks, torch.distributed is initialised, and all methods but part() are
    collective."""

    def __init__(self, rank=0, count=1):
        self.rank, self.count = rank, count

    def part(self, first, count):
        """Returns the begin and end of this rank's part of `count` samples. Parts differ by at most one sample."""
        return first + count * self.rank // self.count, first + count * (self.rank + 1) // self.count

    def share(self, net, function, device, **more):
        """Returns `function`, wrapped such that backward() adds up the gradients of all ranks."""
        if self.count == 1:
            return function
        ddp = torch.nn.parallel.DistributedDataParallel(Shared(net, function),
                                                        [device.index] if device.type == "cuda" else None, **more)
        # At every 100th step, DDP would measure itself and wait for the GPU, which is not allowed during a capture.
        ddp._set_ddp_runtime_logging_sample_rate(2**30)
        return ddp

    def barrier(self):
        if self.count > 1:
            torch.distributed.barrier()

    def combined(self, tensor, largest=False):
        """Returns the sums, or the largest values, over all ranks."""
        if self.count > 1:
            tensor = tensor.clone()
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM)
        return tensor

    def check_same(self, net):
        """Raises an error if the parameters of two ranks differ."""
        if self.count == 1:
            return
        mine = torch.cat([tensor.detach().flatten() for tensor in net.parameters()])
        first = mine.clone()
        torch.distributed.broadcast(first, 0)
        if self.combined((mine != first).any().float(), True).item():
            raise RuntimeError("the parameters of the ranks differ after training")


class Training:
    """Base class of the modes. epoch_sums() of a subclass runs an epoch. It returns two tensors: the sum of the losses, and the
    number of correct answers."""

    def __init__(self, row, data, before, device, precision, ranks, channels_last=False):
        self.row, self.device, self.precision, self.ranks = row, device, precision, ranks
        self.smoothing = float(row["label_smoothing"])
        self.data, self.count = data, len(data["train.labels"])
        # One entry per step: begin and end of this rank's part in the order of the epoch, and the number of samples of the step
        # on all ranks.
        batch = int(row["batch"])
        wholes = [(first, min(batch, self.count - first)) for first in range(0, self.count, batch)]
        self.steps = [(*ranks.part(first, whole), whole) for first, whole in wholes]
        self.scale, self.offset = data["scale"].to(device), data["offset"].to(device)
        self.net = network_of(row["model"], {name: tensor.to(device) for name, tensor in before.items()}, channels_last)
        self.trained_s, self.reached, self.setup_s = 0.0, {}, 0.0
        torch.backends.cuda.matmul.allow_tf32 = precision in ("tf32", "bf16")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"  # PyTorch's default allows TF32 in cuDNN only
        torch.backends.cudnn.benchmark = False
        # All ranks draw the same order, and each rank its own dropout masks.
        torch.manual_seed((int(row["seed"]) + ranks.rank) % 2**63)
        self.shuffler = torch.Generator(device)
        self.restart_order()

    def restart_order(self):
        self.shuffler.manual_seed((int(self.row["seed"]) + 2**31) % 2**63)

    def normalised(self, values):
        shape = [1, -1] + [1] * (values.dim() - 2)
        return values.float() * self.scale.reshape(shape) + self.offset.reshape(shape)

    def forward(self, values, labels, whole):
        """Returns the loss and the number of correct answers. DDP averages the gradients of the ranks. The loss is therefore scaled:
        the average must be the gradient of the mean loss over the `whole` samples of all ranks."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext():
            logits = self.net(self.normalised(values))
        if len(labels) * self.ranks.count == whole:
            loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        else:  # parts of different sizes, of which some may be empty
            loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing, reduction="sum")
            loss = loss * (self.ranks.count / whole)
        return loss, (logits.argmax(1) == labels).sum()

    def epoch(self):
        """Runs one epoch; returns its seconds on the slowest rank, and the mean loss and training accuracy of all ranks."""
        self.net.train()
        self.ranks.barrier()
        synchronise(self.device)
        begin = time.perf_counter()
        loss_sum, right = self.epoch_sums()
        synchronise(self.device)
        elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=self.device)
        elapsed = self.ranks.combined(elapsed, True).item()
        self.trained_s += elapsed
        return elapsed, self.ranks.combined(loss_sum).item() / self.count, self.ranks.combined(right).item() / self.count

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


class Parts:
    """Yields the numbers of the samples of this rank's part of each step. Empty parts are left out, because a DataLoader cannot
    load them."""

    def __init__(self, training):
        self.training = training

    def __len__(self):
        return sum(end > begin for begin, end, _ in self.training.steps)

    def __iter__(self):
        order = torch.randperm(self.training.count, generator=self.training.shuffler)
        for begin, end, _ in self.training.steps:
            if end > begin:
                yield order[begin:end].tolist()


class Eager(Training):
    """Eager mode. Samples come from a DataLoader with `workers` processes; if `workers` is 0, they are on the device."""

    def __init__(self, row, data, before, device, precision, ranks, workers):
        if workers == 0:
            data = {name: tensor.to(device) for name, tensor in data.items()}
        super().__init__(row, data, before, device, precision, ranks)
        self.run = ranks.share(self.net, self.forward, device)
        self.optimizer = optimizer_of(self.net, row)
        self.loader = self.loader_of(workers) if workers else None

    def loader_of(self, workers):
        """Returns a DataLoader whose worker processes are running and persist over all epochs."""
        self.shuffler = torch.Generator()  # the loader draws the order on the CPU
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(self.data["train.values"], self.data["train.labels"]), batch_sampler=Parts(self),
            num_workers=workers, pin_memory=self.device.type == "cuda", persistent_workers=True)
        for _ in loader:
            pass
        self.restart_order()
        return loader

    def batches(self):
        """Yields this rank's parts of the shuffled batches of an epoch, on the device, and the size of the whole batch."""
        values, labels = self.data["train.values"], self.data["train.labels"]
        if self.loader is None:
            order = torch.randperm(self.count, device=self.device, generator=self.shuffler)
            for begin, end, whole in self.steps:
                yield values[order[begin:end]], labels[order[begin:end]], whole
            return
        loaded = iter(self.loader)
        for begin, end, whole in self.steps:
            values, labels = next(loaded) if end > begin else (values[:0], labels[:0])
            yield values.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True), whole

    def epoch_sums(self):
        loss_sum = torch.zeros((), device=self.device)
        right_sum = torch.zeros((), device=self.device)
        for values, labels, whole in self.batches():
            self.optimizer.zero_grad(set_to_none=True)
            loss, right = self.run(values, labels, whole)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * (whole / self.ranks.count)
            right_sum += right
        return loss_sum, right_sum


class Replayed(Training):
    """All steps of an epoch in one CUDA graph; on a CPU, without a graph. `effort`: a mode of torch.compile (EFFORTS), or None
    to compile nothing."""

    def __init__(self, row, data, before, device, precision, ranks, effort):
        super().__init__(row, {name: tensor.to(device) for name, tensor in data.items()}, before, device, precision, ranks, True)
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
        self.sizes = torch.tensor([whole / ranks.count for _, _, whole in self.steps], device=device)
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

    def picked_forward(self, picks, whole):
        values = self.values.index_select(0, picks).movedim(-1, 1)
        return self.forward(values, self.data["train.labels"].index_select(0, picks), whole)

    def any_forward(self, picks, whole):
        return (self.whole_forward if whole == self.steps[0][2] else self.picked_forward)(picks, whole)

    def step(self, begin, end, whole):
        self.optimizer.zero_grad(set_to_none=True)
        loss, right = self.run(self.order[begin:end], whole)
        loss.backward()
        self.update()
        return loss.detach(), right

    def all_steps(self):
        losses, rights = zip(*[self.step(*step) for step in self.steps])
        return torch.dot(torch.stack(losses), self.sizes.float()), torch.stack(rights).sum()

    def warm_up(self):
        """Runs steps of both batch sizes, so that compiling and tuning of algorithms happen now."""
        # The gradients are views of DDP's buckets, which saves copies.
        self.run = self.ranks.share(self.net, self.any_forward, self.device, gradient_as_bucket_view=True)
        torch.arange(self.count, out=self.order)
        if self.ranks.count > 1:  # kernels are compiled and tuned while no exchange waits on the GPU
            with self.run.no_sync():
                self.step(*self.steps[0])
            self.ranks.barrier()
        for step in [self.steps[0]] * (3 if self.ranks.count == 1 else DDP_WARMUPS) + [self.steps[-1]]:
            self.step(*step)

    def captured(self):
        side = torch.cuda.Stream()  # PyTorch requires a warm-up on a side stream before capturing; DDP must begin there, too
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # With DDP, the stream must be that of the warm-up, and NCCL's thread may use CUDA during the capture.
        more = {} if self.ranks.count == 1 else {"stream": side, "capture_error_mode": "thread_local"}
        self.ranks.barrier()
        synchronise(self.device)
        with torch.cuda.graph(graph, **more):
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
        torch.randperm(self.count, out=self.order, generator=self.shuffler)
        if self.graph is None:
            return self.all_steps()
        self.graph.replay()
        return self.sums


def training_of(mode, row, data, device, precision, workers, ranks=Ranks()):
    """Returns a training run that is ready for its first epoch. If `precision` is None, uses PyTorch's default precision, or bf16
    with a CUDA graph. `workers` applies only to mode loader."""
    before = part(data, "initial.")
    synchronise(device)
    begin = time.perf_counter()
    if mode in ("loader", "resident"):
        training = Eager(row, data, before, device, precision, ranks, workers if mode == "loader" else 0)
    else:
        training = Replayed(row, data, before, device, precision or ("bf16" if device.type == "cuda" else "fp32"), ranks,
                            EFFORTS.get(mode))
    synchronise(device)
    training.setup_s = time.perf_counter() - begin
    return training


def trained(training, epochs):
    """Trains and tests. Returns the set-up time, the precision, the GPU memory, and the measurements of each epoch, all as values
    for JSON."""
    measured = []
    for _ in range(epochs):
        elapsed, loss, accuracy = training.epoch()
        test_loss, test_accuracy = training.test()
        measured.append({"elapsed": elapsed, "loss": loss, "accuracy": accuracy, "test_loss": test_loss,
                         "test_accuracy": test_accuracy, "trained_s": training.trained_s, "to_98_s": training.reached.get(98),
                         "to_99_s": training.reached.get(99)})
    training.ranks.check_same(training.net)
    memory = torch.cuda.max_memory_allocated(training.device) if training.device.type == "cuda" else 0
    about = torch.tensor([training.setup_s, memory], dtype=torch.float64, device=training.device)
    return {"setup_s": training.ranks.combined(about, True)[0].item(), "precision": training.precision,
            "memory_bytes": int(training.ranks.combined(about)[1].item()), "epochs": measured}
