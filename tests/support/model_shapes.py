"""Sizes of attention in the models that the registry lists, from the default configurations of transformers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from model_kinds import TEXT_ONLY

from quire.cluster.config.model_config import describe_model
from quire.proto.config import ModelConfig
from quire.proto.model.registry import FAMILIES, NO_KV, kv_layers

# Families that transformers has no model of text alone of. MiMo has the attention of Qwen2, PaddleOCR-VL that of
# ERNIE 4.5, DeepSeek-OCR 2 that of Llama, Step 3.5 heads of 128 as Qwen3 has, Muse Spark 8 heads of 64 per KV head
# as gpt-oss has, and Mistral Large 4 that of DeepSeek V3.2 in layers without positions.
WITHOUT_CONFIGURATION = {
    "DeepseekOcr2ForCausalLM",
    "MiMoForCausalLM",
    "MistralLarge4ForCausalLM",
    "MuseSparkForCausalLM",
    "PaddleOCRVLForCausalLM",
    "Step3p5ForCausalLM",
}
# The default lacks the head dim, which would be 42; all published models have 128.
WITHOUT_HEAD_DIM = {"Glm4MoeForCausalLM"}


class LatentShape(NamedTuple):
    """Sizes of latent attention: see MlaSpec and, of the indexer, IndexerSpec, whose sizes are 0 without one."""

    rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_index_heads: int
    index_head_dim: int


@functools.cache
def registered_models() -> tuple[ModelConfig, ...]:
    """Return a model of each family, with the sizes that transformers' defaults have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | TEXT_ONLY).items():
            name = names if isinstance(names, str) else names[0]
            if name in FAMILIES:
                config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [name]}
                if "text_config" in config:  # of images as well; the text model is listed by itself
                    continue
                Path(folder, "config.json").write_text(json.dumps(config))
                models.append(describe_model(Path(folder), kind))
    assert set(FAMILIES) - {model.architecture for model in models} == WITHOUT_CONFIGURATION
    return tuple(models)


def head_shapes() -> list[tuple[int, int, int]]:
    """Return query heads, KV heads and head dim of layers: each head dim of all models with its largest group."""
    found = {
        (head_dim, model.num_heads // num_kv_heads)
        for model in registered_models()
        if not model.latent_dim and model.architecture not in WITHOUT_HEAD_DIM and model.kv_layers != NO_KV
        for num_kv_heads, head_dim in kv_layers(model) or [(model.num_kv_heads, model.head_dim)]
    }
    return [(2 * group, 2, head_dim) for head_dim, group in dict(sorted(found)).items()]


def latent_shapes() -> list[LatentShape]:
    """Return the sizes of all models with latent attention, each once, with the indexer that one of them has."""
    fields = (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
    )
    found = {
        LatentShape(*(model.hf.get(field) or 0 for field in fields))
        for model in registered_models()
        if model.latent_dim and model.hf.get("kv_lora_rank")
    }
    return list({shape[:4]: shape for shape in sorted(found)}.values())
