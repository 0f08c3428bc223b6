"""The choice of experts in C++ against PyTorch, to the bit."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from routings import ROUTINGS
from torch import Tensor

from quire.kernels import routing
from quire.kernels.native import ops
from quire.kernels.native.library import is_available
from quire.kernels.routing import Routing

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(autouse=True)
def native() -> None:
    if not is_available():
        pytest.skip("there is no C++ compiler")


def check(own: Routing, scores: Tensor, correction: Tensor | None = None) -> None:
    """Check that the op has the results of PyTorch."""
    assert own._sum_lanes > 0
    weights, expert_ids = own.choose(scores, correction)
    expected_weights, expected_ids = own.choose_by_torch(scores, correction)
    assert torch.equal(expert_ids, expected_ids)
    assert weights.dtype == expected_weights.dtype
    torch.testing.assert_close(weights, expected_weights, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("own", ROUTINGS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 700])
def test_choice_equals_torch(own: Routing, num_tokens: int) -> None:
    logits = 3 * torch.randn(num_tokens, own.num_experts)
    correction = torch.randn(own.num_experts) / 4
    for scores in (logits.sigmoid(), logits.softmax(-1), logits):
        check(own, scores)
        check(own, scores, correction)


@pytest.mark.parametrize("own", ROUTINGS, ids=str)
@pytest.mark.parametrize("num_levels", [1, 2, 5, 40])
def test_ties_are_broken_as_torch_breaks_them(own: Routing, num_levels: int) -> None:
    scores = torch.randint(num_levels, (300, own.num_experts)) / 8
    check(own, scores)
    check(own, scores, torch.randint(3, (own.num_experts,)) / 8)
    check(own, (6 * torch.randn_like(scores)).bfloat16().float().sigmoid())


@pytest.mark.parametrize("own", ROUTINGS, ids=str)
def test_special_numbers_are_chosen_as_torch_chooses_them(own: Routing) -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1e-40, -1.0])
    check(own, values[torch.randint(len(values), (300, own.num_experts))])
    scores = torch.rand(100, own.num_experts)
    scores[:, -1] = torch.nan
    check(own, scores)
    check(own, torch.zeros(4, own.num_experts))  # nothing to normalize by


@pytest.mark.parametrize("top_k", [*range(1, 41), 62, 63])
def test_weights_are_added_up_as_torch_adds_them(top_k: int) -> None:
    own = Routing(64, top_k, normalized=True)
    for num_tokens in (1, 200):
        check(own, torch.rand(num_tokens, 64).exp2())


def test_row_does_not_depend_on_others_or_threads() -> None:
    own = ROUTINGS[0]
    scores, correction = torch.rand(1500, 256), torch.rand(256)
    together = own.choose(scores, correction)
    for token in (0, 17, 1499):
        alone = own.choose(scores[token : token + 1], correction)
        assert all(torch.equal(a[0], b[token]) for a, b in zip(alone, together, strict=True))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(own.choose(scores, correction), together, strict=True))


def test_scores_need_not_be_contiguous() -> None:
    check(Routing(20, 3, normalized=True), torch.rand(20, 9).t())


def test_torch_chooses_if_the_op_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose_others(
        scores: Tensor, correction: Tensor | None, top_k: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        chosen, expert_ids = scores.topk(top_k, largest=False)
        return chosen, expert_ids

    monkeypatch.setattr(ops, "route_experts", choose_others)
    own = Routing(21, 4, normalized=True, scale=1.25)  # in no other test, because results are kept
    with caplog.at_level(logging.INFO, logger=routing.__name__):
        scores = torch.rand(5, 21)
        found = own.choose(scores)
    assert "PyTorch chooses experts" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(found, own.choose_by_torch(scores), strict=True))
    routing._find_sum_lanes.cache_clear()


@pytest.mark.parametrize("own", [Routing(200, 64, normalized=True), Routing(200, 4)], ids=str)
def test_torch_chooses_many_experts_or_the_top_alone(own: Routing) -> None:
    assert own._sum_lanes == 0
    scores = torch.rand(2, 200)
    assert torch.equal(own.choose(scores)[0], own.choose_by_torch(scores)[0])


def test_equal_routings_are_compared_with_torch_once() -> None:
    routing._find_sum_lanes.cache_clear()
    for _ in range(3):
        replace(ROUTINGS[0]).choose(torch.rand(1, 256))
    assert routing._find_sum_lanes.cache_info().misses == 1
