"""Experts by DeepGEMM, through a package with its recorded signatures that multiplies by definition."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_deep_gemm import FakeDeepGemm, install
from torch import Tensor

from quire.kernels.activation import GatedActivation
from quire.kernels.quantized_linear import FLOAT8, QuantizedWeight, quantize
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.worker.libraries import deep_gemm
from quire.worker.libraries.deep_gemm import DeepGemmExperts
from quire.worker.libraries.experts_backend import OWN_EXPERTS, choose_experts, log_experts
from quire.worker.models.moe.expert_layers import ExpertLayers
from quire.worker.models.moe.moe import GroupedExperts, group_experts
from quire.worker.weights.linear_weight import LinearWeight, QuantizedLinearWeight

GPU = torch.device("cuda", 0)
HIDDEN, INNER, COUNT, TOP_K = 256, 128, 6, 2


def make_weight(num_outputs: int, num_inputs: int) -> LinearWeight:
    """Return a weight with a scale per block."""
    codes = (torch.randn(num_outputs, num_inputs).clamp(-3, 3) / 16).to(FLOAT8)
    of_blocks = torch.rand(num_inputs // 128, num_outputs // 128) + 0.5
    return QuantizedLinearWeight(QuantizedWeight(codes, of_blocks.repeat_interleave(128, dim=1)))


def make_layers(first: int = 0, count: int = COUNT, **more: Any) -> ExpertLayers:
    return ExpertLayers(
        [make_weight(2 * INNER, HIDDEN) for _ in range(count)],
        [make_weight(HIDDEN, INNER) for _ in range(count)],
        GatedActivation("silu"),
        COUNT,
        first,
        **more,
    )


def group(layers: ExpertLayers, backend: DeepGemmExperts) -> GroupedExperts:
    grouped = group_experts(layers, None, backend)
    assert grouped is not None
    return grouped


def make_step(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, factors and experts; no token chooses expert 3."""
    ids = torch.stack([torch.randperm(COUNT - 1)[:TOP_K] for _ in range(num_tokens)])
    return torch.randn(num_tokens, HIDDEN).bfloat16(), torch.rand(num_tokens, TOP_K), ids + (ids >= 3)


@pytest.mark.parametrize("num_tokens", [96, 150, 400])
@pytest.mark.parametrize(("first", "count"), [(0, COUNT), (2, 3)], ids=["all", "some"])
def test_sums_equal_those_of_own_kernels(num_tokens: int, first: int, count: int) -> None:
    fake = FakeDeepGemm()
    layers, step = make_layers(first, count), make_step(num_tokens)
    found = group(layers, DeepGemmExperts(fake)).forward(*step)
    expected = layers.forward(*step)
    assert fake.num_calls == 2
    assert not found.isnan().any()
    # Tokens and inner activations in float8 have 4 significant bits each; a wrong expert's result differs by 1.4.
    errors = (found - expected).float().norm(dim=1)
    assert (errors <= 0.15 * expected.float().norm(dim=1)).all()


def test_few_choices_are_computed_by_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDeepGemm()
    grouped = group(make_layers(), DeepGemmExperts(fake))
    grouped.forward(*make_step(deep_gemm.MIN_CHOICES * COUNT // TOP_K - 1))
    assert fake.num_calls == 0
    grouped.forward(*make_step(deep_gemm.MIN_CHOICES * COUNT // TOP_K))
    assert fake.num_calls == 2


def test_experts_of_which_no_token_is_this_ranks_add_nothing() -> None:
    layers = make_layers(3, 1)
    x, factors, ids = make_step(64)
    assert not group(layers, DeepGemmExperts(FakeDeepGemm())).forward(x, factors, ids).any()


@pytest.mark.parametrize("kind", ["bias", "scaled_inputs", "per-output"])
def test_others_keep_their_form(kind: str) -> None:
    if kind == "per-output":
        gate_up, down = (
            [QuantizedLinearWeight(quantize(torch.randn(shape), FLOAT8)) for _ in range(COUNT)]
            for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        )
        layers = ExpertLayers(gate_up, down, GatedActivation("silu"), COUNT)
    elif kind == "bias":
        biases = torch.zeros(COUNT, 2 * INNER).bfloat16(), torch.zeros(COUNT, HIDDEN).bfloat16()
        layers = make_layers(gate_up_bias=biases[0], down_bias=biases[1])
    else:
        layers = make_layers(scaled_inputs=True)
    backend = DeepGemmExperts(FakeDeepGemm())
    assert group(layers, backend).library is None
    assert backend.num_converted == 0


@pytest.fixture
def config(make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    made = install(
        monkeypatch, DeepGemmExperts, engine_config(make_model("llama"), device="cuda", dtype="bfloat16")
    )
    return replace(made, parallel=replace(made.parallel, moe_backend="deep_gemm"))


def test_named_library_is_chosen_logged_and_refused_where_it_does_not_fit(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    backend = choose_experts(config, GPU)
    assert isinstance(backend, DeepGemmExperts)
    group(make_layers(), backend)
    with caplog.at_level(logging.INFO, logger="quire"):
        log_experts(backend)
    assert "experts: DeepGEMM for steps with 32 choices per expert and more in 1 layers" in caplog.text
    plain = replace(config, model=replace(config.model, hf={}))
    with pytest.raises(
        ConfigError, match="moe_backend is 'deep_gemm', but DeepGEMM cannot be used: the model"
    ):
        choose_experts(plain, GPU)
    automatic = replace(plain, parallel=replace(plain.parallel, moe_backend="auto"))
    assert choose_experts(automatic, GPU) is OWN_EXPERTS
