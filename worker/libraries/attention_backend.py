"""AttentionBackend: what computes a rank's attention, and its choice by the option attention_backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ..attention import OWN_ATTENTION, AttentionInputs, StepAttention
from .choice import choose_library
from .flash_attention import FlashAttention
from .flashinfer import FlashInfer

_log = logging.getLogger(__name__)


class GraphAttention(Protocol):
    """The attention of the decodes of recorded steps, which are planned on the host before each replay."""

    def of_decodes(self, num_decodes: int) -> StepAttention:
        """Return the attention of recorded steps with so many decodes."""
        ...

    def plan(self, num_decodes: int, block_tables: Sequence[Tensor], lens: IntArray) -> None:
        """Plan the next replay of such a step, or the step that is recorded next.

        Args:
            block_tables: of each cache group, [num_decodes or more, M]; the recorded step reads the same ones.
            lens: of the first sequences; the others are padding.
        """
        ...


class AttentionBackend(Protocol):
    """Library that computes the attention of a rank's steps.

    Attributes:
        reads_lens: steps are planned from their lengths on the host, which waits for those that it does not know.
    """

    reads_lens: bool

    def begin_step(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs of a step that is launched kernel by kernel, with what computes its attention."""
        ...

    def for_graphs(self) -> GraphAttention:
        """Return the attention of recorded steps, which lives as long as the recordings."""
        ...

    def describe(self) -> str:
        """Return what has computed the attention of the steps so far."""
        ...


class OwnBackend:
    """AttentionBackend and GraphAttention by the kernels of quire, which need no plan."""

    reads_lens = False

    def begin_step(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs

    def for_graphs(self) -> OwnBackend:
        return self

    def of_decodes(self, num_decodes: int) -> StepAttention:
        return OWN_ATTENTION

    def plan(self, num_decodes: int, block_tables: Sequence[Tensor], lens: IntArray) -> None:
        pass

    def describe(self) -> str:
        return "Triton kernels"


OWN_BACKEND = OwnBackend()
# The first that fits is chosen by `auto`.
BACKENDS: tuple[type[FlashInfer] | type[FlashAttention], ...] = (FlashInfer, FlashAttention)


def choose_attention(config: EngineConfig, device: torch.device) -> AttentionBackend:
    """Return what computes a rank's attention; see choose_library."""
    wanted = config.parallel.attention_backend
    return choose_library("attention_backend", wanted, BACKENDS, config, device) or OWN_BACKEND


def log_attention(backend: AttentionBackend) -> None:
    """Log what computed the attention of the steps that have run so far, on every layer."""
    _log.info("attention: %s", backend.describe())
