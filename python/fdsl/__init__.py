"""Images for training: the Python package of libfdsl. A Generator makes VisualAtom images by number, on the CPU or a CUDA
GPU. A Loader delivers batches of data sets, on either: class folders (Folder), tar shards (Shards), generated images
(Images), rows of embeddings (Embeddings), or a mixture of data sets (mix). It prepares them ahead. A Trainer trains a network of fdsl-bench on them. A Monitor records the load of GPUs and CPU over time.

>>> import fdsl
>>> generator = fdsl.Generator(classes=10, res=64)
>>> images, labels = generator.generate(first=0, count=4)
>>> images.numpy().shape
(4, 1, 64, 64)
>>> generator.close()

fdsl.torch.Loader is the same for PyTorch. Importing needs neither NumPy nor PyTorch, starts no thread and does not use CUDA.
"""

from . import classes, search
from ._array import Array
from ._embeddings import Embeddings
from ._generator import Class, ClassTable, Generator
from ._images import Images
from ._library import Error, Unavailable, cuda_devices, library_path
from ._library import version as __version__
from ._mix import Mixture, mix
from ._monitor import Monitor
from ._stream import CenterCrop, ColorJitter, CutMix, Folder, GaussianBlur, Loader, MixUp, RandAugment, RandomErasing
from ._stream import RandomGrayscale, RandomResizedCrop, Resize, Shards
from ._trainer import Loss, Score, Trainer

__all__ = [
    "Array", "CenterCrop", "Class", "ClassTable", "ColorJitter", "CutMix", "Embeddings", "Error", "Folder", "GaussianBlur", "Generator",
    "Images", "Loader", "Loss", "MixUp", "Mixture",
    "Monitor", "RandAugment", "RandomErasing", "RandomGrayscale", "RandomResizedCrop", "Resize", "Score", "Shards", "Trainer", "Unavailable", "__version__", "classes", "cuda_devices",
    "library_path", "mix", "search",
]  # fmt: skip
