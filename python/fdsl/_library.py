"""Finds libfdsl.so, declares its functions and structs (src/lib/fdsl.h), and turns its error codes into exceptions."""

from __future__ import annotations

import ctypes
import operator
import os
import re
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p
from typing import Any, Callable, NoReturn, TypeVar

from ._version import VERSION

CPU = -1  # FDSL_CPU
CHANNELS_MAX = 3
WAIT_S = 0.1  # Python handles signals, such as that of Ctrl-C, between two waits


class Error(RuntimeError):
    """The library could not do its work: out of memory, a CUDA call failed, a sample cannot be read, or an object was
    used after fork()."""


class Unavailable(Error):
    """This build of the library, or this machine, does not support what was requested."""


Struct = TypeVar("Struct", bound=type[ctypes.Structure])

_TYPES = {
    "int": c_int, "float": c_float, "double": c_double, "size_t": c_size_t, "char *": c_char_p, "void *": c_void_p,
    "uint8_t": c_uint8, "uint16_t": c_uint16, "int32_t": c_int32, "uint32_t": c_uint32, "int64_t": c_int64, "uint64_t": c_uint64,
}  # fmt: skip


def _type(name: str) -> Any:
    """Returns the type of ctypes for a type of C, such as "uint32_t" or "char **"."""
    return _TYPES.get(name) or (POINTER(_type(name[:-1].strip())) if name.endswith("*") else globals()[name])


def _members(text: str) -> Callable[[Struct], Struct]:
    """Sets the fields of a struct from its members, written as in C; a struct is named as in this module."""

    def set_fields(struct: Struct) -> Struct:
        fields = []
        for declaration in text.split(";"):
            kind, names = declaration.split(maxsplit=1)
            for stars, name, count in re.findall(r"(\**)(\w+)(?:\[(\d+)\])?", names):
                one = _type(f"{kind} {stars}".rstrip())
                fields.append((name, one * int(count) if count else one))
        struct._fields_ = fields
        return struct

    return set_fields


@_members("""
    uint32_t id, vertices, orbits; float oval_x, oval_y; uint32_t freq1, freq2; float noise; uint32_t radius;
    float line_width""")
class ClassStruct(ctypes.Structure):
    """struct fdsl_class"""


@_members("size_t size; char *formula; uint32_t count, parameters; char **names; uint32_t *ids; double *values")
class ClassTableStruct(ctypes.Structure):
    """struct fdsl_class_table"""


@_members("size_t size; void *labels, *masks, *points")
class TargetsStruct(ctypes.Structure):
    """struct fdsl_targets"""


@_members("""
    size_t size; char *formula; uint64_t seed; uint32_t res, classes; char *preset, *preset_file, *class_file;
    ClassStruct *class_list; uint32_t class_count, out_res; char *fit; uint32_t channels; char *layout, *dtype;
    double mean[3], std[3]; char *generator; int device, threads; uint32_t batch; ClassTableStruct *class_table;
    char *random, *draw; double min_lit; char *cache_dir""")
class ConfigStruct(ctypes.Structure):
    """struct fdsl_config"""


@_members("""
    size_t size; uint32_t shape[3]; uint64_t strides_bytes[3]; uint32_t element_bytes; uint64_t image_bytes, mask_bytes;
    uint32_t points, multi_hot""")
class LayoutStruct(ctypes.Structure):
    """struct fdsl_layout"""


@_members("double mean, quartiles[3], limits[4]; uint64_t below[4]")
class SharesStruct(ctypes.Structure):
    """struct fdsl_shares"""


@_members("""
    size_t size; uint32_t classes, orbits, points, flips, res; double maps; uint64_t overflows, overflow_classes;
    SharesStruct cells, set_pixels; uint32_t images, shown_least, shown_most; double shown_mean; uint64_t objects[5]""")
class FractalsStruct(ctypes.Structure):
    """struct fdsl_fractals"""


@_members("size_t size; char *path, *kind, *image, *label, *cache_dir; uint64_t cache_bytes; char *labels")
class SourceConfigStruct(ctypes.Structure):
    """struct fdsl_source_config"""


@_members("""
    size_t size; uint64_t samples, bytes; uint32_t classes, files; int shards; uint64_t hash; uint32_t width, columns;
    char *dtype; int labelled; uint64_t rows_found, filtered, invalid, duplicates, unsampled""")
class SourceInfoStruct(ctypes.Structure):
    """struct fdsl_source_info"""


@_members("size_t size; char *path, *tensor, *labels; uint32_t align")
class RowsConfigStruct(ctypes.Structure):
    """struct fdsl_rows_config"""


