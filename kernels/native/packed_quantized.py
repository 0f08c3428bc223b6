"""The struct of quire_dequantize (native/packed_quantized.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes

from .library import library


class PackedQuantized(ctypes.Structure):
    """A packed weight of 4 or 8 bits per number."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("dtype", "scale_dtype")),
        *((name, ctypes.c_int64) for name in ("group_len", "in_features", "out_features")),
        ("zero", ctypes.c_float),
    ]


def check_layout() -> None:
    """Check that Python and C++ agree on the size of the struct. Raises RuntimeError if they do not."""
    expected, size = library().quire_packed_quantized_bytes(), ctypes.sizeof(PackedQuantized)
    if size != expected:
        raise RuntimeError(
            f"struct PackedQuantized has {expected} bytes in native/packed_quantized.h and {size} in "
            "native/packed_quantized.py"
        )
