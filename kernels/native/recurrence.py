"""Wrappers of the C++ recurrences (native/recurrence.cpp); `kernels.recurrence` describes the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ..state_runs import StateRuns
from .fallbacks import log_fallback
from .library import dtype_codes, library
from .ops import address_of, supports

# Of recurrent states.
_STATE_DTYPES = (torch.float32, torch.bfloat16)


def supports_conv(x: Tensor, weight: Tensor, states: Tensor) -> bool:
    """Return whether there is a C++ op for this convolution; log if there is none."""
    is_supported = supports(x, len(weight)) and x.stride(1) == 1 and states.dtype == x.dtype
    return _logged(x, "short convolutions", f"{len(weight)} channels of {x.dtype}", is_supported)


def supports_attention(q: Tensor, k: Tensor, v: Tensor, states: Tensor) -> bool:
    """Return whether there is a C++ op for these heads; log if there is none."""
    value_dim = v.shape[2]
    is_supported = (
        supports(v, value_dim)
        and states.dtype in _STATE_DTYPES
        and all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
    )
    return _logged(q, "linear attention", f"heads of {value_dim} elements of {v.dtype}", is_supported)


def supports_scan(x: Tensor, states: Tensor) -> bool:
    """Return whether there is a C++ op for these channels; log if there is none."""
    is_supported = supports(x, x.shape[1]) and x.stride(1) == 1 and states.dtype in _STATE_DTYPES
    return _logged(x, "selective scans", f"{x.shape[1]} channels of {x.dtype}", is_supported)


def supports_lru(x: Tensor, gates: Tensor, states: Tensor) -> bool:
    """Return whether there is a C++ op for heads of this width; log if there is none."""
    width = gates.shape[2] // 2
    is_supported = supports(x, width) and gates.dtype == x.dtype and states.dtype in _STATE_DTYPES
    return _logged(x, "gated linear recurrences", f"heads of {width} channels of {x.dtype}", is_supported)


def _logged(x: Tensor, op: str, sizes: str, is_supported: bool) -> bool:
    if x.is_cpu and not is_supported:
        log_fallback(op, f"there is no C++ op for {sizes}")
    return is_supported


def _runs(runs: StateRuns) -> tuple[int | None, ...]:
    assert runs.slots.dtype == runs.starts.dtype == torch.int32
    assert runs.is_new.dtype == torch.bool
    assert runs.stores is None or runs.stores.dtype == torch.bool
    arrays = runs.slots, runs.starts, runs.ends, runs.is_new, runs.stores
    return tuple(address_of(each) for each in arrays)


def _codes(x: Tensor, states: Tensor) -> tuple[int, int]:
    """Return the codes of the types of tokens and recurrent states."""
    return dtype_codes()[x.dtype], dtype_codes()[states.dtype]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, runs: StateRuns, *, silu: bool
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    by_time = weight.T.contiguous()
    assert states.is_contiguous()
    library().quire_causal_conv(
        dtype_codes()[x.dtype], x.data_ptr(), by_time.data_ptr(), address_of(bias), states.data_ptr(), *_runs(runs),
        out.data_ptr(), len(runs.slots), *weight.shape, x.stride(0), silu, torch.get_num_threads(),
    )  # fmt: skip
    return out


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    runs: StateRuns,
    scale: float,
    *,
    delta: bool,
) -> Tensor:
    num_heads, key_dim, value_dim = states.shape[1:]
    log_decay = log_decay.contiguous()
    beta = None if beta is None else beta.contiguous()
    assert log_decay.dtype == torch.float32
    assert states.is_contiguous()
    out = torch.empty(v.shape, dtype=v.dtype)
    decays_per_head = key_dim if log_decay.dim() == 3 else 1
    library().quire_linear_attention(
        *_codes(v, states), q.data_ptr(), k.data_ptr(), v.data_ptr(), log_decay.data_ptr(), address_of(beta),
        states.data_ptr(), *_runs(runs), out.data_ptr(), len(runs.slots), num_heads, num_heads // k.shape[1],
        key_dim, value_dim, q.stride(0), k.stride(0), v.stride(0), decays_per_head,
        scale, delta, torch.get_num_threads(),
    )  # fmt: skip
    return out


def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, states: Tensor, runs: StateRuns
) -> Tensor:
    assert b.stride() == c.stride()
    step, decay = step.contiguous(), decay.contiguous()
    assert states.is_contiguous()
    out = torch.empty(x.shape)
    library().quire_selective_scan(
        *_codes(x, states), x.data_ptr(), step.data_ptr(), decay.data_ptr(), b.data_ptr(), c.data_ptr(),
        states.data_ptr(), *_runs(runs), out.data_ptr(), len(runs.slots), x.shape[1], len(decay), x.stride(0),
        b.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def rg_lru(x: Tensor, gates: Tensor, decay: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
    x, gates, decay = x.contiguous(), gates.contiguous(), decay.contiguous()
    assert decay.dtype == torch.float32
    assert states.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library().quire_rg_lru(
        *_codes(x, states), x.data_ptr(), gates.data_ptr(), decay.data_ptr(), states.data_ptr(), *_runs(runs),
        out.data_ptr(), len(runs.slots), len(x), x.shape[1], gates.shape[2] // 2, torch.get_num_threads(),
    )  # fmt: skip
    return out
