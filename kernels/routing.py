"""Choice of each token's experts by the scores of a router.

On a GPU a Triton kernel computes in one launch what takes PyTorch up to 14. On a CPU one C++ op (native/routing.cpp)
does, with the same bits: if a weight or the order of ties differed, so could the tokens of a model. PyTorch documents
neither the order of its sums nor that of ties, so each Routing compares the op with PyTorch before it uses the op.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import on_gpu
from .native import ops as cpu
from .native.library import is_available

# Added to the sum of weights before they are normalized: the weights of sigmoid scores may all be 0.
EPSILON = 1e-20
# Numbers per vector of torch.sum, for each of the processors that PyTorch is built for.
_SUM_LANES = 16, 8, 4
# The op adds up fewer weights than this as PyTorch does.
_MAX_TOP_K = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Routing:
    """A way of choosing experts.

    Attributes:
        num_experts: X.
        top_k: experts per token.
        num_groups, num_top_groups: a token's experts are chosen from its best `num_top_groups` of `num_groups` groups
            of equal size (group-limited routing; DeepSeek-AI, *DeepSeek-V2*, 2024).
        group_best: a group's score is the sum of its best `group_best` ones, 1 or 2.
        normalized: divide the weights of a token's experts by their sum.
        scale: multiplies the weights.
    """

    num_experts: int
    top_k: int
    num_groups: int = 1
    num_top_groups: int = 1
    group_best: int = 1
    normalized: bool = False
    scale: float = 1.0

    @property
    def is_topk(self) -> bool:
        """Return whether torch.topk does it all: for one token it takes 2 us, our op and its results 5 us."""
        return not self.normalized and self.num_groups == 1 and self.scale == 1.0

    def choose(self, scores: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each token's experts, best first, and their weights, which are their scores unless normalized.

        Args:
            scores: [T, X] float32.
            correction: [X] float32, added to the scores to choose by, but not to the weights; None for none.

        Returns:
            weights, float32, and expert ids, int64, both [T, top_k].
        """
        if scores.is_cpu and (sum_lanes := self._sum_lanes):
            return self._choose_natively(scores, correction, sum_lanes)
        return select_experts(scores, correction, self)

    def choose_by_torch(self, scores: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `choose`, by PyTorch."""
        by = scores if correction is None else scores + correction
        if self.num_groups > 1:
            by = self._mask_groups(by)
        weights, expert_ids = by.topk(self.top_k, dim=-1)
        if by is not scores:
            weights = scores.gather(-1, expert_ids)
        if self.normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)
        return weights * self.scale if self.scale != 1.0 else weights, expert_ids

    def _mask_groups(self, scores: Tensor) -> Tensor:
        """Set the scores outside of each token's best groups to -inf, [T, X]."""
        groups = scores.unflatten(-1, (self.num_groups, -1))
        best = groups.topk(self.group_best, dim=-1).values.sum(dim=-1)
        selected = best.topk(self.num_top_groups, dim=-1).indices
        is_selected = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, selected, value=True)
        masked: Tensor = groups.masked_fill(~is_selected.unsqueeze(-1), -torch.inf).flatten(-2)
        return masked

    def _choose_natively(
        self, scores: Tensor, correction: Tensor | None, sum_lanes: int
    ) -> tuple[Tensor, Tensor]:
        return cpu.route_experts(
            scores.contiguous(), correction, self.top_k, (self.num_groups, self.num_top_groups, self.group_best),
            sum_lanes if self.normalized else 0, EPSILON, self.scale,
        )  # fmt: skip

    @functools.cached_property
    def _sum_lanes(self) -> int:
        return _find_sum_lanes(self)


@on_gpu("routing")
def select_experts(scores: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return what `Routing.choose` does; of equal scores any may come first."""
    return routing.choose_by_torch(scores, correction)


@functools.cache
def _find_sum_lanes(routing: Routing) -> int:
    """Return the numbers per vector of torch.sum with which the op equals PyTorch; 0 for PyTorch."""
    if not is_available() or routing.is_topk or routing.top_k >= _MAX_TOP_K:
        return 0
    samples = [*_samples(routing.num_experts)]
    for lanes in _SUM_LANES:
        if all(
            torch.equal(own, expected)
            for sample in samples
            for own, expected in zip(
                routing._choose_natively(*sample, lanes), routing.choose_by_torch(*sample), strict=True
            )
        ):
            return lanes
    _log.info("PyTorch chooses experts, because C++ breaks ties or adds up otherwise: %s", routing)
    return 0


def _samples(num_experts: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Return scores and corrections, of one token and of several; half of the rows have many ties."""
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, 1, 1, 1, 96):
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        yield scores, None
        yield scores, torch.randn(num_experts, generator=generator)
        coarse = scores.mul(num_experts // 2).round().div(num_experts)
        yield coarse, None
        yield coarse, torch.randint(3, (num_experts,), generator=generator) / 8
