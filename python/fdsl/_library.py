"""Finds libfdsl.so, declares its functions and structs (src/lib/fdsl.h), and turns its error codes into exceptions."""

from __future__ import annotations

import ctypes
import operator
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p
from typing import Callable, NoReturn

from ._version import VERSION

CPU = -1  # FDSL_CPU
CHANNELS_MAX = 3
WAIT_S = 0.1  # Python handles signals, such as that of Ctrl-C, between two waits


class Error(RuntimeError):
    """The library could not do its work: out of memory, a CUDA call failed, a sample cannot be read, or an object was
    used after fork()."""


class Unavailable(Error):
    """This build of the library, or this machine, does not support what was requested."""


class ClassStruct(ctypes.Structure):
    """struct fdsl_class"""

    _fields_ = [
        ("id", c_uint32), ("vertices", c_uint32), ("orbits", c_uint32), ("oval_x", c_float), ("oval_y", c_float),
        ("freq1", c_uint32), ("freq2", c_uint32), ("noise", c_float), ("radius", c_uint32), ("line_width", c_float),
    ]  # fmt: skip


class ClassTableStruct(ctypes.Structure):
    """struct fdsl_class_table"""

    _fields_ = [
        ("size", c_size_t), ("formula", c_char_p), ("count", c_uint32), ("parameters", c_uint32),
        ("names", POINTER(c_char_p)), ("ids", POINTER(c_uint32)), ("values", POINTER(c_double)),
    ]  # fmt: skip


class TargetsStruct(ctypes.Structure):
    """struct fdsl_targets"""

    _fields_ = [("size", c_size_t), ("labels", c_void_p), ("masks", c_void_p), ("points", c_void_p)]


class ConfigStruct(ctypes.Structure):
    """struct fdsl_config"""

    _fields_ = [
        ("size", c_size_t), ("formula", c_char_p), ("seed", c_uint64), ("res", c_uint32), ("classes", c_uint32),
        ("preset", c_char_p), ("preset_file", c_char_p), ("class_file", c_char_p),
        ("class_list", POINTER(ClassStruct)), ("class_count", c_uint32),
        ("out_res", c_uint32), ("fit", c_char_p), ("channels", c_uint32), ("layout", c_char_p), ("dtype", c_char_p),
        ("mean", c_double * CHANNELS_MAX), ("std", c_double * CHANNELS_MAX),
        ("generator", c_char_p), ("device", c_int), ("threads", c_int), ("batch", c_uint32),
        ("class_table", POINTER(ClassTableStruct)), ("random", c_char_p), ("draw", c_char_p),
        ("min_lit", c_double), ("cache_dir", c_char_p),
    ]  # fmt: skip


class LayoutStruct(ctypes.Structure):
    """struct fdsl_layout"""

    _fields_ = [
        ("size", c_size_t), ("shape", c_uint32 * 3), ("strides_bytes", c_uint64 * 3),
        ("element_bytes", c_uint32), ("image_bytes", c_uint64), ("mask_bytes", c_uint64),
        ("points", c_uint32), ("multi_hot", c_uint32),
    ]  # fmt: skip


class SharesStruct(ctypes.Structure):
    """struct fdsl_shares"""

    _fields_ = [("mean", c_double), ("quartiles", c_double * 3), ("limits", c_double * 4), ("below", c_uint64 * 4)]


class FractalsStruct(ctypes.Structure):
    """struct fdsl_fractals"""

    _fields_ = [
        ("size", c_size_t), ("classes", c_uint32), ("orbits", c_uint32), ("points", c_uint32), ("flips", c_uint32),
        ("res", c_uint32), ("maps", c_double), ("overflows", c_uint64), ("overflow_classes", c_uint64),
        ("cells", SharesStruct), ("set_pixels", SharesStruct),
        ("images", c_uint32), ("shown_least", c_uint32), ("shown_most", c_uint32), ("shown_mean", c_double),
        ("objects", c_uint64 * 5),
    ]  # fmt: skip


