"""Mamba2Spec: a state space of matrices per head (Dao and Gu, *Transformers are SSMs*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionSpec
from .state import StateSection, StateTensor, check_heads_and_groups, groups_per_rank


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constant factors (Falcon-H1, 2025).

    Attributes:
        projections: of the projected gates, inputs, B, C and step sizes.
        output: of the result.
        attention_input, attention_output, keys: of the attention beside it.
    """

    projections: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output: float = 1.0
    attention_input: float = 1.0
    attention_output: float = 1.0
    keys: float = 1.0


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A mixer of Mamba 2. Consecutive heads share a group of B and C.

    Attributes:
        state_size: elements of the state per element of a head.
        width: tokens that the convolution of inputs, B and C sees.
        conv_bias, bias, output_bias: of the convolution and the linear layers.
        norm: of the result, by group: after the ``gate`` multiplies it, ``before_gate``, or None for none.
        norm_eps: of that.
        max_step: largest step size; None for unbounded.
        min_step: smallest step size.
        attention: has the same input, and its result is added; None for none.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    norm: str | None = "gate"
    min_step: float = 0.0
    max_step: float | None = None
    multipliers: Multipliers | None = None
    attention: AttentionSpec | None = None

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and a matrix per head."""
        heads = self.num_heads // num_ranks
        grouped = 2 * groups_per_rank(self.num_groups, num_ranks) * self.state_size
        inner, group = (
            StateSection(self.num_heads, self.head_dim),
            StateSection(self.num_groups, self.state_size),
        )
        matrices = (StateSection(self.num_heads, self.state_size * self.head_dim),)
        shape = heads, self.state_size, self.head_dim
        return (
            StateTensor("conv", (self.width - 1, heads * self.head_dim + grouped), (inner, group, group)),
            StateTensor("recurrent", shape, matrices, is_recurrent=True),
        )

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts."""
        check_heads_and_groups(
            name, "Mamba", ("heads", self.num_heads), ("groups", self.num_groups), num_ranks
        )
