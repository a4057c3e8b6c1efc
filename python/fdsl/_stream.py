"""Data sets, the transforms of their images, and the Loader: batches in memory of the library."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from _thread import allocate_lock
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, NoReturn, Optional, Union

from ._array import Array, _Memory, device_name
from ._generator import _NAMES, _device, _dtype, _path, _per_channel, _text
from ._library import (
    CPU, END, IMAGES, LABELS, MASKS, PENDING, ROWS, TARGETS, WAIT_S, BatchInfoStruct, Error, SourceConfigStruct,
    SourceInfoStruct, StateStruct, StatsStruct, StreamConfigStruct, StreamInfoStruct, TensorStruct, check, fail,
    integer, lib, open_source, reopen,
)  # fmt: skip
from ._memory import check_kind, kind_of, order_arrays, stream_pointer

Path = Union[str, "os.PathLike[str]"]
Scale = Union[None, float, Sequence[float]]
Range = Union[float, tuple[float, float]]

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_process = os.getpid()
_HELD = 2  # batches that the caller uses without a copy: the one of the loop, and the previous one


def _after_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)  # asking the system for each batch takes longer


def _warn() -> None:
    """Issues the warnings of the library's latest call, at the line that called this package."""
    text = lib.fdsl_warnings()
    if not text:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "fdsl":
        frame, level = frame.f_back, level + 1
    for line in text.decode(errors="replace").splitlines():
        warnings.warn(line, RuntimeWarning, stacklevel=level)


def _bytes(name: str, value: Union[None, int, str]) -> int:
    """Returns a number of bytes: an int, or a str such as "200G" (1024^3 bytes each); None: 0."""
    if value is None:
        return 0
    factor = 1
    if isinstance(value, str):
        digits, unit = (value[:-1], value[-1].upper()) if value[-1:].upper() in ("K", "M", "G", "T") else (value, "")
        if not digits.isdecimal():
            raise ValueError(f'{name}: {value!r} is not a number of bytes such as 1000000 or "200G"')
        value, factor = int(digits), 1024 ** " KMGT".index(unit or " ")
    return integer(name, integer(name, value, 1, _U64) * factor, 1, _U64)


def named(path: Any) -> bytes:
    """Returns the path of a file, which must have a name."""
    name = _path("path", path)
    if not name:
        raise ValueError("path: it is empty") if name == b"" else TypeError("path: it must be a path, not None")
    return name


# ---- Data sets ----


