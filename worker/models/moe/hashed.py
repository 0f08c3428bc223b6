"""HashedMixture: a mixture whose experts a stored table has for each token id (DeepSeek-V4, 2026)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....proto.model.experts import Experts
from ....proto.model.spec import DecoderSpec
from ...weights.checkpoint import Checkpoint
from ..load_context import LoadContext
from .expert_routing import ExpertRouter
from .moe import MixtureOfExperts


def has_table(checkpoint: Checkpoint, layer: str) -> bool:
    """Return whether a layer's experts are chosen by token id."""
    return checkpoint.has(_table_name(layer))


def _table_name(layer: str) -> str:
    return f"{layer}.mlp.gate.tid2eid"


class HashedRouter(ExpertRouter):
    """Weighs the experts that a table names for the ids of the tokens.

    Attributes:
        token_ids: [T], of the current step.
    """

    token_ids: Tensor

    def __init__(
        self, load: LoadContext, experts: Experts, hidden_size: int, layer: str, vocab_size: int
    ) -> None:
        super().__init__(load, experts, hidden_size, f"{layer}.mlp.gate", "")
        shape = vocab_size, experts.top_k
        table = torch.empty(shape, dtype=torch.int64)
        load.checkpoint.read_into(table, _table_name(layer), shape)
        self._table = table.to(load.device)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights, float32, and expert ids, int64, both [T, top_k]."""
        expert_ids = self._table.index_select(0, self.token_ids)
        return self.weigh(x, expert_ids), expert_ids


class HashedMixture(MixtureOfExperts):
    """A mixture of experts with a HashedRouter."""

    router: HashedRouter

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        assert spec.experts is not None
        experts = replace(spec.experts, correction_bias=False)
        super().__init__(load, experts, spec.hidden_size, spec.activation, name)
        self.router = HashedRouter(load, experts, spec.hidden_size, name, spec.vocab_size)

    def forward_tokens(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, E] and [T] -> [T, E]."""
        self.router.token_ids = token_ids
        return self.forward(x)
