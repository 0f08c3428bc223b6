"""DraftHead: the interface of a head that drafts from the hidden states of the target model, and load_draft_head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ....kernels.draft_chain import DraftNetwork
from ....proto.config import ModelConfig, SpeculativeConfig
from ....proto.errors import ConfigError
from ...attention import AttentionInputs, LayerCache
from ..gemma.gemma3n import Gemma3nDecoder
from ..llama.decoder import Decoder
from ..load_context import LoadContext
from ..loader import Model
from .eagle3 import Eagle3Head
from .mtp import MtpHead


class DraftHead(Protocol):
    """One rank of a head. Pair p is token p + 1 and the hidden state of token p; it predicts token p + 2.

    Attributes:
        hidden_size: E.
        num_features: F, numbers of the target model's hidden states for each token.
    """

    hidden_size: int
    num_features: int

    def combine(self, features: Tensor) -> Tensor:
        """Return the hidden states [T, E] of pairs from the target model's, [T, F]."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
    ) -> Tensor:
        """Return the head's own hidden states, [T, E], which stand for those of the target model in the next pairs.

        Args:
            token_ids: [T] int32, the later tokens of the pairs.
            positions: [T] int64, of the pairs.
            hidden: [T, E].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits, [N, padded part of the target's vocabulary] float32; -inf for unknown tokens."""
        ...

    def to_draft_network(self) -> DraftNetwork | None:
        """Return the head for kernels.draft_chain. Returns None if a DraftNetwork cannot represent it."""
        ...


# method of speculative_config |-> the head's class
HEADS: dict[str, Callable[[LoadContext, ModelConfig, Decoder], DraftHead]] = {
    "eagle3": Eagle3Head,
    "mtp": MtpHead,
}


def load_draft_head(load: LoadContext, speculative: SpeculativeConfig, target: Model) -> DraftHead:
    """Build a head for the target model and load its weights.

    Raises:
        ConfigError: the target model or the head is not supported.
        ModelLoadError: the head's weights cannot be read.
    """
    config = speculative.draft
    assert config is not None
    if not isinstance(target, Decoder) or isinstance(target, Gemma3nDecoder):
        raise ConfigError(
            f"speculative_config: method {speculative.method!r} is for models that quire defines itself, "
            f"{config.name} is served with the modules of transformers"
        )
    return HEADS[speculative.method](load, config, target)
