"""The training loop of scripts/compare/pretrain.py: the recipe, model, optimizer, timing and evaluation.

The published recipe is applied on the training device, the same for every source of images: RandAugment, random erasing, MixUp,
CutMix, label smoothing, and the learning rate. All random choices are drawn on the host, from a generator that depends only on (seed, rank, step). The noise of random erasing is
drawn on the device, from a generator that depends on (seed, rank) and on the earlier steps. The same sequence of images
therefore gives the same inputs of the network. No function here waits for the GPU: each step copies small tensors of choices
from pinned memory.
"""

import collections
import contextlib
import dataclasses
import difflib
import gc
import math
import os
import pickle
import random
import time

import torch
import torch.distributed.nn.functional  # before a process group exists, because its default arguments would keep the group alive
from pretrain_order import cut_box, mix_of
from pretrain_rows import CURVE_COLUMNS, STEP_COLUMNS, Refused, append, curve_row, identity, progress, step_row
from pretrain_sources import HELD_OUT_INSTANCE, batches_of, held_out, threads_of, to
from torch import distributed
from torch.nn import functional

# ---- The recipe ----

OPERATIONS, MAGNITUDE = 2, 28 / 30  # magnitude 28 on torchvision's scale of 0 to 30
MIXUP, CUTMIX, ERASING = 0.8, 1.0, 0.25
MEAN, STD = 0.5, 0.5
LUMA = (0.299, 0.587, 0.114)


def learning_rate(step, options, total):
    """Returns the rate of a step: a linear warm-up, then steps, or a cosine to --min-lr at the step `total`; constant if `total` is
    None. With --warmup-lr, the rates are those of timm's schedulers that are updated in each step."""
    if step < options.lr_warmup and options.warmup_lr is not None:
        return options.warmup_lr + (options.lr - options.warmup_lr) * step / options.lr_warmup
    if step < options.lr_warmup:
        return options.lr * (step + 1) / options.lr_warmup
    if options.schedule == "step":
        return options.lr * options.decay_rate ** (step // options.decay_steps)
    if total is None:
        return options.lr
    first = 0 if options.lr_overlap else options.lr_warmup
    share = (step - first) / max(1, total - first)
    return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1, share)))


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
        inputs = self.normalised(images)
        if "erasing" in self.parts:
            inputs = self.erased(inputs, draw)
        inputs, targets = self.mixed(inputs, self.targets(labels), draw, step)
        return inputs.contiguous(memory_format=self.memory_format), targets

    @staticmethod
    def normalised(images):
        return ((images.float() / 255) - MEAN) / STD

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


# ---- The loop ----

CHECK_EVERY = 20  # steps between two checks of --seconds and --time-limit
# fdsl-bench's names of networks, and timm's
NETWORKS = {"vit-tiny": "deit_tiny_patch16_224", "vit-small": "deit_small_patch16_224", "vit-base": "deit_base_patch16_224",
            "vit-large": "vit_large_patch16_224"}
RUN_AHEAD = 3  # steps that the host may be ahead of the GPU


@dataclasses.dataclass
class Result:
    """The measurements of a run over all ranks. Only step_s was measured on this rank alone."""

    identity: dict  # pretrain_rows.identity()
    steps: int
    seconds: float
    step_s: list
    stall_share: float
    peak_memory_bytes: int
    loss: float
    top1: float


# ---- Ranks ----


class Ranks:
    """The rank of this process, and the number of ranks. Values of the host are exchanged over gloo, gradients on a GPU over NCCL."""

    def __init__(self, device):
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.count > 1:
            distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    def reduce(self, values, how="SUM"):
        """Returns the element-wise sum (or MAX) over all ranks. All ranks wait for each other."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            distributed.all_reduce(tensor, getattr(distributed.ReduceOp, how))
        return tensor.tolist()

    def leave(self):
        """Ends the threads of the process group. A thread that releases a tensor while the interpreter exits aborts the process.
        The destructor of the group ends the threads, so no reference to the group may be left."""
        if self.count > 1:
            gc.collect()  # DistributedDataParallel refers to the group, and is part of reference cycles
            distributed.destroy_process_group()


def device_of(options):
    """Returns this rank's device."""
    if options.device == "cpu":
        torch.set_num_threads(threads_of(options))
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    if not torch.cuda.is_available():
        raise Refused(f"PyTorch {torch.__version__} sees no GPU, or was built without CUDA; use --device cpu", 4)
    if index >= torch.cuda.device_count():
        raise Refused(f"local rank {index} has no GPU: PyTorch sees {torch.cuda.device_count()}; start fewer ranks", 4)
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")  # TF32 where autocast leaves fp32
    return torch.device("cuda", index)


