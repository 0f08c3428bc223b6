"""Sizes of all stages: those of an 8B Llama for a GPU, tiny ones for a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a Llama, with the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int

    @property
    def num_parameters(self) -> int:
        """Parameters without the embedding, which a step reads a row of."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def kv_numbers(self) -> int:
        """Numbers of keys and values per token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Shape of a DeepSeek without experts, with the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int

    @property
    def cached_dim(self) -> int:
        """Numbers of a token's latent and shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.qk_dim**-0.5)

    @property
    def num_parameters(self) -> int:
        """Parameters without the embedding, which a step reads a row of."""
        heads, rank = self.num_attention_heads, self.kv_lora_rank
        attention = self.hidden_size * (heads * (self.qk_dim + self.v_head_dim) + self.cached_dim)
        attention += rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    @property
    def kv_numbers(self) -> int:
        """Numbers in the cache per token."""
        return self.num_hidden_layers * self.cached_dim


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all stages.

    Attributes:
        decodes: (rows, tokens of each) of the decode measurements.
        prefill_lens: tokens of single prompts.
        mixed_s: seconds of the mixed load, of `mixed_rows` concurrent requests.
        matmul_len: of the square matmul that gives the roof.
        num_timed: decode steps per measurement.
        num_adapters, adapter_rank: LoRA adapters that one step uses, and their rank.
        num_drafts: drafted tokens per sequence and step.
        num_embedded, embedded_len: prompts that are embedded together, and their tokens.
        options: engine options.
    """

    device: str
    dtype: str
    model: ModelShape
    latent_model: LatentShape
    decodes: tuple[tuple[int, int], ...]
    prefill_lens: tuple[int, ...]
    mixed_rows: int
    mixed_s: float
    mixed_prompt_len: int
    mixed_output_len: int
    copy_bytes: int
    matmul_len: int
    num_timed: int
    num_sampled: tuple[int, ...]
    repeat_s: float
    num_adapters: int
    adapter_rank: int
    num_drafts: int
    num_embedded: int
    embedded_len: int
    options: dict[str, Any]


LLAMA_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, 131072)
TINY = ModelShape(512, 64, 128, 2, 4, 2, 16, 256)
# The attention and width of DeepSeek-V2-Lite, and in all layers the feed-forward network of its first.
LATENT_2B = LatentShape(102400, 2048, 10944, 27, 16, 512, 128, 64, 128, 131072)
TINY_LATENT = LatentShape(512, 64, 128, 2, 4, 32, 16, 16, 16, 256)

GPU = Sizes(
    device="cuda",
    dtype="bfloat16",
    model=LLAMA_8B,
    latent_model=LATENT_2B,
    decodes=((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 65536)),
    prefill_lens=(512, 2048, 8192),
    mixed_rows=128,
    mixed_s=20.0,
    mixed_prompt_len=2048,
    mixed_output_len=256,
    copy_bytes=4 << 30,
    matmul_len=8192,
    num_timed=64,
    num_sampled=(1, 64, 256),
    repeat_s=0.05,
    num_adapters=8,
    adapter_rank=16,
    num_drafts=3,
    num_embedded=256,
    embedded_len=512,
    options={"max_num_seqs": 256, "max_num_batched_tokens": 8192},
)
CPU = Sizes(
    device="cpu",
    dtype="float32",
    model=TINY,
    latent_model=TINY_LATENT,
    decodes=((1, 24), (4, 24), (1, 96)),
    prefill_lens=(32, 64),
    mixed_rows=4,
    mixed_s=0.5,
    mixed_prompt_len=40,
    mixed_output_len=8,
    copy_bytes=1 << 20,
    matmul_len=64,
    num_timed=8,
    num_sampled=(1, 4),
    repeat_s=0.002,
    num_adapters=2,
    adapter_rank=4,
    num_drafts=3,
    num_embedded=6,
    embedded_len=24,
    options={"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 128},
)
SIZES = {"cuda": GPU, "cpu": CPU}
