"""The layers of a decoder, each rank's part of them, read from a checkpoint as they are made.

A column-parallel layer splits its outputs over the ranks and a row-parallel one its inputs (Shoeybi et al.,
Megatron-LM, 2019); a vocabulary-parallel one splits the tokens. Where partial sums must meet, the all-reduce is a
line in `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear import linear, pack
from .models.spec import RopeSpec
from .parallel import Communicator, Shard
from .weights import Checkpoint


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What every layer needs to read its part."""

    checkpoint: Checkpoint
    comm: Communicator
    dtype: torch.dtype
    device: torch.device

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

    def shard(self, full_len: int) -> Shard:
        """This rank's part of a dimension."""
        return Shard(self.comm.rank, self.comm.size, full_len)


class ColumnParallelLinear:
    """Several projections of the same input as one matmul; each rank computes its part of each one's outputs.

    Args:
        names: of the projections, without ``.weight``.
        in_features: E.
        out_features: of each projection; the ranks divide it.
    """

    def __init__(
        self, load: LoadContext, names: list[str], in_features: int, out_features: list[int], bias: bool
    ) -> None:
        shards = [load.shard(full_len) for full_len in out_features]
        lengths = [len(shard) for shard in shards]
        weight = load.empty(sum(lengths), in_features)
        self.bias = load.empty(sum(lengths)) if bias else None
        for part, name, shard in zip(weight.split_with_sizes(lengths), names, shards, strict=True):
            load.checkpoint.read_into(part, f"{name}.weight", (shard.full_len, in_features), 0, shard.start)
        if self.bias is not None:
            for part, name, shard in zip(self.bias.split_with_sizes(lengths), names, shards, strict=True):
                load.checkpoint.read_into(part, f"{name}.bias", (shard.full_len,), 0, shard.start)
        self.weight = pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, sum of this rank's outputs]."""
        return linear(x, self.weight, self.bias)


class RowParallelLinear:
    """A projection of inputs that are split over the ranks; the partial sums meet in an all-reduce."""

    def __init__(self, load: LoadContext, name: str, in_features: int, out_features: int, bias: bool) -> None:
        self.comm = load.comm
        self.weight = pack(load.part(f"{name}.weight", (out_features, in_features), dim=1))
        self.bias = load.whole(f"{name}.bias", out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's inputs] -> [T, E], the same on every rank."""
        y = self.comm.all_reduce(linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)


class VocabParallelEmbedding:
    """Token embeddings, each rank holding those of its part of the vocabulary."""

    def __init__(self, load: LoadContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self.comm = load.comm
        self.shard = load.shard(vocab_size)
        self.weight = load.part(f"{name}.weight", (vocab_size, hidden_size), dim=0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        if self.comm.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self.shard.start
        foreign = (local_ids < 0) | (local_ids >= len(self.shard))
        x = F.embedding(local_ids.masked_fill_(foreign, 0), self.weight)
        return self.comm.all_reduce(x.masked_fill_(foreign.unsqueeze(-1), 0))


class VocabParallelHead:
    """The projection to logits; each rank computes those of its part of the vocabulary and keeps them.

    Args:
        tied: the embedding whose weights it shares, if it has none of its own.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        hidden_size: int,
        vocab_size: int,
        tied: VocabParallelEmbedding | None,
    ) -> None:
        self.shard = load.shard(vocab_size)
        self.weight = pack(
            load.part(f"{name}.weight", (vocab_size, hidden_size), 0) if tied is None else tied.weight
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, padded_len of the shard] float32; -inf where the padded vocabulary has no token."""
        logits = linear(x, self.weight).float()
        missing = self.shard.padded_len - len(self.shard)
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class RotaryTable:
    """Cosines and sines of every position, in the layout of kernels.rope."""

    def __init__(self, load: LoadContext, rope: RopeSpec, head_dim: int, num_positions: int) -> None:
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float32)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self._table = table.to(load.device, load.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cosines and sines, each [T, D]."""
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos, sin
