"""A logits processor that adds a bias to tokens with even ids. `pip install examples/logits_processor` offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.worker.sampling.custom_processors import ProcessedRow, ProcessorContext


class EvenTokens:
    """Adds `bias` to the logits of tokens with even ids."""

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size

    def start(self, arguments: Any, prompt_token_ids: Any) -> float:
        """Return the bias of a request."""
        if not isinstance(arguments, dict) or not isinstance(arguments.get("bias"), int | float):
            raise ValueError(f'arguments are {arguments!r}, must be like {{"bias": 2}}')
        return float(arguments["bias"])

    def apply(self, logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
        """Add each row's bias."""
        logits[:, ::2] += logits.new_tensor([[row.state] for row in rows])
        return logits
