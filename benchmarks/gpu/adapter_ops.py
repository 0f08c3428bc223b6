"""Low-rank adapters of a fused layer of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.op_case import Op, OpCase, random
from benchmarks.gpu.sizes import Sizes
from quire.kernels.lora import LoraFactors, LoraGroups, add_lora, group_tokens


def adapter_cases(sizes: Sizes) -> Iterator[OpCase]:
    """Yield decodes with one adapter on all rows and with one per row, and a prompt with one adapter."""
    rows = sizes.decodes[-3][0]
    yield adapter_case(sizes, rows, 1)
    yield adapter_case(sizes, rows, min(rows, sizes.num_adapters))
    yield adapter_case(sizes, sizes.prefill_lens[-1], 1)


def adapter_case(sizes: Sizes, tokens: int, num_adapters: int) -> OpCase:
    model, rank = sizes.model, sizes.adapter_rank
    parts = [
        heads * model.head_dim
        for heads in (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    ]
    inputs, outputs = model.hidden_size, sum(parts)

    def make(index: int) -> Op:
        slots = np.arange(tokens, dtype=np.int32) % num_adapters
        groups = LoraGroups(*(torch.from_numpy(each).to(sizes.device) for each in group_tokens(slots)))
        factors = _random_factors(sizes, num_adapters, parts)
        x, y = random(sizes, tokens, inputs), random(sizes, tokens, outputs)

        def add() -> Tensor:
            add_lora(y, x, factors, groups)
            return y

        return add

    itemsize = getattr(torch, sizes.dtype).itemsize
    weights = num_adapters * rank * (len(parts) * inputs + outputs)
    num_bytes = (weights + tokens * (inputs + 2 * outputs)) * itemsize
    flops = 2 * tokens * rank * (len(parts) * inputs + outputs)
    return OpCase(f"add_lora.{tokens}x{num_adapters}", sizes.device, num_bytes, flops, make)


def _random_factors(sizes: Sizes, num_adapters: int, parts: list[int]) -> LoraFactors:
    rank, inputs, bounds = sizes.adapter_rank, sizes.model.hidden_size, (0, *np.cumsum(parts).tolist())
    return LoraFactors(
        random(sizes, num_adapters, len(parts), rank, inputs) * inputs**-0.5,
        random(sizes, num_adapters, rank, bounds[-1]) * rank**-0.5,
        torch.full((num_adapters, len(parts)), rank, dtype=torch.int32, device=sizes.device),
        torch.tensor(bounds, dtype=torch.int32, device=sizes.device),
        bounds,
    )
