"""ExpertsBackend: what multiplies by the experts of a mixture, and its choice by the option moe_backend."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.activation import GatedActivation
from ...kernels.moe import ExpertChoices, ExpertWeights
from ...proto.config import EngineConfig
from .choice import choose_library
from .deep_gemm import DeepGemmExperts

_log = logging.getLogger(__name__)


class LibraryExperts(Protocol):
    """The experts of one layer in the form of a library, which computes some of the steps."""

    def suits(self, num_choices: int) -> bool:
        """Return whether it computes a step with so many choices of experts."""
        ...

    def forward(
        self, x: Tensor, choices: ExpertChoices, factors: Tensor, activation: GatedActivation
    ) -> Tensor:
        """Return the sum of the experts' results, [T, E]; see BlockFloat8Experts."""
        ...


class ExpertsBackend(Protocol):
    """Library that multiplies by the experts of a mixture."""

    def convert(self, gate_up: ExpertWeights, down: ExpertWeights) -> LibraryExperts | None:
        """Return the experts in the form of the library, which shares their memory; None if it has none for them."""
        ...

    def describe(self) -> str:
        """Return what multiplies by the experts that have been read so far."""
        ...


class OwnExperts:
    """ExpertsBackend by the kernels of quire."""

    def convert(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        return None

    def describe(self) -> str:
        return "Triton kernels"


OWN_EXPERTS = OwnExperts()
BACKENDS = (DeepGemmExperts,)


def choose_experts(config: EngineConfig, device: torch.device) -> ExpertsBackend:
    """Return what multiplies by a rank's experts; see choose_library."""
    return choose_library("moe_backend", config.parallel.moe_backend, BACKENDS, config, device) or OWN_EXPERTS


def log_experts(backend: ExpertsBackend) -> None:
    """Log what multiplies by the experts."""
    _log.info("experts: %s", backend.describe())
