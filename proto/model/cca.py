"""CcaSpec: attention whose queries and keys are convolved over time (*Compressed Convolutional Attention*, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionSpec
from .state import StateSection, StateTensor


@dataclass(frozen=True, slots=True)
class CcaSpec:
    """Attention to keys of convolved projections, and to values of which half are those of the token before.

    Attributes:
        attention: to these keys and values.
        widths: tokens that the convolution of each channel sees, and the one of each head after it.
    """

    attention: AttentionSpec
    widths: tuple[int, int]

    @property
    def span(self) -> int:
        """Tokens that both convolutions together see."""
        return sum(self.widths) - 1

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs: queries and keys of this rank's KV heads, and the values of the next token."""
        own, dim = self.attention, self.attention.head_dim
        kv_heads = max(1, own.num_kv_heads // num_ranks)
        share, values = own.num_heads // own.num_kv_heads, own.num_kv_heads * dim // 2
        queries, keys = (StateSection(own.num_kv_heads, count * dim) for count in (share, 1))
        sections = queries, keys, StateSection(1, values)
        return (StateTensor("inputs", (self.span - 1, kv_heads * (share + 1) * dim + values), sections),)

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Do nothing: the heads are checked as those of other attention."""