class SourceConfigStruct(ctypes.Structure):
    """struct fdsl_source_config"""

    _fields_ = [
        ("size", c_size_t), ("path", c_char_p), ("kind", c_char_p), ("image", c_char_p), ("label", c_char_p),
        ("cache_dir", c_char_p), ("cache_bytes", c_uint64), ("labels", c_char_p),
    ]  # fmt: skip


class SourceInfoStruct(ctypes.Structure):
    """struct fdsl_source_info"""

    _fields_ = [
        ("size", c_size_t), ("samples", c_uint64), ("bytes", c_uint64), ("classes", c_uint32), ("files", c_uint32),
        ("shards", c_int), ("hash", c_uint64),
        ("width", c_uint32), ("columns", c_uint32), ("dtype", c_char_p), ("labelled", c_int), ("rows_found", c_uint64),
        ("filtered", c_uint64), ("invalid", c_uint64), ("duplicates", c_uint64), ("unsampled", c_uint64),
    ]  # fmt: skip


class RowsConfigStruct(ctypes.Structure):
    """struct fdsl_rows_config"""

    _fields_ = [
        ("size", c_size_t), ("path", c_char_p), ("tensor", c_char_p), ("labels", c_char_p), ("align", c_uint32),
    ]  # fmt: skip


class SelectConfigStruct(ctypes.Structure):
    """struct fdsl_select_config"""

    _fields_ = [
        ("size", c_size_t), ("keep", POINTER(c_uint8)), ("keep_count", c_uint64), ("labels", POINTER(c_int64)),
        ("label_count", c_uint64), ("validate", c_int), ("norm_min", c_double), ("norm_max", c_double), ("dedup", c_int),
        ("sample", c_uint64), ("seed", c_uint64), ("dtype", c_char_p), ("device", c_int), ("num_threads", c_int),
    ]  # fmt: skip


class MixConfigStruct(ctypes.Structure):
    """struct fdsl_mix_config"""

    _fields_ = [
        ("size", c_size_t), ("sources", POINTER(c_void_p)), ("weights", POINTER(c_double)), ("count", c_uint32),
        ("epoch", c_uint32), ("labels", c_char_p), ("classes", POINTER(c_uint32)), ("change_count", c_uint32), ("change_steps", POINTER(c_uint64)),
        ("change_weights", POINTER(c_double)),
    ]  # fmt: skip


class StreamConfigStruct(ctypes.Structure):
    """struct fdsl_stream_config"""

    _fields_ = [
        ("size", c_size_t), ("batch_size", c_uint32), ("rank", c_uint32), ("world_size", c_uint32), ("seed", c_uint64),
        ("shuffle", c_int), ("shuffle_buffer", c_uint32), ("lanes", c_uint32), ("drop_last", c_int),
        ("out_res", c_uint32), ("fit", c_char_p), ("flip", c_int), ("exact_resize", c_int), ("channels", c_uint32),
        ("layout", c_char_p), ("dtype", c_char_p), ("mean", c_double * CHANNELS_MAX), ("std", c_double * CHANNELS_MAX),
        ("num_threads", c_int), ("prefetch", c_uint32), ("held", c_uint32), ("shard_bytes", c_uint64),
        ("resident_bytes", c_uint64), ("resident_device_bytes", c_uint64), ("on_error", c_char_p), ("device", c_int),
        ("decoder", c_char_p), ("device_share", c_double),
        ("rand_augment", c_double), ("rand_augment_ops", c_uint32), ("erasing", c_double),
        ("mixup", c_double), ("cutmix", c_double), ("classes", c_uint32),
        ("resident", c_int), ("wait_s", c_double),
        ("brightness", c_double * 2), ("contrast", c_double * 2), ("saturation", c_double * 2), ("hue", c_double * 2),
        ("color_jitter_p", c_double), ("grayscale_p", c_double), ("blur_p", c_double), ("blur_sigma", c_double * 2),
        ("blur_kernel", c_uint32), ("axes", c_char_p), ("rand_augment_policy", c_char_p),
        ("crop_scale", c_double * 2), ("crop_ratio", c_double * 2),
    ]  # fmt: skip


