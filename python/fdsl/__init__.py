"""Images for training: the Python package of libfdsl. A Generator makes VisualAtom images by number, on the CPU or a CUDA
GPU. A Loader reads data sets in class folders (Folder) or tar shards (Shards), and decodes them ahead; it also delivers
rows of Embeddings.

>>> import fdsl
>>> generator = fdsl.Generator(classes=10, res=64)
>>> images, labels = generator.generate(first=0, count=4)
>>> images.numpy().shape
(4, 1, 64, 64)
>>> generator.close()

fdsl.torch.Loader feeds PyTorch from both. Importing needs neither NumPy nor PyTorch, starts no thread and does not use CUDA.
"""

from ._array import Array
from ._embeddings import Embeddings
from ._generator import Class, Generator
from ._library import Error, Unavailable, cuda_devices, library_path
from ._library import version as __version__
from ._stream import CenterCrop, Folder, Loader, RandomResizedCrop, Resize, Shards

__all__ = [
    "Array", "CenterCrop", "Class", "Embeddings", "Error", "Folder", "Generator", "Loader", "RandomResizedCrop", "Resize", "Shards",
    "Unavailable", "__version__", "cuda_devices", "library_path",
]  # fmt: skip
