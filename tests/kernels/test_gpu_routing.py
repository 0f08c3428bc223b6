"""The choice of experts by the Triton kernel, against PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from routings import ROUTINGS
from torch import Tensor

from quire.kernels.routing import Routing


def choose(own: Routing, device: str, scores: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    from quire.kernels.gpu.routing import select_experts

    moved = None if correction is None else correction.to(device)
    weights, expert_ids = select_experts(scores.to(device), moved, own)
    assert (weights.dtype, expert_ids.dtype) == (torch.float32, torch.int64)
    return weights.cpu(), expert_ids.cpu()


@pytest.mark.parametrize("own", ROUTINGS, ids=str)
def test_choice_equals_torch(device: str, own: Routing) -> None:
    logits, correction = 3 * torch.randn(3, own.num_experts), torch.randn(own.num_experts) / 4
    for scores, added in ((logits.sigmoid(), correction), (logits.softmax(-1), None), (logits, None)):
        weights, expert_ids = choose(own, device, scores, added)
        expected_weights, expected_ids = own.choose_by_torch(scores, added)
        assert torch.equal(expert_ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)


def test_experts_with_equal_scores_are_chosen_in_order(device: str) -> None:
    """The best groups too; each expert once, also among scores of zero."""
    own = Routing(12, 4, 3, 2, 2, normalized=True)
    weights, expert_ids = choose(own, device, torch.zeros(2, 12), None)
    assert expert_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.0] * 4] * 2


def test_strided_scores_and_no_tokens(device: str) -> None:
    own = Routing(30, 3, normalized=True)
    scores = torch.rand(4, 40)[:, :30]
    assert torch.equal(choose(own, device, scores, None)[1], own.choose_by_torch(scores)[1])
    assert [tuple(each.shape) for each in choose(own, device, scores[:0], None)] == [(0, 3), (0, 3)]


def test_scores_that_are_not_numbers_select_experts_that_exist(device: str) -> None:
    """An expert out of range would be read from memory of others."""
    for own in (Routing(12, 3), replace(Routing(12, 3, 3, 2, 2), normalized=True)):
        _, expert_ids = choose(own, device, torch.full((2, 12), torch.nan), None)
        assert (expert_ids >= 0).all()
        assert (expert_ids < 12).all()
