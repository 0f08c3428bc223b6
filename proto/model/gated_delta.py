"""GatedDeltaSpec: linear attention with the gated delta rule (Yang et al., *Gated Delta Networks*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from .ngrams import NgramSpec
from .state import StateSection, StateTensor, check_heads_and_groups, groups_per_rank


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net of a layer. Consecutive value heads share a key head.

    Attributes:
        num_key_heads: heads of queries and keys.
        num_heads: heads of values.
        width: tokens that the convolution of queries, keys and values sees.
        beta_scale: multiplies the rates of the delta rule, which are between 0 and 1.
        norm_eps: of the norm of a head's result.
        layout: of the projections in the checkpoint: ``grouped`` by key head, in ``parts`` of queries, keys and
            values together and all others alone, or ``separate``.
        norm_name, output_name: in the checkpoint.
        gate: activation of the output gates, ``silu`` or ``sigmoid``.
        ngrams: that the layer adds to its residual before, and keeps in the same state; None for none.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm_eps: float
    layout: str
    beta_scale: float = 1.0
    norm_name: str = "norm"
    output_name: str = "out_proj"
    gate: str = "silu"
    ngrams: NgramSpec | None = None

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and a matrix per head; then what n-grams keep."""
        heads = self.num_heads // num_ranks
        keys = 2 * groups_per_rank(self.num_key_heads, num_ranks) * self.key_dim
        key, value = (
            StateSection(self.num_key_heads, self.key_dim),
            StateSection(self.num_heads, self.value_dim),
        )
        matrices = (StateSection(self.num_heads, self.key_dim * self.value_dim),)
        shape = heads, self.key_dim, self.value_dim
        return (
            StateTensor("conv", (self.width - 1, keys + heads * self.value_dim), (key, key, value)),
            StateTensor("recurrent", shape, matrices, is_recurrent=True),
            *(() if self.ngrams is None else self.ngrams.state_tensors()),
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        heads, groups = ("value heads", self.num_heads), ("key heads", self.num_key_heads)
        check_heads_and_groups(name, "gated delta net", heads, groups, num_ranks)
        if self.ngrams is not None:
            self.ngrams.check(name, num_ranks)