# ---- Model ----


def model_of(options):
    """Returns the network, with initial weights that depend only on the seed."""
    import timm
    torch.manual_seed(options.seed)
    if options.tiny or options.model == "vit-micro":
        patch, width = (max(1, options.out_res // 4), 64) if options.tiny else (4, 32)
        return timm.models.vision_transformer.VisionTransformer(
            img_size=options.out_res, patch_size=patch, in_chans=options.channels, num_classes=options.classes,
            embed_dim=width, depth=2, num_heads=2, drop_path_rate=options.drop_path)
    known, name = timm.list_models(), NETWORKS.get(options.model, options.model)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise Refused(f"--model {options.model}: timm {timm.__version__} has no such model"
                      + (f"; did you mean {near[0]}?" if near else ""))
    size = timm.get_pretrained_cfg(name)
    keywords = {} if size and size.input_size[-1] == options.out_res else {"img_size": options.out_res}
    keywords.update({"drop_path_rate": options.drop_path} if options.drop_path else {})  # some models have no such argument
    try:
        return timm.create_model(name, num_classes=options.classes, in_chans=options.channels, **keywords)
    except (TypeError, AssertionError) as error:
        raise Refused(f"--model {options.model}: cannot be created with --out-res {options.out_res} and --drop-path "
                      f"{options.drop_path}: {str(error).splitlines()[0]}") from None


def optimizer_of(net, options, device):
    """Returns AdamW. With --decay-of matrices, the groups are those of timm's param_groups_weight_decay()."""
    groups = [{"params": list(net.parameters())}]
    if options.decay_of == "matrices":
        exempt = net.no_weight_decay() if hasattr(net, "no_weight_decay") else set()
        vectors = {name for name, tensor in net.named_parameters() if tensor.dim() < 2 or name in exempt}
        groups = [{"params": [tensor for name, tensor in net.named_parameters() if (name in vectors) == spared],
                   **({"weight_decay": 0.0} if spared else {})} for spared in (False, True)]
    return torch.optim.AdamW(groups, options.lr, weight_decay=options.weight_decay, fused=device.type == "cuda")


def whole_file(path, option, write):
    """Calls write(draft) and renames the draft. The file is complete or absent."""
    draft = f"{path}.{os.getpid()}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, RuntimeError) as error:  # torch.save() raises RuntimeError if it cannot write
        raise Refused(f"{option} {path}: {getattr(error, 'strerror', None) or error}; choose another path", 1) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def save_weights(net, path):
    """Writes the weights in fp32."""
    from safetensors.torch import save_file
    weights = {name: value.detach().float().contiguous() for name, value in net.state_dict().items()}
    whole_file(path, "--save-init", lambda draft: save_file(weights, draft))


def wrapped(net, options, device, ranks):
    """Returns the network for training: with DDP on several ranks, and compiled with --compile."""
    if ranks.count > 1:
        # torch.compile splits the graph to overlap the all-reduce; static_graph does not allow that.
        net = torch.nn.parallel.DistributedDataParallel(
            net, [device] if device.type == "cuda" else None, gradient_as_bucket_view=True, static_graph=not options.compile)
    return torch.compile(net) if options.compile else net


# ---- Time ----


class Marks:
    """Points in time on the training stream: CUDA events, or the host's clock without a GPU."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark):
        if self.cuda:
            mark.synchronize()

    def between(self, begin, end):
        return begin.elapsed_time(end) * 1e-3 if self.cuda else end - begin


class StepLog:
    """Appends rows about the steps, as fdsl-bench --log does. A row waits for the GPU."""

    def __init__(self, training):
        self.training = training
        self.loss, self.correct = (torch.zeros((), device=training.device) for _ in range(2))  # sums since the last row
        self.step, self.seconds = training.first, 0.0  # of the last row

    def add(self, loss, outputs, labels):
        """Adds the results of a step. A mixed sample counts as correct if the network predicts its label before mixing."""
        self.loss += loss
        self.correct += (outputs.argmax(1) == labels).sum()

    def write(self, step):
        """Collective. Writes the row of the steps since the last row, if there are any."""
        training, options, steps = self.training, self.training.options, step - self.step
        if not steps:
            return
        loss, correct = training.ranks.reduce([self.loss.item(), self.correct.item()])
        seconds = time.perf_counter() - training.began - training.evaluations_s
        images, per_epoch = options.batch * training.ranks.count, options.images // (options.batch * training.ranks.count)
        if training.ranks.rank == 0:
            append(options.step_log, [step_row(training.identity, {
                "epoch": 1 + (step - 1) // per_epoch, "step": step, "samples_seen": step * images,
                "loss": loss / steps / training.ranks.count, "accuracy": correct / steps / images,
                "lr": learning_rate(step - 1, options, training.total),
                "items_per_s": steps * images / (seconds - self.seconds)})], STEP_COLUMNS)
        self.step, self.seconds = step, seconds
        self.loss.zero_()
        self.correct.zero_()


class Training:
    def __init__(self, options, device, ranks):
        self.options, self.device, self.ranks = options, device, ranks
        net = model_of(options).to(device)
        if options.save_init and ranks.rank == 0:
            save_weights(net, options.save_init)
        self.net = net.to(memory_format=torch.channels_last) if options.channels_last else net
        self.trained = wrapped(self.net, options, device, ranks)
        self.optimizer = optimizer_of(self.net, options, device)
        if options.recipe == "paper":
            self.recipe = Recipe(options, device, ranks.rank, ranks.count)
        else:
            import pretrain_recipes
            self.recipe = pretrain_recipes.published(options, device, ranks.rank)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")
        self.first = self.resumed() if options.resume else 0  # number of the first step
        self.total = options.schedule_steps or (options.warmup_steps + options.steps if options.steps else None)
        self.marks, self.pending = Marks(device), collections.deque()  # per step: begin, batch received, end, whether it is timed
        self.step_s, self.stalled_s = [], 0.0  # of the timed steps
        self.loss_sum = torch.zeros((), device=device)  # of the loss_steps steps since the last evaluation
        self.loss_steps, self.timed_loss = 0, torch.zeros((), device=device)
        self.evaluated_s = self.evaluations_s = 0.0  # seconds of evaluations since the first timed step, and in total
        self.evaluated_at, self.top1 = None, None  # images seen before the last evaluation, and its accuracy
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.identity = identity(options, name, ranks.count)
        self.log = StepLog(self) if options.step_log else None
        last = options.warmup_steps + options.steps if options.steps else math.inf  # steps in all
        self.untimed = self.first + min(options.warmup_steps, max(0, last - self.first - 1))  # steps that are not timed end here

    def autocast(self):
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return (torch.autocast(self.device.type, kinds[self.options.amp]) if self.options.amp in kinds
                else contextlib.nullcontext())

    # ---- Checkpoints ----

    def fixed(self):
        """Returns what a resumed run must have in common with the run that wrote the checkpoint."""
        return {name: str(getattr(self.options, name)) for name in ("model", "batch", "classes", "seed", "amp", "settings", "source")} | {
            "ranks": str(self.ranks.count)}

    def save(self, number):
        """Writes the state after `number` steps."""
        if self.ranks.rank == 0:
            state = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
                     "step": number, "fixed": self.fixed()}
            whole_file(self.options.checkpoint, "--checkpoint", lambda draft: torch.save(state, draft))

    def resumed(self):
        """Loads the checkpoint, if there is one. Returns the number of steps that it has seen."""
        path = self.options.checkpoint
        if not os.path.exists(path):
            return 0
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            other = {name: was for name, was in state["fixed"].items() if was != self.fixed()[name]}
            if not other:
                self.net.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.scaler.load_state_dict(state["scaler"])
        except (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise Refused(f"--checkpoint {path} cannot be read: {str(error).splitlines()[0]}; delete it, or drop --resume", 1) from None
        for name, was in other.items():
            raise Refused(f"--checkpoint {path}: it was written with {name} '{was}', not '{self.fixed()[name]}'; give the same, or "
                          "drop --resume")
        return state["step"]

    def synchronise(self):
        """Waits for the GPUs of all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ranks.reduce([0])

    def step(self, batches, number):
        begin = self.marks.now()
        images, labels = next(batches)
        received = self.marks.now()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.options, self.total)
        inputs, targets = self.recipe(images, labels, number)
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            outputs = self.trained(inputs)
        loss = -(targets * functional.log_softmax(outputs.float(), 1)).sum(1).mean()
        self.scaler.scale(loss).backward()  # without fp16, the scaler changes nothing
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.log:
            self.log.add(loss.detach(), outputs.detach(), labels)
        self.loss_sum += loss.detach()
        self.loss_steps += 1
        timed = number >= self.untimed
        if timed:
            self.timed_loss += loss.detach()
        self.pending.append((begin, received, self.marks.now(), timed))
        self.limit_run_ahead(RUN_AHEAD)

    def limit_run_ahead(self, steps):
        """Waits until the host is at most this many steps ahead, so that batches are not allocated long before their use.
        Stores the times of the completed steps."""
        while len(self.pending) > steps:
            begin, received, end, timed = self.pending.popleft()
            self.marks.wait(end)
            if timed:
                self.step_s.append(self.marks.between(begin, end))
                self.stalled_s += self.marks.between(begin, received)

    def run(self):
        """Trains until one of --steps, --seconds and --time-limit is reached. Returns the Result."""
        options, number = self.options, self.first
        if options.steps and number >= options.warmup_steps + options.steps:
            raise Refused(f"--checkpoint {options.checkpoint} has seen all {number} steps; raise --steps, or drop --resume")
        batches = batches_of(options, self.device, self.ranks.rank, self.ranks.count, self.first)
        self.test = held_out(options, self.device, self.ranks.rank, self.ranks.count) if options.evaluate else None
        torch.manual_seed(options.seed * 4096 + self.ranks.rank + 1)  # for drop path; the source also draws numbers
        self.net.train()
        self.synchronise()
        self.began = begin = time.perf_counter()
        images = options.batch * self.ranks.count
        while options.steps is None or number < options.warmup_steps + options.steps:
            if number == self.untimed:
                begin = self.begin_timing()
            self.step(batches, number)
            number += 1
            if self.log and number % options.log_steps == 0:
                self.log.write(number)
            self.check_numbers(number * images)
            if options.checkpoint_steps and number % options.checkpoint_steps == 0:
                self.save(number)
            if options.evaluate and number * images // options.evaluate_every > (number - 1) * images // options.evaluate_every:
                self.evaluate(number * images)
            if number % CHECK_EVERY == 0 and self.is_over(begin, number):
                break
        self.synchronise()
        seconds = time.perf_counter() - begin - self.evaluated_s
        if self.log:
            self.log.write(number)
        if options.evaluate and self.evaluated_at != number * images:
            self.evaluate(number * images)
        if options.checkpoint:
            self.save(number)
        return self.result(seconds)

    def begin_timing(self):
        self.synchronise()
        self.evaluated_s = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return time.perf_counter()

    def check_numbers(self, images):
        if images + self.options.images >= HELD_OUT_INSTANCE * self.options.classes:
            raise Refused("training would reach the numbers of the held-out images", 1)

    def is_over(self, begin, number):
        """Collective: returns on all ranks whether --seconds or --time-limit has passed on the first rank. Only --time-limit
        includes the time of evaluations."""
        now = time.perf_counter()
        seconds = now - begin - self.evaluated_s
        timed = number > self.untimed and self.options.seconds and seconds >= self.options.seconds
        over = timed or (self.options.time_limit and now - self.began >= self.options.time_limit)
        progress(f"step {number}, {now - self.began:.0f} s")
        return self.ranks.reduce([float(bool(over) and self.ranks.rank == 0)])[0] > 0

    @torch.no_grad()
    def evaluate(self, images):
        """Writes a point of the learning curve: mean training loss since the last point, held-out loss and top-1."""
        self.synchronise()
        begin = time.perf_counter()
        trained_s = begin - self.began - self.evaluations_s
        self.net.eval()
        loss = right = 0.0
        for pictures, labels in zip(self.test[0].split(self.options.batch), self.test[1].split(self.options.batch)):
            with self.autocast():
                outputs = self.net(self.recipe.normalised(pictures)).float()
            loss += functional.cross_entropy(outputs, labels, reduction="sum").item()
            right += (outputs.argmax(1) == labels).sum().item()
        self.net.train()
        train_loss = self.loss_sum.item() / max(1, self.loss_steps)
        loss, right, count, train_loss = self.ranks.reduce([loss, right, len(self.test[1]), train_loss])
        self.loss_sum, self.loss_steps = torch.zeros_like(self.loss_sum), 0
        taken = time.perf_counter() - begin
        self.evaluated_s += taken
        self.evaluations_s += taken
        self.top1, self.evaluated_at = right / count, images
        if self.options.curve and self.ranks.rank == 0:
            append(self.options.curve, [curve_row(self.identity, {
                "images": images, "train_loss": train_loss / self.ranks.count, "held_out_loss": loss / count,
                "top1": self.top1, "seconds": trained_s})], CURVE_COLUMNS)
        progress(f"{images} images: held-out loss {loss / count:.4f}, top-1 {100 * right / count:.2f} %")

    def result(self, seconds):
        self.limit_run_ahead(0)
        if not self.step_s:
            raise Refused("the run ended during its --warmup-steps; raise the time limit, or lower --warmup-steps", 1)
        cuda = self.device.type == "cuda"
        loss, share = self.ranks.reduce([self.timed_loss.item() / len(self.step_s), self.stalled_s / sum(self.step_s)])
        seconds, memory = self.ranks.reduce([seconds, torch.cuda.max_memory_allocated(self.device) if cuda else 0], "MAX")
        return Result(self.identity, len(self.step_s), seconds, self.step_s, share / self.ranks.count, int(memory),
                      loss / self.ranks.count, self.top1)
