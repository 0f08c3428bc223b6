"""Compilation of constraints: the first backend that supports one compiles it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property

from .grammar import CompiledGrammar, GrammarBackend, GrammarSpec, UnsupportedConstraint
from .vocabulary import Vocabulary, read_vocabulary

XGRAMMAR, GUIDANCE, AUTO = "xgrammar", "guidance", "auto"

# Of a compiled grammar, which travels with its request to every rank and is read between two steps.
MAX_COMPILED_BYTES = 2 << 20

# Backend |-> its tag in a compiled grammar, its module and class; in the order in which they are asked (decision 17).
_BACKENDS: Mapping[str, tuple[bytes, str, str]] = {
    GUIDANCE: (b"g", ".guidance_backend", "GuidanceBackend"),
    XGRAMMAR: (b"x", ".xgrammar_backend", "XGrammarBackend"),
}
_BY_TAG = {tag: name for name, (tag, _, _) in _BACKENDS.items()}


class GrammarLibrary:
    """The grammar backends of one model. They and the vocabulary are loaded when a constraint needs them.

    Args:
        path: the model's directory.
        vocab_size: number of logits.
        stop_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, path: str, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        self._source = path, vocab_size, stop_ids
        self._backends: dict[str, GrammarBackend] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(*self._source)

    def compile(self, spec: GrammarSpec, backend: str = AUTO) -> bytes:
        """Return the compiled grammar, of the named backend or of the first that supports the constraint.

        Raises:
            UnsupportedConstraint: no backend supports it, or the model has no token that ends an output.
        """
        if not self._source[2]:
            raise UnsupportedConstraint(
                "the model has no end-of-sequence token, which ends what has the form"
            )
        problems = []
        for name in _names(backend):
            try:
                return _BACKENDS[name][0] + _check_size(self._backend(name).compile(spec))
            except UnsupportedConstraint as error:
                problems.append(f"{name}: {error}")
            except ImportError:
                problems.append(f"{name}: is not installed")
        raise UnsupportedConstraint("; ".join(problems))

    def prepare(self, backend: str = AUTO) -> None:
        """Load the backends that are installed, and the vocabulary, if `compile` can use them."""
        for name in _names(backend) if self._source[2] else ():
            with suppress(ImportError):
                self._backend(name)

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Return a grammar that `compile` made. Raises ValueError if another version of a library made it."""
        return self._backend(_BY_TAG[compiled[:1]]).load(compiled[1:])

    def _backend(self, name: str) -> GrammarBackend:
        if name not in self._backends:
            _, module, factory = _BACKENDS[name]
            make = getattr(importlib.import_module(module, __package__), factory)
            self._backends[name] = make(self.vocabulary)
        return self._backends[name]


def _names(backend: str) -> Iterable[str]:
    return _BACKENDS if backend == AUTO else (backend,)


def _check_size(compiled: bytes) -> bytes:
    if len(compiled) > MAX_COMPILED_BYTES:
        size = f"{len(compiled) / 2**20:.1f} MiB"
        raise UnsupportedConstraint(f"it is compiled to {size}, at most {MAX_COMPILED_BYTES >> 20} MiB")
    return compiled
