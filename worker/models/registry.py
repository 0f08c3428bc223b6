"""Which models quire can serve. Imports no torch, so that a wish can be refused before anything heavy starts."""

from __future__ import annotations

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from .spec import DecoderSpec, Family, read_spec

FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


def check_supported(model: ModelConfig, tensor_parallel_size: int) -> DecoderSpec:
    """The model as its DecoderSpec, when it can be served by that many ranks.

    Raises:
        ConfigError: unknown architecture, unsupported feature, or a size that the ranks cannot share evenly.
    """
    family = FAMILIES.get(model.architecture)
    if family is None:
        raise ConfigError(
            f"{model.name}: architecture {model.architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    spec = read_spec(model, family)
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, must be at least 1")
    for what, count in (
        ("attention heads", spec.num_heads),
        ("KV heads", spec.num_kv_heads),
        ("intermediate_size", spec.intermediate_size),
    ):
        if count % tensor_parallel_size:
            raise ConfigError(
                f"{model.name}: tensor_parallel_size {tensor_parallel_size} does not divide its {what}, {count}"
            )
    return spec
