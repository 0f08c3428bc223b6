"""AttentionSpec: attention to keys and values of heads."""

from __future__ import annotations

from dataclasses import dataclass

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Sizes of the cache's blocks that have room for what an indexer caches, beside multiples of the last one.
_BLOCK_SIZES = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Factors of queries, which grow with the position (Nakanishi, 2025).

    The factor of position p is ``1 + scale * log(1 + floor((p + offset) / interval))``.
    """

    scale: float
    interval: float
    offset: int = 1


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Norms of queries and keys.

    Attributes:
        kind: RMSNorm before the rotation over each ``head``, with weights or ``unweighted``, or over the whole
            ``projection``, or after it over each ``rotated_head``, or ``rotated_unweighted`` in layers with positions
            only; or LayerNorm with weights per head, ``layer``.
        names: of both norms in the checkpoint; with a ``{}``, each head has its own.
    """

    kind: str
    names: tuple[str, str] = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """Sizes of the indexer of attention to blocks of keys (MiniMax-M3, 2026).

    Attributes:
        head_dim: I, elements of the key that a token has for the indexer, and of its queries, one for each KV head.
        block_len: successive tokens of a block.
        top_k: blocks that a query attends to at most, for each KV head.
        num_local: of these, the last ones up to the query's own, whatever their scores are.
    """

    head_dim: int
    block_len: int
    top_k: int
    num_local: int

    @property
    def num_tokens(self) -> int:
        """Tokens that a query attends to at most; with so many or fewer it attends to all."""
        return self.top_k * self.block_len

    @property
    def cached(self) -> tuple[int, int]:
        """Heads and head dim of what a token is cached as: the halves of its key."""
        return 1, self.head_dim // 2


@dataclass(frozen=True, slots=True)
class PooledIndexerSpec:
    """Sizes of the indexer of attention to blocks of keys that have one key of the indexer each (Qwen4, 2026).

    Attributes:
        num_heads: Hi, queries of a token, which choose for all heads together.
        head_dim: I, elements of a key.
        block_len: successive tokens of a block, whose keys' mean is the block's; a block is chosen once it is whole.
        top_k: whole blocks that a query attends to at most, besides the tokens behind the last one.
    """

    num_heads: int
    head_dim: int
    block_len: int
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Tokens that a query attends to at most; with so many or fewer it attends to all."""
        return (self.top_k + 1) * self.block_len - 1

    def blocks_in(self, block_size: int) -> int:
        """Return the most keys in a block of the cache: each is in that of the last token of its tokens."""
        return -(-block_size // self.block_len)

    @property
    def cached(self) -> tuple[int, int]:
        """Heads and head dim of a layer of the cache that has room for the keys."""
        return 1, max(-(-self.blocks_in(size) * self.head_dim // (2 * size)) for size in _BLOCK_SIZES)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer to keys and values of heads.

    Attributes:
        scale: multiplies the products of queries and keys.
        rope: key of the rotary embedding in DecoderSpec.ropes; None for layers without positions.
        window: tokens that a token attends to, itself included; 0 for all.
        chunk: a token attends to those from the last multiple of `chunk` on, itself included; 0 for all.
        soft_cap: ``soft_cap * tanh(x / soft_cap)`` bounds the scores; 0 for unbounded.
        has_sinks: each head has one more key, whose value is 0 (kernels.attention_variant).
        fused_qkv: checkpoints store q, k and v as one ``qkv_proj``.
        interleaved: elements 2 i and 2 i + 1 of a head are a pair; their rows are reordered as they are read.
        temperature: of the layer's queries; None for none.
        values_are_keys: the projected keys are the values too, before norm and rotation.
        gate: sigmoids multiply the results: of as many projected numbers as ``query`` has, which are stored after
            those of each head, or as a ``projection`` of their own, ``gate_proj``, or of one per ``head``, which are
            stored as ``g_proj``; None for no gate.
        normalizes_results: each head's result has an RMSNorm without weights before the gate.
        value_dim: elements of a head's values, which are cached with zeros behind them; None for `head_dim`.
        value_scale: multiplies the values.
        output_name: of the output projection in the checkpoint, if it is not Names.attention_output.
        indexer: chooses the blocks of keys that a query attends to; None for attention to all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: str | None = FULL
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    qk_norm: QkNorm | None = None
    fused_qkv: bool = False
    interleaved: bool = False
    temperature: QueryTemperature | None = None
    values_are_keys: bool = False
    gate: str | None = None
    normalizes_results: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    output_name: str | None = None
    indexer: BlockIndexerSpec | PooledIndexerSpec | None = None

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head dim of what a token is cached as: keys and values, then what its indexer caches."""
        own = self.num_kv_heads, self.head_dim
        return (own,) if self.indexer is None else (own, self.indexer.cached)
