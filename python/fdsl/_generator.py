"""The generator: its configuration, and images in memory of the package or of the caller."""

from __future__ import annotations

import ctypes
import os
import sys
from _thread import allocate_lock
from array import array as host_array
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from ._array import Array, device_name
from ._library import CHANNELS_MAX, CPU, PENDING, ClassStruct, ClassTableStruct, ConfigStruct, Error, FractalsStruct
from ._library import LayoutStruct, TargetsStruct, check, fail, integer, lib, open_source, reopen
from ._memory import check_kind, kind_of, order_arrays, stream_pointer

Path = Union[str, "os.PathLike[str]"]

_U32, _U64, _INT = (1 << 32) - 1, (1 << 64) - 1, (1 << 31) - 1
_CLASSES_MAX, _RES_MAX, _THREADS_MAX, _BATCH_MAX = 1 << 20, 16384, 8192, 1 << 24
_DTYPES = {"uint8": "u8", "float16": "f16", "bfloat16": "bf16", "float32": "f32"}  # name in PyTorch: name in libfdsl
_NAMES = {short: name for name, short in _DTYPES.items()}
_NUMBERS = ("int64", "uint64")


class Class(NamedTuple):
    """The parameters of a class of images. docs/visualatom.md of fdsl-bench gives the formulas.

    id: the label of its images. noise: the coefficient of the noise. radius: the start radius in pixels. line_width: a
    constant in pixels that every orbit adds to the radius.
    """

    id: int
    vertices: int
    orbits: int
    oval_x: float
    oval_y: float
    freq1: int
    freq2: int
    noise: float
    radius: int
    line_width: float


class ClassTable(NamedTuple):
    """The classes of any formula. docs/formulas.md of fdsl-bench describes the parameters.

    formula: the name of the formula. names: the names of its parameters. ids: the numbers of the classes. values: for each
    class, the values of its parameters, in the order of names.
    """

    formula: str
    names: tuple[str, ...]
    ids: list[int]
    values: list[tuple[float, ...]]


