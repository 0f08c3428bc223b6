"""The struct of quire_dequantize_panels (native/quantized_panels.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes

from .library import library


class QuantizedPanels(ctypes.Structure):
    """A weight of 4 or 8 bits per number, in panels."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("dtype", "scale_dtype")),
        *((name, ctypes.c_int64) for name in ("group_len", "in_features", "out_features")),
        ("zero", ctypes.c_float),
    ]


def check_layout() -> None:
    """Check that Python and C++ agree on the size of the struct. Raises RuntimeError if they do not."""
    expected, size = library().quire_quantized_panels_bytes(), ctypes.sizeof(QuantizedPanels)
    if size != expected:
        raise RuntimeError(
            f"struct QuantizedPanels has {expected} bytes in native/quantized_panels.h and {size} in "
            "native/quantized_panels.py"
        )
