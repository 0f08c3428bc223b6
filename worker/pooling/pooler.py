"""Pooler: pooled vectors of prompts, chunk by chunk with the prompts. Every rank has all hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.config import PoolingConfig
from ...proto.pooling import Pooled, PoolingParams
from ..memory.device_to_host import HostCopy
from ..memory.host_to_device import to_device
from .head import Head

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda vectors: vectors,
    "normalize": lambda vectors: F.normalize(vectors, dim=-1),
    "sigmoid": torch.sigmoid,
    "softmax": lambda vectors: torch.softmax(vectors, dim=-1),
}


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Chunks of pooled rows in a step.

    Attributes:
        rows: [C] int32.
        starts: [C], position of each chunk's first token in its prompt.
        lens: [C], tokens of each chunk.
        sources: [C], index of each chunk's first token among the step's T tokens.
        is_last: [C] bool, the chunk ends its prompt.
        params: of each chunk's row.
    """

    rows: IntArray
    starts: IntArray
    lens: IntArray
    sources: IntArray
    is_last: np.ndarray
    params: tuple[PoolingParams, ...]


def select_pooled_tokens(
    pooling: list[PoolingParams | None],
    rows: IntArray,
    starts: IntArray,
    lens: IntArray,
    sources: IntArray,
    prompt_lens: IntArray,
) -> PooledTokens | None:
    """Return the chunks of pooled rows. Returns None if there are none.

    Args:
        pooling: [R], the params of each row; None for rows that generate.
        rows: [C] rows that compute a chunk.
        starts, lens, sources: [C], as in PooledTokens.
        prompt_lens: [C], tokens of each row.
    """
    chunks = [index for index, row in enumerate(rows.tolist()) if pooling[row] is not None]
    if not chunks:
        return None
    chunks.sort(key=lambda index: int(rows[index]))
    params = (pooling[int(row)] for row in rows[chunks])
    return PooledTokens(
        rows[chunks],
        starts[chunks],
        lens[chunks],
        sources[chunks],
        (starts + lens >= prompt_lens)[chunks],
        tuple(each for each in params if each is not None),
    )


@dataclass(frozen=True, slots=True)
class LaunchedVectors:
    """Vectors that the device may still compute.

    Attributes:
        rows: [n] int32.
        lens: [n] int32, elements of each vector that count.
        copied: [n, width] float32.
    """

    rows: IntArray
    lens: IntArray
    copied: HostCopy

    def wait(self) -> Pooled:
        """Wait for the vectors and return them."""
        (vectors,) = self.copied.wait()
        counts = np.arange(vectors.shape[1]) < self.lens[:, None]
        return Pooled(self.rows, self.lens, vectors[counts])


class Pooler:
    """Pools the hidden states of rows.

    Args:
        head: of a classifier, or the layers of an embedder; None if the hidden state is the embedding.
        num_rows: rows of the batch.
        device: of the hidden states.
    """

    def __init__(self, config: PoolingConfig, head: Head | None, num_rows: int, device: torch.device) -> None:
        self._config = config
        self._head = head
        self._device = device
        # [R, E]: of each row whose prompt is not complete the first hidden state, or the sum of those so far.
        self._sums: Tensor | None = None
        if config.pooling_type != "last":
            self._sums = torch.zeros(num_rows, config.hidden_size, dtype=torch.float64, device=device)

    def pool(self, tokens: PooledTokens, hidden: Tensor) -> LaunchedVectors | None:
        """Add a step's hidden states; return the vectors of prompts that are complete, None if none is.

        Args:
            hidden: [T, E], after the last norm.
        """
        if self._sums is not None:
            self._add(self._sums, tokens, hidden)
        done = np.flatnonzero(tokens.is_last)
        if not done.size:
            return None
        vectors = self._take(tokens, done, hidden)
        params = [tokens.params[index] for index in done.tolist()]
        if self._head is not None:
            vectors = self._head.forward(vectors)
        lens = np.array([each.dimensions or vectors.shape[1] for each in params], np.int32)
        vectors = self._activate(self._cut(vectors, lens), params)
        return LaunchedVectors(tokens.rows[done], lens, HostCopy([vectors]))

    def _add(self, sums: Tensor, tokens: PooledTokens, hidden: Tensor) -> None:
        """Keep what a chunk contributes; the first chunk of a prompt overwrites the row's last sequence."""
        columns = (tokens.rows, tokens.starts, tokens.lens, tokens.sources)
        for row, start, length, source in zip(*(column.tolist() for column in columns), strict=True):
            if self._config.pooling_type == "mean":
                if start == 0:
                    sums[row] = 0
                # One after the other, as cumsum adds on a CPU: sums of chunks would depend on where chunks end.
                own = hidden[source : source + length].double()
                sums[row] = torch.cat((sums[row : row + 1], own)).cumsum(0)[-1]
            elif start == 0:
                sums[row] = hidden[source]

    def _take(self, tokens: PooledTokens, done: np.ndarray, hidden: Tensor) -> Tensor:
        """Return the pooled hidden states of complete prompts, [n, E] float32."""
        if self._sums is None:
            last = (tokens.sources + tokens.lens - 1)[done]
            return hidden.index_select(0, to_device(last, self._device, torch.int64)).float()
        pooled = self._sums.index_select(0, to_device(tokens.rows[done], self._device, torch.int64))
        if self._config.pooling_type == "mean":
            prompt_lens = (tokens.starts + tokens.lens)[done].astype(np.float32)
            pooled = pooled / to_device(prompt_lens, self._device, torch.float64).unsqueeze(1)
        return pooled.float()

    def _cut(self, vectors: Tensor, lens: IntArray) -> Tensor:
        """Set the elements behind the dimensions that were asked for to 0."""
        width = vectors.shape[1]
        if (lens == width).all():
            return vectors
        kept = torch.arange(width, device=self._device) < to_device(
            lens, self._device, torch.int64
        ).unsqueeze(1)
        return vectors * kept

    def _activate(self, vectors: Tensor, params: list[PoolingParams]) -> Tensor:
        activated = ACTIVATIONS[self._config.activation](vectors)
        is_wanted = np.array([each.use_activation for each in params])
        if is_wanted.all():
            return activated
        return torch.where(to_device(is_wanted, self._device, torch.bool).unsqueeze(1), activated, vectors)
