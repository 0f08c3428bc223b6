"""The loaded library of C++ ops: signatures of its functions, and the constants that it shares with Python."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from .build import load_library


class _Constant(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


_CType: TypeAlias = "type[ctypes._SimpleCData[Any]]"
_POINTER: _CType = ctypes.c_void_p
_INT: _CType = ctypes.c_int
_LONG: _CType = ctypes.c_int64
_FLOAT: _CType = ctypes.c_float
# Sizes, scale, variant and threads.
_ATTENTION = [_LONG] * 7 + [_FLOAT, _LONG, _LONG, _FLOAT, _POINTER, _POINTER, _INT]
# Layers and last norm, sublayers, dtype, tokens, rotations, step inputs, activations, auxiliary states, scratch and
# threads.
_DECODE_LAYERS = (
    [_POINTER, _LONG, _POINTER]
    + [_LONG] * 2
    + [_INT, _LONG]
    + [_POINTER] * 3
    + [_LONG]
    + [_POINTER] * 5
    + [_LONG, _POINTER, _INT, _POINTER]
)
# Network and rows, dtype, sequences, hidden states and threads.
_DRAFT = [_POINTER] * 2 + [_INT, _LONG] + [_POINTER] * 7 + [_INT]
# Segment, rank, number of ranks, slot bytes and round.
_SHM_RANK: list[_CType] = [_POINTER, _INT, _INT, _LONG, ctypes.c_uint32]
# Input, output, bytes, whether the input is written already, and timeout in microseconds.
_SHM_DATA: list[_CType] = [_POINTER, _POINTER, _LONG, _INT, _LONG]
_SIGNATURES: dict[str, list[_CType]] = {
    "quire_constants": [],
    "quire_linear": [_INT] * 2 + [_POINTER] * 5 + [_LONG] * 4 + [_INT],
    "quire_linear_heads": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_INT],
    "quire_gated_linear": [_INT] * 3 + [_POINTER] * 5 + [_LONG] * 4 + [_INT],
    "quire_gather_rows": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "quire_rms_norm": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_FLOAT, _INT],
    "quire_add_rms_norm": [_INT] + [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "quire_scale": [_INT, _POINTER, _FLOAT] + [_LONG] * 2 + [_INT],
    "quire_gate_and_mul": [_INT] * 2 + [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "quire_clamped_gate_and_mul": [_INT] + [_FLOAT] * 3 + [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "quire_activate": [_INT] * 2 + [_POINTER] * 2 + [_LONG, _INT],
    "quire_apply_rope": [_INT] + [_POINTER] * 3 + [_LONG] * 6 + [_INT],
    "quire_write_kv": [_LONG] + [_POINTER] * 3 + [_LONG] * 5,
    "quire_write_kv_quantized": [_INT] * 2 + [_POINTER] * 4 + [_LONG] * 5 + [_FLOAT] * 2,
    "quire_paged_decode": [_INT] * 2 + [_POINTER] * 6 + _ATTENTION,
    "quire_paged_prefill": [_INT] * 2 + [_POINTER] * 7 + _ATTENTION[:-1] + [_POINTER, _LONG, _INT],
    "quire_latent_decode": [_INT] * 2 + [_POINTER] * 6 + [_LONG] * 8 + [_FLOAT, _INT],
    "quire_index_scores": [_INT] * 2 + [_POINTER] * 8 + [_LONG] * 9 + [_INT],
    "quire_choose_tokens": [_POINTER] * 3 + [_LONG] * 3 + [_INT],
    "quire_chosen_slots": [_POINTER] * 5 + [_LONG] * 5 + [_INT],
    "quire_sample_greedy": [_POINTER] * 5 + [_LONG] * 4 + [_INT] * 2,
    "quire_sample_full": [_POINTER] * 7 + [_LONG] * 4 + [_INT] * 2,
    "quire_log_sum_exp": [_POINTER] * 2 + [_LONG] * 3 + [_INT],
    "quire_mask_logits": [_POINTER] * 3 + [_LONG] * 4 + [_INT],
    "quire_truncate": [_POINTER] * 2 + [_LONG, _FLOAT, _LONG] + [_FLOAT] * 2,
    "quire_add_lora": [_INT] + [_POINTER] * 4 + [_INT],
    "quire_lora_bytes": [],
    "quire_packed_quantized_bytes": [],
    "quire_dequantize": [_POINTER, _INT, _POINTER, _INT],
    "quire_experts_bytes": [],
    "quire_experts": [_POINTER, _INT] + [_POINTER] * 4 + [_LONG] * 2 + [_INT],
    "quire_select_experts": [_POINTER] * 4 + [_LONG] * 7 + [_FLOAT] * 2 + [_INT],
    "quire_linear_attention": [_INT] * 2 + [_POINTER] * 12 + [_LONG] * 9 + [_FLOAT] + [_INT] * 2,
    "quire_causal_conv": [_INT] + [_POINTER] * 10 + [_LONG] * 4 + [_INT] * 2,
    "quire_rg_lru": [_INT] * 2 + [_POINTER] * 10 + [_LONG] * 4 + [_INT],
    "quire_selective_scan": [_INT] * 2 + [_POINTER] * 12 + [_LONG] * 5 + [_INT],
    "quire_decode_layer_bytes": [],
    "quire_decode_layers": _DECODE_LAYERS,
    "quire_gather_decodes": [_POINTER] * 3 + [_LONG] * 2 + [_POINTER] * 6,
    "quire_draft_network_bytes": [],
    "quire_draft": _DRAFT,
    "quire_shm_segment_bytes": [_INT, _LONG],
    "quire_shm_all_reduce": [*_SHM_RANK, _INT, *_SHM_DATA],
    "quire_shm_all_gather": [*_SHM_RANK, *_SHM_DATA],
    "quire_shm_close": [_POINTER, _INT],
    "quire_ring_bytes": [_LONG],
    "quire_ring_move": [_POINTER, _INT, _LONG, _POINTER] + [_LONG] * 2,
    "quire_ring_close": [_POINTER, _INT],
    "quire_use_huge_pages": [_POINTER, _LONG],
    "quire_keep_freed_memory": [_LONG],
    "quire_map_file": [_INT, _POINTER, _LONG, _INT],
    "quire_allocate_huge_pages": [_POINTER] + [_LONG] * 2,
    "quire_copy_pieces": [_POINTER] * 3 + [_LONG, _INT],
    "quire_suffix_create": [],
    "quire_suffix_destroy": [_POINTER],
    "quire_suffix_extend": [_POINTER] * 2 + [_LONG],
    "quire_suffix_propose": [_POINTER] + [_LONG] * 3 + [_POINTER],
}
# Result types other than int.
_RESULTS = {
    "quire_decode_layer_bytes": _LONG,
    "quire_experts_bytes": _LONG,
    "quire_packed_quantized_bytes": _LONG,
    "quire_draft_network_bytes": _LONG,
    "quire_lora_bytes": _LONG,
    "quire_shm_segment_bytes": _LONG,
    "quire_ring_bytes": _LONG,
    "quire_ring_move": _LONG,
    "quire_suffix_create": _POINTER,
    "quire_suffix_propose": _LONG,
    "quire_constants": ctypes.POINTER(_Constant),
}


@functools.cache
def is_available() -> bool:
    """Return whether the library could be built and loaded on this machine."""
    return load_library() is not None


@functools.cache
def library() -> Any:
    """Return the library with the signatures of its functions; call it only if is_available()."""
    loaded = load_library()
    assert loaded is not None, "check is_available() first"
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    for name, result in _RESULTS.items():
        getattr(loaded, name).restype = result
    return loaded


@functools.cache
def constants() -> Mapping[str, int]:
    """Return the table of native/constants.h: name |-> value."""
    table: dict[str, int] = {}
    for constant in library().quire_constants():
        if constant.name is None:
            break
        table[constant.name.decode()] = constant.value
    return table


@functools.cache
def dtype_codes() -> Mapping[torch.dtype, int]:
    """Return the codes of the element types: torch.dtype |-> code.

    Raises:
        RuntimeError: the library names a type that this version of torch does not have.
    """
    codes = {}
    for name, code in _constants_of("dtype").items():
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise RuntimeError(
                f"torch {torch.__version__} has no dtype {name}, which native/constants.h lists"
            )
        codes[dtype] = code
    return codes


@functools.cache
def gate_codes() -> Mapping[str, int]:
    """Return the codes of the activations of gated feed-forward networks: name |-> code."""
    return _constants_of("gate")


@functools.cache
def head_dims() -> frozenset[int]:
    """Return the values of head_dim with an attention kernel; none if the library is not available."""
    return frozenset(_constants_of("head_dim").values()) if is_available() else frozenset()


@functools.cache
def simd_lanes() -> int:
    """Return the float32 numbers per vector register; 0 if the library is not available.

    The ops compute only on lengths that are multiples of it.
    """
    return constants()["simd_lanes"] if is_available() else 0


def _constants_of(group: str) -> dict[str, int]:
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): value for name, value in constants().items() if name.startswith(prefix)
    }
