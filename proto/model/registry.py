"""Registry of supported models. Imports no torch, so that the CLI can check a model before it loads anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError, in_one_line
from . import transformers_spec
from .attention import AttentionSpec, QkNorm
from .compressed import SharedKvSpec, check_shared_kv
from .config_fields import check_numbers
from .entries import HasEntries, num_pages
from .experts import ExpertFields, Experts
from .families import (
    deepseek_v4,
    gated_delta_nets,
    gemma,
    glm5_next,
    gptj,
    lfm,
    linear_attention,
    llama4,
    longcat,
    mamba,
    mimo,
    minimax_m3,
    mistral_large,
    muse_spark,
    qwen4,
    step,
    zamba,
    zaya,
)
from .families.latent_attention import AXK_1, AXK_2, DEEPSEEK, DEEPSEEK_EXPERTS, HY_4, MINICPM_3, MISTRAL_4
from .family import Family, FieldNames
from .mla import MlaSpec
from .parallel_split import WHOLE_MODEL, Stage
from .quantization import read_quantization
from .read_spec import read_spec
from .spec import DecoderSpec, LayerSpec, Norms, attention_of
from .state import KeepsState, StateLayers, layers_with_state
from .streams import GatedStreams, Streams
from .transformers_spec import TransformersSpec, read_transformers_spec

# Norms after attention and feed-forward network only.
_AFTER_ONLY = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GLM = Family(fields=FieldNames(output_bias=None), fused_gate_up=True, interleaved_rope=True)
_COHERE = Family(
    fields=FieldNames(eps="layer_norm_eps"),
    norms=Norms(before_mlp=None, kind="layer_without_bias"),
    interleaved_rope=True,
    parallel_residual=True,
)
_ERNIE = Family(
    fields=FieldNames(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias"), interleaved_rope=True
)
_LOCAL_EXPERTS = ExpertFields("num_local_experts", "intermediate_size", normalized=True)
_HUNYUAN = Family(qk_norm=QkNorm("rotated_head", ("query_layernorm", "key_layernorm")))

# Architectures that quire defines itself; TransformersSpec covers others.
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, all_layers_windowed=True),
    "MinistralForCausalLM": Family(qkv_bias=False),
    "Ministral3ForCausalLM": Family(qkv_bias=False, all_layers_windowed=True),
    "MixtralForCausalLM": Family(qkv_bias=False, all_layers_windowed=True, experts=_LOCAL_EXPERTS),
    "PhimoeForCausalLM": Family(
        fields=FieldNames(head_bias="lm_head_bias"),
        norms=Norms(kind="layer"),
        all_layers_windowed=True,
        experts=replace(_LOCAL_EXPERTS, normalized=False, routing="sparsemixer"),
    ),
    "GptOssForCausalLM": Family(
        has_sinks=True, experts=replace(_LOCAL_EXPERTS, normalized=False, routing="gpt_oss")
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "MiMoForCausalLM": Family(qkv_bias=True),
    "MiMoV2FlashForCausalLM": mimo.V2_FLASH,
    "Step3p5ForCausalLM": step.STEP_3,
    "MuseSparkForCausalLM": muse_spark.MUSE_SPARK,
    "Qwen3ForCausalLM": Family(qk_norm=QkNorm("head")),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=QkNorm("head"),
        all_layers_windowed=True,
        experts=ExpertFields("num_experts", "moe_intermediate_size"),
    ),
    "GemmaForCausalLM": gemma.GEMMA,
    "Gemma2ForCausalLM": gemma.GEMMA_2,
    "Gemma3ForCausalLM": gemma.GEMMA_3,
    "Gemma3nForCausalLM": gemma.GEMMA_3N,
    "Gemma4ForCausalLM": gemma.GEMMA_4,
    "Gemma4UnifiedForCausalLM": gemma.GEMMA_4,
    "RecurrentGemmaForCausalLM": gemma.RECURRENT_GEMMA,
    "Phi3ForCausalLM": Family(qkv_bias=False, fused_qkv=True, fused_gate_up=True, all_layers_windowed=True),
    "Olmo2ForCausalLM": Family(qk_norm=QkNorm("projection"), norms=_AFTER_ONLY),
    "Olmo3ForCausalLM": Family(qk_norm=QkNorm("projection"), norms=_AFTER_ONLY),
    "GraniteForCausalLM": Family(),
    "SmolLM3ForCausalLM": Family(),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        norms=Norms(
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        fields=FieldNames(output_bias=None, qk_norm="use_qk_norm"),
        qk_norm=QkNorm("head"),
        experts=DEEPSEEK_EXPERTS,
    ),
    "MiniMaxM2ForCausalLM": Family(
        qkv_bias=False,
        qk_norm=QkNorm("projection"),
        experts=replace(_LOCAL_EXPERTS, routing="corrected_sigmoid"),
    ),
    "MiniMaxM3VLForCausalLM": minimax_m3.M3,
    "Exaone4ForCausalLM": Family(
        qkv_bias=False, qk_norm=QkNorm("head"), norms=_AFTER_ONLY, full_layers_unrotated=True
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "PaddleOCRVLForCausalLM": replace(_ERNIE, interleaved_rope=False),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        fields=replace(_ERNIE.fields, head_bias="use_bias"),
        experts=ExpertFields(
            "moe_num_experts",
            "moe_intermediate_size",
            "moe_k",
            shared_count="moe_num_shared_experts",
            normalized=True,
            routing="corrected_softmax",
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        fields=FieldNames(qkv_bias="qkv_bias", output_bias=None),
        experts=ExpertFields(
            "num_experts",
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            routing="gated_sharing",
        ),
    ),
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        experts=ExpertFields(
            "num_experts", "intermediate_size", "moe_topk", shared_size="intermediate_size", normalized=True
        ),
    ),
    "OlmoeForCausalLM": Family(
        qk_norm=QkNorm("projection"), experts=ExpertFields("num_experts", "intermediate_size")
    ),
    "SeedOssForCausalLM": Family(fields=FieldNames(output_bias="attention_out_bias")),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "CohereForCausalLM": replace(
        _COHERE, fields=replace(_COHERE.fields, qk_norm="use_qk_norm"), qk_norm=QkNorm("layer")
    ),
    "Cohere2ForCausalLM": replace(_COHERE, full_layers_unrotated=True),
    "NemotronForCausalLM": Family(
        fields=FieldNames(eps="norm_eps"),
        norms=Norms(kind="layer", offset=1.0),
        mlp_names=("up_proj", "down_proj"),
    ),
    "Starcoder2ForCausalLM": Family(
        fields=FieldNames("norm_epsilon", qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias"),
        norms=Norms(kind="layer"),
        mlp_names=("c_fc", "c_proj"),
        all_layers_windowed=True,
    ),
    "StableLmForCausalLM": Family(
        fields=FieldNames(
            "layer_norm_eps", qkv_bias="use_qkv_bias", output_bias=None, qk_norm="qk_layernorm"
        ),
        norms=Norms(kind="layer"),
        qk_norm=QkNorm("layer", ("q_layernorm.norms.{}", "k_layernorm.norms.{}")),
    ),
    "GPTJForCausalLM": gptj.FAMILY,
    "Llama4ForCausalLM": llama4.FAMILY,
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK, experts=replace(DEEPSEEK_EXPERTS, normalized=False, routing="group_limited")
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "YoutuForCausalLM": replace(DEEPSEEK, experts=None),
    "DeepseekOcr2ForCausalLM": Family(
        experts=replace(DEEPSEEK_EXPERTS, normalized=False, routing="group_limited")
    ),
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": replace(DEEPSEEK, indexer_interleaved=False),
    "GlmMoeDsaForCausalLM": replace(DEEPSEEK, indexer_interleaved=True),
    "Glm5NextForCausalLM": glm5_next.GLM_5_NEXT,
    "DeepseekV4ForCausalLM": deepseek_v4.V4,
    "LongcatFlashForCausalLM": longcat.FLASH,
    "Mistral4ForCausalLM": MISTRAL_4,
    "MistralLarge4ForCausalLM": mistral_large.LARGE_4,
    "MiniCPM3ForCausalLM": MINICPM_3,
    "HYV4ForCausalLM": HY_4,
    "AXK1ForCausalLM": AXK_1,
    "AXK2ForCausalLM": AXK_2,
    "Qwen3NextForCausalLM": gated_delta_nets.QWEN_3_NEXT,
    "Qwen3_5ForCausalLM": gated_delta_nets.QWEN_3_5,
    "Qwen3_5MoeForCausalLM": gated_delta_nets.QWEN_3_5_MOE,
    "Qwen4ExpForCausalLM": qwen4.QWEN_4,
    "OlmoHybridForCausalLM": gated_delta_nets.OLMO_HYBRID,
    "KimiLinearForCausalLM": linear_attention.KIMI_LINEAR,
    "BailingHybridForCausalLM": linear_attention.BAILING_HYBRID,
    "MiniMaxForCausalLM": linear_attention.MINIMAX,
    "MambaForCausalLM": mamba.MAMBA,
    "FalconMambaForCausalLM": mamba.MAMBA,
    "Mamba2ForCausalLM": mamba.MAMBA_2,
    "JambaForCausalLM": mamba.JAMBA,
    "ZambaForCausalLM": zamba.ZAMBA,
    "Zamba2ForCausalLM": zamba.ZAMBA_2,
    "ZayaForCausalLM": zaya.ZAYA,
    "BambaForCausalLM": mamba.BAMBA,
    "GraniteMoeHybridForCausalLM": mamba.GRANITE_HYBRID,
    "FalconH1ForCausalLM": mamba.FALCON_H1,
    "NemotronHForCausalLM": mamba.NEMOTRON_H,
    "Lfm2ForCausalLM": lfm.LFM_2,
    "Lfm2MoeForCausalLM": lfm.LFM_2_MOE,
    "Lfm3ForCausalLM": lfm.LFM_3,
}


# Model type of a text model that others have in turn |-> its architecture.
_CHOSEN_TEXT = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_GLM_TEXT = {
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
}
# Architecture that also reads images or sound |-> model type of its text model |-> architecture of that, which is
# served alone.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Glm4vForConditionalGeneration": _GLM_TEXT,
    "Glm4vMoeForConditionalGeneration": _GLM_TEXT,
    "Glm46VForConditionalGeneration": _GLM_TEXT,
    "GlmOcrForConditionalGeneration": _GLM_TEXT,
    "LlavaForConditionalGeneration": _CHOSEN_TEXT,
    "LlavaNextForConditionalGeneration": _CHOSEN_TEXT,
    "LlavaOnevisionForConditionalGeneration": _CHOSEN_TEXT,
    "InternVLForConditionalGeneration": _CHOSEN_TEXT,
    "Idefics3ForConditionalGeneration": _CHOSEN_TEXT,
    "SmolVLMForConditionalGeneration": _CHOSEN_TEXT,
    "DeepseekOcr2ForConditionalGeneration": {"deepseek_ocr2_text": "DeepseekOcr2ForCausalLM"},
    "Step3p7ForConditionalGeneration": {"step3p5": "Step3p5ForCausalLM"},
    "MuseSparkForConditionalGeneration": {"muse_spark_text": "MuseSparkForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "KimiK25ForConditionalGeneration": {"deepseek_v3": "DeepseekV3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "PaliGemmaForConditionalGeneration": {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
    "PaddleOCRVLForConditionalGeneration": {"paddleocr_vl_text": "PaddleOCRVLForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen4ExpForConditionalGeneration": {"qwen4_exp_text": "Qwen4ExpForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "MiniMaxM3SparseForConditionalGeneration": {"minimax_m3_vl_text": "MiniMaxM3VLForCausalLM"},
    "Glm5NextForConditionalGeneration": {"glm5_next_text": "Glm5NextForCausalLM"},
    "MistralLarge4ForConditionalGeneration": {"mistral_large4_text": "MistralLarge4ForCausalLM"},
}
# Model type of a text model within another |-> fields of its configuration as the same model alone has them.
TEXT_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "glm4v_text": {"model_type": "glm4", "attention_bias": True},
    "glm_ocr_text": {"model_type": "glm4", "attention_bias": False},
    "glm4v_moe_text": {"model_type": "glm4_moe"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
# Architectures of ModelConfig.sees_whole_prompt.
SEE_WHOLE_PROMPTS = frozenset({"PaliGemmaForConditionalGeneration"})
# ModelConfig.kv_layers of a model without keys and values, whose blocks then count tokens and take nearly no memory.
NO_KV = ((1, 1),)
# Architectures without attention, whose configurations state no heads.
WITHOUT_ATTENTION = ("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM")
# Errors of code that reads a configuration, whose values may have any type.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# Another name of an architecture, in published checkpoints or those of transformers |-> that in FAMILIES.
ARCHITECTURE_ALIASES = {
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
}


def check_architecture(name: str, architecture: str, hf: Mapping[str, Any]) -> None:
    """Check an architecture, regardless of sizes. Raises ConfigError if it is not supported."""
    if architecture not in FAMILIES:
        transformers_spec.check_architecture(name, architecture, hf)


def latent_dim(architecture: str, hf: Mapping[str, Any]) -> int:
    """Return the number of elements that a token is cached as if all heads attend to the same, otherwise 0.

    Raises:
        ConfigError: a size is not a whole number.
    """
    family = FAMILIES.get(architecture)
    if family is None or not (family.is_latent or family.cached_field):
        return 0
    parts = [family.cached_field] if family.cached_field else ["kv_lora_rank", "qk_rope_head_dim"]
    if family.indexer_interleaved is not None:
        parts.append("index_head_dim")
    for part in parts:
        if not isinstance(hf.get(part) or 0, int):
            raise ConfigError(f"{part} is {hf[part]!r:.100}, must be a whole number")
    num_more = 0 if family.count_index_keys is None else family.count_index_keys(dict(hf)) - 1
    return sum(hf.get(part) or 0 for part in parts) + num_more * (hf.get("index_head_dim") or 0)


def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return ModelConfig.layer_windows of a model.

    A token attends to fewer tokens than a chunk has, so a layer with chunks has a window of their length.
    """
    family = FAMILIES.get(model.architecture)
    if family is None:
        return transformers_spec.layer_windows(model)
    windows = [mixer.window or mixer.chunk for mixer in _own_attention(model, family)]
    layers = _read_layers(model, family)
    windows += [layer.mixer.window for layer in layers if isinstance(layer.mixer, SharedKvSpec)]
    windows += [0] * num_pages([layer.mixer for layer in layers])
    return tuple(windows) if any(windows) else ()


