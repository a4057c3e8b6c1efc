#!/usr/bin/env python3
"""Writes the files in this folder with NumPy, ml_dtypes and safetensors: sets of embeddings, and the float32 values
that these programs compute for them (NAME.npy). tests/test_embedding_formats.c reads both.

    pip install numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0 && python3 make.py
"""
import ml_dtypes
import numpy
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

random = numpy.random.default_rng(7)


def store(name, values):
    with numpy.errstate(over="ignore"):
        numpy.save(name + ".npy", numpy.ascontiguousarray(values).astype(numpy.float32))


# float64: ties between two floats, values beside ties, values that are too large or too small for a float
ties = numpy.float64([1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-24 + 2.0**-52, 2.0**-150, 3 * 2.0**-150, 2.0**-151])
large = numpy.float64([3.4028235677973366e38, 3.4028235677973362e38, 1e300, numpy.inf, 5e-324, 1.1754943508222875e-38])
doubles = random.standard_normal((37, 7)) * 10.0 ** random.integers(-44, 38, (37, 7))
doubles[0, :6], doubles[1, :6], doubles[2, :6], doubles[3, :6] = ties, -ties, large, -large
doubles[4, 3] = numpy.nan
numpy.save("f64_source.npy", doubles)
save_file({"emb": doubles}, "f64.safetensors")
numpy.savez("f64_stored.npz", emb=doubles, label=numpy.arange(37, dtype=numpy.uint16), names=numpy.array(["a"] * 37))
numpy.savez_compressed("f64_packed.npz", emb=doubles, keys=numpy.array([{}], dtype=object))
store("f64", doubles)

# float16 values that a test computes too; large enough to be mapped if they were not compressed
halves = (numpy.arange(331 * 101).reshape(331, 101) * 37 % 1009 / 8).astype(numpy.float16)
numpy.savez_compressed("f16.npz", x=halves[:1], b=halves[1:2], c=halves[2:])


def save(name, **tensors):
    """Writes (dtype, array) pairs, also of types that NumPy does not have."""
    specs = {key: TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
             for key, (dtype, array) in tensors.items()}
    serialize_file(specs, name + ".safetensors")


# All codes of fp8
codes = numpy.arange(256, dtype=numpy.uint8).reshape(16, 16)
save("fp8", emb=("float8_e4m3fn", codes))
store("fp8", codes.view(ml_dtypes.float8_e4m3fn))


def fp4(name, rows, columns, block, scale_name, scales, whole):
    """Writes fp4 rows with one scale per block. Two codes share a byte, the first in the low four bits."""
    codes = random.integers(0, 16, (rows, columns), dtype=numpy.uint8)
    codes[0] = numpy.arange(columns) % 16
    packed = numpy.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
    tensors = {"emb": ("float4_e2m1fn_x2", packed), "emb_scale": (scale_name, scales.view(numpy.uint8))}
    if whole is not None:
        tensors["emb_scale_2"] = ("float32", numpy.array(whole, numpy.float32))
    save(name, **tensors)
    each = numpy.repeat(scales.astype(numpy.float32), block, axis=1)[:, :columns]
    with numpy.errstate(over="ignore"):
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(numpy.float32) * each
        store(name, values if whole is None else values * numpy.float32(whole))


# 70 values: the last blocks have 6. All scales of e8m0, and all of e4m3fn.
scales = numpy.arange(86 * 3, dtype=numpy.uint16).astype(numpy.uint8).reshape(86, 3)
fp4("mxfp4", 86, 70, 32, "float8_e8m0fnu", scales.view(ml_dtypes.float8_e8m0fnu), None)
scales = numpy.arange(52 * 5, dtype=numpy.uint16).astype(numpy.uint8).reshape(52, 5)
fp4("nvfp4", 52, 70, 16, "float8_e4m3fn", scales.view(ml_dtypes.float8_e4m3fn), 0.0123)
