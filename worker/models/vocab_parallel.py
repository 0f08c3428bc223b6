"""Embedding and language-model head, sharded over the ranks by token."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.activation import tanh
from ...kernels.linear import PackedWeight, embed, pack
from ...kernels.lora import LoraGroups
from ...kernels.norm import rms_norm
from ..lora.layers import UNCHANGED
from ..weights.linear_weight import LinearWeight, PlainWeight, packed_weight
from ..weights.weight_slice import WeightSlice
from .load_context import LoadContext


class VocabParallelEmbedding:
    """Token embeddings; each rank holds those of its part of the vocabulary.

    Args:
        scale: multiplies every embedding.
        norm_eps: of an RMSNorm without weights of every embedding; None for no norm.
        tied: the head has the same matrix.
        adapted: adapters may change the embedding; those of a tied head are others.

    Attributes:
        weight: for look-ups.
        head_weight: the packed matrix for a tied head, which `weight` is, too, if it supports look-ups; None if the
            head is not tied.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        *,
        norm_eps: float | None = None,
        tied: bool = False,
        adapted: bool = True,
    ) -> None:
        self.comm = load.comm
        self.shard = load.shard(vocab_size)
        self.dtype = load.dtype

        def read() -> PackedWeight:
            return PackedWeight(load.sharded(f"{name}.weight", (vocab_size, hidden_size), dim=0))

        self.head_weight: PackedWeight | None = None
        if tied:
            self.head_weight = load.keep(f"{name} packed", lambda: pack(read().weight))
        if self.head_weight is not None and self.head_weight.can_embed:
            self.weight = self.head_weight
        else:
            self.weight = load.keep(name, read)
        self.adapters = load.embedding_adapters(name, vocab_size, hidden_size) if adapted else UNCHANGED
        # Models are trained with the factor rounded to the weights' dtype.
        self.scale = float(torch.tensor(scale, dtype=load.dtype))
        self._norm_eps = norm_eps
        self._ones = None if norm_eps is None else load.empty(hidden_size).fill_(1)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        x = self._look_up(token_ids)
        if self._ones is not None and self._norm_eps is not None:
            x = rms_norm(x, self._ones, self._norm_eps)
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self.comm.size == 1:
            return self._look_up_local(token_ids)
        local_ids = token_ids - self.shard.start
        is_remote = (local_ids < 0) | (local_ids >= len(self.shard))
        x = self._look_up_local(local_ids.masked_fill_(is_remote, 0))
        return self.comm.all_reduce(x.masked_fill_(is_remote.unsqueeze(-1), 0))

    def _look_up_local(self, local_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens of this rank, with those of the step's adapters."""
        x = embed(local_ids, self.weight, self.dtype)
        self.adapters.add(x, local_ids)
        return x


class VocabParallelHead:
    """Projection to logits; each rank computes the logits of its part of the vocabulary.

    Args:
        tied: the embedding, made with `tied`, that the head shares its weight with; None for a weight of its own.
        stored: name of the stored weight, if it is not that of the head.
        scale: multiplies the logits.
        soft_cap: bounds logits to ``soft_cap * tanh(logit / soft_cap)``; 0 for unbounded.
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
        stored: str | None = None,
    ) -> None:
        self.scale, self.soft_cap = scale, soft_cap
        self.shard = load.shard(vocab_size)
        part = WeightSlice(name, (vocab_size, hidden_size), 0, self.shard.start, len(self.shard))
        self.lora = load.adapters([part])
        self.weight: LinearWeight
        if tied is None:
            self.weight = load.linear([replace(part, name=stored or name)], allow_online=False)
        else:
            assert tied.head_weight is not None, "the embedding was not made for a tied head"
            self.weight = PlainWeight(tied.head_weight)

        self.bias: Tensor | None = None
        if bias:
            self.bias = load.empty(len(self.shard))
            load.checkpoint.read_into(self.bias, f"{name}.bias", (vocab_size,), 0, self.shard.start)

    @property
    def whole_weight(self) -> PackedWeight | None:
        """The weight [V, E] if logits are its products with hidden states; None if they are not or it is sharded."""
        is_plain = self.scale == 1.0 and not self.soft_cap and self.bias is None
        is_whole = len(self.shard) == self.shard.full_len
        return packed_weight(self.weight) if is_plain and is_whole else None

    def forward(self, x: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """[N, E] -> [N, padded_len of the shard] float32; -inf where the padded vocabulary has no token.

        Args:
            adapted: the rows of x with an adapter; None for none.
        """
        logits = self.local_logits(x, adapted)
        if self.scale != 1.0:
            logits *= self.scale
        if self.soft_cap:
            logits = tanh(logits / self.soft_cap).mul_(self.soft_cap)
        return self.pad(logits)

    def local_logits(self, x: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """[N, E] -> [N, tokens of the shard] float32, neither scaled nor capped; see `forward`."""
        logits = self.weight.multiply(x, self.bias)
        self.lora.add_rows(logits, x, adapted)
        return logits.float()

    def pad(self, logits: Tensor) -> Tensor:
        """[N, tokens of the shard] -> [N, padded_len of the shard]."""
        num_padding = self.shard.padded_len - len(self.shard)
        return F.pad(logits, (0, num_padding), value=-torch.inf) if num_padding else logits


class NoHead:
    """Head of a model that generates no text: it has this rank's part of the vocabulary, and no logits."""

    def __init__(self, load: LoadContext, vocab_size: int) -> None:
        self.shard = load.shard(vocab_size)

    def forward(self, x: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """Raise NotImplementedError: no row of such a model samples."""
        raise NotImplementedError("a model that is pooled has no logits")
