"""Sets of embeddings: rows of values from files, as data for a Loader."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Optional, Union

from ._array import device_name
from ._generator import _NAMES, _device, _dtype, _path, _text
from ._library import CPU, PENDING, RowsConfigStruct, SelectConfigStruct, StreamConfigStruct, check, integer, lib
from ._stream import _U64, Path, _Source, named

_FLOATS = ("float32", "float16", "bfloat16")
_NORM_MAX = 1e19  # of the library; the squares of larger norms are too large for a float


def _float_type(dtype: Any) -> bytes:
    """Returns the library's name of a floating-point type; None: the type that is there."""
    if dtype is None:
        return b"auto"
    try:
        name = _dtype(dtype)
    except ValueError:
        name = "u8"
    if _NAMES[name] not in _FLOATS:
        raise ValueError(f"dtype: {dtype!r} is no type of rows; valid values: {', '.join(_FLOATS)}")
    return name.encode()


def _norm(norm: Any) -> tuple[float, float]:
    try:
        low, high = norm
        low, high = float(low), float(high)
    except (TypeError, ValueError):
        raise TypeError(f"norm: it must be a pair of numbers, the smallest and the largest, not {norm!r}") from None
    if not 0 <= low <= high:
        raise ValueError(f"norm: {norm!r} are not a smallest and a largest norm")
    return low, min(high, _NORM_MAX)


def _is_list(values: Any) -> bool:
    """Returns whether an argument has several values; an array without axes has one."""
    return hasattr(values, "__len__") and not isinstance(values, (str, bytes)) and getattr(values, "shape", None) != ()


def _bools(keep: Any) -> Optional[memoryview]:
    """Returns the memory of an array of bools with one axis; None if `keep` is anything else."""
    try:
        view = memoryview(keep.numpy() if hasattr(keep, "numpy") else keep)
    except (TypeError, ValueError, RuntimeError, ImportError):  # a list, a tensor on a GPU, or no NumPy
        return None
    return view if view.format == "?" and view.ndim == 1 else None


def _mask(keep: Any, rows: int) -> bytes:
    """Returns one byte per row: 1 if the row is kept."""
    if not _is_list(keep):
        raise TypeError(f"keep: it must be a sequence of bools, one per row, not {type(keep).__name__}")
    if len(keep) != rows:
        raise ValueError(f"keep: it has {len(keep)} value{'s' * (len(keep) != 1)} for {rows} rows")
    view = _bools(keep)
    if view is not None:
        return view.tobytes()
    values = keep.tolist() if hasattr(keep, "tolist") else list(keep)
    if not all(isinstance(value, bool) for value in values):
        raise TypeError("keep: its values must be bools; compare scores or labels with a bound first")
    return bytes(values)


def _labels(labels: Any) -> list[int]:
    return [integer("labels", label, -(1 << 63), (1 << 63) - 1) for label in (labels if _is_list(labels) else [labels])]


