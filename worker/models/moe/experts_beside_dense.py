"""ExpertsBesideDense: a feed-forward network and a mixture of experts with the same input (Gemma 4, 2026)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.model.spec import DecoderSpec, Experts
from ..load_context import LoadContext
from ..mlp import Mlp
from .expert_layers import AdaptedExperts, ExpertLayers
from .expert_routing import ExpertChoice
from .moe import read_experts


class ScaledRouter:
    """Router with a norm of its own, and a factor per expert; every rank holds it in full."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, experts: Experts, name: str) -> None:
        self._choice, self._eps = ExpertChoice(experts), spec.norm_eps
        self.weight = load.replicated(f"{name}.proj.weight", experts.count, spec.hidden_size)
        self._norm = load.replicated(f"{name}.scale", spec.hidden_size).mul_(spec.hidden_size**-0.5)
        self._factors = load.replicated(f"{name}.per_expert_scale", experts.count).float()

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights, float32, and expert ids, int64, both [T, top_k]."""
        logits = F.linear(rms_norm(x, self._norm, self._eps), self.weight)
        weights, expert_ids = self._choice.choose(logits)
        return weights * self._factors[expert_ids], expert_ids


class ExpertsBesideDense:
    """The sum of both networks' results, each normalized before and after.

    Args:
        name: of the decoder layer.

    Attributes:
        reads_back: `forward` reads values back from the device, which a recording cannot do.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, experts: Experts, name: str) -> None:
        self.comm, self._eps = load.comm, spec.norm_eps
        norms = (
            load.norm(f"{name}.{own}", spec.hidden_size, spec.norm_offset)
            for own in (
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )
        self._before_dense, self._after_dense, self._before_experts, self._after_experts = norms
        self.dense = Mlp(load, spec, f"{name}.{spec.names.mlp}", None)
        self.router = ScaledRouter(load, spec, experts, f"{name}.router")
        self.experts = read_experts(load, experts, spec.hidden_size, spec.activation, name)

    @property
    def reads_back(self) -> bool:
        return isinstance(self.experts, ExpertLayers | AdaptedExperts)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E], before any norm -> [T, E]."""
        dense = self.dense.forward(rms_norm(x, self._before_dense, self._eps))
        assert isinstance(dense, Tensor)  # without peers no sum is deferred
        part = self.experts.forward(rms_norm(x, self._before_experts, self._eps), *self.router.choose(x))
        mixed = rms_norm(self.comm.all_reduce(part), self._after_experts, self._eps)
        return rms_norm(dense, self._after_dense, self._eps).add_(mixed)