class _Source:
    """What all data sets share."""

    __slots__ = ("_handle", "_process", "_arguments", "_info", "__weakref__")
    _kind = b"auto"
    _rows = False  # whether the samples are rows instead of images
    labelled = True  # whether the samples have labels
    dtype: Optional[str] = None  # the element type of the samples, if the data set itself has one

    def _open_path(self, path: Any, **arguments: Any) -> None:
        c = SourceConfigStruct()
        check(lib.fdsl_source_config_init(c, ctypes.sizeof(c)))
        c.path, c.kind = named(path), self._kind
        for field in "image", "label":
            value = arguments.get(field)
            setattr(c, field, None if value is None else _text(field, value))
        c.cache_dir = _path("cache_dir", arguments.get("cache_dir"))
        c.labels = _path("labels", arguments.get("labels"))
        c.cache_bytes = _bytes("cache_bytes", arguments.get("cache_bytes"))
        begin = lib.fdsl_source_begin  # opens in a thread of the library, so that a KeyboardInterrupt ends it
        self._open(lambda handle: begin(c, handle) or PENDING, {"path": path, **arguments})

    def _open(self, function: Callable[[Any], int], arguments: dict[str, Any]) -> None:
        self._handle, self._process, self._arguments = open_source(function).value or 0, os.getpid(), arguments
        self._info = SourceInfoStruct(ctypes.sizeof(SourceInfoStruct))
        check(lib.fdsl_source_describe(self._handle, self._info))
        _warn()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise Error("source: it was opened before fork(); open another one in this process")
        if not self._handle:
            raise ValueError("source: it is closed")

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their labels; empty if the classes have no names."""
        self._check_open()
        return [lib.fdsl_source_class(self._handle, i).decode(errors="replace") for i in range(self._info.classes)]

    @property
    def nbytes(self) -> int:
        """The size of all samples in bytes."""
        return int(self._info.bytes)

    def __len__(self) -> int:
        """Returns the number of samples."""
        return int(self._info.samples)

    def __repr__(self) -> str:
        shown = ((name, value) for name, value in self._arguments.items() if value is not None)
        words = [repr(value) if name == "path" else f"{name}={value!r}" for name, value in shown]
        return f"fdsl.{type(self).__name__}({', '.join(words)}){'' if self._handle else ' (closed)'}"

    def close(self) -> None:
        """Closes the data set. Loaders that use it keep it open. Closing again does nothing."""
        self.__del__()

    def __enter__(self) -> Any:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, close: Any = lib.fdsl_source_close) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0  # 0 if the constructor failed
        if handle:
            close(handle)  # does nothing in a forked child

    def _set_format(self, c: StreamConfigStruct, transforms: Any, dtype: Any, channels: Any, layout: Any) -> None:
        """Sets the fields of a stream that describe its samples."""
        c.channels = 3 if channels is None else integer("channels", channels, 0, _U32)
        if c.channels not in (1, 3):
            raise ValueError(f"channels: {channels} is neither 1 nor 3")
        c.layout = b"nchw" if layout is None else _text("layout", layout)
        c.dtype = b"u8" if dtype is None else _dtype(dtype).encode()
        _set_transforms(c, transforms)
        if channels is None and not c.out_res:
            c.channels = 0  # those of the images

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return reopen, (type(self), self._arguments)


class Shards(_Source):
    """A data set in shards: the .tar files of a folder or of a URL, such as webdataset writes them, or an MDS set of
    MosaicML's streaming.

    path                      a folder, one shard, a wids index (.json), or a URL: https://, s3://, gs://, file://; on a web server,
                              the URL names the shards, as in "https://host/path/train-{000..146}.tar", or the index
    image                     extensions of the image of a sample, or patterns such as "*_rgb.png", separated by ";"; in an
                              MDS set, columns. None: all known formats
    label                     where the label is: an extension, "json:FIELD", or several of them, separated by ";"; None: the
                              first of "cls", "json:label" and "txt". If the labels are words, a label is the number of its
                              word in the sorted list `classes`
    cache_dir                 for URLs: a folder for copies of the shards; None: blocks of 1 MiB are held in memory, up to
                              1 GiB, or what the shuffle windows need if that is more.
                              Shards that are compressed (.tar.gz, .tgz, .tar.zst, .tzst), also those in a folder, are
                              unpacked into it; None: in memory, in each process
    cache_bytes               maximum size of cache_dir, such as 10**12 or "200G"; None: unlimited. What was not used for the
                              longest time is removed first
    labels                    a CSV file with the labels, in place of `label`: its columns `name` (key or file of a sample)
                              and `label` (an integer, or in all lines a word)

    Opening lists the samples, and reads the first and last bytes of each. `len()` is the number of samples.
    Raises ValueError or TypeError, whose message names the argument; Error if a shard cannot be read; Unavailable if a
    library is missing. Thread-safe. Several loaders may share a data set. Pickling stores the arguments; unpickling opens
    the data set again.
    """

    __slots__ = ()
    _kind = b"shards"

    def __init__(
        self, path: Path, *, image: Optional[str] = None, label: Optional[str] = None, cache_dir: Optional[Path] = None,
        cache_bytes: Union[None, int, str] = None, labels: Optional[Path] = None,
    ) -> None:  # fmt: skip
        self._open_path(path, image=image, label=label, cache_dir=cache_dir, cache_bytes=cache_bytes, labels=labels)


class Folder(_Source):
    """A data set in class folders: path/CLASS/IMAGE, as for ImageFolder of torchvision. The label of an image is the
    number of its class folder, in the order of the names, or `labels` has it. See Shards for everything else.
    """

    __slots__ = ()
    _kind = b"folder"

    def __init__(self, path: Path, *, labels: Optional[Path] = None) -> None:
        self._open_path(path, labels=labels)


# ---- Transforms ----


class Resize(NamedTuple):
    """Resizes the whole image to size x size pixels; a rectangle becomes a square.

    flip: mirror each image horizontally with probability 1/2. mean, std: None, one number, or one per channel: values of a
    float dtype are (byte / 255 - mean) / std. exact: decode JPEG files at their full size, as GPUs do; otherwise at 1/2, 1/4
    or 1/8 of their size if that is still larger than the output, which is faster and gives slightly different values. These
    four have the same meaning in all transforms.
    """

    size: int
    flip: bool = False
    mean: Scale = None
    std: Scale = None
    exact: bool = False


class CenterCrop(NamedTuple):
    """Resizes the image until its shorter side has size * 256 / 224 pixels, and cuts out the centre: the usual test images
    of ImageNet. For flip, mean, std and exact, see Resize."""

    size: int
    flip: bool = False
    mean: Scale = None
    std: Scale = None
    exact: bool = False


class RandomResizedCrop(NamedTuple):
    """Cuts out a random part, as RandomResizedCrop of torchvision does, and resizes it to size x size pixels. scale: the
    range of its area, as a fraction of the image. ratio: the range of its width / height, from 1/7 to 7. The part is another
    one in each epoch. It depends only on the seed, the epoch and the sample. For flip, mean, std and exact, see Resize."""

    size: int
    flip: bool = False
    mean: Scale = None
    std: Scale = None
    exact: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


class RandAugment(NamedTuple):
    """Changes each image by num_ops random operations, after the crop and the flip. magnitude: 0 to 30, as in RandAugment of
    torchvision; or a policy as text: timm's, such as "rand-m9-mstd0.5-inc1", or "pdp2026-m28". The part n of a policy replaces
    num_ops. The operations are those of fdsl-bench --rand-augment, with the same bits; the CPU applies them."""

    num_ops: int = 2
    magnitude: Union[float, str] = 9


class ColorJitter(NamedTuple):
    """Changes brightness, contrast, saturation and hue in random order, with probability p, after RandAugment: ColorJitter of
    torchvision. A number x is the range from max(0, 1 - x) to 1 + x, for the hue from -x to x; (low, high) is a range.
    Brightness, contrast and saturation have the values of PIL images, and hue those of tensors, to 1. The changes are those
    of fdsl-bench --color-jitter, with the same bits on CPUs and GPUs. Images of one channel have only the first two."""

    brightness: Range = 0
    contrast: Range = 0
    saturation: Range = 0
    hue: Range = 0
    p: float = 1.0


class RandomGrayscale(NamedTuple):
    """Makes an image gray with probability p, after ColorJitter: all channels have the luma of a PIL image."""

    p: float = 0.1


class GaussianBlur(NamedTuple):
    """Blurs an image with probability p, after RandomGrayscale: GaussianBlur of torchvision, to 1. kernel_size: side of the
    kernel in pixels, odd, 1 to 63. sigma: the standard deviation in pixels, or (low, high), from which it is drawn."""

    kernel_size: int
    sigma: Range = (0.1, 2.0)
    p: float = 1.0


class RandomErasing(NamedTuple):
    """Fills a random rectangle of an image with normal noise, after normalising, with probability p: 2 % to 33 % of the
    area. The rectangles and the noise are those of fdsl-bench --erasing, with the same bits."""

    p: float = 0.5


class MixUp(NamedTuple):
    """Mixes each image with another one of its step: share * image + (1 - share) * other, where the share of a step is drawn
    from Beta(alpha, alpha). In a step of N images of all ranks, image i is mixed with image N - 1 - i. The labels become
    targets: float32 of shape (count, classes), with the weight of each class, as cross_entropy() of PyTorch takes them. The
    part of a masked image has the weight 0.

    num_classes: number of classes of the targets; None: those that the data set names. An image with a larger label is one
    that cannot be decoded (on_error). The mixtures are those of fdsl-bench --mixup, with the same bits. On several ranks, each
    rank also decodes the images of another one.
    """

    alpha: float = 1.0
    num_classes: Optional[int] = None


class CutMix(NamedTuple):
    """Replaces a rectangle of each image by that of another one of its step. The rectangle is drawn once per step; its area,
    as a share of the image, is drawn from Beta(alpha, alpha). If both MixUp and CutMix are given, each step draws one of the
    two. For everything else, see MixUp."""

    alpha: float = 1.0
    num_classes: Optional[int] = None


Transform = Union[
    Resize, CenterCrop, RandomResizedCrop, RandAugment, ColorJitter, RandomGrayscale, GaussianBlur, RandomErasing, MixUp, CutMix
]
Transforms = Union[None, Transform, Sequence[Transform]]
_ORDER = (Resize, RandAugment, ColorJitter, RandomGrayscale, GaussianBlur, RandomErasing, MixUp, CutMix)
_FITS = {Resize: b"resize", CenterCrop: b"center-crop", RandomResizedCrop: b"random-resized-crop"}


def _set_transforms(c: StreamConfigStruct, transforms: Any) -> None:
    """Sets the fields of the transforms: one of _FITS, and at most one of each other kind, in the order of _ORDER."""
    many = isinstance(transforms, (list, tuple)) and not hasattr(transforms, "_fields")
    order: list[type] = []
    for transform in transforms if many else [] if transforms is None else [transforms]:
        kind = type(transform)
        if kind in _FITS:
            _set_fit(c, transform)
        elif kind is RandAugment:
            c.rand_augment_ops = integer("transforms: num_ops", transform.num_ops, 1, 16)
            if isinstance(transform.magnitude, str) and transform.magnitude.startswith(("rand", "pdp2026")):
                c.rand_augment_policy = transform.magnitude.encode()
            else:
                c.rand_augment = number("transforms: magnitude", transform.magnitude, 0, 30)
        elif kind is ColorJitter:
            _set_jitter(c, transform)
        elif kind is RandomGrayscale:
            c.grayscale_p = number("transforms: p", transform.p, 0, 1)
        elif kind is GaussianBlur:
            c.blur_kernel = integer("transforms: kernel_size", transform.kernel_size, 1, 63)
            c.blur_sigma[:] = _range("transforms: sigma", transform.sigma, 0.01, 100)
            c.blur_p = number("transforms: p", transform.p, 0, 1)
        elif kind is RandomErasing:
            c.erasing = number("transforms: p", transform.p, 0, 1)
            if c.erasing and c.dtype == b"u8":
                raise ValueError('dtype: the noise of RandomErasing is normalised; set dtype to "float32", "float16" or "bfloat16"')
        elif kind in (MixUp, CutMix):
            _set_mixing(c, transform)
        elif kind.__name__ in ("MixUp", "Mixup", "CutMix"):
            raise TypeError(f"transforms: {kind.__name__} of {kind.__module__} is unknown here; use fdsl.MixUp or fdsl.CutMix")
        else:
            raise TypeError(
                "transforms: it must be None, or one or several of fdsl.Resize, CenterCrop, RandomResizedCrop, RandAugment, "
                "ColorJitter, RandomGrayscale, GaussianBlur, RandomErasing, MixUp and CutMix, "
                f"not {kind.__name__} of {kind.__module__}"
            )
        order.append(Resize if kind in _FITS else kind)
    if order != [kind for kind in _ORDER if kind in order]:
        raise ValueError(
            f"transforms: give one size or crop, then {', '.join(kind.__name__ for kind in _ORDER[1:-1])} and CutMix, each at "
            "most once"
        )


def _range(name: str, value: Any, least: float, most: float) -> list[float]:
    """Returns the two ends of a range, which may be a number."""
    ends = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(ends) != 2:
        raise ValueError(f"{name}: it must be a number or (low, high)")
    low, high = (number(name, end, least, most) for end in ends)
    if low > high:
        raise ValueError(f"{name}: {low:g} is larger than {high:g}; give (low, high)")
    return [low, high]


def _set_jitter(c: StreamConfigStruct, transform: ColorJitter) -> None:
    changes = False
    for field, middle, least, most in (
        ("brightness", 1, 0, 10), ("contrast", 1, 0, 10), ("saturation", 1, 0, 10), ("hue", 0, -0.5, 0.5),
    ):  # fmt: skip
        value = getattr(transform, field)
        if not isinstance(value, (list, tuple)):
            strength = number(f"transforms: {field}", value, 0, most - middle)
            value = max(least, middle - strength), middle + strength
        ends = _range(f"transforms: {field}", value, least, most)
        getattr(c, field)[:] = ends
        changes |= ends != [middle, middle]
    c.color_jitter_p = number("transforms: p", transform.p, 0, 1)
    if not changes:
        raise ValueError("transforms: ColorJitter changes nothing; give it brightness, contrast, saturation or hue")


def _set_mixing(c: StreamConfigStruct, transform: Any) -> None:
    alpha = number("transforms: alpha", transform.alpha, 0, 1000)
    if alpha == 0:
        raise ValueError(f"transforms: alpha: it is 0; leave out {type(transform).__name__}")
    if isinstance(transform, MixUp):
        c.mixup = alpha
    else:
        c.cutmix = alpha
    if transform.num_classes is None:
        return
    classes = integer("transforms: num_classes", transform.num_classes, 2, 1 << 24)
    if c.classes not in (0, classes):
        raise ValueError(f"transforms: num_classes: it is {c.classes} in MixUp and {classes} in CutMix; give both the same")
    c.classes = classes


def _set_fit(c: StreamConfigStruct, transform: Any) -> None:
    c.fit, c.out_res = _FITS[type(transform)], integer("transforms: size", transform.size, 1, 16384)
    c.flip, c.exact_resize = flag("transforms: flip", transform.flip), flag("transforms: exact", transform.exact)
    if isinstance(transform, RandomResizedCrop):
        c.crop_scale[:] = _range("transforms: scale", transform.scale, 1e-4, 1)
        c.crop_ratio[:] = _range("transforms: ratio", transform.ratio, 1 / 7, 7)
    for name, field, value in ("mean", c.mean, transform.mean), ("std", c.std, transform.std):
        if value is not None:
            values = _per_channel(f"transforms: {name}", value, c.channels)
            least, most = (1e-6, 1e6) if name == "std" else (-1e6, 1e6)
            field[: c.channels] = [number(f"transforms: {name}", one, least, most) for one in values]
    if c.dtype == b"u8" and (transform.mean is not None or transform.std is not None):
        raise ValueError('dtype: uint8 images are not normalised; set dtype to "float32", "float16" or "bfloat16"')


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: it must be a bool, not {type(value).__name__}")
    return value


def number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name}: it must be a number, not {type(value).__name__}")
    result = float(value)  # type: ignore[arg-type]
    if not least <= result <= most:
        raise ValueError(f"{name}: {result:g} is out of range; it must be {least:g} to {most:g}")
    return result


# ---- The stream of the library ----


class _BatchMemory(_Memory):
    """The memory of a batch, which goes back to its stream with the object. It exists before the library stores the batch
    in `handle`, so that a KeyboardInterrupt loses no batch. A batch that the library does not take back, for example while
    the default stream is being captured, goes back later."""

    __slots__ = ("handle", "live", "size", "masked")
    size: int  # samples, and how many of them are masked
    masked: int
    _refused: deque[tuple[int, int, bool, int]] = deque()  # batch, device, shared, process

    def __init__(self, device: int, live: dict[int, None]) -> None:
        self.device, self.pointer, self.process = device, 0, _process
        self.shared, self.live, self.handle = False, live, ctypes.c_void_p()

    def __del__(self, free: Any = lib.fdsl_batch_release, getpid: Any = os.getpid, allocate: Any = _Memory) -> None:
        batch = self.handle.value
        if batch and getpid() == self.process:
            self.live.pop(batch, None)
            self._give_back((batch, self.device, self.shared, self.process), free, allocate)

    @classmethod
    def _give_back(cls, given: tuple[int, int, bool, int], free: Any, allocate: Any) -> None:
        batch, device, shared, _ = given
        refused = True
        try:
            if shared:
                allocate(device, 1)  # CUDA waits for the work on all streams when it frees this memory
            refused = bool(free(batch, None))
        finally:
            if refused:
                cls._refused.append(given)

    @classmethod
    def retry(cls) -> None:
        """Gives back the batches that were refused."""
        for _ in range(len(cls._refused)):
            given = cls._refused.popleft()
            if given[-1] == os.getpid():
                cls._give_back(given, lib.fdsl_batch_release, _Memory)


class _Stream:
    """Calls the functions of a stream, with a lock. close() may be called by any thread."""

    def __init__(self, source: _Source, config: StreamConfigStruct) -> None:
        source._check_open()
        handle = ctypes.c_void_p()
        self._handle = 0
        self._process = _process
        self._lock = allocate_lock()
        self._closing = allocate_lock()  # keeps the handle valid while close() uses it without the other lock
        self._live: dict[int, None] = {}  # batches that the caller has
        try:  # opens in a thread of the library, so that a KeyboardInterrupt ends it
            check(lib.fdsl_stream_begin(source._handle, config, handle))
            while (status := int(lib.fdsl_stream_wait(handle, WAIT_S))) == PENDING:
                pass
            check(status)
        except BaseException:
            lib.fdsl_stream_close(handle)
            raise
        self._handle = handle.value or 0
        self._count, self._tensor = ctypes.c_uint32(), TensorStruct()
        self._batch = BatchInfoStruct(ctypes.sizeof(BatchInfoStruct))
        self.masks = config.on_error == b"mask"
        self.info = StreamInfoStruct(ctypes.sizeof(StreamInfoStruct))
        check(lib.fdsl_stream_describe(self._handle, self.info))
        self.device = int(config.device)
        self.shape = tuple(extent for extent in self.info.shape if extent)
        own = config.dtype in (b"u8", b"auto") and source.dtype
        self.dtype = own or _NAMES[config.dtype.decode()]
        # Axis 1 is one of the sides in both layouts; images that have their own layout are square.
        pixels = int(self.info.mask_bytes)
        side = self.shape[1] if pixels else 1
        sides = (pixels // side, side) if config.layout == b"nhwc" else (side, pixels // side)
        # (height, width), or (classes,) of multi-hot labels; None: there are no masks
        self.mask_shape: Optional[tuple[int, ...]] = (pixels,) if self.info.multi_hot else sides if pixels else None
        self.labelled = source.labelled and not self.mask_shape
        self.field = ROWS if source._rows else IMAGES
        self.classes = int(self.info.classes)  # of the targets; 0: there are none
        # the shape per sample and the element type of each part of a batch
        self._parts: dict[int, tuple[tuple[int, ...], str]] = {
            self.field: (self.shape, self.dtype), LABELS: ((), "int64"), TARGETS: ((self.classes,), "float32"),
            MASKS: (self.mask_shape or (), "uint8"),
        }  # fmt: skip

    def check_open(self) -> None:
        if _process != self._process:  # checked before locking, because the parent may have held the lock at fork()
            raise Error(
                "loader: it was opened before fork(); open another one in this process, or iterate over the loader "
                "itself, without torch.utils.data.DataLoader"
            )
        if not self._handle:
            raise ValueError("loader: it is closed")

    def _await(self, function: Any, *arguments: Any) -> int:
        """Calls a function that takes the next batch until there is one. Returns its status, FDSL_OK or FDSL_END."""
        status: int = PENDING
        while status == PENDING:  # after WAIT_S
            if _process != self._process:
                self.check_open()
            with self._lock:
                if not self._handle:
                    self.check_open()
                status = function(self._handle, *arguments)
        if status and status != END:
            if self._closing.locked():  # close() has cancelled the wait
                raise ValueError("loader: it is closed")
            fail(status)
        return status

    def next(self) -> Optional[_BatchMemory]:
        """Returns the next batch, for which CUDA's default stream waits; None at the end of an epoch."""
        if _BatchMemory._refused:
            _BatchMemory.retry()
        memory = _BatchMemory(self.device, self._live)
        if self._await(lib.fdsl_stream_next, None, memory.handle) == END:
            return None
        handle, info = memory.handle.value, self._batch
        self._live[handle] = None  # type: ignore[index]
        check(lib.fdsl_batch_describe(handle, info))
        memory.size, memory.masked = info.count, info.masked
        if memory.masked:
            _warn()
        return memory

    def fill(
        self, images: int, labels: Optional[int], stream: Optional[int], targets: Optional[int] = None,
        masks: Optional[int] = None,
    ) -> Optional[int]:  # fmt: skip
        """Copies the next batch to addresses, on a CUDA stream. Returns the number of samples; None at the end of an epoch."""
        if masks is not None:
            status = self._await(lib.fdsl_stream_fill_masks, images, masks, self._count, stream)
        elif targets is None:
            status = self._await(lib.fdsl_stream_fill, images, labels, self._count, stream)
        else:
            status = self._await(lib.fdsl_stream_fill_targets, images, labels, targets, self._count, stream)
        if status == END:
            return None
        if self.masks:
            _warn()
        return int(self._count.value)

    def array(self, batch: _BatchMemory, field: int) -> Array:
        """Returns a part of a batch: without a copy, unless the caller has several batches already."""
        tensor, device, (shape, dtype) = self._tensor, self.device, self._parts[field]
        check(lib.fdsl_batch_tensor(batch.handle, field, tensor))
        array = Array((batch.size, *shape), dtype, device, 0, None, batch, tensor.data)
        copied = len(self._live) > _HELD or (field == LABELS and device == CPU)  # a copy of labels does not keep the samples
        return array._copy(device) if copied else array

    def call(self, function: Any, *arguments: Any) -> None:
        self.check_open()
        with self._lock:
            self.check_open()
            check(function(self._handle, *arguments))

    def close(self) -> None:
        if os.getpid() != self._process:
            self._handle = 0
            return
        with self._closing:
            if self._handle:
                lib.fdsl_stream_cancel(self._handle)  # ends a wait of another thread
                with self._lock:
                    self.__del__()

    def __del__(self, close: Any = lib.fdsl_stream_close) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            close(handle)  # does nothing in a forked child