def kv_layers(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return KV heads and head dim of each layer with keys and values of its own, as ModelConfig has them."""
    family = FAMILIES.get(model.architecture)
    if family is None:
        return ()
    layers = _read_layers(model, family)
    if layers and not any(layer.has_own_kv for layer in layers):
        return NO_KV
    if model.latent_dim:
        count = sum(layer.has_own_kv for layer in layers) + num_pages([layer.mixer for layer in layers])
        return () if count == model.num_layers else ((1, model.latent_dim),) * count
    sizes = [size for own in _own_attention(model, family) for size in own.cached]
    return () if sizes == [(model.num_kv_heads, model.head_dim)] * model.num_layers else tuple(sizes)


def kv_range(model: ModelConfig, stage: Stage) -> range:
    """Return which of the layers with keys and values of their own a stage has, at least one.

    A stage whose layers all keep states gets that of a neighbor, so that it has block tables as the others have.
    """
    family = FAMILIES.get(model.architecture)
    if stage.count == 1 or family is None:
        return range(model.num_kv_layers)
    layers = _read_layers(model, family)
    first = min(sum(layer.num_cached for layer in layers[: stage.first]), model.num_kv_layers - 1)
    return range(first, first + max(1, sum(layer.num_cached for layer in stage.part(layers))))


def state_layers(model: ModelConfig, num_ranks: int, stage: Stage = WHOLE_MODEL) -> StateLayers:
    """Return the tensors of one sequence's state on a rank, of each layer that keeps one; empty if none does."""
    family = FAMILIES.get(model.architecture)
    if family is None:
        return ()
    layers = stage.part(_read_layers(model, family))
    dtype = "float32" if model.mamba_ssm_cache_dtype == "auto" else model.mamba_ssm_cache_dtype
    return tuple(
        tuple(replace(tensor, dtype=dtype) for tensor in mixer.state_tensors(num_ranks))
        for mixer in layers_with_state([own.mixer for own in layers])
    )


def layer_mixers(model: ModelConfig) -> list[object]:
    """Return the mixers of a model's layers; none of a model that is served with transformers' modules."""
    family = FAMILIES.get(model.architecture)
    return [] if family is None else [layer.mixer for layer in _read_layers(model, family)]


def indexed_attention(model: ModelConfig) -> list[AttentionSpec]:
    """Return the attention of the layers with an indexer of blocks."""
    attention = [attention_of(mixer) for mixer in layer_mixers(model)]
    return [own for own in attention if isinstance(own, AttentionSpec) and own.indexer is not None]


def hands_out_states(model: ModelConfig) -> bool:
    """Return whether draft heads can read the hidden states between the layers of a model in FAMILIES."""
    variant = read_spec(model, FAMILIES[model.architecture]).variant
    return not isinstance(variant, Streams | GatedStreams | zaya.Zaya | gemma.Gemma3n)


def _own_attention(model: ModelConfig, family: Family) -> list[AttentionSpec]:
    """Return the attention of the layers with keys and values of their own; none if they have latents."""
    layers = [layer for layer in _read_layers(model, family) if layer.has_own_kv]
    return [
        mixer for mixer in (attention_of(layer.mixer) for layer in layers) if isinstance(mixer, AttentionSpec)
    ]


def _read_layers(model: ModelConfig, family: Family) -> Sequence[LayerSpec]:
    """Return the layers of a model; none if its configuration cannot be read."""
    try:
        return read_spec(model, family).layers
    except (ConfigError, *_MALFORMED):
        return ()  # `check_supported` states the reason


def check_supported(
    model: ModelConfig, tensor_parallel_size: int, *, expert_parallel: bool = False
) -> DecoderSpec | TransformersSpec:
    """Return the spec of a model that this number of ranks can serve.

    Args:
        expert_parallel: each rank holds some experts whole, if the model has experts.

    Raises:
        ConfigError: the architecture, a feature or a size is not supported; states which and why.
    """
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, must be at least 1")
    quantization = read_quantization(model)
    family = FAMILIES.get(model.architecture)
    try:
        if family is None:
            return read_transformers_spec(model, tensor_parallel_size)
        spec = read_spec(model, family)
        multiple = 1 if quantization is None else quantization.shard_multiple
        has_whole = expert_parallel or (spec.experts is not None and spec.experts.are_whole)
        _check_sizes(model, spec, tensor_parallel_size, None if has_whole else multiple)
        check_numbers(spec)
    except _MALFORMED as error:
        reason = in_one_line(error)
        raise ConfigError(f"{model.name}: its config.json has invalid settings: {reason}") from error
    return spec


def check_expert_parallel(model: ModelConfig, spec: DecoderSpec | TransformersSpec) -> Experts:
    """Return the experts of a model. Raises ConfigError if the ranks cannot hold whole experts of it."""
    if isinstance(spec, TransformersSpec):
        raise ConfigError(
            f"{model.name}: enable_expert_parallel does not support {model.architecture}, which is served with the "
            "modules of transformers"
        )
    if spec.experts is None:
        raise ConfigError(
            f"{model.name}: enable_expert_parallel is for mixtures of experts, it has no experts"
        )
    return spec.experts


def check_dp_attention(model: ModelConfig) -> None:
    """Raise ConfigError unless the ranks can each hold the KV of their own sequences of a model."""
    if not model.latent_dim:
        raise ConfigError(
            f"{model.name}: enable_dp_attention is for multi-head latent attention, which {model.architecture} does "
            "not have; leave it out"
        )
    if any(
        isinstance(mixer, SharedKvSpec | HasEntries) or (isinstance(mixer, MlaSpec) and mixer.has_sinks)
        for mixer in layer_mixers(model)
    ):
        raise ConfigError(
            f"{model.name}: enable_dp_attention does not support {model.architecture}; leave it out"
        )


def check_batch_invariant(model: ModelConfig) -> None:
    """Raise ConfigError if attention of a model depends on the other sequences of a batch on a GPU."""
    family = FAMILIES.get(model.architecture)
    if any(isinstance(mixer, SharedKvSpec) for mixer in layer_mixers(model)):
        raise ConfigError(
            f"{model.name}: batch_invariant does not support {model.architecture}; leave it out"
        )
    if indexed_attention(model) or (family is not None and family.indexer_interleaved is not None):
        raise ConfigError(
            f"{model.name}: batch_invariant does not support sparse attention ({model.architecture}), whose short "
            "sequences attend to all tokens unless a longer one is in the batch; leave it out"
        )


def _check_sizes(model: ModelConfig, spec: DecoderSpec, size: int, multiple: int | None) -> None:
    """Check that the ranks get equal numbers of heads, and that no rank's part is empty.

    Args:
        multiple: the ranks' parts of experts are multiples of this length; None if the ranks hold whole experts.
    """
    # The heads of latent attention have keys and values of their own, computed from latents on each rank.
    mixers = [own for own in (attention_of(layer.mixer) for layer in spec.layers) if own is not None]
    counts = {
        (mixer.num_heads, mixer.num_kv_heads)
        if isinstance(mixer, AttentionSpec)
        else (model.num_heads, mixer.num_heads)
        for mixer in mixers
    }
    for mixer in {mixer for mixer in mixers if isinstance(mixer, SharedKvSpec)}:
        check_shared_kv(model.name, mixer, size)
    for num_heads, num_kv_heads in counts:
        check_heads(model.name, num_heads, num_kv_heads, size)
    for state in {layer.mixer for layer in spec.layers if isinstance(layer.mixer, KeepsState)}:
        state.check_ranks(model.name, size)
    lengths = {"vocab_size": (spec.vocab_size, 1)}
    for width in {layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None}:
        lengths["intermediate_size"] = min(lengths.get("intermediate_size", (width, 1)), (width, 1))
    if spec.experts is not None and multiple is None and spec.experts.count < size:
        others = "" if spec.experts.are_whole else "leave enable_expert_parallel out, or "
        raise ConfigError(
            f"{model.name}: it has {spec.experts.count} experts, too few for one on each of {size} ranks; "
            f"{others}use a tensor_parallel_size of {spec.experts.count} or less"
        )
    if spec.experts is not None and multiple is not None:
        lengths["intermediate size of experts"] = spec.experts.intermediate_size, multiple
    for what, (length, unit) in lengths.items():
        # All parts are equal except the last, which must not be empty.
        if -(-length // (size * unit)) * unit * (size - 1) >= length:
            raise ConfigError(
                f"{model.name}: its {what}, {length}, is too small for a tensor_parallel_size of {size}"
            )


def check_heads(name: str, num_heads: int, num_kv_heads: int, size: int) -> None:
    """Raise ConfigError unless `size` ranks get equal numbers of heads of a model of FAMILIES."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"{name}: its {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly"
        )
    if num_heads % size:
        raise ConfigError(
            f"{name}: tensor_parallel_size {size} does not divide its attention heads, {num_heads}; use "
            f"{_nearest_sizes(num_heads, num_kv_heads, size)}"
        )
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"{name}: tensor_parallel_size {size} neither divides its KV heads, {num_kv_heads}, nor is "
            f"a multiple of them; use {_nearest_sizes(num_heads, num_kv_heads, size)}"
        )


def _nearest_sizes(num_heads: int, num_kv_heads: int, size: int) -> str:
    """Return the next smaller and the next larger number of ranks that get equal numbers of heads, in words."""
    allowed = [
        ranks
        for ranks in range(1, num_heads + 1)
        if num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)
    ]
    smaller, larger = [n for n in allowed if n < size][-1:], [n for n in allowed if n > size][:1]
    return " or ".join(map(str, smaller + larger))
