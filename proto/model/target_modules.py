"""TargetModules: the modules of a model that adapters may change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetModules:
    """Names of modules, or parts of their paths: ``q_proj``, ``self_attn`` and ``mlp.experts``, for example.

    Attributes:
        names: empty for all modules.
    """

    names: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Return whether adapters may change a module."""
        return not self.names or bool(self.found_in(module))

    def found_in(self, module: str) -> frozenset[str]:
        """Return those of the names that a module has."""
        return frozenset(name for name in self.names if f".{name}." in f".{module}.")
