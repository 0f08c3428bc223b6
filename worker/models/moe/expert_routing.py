"""ExpertRouter: the experts that each token of a mixture of experts passes, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import sigmoid
from ....kernels.linear import linear, pack
from ....kernels.routing import EPSILON, Routing
from ....proto.model.experts import Experts
from ...weights.weight_slice import WeightSlice
from ..load_context import LoadContext


class ExpertRouter:
    """Scores all experts for a token and chooses the best of them; every rank holds it in full.

    Args:
        name: of the router in the checkpoint, without ``.weight``.
        correction_name: of the correction in the checkpoint, if the router has one.

    Attributes:
        weight: [X, E], packed, in float32 if the scores are.
        bias: [X], added to the logits; None for none.
        correction: [X] float32, added to the scores that the choice is made by; None for none.
    """

    def __init__(
        self,
        load: LoadContext,
        experts: Experts,
        hidden_size: int,
        name: str,
        correction_name: str,
    ) -> None:
        self._choice = ExpertChoice(experts)
        # As the models were trained: the scores of hundreds of experts differ by less than bfloat16 resolves.
        self._logits_scale = experts.logits_scale
        self._in_float32 = (
            experts.score in ("sigmoid", "sqrt_softplus")
            or experts.num_groups > 1
            or experts.correction_bias
            or experts.exact_router
        )
        shape = experts.num_scored, hidden_size
        dtype = torch.float32 if self._in_float32 else load.dtype
        weight = torch.empty(shape, dtype=dtype, device=load.device)
        load.checkpoint.read_into(weight, f"{name}.weight", shape)
        self.weight = pack(weight)
        self.lora = load.adapters([WeightSlice(name, shape, 0, 0, experts.num_scored)])
        bias = load.replicated(f"{name}.bias", experts.num_scored) if experts.router_bias else None
        self.bias = bias.float() if bias is not None and self._in_float32 else bias
        self.correction: Tensor | None = None
        if experts.correction_bias and not (
            experts.may_lack_correction and not load.checkpoint.has(correction_name)
        ):
            # Stored in float32: rounded to bfloat16, those of similar experts would be equal. Some checkpoints store
            # a leading dimension of 1.
            stored = *load.checkpoint.shape_of(correction_name)[:-1], experts.num_scored
            self.correction = torch.empty(stored, dtype=torch.float32, device=load.device)
            load.checkpoint.read_into(self.correction, correction_name, stored)
            self.correction = self.correction.view(experts.num_scored)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights, float32, and expert ids, int64, both [T, top_k]."""
        return self._choice.choose(self._logits(x), self.correction)

    def weigh(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weights of given experts, float32: [T, E] and [T, top_k] -> [T, top_k]."""
        return self._choice.weigh(self._logits(x), expert_ids)

    def _logits(self, x: Tensor) -> Tensor:
        logits = linear(x.float() if self._in_float32 else x, self.weight, self.bias)
        if self.lora.is_active:
            part = torch.zeros_like(logits, dtype=x.dtype)
            self.lora.add(part, x)
            logits += part  # of the model's dtype or float32
        return logits if self._logits_scale == 1.0 else logits.mul_(self._logits_scale)


class ExpertChoice:
    """Chooses each token's experts by the logits of a router."""

    def __init__(self, experts: Experts) -> None:
        self._spec = experts
        if experts.score in ("softmax", "sigmoid", "sqrt_softplus"):
            self._routing = Routing(
                experts.num_scored,
                experts.top_k,
                experts.num_groups,
                experts.num_top_groups,
                1 if experts.group_score == "max" else 2,
                experts.normalized,
                experts.scale,
            )
        else:
            self._routing = Routing(experts.num_scored, experts.top_k)

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights.

        Args:
            logits: [T, X].
            correction: [X] float32, see ExpertRouter.

        Returns:
            weights, float32, and expert ids, int64, both [T, top_k].
        """
        experts = self._spec
        if experts.score == "sparsemixer":
            return _sparsemixer(logits, experts)
        # exp stays PyTorch's own: with another one's rounding, other scores would be equal.
        if experts.score == "softmax":
            return self._routing.choose(logits.softmax(-1, torch.float32), correction)
        if experts.score in ("sigmoid", "sqrt_softplus"):
            return self._routing.choose(self._scores(logits), correction)
        selected, expert_ids = self._routing.choose(logits.float())
        weights = selected.softmax(dim=-1) if experts.score == "softmax_of_top_k" else sigmoid(selected)
        return weights, expert_ids

    def weigh(self, logits: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weights of given experts, whose scores are each computed by itself: [T, X] -> [T, top_k]."""
        weights = self._scores(logits).gather(1, expert_ids)
        if self._spec.normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + EPSILON)
        return weights * self._spec.scale

    def _scores(self, logits: Tensor) -> Tensor:
        """Return the scores of experts that do not depend on each other, float32."""
        if self._spec.score == "sqrt_softplus":
            return F.softplus(logits.float()).sqrt()
        return sigmoid(logits).float()


def _sparsemixer(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Choose the best experts one after the other (SparseMixer-v2; Liu et al., *GRIN*, 2024), as for ExpertChoice.

    The weight of each is its softmax over the experts that are left whose logits are close to its own.
    """
    left, weights, expert_ids = logits, [], []
    for _ in range(experts.top_k):
        best, selected = left.max(dim=-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * experts.jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(-1, selected))
        expert_ids.append(selected)
        left = left.scatter(-1, selected, -torch.inf)
    return torch.cat(weights, dim=-1).float(), torch.cat(expert_ids, dim=-1)
