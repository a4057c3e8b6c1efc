"""Sources of batches for scripts/compare/pretrain.py. Each yields (images, labels) on the training device without end: uint8
images of shape (batch, channels, side, side), and int64 labels. The side is --out-res, or --res if the recipe crops the canvas.

The stream of the training step waits for each batch. Copies to the GPU run on another stream.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import os
import pathlib

import torch
from pretrain_order import Order, fresh_step
from pretrain_rows import AGAIN, Refused

# Training uses instances below this one; the held-out images begin with it. An image has the number
# instance * classes + class, so the numbers fit into 63 bits for up to 2^22 classes.
HELD_OUT_INSTANCE = 1 << 40
AHEAD = 2  # batches that are generated ahead


# ---- The order of images ----


def order_of(epoch, count, options):
    """Returns the permutation of an epoch over the numbers 0 to count - 1. It depends only on count, the seed and the epoch."""
    digest = hashlib.sha256(f"{options.seed} {epoch}".encode()).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


def numbers_of(epoch, count, options, fresh):
    """Returns the image numbers of an epoch in their order. With --order train, they are those of fdsl-bench --fresh."""
    if options.order == "train":
        return Order(options.seed, epoch, count).all(torch.arange(count)) + epoch * fresh_step(options.classes)
    return order_of(epoch, count, options) + (epoch * count if fresh else 0)


def batch_numbers(count, options, rank, ranks, fresh=False):
    """Yields the image numbers of each batch of a rank, epoch after epoch. Ranks take consecutive parts of a global batch. A
    partial global batch at the end of an epoch is left out. With `fresh`, each epoch has new numbers."""
    for epoch in itertools.count():
        order = numbers_of(epoch, count, options, fresh)
        for part in order.split(options.batch * ranks)[:count // (options.batch * ranks)]:
            yield part[rank * options.batch:(rank + 1) * options.batch].tolist()


# ---- Generated images ----


def threads_of(options):
    """Returns the number of CPU threads of this rank: its part of --threads, or of all. Ignores OMP_NUM_THREADS, which
    torchrun sets to 1."""
    return max(1, (options.threads or len(os.sched_getaffinity(0))) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def generator_of(options, device, name, side=None):
    """Opens a generator of the recipe's images, with `side` pixels (default: those that the recipe gets). `name` is an argument of fdsl.Generator, such as "fused". The seed of images
    in fdsl-bench's workload train is always 0."""
    import fdsl
    seed = 0 if options.order == "train" else options.seed
    try:
        return fdsl.Generator(options.classes, formula=options.formula, preset=options.preset, seed=seed, res=options.res,
                              out_res=side or options.source_res, channels=options.channels, generator=name,
                              device="cpu" if name == "omp" else device, batch=options.batch,
                              threads=threads_of(options) if name == "omp" else None)
    except (ValueError, TypeError) as error:
        raise Refused(f"fdsl: {error}") from None
    except fdsl.Error as error:
        raise Refused(f"fdsl: {error}", 4 if isinstance(error, fdsl.Unavailable) else 1) from None


def on_device(options, device):
    """Returns the name of the generator of fdsl that a source uses."""
    return options.source if options.source != "live" else "fused" if device.type == "cuda" else "omp"


