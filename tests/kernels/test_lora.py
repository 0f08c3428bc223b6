"""Low-rank adapters: the C++ op, the Triton kernel and the reference against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import lora
from quire.kernels.dispatch import twin_of
from quire.kernels.lora import LoraFactors, LoraGroups, group_tokens, make_factors

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_SLOTS = 5
# Outputs of the parts: whole vectors and odd numbers, as of a fused qkv layer, and of a layer of one part.
PARTS = [(48, 16, 16), (33, 7), (70,)]


def random_factors(part_lens: tuple[int, ...], in_features: int, dtype: torch.dtype) -> LoraFactors:
    """Return factors of different ranks up to 6; slot 2 leaves part 0 unchanged, and slot 3 is empty."""
    factors = make_factors(NUM_SLOTS, 6, in_features, part_lens, dtype, torch.device("cpu"))
    factors.a.copy_(torch.randn(factors.a.shape) / in_features**0.5)
    factors.b.copy_(torch.randn(factors.b.shape))
    ranks = torch.randint(1, 7, factors.ranks.shape, dtype=torch.int32)
    ranks[2, 0] = 0
    ranks[3] = 0
    factors.ranks.copy_(ranks)
    return factors


def groups_of(slots: list[int], device: str = "cpu") -> LoraGroups:
    return LoraGroups(
        *(torch.from_numpy(each).to(device) for each in group_tokens(np.array(slots, np.int32)))
    )


def expected_sum(y: Tensor, x: Tensor, factors: LoraFactors, slots: list[int]) -> Tensor:
    """Return the sum in float64, token by token."""
    out = y.double().clone()
    for token, slot in enumerate(slots):
        for part in range(len(factors.bounds) - 1):
            first, last, rank = factors.bounds[part], factors.bounds[part + 1], int(factors.ranks[slot, part])
            if slot >= 0 and rank:
                low = factors.a[slot, part, :rank].double() @ x[token].double()
                out[token, first:last] += low @ factors.b[slot, :rank, first:last].double()
    return out


def on(device: str, factors: LoraFactors) -> LoraFactors:
    return LoraFactors(
        factors.a.to(device),
        factors.b.to(device),
        factors.ranks.to(device),
        factors.starts.to(device),
        factors.bounds,
    )


def random_slots(num_tokens: int) -> list[int]:
    return torch.randint(-1, NUM_SLOTS, (num_tokens,)).tolist()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("part_lens", PARTS, ids=str)
@pytest.mark.parametrize(("num_tokens", "in_features"), [(1, 32), (9, 64), (70, 48), (5, 40)])
def test_op_matches_float64(
    dtype: torch.dtype, part_lens: tuple[int, ...], num_tokens: int, in_features: int
) -> None:
    factors, slots = random_factors(part_lens, in_features, dtype), random_slots(num_tokens)
    x, y = torch.randn(num_tokens, in_features).to(dtype), torch.randn(num_tokens, sum(part_lens)).to(dtype)
    expected = expected_sum(y, x, factors, slots)
    lora.add_lora(y, x, factors, groups_of(slots))
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("part_lens", "num_tokens", "in_features"), [(PARTS[0], 21, 96), (PARTS[1], 3, 130)])
def test_kernel_matches_twin(
    device: str, dtype: torch.dtype, part_lens: tuple[int, ...], num_tokens: int, in_features: int
) -> None:
    from quire.kernels.gpu import lora as kernels

    factors, slots = random_factors(part_lens, in_features, dtype), random_slots(num_tokens)
    x, y = torch.randn(num_tokens, in_features).to(dtype), torch.randn(num_tokens, sum(part_lens)).to(dtype)
    expected = expected_sum(y, x, factors, slots)
    found = y.clone().to(device)
    kernels.add_lora(found, x.to(device), on(device, factors), groups_of(slots, device))
    twin_of(lora.add_lora)(y, x, factors, groups_of(slots))
    for each in (found.cpu(), y):
        torch.testing.assert_close(each.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_features", [64, 100, 1000])
def test_token_has_same_bits_in_any_batch(dtype: torch.dtype, in_features: int) -> None:
    """A token's result must not depend on the others, as speculative decoding and recomputation require."""
    factors = random_factors(PARTS[1], in_features, dtype)
    slots = [1] * 37
    x, y = torch.randn(37, in_features).to(dtype), torch.randn(37, sum(PARTS[1])).to(dtype)
    together = y.clone()
    lora.add_lora(together, x, factors, groups_of(slots))
    for token in range(37):
        alone = y[token : token + 1].clone()
        lora.add_lora(alone, x[token : token + 1], factors, groups_of([1]))
        assert torch.equal(alone[0], together[token])


def test_tokens_are_grouped_by_slot() -> None:
    groups = groups_of([4, -1, 0, 4, 0, -1] + [2] * 35)
    assert groups.order.tolist() == [2, 4, *range(6, 41), 0, 3]
    assert groups.slots.tolist() == [0, 2, 2, 2, 4]
    assert groups.starts.tolist() == [0, 2, 18, 34, 37, 39]


@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 5), (8, 3), (90, 2), (70, 300), (40, 1)])
def test_groups_of_device_are_those_of_host(device: str, num_rows: int, num_slots: int) -> None:
    """Some groups are empty: on the device their number is the largest possible."""
    slots = torch.randint(-1, num_slots, (num_rows,), dtype=torch.int32)
    found = lora.group_rows(slots.to(device), num_slots)
    order, starts, own = group_tokens(slots.numpy())
    assert found.order[: len(order)].tolist() == order.tolist()
    bounds = list(zip(pairwise(found.starts.tolist()), found.slots.tolist(), strict=True))
    assert [each for each in bounds if each[0][0] < each[0][1]] == [
        *zip(pairwise(starts.tolist()), own.tolist(), strict=True)
    ]
    assert all(0 <= slot < num_slots for _, slot in bounds)
    assert len(bounds) <= num_rows


@pytest.mark.parametrize("way", ["op", "kernel", "reference"])
def test_rows_of_inputs_may_differ_from_those_of_outputs(device: str, way: str) -> None:
    """As those of experts, whose tokens have several rows of outputs each."""
    factors, slots = random_factors(PARTS[0], 64, torch.float32), random_slots(24)
    sources = torch.randint(0, 5, (24,))
    x, y = torch.randn(5, 64), torch.randn(24, sum(PARTS[0]))
    expected = expected_sum(y, x[sources], factors, slots)
    groups = lora.group_rows(torch.tensor(slots, dtype=torch.int32), NUM_SLOTS)
    groups = replace(groups, inputs=sources[groups.order.long()].int())
    if way == "kernel":
        from quire.kernels.gpu import lora as kernels

        groups = LoraGroups(*(each.to(device) for each in (groups.order, groups.starts, groups.slots)))
        groups = replace(groups, inputs=sources.to(device)[groups.order.long()].int())
        found = y.to(device, copy=True)
        kernels.add_lora(found, x.to(device), on(device, factors), groups)
        y = found.cpu()
    else:
        add = lora.add_lora if way == "op" else twin_of(lora.add_lora)
        add(y, x, factors, groups)
    torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=1e-5)


def test_tokens_without_adapter_make_no_group() -> None:
    groups = groups_of([-1, -1])
    assert (groups.order.numel(), groups.slots.numel(), groups.starts.tolist()) == (0, 0, [0])
