"""LightningAttention: linear attention with a constant decay per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import linear_attention
from ....kernels.state_runs import StateRuns
from ....proto.model.lightning import LightningSpec
from ....proto.model.spec import DecoderSpec
from ...weights.weight_slice import Regrouping
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import ShardedGroupNorm, StateMixer


class LightningAttention(StateMixer):
    """Lightning attention; each rank computes its part of the heads."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: LightningSpec, name: str) -> None:
        self.spec = own
        size, heads = own.num_heads * own.head_dim, load.shard(own.num_heads)
        self._heads = len(heads)
        # The rows of each head are stored together.
        order = Regrouping((own.head_dim,) * 3, (0, 1, 2))
        projection = Projection(f"{name}.qkv_proj", load.shard(3 * size), interleaving=order)
        self.qkv = ColumnParallelLinear(load, [projection], spec.hidden_size, bias=False, shares_input=True)
        self.gate = ColumnParallelLinear(
            load,
            [Projection(f"{name}.output_gate", load.shard(size))],
            spec.hidden_size,
            False,
            shares_input=True,
        )
        numbers = torch.arange(heads.start + 1, heads.end + 1, dtype=torch.float32, device=load.device)
        self.log_decay = -own.slope_factor * 2.0 ** (-8.0 * numbers / own.num_heads)
        self.norm = ShardedGroupNorm(load, f"{name}.norm", size, 1, own.norm_eps)
        self.output = RowParallelLinear(load, f"{name}.out_proj", size, spec.hidden_size, bias=False)
        for computed in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            load.checkpoint.ignore(f"{name}.{computed}")

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        projected = F.silu(self.qkv.forward(x)).view(-1, 3 * self._heads, self.spec.head_dim)
        q, k, v = projected.chunk(3, dim=1)
        decay = self.log_decay.expand(len(q), -1)
        y = runs.compute(linear_attention, q, k, v, decay, None, states=states[0], delta=False).flatten(1)
        return self.output.forward_partial(self.norm.apply(y) * self.gate.forward(x).sigmoid())
