"""Recurrences over the tokens of each sequence.

They are computed token by token, with a block of a state in registers. Long runs of `linear_attention` are computed
in chunks, by matrix products of whole chunks (Yang et al., *Parallelizing Linear Transformers with the Delta Rule
over Sequence Length*, 2024, and *Gated Delta Networks*, 2025; Dao and Gu, *Transformers are SSMs*, 2024): one kernel
solves the chunks' systems of the delta rule in parallel, another one passes the state from chunk to chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..state_runs import StateRuns
from .tile_configs import INTERPRETED

# Tokens of a chunk: rows of its matrix products.
CHUNK = 64
# Runs up to this length are computed token by token: drafted tokens, and ends of prompts.
MAX_SERIAL_LEN = 16
# The ends of a step's runs are a view, and those of accepted tokens a tensor: one variant serves both.
_UNALIGNED = ["ends_ptr"]


def _tensors_of(runs: StateRuns) -> tuple[Tensor | None, ...]:
    """Return the arguments of a kernel from `slots_ptr` to `stores_ptr`."""
    return runs.slots, runs.starts, runs.ends, runs.is_new, runs.stores


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _causal_conv(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, K]
    bias_ptr,  # [C], or None
    states_ptr,  # [N, K - 1, C]
    slots_ptr,  # [S]
    starts_ptr,  # [S]
    ends_ptr,  # [S]
    is_new_ptr,  # [S]
    stores_ptr,  # [S], or None: all
    out_ptr,  # [T, C]
    stride_x,
    C,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # grid: (S, cdiv(C, BLOCK_C))
    run = tl.program_id(0)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    start = tl.load(starts_ptr + run)
    length = tl.load(ends_ptr + run) - start
    if length == 0:
        return
    state_ptrs = states_ptr + tl.load(slots_ptr + run).to(tl.int64) * (WIDTH - 1) * C + offs_c
    is_old = tl.load(is_new_ptr + run) == 0
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    x_ptr += start * stride_x
    out_ptr += start * C
    for first in range(0, length, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + bias
        for i in tl.static_range(WIDTH):
            position = offs_t - (WIDTH - 1) + i  # below 0: in the state
            weight = tl.load(weight_ptr + offs_c * WIDTH + i, mask=mask_c, other=0.0).to(tl.float32)
            fresh = tl.load(
                x_ptr + position[:, None] * stride_x + offs_c,
                mask=((position >= 0) & (position < length))[:, None] & mask_c,
                other=0.0,
            )
            kept = tl.load(
                state_ptrs + (position[:, None] + WIDTH - 1) * C,
                mask=((position < 0) & is_old)[:, None] & mask_c,
                other=0.0,
            )
            total += weight * (fresh.to(tl.float32) + kept.to(tl.float32))
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(
            out_ptr + offs_t[:, None] * C + offs_c,
            total.to(out_ptr.dtype.element_ty),
            mask=(offs_t < length)[:, None] & mask_c,
        )
    mask_store = mask_c
    if stores_ptr is not None:
        mask_store &= tl.load(stores_ptr + run) != 0
    # In this order an input of the state is read before it is overwritten.
    for i in tl.static_range(WIDTH - 1):
        position = length - (WIDTH - 1) + i
        if position >= 0:
            last = tl.load(x_ptr + position * stride_x + offs_c, mask=mask_c, other=0.0)
        else:
            last = tl.load(state_ptrs + (position + WIDTH - 1) * C, mask=mask_c & is_old, other=0.0)
        tl.store(state_ptrs + i * C, last.to(states_ptr.dtype.element_ty), mask=mask_store)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, runs: StateRuns, *, silu: bool
) -> Tensor:
    """See kernels.recurrence."""
    num_channels, width = weight.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert states.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(128, triton.next_power_of_2(num_channels))
    _causal_conv[(len(runs.slots), triton.cdiv(num_channels, block))](
        x, weight, bias, states, *_tensors_of(runs), out, x.stride(0), num_channels,
        WIDTH=width, SILU=silu, BLOCK_T=16, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _linear_attention(
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, Hv, Dv]
    log_decay_ptr,  # [T, Hv], or [T, Hv, Dk]
    beta_ptr,  # [T, Hv], or None
    states_ptr,  # [N, Hv, Dk, Dv]
    slots_ptr,  # [S]
    starts_ptr,  # [S]
    ends_ptr,  # [S]
    is_new_ptr,  # [S]
    stores_ptr,  # [S], or None: all
    out_ptr,  # [T, Hv, Dv]
    scale,
    stride_q,
    stride_k,
    stride_v,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # heads of v per head of k
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # grid: (S, Hv, cdiv(Dv, BLOCK_V))
    run, head = tl.program_id(0), tl.program_id(1)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM
    mask = mask_k[:, None] & mask_v
    start, end = tl.load(starts_ptr + run).to(tl.int64), tl.load(ends_ptr + run).to(tl.int64)
    place = tl.load(slots_ptr + run).to(tl.int64) * NUM_HEADS + head
    state_ptrs = states_ptr + (place * KEY_DIM + offs_k[:, None]) * VALUE_DIM + offs_v
    is_old = tl.load(is_new_ptr + run) == 0
    state = tl.load(state_ptrs, mask=mask & is_old, other=0.0).to(tl.float32)
    for t in range(start, end):
        row = t * NUM_HEADS + head
        key_head = (head // SHARE) * KEY_DIM + offs_k
        k = tl.load(k_ptr + t * stride_k + key_head, mask=mask_k, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + t * stride_q + key_head, mask=mask_k, other=0.0).to(tl.float32)
        update = tl.load(v_ptr + t * stride_v + head * VALUE_DIM + offs_v, mask=mask_v, other=0.0).to(
            tl.float32
        )
        if PER_CHANNEL:
            logs = tl.load(log_decay_ptr + row * KEY_DIM + offs_k, mask=mask_k, other=0.0)
            state *= tl.exp(logs)[:, None]
        else:
            state *= tl.exp(tl.load(log_decay_ptr + row))
        if DELTA:
            update -= tl.sum(k[:, None] * state, 0)
        if beta_ptr is not None:
            update *= tl.load(beta_ptr + row)
        state += k[:, None] * update
        out = tl.sum((q * scale)[:, None] * state, 0)
        tl.store(out_ptr + row * VALUE_DIM + offs_v, out.to(out_ptr.dtype.element_ty), mask=mask_v)
    if stores_ptr is not None:
        mask &= tl.load(stores_ptr + run) != 0
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    runs: StateRuns,
    scale: float = 1.0,
    *,
    delta: bool = True,
) -> Tensor:
    """See kernels.recurrence."""
    num_heads, key_dim, value_dim = states.shape[1:]
    assert all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
    assert states.is_contiguous()
    log_decay, beta = log_decay.contiguous(), None if beta is None else beta.contiguous()
    # float32 is for tests; its products spill the registers.
    if runs.max_len > MAX_SERIAL_LEN and log_decay.dim() == 2 and q.dtype != torch.float32:
        if beta is not None and not delta:
            v, beta = (v * beta[:, :, None]).to(v.dtype), None
        return _attend_in_chunks(q, k, v, log_decay, beta, states, runs, scale)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_k = triton.next_power_of_2(key_dim)
    # 32 KiB of a state in the registers of a program.
    block_v = min(triton.next_power_of_2(value_dim), max(8, 8192 // block_k))
    _linear_attention[(len(runs.slots), num_heads, triton.cdiv(value_dim, block_v))](
        q, k, v, log_decay, beta, states, *_tensors_of(runs), out, scale, q.stride(0),
        k.stride(0), v.stride(0), NUM_HEADS=num_heads, SHARE=num_heads // k.shape[1], KEY_DIM=key_dim,
        VALUE_DIM=value_dim, PER_CHANNEL=log_decay.dim() == 3, DELTA=delta and beta is not None,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _solve_chunks(
    k_ptr,  # [T, Hk, Dk]
    v_ptr,  # [T, Hv, Dv]
    log_decay_ptr,  # [T, Hv]
    beta_ptr,  # [T, Hv]
    starts_ptr,  # [S]
    ends_ptr,  # [S]
    updates_ptr,  # [T, Hv, Dv]
    weights_ptr,  # [T, Hv, Dk]
    stride_k,
    stride_v,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (S, cdiv(longest run, BLOCK_T), Hv)
    # The update of token i is beta_i (v_i - k_i decayed_i), and decayed_i contains those of the tokens before it: a
    # lower triangular system, whose inverse times the values and keys gives updates and weights, so that
    # update_i = updates_i - weights_i @ (state before the chunk).
    run, head = tl.program_id(0), tl.program_id(2)
    start, end = tl.load(starts_ptr + run).to(tl.int64), tl.load(ends_ptr + run).to(tl.int64)
    first = start + tl.program_id(1) * BLOCK_T
    if first >= end:
        return
    offs_t, offs_k, offs_v = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    mask_t = first + offs_t < end
    rows = (first + offs_t) * NUM_HEADS + head
    decay = tl.cumsum(tl.load(log_decay_ptr + rows, mask=mask_t, other=0.0), 0)
    beta = tl.load(beta_ptr + rows, mask=mask_t, other=0.0)
    mask_k = mask_t[:, None] & (offs_k < KEY_DIM)
    key_ptrs = k_ptr + (first + offs_t)[:, None] * stride_k + (head // SHARE) * KEY_DIM + offs_k
    k = tl.load(key_ptrs, mask=mask_k, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    scores = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    is_before = offs_t[:, None] > offs_t[None, :]
    growth = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], 0.0))
    system = tl.where(is_before, beta[:, None] * scores * growth, 0.0)
    # Forward substitution, row by row: inverse = (1 + system)^-1, whose diagonal is 1.
    inverse = -system
    for i in range(1, BLOCK_T):
        row = tl.sum(tl.where((offs_t == i)[:, None], inverse, 0.0), 0)
        row += tl.sum(row[:, None] * tl.where((offs_t < i)[None, :], inverse, 0.0), 0)
        inverse = tl.where((offs_t == i)[:, None] & (offs_t < i)[None, :], row[None, :], inverse)
    inverse += tl.where(offs_t[:, None] == offs_t[None, :], 1.0, 0.0)
    inverse = inverse.to(k.dtype)
    keys = ((beta * tl.exp(decay))[:, None] * k.to(tl.float32)).to(k.dtype)
    weights = tl.dot(inverse, keys, input_precision="tf32x3")
    weight_ptrs = weights_ptr + rows[:, None] * KEY_DIM + offs_k
    tl.store(weight_ptrs, weights.to(weights_ptr.dtype.element_ty), mask=mask_k)
    for column in range(0, VALUE_DIM, BLOCK_V):
        mask_v = mask_t[:, None] & (column + offs_v < VALUE_DIM)
        value_ptrs = v_ptr + (first + offs_t)[:, None] * stride_v + head * VALUE_DIM + column + offs_v
        values = tl.load(value_ptrs, mask=mask_v, other=0.0).to(tl.float32)
        values = (beta[:, None] * values).to(k.dtype)
        updates = tl.dot(inverse, values, input_precision="tf32x3")
        update_ptrs = updates_ptr + rows[:, None] * VALUE_DIM + column + offs_v
        tl.store(update_ptrs, updates.to(updates_ptr.dtype.element_ty), mask=mask_v)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _pass_states(
    q_ptr,  # [T, Hk, Dk]
    k_ptr,  # [T, Hk, Dk]
    updates_ptr,  # [T, Hv, Dv]
    weights_ptr,  # [T, Hv, Dk], or None without the delta rule
    log_decay_ptr,  # [T, Hv]
    states_ptr,  # [N, Hv, Dk, Dv]
    slots_ptr,  # [S]
    starts_ptr,  # [S]
    ends_ptr,  # [S]
    is_new_ptr,  # [S]
    stores_ptr,  # [S], or None: all
    out_ptr,  # [T, Hv, Dv]
    scale,
    stride_q,
    stride_k,
    stride_updates,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (S, Hv, cdiv(Dv, BLOCK_V))
    run, head = tl.program_id(0), tl.program_id(1)
    offs_t, offs_k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start, end = tl.load(starts_ptr + run).to(tl.int64), tl.load(ends_ptr + run).to(tl.int64)
    place = tl.load(slots_ptr + run).to(tl.int64) * NUM_HEADS + head
    state_ptrs = states_ptr + (place * KEY_DIM + offs_k[:, None]) * VALUE_DIM + offs_v
    mask = (offs_k < KEY_DIM)[:, None] & (offs_v < VALUE_DIM)
    is_old = tl.load(is_new_ptr + run) == 0
    state = tl.load(state_ptrs, mask=mask & is_old, other=0.0).to(tl.float32)
    for first in range(start, end, BLOCK_T):
        tokens = first + offs_t
        mask_t = tokens < end
        mask_k, mask_v = mask_t[:, None] & (offs_k < KEY_DIM), mask_t[:, None] & (offs_v < VALUE_DIM)
        rows = tokens * NUM_HEADS + head
        decay = tl.cumsum(tl.load(log_decay_ptr + rows, mask=mask_t, other=0.0), 0)
        last = tl.sum(tl.where(offs_t == BLOCK_T - 1, decay, 0.0), 0)
        key_head = (head // SHARE) * KEY_DIM + offs_k
        q = tl.load(q_ptr + tokens[:, None] * stride_q + key_head, mask=mask_k, other=0.0)
        k = tl.load(k_ptr + tokens[:, None] * stride_k + key_head, mask=mask_k, other=0.0)
        if UPCAST:
            q, k = q.to(tl.float32), k.to(tl.float32)
        update_ptrs = updates_ptr + tokens[:, None] * stride_updates + head * VALUE_DIM + offs_v
        updates = tl.load(update_ptrs, mask=mask_v, other=0.0).to(tl.float32)
        before = state.to(k.dtype)
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + rows[:, None] * KEY_DIM + offs_k, mask=mask_k, other=0.0)
            updates -= tl.dot(weights.to(k.dtype), before, input_precision="tf32x3")
        is_visible = offs_t[:, None] >= offs_t[None, :]
        growth = tl.exp(tl.where(is_visible, decay[:, None] - decay[None, :], 0.0))
        scores = tl.where(is_visible, tl.dot(q, tl.trans(k), input_precision="tf32x3") * growth, 0.0)
        out = tl.dot(q, before, input_precision="tf32x3") * tl.exp(decay)[:, None]
        out += tl.dot(scores.to(k.dtype), updates.to(k.dtype), input_precision="tf32x3")
        out_ptrs = out_ptr + rows[:, None] * VALUE_DIM + offs_v
        tl.store(out_ptrs, (out * scale).to(out_ptr.dtype.element_ty), mask=mask_v)
        keys = (k.to(tl.float32) * tl.exp(last - decay)[:, None]).to(k.dtype)
        state = state * tl.exp(last)
        state += tl.dot(tl.trans(keys), updates.to(k.dtype), input_precision="tf32x3")
    if stores_ptr is not None:
        mask &= tl.load(stores_ptr + run) != 0
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)


def _attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    runs: StateRuns,
    scale: float,
) -> Tensor:
    """Compute `linear_attention` with a decay per head by matrix products of chunks of its runs."""
    num_heads, key_dim, value_dim = states.shape[1:]
    share, num_runs, block_k = num_heads // k.shape[1], len(runs.slots), triton.next_power_of_2(key_dim)
    block_v, num_warps = (32, 4) if block_k <= 64 else (32, 8) if block_k <= 128 else (16, 8)
    sizes = {
        "NUM_HEADS": num_heads, "SHARE": share, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_T": CHUNK,
        "BLOCK_K": max(16, block_k), "BLOCK_V": block_v, "UPCAST": INTERPRETED,
    }  # fmt: skip
    updates, weights = v, None
    if beta is not None:
        updates = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        weights = torch.empty((len(v), num_heads, key_dim), dtype=v.dtype, device=v.device)
        _solve_chunks[(num_runs, triton.cdiv(runs.max_len, CHUNK), num_heads)](
            k, v, log_decay, beta, runs.starts, runs.ends, updates, weights, k.stride(0), v.stride(0), **sizes,
            num_warps=8, num_stages=1,
        )  # fmt: skip
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _pass_states[(num_runs, num_heads, triton.cdiv(value_dim, block_v))](
        q, k, updates, weights, log_decay, states, *_tensors_of(runs), out, scale, q.stride(0),
        k.stride(0), updates.stride(0), **sizes, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _selective_scan(
    x_ptr,  # [T, C]
    step_ptr,  # [T, C]
    decay_ptr,  # [N, C]
    b_ptr,  # [T, N]
    c_ptr,  # [T, N]
    states_ptr,  # [slots, N, C]
    slots_ptr,  # [S]
    starts_ptr,  # [S]
    ends_ptr,  # [S]
    is_new_ptr,  # [S]
    stores_ptr,  # [S], or None: all
    out_ptr,  # [T, C]
    stride_x,
    stride_bc,
    C,
    NUM_STATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # grid: (S, cdiv(C, BLOCK_C))
    run = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_n, mask_c = offs_n < NUM_STATES, offs_c < C
    mask = mask_n[:, None] & mask_c
    start, end = tl.load(starts_ptr + run).to(tl.int64), tl.load(ends_ptr + run).to(tl.int64)
    slot = tl.load(slots_ptr + run).to(tl.int64)
    state_ptrs = states_ptr + (slot * NUM_STATES + offs_n[:, None]) * C + offs_c
    is_old = tl.load(is_new_ptr + run) == 0
    state = tl.load(state_ptrs, mask=mask & is_old, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + offs_n[:, None] * C + offs_c, mask=mask, other=0.0)
    for t in range(start, end):
        step = tl.load(step_ptr + t * C + offs_c, mask=mask_c, other=0.0)
        x = tl.load(x_ptr + t * stride_x + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * stride_bc + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * stride_bc + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        state = tl.exp(step * decay) * state + (step * x) * b[:, None]
        tl.store(out_ptr + t * C + offs_c, tl.sum(c[:, None] * state, 0), mask=mask_c)
    if stores_ptr is not None:
        mask &= tl.load(stores_ptr + run) != 0
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)


def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, states: Tensor, runs: StateRuns
) -> Tensor:
    """See kernels.recurrence."""
    num_states, num_channels = decay.shape
    assert x.stride(1) == b.stride(1) == c.stride(1) == 1
    assert b.stride(0) == c.stride(0)
    assert decay.is_contiguous()
    assert states.is_contiguous()
    out = torch.empty(x.shape, device=x.device)
    block = min(128, triton.next_power_of_2(num_channels))
    _selective_scan[(len(runs.slots), triton.cdiv(num_channels, block))](
        x, step.contiguous(), decay, b, c, states, *_tensors_of(runs), out, x.stride(0),
        b.stride(0), num_channels, NUM_STATES=num_states, BLOCK_N=triton.next_power_of_2(num_states),
        BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out
