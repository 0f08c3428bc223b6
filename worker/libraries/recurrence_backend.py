"""RecurrenceBackend: what computes the delta rules of layers with states, and its choice by an option."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.recurrence import linear_attention
from ...kernels.state_runs import StateRuns
from ...proto.config import EngineConfig
from .choice import choose_library
from .flash_linear_attention import FlashLinearAttention

_log = logging.getLogger(__name__)


class RecurrenceBackend(Protocol):
    """Library that computes the delta rule of gated delta nets and Kimi delta attention."""

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        runs: StateRuns,
        scale: float,
    ) -> Tensor:
        """Return `linear_attention` of these arguments."""
        ...

    def describe(self) -> str:
        """Return what has computed the delta rules so far."""
        ...


class OwnRecurrence:
    """RecurrenceBackend by the kernels of quire."""

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        runs: StateRuns,
        scale: float,
    ) -> Tensor:
        return linear_attention(q, k, v, log_decay, beta, states, runs, scale)

    def describe(self) -> str:
        return "Triton kernels"


OWN_RECURRENCE = OwnRecurrence()
BACKENDS = (FlashLinearAttention,)


def choose_recurrence(config: EngineConfig, device: torch.device) -> RecurrenceBackend:
    """Return what computes a rank's delta rules; see choose_library."""
    wanted = config.parallel.linear_attention_backend
    return choose_library("linear_attention_backend", wanted, BACKENDS, config, device) or OWN_RECURRENCE


def log_recurrence(backend: RecurrenceBackend) -> None:
    """Log what has computed the delta rules of the steps that have run so far."""
    _log.info("delta rules: %s", backend.describe())
