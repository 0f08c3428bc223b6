"""Mistral Large 4: sparse latent attention whose layers share latents, some of them without positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import ModelConfig
from ...errors import ConfigError
from ..mla import UNROTATED, MlaSpec
from ..spec import LayerSpec, Names
from .latent_attention import DEEPSEEK, DEEPSEEK_EXPERTS


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose rotary embedding has learned frequencies, as the others name what it has."""
    return hf | {
        "rope_parameters": hf["rope_parameters"] | {"exponents": "model.rotary_emb.alpha"},
        "no_rope_layers": hf["no_rope_layers"][: hf["num_hidden_layers"]],
        "norm_topk_prob": True,
        "indexer_reads_hidden": True,
    }


def _change_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    hf, changed = model.hf, []
    sources, rotated = hf["kv_source_layers"], [bool(each) for each in hf["no_rope_layers"]]
    _check_sources(model.name, sources, rotated)
    num_keys, num_written = _count_index_keys(hf), Counter[int]()
    for index, layer in enumerate(layers):
        own, source = layer.mixer, sources[index]
        assert isinstance(own, MlaSpec)
        mixer = replace(
            own,
            norm_eps=float(hf["rms_norm_eps"]),
            has_query_factors=True,
            shares_latents=source != index,
            num_index_keys=num_keys,
            index_place=num_written[source],
        )
        if not rotated[index]:
            mixer = replace(mixer, qk_nope_head_dim=own.qk_dim, has_rotated=False, rope=UNROTATED)
        num_written[source] += own.has_indexer
        changed.append(replace(layer, mixer=mixer, kv_source=None if source == index else source))
    return changed


def _check_sources(name: str, sources: Sequence[int], rotated: Sequence[bool]) -> None:
    """Raise ConfigError unless each layer has latents of its own, or those of the last such layer that are shared.

    Layers with positions share those of layers with positions, the others those of the others.
    """
    if len(sources) != len(rotated):
        raise ConfigError(
            f"{name}: kv_source_layers has {len(sources)} entries, no_rope_layers {len(rotated)}; both must have one "
            "for each layer"
        )
    last: dict[bool, int] = {}
    for index, source in enumerate(sources):
        if source == index:
            if index in sources[index + 1 :]:
                last[rotated[index]] = index
        elif last.get(rotated[index]) != source:
            raise ConfigError(
                f"{name}: layer {index} shares the latents of layer {source} (kv_source_layers), must share those of "
                f"the last layer before it whose latents are shared and have positions as its own, "
                f"{last.get(rotated[index], 'of which there is none')}"
            )


def _count_index_keys(hf: dict[str, Any]) -> int:
    """Return the most indexers of layers that share latents, at least 1; 1 if the configuration cannot be read."""
    sources, kinds = hf.get("kv_source_layers"), hf.get("indexer_types")
    if not isinstance(sources, list) or not isinstance(kinds, list):
        return 1
    found = Counter(str(source) for source, kind in zip(sources, kinds, strict=False) if kind == "full")
    return max(found.values(), default=1)


# Names of Mistral's own format, which transformers writes, too.
_NAMES = Names(
    renames=(
        (r"^tok_embeddings\.", "model.embed_tokens."),
        (r"^lerope\.alpha$", "model.rotary_emb.alpha"),
        (r"^layers\.", "model.layers."),
        (r"^norm\.", "model.norm."),
        (r"^output\.", "lm_head."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attention\.", ".self_attn."),
        (r"\.wq\.", ".q_proj."),
        (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
        (r"\.kv_a_norm\.", ".kv_a_layernorm."),
        (r"\.wkv_b\.", ".kv_b_proj."),
        (r"\.wo\.", ".o_proj."),
        (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
        (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
        (r"(\.layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)

LARGE_4 = replace(
    DEEPSEEK,
    experts=replace(DEEPSEEK_EXPERTS, routing="exact_softmax"),
    indexer_interleaved=True,
    count_index_keys=_count_index_keys,
    names=_NAMES,
    adapt=_adapt,
    change_layers=_change_layers,
    unused_prefixes=("mtp_dspark.",),
)
