"""A norm quantizes the activations of the float8 linear layer after it, without changing tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.kernels import norm, quantized_linear
from quire.worker.models.layers import ColumnParallelLinear
from quire.worker.models.llama import decoder_layer
from quire.worker.weights import linear_weight


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_norm_quantizes_for_float8_linear_layer(
    kind: str, make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PyTorch references stand in for tensor cores; an MoE layer quantizes its own input."""
    monkeypatch.setattr(
        linear_weight,
        "supports_float8_linear",
        lambda weight: weight.codes.dtype == quantized_linear.FLOAT8 and weight.is_per_output,
    )
    num_calls = 0
    rounding_norm: Callable[..., Any] = norm.add_rms_norm_float8

    def count(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return rounding_norm(*arguments)

    monkeypatch.setattr(decoder_layer, "add_rms_norm_float8", count)
    folder = make_model(kind, seed=3)

    def generate() -> list[int]:
        (generated,) = make_engine(folder, 1, num_blocks=16, quantization="fp8").greedy([[7, 21, 300, 45]], 6)
        tokens: list[int] = generated
        return tokens

    tokens = generate()
    # All norms of the three layers but the first follow an addition; norms before an MoE layer do not quantize.
    assert num_calls == 6 * (5 if kind == "llama" else 2)
    monkeypatch.setattr(ColumnParallelLinear, "accepts_float8", False)
    assert generate() == tokens
