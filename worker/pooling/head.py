"""ScoreHead: the linear layer of a classifier or reward model, which every rank holds in full."""

from __future__ import annotations

import torch
from torch import Tensor

from ...proto.config import ModelConfig, PoolingConfig
from ...proto.errors import ModelLoadError
from ..models.load_context import LoadContext

# Names of the head in checkpoints of transformers, and of the matrix that maps hidden states to logits.
_HEAD, _LOGITS, _TIED_LOGITS = "score", "lm_head.weight", "model.embed_tokens.weight"


class ScoreHead:
    """Scores of classes, computed in float32.

    Args:
        weight: [labels, E] float32.
        bias: [labels] float32; None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, E] float32 -> [n, labels]."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias)


def read_head(load: LoadContext, model: ModelConfig, pooling: PoolingConfig) -> ScoreHead | None:
    """Read the head of a classifier. Returns None for a model that embeds.

    Raises:
        ModelLoadError: the checkpoint has none.
    """
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