@_members("""
    size_t size; uint8_t *keep; uint64_t keep_count; int64_t *labels; uint64_t label_count; int validate; double norm_min,
    norm_max; int dedup; uint64_t sample, seed; char *dtype; int device, num_threads""")
class SelectConfigStruct(ctypes.Structure):
    """struct fdsl_select_config"""


@_members("""
    size_t size; void **sources; double *weights; uint32_t count, epoch; char *labels; uint32_t *classes, change_count;
    uint64_t *change_steps; double *change_weights""")
class MixConfigStruct(ctypes.Structure):
    """struct fdsl_mix_config"""


@_members("""
    size_t size; uint32_t batch_size, rank, world_size; uint64_t seed; int shuffle; uint32_t shuffle_buffer, lanes;
    int drop_last; uint32_t out_res; char *fit; int flip, exact_resize; uint32_t channels; char *layout, *dtype;
    double mean[3], std[3]; int num_threads; uint32_t prefetch, held; uint64_t shard_bytes, resident_bytes,
    resident_device_bytes; char *on_error; int device; char *decoder; double device_share, rand_augment;
    uint32_t rand_augment_ops; double erasing, mixup, cutmix; uint32_t classes; int resident; double wait_s,
    brightness[2], contrast[2], saturation[2], hue[2], color_jitter_p, grayscale_p, blur_p, blur_sigma[2];
    uint32_t blur_kernel; char *axes, *rand_augment_policy; double crop_scale[2], crop_ratio[2]""")
class StreamConfigStruct(ctypes.Structure):
    """struct fdsl_stream_config"""


@_members("""
    size_t size; uint32_t shape[4], element_bytes; uint64_t image_bytes; uint32_t capacity; uint64_t steps, samples;
    uint32_t classes; uint64_t mask_bytes; uint32_t multi_hot""")
class StreamInfoStruct(ctypes.Structure):
    """struct fdsl_stream_info"""


@_members("size_t size; uint32_t count, masked; uint64_t epoch, step; int last")
class BatchInfoStruct(ctypes.Structure):
    """struct fdsl_batch_info"""


@_members("""
    void *data; int32_t device_type, device_id, ndim; uint8_t code, bits; uint16_t lanes; void *shape, *strides;
    uint64_t byte_offset""")
class TensorStruct(ctypes.Structure):
    """struct fdsl_tensor, which is DLTensor"""


@_members("""
    size_t size; uint64_t epoch, sample, samples, seed, data, transform; uint32_t global_batch, lanes, shuffle_buffer,
    drop_last""")
class StateStruct(ctypes.Structure):
    """struct fdsl_state"""


@_members("""
    size_t size; uint64_t batches, samples, masked, bytes; double wait_s, read_s, decode_s, ready; uint64_t memory_bytes,
    shard_bytes, resident_samples, resident_device_samples""")
class StatsStruct(ctypes.Structure):
    """struct fdsl_stream_stats"""


@_members("size_t size; char *path; double interval_s; int device; uint32_t rank; char *name")
class MonitorConfigStruct(ctypes.Structure):
    """struct fdsl_monitor_config"""


@_members("""
    size_t size; char *variant, **options; int device, threads; void *stream; uint64_t samples; uint32_t shape[4],
    classes; char *dtype; int multi_hot, mixed; uint32_t rank, world_size; char *address; uint32_t port; void *mpi_comm,
    *nccl_id""")
class TrainerConfigStruct(ctypes.Structure):
    """struct fdsl_trainer_config"""


@_members("size_t size; void *images, *labels, *multi_hot; uint32_t count; float share")
class TrainerBatchStruct(ctypes.Structure):
    """struct fdsl_trainer_batch"""


@_members("size_t size; uint64_t samples; double loss, accuracy, precision")
class TrainerScoreStruct(ctypes.Structure):
    """struct fdsl_trainer_score"""


@_members("""
    size_t size; char *variant; uint64_t parameters, memory_bytes; uint32_t classes, epoch, epochs, step, steps, batch;
    double train_loss, train_accuracy, test_loss, test_accuracy, epoch_s""")
class TrainerInfoStruct(ctypes.Structure):
    """struct fdsl_trainer_info"""


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
    "fdsl_stream_fill_targets": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_uint32), c_void_p]),
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
    "fdsl_trainer_evaluate_batch": (c_int, [c_void_p, POINTER(TrainerBatchStruct), c_void_p, c_void_p, POINTER(TrainerScoreStruct)]),
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


def reopen(kind: Any, arguments: dict[str, Any]) -> Any:
    """Creates an object that was pickled as its class and arguments."""
    return kind(**arguments)


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
