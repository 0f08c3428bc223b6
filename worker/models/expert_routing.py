"""ExpertRouter: the experts that each token of a mixture of experts passes, and their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .load_context import LoadContext
from .spec import Experts

# Added to the sum of weights before they are normalized: the weights of sigmoid scores may all be 0.
_EPSILON = 1e-20


class ExpertRouter:
    """Scores all experts for a token and chooses the best of them; every rank holds it in full.

    Args:
        name: of the router in the checkpoint, without ``.weight``.

    Attributes:
        weight: [X, E].
        bias: [X] float32, added to the scores that the choice is made by; None for none.
    """

    def __init__(self, load: LoadContext, experts: Experts, hidden_size: int, name: str) -> None:
        self._spec = experts
        self.weight = load.replicated(f"{name}.weight", experts.count, hidden_size)
        self.bias: Tensor | None = None
        if experts.correction_bias:
            # Stored in float32: rounded to bfloat16, biases of similar experts would be equal.
            self.bias = torch.empty(experts.count, dtype=torch.float32, device=load.device)
            load.checkpoint.read_into(self.bias, f"{name}.e_score_correction_bias", (experts.count,))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights, float32, and expert ids, int64, both [T, per_token]."""
        if self._spec.score == "softmax" and self._spec.num_groups == 1 and self.bias is None:
            return choose_experts(F.linear(x, self.weight), None, self._spec)
        # As the models were trained: the scores of hundreds of experts differ by less than bfloat16 resolves.
        return choose_experts(F.linear(x.float(), self.weight.float()), self.bias, self._spec)


def choose_experts(logits: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights.

    Args:
        logits: [T, X].
        bias: [X] float32, see Experts.correction_bias.

    Returns:
        weights, float32, and expert ids, int64, both [T, per_token].
    """
    scores = logits.sigmoid().float() if experts.score == "sigmoid" else logits.softmax(-1, torch.float32)
    by = scores if bias is None else scores + bias
    if experts.num_groups > 1:
        by = _mask_groups(by, experts)
    expert_ids = by.topk(experts.per_token, dim=-1).indices
    weights = scores.gather(-1, expert_ids)
    if experts.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    return weights * experts.scale if experts.scale != 1.0 else weights, expert_ids


def _mask_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Set the scores outside of each token's best groups to -inf, [T, X]."""
    groups = scores.unflatten(-1, (experts.num_groups, -1))
    best = groups.topk(1 if experts.group_score == "max" else 2, dim=-1).values.sum(dim=-1)
    chosen = best.topk(experts.num_top_groups, dim=-1).indices
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, value=True)
    masked: Tensor = groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    return masked
