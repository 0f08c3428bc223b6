"""A grammar worker's process: compiles for the gateway that started it, until its connection ends.

Arguments: the connection's file descriptor, and as JSON the model's directory, its number of logits, its
end-of-sequence tokens and the backend.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....proto.errors import ConfigError
from ....worker.structured.compilation import GrammarLibrary
from ....worker.structured.grammar import GrammarSpec, UnsupportedConstraint
from .frames import receive_frame, send_frame

# Beyond what the idle process has.
MEMORY_BYTES = 1 << 30
# Processor time in which a rank reads a compiled grammar: between two steps, for which all its streams wait. Grammars
# of 73 schemas of users and of a test suite take 2.5 ms at most, one of 2,000 optional properties 1.4 s.
MAX_LOAD_S = 0.05
# Running streams of the gateway come first.
_NICENESS = 5


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    path, vocab_size, stop_ids, backend = json.loads(sys.argv[2])
    library = GrammarLibrary(path, vocab_size, tuple(stop_ids))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    while (task := receive_frame(connection)) is not None:
        send_frame(connection, _answer(library, backend, task))


def _answer(library: GrammarLibrary, backend: str, task: dict[str, Any]) -> dict[str, Any]:
    """Return the compiled grammar, or the problem."""
    try:
        library.prepare(backend)
        with _limits(task["time_s"]):
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


@contextmanager
def _limits(time_s: int) -> Iterator[None]:
    """Limit memory and processor time. The process is ended if it uses more time: the compilers cannot be stopped."""
    memory, time = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_AS, (_used_bytes() + MEMORY_BYTES, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + time_s, time))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (time, time))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