class Generator:
    """Generates images by number, on the CPU or a CUDA GPU.

    With N classes, image g is instance g // N of the class at index g % N; an image of "segrcdb" or "multifractal" shows several classes.
    With the generators "naive", "omp" and "fused", its pixels depend only on the formula, the class, the seed, the
    instance, the side of the drawn image and the output format. They do not depend on the device, the batch or the
    number of threads.

    classes       number of classes from the preset; if the preset is a list, its first classes. None: 1000 (for
                  "segrcdb" 254), or all classes of class_file, class_list or class_table
    preset        such as "visualatom", "rcdb-1k", "segrcdb", "fractaldb-1k", "ofdb-1k", "1p-frac", "exfractaldb-1k",
                  "fractal-color-1k" or "multifractal-1k"; docs/formulas.md has all. None: the preset with the name of the formula
    preset_file   path of an INI file with other presets
    class_file    path of a CSV file with the classes, or of the class files of a published script (a folder, or one file),
                  instead of a preset. With formula="fractaldb" or "ifs3d", a preset then says how the classes are drawn
    class_list    sequence of Class, instead of a preset
    class_table   a ClassTable, instead of a preset
    formula       "uji" (as in the paper's code), "visualatom" (as in the data set), "rcdb", "segrcdb", "fractaldb", "ifs3d",
                  "colorfractal" or "multifractal"; "auto": that which the preset implies, else "uji", also for the preset "visualatom"
    random        "philox", or "published": the random numbers of a published set, which the preset names
    draw          what an image of a fractal shows: "patches" or "points"; "auto": patches, if it is one
    min_lit       replaces the weights of fractal classes whose images are expected to have a smaller share of set pixels than
                  this, by the class itself; 0.01 replaces nearly black images, 0 none
    cache_dir     folder that keeps all orbits of fractals for the generator "omp", in a file that the processes of a machine
                  share; None: none
    seed          seed of all images, 0 to 2^64 - 1
    res           side of the drawn image in pixels, 1 to 16384; None: that of the formula or of the preset, such as 512
    out_res       side of the image that is returned, in pixels; None: res
    fit           how res becomes out_res: "resize" (mean over the covered area) or "crop" (at a random position)
    dtype         "uint8", "float16", "bfloat16", "float32", "u8", "f16", "bf16", "f32", or a dtype of PyTorch
                  or NumPy
    channels      1, or 3 with the same gray, unless the formula draws colours, which have 3; None: 3 of colours, else 1
    layout        "nchw" or "nhwc"
    mean, std     one number, or one per channel: values of a float dtype are (gray / 255 - mean) / std
    generator     "auto"; CPU: "omp", "naive"; CUDA: "fused", "bat", "gbase"
    device        "cpu", "cuda:1", a CUDA device number or a torch.device; "cuda": PyTorch's current device if PyTorch
                  is imported, else device 0
    threads       number of CPU threads, 1 to 8192; None: OMP_NUM_THREADS, else all that the process may use
    batch         maximum number of images per call, 1 to 2^24

    Opening allocates all memory that the generator needs; close(), a `with` block or garbage collection frees it.
    Raises ValueError or TypeError, whose message names the argument; Unavailable if the build or the machine lacks
    the device; Error if a CUDA call or an allocation failed.

    Thread-safe: calls on one generator from several threads are serialised; several generators run at the same time.
    A generator belongs to the process that opened it. Pickling stores its configuration, and unpickling opens it
    again, so it can be passed to spawned workers.

    >>> with Generator(classes=10, res=64) as g:
    ...     images, labels = g.generate(0, 4)
    >>> images
    fdsl.Array(shape=(4, 1, 64, 64), dtype='uint8', device='cpu')
    >>> labels.numpy().tolist()
    [0, 1, 2, 3]
    """

    __slots__ = (
        "_handle", "_process", "_lock", "_device", "_stream", "_stream_owner", "_shape", "_full", "_dtype", "_accepted",
        "_batch", "_config", "_mask_shape", "_points_shape", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        classes: Optional[int] = None,
        *,
        preset: Optional[str] = None,
        preset_file: Optional[Path] = None,
        class_file: Optional[Path] = None,
        class_list: Optional[Sequence[Class]] = None,
        class_table: Optional[ClassTable] = None,
        formula: str = "auto",
        random: str = "philox",
        draw: str = "auto",
        min_lit: float = 0,
        cache_dir: Optional[Path] = None,
        seed: int = 0,
        res: Optional[int] = None,
        out_res: Optional[int] = None,
        fit: str = "resize",
        dtype: Any = "uint8",
        channels: Optional[int] = None,
        layout: str = "nchw",
        mean: Union[float, Sequence[float]] = 0,
        std: Union[float, Sequence[float]] = 1,
        generator: str = "auto",
        device: Any = "cpu",
        threads: Optional[int] = None,
        batch: int = 256,
    ) -> None:
        words = {name: value for name, value in locals().items() if name != "self"}
        c, self._config = configured(**words)
        number = self._open(c, None if classes is None else c.classes)
        channels = self._shape[0 if c.layout == b"nchw" else 2]
        self._config.update(classes=number, device=self.device, formula=self._table().formula, channels=channels)
        self._config.update((name, self._config[name][:channels]) for name in ("mean", "std"))

    def _open(self, c: ConfigStruct, classes: Optional[int]) -> int:
        """Opens the generator and returns its number of classes. Raises ValueError if `classes` is another number."""
        handle = ctypes.c_void_p()
        if c.random == b"published":  # its first use takes a while, which a KeyboardInterrupt ends only in a source
            first = ConfigStruct.from_buffer_copy(c)
            first.device, first.threads, first.generator = CPU, 0, b"auto"
            lib.fdsl_source_close(open_source(lambda source: lib.fdsl_images_begin(first, 1, False, source) or PENDING))
        check(lib.fdsl_open(c, handle))
        number = int(lib.fdsl_classes(handle, None, 0))
        if classes is not None and number != classes:
            lib.fdsl_close(handle)
            field = "class_list" if c.class_list else "class_table" if c.class_table else "class_file"
            raise ValueError(f"classes: it is {classes}, but {field} has {number}; leave classes out")
        self._handle = handle.value or 0
        self._process = os.getpid()
        self._lock = allocate_lock()
        self._device: int = c.device
        self._stream: Optional[int] = None  # of the previous call; _stream_owner keeps it alive
        self._stream_owner: object = None
        description = LayoutStruct(ctypes.sizeof(LayoutStruct))
        check(lib.fdsl_describe(self._handle, description))
        self._shape = tuple(description.shape)
        self._full = (c.batch, *self._shape)
        side = self._shape[1]
        pixels = int(description.mask_bytes)
        self._mask_shape = (pixels,) if description.multi_hot else (side, side) if pixels else None
        self._points_shape = (int(description.points), 3) if description.points else None
        self._dtype = _NAMES[c.dtype.decode()]
        self._accepted = (self._dtype, "uint16") if self._dtype == "bfloat16" else (self._dtype,)
        self._batch: int = c.batch
        return number

    # ---- Properties: thread-safe; those that call the library raise ValueError after close() ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image: (channels, height, width), or (height, width, channels) for "nhwc"."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The element type of images: "uint8", "float16", "bfloat16" or "float32"."""
        return self._dtype

    @property
    def device(self) -> str:
        """The device: "cpu" or "cuda:N"."""
        return device_name(self._device)

    @property
    def batch(self) -> int:
        """The maximum number of images per call."""
        return self._batch

    @property
    def classes(self) -> list[Class]:
        """The classes, in the order of their indices. Each access returns a new list. Raises ValueError if the formula has
        none of the parameters of fdsl.Class, as fractals: class_table has them."""
        table = self.class_table
        if not set(Class._fields) & set(table.names):
            raise ValueError(f"classes: the formula {table.formula} has other parameters; use class_table")
        structs = (ClassStruct * len(table.ids))()
        self._locked(lambda: lib.fdsl_classes(self._handle, structs, len(structs)))
        return [Class(*(getattr(struct, field) for field in Class._fields)) for struct in structs]

    @property
    def class_table(self) -> ClassTable:
        """The classes with all parameters of the formula. Each access returns a new table."""
        table: ClassTable = self._locked(self._table)
        return table

    def _table(self) -> ClassTable:
        table = ClassTableStruct(ctypes.sizeof(ClassTableStruct))
        check(lib.fdsl_get_classes(self._handle, table))
        width = table.parameters
        return ClassTable(
            table.formula.decode(),
            tuple(table.names[i].decode() for i in range(width)),
            table.ids[: table.count],
            [tuple(table.values[i * width : (i + 1) * width]) for i in range(table.count)],
        )

    def describe(self, threads: Optional[int] = None) -> dict[str, Any]:
        """Computes all orbits of fractal classes, after min_lit, and describes them. Values are numbers, lists and
        dictionaries, so json.dumps() takes the result:

        classes, maps       number of classes, and of maps per class, on average
        orbits, points      orbits per class, and points per orbit
        flips, res          flips per drawing, and the side of the canvas
        overflows           orbits with a coordinate that is not a number, and overflow_classes, the number of their classes
        cells, set_pixels   the share of pixels that an orbit visits, and the expected share of set pixels of an image of
                            patches: mean, quartiles, and below, the number of orbits below each of four limits

        Of fractals in colour, examines as many images as there are classes. Instead of orbits, points, flips and overflows,
        the result has images, their number; objects, a list of the numbers of images with one to five objects; and shown,
        the least, mean and largest number of images that show a class. cells are then those that an object visits, and
        set_pixels those of an image that show an object.

        threads: CPU threads; None: OMP_NUM_THREADS, or all. Takes about 25 seconds of a core for 1000 classes of FractalDB.
        Raises ValueError for another formula. Thread-safe: waits for a call in another thread.
        """
        number = 0 if threads is None else integer("threads", threads, 1, 8192)
        struct = FractalsStruct(ctypes.sizeof(FractalsStruct))
        self._locked(lambda: check(lib.fdsl_describe_fractals(self._handle, number, struct)))
        words = {name: getattr(struct, name) for name, *_ in FractalsStruct._fields_[1:]}
        for name in "cells", "set_pixels":
            shares = words[name]
            below = {f"{limit:g}": count for limit, count in zip(shares.limits, shares.below)}
            words[name] = {"mean": shares.mean, "quartiles": list(shares.quartiles), "below": below}
        shown = [words.pop(f"shown_{name}") for name in ("least", "mean", "most")]
        objects = list(words.pop("objects"))
        if not words["images"]:
            del words["images"]
            return words
        for name in "orbits", "points", "flips", "overflows", "overflow_classes":
            del words[name]
        return {**words, "objects": objects, "shown": shown}

    @property
    def mask_shape(self) -> Optional[tuple[int, ...]]:
        """The shape of the mask of one image, (height, width), or of its multi-hot label, (classes,); None if the formula
        defines neither."""
        return self._mask_shape

    @property
    def points_shape(self) -> Optional[tuple[int, int]]:
        """The shape of the point cloud of one image, (points, 3); None if the images have none."""
        return self._points_shape

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the generator has allocated on its device; on the CPU, an estimate."""
        return int(self._locked(lambda: lib.fdsl_memory_bytes(self._handle)))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration. Generator(**config) opens a generator with the same configuration."""
        return dict(self._config)

    def __repr__(self) -> str:
        shown = {name: value for name, value in self._config.items() if value != _DEFAULTS.get(name)}
        if "class_list" in shown:
            shown["class_list"] = f"<{len(shown['class_list'])} classes>"
        if "class_table" in shown:
            shown["class_table"] = f"<{len(shown['class_table'].ids)} classes>"
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"fdsl.Generator({words}){'' if self._handle else ' (closed)'}"

    # ---- Lifetime ----

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise Error(
                "generator: it was opened before fork(); open another one in this process "
                "(for CUDA, start the process with spawn)"
            )
        if not self._handle:
            raise ValueError("generator: it is closed")

    def _locked(self, function: Callable[[], Any]) -> Any:
        """Returns the result of a function that uses the open generator."""
        self._check_open()  # before locking, because the parent may have held the lock at fork()
        with self._lock:
            self._check_open()
            return function()

    def close(self) -> None:
        """Waits for the generator's work (not for replays of CUDA graphs), then frees its memory. Arrays stay valid.

        Thread-safe: waits for a call in another thread. Raises nothing. Closing again does nothing.
        """
        if self._handle and os.getpid() == self._process:  # a forked child only forgets the parent's generator
            with self._lock:
                self.__del__()
        self._handle = 0

    def __enter__(self) -> Generator:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, getpid: Any = os.getpid, wait: Any = lib.fdsl_wait, close: Any = lib.fdsl_close) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0  # 0 if the constructor failed
        if handle and getpid() == self._process:
            if self._stream is not None:
                wait(self._device, self._stream)
            close(handle)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        config = self.config
        if config["class_file"] is not None or config["preset_file"] is not None:  # may be missing elsewhere
            table = self.class_table
            rules = None if config["preset_file"] is not None else config["preset"]  # says how fractals are drawn
            lines = table.formula in ("uji", "visualatom")
            config.update({"class_list": self.classes} if lines else {"class_table": table})
            config.update(class_file=None, preset_file=None, preset=rules)
        return reopen, (Generator, config)

    # ---- Images ----

    def generate(
        self, first: int = 0, count: Optional[int] = None, *, numbers: Any = None, stream: Any = None
    ) -> tuple[Array, ...]:
        """Generates images first .. first + count - 1, or those with the given numbers, into new memory.

        count: 1 to batch; None: batch, or the length of numbers. numbers: see fill(). stream: the CUDA stream that
        generates the images; None: the default stream.

        Returns (images, labels): Arrays of shape (count, *shape) and (count,), the labels in int64. If the formula defines
        masks, returns (images, masks): the masks have the shape (count, *mask_shape) and are uint8; a pixel is the number of
        the class that it shows, or 0. Images of "multifractal" have multi-hot labels in place of masks, of shape
        (count, classes): 1 if the image shows the class, else 0. If the images have point clouds, returns (images, labels,
        points): the points have the shape (count, *points_shape) and are float32. Arrays own their memory. On CUDA, consumers that use DLPack or __cuda_array_interface__ wait for the stream; code that uses
        `ptr` directly must wait itself.
        Raises the same exceptions as fill(), and is thread-safe.
        """
        self._check_open()
        pointer = 0 if stream is None else self._stream_pointer(stream)
        if isinstance(numbers, (list, tuple, range)):
            numbers = self._listed(numbers, pointer)
        if count is None and numbers is not None:
            shape = kind_of("numbers", numbers).describe("numbers", numbers, False)[1]
            if len(shape) != 1:
                raise ValueError(f"numbers: its shape is {tuple(shape)}, not (count,)")
            count = self._counted(shape[0])
        count = self._batch if count is None else integer("count", count, 1, self._batch)
        images = Array((count, *self._shape), self._dtype, self._device, pointer, stream)
        if self._mask_shape:
            masks = Array((count, *self._mask_shape), "uint8", self._device, pointer, stream)
            self.fill(images, None, first, numbers=numbers, stream=stream, masks=masks)
            return images, masks
        labels = Array((count,), "int64", self._device, pointer, stream)
        if self._points_shape:
            points = Array((count, *self._points_shape), "float32", self._device, pointer, stream)
            self.fill(images, labels, first, numbers=numbers, stream=stream, points=points)
            return images, labels, points
        self.fill(images, labels, first, numbers=numbers, stream=stream)
        return images, labels

    def fill(
        self, images: Any, labels: Any = None, first: int = 0, *, numbers: Any = None, next: Any = None,
        step: Optional[int] = None, stream: Any = None, masks: Any = None, points: Any = None,
    ) -> None:  # fmt: skip
        """Generates images first, first + 1, ..., or those with the given numbers, into memory of the caller.

        images: shape (count, *shape) with count = 1 to batch, the generator's dtype (for bfloat16 also uint16) and
        device, contiguous, writable; on CUDA, aligned to 16 bytes. A PyTorch tensor, a CuPy or NumPy array, an
        fdsl.Array, or an object with __cuda_array_interface__, __array_interface__ or the buffer protocol.
        labels: None, or int64 of shape (count,), which receives the class ids; 0 if images show several classes.
        masks: None, or uint8 of shape (count, *mask_shape), which receives the masks or the multi-hot labels. Not together with next.
        points: None, or float32 of shape (count, *points_shape), which receives the point clouds. Not together with next.
        first: the number of the first image, 0 to 2^64 - 1.
        numbers: the numbers of the images, in any order: int64 or uint64 of shape (count,) on the generator's
        device, or a list, tuple or range of ints (for CUDA, the call copies it and waits). Negative numbers in an
        int64 array are errors on the CPU. On CUDA they are not checked: -n is the image 2^64 - n. These two rules
        also apply to next.
        next: int64 or uint64, one element on the generator's device. Generates images next[0], next[0] + 1, ..., then
        adds `step` (None: count) to next[0], on the stream. Each replay of a captured CUDA graph therefore generates
        the images that follow those of the previous replay. "gbase" and "bat" support neither numbers nor next (Unavailable).
        stream: a CUDA stream (address, torch.cuda.Stream or CuPy stream; 0: the default stream) that exists until
        the generator's next call. None: for a PyTorch tensor or a CuPy array, that library's current stream; for
        an fdsl.Array or a __cuda_array_interface__, its stream; else the default stream. On the CPU, it must be None.

        On the CPU, the images are complete when fill() returns. On CUDA, fill() only enqueues work on the stream, and
        keeps no reference to the memory. The stream first waits for the generator's previous call on another stream,
        because calls share scratch memory. Replays of a CUDA graph are not ordered: the caller must order them. Keep
        the generator open as long as a graph that captured its calls exists: a replay after close() or garbage
        collection uses freed memory.

        Raises ValueError or TypeError, whose message names the argument, or Error if CUDA failed. Thread-safe; releases
        the GIL.
        """
        kind = kind_of("images", images)
        address, shape, dtype, device = kind.describe("images", images, True)
        # To slice the shape of a tensor takes longer than to compare it.
        if dtype not in self._accepted or (shape != self._full and shape[1:] != self._shape) or device != self._device:
            self._check("images", (shape, dtype, device), self._accepted, (*shape[:1], *self._shape))
        count = shape[0]
        if not 1 <= count <= self._batch:
            raise ValueError(f"images: there are {count}; give 1 to {self._batch}, the batch of the generator")
        label_address = None if labels is None else self._address("labels", labels, ("int64",), (count,), True)
        targets = None if masks is None and points is None else self._targets(label_address, masks, points, count, next)
        pointer = None
        if stream is not None:
            pointer = self._stream_pointer(stream)
        elif self._device != CPU:
            pointer = kind.stream(images)
        by_first = numbers is None and next is None and step is None
        if not by_first:
            function, selection, numbers = self._select(first, numbers, next, step, count, pointer)
        elif type(first) is not int or not 0 <= first <= _U64:
            first = integer("first", first, 0, _U64)
        if os.getpid() != self._process:
            self._check_open()
        with self._lock:
            if not self._handle:
                self._check_open()
            if self._device != CPU and (
                self._stream != (pointer or 0)
                or isinstance(images, Array)
                or isinstance(labels, Array)
                or isinstance(masks, Array)
                or isinstance(points, Array)
            ):
                owner = (lambda: kind.owner(images)) if stream is None else (lambda: stream)
                self._order(pointer or 0, owner, images, labels, masks, points)
            if targets is not None:
                listed = None if by_first else selection[0]
                status = lib.fdsl_generate_targets(self._handle, listed, first, count, address, targets, pointer)
            elif by_first:
                status = lib.fdsl_generate(self._handle, first, count, address, label_address, pointer)
            else:
                status = function(self._handle, *selection, count, address, label_address, pointer)
        if status:
            fail(status)

    # ---- Helpers of generate() and fill() ----

    def _targets(self, labels: Optional[int], masks: Any, points: Any, count: int, next: Any) -> TargetsStruct:
        """Returns the targets of a call with masks or point clouds, after checking them."""
        if masks is not None and not self._mask_shape:
            raise ValueError(f"masks: the formula {self._config['formula']} defines no masks")
        if points is not None and not self._points_shape:
            raise ValueError("points: the images have no point clouds; pc-fractaldb-1k is a preset that has")
        if next is not None:
            name = "points" if masks is None else "masks"
            raise ValueError(f"{name}, next: they exclude each other; give numbers or first")
        mask, point = self._mask_shape or (), self._points_shape or ()
        mask_address = None if masks is None else self._address("masks", masks, ("uint8",), (count, *mask), True)
        point_address = None if points is None else self._address("points", points, ("float32",), (count, *point), True)
        return TargetsStruct(ctypes.sizeof(TargetsStruct), labels, mask_address, point_address)

    def _stream_pointer(self, stream: Any) -> int:
        if self._device == CPU:
            raise ValueError("stream: it must be None for a generator on the CPU")
        return stream_pointer(stream, self._device)

    def _order(self, stream: int, owner: Callable[[], object], *arrays: Any) -> None:
        """Makes `stream` wait for the generator's previous call, and for earlier work on the arrays of this package.
        `owner` returns the object that keeps the stream alive."""
        if self._stream != stream:
            if self._stream is not None:
                check(lib.fdsl_order(self._device, self._stream, stream))
            if lib.fdsl_capturing(self._device, stream):  # the call runs later, when the graph is replayed
                return
            self._stream, self._stream_owner = stream, owner()
        order_arrays(self._device, stream, owner, *arrays)

    def _select(
        self, first: int, numbers: Any, next: Any, step: Optional[int], count: int, stream: Optional[int]
    ) -> tuple[Any, tuple[int, ...], Any]:
        """Returns the library's function for numbers= or next=, its arguments, and the array that they point to."""
        if next is None and step is not None:
            raise ValueError("step: it needs next")
        if first != 0 or (numbers is not None and next is not None):
            raise ValueError("first, numbers, next: they exclude each other; give one of the three")
        if numbers is not None:
            if isinstance(numbers, (list, tuple, range)):
                numbers = self._listed(numbers, stream)
            return lib.fdsl_generate_list, (self._address("numbers", numbers, _NUMBERS, (count,), False),), numbers
        step = count if step is None else integer("step", step, 0, _U64)
        return lib.fdsl_generate_next, (self._address("next", next, _NUMBERS, None, True), step), next

    def _listed(self, numbers: Sequence[Any], stream: Optional[int]) -> Any:
        """Turns a list, tuple or range into an array on the generator's device. `stream`: the stream of the call."""
        try:
            self._counted(len(numbers))
        except OverflowError:  # a range
            raise ValueError("numbers: there are more than 2^63") from None
        values = host_array("Q", [integer("numbers", number, 0, _U64) for number in numbers])
        if self._device == CPU:
            return values
        if lib.fdsl_capturing(self._device, stream):  # a replay would read the copy after it was freed
            raise ValueError("numbers: a list cannot be captured into a CUDA graph; give an array on the GPU")
        copy = Array((len(values),), "uint64", self._device)
        check(lib.fdsl_copy(self._device, copy.ptr, values.buffer_info()[0], copy.nbytes, None))
        return copy

    def _counted(self, count: int) -> int:
        """Returns the length of numbers after checking it."""
        if not 1 <= count <= self._batch:
            raise ValueError(f"numbers: there are {count}; give 1 to {self._batch}, the batch of the generator")
        return count

    def _address(
        self, name: str, array: Any, dtypes: tuple[str, ...], shape: Optional[tuple[int, ...]], write: bool
    ) -> int:
        """Returns the address of an argument after checking it; a shape of None means one element."""
        address, actual, dtype, device = kind_of(name, array).describe(name, array, write)
        if shape is None:
            shape = () if actual == () else (1,)
        if dtype not in dtypes or actual != shape or device != self._device:
            self._check(name, (actual, dtype, device), dtypes, shape)
        if dtypes is _NUMBERS and dtype == "int64" and device == CPU:
            values = ctypes.string_at(address, 8 * actual[0] if actual else 8)
            if not values[7::8].isascii():  # the bytes with the signs
                least = min(memoryview(values).cast("q"))
                raise ValueError(f"{name}: {least} is out of range; it must be 0 to 2^64 - 1")
        return address

    def _check(self, name: str, actual: tuple[Any, str, int], dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raises an error that says why an argument does not fit. Returns if it fits."""
        actual_shape, dtype, device = actual
        check_kind(name, dtype, device, dtypes, self._device, "generator")
        if tuple(actual_shape) != shape:
            expected = shape if name != "images" else f"(count, {str(self._shape)[1:]}"
            raise ValueError(f"{name}: its shape is {tuple(actual_shape)}, not {expected}")


_DEFAULTS: dict[str, Any] = {**(Generator.__init__.__kwdefaults__ or {}), "formula": "uji", "channels": 1, "mean": [0.0], "std": [1.0]}


# ---- Arguments of the constructor ----


def _text(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name}: it must be a str, not {type(value).__name__}")
    return _encoded(name, value, str.encode)


def _encoded(name: str, value: str, encode: Callable[[str], bytes]) -> bytes:
    if "\0" in value:
        raise ValueError(f"{name}: it contains a null character")
    try:
        return encode(value)
    except UnicodeEncodeError:
        raise ValueError(f"{name}: it contains a character that cannot be encoded") from None


def _path(name: str, value: Optional[Path]) -> Optional[bytes]:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: it must be a path, not {type(value).__name__}")
    return None if value is None else _encoded(name, os.fsdecode(value), os.fsencode)


def _dtype(value: Any) -> str:
    """Returns the library's name of an element type."""
    kind = type(value).__name__.lower()
    if isinstance(value, (str, type)) or "dtype" in kind or "scalarmeta" in kind:  # torch, NumPy, JAX
        name = value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", value))
        name = str(name).rpartition(".")[2]
        if name not in _DTYPES and name not in _NAMES:
            raise ValueError(f"dtype: {name!r} is unknown; valid values: uint8, float16, bfloat16 and float32")
        return _DTYPES.get(name, name)
    raise TypeError(f"dtype: it must be a name or a dtype, not {type(value).__name__}")


def _device(value: Any) -> int:
    """Returns the library's number of a device."""
    if not isinstance(value, str) and hasattr(value, "__index__"):
        return integer("device", value, CPU, _INT)
    if not isinstance(value, str) and (type(value).__module__, type(value).__name__) != ("torch", "device"):
        raise TypeError(f'device: it must be "cpu", "cuda:N", an int or a torch.device, not {type(value).__name__}')
    kind, colon, number = str(value).partition(":")
    if kind == "cpu" and number in ("", "0"):
        return CPU
    if kind == "cuda" and number.isdecimal():
        return integer("device", int(number), 0, _INT)
    if kind != "cuda" or colon:
        raise ValueError(f'device: {str(value)!r} is unknown; valid values: "cpu", "cuda" and "cuda:N"')
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch and torch.cuda.is_available() else 0


def _per_channel(name: str, value: Any, channels: int) -> list[float]:
    try:
        numbers = []
        for number in value if hasattr(value, "__len__") else [value] * channels:
            if isinstance(number, (str, bytes, bool)) or isinstance(value, bytes):
                raise TypeError
            numbers.append(float(number))
    except OverflowError:
        raise ValueError(f"{name}: it is too large") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: it must be a number, or a sequence of one number per channel") from None
    if len(numbers) != channels:
        raise ValueError(f"{name}: it has {len(numbers)} value{'s' * (len(numbers) != 1)} for {channels} channel{'s' * (channels != 1)}")
    return numbers


def configured(
    classes: Any = None, *, preset: Any = None, preset_file: Any = None, class_file: Any = None, class_list: Any = None,
    class_table: Any = None, formula: Any = "auto", random: Any = "philox", draw: Any = "auto", min_lit: Any = 0, cache_dir: Any = None, seed: Any = 0, res: Any = None, out_res: Any = None, fit: Any = "resize", dtype: Any = "uint8",
    channels: Any = None, layout: Any = "nchw", mean: Any = 0, std: Any = 1, generator: Any = "auto", device: Any = "cpu",
    threads: Any = None, batch: Any = 256,
) -> tuple[ConfigStruct, dict[str, Any]]:  # fmt: skip
    """Returns the configuration that the arguments of Generator describe, and these arguments after checking them."""
    words = dict(locals())
    c = ConfigStruct()
    check(lib.fdsl_config_init(c, ctypes.sizeof(c)))
    for name, text in ("formula", formula), ("random", random), ("draw", draw), ("fit", fit), ("layout", layout), ("generator", generator):
        setattr(c, name, _text(name, text))
    c.batch = integer("batch", batch, 1, _BATCH_MAX)
    c.min_lit = _share("min_lit", min_lit)
    c.res = 0 if res is None else integer("res", res, 1, _RES_MAX)
    c.out_res = 0 if out_res is None else integer("out_res", out_res, 1, _RES_MAX)
    c.seed, c.device = integer("seed", seed, 0, _U64), _device(device)
    c.threads = 0 if threads is None else integer("threads", threads, 1, _THREADS_MAX)
    c.classes = 0 if classes is None else integer("classes", classes, 1, _CLASSES_MAX)
    for name, value in ("preset", preset), ("preset_file", preset_file):
        listed = class_list is not None or class_file is not None or class_table is not None
        if value is not None and listed and not (name == "preset" and formula in ("fractaldb", "ifs3d")):
            raise ValueError(f"{name}: class_list or class_file gives the classes; leave {name} out")
    c.preset = None if preset is None else _text("preset", preset)
    c.preset_file, c.class_file = _path("preset_file", preset_file), _path("class_file", class_file)
    c.cache_dir = _path("cache_dir", cache_dir)
    if class_list is not None:
        structs, class_list = _class_structs(class_list)
        c.class_list, c.class_count = structs, len(structs)
    if class_table is not None:
        c.class_table = ctypes.pointer(_table_struct(class_table))
        if formula == "auto":
            c.formula = c.class_table.contents.formula
    c.channels = 0 if channels is None else integer("channels", channels, 0, _U32)
    if channels is not None and c.channels not in (1, 3):
        raise ValueError(f"channels: {channels} is neither 1 nor 3")
    c.dtype = _dtype(dtype).encode()
    if channels is None and any(hasattr(value, "__len__") for value in (mean, std)):
        c.channels = 1  # a sequence for colours needs channels=3
    width = c.channels or CHANNELS_MAX  # one number holds for any number of channels
    mean, std = _per_channel("mean", mean, width), _per_channel("std", std, width)
    if c.dtype == b"u8" and (set(mean), set(std)) != ({0.0}, {1.0}):
        raise ValueError("mean, std: uint8 images are not normalised; set dtype to float16, bfloat16 or float32")
    c.mean[: len(mean)], c.std[: len(std)] = mean, std
    words.update(class_list=class_list, min_lit=c.min_lit, seed=c.seed, dtype=_NAMES[c.dtype.decode()], mean=mean, std=std)
    return c, {**words, "batch": c.batch}


def _share(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: it must be a number") from None


def _table_struct(table: Any) -> ClassTableStruct:
    if not isinstance(table, ClassTable):
        raise TypeError(f"class_table: it must be an fdsl.ClassTable, not {type(table).__name__}")
    ids, rows, width = table.ids, table.values, len(table.names)
    if not 1 <= len(ids) <= _CLASSES_MAX or len(rows) != len(ids) or any(len(row) != width for row in rows):
        raise ValueError("class_table: give 1 to 1048576 ids, and for each id one row with a value per name")
    try:
        values = (ctypes.c_double * (len(rows) * width))(*(float(value) for row in rows for value in row))
    except (TypeError, ValueError, OverflowError):
        raise TypeError("class_table: the values must be numbers") from None
    numbers = (ctypes.c_uint32 * len(ids))(*(integer(f"class_table.ids[{i}]", one, 0, _U32) for i, one in enumerate(ids)))
    names = (ctypes.c_char_p * width)(*(_text("class_table.names", name) for name in table.names))
    struct = ClassTableStruct(ctypes.sizeof(ClassTableStruct), _text("class_table.formula", table.formula))
    struct.count, struct.parameters = len(ids), width
    struct.names, struct.ids, struct.values = names, numbers, values
    return struct


def _class_structs(classes: Any) -> tuple[Any, list[Class]]:
    if not isinstance(classes, Sequence) or not all(isinstance(one, Class) for one in classes):
        raise TypeError("class_list: it must be a sequence of fdsl.Class")
    if not 1 <= len(classes) <= _CLASSES_MAX:
        raise ValueError(f"class_list: it has {len(classes)} classes; there must be 1 to {_CLASSES_MAX}")
    structs = (ClassStruct * len(classes))()
    for index, (struct, one) in enumerate(zip(structs, classes)):
        for field, value in one._asdict().items():
            name, is_float = f"class_list[{index}].{field}", isinstance(getattr(struct, field), float)
            if is_float and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name}: it must be a number, not {type(value).__name__}")
            try:
                setattr(struct, field, float(value) if is_float else integer(name, value, 0, _U32))
            except OverflowError:
                raise ValueError(f"{name}: it is too large") from None
    return structs, list(classes)
