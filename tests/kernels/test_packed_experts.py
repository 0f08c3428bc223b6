"""The experts of a CPU in one call, against float64 and against the same experts one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import GatedActivation, clamped_silu_and_mul
from quire.kernels.linear import PackedWeight, linear, pack, pack_int8
from quire.kernels.packed_experts import PackedExperts, supports

pytestmark = pytest.mark.usefixtures("two_threads")

NUM_EXPERTS = 5
HIDDEN = 40
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SILU = GatedActivation("silu")


def reference_activation(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    if activation.clamp is not None:
        return clamped_silu_and_mul(gate_up, *activation.clamp)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.gate == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


class Case:
    """Random experts, and what they compute in float64."""

    def __init__(
        self,
        dtype: torch.dtype,
        inner: int,
        activation: GatedActivation = SILU,
        *,
        has_bias: bool = False,
        scaled_inputs: bool = False,
    ) -> None:
        self.activation, self.scaled_inputs, self.dtype = activation, scaled_inputs, dtype
        self.up = (torch.randn(NUM_EXPERTS, 2 * inner, HIDDEN) / 6).to(dtype)
        self.down = (torch.randn(NUM_EXPERTS, HIDDEN, inner) / inner**0.5).to(dtype)
        self.up_bias = self.down_bias = None
        if has_bias:
            self.up_bias = torch.randn(NUM_EXPERTS, 2 * inner).to(dtype)
            self.down_bias = torch.randn(NUM_EXPERTS, HIDDEN).to(dtype)
        self.packed = [[pack(each) for each in weights] for weights in (self.up, self.down)]

    def experts(self, own: range = range(NUM_EXPERTS)) -> PackedExperts:
        places = slice(own.start, own.stop)
        biases = [None if bias is None else bias[places] for bias in (self.up_bias, self.down_bias)]
        gate_up, down = (packed[places] for packed in self.packed)
        return PackedExperts(
            gate_up, down, self.activation, biases[0], biases[1], own.start, scaled_inputs=self.scaled_inputs
        )

    def expected(self, x: Tensor, factors: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for token, (chosen, weights) in enumerate(zip(ids.tolist(), factors.double(), strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                inputs = x[token].double() * (weight if self.scaled_inputs else 1)
                gate_up = self.up[expert].double() @ inputs
                if self.up_bias is not None:
                    gate_up += self.up_bias[expert].double()
                result = self.down[expert].double() @ reference_activation(self.activation, gate_up)
                if self.down_bias is not None:
                    result += self.down_bias[expert].double()
                out[token] += result if self.scaled_inputs else result * weight
        return out


def random_step(num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, factors, and different experts for each token, none of them the third."""
    ids = torch.rand(num_tokens, NUM_EXPERTS - 1).argsort(dim=1)[:, :top_k]
    ids = torch.where(ids >= 2, ids + 1, ids)
    return torch.randn(num_tokens, HIDDEN).to(dtype), torch.rand(num_tokens, top_k), ids


ACTIVATIONS = [SILU, GatedActivation("gelu_tanh"), GatedActivation("silu", (1.702, 1.0, 1.0))]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k", "inner"), [(1, 2, 32), (7, 3, 22), (90, 2, 64)])
def test_experts_match_float64(
    num_tokens: int, top_k: int, inner: int, dtype: torch.dtype, activation: GatedActivation
) -> None:
    case = Case(dtype, inner, activation, has_bias=num_tokens == 7)
    step = random_step(num_tokens, top_k, dtype)
    found = case.experts().forward(*step)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), case.expected(*step), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_factors_scale_inputs(dtype: torch.dtype) -> None:
    case = Case(dtype, 32, scaled_inputs=True)
    step = random_step(9, 2, dtype)
    found = case.experts().forward(*step).double()
    torch.testing.assert_close(found, case.expected(*step), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    other = Case(dtype, 32)
    other.packed = case.packed
    assert not torch.allclose(found, other.experts().forward(*step).double(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_do_not_depend_on_other_tokens_or_threads(dtype: torch.dtype) -> None:
    experts = Case(dtype, 64).experts()
    x, factors, ids = random_step(700, 2, dtype)  # more rows than one batch has
    together = experts.forward(x, factors, ids)
    for token in (0, 1, 350, 699):
        own = slice(token, token + 1)
        assert torch.equal(experts.forward(x[own], factors[own], ids[own]), together[own])
    assert torch.equal(experts.forward(x[:6], factors[:6], ids[:6]), together[:6])
    torch.set_num_threads(1)
    assert torch.equal(experts.forward(x, factors, ids), together)


def test_results_of_ranks_with_some_experts_add_up() -> None:
    case = Case(torch.float32, 32, has_bias=True)
    step = random_step(11, 3, torch.float32)
    parts = [case.experts(own).forward(*step) for own in (range(2), range(2, 3), range(3, 5))]
    assert not parts[1].any()  # nobody chose the third expert
    torch.testing.assert_close(sum(parts), case.experts().forward(*step), atol=1e-5, rtol=1e-5)


def test_int8_weights_multiply_as_linear_layers() -> None:
    codes = torch.randint(-127, 128, (NUM_EXPERTS, 64, HIDDEN)).to(torch.int8)
    down = torch.randint(-127, 128, (NUM_EXPERTS, HIDDEN, 32)).to(torch.int8)
    packed: list[list[PackedWeight]] = []
    for stack in (codes, down):
        each = [pack_int8(own, torch.rand(len(own)) / 500) for own in stack]
        packed.append([weight for weight in each if weight is not None])
    x, factors, ids = random_step(13, 1, torch.float32)
    found = PackedExperts(packed[0], packed[1], SILU).forward(x, factors, ids)
    for token, expert in enumerate(ids[:, 0].tolist()):
        inner = SILU(linear(x[token : token + 1], packed[0][expert]))
        expected = linear(inner, packed[1][expert]) * factors[token]
        assert torch.equal(found[token : token + 1], expected)


def test_weights_of_several_formats_are_not_supported() -> None:
    plain = pack(torch.randn(64, HIDDEN))
    coded = pack_int8(torch.ones(64, HIDDEN, dtype=torch.int8), torch.ones(64))
    assert coded is not None
    assert supports([plain, plain])
    assert not supports([plain, coded])
    assert not supports([plain, PackedWeight(torch.randn(64, HIDDEN))])
