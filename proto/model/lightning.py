"""LightningSpec: linear attention with a constant decay per head (Qin et al., *Lightning Attention-2*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from .state import StateSection, StateTensor, check_heads_and_groups


@dataclass(frozen=True, slots=True)
class LightningSpec:
    """Lightning attention of a layer.

    Attributes:
        slope_factor: of the decays, which differ by layer: head h of H, from 1 on, decays by
            ``exp(-slope_factor / 2^(8 h / H))``.
        norm_eps: of the norm of the results of all heads.
    """

    num_heads: int
    head_dim: int
    slope_factor: float
    norm_eps: float

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return a matrix per head."""
        shape = self.num_heads // num_ranks, self.head_dim, self.head_dim
        matrices = (StateSection(self.num_heads, self.head_dim**2),)
        return (StateTensor("recurrent", shape, matrices, is_recurrent=True),)

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        heads = "heads", self.num_heads
        check_heads_and_groups(name, "lightning attention", heads, heads, num_ranks)
