"""A text worker's process: renders and tokenizes for the gateway that started it, until its connection ends.

Arguments: the connection's file descriptor, and that of the tokenizer's JSON.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from ..requests.chat_template import Rendering, TemplateError, render
from .frames import receive_frame, send_frame

# Memory beyond what the idle process has. Tokenizing 4 MB takes 1.2 GB.
RENDER_MEMORY_BYTES = 512 << 20
TOKENIZE_MEMORY_BYTES = 2 << 30
# Running streams of the gateway come first.
_NICENESS = 5


class TimeIsOver(BaseException):
    """The rendering has used up its time. Not an Exception, which `render` would take for the template's own."""


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    tokenizer = _load_tokenizer(int(sys.argv[2]))
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # for the gateway, which closes the connection when it stops
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _on_time_over)
    os.nice(_NICENESS)
    idle_bytes = _used_bytes()
    while (task := receive_frame(connection)) is not None:
        send_frame(connection, _answer(tokenizer, idle_bytes, task))


def _answer(tokenizer: Tokenizer, idle_bytes: int, task: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids and the end of the prompt, or the problem."""
    try:
        text = task.get("text")
        if text is None:
            with _limits(idle_bytes + RENDER_MEMORY_BYTES, task["render_time_s"]):
                rendering = Rendering(task["source"], task["variables"], task["ends_at_mark"])
                text = render(rendering, task["max_chars"])
        with _limits(idle_bytes + TOKENIZE_MEMORY_BYTES):
            ids = tokenizer.encode(text, task.get("pair"), add_special_tokens=task["add_special_tokens"]).ids
            return {"ids": array("i", ids).tobytes(), "end": text[-task["end_chars"] :]}
    except TemplateError as error:
        return {"template_error": str(error)}
    except TimeIsOver:
        return {"template_error": f"it has not ended within {task['render_time_s']:g} s of processor time"}
    except MemoryError:
        return {"error": "needs too much memory to be tokenized; send a shorter one"}


def _load_tokenizer(descriptor: int) -> Tokenizer:
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    return Tokenizer.from_str(text.decode())


@contextmanager
def _limits(memory_bytes: int, time_s: float = 0) -> Iterator[None]:
    """Limit the memory of the process, and if `time_s` is not 0 its processor time."""
    hard_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard_bytes))
    signal.setitimer(signal.ITIMER_PROF, time_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard_bytes, hard_bytes))


def _on_time_over(signal_number: int, frame: object) -> None:
    raise TimeIsOver


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
