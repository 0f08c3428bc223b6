"""Mamba1Spec: a selective state space of a vector per channel (Gu and Dao, *Mamba*, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from .state import StateTensor, check_channels


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """A mixer of Mamba.

    Attributes:
        num_channels: inputs of the scan.
        state_size: elements of the state per channel.
        step_rank: of the projection of the step sizes.
        width: tokens that the convolution sees.
        conv_bias, bias: of the convolution and the linear layers.
        norms: of step sizes, B and C: ``weighted``, ``unweighted``, or None for none.
        norm_eps: of these.
    """

    num_channels: int
    state_size: int
    step_rank: int
    width: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    norms: str | None = None

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and a vector per channel."""
        channels = self.num_channels // num_ranks
        return (
            StateTensor("conv", (self.width - 1, channels)),
            StateTensor("recurrent", (self.state_size, channels), is_recurrent=True),
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        check_channels(name, "Mamba", self.num_channels, num_ranks)
