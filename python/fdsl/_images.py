"""Generated images as a data set."""

from __future__ import annotations

from typing import Any, Optional

from ._generator import Class, Generator, configured
from ._library import PENDING, StreamConfigStruct, integer, lib
from ._stream import _ORDER, _Source, flag

_COUNT_MAX = (1 << 31) - 1
_OF_THE_LOADER = {"device": "device", "threads": "num_threads", "batch": "batch_size"}
_NAMES = {"classes", *(configured.__kwdefaults__ or ())} - _OF_THE_LOADER.keys()


class Images(_Source):
    """A data set of generated images, which any Loader takes. Nothing is stored: the Loader's device generates each batch.

    classes    as for Generator
    count      number of images per epoch, 1 to 2^31 - 1
    fresh      False: each epoch has the images 0 to count - 1 of a Generator; True: each epoch has new images

    All other arguments are those of Generator, among them the format of the images: out_res, channels, layout, dtype,
    mean and std. Exceptions are device, threads and batch, which are device, num_threads and batch_size of the Loader.
    With shuffle, the order of an epoch is a permutation of all `count` images, which takes no memory.

    >>> import fdsl
    >>> data = fdsl.Images(classes=10, res=64, dtype="float32", count=100)
    >>> with fdsl.Loader(data, batch_size=32, seed=1) as loader:
    ...     print([images.shape for images, labels in loader])
    [(32, 1, 64, 64), (32, 1, 64, 64), (32, 1, 64, 64), (4, 1, 64, 64)]
    """

    __slots__ = ("dtype",)

    def __init__(self, classes: Optional[int] = None, *, count: int, fresh: bool = False, **arguments: Any) -> None:
        for name in arguments:
            if name in _OF_THE_LOADER:
                raise TypeError(f"{name}: the Loader decides about this; give it {_OF_THE_LOADER[name]}")
            if name not in _NAMES:
                raise TypeError(f"{name}: Images has no such argument")
        if classes is not None and any(arguments.get(name) is not None for name in ("class_list", "class_file", "class_table")):
            raise ValueError("classes: class_list or class_file gives the classes; leave classes out")
        number = integer("count", count, 1, _COUNT_MAX)
        c, config = configured(classes, **arguments)
        self.dtype = config["dtype"]
        words = {"classes": classes, "count": number, "fresh": flag("fresh", fresh), **arguments}
        self._open(lambda handle: lib.fdsl_images_begin(c, number, fresh, handle) or PENDING, words)

    def _set_format(self, c: StreamConfigStruct, transforms: Any, dtype: Any, channels: Any, layout: Any) -> None:
        many = isinstance(transforms, (list, tuple)) and not hasattr(transforms, "_fields")
        for one in transforms if many else [transforms]:
            if isinstance(one, _ORDER[1:]):
                raise ValueError(
                    f"transforms: {type(one).__name__} changes only images of fdsl.Folder and fdsl.Shards; apply it in the "
                    "training loop, or prepare the images as files"
                )
        for name, value in ("transforms", transforms), ("dtype", dtype), ("channels", channels), ("layout", layout):
            if value is not None:
                raise ValueError(f"{name}: fdsl.Images decides about the format of its images; leave {name} out")

    @property
    def classes(self) -> list[Class]:  # type: ignore[override]
        """The classes, in the order of their indices. Each access returns a new list."""
        config = {name: value for name, value in self._arguments.items() if name not in ("count", "fresh")}
        with Generator(**config, batch=1, threads=1) as generator:
            return generator.classes


def of_generator(
    generator: Generator, batches_per_epoch: Optional[int] = None, rank: int = 0, world_size: int = 1, seed: int = 0,
    prefetch: int = 2, shuffle: bool = True, count: Optional[int] = None, **named: Any,
) -> tuple[Images, int, dict[str, Any]]:  # fmt: skip
    """Returns the arguments of a Loader over the images of a generator: the source, the batch size, and the others."""
    config = generator.__reduce__()[1][1]
    batch = generator.batch if count is None else integer("count", count, 1, generator.batch)
    batches = integer("batches_per_epoch", batches_per_epoch, 1, 1 << 40)
    total = batches * integer("world_size", world_size, 1, 1 << 24) * batch
    if total > _COUNT_MAX:
        raise ValueError(f"batches_per_epoch: an epoch would have {total} images; it may have {_COUNT_MAX}")
    if config["class_list"] is not None or config["class_table"] is not None:
        config["classes"] = None
    images = Images(count=total, fresh=True, **{name: config[name] for name in _NAMES})
    ahead = max(1, integer("prefetch", prefetch, 0, 1024))
    words = {"device": config["device"], "num_threads": config["threads"], **named}
    words.update(rank=rank, world_size=world_size, seed=seed, prefetch=ahead, shuffle=shuffle)
    return images, batch, words