class StreamInfoStruct(ctypes.Structure):
    """struct fdsl_stream_info"""

    _fields_ = [
        ("size", c_size_t), ("shape", c_uint32 * 4), ("element_bytes", c_uint32), ("image_bytes", c_uint64),
        ("capacity", c_uint32), ("steps", c_uint64), ("samples", c_uint64), ("classes", c_uint32), ("mask_bytes", c_uint64),
        ("multi_hot", c_uint32),
    ]  # fmt: skip


class BatchInfoStruct(ctypes.Structure):
    """struct fdsl_batch_info"""

    _fields_ = [
        ("size", c_size_t), ("count", c_uint32), ("masked", c_uint32), ("epoch", c_uint64), ("step", c_uint64),
        ("last", c_int),
    ]  # fmt: skip


class TensorStruct(ctypes.Structure):
    """struct fdsl_tensor, which is DLTensor"""

    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
        ("shape", c_void_p), ("strides", c_void_p), ("byte_offset", c_uint64),
    ]  # fmt: skip


class StateStruct(ctypes.Structure):
    """struct fdsl_state"""

    _fields_ = [
        ("size", c_size_t), ("epoch", c_uint64), ("sample", c_uint64), ("samples", c_uint64), ("seed", c_uint64),
        ("data", c_uint64), ("transform", c_uint64), ("global_batch", c_uint32), ("lanes", c_uint32),
        ("shuffle_buffer", c_uint32), ("drop_last", c_uint32),
    ]  # fmt: skip


class StatsStruct(ctypes.Structure):
    """struct fdsl_stream_stats"""

    _fields_ = [
        ("size", c_size_t), ("batches", c_uint64), ("samples", c_uint64), ("masked", c_uint64), ("bytes", c_uint64),
        ("wait_s", c_double), ("read_s", c_double), ("decode_s", c_double), ("ready", c_double),
        ("memory_bytes", c_uint64), ("shard_bytes", c_uint64),
        ("resident_samples", c_uint64), ("resident_device_samples", c_uint64),
    ]  # fmt: skip


class MonitorConfigStruct(ctypes.Structure):
    """struct fdsl_monitor_config"""

    _fields_ = [
        ("size", c_size_t), ("path", c_char_p), ("interval_s", c_double), ("device", c_int), ("rank", c_uint32),
        ("name", c_char_p),
    ]  # fmt: skip


class TrainerConfigStruct(ctypes.Structure):
    """struct fdsl_trainer_config"""

    _fields_ = [
        ("size", c_size_t), ("variant", c_char_p), ("options", POINTER(c_char_p)), ("device", c_int), ("threads", c_int),
        ("stream", c_void_p), ("samples", c_uint64), ("shape", c_uint32 * 4), ("classes", c_uint32), ("dtype", c_char_p),
        ("multi_hot", c_int), ("mixed", c_int), ("rank", c_uint32), ("world_size", c_uint32), ("address", c_char_p),
        ("port", c_uint32), ("mpi_comm", c_void_p), ("nccl_id", c_void_p),
    ]  # fmt: skip


class TrainerBatchStruct(ctypes.Structure):
    """struct fdsl_trainer_batch"""

    _fields_ = [
        ("size", c_size_t), ("images", c_void_p), ("labels", c_void_p), ("multi_hot", c_void_p), ("count", c_uint32),
        ("share", c_float),
    ]  # fmt: skip


class TrainerScoreStruct(ctypes.Structure):
    """struct fdsl_trainer_score"""

    _fields_ = [
        ("size", c_size_t), ("samples", c_uint64), ("loss", c_double), ("accuracy", c_double), ("precision", c_double),
    ]  # fmt: skip


