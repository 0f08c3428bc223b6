"""The structs of quire_experts (native/experts.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes

from .decode_layers import Linear
from .library import library


class Expert(ctypes.Structure):
    """The weights of one expert."""

    _fields_ = [
        *((name, Linear) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_codes", "down_codes")),
    ]


# Value of Experts.gate for experts without gates.
UNGATED_RELU_SQUARED = -1


class Experts(ctypes.Structure):
    """This rank's experts of one layer, and their activation."""

    _fields_ = [
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "first", "gate", "is_clamped", "scales_inputs")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "offset")),
    ]


def check_layout() -> None:
    """Check that Python and C++ agree on the size of the struct. Raises RuntimeError if they do not."""
    expected, size = library().quire_experts_bytes(), ctypes.sizeof(Experts)
    if size != expected:
        raise RuntimeError(
            f"struct Experts has {expected} bytes in native/experts.h and {size} in native/experts.py"
        )
