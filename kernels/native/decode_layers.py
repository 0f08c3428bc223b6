"""The structs of quire_decode_layers (native/decode_layers.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes

from .library import library


class Linear(ctypes.Structure):
    """The arguments of quire_linear that describe a weight, and the adapters of the layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "scales", "bias", "lora")),
        *((name, ctypes.c_int64) for name in ("dtype", "in_features", "out_features", "stride")),
    ]


class Layer(ctypes.Structure):
    """One decoder layer: weights, cache and settings."""

    _fields_ = [
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in ("before_attention", "before_mlp", "after_attention", "after_mlp")
        ),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "cache", "cache_scales")),
        *((name, ctypes.c_int64) for name in ("cache_dtype", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "window", "rope", "gate")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "eps", "residual_scale")),
        *((name, ctypes.c_float) for name in ("cache_limit", "cache_min_magnitude")),
    ]


class Rotation(ctypes.Structure):
    """Cosines and sines of a step's tokens."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("rotated_dim", "stride")),
    ]


def check_layout() -> None:
    """Check that Python and C++ agree on the size of a layer.

    Raises:
        RuntimeError: they do not.
    """
    expected, size = library().quire_decode_layer_bytes(), ctypes.sizeof(Layer)
    if size != expected:
        raise RuntimeError(
            f"struct Layer has {expected} bytes in native/decode_layers.cpp and {size} in native/decode_layers.py"
        )
