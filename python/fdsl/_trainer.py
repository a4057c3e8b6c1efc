"""The trainer: trains the networks of fdsl-bench on its data, on a Loader, or on batches of any framework."""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, Optional

from ._array import Array
from ._generator import _DTYPES, _device, _path, _text
from ._library import (
    CPU, END, PENDING, Error, TrainerBatchStruct, TrainerConfigStruct, TrainerInfoStruct, TrainerScoreStruct, check, integer, lib,
)  # fmt: skip
from ._memory import SOME_CUDA_DEVICE, kind_of, order_arrays
from ._stream import Loader, Path, _warn

_CHUNK_S, _CHUNK_MAX = 0.05, 256  # steps per call of the library: a KeyboardInterrupt waits for them


class Score(NamedTuple):
    """The results of samples. `precision`: the mean average precision on a test set with multi-hot labels, else NaN."""

    loss: float
    accuracy: float
    samples: int
    precision: float = math.nan


class Loss:
    """The mean loss of the samples of the steps since the previous loss that was read, of all ranks. Reading it, as in
    float(loss), waits for these steps; a step does not wait. On several ranks, all ranks must read it, because it is their mean."""

    __slots__ = ("_trainer", "_value")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Optional[Trainer] = trainer
        self._value = math.nan

    def __float__(self) -> float:
        if self._trainer is not None:
            self._trainer.read()
            self._value, self._trainer = self._trainer._loss, None
        return self._value

    def item(self) -> float:
        """Returns float(self), as a tensor of one element does."""
        return float(self)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return f"fdsl.Loss({float(self)!r})"


def _option(value: Any) -> str:
    """Returns the text of an option's value, as on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_option, value))
    return repr(value) if isinstance(value, float) else os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _numpy(name: str, values: Any) -> Any:
    """Returns a NumPy array of an array of any kind, on the CPU."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise ImportError(f"{name}: NumPy is not installed; install fdsl[numpy]") from None
    if isinstance(values, Array):
        return values.numpy()
    if hasattr(values, "detach"):  # a tensor of PyTorch
        values = values.detach().cpu().float() if values.is_floating_point() else values.detach().cpu()
    return numpy.asarray(values.get() if hasattr(values, "get") and hasattr(values, "device") else values)


