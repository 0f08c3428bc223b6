"""MlaSpec: multi-head latent attention of a layer, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .attention import FULL, QueryTemperature
from .config_fields import required
from .rope import yarn_scale

# Key of the rotary embedding of layers without positions, which rotates by no angle.
UNROTATED = "unrotated"
# Time of a product with a latent that one query has selected, in products with keys that all queries of a tile share.
# Measured on a CPU: 0.7 to 1.5.
SELECTED_COST = 1.5


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Sizes of the indexer of sparse latent attention (DeepSeek-AI, *DeepSeek-V3.2*, 2025).

    Attributes:
        num_heads, head_dim: Hi heads, which share one key of I elements per token.
        top_k: tokens that a query chooses at most.
        interleaved: elements 2 i and 2 i + 1 of the rotated part are a pair.
        rotates_last: the rotated part comes last; otherwise it comes first.
        norm_eps: of the norms of keys and of inputs.
        reads_hidden: its queries are computed from the layer's input after a norm of its own, not from the latents of
            the layer's queries, and have learned factors (MlaSpec.has_query_factors).
        pool_len: successive tokens that are chosen together; a query attends besides to those up to its own that fill
            no pool.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    rotates_last: bool = False
    norm_eps: float = 1e-6
    reads_hidden: bool = False
    pool_len: int = 1

    @property
    def num_attended(self) -> int:
        """Tokens that a query attends to at most; with so many or fewer it attends to all."""
        return self.top_k + self.pool_len - 1


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Sizes of multi-head latent attention (DeepSeek-AI, *DeepSeek-V2*, 2024).

    Attributes:
        rank: C, elements of the latent that a token's keys and values are computed from.
        query_rank: elements of the latent that its queries are computed from; None if they have none.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V, elements of a head's own part of a key, of the
            rotated part that all heads share, and of a value.
        interleaved: elements 2 i and 2 i + 1 of the rotated part are a pair.
        scale: multiplies the products of queries and keys.
        indexer: of sparse attention; None for attention to all tokens.
        rope: key of the rotary embedding in DecoderSpec.ropes.
        gate: sigmoids multiply the results: of a projected number per ``head``, which are stored as ``g_proj``, or of
            as many as values have, which are stored behind each head's ``query`` or as ``gate_proj`` for each
            ``value``; None for no gate.
        joins_latents: queries are computed from their latent after the norm and before it, together.
        latent_scale: multiplies the normalized latents of keys and values.
        temperature: of the queries; None for none.
        has_sinks: each head has one more key, whose value is 0.
        has_indexer: the layer has one; otherwise it attends to the tokens that the last layer with one has selected.
        norm_eps: of the norms of latents.
        has_rotated: latents have a rotated part; otherwise its place in the cache is 0, as in the queries, whose own
            parts are then as long as both parts of other layers' (`qk_nope_head_dim` is that length).
        shares_latents: the layer attends to the latents of an earlier one, LayerSpec.kv_source.
        has_query_factors: factors of a head's queries grow with the position, with a learned slope and offset.
        num_index_keys: keys behind a token's latent, of the indexers of the layers that share it; 0 if keys are
            cached elsewhere.
        index_place: of the layer's own among them.
    """

    num_heads: int
    rank: int
    query_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    scale: float
    rope: str = FULL
    indexer: IndexerSpec | None = None
    has_indexer: bool = False
    has_sinks: bool = False
    gate: str | None = None
    joins_latents: bool = False
    latent_scale: float = 1.0
    temperature: QueryTemperature | None = None
    norm_eps: float = 1e-6
    has_rotated: bool = True
    shares_latents: bool = False
    has_query_factors: bool = False
    num_index_keys: int = 1
    index_place: int = 0

    @property
    def qk_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def unstored_dim(self) -> int:
        """Elements of the rotated part that no projection computes, because they are 0."""
        return 0 if self.has_rotated else self.qk_rope_head_dim

    @property
    def attended_dim(self) -> int:
        """Elements of a token that queries of all heads attend to; the key of an indexer is cached behind them."""
        return self.rank + self.qk_rope_head_dim

    def expansion_is_cheaper(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
        """Return whether chunks take less time with keys and values than with latents, by the number of products.

        With 512 + 64 elements per latent and 128 + 64 + 128 of a head: from 171 queries per sequence on. With an
        indexer all tokens are expanded, but latents are read of the selected ones only, for each query anew: 2,048
        queries that choose as many tokens are expanded in sequences of up to 8,700 tokens.
        """
        lens = list(zip(query_lens, seq_lens, strict=True))
        num_pairs = sum(queries * keys for queries, keys in lens)
        expanding = sum(seq_lens) * self.rank * (self.qk_nope_head_dim + self.v_head_dim)
        expanded = expanding + num_pairs * (self.qk_dim + self.v_head_dim)
        absorbed: float = num_pairs * (self.attended_dim + self.rank)
        if self.indexer is not None:
            num_selected = sum(queries * min(keys, self.indexer.num_attended) for queries, keys in lens)
            absorbed = SELECTED_COST * num_selected * (self.attended_dim + self.rank)
        return expanded < absorbed


def read_mla(model: ModelConfig, indexer_interleaved: bool | None) -> MlaSpec:
    """Return the attention of a model's layers, without an indexer of their own.

    Args:
        indexer_interleaved: as IndexerSpec.interleaved, unless the configuration has ``indexer_rope_interleave``;
            None for attention to all tokens.

    Raises:
        ConfigError: a setting is missing or not supported.
    """
    hf = model.hf
    if hf.get("attention_bias"):
        raise ConfigError(f"{model.name}: biases of latent attention (attention_bias) are not supported")
    latent = MlaSpec(
        num_heads=model.num_heads,
        rank=required(model, "kv_lora_rank"),
        query_rank=hf.get("q_lora_rank"),
        qk_nope_head_dim=required(model, "qk_nope_head_dim"),
        qk_rope_head_dim=required(model, "qk_rope_head_dim"),
        v_head_dim=required(model, "v_head_dim"),
        interleaved=bool(hf.get("rope_interleave", True)),
        scale=0.0,
        indexer=None if indexer_interleaved is None else _read_indexer(model, indexer_interleaved),
    )
    if latent.v_head_dim > latent.qk_dim:
        raise ConfigError(
            f"{model.name}: v_head_dim is {latent.v_head_dim}, must be at most qk_nope_head_dim + qk_rope_head_dim, "
            f"{latent.qk_dim}"
        )
    return replace(latent, scale=_scale(hf, latent.qk_dim))


def _read_indexer(model: ModelConfig, interleaved: bool) -> IndexerSpec:
    reads_hidden = bool(model.hf.get("indexer_reads_hidden"))
    if not reads_hidden:
        required(model, "q_lora_rank")
    indexer = IndexerSpec(
        num_heads=required(model, "index_n_heads"),
        head_dim=required(model, "index_head_dim"),
        top_k=required(model, "index_topk"),
        interleaved=bool(model.hf.get("indexer_rope_interleave", interleaved)),
        reads_hidden=reads_hidden,
    )
    for field, value, least in (
        ("index_n_heads", indexer.num_heads, 1),
        ("index_head_dim", indexer.head_dim, required(model, "qk_rope_head_dim")),
        ("index_topk", indexer.top_k, 1),
    ):
        if value < least:
            raise ConfigError(f"{model.name}: {field} is {value}, must be at least {least}")
    return indexer


def read_indexer_layers(model: ModelConfig) -> list[bool]:
    """Return which layers of a model with indexers have one of their own."""
    kinds = model.hf.get("indexer_types") or ["full"] * model.num_layers
    if len(kinds) < model.num_layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            f"{model.name}: indexer_types is {kinds!r}, must name 'full' or 'shared' for each of "
            f"{model.num_layers} layers, and 'full' for the first"
        )
    return [kind == "full" for kind in kinds[: model.num_layers]]


def _scale(hf: dict[str, Any], qk_dim: int) -> float:
    """Return the scale of scores, which YaRN raises for all dimensions by the square of its own."""
    settings: dict[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight, scale = settings.get("mscale_all_dim"), float(qk_dim**-0.5)
    if settings.get("rope_type", settings.get("type", "default")) == "default" or not weight:
        return scale
    return scale * yarn_scale(float(settings["factor"]), float(weight)) ** 2