class Embeddings(_Source):
    """A set of embeddings: rows of values in files, and perhaps a label per row. It does not change: validate(), dedup(),
    sample(), filter(), convert() and to() return new sets, which share the files.

    path           a .npy, .npz, .safetensors, .pt or .pth file, a folder with such files, a pattern, or several of
                   these separated by ","; files of PyTorch are read as data, nothing in them is executed
    tensor         the tensors to read: a name or a pattern; None: the floating-point tensors with two axes of each file, or
                   if it has none, those with one axis, each as one row
    labels         integers, one per row: the name of a tensor in the files, or the path of files such as "labels.npy" or
                   "labels/"; None: the rows have no labels
    align          pad rows with zeros to a multiple of this many values, 1 to 64; None: 1. Tensor cores need a multiple of
                   8 or 16
    num_threads    threads that read rows for the methods, 1 to 8192; None: OMP_NUM_THREADS, else all that the process may use

    The values stay in the files, which must not change. An fdsl.Loader delivers batches of rows. len() is the number of
    rows; `dtype` is the type of their values ("float32", "float16" or "bfloat16"), and `labelled` says whether they have
    labels. Raises ValueError or TypeError, whose message names the argument, Error if a file cannot be read or has changed,
    and Unavailable if the build cannot read the format. Thread-safe. Several loaders may share a set. Pickling stores the
    arguments and the steps; unpickling opens the files and repeats the steps.

    >>> import fdsl, os, struct, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }".ljust(117) + b"\\n"
    >>> values = struct.pack("<6f", 3, 4, 0, 0, 3, 4)
    >>> with open(path, "wb") as file:
    ...     _ = file.write(b"\\x93NUMPY\\1\\0" + struct.pack("<H", len(header)) + header + values)
    >>> rows = fdsl.Embeddings(path)
    >>> len(rows), rows.width, rows.dtype
    (3, 2, 'float32')
    >>> good = rows.validate(norm=(0.1, 100)).dedup()
    >>> len(good), good.removed
    (1, {'filtered': 0, 'invalid': 1, 'duplicates': 1, 'unsampled': 0})
    >>> for batch, labels in fdsl.Loader(good, batch_size=8):
    ...     print(batch.tolist(), labels)
    [[3.0, 4.0]] None
    """

    __slots__ = ("_steps", "_device", "dtype", "labelled")
    _rows = True

    def __init__(
        self, path: Path, tensor: Optional[str] = None, labels: Optional[Path] = None, align: Optional[int] = None, *,
        num_threads: Optional[int] = None,
    ) -> None:  # fmt: skip
        c = RowsConfigStruct()
        check(lib.fdsl_rows_config_init(c, ctypes.sizeof(c)))
        c.path, c.tensor = named(path), None if tensor is None else _text("tensor", tensor)
        c.labels = _path("labels", labels)
        c.align = 1 if align is None else integer("align", align, 1, 64)
        threads = None if num_threads is None else integer("num_threads", num_threads, 1, 8192)
        arguments = {"path": path, "tensor": tensor, "labels": labels, "align": align, "num_threads": threads}
        self._open(lambda handle: lib.fdsl_rows_open(c, handle), arguments)
        self._describe((), CPU)

    def _select(self, **step: Any) -> Embeddings:
        """Returns the rows that a step keeps."""
        self._check_open()
        c = SelectConfigStruct()
        check(lib.fdsl_select_config_init(c, ctypes.sizeof(c)))
        keep, labels = step.get("keep"), step.get("labels")
        if keep is not None:
            c.keep_count = len(self)
            c.keep = (ctypes.c_uint8 * len(self)).from_buffer_copy(keep)
        if labels is not None:
            c.label_count = len(labels)
            c.labels = (ctypes.c_int64 * max(len(labels), 1))(*labels)
        if "norm" in step:
            c.validate = 1
            c.norm_min, c.norm_max = step["norm"]
        c.dedup, c.sample, c.seed = step.get("dedup", False), step.get("sample", 0), step.get("seed", 0)
        c.dtype, c.device = step.get("dtype", b"auto"), step.get("device", self._device)
        c.num_threads = self._arguments["num_threads"] or 0
        result = object.__new__(type(self))
        if c.device == self._device != CPU and not (c.keep or c.labels or c.sample):  # it takes milliseconds
            result._open(lambda handle: lib.fdsl_rows_select(self._handle, c, handle), self._arguments)
        else:  # in a thread of the library, so that a KeyboardInterrupt ends it
            result._open(lambda handle: lib.fdsl_rows_begin(self._handle, c, handle) or PENDING, self._arguments)
        result._describe((*self._steps, step), int(c.device))
        return result

    def _describe(self, steps: tuple[dict[str, Any], ...], device: int) -> None:
        self._steps, self._device = steps, device
        self.dtype, self.labelled = _NAMES[self._info.dtype.decode()], bool(self._info.labelled)

    # ---- Methods that return other rows ----

    def validate(
        self, norm: Optional[tuple[float, float]] = None, *, dedup: bool = False, dtype: Any = None
    ) -> Embeddings:
        """Returns the rows without NaN and infinity, whose norm is at least norm[0] and at most norm[1]. None: any norm up
        to 1e19, the largest norm that is computed; a larger norm[1] means 1e19. Rows and bits are those of the step `mask` of `fdsl-bench --workload ops`.

        dedup, dtype: also remove duplicates (dedup()) and convert the rows (convert()), in the same pass. The values in the
        files decide which rows are valid, so dtype="float16" turns a valid 7e4 into infinity; a norm of at most 65504 excludes
        such rows.
        Reads all rows once. Raises ValueError if no row is left."""
        step = {"norm": (0.0, _NORM_MAX) if norm is None else _norm(norm), "dedup": dedup}
        if not isinstance(dedup, bool):
            raise TypeError(f"dedup: it must be a bool, not {type(dedup).__name__}")
        return self._select(**step, dtype=_float_type(dtype))

    def dedup(self) -> Embeddings:
        """Returns the rows whose bytes (their XXH3-64) differ from those of all earlier rows. Reads all rows once."""
        return self._select(dedup=True)

    def sample(self, n: int, seed: int = 0) -> Embeddings:
        """Returns `n` rows that are drawn at random without replacement, in the order of the draw: those of
        `fdsl-bench --workload ops --steps ...,permute --sample n --seed seed`. Raises ValueError if there are fewer."""
        return self._select(sample=integer("n", n, 1, _U64), seed=integer("seed", seed, 0, _U64))

    def filter(self, keep: Optional[Sequence[bool]] = None, *, labels: Union[None, int, Sequence[int]] = None) -> Embeddings:
        """Returns the rows for which `keep` is true, and whose label is in `labels`.

        keep: one bool per row, such as `scores > 0.5` of NumPy or PyTorch, in the order of this set. labels: one label or
        several. Raises ValueError if no row is left."""
        if keep is None and labels is None:
            raise ValueError("keep: name the rows with keep or labels")
        step: dict[str, Any] = {} if keep is None else {"keep": _mask(keep, len(self))}
        return self._select(**step, **({} if labels is None else {"labels": _labels(labels)}))

    def convert(self, dtype: Any) -> Embeddings:
        """Returns the same rows as "float32", "float16" or "bfloat16", rounded to nearest, ties to even. A loader converts
        each batch. Call it last: converted rows can be neither validated, searched for duplicates nor converted again."""
        if dtype is None:
            raise TypeError("dtype: it must be a type, not None")
        return self._select(dtype=_float_type(dtype))

    def to(self, device: Any) -> Embeddings:
        """Returns the same rows in the memory of a CUDA device ("cuda", "cuda:1" or a number), or with "cpu" in their files.

        All rows are copied, and must fit. validate(), dedup() and convert() of the result run on the device and keep what
        they return there; a Loader of this device gathers its batches from there. The other methods read the files again."""
        return self._select(device=_device(device))

    # ---- Properties ----

    @property
    def width(self) -> int:
        """The number of values per row that a loader delivers, with the padding of `align`."""
        return int(self._info.width)

    @property
    def columns(self) -> int:
        """The number of values per row in the files."""
        return int(self._info.columns)

    @property
    def device(self) -> str:
        """Where the rows are: "cpu" (in their files) or "cuda:N"."""
        return device_name(self._device)

    @property
    def removed(self) -> dict[str, int]:
        """How many rows of the files each step has removed: filtered, invalid, duplicates, unsampled."""
        return {name: int(getattr(self._info, name)) for name in ("filtered", "invalid", "duplicates", "unsampled")}

    def __repr__(self) -> str:
        words = super().__repr__()
        kept = "" if not self._steps else f": {len(self)} of {self._info.rows_found} rows"
        where = "" if self._device == CPU else f", device={self.device!r}"
        return f"<{words}{kept}, width={self.width}, dtype={self.dtype!r}{where}>" if self._handle else words

    # ---- For Loader ----

    def _set_format(self, c: StreamConfigStruct, transforms: Any, dtype: Any, channels: Any, layout: Any) -> None:
        """Sets the fields of a stream that describe its samples."""
        for name, value in ("transforms", transforms), ("channels", channels), ("layout", layout):
            if value is not None:
                raise ValueError(f"{name}: it describes images, but the source has rows; leave it out")
        c.dtype = _float_type(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return _reopen, (type(self), self._arguments, self._steps)


def _reopen(kind: Any, arguments: dict[str, Any], steps: tuple[dict[str, Any], ...]) -> Any:
    rows = kind(**arguments)
    for step in steps:
        rows = rows._select(**step)
    return rows