class TrainerInfoStruct(ctypes.Structure):
    """struct fdsl_trainer_info"""

    _fields_ = [
        ("size", c_size_t), ("variant", c_char_p), ("parameters", c_uint64), ("memory_bytes", c_uint64),
        ("classes", c_uint32), ("epoch", c_uint32), ("epochs", c_uint32), ("step", c_uint32), ("steps", c_uint32),
        ("batch", c_uint32), ("train_loss", c_double), ("train_accuracy", c_double), ("test_loss", c_double),
        ("test_accuracy", c_double), ("epoch_s", c_double),
    ]  # fmt: skip


MIX_FIRST = (1 << 32) - 1  # FDSL_MIX_FIRST
END, PENDING = 5, 6  # FDSL_END, FDSL_PENDING
IMAGES, LABELS, NUMBERS, ROWS, TARGETS, MASKS = 0, 1, 2, 3, 4, 5  # enum fdsl_field

_FUNCTIONS = {  # name: (result, arguments); a generator, a source, a stream, a batch and a CUDA stream are void *
    "fdsl_error": (c_char_p, []),
    "fdsl_cuda_devices": (c_int, []),
    "fdsl_config_init": (c_int, [POINTER(ConfigStruct), c_size_t]),
    "fdsl_open": (c_int, [POINTER(ConfigStruct), POINTER(c_void_p)]),
    "fdsl_close": (None, [c_void_p]),
    "fdsl_describe": (c_int, [c_void_p, POINTER(LayoutStruct)]),
    "fdsl_classes": (c_uint32, [c_void_p, POINTER(ClassStruct), c_uint32]),
    "fdsl_get_classes": (c_int, [c_void_p, POINTER(ClassTableStruct)]),
    "fdsl_describe_fractals": (c_int, [c_void_p, c_int, POINTER(FractalsStruct)]),
    "fdsl_search_fractals": (c_int, [c_uint32, c_double, c_uint32, c_int, POINTER(c_double), c_uint32]),
    "fdsl_write_classes": (c_int, [POINTER(ClassTableStruct), c_char_p, c_int]),
    "fdsl_memory_bytes": (c_uint64, [c_void_p]),
    "fdsl_generate": (c_int, [c_void_p, c_uint64, c_uint32, c_void_p, c_void_p, c_void_p]),
    "fdsl_generate_list": (c_int, [c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p]),
    "fdsl_generate_targets": (c_int, [c_void_p, c_void_p, c_uint64, c_uint32, c_void_p, POINTER(TargetsStruct), c_void_p]),
    "fdsl_generate_next": (c_int, [c_void_p, c_void_p, c_uint64, c_uint32, c_void_p, c_void_p, c_void_p]),
    "fdsl_alloc": (c_int, [c_int, c_size_t, POINTER(c_void_p)]),
    "fdsl_free": (None, [c_int, c_void_p]),
    "fdsl_copy": (c_int, [c_int, c_void_p, c_void_p, c_size_t, c_void_p]),
    "fdsl_wait": (c_int, [c_int, c_void_p]),
    "fdsl_order": (c_int, [c_int, c_void_p, c_void_p]),
    "fdsl_capturing": (c_int, [c_int, c_void_p]),
    "fdsl_warnings": (c_char_p, []),
    "fdsl_source_config_init": (c_int, [POINTER(SourceConfigStruct), c_size_t]),
    "fdsl_source_open": (c_int, [POINTER(SourceConfigStruct), POINTER(c_void_p)]),
    "fdsl_images_begin": (c_int, [POINTER(ConfigStruct), c_uint64, c_int, POINTER(c_void_p)]),
    "fdsl_rows_config_init": (c_int, [POINTER(RowsConfigStruct), c_size_t]),
    "fdsl_rows_open": (c_int, [POINTER(RowsConfigStruct), POINTER(c_void_p)]),
    "fdsl_select_config_init": (c_int, [POINTER(SelectConfigStruct), c_size_t]),
    "fdsl_rows_select": (c_int, [c_void_p, POINTER(SelectConfigStruct), POINTER(c_void_p)]),
    "fdsl_rows_begin": (c_int, [c_void_p, POINTER(SelectConfigStruct), POINTER(c_void_p)]),
    "fdsl_mix_config_init": (c_int, [POINTER(MixConfigStruct), c_size_t]),
    "fdsl_source_mix": (c_int, [POINTER(MixConfigStruct), POINTER(c_void_p)]),
    "fdsl_source_begin": (c_int, [POINTER(SourceConfigStruct), POINTER(c_void_p)]),
    "fdsl_source_wait": (c_int, [c_void_p, c_double]),
    "fdsl_source_close": (None, [c_void_p]),
    "fdsl_source_describe": (c_int, [c_void_p, POINTER(SourceInfoStruct)]),
    "fdsl_source_class": (c_char_p, [c_void_p, c_uint32]),
    "fdsl_stream_config_init": (c_int, [POINTER(StreamConfigStruct), c_size_t]),
    "fdsl_stream_begin": (c_int, [c_void_p, POINTER(StreamConfigStruct), POINTER(c_void_p)]),
    "fdsl_stream_close": (None, [c_void_p]),
    "fdsl_stream_describe": (c_int, [c_void_p, POINTER(StreamInfoStruct)]),
    "fdsl_stream_next": (c_int, [c_void_p, c_void_p, POINTER(c_void_p)]),
    "fdsl_stream_wait": (c_int, [c_void_p, c_double]),
    "fdsl_stream_fill": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_void_p]),
    "fdsl_stream_fill_targets": (
        c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_void_p],
    ),
    "fdsl_stream_fill_masks": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_void_p]),
    "fdsl_stream_seek": (c_int, [c_void_p, c_uint64, c_uint64]),
    "fdsl_stream_save": (c_int, [c_void_p, POINTER(StateStruct)]),
    "fdsl_stream_load": (c_int, [c_void_p, POINTER(StateStruct)]),
    "fdsl_state_write": (c_int, [POINTER(StateStruct), c_char_p]),
    "fdsl_state_read": (c_int, [c_char_p, POINTER(StateStruct)]),
    "fdsl_stream_stats": (c_int, [c_void_p, POINTER(StatsStruct)]),
    "fdsl_stream_cancel": (None, [c_void_p]),
    "fdsl_batch_describe": (c_int, [c_void_p, POINTER(BatchInfoStruct)]),
    "fdsl_batch_tensor": (c_int, [c_void_p, c_int, POINTER(TensorStruct)]),
    "fdsl_batch_release": (c_int, [c_void_p, c_void_p]),
    "fdsl_monitor_config_init": (c_int, [POINTER(MonitorConfigStruct), c_size_t]),
    "fdsl_monitor_start": (c_int, [POINTER(MonitorConfigStruct), POINTER(c_void_p)]),
    "fdsl_monitor_phase": (c_int, [c_void_p, c_char_p]),
    "fdsl_monitor_stop": (c_int, [c_void_p]),
    "fdsl_trainer_config_init": (c_int, [POINTER(TrainerConfigStruct), c_size_t]),
    "fdsl_trainer_open": (c_int, [POINTER(TrainerConfigStruct), POINTER(c_void_p)]),
    "fdsl_trainer_close": (None, [c_void_p]),
    "fdsl_trainer_describe": (c_int, [c_void_p, POINTER(TrainerInfoStruct)]),
    "fdsl_trainer_step": (c_int, [c_void_p, c_uint32]),
    "fdsl_trainer_step_batch": (c_int, [c_void_p, POINTER(TrainerBatchStruct), c_void_p]),
    "fdsl_trainer_read": (c_int, [c_void_p, POINTER(TrainerScoreStruct)]),
    "fdsl_trainer_evaluate": (c_int, [c_void_p, POINTER(TrainerScoreStruct)]),
    "fdsl_trainer_evaluate_batch": (
        c_int, [c_void_p, POINTER(TrainerBatchStruct), c_void_p, c_void_p, POINTER(TrainerScoreStruct)],
    ),
    "fdsl_trainer_save": (c_int, [c_void_p, c_char_p]),
    "fdsl_trainer_load": (c_int, [c_void_p, c_char_p]),
    "fdsl_trainer_export": (c_int, [c_void_p, c_char_p]),
    "fdsl_trainer_import": (c_int, [c_void_p, c_char_p]),
}


