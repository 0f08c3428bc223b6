"""The choice of a library by an option: a name, which is refused if it does not fit, or ``auto``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ...proto.config import EngineConfig
from ...proto.errors import ConfigError
from .installed import Capability, Library

_log = logging.getLogger(__name__)


class LibraryBackend(Protocol):
    """A class that computes by a library."""

    library: ClassVar[Library]

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would compute no layer of a model on a GPU; empty if it computes some."""
        ...

    @classmethod
    def load(cls, device: torch.device) -> Any:
        """Import the installed library, and return an instance."""
        ...


B = TypeVar("B", bound=LibraryBackend)


def choose_library(
    option: str, wanted: str, backends: Sequence[type[B]], config: EngineConfig, device: torch.device
) -> B | None:
    """Return the first backend that fits, before weights are loaded. Returns None for the kernels of quire.

    Args:
        option: its name, for messages.
        wanted: its value: ``triton``, ``auto``, or the name of a library.

    Raises:
        ConfigError: the named library is not installed, or does not fit.
    """
    if wanted == "triton" or device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    for backend in backends:
        library = backend.library
        if wanted not in ("auto", library.option):
            continue
        problem = _find_problem(library, config, capability) or backend.find_problem(config, capability)
        if not problem:
            loaded: B = backend.load(device)
            return loaded
        if wanted != "auto":
            raise ConfigError(
                f"{option} is {wanted!r}, but {library.title} cannot be used: {problem}; choose auto or triton"
            )
        _log.info("%s is not used for %s: %s", library.title, library.use, problem)
    return None


def _find_problem(library: Library, config: EngineConfig, capability: Capability) -> str:
    if config.parallel.batch_invariant:
        return "its bits depend on the batch, and batch_invariant is on"
    return library.find_problem(capability)
