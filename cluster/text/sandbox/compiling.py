"""Operation of grammar workers: compiles a constraint."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack

from ....proto.errors import ConfigError
from ....worker import GrammarLibrary, GrammarSpec, UnsupportedConstraint
from .limits import limits, used_bytes

# Beyond what the idle process has.
MEMORY_BYTES = 1 << 30
# Processor time in which a rank reads a compiled grammar: between two steps, for which all its streams wait. Grammars
# of 73 schemas of users and of a test suite take 2.5 ms at most, one of 2,000 optional properties 1.4 s.
MAX_LOAD_S = 0.05


def prepare(setup: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the operation of a model.

    Args:
        setup: the model's directory, its number of logits, its end-of-sequence tokens and the backend.
    """
    path, vocab_size, stop_ids, backend = msgpack.unpackb(setup)
    return partial(_compile, GrammarLibrary(path, vocab_size, tuple(stop_ids)), backend)


def _compile(library: GrammarLibrary, backend: str, task: dict[str, Any]) -> dict[str, Any]:
    """Return the compiled grammar, or the problem."""
    try:
        library.prepare(backend)
        with limits(used_bytes() + MEMORY_BYTES, task["time_s"]):
            compiled = library.compile(GrammarSpec(**task["spec"]), backend)
            _check_load(library, compiled)
            return {"compiled": compiled}
    except (UnsupportedConstraint, ConfigError) as error:
        return {"problem": str(error)}
    except (MemoryError, RecursionError):
        return {"problem": "needs too much memory to be compiled"}


def _check_load(library: GrammarLibrary, compiled: bytes) -> None:
    started = time.thread_time()
    library.load(compiled)
    load_s = time.thread_time() - started
    if load_s > MAX_LOAD_S:
        limit = f"{MAX_LOAD_S * 1e3:g} ms; use a smaller one"
        raise UnsupportedConstraint(f"a rank needs {load_s * 1e3:.0f} ms to read it, at most {limit}")
