"""LinearBackend: what multiplies by the weights of linear layers, and its choice by the option linear_backend."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from ...proto.config import EngineConfig
from ..weights.linear_weight import LinearWeight, StackedWeight
from .choice import choose_library
from .deep_gemm import DeepGemm

_log = logging.getLogger(__name__)


class LinearBackend(Protocol):
    """Library that multiplies by the weights of linear layers."""

    def convert(self, weight: LinearWeight) -> LinearWeight:
        """Return the weight in a form that the library multiplies by; unchanged if it has none."""
        ...

    def describe(self) -> str:
        """Return what multiplies by the weights that have been read so far."""
        ...


class OwnLinear:
    """LinearBackend by the kernels of quire, and of torch."""

    def convert(self, weight: LinearWeight) -> LinearWeight:
        return weight

    def describe(self) -> str:
        return "Triton kernels and torch"


OWN_LINEAR = OwnLinear()
BACKENDS = (DeepGemm,)


def choose_linear(config: EngineConfig, device: torch.device) -> LinearBackend:
    """Return what multiplies by a rank's linear layers; see choose_library."""
    wanted = config.parallel.linear_backend
    return choose_library("linear_backend", wanted, BACKENDS, config, device) or OWN_LINEAR


def convert_linear(backend: LinearBackend, weight: LinearWeight) -> LinearWeight:
    """Convert a weight, or the parts of one whose parts have different quantization."""
    if isinstance(weight, StackedWeight):
        return StackedWeight(tuple(backend.convert(part) for part in weight.weights))
    return backend.convert(weight)


def log_linear(backend: LinearBackend) -> None:
    """Log what multiplies by the linear layers."""
    _log.info("linear layers: %s", backend.describe())