def loaded(generator, options, rank, ranks):
    """Yields the batches of fdsl.torch.Loader. Epochs have --images new images each; their order is shuffled if the generator
    can generate images in any order."""
    import fdsl.torch
    shuffle = generator.config["generator"] not in ("gbase", "bat")
    loader = fdsl.torch.Loader(generator, max(1, options.images // (options.batch * ranks)), rank, ranks,
                               seed=options.seed, prefetch=AHEAD, shuffle=shuffle)
    while True:
        yield from loader


def filled(generator, numbers, pinned):
    """Yields batches of the images with these numbers. On a GPU, they are generated on the current stream; on the CPU, in a
    thread, into pinned memory if `pinned` is true."""
    device = torch.device(generator.device)

    def generate(batch):
        images = torch.empty((len(batch), *generator.shape), dtype=torch.uint8, device=device, pin_memory=pinned)
        labels = torch.empty(len(batch), dtype=torch.int64, device=device, pin_memory=pinned)
        generator.fill(images, labels, numbers=to(torch.tensor(batch), device))
        return images, labels

    if device.type == "cuda":
        yield from map(generate, numbers)
        return
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = collections.deque(pool.submit(generate, batch) for batch in itertools.islice(numbers, AHEAD))
        while pending:
            pending.extend(pool.submit(generate, batch) for batch in itertools.islice(numbers, 1))
            yield pending.popleft().result()


def held_out(options, device, rank, ranks):
    """Returns the held-out images of a rank and their labels on the device. Training never reaches their numbers."""
    generator = generator_of(options, device, "fused" if device.type == "cuda" else "omp", options.out_res)
    numbers = (HELD_OUT_INSTANCE * options.classes + torch.arange(rank, options.held_out, ranks)).split(options.batch)
    return [torch.cat(parts) for parts in zip(*filled(generator, (batch.tolist() for batch in numbers), False))]


# ---- Loaded images ----


@functools.cache
def area_weights(size, out):
    """Returns the matrix (out × size) that reduces a row of pixels as fdsl does: to means over the covered areas."""
    edges = torch.arange(out + 1, dtype=torch.float32) * size / out
    pixels = torch.arange(size, dtype=torch.float32)
    covered = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return covered.clamp(min=0) * out / size


def resized(image, options):
    """Resizes a decoded image. With --order same, pixels differ from those of fdsl by at most one gray level. Otherwise uses
    PIL's filter BOX, which takes less time, but counts a pixel at the border of an area entirely or not at all."""
    import numpy
    from PIL import Image
    side = options.source_res
    if image.size == (side, side) or options.order != "same":
        image = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BOX)
        return torch.from_numpy(numpy.array(image).reshape(side, side, -1)).movedim(-1, 0)
    pixels = torch.from_numpy(numpy.array(image).reshape(image.height, image.width, -1)).movedim(-1, 0).float()
    means = area_weights(image.height, side) @ pixels @ area_weights(image.width, side).T
    return (means + 0.5).clamp_(0, 255).to(torch.uint8)


def read_image(path_or_file, options, name):
    """Decodes and resizes an image. Errors begin with `name`."""
    from PIL import Image
    try:
        with Image.open(path_or_file) as image:
            decoded = image.convert("L" if options.channels == 1 else "RGB")
    except Exception as error:  # Pillow raises many types
        why = getattr(error, "strerror", None) or "the image is damaged, or its format is unknown"
        raise Refused(f"{name} cannot be read: {why}; {AGAIN}", 1) from None
    return resized(decoded, options).contiguous()


class Reader:
    """read_image() with the run's options, as an object that can be pickled for worker processes."""

    def __init__(self, options):
        self.options = options

    def __call__(self, path):
        return read_image(path, self.options, path)

    def sample(self, parts):
        """Returns the image and the label of a sample of a shard."""
        import io
        name, classes = f"{parts['__url__']}, sample {parts['__key__']}", self.options.classes
        label = parts.get("cls", b"").strip()
        if "png" not in parts or not label:
            raise Refused(f"{name}: it needs a file .png and a file .cls; {AGAIN}", 1)
        if not label.isdigit() or int(label) >= classes:
            raise Refused(f"{name}: its label is {label.decode(errors='replace')}, but --classes {classes} has labels from 0 to "
                          f"{classes - 1}; give the number of classes of this data set", 1)
        return read_image(io.BytesIO(parts["png"]), self.options, name), int(label)