# ---- The loader ----


class _Known:
    """The arguments of a call of Loader.fill(), which were checked. `given` is its argument `stream`; `stream` returns the
    address of the CUDA stream."""

    __slots__ = ("arrays", "addresses", "given", "stream", "again")

    def __init__(
        self, arrays: tuple[Any, Any, Any, Any], addresses: tuple[int, Optional[int], Optional[int], Optional[int]],
        given: Any, stream: Callable[[], Optional[int]], again: Optional[Callable[[], bool]],
    ) -> None:  # fmt: skip
        self.arrays, self.addresses, self.given, self.stream, self.again = arrays, addresses, given, stream, again

    def holds(self, arrays: tuple[Any, Any, Any, Any]) -> bool:
        """Returns whether these are the same arrays, and nothing that was checked has changed. They are then written."""
        a, b, c, d = self.arrays
        return (
            a is arrays[0] and b is arrays[1] and c is arrays[2] and d is arrays[3] and self.again is not None and self.again()
        )


class Loader:
    """An iterable of (images, labels): the samples of a data set, prepared ahead by threads of the library.

    source            an fdsl.Shards, fdsl.Folder, fdsl.Images or fdsl.Embeddings, opened in this process
    batch_size        images per batch and rank
    device            where the batches are: "cpu", "cuda:1" or a CUDA device number; "cuda": PyTorch's current device if
                      PyTorch is imported, else device 0
    decoder           who decodes JPEG files for a CUDA device: "hardware" (the engines of the GPU) or "hybrid" (nvJPEG's
                      kernels), each together with the threads; "cpu": only the threads, with the bits of batches on the
                      CPU; "auto": the first of these that is there
    device_share      share of the samples whose files that decoder takes, 0 to 1; None: 0.85 of the engines, 0.25 of kernels
    rank              number of this process, below world_size; never taken from the environment
    world_size        number of processes
    seed              seed of the order and of all random transforms, 0 to 2^64 - 1
    shuffle           False: the order of the files
    shuffle_buffer    number of samples in all shuffle windows together
    lanes             number of places of the data set that are read at the same time
    drop_last         leave out the last batch of an epoch if it is not full
    num_threads       threads that read and decode, 1 to 8192; None: OMP_NUM_THREADS, else all that the process may use
    prefetch          number of batches that are prepared ahead, 1 to 1024
    transforms        fdsl.Resize, fdsl.CenterCrop or fdsl.RandomResizedCrop, also in a list, before fdsl.RandAugment,
                      fdsl.RandomErasing, fdsl.MixUp and fdsl.CutMix; without a size or crop, all images have one size
                      and number of channels already
    dtype             "uint8" (None), "float16", "bfloat16", "float32", "u8", "f16", "bf16", "f32", or a dtype of PyTorch or
                      NumPy
    channels          3 (RGB) or 1 (gray); None: 3 with a size or crop, else those of the images
    layout            "nchw" (None) or "nhwc"
    on_error          an image or label that cannot be decoded: "fail" raises an Error; "mask" gives it zeros and the label
                      -1, with a RuntimeWarning for each of the first 8 such batches
    resident_bytes    host memory of this rank that keeps the files of the first samples, as many as fit, after they were
                      read, such as 10**10 or "200G"; the rest is read in each epoch. "all": all files; None: none. The
                      batches stay the same
    resident_device_bytes
                      the same for memory of the CUDA device, which keeps decoded images; those of random crops are whole, and
                      need a number of bytes. Not with RandAugment, which CPU threads apply
    resident          rows on a device: copy them to its memory once, as many as fit
    axes              of clips, arrays of bytes of the shape (channels, frames, height, width): "cthw" (None), "tchw" or "thwc"

    decoder, device_share, shuffle_buffer, lanes, transforms, channels, layout, axes, resident_bytes, resident_device_bytes and
    on_error are for fdsl.Folder and fdsl.Shards. fdsl.Images and fdsl.Embeddings take none of them: an epoch of theirs is a permutation of all samples.
    fdsl.Images has its own format, and does not take dtype either. An item of fdsl.Embeddings is a pair of the rows, of
    shape (count, width), and their labels, or None if they have none.

    Each item is a pair of fdsl.Array on the device: images of shape (count, *loader.shape), and int64 labels of shape
    (count,). With MixUp or CutMix, the second is the targets, float32 of shape (count, classes), instead of the labels. If
    the samples have masks, it is the masks, uint8 of shape (count, height, width): those of fdsl.Images with the formula
    "segrcdb", and the members mask.png of a prepared set, cut out and mirrored like the images. A masked sample has a mask
    of 255, for ignore_index=255. Multi-hot labels, uint8 of shape (count, classes), take the place of masks: those of
    "multifractal", and the members multihot.npy of a prepared set. The caller may keep and change both. NumPy, CuPy, JAX, PyTorch and others use their memory without a copy. On CUDA, DLPack
    makes the stream of the consumer wait for the batch. For PyTorch, fdsl.torch.Loader is faster.

    The order of an epoch is a function of the seed and the epoch alone: the same for any number of threads and ranks, for
    class folders and shards of the same samples, and in the program fdsl-bench. All ranks have the same number of
    batches, and each sample occurs once per epoch. In the last batch of an epoch, a rank may have fewer images than the
    others, or none.

    Each iteration is one epoch. The next iteration is the next epoch, unless set_epoch() was called. If the caller leaves
    an epoch early, the next iteration repeats this epoch from its start; the threads and buffers stay.
    A new iteration ends the previous one.

    Not thread-safe, except close(). Raises ValueError or TypeError, whose message names the argument; Unavailable if the
    build or the machine lacks the device or the decoder; and Error if a sample cannot be read, with the file and the
    reason, in a forked process, or in a worker of PyTorch's DataLoader. Ctrl-C ends a wait. Pickling stores the arguments
    and the position; unpickling opens the loader again, and it continues there, as after load_state_dict().
    """

    _label_of_masked = -1

    def __init__(
        self,
        source: Any,
        batch_size: int = 256,
        *,
        device: Any = "cpu",
        decoder: str = "auto",
        device_share: Optional[float] = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 16384,
        lanes: int = 64,
        drop_last: bool = False,
        num_threads: Optional[int] = None,
        prefetch: int = 2,
        transforms: Transforms = None,
        dtype: Any = None,
        channels: Optional[int] = None,
        layout: Optional[str] = None,
        on_error: str = "fail",
        resident_bytes: Union[None, int, str] = None,
        resident_device_bytes: Union[None, int, str] = None,
        resident: bool = False,
        axes: Optional[str] = None,
    ) -> None:
        words = {name: value for name, value in locals().items() if name not in ("self", "source")}
        if not isinstance(source, _Source):
            raise TypeError(
                "source: it must be a data set, such as fdsl.Folder, fdsl.Shards, fdsl.Images or fdsl.Embeddings, not "
                f"{type(source).__name__}"
            )
        c = StreamConfigStruct()
        check(lib.fdsl_stream_config_init(c, ctypes.sizeof(c)))
        c.batch_size = integer("batch_size", batch_size, 1, (1 << 31) - 1)
        c.device, c.decoder = _device(device), _text("decoder", decoder)
        c.device_share = -1 if device_share is None else number("device_share", device_share, 0, 1)
        c.world_size = integer("world_size", world_size, 1, 1 << 24)
        c.rank = integer("rank", rank, 0, c.world_size - 1)
        c.seed = integer("seed", seed, 0, _U64)
        c.shuffle, c.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        c.shuffle_buffer = integer("shuffle_buffer", shuffle_buffer, 1, (1 << 31) - 1)
        c.lanes = integer("lanes", lanes, 1, 1 << 20)
        c.num_threads = 0 if num_threads is None else integer("num_threads", num_threads, 1, 8192)
        c.prefetch, c.held, c.wait_s = integer("prefetch", prefetch, 1, 1024), _HELD, WAIT_S
        c.on_error = _text("on_error", on_error)
        c.resident_bytes = _U64 if resident_bytes == "all" else _bytes("resident_bytes", resident_bytes)
        kept = resident_device_bytes
        c.resident_device_bytes = _U64 if kept == "all" else _bytes("resident_device_bytes", kept)
        c.resident = flag("resident", resident)
        c.axes = b"cthw" if axes is None else _text("axes", axes)
        source._set_format(c, transforms, dtype, channels, layout)
        self.source = source
        self.batch_size, self.rank, self.world_size = c.batch_size, c.rank, c.world_size
        as_int = ("batch_size", "rank", "world_size", "seed", "shuffle_buffer", "lanes", "prefetch")
        self._arguments: dict[str, Any] = {
            **words, **{name: getattr(c, name) for name in as_int},
            "device": device_name(c.device), "dtype": None if dtype is None else _NAMES[_dtype(dtype)],
        }  # fmt: skip
        self._stream = _Stream(source, c)
        _warn()
        self._epoch = self._step = 0  # position of the next batch that the caller receives
        self._resumed = False  # whether the next iteration begins at _step
        self._filling = False  # whether the library's position counts, not the one above: fill() was called last
        self._iteration = 0  # the number of the latest iteration
        self._filled: dict[int, Any] = {}  # the arrays of the latest fill(), by the place of the argument
        self._known: Optional[_Known] = None  # the arguments of the latest fill(), if they are checked faster again

    # ---- Properties ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return self._stream.shape

    @property
    def mask_shape(self) -> Optional[tuple[int, ...]]:
        """The shape of the mask of one image, (height, width), or of its multi-hot label, (classes,); None if the images
        have neither."""
        return self._stream.mask_shape

    @property
    def dtype(self) -> str:
        """The element type of images: "uint8", "float16", "bfloat16" or "float32"."""
        return self._stream.dtype

    @property
    def device(self) -> str:
        """The device of the batches: "cpu" or "cuda:N"."""
        return device_name(self._stream.device)

    def __len__(self) -> int:
        """Returns the number of batches per epoch. It is the same on all ranks."""
        return int(self._stream.info.steps)

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self._arguments.items() if value != _DEFAULTS.get(name)]
        closed = "" if self._stream._handle else " (closed)"
        return f"{type(self).__module__.replace('._stream', '')}.Loader({', '.join([repr(self.source), *shown])}){closed}"

    def __getitem__(self, index: object) -> NoReturn:
        """Raises TypeError, because a Loader has no batches by index."""
        raise TypeError("Loader: it is not a data set; iterate over the Loader itself, without torch.utils.data.DataLoader")

    def stats(self) -> dict[str, Any]:
        """Returns counts since the loader was opened: batches, samples, masked (delivered), bytes (read), wait_s (time that
        the caller waited), read_s and decode_s (sums over all threads), ready (mean number of complete batches when one
        was requested), memory_bytes, shard_bytes (shards of a URL in memory), resident_samples (samples whose files stay in
        memory once they were read), resident_device_samples (samples in device memory)."""
        stats = StatsStruct(ctypes.sizeof(StatsStruct))
        self._stream.call(lib.fdsl_stream_stats, stats)
        return {field[0]: getattr(stats, field[0]) for field in stats._fields_[1:]}

    # ---- Lifetime ----

    def close(self) -> None:
        """Ends the threads and frees the memory. Arrays stay valid. Any thread may call it; an iteration in another thread
        then raises an error. Closing again does nothing."""
        self._stream.close()
        self._filled, self._known = {}, None

    def __enter__(self) -> Any:
        self._stream.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._stream.check_open()
        return _reopen_loader, (type(self), self.source, self._arguments, self.state_dict())

    # ---- Position ----

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. After the last batch of an epoch, this is the next epoch."""
        self._locate()
        return self._epoch

    def _locate(self) -> None:
        """Takes the position from the library, if fill() was called last."""
        if self._filling and self._stream._handle:
            state = self._save()
            self._epoch, self._step = state.epoch, state.sample // state.global_batch

    def _save(self) -> StateStruct:
        state = StateStruct(ctypes.sizeof(StateStruct))
        self._stream.call(lib.fdsl_stream_save, state)
        return state

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next epoch. Keeps the position of load_state_dict() if that call has set the same epoch."""
        epoch = integer("epoch", epoch, 0, _U32 - 1)
        if not (self._resumed and epoch == self._epoch):
            self._epoch, self._step, self._resumed, self._filling = epoch, 0, False, False

    def _state(self) -> StateStruct:
        self._locate()
        state = self._save()
        state.epoch, state.sample = self._epoch, self._step * state.global_batch
        return state

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches that the caller has received, and what determines the batches: a dict of
        integers. It is the same on all ranks."""
        state = self._state()
        return {field[0]: getattr(state, field[0]) for field in state._fields_[1:]}

    def save_state(self, path: Path) -> None:
        """Writes the state to a file, for load_state() and for `fdsl-bench --workload train --init-state FILE`. The file is
        text, a few hundred bytes, and replaced atomically; only an earlier state or an empty file is replaced. One rank
        should write it. Raises ValueError or Error with the path and the reason."""
        check(lib.fdsl_state_write(self._state(), named(path)))

    def load_state(self, path: Path) -> None:
        """Continues with a state in a file of save_state(), or of `fdsl-bench --workload train --export-state FILE`, as
        load_state_dict() does. States of fdsl-bench do not say how it changes the images, so the transforms are not
        compared: give the loader those of the program, or it delivers other images of the same samples without an error."""
        state = StateStruct(ctypes.sizeof(StateStruct))
        check(lib.fdsl_state_read(named(path), state))
        self._load(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration begin with the first batch that the caller of state_dict() had not received, also on
        another number of ranks with the same batch_size * world_size.

        Raises ValueError if the data set, the transforms, the seed, batch_size * world_size or another argument that
        determines the batches differs. The position then does not change.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state_dict: it must be a dict, not {type(state).__name__}")
        struct = StateStruct(ctypes.sizeof(StateStruct))
        for field in struct._fields_[1:]:
            name = field[0]
            if name not in state:
                raise ValueError(f"state_dict: it has no {name!r}; it must be a result of Loader.state_dict()")
            most = (1 << 8 * ctypes.sizeof(field[1])) - 1
            setattr(struct, name, integer(f"state_dict: {name}", state[name], 0, most))
        self._load(struct)

    def _load(self, state: StateStruct) -> None:
        self._stream.call(lib.fdsl_stream_load, state)
        self._epoch, self._step, self._resumed = state.epoch, state.sample // state.global_batch, True
        self._filling = False

    # ---- Batches ----

    def __iter__(self) -> Iterator[Any]:
        self._stream.check_open()
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            raise Error(
                "loader: each worker of torch.utils.data.DataLoader would deliver all samples again; iterate over the "
                "loader itself, without torch.utils.data.DataLoader"
            )
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        self._locate()
        if not self._resumed:
            self._step = 0
        self._resumed = self._filling = False
        self._iteration += 1
        own = self._iteration
        self._stream.call(lib.fdsl_stream_seek, self._epoch, self._step)
        take, steps = self._take, len(self)
        while (item := take()) is not None:
            self._step += 1
            if self._step == steps:
                self._epoch, self._step = self._epoch + 1, 0
            yield item
            del item  # so that the caller can free this batch while it waits for the next one
            if self._iteration != own:
                raise RuntimeError("Loader: another iteration has begun, which ended this one")

    def fill(
        self, images: Any, labels: Any = None, *, targets: Any = None, masks: Any = None, stream: Any = None
    ) -> Optional[int]:
        """Copies the next batch into memory of the caller. Returns its number of samples; None, once, at the end of each
        epoch. The first call continues where the caller left the loader, and ends an iteration.

        images: shape (count, *loader.shape), with count at least the largest batch (batch_size, or len(source) if that is
        less), the loader's dtype (for bfloat16 also uint16) and device, contiguous, writable; on CUDA, aligned to 16 bytes.
        A PyTorch tensor, a CuPy or NumPy array, an fdsl.Array, or an object with __cuda_array_interface__,
        __array_interface__ or the buffer protocol. A short batch leaves the memory after it as it is.
        labels: None, or int64 of shape (count,). Masked samples have the label -1, also in fdsl.torch.Loader.
        targets: None, or with MixUp or CutMix float32 of shape (count, classes).
        masks: None, or, if the images have masks, uint8 of shape (count, *loader.mask_shape), aligned to 16 bytes on CUDA.
        Such images have no labels.
        stream: a CUDA stream, as for Generator.fill(), with the same default. On the CPU, it must be None.

        On the CPU, the batch is complete when fill() returns. On CUDA, fill() only enqueues work on the stream. Of
        fdsl.Images, a call can be captured into a CUDA graph, if all batches have the same size. Each replay then stores
        the batch that follows, across the ends of epochs. The caller keeps the loader open as long as the graph exists.
        """
        own, known = self._stream, self._known
        arrays = (images, labels, targets, masks)
        if known is None or known.given is not stream or not known.holds(arrays):
            known = self._describe(arrays, stream)
        if not self._filling:
            self._iteration += 1
            own.call(lib.fdsl_stream_seek, self._epoch, self._step)
            self._resumed, self._filling = False, True
        image, label, target, mask = known.addresses
        count = own.fill(image, label, known.stream(), target, mask)
        if count is not None and known is not self._known and own.device != CPU:
            # The library does not check the addresses of its latest call again. As long as these arrays exist, no other
            # device gets their addresses.
            self._filled.update({i: array for i, array in enumerate(arrays) if array is not None})
            self._known = known if known.again else None
        return count

    def _describe(self, arrays: tuple[Any, Any, Any, Any], stream: Any) -> _Known:
        """Checks the arguments of fill(), and makes the CUDA stream wait for earlier work on arrays of this package."""
        own = self._stream
        own.check_open()
        images, labels, targets, masks = arrays
        kind = kind_of("images", images)
        dtypes = (self.dtype, "uint16") if self.dtype == "bfloat16" else (self.dtype,)
        address = self._address("images", images, dtypes, self.shape)
        label_address = None if labels is None else self._address("labels", labels, ("int64",), ())
        if targets is not None and not own.classes:
            raise ValueError("targets: the loader has none; they come with MixUp or CutMix")
        target_address = None if targets is None else self._address("targets", targets, ("float32",), (own.classes,))
        if labels is not None and own.mask_shape:
            raise ValueError("labels: the images have masks instead of labels")
        if masks is not None and not own.mask_shape:
            raise ValueError("masks: the loader has none; they come with a formula such as segrcdb, and with mask.png or multihot.npy in a data set")
        mask_address = None if masks is None else self._address("masks", masks, ("uint8",), own.mask_shape or ())
        addresses = (address, label_address, target_address, mask_address)
        if own.device == CPU:
            if stream is not None:
                raise ValueError("stream: it must be None for a loader on the CPU")
            return _Known(arrays, addresses, None, lambda: None, None)
        find: Callable[[], int] = lambda: kind.stream(images)
        if stream is not None:
            fixed = stream_pointer(stream, own.device)
            find = lambda: fixed  # noqa: E731
        given = [array for array in arrays if array is not None]
        again = None
        if kind.repeat and all(kind_of("images", array).repeat is kind.repeat for array in given):
            again = kind.repeat(given)
        pointer = find()
        if not lib.fdsl_capturing(own.device, pointer):
            owner = (lambda: kind.owner(images)) if stream is None else (lambda: stream)
            order_arrays(own.device, pointer, owner, *arrays)
        return _Known(arrays, addresses, stream, find, again)

    def _address(self, name: str, array: Any, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> int:
        """Returns the address of an argument of fill() after checking it."""
        address, actual, dtype, device = kind_of(name, array).describe(name, array, True)
        check_kind(name, dtype, device, dtypes, self._stream.device, "loader")
        least = int(self._stream.info.capacity)
        if len(actual) != 1 + len(shape) or tuple(actual[1:]) != shape or actual[0] < least:
            expected = f"({', '.join(map(str, ('count', *shape)))}{'' if shape else ','})"
            raise ValueError(f"{name}: its shape is {tuple(actual)}, not {expected} with a count of at least {least}")
        return address

    def _take(self) -> Optional[Any]:
        """Returns what the caller receives of the next batch; None at the end of an epoch."""
        own = self._stream
        batch = own.next()
        if batch is None:
            return None
        if own.classes or own.mask_shape:
            return own.array(batch, own.field), own.array(batch, TARGETS if own.classes else MASKS)
        labels = own.array(batch, LABELS) if own.labelled else None
        if labels is not None and batch.masked and self._label_of_masked != -1:
            values = (ctypes.c_int64 * batch.size).from_address(labels.ptr)
            values[:] = [self._label_of_masked if value == -1 else value for value in values]
        return own.array(batch, own.field), labels


_DEFAULTS: dict[str, Any] = dict(Loader.__init__.__kwdefaults__ or {}, batch_size=256)


def _reopen_loader(kind: Any, source: Any, arguments: dict[str, Any], state: dict[str, Any]) -> Any:
    loader = kind(source, **arguments)
    loader.load_state_dict(state)
    return loader
