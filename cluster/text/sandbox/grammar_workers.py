"""GrammarWorkers: a GrammarCompiler that works in processes of its own, so that no grammar holds up this one."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

import msgpack

from ....proto.config import EngineConfig
from ....proto.errors import InvalidRequest, Overloaded
from ....proto.structured_outputs import StructuredOutputsParams
from ..requests.grammar_compiler import grammar_spec
from .worker_pool import LimitExceeded, WorkerPool

# Tenants may use two at once.
NUM_WORKERS = 3
# Processor time of one compilation.
COMPILE_TIME_S = 10
# From the task to its result. The first task of a process loads the libraries, for 3 s on a busy machine.
TASK_TIMEOUT_S = 60.0
# Compiled grammars and refusals that are kept.
MAX_CACHE_BYTES = 64 << 20
_ENTRY_BYTES = 1024  # of an entry beside its grammar


class GrammarWorkers(WorkerPool):
    """Processes that compile the grammars of one model. Threads may share one; calls block."""

    def __init__(self, config: EngineConfig, num_workers: int = NUM_WORKERS) -> None:
        model, backend = config.model, config.structured_outputs.structured_outputs_backend
        setup = msgpack.packb((model.path, model.vocab_size, model.eos_token_ids, backend))
        super().__init__("compile", setup, num_workers, "compile the grammar")
        self._cache = _Cache()

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """Raises InvalidRequest if the limits do not suffice, and the errors of `run` that are no fault of it."""
        spec = grammar_spec(params)
        key = json.dumps(spec, sort_keys=True)
        result = self._cache.get(key)
        if result is None:
            result = self._compile({"spec": spec, "time_s": COMPILE_TIME_S})
            self._cache.put(key, result)
        if isinstance(result, str):
            raise InvalidRequest(f"sampling.structured_outputs.{params.kind}", result)
        return result

    def _compile(self, task: dict[str, object]) -> bytes | str:
        """Return the compiled grammar, or the problem."""
        try:
            result = self.run(task, TASK_TIMEOUT_S)
        except TimeoutError:
            # It had less processor time than it may use, or its process would have ended: the machine is busy.
            raise Overloaded(
                f"the process that compiles the grammar has not answered for {TASK_TIMEOUT_S:g} s"
            ) from None
        except LimitExceeded:
            return f"needs more than {COMPILE_TIME_S} s or too much memory to be compiled; use a simpler one"
        compiled, problem = result.get("compiled"), result.get("problem")
        return f"is not supported: {problem}" if compiled is None else bytes(compiled)


class _Cache:
    """Answers by constraint, the latest ones up to MAX_CACHE_BYTES."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, bytes | str] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | str | None:
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
            return result

    def put(self, key: str, result: bytes | str) -> None:
        with self._lock:
            if key in self._results:
                return
            self._results[key] = result
            self._num_bytes += _size(key, result)
            while self._num_bytes > MAX_CACHE_BYTES:
                self._num_bytes -= _size(*self._results.popitem(last=False))


def _size(key: str, result: bytes | str) -> int:
    return len(key) + len(result) + _ENTRY_BYTES
