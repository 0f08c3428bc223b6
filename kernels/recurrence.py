"""Layers that keep a state of fixed size per sequence, instead of keys and values of every token.

Three recurrences serve all supported architectures; each op reads the states of its sequences, and writes those of
runs that store them, in place:

- `linear_attention`: a matrix per head, to which each token adds the outer product of its key and value. With a
  decay per head it is Mamba 2's (Dao and Gu, 2024) and lightning attention (Qin et al., 2024); with the delta rule
  the gated delta net's (Yang et al., 2024), and with a decay per key channel also Kimi delta attention (2025).
- `selective_scan`: a vector per channel, Mamba's (Gu and Dao, 2023).
- `causal_conv`: the last inputs of a short convolution over time.

`rg_lru` is Griffin's recurrence (De et al., 2024) behind its gates, a scan with one state per channel.

The CPU ops and the references compute one token after the other, so that the bits of a token depend neither on how
its prompt is cut into chunks nor on other sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .dispatch import on_gpu
from .native import recurrence as cpu
from .state_runs import StateRuns


@on_gpu("recurrence")
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, runs: StateRuns, *, silu: bool
) -> Tensor:
    """Return the convolution over time of each channel, ``sum(weight[:, K - 1 - i] * x[t - i])``, [T, C].

    Args:
        x: [T, C]; the tokens may have any stride.
        weight: [C, K].
        bias: [C].
        states: [N, K - 1, C] of x's dtype, the last inputs of each sequence; overwritten.
        silu: apply SiLU to the result.
    """
    if cpu.supports_conv(x, weight, states):
        return cpu.causal_conv(x, weight, bias, states, runs, silu=silu)
    width = weight.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for slot, start, end, is_new, stores in runs:
        before = torch.zeros_like(states[slot]) if is_new else states[slot]
        window = torch.cat((before, x[start:end]))
        if stores:
            states[slot] = window[len(window) - width + 1 :]
        mixed = functional.conv1d(
            window.T.float()[None],
            weight.float()[:, None],
            None if bias is None else bias.float(),
            groups=len(weight),
        )
        out[start:end] = (functional.silu(mixed) if silu else mixed)[0].T
    return out


@on_gpu("recurrence")
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
    """Return ``scale * q[t] @ state[t]`` of each head, [T, Hv, Dv], where::

        decayed = exp(log_decay[t]) * state[t - 1]
        update = beta[t] * (v[t] - k[t] @ decayed) with the delta rule, otherwise beta[t] * v[t]
        state[t] = decayed + outer(k[t], update)

    Args:
        q, k: [T, Hk, Dk]; Hk divides Hv, and consecutive heads of v share one of k.
        v: [T, Hv, Dv].
        log_decay: [T, Hv] float32, or [T, Hv, Dk] with a decay per key channel; at most 0.
        beta: [T, Hv] float32, the rates; None for 1, without the delta rule.
        states: [N, Hv, Dk, Dv] float32 or bfloat16; overwritten.
    """
    if cpu.supports_attention(q, k, v, states):
        return cpu.linear_attention(q, k, v, log_decay, beta, states, runs, scale, delta=delta)
    share = v.shape[1] // k.shape[1]
    queries, keys = (x.float().repeat_interleave(share, 1) for x in (q * scale, k))
    decay = log_decay.exp().view(*log_decay.shape[:2], -1, 1)
    out = torch.empty_like(v)
    for slot, start, end, is_new, stores in runs:
        state = torch.zeros_like(states[slot]).float() if is_new else states[slot].float()
        for t in range(start, end):
            state = state * decay[t]
            update = v[t].float()
            if beta is not None:
                if delta:
                    update = update - torch.einsum("hd,hde->he", keys[t], state)
                update = beta[t, :, None] * update
            state = state + keys[t][:, :, None] * update[:, None]
            out[t] = torch.einsum("hd,hde->he", queries[t], state)
        if stores:
            states[slot] = state
    return out


@on_gpu("recurrence")
def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, states: Tensor, runs: StateRuns
) -> Tensor:
    """Return ``sum(c[t] * state[t])`` over the N state elements of each channel, [T, C] float32, where::

        state[t] = exp(step[t] * decay) * state[t - 1] + step[t] * x[t] * b[t]

    Args:
        x: [T, C].
        step: [T, C] float32, the step sizes.
        decay: [N, C] float32, negative.
        b, c: [T, N].
        states: [slots, N, C] float32 or bfloat16; overwritten.
    """
    if cpu.supports_scan(x, states):
        return cpu.selective_scan(x, step, decay, b, c, states, runs)
    out = torch.empty(x.shape, device=x.device)
    for slot, start, end, is_new, stores in runs:
        state = torch.zeros_like(states[slot]).float() if is_new else states[slot].float()
        for t in range(start, end):
            added = (step[t] * x[t].float())[None] * b[t].float()[:, None]
            state = (step[t][None] * decay).exp() * state + added
            out[t] = (c[t].float()[:, None] * state).sum(0)
        if stores:
            states[slot] = state
    return out


def rg_lru(x: Tensor, gates: Tensor, decay: Tensor, states: Tensor, runs: StateRuns) -> Tensor:
    """Return the state of each channel after each token, [T, C], where::

        rate = exp(decay * sigmoid(gates[..., 1]))
        state[t] = rate[t] * state[t - 1] + sqrt(1 - rate[t]^2) * sigmoid(gates[..., 0]) * x[t]

    A sequence's first token is added whole: it has no state to make room for. On a GPU the scan alone is one kernel.

    Args:
        x: [T, C].
        gates: [H, T, 2 W] of x's dtype, for each head of W channels those of the input and those of the decay.
        decay: [C] float32, negative.
        states: [slots, 1, C] float32 or bfloat16; overwritten.
    """
    if cpu.supports_lru(x, gates, states):
        return cpu.rg_lru(x, gates, decay, states, runs)
    num_tokens = len(x)
    opened = gates.transpose(0, 1).sigmoid().chunk(2, dim=2)
    input_gate, rate = (part.flatten(1).float() for part in opened)
    # Empty runs of a recorded step begin after it.
    is_first = torch.zeros(num_tokens + 1, 1, dtype=torch.bool, device=x.device)
    is_first.index_put_((runs.starts[: len(runs.slots)].long(),), runs.is_new[:, None])
    room = (1 - (2 * rate * decay).exp()).sqrt_().masked_fill_(is_first[:num_tokens], 1)
    normalized = x.float() * input_gate * room / rate  # the scan multiplies its inputs by the rates
    ones = normalized.new_ones(num_tokens, 1)
    return selective_scan(normalized, rate, decay[None], ones, ones, states, runs).to(x.dtype)
