"""Linear layers of a mixture of experts: kernels and references against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick_cases import slow_except
from random_weights import random_weight
from torch import Tensor

from quire.kernels import moe as references
from quire.kernels.moe import ExpertWeights
from quire.kernels.quantized_linear import QuantizedWeight

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KINDS = ["plain", "int8", "fp8", "int8-groups", "int4", "int4-any-order", "int4-groups-of-24", "fp4"]
NUM_EXPERTS = 5


def random_experts(kind: str, out_features: int, in_features: int, dtype: torch.dtype) -> ExpertWeights:
    if kind == "plain":
        weights = torch.randn(NUM_EXPERTS, out_features, in_features) / in_features**0.5
        return ExpertWeights(weights.to(dtype))
    each = [random_weight(kind, out_features, in_features) for _ in range(NUM_EXPERTS)]

    def stack(name: str) -> Tensor | None:
        tensors = [getattr(weight, name) for weight in each]
        return None if tensors[0] is None else torch.stack(tensors)

    codes = stack("codes")
    assert codes is not None
    return ExpertWeights(codes, stack("scales"), stack("zeros"), stack("group_index"))


def random_ids(num_tokens: int, top_k: int) -> Tensor:
    """Return different experts for each token, none of them the third."""
    ids = torch.rand(num_tokens, NUM_EXPERTS - 1).argsort(dim=1)[:, :top_k]
    return torch.where(ids >= 2, ids + 1, ids)


def on(device: str, weights: ExpertWeights) -> ExpertWeights:
    tensors = weights.codes, weights.scales, weights.zeros, weights.group_index, weights.bias
    codes, *others = (None if each is None else each.to(device) for each in tensors)
    assert codes is not None
    return ExpertWeights(codes, *others)


def matrices(weights: ExpertWeights) -> Tensor:
    """Return the weights, [X, N, K] float64, rounded as they are multiplied."""
    return torch.stack([weights.matrix(index, torch.float32).double() for index in range(NUM_EXPERTS)])


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 5), (7, 2, 5), (700, 3, 5), (3, 4, 40)], ids=str
)
def test_choices_are_sorted_by_expert(device: str, num_tokens: int, top_k: int, num_experts: int) -> None:
    from quire.kernels.gpu.moe import sort_choices

    ids = torch.randint(0, num_experts, (num_tokens, top_k))
    expected = [
        index for expert in range(num_experts) for index in (ids.flatten() == expert).nonzero().flatten()
    ]
    starts = [int((ids < expert).sum()) for expert in range(num_experts + 1)]
    for choices in (sort_choices(ids.to(device), num_experts), references.sort_choices(ids, num_experts)):
        assert choices.order.tolist() == [int(index) for index in expected]
        assert choices.starts.tolist() == starts
        assert (choices.order.dtype, choices.starts.dtype) == (torch.int32, torch.int32)
        assert choices.top_k == top_k


# Few and many tokens per expert for each dtype; each format of quantized weights once.
CASES = [("plain", dtype, *tokens) for dtype in TOLERANCE for tokens in ((1, 1), (23, 3))]
CASES += [("plain", torch.bfloat16, 180, 2)]
CASES += [
    (kind, torch.float16 if index % 2 else torch.bfloat16, 9, 2) for index, kind in enumerate(KINDS[1:])
]


@pytest.mark.parametrize(
    ("kind", "dtype", "num_tokens", "top_k", "has_bias"),
    slow_except(
        [(*case, bool(index % 2)) for index, case in enumerate(CASES)],
        [(*case, has_bias) for case in CASES for has_bias in (False, True)],
    ),
    ids=str,
)
def test_linears_match_float64(
    device: str, kind: str, dtype: torch.dtype, num_tokens: int, top_k: int, has_bias: bool
) -> None:
    """Tokens to experts and back; the third expert has no tokens."""
    from quire.kernels.gpu import moe as kernels

    up, down = random_experts(kind, 70, 96, dtype), random_experts(kind, 33, 96, dtype)
    if has_bias:
        up, down = (replace(each, bias=torch.randn(each.codes.shape[:2]).to(dtype)) for each in (up, down))
    x = torch.randn(num_tokens, 99).to(dtype)[:, :96]
    ids, factors = random_ids(num_tokens, top_k), torch.rand(num_tokens, top_k)
    choices = references.sort_choices(ids, NUM_EXPERTS)
    products = torch.einsum(
        "tnk,tk->tn", matrices(up)[ids].flatten(0, 1), x.double().repeat_interleave(top_k, 0)
    )
    rows = torch.randn(num_tokens * top_k, 96).to(dtype)
    by_choice = torch.empty_like(rows)
    by_choice[choices.order.long()] = rows
    terms = torch.einsum("tnk,tk->tn", matrices(down)[ids].flatten(0, 1), by_choice.double())
    if up.bias is not None and down.bias is not None:
        products += up.bias[ids].flatten(0, 1).double()
        terms += down.bias[ids].flatten(0, 1).double()
    expected_up = products[choices.order.long()]
    terms *= factors.view(-1, 1)
    expected_down = terms.view(num_tokens, top_k, -1).sum(dim=1)

    moved = choices._replace(order=choices.order.to(device), starts=choices.starts.to(device))
    found_up = kernels.scatter_linear(x.to(device), on(device, up), moved)
    found_down = kernels.gather_linear(rows.to(device), on(device, down), moved, factors.to(device))
    found_terms = kernels.gather_terms(rows.to(device), on(device, down), moved, factors.to(device))
    twin_up, twin_down, twin_terms = (
        references.scatter_linear(x, up, choices),
        references.gather_linear(rows, down, choices, factors),
        references.gather_terms(rows, down, choices, factors),
    )
    tolerance = 2 * TOLERANCE[dtype]
    for found, expected in (
        (found_up, expected_up), (twin_up, expected_up), (found_down, expected_down), (twin_down, expected_down),
        (found_terms, terms), (twin_terms, terms),
    ):  # fmt: skip
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("own", [range(3), range(2, 3), range(3, 5)], ids=str)
def test_results_of_ranks_with_some_experts_add_up(device: str, own: range) -> None:
    """Each rank multiplies by its experts only; here one has `own`, and others those before and after."""
    from quire.kernels.gpu import moe as kernels

    up, down = (
        random_experts("plain", 34, 48, torch.float32),
        random_experts("plain", 48, 34, torch.float32),
    )
    x, ids, factors = torch.randn(9, 48), random_ids(9, 2), torch.rand(9, 2)
    everything = references.sort_choices(ids, NUM_EXPERTS)
    expected = references.gather_linear(
        references.scatter_linear(x, up, everything), down, everything, factors
    )
    assert not everything.is_partial
    for ops in (kernels, references):
        total = torch.zeros(9, 48)
        for part in (range(own.start), own, range(own.stop, NUM_EXPERTS)):
            if not part:
                continue
            place = device if ops is kernels else "cpu"
            own_up, own_down = (
                on(place, ExpertWeights(each.codes[part.start : part.stop])) for each in (up, down)
            )
            choices = ops.sort_choices(ids.to(place), NUM_EXPERTS, part)
            counts = [int((ids == expert).sum()) for expert in part]
            assert choices.starts.diff().tolist() == counts
            assert choices.is_partial
            rows = ops.scatter_linear(x.to(place), own_up, choices)
            assert len(rows) == ids.numel()
            rows[sum(counts) :] = torch.nan  # arbitrary, and not to be read
            total += ops.gather_linear(rows, own_down, choices, factors.to(place)).cpu()
        torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


def test_matrix_of_plain_weights_is_no_copy() -> None:
    weights = random_experts("plain", 4, 8, torch.float32)
    assert weights.matrix(2, torch.float32).data_ptr() == weights.codes[2].data_ptr()


def test_matrix_of_quantized_weights_is_dequantized() -> None:
    weights = random_experts("int4", 6, 64, torch.float32)
    assert weights.scales is not None
    assert weights.zeros is not None
    one = QuantizedWeight(weights.codes[3], weights.scales[3], weights.zeros[3])
    from quire.kernels.quantized_linear import dequantize

    assert torch.equal(weights.matrix(3, torch.float32), dequantize(one))
