"""Heads of pooled hidden states: a classifier's or reward model's linear layer, or the layers of an embedder.

Every rank holds them in full, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.linear import linear, pack
from ...proto.config import DenseConfig, ModelConfig, PoolingConfig
from ...proto.errors import ModelLoadError
from ..models.load_context import LoadContext
from ..weights.checkpoint import Checkpoint

# Names of the head in checkpoints of transformers, and of the matrix that maps hidden states to logits.
_HEAD, _LOGITS, _TIED_LOGITS = "score", "lm_head.weight", "model.embed_tokens.weight"


# DenseConfig.activation |-> function.
_DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class Head(Protocol):
    """Function of pooled hidden states."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, E] float32 -> [n, width]."""
        ...


class ScoreHead:
    """Scores of classes.

    Args:
        weight: [labels, E] float32.
        bias: [labels] float32; None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = pack(weight), bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, E] float32 -> [n, labels]."""
        return linear(hidden, self.weight, self.bias)


class DenseLayers:
    """The linear layers of an embedder, one after the other.

    Args:
        layers: weight, bias and activation of each.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]]) -> None:
        self._layers = [(pack(weight), bias, activation) for weight, bias, activation in layers]

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, E] float32 -> [n, out_features of the last layer]."""
        for weight, bias, activation in self._layers:
            hidden = activation(linear(hidden, weight, bias))
        return hidden


def read_head(load: LoadContext, model: ModelConfig, pooling: PoolingConfig) -> Head | None:
    """Read the head of a classifier, or the layers of an embedder. Returns None if there are none.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """
    if pooling.dense:
        layers = [_read_dense(Path(model.path), dense, load.device) for dense in pooling.dense]
        return DenseLayers(layers)
    if not pooling.classifies:
        return None
    if pooling.token_ids:
        return ScoreHead(_read_token_weight(load, model, pooling), None)
    num_labels = len(pooling.labels)
    weight = load.replicated(f"{_HEAD}.weight", num_labels, pooling.hidden_size).float()
    bias = None
    if load.checkpoint.has(f"{_HEAD}.bias"):
        bias = load.replicated(f"{_HEAD}.bias", num_labels).float()
    return ScoreHead(weight, bias)


def _read_dense(
    folder: Path, dense: DenseConfig, device: torch.device
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Read a layer from its folder, which has the files of a checkpoint."""
    with closing(Checkpoint(folder / dense.folder)) as checkpoint:
        shape = dense.out_features, dense.in_features
        weight = torch.empty(shape, dtype=torch.float32, device=device)
        checkpoint.read_into(weight, "linear.weight", shape)
        bias = None
        if dense.has_bias:
            bias = torch.empty(shape[:1], dtype=torch.float32, device=device)
            checkpoint.read_into(bias, "linear.bias", shape[:1])
        checkpoint.check_all_read()
    return weight, bias, _DENSE_ACTIVATIONS[dense.activation]


def _read_token_weight(load: LoadContext, model: ModelConfig, pooling: PoolingConfig) -> Tensor:
    """Return the row of the logits' matrix for the first token, less that for the second one, [1, E]."""
    name = next((each for each in (_LOGITS, _TIED_LOGITS) if load.checkpoint.has(each)), None)
    if name is None:
        raise ModelLoadError(f"{model.name}: has neither {_LOGITS} nor {_TIED_LOGITS}")
    shape = model.vocab_size, pooling.hidden_size
    rows = []
    for token_id in pooling.token_ids:
        row = load.empty(1, pooling.hidden_size)
        load.checkpoint.read_into(row, name, shape, 0, token_id)
        rows.append(row.float())
    return rows[0] if len(rows) == 1 else rows[0] - rows[1]