def _unmixed(targets: Any) -> tuple[list[int], float]:
    """Returns the labels and the share of targets (count, classes) that are a batch mixed with itself in reverse order."""
    import numpy

    weights = _numpy("labels", targets)
    count = len(weights)
    share = float(weights.max(axis=1).min()) if count else 1.0
    labels = weights.argmax(axis=1)
    for i in range(count // 2 if share < 1 else 0):  # the class that is not the label of sample i is that of its partner
        others = [int(k) for k in numpy.flatnonzero(weights[i]) if k != labels[i]]
        labels[count - 1 - i] = others[0] if others else labels[i]
    mixed = numpy.zeros_like(weights)
    rows = numpy.arange(count)
    numpy.add.at(mixed, (rows, labels), share)
    numpy.add.at(mixed, (rows, labels[::-1]), 1 - share)
    if not numpy.allclose(mixed, weights, atol=1e-5):
        raise ValueError(
            "labels: soft targets must be those of a batch that is mixed with itself in reverse order, as fdsl.MixUp, fdsl.CutMix "
            "and timm's Mixup in batch mode do it, without label smoothing; give labels, and use the options mixup, cutmix and "
            "label_smoothing"
        )
    return [int(label) for label in labels], share


class Trainer:
    """Trains a network with the variants and options of `fdsl-bench --workload train`: the same steps and checkpoints.

    loader       an fdsl.Loader whose batches are trained on; None: the option data names the samples, as in data="synth",
                 or fit(), step() hand over batches
    variant      such as "train-vit", "train-cuda" or "train-omp"; "auto": the fastest that works on this machine
    device       CUDA device of the GPU variants; None: LOCAL_RANK of torchrun, else 0
    num_threads  CPU threads; None: OMP_NUM_THREADS, else all that the process may use
    samples      of an epoch, of all ranks, if batches are handed over; fit() and a loader know it
    shape, dtype of a sample that is handed over, such as (3, 224, 224) and "uint8"; None: those of the first batch
    classes      number of classes; None: those of the loader or the data
    multi_hot    samples that are handed over have multi-hot labels
    rank, world_size, address, port
                 this process, the number of processes, and the host and a free port at which rank 0 listens. None: those of
                 torchrun (RANK, WORLD_SIZE, MASTER_ADDR, and the port after MASTER_PORT), else one process
    nccl_id      the 128 bytes of an ncclUniqueId, at which ranks meet instead
    mpi_comm     a communicator of mpi4py, at which ranks meet instead
    options      all options of the workload by name, with `_` for `-`: model="vit-tiny", optimizer="adamw", lr=1e-3,
                 epochs=3, batch=256 (per rank), checkpoint="folder", resume=True. See docs/train.md

    Bytes enter the network divided by 255, and other values as they are, unless the options mean and std normalise them; data
    of the trainer's own are normalised as the program does.

    >>> import fdsl
    >>> with fdsl.Trainer(variant="train-naive", data="digits", train_size=64, test_size=16, batch=16, epochs=1) as trainer:
    ...     trainer.fit()
    ...     trainer.evaluate().samples
    16

    A process has one trainer at a time. Not thread-safe. Raises ValueError or TypeError, whose message names the argument;
    Unavailable if the build or the machine lacks the variant; and Error if a step fails, or in a forked process.
    """

    def __init__(
        self,
        loader: Optional[Loader] = None,
        *,
        variant: str = "auto",
        device: Any = None,
        num_threads: Optional[int] = None,
        samples: Optional[int] = None,
        shape: Optional[Iterable[int]] = None,
        dtype: Any = None,
        classes: Optional[int] = None,
        multi_hot: bool = False,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        address: Optional[str] = None,
        port: Optional[int] = None,
        nccl_id: Optional[bytes] = None,
        mpi_comm: Any = None,
        **options: Any,
    ) -> None:
        self._handle, self._process, self._loss = 0, os.getpid(), math.nan
        self._options = {name: value for name, value in options.items() if value is not None}
        if loader is not None and not isinstance(loader, Loader):
            raise TypeError(f"loader: it must be an fdsl.Loader, not {type(loader).__name__}; give others to fit()")
        c = self._config = TrainerConfigStruct()
        check(lib.fdsl_trainer_config_init(c, ctypes.sizeof(c)))
        self._kept: list[Any] = []
        self._multi_hot, self._classes, self._shape = bool(multi_hot), classes, tuple(shape) if shape is not None else None
        self._dtype = None if dtype is None else str(dtype).rpartition(".")[2]
        c.variant = _text("variant", variant)
        c.threads = 0 if num_threads is None else integer("num_threads", num_threads, 1, 8192)
        c.device = self._cuda_device(device)
        self._meet(rank, world_size, address, port, nccl_id, mpi_comm)
        self._info, self._score = TrainerInfoStruct(ctypes.sizeof(TrainerInfoStruct)), TrainerScoreStruct(ctypes.sizeof(TrainerScoreStruct))
        self._loader: Optional[Loader] = None
        self._own = self._closed = False
        given = {"samples": samples, "shape": shape, "dtype": dtype, "multi_hot": multi_hot or None}
        for name in (name for name, value in given.items() if value is not None):
            if loader is not None or "data" in self._options or "mix" in self._options:
                raise ValueError(f"{name}: it describes batches that are handed over; drop it, or the loader or the option data")
        if samples is not None:
            c.samples = integer("samples", samples, 1, (1 << 31) - 2)
        if loader is not None:
            self._open_on(loader)
        elif "data" in self._options or "mix" in self._options:
            self._own = True
            if classes is not None:
                self._options["classes"] = classes
            self._open()
        elif samples is not None and self._shape is not None and classes is not None:
            self._declare(self._shape, self._dtype or "uint8", False)
            self._open()

    # ---- Opening ----

    @staticmethod
    def _cuda_device(device: Any) -> int:
        if device is None:
            return int(os.environ.get("LOCAL_RANK", "0"))
        number = _device(device)
        if number == CPU:
            raise ValueError('device: it is that of variants for GPUs; for the CPU, choose variant="train-omp"')
        return int(number)

    def _meet(self, rank: Any, world_size: Any, address: Any, port: Any, nccl_id: Any, mpi_comm: Any) -> None:
        """Sets the ranks and where they meet."""
        c, env = self._config, os.environ
        if rank is None and world_size is None and mpi_comm is None and "RANK" in env and "WORLD_SIZE" in env:
            rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            if nccl_id is None and address is None and world_size > 1:
                address = env.get("MASTER_ADDR", "127.0.0.1")
                port = port or int(env.get("MASTER_PORT", "29500")) + 1
        c.world_size = integer("world_size", 1 if world_size is None else world_size, 1, 1 << 16)
        c.rank = integer("rank", rank or 0, 0, c.world_size - 1)
        if nccl_id is not None:
            if not isinstance(nccl_id, bytes) or len(nccl_id) != 128:
                raise ValueError("nccl_id: it must be the 128 bytes of an ncclUniqueId")
            self._kept.append(nccl_id)
            c.nccl_id = ctypes.cast(ctypes.c_char_p(nccl_id), ctypes.c_void_p)
        if mpi_comm is not None:
            self._kept.append(mpi_comm)
            if isinstance(mpi_comm, int):
                c.mpi_comm = mpi_comm
            else:
                from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

                c.mpi_comm = MPI._addressof(mpi_comm)
        if address is not None and c.world_size > 1:
            c.address = _text("address", address)
            c.port = integer("port", port, 1, 65535)

    def _open(self) -> None:
        if self._closed:
            self._check_open()
        c = self._config
        words = [_text(name, text) for name, value in self._options.items() for text in (name, _option(value))]
        c.options = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        handle = ctypes.c_void_p()
        check(lib.fdsl_trainer_open(c, handle))
        self._handle = handle.value or 0
        _warn()
        self._describe()

    def _open_on(self, loader: Loader) -> None:
        loader._stream.check_open()
        self._loader = loader
        c, info = self._config, loader._stream.info
        c.stream = loader._stream._handle
        c.classes = 0 if self._classes is None else integer("classes", self._classes, 1, 1 << 20)
        self._open()
        # evaluate() takes batches like those of the loader:
        c.shape, c.dtype, c.classes = info.shape, _DTYPES.get(loader._stream.dtype, "").encode(), self._info.classes
        c.multi_hot, c.mixed = info.multi_hot, int(loader._stream.classes > 0)

    def _declare(self, shape: tuple[int, ...], dtype: str, mixed: bool) -> None:
        """Sets what samples are handed over."""
        c = self._config
        if len(shape) not in (3, 4):
            raise ValueError(f"shape: {shape} is neither (channels, height, width) nor (channels, frames, height, width)")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype: {dtype} is none of {', '.join(_DTYPES)}")
        if self._classes is None:
            raise ValueError("classes: the number of classes is not known; give classes")
        c.shape[:] = [*shape, 0][:4]
        c.dtype = _DTYPES[dtype].encode()
        c.classes = integer("classes", self._classes, 1, 1 << 20)
        c.multi_hot, c.mixed = int(self._multi_hot), int(mixed)

    def _check_open(self) -> int:
        if os.getpid() != self._process:
            raise Error("trainer: it was opened before fork(); use it in the process that opened it")
        if not self._handle:
            raise ValueError(
                "trainer: it is closed; open another one"
                if self._closed
                else "trainer: it has no samples yet; give it data, a loader, or batches with fit()"
            )
        return self._handle

    def _describe(self) -> TrainerInfoStruct:
        check(lib.fdsl_trainer_describe(self._check_open(), self._info))
        return self._info

    # ---- Properties ----

    @property
    def variant(self) -> str:
        """The variant that trains."""
        return str(self._describe().variant.decode())

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self._describe().classes)

    @property
    def parameters(self) -> int:
        """The number of parameters of the network."""
        return int(self._describe().parameters)

    @property
    def memory_bytes(self) -> int:
        """The bytes that the variant uses for parameters, data and activations; on a GPU, of its memory."""
        return int(self._describe().memory_bytes)

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return int(self._describe().epoch)

    @property
    def epochs(self) -> int:
        """The number of epochs of the training run (the option epochs)."""
        return int(self._describe().epochs)

    @property
    def position(self) -> tuple[int, int]:
        """The steps of the current epoch that were begun, and the steps of an epoch."""
        info = self._describe()
        return int(info.step), int(info.steps)

    @property
    def batch(self) -> int:
        """The number of samples of this rank in the next step."""
        return int(self._describe().batch)

    @property
    def history(self) -> dict[str, float]:
        """The results of the latest completed epoch: train_loss, train_accuracy, test_loss, test_accuracy, epoch_s."""
        info = self._describe()
        return {name: float(getattr(info, name)) for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "epoch_s")}

    def __repr__(self) -> str:
        words = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"fdsl.Trainer({words})" + ("" if self._handle else " (not open)")

    def __reduce__(self) -> NoReturn:
        raise TypeError("fdsl.Trainer: it can be neither pickled nor copied; use save() and load()")

    # ---- Batches ----

    def _batch(self, images: Any, labels: Any, share: Optional[float]) -> tuple[TrainerBatchStruct, Optional[int], Any]:
        """Describes a batch: the struct, the CUDA stream of its memory, and what must stay alive until the call."""
        if self._own:
            raise ValueError("images: the trainer has its own samples; drop the option data to hand over batches")
        kind = kind_of("images", images)
        address, shape, dtype, device = kind.describe("images", images, False)
        kept: list[Any] = [images, labels]
        given = TrainerBatchStruct(ctypes.sizeof(TrainerBatchStruct))
        given.images, given.count, given.share = address, shape[0], 1 if share is None else share
        c = self._config
        declared = tuple(extent for extent in c.shape if extent)
        if tuple(shape[1:]) != declared or _DTYPES.get(dtype, "").encode() != c.dtype:
            raise ValueError(f"images: shape {tuple(shape)} of {dtype}; the trainer takes (count, *{declared}) of type {c.dtype.decode()}")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share: {share} is not above 0 and at most 1")
        rows = getattr(labels, "shape", ())
        if c.mixed and len(rows) == 2:
            if share is not None:
                raise ValueError("share: soft targets have it already; drop share, or give labels")
            labels, given.share = _unmixed(labels)
        if isinstance(labels, (list, tuple)):
            labels = (ctypes.c_int64 * len(labels))(*(integer("labels", label, -1, 1 << 20) for label in labels))
            kept.append(labels)
            given.labels, count = ctypes.addressof(labels), len(labels)
        else:
            wanted = "uint8" if c.multi_hot else "int64"
            at, extents, type_, where = kind_of("labels", labels).describe("labels", labels, False)
            if type_ != wanted or len(extents) != 1 + c.multi_hot:
                raise ValueError(f"labels: {len(extents)} axes of {type_}, not {1 + c.multi_hot} of {wanted}")
            if c.multi_hot and (where != CPU or extents[1] != c.classes):
                raise ValueError(f"labels: multi-hot labels must be on the CPU, with {c.classes} columns")
            if where != CPU and where != device and SOME_CUDA_DEVICE not in (where, device):
                raise ValueError(f"labels: they are on cuda:{where}, but the images are not; move one of them")
            count = extents[0]
            given.multi_hot, given.labels = (at, None) if c.multi_hot else (None, at)
        if count != shape[0]:
            raise ValueError(f"labels: there are {count}, but {shape[0]} images")
        stream: Optional[int] = None
        if device != CPU:
            if device not in (SOME_CUDA_DEVICE, c.device):
                raise ValueError(f"images: they are on cuda:{device}, but the trainer is on cuda:{c.device}")
            stream = kind.stream(images) or None
            order_arrays(c.device if device == SOME_CUDA_DEVICE else device, stream or 0, lambda: kind.owner(images), *kept[:2])
        return given, stream, kept

    def _declare_from(self, images: Any, labels: Any, samples: Optional[int], mixed: bool = False) -> None:
        """Opens the trainer for batches like this one."""
        _, shape, dtype, _ = kind_of("images", images).describe("images", images, False)
        mixed |= getattr(labels, "dtype", None) is not None and len(labels.shape) == 2 and "float" in str(labels.dtype)
        if samples is not None and not self._config.samples:
            self._config.samples = samples
        if not self._config.samples:
            raise ValueError("samples: give the number of samples of an epoch, which the learning rate and epochs depend on")
        if len(labels) and len(getattr(labels, "shape", ())) == 2 and self._classes is None:
            self._classes = int(labels.shape[1])
        self._declare(self._shape or tuple(shape[1:]), self._dtype or dtype, mixed)
        self._options.setdefault("batch", shape[0])
        self._open()

    # ---- Training ----

    def step(self, images: Any = None, labels: Any = None, *, share: Optional[float] = None, count: int = 1) -> Loss:
        """Runs a step on a batch, or `count` steps on the data or the loader, up to the end of the epoch; after the last step
        of an epoch, tests the network. Returns the loss, which is read when it is used: a step on a GPU is not waited for.

        images  (count, *shape): a PyTorch tensor, a CuPy or NumPy array, an fdsl.Array, or another array, on the CPU or on the
                trainer's device; the current stream of PyTorch or CuPy orders its memory
        labels  int64 (count,), -1: the sample does not count; or uint8 (count, classes), multi-hot; or float32
                (count, classes), the targets of a Loader with MixUp or CutMix, or of timm's Mixup in batch mode
        share   the samples are mixed already: weight of sample i; its partner is sample count - 1 - i

        Raises ValueError after the last epoch.
        """
        if images is not None:
            if labels is None:
                raise ValueError("labels: a batch needs them; give images and labels")
            if count != 1:
                raise ValueError(f"count: {count}, but a batch is one step; drop count")
            if not self._handle and not self._own:
                self._declare_from(images, labels, None, share is not None)
            self._check_open()
            given, stream, kept = self._batch(images, labels, share)
            status = lib.fdsl_trainer_step_batch(self._handle, given, stream)
            del kept
        else:
            if labels is not None or share is not None:
                raise ValueError("images: labels and share need them; give images and labels")
            left = most = integer("count", count, 1, (1 << 31) - 1)
            status = 0
            if self._loader is not None:
                self._loader._stream.check_open()
                self._describe()
                left, most = min(left, int(self._info.steps - self._info.step) or 1), 1
            while left and status in (0, PENDING):  # PENDING: the loader has no batch yet; a KeyboardInterrupt ends the wait
                status = lib.fdsl_trainer_step(self._check_open(), most)
                left -= most if status == 0 else 0
        if status == END:
            raise ValueError(f"count: all {self.epochs} epochs are trained; give the option epochs a larger number")
        check(status)
        _warn()
        return Loss(self)

    def fit(self, loader: Any = None, epochs: Optional[int] = None) -> None:
        """Trains until `epochs` are completed; None: the option epochs.

        loader  an fdsl.Loader; any iterable of (images, labels) with len(), such as a DataLoader of PyTorch, whose iterations
                are the epochs; or None: the data or the loader of the trainer

        A KeyboardInterrupt ends the training between two steps; fit() then continues there, except within an epoch of an
        iterable that is not an fdsl.Loader.
        """
        if not self._handle and epochs is not None:
            self._options.setdefault("epochs", integer("epochs", epochs, 1, 1 << 20))
        if loader is not None and self._own:
            raise ValueError("loader: the trainer has its own data; drop the option data, or the loader")
        if isinstance(loader, Loader):
            if self._handle and self._loader is not loader:
                raise ValueError("loader: the trainer trains on another one; open another trainer")
            if not self._handle:
                self._open_on(loader)
        elif loader is not None:
            self._fit_batches(loader, epochs)
            return
        info = self._describe()
        end = info.epochs if epochs is None else integer("epochs", epochs, 1, info.epochs)
        chunk = 1
        while self._describe().epoch < end:
            begin = time.monotonic()
            self.step(count=min(chunk, int(self._info.steps - self._info.step) or 1))
            chunk = min(2 * chunk, _CHUNK_MAX) if time.monotonic() - begin < _CHUNK_S else max(chunk // 2, 1)

    def _fit_batches(self, loader: Any, epochs: Optional[int]) -> None:
        dataset = getattr(loader, "dataset", None)
        if not hasattr(loader, "__len__"):
            raise TypeError(f"loader: a {type(loader).__name__} has no len(); give a list of batches or a DataLoader")
        if len(loader) == 0:
            raise ValueError("loader: it has no batch")
        if not self._handle:
            first = next(iter(loader), None)
            if first is None:
                raise ValueError("loader: it has no batch")
            images, labels = first
            samples = len(loader) * len(images) * self._config.world_size
            whole = not getattr(loader, "drop_last", False) and self._config.world_size == 1
            if whole and dataset is not None and hasattr(dataset, "__len__"):
                samples = len(dataset)
            elif whole and isinstance(loader, (list, tuple)):
                samples = sum(len(batch[0]) for batch in loader)
            self._declare_from(images, labels, samples)
        end = self.epochs if epochs is None else integer("epochs", epochs, 1, self.epochs)
        for _ in range(self.epoch, end):
            step, steps = self.position
            if step:
                raise ValueError(f"loader: {step} steps of the epoch are done; hand over its other batches with step(), then call fit()")
            count = 0
            for count, (images, labels) in enumerate(loader, 1):
                if count > steps:
                    break
                self.step(images, labels)
            if count != steps:
                raise ValueError(f"loader: an epoch has {steps} steps, but the loader gave {'more' if count > steps else count} batches")

    def read(self) -> Score:
        """Waits for all steps. Returns the means over the samples of the steps since the previous call, of all ranks."""
        check(lib.fdsl_trainer_read(self._check_open(), self._score))
        if self._score.samples:
            self._loss = self._score.loss
        return Score(self._score.loss, self._score.accuracy, self._score.samples)

    def evaluate(self, loader: Optional[Iterable[Any]] = None) -> Score:
        """Tests the network: on the test set of the data, or on an iterable of (images, labels), each batch with at most as many
        samples as the option batch. On several ranks, each tests its own batches."""
        if loader is None:
            check(lib.fdsl_trainer_evaluate(self._check_open(), self._score))
            return Score(self._score.loss, self._score.accuracy, self._score.samples, self._score.precision)
        loss = right = 0.0
        samples = 0
        for images, labels in loader:
            self._check_open()
            given, stream, kept = self._batch(images, self._host(labels), None)
            check(lib.fdsl_trainer_evaluate_batch(self._handle, given, stream, None, self._score))
            del kept
            samples += self._score.samples
            loss += self._score.loss * self._score.samples
            right += self._score.accuracy * self._score.samples
        if not samples:
            raise ValueError("loader: it has no batch")
        return Score(loss / samples, right / samples, samples)

    def _host(self, labels: Any) -> Any:
        """Returns labels in host memory."""
        if isinstance(labels, Array):
            return labels if labels._device == CPU else labels._copy(CPU)
        return labels.cpu() if hasattr(labels, "cpu") else labels.get() if hasattr(labels, "get") else labels

    # ---- Files and parameters ----

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of the current step into a folder, as the program does. Refuses a folder with one of a later step."""
        check(lib.fdsl_trainer_save(self._check_open(), _path("folder", folder)))
        _warn()

    def load(self, folder: Path) -> None:
        """Continues from the latest checkpoint in a folder, bit for bit, also from one of the program with the same options.
        Give the same loader: its samples are not compared."""
        check(lib.fdsl_trainer_load(self._check_open(), _path("folder", folder)))
        _warn()

    def export(self, path: Path) -> None:
        """Writes the parameters as safetensors, with the names of torchvision or timm."""
        check(lib.fdsl_trainer_export(self._check_open(), _path("path", path)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the parameters by the names of torchvision or timm: tensors of PyTorch if it is imported, else NumPy arrays.
        If the trainer averages them (the option ema), it is the averages. On several ranks, all ranks call it; only rank 0
        gets them, the others an empty dict."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "parameters.safetensors")
            self.export(path)
            if not os.path.exists(path):
                return {}
            with open(path, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header, data = json.loads(file.read(size)), bytearray(file.read())
        header.pop("__metadata__", None)
        torch, result = sys.modules.get("torch"), {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if torch is not None and hasattr(torch, "frombuffer"):
                values = torch.frombuffer(data, dtype=torch.float32, count=(end - begin) // 4, offset=begin)
            else:
                import numpy

                values = numpy.frombuffer(data, numpy.float32, (end - begin) // 4, begin)
            result[name] = values.reshape(entry["shape"])
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the parameters, between two epochs, by those of state_dict() of a trainer, or of the same network of
        torchvision or timm. Clears the moments of the optimizer."""
        import numpy

        header: dict[str, Any] = {}
        parts, at = [], 0
        for name, values in state.items():
            array = numpy.ascontiguousarray(_numpy(name, values), dtype=numpy.float32)
            header[name] = {"dtype": "F32", "shape": list(numpy.shape(values)), "data_offsets": [at, at + array.nbytes]}
            parts.append(array.tobytes())
            at += array.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "parameters.safetensors")
            with open(path, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
            check(lib.fdsl_trainer_import(self._check_open(), os.fsencode(path)))
        _warn()

    def close(self) -> None:
        """Waits for the steps, and frees the trainer."""
        handle, self._handle, self._closed = self._handle, 0, True
        if handle:
            lib.fdsl_trainer_close(handle)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, close: Any = lib.fdsl_trainer_close) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            close(handle)  # does nothing in a forked child
