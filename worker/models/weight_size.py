"""Size of a model's weights, counted on PyTorch's meta device from the configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ...proto.config import ModelConfig
from ...proto.errors import ModelLoadError, first_line
from ...proto.model.layer_formats import FindFormat, LayerFormat, format_finder
from ...proto.model.quantization import read_quantization
from ...proto.model.registry import FAMILIES
from ...proto.model.transformers_spec import import_transformers

if TYPE_CHECKING:
    from torch import Tensor, nn

# Table of n-grams, which checkpoints in float8 have in float8, too, with one scale.
_NGRAMS = ".ngram_embedding.weight"
# The expansion of latents to keys and values is dequantized while it is loaded.
_EXPANSION = "kv_b_proj"
_FULL_PRECISION = (
    *("embed", "lm_head", "norm", "bias", "wte", "wpe", "router", "gate.weight", "weights_proj"),
    *("conv1d", "conv_1d", ".conv.conv.", "A_log", "rg_lru"),
    *("x_proj_weight", "dt_proj_weight", "mamba.D", "_hc.", "hc_head.", "conv_qk", "mlp.gate.", "kpool"),
    "block_inject_weight",
    _EXPANSION,
)


@dataclass(slots=True)
class WeightSize:
    """Size of a model's weights once they are loaded on GPUs.

    Attributes:
        num_parameters: elements in them.
        num_bytes: of all ranks together.
        routed_bytes: of these, in the experts that a router chooses from.
        attention_bytes: of these, in the linear layers of attention.
        shared_expert_bytes: of these, in the experts that every token passes.
        dense_bytes: of these, in the networks of layers without experts.
    """

    num_parameters: int = 0
    num_bytes: int = 0
    routed_bytes: int = 0
    attention_bytes: int = 0
    shared_expert_bytes: int = 0
    dense_bytes: int = 0

    def rank_bytes(
        self,
        num_ranks: int,
        num_experts: int = 0,
        *,
        attention_ranks: int | None = None,
        sends_tokens: bool = False,
    ) -> int:
        """Return the bytes of the rank with the most.

        Args:
            num_experts: of a layer, if the ranks hold whole experts; otherwise 0.
            attention_ranks: ranks that attend for the same sequences, with data-parallel attention; None for all.
            sends_tokens: tokens travel to their experts: each rank holds what its own tokens pass besides.
        """
        routed = self.routed_bytes if num_experts else 0
        share = -(-num_experts // num_ranks) / num_experts if num_experts else 0.0
        whole = self.shared_expert_bytes if sends_tokens else 0
        of_group = 0
        if attention_ranks is not None:
            of_group = self.attention_bytes + (self.dense_bytes if sends_tokens else 0)
        divided = (self.num_bytes - routed - whole - of_group) / num_ranks
        return math.ceil(divided + of_group / (attention_ranks or num_ranks) + routed * share + whole)


def make_meta_model(model: ModelConfig) -> nn.Module:
    """Return transformers' model without its weights.

    Raises:
        ModelLoadError: transformers cannot make the model of this configuration.
    """
    import torch

    transformers = import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields: dict[str, Any] = {
        name: value for name, value in model.hf.items() if name != "quantization_config"
    }
    try:
        if fields.get("zero_expert_num"):  # which have matrices there that nobody stores
            fields["zero_expert_num"] = 0
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"):
            if model.hf["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
                module = transformers.AutoModelForCausalLM.from_config(config)
            elif hasattr(transformers, model.architecture):  # within others only
                module = getattr(transformers, model.architecture)(config)
            else:
                return _add_head(transformers.AutoModel.from_config(config), config)
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelLoadError(f"{model.name}: {first_line(error)}") from error
    module.tie_weights()
    return cast("nn.Module", module)


def _add_head(text_model: nn.Module, config: Any) -> nn.Module:
    """Return a text model with a head, which transformers has within others only, under the names of the others."""
    from torch import nn

    whole, head = nn.Module(), nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = text_model.get_parameter("embed_tokens.weight")
    whole.add_module("model", text_model)
    whole.add_module("lm_head", head)
    return whole


def measure_weights(model: ModelConfig, module: nn.Module, dtype_bytes: int) -> WeightSize:
    """Count a model's weights; tied ones once.

    Args:
        module: as `make_meta_model` returns it.
        dtype_bytes: bytes of an element that is not quantized.

    Raises:
        ConfigError: the quantization is not supported, or cannot be read.
    """
    quantization = read_quantization(model)
    parameters = dict(module.named_parameters())  # shared parameters come once
    find_format: FindFormat = lambda layer: None  # noqa: E731
    if quantization is not None:
        layers = [
            _layer(name) for name, parameter in parameters.items() if _keeps_codes(name, parameter, model)
        ]
        find_format = format_finder(quantization, model, layers)
    size = WeightSize()
    for name, parameter in parameters.items():
        layer_format = find_format(_layer(name)) if _keeps_codes(name, parameter, model) else None
        is_float8 = name.endswith(_NGRAMS) and quantization is not None and quantization.method == "fp8"
        num_bytes = (
            _num_bytes(layer_format, tuple(parameter.shape), model)
            if layer_format
            else parameter.numel() * (1 if is_float8 else dtype_bytes)
        )
        is_linear = _is_linear(name, parameter)
        size.num_parameters += parameter.numel()
        size.num_bytes += num_bytes
        size.routed_bytes += num_bytes if is_linear and ".experts." in name else 0
        is_expansion = _EXPANSION in name and "norm" not in name
        size.attention_bytes += num_bytes if (is_linear and ".self_attn." in name) or is_expansion else 0
        if is_linear and ".shared_expert" in name:
            size.shared_expert_bytes += num_bytes
        elif is_linear and ".mlp." in name and ".experts." not in name:
            size.dense_bytes += num_bytes
    return size


def _layer(parameter_name: str) -> str:
    return parameter_name.removesuffix(".weight")


def _is_linear(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is the matrix of a linear layer that checkpoints quantize, or a stack of them."""
    return parameter.dim() > 1 and not any(part in name for part in _FULL_PRECISION)


def _keeps_codes(name: str, parameter: Tensor, model: ModelConfig) -> bool:
    """Return whether a parameter stays quantized if its layer is.

    transformers multiplies stacks of experts itself, so they are dequantized while they are loaded.
    """
    return _is_linear(name, parameter) and (parameter.dim() == 2 or model.architecture in FAMILIES)


def _num_bytes(layer_format: LayerFormat, shape: tuple[int, ...], model: ModelConfig) -> int:
    """Return the bytes of a quantized matrix, or of the matrices of all experts."""
    *count, num_outputs, num_inputs = shape
    if count and _has_transposed_stacks(model):
        num_outputs, num_inputs = num_inputs, num_outputs
    return math.prod(count) * layer_format.num_bytes(num_outputs, num_inputs)


def _has_transposed_stacks(model: ModelConfig) -> bool:
    """Return whether transformers' stacks of experts have matrices of [inputs, outputs]."""
    experts = FAMILIES[model.architecture].experts
    return experts is not None and experts.routing in ("gpt_oss", "llama4")
