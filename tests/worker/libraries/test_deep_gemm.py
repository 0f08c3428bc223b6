"""Linear layers by DeepGEMM, through a package with its recorded signature that multiplies by definition."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_deep_gemm import FakeDeepGemm, install

from quire.kernels.quantized_linear import FLOAT8, QuantizedWeight, quantize
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.worker.libraries.deep_gemm import BlockFloat8Weight, DeepGemm
from quire.worker.libraries.linear_backend import OWN_LINEAR, choose_linear, convert_linear, log_linear
from quire.worker.weights.linear_weight import QuantizedLinearWeight, StackedWeight

GPU = torch.device("cuda", 0)


def make_weight(num_outputs: int, num_inputs: int, first: int = 0) -> QuantizedLinearWeight:
    """Return a weight whose scales are per block, of a slice that begins with an output."""
    codes = torch.randn(num_outputs, num_inputs).clamp(-3, 3).to(FLOAT8)
    of_blocks = torch.rand(num_inputs // 128, -(-(first + num_outputs) // 128)) + 0.5
    scales = of_blocks.repeat_interleave(128, dim=1)[:, first : first + num_outputs].contiguous()
    return QuantizedLinearWeight(QuantizedWeight(codes, scales))


@pytest.mark.parametrize(("num_tokens", "num_outputs"), [(1, 128), (7, 200), (64, 576), (0, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_equals_that_of_own_kernels(num_tokens: int, num_outputs: int, has_bias: bool) -> None:
    fake = FakeDeepGemm()
    weight = make_weight(num_outputs, 384)
    converted = DeepGemm(fake).convert(weight)
    assert isinstance(converted, BlockFloat8Weight)
    x = torch.randn(num_tokens, 384).bfloat16()
    bias = torch.randn(num_outputs).bfloat16() if has_bias else None
    found, expected = converted.multiply(x, bias), weight.multiply(x, bias)
    # Tokens in float8 have 4 significant bits; errors of 384 terms cancel out.
    spread = float(expected.float().std()) if num_tokens else 1.0
    torch.testing.assert_close(found.float(), expected.float(), atol=0.15 * spread, rtol=0.02)
    assert fake.num_calls == 1


@pytest.mark.parametrize(
    "weight",
    [
        QuantizedLinearWeight(quantize(torch.randn(128, 256), FLOAT8)),
        QuantizedLinearWeight(quantize(torch.randn(128, 256), torch.int8)),
        make_weight(128, 256, first=64),
        make_weight(132, 256),
    ],
    ids=["per-output", "int8", "inside-a-block", "outputs"],
)
def test_others_keep_their_form(weight: QuantizedLinearWeight) -> None:
    backend = DeepGemm(FakeDeepGemm())
    assert backend.convert(weight) is weight
    assert (backend.num_converted, backend.num_others) == (0, 1)


def test_parts_of_a_weight_are_converted_each() -> None:
    backend = DeepGemm(FakeDeepGemm())
    found = convert_linear(backend, StackedWeight((make_weight(128, 128), make_weight(128, 128, first=64))))
    assert isinstance(found, StackedWeight)
    assert [type(part) for part in found.weights] == [BlockFloat8Weight, QuantizedLinearWeight]


@pytest.fixture
def config(make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    made = install(monkeypatch, DeepGemm, engine_config(make_model("llama"), device="cuda", dtype="bfloat16"))
    return replace(made, parallel=replace(made.parallel, linear_backend="deep_gemm"))


def test_named_library_is_chosen_and_logged(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    backend = choose_linear(config, GPU)
    assert isinstance(backend, DeepGemm)
    backend.convert(make_weight(128, 128))
    with caplog.at_level(logging.INFO, logger="quire"):
        log_linear(backend)
    assert "DeepGEMM multiplies by 1 weights, Triton kernels and torch by 0" in caplog.text


def test_library_that_does_not_fit_is_refused_by_name_and_passed_by_auto(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(config, model=replace(config.model, hf={}))
    with pytest.raises(ConfigError, match="DeepGEMM cannot be used: the model has no float8 weights"):
        choose_linear(plain, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(
        ConfigError, match="linear_backend is 'deep_gemm', but DeepGEMM cannot be used: the GPU"
    ):
        choose_linear(config, GPU)
    automatic = replace(config, parallel=replace(config.parallel, linear_backend="auto"))
    assert choose_linear(automatic, GPU) is OWN_LINEAR
