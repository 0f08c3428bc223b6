"""KimiDeltaSpec: the delta rule with a decay per key channel (Kimi Team, *Kimi Linear*, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from .state import StateSection, StateTensor, check_heads_and_groups


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec:
    """Kimi delta attention of a layer.

    Attributes:
        width: tokens that the convolution of queries, keys and values sees.
        norm_eps: of the norm of a head's result.
        is_low_rank: the projections of decays and output gates are products of two matrices.
        decay_bound: logarithms of decays are this times a sigmoid, otherwise unbounded; None for that.
    """

    num_heads: int
    head_dim: int
    width: int
    norm_eps: float
    is_low_rank: bool = True
    decay_bound: float | None = None

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and a matrix per head."""
        heads = self.num_heads // num_ranks
        vectors = (StateSection(self.num_heads, self.head_dim),) * 3
        matrices = (StateSection(self.num_heads, self.head_dim**2),)
        shape = heads, self.head_dim, self.head_dim
        return (
            StateTensor("conv", (self.width - 1, 3 * heads * self.head_dim), vectors),
            StateTensor("recurrent", shape, matrices, is_recurrent=True),
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        heads = "heads", self.num_heads
        check_heads_and_groups(name, "Kimi delta attention", heads, heads, num_ranks)
