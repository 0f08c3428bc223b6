"""Mamba1Spec: a selective state space of a vector per channel (Gu and Dao, *Mamba*, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .attention import AttentionSpec
from .state import StateTensor, channel_section, check_channels, groups_per_rank


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
        num_heads: groups of adjacent channels, each with step sizes, B and C of its own (Zamba, 2024); 0 for one
            group without the names of heads.
        attention: of a block that is computed before the mixer; None without one.
    """

    num_channels: int
    state_size: int
    step_rank: int
    width: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    norms: str | None = None
    num_heads: int = 0
    attention: AttentionSpec | None = None

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and the vectors of the channels, a tensor for each head.

        The number of tensors depends on that of the ranks if there are heads, so that these have no sections.
        """
        channels, own_heads = self.num_channels // num_ranks, groups_per_rank(self.num_heads, num_ranks)
        section = (channel_section(self.num_channels),)
        shape, sections = (self.state_size, channels // own_heads), () if self.num_heads else section
        recurrent = StateTensor("recurrent", shape, sections, is_recurrent=True)
        return StateTensor("conv", (self.width - 1, channels), section), *[recurrent] * own_heads

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts, of whole heads or of one head each."""
        check_channels(name, "Mamba", self.num_channels, num_ranks)
        if self.num_heads and self.num_heads % num_ranks and num_ranks % self.num_heads:
            raise ConfigError(
                f"{name}: tensor_parallel_size {num_ranks} neither divides the {self.num_heads} heads of its Mamba "
                "layers, nor is a multiple of them"
            )
