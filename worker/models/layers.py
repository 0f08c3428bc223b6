"""The layers of a decoder, each rank's part of them, read from a checkpoint as they are made.

A column-parallel layer splits its outputs over the ranks and a row-parallel one its inputs (Shoeybi et al.,
Megatron-LM, 2019); a vocabulary-parallel one splits the tokens. Where partial sums must meet, the all-reduce is a
line in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.all_reduce_norm import Peers
from ...kernels.linear import PackedWeight, embed, pack
from ...kernels.quantized_linear import Float8Tokens
from ..comm.communicator import Communicator
from ..comm.shard import Shard
from ..weights.checkpoint import Checkpoint
from ..weights.linear_weight import Float8Weight, LinearWeight, PlainWeight, read_linear
from ..weights.quantization import Quantization
from ..weights.weight_slice import WeightSlice
from .rope import Rope


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What every layer needs to read its part.

    Attributes:
        quantization: how linear layers are stored, or are to be quantised; None: not at all.
        fused_all_reduce: as in ParallelConfig.
    """

    checkpoint: Checkpoint
    comm: Communicator
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    fused_all_reduce: bool = False

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def whole(self, name: str, *shape: int) -> Tensor:
        """A tensor that every rank holds in full."""
        out = self.empty(*shape)
        self.checkpoint.read_into(out, name, shape)
        return out

    def part(self, name: str, shape: tuple[int, int], dim: int) -> Tensor:
        """This rank's part of a matrix that the ranks split along `dim`."""
        shard = self.shard(shape[dim])
        out = self.empty(*(len(shard) if axis == dim else length for axis, length in enumerate(shape)))
        self.checkpoint.read_into(out, name, shape, dim, shard.start)
        return out

    def linear(self, parts: Sequence[WeightSlice], *, sensitive: bool = False) -> LinearWeight:
        """The matrix of a linear layer, as its checkpoint or the operator would have it quantised.

        Args:
            sensitive: its precision matters so much that an operator's wish does not include it.
        """
        quantization = self.quantization
        if quantization is not None and quantization.is_online and sensitive:
            quantization = None
        return read_linear(self.checkpoint, parts, self.dtype, self.device, quantization)

    def norm(self, name: str, length: int, offset: float = 0.0) -> Tensor:
        """The weights of a norm, which checkpoints store without the constant `offset`."""
        weight = self.whole(f"{name}.weight", length)
        return weight.add_(offset) if offset else weight

    def shard(self, full_len: int) -> Shard:
        """This rank's part of a dimension."""
        return Shard(self.comm.rank, self.comm.size, full_len)

    def head_shard(self, num_heads: int, head_dim: int) -> Shard:
        """This rank's part of the outputs of `num_heads` heads; of fewer heads than ranks, several have the same."""
        num_replicas = max(1, self.comm.size // num_heads)
        return Shard(self.comm.rank // num_replicas, self.comm.size // num_replicas, num_heads * head_dim)


@dataclass(frozen=True, slots=True)
class Projection:
    """Outputs of a linear layer that the ranks divide among them.

    Attributes:
        name: of the layer that checkpoints store, without ``.weight``.
        shard: this rank's part of the outputs.
        start, stored_len: where a layer stores several projections below each other: the first output of this one,
            and the outputs of all; None: it stores this one alone.
    """

    name: str
    shard: Shard
    start: int = 0
    stored_len: int | None = None

    @property
    def num_stored(self) -> int:
        return self.shard.full_len if self.stored_len is None else self.stored_len


class ColumnParallelLinear:
    """Several projections of the same input as one matmul; each rank computes its part of each one's outputs.

    Args:
        in_features: E.
    """

    def __init__(
        self, load: LoadContext, projections: Sequence[Projection], in_features: int, bias: bool
    ) -> None:
        parts = [
            WeightSlice(
                own.name, (own.num_stored, in_features), 0, own.start + own.shard.start, len(own.shard)
            )
            for own in projections
        ]
        self.weight = load.linear(parts)
        self.bias = load.empty(sum(part.length for part in parts)) if bias else None
        if self.bias is not None:
            pieces = self.bias.split_with_sizes([part.length for part in parts])
            for piece, part in zip(pieces, parts, strict=True):
                load.checkpoint.read_into(piece, f"{part.name}.bias", part.shape[:1], 0, part.start)

    @property
    def takes_float8(self) -> bool:
        """Whether tokens are rounded to float8 anyway, so that they may come so."""
        return isinstance(self.weight, Float8Weight)

    def forward(self, x: Tensor | Float8Tokens) -> Tensor:
        """[T, E] -> [T, sum of this rank's outputs]."""
        if isinstance(x, Float8Tokens):
            assert isinstance(self.weight, Float8Weight)
            return self.weight.multiply(x, self.bias)
        return self.weight.multiply(x, self.bias)


class PartialSum(NamedTuple):
    """What this rank adds to a sum over the ranks, [T, E], which is yet to be made."""

    part: Tensor


class RowParallelLinear:
    """A projection of inputs that are split over the ranks; the partial sums meet in an all-reduce.

    Args:
        peers: what sums of few tokens are left to; None: nothing is.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        peers: Peers | None = None,
    ) -> None:
        self.comm = load.comm
        self.max_unsummed = 0 if peers is None or bias else peers.max_tokens
        shard = load.shard(in_features)
        self.weight = load.linear(
            [WeightSlice(name, (out_features, in_features), 1, shard.start, len(shard))]
        )
        self.bias = load.whole(f"{name}.bias", out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's inputs] -> [T, E], the same on every rank."""
        return self.sum(self.weight.multiply(x))

    def forward_unsummed(self, x: Tensor) -> Tensor | PartialSum:
        """As `forward`, but the sum of few tokens is left to who adds it to something."""
        y = self.weight.multiply(x)
        return PartialSum(y) if len(y) <= self.max_unsummed else self.sum(y)

    def sum(self, part: Tensor) -> Tensor:
        y = self.comm.all_reduce(part)
        return y if self.bias is None else y.add_(self.bias)


class WholeProjectionNorm:
    """RMSNorm over all outputs of a projection, of which every rank holds a part.

    Args:
        shard: this rank's part of the outputs; ranks that hold the same part all count.
    """

    def __init__(self, load: LoadContext, name: str, shard: Shard, eps: float) -> None:
        self.comm, self.eps = load.comm, eps
        self.length = len(shard)
        self.weight = load.empty(self.length)
        load.checkpoint.read_into(self.weight, f"{name}.weight", (shard.full_len,), 0, shard.start)

    def apply(self, x: Tensor) -> None:
        """Normalises this rank's part, [T, length], in place."""
        squares = self.comm.all_reduce(x.float().square().sum(dim=-1, keepdim=True))
        scale = torch.rsqrt(squares / (self.length * self.comm.size) + self.eps)
        x.copy_(x.float().mul_(scale).mul_(self.weight))


class VocabParallelEmbedding:
    """Token embeddings, each rank holding those of its part of the vocabulary.

    Args:
        scale: multiplies every embedding.
    """

    def __init__(
        self, load: LoadContext, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> None:
        self.comm = load.comm
        self.shard = load.shard(vocab_size)
        self.dtype = load.dtype
        self.weight = PackedWeight(load.part(f"{name}.weight", (vocab_size, hidden_size), dim=0))
        # Models were trained with the factor rounded to the weights' dtype.
        self.scale = float(torch.tensor(scale, dtype=load.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        x = self._look_up(token_ids)
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self.comm.size == 1:
            return embed(token_ids, self.weight, self.dtype)
        local_ids = token_ids - self.shard.start
        foreign = (local_ids < 0) | (local_ids >= len(self.shard))
        x = embed(local_ids.masked_fill_(foreign, 0), self.weight, self.dtype)
        return self.comm.all_reduce(x.masked_fill_(foreign.unsqueeze(-1), 0))

    def lay_out(self) -> PackedWeight:
        """The matrix for a head that shares it. Where it can be looked up as it lies then, it is held only once."""
        packed = pack(self.weight.weight)
        if packed.can_embed:
            self.weight = packed
        return packed


class VocabParallelHead:
    """The projection to logits; each rank computes those of its part of the vocabulary and keeps them.

    Args:
        tied: the embedding whose weights it shares, if it has none of its own.
        scale: multiplies the logits.
        soft_cap: bounds them to ``soft_cap * tanh(logit / soft_cap)``; 0: it does not.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        hidden_size: int,
        vocab_size: int,
        tied: VocabParallelEmbedding | None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float = 0.0,
    ) -> None:
        self.scale, self.soft_cap = scale, soft_cap
        self.shard = load.shard(vocab_size)
        self.weight: LinearWeight
        if tied is None:
            part = WeightSlice(name, (vocab_size, hidden_size), 0, self.shard.start, len(self.shard))
            self.weight = load.linear([part], sensitive=True)
        else:
            self.weight = PlainWeight(tied.lay_out())

        self.bias: Tensor | None = None
        if bias:
            self.bias = load.empty(len(self.shard))
            load.checkpoint.read_into(self.bias, f"{name}.bias", (vocab_size,), 0, self.shard.start)

    def forward(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, padded_len of the shard] float32; -inf where the padded vocabulary has no token."""
        logits = self.own_logits(x)
        if self.scale != 1.0:
            logits *= self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap).mul_(self.soft_cap)
        return self.pad(logits)

    def own_logits(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, tokens of the shard] float32, neither scaled nor bounded."""
        return self.weight.multiply(x, self.bias).float()

    def pad(self, logits: Tensor) -> Tensor:
        """[N, tokens of the shard] -> [N, padded_len of the shard]."""
        missing = self.shard.padded_len - len(self.shard)
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class RotaryTable:
    """Cosines and sines of every position, in the layout of kernels.rope."""

    def __init__(self, load: LoadContext, rope: Rope, num_positions: int) -> None:
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self._table = table.to(load.device, load.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cosines and sines, each [T, R], where R dimensions of a head are rotated."""
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin
