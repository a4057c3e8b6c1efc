"""Mixtures: data sets whose batches have a fixed share of samples from each of several data sets."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from ._generator import _text
from ._library import MIX_FIRST, MixConfigStruct, StreamConfigStruct, check, integer, lib
from ._stream import _Source

_SOURCES_MAX, _CHANGES_MAX = 16, 15


def _weights(name: str, weights: Any, count: int) -> list[float]:
    """Returns the weights of all sources. The library checks their values."""
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
        raise TypeError(f"{name}: it must be a list of numbers, not {type(weights).__name__}")
    if len(weights) != count:
        raise ValueError(f"{name}: there are {len(weights)} weights for {count} sources")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"{name}: a weight must be a number, not {type(weight).__name__}")
    return [float(weight) for weight in weights]


def _classes(classes: Any, count: int) -> list[int]:
    """Returns the number of classes of each source; 0: not given."""
    given = [None] * count if classes is None else list(classes)
    if len(given) != count:
        raise ValueError(f"num_classes: there are {len(given)} numbers for {count} sources")
    return [0 if value is None else integer("num_classes", value, 1, 1 << 24) for value in given]


# The arguments of mix() that have other names in messages of the library.
_ARGUMENTS = {"change_steps": "changes", "change_weights": "changes", "classes": "num_classes"}


class Mixture(_Source):
    """A data set whose batches have samples of all `sources`, in proportion to their weights. fdsl.mix is another name of this class.

    sources    1 to 16 data sets: fdsl.Folder, fdsl.Shards and fdsl.Images, at least one of the first two
    weights    one per source, from 0 on, with at most four decimals; only their ratios count. Each step of all ranks has the
               share of each source up to less than two samples, and so has any number of steps from the beginning on
    labels     "joined": labels are those of the sources; "offset": the classes of each source follow those of the source
               before it
    num_classes
               number of classes of each source, such as [None, 1000]; None: those that it names. With "offset", fdsl.Shards
               need it unless they are the last source; a larger label makes a sample a broken one
    epoch      the source that ends an epoch, or its index: an epoch has each of its samples exactly once. None: the first one
               that is not fdsl.Images
    changes    other weights from a step on, such as {1000: [0.5, 0.4, 0.1]}; steps count from 1 over all epochs. The source
               that ends an epoch must keep its share

    The other data sets go on where the previous epoch ended, and begin again when all their samples were delivered. The
    images of fdsl.Images are numbered from 0 on and never repeat, whatever count and fresh say.
    Transforms, dtype, channels and layout of a Loader are for the data sets; fdsl.Images must have the same size, type and
    layout (out_res, dtype, channels, layout). MixUp, CutMix and masks are refused.
    Which source fills which sample depends on the weights, the seed, the epoch and the step alone, so batches are the same
    on any number of threads and ranks, and after load_state_dict().
    Raises ValueError or TypeError, whose message names the argument. Pickling stores the arguments. `sources` are the data sets
    that it mixes. `len()` is the number of samples of an epoch; `classes` are the names of its classes, if they have names.

    >>> import fdsl
    >>> drawn = fdsl.Images(classes=10, res=32, channels=3, count=1)
    >>> photos = fdsl.Folder("photos")    # doctest: +SKIP
    >>> data = fdsl.mix([photos, drawn], weights=[0.3, 0.7], labels="offset")    # doctest: +SKIP
    >>> loader = fdsl.Loader(data, batch_size=256, transforms=fdsl.RandomResizedCrop(32))    # doctest: +SKIP
    """

    __slots__ = ("sources",)

    def __init__(
        self, sources: Sequence[Any], weights: Sequence[float], *, labels: str = "joined",
        num_classes: Optional[Sequence[Optional[int]]] = None, epoch: Union[None, int, _Source] = None,
        changes: Optional[Mapping[int, Sequence[float]]] = None,
    ) -> None:  # fmt: skip
        if not isinstance(sources, (list, tuple)):
            raise TypeError(f"sources: it must be a list of data sets, not {type(sources).__name__}")
        for source in sources:
            if not isinstance(source, _Source):
                raise TypeError(f"sources: {type(source).__name__} is not a data set, such as fdsl.Folder or fdsl.Images")
            source._check_open()
        count = integer("sources: their number", len(sources), 1, _SOURCES_MAX)
        given = _weights("weights", weights, count)
        if changes is not None and not isinstance(changes, Mapping):
            raise TypeError(f"changes: it must be a dict of steps and weights, not {type(changes).__name__}")
        changed = dict(changes or {})
        integer("changes: their number", len(changed), 0, _CHANGES_MAX)
        steps = sorted(integer("changes: a step", step, 1, (1 << 32) - 1) for step in changed)
        rows = [weight for step in steps for weight in _weights(f"changes: step {step}", changed[step], count)]
        if isinstance(epoch, _Source):
            places = [i for i, source in enumerate(sources) if source is epoch]
            if not places:
                raise ValueError("epoch: it is not one of the sources")
            epoch = places[0]
        c = MixConfigStruct()
        check(lib.fdsl_mix_config_init(c, ctypes.sizeof(c)))
        c.sources = (ctypes.c_void_p * count)(*(source._handle for source in sources))
        c.weights = (ctypes.c_double * count)(*given)
        c.count = count
        c.epoch = MIX_FIRST if epoch is None else integer("epoch", epoch, 0, count - 1)
        c.labels = _text("labels", labels)
        c.classes = (ctypes.c_uint32 * count)(*_classes(num_classes, count))
        c.change_count = len(steps)
        c.change_steps = (ctypes.c_uint64 * max(1, len(steps)))(*steps)
        c.change_weights = (ctypes.c_double * max(1, len(rows)))(*rows)
        words = {"sources": list(sources), "weights": given, "labels": labels, "num_classes": num_classes, "epoch": epoch, "changes": changes}
        self.sources = list(sources)
        try:
            self._open(lambda handle: lib.fdsl_source_mix(c, handle), words)
        except ValueError as error:
            name, colon, reason = str(error).partition(":")
            raise ValueError(_ARGUMENTS.get(name, name) + colon + reason) from None

    def _set_format(self, c: StreamConfigStruct, transforms: Any, dtype: Any, channels: Any, layout: Any) -> None:
        own = [source.dtype for source in self.sources if source.dtype is not None]
        super()._set_format(c, transforms, own[0] if dtype is None and own else dtype, channels, layout)


mix = Mixture
