"""The loaded library of C++ ops with the signatures of its functions."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .build import load_library

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# Sizes, scale, variant and threads.
_ATTENTION = [_LONG] * 7 + [_FLOAT, _LONG, _FLOAT, _POINTER, _INT]
_SIGNATURES = {
    "quire_max_linear_tokens": [],
    "quire_linear": [_INT] * 2 + [_POINTER] * 5 + [_LONG] * 4 + [_INT],
    "quire_panel_rows": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "quire_rms_norm": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_FLOAT, _INT],
    "quire_add_rms_norm": [_INT] + [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "quire_scale": [_INT, _POINTER, _FLOAT] + [_LONG] * 2 + [_INT],
    "quire_gate_and_mul": [_INT] * 2 + [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "quire_apply_rope": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_INT],
    "quire_write_kv": [_LONG] + [_POINTER] * 3 + [_LONG] * 5,
    "quire_write_kv_quantized": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 5 + [_FLOAT] * 2,
    "quire_paged_decode": [_INT] * 2 + [_POINTER] * 6 + _ATTENTION,
    "quire_paged_prefill": [_INT] * 2 + [_POINTER] * 7 + _ATTENTION,
    "quire_sample_greedy": [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 2,
    "quire_sample_full": [_POINTER] * 5 + [_LONG] * 3 + [_INT] * 2,
    "quire_decode_layer_bytes": [],
    "quire_decode_layers": (
        [_POINTER, _LONG, _POINTER]
        + [_LONG] * 2
        + [_INT, _LONG]
        + [_POINTER] * 3
        + [_LONG]
        + [_POINTER] * 4
        + [_INT]
    ),
    "quire_shm_collective": [
        _POINTER,
        _INT,
        _INT,
        _LONG,
        ctypes.c_uint32,
        _INT,
        _POINTER,
        _POINTER,
        _LONG,
        _INT,
        _LONG,
    ],
    "quire_shm_collective_close": [_POINTER, _INT],
    "quire_shm_collective_bytes": [_INT, _LONG],
    "quire_use_huge_pages": [_POINTER, _LONG],
    "quire_keep_freed_memory": [_LONG],
}


@functools.cache
def is_available() -> bool:
    """Return whether the library could be built and loaded on this machine."""
    return load_library() is not None


@functools.cache
def library() -> Any:
    """Return the loaded library with the signatures of its functions; requires is_available()."""
    loaded = load_library()
    assert loaded is not None, "check is_available() first"
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    for name in ("quire_max_linear_tokens", "quire_shm_collective_bytes", "quire_decode_layer_bytes"):
        getattr(loaded, name).restype = _LONG
    return loaded
