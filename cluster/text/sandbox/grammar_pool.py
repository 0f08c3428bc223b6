"""GrammarWorkers: a GrammarCompiler that works in processes of its own, so that no grammar holds up this one."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections import OrderedDict

from ....proto.config import EngineConfig
from ....proto.errors import InvalidRequest, Overloaded
from ....proto.structured_outputs import StructuredOutputsParams
from ..requests.grammar_compiler import grammar_spec
from .worker_process import WorkerProcess

# Tenants may use two at once. Each process starts when it is needed.
NUM_WORKERS = 3
# Processor time of one compilation.
COMPILE_TIME_S = 10
# From the task to its answer. The first task of a process loads the libraries, for 3 s on a busy machine.
TASK_TIMEOUT_S = 60.0
# Until a worker is free.
QUEUE_TIMEOUT_S = 30.0
# Compiled grammars and refusals that are kept.
MAX_CACHE_BYTES = 64 << 20
_ENTRY_BYTES = 1024  # of an entry beside its grammar


class GrammarWorkers:
    """Processes that compile the grammars of one model. Threads may share one; calls block.

    A worker that takes too long or ends is replaced. The processes start with the first constraint, and end with
    `close` or with this process.
    """

    def __init__(self, config: EngineConfig, num_workers: int = NUM_WORKERS) -> None:
        model = config.model
        arguments = json.dumps(
            [
                model.path,
                model.vocab_size,
                model.eos_token_ids,
                config.structured_outputs.structured_outputs_backend,
            ]
        )
        slots = [WorkerProcess(f"{__package__}.grammar_main", [arguments]) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for slot in slots:
            self._idle.put(slot)
        self._cache = _Cache()
        self._close = weakref.finalize(self, _close, slots)

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """Raises InvalidRequest if the limits do not suffice, Overloaded if no worker is free or answers in time."""
        spec = grammar_spec(params)
        key = json.dumps(spec, sort_keys=True)
        answer = self._cache.get(key)
        if answer is None:
            answer = self._run({"spec": spec, "time_s": COMPILE_TIME_S})
            self._cache.put(key, answer)
        if isinstance(answer, str):
            raise InvalidRequest(f"sampling.structured_outputs.{params.kind}", answer)
        return answer

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._close()

    def _run(self, task: dict[str, object]) -> bytes | str:
        """Return the compiled grammar, or the problem."""
        try:
            slot = self._idle.get(timeout=QUEUE_TIMEOUT_S)
        except queue.Empty:
            raise Overloaded(f"no process was free to compile the grammar in {QUEUE_TIMEOUT_S:g} s") from None
        try:
            answer = slot.run(task, TASK_TIMEOUT_S)
        except TimeoutError:
            # It had less processor time than it may use, or its process would have ended: the machine is busy.
            raise Overloaded(
                f"the process that compiles the grammar has not answered for {TASK_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._idle.put(slot)
        if answer is None:
            return f"needs more than {COMPILE_TIME_S} s or too much memory to be compiled; use a simpler one"
        compiled, problem = answer.get("compiled"), answer.get("problem")
        return f"is not supported: {problem}" if compiled is None else bytes(compiled)


class _Cache:
    """Answers by constraint, the latest ones up to MAX_CACHE_BYTES."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, bytes | str] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | str | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: str, answer: bytes | str) -> None:
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            self._num_bytes += _size(key, answer)
            while self._num_bytes > MAX_CACHE_BYTES:
                self._num_bytes -= _size(*self._answers.popitem(last=False))


def _size(key: str, answer: bytes | str) -> int:
    return len(key) + len(answer) + _ENTRY_BYTES


def _close(slots: list[WorkerProcess]) -> None:
    for slot in slots:
        slot.kill()
