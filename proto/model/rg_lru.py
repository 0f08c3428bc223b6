"""RgLruSpec: a gated linear recurrent unit behind a short convolution (De et al., *Griffin*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from .state import StateSection, StateTensor, check_heads_and_groups


@dataclass(frozen=True, slots=True)
class RgLruSpec:
    """The recurrent block of a layer.

    Attributes:
        num_heads: blocks of channels whose gates are computed from each other.
        num_channels: of the recurrence.
        width: tokens that the convolution sees.
    """

    num_heads: int
    num_channels: int
    width: int

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and a number per channel."""
        channels = self.num_channels // num_ranks
        sections = (StateSection(self.num_heads, self.num_channels // self.num_heads),)
        return (
            StateTensor("conv", (self.width - 1, channels), sections),
            StateTensor("recurrent", (1, channels), sections, is_recurrent=True),
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        heads = "heads", self.num_heads
        check_heads_and_groups(name, "recurrent", heads, heads, num_ranks)
