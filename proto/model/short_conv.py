"""ShortConvSpec: a gated convolution over the last few tokens (LFM2, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from .state import StateTensor, channel_section, check_channels


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """``output(c * conv(b * x))`` of three projections b, c and x of each token.

    Attributes:
        num_channels: of each projection.
        width: tokens that the convolution sees, the newest included.
        bias: of both linear layers and the convolution.
    """

    num_channels: int
    width: int
    bias: bool = False

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution."""
        shape = self.width - 1, self.num_channels // num_ranks
        return (StateTensor("conv", shape, (channel_section(self.num_channels),)),)

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        check_channels(name, "convolution", self.num_channels, num_ranks)
