"""Batches of images for PyTorch, generated or read ahead of the training step."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, NoReturn, Optional, Union

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("fdsl.torch: PyTorch is not installed; install fdsl[torch]") from None

from . import _stream
from ._generator import Generator
from ._library import integer
from ._memory import old_torch
from ._stream import Folder, Shards

if reason := old_torch(torch):
    raise ImportError(f"fdsl.torch: {reason}")

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[int], Batch]

__all__ = ["Loader"]

_ADVICE = "iterate over the Loader itself, without torch.utils.data.DataLoader"
_NO_EFFECT = ("classes", "preset", "preset_file", "class_file", "class_list", "device", "threads", "batch")


class Loader:
    """An iterable of (images, labels): PyTorch tensors, prepared ahead of the training step.

    Loader(generator, ...) generates images on the generator's device; its arguments are those of GeneratorLoader.
    Loader(source, ...) reads an fdsl.Shards, fdsl.Folder or fdsl.Embeddings; its arguments are those of StreamLoader.
    """

    def __new__(cls, source: Any = None, *arguments: Any, **named: Any) -> Any:
        kind: Any = cls
        if cls is Loader:
            kind = StreamLoader if isinstance(source, _stream._Source) else GeneratorLoader
        return object.__new__(kind)

    if TYPE_CHECKING:

        def __init__(self, source: Union[Generator, Shards, Folder], *arguments: Any, **named: Any) -> None: ...
        def __iter__(self) -> Iterator[Batch]: ...
        def __len__(self) -> int: ...
        @property
        def epoch(self) -> int: ...
        def set_epoch(self, epoch: int) -> None: ...
        def state_dict(self) -> dict[str, Any]: ...
        def load_state_dict(self, state: dict[str, Any]) -> None: ...


# ---- Data sets ----


class _Staging(NamedTuple):
    """Pinned memory from which batches are copied to the GPU, and the end of the latest copy."""

    images: torch.Tensor
    labels: torch.Tensor
    copied: torch.cuda.Event


class StreamLoader(_stream.Loader, Loader):
    """Reads a data set: an fdsl.Loader whose items are PyTorch tensors.

    device    "cpu", "cuda", "cuda:1" or a torch.device

    All other arguments, the order, the epochs and the errors are those of fdsl.Loader, except the label of a masked
    sample: it is -100, which cross_entropy() ignores.

    On the CPU, tensors use the memory of the library without a copy. On CUDA, the library copies each batch to pinned
    memory, and a stream of the lowest priority copies it to the GPU, up to two batches ahead. At each step, the current
    stream waits for the batch. The host waits only if no batch is complete, or if it is four batches ahead of the GPU.
    """

    _label_of_masked = -100

    def __init__(self, source: Union[Shards, Folder], batch_size: int = 256, *, device: Any = "cpu", **named: Any) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: {str(device)!r} is unknown; valid values: 'cpu', 'cuda' and 'cuda:N'")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(source, batch_size, **named)
        self._arguments["device"] = str(self.device)
        self._side: Any = None  # a torch.cuda.Stream
        self._staging: list[_Staging] = []
        self._turn = 0

    def _deliver(self, batch: Any) -> Batch:
        images, labels = super()._deliver(batch)
        return torch.from_dlpack(images), labels if labels is None else torch.from_dlpack(labels)

    def _produce(self, epoch: int, step: int) -> Iterator[tuple[Batch, tuple[int, int]]]:
        return super()._produce(epoch, step) if self.device.type == "cpu" else self._produce_cuda(epoch, step)

    def _produce_cuda(self, epoch: int, step: int) -> Iterator[tuple[Batch, tuple[int, int]]]:
        ahead = min(int(self._arguments["prefetch"]), 2)
        if self._side is None:  # one for the life of the loader: PyTorch caches memory per stream
            new_stream: Any = torch.cuda.Stream  # some versions of PyTorch have no types for it
            self._side = new_stream(self.device, priority=0)  # 0 is the lowest priority; higher ones are negative
            with torch.cuda.device(self.device):
                self._staging = [self._new_staging() for _ in range(ahead + 1)]
        ready: deque[tuple[Batch, torch.cuda.Event]] = deque()
        received: deque[torch.cuda.Event] = deque()  # points in the consumer's stream, one per step
        ended = False
        while ready or not ended:
            with torch.cuda.device(self.device):
                while not ended and len(ready) <= ahead and (not ready or self._stream.ready()):
                    batch = self._copy_ahead()
                    ended = batch is None
                    if batch is not None:
                        ready.append((batch, self._side.record_event()))
                    batch = None
                if not ready:
                    return
                current = torch.cuda.current_stream(self.device)
                received.append(current.record_event())
                if len(received) > ahead + 2:
                    received.popleft().synchronize()  # else the host could fill the memory with batches
                item, event = ready.popleft()
                current.wait_event(event)
                for tensor in item:
                    tensor.record_stream(current)
            step += 1
            yield item, (epoch, step) if step < len(self) else (epoch + 1, 0)
            del item, tensor

    def _new_staging(self) -> _Staging:
        count, dtype = int(self._stream.info.capacity), getattr(torch, self.dtype)
        images = torch.empty((count, *self.shape), dtype=dtype, device="cpu", pin_memory=True)
        labels = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        return _Staging(images, labels, torch.cuda.Event())

    def _copy_ahead(self) -> Optional[Batch]:
        """Enqueues the copy of the next batch on the side stream. Returns None at the end of an epoch."""
        staging = self._staging[self._turn % len(self._staging)]
        staging.copied.synchronize()  # returns at once if it was never recorded
        count = self._stream.fill(staging.images.data_ptr(), staging.labels.data_ptr())
        if count is None:
            return None
        self._turn += 1
        with torch.cuda.stream(self._side):
            images = staging.images[:count].to(self.device, non_blocking=True)
            labels = staging.labels[:count].to(self.device, non_blocking=True)
            staging.copied.record(self._side)
            labels.masked_fill_(labels == -1, self._label_of_masked)
        return images, labels


# ---- Generated images ----


class GeneratorLoader(Loader):
    """Generates images: tensors on the generator's device.

    generator            opened in this process, with the format that the network needs
    batches_per_epoch    number of batches that each rank receives per epoch
    rank, world_size     this process and the number of processes; torch.distributed is not used
    seed                 seed of the order, 0 to 2^64 - 1
    prefetch             number of batches generated ahead; 0: none
    shuffle              False: the numbers ascend, which the generators "gbase" and "bat" need
    count                images per batch, 1 to generator.batch; None: generator.batch

    Each item is a pair of new tensors that the caller owns: images of shape (count, *generator.shape), and int64
    labels of shape (count,). With E = batches_per_epoch * world_size * count, epoch e has the images numbered e * E to
    (e + 1) * E - 1. Without shuffle, the numbers ascend. With shuffle, PyTorch's randperm(E) defines their order, with a
    generator that is seeded from (seed, epoch). Each rank computes this permutation on the host when the epoch starts.
    The permutation takes 8 * E bytes of memory. No batch is generated ahead across epochs.
    Global batch s is the s-th group of world_size * count images in this order, and rank r generates its r-th part.
    All ranks together therefore generate the same images as one rank with world_size times the count.

    Each iteration is one epoch. The next iteration is the next epoch, unless set_epoch() was called. If the caller
    leaves an epoch early, the next iteration repeats this epoch from its start.

    On CUDA, batches are generated on a stream of the lowest priority, which is also the default priority of PyTorch's
    streams. At each step, the current stream waits for the batch, and the host runs at most prefetch + 2 batches ahead
    of the GPU. On the CPU, a thread generates the batches, unless prefetch is 0. The thread ends when the iteration
    ends, fails or is left, and at exit.

    Not thread-safe. A Loader replaces torch.utils.data.DataLoader, and cannot be passed to it as a data set.
    Raises RuntimeError in a forked process, such as a worker of a DataLoader; ValueError or TypeError, whose message
    names the argument; and ValueError if the order of an epoch does not fit into the memory of the machine.

    >>> import fdsl, fdsl.torch
    >>> generator = fdsl.Generator(classes=10, res=64, dtype="float32", batch=8)
    >>> for images, labels in fdsl.torch.Loader(generator, batches_per_epoch=2):
    ...     print(tuple(images.shape), images.dtype, labels.dtype)
    (8, 1, 64, 64) torch.float32 torch.int64
    (8, 1, 64, 64) torch.float32 torch.int64
    """

    def __init__(
        self,
        generator: Generator,
        batches_per_epoch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        prefetch: int = 2,
        shuffle: bool = True,
        count: Optional[int] = None,
    ) -> None:
        if not isinstance(generator, Generator):
            raise TypeError(
                "generator: it must be an fdsl.Generator, fdsl.Shards or fdsl.Folder, not "
                f"{type(generator).__name__}"
            )
        generator._check_open()
        self.generator = generator
        self.batches_per_epoch = integer("batches_per_epoch", batches_per_epoch, 1, 1 << 40)
        self.world_size = integer("world_size", world_size, 1, 1 << 24)
        self.rank = integer("rank", rank, 0, self.world_size - 1)
        self.seed = integer("seed", seed, 0, (1 << 64) - 1)
        self.prefetch = integer("prefetch", prefetch, 0, 1 << 16)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle: it must be a bool, not {type(shuffle).__name__}")
        self.shuffle = shuffle
        self.count = generator.batch if count is None else integer("count", count, 1, generator.batch)
        if shuffle:
            self._check_memory()
        name = generator.config["generator"]
        if self.shuffle and name in ("gbase", "bat"):
            raise ValueError(f"shuffle: generator {name!r} generates only consecutive images; set shuffle=False")
        self._epoch = self._step = 0  # position of the next batch that the caller receives
        self._resumed = False  # whether the next iteration begins at _step
        self._stream: Any = None  # a torch.cuda.Stream
        self._images = _fingerprint(generator)

    def _check_memory(self) -> None:
        """Raises ValueError if the order of an epoch exceeds the memory of the machine."""
        needed = 8 * self.batches_per_epoch * self.world_size * self.count
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise ValueError(
                f"batches_per_epoch: to shuffle {needed // 8} images per epoch takes {needed / 2**30:,.0f} GiB of memory, "
                f"but this machine has {memory / 2**30:,.0f} GiB; use fewer batches per epoch, or set shuffle=False"
            )

    def __len__(self) -> int:
        """Returns the number of batches per epoch."""
        return self.batches_per_epoch

    def __repr__(self) -> str:
        return f"fdsl.torch.Loader({self.generator!r}, rank={self.rank}, prefetch={self.prefetch}, {self._identity()})"

    def __getitem__(self, index: object) -> NoReturn:
        """Raises TypeError, because a Loader has no batches by index."""
        raise TypeError(f"fdsl.torch.Loader: it is not a data set; {_ADVICE}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    # ---- Position ----

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. After the last batch of an epoch, this is the next epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next epoch. Keeps the step of load_state_dict() if that call has set the same epoch."""
        epoch = integer("epoch", epoch, 0, 1 << 40)
        if not (self._resumed and epoch == self._epoch):
            self._epoch, self._step, self._resumed = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches that the caller has received. It does not depend on the rank."""
        return {"epoch": self._epoch, "step": self._step, "images": self._images, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration begin with the first batch that the caller of state_dict() had not received.

        Raises ValueError if the images of the generator, or a parameter that determines the batches, differ from those
        of the state.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state_dict: it must be a dict, not {type(state).__name__}")
        for name, own in self._identity().items():
            if name not in state:
                raise ValueError(f"state_dict: it has no {name!r}; it must be a result of Loader.state_dict()")
            if state[name] != own:
                raise ValueError(f"state_dict: its {name} is {state[name]}, but that of this loader is {own}")
        if state.get("images") != self._images:
            raise ValueError("state_dict: it belongs to a generator of other images; open one with the same configuration")
        step = integer("state_dict: step", state.get("step"), 0, self.batches_per_epoch - 1)
        epoch = integer("state_dict: epoch", state.get("epoch"), 0, 1 << 40)
        self._epoch, self._step, self._resumed = epoch, step, True

    def _identity(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("seed", "batches_per_epoch", "world_size", "shuffle")}
        return {**own, "batch": self.count}

    # ---- Batches ----

    def __iter__(self) -> Iterator[Batch]:
        self._check_process()
        return self._iterate()

    def _check_process(self) -> None:
        if self.generator._process != os.getpid():
            raise RuntimeError(
                f"fdsl.torch.Loader: its generator was opened before fork(); {_ADVICE} (the Loader itself generates "
                "batches ahead), or open the generator in the worker"
            )

    def _iterate(self) -> Iterator[Batch]:
        if not self._resumed:
            self._step = 0
        self._resumed = False
        epoch, steps = self._epoch, range(self._step, self.batches_per_epoch)
        ahead: Iterator[Batch]
        if self.generator.device != "cpu":
            ahead = self._iterate_cuda(epoch, steps)
        elif self.prefetch:
            ahead = _Background(_maker(self, epoch), steps, self.prefetch)
        else:
            ahead = map(_maker(self, epoch), steps)
        for step in steps:
            self._check_process()  # checked first, because in a forked child, no thread would produce the batch
            batch = next(ahead)
            last = step + 1 == self.batches_per_epoch
            self._epoch, self._step = (epoch + 1, 0) if last else (epoch, step + 1)
            yield batch
            del batch  # so that the caller can free this batch while the next one is generated

    def _iterate_cuda(self, epoch: int, steps: range) -> Iterator[Batch]:
        device = torch.device(self.generator.device)
        if self._stream is None:  # one for the life of the loader: PyTorch caches memory per stream
            new_stream: Any = torch.cuda.Stream  # some versions of PyTorch have no types for it
            self._stream = new_stream(device, priority=0)  # 0 is the lowest priority; higher ones are negative
        side = self._stream
        ready: deque[tuple[Batch, torch.cuda.Event]] = deque()
        received: deque[torch.cuda.Event] = deque()  # points in the consumer's stream, one per step
        with torch.cuda.stream(side):
            make = _maker(self, epoch)
        for position in range(len(steps)):
            with torch.cuda.device(device):
                while len(ready) <= self.prefetch and position + len(ready) < len(steps):
                    with torch.cuda.stream(side):
                        batch = make(steps[position + len(ready)])
                        ready.append((batch, side.record_event()))
                current = torch.cuda.current_stream(device)
                received.append(current.record_event())
                if len(received) > self.prefetch + 2:
                    received.popleft().synchronize()  # else the host could fill the memory with batches
                batch, event = ready.popleft()
                current.wait_event(event)
                for tensor in batch:
                    tensor.record_stream(current)
            yield batch
            del batch, tensor


def _fingerprint(generator: Generator) -> str:
    """Returns a hash of all that determines a generator's images. It does not depend on the device and the batch."""
    config = {name: value for name, value in generator.config.items() if name not in _NO_EFFECT}
    config["out_res"] = config["out_res"] or config["res"]
    if config["generator"] not in ("gbase", "bat"):  # the other generators are bit-identical
        config["generator"] = "auto"
    text = json.dumps((config, generator.classes), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _maker(loader: GeneratorLoader, epoch: int) -> Make:
    """Returns a function that generates the batch of a step on the current stream. The function has no reference to
    the loader."""
    generator, count, rank, ranks = loader.generator, loader.count, loader.rank, loader.world_size
    per_epoch = loader.batches_per_epoch * ranks * count
    begin = epoch * per_epoch
    if begin + per_epoch > 1 << 63:
        raise ValueError(f"epoch: {epoch} is out of range; its image numbers exceed 2^63")
    dtype: torch.dtype = getattr(torch, generator.dtype)
    device = torch.device(generator.device)
    numbers: Optional[torch.Tensor] = None
    if loader.shuffle:
        text = f"{loader.seed} {epoch}".encode()
        source = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
        order = torch.randperm(per_epoch, generator=source, device="cpu").view(-1, ranks, count)
        numbers = (order[:, rank] + begin).to(device)

    def make(step: int) -> Batch:
        images = torch.empty((count, *generator.shape), dtype=dtype, device=device)
        labels = torch.empty(count, dtype=torch.int64, device=device)
        if numbers is None:
            generator.fill(images, labels, begin + (step * ranks + rank) * count)
        else:
            generator.fill(images, labels, numbers=numbers[step])
        return images, labels

    return make


class _Background(Iterator[Batch]):
    """Generates batches in a thread, which is at most `ahead` batches ahead. Freeing the object ends the thread."""

    def __init__(self, make: Make, steps: range, ahead: int) -> None:
        self._made: SimpleQueue[Union[Batch, BaseException]] = SimpleQueue()
        self._slots = threading.Semaphore(ahead)
        ended = threading.Event()
        thread = threading.Thread(
            target=_make_all, args=(make, steps, self._made, self._slots, ended), name="fdsl.torch.Loader", daemon=True
        )
        thread.start()
        # Also runs at exit, so that the thread never runs while the interpreter shuts down.
        weakref.finalize(self, _end, os.getpid(), thread, self._slots, ended)

    def __next__(self) -> Batch:
        item = self._made.get()
        if isinstance(item, BaseException):
            self._made.put(item)  # so that later calls raise it, too
            raise item
        self._slots.release()
        return item


def _make_all(
    make: Make, steps: range, made: SimpleQueue[Any], slots: threading.Semaphore, ended: threading.Event
) -> None:
    try:
        for step in steps:
            slots.acquire()
            if ended.is_set():
                return
            made.put(make(step))
        made.put(StopIteration())
    except BaseException as error:
        made.put(error)


def _end(process: int, thread: threading.Thread, slots: threading.Semaphore, ended: threading.Event) -> None:
    if process != os.getpid():  # in a forked child there is no thread, and its locks may be held
        return
    ended.set()
    slots.release()
    if thread is not threading.current_thread():
        thread.join()