def numbered_index(dataset):
    """Returns the index in an ImageFolder for each image number. If the file names are the numbers 0 to N - 1, they are the image
    numbers. Otherwise the number of an image is its index in ImageFolder's order."""
    stems = [pathlib.Path(path).stem for path, _ in dataset.samples]
    numbers = [int(stem) if stem.isdecimal() else -1 for stem in stems]
    if sorted(numbers) != list(range(len(numbers))):
        return list(range(len(numbers)))
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def loader_of(dataset, options, device, **batching):
    """Returns an iterator over the batches of a DataLoader, and starts its workers."""
    workers = {"persistent_workers": True, "prefetch_factor": 4} if options.workers else {}
    return without_traceback(iter(torch.utils.data.DataLoader(
        dataset, num_workers=options.workers, pin_memory=device.type == "cuda", **workers, **batching)))


def without_traceback(batches):
    """Yields the batches of a DataLoader. The message of a worker's error is its traceback; only the last line is kept."""
    try:
        yield from batches
    except Refused as error:
        raise Refused(str(error).splitlines()[-1].removeprefix("pretrain_rows.Refused: "), 1) from None


def from_folder(options, device, rank, ranks, first):
    from torchvision.datasets import ImageFolder
    try:
        dataset = ImageFolder(options.data, loader=Reader(options))
    except FileNotFoundError as error:
        raise Refused(f"--data {options.data}: {str(error).splitlines()[0]}") from None
    if len(dataset) < options.batch * ranks:
        raise Refused(f"--data {options.data}: it has {len(dataset)} images, fewer than the {options.batch * ranks} images of one step "
                      "of all ranks")
    index = numbered_index(dataset)
    batches = ([index[number] for number in batch] for batch in itertools.islice(
        batch_numbers(len(dataset), options, rank, ranks), first, None))
    return loader_of(dataset, options, device, batch_sampler=batches)


def readable(samples):
    """Yields samples of webdataset. Errors name the shard, whose path webdataset appends to the exception's arguments."""
    try:
        yield from samples
    except Exception as error:
        raise Refused(f"{error.args[-1]} is damaged: {type(error).__name__}; {AGAIN}", 1) from None


def from_shards(options, device, rank):
    """Every worker draws shards at random, with replacement, so the number of shards may be smaller than the number of workers."""
    import webdataset
    shards = [str(path) for path in sorted(pathlib.Path(options.data).glob("*.tar"))]
    dataset = webdataset.WebDataset(shards, resampled=True, shardshuffle=False, empty_check=False, nodesplitter=iter,
                                    seed=options.seed * 4096 + rank)
    samples = dataset.compose(readable).shuffle(1000).map(Reader(options).sample)
    return loader_of(samples, options, device, batch_size=options.batch, drop_last=True)


# ---- Delivery to the device ----


def to(tensor, device):
    if device.type == "cuda" and not tensor.is_cuda:
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
    return tensor


def on_stream(batches, device):
    """Yields batches that another stream generates or copies. Batches arrive early, because the host runs ahead
    of the GPU."""
    if device.type != "cuda":
        yield from batches
        return
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    while True:
        with torch.cuda.stream(stream):
            batch = tuple(to(tensor, device) for tensor in next(batches))
        current.wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(current)
        yield batch


def batches_of(options, device, rank, ranks, first=0):
    """Returns the iterator of a source, from step `first` on; refuse() in pretrain.py allows others than 0 only for sources that
    number their batches."""
    if options.source == "folder":
        return on_stream(from_folder(options, device, rank, ranks, first), device)
    if options.source == "shards":
        return on_stream(from_shards(options, device, rank), device)
    name = on_device(options, device)
    if options.source == "constant":
        generator = generator_of(options, device, "fused" if device.type == "cuda" else "omp")
        batch = next(filled(generator, batch_numbers(options.images, options, rank, ranks), False))
        return itertools.repeat(tuple(to(tensor, device) for tensor in batch))
    generator = generator_of(options, device, name)
    to_pinned = name == "omp" and device.type == "cuda"  # fdsl.torch.Loader does not use pinned memory
    if options.order == "source" and not to_pinned:
        return loaded(generator, options, rank, ranks)
    numbers = batch_numbers(options.images, options, rank, ranks, fresh=options.order != "same")
    return on_stream(filled(generator, itertools.islice(numbers, first, None), to_pinned), device)
