"""Batches for PyTorch: the Loader of this package, with tensors instead of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, Optional

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("fdsl.torch: PyTorch is not installed; install fdsl[torch]") from None

from . import _stream
from ._generator import Generator
from ._images import of_generator
from ._memory import old_torch, raw_torch_stream

if reason := old_torch(torch):
    raise ImportError(f"fdsl.torch: {reason}")

Batch = tuple[torch.Tensor, Any]  # labels, targets or masks; None if the samples have none

__all__ = ["Loader"]


class Loader(_stream.Loader):
    """An iterable of (images, labels): an fdsl.Loader whose items are PyTorch tensors.

    Loader(source, batch_size, ...)              the arguments of fdsl.Loader
    Loader(generator, batches_per_epoch, ...)    an fdsl.Generator; see below

    The order, the epochs, the position and the errors are those of fdsl.Loader. Differences:

    device        also a torch.device; "cuda" is PyTorch's current device
    pin_memory    for the CPU: the tensors are in pinned memory, from which PyTorch copies to a GPU without waiting
    labels        the label of a masked sample is -100, which cross_entropy() ignores. With fdsl.MixUp or fdsl.CutMix, the
                  targets are instead of the labels; the row of a masked part has the weight 0. Masks are uint8, of
                  shape (count, height, width)

    On the CPU, tensors use the memory of the library without a copy, unless pin_memory is set. On CUDA, PyTorch allocates
    the tensors, and the library copies each batch into them on the current stream, which waits for the batch. The host
    never waits for the GPU; it waits only if no batch is ready. The caller owns all tensors, and may keep or change them.

    Loader(generator, batches_per_epoch, rank=0, world_size=1, seed=0, prefetch=2, shuffle=True, count=None) delivers the
    images of a generator, on its device, in batches of `count` images (None: generator.batch). With E = batches_per_epoch *
    world_size * count, epoch e has the images numbered e * E to (e + 1) * E - 1. It is the same as a Loader over
    fdsl.Images(..., count=E, fresh=True).

    >>> import fdsl, fdsl.torch
    >>> generator = fdsl.Generator(classes=10, res=64, dtype="float32", batch=8)
    >>> for images, labels in fdsl.torch.Loader(generator, batches_per_epoch=2):
    ...     print(tuple(images.shape), images.dtype, labels.dtype)
    (8, 1, 64, 64) torch.float32 torch.int64
    (8, 1, 64, 64) torch.float32 torch.int64
    """

    _label_of_masked = -100

    def __init__(self, source: Any, *positional: Any, pin_memory: bool = False, **named: Any) -> None:
        if isinstance(source, Generator):
            source, batch_size, named = of_generator(source, *positional, **named)
            positional = (batch_size,)
        elif len(positional) > 1:
            raise TypeError("rank: give the arguments after batch_size by name")
        super().__init__(source, *positional, **named)
        if _stream.flag("pin_memory", pin_memory) and self.device != "cpu":
            self.close()
            raise ValueError(f'pin_memory: the tensors are on {self.device}; use it only with device="cpu"')
        self._arguments["pin_memory"] = pin_memory
        self._fill = self._filler() if pin_memory or self.device != "cpu" else None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Batch]: ...

    def _take(self) -> Optional[Batch]:
        if self._fill is not None:
            return self._fill()
        arrays = super()._take()
        if arrays is None:
            return None
        images, labels = arrays
        return torch.from_dlpack(images), None if labels is None else torch.from_dlpack(labels)

    def _filler(self) -> Callable[[], Optional[Batch]]:
        """Returns a function that returns the next batch in new tensors. All that does not change is computed here."""
        stream, device, empty = self._stream, torch.device(self.device), torch.empty
        capacity, labelled, masked = int(stream.info.capacity), stream.labelled, self._label_of_masked
        shape, dtype, index = (capacity, *self.shape), getattr(torch, self.dtype), torch.int64
        classes, single, plane, byte = stream.classes, torch.float32, stream.mask_shape, torch.uint8
        where: dict[str, Any] = {"device": device, **({"pin_memory": True} if device.type == "cpu" else {})}
        current: Callable[[int], Optional[int]] = lambda _: None
        if device.type == "cuda":
            current = raw_torch_stream(torch)

        def fill() -> Optional[Batch]:
            images = empty(shape, dtype=dtype, **where)
            if classes:
                targets = empty((capacity, classes), dtype=single, **where)
                count = stream.fill(images.data_ptr(), None, current(stream.device), targets.data_ptr())
                return None if count is None else (images[:count], targets[:count])
            if plane:
                masks = empty((capacity, *plane), dtype=byte, **where)
                count = stream.fill(images.data_ptr(), None, current(stream.device), None, masks.data_ptr())
                return None if count is None else (images[:count], masks[:count])
            labels = empty(capacity, dtype=index, **where) if labelled else None
            to = None if labels is None else labels.data_ptr()
            count = stream.fill(images.data_ptr(), to, current(stream.device))
            if count is None:
                return None
            if labels is not None and stream.masks:
                labels.masked_fill_(labels == -1, masked)
            if count < capacity:
                return images[:count], None if labels is None else labels[:count]
            return images, labels

        return fill