def _load(path: str, required: str) -> tuple[ctypes.CDLL, str]:
    try:
        library = ctypes.CDLL(path)
        library.fdsl_version.restype = c_char_p
        version: str = library.fdsl_version().decode()
        if required and version != required:
            raise ImportError(f"fdsl {required} needs libfdsl {required}, but {path} is {version}")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"fdsl cannot load {path} ({error}); install the wheel, or set FDSL_LIBRARY to the path of libfdsl.so"
        ) from None
    return library, version


def library_path() -> str:
    """Returns the path of the library that is loaded: FDSL_LIBRARY, else libfdsl.so in the package's folder.

    Thread-safe. The environment is read once, when fdsl is imported.
    """
    return _PATH


_PATH = os.environ.get("FDSL_LIBRARY") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libfdsl.so")
if os.path.exists(_PATH):  # without a slash, dlopen() would not look in the current folder
    _PATH = os.path.abspath(_PATH)
lib, version = _load(_PATH, VERSION)


def cuda_devices() -> int:
    """Returns the number of CUDA devices; 0 without a GPU or a driver, or if the library was built without CUDA.

    Thread-safe. Raises nothing.
    """
    return int(lib.fdsl_cuda_devices())


# Words of the library's messages that have another name in Python.
_WORDS = {
    "FDSL_CPU": '"cpu"',
    'center-crop; set fit to "resize"': "fdsl.CenterCrop; use fdsl.Resize",
    "set out_res and channels": "set transforms and channels",
    "out_res, fit, flip, exact_resize, rand_augment, changes of colour, erasing, mixup, cutmix, classes, channels, layout, dtype, mean and std":
        "transforms, channels, layout and dtype",
    "classes: the targets of mixup and cutmix need": "transforms: the targets of MixUp and CutMix need",
    "the data set does not name its classes; set it": "the data set does not name its classes; set num_classes",
    "lower out_res": "lower the size of transforms",
    "blur_kernel": "transforms: kernel_size",
    "sample: only": "n: only",
    "fdsl_stream_seek()": "set_epoch()",
}


def fail(status: int) -> NoReturn:
    """Raises the library's latest error in the calling thread. `status`: the return value of the call that failed."""
    kind = {2: ValueError, 4: Unavailable}.get(status, Error)
    text = lib.fdsl_error().decode(errors="replace")
    for word, here in _WORDS.items():
        text = text.replace(word, here)
    raise kind(text)


def check(status: int) -> None:
    """Raises an exception unless a function of the library returned FDSL_OK."""
    if status:
        fail(status)


def open_source(begin: Callable[[c_void_p], int]) -> c_void_p:
    """Opens a source in a thread of the library, so that a KeyboardInterrupt ends it. Returns its handle."""
    handle = c_void_p()
    try:
        status = int(begin(handle))
        while status == PENDING:
            status = int(lib.fdsl_source_wait(handle, WAIT_S))
        check(status)
    except BaseException:
        lib.fdsl_source_close(handle)
        raise
    return handle


def integer(name: str, value: object, least: int, most: int) -> int:
    """Returns `value` as an int. Raises TypeError or ValueError, whose message names the argument."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: it must be an integer, not {type(value).__name__}") from None
    if not least <= result <= most:
        raise ValueError(f"{name}: {result} is out of range; it must be {least} to {most}")
    return result
