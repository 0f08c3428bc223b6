"""GrammarCompiler: constraints to compiled grammars, in this process or elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol

from ....proto.config import EngineConfig
from ....proto.errors import ConfigError, InvalidRequest
from ....proto.structured_outputs import StructuredOutputsParams
from ....worker import GrammarLibrary, GrammarSpec, UnsupportedConstraint


class GrammarCompiler(Protocol):
    """Compiles constraints. Threads may share one."""

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """Return the compiled grammar.

        Raises:
            InvalidRequest: no backend supports the constraint.
        """
        ...


class LocalGrammarCompiler:
    """Compiles in the thread of the caller, without limits of time."""

    def __init__(self, config: EngineConfig) -> None:
        model = config.model
        self._library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
        self._backend = config.structured_outputs.structured_outputs_backend
        self._lock = threading.Lock()
        self._latest = (b"", GrammarSpec("", ""))

    def compile(self, params: StructuredOutputsParams) -> bytes:
        try:
            with self._lock:
                return self._compile(GrammarSpec(**grammar_spec(params)))
        except (UnsupportedConstraint, ConfigError) as error:
            field = f"sampling.structured_outputs.{params.kind}"
            raise InvalidRequest(field, f"is not supported: {error}") from error

    def _compile(self, spec: GrammarSpec) -> bytes:
        """Compile a constraint, unless it is the latest one: prompts of one call mostly share one, 0.6 ms each."""
        compiled, latest = self._latest
        if spec != latest:
            compiled = self._library.compile(spec, self._backend)
            self._latest = compiled, spec
        return compiled


def grammar_spec(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the fields of the GrammarSpec of a constraint."""
    return {
        "kind": params.kind,
        "text": params.text,
        "disable_any_whitespace": params.disable_any_whitespace,
        "disable_additional_properties": params.disable_additional_properties,
    }


def with_server_defaults(params: StructuredOutputsParams, config: EngineConfig) -> StructuredOutputsParams:
    """Return the constraint with the restrictions that the server adds."""
    defaults = config.structured_outputs
    return replace(
        params,
        disable_any_whitespace=params.disable_any_whitespace or defaults.disable_any_whitespace,
        disable_additional_properties=(
            params.disable_additional_properties or defaults.disable_additional_properties
        ),
    )
