"""Size of a model's weights, counted on PyTorch's meta device from the configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ...proto.config import ModelConfig
from ...proto.errors import ModelLoadError, first_line
from ..weights.quantization import read_quantization, weight_groups

if TYPE_CHECKING:
    from torch import nn

# Of 16-bit scales, and of packed zero points, per group of numbers.
_BYTES_PER_GROUP = 2.5
# The expansion of latents to keys and values is dequantized while it is loaded.
_EXPANSION = "kv_b_proj"
_FULL_PRECISION = ("embed", "lm_head", "norm", "bias", "wte", "wpe", "router", "gate.weight", _EXPANSION)


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Numbers in a model's weights.

    Attributes:
        num_linear: in the linear layers and experts, which a quantized model stores in fewer bits.
        num_routed: of these, in the experts that a router chooses from.
        num_attention: of these, in attention.
        num_other: in embeddings, output layer, norms, biases, routers and expansions of latents.
        num_expansion: of these, in expansions of latents.
        linear_bytes: mean bytes of a number of the linear layers, scales included.
    """

    num_linear: int
    num_other: int
    linear_bytes: float
    num_routed: int = 0
    num_attention: int = 0
    num_expansion: int = 0

    @property
    def num_parameters(self) -> int:
        return self.num_linear + self.num_other

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of all ranks together. `dtype_bytes`: bytes of a number that is not quantized."""
        return round(self.num_linear * self.linear_bytes + self.num_other * dtype_bytes)

    def rank_bytes(
        self, dtype_bytes: int, num_ranks: int, num_experts: int = 0, *, has_whole_attention: bool = False
    ) -> int:
        """Return the bytes of the rank with the most.

        Args:
            num_experts: of a layer, if the ranks hold whole experts; otherwise 0.
            has_whole_attention: each rank holds the attention of all heads.
        """
        routed = self.num_routed * self.linear_bytes if num_experts else 0.0
        share = -(-num_experts // num_ranks) / num_experts if num_experts else 0.0
        attention = 0.0
        if has_whole_attention:
            attention = self.num_attention * self.linear_bytes + self.num_expansion * dtype_bytes
        shared = self.num_bytes(dtype_bytes) - routed - attention
        return math.ceil(shared / num_ranks + routed * share + attention)


def make_meta_model(model: ModelConfig) -> nn.Module:
    """Return transformers' model without its weights.

    Raises:
        ModelLoadError: transformers cannot make the model of this configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        name: value for name, value in model.hf.items() if name != "quantization_config"
    }
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelLoadError(f"{model.name}: {first_line(error)}") from error
    module.tie_weights()
    return cast("nn.Module", module)


def measure_weights(model: ModelConfig, module: nn.Module, dtype_bytes: int) -> WeightSize:
    """Count a model's weights; tied ones once.

    Args:
        module: as `make_meta_model` returns it.

    Raises:
        ConfigError: the quantization is not supported.
    """
    quantization = read_quantization(model)
    counts = {True: 0, False: 0}
    num_routed = num_attention = num_expansion = 0
    for name, parameter in module.named_parameters():  # shared parameters come once
        is_linear = not any(part in name for part in _FULL_PRECISION)
        counts[is_linear] += parameter.numel()
        num_routed += parameter.numel() if is_linear and ".experts." in name else 0
        num_attention += parameter.numel() if is_linear and ".self_attn." in name else 0
        num_expansion += parameter.numel() if _EXPANSION in name else 0
    linear_bytes = float(dtype_bytes)
    if quantization is not None:
        bits = _compressed_bits(model) if quantization.method == "compressed" else quantization.bits
        linear_bytes = bits / 8 + _BYTES_PER_GROUP / (quantization.group_len or 128)
    return WeightSize(counts[True], counts[False], linear_bytes, num_routed, num_attention, num_expansion)


def _compressed_bits(model: ModelConfig) -> int:
    groups = weight_groups(model.hf["quantization_config"])
    return max((int(group["weights"]["num_bits"]) for group in groups), default=16)
