"""StateMixer: the part of a layer that reads earlier tokens through a state of fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.state_runs import StateRuns
from ....proto.errors import ModelLoadError
from ...attention import AttentionInputs, LayerCache
from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, PartialSum, Rotations
from ..load_context import LoadContext

# Added to the sum of squares by which queries and keys of delta rules are normalized.
L2_EPS = 1e-6


class StateMixer(ABC):
    """A mixer that keeps a state of each sequence.

    Attributes:
        qkv: the projection of its input.
        layer: its place among the layers with a state; set by the decoder.
    """

    qkv: ColumnParallelLinear
    rope: str | None = None
    layer: int = 0

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; replaces the states of the step's sequences by those after its tokens."""
        assert inputs.states is not None
        return self.mix(x, inputs.states.layers[self.layer], inputs.states.runs)

    @abstractmethod
    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """As `forward`.

        Args:
            states: the tensors of this layer, [num_slots, ...] each.
        """


def read_conv(
    load: LoadContext,
    name: str,
    parts: Sequence[tuple[int, int]],
    width: int,
    *,
    num_channels: int,
    bias: bool = False,
    separate: Sequence[str] = (),
) -> tuple[Tensor, Tensor | None]:
    """Read this rank's channels of a convolution over time: weight [C, width] and bias [C].

    Args:
        parts: first stored channel and number of channels of each part.
        num_channels: stored.
        separate: names of convolutions that together are this one, if the checkpoint has them instead.
    """
    names = [name] if load.checkpoint.has(f"{name}.weight") or not separate else separate

    def read(suffix: str, shape: tuple[int, ...]) -> Tensor:
        lens = [num_channels]
        if len(names) > 1:
            lens = [load.checkpoint.shape_of(f"{own}.{suffix}")[0] for own in names]
            if sum(lens) != num_channels:
                raise ModelLoadError(
                    f"{names[0]} and others have {sum(lens)} channels, expected {num_channels}"
                )
        whole = load.empty(num_channels, *shape)
        for own, piece in zip(names, whole.split(lens), strict=True):
            load.checkpoint.read_into(piece, f"{own}.{suffix}", (len(piece), *shape))
        return torch.cat([whole[start : start + length] for start, length in parts])

    weight = read("weight", (1, width))[:, 0].contiguous()
    if load.device.type == "cpu":
        weight = weight.T.contiguous().T  # a view: the C++ op reads the channels of one time together
    return weight, read("bias", ()) if bias else None


def read_float32(load: LoadContext, name: str, shard: Shard) -> Tensor:
    """Read this rank's part of a tensor of one dimension as float32."""
    out = torch.empty(len(shard), dtype=torch.float32, device=load.device)
    load.checkpoint.read_into(out, name, (shard.full_len,), 0, shard.start)
    return out


class ShardedGroupNorm:
    """RMSNorm over groups of channels that are sharded over the ranks; several ranks may have parts of one group."""

    def __init__(self, load: LoadContext, name: str, num_channels: int, num_groups: int, eps: float) -> None:
        shard = load.shard(num_channels)
        self._comm, self._eps = load.comm, eps
        self._group_len = num_channels // num_groups
        self._weight = load.part(f"{name}.weight", shard)
        self._num_groups, self._own = num_groups, shard.start // self._group_len
        self._is_whole = len(shard) % self._group_len == 0
        self._ones = load.empty(self._group_len).fill_(1)

    def apply(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        if self._is_whole and x.shape[1] == self._group_len:
            return rms_norm(x, self._weight, self._eps)
        if self._is_whole:
            grouped = x.view(len(x), -1, self._group_len)
            return rms_norm(grouped, self._ones, self._eps).flatten(1) * self._weight
        wide = x.float()
        squares = wide.new_zeros(len(x), self._num_groups)
        squares[:, self._own] = wide.square().sum(dim=1)
        mean = self._comm.all_reduce(squares)[:, self._own, None] / self._group_len
        return (wide * torch.rsqrt(mean + self._eps)).to(x.dtype) * self._weight
