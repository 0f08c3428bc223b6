"""What a rank computes: a model as the runner sees it, and how one is made."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from ..attention import AttentionInputs, LayerCache
from .decoder import Decoder
from .layers import LoadContext, VocabParallelHead
from .registry import check_supported
from .spec import DecoderSpec


class Model(Protocol):
    """Token ids to hidden states to logits, on one rank.

    Attributes:
        can_be_recorded: a step is launched without reading numbers back from the device.
    """

    head: VocabParallelHead
    can_be_recorded: bool

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], inputs: AttentionInputs
    ) -> Tensor:
        """Hidden states of a step's tokens after the last norm, [T, E].

        Args:
            token_ids: [T] int32.
            positions: [T] int64.
            kv_caches: a layer each.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        ...

    def check(self) -> None:
        """Called once on all ranks together, before the first step. Raises ConfigError if the model cannot be
        trusted with steps."""
        ...


def build_model(load: LoadContext, model: ModelConfig) -> Model:
    """The model with its weights.

    Raises:
        ConfigError: it is not supported.
        ModelLoadError: its weights cannot be read.
    """
    spec = check_supported(model, load.comm.size)
    if isinstance(spec, DecoderSpec):
        return Decoder(load, spec, model.max_model_len)
    if load.fused_all_reduce:
        raise ConfigError(f"{model.name}: fused_all_reduce is for models that quire defines itself")
    # transformers takes its time to import, and most models do without.
    from .transformers_model import TransformersModel

    return TransformersModel(load, spec, model)
