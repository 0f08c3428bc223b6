"""Decoder layers over a decode step on a CPU: one C++ call, beside the same ops one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels_cpu import (
    BLOCK_SIZE,
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    Op,
    make_cache,
    time_in_turns,
)
from benchmarks.roofline import QUIRE, Case
from quire.kernels.activation import silu_and_mul
from quire.kernels.attention_variant import PLAIN
from quire.kernels.decode_layers import DecodeLayers, DenseLayer
from quire.kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from quire.kernels.linear import linear, pack
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.paged_attention import paged_decode_attention

NUM_LAYERS, SEQ_LEN = 8, 192
NUM_SEQS = [1, 2, 8]
WEIGHTS = [
    ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN_SIZE),
    (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
    (2 * INTERMEDIATE_SIZE, HIDDEN_SIZE),
    (HIDDEN_SIZE, INTERMEDIATE_SIZE),
]


def measure(repetitions: int) -> list[Case]:
    """Return a case per number of sequences; none if the C++ ops do not support the layers."""
    layers = [make_layer() for _ in range(NUM_LAYERS)]
    if any(layer.missing_op() is not None for layer in layers):
        return []
    numbers = NUM_LAYERS * sum(rows * columns for rows, columns in WEIGHTS)
    cases = []
    for num_seqs in NUM_SEQS:
        step = Step(layers, num_seqs)
        ops: dict[str, Op] = {QUIRE: step.in_one_call, "one_by_one": step.one_by_one}
        seconds = time_in_turns(ops, repetitions)
        flops = 2 * num_seqs * numbers
        cases.append(Case(f"kernels.decode_layers.s{num_seqs}", 4 * numbers, flops, seconds))
    return cases


def make_layer() -> DenseLayer:
    qkv, output, gate_up, down = (pack(torch.randn(shape) / shape[1] ** 0.5) for shape in WEIGHTS)
    return DenseLayer(
        qkv,
        output,
        gate_up,
        down,
        qkv_bias=None,
        gate_up_bias=None,
        before_attention=torch.ones(HIDDEN_SIZE),
        before_mlp=torch.ones(HIDDEN_SIZE),
        after_attention=None,
        after_mlp=None,
        q_norm=None,
        k_norm=None,
        eps=1e-5,
        residual_scale=1.0,
        rope=0,
        gate="silu",
        head_dim=HEAD_DIM,
        scale=SCALE,
        variant=PLAIN,
    )


class Step:
    """A decode step of several sequences."""

    def __init__(self, layers: Sequence[DenseLayer], num_seqs: int) -> None:
        caches, self.tables, self.lens = make_cache(num_seqs, SEQ_LEN)
        self.last_norm = torch.ones(HIDDEN_SIZE)
        self.layers, self.native = layers, DecodeLayers(layers, self.last_norm)
        self.caches = [caches[index % len(caches)] for index in range(len(layers))]
        self.native.bind([(cache, None) for cache in self.caches])
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + (SEQ_LEN - 1) % BLOCK_SIZE
        angles = torch.randn(num_seqs, HEAD_DIM // 2).repeat(1, 2)
        self.rotation = angles.cos(), angles.sin()
        self.hidden = torch.randn(num_seqs, HIDDEN_SIZE)

    def in_one_call(self) -> Tensor:
        residual, x = self.hidden.clone(), torch.empty_like(self.hidden)
        sublayers = range(self.native.num_sublayers)
        self.native.run(sublayers, x, residual, [self.rotation], self.slots, self.tables, self.lens)
        return x

    def one_by_one(self) -> Tensor:
        residual, x = self.hidden.clone(), None
        for layer, cache in zip(self.layers, self.caches, strict=True):
            norm = rms_norm if x is None else partial(add_rms_norm, x)
            projected = linear(norm(residual, layer.before_attention, layer.eps), layer.qkv)
            heads = projected.view(len(projected), -1, HEAD_DIM)
            q = fused_qk_norm_rope_kv_write(heads, cache, self.slots, *self.rotation)
            attended = paged_decode_attention(q, cache, self.tables, self.lens, layer.scale)
            x = linear(attended.view(len(projected), -1), layer.output)
            assert layer.gate_up is not None
            assert layer.down is not None
            gate_up = linear(add_rms_norm(x, residual, layer.before_mlp, layer.eps), layer.gate_up)
            x = linear(silu_and_mul(gate_up), layer.down)
        assert x is not None
        return add_rms_norm(x, residual, self.last_norm, self.layers[-1].eps)
