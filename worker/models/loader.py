"""Model: the interface of a model to the runner, and load_model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from ...kernels.draft_chain import DraftNetwork
from ...kernels.lora import LoraGroups
from ...proto.config import ModelConfig
from ...proto.errors import ConfigError
from ...proto.model.families.gemma import Gemma3n, Gemma4
from ...proto.model.families.longcat import LongcatFlash
from ...proto.model.families.muse_spark import MuseSpark
from ...proto.model.families.zamba import Zamba
from ...proto.model.families.zaya import Zaya
from ...proto.model.registry import check_supported
from ...proto.model.spec import DecoderSpec
from ...proto.model.streams import GatedStreams, Streams
from ...proto.options.sections import ALL_REDUCE, ALL_TO_ALL, DEEPEP_LOW_LATENCY
from ..attention import AttentionInputs, LayerCache
from ..comm.deep_ep import open_deep_ep
from ..comm.expert_exchange import AllToAll, ExpertExchange
from .aux_states import AuxStates
from .gemma.gemma3n import Gemma3nDecoder
from .gemma.gemma4 import Gemma4Decoder
from .llama.decoder import Decoder
from .load_context import LoadContext
from .longcat import LongcatDecoder
from .media_embeddings import MediaEmbeddings
from .moe.expert_layers import ExpertLayers
from .moe.moe import MixtureOfExperts
from .muse_spark import MuseSparkDecoder
from .output_tokens import OutputTokens
from .streams import GatedStreamsDecoder, StreamsDecoder
from .vision.encoder import ignore_encoder
from .vocab_parallel import NoHead, VocabParallelHead
from .zamba import ZambaDecoder
from .zaya import ZayaDecoder

# Of the tensors of a text model within a model that also reads images, in published checkpoints and in those of
# transformers 5.
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.")

# Class of DecoderSpec.variant |-> decoder.
_DECODERS: dict[type, type[Decoder]] = {
    Gemma3n: Gemma3nDecoder,
    Gemma4: Gemma4Decoder,
    GatedStreams: GatedStreamsDecoder,
    LongcatFlash: LongcatDecoder,
    MuseSpark: MuseSparkDecoder,
    Streams: StreamsDecoder,
    Zamba: ZambaDecoder,
    Zaya: ZayaDecoder,
}


class Model(Protocol):
    """One rank of a model: token ids to hidden states to logits.

    Attributes:
        supports_graphs: a step can be recorded as a graph, because launching it reads nothing back from the device.
        gathers_keys: attention gathers the keys of whole sequences, so that a recorded step takes the time of the
            longest sequences that it may have.
        supports_outputs: `forward` can compute the hidden states of some tokens only.
        reserved_bytes: of a GPU, that a step may need beyond one of as many tokens in short sequences.
    """

    supports_graphs: bool
    gathers_keys: bool
    supports_outputs: bool
    reserved_bytes: int

    @property
    def head(self) -> VocabParallelHead | NoHead:
        """The head, which knows this rank's part of the vocabulary."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """Return hidden states of a step's tokens after the last norm, [T, E].

        Args:
            token_ids: [T] int32.
            positions: [T] int64.
            kv_caches: by layer.
            aux: collects hidden states between layers; only for models that quire defines itself.
            outputs: return the hidden states of these tokens only, [N, E]; requires `supports_outputs`.
        """
        ...

    def logits(self, hidden: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """Return this rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32.

        Args:
            adapted: the rows of `hidden` with an adapter; None for none.
        """
        ...

    def to_draft_network(self) -> DraftNetwork | None:
        """Return the model for kernels.draft_chain. Returns None if a DraftNetwork cannot represent it."""
        ...

    def selfcheck(self) -> None:
        """Check that the model runs on paged caches; called on all ranks together, before the first step.

        Raises:
            ConfigError: the check failed.
        """
        ...


@runtime_checkable
class ReadsMedia(Protocol):
    """A Model that takes the embeddings of images."""

    reads_media: bool

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
        media: MediaEmbeddings | None = None,
    ) -> Tensor:
        """Return hidden states as Model.forward does.

        Args:
            positions: [T] int64, or [3, T] for multi-dimensional rotary positions.
            media: embeddings that stand in the place of those of image tokens; None if the step has none.
        """
        ...


def load_model(load: LoadContext, model: ModelConfig) -> Model:
    """Build the model and load its weights.

    Raises:
        ConfigError: the model is not supported.
        ModelLoadError: its weights cannot be read.
    """
    spec = check_supported(model, load.comm.size, expert_parallel=load.expert_parallel)
    if isinstance(spec, DecoderSpec):
        name_tensors(load, spec, model)
        load = _with_whole_experts(load, spec)
        load = replace(load, exchange=_open_exchange(load, spec))
        decoder = _DECODERS.get(type(spec.variant), Decoder)
        if issubclass(decoder, Gemma3nDecoder | StreamsDecoder | ZayaDecoder):
            _refuse_fused_all_reduce(load, model)
        return decoder(load, spec, model.max_model_len, has_head=model.generates)
    _refuse_fused_all_reduce(load, model)
    # transformers is slow to import, and models that quire defines itself do not need it.
    from .transformers.transformers_model import TransformersModel

    return TransformersModel(load, spec, model)


def read_more_experts(
    load: LoadContext, model: ModelConfig, mixtures: Mapping[int, tuple[MixtureOfExperts, Sequence[int]]]
) -> dict[int, ExpertLayers]:
    """Read experts of some layers of a model that is loaded. Raises ModelLoadError.

    Args:
        mixtures: layer |-> its mixture, and the experts to read.
    """
    spec = check_supported(model, load.comm.size, expert_parallel=load.expert_parallel)
    assert isinstance(spec, DecoderSpec), "models of transformers have no mixtures of quire's"
    name_tensors(load, spec, model)
    load = _with_whole_experts(load, spec)
    return {layer: mixture.read_more(load, experts) for layer, (mixture, experts) in mixtures.items()}


def _with_whole_experts(load: LoadContext, spec: DecoderSpec) -> LoadContext:
    if spec.experts is None or not spec.experts.are_whole:
        return load
    return replace(load, expert_parallel=True)


def name_tensors(load: LoadContext, spec: DecoderSpec, model: ModelConfig) -> None:
    """Give the tensors of a checkpoint the names that a Decoder reads them by."""
    ignore_encoder(load)  # it is read before, if at all
    _name_as_text_model(load)
    _rename_tensors(load, spec)
    if not model.generates:
        _name_as_causal(load)


def _open_exchange(load: LoadContext, spec: DecoderSpec) -> ExpertExchange | None:
    """Open the way of tokens to their experts, on all ranks together. Returns None for SumOfRanks."""
    backend, experts = load.all2all_backend, spec.experts
    if backend == ALL_REDUCE or experts is None:
        return None
    num_slots = experts.count + load.num_redundant_experts
    attention = load.attention if load.dp_attention else None
    if backend == ALL_TO_ALL:
        return AllToAll(load.comm, num_slots, attention, by_choice=load.balances_experts)
    if experts.scaled_inputs and backend == DEEPEP_LOW_LATENCY:
        raise ConfigError(f"all2all_backend is {backend}, which cannot scale the inputs of experts")
    width = experts.latent_size or spec.hidden_size
    return open_deep_ep(load.comm, backend, num_slots, width, load.max_tokens, load.device, attention)


def _refuse_fused_all_reduce(load: LoadContext, model: ModelConfig) -> None:
    if load.sums is not None:
        raise ConfigError(f"{model.name}: fused_all_reduce does not support {model.architecture}")


def _name_as_text_model(load: LoadContext) -> None:
    """Name the tensors of a text model that is part of another as if it were alone; ignore all other tensors."""
    checkpoint = load.checkpoint
    prefixes = [prefix for prefix in _TEXT_PREFIXES if checkpoint.has(f"{prefix}embed_tokens.weight")]
    if not prefixes:
        return
    for name in checkpoint.names():
        if name.startswith(prefixes[0]):
            checkpoint.rename(name, "model." + name.removeprefix(prefixes[0]))
        elif name.startswith("language_model.lm_head."):
            checkpoint.rename(name, name.removeprefix("language_model."))
        elif not name.startswith("lm_head."):
            checkpoint.ignore(name)


def _rename_tensors(load: LoadContext, spec: DecoderSpec) -> None:
    """Give tensors the names that they have in transformers, where published checkpoints have others."""
    for stored in load.checkpoint.names() if spec.names.renames else ():
        name = stored
        for pattern, replacement in spec.names.renames:
            name = re.sub(pattern, replacement, name)
        if name != stored:
            load.checkpoint.rename(stored, name)


def _name_as_causal(load: LoadContext) -> None:
    """Name the tensors of a checkpoint of a model without a head as those of one that generates."""
    checkpoint = load.checkpoint
    if checkpoint.has("model.embed_tokens.weight"):
        return
    for name in checkpoint.names():
        checkpoint.rename(name, f"model.{name}")
