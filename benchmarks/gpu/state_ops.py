"""The recurrences of layers that keep a state, with the heads and widths of the run's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.op_case import Op, OpCase, random
from benchmarks.gpu.sizes import Sizes
from quire.kernels.recurrence import causal_conv, linear_attention, selective_scan
from quire.kernels.state_runs import StateRuns
from quire.worker.libraries.flash_linear_attention import CHUNK_LEN, FlashLinearAttention
from quire.worker.libraries.installed import FLASH_LINEAR_ATTENTION

DeltaRule = Callable[..., Tensor]
# Taps of the short convolutions of all published models but few, and elements of a channel's state in Mamba.
CONV_WIDTH, STATE_DIM = 4, 16


def state_cases(sizes: Sizes) -> Iterator[OpCase]:
    """Yield each recurrence for a decode step and for a prompt."""
    for rows, length in ((sizes.decodes[-2][0], 1), (1, sizes.prefill_lens[0])):
        yield conv_case(sizes, rows, length)
        yield attention_case(sizes, rows, length)
        yield scan_case(sizes, rows, length)


def conv_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    channels, tokens = sizes.model.hidden_size, rows * length

    def make(index: int) -> Op:
        weight = random(sizes, channels, CONV_WIDTH)
        states, runs = random(sizes, rows + 1, CONV_WIDTH - 1, channels), _runs(sizes, rows, length)
        x = random(sizes, tokens, channels)
        return lambda: (causal_conv(x, weight, None, states, runs, silu=True), states)

    num_bytes = 2 * (tokens + rows * (CONV_WIDTH - 1)) * channels * getattr(torch, sizes.dtype).itemsize
    return OpCase(f"causal_conv.{rows}x{length}", sizes.device, num_bytes, 0, make)


def attention_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    """Return the gated delta rule, which has all of the op's arithmetic."""
    model, tokens = sizes.model, rows * length
    heads, key_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def make(index: int, rule: DeltaRule = linear_attention) -> Op:
        q, k = (F.normalize(random(sizes, tokens, key_heads, dim), dim=-1) for _ in "qk")
        v, runs = random(sizes, tokens, heads, dim), _runs(sizes, rows, length)
        log_decay = F.logsigmoid(_floats(sizes, tokens, heads))
        beta, states = _floats(sizes, tokens, heads).sigmoid(), _floats(sizes, rows + 1, heads, dim, dim)
        return lambda: (rule(q, k, v, log_decay, beta, states, runs, 1.0), states)

    def make_peer(index: int) -> Op:
        return make(index, FlashLinearAttention.load(torch.device(sizes.device)).delta_rule)

    peers = {"fla": make_peer} if length >= CHUNK_LEN and has_fla(sizes) else {}
    num_bytes = 2 * rows * heads * dim * dim * 4 + 2 * tokens * (key_heads + heads) * dim * 2
    return OpCase(
        f"linear_attention.{rows}x{length}",
        sizes.device,
        num_bytes,
        8 * tokens * heads * dim * dim,
        make,
        peers,
    )


def has_fla(sizes: Sizes) -> bool:
    """Return whether flash-linear-attention is installed and fits the device."""
    is_gpu = sizes.device == "cuda"
    return is_gpu and not FLASH_LINEAR_ATTENTION.find_problem(torch.cuda.get_device_capability(sizes.device))


def scan_case(sizes: Sizes, rows: int, length: int) -> OpCase:
    channels, tokens = sizes.model.hidden_size, rows * length

    def make(index: int) -> Op:
        x, runs = random(sizes, tokens, channels), _runs(sizes, rows, length)
        b, c = (random(sizes, tokens, STATE_DIM) for _ in "bc")
        step, decay = F.softplus(_floats(sizes, tokens, channels)), -_floats(sizes, STATE_DIM, channels).exp()
        states = _floats(sizes, rows + 1, STATE_DIM, channels)
        return lambda: (selective_scan(x, step, decay, b, c, states, runs), states)

    num_bytes = 2 * rows * STATE_DIM * channels * 4 + tokens * channels * 10
    return OpCase(
        f"selective_scan.{rows}x{length}", sizes.device, num_bytes, 6 * tokens * STATE_DIM * channels, make
    )


def _runs(sizes: Sizes, rows: int, length: int) -> StateRuns:
    """Return runs of `length` tokens that continue their sequences; slot 0 is no sequence's."""
    starts = torch.arange(rows + 1, dtype=torch.int32, device=sizes.device)
    is_new = torch.zeros(rows, dtype=torch.bool, device=sizes.device)
    return StateRuns(starts[:rows] + 1, starts * length, is_new, length)


def _floats(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=sizes.device)
