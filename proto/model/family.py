"""Family: properties of an architecture that its Hugging Face configuration does not contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from .attention import QkNorm
from .experts import ExpertFields
from .spec import LayerSpec, Names, Norms


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Fields of an architecture's configuration: the eps of norms, the activation, and whether parts have biases.

    Attributes:
        output_bias: of the attention's output; None if it has no bias.
        qk_norm: tells whether there is a norm of queries and keys; None if there always is.
        head_bias: None if the head has no bias.
    """

    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    qkv_bias: str = "attention_bias"
    output_bias: str | None = "attention_bias"
    mlp_bias: str = "mlp_bias"
    qk_norm: str | None = None
    head_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that its configuration does not contain.

    Attributes:
        qkv_bias: the q, k and v projections have biases; None to read the fields, also for the output.
        mlp_names, fused_gate_up: as in MlpSpec.
        interleaved_rope: as AttentionSpec.interleaved.
        experts: None for dense architectures.
        full_layers_unrotated: layers without a window have no positions, unless no layer has a window.
        normalizes_embeddings: as in DecoderSpec.
        all_layers_windowed: ``sliding_window`` applies to every layer, regardless of ``layer_types``.
        is_latent: has multi-head latent attention.
        cached_field: the field with the numbers that a token is cached as, the same on every rank; None if it is
            cached as latents or as keys and values of heads.
        indexer_interleaved: as for read_mla; None if there are no indexers.
        count_index_keys: returns MlaSpec.num_index_keys of a configuration; None if it is 1.
        adapt: returns a configuration with the field names that the other families have.
        change_layers: returns the layers with what only this family reads from its (adapted) configuration.
        read_variant: returns DecoderSpec.variant of an adapted configuration.
        unused_prefixes: names of tensors of published checkpoints that are not read begin with one of these.
        read_unused: returns further ones of an adapted configuration.

    The other fields are those of the specs.
    """

    fields: FieldNames = field(default_factory=FieldNames)
    qkv_bias: bool | None = None
    qk_norm: QkNorm | None = None
    norms: Norms = field(default_factory=Norms)
    mlp_names: tuple[str, str] | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved_rope: bool = False
    parallel_residual: bool = False
    has_sinks: bool = False
    experts: ExpertFields | None = None
    full_layers_unrotated: bool = False
    normalizes_embeddings: bool = False
    all_layers_windowed: bool = False
    is_latent: bool = False
    cached_field: str | None = None
    indexer_interleaved: bool | None = None
    count_index_keys: Callable[[dict[str, Any]], int] | None = None
    names: Names = field(default_factory=Names)
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    change_layers: Callable[[ModelConfig, Sequence[LayerSpec]], Sequence[LayerSpec]] | None = None
    read_variant: Callable[[dict[str, Any]], object] | None = None
    unused_prefixes: tuple[str, ...] = ()
    read_unused: Callable[[dict[str, Any]], tuple[str, ...]] | None = None
